//! The cost of look-ups: nanoseconds each, time to build, bytes per entry.
//! `cargo bench -p bifrost-bench --bench tables` runs it.
#![allow(clippy::unwrap_used)]

use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Instant;

use bifrost_bench::account::{Account, Counting, balance};
use bifrost_tables::{Classifier, Fields, IpNet, Lpm, Pattern};
use fastrand::Rng;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Look-ups per measurement, each with another key.
const KEYS: usize = 1 << 14;
const REPETITIONS: usize = 15;

fn main() {
    println!("{:34} {:>9} {:>10} {:>10} {:>8}", "", "entries", "lookup ns", "build ms", "bytes");
    for (name, make) in LISTS {
        for count in [10, 100, 1000, 10_000] {
            let mut random = Rng::with_seed(1);
            let rules: Vec<Pattern> = (0..count).map(|_| make(&mut random)).collect();
            let keys: Vec<Fields> = (0..KEYS).map(|_| packet(&mut random, &rules)).collect();
            let (classifier, build, bytes) = built(|| Classifier::new(rules.iter().cloned().zip(0u32..)));
            row(name, count, median_ns(&keys, |key| classifier.lookup(key).copied()), build, bytes);
            if count <= 1000 {
                let scan = |key: &Fields| rules.iter().position(|rule| matches(rule, key)).map(|i| i as u32);
                row("  tried one by one", count, median_ns(&keys, scan), 0.0, 0);
            }
        }
    }
    for (name, make) in ROUTES {
        for count in [100_000, 1_000_000] {
            let mut random = Rng::with_seed(1);
            let mut nets: Vec<IpNet> = (0..count).map(|_| make(&mut random).trunc()).collect();
            let keys: Vec<IpAddr> = (0..KEYS)
                .map(|_| {
                    let net = nets[random.usize(..count)];
                    inside(&mut random, net)
                })
                .collect();
            nets.sort_unstable();
            nets.dedup();
            random.shuffle(&mut nets);
            let (lpm, build, bytes) = built(|| Lpm::new(nets.iter().copied().zip(0u32..)).unwrap());
            row(name, lpm.len(), median_ns(&keys, |&key| lpm.lookup(key).copied()), build, bytes);
        }
    }
}

fn row(name: &str, entries: usize, ns: f64, build_ms: f64, bytes: usize) {
    println!("{name:34} {entries:>9} {ns:>10.1} {build_ms:>10.1} {:>8}", bytes / entries);
}

/// The result of `build`, its duration (ms, the minimum of three), and the bytes that it holds.
fn built<T>(build: impl Fn() -> T) -> (T, f64, usize) {
    let times = (0..3).map(|_| {
        let start = Instant::now();
        drop(black_box(build()));
        start.elapsed().as_secs_f64() * 1e3
    });
    let best = times.fold(f64::INFINITY, f64::min);
    let before = balance(Account::Other).bytes;
    let value = build();
    (value, best, (balance(Account::Other).bytes - before) as usize)
}

/// Median over repetitions, ns per key.
fn median_ns<K>(keys: &[K], mut lookup: impl FnMut(&K) -> Option<u32>) -> f64 {
    let mut times: Vec<f64> = (0..REPETITIONS)
        .map(|_| {
            let start = Instant::now();
            let sum = keys.iter().fold(0u32, |sum, key| sum.wrapping_add(lookup(black_box(key)).unwrap_or(7)));
            black_box(sum);
            start.elapsed().as_nanos() as f64 / keys.len() as f64
        })
        .collect();
    times.sort_unstable_by(f64::total_cmp);
    times[REPETITIONS / 2]
}

type Make<T> = fn(&mut Rng) -> T;

const LISTS: [(&str, Make<Pattern>); 4] = [
    ("security group", security_group),
    ("security group, IPv6", security_group_v6),
    ("network ACL, both addresses", acl),
    ("crossing port ranges only", crossing),
];

/// Sources of some networks may reach some ports; an eighth of the rules applies to any source.
fn security_group(random: &mut Rng) -> Pattern {
    let src = (random.u8(..8) > 0).then(|| {
        let len = [32, 32, 32, 28, 24, 24, 20, 16][random.usize(..8)];
        IpNet::new(IpAddr::V4((0x0a00_0000 | random.u32(..1 << 20)).into()), len).unwrap().trunc()
    });
    group(random, src)
}

fn security_group_v6(random: &mut Rng) -> Pattern {
    let src = (random.u8(..8) > 0).then(|| {
        let len = [128, 128, 128, 64, 64, 56, 48, 48][random.usize(..8)];
        let bits = 0xfd00 << 112 | u128::from(random.u32(..1 << 16)) << 64 | u128::from(random.u32(..1 << 8));
        IpNet::new(IpAddr::V6(bits.into()), len).unwrap().trunc()
    });
    group(random, src)
}

fn group(random: &mut Rng, src: Option<IpNet>) -> Pattern {
    let port = random.u16(1..2000);
    let dst_ports = match random.u8(..10) {
        0 if src.is_some() => 0..=u16::MAX,
        1 | 2 => port..=port + random.u16(..2000),
        _ => port..=port,
    };
    let protocol = Some(if random.u8(..5) == 0 { 17 } else { 6 });
    Pattern { src, protocol, dst_ports, ..Pattern::default() }
}

fn acl(random: &mut Rng) -> Pattern {
    let mut pattern = security_group(random);
    let len = [32, 24, 24, 16][random.usize(..4)];
    let dst = IpNet::new(IpAddr::V4((0x0b00_0000 | random.u32(..1 << 18)).into()), len).unwrap().trunc();
    pattern.dst = (random.u8(..4) > 0).then_some(dst);
    pattern
}

/// The hostile case: wide ranges in both fields.
fn crossing(random: &mut Rng) -> Pattern {
    let mut range = || {
        let (a, b) = (random.u16(..), random.u16(..));
        a.min(b)..=a.max(b)
    };
    let (src_ports, dst_ports) = (range(), range());
    let protocol = Some(random.u8(..));
    Pattern { src_ports, dst_ports, protocol, ..Pattern::default() }
}

/// A packet that matches a rule, or, every fourth time, has another destination port.
fn packet(random: &mut Rng, rules: &[Pattern]) -> Fields {
    let rule = &rules[random.usize(..rules.len())];
    let v6 = rule.src.or(rule.dst).is_some_and(|net| net.addr().is_ipv6());
    let any = if v6 { "fd00::/16" } else { "10.0.0.0/8" };
    let src = inside(random, rule.src.unwrap_or(any.parse().unwrap()));
    let dst = inside(random, rule.dst.unwrap_or(any.parse().unwrap()));
    let dst_port = if random.u8(..4) == 0 { random.u16(..) } else { random.u16(rule.dst_ports.clone()) };
    let ports = Some((random.u16(rule.src_ports.clone()), dst_port));
    Fields { src, dst, protocol: rule.protocol.unwrap_or(6), ports }
}

fn matches(pattern: &Pattern, fields: &Fields) -> bool {
    let (src_port, dst_port) = fields.ports.unwrap_or_default();
    pattern.protocol.is_none_or(|p| p == fields.protocol)
        && pattern.src_ports.contains(&src_port)
        && pattern.dst_ports.contains(&dst_port)
        && pattern.src.is_none_or(|net| net.contains(&fields.src))
        && pattern.dst.is_none_or(|net| net.contains(&fields.dst))
}

const ROUTES: [(&str, Make<IpNet>); 4] = [
    ("routes, IPv4, any length", |random| IpNet::new(v4(random.u32(..)), random.u8(8..=32)).unwrap()),
    ("routes, IPv4, a VPC's", |random| {
        let len = if random.u8(..10) == 0 { 24 } else { 32 };
        IpNet::new(v4(0x0a00_0000 | random.u32(..1 << 24)), len).unwrap()
    }),
    ("routes, IPv6, any length", |random| IpNet::new(v6(random.u128(..)), random.u8(16..=128)).unwrap()),
    ("routes, IPv6, a VPC's", |random| {
        let len = [128, 128, 128, 64][random.usize(..4)];
        let subnet = u128::from(random.u16(..)) << 64;
        IpNet::new(v6(0xfd00_1234_5678 << 80 | subnet | u128::from(random.u64(..))), len).unwrap()
    }),
];

fn v4(bits: u32) -> IpAddr {
    IpAddr::V4(Ipv4Addr::from_bits(bits))
}

fn v6(bits: u128) -> IpAddr {
    IpAddr::V6(Ipv6Addr::from_bits(bits))
}

/// A random address in a network.
fn inside(random: &mut Rng, net: IpNet) -> IpAddr {
    match net {
        IpNet::V4(net) => v4(net.network().to_bits() | random.u32(..) & net.hostmask().to_bits()),
        IpNet::V6(net) => v6(net.network().to_bits() | random.u128(..) & net.hostmask().to_bits()),
    }
}
