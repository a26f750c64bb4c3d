//! The program, between a relay and a `bifrostd` that the test plays. No root is needed.

#![allow(clippy::unwrap_used, unreachable_pub, dead_code)]

mod common;

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bifrost_relay_api::tls::Files;
use bifrost_relay_api::{Change, ToAgent, Welcome, pb};
use common::daemon::Daemon;
use common::relay::{Relay, gone, set};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use serde_json::json;

/// The program; killed when it is dropped.
struct Agent(Child);

impl Agent {
    fn start(directory: &Path, arguments: &[&str]) -> Agent {
        let log = std::fs::File::options().create(true).append(true).open(directory.join("log")).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_bifrost-agent"))
            .args(["--host", "host-a", "--socket"])
            .arg(directory.join("sock"))
            .args(arguments)
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        Agent(child)
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !holds() {
        assert!(Instant::now() < deadline, "not within 20 s: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn vpc(vni: u32) -> Change {
    set("vpc", &vni.to_string(), &json!({"vni": vni}))
}

fn insecure(relays: &[&Relay]) -> String {
    let urls: Vec<_> = relays.iter().map(|relay| format!("http://{}", relay.address)).collect();
    format!("--relay={}", urls.join(","))
}

#[test]
fn what_a_relay_says_is_in_force_and_outlives_agent_and_relay() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(&directory.path().join("sock"), 1);
    let (one, other) = (Relay::start(0, None), Relay::start(0, None));
    let metrics = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let arguments = [&insecure(&[&one, &other]), "--insecure", "--metrics", &metrics];
    let agent = Agent::start(directory.path(), &arguments);
    let session = one.session();
    assert_eq!((session.hello.host.as_str(), session.hello.versions), ("host-a", (1, 2)));
    assert!(session.hello.software.starts_with("bifrost-agent "), "{}", session.hello.software);
    session.send(vec![vpc(1), vpc(2)], 7);
    let report = session.reported(7);
    assert_eq!((report.objects, report.problems.len()), (2, 0));
    session.send(vec![vpc(3), gone("vpc", "1")], 8);
    session.reported(8);
    assert_eq!(daemon.keys(), ["vpc 2", "vpc 3"]);
    let text = get(&metrics);
    for line in ["in_sync 1", "revision 8", "objects 2", "problems 0", "propagation_seconds_count 1"] {
        assert!(text.contains(&format!("bifrost_agent_{line}\n")), "{line}: {text}");
    }

    // The relay goes: the next one takes over. Only what it does not know is deleted, and only when it says that that was all.
    drop(one);
    let session = other.session();
    session.say(ToAgent::Changes(vec![vpc(3)]));
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(daemon.keys(), ["vpc 2", "vpc 3"]);
    session.send(vec![vpc(4)], 9);
    session.reported(9);
    assert_eq!(daemon.keys(), ["vpc 3", "vpc 4"]);

    // Killed and started again: it asks, and changes nothing before it knows.
    let instance = session.hello.instance.clone();
    drop(agent);
    assert!(session.is_ended());
    assert_eq!(daemon.keys(), ["vpc 3", "vpc 4"]);
    let arguments = [&insecure(&[&other]), "--insecure"];
    let mut agent = Agent::start(directory.path(), &arguments);
    let session = other.session();
    assert_ne!(session.hello.instance, instance);
    session.send(vec![vpc(3), vpc(4)], 10);
    assert_eq!(session.reported(10).objects, 2);

    // The daemon is restarted, and has nothing.
    drop(daemon);
    let daemon = Daemon::start(&directory.path().join("sock"), 2);
    eventually("everything is there again", || daemon.keys() == ["vpc 3", "vpc 4"]);
    let pid = rustix::process::Pid::from_raw(agent.0.id() as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(agent.0.wait().unwrap().success());
    assert_eq!(daemon.keys(), ["vpc 3", "vpc 4"]);
}

/// A request as Prometheus makes it.
fn get(address: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn a_relay_that_breaks_the_protocol_changes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(&directory.path().join("sock"), 1);
    let relay = Relay::start(0, None);
    let start = || Agent::start(directory.path(), &[&insecure(&[&relay]), "--insecure"]);
    let agent = start();
    let session = relay.session();
    session.send(vec![vpc(1)], 1);
    session.reported(1);
    drop((agent, session));
    let change = |kind: &str, key: &str, spec: usize| pb::Change {
        kind: kind.into(),
        key: key.into(),
        spec: Some(vec![b' '; spec].into()),
        committed_ms: 0,
    };
    let changes = |changes: Vec<pb::Change>| pb::ToAgent {
        message: Some(pb::to_agent::Message::Changes(pb::Changes { changes })),
    };
    let welcome = |version| ToAgent::Welcome(Welcome { version, ..Welcome::default() }).into();
    // Each ends the stream, and nothing is deleted although an `InSync` without the object follows.
    let after_welcome = [
        pb::ToAgent::default(),
        welcome(1),
        changes(vec![change("vpc", "", 2)]),
        changes(vec![change("../etc", "1", 2)]),
        changes(vec![change("vpc", "1", (1 << 20) + 1)]),
        changes(vec![change("vpc", "1", 0); 1001]),
        changes(vec![change("vpc", "1", 1 << 20); 5]),
    ];
    let cases = after_welcome.map(|message| vec![welcome(1), message]).into_iter().chain([
        vec![welcome(0)],
        vec![welcome(3)],
        vec![ToAgent::InSync(5).into()],
        vec![changes(vec![])],
    ]);
    for case in cases {
        // A new one each time: one that is sent nonsense again and again comes back ever later.
        let _agent = start();
        let session = relay.greeted();
        let case_text = format!("{case:?}").chars().take(200).collect::<String>();
        case.into_iter().for_each(|message| session.say_raw(message));
        session.say(ToAgent::InSync(9));
        assert!(session.is_ended(), "{case_text}");
        assert_eq!(daemon.keys(), ["vpc 1"], "{case_text}");
    }
    let _agent = start();
    // A good stream is followed as ever, and what it says that makes no sense is a problem of its own.
    let session = relay.session();
    let odd = [set("quark", "up", &json!({})), set("vpc", "x", &json!([])), set("vpc", "3", &json!({"vni": "\u{0}"}))];
    session.send(odd.into_iter().chain([vpc(2)]).collect(), 10);
    let report = session.reported(10);
    assert_eq!((report.objects, report.problems.len()), (1, 3), "{report:?}");
    assert_eq!(daemon.keys(), ["vpc 2"]);
}

#[test]
fn an_agent_says_what_it_has_seen_and_follows_a_store_that_was_restored() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(&directory.path().join("sock"), 1);
    let relay = Relay::start(0, None);
    let _agent = Agent::start(directory.path(), &[&insecure(&[&relay]), "--insecure"]);
    let session = relay.session();
    assert_eq!(session.hello.revision, 0);
    session.send(vec![vpc(1), vpc(2)], 7);
    session.reported(7);
    drop(session);
    let session = relay.session();
    assert_eq!(session.hello.revision, 7);
    session.send(vec![vpc(1)], 3);
    assert!(session.is_ended(), "nothing says why there is less");
    assert_eq!(daemon.keys(), ["vpc 1", "vpc 2"]);
    let session = relay.greeted();
    assert_eq!(session.hello.revision, 7);
    session.say(ToAgent::Welcome(Welcome { version: 1, restored: true, ..Welcome::default() }));
    session.send(vec![vpc(1)], 3);
    session.reported(3);
    assert_eq!(daemon.keys(), ["vpc 1"]);
    drop(session);
    assert_eq!(relay.session().hello.revision, 3);
}

/// An authority's certificates.
fn certificates(directory: &Path) -> impl Fn(&str) -> Files {
    let directory = directory.to_owned();
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    std::fs::write(directory.join("ca.pem"), params.self_signed(&key).unwrap().pem()).unwrap();
    let issuer = Issuer::new(params, key);
    move |name| {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.to_owned(), "127.0.0.1".to_owned()]).unwrap();
        let at = |what: &str| -> PathBuf { directory.join(format!("{name}.{what}")) };
        std::fs::write(at("pem"), params.signed_by(&key, &issuer).unwrap().pem()).unwrap();
        std::fs::write(at("key"), key.serialize_pem()).unwrap();
        Files { ca: directory.join("ca.pem"), certificate: at("pem"), key: at("key") }
    }
}

#[test]
fn certificates_are_shown_and_renewed() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(&directory.path().join("sock"), 1);
    let issue = certificates(directory.path());
    let relay = Relay::start(0, Some(issue("relay").read().unwrap().server()));
    // That of another host, which the relay refuses.
    let files = issue("host-b");
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let (ca, certificate, key) = (text(&files.ca), text(&files.certificate), text(&files.key));
    let url = format!("https://{}", relay.address);
    let arguments = ["--relay", &url, "--ca", &ca, "--certificate", &certificate, "--key", &key];
    let _agent = Agent::start(directory.path(), &arguments);
    let log = || std::fs::read_to_string(directory.path().join("log")).unwrap();
    eventually("it is refused", || log().contains("PERMISSION_DENIED: another host's certificate"));
    let right = issue("host-a");
    std::fs::rename(&right.key, &files.key).unwrap();
    std::fs::rename(&right.certificate, &files.certificate).unwrap();
    let session = relay.session();
    session.send(vec![vpc(1)], 1);
    session.reported(1);
    assert_eq!(daemon.keys(), ["vpc 1"]);
}

#[test]
fn help_teaches_and_mistakes_are_told() {
    let run = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_bifrost-agent")).args(arguments).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.success(), text(output.stdout), text(output.stderr))
    };
    let (ok, help, _) = run(&["--help"]);
    assert!(
        ok && help.contains("EXAMPLES") && help.contains("--insecure") && help.contains("traffic goes on"),
        "{help}"
    );
    assert!(help.lines().all(|line| line.chars().count() <= 100), "{help}");
    let common = ["--host", "h", "--relay"];
    let (ok, _, error) = run(&[&common[..], &["https://a:1", "--insecure"]].concat());
    assert!(!ok && error.contains("bifrost-agent: --relay \"https://a:1\": with --insecure"), "{error}");
    let tls = ["https://a:1", "--ca", "/nonexistent", "--cert", "/nonexistent", "--key", "/nonexistent"];
    let (ok, _, error) = run(&[&common[..], &tls].concat());
    assert!(!ok && error.contains("cannot read /nonexistent"), "{error}");
}
