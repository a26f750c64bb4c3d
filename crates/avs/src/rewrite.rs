//! What routing changes in a frame.

use bifrost_wire::{Mac, ipv4, ipv6};

/// One hop through the gateway: new MAC addresses, one less to live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rewrite {
    pub(crate) destination: Mac,
    pub(crate) source: Mac,
    pub(crate) l3: u16,
    pub(crate) v6: bool,
}

impl Rewrite {
    /// Changes a frame: one that was decided upon, or any that it was segmented into. IPv4's header checksum is updated
    /// (RFC 1624), not computed anew, so damage stays visible. A frame that is too short is left as it is.
    pub fn apply(&self, frame: &mut [u8]) {
        let l3 = usize::from(self.l3);
        let Some((link, packet)) = frame.split_at_mut_checked(l3) else { return };
        let ttl = if self.v6 {
            packet.first_chunk_mut::<{ ipv6::HEADER_LEN }>().map(|ip| ipv6::set_hop_limit(ip, ip[7].saturating_sub(1)))
        } else {
            packet.first_chunk_mut::<{ ipv4::HEADER_LEN }>().map(|ip| ipv4::set_ttl(ip, ip[8].saturating_sub(1)))
        };
        if let (Some(()), Some(macs)) = (ttl, link.first_chunk_mut::<12>()) {
            macs[..6].copy_from_slice(&self.destination.0);
            macs[6..].copy_from_slice(&self.source.0);
        }
    }

    /// The destination MAC address after the change.
    pub fn destination(&self) -> Mac {
        self.destination
    }
}
