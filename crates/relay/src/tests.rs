//! The core of a relay without a network: a store in memory, hosts that take what they are told.

use std::collections::BTreeMap;
use std::sync::Arc;

use bifrost_control::server::Peer;
use bifrost_intent::api::{HostProblem, HostStatus, ObjectsQuery};
use bifrost_intent::{Batch, Change, HostChanges, Key, Op};
use bifrost_relay_api::Answer;
use bifrost_store::{Events, Record, Snapshot, Store, Txn, Write};
use serde_json::{Value, json};

use crate::feed::{Feed, Next};
use crate::fleet::{Fleet, Report};
use crate::peers::{HostRecord, RelayRecord, host_key, relay_key};
use crate::relay::Relay;

mod learning;

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
    /// Answers about routes are not corrected by themselves.
    is_slow: bool,
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
        if !self.is_slow {
            self.correct();
        }
    }

    /// Tells agents all that was wrong in their answers.
    fn correct(&mut self) {
        while self.fleet.correct(3) {}
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
    answers: Vec<Answer>,
}

impl Told {
    fn new(world: &mut World, host: &str) -> Told {
        let attached = world.fleet.attach(host, "agent 1", true, 1).unwrap();
        Told {
            number: attached.number,
            feed: attached.feed,
            has: attached.all,
            revision: attached.revision,
            answers: Vec::new(),
        }
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
                    Next::Answers(answers) => self.answers.extend(answers),
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
        |world: &World, revision| world.fleet.waiting(revision).iter().map(|host| host.to_string()).collect::<Vec<_>>();
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
    assert_eq!(world.fleet.host_counts(true).in_sync, 1);
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
    assert_eq!(why(&world)[1], "h2: a port of this host can reach it, unknown: the host's agent is not connected");
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
fn a_store_that_was_restored_is_followed() {
    let mut world = World::new();
    world.make(vec![port("web", "h1")]);
    let backup = world.snapshot();
    world.make(vec![port("db", "h2")]);
    world.make(vec![delete("port/demo/web")]);
    let mut h1 = Told::new(&mut world, "h1");
    world.fleet.report("h1", h1.number, Report { revision: 4, ..Report::default() });
    assert!(world.fleet.load(backup));
    assert_eq!(h1.take().unwrap(), "the store was restored from a backup; connect again");
    assert_eq!(world.fleet.position().0, 2);
    let mut h1 = Told::new(&mut world, "h1");
    assert_eq!((h1.ids(), h1.revision), (vec!["vpc 4096".to_owned(), "port demo.web".to_owned()], 2));
    assert_eq!(world.fleet.hosts()[0].changed, 2, "no revision that there is not");
    // And goes on from there: commits expect what is in the store now.
    let (_, txn) = world.fleet.plan(&Batch { changes: vec![port("db", "h2")] }, 7, b"test").unwrap();
    assert_eq!(txn.expect, [("/bifrost/v1/serial".to_owned(), 2)]);
    world.revision = 2;
    world.make(vec![port("db", "h2")]);
    assert_eq!((h1.take(), h1.revision), (None, 3));
    assert!(!world.fleet.load(world.snapshot()), "the same revision is not an earlier one");
}

/// Two relays of one store, each with the agent of one host.
#[test]
fn relays_know_the_hosts_of_each_other() {
    let mut world = World::new();
    world.make(vec![port("web", "h1"), port("db", "h2")]);
    let mut other = Fleet::default();
    other.load(world.snapshot());
    let h1 = Told::new(&mut world, "h1");
    let h2 = other.attach("h2", "agent 1", true, 1).unwrap();
    world.fleet.report("h1", h1.number, Report { revision: 2, ..Report::default() });
    assert_eq!(world.fleet.waiting(2), ["h2".into()]);
    let now = std::time::Instant::now();
    // What one tells comes back to it, and to the other.
    let mut revision = 10;
    let mut tell = |from: &mut Fleet, name: &str, to: &mut Fleet| {
        let told = from.take_untold(name);
        let put = |status: &HostStatus| {
            let record = HostRecord::new(name, told.position, status.clone());
            (host_key(&status.name), Some(serde_json::to_vec(&record).unwrap()))
        };
        let mut changes: Vec<_> = told.here.iter().map(put).collect();
        changes.extend(told.gone.iter().map(|(host, _)| (host_key(host), None)));
        changes.push((relay_key(name), Some(serde_json::to_vec(&RelayRecord::new(told.position)).unwrap())));
        revision += 1;
        let events = Events { revision, changes };
        from.peers_mut().follow(events.clone(), now);
        to.peers_mut().follow(events, now);
        told.here.len()
    };
    assert_eq!(tell(&mut other, "r2", &mut world.fleet), 1);
    assert_eq!(world.fleet.waiting(2), ["h2".into()], "its agent has not said that it has everything");
    other.report("h2", h2.number, Report { revision: 2, ..Report::default() });
    assert_eq!(tell(&mut other, "r2", &mut world.fleet), 1);
    assert_eq!(world.fleet.waiting(2), [] as [Arc<str>; 0]);
    let host = world.fleet.hosts()[1].clone();
    assert_eq!((host.relay.as_deref(), host.connected, host.is_in_sync()), (Some("r2"), true, true));
    assert_eq!((world.fleet.host_counts(true).connected, world.fleet.host_counts(false).connected), (1, 2));
    assert_eq!(tell(&mut other, "r2", &mut world.fleet), 0, "nothing is told twice");
    // A change that the other relay has not seen yet, and then has.
    world.make(vec![set("vpc/demo/net", json!({"dhcp": true}))]);
    assert!(world.fleet.is_waiting("h2", 3));
    other.load(world.snapshot());
    tell(&mut other, "r2", &mut world.fleet);
    assert!(world.fleet.is_waiting("h2", 3));
    let problem = HostProblem { kind: "vpc".into(), key: "4096".into(), what: "no".into() };
    other.report("h2", h2.number, Report { revision: 3, problems: vec![problem], ..Report::default() });
    tell(&mut other, "r2", &mut world.fleet);
    assert!(!world.fleet.is_waiting("h2", 3));
    assert_eq!(world.fleet.refusing(3).iter().map(|host| host.name.as_str()).collect::<Vec<_>>(), ["h2"]);
    // The agent goes; what was said of it goes, too.
    other.detach("h2", h2.number, 5);
    tell(&mut other, "r2", &mut world.fleet);
    assert!(!world.fleet.hosts()[1].connected && world.fleet.is_waiting("h2", 3));
}

/// Others write to the same store: its revision grows, and what a relay knows stays everything.
#[tokio::test(flavor = "multi_thread")]
async fn what_an_agent_has_seen_is_waited_for() {
    let store = Store::memory();
    let relay = Relay::new("test".into(), "memory".into(), store.clone(), None, None);
    let following = tokio::spawn(Arc::clone(&relay).follow());
    relay.position().wait_for(|position| position.in_sync).await.unwrap();
    let root = Peer { uid: 0, gid: 0, pid: None }.into();
    let made = relay.submit(&Batch { changes: network() }, &root).await.unwrap().revision;
    for _ in 0..5 {
        let put = Write::Put { key: "/other".into(), value: Vec::new() };
        store.commit(&Txn { writes: vec![put], ..Txn::default() }).await.unwrap();
    }
    assert!(!relay.catch_up(made).await.unwrap());
    assert_eq!(relay.with(|fleet| fleet.position().0), made);
    // Another relay began after the others, and has told an agent so.
    assert!(!relay.catch_up(made + 5).await.unwrap());
    assert_eq!(relay.with(|fleet| fleet.attach("h1", "", true, 0)).unwrap().revision, made + 5);
    assert!(relay.catch_up(made + 6).await.unwrap(), "there is no such revision");
    following.abort();
}

#[test]
fn hosts_have_to_be_known() {
    let mut world = World::new();
    for unknown in ["h9", "", "../h1", "H1"] {
        let error = world.fleet.attach(unknown, "", true, 0).unwrap_err();
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
        let page = world.fleet.objects(&query, |_| true);
        sizes.push(page.objects.len());
        let Some(next) = page.next else { break };
        query.from = Some(next);
    }
    assert_eq!(sizes, [20, 20, 10]);
    let of = |project: &str| ObjectsQuery { project: Some(project.into()), ..ObjectsQuery::default() };
    let count = |project: &str| world.fleet.objects(&of(project), |_| true).objects.len();
    assert_eq!((count("demo"), count("x")), (52, 0));
    let ports = |key: &bifrost_intent::Key| key.name().ends_with('7');
    assert_eq!(world.fleet.objects(&of("demo"), ports).objects.len(), 5, "of those that may be seen");
}
