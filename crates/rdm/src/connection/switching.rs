//! Selection of the lane in use; lanes that a switch of services has left, and silent lanes (RDM §7.5 to §7.7).

use bifrost_wire::rdm::{MessageId, Service, UNIT};

use super::{Connection, Context, INITIAL_RTT_NS, LaneFailure};
use crate::NEVER;
use crate::flight::{Flight, Kind, State};
use crate::mutation::mutated;
use crate::outgoing::Repair;

/// Retransmission of the last unit of a lane after a switch, so that the peer or its NIC detects earlier losses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tail {
    lane: u8,
    due_ns: u64,
    tries: u8,
}

/// A reliable lane that delivers nothing.
#[derive(Clone, Copy, Debug)]
struct Silence {
    lane: u8,
    since_ns: u64,
    /// When a response to it is overdue.
    overdue_ns: u64,
    /// Bytes of its oldest work request that another lane may retransmit.
    bytes: u32,
    /// The remaining bytes: the last unit of a WRITE.
    rest: u32,
}

/// Acknowledged requests that other lanes posted after a silence began, which `since_ns` identifies.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Overtaking {
    since_ns: u64,
    bytes: u32,
    /// When the first of them was posted, and the last acknowledged.
    from_ns: u64,
    until_ns: u64,
}

impl Overtaking {
    /// When a lane that the NIC serves equally often would have sent `rest` more bytes. The round trip is not longer
    /// for them.
    fn settled_ns(&self, rest: u32, round_trip_ns: u64) -> u64 {
        let shares = u64::from(rest.div_ceil(self.bytes.max(1)).min(MOST_SHARES));
        self.until_ns + (self.until_ns - self.from_ns).saturating_sub(round_trip_ns) * shares
    }
}

/// Maximum number of retransmissions: two per round trip.
const TAIL_TRIES: u8 = 4;
/// Limit of the wait for a silent lane, as a multiple of the time that other lanes took: a small sample does not
/// predict much.
const MOST_SHARES: u32 = 8;

impl Connection {
    pub(super) fn is_reliable(&self, lane: u8) -> bool {
        self.config.service.is_reliable(lane)
    }

    fn is_up(&self, lane: u8) -> bool {
        self.lanes[usize::from(lane)].is_up()
    }

    /// Whether a lane is of the service in use.
    fn is_wanted(&self, lane: u8) -> bool {
        self.is_reliable(lane) == (self.in_use == Service::Rc)
    }

    /// All lanes except the primary one, starting with the next one.
    fn others(&self) -> impl Iterator<Item = u8> + use<> {
        let (primary, count) = (self.primary, self.config.service.lanes() as u8);
        (1..count).map(move |step| (primary + step) % count)
    }

    /// The preferred service.
    pub(crate) fn in_use(&self) -> Service {
        self.in_use
    }

    /// Sends on lanes of `service` from now on. Returns whether the connection has such lanes.
    pub(crate) fn switch(&mut self, context: &mut Context<'_>, service: Service) -> bool {
        if self.config.service != Service::Both || service == Service::Both {
            return service == self.in_use;
        }
        if service != self.in_use {
            self.in_use = service;
            context.counters.switches += 1;
            // An idle lane is preferred, because a request on it does not wait for retransmissions by its NIC. If no
            // lane of the service is up, the current lane stays in use until one is repaired.
            let this = &*self;
            let find = |quiet: bool| {
                let fits = |lane: &u8| !quiet || this.flights.open_on(*lane).next().is_none();
                this.others().find(|lane| this.is_up(*lane) && this.is_wanted(*lane) && fits(lane))
            };
            if let Some(next) = find(true).or_else(|| find(false)) {
                self.tail = Some(Tail { lane: self.primary, due_ns: context.now, tries: 0 });
                self.primary = next;
            }
            if mutated!(self.config, SwitchForgetsOpen) {
                let numbers = self.flights.first_number()..self.flights.next_number();
                for number in numbers {
                    self.flights.settle(number, State::Lost);
                }
            }
        }
        true
    }

    /// Replaces the failed primary lane; if no lane of the preferred service is up, by one of the other service.
    pub(super) fn leave_lane(&mut self, context: &mut Context<'_>) {
        let next = self.others().find(|lane| self.is_up(*lane) && self.is_wanted(*lane));
        if let Some(next) = next.or_else(|| self.others().find(|lane| self.is_up(*lane))) {
            self.primary = next;
            context.counters.lane_flips += 1;
        }
    }

    /// Uses a repaired lane if the primary one is down or has the wrong service.
    pub(super) fn return_to(&mut self, lane: u8) {
        if !self.is_up(self.primary) || self.is_wanted(lane) && !self.is_wanted(self.primary) {
            self.primary = lane;
        }
    }

    /// Selects the lane for a retransmission. A UC lane that was left and still delivers has no queue; on the reliable
    /// lane in use the unit would wait for a window of requests, and for the retransmission of lost ones. The last unit
    /// retransmitted there is the end of the old lane.
    pub(super) fn lane_of(&mut self, now: u64, repair: &Repair) -> u8 {
        let left = |lane: &u8| *lane != self.primary && self.is_up(*lane) && self.is_reliable(self.primary);
        let Some(lane) = repair.lane.filter(left).filter(|_| !mutated!(self.config, RepairsBehindWindow)) else {
            return self.primary;
        };
        let due_ns = now + self.rtt.smoothed_ns().unwrap_or(INITIAL_RTT_NS) / 2;
        self.tail = Some(Tail { lane, due_ns, tries: 0 });
        lane
    }

    /// Retransmits the last unit of the lane that was left, if it is due.
    pub(super) fn post_tail(&mut self, context: &mut Context<'_>) {
        let Some(tail) = self.tail.filter(|tail| tail.due_ns <= context.now) else { return };
        // An acknowledgement will free credits.
        if self.flights.open() >= u32::from(self.config.credits) {
            return;
        }
        self.tail = None;
        let left = tail.lane != self.primary && self.is_up(tail.lane) && tail.tries < TAIL_TRIES;
        if !left || mutated!(self.config, TailNotRepeated) {
            return;
        }
        let last = |flight: &Flight| {
            (flight.kind, MessageId(flight.message), flight.offset + flight.len.saturating_sub(1) / UNIT * UNIT)
        };
        let Some((kind, message, offset)) = self.flights.open_on(tail.lane).next().map(last) else { return };
        let Some(outgoing) = self.outbox.get_mut(message) else { return };
        // Nothing to do if it was acknowledged on another lane, or granted.
        if outgoing.arrived.contains(offset / UNIT) || kind == Kind::Announce && outgoing.is_granted() {
            return;
        }
        self.post_send(context, tail.lane, message, offset, true);
        if tail.tries == 0
            && let Some(silence) = self.silence().filter(|silence| silence.lane == tail.lane)
        {
            self.retransmit_elsewhere(context, &silence);
        }
        let due_ns = context.now + self.rtt.smoothed_ns().unwrap_or(INITIAL_RTT_NS) / 2;
        self.tail = Some(Tail { due_ns, tries: tail.tries + 1, ..tail });
    }

    /// When a lane that was left, or is silent, next needs an action.
    pub(super) fn switch_deadline(&self) -> u64 {
        let room = self.flights.open() < u32::from(self.config.credits);
        let tail = self.tail.filter(|_| room).map_or(NEVER, |tail| tail.due_ns);
        let Some(silence) = self.silence() else { return tail };
        let overtake = if room { silence.overdue_ns.max(self.overtake_ns) } else { NEVER };
        tail.min(if self.is_overtaken(&silence) { self.lost_ns(&silence) } else { overtake })
    }

    /// The reliable lane whose oldest request has waited longest, if any.
    fn silence(&self) -> Option<Silence> {
        let oldest = self.flights.oldest_reliable()?;
        if mutated!(self.config, StalledLaneKept) {
            return None;
        }
        let since_ns = oldest.posted_ns.max(self.lanes[usize::from(oldest.lane)].progress_ns);
        let rest = if let Kind::Write(_) = oldest.kind { oldest.len.min(UNIT) } else { 0 };
        let overdue_ns = since_ns + self.response_times.bound_ns(INITIAL_RTT_NS);
        Some(Silence { lane: oldest.lane, since_ns, overdue_ns, bytes: (oldest.len - rest).max(1), rest })
    }

    /// Whether as many bytes as the lane's oldest request has were posted later on other lanes, by more than the spread
    /// of response times, and are acknowledged. Time alone never decides: a queue that delays one lane delays the
    /// others, and a NIC that serves queue pairs in turn sends equally much of each.
    fn is_overtaken(&self, silence: &Silence) -> bool {
        self.overtaking.since_ns == silence.since_ns && self.overtaking.bytes >= silence.bytes
    }

    /// When an overtaken lane has lost something: its last unit has had the time that other lanes took for as many
    /// bytes.
    fn lost_ns(&self, silence: &Silence) -> u64 {
        silence.overdue_ns.max(self.overtaking.settled_ns(silence.rest, self.rtt.smoothed_ns().unwrap_or(0)))
    }

    /// Records an acknowledgement, which may have overtaken a silent lane.
    pub(super) fn note_overtaking(&mut self, now: u64, flight: &Flight) {
        let Some(silence) = self.silence() else { return };
        if self.overtaking.since_ns != silence.since_ns {
            self.overtaking = Overtaking { since_ns: silence.since_ns, ..Overtaking::default() };
        }
        let later_ns =
            if self.response_times.is_known() { 4 * self.response_times.variance_ns() } else { INITIAL_RTT_NS };
        if flight.lane != silence.lane && flight.posted_ns >= silence.since_ns + later_ns {
            let from_ns = if self.overtaking.bytes == 0 { u64::MAX } else { self.overtaking.from_ns };
            self.overtaking.bytes = self.overtaking.bytes.saturating_add(flight.cost());
            self.overtaking.from_ns = from_ns.min(flight.posted_ns);
            self.overtaking.until_ns = now.max(flight.posted_ns);
        }
    }

    /// Resets a reliable lane that has lost something, because its NIC would wait longer. The lane in use retransmits
    /// its requests immediately.
    pub(super) fn drop_stalled(&mut self, context: &mut Context<'_>) {
        let Some(silence) = self.silence() else { return };
        if self.is_overtaken(&silence) && self.lost_ns(&silence) <= context.now {
            context.counters.timeouts += 1;
            self.fail_lane(context, silence.lane, LaneFailure::Silence);
        }
    }

    /// Retransmits the requests of a silent lane on another one, if it is due: their acknowledgements overtake that
    /// lane.
    pub(super) fn overtake_if_due(&mut self, context: &mut Context<'_>) {
        let Some(silence) = self.silence() else { return };
        if silence.overdue_ns.max(self.overtake_ns) <= context.now && !self.is_overtaken(&silence) {
            self.retransmit_elsewhere(context, &silence);
        }
    }

    fn retransmit_elsewhere(&mut self, context: &mut Context<'_>, silence: &Silence) {
        let waited_ns = context.now.saturating_sub(silence.since_ns);
        self.overtake_ns = context.now + waited_ns.max(self.response_times.bound_ns(INITIAL_RTT_NS));
        let others = || std::iter::once(self.primary).chain(self.others());
        let up = |lane: &u8| *lane != silence.lane && self.is_up(*lane);
        // Prefer UC, where software acknowledges requests regardless of earlier losses on the lane.
        let unreliable = others().find(|lane| up(lane) && !self.is_reliable(*lane));
        let Some(other) = unreliable.or_else(|| others().find(up)) else { return };
        // Never a whole chunk or a copy of its end: once a message is complete its memory is released, and a WRITE that
        // is only late would fail.
        let spare = |flight: &Flight| match flight.kind {
            Kind::Write(_) => flight.len.saturating_sub(UNIT),
            _ => u32::from(!self.flights.is_being_written(flight.message, flight.offset)),
        };
        let on_lane = self.flights.oldest_open_on(silence.lane);
        let found = on_lane.map(|flight| (*flight, spare(flight))).find(|(_, spare)| *spare > 0);
        let Some((flight, spare)) = found else { return };
        let message = MessageId(flight.message);
        let mut offset = flight.offset;
        let end = flight.offset + spare;
        while offset < end && self.flights.open() < u32::from(self.config.credits) {
            let Some(outgoing) = self.outbox.get_mut(message) else { return };
            let granted = flight.kind == Kind::Announce && outgoing.is_granted();
            let again = outgoing.arrived.contains(offset / UNIT) && flight.kind != Kind::Send;
            if !granted && !again {
                self.post_send(context, other, message, offset, true);
            }
            offset += UNIT;
        }
    }

    /// The oldest request of an unreliable lane is lost. On the lane in use, the response to its retransmission shows
    /// the losses before it; a lane that was left gets no such response, so all its requests are lost.
    pub(super) fn lose_oldest(&mut self, context: &mut Context<'_>, oldest: &Flight) {
        let left = oldest.lane != self.primary;
        for number in self.flights.first_number()..self.flights.next_number() {
            let open = |flight: &&Flight| flight.state == State::Open && flight.lane == oldest.lane;
            if self.flights.get(number).filter(open).is_some() {
                self.lose(context, number, None);
                if !left {
                    break;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv6Addr};

    use bifrost_transport::time::MS;
    use bifrost_wire::rdm::{Ack, Class, Control, MessageId, Number, Numbers, Service, Tag};

    use crate::{
        BufferId, Config, ConnectionConfig, ConnectionId, Engine, Fixed, Memory, Mutation, Output, Unlimited, Work,
    };

    struct NoMemory;

    impl Memory for NoMemory {
        fn allocate(&mut self, _: ConnectionId, _: u32, _: bool) -> Option<(BufferId, u64, u32)> {
            None
        }
    }

    /// Sends a message with service `first`, without any response; after a switch sends another one `later_ns` later,
    /// if given, and acknowledges it. Returns the lanes of SENDs after the switch, and the lanes that were reset.
    fn after_a_switch(first: Service, later_ns: Option<u64>, mutation: Option<Mutation>) -> (Vec<u8>, Vec<u8>) {
        let (mut engine, mut out) = (Engine::new(Config::new(1, 1)), Output::new());
        let (id, tag) = engine.reserve().unwrap();
        let config = ConnectionConfig { mutation, ..ConnectionConfig::new(Service::Both, 1024) };
        let peer = (IpAddr::V6(Ipv6Addr::LOCALHOST), 7);
        engine.open(0, id, peer, Tag(1), config, Box::new(Fixed(4096)), Box::new(Unlimited)).unwrap();
        assert!(engine.switch(0, id, first, &mut out));
        engine.send(0, id, BufferId(1), 100, Class::Message, 0).unwrap();
        engine.turn(0, &mut NoMemory, &mut out);
        out.clear();
        let other = if first == Service::Uc { Service::Rc } else { Service::Uc };
        assert!(engine.switch(0, id, other, &mut out));
        engine.turn(0, &mut NoMemory, &mut out);
        let mut lanes = (vec![], vec![]);
        let mut note = |out: &mut Output| {
            let mut number = None;
            for work in out.work.drain(..) {
                match work {
                    Work::Send { lane, token, .. } => {
                        number = Some(Number::Send(token & 0xffff_ffff));
                        lanes.0.push(lane);
                    }
                    Work::Reset { lane, .. } => lanes.1.push(lane),
                    _ => {}
                }
            }
            number
        };
        note(&mut out);
        if let Some(now) = later_ns {
            engine.send(now, id, BufferId(2), 100, Class::Message, 0).unwrap();
            engine.turn(now, &mut NoMemory, &mut out);
            let mut numbers = Numbers::new();
            numbers.push(note(&mut out).unwrap());
            let (base, limit) = (MessageId(0), MessageId(100));
            let ack = Control::Ack(Ack { tag, sequence: 0, fresh: 1, held_ns: None, base, limit, numbers });
            let mut bytes = [0; Control::MAX_LEN];
            let len = ack.emit_into(&mut bytes);
            engine.on_control(now + MS, peer, &bytes[..len], now + MS, &mut out);
            engine.turn(now + MS, &mut NoMemory, &mut out);
            note(&mut out);
        }
        lanes
    }

    #[test]
    fn the_end_of_the_old_lane_is_sent_again() {
        assert_eq!(after_a_switch(Service::Uc, None, None), (vec![0], vec![]));
        assert_eq!(after_a_switch(Service::Uc, None, Some(Mutation::TailNotRepeated)), (vec![], vec![]));
        // A request on an RC lane is also sent on the new lane.
        assert_eq!(after_a_switch(Service::Rc, None, None), (vec![3, 0], vec![]));
    }

    #[test]
    fn a_reliable_lane_that_later_messages_overtake_is_reset() {
        let no_tail = Some(Mutation::TailNotRepeated);
        assert_eq!(after_a_switch(Service::Rc, Some(3 * MS), None).1, vec![3]);
        // A request posted at about the same time may have met a shorter queue.
        assert_eq!(after_a_switch(Service::Rc, Some(0), no_tail), (vec![0], vec![]));
        assert_eq!(after_a_switch(Service::Rc, Some(3 * MS), Some(Mutation::StalledLaneKept)).1, Vec::<u8>::new());
    }

    /// Sends two messages with UC; after a switch to RC, only the second is acknowledged, or none. Returns the lanes of
    /// later SENDs.
    fn lanes_of_repairs(is_acknowledged: bool, mutation: Option<Mutation>) -> Vec<u8> {
        let (mut engine, mut out) = (Engine::new(Config::new(1, 1)), Output::new());
        let (id, tag) = engine.reserve().unwrap();
        let config = ConnectionConfig { mutation, ..ConnectionConfig::new(Service::Both, 1024) };
        let peer = (IpAddr::V6(Ipv6Addr::LOCALHOST), 7);
        engine.open(0, id, peer, Tag(1), config, Box::new(Fixed(4096)), Box::new(Unlimited)).unwrap();
        for buffer in 1..=2 {
            engine.send(0, id, BufferId(buffer), 100, Class::Message, 0).unwrap();
        }
        engine.turn(0, &mut NoMemory, &mut out);
        for work in std::mem::take(&mut out.work) {
            let Work::Send { token, .. } = work else { panic!("{work:?}") };
            engine.on_sent(0, token, true, 0, &mut out);
        }
        assert!(engine.switch(0, id, Service::Rc, &mut out));
        engine.turn(0, &mut NoMemory, &mut out);
        out.clear();
        let now = if is_acknowledged { MS / 100 } else { 300 * MS };
        if is_acknowledged {
            let mut numbers = Numbers::new();
            numbers.push(Number::Send(1));
            let (base, limit) = (MessageId(0), MessageId(100));
            let ack = Control::Ack(Ack { tag, sequence: 0, fresh: 1, held_ns: None, base, limit, numbers });
            let mut bytes = [0; Control::MAX_LEN];
            let len = ack.emit_into(&mut bytes);
            engine.on_control(now, peer, &bytes[..len], now, &mut out);
        }
        engine.turn(now, &mut NoMemory, &mut out);
        let lane = |work: &Work| if let Work::Send { lane, .. } = work { Some(*lane) } else { None };
        out.work.iter().filter_map(lane).collect()
    }

    #[test]
    fn known_losses_of_the_old_lane_are_retransmitted_on_it() {
        assert_eq!(lanes_of_repairs(true, None), [0]);
        assert_eq!(lanes_of_repairs(true, Some(Mutation::RepairsBehindWindow)), [3]);
        // A lane without any acknowledgement may deliver nothing.
        assert!(lanes_of_repairs(false, None).contains(&3));
    }
}
