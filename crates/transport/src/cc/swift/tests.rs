use super::*;
use crate::time::{MS, US};

fn sample(delay_ns: u64) -> AckSample {
    AckSample {
        packets: 10,
        marked_packets: 0,
        fabric_delay_ns: Some(delay_ns),
        standing_delay_ns: delay_ns,
        endpoint_delay_ns: Some(10 * US),
        base_delay_ns: 50 * US,
        rtt_ns: 100 * US,
        hops: 2,
        in_flight: u32::MAX,
    }
}

/// A loss on a path without a queue, of what left just now.
fn damage(now_ns: u64) -> Loss {
    let (rtt_ns, base_delay_ns) = (100 * US, 50 * US);
    Loss { sent: Time(now_ns), rtt_ns, base_delay_ns, queue_ns: 0, congestion: false, everywhere: false }
}

fn swift() -> Swift {
    Swift::new(SwiftConfig::new(128, 4096, MS / 10))
}

#[test]
fn grows_below_target_by_one_packet_a_window() {
    let mut s = swift();
    for i in 0..13 {
        s.on_ack(Time(i * 100 * US), &sample(60 * US));
    }
    assert!((s.window() - 129.0).abs() < 0.1, "{}", s.window());
}

#[test]
fn an_unused_window_does_not_grow() {
    let mut s = swift();
    s.on_ack(Time(MS), &AckSample { in_flight: 63, ..sample(60 * US) });
    assert_eq!(s.window(), 128.0);
}

#[test]
fn shrinks_above_target_once_an_rtt() {
    let mut s = swift();
    let now = Time(10 * MS);
    s.on_ack(now, &sample(10 * MS));
    assert_eq!(s.window(), 64.0, "the largest decrease is one half");
    s.on_ack(now.after(50 * US), &sample(10 * MS));
    assert_eq!(s.window(), 64.0, "not twice within an RTT");
    s.on_ack(now.after(150 * US), &sample(10 * MS));
    assert_eq!(s.window(), 32.0);
}

/// So many samples, one a round trip or as the window's pace has it.
fn samples(s: &mut Swift, now: &mut Time, count: u32, mut delay_ns: impl FnMut(u32) -> u64) {
    for i in 0..count {
        let delay_ns = delay_ns(i);
        *now = now.after(((delay_ns as f32 / s.window().min(1.0)) as u64).min(100 * MS));
        s.on_ack(*now, &AckSample { packets: s.window().max(1.0) as u16, rtt_ns: delay_ns, ..sample(delay_ns) });
    }
}

#[test]
fn a_way_that_becomes_longer_is_found_out() {
    let (mut s, mut now) = (swift(), Time(0));
    samples(&mut s, &mut now, 10, |_| 60 * US);
    let changed = now;
    let mut closed_for = None;
    for _ in 0..100 {
        samples(&mut s, &mut now, 1, |_| 5 * MS);
        if s.window() >= 10.0 && now.since(changed) > 200 * MS {
            closed_for = closed_for.or(Some(now.since(changed) / MS));
        }
    }
    // Though the smallest delay that is reported is still the old one.
    assert!(closed_for.is_some_and(|ms| ms < 1500), "{closed_for:?} ms");
    assert!(s.window() > 10.0, "{}", s.window());
    // A queue on that way is one as before, and so it is when the way is short again.
    samples(&mut s, &mut now, 3, |_| 8 * MS);
    assert!(s.above_target);
    samples(&mut s, &mut now, 1, |_| 60 * US);
    samples(&mut s, &mut now, 1, |_| 5 * MS);
    assert!(s.above_target);
}

#[test]
fn a_queue_that_many_share_is_no_longer_way() {
    let (mut s, mut now) = (swift(), Time(0));
    // At the floor, half of the time below the target.
    samples(&mut s, &mut now, 1000, |i| if i % 3 == 0 { 60 * US } else { 20 * MS });
    assert_eq!(s.longer_way_ns, 0);
}

#[test]
fn what_was_sent_with_a_larger_window_says_nothing_about_the_way() {
    let mut s = swift();
    s.on_ack(Time(0), &sample(60 * US));
    // A queue that is built up at once is drained for twenty milliseconds, and acknowledged all the while.
    for i in 1..400 {
        s.on_ack(Time(i * 50 * US), &sample(2 * MS));
    }
    assert_eq!((s.window(), s.longer_way_ns), (0.01, 0));
}

#[test]
fn heavy_loss_is_congestion_where_that_is_wanted() {
    // One packet in `every` is lost, below the target.
    let window = |heavy_loss: f32, every: u64| {
        let mut s = Swift::new(SwiftConfig { heavy_loss, ..SwiftConfig::new(128, 4096, MS / 10) });
        for i in 1..=200 {
            s.on_ack(Time(i * MS), &AckSample { packets: 1, ..sample(60 * US) });
            if i % every == 0 {
                s.on_loss(Time(i * MS), &damage(i * MS));
            }
        }
        s.window()
    };
    assert!(window(0.1, 30) > 128.0, "3 % is a bad link");
    assert!(window(0.1, 5) < 8.0, "20 % is a full queue");
    assert!(window(1.0, 5) > 128.0);
}

#[test]
fn losses_on_all_paths_that_were_none_open_the_window_again() {
    let mut s = Swift::new(SwiftConfig::new(128, 4096, MS));
    s.on_ack(Time(MS), &sample(60 * US));
    let before = s.window();
    for ms in 2..5 {
        s.on_loss(Time(ms * MS + US), &Loss { everywhere: true, ..damage(ms * MS) });
    }
    assert!(s.window() < 1.0, "{}", s.window());
    // Packets that overtake each other on their way are late, not lost.
    s.on_spurious(Time(6 * MS));
    assert_eq!((s.window(), s.full_ns), (before, 0));
}

#[test]
fn what_all_paths_lose_closes_the_window_and_says_how_long_a_full_queue_is() {
    let mut s = Swift::new(SwiftConfig::new(128, 4096, MS));
    // The queue was never seen empty.
    let full = |ns| AckSample { base_delay_ns: 900 * US, rtt_ns: MS, ..sample(ns) };
    s.on_ack(Time(MS), &full(900 * US));
    let loss = Loss { base_delay_ns: 900 * US, queue_ns: 400 * US, everywhere: true, ..damage(2 * MS) };
    s.on_loss(Time(3 * MS), &loss);
    assert_eq!(s.window(), 1.0, "to a packet at once");
    s.on_loss(Time(5 * MS), &Loss { sent: Time(4 * MS), ..loss });
    assert_eq!(s.window(), 0.25, "and less if that is too much");
    s.fabric = 10.0;
    s.on_loss(Time(3 * MS), &loss);
    assert_eq!(s.window(), 10.0, "it left before the cut");
    // Half way to a full queue is too much, though a margin would be more.
    s.on_ack(Time(7 * MS), &full(1110 * US));
    assert!(s.window() < 10.0, "{}", s.window());
    s.on_ack(Time(9 * MS), &full(1090 * US));
    let before = s.window();
    s.on_ack(Time(11 * MS), &full(1090 * US));
    assert!(s.window() > before);
    // That is forgotten in time.
    s.on_ack(Time(1100 * MS), &full(1090 * US));
    s.on_ack(Time(1102 * MS), &full(1110 * US));
    assert!(s.window() > before && s.full_ns == 0, "{}", s.window());
}

#[test]
fn the_nearer_a_queue_is_to_full_the_more_is_cut() {
    let kept = |delay| {
        let mut s = Swift::new(SwiftConfig::new(128, 4096, MS));
        (s.fabric, s.full_ns, s.full_at) = (100.0, 1300 * US, Time(MS));
        s.on_ack(Time(MS), &AckSample { base_delay_ns: 1100 * US, rtt_ns: MS, ..sample(delay) });
        s.window()
    };
    assert!((74.0..76.0).contains(&kept(1250 * US)), "{}", kept(1250 * US));
    assert_eq!(kept(1400 * US), 50.0);
}

#[test]
fn a_window_opens_fast_where_a_full_queue_has_drained() {
    let grown = |delay| {
        let config = SwiftConfig { gentle_window: 8.0, ..SwiftConfig::new(1, 4096, MS) };
        let mut s = Swift::new(config);
        (s.fabric, s.full_ns) = (0.25, 1300 * US);
        s.on_ack(Time(MS), &AckSample { packets: 1, base_delay_ns: 20 * US, ..sample(delay) });
        s.window() - 0.25
    };
    assert_eq!((grown(300 * US), grown(400 * US)), (1.0, 0.125));
}

#[test]
fn a_new_path_is_judged_by_more_than_its_first_losses() {
    let lost = |losses| {
        let mut s = swift();
        (0..losses).for_each(|i| s.on_loss(Time(MS + i), &damage(MS)));
        s.lost()
    };
    assert!(lost(2) < 0.25, "{}", lost(2));
    assert!(lost(4) > 0.25, "{}", lost(4));
}

#[test]
fn small_windows_grow_gently_where_that_is_wanted_and_a_queue_is_full() {
    let grown_below = |full_ns, gentle_window, initial_window| {
        let config = SwiftConfig { gentle_window, initial_window, ..SwiftConfig::new(1, 4096, MS) };
        let mut s = Swift::new(config);
        s.full_ns = full_ns;
        s.on_ack(Time(MS), &AckSample { packets: 1, ..sample(60 * US) });
        s.fabric - initial_window
    };
    let grown = |gentle_window, initial_window| grown_below(100 * US, gentle_window, initial_window);
    assert_eq!(grown_below(0, 8.0, 0.5), 1.0, "no queue was full");
    assert_eq!((grown(1.0, 0.5), grown(1.0, 4.0)), (1.0, 0.25), "the paper");
    assert_eq!((grown(8.0, 0.5), grown(8.0, 4.0)), (0.125, 0.125));
    assert_eq!((grown(1.0, 16.0), grown(8.0, 16.0)), (0.0625, 0.0625));
}

#[test]
fn random_loss_without_delay_costs_nothing() {
    let mut s = swift();
    s.on_ack(Time(MS), &sample(60 * US));
    let before = s.window();
    s.on_loss(Time(2 * MS), &damage(2 * MS));
    s.on_timeout(Time(3 * MS), 100 * US);
    assert_eq!(s.window(), before);
    s.on_ack(Time(10 * MS), &sample(10 * MS));
    let congested = s.window();
    s.on_loss(Time(20 * MS), &Loss { queue_ns: 9 * MS, congestion: true, ..damage(20 * MS) });
    assert_eq!(s.window(), congested / 2.0);
}

#[test]
fn a_queue_s_loss_cuts_what_the_queue_asks_for_and_is_taken_back_if_the_packet_was_late() {
    let mut s = swift();
    let before = s.window();
    let loss = |ms: u64, queue_ns| Loss { base_delay_ns: 900 * US, queue_ns, congestion: true, ..damage(ms * MS) };
    s.on_loss(Time(2 * MS), &loss(2, 100 * US));
    assert!((s.window() / before - 0.92).abs() < 0.001, "{}", s.window());
    s.on_spurious(Time(2 * MS));
    assert_eq!(s.window(), before);
    s.on_loss(Time(4 * MS), &loss(4, 9 * MS));
    assert_eq!(s.window(), before / 2.0);
    // It left before the cut, and does not know of it.
    s.on_loss(Time(6 * MS), &Loss { sent: Time(3 * MS), ..loss(6, 9 * MS) });
    assert_eq!(s.window(), before / 2.0);
}

#[test]
fn marks_cut_by_their_share_and_close_no_path_without_a_queue() {
    let mut s = swift();
    let marks = |s: &mut Swift, rounds: u64, marked: u16, delay_ns| {
        let from = s.round.since.0;
        for i in 1..=rounds {
            let packets = s.window().max(1.0) as u16;
            let marked_packets = (packets * marked).div_ceil(10);
            let sample = AckSample { packets, marked_packets, ..sample(delay_ns) };
            s.on_ack(Time(from + i * MS), &sample);
        }
    };
    marks(&mut s, 100, 1, 60 * US);
    // Where a tenth is marked, a twentieth is cut each round trip, of about as much as it grows.
    assert!((3.0..30.0).contains(&s.window()), "{}", s.window());
    marks(&mut s, 500, 10, 60 * US);
    assert!((1.0..5.0).contains(&s.window()), "{}: a queue is not measured", s.window());
    marks(&mut s, 10, 10, 500 * US);
    assert!(s.window() < 1.0, "{}: it is", s.window());
}

#[test]
fn a_window_doubles_until_a_queue_shows_and_again_when_none_has_for_a_while() {
    let config = SwiftConfig { doubles: true, ..SwiftConfig::new(10, 4096, MS) };
    let mut s = Swift::new(config);
    let mut now = Time(0);
    let mut round = |s: &mut Swift, delay_ns| {
        now = now.after(100 * US);
        s.on_ack(now, &AckSample { packets: s.window() as u16, ..sample(delay_ns) });
    };
    (0..3).for_each(|_| round(&mut s, 60 * US));
    assert_eq!(s.window(), 80.0);
    round(&mut s, 400 * US);
    assert!(s.window() < 82.0, "{}", s.window());
    (0..CALM_ROUNDS).for_each(|_| round(&mut s, 60 * US));
    let before = s.window();
    (0..3).for_each(|_| round(&mut s, 60 * US));
    assert!(s.window() > 4.0 * before, "{before}, {}", s.window());
}

#[test]
fn the_target_gives_small_windows_more_room() {
    let mut s = swift();
    let large = s.fabric_target_ns(50 * US, 0);
    s.fabric = 1.0;
    assert!(s.fabric_target_ns(50 * US, 0) > large);
    s.fabric = 0.01;
    assert_eq!(s.fabric_target_ns(50 * US, 0), 50 * US + 2 * (MS / 10));
    // And longer paths more than short ones, within bounds.
    let margins = [10 * US, 200 * US, 10 * MS].map(|base| SwiftConfig::new(1, 1, MS).margin_ns(base, 0));
    assert_eq!(margins, [500 * US, 800 * US, MS]);
}
