//! A distributed sort: mappers generate records and send each to the reducer of its key range; reducers sort the
//! received records (paper: section 5.4, figure 11). Records are those of sort benchmarks: 100 bytes, with a key of 10
//! bytes.

use std::fmt;
use std::net::SocketAddr;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, ensure};
use serde::Serialize;

use crate::link::{self, Link, Net};
use crate::random::{Random, mix};

/// Lengths of a record and its key, bytes.
pub(crate) const RECORD: usize = 100;
const KEY: usize = 10;
/// First byte of a call: records follow, or this is the end.
const RECORDS: u8 = 1;
const END: u8 = 2;
/// Content of a response.
const TAKEN: u8 = 0;
const REFUSED: u8 = 1;
/// Time limit of a response.
const TIMEOUT: Duration = Duration::from_secs(60);

type Record = [u8; RECORD];

/// Parameters of a mapper.
#[derive(Clone, Debug)]
pub(crate) struct Map {
    pub(crate) reducers: Vec<SocketAddr>,
    /// Number of records.
    pub(crate) records: u64,
    /// Seed of the records, different for each mapper.
    pub(crate) seed: u64,
    /// Maximum length of a block, bytes.
    pub(crate) block: usize,
    /// Blocks in flight to each reducer.
    pub(crate) depth: usize,
    /// Start time, ms since 1970, common to all mappers; 0: immediately.
    pub(crate) begin_ms: u64,
}

/// Results of a mapper.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Mapped {
    test: &'static str,
    transport: String,
    records: u64,
    /// Sum of the records' hashes.
    checksum: u64,
    /// Time until the reducers have all records.
    run_s: f64,
    /// Part of that time in which the mapper waited for the network.
    block_s: f64,
}

/// Results of a reducer.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Reduced {
    test: &'static str,
    transport: String,
    mappers: usize,
    records: u64,
    checksum: u64,
    /// Whether all keys are within the reducer's range, and in order.
    sorted: bool,
    sort_s: f64,
}

pub(crate) fn map(net: &Net, plan: &Map) -> Result<Mapped> {
    ensure!(
        plan.block >= RECORD && plan.block < link::LONGEST,
        "--block must be {RECORD} to {} bytes",
        link::LONGEST - 1
    );
    let connected: Result<Vec<Link>> = plan.reducers.iter().map(|reducer| net.connect(*reducer)).collect();
    let mut links = connected?;
    if plan.begin_ms > 0 {
        let begin = SystemTime::UNIX_EPOCH + Duration::from_millis(plan.begin_ms);
        let wait = begin.duration_since(SystemTime::now()).context("--begin-ms is in the past; choose a later time")?;
        ensure!(wait <= Duration::from_secs(600), "--begin-ms is more than ten minutes ahead");
        let until = Instant::now() + wait;
        while Instant::now() < until {
            net.wait(&links, until.saturating_duration_since(Instant::now()).min(Duration::from_millis(10)))?;
        }
    }
    let begin = Instant::now();
    let mut blocked = Duration::ZERO;
    let mut random = Random(plan.seed);
    let mut checksum = 0u64;
    let mut blocks: Vec<Vec<u8>> = vec![Vec::with_capacity(plan.block); links.len()];
    for _ in 0..plan.records {
        let record = record(&mut random);
        checksum = checksum.wrapping_add(hash(&record));
        let to = partition(&record, links.len());
        if blocks[to].len() + RECORD > plan.block {
            blocked += wait_until(net, &mut links, |links| links[to].open() < plan.depth)?;
            links[to].begin(0, &[&[RECORDS], &blocks[to]])?;
            blocks[to].clear();
        }
        blocks[to].extend_from_slice(&record);
    }
    for (to, block) in blocks.iter().enumerate() {
        blocked += wait_until(net, &mut links, |links| links[to].open() < plan.depth)?;
        links[to].begin(0, &[&[RECORDS], block])?;
    }
    // Messages are delivered in order, as with TCP, so all records have arrived when the end has.
    blocked += wait_until(net, &mut links, |links| links.iter().all(|link| link.open() == 0))?;
    for link in &mut links {
        link.begin(0, &[&[END]])?;
    }
    blocked += wait_until(net, &mut links, |links| links.iter().all(|link| link.open() == 0))?;
    Ok(Mapped {
        test: "map",
        transport: net.name(),
        records: plan.records,
        checksum,
        run_s: begin.elapsed().as_secs_f64(),
        block_s: blocked.as_secs_f64(),
    })
}

/// Waits until the network makes progress. Returns how long that took.
fn wait_until(net: &Net, links: &mut [Link], mut is_done: impl FnMut(&[Link]) -> bool) -> Result<Duration> {
    let begin = Instant::now();
    if let Net::Messages(worker) = net {
        worker.poll()?;
    }
    loop {
        for link in &mut *links {
            link.take(|_, response| {
                ensure!(response == [TAKEN], "a reducer refused records");
                Ok(())
            })?;
        }
        if is_done(links) {
            return Ok(begin.elapsed());
        }
        ensure!(begin.elapsed() < TIMEOUT, "no response from a reducer in {} s", TIMEOUT.as_secs());
        net.wait(links, Duration::from_millis(10))?;
    }
}

/// Runs reducer `number` of `of`, counted from 0: receives at most `most` records until `mappers` have ended, and sorts
/// them.
pub(crate) fn reduce(
    net: &Net,
    at: SocketAddr,
    mappers: u32,
    (number, of): (usize, usize),
    most: u64,
) -> Result<Reduced> {
    let mut records: Vec<Record> = Vec::new();
    let mut ended = 0;
    link::serve(net, at, mappers, |_, request| {
        let taken = match request.split_first() {
            Some((&RECORDS, block)) => {
                let (some, rest) = block.as_chunks::<RECORD>();
                let fits = rest.is_empty() && (records.len() + some.len()) as u64 <= most;
                if fits {
                    records.extend_from_slice(some);
                }
                fits
            }
            Some((&END, [])) => {
                ended += 1;
                true
            }
            _ => false,
        };
        Ok(vec![if taken { TAKEN } else { REFUSED }])
    })?;
    ensure!(ended == mappers as usize, "{ended} of {mappers} mappers have sent everything");
    let begin = Instant::now();
    records.sort_unstable();
    let sort_s = begin.elapsed().as_secs_f64();
    let sorted = records.is_sorted() && records.iter().all(|record| partition(record, of) == number);
    Ok(Reduced {
        test: "reduce",
        transport: net.name(),
        mappers: ended,
        records: records.len() as u64,
        checksum: records.iter().fold(0, |sum, record| sum.wrapping_add(hash(record))),
        sorted,
        sort_s,
    })
}

/// The reducer of a record's key range.
fn partition(record: &Record, reducers: usize) -> usize {
    let [a, b, c, d, ..] = *record;
    ((u64::from(u32::from_be_bytes([a, b, c, d])) * reducers as u64) >> 32) as usize
}

/// A random key, followed by bytes derived from it.
fn record(random: &mut Random) -> Record {
    let mut record = [0; RECORD];
    let (first, second) = (random.next(), random.next());
    record[..8].copy_from_slice(&first.to_be_bytes());
    record[8..KEY].copy_from_slice(&second.to_be_bytes()[..KEY - 8]);
    let mut word = second;
    for bytes in record[KEY..].chunks_mut(8) {
        word = word.wrapping_mul(0xd1b5_4a32_d192_ed03).wrapping_add(1);
        bytes.copy_from_slice(&word.to_be_bytes()[..bytes.len()]);
    }
    record
}

/// Depends on all bytes and their positions.
fn hash(record: &Record) -> u64 {
    record.chunks(8).fold(0, |hash, bytes| {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        mix(hash ^ u64::from_be_bytes(word))
    })
}

impl fmt::Display for Mapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "map over {}: {} records, checksum {:016x}", self.transport, self.records, self.checksum)?;
        writeln!(f, "{:.3} s, of which {:.3} s waiting for the network", self.run_s, self.block_s)
    }
}

impl fmt::Display for Reduced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let order = if self.sorted { "sorted" } else { "NOT SORTED" };
        writeln!(f, "reduce over {}: {} records from {} mappers", self.transport, self.records, self.mappers)?;
        writeln!(f, "{order} in {:.3} s, checksum {:016x}", self.sort_s, self.checksum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_follow_keys_and_checksums_see_each_change() {
        let mut random = Random(7);
        let mut counts = [0; 3];
        let mut records: Vec<Record> = (0..3000).map(|_| record(&mut random)).collect();
        records.sort_unstable();
        let mut last = 0;
        for record in &records {
            let to = partition(record, 3);
            assert!(to >= last, "ranges are in the order of keys");
            last = to;
            counts[to] += 1;
        }
        assert!(counts.iter().all(|count| (900..1100).contains(count)), "{counts:?}");
        assert_eq!((partition(&[0; RECORD], 8), partition(&[0xff; RECORD], 8)), (0, 7));
        for at in [0, 9, 10, 50, 99] {
            let mut changed = records[0];
            changed[at] ^= 1;
            assert_ne!(hash(&changed), hash(&records[0]), "byte {at}");
        }
    }
}
