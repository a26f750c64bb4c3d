//! NAT mappings: the outside address and port of each inside end (RFC 4787, section 4.1).
//!
//! Mappings are endpoint-independent: an inside end has the same outside end towards all destinations. A mapping stays
//! while it has conversations, and for some time afterwards. No outside end belongs to two mappings.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::ops::RangeInclusive;

use bifrost_tables::{ExactMap, PortSet, exact_map, mix};
use bifrost_wire::protocol::{TCP, UDP};

use crate::changes::Changes;
use crate::ids::PortId;
use crate::rewrite::Endpoint;

/// Time that a mapping stays after its last conversation, s. Together with the timeout of the conversation, this gives
/// - TCP connections that are not established at least 4 min (RFC 5382, REQ-5),
/// - UDP at least 2 min (RFC 4787, REQ-5),
/// - ICMP at least 60 s (RFC 5508, REQ-2), for which the timeout of the session suffices.
const PATIENCE_S: [u32; 3] = [180, 120, 0];
/// Maximum number of mappings per class that one call checks for expiry.
const EXPIRIES: usize = 64;

/// An inside end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Inside {
    /// The guest's port.
    pub(crate) guest: PortId,
    pub(crate) protocol: u8,
    pub(crate) end: Endpoint,
}

/// An outside end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Outside {
    /// The port to the outside network.
    pub(crate) uplink: PortId,
    pub(crate) protocol: u8,
    pub(crate) end: Endpoint,
}

/// The two ends of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pair {
    pub(crate) inside: Inside,
    pub(crate) outside: Outside,
}

/// Counters of mappings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NatCounters {
    /// Current mappings.
    pub current: u64,
    /// Mappings ever created.
    pub created: u64,
    /// Mappings that have expired some time after their last conversation.
    pub expired: u64,
}

impl NatCounters {
    /// Every counter by name; names end in their unit.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
        [
            ("nat_current_mappings", self.current),
            ("nat_created_mappings", self.created),
            ("nat_expired_mappings", self.expired),
        ]
        .into_iter()
    }
}

/// All mappings.
#[derive(Debug)]
pub(crate) struct Mappings {
    slab: Vec<Mapping>,
    free: Vec<u32>,
    by_inside: ExactMap<Inside, u32>,
    by_outside: ExactMap<Outside, u32>,
    /// Used outside ports, by uplink, protocol and address.
    ports: ExactMap<(PortId, u8, IpAddr), PortSet>,
    /// Mappings that have been without conversations, by class (see [`PATIENCE_S`]), in the order of time. Some may
    /// have conversations again.
    idle: [VecDeque<u32>; 3],
    /// Number of mappings, indexed by the guest's port number.
    of_guest: Vec<u32>,
    pub(crate) counters: NatCounters,
    secret: u64,
    now_s: u32,
    /// Places that changed since they were copied for another process; `None`: nothing is being copied.
    changes: Option<Box<Changes>>,
}

#[derive(Clone, Copy, Debug)]
struct Mapping {
    pair: Pair,
    /// Number of conversations.
    sessions: u32,
    /// When the last conversation ended, s.
    idle_s: u32,
    /// When the mapping was added to `idle`, s; `None`: it is not in `idle`.
    queued_s: Option<u32>,
    /// The last configuration that is known to allow the mapping.
    epoch: u32,
}

impl Mappings {
    /// `secret`: any random number; it determines the addresses and ports of mappings.
    pub(crate) fn new(secret: u64) -> Self {
        Mappings {
            slab: Vec::new(),
            free: Vec::new(),
            by_inside: exact_map(secret),
            by_outside: exact_map(secret),
            ports: exact_map(secret),
            idle: Default::default(),
            of_guest: Vec::new(),
            counters: NatCounters::default(),
            secret,
            now_s: 0,
            changes: None,
        }
    }

    /// The mapping of an inside end.
    pub(crate) fn of_inside(&self, inside: &Inside) -> Option<u32> {
        self.by_inside.get(inside).copied()
    }

    /// The mapping of an outside end.
    pub(crate) fn of_outside(&self, outside: &Outside) -> Option<u32> {
        let mapping = *self.by_outside.get(outside)?;
        // A replaced mapping stays until its conversations end, but takes no new ones.
        (self.by_inside.get(&self.pair(mapping).inside) == Some(&mapping)).then_some(mapping)
    }

    /// The ends of a mapping.
    pub(crate) fn pair(&self, mapping: u32) -> &Pair {
        &self.slab[mapping as usize].pair
    }

    /// Number of mappings of a guest.
    pub(crate) fn of_guest(&self, guest: PortId) -> u32 {
        self.of_guest.get(guest.place()).copied().unwrap_or(0)
    }

    /// Number of ports in use at an outside address.
    pub(crate) fn used(&self, uplink: PortId, protocol: u8, address: IpAddr) -> u32 {
        self.ports.get(&(uplink, protocol, address)).map_or(0, PortSet::used)
    }

    /// Whether the configuration of `epoch` is known to allow a mapping.
    pub(crate) fn is_of(&self, mapping: u32, epoch: u32) -> bool {
        self.slab[mapping as usize].epoch == epoch
    }

    /// One of `addresses`, always the same for an inside address (RFC 4787, REQ-2).
    pub(crate) fn address(&self, inside: &Inside, addresses: &[IpAddr]) -> Option<IpAddr> {
        let hash = self.hash(inside, 0);
        addresses.get(((u128::from(hash) * addresses.len() as u128) >> 64) as usize).copied()
    }

    /// A free port of `address` for an inside end, from `block`, without ports for which `is_reserved` is true.
    pub(crate) fn free_port(
        &self,
        inside: &Inside,
        uplink: PortId,
        address: IpAddr,
        block: &RangeInclusive<u16>,
        is_reserved: impl Fn(u16) -> bool,
    ) -> Option<u16> {
        let Some(ports) = self.ports.get(&(uplink, inside.protocol, address)) else {
            return self.free_port_of(&PortSet::default(), inside, block, is_reserved);
        };
        self.free_port_of(ports, inside, block, is_reserved)
    }

    fn free_port_of(
        &self,
        ports: &PortSet,
        inside: &Inside,
        block: &RangeInclusive<u16>,
        is_reserved: impl Fn(u16) -> bool,
    ) -> Option<u16> {
        let like = inside.end.port;
        let count = u64::from(block.end().saturating_sub(*block.start())) + 1;
        let hash = self.hash(inside, u64::from(like) << 32 | u64::from(self.now_s));
        let start = block.start() + (hash % count) as u16;
        let port = ports.find_free(block, start, like)?;
        if !is_reserved(port) {
            return Some(port);
        }
        // Rare: few ports are reserved.
        let mut ports = ports.clone();
        block.clone().filter(|port| is_reserved(*port)).for_each(|port| {
            ports.take(port);
        });
        ports.find_free(block, start, like)
    }

    fn hash(&self, inside: &Inside, more: u64) -> u64 {
        let address = match inside.end.address {
            IpAddr::V4(a) => u128::from(u32::from(a)),
            IpAddr::V6(a) => u128::from(a),
        };
        let bits = mix(address as u64 ^ mix((address >> 64) as u64 ^ self.secret));
        mix(bits ^ u64::from(inside.guest.0) ^ mix(more ^ self.secret))
    }

    /// Counts a new conversation of an existing mapping.
    pub(crate) fn join(&mut self, mapping: u32, epoch: u32) {
        let mapping = &mut self.slab[mapping as usize];
        mapping.sessions += 1;
        mapping.epoch = epoch;
    }

    /// Creates a mapping with its first conversation. It replaces an earlier mapping of its inside end. `None`: the
    /// outside end is not free.
    pub(crate) fn begin(&mut self, pair: Pair, epoch: u32) -> Option<u32> {
        let index = self.begin_replaced(pair, epoch)?;
        self.by_inside.insert(pair.inside, index);
        Some(index)
    }

    /// Like [`begin`](Self::begin), for a mapping that has been replaced already: new conversations of its inside end
    /// do not use it.
    pub(crate) fn begin_replaced(&mut self, pair: Pair, epoch: u32) -> Option<u32> {
        let Pair { inside, outside } = pair;
        let ports = self.ports.entry((outside.uplink, outside.protocol, outside.end.address)).or_default();
        if !ports.take(outside.end.port) {
            return None;
        }
        let mapping = Mapping { pair, sessions: 1, idle_s: 0, queued_s: None, epoch };
        let index = match self.free.pop() {
            Some(index) => {
                self.slab[index as usize] = mapping;
                index
            }
            None => {
                self.slab.push(mapping);
                (self.slab.len() - 1) as u32
            }
        };
        self.mark_changed(index);
        self.by_outside.insert(outside, index);
        let place = inside.guest.place();
        if self.of_guest.len() <= place {
            self.of_guest.resize(place + 1, 0);
        }
        self.of_guest[place] += 1;
        self.counters.current += 1;
        self.counters.created += 1;
        Some(index)
    }

    /// Counts the end of a conversation of a mapping.
    pub(crate) fn leave(&mut self, index: u32) {
        let now_s = self.now_s;
        let Some(mapping) = self.slab.get_mut(index as usize) else { return };
        mapping.sessions = mapping.sessions.saturating_sub(1);
        if mapping.sessions > 0 {
            return;
        }
        mapping.idle_s = now_s;
        if mapping.queued_s.is_none() {
            mapping.queued_s = Some(now_s);
            let class = class(mapping.pair.inside.protocol);
            self.idle[class].push_back(index);
        }
    }

    /// Called when a port's number means another guest: the mappings of the former guest take no new conversations.
    pub(crate) fn forget_guest(&mut self, guest: PortId) {
        if self.of_guest(guest) > 0 {
            self.by_inside.retain(|inside, _| inside.guest != guest);
        }
    }

    /// All mappings with their indexes. Replaced mappings come first, so that those in force replace them again when
    /// they are taken over.
    pub(crate) fn carried(&self) -> Vec<(u32, Pair)> {
        let mut all: Vec<(u32, Pair)> = self.by_outside.values().map(|&index| (index, *self.pair(index))).collect();
        all.sort_by_key(|(index, pair)| (self.by_inside.get(&pair.inside) == Some(index), *index));
        all
    }

    /// From now on, records which places change, for copies in another process. All places count as changed.
    pub(crate) fn start_copying(&mut self) {
        self.changes = Some(Box::new(Changes::of_all(self.slab.len() as u32)));
    }

    /// No longer records changes.
    pub(crate) fn stop_copying(&mut self) {
        self.changes = None;
    }

    /// The places whose copies must be discarded.
    pub(crate) fn take_outdated(&mut self) -> Vec<u32> {
        self.changes.as_mut().map(|changes| changes.take_outdated()).unwrap_or_default()
    }

    /// The number of changed places.
    pub(crate) fn changes_left(&self) -> usize {
        self.changes.as_ref().map_or(0, |changes| changes.left())
    }

    /// Copies at most `max` changed places, except those without a mapping. The flag tells whether the mapping is in
    /// force; otherwise another one has replaced it, and it only stays for its conversations.
    pub(crate) fn copy(&mut self, max: usize) -> Vec<(u32, Pair, bool)> {
        let mut copied = Vec::new();
        let Some(changes) = &mut self.changes else { return copied };
        let places: Vec<u32> = changes.changed().take(max).collect();
        for place in places {
            let pair = self.slab[place as usize].pair;
            if self.by_outside.get(&pair.outside) == Some(&place) {
                changes.copied(place);
                copied.push((place, pair, self.by_inside.get(&pair.inside) == Some(&place)));
            } else {
                changes.skip(place);
            }
        }
        copied
    }

    /// Resets the counters, so that only the current mappings count as created.
    pub(crate) fn restart_counters(&mut self) {
        let current = self.counters.current;
        self.counters = NatCounters { current, created: current, expired: 0 };
    }

    /// Ends a mapping that another process has ended. Returns false if conversations hold it.
    pub(crate) fn withdraw(&mut self, index: u32) -> bool {
        // The copy itself counts as one conversation.
        let is_free = self.slab.get(index as usize).is_some_and(|mapping| mapping.sessions <= 1);
        if is_free {
            self.end(index);
        }
        is_free
    }

    fn mark_changed(&mut self, index: u32) {
        if let Some(changes) = &mut self.changes {
            changes.mark(index);
        }
    }

    /// Advances the time to `now_s`, and expires mappings without conversations, at most [`EXPIRIES`] of a class per
    /// call.
    pub(crate) fn advance(&mut self, now_s: u32) {
        self.now_s = self.now_s.max(now_s);
        if self.counters.current == 0 {
            return;
        }
        for (class, patience_s) in PATIENCE_S.into_iter().enumerate() {
            for _ in 0..EXPIRIES {
                let Some(&index) = self.idle[class].front() else { break };
                let mapping = &mut self.slab[index as usize];
                if mapping.queued_s.is_some_and(|at_s| at_s + patience_s > self.now_s) {
                    break;
                }
                self.idle[class].pop_front();
                mapping.queued_s = None;
                if mapping.sessions > 0 {
                    continue;
                }
                if mapping.idle_s + patience_s > self.now_s {
                    mapping.queued_s = Some(mapping.idle_s);
                    self.idle[class].push_back(index);
                } else {
                    self.end(index);
                }
            }
        }
    }

    fn end(&mut self, index: u32) {
        self.mark_changed(index);
        let Pair { inside, outside } = self.slab[index as usize].pair;
        if self.by_inside.get(&inside) == Some(&index) {
            self.by_inside.remove(&inside);
        }
        self.by_outside.remove(&outside);
        let place = (outside.uplink, outside.protocol, outside.end.address);
        if let Some(ports) = self.ports.get_mut(&place) {
            ports.give_back(outside.end.port);
            if ports.used() == 0 {
                self.ports.remove(&place);
            }
        }
        if let Some(count) = self.of_guest.get_mut(inside.guest.place()) {
            *count = count.saturating_sub(1);
        }
        self.free.push(index);
        self.counters.current -= 1;
        self.counters.expired += 1;
    }
}

fn class(protocol: u8) -> usize {
    match protocol {
        TCP => 0,
        UDP => 1,
        _ => 2,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    const UPLINK: PortId = PortId(9);
    const BLOCK: RangeInclusive<u16> = 2000..=2007;

    fn inside(guest: u32, port: u16, protocol: u8) -> Inside {
        Inside { guest: PortId(guest), protocol, end: Endpoint { address: IpAddr::from([10, 0, 0, 1]), port } }
    }

    fn address() -> IpAddr {
        IpAddr::from([203, 0, 113, 1])
    }

    fn begin(mappings: &mut Mappings, inside: Inside) -> Option<(u32, u16)> {
        let port = mappings.free_port(&inside, UPLINK, address(), &BLOCK, |port| port == 2003)?;
        let end = Endpoint { address: address(), port };
        let outside = Outside { uplink: UPLINK, protocol: inside.protocol, end };
        mappings.begin(Pair { inside, outside }, 0).map(|index| (index, port))
    }

    #[test]
    fn a_mapping_stays_for_a_while_after_its_last_conversation() {
        for (protocol, patience_s) in [(TCP, 180), (UDP, 120), (1, 0)] {
            let mut mappings = Mappings::new(1);
            mappings.advance(1000);
            let (index, _) = begin(&mut mappings, inside(1, 7, protocol)).unwrap();
            mappings.join(index, 0);
            mappings.leave(index);
            mappings.advance(5000);
            assert_eq!(mappings.counters.current, 1, "a conversation is left");
            mappings.leave(index);
            if patience_s > 0 {
                mappings.advance(5000 + patience_s - 1);
                assert_eq!(mappings.of_inside(&inside(1, 7, protocol)), Some(index));
            }
            // A new conversation at the last moment restarts the time.
            mappings.join(index, 0);
            mappings.advance(6000);
            mappings.leave(index);
            mappings.advance(6000 + patience_s);
            assert_eq!((mappings.counters.current, mappings.counters.expired), (0, 1));
            assert_eq!(mappings.of_inside(&inside(1, 7, protocol)), None);
        }
    }

    #[derive(Clone, Debug)]
    enum Act {
        Begin { guest: u32, port: u16, udp: bool },
        Leave(usize),
        Wait(u32),
    }

    fn act() -> impl Strategy<Value = Act> {
        prop_oneof![
            4 => (0u32..3, 0u16..12, any::<bool>()).prop_map(|(guest, port, udp)| Act::Begin { guest, port, udp }),
            2 => any::<usize>().prop_map(Act::Leave),
            1 => (0u32..100).prop_map(Act::Wait),
        ]
    }

    proptest! {
        /// Compares random operations with a model. No port has two mappings; none is reserved or outside the block.
        /// All conversations of an inside end have the same mapping. A mapping is refused only if no port is free.
        /// Ports of expired mappings become free.
        #[test]
        fn no_outside_port_is_assigned_twice(acts in proptest::collection::vec(act(), 1..200)) {
            let mut mappings = Mappings::new(3);
            let mut now_s = 0;
            // By inside end: its outside port, its number of conversations, and when the last one ended.
            let mut model: BTreeMap<(u32, u16, u8), (u16, u32, u32)> = BTreeMap::new();
            let mut conversations: Vec<((u32, u16, u8), u32)> = Vec::new();
            for act in acts {
                match act {
                    Act::Begin { guest, port, udp } => {
                        let protocol = if udp { UDP } else { TCP };
                        let (name, end) = ((guest, port, protocol), inside(guest, port, protocol));
                        if let Some(index) = mappings.of_inside(&end) {
                            mappings.join(index, 0);
                            let known = model.get_mut(&name).unwrap();
                            prop_assert_eq!(mappings.pair(index).outside.end.port, known.0);
                            known.1 += 1;
                            conversations.push((name, index));
                            continue;
                        }
                        prop_assert!(!model.contains_key(&name));
                        let used: BTreeSet<u16> = model.iter().filter(|(n, _)| n.2 == protocol).map(|(_, m)| m.0).collect();
                        match begin(&mut mappings, end) {
                            Some((index, port)) => {
                                prop_assert!(BLOCK.contains(&port) && port != 2003 && !used.contains(&port));
                                model.insert(name, (port, 1, 0));
                                conversations.push((name, index));
                            }
                            None => prop_assert_eq!(used.len(), 7),
                        }
                    }
                    Act::Leave(at) if !conversations.is_empty() => {
                        let (name, index) = conversations.swap_remove(at % conversations.len());
                        mappings.leave(index);
                        let known = model.get_mut(&name).unwrap();
                        known.1 -= 1;
                        known.2 = now_s;
                    }
                    Act::Leave(_) => {}
                    Act::Wait(seconds) => {
                        now_s += seconds;
                        mappings.advance(now_s);
                    }
                }
                // A mapping may stay longer than necessary, but no more than twice as long.
                model.retain(|&(guest, port, protocol), &mut (_, count, idle_s)| {
                    let patience_s = PATIENCE_S[class(protocol)];
                    let is_there = mappings.of_inside(&inside(guest, port, protocol)).is_some();
                    let must = count > 0 || idle_s + patience_s > now_s;
                    let must_not = count == 0 && idle_s + 2 * patience_s < mappings.now_s;
                    assert!(is_there || !must, "{guest} {port} {protocol} is gone too early");
                    assert!(!is_there || !must_not, "{guest} {port} {protocol} stays");
                    is_there
                });
                prop_assert_eq!(mappings.counters.current as usize, model.len());
                let of_guest: u32 = (0..3).map(|guest| mappings.of_guest(PortId(guest))).sum();
                prop_assert_eq!(of_guest as usize, model.len());
                let used = [TCP, UDP].map(|protocol| mappings.used(UPLINK, protocol, address()));
                prop_assert_eq!(used.iter().sum::<u32>() as usize, model.len());
            }
        }
    }
}
