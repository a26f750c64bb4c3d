//! Sets of objects that are right together, made of a seed.

use std::collections::BTreeMap;
use std::sync::Arc;

use bifrost_control::Config;
use bifrost_control::config::{Kind, Object};
use bifrost_control::objects::{Id, Store};
use fastrand::Rng;
use serde_json::{Value, json};

pub(super) type Objects = BTreeMap<Id, Arc<Object>>;

/// The model's file. What is in it is nobody else's.
const FILE: &str = r#"
[host]
name = "host-a"
[underlay]
addresses = ["192.0.2.1"]
[[peer]]
name = "host-b"
addresses = ["192.0.2.2"]
[[vpc]]
vni = 100
"#;

pub(super) fn store() -> Store {
    Store::new(Arc::new(Config::parse(FILE, "t").unwrap()))
}

pub(super) fn object(kind: Kind, spec: &Value) -> (Id, Arc<Object>) {
    let object = Object::parse(kind, spec, 1).unwrap_or_else(|e| panic!("{spec}: {e:?}"));
    (Id::of(&object), Arc::new(object))
}

/// Some of a few names, in any order.
fn some(rng: &mut Rng, prefix: &str, most: usize) -> Vec<String> {
    let mut names: Vec<_> = (1..=most).filter(|_| rng.u8(..10) < 7).map(|n| format!("{prefix}{n}")).collect();
    rng.shuffle(&mut names);
    names
}

fn few(rng: &mut Rng, of: &[String]) -> Vec<String> {
    of.iter().filter(|_| rng.u8(..10) < 3).cloned().collect()
}

/// Another seed, other objects; the same names, addresses and devices in other hands.
pub(super) fn world(seed: u64) -> Objects {
    let mut rng = Rng::with_seed(seed);
    let rng = &mut rng;
    let mut objects = Objects::new();
    let mut add = |kind, spec: Value| objects.extend([object(kind, &spec)]);
    let sets = some(rng, "set", 3);
    for name in &sets {
        add(Kind::AddressSet, json!({"name": name, "addresses": [format!("10.9.{}.0/24", rng.u8(..))]}));
    }
    let groups = some(rng, "group", 4);
    for name in &groups {
        let named = few(rng, &groups).into_iter().map(|g| format!("group:{g}"));
        let named: Vec<_> = named.chain(few(rng, &sets).into_iter().map(|s| format!("set:{s}"))).collect();
        let rules = if named.is_empty() { json!([]) } else { json!([{"protocol": "tcp", "from": named}]) };
        add(Kind::SecurityGroup, json!({"name": name, "ingress": rules}));
    }
    let peers = some(rng, "peer", 4);
    let mut underlay: Vec<u8> = (10..16).collect();
    rng.shuffle(&mut underlay);
    for (name, n) in peers.iter().zip(underlay) {
        add(Kind::Peer, json!({"name": name, "addresses": [format!("192.0.2.{n}")]}));
    }
    let vnis: Vec<usize> = (1..=3).filter(|_| rng.u8(..10) < 8).collect();
    let mut names = some(rng, "port", 12);
    let mut devices: Vec<u8> = (0..16).collect();
    rng.shuffle(&mut devices);
    let mut ports = Vec::new();
    for vni in &vnis {
        let gateway = format!("10.{vni}.0.{}", 250 + rng.u8(..2));
        add(Kind::Vpc, json!({"vni": vni, "gateway": [gateway]}));
        let mut macs: Vec<u8> = (1..=8).collect();
        rng.shuffle(&mut macs);
        let mut hosts: Vec<u8> = (1..=12).collect();
        rng.shuffle(&mut hosts);
        for mac in macs.into_iter().take(rng.usize(..8)) {
            let mac = format!("02:00:00:00:00:{mac:02x}");
            let Some(host) = hosts.pop() else { break };
            let security_groups = few(rng, &groups);
            if rng.bool() && !names.is_empty() && !devices.is_empty() {
                let (name, device) = (names.pop(), devices.pop());
                let mut spec = json!({"name": name, "vni": vni, "mac": mac, "netns": "n",
                    "device": format!("e{}", device.unwrap()), "addresses": [format!("10.{vni}.0.{host}/24")],
                    "security_groups": security_groups});
                if rng.bool() {
                    spec["default_gateway"] = gateway.clone().into();
                }
                add(Kind::Port, spec);
                ports.extend(name);
            } else if let Some(peer) = rng.choice(&peers) {
                // One address, or two behind one MAC address.
                for host in std::iter::once(host).chain(hosts.pop().filter(|_| rng.bool())) {
                    add(
                        Kind::Route,
                        json!({"vni": vni, "prefix": format!("10.{vni}.0.{host}/32"), "peer": peer,
                        "mac": mac, "security_groups": security_groups}),
                    );
                }
            }
        }
        for other in vnis.iter().filter(|other| *other > vni) {
            if rng.u8(..10) < 3 {
                for (from, to) in [(vni, other), (other, vni)] {
                    let prefix = format!("10.{to}.0.0/24");
                    add(Kind::Peering, json!({"vni": from, "prefix": prefix, "to_vni": to}));
                }
            }
        }
    }
    let mirrored = few(rng, &ports);
    if !mirrored.is_empty() {
        add(Kind::Mirror, json!({"name": "mirror", "ports": mirrored, "target": "192.0.2.9:4789", "target_vni": 9}));
    }
    let logged = few(rng, &ports);
    let logged_vpcs: Vec<usize> = vnis.iter().copied().filter(|_| rng.bool()).collect();
    if !logged.is_empty() || !logged_vpcs.is_empty() {
        add(
            Kind::VpcFlowLog,
            json!({"name": "log", "ports": logged, "vpcs": logged_vpcs, "collector": "192.0.2.9:4739"}),
        );
    }
    objects
}
