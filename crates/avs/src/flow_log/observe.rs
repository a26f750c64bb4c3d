//! Logs packets that have been decided about.

use bifrost_nic::L3;
use bifrost_wire::Vni;

use super::logs::FlowLogs;
use super::table::{Name, Packet};
use crate::drop_reason::DropReason;
use crate::frame::Frame;
use crate::ids::{Direction, PortId};
use crate::index::Index;
use crate::location::Location;
use crate::session::Key;
use crate::verdict::{Action, Verdict};

/// Logs a packet from the guest behind `port`.
pub(crate) fn sent(logs: &mut FlowLogs, index: &Index, port: PortId, frame: Frame<'_>, verdict: &Verdict, now_ns: u64) {
    let rejected = verdict.drop_reason();
    let wanting = wanting(logs, port, frame, rejected);
    if wanting != 0
        && let Some((_, vpc)) = index.port(port)
    {
        let key = Key::of(port, Direction::Egress, frame.head, frame.parsed);
        let name = Name { key, vni: vpc.vni, rejected };
        logs.count(wanting, name, Direction::Egress, Packet::of(frame), now_ns);
    }
    match verdict.action {
        // If another worker decides about the packet, it also logs it.
        Action::Deliver { port, worker: None } => received(logs, index, port, frame, verdict, now_ns),
        Action::Drop(DropReason::GroupIngress) => {
            if let Some(Location::Local(port)) = index.location(port, frame.parsed) {
                received(logs, index, port, frame, verdict, now_ns);
            }
        }
        _ => {}
    }
}

/// Logs a packet from a peer that is delivered to a port or dropped on its way there.
pub(crate) fn received_from_peer(
    logs: &mut FlowLogs,
    index: &Index,
    vni: Vni,
    frame: Frame<'_>,
    verdict: &Verdict,
    now_ns: u64,
) {
    let port = match verdict.action {
        Action::Deliver { port, .. } => Some(Location::Local(port)),
        _ => index.vpc(vni).and_then(|vpc| vpc.location(frame.parsed.dst_mac)),
    };
    if let Some(Location::Local(port)) = port {
        received(logs, index, port, frame, verdict, now_ns);
    }
}

/// Logs a packet that is delivered to a port or dropped on its way there.
pub(crate) fn received(
    logs: &mut FlowLogs,
    index: &Index,
    port: PortId,
    frame: Frame<'_>,
    verdict: &Verdict,
    now_ns: u64,
) {
    let rejected = verdict.drop_reason();
    let wanting = wanting(logs, port, frame, rejected);
    if wanting != 0
        && let Some((_, vpc)) = index.port(port)
    {
        // Log the addresses that the guest sees.
        let seen = verdict.rewrite.map(|rewrite| rewrite.view(frame.parsed));
        let key = Key::of(port, Direction::Ingress, frame.head, seen.as_ref().unwrap_or(frame.parsed));
        let name = Name { key, vni: vpc.vni, rejected };
        logs.count(wanting, name, Direction::Ingress, Packet::of(frame), now_ns);
    }
}

/// The logs that log this packet.
fn wanting(logs: &FlowLogs, port: PortId, frame: Frame<'_>, rejected: Option<DropReason>) -> u64 {
    if matches!(frame.parsed.kind, L3::V4 | L3::V6) { logs.wanting(port, rejected) } else { 0 }
}
