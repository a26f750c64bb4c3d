//! Examines the turns of a core, and lets ports rest.

use bifrost_port::GuestPort;
use bifrost_rte::Time;

use super::{LOG_EVERY_NS, LONG_TURN_NS, LOOK_NS, PACKET_NS, WatchdogConfig};
use crate::core::Core;
use crate::ports::Port;
use crate::stage::Stage;

impl<P: GuestPort> Core<P> {
    /// Starts watching who uses the core's time. [`begin_turn`](Self::begin_turn) and [`end_turn`](Self::end_turn) must
    /// then be called around each turn.
    pub fn watch_time(&mut self, config: WatchdogConfig) {
        self.watchdog.config = Some(config);
    }

    /// A turn begins.
    #[inline]
    pub fn begin_turn(&mut self, started: Time) {
        if started < self.watchdog.suspicious_until
            && let Some(config) = self.watchdog.config
        {
            self.begin_look(started, config);
        }
    }

    /// A turn that lasted until `ended` had work to do.
    #[inline]
    pub fn end_turn(&mut self, started: Time, ended: Time) {
        if ended.since(started) > LONG_TURN_NS || self.watchdog.before_ns.is_some() {
            self.end_look(started, ended);
        }
    }

    /// A turn had no work to do.
    #[inline]
    pub fn end_idle_turn(&mut self) {
        if self.watchdog.before_ns.take().is_some() {
            self.work.look_away();
        }
    }

    #[cold]
    fn begin_look(&mut self, started: Time, config: WatchdogConfig) {
        self.watchdog.before_ns = Some((config.processor_time)());
        if started < self.watchdog.close_until {
            self.work.look_closely(config.clock, self.ports.len());
        }
    }

    #[cold]
    fn end_look(&mut self, started: Time, ended: Time) {
        let Some(config) = self.watchdog.config else { return };
        let took = ended.since(started);
        let before = self.watchdog.before_ns.take();
        if took <= LONG_TURN_NS {
            self.work.look_away();
            return;
        }
        self.watchdog.suspicious_until = ended.after(LOOK_NS);
        let Some(before) = before else { return };
        let used = (config.processor_time)().saturating_sub(before);
        if used > LONG_TURN_NS {
            self.counters.long_turns += 1;
            self.watchdog.close_until = ended.after(LOOK_NS);
        }
        let Some(spent) = self.work.look_away() else { return };
        let off = took.saturating_sub(used);
        for (owner, step) in (0..).zip(spent) {
            let (spent_ns, stage, longest_ns) = (step.total_ns, step.stage, step.longest_ns);
            let Some(port) = self.port_mut(owner) else { continue };
            let packets = port.all_packets();
            let new_packets = packets.saturating_sub(std::mem::replace(&mut port.slowness.packets, packets));
            let kept = spent_ns.saturating_sub(off);
            let excess = kept.saturating_sub(LONG_TURN_NS + PACKET_NS * new_packets);
            if excess > 0 {
                self.kept_by(owner, ended, excess, config.share_percent, (stage, longest_ns));
            }
        }
    }

    /// Port `owner` has used `excess` ns in a turn beyond what its packets need; its longest step was of this stage.
    fn kept_by(&mut self, owner: u32, now: Time, excess: u64, share: u8, (stage, longest_ns): (Stage, u64)) {
        let Some(port) = self.port_mut(owner) else { return };
        let slowness = &mut port.slowness;
        let excess = slowness.confirmed(now, excess, share);
        if excess == 0 {
            return;
        }
        slowness.slow_turns += 1;
        let rest = slowness.owe(now, excess, share);
        if slowness.named.is_none_or(|at| now.since(at) > LOG_EVERY_NS) {
            slowness.named = Some(now);
            let (longest_us, turns) = (longest_ns / 1000, slowness.slow_turns);
            tracing::warn!(
                port = owner,
                stage = stage.name(),
                longest_us,
                turns,
                "a port keeps its worker from all others"
            );
        }
        if rest > 0 {
            slowness.rest_times += 1;
            slowness.rests_until = Some(now.after(rest));
            // What happened before the rest is still remembered after it.
            slowness.witness_as_of = now.after(rest);
            self.watchdog.any_rests = true;
            self.watch(owner as usize);
        }
    }

    /// The next time at which a port's rest ends.
    pub(crate) fn next_rested(&self) -> Option<Time> {
        if !self.watchdog.any_rests {
            return None;
        }
        self.ports.iter().flatten().filter_map(|port| port.slowness.rests_until).min()
    }

    /// Serves ports again whose rest has ended.
    #[cold]
    pub(crate) fn end_rests(&mut self) {
        let now = self.now;
        for owner in 0..self.ports.len() {
            let Some(port) = self.ports[owner].as_mut() else { continue };
            if port.slowness.rests_until.is_some_and(|until| until <= now) {
                port.slowness.rests_until = None;
                self.watch(owner);
            }
        }
        self.watchdog.any_rests = self.ports.iter().flatten().any(|port| port.slowness.rests_until.is_some());
    }
}

impl<P> Port<P> {
    /// Packets for which the port was served, in either direction.
    fn all_packets(&self) -> u64 {
        self.outbound.fetched_packets + self.rx_packets + self.outbound.answer_packets
    }
}
