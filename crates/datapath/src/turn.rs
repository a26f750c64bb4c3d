//! One turn of a core, which moves packets through all stages. Read [`Core::turn`] first.

use bifrost_port::{GuestPort, Underlay};
use bifrost_rte::Time;

use crate::core::Core;
use crate::stage::Stage;

impl<P: GuestPort> Core<P> {
    /// Runs one turn, which moves packets through all stages. Returns whether there was work to do.
    ///
    /// Never blocks. The caller runs the next turn at once while [`has_more`](Self::has_more), and otherwise when a
    /// port or the underlay is readable ([`on_port_readable`](Self::on_port_readable),
    /// [`on_underlay_readable`](Self::on_underlay_readable)) or at [`next_deadline`](Self::next_deadline). `now` is the
    /// time on the clock that `underlay` uses, too. `hand_over` is called between receiving and sending, for packets
    /// that belong to other workers of this host.
    pub fn turn(&mut self, now: Time, underlay: &mut impl Underlay, hand_over: impl FnOnce(&mut Self)) -> bool {
        self.turn_as::<false>(now, underlay, hand_over)
    }

    /// [`turn`](Self::turn) with the running capture: the same code, compiled a second time with the capture's hooks.
    pub fn turn_captured(
        &mut self,
        now: Time,
        underlay: &mut impl Underlay,
        hand_over: impl FnOnce(&mut Self),
    ) -> bool {
        self.turn_as::<true>(now, underlay, hand_over)
    }

    /// `SEEN`: packets are shown to the capture. All stages are generic over this, so that they cost nothing without a
    /// capture.
    #[inline(always)]
    fn turn_as<const SEEN: bool>(
        &mut self,
        now: Time,
        underlay: &mut impl Underlay,
        hand_over: impl FnOnce(&mut Self),
    ) -> bool {
        self.work.at_shared(Stage::Loop);
        self.now = now;
        self.switch.advance(now.0);
        self.unpack_rest::<SEEN>();
        if self.watchdog.any_rests {
            self.end_rests();
        }
        self.counters.loops += 1;
        // In: decapsulate, transport, verify, place (underlay.rs).
        let mut busy = self.receive::<SEEN>(underlay);
        self.work.at_shared(Stage::Loop);
        hand_over(self);
        // Work that is due: ACK timers, losses, probes, packets delayed by faults.
        busy |= self.on_time::<SEEN>();
        // Publish what is in order to the guests, with one notification each, and acknowledge it only then.
        self.publish::<SEEN>();
        self.work.at_shared(Stage::Acknowledge);
        self.engine.flush_acks(self.now, &mut self.out);
        // Out: fetch, parse, switch, transport (guest.rs).
        busy |= self.fetch_from_guests::<SEEN>(underlay);
        // Segment, encapsulate, send; return acknowledged buffers (emit.rs).
        busy |= self.emit::<SEEN>(underlay);
        self.tell_completions();
        self.work.at_shared(Stage::Loop);
        self.counters.busy_loops += u64::from(busy);
        busy
    }

    /// Receives until nothing is waiting or the turn's budget is used up (budget.rs), so that guests see the packets,
    /// and answer them, before more are received.
    fn receive<const SEEN: bool>(&mut self, underlay: &mut impl Underlay) -> bool {
        let (budget, before, mut count, mut waited_ns) = (self.receive_budget.packets(), self.arrivals(), 0, 0);
        while count < budget {
            if self.arrived.is_empty() {
                if !self.underlay_readable {
                    break;
                }
                self.work.at_shared(Stage::Loop);
                self.arrived = 0..underlay.recv().unwrap_or(0);
                self.underlay_readable = !self.arrived.is_empty();
                self.now = self.now.max(Time(underlay.received_at_ns()));
                continue;
            }
            let mut oldest = self.now;
            while count < budget
                && let Some(index) = self.arrived.next()
            {
                let datagram = underlay.datagram(index);
                oldest = oldest.min(Time(datagram.rx_time_ns));
                self.on_datagram::<SEEN>(&datagram);
                count = (self.arrivals() - before) as usize;
            }
            waited_ns = waited_ns.max(self.now.since(oldest));
        }
        self.receive_budget.fetched(count, budget);
        let is_crowded = self.has_arrivals() && self.vnics.len() > 1;
        self.pressure.turned(self.now, if is_crowded { waited_ns } else { 0 });
        count > 0
    }

    /// Packets that have arrived so far, bundled or not.
    fn arrivals(&self) -> u64 {
        self.counters.underlay_rx_packets + self.counters.unbundled_packets
    }

    /// Tells each guest once which of its buffers have been returned.
    fn tell_completions(&mut self) {
        for port in self.ports.iter_mut().flatten().filter(|p| p.completed) {
            port.completed = false;
            self.work.at(Stage::Flush, port.owner);
            port.port.flush();
        }
    }

    /// Does work that is due: the transport's timers, router advertisements and delayed packets.
    fn on_time<const SEEN: bool>(&mut self) -> bool {
        let mut busy = false;
        if self.engine.next_timeout().is_some_and(|at| at <= self.now) {
            self.work.at_shared(Stage::Timer);
            self.engine.on_timeout(self.now, &mut self.out);
            busy = true;
            // When a peer answers again, a timer of the transport is due at once.
            if !self.kept.is_empty() {
                self.send_kept::<SEEN>();
            }
        }
        if self.asking.next().is_some_and(|at| at <= self.now) {
            self.end_asking();
            busy = true;
        }
        if !self.rx_queued.is_empty() {
            busy |= self.release_rx_queued::<SEEN>();
        }
        busy |= self.advertise::<SEEN>();
        busy | self.release_delayed::<SEEN>()
    }
}
