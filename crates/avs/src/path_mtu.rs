//! Packets larger than the path MTU (Triton paper, section 5.2): they are fragmented, or their sender gets an ICMP
//! error with the MTU.
//!
//! This is rare: a packet that fits costs one comparison.

use std::net::IpAddr;

use bifrost_nic::icmp_error::{self, IcmpError};
use bifrost_nic::{Segments, TooLarge as Refusal};
use bifrost_tables::TokenBucket;
use bifrost_wire::Mac;
use bifrost_wire::ethernet::{self, ethertype};

use crate::frame::Frame;

/// Rate and burst of ICMP errors per port: enough for a guest that begins to talk to many others.
const ERRORS_PER_SECOND: u64 = 1000;
const ERRORS_AT_ONCE: u64 = 100;

/// What to do about a packet that is too large.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Remedy {
    /// Fragment it, or segment it into smaller segments.
    Fragment,
    /// Send the ICMP error to its sender.
    Answer,
    /// Drop it.
    None,
}

/// A frame that is larger than the path MTU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TooLarge<'a> {
    pub(crate) frame: Frame<'a>,
    /// Path MTU: largest IP packet, bytes.
    pub(crate) mtu: u16,
    /// Sender and receiver of the ICMP error; `None`: none may be sent.
    pub(crate) ends: Option<Ends>,
}

/// The node that sends an ICMP error, and the vNIC that receives it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ends {
    pub(crate) source: IpAddr,
    pub(crate) source_mac: Mac,
    pub(crate) destination_mac: Mac,
}

/// A full token bucket for ICMP errors.
pub(crate) fn allowance() -> TokenBucket {
    TokenBucket::new(ERRORS_PER_SECOND, ERRORS_AT_ONCE)
}

/// Decides what to do about a frame that is too large. `error` receives the ICMP error's frame, if `allowance`
/// permits one.
#[cold]
pub(crate) fn remedy(
    TooLarge { frame, mtu, ends }: TooLarge<'_>,
    allowance: &mut TokenBucket,
    now_ns: u64,
    error: &mut Vec<u8>,
) -> Remedy {
    match Segments::plan_within(frame.head, frame.len, frame.offload, mtu) {
        // The frame is planned again when it leaves; a malformed one is counted then.
        Ok(_) | Err(Refusal::Malformed(_)) => Remedy::Fragment,
        Err(Refusal::Uncuttable) => Remedy::None,
        Err(Refusal::DontFragment) => match ends {
            Some(ends) if icmp_error::may_be_answered(frame.head, frame.parsed) && allowance.take(now_ns, 1) => {
                too_big(frame, mtu, ends, error).map_or(Remedy::None, |()| Remedy::Answer)
            }
            _ => Remedy::None,
        },
    }
}

/// Writes "fragmentation needed and DF set" (RFC 792, RFC 1191) or "packet too big" (RFC 4443, section 3.2), with the
/// start of the original packet.
fn too_big(frame: Frame<'_>, mtu: u16, ends: Ends, out: &mut Vec<u8>) -> Option<()> {
    let parsed = frame.parsed;
    let packet = frame.head.get(usize::from(parsed.l3)..frame.head.len().min(parsed.end as usize))?;
    let ethertype = if ends.source.is_ipv4() { ethertype::IPV4 } else { ethertype::IPV6 };
    out.clear();
    out.extend_from_slice(&ethernet::Header::new(ends.destination_mac, ends.source_mac, ethertype).emit());
    // Cannot fail because of mixed families: the error's source has the packet's family.
    icmp_error::write(IcmpError::TooLarge(mtu), ends.source, parsed.src_ip, packet, out)
}
