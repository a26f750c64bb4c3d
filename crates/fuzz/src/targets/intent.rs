//! Batches of intent from operators, and records of a store that another program has written: a batch is made or
//! refused as a whole, and what each host is told adds up to what the model as a whole says.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bifrost_control::Config;
use bifrost_control::api::{ApiError, ApplyItem, ApplyOp};
use bifrost_control::config::{MAX_FLOW_LOGS, MAX_MIRRORS};
use bifrost_control::objects::Store;
use bifrost_intent::{Batch, Change, HostChanges, Item, ItemId, Key, Kind, Model, Op, Spans, Stored};
use serde_json::{Value, json};

use crate::Input;

/// Maximum batches and records of an input.
const STEPS: usize = 12;

pub(crate) fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let mut fleet = Fleet::new();
    if input.chance(64) {
        fleet.crowd();
    }
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        match input.below(8) {
            0 => {
                if let Ok(batch) = serde_json::from_slice::<Batch>(input.rest()) {
                    fleet.apply(&batch);
                }
            }
            1 => fleet.record(&mut input),
            _ => {
                let changes = (0..1 + input.below(4)).map(|_| change(&mut input)).collect();
                fleet.apply(&Batch { changes });
            }
        }
    }
    fleet.check();
}

/// A relay's model, and what it has told each host.
struct Fleet {
    model: Model,
    spans: Spans,
    hosts: BTreeMap<Arc<str>, HostChanges>,
    now_ms: u64,
    /// Whether it has records that no batch has made.
    is_foreign: bool,
}

impl Fleet {
    fn new() -> Fleet {
        let mut fleet = Fleet {
            model: Model::default(),
            spans: Spans::default(),
            hosts: BTreeMap::new(),
            now_ms: 1_000,
            is_foreign: false,
        };
        let set = |(key, spec): (&str, Value)| Change {
            op: Op::Set,
            key: parsed(key),
            spec: Some(spec),
            if_generation: None,
        };
        let changes = [
            (
                "host/h1",
                json!({"addresses": ["192.0.2.1"], "uplink": {"addresses": ["203.0.113.1/24"], "device": "wan"}}),
            ),
            ("host/h2", json!({"addresses": ["192.0.2.2", "198.51.100.2"]})),
            ("vpc/p/a", json!({})),
            ("vpc/p/b", json!({"vni": 7})),
            ("subnet/p/a", json!({"vpc": "a", "prefix": "10.0.0.0/28"})),
            ("subnet/p/b", json!({"vpc": "b", "prefix": "10.1.0.0/24"})),
            ("security_group/p/a", json!({"ingress": [{"protocol": "tcp", "ports": [80]}]})),
            ("port/p/a", json!({"subnets": ["a"], "host": "h1", "netns": "a", "security_groups": ["a"]})),
            ("port/p/b", json!({"subnets": ["b"], "host": "h2", "netns": "b"})),
        ];
        fleet.apply(&Batch { changes: changes.map(set).into() });
        assert_eq!(fleet.model.len(), 9, "the base is valid");
        fleet
    }

    /// A host has almost as many flow logs and mirrors as it takes.
    fn crowd(&mut self) {
        let set =
            |key: String, spec: Value| Change { op: Op::Set, key: parsed(&key), spec: Some(spec), if_generation: None };
        let log = |n| set(format!("flow_log/p/crowd{n}"), json!({"guests": ["a"], "collector": "192.0.2.9:4739"}));
        let mirror = |n| {
            let spec = json!({"guests": ["a"], "target": "192.0.2.9:4789", "target_vni": 7});
            set(format!("mirror/p/crowd{n}"), spec)
        };
        let logs = (1..MAX_FLOW_LOGS).map(log);
        let changes = logs.chain((1..MAX_MIRRORS).map(mirror)).collect();
        let before = self.model.len();
        self.apply(&Batch { changes });
        assert_eq!(self.model.len(), before + MAX_FLOW_LOGS + MAX_MIRRORS - 2, "the crowd is valid");
    }

    fn apply(&mut self, batch: &Batch) {
        self.now_ms += 1;
        let before: Vec<_> = self.model.iter().map(|(key, stored)| (key.clone(), stored.clone())).collect();
        let plan = self.model.plan(batch, self.now_ms);
        let unchanged = self.model.iter().eq(before.iter().map(|(k, s)| (k, s)));
        assert!(unchanged, "planning changes nothing");
        match plan {
            Ok(plan) => {
                assert!(plan.writes.len() as u64 + plan.unchanged >= batch.changes.len() as u64, "{batch:?}");
                for (key, stored) in &plan.writes {
                    let Some(stored) = stored else { continue };
                    let generation = self.model.get(key).map_or(0, |before| before.generation);
                    assert_eq!(stored.generation, generation.saturating_add(1), "{key}");
                }
                self.write(plan.writes);
                if !self.is_foreign {
                    self.check_unique();
                    self.check_hosts(batch);
                }
                // What was made can be made again, and changes nothing but what names its generation.
                if batch.changes.iter().all(|change| change.if_generation.is_none()) {
                    let again = self.model.plan(batch, self.now_ms + 1);
                    let again = again.unwrap_or_else(|error| panic!("refused when repeated: {error}: {batch:?}"));
                    assert!(again.writes.is_empty(), "repeated, it changes {:?}: {batch:?}", again.writes);
                }
            }
            Err(error) => {
                assert!(!error.0.is_empty() && !error.to_string().is_empty());
                assert!(error.0.iter().all(|problem| !problem.what.is_empty()), "{error:?}");
            }
        }
    }

    /// What a store says, whether it makes sense or not.
    fn record(&mut self, input: &mut Input<'_>) {
        self.is_foreign = true;
        let key = a_key(input);
        let spec = spec(&key, input);
        let value = json!({"generation": input.u8(), "committed_ms": self.now_ms, "spec": spec});
        let stored = Stored::decode(key.kind(), value.to_string().as_bytes());
        match (stored, input.chance(64)) {
            (_, true) => self.write(vec![(key, None)]),
            (Ok(stored), false) => self.write(vec![(key, Some(stored))]),
            (Err(error), false) => assert!(!error.is_empty()),
        }
    }

    fn write(&mut self, writes: Vec<(Key, Option<Stored>)>) {
        let mut changed = Vec::new();
        for (key, stored) in writes {
            let before = match stored {
                Some(stored) => {
                    let again = Stored::decode(key.kind(), &stored.encode());
                    assert_eq!(again.as_ref(), Ok(&stored), "{key} comes back from the store");
                    self.model.set(key.clone(), stored)
                }
                None => self.model.remove(&key),
            };
            changed.push((key, before));
        }
        for (host, changes) in self.spans.change(&self.model, &changed, &|_| true) {
            let has = self.hosts.entry(host).or_default();
            for (id, item) in changes {
                match item {
                    Some(item) => drop(has.insert(id, Some(item))),
                    None => drop(has.remove(&id)),
                }
            }
        }
    }

    /// The VPC of a port: that of its first subnet.
    fn vpc_of(&self, port: &Key, spec: &Value) -> Option<String> {
        let subnet = format!("subnet/{}/{}", port.project(), texts(&spec["subnets"]).next()?);
        let subnet = self.model.get(&subnet.parse().ok()?)?.spec.value();
        Some(format!("vpc/{}/{}", port.project(), subnet["vpc"].as_str()?))
    }

    /// What no two objects may share.
    fn check_unique(&self) {
        let mut seen = BTreeSet::new();
        for (key, stored) in self.model.iter() {
            let spec = stored.spec.value();
            let mut take = |what: String| assert!(seen.insert(what.clone()), "{key}: {what} is in use twice");
            match key.kind() {
                Kind::Vpc => take(format!("VNI {}", spec["vni"])),
                Kind::Host => texts(&spec["addresses"]).for_each(|address| take(format!("underlay {address}"))),
                Kind::Port => {
                    let vpc = self.vpc_of(key, &spec);
                    assert!(vpc.is_some(), "{key} has no VPC");
                    let vpc = vpc.unwrap_or_default();
                    texts(&spec["addresses"]).for_each(|address| take(format!("{vpc}: {address}")));
                    take(format!("{vpc}: {}", spec["mac"]));
                }
                _ => {}
            }
        }
    }

    /// What the relay accepts, the daemon of each host accepts.
    fn check_hosts(&self, batch: &Batch) {
        for (key, stored) in self.model.iter().filter(|(key, _)| key.kind() == Kind::Host) {
            let addresses = &stored.spec.value()["addresses"];
            let file = format!(
                "[host]\nname = \"{}\"\n[underlay]\naddresses = {addresses}\nmtu = 9000\n[flow_log]\nrules_json = \"/r\"\n",
                key.name()
            );
            let file = Config::parse(&file, "bifrostd.toml").unwrap_or_else(|e| panic!("{key}: {e}: {batch:?}"));
            let items: Vec<_> = self.hosts.get(key.name()).into_iter().flatten().filter_map(apply_item).collect();
            if let Err(error) = Store::new(file.into()).plan(&items, 1) {
                panic!("{key}: {}: {batch:?}", ApiError::from(error).what);
            }
        }
    }

    /// What hosts were told change by change is what the whole model says.
    fn check(&self) {
        let whole = Spans::of(&self.model);
        let none = HostChanges::new();
        for host in self.hosts.keys().chain(whole.hosts()) {
            let told = self.hosts.get(host).unwrap_or(&none);
            let wanted = whole.of_host(host);
            let specs = |items: &HostChanges| -> Vec<_> {
                items.iter().map(|(id, item)| (id.clone(), item.as_ref().map(|item| item.spec.clone()))).collect()
            };
            assert_eq!(specs(told), specs(&wanted), "host {host}");
        }
    }
}

fn change(input: &mut Input<'_>) -> Change {
    let key = a_key(input);
    let if_generation = input.chance(24).then(|| u64::from(input.u8() % 4));
    match input.chance(56) {
        true => Change { op: Op::Delete, key, spec: None, if_generation },
        false => Change { op: Op::Set, spec: Some(spec(&key, input)), key, if_generation },
    }
}

fn apply_item((id, item): (&ItemId, &Option<Item>)) -> Option<ApplyItem> {
    let spec = serde_json::from_str(&item.as_ref()?.spec).ok()?;
    Some(ApplyItem {
        op: ApplyOp::Set,
        kind: id.kind,
        key: Some(id.key.clone()),
        generation: None,
        owner: "fleet".to_owned(),
        spec: Some(spec),
    })
}

fn texts(list: &Value) -> impl Iterator<Item = &str> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str)
}

fn parsed(key: &str) -> Key {
    key.parse().unwrap_or_else(|error| panic!("{key}: {error}"))
}

/// Kinds of objects with examples of what they say.
const KINDS: [(&str, &[&str]); 15] = [
    (
        "host",
        &[
            r#"{"addresses":["192.0.2.1"]}"#,
            r#"{"addresses":["192.0.2.2","2001:db8::2"],"transport":"plain","uplink":{"addresses":["203.0.113.1/24"],"vni":4000,"device":"wan","netns":"out"}}"#,
        ],
    ),
    ("project", &[r#"{"quota":{"ports":3,"vpcs":2}}"#, "{}"]),
    ("outside_grant", &[r#"{"prefixes":["203.0.113.0/28","203.0.113.20/32"]}"#]),
    (
        "vpc",
        &[
            "{}",
            r#"{"vni":100,"reliability":"all","ordering":"strict","dhcp":true,"dns":["10.0.0.53"],"acl":[{"direction":"egress","action":"deny","protocol":47,"to":["10.0.0.0/8"]}]}"#,
        ],
    ),
    ("subnet", &[r#"{"vpc":"a","prefix":"10.0.0.0/28"}"#, r#"{"vpc":"b","prefix":"fd00::/64","gateway":"fd00::1"}"#]),
    ("address_set", &[r#"{"addresses":["198.51.100.0/24","2001:db8::/32"]}"#]),
    (
        "security_group",
        &[
            r#"{"ingress":[{"protocol":"tcp","ports":[80,"8000-8099"],"from":["10.0.0.0/8","set:a","group:b"],"log":true}]}"#,
            r#"{"egress":[]}"#,
        ],
    ),
    (
        "port",
        &[
            r#"{"subnets":["a"],"host":"h1","netns":"a","security_groups":["a"]}"#,
            r#"{"subnets":["b"],"host":"h2","netns":"b","addresses":["10.1.0.9"],"mac":"02:00:00:00:00:01","routed":["172.16.0.0/16"],"tx_mbit":10}"#,
            r#"{"subnets":["a","b"],"host":"h1","kind":"vhost-user","socket":"/run/vm.sock","mode":"client"}"#,
        ],
    ),
    ("peering", &[r#"{"vpcs":["a","b"]}"#]),
    (
        "load_balancer",
        &[
            r#"{"subnet":"a","port":80,"backends":[{"guest":"a"},{"guest":"b","weight":2}]}"#,
            r#"{"subnet":"b","address":"10.1.0.100","port":1,"protocol":"udp","backends":[{"address":"10.1.0.77","port":9}],"check":{"kind":"http","path":"/"}}"#,
        ],
    ),
    ("nat_gateway", &[r#"{"vpc":"a","addresses":["203.0.113.10"],"ports_per_host":1000,"ports_per_guest":100}"#]),
    ("floating_ip", &[r#"{"guest":"a","address":"203.0.113.20"}"#, r#"{"guest":"b"}"#]),
    ("route_table", &[r#"{"vpc":"a","routes":[{"prefix":"172.17.0.0/16","guest":"a"}]}"#]),
    (
        "mirror",
        &[
            r#"{"vpc":"a","direction":"egress","target":"192.0.2.9:4789","target_vni":7}"#,
            r#"{"guests":["a"],"target":"192.0.2.9:4789","one_in":10,"truncate":128}"#,
        ],
    ),
    (
        "flow_log",
        &[
            r#"{"vpc":"a","collector":"192.0.2.9:4739","record":"rejected","active_timeout_s":30,"flows":1000}"#,
            r#"{"guests":["a","b"],"json":true,"json_mb":10,"domain":7}"#,
        ],
    ),
];

/// An object that may exist.
fn a_key(input: &mut Input<'_>) -> Key {
    let name = input.pick(&["a", "b", "c"]);
    let (kind, _) = input.pick(&KINDS);
    let text = match kind {
        "host" => format!("host/{}", input.pick(&["h1", "h2", "h3"])),
        "project" => format!("project/{}", input.pick(&["p", "q"])),
        kind => format!("{kind}/{}/{name}", if input.chance(40) { "q" } else { "p" }),
    };
    text.parse().unwrap_or_else(|_| parsed("vpc/p/a"))
}

/// What an object of that kind may say, with at most three changes.
fn spec(key: &Key, input: &mut Input<'_>) -> Value {
    let examples =
        KINDS.iter().find(|(kind, _)| *kind == key.kind().name()).map_or(&["{}"][..], |(_, examples)| examples);
    let mut value: Value = serde_json::from_str(input.pick(examples)).unwrap_or_default();
    for _ in 0..input.below(3) {
        mutate(&mut value, input);
    }
    value
}

/// Changes one place of a value.
fn mutate(value: &mut Value, input: &mut Input<'_>) {
    const TEXTS: [&str; 24] = [
        "a",
        "b",
        "c",
        "h1",
        "h2",
        "",
        "..",
        "x/y",
        "\n",
        "10.0.0.1",
        "10.0.0.2",
        "10.0.0.15",
        "0.0.0.0",
        "fd00::2",
        "0.0.0.0/0",
        "10.0.0.0/30",
        "10.0.0.1/24",
        "::/0",
        "203.0.113.10",
        "203.0.113.0/24",
        "set:a",
        "group:a",
        "02:00:00:00:00:01",
        "65535-1",
    ];
    const KEYS: [&str; 12] = [
        "vpc",
        "vni",
        "prefix",
        "gateway",
        "addresses",
        "host",
        "subnets",
        "guest",
        "netns",
        "routed",
        "security_groups",
        "unknown",
    ];
    let other = |input: &mut Input<'_>| match input.below(8) {
        0 => Value::Null,
        1 => json!(input.pick(&[0u64, 1, 7, 65_535, 65_536, 0x00ff_ffff, 0x0100_0000, u64::MAX])),
        2 => json!(-1),
        3 => json!([]),
        4 => json!([input.pick(&TEXTS), input.pick(&TEXTS)]),
        5 => json!("x".repeat(usize::from(input.u16()) % 700)),
        _ => json!(input.pick(&TEXTS)),
    };
    match value {
        Value::Object(map) if !map.is_empty() && !input.chance(12) => {
            let key = map.keys().nth(input.below(map.len())).cloned().unwrap_or_default();
            match input.below(6) {
                0 => drop(map.remove(&key)),
                1 => {
                    let value = other(input);
                    map.insert(key, value);
                }
                2 => {
                    let value = other(input);
                    map.insert(input.pick(&KEYS).to_owned(), value);
                }
                _ => {
                    if let Some(inner) = map.get_mut(&key) {
                        mutate(inner, input);
                    }
                }
            }
        }
        Value::Array(list) if !list.is_empty() && !input.chance(12) => {
            let at = input.below(list.len());
            match input.below(4) {
                0 => drop(list.remove(at)),
                1 => {
                    let copy = list[at].clone();
                    list.push(copy);
                }
                _ => mutate(&mut list[at], input),
            }
        }
        value => *value = other(input),
    }
}
