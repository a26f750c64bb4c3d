//! The program, against a daemon that makes everything up.

#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::path::{Path as FilePath, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bifrost_control::api::*;
use bifrost_control::server::{CaptureStream, Pages, one_page};
use bifrost_control::{Backend, Client, ServerHandle, serve};

#[derive(Default)]
struct Fake(Mutex<Vec<FaultEntry>>);

impl Backend for Fake {
    fn status(&self) -> Result<Status, ApiError> {
        let peers = vec![PeerStatus { name: "host-b".into(), transport: PeerMode::Plain, ..PeerStatus::default() }];
        Ok(Status { host: "host-a".into(), version: "9.9".into(), pid: 7, ports: 1, peers, ..Status::default() })
    }
    fn ports(&self) -> Result<Pages<PortStatus>, ApiError> {
        Ok(one_page(vec![PortStatus { name: "web1".into(), vni: 100, rx_packets: 12345, ..PortStatus::default() }]))
    }
    fn routes(&self) -> Result<Pages<Route>, ApiError> {
        Ok(one_page(Vec::new()))
    }
    fn mirrors(&self) -> Result<Vec<MirrorStatus>, ApiError> {
        Ok(vec![MirrorStatus {
            name: "ids".into(),
            ports: vec!["web".into()],
            direction: "both".into(),
            target: "192.0.2.9:4789".parse().unwrap(),
            target_vni: 4242,
            one_in: 10,
            truncate_bytes: 128,
            sent_packets: 7,
            missed_packets: 0,
            unsent_packets: 1,
        }])
    }
    fn nat(&self) -> Result<Vec<NatStatus>, ApiError> {
        Ok(vec![NatStatus {
            kind: NatKind::Shared,
            uplink: "outside".into(),
            vni: 100,
            address: "203.0.113.10".parse().unwrap(),
            protocol: None,
            port: None,
            inside: None,
            inside_port: None,
            here: true,
            ports: Some((1024, 2047)),
            tcp_ports: 7,
            udp_ports: 0,
            echo_identifiers: 1,
        }])
    }
    fn load_balancers(&self) -> Result<Vec<LoadBalancerStatus>, ApiError> {
        let backend =
            BackendStatus { address: "10.0.0.2".parse().unwrap(), port: 8080, weight: 3, health: BackendHealth::Down };
        Ok(vec![LoadBalancerStatus {
            name: "web".into(),
            vni: 100,
            address: "10.0.0.100".parse().unwrap(),
            port: 80,
            protocol: "tcp".into(),
            affinity: "client".into(),
            backends: vec![backend],
        }])
    }
    fn flow_log(&self) -> Result<FlowLogStatus, ApiError> {
        let json = Some("/var/log/bifrost/flows.json".into());
        Ok(FlowLogStatus { on: true, json, ports: vec!["web1".into()], created_records: 7, ..FlowLogStatus::default() })
    }
    fn conns(&self) -> Result<Pages<Conn>, ApiError> {
        Ok(one_page(vec![Conn { cid: 0x0100_0001, peer: "host-b".into(), ..Conn::default() }]))
    }
    fn paths(&self) -> Result<Pages<Path>, ApiError> {
        Ok(one_page(vec![Path {
            peer: "host-b".into(),
            srtt_us: Some(31.5),
            state: PathState::Active,
            ..Path::default()
        }]))
    }
    fn drain_path(&self, spec: DrainSpec, drained: bool) -> Result<DrainReport, ApiError> {
        match (spec.peer.as_str(), spec.path) {
            ("host-b", 3) => {
                Err(ApiError::conflict("no path to host-b would be left").at("path").hint("restore another"))
            }
            ("host-b", path) => {
                let in_use_paths = (0..4).filter(|i| *i != path || !drained).collect();
                Ok(DrainReport { peer: spec.peer, path, drained, changed: path != 2, in_use_paths })
            }
            _ => {
                Err(ApiError::not_found(format!("no peer named {:?}", spec.peer)).at("peer").hint("there are: host-b"))
            }
        }
    }
    fn stats(&self) -> Result<Stats, ApiError> {
        let counters = [("drop_spoofed_packets", 3), ("drop_no_route_packets", 0), ("tx_packets", 5)];
        Ok(Stats { counters: counters.map(|(name, value)| (name.to_owned(), value)).into() })
    }
    fn samples(&self) -> Result<Pages<Sample>, ApiError> {
        let port = |port: &str| Place { worker: Some(0), port: Some(port.to_owned()), ..Place::default() };
        let sample = |counter: &str, at, value| Sample { counter: counter.to_owned(), at, value };
        Ok(one_page(vec![
            sample("port.tx_packets", port("web1"), 5),
            sample("avs.dropped_spoofed_ip_packets", port("web1"), 3),
            sample("drop.unknown_peer_packets", Place { worker: Some(0), ..Place::default() }, 2),
            sample(
                "path.srtt_ns",
                Place { peer: Some("host-b".to_owned()), path: Some(1), ..Place::default() },
                31_500,
            ),
        ]))
    }
    fn faults(&self) -> Result<Vec<FaultEntry>, ApiError> {
        Ok(self.0.lock().unwrap().clone())
    }
    fn add_fault(&self, spec: FaultSpec) -> Result<FaultEntry, ApiError> {
        let mut faults = self.0.lock().unwrap();
        let entry = FaultEntry { id: 1 + faults.len() as u64, spec, hits_packets: 0 };
        faults.push(entry.clone());
        Ok(entry)
    }
    fn remove_fault(&self, id: u64) -> Result<(), ApiError> {
        Err(ApiError::not_found(format!("no fault {id}")).at("id").hint("known ids: 1"))
    }
    fn clear_faults(&self) -> Result<u64, ApiError> {
        Ok(self.0.lock().unwrap().drain(..).count() as u64)
    }
    fn apply(&self, spec: ApplySpec) -> Result<ApplyReport, ApiError> {
        match spec.items.iter().find(|item| item.owner == "nobody") {
            Some(item) => Err(ApiError::conflict("the object belongs to \"agent\"").at(format!("{}", item.kind))),
            None => Ok(ApplyReport { set: spec.items.len() as u64, took_us: 900, ..ApplyReport::default() }),
        }
    }
    fn objects(&self, query: ObjectsQuery) -> Result<ObjectList, ApiError> {
        let entry = ObjectEntry {
            kind: query.kind.unwrap_or(bifrost_control::config::Kind::Port),
            key: query.key.unwrap_or_else(|| "web1".to_owned()),
            owner: query.owner.unwrap_or_else(|| "agent".to_owned()),
            generation: 3,
            changed_ms: 1,
            spec: serde_json::json!({"name": "web1", "vni": query.vni.unwrap_or(100), "addresses": ["10.0.0.1/24"]}),
        };
        Ok(ObjectList { objects: vec![entry], next: query.from })
    }
    fn object_digests(&self, _: ObjectsQuery) -> Result<Vec<ObjectsDigest>, ApiError> {
        let digest = "00000000000000ff".to_owned();
        Ok(vec![ObjectsDigest { owner: "agent".into(), vni: Some(100), objects: 3, digest }])
    }
    fn reload(&self) -> Result<ReloadReport, ApiError> {
        Err(ApiError::bad_request("these need a restart of bifrostd: host.name: a -> b"))
    }
    fn trace(&self, spec: TraceSpec) -> Result<Trace, ApiError> {
        // What arrived, as it was understood.
        Ok(Trace { packet: serde_json::to_string(&spec).unwrap(), verdict: TraceVerdict::Sent, ..Trace::default() })
    }
    fn capture(&self, spec: CaptureSpec) -> Result<Box<dyn CaptureStream>, ApiError> {
        match spec.filter.as_str() {
            "tcp prot 80" => Err(ApiError::bad_request("column 5: no").at("filter").hint("tcp prot 80\n    ^")),
            _ => Ok(Box::new(OnePiece(Some(serde_json::to_vec(&spec).unwrap())))),
        }
    }
}

/// A capture of one piece.
struct OnePiece(Option<Vec<u8>>);

impl CaptureStream for OnePiece {
    fn next(&mut self) -> Option<Vec<u8>> {
        self.0.take()
    }
}

#[test]
fn a_capture_is_written_as_it_comes() {
    let rig = rig();
    let args = ["capture", "--at", "avs,drop", "--filter", "tcp port 80", "--count", "9", "-w"];
    let output = run(&rig.socket, &[&args[..], &["-"]].concat());
    assert!(output.status.success());
    let spec: CaptureSpec = serde_json::from_slice(&output.stdout).unwrap();
    let expected = CaptureSpec {
        at: vec!["avs".into(), "drop".into()],
        filter: "tcp port 80".into(),
        packets: 9,
        ..CaptureSpec::default()
    };
    assert_eq!(spec, expected);
    assert_eq!(String::from_utf8_lossy(&output.stderr), "0 packets captured, 0 found no room\n");
    let output = run(&rig.socket, &["capture", "--filter", "tcp prot 80", "-w", "-"]);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && error.contains("filter: column 5: no"), "{error}");
    let output = run(&rig.socket, &["capture", "-w", "/nowhere/at/all.pcapng"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot write /nowhere/at/all.pcapng"));
}

struct Rig {
    socket: PathBuf,
    _server: ServerHandle,
    _dir: tempfile::TempDir,
}

fn rig() -> Rig {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("d.sock");
    let server = serve(&socket, Arc::new(Fake::default())).unwrap();
    Rig { socket, _server: server, _dir: dir }
}

fn run(socket: &FilePath, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bifrostctl"));
    command.env_remove("BIFROST_SOCKET").arg("--socket").arg(socket).args(args).output().unwrap()
}

fn good(socket: &FilePath, args: &[&str]) -> String {
    let output = run(socket, args);
    assert!(output.status.success(), "{args:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn bad(socket: &FilePath, args: &[&str], code: i32) -> String {
    let output = run(socket, args);
    assert_eq!((output.status.code(), output.stdout.len()), (Some(code), 0), "{args:?}: {output:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn text() {
    let r = rig();
    let cases: [(&[&str], &[&str]); 7] = [
        (&["status"], &["9.9 on host-a, pid 7", "1 port, 0 routes, 0 connections", "host-b  plain vxlan"]),
        (&["ports"], &["web1", "12345"]),
        (&["routes"], &["no routes"]),
        (&["flow-log"], &["/var/log/bifrost/flows.json", "web1", "7 records, 0 lost"]),
        (&["conns"], &["01000001  connecting  host-b"]),
        (&["paths"], &["active", "31.5"]),
        (&["stats"], &["drop_no_route_packets   ", "tx_packets"]),
    ];
    for (args, parts) in cases {
        let text = good(&r.socket, args);
        assert!(parts.iter().all(|part| text.contains(part)), "{args:?}:\n{text}");
    }
    let text = good(&r.socket, &["drops"]);
    let parts = ["avs.dropped_spoofed_ip_packets", "port web1, worker 0", "source IP", "-> compare", "unknown_peer"];
    assert!(parts.iter().all(|part| text.contains(part)) && !text.contains("port.tx_packets"), "{text}");
    let text = good(&r.socket, &["drops", "web1", "--watch", "0.05", "--count", "2"]);
    assert!(text.matches("spoofed_ip_packets").count() == 2 && !text.contains("unknown_peer"), "{text}");
    let text = good(&r.socket, &["stats", "--nonzero", "drop"]);
    assert!(text.contains("spoofed") && !text.contains("no_route") && !text.contains("tx_packets"), "{text}");
}

#[test]
fn json_is_what_the_api_says() {
    let r = rig();
    let client = Client::new(&r.socket).unwrap();
    let json =
        |command: &str| -> serde_json::Value { serde_json::from_str(&good(&r.socket, &["--json", command])).unwrap() };
    assert_eq!(json("status"), serde_json::to_value(client.status().unwrap()).unwrap());
    assert_eq!(json("ports"), serde_json::to_value(client.ports().unwrap()).unwrap());
    assert_eq!(json("routes"), serde_json::json!([]));
    assert_eq!(json("conns")[0]["cid"], 0x0100_0001);
    assert_eq!(json("paths")[0]["srtt_us"], 31.5);
    assert_eq!(json("stats")["counters"]["tx_packets"], 5);
    assert_eq!(json("drops")["drops"][0]["port"], "web1");
    // After the command, too.
    assert!(good(&r.socket, &["paths", "--json"]).starts_with('['));
}

#[test]
fn faults() {
    let r = rig();
    assert_eq!(good(&r.socket, &["fault", "list"]), "no faults in force\n");
    let text = good(&r.socket, &["fault", "add", "--peer", "host-b", "--path", "2", "--down"]);
    assert!(text.starts_with("fault 1: peer host-b path 2, rx, down\n"), "{text}");
    let text = good(&r.socket, &["--json", "fault", "add", "--port", "web1", "--loss", "1", "--seed", "3"]);
    let entry: FaultEntry = serde_json::from_str(&text).unwrap();
    assert_eq!((entry.id, entry.spec.loss_percent, entry.spec.seed), (2, 1.0, Some(3)));
    let text = good(&r.socket, &["fault", "list"]);
    assert!(text.contains("port web1") && text.contains("loss 1 %, seed 3"), "{text}");
    assert_eq!(bad(&r.socket, &["fault", "clear", "--id", "9"], 1), "error: id: no fault 9\nhint: known ids: 1\n");
    assert_eq!(good(&r.socket, &["fault", "clear"]), "removed 2 faults\n");
}

#[test]
fn paths_are_drained_and_restored() {
    let r = rig();
    let text = good(&r.socket, &["path", "drain", "--peer", "host-b", "--path", "1"]);
    assert_eq!(
        text,
        "path 1 to host-b is drained; in use: 0, 2, 3\n\
         host-b still sends on it until it is drained there, too\n\
         take it back with `bifrostctl path restore --peer host-b --path 1`\n"
    );
    let text = good(&r.socket, &["path", "restore", "--peer", "host-b", "--path", "2"]);
    assert_eq!(text, "path 2 to host-b was not drained; in use: 0, 1, 2, 3\n");
    let text = good(&r.socket, &["--json", "path", "restore", "--peer", "host-b", "--path", "1"]);
    let report: DrainReport = serde_json::from_str(&text).unwrap();
    assert_eq!((report.path, report.drained, report.changed), (1, false, true));
    let text = bad(&r.socket, &["path", "drain", "--peer", "host-b", "--path", "3"], 1);
    assert_eq!(text, "error: path: no path to host-b would be left\nhint: restore another\n");
    let text = bad(&r.socket, &["path", "drain", "--peer", "nobody", "--path", "0"], 1);
    assert_eq!(text, "error: peer: no peer named \"nobody\"\nhint: there are: host-b\n");
    let text = bad(&r.socket, &["path", "drain", "--peer", "host-b", "--path", "8"], 2);
    assert!(text.contains("8 is not in 0..=7"), "{text}");
    let text = bad(&r.socket, &["path", "drain", "--peer", "host-b"], 2);
    assert!(text.contains("--path <N>"), "{text}");
}

#[test]
fn errors_help() {
    let r = rig();
    let text = bad(&r.socket, &["reload"], 1);
    assert!(text.contains("need a restart of bifrostd: host.name"), "{text}");
    let nobody = r.socket.with_file_name("nobody.sock");
    let text = bad(&nobody, &["paths"], 1);
    assert!(text.contains("nobody.sock") && text.contains("not running") && text.contains("systemctl start"), "{text}");
    let error: serde_json::Value = serde_json::from_str(&bad(&nobody, &["--json", "paths"], 1)).unwrap();
    assert_eq!(error["error"]["where"], nobody.to_str().unwrap());
    let text = bad(&r.socket, &["pahts"], 2);
    assert!(text.contains("similar") && text.contains("paths"), "{text}");
    bad(&r.socket, &["fault", "add", "--loss", "1"], 2);
    let text = bad(&r.socket, &["top"], 1);
    assert!(text.contains("top needs a terminal") && text.contains("--json top"), "{text}");
}

#[test]
fn packets_are_described() {
    let r = rig();
    let asked = |args: &str| -> serde_json::Value {
        let answer = good(&r.socket, &args.split_whitespace().collect::<Vec<_>>());
        let answer: serde_json::Value = serde_json::from_str(&answer).unwrap();
        assert_eq!(answer["verdict"], "sent");
        serde_json::from_str(answer["packet"].as_str().unwrap()).unwrap()
    };
    let spec = asked("--json trace --port web1 --to 10.0.0.2 --tcp 40000:6379 --flags syn,ack --size 1500 --df");
    assert_eq!((&spec["port"], &spec["to"], &spec["size_bytes"]), (&"web1".into(), &"10.0.0.2".into(), &1500.into()));
    assert_eq!(
        (&spec["tcp"][1], &spec["flags"][1], &spec["dont_fragment"]),
        (&6379.into(), &"ack".into(), &true.into())
    );
    let spec = asked("--json trace --from-peer 192.0.2.2 --vni 100 --from 10.0.0.2 --to 10.0.0.1 --ping");
    assert_eq!((&spec["from_peer"], &spec["vni"], &spec["ping"]), (&"192.0.2.2".into(), &100.into(), &true.into()));
    for (args, code, message) in [
        ("trace --port web1 --to 10.0.0.2", 2, "--tcp <FROM:TO>|--udp"),
        ("trace --to 10.0.0.2 --ping", 2, "--port <NAME>|--from-peer"),
        ("trace --from-peer 192.0.2.2 --to 10.0.0.2 --ping", 2, "--vni"),
        ("trace --port web1 --to 10.0.0.2 --tcp 80", 2, "write both ports"),
        ("trace --port web1 --to fd00::2 --from 10.0.0.1 --ping", 1, "different families"),
    ] {
        let text = bad(&r.socket, &args.split_whitespace().collect::<Vec<_>>(), code);
        assert!(text.contains(message), "{args}: {text}");
    }
}

#[test]
fn objects_are_listed_and_changed() {
    let r = rig();
    let text = good(&r.socket, &["objects"]);
    assert!(text.contains("web1") && text.contains("agent") && text.contains("addresses"), "{text}");
    assert!(good(&r.socket, &["objects", "--digest"]).contains("00000000000000ff"));
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let tables = file("a.toml", "[[port]]\nname = 'p'\nvni = 1\n[[route]]\nvni = 1\nprefix = '10.0.0.0/8'\n");
    let text = good(&r.socket, &["apply", "-f", &tables]);
    assert!(text.contains("2 set, 0 deleted, 0 unchanged"), "{text}");
    let batch =
        file("a.json", "{\"items\": [{\"op\": \"delete\", \"kind\": \"port\", \"key\": \"p\", \"owner\": \"x\"}]}");
    assert!(good(&r.socket, &["apply", "-f", &batch]).contains("1 set"));
    let add = ["route", "add", "100/10.0.0.9/32", "peer=host-b", "mac=02:00:00:00:00:09", "security_groups=web,db"];
    assert!(good(&r.socket, &add).contains("1 set"));
    assert!(good(&r.socket, &["port", "set", "web1", "mtu=1400"]).contains("1 set"));
    assert!(good(&r.socket, &["sg", "delete", "web"]).contains("1 set"));
    let refused: [(&[&str], &str); 5] = [
        (&["port", "delete", "web1", "--owner", "nobody"], "error: port: the object belongs to \"agent\""),
        (&["port", "add", "web1", "vni"], "\"vni\" is no KEY=VALUE"),
        (&["apply", "-f", "/nonexistent"], "cannot be read"),
        (&["apply", "-f", &file("b.toml", "[[prot]]\nname = 'p'\n")], "\"prot\" is no kind of object"),
        (&["route", "add", "10.0.0.9/32", "peer=b"], "is no key of a route"),
    ];
    for (args, says) in refused {
        let text = bad(&r.socket, args, 1);
        assert!(text.contains(says), "{args:?}: {text}");
    }
}

#[test]
fn top_as_json_lines() {
    let r = rig();
    let text = good(&r.socket, &["--json", "top", "--interval-ms", "50", "--count", "3"]);
    let lines: Vec<serde_json::Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(lines.len(), 3);
    assert!(lines.iter().all(|l| l["paths"][0]["peer"] == "host-b" && l["status"]["pid"] == 7));
    assert!(lines[0]["at_s"].as_f64() < lines[2]["at_s"].as_f64());
}

#[test]
fn help_teaches() {
    for (args, part) in [
        (["fault", "add", "--help"], "bifrostctl fault add --port web1 --loss 1"),
        (["path", "drain", "--help"], "bifrostctl path drain --peer host-b --path 2"),
        (["path", "restore", "--help"], "bifrostctl path restore --peer host-b --path 2"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_bifrostctl")).args(args).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.contains(part), "{text}");
    }
}

/// Runs `top` in a pseudo-terminal, with `keys` typed; gives its exit code and what it wrote.
fn top_in_a_terminal(socket: &FilePath, args: &str, keys: &[u8]) -> (Option<i32>, String) {
    let program = env!("CARGO_BIN_EXE_bifrostctl");
    let command = format!("stty cols 100 rows 30; {program} --socket {} top {args}", socket.display());
    let mut child = Command::new("script")
        .args(["--quiet", "--return", "--command", &command, "/dev/null"])
        .env("TERM", "xterm-256color")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    let reader = std::thread::spawn(move || {
        let mut written = Vec::new();
        stdout.read_to_end(&mut written).unwrap();
        String::from_utf8_lossy(&written).into_owned()
    });
    std::thread::sleep(Duration::from_millis(300));
    stdin.write_all(keys).unwrap();
    stdin.flush().unwrap();
    let code = child.wait().unwrap().code();
    drop(stdin);
    (code, reader.join().unwrap())
}

#[test]
fn top_draws_and_gives_the_terminal_back() {
    let r = rig();
    let left = "\u{1b}[?1049l";
    for (args, keys) in [("--interval-ms 50 --count 4", &b""[..]), ("", b"q"), ("", b"\x03"), ("", b"pps\x1b[Bq")] {
        let (code, screen) = top_in_a_terminal(&r.socket, args, keys);
        assert_eq!(code, Some(0), "{args} {keys:?}: {screen}");
        assert!(screen.contains("SRTT µs") && screen.contains("host-b") && screen.contains(left), "{screen:?}");
    }
    let nobody = r.socket.with_file_name("nobody.sock");
    let (code, screen) = top_in_a_terminal(&nobody, "", b"");
    assert!(code == Some(1) && screen.contains("not running") && !screen.contains(left), "{screen:?}");
}
