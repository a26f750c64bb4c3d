//! First match against trying the rules one by one.
#![allow(clippy::unwrap_used)]

use std::net::IpAddr;
use std::ops::RangeInclusive;

use bifrost_tables::{Classifier, Fields, IpNet, Pattern};
use proptest::prelude::*;
use proptest::sample::select;

fn matches(pattern: &Pattern, fields: &Fields) -> bool {
    let family = |net: Option<IpNet>, addr: IpAddr| net.is_none_or(|net| net.contains(&addr));
    let port = |range: &RangeInclusive<u16>, port: Option<u16>| match port {
        Some(port) => range.contains(&port),
        None => *range == (0..=u16::MAX),
    };
    fields.src.is_ipv4() == fields.dst.is_ipv4()
        && family(pattern.src, fields.src)
        && family(pattern.dst, fields.dst)
        && pattern.protocol.is_none_or(|p| p == fields.protocol)
        && port(&pattern.src_ports, fields.ports.map(|p| p.0))
        && port(&pattern.dst_ports, fields.ports.map(|p| p.1))
}

fn naive(rules: &[Pattern], fields: &Fields) -> Option<usize> {
    rules.iter().position(|pattern| matches(pattern, fields))
}

/// A few networks in both families that nest and touch; their first and last addresses are among those of the packets.
const NETS: [&str; 14] = [
    "0.0.0.0/0",
    "10.0.0.0/8",
    "10.0.0.0/24",
    "10.0.0.0/25",
    "10.0.0.128/25",
    "10.0.0.128/32",
    "10.0.1.0/24",
    "128.0.0.0/1",
    "255.255.255.255/32",
    "::/0",
    "2001:db8::/32",
    "2001:db8::/128",
    "2001:db8:8000::/33",
    "ffff::/16",
];
const ADDRESSES: [&str; 15] = [
    "0.0.0.0",
    "10.0.0.0",
    "10.0.0.127",
    "10.0.0.128",
    "10.0.0.129",
    "10.0.0.255",
    "10.0.1.0",
    "10.255.255.255",
    "127.255.255.255",
    "255.255.255.255",
    "::",
    "2001:db8::",
    "2001:db8:7fff:ffff::",
    "2001:db8:8000::",
    "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
];
const PORTS: [u16; 8] = [0, 1, 79, 80, 81, 1023, 1024, 65535];

fn net() -> impl Strategy<Value = Option<IpNet>> {
    prop::option::of(select(&NETS[..]).prop_map(|net| net.parse().unwrap()))
}

fn ports() -> impl Strategy<Value = RangeInclusive<u16>> {
    let port = || prop_oneof![select(&PORTS[..]), any::<u16>()];
    // Some of the ranges are empty.
    prop_oneof![Just(0..=u16::MAX), port().prop_map(|p| p..=p), (port(), port()).prop_map(|(a, b)| a..=b)]
}

fn protocol() -> impl Strategy<Value = u8> {
    select(vec![0u8, 1, 6, 17, 255])
}

fn pattern() -> impl Strategy<Value = Pattern> {
    (net(), net(), prop::option::of(protocol()), ports(), ports())
        .prop_map(|(src, dst, protocol, src_ports, dst_ports)| Pattern { src, dst, protocol, src_ports, dst_ports })
}

fn fields() -> impl Strategy<Value = Fields> {
    let addr = || select(&ADDRESSES[..]).prop_map(|a| a.parse::<IpAddr>().unwrap());
    let port = || prop_oneof![3 => select(&PORTS[..]), 1 => any::<u16>()];
    (addr(), addr(), protocol(), prop::option::weighted(0.9, (port(), port())))
        .prop_map(|(src, dst, protocol, ports)| Fields { src, dst, protocol, ports })
}

proptest! {
    #[test]
    fn agrees_with_trying_the_rules_one_by_one(
        rules in prop_oneof![prop::collection::vec(pattern(), 0..12), prop::collection::vec(pattern(), 0..if cfg!(miri) { 30 } else { 300 })],
        packets in prop::collection::vec(fields(), 60),
    ) {
        let classifier = Classifier::new(rules.iter().cloned().zip(0..));
        prop_assert_eq!(classifier.len(), rules.len());
        prop_assert_eq!(classifier.is_empty(), rules.is_empty());
        for fields in packets {
            prop_assert_eq!(classifier.lookup(&fields).copied(), naive(&rules, &fields), "{:?}", fields);
            let first = classifier.first(&fields);
            prop_assert!(first.is_none_or(|(index, value)| index == *value));
        }
    }
}

/// Prefixes of all lengths, in ranges that cross: the list that causes the most copies.
fn hostile(random: &mut fastrand::Rng, count: usize, v6: bool) -> Vec<Pattern> {
    let mut range = || {
        let (a, b) = (random.u16(..), random.u16(..));
        a.min(b)..=a.max(b)
    };
    let ranges: Vec<_> = (0..count).map(|_| (range(), range())).collect();
    let mut net = || {
        let addr =
            if v6 { IpAddr::from(random.u128(..).to_be_bytes()) } else { IpAddr::from(random.u32(..).to_be_bytes()) };
        // Around a few points only, so that they nest.
        let addr = match addr {
            IpAddr::V4(a) => IpAddr::V4((a.to_bits() & 0x0101_0101).into()),
            IpAddr::V6(a) => IpAddr::V6((a.to_bits() & 0x0101_0001 << 96).into()),
        };
        let len = random.u8(0..=if v6 { 128 } else { 32 });
        (random.u8(..) > 20).then(|| IpNet::new(addr, len).unwrap())
    };
    ranges
        .into_iter()
        .map(|(src_ports, dst_ports)| Pattern { src: net(), dst: net(), protocol: Some(6), src_ports, dst_ports })
        .collect()
}

#[test]
#[cfg_attr(miri, ignore = "hours")]
fn hostile_lists_stay_within_the_bound() {
    let mut random = fastrand::Rng::with_seed(1);
    let mut lists = vec![hostile(&mut random, 3000, false), hostile(&mut random, 3000, true)];
    // Each range is inside the one before, in both port fields, and in reverse order in one of them.
    lists.push((0..3000).map(|i| pattern_of(i..=65535 - i, i..=65535 - i)).collect());
    lists.push((0..3000).map(|i| pattern_of(i..=65535 - i, 3000 - i..=62535 + i)).collect());
    lists.push((0..3000).map(|i| pattern_of(i..=i + 30000, 3000 - i..=33000 - i)).collect());
    let mut found = 0;
    for rules in lists {
        let classifier = Classifier::new(rules.iter().cloned().zip(0..));
        let bytes = classifier.heap_bytes() / rules.len();
        assert!(bytes <= 2048, "{bytes} bytes a rule");
        for _ in 0..2000 {
            let rule = &rules[random.usize(..rules.len())];
            let side = |net: Option<IpNet>| net.map_or(IpAddr::from([10, 0, 0, 1]), |net| net.network());
            let mut port = |ports: &RangeInclusive<u16>| random.u16(ports.clone());
            let ports = Some((port(&rule.src_ports), port(&rule.dst_ports)));
            let fields = Fields { src: side(rule.src), dst: side(rule.dst), protocol: 6, ports };
            let expected = naive(&rules, &fields);
            assert_eq!(classifier.lookup(&fields).copied(), expected, "{fields:?}");
            found += usize::from(expected.is_some());
        }
    }
    assert!(found > 5000, "{found} of 10,000 packets have a rule");
}

fn pattern_of(src_ports: RangeInclusive<u16>, dst_ports: RangeInclusive<u16>) -> Pattern {
    Pattern { src_ports, dst_ports, ..Pattern::default() }
}

fn packet(src: &str, dst: &str, protocol: u8, ports: Option<(u16, u16)>) -> Fields {
    Fields { src: src.parse().unwrap(), dst: dst.parse().unwrap(), protocol, ports }
}

#[test]
fn the_edges_of_a_pattern() {
    let net = |s: &str| Some(s.parse::<IpNet>().unwrap());
    let any = Pattern::default;
    let cases: [(&str, Pattern, Fields, bool); 17] = [
        ("everything, IPv4", any(), packet("1.2.3.4", "5.6.7.8", 6, Some((1, 2))), true),
        ("everything, IPv6", any(), packet("::1", "::2", 6, Some((1, 2))), true),
        ("everything, no ports", any(), packet("1.2.3.4", "5.6.7.8", 1, None), true),
        ("two families", any(), packet("1.2.3.4", "::2", 6, None), false),
        ("0.0.0.0/0, IPv4", Pattern { src: net("0.0.0.0/0"), ..any() }, packet("1.2.3.4", "5.6.7.8", 6, None), true),
        ("0.0.0.0/0, IPv6", Pattern { src: net("0.0.0.0/0"), ..any() }, packet("::1", "::2", 6, None), false),
        ("::/0, IPv6", Pattern { dst: net("::/0"), ..any() }, packet("::1", "ffff::2", 6, None), true),
        ("::/0, IPv4", Pattern { dst: net("::/0"), ..any() }, packet("1.2.3.4", "5.6.7.8", 6, None), false),
        (
            "a network of each family",
            Pattern { src: net("1.0.0.0/8"), dst: net("::/0"), ..any() },
            packet("1.2.3.4", "5.6.7.8", 6, None),
            false,
        ),
        ("host bits", Pattern { src: net("10.0.0.9/24"), ..any() }, packet("10.0.0.1", "5.6.7.8", 6, None), true),
        ("first port", pattern_of(80..=90, 0..=u16::MAX), packet("1.2.3.4", "5.6.7.8", 6, Some((80, 0))), true),
        ("last port", pattern_of(80..=90, 0..=u16::MAX), packet("1.2.3.4", "5.6.7.8", 6, Some((90, 65535))), true),
        ("after it", pattern_of(0..=u16::MAX, 80..=90), packet("1.2.3.4", "5.6.7.8", 6, Some((80, 91))), false),
        ("no ports, nearly full", pattern_of(0..=65534, 0..=u16::MAX), packet("1.2.3.4", "5.6.7.8", 1, None), false),
        ("no ports, nearly full too", pattern_of(0..=u16::MAX, 1..=u16::MAX), packet("::1", "::2", 58, None), false),
        (
            "empty range",
            #[allow(clippy::reversed_empty_ranges)]
            pattern_of(90..=80, 0..=u16::MAX),
            packet("1.2.3.4", "5.6.7.8", 6, Some((85, 85))),
            false,
        ),
        (
            "protocol 0 is a protocol, too",
            Pattern { protocol: Some(0), ..any() },
            packet("1.2.3.4", "5.6.7.8", 6, Some((1, 2))),
            false,
        ),
    ];
    for (name, pattern, fields, expected) in cases {
        assert_eq!(matches(&pattern, &fields), expected, "{name}: the oracle");
        // Alone, and after other rules that make a tree necessary.
        let alone = Classifier::new([(pattern.clone(), 0)]);
        assert_eq!(alone.lookup(&fields).is_some(), expected, "{name}");
        let other = |i: u16| Pattern { protocol: Some(200), dst_ports: i..=i + 7, ..Pattern::default() };
        let among = Classifier::new((0..50).map(|i| (other(i), 1)).chain([(pattern, 0)]));
        assert_eq!(among.lookup(&fields).copied(), expected.then_some(0), "{name}, among others");
    }
}

#[test]
fn the_first_rule_wins_and_its_value_is_found() {
    let rules = ["10.0.0.0/8", "10.0.0.0/24", "10.0.0.1/32"];
    for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
        let rules = order.map(|i| (Pattern { src: Some(rules[i].parse().unwrap()), ..Pattern::default() }, rules[i]));
        let classifier = Classifier::new(rules.clone());
        let found = classifier.lookup(&packet("10.0.0.1", "10.9.9.9", 6, None));
        assert_eq!(found, Some(&rules[0].1));
    }
    assert!(Classifier::<()>::new([]).lookup(&packet("10.0.0.1", "10.9.9.9", 6, None)).is_none());
}
