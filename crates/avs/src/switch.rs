//! The switch: what is asked of it, and how one configuration follows another.

mod observe;

use bifrost_nic::{Offload, Parsed};
use bifrost_wire::{Mac, Vni};

use crate::advertiser::{Advertised, Advertiser};
use crate::answer;
use crate::cache::{self, Cache, Recording, VECTOR, lives_on};
use crate::carry::Copies;
use crate::counters::UnderlayCounters;
use crate::drop_reason::DropReason;
use crate::effects::Apply;
use crate::flow::{Key, Source};
use crate::flow_log::{self, FlowLog, FlowLogCounters};
use crate::fragments::Fragments;
use crate::frame::Frame;
use crate::ids::{PeerId, PortId};
use crate::index::{Index, PortIndex};
use crate::limits::FlowLimits;
use crate::location::VpcId;
use crate::mapping::Mappings;
use crate::notes::{NoteId, Notes};
use crate::pipeline::{self, Output};
use crate::port_state::PortState;
use crate::prepared::{Former, Prepared};
use crate::rule_logs::RuleLogs;
use crate::service::{self, Connection};
use crate::session::Sessions;
use crate::shared::Claims;
use crate::tables::{BuildError, FlowLogSpec, Tables};
use crate::verdict::Verdict;
use observe::{count_accepted, count_from_underlay};

/// Decides where frames go.
#[derive(Debug)]
pub struct Switch {
    pub(crate) index: Index,
    /// By port number; of ports that are gone, too, until another one takes the number.
    pub(crate) ports: Vec<PortState>,
    underlay: UnderlayCounters,
    pub(crate) sessions: Sessions,
    /// Connections through load balancers, and with the outside.
    pub(crate) connections: Sessions<Connection>,
    /// Outside ends of guests.
    pub(crate) mappings: Mappings,
    /// Copies from another process, from which this one takes over; `None`: there are none.
    pub(crate) copies: Option<Box<Copies>>,
    /// Packets in fragments, whose first one has passed.
    pub(crate) fragments: Fragments,
    /// What vNICs have said about shared addresses.
    claims: Claims,
    /// What became of packets before, in networks whose packets have records.
    cache: Cache,
    /// What became of the packets that came together with the next ones.
    notes: Notes,
    /// When guests are told about their router without having asked.
    advertiser: Advertiser,
    /// Conversations that are logged; `None`: none are.
    flow_log: Option<Box<FlowLog>>,
    /// Whether there is one, and the packet is not in it yet.
    is_logging: bool,
    /// Of flow logs that have ended.
    logged: FlowLogCounters,
    rule_logs: RuleLogs,
    secret: u64,
    /// Counts configurations: sessions of an earlier one are looked at again.
    pub(crate) epoch: u32,
    /// The last verdict that is neither of a note nor of a flow record.
    verdict: Verdict,
    /// The last frame that the switch made itself.
    answer: Vec<u8>,
    /// As last told.
    pub(crate) now_ns: u64,
}

impl Switch {
    /// Builds a switch. `secret`: any random number, for hashes of what tenants choose.
    ///
    /// # Errors
    /// The first contradiction in `tables`.
    pub fn build(tables: &Tables, secret: u64) -> Result<Self, BuildError> {
        Ok(Self::new(Prepared::build(tables)?, secret))
    }

    /// [`build`](Self::build), from what has been built before.
    pub fn new(prepared: Prepared, secret: u64) -> Self {
        let Prepared { index, sessions, flows, flow_log, rule_log } = prepared;
        let mut switch = Self {
            index,
            ports: Vec::new(),
            underlay: UnderlayCounters::default(),
            sessions: Sessions::new(sessions, secret),
            connections: Sessions::new(sessions, secret),
            mappings: Mappings::new(secret),
            copies: None,
            fragments: Fragments::default(),
            claims: Claims::default(),
            cache: Cache::new(),
            notes: Notes::new(flows.vectors),
            advertiser: Advertiser::new(secret),
            flow_log: None,
            is_logging: false,
            logged: FlowLogCounters::default(),
            rule_logs: RuleLogs::new(rule_log, secret),
            secret,
            epoch: 0,
            verdict: Verdict::drop(DropReason::UnknownPort),
            answer: Vec::new(),
            now_ns: 0,
        };
        #[cfg(feature = "mutations")]
        {
            switch.fragments.mutation = switch.index.mutation;
        }
        switch.claim_ports(None);
        switch.make_room(flows);
        switch.set_flow_log(flow_log);
        switch
    }

    /// Swaps in another configuration. Counters and sessions stay, except of ports whose number now means another vNIC; a
    /// session that the rules allow no longer ends with its next packet.
    ///
    /// # Errors
    /// The first contradiction in `tables`; nothing has changed then.
    pub fn replace(&mut self, tables: &Tables) -> Result<(), BuildError> {
        drop(self.take_over(Prepared::build(tables)?));
        Ok(())
    }

    /// [`replace`](Self::replace), with what has been built elsewhere: takes no time that depends on its size, as long as no port's number
    /// comes to mean another vNIC, and room for flow records stays as it is. What was in force is returned: to drop it takes time, too.
    pub fn take_over(&mut self, prepared: Prepared) -> Former {
        let Prepared { index, sessions, flows, flow_log, rule_log } = prepared;
        let former = std::mem::replace(&mut self.index, index);
        self.epoch = self.epoch.wrapping_add(1);
        self.sessions.set_limits(sessions);
        self.connections.set_limits(sessions);
        self.rule_logs.spec = rule_log;
        self.claim_ports(Some(&former));
        self.make_room(flows);
        if self.notes.is_on() != flows.vectors {
            self.notes = Notes::new(flows.vectors);
        }
        self.set_flow_log(flow_log);
        Former::of(former)
    }

    /// Swaps in other tables that say the same, those of [`Prepared::rebased`]: nothing that is known of flows has to be
    /// looked at again.
    pub fn refresh(&mut self, prepared: Prepared) -> Former {
        Former::of(std::mem::replace(&mut self.index, prepared.index))
    }

    /// Time has come to `now_ns`, of any origin: call it before the packets of that time.
    pub fn advance(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
        self.sessions.advance(now_ns);
        self.connections.advance(now_ns);
        if self.mappings.counters.current > 0 {
            self.end_mappings();
        }
    }

    /// Connections that have ended hold no mappings any more.
    pub(crate) fn leave_mappings(&mut self) {
        service::leave_mappings(&mut self.connections, &mut self.mappings);
    }

    /// Mappings of connections that have ended end, too, in time.
    #[inline(never)]
    fn end_mappings(&mut self) {
        service::leave_mappings(&mut self.connections, &mut self.mappings);
        self.mappings.advance(self.connections.now_s());
    }

    /// The vNICs to which copies go of what the guest behind a port sends to a group ([`Action::Copy`](crate::Action::Copy)).
    pub fn copies(&self, port: PortId) -> &[Mac] {
        self.index.port(port).map_or(&[], |(port, _)| &port.sharers)
    }

    /// Forgets what became of packets before, and looks at each session again with its next packet: after a panic in a call of this switch,
    /// none of it may be relied on. Tables and counters stay.
    pub fn distrust_notes(&mut self) {
        self.epoch = self.epoch.wrapping_add(1);
        self.notes = Notes::new(self.notes.is_on());
        self.is_logging = self.flow_log.is_some();
    }

    /// Packets of a guest that are best parsed before the first of them is judged: see [`fetch_ahead`](Self::fetch_ahead).
    pub fn vector(&self) -> usize {
        if self.notes.is_on() { VECTOR } else { 1 }
    }

    /// Has what is known of `packets`, at most [`VECTOR`] of them, come into the processor's caches: what the guest behind `port` has
    /// sent, before the first of them is judged. Changes nothing.
    pub fn fetch_ahead<'a>(&self, port: PortId, packets: impl Iterator<Item = &'a Parsed> + Clone) {
        if self.notes.is_on() && self.index.port(port).is_some_and(|(_, vpc)| vpc.has_records) {
            self.cache.fetch_ahead(&self.sessions, port, packets);
        }
    }

    /// What is to happen with a frame of `len` bytes that the guest behind `port` sent. `frame_head` holds the first bytes of
    /// the frame, at least as many as [`bifrost_nic::parse`] was given for `parsed`; to have a ping of the gateway answered
    /// it must hold the whole frame.
    pub fn from_guest(
        &mut self,
        port: PortId,
        frame_head: &[u8],
        len: usize,
        offload: Offload,
        parsed: &Parsed,
    ) -> &Verdict {
        let frame = Frame { head: frame_head, len, offload, parsed };
        if self.is_logging {
            return self.log_from_guest(port, frame);
        }
        let Some((_, vpc)) = self.index.port(port).filter(|_| port.place() < self.ports.len()) else {
            self.underlay.dropped.count(DropReason::UnknownPort);
            self.verdict = Verdict::drop(DropReason::UnknownPort);
            return &self.verdict;
        };
        let has_records = vpc.has_records;
        let mut is_noted = self.notes.from_guests.may_know(self.generation(), parsed);
        if is_noted && let Some(note) = self.follow_guest(port, frame) {
            return self.notes.from_guests.verdict(note);
        }
        if has_records {
            return self.by_record_from_guest(port, frame);
        }
        self.by_tables_from_guest(port, frame);
        is_noted = is_noted || self.notes.from_guests.is_wanted();
        if is_noted {
            self.note_from_guest(port, frame);
        }
        &self.verdict
    }

    /// [`from_guest`](Self::from_guest), and it is logged.
    #[cold]
    #[inline(never)]
    fn log_from_guest(&mut self, port: PortId, frame: Frame<'_>) -> &Verdict {
        self.is_logging = false;
        self.verdict = *self.from_guest(port, frame.head, frame.len, frame.offload, frame.parsed);
        if let Some(log) = &mut self.flow_log {
            flow_log::observe::sent(log, &self.index, port, frame, &self.verdict, self.now_ns);
        }
        self.is_logging = true;
        &self.verdict
    }

    /// The note about what is probably not the first packet of its flow in this turn.
    #[inline(never)]
    fn follow_guest(&mut self, port: PortId, frame: Frame<'_>) -> Option<NoteId> {
        let key = Key::of(Source::Guest(port), frame.parsed);
        let note = self.notes.from_guests.find(frame.parsed, frame.largest_packet(), key)?;
        let verdict = self.notes.from_guests.verdict(note);
        if !lives_on(verdict, frame) {
            return None;
        }
        self.cache.counters.batched_packets += 1;
        self.ports[port.place()].counters.count_from_guest(verdict);
        Some(note)
    }

    #[cold]
    #[inline(never)]
    fn note_from_guest(&mut self, port: PortId, frame: Frame<'_>) {
        let key = Key::of(Source::Guest(port), frame.parsed);
        let generation = self.generation();
        self.notes.from_guests.take(generation, frame.parsed, frame.largest_packet(), key, &self.verdict);
    }

    /// [`from_guest`](Self::from_guest) in a network without flow records.
    #[inline(never)]
    fn by_tables_from_guest(&mut self, port: PortId, frame: Frame<'_>) {
        let Switch { index, ports, sessions, connections, mappings, fragments, claims, answer, verdict, .. } = self;
        let mut apply = Apply::<false> {
            sessions,
            connections,
            mappings,
            fragments,
            ports,
            claims,
            epoch: self.epoch,
            now_ns: self.now_ns,
        };
        pipeline::outbound(index, port, frame, Output { verdict, answer }, &mut apply);
        self.ports[port.place()].counters.count_from_guest(&self.verdict);
    }

    /// [`from_guest`](Self::from_guest) in a network with flow records; `port` is there.
    #[inline(never)]
    fn by_record_from_guest(&mut self, port: PortId, frame: Frame<'_>) -> &Verdict {
        let key = Key::of(Source::Guest(port), frame.parsed);
        let Switch { ports, sessions, connections, cache, notes, epoch, .. } = self;
        if let Some(key) = &key
            && let Some(id) = cache::recall(&cache.from_guests, key, frame, (sessions, connections), *epoch)
        {
            cache.counters.found_packets += 1;
            let verdict = &self.cache.from_guests.record(id).verdict;
            ports[port.place()].counters.count_from_guest(verdict);
            if notes.from_guests.is_wanted() {
                let generation = sessions.generation();
                notes.from_guests.take(generation, frame.parsed, frame.largest_packet(), Some(*key), verdict);
            }
            return verdict;
        }
        self.by_stages_from_guest(port, frame, key)
    }

    /// The same of what no flow record holds for: leaves one.
    #[inline(never)]
    fn by_stages_from_guest(&mut self, port: PortId, frame: Frame<'_>, key: Option<Key>) -> &Verdict {
        let Switch {
            index,
            ports,
            sessions,
            connections,
            mappings,
            fragments,
            claims,
            cache,
            answer,
            notes,
            epoch,
            verdict,
            ..
        } = self;
        let mut effects = Recording::new(Apply {
            sessions,
            connections,
            mappings,
            fragments,
            ports,
            claims,
            epoch: *epoch,
            now_ns: self.now_ns,
        });
        let mtu = pipeline::outbound(index, port, frame, Output { verdict, answer }, &mut effects);
        if let (Some(key), Some(touched)) = (&key, &effects.touched) {
            let flows = &mut cache.from_guests;
            cache::keep(flows, &mut cache.counters, key, frame, (*epoch, mtu), touched, verdict);
            if notes.from_guests.is_wanted() {
                let generation = effects.apply.sessions.generation();
                notes.from_guests.take(generation, frame.parsed, frame.largest_packet(), Some(*key), verdict);
            }
        } else if key.is_none() {
            effects.outdate(&mut cache.from_guests, Source::Guest(port), frame.parsed);
        }
        ports[port.place()].counters.count_from_guest(verdict);
        verdict
    }

    /// What is to happen with a frame that `peer` sent in `vni`. `frame_head` as in [`Self::from_guest`].
    pub fn from_underlay(&mut self, vni: Vni, peer: PeerId, frame_head: &[u8], parsed: &Parsed) -> &Verdict {
        if self.is_logging {
            return self.log_from_underlay(vni, peer, frame_head, parsed);
        }
        let frame = Frame::whole(frame_head, parsed);
        let source = Source::Peer(vni, peer);
        if self.notes.from_peers.may_know(self.generation(), parsed)
            && let Some(note) = self.notes.from_peers.find(parsed, parsed.packet_len(), Key::of(source, parsed))
        {
            self.cache.counters.batched_packets += 1;
            let Switch { notes, underlay, ports, .. } = self;
            let verdict = notes.from_peers.verdict(note);
            count_accepted(underlay, ports, verdict);
            return verdict;
        }
        let Switch {
            index, ports, sessions, connections, mappings, fragments, claims, answer, underlay, verdict, ..
        } = self;
        let vpc = index.vpc(vni);
        if let Some(vpc) = vpc.filter(|vpc| vpc.has_records) {
            let vpc = vpc.id;
            return self.by_record_from_underlay((vni, vpc), peer, frame);
        }
        let mut apply = Apply::<false> {
            sessions,
            connections,
            mappings,
            fragments,
            ports,
            claims,
            epoch: self.epoch,
            now_ns: self.now_ns,
        };
        let port = pipeline::inbound(index, vpc, peer, frame, Output { verdict, answer }, &mut apply);
        count_from_underlay(underlay, ports, port, verdict);
        if self.notes.from_peers.is_wanted() {
            let (key, generation) = (Key::of(source, parsed), self.generation());
            self.notes.from_peers.take(generation, parsed, parsed.packet_len(), key, &self.verdict);
        }
        &self.verdict
    }

    /// [`from_underlay`](Self::from_underlay), and it is logged.
    #[cold]
    #[inline(never)]
    fn log_from_underlay(&mut self, vni: Vni, peer: PeerId, frame_head: &[u8], parsed: &Parsed) -> &Verdict {
        self.is_logging = false;
        self.verdict = *self.from_underlay(vni, peer, frame_head, parsed);
        if let Some(log) = &mut self.flow_log {
            let frame = Frame::whole(frame_head, parsed);
            flow_log::observe::received_from_peer(log, &self.index, vni, frame, &self.verdict, self.now_ns);
        }
        self.is_logging = true;
        &self.verdict
    }

    /// [`from_underlay`](Self::from_underlay) in a network with flow records.
    #[inline(never)]
    fn by_record_from_underlay(&mut self, (vni, vpc): (Vni, VpcId), peer: PeerId, frame: Frame<'_>) -> &Verdict {
        let key = Key::of(Source::Peer(vni, peer), frame.parsed);
        let Switch { ports, sessions, connections, cache, notes, epoch, underlay, .. } = self;
        if let Some(key) = &key
            && let Some(id) = cache::recall(&cache.from_peers, key, frame, (sessions, connections), *epoch)
        {
            cache.counters.found_packets += 1;
            let verdict = &self.cache.from_peers.record(id).verdict;
            count_accepted(underlay, ports, verdict);
            if notes.from_peers.is_wanted() {
                let generation = sessions.generation();
                notes.from_peers.take(generation, frame.parsed, frame.parsed.packet_len(), Some(*key), verdict);
            }
            return verdict;
        }
        self.by_stages_from_underlay((vni, vpc), peer, frame, key)
    }

    /// The same of what no flow record holds for: leaves one.
    #[inline(never)]
    fn by_stages_from_underlay(
        &mut self,
        (vni, vpc): (Vni, VpcId),
        peer: PeerId,
        frame: Frame<'_>,
        key: Option<Key>,
    ) -> &Verdict {
        let Switch {
            index,
            ports,
            sessions,
            connections,
            mappings,
            fragments,
            claims,
            cache,
            answer,
            notes,
            epoch,
            ..
        } = self;
        let (underlay, verdict) = (&mut self.underlay, &mut self.verdict);
        let mut effects = Recording::new(Apply {
            sessions,
            connections,
            mappings,
            fragments,
            ports,
            claims,
            epoch: *epoch,
            now_ns: self.now_ns,
        });
        let output = Output { verdict, answer };
        let port = pipeline::inbound(index, index.vpc_of(vpc), peer, frame, output, &mut effects);
        if let (Some(key), Some(touched), Some((to, _))) =
            (&key, &effects.touched, port.and_then(|port| index.port(port)))
        {
            let (flows, mtu) = (&mut cache.from_peers, to.port.mtu);
            cache::keep(flows, &mut cache.counters, key, frame, (*epoch, mtu), touched, verdict);
            if notes.from_peers.is_wanted() {
                let generation = effects.apply.sessions.generation();
                notes.from_peers.take(generation, frame.parsed, frame.parsed.packet_len(), Some(*key), verdict);
            }
        } else if key.is_none() {
            effects.outdate(&mut cache.from_peers, Source::Peer(vni, peer), frame.parsed);
        }
        count_from_underlay(underlay, ports, port, verdict);
        verdict
    }

    /// Whether a frame may come in that the guest of this host behind the port `from` has sent to the one behind `port`, and that another
    /// worker has fetched: the rest of what that one's [`from_guest`](Self::from_guest) has begun ([`Action::Deliver`](crate::Action::Deliver)). `frame_head` as
    /// there, after its rewrite. It may have to go on to another port: through an uplink, to the outside address of a guest of this host.
    pub fn from_worker(&mut self, from: PortId, port: PortId, frame_head: &[u8], parsed: &Parsed) -> &Verdict {
        let frame = Frame::whole(frame_head, parsed);
        let Switch { index, ports, sessions, connections, mappings, fragments, claims, underlay, .. } = self;
        let mut apply = Apply::<true> {
            sessions,
            connections,
            mappings,
            fragments,
            ports,
            claims,
            epoch: self.epoch,
            now_ns: self.now_ns,
        };
        self.verdict = pipeline::handed_over(index, (from, port), frame, &mut apply);
        if let Some(reason) = self.verdict.drop_reason() {
            match ports.get_mut(port.place()) {
                Some(state) => {
                    state.counters.ingress_dropped.count(reason);
                    underlay.ingress_dropped_packets += 1;
                }
                None => underlay.dropped.count(reason),
            }
        }
        if let Some(log) = &mut self.flow_log {
            flow_log::observe::received(log, &self.index, port, frame, &self.verdict, self.now_ns);
        }
        &self.verdict
    }

    /// The frame to give to the guest or to send to the peer after [`Action::Answer`](crate::Action::Answer); until the next frame.
    pub fn answer(&self) -> &[u8] {
        &self.answer
    }

    fn set_flow_log(&mut self, spec: Option<FlowLogSpec>) {
        match (&mut self.flow_log, spec) {
            (Some(log), spec) => log.set_spec(spec),
            (none, Some(spec)) => *none = Some(Box::new(FlowLog::new(spec, self.secret))),
            (None, None) => {}
        }
        self.is_logging = self.flow_log.is_some();
    }

    /// As long as it is the same, time has not gone on, and nothing has happened to a session or a connection. Never 0.
    #[inline(always)]
    fn generation(&self) -> u64 {
        self.sessions.generation()
    }

    /// Room for flow records, if there are networks that need them. Those that there are stay if nothing has changed about that;
    /// they belong to an earlier configuration and expire.
    fn make_room(&mut self, limits: FlowLimits) {
        self.cache.make_room(if self.index.has_records() { limits.rounded() } else { 0 }, self.secret);
    }

    /// When a guest is to be told about its router without having asked, ns; 0: now.
    #[inline]
    pub fn next_advertisement_ns(&self) -> Option<u64> {
        self.advertiser.next_ns()
    }

    /// Makes the router advertisement that is due next at the time that was told last; the guest behind the returned port is to be given
    /// [`answer`](Self::answer). `None`: none is due.
    pub fn advertise(&mut self) -> Option<PortId> {
        while let Some(port) = self.advertiser.take(self.now_ns) {
            // Of one that is gone there is nobody to be told of the end.
            let Some((index, _)) = self.index.port(port) else { continue };
            let Some(state) = self.ports.get_mut(port.place()) else { continue };
            state.counters.advertised_packets += 1;
            answer::router_advertisement(index.ipv6_lease.as_deref(), None, &mut self.answer);
            return Some(port);
        }
        None
    }

    /// Gives every port its state: its own again, or a new one.
    fn claim_ports(&mut self, former: Option<&Index>) {
        let count = self.index.port_numbers().max(self.ports.len());
        self.ports.resize_with(count, PortState::default);
        for port in self.index.ports() {
            let vnic = Some((port.vni, port.mac));
            let state = &mut self.ports[port.id.place()];
            if state.vnic != vnic {
                self.sessions.forget_port(port.id);
                self.connections.forget_port(port.id);
                self.mappings.forget_guest(port.id);
                self.fragments.forget_port(port.id);
                self.rule_logs.end(state, self.now_ns);
                *state = PortState::of(vnic);
            }
            self.rule_logs.claim(state, self.index.logs_rules(port.id), self.now_ns);
        }
        let Switch { index, advertiser, .. } = self;
        advertiser.set(index.advertised().map(|(port, lease)| {
            let before = former.and_then(|former| former.port(port.id));
            let is_same = |(of, _): (&PortIndex, _)| {
                (of.port.vni, of.port.mac) == (port.vni, port.mac) && of.ipv6_lease.as_deref() == Some(lease)
            };
            Advertised { port: port.id, interval_s: lease.interval_s, is_same: before.is_some_and(is_same) }
        }));
    }
}
