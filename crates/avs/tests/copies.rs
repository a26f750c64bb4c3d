//! Copying of conversations from one switch to another while packets flow.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::collections::BTreeSet;

use bifrost_avs::{Copying, Switch};
use common::any::{SECOND, SYN};
use common::outside::*;
use proptest::prelude::*;

const ACK: u8 = 0x10;
const FIN: u8 = 0x11;
const RST: u8 = 0x04;
/// Layout of `Switch::carry_memory`: length of a section's header, and position of the mapping's number in the record
/// of a connection.
const HEAD: usize = 8;
const MAPPING: std::ops::Range<usize> = 54..58;

#[derive(Clone, Debug)]
enum Act {
    /// A guest sends to the outside: over TCP with these flags, or over UDP.
    Send {
        port: u16,
        to: u16,
        tcp: Option<u8>,
        is_v6: bool,
    },
    /// The other end of an earlier packet answers.
    Answer {
        packet: prop::sample::Index,
        tcp: u8,
    },
    Wait {
        s: u64,
    },
    /// A copying step.
    Copy {
        max: usize,
    },
}

fn act() -> impl Strategy<Value = Act> {
    let flags = prop_oneof![3 => Just(SYN), 3 => Just(ACK), 1 => Just(FIN), 1 => Just(RST)];
    prop_oneof![
        5 => (0u16..6, 0u16..3, proptest::option::of(flags.clone()), any::<bool>())
            .prop_map(|(port, to, tcp, is_v6)| Act::Send { port, to, tcp, is_v6 }),
        3 => (any::<prop::sample::Index>(), flags).prop_map(|(packet, tcp)| Act::Answer { packet, tcp }),
        1 => (1u64..400).prop_map(|s| Act::Wait { s }),
        2 => (1usize..6).prop_map(|max| Act::Copy { max }),
    ]
}

/// All conversations of a switch, sorted: mappings, and sessions and connections with their mappings.
fn remembered(switch: &mut Switch) -> (BTreeSet<Vec<u8>>, BTreeSet<Vec<u8>>) {
    let mut bytes = Vec::new();
    switch.carry_memory(&mut bytes);
    let (mut mappings, mut others, mut rest) = (Vec::new(), BTreeSet::new(), &bytes[..]);
    while let Some((head, behind)) = rest.split_first_chunk::<HEAD>() {
        let [kind, _, l0, l1, count @ ..] = *head;
        let len = usize::from(u16::from_le_bytes([l0, l1]));
        let (section, behind) = behind.split_at(u32::from_le_bytes(count) as usize * len);
        for record in section.chunks_exact(len) {
            match kind {
                1 => mappings.push(record.to_vec()),
                3 if record[49] == 1 => {
                    let number = u32::from_le_bytes(record[MAPPING].try_into().unwrap());
                    let mapping = mappings.get(number as usize).cloned().unwrap_or_default();
                    others.insert([&record[..MAPPING.start], &record[MAPPING.end..], &mapping].concat());
                }
                _ => {
                    others.insert(record.to_vec());
                }
            }
        }
        rest = behind;
    }
    (mappings.into_iter().collect(), others)
}

/// A switch, the time, and the packets that have left it.
struct World {
    switch: Switch,
    now_s: u64,
    /// Packets that have left, and whether they are TCP.
    sent: Vec<(Vec<u8>, bool)>,
}

impl World {
    fn new() -> World {
        World { switch: build(&world()), now_s: 1000, sent: Vec::new() }
    }

    fn act(&mut self, act: &Act) {
        match act {
            Act::Send { port, to, tcp, is_v6 } => {
                let (own, remote) = if *is_v6 { ("fd00::1", REMOTE6) } else { ("10.0.0.1", REMOTE) };
                let frame = from_guest((own, 5000 + port), (remote, 443 + to), *tcp);
                self.sent.extend(leaves(&mut self.switch, 0, &frame).map(|out| (out, tcp.is_some())));
            }
            Act::Answer { packet, tcp } if !self.sent.is_empty() => {
                let (out, is_tcp) = packet.get(&self.sent);
                let _ = comes(&mut self.switch, &answer_to(out, outside(), is_tcp.then_some(*tcp)));
            }
            Act::Wait { s } => {
                self.now_s += s;
                (0..3).for_each(|_| self.switch.advance(self.now_s * SECOND));
            }
            Act::Answer { .. } | Act::Copy { .. } => {}
        }
    }
}

/// One copying step: the old switch writes, the new one reads.
fn copy(from: &mut World, copying: &mut Copying, max: usize, to: &mut Switch) -> usize {
    let mut bytes = Vec::new();
    let left = from.switch.copy_some(copying, max, &mut bytes);
    copying.sort();
    to.take_over_copies(from.now_s * SECOND, &bytes).unwrap();
    left
}

/// Copies the rest, after the last packet. Returns the numbers of conversations taken over and left out.
fn finish(from: &mut World, to: &mut Switch) -> (u64, u64) {
    let mut rest = Vec::new();
    from.switch.copy_rest(&mut rest);
    let taken = to.take_over_memory(from.now_s * SECOND, &rest).unwrap();
    (taken.sessions, taken.left_out)
}

/// Ends all conversations by their timeouts.
fn end_all(switch: &mut Switch) {
    switch.advance(20_000 * SECOND);
    (20_001..20_400).for_each(|s| switch.advance(s * SECOND));
    assert_eq!((switch.connection_counters().current, switch.session_counters().current), (0, 0));
    assert_eq!(switch.nat_counters().current, 0);
}

proptest! {
    /// Whatever happens between the steps, the new switch ends up with exactly the conversations of the old one, and
    /// continues them.
    #[test]
    fn copies_with_the_last_changes_are_complete(
        before in proptest::collection::vec(act(), 0..60),
        during in proptest::collection::vec(act(), 0..120),
    ) {
        let mut first = World::new();
        before.iter().for_each(|act| first.act(act));
        let (mut second, mut copying) = (Switch::build(&world(), 2).unwrap(), first.switch.start_copying());
        for act in &during {
            match act {
                Act::Copy { max } => {
                    copy(&mut first, &mut copying, *max, &mut second);
                }
                act => first.act(act),
            }
        }
        let (taken, left_out) = finish(&mut first, &mut second);
        prop_assert_eq!(left_out, 0);
        prop_assert_eq!(remembered(&mut second), remembered(&mut first.switch));
        let (one, other) = (first.switch.connection_counters(), second.connection_counters());
        let sessions = (first.switch.session_counters(), second.session_counters());
        prop_assert_eq!(taken, one.current + sessions.0.current);
        prop_assert_eq!((other.current, other.established), (one.current, one.established));
        prop_assert_eq!((other.created, other.expired, other.evicted), (one.current, 0, 0));
        prop_assert_eq!((sessions.1.current, sessions.1.created), (sessions.0.current, sessions.0.current));
        prop_assert_eq!(second.nat_counters().created, first.switch.nat_counters().current);
        first.switch.stop_copying();
        // Both switches treat replies alike: outside addresses and ports, and the guests that replies reach.
        for (out, is_tcp) in first.sent.clone() {
            let answer = answer_to(&out, outside(), is_tcp.then_some(ACK));
            prop_assert_eq!(comes(&mut second, &answer).ok(), comes(&mut first.switch, &answer).ok());
        }
        end_all(&mut second);
        end_all(&mut first.switch);
    }

    /// Whatever is damaged or repeated: nothing panics, and all conversations expire.
    #[test]
    fn damaged_copies_do_no_harm(
        acts in proptest::collection::vec(act(), 20..80),
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), any::<u8>()), 1..12),
        twice in any::<prop::sample::Index>(),
    ) {
        let mut first = World::new();
        let (mut copying, mut steps) = (first.switch.start_copying(), Vec::new());
        for act in &acts {
            match act {
                Act::Copy { max } => {
                    let mut bytes = Vec::new();
                    first.switch.copy_some(&mut copying, *max, &mut bytes);
                    steps.push(bytes);
                }
                act => first.act(act),
            }
        }
        let mut rest = Vec::new();
        first.switch.copy_rest(&mut rest);
        steps.push(rest);
        for (step, at, to) in &changes {
            let step = step.get_mut(&mut steps);
            let at = at.index(step.len());
            step[at] = *to;
        }
        steps.insert(0, twice.get(&steps).clone());
        let last = steps.pop().unwrap();
        let mut second = Switch::build(&world(), 2).unwrap();
        for step in &steps {
            let _ = second.take_over_copies(first.now_s * SECOND, step);
        }
        let _ = second.take_over_memory(first.now_s * SECOND, &last);
        for port in 0..6 {
            let _ = leaves(&mut second, 0, &from_guest(("10.0.0.1", 5000 + port), (REMOTE, 443), Some(ACK)));
        }
        let (start, far) = (first.now_s, first.now_s + 20_000);
        (start..start + 400).chain(far..far + 400).for_each(|s| second.advance(s * SECOND));
        prop_assert_eq!((second.connection_counters().current, second.nat_counters().current), (0, 0));
    }
}

/// The steps come to an end, and then little is left for the time in which no packets flow.
#[test]
fn little_is_left_after_the_last_step() {
    let mut first = World::new();
    let connect = |world: &mut World, from: u16| {
        let frame = from_guest(("10.0.0.1", from), (REMOTE, 443), Some(SYN));
        leaves(&mut world.switch, 0, &frame).unwrap();
    };
    (0..400).for_each(|n| connect(&mut first, 5000 + n));
    let (mut second, mut copying) = (Switch::build(&world(), 2).unwrap(), first.switch.start_copying());
    let mut steps = 0;
    while copy(&mut first, &mut copying, 64, &mut second) > 0 {
        steps += 1;
        assert!(steps < 50);
    }
    (0..3).for_each(|n| connect(&mut first, 6000 + n));
    let (mut all, mut rest) = (Vec::new(), Vec::new());
    first.switch.carry_memory(&mut all);
    first.switch.copy_rest(&mut rest);
    assert!(rest.len() * 20 < all.len(), "{} of {} bytes", rest.len(), all.len());
    let taken = second.take_over_memory(1000 * SECOND, &rest).unwrap();
    assert_eq!((taken.sessions, taken.mappings, taken.left_out), (403, 403, 0));
    assert_eq!(remembered(&mut second), remembered(&mut first.switch));
}
