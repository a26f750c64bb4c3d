//! Guests reach the Internet, another VPC, a cloud service and a customer's office through a gateway: `bifrost-nicd`
//! and `bifrost-gw` on a third host, to which the VPCs have routes over plain VXLAN, or over the reliable transport
//! with random loss.

mod office;
mod trunk;
mod world;

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use bifrost_control::api::GatewayHost;

use crate::common::traffic::{Exchange, exchange, ping, ping_with};
use crate::common::{Net, eventually};
use world::{Underlay, World};

const MEGABYTES: u64 = 1 << 20;
/// The bridge drops 3 % of the transport's packets in both directions.
const LOSS: &str = "table bridge loss {
  chain c {
    type filter hook forward priority 0
    udp dport 4794 numgen random mod 100 < 3 counter drop
  }
}
";

/// Segments that a guest's TCP has retransmitted after a timeout or because of acknowledgements, without tail loss
/// probes, which it sends after some milliseconds of silence even without loss (RFC 8985, section 7).
fn repeated_segments(net: &Net) -> u64 {
    net.enter(|| {
        let counters =
            ["snmp", "netstat"].map(|name| std::fs::read_to_string(format!("/proc/thread-self/net/{name}")).unwrap());
        let get = |name: &str| {
            let mut lines = counters.iter().flat_map(|text| text.lines());
            while let (Some(names), Some(values)) = (lines.next(), lines.next()) {
                if let Some(at) = names.split_whitespace().position(|n| n == name) {
                    return values.split_whitespace().nth(at).unwrap().parse::<u64>().unwrap();
                }
            }
            panic!("no {name}");
        };
        get("RetransSegs") - get("TCPLossProbes").min(get("RetransSegs"))
    })
}

#[test]
fn guests_reach_the_internet_another_vpc_and_a_service_through_a_gateway() {
    let world = World::new(Underlay::default());
    reach_everything(&world);
    for host in &world.lab.hosts[..2] {
        assert_eq!(host.counter("rte.requests_sent_packets"), 0, "the transport is not used");
    }
}

#[test]
fn hosts_reach_the_gateway_over_the_transport_despite_loss() {
    let mut world = World::new(Underlay { transport: true, ..Underlay::default() });
    let (a, b) = (world.lab.net("a"), world.lab.net("b"));
    eventually(20.0, "both hosts have connections with the gateway", || {
        ping(a, "198.51.100.1", 1, 56);
        ping(b, "10.1.0.1", 1, 56);
        world.transport().hosts.iter().all(|host| host.open_connections > 0)
    });
    world.bridge("-f -", LOSS);
    let before = [a, b].map(repeated_segments);
    reach_everything(&world);
    let after = [a, b].map(repeated_segments);
    let rules = world.bridge("list table bridge loss", "");
    assert!(!rules.contains("packets 0 "), "no packets were lost: {rules}");
    assert_eq!(after, before, "the transport retransmits, not the guests");
    eventually(5.0, "the gateway has retransmitted packets", || {
        let repaired = |host: &GatewayHost| host.retransmitted_packets > 0 && host.counters["rx_frames"] > 1000;
        world.transport().hosts.iter().all(repaired)
    });
    for host in &world.lab.hosts[..2] {
        assert!(host.counter("rte.retransmitted_packets") > 0, "{:?}", host.counters());
    }
    let transport = world.transport();
    for host in &transport.hosts {
        assert_eq!((host.best_effort_connections, host.counters["surrendered_frames"]), (0, 0), "{host:?}");
    }

    world.bridge("delete table bridge loss", "");
    world.restart();
    let (a, b) = (world.lab.net("a"), world.lab.net("b"));
    eventually(20.0, "traffic flows again", || ping(a, "198.51.100.1", 1, 56) == 1 && ping(b, "10.1.0.1", 1, 56) == 1);
    exchange(a, b, "10.2.0.2", 5012, MEGABYTES);
    eventually(40.0, "over the transport", || {
        ping(a, "198.51.100.1", 1, 56);
        world.transport().hosts.iter().all(|host| host.open_connections > 0 && host.counters["delivered_frames"] > 0)
    });
}

/// Reaches the Internet, another VPC and a service from VPC 100, and nothing else.
fn reach_everything(world: &World) {
    let (a, b, s) = (world.lab.net("a"), world.lab.net("b"), world.lab.net("s"));
    // The hosts' kernels must first resolve the gateway's address.
    eventually(10.0, "the Internet is reachable", || ping(a, "198.51.100.1", 1, 56) == 1);
    // The switch and the gateway are one hop each; packets into a VPC only cross the gateway.
    assert_eq!(ping_with(a, "198.51.100.1", 5, 56, 64).len(), 5);
    exchange(a, &world.internet, "198.51.100.1", 5001, 2 * MEGABYTES);
    assert_eq!(ping(a, "198.51.100.1", 5, 4000), 5, "in fragments, translated in both directions");

    assert_eq!(ping(a, "10.2.0.2", 5, 56), 5);
    exchange(a, b, "10.2.0.2", 5002, 2 * MEGABYTES);
    exchange(b, a, "10.1.0.1", 5003, 2 * MEGABYTES);

    let listener = s.enter(|| TcpListener::bind("100.64.0.80:8080").unwrap());
    let mut client = a.enter(|| TcpStream::connect(SocketAddr::from(([10, 9, 0, 80], 80))).unwrap());
    let (mut server, from) = listener.accept().unwrap();
    assert_eq!(from.ip().to_string(), "100.64.1.1", "the backend sees an address of the pool");
    for stream in [&client, &server] {
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    }
    let mut heard = [0; 9];
    client.write_all(b"a request").unwrap();
    server.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"a request");
    server.write_all(b"an answer").unwrap();
    client.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"an answer");

    // Unsolicited packets from outside are dropped, and VPC 300 is only reachable through its service.
    assert_eq!(ping(&world.internet, "203.0.113.200", 2, 56), 0);
    assert_eq!(ping(a, "100.64.0.80", 2, 56), 0);
}

/// Maximum time from the restart of a killed pipeline until traffic flows again.
const REPLACED: Duration = Duration::from_secs(3);

#[test]
fn sessions_survive_the_restart_of_a_killed_pipeline() {
    let mut world = World::new(Underlay { transport: true, ..Underlay::default() });
    let reach = |world: &World| ping(world.lab.net("a"), "198.51.100.1", 1, 56) == 1;
    eventually(20.0, "both hosts have connections with the gateway", || {
        reach(&world);
        ping(world.lab.net("b"), "10.1.0.1", 1, 56);
        world.transport().hosts.iter().all(|host| host.open_connections > 0)
    });
    let sessions = world.pod().nat_sessions;
    let (a, b) = (world.lab.net("a"), world.lab.net("b"));
    // Large enough to be running when the pipeline is killed, on any machine.
    let streams = [
        Exchange::start(a, &world.internet, "198.51.100.1", 5021, 48 * MEGABYTES),
        Exchange::start(a, b, "10.2.0.2", 5022, 48 * MEGABYTES),
    ];
    eventually(20.0, "bytes flow", || world.count("forwarded_internet_packets") > 2000);
    world.kill_nicd();
    assert!(streams.iter().all(|stream| !stream.is_finished()), "killed under traffic");
    std::thread::sleep(Duration::from_millis(500));
    let started = Instant::now();
    world.start_nicd();
    eventually(20.0, "the Internet is reachable", || reach(&world));
    let took = started.elapsed();
    assert!(took < REPLACED, "{took:?}");
    eprintln!("traffic flows {took:?} after the pipeline's start");
    // No byte is lost or wrong. The Internet server would reset a stream whose session was forgotten.
    streams.into_iter().for_each(Exchange::finish);
    assert!(world.pod_lives(), "the pod is the same process");
    assert!(world.pod().nat_sessions > sessions);
    let (a, b) = (world.lab.net("a"), world.lab.net("b"));
    eventually(40.0, "over the transport again", || {
        ping(a, "198.51.100.1", 1, 56);
        ping(b, "10.1.0.1", 1, 56);
        world.transport().hosts.iter().all(|host| host.open_connections > 0 && host.counters["delivered_frames"] > 0)
    });
    reach_everything(&world);
}

#[test]
fn hosts_reach_the_gateway_in_ipv6() {
    for transport in [false, true] {
        let world = World::new(Underlay { transport, v6: true, ..Underlay::default() });
        reach_despite_loss(&world);
    }
}

#[test]
fn hosts_reach_a_gateway_in_a_vlan() {
    for transport in [false, true] {
        let world = World::new(Underlay { transport, vlan: Some(100), ..Underlay::default() });
        reach_despite_loss(&world);
    }
}

/// Everything is reachable; with the transport, only over that, which repairs losses.
fn reach_despite_loss(world: &World) {
    if !world.underlay.transport {
        reach_everything(world);
        return;
    }
    let (a, b) = (world.lab.net("a"), world.lab.net("b"));
    eventually(20.0, "both hosts have connections with the gateway", || {
        ping(a, "198.51.100.1", 1, 56);
        ping(b, "10.1.0.1", 1, 56);
        world.transport().hosts.iter().all(|host| host.open_connections > 0)
    });
    world.bridge("-f -", LOSS);
    reach_everything(world);
    eventually(5.0, "the gateway has retransmitted packets", || {
        let repaired = |host: &GatewayHost| host.retransmitted_packets > 0 && host.counters["rx_frames"] > 1000;
        world.transport().hosts.iter().all(repaired)
    });
    for host in &world.transport().hosts {
        assert_eq!((host.best_effort_connections, host.counters["surrendered_frames"]), (0, 0), "{host:?}");
    }
}

#[test]
fn a_hosts_small_packets_to_the_gateway_share_datagrams_and_all_arrive() {
    const COUNT: u32 = 400;
    let world = World::new(Underlay { transport: true, ..Underlay::default() });
    let a = world.lab.net("a");
    eventually(20.0, "the host has a connection with the gateway", || {
        ping(a, "198.51.100.1", 1, 56);
        world.transport().hosts[0].open_connections > 0
    });
    world.bridge("-f -", LOSS);
    let of_host = |name: &str| world.transport().hosts[0].counters[name];
    let before = world.lab.hosts[0].counter("datapath.bundled_packets");
    let receiver = world.internet.enter(|| UdpSocket::bind("198.51.100.1:5031").unwrap());
    receiver.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    let sender = a.enter(|| UdpSocket::bind("10.1.0.1:0").unwrap());
    let mut arrived = Vec::new();
    for burst in 0..COUNT / 40 {
        for number in burst * 40..(burst + 1) * 40 {
            // Different lengths, which segmentation offload cannot join.
            let mut bytes = vec![number as u8; 40 + number as usize % 60];
            bytes[..4].copy_from_slice(&number.to_be_bytes());
            sender.send_to(&bytes, "198.51.100.1:5031").unwrap();
        }
        let mut buffer = [0; 2000];
        while arrived.len() < (burst as usize + 1) * 40 {
            let Ok(length) = receiver.recv(&mut buffer) else { break };
            let number = u32::from_be_bytes(*buffer.first_chunk().unwrap());
            assert!(buffer[4..length].iter().all(|byte| *byte == number as u8), "{number}");
            arrived.push(number);
        }
    }
    assert_eq!(arrived, (0..COUNT).collect::<Vec<_>>());
    let bundled = world.lab.hosts[0].counter("datapath.bundled_packets") - before;
    assert!(bundled > u64::from(COUNT) / 4, "{bundled} of {COUNT} shared a datagram");
    assert_eq!(of_host("bad_packets") + of_host("malformed_frames"), 0);
}

#[test]
fn fragments_cross_a_tunnel_to_a_customers_office() {
    let worlds = [
        Underlay { office: true, ..Underlay::default() },
        Underlay { office: true, transport: true, v6: true, ..Underlay::default() },
    ];
    for underlay in worlds {
        let world = World::new(underlay);
        let (a, office) = (world.lab.net("a"), world.office.as_ref().unwrap());
        for (number, (guest, there)) in [("10.1.0.1", "10.50.0.1"), ("fd01::1", "fd50::1")].into_iter().enumerate() {
            eventually(10.0, "the office is reachable", || ping(a, there, 1, 56) == 1);
            let before = office.fragments();
            assert_eq!(ping(a, there, 5, 4000), 5, "in fragments, in both directions");
            assert_eq!(ping(&office.net, guest, 5, 4000), 5, "in fragments, in both directions");
            exchange(a, &office.net, there, 5041, 2 * MEGABYTES);
            datagrams(a, guest, &office.net, there, 6000);
            datagrams(&office.net, there, a, guest, 6000);
            let grown: Vec<u64> = office.fragments().iter().zip(before).map(|(now, before)| now - before).collect();
            // At least three fragments for each of ten pings, and four for each of ten large datagrams.
            let least = 10 * 3 + 10 * 4;
            let other = 1 - number;
            assert!(grown[number] >= least && grown[2 + number] >= least, "{there}: {grown:?}");
            assert_eq!((grown[other], grown[2 + other]), (0, 0), "{there}: {grown:?}");
        }
        assert!(world.count("forwarded_idc_packets") > 1000);
    }
}

/// Sends ten datagrams that must be fragmented; all arrive.
fn datagrams(from: &Net, own: &'static str, to: &Net, there: &'static str, bytes: usize) {
    let at = |address: &str, port| SocketAddr::new(address.parse().unwrap(), port);
    let receiver = to.enter(move || UdpSocket::bind(at(there, 5042)).unwrap());
    receiver.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let sender = from.enter(move || UdpSocket::bind(at(own, 0)).unwrap());
    for number in 0..10 {
        let sent = vec![number; bytes];
        sender.send_to(&sent, at(there, 5042)).unwrap();
        let mut buffer = vec![0; 65_536];
        let length = receiver.recv(&mut buffer).unwrap_or_else(|error| panic!("{own} to {there}: {error}"));
        assert!(buffer[..length] == sent, "{own} to {there}");
    }
}
