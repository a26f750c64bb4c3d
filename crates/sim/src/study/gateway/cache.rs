//! Caches during a pod's lookups. Each core has one private cache, because a second private level would make little
//! difference, and all cores share another cache.

use bifrost_plb::{Config, Cores};

use crate::Rng;
use crate::rng::mix;

/// Bytes of a line.
const LINE: u64 = 64;

/// Sets of lines with least recently used replacement.
#[derive(Clone, Debug)]
struct Cache {
    /// By set, the most recent first; 0: empty.
    lines: Vec<u64>,
    ways: usize,
    sets: u64,
}

impl Cache {
    fn new(bytes: u64, ways: usize) -> Self {
        let sets = (bytes / LINE / ways as u64).max(1);
        Cache { lines: vec![0; sets as usize * ways], ways, sets }
    }

    /// Accesses a line. Returns whether it was cached; it is cached afterwards.
    fn access(&mut self, line: u64) -> bool {
        let set = (mix(line) % self.sets) as usize * self.ways;
        let set = &mut self.lines[set..set + self.ways];
        let found = set.iter().position(|l| *l == line);
        let until = found.unwrap_or(self.ways - 1);
        set[..=until].rotate_right(1);
        set[0] = line;
        found.is_some()
    }

    /// Removes a line.
    fn invalidate(&mut self, line: u64) {
        let set = (mix(line) % self.sets) as usize * self.ways;
        let set = &mut self.lines[set..set + self.ways];
        if let Some(found) = set.iter().position(|l| *l == line) {
            set[found..].rotate_left(1);
            set[self.ways - 1] = 0;
        }
    }
}

/// A processor.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Machine {
    /// Private cache of each core, bytes.
    pub(in super::super) private_bytes: u64,
    /// Shared cache, bytes.
    pub(in super::super) shared_bytes: u64,
    /// Latency of the private cache, the shared cache, and memory, ns.
    pub(in super::super) latency_ns: [f64; 3],
    /// Number of accesses to each of these that a core overlaps.
    pub(in super::super) overlap: [f64; 3],
}

/// Data that packets of one owner share, such as the entries of a tenant.
#[derive(Clone, Copy, Debug, Default)]
pub(in super::super) struct Shared {
    /// Flows of an owner; 0: one owner has all flows.
    pub(in super::super) flows: u64,
    /// Lines of an owner that a packet reads.
    pub(in super::super) each: u64,
    /// Lines of an owner in total.
    pub(in super::super) total: u64,
}

/// Tables, as accessed by a packet.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Tables {
    /// Concurrent flows.
    pub(in super::super) flows: u64,
    /// Lines that packets of a flow, and of a tenant, read.
    pub(in super::super) owned: [Shared; 2],
    /// Lines that a packet reads of data that all flows share, which are the upper levels of tables.
    pub(in super::super) common_lines: u64,
    /// Total lines of that data.
    pub(in super::super) common_total: u64,
    /// Lines of the packet itself: buffer and descriptors, from a pool of each core. The device writes them into the
    /// shared cache (DDIO).
    pub(in super::super) packet_lines: u64,
    /// Lines of that pool.
    pub(in super::super) pool_lines: u64,
    /// Flows of a tenant.
    pub(in super::super) tenant_flows: u64,
    /// Bytes that a packet writes of a core's per-tenant data: the core's share of the tenant's rate. The data of
    /// tenants is adjacent.
    pub(in super::super) private_bytes: u64,
}

impl Tables {
    /// Bytes that all flows together read, without per-core data.
    pub(in super::super) fn bytes(&self) -> u64 {
        let owned = self.owned.iter().map(|shared| self.flows.div_ceil(shared.flows.max(1)) * shared.total);
        (owned.sum::<u64>() + self.common_total) * LINE
    }
}

/// Purpose of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Stream {
    /// Entries of the flow.
    Flow,
    /// Entries of its tenant.
    Tenant,
    /// Data that all flows share.
    Common,
    /// Buffer and descriptors.
    Packet,
    /// The core's per-tenant data.
    Private,
}

impl Stream {
    /// All, in the order of [`Replayed::by_stream`].
    pub(in super::super) const ALL: [Stream; 5] =
        [Stream::Flow, Stream::Tenant, Stream::Common, Stream::Packet, Stream::Private];
    /// Those of [`Tables::owned`].
    const OWNED: [Stream; 2] = [Stream::Flow, Stream::Tenant];
}

/// Results.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Replayed {
    /// Time that a packet waits for memory, ns.
    pub(in super::super) waits_ns: f64,
    /// Hit rate of the shared cache.
    pub(in super::super) shared_hits: f64,
    /// Hit rate of the private cache.
    pub(in super::super) private_hits: f64,
    /// By stream: accesses per packet that hit the private cache, the shared one, and memory.
    pub(in super::super) by_stream: [[f64; 3]; Stream::ALL.len()],
}

/// How packets of random flows are spread over cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Spread {
    /// By packet, with this affinity (`bifrost_plb::Config::affinity`).
    Spray(u16),
    /// By flow.
    ByFlow,
}

/// Replays the accesses of a pod.
pub(in super::super) fn replay(
    machine: &Machine,
    tables: &Tables,
    cores: u64,
    spread: Spread,
    packets: u64,
) -> Replayed {
    let affinity = if let Spread::Spray(affinity) = spread { affinity } else { 0 };
    let config = Config { cores: cores as u16, affinity, ..Config::default() };
    let mut choice = Cores::new(&config);
    let mut rng = Rng::new(7);
    let mut private = vec![Cache::new(machine.private_bytes, 16); cores as usize];
    let mut shared_cache = Cache::new(machine.shared_bytes, 16);
    let mut answered = [[0u64; 3]; Stream::ALL.len()];
    // The first two thirds only fill the caches.
    let warm = packets * 2 / 3;
    let mut pools = vec![0u64; cores as usize];
    for n in 0..packets {
        let flow = rng.below(tables.flows);
        let hash = (mix(flow ^ 0xf10e) >> 32) as u32;
        let core = match spread {
            Spread::Spray(_) => choice.choose(hash, &config, |_| true).map_or(0, u64::from),
            Spread::ByFlow => u64::from(choice.of_flow(hash)),
        };
        let own = &mut private[core as usize];
        let mut read = |stream: Stream, line: u64, shared: &mut Cache| {
            let level = if own.access(line) {
                0
            } else if shared.access(line) {
                1
            } else {
                2
            };
            answered[stream as usize][level] += u64::from(n >= warm);
        };
        for (stream, shared) in Stream::OWNED.into_iter().zip(tables.owned) {
            let owner = flow / shared.flows.max(1);
            for i in 0..shared.each {
                // Each access has its own part of the owner's lines. A hash of the flow selects a line in it.
                let part = (shared.total / shared.each).max(1);
                let line = i * part + mix(flow ^ i << 40) % part;
                read(stream, 1 << 60 | (stream as u64) << 56 | (owner * shared.total.max(1) + line), &mut shared_cache);
            }
        }
        for level in 0..tables.common_lines {
            // Upper levels are small and lower ones large: each level has 16 times as many lines as the one above it.
            let total = (tables.common_total >> (4 * (tables.common_lines - 1 - level).min(15))).max(1);
            read(Stream::Common, 2 << 60 | level << 40 | (mix(flow ^ level << 32) % total), &mut shared_cache);
        }
        let tenant = flow / tables.tenant_flows.max(1);
        let kept = tenant * tables.private_bytes..(tenant + 1) * tables.private_bytes;
        let lines = kept.start / LINE..kept.end.div_ceil(LINE);
        lines.for_each(|line| read(Stream::Private, 4 << 60 | core << 40 | line, &mut shared_cache));
        for _ in 0..tables.packet_lines {
            let pool = &mut pools[core as usize];
            *pool = (*pool + 1) % tables.pool_lines;
            let line = 3 << 60 | core << 40 | *pool;
            // The device has just written it.
            shared_cache.access(line);
            let own = &mut private[core as usize];
            own.invalidate(line);
            own.access(line);
            answered[Stream::Packet as usize][1] += u64::from(n >= warm);
        }
    }
    let counted = (packets - warm) as f64;
    let by_stream = answered.map(|stream| stream.map(|count| count as f64 / counted));
    let [private, shared, memory] = [0, 1, 2].map(|level| by_stream.iter().map(|stream| stream[level]).sum::<f64>());
    let levels = machine.latency_ns.into_iter().zip(machine.overlap);
    let waits_ns = [private, shared, memory].into_iter().zip(levels).map(|(count, (ns, overlap))| count * ns / overlap);
    Replayed {
        waits_ns: waits_ns.sum(),
        shared_hits: shared / (shared + memory).max(f64::MIN_POSITIVE),
        private_hits: private / (private + shared + memory).max(f64::MIN_POSITIVE),
        by_stream,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPREADS: [Spread; 2] = [Spread::Spray(0), Spread::ByFlow];

    #[test]
    fn the_least_recently_used_line_is_evicted() {
        let mut cache = Cache::new(64 * 4, 4);
        assert!([1, 2, 3, 4].iter().all(|l| !cache.access(*l)));
        assert!(cache.access(1));
        assert!(!cache.access(5), "in place of 2");
        assert!(cache.access(1) && cache.access(3) && cache.access(4) && cache.access(5));
        assert!(!cache.access(2));
    }

    #[test]
    fn small_tables_fit_the_private_cache_and_large_ones_no_cache() {
        let machine = Machine {
            private_bytes: 1 << 16,
            shared_bytes: 1 << 20,
            latency_ns: [4.0, 20.0, 100.0],
            overlap: [1.0; 3],
        };
        let tables = |flows| Tables {
            flows,
            owned: [Shared { flows: 1, each: 4, total: 4 }, Shared::default()],
            common_lines: 0,
            common_total: 0,
            packet_lines: 0,
            pool_lines: 1,
            tenant_flows: 1,
            private_bytes: 0,
        };
        // With hashing, the lines of 128 flows per core fit into a private cache. With spraying, each core reads those
        // of all 512 flows, which do not fit.
        let [spray, hash] = SPREADS.map(|spread| replay(&machine, &tables(512), 4, spread, 200_000));
        assert!(hash.private_hits > 0.95 && spray.private_hits < 0.8, "{hash:?} {spray:?}");
        assert!(hash.waits_ns * 1.4 < spray.waits_ns, "{hash:?} {spray:?}");
        let [spray, hash] = SPREADS.map(|spread| replay(&machine, &tables(1 << 20), 4, spread, 200_000));
        assert!((hash.waits_ns / spray.waits_ns - 1.0).abs() < 0.01, "{hash:?} {spray:?}");
        // One core has no choice.
        let [spray, hash] = SPREADS.map(|spread| replay(&machine, &tables(512), 1, spread, 10_000));
        assert_eq!(spray.waits_ns, hash.waits_ns);
    }

    #[test]
    fn device_writes_hit_the_shared_cache_and_per_core_data_is_there_for_each_core() {
        let machine = Machine {
            private_bytes: 1 << 20,
            shared_bytes: 1 << 22,
            latency_ns: [4.0, 20.0, 100.0],
            overlap: [1.0; 3],
        };
        let tables = Tables {
            flows: 8192,
            owned: [Shared { flows: 1, each: 2, total: 2 }, Shared::default()],
            common_lines: 0,
            common_total: 0,
            packet_lines: 3,
            pool_lines: 64,
            tenant_flows: 1,
            private_bytes: 2 * LINE,
        };
        let of = |stream: Stream, spread| replay(&machine, &tables, 8, spread, 400_000).by_stream[stream as usize];
        let sprayed = Spread::Spray(0);
        assert_eq!(of(Stream::Packet, sprayed), [0.0, 3.0, 0.0], "though the pool fits into a private cache");
        // The entries of the flows, one megabyte, fit into the shared cache. With spraying, each core also has a
        // megabyte of per-tenant data; with hashing, an eighth of it.
        let [spray, hash] = SPREADS.map(|spread| of(Stream::Private, spread)[2]);
        assert!(hash < 0.05 && spray > 0.5, "{hash} {spray}");
        assert!(of(Stream::Flow, sprayed)[2] < of(Stream::Private, sprayed)[2] / 2.0);
    }

    #[test]
    fn entries_of_tenants_are_shared_by_their_flows() {
        let machine = Machine {
            private_bytes: 1 << 14,
            shared_bytes: 1 << 20,
            latency_ns: [4.0, 20.0, 100.0],
            overlap: [1.0; 3],
        };
        let flow = Shared { flows: 1, each: 1, total: 1 };
        let tables = Tables {
            flows: 1 << 16,
            owned: [flow, Shared { flows: 1 << 12, each: 3, total: 48 }],
            common_lines: 0,
            common_total: 0,
            packet_lines: 0,
            pool_lines: 1,
            tenant_flows: 1 << 12,
            private_bytes: 0,
        };
        assert_eq!(tables.bytes(), ((1 << 16) + 16 * 48) * LINE);
        let replayed = replay(&machine, &tables, 2, Spread::Spray(0), 600_000);
        let [flow, tenant] = [Stream::Flow, Stream::Tenant].map(|stream| replayed.by_stream[stream as usize]);
        // The accesses per packet add up to the number of lines. Data that more flows share is found in closer caches.
        for (lines, each) in [(flow, 1.0), (tenant, 3.0)] {
            assert!((lines.iter().sum::<f64>() - each).abs() < 1e-9, "{lines:?}");
        }
        assert!(tenant[2] < 0.01 && flow[2] > 0.5, "{replayed:?}");
    }
}
