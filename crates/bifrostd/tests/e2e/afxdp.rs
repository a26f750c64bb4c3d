//! Hosts whose underlay is AF_XDP sockets.

use std::net::{SocketAddr, UdpSocket};

use bifrost_control::api::{PathState, Sample};

use crate::common::traffic::{Exchange, Talk, exchange, ping};
use crate::common::{Guest, Lab, Options, eventually};

const MEGABYTES: u64 = 1 << 20;

/// Two hosts with a guest each, not running. Hosts in `afxdp` use AF_XDP sockets as underlay.
fn lab(options: Options, afxdp: &[usize]) -> Lab {
    let mut lab = Lab::new(options);
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24"]));
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24"]));
    for &host in afxdp {
        let config = &mut lab.hosts[host].config;
        *config = config.replace("[underlay]\n", "[underlay]\nport = \"afxdp\"\n");
    }
    lab
}

/// Pings, and TCP in both directions; nearly all of it bypasses the kernel on the hosts in `afxdp`.
fn traffic(lab: &Lab, afxdp: &[usize]) {
    let (a, b) = (lab.net("a"), lab.net("b"));
    assert_eq!(ping(a, "10.0.0.2", 20, 1472), 20);
    assert_eq!(ping(b, "10.0.0.1", 20, 56), 20);
    exchange(a, b, "10.0.0.2", 5001, 4 * MEGABYTES);
    exchange(b, a, "10.0.0.1", 5002, 4 * MEGABYTES);
    for host in &lab.hosts {
        assert!(host.counter("rte.sent_packets") >= 5793, "8 MiB in segments of 1448 bytes");
        assert_eq!(host.client.conns().unwrap().len(), 1);
        assert_eq!(host.counter("drop.bad_checksum_frames"), 0);
    }
    for &host in afxdp {
        let counters = lab.hosts[host].counters();
        for direction in ["tx", "rx"] {
            let datagrams = counters[&format!("afxdp.{direction}_datagrams")];
            assert!(datagrams > 3000, "{datagrams} {direction}");
        }
        for drop in ["rx_malformed_frames", "rx_bad_checksum_frames", "rx_parsed_datagrams"] {
            assert_eq!(counters[&format!("afxdp.{drop}")], 0, "{drop}");
        }
    }
    lab.assert_nothing_given_up();
}

#[test]
fn both_hosts() {
    let both = &[0, 1];
    let mut lab = lab(Options::default(), both);
    lab.start();
    traffic(&lab, both);
}

#[test]
fn both_hosts_over_ipv6_behind_the_driver() {
    let both = &[0, 1];
    let mut lab = lab(Options { v6: true, ..Options::default() }, both);
    for host in &mut lab.hosts {
        host.config = host.config.replace("port = \"afxdp\"\n", "port = \"afxdp\"\nxdp_mode = \"generic\"\n");
    }
    lab.start();
    traffic(&lab, both);
}

#[test]
fn with_a_host_that_has_udp_sockets() {
    let mut lab = lab(Options::default(), &[0]);
    lab.start();
    traffic(&lab, &[0]);
    // Packets that the XDP program passes to the kernel arrive through the socket: here a fragmented datagram.
    let before = lab.hosts[0].counter("afxdp.rx_fallback_datagrams");
    let (from, to) = (lab.hosts[1].addresses[0], SocketAddr::new(lab.hosts[0].addresses[0], 4789));
    lab.hosts[1].net.enter(move || {
        UdpSocket::bind((from, 0)).unwrap().send_to(&[0; 4000], to).unwrap();
    });
    eventually(5.0, "the fragments arrive", || {
        let counters = lab.hosts[0].counters();
        counters["afxdp.rx_fallback_datagrams"] > before && counters["drop.bad_vxlan_packets"] == 1
    });
}

#[test]
fn two_workers_on_two_queues() {
    let both = &[0, 1];
    let mut lab = lab(Options { workers: 2, queues: 2, ..Options::default() }, both);
    for n in 0..4u8 {
        let name = |list: [&'static str; 4]| list[usize::from(n)];
        let net = name(["10.0.0.11/24", "10.0.0.12/24", "10.0.0.13/24", "10.0.0.14/24"]);
        lab.add(0, Guest::new(name(["a1", "a2", "a3", "a4"]), 11 + n, &[net]));
    }
    lab.start();
    let streams = ["a1", "a2", "a3", "a4"].map(|a| {
        let port = 5000 + u16::from(lab.guest(a).mac_bytes()[5]);
        Exchange::start(lab.net(a), lab.net("b"), "10.0.0.2", port, MEGABYTES)
    });
    streams.into_iter().for_each(Exchange::finish);
    for host in &lab.hosts {
        let counters = host.counters();
        assert_eq!(counters["rte.unknown_cid_packets"], 0, "a packet reached the wrong worker");
        assert_eq!(counters["datapath.handed_over_packets"], 0, "a packet reached the wrong worker");
        let samples = host.client.samples().unwrap();
        for worker in 0..2 {
            let of_worker = |s: &&Sample| s.counter == "afxdp.rx_datagrams" && s.at.worker == Some(worker);
            let datagrams = samples.iter().find(of_worker).unwrap().value;
            assert!(datagrams > 300, "worker {worker} got {datagrams}");
        }
    }
}

#[test]
fn a_link_goes_down_under_load_and_comes_back() {
    let both = &[0, 1];
    let mut lab = lab(Options { links: 4, ..Options::default() }, both);
    lab.start();
    let link = |up: &str| assert!(lab.hosts[0].net.run("ip", &["link", "set", "l2", up], "").status.success());
    let path = || lab.hosts[0].client.paths().unwrap().into_iter().find(|path| path.path == 2).unwrap();
    let works = || matches!(path().state, PathState::Active | PathState::Standby);
    let mut talk = Talk::start(lab.net("a"), lab.net("b"), "10.0.0.2", 5001);
    let mut carries = |what: &str| {
        let before = path().tx_packets;
        eventually(20.0, what, || {
            talk.say(100_000);
            works() && path().tx_packets > before + 100
        });
    };
    carries("the path is in use");
    let streams: Vec<_> =
        (0..8).map(|n| Exchange::start(lab.net("a"), lab.net("b"), "10.0.0.2", 5100 + n, 4 * MEGABYTES)).collect();
    link("down");
    streams.into_iter().for_each(Exchange::finish);
    // The other paths carry all later traffic.
    exchange(lab.net("a"), lab.net("b"), "10.0.0.2", 5002, 8 * MEGABYTES);
    assert!(!works(), "{:?}", path());
    link("up");
    carries("the path is in use again");
    // Routes are read every two seconds; until then packets on this path leave through the kernel.
    let fallback = || lab.hosts[0].counter("afxdp.tx_fallback_datagrams");
    eventually(20.0, "the path is in use, and bypasses the kernel", || {
        let (aside, used) = (fallback(), path().tx_packets);
        talk.say(100_000);
        fallback() == aside && path().tx_packets > used + 5
    });
    assert_eq!(lab.hosts[0].counter("afxdp.tx_no_frame_datagrams"), 0);
    lab.assert_nothing_given_up();
}

#[test]
fn a_killed_daemon_leaves_nothing_attached() {
    let both = &[0, 1];
    let mut lab = lab(Options { links: 1, ..Options::default() }, both);
    lab.start();
    let link = |lab: &Lab| {
        let output = lab.hosts[0].net.run("ip", &["link", "show", "l0"], "");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    assert!(link(&lab).contains("xdp"), "{}", link(&lab));
    assert_eq!(ping(lab.net("a"), "10.0.0.2", 5, 56), 5);
    lab.hosts[0].crash();
    eventually(5.0, "nothing is attached", || !link(&lab).contains("xdp"));
    lab.hosts[0].start();
    // Its guest has a new device.
    eventually(10.0, "the guests communicate again", || ping(lab.net("a"), "10.0.0.2", 1, 56) == 1);
}
