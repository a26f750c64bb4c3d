//! Virtual machines with a real virtio_net driver instead of containers.

use std::time::{Duration, Instant};

use crate::common::host::PATIENT;
use crate::common::machine::Machine;
use crate::common::traffic::Echo;
use crate::common::{Guest, Lab, Options, eventually};

/// Prints statistics of the guest's TCP.
const TCP_STATISTICS: &str = r#"
awk '/^Tcp:/ {if (!n) {split($0, name); n = 1} else for (i = 2; i <= NF; i++) if (name[i] == "RetransSegs") print "retransmitted=" $i}' /proc/net/snmp
awk '/^TcpExt:/ {if (!n) {split($0, name); n = 1} else for (i = 2; i <= NF; i++) if (name[i] == "TCPOFOQueue") print "out_of_order=" $i}' /proc/net/netstat
"#;

/// Two hosts with a machine's port each; neither machine runs yet.
fn lab(options: Options) -> Lab {
    let mut lab = Lab::new(options);
    for (host, name) in ["a", "b"].into_iter().enumerate() {
        let n = host as u8 + 1;
        let address: &'static str = ["10.0.0.1/24", "10.0.0.2/24"][host];
        lab.add_machine(host, &Guest::new(name, n, &[address]).mtu(1450), "server");
        // One machine has split rings and a port with slicing, the other one packed ones and a port without.
        let keys = format!("kind = \"vhost-user\"\npacked = {}\nslicing = {}", host > 0, host == 0);
        lab.hosts[host].config = lab.hosts[host].config.replace("kind = \"vhost-user\"", &keys);
    }
    lab.start();
    lab
}

fn machine(lab: &Lab, host: usize, script: &str) -> Machine {
    let name = ["a", "b"][host];
    let directory = &lab.hosts[host].directory;
    Machine::start(directory, name, &lab.machine_socket(name), ["10.0.0.1/24", "10.0.0.2/24"][host], script)
}

#[test]
fn machines_reach_each_other_reliably() {
    let mut lab = lab(Options { transport: PATIENT.to_owned(), ..Options::default() });
    for (host, name) in lab.hosts.iter().zip(["a", "b"]) {
        let port = host.port(name);
        assert!(port.waiting && port.kind == "vhost-user");
    }
    let b = machine(
        &lab,
        1,
        "redis-server --save '' --protected-mode no --daemonize yes >/dev/null\niperf3 -s -D\nsleep 100",
    );
    b.wait_for("guest: up, MTU 1450, MAC 02:00:00:00:00:02, packed 1", 30.0);
    let script = format!(
        "redis-cli -h 10.0.0.2 ping\n\
         redis-benchmark -h 10.0.0.2 -t get,set -n 2000 -c 20 -q | tr '\\r' '\\n' | grep 'per second'\n{TCP_STATISTICS}\n\
         for reverse in '' -R; do iperf3 -c 10.0.0.2 -t 2 $reverse -J | awk '/\"sum_received\"/ {{r = 1}} r && /\"bytes\"/ {{gsub(\",\", \"\"); print \"bytes=\" $2; r = 0}}'; done"
    );
    let a = machine(&lab, 0, &script);
    a.wait_for("guest: done", 120.0);
    assert!(a.console().contains("PONG") && a.console().contains(", packed 0"), "{}", a.console());
    assert_eq!(a.console().matches("requests per second").count(), 2);
    // A guest without CPU time for long may retransmit by itself.
    let (again, disorder) = (a.said("retransmitted"), a.said("out_of_order"));
    assert!(again < 10 && disorder == 0, "over four paths: {again} retransmitted, {disorder} out of order");
    assert_eq!(a.console().matches("bytes=").count(), 2, "{}", a.console());
    assert!(a.said("bytes") > 1 << 20);
    for host in &lab.hosts {
        let counters = host.counters();
        assert!(counters["rte.sent_packets"] > 4000, "{counters:?}");
        assert_eq!(host.counter("vhost.broken_rings"), 0);
        assert_eq!(host.counter("vhost.tx_reused_buffer_packets"), 0, "Linux does not reuse in-flight buffers");
        assert_eq!(host.counter("rte.given_up_packets"), 0);
    }
    // Linux accepts merged segments: many frames are one packet for it.
    assert!(lab.hosts[1].counter("vhost.rx_merged_frames") > 1000);
    // After a machine has ended, the port waits for the next one.
    eventually(10.0, "the port is free", || lab.hosts[0].port("a").waiting);
    assert_eq!(lab.hosts[0].port("a").tx_held_packets, 0);
    // The next machine uses a port with other settings after a reload.
    lab.hosts[0].config = lab.hosts[0].config.replace("slicing = true", "slicing = false");
    lab.hosts[0].write_config();
    assert_eq!(lab.hosts[0].client.reload().unwrap().ports.changed, ["a"]);
    let again = machine(&lab, 0, "redis-cli -h 10.0.0.2 ping");
    again.wait_for("guest: done", 30.0);
    assert!(again.console().contains("PONG"), "{}", again.console());
}

/// QEMU keeps no in-flight record for network devices: this tests the daemon's own record, and transmit buffers that
/// are returned in order. User-mode Linux removes its device permanently when the daemon ends.
#[test]
fn a_machine_survives_a_daemon_that_is_killed_under_load() {
    survive_kills(1, "", "packed 0", 8);
}

/// Positions in packed rings are only in the daemon's own record.
#[test]
fn a_machine_with_packed_rings_survives_a_daemon_that_is_killed_under_load() {
    survive_kills(1, ",packed=on", "packed 1", 8);
}

/// Each queue pair has its own record.
#[test]
fn a_machine_with_two_queue_pairs_survives_a_daemon_that_is_killed_under_load() {
    survive_kills(2, ",mq=on", "packed 0, queues 2", 3);
    survive_kills(2, ",mq=on,packed=on", "packed 1, queues 2", 3);
}

/// One virtual CPU and one stream for each of the machine's queue pairs.
fn survive_kills(queues: usize, device: &str, says: &str, kills: usize) {
    let mut lab = Lab::new(Options::default());
    let guest = Guest::new("a", 1, &["10.0.0.1/24"]).mtu(1450);
    lab.add_machine(0, &guest, "client");
    lab.hosts[0].config =
        lab.hosts[0].config.replace("kind = \"vhost-user\"", &format!("kind = \"vhost-user\"\nqueues = {queues}"));
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24"]).mtu(1450));
    lab.start();
    let directory = lab.hosts[0].directory.clone();
    let socket = lab.machine_socket("a");
    let a = Machine::qemu(&directory, "a", &socket, "10.0.0.1/24", queues, device, "nc -ll -p 5001 -e cat");
    a.wait_for(&format!("guest: up, {says}"), 120.0);
    let echoes: Vec<_> = (0..queues).map(|_| Echo::start(lab.net("b"), "10.0.0.1", 5001)).collect();
    let progress = |bytes| echoes.iter().for_each(|echo| echo.wait_for_progress(bytes, Duration::from_secs(60)));
    let longest_silence = || echoes.iter().map(Echo::take_longest_silence).max().unwrap_or_default();
    for kill in 0..kills {
        progress(2 << 20);
        longest_silence();
        let began = Instant::now();
        lab.hosts[0].crash();
        lab.hosts[0].start();
        let restart = began.elapsed();
        progress(1 << 20);
        let silence = longest_silence();
        println!("kill {kill}: silence {silence:?}, including {restart:?} of the restart");
        assert!(silence < restart + Duration::from_secs(5), "{silence:?} for a restart of {restart:?}");
    }
    assert_eq!(lab.hosts[0].counter("vhost.broken_rings"), 0);
    // Packets that the killed daemons had sent were retransmitted and compared.
    assert_eq!(lab.hosts[0].counter("vhost.tx_reused_buffer_packets"), 0);
    // The guest's driver reports descriptors that are returned twice.
    assert!(!a.console().contains("is not a head"), "{}", a.console());
    let bytes: u64 = echoes.into_iter().map(Echo::finish).sum();
    println!("{bytes} bytes were returned unchanged");
}
