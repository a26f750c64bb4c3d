//! Two tenants on two hosts and one worker each: one attacks, the other one has a Redis that must not notice.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bifrost_lab::options::Op;
use bifrost_lab::programs::key_value_client::{self, Load};
use bifrost_lab::programs::key_value_protocol::Protocol;
use bifrost_lab::standstill::{self, Standstill, Watch};
use hdrhistogram::Histogram;

use super::front_end::{FrontEnd, Kind};
use super::host::vpc;
use super::{Guest, Lab, Options, eventually};

/// Where the Redis of the tenant that must not notice listens.
const REDIS: ([u8; 4], u16) = ([10, 0, 0, 2], 6379);
/// Requests a second, on all connections together. They are due at regular times: one that is held up does not hide others.
const RATE: f64 = 3000.0;
const CONNECTIONS: u32 = 6;
/// One measurement.
const DURATION: Duration = Duration::from_millis(700);
/// What an attack may multiply the other tenant's P99.9 by.
const BAR: f64 = 2.0;
/// Numbers of pairs, one measurement alone and one beside the attack, after which P99.9 of all measurements of each kind
/// is compared. If a comparison misses the bar, more pairs are added to the same pool. A virtual machine's processors
/// stand still for a millisecond or more about once per measurement, which dominates P99.9 of few measurements.
const LOOKS: [usize; 4] = [4, 8, 24, 96];

/// How the attacker is attached to the first host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attachment {
    Tap,
    /// A port of kind vhost-user, whose front-end is the test's.
    Machine,
}

/// `a` (10.0.0.1) on the first host asks the Redis of `b` (10.0.0.2) on the second. `x` (10.9.0.1, fd09::1) on the first host is the
/// other tenant's and attacks; its network has a guest `y` (10.9.0.2, fd09::2) on the second, and a gateway.
pub struct Tenants {
    pub lab: Lab,
    redis: Child,
    pids: [u32; 2],
    _alone: MutexGuard<'static, ()>,
}

/// Held by the test that measures.
static ALONE: Mutex<()> = Mutex::new(());

/// An attack that runs: its threads end once told to, and say how often they have done what they do.
pub type Threads = Vec<JoinHandle<u64>>;

/// The attacker's gateway.
pub const GATEWAY: [u8; 4] = [10, 9, 0, 254];
pub const GATEWAY_V6: [u8; 16] = [0xfd, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xfe];
/// MAC address of every gateway.
pub const GATEWAY_MAC: [u8; 6] = [0x02, 0xbf, 0x00, 0x00, 0x00, 0x01];

impl Tenants {
    pub fn new(attachment: Attachment) -> Tenants {
        Tenants::with(attachment, |_| ())
    }

    /// `change` may change the configurations before the daemons start.
    pub fn with(attachment: Attachment, change: impl FnOnce(&mut Lab)) -> Tenants {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let attackers = vpc(200, "all", "flow") + "gateway = [\"10.9.0.254\", \"fd09::fe\"]\n";
        let vpcs = vpc(100, "tcp", "flow") + &attackers;
        let mut lab = Lab::new(Options { vpcs, ..Options::default() });
        lab.add(0, Guest::new("a", 1, &["10.0.0.1/24"]));
        lab.add(1, Guest::new("b", 2, &["10.0.0.2/24"]));
        let x = Guest::new("x", 0x21, &["10.9.0.1/24", "fd09::1/64"]).vni(200).mtu(1450);
        match attachment {
            Attachment::Tap => lab.add(0, x),
            Attachment::Machine => lab.add_machine(0, &x, "server"),
        }
        lab.add(1, Guest::new("y", 0x22, &["10.9.0.2/24", "fd09::2/64"]).vni(200).mtu(1450));
        change(&mut lab);
        lab.start();
        let mut command = lab.net("b").command("chrt");
        command.args(["--fifo", "2", "redis-server"]);
        command.args(["--bind", "10.0.0.2", "--port", &REDIS.1.to_string(), "--protected-mode", "no"]);
        command.args(["--save", "", "--appendonly", "no", "--daemonize", "no", "--dir", "/"]);
        let redis = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        let pids = [lab.hosts[0].pid(), lab.hosts[1].pid()];
        // One host, one processor: otherwise it depends on the scheduler's moves whether both daemons share one.
        for (processor, process) in [(0, pids[0]), (1, pids[1]), (1, redis.id())] {
            pin_process(process, processor);
        }
        pids.iter().for_each(|pid| put_workers_first(*pid));
        let tenants = Tenants { lab, redis, pids, _alone: alone };
        eventually(10.0, "Redis answers", || {
            let to = SocketAddr::from(REDIS);
            tenants
                .lab
                .net("a")
                .enter(move || std::net::TcpStream::connect_timeout(&to, Duration::from_millis(200)).is_ok())
        });
        tenants
    }

    /// The socket of the attacker's port.
    pub fn socket(&self) -> PathBuf {
        self.lab.machine_socket("x")
    }

    pub fn front_end(&self, packed: bool, size: u16) -> FrontEnd {
        FrontEnd::running(&self.socket(), Kind { packed, size }).expect("the port serves a machine")
    }

    /// One measurement: latencies, µs. Every request is answered, and rightly.
    fn measure(&self) -> Histogram<u64> {
        let load = Load {
            server: SocketAddr::from(REDIS),
            transport: socket2::Protocol::TCP,
            protocol: Protocol::Redis,
            clients: CONNECTIONS,
            keep_alive: true,
            duration: DURATION,
            patience: Duration::from_secs(2),
            warm_up: Duration::from_millis(100),
            timeout: Duration::from_secs(2),
            op: Some(Op::Get),
            requests_per_s: Some(RATE),
            record: false,
            stop: Arc::default(),
        };
        let report = self.lab.net("a").enter(move || {
            be_first();
            pin(0, 0);
            key_value_client::run(&load).unwrap()
        });
        let expected = RATE * DURATION.as_secs_f64();
        assert_eq!((report.failed(), report.wrong_answers), (0, 0), "requests failed");
        assert!(report.answered() as f64 > expected * 0.9, "{} of {expected} requests", report.answered());
        report.latency_us
    }

    /// Measures alone and beside the attack in turns, and holds what happens to the other tenant to the bar. `attack` starts
    /// threads that go on until they are told to stop. Returns how often they did what they do.
    pub fn judge(&self, what: &str, attack: impl Fn(&Tenants, &Arc<AtomicBool>) -> Threads) -> u64 {
        // What a build has left in the page cache is written now: the kernel's threads that do it run for a millisecond at a time.
        rustix::fs::sync();
        let before = self.noticed();
        let (mut alone, mut beside, mut done) = (Pool::new(), Pool::new(), 0);
        for pair in 1..=LOOKS[LOOKS.len() - 1] {
            // Neither of the two always comes first: the machine's speed drifts.
            if pair % 2 == 0 {
                beside.add(self.least_disturbed(|| self.measure_beside(&attack, &mut done)));
                alone.add(self.least_disturbed(|| self.measure()));
            } else {
                alone.add(self.least_disturbed(|| self.measure()));
                beside.add(self.least_disturbed(|| self.measure_beside(&attack, &mut done)));
            }
            if LOOKS.contains(&pair) && beside.p999_us() <= BAR * alone.p999_us() {
                break;
            }
        }
        let ratio = beside.p999_us() / alone.p999_us();
        println!("{what}: P99.9, us: alone {alone}; beside the attack {beside}; {ratio:.2} times; {done} times done");
        assert!(done > 0, "{what}: nothing was done");
        self.check_alive();
        let after = self.noticed();
        assert_eq!(before, after, "{what}: the other tenant has lost packets");
        assert!(ratio <= BAR, "{what}: P99.9 is {ratio:.2} times that of alone");
        done
    }

    /// A measurement, again if the machine stood still in it, at most twice: what decides is what processors saw that did not run, and
    /// whether the kernel had dropped a part of Redis or of its client, which then waits for the disk; not what was measured. The one with
    /// the shortest standstills counts. Also returns how often it was measured.
    fn least_disturbed(&self, mut measure: impl FnMut() -> Histogram<u64>) -> (Histogram<u64>, u32) {
        let pages = || [self.redis.id(), std::process::id()].map(pages_read_back);
        let attempt = || {
            let (watch, before, began) = (Watch::start()?, pages(), Instant::now());
            let measured = measure();
            let mut seen = watch.finish()?;
            if pages() != before {
                seen.push(Standstill { began, length: DURATION });
            }
            Ok((seen, measured))
        };
        standstill::least_disturbed(CONNECTIONS, Histogram::len, attempt).expect("the machine can be watched")
    }

    /// One measurement while the attack runs; it ends, whatever the measurement says. Adds to `done` how often it did what it does.
    fn measure_beside(
        &self,
        attack: &impl Fn(&Tenants, &Arc<AtomicBool>) -> Threads,
        done: &mut u64,
    ) -> Histogram<u64> {
        let stop = Arc::new(AtomicBool::new(false));
        let threads = attack(self, &stop);
        std::thread::sleep(Duration::from_millis(50));
        let measured = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.measure()));
        stop.store(true, Ordering::Relaxed);
        for thread in threads {
            *done += thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
        measured.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// Both daemons are those that were started, answer, and have not panicked.
    pub fn check_alive(&self) {
        for (host, pid) in self.lab.hosts.iter().zip(self.pids) {
            assert_eq!(host.client.status().expect("the daemon answers").pid, pid);
            let log = host.log();
            assert!(!log.contains("panicked"), "{log}");
        }
    }

    /// What the other tenant would notice: drops at its ports, and segments that its kernels had to send again.
    fn noticed(&self) -> Vec<(String, u64)> {
        let mut noticed = Vec::new();
        for (host, name) in self.lab.hosts.iter().zip(["a", "b"]) {
            let drops = host.port(name).drops_packets;
            // What its kernel says about IPv6 when the device appears, and later.
            noticed.extend(drops.into_iter().filter(|(reason, n)| reason != "multicast" && *n > 0));
            noticed.push((format!("sent again by {name}"), self.lab.net(name).needed_retransmits()));
        }
        noticed
    }

    /// Memory of the first daemon, KiB: its own in use, without that of guests, and addresses.
    pub fn memory_kib(&self) -> (u64, u64) {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.pids[0])).unwrap();
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.trim().trim_end_matches(" kB").parse().unwrap()
        };
        (field("RssAnon:"), field("VmSize:"))
    }
}

impl Drop for Tenants {
    fn drop(&mut self) {
        let _ = self.redis.kill();
        let _ = self.redis.wait();
    }
}

/// Pages for which a process had to wait for the disk so far (proc_pid_stat(5), `majflt`).
fn pages_read_back(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    // Behind the program's name, which may hold anything: the state is field 3.
    let behind_name = stat.rsplit(')').next().unwrap();
    behind_name.split_whitespace().nth(12 - 3).unwrap().parse().unwrap()
}

/// Latencies of all measurements of one kind together. P99.9 of a single one is its third largest latency, which jumps by
/// factors from one to the next.
struct Pool {
    all: Histogram<u64>,
    /// P99.9 of each measurement, µs.
    each: Vec<u64>,
    /// Measurements that were repeated because the machine stood still.
    repeated: u32,
}

impl Pool {
    fn new() -> Pool {
        Pool { all: Histogram::new(3).unwrap(), each: Vec::new(), repeated: 0 }
    }

    fn add(&mut self, (measured, attempts): (Histogram<u64>, u32)) {
        self.each.push(measured.value_at_quantile(0.999));
        self.all.add(measured).unwrap();
        self.repeated += attempts - 1;
    }

    fn p999_us(&self) -> f64 {
        self.all.value_at_quantile(0.999) as f64
    }
}

impl std::fmt::Display for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of {:?} ({} repeated)", self.all.value_at_quantile(0.999), self.each, self.repeated)
    }
}

/// Runs `step` on a thread until told to stop; how often it said that it did something. For what takes little processor time, such
/// as sending at a given pace.
pub fn repeat(stop: &Arc<AtomicBool>, step: impl FnMut() -> u64 + Send + 'static) -> JoinHandle<u64> {
    let stop = Arc::clone(stop);
    std::thread::spawn(move || repeat_here(&stop, step))
}

/// The same on the calling thread, which may have entered a namespace.
pub fn repeat_here(stop: &AtomicBool, mut step: impl FnMut() -> u64) -> u64 {
    give_way();
    let mut done = 0;
    while !stop.load(Ordering::Relaxed) {
        done += step();
    }
    done
}

/// The same for what takes all processor time that it gets: it gets what nobody else wants. A guest has processors of its own, and
/// what is measured is what it does to the daemon.
pub fn spin(stop: &Arc<AtomicBool>, mut step: impl FnMut() + Send + 'static) -> JoinHandle<u64> {
    let stop = Arc::clone(stop);
    std::thread::spawn(move || {
        be_idle();
        while !stop.load(Ordering::Relaxed) {
            step();
        }
        0
    })
}

/// The calling thread, and those that it starts, run after those of ordinary priority, as far as the scheduler is fair: what the
/// attacker does itself takes no time from the daemon's workers, which would have processors of their own.
pub fn give_way() {
    rustix::process::setpriority_process(None, 19).unwrap();
}

/// The calling thread runs when no other wants to.
fn be_idle() {
    be(0, libc::SCHED_IDLE, 0);
}

/// The calling thread, and those that it starts, run before all others. What measures must not wait for the attacker's own threads:
/// on the two processors of a test machine that would be a scheduler's slice of milliseconds, which says nothing about the daemon.
fn be_first() {
    be(0, libc::SCHED_FIFO, 2);
}

/// A daemon's workers run before all threads but those that measure: each would have a processor of its own.
///
/// That the attacker's threads have the lowest priority is not enough. A worker that a thread of real-time priority has
/// interrupted for microseconds may have had its fair share by as much; then the scheduler picks even a thread of policy
/// `SCHED_IDLE` before it, and looks again at its next tick, milliseconds later.
fn put_workers_first(daemon: u32) {
    let mut workers = 0;
    for thread in std::fs::read_dir(format!("/proc/{daemon}/task")).unwrap() {
        let thread = thread.unwrap();
        if std::fs::read_to_string(thread.path().join("comm")).unwrap().starts_with("worker-") {
            be(thread.file_name().to_string_lossy().parse().unwrap(), libc::SCHED_FIFO, 1);
            workers += 1;
        }
    }
    assert_eq!(workers, 1, "workers of daemon {daemon}");
}

/// All threads of a process, and those that they start, run on this processor, if there is one of that number.
fn pin_process(process: u32, processor: usize) {
    for thread in std::fs::read_dir(format!("/proc/{process}/task")).unwrap() {
        let id = thread.unwrap().file_name().to_string_lossy().parse().unwrap();
        pin(id, processor);
    }
}

/// A thread, 0 for the calling one, and those that it starts run on this processor.
fn pin(thread: i32, processor: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(processor % std::thread::available_parallelism().unwrap());
    rustix::thread::sched_setaffinity(rustix::thread::Pid::from_raw(thread), &set).unwrap();
}

/// A thread, 0 for the calling one, has this policy and priority.
fn be(thread: libc::pid_t, policy: libc::c_int, sched_priority: libc::c_int) {
    let parameter = libc::sched_param { sched_priority };
    // SAFETY: the kernel reads one structure, which outlives the call.
    let result = unsafe { libc::sched_setscheduler(thread, policy, &raw const parameter) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

/// Bounds how often something is done: lets `per_s` pass a second.
pub struct Pace {
    started: Instant,
    per_s: f64,
    count: f64,
}

impl Pace {
    pub fn new(per_s: f64) -> Pace {
        Pace { started: Instant::now(), per_s, count: 0.0 }
    }

    /// Waits until it is time for the next one.
    pub fn wait(&mut self) {
        self.count += 1.0;
        let due = Duration::from_secs_f64(self.count / self.per_s);
        std::thread::sleep(due.saturating_sub(self.started.elapsed()));
    }
}
