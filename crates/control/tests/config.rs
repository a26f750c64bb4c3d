//! Good and bad configuration files.

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use bifrost_control::Config;
use bifrost_control::config::{
    Auto, CongestionControl, Dscp, Mac, Ordering, PeerTransport, PlainPaths, PortKind, PortLimits, Qos, Reliability,
    Transport, Vni, overhead_bytes,
};

/// Line numbers in the tables below refer to this text.
const GOOD: &str = r#"[host]
name = "host-a"
[control]
socket = "/run/bifrost/a.sock"
[workers]
count = 2
cpus = [0, 1]
[underlay]
addresses = ["192.0.2.1", "198.51.100.1"]
bifrost_port = 4794
vxlan_port = 4789
paths = 4
source_port_base = 49152
mtu = 1600
gso = false
[transport]
group_packets = 10
bundle_bytes = 1000
spray_paths = 2
stickiness_us = 30
initial_rto_us = 5000
rto_floor_us = 300
ack_delay_us = "auto"
ack_threshold = 16
give_up_ms = 40
initial_window = 256
max_window = 1024
setup_tries = 3
plain_retry_s = 10
idle_reap_s = 20
probe_interval_ms = 50
congestion_control = "none"
[[peer]]
name = "host-b"
addresses = ["192.0.2.2"]
[[peer]]
name = "kernel"
addresses = ["192.0.2.3"]
transport = "plain"
[[vpc]]
vni = 100
gateway = ["10.0.0.254"]
[[vpc]]
vni = 200
reliability = "all"
ordering = "strict"
[[port]]
name = "web1"
vni = 100
kind = "tap"
mac = "02:00:00:00:00:01"
addresses = ["10.0.0.1/24", "fd00::1/64"]
mtu = 1500
netns = "web1"
device = "eth0"
default_gateway = "10.0.0.254"
queues = 1
[[port]]
name = "web2"
vni = 200
mac = "02:00:00:00:00:01"
addresses = ["10.0.0.1/24"]
[[route]]
vni = 100
prefix = "10.0.0.2/32"
peer = "host-b"
mac = "02:00:00:00:00:02"
[[route]]
vni = 100
prefix = "10.0.1.0/24"
peer = "kernel"
mac = "02:00:00:00:00:03"
"#;

#[test]
fn metrics_are_off_or_have_an_address() {
    let of = |value: &str| {
        let text = GOOD.replacen("[control]\n", &format!("[control]\nmetrics = {value}\n"), 1);
        assert_ne!(text, GOOD);
        Config::parse(&text, "t").map(|config| config.control.metrics).map_err(|errors| errors.to_string())
    };
    assert_eq!(of("\"off\""), Ok(None));
    assert_eq!(of("\"127.0.0.1:9795\""), Ok(Some("127.0.0.1:9795".parse().unwrap())));
    assert_eq!(of("\"[::1]:9795\""), Ok(Some("[::1]:9795".parse().unwrap())));
    assert_eq!(Config::parse(GOOD, "t").unwrap().control.metrics, None);
    for wrong in ["\"on\"", "\"127.0.0.1\"", "\"localhost:9795\"", "\"127.0.0.1:0\"", "9795"] {
        let error = of(wrong).unwrap_err();
        assert!(error.contains("control.metrics") && error.lines().count() == 1, "{wrong}: {error}");
    }
}

#[test]
fn plain_paths_and_their_gap() {
    let of = |keys: &str| {
        let config = Config::parse(&GOOD.replacen("gso = false", keys, 1), "t").map_err(|errors| errors.to_string())?;
        Ok::<_, String>((config.underlay.plain_paths, config.underlay.flowlet_gap.as_micros()))
    };
    assert_eq!(of(""), Ok((PlainPaths::Flow, 500)));
    assert_eq!(of("plain_paths = \"flow\"\nflowlet_gap_us = 1"), Ok((PlainPaths::Flow, 1)));
    assert_eq!(of("plain_paths = \"flowlet\"\nflowlet_gap_us = 1000000"), Ok((PlainPaths::Flowlet, 1_000_000)));
    for (wrong, message) in [
        ("plain_paths = \"flowlets\"", "15: underlay.plain_paths: \"flowlets\" is not one of \"flow\", \"flowlet\""),
        ("flowlet_gap_us = 0", "15: underlay.flowlet_gap_us: 0 is not in 1..=1000000"),
        ("flowlet_gap_us = 1000001", "15: underlay.flowlet_gap_us: 1000001 is not in 1..=1000000"),
        ("flowlet_gap_us = \"auto\"", "15: underlay.flowlet_gap_us: expected an integer, found a string"),
    ] {
        let error = of(wrong).unwrap_err();
        assert!(error.contains(message) && error.lines().count() == 1, "{wrong}: {error}");
    }
}

#[test]
fn path_mtu_is_that_of_the_route_or_of_the_underlay() {
    let text = GOOD.replacen("prefix = \"10.0.0.2/32\"", "prefix = \"10.0.0.2/32\"\nmtu = 1400", 1);
    let config = Config::parse(&text, "t").unwrap();
    let mtus = |config: &Config| config.routes.iter().map(config.path_mtu()).collect::<Vec<_>>();
    assert_eq!(mtus(&config), [1400, 1534]);
    let jumbo = Config::parse(&GOOD.replacen("mtu = 1600", "mtu = 9000", 1), "t").unwrap();
    assert_eq!(mtus(&jumbo), [8934, 8934]);
    assert_eq!(jumbo.underlay.guest_mtu(&["fd00::1".parse().unwrap()]), 8914);
}

#[test]
fn classes_arrive() {
    let text = GOOD.replacen("queues = 1", "dscp = 46", 1).replacen("mtu = 1600", "mtu = 1600\ncontrol_dscp = 48", 1);
    let marked = Config::parse(&text, "marked.toml").unwrap();
    assert_eq!((marked.ports[0].dscp, marked.underlay.control_dscp), (Dscp::Fixed(46), 48));
    assert_eq!(marked.ports[1].dscp, Dscp::Fixed(0));
    // A running port applies the change.
    let copied = Config::parse(&text.replacen("dscp = 46", "dscp = \"copy\"", 1), "copied.toml").unwrap();
    assert_eq!(copied.ports[0].dscp, Dscp::Copied);

    let text = GOOD.replacen("queues = 1", "weight = 100", 1).replacen("reliability", "weight = 7\nreliability", 1);
    let weighted = Config::parse(&text, "weighted.toml").unwrap();
    assert_eq!(weighted.ports.iter().map(|p| p.weight).collect::<Vec<_>>()[..2], [100, 1]);
    assert_eq!(weighted.vpcs.iter().map(|v| v.weight).collect::<Vec<_>>()[..2], [1, 7]);
    assert!(marked.ports[0].is_same_device(&copied.ports[0]));
}

#[test]
fn guarantees_and_queues_arrive() {
    let none = Config::parse(GOOD, "none.toml").unwrap();
    assert_eq!(none.qos, Qos { link_mbit: None, queue: Duration::from_millis(50) });
    assert_eq!((none.ports[0].min_tx_mbit, none.ports[0].rx_queue_kb), (None, None));
    let qos = GOOD.replacen("[underlay]", "[qos]\nlink_mbit = 1000\nqueue_ms = 10\n[underlay]", 1);
    let text = qos.replacen("queues = 1", "min_tx_mbit = 1000\nrx_kpps = 1\nrx_queue_kb = 64", 1);
    let config = Config::parse(&text, "qos.toml").unwrap();
    assert_eq!(config.qos, Qos { link_mbit: Some(1000), queue: Duration::from_millis(10) });
    assert_eq!((config.ports[0].min_tx_mbit, config.ports[0].rx_queue_kb), (Some(1000), Some(64)));
    // A running port applies the change.
    let other = Config::parse(&text.replacen("min_tx_mbit = 1000", "min_tx_mbit = 1", 1), "other.toml").unwrap();
    assert!(config.ports[0].is_same_device(&other.ports[0]));
    // All guarantees together.
    let text = text.replacen("name = \"web2\"", "name = \"web2\"\nmin_tx_mbit = 1", 1);
    let error = Config::parse(&text, "t").unwrap_err().to_string();
    let wanted = "port[1].min_tx_mbit: the guarantees of all ports up to this one are 1001 Mbit/s, more than \
                  qos.link_mbit (1000)";
    assert!(error.contains(wanted), "{error}");
}

#[test]
fn limits_arrive_and_their_absence_does() {
    let text = GOOD.replacen("queues = 1", "tx_mbit = 1\ntx_kpps = 2\nrx_mbit = 400000\nrx_kpps = 1000000", 1);
    let limited = Config::parse(&text, "limited.toml").unwrap();
    let limits = PortLimits { tx_mbit: Some(1), tx_kpps: Some(2), rx_mbit: Some(400_000), rx_kpps: Some(1_000_000) };
    assert_eq!(limited.ports[0].limits, limits);
    assert_eq!(limited.ports[1].limits, PortLimits::default());
    // A running port applies changes of limits, but not of other settings.
    let others = Config::parse(&text.replacen("tx_mbit = 1", "", 1), "others.toml").unwrap();
    assert!(limited.ports[0].is_same_device(&others.ports[0]));
    let elsewhere =
        Config::parse(&text.replacen("tx_mbit = 1", "mtu = 1400", 1).replacen("mtu = 1500\n", "", 1), "e.toml");
    assert!(!limited.ports[0].is_same_device(&elsewhere.unwrap().ports[0]));
}

#[test]
fn slicing_is_on_by_default() {
    let text = GOOD.replacen("count = 2\ncpus = [0, 1]", "count = 1", 1);
    let machine = |key: &str| {
        let keys = format!("name = \"web2\"\nkind = \"vhost-user\"\nsocket = \"/run/vm.sock\"\n{key}");
        Config::parse(&text.replacen("name = \"web2\"", &keys, 1), "t").unwrap().ports.remove(1)
    };
    let [unsaid, on, off] = ["", "slicing = true", "slicing = false"].map(machine);
    assert_eq!((unsaid.slicing, on.slicing, off.slicing), (true, true, false));
    // The device is recreated when that changes.
    assert!(unsaid.is_same_device(&on) && !on.is_same_device(&off));
}

#[test]
fn every_key_arrives() {
    let c = Config::parse(GOOD, "good.toml").unwrap();
    assert_eq!(c.host.name, "host-a");
    assert_eq!(c.control.socket.to_str(), Some("/run/bifrost/a.sock"));
    assert_eq!((c.workers.count, c.workers.cpus.as_slice()), (2, &[0, 1][..]));
    let u = &c.underlay;
    assert_eq!(u.addresses.len(), 2);
    assert_eq!(
        (u.bifrost_port, u.vxlan_port, u.paths, u.source_port_base, u.mtu, u.gso),
        (4794, 4789, 4, 49152, 1600, false)
    );
    let us = Duration::from_micros;
    let expected = Transport {
        group_packets: 10,
        bundle_bytes: 1000,
        spray_paths: 2,
        stickiness: us(30),
        initial_rto: us(5000),
        rto_floor: Auto::Fixed(us(300)),
        ack_delay: Auto::Auto,
        give_up: Auto::Fixed(Duration::from_millis(40)),
        ack_threshold: 16,
        initial_window: 256,
        max_window: 1024,
        setup_tries: 3,
        plain_retry: Duration::from_secs(10),
        idle_reap: Duration::from_secs(20),
        probe_interval: Duration::from_millis(50),
        congestion_control: CongestionControl::None,
        version_max: 4,
    };
    assert_eq!(c.transport, expected);
    assert_eq!(c.peers.iter().map(|p| p.transport).collect::<Vec<_>>(), [PeerTransport::Auto, PeerTransport::Plain]);
    assert_eq!((c.vpcs[0].reliability, c.vpcs[0].ordering), (Reliability::Tcp, Ordering::Flow));
    assert_eq!((c.vpcs[1].reliability, c.vpcs[1].ordering), (Reliability::All, Ordering::Strict));
    assert_eq!((c.vpcs[0].dhcp, c.vpcs[0].dhcp_lease_s, c.vpcs[0].dns.len()), (false, 3600, 0));
    assert_eq!(c.vpcs[0].ra_interval_s, 600);
    assert_eq!(c.vpcs[0].gateway, ["10.0.0.254".parse::<std::net::IpAddr>().unwrap()]);
    let web1 = c.port("web1").unwrap();
    assert_eq!(
        (web1.vni, web1.kind, web1.mac, web1.mtu),
        (Vni::new(100).unwrap(), PortKind::Tap, Mac([2, 0, 0, 0, 0, 1]), 1500)
    );
    assert_eq!(web1.addresses[0].to_string(), "10.0.0.1/24");
    assert_eq!((web1.netns.as_ref().unwrap().to_str(), web1.device.as_str()), (Some("/run/netns/web1"), "eth0"));
    assert_eq!((web1.default_gateway.unwrap().to_string().as_str(), web1.queues), ("10.0.0.254", 1));
    let web2 = c.port("web2").unwrap();
    assert!(c.is_served_by_one(web1) && !c.is_served_by_one(web2), "of two workers");
    assert_eq!((web2.netns.clone(), web2.device.as_str(), web2.queues, web2.mtu), (None, "web2", 2, 1500));
    let to_kernel = c.routes.iter().find(|route| route.peer == "kernel").unwrap();
    assert_eq!(to_kernel.prefix.to_string(), "10.0.1.0/24");
}

#[test]
fn a_minimal_file_has_the_defaults() {
    let c = Config::parse("host.name = 'a'\nunderlay.addresses = ['192.0.2.1']", "t").unwrap();
    assert_eq!(c.control.socket.to_str(), Some("/run/bifrost/bifrostd.sock"));
    assert_eq!((c.workers.count, c.workers.cpus.len(), c.workers.slow_port_percent), (1, 0, 10));
    assert_eq!(c.workers.answer_us, 20);
    let u = &c.underlay;
    assert_eq!(
        (u.bifrost_port, u.vxlan_port, u.paths, u.source_port_base, u.mtu, u.gso),
        (4794, 4789, 4, 49152, 1600, true)
    );
    assert_eq!(c.transport, Transport::default());
    assert!(c.peers.is_empty() && c.vpcs.is_empty() && c.ports.is_empty() && c.routes.is_empty());
    // Fewer paths than the default of spray_paths are not an error if the file does not set it.
    let c = Config::parse("host.name = 'a'\nunderlay = {addresses = ['192.0.2.1'], paths = 1}", "t").unwrap();
    assert_eq!(c.transport.spray_paths, 1);
}

#[test]
fn paths_pair_addresses_round_robin() {
    let c = Config::parse(GOOD, "t").unwrap();
    let paths: Vec<_> =
        c.paths(&c.peers[0]).map(|p| format!("{} {}>{}:{}", p.path, p.local, p.remote, p.source_port)).collect();
    let expected = [
        "0 192.0.2.1>192.0.2.2:49152",
        "1 198.51.100.1>192.0.2.2:49153",
        "2 192.0.2.1>192.0.2.2:49154",
        "3 198.51.100.1>192.0.2.2:49155",
    ];
    assert_eq!(paths, expected);
}

#[test]
fn overhead() {
    assert_eq!(overhead_bytes(&"192.0.2.1".parse().unwrap()), 66);
    assert_eq!(overhead_bytes(&"2001:db8::1".parse().unwrap()), 86);
}

/// Replaces a line of [`GOOD`] (empty: appends) and expects exactly these errors.
#[test]
fn bad_configurations() {
    let cases: &[(&str, &str, &[&str])] = &[
        // Types and presence.
        ("name = \"host-a\"", "name = 3", &["2: host.name: expected a string, found an integer"]),
        ("name = \"host-a\"", "", &["1: host.name: missing"]),
        ("count = 2", "count = \"2\"", &["6: workers.count: expected an integer, found a string"]),
        ("gso = false", "gso = 1", &["15: underlay.gso: expected true or false, found an integer"]),
        ("cpus = [0, 1]", "cpus = 0", &["7: workers.cpus: expected a list, found an integer"]),
        ("cpus = [0, 1]", "cpus = [0, -1]", &["7: workers.cpus[1]: -1 is not in 0..=1023"]),
        ("paths = 4", "paths = 2.5", &["12: underlay.paths: expected an integer, found a fractional number"]),
        ("peer = \"kernel\"", "", &["68: route[1].peer: missing"]),
        ("mac = \"02:00:00:00:00:03\"", "", &["68: route[1].mac: missing"]),
        ("prefix = \"10.0.1.0/24\"", "", &["68: route[1].prefix: missing"]),
        (
            "addresses = [\"192.0.2.3\"]",
            "",
            &["36: peer[1].addresses: missing: name at least one underlay address of the peer"],
        ),
        (
            "addresses = [\"10.0.0.1/24\", \"fd00::1/64\"]",
            "addresses = []",
            &["52: port[0].addresses: missing: name at least one address of the guest"],
        ),
        ("", "vpcs = 3", &["73: route[1].vpcs: unknown key; known keys: vni, prefix, peer, mac"]),
        // Unknown keys.
        ("mtu = 1600", "mtuu = 1600", &["14: underlay.mtuu: unknown key; did you mean \"mtu\"?"]),
        ("[control]", "[contrl]", &["3: contrl: unknown key; did you mean \"control\"?"]),
        (
            "gso = false",
            "colour = 1",
            &[
                "15: underlay.colour: unknown key; known keys: addresses, bifrost_port, vxlan_port, paths, source_port_base, mtu, gso",
            ],
        ),
        (
            "reliability = \"all\"",
            "relaibility = \"all\"",
            &["45: vpc[1].relaibility: unknown key; did you mean \"reliability\"?"],
        ),
        ("", "[[rout]]", &["73: rout: unknown key; did you mean \"route\"?"]),
        // Words.
        (
            "reliability = \"all\"",
            "reliability = \"udp\"",
            &["45: vpc[1].reliability: \"udp\" is not one of \"tcp\", \"all\", \"off\""],
        ),
        (
            "ordering = \"strict\"",
            "ordering = \"none\"",
            &["46: vpc[1].ordering: \"none\" is not one of \"flow\", \"strict\", \"off\""],
        ),
        (
            "transport = \"plain\"",
            "transport = \"vxlan\"",
            &["39: peer[1].transport: \"vxlan\" is not one of \"auto\", \"plain\""],
        ),
        ("kind = \"tap\"", "kind = \"vhost\"", &["50: port[0].kind: \"vhost\" is not one of \"tap\""]),
        (
            "congestion_control = \"none\"",
            "congestion_control = \"bbr\"",
            &["32: transport.congestion_control: \"bbr\" is not one of \"swift\", \"none\""],
        ),
        (
            "ack_delay_us = \"auto\"",
            "ack_delay_us = \"fast\"",
            &["23: transport.ack_delay_us: expected \"auto\" or an integer in 0..=65535"],
        ),
        // Ranges.
        (
            "name = \"host-a\"",
            "name = \"Host A\"",
            &["2: host.name: \"Host A\" is not 1 to 63 of a-z, 0-9, '-' and '.'"],
        ),
        ("count = 2", "count = 2\nslow_port_percent = 101", &["7: workers.slow_port_percent: 101 is not in 0..=100"]),
        ("count = 2", "count = 2\nanswer_us = 4", &["7: workers.answer_us: 4 is not in 5..=10000"]),
        ("count = 2", "count = 33", &["6: workers.count: 33 is not in 1..=32"]),
        ("cpus = [0, 1]", "cpus = [0]", &["7: workers.cpus: 1 CPUs for 2 workers; name one for each, or none"]),
        ("cpus = [0, 1]", "cpus = [1, 1]", &["7: workers.cpus[1]: CPU 1 is already workers.cpus[0] (line 7)"]),
        ("paths = 4", "paths = 9", &["12: underlay.paths: 9 is not in 1..=8"]),
        ("paths = 4", "paths = 0x10", &["12: underlay.paths: 10 is not in 1..=8"]),
        ("bifrost_port = 4794", "bifrost_port = 70000", &["10: underlay.bifrost_port: 70000 is not in 1..=65535"]),
        (
            "bifrost_port = 4794",
            "bifrost_port = 4789",
            &["11: underlay.vxlan_port: equals bifrost_port (4789); they must differ"],
        ),
        (
            "bifrost_port = 4794",
            "bifrost_port = 49153",
            &["10: underlay.bifrost_port: 49153 is among the source ports 49152..=49155"],
        ),
        (
            "source_port_base = 49152",
            "source_port_base = 65533",
            &["13: underlay.source_port_base: with 4 paths the last source port would be 65536, beyond 65535"],
        ),
        ("group_packets = 10", "group_packets = 0", &["17: transport.group_packets: 0 is not in 1..=4096"]),
        ("ack_threshold = 16", "ack_threshold = 257", &["24: transport.ack_threshold: 257 is not in 1..=256"]),
        (
            "setup_tries = 3",
            "setup_tries = 99999999999999999999999",
            &["28: transport.setup_tries: 99999999999999999999999 is not in 1..=20"],
        ),
        ("congestion_control = \"none\"", "version_max = 5", &["32: transport.version_max: 5 is not in 1..=4"]),
        ("spray_paths = 2", "spray_paths = 8", &["19: transport.spray_paths: 8 is more than underlay.paths (4)"]),
        (
            "max_window = 1024",
            "max_window = 128",
            &["27: transport.max_window: initial_window (256) is more than max_window (128)"],
        ),
        (
            "rto_floor_us = 300",
            "rto_floor_us = 6000",
            &["22: transport.rto_floor_us: 6000 is more than initial_rto_us (5000)"],
        ),
        ("give_up_ms = 40", "give_up_ms = 0", &["25: transport.give_up_ms: 0 is not in 1..=1000"]),
        (
            "initial_rto_us = 5000\nrto_floor_us = 300",
            "initial_rto_us = 100\nrto_floor_us = 60",
            &["25: transport.give_up_ms: 40 is more than 255 times initial_rto_us (25 ms)"],
        ),
        ("vni = 200\nreliability", "vni = 16777216\nreliability", &["44: vpc[1].vni: 16777216 is not in 1..=16777215"]),
        ("vni = 200\nreliability", "vni = 0\nreliability", &["44: vpc[1].vni: 0 is not in 1..=16777215"]),
        // Addresses.
        (
            "addresses = [\"192.0.2.2\"]",
            "addresses = [\"192.0.2.300\"]",
            &["35: peer[0].addresses[0]: \"192.0.2.300\" is not an IP address"],
        ),
        (
            "addresses = [\"192.0.2.2\"]",
            "addresses = [\"224.0.0.1\"]",
            &["35: peer[0].addresses[0]: 224.0.0.1 is not a unicast address"],
        ),
        (
            "addresses = [\"192.0.2.2\"]",
            "addresses = [\"198.51.100.1\"]",
            &["35: peer[0].addresses[0]: 198.51.100.1 is this host's own underlay address"],
        ),
        (
            "addresses = [\"192.0.2.3\"]",
            "addresses = [\"192.0.2.2\"]",
            &["38: peer[1].addresses[0]: 192.0.2.2 is already peer[0].addresses[0] (line 35)"],
        ),
        (
            "addresses = [\"192.0.2.2\"]",
            "addresses = [\"192.0.2.2\", \"2001:db8::2\"]",
            &[
                "35: peer[0].addresses: path 1 would run from 198.51.100.1 to 2001:db8::2; both ends must be of one family: list the families in the same order",
            ],
        ),
        (
            "addresses = [\"10.0.0.1/24\"]",
            "addresses = [\"10.0.0.1\"]",
            &[
                "62: port[1].addresses[0]: \"10.0.0.1\" lacks a prefix length; for a single address write \"10.0.0.1/32\"",
            ],
        ),
        (
            "addresses = [\"10.0.0.1/24\"]",
            "addresses = [\"10.0.0.1/33\"]",
            &["62: port[1].addresses[0]: \"10.0.0.1/33\" is not an address with a prefix length, such as 10.0.0.1/24"],
        ),
        (
            "mac = \"02:00:00:00:00:02\"",
            "mac = \"03:00:00:00:00:02\"",
            &["67: route[0].mac: 03:00:00:00:00:02 is not a unicast MAC address"],
        ),
        (
            "gateway = [\"10.0.0.254\"]",
            "gateway = [\"10.0.0.254\", \"10.0.0.254\"]",
            &["42: vpc[0].gateway[1]: 10.0.0.254 is already vpc[0].gateway[0] (line 42)"],
        ),
        (
            "gateway = [\"10.0.0.254\"]",
            "gateway = []\ndhcp = true\ndns = [\"9.9.9.9\"]",
            &["43: vpc[0].dhcp: VNI 100 has no gateway, which is the DHCP server; add one"],
        ),
        (
            "gateway = [\"10.0.0.254\"]",
            "gateway = [\"10.0.0.254\"]\ndns = [\"9.9.9.9\"]",
            &["43: vpc[0].dns: DNS servers are announced only with DHCP; add `dhcp = true`"],
        ),
        (
            "gateway = [\"10.0.0.254\"]",
            "gateway = [\"10.0.0.254\"]\ndhcp = true\ndhcp_lease_s = 59\ndns = [\"fd00::35\", \"9.9.9.9\", \"9.9.9.9\"]",
            &[
                "44: vpc[0].dhcp_lease_s: 59 is not in 60..=31536000",
                "45: vpc[0].dns[0]: VNI 100 has no IPv6 gateway, which announces fd00::35; add one",
                "45: vpc[0].dns[2]: 9.9.9.9 is already vpc[0].dns[1] (line 45)",
            ],
        ),
        (
            "gateway = [\"10.0.0.254\"]",
            "gateway = [\"fd00::fe\"]\ndhcp = true\nra_interval_s = 3\ndns = [\"fd00::35\", \"9.9.9.9\", \"ff02::1\"]",
            &[
                "44: vpc[0].ra_interval_s: 3 is not in 4..=1800",
                "45: vpc[0].dns[1]: VNI 100 has no IPv4 gateway, which announces 9.9.9.9; add one",
                "45: vpc[0].dns[2]: ff02::1 is not a unicast address",
            ],
        ),
        (
            "socket = \"/run/bifrost/a.sock\"",
            "socket = \"a.sock\"",
            &["4: control.socket: \"a.sock\" is not an absolute path"],
        ),
        // Names and duplicates.
        (
            "name = \"kernel\"",
            "name = \"host-b\"",
            &["37: peer[1].name: peer \"host-b\" is already peer[0].name (line 34)"],
        ),
        ("name = \"kernel\"", "name = \"host-a\"", &["37: peer[1].name: \"host-a\" is this host's own name"]),
        (
            "peer = \"host-b\"",
            "peer = \"host-x\"",
            &["66: route[0].peer: no peer named \"host-x\"; did you mean \"host-b\"?"],
        ),
        (
            "peer = \"host-b\"",
            "peer = \"elsewhere\"",
            &["66: route[0].peer: no peer named \"elsewhere\"; known peers: host-b, kernel"],
        ),
        ("vni = 200\nmac", "vni = 300\nmac", &["60: port[1].vni: no [[vpc]] has VNI 300; known VNIs: 100, 200"]),
        (
            "vni = 100\nprefix = \"10.0.1.0/24\"",
            "vni = 300\nprefix = \"10.0.1.0/24\"",
            &["69: route[1].vni: no [[vpc]] has VNI 300; known VNIs: 100, 200"],
        ),
        (
            "vni = 200\nreliability",
            "vni = 100\nreliability",
            &["44: vpc[1].vni: VNI 100 is already vpc[0].vni (line 41)"],
        ),
        ("name = \"web2\"", "name = \"web1\"", &["59: port[1].name: port \"web1\" is already port[0].name (line 48)"]),
        (
            "name = \"web2\"",
            "name = \"web/2\"",
            &["59: port[1].name: \"web/2\" is not 1 to 63 of a-z, A-Z, 0-9, '-', '_' and '.'"],
        ),
        (
            "name = \"web2\"",
            "name = \"a-very-long-name\"",
            &["58: port[1].device: \"a-very-long-name\" has 16 bytes; an interface's name has at most 15"],
        ),
        ("device = \"eth0\"", "device = \"eth0:1\"", &["55: port[0].device: \"eth0:1\" is not an interface name"]),
        (
            "netns = \"web1\"",
            "netns = \"a/b\"",
            &["54: port[0].netns: \"a/b\" is neither a name under /run/netns nor an absolute path"],
        ),
        (
            "vni = 200\nmac",
            "vni = 100\nmac",
            &[
                "61: port[1].mac: 02:00:00:00:00:01 in VNI 100 is already port[0].mac (line 51)",
                "62: port[1].addresses[0]: 10.0.0.1 in VNI 100 is already port[0].addresses[0] (line 52)",
            ],
        ),
        (
            "gateway = [\"10.0.0.254\"]",
            "gateway = [\"10.0.0.1\"]",
            &["52: port[0].addresses[0]: 10.0.0.1 in VNI 100 is already vpc[0].gateway[0] (line 42)"],
        ),
        (
            "name = \"web2\"",
            "name = \"web2\"\nnetns = \"/run/netns/web1\"\ndevice = \"eth0\"",
            &["61: port[1].device: interface \"eth0\" of the same namespace is already port[0].device (line 55)"],
        ),
        // Ports.
        (
            "mtu = 1500",
            "mtu = 1535",
            &[
                "53: port[0].mtu: 1535 plus 66 bytes of headers (IPv4 20, UDP 8, VXLAN 8, BIFROST 16, Ethernet 14) exceed underlay.mtu (1600); at most 1534 fit",
            ],
        ),
        ("mtu = 1500", "mtu = 1000", &["53: port[0].mtu: 1000 is below 1280"]),
        (
            "mac = \"02:00:00:00:00:02\"",
            "mac = \"02:00:00:00:00:02\"\nmtu = 1535",
            &["68: route[0].mtu: 1535 does not fit underlay.mtu (1600); at most 1534 fit"],
        ),
        (
            "prefix = \"10.0.0.2/32\"",
            "mtu = 1279\nprefix = \"fd00::2/128\"",
            &["65: route[0].mtu: 1279 is below 1280, the minimum MTU of IPv6 (RFC 8200)"],
        ),
        ("mtu = 1600", "mtu = 1500", &["53: port[0].mtu: 1500 plus 66 bytes", "58: port[1].mtu: 1500 plus 66 bytes"]),
        (
            "default_gateway = \"10.0.0.254\"",
            "default_gateway = \"10.0.0.1\"",
            &["56: port[0].default_gateway: 10.0.0.1 is the port's own address"],
        ),
        (
            "default_gateway = \"10.0.0.254\"",
            "default_gateway = \"10.1.0.1\"",
            &[
                "56: port[0].default_gateway: 10.1.0.1 is neither in the port's subnets nor a gateway of VNI 100; nothing would answer ARP or ND for it",
            ],
        ),
        (
            "default_gateway = \"10.0.0.254\"",
            "default_gateway = \"fd01::1\"",
            &["56: port[0].default_gateway: fd01::1 is neither in the port's subnets"],
        ),
        (
            "addresses = [\"10.0.0.1/24\"]",
            "addresses = [\"10.0.0.1/24\"]\ndefault_gateway = \"fd00::2\"",
            &["63: port[1].default_gateway: fd00::2 cannot be reached: the port has no IPv6 address"],
        ),
        (
            "queues = 1",
            "queues = 3",
            &["57: port[0].queues: 3 queues; use 1, for one worker, or 2, one for each worker (workers.count)"],
        ),
        ("queues = 1", "queues = 0", &["57: port[0].queues: 0 is not in 1..=32"]),
        (
            "queues = 1",
            "tx_mbit = 0\ntx_kpps = 1000001\nrx_mbit = 400001\nrx_kpps = \"1\"",
            &[
                "57: port[0].tx_mbit: 0 is not in 1..=400000",
                "58: port[0].tx_kpps: 1000001 is not in 1..=1000000",
                "59: port[0].rx_mbit: 400001 is not in 1..=400000",
                "60: port[0].rx_kpps: expected an integer, found a string",
            ],
        ),
        ("queues = 1", "weight = 0", &["57: port[0].weight: 0 is not in 1..=100"]),
        (
            "vni = 200\nreliability",
            "vni = 200\nweight = 101\nreliability",
            &["45: vpc[1].weight: 101 is not in 1..=100"],
        ),
        (
            "queues = 1",
            "min_tx_mbit = 5",
            &["57: port[0].min_tx_mbit: needs the rate of which it is a part; set qos.link_mbit"],
        ),
        ("queues = 1", "min_tx_mbit = 0", &["57: port[0].min_tx_mbit: 0 is not in 1..=400000"]),
        (
            "queues = 1",
            "rx_queue_kb = 5",
            &["57: port[0].rx_queue_kb: without rx_mbit or rx_kpps no packets wait; set a receive limit, or remove it"],
        ),
        ("queues = 1", "rx_kpps = 1\nrx_queue_kb = 65537", &["58: port[0].rx_queue_kb: 65537 is not in 1..=65536"]),
        ("queues = 1", "dscp = 64", &["57: port[0].dscp: 64 is not in 0..=63"]),
        ("queues = 1", "dscp = \"EF\"", &["57: port[0].dscp: expected \"copy\" or an integer in 0..=63"]),
        // Virtual machines.
        ("name = \"web2\"", "name = \"web2\"\nkind = \"vhost\"", &["60: port[1].kind: "]),
        (
            "name = \"web2\"",
            "name = \"web2\"\nkind = \"vhost-user\"\nsocket = \"/run/bifrost/a.sock\"",
            &["61: port[1].socket: /run/bifrost/a.sock is already control.socket (line 4)"],
        ),
        (
            "name = \"web2\"",
            "name = \"web2\"\nkind = \"vhost-user\"\nsocket = \"/run/vm/../bifrost/a.sock\"",
            &["61: port[1].socket: \"/run/vm/../bifrost/a.sock\" contains \"..\"; write the path without it"],
        ),
        (
            "name = \"web2\"",
            "name = \"web2\"\nkind = \"vhost-user\"\nsocket = \"/run/vm.sock.inflight\"",
            &[
                "61: port[1].socket: \"/run/vm.sock.inflight\": names with \".inflight\" are reserved for the daemon's records",
            ],
        ),
        (
            "mac = \"02:00:00:00:00:03\"",
            "mac = \"02:bf:00:00:00:01\"",
            &["72: route[1].mac: 02:bf:00:00:00:01 is the MAC address of every gateway"],
        ),
        ("name = \"web2\"", "name = \"web2\"\nkind = \"vhost-user\"", &["58: port[1].socket: "]),
        (
            "name = \"web2\"",
            "name = \"web2\"\nkind = \"vhost-user\"\nsocket = \"vm.sock\"\nqueues = 17\nnetns = \"x\"",
            &[
                "61: port[1].socket: \"vm.sock\" is not an absolute path",
                "62: port[1].queues: 17 is not in 1..=16",
                "63: port[1].netns: ",
            ],
        ),
        (
            "name = \"web2\"",
            "name = \"web2\"\nkind = \"vhost-user\"\nsocket = \"/run/vm.sock\"\npacked = \"on\"",
            &["62: port[1].packed: expected true or false, found a string"],
        ),
        (
            "name = \"web2\"",
            "name = \"web2\"\nkind = \"vhost-user\"\nsocket = \"/run/vm.sock\"\nslicing = 1",
            &["62: port[1].slicing: expected true or false, found an integer"],
        ),
        (
            "name = \"web2\"",
            "name = \"web2\"\nslicing = false",
            &["60: port[1].slicing: only with kind = \"vhost-user\": a TAP device hands over whole packets; remove it"],
        ),
        // Routes.
        (
            "prefix = \"10.0.1.0/24\"",
            "prefix = \"10.0.1.7/24\"",
            &["70: route[1].prefix: 10.0.1.7/24 has host bits set; write 10.0.1.0/24"],
        ),
        (
            "prefix = \"10.0.1.0/24\"",
            "prefix = \"10.0.0.2/32\"",
            &["70: route[1].prefix: 10.0.0.2/32 in VNI 100 is already route[0].prefix (line 65)"],
        ),
        (
            "prefix = \"10.0.1.0/24\"",
            "prefix = \"10.0.0.1/32\"",
            &["70: route[1].prefix: 10.0.0.1 is the address of the local port \"web1\""],
        ),
        (
            "mac = \"02:00:00:00:00:03\"",
            "mac = \"02:00:00:00:00:02\"",
            &["72: route[1].mac: 02:00:00:00:00:02 is already on peer \"host-b\" (line 67); a vNIC is on one host"],
        ),
        (
            "mac = \"02:00:00:00:00:03\"",
            "mac = \"02:00:00:00:00:01\"",
            &["72: route[1].mac: 02:00:00:00:00:01 is the MAC address of the local port \"web1\""],
        ),
        // Shapes.
        ("[control]\n", "[[control]]\n", &["3: control: expected a table [control], found a list"]),
        // Syntax errors only: other errors would be guesses.
        ("name = \"host-a\"", "name = \"host-a", &["2: "]),
        ("paths = 4", "paths = 4\npaths = 5", &["13: duplicate key"]),
    ];
    let mut wrong = String::new();
    for (from, to, expected) in cases {
        assert!(GOOD.contains(from), "{from}");
        let text = if from.is_empty() { format!("{GOOD}{to}\n") } else { GOOD.replacen(from, to, 1) };
        let errors = Config::parse(&text, "f.toml").map_or_else(|e| e.to_string(), |_| String::new());
        let mut found: Vec<&str> = errors.lines().collect();
        for message in *expected {
            match found.iter().position(|f| f.starts_with(&format!("f.toml:{message}"))) {
                Some(at) => drop(found.remove(at)),
                None => wrong += &format!("{to}: lacks {message}\n"),
            }
        }
        for surplus in found {
            wrong += &format!("{to}: gave {surplus}\n");
        }
    }
    assert!(wrong.is_empty(), "\n{wrong}");
}

#[test]
fn a_gateway_of_the_vpc_may_be_outside_of_the_subnets() {
    let outside = GOOD
        .replace("gateway = [\"10.0.0.254\"]", "gateway = [\"10.9.0.1\"]")
        .replace("default_gateway = \"10.0.0.254\"", "default_gateway = \"10.9.0.1\"");
    Config::parse(&outside, "f").unwrap();
}

#[test]
fn all_errors_at_once_in_order() {
    let text = GOOD
        .replace("name = \"host-a\"", "name = \"\"")
        .replace("paths = 4", "paths = 0")
        .replace("peer = \"kernel\"", "peer = \"nobody\"");
    let errors = Config::parse(&text, "/etc/bifrost/bifrostd.toml").unwrap_err();
    let fields: Vec<_> = errors.errors().iter().map(|e| (e.line, e.field.as_str())).collect();
    assert_eq!(fields, [(2, "host.name"), (12, "underlay.paths"), (71, "route[1].peer")]);
    assert!(errors.to_string().starts_with("/etc/bifrost/bifrostd.toml:2: host.name: "), "{errors}");
}

#[test]
fn files_that_cannot_be_read() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("no.toml");
    let error = Config::load(&missing).unwrap_err().to_string();
    assert!(error.starts_with(&format!("{}: cannot be read: ", missing.display())), "{error}");
    let binary = dir.path().join("binary.toml");
    std::fs::write(&binary, b"[host]\nname = \"\xff\"\n").unwrap();
    let error = Config::load(&binary).unwrap_err().to_string();
    assert!(error.ends_with("line 2 is not UTF-8 text"), "{error}");
    let good = dir.path().join("good.toml");
    std::fs::write(&good, GOOD).unwrap();
    assert_eq!(Config::load(&good), Config::parse(GOOD, "x"));
    // Endless files are refused.
    let error = Config::load("/dev/zero").unwrap_err().to_string();
    assert!(error.contains("larger than"), "{error}");
}

proptest::proptest! {
    /// Any text gives a configuration or a list of errors, each with a line.
    #[test]
    fn mutilated_files_never_panic(at in 0..GOOD.len(), len in 0usize..40, with in "[ -~\n]{0,12}") {
        let mut text = GOOD.to_owned();
        text.replace_range(at..(at + len).min(GOOD.len()), &with);
        if let Err(errors) = Config::parse(&text, "f") {
            proptest::prop_assert!(!errors.errors().is_empty());
            let lines = text.lines().count() + 1;
            for error in errors.errors() {
                proptest::prop_assert!(error.line <= lines && !error.message.is_empty());
            }
        }
    }
}
