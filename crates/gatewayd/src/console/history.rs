//! The last hour of a server: rates of its pods, and the load of their cores. Without I/O.

use std::collections::{BTreeMap, VecDeque};

use bifrost_control::api::{Counts, GatewayPod, Pipeline};
use serde::Serialize;

/// Number of samples that are kept: one hour, at one sample every five seconds.
const KEPT: usize = 720;
/// Maximum number of pods that are asked and have a history.
pub(super) const MAX_PODS: usize = 64;

/// Samples of all pods, oldest first.
#[derive(Debug, Default)]
pub(super) struct History {
    times_ms: VecDeque<u64>,
    pods: BTreeMap<String, Curves>,
    before: Option<(u64, BTreeMap<String, Totals>)>,
}

/// Counters of a pod since its start.
#[derive(Clone, Debug, Default, PartialEq)]
struct Totals {
    arrived: u64,
    limited: u64,
    dropped: u64,
    /// Time that each core was busy, ns.
    busy_ns: Vec<u64>,
}

/// Rates of a pod; `None`: it did not run then, or was restarted.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Curves {
    /// Packets per second that arrived.
    arrived_pps: VecDeque<Option<f64>>,
    /// Packets per second that the limiter dropped.
    limited_pps: VecDeque<Option<f64>>,
    /// Packets per second that were dropped for other reasons.
    dropped_pps: VecDeque<Option<f64>>,
    /// Load of the busiest core, percent.
    busiest_percent: VecDeque<Option<f64>>,
}

/// The data for the page.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct View {
    /// When samples were taken, milliseconds since 1970.
    times_ms: VecDeque<u64>,
    /// The pods' rates. Each list is as long as `times_ms`.
    pods: BTreeMap<String, Curves>,
    /// The current load of each core, percent.
    cores_percent: BTreeMap<String, Vec<f64>>,
}

impl History {
    /// Adds a sample of all counters at `time_ms`, milliseconds since 1970.
    pub(super) fn add(&mut self, time_ms: u64, pipeline: &Pipeline, pods: &BTreeMap<String, GatewayPod>) -> View {
        let totals: BTreeMap<String, Totals> = pipeline
            .pods
            .iter()
            .take(MAX_PODS)
            .map(|pod| (pod.name.clone(), totals(&pod.counters, pods.get(&pod.name))))
            .collect();
        let before = self.before.replace((time_ms, totals.clone()));
        let mut cores_percent = BTreeMap::new();
        if let Some((before_ms, before)) = before.filter(|(before_ms, _)| *before_ms < time_ms) {
            let seconds = (time_ms - before_ms) as f64 / 1e3;
            let known = self.times_ms.len();
            self.times_ms.push_back(time_ms);
            for (name, now) in &totals {
                let curves = self.pods.entry(name.clone()).or_insert_with(|| Curves::empty(known));
                let rates = before.get(name).and_then(|before| rates(before, now, seconds));
                let rates = rates.as_ref();
                curves.arrived_pps.push_back(rates.map(|r| r.arrived));
                curves.limited_pps.push_back(rates.map(|r| r.limited));
                curves.dropped_pps.push_back(rates.map(|r| r.dropped));
                let cores = rates.map(|r| r.cores.clone()).unwrap_or_default();
                curves.busiest_percent.push_back(cores.iter().copied().reduce(f64::max));
                cores_percent.insert(name.clone(), cores);
            }
            self.trim(&totals);
        }
        View { times_ms: self.times_ms.clone(), pods: self.pods.clone(), cores_percent }
    }

    /// Adds a gap for pods that are gone. Removes samples that are too old, and pods that were gone for the whole hour.
    fn trim(&mut self, present: &BTreeMap<String, Totals>) {
        let length = self.times_ms.len();
        for curves in self.pods.values_mut().filter(|curves| curves.arrived_pps.len() < length) {
            curves.lines().into_iter().for_each(|line| line.push_back(None));
        }
        if length > KEPT {
            self.times_ms.pop_front();
            self.pods.values_mut().flat_map(Curves::lines).for_each(|line| {
                line.pop_front();
            });
        }
        let was_there = |curves: &Curves| curves.arrived_pps.iter().any(Option::is_some);
        self.pods.retain(|name, curves| present.contains_key(name) || was_there(curves));
    }
}

impl Curves {
    /// The curves of a pod that did not exist during the first `samples` samples.
    fn empty(samples: usize) -> Curves {
        let none = || VecDeque::from(vec![None; samples]);
        Curves { arrived_pps: none(), limited_pps: none(), dropped_pps: none(), busiest_percent: none() }
    }

    fn lines(&mut self) -> [&mut VecDeque<Option<f64>>; 4] {
        [&mut self.arrived_pps, &mut self.limited_pps, &mut self.dropped_pps, &mut self.busiest_percent]
    }
}

fn totals(counters: &Counts, pod: Option<&GatewayPod>) -> Totals {
    let of = |counts: &Counts, name: &str| counts.get(name).copied().unwrap_or(0);
    let workers = pod.map_or(&[][..], |pod| &pod.workers);
    let limited = of(counters, "refused_limited_packets");
    let refused: u64 = counters.iter().filter(|(name, _)| name.starts_with("refused_")).map(|(_, n)| n).sum();
    Totals {
        arrived: of(counters, "arrived_packets"),
        limited,
        dropped: refused.saturating_sub(limited),
        busy_ns: workers.iter().map(|worker| of(worker, "busy_ns")).collect(),
    }
}

/// Rates of a pod between two samples.
#[derive(Clone, Debug, PartialEq)]
struct Rates {
    arrived: f64,
    limited: f64,
    dropped: f64,
    /// Load of each core, percent.
    cores: Vec<f64>,
}

/// Rates over `seconds`; `None`: a counter has decreased.
fn rates(before: &Totals, now: &Totals, seconds: f64) -> Option<Rates> {
    let rate = |before: u64, now: u64| Some(now.checked_sub(before)? as f64 / seconds);
    let is_same = before.busy_ns.len() == now.busy_ns.len();
    let cores = before.busy_ns.iter().zip(&now.busy_ns).filter(|_| is_same);
    let cores = cores.map(|(before, now)| Some((rate(*before, *now)? / 1e7).min(100.0))).collect::<Option<Vec<_>>>()?;
    Some(Rates {
        arrived: rate(before.arrived, now.arrived)?,
        limited: rate(before.limited, now.limited)?,
        dropped: rate(before.dropped, now.dropped)?,
        cores,
    })
}

#[cfg(test)]
mod tests {
    use bifrost_control::api::PipelinePod;

    use super::*;

    fn counts(all: &[(&'static str, u64)]) -> Counts {
        all.iter().map(|(name, value)| ((*name).into(), *value)).collect()
    }

    /// The state of a pod that has received `packets` packets, of which a tenth was limited, and whose two cores were
    /// busy for `busy_ms`.
    fn server(name: &str, packets: u64, busy_ms: [u64; 2]) -> (Pipeline, BTreeMap<String, GatewayPod>) {
        let pod = PipelinePod {
            name: name.to_owned(),
            counters: counts(&[
                ("arrived_packets", packets),
                ("refused_limited_packets", packets / 10),
                ("refused_queue_full_packets", packets / 100),
            ]),
            ..PipelinePod::default()
        };
        let workers = busy_ms.map(|ms| counts(&[("busy_ns", ms * 1_000_000)])).to_vec();
        let inside = GatewayPod { workers, ..GatewayPod::default() };
        (Pipeline { pods: vec![pod], ..Pipeline::default() }, BTreeMap::from([(name.to_owned(), inside)]))
    }

    fn add(history: &mut History, time_ms: u64, (pipeline, pods): (Pipeline, BTreeMap<String, GatewayPod>)) -> View {
        history.add(time_ms, &pipeline, &pods)
    }

    #[test]
    fn rates_are_differences_over_time() {
        let mut history = History::default();
        assert_eq!(add(&mut history, 1_000, server("vpc", 1_000, [0, 0])), View::default());
        let view = add(&mut history, 3_000, server("vpc", 5_000, [500, 2_000]));
        let curves = &view.pods["vpc"];
        let rates = (curves.arrived_pps[0], curves.limited_pps[0], curves.dropped_pps[0]);
        assert_eq!(rates, (Some(2_000.0), Some(200.0), Some(20.0)));
        assert_eq!((curves.busiest_percent[0], &view.cores_percent["vpc"]), (Some(100.0), &vec![25.0, 100.0]));
        // The clock has not advanced, or was set back.
        assert_eq!(add(&mut history, 3_000, server("vpc", 6_000, [500, 2_000])).times_ms, [3_000]);
    }

    #[test]
    fn a_pod_that_is_started_again_or_comes_later_has_a_gap() {
        let mut history = History::default();
        add(&mut history, 1_000, server("a", 1_000, [0, 0]));
        add(&mut history, 2_000, server("a", 2_000, [0, 0]));
        let view = add(&mut history, 3_000, server("a", 10, [0, 0]));
        assert_eq!(view.pods["a"].arrived_pps, [Some(1_000.0), None], "counters that have gone back");
        let view = add(&mut history, 4_000, server("b", 10, [0, 0]));
        assert_eq!(view.pods["a"].arrived_pps, [Some(1_000.0), None, None]);
        assert_eq!(view.pods["b"].arrived_pps, [None, None, None]);
        let view = add(&mut history, 5_000, server("b", 20, [0, 0]));
        assert_eq!(view.pods["b"].arrived_pps, [None, None, None, Some(10.0)]);
    }

    #[test]
    fn an_hour_is_kept_and_pods_that_were_not_there_in_it_are_forgotten() {
        let mut history = History::default();
        add(&mut history, 0, server("old", 0, [0, 0]));
        add(&mut history, 1, server("old", 0, [0, 0]));
        let mut view = View::default();
        for n in 2..2_000 {
            view = add(&mut history, n, server("new", n, [0, 0]));
        }
        assert_eq!((view.times_ms.len(), view.pods["new"].arrived_pps.len()), (KEPT, KEPT));
        assert_eq!(view.pods.keys().collect::<Vec<_>>(), ["new"]);
        let pods = (0..1_000).map(|n| PipelinePod { name: format!("p{n}"), ..PipelinePod::default() }).collect();
        let crowd = Pipeline { pods, ..Pipeline::default() };
        history.add(3_000, &crowd, &BTreeMap::new());
        assert!(history.add(3_001, &crowd, &BTreeMap::new()).pods.len() <= MAX_PODS + 1);
    }
}
