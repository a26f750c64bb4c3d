//! Memory of this process that peers may read and write.

use std::cell::RefCell;
use std::rc::Rc;

use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::inner::Inner;
use crate::regions::Rights;
use crate::remote::RemoteRegion;

/// Registered memory. Permitted peers read and write it while this end's worker is polled, without the application.
/// Dropping it deregisters the memory.
#[derive(Debug)]
pub struct Region {
    pub(crate) inner: Rc<RefCell<Inner>>,
    pub(crate) key: u64,
    pub(crate) len: usize,
}

impl Region {
    /// Length, bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the length is 0.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Permits the peer of an endpoint to access the region, or changes its permission.
    ///
    /// # Errors
    /// When the endpoint belongs to another worker, or its connection has ended.
    pub fn allow(&self, endpoint: &Endpoint, rights: Rights) -> Result<RemoteRegion, Error> {
        let same = Rc::ptr_eq(&self.inner, &endpoint.inner);
        let allowed = same && self.inner.borrow_mut().host.allow(self.key, endpoint.id, rights);
        if !allowed {
            return Err(Error::Closed { peer: endpoint.peer, why: "it is not a connection of this region's worker" });
        }
        Ok(RemoteRegion { key: self.key, len: self.len as u64 })
    }

    /// Withdraws the permission of an endpoint's peer.
    pub fn revoke(&self, endpoint: &Endpoint) {
        if Rc::ptr_eq(&self.inner, &endpoint.inner) {
            self.inner.borrow_mut().host.revoke(self.key, endpoint.id);
        }
    }

    /// Copies data out of the region.
    ///
    /// # Errors
    /// [`Error::Range`].
    pub fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<(), Error> {
        let inner = self.inner.borrow();
        let range = self.range(offset, into.len())?;
        let bytes = inner.host.memory(self.key).and_then(|memory| memory.get(range));
        into.copy_from_slice(bytes.ok_or_else(|| self.outside(offset, into.len()))?);
        Ok(())
    }

    /// Copies data into the region, where peers can read it.
    ///
    /// # Errors
    /// [`Error::Range`].
    pub fn write_at(&self, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        let mut inner = self.inner.borrow_mut();
        let range = self.range(offset, bytes.len())?;
        let memory = inner.host.memory_mut(self.key).and_then(|memory| memory.get_mut(range));
        memory.ok_or_else(|| self.outside(offset, bytes.len()))?.copy_from_slice(bytes);
        Ok(())
    }

    /// Deregisters the memory and returns it: no peer accesses it any more.
    #[must_use]
    pub fn into_vec(self) -> Vec<u8> {
        self.inner.borrow_mut().host.deregister_memory(self.key).unwrap_or_default()
    }

    fn range(&self, offset: usize, len: usize) -> Result<std::ops::Range<usize>, Error> {
        let end = offset.checked_add(len).ok_or_else(|| self.outside(offset, len))?;
        Ok(offset..end)
    }

    fn outside(&self, offset: usize, len: usize) -> Error {
        Error::Range { offset: offset as u64, len: len as u64, region: self.len as u64 }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // Has no effect if it was deregistered before.
        drop(self.inner.borrow_mut().host.deregister_memory(self.key));
    }
}
