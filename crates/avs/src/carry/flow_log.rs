//! Serialized flow logs: conversations with their counts, and records that wait to be taken.
//!
//! Sections as in [the format of sessions](super), with kinds of their own. Reasons of rejected conversations have
//! names, because their numbers differ between releases: a record has the position of its reason's name, from 1. The log
//! without a name comes first. The conversations of each other log follow a section with its name; releases that know
//! only one log ignore both.

use std::collections::BTreeMap;
use std::sync::Arc;

use bifrost_wire::Vni;

use super::{CarryError, Fields, HEAD_BYTES, begin, write_key};
use crate::drop_reason::DropReason;
use crate::flow_log::{COUNT_MAX, Flow, FlowEnd, HandedFlow, Handshake, Name, Traffic};
use crate::ids::Direction;
use crate::switch::Switch;

/// Kinds of sections. The names precede the conversations.
const REASONS: u16 = 32;
const FLOWS: u16 = 33;
const LOG: u16 = 34;
const FLOWS_OF_LOG: u16 = 35;
/// Bytes per record of these sections. Names are filled with zeros.
const REASON_BYTES: usize = 32;
const LOG_BYTES: usize = 64;
const FLOW_BYTES: usize = 108;

/// The conversations in the format of this module.
pub fn write_handed_flows(flows: &[HandedFlow]) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEAD_BYTES + FLOW_BYTES * flows.len());
    begin(&mut out, REASONS, REASON_BYTES, DropReason::ALL.len());
    for reason in DropReason::ALL {
        out.extend(filled::<REASON_BYTES>(reason.name()));
    }
    let mut of_logs: BTreeMap<&str, Vec<&HandedFlow>> = BTreeMap::from([("", Vec::new())]);
    flows.iter().for_each(|flow| of_logs.entry(&flow.log).or_default().push(flow));
    for (log, flows) in of_logs {
        if !log.is_empty() {
            begin(&mut out, LOG, LOG_BYTES, 1);
            out.extend(filled::<LOG_BYTES>(log));
        }
        write_flows(&mut out, if log.is_empty() { FLOWS } else { FLOWS_OF_LOG }, &flows);
    }
    out
}

fn write_flows(out: &mut Vec<u8>, kind: u16, flows: &[&HandedFlow]) {
    begin(out, kind, FLOW_BYTES, flows.len());
    for HandedFlow { flow, end, .. } in flows {
        write_key(out, flow.name.key);
        out.extend(flow.name.vni.get().to_le_bytes());
        out.push(flow.name.rejected.map_or(0, |reason| reason.index() as u8 + 1));
        out.push(flow.origin as u8);
        let (state, ns) = match flow.handshake {
            Handshake::Unknown => (0, 0),
            Handshake::Asked(ns) => (1, ns),
            Handshake::Answered(ns) => (2, ns),
            Handshake::Done(ns) => (3, ns),
        };
        out.push(state);
        out.extend(ns.to_le_bytes());
        for (traffic, flags) in flow.traffic.iter().zip(flow.flags) {
            out.extend(traffic.packets.to_le_bytes());
            out.extend(traffic.bytes.to_le_bytes());
            out.extend([traffic.tcp_flags, flags]);
        }
        out.extend(flow.start_ns.to_le_bytes());
        out.extend(flow.end_ns.to_le_bytes());
        out.push(end.map_or(0, FlowEnd::number));
    }
}

/// A name with zeros behind it.
fn filled<const BYTES: usize>(name: &str) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    bytes.iter_mut().zip(name.bytes()).for_each(|(to, from)| *to = from);
    bytes
}

/// Conversations from another process, and the number of invalid records. Unknown sections are ignored.
///
/// # Errors
/// The bytes are not what this or a neighbouring release writes.
pub fn read_handed_flows(mut rest: &[u8]) -> Result<(Vec<HandedFlow>, u64), CarryError> {
    let (mut reasons, mut flows, mut left_out) = (Vec::new(), Vec::new(), 0);
    let no_name: Arc<str> = Arc::from("");
    let mut log = Arc::clone(&no_name);
    while !rest.is_empty() {
        let (head, behind) = rest.split_at_checked(HEAD_BYTES).ok_or(CarryError::Truncated)?;
        let mut head = Fields(head);
        let (Some(kind), Some(bytes), Some(count)) = (head.u16(), head.u16(), head.u32()) else {
            return Err(CarryError::Truncated);
        };
        let len = (count as usize).checked_mul(usize::from(bytes)).ok_or(CarryError::Truncated)?;
        let (section, behind) = behind.split_at_checked(len).ok_or(CarryError::Truncated)?;
        rest = behind;
        let needed = match kind {
            REASONS => REASON_BYTES,
            FLOWS | FLOWS_OF_LOG => FLOW_BYTES,
            LOG => LOG_BYTES,
            _ => continue,
        };
        if usize::from(bytes) < needed {
            return Err(CarryError::Short { kind, bytes, needed: needed as u16 });
        }
        for record in section.chunks_exact(usize::from(bytes)) {
            match kind {
                REASONS => reasons.push(reason(record)),
                LOG => log = Arc::from(&*String::from_utf8_lossy(name_in(&record[..LOG_BYTES]))),
                _ => match read_flow(&mut Fields(record), &reasons) {
                    Some((flow, end)) => {
                        let log = Arc::clone(if kind == FLOWS { &no_name } else { &log });
                        flows.push(HandedFlow { log, flow, end });
                    }
                    None => left_out += 1,
                },
            }
        }
    }
    Ok((flows, left_out))
}

/// The reason with this name; `None`: this release does not know it.
fn reason(name: &[u8]) -> Option<DropReason> {
    DropReason::ALL.iter().copied().find(|reason| reason.name().as_bytes() == name_in(name))
}

/// A name without the zeros behind it.
fn name_in(record: &[u8]) -> &[u8] {
    record.split(|byte| *byte == 0).next().unwrap_or_default()
}

fn read_flow(fields: &mut Fields<'_>, reasons: &[Option<DropReason>]) -> Option<(Flow, Option<FlowEnd>)> {
    let (key, vni) = (fields.key()?, Vni::new(fields.u32()?)?);
    let (local, remote) = key.ends();
    if local.address.is_ipv6() != remote.address.is_ipv6() {
        return None;
    }
    let rejected = match fields.u8()? {
        0 => None,
        place => Some((*reasons.get(usize::from(place) - 1)?)?),
    };
    let origin = if fields.flag()? { Direction::Ingress } else { Direction::Egress };
    let (state, ns) = (fields.u8()?, u64::from_le_bytes(fields.take()?));
    let handshake = match state {
        0 => Handshake::Unknown,
        1 => Handshake::Asked(ns),
        2 => Handshake::Answered(ns),
        3 => Handshake::Done(ns),
        _ => return None,
    };
    let mut flow = Flow::begin(Name { key, vni, rejected }, origin, 0);
    flow.handshake = handshake;
    for at in 0..2 {
        let (packets, bytes) = (u64::from_le_bytes(fields.take()?), u64::from_le_bytes(fields.take()?));
        if packets > COUNT_MAX || bytes > COUNT_MAX {
            return None;
        }
        flow.traffic[at] = Traffic { packets, bytes, tcp_flags: fields.u8()? };
        flow.flags[at] = fields.u8()?;
    }
    (flow.start_ns, flow.end_ns) = (u64::from_le_bytes(fields.take()?), u64::from_le_bytes(fields.take()?));
    let end = match fields.u8()? {
        0 => None,
        number => Some(FlowEnd::of_number(number)?),
    };
    Some((flow, end))
}

impl Switch {
    /// All conversations of the flow logs with their counts, and records that wait to be taken. They stay here: call
    /// this when no packets flow any more, and another switch [continues](Self::continue_flows) them.
    pub fn handed_flows(&self) -> Vec<HandedFlow> {
        self.flow_logs.as_ref().map(|logs| logs.handed()).unwrap_or_default()
    }

    /// Continues conversations of another switch's flow logs. This switch may have counted packets of them since the
    /// other one has stopped. Both must use the same clock, which shows `now_ns`. Returns the number of conversations
    /// that were left out, because this switch has no log with the name of theirs.
    pub fn continue_flows(&mut self, flows: &[HandedFlow], now_ns: u64) -> u64 {
        let Some(logs) = &mut self.flow_logs else { return flows.len() as u64 };
        flows.iter().filter(|flow| !logs.continue_flow(flow, now_ns)).count() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_reasons_fit_and_are_found_again() {
        for known in DropReason::ALL {
            assert!(known.name().len() < REASON_BYTES && known.index() < 255);
            assert_eq!(reason(known.name().as_bytes()), Some(*known));
        }
        assert_eq!(reason(b"of_a_later_release\0\0"), None);
    }
}
