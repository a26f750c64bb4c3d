//! A connection: its two directions, its lanes and its timers.

mod lanes;
mod receiving;
mod switching;
mod timers;

use std::net::IpAddr;

use bifrost_transport::rtt::Smoothed;
use bifrost_transport::time::MS;
use bifrost_wire::rdm::{
    Ack, Class, Grant, Immediate, MAX_EAGER, MAX_LANES, MessageId, Number, SendHeader, SendKind, Service, Tag, UNIT,
};

use crate::NEVER;
use crate::acknowledger::Acknowledger;
use crate::chunking::{Chunking, View, whole_units};
use crate::config::ConnectionConfig;
use crate::congestion::{Congestion, Sample};
use crate::counters::Counters;
use crate::flight::{Flight, Flights, Kind, State};
use crate::incoming::Inbox;
use crate::lane::Lane;
use crate::losses::Losses;
use crate::mutation::mutated;
use crate::outgoing::{Outbox, Repair, Stage};
use crate::output::{BufferId, ConnectionId, Event, Output, Work};
use crate::rtt::Rtt;
pub(crate) use lanes::LaneFailure;
use switching::{Overtaking, Tail};

/// The other end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer {
    pub(crate) address: IpAddr,
    pub(crate) control: u32,
    pub(crate) tag: Tag,
}

/// State that the calls of all connections share.
pub(crate) struct Context<'a> {
    pub(crate) now: u64,
    pub(crate) out: &'a mut Output,
    pub(crate) counters: &'a mut Counters,
    pub(crate) random: &'a mut fastrand::Rng,
}

/// Before the first measurement, a response is expected within this time, ns.
const INITIAL_RTT_NS: u64 = 2 * MS;
/// Longest interval of timeouts or probes, ns.
const BACKOFF_MAX_NS: u64 = 100 * MS;
/// Bytes that may wait in the NIC: two of the longest chunks keep it busy. The round trip is measured from the
/// departure, so no controller sees this queue, and short messages wait behind it.
const BACKLOG_MAX: u32 = 128 * 1024;

#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) id: ConnectionId,
    pub(crate) peer: Peer,
    config: ConnectionConfig,
    /// The peer's credits; with both services, less one reserved for lanes that were left or are silent.
    credits: u32,
    chunking: Box<dyn Chunking>,
    congestion: Box<dyn Congestion>,
    outbox: Outbox,
    pub(crate) flights: Flights,
    peer_limit: MessageId,
    peer_ack: Option<u16>,
    rtt: Rtt,
    /// From posting to acknowledgement, including the hosts' delays; determines timeouts.
    response_times: Smoothed,
    losses: Losses,
    pub(crate) inbox: Inbox,
    pub(crate) acknowledger: Acknowledger,
    /// Only the first ones are used, as many as the service has.
    lanes: [Lane; MAX_LANES],
    primary: u8,
    /// The preferred service, UC or RC: its lanes are used if one is up.
    in_use: Service,
    /// The lane that was in use before a switch of services, whose last unit is retransmitted.
    tail: Option<Tail>,
    /// When a request of an unreliable lane was last acknowledged, and the number of timeouts since.
    progress_ns: u64,
    backoff: u32,
    /// What has overtaken a silent lane, and when its requests may next be retransmitted on another one.
    overtaking: Overtaking,
    overtake_ns: u64,
    /// When the next probe is due; the number of unanswered ones; and the number since the peer last raised the limit
    /// or sent a grant. Their interval grows with the last number, because a peer that serves others first answers
    /// every probe.
    probe_ns: u64,
    probes: u32,
    waits: u32,
    /// When the peer was last heard, or no response was due.
    heard_ns: u64,
    /// With a window below one unit: when the next unit may be sent.
    pace_ns: u64,
    /// When a message was last granted, and whether no data has arrived since.
    pub(crate) granted_ns: u64,
    pub(crate) awaits_data: bool,
    /// In the engine's list of connections that wait for the budget, and in that of those that use it.
    pub(crate) waits_for_budget: bool,
    pub(crate) is_charged: bool,
    /// In the engine's list of connections with something to do.
    pub(crate) ready: bool,
    /// Earliest entry in the engine's timers.
    armed_ns: u64,
    /// Entry in the engine's timers for a silent peer.
    silence_armed_ns: u64,
}

impl Connection {
    pub(crate) fn new(
        id: ConnectionId,
        peer: Peer,
        config: ConnectionConfig,
        chunking: Box<dyn Chunking>,
        congestion: Box<dyn Congestion>,
        now: u64,
    ) -> Self {
        Self {
            id,
            peer,
            config,
            credits: u32::from(config.credits - u16::from(config.service == Service::Both && config.credits > 1)),
            chunking,
            congestion,
            outbox: Outbox::default(),
            flights: Flights::default(),
            peer_limit: MessageId(u32::from(config.peer_window)),
            peer_ack: None,
            rtt: Rtt::default(),
            response_times: Smoothed::default(),
            losses: Losses::default(),
            inbox: Inbox::new(id, config),
            acknowledger: Acknowledger::new(),
            lanes: [Lane::UP; MAX_LANES],
            primary: 0,
            in_use: if config.service == Service::Rc { Service::Rc } else { Service::Uc },
            tail: None,
            progress_ns: now,
            backoff: 0,
            overtaking: Overtaking::default(),
            overtake_ns: now,
            probe_ns: NEVER,
            probes: 0,
            waits: 0,
            heard_ns: now,
            pace_ns: 0,
            granted_ns: now,
            awaits_data: false,
            waits_for_budget: false,
            is_charged: false,
            ready: false,
            armed_ns: NEVER,
            silence_armed_ns: NEVER,
        }
    }

    pub(crate) fn rtt(&self) -> &Rtt {
        &self.rtt
    }

    pub(crate) fn window(&self) -> u32 {
        self.congestion.window()
    }

    pub(crate) fn loss_rate(&self) -> f32 {
        self.losses.rate()
    }

    pub(crate) fn primary(&self) -> u8 {
        self.primary
    }

    /// Messages that are open.
    pub(crate) fn open_messages(&self) -> usize {
        self.outbox.len()
    }

    /// Whether the peer accepts messages of this length.
    pub(crate) fn takes(&self, len: u32) -> bool {
        len <= MAX_EAGER || len <= self.config.peer_longest
    }

    pub(crate) fn push(&mut self, now: u64, buffer: BufferId, len: u32, class: Class, call: u32) -> MessageId {
        if !self.expects_response() {
            self.heard_ns = now;
        }
        let message = self.outbox.push(buffer, len, class, call);
        self.outbox.admit(if mutated!(self.config, LimitIgnored) { message.plus(1) } else { self.peer_limit });
        message
    }

    /// Memory in use, bytes.
    pub(crate) fn bytes(&self) -> usize {
        size_of::<Self>() + self.outbox.heap_bytes() + self.flights.heap_bytes() + self.inbox.heap_bytes()
    }

    // ---- Sending

    /// Posts what window, credits and pace allow.
    pub(crate) fn emit(&mut self, context: &mut Context<'_>) {
        if self.config.service == Service::Both {
            self.post_tail(context);
            self.overtake_if_due(context);
        }
        while self.has_work() && self.emit_one(context) {}
        self.arm_probe(context.now);
    }

    fn has_work(&self) -> bool {
        !(self.outbox.repairs.is_empty() && self.outbox.short.is_empty() && self.outbox.long.is_empty())
    }

    /// Whether credits, lane and NIC allow another work request.
    fn may_post(&self) -> bool {
        let credits = if mutated!(self.config, CreditsIgnored) { 1 << 16 } else { self.credits };
        self.flights.open() < credits
            && self.flights.len() < 4 * credits as usize
            && self.lanes[usize::from(self.primary)].is_up()
            && (self.is_reliable(self.primary) || self.flights.backlog() < BACKLOG_MAX)
    }

    /// When a window below one unit allows the next unit, if nothing else delays it.
    fn paced_until(&self) -> u64 {
        let waits = self.has_work() && self.pace_ns > 0 && self.flights.bytes() == 0 && self.may_post();
        if waits { self.pace_ns } else { NEVER }
    }

    /// Bytes that may be posted now; 0: none.
    fn free(&self, now: u64) -> u32 {
        if now < self.pace_ns || !self.may_post() {
            return 0;
        }
        let window = self.congestion.window();
        // One unit may always be in flight, or the window could never grow.
        if self.flights.bytes() == 0 { window.max(1) } else { window.saturating_sub(self.flights.bytes()) }
    }

    fn emit_one(&mut self, context: &mut Context<'_>) -> bool {
        let free = self.free(context.now);
        if free == 0 {
            return false;
        }
        if let Some(repair) = self.outbox.next_repair() {
            let lane = self.lane_of(context.now, &repair);
            return self.post_send(context, lane, repair.message, repair.offset, true);
        }
        if let Some(&message) = self.outbox.short.front() {
            let Some(outgoing) = self.outbox.get_mut(message) else {
                self.outbox.short.pop_front();
                return true;
            };
            let offset = outgoing.next;
            outgoing.next = outgoing.len.min(offset + UNIT);
            let announce = outgoing.stage == Stage::Long;
            if announce {
                outgoing.next = 0;
                outgoing.stage = Stage::Announced;
            }
            let posted = announce || outgoing.next == outgoing.len;
            self.outbox.ungranted += u32::from(announce);
            if posted {
                self.outbox.short.pop_front();
            }
            return self.post_send(context, self.primary, message, offset, false);
        }
        let Some(&message) = self.outbox.long.front() else { return false };
        self.post_write(context, message, free)
    }

    /// Whether this is the last request that may be posted now.
    fn is_last(&self, cost: u32) -> bool {
        self.flights.open() + 1 >= self.credits || self.flights.bytes().saturating_add(cost) >= self.congestion.window()
    }

    fn post_send(
        &mut self,
        context: &mut Context<'_>,
        lane: u8,
        message: MessageId,
        offset: u32,
        repair: bool,
    ) -> bool {
        let last = self.is_last(UNIT);
        let global = self.flights.next_number();
        let Some(outgoing) = self.outbox.get_mut(message) else { return true };
        let kind = match outgoing.stage {
            Stage::Short => SendKind::Eager,
            Stage::Long | Stage::Announced => SendKind::Announce,
            Stage::Granted { .. } => SendKind::Repair,
        };
        let header = SendHeader {
            kind,
            hint: repair || last,
            class: outgoing.class,
            message,
            global,
            length: outgoing.len,
            offset,
            call: outgoing.call,
        };
        let len = if kind == SendKind::Announce { 0 } else { header.payload_len() };
        outgoing.in_nic += 1;
        let buffer = outgoing.buffer;
        let kind = if kind == SendKind::Announce { Kind::Announce } else { Kind::Send };
        let token = self.fly(context.now, lane, message, offset, len, kind);
        context.counters.send_requests += 1;
        context.counters.repair_requests += u64::from(repair);
        let connection = self.id;
        let offset = if mutated!(self.config, RepairFromStart) && repair { 0 } else { offset };
        context.out.work.push(Work::Send { connection, lane, token, header: header.emit(), buffer, offset, len });
        true
    }

    fn post_write(&mut self, context: &mut Context<'_>, message: MessageId, free: u32) -> bool {
        let view = View {
            window: self.congestion.window(),
            free,
            rtt_ns: self.rtt.smoothed_ns().unwrap_or(0),
            base_rtt_ns: self.rtt.base_ns(),
            loss: self.losses.rate(),
            mtu: self.config.mtu,
        };
        let chunk = whole_units(self.chunking.chunk(&view));
        let last = self.is_last(chunk);
        let Some(outgoing) = self.outbox.get_mut(message) else {
            self.outbox.long.pop_front();
            return true;
        };
        let Stage::Granted { address, key } = outgoing.stage else {
            self.outbox.long.pop_front();
            return true;
        };
        let offset = outgoing.next;
        let len = chunk.min(outgoing.len - offset);
        outgoing.next = offset + len;
        if outgoing.next == outgoing.len {
            self.outbox.long.pop_front();
        }
        let Some(outgoing) = self.outbox.get_mut(message) else { return true };
        outgoing.in_nic += 1;
        let buffer = outgoing.buffer;
        let immediate = Immediate::new(message, offset, last);
        let token = self.fly(context.now, self.primary, message, offset, len, Kind::Write(immediate.name()));
        context.counters.write_requests += 1;
        context.out.work.push(Work::Write {
            connection: self.id,
            lane: self.primary,
            token,
            buffer,
            offset,
            len,
            address: address + u64::from(offset),
            key,
            immediate: immediate.bits(),
        });
        true
    }

    /// Records a work request, and returns its token.
    fn fly(&mut self, now: u64, lane: u8, message: MessageId, offset: u32, len: u32, kind: Kind) -> u64 {
        let number = self.flights.next_number();
        if self.flights.open() == 0 {
            self.progress_ns = now;
        }
        let (reliable, state) = (self.is_reliable(lane), State::Open);
        let (posted_ns, left_ns) = (now, 0);
        self.flights.push(Flight {
            message: message.0,
            offset,
            len,
            kind,
            lane,
            reliable,
            state,
            in_nic: true,
            posted_ns,
            left_ns,
        });
        let window = self.congestion.window();
        if window < UNIT {
            let rtt = self.rtt.smoothed_ns().unwrap_or(INITIAL_RTT_NS);
            self.pace_ns = now + (rtt * u64::from(UNIT) / u64::from(window.max(1))).min(BACKOFF_MAX_NS);
        }
        u64::from(self.id.0) << 32 | number & 0xffff_ffff
    }

    // ---- Completions, acknowledgements and losses

    /// The NIC has sent (UC) or delivered (RC) a work request, or it has failed and the lane is in error.
    pub(crate) fn on_sent(&mut self, context: &mut Context<'_>, low: u32, success: bool, left_ns: u64) {
        let first = self.flights.first_number();
        let number = first.wrapping_add(u64::from(low.wrapping_sub(first as u32)));
        let Some(flight) = self.flights.get_mut(number) else { return };
        let (message, posted_ns, lane, reliable) =
            (MessageId(flight.message), flight.posted_ns, flight.lane, flight.reliable);
        flight.left_ns = left_ns;
        if self.flights.left_nic(number)
            && let Some(outgoing) = self.outbox.get_mut(message)
        {
            outgoing.in_nic -= 1;
        }
        if !success {
            self.fail_lane(context, lane, LaneFailure::Error);
        } else if reliable {
            // The NIC's own acknowledgement.
            let delay = context.now.saturating_sub(posted_ns);
            self.heard(context.now);
            self.lanes[usize::from(lane)].progress_ns = context.now;
            self.acknowledge(context, number, Some(delay));
        }
        self.report(context, message);
        self.flights.trim();
    }

    pub(crate) fn on_ack(&mut self, context: &mut Context<'_>, ack: &Ack, arrived_ns: u64) {
        context.counters.received_acks += 1;
        self.heard(context.now);
        let newer = self.peer_ack.is_none_or(|last| (ack.sequence.wrapping_sub(last) as i16) > 0);
        // If the previous ACK arrived, only the fresh numbers are new.
        let follows = self.peer_ack.is_none_or(|last| ack.sequence == last.wrapping_add(1));
        if newer {
            self.peer_ack = Some(ack.sequence);
        }
        if ack.limit.distance(self.peer_limit) > 0
            && ack.limit.distance(self.outbox.first) <= 1 << 20
            && !mutated!(self.config, LimitForgotten)
        {
            self.peer_limit = ack.limit;
            self.waits = 0;
            self.outbox.admit(self.peer_limit);
        }
        let numbers = ack.numbers.as_slice();
        let count = if follows { usize::from(ack.fresh) } else { numbers.len() };
        // Oldest first, so that a request in this ACK is not considered lost because of a later one in it.
        for (at, number) in numbers[..count].iter().enumerate().rev() {
            let number = match number {
                Number::Send(global) => Some(*global),
                Number::Write(name) => self.flights.find_write(*name),
            };
            let Some(number) = number else { continue };
            let Some(flight) = self.flights.get(number) else { continue };
            if matches!(numbers[at], Number::Send(_)) && matches!(flight.kind, Kind::Write(_)) {
                context.counters.refused += 1;
                continue;
            }
            let sample = (at == 0 && flight.left_ns > 0).then(|| {
                arrived_ns.saturating_sub(flight.left_ns).checked_sub(u64::from(ack.held_ns?)).filter(|rtt| *rtt > 0)
            });
            self.acknowledge(context, number, sample.flatten());
        }
        // Requests before the base have arrived, even if the ACKs that contained them were lost.
        while let Some(number) = self.flights.oldest_open() {
            let before = self.flights.get(number).is_some_and(|f| ack.base.distance(MessageId(f.message)) > 0);
            if !before {
                break;
            }
            self.acknowledge(context, number, None);
        }
        self.flights.trim();
    }

    /// Handles the acknowledgement of a work request.
    fn acknowledge(&mut self, context: &mut Context<'_>, number: u64, rtt_ns: Option<u64>) {
        let window_limited = self.flights.bytes().saturating_add(2 * UNIT) * 2 >= self.congestion.window();
        let Some(flight) = self.flights.settle(number, State::Acknowledged) else { return };
        context.counters.spurious_losses += u64::from(flight.state == State::Lost);
        if !flight.reliable {
            self.progress_ns = context.now;
        }
        if self.config.service == Service::Both {
            self.note_overtaking(context.now, &flight);
        }
        // An acknowledgement on either service shows that the path works.
        self.backoff = 0;
        self.losses.delivered(self.packets(flight.len));
        // An announcement shows nothing about the queue that the data will meet.
        if flight.kind != Kind::Announce {
            self.response_times.sample(context.now.saturating_sub(flight.posted_ns).max(1));
        }
        if let Some(rtt) = rtt_ns {
            self.rtt.sample(context.now, rtt);
        }
        let smoothed_rtt_ns = self.rtt.smoothed_ns().unwrap_or(INITIAL_RTT_NS);
        let base_rtt_ns = self.rtt.base_ns();
        let sample = Sample { bytes: flight.cost(), rtt_ns, base_rtt_ns, smoothed_rtt_ns, window_limited };
        self.congestion.on_ack(context.now, &sample);
        let message = MessageId(flight.message);
        if flight.kind != Kind::Announce && self.outbox.arrived(message, flight.offset, flight.len) {
            self.report(context, message);
        }
        // UC delivers in order or not at all: requests sent earlier on the same lane and not acknowledged are lost.
        if !flight.reliable {
            self.lose_before(context, number, flight.lane);
        }
    }

    fn lose_before(&mut self, context: &mut Context<'_>, number: u64, lane: u8) {
        let mut at = self.flights.first_number();
        let mut any = false;
        while at < number {
            if self.flights.get(at).is_some_and(|f| f.lane == lane && f.state == State::Open) {
                self.lose(context, at, Some(lane));
                any = true;
            }
            at += 1;
        }
        if any {
            let rtt = self.rtt.smoothed_ns().unwrap_or(INITIAL_RTT_NS);
            self.congestion.on_loss(context.now, self.losses.rate(), rtt);
        }
    }

    /// Considers a work request lost, and queues its data for retransmission. `lane`: its lane, if that lane has
    /// delivered later requests.
    fn lose(&mut self, context: &mut Context<'_>, number: u64, lane: Option<u8>) {
        let Some(flight) = self.flights.settle(number, State::Lost) else { return };
        context.counters.lost_requests += 1;
        self.losses.lost(self.packets(flight.len));
        let message = MessageId(flight.message);
        let Some(outgoing) = self.outbox.get_mut(message) else { return };
        match flight.kind {
            // A grant shows that the announcement arrived.
            Kind::Announce if outgoing.stage != Stage::Announced => {}
            _ if mutated!(self.config, LossForgotten) => {}
            _ => self.outbox.repairs.push_back(Repair { message, offset: flight.offset, len: flight.len, lane }),
        }
    }

    fn packets(&self, len: u32) -> u32 {
        len.div_ceil(u32::from(self.config.mtu)).max(1)
    }

    /// Reports a message as sent once it has arrived and the NIC no longer needs its buffer.
    fn report(&mut self, context: &mut Context<'_>, message: MessageId) {
        let connection = self.id;
        let Some(outgoing) = self.outbox.get_mut(message) else { return };
        let left = outgoing.in_nic == 0 || mutated!(self.config, ReportedEarly);
        if outgoing.arrived.is_full() && left && !outgoing.reported {
            outgoing.reported = true;
            context.out.events.push(Event::Sent { connection, message, buffer: outgoing.buffer });
            self.outbox.trim();
        }
    }

    pub(crate) fn on_grant(&mut self, context: &mut Context<'_>, grant: &Grant) {
        self.heard(context.now);
        let Some(outgoing) = self.outbox.get_mut(grant.message) else { return };
        // Another grant of the same message is a repetition, perhaps the response to a probe.
        if outgoing.stage != Stage::Announced || outgoing.len != grant.length {
            return;
        }
        outgoing.stage = Stage::Granted { address: grant.address, key: grant.key };
        self.outbox.ungranted -= 1;
        self.waits = 0;
        self.outbox.long.push_back(grant.message);
    }
}
