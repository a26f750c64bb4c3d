//! Packets that are larger than the path MTU (Triton paper, section 5.2): fragmented, or refused with an ICMP error that says how
//! large they may be.
//!
//! All of this is rare: a packet that fits costs one comparison.

use std::net::IpAddr;

use bifrost_nic::icmp_error::{self, IcmpError};
use bifrost_nic::{Segments, TooLarge as Refusal};
use bifrost_tables::TokenBucket;
use bifrost_wire::Mac;
use bifrost_wire::ethernet::{self, ethertype};

use crate::frame::Frame;

/// ICMP errors a second, and how many at once, that one port may cause: enough for a guest that begins to talk to many others.
const ERRORS_PER_SECOND: u64 = 1000;
const ERRORS_AT_ONCE: u64 = 100;

/// What can be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Remedy {
    /// It is fragmented, or segmented into smaller ones.
    Fragment,
    /// Its sender gets the error that was made.
    Answer,
    /// Nothing.
    None,
}

/// A frame that is larger than what gets there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TooLarge<'a> {
    pub(crate) frame: Frame<'a>,
    /// Bytes of the largest IP packet.
    pub(crate) mtu: u16,
    /// Between whom the error goes; `None`: nobody may send one.
    pub(crate) ends: Option<Ends>,
}

/// Which host sends an ICMP error, and to which vNIC.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ends {
    pub(crate) source: IpAddr,
    pub(crate) source_mac: Mac,
    pub(crate) destination_mac: Mac,
}

/// A full allowance of ICMP errors.
pub(crate) fn allowance() -> TokenBucket {
    TokenBucket::new(ERRORS_PER_SECOND, ERRORS_AT_ONCE)
}

/// What is to be done about a frame that is too large; `error` receives the frame for its sender, as long as `allowance` lasts.
#[cold]
pub(crate) fn remedy(
    TooLarge { frame, mtu, ends }: TooLarge<'_>,
    allowance: &mut TokenBucket,
    now_ns: u64,
    error: &mut Vec<u8>,
) -> Remedy {
    match Segments::plan_within(frame.head, frame.len, frame.offload, mtu) {
        // The plan is made again when the frame leaves, and what is wrong is counted then.
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

/// "Fragmentation needed and DF set" (RFC 792, RFC 1191) or "packet too big" (RFC 4443, section 3.2), with the start of the packet
/// as it came.
fn too_big(frame: Frame<'_>, mtu: u16, ends: Ends, out: &mut Vec<u8>) -> Option<()> {
    let parsed = frame.parsed;
    let packet = frame.head.get(usize::from(parsed.l3)..frame.head.len().min(parsed.end as usize))?;
    let ethertype = if ends.source.is_ipv4() { ethertype::IPV4 } else { ethertype::IPV6 };
    out.clear();
    out.extend_from_slice(&ethernet::Header::new(ends.destination_mac, ends.source_mac, ethertype).emit());
    // Never of two families: who answers is of the packet's.
    icmp_error::write(IcmpError::TooLarge(mtu), ends.source, parsed.src_ip, packet, out)
}
