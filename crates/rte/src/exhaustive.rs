//! Explores every state, up to a stated bound, of the windows and the flow table together, without engine, clock or
//! randomness.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};

use bifrost_wire::bifrost::{AckHeader, AckKind, Cid, Packet, PathId, Psn, Tick, Version, parse};

use crate::config::Ordering;
use crate::flow_table::FlowTable;
use crate::recv_window::{Check, Placed, RecvPage, RecvWindow};
use bifrost_transport::pool::Pool;

/// PSNs shortly before a boundary: of a page, of the window's modulus, of the PSN space.
const STARTS: [u32; 3] = [62, 4094, u32::MAX - 1];

/// Packets that are sent, delivered and given up together, as one buffer of a guest.
#[derive(Clone, Copy, Hash)]
struct Group {
    first: u32,
    count: u32,
    flow: u32,
    delivered: bool,
    given_up: bool,
}

/// A sender's flow table, a receiver's window, and the packets between them.
#[derive(Clone)]
struct Link {
    start: u32,
    flows: FlowTable,
    pool: Pool<RecvPage>,
    window: RecvWindow,
    groups: Vec<Group>,
    distances: Vec<u8>,
    /// The receiver's base as far as the sender knows it, relative to the start.
    known: u32,
    /// The latest SKIP that arrived.
    skipped: u32,
    /// Which packets the guest has seen, and the latest packet of each flow.
    seen: Vec<bool>,
    latest: [Option<u32>; 3],
}

impl Link {
    fn new(start: u32) -> Self {
        Link {
            start,
            flows: FlowTable::new(Psn(start)),
            pool: Pool::new(32),
            window: RecvWindow::new(Psn(start)),
            groups: Vec::new(),
            distances: Vec::new(),
            known: 0,
            skipped: 0,
            seen: Vec::new(),
            latest: [None; 3],
        }
    }

    /// Everything that affects what can happen next. The flow table follows from what was sent.
    fn key(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (&self.groups, &self.distances, self.known, self.skipped, &self.seen).hash(&mut hasher);
        self.window.hash_with(&self.pool, &mut hasher);
        hasher.finish()
    }

    fn base(&self) -> u32 {
        self.window.base().0.wrapping_sub(self.start)
    }

    fn psn(&self, packet: u32) -> Psn {
        Psn(self.start.wrapping_add(packet))
    }

    fn send(&mut self, flow: u32, count: u32, known: u32) {
        self.known = known;
        let first = self.seen.len() as u32;
        let published = self.psn(known);
        for packet in first..first + count {
            let psn = self.psn(packet);
            self.distances.push(if packet == first {
                self.flows.distance(flow, psn, published)
            } else {
                self.flows.note(flow, psn);
                1
            });
            self.seen.push(false);
        }
        self.groups.push(Group { first, count, flow, delivered: false, given_up: false });
    }

    fn deliver(&mut self, group: usize, backwards: bool) {
        let Group { first, count, .. } = self.groups[group];
        self.groups[group].delivered = true;
        for i in 0..count {
            let packet = if backwards { first + count - 1 - i } else { first + i };
            let psn = self.psn(packet);
            let mut shown = Vec::new();
            if self.window.check(&self.pool, psn) == Check::New {
                let placed = Placed { psn, distance: self.distances[packet as usize], handle: Some(packet) };
                let mut stack = Vec::new();
                let publish = &mut |handle| shown.push(handle);
                assert!(self.window.place(&mut self.pool, Ordering::Flow, placed, &mut stack, publish));
            } else {
                assert!(packet < self.skipped, "only a SKIP makes a new packet old");
            }
            self.show(&shown);
        }
    }

    fn skip(&mut self, to: u32) {
        self.skipped = to;
        let (psn, mut shown, mut stack) = (self.psn(to), Vec::new(), Vec::new());
        assert!(self.window.skip_to(&mut self.pool, psn, &mut stack, &mut |handle| shown.push(handle)));
        self.show(&shown);
    }

    fn show(&mut self, shown: &[u32]) {
        for &packet in shown {
            assert!(!std::mem::replace(&mut self.seen[packet as usize], true), "{packet} is shown twice");
            let group = self.groups.iter().find(|g| (g.first..g.first + g.count).contains(&packet));
            let flow = group.map_or(0, |g| g.flow) as usize;
            let before = self.latest[flow].replace(packet);
            assert!(before < Some(packet), "flow {flow}: {packet} after {before:?}, distances {:?}", self.distances);
        }
    }

    /// How far a SKIP may go: everything below has arrived or was given up.
    fn skippable(&self) -> u32 {
        self.groups.iter().take_while(|g| g.delivered || g.given_up).map(|g| g.first + g.count).last().unwrap_or(0)
    }

    /// Once everything has arrived or was given up, and the SKIP has arrived too, nothing is held and nothing is
    /// missing.
    fn assert_drains(mut self) {
        let end = self.seen.len() as u32;
        if self.skippable() < end {
            return;
        }
        let arrived: Vec<bool> = self.groups.iter().flat_map(|g| (0..g.count).map(|_| g.delivered)).collect();
        let gaps = self.groups.iter().any(|g| !g.delivered);
        if gaps {
            self.skip(end);
        }
        assert_eq!((self.base(), self.window.held(), self.pool.used()), (end, 0, 0), "something is left");
        for (packet, arrived) in arrived.into_iter().enumerate() {
            let late =
                self.groups.iter().any(|g| g.given_up && (g.first..g.first + g.count).contains(&(packet as u32)));
            assert!(self.seen[packet] == arrived || late, "{packet} is lost");
        }
    }

    /// All possible next states, if buffers of these sizes are sent in flows 0 and 1 (buffers of more than one packet
    /// in flow 2).
    fn successors(&self, sizes: &[u32]) -> Vec<Link> {
        let mut next = Vec::new();
        let mut push = |change: &dyn Fn(&mut Link)| {
            let mut link = self.clone();
            change(&mut link);
            next.push(link);
        };
        if let Some(&count) = sizes.get(self.groups.len()) {
            let flows = if count > 1 { 2..=2 } else { 0..=1 };
            for flow in flows {
                for known in self.known..=self.base() {
                    // In a long run of packets, only the first and the last matter.
                    if sizes.iter().all(|s| *s == 1) || [self.known, self.base()].contains(&known) {
                        push(&|link| link.send(flow, count, known));
                    }
                }
            }
        }
        for (i, group) in self.groups.iter().enumerate() {
            if !group.delivered {
                push(&|link| link.deliver(i, false));
                if group.count > 1 {
                    push(&|link| link.deliver(i, true));
                }
                if !group.given_up {
                    push(&|link| link.groups[i].given_up = true);
                }
            }
        }
        let ends = self.groups.iter().map(|g| g.first + g.count);
        for to in ends.filter(|to| (self.skipped + 1..=self.skippable()).contains(to)) {
            if self.groups.iter().any(|g| g.given_up && g.first < to) {
                push(&|link| link.skip(to));
            }
        }
        next
    }
}

/// Visits all states; returns their number.
fn explore(start: u32, sizes: &[u32]) -> usize {
    let mut visited = HashSet::new();
    let mut stack = vec![Link::new(start)];
    while let Some(link) = stack.pop() {
        if visited.insert(link.key()) {
            stack.extend(link.successors(sizes));
            link.assert_drains();
        }
    }
    visited.len()
}

/// Packets of two flows are sent, delivered, given up (and delivered nevertheless) and skipped in every order, with
/// every state of the sender's knowledge. No flow is published out of order, nothing is published twice, and nothing is
/// left.
#[test]
#[cfg_attr(miri, ignore = "hours")]
fn a_flow_is_shown_in_order_whatever_happens_to_four_packets() {
    for start in STARTS {
        let states = explore(start, &[1; 4]);
        assert!(states > 100_000, "{states} states");
    }
}

/// As above, with a long run of other packets between two of them, so that distances reach the largest that can be
/// encoded.
#[test]
#[cfg_attr(miri, ignore = "hours")]
fn a_flow_is_shown_in_order_across_distances_too_large_to_name() {
    for gap in 252..=256 {
        let states = explore(u32::MAX - 100, &[1, gap, 1]);
        assert!(states > 3_000, "{states} states");
    }
}

/// The same for more packets; takes minutes (`make prove`).
#[test]
#[ignore = "minutes"]
fn a_flow_is_shown_in_order_in_full() {
    for gap in 252..=256 {
        for sizes in [[1, gap, 1, 1], [1, 1, gap, 1]] {
            eprintln!("{sizes:?}: {} states", explore(u32::MAX - 100, &sizes));
        }
    }
    for start in STARTS {
        eprintln!("five packets from {start}: {} states", explore(start, &[1; 5]));
    }
}

/// ACKs report exactly what a window holds, at every alignment of the window to pages and across the wrap: for all
/// 4,096 patterns of the first twelve packets, and all pairs of packets near the edges of words, pages and ACKs.
#[test]
#[cfg_attr(miri, ignore = "hours")]
fn an_ack_says_what_the_window_holds() {
    let edges: Vec<u32> = [
        1, 2, 31, 32, 33, 63, 64, 65, 95, 96, 127, 128, 129, 191, 192, 193, 254, 255, 256, 257, 287, 288, 319, 320, 511,
    ]
    .into_iter()
    .collect();
    let mut windows = 0;
    for offset in 0..64 {
        for start in [4096 + offset, (u32::MAX - 127).wrapping_add(offset), u32::MAX - 300 - offset] {
            for pattern in 0..4096u32 {
                // The first packet is missing, otherwise nothing would wait.
                let present: Vec<u32> = (0..12).filter(|i| pattern >> i & 1 == 1).map(|i| i + 1).collect();
                says(start, &present);
                windows += 1;
            }
            for (i, a) in edges.iter().enumerate() {
                for b in &edges[i..] {
                    says(start, &[*a, *b]);
                    windows += 1;
                }
            }
        }
    }
    assert!(windows == 64 * 3 * (4096 + 325), "{windows} windows");
}

fn says(start: u32, present: &[u32]) {
    let mut pool = Pool::new(16);
    let mut window = RecvWindow::new(Psn(start));
    let mut stack = Vec::new();
    for &i in present {
        let psn = Psn(start).add(i);
        if window.check(&pool, psn) == Check::New {
            let placed = Placed { psn, distance: 0, handle: Some(i) };
            let shown = &mut |h| panic!("{h} is shown behind a gap");
            assert!(window.place(&mut pool, Ordering::Flow, placed, &mut stack, shown));
        }
    }
    let mut said = Vec::new();
    let mut from = window.base();
    // As the engine does: one cumulative ACK, and selective ones for packets beyond its 256 PSNs.
    loop {
        let ack = AckHeader {
            version: Version::LATEST,
            cc: 0,
            probe: false,
            path: PathId::default(),
            hops: 0,
            kind: AckKind::Cumulative,
            psn: Psn(0),
            cid: Cid(1),
            sent: Tick(0),
            echo: Tick(0),
            nic_rx: Tick(0),
            num_ack: 0,
            num_ece: 0,
            base: from,
            bitmap: window.bitmap(&pool, from),
        };
        let mut bytes = Vec::new();
        ack.emit(&mut bytes);
        let Ok(Packet::Ack(read)) = parse(&bytes) else { panic!("malformed") };
        assert_eq!(read.bitmap, ack.bitmap);
        assert!(bytes.len() <= AckHeader::MAX_LEN);
        said.extend(read.bitmap.iter().map(|bit| read.base.add(bit as u32).distance_from(Psn(start)) as u32));
        from = from.add(256);
        if !from.is_before(window.end()) {
            break;
        }
    }
    let mut expected = present.to_vec();
    expected.dedup();
    assert_eq!(said, expected, "from {start}");
    let mut drained = 0;
    window.drain(&mut pool, &mut |_| drained += 1);
    assert_eq!((drained, pool.used()), (expected.len(), 0));
}
