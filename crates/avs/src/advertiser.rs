//! The schedule of unsolicited router advertisements to guests (RFC 4861, section 6.2.4).
//!
//! The port that is due next is at the head of a priority queue: only a change of the configuration iterates over all
//! ports. The content of advertisements is in `router.rs`.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use bifrost_tables::mix;

use crate::ids::PortId;

const SECOND_NS: u64 = 1_000_000_000;
/// Number of initial advertisements that follow each other quickly (RFC 4861, section 10:
/// `MAX_INITIAL_RTR_ADVERTISEMENTS`), and the maximum time between them (`MAX_INITIAL_RTR_ADVERT_INTERVAL`).
const SOON: u32 = 3;
const SOON_NS: u64 = 16 * SECOND_NS;
/// Minimum time between two advertisements (RFC 4861, section 6.2.1: `MinRtrAdvInterval`).
const LEAST_INTERVAL_NS: u64 = 3 * SECOND_NS;

/// When each guest gets its next advertisement.
#[derive(Debug)]
pub(crate) struct Advertiser {
    secret: u64,
    /// Indexed by port number; `None`: the guest gets no advertisements.
    turns: Vec<Option<Turn>>,
    /// One entry per port, except for those in `fresh`.
    due: BinaryHeap<Reverse<(u64, PortId)>>,
    /// New or changed ports that are not scheduled yet.
    fresh: Vec<PortId>,
    /// Ports whose guests must be told that there is no router any more.
    ended: Vec<PortId>,
}

/// A port's position in its sequence of advertisements.
#[derive(Clone, Copy, Debug)]
struct Turn {
    due_ns: u64,
    interval_ns: u64,
    /// Number of advertisements sent; saturates.
    sent: u32,
    /// Whether `due_ns` is set.
    is_set: bool,
}

/// A port whose guest gets advertisements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Advertised {
    pub(crate) port: PortId,
    /// Maximum time between two advertisements, s.
    pub(crate) interval_s: u16,
    /// Whether nothing has changed since the previous configuration.
    pub(crate) is_same: bool,
}

impl Advertiser {
    /// `secret`: any number; it makes hosts advertise at different times.
    pub(crate) fn new(secret: u64) -> Self {
        Advertiser { secret, turns: Vec::new(), due: BinaryHeap::new(), fresh: Vec::new(), ended: Vec::new() }
    }

    /// Applies another configuration: exactly these ports get advertisements. Ports that no longer do get a final
    /// one.
    pub(crate) fn set(&mut self, ports: impl Iterator<Item = Advertised>) {
        let mut before = std::mem::take(&mut self.turns);
        self.due.clear();
        self.fresh.clear();
        for Advertised { port, interval_s, is_same } in ports {
            let place = port.place();
            if self.turns.len() <= place {
                self.turns.resize(place + 1, None);
            }
            let known = before.get_mut(place).and_then(Option::take);
            let interval_ns = u64::from(interval_s) * SECOND_NS;
            let new = Turn { due_ns: 0, interval_ns, sent: 0, is_set: false };
            let turn = known.filter(|turn| is_same && turn.is_set).unwrap_or(new);
            if turn.is_set {
                self.due.push(Reverse((turn.due_ns, port)));
            } else {
                self.fresh.push(port);
            }
            self.turns[place] = Some(turn);
        }
        self.ended = (0..).map(PortId).zip(before).filter_map(|(port, turn)| turn.map(|_| port)).collect();
    }

    /// When the next advertisement is due, ns; 0: now.
    #[inline]
    pub(crate) fn next_ns(&self) -> Option<u64> {
        if !self.fresh.is_empty() || !self.ended.is_empty() {
            return Some(0);
        }
        self.due.peek().map(|Reverse((due_ns, _))| *due_ns)
    }

    /// The port of the next advertisement that is due, if any.
    pub(crate) fn take(&mut self, now_ns: u64) -> Option<PortId> {
        if let Some(port) = self.ended.pop() {
            return Some(port);
        }
        for port in std::mem::take(&mut self.fresh) {
            self.put(port, now_ns);
        }
        let &Reverse((due_ns, port)) = self.due.peek()?;
        if due_ns > now_ns {
            return None;
        }
        self.due.pop();
        if let Some(turn) = self.turns.get_mut(port.place()).and_then(Option::as_mut) {
            turn.sent = turn.sent.saturating_add(1);
        }
        self.put(port, now_ns);
        Some(port)
    }

    /// Schedules a port's next advertisement after `now_ns`: the first one soon, later ones after a random interval.
    fn put(&mut self, port: PortId, now_ns: u64) {
        let Some(turn) = self.turns.get_mut(port.place()).and_then(Option::as_mut) else { return };
        let most = if turn.sent < SOON { turn.interval_ns.min(SOON_NS) } else { turn.interval_ns };
        let least = if turn.sent == 0 { 0 } else { (most / 3).max(LEAST_INTERVAL_NS).min(most) };
        let random = mix(self.secret ^ (u64::from(port.0) << 32 | u64::from(turn.sent)));
        turn.due_ns = now_ns + least + random % (most - least + 1);
        turn.is_set = true;
        self.due.push(Reverse((turn.due_ns, port)));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const START_NS: u64 = 1 << 50;

    fn told(port: u32, interval_s: u16, is_same: bool) -> Advertised {
        Advertised { port: PortId(port), interval_s, is_same }
    }

    /// Time and port of all advertisements during `for_s` seconds.
    fn run(advertiser: &mut Advertiser, from_ns: u64, for_s: u64) -> Vec<(u64, u32)> {
        let (mut now_ns, mut all) = (from_ns, Vec::new());
        while now_ns <= from_ns + for_s * SECOND_NS {
            match advertiser.take(now_ns) {
                Some(port) => all.push((now_ns, port.0)),
                None => match advertiser.next_ns() {
                    Some(next_ns) => now_ns = next_ns,
                    None => break,
                },
            }
        }
        all
    }

    #[test]
    fn the_first_three_come_soon_and_the_others_at_intervals() {
        let mut advertiser = Advertiser::new(7);
        advertiser.set([told(3, 600, false)].into_iter());
        assert_eq!(advertiser.next_ns(), Some(0));
        let all = run(&mut advertiser, START_NS, 7200);
        assert!(all.iter().all(|(_, port)| *port == 3));
        let times: Vec<u64> = all.iter().map(|(at, _)| at - START_NS).collect();
        assert!(times[0] <= SOON_NS);
        for (at, pair) in times.windows(2).enumerate() {
            let between = pair[1] - pair[0];
            let most = if at < 2 { SOON_NS } else { 600 * SECOND_NS };
            assert!((most / 3..=most).contains(&between), "{at}: {between}");
        }
        assert!((12..=40).contains(&times.len()), "{times:?}");
    }

    #[test]
    fn unchanged_ports_keep_their_schedule_and_removed_ones_get_a_final_advertisement() {
        let mut advertiser = Advertiser::new(7);
        let set = |advertiser: &mut Advertiser, ports: &[Advertised]| advertiser.set(ports.iter().copied());
        set(&mut advertiser, &[told(0, 4, false), told(1, 600, false), told(2, 600, false)]);
        run(&mut advertiser, START_NS, 100);
        let next = advertiser.turns[1].unwrap().due_ns;
        set(&mut advertiser, &[told(1, 600, true), told(2, 600, false)]);
        let now_ns = START_NS + 101 * SECOND_NS;
        assert_eq!(advertiser.take(now_ns), Some(PortId(0)), "it gets a final advertisement");
        let again = run(&mut advertiser, now_ns, 40);
        assert_eq!(advertiser.turns[1].unwrap().due_ns, next);
        assert!(again.iter().filter(|(_, port)| *port == 2).count() >= 2, "changes are advertised soon");
        assert!(again.iter().all(|(_, port)| *port != 0));
        set(&mut advertiser, &[]);
        assert_eq!(run(&mut advertiser, now_ns + 100 * SECOND_NS, 10_000).len(), 2);
        assert_eq!(advertiser.next_ns(), None);
    }

    proptest! {
        /// For any sequence of configurations: each port has one entry, and advertisements are never too frequent.
        #[test]
        fn every_port_is_scheduled_once_and_not_too_often(
            steps in proptest::collection::vec(
                (proptest::collection::btree_map(0u32..20, (4u16..=1800, any::<bool>()), 0..20), 0u64..300),
                1..6,
            ),
            secret in any::<u64>(),
        ) {
            let (mut advertiser, mut now_ns) = (Advertiser::new(secret), START_NS);
            for (ports, seconds) in steps {
                advertiser.set(ports.iter().map(|(port, (interval_s, is_same))| told(*port, *interval_s, *is_same)));
                let mut last: [Option<u64>; 20] = [None; 20];
                let ended = advertiser.ended.clone();
                for (at, port) in run(&mut advertiser, now_ns, seconds) {
                    let before = last[port as usize].replace(at);
                    prop_assert!(before.is_none_or(|before| at >= before + LEAST_INTERVAL_NS));
                    prop_assert!(ports.contains_key(&port) || ended.contains(&PortId(port)));
                }
                prop_assert_eq!(advertiser.due.len() + advertiser.fresh.len(), ports.len());
                now_ns += seconds * SECOND_NS;
            }
        }
    }
}
