//! The core of a relay without a network: a store in memory, hosts that take what they are told.

use std::collections::BTreeMap;
use std::sync::Arc;

use bifrost_intent::api::{HostProblem, ObjectsQuery};
use bifrost_intent::{Batch, Change, HostChanges, Key, Op};
use bifrost_store::{Events, Record, Snapshot, Write};
use serde_json::{Value, json};

use crate::feed::{Feed, Next};
use crate::fleet::{Fleet, Report};

fn set(key: &str, spec: Value) -> Change {
    Change { op: Op::Set, key: key.parse().unwrap(), spec: Some(spec), if_generation: None }
}

fn delete(key: &str) -> Change {
    Change { op: Op::Delete, key: key.parse().unwrap(), spec: None, if_generation: None }
}

fn network() -> Vec<Change> {
    vec![
        set("host/h1", json!({"addresses": ["192.0.2.1"]})),
        set("host/h2", json!({"addresses": ["192.0.2.2"]})),
        set("vpc/demo/net", json!({})),
        set("subnet/demo/a", json!({"vpc": "net", "prefix": "10.0.0.0/24"})),
    ]
}

fn port(name: &str, host: &str) -> Change {
    set(&format!("port/demo/{name}"), json!({"subnets": ["a"], "host": host, "netns": name}))
}

/// A store, and a relay that follows it.
#[derive(Default)]
struct World {
    fleet: Fleet,
    records: BTreeMap<String, Vec<u8>>,
    revision: u64,
}

impl World {
    fn new() -> World {
        let mut world = World::default();
        world.make(network());
        world
    }

    fn make(&mut self, changes: Vec<Change>) {
        let (plan, txn) = self.fleet.plan(&Batch { changes }, 7, b"test").unwrap();
        assert!(!plan.writes.is_empty());
        self.write(txn.writes);
    }

    fn write(&mut self, writes: Vec<Write>) {
        self.revision += 1;
        let mut changes = Vec::new();
        for write in writes {
            match write {
                Write::Put { key, value } => {
                    self.records.insert(key.clone(), value.clone());
                    changes.push((key, Some(value)));
                }
                Write::Delete { key } => {
                    self.records.remove(&key);
                    changes.push((key, None));
                }
            }
        }
        self.fleet.follow(Events { revision: self.revision, changes });
    }

    fn snapshot(&self) -> Snapshot {
        let record = |(key, value): (&String, &Vec<u8>)| Record {
            key: key.clone(),
            value: value.clone(),
            revision: self.revision,
        };
        Snapshot { revision: self.revision, records: self.records.iter().map(record).collect() }
    }
}

/// A host that takes what it is told.
struct Told {
    number: u64,
    feed: Arc<Feed>,
    has: HostChanges,
    revision: u64,
}

impl Told {
    fn new(world: &mut World, host: &str) -> Told {
        let attached = world.fleet.attach(host, "agent 1", 1).unwrap();
        Told { number: attached.number, feed: attached.feed, has: attached.all, revision: attached.revision }
    }

    /// Takes what waits; gives why it ended, if it has.
    fn take(&mut self) -> Option<String> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let soon = std::time::Duration::from_millis(1);
            while let Ok(next) = tokio::time::timeout(soon, self.feed.next()).await {
                match next {
                    Next::Changes(changes, revision) => {
                        self.revision = revision;
                        for (id, item) in changes {
                            match item {
                                Some(_) => drop(self.has.insert(id, item)),
                                None => drop(self.has.remove(&id)),
                            }
                        }
                    }
                    Next::End(why) => return Some(why),
                }
            }
            None
        })
    }

    fn ids(&self) -> Vec<String> {
        self.has.keys().map(|id| format!("{} {}", id.kind, id.key)).collect()
    }
}

#[test]
fn a_host_is_told_everything_and_then_what_changes() {
    let mut world = World::new();
    world.make(vec![port("web", "h1")]);
    let mut h1 = Told::new(&mut world, "h1");
    assert_eq!((h1.ids(), h1.revision), (vec!["vpc 4096".to_owned(), "port demo.web".to_owned()], 2));
    world.make(vec![port("db", "h2")]);
    assert_eq!(h1.take(), None);
    assert_eq!(h1.ids(), ["peer h2", "vpc 4096", "port demo.web", "route 4096/10.0.0.3/32"]);
    // What comes and goes before it is sent is not sent at all, but as gone.
    world.make(vec![port("x", "h2")]);
    world.make(vec![delete("port/demo/x"), delete("port/demo/db")]);
    assert_eq!(h1.feed.len(), 3);
    assert_eq!(h1.take(), None);
    assert_eq!((h1.ids(), h1.revision), (vec!["vpc 4096".to_owned(), "port demo.web".to_owned()], 5));
}

#[test]
fn it_is_known_who_has_what() {
    let mut world = World::new();
    world.make(vec![port("web", "h1"), port("db", "h2")]);
    let waiting =
        |world: &World, revision| world.fleet.waiting(revision).into_iter().map(|host| host.name).collect::<Vec<_>>();
    assert_eq!(waiting(&world, 2), ["h1", "h2"]);
    let h1 = Told::new(&mut world, "h1");
    let h2 = Told::new(&mut world, "h2");
    let report = |revision| Report { revision, objects: 4, ..Report::default() };
    world.fleet.report("h1", h1.number, report(h1.revision));
    assert_eq!(waiting(&world, 2), ["h2"]);
    let key: Key = "port/demo/web".parse().unwrap();
    let why = |world: &World| {
        let hosts = world.fleet.why(&key).unwrap().hosts;
        hosts.into_iter().map(|h| format!("{}: {}, {}", h.host, h.reason, h.state)).collect::<Vec<_>>()
    };
    assert_eq!(why(&world), ["h1: it is on this host, in force", "h2: a port of this host can reach it, on its way"]);
    world.fleet.report("h2", h2.number, report(99));
    assert_eq!(waiting(&world, 2), Vec::<String>::new());
    assert_eq!(world.fleet.hosts()[1].applied, 2, "nobody has what there is not yet");
    // What a host has not been told does not concern it.
    world.make(vec![set("host/h3", json!({"addresses": ["192.0.2.3"]}))]);
    assert_eq!(waiting(&world, 3), Vec::<String>::new());
    let problem = HostProblem { kind: "port".into(), key: "demo.web".into(), what: "no such namespace".into() };
    world.fleet.report("h1", h1.number, Report { problems: vec![problem], ..report(2) });
    assert_eq!(why(&world)[0], "h1: it is on this host, refused: no such namespace");
    assert_eq!(world.fleet.host_counts().in_sync, 1);
    // Another connection of the host is another agent, and what the earlier one says does not count.
    let mut earlier = h2;
    let later = Told::new(&mut world, "h2");
    assert_eq!(earlier.take().unwrap(), "another agent has connected for this host");
    world.fleet.report("h2", earlier.number, report(2));
    assert_eq!(waiting(&world, 2), ["h2"]);
    world.fleet.detach("h2", earlier.number, 5);
    assert!(world.fleet.hosts()[1].connected);
    world.fleet.report("h2", later.number, report(2));
    world.fleet.detach("h2", later.number, 5);
    assert!(!world.fleet.hosts()[1].connected);
    assert_eq!(
        why(&world)[1],
        "h2: a port of this host can reach it, unknown: the host's agent is not connected to this relay"
    );
}

#[test]
fn what_was_missed_is_made_up_for_by_a_list() {
    let mut world = World::new();
    world.make(vec![port("web", "h1"), port("db", "h2")]);
    let mut other = World { fleet: Fleet::default(), ..World::default() };
    other.fleet.load(world.snapshot());
    let mut h1 = Told::new(&mut other, "h1");
    assert_eq!(h1.ids().len(), 4);
    // The watch is away while a port goes, another comes, and one moves.
    world.make(vec![delete("port/demo/db"), port("new", "h2")]);
    world.make(vec![port("web", "h2")]);
    other.fleet.load(world.snapshot());
    assert_eq!(h1.take(), None);
    assert!(h1.ids().is_empty(), "{:?}", h1.ids());
    let mut h2 = Told::new(&mut other, "h2");
    let reference = Told::new(&mut world, "h2");
    assert_eq!(h2.has, reference.has);
    // The same list again changes nothing.
    other.fleet.load(world.snapshot());
    assert_eq!((h2.feed.len(), h2.take()), (0, None));
    assert_eq!(other.fleet.position(), world.fleet.position());
}

#[test]
fn hosts_have_to_be_known() {
    let mut world = World::new();
    for unknown in ["h9", "", "../h1", "H1"] {
        let error = world.fleet.attach(unknown, "", 0).unwrap_err();
        assert!(error.contains("is not known; add it"), "{error}");
    }
    let mut h1 = Told::new(&mut world, "h1");
    world.make(vec![delete("host/h1")]);
    assert_eq!(h1.take().unwrap(), "the host was deleted");
    assert_eq!(world.fleet.hosts().len(), 1);
}

#[test]
fn records_that_are_not_understood_are_told_and_change_nothing() {
    let mut world = World::new();
    world.make(vec![port("web", "h1")]);
    let put = |key: &str, value: &str| Write::Put { key: key.to_owned(), value: value.as_bytes().to_vec() };
    let mut h1 = Told::new(&mut world, "h1");
    let before = h1.has.clone();
    world.write(vec![
        put("/bifrost/v1/objects/port/demo/web", "{\"generation\":2,\"committed_ms\":1,\"spec\":{\"later\":1}}"),
        put("/bifrost/v1/objects/tunnel/demo/x", "{}"),
        put("/bifrost/v1/objects/vpc/demo/x", "{"),
    ]);
    assert_eq!((h1.take(), &h1.has), (None, &before), "what there was stays");
    let told: Vec<_> = world.fleet.unreadable().map(|(key, why)| format!("{key}: {why}")).collect();
    assert_eq!(told.len(), 3);
    assert!(told[0].contains("port/demo/web: subnets: ") || told[0].contains("missing field"), "{told:?}");
    assert!(told[1].contains("is not the key of an object"), "{told:?}");
    world.write(vec![Write::Delete { key: "/bifrost/v1/objects/tunnel/demo/x".into() }]);
    world.make(vec![set("vpc/demo/x", json!({}))]);
    assert_eq!(world.fleet.unreadable().count(), 1);
}

#[test]
fn lists_come_in_pages() {
    let mut world = World::new();
    world.make((0..50).map(|n| port(&format!("p{n}"), "h1")).collect());
    let mut query = ObjectsQuery { kind: Some(bifrost_intent::Kind::Port), limit: Some(20), ..ObjectsQuery::default() };
    let mut sizes = Vec::new();
    loop {
        let page = world.fleet.objects(&query);
        sizes.push(page.objects.len());
        let Some(next) = page.next else { break };
        query.from = Some(next);
    }
    assert_eq!(sizes, [20, 20, 10]);
    let of = |project: &str| ObjectsQuery { project: Some(project.into()), ..ObjectsQuery::default() };
    assert_eq!((world.fleet.objects(&of("demo")).objects.len(), world.fleet.objects(&of("x")).objects.len()), (52, 0));
}
