//! The parser: the fields that classifying, limiting and spraying need.

use std::net::IpAddr;

use bifrost_nic::{Parsed, parse, parse_packet};
use bifrost_wire::protocol::{GRE, TCP, UDP};
use bifrost_wire::{ethernet, gre, vxlan};

/// The outer headers of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// VLAN identifier of the outermost tag.
    pub vlan: Option<u16>,
    /// The outer headers.
    pub outer: Parsed,
    /// Of VXLAN.
    pub vni: Option<u32>,
    /// Bytes of the frame without padding.
    pub end: usize,
}

/// The innermost flow found in a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// Its hash, with a seed.
    pub hash: u32,
    /// Bytes from the start of the frame to the end of the headers that a gateway needs. `None` if unknown: a gateway
    /// may need any part of fragments, and of packets that are neither TCP nor UDP.
    pub headers: Option<usize>,
    /// It is a fragment: all fragments of a packet have this hash, and must go to one core, in order.
    pub fragment: bool,
}

/// Parses the outer headers: all that is needed to drop packets that exceed a rate. `None` if they are malformed: such
/// a frame belongs to no pod.
#[inline]
pub fn look(frame: &[u8]) -> Option<Arrival> {
    let outer = parse(frame, frame.len()).ok()?;
    let mut arrival = Arrival { vlan: outer.vlan, outer, vni: None, end: outer.end as usize };
    if outer.protocol == UDP && outer.dst_port == vxlan::UDP_PORT && !outer.is_fragment() {
        arrival.vni = vxlan::parse(arrival.payload(frame)).ok().map(|(vni, _)| vni.get());
    }
    Some(arrival)
}

impl Arrival {
    /// Parses the inner headers, if it is VXLAN or GRE.
    #[inline]
    pub fn flow(&self, frame: &[u8], seed: u64) -> Flow {
        let outer = &self.outer;
        if let (Some(vni), Ok((_, inner))) = (self.vni, vxlan::parse(self.payload(frame)))
            && let Ok(parsed) = parse(inner, inner.len())
        {
            return Flow::inside(&parsed, seed, vni, usize::from(outer.payload) + vxlan::HEADER_LEN);
        }
        if outer.protocol == GRE
            && !outer.is_fragment()
            && let Some(flow) = self.flow_in_gre(frame, seed)
        {
            return flow;
        }
        Flow::inside(outer, seed, 0, 0)
    }

    /// A separate function, to keep the code for VXLAN short.
    #[inline(never)]
    fn flow_in_gre(&self, frame: &[u8], seed: u64) -> Option<Flow> {
        let (header, inner) = gre::Header::parse(self.payload(frame)).ok()?;
        let parsed = parse_packet(header.ethertype, inner).ok()?;
        Some(Flow::inside(&parsed, seed, header.key, usize::from(self.outer.payload) + gre::HEADER_LEN))
    }

    /// The bytes after the outer headers.
    pub(crate) fn payload<'a>(&self, frame: &'a [u8]) -> &'a [u8] {
        frame.get(usize::from(self.outer.payload)..self.end).unwrap_or_default()
    }

    /// The limiter's key: the VNI, or a number above all VNIs that stands for the address on this side.
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

impl Flow {
    /// The flow of a packet that starts `at` bytes into the frame, in the network `vni`.
    #[inline(always)]
    fn inside(parsed: &Parsed, seed: u64, vni: u32, at: usize) -> Self {
        let of_vni = seed ^ u64::from(vni).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let ends = !parsed.is_fragment() && matches!(parsed.protocol, TCP | UDP);
        Flow {
            hash: if parsed.is_ip() { parsed.hash(of_vni) } else { parsed.flow_hash ^ vni },
            headers: ends.then(|| at + usize::from(parsed.payload)),
            fragment: parsed.is_fragment(),
        }
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
