//! Fragmentation, options and extension headers cannot bypass the rules.
//!
//! A slow model, which knows only whole packets, evaluates the rules. Packets are fragmented, correctly or not, mixed,
//! and sent with cold and warm caches. Fragments that pass are reassembled like receivers that prefer the first or the
//! last of overlapping bytes, from any fragment on; the result must be a packet that the model allows. A correctly
//! fragmented packet must pass if the whole packet does.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use bifrost_avs::{
    AclRule, Direction, FlowLimits, GATEWAY_MAC, GroupId, GroupRule, Pattern, PeerId, PortId, SecurityGroup,
    SessionLimits, Switch, Tables,
};
use bifrost_nic::{Offload, parse};

use super::tables::{mac, plain_tables, vni};
use crate::Input;

const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMP: u8 = 1;
const ICMPV6: u8 = 58;
const FRAGMENT: u8 = 44;
const DESTINATION_OPTIONS: u8 = 60;
const SECOND: u64 = 1 << 30;

/// Sessions time out after this; the model's never do.
const SHORT_S: u64 = 45;
/// Maximum time between fragments of one packet, ns.
const TOGETHER_NS: u64 = 5_000_000_000;

pub(super) fn run(input: &mut Input<'_>) {
    let tables = tables(input);
    let switch = Switch::build(&tables, 0).unwrap_or_else(|e| panic!("{e}"));
    let mut world = World {
        switch,
        model: Model { tables, conversations: BTreeSet::new() },
        now_ns: 1000 * SECOND,
        received: BTreeMap::new(),
        last: None,
        identification: 1,
        is_exact: true,
    };
    for _ in 0..60 {
        if input.is_empty() {
            break;
        }
        world.step(input);
    }
}

/// Some rules of an ACL, and of groups of the two guests.
fn tables(input: &mut Input<'_>) -> Tables {
    let mut tables = plain_tables();
    let pattern = |input: &mut Input<'_>| {
        let (protocol, port) = input.pick(&[(TCP, 22), (TCP, 80), (UDP, 53), (UDP, 111), (ICMP, 0), (ICMPV6, 0)]);
        let dst_ports = if port == 0 || input.chance(32) { 0..=u16::MAX } else { port..=port };
        Pattern { protocol: (!input.chance(16)).then_some(protocol), dst_ports, ..Pattern::default() }
    };
    let direction = |input: &mut Input<'_>| input.pick(&[Direction::Ingress, Direction::Egress]);
    for _ in 0..input.below(4) {
        let rule = AclRule { direction: direction(input), pattern: pattern(input), allow: input.chance(64), log: None };
        tables.vpcs[0].acl.push(rule);
    }
    for port in 0..2 {
        let rules = (0..input.below(3)).map(|_| GroupRule::new(direction(input), pattern(input)));
        tables.groups.push(SecurityGroup::new(rules.collect()));
        tables.ports[port].groups = if input.chance(128) { vec![GroupId(port as u16)] } else { vec![] };
        tables.ports[port].mtu = 1500;
    }
    tables.routes.iter_mut().for_each(|route| route.mtu = 1500);
    tables.sessions = SessionLimits { total: 1000, per_port: 1000 };
    tables.flows = FlowLimits { records: 8, vectors: true };
    #[cfg(feature = "mutations")]
    {
        tables.mutation = super::tables::mutation();
    }
    tables
}

/// Fields of a whole packet that rules match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct What {
    src: IpAddr,
    dst: IpAddr,
    protocol: u8,
    /// For TCP and UDP.
    ports: Option<(u16, u16)>,
    icmp: Option<Icmp>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Icmp {
    Echo {
        request: bool,
        identifier: u16,
    },
    /// An error about a packet with these endpoints.
    Error {
        src: (IpAddr, u16),
        dst: (IpAddr, u16),
        protocol: u8,
    },
    Other(u8),
}

/// A port, and a session as its guest sees it: local endpoint, remote endpoint, protocol.
type Conversation = (usize, (IpAddr, u16), (IpAddr, u16), u8);

/// Rules, evaluated slowly, and an unlimited number of sessions.
struct Model {
    tables: Tables,
    conversations: BTreeSet<Conversation>,
}

impl Model {
    /// Whether a whole packet may pass between two of vNICs 1 to 4, of which 1 and 2 are on this host. Starts a session
    /// if allowed.
    fn passes(&mut self, from: u8, to: u8, what: &What) -> bool {
        let here = |n: u8| (n <= 2).then(|| usize::from(n) - 1);
        let egress = here(from).is_none_or(|port| self.passes_at(port, Direction::Egress, what));
        egress && here(to).is_none_or(|port| self.passes_at(port, Direction::Ingress, what))
    }

    /// The same without starting a session.
    fn would_pass(&mut self, from: u8, to: u8, what: &What) -> bool {
        let before = self.conversations.clone();
        let passes = self.passes(from, to, what);
        self.conversations = before;
        passes
    }

    fn passes_at(&mut self, port: usize, direction: Direction, what: &What) -> bool {
        let acl = self.tables.vpcs[0].acl.iter().find(|r| r.direction == direction && matches(&r.pattern, what));
        if acl.is_some_and(|rule| !rule.allow) {
            return false;
        }
        let Some(&GroupId(group)) = self.tables.ports[port].groups.first() else { return true };
        let rules = &self.tables.groups[usize::from(group)].rules;
        let mut of_direction = rules.iter().filter(|rule| rule.direction == direction).peekable();
        let unrestricted = direction == Direction::Egress && of_direction.peek().is_none();
        let permitted = unrestricted || of_direction.any(|rule| matches(&rule.pattern, what));
        let turned = |a, b| if direction == Direction::Egress { (a, b) } else { (b, a) };
        let (src_port, dst_port) = match (what.ports, what.icmp) {
            (Some(ports), _) => ports,
            (None, Some(Icmp::Echo { identifier, .. })) => (identifier, identifier),
            (None, Some(Icmp::Error { src, dst, protocol })) => {
                // It belongs to the packet in the other direction.
                let (here, there) = turned(dst, src);
                let known = self.conversations.contains(&(port, here, there, protocol));
                return permitted || (known && (what.src, what.dst) == (dst.0, src.0));
            }
            // Other protocols start sessions without ports.
            (None, Some(Icmp::Other(kind))) => (0xff00 | u16::from(kind), 0xff00 | u16::from(kind)),
            (None, None) => (0, 0),
        };
        let (here, there) = turned((what.src, src_port), (what.dst, dst_port));
        let conversation = (port, here, there, what.protocol);
        let asks = matches!(what.icmp, Some(Icmp::Echo { request: true, .. }));
        let passes = permitted || (!asks && self.conversations.contains(&conversation));
        if passes {
            self.conversations.insert(conversation);
        }
        passes
    }

    /// Whether rules for a packet depend on fields that later fragments do not contain.
    fn looks_at_ports(&self, from: u8, to: u8) -> bool {
        let is_full = |pattern: &Pattern| pattern.dst_ports == (0..=u16::MAX);
        [(from, Direction::Egress), (to, Direction::Ingress)].into_iter().filter(|(n, _)| *n <= 2).any(
            |(n, direction)| {
                let acl = self.tables.vpcs[0].acl.iter().any(|r| r.direction == direction && !is_full(&r.pattern));
                acl || !self.tables.ports[usize::from(n) - 1].groups.is_empty()
            },
        )
    }
}

fn matches(pattern: &Pattern, what: &What) -> bool {
    let any = pattern.dst_ports == (0..=u16::MAX);
    pattern.protocol.is_none_or(|p| p == what.protocol)
        && (any || what.ports.is_some_and(|(_, dst)| pattern.dst_ports.contains(&dst)))
}

/// A whole packet: headers, and the bytes after its IP header.
#[derive(Clone, Debug)]
struct Packet {
    from: u8,
    to: u8,
    what: What,
    body: Vec<u8>,
    hop_limit: u8,
}

/// A fragment, as in its headers.
#[derive(Clone, Debug)]
struct Piece {
    from: usize,
    more: bool,
    /// In IPv6 every fragment has one.
    protocol: u8,
    bytes: Vec<u8>,
}

impl Packet {
    fn any(input: &mut Input<'_>, last: Option<&Packet>) -> Self {
        let from = input.pick(&[3, 1, 2, 4]);
        let to = match from {
            1 => input.pick(&[3, 2, 4]),
            2 => input.pick(&[1, 3, 4]),
            _ => input.pick(&[1, 2]),
        };
        let v6 = input.chance(100) && from != 4 && to != 4;
        let (src, dst) = (address(from, v6), address(to, v6));
        let ports = (input.pick(&[4000, 53, 80]), input.pick(&[22, 53, 80, 111, 4000]));
        let payload = 64 + 8 * input.below(8);
        let filled = |start: &[u8]| {
            let mut body = start.to_vec();
            body.resize(payload, 0xaa);
            body
        };
        let [[a, b], [c, d]] = [ports.0, ports.1].map(u16::to_be_bytes);
        let icmp = if v6 { ICMPV6 } else { ICMP };
        let what = What { src, dst, protocol: icmp, ports: None, icmp: None };
        let (what, body) = match input.below(12) {
            0..4 => {
                let flags = input.pick(&[0x02, 0x10, 0x12]);
                let body = filled(&[a, b, c, d, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, flags, 1, 0, 0, 0, 0, 0]);
                (What { protocol: TCP, ports: Some(ports), ..what }, body)
            }
            4..8 => (What { protocol: UDP, ports: Some(ports), ..what }, filled(&[a, b, c, d, 0, payload as u8, 0, 0])),
            8 | 9 => {
                let request = input.chance(128);
                let kind = if v6 { 129 - u8::from(request) } else { 8 * u8::from(request) };
                let echo = Icmp::Echo { request, identifier: ports.0 };
                (What { icmp: Some(echo), ..what }, filled(&[kind, 0, 0, 0, a, b, 0, 1]))
            }
            10 if v6 => {
                let kind = input.pick(&[133, 134, 135, 136, 137]);
                (What { icmp: Some(Icmp::Other(kind)), ..what }, filled(&[kind, 0, 0, 0, 0, 0, 0, 0]))
            }
            _ => match last.filter(|last| last.what.ports.is_some() && last.what.src.is_ipv6() == v6) {
                Some(last) => last.error(what),
                None => {
                    (What { icmp: Some(Icmp::Other(13 + icmp)), ..what }, filled(&[13 + icmp, 0, 0, 0, 0, 0, 0, 0]))
                }
            },
        };
        Packet { from, to, what, body, hop_limit: input.pick(&[64, 255]) }
    }

    /// An error that quotes this packet.
    fn error(&self, what: What) -> (What, Vec<u8>) {
        let v6 = what.src.is_ipv6();
        let mut body = vec![if v6 { 1 } else { 3 }, 0, 0, 0, 0, 0, 0, 0];
        body.extend(&self.whole(&[])[14..]);
        let (src_port, dst_port) = self.what.ports.unwrap_or_default();
        let (src, dst) = ((self.what.src, src_port), (self.what.dst, dst_port));
        (What { icmp: Some(Icmp::Error { src, dst, protocol: self.what.protocol }), ..what }, body)
    }

    /// The frame with the whole packet, after `options` in IPv6.
    fn whole(&self, options: &[u8]) -> Vec<u8> {
        let next = if options.is_empty() { self.what.protocol } else { DESTINATION_OPTIONS };
        self.frame(next, 0, 0, &[options, &self.body].concat())
    }

    /// The frame with a fragment. `options`: IPv6 options before the fragment header.
    fn piece(&self, piece: &Piece, identification: u8, options: &[u8]) -> Vec<u8> {
        let field = (piece.from / 8) as u16;
        if self.what.src.is_ipv4() {
            let field = field | if piece.more { 0x2000 } else { 0 };
            return self.frame(self.what.protocol, identification, field, &piece.bytes);
        }
        let [a, b] = (field << 3 | u16::from(piece.more)).to_be_bytes();
        let mut options = options.to_vec();
        let next = if options.is_empty() { FRAGMENT } else { DESTINATION_OPTIONS };
        if let Some(first) = options.first_mut() {
            *first = FRAGMENT;
        }
        let fragment = [piece.protocol, 0, a, b, 0, 0, 0, identification];
        self.frame(next, 0, 0, &[&options, &fragment[..], &piece.bytes].concat())
    }

    fn frame(&self, next: u8, identification: u8, field: u16, payload: &[u8]) -> Vec<u8> {
        // vNIC 4 is behind the gateway.
        let dst = if self.to == 4 { GATEWAY_MAC } else { mac(self.to) };
        let src = if self.from == 4 { GATEWAY_MAC } else { mac(self.from) };
        let mut f = [dst.0, src.0].concat();
        match (self.what.src, self.what.dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                let [a, b] = (20 + payload.len() as u16).to_be_bytes();
                let [c, d] = field.to_be_bytes();
                f.extend([8, 0, 0x45, 0, a, b, 0, identification, c, d, self.hop_limit, next, 0, 0]);
                f.extend(src.octets().into_iter().chain(dst.octets()));
            }
            (src, dst) => {
                let [a, b] = (payload.len() as u16).to_be_bytes();
                f.extend([0x86, 0xdd, 0x60, 0, 0, 0, a, b, next, self.hop_limit]);
                for address in [src, dst] {
                    f.extend(if let IpAddr::V6(a) = address { a.octets() } else { [0; 16] });
                }
            }
        }
        f.extend(payload);
        f
    }

    /// Fragments it as real systems do.
    fn pieces(&self, body: &[u8], input: &mut Input<'_>) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let mut from = 0;
        while from < body.len() {
            let len = if from == 0 { 24 } else { 8 } + 8 * input.below(6);
            let to = (from + len).min(body.len());
            let bytes = body[from..to].to_vec();
            pieces.push(Piece { from, more: to < body.len(), protocol: self.what.protocol, bytes });
            from = to;
        }
        pieces
    }
}

fn address(n: u8, v6: bool) -> IpAddr {
    match (n, v6) {
        (4, _) => IpAddr::from([10, 1, 0, 4]),
        (n, false) => IpAddr::from([10, 0, 0, n]),
        (n, true) => IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, u16::from(n)]),
    }
}

/// Parses a packet by its payload. `None` if no receiver accepts it as anything that rules match.
fn read(mut protocol: u8, mut payload: &[u8], of: What) -> Option<What> {
    while protocol == DESTINATION_OPTIONS && of.src.is_ipv6() {
        let &[next, units] = payload.first_chunk::<2>()?;
        (protocol, payload) = (next, payload.get((usize::from(units) + 1) * 8..)?);
    }
    let b = payload.first_chunk::<8>()?;
    let pair = |at: usize| u16::from_be_bytes([b[at], b[at + 1]]);
    let (ports, icmp) = match (of.src.is_ipv6(), protocol, b[0]) {
        (_, TCP, _) if payload.len() < 20 => return None,
        (_, TCP | UDP, _) => (Some((pair(0), pair(2))), None),
        (false, ICMP, 0 | 8) => (None, Some(Icmp::Echo { request: b[0] == 8, identifier: pair(4) })),
        (true, ICMPV6, 128 | 129) => (None, Some(Icmp::Echo { request: b[0] == 128, identifier: pair(4) })),
        (_, ICMP | ICMPV6, kind) => (None, Some(Icmp::Other(kind))),
        _ => (None, None),
    };
    Some(What { protocol, ports, icmp, ..of })
}

/// The fragments of one packet at a receiver, in order of arrival.
type Pieces = Vec<(u64, Piece)>;

/// Reassembles fragments; of overlapping bytes the first or the last win.
fn reassemble(pieces: &[(u64, Piece)], first_wins: bool) -> Option<(u8, Vec<u8>)> {
    let end = pieces.iter().filter(|(_, p)| !p.more).map(|(_, p)| p.from + p.bytes.len()).max()?;
    let (mut bytes, mut protocol) = (vec![None; end], 0);
    let ordered: Vec<&Piece> = if first_wins {
        pieces.iter().rev().map(|(_, p)| p).collect()
    } else {
        pieces.iter().map(|(_, p)| p).collect()
    };
    for piece in ordered {
        if piece.from == 0 {
            protocol = piece.protocol;
        }
        for (at, byte) in piece.bytes.iter().enumerate() {
            if let Some(place) = bytes.get_mut(piece.from + at) {
                *place = Some(*byte);
            }
        }
    }
    let whole: Option<Vec<u8>> = bytes.into_iter().collect();
    whole.map(|bytes| (protocol, bytes))
}

struct World {
    switch: Switch,
    model: Model,
    now_ns: u64,
    /// By sender, receiver, family, identification, and in IPv4 the protocol.
    received: BTreeMap<(u8, u8, bool, u8, u8), Pieces>,
    last: Option<Packet>,
    /// Identification of the last correctly fragmented packet.
    identification: u8,
    /// Whether the model knows everything that the switch does, so that the switch must pass what the model allows.
    is_exact: bool,
}

impl World {
    fn step(&mut self, input: &mut Input<'_>) {
        if self.now_ns < (1000 + SHORT_S) * SECOND {
            self.now_ns += input.pick(&[0, 0, 0, SECOND, 6 * SECOND]);
            self.switch.advance(self.now_ns);
        }
        let packet = Packet::any(input, self.last.as_ref());
        let v6 = packet.what.src.is_ipv6();
        let options: &[u8] = if v6 && input.chance(40) { &[packet.what.protocol, 0, 1, 4, 0, 0, 0, 0] } else { &[] };
        match input.below(3) {
            0 => {
                // Its flow is cached after the second time at the latest.
                for _ in 0..1 + input.below(3) {
                    self.send_whole(&packet, options);
                }
                self.last = Some(packet);
            }
            1 => self.send_in_order(&packet, options, input),
            _ => self.send_badly(&packet, options, input),
        }
    }

    fn send_whole(&mut self, packet: &Packet, options: &[u8]) {
        let passed = self.send(packet, &packet.whole(options));
        let may = self.model.passes(packet.from, packet.to, &packet.what);
        assert!(may || !passed, "{packet:?} passes, but the rules deny it");
        if self.is_exact && matches!(packet.what.icmp, None | Some(Icmp::Echo { .. })) {
            assert!(passed || !may, "{packet:?} does not pass, but the rules allow it");
        }
    }

    /// A correctly fragmented packet passes if the whole packet would.
    fn send_in_order(&mut self, packet: &Packet, options: &[u8], input: &mut Input<'_>) {
        let may = self.model.would_pass(packet.from, packet.to, &packet.what);
        let pieces = packet.pieces(&packet.body, input);
        // Incorrect ones have 0 and 1.
        self.identification += 1;
        let identification = self.identification;
        let passed: Vec<bool> =
            pieces.iter().map(|piece| self.send_piece(packet, piece, identification, options)).collect();
        if self.is_exact && matches!(packet.what.icmp, None | Some(Icmp::Echo { .. })) && may {
            assert!(
                passed.iter().all(|p| *p),
                "fragmented {packet:?} does not pass, but the whole one may: {passed:?}"
            );
        }
    }

    /// Fragments of two different packets; some twice, at other offsets, or with other headers before them.
    fn send_badly(&mut self, packet: &Packet, options: &[u8], input: &mut Input<'_>) {
        // If the switch refuses fragments before it evaluates rules, the model need not know.
        self.is_exact = false;
        let identification = input.below(2) as u8;
        let mut pieces = packet.pieces(&packet.body, input);
        if input.chance(128) {
            let other = Packet { from: packet.from, to: packet.to, ..Packet::any(input, None) };
            let v6 = packet.what.src.is_ipv6();
            if other.what.src.is_ipv6() == v6 && (v6 || other.what.protocol == packet.what.protocol) {
                pieces.extend(other.pieces(&other.body, input));
            }
        }
        if packet.what.src.is_ipv6() && input.chance(40) {
            // A header before the transport header, in the first fragment.
            let before = [packet.what.protocol, 0, 1, 4, 0, 0, 0, 0];
            pieces = packet.pieces(&[&before[..], &packet.body].concat(), input);
            pieces.iter_mut().for_each(|piece| piece.protocol = DESTINATION_OPTIONS);
        }
        for _ in 0..input.below(5) {
            let (at, to) = (input.below(pieces.len()), input.below(pieces.len()));
            match input.below(7) {
                0 => pieces.swap(at, to),
                1 => pieces.insert(to, pieces[at].clone()),
                2 if pieces.len() > 1 => drop(pieces.remove(at)),
                3 => pieces[at].from = (pieces[at].from + 8 * input.below(5)).saturating_sub(16),
                4 => pieces[at].more ^= true,
                5 => pieces[at].protocol = input.pick(&[TCP, UDP, ICMPV6, DESTINATION_OPTIONS, FRAGMENT]),
                _ => {
                    let len = input.below(pieces[at].bytes.len() + 1);
                    pieces[at].bytes.truncate(len);
                }
            }
        }
        for piece in &pieces {
            self.send_piece(packet, piece, identification, options);
        }
    }

    fn send_piece(&mut self, packet: &Packet, piece: &Piece, identification: u8, options: &[u8]) -> bool {
        let Packet { from, to, what, .. } = *packet;
        let v6 = what.src.is_ipv6();
        let (mut piece, is_whole) = (piece.clone(), piece.from == 0 && !piece.more);
        if !v6 {
            piece.protocol = what.protocol;
        }
        // It is evaluated, whether it passes or is refused at the destination.
        let shown = if piece.from == 0 { read(piece.protocol, &piece.bytes, what) } else { None };
        let shown = shown.map(|shown| if shown.protocol == what.protocol && is_error(&what) { what } else { shown });
        let may = shown.is_none_or(|shown| self.model.passes(from, to, &in_pieces(shown, is_whole)));
        if !self.send(packet, &packet.piece(&piece, identification, options)) {
            return false;
        }
        assert!(may, "{packet:?}: {piece:?} passes, but the rules deny it");
        if is_whole {
            return true;
        }
        let key = (from, to, v6, identification, if v6 { 0 } else { what.protocol });
        let pieces = self.received.entry(key).or_default();
        if self.model.looks_at_ports(from, to) && piece.from != 0 {
            let first = pieces.iter().rposition(|(_, p)| p.from == 0);
            let Some(first) = first else { panic!("{packet:?}: {piece:?} passes without a first fragment") };
            assert!(
                self.now_ns - pieces[first].0 < TOGETHER_NS,
                "{packet:?}: {piece:?} passes long after the first fragment"
            );
            let end = piece.from + piece.bytes.len();
            let overlaps = |p: &Piece| p.from < end && piece.from < p.from + p.bytes.len();
            let over = pieces[first..].iter().find(|(_, p)| overlaps(p));
            assert!(over.is_none(), "{packet:?}: {piece:?} passes and overlaps {over:?}");
        }
        pieces.push((self.now_ns, piece));
        let pieces = pieces.clone();
        for start in 0..pieces.len() {
            for first_wins in [false, true] {
                let Some((protocol, bytes)) = reassemble(&pieces[start..], first_wins) else { continue };
                let Some(made) = read(protocol, &bytes, what) else { continue };
                let may = is_error(&what) || self.model.would_pass(from, to, &made);
                assert!(may, "fragments of {packet:?} become {made:?}, which must not pass: {pieces:?}");
            }
        }
        true
    }

    /// Whether the destination is another guest.
    fn send(&mut self, packet: &Packet, frame: &[u8]) -> bool {
        let Ok(parsed) = parse(frame, frame.len()) else { return false };
        if packet.from <= 2 {
            let port = PortId(u32::from(packet.from) - 1);
            self.switch.from_guest(port, frame, frame.len(), Offload::default(), &parsed).passes()
        } else {
            let peer = PeerId(u32::from(packet.from) - 2);
            let verdict = self.switch.from_underlay(vni(100), peer, frame, &parsed);
            verdict.passes() && verdict.fragment_to.is_none()
        }
    }
}

fn is_error(what: &What) -> bool {
    matches!(what.icmp, Some(Icmp::Error { .. }))
}

/// A fragmented error is about no packet.
fn in_pieces(what: What, is_whole: bool) -> What {
    match what.icmp {
        Some(Icmp::Error { .. }) if !is_whole => What { icmp: Some(Icmp::Other(0)), ..what },
        _ => what,
    }
}
