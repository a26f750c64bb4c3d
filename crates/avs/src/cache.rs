//! The flow cache: repeats a verdict that the pipeline has given before.

use bifrost_nic::Parsed;

use crate::drop_reason::DropReason;
use crate::effects::{Apply, Effects};
use crate::flow::{FlowCounters, Flows, Key, NONE, Record, RecordId, Source, Touched};
use crate::fragments::{First, Piece};
use crate::frame::Frame;
use crate::groups::{Judgement, Memory, event_of};
use crate::ids::{Direction, PortId};
use crate::path_mtu::{Remedy, TooLarge};
use crate::port_state::Asked;
use crate::rewrite::Rewrite;
use crate::rule_log::Ruling;
use crate::service::{self, Connection, Step};
use crate::session::{self, Event, Handle, Sessions};
use crate::shared::Claim;
use crate::verdict::Verdict;

/// Packets whose records are prefetched together, like the vectors of the Triton paper (section 5.1).
pub const VECTOR: usize = 16;
/// With fewer records and sessions than this, they are in the CPU caches anyway, and prefetching costs more than it
/// saves.
const MANY: usize = 1 << 16;

/// Flow records of both directions.
#[derive(Debug)]
pub(crate) struct Cache {
    pub(crate) from_guests: Flows,
    pub(crate) from_peers: Flows,
    pub(crate) counters: FlowCounters,
}

impl Cache {
    /// An empty cache without capacity.
    pub(crate) fn new() -> Self {
        Cache { from_guests: Flows::new(0, 0), from_peers: Flows::new(0, 0), counters: FlowCounters::default() }
    }

    /// Sets the capacity of each direction. If it changes, existing records are discarded. `secret`: any random
    /// number.
    pub(crate) fn make_room(&mut self, records: u32, secret: u64) {
        if self.from_guests.capacity() != records {
            self.from_guests = Flows::new(records, secret);
            self.from_peers = Flows::new(records, secret);
        }
    }

    /// Prefetches the records and sessions of `packets`, at most [`VECTOR`] packets that the guest behind `port` has
    /// sent, before the first of them is processed. With very many flows, each packet would otherwise wait for its
    /// set, then for its record, then for its session; here all packets wait at the same time.
    pub(crate) fn fetch_ahead<'a>(
        &self,
        sessions: &Sessions,
        port: PortId,
        packets: impl Iterator<Item = &'a Parsed> + Clone,
    ) {
        let flows = &self.from_guests;
        if flows.made().max(sessions.counters().current as usize) < MANY {
            return;
        }
        // Each step prefetches for all packets what the next step reads.
        for parsed in packets.clone() {
            if let Some(key) = Key::of(Source::Guest(port), parsed) {
                flows.fetch_set(&key, parsed.flow_hash);
            }
        }
        let mut records = [NONE; VECTOR];
        for (record, parsed) in records.iter_mut().zip(packets.clone()) {
            if let Some(key) = Key::of(Source::Guest(port), parsed) {
                *record = flows.candidate(&key, parsed.flow_hash);
                flows.fetch(*record);
            }
        }
        let mut touched = [[NONE; 2]; VECTOR];
        for ((touched, record), parsed) in touched.iter_mut().zip(records).zip(packets) {
            if record != NONE {
                *touched = flows.sessions(record);
            } else if parsed.src_port != 0 {
                let key = session::Key::of(port, Direction::Egress, &[], parsed);
                touched[0] = sessions.find(&key).unwrap_or(NONE);
            }
        }
        touched.as_flattened().iter().for_each(|session| sessions.fetch(*session));
    }
}

/// The record of a packet's flow, if it applies to this packet. In that case its sessions have been updated.
#[inline(always)]
pub(crate) fn recall(
    flows: &Flows,
    key: &Key,
    frame: Frame<'_>,
    (sessions, connections): (&mut Sessions, &mut Sessions<Connection>),
    epoch: u32,
) -> Option<RecordId> {
    let id = flows.find(key, frame.parsed.flow_hash, epoch)?;
    let record = flows.record(id);
    let taken = holds_for(record, frame) && step(sessions, connections, &record.touched, frame.parsed, epoch);
    taken.then_some(id)
}

/// Whether a flow's record applies to this frame: the frame fits, and its TTL does not expire if it is routed.
#[inline(always)]
fn holds_for(record: &Record, frame: Frame<'_>) -> bool {
    frame.largest_packet() <= usize::from(record.mtu) && lives_on(&record.verdict, frame)
}

/// Whether the TTL of a frame suffices, if this verdict routes it.
#[inline(always)]
pub(crate) fn lives_on(verdict: &Verdict, frame: Frame<'_>) -> bool {
    !verdict.rewrite.as_ref().is_some_and(Rewrite::is_hop) || frame.time_to_live() > 1
}

/// Updates a packet's sessions, if all of them still exist. The tables would find the same ones: the record's key
/// contains the sessions' keys, and only a SYN begins another conversation.
#[inline(always)]
fn step(
    sessions: &mut Sessions,
    connections: &mut Sessions<Connection>,
    touched: &Touched,
    parsed: &Parsed,
    epoch: u32,
) -> bool {
    let [sender, receiver] = [touched.of(0), touched.of(1)];
    let is_there = |session: Option<Handle>| session.is_none_or(|session| sessions.is_there(session));
    if !is_there(sender) || !is_there(receiver) {
        return false;
    }
    let event = event_of(parsed);
    if touched.has_connection() {
        let (connection, direction) = touched.connection();
        let is_settled = connections.is_settled(connection, direction, event, epoch);
        if !is_settled && !step_connection(sessions, connections, (connection, direction), event, epoch) {
            return false;
        }
    }
    if let Some(session) = sender {
        sessions.touch(session.index, Direction::Egress, event, epoch);
    }
    if let Some(session) = receiver {
        sessions.touch(session.index, Direction::Ingress, event, epoch);
    }
    true
}

/// The same for its connection through a load balancer or NAT, if the packet changes something about that.
#[cold]
#[inline(never)]
fn step_connection(
    sessions: &mut Sessions,
    connections: &mut Sessions<Connection>,
    (connection, direction): (Handle, Direction),
    event: Event,
    epoch: u32,
) -> bool {
    if !connections.is_there(connection) {
        return false;
    }
    service::touch(connections, connection.index, direction, event, epoch);
    sessions.outdate_notes();
    true
}

/// Stores a verdict for later packets of a flow. `touched`: the sessions of its packets. `mtu`: largest IP packet for
/// which the verdict holds, bytes.
#[inline(always)]
pub(crate) fn keep(
    flows: &mut Flows,
    counters: &mut FlowCounters,
    key: &Key,
    frame: Frame<'_>,
    (epoch, mtu): (u32, u16),
    touched: &Touched,
    verdict: &Verdict,
) {
    if verdict.passes() && verdict.fragment_to.is_none() {
        counters.count(flows.insert(key, frame.parsed.flow_hash, epoch, mtu, touched, *verdict));
    }
}

/// Applies the side effects of decisions, and records the sessions that a packet belongs to.
pub(crate) struct Recording<'a> {
    pub(crate) apply: Apply<'a>,
    /// `None` if the packet did more than update existing sessions, so that no record can be stored.
    pub(crate) touched: Option<Touched>,
    /// The packet belongs to a translated connection, and is not its first.
    is_translated: bool,
}

impl<'a> Recording<'a> {
    pub(crate) fn new(apply: Apply<'a>) -> Self {
        Recording { apply, touched: Some(Touched::NONE), is_translated: false }
    }

    /// Called for a packet of a kind that has no record. If it is the SYN that answers the first packet of a
    /// translated connection, an earlier record of its flow is invalid: addresses and ports may have belonged to an
    /// untranslated conversation.
    #[inline(always)]
    pub(crate) fn outdate(&self, flows: &mut Flows, source: Source, parsed: &Parsed) {
        if self.is_translated
            && parsed.tcp.is_some()
            && let Some(key) = Key::of_next(source, parsed)
        {
            flows.outdate(&key, parsed.flow_hash);
        }
    }
}

impl Effects for Recording<'_> {
    #[inline(always)]
    fn now_ns(&self) -> u64 {
        self.apply.now_ns()
    }

    #[cold]
    fn may_ask(&mut self, port: PortId, what: Asked) -> bool {
        self.apply.may_ask(port, what)
    }

    #[cold]
    fn claim(&mut self, claim: Claim) {
        self.apply.claim(claim);
    }

    #[inline(always)]
    fn memory(&self) -> Memory<'_> {
        self.apply.memory()
    }

    #[inline(always)]
    fn connections(&self) -> service::Memory<'_> {
        self.apply.connections()
    }

    fn service(&mut self, port: PortId, direction: Direction, step: &Step) -> Result<(), DropReason> {
        self.is_translated |= step.continues().is_some();
        // Only one connection can be recorded, but the packet may belong to two: one of the sending guest, and one
        // that the guest answers.
        match (step.continues(), &mut self.touched) {
            (Some((index, direction)), Some(touched)) if !touched.has_connection() => {
                touched.add_connection(self.apply.connections.handle(index), direction);
            }
            _ => self.touched = None,
        }
        self.apply.service(port, direction, step)
    }

    #[cold]
    fn supersede(&mut self, connection: u32) {
        self.apply.supersede(connection);
    }

    #[inline(always)]
    fn acl(&mut self, port: PortId, direction: Direction, rule: Option<(usize, bool)>) {
        self.apply.acl(port, direction, rule);
    }

    #[inline(always)]
    fn groups(&mut self, port: PortId, direction: Direction, judgement: Judgement) -> Result<(), DropReason> {
        match (&judgement, &mut self.touched) {
            (Judgement::Continues { index, .. }, Some(touched)) => {
                touched.add(direction as usize, self.apply.sessions.handle(*index));
            }
            _ => self.touched = None,
        }
        self.apply.groups(port, direction, judgement)
    }

    #[cold]
    fn log(&mut self, at: (PortId, Direction), frame: Frame<'_>, ruling: Ruling<'_>) {
        self.apply.log(at, frame, ruling);
    }

    #[cold]
    fn later_fragment(&mut self, at: (PortId, Direction), piece: &Piece) -> Result<(), DropReason> {
        self.touched = None;
        self.apply.later_fragment(at, piece)
    }

    #[cold]
    fn check_first_fragment(&mut self, at: (PortId, Direction), piece: &Piece) -> Result<(), DropReason> {
        self.apply.check_first_fragment(at, piece)
    }

    #[cold]
    fn first_fragment(&mut self, at: (PortId, Direction), piece: &Piece, first: First) {
        self.touched = None;
        self.apply.first_fragment(at, piece, first);
    }

    #[cold]
    fn too_large(&mut self, port: PortId, frame: TooLarge<'_>, answer: &mut Vec<u8>) -> Remedy {
        self.apply.too_large(port, frame, answer)
    }
}
