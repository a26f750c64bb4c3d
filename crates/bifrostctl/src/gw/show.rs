//! What a gateway answers, as tables.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use bifrost_control::api::{Counts, GatewayPod, GatewayTransport, GatewayTunnel, PipelinePod, PipelineStage, Trace};

use super::FIRST_ADDRESS;
use crate::table::{Column, Number, Text, listing};

pub(super) fn get(counts: &Counts, name: &str) -> u64 {
    counts.get(name).copied().unwrap_or(0)
}

pub(super) fn pods(pods: &[PipelinePod]) -> String {
    const COLUMNS: [Column; 9] = [
        Text("POD"),
        Text("INTERFACES"),
        Text("MODE"),
        Number("ARRIVED"),
        Number("DELIVERED"),
        Number("SENT"),
        Number("LIMITED"),
        Number("NO ROOM"),
        Number("REFUSED OTHERWISE"),
    ];
    let rows = pods.iter().map(|pod| {
        let refused = pod.counters.iter().filter(|(name, _)| name.starts_with("refused_"));
        let all: u64 = refused.map(|(_, value)| value).sum();
        let limited = get(&pod.counters, "refused_limited_packets");
        let full = get(&pod.counters, "refused_ring_full_packets") + get(&pod.counters, "refused_queue_full_packets");
        let up = pod.interfaces_up.iter().filter(|up| **up).count();
        let settling = if pod.settled { "" } else { ", settling" };
        vec![
            pod.name.clone(),
            format!("{up} of {} up", pod.interfaces_up.len()),
            format!("{}{settling}", pod.mode),
            get(&pod.counters, "arrived_packets").to_string(),
            (get(&pod.counters, "delivered_packets") + get(&pod.counters, "delivered_priority_packets")).to_string(),
            get(&pod.counters, "sent_packets").to_string(),
            limited.to_string(),
            full.to_string(),
            all.saturating_sub(limited + full).to_string(),
        ]
    });
    listing(&COLUMNS, rows, "no pods")
}

pub(super) fn queues(pods: &[PipelinePod]) -> String {
    const DEPTHS: [Column; 5] = [Text("POD"), Number("QUEUE"), Number("PLACES"), Number("IN USE"), Number("HELD")];
    const ORDER: [Column; 7] = [
        Text("POD"),
        Number("IN ORDER"),
        Number("TIMEOUTS"),
        Number("LATE"),
        Number("ALIASES"),
        Number("DROPPED BY POD"),
        Number("BAD"),
    ];
    let depths = pods.iter().flat_map(|pod| {
        pod.queues.iter().enumerate().map(|(number, queue)| {
            let numbers = [number as u64, queue.entries.into(), queue.in_use.into(), queue.held.into()];
            [pod.name.clone()].into_iter().chain(numbers.map(|n| n.to_string())).collect()
        })
    });
    let order = pods.iter().map(|pod| {
        // A pod also returns packets that have no place, such as those of BGP, with the drop flag: nothing is wrong.
        let by_pod = ["dropped_by_pod_packets", "dropped_by_pod_late_packets"];
        let dropped = pod.order.iter().filter(|(name, _)| name.starts_with("dropped_"));
        let bad: u64 = dropped.filter(|(name, _)| !by_pod.contains(&name.as_ref())).map(|(_, value)| value).sum();
        let names = ["sent_in_order_packets", "timed_out_packets", "sent_late_packets", "aliases_packets"];
        let numbers = names.map(|name| get(&pod.order, name));
        let by_pod = by_pod.map(|name| get(&pod.order, name)).iter().sum();
        let numbers = numbers.into_iter().chain([by_pod, bad]).map(|number: u64| number.to_string());
        [pod.name.clone()].into_iter().chain(numbers).collect()
    });
    format!("{}\n\n{}", listing(&DEPTHS, depths, "no order queues"), listing(&ORDER, order, "no pods"))
}

/// The transports of pods that have one, by the pod's name.
pub(super) fn transports(pods: Vec<PipelinePod>) -> BTreeMap<String, GatewayTransport> {
    pods.into_iter().filter_map(|pod| Some((pod.name, pod.transport?))).collect()
}

pub(super) fn hosts(pods: &BTreeMap<String, GatewayTransport>) -> String {
    const HOSTS: [Column; 9] = [
        Text("POD"),
        Text("HOST"),
        Number("CONNECTIONS"),
        Number("OPEN"),
        Number("BEST EFFORT"),
        Number("FROM HOST"),
        Number("TO HOST"),
        Number("RETRANSMITTED"),
        Number("PLAIN"),
    ];
    const PATHS: [Column; 10] = [
        Text("POD"),
        Text("HOST"),
        Number("PATH"),
        Text("STATE"),
        Number("RTT US"),
        Number("MIN US"),
        Number("LOSS %"),
        Number("WINDOW"),
        Number("IN FLIGHT"),
        Number("LOST"),
    ];
    let all = || pods.iter().flat_map(|(pod, transport)| transport.hosts.iter().map(move |host| (pod, host)));
    let rows = all().map(|(pod, host)| {
        let plain =
            host.counters.iter().filter(|(name, _)| name.starts_with("plain_") || *name == "surrendered_frames");
        let numbers = [
            host.connections.into(),
            host.open_connections.into(),
            host.best_effort_connections.into(),
            get(&host.counters, "rx_frames"),
            get(&host.counters, "tx_frames"),
            host.retransmitted_packets,
            plain.map(|(_, value)| value).sum(),
        ];
        let names = [pod.clone(), host.addresses.join(", ")];
        names.into_iter().chain(numbers.map(|number: u64| number.to_string())).collect()
    });
    let paths = all().flat_map(|(pod, host)| {
        host.paths.iter().enumerate().map(move |(number, path)| {
            let us = |ns: u64| format!("{:.1}", ns as f64 / 1000.0);
            vec![
                pod.clone(),
                host.addresses.first().cloned().unwrap_or_default(),
                number.to_string(),
                path.state.to_string(),
                us(path.srtt_ns),
                us(path.min_rtt_ns),
                format!("{:.2}", f64::from(path.loss_ppm) / 10_000.0),
                path.window_packets.to_string(),
                path.in_flight_packets.to_string(),
                path.lost_packets.to_string(),
            ]
        })
    });
    format!("{}\n\n{}", listing(&HOSTS, rows, "no pod has a transport"), listing(&PATHS, paths, "no paths"))
}

pub(super) fn tunnels(tunnels: &[GatewayTunnel]) -> String {
    const COLUMNS: [Column; 5] = [Text("TUNNEL"), Number("VNI"), Text("REMOTE"), Text("STATE"), Number("SILENT S")];
    let rows = tunnels.iter().map(|GatewayTunnel { name, vni, remote, up, silence_ms }| {
        let state = if *up { "up" } else { "down" };
        let silence = silence_ms.map_or("-".to_owned(), |ms| format!("{:.1}", ms as f64 / 1000.0));
        vec![name.clone(), vni.to_string(), remote.clone(), state.to_owned(), silence]
    });
    listing(&COLUMNS, rows, "no tunnels")
}

pub(super) fn limiter(pods: &[PipelinePod]) -> String {
    let mut out = String::new();
    for pod in pods {
        let of = |name: &str| get(&pod.limiter, name);
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "{}: {} packets passed the first stage, {} the second; dropped: {} by the second stage, {} by tenants' own meters",
            pod.name,
            of("color_packets"),
            of("meter_packets"),
            of("dropped_meter_packets"),
            of("dropped_pre_meter_packets"),
        );
        for vni in &pod.limited_vnis {
            let _ = writeln!(
                out,
                "  limited   {}: its packets were found among those that the second stage dropped",
                tenant(*vni)
            );
        }
        for vni in &pod.bypassed_vnis {
            let _ = writeln!(out, "  exempted  {}", tenant(*vni));
        }
        for top in &pod.top_tenants {
            let _ = writeln!(out, "  {:>5.1} %   {}", top.percent, tenant(top.vni));
        }
    }
    out.trim_end().to_owned()
}

fn tenant(vni: u32) -> String {
    if vni < FIRST_ADDRESS { format!("VNI {vni}") } else { format!("an address of the Internet side ({vni:#x})") }
}

pub(super) fn stages(stages: &[PipelineStage]) -> String {
    const COLUMNS: [Column; 4] = [Text("STAGE"), Number("PACKETS"), Number("NS/PACKET"), Number("CYCLES/PACKET")];
    let rows = stages.iter().map(|PipelineStage { name, packets, busy_ns, busy_cycles }| {
        vec![name.to_string(), packets.to_string(), each(*busy_ns, *packets), each(*busy_cycles, *packets)]
    });
    listing(&COLUMNS, rows, "no stages")
}

pub(super) fn workers(pod: &GatewayPod) -> String {
    const COLUMNS: [Column; 10] = [
        Number("WORKER"),
        Number("PACKETS"),
        Number("NS/PACKET"),
        Number("CYCLES/PACKET"),
        Number("VPC"),
        Number("INTERNET"),
        Number("IDC"),
        Number("CLOUD SERVICE"),
        Number("ANSWERED"),
        Number("DROPPED"),
    ];
    let rows = pod.workers.iter().enumerate().map(|(number, counts)| {
        let forwarded = ["vpc", "internet", "idc", "cloud_service", "answer"];
        let forwarded = forwarded.map(|name| get(counts, &format!("forwarded_{name}_packets")).to_string());
        let dropped: u64 = counts.iter().filter(|(name, _)| name.starts_with("dropped_")).map(|(_, value)| value).sum();
        let packets = get(counts, "packets");
        let [ns, cycles] = ["busy_ns", "busy_cycles"].map(|name| each(get(counts, name), packets));
        [number.to_string(), packets.to_string(), ns, cycles]
            .into_iter()
            .chain(forwarded)
            .chain([dropped.to_string()])
            .collect()
    });
    listing(&COLUMNS, rows, "no workers")
}

/// How much each packet took; "-" if there was none, or it is not known.
fn each(total: u64, packets: u64) -> String {
    if packets == 0 || total == 0 { "-".to_owned() } else { format!("{:.0}", total as f64 / packets as f64) }
}

/// What both programs say, stage by stage; x marks where the packet ends.
pub(super) fn traced(pipeline: &Trace, pod: Option<&Trace>) -> String {
    let mut out = String::new();
    for (name, trace) in [("pipeline", Some(pipeline)), ("pod", pod)] {
        let Some(trace) = trace else { continue };
        // Writing to a string cannot fail.
        let _ = writeln!(out, "{name}:");
        for step in &trace.steps {
            let mark = if step.passes { ' ' } else { 'x' };
            let _ = writeln!(out, "{mark} {:<12}{}", step.stage, step.what);
        }
        let counter = trace.counter.as_ref().map_or(String::new(), |counter| format!("; counted by {counter}"));
        let _ = writeln!(out, "  -> {}{counter}", trace.what);
    }
    out.trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use bifrost_control::api::{GatewayHost, GatewayPath, OrderQueue, TopTenant};

    use super::*;

    fn counts(list: &[(&'static str, u64)]) -> Counts {
        list.iter().map(|(name, value)| ((*name).into(), *value)).collect()
    }

    fn pod() -> PipelinePod {
        PipelinePod {
            name: "vpc".to_owned(),
            interfaces_up: vec![true, false],
            mode: "rss".into(),
            queues: vec![OrderQueue { entries: 4096, in_use: 17, held: 3 }],
            counters: counts(&[
                ("arrived_packets", 100),
                ("delivered_packets", 60),
                ("delivered_priority_packets", 5),
                ("refused_limited_packets", 20),
                ("refused_ring_full_packets", 8),
                ("refused_queue_full_packets", 1),
                ("refused_too_long_packets", 6),
                ("sent_packets", 64),
            ]),
            order: counts(&[
                ("sent_in_order_packets", 50),
                ("timed_out_packets", 2),
                ("sent_late_packets", 1),
                ("dropped_by_pod_packets", 4),
                ("dropped_by_pod_late_packets", 30),
                ("dropped_duplicate_packets", 6),
                ("dropped_malformed_packets", 1),
            ]),
            limiter: counts(&[("color_packets", 80), ("dropped_meter_packets", 9)]),
            limited_vnis: vec![7],
            bypassed_vnis: vec![8],
            top_tenants: vec![
                TopTenant { vni: 7, percent: 61.25 },
                TopTenant { vni: FIRST_ADDRESS + 10, percent: 3.0 },
            ],
            ..PipelinePod::default()
        }
    }

    /// The words of each line.
    fn words(text: &str) -> Vec<Vec<&str>> {
        text.lines().map(|line| line.split_whitespace().collect()).collect()
    }

    #[test]
    fn pods_and_queues() {
        let text = pods(&[pod()]);
        assert_eq!(
            words(&text)[1],
            ["vpc", "1", "of", "2", "up", "rss,", "settling", "100", "65", "64", "20", "9", "6"]
        );
        let text = queues(&[pod()]);
        assert_eq!(words(&text)[1], ["vpc", "0", "4096", "17", "3"]);
        assert_eq!(words(&text)[4], ["vpc", "50", "2", "1", "0", "34", "7"]);
        assert_eq!(pods(&[]), "no pods");
    }

    #[test]
    fn hosts_and_their_paths() {
        let path = GatewayPath {
            state: "usable".into(),
            srtt_ns: 123_400,
            min_rtt_ns: 99_000,
            loss_ppm: 12_300,
            window_packets: 64,
            in_flight_packets: 3,
            lost_packets: 8,
            ..GatewayPath::default()
        };
        let host = GatewayHost {
            addresses: vec!["10.0.0.11".to_owned()],
            connections: 3,
            open_connections: 2,
            best_effort_connections: 1,
            retransmitted_packets: 9,
            paths: vec![path],
            counters: counts(&[
                ("rx_frames", 50),
                ("tx_frames", 40),
                ("plain_frames", 4),
                ("plain_too_long_frames", 2),
                ("surrendered_frames", 1),
            ]),
            ..GatewayHost::default()
        };
        let transport = Some(GatewayTransport { hosts: vec![host], ..GatewayTransport::default() });
        let text = hosts(&transports(vec![pod(), PipelinePod { name: "b".to_owned(), transport, ..pod() }]));
        assert_eq!(words(&text)[1], ["b", "10.0.0.11", "3", "2", "1", "50", "40", "9", "7"]);
        assert_eq!(words(&text)[4], ["b", "10.0.0.11", "0", "usable", "123.4", "99.0", "1.23", "64", "3", "8"]);
        assert!(hosts(&transports(vec![pod()])).starts_with("no pod has a transport"));
    }

    #[test]
    fn tunnels_that_are_down() {
        let tunnel = |name: &str, up, silence_ms| GatewayTunnel {
            name: name.to_owned(),
            vni: 100,
            remote: "198.51.100.9".to_owned(),
            up,
            silence_ms,
        };
        let text = tunnels(&[tunnel("office", false, Some(31_250)), tunnel("plain", true, None)]);
        assert_eq!(words(&text)[1], ["office", "100", "198.51.100.9", "down", "31.2"]);
        assert_eq!(words(&text)[2], ["plain", "100", "198.51.100.9", "up", "-"]);
    }

    #[test]
    fn who_is_limited() {
        let text = limiter(&[pod()]);
        for part in [
            "80 packets passed the first stage",
            "limited   VNI 7: ",
            "exempted  VNI 8",
            " 61.2 %   VNI 7",
            "Internet side (0x100000a)",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn a_trace_ends_where_the_packet_does() {
        let step = |stage: &str, passes| bifrost_control::api::TraceStep {
            stage: stage.to_owned(),
            passes,
            what: "so".to_owned(),
            ..Default::default()
        };
        let trace = |steps, what: &str, counter: Option<&str>| Trace {
            steps,
            what: what.to_owned(),
            counter: counter.map(ToOwned::to_owned),
            ..Trace::default()
        };
        let pipeline = trace(vec![step("parse", true)], "it goes to pod vpc", None);
        let pod = trace(vec![step("acl", false)], "the pod drops it", Some("dropped_acl_packets"));
        assert_eq!(
            traced(&pipeline, Some(&pod)),
            "pipeline:\n  parse       so\n  -> it goes to pod vpc\npod:\nx acl         so\n  -> the pod drops it; counted by \
             dropped_acl_packets"
        );
        assert!(!traced(&pipeline, None).contains("pod:"));
    }

    #[test]
    fn time_of_stages() {
        let stage = |name: &'static str, packets, busy_ns, busy_cycles| PipelineStage {
            name: name.into(),
            packets,
            busy_ns,
            busy_cycles,
        };
        let text = stages(&[stage("receive", 10, 1234, 2618), stage("send", 0, 0, 0), stage("other", 1, 5, 0)]);
        let expected = [["receive", "10", "123", "262"], ["send", "0", "-", "-"], ["other", "1", "5", "-"]];
        assert_eq!(words(&text)[1..], expected, "another architecture counts no cycles");
        let worker = counts(&[
            ("packets", 4),
            ("busy_ns", 2000),
            ("busy_cycles", 4004),
            ("forwarded_internet_packets", 3),
            ("dropped_acl_packets", 1),
        ]);
        let text = workers(&GatewayPod { workers: vec![worker], ..GatewayPod::default() });
        assert_eq!(words(&text)[1], ["0", "4", "500", "1001", "0", "3", "0", "0", "0", "1"]);
    }
}
