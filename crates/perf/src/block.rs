//! Block storage: a front end that reads from one of several back ends and writes to all of them, with several
//! operations in flight (paper: section 5.4, figure 13). A back end keeps blocks in memory. All data read is verified.

use std::fmt;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use hdrhistogram::Histogram;
use serde::Serialize;

use crate::link::{self, Link, Net};
use crate::random::Random;
use crate::report::Latency;

/// Length of a unit, bytes; operations consist of whole units.
pub(crate) const UNIT: usize = 4096;
/// The longest operation, units.
const LONGEST: u64 = 32;
/// Sizes of mixed operations, units, and their shares, percent.
const MIX: [(u64, u64); 4] = [(1, 60), (4, 25), (16, 10), (LONGEST, 5)];
/// First byte of a request; offset, length, and the data of a write follow.
const READ: u8 = 0;
const WRITE: u8 = 1;
const HEADER: usize = 13;
/// First byte of a response.
const DONE: u8 = 0;
const REFUSED: u8 = 1;
/// Time limit of an operation.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Load that a front end generates.
#[derive(Clone, Debug)]
pub(crate) struct Load {
    pub(crate) backends: Vec<SocketAddr>,
    /// Size of the disk, bytes.
    pub(crate) disk: usize,
    /// Size of an operation, bytes; `None`: 4 to 128 KiB, mixed.
    pub(crate) size: Option<usize>,
    /// Share of reads, percent.
    pub(crate) reads: u64,
    /// Number of operations in flight.
    pub(crate) depth: usize,
    pub(crate) duration: Duration,
}

/// A report.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    test: &'static str,
    transport: String,
    backends: usize,
    seconds: f64,
    reads: u64,
    writes: u64,
    operations_per_s: f64,
    /// Data read and written by the application; a write to several back ends counts once.
    gbit_per_s: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    read_latency_us: Option<Latency>,
    #[serde(skip_serializing_if = "Option::is_none")]
    write_latency_us: Option<Latency>,
}

/// A back end's memory.
struct Store(Vec<u8>);

impl Store {
    fn answer(&mut self, request: &[u8]) -> Vec<u8> {
        self.execute(request).unwrap_or_else(|| vec![REFUSED])
    }

    fn execute(&mut self, request: &[u8]) -> Option<Vec<u8>> {
        let (header, data) = request.split_first_chunk::<HEADER>()?;
        let [operation, range @ ..] = header;
        let (offset, len) = range.split_first_chunk::<8>()?;
        let offset = usize::try_from(u64::from_be_bytes(*offset)).ok()?;
        let len = u32::from_be_bytes(*len.first_chunk()?) as usize;
        if len > LONGEST as usize * UNIT {
            return None;
        }
        let bytes = self.0.get_mut(offset..offset.checked_add(len)?)?;
        match *operation {
            READ if data.is_empty() => {
                let mut response = Vec::with_capacity(1 + len);
                response.push(DONE);
                response.extend_from_slice(bytes);
                Some(response)
            }
            WRITE if data.len() == len => {
                bytes.copy_from_slice(data);
                Some(vec![DONE])
            }
            _ => None,
        }
    }
}

/// Runs a back end.
pub(crate) fn serve(net: &Net, at: SocketAddr, disk: usize, clients: u32) -> Result<()> {
    let mut store = Store(vec![0; disk]);
    link::serve(net, at, clients, |_, request| Ok(store.answer(request)))
}

/// An operation in flight.
struct Operation {
    writes: bool,
    unit: u64,
    units: u64,
    /// Back ends that have not responded.
    missing: usize,
    begin: Instant,
}

/// The front end's view of the disk: how often each unit was written, and whether an operation on it is in flight.
struct Disk {
    versions: Vec<u32>,
    open: Vec<bool>,
}

impl Disk {
    /// Selects units without an operation in flight, if possible.
    fn choose(&mut self, random: &mut Random, units: u64) -> Option<u64> {
        let all = self.versions.len() as u64;
        for _ in 0..100 {
            let unit = random.next() % (all - units + 1);
            let range = unit as usize..(unit + units) as usize;
            if !self.open[range.clone()].contains(&true) {
                self.open[range].fill(true);
                return Some(unit);
            }
        }
        None
    }

    /// The expected content of units.
    fn expected(&self, unit: u64, units: u64, into: &mut Vec<u8>) {
        into.resize(units as usize * UNIT, 0);
        for (number, bytes) in (unit..).zip(into.chunks_exact_mut(UNIT)) {
            match self.versions[number as usize] {
                0 => bytes.fill(0),
                version => {
                    let mut random = Random((number << 32) | u64::from(version));
                    bytes.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&random.next().to_be_bytes()));
                }
            }
        }
    }
}

pub(crate) fn run(net: &Net, load: &Load) -> Result<Report> {
    let units = (load.disk / UNIT) as u64;
    ensure!(units >= 8 * LONGEST, "the disk is too small; use at least 1 MiB");
    let connected: Result<Vec<Link>> = load.backends.iter().map(|backend| net.connect(*backend)).collect();
    let mut links = connected?;
    let mut disk = Disk { versions: vec![0; units as usize], open: vec![false; units as usize] };
    let mut operations: Vec<Option<Operation>> = (0..load.depth).map(|_| None).collect();
    let histogram = || Histogram::<u64>::new_with_bounds(100, 60_000_000_000, 3);
    let mut times = [histogram()?, histogram()?];
    let mut random = Random(1);
    let (mut done_units, mut scratch) = (0u64, Vec::new());
    let begin = Instant::now();
    let mut last = begin;
    loop {
        let continues = begin.elapsed() < load.duration;
        for (slot, open) in operations.iter_mut().enumerate().filter(|(_, open)| open.is_none()) {
            if continues {
                *open = start(&mut links, load, &mut disk, &mut random, slot as u64, &mut scratch)?;
            }
        }
        if !continues && operations.iter().all(Option::is_none) {
            break;
        }
        if let Net::Messages(worker) = net {
            worker.poll()?;
        }
        let mut any = 0;
        for link in &mut links {
            any += link.take(|slot, response| {
                let slot = &mut operations[slot as usize];
                let Some(operation) = slot else { bail!("a response without a request") };
                let Some((&DONE, data)) = response.split_first() else { bail!("a back end refused an operation") };
                if !operation.writes {
                    disk.expected(operation.unit, operation.units, &mut scratch);
                    ensure!(data == scratch, "the data at unit {} differs from what was written", operation.unit);
                }
                operation.missing -= 1;
                if operation.missing == 0 {
                    times[usize::from(operation.writes)].saturating_record(operation.begin.elapsed().as_nanos() as u64);
                    done_units += operation.units;
                    disk.open[operation.unit as usize..(operation.unit + operation.units) as usize].fill(false);
                    *slot = None;
                }
                Ok(())
            })?;
        }
        if any > 0 {
            last = Instant::now();
        } else {
            ensure!(last.elapsed() < TIMEOUT, "no response from a back end in {} s", TIMEOUT.as_secs());
            net.wait(&links, Duration::from_millis(10))?;
        }
    }
    let seconds = begin.elapsed().as_secs_f64();
    let [reads, writes] = [&times[0], &times[1]].map(Histogram::len);
    let latency = |at: usize| (!times[at].is_empty()).then(|| Latency::of(&times[at]));
    Ok(Report {
        test: "block",
        transport: net.name(),
        backends: links.len(),
        seconds,
        reads,
        writes,
        operations_per_s: (reads + writes) as f64 / seconds,
        gbit_per_s: done_units as f64 * UNIT as f64 * 8.0 / seconds / 1e9,
        read_latency_us: latency(0),
        write_latency_us: latency(1),
    })
}

/// Begins an operation; `None` if all units tried are in use.
fn start(
    links: &mut [Link],
    load: &Load,
    disk: &mut Disk,
    random: &mut Random,
    slot: u64,
    scratch: &mut Vec<u8>,
) -> Result<Option<Operation>> {
    let units = load.size.map_or_else(|| mixed(random.next() % 100), |size| (size / UNIT) as u64);
    let Some(unit) = disk.choose(random, units) else { return Ok(None) };
    let writes = random.next() % 100 >= load.reads;
    let mut header = [0; HEADER];
    header[0] = if writes { WRITE } else { READ };
    header[1..9].copy_from_slice(&(unit * UNIT as u64).to_be_bytes());
    header[9..].copy_from_slice(&(units as u32 * UNIT as u32).to_be_bytes());
    let begin = Instant::now();
    let missing = if writes {
        disk.versions[unit as usize..(unit + units) as usize].iter_mut().for_each(|version| *version += 1);
        disk.expected(unit, units, scratch);
        links.iter_mut().try_for_each(|link| link.begin(slot, &[&header, scratch]))?;
        links.len()
    } else {
        let from = random.next() as usize % links.len();
        links[from].begin(slot, &[&header])?;
        1
    };
    Ok(Some(Operation { writes, unit, units, missing, begin }))
}

/// Selects a size by a number below 100.
fn mixed(number: u64) -> u64 {
    let mut below = 0;
    for (units, share) in MIX {
        below += share;
        if number < below {
            return units;
        }
    }
    LONGEST
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { transport, backends, reads, writes, seconds, .. } = self;
        writeln!(f, "block storage over {transport}, {backends} back ends")?;
        writeln!(f, "{reads} reads and {writes} writes in {seconds:.2} s")?;
        writeln!(f, "{:.0} operations/s, {:.3} Gbit/s", self.operations_per_s, self.gbit_per_s)?;
        writeln!(f, "{:>8} {:>10} {:>10} {:>10} {:>10}", "", "p50", "p99", "p99.9", "max us")?;
        for (name, latency) in [("read", &self.read_latency_us), ("write", &self.write_latency_us)] {
            let Some(Latency { p50, p99, p99_9, max, .. }) = latency else { continue };
            writeln!(f, "{name:>8} {p50:>10.1} {p99:>10.1} {p99_9:>10.1} {max:>10.1}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn request(operation: u8, offset: u64, len: u32, data: &[u8]) -> Vec<u8> {
        [&[operation][..], &offset.to_be_bytes(), &len.to_be_bytes(), data].concat()
    }

    #[test]
    fn a_back_end_stores_data_and_refuses_invalid_requests() {
        let mut store = Store(vec![0; 2 * UNIT]);
        assert_eq!(store.answer(&request(WRITE, 4095, 2, b"ab")), [DONE]);
        assert_eq!(store.answer(&request(READ, 4094, 4, b"")), *b"\0\0ab\0");
        let huge = u32::MAX;
        for wrong in [
            vec![],
            vec![READ; HEADER - 1],
            request(READ, 8190, 3, b""),
            request(READ, u64::MAX, 1, b""),
            request(READ, 0, huge, b""),
            request(READ, 0, 1, b"x"),
            request(WRITE, 0, 2, b"x"),
            request(WRITE, 8191, 2, b"xy"),
            request(2, 0, 1, b"x"),
        ] {
            assert_eq!(store.answer(&wrong), [REFUSED], "{wrong:?}");
        }
    }

    #[test]
    fn no_two_open_operations_share_a_unit() {
        let mut disk = Disk { versions: vec![0; 64], open: vec![false; 64] };
        let mut random = Random(3);
        let mut taken = vec![];
        while let Some(unit) = disk.choose(&mut random, 4) {
            taken.push(unit);
        }
        taken.sort_unstable();
        assert!(taken.len() > 8 && taken.windows(2).all(|pair| pair[0] + 4 <= pair[1]), "{taken:?}");
        // The expected content changes with each write, and differs between units.
        let (mut old, mut new) = (vec![], vec![]);
        disk.expected(5, 2, &mut old);
        assert_eq!(old, [0; 2 * UNIT]);
        disk.versions[5..7].fill(1);
        disk.expected(5, 2, &mut old);
        assert_ne!(old[..UNIT], old[UNIT..]);
        disk.versions[5] = 2;
        disk.expected(5, 2, &mut new);
        assert!(old[..UNIT] != new[..UNIT] && old[UNIT..] == new[UNIT..]);
        let shares: Vec<u64> = (0..100).map(mixed).collect();
        assert_eq!([1, 4, 16, 32].map(|units| shares.iter().filter(|of| **of == units).count()), [60, 25, 10, 5]);
    }
}
