//! What an operator sees: drops with their reasons and locations, and the same in Prometheus.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use bifrost_control::api::Sample;

use crate::common::traffic::{Exchange, exchange, ping};
use crate::common::{Guest, Lab, Options, eventually, raw};

/// Address of the first host's metrics, only reachable on that host.
const METRICS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 9795);

/// A lab with two guests, whose first host serves metrics.
fn lab() -> Lab {
    let mut lab = Lab::new(Options::default());
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24"]));
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24"]));
    let config = &mut lab.hosts[0].config;
    *config = config.replacen("[control]\n", &format!("[control]\nmetrics = \"{METRICS}\"\n"), 1);
    lab.start();
    lab
}

/// A real HTTP GET on the first host.
fn scrape(lab: &Lab) -> String {
    lab.hosts[0].net.enter(|| {
        let mut stream = TcpStream::connect(METRICS).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: host-a\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
        body.to_owned()
    })
}

/// Every sample of an exposition, by name and labels; each has a TYPE, a HELP and a UNIT before it, once.
fn parse(text: &str) -> Vec<(String, String, f64)> {
    let mut samples = Vec::new();
    let mut described: Vec<String> = Vec::new();
    let mut lines = text.lines().peekable();
    assert_eq!(text.lines().last(), Some("# EOF"));
    while let Some(line) = lines.next().filter(|line| *line != "# EOF") {
        let name = line.strip_prefix("# HELP ").unwrap_or_else(|| panic!("HELP first: {line}"));
        let (name, help) = name.split_once(' ').unwrap();
        assert!(help.ends_with(['.', '?']) && !described.contains(&name.to_owned()), "{line}");
        described.push(name.to_owned());
        let kind = lines.next().unwrap().strip_prefix(&format!("# TYPE {name} ")).unwrap();
        assert!(lines.next().unwrap().starts_with(&format!("# UNIT {name} ")), "{name}");
        let suffix = if kind == "counter" { "_total" } else { "" };
        while let Some(line) = lines.next_if(|line| !line.starts_with('#')) {
            let (labelled, value) = line.rsplit_once(' ').unwrap();
            let (full, labels) = labelled.strip_suffix('}').unwrap().split_once('{').unwrap();
            assert_eq!(full, format!("{name}{suffix}"), "{line}");
            samples.push((full.to_owned(), labels.to_owned(), value.parse().unwrap()));
        }
    }
    samples
}

#[test]
fn every_packet_is_accounted_for_while_it_is_carried_and_lost() {
    let mut lab = Lab::new(Options { workers: 2, ..Options::default() });
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24"]));
    lab.add(0, Guest::new("c", 3, &["10.0.0.3/24"]));
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24"]));
    lab.start();
    lab.hosts[0].path_fault("host-b", Some(1), |fault| {
        (fault.loss_percent, fault.delay_us, fault.duplicate_percent, fault.corrupt_percent) = (3.0, 300, 5.0, 1.0);
    });
    lab.hosts[1].path_fault("host-a", Some(2), |fault| {
        fault.direction = bifrost_control::api::Direction::Tx;
        (fault.loss_percent, fault.delay_us, fault.duplicate_percent, fault.corrupt_percent) = (3.0, 300, 5.0, 1.0);
    });
    lab.hosts[1].port_fault("b", |fault| (fault.loss_percent, fault.duplicate_percent) = (1.0, 1.0));
    let stream = Exchange::start(lab.net("a"), lab.net("b"), "10.0.0.2", 5001, 4 << 20);
    for _ in 0..10 {
        lab.hosts.iter().for_each(|host| assert_eq!(host.client.drops().unwrap().unexplained, []));
        ping(lab.net("c"), "10.0.0.1", 1, 56);
    }
    stream.finish();
    // A removed port's counters are removed, and a recreated port's counters start at zero.
    let whole = lab.hosts[0].config.clone();
    for config in [whole.replacen("mtu = 1500", "mtu = 1400", 1), whole] {
        lab.hosts[0].config = config;
        lab.hosts[0].write_config();
        assert_eq!(lab.hosts[0].client.reload().unwrap().ports.changed, ["a"]);
        lab.hosts.iter().for_each(|host| host.assert_balanced());
    }
    assert!(lab.hosts[1].counter("fault.dropped_packets") > 0);
}

#[test]
fn drops_and_metrics_account_for_packets() {
    let lab = lab();
    exchange(lab.net("a"), lab.net("b"), "10.0.0.2", 5001, 1 << 20);
    assert_eq!(ping(lab.net("a"), "10.0.0.9", 2, 56), 0, "an unused address");
    let (a, b) = (lab.guest("a").mac_bytes(), lab.guest("b").mac_bytes());
    let spoofed = raw::udp_in_ipv4([10, 0, 0, 3], [10, 0, 0, 2], &[7; 40]);
    assert_eq!(raw::send_frames(lab.net("a"), "eth0", vec![raw::ethernet(b, a, 0x0800, &spoofed); 3]), 3);
    eventually(5.0, "the frames are dropped", || lab.hosts[0].drops("a", "spoofed_ip") == 3);

    let drops = lab.hosts[0].client.drops().unwrap();
    let of = |counter: &str| drops.drops.iter().find(|d| d.counter == counter).unwrap_or_else(|| panic!("{drops:#?}"));
    let spoofed = of("avs.dropped_spoofed_ip_packets");
    assert_eq!((spoofed.count, spoofed.at.to_string().as_str()), (3, "port a, worker 0"));
    assert!(
        spoofed.what.contains("with a source IP address that is not the port's")
            && spoofed.advice.contains("`addresses`")
    );
    assert!(of("avs.dropped_unknown_neighbour_packets").count > 0);

    // Further counters may appear in between.
    let samples: Vec<Sample> = lab.hosts[0].client.samples().unwrap();
    assert_eq!(drops.unexplained, []);
    let metrics = parse(&scrape(&lab));
    let of = |name: &str, labels: &str| {
        let found = metrics.iter().find(|(n, l, _)| n == name && l == labels);
        found.unwrap_or_else(|| panic!("no {name}{{{labels}}}")).2
    };
    let port = "worker=\"0\",port=\"a\"";
    assert_eq!(of("bifrost_avs_dropped_spoofed_ip_packets_total", port), 3.0);
    assert!(of("bifrost_port_tx_bytes_total", port) > f64::from(1 << 20));
    assert!(of("bifrost_port_rx_packets_total", port) > 10.0);
    assert!(of("bifrost_tap_tx_packets_total", port) > 10.0);
    assert!(of("bifrost_rte_sent_packets_total", "worker=\"0\"") > 10.0);
    assert!(of("bifrost_udp_tx_datagrams_total", "worker=\"0\"") > 10.0);
    let srtt = of("bifrost_path_srtt_seconds", "worker=\"0\",peer=\"host-b\",path=\"0\"");
    assert!((0.0..1.0).contains(&srtt), "{srtt}");
    assert!(metrics.len() >= samples.len(), "{} of {} samples", metrics.len(), samples.len());
}
