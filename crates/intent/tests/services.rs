//! Load balancers: what is refused, and what is chosen.

#![allow(clippy::unwrap_used, missing_docs)]

use bifrost_intent::{Batch, Change, Key, Model, Op, Plan, Stored};
use serde_json::{Value, json};

fn set(key: &str, spec: Value) -> Change {
    Change { op: Op::Set, key: key.parse().unwrap(), spec: Some(spec), if_generation: None }
}

fn delete(key: &str) -> Change {
    Change { op: Op::Delete, key: key.parse().unwrap(), spec: None, if_generation: None }
}

fn plan(model: &mut Model, changes: Vec<Change>) -> Result<Plan, String> {
    model.plan(&Batch { changes }, 7).map_err(|error| error.to_string())
}

fn make(model: &mut Model, changes: Vec<Change>) {
    let plan = plan(model, changes).unwrap_or_else(|error| panic!("{error}"));
    for (key, stored) in plan.writes {
        match stored {
            // As it comes back from the store.
            Some(stored) => drop(model.set(key.clone(), Stored::decode(key.kind(), &stored.encode()).unwrap())),
            None => drop(model.remove(&key)),
        }
    }
}

fn spec(model: &Model, key: &str) -> Value {
    model.get(&key.parse::<Key>().unwrap()).unwrap().spec.value()
}

/// A batch is refused, with these words; what there is stays as it was.
fn assert_refused(model: &mut Model, changes: Vec<Change>, expected: &str) {
    let objects = |model: &Model| model.iter().map(|(k, s)| (k.clone(), s.clone())).collect::<Vec<_>>();
    let before = objects(model);
    let error = plan(model, changes.clone()).unwrap_err();
    assert!(error.contains(expected), "{changes:?}:\n{error}\ninstead of\n{expected}");
    assert_eq!(objects(model), before, "{changes:?}");
}

/// A VPC with two subnets and two guests, and another VPC with a guest.
fn base() -> Model {
    let mut model = Model::default();
    let port = |subnets: Value, netns: &str| json!({"subnets": subnets, "host": "h1", "netns": netns});
    make(
        &mut model,
        vec![
            set("host/h1", json!({"addresses": ["192.0.2.1"]})),
            set("vpc/demo/net", json!({})),
            set("subnet/demo/a", json!({"vpc": "net", "prefix": "10.0.0.0/24"})),
            set("subnet/demo/six", json!({"vpc": "net", "prefix": "fd00::/64"})),
            set("port/demo/web1", port(json!(["a"]), "web1")),
            set("port/demo/web2", port(json!(["a", "six"]), "web2")),
            set("vpc/demo/other", json!({})),
            set("subnet/demo/b", json!({"vpc": "other", "prefix": "10.1.0.0/24"})),
            set("port/demo/far", port(json!(["b"]), "far")),
        ],
    );
    model
}

fn balancer(more: Value) -> Value {
    let mut spec = json!({"subnet": "a", "port": 80, "backends": [{"guest": "web1"}, {"guest": "web2", "weight": 2}]});
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    spec
}

#[test]
fn load_balancers_that_are_not_right_are_refused() {
    let key = "load_balancer/demo/x";
    let cases = [
        (json!({"subnet": "c"}), "load_balancer/demo/x: subnet: there is no subnet/demo/c; add it"),
        (json!({"backends": []}), "load_balancer/demo/x: backends: 0 given; there are 1 to 256"),
        (json!({"backends": [{"guest": "no"}]}), "load_balancer/demo/x: backends[0].guest: there is no port/demo/no"),
        (
            json!({"backends": [{"guest": "far"}]}),
            "load_balancer/demo/x: backends[0].guest: port/demo/far is of vpc/demo/other, not of vpc/demo/net",
        ),
        (
            json!({"subnet": "six", "backends": [{"guest": "web2"}, {"guest": "web1"}]}),
            "load_balancer/demo/x: backends[1].guest: port/demo/web1 has no IPv6 address",
        ),
        (json!({"backends": [{}]}), "load_balancer/demo/x: backends[0]: name a guest, which is a port of the project"),
        (json!({"backends": [{"guest": "web1", "address": "10.0.0.2"}]}), "backends[0]: name a guest, which is"),
        (
            json!({"backends": [{"guest": "web1"}, {"address": "10.0.0.2", "port": 80}]}),
            "load_balancer/demo/x: backends[1]: 10.0.0.2 is named twice with one port; keep one, with a weight",
        ),
        (json!({"backends": [{"address": "fd00::9"}]}), "backends[0]: fd00::9 is of another family than 10.0.0."),
        (
            json!({"address": "10.0.0.9", "backends": [{"address": "10.0.0.9"}]}),
            "backends[0]: 10.0.0.9 is the load balancer's own address; name a guest",
        ),
        (json!({"backends": [{"guest": "web1", "weight": 2000}]}), "backends[0].weight: 2000 is not in 0..=1000"),
        (json!({"backends": [{"guest": "web1", "wait": 1}]}), "unknown field `wait`"),
        (json!({"address": "10.1.0.9"}), "load_balancer/demo/x: address: 10.1.0.9 is not in 10.0.0.0/24"),
        (json!({"address": "10.0.0.255"}), "address: 10.0.0.255 is not the address of a host in 10.0.0.0/24"),
        (json!({"address": "10.0.0.2"}), "load_balancer/demo/x: address: 10.0.0.2 is in use by port/demo/web1"),
        (json!({"address": "10.0.0.1"}), "load_balancer/demo/x: address: 10.0.0.1 is in use by subnet/demo/a"),
        (json!({"port": 0}), "load_balancer/demo/x: port: 0 is not in 1..=65535"),
        (json!({"protocol": "sctp"}), "load_balancer/demo/x: protocol: \"sctp\" is not one of"),
        (json!({"vni": 7}), "load_balancer/demo/x: vni: follows from other objects; remove it"),
        (
            json!({"check": {"from": "web1"}}),
            "check.from: each host asks from a port of the VPC that it has; remove it",
        ),
        (json!({"check": {"rise": 0}}), "load_balancer/demo/x: check.rise: 0 is not in 1..=100"),
        (json!({"colour": "red"}), "load_balancer/demo/x: colour: unknown key"),
    ];
    let mut model = base();
    for (more, expected) in cases {
        assert_refused(&mut model, vec![set(key, balancer(more))], expected);
    }
}

#[test]
fn load_balancers_get_addresses_and_may_share_them() {
    let mut model = base();
    let key = "load_balancer/demo/x";
    make(&mut model, vec![set(key, balancer(json!({})))]);
    assert_eq!(spec(&model, key)["address"], "10.0.0.4", "after the router and the two guests");
    // It stays, and nobody else gets it.
    make(&mut model, vec![set(key, balancer(json!({"port": 81})))]);
    assert_eq!(spec(&model, key)["address"], "10.0.0.4");
    let port = json!({"subnets": ["a"], "host": "h1", "netns": "web3"});
    make(&mut model, vec![set("port/demo/web3", port.clone())]);
    assert_eq!(spec(&model, "port/demo/web3")["addresses"], json!(["10.0.0.5"]));
    let mut taken = port;
    taken["addresses"] = json!(["10.0.0.4"]);
    let expected = "addresses[0]: 10.0.0.4 is in use by load_balancer/demo/x";
    assert_refused(&mut model, vec![set("port/demo/web3", taken)], expected);
    // Another one at another port of the address.
    let shared = |port: u32| balancer(json!({"address": "10.0.0.4", "port": port}));
    make(&mut model, vec![set("load_balancer/demo/y", shared(443))]);
    let expected = "load_balancer/demo/z: port: tcp port 443 of 10.0.0.4 is in use by load_balancer/demo/y";
    assert_refused(&mut model, vec![set("load_balancer/demo/z", shared(443))], expected);
    let udp = balancer(json!({"address": "10.0.0.4", "port": 443, "protocol": "udp"}));
    make(&mut model, vec![set("load_balancer/demo/z", udp)]);
    assert_refused(&mut model, vec![set(key, balancer(json!({"subnet": "six"})))], "subnet: does not change");
    // An address that is named in a batch is not given to another one of it.
    let named = balancer(json!({"address": "10.0.0.6"}));
    let open = json!({"subnets": ["a"], "host": "h1", "netns": "web4"});
    make(&mut model, vec![set("port/demo/web4", open), set("load_balancer/demo/named", named)]);
    assert_eq!(spec(&model, "port/demo/web4")["addresses"], json!(["10.0.0.7"]));
}

#[test]
fn what_load_balancers_use_stays_right() {
    let mut model = base();
    make(&mut model, vec![set("load_balancer/demo/x", balancer(json!({})))]);
    let expected = "port/demo/web1: is in use by load_balancer/demo/x; change or delete that first";
    assert_refused(&mut model, vec![delete("port/demo/web1")], expected);
    let expected = "subnet/demo/a: is in use by port/demo/web1 and 2 more; change or delete them first";
    assert_refused(&mut model, vec![delete("subnet/demo/a")], expected);
    // A guest's new address is that of another backend.
    let both = json!({"backends": [{"guest": "web1"}, {"address": "10.0.0.77"}]});
    make(&mut model, vec![set("load_balancer/demo/x", balancer(both))]);
    let moved = json!({"subnets": ["a"], "host": "h1", "netns": "web1", "addresses": ["10.0.0.77"]});
    let expected = "load_balancer/demo/x: backends[1]: 10.0.0.77 is named twice with one port";
    assert_refused(&mut model, vec![set("port/demo/web1", moved)], expected);
    make(&mut model, vec![set("project/demo", json!({"quota": {"load_balancers": 1}}))]);
    let expected = "there are 1, and would be 2 load_balancers, which is more than 1";
    assert_refused(&mut model, vec![set("load_balancer/demo/y", balancer(json!({})))], expected);
    make(&mut model, vec![delete("port/demo/web1"), delete("load_balancer/demo/x")]);
}
