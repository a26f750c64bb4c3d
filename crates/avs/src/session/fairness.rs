//! Tests of eviction: scenarios with one attacker each, and random packets against a slow model.

use std::collections::BTreeMap;

use bifrost_nic::parse;
use bifrost_wire::tcp::Flags;

use super::*;
use crate::ids::{Direction, PortId};
use crate::limits::SessionLimits;

const S: u64 = 1 << 30;
const SYN_ACK: Flags = Flags::SYN.with(Flags::ACK);
const FIN: Flags = Flags::FIN.with(Flags::ACK);

/// A conversation of port `vnic`'s guest with a remote host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Conversation {
    vnic: u32,
    origin: Origin,
    remote: u32,
    port: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Origin {
    Guest,
    Remote,
}

impl Conversation {
    fn key(self) -> Key {
        let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0];
        frame.extend([0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0]);
        frame.extend(self.remote.to_be_bytes().into_iter().chain([10, 0, 0, 1]));
        frame.extend(self.port.to_be_bytes());
        frame.extend([0, self.origin as u8, 0, 8, 0, 0]);
        Key::of(PortId(self.vnic), Direction::Ingress, &frame, &parse(&frame, frame.len()).unwrap())
    }

    /// The direction of its first packet.
    fn direction(self) -> Direction {
        if self.origin == Origin::Guest { Direction::Egress } else { Direction::Ingress }
    }
}

/// Packets of a conversation: whether the originator sends, the event, and seconds since the previous packet.
type Script = &'static [(bool, Event, u64)];
const ASK: Script = &[(true, Event::Datagram, 0)];
const EXCHANGE: Script = &[(true, Event::Datagram, 0), (false, Event::Datagram, 0)];
const HALF_OPEN: Script = &[(true, Event::Tcp(Flags::SYN), 0), (false, Event::Tcp(SYN_ACK), 0)];
const CONNECT: Script =
    &[(true, Event::Tcp(Flags::SYN), 0), (false, Event::Tcp(SYN_ACK), 0), (true, Event::Tcp(Flags::ACK), 0)];
const HALF_CLOSE: Script = &[
    (true, Event::Tcp(Flags::SYN), 0),
    (false, Event::Tcp(SYN_ACK), 0),
    (true, Event::Tcp(Flags::ACK), 0),
    (false, Event::Tcp(FIN), 0),
];
const RESET: Script = &[(true, Event::Tcp(Flags::SYN), 0), (false, Event::Tcp(Flags::RST), 0)];

struct World {
    sessions: Sessions,
    now_s: u64,
}

impl World {
    fn new(total: u32, per_port: u32) -> Self {
        let mut world = World { sessions: Sessions::new(SessionLimits { total, per_port }, 7), now_s: 1000 };
        world.wait(0);
        world
    }

    fn wait(&mut self, seconds: u64) {
        self.now_s += seconds;
        self.sessions.advance(self.now_s * S);
    }

    /// Updates or inserts the session of a packet that the rules allow.
    fn packet(&mut self, conversation: Conversation, by_originator: bool, event: Event) {
        let first = conversation.direction();
        let other = if first == Direction::Egress { Direction::Ingress } else { Direction::Egress };
        let direction = if by_originator { first } else { other };
        match self.sessions.find(&conversation.key()) {
            Some(index) => self.sessions.touch(index, direction, event, 0),
            None => self.sessions.insert(conversation.key(), direction, event, 0, false).unwrap(),
        }
    }

    fn play(&mut self, conversation: Conversation, script: Script) {
        for &(by_originator, event, after_s) in script {
            self.wait(after_s);
            self.packet(conversation, by_originator, event);
        }
    }

    fn has(&self, conversation: Conversation) -> bool {
        self.sessions.find(&conversation.key()).is_some()
    }

    fn count(&self, conversations: &[Conversation]) -> usize {
        conversations.iter().filter(|conversation| self.has(**conversation)).count()
    }
}

fn conversations(vnic: u32, origin: Origin, remotes: &[u32], count: usize) -> Vec<Conversation> {
    let each =
        |n: usize| Conversation { vnic, origin, remote: remotes[n % remotes.len()], port: (n / remotes.len()) as u16 };
    (0..count).map(each).collect()
}

/// `count` hosts from 10.1.0.0 on, as behind a gateway.
fn many(count: u32) -> Vec<u32> {
    (0..count).map(|n| 0x0a01_0000 + n).collect()
}

const ROOM: u32 = 1024;
/// A limit at which there are many more sessions outside the guarantees than lists of sources. Otherwise chance decides
/// whose list is the longest.
const LARGE: u32 = 16 * ROOM;

#[test]
fn a_flood_of_lower_class_neither_evicts_established_connections_nor_blocks_new_ones() {
    for (name, script) in [
        ("questions", ASK),
        ("exchanges", EXCHANGE),
        ("half-open connections", HALF_OPEN),
        ("connections half-closed by the guest, whose client vanished", HALF_CLOSE),
        ("connections that are refused", RESET),
    ] {
        for remotes in [many(1), many(500)] {
            for (origin, other) in [(Origin::Remote, Origin::Guest), (Origin::Guest, Origin::Remote)] {
                let mut world = World::new(1 << 20, LARGE);
                // All that is not guaranteed to others: these have 8 classes with a 64th each.
                let honest = conversations(0, other, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], LARGE as usize * 7 / 16);
                let same = conversations(0, origin, &[11, 12, 13, 14, 15, 16, 17, 18, 19, 20], LARGE as usize * 7 / 16);
                for conversation in honest.iter().chain(&same) {
                    world.play(*conversation, CONNECT);
                }
                for flood in conversations(0, origin, &remotes, 2 * LARGE as usize) {
                    world.play(flood, script);
                }
                assert_eq!(world.sessions.of_port(PortId(0)).current, LARGE, "{name}: the bound");
                assert_eq!((world.count(&honest), world.count(&same)), (honest.len(), same.len()), "{name}");
                // A connection of another source has time for its handshake, in both directions.
                for origin in [Origin::Guest, Origin::Remote] {
                    let new = Conversation { vnic: 0, origin, remote: 99, port: 1 };
                    world.packet(new, true, Event::Tcp(Flags::SYN));
                    for flood in conversations(0, Origin::Remote, &remotes, 100) {
                        world.play(Conversation { port: flood.port + 10_000, ..flood }, script);
                    }
                    assert!(world.has(new), "{name}: {origin:?} begins");
                    world.packet(new, false, Event::Tcp(SYN_ACK));
                    world.packet(new, true, Event::Tcp(Flags::ACK));
                }
            }
        }
    }
}

#[test]
fn a_source_with_the_most_connections_evicts_its_own() {
    for origin in [Origin::Guest, Origin::Remote] {
        let mut world = World::new(1 << 20, ROOM);
        let honest = conversations(0, origin, &many(20), 100);
        honest.iter().for_each(|conversation| world.play(*conversation, CONNECT));
        // The attacker's connections are newer than the honest ones.
        world.wait(60);
        for flood in conversations(0, origin, &[1], 20 * ROOM as usize) {
            world.play(flood, CONNECT);
        }
        assert_eq!(world.count(&honest), honest.len(), "{origin:?}");
        // New connections of other sources evict the attacker's, up to an equal share.
        let more = conversations(0, origin, &many(8).map_all(1 << 20), ROOM as usize / 4);
        more.iter().for_each(|conversation| world.play(*conversation, CONNECT));
        assert_eq!((world.count(&honest), world.count(&more)), (honest.len(), more.len()), "{origin:?}");
    }
}

trait MapAll {
    fn map_all(self, by: u32) -> Self;
}

impl MapAll for Vec<u32> {
    fn map_all(mut self, by: u32) -> Self {
        self.iter_mut().for_each(|remote| *remote += by);
        self
    }
}

#[test]
fn neither_direction_evicts_the_guarantee_of_the_other() {
    for (flood, other) in [(Origin::Remote, Origin::Guest), (Origin::Guest, Origin::Remote)] {
        let mut world = World::new(1 << 20, ROOM);
        let share = ROOM as usize / 8;
        // From many sources, so that none has more than its share.
        for conversation in conversations(0, flood, &many(500), 4 * ROOM as usize) {
            world.play(conversation, CONNECT);
        }
        let established = conversations(0, other, &[1, 2, 3], share);
        established.iter().for_each(|conversation| world.play(*conversation, CONNECT));
        let begun = conversations(0, other, &[4], ROOM as usize / 64);
        begun.iter().for_each(|conversation| world.play(*conversation, &CONNECT[..1]));
        for conversation in conversations(0, flood, &many(500).map_all(1 << 20), 4 * ROOM as usize) {
            world.play(conversation, CONNECT);
        }
        assert_eq!((world.count(&established), world.count(&begun)), (established.len(), begun.len()), "{other:?}");
    }
}

#[test]
fn no_port_evicts_sessions_of_a_port_within_its_share() {
    let mut world = World::new(4 * ROOM, ROOM);
    let modest = conversations(0, Origin::Guest, &[1, 2], ROOM as usize / 2);
    modest.iter().for_each(|conversation| world.play(*conversation, ASK));
    for vnic in 1..8 {
        for conversation in conversations(vnic, Origin::Remote, &many(100), 2 * ROOM as usize) {
            world.play(conversation, CONNECT);
        }
    }
    assert_eq!(world.sessions.counters().current, u64::from(4 * ROOM));
    assert_eq!(world.count(&modest), modest.len(), "one question each, and of less value than all others");
    for vnic in 1..8 {
        assert_eq!(world.sessions.of_port(PortId(vnic)).current, ROOM / 2, "an equal share for each");
    }
}

#[test]
fn connections_with_vanished_remote_ends_are_evicted_before_active_ones() {
    let mut world = World::new(1 << 20, ROOM);
    let active = conversations(0, Origin::Remote, &[1], 100);
    active.iter().for_each(|conversation| world.play(*conversation, CONNECT));
    for round in 1..11 {
        // From the same source: a gateway of many hosts.
        for conversation in conversations(0, Origin::Remote, &[1], ROOM as usize / 2) {
            let vanished = Conversation { port: conversation.port + 1000 * round, ..conversation };
            world.play(vanished, CONNECT);
            // The guest keeps sending to it.
            world.packet(vanished, false, Event::Tcp(Flags::ACK));
        }
        world.wait(17);
        active.iter().for_each(|conversation| world.packet(*conversation, true, Event::Tcp(Flags::ACK)));
    }
    assert_eq!(world.count(&active), active.len());
}

#[test]
fn a_prefix_of_64_bits_is_one_source() {
    let source = |address: &str| {
        let address: std::net::Ipv6Addr = address.parse().unwrap();
        let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 0x86, 0xdd, 0x60, 0, 0, 0, 0, 8, 17, 64];
        frame.extend(address.octets().into_iter().chain([0xfd; 16]));
        frame.extend([0, 7, 0, 9, 0, 8, 0, 0]);
        Key::of(PortId(0), Direction::Ingress, &frame, &parse(&frame, frame.len()).unwrap()).source()
    };
    assert_eq!(source("2001:db8:0:1::1"), source("2001:db8:0:1:ffff::2"));
    assert_ne!(source("2001:db8:0:1::1"), source("2001:db8:0:2::1"));
    assert_ne!(source("fe80::1"), source("fe80::2"), "each of another host");
    let v4 = |remote| Conversation { vnic: 0, origin: Origin::Remote, remote, port: 1 }.key().source();
    assert_ne!(v4(1), v4(2));
}

/// A session in the model.
#[derive(Clone, Copy, Debug)]
struct Known {
    class: Class,
    source: u8,
    /// Sequence number of its last move to the end of a list.
    queued: u64,
    /// Number of the 16-second period in which the remote end was last heard.
    heard: u64,
}

/// Applies the rules of eviction to the list of all sessions.
fn model_victim(
    known: &BTreeMap<Conversation, Known>,
    giver: u32,
    newcomer: Option<(Origin, u8)>,
) -> Option<Conversation> {
    let of_port: Vec<_> = known.iter().filter(|(conversation, _)| conversation.vnic == giver).collect();
    let total = of_port.len();
    let oldest = |list: Vec<&(&Conversation, &Known)>| *list.iter().min_by_key(|(_, known)| known.queued).unwrap().0;
    let guarantee = |class, of: usize| of / if class == Class::Established { 8 } else { 64 };
    if let Some((origin, source)) = newcomer {
        let own: Vec<_> = of_port.iter().filter(|(c, known)| c.origin == origin && known.source == source).collect();
        if own.len() > total / 8 {
            for class in Class::ALL {
                let list: Vec<_> = own.iter().copied().filter(|(_, known)| known.class == class).collect();
                if list.len() > guarantee(class, own.len()) {
                    return Some(oldest(list));
                }
            }
        }
    }
    for class in Class::ALL {
        let of = |origin| of_port.iter().filter(|(c, k)| c.origin == origin && k.class == class).count();
        let larger = if of(Origin::Remote) > of(Origin::Guest) { Origin::Remote } else { Origin::Guest };
        let own = newcomer.map(|(origin, _)| origin).filter(|_| class == Class::Established);
        let first = own.unwrap_or(larger);
        let second = if first == Origin::Guest { Origin::Remote } else { Origin::Guest };
        for origin in [first, second] {
            let list: Vec<_> = of_port.iter().filter(|(c, k)| c.origin == origin && k.class == class).collect();
            if list.len() > guarantee(class, total) {
                let of_source = |source| list.iter().filter(|(_, k)| k.source == source).count();
                let longest = (0..128).max_by_key(|source| (of_source(*source), 128 - *source)).unwrap();
                return Some(oldest(list.into_iter().filter(|(_, k)| k.source == longest).collect()));
            }
        }
    }
    None
}

/// Random packets at the limits: the table evicts the session that the model names.
#[test]
fn evictions_agree_with_a_slow_model() {
    let (mut by_port, mut by_all) = (0, 0);
    for seed in 0..if cfg!(miri) { 1 } else { 12 } {
        let mut rng = fastrand::Rng::with_seed(seed);
        let (total, per_port) = (rng.u32(100..600), rng.u32(16..400));
        let mut world = World::new(total, per_port);
        let mut known: BTreeMap<Conversation, Known> = BTreeMap::new();
        let mut queued = 0;
        let remotes = rng.u32(1..200);
        for _ in 0..if cfg!(miri) { 300 } else { 6000 } {
            if rng.u8(..) == 0 {
                world.wait(rng.u64(0..20));
                known.retain(|conversation, _| world.has(*conversation));
            }
            let conversation = Conversation {
                vnic: rng.u32(0..3) * rng.u32(0..2),
                origin: if rng.u8(0..3) == 0 { Origin::Guest } else { Origin::Remote },
                // One remote host has many more sessions than the others.
                remote: rng.u32(0..remotes) * u32::from(rng.bool()),
                port: rng.u16(0..300),
            };
            let key = conversation.key();
            let there = known.contains_key(&conversation);
            assert_eq!(there, world.has(conversation));
            let evicted = world.sessions.counters().evicted;
            let mut victim = None;
            let source = world.sessions.source(&key);
            let of = |vnic| known.keys().filter(|c| c.vnic == vnic).count();
            let own = of(conversation.vnic);
            if !there {
                let newcomer = Some((conversation.origin, source));
                if own >= per_port as usize {
                    victim = model_victim(&known, conversation.vnic, newcomer);
                    by_port += 1;
                } else if known.len() >= total as usize {
                    // Several ports may have the most sessions; any of them may lose one.
                    let most = (0..3).map(of).max().unwrap();
                    let of_all = (0..3).filter(|vnic| of(*vnic) == most && most > own);
                    let victims: Vec<_> = of_all.filter_map(|vnic| model_victim(&known, vnic, None)).collect();
                    victim = match *victims {
                        [] => model_victim(&known, conversation.vnic, newcomer),
                        _ => victims.iter().copied().find(|_| true),
                    };
                    by_all += 1;
                    if victims.len() > 1 {
                        // Find out which one the table evicts.
                        let mut plan = Planned::NOTHING;
                        world.sessions.plan_insert(&key, conversation.direction(), &mut plan).unwrap();
                        victim = victims.into_iter().find(|v| world.sessions.find_after(&v.key(), &plan).is_none());
                    }
                }
            }
            let script: Script = [ASK, EXCHANGE, HALF_OPEN, CONNECT, HALF_CLOSE, RESET][rng.usize(0..6)];
            let packets = if there { vec![*rng.choice(script).unwrap()] } else { script.to_vec() };
            for (number, (by_originator, event, _)) in packets.into_iter().enumerate() {
                world.packet(conversation, by_originator, event);
                if number == 0 && !there {
                    queued += 1;
                    if let Some(victim) = victim {
                        assert!(known.remove(&victim).is_some() && !world.has(victim), "{victim:?} goes");
                    }
                    let class = Class::Unanswered;
                    known.insert(conversation, Known { class, source, queued, heard: world.now_s / 16 });
                }
                let index = world.sessions.find(&key).unwrap();
                let known = known.get_mut(&conversation).unwrap();
                let class = world.sessions.standing(index).0.class();
                if class != known.class {
                    queued += 1;
                    (known.class, known.queued) = (class, queued);
                }
                let is_ingress = by_originator == (conversation.origin == Origin::Remote);
                if is_ingress && known.heard != world.now_s / 16 {
                    queued += 1;
                    (known.heard, known.queued) = (world.now_s / 16, queued);
                }
            }
            assert_eq!(world.sessions.counters().evicted - evicted, u64::from(victim.is_some()));
            assert_eq!(world.sessions.counters().current, known.len() as u64);
            assert!(known.len() <= total as usize && of_port(&known, conversation.vnic) <= per_port as usize);
        }
    }
    assert!(cfg!(miri) || (by_port > 1000 && by_all > 1000), "{by_port} {by_all}");
}

fn of_port(known: &BTreeMap<Conversation, Known>, vnic: u32) -> usize {
    known.keys().filter(|conversation| conversation.vnic == vnic).count()
}
