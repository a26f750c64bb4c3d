//! NAT between real kernels: guests connect through an uplink to the outside, and the outside connects to guests.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use bifrost_control::api::{NatKind, TraceSpec};

use crate::balancing::{Conversation, Service};
use crate::common::host::vpc;
use crate::common::traffic::ping;
use crate::common::{Guest, Lab, Net, Options, eventually};

const REMOTE: &str = "198.51.100.7";
const REMOTE6: &str = "2001:db8:7::7";
const SHARED: &str = "203.0.113.10";
const SHARED6: &str = "2001:db8::10";
const FLOATING: &str = "203.0.113.20";
const FLOATING6: &str = "2001:db8::20";

const FORWARD: &str = "[[port_forward]]\nvni = 100\nuplink = \"wan\"\naddress = \"203.0.113.10\"\nport = 8080\n\
                       inside = \"10.0.0.1\"\ninside_port = 80\n";

/// Guests `a` and `c` of one host share external addresses; `c` also has floating ones. The namespace `wan` is behind
/// the uplink: its kernel has an address in the external subnet, and others elsewhere.
fn lab(workers: usize) -> Lab {
    let gateway = "gateway = [\"10.0.0.254\", \"fd00::fe\"]\n";
    let vpcs = format!("{}{gateway}{}", vpc(100, "tcp", "flow"), vpc(900, "off", "off"));
    let mut lab = Lab::new(Options { workers, vpcs, ..Options::default() });
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24", "fd00::1/64"]).gateway("10.0.0.254"));
    lab.add(0, Guest::new("c", 3, &["10.0.0.3/24", "fd00::3/64"]).gateway("10.0.0.254"));
    lab.add(0, Guest::new("wan", 9, &["203.0.113.1/24", "2001:db8::1/64"]).vni(900));
    let nat = format!(
        "[[uplink]]\nport = \"wan\"\n\
         [[nat]]\nvni = 100\nuplink = \"wan\"\naddresses = [\"{SHARED}\", \"{SHARED6}\"]\nports = [20000, 29999]\n\
         [[floating_ip]]\nvni = 100\nuplink = \"wan\"\naddress = \"{FLOATING}\"\ninside = \"10.0.0.3\"\n\
         [[floating_ip]]\nvni = 100\nuplink = \"wan\"\naddress = \"{FLOATING6}\"\ninside = \"fd00::3\"\n{FORWARD}"
    );
    lab.hosts[0].config.push_str(&nat);
    lab.start();
    for guest in ["a", "c"] {
        lab.net(guest).ip("route add default via fd00::fe dev eth0\n");
    }
    let elsewhere = format!("addr add {REMOTE}/32 dev lo\naddr add {REMOTE6}/128 dev lo\n");
    lab.net("wan").ip(&elsewhere);
    lab
}

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn connect(from: &Net, to: &str, port: u16) -> Conversation {
    Conversation::start(from, to, port).unwrap_or_else(|| panic!("a connection to {to} port {port}"))
}

/// One lab for all checks, because building one takes a second.
fn guests_use_nat(workers: usize) {
    let mut lab = lab(workers);
    let _remote = Service::start(lab.net("wan"), REMOTE, 80, "remote", "200 OK");
    let _remote6 = Service::start(lab.net("wan"), REMOTE6, 80, "remote6", "200 OK");
    let _a = Service::start(lab.net("a"), "10.0.0.1", 80, "a", "200 OK");
    let _c = Service::start(lab.net("c"), "10.0.0.3", 22, "c", "200 OK");
    let _c6 = Service::start(lab.net("c"), "fd00::3", 22, "c6", "200 OK");

    // Outbound, from shared and floating addresses.
    let outs = [
        ("a", REMOTE, "remote", SHARED),
        ("a", REMOTE6, "remote6", SHARED6),
        ("c", REMOTE, "remote", FLOATING),
        ("c", REMOTE6, "remote6", FLOATING6),
    ];
    let mut open: Vec<Conversation> = Vec::new();
    for (guest, to, name, seen) in outs {
        let mut conversation = connect(lab.net(guest), to, 80);
        assert_eq!((conversation.backend.as_str(), conversation.client), (name, address(seen)));
        conversation.exchange().unwrap();
        assert_eq!(ping(lab.net(guest), to, 2, 100), 2, "{guest} pings {to}");
        open.push(conversation);
    }
    // Inbound, to a floating address and through a forwarded port.
    for (to, port, name) in [(FLOATING, 22, "c"), (FLOATING6, 22, "c6"), (SHARED, 8080, "a")] {
        let mut conversation = connect(lab.net("wan"), to, port);
        assert_eq!(conversation.backend, name);
        assert!(conversation.client == address("203.0.113.1") || conversation.client == address("2001:db8::1"));
        conversation.exchange().unwrap();
    }
    assert_eq!([ping(lab.net("wan"), FLOATING, 2, 100), ping(lab.net("wan"), FLOATING6, 2, 100)], [2, 2]);
    // Between guests, over external addresses.
    let mut meet = connect(lab.net("a"), FLOATING, 22);
    assert_eq!((meet.backend.as_str(), meet.client), ("c", address(SHARED)));
    meet.exchange().unwrap();
    let mut meet = connect(lab.net("c"), SHARED, 8080);
    assert_eq!((meet.backend.as_str(), meet.client), ("a", address(FLOATING)));
    meet.exchange().unwrap();
    errors_reach_the_sender(&lab);

    let host = &lab.hosts[0];
    let nat = host.client.nat().unwrap();
    let kinds: Vec<NatKind> = nat.iter().map(|n| n.kind).collect();
    use NatKind::{Floating, Forward, Shared};
    assert_eq!(kinds, [Shared, Shared, Floating, Floating, Forward]);
    assert!(nat[0].tcp_ports >= 2 && nat[0].udp_ports >= 1 && nat[0].echo_identifiers >= 1, "{nat:#?}");
    assert!(nat.iter().all(|n| n.here));
    let trace = TraceSpec {
        port: Some("a".to_owned()),
        to: Some(address(REMOTE)),
        tcp: Some((40_000, 80)),
        ..TraceSpec::default()
    };
    let trace = host.client.trace(&trace).unwrap();
    let step = trace.steps.iter().find(|step| step.stage == "nat").unwrap_or_else(|| panic!("{trace:#?}"));
    assert!(step.what.contains(SHARED), "{trace:#?}");

    // A port without a mapping.
    let socket = lab.net("wan").enter(|| UdpSocket::bind("0.0.0.0:0").unwrap());
    socket.send_to(b"?", (SHARED, 29_999)).unwrap();
    eventually(5.0, "the drop is counted", || host.drops("wan", "nat_no_mapping") > 0);

    // A forward is removed; other connections stay.
    let mut through = connect(lab.net("wan"), SHARED, 8080);
    let host = &mut lab.hosts[0];
    host.config = host.config.replace(FORWARD, "");
    host.write_config();
    assert_eq!(host.client.reload().unwrap().port_forwards.removed, ["tcp 203.0.113.10:8080"]);
    open.iter_mut().for_each(|conversation| conversation.exchange().unwrap());
    through.stream.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    assert!(through.exchange().is_err(), "a connection through a removed forward continues");
}

/// ICMP errors from kernels: each end must find its own addresses in the quoted packet, or it would ignore the error.
fn errors_reach_the_sender(lab: &Lab) {
    let refused = |socket: &UdpSocket| {
        let _ = socket.send(b"?");
        socket.recv(&mut [0; 100]).is_err_and(|e| e.kind() == ErrorKind::ConnectionRefused)
    };
    let cases = [
        ("a", "10.0.0.1", REMOTE, 9),
        ("a", "fd00::1", REMOTE6, 9),
        ("c", "10.0.0.3", REMOTE, 9),
        ("wan", "203.0.113.1", FLOATING, 9),
        ("wan", "2001:db8::1", FLOATING6, 9),
    ];
    for (from, own, to, port) in cases {
        let (own, to) = (SocketAddr::new(address(own), 0), SocketAddr::new(address(to), port));
        let socket = lab.net(from).enter(move || UdpSocket::bind(own).unwrap());
        socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        socket.connect(to).unwrap();
        eventually(5.0, &format!("{from} gets an error: no listener at {to}"), || refused(&socket));
    }
}

#[test]
fn guests_use_nat_with_one_worker() {
    guests_use_nat(1);
}

#[test]
fn guests_use_nat_with_several_workers() {
    guests_use_nat(2);
}
