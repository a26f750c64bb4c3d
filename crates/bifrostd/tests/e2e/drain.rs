//! Paths are drained while traffic flows: no new packets leave on them, and none is lost.

use std::time::Duration;

use bifrost_control::api::{DrainSpec, ErrorKind, Path, PathState};
use bifrost_control::client::ClientError;

use crate::common::host::{Host, vpc};
use crate::common::traffic::{Exchange, Talk, exchange, ping};
use crate::common::{Guest, Lab, Options, eventually};

const MEGABYTES: u64 = 1 << 20;

/// Each path has its own link.
fn options(reliability: &str) -> Options {
    Options { links: 4, vpcs: vpc(100, reliability, "flow"), ..Options::default() }
}

fn drain(host: &Host, peer: &str, path: u8, drained: bool) {
    let report = host.client.drain_path(&DrainSpec { peer: peer.into(), path }, drained).unwrap();
    assert_eq!((report.drained, report.changed), (drained, true));
    assert_eq!(report.in_use_paths.contains(&path), !drained);
}

fn path(host: &Host, number: u8) -> Path {
    host.client.paths().unwrap().into_iter().find(|p| p.path == number).unwrap()
}

/// Counts packets that leave a host over link 2: VXLAN, and BIFROST data (long datagrams).
fn count_what_leaves(host: &Host) {
    let rules = "table netdev count {\n chain out {\n  type filter hook egress device l2 priority 0;\n  \
                 udp dport 4789 counter\n  udp dport 4794 udp length > 200 counter\n }\n}\n";
    let output = host.net.run("nft", &["-f", "-"], rules);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Plain VXLAN and large BIFROST datagrams, which carry data, that have left over link 2.
fn left(host: &Host) -> [u64; 2] {
    let output = host.net.run("nft", &["list", "table", "netdev", "count"], "");
    let text = String::from_utf8(output.stdout).unwrap();
    let packets = |text: &str| text.split_whitespace().next().unwrap().parse().unwrap();
    let counted: Vec<u64> = text.split("counter packets ").skip(1).map(packets).collect();
    counted.try_into().unwrap()
}

#[test]
fn a_drained_link_is_unplugged_without_loss() {
    for (workers, reliability, peer, which) in [(2, "tcp", "auto", 1), (1, "off", "auto", 0), (1, "off", "plain", 0)] {
        let lab = Lab::running(Options { workers, peer, ..options(reliability) });
        let both = [(0, "host-b"), (1, "host-a")];
        lab.hosts.iter().for_each(count_what_leaves);
        // Many flows, so that some use the path; and little data at a time, because a slower path may be skipped.
        let mut talks: Vec<_> =
            (0..24).map(|n| Talk::start(lab.net("a"), lab.net("b"), "10.0.0.2", 6100 + n)).collect();
        eventually(20.0, "the path carries traffic", || {
            talks.iter_mut().for_each(|talk| _ = talk.say(8000));
            lab.hosts.iter().all(|host| left(host)[which] > 100)
        });
        let streams: Vec<_> =
            (0..24).map(|n| Exchange::start(lab.net("a"), lab.net("b"), "10.0.0.2", 5001 + n, 2 * MEGABYTES)).collect();
        for (host, peer) in both {
            drain(&lab.hosts[host], peer, 2, true);
        }
        // In-flight packets have arrived, or were retransmitted on other paths.
        std::thread::sleep(Duration::from_millis(20));
        let before: Vec<_> = lab.hosts.iter().map(left).collect();
        eventually(10.0, "traffic continues on other paths", || streams.iter().any(Exchange::is_finished));
        streams.into_iter().for_each(Exchange::finish);
        assert_eq!(lab.hosts.iter().map(left).collect::<Vec<_>>(), before, "{reliability}, {peer}");
        // Unplugging the cable has no effect.
        for host in &lab.hosts {
            assert!(host.net.run("ip", &["link", "set", "l2", "down"], "").status.success());
        }
        exchange(lab.net("a"), lab.net("b"), "10.0.0.2", 5100, 4 * MEGABYTES);
        assert_eq!(ping(lab.net("a"), "10.0.0.2", 50, 1000), 50);
        for (host, peer) in both {
            let path = path(&lab.hosts[host], 2);
            assert!(path.drained && path.state != PathState::Active, "{path:?}");
            assert!(lab.hosts[host].net.run("ip", &["link", "set", "l2", "up"], "").status.success());
            drain(&lab.hosts[host], peer, 2, false);
        }
        if !lab.stood_still() {
            let again = lab.net("a").needed_retransmits() + lab.net("b").needed_retransmits();
            // Not every duplicate is reported; losing a path's packets would cost dozens.
            assert!(again <= 2, "{reliability}, {peer}: {again} segments were lost");
        }
        let before = left(&lab.hosts[0]);
        let mut talks: Vec<_> =
            (0..24).map(|n| Talk::start(lab.net("a"), lab.net("b"), "10.0.0.2", 6000 + n)).collect();
        eventually(10.0, "the path carries traffic again", || {
            talks.iter_mut().for_each(|talk| _ = talk.say(8000));
            left(&lab.hosts[0])[which] > before[which] + 20
        });
        let paths = lab.hosts[0].client.paths().unwrap();
        assert_eq!((paths.len(), paths.iter().any(|p| p.drained)), (4 * workers, false));
        if reliability == "off" {
            assert!(lab.hosts[0].counter("datapath.plain_moved_buckets") > 0);
            assert_eq!(lab.hosts[0].counter("datapath.plain_moved_flowlets"), 0);
        }
    }
}

#[test]
fn invalid_drains_are_refused_and_a_drain_survives_a_reload() {
    let mut lab = Lab::running(options("tcp"));
    let refused = |host: &Host, peer: &str, path: u8| match host
        .client
        .drain_path(&DrainSpec { peer: peer.into(), path }, true)
    {
        Err(ClientError::Api(e)) => (e.kind, e.location, e.hint),
        other => panic!("{other:?}"),
    };
    let host = &lab.hosts[0];
    assert_eq!(refused(host, "nobody", 0), (ErrorKind::NotFound, "peer".into(), "there are: host-b".into()));
    let (kind, location, hint) = refused(host, "host-b", 4);
    assert!(kind == ErrorKind::NotFound && location == "path" && hint.contains("the peer has 4 paths"), "{hint}");
    for path in 0..3 {
        drain(host, "host-b", path, true);
    }
    let (kind, location, hint) = refused(host, "host-b", 3);
    assert!(kind == ErrorKind::Conflict && location == "path" && hint.contains("restore another path first"), "{hint}");
    exchange(lab.net("a"), lab.net("b"), "10.0.0.2", 5001, MEGABYTES);
    let drained = |host: &Host| host.client.paths().unwrap().iter().map(|p| p.drained).collect::<Vec<_>>();
    assert_eq!(drained(host), [true, true, true, false]);
    // A trace shows only the remaining path.
    let output = host.client.trace(&bifrost_control::api::TraceSpec {
        port: Some("a".into()),
        to: Some("10.0.0.2".parse().unwrap()),
        tcp: Some((40000, 80)),
        ..Default::default()
    });
    let paths: Vec<_> = output.unwrap().steps.into_iter().filter(|s| s.stage == "path").map(|s| s.what).collect();
    assert!(paths.len() == 1 && paths[0].starts_with("3: "), "{paths:?}");
    // After a change of a route to the same peer, the drain stays.
    let more = "[[route]]\nvni = 100\nprefix = \"10.0.0.9/32\"\npeer = \"host-b\"\nmac = \"02:00:00:00:00:09\"\n";
    lab.hosts[0].config.push_str(more);
    lab.hosts[0].write_config();
    lab.hosts[0].client.reload().unwrap();
    assert_eq!(drained(&lab.hosts[0]), [true, true, true, false]);
    // After a change of the peer, it does not.
    let changed = lab.hosts[0].config.replace("transport = \"auto\"", "transport = \"plain\"");
    assert_ne!(changed, lab.hosts[0].config);
    lab.hosts[0].config = changed;
    lab.hosts[0].write_config();
    lab.hosts[0].client.reload().unwrap();
    assert_eq!(drained(&lab.hosts[0]), [false; 4]);
    assert!(lab.hosts[0].log().contains("none of its paths is drained any more"), "{}", lab.hosts[0].log());
    drain(&lab.hosts[0], "host-b", 0, true);
}

#[test]
fn flowlets_spread_a_flow_that_pauses() {
    let mut lab = Lab::new(options("off"));
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24"]));
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24"]));
    for host in &mut lab.hosts {
        host.config = host.config.replace("[transport]", "plain_paths = \"flowlet\"\n[transport]");
    }
    lab.start();
    count_what_leaves(&lab.hosts[0]);
    let mut talk = Talk::start(lab.net("a"), lab.net("b"), "10.0.0.2", 5001);
    for _ in 0..40 {
        talk.say(1000);
        std::thread::sleep(Duration::from_millis(2));
    }
    let (moved, on_path) = (lab.hosts[0].counter("datapath.plain_moved_flowlets"), left(&lab.hosts[0])[0]);
    let all = lab.hosts[0].counter("datapath.plain_tx_packets");
    // At least 40 bursts; three in four choose another path, and a quarter of all choose path 2.
    assert!(moved >= 15 && (1..all).contains(&on_path), "{moved} moved, {on_path} of {all} on path 2");
    assert_eq!(lab.hosts[0].counter("datapath.plain_moved_buckets"), 0);
}
