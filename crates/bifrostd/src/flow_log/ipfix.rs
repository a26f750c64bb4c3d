//! IPFIX messages (RFC 7011) of flow records, as bidirectional flows (RFC 5103). No I/O.
//!
//! The source of a record is the end that sent the first packet. Where IANA has no element, an enterprise-specific one
//! is used, which an options template describes (RFC 5610).

use std::net::IpAddr;

use bifrost_avs::{Direction, DropReason};
use bifrost_wire::Vni;

use super::entry::Entry;
use super::rules;

/// IPFIX version.
const VERSION: u16 = 10;
/// Length of a message header, bytes.
const HEADER: usize = 16;
/// Longest message, bytes: in UDP it fits every IPv6 link (RFC 7011, section 10.3.3).
const MOST: usize = 1232;
/// Set IDs of template sets and options template sets.
const TEMPLATES: u16 = 2;
const OPTIONS_TEMPLATES: u16 = 3;
/// IDs of the templates of flow records, and of descriptions of enterprise-specific elements.
const V4: u16 = 256;
const V6: u16 = 257;
const ELEMENT_TYPES: u16 = 258;
/// IDs of the templates of records about rules.
const RULES_V4: u16 = 259;
const RULES_V6: u16 = 260;
/// Variable length: given with each value.
const VARIABLE: u16 = 65535;
/// Reverse elements (RFC 5103, section 6.1).
const REVERSE: Enterprise = Enterprise::Number(29_305);

/// Our enterprise-specific elements: see [`OWN`].
const HANDSHAKE_US: u16 = 1;
const DROP_REASON: u16 = 2;
const RULE_NAME: u16 = 3;

/// Element, data type (RFC 5610, section 3.1), units (RFC 5610, section 3.2), and name.
const OWN: [(u16, u8, u16, &str); 3] = [
    // unsigned32, microseconds.
    (HANDSHAKE_US, 3, 7, "tcpHandshakeMicroseconds"),
    // string, none.
    (DROP_REASON, 13, 0, "dropReason"),
    (RULE_NAME, 13, 0, "ruleName"),
];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Enterprise {
    /// IANA's.
    None,
    Number(u32),
    Own,
}

/// An element of a template: number, length in bytes, enterprise.
type Field = (u16, u16, Enterprise);

/// Elements of a flow record, in order, for IPv4 or IPv6 addresses.
fn fields(v6: bool) -> [Field; 19] {
    let none = Enterprise::None;
    let (source, destination, address) = if v6 { (27, 28, 16) } else { (8, 12, 4) };
    [
        // flowStartMilliseconds, flowEndMilliseconds
        (152, 8, none),
        (153, 8, none),
        // sourceIPv4Address or sourceIPv6Address, and the destination's
        (source, address, none),
        (destination, address, none),
        // sourceTransportPort, destinationTransportPort, protocolIdentifier
        (7, 2, none),
        (11, 2, none),
        (4, 1, none),
        // packetDeltaCount, octetDeltaCount, tcpControlBits, and their reverse elements
        (2, 8, none),
        (1, 8, none),
        (6, 2, none),
        (2, 8, REVERSE),
        (1, 8, REVERSE),
        (6, 2, REVERSE),
        // flowEndReason, forwardingStatus, flowDirection
        (136, 1, none),
        (89, 1, none),
        (61, 1, none),
        // layer2SegmentId, interfaceName
        (351, 8, none),
        (82, VARIABLE, none),
        (HANDSHAKE_US, 4, Enterprise::Own),
    ]
}

/// The same for a record about a rule.
fn rule_fields(v6: bool) -> [Field; 14] {
    let none = Enterprise::None;
    let (source, destination, address) = if v6 { (27, 28, 16) } else { (8, 12, 4) };
    [
        (152, 8, none),
        (153, 8, none),
        (source, address, none),
        (destination, address, none),
        (7, 2, none),
        (11, 2, none),
        (4, 1, none),
        (2, 8, none),
        (1, 8, none),
        // firewallEvent, flowDirection
        (233, 1, none),
        (61, 1, none),
        (351, 8, none),
        (82, VARIABLE, none),
        (RULE_NAME, VARIABLE, Enterprise::Own),
    ]
}

/// Makes the messages of one observation domain.
pub(super) struct Exporter {
    domain: u32,
    enterprise: u32,
    /// Number of data records sent, modulo 2^32.
    sequence: u32,
}

impl Exporter {
    pub(super) fn new(domain: u32, enterprise: u32) -> Self {
        Exporter { domain, enterprise, sequence: 0 }
    }

    /// Number of data records sent, modulo 2^32.
    pub(super) fn sequence(&self) -> u32 {
        self.sequence
    }

    /// Continues the numbers of another exporter with the same domain.
    pub(super) fn continue_at(&mut self, sequence: u32) {
        self.sequence = sequence;
    }

    /// The message with the templates. `now_s`: seconds since 1970.
    pub(super) fn templates(&mut self, now_s: u32) -> Vec<u8> {
        let mut message = self.begin(now_s);
        set(&mut message, TEMPLATES, |out| {
            for (id, v6) in [(V4, false), (V6, true)] {
                // The drop reason is a record's last field.
                let fields = fields(v6);
                put16(out, id);
                put16(out, fields.len() as u16 + 1);
                fields.into_iter().for_each(|field| self.specifier(out, field));
                self.specifier(out, (DROP_REASON, VARIABLE, Enterprise::Own));
            }
            for (id, v6) in [(RULES_V4, false), (RULES_V6, true)] {
                let fields = rule_fields(v6);
                put16(out, id);
                put16(out, fields.len() as u16);
                fields.into_iter().for_each(|field| self.specifier(out, field));
            }
        });
        set(&mut message, OPTIONS_TEMPLATES, |out| {
            let none = Enterprise::None;
            // privateEnterpriseNumber and informationElementId are the scope; data type, units, name.
            let fields = [(346, 4, none), (303, 2, none), (339, 1, none), (345, 2, none), (341, VARIABLE, none)];
            [ELEMENT_TYPES, fields.len() as u16, 2].into_iter().for_each(|n| put16(out, n));
            fields.into_iter().for_each(|field| self.specifier(out, field));
        });
        set(&mut message, ELEMENT_TYPES, |out| {
            for (element, data_type, units, name) in OWN {
                out.extend(self.enterprise.to_be_bytes());
                put16(out, element);
                out.push(data_type);
                put16(out, units);
                text(out, name);
            }
        });
        // Options data records count, too (RFC 7011, section 3.1).
        self.sequence = self.sequence.wrapping_add(OWN.len() as u32);
        finish(message)
    }

    /// Messages with flow records, and the number of records in each.
    pub(super) fn records(&mut self, entries: &[Entry<'_>], now_s: u32) -> Vec<(Vec<u8>, usize)> {
        let of = |v6| entries.iter().filter(move |entry| entry.record.local.is_ipv6() == v6);
        let mut messages = self.data(V4, of(false), write, now_s);
        messages.extend(self.data(V6, of(true), write, now_s));
        messages
    }

    /// The same for records about rules.
    pub(super) fn rules(&mut self, entries: &[rules::Entry<'_>], now_s: u32) -> Vec<(Vec<u8>, usize)> {
        let of = |v6| entries.iter().filter(move |entry| entry.record.local.is_ipv6() == v6);
        let mut messages = self.data(RULES_V4, of(false), write_rule, now_s);
        messages.extend(self.data(RULES_V6, of(true), write_rule, now_s));
        messages
    }

    /// Messages with records of one template.
    fn data<T>(
        &mut self,
        template: u16,
        entries: impl Iterator<Item = T>,
        write: impl Fn(&mut Vec<u8>, &T),
        now_s: u32,
    ) -> Vec<(Vec<u8>, usize)> {
        let mut messages = Vec::new();
        let mut entries = entries.peekable();
        while entries.peek().is_some() {
            let mut message = self.begin(now_s);
            let mut count = 0;
            set(&mut message, template, |out| {
                while let Some(entry) = entries.peek() {
                    let mut record = Vec::with_capacity(192);
                    write(&mut record, entry);
                    if out.len() + record.len() > MOST {
                        break;
                    }
                    out.append(&mut record);
                    count += 1;
                    entries.next();
                }
            });
            self.sequence = self.sequence.wrapping_add(count);
            messages.push((finish(message), count as usize));
        }
        messages
    }

    fn begin(&self, now_s: u32) -> Vec<u8> {
        let mut message = Vec::with_capacity(MOST);
        put16(&mut message, VERSION);
        // The length, set at the end.
        put16(&mut message, 0);
        for word in [now_s, self.sequence, self.domain] {
            message.extend(word.to_be_bytes());
        }
        message
    }

    fn specifier(&self, out: &mut Vec<u8>, (element, len, enterprise): Field) {
        let number = match enterprise {
            Enterprise::None => None,
            Enterprise::Number(number) => Some(number),
            Enterprise::Own => Some(self.enterprise),
        };
        put16(out, if number.is_some() { element | 0x8000 } else { element });
        put16(out, len);
        out.extend(number.into_iter().flat_map(u32::to_be_bytes));
    }
}

fn write(out: &mut Vec<u8>, entry: &&Entry<'_>) {
    let record = entry.record;
    let local = (record.local, record.local_port, record.sent);
    let remote = (record.remote, record.remote_port, record.received);
    let ((source, source_port, there), (destination, destination_port, back)) = match record.origin {
        Direction::Egress => (local, remote),
        Direction::Ingress => (remote, local),
    };
    out.extend(entry.start_ms.to_be_bytes());
    out.extend(entry.end_ms.to_be_bytes());
    ends(out, [(source, source_port), (destination, destination_port)], record.protocol);
    for traffic in [there, back] {
        out.extend(traffic.packets.to_be_bytes());
        out.extend(traffic.bytes.to_be_bytes());
        put16(out, u16::from(traffic.tcp_flags));
    }
    out.push(record.end.number());
    out.push(forwarding_status(record.rejected));
    // From the switch's point of view: packets from a guest are ingress.
    out.push(if record.origin == Direction::Egress { 0 } else { 1 });
    network(out, record.vni, entry.port);
    let micros = record.handshake_ns.map_or(0, |ns| ns / 1000);
    out.extend(u32::try_from(micros).unwrap_or(u32::MAX).to_be_bytes());
    text(out, record.rejected.map_or("", DropReason::name));
}

fn write_rule(out: &mut Vec<u8>, entry: &&rules::Entry<'_>) {
    let record = entry.record;
    out.extend(entry.start_ms.to_be_bytes());
    out.extend(entry.end_ms.to_be_bytes());
    ends(out, entry.ends(), record.protocol);
    out.extend(record.packets.to_be_bytes());
    out.extend(record.bytes.to_be_bytes());
    // firewallEvent (IANA): flow created, or denied.
    out.push(if record.accepted { 1 } else { 3 });
    out.push(if record.direction == Direction::Egress { 0 } else { 1 });
    network(out, record.vni, entry.port);
    text(out, &rules::words(&record.rule));
}

/// Addresses, then ports, then the protocol.
fn ends(out: &mut Vec<u8>, ends: [(IpAddr, u16); 2], protocol: u8) {
    for (address, _) in ends {
        match address {
            IpAddr::V4(address) => out.extend(address.octets()),
            IpAddr::V6(address) => out.extend(address.octets()),
        }
    }
    ends.into_iter().for_each(|(_, port)| put16(out, port));
    out.push(protocol);
}

/// The VNI and the port's name.
fn network(out: &mut Vec<u8>, vni: Vni, port: &str) {
    // Type VXLAN, and the 24-bit VNI (IANA, layer2SegmentId).
    out.extend((1 << 56 | u64::from(vni.get())).to_be_bytes());
    text(out, port);
}

/// `forwardingStatus` (RFC 7270, section 4.12): forwarded, or dropped with a reason.
fn forwarding_status(rejected: Option<DropReason>) -> u8 {
    const FORWARDED: u8 = 64;
    const DROPPED: u8 = 128;
    match rejected {
        None => FORWARDED,
        Some(DropReason::Acl | DropReason::GroupIngress | DropReason::GroupEgress) => DROPPED + 1,
        Some(DropReason::NoRoute | DropReason::NotRoutable) => DROPPED + 3,
        Some(DropReason::PathMtu) => DROPPED + 5,
        Some(DropReason::TtlExpired) => DROPPED + 9,
        Some(_) => DROPPED,
    }
}

fn put16(out: &mut Vec<u8>, number: u16) {
    out.extend(number.to_be_bytes());
}

/// A string with its length (RFC 7011, section 7), truncated to 254 bytes.
fn text(out: &mut Vec<u8>, text: &str) {
    let len = text.len().min(254);
    out.push(len as u8);
    out.extend(&text.as_bytes()[..len]);
}

/// A set with the content that `content` writes.
fn set(message: &mut Vec<u8>, id: u16, content: impl FnOnce(&mut Vec<u8>)) {
    let from = message.len();
    put16(message, id);
    put16(message, 0);
    content(message);
    let len = (message.len() - from) as u16;
    message[from + 2..from + 4].copy_from_slice(&len.to_be_bytes());
}

fn finish(mut message: Vec<u8>) -> Vec<u8> {
    debug_assert!(message.len() >= HEADER && message.len() <= MOST);
    let len = message.len() as u16;
    message[2..4].copy_from_slice(&len.to_be_bytes());
    message
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use std::sync::Arc;

    use bifrost_avs::{FlowEnd, FlowRecord, PortId, RuleName, RuleOwner, RuleRecord, Traffic};

    use super::*;

    fn record(n: u16, v6: bool, origin: Direction) -> FlowRecord {
        let [local, remote] = [1, 2].map(|last| {
            if v6 { IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, last]) } else { IpAddr::from([10, 0, 0, last as u8]) }
        });
        FlowRecord {
            log: "".into(),
            port: PortId(3),
            vni: Vni::new(100).unwrap(),
            origin,
            local,
            local_port: n,
            remote,
            remote_port: 443,
            protocol: 6,
            rejected: (n % 2 == 1).then_some(DropReason::Acl),
            sent: Traffic { packets: 10, bytes: 1000, tcp_flags: 2 },
            received: Traffic { packets: 20, bytes: 2000, tcp_flags: 16 },
            start_ns: 0,
            end_ns: 0,
            end: FlowEnd::Closed,
            handshake_ns: Some(1_234_567),
        }
    }

    /// Reads messages as a collector does, by the templates that it has received.
    #[derive(Default)]
    struct Reader {
        templates: HashMap<u16, Vec<(u16, u16, Option<u32>)>>,
        records: Vec<(u16, Vec<Vec<u8>>)>,
        sequence: u32,
    }

    fn number(bytes: &mut &[u8], len: usize) -> u32 {
        let (head, rest) = bytes.split_at(len);
        *bytes = rest;
        head.iter().fold(0, |n, b| n << 8 | u32::from(*b))
    }

    impl Reader {
        fn read(&mut self, message: &[u8]) {
            let bytes = &mut &message[..];
            assert_eq!(number(bytes, 2), 10);
            assert_eq!(number(bytes, 2) as usize, message.len());
            assert_eq!(number(bytes, 4), 99);
            assert_eq!(number(bytes, 4), self.sequence);
            assert_eq!(number(bytes, 4), 7);
            while !bytes.is_empty() {
                let (id, len) = (number(bytes, 2) as u16, number(bytes, 2) as usize);
                let (set, rest) = bytes.split_at(len - 4);
                *bytes = rest;
                self.set(id, set);
            }
        }

        fn set(&mut self, id: u16, mut set: &[u8]) {
            let bytes = &mut set;
            while !bytes.is_empty() {
                if id != TEMPLATES && id != OPTIONS_TEMPLATES {
                    let fields = self.templates[&id].iter().map(|(_, len, _)| {
                        let len = if *len == VARIABLE { number(bytes, 1) as usize } else { usize::from(*len) };
                        let (value, rest) = bytes.split_at(len);
                        *bytes = rest;
                        value.to_vec()
                    });
                    let values = fields.collect();
                    self.records.push((id, values));
                    self.sequence += 1;
                    continue;
                }
                let (template, count) = (number(bytes, 2) as u16, number(bytes, 2));
                if id == OPTIONS_TEMPLATES {
                    assert_eq!(number(bytes, 2), 2, "scope fields");
                }
                let fields = (0..count).map(|_| {
                    let (element, len) = (number(bytes, 2) as u16, number(bytes, 2) as u16);
                    (element & 0x7fff, len, (element & 0x8000 != 0).then(|| number(bytes, 4)))
                });
                let fields = fields.collect();
                self.templates.insert(template, fields);
            }
        }
    }

    #[test]
    fn a_collector_reads_flow_records() {
        let mut exporter = Exporter::new(7, 4242);
        let mut reader = Reader::default();
        reader.read(&exporter.templates(99));
        assert_eq!(reader.records.len(), OWN.len(), "descriptions of our elements");
        let records: Vec<_> = (0..100)
            .map(|n| record(n, n % 3 == 0, if n % 4 == 0 { Direction::Ingress } else { Direction::Egress }))
            .collect();
        let entry = |record| Entry { record, port: "web-1", start_ms: 1 << 40, end_ms: (1 << 40) + 5 };
        let entries: Vec<_> = records.iter().map(entry).collect();
        let messages = exporter.records(&entries, 99);
        assert_eq!(messages.iter().map(|(_, count)| count).sum::<usize>(), 100);
        assert!(messages.len() > 5 && messages.iter().all(|(message, _)| message.len() <= MOST));
        messages.iter().for_each(|(message, _)| reader.read(message));
        // Templates are repeated, for collectors that start later.
        reader.read(&exporter.templates(99));

        let own = &reader.templates[&V4];
        assert_eq!(own[own.len() - 1], (DROP_REASON, VARIABLE, Some(4242)));
        let mut seen = 0;
        for (id, values) in reader.records.iter().filter(|(id, _)| *id != ELEMENT_TYPES) {
            let template = &reader.templates[id];
            let value = |element: u16, enterprise: Option<u32>| {
                let at = template.iter().position(|(e, _, n)| (*e, *n) == (element, enterprise)).unwrap();
                &values[at][..]
            };
            let big = |element, enterprise| value(element, enterprise).iter().fold(0u64, |n, b| n << 8 | u64::from(*b));
            // The guest's port identifies the record.
            let is_in = big(7, None) == 443;
            let n = big(if is_in { 11 } else { 7 }, None) as u16;
            let record = &records[usize::from(n)];
            seen += 1;
            assert_eq!(is_in, record.origin == Direction::Ingress);
            let there = if is_in { (20, 2000, 16) } else { (10, 1000, 2) };
            let back = if is_in { (10, 1000, 2) } else { (20, 2000, 16) };
            assert_eq!((big(2, None), big(1, None), big(6, None)), there);
            let reverse = Some(29_305);
            assert_eq!((big(2, reverse), big(1, reverse), big(6, reverse)), back);
            assert_eq!((big(152, None), big(153, None), big(4, None), big(136, None)), (1 << 40, (1 << 40) + 5, 6, 3));
            assert_eq!(big(351, None), 1 << 56 | 100);
            assert_eq!(value(82, None), b"web-1");
            assert_eq!(big(HANDSHAKE_US, Some(4242)), 1234);
            let (status, reason) = if n % 2 == 1 { (129, &b"acl"[..]) } else { (64, &b""[..]) };
            assert_eq!((big(89, None), value(DROP_REASON, Some(4242))), (status, reason));
            let source = if record.local.is_ipv6() { 27 } else { 8 };
            assert_eq!(value(source, None).last(), Some(if is_in { &2 } else { &1 }));
        }
        assert_eq!(seen, 100);
    }

    #[test]
    fn a_collector_reads_records_about_rules() {
        let mut exporter = Exporter::new(7, 4242);
        let mut reader = Reader::default();
        reader.read(&exporter.templates(99));
        let records: Vec<_> = (0..100u16)
            .map(|n| {
                let flow = record(n, n % 3 == 0, Direction::Egress);
                let (owner, direction) = (RuleOwner::Group("g".repeat(63)), Direction::Egress);
                RuleRecord {
                    rule: Arc::new(RuleName { owner, direction, number: u32::from(n) + 1 }),
                    port: flow.port,
                    vni: flow.vni,
                    direction: if n % 2 == 0 { Direction::Egress } else { Direction::Ingress },
                    accepted: n % 4 == 0,
                    local: flow.local,
                    local_port: n,
                    remote: flow.remote,
                    remote_port: 443,
                    protocol: 6,
                    packets: 3,
                    bytes: 180,
                    start_ns: 0,
                    end_ns: 0,
                }
            })
            .collect();
        let entry = |record| rules::Entry { record, port: "web-1", start_ms: 1 << 40, end_ms: (1 << 40) + 5 };
        let entries: Vec<_> = records.iter().map(entry).collect();
        let messages = exporter.rules(&entries, 99);
        assert!(messages.len() > 5 && messages.iter().all(|(message, _)| message.len() <= MOST));
        messages.iter().for_each(|(message, _)| reader.read(message));
        let read: Vec<_> = reader.records.iter().filter(|(id, _)| matches!(*id, RULES_V4 | RULES_V6)).collect();
        assert_eq!(read.len(), 100);
        for (id, values) in read {
            let at = |element| reader.templates[id].iter().position(|(e, _, _)| *e == element).unwrap();
            let big = |element| values[at(element)].iter().fold(0u64, |n, b| n << 8 | u64::from(*b));
            let is_in = big(61) == 1;
            let n = if is_in { big(11) } else { big(7) };
            assert_eq!(is_in, n % 2 == 1);
            assert_eq!((big(2), big(1), big(233)), (3, 180, if n % 4 == 0 { 1 } else { 3 }));
            let expected = format!("egress rule {} of security group {}", n + 1, "g".repeat(63));
            assert_eq!(values[at(RULE_NAME)], expected.as_bytes());
        }
    }
}
