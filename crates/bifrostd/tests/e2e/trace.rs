//! Traces predict what happens to packets.

use std::net::TcpStream;
use std::time::Duration;

use bifrost_control::api::{Trace, TraceSpec, TraceStep, TraceVerdict};

use crate::common::host::{Host, vpc};
use crate::common::traffic::{Talk, ping};
use crate::common::{Guest, Lab, Options, eventually};

/// `a` has rate limits, and a security group whose second rule allows some TCP. With a gateway there is one worker,
/// because ports with groups cannot be served by both.
fn lab(workers: usize) -> Lab {
    let gateway = if workers == 1 { "gateway = [\"10.0.0.254\"]\n" } else { "" };
    let acl = "[[vpc.acl]]\ndirection = \"egress\"\naction = \"deny\"\nprotocol = \"udp\"\nports = [53]\n";
    let vpcs = format!("{}{gateway}{acl}", vpc(100, "tcp", "flow"));
    let mut lab = Lab::new(Options { workers, mtu: 9000, path_mtu: true, vpcs, ..Options::default() });
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24"]).mtu(8500));
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24"]).mtu(1500));
    let group = "[[security_group]]\nname = \"web\"\n[[security_group.ingress]]\nprotocol = \"icmp\"\nfrom = [\"10.9.0.0/16\"]\n\
                 [[security_group.ingress]]\nprotocol = \"tcp\"\nports = [\"5001-5002\", 5004]\n";
    let mac = format!("mac = \"{}\"\n", lab.guest("a").mac);
    let config = &mut lab.hosts[0].config;
    *config = config.replacen(&mac, &format!("{mac}security_groups = [\"web\"]\ntx_mbit = 1000\nrx_mbit = 1000\n"), 1);
    config.push_str(group);
    lab.start();
    lab
}

fn from_a(to: &str) -> TraceSpec {
    TraceSpec { port: Some("a".to_owned()), to: Some(to.parse().unwrap()), ..TraceSpec::default() }
}

fn step<'a>(trace: &'a Trace, stage: &str) -> &'a TraceStep {
    trace.steps.iter().find(|s| s.stage == stage).unwrap_or_else(|| panic!("no {stage}: {trace:#?}"))
}

/// A host's counters, except those of the daemon's own turns.
fn counted(host: &Host) -> Vec<(String, u64)> {
    let counters = host.client.samples().unwrap();
    let counted = counters.into_iter().filter(|s| !s.counter.starts_with("datapath.") && !s.counter.ends_with("_ns"));
    counted
        .map(|s| (format!("{} {}", s.counter, s.at), s.value))
        .filter(|(name, _)| !name.starts_with("path."))
        .collect()
}

fn dropped_by(trace: &Trace) -> (TraceVerdict, &str) {
    (trace.verdict, trace.counter.as_deref().unwrap_or(""))
}

#[test]
fn every_stage_reports_its_decision() {
    let lab = lab(2);
    let (near, far) = (&lab.hosts[0], &lab.hosts[1]);
    let tcp = TraceSpec { tcp: Some((40_000, 6379)), ..from_a("10.0.0.2") };
    let before = near.client.trace(&tcp).unwrap();
    assert_eq!(before.verdict, TraceVerdict::Sent, "{before:#?}");
    let route = &step(&before, "route").details;
    assert_eq!((route["prefix"].as_str(), route["place"].as_str()), ("10.0.0.2/32", "host-b"));
    assert_eq!((route["path_mtu_bytes"].as_str(), route["mac"].as_str()), ("1500", "02:00:00:00:00:02"));
    assert_eq!(step(&before, "group").details["session"], "new");
    assert_eq!(step(&before, "limit").details["wait_us"], "0");
    assert_eq!(step(&before, "transport").details["carriage"], "reliable");
    assert!(step(&before, "transport").what.contains("would be set up"), "{before:#?}");
    let (from, to) = (&step(&before, "path").details["from"], &step(&before, "path").details["to"]);
    let among = |host: &Host, outer: &str| host.addresses.iter().any(|a| outer.starts_with(&format!("{a}:")));
    assert!(among(near, from) && among(far, to), "{from} {to}");

    // The packet was not sent, and no session or connection was created.
    assert_eq!((near.counter("avs.created_sessions"), near.client.conns().unwrap().len()), (0, 0));

    let mut talk = Talk::start(lab.net("b"), lab.net("a"), "10.0.0.1", 5001);
    talk.say(1000);
    let client = talk.client.local_addr().unwrap().port();
    let data = TraceSpec { tcp: Some((5001, client)), flags: vec!["ack".into()], ..from_a("10.0.0.2") };
    let known = near.client.trace(&data).unwrap();
    assert_eq!(step(&known, "group").details["session"], "existing", "{known:#?}");
    assert!(step(&known, "transport").details["cid"].starts_with("0x"), "{known:#?}");

    // The other direction: packets from a peer to `a`.
    let address = far.addresses[0];
    let incoming = |port: u16| TraceSpec {
        from_peer: Some(address),
        vni: Some(100),
        from: Some("10.0.0.2".parse().unwrap()),
        to: Some("10.0.0.1".parse().unwrap()),
        tcp: Some((40_000, port)),
        ..TraceSpec::default()
    };
    let allowed = near.client.trace(&incoming(5004)).unwrap();
    assert_eq!(allowed.verdict, TraceVerdict::Delivered, "{allowed:#?}");
    let rule = &step(&allowed, "group").details["rule"];
    assert!(rule.starts_with("ingress rule 2 of security group web"), "{rule}");
    let denied = near.client.trace(&incoming(5003)).unwrap();
    assert_eq!(
        dropped_by(&denied),
        (TraceVerdict::Dropped, "avs.ingress_dropped_group_ingress_packets"),
        "{denied:#?}"
    );
    assert!(!step(&denied, "group").passes && !denied.advice.is_empty());
    // Real packets are dropped with the same counter.
    let was = near.drops("a", "group_ingress");
    let to = "10.0.0.1:5003".parse().unwrap();
    lab.net("b").enter(move || TcpStream::connect_timeout(&to, Duration::from_millis(200)).unwrap_err());
    assert!(near.drops("a", "group_ingress") > was);
    let unknown = TraceSpec { from_peer: Some("192.0.2.99".parse().unwrap()), ..incoming(5004) };
    let unknown = near.client.trace(&unknown).unwrap();
    assert_eq!(dropped_by(&unknown), (TraceVerdict::Dropped, "drop.unknown_peer_packets"));
}

#[test]
fn drops_are_predicted_with_their_counters_and_not_counted() {
    let lab = lab(1);
    let near = &lab.hosts[0];
    assert_eq!(ping(lab.net("a"), "10.0.0.2", 2, 56), 2);
    let big = TraceSpec { tcp: Some((1, 2)), size_bytes: Some(4000), dont_fragment: true, ..from_a("10.0.0.2") };
    let refused = TraceSpec { udp: Some((5353, 53)), ..from_a("10.0.0.2") };
    let nowhere = TraceSpec { ping: true, ..from_a("10.7.7.7") };
    let nobody = TraceSpec { ping: true, ..from_a("10.0.0.77") };
    let spoofed = TraceSpec { ping: true, from: Some("10.0.0.2".parse().unwrap()), ..from_a("10.0.0.2") };
    let gateway = TraceSpec { ping: true, ..from_a("10.0.0.254") };
    let dropped = [
        (&refused, "avs.dropped_acl_packets", "acl"),
        (&nowhere, "avs.dropped_no_route_packets", "route"),
        (&nobody, "avs.dropped_unknown_neighbour_packets", "route"),
        (&spoofed, "avs.dropped_spoofed_ip_packets", "admission"),
    ];
    // Guests sometimes send packets by themselves, so one quiet moment is enough.
    eventually(10.0, "nothing is counted", || {
        let before = counted(near);
        for (spec, counter, stage) in dropped {
            let trace = near.client.trace(spec).unwrap();
            assert_eq!(dropped_by(&trace), (TraceVerdict::Dropped, counter), "{trace:#?}");
            assert!(!step(&trace, stage).passes, "{trace:#?}");
        }
        let answered = near.client.trace(&big).unwrap();
        assert_eq!(answered.verdict, TraceVerdict::Answered, "{answered:#?}");
        assert!(step(&answered, "size").what.contains("notified by ICMP"), "{answered:#?}");
        let segmented = near.client.trace(&TraceSpec { dont_fragment: false, ..big.clone() }).unwrap();
        assert_eq!(
            (segmented.verdict, step(&segmented, "size").details["pieces"].as_str()),
            (TraceVerdict::Sent, "3"),
            "{segmented:#?}"
        );
        assert_eq!(near.client.trace(&gateway).unwrap().verdict, TraceVerdict::Answered);
        counted(near) == before
    });
    let error = near.client.trace(&TraceSpec { port: Some("x".into()), ..nowhere }).unwrap_err();
    assert!(error.to_string().contains("no port named"), "{error}");
}
