//! Load balancers between real kernels: connections to one address go to several guests, and stay there.

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use bifrost_control::api::{BackendHealth, TraceSpec};

use crate::common::host::vpc;
use crate::common::netns::Net;
use crate::common::{Guest, Lab, Options, eventually};

const PATIENCE: Duration = Duration::from_secs(10);
const VIP: &str = "10.0.0.100";
const VIP6: &str = "fd00::100";
const BODY: usize = 300_000;

/// A guest's service: sends its name to each client, and then echoes data. To HTTP requests it answers with a status.
pub(crate) struct Service {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Service {
    pub(crate) fn start(net: &Net, address: &str, port: u16, name: &'static str, status: &'static str) -> Service {
        let at = SocketAddr::new(address.parse().unwrap(), port);
        let listener = net.enter(move || TcpListener::bind(at).unwrap());
        listener.set_nonblocking(true).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                match listener.accept() {
                    Ok((stream, _)) => drop(std::thread::spawn(move || serve(stream, name, status))),
                    Err(_) => std::thread::sleep(Duration::from_millis(5)),
                }
            }
        });
        Service { stop, thread: Some(thread) }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn serve(mut stream: TcpStream, name: &str, status: &str) {
    let Ok(client) = stream.peer_addr().map(|address| address.ip()) else { return };
    let _ = stream.set_nonblocking(false);
    let mut buffer = vec![0; 65536];
    let Ok(n) = stream.read(&mut buffer) else { return };
    if buffer[..n].starts_with(b"GET ") {
        let _ = write!(stream, "HTTP/1.1 {status}\r\nConnection: close\r\n\r\n");
        return;
    }
    // The answer to "hello" also contains the client's address.
    let _ = writeln!(stream, "{name} {client}");
    while let Ok(n) = stream.read(&mut buffer) {
        if n == 0 || stream.write_all(&buffer[..n]).is_err() {
            return;
        }
    }
}

/// A connection through a load balancer, and its backend.
pub(crate) struct Conversation {
    pub(crate) stream: TcpStream,
    pub(crate) backend: String,
    pub(crate) client: IpAddr,
}

impl Conversation {
    pub(crate) fn start(from: &Net, address: &str, port: u16) -> Option<Conversation> {
        let to = SocketAddr::new(address.parse().unwrap(), port);
        let mut stream = from.enter(move || TcpStream::connect_timeout(&to, Duration::from_secs(3)).ok())?;
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(b"hello").unwrap();
        let mut line = Vec::new();
        let mut byte = [0];
        while byte != *b"\n" {
            stream.read_exact(&mut byte).ok()?;
            line.push(byte[0]);
        }
        let line = String::from_utf8(line).unwrap();
        let (backend, client) = line.trim().split_once(' ').unwrap();
        Some(Conversation { stream, backend: backend.to_owned(), client: client.parse().unwrap() })
    }

    /// Sends bytes and gets them back unchanged, with segmentation offload in both directions.
    pub(crate) fn exchange(&mut self) -> std::io::Result<()> {
        let sent: Vec<u8> = (0..BODY).map(|n| (n / 7) as u8).collect();
        let (mut writer, expected) = (self.stream.try_clone()?, sent.clone());
        let writing = std::thread::spawn(move || writer.write_all(&sent));
        let mut heard = vec![0; BODY];
        self.stream.read_exact(&mut heard)?;
        writing.join().unwrap()?;
        assert!(heard == expected, "wrong bytes");
        Ok(())
    }
}

fn config(backends: &str) -> String {
    format!(
        "[[load_balancer]]\nname = \"web\"\nvni = 100\naddress = \"{VIP}\"\nport = 80\n{backends}\
         [[load_balancer]]\nname = \"web6\"\nvni = 100\naddress = \"{VIP6}\"\nport = 80\n\
         [[load_balancer.backend]]\naddress = \"fd00::2\"\nport = 8080\n\
         [[load_balancer]]\nname = \"dns\"\nvni = 100\naddress = \"{VIP}\"\nport = 53\nprotocol = \"udp\"\n\
         [[load_balancer.backend]]\naddress = \"10.0.0.2\"\nport = 5353\n"
    )
}

fn backends(weights: &[(u8, u16)]) -> String {
    let backend = |(n, weight): &(u8, u16)| {
        format!("[[load_balancer.backend]]\naddress = \"10.0.0.{n}\"\nport = 8080\nweight = {weight}\n")
    };
    weights.iter().map(backend).collect()
}

/// Client `a` and backend `c` on one host, backend `b` on the other.
fn lab(balancers: &str) -> Lab {
    let vpcs = format!("{}gateway = [\"10.0.0.254\", \"fd00::fe\"]\n{balancers}", vpc(100, "tcp", "flow"));
    let mut lab = Lab::new(Options { vpcs, ..Options::default() });
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24", "fd00::1/64"]).gateway("10.0.0.254"));
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24", "fd00::2/64"]).gateway("10.0.0.254"));
    lab.add(0, Guest::new("c", 3, &["10.0.0.3/24", "fd00::3/64"]).gateway("10.0.0.254"));
    lab.start();
    lab
}

fn reload(lab: &mut Lab, from: &str, to: &str) {
    for host in &mut lab.hosts {
        assert!(host.config.contains(from));
        host.config = host.config.replace(from, to);
        host.write_config();
        host.client.reload().unwrap();
    }
}

#[test]
fn connections_are_shared_and_stay_where_they_are() {
    let both = backends(&[(2, 1), (3, 1)]);
    let mut lab = lab(&config(&both));
    let _b = Service::start(lab.net("b"), "10.0.0.2", 8080, "b", "200 OK");
    let _c = Service::start(lab.net("c"), "10.0.0.3", 8080, "c", "200 OK");
    let _b6 = Service::start(lab.net("b"), "fd00::2", 8080, "b6", "200 OK");
    let mut open: Vec<Conversation> =
        (0..12).map(|_| Conversation::start(lab.net("a"), VIP, 80).expect("a connection")).collect();
    let names: BTreeSet<&str> = open.iter().map(|c| c.backend.as_str()).collect();
    assert_eq!(names, BTreeSet::from(["b", "c"]), "one in 2,000 runs would use only one backend");
    assert!(open.iter().all(|c| c.client == IpAddr::from([10, 0, 0, 1])), "backends see the client's own address");
    open.iter_mut().for_each(|c| c.exchange().unwrap());
    let mut v6 = Conversation::start(lab.net("a"), VIP6, 80).expect("a connection over IPv6");
    assert_eq!(v6.backend, "b6");
    v6.exchange().unwrap();
    let counters = lab.hosts[0].counters();
    assert!(counters["avs.balanced_created_sessions"] >= 13, "{counters:?}");

    // One backend is drained: it keeps its connections, and gets no new ones.
    let drained = backends(&[(2, 0), (3, 1)]);
    reload(&mut lab, &both, &drained);
    open.iter_mut().for_each(|c| c.exchange().unwrap());
    let new: Vec<_> =
        (0..8).map(|_| Conversation::start(lab.net("a"), VIP, 80).expect("a connection").backend).collect();
    assert!(new.iter().all(|name| name == "c"), "{new:?}");
    // The backend is removed: only its connections end.
    let removed = backends(&[(3, 1)]);
    reload(&mut lab, &drained, &removed);
    for conversation in &mut open {
        conversation.stream.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        let continues = conversation.exchange().is_ok();
        assert_eq!(continues, conversation.backend == "c", "backend {}", conversation.backend);
    }
    assert!(lab.hosts[0].drops("a", "backend_gone") > 0);
}

#[test]
fn a_backend_reaches_itself_and_datagrams_are_balanced() {
    let lab = lab(&config(&backends(&[(3, 1)])));
    let _c = Service::start(lab.net("c"), "10.0.0.3", 8080, "c", "200 OK");
    let mut own = Conversation::start(lab.net("c"), VIP, 80).expect("a connection of a backend to itself");
    assert_eq!(own.client, VIP.parse::<IpAddr>().unwrap(), "so that answers pass the switch");
    own.exchange().unwrap();
    let server = lab.net("b").enter(|| UdpSocket::bind("10.0.0.2:5353").unwrap());
    let client = lab.net("a").enter(|| UdpSocket::bind("10.0.0.1:0").unwrap());
    for socket in [&server, &client] {
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
    }
    client.connect((VIP, 53)).unwrap();
    let mut buffer = [0; 100];
    for n in 0..5u8 {
        client.send(&[n; 40]).unwrap();
        let (len, from) = server.recv_from(&mut buffer).unwrap();
        assert_eq!((len, buffer[0], from.ip()), (40, n, IpAddr::from([10, 0, 0, 1])));
        server.send_to(&buffer[..len], from).unwrap();
        assert_eq!(client.recv(&mut buffer).unwrap(), 40, "a connected socket only accepts answers from its peer");
    }
    let trace = lab.hosts[0].client.trace(&TraceSpec {
        port: Some("a".to_owned()),
        to: Some(VIP.parse().unwrap()),
        tcp: Some((40_000, 80)),
        to_mac: Some("02:bf:00:00:00:01".to_owned()),
        ..TraceSpec::default()
    });
    let trace = trace.unwrap();
    let service = trace.steps.iter().find(|step| step.stage == "service").unwrap();
    assert!(service.what.contains("10.0.0.3 port 8080"), "{trace:#?}");
    // Another port of the address has no service.
    assert!(Conversation::start(lab.net("a"), VIP, 81).is_none());
    assert!(lab.hosts[0].drops("a", "no_service") > 0);
}

#[test]
fn backends_that_do_not_answer_get_no_connections() {
    let check = "[load_balancer.check]\nkind = \"http\"\npath = \"/health\"\nfrom = \"a\"\ninterval_ms = 100\n\
                 timeout_ms = 500\nrise = 1\nfall = 2\n";
    let both = backends(&[(2, 1), (3, 1)]);
    let mut lab = lab(&config(&both));
    // Checks from a port of this host; the other host would use one of its own.
    let host = &mut lab.hosts[0];
    host.config = host.config.replacen(&both, &format!("{both}{check}"), 1);
    host.write_config();
    assert_eq!(host.client.reload().unwrap().load_balancers.changed, ["web"]);
    let host = &lab.hosts[0];
    let state = |n: usize| host.client.load_balancers().unwrap()[0].backends[n].health;
    // `c` answers with an error; `b` does not answer.
    let sick = Service::start(lab.net("c"), "10.0.0.3", 8080, "c", "503 Service Unavailable");
    eventually(10.0, "both are down", || [state(0), state(1)] == [BackendHealth::Down; 2]);
    assert!(Conversation::start(lab.net("a"), VIP, 80).is_none());
    assert!(host.drops("a", "no_backend") > 0);
    let _b = Service::start(lab.net("b"), "10.0.0.2", 8080, "b", "200 OK");
    eventually(10.0, "b is up", || [state(0), state(1)] == [BackendHealth::Up, BackendHealth::Down]);
    for _ in 0..4 {
        assert_eq!(Conversation::start(lab.net("a"), VIP, 80).expect("a connection").backend, "b");
    }
    let mut kept = Conversation::start(lab.net("a"), VIP, 80).expect("a connection");
    drop(sick);
    let _c = Service::start(lab.net("c"), "10.0.0.3", 8080, "c", "204 No Content");
    eventually(10.0, "both are up", || [state(0), state(1)] == [BackendHealth::Up; 2]);
    kept.exchange().unwrap();
}

/// ICMP errors from kernels: each end must find its own addresses in the quoted packet, or it would ignore the error.
#[test]
fn errors_about_balanced_datagrams_reach_both_ends() {
    let lab = lab(&config(&backends(&[(3, 1)])));
    let refused = |socket: &UdpSocket| {
        let _ = socket.send(b"?");
        socket.recv(&mut [0; 100]).is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionRefused)
    };
    let patience = Some(Duration::from_millis(200));
    let client = lab.net("a").enter(|| UdpSocket::bind("10.0.0.1:7000").unwrap());
    client.set_read_timeout(patience).unwrap();
    client.connect((VIP, 53)).unwrap();
    eventually(10.0, "the client gets the error: no listener", || refused(&client));
    // Now the server listens, and the client is closed.
    let server = lab.net("b").enter(|| UdpSocket::bind("10.0.0.2:5353").unwrap());
    server.set_read_timeout(patience).unwrap();
    let from = std::cell::Cell::new(None);
    eventually(10.0, "the backend gets a request", || {
        let _ = client.send(b"?");
        from.set(server.recv_from(&mut [0; 100]).ok().map(|(_, from)| from));
        from.get().is_some()
    });
    drop(client);
    server.connect(from.get().unwrap()).unwrap();
    eventually(10.0, "the backend gets the error: no client", || refused(&server));
}
