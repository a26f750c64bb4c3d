//! The real programs on a veth pair in a network namespace of the test, which plays the network around them. Needs
//! root. On a busy machine, threads are delayed. So timeouts are 100 ms, and 1 s where nothing may time out.

#![allow(clippy::unwrap_used, missing_docs)]

mod bgp;
mod console;
mod hostile;
mod links;
mod podman;
mod site;
mod testpmd;
mod world;

use std::collections::BTreeMap;
use std::time::Duration;

use bifrost_control::api::CaptureSpec;
use bifrost_wire::vxlan;
use serde_json::json;
use world::{Options, World, in_namespace};

/// Timeout where no packet may time out, even if a worker does not run for a while.
const PATIENT_US: u64 = 1_000_000;
const PACKETS: u32 = 20_000;
const FLOWS: u16 = 50;

/// Number of received packets that arrived after a later one of their flow.
fn reordered(received: &[(u16, u32)]) -> usize {
    let mut last = BTreeMap::new();
    let late = |(flow, number): &&(u16, u32)| {
        let last = last.entry(*flow).or_insert(*number);
        let late = number < last;
        *last = (*last).max(*number);
        late
    };
    received.iter().filter(late).count()
}

#[test]
fn packets_of_all_flows_come_in_order_whatever_time_each_takes() {
    for header_only in [false, true] {
        in_namespace(move || {
            let mut world =
                World::start(&Options { header_only, jitter_us: 100, timeout_us: PATIENT_US, ..Options::default() });
            let received = world.exchange(PACKETS, FLOWS, |_, _| {});
            assert_eq!((received.len(), reordered(&received)), (PACKETS as usize, 0));
            let order = world.order();
            assert_eq!((order("timed_out_packets"), order("sent_late_packets")), (0, 0));
            assert_eq!(order("sent_in_order_packets"), u64::from(PACKETS));
            // Each worker processed half of the packets.
            let workers = world.worker_packets();
            assert!(workers.iter().all(|n| n.abs_diff(u64::from(PACKETS) / 2) < 1100), "{workers:?}");
            let delivered = world.counter("delivered_header_only_packets");
            assert_eq!(delivered, if header_only { u64::from(PACKETS) } else { 0 });
        });
    }
}

#[test]
fn jumbo_frames_of_8500_bytes_pass_whole_and_without_their_payload() {
    for header_only in [false, true] {
        in_namespace(move || {
            let options =
                Options { header_only, frame_len: 8500, jitter_us: 100, timeout_us: PATIENT_US, ..Options::default() };
            let mut world = World::start(&options);
            // Frames are too long for AF_XDP.
            assert_eq!(world.status("nicd")["device_mode"], "packet");
            let received = world.exchange(PACKETS / 4, FLOWS, |_, _| {});
            assert_eq!((received.len(), reordered(&received)), (PACKETS as usize / 4, 0));
            assert_eq!(world.order()("sent_in_order_packets"), u64::from(PACKETS / 4));
            let delivered = world.counter("delivered_header_only_packets");
            assert_eq!(delivered, if header_only { u64::from(PACKETS / 4) } else { 0 });
        });
    }
}

#[test]
fn a_worker_that_stands_still_costs_its_own_packets() {
    in_namespace(|| {
        let mut world = World::start(&Options { stall: Some((1, 3000, 1000)), ..Options::default() });
        let received = world.exchange(3 * PACKETS, FLOWS, |_, _| {});
        let order = world.order();
        let late = order("timed_out_packets");
        // Its ring of 1,024, and the packets that it had already received from it.
        assert!((1..=1024 + 32).contains(&late), "{late}");
        assert_eq!(order("sent_late_packets"), late, "what it had comes late, and nothing is lost");
        assert_eq!(received.len(), 3 * PACKETS as usize);
        assert!(reordered(&received) as u64 <= late, "{} of {late}", reordered(&received));
        assert_eq!(world.counter("refused_ring_full_packets") + world.counter("refused_queue_full_packets"), 0);
    });
}

#[test]
fn changing_to_flows_and_back_loses_and_reorders_nothing() {
    in_namespace(|| {
        let options = Options { jitter_us: 50, timeout_us: PATIENT_US, ..Options::default() };
        let mut world = World::start(&options);
        let packets = 2 * PACKETS;
        // Packets are sprayed again after a second, which is at most 13,000 packets.
        let received = world.exchange(packets, FLOWS, |world, number| match number {
            5000 | 30_000 => world.set_mode("rss"),
            10_000 => world.set_mode("plb"),
            _ => {}
        });
        assert_eq!((received.len(), reordered(&received)), (packets as usize, 0));
        let order = world.order();
        assert_eq!(order("timed_out_packets"), 0);
        assert!(order("dispatched_unordered_packets") > 5000, "there were packets by flow");
        assert!(order("dispatched_packets") > 10_000, "there were packets with places");
    });
}

#[test]
fn a_burst_is_stopped_at_the_door() {
    in_namespace(|| {
        let limiter = Some((2000, 500));
        let mut world = World::start(&Options { limiter, ..Options::default() });
        // Tenant 103 sends 20 times as much as each of the other three tenants, for about a second.
        let sent = world.burst(Duration::from_secs(1));
        for vni in [100, 101, 102] {
            assert_eq!(world.received_of(vni), sent[&vni], "tenant {vni} lost nothing");
        }
        let share = world.received_of(103) as f64 / sent[&103] as f64;
        assert!(share < 0.6, "{share} of the burst passed");
        assert_eq!(world.counter("refused_limited_packets"), sent[&103] - world.received_of(103));
        assert_eq!(world.limited(), [103]);
    });
}

#[test]
fn a_pod_that_is_killed_is_replaced() {
    in_namespace(|| {
        let mut world = World::start(&Options::default());
        assert_eq!(world.exchange(1000, FLOWS, |_, _| {}).len(), 1000);
        world.kill_pod();
        world.start_pod();
        assert_eq!(world.exchange(1000, FLOWS, |_, _| {}).len(), 1000);
        let (nicd, pod) = world.stop();
        assert!(nicd && pod, "both end well when they are told to");
    });
}

/// Maximum time from the start of the pipeline until it forwards packets again.
const REPLACED: Duration = Duration::from_secs(2);

#[test]
fn a_pipeline_that_is_killed_is_replaced_under_traffic_and_its_pod_stays() {
    in_namespace(|| {
        let mut world = World::start(&Options::default());
        assert_eq!(world.exchange(1000, FLOWS, |_, _| {}).len(), 1000);
        let (pod, mut before) = (world.pod_pid(), world.worker_packets());
        for away_ms in [0, 400] {
            let (took, came) = world.replace_pipeline(Duration::from_millis(away_ms), 400);
            eprintln!("packets pass {took:?} after the start of the pipeline, which was away for {away_ms} ms");
            assert!(took < REPLACED, "{took:?}");
            assert!(came > 400, "{came}: nothing is lost once packets pass");
            assert_eq!(world.pod_pid(), pod);
            let received = world.exchange(2000, FLOWS, |_, _| {});
            assert_eq!((received.len(), reordered(&received)), (2000, 0));
            let order = world.order();
            assert_eq!((order("timed_out_packets"), order("sent_late_packets")), (0, 0));
            let now = world.worker_packets();
            assert!(now.iter().zip(&before).all(|(now, before)| now >= &(before + 900)), "{before:?} {now:?}");
            before = now;
        }
        assert_eq!(world.status("gw")["connected"], true);
        let (nicd, pod) = world.stop();
        assert!(nicd && pod, "both end well when they are told to");
    });
}

#[test]
fn a_packet_that_is_only_described_changes_nothing() {
    in_namespace(|| {
        let world = World::start(&Options::default());
        let stages = |name: &str, to: &str| {
            let packet = format!(
                r#"{{"from_peer":"10.0.0.11","vni":100,"from":"192.168.0.1","to":"{to}","udp":[1,2],"ttl":64}}"#
            );
            let trace = world.post(name, "trace", &format!(r#"{{"packet":{packet}}}"#));
            let steps = trace["steps"].as_array().unwrap();
            let stages: Vec<String> = steps.iter().map(|step| step["stage"].as_str().unwrap().to_owned()).collect();
            (stages.join(" "), trace["verdict"].as_str().unwrap().to_owned())
        };
        let dispatched = world.order()("dispatched_packets");
        let good = ("parse pod class limiter order core".to_owned(), "sent".to_owned());
        assert_eq!(stages("nicd", "192.168.0.2"), good);
        let good = ("outer sender inner route size egress link".to_owned(), "sent".to_owned());
        assert_eq!(stages("gw", "192.168.0.2"), good);
        let bad = ("outer sender inner route".to_owned(), "dropped".to_owned());
        assert_eq!(stages("gw", "192.168.0.9"), (bad.0 + " route", bad.1));
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(world.order()("dispatched_packets"), dispatched);
    });
}

#[test]
fn a_capture_shows_a_flow_as_it_came_and_as_it_left() {
    const FLOW: u16 = 8;
    for header_only in [false, true] {
        in_namespace(move || {
            let mut world = World::start(&Options { header_only, ..Options::default() });
            let filter = format!("vni 100 and udp src port {FLOW} and not host 192.168.0.9");
            let capture = world.capture(CaptureSpec { filter, packets: 60, ..CaptureSpec::default() });
            for _ in 0..100 {
                if capture.is_finished() {
                    break;
                }
                world.exchange(1000, FLOWS, |_, _| {});
            }
            let file = capture.join().unwrap();
            let (mut rest, mut interfaces, mut seen) = (&file[..], 0, [0_u32; 2]);
            while !rest.is_empty() {
                let word = |at: usize| u32::from_le_bytes(*rest[at..].first_chunk().unwrap());
                let (block, behind) = rest.split_at(word(4) as usize);
                interfaces += u32::from(word(0) == 1);
                if word(0) == 6 {
                    // Interface, time, captured length, packet length, data.
                    let (interface, kept, len) = (word(8), word(20) as usize, word(24) as usize);
                    let frame = &block[28..28 + kept];
                    let outer = bifrost_nic::parse(frame, len).unwrap();
                    let (vni, inner) = vxlan::parse(&frame[usize::from(outer.payload)..]).unwrap();
                    let parsed = bifrost_nic::parse(inner, inner.len() + len - kept).unwrap();
                    assert_eq!((vni.get(), parsed.src_port, kept < len), (100, FLOW, header_only));
                    // Stages of each thread: rx, tx, drop. The gateway decrements the hop limit.
                    let hops = [64, 63][interface as usize % 3];
                    assert_eq!((inner[22], parsed.packet_len()), (hops, 228));
                    assert!(String::from_utf8_lossy(&block[28 + kept..]).contains("vpc; vni 100"));
                    seen[interface as usize % 3] += 1;
                }
                rest = behind;
            }
            assert_eq!((interfaces, seen[0] + seen[1]), (9, 60), "two workers and the control thread");
            assert!(seen[0].abs_diff(seen[1]) <= 1, "{seen:?}");
        });
    }
}

#[test]
fn pods_come_hang_die_and_go_while_another_one_loses_nothing() {
    in_namespace(|| {
        let mut world = World::start(&Options { timeout_us: PATIENT_US, ..Options::default() });
        let add = |settings: String| json!({ "command": "add_pod", "settings": settings });
        let mut others = Vec::new();
        let received = world.exchange(PACKETS, FLOWS, |world, number| match number {
            2_000 => {
                assert_eq!(world.command(&add(world.settings_of("two", 2))), (200, "{}".to_owned()));
                assert_eq!(world.up("two"), Some(vec![false]), "the state includes what has been answered");
                others.push(world.start_another("two", 2));
            }
            6_000 => {
                assert_eq!(world.command(&add(world.settings_of("three", 3))).0, 200);
                others.push(world.start_another("three", 3));
                world.until_up("two", Some(&[true]));
            }
            10_000 => {
                world.until_up("three", Some(&[true]));
                others[0].hang();
            }
            12_000 => drop(others.pop()),
            16_000 => {
                assert_eq!(world.command(&json!({ "command": "remove_pod", "pod": "two" })).0, 200);
                assert_eq!(world.up("two"), None);
            }
            _ => {}
        });
        assert_eq!((received.len(), reordered(&received)), (PACKETS as usize, 0));
        assert_eq!(["timed_out_packets", "sent_late_packets"].map(world.order()), [0, 0]);
        world.until_up("three", Some(&[false]));
        assert_eq!((world.up("two"), world.has("two.sock"), world.has("pods/two.toml")), (None, false, false));
        // After a restart of the pipeline, the pod that was added exists again, and the one that was removed does not.
        let third = world.start_another("three", 3);
        world.until_up("three", Some(&[true]));
        world.restart_pipeline();
        world.until_up("three", Some(&[true]));
        assert_eq!(world.up("two"), None);
        drop(third);
        for (command, status, text) in [
            (add("name = \"x\"\n".to_owned()), 400, "settings:1: missing field `number`"),
            (add(world.settings_of("three", 4)), 409, "there is a pod \\\"three\\\" already"),
            (add(world.settings_of("four", 3)), 409, "another pod has this MAC address, too"),
            (json!({ "command": "remove_pod", "pod": "vpc" }), 409, "is in the configuration file"),
            (json!({ "command": "remove_pod", "pod": "two" }), 404, "there are: vpc, three"),
            (json!({ "command": "set_mode", "pod": "two", "mode": "rss" }), 404, "no pod"),
        ] {
            let (code, answer) = world.command(&command);
            assert!(code == status && answer.contains(text), "{command}: {code} {answer}");
        }
        assert!(!world.has("four.sock") && !world.has("pods/four.toml"));
    });
}
