//! One turn of a core: a packet's way through the rooms. Read [`Core::turn`] first.

use bifrost_port::{GuestPort, Underlay};
use bifrost_rte::Time;

use crate::core::Core;
use crate::work::Stage;

impl<P: GuestPort> Core<P> {
    /// One turn: a packet's way through the rooms. Returns whether there was anything to do.
    ///
    /// Waits for nothing. The caller turns again at once while [`has_more`](Self::has_more), and otherwise when a port
    /// or the underlay is readable ([`on_port_readable`](Self::on_port_readable),
    /// [`on_underlay_readable`](Self::on_underlay_readable)) or [`next_deadline`](Self::next_deadline) has come. `now` is
    /// the time on the clock that `underlay` uses, too. `hand_over` is called between in and out, for what belongs to other
    /// workers of this host.
    pub fn turn(&mut self, now: Time, underlay: &mut impl Underlay, hand_over: impl FnOnce(&mut Self)) -> bool {
        self.turn_as::<false>(now, underlay, hand_over)
    }

    /// [`turn`](Self::turn), seen by the capture that is running: the same code, compiled once more with what looks at packets.
    pub fn turn_captured(
        &mut self,
        now: Time,
        underlay: &mut impl Underlay,
        hand_over: impl FnOnce(&mut Self),
    ) -> bool {
        self.turn_as::<true>(now, underlay, hand_over)
    }

    /// `SEEN`: packets are shown to the capture. All of the way is generic over this, so that without it costs nothing.
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
        // Whatever time has brought: ACK timers, losses, probes, delayed faults.
        busy |= self.on_time::<SEEN>();
        // Show the guests what is in order, with one notification each; only then acknowledge it.
        self.publish::<SEEN>();
        self.work.at_shared(Stage::Acknowledge);
        self.engine.flush_acks(self.now, &mut self.out);
        // Out: fetch, parse, switch, transport (guest.rs).
        busy |= self.fetch_from_guests::<SEEN>(underlay);
        // Segment, encapsulate, send; give acknowledged buffers back (emit.rs).
        busy |= self.emit::<SEEN>(underlay);
        self.tell_completions();
        self.work.at_shared(Stage::Loop);
        self.counters.busy_loops += u64::from(busy);
        busy
    }

    /// Receives until nothing is waiting or the turn has what it may have (budget.rs): what it brings is shown to the guests, and
    /// answered by them, before there is more.
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

    /// Packets that have arrived so far, alone or with others.
    fn arrivals(&self) -> u64 {
        self.counters.underlay_rx_packets + self.counters.unbundled_packets
    }

    /// Tells the guests which of their buffers are theirs again, each once.
    fn tell_completions(&mut self) {
        for port in self.ports.iter_mut().flatten().filter(|p| p.completed) {
            port.completed = false;
            self.work.at(Stage::Flush, port.owner);
            port.port.flush();
        }
    }

    /// Does what time has brought: the transport's timers, router advertisements and delayed packets.
    fn on_time<const SEEN: bool>(&mut self) -> bool {
        let mut busy = false;
        if self.engine.next_timeout().is_some_and(|at| at <= self.now) {
            self.work.at_shared(Stage::Timer);
            self.engine.on_timeout(self.now, &mut self.out);
            busy = true;
            // Of a peer that answers again a timer of the transport is due at once.
            if !self.kept.is_empty() {
                self.send_kept::<SEEN>();
            }
        }
        busy |= self.advertise::<SEEN>();
        busy | self.release_delayed::<SEEN>()
    }
}
