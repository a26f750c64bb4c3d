//! The engine's Swift compared with the paper's pseudo-code: with the same delays, then with the same bottleneck.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use anyhow::Result;
use bifrost_rte::Time;
use bifrost_transport::cc::{AckSample, CongestionControl, Loss, Swift, SwiftConfig};
use serde_json::json;

use super::oracle::{Constants, Oracle};
use super::plot::Panel;
use super::runs::each;
use super::{Bar, Outcome};
use crate::Rng;

const HOPS: u8 = 5;
/// Delay of the fabric without queues, ns.
const BASE_NS: u64 = 20_000;

/// A controller of one flow.
trait Controller: Send {
    fn on_ack(&mut self, now: u64, packets: u16, delay: u64, rtt: u64);
    fn on_loss(&mut self, now: u64, rtt: u64);
    fn window(&self) -> f64;
}

struct Ours(Swift);

impl Controller for Ours {
    fn on_ack(&mut self, now: u64, packets: u16, delay: u64, rtt: u64) {
        let sample = AckSample {
            packets,
            marked_packets: 0,
            fabric_delay_ns: Some(delay),
            standing_delay_ns: delay,
            endpoint_delay_ns: Some(5_000),
            base_delay_ns: BASE_NS,
            rtt_ns: rtt,
            hops: HOPS,
            in_flight: u32::MAX,
        };
        self.0.on_ack(Time(now), &sample);
    }

    fn on_loss(&mut self, now: u64, rtt: u64) {
        // Packets dropped by the queue are due to the window's growth: above the target delay it is reduced in any
        // case.
        let loss = Loss {
            sent: Time(now),
            rtt_ns: rtt,
            base_delay_ns: BASE_NS,
            queue_ns: rtt - rtt.min(BASE_NS),
            congestion: false,
        };
        self.0.on_loss(Time(now), &loss);
    }

    fn window(&self) -> f64 {
        f64::from(self.0.window())
    }
}

impl Controller for Oracle {
    fn on_ack(&mut self, now: u64, packets: u16, delay: u64, rtt: u64) {
        Oracle::on_ack(self, now as f64, f64::from(packets), delay as f64, 5_000.0, u32::from(HOPS), rtt as f64);
    }

    fn on_loss(&mut self, now: u64, rtt: u64) {
        self.on_fast_recovery(now as f64, rtt as f64);
    }

    fn window(&self) -> f64 {
        Oracle::window(self)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// The engine's.
    Engine,
    /// The paper's.
    Paper,
}

const KINDS: [(Kind, &str); 2] = [(Kind::Engine, "the engine's"), (Kind::Paper, "the pseudo-code")];

/// Both with the same constants, which are the engine's for `noise` ns of scheduling noise.
fn controller(kind: Kind, initial: u16, noise: u64) -> Box<dyn Controller> {
    let s = SwiftConfig::new(initial, 4096, noise);
    match kind {
        Kind::Engine => Box::new(Ours(Swift::new(s))),
        Kind::Paper => {
            let c = Constants {
                ai: f64::from(s.additive),
                beta: f64::from(s.beta),
                max_mdf: f64::from(s.max_decrease),
                base_target: (BASE_NS + s.margin_ns(BASE_NS, 0)) as f64,
                per_hop: s.per_hop_ns as f64,
                fs_range: s.margin_ns(BASE_NS, 0) as f64,
                fs_min: f64::from(s.scaling_min_window),
                fs_max: f64::from(s.scaling_max_window),
                endpoint_target: s.endpoint_target_ns as f64,
                min_cwnd: f64::from(s.min_window),
                max_cwnd: f64::from(s.max_window),
            };
            Box::new(Oracle::new(c, f64::from(initial)))
        }
    }
}

pub(super) fn run(quick: bool) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let mut data = serde_json::Map::new();
    same_delays(&mut outcome, &mut data);
    same_bottleneck(quick, &mut outcome, &mut data)?;
    random_loss(quick, &mut outcome, &mut data)?;
    outcome.data = data.into();
    Ok(outcome)
}

type Data = serde_json::Map<String, serde_json::Value>;

/// Both get the same delays: up, down, noise, and a jump.
fn same_delays(outcome: &mut Outcome, data: &mut Data) {
    const NOISE: u64 = 100_000;
    let mut both = KINDS.map(|(kind, _)| controller(kind, 128, NOISE));
    let mut rng = Rng::new(1);
    let mut lines = [Vec::new(), Vec::new()];
    let mut delays = Vec::new();
    let mut worst = 0.0f64;
    let (mut now, rtt) = (1_000_000_000, 150_000);
    for step in 0..4000u64 {
        now += 50_000;
        let wave = (step % 800).abs_diff(400) * 1_000;
        let jump = if (2400..2800).contains(&step) { 2_000_000 } else { 0 };
        let delay = BASE_NS + wave + jump + rng.below(30_000);
        both.iter_mut().for_each(|c| c.on_ack(now, 16, delay, rtt));
        let [a, b] = [0, 1].map(|i| both[i].window());
        worst = worst.max((a - b).abs() / b);
        if step % 16 == 0 {
            let ms = (now - 1_000_000_000) as f64 / 1e6;
            lines[0].push((ms, a));
            lines[1].push((ms, b));
            delays.push((ms, delay as f64 / 1e3));
        }
    }
    let [a, b] = lines;
    outcome
        .panels
        .push(Panel::new("The same delays: windows", "ms", "packets").line(KINDS[0].1, a).line(KINDS[1].1, b));
    outcome.panels.push(Panel::new("The delays", "ms", "us").line("fabric delay", delays));
    outcome.lines.push(format!("same delays: windows differ by at most {:.3} %", worst * 100.0));
    data.insert("same_delays_worst_percent".into(), json!(worst * 100.0));
    outcome.bars.push(Bar { name: "difference of windows, same delays, %".into(), value: worst * 100.0, limit: 1.0 });
}

struct Shared {
    utilization: f64,
    p50_us: f64,
    p99_us: f64,
    fairness: f64,
    dropped: f64,
}

/// Flows that share a bottleneck of 100 Gbit/s.
fn same_bottleneck(quick: bool, outcome: &mut Outcome, data: &mut Data) -> Result<()> {
    let flows: &[usize] = if quick { &[1, 10, 100] } else { &[1, 3, 10, 30, 100, 300, 1000, 3000] };
    // The paper's testbed, and hosts with a millisecond of scheduling noise (the default).
    let noises = [(25_000, "target 25 us over base"), (1_000_000, "target 1 ms over base (default)")];
    let runs: Vec<(Kind, u64, usize)> = KINDS
        .iter()
        .flat_map(|(k, _)| noises.iter().flat_map(move |(t, _)| flows.iter().map(move |n| (*k, *t, *n))))
        .collect();
    let time = if quick { 50_000_000 } else { 200_000_000 };
    let answers = each(&runs, |(kind, noise, n)| Ok(bottleneck(*kind, *noise, *n, time, 0.0)))?;
    let mut delay = Panel::new("A 100 Gbit/s bottleneck: delay in the queue, P50", "flows", "us").log(true, true);
    let mut fair = Panel::new("A 100 Gbit/s bottleneck: fairness (Jain)", "flows", "index").log(true, false);
    for (kind, kind_name) in KINDS {
        for (noise, noise_name) in noises {
            let own = || runs.iter().zip(&answers).filter(|((k, t, _), _)| *k == kind && *t == noise);
            let name = format!("{kind_name}, {noise_name}");
            for ((_, _, n), a) in own() {
                outcome.lines.push(format!(
                    "bottleneck, {name}, {n} flows: {:.1} % used, queue p50 {:.1} us p99 {:.1} us, fairness {:.3}, {:.4} % \
                     dropped",
                    a.utilization * 100.0,
                    a.p50_us,
                    a.p99_us,
                    a.fairness,
                    a.dropped * 100.0
                ));
                data.insert(
                    format!("bottleneck, {name}, {n}"),
                    json!({ "utilization": a.utilization, "queue_p50_us": a.p50_us, "queue_p99_us": a.p99_us,
                            "fairness": a.fairness, "dropped": a.dropped }),
                );
            }
            delay = delay.line(&name, own().map(|((_, _, n), a)| (*n as f64, a.p50_us)));
            fair = fair.line(&name, own().map(|((_, _, n), a)| (*n as f64, a.fairness)));
        }
    }
    outcome.panels.extend([delay, fair]);
    Ok(())
}

/// Random losses, as on a bad link: the remaining throughput of one flow.
fn random_loss(quick: bool, outcome: &mut Outcome, data: &mut Data) -> Result<()> {
    let losses: &[f64] = if quick { &[0.0, 0.01] } else { &[0.0, 0.0001, 0.001, 0.003, 0.01, 0.03] };
    let runs: Vec<(Kind, f64)> = KINDS.iter().flat_map(|(k, _)| losses.iter().map(move |l| (*k, *l))).collect();
    let answers = each(&runs, |(kind, loss)| Ok(bottleneck(*kind, 25_000, 4, 50_000_000, *loss)))?;
    let labels: Vec<String> = losses.iter().map(|l| format!("{} %", l * 100.0)).collect();
    let mut panel = Panel::new("4 flows, packets lost by chance: link used", "loss", "%").over(labels);
    for (kind, name) in KINDS {
        let own = || runs.iter().zip(&answers).filter(|((k, _), _)| *k == kind).map(|((_, l), a)| (*l, a));
        for (loss, a) in own() {
            outcome.lines.push(format!("{name}, {} % random loss: {:.1} % used", loss * 100.0, a.utilization * 100.0));
            data.insert(format!("random loss, {name}, {loss}"), json!(a.utilization));
        }
        panel = panel.line(name, own().enumerate().map(|(i, (_, a))| (i as f64, a.utilization * 100.0)));
    }
    outcome.panels.push(panel);
    Ok(())
}

/// `n` flows with one controller each, over one queue, for `time` ns; the first half is not measured.
fn bottleneck(kind: Kind, noise: u64, n: usize, time: u64, loss: f64) -> Shared {
    /// 1500 bytes at 100 Gbit/s.
    const PACKET_NS: u64 = 120;
    /// Size of the queue: 16 MB.
    const QUEUE_NS: u64 = 1_300_000;
    struct Flow {
        cc: Box<dyn Controller>,
        in_flight: u32,
        next: u64,
        waits: bool,
        delivered: u64,
        rtt: u64,
    }
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
    enum What {
        Ack { sent: u64 },
        Lost,
        Send,
    }
    let mut rng = Rng::new(7);
    let mut flows: Vec<Flow> = (0..n)
        .map(|_| {
            let cc = controller(kind, if n > 100 { 1 } else { 16 }, noise);
            Flow { cc, in_flight: 0, next: 0, waits: true, delivered: 0, rtt: BASE_NS }
        })
        .collect();
    let mut events: BinaryHeap<Reverse<(u64, usize, What)>> =
        (0..n).map(|i| Reverse((rng.below(1_000_000), i, What::Send))).collect();
    let (mut busy, mut queue, mut sent, mut dropped) = (0u64, Vec::new(), 0u64, 0u64);
    while let Some(Reverse((now, i, what))) = events.pop().filter(|e| e.0.0 < time) {
        let flow = &mut flows[i];
        match what {
            What::Ack { sent } => {
                let delay = now - sent;
                flow.rtt = (7 * flow.rtt + delay) / 8;
                flow.in_flight -= 1;
                flow.cc.on_ack(now, 1, delay, flow.rtt);
                flow.delivered += u64::from(now > time / 2);
            }
            What::Lost => {
                flow.in_flight -= 1;
                flow.cc.on_loss(now, flow.rtt);
            }
            What::Send => flow.waits = false,
        }
        let window = flow.cc.window();
        loop {
            let open = if window >= 1.0 { f64::from(flow.in_flight) < window.floor() } else { flow.in_flight == 0 };
            if !open {
                break;
            }
            if flow.next > now {
                if !flow.waits {
                    flow.waits = true;
                    events.push(Reverse((flow.next, i, What::Send)));
                }
                break;
            }
            flow.in_flight += 1;
            sent += 1;
            if window < 1.0 {
                flow.next = now + (flow.rtt as f64 / window) as u64;
            }
            let wait = busy.saturating_sub(now);
            if wait > QUEUE_NS || rng.chance(loss) {
                dropped += u64::from(wait > QUEUE_NS);
                events.push(Reverse((now + wait + BASE_NS, i, What::Lost)));
                continue;
            }
            busy = busy.max(now) + PACKET_NS;
            if now > time / 2 && sent.is_multiple_of(16) {
                queue.push(wait as f64 / 1e3);
            }
            events.push(Reverse((busy + BASE_NS, i, What::Ack { sent: now })));
        }
    }
    let rates: Vec<f64> = flows.iter().map(|f| f.delivered as f64).collect();
    let (sum, squares) = (rates.iter().sum::<f64>(), rates.iter().map(|r| r * r).sum::<f64>());
    Shared {
        utilization: sum * PACKET_NS as f64 / (time / 2) as f64,
        p50_us: super::runs::percentile(&mut queue, 0.5),
        p99_us: super::runs::percentile(&mut queue, 0.99),
        fairness: if squares > 0.0 { sum * sum / (n as f64 * squares) } else { 0.0 },
        dropped: dropped as f64 / sent.max(1) as f64,
    }
}
