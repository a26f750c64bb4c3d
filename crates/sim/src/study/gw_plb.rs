//! A gateway pod that sprays packets over its cores, compared with one that hashes flows to them (Albatross,
//! SIGCOMM'25, figures 4, 5 and 8 to 12, table 3). The balancer is the real one; cores and caches are models.

use anyhow::Result;
use bifrost_plb::Config;
use bifrost_tables::Meter;
use serde_json::{Map, Value, json};

use super::gateway::cache::{Machine, Replayed, Shared, Spread, Stream, Tables, replay};
use super::gateway::load::{Bursts, HEAVY, Load};
use super::gateway::pod::{Outcome as Ran, Pod, Setup};
use super::gateway::{SERVICES, Service};
use super::plot::Panel;
use super::runs::each;
use super::{Bar, Outcome};

/// Concurrent flows (6).
const FLOWS: u32 = 500_000;
/// Flows per tenant; the paper does not give it.
const FLOWS_OF_A_TENANT: u64 = 50;
/// Flows of our gateway whose entries take half a gigabyte, and the largest number of its sessions.
const HALF_GIGABYTE: u64 = 3_500_000;
const MOST: u64 = 1 << 24;
/// Lines that a packet of VPC-Internet with source NAT reads of its flow and of its tenant, as `gateway-memory lines`
/// (`bifrost-bench`) counts them in the production code: the session and the Internet route; the VPC, the path through
/// its routes, its ACL.
const OWNED: [Shared; 2] =
    [Shared { flows: 1, each: 2, total: 2 }, Shared { flows: FLOWS_OF_A_TENANT, each: 18, total: 18 }];
/// The same for data that tenants share: parts of hash tables, and hosts.
const COMMON_LINES: u64 = 5;
/// Flows for each line of that data.
const COMMON_FLOWS: u64 = 10;
/// Accesses to the private cache, the shared one, and memory that a core overlaps. That of memory is from
/// `gateway-memory time`: 20 lines of flow and tenant, 280 ns each, in 638 ns that a packet waits in a vector. The
/// others are assumed to be the same; `gateway-memory time` measures the second one, too.
const OVERLAP: [f64; 3] = [8.7; 3];
const MS: u64 = 1_000_000;
/// Interruptions of cores. The paper does not give them; these values give latencies the shape of its figure 11: 99 %
/// below 30 us, then an exponential decline. A core is interrupted a hundred times per second for 12 us on average.
const STALLS_NS: (f64, f64) = (10e6, 12e3);
/// Cores of pods.
const CORES: [u16; 4] = [3, 20, 44, 92];

pub(super) fn run(quick: bool) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let mut data = Map::new();
    caches(quick, &mut outcome, &mut data)?;
    affinity(quick, &mut outcome, &mut data)?;
    heavy_hitter(quick, &mut outcome, &mut data)?;
    tail(quick, &mut outcome, &mut data)?;
    balance(quick, &mut outcome, &mut data)?;
    production(quick, &mut outcome, &mut data)?;
    drop_flag(quick, &mut outcome, &mut data)?;
    scaling(quick, &mut outcome, &mut data)?;
    outcome.data = Value::Object(data);
    Ok(outcome)
}

fn internet() -> f64 {
    SERVICES.iter().find(|s| s.name == "VPC-Internet").map_or(1e3, Service::mean_ns)
}

fn pod(setup: Setup, load: Load, ns: u64) -> Result<Ran> {
    Ok(Pod::new(setup, FLOWS)?.run(load, ns))
}

/// The paper's processor has 48 cores and about 200 MB of cache.
fn machine(cores: u64) -> Machine {
    Machine {
        private_bytes: 2 << 20,
        shared_bytes: (105 << 20) * cores.div_ceil(48),
        latency_ns: [5.0, 30.0, 110.0],
        overlap: OVERLAP,
    }
}

const MODES: [(&str, bool); 2] = [("PLB", true), ("RSS", false)];
const SPREADS: [(&str, Spread); 3] =
    [("PLB", Spread::Spray(Config::AFFINITY)), ("PLB, cores in turn", Spread::Spray(0)), ("RSS", Spread::ByFlow)];

/// Figures 4 and 5: effects of sharing tables on caches.
fn caches(quick: bool, outcome: &mut Outcome, data: &mut Map<String, Value>) -> Result<()> {
    let cores: &[u64] = if quick { &[1, 20] } else { &[1, 3, 20, 44, 92] };
    // From tables that fit into private caches to the maximum number of sessions, and then the larger entries.
    let sizes: &[(u64, Entries)] = if quick {
        &[(HALF_GIGABYTE, Entries::Ours), (500_000, Entries::Large)]
    } else {
        &[
            (5_000, Entries::Ours),
            (50_000, Entries::Ours),
            (500_000, Entries::Ours),
            (HALF_GIGABYTE, Entries::Ours),
            (MOST, Entries::Ours),
            (500_000, Entries::Large),
            (3_000_000, Entries::Large),
        ]
    };
    let points: Vec<(u64, Entries, u64)> =
        sizes.iter().flat_map(|(flows, entries)| cores.iter().map(|cores| (*flows, *entries, *cores))).collect();
    let runs: Vec<_> = points.iter().flat_map(|point| SPREADS.map(|(_, spread)| (*point, spread))).collect();
    let replayed = each(&runs, |((flows, entries, cores), spread)| {
        let packets = if quick { 600_000 } else { 1_200_000 };
        Ok(replay(&machine(*cores), &entries.tables(*flows), *cores, *spread, packets))
    })?;
    // The computing time per packet is chosen so that RSS reaches the rate of table 3 with the paper's number of cores
    // and tables beyond the caches.
    let like_paper = (HALF_GIGABYTE, Entries::Ours, if quick { 20 } else { 44 });
    let measured = runs.iter().zip(&replayed).find(|(run, _)| **run == (like_paper, Spread::ByFlow));
    let compute_ns = internet() - measured.map_or(0.0, |(_, replayed)| replayed.waits_ns);
    let packet_ns = |replayed: &Replayed| compute_ns + replayed.waits_ns;
    let mut per_core = Panel::new("A core's rate (cache model), half a gigabyte of tables", "cores", "Mpps");
    let mut hits = Panel::new("Hits in the shared cache, half a gigabyte of tables", "cores", "%");
    for (mode, spread) in SPREADS {
        let is_shown =
            |((f, e, _), s): &((u64, Entries, u64), Spread)| (*f, *e, *s) == (HALF_GIGABYTE, Entries::Ours, spread);
        let shown = || runs.iter().zip(&replayed).filter(|(run, _)| is_shown(run));
        per_core = per_core.line(mode, shown().map(|(((_, _, c), _), r)| (*c as f64, 1e3 / packet_ns(r))));
        hits = hits.line(mode, shown().map(|(((_, _, c), _), r)| (*c as f64, r.shared_hits * 100.0)));
    }
    outcome.panels.extend([per_core, hits]);
    outcome.lines.push(format!("caches: a packet computes for {compute_ns:.0} ns, and waits for the rest"));
    data.insert("compute_ns".into(), json!(compute_ns));
    for ((flows, entries, cores), all) in points.iter().zip(replayed.as_chunks::<3>().0) {
        let [plb, in_turn, rss] = all;
        let [plb_pps, in_turn_pps, rss_pps] = [plb, in_turn, rss].map(|replayed| 1e9 / packet_ns(replayed));
        let [apart, in_turn_apart] = [plb_pps, in_turn_pps].map(|pps| (1.0 - pps / rss_pps) * 100.0);
        let megabytes = entries.tables(*flows).bytes() >> 20;
        let name = format!("caches, {flows} flows, {megabytes} MB{}, {cores} cores", entries.name());
        outcome.lines.push(format!(
            "{name}: PLB {:.3} Mpps a core, RSS {:.3}, {apart:.2} % apart ({in_turn_apart:.2} % with cores in turn); shared cache hits {:.0} and {:.0} %, private {:.0} and {:.0} %",
            plb_pps / 1e6, rss_pps / 1e6, plb.shared_hits * 100.0, rss.shared_hits * 100.0, plb.private_hits * 100.0, rss.private_hits * 100.0
        ));
        for stream in Stream::ALL {
            let [plb, rss] =
                [plb, rss].map(|r| r.by_stream[stream as usize].map(|lines| format!("{lines:.2}")).join(", "));
            outcome.lines.push(format!(
                "  {stream:?}: lines a packet from private cache, shared cache, memory: PLB {plb}; RSS {rss}"
            ));
        }
        let streams = |r: &Replayed| json!(Stream::ALL.map(|s| (format!("{s:?}"), r.by_stream[s as usize])));
        data.insert(
            name,
            json!({
                "plb_pps": plb_pps, "in_turn_pps": in_turn_pps, "rss_pps": rss_pps, "plb_shared_hits": plb.shared_hits, "rss_shared_hits": rss.shared_hits,
                "plb_lines": streams(plb), "rss_lines": streams(rss),
            }),
        );
        // The paper's claim is about tables larger than the caches, and its figure 4 is about this many flows.
        if *flows >= 500_000 {
            let kind = entries.name();
            let name = format!("a core's rate, PLB below RSS, {megabytes} MB of tables{kind}, {cores} cores, %");
            outcome.bars.push(Bar { name, value: apart, limit: 1.0 });
        }
    }
    Ok(())
}

/// What affinity brings to private caches, and what it costs in latency.
fn affinity(quick: bool, outcome: &mut Outcome, data: &mut Map<String, Value>) -> Result<()> {
    let steps: &[u16] = if quick { &[0, Config::AFFINITY] } else { &[0, 1, 2, 4, 8, 16, 32] };
    // The largest pod, and the tables for which private caches matter most.
    let (cores, packets) = if quick { (20, 600_000) } else { (92, 1_200_000) };
    let tables = Entries::Large.tables(u64::from(FLOWS));
    let waits = |spread| replay(&machine(cores), &tables, cores, spread, packets).waits_ns;
    let compute_ns = data.get("compute_ns").and_then(Value::as_f64).unwrap_or_else(internet);
    let rss = compute_ns + waits(Spread::ByFlow);
    let service = internet();
    let answers = each(steps, |affinity| {
        let lost = (1.0 - rss / (compute_ns + waits(Spread::Spray(*affinity)))) * 100.0;
        let p99 = [0.5, 0.9].map(|load| -> Result<f64> {
            let mut setup = Setup::new(20, service);
            setup.plb.affinity = *affinity;
            let (load, ns) = (bursty(setup.plb.cores, service, load), if quick { 30 } else { 200 } * MS);
            Ok(pod(setup, load, ns)?.percentile_us(0.99))
        });
        let [half, high] = p99;
        Ok((lost, half?, high?))
    })?;
    let each = || steps.iter().zip(&answers);
    for (affinity, (lost, half, high)) in each() {
        outcome.lines.push(format!(
            "affinity {affinity}: a core's rate {lost:.2} % below RSS ({cores} cores, assumed entries); P99 with 20 cores {half:.1} us at 50 % load, {high:.1} us at 90 %"
        ));
        data.insert(
            format!("affinity {affinity}"),
            json!({ "below_rss_percent": lost, "p99_us_at_50": half, "p99_us_at_90": high }),
        );
    }
    let line = |of: fn(&(f64, f64, f64)) -> f64| each().map(move |(n, answer)| (f64::from(*n), of(answer)));
    outcome.panels.extend([
        Panel::new(&format!("A core's rate below RSS, {cores} cores"), "affinity, packets", "%")
            .line("PLB", line(|a| a.0)),
        Panel::new("P99 latency by affinity, 20 cores", "affinity, packets", "us")
            .line("50 % load", line(|a| a.1))
            .line("90 % load", line(|a| a.2)),
    ]);
    Ok(())
}

/// The entries that a packet reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Entries {
    /// Those of `bifrost-gateway`: what `gateway-memory lines` (`bifrost-bench`) counts for VPC-Internet with source
    /// NAT, rounded up.
    Ours,
    /// An assumption: the paper's "entries of hundreds of bytes, several per packet", as 16 lines of each flow.
    Large,
}

impl Entries {
    fn name(self) -> &'static str {
        match self {
            Entries::Ours => "",
            Entries::Large => " of assumed entries",
        }
    }

    fn tables(self, flows: u64) -> Tables {
        let (owned, common_lines, common_total) = match self {
            Entries::Ours => (OWNED, COMMON_LINES, (flows / COMMON_FLOWS).max(1)),
            Entries::Large => ([Shared { flows: 1, each: 16, total: 16 }, Shared::default()], 8, 1 << 20),
        };
        Tables {
            flows,
            owned,
            common_lines,
            common_total,
            packet_lines: 8,
            // A ring of 1,024 packets, and as many in the pipeline.
            pool_lines: 16 << 10,
            tenant_flows: FLOWS_OF_A_TENANT,
            private_bytes: size_of::<Meter>() as u64,
        }
    }
}

/// Figure 8: three cores at 10 %, and a flow of up to 130 % of a core.
fn heavy_hitter(quick: bool, outcome: &mut Outcome, data: &mut Map<String, Value>) -> Result<()> {
    let service = internet();
    let core_pps = 1e9 / service;
    let steps: Vec<u32> = if quick { vec![0, 130] } else { (0..=13).map(|n| n * 10).collect() };
    let runs: Vec<(bool, u32)> = MODES.iter().flat_map(|(_, spray)| steps.iter().map(|n| (*spray, *n))).collect();
    let answers = each(&runs, |(spray, percent)| {
        let heavy = core_pps * f64::from(*percent) / 100.0;
        let load = Load::new(3, FLOWS, core_pps * 0.3).heavy(heavy);
        let ns = if quick { 30 } else { 200 } * MS;
        let setup = Setup { spray: *spray, bin_ns: ns, ..Setup::new(3, service) };
        pod(setup, load, ns)
    })?;
    let mut loss = Panel::new("Loss beside a heavy flow, 3 cores", "heavy flow, % of a core", "lost, %");
    let mut busy = Panel::new("Use of the busiest and the idlest core", "heavy flow, % of a core", "%");
    for (mode, spray) in MODES {
        let own = || runs.iter().zip(&answers).filter(move |((s, _), _)| *s == spray);
        loss = loss.line(mode, own().map(|((_, n), o)| (f64::from(*n), o.loss() * 100.0)));
        let edge = |f: fn(f64, f64) -> f64, from: f64| {
            own().map(move |((_, n), o)| {
                let bins = o.busy.first().into_iter().flatten();
                (f64::from(*n), bins.copied().fold(from, f) * 100.0)
            })
        };
        busy = busy.line(format!("{mode}, busiest"), edge(f64::max, 0.0));
        busy = busy.line(format!("{mode}, idlest"), edge(f64::min, 1.0));
    }
    outcome.panels.extend([loss, busy]);
    for ((spray, percent), ran) in runs.iter().zip(&answers).filter(|((_, percent), _)| *percent == 130) {
        let mode = if *spray { "PLB" } else { "RSS" };
        let heavy = ran.sent_of_flow[HEAVY as usize];
        outcome.lines.push(format!(
            "heavy flow of {percent} % of a core, 3 cores, {mode}: {:.3} % lost, {heavy} packets of the heavy flow sent, {} packets out of order",
            ran.loss() * 100.0, ran.disordered
        ));
        data.insert(
            format!("heavy flow, {mode}"),
            json!({ "loss": ran.loss(), "disordered": ran.disordered, "late": ran.late }),
        );
        if *spray {
            let lost = (ran.lost_ring + ran.lost_queue) as f64;
            outcome.bars.push(Bar {
                name: "packets lost, heavy flow of 130 % of a core, PLB".into(),
                value: lost,
                limit: 0.0,
            });
        }
    }
    Ok(())
}

/// Bursts of single flows: each half a core for 5 ms on average, active for this share of the time.
fn bursts(service_ns: f64, share: f64) -> Bursts {
    let length_ns = 5e6;
    Bursts { pause_ns: length_ns * (1.0 - share) / share, length_ns, gap_ns: 2.0 * service_ns }
}

/// A pod's load, this share of what its cores can process; bursts are part of it.
fn bursty(cores: u16, service_ns: f64, load: f64) -> Load {
    let pps = f64::from(cores) * 1e9 / service_ns * load;
    let share = 0.9;
    let background = (pps - share * 0.5e9 / service_ns).max(0.0);
    Load::new(5, FLOWS, background).bursts(bursts(service_ns, share))
}

/// Figure 9: latency by load.
fn tail(quick: bool, outcome: &mut Outcome, data: &mut Map<String, Value>) -> Result<()> {
    let service = internet();
    let loads: &[u32] = if quick { &[50, 90] } else { &[10, 25, 50, 60, 70, 75, 80, 85, 90, 95] };
    let runs: Vec<(bool, u32)> = MODES.iter().flat_map(|(_, spray)| loads.iter().map(|n| (*spray, *n))).collect();
    let cores = 20u16;
    let answers = each(&runs, |(spray, percent)| {
        let load = bursty(cores, service, f64::from(*percent) / 100.0);
        let mut ran =
            pod(Setup { spray: *spray, ..Setup::new(cores, service) }, load, if quick { 30 } else { 200 } * MS)?;
        let p99 = ran.percentile_us(0.99);
        Ok((p99, ran.loss(), ran.disorder()))
    })?;
    let mut panel =
        Panel::new("P99 latency by load, 20 cores, bursts of single flows", "load, %", "us").log(false, true);
    for (mode, spray) in MODES {
        let own = runs.iter().zip(&answers).filter(move |((s, _), _)| *s == spray);
        panel = panel.line(mode, own.map(|((_, n), (p99, ..))| (f64::from(*n), *p99)));
    }
    outcome.panels.push(panel);
    let at = |spray, n| runs.iter().zip(&answers).find(|(r, _)| **r == (spray, n)).map_or((0.0, 0.0, 0.0), |(_, a)| *a);
    for n in loads.iter().filter(|n| **n >= 50) {
        let ((plb, plb_loss, disorder), (rss, rss_loss, _)) = (at(true, *n), at(false, *n));
        outcome.lines.push(format!(
            "load {n} %: P99 PLB {plb:.1} us, RSS {rss:.1} us; lost {:.4} and {:.4} %; PLB out of order {disorder:.1e}",
            plb_loss * 100.0,
            rss_loss * 100.0
        ));
        data.insert(
            format!("load {n} %"),
            json!({ "plb_p99_us": plb, "rss_p99_us": rss, "plb_loss": plb_loss, "rss_loss": rss_loss }),
        );
    }
    let (plb, rss) = (at(true, 90).0, at(false, 90).0);
    outcome.bars.push(Bar { name: "P99 at 90 % load, PLB of RSS, %".into(), value: 100.0 * plb / rss, limit: 100.0 });
    Ok(())
}

/// Figure 10: imbalance of the cores' loads over time.
fn balance(quick: bool, outcome: &mut Outcome, data: &mut Map<String, Value>) -> Result<()> {
    let service = internet();
    let cores = 44u16;
    let ns = if quick { 100 } else { 1000 } * MS;
    let answers = each(&MODES, |(_, spray)| {
        let pps = f64::from(cores) * 1e9 / service * 0.2;
        let load = Load::new(9, FLOWS, pps).bursts(bursts(service, 0.5));
        pod(Setup { spray: *spray, bin_ns: 5 * MS, ..Setup::new(cores, service) }, load, ns)
    })?;
    let mut panel = Panel::new("Standard deviation of the cores' use, 44 cores at 20 %", "ms", "percentage points");
    for ((mode, spray), ran) in MODES.iter().zip(&answers) {
        let bins: Vec<f64> = ran.busy.iter().map(|bin| deviation(bin) * 100.0).collect();
        let mean = bins.iter().sum::<f64>() / bins.len().max(1) as f64;
        let worst = bins.iter().copied().fold(0.0, f64::max);
        outcome.lines.push(format!(
            "use of 44 cores at 20 %, {mode}: standard deviation {mean:.2} percentage points, at most {worst:.2}"
        ));
        data.insert(format!("deviation, {mode}"), json!({ "mean": mean, "max": worst }));
        panel = panel.line(mode, bins.iter().enumerate().map(|(i, d)| (i as f64 * 5.0, *d)));
        if *spray {
            outcome.bars.push(Bar {
                name: "deviation of the cores' use, PLB, points at most".into(),
                value: worst,
                limit: 1.0,
            });
        }
    }
    outcome.panels.push(panel);
    Ok(())
}

fn deviation(values: &[f64]) -> f64 {
    let n = values.len().max(1) as f64;
    let mean = values.iter().sum::<f64>() / n;
    (values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n).sqrt()
}

/// Figure 11: latencies and reordering of pods at low load with interrupted cores.
fn production(quick: bool, outcome: &mut Outcome, data: &mut Map<String, Value>) -> Result<()> {
    let service = internet();
    let pods = [("A", 0.20), ("B", 0.17), ("C", 0.06), ("D", 0.05)];
    let answers = each(&pods, |(_, load)| {
        let pps = 44.0 * 1e9 / service * load;
        let setup = Setup { stalls_ns: Some(STALLS_NS), ..Setup::new(44, service) };
        pod(setup, Load::new(11, FLOWS, pps), if quick { 200 } else { 1500 } * MS)
    })?;
    let mut panel =
        Panel::new("Latency of pods A to D (20, 17, 6, 5 % load)", "us", "share of packets above").log(false, true);
    for ((name, load), mut ran) in pods.into_iter().zip(answers) {
        let above = |ran: &Ran, us: u32| {
            let above = ran.latency_ns.iter().filter(|ns| **ns > us * 1000).count();
            above as f64 / ran.latency_ns.len().max(1) as f64
        };
        let line: Vec<(f64, f64)> = (1..=24).map(|n| n * 5).map(|us| (f64::from(us), above(&ran, us))).collect();
        let (p99, slow, disorder) = (ran.percentile_us(0.99), above(&ran, 30), ran.disorder());
        outcome.lines.push(format!(
            "pod {name}, {:.0} % load: {} packets, P99 {p99:.1} us, above 30 us {:.3} %, late or out of order {disorder:.1e}",
            load * 100.0, ran.sent, slow * 100.0
        ));
        data.insert(format!("pod {name}"), json!({ "packets": ran.sent, "p99_us": p99, "above_30us": slow, "disorder": disorder, "disordered": ran.disordered }));
        outcome.bars.push(Bar {
            name: format!("packets late or out of order, pod {name}, of 100,000"),
            value: disorder * 1e5,
            limit: 1.0,
        });
        outcome.bars.push(Bar { name: format!("latency above 30 us, pod {name}, %"), value: slow * 100.0, limit: 1.0 });
        panel = panel.line(format!("pod {name}"), line.into_iter().filter(|(_, y)| *y > 0.0));
    }
    outcome.panels.push(panel);
    Ok(())
}

/// Figure 12: effect of the drop flag.
fn drop_flag(quick: bool, outcome: &mut Outcome, data: &mut Map<String, Value>) -> Result<()> {
    let service = internet();
    let shares: &[f64] = if quick { &[1e-4] } else { &[1e-6, 1e-5, 1e-4, 1e-3] };
    let ns = if quick { 50 } else { 500 } * MS;
    let runs: Vec<(bool, f64)> = [false, true].iter().flat_map(|f| shares.iter().map(|s| (*f, *s))).collect();
    let answers = each(&runs, |(flag, share)| {
        let load = Load::new(13, FLOWS, 44.0 * 1e9 / service * 0.2);
        pod(Setup { drops: (*share, *flag), ..Setup::new(44, service) }, load, ns)
    })?;
    let mut panel =
        Panel::new("Head-of-line blocking, 44 cores at 20 %", "packets dropped by rules, share", "times a second")
            .log(true, true);
    for (name, flag) in [("without drop flag", false), ("with drop flag", true)] {
        let own = runs.iter().zip(&answers).filter(|((f, _), _)| *f == flag);
        let points: Vec<(f64, f64)> = own.map(|((_, s), o)| (*s, o.blocking as f64 * 1e9 / ns as f64)).collect();
        let list: Vec<String> = points.iter().map(|(s, n)| format!("{n:.0} ({s:.0e})")).collect();
        outcome.lines.push(format!("head-of-line blocking a second, {name}, by share of drops: {}", list.join(", ")));
        data.insert(name.to_string(), json!(points));
        if flag {
            let most = points.iter().map(|p| p.1).fold(0.0, f64::max);
            outcome.bars.push(Bar {
                name: "head-of-line blocking a second, with drop flag".into(),
                value: most,
                limit: 0.0,
            });
        }
        panel = panel.line(name, points.into_iter().filter(|(_, n)| *n > 0.0));
    }
    outcome.panels.push(panel);
    Ok(())
}

/// Table 3, and scaling with cores.
fn scaling(quick: bool, outcome: &mut Outcome, data: &mut Map<String, Value>) -> Result<()> {
    let cores: &[u16] = if quick { &[3, 20] } else { &CORES };
    let runs: Vec<(usize, u16)> = (0..SERVICES.len()).flat_map(|s| cores.iter().map(move |c| (s, *c))).collect();
    let answers = each(&runs, |(service, cores)| {
        let service = SERVICES[*service].mean_ns();
        // More load than the cores can process: what they process is their rate.
        let pps = f64::from(*cores) * 1e9 / service * 1.05;
        let ns = (if quick { 100_000.0 } else { 1_500_000.0 }) / pps * 1e9;
        let ran = pod(Setup::new(*cores, service), Load::new(17, FLOWS, pps), ns as u64)?;
        Ok((ran.sent as f64 * 1e9 / ran.ended_at.max(1) as f64, ran.disorder()))
    })?;
    let mut panel = Panel::new("Rate of a pod under PLB, overloaded by 5 %", "cores", "Mpps");
    for (s, service) in SERVICES.iter().enumerate() {
        let own: Vec<_> = runs.iter().zip(&answers).filter(|((i, _), _)| *i == s).map(|((_, c), a)| (*c, *a)).collect();
        let each: Vec<f64> = own.iter().map(|(c, (pps, _))| pps / f64::from(*c)).collect();
        let (least, most) =
            (each.iter().copied().fold(f64::INFINITY, f64::min), each.iter().copied().fold(0.0, f64::max));
        let list: Vec<String> =
            own.iter().map(|(c, (pps, d))| format!("{c} cores {:.1} Mpps (out of order {d:.0e})", pps / 1e6)).collect();
        outcome.lines.push(format!(
            "{}: {}; a core {:.3} to {:.3} Mpps",
            service.name,
            list.join(", "),
            least / 1e6,
            most / 1e6
        ));
        data.insert(service.name.to_string(), json!(own.iter().map(|(c, (pps, _))| (*c, *pps)).collect::<Vec<_>>()));
        outcome.bars.push(Bar {
            name: format!("{}: a core's rate in the largest pod below the smallest, %", service.name),
            value: (1.0 - each.last().copied().unwrap_or(0.0) / each.first().copied().unwrap_or(1.0)) * 100.0,
            limit: 1.0,
        });
        panel = panel.line(service.name, own.iter().map(|(c, (pps, _))| (f64::from(*c), pps / 1e6)));
    }
    outcome.panels.push(panel);
    Ok(())
}
