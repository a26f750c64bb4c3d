//! A panic while one port is served only affects that port, for a while: other tenants' streams lose no byte.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::common::host::{Host, vpc};
use crate::common::machine::Machine;
use crate::common::traffic::{Echo, Exchange, ping, ping_briefly, ping_despite_giving_up};
use crate::common::{Guest, Lab, Options, eventually};

const MEGABYTES: u64 = 1 << 20;

/// Makes the next step of this kind panic for a port.
fn inject(host: &Host, stage: &str, port: &str) {
    let file = host.injection_file();
    let whole = file.with_extension("new");
    std::fs::write(&whole, format!("{stage} {port}\n")).unwrap();
    std::fs::rename(whole, &file).unwrap();
    eventually(5.0, "the daemon has read the injection", || !file.exists());
}

/// Two tenants on two hosts: a and b, c and d.
fn lab(workers: usize) -> Lab {
    let vpcs = vpc(100, "all", "flow") + &vpc(200, "tcp", "flow");
    let mut lab = Lab::new(Options { vpcs, workers, ..Options::default() });
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24"]));
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24"]));
    lab.add(0, Guest::new("c", 3, &["10.0.0.3/24"]).vni(200));
    lab.add(1, Guest::new("d", 4, &["10.0.0.4/24"]).vni(200));
    lab
}

#[test]
fn a_panic_at_any_stage_disables_the_port_until_a_reload() {
    for workers in [1, 2] {
        let mut lab = lab(workers);
        lab.start();
        let pid = lab.hosts[0].pid();
        let stages = ["fetch", "switch", "transport", "emit", "release", "flush", "place", "publish", "notify"];
        for (n, stage) in stages.into_iter().enumerate() {
            assert_eq!(ping(lab.net("a"), "10.0.0.2", 5, 100), 5, "before {stage}");
            let other = Exchange::start(lab.net("c"), lab.net("d"), "10.0.0.4", 5001 + n as u16, 8 * MEGABYTES);
            inject(&lab.hosts[0], stage, "a");
            assert!(ping_briefly(lab.net("a"), "10.0.0.2", 20, 1000) < 20, "{stage}: the port is out of use");
            eventually(5.0, "the fault is reported", || lab.hosts[0].port("a").failed);
            let port = lab.hosts[0].port("a");
            let fault = port.fault.unwrap();
            assert_eq!((fault.stage.as_str(), port.fault_times), (stage, 1));
            assert!(fault.message.contains("injected") && fault.location.contains("work.rs"), "{fault:?}");
            assert_eq!(ping_briefly(lab.net("a"), "10.0.0.2", 3, 100), 0, "{stage}: it stays out of use");
            other.finish();
            lab.hosts[0].assert_balanced();
            assert!(!lab.hosts[0].port("c").failed);
            lab.hosts[0].client.reload().unwrap();
            assert!(!lab.hosts[0].port("a").failed, "{stage}: a reload re-enables it");
            eventually(5.0, "it is reachable again", || ping(lab.net("a"), "10.0.0.2", 1, 100) == 1);
        }
        assert_eq!(lab.hosts[0].client.status().unwrap().pid, pid, "the daemon has not restarted");
        assert!(lab.hosts[0].counter("datapath.caught_panics") >= stages.len() as u64);
        // Each panic is logged once.
        let log = lab.hosts[0].log();
        assert_eq!(log.matches("the port is out of use until").count(), workers * stages.len(), "{log}");
        assert_eq!(log.matches("thread 'worker").count(), 0, "{log}");
    }
}

#[test]
fn a_panic_outside_of_any_port_affects_no_port() {
    let mut lab = lab(1);
    lab.start();
    for (n, stage) in ["loop", "arrival", "timer", "acknowledge", "emit control", "send"].into_iter().enumerate() {
        let other = Exchange::start(lab.net("c"), lab.net("d"), "10.0.0.4", 5001 + n as u16, 8 * MEGABYTES);
        inject(&lab.hosts[0], stage, "-");
        other.finish();
        eventually(5.0, "the panic is caught", || lab.hosts[0].counter("datapath.caught_panics") > n as u64);
        assert_eq!(ping(lab.net("a"), "10.0.0.2", 5, 100), 5, "after {stage}");
        lab.hosts[0].assert_balanced();
    }
    assert!(lab.hosts[0].client.ports().unwrap().iter().all(|port| !port.failed));
}

/// Sends GET_FEATURES as a front-end and returns the answer; `None` if the connection is closed.
fn ask_for_features(socket: &Path) -> Option<u64> {
    let mut stream = UnixStream::connect(socket).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    // GET_FEATURES of version 1, no payload.
    stream.write_all(&[1u32, 1, 0].map(u32::to_le_bytes).concat()).ok()?;
    let mut answer = [0; 20];
    stream.read_exact(&mut answer).ok()?;
    Some(u64::from_le_bytes(answer[12..].try_into().unwrap()))
}

#[test]
fn a_panic_at_a_message_only_affects_that_device() {
    let mut lab = lab(1);
    lab.add_machine(0, &Guest::new("m", 5, &["10.0.0.5/24"]), "server");
    lab.start();
    let socket = lab.machine_socket("m");
    let other = Exchange::start(lab.net("c"), lab.net("d"), "10.0.0.4", 5001, 32 * MEGABYTES);
    for fault in 1..=4 {
        assert!(ask_for_features(&socket).is_some(), "the device answers before fault {fault}");
        inject(&lab.hosts[0], "message", "m");
        assert_eq!(ask_for_features(&socket), None, "fault {fault}");
        eventually(5.0, "the fault is seen", || lab.hosts[0].port("m").fault_times == fault);
        assert_eq!(lab.hosts[0].port("m").fault.unwrap().stage, "message");
    }
    let began = Instant::now();
    assert_eq!(ask_for_features(&socket), None, "a fourth fault within a minute delays the next connection");
    assert!(began.elapsed() >= Duration::from_secs(1), "the connection is delayed");
    other.finish();
    assert_eq!(ping(lab.net("a"), "10.0.0.2", 5, 100), 5);
    assert!(lab.hosts[0].client.reload().is_ok(), "the device's thread still works");
    assert_eq!(lab.hosts[0].stop().code(), Some(0), "the thread ends with the daemon");
}

#[test]
fn a_machine_recovers_by_itself_and_keeps_its_streams() {
    let mut lab = Lab::new(Options::default());
    lab.add_machine(0, &Guest::new("a", 1, &["10.0.0.1/24"]).mtu(1450), "client");
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24"]).mtu(1450));
    lab.start();
    let (directory, socket) = (lab.hosts[0].directory.clone(), lab.machine_socket("a"));
    let a = Machine::qemu(&directory, "a", &socket, "10.0.0.1/24", 1, "", "nc -ll -p 5001 -e cat");
    a.wait_for("guest: up", 120.0);
    let echo = Echo::start(lab.net("b"), "10.0.0.1", 5001);
    // At most three: a fourth fault within a minute would be delayed.
    for (n, stage) in ["fetch", "place", "emit"].into_iter().enumerate() {
        echo.wait_for_progress(MEGABYTES, Duration::from_secs(60));
        inject(&lab.hosts[0], stage, "a");
        eventually(10.0, "the fault is seen", || lab.hosts[0].port("a").fault_times == n as u64 + 1);
        assert_eq!(lab.hosts[0].port("a").fault.unwrap().stage, stage);
        echo.wait_for_progress(MEGABYTES, Duration::from_secs(60));
    }
    // The guest's driver reports descriptors that are returned twice.
    assert!(!a.console().contains("is not a head"), "{}", a.console());
    assert_eq!(lab.hosts[0].counter("vhost.broken_rings"), 0);
    println!("{} bytes were returned unchanged", echo.finish());
}

#[test]
fn a_slow_port_does_not_block_other_ports() {
    let mut lab = lab(1);
    lab.start();
    let (c, d) = ("c", "d");
    let exchange = |port| {
        let began = Instant::now();
        Exchange::start(lab.net(c), lab.net(d), "10.0.0.4", port, 16 * MEGABYTES).finish();
        began.elapsed()
    };
    let alone = exchange(5001);
    let port = lab.hosts[0].port("a");
    assert_eq!((port.slow_turns, port.rest_times), (0, 0), "no port is slow");
    // Placing a packet for `a` takes 5 ms, as with a ring full of unusable buffers; `b` sends one every 5 ms.
    inject(&lab.hosts[0], "slow place", "a");
    let with = std::thread::scope(|scope| {
        let pings = scope.spawn(|| ping_despite_giving_up(lab.net("b"), "10.0.0.1", 600, 100));
        eventually(5.0, "the port is suspended", || lab.hosts[0].port("a").rest_times > 0);
        let with = exchange(5002);
        assert!(pings.join().unwrap() < 600, "excess packets are dropped");
        with
    });
    println!("alone {alone:?}, beside a slow port {with:?}");
    assert!(with < 2 * alone + Duration::from_secs(1), "alone {alone:?}, beside a slow port {with:?}");
    let port = lab.hosts[0].port("a");
    assert!(port.slow_turns > 2 && port.drops_packets["slow_port"] > 0, "{port:?}");
    let log = lab.hosts[0].log();
    assert!(log.contains("a port keeps its worker from all others") && log.contains("place"), "{log}");
    let other = lab.hosts[0].port("c");
    assert_eq!((other.slow_turns, other.rest_times), (0, 0), "{other:?}");
    // A step that takes seconds is logged while it lasts.
    inject(&lab.hosts[0], "stuck flush", "c");
    ping(lab.net("c"), "10.0.0.4", 1, 100);
    eventually(10.0, "it is logged", || lab.hosts[0].log().contains("a worker has been at one step"));
}
