//! The learned routes of one VPC, as the daemon knows them: bounded, and forgotten when idle. Pure.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use bifrost_control::config::Mac;
use ipnet::IpNet;

/// Most learned routes of a VPC.
pub(crate) const MOST_ROUTES: usize = 16_384;
/// Part of the routes that make room at the bound: those idle for longest.
const EVICTED: usize = MOST_ROUTES / 8;
/// Shortest time between two evictions: each makes all flows of the host use the tables once.
const BETWEEN_EVICTIONS: Duration = Duration::from_secs(1);
/// A route that no packet has used for this long is forgotten.
pub(crate) const IDLE: Duration = Duration::from_secs(300);

/// A time since any fixed one.
pub(crate) type Time = Duration;

/// A learned route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) peer: Arc<str>,
    pub(crate) mac: Mac,
    pub(crate) since: Time,
    /// When a packet was last seen to use it.
    pub(crate) used: Time,
}

/// The learned routes of a VPC, by disjoint ranges.
#[derive(Debug, Default)]
pub(crate) struct Table {
    routes: BTreeMap<IpNet, Entry>,
    evicted_at: Option<Time>,
}

/// There is no room for another route.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Full;

impl Table {
    pub(crate) fn len(&self) -> usize {
        self.routes.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&IpNet, &Entry)> {
        self.routes.iter()
    }

    /// Forgets what is known of a range, and of parts of it. Returns the number of routes.
    pub(crate) fn forget(&mut self, range: IpNet) -> usize {
        let range = range.trunc();
        let first = IpNet::from(range.network());
        // In the order of first addresses and, with the same one, of lengths: the only route that begins before the
        // range and overlaps it is the one before it.
        let wider = IpNet::new(range.network(), 0).unwrap_or(first);
        let before = self.routes.range(..=range).next_back().filter(|(known, _)| known.contains(&range));
        let last = IpNet::from(range.broadcast());
        let within = self.routes.range(wider..=last).map(|(known, _)| *known).filter(|known| range.contains(known));
        let gone: Vec<IpNet> = before.map(|(known, _)| *known).into_iter().chain(within).collect();
        gone.iter().filter(|known| self.routes.remove(known).is_some()).count()
    }

    /// Learns a route, in place of what was known of its range. Returns the routes that made room for it.
    ///
    /// # Errors
    /// There is no room; what was known of the range is forgotten nevertheless.
    pub(crate) fn learn(&mut self, now: Time, range: IpNet, peer: Arc<str>, mac: Mac) -> Result<Vec<IpNet>, Full> {
        let former = self.routes.get(&range.trunc()).map(|entry| entry.used);
        self.forget(range);
        let mut evicted = Vec::new();
        if self.routes.len() >= MOST_ROUTES {
            if self.evicted_at.is_some_and(|at| now.saturating_sub(at) < BETWEEN_EVICTIONS) {
                return Err(Full);
            }
            self.evicted_at = Some(now);
            let mut by_use: Vec<(Time, IpNet)> =
                self.routes.iter().map(|(range, entry)| (entry.used, *range)).collect();
            let most = EVICTED.min(by_use.len() - 1);
            by_use.select_nth_unstable(most);
            evicted.extend(by_use.into_iter().take(EVICTED).map(|(_, range)| range));
            evicted.iter().for_each(|range| drop(self.routes.remove(range)));
        }
        let used = former.unwrap_or(now);
        self.routes.insert(range.trunc(), Entry { peer, mac, since: now, used });
        Ok(evicted)
    }

    /// Packets have used the routes whose ranges begin at these addresses.
    pub(crate) fn used(&mut self, now: Time, first: &[IpAddr]) {
        for address in first {
            // Ranges are disjoint, so at most one begins there.
            let wider = IpNet::new(*address, 0).unwrap_or_else(|_| IpNet::from(*address));
            if let Some((range, entry)) = self.routes.range_mut(wider..=IpNet::from(*address)).next_back()
                && range.network() == *address
            {
                entry.used = now;
            }
        }
    }

    /// Forgets idle routes, and returns them; and whether others may soon be.
    pub(crate) fn expire(&mut self, now: Time) -> (Vec<IpNet>, bool) {
        let idle = |entry: &Entry| now.saturating_sub(entry.used);
        let gone: Vec<IpNet> = self.routes.iter().filter(|(_, e)| idle(e) >= IDLE).map(|(range, _)| *range).collect();
        gone.iter().for_each(|range| drop(self.routes.remove(range)));
        let is_near = self.routes.values().any(|entry| idle(entry) >= IDLE / 2);
        (gone, is_near)
    }

    /// Forgets the routes that `keep` refuses, and returns them.
    pub(crate) fn retain(&mut self, keep: impl Fn(&IpNet, &Entry) -> bool) -> Vec<IpNet> {
        let gone: Vec<IpNet> =
            self.routes.iter().filter(|(range, entry)| !keep(range, entry)).map(|(range, _)| *range).collect();
        gone.iter().for_each(|range| drop(self.routes.remove(range)));
        gone
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MAC: Mac = Mac([2, 0, 0, 0, 0, 1]);

    fn host(n: u32) -> IpNet {
        IpNet::from(IpAddr::from((0x0a00_0000 + n).to_be_bytes()))
    }

    fn s(seconds: u64) -> Time {
        Duration::from_secs(seconds)
    }

    #[test]
    fn at_the_bound_the_idlest_make_room_but_not_too_often() {
        let mut table = Table::default();
        for n in 0..MOST_ROUTES as u32 {
            assert_eq!(table.learn(s(10), host(n), "b".into(), MAC), Ok(Vec::new()));
        }
        let used: Vec<IpAddr> = (0..MOST_ROUTES as u32 - 100).map(|n| host(n).addr()).collect();
        table.used(s(20), &used);
        let evicted = table.learn(s(30), host(1 << 20), "b".into(), MAC).expect("room");
        assert_eq!(evicted.len(), EVICTED);
        let idlest = |n: u32| evicted.contains(&host(n));
        assert!((MOST_ROUTES as u32 - 100..MOST_ROUTES as u32).all(idlest));
        for n in 1..EVICTED as u32 {
            assert_eq!(table.learn(s(30), host((1 << 20) + n), "b".into(), MAC), Ok(Vec::new()));
        }
        assert_eq!(table.learn(s(30), host(1 << 21), "b".into(), MAC), Err(Full));
        assert_eq!(table.len(), MOST_ROUTES);
        assert_eq!(table.learn(s(30), host(1 << 20), "c".into(), MAC), Ok(Vec::new()), "it changes, and needs no room");
        assert!(table.learn(s(31), host(1 << 21), "b".into(), MAC).is_ok());
    }

    #[test]
    fn idle_routes_are_forgotten_and_used_ones_stay() {
        let mut table = Table::default();
        for n in 0..3 {
            table.learn(s(0), host(n), "b".into(), MAC).expect("room");
        }
        assert_eq!(table.expire(IDLE / 2 - s(1)), (Vec::new(), false));
        assert_eq!(table.expire(IDLE / 2), (Vec::new(), true), "whether they are used must be looked at");
        table.used(IDLE / 2, &[host(1).addr()]);
        assert_eq!(table.expire(IDLE), (vec![host(0), host(2)], true));
        assert_eq!(table.len(), 1);
        // An answer again is not a use.
        table.learn(IDLE, host(1), "c".into(), MAC).expect("room");
        assert_eq!(table.expire(IDLE * 3 / 2), (vec![host(1)], false));
    }

    proptest! {
        #[test]
        fn ranges_stay_disjoint(changes in prop::collection::vec((0u8..64, 24u8..=32, any::<bool>()), 0..40)) {
            let mut table = Table::default();
            let mut oracle: Vec<IpNet> = Vec::new();
            for (host, len, is_learned) in changes {
                let range = IpNet::new_assert(IpAddr::from([10, 0, 0, host]), len).trunc();
                let overlaps = |known: &IpNet| known.contains(&range) || range.contains(known);
                let before = oracle.len();
                oracle.retain(|known| !overlaps(known));
                if is_learned {
                    table.learn(s(1), range, "b".into(), MAC).expect("room");
                    oracle.push(range);
                } else {
                    prop_assert_eq!(table.forget(range), before - oracle.len());
                }
                oracle.sort_unstable();
                prop_assert_eq!(table.iter().map(|(range, _)| *range).collect::<Vec<_>>(), oracle.clone());
            }
        }
    }
}
