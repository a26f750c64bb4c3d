//! The switch: its entry points for frames, and changes of its configuration.

mod learn;
mod memory;
mod observe;

use bifrost_nic::{Offload, Parsed};
use bifrost_wire::{Mac, Vni};

use crate::advertiser::{Advertised, Advertiser};
use crate::answer;
use crate::cache::{self, Cache, Recording, VECTOR, lives_on};
use crate::copies::Copies;
use crate::counters::UnderlayCounters;
use crate::drop_reason::DropReason;
use crate::effects::Apply;
use crate::flow::{Key, Source};
use crate::flow_log::{self, FlowLogCounters, FlowLogs};
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
    /// Indexed by port number. The state of a removed port stays until another one takes its number.
    pub(crate) ports: Vec<PortState>,
    underlay: UnderlayCounters,
    pub(crate) sessions: Sessions,
    /// Connections through load balancers and NAT.
    pub(crate) connections: Sessions<Connection>,
    /// NAT mappings of guests.
    pub(crate) mappings: Mappings,
    /// Copies from another process, from which this one takes over; `None`: this process is not taking over.
    pub(crate) copies: Option<Box<Copies>>,
    /// State of fragmented packets whose first fragment has passed.
    pub(crate) fragments: Fragments,
    /// Claims of vNICs to shared addresses.
    claims: Claims,
    /// Flow records, in networks that use them.
    cache: Cache,
    /// Verdicts on packets of the same turn.
    notes: Notes,
    /// Schedule of unsolicited router advertisements.
    advertiser: Advertiser,
    /// The flow logs; `None`: no conversations are logged.
    pub(crate) flow_logs: Option<Box<FlowLogs>>,
    /// Whether there are flow logs that do not have the current packet yet.
    is_logging: bool,
    /// Counters of flow logs that have ended.
    logged: FlowLogCounters,
    rule_logs: RuleLogs,
    secret: u64,
    /// Number of the configuration: the next packet of a session with another number is checked against the rules.
    pub(crate) epoch: u32,
    /// The last verdict that comes neither from a note nor from a flow record.
    verdict: Verdict,
    /// The last frame that the switch itself has built.
    answer: Vec<u8>,
    /// Current time, as of the last [`advance`](Switch::advance).
    pub(crate) now_ns: u64,
}

impl Switch {
    /// Builds a switch. `secret`: any random number; it seeds the hashes of values that tenants choose.
    ///
    /// # Errors
    /// The first contradiction in `tables`.
    pub fn build(tables: &Tables, secret: u64) -> Result<Self, BuildError> {
        Ok(Self::new(Prepared::build(tables)?, secret))
    }

    /// Like [`build`](Self::build), from tables that are already prepared.
    pub fn new(prepared: Prepared, secret: u64) -> Self {
        let Prepared { index, sessions, flows, flow_logs, rule_log } = prepared;
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
            flow_logs: None,
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
        switch.set_flow_logs(flow_logs);
        switch
    }

    /// Swaps in another configuration. Counters and sessions stay, except those of ports whose number now means another
    /// vNIC. A session that the new rules do not allow ends with its next packet.
    ///
    /// # Errors
    /// The first contradiction in `tables`; the switch is unchanged.
    pub fn replace(&mut self, tables: &Tables) -> Result<(), BuildError> {
        drop(self.take_over(Prepared::build(tables)?));
        Ok(())
    }

    /// Like [`replace`](Self::replace), with tables that are already prepared. The time does not depend on the size of
    /// the tables, unless a port's number now means another vNIC or the capacity for flow records changes. Returns the
    /// former configuration, because dropping it takes time, too.
    pub fn take_over(&mut self, prepared: Prepared) -> Former {
        let Prepared { index, sessions, flows, flow_logs, rule_log } = prepared;
        let mut former = std::mem::replace(&mut self.index, index);
        self.index.adopt_learned(&mut former);
        self.epoch = self.epoch.wrapping_add(1);
        self.sessions.set_limits(sessions);
        self.connections.set_limits(sessions);
        self.rule_logs.spec = rule_log;
        self.claim_ports(Some(&former));
        self.make_room(flows);
        if self.notes.is_on() != flows.vectors {
            self.notes = Notes::new(flows.vectors);
        }
        self.set_flow_logs(flow_logs);
        Former::of(former)
    }

    /// Swaps in equivalent tables from [`Prepared::rebased`]. Sessions, flow records and notes stay valid.
    pub fn refresh(&mut self, prepared: Prepared) -> Former {
        let mut former = std::mem::replace(&mut self.index, prepared.index);
        self.index.adopt_learned(&mut former);
        Former::of(former)
    }

    /// Advances the time to `now_ns`, from any origin. Call it before the packets of that time.
    pub fn advance(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
        self.sessions.advance(now_ns);
        self.connections.advance(now_ns);
        if self.mappings.counters.current > 0 {
            self.end_mappings();
        }
    }

    /// Releases the mappings of connections that have ended.
    pub(crate) fn leave_mappings(&mut self) {
        service::leave_mappings(&mut self.connections, &mut self.mappings);
    }

    /// Releases the mappings of connections that have ended, and expires idle mappings.
    #[inline(never)]
    fn end_mappings(&mut self) {
        service::leave_mappings(&mut self.connections, &mut self.mappings);
        self.mappings.advance(self.connections.now_s());
    }

    /// The vNICs that get copies of packets that the guest behind a port sends to a group
    /// ([`Action::Copy`](crate::Action::Copy)).
    pub fn copies(&self, port: PortId) -> &[Mac] {
        self.index.port(port).map_or(&[], |(port, _)| &port.sharers)
    }

    /// Discards notes, and invalidates sessions and flow records, so that their next packet is checked against the
    /// rules. After a panic in a call of this switch, none of them can be trusted. Tables and counters stay.
    pub fn distrust_notes(&mut self) {
        self.epoch = self.epoch.wrapping_add(1);
        self.notes = Notes::new(self.notes.is_on());
        self.is_logging = self.flow_logs.is_some();
    }

    /// How many packets of a guest to parse before the first of them is processed; see
    /// [`fetch_ahead`](Self::fetch_ahead).
    pub fn vector(&self) -> usize {
        if self.notes.is_on() { VECTOR } else { 1 }
    }

    /// Prefetches the flow records and sessions of `packets`, at most [`VECTOR`] packets that the guest behind `port`
    /// has sent, before the first of them is processed. Changes nothing.
    pub fn fetch_ahead<'a>(&self, port: PortId, packets: impl Iterator<Item = &'a Parsed> + Clone) {
        if self.notes.is_on() && self.index.port(port).is_some_and(|(_, vpc)| vpc.has_records) {
            self.cache.fetch_ahead(&self.sessions, port, packets);
        }
    }

    /// Decides about a frame of `len` bytes that the guest behind `port` has sent. `frame_head` holds the first bytes
    /// of the frame, at least as many as [`bifrost_nic::parse`] was given for `parsed`. The switch answers a ping to
    /// the gateway only if `frame_head` holds the whole frame.
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

    /// [`from_guest`](Self::from_guest) with an entry in the flow logs.
    #[cold]
    #[inline(never)]
    fn log_from_guest(&mut self, port: PortId, frame: Frame<'_>) -> &Verdict {
        self.is_logging = false;
        self.verdict = *self.from_guest(port, frame.head, frame.len, frame.offload, frame.parsed);
        if let Some(logs) = &mut self.flow_logs {
            flow_log::observe::sent(logs, &self.index, port, frame, &self.verdict, self.now_ns);
        }
        self.is_logging = true;
        &self.verdict
    }

    /// The note for a packet that is probably not the first one of its flow in this turn.
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

    /// [`from_guest`](Self::from_guest) in a network with flow records. `port` must exist.
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

    /// The same for a packet without a valid flow record: runs the pipeline and stores a record.
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

    /// Decides about a frame that `peer` has sent in `vni`. `frame_head`: see [`from_guest`](Self::from_guest).
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

    /// [`from_underlay`](Self::from_underlay) with an entry in the flow logs.
    #[cold]
    #[inline(never)]
    fn log_from_underlay(&mut self, vni: Vni, peer: PeerId, frame_head: &[u8], parsed: &Parsed) -> &Verdict {
        self.is_logging = false;
        self.verdict = *self.from_underlay(vni, peer, frame_head, parsed);
        if let Some(logs) = &mut self.flow_logs {
            let frame = Frame::whole(frame_head, parsed);
            flow_log::observe::received_from_peer(logs, &self.index, vni, frame, &self.verdict, self.now_ns);
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

    /// The same for a packet without a valid flow record: runs the pipeline and stores a record.
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

    /// Decides about a frame that the guest behind `from` has sent to the guest behind `port` of the same host, and
    /// that another worker has handed over ([`Action::Deliver`](crate::Action::Deliver)). Completes what
    /// [`from_guest`](Self::from_guest) of that worker has begun. `frame_head`: the same bytes after its rewrite. The
    /// verdict may name another port, if the frame goes through an uplink to the outside address of a guest of this
    /// host.
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
        if let Some(logs) = &mut self.flow_logs {
            flow_log::observe::received(logs, &self.index, port, frame, &self.verdict, self.now_ns);
        }
        &self.verdict
    }

    /// The frame to deliver to the guest or to send to the peer after [`Action::Answer`](crate::Action::Answer). It is
    /// valid until the next frame.
    pub fn answer(&self) -> &[u8] {
        &self.answer
    }

    fn set_flow_logs(&mut self, specs: Vec<FlowLogSpec>) {
        if self.flow_logs.is_some() || !specs.is_empty() {
            self.flow_logs.get_or_insert_default().set_specs(specs, self.secret);
        }
        self.is_logging = self.flow_logs.is_some();
    }

    /// Changes whenever time advances, or a session or connection changes. Never 0.
    #[inline(always)]
    fn generation(&self) -> u64 {
        self.sessions.generation()
    }

    /// Sets the capacity for flow records, if there are networks that need them. Existing records stay if it is
    /// unchanged; they belong to an earlier configuration and are replaced.
    fn make_room(&mut self, limits: FlowLimits) {
        self.cache.make_room(if self.index.has_records() { limits.rounded() } else { 0 }, self.secret);
    }

    /// When the next router advertisement is due, ns; 0: now.
    #[inline]
    pub fn next_advertisement_ns(&self) -> Option<u64> {
        self.advertiser.next_ns()
    }

    /// Builds the next router advertisement that is due. Deliver [`answer`](Self::answer) to the guest behind the
    /// returned port. `None`: none is due.
    pub fn advertise(&mut self) -> Option<PortId> {
        while let Some(port) = self.advertiser.take(self.now_ns) {
            // The port is gone, so there is no guest to inform.
            let Some((index, _)) = self.index.port(port) else { continue };
            let Some(state) = self.ports.get_mut(port.place()) else { continue };
            state.counters.advertised_packets += 1;
            answer::router_advertisement(index.ipv6_lease.as_deref(), None, &mut self.answer);
            return Some(port);
        }
        None
    }

    /// Assigns its state to every port: the existing one, or a new one if the number means another vNIC.
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
