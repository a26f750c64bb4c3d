//! The state of the pipeline at one moment, for the status server.

use bifrost_control::api::{
    GatewayHost, GatewayPath, GatewayTransport, OrderQueue, Pipeline, PipelinePod, PipelineStage, TopTenant,
};
use bifrost_nicpipe::{HostState, Mode, Pod, Reliable};
use bifrost_rte::{PathSnapshot, PathState};

use super::engine::{Engine, Stage};
use crate::status::Sample;

/// Number of tenants that are reported.
const TOP: usize = 10;

/// The current state. `with_transports`: includes that of transports.
pub(super) fn take(now: u64, engine: &mut Engine, with_transports: bool) -> Pipeline {
    let (malformed_frames, no_pod_frames) = engine.pipeline.strays();
    let named = |(name, value): (&'static str, u64)| (name.into(), value);
    let stages = engine.stages;
    let stage = |name: &'static str, Stage { packets, busy_ns, busy_cycles }| PipelineStage {
        name: name.into(),
        packets,
        busy_ns,
        busy_cycles,
    };
    Pipeline {
        device_mode: engine.device.mode().into(),
        turns: engine.turns,
        sleeps: engine.sleeps,
        device: engine.device.counters().iter().map(named).collect(),
        malformed_frames,
        no_pod_frames,
        stages: vec![
            stage("receive", stages.receive),
            stage("dispatch", stages.dispatch),
            stage("collect", stages.collect),
            stage("send", stages.send),
        ],
        pods: {
            let pods = engine.pipeline.pods().iter().filter(|pod| !pod.is_vacant());
            pods.map(|pod| {
                let reliable = if with_transports { pod.reliable() } else { None };
                PipelinePod { transport: reliable.map(transport), ..state(now, pod) }
            })
            .collect()
        },
    }
}

/// The counters, for Prometheus.
pub(super) fn samples(state: &Pipeline) -> Vec<Sample> {
    let sample = |name: String, labels: &[(&'static str, String)], value, gauge| Sample {
        name: format!("nicd_{name}"),
        labels: labels.to_vec(),
        value,
        gauge,
    };
    let mut all: Vec<Sample> =
        state.device.iter().map(|(name, value)| sample(format!("device_{name}"), &[], *value, false)).collect();
    all.push(sample("device_info".to_owned(), &[("mode", state.device_mode.to_string())], 1, true));
    for (name, value) in [
        ("malformed_frames", state.malformed_frames),
        ("no_pod_frames", state.no_pod_frames),
        ("turns", state.turns),
        ("sleeps", state.sleeps),
    ] {
        all.push(sample(name.to_owned(), &[], value, false));
    }
    for stage in &state.stages {
        let labels = [("stage", stage.name.to_string())];
        all.push(sample("stage_packets".to_owned(), &labels, stage.packets, false));
        all.push(sample("stage_busy_ns".to_owned(), &labels, stage.busy_ns, false));
        all.push(sample("stage_busy_cycles".to_owned(), &labels, stage.busy_cycles, false));
    }
    for pod in &state.pods {
        let labels = [("pod", pod.name.clone())];
        for (prefix, counts) in [("pod", &pod.counters), ("order", &pod.order), ("limiter", &pod.limiter)] {
            all.extend(counts.iter().map(|(name, v)| sample(format!("{prefix}_{name}"), &labels, *v, false)));
        }
        for (number, queue) in pod.queues.iter().enumerate() {
            let labels = [("pod", pod.name.clone()), ("queue", number.to_string())];
            all.push(sample("order_places".to_owned(), &labels, queue.entries.into(), true));
            all.push(sample("order_places_in_use".to_owned(), &labels, queue.in_use.into(), true));
            all.push(sample("order_places_held".to_owned(), &labels, queue.held.into(), true));
        }
        let up = pod.interfaces_up.iter().filter(|up| **up).count() as u64;
        all.push(sample("pod_number".to_owned(), &labels, pod.number.into(), true));
        all.push(sample("pod_interfaces_up".to_owned(), &labels, up, true));
        all.push(sample("pod_limited_tenants".to_owned(), &labels, pod.limited_vnis.len() as u64, true));
        all.push(sample("pod_exempted_tenants".to_owned(), &labels, pod.bypassed_vnis.len() as u64, true));
        for tenant in &pod.top_tenants {
            let labels = [("pod", pod.name.clone()), ("tenant", tenant.vni.to_string())];
            all.push(sample("pod_top_tenant_percent".to_owned(), &labels, tenant.percent.round() as u64, true));
        }
        if let Some(transport) = &pod.transport {
            transport_samples(&pod.name, transport, &mut |name, labels, value, gauge| {
                all.push(sample(format!("transport_{name}"), labels, value, gauge));
            });
        }
        all.push(sample("pod_settled".to_owned(), &labels, u64::from(pod.settled), true));
        all.push(sample("pod_sprayed".to_owned(), &labels, u64::from(pod.mode == "plb"), true));
    }
    all
}

fn transport_samples(
    pod: &str,
    transport: &GatewayTransport,
    put: &mut impl FnMut(&str, &[(&'static str, String)], u64, bool),
) {
    let labels = [("pod", pod.to_owned())];
    for (name, value) in &transport.counters {
        put(name, &labels, *value, false);
    }
    for (name, value) in &transport.engine {
        put(&format!("engine_{name}"), &labels, *value, false);
    }
    for host in &transport.hosts {
        let address = host.addresses.first().cloned().unwrap_or_default();
        let labels = [("pod", pod.to_owned()), ("host", address.clone())];
        for (name, value) in &host.counters {
            put(&format!("host_{name}"), &labels, *value, false);
        }
        // These are gauges: sums over connections decrease when a connection ends.
        for (name, value) in [
            ("connections", host.connections.into()),
            ("open_connections", host.open_connections.into()),
            ("best_effort_connections", host.best_effort_connections.into()),
            ("retransmitted_packets", host.retransmitted_packets),
            ("duplicate_packets", host.duplicate_packets),
            ("given_up_packets", host.given_up_packets),
            ("held_frames", host.held_frames.into()),
            ("kept_frames", host.kept_frames.into()),
            ("share_frames", host.share_frames.into()),
        ] {
            put(&format!("host_{name}"), &labels, value, true);
        }
        for (number, path) in host.paths.iter().enumerate() {
            let labels = [("pod", pod.to_owned()), ("host", address.clone()), ("path", number.to_string())];
            for (name, value, gauge) in [
                ("usable", u64::from(path.state == "usable"), true),
                ("selected", u64::from(path.selected), true),
                ("srtt_ns", path.srtt_ns, true),
                ("min_rtt_ns", path.min_rtt_ns, true),
                ("loss_ppm", path.loss_ppm.into(), true),
                ("window_packets", path.window_packets.into(), true),
                ("in_flight_packets", path.in_flight_packets.into(), true),
                ("tx_packets", path.tx_packets, false),
                ("lost_packets", path.lost_packets, false),
            ] {
                put(&format!("path_{name}"), &labels, value, gauge);
            }
        }
    }
}

fn transport(reliable: &Reliable) -> GatewayTransport {
    let named = |(name, value): (&'static str, u64)| (name.into(), value);
    GatewayTransport {
        counters: reliable.counters().iter().map(named).collect(),
        engine: reliable.engine_counters().iter().map(named).collect(),
        hosts: reliable.hosts().iter().map(host).collect(),
    }
}

fn host(host: &HostState) -> GatewayHost {
    GatewayHost {
        addresses: host.addresses.iter().map(ToString::to_string).collect(),
        connections: host.connections,
        open_connections: host.open_connections,
        best_effort_connections: host.best_effort_connections,
        retransmitted_packets: host.retransmitted_packets,
        duplicate_packets: host.duplicate_packets,
        given_up_packets: host.given_up_packets,
        held_frames: host.held_frames,
        kept_frames: host.kept_frames,
        share_frames: host.share_frames,
        paths: host.paths.iter().map(path).collect(),
        counters: host.counters.iter().map(|(name, value)| (name.into(), value)).collect(),
    }
}

fn path(path: &PathSnapshot) -> GatewayPath {
    GatewayPath {
        state: if path.state == PathState::Usable { "usable" } else { "suspect" }.into(),
        selected: path.selected,
        srtt_ns: path.srtt_ns,
        min_rtt_ns: path.min_rtt_ns,
        loss_ppm: (path.loss * 1_000_000.0).round() as u32,
        window_packets: path.window_packets.round() as u32,
        in_flight_packets: path.in_flight_packets,
        tx_packets: path.tx_packets,
        lost_packets: path.lost_packets,
    }
}

fn state(now: u64, pod: &Pod) -> PipelinePod {
    let (mode, settled) = pod.mode(now);
    let limiter = pod.limiter().counters();
    let checked = |bypass| pod.limiter().pre_checked().filter(|c| c.1 == bypass).map(|c| c.0).collect();
    let named = |(name, value): (&'static str, u64)| (name.into(), value);
    PipelinePod {
        name: pod.name().to_owned(),
        number: pod.config().balancer.pod,
        mac: pod.config().mac.map(|mac| mac.to_string()),
        own: pod.config().rules.own.iter().map(ToString::to_string).collect(),
        interfaces_up: (0..pod.interfaces()).map(|n| pod.is_up(n)).collect(),
        mode: if mode == Mode::Plb { "plb" } else { "rss" }.into(),
        settled,
        queues: pod.queues().map(|(entries, in_use, held)| OrderQueue { entries, in_use, held }).collect(),
        counters: pod.counters().iter().map(named).collect(),
        order: pod.order_counters().iter().map(named).collect(),
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
        .map(named)
        .into(),
        limited_vnis: checked(false),
        bypassed_vnis: checked(true),
        top_tenants: pod.heavy().top(TOP).into_iter().map(|(vni, percent)| TopTenant { vni, percent }).collect(),
        transport: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fills a state with numbers that all differ.
    fn fill(value: &mut serde_json::Value, next: &mut u64) {
        match value {
            serde_json::Value::Number(number) => {
                *next += 1;
                *number = (*next).into();
            }
            serde_json::Value::Array(list) => list.iter_mut().for_each(|value| fill(value, next)),
            serde_json::Value::Object(map) => map.values_mut().for_each(|value| fill(value, next)),
            _ => {}
        }
    }

    #[test]
    fn every_number_of_the_state_is_a_metric() {
        let counts = || [("some_packets".into(), 0)].into();
        let pod = PipelinePod {
            name: "vpc".to_owned(),
            queues: vec![OrderQueue::default(); 2],
            counters: counts(),
            order: counts(),
            limiter: counts(),
            top_tenants: Vec::new(),
            transport: Some(GatewayTransport {
                counters: counts(),
                engine: counts(),
                hosts: vec![GatewayHost {
                    addresses: vec!["10.0.0.11".to_owned()],
                    paths: vec![GatewayPath::default(); 2],
                    counters: counts(),
                    ..GatewayHost::default()
                }],
            }),
            ..PipelinePod::default()
        };
        let state = Pipeline {
            device: counts(),
            stages: vec![PipelineStage::default()],
            pods: vec![pod],
            ..Pipeline::default()
        };
        let (mut value, mut numbers) = (serde_json::to_value(state).unwrap(), 1000);
        fill(&mut value, &mut numbers);
        let mut state: Pipeline = serde_json::from_value(value).unwrap();
        state.pods[0].top_tenants.push(TopTenant { vni: 7, percent: 61.25 });
        state.pods[0].limited_vnis = vec![7, 8];
        state.pods[0].bypassed_vnis = vec![9, 10, 11];
        let samples = samples(&state);
        for number in 1001..=numbers {
            assert_eq!(samples.iter().filter(|sample| sample.value == number).count(), 1, "{number}: {state:?}");
        }
        let value = |name: &str| samples.iter().find(|sample| sample.name == name).map(|sample| sample.value);
        for (name, expected) in
            [("nicd_pod_limited_tenants", 2), ("nicd_pod_exempted_tenants", 3), ("nicd_pod_top_tenant_percent", 61)]
        {
            assert_eq!(value(name), Some(expected), "{name}");
        }
    }
}
