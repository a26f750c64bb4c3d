//! The savings by vectors: packets of very many conversations, evaluated one by one or sixteen together (Triton
//! paper, section 5.1).

use std::hint::black_box;
use std::net::IpAddr;
use std::time::Instant;

use bifrost_avs::{
    Direction, FlowLimits, GATEWAY_MAC, GroupId, GroupRule, Ordering, Pattern, PeerId, Port, PortId, Reliability,
    Route, SecurityGroup, SessionLimits, Switch, Tables, VECTOR, Vpc,
};
use bifrost_nic::{Offload, Parsed, parse};
use bifrost_tables::IpNet;
use bifrost_wire::{Mac, Vni};

/// Frames in a guest's buffers at a time, as many as a batch has.
const BATCH: usize = 32;
/// Bytes of a frame.
const FRAME: usize = 64;
/// Packets between two readings of the clock: some milliseconds, so that the machine is equally fast for both of a
/// pair.
const PACKETS: usize = 1 << 15;
/// Number of switches, built one after the other, and pairs with each. Memory latency depends on the pages that a
/// switch was given.
const BUILDS: usize = 15;
const PAIRS: usize = 33;
/// Conversations per address.
const PORTS: u32 = 16;

/// A switch that knows `conversations` conversations of one guest, in a network with security groups.
struct Bench {
    switch: Switch,
    /// The fields that distinguish the conversations' frames, in the order of their arrival: destination, source
    /// port.
    order: Vec<([u8; 4], [u8; 2])>,
    /// The index of the next conversation.
    next: usize,
    frames: [[u8; FRAME]; BATCH],
    now_ns: u64,
}

/// Times for parsing and evaluating packets.
#[derive(Clone, Debug)]
pub struct Times {
    /// Whether there were a million conversations, and a record for each.
    pub many: bool,
    /// Numbers of conversations and of records.
    pub name: String,
    /// One by one, ns per packet.
    pub alone_ns: f64,
    /// In vectors, ns per packet.
    pub vectors_ns: f64,
    /// Time in vectors relative to one by one, percent; the median of pairs, in which the order alternates.
    pub percent: f64,
}

/// Conversations, and flow records: few; as many as fit into the processor's caches; a million, with the default
/// number of records and with the maximum.
const LOADS: [(u32, u32); 4] = [(256, 1 << 16), (1 << 15, 1 << 16), (MANY, 1 << 15), (MANY, FlowLimits::MAX_RECORDS)];

const MANY: u32 = 1 << 20;

/// Measures all loads, alternating, because memory latency changes within seconds with other work of the machine's
/// host. Half a minute.
pub fn times() -> Vec<Times> {
    let mut runs = LOADS.map(|_| Vec::with_capacity(BUILDS * PAIRS));
    for _ in 0..BUILDS {
        for ((conversations, records), runs) in LOADS.into_iter().zip(&mut runs) {
            measure(conversations, records, runs);
        }
    }
    LOADS.into_iter().zip(runs).map(|(load, runs)| summary(load, runs)).collect()
}

/// Pairs with one switch, ns per packet: one by one, and in vectors.
fn measure(conversations: u32, records: u32, runs: &mut Vec<[f64; 2]>) {
    let mut bench = Bench::new(conversations, records);
    let mut timed = |together| {
        let began = Instant::now();
        assert!(bench.run(together, PACKETS), "all pass");
        began.elapsed().as_nanos() as f64 / PACKETS as f64
    };
    runs.extend((0..PAIRS).map(|pair| {
        let vectors_first = pair % 2 == 1;
        let [first, second] = [vectors_first, !vectors_first].map(&mut timed);
        if vectors_first { [second, first] } else { [first, second] }
    }));
}

fn summary((conversations, records): (u32, u32), mut runs: Vec<[f64; 2]>) -> Times {
    let mut median = |of: fn(&[f64; 2]) -> f64| {
        runs.sort_unstable_by(|a, b| of(a).total_cmp(&of(b)));
        of(&runs[runs.len() / 2])
    };
    Times {
        many: conversations >= MANY && records >= conversations,
        name: format!("vectors.{conversations}_conversations.{records}_records"),
        alone_ns: median(|run| run[0]),
        vectors_ns: median(|run| run[1]),
        percent: median(|run| 100.0 * run[1] / run[0]),
    }
}

impl Bench {
    fn new(conversations: u32, records: u32) -> Self {
        let mut switch = Switch::build(&tables(records), 7).unwrap_or_else(|e| unreachable!("the tables: {e}"));
        let now_ns = 1 << 40;
        switch.advance(now_ns);
        // All of them once, in an order without a pattern: the full cycle of a linear congruential generator.
        let mut n = 1u32;
        let order = (0..conversations).map(|_| {
            n = n.wrapping_mul(0x0019_660d).wrapping_add(0x3c6e_f35f) & (conversations - 1);
            let (address, port) = (n / PORTS, 1024 + (n % PORTS) as u16);
            ([10, 1, (address >> 8) as u8, address as u8], port.to_be_bytes())
        });
        let order = order.collect();
        let mut bench = Bench { switch, order, next: 0, frames: [frame(); BATCH], now_ns };
        let all = (conversations as usize).max(PACKETS);
        assert!(bench.run(false, all) && bench.run(false, all), "all pass");
        assert_eq!(bench.switch.session_counters().current, u64::from(conversations));
        bench
    }

    /// Evaluates the next packets, in batches. Returns whether all passed.
    #[inline(never)]
    fn run(&mut self, together: bool, packets: usize) -> bool {
        let Bench { switch, order, next, frames, now_ns } = self;
        let mut passed = 0;
        let mut parsed: Vec<Parsed> = Vec::with_capacity(VECTOR);
        let mut judge = |switch: &mut Switch, frame: &[u8], parsed: &Parsed| {
            let verdict = switch.from_guest(PortId(0), frame, FRAME, Offload::default(), parsed);
            passed += usize::from(black_box(verdict).passes());
        };
        for _ in 0..packets / BATCH {
            *now_ns += 1;
            switch.advance(*now_ns);
            let from = *next % order.len();
            *next = from + BATCH;
            for (frame, (address, port)) in frames.iter_mut().zip(&order[from..]) {
                frame[30..34].copy_from_slice(address);
                frame[34..36].copy_from_slice(port);
            }
            let batch = black_box(&*frames);
            if together {
                for vector in batch.chunks(VECTOR) {
                    parsed.clear();
                    parsed.extend(vector.iter().filter_map(|frame| parse(frame, FRAME).ok()));
                    switch.fetch_ahead(PortId(0), parsed.iter());
                    vector.iter().zip(&parsed).for_each(|(frame, parsed)| judge(switch, frame, parsed));
                }
            } else {
                for frame in batch {
                    let Ok(parsed) = parse(frame, FRAME) else { continue };
                    judge(switch, frame, &parsed);
                }
            }
        }
        passed == packets
    }
}

/// A UDP datagram from the guest through the gateway.
fn frame() -> [u8; FRAME] {
    let mut frame = [0; FRAME];
    frame[..6].copy_from_slice(&GATEWAY_MAC.0);
    frame[6..12].copy_from_slice(&MAC.0);
    frame[12..14].copy_from_slice(&[8, 0]);
    frame[14..34].copy_from_slice(&[0x45, 0, 0, 50, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 1, 0, 0]);
    frame[36..40].copy_from_slice(&[0, 53, 0, 30]);
    frame
}

const MAC: Mac = Mac([2, 0, 0, 0, 0, 1]);

/// One guest, 10.0.0.1, and networks of 10.1.0.0/16 behind another host.
fn tables(records: u32) -> Tables {
    let vni = Vni::new(100).unwrap_or_default();
    let net = |addr: [u8; 4], len| IpNet::new(addr.into(), len).unwrap_or_else(|e| unreachable!("{len}: {e}"));
    let route =
        |n: u8| Route { vni, prefix: net([10, 1, n, 0], 24), peer: PeerId(1), mac: Mac([2, 0, 0, 0, 0, 2]), mtu: 1500 };
    let any = |direction| GroupRule::new(direction, Pattern::default());
    Tables {
        vpcs: vec![Vpc {
            vni,
            reliability: Reliability::Tcp,
            ordering: Ordering::Flow,
            gateways: vec![IpAddr::from([10, 0, 0, 254])],
            acl: vec![],
        }],
        ports: vec![Port {
            id: PortId(0),
            vni,
            mac: MAC,
            addresses: vec![IpAddr::from([10, 0, 0, 1])],
            routed: vec![],
            mtu: 1500,
            groups: vec![GroupId(0)],
            home: None,
        }],
        routes: (0..=255).map(route).collect(),
        groups: vec![SecurityGroup::new(vec![any(Direction::Egress)])],
        flows: FlowLimits { records, vectors: true },
        sessions: SessionLimits { total: 1 << 21, per_port: 1 << 21 },
        ..Tables::default()
    }
}
