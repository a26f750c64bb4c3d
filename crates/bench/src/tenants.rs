//! A gateway's core among very many tenants, where each packet waits for memory: packets decided one by one, and in
//! vectors, whose entries are fetched together.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Instant;

use bifrost_gateway::{
    Ahead, Context, Core, HEADROOM, Host, INTERNET, Nat, NatConfig, NextHop, Packet, Route, Tables, VECTOR, Verdict,
    Vpc,
};
use bifrost_tables::{Classifier, Dir24, ExactMap, IpNet, Lpm, Pattern, Rate, exact_map};
use bifrost_wire::protocol::{TCP, UDP};
use bifrost_wire::{Mac, Vni, ethernet, udp, vxlan};

use crate::account::{Account, balance};
use crate::forwarding::{GATEWAY, MAC, ROUTER, Service, datagram};

/// Packets that a worker takes at once.
const BATCH: usize = 32;
/// Packets between two readings of the clock: some milliseconds, so that the machine is equally fast for both of a pair.
const PACKETS: u32 = 1 << 13;
/// Pairs, in which the order alternates.
const PAIRS: usize = 101;
/// Bytes of a packet's buffer.
const BUFFER: usize = 2048;

// Offsets in a frame.
const OUTER_SOURCE: usize = 26;
const VNI: usize = 46;
const INNER: usize = 50;
const INNER_SOURCE: usize = INNER + 26;
const INNER_PORTS: usize = INNER + 34;

/// The size of the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scale {
    /// VPCs, a power of two.
    pub vpcs: u32,
    /// vNICs of each, a power of two.
    pub vnics: u32,
    /// Flows of each vNIC, a power of two; one is in 32,768 at most.
    pub flows: u32,
    /// Routes of each VPC, at least as many as vNICs, at most 4096, a power of two.
    pub routes: u32,
}

impl Scale {
    /// What stays in the caches.
    pub const SMALL: Scale = Scale { vpcs: 4, vnics: 16, flows: 4, routes: 16 };
    /// Half a gigabyte: a million flows and ten million routes.
    pub const LARGE: Scale = Scale { vpcs: 1 << 14, vnics: 16, flows: 4, routes: 512 };
    /// What packets read takes some megabytes: more than a private cache has, and less than a shared one.
    pub const MIDDLE: Scale = Scale { vpcs: 1 << 12, vnics: 4, flows: 1, routes: 512 };

    /// Flows in all.
    pub fn all_flows(self) -> u32 {
        self.vpcs * self.vnics * self.flows
    }
}

/// A core of a pod, and packets of all flows for it.
#[derive(Debug)]
pub struct Tenants {
    core: Core,
    neighbours: ExactMap<IpAddr, Mac>,
    scale: Scale,
    service: Service,
    template: Vec<u8>,
    buffers: Vec<Box<[u8]>>,
    /// State of the order of flows.
    random: u32,
    /// Packets are of that many flows, a power of two: all unless set.
    in_use: u32,
    now: u64,
    /// Memory of tables and sessions; 0 unless [`crate::account::Counting`] is the program's allocator.
    pub bytes: i64,
}

impl Tenants {
    /// In steady state: each flow has sent a packet.
    pub fn new(scale: Scale, service: Service) -> Self {
        let before = balance(Account::Other).bytes;
        let tables = Arc::new(tables(scale));
        let nat = Arc::new(Nat::new(NatConfig {
            pools: vec![(INTERNET, (0..64).map(|n| Ipv4Addr::new(203, 0, 113, n).into()).collect())],
            cores: 1,
            sessions: 2 * scale.all_flows(),
            seed: 5,
        }));
        let core = Core::new(tables, nat, 1, 3);
        let bytes = balance(Account::Other).bytes - before;
        let mut neighbours = exact_map(1);
        neighbours.insert(ROUTER.into(), Mac([2, 0, 0, 0, 0, 2]));
        let mut tenants = Tenants {
            core,
            neighbours,
            scale,
            service,
            template: template(),
            buffers: vec![vec![0; BUFFER].into(); BATCH],
            random: 1,
            in_use: scale.all_flows(),
            now: 1 << 40,
            bytes,
        };
        let all = scale.all_flows().max(PACKETS);
        let forwarded = tenants.run(false, all);
        assert_eq!(forwarded, all, "all pass: {:?}", tenants.core.counters());
        tenants
    }

    /// Forwards packets, each copied into a buffer first, as from a ring: the flows in turn, in an order without a
    /// pattern. Returns how many packets were forwarded.
    #[inline(never)]
    pub fn run(&mut self, together: bool, packets: u32) -> u32 {
        let mut forwarded = 0;
        let mut ahead = Ahead::default();
        for _ in 0..packets / BATCH as u32 {
            self.now += 10_000;
            let flows: [u32; BATCH] = std::array::from_fn(|_| self.next_flow());
            flows.iter().enumerate().for_each(|(place, flow)| self.receive(place, *flow));
            for vector in 0..BATCH / VECTOR {
                let places = vector * VECTOR..(vector + 1) * VECTOR;
                if together {
                    for buffer in black_box(&self.buffers[places.clone()]) {
                        self.core.look_ahead(&mut ahead, &buffer[HEADROOM..]);
                    }
                    self.core.fetch_ahead(&mut ahead);
                }
                places.for_each(|place| forwarded += u32::from(self.process(place)));
            }
        }
        forwarded
    }

    /// The same for [`PACKETS`], ns per packet.
    fn time(&mut self, together: bool) -> f64 {
        let began = Instant::now();
        assert_eq!(self.run(together, PACKETS), PACKETS, "all pass");
        began.elapsed().as_nanos() as f64 / f64::from(PACKETS)
    }

    /// Forwards one packet of a flow.
    pub fn forward(&mut self, flow: u32) -> bool {
        self.receive(0, flow);
        self.process(0)
    }

    /// All flows in use once: the full cycle of a linear congruential generator.
    fn next_flow(&mut self) -> u32 {
        self.random = self.random.wrapping_mul(0x0019_660d).wrapping_add(0x3c6e_f35f);
        self.random & (self.in_use - 1)
    }

    /// A packet of a flow arrives in a buffer.
    #[inline]
    fn receive(&mut self, place: usize, flow: u32) {
        let Scale { vpcs, vnics, .. } = self.scale;
        let (vpc, vnic, number) = (flow % vpcs, flow / vpcs % vnics, flow / vpcs / vnics);
        let frame = &mut self.buffers[place][HEADROOM..][..self.template.len()];
        frame.copy_from_slice(&self.template);
        frame[OUTER_SOURCE..OUTER_SOURCE + 4].copy_from_slice(&vtep(vpc, vnic).octets());
        frame[VNI..VNI + 4].copy_from_slice(&((1 + vpc) << 8).to_be_bytes());
        frame[INNER_SOURCE..INNER_SOURCE + 4].copy_from_slice(&self.scale.private(vnic).octets());
        let to = match self.service {
            Service::Vpc => self.scale.private(mix(flow) >> 8 & (vnics - 1)),
            Service::Eip | Service::Snat | Service::Idc | Service::Cloud => abroad(flow),
        };
        frame[INNER_SOURCE + 4..INNER_SOURCE + 8].copy_from_slice(&to.octets());
        frame[INNER_PORTS..INNER_PORTS + 2].copy_from_slice(&(1024 + number as u16).to_be_bytes());
    }

    #[inline]
    fn process(&mut self, place: usize) -> bool {
        let mut packet = Packet::new(&mut self.buffers[place], HEADROOM, HEADROOM + self.template.len());
        let context = Context { now: self.now, neighbours: &self.neighbours };
        matches!(black_box(self.core.process(context, &mut packet)), Verdict::Forward(_))
    }
}

impl Scale {
    /// A vNIC's address: each is below another route.
    fn private(self, vnic: u32) -> Ipv4Addr {
        Ipv4Addr::from_bits(0x0a00_0005 + ((vnic * (self.routes / self.vnics)) << 12))
    }
}

fn mix(flow: u32) -> u32 {
    flow.wrapping_mul(0x9e37_79b1)
}

/// A flow's destination on the Internet, 11.0.0.0 to 122.255.255.255: what has no other route.
fn abroad(flow: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(0x0b00_0000 + ((u64::from(mix(flow)) * 0x7000_0000) >> 32) as u32)
}

/// The host of a vNIC; ten vNICs or so have the same one.
fn vtep(vpc: u32, vnic: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(0x0a01_0000 + (vpc * 5 + vnic * 3) / 4)
}

fn tables(scale: Scale) -> Tables {
    let net = |text: &str| text.parse::<IpNet>().unwrap_or_else(|e| unreachable!("{text}: {e}"));
    let mut tables = Tables::new(vec![GATEWAY.into()], MAC, 1600, 7);
    for vpc in 0..scale.vpcs {
        let vni = 1 + vpc;
        let local = (0..scale.routes).map(|n| {
            let net = IpNet::new(Ipv4Addr::from_bits(0x0a00_0000 + (n << 12)).into(), 24);
            (net.unwrap_or_else(|e| unreachable!("/24: {e}")), Route::Local)
        });
        let routes = Lpm::new(local.chain([(net("0.0.0.0/0"), Route::Internet)]));
        let routes = routes.unwrap_or_else(|net| unreachable!("{net} twice"));
        let rule = |dst, protocol, passes| (Pattern { dst, protocol, ..Pattern::default() }, passes);
        let acl = Classifier::new([
            rule(None, Some(TCP), false),
            rule(Some(net("192.0.2.0/24")), None, false),
            rule(None, None, true),
        ]);
        let meter = Some(tables.new_meter(Rate { per_second: 1 << 40, burst: 1 << 30 }));
        tables.vpcs.insert(vni, Vpc { routes, acl: Some(acl), meter, snat: Some(0), routers: Vec::new() });
        for vnic in 0..scale.vnics {
            let mac = Mac([2, (vpc >> 16) as u8, (vpc >> 8) as u8, vpc as u8, (vnic >> 8) as u8, vnic as u8]);
            tables.add_host(vni, scale.private(vnic).into(), Host { vtep: vtep(vpc, vnic).into(), mac });
        }
    }
    tables.router = Some(ROUTER.into());
    let mut fib = Dir24::new(16, 1);
    // A route to everywhere has 16 million entries; where memory accesses are traced, that would take minutes.
    let nets: Vec<(Ipv4Addr, u8)> = match scale.all_flows() {
        flows @ ..=4096 => (0..flows).map(|flow| (abroad(flow), 24)).collect(),
        _ => vec![(Ipv4Addr::UNSPECIFIED, 0)],
    };
    for (address, len) in nets {
        if let Ok(IpNet::V4(net)) = IpNet::new(address.into(), len) {
            fib.insert(net, 0).unwrap_or_else(|e| unreachable!("{net}: {e}"));
        }
    }
    tables.fib4 = Some(fib);
    tables.next_hops = vec![NextHop { address: ROUTER.into() }];
    tables
}

/// A frame without what differs between flows.
fn template() -> Vec<u8> {
    let link =
        |packet: &[u8]| [&ethernet::Header::new(MAC, MAC, ethernet::ethertype::IPV4).emit()[..], packet].concat();
    let any = Ipv4Addr::UNSPECIFIED;
    let inner = link(&datagram(any, any, (0, 443), &[0; 64]));
    let header = vxlan::emit(Vni::new(1).unwrap_or(Vni::MAX));
    let frame = link(&datagram(any, GATEWAY, (50_000, vxlan::UDP_PORT), &[&header[..], &inner].concat()));
    debug_assert_eq!((frame[INNER_SOURCE - 3], frame.len()), (UDP, INNER + 34 + udp::HEADER_LEN + 64));
    frame
}

/// Times of a service, ns per packet.
#[derive(Clone, Debug)]
pub struct Times {
    /// The service.
    pub name: &'static str,
    /// Among few flows, one by one and in vectors.
    pub small_ns: [f64; 2],
    /// Among very many, one by one and in vectors.
    pub large_ns: [f64; 2],
    /// Time in vectors relative to one by one among very many, percent: the median of pairs.
    pub percent: f64,
    /// Memory of the large tables, bytes.
    pub bytes: i64,
}

/// Measures for half a minute.
pub fn times() -> Vec<Times> {
    let services = [("vpc", Service::Vpc), ("snat", Service::Snat)];
    let each = services.map(|(name, service)| {
        let small = pairs(&mut Tenants::new(Scale::SMALL, service));
        let mut tenants = Tenants::new(Scale::LARGE, service);
        let large = pairs(&mut tenants);
        let of = |pairs: &[[f64; 2]]| [0, 1].map(|n| median(pairs.iter().map(|pair| pair[n])));
        let percent = median(large.iter().map(|[alone, together]| 100.0 * together / alone));
        Times { name, small_ns: of(&small), large_ns: of(&large), percent, bytes: tenants.bytes }
    });
    each.into()
}

/// ns per packet, one by one and in vectors.
fn pairs(tenants: &mut Tenants) -> Vec<[f64; 2]> {
    let mut timed = |together| tenants.time(together);
    (0..PAIRS)
        .map(|pair| {
            let vectors_first = pair % 2 == 1;
            let [first, second] = [vectors_first, !vectors_first].map(&mut timed);
            if vectors_first { [second, first] } else { [first, second] }
        })
        .collect()
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

/// What packets to the Internet from a shared address wait for in vectors, with tables of one size.
#[derive(Clone, Copy, Debug)]
pub struct Wait {
    /// The whole packet, ns.
    pub packet_ns: f64,
    /// Of this, what it waits for the tables' lines, ns: the difference to packets of a few flows, with the same tables
    /// and the same instructions. The median of pairs.
    pub wait_ns: f64,
    /// Latency of one access to data of the size that the packets read, ns: the mean of before and after.
    pub latency_ns: f64,
}

/// Lines of flow and VPC that such a packet reads, as [`owners`] counts them.
pub const LINES_OF_SNAT: f64 = 20.0;

impl Wait {
    /// How many of these accesses overlap.
    pub fn overlap(&self) -> f64 {
        LINES_OF_SNAT * self.latency_ns / self.wait_ns
    }
}

/// Measures for some seconds. `lines`: of the data whose latency is measured, a power of two.
pub fn wait(scale: Scale, lines: u32) -> Wait {
    let mut tenants = Tenants::new(scale, Service::Snat);
    let before = latency_ns(lines);
    let pairs: Vec<[f64; 2]> = (0..PAIRS)
        .map(|_| {
            // The caches hold the few flows after as many packets.
            [FEW, scale.all_flows()].map(|flows| {
                tenants.in_use = flows;
                tenants.run(true, PACKETS);
                tenants.time(true)
            })
        })
        .collect();
    let packet_ns = median(pairs.iter().map(|pair| pair[1]));
    let wait_ns = median(pairs.iter().map(|[few, all]| all - few));
    Wait { packet_ns, wait_ns, latency_ns: (before + latency_ns(lines)) / 2.0 }
}

/// Flows whose entries a private cache holds.
const FEW: u32 = 64;

/// Latency of an access to memory that no cache has, ns: in as much memory as the sessions of [`Scale::LARGE`] take.
pub fn memory_latency_ns() -> f64 {
    latency_ns(MEMORY_LINES)
}

/// Lines that no cache holds, and lines that a shared cache holds and a private one does not.
pub const MEMORY_LINES: u32 = 1 << 22;
/// See [`MEMORY_LINES`].
pub const SHARED_LINES: u32 = 1 << 16;

/// Latency of an access to one of that many lines, a power of two, ns: each of a chain of them says where the next one
/// is.
fn latency_ns(count: u32) -> f64 {
    const STEPS: u32 = 1 << 17;
    #[derive(Clone, Copy)]
    #[repr(align(64))]
    struct Line(u32);
    let mut lines = vec![Line(0); count as usize];
    // The full cycle of a generator again; its low bits have patterns, so the high ones choose the page.
    let mut n = 0u32;
    let place = |n: u32| n.reverse_bits() >> (32 - count.trailing_zeros());
    for _ in 0..count {
        let next = n.wrapping_mul(0x0019_660d).wrapping_add(0x3c6e_f35f) & (count - 1);
        lines[place(n) as usize] = Line(place(next));
        n = next;
    }
    let mut at = 0;
    let mut timed = || {
        let began = Instant::now();
        (0..STEPS).for_each(|_| at = lines[at as usize].0);
        black_box(at);
        began.elapsed().as_nanos() as f64 / f64::from(STEPS)
    };
    median((0..21).map(|_| timed()))
}

/// The scale for tracing, where few entries share a line by chance. [`trace_lines`] forwards a packet of each flow.
pub const TRACED: Scale = Scale { vpcs: 32, vnics: 4, flows: 4, routes: 512 };

/// Its value changes before and after each packet of [`trace_lines`]: who watches all stores sees where packets begin and
/// end.
pub static MARK: AtomicU32 = AtomicU32::new(0);

/// Forwards a packet of each flow, decided alone, between marks. `ready` gets the addresses of the packet's buffer
/// before the first one.
pub fn trace_lines(service: Service, ready: impl FnOnce(Range<usize>)) {
    let mut tenants = Tenants::new(TRACED, service);
    let buffer = tenants.buffers[0].as_ptr_range();
    ready(buffer.start.addr()..buffer.end.addr());
    for flow in 0..TRACED.all_flows() {
        tenants.receive(0, flow);
        MARK.store(1, SeqCst);
        black_box(tenants.process(0));
        MARK.store(0, SeqCst);
    }
}

/// Owner of a cache line: who else's packets need it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Owner {
    /// All packets: the core's own data, its stack, and the tops of tables.
    All,
    /// The packet: its buffer.
    Packet,
    /// The core, written for each packet: rates of VPCs.
    Written,
    /// A flow.
    Flow,
    /// A vNIC: some of its flows.
    Vnic,
    /// A VPC: flows of some of its vNICs.
    Vpc,
    /// Several VPCs.
    Common,
}

/// Lines of one owner.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lines {
    /// Who else's packets need them.
    pub owner: Owner,
    /// Lines that a packet touches.
    pub each: f64,
    /// Different lines for each such flow, vNIC or VPC; or in all.
    pub different: f64,
}

/// Sorts the accesses of [`trace_lines`] by their owners. `packets`: of each flow, the lines, and whether each was
/// written.
pub fn owners(scale: Scale, buffer: Range<usize>, packets: &[BTreeMap<usize, bool>]) -> Vec<Lines> {
    let mut by_line: BTreeMap<usize, (Vec<u32>, bool)> = BTreeMap::new();
    for (flow, lines) in (0..).zip(packets) {
        for (line, written) in lines {
            let (flows, any) = by_line.entry(*line).or_default();
            flows.push(flow);
            *any |= written;
        }
    }
    let owner = |line: usize, flows: &[u32], written: bool| {
        let alike = |of: &dyn Fn(u32) -> u32| flows.iter().all(|flow| of(*flow) == of(flows[0]));
        if (buffer.start / 64..=buffer.end / 64).contains(&line) {
            Owner::Packet
        } else if flows.len() * 10 >= packets.len() * 9 {
            Owner::All
        } else if written {
            Owner::Written
        } else if flows.len() == 1 {
            Owner::Flow
        } else if alike(&|flow| flow % (scale.vpcs * scale.vnics)) {
            Owner::Vnic
        } else if alike(&|flow| flow % scale.vpcs) {
            Owner::Vpc
        } else {
            Owner::Common
        }
    };
    let mut counted: BTreeMap<Owner, (usize, usize)> = BTreeMap::new();
    for (line, (flows, written)) in &by_line {
        let (touched, different) = counted.entry(owner(*line, flows, *written)).or_default();
        *touched += flows.len();
        *different += 1;
    }
    let of = |(owner, (touched, different)): (Owner, (usize, usize))| {
        let owners = match owner {
            Owner::Flow => packets.len(),
            Owner::Vnic => (scale.vpcs * scale.vnics) as usize,
            Owner::Vpc => scale.vpcs as usize,
            Owner::All | Owner::Packet | Owner::Written | Owner::Common => 1,
        };
        let each = touched as f64 / packets.len().max(1) as f64;
        Lines { owner, each, different: different as f64 / owners.max(1) as f64 }
    };
    counted.into_iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_forward_every_packet() {
        for service in [Service::Vpc, Service::Snat] {
            let mut tenants = Tenants::new(Scale { vpcs: 64, vnics: 64, flows: 4, routes: 256 }, service);
            assert_eq!(tenants.run(true, PACKETS), PACKETS, "{service:?}");
            assert!(tenants.forward(77));
        }
    }
    #[test]
    fn lines_belong_to_those_whose_packets_need_them() {
        let scale = Scale { vpcs: 4, vnics: 2, flows: 2, routes: 2 };
        let packet = |flow: usize| {
            let (vpc, vnic) = (flow % 4, flow % 8);
            // The stack, the buffer, a rate, and what flow, vNIC, VPC, and a pair of VPCs have.
            let lines = [(1, true), (64, true), (100 + vpc, true), (200 + flow, false), (300 + vnic, false)];
            lines.into_iter().chain([(400 + vpc, false), (500 + vpc / 2, false)]).collect()
        };
        let packets: Vec<BTreeMap<usize, bool>> = (0..scale.all_flows() as usize).map(packet).collect();
        let found = owners(scale, 4096..4096 + 63, &packets);
        let of = |owner, different| Lines { owner, each: 1.0, different };
        let expected = [
            of(Owner::All, 1.0),
            of(Owner::Packet, 1.0),
            of(Owner::Written, 4.0),
            of(Owner::Flow, 1.0),
            of(Owner::Vnic, 1.0),
            of(Owner::Vpc, 1.0),
            of(Owner::Common, 2.0),
        ];
        assert_eq!(found, expected);
    }
}
