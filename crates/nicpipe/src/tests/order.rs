use proptest::prelude::*;

use super::world::*;
use crate::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Whatever time each packet takes, if none times out: each leaves once and unchanged, and each flow in order.
    #[test]
    fn nothing_is_lost_or_reordered(
        seed in any::<u64>(),
        cores in 1u16..8,
        flows in 1u16..20,
        drops in prop_oneof![Just(0u32), 5u32..20],
        header_only_from in proptest::option::of(100u16..600),
        rss_at in proptest::option::of(0u32..1500),
        plb_again in any::<bool>(),
    ) {
        let mut world = World::new(PodConfig { header_only_from, ..config(cores) });
        world.random = fastrand::Rng::with_seed(seed);
        world.service = 100..8000;
        world.drops = drops;
        let mut sent = Vec::new();
        for number in 0..1500 {
            if Some(number) == rss_at {
                let now = world.now;
                world.pod().set_mode(now, Mode::Rss);
            }
            if plb_again && rss_at.is_some_and(|at| at + 300 == number) {
                let now = world.now;
                world.pod().set_mode(now, Mode::Plb);
            }
            let (flow, len) = (world.random.u16(..flows), world.random.usize(..1000));
            let frame = packet(100 + u32::from(flow % 3), flow, number, len);
            // Cores keep up, so that nothing takes 100 us: at most four packets wait per core.
            while world.longest_ring() >= 4 {
                world.pass(1000);
            }
            prop_assert!(world.arrive(&frame).is_ok());
            sent.push(frame);
            let gap = world.random.u64(..3000);
            world.pass(gap);
        }
        world.pass(300_000);
        let order = *world.pod().order_counters();
        prop_assert_eq!(order.timed_out_packets, 0);
        // The end of a change releases the entries of packets dispatched by flow: these leave when they return.
        prop_assert!(rss_at.is_some() || order.sent_late_packets == 0);
        prop_assert_eq!(world.reordered(), 0);
        prop_assert_eq!(world.left.len() as u64 + world.dropped_by_pod, 1500);
        prop_assert!(drops > 0 || world.dropped_by_pod == 0);
        for frame in &world.left {
            prop_assert_eq!(frame, &sent[read(frame).1 as usize]);
        }
        // Nothing leaks.
        prop_assert_eq!(world.pod().free_buffers(), 2 * 256 + 1);
        prop_assert_eq!(world.pod().occupancy(), (0, 0));
    }
}

#[test]
fn a_core_that_stops_costs_its_own_packets() {
    let mut config = config(4);
    // 5 Mpps for 100 us: 250 entries of each of the two queues, plus those of packets behind the core that stops.
    config.balancer.queue_entries = 4096;
    let mut world = World::new(config);
    world.ring = 16;
    world.service = 100..300;
    let stop = world.now + 2_000_000;
    for number in 0..20_000u32 {
        if number == 1000 {
            world.stopped[2] = world.now + stop;
        }
        world.arrive(&packet(100, (number % 50) as u16, number, 64)).unwrap();
        world.pass(200);
    }
    world.pass(1000);
    let order = *world.pod().order_counters();
    // Its ring is full after 16 packets; all others went to other cores and left in order, after at most 100 us for
    // each of the 16.
    assert_eq!((order.timed_out_packets, world.left.len()), (16, 20_000 - 16));
    assert_eq!(world.reordered(), 0);
    // It resumes: its packets leave late.
    world.stopped[2] = 0;
    world.pass(100_000);
    assert_eq!((world.pod().order_counters().sent_late_packets, world.left.len()), (16, 20_000));
}

#[test]
pub(super) fn a_burst_of_one_tenant_is_limited_before_the_cores() {
    let mut pod = config(2);
    let rate = |per_second| bifrost_tables::Rate { per_second, burst: 32 };
    pod.limiter.first = rate(200_000);
    pod.limiter.second = rate(50_000);
    let mut world = World::new(pod);
    world.service = 400..600;
    let mut refused = [0; 4];
    // Two cores do 4 Mpps. Three tenants send 100,000 packets per second, one sends 10 million.
    for step in 0..200_000u32 {
        let tenant = if step % 103 < 3 { step % 103 } else { 3 };
        let refusal = world.arrive(&packet(1000 + tenant, tenant as u16, step, 64)).err();
        assert!(refusal.is_none_or(|r| r == Refusal::Limited), "{refusal:?}");
        refused[tenant as usize] += u32::from(refusal.is_some());
        world.pass(if step % 103 < 3 { 0 } else { 100 });
    }
    world.pass(200_000);
    assert_eq!(refused[..3], [0, 0, 0]);
    assert!(refused[3] > 180_000, "{refused:?}");
    assert_eq!((world.reordered(), world.left.len() as u32), (0, 200_000 - refused[3]));
    let pod = world.pod();
    assert_eq!(pod.limiter().pre_checked().collect::<Vec<_>>(), [(1003, false)]);
    assert_eq!(pod.counters().refused_limited_packets, u64::from(refused[3]));
}

#[test]
pub(super) fn a_delayed_pipeline_limits_by_the_time_of_arrival() {
    let mut pod = config(2);
    let rate = |per_second| bifrost_tables::Rate { per_second, burst: 32 };
    (pod.limiter.first, pod.limiter.second) = (rate(80_000), rate(20_000));
    pod.balancer.queue_entries = 1024;
    // 5 ms of a tenant's 80,000 packets per second, all found at once.
    let passed = |waited: &dyn Fn(u64) -> u64| {
        let mut world = World::new(pod.clone());
        world.ring = 1024;
        world.pass(10_000_000);
        let frames = (0..400u32).map(|n| (waited(u64::from(n)), packet(1000, 3, n, 64)));
        frames.filter(|(waited, frame)| world.arrive_late(*waited, frame).is_ok()).count()
    };
    assert_eq!(passed(&|n| 12_500 * (400 - n)), 400);
    assert_eq!(passed(&|_| 0), 64, "packets that really arrive at once get both bursts");
}
