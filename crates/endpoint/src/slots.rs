//! Memory of receive requests: slots in one region.

use bifrost_verbs::{Access, Domain, PostError, Provider, Qpn, ReceiveRequest, Region, Slice, VerbsError};

/// Slots of equal length.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slots {
    region: Region,
    len: u32,
    count: u32,
}

impl Slots {
    /// Registers `count` slots of `len` bytes. Their memory is not touched before data arrives.
    pub(crate) fn new(provider: &mut impl Provider, domain: Domain, len: u32, count: u32) -> Result<Self, VerbsError> {
        let memory = vec![0; len as usize * count as usize];
        let region = provider.register(domain, Access::Local, memory).map_err(|(error, _)| error)?;
        Ok(Self { region, len, count })
    }

    /// Deregisters the memory.
    pub(crate) fn release(&self, provider: &mut impl Provider) {
        drop(provider.deregister(self.region.key));
    }

    pub(crate) fn slice(&self, slot: u32) -> Slice {
        Slice { key: self.region.key, offset: (slot % self.count) * self.len, len: self.len }
    }

    /// Posts one slot; its token is `token` plus the slot.
    pub(crate) fn post(
        &self,
        provider: &mut impl Provider,
        queue_pair: Qpn,
        token: u64,
        slot: u32,
    ) -> Result<(), PostError> {
        provider.post_receive(queue_pair, ReceiveRequest { token: token | u64::from(slot), slice: self.slice(slot) })
    }

    /// Posts all slots.
    pub(crate) fn post_all(&self, provider: &mut impl Provider, queue_pair: Qpn, token: u64) -> Result<(), PostError> {
        (0..self.count).try_for_each(|slot| self.post(provider, queue_pair, token, slot))
    }
}
