//! The relay's audit log, with the program: who has changed what is on disk when the answer comes.

#![allow(clippy::unwrap_used, missing_docs)]

use std::io::{Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// A relay with an audit log, which ends with the test.
struct Relay {
    directory: PathBuf,
    program: Child,
}

impl Relay {
    /// `log`: where the log leads to; none: a file.
    fn start(name: &str, log: Option<&str>, arguments: &[&str]) -> Relay {
        let directory = std::env::temp_dir().join(format!("bifrost-audit-e2e-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&directory);
        std::fs::create_dir(&directory).unwrap();
        if let Some(to) = log {
            symlink(to, directory.join("audit.json")).unwrap();
        }
        let file = |name: &str| directory.join(name).display().to_string();
        let mut command = Command::new(env!("CARGO_BIN_EXE_bifrost-relay"));
        command.args(["--store", &format!("file:{}", file("store")), "--insecure", "--listen", "127.0.0.1:0"]);
        command.args(["--socket", &file("relay.sock"), "--audit", &file("audit.json")]).args(arguments);
        command.stdin(Stdio::null()).stderr(std::fs::File::create(directory.join("log")).unwrap());
        let relay = Relay { program: command.spawn().unwrap(), directory };
        relay.until("it is ready", || relay.try_ask("GET", "/v1/status", "").is_some_and(|s| s.1["in_sync"] == true));
        relay
    }

    fn connect(&self, method: &str, path: &str, body: &str) -> Option<UnixStream> {
        let mut stream = UnixStream::connect(self.directory.join("relay.sock")).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let head = format!("{method} {path} HTTP/1.1\r\nHost: relay\r\nConnection: close\r\nContent-Length: ");
        write!(stream, "{head}{}\r\n\r\n{body}", body.len()).ok()?;
        Some(stream)
    }

    /// The status and what is answered.
    fn try_ask(&self, method: &str, path: &str, body: &str) -> Option<(u16, Value)> {
        let mut text = String::new();
        self.connect(method, path, body)?.read_to_string(&mut text).ok()?;
        let (head, body) = text.split_once("\r\n\r\n")?;
        Some((head.split(' ').nth(1)?.parse().ok()?, serde_json::from_str(body).ok()?))
    }

    fn apply(&self, changes: Value) -> (u16, Value) {
        self.try_ask("POST", "/v1/apply", &json!({ "changes": changes }).to_string()).unwrap()
    }

    fn objects(&self) -> usize {
        self.try_ask("GET", "/v1/status", "").unwrap().1["objects"].as_u64().unwrap() as usize
    }

    /// All lines, and that each is of this process.
    fn lines(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.directory.join("audit.json")).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let owner = std::fs::metadata(&self.directory).unwrap();
        for line in &lines {
            let who = (&line["uid"], &line["gid"], &line["pid"]);
            assert_eq!(who, (&json!(owner.uid()), &json!(owner.gid()), &json!(std::process::id())), "{line}");
        }
        lines
    }

    fn until(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !holds() {
            let log = std::fs::read_to_string(self.directory.join("log")).unwrap_or_default();
            assert!(Instant::now() < deadline, "not within 20 s: {what}\n{log}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let _ = self.program.kill();
        let _ = self.program.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn set(key: &str, spec: Value) -> Value {
    json!({"op": "set", "key": key, "spec": spec})
}

#[test]
fn changes_are_logged_before_they_are_answered() {
    let relay = Relay::start("lines", None, &[]);
    assert_eq!(relay.apply(json!([set("vpc/demo/a", json!({})), set("vpc/demo/b", json!({}))])).0, 200);
    assert_eq!(relay.apply(json!([set("vpc/demo/a", json!({"dhcp": true})), set("vpc/demo/b", json!({}))])).0, 200);
    assert_eq!(relay.apply(json!([{"op": "delete", "key": "vpc/demo/b"}])).0, 200);
    let refused = [set("subnet/demo/x", json!({"vpc": "b", "prefix": "10.0.0.0/24"})), set("vpc/demo/a", json!({}))];
    assert_eq!(relay.apply(json!(refused)).0, 409);
    assert_eq!(relay.try_ask("POST", "/v1/apply", "{").unwrap().0, 400);
    // What changes nothing in any case is not logged.
    relay.try_ask("POST", "/v1/apply?dry_run=true", &json!({"changes": refused}).to_string()).unwrap();
    relay.try_ask("POST", "/v1/apply?dry_run=true", "{").unwrap();
    relay.try_ask("GET", "/v1/objects", "").unwrap();
    let lines = relay.lines();
    let tell = |l: &Value| {
        let [op, key, before, now, revision, outcome] =
            ["op", "key", "generation_before", "generation", "revision", "outcome"].map(|field| l[field].to_string());
        format!("{op} {key} {before}-{now} @{revision} {outcome}").replace('"', "")
    };
    let told: Vec<_> = lines.iter().map(tell).collect();
    assert_eq!(
        told,
        [
            "set vpc/demo/a 0-1 @1 made",
            "set vpc/demo/b 0-1 @1 made",
            "set vpc/demo/a 1-2 @2 made",
            "set vpc/demo/b 1-1 @2 unchanged",
            "delete vpc/demo/b 1-0 @3 made",
            "set subnet/demo/x 0-null @null refused",
            "set vpc/demo/a 2-null @null refused",
            "null null null-null @null refused",
        ]
    );
    assert_eq!(lines[5]["why"], "subnet/demo/x: vpc: there is no vpc/demo/b; add it, in this batch or before");
    assert_eq!((lines[5]["batch"] == lines[6]["batch"], lines[4]["batch"] == lines[5]["batch"]), (true, false));
}

/// Those who do not wait for the answer are logged, too.
#[test]
fn a_change_is_logged_though_the_connection_has_ended() {
    let relay = Relay::start("gone", None, &[]);
    for n in 0..50 {
        let body = json!({"changes": [set(&format!("vpc/demo/n{n}"), json!({}))]}).to_string();
        drop(relay.connect("POST", "/v1/apply", &body).unwrap());
    }
    let made = || relay.lines().iter().filter(|line| line["outcome"] == "made").count();
    let mut before = 0;
    relay.until("as many lines as objects", || {
        std::thread::sleep(Duration::from_millis(100));
        let objects = relay.objects();
        let is_still = std::mem::replace(&mut before, objects) == objects;
        is_still && objects > 0 && objects == made()
    });
}

#[test]
fn without_a_log_nothing_is_changed_if_that_is_wanted() {
    let relay = Relay::start("required", Some("/dev/full"), &["--audit-required"]);
    let (status, answer) = relay.apply(json!([set("vpc/demo/a", json!({}))]));
    assert_eq!((status, relay.objects()), (503, 0), "{answer}");
    assert!(answer["error"]["what"].as_str().unwrap().contains("the audit log cannot be written"), "{answer}");
    // Once there is room, there are two lines of a change.
    std::fs::remove_file(relay.directory.join("audit.json")).unwrap();
    assert_eq!((relay.apply(json!([set("vpc/demo/a", json!({}))])).0, relay.objects()), (200, 1));
    let outcomes: Vec<_> = relay.lines().iter().map(|line| line["outcome"].clone()).collect();
    assert_eq!(outcomes, ["begun", "made"]);
    // Otherwise it is.
    let relay = Relay::start("wanted", Some("/dev/full"), &[]);
    assert_eq!((relay.apply(json!([set("vpc/demo/a", json!({}))])).0, relay.objects()), (200, 1));
}

/// Of a project one sees and changes what one's role says; what is refused is logged and counted.
#[test]
fn roles_are_kept() {
    let roles = std::env::temp_dir().join(format!("bifrost-audit-e2e-roles-{}", std::process::id()));
    let grant = |uid: u32, role: &str| format!("[[grant]]\nuid = {uid}\nproject = \"demo\"\nrole = \"{role}\"\n");
    std::fs::write(&roles, grant(2001, "viewer") + &grant(2002, "editor")).unwrap();
    let relay = Relay::start("role", None, &["--roles", &roles.display().to_string()]);
    let socket = relay.directory.join("relay.sock");
    std::fs::set_permissions(&socket, std::os::unix::fs::PermissionsExt::from_mode(0o666)).unwrap();
    let (demo, other) = (set("vpc/demo/a", json!({})), set("vpc/other/a", json!({})));
    assert_eq!(relay.apply(json!([demo, other, set("host/h1", json!({"addresses": ["192.0.2.1"]}))])).0, 200, "root");
    // A thread has a user of its own.
    let ask = |uid: u32, method: &str, path: &str, body: Value| {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| {
                let uid = rustix::process::Uid::from_raw(uid);
                rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
                relay.try_ask(method, path, &body).unwrap()
            });
            asking.join().unwrap()
        })
    };
    let change =
        |uid: u32, key: &str| ask(uid, "POST", "/v1/apply", json!({"changes": [set(key, json!({"dhcp": false}))]})).0;
    assert_eq!(ask(2000, "GET", "/v1/status", Value::Null).0, 403, "it has no role");
    assert_eq!([change(2001, "vpc/demo/b"), change(2002, "vpc/demo/b"), change(2002, "vpc/other/b")], [403, 200, 403]);
    let batch = json!({"changes": [set("project/demo", json!({}))]});
    assert_eq!(ask(2002, "POST", "/v1/apply?dry_run=true", batch).0, 403);
    let (_, seen) = ask(2001, "GET", "/v1/objects", Value::Null);
    let keys: Vec<&str> = seen["objects"].as_array().unwrap().iter().map(|o| o["key"].as_str().unwrap()).collect();
    assert_eq!(keys, ["host/h1", "vpc/demo/a", "vpc/demo/b"]);
    let why = |uid: u32, key: &str| ask(uid, "GET", &format!("/v1/why?key={key}"), Value::Null).0;
    assert_eq!([why(2001, "vpc/demo/a"), why(2001, "vpc/other/a"), why(0, "vpc/other/a")], [200, 404, 200]);
    // A role that is taken away is gone with the next request.
    std::fs::write(&roles, grant(2001, "viewer")).unwrap();
    assert_eq!(change(2002, "vpc/demo/b"), 403);

    let text = std::fs::read_to_string(relay.directory.join("audit.json")).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let refused: Vec<_> = lines.iter().filter(|line| line["outcome"] == "refused").collect();
    let told: Vec<_> =
        refused.iter().map(|line| (line["uid"].as_u64().unwrap(), line["key"].as_str().unwrap())).collect();
    assert_eq!(told, [(2001, "vpc/demo/b"), (2002, "vpc/other/b")], "nobody without a role comes so far");
    assert!(refused[1]["why"].as_str().unwrap().contains("needs the role editor of \"other\""), "{}", refused[1]);
    let mut metrics = String::new();
    relay.connect("GET", "/metrics", "").unwrap().read_to_string(&mut metrics).unwrap();
    assert!(metrics.contains("bifrost_relay_batches_forbidden_total 3"), "{metrics}");
    std::fs::remove_file(roles).unwrap();
}
