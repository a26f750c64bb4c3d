//! Health of load balancers' backends: each host checks them itself, over the paths that its guests would use.
//!
//! A check is an ordinary TCP connection from the network namespace of a port (`[load_balancer.check] from`, or a port
//! of the VPC). It covers the route, the transport, the rules and the backend. A backend that becomes unhealthy gets no
//! new connections until it is healthy again; existing connections stay.

pub(crate) mod checks;

use std::collections::{BTreeMap, HashMap};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bifrost_control::config::{Config, HealthCheck, LoadBalancer, Vni};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Interval at which due checks are started.
const TICK: Duration = Duration::from_millis(50);
/// Pause after a panic, which may recur.
const AFTER_PANIC: Duration = Duration::from_secs(1);
/// Most namespaces of a VPC that are tried for a check.
const MAX_NAMESPACES: usize = 16;
/// Most concurrent checks; others wait.
const MAX_RUNNING: usize = 64;
/// Bytes of an HTTP response that are read for its status line.
const STATUS_LINE: usize = 64;

/// A backend of a load balancer: the balancer's name, and the backend's address.
pub(crate) type Target = (String, SocketAddr);

/// How to check a backend, and the network namespaces to check from: the first one that exists is used.
type ProbeSpec = (HealthCheck, Arc<[PathBuf]>);

/// Whether backends are healthy. A backend without an entry has not been checked often enough, and counts as healthy.
pub(crate) type Health = BTreeMap<Target, bool>;

/// The latest results of a backend's checks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Streak {
    /// Result of the last checks.
    good: bool,
    /// How many consecutive checks had that result.
    count: u32,
}

impl Streak {
    /// Adds a result; `Some` is the backend's new state, if it changes.
    fn after(&mut self, good: bool, works: bool, check: &HealthCheck) -> Option<bool> {
        let count = if self.good == good { self.count.saturating_add(1) } else { 1 };
        *self = Streak { good, count };
        let needed = if good { check.rise } else { check.fall };
        (good != works && count >= needed).then_some(good)
    }
}

/// The checks of one backend.
struct Probe {
    check: HealthCheck,
    streak: Streak,
    next: Instant,
    is_running: bool,
}

/// Results of checks. `None`: there was no namespace to check from, which says nothing about the backend.
type Results = Arc<Mutex<Vec<(Target, Option<bool>)>>>;

fn targets(config: &Config) -> BTreeMap<Target, ProbeSpec> {
    let mut all = BTreeMap::new();
    // Load balancers that configure no port share the list of their VPC.
    let mut of_vpc: HashMap<Vni, Arc<[PathBuf]>> = HashMap::new();
    for balancer in &config.load_balancers {
        let Some(check) = &balancer.check else { continue };
        let namespaces = match &check.from {
            Some(_) => namespaces(config, balancer),
            None => Arc::clone(of_vpc.entry(balancer.vni).or_insert_with(|| namespaces(config, balancer))),
        };
        if namespaces.is_empty() {
            continue;
        }
        for backend in balancer.backends.iter().filter(|backend| backend.weight > 0) {
            let target = (balancer.name.clone(), SocketAddr::new(backend.address, backend.port));
            all.insert(target, (check.clone(), Arc::clone(&namespaces)));
        }
    }
    all
}

/// Namespaces from which a load balancer's backends may be checked, in the order of the ports' names.
fn namespaces(config: &Config, balancer: &LoadBalancer) -> Arc<[PathBuf]> {
    let mut ports: Vec<_> = config.ports.iter().filter(|port| balancer.asks_from(port)).collect();
    ports.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    ports.into_iter().filter_map(|port| port.netns.clone()).take(MAX_NAMESPACES).collect()
}

/// Whether a backend is healthy; `None` if there is no namespace to check from.
fn run_check(namespaces: &[PathBuf], backend: SocketAddr, check: &HealthCheck) -> Option<bool> {
    namespaces.iter().find_map(|netns| enter(netns).ok())?;
    let to = SocketAddr::new(backend.ip(), check.port.unwrap_or(backend.port()));
    Some(connect(to, check).is_ok())
}

/// Moves this thread into a network namespace.
fn enter(netns: &Path) -> std::io::Result<()> {
    let namespace = std::fs::File::open(netns)?;
    Ok(move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?)
}

fn connect(to: SocketAddr, check: &HealthCheck) -> std::io::Result<()> {
    let deadline = Instant::now() + check.timeout;
    let mut stream = TcpStream::connect_timeout(&to, check.timeout)?;
    let Some(path) = &check.http_path else { return Ok(()) };
    let left = |deadline: Instant| {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(std::io::ErrorKind::TimedOut.into()) } else { std::io::Result::Ok(left) }
    };
    stream.set_write_timeout(Some(left(deadline)?))?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {to}\r\nUser-Agent: bifrostd\r\nConnection: close\r\n\r\n")?;
    let (mut line, mut len) = ([0; STATUS_LINE], 0);
    while len < STATUS_LINE && !line[..len].contains(&b'\n') {
        stream.set_read_timeout(Some(left(deadline)?))?;
        match stream.read(&mut line[len..])? {
            0 => break,
            n => len += n,
        }
    }
    if is_good(&line[..len]) { Ok(()) } else { Err(std::io::ErrorKind::InvalidData.into()) }
}

/// Whether an HTTP answer begins with a status of success or redirection (RFC 9110, sections 15.3 and 15.4).
fn is_good(line: &[u8]) -> bool {
    let mut words = line.split(|b| *b == b' ');
    let version = words.next().is_some_and(|word| word.starts_with(b"HTTP/"));
    let status = words.next().unwrap_or_default();
    version && matches!(status, [b'2' | b'3', b'0'..=b'9', b'0'..=b'9', ..])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check() -> HealthCheck {
        HealthCheck {
            http_path: None,
            from: None,
            port: None,
            interval: Duration::from_secs(1),
            timeout: Duration::from_secs(1),
            rise: 2,
            fall: 3,
        }
    }

    #[test]
    fn a_state_changes_after_consecutive_results() {
        let mut streak = Streak::default();
        let mut works = true;
        let results = [false, false, true, false, false, false, false, true, true, true];
        let states = results.map(|good| {
            if let Some(state) = streak.after(good, works, &check()) {
                works = state;
            }
            works
        });
        assert_eq!(states, [true, true, true, true, true, false, false, false, true, true]);
    }

    #[test]
    fn checks_without_a_port_use_those_of_the_vpc() {
        let port = |name: &str, vni: u32, mac: u32, rest: &str| {
            format!(
                "[[port]]\nname = \"{name}\"\nvni = {vni}\nmac = \"02:00:00:00:00:0{mac}\"\n\
                 addresses = [\"10.0.0.{mac}/24\"]\n{rest}\n"
            )
        };
        let config = |from: &str| {
            let ports = [
                port("z", 1, 1, "netns = \"z\""),
                port("a", 1, 2, "device = \"a\""),
                port("b", 1, 3, "netns = \"b\""),
                port("c", 2, 4, "netns = \"c\""),
            ];
            let text = format!(
                "[host]\nname = \"h\"\n[underlay]\naddresses = [\"192.0.2.1\"]\n\
                 [[vpc]]\nvni = 1\ngateway = [\"10.0.0.254\"]\n[[vpc]]\nvni = 2\n{}\
                 [[load_balancer]]\nname = \"lb\"\nvni = 1\naddress = \"10.0.0.100\"\nport = 80\n\
                 backend = [{{ address = \"10.0.0.1\" }}]\ncheck = {{ {from} }}\n",
                ports.concat()
            );
            Config::parse(&text, "test").unwrap()
        };
        let from = |text: &str| {
            let config = config(text);
            let namespaces = targets(&config).into_values().next().unwrap().1;
            namespaces.iter().map(|netns| netns.display().to_string()).collect::<Vec<_>>()
        };
        assert_eq!(from(""), ["/run/netns/b", "/run/netns/z"], "ports of this VPC with a namespace, by name");
        assert_eq!(from("from = \"z\""), ["/run/netns/z"]);
        let missing = [PathBuf::from("/run/netns/missing")];
        assert_eq!(run_check(&missing, ([127, 0, 0, 1], 1).into(), &check()), None, "no namespace, no result");
    }

    #[test]
    fn http_statuses() {
        for (line, good) in [
            (&b"HTTP/1.1 200 OK\r\n"[..], true),
            (b"HTTP/1.0 204\r\n", true),
            (b"HTTP/1.1 302 Found\r\n", true),
            (b"HTTP/1.1 503 Service Unavailable\r\n", false),
            (b"HTTP/1.1 20", false),
            (b"SSH-2.0-OpenSSH\r\n", false),
            (b"", false),
        ] {
            assert_eq!(is_good(line), good, "{}", String::from_utf8_lossy(line));
        }
    }
}
