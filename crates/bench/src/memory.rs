//! The memory of connections: bytes that the engines hold, as requested from the allocator.

use bifrost_rte::{CcKind, Config};

use crate::account::{Account, balance, charge};
use crate::end::Batch;
use crate::round::{Load, Round};

/// Numbers of connections to measure with.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// Engines at each end: in a process, one for each worker.
    pub workers: u32,
    /// Idle connections, over all workers.
    pub idle: u32,
    /// Connections with [`IN_FLIGHT`] packets in flight, over all workers.
    pub active: u32,
}

impl Scale {
    /// A million idle connections and a hundred thousand active ones.
    pub const FULL: Scale = Scale { workers: 2, idle: 1_000_000, active: 100_000 };
    /// Enough for averages.
    pub const SMALL: Scale = Scale { workers: 1, idle: 20_000, active: 2_000 };
}

/// Packets in flight of an active connection.
pub const IN_FLIGHT: u32 = 16;

/// Memory of one end, bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Held {
    /// Without any connection: peers and tables.
    pub empty: i64,
    /// All connections, idle.
    pub idle: i64,
    /// Additional memory of the active connections. Sender: 16 packets in flight. Receiver: the same 16, published in
    /// order.
    pub active: i64,
    /// Additional memory of a connection when 16 more packets wait for a missing one.
    pub waiting_each: i64,
}

/// The results.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// Numbers of connections.
    pub scale: Scale,
    /// The sending end.
    pub sender: Held,
    /// The receiving end.
    pub receiver: Held,
    /// Resident set of the process with idle and active connections, both ends together, bytes; 0 if there is no
    /// `/proc`.
    pub resident_bytes: u64,
}

/// Measures. [`crate::account::Counting`] must be the program's allocator.
pub fn measure(scale: Scale) -> Memory {
    // Many connections share few paths here, whose congestion windows would block packets.
    let config = Config { congestion_control: CcKind::None, ..Config::default() };
    let start = balances();
    let load = Load { conns: 0, idle: scale.idle / scale.workers, ..Load::default() };
    let mut workers: Vec<Round> = (0..scale.workers).map(|_| Round::with_config(load, config.clone())).collect();
    let mut leaving = Batch::default();
    leaving.reserve(1024);

    let empty = balances();
    let (idle, active) = (scale.idle / scale.workers, scale.active / scale.workers);
    for round in &mut workers {
        // In parts, so that memory used during set-up is returned before the next connections are set up.
        for first in (0..idle + active).step_by(40_000) {
            round.open(first..(idle + active).min(first + 40_000), false);
        }
    }
    let idle_bytes = balances();
    for round in &mut workers {
        fill(round, idle..idle + active, 0, &mut leaving);
    }
    let active_bytes = balances();
    let resident_bytes = resident();
    let waiting = active / 10;
    for round in &mut workers {
        fill(round, idle..idle + waiting, 1, &mut leaving);
    }
    let waiting_bytes = balances();
    let side = |i: usize| Held {
        empty: empty[i] - start[i],
        idle: idle_bytes[i] - empty[i],
        active: active_bytes[i] - idle_bytes[i],
        waiting_each: (waiting_bytes[i] - active_bytes[i]) / i64::from((waiting * scale.workers).max(1)),
    };
    Memory { scale, sender: side(0), receiver: side(1), resident_bytes }
}

/// Allocations of both ends, (sender, receiver), while `load` sends `packets` in steady state.
pub fn allocations(load: Load, packets: u32) -> (u64, u64) {
    let mut round = Round::steady(load);
    // Rare cases, such as a group of packets with many holes, allocate once.
    round.run(packets);
    let before = [Account::Sender, Account::Receiver].map(balance);
    round.run(packets);
    let after = [Account::Sender, Account::Receiver].map(balance);
    let made = |i: usize| after[i].allocations - before[i].allocations;
    (made(0), made(1))
}

/// Leaves each connection with 16 more packets in flight, before which `missing` packets are lost. No time passes.
fn fill(round: &mut Round, conns: std::ops::Range<u32>, missing: usize, leaving: &mut Batch) {
    let now = round.now;
    let packets = IN_FLIGHT + missing as u32;
    let mut offers = Vec::with_capacity(packets as usize);
    let mut arrived = Vec::with_capacity(packets as usize);
    for conn in conns {
        offers.clear();
        offers.extend((0..packets).map(|i| round.sender.offer(conn, i, 1)));
        charge(Account::Sender);
        round.sender.send(now, &offers);
        round.sender.emit(leaving);
        charge(Account::Other);
        arrived.clear();
        leaving.drain(now, |datagram| arrived.push(datagram));
        charge(Account::Receiver);
        round.receiver.receive(now, &arrived[missing..]);
        charge(Account::Other);
    }
}

fn balances() -> [i64; 2] {
    [Account::Sender, Account::Receiver].map(|account| balance(account).bytes)
}

/// Resident set of this process, bytes.
fn resident() -> u64 {
    let Ok(status) = std::fs::read_to_string("/proc/self/status") else { return 0 };
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kilobytes.unwrap_or(0) * 1024
}
