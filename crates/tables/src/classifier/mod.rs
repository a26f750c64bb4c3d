//! First match of an ordered list of rules.

mod build;
mod tree;

use std::net::IpAddr;
use std::ops::RangeInclusive;

use ipnet::IpNet;

use crate::prefetch::prefetch;
use build::build;
use tree::{FULL, Point, Region, Tree};

/// What a rule matches. `None` and full ranges match everything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern {
    /// Source network; host bits are ignored.
    pub src: Option<IpNet>,
    /// Destination network; host bits are ignored.
    pub dst: Option<IpNet>,
    /// The protocol number of the IP header, or of the last IPv6 extension header.
    pub protocol: Option<u8>,
    /// Source ports. An empty range matches nothing.
    pub src_ports: RangeInclusive<u16>,
    /// Destination ports. An empty range matches nothing.
    pub dst_ports: RangeInclusive<u16>,
}

/// Matches every packet.
impl Default for Pattern {
    fn default() -> Self {
        Pattern { src: None, dst: None, protocol: None, src_ports: 0..=u16::MAX, dst_ports: 0..=u16::MAX }
    }
}

/// A packet's fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fields {
    /// Source address.
    pub src: IpAddr,
    /// Destination address.
    pub dst: IpAddr,
    /// Protocol number.
    pub protocol: u8,
    /// Source and destination port; `None` if the packet has none (ICMP, later fragments): it then matches only
    /// patterns whose port ranges are full.
    pub ports: Option<(u16, u16)>,
}

/// An ordered list of rules with a value each: a packet gets the value of the first rule that it matches.
///
/// A pattern with neither source nor destination network matches both families, one with an IPv4 network only IPv4.
///
/// # Algorithm
///
/// A tree of segment trees, one field per level. The list is divided by the field with the most distinct ranges, each
/// part by the next field, until at most eight rules are left; these are tried one by one. Ranges that nest without
/// crossing, as prefixes do, are not split into segments but chained from the narrowest to the widest. A lookup skips
/// every part that cannot contain an earlier match than the one found. Each level costs a binary search and visits at
/// most log₂ of the number of ranges parts; in lists that people write, one to three of these are not empty.
///
/// # Bounds
///
/// Dividing copies a rule into several parts, and a hostile list (wide ranges that cross in all fields) into a great
/// number of them. A list of n rules may have 32·n copies; the parts that would need more are searched one by one. That
/// bounds the memory to 2 KB per rule for any list.
///
/// `cargo bench -p bifrost-bench --bench tables` measures the cost.
#[derive(Clone, Debug)]
pub struct Classifier<T> {
    values: Vec<T>,
    v4: Tree,
    v6: Tree,
    /// Points where an IPv6 network starts or has just ended, ascending: source, destination. The coordinate of an
    /// address is the number of points up to it.
    v6_edges: [Vec<u128>; 2],
}

impl<T> Classifier<T> {
    /// The values, in the order of the rules.
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

    /// The first rule that the packet matches: its index in the list, and its value.
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
        let index = tree.first(&point)? as usize;
        Some((index, self.values.get(index)?))
    }

    /// Prefetches what a lookup of a family reads first; in a list of few rules, that is all it reads.
    #[inline]
    pub fn fetch_ahead(&self, is_v6: bool) {
        let tree = if is_v6 { &self.v6 } else { &self.v4 };
        tree.fetch_ahead();
        self.values.first().into_iter().for_each(prefetch);
    }

    /// Number of rules.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Whether the list is empty.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// Heap memory, bytes; without memory that the values own.
    pub fn heap_bytes(&self) -> usize {
        let edges: usize = self.v6_edges.iter().map(|e| e.capacity() * size_of::<u128>()).sum();
        self.v4.heap_bytes() + self.v6.heap_bytes() + edges + self.values.capacity() * size_of::<T>()
    }
}

/// A port outside the valid range: only full ranges contain it.
const NO_PORT: u32 = 1 << 16;

/// Rules that can match in one family: their number, and their ranges. `range` knows the networks of that family.
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
