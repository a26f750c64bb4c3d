//! Prefetch hint: the session that a packet will need, from a first look at its headers.

use std::net::Ipv4Addr;

use bifrost_wire::protocol::{TCP, UDP};
use bifrost_wire::vxlan;

use crate::nat::INTERNET;
use crate::rewrite::End;
use crate::session::Flow;

// Offsets in a frame without tags and without IPv4 options.
const ETHERTYPE: usize = 12;
const IP: usize = 14;
const UDP_HEADER: usize = IP + 20;
const VXLAN: usize = UDP_HEADER + 8;
const INNER: usize = VXLAN + 8;

/// The flow of TCP or UDP over IPv4, inside VXLAN or on the Internet's side; `None` for other packets. It is only a
/// hint: it validates no more than it needs to find the fields.
#[inline]
pub(crate) fn flow(frame: &[u8]) -> Option<Flow> {
    let outer = of_ip(frame, INTERNET)?;
    if outer.protocol != UDP || outer.destination.port != vxlan::UDP_PORT {
        return Some(outer);
    }
    let &[a, b, c] = frame.get(VXLAN + 4..)?.first_chunk()?;
    of_ip(frame.get(INNER..)?, u32::from_be_bytes([0, a, b, c]))
}

#[inline]
fn of_ip(frame: &[u8], network: u32) -> Option<Flow> {
    let frame = frame.first_chunk::<{ UDP_HEADER + 4 }>()?;
    let protocol = frame[IP + 9];
    let fits = frame[ETHERTYPE..=IP] == [8, 0, 0x45] && matches!(protocol, TCP | UDP);
    let end = |address: usize, port: usize| End {
        address: Ipv4Addr::new(frame[address], frame[address + 1], frame[address + 2], frame[address + 3]).into(),
        port: u16::from_be_bytes([frame[port], frame[port + 1]]),
    };
    fits.then(|| Flow {
        network,
        protocol,
        source: end(IP + 12, UDP_HEADER),
        destination: end(IP + 16, UDP_HEADER + 2),
    })
}
