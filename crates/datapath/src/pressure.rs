//! Shares of the guests while a worker cannot keep up with the packets that arrive from the underlay (Triton, section
//! 8: the pre-classifier by vNIC, which avoids losses).
//!
//! All guests of a worker share the queue of arrived datagrams. When the worker cannot keep up, the queue fills, the
//! packets of all guests wait, and finally the kernel drops arriving packets. To prevent that, each guest then has a
//! share. Packets beyond it are dropped as soon as their guest is known, before the expensive part of processing, and
//! the transport tells the sender's switch (PROTOCOL §9.4), which slows down the sending guest. The share falls while
//! packets wait long, and rises while they do not. So a guest that needs little gets all of it, and the others get
//! equal shares. A guest that was sent less than its share may be sent a burst.

use bifrost_rte::Time;

/// High-water mark: the shortest wait of the oldest packet during an epoch, ns. Below it, the worker did not run for a
/// moment, or a burst has arrived.
const HIGH_NS: u64 = 2_000_000;
/// Low-water mark, ns.
const LOW_NS: u64 = 500_000;
/// Interval at which the share changes, ns.
const EPOCH_NS: u64 = 1_000_000;
/// Consecutive epochs above the high-water mark after which shares apply. Packets that arrived while the worker did not
/// run, because its processor had other work, are fewer.
const PATIENCE: u32 = 8;
/// Epochs below the high-water mark after which shares no longer apply.
const MEMORY: u32 = 128;
/// Cost of a packet in addition to its bytes, in bytes.
const PACKET: u64 = 512;
/// Burst that a guest may be sent if it was sent less than its share before, in bytes including those of [`PACKET`]: a
/// window of TCP. The worker needs a few hundred microseconds for it.
const BURST: u64 = 128 << 10;

/// The share, and what it depends on.
#[derive(Debug)]
pub(crate) struct Pressure {
    /// Loads are counted.
    on: bool,
    epoch: u32,
    ends: Time,
    /// The shortest wait of the oldest packets of this epoch's turns, ns.
    waited_ns: u64,
    /// Work that one guest may cause in an epoch, bytes.
    share: u64,
    /// Admitted work, and number of guests that were sent anything, in this epoch.
    admitted: u64,
    guests: u64,
    /// Work for the most demanding guest in this epoch, or half of that in the previous one.
    most: u64,
    /// The last epoch above the high-water mark, and how many there were in a row.
    pressed: u32,
    in_a_row: u32,
}

/// Work for a guest, bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Load {
    /// The latest epoch in which it was sent anything.
    epoch: u32,
    /// Work in that epoch.
    sent: u64,
    /// Admitted work, less the share of each epoch since (a leaky bucket).
    admitted: u64,
}

impl Default for Pressure {
    fn default() -> Self {
        Pressure {
            on: false,
            // A load of epoch 0 is none.
            epoch: 1,
            ends: Time(0),
            waited_ns: u64::MAX,
            share: u64::MAX,
            admitted: 0,
            most: 0,
            guests: 0,
            pressed: 0,
            in_a_row: 0,
        }
    }
}

impl Pressure {
    /// Whether shares apply, so that [`admits`](Self::admits) must be called for each packet.
    #[inline(always)]
    pub(crate) fn is_on(&self) -> bool {
        self.on
    }

    /// Whether a packet of `bytes` is within the share of the guest with this `load`.
    pub(crate) fn admits(&mut self, load: &mut Load, bytes: usize) -> bool {
        if load.epoch != self.epoch {
            let epochs = u64::from(self.epoch.wrapping_sub(load.epoch));
            let admitted = load.admitted.saturating_sub(self.share.saturating_mul(epochs));
            *load = Load { epoch: self.epoch, sent: 0, admitted };
            self.guests += 1;
        }
        let work = bytes as u64 + PACKET;
        load.sent += work;
        self.most = self.most.max(load.sent);
        let is_admitted = load.admitted + work <= self.share.max(BURST);
        if is_admitted {
            load.admitted += work;
            self.admitted += work;
        }
        is_admitted
    }

    /// Call after each turn. `waited_ns`: how long its oldest packet had waited; 0 if the queue is empty now, or if the
    /// worker has only one guest, so that a limit would help nobody.
    pub(crate) fn turned(&mut self, now: Time, waited_ns: u64) {
        if !self.on {
            if waited_ns >= HIGH_NS {
                *self = Pressure { on: true, epoch: self.epoch, pressed: self.epoch, ..Pressure::default() };
                self.begin_epoch(now);
            }
            return;
        }
        self.waited_ns = self.waited_ns.min(waited_ns);
        if now < self.ends {
            return;
        }
        if self.waited_ns >= HIGH_NS {
            self.pressed = self.epoch;
            self.in_a_row = self.in_a_row.saturating_add(1);
            if self.in_a_row >= PATIENCE || self.share != u64::MAX {
                // A guest may exceed its fair share by a quarter.
                let fair = self.admitted / self.guests.max(2) * 5 / 4;
                self.share = (self.share.min(self.most) / 8 * 7).max(fair).max(PACKET);
            }
        } else {
            self.in_a_row = 0;
            if self.waited_ns < LOW_NS {
                self.share = self.share.saturating_add(self.share / 8);
            }
        }
        if self.epoch.wrapping_sub(self.pressed) > MEMORY {
            (self.on, self.share) = (false, u64::MAX);
        }
        self.begin_epoch(now);
    }

    fn begin_epoch(&mut self, now: Time) {
        self.epoch = self.epoch.wrapping_add(1).max(1);
        self.ends = now.after(EPOCH_NS);
        // An epoch in which the worker hardly ran shows little of its capacity.
        self.most /= 2;
        (self.waited_ns, self.admitted, self.guests) = (u64::MAX, 0, 0);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    /// Time that a packet of 64 bytes costs the worker, ns, if it is fully processed, and if it is dropped at once.
    const WAY_NS: u64 = 3_000;
    const DROP_NS: u64 = 300;
    /// Packets that the queue holds.
    const ROOM: usize = 6_000;

    /// What happened to the packets of a guest.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    struct Fate {
        arrived: u64,
        /// The queue was full.
        lost: u64,
        refused: u64,
        longest_wait_ns: u64,
    }

    /// Traffic for a guest: a burst of `packets` packets of `bytes` bytes, every `period_ns`.
    #[derive(Clone, Copy, Debug)]
    struct Sent {
        period_ns: u64,
        packets: u64,
        bytes: usize,
    }

    /// [`run_beside`] on a processor without other work. Each guest is sent one packet of 64 bytes per period.
    fn run(periods_ns: &[u64]) -> (Vec<Fate>, Pressure) {
        let sent: Vec<Sent> = periods_ns.iter().map(|&period_ns| Sent { period_ns, packets: 1, bytes: 64 }).collect();
        run_beside(&sent, 0)
    }

    /// Simulates a worker for 300 ms whose processor does other work for `others_ns` of every 8 ms. Returns what became
    /// of the packets that arrived in the last 200 ms.
    fn run_beside(sent: &[Sent], others_ns: u64) -> (Vec<Fate>, Pressure) {
        let mut pressure = Pressure::default();
        let mut loads = vec![Load::default(); sent.len()];
        let mut fates = vec![Fate::default(); sent.len()];
        let mut next: Vec<u64> = sent.iter().map(|sent| sent.period_ns).collect();
        let mut queue: VecDeque<(u64, usize)> = VecDeque::new();
        let mut now = 0;
        while now < 300_000_000 {
            if now % 8_000_000 < others_ns {
                now += others_ns - now % 8_000_000;
            }
            // Packets that have arrived meanwhile, in order.
            while let Some(guest) = (0..next.len()).filter(|g| next[*g] <= now).min_by_key(|g| next[*g]) {
                let at = next[guest];
                next[guest] += sent[guest].period_ns;
                let counts = at > 100_000_000;
                for _ in 0..sent[guest].packets {
                    fates[guest].arrived += u64::from(counts);
                    match queue.len() < ROOM {
                        true => queue.push_back((at, guest)),
                        false => fates[guest].lost += u64::from(counts),
                    }
                }
            }
            let began = now;
            let waited = queue.front().map_or(0, |(at, _)| began - at);
            for _ in 0..256 {
                let Some((at, guest)) = queue.pop_front() else { break };
                let counts = at > 100_000_000;
                let fate = &mut fates[guest];
                if counts {
                    fate.longest_wait_ns = fate.longest_wait_ns.max(now - at);
                }
                let admitted = !pressure.is_on() || pressure.admits(&mut loads[guest], sent[guest].bytes);
                now += if admitted { WAY_NS } else { DROP_NS };
                fate.refused += u64::from(counts && !admitted);
            }
            now += 1_000;
            // As in `turn.rs`: if the queue is empty, no packet has waited.
            pressure.turned(Time(now), if queue.is_empty() { 0 } else { waited });
        }
        (fates, pressure)
    }

    #[test]
    fn a_worker_that_keeps_up_refuses_nothing() {
        // 95 % of what the worker can do, mostly for one guest.
        let (fates, pressure) = run(&[3_300, 100_000]);
        assert!(fates.iter().all(|fate| fate.lost == 0 && fate.refused == 0), "{fates:?}");
        assert!(!pressure.is_on());
    }

    #[test]
    fn a_noisy_guest_pays_for_what_it_is_sent() {
        // Four times what the worker can do, besides a tenth of it, and an occasional packet.
        let (fates, _) = run(&[750, 30_000, 20_000_000]);
        for quiet in &fates[1..] {
            assert_eq!((quiet.lost, quiet.refused), (0, 0), "{fates:?}");
            assert!(quiet.longest_wait_ns < 3 * HIGH_NS, "{fates:?}");
        }
        let noisy = fates[0];
        let through = noisy.arrived - noisy.refused - noisy.lost;
        // Dropping takes 40 % of the time, the second guest 10 %; half is left for one packet in eight.
        assert!(through > noisy.arrived / 10, "the bound is no smaller than it must be: {fates:?}");
    }

    #[test]
    fn a_window_of_tcp_beside_a_noisy_guest_is_within_the_share() {
        // Two windows of 40 packets in 50 ms, a fraction of its share. The worker has all or half of its processor.
        let noisy = Sent { period_ns: 750, packets: 1, bytes: 64 };
        let quiet = Sent { period_ns: 25_000_000, packets: 40, bytes: 1500 };
        for others_ns in [0, 4_000_000] {
            let (fates, _) = run_beside(&[noisy, quiet], others_ns);
            assert_eq!(fates[1].refused, 0, "{others_ns} ns: {fates:?}");
            assert!(fates[0].refused > 1000, "{others_ns} ns: {fates:?}");
        }
    }

    #[test]
    fn equally_noisy_guests_pay_alike() {
        let (fates, _) = run(&[1_500, 1_500, 30_000]);
        assert_eq!((fates[2].lost, fates[2].refused), (0, 0), "{fates:?}");
        let [a, b] = [fates[0], fates[1]].map(|fate| fate.refused + fate.lost);
        assert!(a.abs_diff(b) < a / 10, "{fates:?}");
    }

    #[test]
    fn the_queue_is_short_when_another_guest_comes() {
        // No other guest is sent anything for a while.
        let (fates, _) = run(&[750, 70_000_000]);
        assert_eq!(fates[1], Fate { arrived: 3, longest_wait_ns: fates[1].longest_wait_ns, ..Fate::default() });
        assert!(fates[1].longest_wait_ns < 3 * HIGH_NS, "{fates:?}");
        assert_eq!(fates[0].lost, 0, "{fates:?}");
    }

    #[test]
    fn it_ends_with_the_pressure() {
        let mut pressure = Pressure::default();
        let mut loads = [Load::default(); 2];
        let mut now = 0;
        let mut epoch = |pressure: &mut Pressure, waited| {
            now += EPOCH_NS;
            let admitted = (0..2).map(|g| (0..100).filter(|_| pressure.admits(&mut loads[g], 64)).count());
            let admitted = admitted.collect::<Vec<_>>();
            pressure.turned(Time(now), waited);
            admitted
        };
        pressure.turned(Time(0), HIGH_NS);
        assert!(pressure.is_on());
        for _ in 1..PATIENCE {
            assert_eq!((epoch(&mut pressure, HIGH_NS), pressure.share), (vec![100, 100], u64::MAX));
        }
        // Not in a row.
        epoch(&mut pressure, LOW_NS);
        for _ in 1..PATIENCE {
            assert_eq!((epoch(&mut pressure, HIGH_NS), pressure.share), (vec![100, 100], u64::MAX));
        }
        epoch(&mut pressure, HIGH_NS);
        assert_ne!(pressure.share, u64::MAX);
        for _ in 0..=MEMORY {
            assert!(pressure.is_on());
            epoch(&mut pressure, 0);
        }
        assert!(!pressure.is_on());
        assert_eq!(pressure.share, u64::MAX);
    }
}
