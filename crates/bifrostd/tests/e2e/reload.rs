//! The configuration changes under traffic.

use bifrost_control::client::ClientError;
use rustix::process::Signal;

use crate::common::host::{routes, section, vpc};
use crate::common::traffic::{Exchange, Talk, exchange, ping};
use crate::common::{Guest, Lab, Net, Options, eventually};

const MEGABYTES: u64 = 1 << 20;

fn error(result: Result<bifrost_control::api::ReloadReport, ClientError>) -> String {
    match result {
        Err(ClientError::Api(e)) => format!("{e}"),
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn ports_routes_peers_and_vpcs_are_added_and_removed_under_a_stream() {
    let mut lab = Lab::running(Options::default());
    let stream = Exchange::start(lab.net("a"), lab.net("b"), "10.0.0.2", 5001, 64 * MEGABYTES);
    eventually(5.0, "the stream is running", || lab.hosts[0].counter("rte.sent_packets") > 1000);
    let first = [lab.hosts[0].config.clone(), lab.hosts[1].config.clone()];
    let index =
        |lab: &Lab| lab.net("a").enter(|| std::fs::read_to_string("/sys/class/net/eth0/ifindex").unwrap_or_default());
    let device = index(&lab);
    let stream_conns = |lab: &Lab| {
        let pair =
            [lab.hosts[0].conns_with(lab.guest("b")).remove(0), lab.hosts[1].conns_with(lab.guest("a")).remove(0)];
        pair.map(|c| (c.cid, c.peer_cid))
    };
    let before = stream_conns(&lab);

    // A guest on each side, one in a new VPC; an unreachable peer, and a route to it.
    lab.add(0, Guest::new("c", 3, &["10.0.0.3/24"]));
    lab.add(1, Guest::new("d", 4, &["10.0.0.4/24"]));
    lab.add(0, Guest::new("e", 5, &["10.0.0.5/24"]).vni(300));
    let peer = "[[peer]]\nname = \"host-z\"\naddresses = [\"172.31.0.99\"]\n[[route]]\nvni = 100\nprefix = \"10.9.0.0/16\"\n\
                peer = \"host-z\"\nmac = \"02:00:00:00:00:99\"\n";
    for host in &mut lab.hosts {
        host.config.push_str(&vpc(300, "tcp", "flow"));
        host.config.push_str(peer);
        host.write_config();
    }
    let report = lab.hosts[0].client.reload().unwrap();
    assert_eq!(
        (report.ports.added, report.peers.added),
        (vec!["c".to_string(), "e".to_string()], vec!["host-z".to_string()])
    );
    assert_eq!((report.routes.added.len(), report.vpcs.added), (2, vec!["300".to_string()]));
    lab.hosts[1].signal(Signal::HUP);
    eventually(3.0, "SIGHUP reloads the file", || lab.hosts[1].client.ports().unwrap().len() == 2);
    assert_eq!(ping(lab.net("c"), "10.0.0.4", 5, 56), 5);
    exchange(lab.net("d"), lab.net("c"), "10.0.0.3", 5002, MEGABYTES);
    assert!(!stream.is_finished(), "the stream was too short to be disturbed");

    // The additions are removed.
    let conns = lab.hosts[1].client.conns().unwrap().len();
    assert_eq!(conns, 2);
    for (host, config) in lab.hosts.iter_mut().zip(first) {
        host.config = config;
        host.write_config();
    }
    let report = lab.hosts[0].client.reload().unwrap();
    assert_eq!((report.ports.removed.len(), report.peers.removed.len(), report.vpcs.removed.len()), (2, 1, 1));
    assert!(!lab.net("c").has_device("eth0"));
    lab.hosts[1].client.reload().unwrap();
    assert!(lab.hosts[0].client.reload().unwrap().is_empty(), "no difference remains");
    assert_eq!(lab.hosts[1].client.conns().unwrap().len(), 1);

    stream.finish();
    assert_eq!(lab.net("a").needed_retransmits() + lab.net("b").needed_retransmits(), 0, "the stream lost packets");
    lab.assert_nothing_given_up();
    assert_eq!(index(&lab), device, "the port got a new device");
    assert_eq!(stream_conns(&lab), before, "the connection was restarted");
}

#[test]
fn a_bad_file_changes_nothing() {
    let mut lab = Lab::running(Options::default());
    let mut talk = Talk::start(lab.net("a"), lab.net("b"), "10.0.0.2", 5001);
    talk.say(10_000);
    let good = lab.hosts[0].config.clone();
    let extra = section(&Guest::new("c", 3, &["10.0.0.3/24"]), "/etc/hostname");
    let line = |text: &str, what: &str| 1 + text.lines().position(|l| l.contains(what)).unwrap();
    let route = routes(&Guest::new("x", 9, &["10.0.0.9/24"]), "host-x");
    let cases = [
        // Invalid by itself.
        (
            format!("{good}{route}"),
            format!(":{}: route[1].peer: no peer named \"host-x\"", line(&format!("{good}{route}"), "host-x")),
        ),
        // Cannot change at run time.
        (good.replace("paths = 4", "paths = 3"), "underlay.paths".to_string()),
        // Fails only when applied, together with valid changes.
        (format!("{good}{}{extra}", vpc(300, "tcp", "flow")), "/etc/hostname".to_string()),
    ];
    let before = (lab.hosts[0].client.ports().unwrap().len(), lab.hosts[0].client.routes().unwrap());
    for (config, says) in cases {
        lab.hosts[0].config = config;
        lab.hosts[0].write_config();
        let error = error(lab.hosts[0].client.reload());
        assert!(error.contains(&says), "{says:?} is not in {error}");
        let logged = lab.hosts[0].log().matches("not reloaded").count();
        lab.hosts[0].signal(Signal::HUP);
        eventually(3.0, "the failure is logged, too", || lab.hosts[0].log().matches("not reloaded").count() > logged);
        assert_eq!((lab.hosts[0].client.ports().unwrap().len(), lab.hosts[0].client.routes().unwrap()), before);
        talk.say(10_000);
        // A failed change is retried: it fails again, and succeeds once it is corrected.
        lab.hosts[0].client.reload().unwrap_err();
    }
    let ns = Net::new(lab.tag(), "c");
    let config = lab.hosts[0].config.replace("/etc/hostname", ns.name());
    lab.hosts[0].config = config;
    lab.hosts[0].write_config();
    assert_eq!(lab.hosts[0].client.reload().unwrap().ports.added, ["c"]);
    assert_eq!(ping(&ns, "10.0.0.1", 3, 56), 3);
    assert_eq!(lab.net("a").needed_retransmits() + lab.net("b").needed_retransmits(), 0);
}

#[test]
fn a_changed_port_that_fails_is_retried() {
    let mut lab = Lab::running(Options::default());
    let name = lab.net("a").name().to_string();
    let good = lab.hosts[0].config.clone();
    lab.hosts[0].config = good.replace(&name, "/etc/hostname");
    lab.hosts[0].write_config();
    let message = error(lab.hosts[0].client.reload());
    assert!(message.contains("/etc/hostname"), "{message}");
    lab.hosts[0].config = good;
    lab.hosts[0].write_config();
    lab.hosts[0].client.reload().unwrap();
    assert_eq!(ping(lab.net("a"), "10.0.0.2", 3, 56), 3);
}

#[test]
fn peers_are_refused_connections_to_a_removed_port() {
    let mut lab = Lab::running(Options { transport: "plain_retry_s = 1\n".to_string(), ..Options::default() });
    lab.add(1, Guest::new("c", 3, &["10.0.0.3/24"]));
    for host in &lab.hosts {
        host.write_config();
        host.client.reload().unwrap();
    }
    let mut talk = Talk::start(lab.net("a"), lab.net("b"), "10.0.0.2", 5001);
    talk.say(1000);
    let removed = section(lab.guest("b"), lab.net("b").name());
    let config = lab.hosts[1].config.clone();
    lab.hosts[1].config = config.replace(&removed, "");
    lab.hosts[1].write_config();
    assert_eq!(lab.hosts[1].client.reload().unwrap().ports.removed, ["b"]);
    // The peer gets RESET and REJECT, and falls back to plain VXLAN, whose packets are dropped.
    use std::io::Write;
    talk.client.write_all(b"hello").unwrap();
    eventually(3.0, "REJECT", || lab.hosts[0].counter("rte.rejects_received_packets") >= 1);
    assert!(lab.hosts[1].counter("rte.rejected_vnic_packets") >= 1);
    eventually(3.0, "plain packets are dropped", || {
        lab.hosts[1].counter("avs.underlay_dropped_unknown_mac_packets") >= 1
    });
    exchange(lab.net("a"), lab.net("c"), "10.0.0.3", 5002, MEGABYTES);
}
