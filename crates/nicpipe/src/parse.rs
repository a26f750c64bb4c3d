//! The parser: what classifying, limiting and spraying need to know of a frame.

use std::net::IpAddr;

use bifrost_nic::{Parsed, parse};
use bifrost_wire::protocol::UDP;
use bifrost_wire::{ethernet, vxlan};

/// What the headers of a frame say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// The outermost VLAN tag's identifier.
    pub vlan: Option<u16>,
    /// The outer headers.
    pub outer: Parsed,
    /// Of VXLAN.
    pub vni: Option<u32>,
    /// Hash of the innermost flow that is seen, under a seed.
    pub flow_hash: u32,
    /// Bytes from the start of the frame to the end of the headers that a gateway needs.
    pub headers: usize,
    /// Bytes of the frame without padding.
    pub end: usize,
}

/// Parses a frame. Nothing if the outer headers are malformed: such a frame is nobody's.
pub fn look(frame: &[u8], seed: u64) -> Option<Arrival> {
    let outer = parse(frame, frame.len()).ok()?;
    let mut arrival = Arrival {
        vlan: outer.vlan,
        outer,
        vni: None,
        flow_hash: if outer.is_ip() { outer.flow_key().hash(seed) } else { outer.flow_hash },
        headers: usize::from(outer.payload),
        end: outer.end as usize,
    };
    if outer.protocol == UDP && outer.dst_port == vxlan::UDP_PORT && !outer.is_fragment() {
        let payload = frame.get(usize::from(outer.payload)..outer.end as usize).unwrap_or_default();
        if let Ok((vni, inner)) = vxlan::parse(payload) {
            arrival.vni = Some(vni.get());
            if let Ok(parsed) = parse(inner, inner.len()) {
                let of_vni = seed ^ u64::from(vni.get()).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                arrival.flow_hash = match parsed.is_ip() {
                    true => parsed.flow_key().hash(of_vni),
                    false => parsed.flow_hash ^ vni.get(),
                };
                arrival.headers = usize::from(outer.payload) + vxlan::HEADER_LEN + usize::from(parsed.payload);
            }
        }
    }
    Some(arrival)
}

impl Arrival {
    /// What a tenant is limited by: the VNI, or a number above all VNIs that stands for the address on this side.
    pub fn tenant(&self, seed: u64) -> u32 {
        const ADDRESSES: u32 = 1 << 24;
        self.vni.unwrap_or_else(|| {
            let to = match self.outer.dst_ip {
                IpAddr::V4(address) => u64::from(address.to_bits()),
                IpAddr::V6(address) => (address.to_bits() >> 64) as u64 ^ address.to_bits() as u64,
            };
            let mixed = u128::from(to ^ seed) * 0x9e37_79b9_7f4a_7c15;
            ADDRESSES | ((mixed >> 64) as u32 ^ mixed as u32) & (ADDRESSES - 1)
        })
    }
}

/// The frame without its outermost tag, in two parts.
pub(crate) fn untagged(frame: &[u8], tagged: bool, end: usize) -> [&[u8]; 2] {
    const MACS: usize = 12;
    let end = end.min(frame.len());
    let rest = if tagged { MACS + ethernet::TAG_LEN } else { MACS };
    match (frame.get(..MACS), frame.get(rest..end)) {
        (Some(macs), Some(rest)) => [macs, rest],
        _ => [&[], &[]],
    }
}
