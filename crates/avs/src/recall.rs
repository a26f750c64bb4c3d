//! By flow records: what the tables said about the packets before, done again.

use bifrost_nic::Parsed;

use crate::description::{PeerId, PortId};
use crate::drop_reason::DropReason;
use crate::flow::{FlowCounters, Flows, Key, NONE, Record, Source, Touched};
use crate::fragments::{First, Piece};
use crate::from_guest::FromGuest;
use crate::from_underlay::FromUnderlay;
use crate::path_mtu::{Ends, Frame, Remedy};
use crate::policy::{Judgement, Memory, event_of};
use crate::session::{self, Direction, Sessions};
use crate::switch::{Doing, Index, Switch};
use crate::way::{self, Effects};

/// Packets whose records are fetched together, as in the paper's vectors (Triton paper, section 5.1).
pub const VECTOR: usize = 16;
/// With fewer records and sessions than that, they are in the processor's caches anyway, and to look at them first costs more than it saves.
const MANY: usize = 1 << 16;

/// What became of packets.
#[derive(Debug)]
pub(crate) struct Remembered {
    from_guests: Flows<FromGuest>,
    /// The port that packets from peers are for.
    from_peers: Flows<PortId>,
    pub(crate) counters: FlowCounters,
}

impl Remembered {
    /// Nothing, and there is no room.
    pub(crate) fn nothing() -> Self {
        Remembered { from_guests: Flows::new(0, 0), from_peers: Flows::new(0, 0), counters: FlowCounters::default() }
    }

    /// Room for so many records of each direction. If that changes, those that there are go. `secret`: any random number.
    pub(crate) fn make_room(&mut self, records: u32, secret: u64) {
        if self.from_guests.capacity() != records {
            self.from_guests = Flows::new(records, secret);
            self.from_peers = Flows::new(records, secret);
        }
    }

    pub(crate) fn counters(&self) -> &FlowCounters {
        &self.counters
    }
}

impl Switch {
    /// Has the records and sessions of `packets`, at most [`VECTOR`] of them, come into the processor's caches: what guest `port` has sent,
    /// before the first of them is judged. Among very many flows each packet would wait for its set, then for its record, then for its
    /// session; here all of them wait at the same time. Changes nothing.
    pub fn fetch_ahead<'a>(&self, port: PortId, packets: impl Iterator<Item = &'a Parsed> + Clone) {
        let (flows, sessions) = (&self.remembered.from_guests, &self.sessions);
        if !self.vectors.is_on()
            || flows.made().max(sessions.counters().current as usize) < MANY
            || !self.index.port(port).is_some_and(|(_, vpc)| vpc.has_rules)
        {
            return;
        }
        let mut records = [NONE; VECTOR];
        for (record, parsed) in records.iter_mut().zip(packets.clone()) {
            if let Some(key) = Key::of(Source::Guest(port), parsed) {
                *record = flows.candidate(&key, parsed.flow_hash);
            }
        }
        let mut touched = [[NONE; 2]; VECTOR];
        for ((touched, record), parsed) in touched.iter_mut().zip(records).zip(packets) {
            if record != NONE {
                *touched = flows.fetch(record);
            } else if parsed.src_port != 0 {
                let key = session::Key::of(port.0, Direction::Egress, &[], parsed);
                touched[0] = sessions.find(&key).unwrap_or(NONE);
            }
        }
        touched.as_flattened().iter().for_each(|session| sessions.fetch(*session));
    }

    /// [`from_guest`](Self::from_guest) in a network with rules; `port` is there.
    #[inline(never)]
    pub(crate) fn by_flow_from_guest(&mut self, port: PortId, frame: Frame<'_>) -> FromGuest {
        let Switch { index, counters, sessions, fragments, remembered, answer, vectors, .. } = self;
        let parsed = frame.parsed;
        let at = usize::from(port.0);
        let key = Key::of(Source::Guest(port), parsed);
        if let Some(key) = &key
            && let Some(record) = remembered.from_guests.find(key, parsed.flow_hash, self.epoch)
            && holds_for(record, frame)
            && step(sessions, &record.touched, parsed, self.epoch)
        {
            remembered.counters.found_packets += 1;
            counters[at].counters.count_from_guest(&record.what);
            if vectors.from_guests.is_wanted() {
                vectors.note_from_guest(sessions.generation(), frame, Some(*key), &record.what);
            }
            return record.what;
        }
        let doing = Doing { sessions, fragments, accounts: counters, epoch: self.epoch, now_ns: self.now_ns };
        let mut noting = Noting { doing, touched: Some(Touched::NONE) };
        let decision = way::from_guest(index, port, frame, answer, &mut noting).unwrap_or_else(FromGuest::Drop);
        if let (Some(key), Some(touched)) = (&key, &noting.touched)
            && let Some(mtu) = path_mtu(index, port, parsed, &decision)
        {
            let inserted = remembered.from_guests.insert(key, parsed.flow_hash, self.epoch, mtu, touched, decision);
            remembered.counters.count(inserted);
            if vectors.from_guests.is_wanted() {
                vectors.note_from_guest(noting.doing.sessions.generation(), frame, Some(*key), &decision);
            }
        }
        counters[at].counters.count_from_guest(&decision);
        decision
    }

    /// [`from_underlay`](Self::from_underlay) in a network with rules, by its number.
    #[inline(never)]
    pub(crate) fn by_flow_from_underlay(&mut self, vpc: usize, peer: PeerId, frame: Frame<'_>) -> FromUnderlay {
        let Switch { index, counters, sessions, fragments, remembered, answer, vectors, .. } = self;
        let parsed = frame.parsed;
        let vpc = index.vpc_of(vpc);
        let key = vpc.and_then(|vpc| Key::of(Source::Peer(vpc.vni, peer), parsed));
        if let Some(key) = &key
            && let Some(record) = remembered.from_peers.find(key, parsed.flow_hash, self.epoch)
            && parsed.packet_len() <= usize::from(record.mtu)
            && step(sessions, &record.touched, parsed, self.epoch)
        {
            remembered.counters.found_packets += 1;
            let port = record.what;
            if vectors.from_peers.is_wanted() {
                vectors.note_from_peer(sessions.generation(), parsed, Some(*key), port);
            }
            self.count_from_underlay(Some(port), &FromUnderlay::Port(port));
            return FromUnderlay::Port(port);
        }
        let doing = Doing { sessions, fragments, accounts: counters, epoch: self.epoch, now_ns: self.now_ns };
        let mut noting = Noting { doing, touched: Some(Touched::NONE) };
        let (port, decision) = way::from_underlay(index, vpc, peer, frame, answer, &mut noting);
        if let (Some(key), Some(touched), FromUnderlay::Port(port)) = (&key, &noting.touched, decision)
            && let Some((to, _)) = index.port(port)
        {
            let mtu = to.port.mtu;
            let inserted = remembered.from_peers.insert(key, parsed.flow_hash, self.epoch, mtu, touched, port);
            remembered.counters.count(inserted);
            if vectors.from_peers.is_wanted() {
                vectors.note_from_peer(noting.doing.sessions.generation(), parsed, Some(*key), port);
            }
        }
        self.count_from_underlay(port, &decision);
        decision
    }
}

/// The path MTU of a packet that is to be sent on as it is.
#[inline(never)]
fn path_mtu(index: &Index, port: PortId, parsed: &Parsed, decision: &FromGuest) -> Option<u16> {
    let (FromGuest::Remote { cut: None, .. } | FromGuest::Local { cut: None, .. }) = decision else { return None };
    index.hop(port, parsed).map(|hop| hop.mtu)
}

/// Whether the record of a frame's flow is about such a frame: it fits, and lives on if it is routed.
#[inline(always)]
fn holds_for(record: &Record<FromGuest>, frame: Frame<'_>) -> bool {
    frame.largest_packet() <= usize::from(record.mtu) && lives_on(&record.what, frame)
}

/// Whether a packet that is forwarded like this lives on, if it is routed.
#[inline(always)]
pub(crate) fn lives_on(decision: &FromGuest, Frame { head, parsed, .. }: Frame<'_>) -> bool {
    let (FromGuest::Remote { rewrite, .. } | FromGuest::Local { rewrite, .. }) = decision else { return false };
    rewrite.is_none() || time_to_live(head, parsed) > 1
}

/// A packet's sessions take their steps, if all of them are there: the tables would find the same ones, for their names are in
/// the record's key, and SYN alone begins a conversation anew.
#[inline(always)]
fn step(sessions: &mut Sessions, touched: &Touched, parsed: &Parsed, epoch: u32) -> bool {
    let [sender, receiver] = [touched.of(0), touched.of(1)];
    if [sender, receiver].into_iter().flatten().any(|session| !sessions.is_there(session)) {
        return false;
    }
    let event = event_of(parsed);
    if let Some(session) = sender {
        sessions.touch(session.index, Direction::Egress, event, epoch);
    }
    if let Some(session) = receiver {
        sessions.touch(session.index, Direction::Ingress, event, epoch);
    }
    true
}

/// Of an IP packet; 0 if it is not there to look at.
#[inline(always)]
fn time_to_live(head: &[u8], parsed: &Parsed) -> u8 {
    let at = if parsed.src_ip.is_ipv6() { 7 } else { 8 };
    head.get(usize::from(parsed.l3) + at).copied().unwrap_or(0)
}

/// Does what follows from judgements, and notes the sessions that a packet belongs to.
struct Noting<'a> {
    doing: Doing<'a>,
    /// `None` if there was more to do than to take a step in them.
    touched: Option<Touched>,
}

impl Effects for Noting<'_> {
    #[inline(always)]
    fn memory(&self) -> Memory<'_> {
        self.doing.memory()
    }

    #[inline(always)]
    fn acl(&mut self, port: PortId, direction: Direction, rule: Option<(usize, bool)>) {
        self.doing.acl(port, direction, rule);
    }

    #[inline(always)]
    fn groups(&mut self, port: PortId, direction: Direction, judgement: Judgement) -> Result<(), DropReason> {
        match (&judgement, &mut self.touched) {
            (Judgement::Continues { index, .. }, Some(touched)) => {
                touched.add(direction as usize, self.doing.sessions.handle(*index));
            }
            _ => self.touched = None,
        }
        self.doing.groups(port, direction, judgement)
    }

    #[cold]
    fn later_fragment(&mut self, at: (PortId, Direction), piece: &Piece) -> Result<(), DropReason> {
        self.touched = None;
        self.doing.later_fragment(at, piece)
    }

    #[cold]
    fn check_first_fragment(&mut self, at: (PortId, Direction), piece: &Piece) -> Result<(), DropReason> {
        self.doing.check_first_fragment(at, piece)
    }

    #[cold]
    fn first_fragment(&mut self, at: (PortId, Direction), piece: &Piece, first: First) {
        self.touched = None;
        self.doing.first_fragment(at, piece, first);
    }

    #[cold]
    fn too_large(
        &mut self,
        port: PortId,
        frame: Frame<'_>,
        mtu: u16,
        ends: Option<Ends>,
        answer: &mut Vec<u8>,
    ) -> Remedy {
        self.doing.too_large(port, frame, mtu, ends, answer)
    }
}
