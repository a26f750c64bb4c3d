//! A gateway pod that one tenant overloads, with and without the tenant limiter (Albatross, SIGCOMM'25, figures 13 and
//! 14). The limiter and the balancer are the real ones; the pod's cores are a model.

use anyhow::{Context, Result};
use bifrost_tables::{LimiterConfig, TenantLimiter};
use serde_json::{Map, Value, json};

use super::gateway::load::{Arrival, exponential};
use super::gateway::pod::{Pod, Setup};
use super::plot::Panel;
use super::runs::each;
use super::{Bar, Outcome};
use crate::Rng;

/// Rates of the tenants before and after the surge, packets per second; the first tenant is the dominant one (figure
/// 13).
const BEFORE: [f64; 4] = [4e6, 3e6, 2e6, 1e6];
const AFTER: [f64; 4] = [34e6, 3e6, 2e6, 1e6];
/// The pod's capacity: 20 Mpps.
const CORES: u16 = 20;
const SERVICE_NS: f64 = 1000.0;
/// Flows of a tenant.
const FLOWS: u32 = 1000;
const BINS: u64 = 60;
const MB: f64 = 1e6;

pub(super) fn run(quick: bool) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let mut data = Map::new();
    // The paper's 30 s, shortened: meters fill in milliseconds.
    let ns = if quick { 60_000_000 } else { 1_800_000_000 };
    let runs = each(&[false, true], |limited| surge(*limited, ns))?;
    for (limited, tenants) in [false, true].into_iter().zip(&runs) {
        let name = if limited { "with the limiter" } else { "without a limiter" };
        let mut panel = Panel::new(&format!("What is sent of four tenants, {name}"), "ms", "Mpps");
        let bin_s = ns as f64 / BINS as f64 / 1e9;
        for (i, tenant) in tenants.iter().enumerate() {
            let points = tenant.sent.iter().enumerate();
            panel = panel.line(
                format!("tenant {}", i + 1),
                points.map(|(b, n)| (b as f64 * bin_s * 1e3, *n as f64 / bin_s / 1e6)),
            );
        }
        outcome.panels.push(panel);
        let lost: Vec<f64> = tenants.iter().map(|t| t.lost_later() * 100.0).collect();
        let list: Vec<String> = lost.iter().map(|l| format!("{l:.2} %")).collect();
        let rate = tenants[0].sent_later() / (ns as f64 / 2e9) / 1e6;
        outcome.lines.push(format!(
            "{name}: lost of tenants 1 to 4 after the surge: {}; tenant 1 gets {rate:.2} Mpps",
            list.join(", ")
        ));
        data.insert(name.to_string(), json!({ "lost_percent": lost, "dominant_mpps": rate }));
        if limited {
            for (i, lost) in lost.iter().enumerate().skip(1) {
                outcome.bars.push(Bar {
                    name: format!("loss of tenant {}, limited, %", i + 1),
                    value: *lost,
                    limit: 0.0,
                });
            }
            outcome.bars.push(Bar {
                name: "the dominant tenant's rate, limited, Mpps".into(),
                value: rate,
                limit: 10.1,
            });
        }
    }
    collision(quick, &mut outcome, &mut data)?;
    million(quick, &mut outcome, &mut data)?;
    outcome.data = Value::Object(data);
    Ok(outcome)
}

/// By bin: packets of a tenant that arrived, and that left.
#[derive(Clone, Debug, Default)]
struct Tenant {
    arrived: Vec<u64>,
    sent: Vec<u64>,
}

impl Tenant {
    fn sent_later(&self) -> f64 {
        self.sent[BINS as usize / 2..].iter().sum::<u64>() as f64
    }

    /// Share lost in the second half.
    fn lost_later(&self) -> f64 {
        let arrived = self.arrived[BINS as usize / 2..].iter().sum::<u64>() as f64;
        1.0 - self.sent_later() / arrived.max(1.0)
    }
}

/// Packets of tenants with exponential gaps: (time, tenant). Rates change at one point in time.
struct Tenants {
    rng: Rng,
    before: Vec<f64>,
    after: Vec<f64>,
    change_at: f64,
    next: Vec<f64>,
}

impl Tenants {
    fn new(before: &[f64], after: &[f64], change_at: u64) -> Self {
        let mut rng = Rng::new(21);
        let next = before.iter().map(|pps| exponential(&mut rng, 1e9 / pps)).collect();
        Tenants { rng, before: before.into(), after: after.into(), change_at: change_at as f64, next }
    }
}

impl Iterator for Tenants {
    type Item = (u64, usize);

    fn next(&mut self) -> Option<(u64, usize)> {
        let (tenant, at) = self.next.iter().copied().enumerate().min_by(|a, b| a.1.total_cmp(&b.1))?;
        let pps = if at >= self.change_at { self.after[tenant] } else { self.before[tenant] };
        self.next[tenant] = at + exponential(&mut self.rng, 1e9 / pps);
        Some((at as u64, tenant))
    }
}

/// The paper's experiment, with the surge in the middle.
fn surge(limited: bool, ns: u64) -> Result<Vec<Tenant>> {
    let mut limiter = TenantLimiter::new(LimiterConfig { seed: 3, ..LimiterConfig::default() });
    let mut pod = Pod::new(Setup { follow: Some((FLOWS, ns / BINS)), ..Setup::new(CORES, SERVICE_NS) }, 4 * FLOWS)?;
    let mut rng = Rng::new(4);
    let mut tenants = vec![Tenant { arrived: vec![0; BINS as usize], ..Tenant::default() }; 4];
    for (at, tenant) in Tenants::new(&BEFORE, &AFTER, ns / 2).take_while(|(at, _)| *at < ns) {
        let bin = ((at * BINS / ns) as usize).min(BINS as usize - 1);
        tenants[tenant].arrived[bin] += 1;
        // These VNIs do not share a meter.
        if limited && !limiter.admit(at, 100 + tenant as u32, 1).passes {
            continue;
        }
        let flow = tenant as u32 * FLOWS + rng.below(FLOWS.into()) as u32;
        pod.arrive(Arrival { at, flow });
    }
    let ran = pod.finish();
    for (tenant, sent) in tenants.iter_mut().zip(ran.sent_by_bin) {
        tenant.sent = sent;
        tenant.sent.resize(BINS as usize, 0);
    }
    Ok(tenants)
}

/// How long a tenant loses packets if it shares both stages with the dominant one.
fn collision(quick: bool, outcome: &mut Outcome, data: &mut Map<String, Value>) -> Result<()> {
    const HEAVY: u32 = 9;
    let config = LimiterConfig { seed: 3, ..LimiterConfig::default() };
    // The second hash is secret. The tenant is found by checking which packets are dropped when the meters are empty.
    let shares_both = |vni: &u32| {
        let mut limiter = TenantLimiter::new(LimiterConfig { sample_drops: u32::MAX, sample_ns: u64::MAX, ..config });
        while limiter.admit(1, HEAVY, 1).passes {}
        let found: Vec<u32> = limiter.pre_checked().map(|(vni, _)| vni).collect();
        for vni in found {
            limiter.forget(vni);
        }
        !limiter.admit(1, *vni, 1).passes
    };
    let candidates = (1..4000).map(|n| HEAVY + n * config.color_entries);
    let innocent = candidates.into_iter().find(shares_both).context("no VNI shares both stages")?;
    // At the paper's rates, and at a thousandth of them, where samples are rarest.
    let mut worst: f64 = 0.0;
    for (name, scale) in [("at 34 Mpps", 1.0), ("at 34 kpps", 1e-3)] {
        let rate = |r: bifrost_tables::Rate| bifrost_tables::Rate::per_second((r.per_second as f64 * scale) as u64);
        let mut limiter =
            TenantLimiter::new(LimiterConfig { first: rate(config.first), second: rate(config.second), ..config });
        // The other tenant is sampled first, so that the next sample is as far away as possible.
        let other = HEAVY + 1;
        let sampled = |limiter: &TenantLimiter| limiter.counters().sampled_packets > 0;
        while !sampled(&limiter) {
            limiter.admit(1, other, 1);
        }
        let pps = [34e6 * scale, 1e6 * scale];
        let ns = if scale < 1.0 {
            3_000_000_000
        } else if quick {
            50_000_000
        } else {
            1_200_000_000
        };
        let (mut sent, mut lost, mut last) = (0u64, 0u64, 0);
        for (at, tenant) in Tenants::new(&pps, &pps, 0).take_while(|(at, _)| *at < ns) {
            let passes = limiter.admit(at, [HEAVY, innocent][tenant], 1).passes;
            if tenant == 1 {
                (sent, lost) = (sent + 1, lost + u64::from(!passes));
                last = if passes { last } else { at };
            }
        }
        let ms = last as f64 / 1e6;
        worst = worst.max(ms);
        outcome.lines.push(format!(
            "a tenant that shares both stages with one {name}: {lost} of {sent} packets lost, the last after {ms:.3} ms"
        ));
        data.insert(format!("collision {name}"), json!({ "sent": sent, "lost": lost, "last_ms": ms }));
    }
    outcome.bars.push(Bar { name: "a collision clears after, ms".into(), value: worst, limit: 1000.0 });
    Ok(())
}

/// A million tenants and a dominant one: memory use, and whether the others lose anything.
fn million(quick: bool, outcome: &mut Outcome, data: &mut Map<String, Value>) -> Result<()> {
    const TENANTS: u64 = 1_000_000;
    let mut limiter = TenantLimiter::new(LimiterConfig { seed: 3, ..LimiterConfig::default() });
    let mut rng = Rng::new(8);
    let ns = if quick { 20_000_000 } else { 500_000_000 };
    let (mut sent, mut lost) = (0u64, 0u64);
    // Tenant 0 sends 34 Mpps, all others together 10.
    for (at, who) in Tenants::new(&[34e6, 10e6], &[34e6, 10e6], 0).take_while(|(at, _)| *at < ns) {
        let vni = if who == 0 { 0 } else { 1 + rng.below(TENANTS - 1) as u32 };
        let passes = limiter.admit(at, vni, 1).passes;
        if who == 1 {
            (sent, lost) = (sent + 1, lost + u64::from(!passes));
        }
    }
    let bytes = limiter.bytes() as f64;
    outcome.lines.push(format!(
        "a million tenants: {:.2} MB; {lost} of {sent} packets of innocent tenants lost beside 34 Mpps",
        bytes / MB
    ));
    data.insert("a million tenants".into(), json!({ "bytes": bytes, "sent": sent, "lost": lost }));
    outcome.bars.push(Bar { name: "memory for a million tenants, MB".into(), value: bytes / MB, limit: 2.0 });
    outcome.bars.push(Bar {
        name: "packets of a million innocent tenants lost, of a million".into(),
        value: lost as f64 * 1e6 / sent.max(1) as f64,
        limit: 1.0,
    });
    Ok(())
}
