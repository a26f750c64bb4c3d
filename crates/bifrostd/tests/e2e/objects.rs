//! Objects are applied one at a time, in addition to those of the file.

use bifrost_control::api::{ApplyItem, ApplyOp, ApplyReport, ApplySpec, ObjectsQuery};
use bifrost_control::client::ClientError;
use bifrost_control::config::Kind;
use serde_json::{Value, json};

use crate::common::host::Host;
use crate::common::traffic::{Exchange, exchange, ping};
use crate::common::{Lab, Net, Options, eventually};

const MEGABYTES: u64 = 1 << 20;

fn set(kind: Kind, spec: Value) -> ApplyItem {
    ApplyItem { op: ApplyOp::Set, kind, key: None, generation: None, owner: "agent".into(), spec: Some(spec) }
}

fn delete(kind: Kind, key: &str) -> ApplyItem {
    let key = Some(key.to_owned());
    ApplyItem { op: ApplyOp::Delete, kind, key, generation: None, owner: "agent".into(), spec: None }
}

fn port(net: &Net, n: u8) -> ApplyItem {
    let (mac, address) = (format!("02:00:00:00:00:{n:02x}"), format!("10.0.0.{n}/24"));
    let spec = json!({"name": format!("p{n}"), "vni": 100, "mac": mac, "addresses": [address],
                      "netns": net.name(), "device": "eth0"});
    set(Kind::Port, spec)
}

fn route(peer: &str, n: u8) -> ApplyItem {
    let (mac, prefix) = (format!("02:00:00:00:00:{n:02x}"), format!("10.0.0.{n}/32"));
    set(Kind::Route, json!({"vni": 100, "prefix": prefix, "peer": peer, "mac": mac}))
}

fn apply(host: &Host, items: Vec<ApplyItem>) -> Result<ApplyReport, String> {
    host.client.apply(&ApplySpec { items, ..ApplySpec::default() }).map_err(|error| match error {
        ClientError::Api(error) => error.to_string(),
        other => panic!("{other:?}"),
    })
}

#[test]
fn a_port_and_its_route_are_added_and_removed_under_a_stream() {
    let lab = Lab::running(Options::default());
    let stream = Exchange::start(lab.net("a"), lab.net("b"), "10.0.0.2", 5001, 64 * MEGABYTES);
    eventually(5.0, "the stream is running", || lab.hosts[0].counter("rte.sent_packets") > 1000);
    let cids = |lab: &Lab| lab.hosts[0].conns_with(lab.guest("b")).iter().map(|c| c.cid).collect::<Vec<_>>();
    let before = cids(&lab);
    let (c, d) = (Net::new(lab.tag(), "c"), Net::new(lab.tag(), "d"));
    let report = apply(&lab.hosts[0], vec![port(&c, 3), route("host-b", 4)]).unwrap();
    assert_eq!((report.set, report.changes.ports.added), (2, vec!["p3".to_owned()]));
    apply(&lab.hosts[1], vec![port(&d, 4), route("host-a", 3)]).unwrap();
    assert_eq!(ping(&c, "10.0.0.4", 5, 56), 5);
    exchange(&d, &c, "10.0.0.3", 5002, MEGABYTES);
    assert!(!stream.is_finished(), "the stream was too short to be disturbed");
    // A reload of the file keeps other owners' objects.
    assert!(lab.hosts[0].client.reload().unwrap().is_empty());
    assert_eq!(ping(&c, "10.0.0.4", 3, 56), 3);
    let again = apply(&lab.hosts[0], vec![port(&c, 3), route("host-b", 4)]).unwrap();
    assert_eq!((again.set, again.unchanged), (0, 2));

    let report = apply(&lab.hosts[0], vec![delete(Kind::Port, "p3"), delete(Kind::Route, "100/10.0.0.4/32")]).unwrap();
    assert_eq!((report.deleted, report.changes.ports.removed), (2, vec!["p3".to_owned()]));
    // Other changes do not wait for the kernel to remove it.
    eventually(5.0, "the port's device is removed", || !c.has_device("eth0"));
    assert_eq!((lab.hosts[0].client.ports().unwrap().len(), lab.hosts[0].client.routes().unwrap().len()), (1, 1));
    stream.finish();
    assert_eq!(lab.net("a").needed_retransmits() + lab.net("b").needed_retransmits(), 0, "the stream lost packets");
    lab.assert_nothing_given_up();
    assert_eq!(cids(&lab), before, "the connection was restarted");
}

#[test]
fn a_batch_that_fails_halfway_changes_nothing() {
    let lab = Lab::running(Options::default());
    let c = Net::new(lab.tag(), "c");
    let mut bad = port(&c, 9);
    bad.spec.as_mut().unwrap()["netns"] = json!("/etc/hostname");
    // Fails only when applied, after the other port was created.
    let error = apply(&lab.hosts[0], vec![port(&c, 3), bad, route("host-b", 4)]).unwrap_err();
    assert!(error.contains("port p9") && error.contains("/etc/hostname"), "{error}");
    assert!(error.ends_with("(nothing was changed)"), "{error}");
    assert!(!c.has_device("eth0"));
    let agents = ObjectsQuery { owner: Some("agent".into()), ..ObjectsQuery::default() };
    assert_eq!(lab.hosts[0].client.objects(&agents).unwrap().objects.len(), 0);
    assert_eq!((lab.hosts[0].client.ports().unwrap().len(), lab.hosts[0].client.routes().unwrap().len()), (1, 1));
    // Invalid by itself, or together with existing objects.
    let error = apply(&lab.hosts[0], vec![port(&c, 3), route("host-x", 4)]).unwrap_err();
    assert!(error.starts_with("items[1]: route \"100/10.0.0.4/32\": peer: no peer named \"host-x\""), "{error}");
    let error = apply(&lab.hosts[0], vec![delete(Kind::Port, "a")]).unwrap_err();
    assert!(error.contains("belongs to the configuration file"), "{error}");
    // The corrected batch succeeds.
    apply(&lab.hosts[0], vec![port(&c, 3), route("host-b", 4)]).unwrap();
    assert_eq!(ping(&c, "10.0.0.1", 3, 56), 3);
    assert_eq!(ping(lab.net("a"), "10.0.0.2", 3, 56), 3);
}

#[test]
fn applied_objects_survive_a_crash() {
    let mut lab = Lab::running(Options::default());
    let state = lab.hosts[0].state_directory();
    std::fs::create_dir(&state).unwrap();
    lab.hosts[0].stop();
    lab.hosts[0].start();
    let c = Net::new(lab.tag(), "c");
    apply(&lab.hosts[0], vec![port(&c, 3), route("host-b", 4)]).unwrap();
    apply(&lab.hosts[0], vec![delete(Kind::Route, "100/10.0.0.4/32"), route("host-b", 5)]).unwrap();
    let objects = |lab: &Lab| lab.hosts[0].client.objects(&ObjectsQuery::default()).unwrap().objects;
    let before = objects(&lab);
    lab.hosts[0].crash();
    lab.hosts[0].start();
    assert_eq!(objects(&lab), before);
    assert_eq!(ping(&c, "10.0.0.1", 3, 56), 3);

    // Damage is logged, and the file's objects exist.
    lab.hosts[0].crash();
    let journal = state.join("objects.journal");
    let damaged = std::fs::read_to_string(&journal).unwrap().replace("host-b", "host-c");
    std::fs::write(&journal, damaged).unwrap();
    lab.hosts[0].start();
    assert_eq!(lab.hosts[0].client.ports().unwrap().len(), 1);
    assert!(lab.hosts[0].log().contains("is damaged: its checksum"), "{}", lab.hosts[0].log());
    assert!(state.join("objects.journal.damaged").is_file());
    assert_eq!(ping(lab.net("a"), "10.0.0.2", 3, 56), 3);
    apply(&lab.hosts[0], vec![port(&c, 3)]).unwrap();
    assert_eq!(ping(&c, "10.0.0.1", 3, 56), 3);
}
