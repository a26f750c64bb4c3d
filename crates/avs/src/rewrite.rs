//! What the switch changes in a frame. This is the only place where the headers of a tenant's frame are changed.

use bifrost_nic::{L3, Parsed};
use bifrost_wire::{Mac, ipv4, ipv6};

/// Changes of one frame, to be applied to it or to every frame that it is segmented or fragmented into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rewrite {
    destination: Mac,
    source: Mac,
    /// Where the IP header begins, bytes.
    l3: u16,
    v6: bool,
}

impl Rewrite {
    /// One hop through a router: new Ethernet addresses, one less to live.
    #[inline(always)]
    pub(crate) fn hop(parsed: &Parsed, source: Mac, destination: Mac) -> Self {
        Rewrite { destination, source, l3: parsed.l3, v6: parsed.kind == L3::V6 }
    }

    /// Changes a frame. The checksum of an IPv4 header is updated (RFC 1624), not computed, so damage stays visible. A frame that is
    /// too short is left as it is.
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
