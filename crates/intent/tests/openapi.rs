//! The description of the API says what the code takes and gives.

#![allow(clippy::unwrap_used, missing_docs)]

use bifrost_intent::api::{
    Applied, Certified, Certify, ChangedObject, Enroll, Enrolled, Frozen, HostCounts, HostProblem, HostStatus, OPENAPI,
    ObjectEntry, Objects, Overview, Status, SubnetOverview, VpcOverview, Waited, Why, WhyHost, schema,
};
use bifrost_intent::{Batch, Change, Key, Kind, Model, Op};
use serde_json::{Value, json};

/// An object of each kind with every key that the schema has, in an order in which they can be
/// made. Keys that exclude each other are in several.
fn objects() -> Vec<Value> {
    let rule = |end: &str| json!({"protocol": "tcp", "ports": [80, "8000-8099"], end: ["10.0.0.0/8", "set:office"], "log": true});
    let backends = json!([{"guest": "web", "port": 8080, "weight": 2}, {"address": "10.0.0.77"}]);
    let check =
        json!({"kind": "http", "path": "/", "port": 81, "interval_ms": 500, "timeout_ms": 100, "rise": 1, "fall": 2});
    let of_mirror = json!({"direction": "egress", "protocol": 6, "prefixes": ["10.0.0.0/8"], "l4_ports": [80, "81-90"], "target": "192.0.2.9:4789",
                           "target_vni": 7, "one_in": 10, "truncate": 128});
    let mirror = |key: &str, what: Value| with(of_mirror.clone(), with(json!({ "key": key }), what));
    let of_log = json!({"collector": "192.0.2.9:4739", "record": "rejected", "one_in": 10, "active_timeout_s": 30, "idle_timeout_s": 5,
                        "flows": 1000, "template_interval_s": 30, "domain": 7, "enterprise": 54321});
    let log = |key: &str, what: Value| with(of_log.clone(), with(json!({ "key": key }), what));
    let limits = json!({"tx_mbit": 100, "tx_kpps": 10, "rx_mbit": 100, "rx_kpps": 10, "queues": 1, "mtu": 1400, "dscp": "copy", "weight": 2,
                        "min_tx_mbit": 10, "rx_queue_kb": 64});
    let port = with(
        limits.clone(),
        json!({"key": "port/demo/web", "subnets": ["a", "six"], "host": "h1", "addresses": ["10.0.0.2", "fd00::2"], "mac": "02:00:00:00:00:01",
               "security_groups": ["web"], "routed": ["172.16.0.0/16"], "kind": "tap", "netns": "web", "device": "eth0",
               "default_gateway": "10.0.0.1",
               "metadata": {"instance_id": "i-1", "hostname": "web", "public_keys": ["ssh-ed25519 AAAA a"], "user_data": "#!/bin/sh"}}),
    );
    let machine = json!({"key": "port/demo/vm", "subnets": ["a"], "host": "h1", "kind": "vhost-user", "socket": "/run/vm.sock", "mode": "client",
                         "packed": false, "slicing": false, "merged": false});
    let uplink = with(
        limits,
        json!({"addresses": ["203.0.113.1/24"], "vni": 4000, "mac": "02:00:00:00:00:09", "device": "wan", "netns": "out",
               "default_gateway": "203.0.113.254"}),
    );
    let quota: Value = (Kind::ALL.iter().filter(|kind| kind.has_project() && **kind != Kind::OutsideGrant))
        .map(|kind| (format!("{kind}s"), json!(9)))
        .collect();
    vec![
        json!({"key": "host/h1", "addresses": ["192.0.2.1", "2001:db8::1"], "transport": "plain", "uplink": uplink}),
        json!({"key": "project/demo", "quota": quota}),
        json!({"key": "outside_grant/demo/all", "prefixes": ["203.0.113.0/28", "203.0.113.20/32"]}),
        json!({"key": "vpc/demo/net", "vni": 100, "reliability": "all", "ordering": "strict", "weight": 3, "dhcp": true, "dhcp_lease_s": 600, "ra_interval_s": 30,
               "dns": ["10.0.0.53"], "domain": "a.internal",
               "acl": [with(json!({"direction": "egress", "action": "deny"}), json!({"protocol": 47, "to": ["10.0.0.0/8"]}))]}),
        json!({"key": "vpc/demo/large", "learned": ["10.0.0.0/8"]}),
        json!({"key": "subnet/demo/a", "vpc": "net", "prefix": "10.0.0.0/24", "gateway": "10.0.0.1"}),
        json!({"key": "subnet/demo/six", "vpc": "net", "prefix": "fd00::/64"}),
        json!({"key": "address_set/demo/office", "addresses": ["198.51.100.0/24", "2001:db8::/32"]}),
        json!({"key": "security_group/demo/web", "ingress": [rule("from")], "egress": [rule("to")]}),
        port,
        machine,
        json!({"key": "vpc/demo/two"}),
        json!({"key": "peering/demo/p", "vpcs": ["net", "two"]}),
        json!({"key": "load_balancer/demo/lb", "subnet": "a", "address": "10.0.0.100", "port": 80, "protocol": "tcp", "affinity": "client",
               "backends": backends, "check": check}),
        json!({"key": "nat_gateway/demo/out", "vpc": "net", "addresses": ["203.0.113.10"], "ports_per_host": 1000, "ports_per_guest": 100,
               "blocks": {"h1": {"address": "203.0.113.10", "ports": [1024, 2023]}}}),
        json!({"key": "floating_ip/demo/f", "guest": "web", "address": "203.0.113.20", "pool": "office", "inside": "10.0.0.2"}),
        json!({"key": "route_table/demo/r", "vpc": "net", "routes": [{"prefix": "172.17.0.0/16", "guest": "web"}]}),
        mirror("mirror/demo/m", json!({"vpc": "net"})),
        mirror("mirror/demo/n", json!({"guests": ["web"]})),
        log("flow_log/demo/l", json!({"vpc": "net", "json": true, "json_mb": 10})),
        log("flow_log/demo/g", json!({"guests": ["web"]})),
    ]
}

fn with(mut one: Value, other: Value) -> Value {
    one.as_object_mut().unwrap().extend(other.as_object().unwrap().clone());
    one
}

/// What a schema finds wrong.
fn wrong(part: &str, value: &Value) -> Vec<String> {
    let validator = jsonschema::validator_for(&schema(part).unwrap()).unwrap();
    validator.iter_errors(value).map(|e| format!("{}: {e}", e.instance_path)).collect()
}

fn assert_right(part: &str, value: &Value) {
    assert_eq!(wrong(part, value), [""; 0], "{part}: {value}");
}

fn change(object: &Value) -> Change {
    let mut spec = object.as_object().unwrap().clone();
    let key: Key = serde_json::from_value(spec.remove("key").unwrap()).unwrap();
    Change { op: Op::Set, key, spec: Some(spec.into()), if_generation: Some(0) }
}

/// The keys that a schema of an object has.
fn keys(schemas: &Value, name: &str) -> Vec<String> {
    schemas[name]["properties"].as_object().unwrap().keys().cloned().collect()
}

#[test]
fn every_key_of_every_kind_is_described_and_taken() {
    let objects = objects();
    assert_right("Document", &json!(objects));
    let batch = Batch { changes: objects.iter().map(change).collect() };
    assert_right("Batch", &serde_json::to_value(&batch).unwrap());
    Model::default().plan(&batch, 1).unwrap_or_else(|error| panic!("{error}"));

    let api: Value = serde_json::from_str(OPENAPI).unwrap();
    let schemas = &api["components"]["schemas"];
    let kinds: Vec<&str> = Kind::ALL.iter().map(|kind| kind.name()).collect();
    assert_eq!(schemas["Kind"]["enum"], json!(kinds));
    for kind in Kind::ALL {
        let camel: String = kind.name().split('_').map(|word| word[..1].to_uppercase() + &word[1..]).collect();
        let of_kind: Vec<Change> = objects.iter().map(change).filter(|change| change.key.kind() == kind).collect();
        for key in keys(schemas, &camel) {
            let is_shown = of_kind.iter().any(|change| change.spec.as_ref().unwrap().get(&key).is_some());
            assert!(is_shown, "no object here has {key} of {kind}: it may not be taken");
        }
        // What the code takes and names in its errors is in the schema.
        let Change { key, spec, .. } = of_kind[0].clone();
        let with_more = with(spec.unwrap(), json!({"zzz": 1}));
        let more = Change { op: Op::Set, key, spec: Some(with_more), if_generation: None };
        let others = objects.iter().map(change).filter(|change| change.key != more.key);
        let error = Model::default().plan(&Batch { changes: others.chain([more.clone()]).collect() }, 1).unwrap_err();
        let problem =
            error.0.iter().find(|problem| problem.what.contains("known") || problem.what.contains("unknown")).unwrap();
        let given = [
            "name",
            "vni",
            "shared",
            "mac",
            "addresses",
            "security_groups",
            "routed",
            "backend",
            "vpcs",
            "ports",
            "gateway",
            "address",
        ];
        let words =
            problem.what.split([' ', ',', '`', ':', ';']).skip_while(|word| *word != "known" && *word != "expected");
        let named = words.filter(|word| !["", "known", "keys", "expected", "one", "of", "or"].contains(word));
        let mut count = 0;
        for word in named.filter(|word| !given.contains(word)) {
            assert!(
                schemas[&camel]["properties"].get(word).is_some(),
                "the schema of {kind} has no {word}: {}",
                problem.what
            );
            count += 1;
        }
        assert!(count > 0 || matches!(kind, Kind::AddressSet | Kind::Peering), "{kind}: {}", problem.what);
    }
}

#[test]
fn what_is_wrong_is_told() {
    for object in [
        json!({}),
        json!({"key": "vpc/net"}),
        json!({"key": "lan/demo/net"}),
        json!({"key": "vpc/demo/net", "colour": "red"}),
        json!({"key": "vpc/demo/net", "vni": 0}),
        json!({"key": "host/h1"}),
        json!({"key": "host/h1", "addresses": ["x"]}),
        json!({"key": "port/demo/p", "subnets": [], "host": "h1"}),
        json!({"key": "subnet/demo/s", "vpc": "net", "prefix": "10.0.0.0"}),
        json!({"key": "load_balancer/demo/l", "subnet": "a", "port": 80, "backends": [{"guest": "a", "address": "10.0.0.1"}]}),
        json!({"key": "load_balancer/demo/l", "subnet": "a", "port": 80, "backends": [{"guest": "a", "from": "x"}]}),
        json!({"key": "mirror/demo/m", "target": "192.0.2.9:4789", "target_vni": 7}),
        json!({"key": "flow_log/demo/l", "collector": "192.0.2.9:4739"}),
        json!({"key": "flow_log/demo/l", "vpc": "net"}),
        json!({"key": "flow_log/demo/l", "vpc": "net", "json": "/etc/passwd"}),
        json!({"key": "flow_log/demo/l", "vpc": "net", "json": false}),
        json!([{"key": "vpc/demo/net"}, {"key": "vpc/demo/net", "subnet": "a"}]),
    ] {
        assert!(!wrong("Document", &object).is_empty(), "{object}");
    }
    let change = |op: &str, spec: Value| json!({"changes": [with(json!({"op": op, "key": "vpc/demo/net"}), spec)]});
    assert_right("Batch", &change("delete", json!({"if_generation": 7})));
    assert_right("Batch", &change("set", json!({"spec": {"vni": 7}})));
    for batch in
        [change("set", json!({})), change("delete", json!({"spec": {}})), change("set", json!({"spec": {"x": 1}}))]
    {
        assert!(!wrong("Batch", &batch).is_empty(), "{batch}");
    }
}

#[test]
fn answers_are_as_described() {
    let key: Key = "vpc/demo/net".parse().unwrap();
    let entry = ObjectEntry { key: key.clone(), generation: 1, committed_ms: 2, spec: json!({"vni": 7}) };
    let problems = vec![HostProblem::default()];
    let host = HostStatus { relay: Some("r".into()), problems, dead_since_ms: Some(1), ..HostStatus::default() };
    let changed = vec![ChangedObject { key: key.clone(), generation: 1, spec: Some(json!({})) }];
    let applied = Applied { revision: 1, changed, unchanged: 2 };
    let objects = Objects { revision: 1, objects: vec![entry.clone()], next: Some(key) };
    let frozen = Some(Frozen { vanished: 1, of: 2 });
    let unreadable = vec![("a".into(), "b".into())];
    let status = Status { hosts: HostCounts::default(), frozen, unreadable, ..Status::default() };
    let waited = Waited { waiting: vec![host.clone()], refusing: vec![host.clone()] };
    let why = Why { object: entry, hosts: vec![WhyHost { host: "h".into(), reason: "r".into(), state: "s".into() }] };
    let subnets = vec![SubnetOverview { name: "a".into(), prefix: "10.0.0.0/24".parse().unwrap(), ports: 1 }];
    let hosts = [("h1".to_owned(), 1)].into();
    let vpc = VpcOverview {
        key: "vpc/demo/net".parse().unwrap(),
        vni: None,
        ports: 1,
        hosts,
        subnets,
        peers: vec!["b".into()],
    };
    let overview = Overview { revision: 1, objects: [(Kind::Vpc, 1)].into(), vpcs: vec![vpc] };
    let roles = vec!["editor:demo".parse().unwrap(), "viewer:*".parse().unwrap()];
    let certify = Certify { name: "a@b".into(), roles: roles.clone(), ttl_s: Some(60), request: "PEM".into() };
    let certified = Certified {
        name: "a@b".into(),
        roles,
        serial: "7f".into(),
        until_ms: 1,
        certificate: "PEM".into(),
        authorities: "PEM".into(),
    };
    let api: Value = serde_json::from_str(OPENAPI).unwrap();
    for (part, value) in [
        ("Applied", json!(applied)),
        ("Objects", json!(objects)),
        ("HostStatus", json!(host)),
        ("Status", json!(status)),
        ("Waited", json!(waited)),
        ("Why", json!(why)),
        ("Overview", json!(overview)),
        ("Enroll", json!(Enroll { host: "h1".into(), ttl_s: Some(1) })),
        ("Certify", json!(certify)),
        ("Certified", json!(certified)),
        ("Enrolled", json!(Enrolled { host: "h1".into(), token: "t".into(), until_ms: 1 })),
    ] {
        assert_right(part, &value);
        let described = keys(&api["components"]["schemas"], part);
        let given: Vec<&String> = value.as_object().unwrap().keys().collect();
        assert!(given.iter().all(|key| described.contains(key)) && given.len() == described.len(), "{part}: {given:?}");
    }
}
