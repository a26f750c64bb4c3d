//! A guest cannot affect others by what it sends. `bifrost-lab`'s experiment `isolation` measures the others' speed
//! meanwhile; this tests what must hold on any machine.

use std::io::{Read as _, Write as _};
use std::time::Duration;

use bifrost_lab::programs::hostile::{Frames, Traffic, Vnic};
use bifrost_lab::programs::packet_socket::PacketSocket;

use crate::common::host::vpc;
use crate::common::traffic::Talk;
use crate::common::{Guest, Lab, Options, eventually};

/// Maximum number of sessions of a port.
const SESSIONS: u64 = 512;
/// Allowed growth of a daemon's memory, KiB.
const MEMORY_KIB: u64 = 32 << 10;

/// Two tenants on two hosts. `a` and `b` belong to one. The attacker `x` belongs to the other, and has a guest `y` on
/// the other host.
struct Tenants {
    lab: Lab,
    /// Connections of the other tenant and of the attacker.
    talks: [Talk; 2],
    memory_kib: [u64; 2],
}

impl Tenants {
    fn new() -> Tenants {
        let vpcs = vpc(100, "tcp", "flow") + &vpc(200, "tcp", "flow");
        let mut lab = Lab::new(Options { vpcs, ..Options::default() });
        lab.add(0, Guest::new("a", 1, &["10.0.0.1/24"]));
        lab.add(1, Guest::new("b", 2, &["10.0.0.2/24"]));
        lab.add(0, Guest::new("x", 0x21, &["10.9.0.1/24", "fd09::1/64"]).vni(200));
        lab.add(1, Guest::new("y", 0x22, &["10.9.0.2/24", "fd09::2/64"]).vni(200));
        // Clients have no ingress rules: they get answers only because of their sessions.
        for (host, closed, open) in [(0, ["a", "x"], None), (1, ["", ""], Some(["b", "y"]))] {
            let config = &mut lab.hosts[host].config;
            let names = open.map_or(closed.map(|name| (name, "closed")), |names| names.map(|name| (name, "open")));
            for (name, group) in names {
                let line = format!("name = \"{name}\"\n");
                *config = config.replacen(&line, &format!("{line}security_groups = [\"{group}\"]\n"), 1);
            }
            config.push_str(&format!("[sessions]\nper_port = {SESSIONS}\n"));
            config.push_str(
                "[[security_group]]\nname = \"closed\"\n[[security_group]]\nname = \"open\"\ningress = [{}]\n",
            );
        }
        lab.start();
        let talks = [("a", "b", "10.0.0.2"), ("x", "y", "10.9.0.2")]
            .map(|(client, server, address)| Talk::start(lab.net(client), lab.net(server), address, 5001));
        let mut tenants = Tenants { lab, talks, memory_kib: [0; 2] };
        for talk in &mut tenants.talks {
            talk.say(1000);
        }
        tenants.memory_kib = [0, 1].map(|host| tenants.memory_kib(host));
        tenants
    }

    fn memory_kib(&self, host: usize) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.lab.hosts[host].pid())).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }

    /// Packets that the first daemon has fetched from `x`.
    fn fetched(&self) -> u64 {
        let samples = self.lab.hosts[0].client.samples().unwrap();
        let of_port =
            samples.iter().filter(|s| s.counter == "port.fetched_packets" && s.at.port.as_deref() == Some("x"));
        of_port.map(|s| s.value).sum()
    }

    /// Lets `x` send, as fast as its queue accepts, until the daemon has received it.
    fn attack(&self, traffic: Traffic, count: usize) {
        let vnic = |guest: &str, n: u8| Vnic {
            mac: self.lab.guest(guest).mac_bytes(),
            v4: [10, 9, 0, n],
            v6: [0xfd, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, n],
        };
        let mut frames = Frames::new(traffic, vnic("x", 1), vnic("y", 2), 1);
        let before = self.fetched();
        let taken = self.lab.net("x").enter(move || {
            let socket = PacketSocket::open("eth0").unwrap();
            let mut taken = 0;
            for number in 1..=count {
                let (offload, frame) = frames.next_frame();
                taken += u64::from(socket.send(&offload, frame).is_ok());
                if number % 100 == 0 {
                    std::thread::sleep(Duration::from_millis(2));
                }
            }
            taken
        });
        assert!(taken * 2 > count as u64, "{traffic:?}: the kernel took {taken} of {count} frames");
        // A queue may have been full temporarily.
        eventually(5.0, "the attack has arrived", || (self.fetched() - before) * 10 >= taken * 9);
    }

    /// Asserts that neither the other tenant nor the attacker's own connection is affected.
    fn check(&mut self) {
        for talk in &mut self.talks {
            // The server speaks first.
            talk.server.write_all(b"server first").unwrap();
            let mut heard = [0; 12];
            talk.client.read_exact(&mut heard).unwrap();
            talk.say(50_000);
        }
        for host in [0, 1] {
            let daemon = &self.lab.hosts[host];
            daemon.assert_balanced();
            assert!(!daemon.log().contains("panicked"));
            let mut drops = daemon.port(["a", "b"][host]).drops_packets;
            // Except IPv6 multicast of its kernel when the device appears.
            drops.remove("multicast");
            assert!(drops.values().all(|count| *count == 0), "{drops:?}");
            // Those of the attacker's port, and of a few connections.
            let sessions = daemon.counter("avs.current_sessions");
            assert!(sessions <= SESSIONS + 8, "{sessions} sessions");
            let memory_kib = self.memory_kib(host);
            assert!(
                memory_kib < self.memory_kib[host] + MEMORY_KIB,
                "{memory_kib} KiB, {} before",
                self.memory_kib[host]
            );
        }
    }
}

#[test]
fn damaged_frames_of_every_protocol_are_dropped_with_a_reason_and_affect_no_other_guest() {
    let mut tenants = Tenants::new();
    tenants.attack(Traffic::Damaged, 10_000);
    tenants.check();
    let host = &tenants.lab.hosts[0];
    for reason in ["vlan", "ethertype", "spoofed_ip", "spoofed_arp"] {
        assert!(host.drops("x", reason) > 10, "{reason}: {:?}", host.port("x").drops_packets);
    }
    let malformed: u64 = host.counters().iter().filter(|(n, _)| n.starts_with("malformed.guest")).map(|(_, v)| v).sum();
    assert!(malformed > 1000, "{malformed}");
}

#[test]
fn a_guest_that_opens_sessions_endlessly_only_uses_its_own_limit() {
    let mut tenants = Tenants::new();
    for (traffic, count) in [(Traffic::Conversations, 3000), (Traffic::Syns, 3000)] {
        let evicted = [0, 1].map(|host| tenants.lab.hosts[host].counter("avs.evicted_sessions"));
        tenants.attack(traffic, count);
        tenants.check();
        for host in [0, 1] {
            let counter = |name| tenants.lab.hosts[host].counter(name);
            assert!(
                counter("avs.evicted_sessions") > evicted[host],
                "{traffic:?}: host {host} never reached the bound"
            );
            assert!(counter("avs.current_sessions") >= SESSIONS, "{traffic:?}: host {host}");
        }
    }
}
