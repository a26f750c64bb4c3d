//! Ports that only one of several workers serves: their packets get there, whichever worker receives them first.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use bifrost_control::api::TraceSpec;

use crate::common::host::{Host, vpc};
use crate::common::machine::Machine;
use crate::common::traffic::{Exchange, exchange, ping};
use crate::common::{Guest, Lab, Options, eventually};

const MEGABYTES: u64 = 1 << 20;

/// Adds keys to a port's configuration.
fn with(host: &mut Host, port: &str, keys: &str) {
    let name = format!("name = \"{port}\"\n");
    assert!(host.config.contains(&name));
    host.config = host.config.replacen(&name, &format!("{name}{keys}\n"), 1);
}

/// Asserts that packets were handed over between workers, and none was lost.
fn assert_handed_over(host: &Host) {
    eventually(2.0, "packets that were handed over have arrived", || {
        let counters = host.counters();
        counters["datapath.handed_over_packets"] == counters["datapath.taken_over_packets"]
    });
    let counters = host.counters();
    assert!(counters["datapath.handed_over_packets"] > 0, "{}: nothing was handed over", host.name);
    for counter in ["drop.hand_over_overflow_packets", "drop.gone_packets", "rte.unknown_cid_packets"] {
        assert_eq!(counters[counter], 0, "{}: {counter}", host.name);
    }
    host.assert_balanced();
}

#[test]
fn a_port_with_one_queue_reaches_all_others() {
    let mut lab = Lab::new(Options { workers: 2, ..Options::default() });
    let (near, far) = (["a1", "a2", "a3"], ["b1", "b2", "b3"]);
    let (near_nets, far_nets) =
        (["10.0.0.11/24", "10.0.0.12/24", "10.0.0.13/24"], ["10.0.0.21/24", "10.0.0.22/24", "10.0.0.23/24"]);
    for i in 0..3 {
        lab.add(0, Guest::new(near[i], 11 + i as u8, &[near_nets[i]]));
        lab.add(1, Guest::new(far[i], 21 + i as u8, &[far_nets[i]]));
    }
    // The first two are served by one worker each, the third by both.
    for i in 0..2 {
        with(&mut lab.hosts[0], near[i], "queues = 1");
        with(&mut lab.hosts[1], far[i], "queues = 1");
    }
    lab.start();
    let guests: Vec<(&str, &str)> = near.into_iter().zip(near_nets).chain(far.into_iter().zip(far_nets)).collect();
    let mut streams = Vec::new();
    for (i, (from, _)) in guests.iter().enumerate() {
        for (j, (to, net)) in guests.iter().enumerate().filter(|(j, _)| *j != i) {
            let address = net.split('/').next().unwrap();
            // Pings are sent as plain VXLAN.
            assert_eq!(ping(lab.net(from), address, 2, 56), 2, "{from} to {to}");
            let port = 5000 + (10 * i + j) as u16;
            streams.push(Exchange::start(lab.net(from), lab.net(to), address, port, MEGABYTES / 4));
        }
    }
    streams.into_iter().for_each(Exchange::finish);
    for (host, names) in lab.hosts.iter().zip([near, far]) {
        assert_handed_over(host);
        for (worker, name) in names.into_iter().take(2).enumerate() {
            let mac = &lab.guest(name).mac;
            let conns = host.client.conns().unwrap();
            let owners: Vec<u32> = conns.iter().filter(|c| c.local_mac == *mac).map(|c| c.cid >> 24).collect();
            assert!(!owners.is_empty() && owners.iter().all(|o| *o == worker as u32), "{name}: {owners:?}");
        }
    }
    // A trace predicts the handover.
    let spec = TraceSpec {
        port: Some("a1".into()),
        to: Some("10.0.0.12".parse().unwrap()),
        tcp: Some((1000, 80)),
        ..TraceSpec::default()
    };
    let trace = lab.hosts[0].client.trace(&spec).unwrap();
    assert_eq!(trace.worker, 0);
    assert!(trace.steps.iter().any(|step| step.stage == "worker" && step.details["worker"] == "1"), "{trace:?}");
    assert_eq!(trace.what, "it is delivered to the guest of a2");
}

/// Whether a TCP connection from one guest to a listening socket of another is established.
fn connects(lab: &Lab, from: &str, to: &str, address: &str, port: u16) -> bool {
    let socket: SocketAddr = format!("{address}:{port}").parse().unwrap();
    let listener = lab.net(to).enter(move || TcpListener::bind(socket).unwrap());
    let connected =
        lab.net(from).enter(move || TcpStream::connect_timeout(&socket, Duration::from_millis(400)).is_ok());
    drop(listener);
    connected
}

#[test]
fn security_groups_behind_a_gateway_know_their_sessions() {
    let vpcs = format!("{}gateway = [\"10.0.1.254\", \"10.0.2.254\"]\n", vpc(100, "tcp", "flow"));
    let mut lab = Lab::new(Options { workers: 2, vpcs, ..Options::default() });
    // a1 and c3, in different subnets of the first host, have a group without ingress rules; the other guests have
    // none.
    let guests: [(usize, &str, u8, &str, &str); 6] = [
        (0, "a1", 11, "10.0.1.1/24", "10.0.1.254"),
        (0, "a2", 12, "10.0.1.2/24", "10.0.1.254"),
        (0, "c1", 13, "10.0.2.1/24", "10.0.2.254"),
        (0, "c3", 14, "10.0.2.3/24", "10.0.2.254"),
        (1, "c2", 22, "10.0.2.2/24", "10.0.2.254"),
        (1, "a3", 23, "10.0.1.3/24", "10.0.1.254"),
    ];
    for (host, name, n, net, gateway) in guests {
        lab.add(host, Guest::new(name, n, &[net]).gateway(gateway));
    }
    for name in ["a1", "c3"] {
        with(&mut lab.hosts[0], name, "security_groups = [\"closed\"]");
    }
    lab.hosts[0].config.push_str("[[security_group]]\nname = \"closed\"\n");
    lab.start();
    let address = |name: &str| guests.iter().find(|guest| guest.1 == name).unwrap().3.split('/').next().unwrap();
    let mut port = 5000;
    for (from, to) in [("a1", "c1"), ("a1", "c2"), ("a1", "a2"), ("a1", "a3"), ("c3", "a2"), ("c3", "a3")] {
        port += 1;
        // Its own connections get answers.
        assert_eq!(ping(lab.net(from), address(to), 3, 56), 3, "{from} to {to}");
        exchange(lab.net(from), lab.net(to), address(to), port, MEGABYTES / 4);
        // Others cannot connect to it.
        assert_eq!(ping(lab.net(to), address(from), 1, 56), 0, "{to} to {from}");
        assert!(!connects(&lab, to, from, address(from), port), "{to} to {from}");
    }
    // Not even a guest with the same group, on another worker.
    assert!(!connects(&lab, "a1", "c3", address("c3"), 6000) && !connects(&lab, "c3", "a1", address("a1"), 6000));
    let host = &lab.hosts[0];
    assert_handed_over(host);
    assert!(host.drops("a1", "group_ingress") > 0 && host.drops("c3", "group_ingress") > 0);
    // Without a gateway, each port is served by all workers again, and keeps its groups.
    let before = host.counters()["avs.created_sessions"];
    lab.hosts[0].config = lab.hosts[0].config.replace("gateway = [\"10.0.1.254\", \"10.0.2.254\"]\n", "");
    lab.hosts[0].write_config();
    lab.hosts[0].client.reload().unwrap();
    exchange(lab.net("a1"), lab.net("a3"), address("a3"), 7001, MEGABYTES / 4);
    exchange(lab.net("a1"), lab.net("a2"), address("a2"), 7002, MEGABYTES / 4);
    assert!(!connects(&lab, "a3", "a1", address("a1"), 7003) && !connects(&lab, "a2", "a1", address("a1"), 7004));
    assert!(lab.hosts[0].counters()["avs.created_sessions"] >= before + 2);
}

#[test]
fn machines_of_hosts_with_two_workers() {
    let mut lab = Lab::new(Options { workers: 2, ..Options::default() });
    // The machine is the second port of each host, and so served by the second worker; containers are served by both.
    let (nets, machines) = (["10.0.0.1/24", "10.0.0.2/24"], ["a", "b"]);
    lab.add(0, Guest::new("c", 3, &["10.0.0.3/24"]).mtu(1450));
    lab.add(1, Guest::new("d", 4, &["10.0.0.4/24"]).mtu(1450));
    for host in 0..2 {
        lab.add_machine(host, &Guest::new(machines[host], 1 + host as u8, &[nets[host]]).mtu(1450), "server");
    }
    lab.start();
    let start = |host: usize, script: &str| {
        let (name, directory) = (machines[host], &lab.hosts[host].directory);
        Machine::start(directory, name, &lab.machine_socket(name), nets[host], script)
    };
    let b = start(1, "redis-server --save '' --protected-mode no --daemonize yes >/dev/null\nsleep 100");
    b.wait_for("guest: up", 30.0);
    let a = start(
        0,
        "redis-benchmark -h 10.0.0.2 -t get,set -n 2000 -c 20 -q | tr '\\r' '\\n' | grep 'per second'\n\
         echo measured\nsleep 100",
    );
    a.wait_for("measured", 120.0);
    assert_eq!(a.console().matches("requests per second").count(), 2, "{}", a.console());
    for from in ["c", "d"] {
        // As plain VXLAN, or between two workers.
        assert_eq!([ping(lab.net(from), "10.0.0.1", 3, 56), ping(lab.net(from), "10.0.0.2", 3, 56)], [3, 3], "{from}");
        let benchmark = ["-h", "10.0.0.2", "-t", "get", "-n", "2000", "-c", "20", "-q"];
        let output = lab.net(from).command("redis-benchmark").args(benchmark).output().unwrap();
        assert!(output.status.success(), "{from}: {}", String::from_utf8_lossy(&output.stderr));
    }
    for (host, n) in lab.hosts.iter().zip(1..) {
        assert_handed_over(host);
        assert_eq!(host.counter("vhost.broken_rings"), 0);
        let mac = format!("02:00:00:00:00:{n:02x}");
        let conns = host.client.conns().unwrap();
        let owners: Vec<u32> = conns.iter().filter(|c| c.local_mac == mac).map(|c| c.cid >> 24).collect();
        assert!(!owners.is_empty() && owners.iter().all(|owner| *owner == 1), "{owners:?}");
    }
}
