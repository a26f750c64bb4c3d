//! Server and client over a socket, with a fake backend.

#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bifrost_control::api::*;
use bifrost_control::client::ClientError;
use bifrost_control::server::{CaptureStream, Pages, ServeError, one_page};
use bifrost_control::{Backend, Client, ServerHandle, serve, serve_handed, serve_with_metrics};

#[derive(Default)]
struct Fake {
    faults: Mutex<Vec<FaultEntry>>,
    next_id: AtomicU64,
    captures_ended: Arc<AtomicU64>,
    /// Calls wait, as those to a daemon that another one has replaced; and are counted.
    is_replaced: Option<Arc<AtomicU64>>,
}

/// All elements of a list.
fn whole<T>(pages: Result<Pages<T>, ApiError>) -> Vec<T> {
    pages.unwrap().flat_map(Result::unwrap).collect()
}

impl Backend for Fake {
    fn status(&self) -> Result<Status, ApiError> {
        if let Some(waiting) = &self.is_replaced {
            waiting.fetch_add(1, Ordering::SeqCst);
            std::thread::sleep(Duration::from_secs(30));
        }
        Ok(Status {
            host: "host-a".into(),
            pid: 7,
            uptime_s: 1.5,
            workers: vec![WorkerStatus::default()],
            ..Status::default()
        })
    }
    fn ports(&self) -> Result<Pages<PortStatus>, ApiError> {
        let drops_packets = [("spoofed_mac".to_owned(), 3)].into();
        Ok(one_page(vec![PortStatus {
            name: "web1".into(),
            addresses: vec!["10.0.0.1/24".parse().unwrap()],
            drops_packets,
            ..PortStatus::default()
        }]))
    }
    fn routes(&self) -> Result<Pages<Route>, ApiError> {
        Ok(one_page(vec![Route {
            vni: 1,
            prefix: "10.0.0.2/32".parse().unwrap(),
            peer: "b".into(),
            mac: "02:00:00:00:00:02".into(),
            mtu_bytes: 1500,
            to_vni: None,
        }]))
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
        Ok(one_page(vec![Conn { cid: 1 << 24, state: ConnState::Established, srtt_us: Some(31.5), ..Conn::default() }]))
    }
    fn sessions(&self, filter: SessionFilter) -> Result<Pages<Session>, ApiError> {
        let protocol = filter.check()?.unwrap_or(6);
        Ok(one_page(vec![Session {
            id: filter.after.unwrap_or_default() + 1,
            port: filter.port.unwrap_or_default(),
            protocol: protocol.to_string(),
            local_address: filter.address.unwrap_or(std::net::Ipv4Addr::LOCALHOST.into()),
            local_port: filter.number.unwrap_or_default(),
            remote_address: std::net::Ipv4Addr::LOCALHOST.into(),
            remote_port: 0,
            is_outbound: true,
            state: filter.state.unwrap_or_default(),
            idle_s: 0,
            expires_s: filter.limit.unwrap_or_default() as u32,
        }]))
    }
    fn paths(&self) -> Result<Pages<bifrost_control::api::Path>, ApiError> {
        Err(ApiError::unavailable("worker 0 does not answer").at("worker[0]").hint("wait"))
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
        panic!("made to fail")
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
        Ok(self.faults.lock().unwrap().clone())
    }
    fn add_fault(&self, spec: FaultSpec) -> Result<FaultEntry, ApiError> {
        if spec.target == (FaultTarget::Port { name: "nobody".into() }) {
            return Err(ApiError::not_found("no port named \"nobody\"").at("port").hint("known ports: web1"));
        }
        let entry = FaultEntry { id: self.next_id.fetch_add(1, Ordering::Relaxed), spec, hits_packets: 0 };
        self.faults.lock().unwrap().push(entry.clone());
        Ok(entry)
    }
    fn remove_fault(&self, id: u64) -> Result<(), ApiError> {
        let mut faults = self.faults.lock().unwrap();
        let before = faults.len();
        faults.retain(|f| f.id != id);
        if faults.len() < before { Ok(()) } else { Err(ApiError::not_found(format!("no fault {id}"))) }
    }
    fn clear_faults(&self) -> Result<u64, ApiError> {
        Ok(self.faults.lock().unwrap().drain(..).count() as u64)
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
        std::thread::sleep(Duration::from_millis(200));
        Ok(ReloadReport { transport_changed: true, ..ReloadReport::default() })
    }
    fn trace(&self, spec: TraceSpec) -> Result<Trace, ApiError> {
        let packet = format!("to {}", spec.to.unwrap());
        Ok(Trace { packet, verdict: TraceVerdict::Sent, ..Trace::default() })
    }
    fn capture(&self, spec: CaptureSpec) -> Result<Box<dyn CaptureStream>, ApiError> {
        match spec.filter.as_str() {
            "" => Ok(Box::new(Lines { left: spec.packets, dropped: Arc::clone(&self.captures_ended) })),
            _ => Err(ApiError::bad_request("no such filter").at("filter")),
        }
    }
}

/// A stream of numbers, one per line.
struct Lines {
    left: u64,
    dropped: Arc<AtomicU64>,
}

impl CaptureStream for Lines {
    fn next(&mut self) -> Option<Vec<u8>> {
        std::thread::sleep(Duration::from_millis(1));
        self.left = self.left.checked_sub(1)?;
        Some(format!("{}\n", self.left).into_bytes())
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        self.dropped.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn a_capture_is_streamed_until_it_ends() {
    let rig = rig();
    let mut out = Vec::new();
    rig.client.capture(&CaptureSpec { packets: 20, ..CaptureSpec::default() }, &mut out).unwrap();
    let expected: String = (0..20).rev().map(|n| format!("{n}\n")).collect();
    assert_eq!(String::from_utf8(out).unwrap(), expected);
    let wrong = CaptureSpec { filter: "x".into(), ..CaptureSpec::default() };
    let error = rig.client.capture(&wrong, &mut Vec::new()).unwrap_err();
    assert!(matches!(&error, ClientError::Api(e) if e.location == "filter"), "{error}");
    let wrong = CaptureSpec { packets: 0, ..CaptureSpec::default() };
    let error = rig.client.capture(&wrong, &mut Vec::new()).unwrap_err();
    assert!(matches!(&error, ClientError::Api(e) if e.location == "packets"), "{error}");
}

#[test]
fn a_capture_ends_when_its_reader_is_gone_and_when_the_server_stops() {
    /// Accepts a few writes, and then fails.
    struct Head(usize);
    impl Write for Head {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 = self.0.checked_sub(1).ok_or(std::io::ErrorKind::BrokenPipe)?;
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut rig = rig();
    let ended = Arc::clone(&rig.captures_ended);
    let endless = CaptureSpec { packets: u64::MAX, ..CaptureSpec::default() };
    rig.client.capture(&endless, &mut Head(3)).unwrap();
    let deadline = std::time::Instant::now() + Duration::from_secs(10);
    while ended.load(Ordering::SeqCst) < 1 {
        assert!(std::time::Instant::now() < deadline, "the capture does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
    let client = Client::new(&rig.socket).unwrap();
    let reader = std::thread::spawn(move || client.capture(&endless, &mut std::io::sink()));
    std::thread::sleep(Duration::from_millis(100));
    rig.server.take().unwrap().stop();
    let _ = reader.join().unwrap();
    assert_eq!(ended.load(Ordering::SeqCst), 2);
}

struct Rig {
    server: Option<ServerHandle>,
    client: Client,
    captures_ended: Arc<AtomicU64>,
    socket: PathBuf,
    _dir: tempfile::TempDir,
}

fn rig() -> Rig {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("made/by/serve/d.sock");
    let fake = Fake::default();
    let captures_ended = Arc::clone(&fake.captures_ended);
    let server = Some(serve(&socket, Arc::new(fake)).unwrap());
    Rig { server, captures_ended, client: Client::new(&socket).unwrap(), socket, _dir: dir }
}

/// Sends a request as text; returns the whole response.
fn raw(socket: &Path, request: &str) -> String {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn responses_arrive() {
    let r = rig();
    let status = r.client.status().unwrap();
    assert_eq!((status.host.as_str(), status.pid, status.uptime_s, status.workers.len()), ("host-a", 7, 1.5, 1));
    assert_eq!(r.client.ports().unwrap(), whole(Fake::default().ports()));
    assert_eq!(r.client.flow_log().unwrap(), Fake::default().flow_log().unwrap());
    assert_eq!(r.client.routes().unwrap(), whole(Fake::default().routes()));
    assert_eq!(r.client.conns().unwrap(), whole(Fake::default().conns()));
    assert!(r.client.reload().unwrap().transport_changed);
}

#[test]
fn a_filter_of_sessions_arrives_unchanged() {
    let r = rig();
    let filter = SessionFilter {
        port: Some("a b&c".into()),
        protocol: Some("icmpv6".into()),
        address: Some("2001:db8::7".parse().unwrap()),
        number: Some(443),
        state: Some(SessionState::Established),
        after: Some(1 << 40),
        limit: Some(100),
    };
    for filter in [filter.clone(), SessionFilter::default()] {
        assert_eq!(r.client.sessions(&filter).unwrap(), whole(Fake::default().sessions(filter)));
    }
    let refused = |filter: SessionFilter| match r.client.sessions(&filter) {
        Err(ClientError::Api(error)) => error.location,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(SessionFilter { limit: Some(0), ..filter }), "limit");
    assert!(r.client.get::<Vec<Session>>("/v1/sessions?sate=established", Duration::from_secs(5)).is_err());
}

#[test]
fn faults_are_added_and_removed() {
    let r = rig();
    let mut spec = FaultSpec::new(FaultTarget::Peer { name: "b".into(), path: Some(3) });
    spec.loss_percent = 12.5;
    let first = r.client.add_fault(&spec).unwrap();
    assert_eq!(first.spec, spec);
    let second = r.client.add_fault(&spec).unwrap();
    assert_eq!(r.client.faults().unwrap(), [first.clone(), second.clone()]);
    assert_eq!(r.client.remove_fault(first.id).unwrap(), FaultCleared { removed: 1 });
    match r.client.remove_fault(first.id) {
        Err(ClientError::Api(e)) => assert_eq!(e.kind, ErrorKind::NotFound),
        other => panic!("{other:?}"),
    }
    assert_eq!(r.client.clear_faults().unwrap(), FaultCleared { removed: 1 });
    assert_eq!(r.client.faults().unwrap(), []);
}

#[test]
fn paths_are_drained_and_restored() {
    let r = rig();
    let spec = |peer: &str, path| DrainSpec { peer: peer.into(), path };
    let report = r.client.drain_path(&spec("host-b", 1), true).unwrap();
    let expected =
        DrainReport { peer: "host-b".into(), path: 1, drained: true, changed: true, in_use_paths: vec![0, 2, 3] };
    assert_eq!(report, expected);
    let report = r.client.drain_path(&spec("host-b", 2), false).unwrap();
    assert_eq!((report.drained, report.changed, report.in_use_paths), (false, false, vec![0, 1, 2, 3]));
    for (spec, kind, location) in
        [(spec("host-b", 3), ErrorKind::Conflict, "path"), (spec("nobody", 0), ErrorKind::NotFound, "peer")]
    {
        match r.client.drain_path(&spec, true) {
            Err(ClientError::Api(e)) => assert_eq!((e.kind, e.location.as_str()), (kind, location)),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn errors_arrive_complete() {
    let r = rig();
    let expected = ApiError::unavailable("worker 0 does not answer").at("worker[0]").hint("wait");
    match r.client.paths() {
        Err(ClientError::Api(e)) => assert_eq!(e, expected),
        other => panic!("{other:?}"),
    }
    let mut spec = FaultSpec::new(FaultTarget::Port { name: "nobody".into() });
    spec.down = true;
    let error = r.client.add_fault(&spec).unwrap_err().to_string();
    assert_eq!(error, "port: no port named \"nobody\" (known ports: web1)");
}

#[test]
fn a_backend_that_panics_fails_its_request_only() {
    let r = rig();
    match r.client.stats() {
        Err(ClientError::Api(e)) => assert_eq!(e.kind, ErrorKind::Internal),
        other => panic!("{other:?}"),
    }
    r.client.status().unwrap();
}

#[test]
fn descriptions_of_packets_are_checked() {
    let rig = rig();
    let to = Some("10.0.0.2".parse().unwrap());
    let spec = TraceSpec { port: Some("web1".into()), to, ping: true, ..TraceSpec::default() };
    let trace = rig.client.trace(&spec).unwrap();
    assert_eq!((trace.packet.as_str(), trace.verdict), ("to 10.0.0.2", TraceVerdict::Sent));
    let refused = rig.client.trace(&TraceSpec { ping: false, ..spec }).unwrap_err();
    assert!(
        matches!(refused, ClientError::Api(ApiError { kind: ErrorKind::BadRequest, location, .. }) if location == "tcp")
    );
}

#[test]
fn bad_requests() {
    let r = rig();
    let body = "{\"port\":\"web1\",\"loss_percent\":101}";
    let with_body = |what: &str, body: &str| {
        format!("{what} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}", body.len())
    };
    let put = |body: &str| with_body("PUT /v1/faults", body);
    let post = |path: &str, body: &str| with_body(&format!("POST {path}"), body);
    let plain = |line: &str| format!("{line} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    let cases = [
        (plain("GET /v1/nothing"), "404", "no such resource"),
        (plain("POST /v1/status"), "405", "method POST is not allowed here"),
        (plain("GET /v1/reload"), "405", "method GET is not allowed here"),
        (plain("DELETE /v1/faults?id=x"), "400", "DELETE /v1/faults?id=3 one"),
        (plain("DELETE /v1/faults?it=1"), "400", "unknown field `it`"),
        (put(body), "400", "101 is not in 0..=100 percent"),
        (put("{"), "400", "EOF while parsing"),
        (put("\u{0}\u{1}"), "400", "\"where\":\"body of PUT /v1/faults\""),
        (post("/v1/paths/drain", "{\"peer\": \"host-b\"}"), "400", "missing field `path`"),
        (post("/v1/paths/restore", "{\"peer\": \"host-b\", \"path\": 256}"), "400", "body of POST /v1/paths/restore"),
        (post("/v1/paths/drain", "{\"peer\": \"host-b\", \"path\": 1, \"all\": true}"), "400", "unknown field `all`"),
        (plain("GET /v1/paths/drain"), "405", "method GET is not allowed here"),
        ("not http at all\r\n\r\n".to_owned(), "400", ""),
    ];
    for (request, status, part) in cases {
        let answer = raw(&r.socket, &request);
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")) && answer.contains(part), "{request}\n{answer}");
    }
    // Too large: refused without reading it completely.
    let large = raw(&r.socket, &put(&" ".repeat(70 << 10)));
    assert!(large.starts_with("HTTP/1.1 413"), "{large}");
    r.client.status().unwrap();
}

#[test]
fn the_socket_is_private_and_removed() {
    let mut r = rig();
    let mode = std::fs::metadata(&r.socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o660);
    r.server.take().unwrap().stop();
    assert!(!r.socket.exists());
    match r.client.status() {
        Err(ClientError::NotRunning(path)) => assert_eq!(path, r.socket),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_second_daemon_is_refused() {
    let r = rig();
    match serve(&r.socket, Arc::new(Fake::default())) {
        Err(e @ ServeError::AlreadyRunning(_)) => {
            assert!(e.to_string().starts_with("another bifrostd is running"), "{e}");
        }
        other => panic!("{other:?}"),
    }
    r.client.status().unwrap();
}

#[test]
fn only_one_of_several_concurrent_starts_succeeds() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("d.sock");
    drop(UnixListener::bind(&socket).unwrap());
    let starts: Vec<_> = (0..8)
        .map(|_| {
            let socket = socket.clone();
            std::thread::spawn(move || serve(&socket, Arc::new(Fake::default())))
        })
        .collect();
    let results: Vec<_> = starts.into_iter().map(|s| s.join().unwrap()).collect();
    let running = results.iter().filter(|r| r.is_ok()).count();
    let refused = results.iter().filter(|r| matches!(r, Err(ServeError::AlreadyRunning(_)))).count();
    assert_eq!((running, refused), (1, 7), "{results:?}");
}

#[test]
fn a_stale_socket_is_replaced_but_a_file_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("d.sock");
    // A closed listener leaves its file.
    drop(UnixListener::bind(&socket).unwrap());
    assert!(socket.exists());
    let server = serve(&socket, Arc::new(Fake::default())).unwrap();
    Client::new(&socket).unwrap().status().unwrap();
    server.stop();
    std::fs::write(&socket, "precious").unwrap();
    assert!(matches!(serve(&socket, Arc::new(Fake::default())), Err(ServeError::NotASocket(_))));
    assert_eq!(std::fs::read_to_string(&socket).unwrap(), "precious");
}

#[test]
fn a_stop_leaves_the_socket_of_a_successor() {
    let r = rig();
    std::fs::remove_file(&r.socket).unwrap();
    let successor = serve(&r.socket, Arc::new(Fake::default())).unwrap();
    r.server.unwrap().stop();
    r.client.status().unwrap();
    successor.stop();
    assert!(!r.socket.exists());
}

#[test]
fn a_server_that_leaves_does_not_wait_for_calls_and_clients_ask_its_successor() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("d.sock");
    let waiting = Arc::new(AtomicU64::new(0));
    let server = serve(&socket, Arc::new(Fake { is_replaced: Some(Arc::clone(&waiting)), ..Fake::default() })).unwrap();
    let asked = socket.clone();
    let asking = std::thread::spawn(move || Client::new(&asked).unwrap().status());
    while waiting.load(Ordering::SeqCst) == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let listeners = server.listeners().try_clone().unwrap();
    let start = std::time::Instant::now();
    server.leave();
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    let successor = serve_handed(&socket, listeners, Arc::new(Fake::default())).unwrap();
    assert_eq!(asking.join().unwrap().unwrap().pid, 7);
    successor.stop();
}

#[test]
fn a_stop_waits_for_requests_in_progress_but_not_for_idle_clients() {
    let mut r = rig();
    let _idle = UnixStream::connect(&r.socket).unwrap();
    let mut half = UnixStream::connect(&r.socket).unwrap();
    half.write_all(b"GET /v1/sta").unwrap();
    let socket = r.socket.clone();
    let reload = std::thread::spawn(move || Client::new(&socket).unwrap().reload());
    std::thread::sleep(Duration::from_millis(50));
    let start = std::time::Instant::now();
    r.server.take().unwrap().stop();
    assert!(start.elapsed() < Duration::from_secs(5));
    assert!(reload.join().unwrap().unwrap().transport_changed);
}

#[test]
fn idle_connections_are_closed() {
    let r = rig();
    let beginnings = ["", "GET /v1/sta", "PUT /v1/faults HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"];
    let clients: Vec<_> = beginnings
        .iter()
        .map(|beginning| {
            let mut stream = UnixStream::connect(&r.socket).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            stream.write_all(beginning.as_bytes()).unwrap();
            stream
        })
        .collect();
    // Other clients are served meanwhile.
    r.client.status().unwrap();
    for (mut stream, beginning) in clients.into_iter().zip(beginnings) {
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap_or_else(|e| panic!("{beginning:?}: {e}"));
        assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 408"), "{beginning:?}: {answer:?}");
    }
}

#[test]
fn invalid_responses_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("d.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let answers = [
        "HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n3",
        "HTTP/1.1 500 X\r\ncontent-length: 1\r\n\r\n?",
        "gibberish\r\n\r\n",
        // The client asks once more.
        "",
        "",
    ];
    let server = std::thread::spawn(move || {
        for answer in answers {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 4096];
            let _ = stream.read(&mut request).unwrap();
            stream.write_all(answer.as_bytes()).unwrap();
        }
    });
    let client = Client::new(&socket).unwrap();
    assert!(matches!(client.status(), Err(ClientError::Protocol(_))));
    assert!(matches!(client.status(), Err(ClientError::Protocol(_))));
    assert!(matches!(client.status(), Err(ClientError::Io { .. })));
    assert!(matches!(client.status(), Err(ClientError::Closed(_))));
    server.join().unwrap();
}

#[test]
fn drops_are_selected_from_samples() {
    let rig = rig();
    assert_eq!(rig.client.samples().unwrap().len(), 4);
    let drops = rig.client.drops().unwrap();
    let seen: Vec<_> = drops.drops.iter().map(|d| (d.counter.as_str(), d.count)).collect();
    assert_eq!(seen, [("avs.dropped_spoofed_ip_packets", 3), ("drop.unknown_peer_packets", 2)]);
    assert_eq!(drops.uptime_s, 1.5);
}

/// Sends a request over TCP; returns the whole response.
fn http(address: std::net::SocketAddr, request: &[u8]) -> String {
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    // The server may respond and close the connection before it has read everything.
    let _ = stream.write_all(request);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

#[test]
fn only_metrics_are_served_over_tcp() {
    let dir = tempfile::tempdir().unwrap();
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap();
    let taken = serve_with_metrics(dir.path().join("d.sock"), Some(address), Arc::new(Fake::default()));
    assert!(matches!(&taken, Err(ServeError::Metrics { .. })), "{taken:?}");
    drop(free);
    let server = serve_with_metrics(dir.path().join("d.sock"), Some(address), Arc::new(Fake::default())).unwrap();

    // A silent client, and clients with oversized requests, do not lock others out.
    let silent = std::net::TcpStream::connect(address).unwrap();
    let long = [b"GET /metrics HTTP/1.1\r\nx: ".to_vec(), vec![b'x'; 100_000]].concat();
    for _ in 0..10 {
        let answer = http(address, &long);
        assert!(!answer.contains("200 OK"), "{answer}");
    }
    let answer = http(address, b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains("application/openmetrics-text"), "{head}");
    assert!(body.contains("\nbifrost_path_srtt_seconds{peer=\"host-b\",path=\"1\"} 0.0000315\n"), "{body}");
    assert!(body.ends_with("# EOF\n"));
    for (request, status) in [("POST /metrics", "405"), ("GET /v1/status", "404"), ("DELETE /v1/faults", "404")] {
        let answer = http(address, format!("{request} HTTP/1.1\r\nhost: x\r\n\r\n").as_bytes());
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{request}: {answer}");
    }
    drop(silent);
    server.stop();
    assert!(std::net::TcpStream::connect(address).is_err());
}
