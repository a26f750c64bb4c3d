//! What connections cost in memory: bytes that the engines hold, as the allocator was asked for them.

use bifrost_rte::{CcKind, Config};

use crate::account::{Account, balance, charge};
use crate::end::Batch;
use crate::round::{Load, Round};

/// How many connections to measure with.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// Engines on each side, as a process has one for each worker.
    pub workers: u32,
    /// Idle connections, over all workers.
    pub idle: u32,
    /// Connections with [`IN_FLIGHT`] packets in flight, over all workers.
    pub active: u32,
}

impl Scale {
    /// A million idle connections and a hundred thousand active ones.
    pub const FULL: Scale = Scale { workers: 2, idle: 1_000_000, active: 100_000 };
    /// Enough to divide by.
    pub const SMALL: Scale = Scale { workers: 1, idle: 20_000, active: 2_000 };
}

/// Packets in flight of an active connection.
pub const IN_FLIGHT: u32 = 16;

/// What one side holds, bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Held {
    /// Before there is any connection: peers and tables.
    pub empty: i64,
    /// All connections, idle.
    pub idle: i64,
    /// What the active ones hold beyond that. Sending: 16 packets in flight. Receiving: the same 16, published in order.
    pub active: i64,
    /// What a connection holds beyond that when 16 more packets wait for one that is missing; for each.
    pub waiting_each: i64,
}

/// What was measured.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// How many connections there were.
    pub scale: Scale,
    /// The side that sends.
    pub sender: Held,
    /// The side that receives.
    pub receiver: Held,
    /// Resident set of the process with idle and active connections, both sides together, bytes; 0 where there is no
    /// `/proc`.
    pub resident_bytes: u64,
}

/// Measures. [`crate::account::Counting`] must be the program's allocator.
pub fn measure(scale: Scale) -> Memory {
    // Many connections share few paths here, whose congestion windows would hold packets back.
    let config = Config { congestion_control: CcKind::None, ..Config::default() };
    let start = balances();
    let load = Load { conns: 0, idle: scale.idle / scale.workers, ..Load::default() };
    let mut workers: Vec<Round> = (0..scale.workers).map(|_| Round::with_config(load, config.clone())).collect();
    let mut leaving = Batch::default();
    leaving.reserve(1024);

    let empty = balances();
    let (idle, active) = (scale.idle / scale.workers, scale.active / scale.workers);
    for round in &mut workers {
        // In parts: what a connection needs while it is set up goes back before the next.
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

/// Allocations of both sides, (sender, receiver), while `load` sends `packets` in steady state.
pub fn allocations(load: Load, packets: u32) -> (u64, u64) {
    let mut round = Round::steady(load);
    // What is rare, as a group of packets that meets many holes, makes room once.
    round.run(packets);
    let before = [Account::Sender, Account::Receiver].map(balance);
    round.run(packets);
    let after = [Account::Sender, Account::Receiver].map(balance);
    let made = |i: usize| after[i].allocations - before[i].allocations;
    (made(0), made(1))
}

/// Leaves each connection with 16 packets more in flight, before which the receiver misses `missing`. No time passes.
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
