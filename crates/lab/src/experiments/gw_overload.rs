//! `gw-overload`: one of four tenants starts to send far more, and whether the others are affected (Albatross,
//! figures 13 and 14).
//!
//! At a hundredth of the paper's scale: 40, 30, 20 and 10 thousand packets per second; the first tenant rises to 340.
//! The pod processes 200 thousand per second, and the limiter grants a tenant 80 in its first stage and 20 in its
//! second.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use bifrost_tables::{LimiterConfig, Rate, Stage, TenantLimiter};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bars::{Bar, Sense};
use crate::frame::Experiment;
use crate::gateway::frames::{self, HEADERS, Inner};
use crate::gateway::world::{Processors, Settings, World};
use crate::interrupt;
use crate::lab::Lab;
use crate::options::Mode;
use crate::plot::{self, Panel, Series};
use crate::processor;
use crate::report::{Table, number};
use crate::results::from_values;
use crate::stats::median_of;
use crate::turns;

/// Rates of the tenants, thousand packets/s; the first one bursts.
const KPPS: [u32; 4] = [40, 30, 20, 10];
const BURST_KPPS: u32 = 340;
/// Rate of each of the pod's two workers, packets/s.
const WORKER_PACKETS_PER_S: u64 = 100_000;
/// The limiter's stages, packets/s.
const STAGES: [u64; 2] = [80_000, 20_000];
/// The seed of the limiter's hash, so that a tenant that collides with the first one can be chosen.
const SEED: u64 = 1;
const FIRST: u32 = 100;
/// The limiter's burst: 100 µs at the paper's rates, hence the same 800 and 200 packets, which last a hundred times
/// as long here. (The paper does not state its burst.)
const BURST_US: u64 = 10_000;
/// The processor of the lab and of the pod's workers, which are idle half of the time; and that of the pipeline
/// alone.
const LAB: usize = 0;
const PIPELINE: usize = 1;
const PAYLOAD: usize = 36;
const BIN: Duration = Duration::from_millis(100);
/// Interval of batches of frames.
const TICK: Duration = Duration::from_micros(500);
/// Frames that are late by more than this are skipped.
const PATIENCE: Duration = Duration::from_millis(2);
/// Time within which a collision must be resolved.
const CLEARED: Duration = Duration::from_secs(1);

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct GwOverload;

/// How tenants are limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Limiter {
    /// Not at all (figure 13).
    Off,
    /// By the two-stage limiter (figure 14).
    On,
    /// By the limiter, and the third tenant shares both of its stages with the first one.
    Collision,
    /// The same, but no drop is sampled, so that the limiter never detects the heavy hitter: proof that there is a
    /// collision to resolve.
    Unsampled,
}

impl Limiter {
    const ALL: [Limiter; 4] = [Limiter::Off, Limiter::On, Limiter::Collision, Limiter::Unsampled];

    /// Whether the third tenant shares both stages with the first.
    fn collides(self) -> bool {
        matches!(self, Limiter::Collision | Limiter::Unsampled)
    }
}

impl fmt::Display for Limiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Limiter::Off => "off",
            Limiter::On => "on",
            Limiter::Collision => "collision",
            Limiter::Unsampled => "unsampled",
        })
    }
}

/// The packets of one tenant, by the time at which they were sent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Tenant {
    /// Its VNI.
    pub vni: u32,
    /// Packets sent in each bin.
    pub sent_packets: Vec<u64>,
    /// Packets of each bin that arrived, at any time.
    pub received_packets: Vec<u64>,
}

impl Tenant {
    /// Packets lost in the bins from `bin` on.
    fn lost_from(&self, bin: usize) -> u64 {
        let sum = |bins: &[u64]| bins.iter().skip(bin).sum::<u64>();
        sum(&self.sent_packets).saturating_sub(sum(&self.received_packets))
    }
}

/// The result of one run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// How tenants are limited.
    #[serde(rename = "mode")]
    pub limiter: Limiter,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Length of a bin, ms.
    pub bin_ms: u64,
    /// The bin in which the first tenant begins to burst.
    pub burst_bin: u32,
    /// The tenants.
    pub tenants: Vec<Tenant>,
    /// Packets that the limiter dropped.
    pub limited_packets: u64,
    /// Packets that the pipeline dropped because no worker had room.
    pub no_room_packets: u64,
    /// Frames that the pipeline's device lost because the pipeline was too slow.
    pub device_lost_frames: u64,
}

impl Row {
    /// Rate of the bursting tenant during its burst, sent or delivered, packets/s.
    fn burst_rate(&self, of: fn(&Tenant) -> &[u64]) -> f64 {
        let bins = self.tenants.first().map(of).unwrap_or_default();
        // The first second, in which the limiter's buckets drain, and the ends are excluded.
        let steady = bins.iter().skip(self.burst_bin as usize + 10);
        let (sum, count) = steady.fold((0, 0), |(sum, count), packets| (sum + packets, count + 1));
        sum as f64 / (f64::from(count) * self.bin_ms as f64 / 1000.0)
    }

    /// Loss of innocent tenants among packets sent at least one bin after the start of the burst, percent.
    fn lost_percent(&self) -> f64 {
        let innocent = self.tenants.get(1..).unwrap_or_default();
        let lost: u64 = innocent.iter().map(|tenant| tenant.lost_from(self.burst_bin as usize)).sum();
        let sent: u64 = innocent.iter().flat_map(|t| t.sent_packets.iter().skip(self.burst_bin as usize)).sum();
        100.0 * lost as f64 / sent as f64
    }

    /// Loss of a tenant among packets sent since the start of the burst, percent.
    fn lost_percent_of(&self, tenant: usize) -> f64 {
        let Some(tenant) = self.tenants.get(tenant) else { return f64::NAN };
        let sent: u64 = tenant.sent_packets.iter().skip(self.burst_bin as usize).sum();
        100.0 * tenant.lost_from(self.burst_bin as usize) as f64 / sent as f64
    }

    fn innocent_lost(&self) -> f64 {
        self.tenants.iter().skip(1).map(|tenant| tenant.lost_from(0)).sum::<u64>() as f64
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "limiter {}: innocent tenants lose {:.2} % during the burst", self.limiter, self.lost_percent())
    }
}

impl Experiment for GwOverload {
    fn name(&self) -> &'static str {
        "gw-overload"
    }

    fn summary(&self) -> &'static str {
        "A tenant's burst at a gateway, with and without the limiter (SIGCOMM'25 figures 13, 14)"
    }

    /// None: it builds its own network.
    fn modes(&self) -> Vec<Mode> {
        Vec::new()
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let seconds = lab.seconds(9.0, 4.0);
        turns::each(lab.repetitions(2), &Limiter::ALL, |limiter, repetition| {
            measure(lab, *limiter, repetition, seconds)
        })
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut table = Table::new(&[
            "limiter",
            "burst sent, kpps",
            "burst delivered, kpps",
            "tenant 2 lost, %",
            "tenant 3 lost, %",
            "tenant 4 lost, %",
            "stopped by the limiter",
            "no room",
        ]);
        for limiter in Limiter::ALL {
            let of = |field: &dyn Fn(&Row) -> f64| {
                number(median_of(rows.iter().filter(|r| r.limiter == limiter).map(field)).unwrap_or(f64::NAN))
            };
            table.row(vec![
                limiter.to_string(),
                of(&|r| r.burst_rate(|t| &t.sent_packets) / 1000.0),
                of(&|r| r.burst_rate(|t| &t.received_packets) / 1000.0),
                of(&|r| r.lost_percent_of(1)),
                of(&|r| r.lost_percent_of(2)),
                of(&|r| r.lost_percent_of(3)),
                of(&|r| r.limited_packets as f64),
                of(&|r| r.no_room_packets as f64),
            ]);
        }
        Ok(format!(
            "Four tenants send {KPPS:?} thousand packets per second to a pod that processes {} thousand; after a third \
             of the time the first one sends {BURST_KPPS} thousand. With `collision` the third tenant's VNI shares \
             both stages of the limiter with the first one's. Losses are those of packets sent since the start of the \
             burst. Medians of the repetitions.\n\n{}",
            2 * WORKER_PACKETS_PER_S / 1000,
            table.render()
        ))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let series = [
            Series::off("tenant 1, which bursts"),
            Series::on("tenant 2"),
            Series::other("tenant 3"),
            Series::fourth("tenant 4"),
        ];
        let panel = |limiter: Limiter| {
            let row = rows.iter().find(|row| row.limiter == limiter);
            let line = |(tenant, series): (&Tenant, Series)| {
                let at = |(bin, packets): (usize, &u64)| (bin as f64 * BIN.as_secs_f64(), *packets as f64 / 100.0);
                (series, tenant.received_packets.iter().enumerate().map(at).collect())
            };
            Panel {
                title: format!("limiter: {limiter}"),
                x_title: "sent at [s]".to_owned(),
                y_title: "thousand packets/s delivered".to_owned(),
                lines: row.map_or_else(Vec::new, |row| row.tenants.iter().zip(series).map(line).collect()),
                marks: row.map_or_else(Vec::new, |row| {
                    vec![(f64::from(row.burst_bin) * BIN.as_secs_f64(), "burst".to_owned())]
                }),
                ..Panel::default()
            }
        };
        Ok(vec![plot::draw(&directory.join("overload.svg"), &Limiter::ALL.map(panel), 3)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let of = |limiter| rows.iter().filter(move |row: &&Row| row.limiter == limiter);
        let most = |limiter, field: &dyn Fn(&Row) -> f64| of(limiter).map(field).reduce(f64::max);
        let cleared = (CLEARED.as_millis() / BIN.as_millis()) as usize;
        let late = |row: &Row| {
            let bin = row.burst_bin as usize + cleared;
            row.tenants.iter().skip(1).map(|tenant| tenant.lost_from(bin)).sum::<u64>() as f64
        };
        let beside = |row: &Row| {
            row.tenants.iter().enumerate().filter(|(n, _)| [1, 3].contains(n)).map(|(_, t)| t.lost_from(0)).sum::<u64>()
                as f64
        };
        let nothing = |name: &str, measured| Bar::new(name, measured, Sense::AtMost, 0.0, "packets").exact();
        Ok(vec![
            Bar::new(
                "the burst, least run",
                rows.iter().map(|r| r.burst_rate(|t| &t.sent_packets) / 1000.0).reduce(f64::min),
                Sense::AtLeast,
                0.95 * f64::from(BURST_KPPS),
                "kpps",
            ),
            Bar::new(
                "what innocent tenants lose without the limiter, least run",
                of(Limiter::Off).map(Row::lost_percent).reduce(f64::min),
                Sense::AtLeast,
                40.0,
                "%",
            ),
            nothing(
                "packets of innocent tenants lost with the limiter, worst run",
                most(Limiter::On, &Row::innocent_lost),
            ),
            Bar::new(
                "what the burst gets with the limiter, worst run",
                most(Limiter::On, &|r| r.burst_rate(|t| &t.received_packets) / 1000.0),
                Sense::AtMost,
                1.1 * (STAGES[0] + STAGES[1]) as f64 / 1000.0,
                "kpps",
            ),
            Bar::new(
                "what the colliding tenant loses as long as nobody looks for the heavy one, least run",
                of(Limiter::Unsampled).map(|r| r.lost_percent_of(2)).reduce(f64::min),
                Sense::AtLeast,
                10.0,
                "%",
            ),
            nothing(
                "packets of innocent tenants lost a second after a collision, worst run",
                most(Limiter::Collision, &late),
            ),
            nothing(
                "packets of those that do not collide lost beside a collision, worst run",
                most(Limiter::Collision, &beside),
            ),
        ])
    }
}

/// The tenants' VNIs.
fn vnis(limiter: Limiter) -> Result<[u32; 4]> {
    let third = if limiter.collides() { colliding()? } else { FIRST + 2 };
    Ok([FIRST, FIRST + 1, third, FIRST + 3])
}

/// A VNI that shares both stages of the limiter with [`FIRST`].
fn colliding() -> Result<u32> {
    let stage = |per_second| Rate { per_second, burst: 1 };
    let config = LimiterConfig {
        first: stage(1),
        second: stage(1),
        sample_drops: u32::MAX,
        seed: SEED,
        ..LimiterConfig::default()
    };
    (1..4096)
        .map(|n| FIRST + n * config.color_entries)
        .find(|vni| {
            let mut limiter = TenantLimiter::new(config);
            // The first tenant exhausts both stages at once.
            let used: Vec<_> = (0..3).map(|_| limiter.admit(0, FIRST, 1)).collect();
            let ruling = limiter.admit(0, *vni, 1);
            used.last().is_some_and(|last| !last.passes) && !ruling.passes && ruling.stage == Stage::Meter
        })
        .context("no VNI shares both stages of the limiter")
}

fn settings(limiter: Limiter, vnis: [u32; 4]) -> Settings {
    let [first, second] = STAGES;
    let limiter = match limiter {
        Limiter::Off => "first_packets_per_second = 1000000000\nsecond_packets_per_second = 1000000000\n".to_owned(),
        Limiter::On | Limiter::Collision | Limiter::Unsampled => {
            let sampled = if limiter == Limiter::Unsampled { "sample_drops = 0\n" } else { "" };
            format!(
                "first_packets_per_second = {first}\nsecond_packets_per_second = {second}\nburst_us = \
                 {BURST_US}\ntest_seed = {SEED}\n{sampled}"
            )
        }
    };
    Settings {
        vnis: vnis.to_vec(),
        timeout_ms: 100,
        queue_entries: 32_768,
        limiter,
        tests: format!("packets_per_second = {WORKER_PACKETS_PER_S}\n"),
        processors: Some(Processors { pipeline: PIPELINE, workers: LAB }),
    }
}

fn measure(lab: &Lab, limiter: Limiter, repetition: u32, seconds: f64) -> Result<Row> {
    let vnis = vnis(limiter)?;
    let mut world = World::start(lab, &format!("{limiter}-{repetition}"), &settings(limiter, vnis))?;
    let bins = (seconds / BIN.as_secs_f64()) as usize;
    let burst_bin = bins / 3;
    let mut headers = Vec::new();
    for (n, vni) in (0u16..).zip(vnis) {
        // Several flows per tenant.
        for flow in 0..16 {
            let inner = Inner {
                vni,
                source: [192, 168, 0, 1].into(),
                destination: [192, 168, 0, 2].into(),
                ports: (1024 + 16 * n + flow, 9),
            };
            headers.push(frames::headers(&inner, PAYLOAD)?);
        }
    }
    let tenant = |vni| Tenant { vni, sent_packets: vec![0; bins], received_packets: vec![0; bins] };
    let mut tenants: Vec<Tenant> = vnis.map(tenant).into();
    processor::on(LAB, || send(&mut world, &headers, &mut tenants, burst_bin, bins))?;
    interrupt::check()?;
    // Wait for packets in rings and queues.
    let until = Instant::now() + Duration::from_millis(500);
    while Instant::now() < until {
        world.drain(|frame| take(frame, &mut tenants))?;
        std::thread::sleep(TICK);
    }
    world.nicd.check_alive()?;
    let state = world.nicd.status()?;
    let device = state["device"].as_object().context("the pipeline does not report its device")?;
    let lost = device.iter().filter(|(name, _)| name.contains("drop")).filter_map(|(_, value)| value.as_u64()).sum();
    Ok(Row {
        limiter,
        repetition,
        bin_ms: BIN.as_millis() as u64,
        burst_bin: burst_bin as u32,
        tenants,
        limited_packets: world.of_pod("counters/refused_limited_packets")?,
        no_room_packets: world.of_pod("counters/refused_ring_full_packets")?,
        device_lost_frames: lost,
    })
}

/// Sends due frames, and receives in between.
fn send(
    world: &mut World,
    headers: &[[u8; HEADERS]],
    tenants: &mut [Tenant],
    burst_bin: usize,
    bins: usize,
) -> Result<()> {
    let began = Instant::now();
    let mut due_until = Duration::ZERO;
    let mut owed = [0.0; KPPS.len()];
    let mut turn = 0usize;
    loop {
        let elapsed = began.elapsed();
        let bin = (elapsed.as_nanos() / BIN.as_nanos()) as usize;
        if bin >= bins {
            return Ok(());
        }
        // A sender that was descheduled does not send its whole backlog at once: no network could carry that.
        let step = (elapsed - due_until).min(PATIENCE).as_secs_f64();
        due_until = elapsed;
        let bytes = (bin as u32).to_be_bytes();
        for (n, tenant) in tenants.iter_mut().enumerate() {
            let kpps = if n == 0 && bin >= burst_bin { BURST_KPPS } else { KPPS[n] };
            owed[n] += step * f64::from(kpps) * 1000.0;
            while owed[n] >= 1.0 {
                owed[n] -= 1.0;
                turn += 1;
                world.send(&[&headers[16 * n + turn % 16], &bytes, &[0; PAYLOAD - 4]]);
                tenant.sent_packets[bin] += 1;
            }
        }
        world.flush();
        world.drain(|frame| take(frame, tenants))?;
        if let Some(rest) = (due_until + TICK).checked_sub(began.elapsed()) {
            std::thread::sleep(rest);
        }
    }
}

fn take(frame: &[u8], tenants: &mut [Tenant]) {
    let Some((vni, _, payload)) = frames::read(frame) else { return };
    let bin = payload.first_chunk().map_or(u32::MAX, |bytes| u32::from_be_bytes(*bytes));
    let tenant = tenants.iter_mut().find(|tenant| tenant.vni == vni);
    if let Some(count) = tenant.and_then(|tenant| tenant.received_packets.get_mut(bin as usize)) {
        *count += 1;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::results::to_values;

    #[test]
    fn each_bar_can_fail() {
        let tenant = |vni, sent: u64, burst: (u64, u64)| Tenant {
            vni,
            sent_packets: [vec![sent; 10], vec![burst.0; 20]].concat(),
            received_packets: [vec![sent; 10], vec![burst.1; 20]].concat(),
        };
        let row = |limiter, first, share: u64| Row {
            limiter,
            repetition: 0,
            bin_ms: 100,
            burst_bin: 10,
            tenants: vec![
                tenant(100, 4000, (34_000, first)),
                tenant(101, 3000, (3000, 3000 / share)),
                tenant(102, 2000, (2000, 2000 / share)),
                tenant(103, 1000, (1000, 1000 / share)),
            ],
            limited_packets: 0,
            no_room_packets: 0,
            device_lost_frames: 0,
        };
        let missed = |change: fn(&mut Vec<Row>)| {
            let mut rows = vec![
                row(Limiter::Off, 17_000, 2),
                row(Limiter::On, 10_000, 1),
                row(Limiter::Collision, 10_000, 1),
                row(Limiter::Unsampled, 10_000, 1),
            ];
            rows[2].tenants[2].received_packets[12] = 0;
            rows[3].tenants[2].received_packets[10..].fill(1700);
            change(&mut rows);
            GwOverload.bars(&to_values(&rows).unwrap()).unwrap().iter().filter(|bar| !bar.passes()).count()
        };
        assert_eq!(missed(|_| {}), 0);
        assert_eq!(missed(|rows| rows[1].tenants[0].sent_packets = vec![0; 30]), 1);
        assert_eq!(
            missed(|rows| rows[0].tenants[1..].iter_mut().for_each(|t| t.received_packets = t.sent_packets.clone())),
            1
        );
        assert_eq!(missed(|rows| rows[1].tenants[3].received_packets[25] -= 1), 1);
        assert_eq!(missed(|rows| rows[1].tenants[0].received_packets = vec![12_000; 30]), 1);
        assert_eq!(missed(|rows| rows[3].tenants[2].received_packets[10..].fill(1900)), 1, "there was no collision");
        assert_eq!(missed(|rows| rows[2].tenants[2].received_packets[21] = 0), 1);
        assert_eq!(missed(|rows| rows[2].tenants[1].received_packets[11] = 0), 1);
    }

    #[test]
    fn a_colliding_tenant_exists() {
        let vni = colliding().unwrap();
        assert!(vni < 1 << 24 && vni % 4096 == FIRST);
    }
}
