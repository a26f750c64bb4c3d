use bifrost_nic::Offload;
use bifrost_port::TxHandle;
use bifrost_rte::{Destination, Ordering, PeerId};
use proptest::prelude::*;

use super::*;

const SMALL: u32 = 2000;
const MS: u64 = 1_000_000;
const NORMAL: Band = Band::Normal;

fn to(n: u8) -> Departure {
    let (local, remote) = (Mac([2, 0, 0, 0, 0, 0]), Mac([2, 0, 0, 0, 1, n]));
    let to = Destination { vni: 100, owner: 0, local, remote, peer: PeerId(0), ordering: Ordering::Flow };
    Departure { vni: 100, peer: 0, reliably: Some(to) }
}

fn frame(handle: u32, len: u32) -> TxFrame {
    TxFrame { handle: TxHandle(handle), len, offload: Offload::default() }
}

fn room(packets: u32) -> Room {
    Room { small_bytes: SMALL, packets, large: packets }
}

fn destination(departure: &Departure) -> u8 {
    departure.reliably.expect("reliable").remote.0[5]
}

/// Handles in the order in which they leave, when all windows are open.
fn drain(waiting: &mut Waiting) -> Vec<u32> {
    let mut all = Vec::new();
    while let Some((band, frame, _)) = waiting.front(&Closed::default()) {
        all.push(frame.handle.0);
        waiting.pop(Time(0), band, much());
    }
    all
}

#[derive(Clone, Debug)]
enum Step {
    /// Destination, length, and number of free buffers.
    Push(u8, u32, u32),
    Pop,
    Rotate,
    Take(u8),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..6u8, prop_oneof![Just(100u32), Just(60_000)], 0..12u32).prop_map(|(n, len, free)| Step::Push(n, len, free)),
        3 => Just(Step::Pop),
        2 => Just(Step::Rotate),
        1 => (0..6u8).prop_map(Step::Take),
    ]
}

proptest! {
    /// Against one plain list of everything that waits.
    #[test]
    fn each_destination_has_a_queue_of_its_own_in_order(steps in prop::collection::vec(step(), 1..200)) {
        let (mut waiting, mut all, mut handle) = (Waiting::default(), Vec::<(u8, u32, u32)>::new(), 0);
        let mut company = false;
        for (now, step) in (0..).zip(steps) {
            match step {
                Step::Push(n, len, free) => {
                    handle += 1;
                    let same = all.iter().filter(|w| w.0 == n);
                    let large = same.clone().filter(|w| w.2 > SMALL).count() as u32;
                    let count = same.count() as u32;
                    company |= all.iter().any(|w| w.0 != n);
                    let fits = count == 0 || !company || count < free && (len <= SMALL || large < free);
                    let pushed = waiting.push(Time(now), frame(handle, len), (to(n), NORMAL), room(free));
                    prop_assert_eq!(pushed.is_ok(), fits);
                    if fits {
                        all.push((n, handle, len));
                    }
                }
                Step::Pop => {
                    let front = waiting.front(&Closed::default()).map(|(_, frame, to)| (destination(&to), frame.handle.0));
                    prop_assert_eq!(front.is_none(), all.is_empty());
                    if let Some((n, handle)) = front {
                        let first = all.iter().position(|w| w.0 == n).expect("it waits");
                        prop_assert_eq!(all.remove(first).1, handle);
                        waiting.pop(Time(0), NORMAL, much());
                    }
                }
                Step::Rotate => waiting.skip(NORMAL, &mut Closed::default()),
                Step::Take(n) => {
                    let mut taken = Vec::new();
                    waiting.take(|to| destination(to) == n, |frame| taken.push(frame.handle.0));
                    let expected: Vec<u32> = all.iter().filter(|w| w.0 == n).map(|w| w.1).collect();
                    prop_assert_eq!(taken, expected);
                    all.retain(|w| w.0 != n);
                }
            }
            let mut destinations: Vec<u8> = all.iter().map(|w| w.0).collect();
            destinations.sort_unstable();
            destinations.dedup();
            prop_assert_eq!(waiting.packets(), all.len());
            prop_assert_eq!(waiting.destinations(), destinations.len());
            prop_assert!((0..6).all(|n| waiting.has(&to(n)) == destinations.contains(&n)));
        }
        let mut left = drain(&mut waiting);
        left.sort_unstable();
        prop_assert_eq!(left, { let mut l: Vec<u32> = all.iter().map(|w| w.1).collect(); l.sort_unstable(); l });
    }
}

#[test]
fn destinations_take_turns_by_bytes() {
    let mut waiting = Waiting::default();
    for i in 0..4 {
        waiting.push(Time(0), frame(i, 60_000), (to(1), NORMAL), room(1000)).expect("room");
    }
    for i in 100..300 {
        waiting.push(Time(0), frame(i, 1000), (to(2), NORMAL), room(1000)).expect("room");
    }
    let order = drain(&mut waiting);
    // Two large packets exceed a turn, and so do 66 small ones.
    assert_eq!(order[..2], [0, 1]);
    assert_eq!(order[2..68], (100..166).collect::<Vec<_>>()[..]);
    assert_eq!(order[68..70], [2, 3]);
}

#[test]
fn one_destination_may_have_half_of_the_buffers_and_two_a_third_each() {
    for destinations in [1u8, 2, 3] {
        let (mut waiting, mut free) = (Waiting::default(), 299u32);
        waiting.push(Time(0), frame(0, 100), (to(0), NORMAL), room(free)).expect("room");
        waiting.passed(Time(0), to(200).reliably.expect("reliable").remote);
        for n in (0..destinations).cycle().take(3000) {
            // A fetched packet has its buffer already.
            if waiting.push(Time(0), frame(0, 100), (to(n), NORMAL), room(free - 1)).is_ok() {
                free -= 1;
            }
        }
        let share = 300 / (u32::from(destinations) + 1);
        assert!(free.abs_diff(share) <= 2, "{destinations} destinations: {free} are free");
    }
}

#[test]
fn the_number_of_queues_is_bounded() {
    let mut waiting = Waiting::default();
    let far = |n: usize| {
        let mut to = to((n % 256) as u8);
        to.peer = (n / 256) as u32;
        to
    };
    for n in 0..MOST_DESTINATIONS {
        assert_eq!(waiting.push(Time(0), frame(0, 100), (far(n), NORMAL), room(10)), Ok(()));
    }
    assert_eq!(waiting.push(Time(0), frame(0, 100), (far(MOST_DESTINATIONS), NORMAL), room(10)), Err(Full));
    waiting.pop(Time(0), NORMAL, much());
    assert_eq!(waiting.push(Time(0), frame(0, 100), (far(MOST_DESTINATIONS), NORMAL), room(10)), Ok(()));
}

#[test]
fn unreliable_packets_never_wait() {
    let mut waiting = Waiting::default();
    let plain = Departure { reliably: None, ..to(1) };
    assert_eq!(waiting.push(Time(0), frame(0, 100), (plain, NORMAL), room(10)), Err(Full));
    assert!(waiting.is_empty() && waiting.destinations() == 0);
}

/// Room for this many packets more than one destination can have waiting.
fn much() -> Room {
    room(100_000)
}

fn fill(waiting: &mut Waiting, at: u64, packets: usize) {
    while waiting.packets() < packets {
        waiting.push(Time(at), frame(0, 8192), (to(1), NORMAL), much()).expect("room");
    }
}

#[test]
fn a_guest_with_one_destination_is_stopped_and_fetched_from_now_and_then() {
    let mut waiting = Waiting::default();
    fill(&mut waiting, 10 * MS, HOLD_PACKETS - 1);
    assert_eq!(waiting.held_until(Time(10 * MS), much()), None);
    fill(&mut waiting, 10 * MS, HOLD_PACKETS);
    assert_eq!(waiting.held_until(Time(10 * MS), much()), Some(Time(15 * MS)));
    assert_eq!(waiting.held_until(Time(15 * MS), much()), None, "it may have something for others");
    waiting.fetched(Time(16 * MS));
    fill(&mut waiting, 16 * MS, HOLD_PACKETS + 16);
    assert_eq!(waiting.held_until(Time(16 * MS), much()), Some(Time(21 * MS)));
    (0..20).for_each(|_| waiting.pop(Time(17 * MS), NORMAL, much()));
    assert_eq!(waiting.held_until(Time(17 * MS), much()), None, "the queue is short again");
}

#[test]
fn a_queue_without_room_for_a_fetch_stops_its_guest_while_it_moves() {
    let mut waiting = Waiting::default();
    fill(&mut waiting, 0, 4 * HOLD_PACKETS);
    let little = room(4 * HOLD_PACKETS as u32 + 100);
    assert_eq!(waiting.held_until(Time(50 * MS), little), Some(Time(1000 * MS)), "not to be looked at");
    (0..HOLD_PACKETS).for_each(|_| waiting.pop(Time(900 * MS), NORMAL, much()));
    fill(&mut waiting, 900 * MS, 4 * HOLD_PACKETS);
    assert_eq!(waiting.held_until(Time(1200 * MS), little), Some(Time(1900 * MS)), "it has moved");
    // A few packets are not enough to count as moving.
    (0..10).for_each(|_| waiting.pop(Time(1800 * MS), NORMAL, much()));
    assert_eq!(waiting.held_until(Time(1900 * MS), little), None, "nobody else may wait for it any longer");
    waiting.fetched(Time(1900 * MS));
    assert_eq!(waiting.held_until(Time(1900 * MS), much()), None);
}

#[test]
fn a_guest_that_sends_to_others_is_not_stopped() {
    let mut waiting = Waiting::default();
    fill(&mut waiting, 0, HOLD_PACKETS);
    let remote = |n| to(n).reliably.expect("reliable").remote;
    waiting.passed(Time(MS), remote(1));
    assert!(waiting.held_until(Time(MS), much()).is_some(), "what else it sends to the same vNIC is no other's");
    waiting.passed(Time(MS), remote(2));
    assert_eq!(waiting.held_until(Time(MS), much()), None);
    fill(&mut waiting, 1000 * MS, HOLD_PACKETS);
    waiting.fetched(Time(1000 * MS));
    assert_eq!(waiting.held_until(Time(1000 * MS), much()), None);
    (0..10).for_each(|_| waiting.pop(Time(1002 * MS), NORMAL, much()));
    fill(&mut waiting, 1002 * MS, HOLD_PACKETS);
    assert!(waiting.held_until(Time(1002 * MS), much()).is_some(), "that was a second ago");
}

#[test]
fn a_guest_with_two_destinations_is_not_stopped() {
    let mut waiting = Waiting::default();
    for n in [1, 2] {
        for _ in 0..HOLD_PACKETS {
            waiting.push(Time(MS), frame(0, 8192), (to(n), NORMAL), much()).expect("room");
        }
    }
    assert_eq!(waiting.held_until(Time(MS), much()), None);
    waiting.take(|to| destination(to) == 1, |_| {});
    waiting.push(Time(2 * MS), frame(0, 8192), (to(2), NORMAL), much()).expect("room");
    assert_eq!(waiting.held_until(Time(2 * MS), much()), None, "a moment ago it had another one");
}

#[test]
fn many_small_packets_wait_here_as_long_as_there_is_room() {
    let mut waiting = Waiting::default();
    for n in 0..5000 {
        assert_eq!(waiting.held_until(Time(MS), room(8192)), None, "{n} packets");
        waiting.push(Time(MS), frame(0, 74), (to(1), NORMAL), room(8192)).expect("room");
    }
    waiting.push(Time(MS), frame(0, 74), (to(1), NORMAL), room(5100)).expect("room");
    assert_eq!(waiting.held_until(Time(MS), room(5100)), Some(Time(1001 * MS)), "no room for a fetch");
}

#[test]
fn few_large_packets_stop_a_guest() {
    let mut waiting = Waiting::default();
    for _ in 0..17 {
        assert_eq!(waiting.held_until(Time(MS), much()), None);
        waiting.push(Time(MS), frame(0, 65_000), (to(1), NORMAL), much()).expect("room");
    }
    assert!(waiting.held_until(Time(MS), much()).is_some());
}

#[test]
fn bands_go_in_order_and_are_bounded() {
    let mut waiting = Waiting::default();
    assert!(!waiting.must_wait(&to(1)));
    waiting.set_bound(Some(10_000));
    let plain = Departure { reliably: None, ..to(1) };
    assert!(waiting.must_wait(&to(1)) && waiting.must_wait(&plain));
    // A single destination and band: the guest is stopped, and nothing is dropped.
    for n in 0..20 {
        waiting.push(Time(0), frame(n, 1000), (plain, NORMAL), much()).expect("it waits");
    }
    assert_eq!(waiting.held_until(Time(0), much()), Some(Time(1000 * MS)));
    // Another band goes first, and the guest is stopped no more, so its queues are bounded.
    for n in 100..110 {
        waiting.push(Time(MS), frame(n, 1000), (plain, Band::Priority), much()).expect("room");
    }
    assert_eq!(waiting.push(Time(MS), frame(0, 1000), (plain, Band::Priority), much()), Err(Full));
    assert_eq!(waiting.push(Time(MS), frame(0, 1000), (plain, NORMAL), much()), Err(Full));
    waiting.push(Time(MS), frame(200, 1000), (to(1), Band::Background), much()).expect("room");
    assert_eq!(waiting.held_until(Time(MS), much()), None);
    let wanted: Vec<u32> = (100..110).chain(0..20).chain([200]).collect();
    assert_eq!(drain(&mut waiting), wanted);
    waiting.push(Time(30_000 * MS), frame(0, 65_000), (to(1), NORMAL), much()).expect("a packet always fits");
    assert_eq!(
        waiting.push(Time(30_000 * MS), frame(0, 1000), (to(1), NORMAL), much()),
        Err(Full),
        "it has used several bands"
    );
    waiting.set_bound(None);
    assert!(waiting.must_wait(&to(1)) && !waiting.must_wait(&plain), "behind what waits");
    drain(&mut waiting);
    assert!(!waiting.must_wait(&to(1)) && waiting.is_empty());
}

#[test]
fn a_closed_destination_delays_no_other_band() {
    let mut waiting = Waiting::default();
    waiting.set_bound(Some(100_000));
    for (n, band) in [(1, Band::Priority), (2, Band::Priority), (3, NORMAL)] {
        waiting.push(Time(0), frame(n.into(), 100), (to(n), band), much()).expect("room");
    }
    let mut closed = Closed::default();
    for wanted in 1..=3 {
        let (band, frame, _) = waiting.front(&closed).expect("not all are closed");
        assert_eq!(frame.handle.0, wanted);
        waiting.skip(band, &mut closed);
    }
    assert!(waiting.front(&closed).is_none());
    assert_eq!(drain(&mut waiting), [1, 2, 3]);
}
