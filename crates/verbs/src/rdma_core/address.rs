//! Addresses: paths, and destinations and sources of datagrams.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ptr;

use bifrost_rnic::PostError;
use hashbrown::HashMap;

use super::library::Functions;
use super::sys::{Ah, AhAttr, Gid, Pd};

/// The flow label for which a NIC uses a UDP source port, which is at least 49,152 (IBTA annex A17.9.2, as in Linux:
/// `rdma_flow_label_to_udp_sport`). 0 would leave the choice to the NIC.
pub(super) fn flow_label(source_port: u16) -> u32 {
    match u32::from(source_port & 0x3fff) {
        // Sets the same port through the upper bits, which are folded onto the lower ones.
        0 => 1 << 14 | 1,
        label => label,
    }
}

/// Source of a datagram, from the 40 bytes before it: an IPv6 header, or an IPv4 header in the last 20.
pub(super) fn source(header: &[u8], ipv4: bool) -> Option<IpAddr> {
    if ipv4 {
        let address: [u8; 4] = header.get(32..36)?.try_into().ok()?;
        return (header[20] >> 4 == 4).then(|| Ipv4Addr::from(address).into());
    }
    let address: [u8; 16] = header.get(8..24)?.try_into().ok()?;
    (header[0] >> 4 == 6).then(|| Ipv6Addr::from(address).into())
}

/// Maximum number of address handles of a queue pair.
const HANDLES_MAX: usize = 1024;
/// How long a failed address resolution is not repeated: it takes up to a second.
const UNREACHABLE_NS: u64 = 1_000_000_000;

#[derive(Clone, Copy, Debug)]
struct Handle {
    /// Null: creation failed.
    ah: *mut Ah,
    /// The last request that used it.
    last: u64,
    /// Time of creation, ns.
    made_ns: u64,
}

/// Address handles, each for a peer and a path.
#[derive(Debug, Default)]
pub(super) struct Handles {
    known: HashMap<(Gid, u32), Handle>,
    posted: u64,
    completed: u64,
}

impl Handles {
    /// The handle for a destination and path, for a request that is posted now.
    pub(super) fn get(
        &mut self,
        functions: &Functions,
        pd: *mut Pd,
        now_ns: u64,
        mut way: AhAttr,
    ) -> Result<*mut Ah, PostError> {
        let key = (way.grh.dgid, way.grh.flow_label);
        let stale = |handle: &Handle| handle.ah.is_null() && now_ns.saturating_sub(handle.made_ns) > UNREACHABLE_NS;
        if self.known.get(&key).is_none_or(stale) {
            self.known.remove(&key);
            self.make_room(functions)?;
            // SAFETY: the domain exists; the attributes live as long as the call.
            let ah = unsafe { (functions.create_ah)(pd, &raw mut way) };
            self.known.insert(key, Handle { ah, last: self.posted, made_ns: now_ns });
        }
        let handle = self.known.get_mut(&key).filter(|handle| !handle.ah.is_null()).ok_or(PostError::NotConnected)?;
        self.posted += 1;
        handle.last = self.posted;
        Ok(handle.ah)
    }

    /// A request has completed; they complete in order.
    pub(super) fn completed(&mut self) {
        self.completed += 1;
    }

    /// Nothing is posted any more.
    pub(super) fn forget(&mut self) {
        self.completed = self.posted;
    }

    pub(super) fn clear(&mut self, functions: &Functions) {
        for (_, handle) in self.known.drain() {
            destroy(functions, handle.ah);
        }
    }

    fn make_room(&mut self, functions: &Functions) -> Result<(), PostError> {
        if self.known.len() < HANDLES_MAX {
            return Ok(());
        }
        let unused = self.known.iter().filter(|(_, handle)| handle.last <= self.completed);
        let oldest = unused.min_by_key(|(_, handle)| handle.last).map(|(key, _)| *key).ok_or(PostError::Full)?;
        if let Some(handle) = self.known.remove(&oldest) {
            destroy(functions, handle.ah);
        }
        Ok(())
    }
}

fn destroy(functions: &Functions, ah: *mut Ah) {
    if !ptr::eq(ah, ptr::null()) {
        // SAFETY: no posted request uses it.
        let _ = unsafe { (functions.destroy_ah)(ah) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As in Linux, include/rdma/ib_verbs.h.
    fn port_of(label: u32) -> u16 {
        ((label & 0x3fff) ^ ((label & 0xfc000) >> 14)) as u16 | 0xc000
    }

    #[test]
    fn each_source_port_has_a_flow_label() {
        for port in 0xc000..=0xffff {
            let label = flow_label(port);
            assert!(label != 0 && label < 1 << 20, "{port}");
            assert_eq!(port_of(label), port);
        }
    }

    #[test]
    fn sources_of_datagrams() {
        let mut header = [0; 40];
        header[20] = 0x45;
        header[32..36].copy_from_slice(&[10, 9, 0, 2]);
        assert_eq!(source(&header, true), Some(IpAddr::from([10, 9, 0, 2])));
        assert_eq!(source(&header, false), None);
        header = [0; 40];
        header[0] = 0x60;
        header[8..24].copy_from_slice(&[9; 16]);
        assert_eq!(source(&header, false), Some(IpAddr::from([9; 16])));
        assert_eq!(source(&header, true), None);
        assert_eq!(source(&header[..10], false), None);
        assert_eq!(source(&[], true), None);
    }
}
