use std::sync::Arc;
use std::time::SystemTime;

use bifrost_control::server::Peer;
use bifrost_intent::api::ChangedObject;
use bifrost_intent::{Change, Problem, Role};
use serde_json::{Value, json};

use super::*;
use crate::caller::Holder;

const PEER: Caller = Caller::User(Peer { uid: 1000, gid: 100, pid: Some(7) });

/// A directory that ends with the test.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Directory {
        let path = std::env::temp_dir().join(format!("bifrost-audit-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir(&path).unwrap();
        Directory(path)
    }

    fn log(&self) -> PathBuf {
        self.0.join("audit.json")
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn batch(keys: &[&str]) -> Batch {
    let set =
        |key: &&str| Change { op: Op::Set, key: key.parse().unwrap(), spec: Some(json!({})), if_generation: None };
    Batch { changes: keys.iter().map(set).collect() }
}

fn applied(key: &str, generation: u64) -> Applied {
    let changed = vec![ChangedObject { key: key.parse().unwrap(), generation, spec: None }];
    Applied { revision: 9, changed, unchanged: 0 }
}

fn refused(key: Option<&str>, what: &str) -> Result<Applied, SubmitError> {
    let key = key.map(|key| key.parse().unwrap());
    let problem = Problem { key, field: String::new(), what: what.into(), is_conflict: false };
    Err(SubmitError::Plan(PlanError(vec![problem])))
}

#[test]
fn each_change_has_a_line() {
    let directory = Directory::new("each");
    let audit = Audit::open(&directory.log(), "r1", false).unwrap();
    let batch = batch(&["vpc/a/new", "vpc/a/same"]);
    let request = Request::new(&batch, &PEER);
    audit.begin(&request, 4).unwrap();
    audit.end(&request, &[0, 3], &Ok(applied("vpc/a/new", 1)), 5);
    let number = format!("{:016x}", request.number);
    let line = |key: &str, before: u64, now: u64, outcome: &str| {
        json!({"time_ms": 5, "relay": "r1", "batch": number, "uid": 1000, "gid": 100, "pid": 7, "op": "set", "key": key,
               "generation_before": before, "generation": now, "revision": 9, "outcome": outcome})
    };
    assert_eq!(lines(&directory.log()), [line("vpc/a/new", 0, 1, "made"), line("vpc/a/same", 3, 3, "unchanged")]);
    assert_eq!(audit.counts(), (2, 0));
}

#[test]
fn what_is_refused_is_logged_with_the_reason() {
    let directory = Directory::new("refused");
    let audit = Audit::open(&directory.log(), "r1", false).unwrap();
    let batch = batch(&["vpc/a/bad", "vpc/a/good"]);
    let request = Request::new(&batch, &PEER);
    audit.end(&request, &[2, 0], &refused(Some("vpc/a/bad"), "no"), 5);
    audit.end(&request, &[], &Err(SubmitError::NotInSync), 5);
    audit.end(&request, &[2, 0], &Err(SubmitError::Unknown("lost".into())), 5);
    audit.unreadable(&PEER, "not a batch", 5);
    let told: Vec<_> = lines(&directory.log())
        .iter()
        .map(|l| format!("{} {} {} {}", l["outcome"], l["key"], l["generation_before"], l["why"]).replace('"', ""))
        .collect();
    assert_eq!(told[0], "refused vpc/a/bad 2 vpc/a/bad: no");
    assert_eq!(told[1], "refused vpc/a/good 0 with the batch: vpc/a/bad: no");
    assert!(told[2].starts_with("refused vpc/a/bad null the relay does not follow"), "{told:?}");
    assert!(told[4].starts_with("unknown vpc/a/bad 2 the store did not say"), "{told:?}");
    assert_eq!(told[6..], ["refused null null not a batch"]);
}

#[test]
fn lines_are_of_bounded_length_and_number() {
    let directory = Directory::new("bounds");
    let audit = Audit::open(&directory.log(), &"\u{1}".repeat(1000), false).unwrap();
    let name = "n".repeat(31);
    let whole = batch(&[&format!("security_group/{name}/{name}")]);
    let peer = Caller::User(Peer { uid: u32::MAX, gid: u32::MAX, pid: Some(i32::MIN) });
    let roles = (0..32).map(|n| (format!("{}{n}", "p".repeat(29)), Role::Viewer)).collect();
    let long = "\u{1}".repeat(1000);
    let until = SystemTime::now();
    let holder = Caller::Holder(Arc::new(Holder { name: long.clone(), serial: long.clone(), until, roles: Ok(roles) }));
    for what in ["\u{1}".repeat(5000), "\u{20ac}".repeat(5000), "\"\\".repeat(5000), "x".repeat(5000)] {
        audit.end(&Request::new(&whole, &peer), &[u64::MAX], &refused(None, &what), u64::MAX);
        audit.end(&Request::new(&whole, &holder), &[u64::MAX], &refused(None, &what), u64::MAX);
        let about = About::Operator { name: &long, roles: &long, serial: Some(&long) };
        audit.event(Event::Certified, Some(&holder), about, Some(&what), u64::MAX).unwrap();
    }
    let text = std::fs::read_to_string(directory.log()).unwrap();
    for line in text.lines() {
        assert!(line.len() < MAX_LINE && line.contains("...\""), "{} bytes", line.len());
    }
    // More changes than a batch may have, and none: one line.
    let names: Vec<_> = (0..=MAX_CHANGES).map(|n| format!("vpc/a/n{n}")).collect();
    let many = batch(&names.iter().map(String::as_str).collect::<Vec<_>>());
    audit.end(&Request::new(&many, &PEER), &[], &refused(None, "too many"), 5);
    audit.end(&Request::new(&Batch::default(), &PEER), &[], &Ok(Applied::default()), 5);
    assert_eq!(lines(&directory.log()).len(), 3 * 4 + 1 + 1);
    assert_eq!((shorten("abcdef", 9), shorten("abcdefg", 9)), ("abcdef".to_owned(), "abcdef...".to_owned()));
}

#[test]
fn a_file_that_was_renamed_is_followed_by_a_new_one() {
    let directory = Directory::new("rename");
    let audit = Audit::open(&directory.log(), "r1", false).unwrap();
    let log = |key: &str| audit.end(&Request::new(&batch(&[key]), &PEER), &[0], &Ok(applied(key, 1)), 5);
    log("vpc/a/one");
    let old = directory.0.join("audit.json.1");
    std::fs::rename(directory.log(), &old).unwrap();
    log("vpc/a/two");
    log("vpc/a/three");
    assert_eq!((lines(&old).len(), lines(&directory.log()).len()), (1, 2));
    // What a crash has left of a line does not spoil the next.
    std::fs::write(directory.log(), "{\"time").unwrap();
    let again = Audit::open(&directory.log(), "r1", false).unwrap();
    again.end(&Request::new(&batch(&["vpc/a/four"]), &PEER), &[0], &Ok(applied("vpc/a/four", 1)), 5);
    let text = std::fs::read_to_string(directory.log()).unwrap();
    let last: Value = serde_json::from_str(text.lines().nth(1).unwrap()).unwrap();
    assert_eq!((text.lines().count(), &last["key"]), (2, &json!("vpc/a/four")));
}

#[test]
fn what_cannot_be_logged_is_counted_or_refused() {
    let full = Path::new("/dev/full");
    let batch = batch(&["vpc/a/one", "vpc/a/two"]);
    let request = Request::new(&batch, &PEER);
    let audit = Audit::open(full, "r1", false).unwrap();
    audit.begin(&request, 4).unwrap();
    audit.end(&request, &[0, 0], &Ok(applied("vpc/a/one", 1)), 5);
    assert_eq!(audit.counts(), (0, 2));
    let audit = Audit::open(full, "r1", true).unwrap();
    let error = audit.begin(&request, 4).unwrap_err().to_string();
    assert!(error.contains("the audit log cannot be written: No space left"), "{error}");
    // The line from before the change says that nobody has heard the end of it.
    let directory = Directory::new("required");
    let audit = Audit::open(&directory.log(), "r1", true).unwrap();
    audit.begin(&request, 4).unwrap();
    let begun = lines(&directory.log());
    assert_eq!((begun.len(), &begun[1]["outcome"], &begun[1]["key"]), (2, &json!("begun"), &json!("vpc/a/two")));
    assert!(Audit::open(Path::new("/nowhere/audit.json"), "r1", false).is_err());
}

#[test]
fn a_certificate_is_logged_by_its_subject_and_roles() {
    let directory = Directory::new("certificate");
    let audit = Audit::open(&directory.log(), "r1", false).unwrap();
    let roles = [("demo".to_owned(), Role::Editor), ("*".to_owned(), Role::Viewer)].into();
    let until = SystemTime::now();
    let caller =
        Caller::Holder(Arc::new(Holder { name: "alice".into(), serial: "7f".into(), until, roles: Ok(roles) }));
    audit.end(&Request::new(&batch(&["vpc/demo/a"]), &caller), &[0], &Ok(applied("vpc/demo/a", 1)), 5);
    let about = About::Operator { name: "bob", roles: "viewer:demo", serial: Some("80") };
    audit.event(Event::Certified, Some(&caller), about, None, 6).unwrap();
    let lines = lines(&directory.log());
    for line in &lines {
        assert_eq!((&line["name"], &line["roles"]), (&json!("alice"), &json!("viewer:* editor:demo")), "{line}");
        assert_eq!((&line["serial"], line.get("uid")), (&json!("7f"), None), "{line}");
    }
    let bob = &lines[1];
    assert_eq!((&bob["op"], &bob["outcome"]), (&json!("certificate"), &json!("made")));
    assert_eq!((&bob["for_name"], &bob["for_roles"]), (&json!("bob"), &json!("viewer:demo")));
    assert_eq!(bob["for_serial"], json!("80"));
}
