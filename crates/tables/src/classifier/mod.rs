//! First match of an ordered list of rules.

mod build;
mod tree;

use std::net::IpAddr;
use std::ops::RangeInclusive;

use ipnet::IpNet;

use build::build;
use tree::{FULL, Point, Region, Tree};

/// What a rule matches. `None` and full ranges match everything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern {
    /// Where packets come from; host bits are ignored.
    pub src: Option<IpNet>,
    /// Where they go; host bits are ignored.
    pub dst: Option<IpNet>,
    /// The protocol number of the IP header, or of the last IPv6 extension header.
    pub protocol: Option<u8>,
    /// Source ports. An empty range matches nothing.
    pub src_ports: RangeInclusive<u16>,
    /// Destination ports. An empty range matches nothing.
    pub dst_ports: RangeInclusive<u16>,
}

/// Every packet.
impl Default for Pattern {
    fn default() -> Self {
        Pattern { src: None, dst: None, protocol: None, src_ports: 0..=u16::MAX, dst_ports: 0..=u16::MAX }
    }
}

/// A packet's fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fields {
    /// Where it comes from.
    pub src: IpAddr,
    /// Where it goes.
    pub dst: IpAddr,
    /// Its protocol number.
    pub protocol: u8,
    /// Source and destination port; `None` where there are none to look at (ICMP, later fragments): such packets match
    /// only patterns whose port ranges are full.
    pub ports: Option<(u16, u16)>,
}

/// Values of an ordered list of rules: a packet gets that of the first one it matches.
///
/// A pattern with neither source nor destination network matches both families, one with an IPv4 network only IPv4.
///
/// # How it searches
///
/// A segment tree for each level, one field a level: the list is divided by the field in which it has the most different
/// ranges, each part by the next field, until eight rules are left, which are just tried. Ranges that nest without
/// crossing, as prefixes do, are not divided into segments but chained from the narrowest to the widest. Whatever cannot
/// hold an earlier match than the one already found is skipped. For each level it takes a binary search and at most
/// log₂ of the number of ranges parts to look into; lists as people write them have one to three that are not empty.
///
/// # Bounds
///
/// Dividing copies a rule into several parts, and hostile lists (wide ranges that cross in all fields) into very many. A
/// list of n rules may have 32·n copies; the parts that would need more are searched one by one. That bounds the memory
/// to 2 KB a rule, whatever the list.
///
/// `cargo bench -p bifrost-bench --bench tables` measures what it costs.
#[derive(Clone, Debug)]
pub struct Classifier<T> {
    values: Vec<T>,
    v4: Tree,
    v6: Tree,
    /// Where an IPv6 network begins or has just ended, ascending: source, destination. The number of those up to an
    /// address is its coordinate.
    v6_edges: [Vec<u128>; 2],
}

impl<T> Classifier<T> {
    /// Of rules in the order in which they are tried.
    pub fn new(rules: impl IntoIterator<Item = (Pattern, T)>) -> Self {
        let (patterns, values): (Vec<Pattern>, Vec<T>) = rules.into_iter().unzip();
        let v6_edges = [edges(patterns.iter().map(|p| p.src)), edges(patterns.iter().map(|p| p.dst))];
        let v4 = |net: IpNet, _| match net {
            IpNet::V4(net) => Some((net.network().to_bits(), net.broadcast().to_bits())),
            IpNet::V6(_) => None,
        };
        let v6 = |net: IpNet, side: usize| match net {
            IpNet::V6(net) if net.prefix_len() == 0 => Some(FULL),
            IpNet::V6(net) => Some((
                coordinate(&v6_edges[side], net.network().to_bits()),
                coordinate(&v6_edges[side], net.broadcast().to_bits()),
            )),
            IpNet::V4(_) => None,
        };
        Classifier { v4: build(regions(&patterns, v4)), v6: build(regions(&patterns, v6)), v6_edges, values }
    }

    /// The value of the first rule that the packet matches.
    pub fn lookup(&self, fields: &Fields) -> Option<&T> {
        self.first(fields).map(|(_, value)| value)
    }

    /// The first rule that the packet matches: its place in the list, and its value.
    pub fn first(&self, fields: &Fields) -> Option<(usize, &T)> {
        let (tree, src, dst) = match (fields.src, fields.dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => (&self.v4, src.to_bits(), dst.to_bits()),
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                let [sources, destinations] = &self.v6_edges;
                (&self.v6, coordinate(sources, src.to_bits()), coordinate(destinations, dst.to_bits()))
            }
            _ => return None,
        };
        let (src_port, dst_port) = match fields.ports {
            Some((src, dst)) => (u32::from(src), u32::from(dst)),
            None => (NO_PORT, NO_PORT),
        };
        let point: Point = [src, dst, dst_port, src_port, u32::from(fields.protocol)];
        let place = tree.first(&point)? as usize;
        Some((place, self.values.get(place)?))
    }

    /// Number of rules.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Whether there is no rule.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// Memory on the heap, bytes; without what the values own.
    pub fn heap_bytes(&self) -> usize {
        let edges: usize = self.v6_edges.iter().map(|e| e.capacity() * size_of::<u128>()).sum();
        self.v4.heap_bytes() + self.v6.heap_bytes() + edges + self.values.capacity() * size_of::<T>()
    }
}

/// A port beside all there are: only full ranges hold it.
const NO_PORT: u32 = 1 << 16;

/// Rules that can match in one family: their number, and what they match. `range` knows the networks of that family.
fn regions(
    patterns: &[Pattern],
    range: impl Fn(IpNet, usize) -> Option<(u32, u32)>,
) -> impl Iterator<Item = (u32, Region)> {
    patterns.iter().enumerate().filter_map(move |(number, p)| {
        let side = |net: Option<IpNet>, side| net.map_or(Some(FULL), |net| range(net, side));
        let ranges =
            [side(p.src, 0)?, side(p.dst, 1)?, ports(&p.dst_ports)?, ports(&p.src_ports)?, protocol(p.protocol)];
        Some((number as u32, Region::new(ranges)))
    })
}

fn ports(range: &RangeInclusive<u16>) -> Option<(u32, u32)> {
    match (*range.start(), *range.end()) {
        (0, u16::MAX) => Some(FULL),
        (first, last) => (first <= last).then_some((u32::from(first), u32::from(last))),
    }
}

fn protocol(protocol: Option<u8>) -> (u32, u32) {
    protocol.map_or(FULL, |p| (u32::from(p), u32::from(p)))
}

fn edges(nets: impl Iterator<Item = Option<IpNet>>) -> Vec<u128> {
    let mut edges: Vec<u128> = Vec::new();
    for net in nets.flatten() {
        let IpNet::V6(net) = net else { continue };
        edges.push(net.network().to_bits());
        edges.extend(net.broadcast().to_bits().checked_add(1));
    }
    edges.sort_unstable();
    edges.dedup();
    edges.shrink_to_fit();
    edges
}

fn coordinate(edges: &[u128], bits: u128) -> u32 {
    edges.partition_point(|&edge| edge <= bits) as u32
}
