//! Light guests: TCP-shaped packets without TCP. Each packet contains its flow, its number and a pattern, so that the
//! loss, duplication, order and content of every flow are known exactly.

use bifrost_nic::{Checksum, parse, transport_checksum};
use bifrost_wire::checksum;

use crate::rng::mix;
use crate::violation::{Kind, Violations};

/// Bytes of Ethernet, IPv4 and TCP headers.
pub(crate) const HEADERS_BYTES: usize = 14 + 20 + 20;
/// Length of the record at the start of each packet's payload, bytes.
pub(crate) const RECORD_BYTES: usize = 24;

const MAGIC: u32 = 0xb1f0_5701;

const DELIVERED: u8 = 1;
/// It left as plain VXLAN: it may be lost, duplicated, or out of order.
const EXEMPT: u8 = 2;
const PLACED: u8 = 4;
/// It was in a crashed daemon, which had fetched it from its guest or acknowledged it: it may be lost.
const LOSABLE: u8 = 8;
/// It was retransmitted on a connection that restarted (PROTOCOL §4.6): it may arrive twice, and after packets that the
/// receiver held behind it when it restarted.
const REPEATABLE: u8 = 16;

/// The record in a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// The flow.
    pub flow: u32,
    /// Its number in the flow, from 0.
    pub seq: u32,
    /// Its number among all packets of the pair of guests, from 0.
    pub pair_seq: u32,
    /// When its guest sent it, ns.
    pub sent_at: u64,
}

impl Record {
    /// Appends `len` bytes of payload, of which the record takes the first 24. Panics if `len` is smaller.
    pub fn write(&self, len: usize, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&MAGIC.to_be_bytes());
        out.extend_from_slice(&self.flow.to_be_bytes());
        out.extend_from_slice(&self.seq.to_be_bytes());
        out.extend_from_slice(&self.pair_seq.to_be_bytes());
        out.extend_from_slice(&self.sent_at.to_be_bytes());
        let pattern = self.pattern();
        out.resize(start + len, 0);
        let (words, rest) = out[start + RECORD_BYTES..].as_chunks_mut();
        words.fill(pattern);
        rest.copy_from_slice(&pattern[..rest.len()]);
    }

    /// Parses a payload; `None` if it is not a light guest's or was changed.
    pub fn read(payload: &[u8]) -> Option<Record> {
        let word = |at: usize| payload.get(at..at + 4)?.try_into().ok().map(u32::from_be_bytes);
        let sent_at = u64::from_be_bytes(payload.get(16..24)?.try_into().ok()?);
        let record = Record { flow: word(4)?, seq: word(8)?, pair_seq: word(12)?, sent_at };
        let pattern = record.pattern();
        let (words, rest) = payload[RECORD_BYTES..].as_chunks();
        // Without an early exit, so that the compiler can vectorise it.
        let wanted = u64::from_ne_bytes(pattern);
        let differs = words.iter().fold(0, |all, w| all | (u64::from_ne_bytes(*w) ^ wanted));
        (word(0)? == MAGIC && differs == 0 && *rest == pattern[..rest.len()]).then_some(record)
    }

    fn pattern(&self) -> [u8; 8] {
        mix(u64::from(self.flow) << 32 ^ u64::from(self.seq) ^ self.sent_at.rotate_left(7)).to_le_bytes()
    }
}

/// The record of a light guest's frame, without verifying the rest.
pub(crate) fn peek(frame: &[u8]) -> Option<(u32, u32)> {
    let payload = frame.get(HEADERS_BYTES..)?;
    let word = |at: usize| payload.get(at..at + 4)?.try_into().ok().map(u32::from_be_bytes);
    (word(0)? == MAGIC).then_some(())?;
    Some((word(4)?, word(8)?))
}

/// One flow of a light guest.
#[derive(Clone, Debug)]
pub struct Flow {
    /// Sending guest.
    pub from: u32,
    /// Receiving guest.
    pub to: u32,
    /// The workload that it belongs to.
    pub workload: u32,
    /// The pair that it belongs to.
    pub pair: u32,
    /// It may lose packets (between guest and switch).
    pub lossy: bool,
    /// Order does not matter (policy of the network).
    pub unordered: bool,
    /// Length of each packet in a large frame, bytes; 0: frames are single packets.
    pub segment_bytes: u32,
    /// State of each packet.
    packets: Vec<u8>,
    /// The receiver's CID when each packet was last sent to it reliably; 0: never.
    cids: Vec<u32>,
    /// Number of the latest delivered packet that is not exempt, plus 1.
    next: u32,
    delivered: u32,
}

/// All packets between two guests, in one direction.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pair {
    /// Packets sent.
    pub sent: u32,
    /// The network delivers them in the order of sending.
    pub strict: bool,
    next: u32,
}

/// Outcome of a frame that reached a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Receipt {
    /// It arrived for the first time.
    New {
        /// Its workload.
        workload: u32,
        /// When it was sent, ns.
        sent_at: u64,
    },
    /// A duplicate, or not a light guest's packet.
    Other,
}

/// All flows.
#[derive(Clone, Debug, Default)]
pub struct Flows {
    flows: Vec<Flow>,
    pairs: Vec<Pair>,
    /// Packets sent, minus those known to have arrived.
    pub missing: u64,
    /// Packets that may be lost.
    pub exempt: u64,
}

impl Flows {
    /// Adds a pair of guests.
    pub fn add_pair(&mut self, strict: bool) -> u32 {
        self.pairs.push(Pair { strict, ..Pair::default() });
        self.pairs.len() as u32 - 1
    }

    /// Adds a flow.
    pub fn add(&mut self, from: u32, to: u32, workload: u32, pair: u32, unordered: bool, segment_bytes: u32) -> u32 {
        let lossy = false;
        let (packets, cids, next, delivered) = (Vec::new(), Vec::new(), 0, 0);
        self.flows.push(Flow {
            from,
            to,
            workload,
            pair,
            lossy,
            unordered,
            segment_bytes,
            packets,
            cids,
            next,
            delivered,
        });
        self.flows.len() as u32 - 1
    }

    /// The number that the next flow gets.
    pub fn next_flow(&self) -> u32 {
        self.flows.len() as u32
    }

    /// One flow.
    pub fn get(&self, flow: u32) -> &Flow {
        &self.flows[flow as usize]
    }

    /// The number that the next packet of a flow gets.
    pub fn next_seq(&self, flow: u32) -> u32 {
        self.flows[flow as usize].packets.len() as u32
    }

    /// From now on, flows of a guest may lose packets.
    pub fn set_lossy(&mut self, from: u32) {
        for flow in self.flows.iter_mut().filter(|f| f.from == from && !f.lossy) {
            flow.lossy = true;
            let waiting = flow.packets.iter().filter(|p| **p & (DELIVERED | EXEMPT | LOSABLE) == 0);
            self.missing -= waiting.count() as u64;
        }
    }

    /// The next packet of a flow.
    pub fn send(&mut self, now: u64, flow: u32) -> Record {
        let f = &mut self.flows[flow as usize];
        let pair = &mut self.pairs[f.pair as usize];
        let record = Record { flow, seq: f.packets.len() as u32, pair_seq: pair.sent, sent_at: now };
        pair.sent += 1;
        f.packets.push(0);
        f.cids.push(0);
        self.missing += u64::from(!f.lossy);
        record
    }

    /// A packet left as plain VXLAN: from now on it may be lost, duplicated or out of order.
    pub fn exempt(&mut self, packet: &[u8]) {
        if let Some((flow, seq)) = peek(packet) {
            self.spare(flow, seq, EXEMPT);
        }
    }

    /// A daemon crashed while it held this frame of a guest: its packets may be lost.
    pub fn forsake(&mut self, frame: &[u8]) {
        self.each(frame, |flows, flow, seq| flows.spare(flow, seq, LOSABLE));
    }

    /// A packet left reliably, on a connection with the receiver's CID `cid`. A retransmission with another CID may
    /// arrive twice.
    pub fn sent(&mut self, packet: &[u8], cid: u32) {
        let Some((flow, seq)) = peek(packet) else { return };
        let Some(f) = self.flows.get_mut(flow as usize) else { return };
        let Some(before) = f.cids.get_mut(seq as usize) else { return };
        let before = std::mem::replace(before, cid);
        if before != cid && before != 0 {
            f.packets[seq as usize] |= REPEATABLE;
        }
    }

    fn spare(&mut self, flow: u32, seq: u32, why: u8) {
        let Some(f) = self.flows.get_mut(flow as usize) else { return };
        let lossy = f.lossy;
        let Some(state) = f.packets.get_mut(seq as usize) else { return };
        if *state & (EXEMPT | LOSABLE) == 0 {
            let waits = *state & DELIVERED == 0 && !lossy;
            self.exempt += 1;
            self.missing -= u64::from(waits);
        }
        *state |= why;
    }

    /// A packet was placed for the receiving guest.
    pub fn placed(&mut self, frame: &[u8]) {
        if let Some(state) = self.state(frame) {
            *state |= PLACED;
        }
    }

    /// A frame was released to the sending guest. Checks that all its packets are in the receiver's memory.
    pub fn completed(&mut self, at: u64, frame: &[u8], violations: &mut Violations) {
        self.each(frame, |flows, flow, seq| {
            let Some(f) = flows.flows.get(flow as usize) else { return };
            let state = f.packets.get(seq as usize).copied().unwrap_or(EXEMPT);
            if state & (EXEMPT | LOSABLE | PLACED | DELIVERED) == 0 && !f.lossy {
                violations.add(at, Kind::ReleasedEarly, || {
                    format!(
                        "guest {} got packet {seq} of flow {flow} back before it was placed at guest {}",
                        f.from, f.to
                    )
                });
            }
        });
    }

    /// A frame reached a guest.
    pub fn received(&mut self, at: u64, guest: u32, frame: &[u8], violations: &mut Violations) -> Receipt {
        let Some(record) = frame.get(HEADERS_BYTES..).and_then(Record::read) else {
            // A guest's own TCP checks frames that came as plain VXLAN.
            if !is_visibly_wrong(frame) {
                violations.add(at, Kind::Corrupted, || format!("guest {guest} received a corrupted frame"));
            }
            return Receipt::Other;
        };
        let Some(f) = self.flows.get_mut(record.flow as usize) else { return Receipt::Other };
        if f.to != guest {
            let to = f.to;
            violations.add(at, Kind::WrongGuest, || {
                format!("guest {guest} received packet {} of flow {}, which is for guest {to}", record.seq, record.flow)
            });
            return Receipt::Other;
        }
        let Some(state) = f.packets.get_mut(record.seq as usize) else { return Receipt::Other };
        let (first, before) = (*state & DELIVERED == 0, *state);
        *state |= DELIVERED;
        if before & EXEMPT == 0 && (first || before & REPEATABLE == 0) {
            if !first {
                violations.add(at, Kind::Duplicate, || {
                    format!("guest {guest} received packet {} of flow {} twice", record.seq, record.flow)
                });
            } else if record.seq < f.next && !f.unordered && before & REPEATABLE == 0 {
                let next = f.next;
                violations.add(at, Kind::Reordered, || {
                    format!("guest {guest} received packet {} of flow {} after {}", record.seq, record.flow, next - 1)
                });
            }
            f.next = f.next.max(record.seq + 1);
            let pair = &mut self.pairs[f.pair as usize];
            if pair.strict && first && record.pair_seq < pair.next && before & REPEATABLE == 0 {
                let next = pair.next;
                violations.add(at, Kind::Reordered, || {
                    format!("guest {guest} received packet {} of a strict pair after {}", record.pair_seq, next - 1)
                });
            }
            pair.next = pair.next.max(record.pair_seq + 1);
            self.missing -= u64::from(first && before & LOSABLE == 0 && !f.lossy);
        }
        if !first {
            return Receipt::Other;
        }
        f.delivered += 1;
        Receipt::New { workload: f.workload, sent_at: record.sent_at }
    }

    /// Reports packets that never arrived, at the end of a run.
    pub fn check_complete(&self, at: u64, violations: &mut Violations) {
        for (i, f) in self.flows.iter().enumerate().filter(|(_, f)| !f.lossy) {
            let mut lost =
                (0..).zip(&f.packets).filter(|(_, s)| **s & (DELIVERED | EXEMPT | LOSABLE) == 0).map(|(seq, _)| seq);
            if let Some(first) = lost.next() {
                let count: u32 = 1 + lost.count() as u32;
                violations.add(at, Kind::Lost, || {
                    format!(
                        "guest {} never received {count} packets of flow {i} from guest {}, the first is {first}",
                        f.to, f.from
                    )
                });
            }
        }
    }

    /// Number of packets sent, and of packets delivered at least once.
    pub fn totals(&self) -> (u64, u64) {
        self.flows.iter().fold((0, 0), |(s, d), f| (s + f.packets.len() as u64, d + u64::from(f.delivered)))
    }

    fn state(&mut self, frame: &[u8]) -> Option<&mut u8> {
        let (flow, seq) = peek(frame)?;
        self.flows.get_mut(flow as usize)?.packets.get_mut(seq as usize)
    }

    /// Calls `what` for each record of a guest's frame, which may contain several packets.
    fn each(&mut self, frame: &[u8], mut what: impl FnMut(&mut Self, u32, u32)) {
        let Some((flow, _)) = peek(frame) else { return };
        let payload = &frame[HEADERS_BYTES..];
        let step = match self.flows.get(flow as usize).map_or(0, |f| f.segment_bytes) {
            0 => payload.len(),
            bytes => bytes as usize,
        };
        for record in payload.chunks(step) {
            let word = |at: usize| record.get(at..at + 4).and_then(|b| b.try_into().ok()).map(u32::from_be_bytes);
            if word(0) == Some(MAGIC)
                && let (Some(flow), Some(seq)) = (word(4), word(8))
            {
                what(self, flow, seq);
            }
        }
    }
}

/// Whether a guest's TCP would drop a frame.
fn is_visibly_wrong(frame: &[u8]) -> bool {
    parse(frame, frame.len()).map_or(true, |parsed| transport_checksum(frame, &parsed) == Checksum::Invalid)
}

/// Headers of a frame of a light guest.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Addresses {
    /// MAC addresses.
    pub mac: ([u8; 6], [u8; 6]),
    /// IPv4 addresses.
    pub ip: ([u8; 4], [u8; 4]),
    /// TCP ports.
    pub port: (u16, u16),
}

impl Addresses {
    /// Starts a frame: Ethernet, IPv4 and TCP headers for `payload` bytes, without checksums.
    pub(crate) fn start(&self, payload: usize, sequence: u32, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.mac.1);
        out.extend_from_slice(&self.mac.0);
        out.extend_from_slice(&[0x08, 0x00, 0x45, 0]);
        out.extend_from_slice(&((40 + payload) as u16).to_be_bytes());
        out.extend_from_slice(&[0, 0, 0x40, 0, 64, 6, 0, 0]);
        out.extend_from_slice(&self.ip.0);
        out.extend_from_slice(&self.ip.1);
        out.extend_from_slice(&self.port.0.to_be_bytes());
        out.extend_from_slice(&self.port.1.to_be_bytes());
        out.extend_from_slice(&sequence.to_be_bytes());
        // No acknowledgement; header of 5 words, ACK; window; checksum; urgent pointer.
        out.extend_from_slice(&[0, 0, 0, 0, 0x50, 0x10, 0xff, 0xff, 0, 0, 0, 0]);
    }

    /// Completes a frame with the checksums of IPv4 and TCP. If `partial`, TCP's covers only the pseudo header.
    pub(crate) fn finish(&self, partial: bool, frame: &mut [u8]) {
        let ip = checksum::checksum(&frame[14..34]);
        frame[24..26].copy_from_slice(&ip.to_be_bytes());
        let len = (frame.len() - 34) as u32;
        let pseudo = checksum::pseudo_v4(self.ip.0.into(), self.ip.1.into(), 6, len);
        let tcp = if partial { checksum::fold(pseudo) } else { checksum::finish(pseudo + checksum::sum(&frame[34..])) };
        frame[50..52].copy_from_slice(&tcp.to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use bifrost_nic::{parse, verify_transport_checksum};

    use super::*;

    fn frame(record: Record, len: usize) -> Vec<u8> {
        let addresses = Addresses {
            mac: ([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]),
            ip: ([10, 0, 0, 1], [10, 0, 0, 2]),
            port: (1, 2),
        };
        let mut out = Vec::new();
        addresses.start(len, record.seq, &mut out);
        record.write(len, &mut out);
        addresses.finish(false, &mut out);
        out
    }

    #[test]
    fn the_data_path_parses_frames_as_tcp() {
        let record = Record { flow: 3, seq: 9, pair_seq: 11, sent_at: 12345 };
        for len in [24, 25, 100, 1460] {
            let frame = frame(record, len);
            let parsed = parse(&frame, frame.len()).expect("a frame");
            assert!(parsed.is_tcp() && verify_transport_checksum(&frame, &parsed));
            assert_eq!(Record::read(&frame[HEADERS_BYTES..]), Some(record));
            let mut bad = frame.clone();
            *bad.last_mut().expect("a byte") ^= 1;
            assert!(len == RECORD_BYTES || Record::read(&bad[HEADERS_BYTES..]).is_none(), "the pattern is checked");
        }
    }

    #[test]
    fn each_kind_of_fault_is_detected() {
        type Case = (&'static str, &'static [u32], Option<Kind>);
        let cases: &[Case] = &[
            ("in order", &[0, 1, 2, 3], None),
            ("a swap", &[0, 2, 1, 3], Some(Kind::Reordered)),
            ("twice", &[0, 1, 1, 2, 3], Some(Kind::Duplicate)),
            ("lost", &[0, 1, 3], Some(Kind::Lost)),
            ("lost at the end", &[0, 1, 2], Some(Kind::Lost)),
        ];
        for (name, order, want) in cases {
            let mut flows = Flows::default();
            let pair = flows.add_pair(false);
            let flow = flows.add(0, 1, 0, pair, false, 0);
            let frames: Vec<Vec<u8>> = (0..4).map(|_| frame(flows.send(5, flow), 50)).collect();
            let mut violations = Violations::default();
            for &i in *order {
                flows.received(10, 1, &frames[i as usize], &mut violations);
            }
            flows.check_complete(20, &mut violations);
            assert_eq!(violations.first().map(|v| v.kind), *want, "{name}");
        }
        let mut flows = Flows::default();
        let pair = flows.add_pair(true);
        let (a, b) = (flows.add(0, 1, 0, pair, false, 0), flows.add(0, 1, 0, pair, false, 0));
        let (first, second) = (frame(flows.send(1, a), 50), frame(flows.send(2, b), 50));
        let mut violations = Violations::default();
        flows.completed(2, &first, &mut violations);
        assert_eq!(violations.first().map(|v| v.kind), Some(Kind::ReleasedEarly));
        let mut violations = Violations::default();
        flows.received(3, 1, &second, &mut violations);
        assert!(violations.is_empty());
        flows.received(3, 1, &first, &mut violations);
        assert_eq!(violations.first().map(|v| v.kind), Some(Kind::Reordered), "strict: across flows");
        let mut violations = Violations::default();
        flows.received(3, 0, &first, &mut violations);
        assert_eq!(violations.first().map(|v| v.kind), Some(Kind::WrongGuest));
    }

    #[test]
    fn plain_vxlan_packets_may_be_lost_or_late() {
        let mut flows = Flows::default();
        let pair = flows.add_pair(false);
        let flow = flows.add(0, 1, 0, pair, false, 0);
        let frames: Vec<Vec<u8>> = (0..3).map(|_| frame(flows.send(5, flow), 50)).collect();
        let mut violations = Violations::default();
        flows.exempt(&frames[0]);
        flows.exempt(&frames[1]);
        assert_eq!(flows.missing, 1);
        for i in [2, 1, 1] {
            flows.received(10, 1, &frames[i], &mut violations);
        }
        flows.check_complete(20, &mut violations);
        assert_eq!((violations.len(), flows.missing), (0, 0));
    }
}
