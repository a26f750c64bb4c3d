//! A million routes in ten VPCs.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use crate::common::host::{Host, vpc};
use crate::common::traffic::{Exchange, exchange, ping_with};
use crate::common::{Guest, Lab, Options, eventually};

const MEGABYTES: u64 = 1 << 20;
const NETWORKS: u32 = 10;
/// Routes of each VPC, half IPv4 and half IPv6.
const ROUTES: u32 = 100_000;

/// Routes to vNICs whose MAC addresses start with `first`.
fn routes(first: u8) -> String {
    let mut text = String::new();
    for network in 0..NETWORKS {
        for vnic in 0..ROUTES / 2 {
            let [_, a, b, c] = vnic.to_be_bytes();
            for prefix in [format!("10.{a}.{b}.{c}/32"), format!("fd00:0:{a:x}:{:x}::/64", vnic & 0xffff)] {
                let vni = 100 + network;
                write!(text, "[[route]]\nvni = {vni}\nprefix = \"{prefix}\"\npeer = \"host-b\"\n").unwrap();
                writeln!(text, "mac = \"{first:02x}:01:{network:02x}:{a:02x}:{b:02x}:{c:02x}\"").unwrap();
            }
        }
    }
    text
}

/// Maximum memory of a daemon once it has read the routes, bytes.
const RESIDENT_MAX: u64 = 512 << 20;

/// Prints the duration of a step and the daemon's memory, which must be within the limit.
fn check_memory(step: &str, began: Instant, host: &Host) {
    let seconds = began.elapsed().as_secs_f64();
    // Free memory is returned after the answer.
    eventually(20.0, "free memory is returned", || resident(host)[0] < RESIDENT_MAX);
    let [now, most] = resident(host).map(|bytes| bytes >> 20);
    println!("{step} in {seconds:.1} s; resident: {now} MiB, at most {most} MiB");
}

/// A daemon's current and maximum resident memory, bytes.
fn resident(host: &Host) -> [u64; 2] {
    let status = std::fs::read_to_string(format!("/proc/{}/status", host.pid())).unwrap();
    ["VmRSS:", "VmHWM:"].map(|key| {
        let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    })
}

#[test]
#[ignore = "gigabytes of memory, a minute: make prove"]
fn a_million_routes_are_added_and_changed_under_traffic() {
    let vpcs =
        (100..100 + NETWORKS).map(|n| vpc(n, "tcp", "flow") + "gateway = [\"10.254.0.254\", \"10.255.0.254\"]\n");
    let mut lab = Lab::new(Options { vpcs: vpcs.collect(), ..Options::default() });
    let last = 100 + NETWORKS - 1;
    lab.add(0, Guest::new("a", 1, &["10.254.0.1/24"]).gateway("10.254.0.254"));
    lab.add(1, Guest::new("b", 2, &["10.255.0.2/24"]).gateway("10.255.0.254"));
    lab.add(0, Guest::new("y", 1, &["10.254.0.1/24"]).vni(last).gateway("10.254.0.254"));
    lab.add(1, Guest::new("z", 2, &["10.255.0.2/24"]).vni(last).gateway("10.255.0.254"));
    let few = lab.hosts[0].config.clone();
    lab.hosts[0].config.push_str(&routes(2));
    let began = Instant::now();
    lab.start();
    check_memory("started", began, &lab.hosts[0]);
    for (from, to) in [("a", "b"), ("y", "z")] {
        assert_eq!(ping_with(lab.net(from), "10.255.0.2", 5, 56, 64), [63; 5]);
        exchange(lab.net(from), lab.net(to), "10.255.0.2", 5001, MEGABYTES);
    }
    assert_eq!(lab.hosts[0].client.routes().unwrap().len(), (NETWORKS * ROUTES) as usize + 2);

    // All of them change.
    let streams = [("a", "b"), ("y", "z")]
        .map(|(from, to)| Exchange::start(lab.net(from), lab.net(to), "10.255.0.2", 5002, 4096 * MEGABYTES));
    std::thread::sleep(Duration::from_millis(500));
    lab.hosts[0].config = few.clone() + &routes(6);
    lab.hosts[0].write_config();
    let began = Instant::now();
    let report = lab.hosts[0].client.reload().unwrap();
    assert!(streams.iter().any(|stream| !stream.is_finished()), "no stream was running any more");
    check_memory("changed", began, &lab.hosts[0]);
    assert_eq!(report.routes.changed.len(), (NETWORKS * ROUTES) as usize);
    streams.into_iter().for_each(Exchange::finish);
    lab.assert_nothing_given_up();
    lab.hosts[0].config = few;
    lab.hosts[0].write_config();
    let began = Instant::now();
    assert_eq!(lab.hosts[0].client.reload().unwrap().routes.removed.len(), (NETWORKS * ROUTES) as usize);
    check_memory("removed", began, &lab.hosts[0]);
}
