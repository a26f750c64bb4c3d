//! What agents have learned of routes: which answers each is to be told when they change.
//!
//! An answer is found by its range, with all who have it, so a change costs what it makes wrong, not what there is.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::iter;
use std::sync::Arc;

use ipnet::IpNet;

/// The most answers that are remembered of an agent: more than hosts keep.
const MOST: usize = 65_536;

/// A connection of an agent.
pub(crate) type Connection = u64;

/// The answers that agents were given.
#[derive(Debug, Default)]
pub(crate) struct Learned {
    connections: HashMap<Connection, Given>,
    /// Who has an answer about a range: in order of VNI, first address, length, and the numbers of answers. It may name
    /// connections that have ended.
    holders: BTreeMap<(u32, IpNet, u64), Connection>,
    /// How many answers were given.
    number: u64,
    /// Changes that make answers wrong, oldest first.
    changes: VecDeque<Change>,
    /// What connections had that have ended.
    ended: Vec<Given>,
}

/// The answers that one agent was given: of disjoint ranges, as the host has them.
#[derive(Debug)]
struct Given {
    host: Arc<str>,
    /// VNI, range, and the number of the answer.
    ranges: BTreeMap<(u32, IpNet), u64>,
    by_age: BTreeMap<u64, (u32, IpNet)>,
}

/// A prefix about which answers before a certain one are wrong.
#[derive(Debug)]
struct Change {
    vni: u32,
    prefix: IpNet,
    /// The number of the first answer that has taken the change into account, less one.
    last: u64,
    /// Where the search among narrower ranges goes on. None: wider ones are not done.
    from: Option<(IpNet, u64)>,
}

/// An answer that is wrong now, and was forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wrong {
    pub(crate) connection: Connection,
    pub(crate) vni: u32,
    /// What it was about.
    pub(crate) range: IpNet,
    /// What has changed: wider or narrower.
    pub(crate) changed: IpNet,
}

impl Learned {
    /// A connection of a host's agent begins.
    pub(crate) fn begin(&mut self, connection: Connection, host: Arc<str>) {
        self.connections.insert(connection, Given { host, ranges: BTreeMap::new(), by_age: BTreeMap::new() });
    }

    /// A connection has ended.
    pub(crate) fn end(&mut self, connection: Connection) {
        self.ended.extend(self.connections.remove(&connection));
    }

    /// The host of a connection that has begun here, and not ended.
    pub(crate) fn host(&self, connection: Connection) -> Option<&Arc<str>> {
        self.connections.get(&connection).map(|given| &given.host)
    }

    /// An answer about a range is given, in place of earlier ones. Returns the ranges that are forgotten here because there
    /// are too many; the agent has to forget them, too.
    pub(crate) fn give(&mut self, connection: Connection, vni: u32, range: IpNet) -> Vec<(u32, IpNet)> {
        let Learned { connections, holders, number, .. } = self;
        let Some(given) = connections.get_mut(&connection) else { return Vec::new() };
        for earlier in given.overlapping(vni, range) {
            if let Some(number) = given.forget(vni, earlier) {
                holders.remove(&(vni, earlier, number));
            }
        }
        *number += 1;
        given.ranges.insert((vni, range), *number);
        given.by_age.insert(*number, (vni, range));
        holders.insert((vni, range, *number), connection);
        let mut forgotten = Vec::new();
        while given.ranges.len() > MOST
            && let Some((number, (vni, oldest))) = given.by_age.pop_first()
        {
            given.ranges.remove(&(vni, oldest));
            holders.remove(&(vni, oldest, number));
            forgotten.push((vni, oldest));
        }
        forgotten
    }

    /// What is known of a prefix has changed: the answers about it that were given so far may be wrong.
    pub(crate) fn change(&mut self, vni: u32, prefix: IpNet) {
        let last = self.number;
        if self.changes.back().is_none_or(|c| (c.vni, c.prefix, c.last) != (vni, prefix, last)) {
            self.changes.push_back(Change { vni, prefix, last, from: None });
        }
    }

    /// Forgets wrong answers, and the answers of connections that have ended; at most `most` in all. Returns the wrong
    /// ones, those about one range together.
    pub(crate) fn take_wrong(&mut self, most: usize) -> Vec<Wrong> {
        let (mut wrong, mut steps) = (Vec::new(), 0);
        while steps < most
            && let Some(mut change) = self.changes.pop_front()
        {
            if !self.search(&mut change, most, &mut steps, &mut wrong) {
                self.changes.push_front(change);
            }
        }
        while steps < most
            && let Some(given) = self.ended.last_mut()
        {
            match given.ranges.pop_first() {
                Some(((vni, range), number)) => drop(self.holders.remove(&(vni, range, number))),
                None => drop(self.ended.pop()),
            }
            steps += 1;
        }
        wrong
    }

    /// Whether there is nothing for [`take_wrong`](Self::take_wrong) to do.
    pub(crate) fn is_corrected(&self) -> bool {
        self.changes.is_empty() && self.ended.is_empty()
    }

    /// Finds answers that a change makes wrong. Whether it has found all.
    fn search(&mut self, change: &mut Change, most: usize, steps: &mut usize, wrong: &mut Vec<Wrong>) -> bool {
        let Change { vni, prefix, last, .. } = *change;
        let known = |(&(_, range, number), &connection): (&(u32, IpNet, u64), &Connection)| (range, number, connection);
        if change.from.is_none() {
            let wider = iter::successors(prefix.supernet(), |wider| wider.supernet());
            let holders = &self.holders;
            let of = |wider: IpNet| holders.range((vni, wider, 0)..=(vni, wider, last)).map(known);
            let found: Vec<_> = wider.flat_map(of).take(most.saturating_sub(*steps)).collect();
            *steps += found.len();
            found.into_iter().for_each(|answer| self.forget(change, answer, wrong));
            if *steps >= most {
                return false;
            }
            // Some steps for the search itself, so that many changes of what nobody has learned are not done at once.
            *steps += 1;
            change.from = Some((prefix, 0));
        }
        let end = (vni, IpNet::from(prefix.broadcast()), u64::MAX);
        while let Some((range, number)) = change.from {
            let mut rest = self.holders.range((vni, range, number)..=end).map(known);
            let Some((range, number, connection)) = rest.next() else { return true };
            if *steps >= most {
                return false;
            }
            *steps += 1;
            // Later answers about a range are right.
            let is_wrong = number <= last && prefix.contains(&range);
            change.from = Some((range, if is_wrong { number + 1 } else { u64::MAX }));
            if is_wrong {
                self.forget(change, (range, number, connection), wrong);
            }
        }
        true
    }

    fn forget(
        &mut self,
        change: &Change,
        (range, number, connection): (IpNet, u64, Connection),
        wrong: &mut Vec<Wrong>,
    ) {
        self.holders.remove(&(change.vni, range, number));
        let Some(given) = self.connections.get_mut(&connection) else { return };
        given.forget(change.vni, range);
        wrong.push(Wrong { connection, vni: change.vni, range, changed: change.prefix });
    }

    /// How many answers there are.
    pub(crate) fn len(&self) -> usize {
        self.connections.values().map(|given| given.ranges.len()).sum()
    }
}

impl Given {
    /// The ranges that have addresses in common with another one.
    fn overlapping(&self, vni: u32, range: IpNet) -> Vec<IpNet> {
        let known = |(key, _): (&(u32, IpNet), &u64)| (key.0 == vni).then_some(key.1);
        // Ranges are disjoint, so only the one before may have all of it.
        let before = self.ranges.range(..(vni, range)).next_back().and_then(known);
        let before = before.filter(|before| before.contains(&range));
        let last = IpNet::from(range.broadcast());
        let within = self.ranges.range((vni, range)..=(vni, last)).filter_map(known);
        before.into_iter().chain(within.filter(|within| range.contains(within))).collect()
    }

    /// Forgets an answer; returns its number.
    fn forget(&mut self, vni: u32, range: IpNet) -> Option<u64> {
        let number = self.ranges.remove(&(vni, range))?;
        self.by_age.remove(&number);
        Some(number)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::net::IpAddr;

    use proptest::prelude::*;

    use super::*;

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    fn learned(connections: u64) -> Learned {
        let mut learned = Learned::default();
        (1..=connections).for_each(|connection| learned.begin(connection, "h".into()));
        learned
    }

    /// Everything that a change makes wrong: connections and ranges.
    fn taken(learned: &mut Learned, vni: u32, prefix: &str, most: usize) -> Vec<(Connection, IpNet)> {
        learned.change(vni, net(prefix));
        steps(learned, most).into_iter().flatten().map(|wrong| (wrong.connection, wrong.range)).collect()
    }

    /// What is wrong, step by step.
    fn steps(learned: &mut Learned, most: usize) -> Vec<Vec<Wrong>> {
        iter::from_fn(|| (!learned.is_corrected()).then(|| learned.take_wrong(most))).collect()
    }

    #[test]
    fn answers_about_a_prefix_are_found() {
        let mut learned = learned(1);
        for range in ["10.0.0.0/24", "10.0.1.1/32", "10.0.2.0/23", "10.1.0.0/16", "fd00::/64"] {
            assert_eq!(learned.give(1, 7, net(range)), []);
        }
        learned.give(1, 8, net("10.0.0.0/8"));
        let mut take = |vni, prefix| taken(&mut learned, vni, prefix, 100).into_iter().map(|(_, range)| range);
        assert!(take(7, "10.0.0.9/32").eq([net("10.0.0.0/24")]));
        assert!(take(7, "10.0.0.9/32").eq([]));
        assert!(take(7, "10.0.0.0/22").eq([net("10.0.1.1/32"), net("10.0.2.0/23")]));
        assert!(take(7, "10.1.0.0/16").eq([net("10.1.0.0/16")]));
        assert!(take(7, "::/0").eq([net("fd00::/64")]));
        assert!(take(8, "10.2.3.4/32").eq([net("10.0.0.0/8")]));
        assert_eq!((learned.len(), learned.holders.len()), (0, 0));
        // A narrower answer takes the place of the wider one as a whole, as on the host.
        learned.give(1, 7, net("10.0.0.0/8"));
        learned.give(1, 7, net("10.0.0.1/32"));
        assert_eq!(taken(&mut learned, 7, "10.0.0.0/8", 100), [(1, net("10.0.0.1/32"))]);
    }

    #[test]
    fn what_is_too_much_is_forgotten_oldest_first() {
        let mut learned = learned(2);
        let host = |n: u32| IpNet::from(IpAddr::from((0x0a00_0000 + n).to_be_bytes()));
        learned.give(2, 7, host(1));
        for n in 0..MOST as u32 {
            assert_eq!(learned.give(1, 7, host(n)), []);
        }
        learned.give(1, 7, host(0));
        assert_eq!(learned.give(1, 7, host(1 << 20)), [(7, host(1))]);
        assert_eq!((learned.len(), learned.holders.len()), (MOST + 1, MOST + 1));
        // An ended connection goes step by step.
        learned.end(1);
        assert_eq!((learned.len(), learned.holders.len()), (1, MOST + 1));
        let steps = steps(&mut learned, 1000).len();
        assert!((MOST / 1000..MOST / 1000 + 3).contains(&steps), "{steps}");
        assert_eq!((learned.holders.len(), learned.ended.len()), (1, 0));
    }

    #[test]
    fn what_is_answered_after_a_change_is_right() {
        let mut learned = learned(3);
        for connection in 1..=3 {
            learned.give(connection, 7, net("10.0.0.0/24"));
        }
        learned.change(7, net("10.0.0.5/32"));
        let first = learned.take_wrong(2);
        assert_eq!(first.iter().map(|wrong| wrong.connection).collect::<Vec<_>>(), [1, 2]);
        assert_eq!((first[0].range, first[0].changed), (net("10.0.0.0/24"), net("10.0.0.5/32")));
        // In the order of what follows from a step: the same range is given again, and another one.
        learned.give(1, 7, net("10.0.0.5/32"));
        learned.give(2, 7, net("10.0.0.0/24"));
        let rest: Vec<Wrong> = steps(&mut learned, 2).concat();
        assert_eq!(rest.iter().map(|wrong| wrong.connection).collect::<Vec<_>>(), [3]);
        assert_eq!(learned.len(), 2);
    }

    #[test]
    fn many_changes_of_what_nobody_has_are_done_in_steps() {
        let mut learned = learned(1);
        for n in 0..1000u32 {
            learned.change(7, IpNet::from(IpAddr::from((0x0a00_0000 + n).to_be_bytes())));
        }
        assert_eq!(steps(&mut learned, 100).len(), 10);
    }

    /// Something that happens to the answers.
    #[derive(Clone, Debug)]
    enum Event {
        Give(usize, IpNet),
        Change(IpNet),
        Step(usize),
        Restart(usize),
    }

    fn any_event() -> impl Strategy<Value = Event> {
        let any_range = || {
            let range = |(n, len): (u8, u8)| IpNet::new_assert(IpAddr::from([10, 0, 0, n]), len).trunc();
            (0u8..32, 27u8..=32).prop_map(range)
        };
        prop_oneof![
            5 => (0..3usize, any_range()).prop_map(|(agent, range)| Event::Give(agent, range)),
            3 => any_range().prop_map(Event::Change),
            2 => (1..5usize).prop_map(Event::Step),
            1 => (0..3usize).prop_map(Event::Restart),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        /// By looking at all answers of all connections: the same become wrong, in whatever steps.
        #[test]
        fn the_same_answers_are_found_as_by_looking_at_all(
            events in prop::collection::vec(any_event(), 0..60),
        ) {
            let overlap = |a: &IpNet, b: &IpNet| a.contains(b) || b.contains(a);
            let mut learned = learned(3);
            // A connection that begins has a number that no other one had.
            let (mut current, mut last) = ([1, 2, 3], 3);
            // What connections have, and the answers that are wrong and not taken yet.
            let (mut right, mut wrong) = (BTreeSet::new(), BTreeSet::new());
            let step = |learned: &mut Learned, wrong: &mut BTreeSet<(Connection, IpNet)>, most| {
                let taken = learned.take_wrong(most);
                for Wrong { connection, range, changed, .. } in &taken {
                    assert!(overlap(range, changed));
                    assert!(wrong.remove(&(*connection, *range)), "{connection} {range} is not wrong");
                }
                assert!(taken.len() <= most);
            };
            for event in events {
                match event {
                    Event::Give(agent, range) => {
                        let connection = current[agent];
                        learned.give(connection, 7, range);
                        let stays = |(of, known): &(Connection, IpNet)| *of != connection || !overlap(known, &range);
                        right.retain(stays);
                        wrong.retain(stays);
                        right.insert((connection, range));
                    }
                    Event::Change(prefix) => {
                        learned.change(7, prefix);
                        wrong.extend(right.extract_if(.., |(_, known)| overlap(known, &prefix)));
                    }
                    Event::Step(most) => step(&mut learned, &mut wrong, most),
                    Event::Restart(agent) => {
                        last += 1;
                        let connection = std::mem::replace(&mut current[agent], last);
                        learned.end(connection);
                        learned.begin(last, "h".into());
                        right.retain(|(of, _)| *of != connection);
                        wrong.retain(|(of, _)| *of != connection);
                    }
                }
                prop_assert_eq!(learned.len(), right.len() + wrong.len());
            }
            while !learned.is_corrected() {
                step(&mut learned, &mut wrong, 3);
            }
            prop_assert!(wrong.is_empty(), "{:?} were not found", wrong);
            prop_assert_eq!(learned.holders.len(), right.len(), "the index has what there is");
            for (connection, range) in right {
                prop_assert!(learned.connections[&connection].ranges.contains_key(&(7, range)));
            }
        }
    }
}
