//! Load balancers, NAT, route tables, mirrors and flow logs: what is refused, and what is chosen.

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

/// The same with an uplink of the host.
fn with_uplink() -> Model {
    let mut model = base();
    make(&mut model, vec![set("host/h1", host(1))]);
    model
}

fn host(n: u32) -> Value {
    let uplink = json!({"addresses": [format!("203.0.113.{n}/24")], "device": "wan"});
    json!({"addresses": [format!("192.0.2.{n}")], "uplink": uplink})
}

#[test]
fn nat_that_is_not_right_is_refused() {
    let mut model = with_uplink();
    make(&mut model, vec![set("nat_gateway/demo/one", json!({"vpc": "net", "addresses": ["198.51.100.1"]}))]);
    let floating = json!({"guest": "web1", "address": "198.51.100.50"});
    make(&mut model, vec![set("floating_ip/demo/one", floating)]);
    let gateway = |more: Value| {
        let mut spec = json!({"vpc": "other", "addresses": ["198.51.100.2"]});
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        ("nat_gateway/demo/x", spec)
    };
    let floating = |more: Value| {
        let mut spec = json!({"guest": "web2", "address": "198.51.100.51"});
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        ("floating_ip/demo/x", spec)
    };
    let uplink = |more: Value| {
        let mut spec = host(2);
        spec["uplink"].as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        ("host/h2", spec)
    };
    let cases = [
        (gateway(json!({"vpc": "none"})), "nat_gateway/demo/x: vpc: there is no vpc/demo/none; add it"),
        (gateway(json!({"vpc": "net"})), "nat_gateway/demo/x: vpc: vpc/demo/net is in use by nat_gateway/demo/one"),
        (gateway(json!({"addresses": []})), "nat_gateway/demo/x: addresses: 0 given; there are 1 to 256"),
        (
            gateway(json!({"addresses": ["198.51.100.2", "2001:db8::1"]})),
            "addresses[1]: 2001:db8::1 is of another family than 198.51.100.2; name one family",
        ),
        (gateway(json!({"addresses": ["198.51.100.2", "198.51.100.2"]})), "addresses[1]: 198.51.100.2 is named twice"),
        (gateway(json!({"addresses": ["198.51.100.1"]})), "198.51.100.1 is in use by nat_gateway/demo/one"),
        (gateway(json!({"addresses": ["198.51.100.50"]})), "198.51.100.50 is in use by floating_ip/demo/one"),
        (gateway(json!({"addresses": ["203.0.113.1"]})), "203.0.113.1 is in use by host/h1"),
        (gateway(json!({"addresses": ["127.0.0.1"]})), "addresses[0]: 127.0.0.1 cannot be an address outside"),
        (
            gateway(json!({"addresses": ["2001:db8::1"]})),
            "vpc/demo/other has no IPv6 subnet, whose router is the way out",
        ),
        (gateway(json!({"ports_per_host": 63})), "nat_gateway/demo/x: ports_per_host: 63 is not in 64..=64512"),
        (gateway(json!({"ports_per_host": 100, "ports_per_guest": 101})), "ports_per_guest: 101 is not in 1..=100"),
        (floating(json!({"guest": "no"})), "floating_ip/demo/x: guest: there is no port/demo/no"),
        (
            floating(json!({"guest": "web1"})),
            "10.0.0.2 of port/demo/web1 has the outside address of floating_ip/demo/one",
        ),
        (floating(json!({"address": "198.51.100.1"})), "address: 198.51.100.1 is in use by nat_gateway/demo/one"),
        (floating(json!({"address": null})), "address: missing: name an address, or a pool, which is an address set"),
        (floating(json!({"address": null, "pool": "no"})), "pool: there is no address_set/demo/no"),
        (floating(json!({"guest": "far", "address": "2001:db8::7"})), "guest: port/demo/far has no IPv6 address"),
        (floating(json!({"inside": "10.0.0.2"})), "inside: 10.0.0.2 is not an IPv4 address of port/demo/web2"),
        (uplink(json!({"vni": 4096})), "host/h2: uplink.vni: 4096 is in use by vpc/demo/net"),
        (uplink(json!({"addresses": ["203.0.113.1/24"]})), "uplink.addresses[0]: 203.0.113.1 is in use by host/h1"),
        (uplink(json!({"security_groups": []})), "host/h2: uplink.security_groups: an uplink has none; remove it"),
        (("vpc/demo/x", json!({"vni": 4095})), "vpc/demo/x: vni: 4095 is in use by host/h1"),
        (
            ("port/demo/x", json!({"subnets": ["a"], "host": "h1", "netns": "x", "routed": ["0.0.0.0/0"]})),
            "port/demo/x: routed[0]: 0.0.0.0/0 is in use by nat_gateway/demo/one",
        ),
        (
            ("port/demo/x", json!({"subnets": ["a"], "host": "h1", "device": "wan"})),
            "device: interface wan of host h1 is in use by host/h1",
        ),
    ];
    // The guest has what it needs only as long as its host has.
    make(&mut model, vec![set("host/h3", json!({"addresses": ["192.0.2.3"]}))]);
    let moved = json!({"subnets": ["a"], "host": "h3", "netns": "web1"});
    assert_refused(
        &mut model,
        vec![set("port/demo/web1", moved)],
        "floating_ip/demo/one: guest: h3 of port/demo/web1 has no uplink",
    );
    for ((key, spec), expected) in cases {
        // JSON's null is no value.
        assert_refused(&mut model, vec![set(key, spec)], expected);
    }
}

#[test]
fn hosts_get_blocks_and_keep_them() {
    let mut model = with_uplink();
    let gateway = |addresses: &[&str], ports: u32| {
        set("nat_gateway/demo/out", json!({"vpc": "net", "addresses": addresses, "ports_per_host": ports}))
    };
    let port = |n: u32, host: u32| {
        set(&format!("port/demo/g{n}"), json!({"subnets": ["a"], "host": format!("h{host}"), "netns": format!("g{n}")}))
    };
    make(&mut model, vec![gateway(&["198.51.100.1"], 30_000), set("host/h2", host(2)), set("host/h3", host(3))]);
    let blocks = |model: &Model| spec(model, "nat_gateway/demo/out")["blocks"].clone();
    let block = |n: u32| {
        let first = 1024 + n % 2 * 30_000;
        json!({"address": format!("198.51.100.{}", 1 + n / 2), "ports": [first, first + 29_999]})
    };
    assert_eq!(blocks(&model), json!({"h1": block(0)}), "only its guests need it");
    let plan = plan(&mut model, vec![port(2, 2), port(3, 2)]).unwrap();
    let keys: Vec<String> = plan.writes.iter().map(|(key, _)| key.to_string()).collect();
    assert_eq!(keys, ["port/demo/g2", "port/demo/g3", "nat_gateway/demo/out"], "one more than was asked for");
    assert_eq!((plan.unchanged, plan.writes[2].1.as_ref().unwrap().generation), (0, 2));
    make(&mut model, vec![port(2, 2), port(3, 2)]);
    assert_eq!(blocks(&model), json!({"h1": block(0), "h2": block(1)}));
    let expected = "nat_gateway/demo/out: addresses: there are ports for 2 hosts, and none for h3; name more addresses";
    assert_refused(&mut model, vec![port(4, 3)], expected);
    // A host whose guests have gone gives its block to those that need it, not before.
    make(&mut model, vec![delete("port/demo/g2"), delete("port/demo/g3")]);
    assert_eq!(blocks(&model), json!({"h1": block(0), "h2": block(1)}));
    make(&mut model, vec![port(4, 3)]);
    assert_eq!(blocks(&model), json!({"h1": block(0), "h3": block(1)}));
    // More addresses: what was given stays. Without blocks in the change, too.
    make(&mut model, vec![gateway(&["198.51.100.1", "198.51.100.2"], 30_000), port(5, 2)]);
    assert_eq!(blocks(&model), json!({"h1": block(0), "h2": block(2), "h3": block(1)}));
    let unchanged = gateway(&["198.51.100.1", "198.51.100.2"], 30_000);
    assert_eq!(self::plan(&mut model, vec![unchanged]).unwrap(), Plan { writes: vec![], unchanged: 1 });
    // Blocks of another size are other ones.
    make(&mut model, vec![gateway(&["198.51.100.2"], 20_000)]);
    let ports =
        |model: &Model| blocks(model).as_object().unwrap().values().map(|b| b["ports"].clone()).collect::<Vec<_>>();
    assert_eq!(ports(&model), [json!([1024, 21_023]), json!([21_024, 41_023]), json!([41_024, 61_023])]);
    // A host gets an uplink after its guests.
    make(
        &mut model,
        vec![gateway(&["198.51.100.2"], 10_000), set("host/h4", json!({"addresses": ["192.0.2.4"]})), port(6, 4)],
    );
    assert!(blocks(&model).get("h4").is_none());
    make(&mut model, vec![set("host/h4", host(4))]);
    assert_eq!(blocks(&model)["h4"]["ports"], json!([31_024, 41_023]));
}

#[test]
fn floating_addresses_come_from_pools() {
    let mut model = with_uplink();
    let floating = |guest: &str| json!({"guest": guest, "pool": "public"});
    make(
        &mut model,
        vec![
            set("address_set/demo/public", json!({"addresses": ["198.51.100.0/30", "198.51.100.77/32"]})),
            set("floating_ip/demo/one", floating("web1")),
            set("floating_ip/demo/two", floating("web2")),
        ],
    );
    assert_eq!(spec(&model, "floating_ip/demo/one")["address"], "198.51.100.1");
    assert_eq!(spec(&model, "floating_ip/demo/two")["address"], "198.51.100.2");
    make(&mut model, vec![set("floating_ip/demo/far", floating("far"))]);
    assert_eq!(spec(&model, "floating_ip/demo/far")["address"], "198.51.100.77");
    make(&mut model, vec![delete("floating_ip/demo/far")]);
    make(&mut model, vec![set("floating_ip/demo/far", json!({"guest": "far", "address": "198.51.100.77"}))]);
    let more = json!({"subnets": ["a"], "host": "h1", "netns": "more"});
    let expected =
        "floating_ip/demo/more: pool: no address of address_set/demo/public is free; add some, or name an address";
    assert_refused(
        &mut model,
        vec![set("port/demo/more", more), set("floating_ip/demo/more", floating("more"))],
        expected,
    );
    assert_refused(&mut model, vec![delete("port/demo/web1")], "port/demo/web1: is in use by floating_ip/demo/one");
}

#[test]
fn tables_and_mirrors_that_are_not_right_are_refused() {
    let mut model = base();
    let routes = |routes: Value| ("route_table/demo/x", json!({"vpc": "net", "routes": routes}));
    let mirror = |more: Value| {
        let mut spec = json!({"target": "192.0.2.9:4789", "target_vni": 7});
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        ("mirror/demo/x", spec)
    };
    let many: Vec<Value> = (0..65).map(|n| json!({"prefix": format!("172.16.{n}.0/24"), "guest": "web2"})).collect();
    let taken = json!({"subnets": ["a"], "host": "h1", "netns": "web1", "routed": ["172.30.0.0/16"]});
    make(&mut model, vec![set("port/demo/web1", taken)]);
    let cases = [
        (
            routes(json!([{"prefix": "172.16.0.1/16", "guest": "web1"}])),
            "172.16.0.1/16 has host bits set; write 172.16.0.0/16",
        ),
        (
            routes(json!([{"prefix": "172.16.0.0/16", "guest": "web1"}, {"prefix": "172.16.0.0/16", "guest": "web2"}])),
            "route_table/demo/x: routes[1].prefix: 172.16.0.0/16 is named twice; keep one",
        ),
        (
            routes(json!([{"prefix": "172.30.0.0/16", "guest": "web2"}])),
            "route_table/demo/x: routes[0].prefix: 172.30.0.0/16 is in use by port/demo/web1",
        ),
        (routes(json!([{"prefix": "10.0.0.1/32", "guest": "web1"}])), "10.0.0.1/32 is in use by subnet/demo/a"),
        (routes(json!([{"prefix": "172.16.0.0/16", "guest": "no"}])), "routes[0].guest: there is no port/demo/no"),
        (
            routes(json!([{"prefix": "172.16.0.0/16", "guest": "far"}])),
            "routes[0].guest: port/demo/far is of vpc/demo/other, not of vpc/demo/net",
        ),
        (
            routes(json!([{"prefix": "fd05::/64", "guest": "web1"}])),
            "routes[0].guest: port/demo/web1 has no IPv6 address",
        ),
        (routes(json!(many)), "port/demo/web2 would have more than 64 prefixes; take another guest"),
        (("route_table/demo/x", json!({"vpc": "no"})), "route_table/demo/x: vpc: there is no vpc/demo/no"),
        (mirror(json!({})), "mirror/demo/x: name a vpc, or guests, which are ports of the project"),
        (mirror(json!({"vpc": "net", "guests": ["web1"]})), "mirror/demo/x: name a vpc, or guests"),
        (mirror(json!({"guests": ["web1", "web1"]})), "mirror/demo/x: guests: one is named twice; keep it once"),
        (mirror(json!({"guests": ["no"]})), "mirror/demo/x: guests[0]: there is no port/demo/no"),
        (
            mirror(json!({"vpc": "net", "ports": ["web1"]})),
            "mirror/demo/x: ports: follows from other objects; remove it",
        ),
        (
            mirror(json!({"vpc": "net", "target": "here"})),
            "mirror/demo/x: target: \"here\" is not an address with a port",
        ),
        (mirror(json!({"vpc": "net", "colour": 1})), "mirror/demo/x: colour: unknown key"),
    ];
    for ((key, spec), expected) in cases {
        assert_refused(&mut model, vec![set(key, spec)], expected);
    }
    let table = |guest: &str| set("route_table/demo/x", routes(json!([{"prefix": "172.16.0.0/16", "guest": guest}])).1);
    make(&mut model, vec![table("web1"), set("mirror/demo/x", mirror(json!({"guests": ["web1"]})).1)]);
    let expected = "port/demo/web1: is in use by route_table/demo/x and 1 more; change or delete them first";
    assert_refused(&mut model, vec![delete("port/demo/web1")], expected);
    // The port says what the table says already.
    let routed = json!({"subnets": ["a"], "host": "h1", "netns": "web1", "routed": ["172.16.0.0/16"]});
    let expected = "port/demo/web1: routed[0]: 172.16.0.0/16 is in use by route_table/demo/x";
    assert_refused(&mut model, vec![set("port/demo/web1", routed)], expected);
    let quota = json!({"quota": {"route_tables": 1, "mirrors": 1}});
    make(&mut model, vec![set("project/demo", quota), table("web2")]);
    assert_refused(
        &mut model,
        vec![set("mirror/demo/y", mirror(json!({"vpc": "net"})).1)],
        "quota.mirrors: there are 1",
    );
}

#[test]
fn flow_logs_that_are_not_right_are_refused() {
    let mut model = base();
    let log = |more: Value| {
        let mut spec = json!({"collector": "192.0.2.9:4739"});
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        ("flow_log/demo/x", spec)
    };
    let cases = [
        (log(json!({})), "flow_log/demo/x: name a vpc, or guests, which are ports of the project"),
        (log(json!({"vpc": "net", "guests": ["web1"]})), "flow_log/demo/x: name a vpc, or guests"),
        (log(json!({"guests": ["web1", "web1"]})), "flow_log/demo/x: guests: one is named twice; keep it once"),
        (log(json!({"guests": ["no"]})), "flow_log/demo/x: guests[0]: there is no port/demo/no"),
        (log(json!({"vpc": "no"})), "flow_log/demo/x: vpc: there is no vpc/demo/no"),
        (log(json!({"vpc": "net", "vpcs": [7]})), "flow_log/demo/x: vpcs: follows from other objects; remove it"),
        (("flow_log/demo/x", json!({"vpc": "net"})), "flow_log/demo/x: collector: missing: name an IPFIX collector"),
        (log(json!({"vpc": "net", "collector": "here"})), "collector: \"here\" is not an address with a port"),
        (log(json!({"vpc": "net", "json": "/etc/cron.d/x"})), "flow_log/demo/x: json: invalid type: string"),
        (log(json!({"vpc": "net", "record": "rules"})), "flow_log/demo/x: record: \"rules\" is not one of"),
        (log(json!({"vpc": "net", "rules_json": "/x"})), "flow_log/demo/x: rules_json: unknown key"),
        (log(json!({"vpc": "net", "flows": 20_000})), "flow_log/demo/x: flows: 20000 is more than 16384"),
        (log(json!({"vpc": "net", "json_mb": 1001})), "flow_log/demo/x: json_mb: 1001 is more than 1000"),
        (log(json!({"vpc": "net", "flows": -1})), "flow_log/demo/x: flows: -1 is not in 64..=1048576"),
    ];
    for ((key, spec), expected) in cases {
        assert_refused(&mut model, vec![set(key, spec)], expected);
    }
    make(&mut model, vec![set("flow_log/demo/x", log(json!({"guests": ["web1"]})).1)]);
    let expected = "port/demo/web1: is in use by flow_log/demo/x; change or delete that first";
    assert_refused(&mut model, vec![delete("port/demo/web1")], expected);
    make(&mut model, vec![set("project/demo", json!({"quota": {"flow_logs": 1}}))]);
    let another = set("flow_log/demo/y", log(json!({"vpc": "net"})).1);
    assert_refused(&mut model, vec![another], "quota.flow_logs: there are 1");
}

/// Makes flow logs and mirrors of a guest, each `count`.
fn observe(model: &mut Model, guest: &str, count: usize) {
    let log = |n| set(&format!("flow_log/demo/{guest}-{n}"), json!({"guests": [guest], "collector": "192.0.2.9:4739"}));
    let mirror = |n| {
        let spec = json!({"guests": [guest], "target": "192.0.2.9:4789", "target_vni": 7});
        set(&format!("mirror/demo/{guest}-{n}"), spec)
    };
    make(model, (0..count).flat_map(|n| [log(n), mirror(n)]).collect());
}

#[test]
fn a_host_gets_no_more_flow_logs_and_mirrors_than_it_takes() {
    let collector = "192.0.2.9:4739";
    let of_vpc = |vpc: &str| json!({"vpc": vpc, "collector": collector});
    let of_guest = |guest: &str| json!({"guests": [guest], "collector": collector});
    let port = |host: &str| json!({"subnets": ["b"], "host": host, "netns": "more"});
    let mut model = base();
    make(&mut model, vec![set("host/h2", json!({"addresses": ["192.0.2.2"]}))]);
    observe(&mut model, "web1", 63);
    let full = "host h1 would have 64 flow logs, and takes 63: flow_log/demo/x, flow_log/demo/web1-0, ";
    for scope in [of_guest("web1"), of_guest("far"), of_vpc("net"), of_vpc("other")] {
        assert_refused(&mut model, vec![set("flow_log/demo/x", scope)], &format!("flow_log/demo/x: {full}"));
    }
    assert_refused(
        &mut model,
        vec![
            set("mirror/demo/x", json!({"vpc": "net", "target": "192.0.2.9:4789", "target_vni": 7})),
            set("mirror/demo/y", json!({"guests": ["far"], "target": "192.0.2.9:4789", "target_vni": 7})),
        ],
        "mirror/demo/x: host h1 would have 65 mirrors, and takes 64: mirror/demo/x, mirror/demo/y, mirror/demo/web1-0, \
         mirror/demo/web1-1, mirror/demo/web1-10, and 60 more; delete some, or move guests to other hosts",
    );
    // Another host takes it; and then no guest of it comes here.
    make(&mut model, vec![set("port/demo/elsewhere", port("h2"))]);
    make(&mut model, vec![set("flow_log/demo/x", of_guest("elsewhere"))]);
    let moves = vec![set("port/demo/elsewhere", port("h1"))];
    assert_refused(&mut model, moves.clone(), &format!("port/demo/elsewhere: {full}"));
    // One goes, and another one comes.
    let mut swapped = moves;
    swapped.push(delete("flow_log/demo/web1-7"));
    make(&mut model, swapped);
    // A log of its VPC comes with the first guest.
    make(&mut model, vec![delete("port/demo/far"), delete("flow_log/demo/x"), delete("port/demo/elsewhere")]);
    make(&mut model, vec![set("flow_log/demo/y", of_vpc("other")), set("flow_log/demo/z", of_vpc("other"))]);
    let first = vec![set("port/demo/first", port("h1"))];
    assert_refused(&mut model, first.clone(), "port/demo/first: host h1 would have 64 flow logs, and takes 63");
    make(&mut model, vec![delete("flow_log/demo/z")]);
    make(&mut model, first);
    // What an earlier relay has let through holds up nothing else.
    let spec = bifrost_intent::Spec::parse(bifrost_intent::Kind::FlowLog, &of_guest("web1")).unwrap();
    let stored = Stored { spec, generation: 1, committed_ms: 1 };
    model.set("flow_log/demo/foreign".parse().unwrap(), stored);
    make(&mut model, vec![set("port/demo/second", json!({"subnets": ["b"], "host": "h1", "netns": "second"}))]);
    make(
        &mut model,
        vec![set("flow_log/demo/y", json!({"vpc": "other", "collector": collector, "record": "rejected"}))],
    );
    make(&mut model, vec![delete("flow_log/demo/web1-1")]);
}
