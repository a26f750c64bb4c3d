//! Upgrades of a daemon with virtual machines' ports: the front-ends stay connected, and the guests' connections
//! continue.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::common::front_end::{FrontEnd, Kind};
use crate::common::host::PATIENT;
use crate::common::machine::Machine;
use crate::common::traffic::Echo;
use crate::common::{Guest, Lab, Options};

/// Upgrades for each kind of machine.
const UPGRADES: usize = 10;

/// A host with a machine's port, and a host with a container.
fn lab(settings: &str, mode: &str) -> Lab {
    let mut lab = Lab::new(Options { transport: PATIENT.to_owned(), ..Options::default() });
    lab.add_machine(0, &Guest::new("a", 1, &["10.0.0.1/24"]).mtu(1450), mode);
    let keys = format!("kind = \"vhost-user\"\n{settings}");
    lab.hosts[0].config = lab.hosts[0].config.replace("kind = \"vhost-user\"", &keys);
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24"]).mtu(1450));
    lab.start();
    lab
}

fn user_mode(lab: &Lab) -> Machine {
    let directory = &lab.hosts[0].directory;
    Machine::start(directory, "a", &lab.machine_socket("a"), "10.0.0.1/24", "busybox nc -ll -p 5001 -e cat")
}

/// The machine returns streams; its host's daemon is upgraded, and fails to be, while they flow.
fn survive(lab: &mut Lab, machine: &Machine, streams: usize) {
    let echoes: Vec<_> = (0..streams).map(|_| Echo::start(lab.net("b"), "10.0.0.1", 5001)).collect();
    let progress = |bytes| echoes.iter().for_each(|echo| echo.wait_for_progress(bytes, Duration::from_secs(60)));
    let connections = |lab: &Lab| lab.hosts[0].log().matches("a vhost-user front-end connected").count();
    progress(1 << 20);
    let connected = connections(lab);
    // A daemon that has taken over has a few other descriptors than one that was started.
    lab.hosts[0].upgrade(None).unwrap();
    let open = descriptors(lab.hosts[0].pid());
    for upgrade in 0..UPGRADES {
        progress(1 << 20);
        for echo in &echoes {
            echo.take_longest_silence();
        }
        let began = Instant::now();
        // Every second new daemon fails, at one step after the other: the old one continues. The last one serves the
        // machine for 2 seconds, but does not report that.
        let faults = ["exit prepared", "exit stopped", "exit taken", "exit working", "hang working"];
        match upgrade % 2 {
            0 => {
                let report = lab.hosts[0].upgrade(None).unwrap_or_else(|e| panic!("{e}\n{}", lab.hosts[0].log()));
                println!("{:?}: {report}", began.elapsed());
            }
            _ => {
                let fault = faults[upgrade / 2 % faults.len()];
                let program = crate::upgrade::faulty(&lab.hosts[0], fault);
                let error = lab.hosts[0].upgrade(Some(&program)).unwrap_err().to_string();
                assert!(error.contains("the running daemon continues"), "{fault}: {error}");
            }
        }
        progress(1 << 20);
        println!("upgrade {upgrade}: silence {:?}", echoes.iter().map(Echo::take_longest_silence).max());
        lab.hosts[0].assert_balanced();
    }
    assert_eq!(descriptors(lab.hosts[0].pid()), open);
    let log = lab.hosts[0].log();
    assert_eq!(connections(lab), connected, "the front-end was disconnected:\n{log}");
    assert!(!log.contains("is out of use") && !log.contains("cannot run"), "{log}");
    assert_eq!(lab.hosts[0].counter("vhost.broken_rings"), 0);
    assert_eq!(lab.hosts[0].counter("vhost.tx_reused_buffer_packets"), 0);
    // The guest's driver reports descriptors that are returned twice.
    assert!(!machine.console().contains("is not a head"), "{}", machine.console());
    let bytes: u64 = echoes.into_iter().map(Echo::finish).sum();
    println!("{bytes} bytes were returned unchanged");
}

/// Another worker serves the machine if the number of workers differs.
#[test]
fn a_machine_stays_connected_with_another_number_of_workers() {
    let mut lab = Lab::new(Options { transport: PATIENT.to_owned(), ..Options::default() });
    // The first port, so that the machine's is not always the first worker's.
    lab.add(0, Guest::new("c", 3, &["10.0.0.3/24"]).mtu(1450));
    lab.add_machine(0, &Guest::new("a", 1, &["10.0.0.1/24"]).mtu(1450), "server");
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24"]).mtu(1450));
    lab.start();
    let _machine = user_mode(&lab);
    let echo = Echo::start(lab.net("b"), "10.0.0.1", 5001);
    let progress = || echo.wait_for_progress(1 << 20, Duration::from_secs(60));
    let connections = |lab: &Lab| lab.hosts[0].log().matches("a vhost-user front-end connected").count();
    progress();
    let connected = connections(&lab);
    for count in [2, 3, 1, 2] {
        crate::upgrade_workers::set_workers(&mut lab.hosts[0], count);
        for fault in ["exit stopped", "exit working"] {
            let program = crate::upgrade::faulty(&lab.hosts[0], fault);
            lab.hosts[0].upgrade(Some(&program)).unwrap_err();
            progress();
        }
        let report = lab.hosts[0].upgrade(None).unwrap_or_else(|e| panic!("{e}\n{}", lab.hosts[0].log()));
        println!("{count} workers: {report}");
        progress();
        lab.hosts[0].assert_balanced();
        let conns = lab.hosts[0].client.conns().unwrap();
        let of_machine = conns.iter().filter(|c| c.local_mac == "02:00:00:00:00:01");
        let owners: Vec<u32> = of_machine.map(|c| c.cid >> 24).collect();
        assert_eq!(owners, [1 % count as u32], "{conns:#?}");
    }
    let log = lab.hosts[0].log();
    assert_eq!(connections(&lab), connected, "the front-end was disconnected:\n{log}");
    assert!(!log.contains("is out of use") && !log.contains("cannot run"), "{log}");
    assert!(echo.finish() > 1 << 20);
}

/// Numbers of a process's open descriptors by kind: the least of several counts, because a connection of the API is
/// open for a moment.
fn descriptors(process: u32) -> BTreeMap<String, usize> {
    let count = |_| {
        std::thread::sleep(Duration::from_millis(50));
        let mut kinds = BTreeMap::new();
        for entry in std::fs::read_dir(format!("/proc/{process}/fd")).unwrap().flatten() {
            let to = std::fs::read_link(entry.path()).unwrap_or_default();
            let kind: String = to.to_string_lossy().chars().filter(|c| !c.is_ascii_digit()).collect();
            *kinds.entry(kind).or_default() += 1;
        }
        kinds
    };
    (0..20).map(count).min_by_key(|kinds: &BTreeMap<_, usize>| kinds.values().sum::<usize>()).unwrap()
}

/// User-mode Linux removes its device permanently when its connection ends.
#[test]
fn user_mode_linux_stays_connected() {
    for packed in [false, true] {
        let mut lab = lab(&format!("packed = {packed}"), "server");
        let machine = user_mode(&lab);
        machine.wait_for(&format!("packed {}", u8::from(packed)), 60.0);
        survive(&mut lab, &machine, 1);
    }
}

/// QEMU listens; the daemon connects.
#[test]
fn qemu_with_two_queue_pairs_stays_connected() {
    for (device, says) in [(",mq=on", "packed 0, queues 2"), (",mq=on,packed=on", "packed 1, queues 2")] {
        let mut lab = lab("queues = 2", "client");
        let (directory, socket) = (lab.hosts[0].directory.clone(), lab.machine_socket("a"));
        let machine = Machine::qemu(&directory, "a", &socket, "10.0.0.1/24", 2, device, "nc -ll -p 5001 -e cat");
        machine.wait_for(&format!("guest: up, {says}"), 120.0);
        survive(&mut lab, &machine, 2);
    }
}

fn front_end(socket: &Path) -> FrontEnd {
    FrontEnd::running(socket, Kind { packed: false, size: 256 }).expect("the port serves a machine")
}

/// A port without a front-end accepts one after the upgrade; a message that is sent during it is answered after it; the
/// socket's file and the connections outlive the old daemon.
#[test]
fn sockets_and_messages_survive() {
    let mut lab = lab("", "server");
    let socket = lab.machine_socket("a");
    lab.hosts[0].upgrade(None).unwrap();
    let mut guest = front_end(&socket);
    for _ in 0..2 {
        std::thread::scope(|scope| {
            let asks = scope.spawn(|| (0..200).all(|_| guest.is_alive()));
            lab.hosts[0].upgrade(None).unwrap();
            assert!(asks.join().unwrap(), "{}", lab.hosts[0].log());
        });
    }
    assert!(!lab.hosts[0].port("a").waiting);
    drop(guest);
    guest = front_end(&socket);
    assert!(guest.is_alive());
    // The socket disappears with its port.
    let start = lab.hosts[0].config.find("[[port]]").unwrap();
    let end = lab.hosts[0].config[start + 1..].find("\n[[").map_or(lab.hosts[0].config.len(), |at| start + 1 + at);
    lab.hosts[0].config.replace_range(start..end, "");
    lab.hosts[0].write_config();
    lab.hosts[0].client.reload().unwrap();
    assert!(!socket.exists());
}

/// A front-end that stops in the middle of a message cannot prevent an upgrade: it is disconnected.
#[test]
fn half_a_message_does_not_prevent_an_upgrade() {
    let mut lab = lab("", "server");
    let guest = front_end(&lab.machine_socket("a"));
    guest.tell_half();
    lab.hosts[0].upgrade(None).unwrap();
    assert!(!guest.is_alive());
    assert!(front_end(&lab.machine_socket("a")).is_alive());
}
