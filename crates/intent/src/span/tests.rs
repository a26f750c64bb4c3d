//! Changes one by one against an oracle that says for each host, from the objects alone, what it needs.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use bifrost_control::Config;
use bifrost_control::config::{Kind as HostKind, Object};
use ipnet::IpNet;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::{HostChanges, ItemId, Spans};
use crate::compile::contributions;
use crate::key::{Key, Kind};
use crate::model::Model;
use crate::plan::{Batch, Change, Op, PlanError};
use crate::resolve::Hop;
use crate::span::Topic;
use crate::spec::Spec;
use crate::withdrawn::Withdrawn;

fn set(key: &str, spec: Value) -> Change {
    Change { op: Op::Set, key: key.parse().unwrap(), spec: Some(spec), if_generation: None }
}

fn delete(key: &str) -> Change {
    Change { op: Op::Delete, key: key.parse().unwrap(), spec: None, if_generation: None }
}

/// A model, its spans, and what hosts have after all that they were told.
#[derive(Default)]
struct World {
    model: Model,
    spans: Spans,
    hosts: BTreeMap<Arc<str>, HostChanges>,
    now_ms: u64,
}

impl World {
    fn make(&mut self, changes: Vec<Change>) -> Result<BTreeMap<Arc<str>, HostChanges>, PlanError> {
        self.now_ms += 1;
        let plan = self.model.plan(&Batch { changes }, self.now_ms)?;
        let mut changed = Vec::new();
        for (key, now) in plan.writes {
            let before = match now {
                Some(stored) => self.model.set(key.clone(), stored),
                None => self.model.remove(&key),
            };
            changed.push((key, before));
        }
        let told = self.spans.change(&self.model, &changed, &|_| true);
        self.tell(&told);
        Ok(told)
    }

    fn withdraw(&mut self, host: &str, withdrawn: Option<Withdrawn>) -> BTreeMap<Arc<str>, HostChanges> {
        self.model.set_withdrawn(host, withdrawn);
        let told = self.spans.withdraw(&self.model, host, &|_| true);
        self.tell(&told);
        told
    }

    fn tell(&mut self, told: &BTreeMap<Arc<str>, HostChanges>) {
        for (host, changes) in told {
            let has = self.hosts.entry(Arc::clone(host)).or_default();
            for (id, item) in changes {
                match item {
                    Some(_) => drop(has.insert(id.clone(), item.clone())),
                    None => drop(has.remove(id)),
                }
            }
        }
    }

    fn ids(&self, host: &str) -> Vec<String> {
        let has = self.hosts.get(host).into_iter().flatten();
        has.map(|(id, _)| format!("{} {}", id.kind, id.key)).collect()
    }

    fn spec(&self, host: &str, kind: HostKind, key: &str) -> Value {
        let item = &self.hosts[host][&ItemId { kind, key: key.into() }];
        serde_json::from_str(&item.as_ref().unwrap().spec).unwrap()
    }
}

/// What a host needs, from the definition: of each VPC with a port here its load balancers and its
/// NAT; of these, and of those connected with one of these, the settings, the hosts, and a route to
/// each port elsewhere; the ways of the connections; whole groups of its ports with their sets, and
/// the names of all other groups that a route or a rule here names.
fn needed(model: &Model, host: &str) -> BTreeMap<ItemId, Value> {
    let ports: Vec<&Key> = model.iter().map(|(key, _)| key).filter(|key| key.kind() == Kind::Port).collect();
    let port = |key: &Key| model.port(key).unwrap();
    let here: Vec<&&Key> = ports.iter().filter(|key| port(key).host == host).collect();
    let local: BTreeSet<Key> = here.iter().map(|key| model.vpc_of(key, port(key)).unwrap()).collect();
    let mut seen = local.clone();
    let mut peerings = BTreeSet::new();
    for (key, stored) in model.iter() {
        if let Spec::Peering(spec) = &stored.spec {
            let pair = spec.vpcs.each_ref().map(|name| key.sibling(Kind::Vpc, name));
            if pair.iter().any(|vpc| local.contains(vpc)) {
                seen.extend(pair);
                peerings.insert(key.clone());
            }
        }
    }
    let reachable: Vec<&&Key> =
        ports.iter().filter(|key| seen.contains(&model.vpc_of(key, port(key)).unwrap())).collect();
    let groups_of = |keys: &[&&Key]| -> BTreeSet<Key> {
        let of_port = |key: &&&Key| {
            let names = port(key).security_groups.clone();
            names.into_iter().map(|name| key.sibling(Kind::SecurityGroup, &name)).collect::<Vec<_>>()
        };
        keys.iter().flat_map(of_port).collect()
    };
    let whole = groups_of(&here);
    let mut names = groups_of(&reachable);
    let mut sets = BTreeSet::new();
    for group in &whole {
        for (_, to) in model.get(group).unwrap().spec.references(group) {
            if to.kind() == Kind::AddressSet { &mut sets } else { &mut names }.insert(to);
        }
    }
    let hosts: BTreeSet<&str> = reachable.iter().map(|key| port(key).host.as_str()).collect();

    let mut all = BTreeMap::new();
    for (key, _) in model.iter() {
        for c in contributions(model, key) {
            let wanted = match &c.topic {
                // A host without ports needs no uplink.
                Topic::Host(name) => name == host && !here.is_empty(),
                Topic::Peer(name) => name != host && hosts.contains(name.as_str()),
                Topic::Vpc(vpc) => seen.contains(vpc) && c.except.as_deref() != Some(host),
                // Hosts ask for them.
                Topic::Routes(_) => false,
                Topic::Inside(vpc) => local.contains(vpc),
                Topic::Nat(gateway, name) => {
                    let spec = model.nat_gateway(gateway).unwrap();
                    name == host && local.contains(&gateway.sibling(Kind::Vpc, &spec.vpc))
                }
                Topic::Peering(peering) => peerings.contains(peering),
                Topic::Group(group) => whole.contains(group),
                Topic::GroupName(group) => names.contains(group) && !whole.contains(group),
                Topic::Set(set) => sets.contains(set),
            };
            if wanted {
                assert_eq!(all.insert(c.id.clone(), c.spec), None, "{:?} twice", c.id);
            }
        }
    }
    all
}

/// Everything that a host has makes a configuration that its `bifrostd` takes.
fn assert_host_takes(host: &str, has: &HostChanges) {
    let number: u32 = host[1..].parse().unwrap();
    let file =
        format!("[host]\nname = \"{host}\"\n[underlay]\naddresses = [\"192.0.2.{number}\"]\n[workers]\ncount = 2\n");
    let mut config = Config::parse(&file, "test").unwrap();
    for (id, item) in has {
        let spec = serde_json::from_str(&item.as_ref().unwrap().spec).unwrap();
        let object = Object::parse(id.kind, &spec, 2).unwrap_or_else(|e| panic!("{host}: {id:?} {spec}: {e:?}"));
        assert_eq!(object.key(), id.key);
        config.push(object);
    }
    config.check_relations().unwrap_or_else(|e| panic!("{host}: {e:?}"));
}

fn base() -> World {
    let mut world = World::default();
    let host = |n: u32| set(&format!("host/h{n}"), json!({"addresses": [format!("192.0.2.{n}")]}));
    let subnet = |vpc: &str, prefix: &str| json!({"vpc": vpc, "prefix": prefix});
    world
        .make(vec![
            host(1),
            host(2),
            host(3),
            set("vpc/demo/red", json!({})),
            set("vpc/demo/blue", json!({"vni": 77})),
            set("subnet/demo/red-a", subnet("red", "10.1.0.0/29")),
            set("subnet/demo/red-6", subnet("red", "fd00:1::/64")),
            set("subnet/demo/blue-a", subnet("blue", "10.2.0.0/24")),
            set("address_set/demo/office", json!({"addresses": ["198.51.100.0/24"]})),
            set(
                "security_group/demo/web",
                json!({"ingress": [{"protocol": "tcp", "ports": [80], "from": ["set:office"]}]}),
            ),
            set("security_group/demo/db", json!({"ingress": [{"from": ["group:web"]}]})),
        ])
        .unwrap();
    world
}

fn port(subnet: &str, host: u32, groups: &[&str], netns: &str) -> Value {
    json!({"subnets": [subnet], "host": format!("h{host}"), "netns": netns, "security_groups": groups})
}

#[test]
fn hosts_get_what_concerns_them() {
    let mut world = base();
    assert!(world.hosts.is_empty());
    world.make(vec![set("port/demo/a", port("red-a", 1, &["db"], "a"))]).unwrap();
    assert_eq!(
        world.ids("h1"),
        ["security_group demo.db", "security_group demo.web", "vpc 4096", "port demo.a"],
        "no other host has a port"
    );
    world.make(vec![set("port/demo/b", port("red-a", 2, &["web"], "b"))]).unwrap();
    assert_eq!(
        world.ids("h1"),
        [
            "security_group demo.db",
            "security_group demo.web",
            "peer h2",
            "vpc 4096",
            "port demo.a",
            "route 4096/10.1.0.3/32"
        ]
    );
    assert_eq!(
        world.ids("h2"),
        [
            "security_group demo.db",
            "security_group demo.web",
            "address_set demo.office",
            "peer h1",
            "vpc 4096",
            "port demo.b",
            "route 4096/10.1.0.2/32",
        ]
    );
    assert_eq!(
        world.spec("h1", HostKind::SecurityGroup, "demo.web"),
        json!({"name": "demo.web"}),
        "its rules do not matter"
    );
    assert_eq!(
        world.spec("h2", HostKind::SecurityGroup, "demo.web")["ingress"],
        json!([{"protocol": "tcp", "ports": [80], "from": ["set:demo.office"]}])
    );
    assert_eq!(
        world.spec("h1", HostKind::Route, "4096/10.1.0.3/32"),
        json!({"vni": 4096, "prefix": "10.1.0.3/32", "peer": "h2", "mac": "02:00:0a:01:00:03", "security_groups": ["demo.web"]})
    );
    assert_eq!(
        world.spec("h1", HostKind::Port, "demo.a"),
        json!({"name": "demo.a", "vni": 4096, "mac": "02:00:0a:01:00:02", "addresses": ["10.1.0.2/29"], "netns": "a",
               "device": "eth0", "default_gateway": "10.1.0.1", "security_groups": ["demo.db"]})
    );
    // Another network is none of theirs.
    let told = world.make(vec![set("port/demo/c", port("blue-a", 3, &[], "c"))]).unwrap();
    assert_eq!(told.keys().map(|host| &**host).collect::<Vec<_>>(), ["h3"]);
    // Until they are connected.
    world.make(vec![set("peering/demo/rb", json!({"vpcs": ["red", "blue"]}))]).unwrap();
    assert!(world.ids("h1").contains(&"route 77/10.2.0.2/32".to_owned()), "{:?}", world.ids("h1"));
    assert!(world.ids("h3").contains(&"peering 77/10.1.0.0/29".to_owned()), "{:?}", world.ids("h3"));
    // A port moves: where it was there is a route to it, and where it is there is none.
    let told = world.make(vec![set("port/demo/b", port("red-a", 1, &["web"], "b"))]).unwrap();
    assert_eq!(told["h1"].iter().filter(|(id, _)| id.kind == HostKind::Route).count(), 1);
    assert!(!world.ids("h1").contains(&"route 4096/10.1.0.3/32".to_owned()));
    assert_eq!(world.ids("h2"), Vec::<String>::new(), "the last port has left");
    world.make(vec![delete("port/demo/a"), delete("port/demo/b"), delete("port/demo/c")]).unwrap();
    assert!(world.hosts.values().all(HostChanges::is_empty), "{:?}", world.hosts);
}

#[test]
fn hosts_learn_what_is_to_be_learned() {
    let mut world = base();
    world.make(vec![set("vpc/demo/blue", json!({"learned": ["10.0.0.0/8"]}))]).unwrap();
    let mut routed = port("blue-a", 2, &[], "b");
    routed["routed"] = json!(["172.16.0.0/24", "10.9.0.0/16"]);
    world.make(vec![set("port/demo/a", port("blue-a", 1, &[], "a")), set("port/demo/b", routed)]).unwrap();
    assert_eq!(world.ids("h1"), ["peer h2", "vpc 77", "port demo.a", "route 77/172.16.0.0/24"]);
    assert_eq!(world.spec("h1", HostKind::Vpc, "77")["learned"], json!(["10.0.0.0/8"]));
    let resolve = |world: &World, host: &str, address: &str| {
        let resolved = world.spans.resolve(&world.model, host, 77, address.parse().unwrap())?;
        Some((resolved.range.to_string(), resolved.hop.map(|hop| hop.host.to_string())))
    };
    let answer = |range: &str, host: Option<&str>| Some((range.to_owned(), host.map(str::to_owned)));
    assert_eq!(resolve(&world, "h1", "10.2.0.3"), answer("10.2.0.3/32", Some("h2")));
    assert_eq!(resolve(&world, "h1", "10.9.7.7"), answer("10.9.0.0/16", Some("h2")));
    assert_eq!(resolve(&world, "h1", "10.2.0.4"), answer("10.2.0.4/30", None));
    assert_eq!(resolve(&world, "h2", "10.2.0.3"), answer("10.2.0.3/32", None), "it has it");
    assert_eq!(resolve(&world, "h1", "172.16.0.1"), None, "that is pushed");
    assert_eq!(resolve(&world, "h3", "10.2.0.3"), None, "it has nothing to do with the VPC");
    world.spans.take_rerouted();
    world.make(vec![set("port/demo/b", port("blue-a", 3, &[], "b"))]).unwrap();
    let mut rerouted = world.spans.take_rerouted();
    rerouted.sort_unstable();
    assert_eq!(rerouted, [(77, "10.2.0.3/32".parse().unwrap()), (77, "10.9.0.0/16".parse().unwrap())]);
    assert_eq!(resolve(&world, "h1", "10.2.0.3"), answer("10.2.0.3/32", Some("h3")));
    // As if a host learned nothing.
    world.make(vec![set("vpc/demo/blue", json!({}))]).unwrap();
    assert_eq!(world.ids("h1"), ["peer h3", "vpc 77", "port demo.a", "route 77/10.2.0.3/32"]);
    assert_eq!(resolve(&world, "h1", "10.2.0.3"), None);
}

#[test]
fn what_hosts_could_not_learn_is_refused() {
    let refused = |world: &mut World, changes: Vec<Change>| {
        let error = world.make(changes).unwrap_err();
        error.0.into_iter().map(|problem| problem.field).collect::<Vec<_>>()
    };
    let mut world = base();
    let learned = |prefixes: &[&str]| set("vpc/demo/red", json!({"learned": prefixes}));
    assert_eq!(refused(&mut world, vec![learned(&["10.0.0.1/8"])]), ["learned[0]"]);
    let many: Vec<String> = (0..17).map(|n| format!("10.{n}.0.0/16")).collect();
    assert_eq!(refused(&mut world, vec![learned(&many.iter().map(|p| &**p).collect::<Vec<_>>())]), ["learned"]);
    // A group whose rules name groups, whichever comes first.
    world.make(vec![set("port/demo/a", port("red-a", 1, &["db"], "a"))]).unwrap();
    assert_eq!(refused(&mut world, vec![learned(&["10.0.0.0/8"])]), ["learned"]);
    world.make(vec![set("port/demo/a", port("red-a", 1, &["web"], "a")), learned(&["10.0.0.0/8"])]).unwrap();
    assert_eq!(refused(&mut world, vec![set("port/demo/a", port("red-a", 1, &["db"], "a"))]), ["security_groups"]);
    let web = set("security_group/demo/web", json!({"ingress": [{"from": ["group:db"]}]}));
    assert_eq!(refused(&mut world, vec![web]), ["ingress[0].from"]);
    // Routes in one another.
    let routed = |prefixes: &[&str]| {
        let mut spec = port("red-a", 2, &[], "b");
        spec["routed"] = json!(prefixes);
        set("port/demo/b", spec)
    };
    // The port's own address, too, is in what is behind it.
    for wide in ["10.1.0.0/16", "0.0.0.0/0"] {
        assert_eq!(refused(&mut world, vec![routed(&[wide])]), ["addresses[0]", "routed[0]"]);
    }
    world.make(vec![routed(&["10.9.0.0/16", "192.168.0.0/16", "192.168.1.0/24"])]).unwrap();
    let table =
        |prefix: &str| set("route_table/demo/t", json!({"vpc": "red", "routes": [{"prefix": prefix, "guest": "a"}]}));
    assert_eq!(refused(&mut world, vec![table("10.9.1.0/24")]), ["routes[0].prefix"]);
    assert_eq!(refused(&mut world, vec![table("10.0.0.0/8")]), ["routes[0].prefix"]);
    world.make(vec![table("10.10.0.0/16")]).unwrap();
    assert_eq!(refused(&mut world, vec![learned(&["10.0.0.0/8", "192.168.0.0/16"])]), ["learned"]);
}

#[test]
fn load_balancers_are_where_their_clients_are() {
    let mut world = base();
    let balancer = |guests: &[&str]| {
        let backends: Vec<_> = guests.iter().map(|guest| json!({"guest": guest, "port": 8080})).collect();
        json!({"subnet": "red-a", "port": 80, "backends": backends, "check": {"interval_ms": 500}})
    };
    world
        .make(vec![
            set("port/demo/a", port("red-a", 1, &[], "a")),
            set("port/demo/b", port("red-a", 2, &[], "b")),
            set("port/demo/c", port("blue-a", 3, &[], "c")),
            set("peering/demo/rb", json!({"vpcs": ["red", "blue"]})),
            set("load_balancer/demo/web", balancer(&["a"])),
        ])
        .unwrap();
    let has = |world: &World, host: &str| world.ids(host).contains(&"load_balancer demo.web".to_owned());
    assert_eq!(
        [has(&world, "h1"), has(&world, "h2"), has(&world, "h3")],
        [true, true, false],
        "a peered VPC has none of it"
    );
    let expected = |backends: &Value| json!({"name": "demo.web", "vni": 4096, "address": "10.1.0.4", "port": 80, "backend": backends, "check": {"interval_ms": 500}});
    let spec = |world: &World| world.spec("h2", HostKind::LoadBalancer, "demo.web");
    assert_eq!(spec(&world), expected(&json!([{"address": "10.1.0.2", "port": 8080}])));
    // A backend's address changes, and its host.
    let moved = json!({"subnets": ["red-a"], "host": "h3", "netns": "a", "addresses": ["10.1.0.6"]});
    world.make(vec![set("port/demo/a", moved)]).unwrap();
    assert_eq!(spec(&world), expected(&json!([{"address": "10.1.0.6", "port": 8080}])));
    assert_eq!([has(&world, "h1"), has(&world, "h2"), has(&world, "h3")], [false, true, true]);
    let why = world.spans.why(&world.model, &"load_balancer/demo/web".parse().unwrap());
    assert_eq!(why.into_iter().map(|(host, _)| host.to_string()).collect::<Vec<_>>(), ["h2", "h3"]);
    world.make(vec![delete("load_balancer/demo/web")]).unwrap();
    assert!(!has(&world, "h2") && !has(&world, "h3"));
}

#[test]
fn what_is_on_a_dead_host_is_withdrawn() {
    let mut world = base();
    let backends = |guests: &[&str]| json!(guests.iter().map(|guest| json!({"guest": guest})).collect::<Vec<_>>());
    let mut routed = port("red-a", 2, &[], "b");
    routed["routed"] = json!(["172.16.0.0/24"]);
    world
        .make(vec![
            set("port/demo/a", port("red-a", 1, &[], "a")),
            set("port/demo/b", routed),
            set("port/demo/c", port("red-a", 3, &[], "c")),
            set("port/demo/d", port("blue-a", 2, &[], "d")),
            set("port/demo/e", port("blue-a", 1, &[], "e")),
            set("vpc/demo/blue", json!({"learned": ["10.0.0.0/8"]})),
            set(
                "load_balancer/demo/web",
                json!({"subnet": "red-a", "port": 80, "backends": backends(&["a", "b", "c"])}),
            ),
            set("load_balancer/demo/one", json!({"subnet": "red-a", "port": 80, "backends": backends(&["b"])})),
        ])
        .unwrap();
    let backends_on = |world: &World, host: &str, name: &str| -> Vec<String> {
        let spec = world.spec(host, HostKind::LoadBalancer, name);
        let address = |backend: &Value| backend["address"].as_str().unwrap().to_owned();
        spec["backend"].as_array().unwrap().iter().map(address).collect()
    };
    let routes = |world: &World, host: &str| -> Vec<String> {
        world.ids(host).into_iter().filter(|id| id.starts_with("route 4096/")).collect()
    };
    let resolve = |world: &World, address: &str| world.spans.resolve(&world.model, "h1", 77, address.parse().unwrap());
    let all = [backends_on(&world, "h1", "demo.web"), routes(&world, "h1")];
    assert_eq!(all[0], ["10.1.0.2", "10.1.0.3", "10.1.0.4"]);
    let of_b = ["route 4096/10.1.0.3/32".to_owned(), "route 4096/172.16.0.0/24".to_owned()];
    assert!(of_b.iter().all(|route| all[1].contains(route)), "{all:?}");

    world.withdraw("h2", Some(Withdrawn::Backends));
    for host in ["h1", "h2", "h3"] {
        assert_eq!(backends_on(&world, host, "demo.web"), ["10.1.0.2", "10.1.0.4"]);
        assert_eq!(backends_on(&world, host, "demo.one"), ["10.1.0.3"], "the last one stays");
    }
    assert_eq!(routes(&world, "h1"), all[1], "the data plane may live");
    assert!(resolve(&world, "10.2.0.2").unwrap().hop.is_some());

    world.spans.take_rerouted();
    world.withdraw("h2", Some(Withdrawn::Routes));
    assert!(!routes(&world, "h1").iter().any(|route| of_b.contains(route)), "{:?}", routes(&world, "h1"));
    assert_eq!(resolve(&world, "10.2.0.2").unwrap().hop, None);
    assert_eq!(world.spans.take_rerouted(), [(77, "10.2.0.2/32".parse().unwrap())], "who has learned it is told");
    let has_port = world.ids("h2").contains(&"port demo.b".to_owned());
    assert!(has_port && routes(&world, "h2").len() == 2, "it is told the same as ever: {:?}", world.ids("h2"));

    // A port moves to a host that lives, and is what it was.
    world.make(vec![set("port/demo/b", port("red-a", 3, &[], "b"))]).unwrap();
    assert_eq!(backends_on(&world, "h1", "demo.web"), ["10.1.0.2", "10.1.0.3", "10.1.0.4"]);
    assert!(routes(&world, "h1").contains(&of_b[0]));
    world.make(vec![set("port/demo/b", port("red-a", 2, &[], "b"))]).unwrap();
    assert_eq!(backends_on(&world, "h1", "demo.web"), ["10.1.0.2", "10.1.0.4"]);

    // Everything is back as it was with the host.
    let told = world.withdraw("h2", None);
    assert_eq!(told.keys().map(|host| &**host).collect::<Vec<_>>(), ["h1", "h2", "h3"]);
    assert_eq!(backends_on(&world, "h1", "demo.web"), all[0]);
    assert!(routes(&world, "h1").contains(&of_b[0]) && resolve(&world, "10.2.0.2").unwrap().hop.is_some());
    assert!(world.withdraw("h9", Some(Withdrawn::Routes)).is_empty(), "a host that nobody knows concerns nobody");
}

#[test]
fn each_host_translates_with_its_own_ports() {
    let mut world = base();
    let host = |n: u32| {
        json!({"addresses": [format!("192.0.2.{n}")],
               "uplink": {"addresses": [format!("203.0.113.{n}/24")], "device": "wan"}})
    };
    world
        .make(vec![
            set("host/h1", host(1)),
            set("host/h2", host(2)),
            set("port/demo/a", port("red-a", 1, &[], "a")),
            set("port/demo/c", port("red-a", 3, &[], "c")),
            set(
                "nat_gateway/demo/out",
                json!({"vpc": "red", "addresses": ["198.51.100.1"], "ports_per_host": 1000, "ports_per_guest": 100}),
            ),
        ])
        .unwrap();
    let nat = |ports: [u16; 2]| json!({"vni": 4096, "uplink": "fleet-uplink", "addresses": ["198.51.100.1"], "ports": ports, "ports_per_guest": 100});
    assert_eq!(world.spec("h1", HostKind::Nat, "4096"), nat([1024, 2023]));
    assert_eq!(
        world.spec("h1", HostKind::Port, "fleet-uplink"),
        json!({"name": "fleet-uplink", "vni": 4095, "mac": "02:00:c0:00:02:01", "addresses": ["203.0.113.1/24"], "device": "wan"})
    );
    assert!(!world.ids("h3").contains(&"nat 4096".to_owned()), "it has no uplink");
    // Another host gets its first guest, and with it the next block.
    world.make(vec![set("port/demo/b", port("red-a", 2, &[], "b"))]).unwrap();
    assert_eq!(world.spec("h2", HostKind::Nat, "4096"), nat([2024, 3023]));
    world.make(vec![set("floating_ip/demo/b", json!({"guest": "b", "address": "198.51.100.9"}))]).unwrap();
    let floating = json!({"vni": 4096, "uplink": "fleet-uplink", "address": "198.51.100.9", "inside": "10.1.0.4"});
    assert_eq!(world.spec("h2", HostKind::FloatingIp, "fleet-uplink/198.51.100.9"), floating);
    // The guest moves, and its outside address with it.
    world.make(vec![set("port/demo/b", port("red-a", 1, &[], "b"))]).unwrap();
    assert_eq!(world.spec("h1", HostKind::FloatingIp, "fleet-uplink/198.51.100.9"), floating);
    assert_eq!(world.ids("h2"), Vec::<String>::new());
    world.make(vec![set("port/demo/b2", port("red-a", 2, &[], "b"))]).unwrap();
    assert_eq!(world.spec("h2", HostKind::Nat, "4096"), nat([2024, 3023]), "it has kept its block");
    world.make(vec![set("host/h2", json!({"addresses": ["192.0.2.2"]}))]).unwrap();
    assert!(!world.ids("h2").iter().any(|id| id.contains("uplink") || id.starts_with("nat")), "{:?}", world.ids("h2"));
    world.make(vec![set("host/h2", host(2)), set("host/h3", host(3))]).unwrap();
    assert_eq!(world.spec("h2", HostKind::Nat, "4096"), nat([2024, 3023]));
    assert_eq!(world.spec("h3", HostKind::Nat, "4096"), nat([3024, 4023]));
    world.make(vec![delete("nat_gateway/demo/out"), delete("floating_ip/demo/b")]).unwrap();
    assert!(
        world.hosts.values().all(|has| has.keys().all(|id| !matches!(id.kind, HostKind::Nat | HostKind::FloatingIp)))
    );
}

#[test]
fn tables_and_mirrors_are_where_their_guests_are() {
    let mut world = base();
    world
        .make(vec![
            set("port/demo/a", port("red-a", 1, &[], "a")),
            set("port/demo/b", port("red-a", 2, &[], "b")),
            set("port/demo/c", port("blue-a", 3, &[], "c")),
            set("route_table/demo/vpn", json!({"vpc": "red", "routes": [{"prefix": "172.16.0.0/16", "guest": "a"}]})),
            set("mirror/demo/all", json!({"vpc": "red", "target": "192.0.2.9:4789", "target_vni": 7})),
            set("mirror/demo/some", json!({"guests": ["b", "c"], "target": "192.0.2.9:4789", "target_vni": 8})),
        ])
        .unwrap();
    assert_eq!(world.spec("h1", HostKind::Port, "demo.a")["routed"], json!(["172.16.0.0/16"]));
    assert_eq!(world.spec("h2", HostKind::Route, "4096/172.16.0.0/16")["peer"], "h1");
    let key: Key = "route_table/demo/vpn".parse().unwrap();
    let why = world.spans.why(&world.model, &key);
    assert_eq!(why.into_iter().map(|(host, _)| host.to_string()).collect::<Vec<_>>(), ["h1", "h2"]);
    assert_eq!(world.spec("h1", HostKind::Mirror, "demo.all")["vpcs"], json!([4096]));
    assert_eq!(world.spec("h2", HostKind::Mirror, "demo.some")["ports"], json!(["demo.b"]));
    assert_eq!(world.spec("h3", HostKind::Mirror, "demo.some")["ports"], json!(["demo.c"]));
    // Another guest routes; another host mirrors.
    let table = json!({"vpc": "red", "routes": [{"prefix": "172.16.0.0/16", "guest": "b"}]});
    world.make(vec![set("route_table/demo/vpn", table), set("port/demo/c", port("blue-a", 2, &[], "c"))]).unwrap();
    assert_eq!(world.spec("h1", HostKind::Route, "4096/172.16.0.0/16")["peer"], "h2");
    assert_eq!(world.spec("h1", HostKind::Port, "demo.a").get("routed"), None);
    assert_eq!(world.spec("h2", HostKind::Mirror, "demo.some")["ports"], json!(["demo.b", "demo.c"]));
    assert!(world.ids("h3").is_empty());
    world.make(vec![delete("route_table/demo/vpn"), delete("mirror/demo/all"), delete("mirror/demo/some")]).unwrap();
    assert_eq!(world.ids("h1"), ["peer h2", "vpc 4096", "port demo.a", "route 4096/10.1.0.3/32"]);
}

#[test]
fn flow_logs_are_where_their_guests_are() {
    let mut world = base();
    let collector = "192.0.2.9:4739";
    world
        .make(vec![
            set("port/demo/a", port("red-a", 1, &[], "a")),
            set("port/demo/b", port("red-a", 2, &[], "b")),
            set("port/demo/c", port("blue-a", 3, &[], "c")),
            set("flow_log/demo/red", json!({"vpc": "red", "json": true, "record": "rejected"})),
            set("flow_log/demo/some", json!({"guests": ["b", "c"], "collector": collector})),
        ])
        .unwrap();
    let red =
        json!({"name": "demo.red", "vpcs": [4096], "json": "/var/log/bifrost/demo.red.jsonl", "record": "rejected"});
    assert_eq!(world.spec("h1", HostKind::VpcFlowLog, "demo.red"), red);
    assert_eq!(world.spec("h2", HostKind::VpcFlowLog, "demo.red"), red);
    let some = |ports: Value| json!({"name": "demo.some", "ports": ports, "collector": collector});
    assert_eq!(world.spec("h2", HostKind::VpcFlowLog, "demo.some"), some(json!(["demo.b"])));
    assert_eq!(world.spec("h3", HostKind::VpcFlowLog, "demo.some"), some(json!(["demo.c"])));
    let has = |world: &World, host: &str, name: &str| world.ids(host).contains(&format!("vpc_flow_log demo.{name}"));
    assert!(!has(&world, "h3", "red") && !has(&world, "h1", "some"), "no host has logs of others' guests");
    let why = world.spans.why(&world.model, &"flow_log/demo/red".parse().unwrap());
    assert_eq!(why.into_iter().map(|(host, _)| host.to_string()).collect::<Vec<_>>(), ["h1", "h2"]);
    // The only guest of the VPC leaves the host, and its log with it.
    world.make(vec![set("port/demo/b", port("red-a", 3, &[], "b"))]).unwrap();
    assert!(!has(&world, "h2", "red") && has(&world, "h3", "red"));
    assert_eq!(world.spec("h3", HostKind::VpcFlowLog, "demo.some"), some(json!(["demo.b", "demo.c"])));
    world.make(vec![delete("flow_log/demo/red"), delete("flow_log/demo/some")]).unwrap();
    assert!(world.hosts.values().all(|has| has.keys().all(|id| id.kind != HostKind::VpcFlowLog)));
}

/// Answers that hosts were given about routes that they learn, and that were not corrected.
#[derive(Default)]
struct Asked(BTreeMap<(&'static str, u32, IpNet), Option<Hop>>);

impl Asked {
    /// What was not corrected is still right; and all hosts ask again for some addresses, which have the right answers.
    fn check(&mut self, world: &mut World, fresh: &Spans) {
        let rerouted = world.spans.take_rerouted();
        let overlap = |a: &IpNet, b: &IpNet| a.contains(b) || b.contains(a);
        self.0.retain(|(_, of, range), _| !rerouted.iter().any(|(vni, prefix)| of == vni && overlap(range, prefix)));
        for ((host, vni, range), hop) in &self.0 {
            // Otherwise the host forgets it, because the VPC is gone, or learns elsewhere.
            let Some(now) = world.spans.resolve(&world.model, host, *vni, range.addr()) else { continue };
            assert_eq!(now.hop, *hop, "{host} {vni} {range}");
        }
        let addresses =
            ["10.1.0.2", "10.1.0.3", "10.1.0.7", "10.2.0.2", "10.3.0.2", "172.16.0.9", "172.16.1.9", "fd00:1::2"];
        for (host, vni) in ["h1", "h2", "h3"].iter().flat_map(|host| [4096, 4097, 77].map(|vni| (*host, vni))) {
            for address in addresses.map(|address| address.parse::<IpAddr>().unwrap()) {
                let resolved = world.spans.resolve(&world.model, host, vni, address);
                assert_eq!(resolved, fresh.resolve(&world.model, host, vni, address));
                let Some(resolved) = resolved else { continue };
                assert_eq!(resolved.hop, at(&world.model, host, vni, address), "{host} {vni} {address}");
                self.0.retain(|(of, known, range), _| (*of, *known) != (host, vni) || !overlap(range, &resolved.range));
                self.0.insert((host, vni, resolved.range), resolved.hop);
            }
        }
    }
}

/// Where an address is that a host asks for, from the ports alone.
fn at(model: &Model, host: &str, vni: u32, address: IpAddr) -> Option<Hop> {
    let mut best: Option<(u8, Hop)> = None;
    for (key, _) in model.iter() {
        for c in contributions(model, key) {
            let Topic::Routes(vpc) = &c.topic else { continue };
            let prefix: IpNet = serde_json::from_value(c.spec["prefix"].clone()).unwrap();
            let is_longer = best.as_ref().is_none_or(|(length, _)| prefix.prefix_len() > *length);
            if model.vni(vpc) == Some(vni) && prefix.contains(&address) && is_longer {
                let mac = c.spec["mac"].as_str().unwrap().parse().unwrap();
                best = Some((prefix.prefix_len(), Hop { host: c.except.unwrap().as_str().into(), mac }));
            }
        }
    }
    best.map(|(_, hop)| hop).filter(|hop| *hop.host != *host)
}

/// A change of random objects.
fn change() -> impl Strategy<Value = Change> {
    let name = |names: &'static [&'static str]| prop::sample::select(names);
    let subnet = name(&["red-a", "red-6", "blue-a", "green-a"]);
    let groups = prop::collection::btree_set(name(&["web", "db", "none"]), 0..3);
    let routed = prop::collection::btree_set(name(&["172.16.0.0/24", "172.16.1.0/24"]), 0..2);
    prop_oneof![
        8 => (0..8u32, subnet, 1..4u32, groups, routed).prop_map(|(n, subnet, host, groups, routed)| {
            let routed: BTreeSet<_> = routed.into_iter().filter(|_| subnet != "red-6").collect();
            let groups: Vec<_> = groups.into_iter().collect();
            let mut spec = port(subnet, host, &groups, &format!("n{n}"));
            spec["routed"] = json!(routed);
            set(&format!("port/demo/p{n}"), spec)
        }),
        5 => (0..8u32).prop_map(|n| delete(&format!("port/demo/p{n}"))),
        1 => Just(set("vpc/demo/green", json!({}))),
        1 => Just(delete("vpc/demo/green")),
        3 => (name(&["red", "blue", "green"]), prop::sample::select(vec![
            json!([]), json!(["10.0.0.0/8"]), json!(["10.2.0.0/24", "172.16.0.0/24"]), json!(["0.0.0.0/0", "::/0"]),
        ])).prop_map(|(vpc, learned)| set(&format!("vpc/demo/{vpc}"), json!({"learned": learned}))),
        1 => Just(set("subnet/demo/green-a", json!({"vpc": "green", "prefix": "10.3.0.0/24"}))),
        1 => Just(set("subnet/demo/green-b", json!({"vpc": "green", "prefix": "10.4.0.0/24", "gateway": "10.4.0.9"}))),
        1 => name(&["green-a", "green-b", "red-6"]).prop_map(|name| delete(&format!("subnet/demo/{name}"))),
        2 => name(&["web", "db", "none"]).prop_map(|n| delete(&format!("security_group/demo/{n}"))),
        3 => (name(&["web", "db", "none"]), name(&["group:web", "group:none", "set:office", "10.0.0.0/8"]))
            .prop_map(|(n, from)| set(&format!("security_group/demo/{n}"), json!({"ingress": [{"from": [from]}], "egress": []}))),
        1 => (1..255u32).prop_map(|n| set("address_set/demo/office", json!({"addresses": [format!("198.51.{n}.0/24")]}))),
        1 => Just(delete("address_set/demo/office")),
        2 => name(&["red", "green"]).prop_map(|to| set(&format!("peering/demo/b-{to}"), json!({"vpcs": ["blue", to]}))),
        1 => name(&["red", "green"]).prop_map(|to| delete(&format!("peering/demo/b-{to}"))),
        4 => (0..3u32, name(&["red-a", "red-6", "blue-a"]), prop::collection::btree_set(0..8u32, 1..3)).prop_map(|(n, subnet, guests)| {
            let backends: Vec<_> = guests.into_iter().map(|n| json!({"guest": format!("p{n}"), "port": 8080})).collect();
            set(&format!("load_balancer/demo/l{n}"), json!({"subnet": subnet, "port": 80, "backends": backends}))
        }),
        1 => (0..3u32).prop_map(|n| delete(&format!("load_balancer/demo/l{n}"))),
        2 => (1..4u32, name(&["auto", "plain"]), any::<bool>()).prop_map(|(n, transport, has_uplink)| {
            let mut spec = json!({"addresses": [format!("192.0.2.{n}")], "transport": transport});
            if has_uplink {
                spec["uplink"] = json!({"addresses": [format!("203.0.113.{n}/24")], "device": "wan"});
            }
            set(&format!("host/h{n}"), spec)
        }),
        2 => (name(&["red", "blue", "green"]), 1..4u32, 1..3u32).prop_map(|(vpc, addresses, parts)| {
            let first = vpc.len() * 10;
            let addresses: Vec<_> = (0..addresses).map(|n| format!("198.51.100.{}", first as u32 + n)).collect();
            set(&format!("nat_gateway/demo/{vpc}"), json!({"vpc": vpc, "addresses": addresses, "ports_per_host": 60_000 / parts}))
        }),
        1 => name(&["red", "blue", "green"]).prop_map(|vpc| delete(&format!("nat_gateway/demo/{vpc}"))),
        2 => (0..3u32, 0..8u32).prop_map(|(n, guest)| {
            let spec = json!({"guest": format!("p{guest}"), "address": format!("198.51.100.{}", 100 + n)});
            set(&format!("floating_ip/demo/f{n}"), spec)
        }),
        1 => (0..3u32).prop_map(|n| delete(&format!("floating_ip/demo/f{n}"))),
        2 => (name(&["red", "blue"]), prop::collection::btree_map(0..4u32, 0..8u32, 0..3)).prop_map(|(vpc, routes)| {
            let route = |(n, guest)| json!({"prefix": format!("172.16.{n}.0/24"), "guest": format!("p{guest}")});
            let routes: Vec<_> = routes.into_iter().map(route).collect();
            set(&format!("route_table/demo/{vpc}"), json!({"vpc": vpc, "routes": routes}))
        }),
        1 => name(&["red", "blue"]).prop_map(|vpc| delete(&format!("route_table/demo/{vpc}"))),
        2 => (0..2u32, prop::option::of(name(&["red", "green"])), prop::collection::btree_set(0..8u32, 1..4)).prop_map(|(n, vpc, guests)| {
            let mut spec = json!({"target": "192.0.2.9:4789", "target_vni": 7});
            match vpc {
                Some(vpc) => spec["vpc"] = json!(vpc),
                None => spec["guests"] = json!(guests.into_iter().map(|n| format!("p{n}")).collect::<Vec<_>>()),
            }
            set(&format!("mirror/demo/m{n}"), spec)
        }),
        1 => (0..2u32).prop_map(|n| delete(&format!("mirror/demo/m{n}"))),
        2 => (0..2u32, prop::option::of(name(&["red", "green"])), prop::collection::btree_set(0..8u32, 1..4), any::<bool>())
            .prop_map(|(n, vpc, guests, json)| {
                let mut spec = if json { json!({"json": true}) } else { json!({"collector": "192.0.2.9:4739"}) };
                match vpc {
                    Some(vpc) => spec["vpc"] = json!(vpc),
                    None => spec["guests"] = json!(guests.into_iter().map(|n| format!("p{n}")).collect::<Vec<_>>()),
                }
                set(&format!("flow_log/demo/l{n}"), spec)
            }),
        1 => (0..2u32).prop_map(|n| delete(&format!("flow_log/demo/l{n}"))),
    ]
}

/// What is withdrawn of a host, or no longer.
fn death() -> impl Strategy<Value = (u32, Option<Withdrawn>)> {
    (1..4u32, prop::sample::select(vec![None, Some(Withdrawn::Backends), Some(Withdrawn::Routes)]))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// Whatever is changed, and in whatever batches: what hosts were told one by one is what they need.
    #[test]
    fn changes_one_by_one_lead_where_all_at_once_does(
        batches in prop::collection::vec((prop::collection::vec(change(), 1..4), prop::option::of(death())), 1..40),
    ) {
        let mut world = base();
        let mut asked = Asked::default();
        for (batch, death) in batches {
            let mut died = BTreeMap::new();
            if let Some((host, withdrawn)) = death {
                died = world.withdraw(&format!("h{host}"), withdrawn);
            }
            let objects: Vec<_> = world.model.iter().map(|(key, stored)| (key.clone(), stored.clone())).collect();
            let Ok(mut concerned) = world.make(batch) else {
                let after: Vec<_> = world.model.iter().map(|(key, stored)| (key.clone(), stored.clone())).collect();
                prop_assert_eq!(after, objects, "a batch that is refused changes nothing");
                continue;
            };
            concerned.append(&mut died);
            let mut fresh = Spans::of(&world.model);
            prop_assert!(fresh.take_rerouted().is_empty());
            asked.check(&mut world, &fresh);
            for host in ["h1", "h2", "h3"] {
                let wanted = needed(&world.model, host);
                let has = world.hosts.get(host).cloned().unwrap_or_default();
                let told: BTreeMap<ItemId, Value> = has
                    .iter()
                    .map(|(id, item)| (id.clone(), serde_json::from_str(&item.as_ref().unwrap().spec).unwrap()))
                    .collect();
                prop_assert_eq!(&told, &wanted, "{}", host);
                prop_assert!(world.spans.of_host(host).keys().eq(has.keys()), "{}", host);
                prop_assert_eq!(fresh.of_host(host).len(), has.len());
                if concerned.contains_key(host) {
                    assert_host_takes(host, &has);
                }
            }
        }
    }
}

proptest! {
    /// Whatever another program has written, also what contradicts itself: the same.
    #[test]
    fn spans_follow_also_what_contradicts_itself(changes in prop::collection::vec(change(), 1..60)) {
        let mut world = base();
        for (n, change) in changes.into_iter().enumerate() {
            let before = match &change.spec {
                None => world.model.remove(&change.key),
                Some(spec) => {
                    let mut spec = Spec::parse(change.key.kind(), spec).unwrap();
                    match &mut spec {
                        Spec::Port(port) => {
                            port.addresses = vec![format!("10.1.0.{}", n % 7).parse().unwrap()];
                            port.mac = Some(format!("02:00:00:00:00:{n:02x}").parse().unwrap());
                        }
                        Spec::Vpc(vpc) => vpc.vni = Some(5000 + n as u32),
                        Spec::NatGateway(gateway) => {
                            let block = gateway.all_blocks().next().unwrap();
                            gateway.blocks = (1..=n % 4).map(|host| (format!("h{host}"), block)).collect();
                        }
                        Spec::LoadBalancer(balancer) => {
                            balancer.address = Some(format!("10.1.0.{}", n % 7).parse().unwrap());
                        }
                        _ => {}
                    }
                    let stored = crate::Stored { spec, generation: 1, committed_ms: n as u64 };
                    world.model.set(change.key.clone(), stored)
                }
            };
            let told = world.spans.change(&world.model, &[(change.key, before)], &|_| true);
            for (host, changes) in told {
                let has = world.hosts.entry(host).or_default();
                for (id, item) in changes {
                    match item {
                        Some(_) => drop(has.insert(id, item)),
                        None => drop(has.remove(&id)),
                    }
                }
            }
            let fresh = Spans::of(&world.model);
            for host in ["h1", "h2", "h3"] {
                let has = world.hosts.get(host).cloned().unwrap_or_default();
                let strip = |all: HostChanges| -> BTreeMap<ItemId, String> {
                    all.into_iter().map(|(id, item)| (id, item.unwrap().spec.to_string())).collect()
                };
                prop_assert_eq!(strip(has), strip(fresh.of_host(host)), "{}", host);
            }
        }
    }
}
