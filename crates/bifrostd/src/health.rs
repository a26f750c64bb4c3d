//! Which backends of load balancers work: each host asks for itself, over the way that its guests would take.
//!
//! A question is an ordinary TCP connection from the network namespace of a port
//! (`[load_balancer.check] from`, or one of the VPC), so what is asked about is all of it: route,
//! transport, rules, backend. A backend whose answers change its state takes no new connections, or
//! takes them again; those that it has stay.

use std::collections::{BTreeMap, HashMap};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use bifrost_control::config::{Config, HealthCheck, LoadBalancer, Vni};
use bifrost_port::panics;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::daemon::Daemon;

/// How often it is looked at what has to be asked.
const TICK: Duration = Duration::from_millis(50);
/// How long to wait after a panic, which may come again.
const AFTER_PANIC: Duration = Duration::from_secs(1);
/// Namespaces of a VPC that are tried for a question.
const MAX_NAMESPACES: usize = 16;
/// Questions that are asked at a time; others wait for their turn.
const MAX_ASKING: usize = 64;
/// Bytes of an HTTP answer that are read for its status line.
const STATUS_LINE: usize = 64;

/// A backend of a load balancer: its name, and where the backend is.
pub(crate) type Target = (String, SocketAddr);

/// How to ask a backend, and the network namespaces to ask from: the first one that is there.
type Question = (HealthCheck, Arc<[PathBuf]>);

/// What is known of backends. One that is not in here has not been asked often enough, and is taken to work.
pub(crate) type Health = BTreeMap<Target, bool>;

/// How a backend's answers have been.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Streak {
    /// What the last ones said.
    good: bool,
    /// How many in a row.
    count: u32,
}

impl Streak {
    /// After another answer; `Some`: what the backend's state is to be, if it is another one.
    fn after(&mut self, good: bool, works: bool, check: &HealthCheck) -> Option<bool> {
        let count = if self.good == good { self.count.saturating_add(1) } else { 1 };
        *self = Streak { good, count };
        let needed = if good { check.rise } else { check.fall };
        (good != works && count >= needed).then_some(good)
    }
}

/// What is asked of one backend.
struct Asked {
    check: HealthCheck,
    streak: Streak,
    next: Instant,
    is_asking: bool,
}

/// Answers that have come, from threads that ask. None: there was nowhere to ask from, which says
/// nothing of the backend.
type Answers = Arc<Mutex<Vec<(Target, Option<bool>)>>>;

/// Asks until the daemon ends. After a panic it begins again.
pub(crate) fn follow_for_ever(daemon: &Daemon) {
    while let Err(panic) = panics::contain(|| follow(daemon)) {
        tracing::error!(%panic, "asking backends has failed; it is tried again");
        thread::sleep(AFTER_PANIC);
    }
}

/// Asks until the daemon ends.
fn follow(daemon: &Daemon) {
    let answers = Answers::default();
    let mut asked: BTreeMap<Target, Asked> = BTreeMap::new();
    let mut asking = 0;
    loop {
        thread::sleep(TICK);
        let Some(wanted) = wanted(daemon) else { return };
        asked.retain(|target, asked| wanted.get(target).is_some_and(|(check, _)| *check == asked.check));
        for (target, (check, _)) in &wanted {
            asked.entry(target.clone()).or_insert_with(|| Asked {
                check: check.clone(),
                streak: Streak::default(),
                next: Instant::now(),
                is_asking: false,
            });
        }
        let come = std::mem::take(&mut *answers.lock().unwrap_or_else(PoisonError::into_inner));
        asking -= come.len();
        let mut changes = Health::new();
        for (target, good) in come {
            // Of a backend that has gone meanwhile, or is asked otherwise, it says nothing.
            let Some(asked) = asked.get_mut(&target) else { continue };
            asked.is_asking = false;
            let Some(good) = good else { continue };
            let works = daemon.state().health.get(&target).copied().unwrap_or(true);
            if let Some(works) = asked.streak.after(good, works, &asked.check) {
                changes.insert(target, works);
            }
        }
        if !changes.is_empty() {
            for ((balancer, backend), works) in &changes {
                tracing::warn!(balancer, %backend, works, "a backend of a load balancer");
            }
            if let Err(error) = daemon.state().set_health(changes) {
                tracing::error!(error = format!("{error:#}"), "the health of backends is not taken over");
            }
        }
        let now = Instant::now();
        let due = asked.iter_mut().filter(|(_, asked)| !asked.is_asking && asked.next <= now);
        for (target, asked) in due.take(MAX_ASKING.saturating_sub(asking)) {
            let Some((_, namespaces)) = wanted.get(target) else { continue };
            let (to, check, namespaces) = (target.clone(), asked.check.clone(), Arc::clone(namespaces));
            let answers = Arc::clone(&answers);
            let ask = move || {
                // A panic is no answer, and the next question is asked all the same.
                let good = panics::contain(|| question(&namespaces, to.1, &check)).unwrap_or(Some(false));
                answers.lock().unwrap_or_else(PoisonError::into_inner).push((to, good));
            };
            // A thread: it goes to another network namespace, and waits there.
            if thread::Builder::new().name("health".into()).spawn(ask).is_ok() {
                asked.is_asking = true;
                asked.next = now + asked.check.interval;
                asking += 1;
            }
        }
    }
}

/// The backends to be asked, and how; `None` once the daemon ends.
fn wanted(daemon: &Daemon) -> Option<BTreeMap<Target, Question>> {
    let state = daemon.state();
    if state.workers.is_empty() {
        return None;
    }
    Some(targets(&state.config))
}

fn targets(config: &Config) -> BTreeMap<Target, Question> {
    let mut all = BTreeMap::new();
    // Load balancers of a VPC that name no port ask from the same ones.
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

/// Where a load balancer's backends may be asked from, in the order of the ports' names.
fn namespaces(config: &Config, balancer: &LoadBalancer) -> Arc<[PathBuf]> {
    let mut ports: Vec<_> = config.ports.iter().filter(|port| balancer.asks_from(port)).collect();
    ports.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    ports.into_iter().filter_map(|port| port.netns.clone()).take(MAX_NAMESPACES).collect()
}

/// Whether a backend answers; `None`: there is no namespace to ask from.
fn question(namespaces: &[PathBuf], backend: SocketAddr, check: &HealthCheck) -> Option<bool> {
    namespaces.iter().find_map(|netns| enter(netns).ok())?;
    let to = SocketAddr::new(backend.ip(), check.port.unwrap_or(backend.port()));
    Some(ask(to, check).is_ok())
}

/// Moves this thread into a network namespace.
fn enter(netns: &Path) -> std::io::Result<()> {
    let namespace = std::fs::File::open(netns)?;
    Ok(move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?)
}

fn ask(to: SocketAddr, check: &HealthCheck) -> std::io::Result<()> {
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
    fn a_state_changes_after_some_answers_in_a_row() {
        let mut streak = Streak::default();
        let mut works = true;
        let answers = [false, false, true, false, false, false, false, true, true, true];
        let states = answers.map(|good| {
            if let Some(state) = streak.after(good, works, &check()) {
                works = state;
            }
            works
        });
        assert_eq!(states, [true, true, true, true, true, false, false, false, true, true]);
    }

    #[test]
    fn checks_without_a_port_ask_from_those_of_the_vpc() {
        let port = |name: &str, vni: u32, mac: u32, rest: &str| {
            format!(
                "[[port]]\nname = \"{name}\"\nvni = {vni}\nmac = \"02:00:00:00:00:0{mac}\"\naddresses = [\"10.0.0.{mac}/24\"]\n{rest}\n"
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
                "[host]\nname = \"h\"\n[underlay]\naddresses = [\"192.0.2.1\"]\n[[vpc]]\nvni = 1\ngateway = [\"10.0.0.254\"]\n[[vpc]]\nvni = 2\n{}\
                 [[load_balancer]]\nname = \"lb\"\nvni = 1\naddress = \"10.0.0.100\"\nport = 80\n\
                 backend = [{{ address = \"10.0.0.1\" }}]\ncheck = {{ {from} }}\n",
                ports.concat()
            );
            Config::parse(&text, "test").unwrap()
        };
        let from = |text: &str| {
            let config = config(text);
            let asked = targets(&config).into_values().next().unwrap().1;
            asked.iter().map(|netns| netns.display().to_string()).collect::<Vec<_>>()
        };
        assert_eq!(from(""), ["/run/netns/b", "/run/netns/z"], "of this VPC, with a namespace, by name");
        assert_eq!(from("from = \"z\""), ["/run/netns/z"]);
        let missing = [PathBuf::from("/run/netns/there-is-none")];
        assert_eq!(question(&missing, ([127, 0, 0, 1], 1).into(), &check()), None, "that says nothing of a backend");
    }

    #[test]
    fn statuses_of_http() {
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
