//! The agent's decisions, with a model of `bifrostd` that is down, restarted, changed by others, or refuses.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bifrost_control::api::{ApiError, ApplyItem, ApplyOp, ApplyReport, Status, WorkerStatus};
use bifrost_control::client::ClientError;
use bifrost_control::config::Kind;
use bifrost_control::objects::{Id, Store};
use bifrost_relay_api::{Change, ImpairedPeer, PathHealth, Report};
use proptest::prelude::*;
use serde_json::json;

use super::desired::{gone, set};
use super::world::{Objects, object, store, world};
use crate::OWNER;
use crate::plan::{BATCH_BYTES, Limits};
use crate::state::{Answer, Ask, Core, Next, RETRY};

/// What a daemon would do.
struct Model {
    store: Store,
    pid: u32,
    is_up: bool,
    /// Ports that cannot be made, and whether the error says which one.
    broken: BTreeSet<String>,
    says_which: bool,
    /// Batches that were sent, and refused.
    applies: (usize, usize),
}

impl Model {
    fn ask(&mut self, ask: Ask) -> Result<Answer, ClientError> {
        if !self.is_up {
            return Err(ClientError::NotRunning("/run/none".into()));
        }
        Ok(match ask {
            Ask::Status => {
                let workers = vec![WorkerStatus::default()];
                Answer::Status(Box::new(Status { pid: self.pid, workers, ..Status::default() }))
            }
            Ask::List(mut query) => {
                query.limit = Some(7);
                Answer::List(self.store.list(&query)?)
            }
            Ask::Digests(query) => Answer::Digests(self.store.digests(&query)),
            Ask::Apply(spec) => {
                self.applies.0 += 1;
                let result = self.apply(&spec.items);
                self.applies.1 += usize::from(result.is_err());
                Answer::Apply(Box::new(result?))
            }
        })
    }

    fn apply(&mut self, items: &[ApplyItem]) -> Result<ApplyReport, ApiError> {
        let plan = self.store.plan(items, 1)?;
        let is_broken =
            |item: &&ApplyItem| item.op == ApplyOp::Set && item.key.as_ref().is_some_and(|k| self.broken.contains(k));
        if let Some(item) = items.iter().find(is_broken) {
            let name = if self.says_which { item.key.clone().unwrap_or_default() } else { "of somebody".to_owned() };
            return Err(
                ApiError::conflict(format!("port {name}: cannot enter its namespace")).hint("nothing was changed")
            );
        }
        let set = plan.changes().values().flatten().count() as u64;
        let deleted = plan.changes().len() as u64 - set;
        let report = ApplyReport { set, deleted, unchanged: plan.unchanged(), ..ApplyReport::default() };
        self.store.commit(plan);
        Ok(report)
    }

    /// Somebody else, under our name.
    fn meddle(&mut self, op: ApplyOp, kind: Kind, key: &str, spec: Option<serde_json::Value>) {
        let key = Some(key.to_owned());
        self.apply(&[ApplyItem { op, kind, key, generation: None, owner: OWNER.to_owned(), spec }]).unwrap();
    }

    fn objects(&self) -> Objects {
        self.store.others().iter().map(|(id, entry)| (id.clone(), Arc::new(entry.object.clone()))).collect()
    }

    fn keys(&self) -> Vec<String> {
        self.store.others().keys().map(|id| format!("{} {}", id.kind, id.key)).collect()
    }
}

struct Rig {
    core: Core,
    model: Model,
    now: Duration,
    reports: Vec<Report>,
    drifted: u64,
    propagation: Vec<u64>,
}

impl Rig {
    fn new(items: usize) -> Rig {
        let model =
            Model { store: store(), pid: 1, is_up: true, broken: BTreeSet::new(), says_which: true, applies: (0, 0) };
        let core = Core::new(Limits { items, bytes: BATCH_BYTES }, || 0.5);
        Rig { core, model, now: Duration::ZERO, reports: Vec::new(), drifted: 0, propagation: Vec::new() }
    }

    /// Until there is nothing to do for a while.
    fn work(&mut self, seconds: u64) {
        let end = self.now + Duration::from_secs(seconds);
        for _ in 0..10_000 {
            self.reports.extend(self.core.take_report());
            let observed = self.core.take_observed();
            self.drifted += observed.drifted;
            self.propagation.extend(observed.propagation_ms);
            match self.core.next(self.now) {
                Next::Ask(ask) => {
                    let answer = self.model.ask(ask);
                    self.core.answer(answer, self.now, 1_000);
                }
                Next::Wait(until) if until > end => {
                    self.now = end;
                    return;
                }
                Next::Wait(until) => {
                    assert!(until > self.now, "it waits for the past");
                    self.now = until;
                }
            }
        }
        panic!("it does not come to rest: {:?}", self.core);
    }

    fn connect(&mut self, changes: Vec<Change>) {
        self.core.connected(false);
        self.send(changes);
    }

    fn send(&mut self, changes: Vec<Change>) {
        self.core.changes(changes).unwrap();
        let revision = self.core.desired().revision().unwrap_or(0) + 1;
        self.core.in_sync(revision, self.now).unwrap();
    }

    fn last(&self) -> &Report {
        self.reports.last().unwrap()
    }
}

/// As the relay sends them.
fn sent(objects: &Objects) -> Vec<Change> {
    objects.iter().map(|(id, object)| set(id.kind.name(), &id.key, &object.spec().to_string())).collect()
}

fn port(name: &str, n: u8) -> Change {
    let mac = format!("02:00:00:00:00:{n:02x}");
    let addresses = [format!("10.3.0.{n}/24")];
    let spec = json!({"name": name, "vni": 100, "mac": mac, "addresses": addresses, "netns": "n", "device": name});
    set("port", name, &spec.to_string())
}

fn route(n: u8, peer: &str) -> Change {
    let (prefix, mac) = (format!("10.0.0.{n}/32"), format!("02:00:00:00:01:{n:02x}"));
    let spec = json!({"vni": 100, "prefix": prefix, "peer": peer, "mac": mac});
    set("route", &format!("100/{prefix}"), &spec.to_string())
}

#[test]
fn the_health_of_paths_is_reported_when_it_changes_and_never_ahead_of_what_is_in_force() {
    let health = |working| PathHealth {
        peers: 2,
        impaired: vec![ImpairedPeer { peer: "host-b".into(), paths: 4, working }],
        more_impaired: 0,
    };
    let mut rig = Rig::new(10_000);
    rig.core.paths(health(3));
    rig.work(1);
    assert_eq!(rig.reports, [], "no relay has said what the host is to have");
    rig.connect(vec![port("a", 1)]);
    rig.work(1);
    assert_eq!(rig.last(), &Report { revision: 1, objects: 1, paths: health(3), ..Report::default() });
    for (working, reports) in [(3, 1), (2, 2), (2, 2)] {
        rig.core.paths(health(working));
        rig.work(1);
        assert_eq!((rig.reports.len(), &rig.last().paths), (reports, &health(working)));
    }
    // A relay whose store has gone back must not get an earlier report.
    rig.core.connected(true);
    rig.core.paths(health(1));
    rig.work(1);
    assert_eq!(rig.reports.len(), 2);
}

#[test]
fn what_is_sent_comes_into_force_and_is_reported() {
    let mut rig = Rig::new(10_000);
    rig.connect(vec![port("a", 1), route(2, "host-b")]);
    rig.work(1);
    assert_eq!(rig.model.keys(), ["port a", "route 100/10.0.0.2/32"]);
    assert_eq!(rig.last(), &Report { revision: 1, objects: 2, ..Report::default() });
    assert!(rig.propagation.is_empty(), "what is old is no news");
    rig.send(vec![port("b", 3), gone("port", "a")]);
    rig.work(1);
    assert_eq!(rig.model.keys(), ["port b", "route 100/10.0.0.2/32"]);
    assert_eq!((rig.last().revision, rig.last().objects, rig.reports.len()), (2, 2, 2));
    assert_eq!(rig.propagation, [995]);
    assert_eq!(rig.model.applies, (2, 0));
    // A group without changes is reported as well.
    rig.send(vec![]);
    rig.work(200);
    assert_eq!((rig.last().revision, rig.model.applies, rig.drifted), (3, (2, 0), 0));
}

#[test]
fn nothing_is_deleted_before_the_relay_has_sent_everything() {
    let mut rig = Rig::new(10_000);
    rig.connect(vec![port("a", 1), port("b", 2)]);
    rig.work(1);
    // Another agent, with the same daemon: it knows nothing yet.
    rig.core = Core::new(Limits::default(), || 0.5);
    rig.work(100);
    rig.core.connected(false);
    rig.core.changes(vec![port("b", 2)]).unwrap();
    rig.work(100);
    assert_eq!(rig.model.keys(), ["port a", "port b"]);
    rig.core.in_sync(5, rig.now).unwrap();
    rig.work(1);
    assert_eq!(rig.model.keys(), ["port b"]);
    // The relay goes while a deletion waits for the daemon: it waits for the relay, too.
    rig.model.is_up = false;
    rig.send(vec![gone("port", "b"), port("c", 3)]);
    rig.work(1);
    rig.core.lost();
    rig.model.is_up = true;
    rig.work(200);
    assert_eq!(rig.model.keys(), ["port b", "port c"]);
    rig.connect(vec![port("c", 3)]);
    rig.work(1);
    assert_eq!(rig.model.keys(), ["port c"]);
    assert_eq!(rig.drifted, 0);
}

#[test]
fn one_bad_object_does_not_stop_the_others() {
    for says_which in [true, false] {
        let mut rig = Rig::new(10_000);
        rig.model.says_which = says_which;
        rig.model.broken.insert("p7".to_owned());
        let ports = (1..=20).map(|n| port(&format!("p{n}"), n));
        // Wrong by itself, wrong with the rest, of the file, and what cannot be made.
        let bad = [route(30, "nobody"), set("vpc", "9", "{}"), set("vpc", "100", "{\"vni\":100}")];
        rig.connect(ports.chain(bad).collect());
        rig.work(1);
        assert_eq!(rig.model.keys().len(), 19);
        let report = rig.last().clone();
        assert_eq!((rig.reports.len(), report.objects, report.problems.len()), (1, 19, 4));
        let what = |key: &str| report.problems.iter().find(|p| p.key == key).unwrap().what.clone();
        assert!(what("100/10.0.0.30/32").contains("no peer named \"nobody\""), "{report:?}");
        assert!(what("100").contains("belongs to the configuration file"), "{report:?}");
        assert!(what("p7").contains("cannot enter"), "{report:?}");
        assert!(what("9").contains("vni"), "{report:?}");
        // It is tried again, and not all the time.
        let before = rig.model.applies.0;
        rig.work(RETRY.as_secs() * 4);
        assert!((4..40).contains(&(rig.model.applies.0 - before)), "{}", rig.model.applies.0 - before);
        assert_eq!(rig.reports.len(), 1, "nothing new is no report");
        rig.model.broken.clear();
        rig.work(RETRY.as_secs() + 1);
        assert_eq!((rig.reports.len(), rig.last().objects, rig.last().problems.len()), (2, 20, 3));
        // With the next change soon.
        rig.send(vec![set("peer", "nobody", r#"{"name":"nobody","addresses":["192.0.2.9"]}"#)]);
        rig.work(2);
        assert_eq!((rig.last().objects, rig.last().problems.len()), (22, 2));
        rig.send(vec![gone("vpc", "9"), gone("vpc", "100")]);
        rig.work(2);
        assert_eq!((rig.last().objects, rig.last().problems.len()), (22, 0));
    }
}

#[test]
fn what_needs_something_that_was_refused_is_told_so() {
    let mut rig = Rig::new(10_000);
    let taken = set("peer", "p", r#"{"name":"p","addresses":["192.0.2.2"]}"#);
    rig.connect((1..=100).map(|n| route(n, "p")).chain([taken, port("a", 1)]).collect());
    rig.work(1);
    assert_eq!(rig.model.keys(), ["port a"]);
    assert_eq!((rig.last().objects, rig.last().problems.len(), rig.last().more_problems), (1, 100, 1));
    assert!(rig.model.applies.0 <= 3, "{:?}", rig.model.applies);
    assert!(rig.last().problems.iter().any(|p| p.what == "it needs peer \"p\", which is not in force"));
}

#[test]
fn a_bad_new_version_leaves_the_old_one() {
    let mut rig = Rig::new(10_000);
    rig.connect(vec![port("a", 1), route(2, "host-b")]);
    rig.work(1);
    rig.send(vec![set("port", "a", "{\"name\":\"a\"}"), route(2, "nobody")]);
    rig.work(100);
    assert_eq!(rig.model.keys(), ["port a", "route 100/10.0.0.2/32"]);
    assert_eq!((rig.last().objects, rig.last().problems.len()), (0, 2));
}

#[test]
fn drift_is_repaired_and_counted() {
    let mut rig = Rig::new(10_000);
    rig.connect(vec![port("a", 1), port("b", 2), route(2, "host-b")]);
    rig.work(1);
    let before = rig.model.objects();
    rig.model.meddle(ApplyOp::Delete, Kind::Port, "a", None);
    let other = json!({"name": "b", "vni": 100, "mac": "02:00:00:00:09:09", "addresses": ["10.3.0.9/24"], "netns": "n", "device": "b"});
    rig.model.meddle(ApplyOp::Set, Kind::Port, "b", Some(other));
    rig.model.meddle(ApplyOp::Set, Kind::Vpc, "7", Some(json!({"vni": 7})));
    rig.work(70);
    assert_eq!((rig.model.objects(), rig.drifted), (before.clone(), 3));
    // While the relay is away, what is missing is repaired, and nothing is deleted.
    rig.core.lost();
    rig.model.meddle(ApplyOp::Delete, Kind::Port, "a", None);
    rig.model.meddle(ApplyOp::Set, Kind::Vpc, "7", Some(json!({"vni": 7})));
    rig.work(70);
    assert_eq!((rig.model.keys().len(), rig.drifted), (4, 5));
    rig.connect(vec![port("a", 1), port("b", 2), route(2, "host-b")]);
    rig.work(1);
    assert_eq!(rig.model.objects(), before);
    // Others' objects are theirs.
    let spec = json!({"vni": 8});
    let item = ApplyItem {
        op: ApplyOp::Set,
        kind: Kind::Vpc,
        key: None,
        generation: None,
        owner: "me".into(),
        spec: Some(spec),
    };
    rig.model.apply(&[item]).unwrap();
    rig.work(200);
    assert_eq!((rig.model.keys().len(), rig.drifted), (4, 5));
}

#[test]
fn a_daemon_that_comes_back_with_nothing_is_given_everything() {
    let mut rig = Rig::new(10_000);
    rig.model.is_up = false;
    rig.connect(vec![port("a", 1), route(2, "host-b")]);
    rig.work(60);
    assert!(rig.reports.is_empty() && !rig.core.is_answered());
    rig.model.is_up = true;
    rig.work(6);
    assert_eq!((rig.model.keys().len(), rig.reports.len()), (2, 1));
    for is_seen in [true, false] {
        rig.model.is_up = !is_seen;
        rig.work(u64::from(is_seen) * 10);
        (rig.model.store, rig.model.pid, rig.model.is_up) = (store(), rig.model.pid + 1, true);
        rig.work(6);
        assert_eq!((rig.model.keys().len(), rig.drifted), (2, 0), "seen: {is_seen}");
    }
}

#[test]
fn an_end_of_disk_is_waited_for() {
    let mut rig = Rig::new(10_000);
    rig.connect(vec![port("a", 1)]);
    // The answer to a batch, as long as the disk is full.
    for _ in 0..50 {
        match rig.core.next(rig.now) {
            Next::Ask(Ask::Apply(_)) => {
                let full = ClientError::Api(ApiError::internal("no space left on device"));
                rig.core.answer(Err(full), rig.now, 0);
            }
            Next::Ask(ask) => {
                let answer = rig.model.ask(ask);
                rig.core.answer(answer, rig.now, 0);
            }
            Next::Wait(until) => rig.now = until,
        }
    }
    assert_eq!((rig.core.problem_count(), rig.core.take_report()), (0, None));
    rig.work(10);
    assert_eq!(rig.model.keys(), ["port a"]);
}

#[test]
fn a_relay_that_sends_without_end_is_stopped() {
    let mut core = Core::new(Limits::default(), || 0.5);
    core.connected(false);
    let spec = vec![b' '; 1 << 20];
    let endless = (0..2000).map(|n| set("route", &n.to_string(), std::str::from_utf8(&spec).unwrap()));
    let mut sent = 0usize;
    for change in endless {
        if core.changes(vec![change]).is_err() {
            break;
        }
        sent += 1;
    }
    assert_eq!(sent, 1023);
}

#[derive(Clone, Debug)]
enum Step {
    /// The relay says that it is to be like this.
    World(u64),
    Disconnect,
    /// A new stream, with everything.
    Connect(u64),
    /// The daemon goes, and comes back with or without its objects.
    Restart(bool),
    /// Somebody deletes everything, in so far as that is possible.
    Meddle,
    /// A new agent.
    Again,
    Pause(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => any::<u64>().prop_map(Step::World),
        1 => Just(Step::Disconnect),
        1 => any::<u64>().prop_map(Step::Connect),
        1 => any::<bool>().prop_map(Step::Restart),
        1 => Just(Step::Meddle),
        1 => Just(Step::Again),
        2 => (0u64..100).prop_map(Step::Pause),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Whatever happens on the way, in the end the daemon has what the relay says, and what was there before the relay went stays.
    #[test]
    fn in_the_end_the_daemon_has_what_the_relay_says(
        steps in prop::collection::vec(step(), 1..12),
        last in any::<u64>(),
        items in 1usize..40,
    ) {
        let mut rig = Rig::new(items);
        let mut said = Objects::new();
        for step in steps {
            match step {
                Step::World(seed) if rig.core.desired().is_in_sync() => {
                    let next = world(seed);
                    let away = said.keys().filter(|id| !next.contains_key(id)).map(|id| gone(id.kind.name(), &id.key));
                    let changes = away.chain(sent(&next)).collect();
                    rig.send(changes);
                    said = next;
                }
                Step::World(_) => {}
                Step::Disconnect => rig.core.lost(),
                Step::Connect(seed) => {
                    said = world(seed);
                    rig.connect(sent(&said));
                }
                Step::Restart(keeps) => {
                    rig.model.pid += 1;
                    if !keeps {
                        rig.model.store = store();
                    }
                }
                Step::Meddle => rig.model.store = store(),
                Step::Again => rig.core = Core::new(Limits { items, bytes: BATCH_BYTES }, || 0.5),
                Step::Pause(seconds) => rig.work(seconds),
            }
        }
        let before = rig.model.objects();
        rig.core.lost();
        rig.work(100);
        let after = rig.model.objects();
        prop_assert!(before.keys().all(|id| after.contains_key(id)), "deleted while no relay was there");
        said = world(last);
        rig.connect(sent(&said));
        rig.work(200);
        prop_assert_eq!(rig.model.objects(), said);
        prop_assert!(rig.core.is_settled() && rig.last().problems.is_empty());
        let digests = rig.model.applies;
        rig.work(200);
        prop_assert_eq!(rig.model.applies, digests, "at rest nothing is applied");
    }
}

#[test]
fn an_id_is_named_as_the_relay_names_it() {
    let (id, _) = object(Kind::Vpc, &json!({"vni": 5}));
    assert_eq!(crate::desired::Name::of(&id).id(), Some(Id { kind: Kind::Vpc, key: "5".into() }));
}
