//! The relay's console over TCP, with the program: it shows, and changes nothing.

#![allow(clippy::unwrap_used, missing_docs)]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// A relay with a console, which ends with the test.
struct Relay {
    directory: PathBuf,
    program: Child,
    console: SocketAddr,
}

impl Relay {
    fn start(name: &str) -> Relay {
        let directory = std::env::temp_dir().join(format!("bifrost-console-e2e-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&directory);
        std::fs::create_dir(&directory).unwrap();
        let log = directory.join("log");
        let mut command = Command::new(env!("CARGO_BIN_EXE_bifrost-relay"));
        command.args([
            "--store",
            "memory",
            "--insecure",
            "--listen",
            "127.0.0.1:0",
            "--console",
            "127.0.0.1:0",
            "--socket",
        ]);
        command.arg(directory.join("relay.sock")).env("NO_COLOR", "1");
        command.stdin(Stdio::null()).stderr(std::fs::File::create(&log).unwrap());
        let program = command.spawn().unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        let console = loop {
            let text = std::fs::read_to_string(&log).unwrap_or_default();
            if let Some((_, rest)) = text.split_once("the console is at http://")
                && text.contains("ready")
            {
                break rest.split('/').next().unwrap().parse().unwrap();
            }
            assert!(Instant::now() < deadline, "the relay is not ready\n{text}");
            std::thread::sleep(Duration::from_millis(10));
        };
        Relay { directory, program, console }
    }

    /// The head and the body of the console's answer.
    fn ask(&self, method: &str, path: &str, host: &str) -> (String, String) {
        exchange(TcpStream::connect(self.console).unwrap(), method, path, host, "")
    }

    fn get(&self, path: &str) -> Value {
        let (head, body) = self.ask("GET", path, "127.0.0.1");
        assert!(head.starts_with("HTTP/1.1 200"), "{head}{body}");
        serde_json::from_str(&body).unwrap()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let _ = self.program.kill();
        let _ = self.program.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn exchange(mut stream: impl Read + Write, method: &str, path: &str, host: &str, body: &str) -> (String, String) {
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    (head.to_owned(), body.to_owned())
}

#[test]
fn the_console_shows_objects_and_changes_nothing() {
    let relay = Relay::start("shows");
    let changes = json!({"changes": [
        {"op": "set", "key": "host/h1", "spec": {"addresses": ["192.0.2.1"]}},
        {"op": "set", "key": "vpc/demo/net", "spec": {}},
        {"op": "set", "key": "subnet/demo/a", "spec": {"vpc": "net", "prefix": "10.0.0.0/24"}},
        {"op": "set", "key": "port/demo/web", "spec": {"subnets": ["a"], "host": "h1", "netns": "web"}},
    ]});
    let api = UnixStream::connect(relay.directory.join("relay.sock")).unwrap();
    let (head, body) = exchange(api, "POST", "/v1/apply", "relay", &changes.to_string());
    assert!(head.starts_with("HTTP/1.1 200"), "{head}{body}");

    for (path, kind) in [("/", "text/html"), ("/console.js", "text/javascript"), ("/console.css", "text/css")] {
        let (head, body) = relay.ask("GET", path, "localhost");
        assert!(head.starts_with("HTTP/1.1 200") && head.contains(kind) && !body.is_empty(), "{path}: {head}");
        assert!(head.contains("content-security-policy: default-src 'none'; script-src 'self'"), "{path}: {head}");
    }
    let overview = relay.get("/v1/overview");
    assert_eq!(overview["objects"], json!({"host": 1, "vpc": 1, "subnet": 1, "port": 1}));
    let net = &overview["vpcs"][0];
    assert_eq!((&net["key"], &net["hosts"]), (&json!("vpc/demo/net"), &json!({"h1": 1})));
    assert_eq!(relay.get("/v1/hosts")[0]["name"], "h1");
    assert_eq!(relay.get("/v1/why?key=port/demo/web")["hosts"][0]["host"], "h1");

    let before = relay.get("/v1/status")["revision"].clone();
    for (method, path, status) in [
        ("POST", "/v1/apply", "404"),
        ("GET", "/v1/wait?revision=9&timeout_ms=1", "404"),
        ("GET", "/metrics", "404"),
        ("DELETE", "/v1/objects", "405"),
        ("GET", "/../../etc/passwd", "404"),
    ] {
        let (head, body) = relay.ask(method, path, "127.0.0.1");
        assert_eq!(head.split(' ').nth(1), Some(status), "{method} {path}: {head}{body}");
    }
    assert_eq!(relay.get("/v1/status")["revision"], before);

    let (head, body) = relay.ask("GET", "/v1/objects", "evil.example");
    assert!(head.starts_with("HTTP/1.1 421") && !body.contains("demo"), "another site's name: {head}{body}");
}

#[test]
fn the_api_answers_while_the_console_has_all_its_connections() {
    let relay = Relay::start("busy");
    let silent: Vec<TcpStream> = (0..80).map(|_| TcpStream::connect(relay.console).unwrap()).collect();
    let api = UnixStream::connect(relay.directory.join("relay.sock")).unwrap();
    assert!(exchange(api, "GET", "/v1/status", "relay", "").0.starts_with("HTTP/1.1 200"));
    // Those that say nothing are cut off after five seconds.
    let begun = Instant::now();
    let (head, _) = relay.ask("GET", "/", "127.0.0.1");
    assert!(head.starts_with("HTTP/1.1 200") && begun.elapsed() < Duration::from_secs(15), "{head}");
    drop(silent);
}
