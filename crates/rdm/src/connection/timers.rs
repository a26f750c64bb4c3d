//! Timers: ACKs, overdue responses, probes (RDM §6.5, §6.9).

use bifrost_wire::rdm::{CloseReason, Control, Service};

use super::{BACKOFF_MAX_NS, Connection, Context, INITIAL_RTT_NS, LaneFailure};
use crate::NEVER;
use crate::lane::Lane;
use crate::mutation::mutated;
use crate::output::Work;

/// Consecutive timeouts after which a lane fails.
const FLIP_AFTER: u32 = 3;

impl Connection {
    /// Whether a response of the peer is due; if it stays silent, it is gone.
    pub(super) fn expects_response(&self) -> bool {
        // With nothing in flight and something to send, all lanes are down, and the peer is asked to repair them.
        self.flights.open() > 0 || self.waits_for_peer() || self.has_work()
    }

    /// Whether the sender waits for the peer: for a grant, or for a higher limit.
    fn waits_for_peer(&self) -> bool {
        self.outbox.ungranted > 0 || self.outbox.is_limited()
    }

    fn response_within_ns(&self) -> u64 {
        let round_trip = self.rtt.bound_ns(INITIAL_RTT_NS) + self.config.ack_delay_ns;
        round_trip.max(self.response_times.bound_ns(INITIAL_RTT_NS)).min(BACKOFF_MAX_NS) + self.config.patience_ns
    }

    fn timeout_ns(&self) -> u64 {
        let none = self.config.service == Service::Rc || mutated!(self.config, NoTimeout);
        if self.flights.open() == 0 || none {
            return NEVER;
        }
        let Some(oldest) = self.flights.oldest_unreliable() else { return NEVER };
        oldest.posted_ns.max(self.progress_ns) + self.wait_ns()
    }

    fn wait_ns(&self) -> u64 {
        (self.response_within_ns() << self.backoff.min(20)).min(BACKOFF_MAX_NS)
    }

    pub(super) fn arm_probe(&mut self, now: u64) {
        if !self.waits_for_peer() || mutated!(self.config, NoProbes) {
            self.probe_ns = NEVER;
        } else if self.probe_ns == NEVER {
            self.probe_ns = now + (self.response_within_ns() << self.waits.min(20)).min(BACKOFF_MAX_NS);
        }
    }

    /// When a silent peer is considered gone.
    pub(crate) fn silence_ns(&self) -> u64 {
        let counts = self.expects_response() && !mutated!(self.config, SilenceIgnored);
        if counts { self.heard_ns + self.config.silence_ns } else { NEVER }
    }

    /// When [`Connection::advance`] is due, except for a silent peer.
    pub(crate) fn deadline(&self) -> u64 {
        let lanes = self.lanes[..self.config.service.lanes()].iter().map(Lane::deadline).min().unwrap_or(NEVER);
        let switch = if self.config.service == Service::Both { self.switch_deadline() } else { NEVER };
        self.acknowledger.due.min(self.timeout_ns()).min(self.probe_ns).min(lanes).min(self.paced_until()).min(switch)
    }

    /// Returns entries for the engine's timers that are earlier than the existing ones. A silent peer has a separate
    /// entry: every arrival postpones it, and other deadlines come first.
    pub(crate) fn arm(&mut self) -> [Option<u64>; 2] {
        let (deadline, silence) = (self.deadline(), self.silence_ns());
        let earlier = |due: u64, armed: &mut u64| (due < *armed).then(|| std::mem::replace(armed, due)).map(|_| due);
        [earlier(deadline, &mut self.armed_ns), earlier(silence, &mut self.silence_armed_ns)]
    }

    /// Whether an entry of the engine's timers is current, and not superseded. This uses it up.
    pub(crate) fn is_armed_for(&mut self, due: u64) -> bool {
        let mut any = false;
        for armed in [&mut self.armed_ns, &mut self.silence_armed_ns] {
            if *armed == due {
                *armed = NEVER;
                any = true;
            }
        }
        any
    }

    /// Runs the timers. Returns a reason if the connection must be closed.
    pub(crate) fn advance(&mut self, context: &mut Context<'_>, nic_now_ns: u64) -> Option<CloseReason> {
        let now = context.now;
        if self.silence_ns() <= now {
            return Some(CloseReason::Silence);
        }
        if self.acknowledger.due <= now {
            self.send_ack(context, nic_now_ns);
        }
        if self.timeout_ns() <= now {
            self.time_out(context, nic_now_ns);
        }
        if self.config.service == Service::Both {
            self.drop_stalled(context);
        }
        if self.probe_ns <= now {
            self.probe_ns = NEVER;
            self.probes += 1;
            self.waits += 1;
            context.counters.sent_probes += 1;
            if self.probes > 1 {
                context.out.work.push(Work::Repath { connection: self.id });
            }
            let control = Control::Probe(self.peer.tag);
            context.out.work.push(Work::Control { connection: self.id, control });
            self.arm_probe(now);
        }
        for index in 0..self.config.service.lanes() as u8 {
            self.retry_lane(context, index);
        }
        None
    }

    fn time_out(&mut self, context: &mut Context<'_>, nic_now_ns: u64) {
        let Some(flight) = self.flights.oldest_unreliable().copied() else { return };
        // The timeout starts when the request leaves the NIC, which on a slow link is long after posting. A NIC that
        // never sends it ends in silence.
        let left_ns = flight.left_at(context.now, nic_now_ns).unwrap_or(context.now);
        if left_ns + self.wait_ns() > context.now {
            self.progress_ns = left_ns.max(self.progress_ns);
            return;
        }
        context.counters.timeouts += 1;
        self.backoff += 1;
        self.congestion.on_timeout(context.now);
        if self.backoff.is_multiple_of(FLIP_AFTER) {
            let up = self.lanes.iter().filter(|lane| lane.is_up()).count();
            if up > 1 {
                self.fail_lane(context, flight.lane, LaneFailure::Timeouts);
                return;
            }
        }
        self.lose_oldest(context, &flight);
        self.flights.trim();
        self.progress_ns = context.now;
    }
}
