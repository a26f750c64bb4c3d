//! Two tenants on two hosts with one worker each: one attacks, the other one has a Redis that must not be affected.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bifrost_lab::awake::Awake;
use bifrost_lab::options::Op;
use bifrost_lab::programs::key_value_client::{self, Load, Report, Request};
use bifrost_lab::programs::key_value_protocol::Protocol;
use bifrost_lab::standstill::{Standstill, Watch};
use hdrhistogram::Histogram;

use super::front_end::{FrontEnd, Kind};
use super::host::vpc;
use super::{Guest, Lab, Options, eventually};

/// Address of the other tenant's Redis.
const REDIS: ([u8; 4], u16) = ([10, 0, 0, 2], 6379);
/// Requests per second on all connections together. They are due at regular times, so that a delayed request does not
/// hide delays of others.
const RATE: f64 = 3000.0;
const CONNECTIONS: u32 = 6;
/// Time at the beginning of a measurement in which requests do not count, because they include connecting.
const WARM_UP: Duration = Duration::from_millis(100);
/// Duration of one measurement.
const DURATION: Duration = Duration::from_millis(700);
/// Largest allowed ratio of the other tenant's P99.9 with and without the attack.
pub const BAR: f64 = 2.0;
/// Numbers of pairs (one measurement alone and one beside the attack) after which all measurements of each kind are
/// compared. If a comparison misses the bar, more pairs are added to the same pool.
const COMPARISONS: [usize; 5] = [3, 6, 12, 48, 96];
/// Fewest requests of each kind in a comparison.
const REQUESTS_MIN: u64 = 3000;

/// Requests do not count if a processor ran nothing for this long while they were due or in flight: a hypervisor gives
/// it to others for milliseconds, several times per second in bad times, which alone would decide P99.9. The daemon
/// cannot cause such a pause, because the thread that detects it has a higher priority.
const PAUSE: Duration = Duration::from_millis(1);
/// Real-time priority of that thread.
pub const PRIORITY_OF_WATCH: i32 = bifrost_lab::processor::REAL_TIME;
/// The interval at which pauses are looked for.
const WATCHED: Duration = Duration::from_micros(250);
/// The kernel handles packets in interrupts, which do delay that thread. An attack whose packets take that long also
/// fails: of the requests beside it, at most this share more may not count than of [`BAR`] times those alone.
const PAUSED_MORE: f64 = 0.02;

/// How the attacker is attached to the first host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attachment {
    Tap,
    /// A vhost-user port whose front-end is in the test.
    Machine,
}

/// `a` (10.0.0.1) on the first host sends requests to the Redis of `b` (10.0.0.2) on the second. The attacker `x`
/// (10.9.0.1, fd09::1) on the first host belongs to the other tenant, whose VPC has a guest `y` (10.9.0.2, fd09::2) on
/// the second host, and a gateway.
pub struct Tenants {
    pub lab: Lab,
    redis: Child,
    pids: [u32; 2],
    _alone: MutexGuard<'static, ()>,
}

/// Held by the test that measures.
static ALONE: Mutex<()> = Mutex::new(());

/// Threads of a running attack: they end on request, and return how often they have acted.
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
        // One CPU per host: otherwise the scheduler decides whether both daemons share one.
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

    /// One measurement. Asserts that every answer is right.
    fn measure(&self) -> Report {
        let load = Load {
            server: SocketAddr::from(REDIS),
            transport: socket2::Protocol::TCP,
            protocol: Protocol::Redis,
            clients: CONNECTIONS,
            keep_alive: true,
            duration: DURATION,
            patience: Duration::from_secs(2),
            warm_up: WARM_UP,
            timeout: Duration::from_secs(2),
            op: Some(Op::Get),
            requests_per_s: Some(RATE),
            record: true,
            stop: Arc::default(),
        };
        let report = self.lab.net("a").enter(move || {
            be_first();
            pin(0, 0);
            key_value_client::run(&load).unwrap()
        });
        assert_eq!(report.wrong_answers, 0);
        report
    }

    /// Measures alone and beside the attack alternately, and asserts that the attack does not affect the other tenant
    /// beyond the bar. `attack` starts threads that run until the flag is set. Returns how often they acted.
    pub fn judge(&self, what: &str, attack: impl Fn(&Tenants, &Arc<AtomicBool>) -> Threads) -> u64 {
        let before = self.noticed();
        let compared = self.compare(&COMPARISONS, attack);
        println!("{what}: {compared}");
        assert!(compared.done > 0, "{what}: the attack did nothing");
        self.check_alive();
        let after = self.noticed();
        assert_eq!(before, after, "{what}: the other tenant has lost packets");
        assert!(compared.is_equal(), "{what}: {compared}");
        compared.done
    }

    /// Measures pairs until a comparison after one of these numbers of pairs meets the bar.
    pub fn compare(&self, after: &[usize], attack: impl Fn(&Tenants, &Arc<AtomicBool>) -> Threads) -> Compared {
        // Write dirty pages of a build now: otherwise the kernel's flusher threads run for a millisecond at a time.
        rustix::fs::sync();
        let _awake = Awake::start().expect("root may use SCHED_IDLE");
        let mut compared = Compared::default();
        for pair in 1..=after[after.len() - 1] {
            // The order alternates, because the machine's speed drifts.
            if pair % 2 == 1 {
                compared.alone.add(&self.measure_watched(|| self.measure()));
            }
            compared.beside.add(&self.measure_watched(|| self.measure_beside(&attack, &mut compared.done)));
            if pair % 2 == 0 {
                compared.alone.add(&self.measure_watched(|| self.measure()));
            }
            if after.contains(&pair) && compared.is_equal() {
                break;
            }
        }
        compared
    }

    /// A measurement, and the pauses of processors during it.
    fn measure_watched(&self, measure: impl FnOnce() -> Report) -> (Report, Vec<Standstill>) {
        let watch = Watch::with(WATCHED, PAUSE).expect("a thread can be started");
        let report = measure();
        (report, watch.finish().expect("root may use real-time priorities"))
    }

    /// One measurement while the attack runs. The attack ends even if the measurement fails. Adds to `done` how often
    /// it acted.
    fn measure_beside(&self, attack: &impl Fn(&Tenants, &Arc<AtomicBool>) -> Threads, done: &mut u64) -> Report {
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

    /// Asserts that both daemons are still the same processes, answer, and have not panicked.
    pub fn check_alive(&self) {
        for (host, pid) in self.lab.hosts.iter().zip(self.pids) {
            assert_eq!(host.client.status().expect("the daemon answers").pid, pid);
            let log = host.log();
            assert!(!log.contains("panicked"), "{log}");
        }
    }

    /// Effects on the other tenant: drops at its ports, and segments that its kernels had to retransmit.
    fn noticed(&self) -> Vec<(String, u64)> {
        let mut noticed = Vec::new();
        for (host, name) in self.lab.hosts.iter().zip(["a", "b"]) {
            let drops = host.port(name).drops_packets;
            // Except IPv6 multicast of its kernel, such as when the device appears.
            noticed.extend(drops.into_iter().filter(|(reason, n)| reason != "multicast" && *n > 0));
            noticed.push((format!("retransmitted by {name}"), self.lab.net(name).needed_retransmits()));
        }
        noticed
    }

    /// Memory of the first daemon, KiB: its resident anonymous memory, without that of guests, and its address space.
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

/// Measurements alone and beside an attack.
#[derive(Default)]
pub struct Compared {
    pub alone: Pool,
    pub beside: Pool,
    /// How often the attack acted.
    pub done: u64,
}

impl Compared {
    pub fn ratio(&self) -> f64 {
        self.beside.p999_us() / self.alone.p999_us()
    }

    /// Whether the other tenant's requests beside the attack take as long as alone, within the bar.
    pub fn is_equal(&self) -> bool {
        let is_enough = self.alone.counted.len().min(self.beside.counted.len()) >= REQUESTS_MIN;
        let is_paused_as_much = self.beside.paused() <= BAR * self.alone.paused() + PAUSED_MORE;
        is_enough && is_paused_as_much && self.ratio() <= BAR
    }
}

impl std::fmt::Display for Compared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Compared { alone, beside, done } = self;
        write!(f, "alone {alone}; beside the attack {beside}; {:.2} times; {done} times done", self.ratio())
    }
}

/// Latencies of all measurements of one kind together. P99.9 of a single measurement is its third largest latency,
/// which varies by large factors.
pub struct Pool {
    counted: Histogram<u64>,
    /// Requests that do not count, because a processor paused.
    paused: u64,
    /// P99.9 of each measurement, µs.
    each: Vec<u64>,
}

impl Default for Pool {
    fn default() -> Self {
        Pool { counted: Histogram::new(3).unwrap(), paused: 0, each: Vec::new() }
    }
}

impl Pool {
    /// Asserts that there is an answer to every request.
    fn add(&mut self, (report, pauses): &(Report, Vec<Standstill>)) {
        assert_eq!(report.failed(), 0, "requests failed");
        let (answered, expected) = (report.answered(), RATE * DURATION.as_secs_f64());
        assert!(answered as f64 > expected * 0.9, "{answered} of {expected} requests");
        let mut counted = Histogram::<u64>::new(3).unwrap();
        let warm = report.started + WARM_UP;
        for request in report.requests.iter().filter(|request| request.due >= warm) {
            if pauses.iter().any(|pause| is_in_flight(request, pause)) {
                self.paused += 1;
            } else {
                counted.record((request.ended - request.due).as_micros().max(1) as u64).unwrap();
            }
        }
        self.each.push(counted.value_at_quantile(0.999));
        self.counted.add(counted).unwrap();
    }

    fn p999_us(&self) -> f64 {
        self.counted.value_at_quantile(0.999) as f64
    }

    /// The share of requests that do not count.
    fn paused(&self) -> f64 {
        self.paused as f64 / (self.paused + self.counted.len()).max(1) as f64
    }
}

/// Whether a request was due or in flight during a pause, or when the work that had piled up in it was done, which
/// takes at most as long again.
fn is_in_flight(request: &Request, pause: &Standstill) -> bool {
    let began = pause.began - WATCHED;
    request.ended >= began && request.due <= pause.began + 2 * pause.length
}

impl std::fmt::Display for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (p999, paused) = (self.p999_us(), 100.0 * self.paused());
        write!(f, "P99.9 {p999} us of {:?} ({paused:.1} % paused)", self.each)
    }
}

/// Runs `step` on a thread until `stop` is set; returns the sum of its results. For steps that take little CPU time,
/// such as sending at a given rate.
pub fn repeat(stop: &Arc<AtomicBool>, step: impl FnMut() -> u64 + Send + 'static) -> JoinHandle<u64> {
    let stop = Arc::clone(stop);
    std::thread::spawn(move || repeat_here(&stop, step))
}

/// As [`repeat`], on the calling thread, which may have entered a namespace.
pub fn repeat_here(stop: &AtomicBool, mut step: impl FnMut() -> u64) -> u64 {
    give_way();
    let mut done = 0;
    while !stop.load(Ordering::Relaxed) {
        done += step();
    }
    done
}

/// As [`repeat`], for steps that use all CPU time they can get: they only get idle time. A guest has its own CPUs; the
/// tests measure its effect on the daemon.
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

/// Lowers the priority of the calling thread and of threads that it starts: the attacker's own work must not take CPU
/// time from the daemon's workers, which would have their own CPUs.
pub fn give_way() {
    rustix::process::setpriority_process(None, 19).unwrap();
}

/// Takes the processor of the daemon and of the client away, from time to time: from everything with a lower real-time
/// priority.
pub fn hog(stop: &Arc<AtomicBool>, priority: i32, length: Duration) -> JoinHandle<u64> {
    let stop = Arc::clone(stop);
    std::thread::spawn(move || {
        be(0, libc::SCHED_FIFO, priority);
        pin(0, 0);
        let mut times = 0;
        while !stop.load(Ordering::Relaxed) {
            let began = Instant::now();
            while began.elapsed() < length {}
            times += 1;
            std::thread::sleep(Duration::from_millis(40));
        }
        times
    })
}

/// The calling thread only runs on an idle CPU.
fn be_idle() {
    be(0, libc::SCHED_IDLE, 0);
}

/// Gives the calling thread and threads that it starts the highest priority. The measurement must not wait for the
/// attacker's own threads: on a test machine with two CPUs, that would be a time slice of milliseconds, independent of
/// the daemon.
fn be_first() {
    be(0, libc::SCHED_FIFO, 2);
}

/// Gives a daemon's workers priority over all threads except the measuring ones: on a real host each would have its own
/// CPU.
///
/// The lowest priority for the attacker's threads is not enough. After a real-time thread has interrupted a worker for
/// microseconds, the worker may have exceeded its fair share by as much. The scheduler then even prefers a `SCHED_IDLE`
/// thread, until its next tick milliseconds later.
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

/// Pins all threads of a process, and threads that they start, to this CPU, modulo the number of CPUs.
fn pin_process(process: u32, processor: usize) {
    for thread in std::fs::read_dir(format!("/proc/{process}/task")).unwrap() {
        let id = thread.unwrap().file_name().to_string_lossy().parse().unwrap();
        pin(id, processor);
    }
}

/// Pins a thread (0: the calling one), and threads that it starts, to this CPU.
fn pin(thread: i32, processor: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(processor % std::thread::available_parallelism().unwrap());
    rustix::thread::sched_setaffinity(rustix::thread::Pid::from_raw(thread), &set).unwrap();
}

/// Sets the policy and priority of a thread (0: the calling one).
fn be(thread: libc::pid_t, policy: libc::c_int, sched_priority: libc::c_int) {
    let parameter = libc::sched_param { sched_priority };
    // SAFETY: the kernel reads one structure, which outlives the call.
    let result = unsafe { libc::sched_setscheduler(thread, policy, &raw const parameter) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

/// Limits actions to `per_s` per second.
pub struct Pace {
    started: Instant,
    per_s: f64,
    count: f64,
}

impl Pace {
    pub fn new(per_s: f64) -> Pace {
        Pace { started: Instant::now(), per_s, count: 0.0 }
    }

    /// Waits until the next action is due.
    pub fn wait(&mut self) {
        self.count += 1.0;
        let due = Duration::from_secs_f64(self.count / self.per_s);
        std::thread::sleep(due.saturating_sub(self.started.elapsed()));
    }
}
