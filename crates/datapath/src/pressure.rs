//! Who gets less while a worker cannot keep up with what the underlay brings (Triton, section 8, on avoiding losses: the pre-classifier by vNIC).
//!
//! All guests of a worker share the queue in which it finds datagrams. When it cannot keep up, the queue fills, everybody's packets
//! wait, and in the end the kernel drops whichever comes. A guest's share is bounded then: what is beyond it is dropped as soon as it
//! is clear whose it is, before the expensive part of its way, and the transport tells the sender's switch (PROTOCOL §9.4), which
//! slows the guest that sends. The bound falls while packets wait long and rises when they do not, so that who asks for little gets
//! all of it, and the others equally much.

use bifrost_rte::Time;

/// How long packets may have waited for the worker, at least, all over an epoch, ns: the queue's high water. Below, a guest has its
/// processor for a while, or a burst has come.
const HIGH_NS: u64 = 2_000_000;
/// The low water, ns.
const LOW_NS: u64 = 500_000;
/// The bound changes so often, ns.
const EPOCH_NS: u64 = 1_000_000;
/// So many epochs of high water in a row begin it: what has come while a worker did not run, for others had its processor, is less.
const PATIENCE: u32 = 8;
/// So many epochs without high water end it.
const MEMORY: u32 = 128;
/// What a packet costs beside its bytes, in bytes.
const PACKET: u64 = 512;

/// The bound, and what it depends on.
#[derive(Debug)]
pub(crate) struct Pressure {
    /// Loads are counted.
    on: bool,
    epoch: u32,
    ends: Time,
    /// Of the turns of this epoch, the shortest of how long their oldest packets had waited, ns.
    waited_ns: u64,
    /// What one guest may have in an epoch.
    share: u64,
    /// What was let in, and how many guests were sent anything, in this epoch.
    admitted: u64,
    guests: u64,
    /// What the most demanding guest was sent in this epoch, or half of what it was before.
    most: u64,
    /// When the water was last high, and for how many epochs in a row.
    pressed: u32,
    in_a_row: u32,
}

/// What a guest was sent in the latest epoch in which it was sent anything.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Load {
    epoch: u32,
    work: u64,
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
    /// Whether [`admits`](Self::admits) has to be asked.
    #[inline(always)]
    pub(crate) fn is_on(&self) -> bool {
        self.on
    }

    /// Whether a packet of so many bytes for a guest, whose load that is, may go on.
    pub(crate) fn admits(&mut self, load: &mut Load, bytes: usize) -> bool {
        if load.epoch != self.epoch {
            *load = Load { epoch: self.epoch, work: 0 };
            self.guests += 1;
        }
        let work = bytes as u64 + PACKET;
        load.work += work;
        self.most = self.most.max(load.work);
        let admitted = load.work <= self.share;
        self.admitted += if admitted { work } else { 0 };
        admitted
    }

    /// What a turn received is dealt with: its oldest packet had waited so long, ns; 0 if the queue is empty now, or if a guest has the
    /// worker to itself: then there is nobody whom a bound would help.
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
                // A quarter more than fair is nobody's fault.
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
        // An epoch in which the worker hardly ran says little about what it can do.
        self.most /= 2;
        (self.waited_ns, self.admitted, self.guests) = (u64::MAX, 0, 0);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    /// A packet of 64 bytes costs the worker so long, ns, if it goes all the way, or if it is dropped at once.
    const WAY_NS: u64 = 3_000;
    const DROP_NS: u64 = 300;
    /// Packets that the queue holds.
    const ROOM: usize = 6_000;

    /// What became of the packets of a guest.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    struct Fate {
        arrived: u64,
        /// The queue was full.
        lost: u64,
        refused: u64,
        longest_wait_ns: u64,
    }

    /// A worker whose guests are sent a packet of 64 bytes every so many nanoseconds each, for 300 ms; what
    /// became of those that came in its last 200 ms.
    fn run(periods_ns: &[u64]) -> (Vec<Fate>, Pressure) {
        let mut pressure = Pressure::default();
        let mut loads = vec![Load::default(); periods_ns.len()];
        let mut fates = vec![Fate::default(); periods_ns.len()];
        let mut next: Vec<u64> = periods_ns.to_vec();
        let mut queue: VecDeque<(u64, usize)> = VecDeque::new();
        let mut now = 0;
        while now < 300_000_000 {
            // What has come meanwhile, in order.
            while let Some(guest) = (0..next.len()).filter(|g| next[*g] <= now).min_by_key(|g| next[*g]) {
                let at = next[guest];
                next[guest] += periods_ns[guest];
                let counts = at > 100_000_000;
                fates[guest].arrived += u64::from(counts);
                match queue.len() < ROOM {
                    true => queue.push_back((at, guest)),
                    false => fates[guest].lost += u64::from(counts),
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
                let admitted = !pressure.is_on() || pressure.admits(&mut loads[guest], 64);
                now += if admitted { WAY_NS } else { DROP_NS };
                fate.refused += u64::from(counts && !admitted);
            }
            now += 1_000;
            pressure.turned(Time(now), waited);
        }
        (fates, pressure)
    }

    #[test]
    fn a_worker_that_keeps_up_refuses_nothing() {
        // 95 % of what it can do, most of it one guest's.
        let (fates, pressure) = run(&[3_300, 100_000]);
        assert!(fates.iter().all(|fate| fate.lost == 0 && fate.refused == 0), "{fates:?}");
        assert!(!pressure.is_on());
    }

    #[test]
    fn a_noisy_guest_pays_for_what_it_is_sent() {
        // Four times what the worker can do, beside a tenth, and a packet now and then.
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
    fn equally_noisy_guests_pay_alike() {
        let (fates, _) = run(&[1_500, 1_500, 30_000]);
        assert_eq!((fates[2].lost, fates[2].refused), (0, 0), "{fates:?}");
        let [a, b] = [fates[0], fates[1]].map(|fate| fate.refused + fate.lost);
        assert!(a.abs_diff(b) < a / 10, "{fates:?}");
    }

    #[test]
    fn the_queue_is_short_when_another_guest_comes() {
        // Nobody else is sent anything for a while.
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
