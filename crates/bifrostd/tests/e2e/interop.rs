//! A host that uses the kernel's VXLAN, without the daemon.

use crate::common::traffic::{exchange, ping};
use crate::common::{Guest, Lab, Options, raw};

const MEGABYTES: u64 = 1 << 20;

/// The first host runs the daemon with guest `a`; guest `b` is behind a VXLAN device of the second host's kernel.
fn lab(peer: &'static str, transport: &str) -> Lab {
    let mut lab = Lab::new(Options { links: 1, peer, transport: transport.to_string(), ..Options::default() });
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24"]));
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24"]));
    let (b, net) = (lab.guest("b").clone(), lab.net("b").name().to_string());
    lab.hosts[1].net.ip(&format!(
        "link add vx0 type vxlan id 100 local 172.31.0.2 remote 172.31.0.1 dstport 4789\nlink set vx0 netns {net}\n"
    ));
    // A veth pair leaves checksums incomplete, inside of tunnels too. The other kernel would not check them, but the
    // daemon does. A NIC would complete them.
    let output = lab.net("b").run("ethtool", &["-K", "vx0", "tx", "off"], "");
    assert!(output.status.success(), "{output:?}");
    lab.net("b")
        .ip(&format!("link set vx0 addrgenmode none address {} mtu 1500 up\naddr add 10.0.0.2/24 dev vx0\n", b.mac));
    lab.hosts[0].start();
    lab
}

#[test]
fn a_plain_peer_gets_no_requests() {
    let lab = lab("plain", "");
    let (a, b) = (lab.net("a"), lab.net("b"));
    // The peer's guest broadcasts ARP requests; those of this host's guest are answered by the switch.
    assert_eq!(ping(b, "10.0.0.1", 5, 1472), 5, "ARP from the kernel's side");
    a.ip("neigh flush dev eth0\n");
    assert_eq!(ping(a, "10.0.0.2", 5, 56), 5);
    exchange(a, b, "10.0.0.2", 5001, 4 * MEGABYTES);
    exchange(b, a, "10.0.0.1", 5002, 4 * MEGABYTES);
    let counters = lab.hosts[0].counters();
    assert_eq!((counters["rte.requests_sent_packets"], counters["rte.connections"]), (0, 0));
    assert!(counters["datapath.plain_tx_packets"] > 5793 && counters["datapath.plain_rx_packets"] > 5793);
    assert_eq!(counters["drop.bad_checksum_frames"], 0);
}

#[test]
fn a_silent_peer_becomes_plain_after_all_tries() {
    let lab = lab("auto", "setup_tries = 3\nplain_retry_s = 1\n");
    let (a, b) = (lab.net("a"), lab.net("b"));
    let took = exchange(a, b, "10.0.0.2", 5001, 4 * MEGABYTES);
    let host = &lab.hosts[0];
    let counters = host.counters();
    assert_eq!(counters["rte.requests_sent_packets"], 3);
    assert_eq!(counters["rte.unanswered_connections"], 1);
    assert!(counters["datapath.plain_tx_packets"] > 2896, "{counters:?}");
    assert_eq!(host.conns_with(lab.guest("b"))[0].state, bifrost_control::api::ConnState::Plain);
    // Packets that waited for the outcome were not lost: TCP would retransmit its first packet after 1 s.
    assert!(took.as_secs_f64() < 0.9, "{took:?}");
    std::thread::sleep(std::time::Duration::from_millis(1100));
    // Set-up is retried periodically, and traffic does not wait for that.
    let took = exchange(b, a, "10.0.0.1", 5002, 4 * MEGABYTES);
    assert!(took.as_secs_f64() < 3.0, "{took:?}");
    assert!(host.counter("rte.requests_sent_packets") > 3);
}

#[test]
fn broadcast_and_unknown_addresses_of_a_plain_peer_are_dropped() {
    let lab = lab("plain", "");
    let (a, b) = (lab.guest("a"), lab.guest("b"));
    assert_eq!(ping(lab.net("b"), "10.0.0.1", 1, 56), 1);
    let packet = raw::udp_in_ipv4([10, 0, 0, 2], [10, 0, 0, 255], b"all");
    let stranger = raw::udp_in_ipv4([10, 0, 0, 77], [10, 0, 0, 1], b"who?");
    let frames = vec![
        raw::ethernet([0xff; 6], b.mac_bytes(), 0x0800, &packet),
        raw::ethernet(a.mac_bytes(), [2, 0, 0, 0, 0, 77], 0x0800, &stranger),
        raw::ethernet([2, 0, 0, 0, 0, 99], b.mac_bytes(), 0x0800, &packet),
    ];
    let before = lab.hosts[0].counters();
    // The kernel floods the unknown addresses to the device's default destination, too.
    assert_eq!(raw::send_frames(lab.net("b"), "vx0", frames), 3);
    // That kernel also sends its own packets: router solicitations, group memberships.
    let names = ["broadcast", "wrong_peer", "unknown_mac"].map(|r| format!("avs.underlay_dropped_{r}_packets"));
    crate::common::eventually(2.0, "the three frames are counted", || {
        let after = lab.hosts[0].counters();
        let grown = crate::common::growth(&before, &after, |n| names.iter().any(|name| name == n));
        grown == names.clone().map(|name| (name, 1)).into_iter().collect()
    });
}
