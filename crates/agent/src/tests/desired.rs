//! What the relay said, as it holds.

use bifrost_control::config::Kind;
use bifrost_control::objects::Id;
use bifrost_relay_api::Change;

use crate::desired::{Desired, Name, Refused};

pub(super) fn set(kind: &str, key: &str, spec: &str) -> Change {
    Change { kind: kind.into(), key: key.into(), spec: Some(spec.as_bytes().to_vec().into()), committed_ms: 5 }
}

pub(super) fn gone(kind: &str, key: &str) -> Change {
    Change { kind: kind.into(), key: key.into(), ..Change::default() }
}

fn vpc(vni: u32) -> Change {
    set("vpc", &vni.to_string(), &format!("{{\"vni\":{vni}}}"))
}

fn keys(desired: &Desired) -> Vec<&str> {
    desired.good().keys().map(|id| &*id.key).collect()
}

fn following(changes: Vec<Change>) -> Desired {
    let mut desired = Desired::default();
    desired.set_workers(1);
    desired.connected(false);
    desired.take(changes).unwrap();
    desired.in_sync(1).unwrap();
    desired
}

#[test]
fn a_group_holds_when_it_is_whole() {
    let mut desired = following(vec![vpc(1), vpc(2)]);
    assert_eq!(keys(&desired), ["1", "2"]);
    desired.take(vec![vpc(3), gone("vpc", "1")]).unwrap();
    assert_eq!(keys(&desired), ["1", "2"]);
    let changed = desired.in_sync(2).unwrap();
    assert_eq!(keys(&desired), ["2", "3"]);
    let told: Vec<_> = changed.iter().map(|c| (&*c.name.key, c.committed_ms)).collect();
    assert_eq!(told, [("1", None), ("3", Some(5))]);
    // The last one counts, and what is the same is no change.
    desired.take(vec![gone("vpc", "3"), vpc(3), vpc(4), gone("vpc", "4"), vpc(2)]).unwrap();
    assert!(desired.in_sync(3).unwrap().is_empty());
    assert_eq!((keys(&desired), desired.revision()), (vec!["2", "3"], Some(3)));
}

#[test]
fn what_was_not_sent_before_the_first_in_sync_is_stale() {
    let mut desired = following(vec![vpc(1), vpc(2)]);
    desired.lost();
    assert!(!desired.is_in_sync());
    desired.connected(false);
    desired.take(vec![vpc(2)]).unwrap();
    assert_eq!(keys(&desired), ["1", "2"], "nothing is stale before the relay has sent everything");
    // A stream that ends halfway says nothing.
    desired.lost();
    desired.connected(false);
    desired.take(vec![vpc(2), vpc(3)]).unwrap();
    let changed: Vec<_> = desired.in_sync(9).unwrap().into_iter().map(|c| c.name.key).collect();
    assert_eq!(changed, ["1", "3"]);
    assert_eq!(keys(&desired), ["2", "3"]);
}

#[test]
fn what_comes_after_the_end_of_a_stream_is_nothing() {
    let mut desired = following(vec![vpc(1)]);
    desired.lost();
    desired.take(vec![vpc(2)]).unwrap();
    assert!(desired.in_sync(7).unwrap().is_empty());
    assert_eq!((keys(&desired), desired.revision(), desired.is_in_sync()), (vec!["1"], Some(1), false));
}

#[test]
fn what_is_not_understood_is_kept_as_a_problem() {
    let mut desired = following(vec![
        vpc(1),
        set("teapot", "x", "{}"),
        set("vpc", "2", "{\"vni\":3}"),
        set("vpc", "4", "{"),
        set("vpc", "5", "[]"),
        set("vpc", "6", "{\"vni\":6,\"colour\":\"red\"}"),
        set("port", "p", "\u{0}\u{1}"),
    ]);
    assert_eq!((keys(&desired), desired.count(), desired.bad().len()), (vec!["1"], 7, 6));
    let what = |kind: &str, key: &str| desired.bad()[&Name { kind: kind.into(), key: key.into() }].clone();
    assert!(what("teapot", "x").contains("knows no objects of kind \"teapot\""));
    assert!(what("vpc", "2").contains("is that of \"3\""));
    assert!(what("vpc", "6").contains("colour"));
    assert!(desired.has(&Id { kind: Kind::Vpc, key: "2".into() }));
    // A good one in its place.
    desired.take(vec![vpc(2), gone("teapot", "x")]).unwrap();
    desired.in_sync(2).unwrap();
    assert_eq!((keys(&desired), desired.bad().len()), (vec!["1", "2"], 4));
}

#[test]
fn a_relay_that_knows_less_than_an_earlier_one_is_not_believed() {
    let mut desired = following(vec![vpc(1)]);
    desired.take(vec![vpc(2)]).unwrap();
    desired.in_sync(7).unwrap();
    desired.lost();
    desired.connected(false);
    // Everything is missing: of a store that was lost, or of a relay that has not followed it.
    assert_eq!(desired.in_sync(6), Err(Refused::Behind { revision: 6, known: 7 }));
    desired.lost();
    assert_eq!(keys(&desired), ["1", "2"]);
    desired.connected(false);
    desired.take(vec![vpc(2)]).unwrap();
    assert_eq!(desired.in_sync(7).unwrap().len(), 1);
    assert_eq!(keys(&desired), ["2"]);
    // A relay that says that its store was restored from a backup is, and revisions begin again.
    desired.connected(true);
    desired.take(vec![vpc(1)]).unwrap();
    assert_eq!(desired.in_sync(3).unwrap().len(), 2);
    assert_eq!(keys(&desired), ["1"]);
    desired.connected(false);
    assert_eq!(desired.in_sync(2), Err(Refused::Behind { revision: 2, known: 3 }));
}
