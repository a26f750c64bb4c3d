//! The pipeline's state at one time, for the status server.

use bifrost_nicpipe::{Mode, Pod};
use serde::Serialize;

use super::engine::Engine;
use crate::status::Sample;

/// The state.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Snapshot {
    device_mode: &'static str,
    turns: u64,
    sleeps: u64,
    device: Counts,
    malformed_frames: u64,
    no_pod_frames: u64,
    pods: Vec<PodState>,
}

/// Counters by name.
type Counts = std::collections::BTreeMap<&'static str, u64>;

#[derive(Clone, Debug, Default, Serialize)]
struct PodState {
    name: String,
    interfaces_up: Vec<bool>,
    mode: &'static str,
    /// Whether all packets are already spread by `mode`.
    settled: bool,
    places_in_use: u32,
    places_held: u32,
    counters: Counts,
    order: Counts,
    limiter: Counts,
    /// Tenants with a meter of their own, and those that are exempted.
    limited_vnis: Vec<u32>,
    bypassed_vnis: Vec<u32>,
}

impl Snapshot {
    pub(super) fn take(now: u64, engine: &mut Engine) -> Self {
        let (malformed_frames, no_pod_frames) = engine.pipeline.strays();
        Snapshot {
            device_mode: engine.device.mode(),
            turns: engine.turns,
            sleeps: engine.sleeps,
            device: engine.device.counters().iter().collect(),
            malformed_frames,
            no_pod_frames,
            pods: engine.pipeline.pods().iter().zip(&engine.links).map(|(pod, l)| state(now, pod, l.len())).collect(),
        }
    }

    /// The counters, for Prometheus.
    pub(super) fn samples(&self) -> Vec<Sample> {
        let sample = |name: String, labels: &[(&'static str, String)], value, gauge| Sample {
            name: format!("nicd_{name}"),
            labels: labels.to_vec(),
            value,
            gauge,
        };
        let mut all: Vec<Sample> =
            self.device.iter().map(|(name, value)| sample(format!("device_{name}"), &[], *value, false)).collect();
        all.push(sample("malformed_frames".to_owned(), &[], self.malformed_frames, false));
        all.push(sample("no_pod_frames".to_owned(), &[], self.no_pod_frames, false));
        for pod in &self.pods {
            let labels = [("pod", pod.name.clone())];
            for (prefix, counts) in [("pod", &pod.counters), ("order", &pod.order), ("limiter", &pod.limiter)] {
                all.extend(counts.iter().map(|(name, v)| sample(format!("{prefix}_{name}"), &labels, *v, false)));
            }
            all.push(sample("order_places_in_use".to_owned(), &labels, pod.places_in_use.into(), true));
            let up = pod.interfaces_up.iter().filter(|up| **up).count() as u64;
            all.push(sample("pod_interfaces_up".to_owned(), &labels, up, true));
        }
        all
    }
}

fn state(now: u64, pod: &Pod, interfaces: usize) -> PodState {
    let (mode, settled) = pod.mode(now);
    let (places_in_use, places_held) = pod.occupancy();
    let limiter = pod.limiter().counters();
    let checked = |bypass| pod.limiter().pre_checked().filter(|c| c.1 == bypass).map(|c| c.0).collect();
    PodState {
        name: pod.name().to_owned(),
        interfaces_up: (0..interfaces).map(|n| pod.is_up(n)).collect(),
        mode: if mode == Mode::Plb { "plb" } else { "rss" },
        settled,
        places_in_use,
        places_held,
        counters: pod.counters().iter().collect(),
        order: pod.order_counters().iter().collect(),
        limiter: [
            ("bypass_packets", limiter.bypass_packets),
            ("pre_meter_packets", limiter.pre_meter_packets),
            ("color_packets", limiter.color_packets),
            ("meter_packets", limiter.meter_packets),
            ("dropped_pre_meter_packets", limiter.dropped_pre_meter_packets),
            ("dropped_meter_packets", limiter.dropped_meter_packets),
            ("sampled_packets", limiter.sampled_packets),
            ("promoted_tenants", limiter.promoted_tenants),
            ("promotion_refused_samples", limiter.promotion_refused_samples),
        ]
        .into(),
        limited_vnis: checked(false),
        bypassed_vnis: checked(true),
    }
}
