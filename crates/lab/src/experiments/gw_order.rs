//! `gw-order`: whether packets of many flows stay in order through a gateway pod of two workers with random service
//! times (Albatross, section 4.1 and figures 11 and 12).

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Result;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bars::{Bar, Sense};
use crate::frame::Experiment;
use crate::gateway::frames::{self, Inner};
use crate::gateway::programs::of_workers;
use crate::gateway::world::{OUTSIDE, REFUSED_PORT, Settings, World};
use crate::interrupt;
use crate::lab::Lab;
use crate::options::Mode;
use crate::plot::{self, Panel, Series};
use crate::report::Table;
use crate::results::from_values;
use crate::standstill;
use crate::stats::{Spread, cell, middle};
use crate::turns;

const FLOWS: u16 = 50;
const VNIS: [u32; 4] = [100, 101, 102, 103];
const PAYLOAD: usize = 200;
/// Packets per batch, and the minimum interval between two batches.
const BATCH: u32 = 32;
const PAUSE: Duration = Duration::from_micros(2500);
/// Maximum sleep of a worker per packet, in cases with random service times.
const JITTER: Duration = Duration::from_micros(100);
/// Packets of a trial at the start, sent as fast as the pod returns them. It measures the pod's rate, because a sleep
/// takes longer than requested, by an amount that depends on the machine. The remaining packets are sent at half that
/// rate: a saturated pod would show its own queue, in which all packets wait longer than the timeout.
const TRIAL: u32 = 3200;
/// Maximum number of packets in flight during the trial.
const TRIAL_WINDOW: u64 = 128;
/// Maximum number of packets in flight, except in cases that delay packets on purpose: a busy machine slows the
/// exchange down.
const WINDOW: u64 = 512;
/// The ACL drops one in this many packets.
const ONE_IN: u32 = 100;
/// Packets that a stopped worker holds: a full ring, and the batch it had taken out.
const MAX_HELD_PACKETS: u64 = 1024 + 32;
/// The exchange ends after this time without a packet, which is longer than a worker stops.
const SILENCE: Duration = Duration::from_secs(2);

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct GwOrder;

/// What happens to the packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Case {
    /// Each has a random service time of up to 100 µs.
    Jitter,
    /// In addition, an ACL drops some, and the pod reports these drops.
    DropFlag,
    /// The same, but the pod does not report them.
    NoDropFlag,
    /// One of the two workers stops for a second.
    StoppedWorker,
    /// For a while the pod's packets are spread by flow instead of being sprayed.
    Fallback,
}

impl Case {
    const ALL: [Case; 5] = [Case::Jitter, Case::DropFlag, Case::NoDropFlag, Case::StoppedWorker, Case::Fallback];

    fn has_drops(self) -> bool {
        matches!(self, Case::DropFlag | Case::NoDropFlag)
    }

    fn settings(self, packets: u32) -> Settings {
        let stall = format!("stall = {{ worker = 1, after_packets = {}, ms = 1000 }}\n", packets / 10);
        let jitter = format!("jitter_us = {}\n", JITTER.as_micros());
        Settings {
            vnis: VNIS.to_vec(),
            // Threads are descheduled for milliseconds. Packets dropped without a report delay others for this
            // timeout.
            timeout_ms: if self.has_drops() { 20 } else { 100 },
            queue_entries: 8192,
            limiter: String::new(),
            tests: match self {
                Case::Jitter | Case::DropFlag => jitter,
                Case::NoDropFlag => jitter + "keep_drops = true\n",
                Case::StoppedWorker => stall,
                Case::Fallback => "jitter_us = 50\n".to_owned(),
            },
            processors: None,
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Case::Jitter => "jitter",
            Case::DropFlag => "drop_flag",
            Case::NoDropFlag => "no_drop_flag",
            Case::StoppedWorker => "stopped_worker",
            Case::Fallback => "fallback",
        })
    }
}

/// The result of one exchange.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// What happened to the packets.
    #[serde(rename = "mode")]
    pub case: Case,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Packets sent.
    pub sent_packets: u64,
    /// Packets that the ACL dropped, of these.
    pub refused_packets: u64,
    /// Packets received.
    pub received_packets: u64,
    /// Packets received after a later one of their flow, of these.
    pub reordered_packets: u64,
    /// Entries of order queues that timed out.
    pub timed_out_packets: u64,
    /// Packets that returned to the pipeline after their entry had timed out.
    pub late_packets: u64,
    /// Packets that were spread by flow.
    pub by_flow_packets: u64,
}

impl Row {
    fn lost(&self) -> f64 {
        self.sent_packets as f64 - self.refused_packets as f64 - self.received_packets as f64
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { case, received_packets, reordered_packets, timed_out_packets, .. } = self;
        write!(
            f,
            "{case}: {received_packets} packets received, {reordered_packets} out of order, {timed_out_packets} \
             timeouts"
        )
    }
}

impl Experiment for GwOrder {
    fn name(&self) -> &'static str {
        "gw-order"
    }

    fn summary(&self) -> &'static str {
        "Order of packets that a gateway sprays over two workers (SIGCOMM'25 section 4.1, figures 11, 12)"
    }

    /// None: it builds its own network.
    fn modes(&self) -> Vec<Mode> {
        Vec::new()
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let packets = (lab.seconds(5.0, 1.6) * f64::from(BATCH) / PAUSE.as_secs_f64()) as u32;
        turns::each(lab.repetitions(3), &Case::ALL, |case, repetition| {
            let attempt = || {
                let watch = standstill::Watch::start()?;
                let row = measure(lab, *case, repetition, packets)?;
                Ok((watch.finish()?, row))
            };
            standstill::least_disturbed(1, |row: &Row| row.sent_packets, attempt).map(|(row, _)| row)
        })
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut table =
            Table::new(&["case", "packets", "dropped by the ACL", "lost", "out of order", "timeouts", "late"]);
        for case in Case::ALL {
            let of = |field: fn(&Row) -> f64| cell(spread(&rows, case, field));
            table.row(vec![
                case.to_string(),
                of(|r| r.sent_packets as f64),
                of(|r| r.refused_packets as f64),
                of(Row::lost),
                of(|r| r.reordered_packets as f64),
                of(|r| r.timed_out_packets as f64),
                of(|r| r.late_packets as f64),
            ]);
        }
        Ok(format!(
            "{FLOWS} flows of four tenants, sprayed over the two workers of a pod, which sleep for a random time per \
             packet. With `drop_flag` and `no_drop_flag` the ACL drops one packet in {ONE_IN}; the pod reports drops \
             to the pipeline, or does not. With `stopped_worker` one of the two workers stops for a second. With \
             `fallback` packets are spread by flow in the second and in the last quarter of the exchange. Medians, \
             with the minimum and maximum of the repetitions in brackets.\n\n{}",
            table.render()
        ))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let cases = [Case::Jitter, Case::DropFlag, Case::NoDropFlag];
        type Field = fn(&Row) -> f64;
        let series: [(Series, Field); 2] = [
            (Series::off("timeouts"), |r| r.timed_out_packets as f64),
            (Series::on("out of order"), |r| r.reordered_packets as f64),
        ];
        let panel = Panel::over(
            "sprayed over two workers",
            ("case", &cases[..]),
            ("packets", false),
            &series,
            |field, case| spread(&rows, *case, field),
        );
        Ok(vec![plot::draw(&directory.join("order.svg"), &[panel], 1)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let worst = |cases: &[Case], field: fn(&Row) -> f64| {
            rows.iter().filter(|row| cases.contains(&row.case)).map(field).reduce(f64::max)
        };
        let none = |name: &str, cases: &[Case], field: fn(&Row) -> f64| {
            Bar::new(name, worst(cases, field), Sense::AtMost, 0.0, "packets").exact()
        };
        let timeouts = |case| middle(spread(&rows, case, |r| r.timed_out_packets as f64));
        let rarer = timeouts(Case::NoDropFlag) / timeouts(Case::DropFlag).max(1.0);
        let few = |row: &Row| row.late_packets.max(row.timed_out_packets) as f64;
        Ok(vec![
            none("timeouts with jitter alone, worst run", &[Case::Jitter], |r| r.timed_out_packets as f64),
            none("packets out of order where nothing times out, worst run", &Case::ALL, |r| {
                if r.timed_out_packets == 0 { r.reordered_packets as f64 } else { 0.0 }
            }),
            none("packets out of order with jitter alone, worst run", &[Case::Jitter], |r| r.reordered_packets as f64),
            none("packets lost, worst run", &Case::ALL, Row::lost),
            Bar::new(
                "timeouts without the drop flag, as many times as with it",
                Some(rarer),
                Sense::AtLeast,
                10.0,
                "x",
            ),
            Bar::new(
                "packets that a stopped worker delays beyond the timeout, worst run",
                worst(&[Case::StoppedWorker], few),
                Sense::AtMost,
                MAX_HELD_PACKETS as f64,
                "packets",
            )
            .exact(),
            none("packets of others that a stopped worker puts out of order, worst run", &[Case::StoppedWorker], |r| {
                r.reordered_packets.saturating_sub(r.late_packets) as f64
            }),
            none("packets out of order while spreading changes, worst run", &[Case::Fallback], |r| {
                r.reordered_packets as f64
            }),
            Bar::new(
                "packets spread by flow while spreading changes, least run",
                rows.iter().filter(|r| r.case == Case::Fallback).map(|r| r.by_flow_packets as f64).reduce(f64::min),
                Sense::AtLeast,
                1000.0,
                "packets",
            )
            .exact(),
        ])
    }
}

/// The median over repetitions; `None` if that was not measured.
fn spread(rows: &[Row], case: Case, field: fn(&Row) -> f64) -> Option<Spread> {
    Spread::of(rows.iter().filter(|row| row.case == case).map(field))
}

fn measure(lab: &Lab, case: Case, repetition: u32, packets: u32) -> Result<Row> {
    let mut world = World::start(lab, &format!("{case}-{repetition}"), &case.settings(packets))?;
    let usual_window = if matches!(case, Case::NoDropFlag | Case::StoppedWorker) { u64::MAX } else { WINDOW };
    let mut seen = Seen::default();
    let (began, mut pause, mut window) = (Instant::now(), Duration::ZERO, TRIAL_WINDOW);
    let (mut next, mut refused) = (began, 0u64);
    for number in 0..packets {
        if number == TRIAL {
            (pause, window) = ((2 * BATCH * began.elapsed() / TRIAL).max(PAUSE), usual_window);
        }
        if case == Case::Fallback && number % (packets / 4).max(1) == 0 && number > 0 {
            world.set_mode(if (number / (packets / 4).max(1)) % 2 == 1 { "rss" } else { "plb" })?;
        }
        let refuse = case.has_drops() && number >= TRIAL && number % ONE_IN == ONE_IN / 2;
        refused += u64::from(refuse);
        let (headers, payload) = packet(number, refuse)?;
        world.send(&[&headers, &payload]);
        if number % BATCH == BATCH - 1 {
            world.flush();
            next = (next + pause).max(Instant::now());
            let deadline = next + SILENCE;
            while Instant::now() < next
                || u64::from(number + 1) - refused - seen.packets > window && Instant::now() < deadline
            {
                world.drain(|frame| seen.take(frame))?;
                std::thread::sleep(Duration::from_micros(200));
            }
        }
    }
    world.flush();
    interrupt::check()?;
    let mut last = Instant::now();
    while seen.packets < u64::from(packets) - refused && last.elapsed() < SILENCE {
        let before = seen.packets;
        world.drain(|frame| seen.take(frame))?;
        if seen.packets > before {
            last = Instant::now();
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    // Workers publish their counters every few milliseconds.
    interrupt::sleep(Duration::from_millis(100))?;
    let dropped = of_workers(&world.pod.status()?, "dropped_acl_packets")?;
    Ok(Row {
        case,
        repetition,
        sent_packets: packets.into(),
        refused_packets: dropped,
        received_packets: seen.packets,
        reordered_packets: seen.reordered,
        timed_out_packets: world.of_pod("order/timed_out_packets")?,
        late_packets: world.of_pod("order/sent_late_packets")?,
        by_flow_packets: world.of_pod("order/dispatched_unordered_packets")?,
    })
}

/// A packet of a flow, with its number. `refuse`: it is for the port that the ACL refuses.
fn packet(number: u32, refuse: bool) -> Result<([u8; frames::HEADERS], [u8; PAYLOAD])> {
    let flow = (number % u32::from(FLOWS)) as u16;
    let (destination, port) = if refuse { (OUTSIDE, REFUSED_PORT) } else { ([192, 168, 0, 2], 9) };
    let inner = Inner {
        vni: VNIS[usize::from(flow) % VNIS.len()],
        source: [192, 168, 0, 1].into(),
        destination: destination.into(),
        ports: (1024 + flow, port),
    };
    let mut payload = [number as u8; PAYLOAD];
    payload[..4].copy_from_slice(&number.to_be_bytes());
    Ok((frames::headers(&inner, PAYLOAD)?, payload))
}

/// The packets received so far.
#[derive(Debug, Default)]
struct Seen {
    packets: u64,
    reordered: u64,
    /// The highest number of each flow.
    last: BTreeMap<u16, u32>,
}

impl Seen {
    fn take(&mut self, frame: &[u8]) {
        let Some((_, flow, payload)) = frames::read(frame) else { return };
        let Some(number) = payload.first_chunk().map(|bytes| u32::from_be_bytes(*bytes)) else { return };
        if payload.len() != PAYLOAD || payload[4..].iter().any(|byte| *byte != number as u8) {
            // A damaged packet counts as lost.
            return;
        }
        self.packets += 1;
        let last = self.last.entry(flow).or_insert(number);
        self.reordered += u64::from(number < *last);
        *last = (*last).max(number);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::results::to_values;

    #[test]
    fn each_bar_can_fail() {
        let row = |case: Case| Row {
            case,
            repetition: 0,
            sent_packets: 20_000,
            refused_packets: if case.has_drops() { 200 } else { 0 },
            received_packets: if case.has_drops() { 19_800 } else { 20_000 },
            reordered_packets: 0,
            timed_out_packets: match case {
                Case::NoDropFlag => 200,
                Case::StoppedWorker => 1000,
                _ => 0,
            },
            late_packets: if case == Case::StoppedWorker { 1000 } else { 0 },
            by_flow_packets: if case == Case::Fallback { 10_000 } else { 0 },
        };
        let missed = |change: fn(&mut Vec<Row>)| {
            let mut rows: Vec<Row> = Case::ALL.into_iter().map(row).collect();
            change(&mut rows);
            GwOrder.bars(&to_values(&rows).unwrap()).unwrap().iter().filter(|bar| !bar.passes()).count()
        };
        assert_eq!(missed(|_| {}), 0);
        assert_eq!(missed(|rows| rows[0].timed_out_packets = 1), 1);
        assert_eq!(missed(|rows| rows[0].reordered_packets = 1), 2);
        assert_eq!(missed(|rows| rows[1].timed_out_packets = 21), 1);
        assert_eq!(missed(|rows| rows[2].received_packets -= 1), 1);
        assert_eq!(missed(|rows| rows[3].late_packets = 1100), 1);
        assert_eq!(missed(|rows| rows[3].reordered_packets = 1001), 1);
        assert_eq!(missed(|rows| rows[4].reordered_packets = 1), 2);
        assert_eq!(missed(|rows| rows[4].by_flow_packets = 0), 1);
    }

    #[test]
    fn order_is_checked_per_flow() {
        let mut seen = Seen::default();
        for number in [0, 1, 2, 52, 51, 50, 100] {
            let (headers, payload) = packet(number, false).unwrap();
            seen.take(&[&headers[..], &payload].concat());
        }
        assert_eq!((seen.packets, seen.reordered), (7, 0), "50, 51 and 52 belong to three flows");
        let (headers, payload) = packet(50, false).unwrap();
        seen.take(&[&headers[..], &payload].concat());
        seen.take(&[&headers[..], &payload[..9]].concat());
        assert_eq!((seen.packets, seen.reordered), (8, 1), "after 100; damaged packets are not counted");
    }
}
