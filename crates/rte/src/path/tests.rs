use super::*;

#[derive(Debug)]
struct Closed;

impl CongestionControl for Closed {
    fn on_ack(&mut self, _: Time, _: &bifrost_transport::cc::AckSample) {}
    fn on_loss(&mut self, _: Time, _: &Loss) {}
    fn lost(&self) -> f32 {
        0.0
    }
    fn on_spurious(&mut self, _: Time) {}
    fn restart(&mut self) {}
    fn on_timeout(&mut self, _: Time, _: u64) {}
    fn wire_type(&self) -> u8 {
        1
    }
    fn window(&self) -> f32 {
        0.01
    }
}

#[test]
fn a_closed_window_opens_in_time_whatever_was_measured() {
    let mut path = Path::new(Box::new(Closed));
    path.total.sample(Time(0), 9_000 * MS as i64);
    path.on_sent(Time(0), 1);
    path.on_done(1);
    assert!(!path.has_room(Time(50 * MS)), "a pause");
    assert!(path.has_room(Time(100 * MS)), "but no more than that");
}

#[test]
fn a_path_that_stays_silent_is_probed_ever_more_rarely_and_taken_back_as_soon_as_it_speaks() {
    let mut path = Path::new(Box::new(Closed));
    path.suspect(Time(0));
    path.total.sample(Time(0), 100 * US as i64);
    // As the peer's timer does, every 2 ms.
    let mut probes_sent_in = |from_ms: u64, to_ms: u64, answered: bool| {
        let mut recovered_at = None;
        let before = path.probes_sent;
        for ms in (from_ms..to_ms).step_by(2) {
            let now = Time(ms * MS);
            if path.probe.is_some_and(|(_, sent)| now.since(sent) >= path.probe_timeout_ns()) {
                path.on_probe_lost(now);
            }
            if path.state == PathState::Suspect && path.probe.is_none() && now >= path.next_probe {
                path.on_probe_sent(now, 100 * MS);
                if answered && path.on_probe_returned(now) {
                    recovered_at = recovered_at.or(Some(ms - from_ms));
                }
            }
        }
        (path.probes_sent - before, recovered_at)
    };
    assert_eq!(probes_sent_in(0, 32, false), (8, None));
    let (second, minute) = (probes_sent_in(32, 1_000, false).0, probes_sent_in(1_000, 60_000, false).0);
    assert!(second < 80 && minute < 2_000, "{second} in the first second, {minute} in the first minute");
    let (_, recovered_at) = probes_sent_in(60_000, 61_000, true);
    assert!(recovered_at.is_some_and(|ms| ms < 45), "{recovered_at:?}");
}

#[test]
fn a_path_that_loses_one_percent_is_seldom_taken_for_worse_by_chance() {
    let mut path = Path::new(Box::new(Closed));
    let (mut state, mut crossings, mut is_above) = (1u64, 0, false);
    for i in 1..1_000_000u64 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        match (state >> 33) % 100 {
            0 => drop(path.on_loss(Time(i * US), US, true)),
            _ => path.on_arrivals(Time(i * US), 1),
        }
        crossings += u32::from(!is_above && path.loss > SUSPECT_LOSS);
        is_above = path.loss > if is_above { 0.015 } else { SUSPECT_LOSS };
    }
    assert!((1..30).contains(&crossings), "{crossings}");
}

#[test]
fn a_path_that_nobody_has_measured_may_be_long() {
    let mut path = Path::new(Box::new(Closed));
    let mut now = Time(0);
    while path.state == PathState::Usable {
        path.on_probe_sent(now, 100 * MS);
        now = now.after(path.probe_timeout_ns());
        path.on_probe_lost(now);
    }
    assert!(now >= Time(40 * MS), "{now:?}: no time for an answer");
    path.total.sample(now, 100 * US as i64);
    assert!(path.probe_timeout_ns() < 5 * MS, "one that is known is given up sooner");
}

#[test]
fn a_queue_that_is_late_as_a_whole_is_not_a_lossy_path() {
    let after = |now_ms: u64, overtaken| {
        let mut path = Path::new(Box::new(Closed));
        path.total.sample(Time(0), MS as i64);
        path.on_arrivals(Time(5 * MS), 1);
        (0..60).for_each(|_| assert!(!path.on_loss(Time(now_ms * MS), 3 * MS, overtaken)));
        path.loss
    };
    assert!(after(6, false) < SUSPECT_LOSS, "late");
    assert!(after(6, true) > SUSPECT_LOSS, "what left later has arrived");
    assert!(after(12, false) > SUSPECT_LOSS, "silent");
}
