//! Logs of rules on real traffic: which rule allowed a connection, and what an ACL rejects.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use bifrost_control::api::TraceSpec;
use serde_json::Value;

use crate::common::host::vpc;
use crate::common::{Guest, Lab, Options, eventually};

const GROUP: &str = "[[security_group]]\nname = \"web\"\ningress = [{ protocol = \"icmp\" }, \
                     { protocol = \"tcp\", ports = [8080], log = true }, { protocol = \"tcp\", ports = [8081] }]\n";
/// Records are created by a thread that scans all ports within a second.
const SOON_S: f64 = 10.0;

fn exchange(lab: &Lab, port: u16) {
    let server = lab.net("a").enter(move || TcpListener::bind(("10.0.0.1", port)).unwrap());
    let serving = std::thread::spawn(move || {
        let (mut stream, _) = server.accept().unwrap();
        let mut heard = Vec::new();
        stream.read_to_end(&mut heard).unwrap();
        heard.len()
    });
    let mut client = lab.net("b").enter(move || TcpStream::connect(("10.0.0.1", port)).unwrap());
    client.write_all(&[7; 100_000]).unwrap();
    drop(client);
    assert_eq!(serving.join().unwrap(), 100_000);
}

#[test]
fn accepted_connections_and_rejected_packets_name_their_rule() {
    let acl = "[[vpc.acl]]\ndirection = \"egress\"\naction = \"allow\"\nprotocol = \"tcp\"\n\
               [[vpc.acl]]\ndirection = \"egress\"\naction = \"deny\"\nprotocol = \"udp\"\nports = [9]\nlog = true\n";
    let vpcs = format!("{}{acl}", vpc(100, "tcp", "flow"));
    let mut lab = Lab::new(Options { vpcs, ..Options::default() });
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24"]));
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24"]));
    // Both hosts have the ACL, and one of them the group.
    for host in &mut lab.hosts {
        let json = host.directory.join("rules.json");
        host.config += &format!("[flow_log]\nrules_json = {json:?}\nrecord = \"rules\"\nrules_interval_s = 1\n");
    }
    let config = &mut lab.hosts[0].config;
    *config = config.replacen("name = \"a\"\n", "name = \"a\"\nsecurity_groups = [\"web\"]\n", 1);
    *config += GROUP;
    lab.start();

    for port in [8080, 8081, 8080] {
        exchange(&lab, port);
    }
    let denied = lab.net("a").enter(|| UdpSocket::bind("10.0.0.1:5000").unwrap());
    for _ in 0..3 {
        denied.send_to(&[1; 100], "10.0.0.2:9").unwrap();
    }
    let json = lab.hosts[0].directory.join("rules.json");
    let lines = || -> Vec<Value> {
        let text = std::fs::read_to_string(&json).unwrap_or_default();
        text.lines().map(|line| serde_json::from_str(line).expect("each line is an object")).collect()
    };
    let by = |rule: &str| lines().into_iter().filter(|line| line["rule"] == rule).collect::<Vec<_>>();
    let group = "ingress rule 2 of security group web";
    let acl = "[[vpc.acl]] 2 of VNI 100";
    let packets = |lines: &[Value]| lines.iter().map(|line| line["packets"].as_u64().unwrap()).sum::<u64>();
    eventually(SOON_S, "all records are written", || by(group).len() == 2 && packets(&by(acl)) == 3);
    // One line per connection, not per packet, and none for the other rule.
    std::thread::sleep(Duration::from_millis(1500));
    let lines = lines();
    assert!(lines.iter().all(|line| line["rule"] == group || line["rule"] == acl), "{lines:?}");
    let accepted = by(group);
    assert_eq!(accepted.len(), 2, "{accepted:?}");
    for line in &accepted {
        assert_eq!(
            (&line["port"], &line["security_group"], &line["rule_number"]),
            (&"a".into(), &"web".into(), &2.into())
        );
        assert_eq!(
            (&line["action"], &line["direction"], &line["vni"]),
            (&"accepted".into(), &"ingress".into(), &100.into())
        );
        assert_eq!((&line["source"], &line["destination"]), (&"10.0.0.2".into(), &"10.0.0.1".into()));
        assert_eq!((&line["destination_port"], &line["packets"]), (&8080.into(), &1.into()));
    }
    let rejected = by(acl);
    assert_eq!((packets(&rejected), &rejected[0]["action"]), (3, &"rejected".into()));
    assert_eq!((&rejected[0]["source_port"], &rejected[0]["destination_port"]), (&5000.into(), &9.into()));

    let host = &lab.hosts[0];
    let status = host.client.flow_log().unwrap();
    assert_eq!(status.rules, [group, acl]);
    assert_eq!((status.rule_json_records, status.created_records), (status.rule_created_records, 0));
    assert_eq!((status.rule_suppressed_packets, status.rule_json_lost_records), (0, 0));
    // A trace shows whether a packet would be logged.
    let traced = |udp| {
        let spec = TraceSpec {
            port: Some("a".into()),
            to: Some("10.0.0.2".parse().unwrap()),
            udp: Some((5000, udp)),
            ..TraceSpec::default()
        };
        let trace = host.client.trace(&spec).unwrap();
        trace.steps.iter().any(|step| step.details.get("logged").is_some_and(|logged| logged == "true"))
    };
    assert!(traced(9) && !traced(10));
    assert!(lab.hosts[1].client.flow_log().unwrap().rule_created_records == 0, "no packet of b was rejected");
}
