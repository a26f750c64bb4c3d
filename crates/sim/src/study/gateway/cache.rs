//! What caches make of a pod's look-ups: two private levels would differ little, so a core has one, and all share another.

use crate::Rng;
use crate::rng::mix;

/// Sets of lines, each replaced by the least recently used.
#[derive(Clone, Debug)]
struct Cache {
    /// By set, the most recent first; 0: nothing.
    lines: Vec<u64>,
    ways: usize,
    sets: u64,
}

impl Cache {
    fn new(bytes: u64, ways: usize) -> Self {
        let sets = (bytes / 64 / ways as u64).max(1);
        Cache { lines: vec![0; sets as usize * ways], ways, sets }
    }

    /// Whether the line was there. It is afterwards.
    fn access(&mut self, line: u64) -> bool {
        let set = (mix(line) % self.sets) as usize * self.ways;
        let set = &mut self.lines[set..set + self.ways];
        let found = set.iter().position(|l| *l == line);
        let until = found.unwrap_or(self.ways - 1);
        set[..=until].rotate_right(1);
        set[0] = line;
        found.is_some()
    }
}

/// A processor and what a packet takes of it, apart from waiting for memory.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Machine {
    /// Of each core, bytes.
    pub(in super::super) private_bytes: u64,
    /// Of all, bytes.
    pub(in super::super) shared_bytes: u64,
    /// How long an access takes that the private cache, the shared one, or memory answers, ns.
    pub(in super::super) latency_ns: [f64; 3],
    /// Accesses that a core waits for at the same time.
    pub(in super::super) overlap: f64,
    /// Computing, ns a packet.
    pub(in super::super) compute_ns: f64,
}

/// What the tables look like to a packet.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Tables {
    /// Concurrent flows, each with entries of its own.
    pub(in super::super) flows: u64,
    /// Lines of entries that a packet reads and all packets of its flow.
    pub(in super::super) flow_lines: u64,
    /// Lines that a packet reads of what all flows share: the upper levels of tables.
    pub(in super::super) common_lines: u64,
    /// Lines of that.
    pub(in super::super) common_total: u64,
    /// Lines that are the packet's own: its buffer and descriptors, of a pool of each core.
    pub(in super::super) packet_lines: u64,
    /// Lines of that pool.
    pub(in super::super) pool_lines: u64,
}

/// What came of it.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Rate {
    /// Packets a second of one core.
    pub(in super::super) pps: f64,
    /// Of the accesses that reached the shared cache, how many it answered.
    pub(in super::super) shared_hits: f64,
    /// Of all accesses, how many the private cache answered.
    pub(in super::super) private_hits: f64,
}

/// Replays the accesses of a pod: packets of random flows go to cores in turn (`spray`), or by flow.
pub(in super::super) fn replay(machine: &Machine, tables: &Tables, cores: u64, spray: bool, packets: u64) -> Rate {
    let mut rng = Rng::new(7);
    let mut private = vec![Cache::new(machine.private_bytes, 16); cores as usize];
    let mut shared = Cache::new(machine.shared_bytes, 16);
    let (mut answered, mut waited) = ([0u64; 3], 0.0);
    // Two thirds only fill the caches.
    let warm = packets * 2 / 3;
    let mut pools = vec![0u64; cores as usize];
    for n in 0..packets {
        let flow = rng.below(tables.flows);
        let core = if spray { n % cores } else { mix(flow ^ 0xf10e) % cores };
        let pool = &mut pools[core as usize];
        let lines = (0..tables.flow_lines + tables.common_lines + tables.packet_lines).map(|i| {
            if i < tables.flow_lines {
                1 << 60 | (flow * tables.flow_lines + i)
            } else if i < tables.flow_lines + tables.common_lines {
                // Upper levels are small and their lower ones large: half of the accesses each to a sixteenth of the rest.
                let level = i - tables.flow_lines;
                let total = (tables.common_total >> (4 * (tables.common_lines - 1 - level).min(15))).max(1);
                2 << 60 | level << 40 | (mix(flow ^ level << 32) % total)
            } else {
                *pool = (*pool + 1) % tables.pool_lines;
                3 << 60 | core << 40 | *pool
            }
        });
        for line in lines {
            let level = if private[core as usize].access(line) {
                0
            } else if shared.access(line) {
                1
            } else {
                2
            };
            if n >= warm {
                answered[level] += 1;
                waited += machine.latency_ns[level];
            }
        }
    }
    let counted = (packets - warm) as f64;
    let packet_ns = machine.compute_ns + waited / machine.overlap / counted;
    let all: u64 = answered.iter().sum();
    Rate {
        pps: 1e9 / packet_ns,
        shared_hits: answered[1] as f64 / (answered[1] + answered[2]).max(1) as f64,
        private_hits: answered[0] as f64 / all.max(1) as f64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_line_goes() {
        let mut cache = Cache::new(64 * 4, 4);
        assert!([1, 2, 3, 4].iter().all(|l| !cache.access(*l)));
        assert!(cache.access(1));
        assert!(!cache.access(5), "in place of 2");
        assert!(cache.access(1) && cache.access(3) && cache.access(4) && cache.access(5));
        assert!(!cache.access(2));
    }

    #[test]
    fn small_tables_are_for_the_private_cache_and_large_ones_for_none() {
        let machine = Machine {
            private_bytes: 1 << 16,
            shared_bytes: 1 << 20,
            latency_ns: [4.0, 20.0, 100.0],
            overlap: 1.0,
            compute_ns: 100.0,
        };
        let tables =
            |flows| Tables { flows, flow_lines: 4, common_lines: 0, common_total: 0, packet_lines: 0, pool_lines: 1 };
        // 64 flows on each of four cores fit into a private cache, 256 on each do not.
        let [spray, hash] = [true, false].map(|spray| replay(&machine, &tables(512), 4, spray, 200_000));
        assert!(hash.private_hits > 0.95 && spray.private_hits < 0.8, "{hash:?} {spray:?}");
        assert!(hash.pps > spray.pps * 1.1);
        let [spray, hash] = [true, false].map(|spray| replay(&machine, &tables(1 << 20), 4, spray, 200_000));
        assert!((hash.pps / spray.pps - 1.0).abs() < 0.01, "{hash:?} {spray:?}");
        // One core has no choice.
        let [spray, hash] = [true, false].map(|spray| replay(&machine, &tables(512), 1, spray, 10_000));
        assert_eq!(spray.pps, hash.pps);
    }
}
