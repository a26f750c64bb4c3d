//! The cost of the gateway's pipeline per packet: packet-level load balancing, the tenant limiter, look-ups in ten
//! million routes.

use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use bifrost_plb::{Balancer, Config, TRAILER_LEN};
use bifrost_tables::{BATCH, IpNet, LimiterConfig, Lpm, TenantLimiter};
use fastrand::Rng;
use rustix::time::{ClockId, clock_gettime};

use crate::account::{Account, balance, charge};
use crate::forwarding::{Forwarding, Service};

/// Packets per measurement.
pub const PACKETS: u32 = 8192;
/// Packets per turn of the pipeline.
const TURN: u32 = 32;
/// Interval of turns: a packet each 100 ns.
const TURN_NS: u64 = 3_200;
/// Repetitions in a block, number of blocks, and the pause between blocks.
const REPETITIONS: usize = 5;
const TURNS: usize = 8;
const BETWEEN_TURNS: Duration = Duration::from_millis(500);
/// Routes of the large table.
const ROUTES: usize = 10_000_000;

/// A balancer of four order queues and 44 cores, with a pod that does nothing. Each turn dispatches 32 packets, takes
/// them back and releases them, and writes and reads their trailers.
#[derive(Debug)]
pub struct Spraying {
    balancer: Balancer<u32>,
    now: u64,
    /// The order in which the packets of a turn return.
    order: [usize; TURN as usize],
    trailers: [[u8; TRAILER_LEN]; TURN as usize],
    random: u32,
    /// Packets released.
    pub released: u32,
}

impl Spraying {
    /// In steady state. `reordered`: the packets of a turn return in any order.
    pub fn new(reordered: bool) -> Self {
        let config = Config { cores: 44, affinity: Config::AFFINITY, order_queues: 4, ..Config::default() };
        let mut order = std::array::from_fn(|i| i);
        if reordered {
            Rng::with_seed(3).shuffle(&mut order);
        }
        let balancer = Balancer::new(config).unwrap_or_else(|e| unreachable!("{config:?}: {e}"));
        let trailers = [[0; TRAILER_LEN]; TURN as usize];
        let mut spraying = Spraying { balancer, now: 1 << 40, order, trailers, random: 1, released: 0 };
        // Fills each queue twice.
        spraying.run(4 * 2 * 4096);
        spraying.released = 0;
        spraying
    }

    /// Dispatch, legal check and reorder check of `packets` packets.
    pub fn run(&mut self, packets: u32) {
        for _ in 0..packets / TURN {
            self.now += TURN_NS;
            for trailer in &mut self.trailers {
                self.random = self.random.wrapping_mul(0x915f_77f5).wrapping_add(1);
                if let Ok(dispatch) = self.balancer.dispatch(self.now, self.random, false) {
                    *trailer = dispatch.trailer.emit();
                    black_box(dispatch.core);
                }
            }
            for &i in &self.order {
                black_box(self.balancer.returned(self.trailers[i], i as u32));
            }
            let released = &mut self.released;
            self.balancer.release(self.now, u32::MAX, |egress| {
                black_box(egress);
                *released += 1;
            });
        }
    }
}

/// A limiter, and packets of a hundred thousand tenants; one of them exceeds its rate and sends a quarter of all
/// packets.
#[derive(Debug)]
pub struct Limiting {
    limiter: TenantLimiter,
    vnis: Vec<u32>,
    now: u64,
    /// Packets that passed.
    pub passed: u32,
}

/// The heavy tenant.
const HEAVY: u32 = 77;

impl Limiting {
    /// `found`: the heavy tenant has its own meter already. Otherwise no sample detects it.
    pub fn new(found: bool) -> Self {
        let mut rng = Rng::with_seed(5);
        let vnis = (0..PACKETS).map(|_| if rng.u8(..4) == 0 { HEAVY } else { rng.u32(..100_000) }).collect();
        let never = LimiterConfig { sample_drops: u32::MAX, sample_ns: u64::MAX, seed: 9, ..LimiterConfig::default() };
        let mut limiting = Limiting { limiter: TenantLimiter::new(never), vnis, now: 1 << 40, passed: 0 };
        limiting.run(PACKETS);
        limiting.run(PACKETS);
        let names: Vec<u32> = limiting.limiter.pre_checked().map(|(vni, _)| vni).collect();
        for vni in names {
            limiting.limiter.forget(vni);
        }
        if found {
            limiting.limiter.limit_early(limiting.now, HEAVY).unwrap_or_else(|e| unreachable!("an empty table: {e}"));
        }
        limiting.run(PACKETS);
        limiting.passed = 0;
        limiting
    }

    /// Processes `packets` packets, one each 10 ns: 25 Mpps of the heavy tenant, which may send 10.
    pub fn run(&mut self, packets: u32) {
        for vni in &self.vnis[..packets as usize] {
            self.now += 10;
            self.passed += u32::from(black_box(self.limiter.admit(self.now, *vni, 1)).passes);
        }
    }
}

/// A table with the routes of a tenant with very many, and addresses within them.
#[derive(Debug)]
pub struct Routes {
    lpm: Lpm<u32>,
    addrs: Vec<IpAddr>,
    /// Memory of the table, bytes per route; 0 unless [`crate::account::Counting`] is the program's allocator.
    pub bytes_each: f64,
}

impl Routes {
    /// Random IPv4 routes, half of them for single hosts.
    pub fn new(count: usize) -> Self {
        let mut rng = Rng::with_seed(1);
        let mut route = || {
            let len = [24, 28, 30, 32, 32, 32][rng.usize(..6)];
            (rng.u32(..) & (u32::MAX << (32 - u32::from(len))), len)
        };
        // Some are drawn twice.
        let mut routes: Vec<(u32, u8)> = (0..count + count / 8).map(|_| route()).collect();
        routes.sort_unstable();
        routes.dedup();
        rng.shuffle(&mut routes);
        routes.truncate(count);
        let net = |&(addr, len): &(u32, u8)| {
            let net = IpNet::new(Ipv4Addr::from_bits(addr).into(), len);
            net.unwrap_or_else(|e| unreachable!("{len}: {e}"))
        };
        let before = balance(Account::Other).bytes;
        let lpm = Lpm::new(routes.iter().map(net).zip(0..)).unwrap_or_else(|net| unreachable!("{net} is there once"));
        let bytes_each = (balance(Account::Other).bytes - before) as f64 / routes.len() as f64;
        let addr = |_| {
            let (first, len) = routes[rng.usize(..routes.len())];
            let host = rng.u32(..) & u32::MAX.checked_shr(len.into()).unwrap_or(0);
            Ipv4Addr::from_bits(first | host).into()
        };
        Routes { lpm, addrs: (0..1 << 17).map(addr).collect(), bytes_each }
    }

    /// Looks up `packets` addresses, sixteen at once, and reads the results.
    pub fn run(&self, packets: u32) -> u32 {
        let (batches, _) = self.addrs[..packets as usize].as_chunks::<BATCH>();
        batches.iter().fold(0u32, |sum, addrs| {
            let found = self.lpm.lookup_batch(black_box(addrs));
            found.into_iter().fold(sum, |sum, value| sum.wrapping_add(value.map_or(7, |v| *v)))
        })
    }

    /// The same, one by one.
    pub fn run_one_by_one(&self, packets: u32) -> u32 {
        let addrs = &self.addrs[..packets as usize];
        addrs.iter().fold(0u32, |sum, addr| sum.wrapping_add(self.lpm.lookup(*black_box(addr)).map_or(7, |v| *v)))
    }
}

/// Measurements other than instructions.
#[derive(Clone, Debug)]
pub struct Costs {
    /// Name, ns per packet, and its bar.
    pub times: Vec<(&'static str, f64, Option<f64>)>,
    /// Allocations of 98,304 packets through balancer and limiter, and through each service of a pod.
    pub allocations: Vec<(&'static str, u64)>,
    /// Memory of the table with ten million routes, bytes per route.
    pub route_bytes: f64,
}

/// Bars: ns per packet of dispatch, legal check and reorder check; of the limiter; of a look-up in ten million
/// routes.
const SPRAY_NS_MAX: f64 = 100.0;
const LIMIT_NS_MAX: f64 = 20.0;
const LOOKUP_NS_MAX: f64 = 130.0;

/// Measures for some seconds. [`crate::account::Counting`] must be the program's allocator.
pub fn costs() -> Costs {
    let mut spraying = [false, true].map(Spraying::new);
    let mut limiting = [false, true].map(Limiting::new);
    let routes = Routes::new(ROUTES);
    let looked_up = 1 << 17;
    let mut times = [
        ("gateway.plb_in_order", f64::INFINITY, Some(SPRAY_NS_MAX)),
        ("gateway.plb_reordered", f64::INFINITY, Some(SPRAY_NS_MAX)),
        ("gateway.limiter_two_stages", f64::INFINITY, Some(LIMIT_NS_MAX)),
        ("gateway.limiter_found", f64::INFINITY, Some(LIMIT_NS_MAX)),
        ("gateway.lookup_10M_routes.batch", f64::INFINITY, Some(LOOKUP_NS_MAX)),
        ("gateway.lookup_10M_routes.one_by_one", f64::INFINITY, None),
    ];
    // Alternating, with blocks apart in time: a moment in which the machine is slow spoils none of the measurements.
    for turn in 0..TURNS {
        if turn > 0 {
            std::thread::sleep(BETWEEN_TURNS);
        }
        let [in_order, reordered] = &mut spraying;
        let [two_stages, found] = &mut limiting;
        let least = [
            least_ns(PACKETS, || in_order.run(PACKETS)),
            least_ns(PACKETS, || reordered.run(PACKETS)),
            least_ns(PACKETS, || two_stages.run(PACKETS)),
            least_ns(PACKETS, || found.run(PACKETS)),
            least_ns(looked_up, || routes.run(looked_up)),
            least_ns(looked_up, || routes.run_one_by_one(looked_up)),
        ];
        times.iter_mut().zip(least).for_each(|((_, ns, _), least)| *ns = ns.min(least));
    }
    let allocations = allocations(12 * PACKETS);
    Costs { times: times.into(), allocations, route_bytes: routes.bytes_each }
}

/// Allocations of as many packets in steady state, a multiple of [`PACKETS`], by what they pass.
/// [`crate::account::Counting`] must be the program's allocator, and nothing else may run.
pub fn allocations(packets: u32) -> Vec<(&'static str, u64)> {
    let mut spraying = [false, true].map(Spraying::new);
    let mut limiting = [false, true].map(Limiting::new);
    let times = packets / PACKETS;
    let of_spraying: u64 = spraying.iter_mut().map(|s| counted(|| (0..times).for_each(|_| s.run(PACKETS)))).sum();
    let of_limiting: u64 = limiting.iter_mut().map(|l| counted(|| (0..times).for_each(|_| l.run(PACKETS)))).sum();
    let pipeline = [("load_balancing", of_spraying), ("limiter", of_limiting)];
    pipeline.into_iter().chain(Service::ALL.map(|service| (service.name(), of_service(service, packets)))).collect()
}

/// Allocations of a pod's core.
fn of_service(service: Service, packets: u32) -> u64 {
    let mut forwarding = Forwarding::new(service);
    counted(|| forwarding.run(packets))
}

/// Allocations during `run`.
fn counted(run: impl FnOnce()) -> u64 {
    let before = balance(Account::Sender).allocations;
    charge(Account::Sender);
    run();
    charge(Account::Other);
    balance(Account::Sender).allocations - before
}

/// The minimum of all repetitions, in processor time, ns per packet, so that other work of the machine matters
/// little.
fn least_ns<R>(packets: u32, mut run: impl FnMut() -> R) -> f64 {
    let now = || {
        let now = clock_gettime(ClockId::ThreadCPUTime);
        now.tv_sec as f64 * 1e9 + now.tv_nsec as f64
    };
    let times = (0..REPETITIONS).map(|_| {
        let began = now();
        black_box(run());
        (now() - began) / f64::from(packets)
    });
    times.fold(f64::INFINITY, f64::min)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_packet_leaves() {
        for reordered in [false, true] {
            let mut spraying = Spraying::new(reordered);
            spraying.run(PACKETS);
            assert_eq!(spraying.released, PACKETS);
        }
    }

    #[test]
    fn the_heavy_tenant_is_limited() {
        for found in [false, true] {
            let mut limiting = Limiting::new(found);
            limiting.run(PACKETS);
            // The heavy tenant sends a quarter of the packets, and 10 of its 25 Mpps pass.
            let share = f64::from(limiting.passed) / f64::from(PACKETS);
            assert!((0.8..0.9).contains(&share), "{share}");
        }
    }

    #[test]
    fn batches_and_single_look_ups_agree() {
        let routes = Routes::new(5000);
        assert_eq!(routes.run(4096), routes.run_one_by_one(4096));
    }
}
