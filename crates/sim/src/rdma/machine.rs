//! Costs of a host and its NIC: PCIe, the cache of queue pair contexts, and the processor.
//!
//! `bifrost-rnic` is the NIC's logic; this module determines when its actions complete.

use std::collections::VecDeque;

/// A model of a host. Rates are in bits per second, times in ns. [`Machine::default`] costs nothing.
///
/// Sources: the rate of PCIe 3.0 with 8 lanes and payloads of 256 bytes, and the latency of a read, are those of
/// *Understanding PCIe performance* (SIGCOMM'18); 2 MB of contexts in a NIC and 375 bytes per queue pair those of eRPC
/// (NSDI'19, section 4.3.3). The previous generation is assumed to have half of that. Processor time is that of this
/// engine: 5,548 instructions per chunk for both ends (docs/COST.md), two per cycle at 2.9 GHz, over four requests and
/// completions at each end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machine {
    /// PCIe payload rate in each direction. 0: nothing is written to memory, as after a machine check.
    pub pcie_rate: f64,
    /// Latency of a read over PCIe. The NIC reads ahead, so this delays packets and does not reduce the rate.
    pub dma_ns: u64,
    /// Number of contexts that the NIC caches, requester and responder counted separately; 0: unlimited. A packet of
    /// another queue pair waits `dma_ns` for its context, and so do all packets behind it.
    pub states: u32,
    /// Memory of the NIC for packets that wait for PCIe, bytes.
    pub receive_buffer: u64,
    /// Processor time per posted request or polled completion.
    pub operation_ns: u64,
}

impl Machine {
    /// Two ports of 25 Gbit/s, of the generation of 2015.
    pub const OLD: Machine =
        Machine { pcie_rate: 57e9, dma_ns: 900, states: 5_592, receive_buffer: 512 << 10, operation_ns: 120 };
    /// Two ports of 25 Gbit/s, of the generation of 2017.
    pub const NEW: Machine =
        Machine { pcie_rate: 57e9, dma_ns: 700, states: 11_184, receive_buffer: 512 << 10, operation_ns: 120 };
}

impl Default for Machine {
    fn default() -> Self {
        Machine { pcie_rate: f64::INFINITY, dma_ns: 0, states: 0, receive_buffer: u64::MAX, operation_ns: 0 }
    }
}

/// Counters of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MachineCounts {
    /// Packets whose context was in the NIC.
    pub state_hits: u64,
    /// Packets that waited for their context.
    pub state_misses: u64,
    /// Processor time, ns.
    pub busy_ns: u64,
}

/// State of a model.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) machine: Machine,
    pub(super) counts: MachineCounts,
    /// The processor is busy until then.
    pub(super) busy_until: u64,
    /// Packets that wait for PCIe, and whether the first one is being transferred.
    pub(super) arrived: VecDeque<u32>,
    pub(super) is_writing: bool,
    pub(super) arrived_bytes: u64,
    reads_free: u64,
    states: Vec<[u32; WAYS]>,
    operations: u64,
}

/// Slots of cached contexts.
const WAYS: usize = 8;

impl Device {
    pub(super) fn new(machine: Machine) -> Self {
        Device {
            machine,
            counts: MachineCounts::default(),
            busy_until: 0,
            arrived: VecDeque::new(),
            is_writing: false,
            arrived_bytes: 0,
            reads_free: 0,
            states: vec![[u32::MAX; WAYS]; (machine.states as usize).div_ceil(WAYS)],
            operations: 0,
        }
    }

    /// Whether packets are written to memory without delay.
    pub(super) fn is_ideal(&self) -> bool {
        self.machine.pcie_rate.is_infinite() && self.machine.dma_ns == 0
    }

    /// Reads a packet to be sent for the queue pair `key` from memory. Returns when it is available, ns.
    pub(super) fn read(&mut self, now: u64, len: u64, key: u64) -> u64 {
        if self.is_ideal() {
            return now;
        }
        let wait = self.look_up(key);
        let rate = self.machine.pcie_rate.max(1.0);
        // The NIC requested it while earlier packets were on the wire.
        let asked = self.reads_free.max(now.saturating_sub(self.machine.dma_ns));
        self.reads_free = asked + wait + (len as f64 * 8e9 / rate) as u64;
        self.reads_free.max(now)
    }

    /// Returns how long it takes to write a received packet to memory, ns; `None`: it is never written.
    pub(super) fn write_ns(&mut self, len: u64, key: u64) -> Option<u64> {
        let wait = self.look_up(key);
        (self.machine.pcie_rate > 0.0).then(|| wait + (len as f64 * 8e9 / self.machine.pcie_rate) as u64)
    }

    /// Charges the processor for posted requests and polled completions. `operations` is their total number; after the
    /// NIC was replaced, it starts at 0 again.
    pub(super) fn charge(&mut self, now: u64, operations: u64) {
        let done = operations.checked_sub(self.operations).unwrap_or(operations);
        let cost = done * self.machine.operation_ns;
        self.operations = operations;
        self.counts.busy_ns += cost;
        self.busy_until = self.busy_until.max(now) + cost;
    }

    /// Time until the context of a queue pair is in the NIC, ns.
    fn look_up(&mut self, key: u64) -> u64 {
        if self.states.is_empty() {
            return 0;
        }
        let hash = crate::mix(key);
        let (set, tag) = (hash as usize % self.states.len(), (hash >> 33) as u32);
        let ways = &mut self.states[set];
        let at = ways.iter().position(|way| *way == tag);
        // Evicts the least recently used one.
        ways[..=at.unwrap_or(WAYS - 1)].rotate_right(1);
        ways[0] = tag;
        let is_there = at.is_some();
        self.counts.state_hits += u64::from(is_there);
        self.counts.state_misses += u64::from(!is_there);
        if is_there { 0 } else { self.machine.dma_ns }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_pairs_beyond_the_cache_wait_for_their_context() {
        let machine = Machine { states: 1024, ..Machine::OLD };
        for (queue_pairs, share) in [(256, 0.01), (512, 0.05), (1 << 16, 0.97)] {
            let mut device = Device::new(machine);
            for round in 0..20 {
                if round == 10 {
                    device.counts = MachineCounts::default();
                }
                for key in 0..queue_pairs {
                    let _ = device.write_ns(1024, key);
                }
            }
            let MachineCounts { state_hits, state_misses, .. } = device.counts;
            let missed = state_misses as f64 / (state_hits + state_misses) as f64;
            let fits = queue_pairs < 1024;
            assert!(if fits { missed <= share } else { missed >= share }, "{queue_pairs}: {missed}");
        }
    }

    #[test]
    fn pcie_and_processor_take_their_time() {
        let mut device = Device::new(Machine { states: 0, ..Machine::OLD });
        let reads: Vec<u64> = (0..3).map(|_| device.read(1000, 7125, 1)).collect();
        assert_eq!(reads, [1100, 2100, 3100], "57 Gbit/s are 7,125 bytes a microsecond, asked for 900 ns ahead");
        assert_eq!(device.write_ns(7125, 1), Some(1000));
        device.charge(1000, 10);
        device.charge(1000, 15);
        assert_eq!((device.busy_until, device.counts.busy_ns), (1000 + 15 * 120, 15 * 120));
        device.machine.pcie_rate = 0.0;
        assert_eq!(device.write_ns(7125, 1), None);
    }
}
