//! A client of Redis or memcached that records every request: start, latency, outcome. Its loop is closed or open. In
//! an open loop requests are due at regular times, and their latency counts from the due time even if they are sent
//! late.
//!
//! Each client alternates between setting and getting its own key, or uses only one of the two after a first set, and
//! checks the answers. It keeps its connection, or opens one for each request, whose time then includes connecting. A
//! request without an answer within the timeout has failed: its connection is closed, and the next request opens a
//! new one. Unlike `redis-benchmark`, which only reports percentiles, it knows when each request stalled.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io::{ErrorKind, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use hdrhistogram::Histogram;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::fd::OwnedFd;
use serde::{Deserialize, Serialize};
use socket2::{Domain, Socket, Type};

use crate::machine::Machine;
use crate::options::Op;
use crate::programs::key_value_protocol::Protocol;
use crate::stats::LatencyMs;

/// Length of a time bin.
pub const BIN: Duration = Duration::from_millis(100);
/// Warm-up of a load at a fixed rate, because its connections all open at once.
pub const WARM_UP: Duration = Duration::from_millis(500);
/// Interval of the check for requests that have timed out.
const TIMEOUT_SCAN: Duration = Duration::from_millis(10);
/// Maximum wait for answers before the clock is checked.
const MAX_WAIT: Duration = Duration::from_millis(5);
/// Additional time for a virtual machine to start and end a load.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Pause before a refused connection is retried.
const RETRY_PAUSE: Duration = Duration::from_millis(10);

/// A load.
#[derive(Debug, Clone)]
pub struct Load {
    /// The server's address.
    pub server: SocketAddr,
    /// TCP, or Multipath TCP: see [`Namespace::stream_protocol`](crate::netns::Namespace::stream_protocol).
    pub transport: socket2::Protocol,
    /// The server's protocol.
    pub protocol: Protocol,
    /// Number of clients, each with one connection and one request in flight on it.
    pub clients: u32,
    /// Whether a client keeps its connection, or opens one for each request.
    pub keep_alive: bool,
    /// Duration.
    pub duration: Duration,
    /// How long to wait for answers to requests due before the end. Requests without an answer by then are not
    /// counted.
    pub patience: Duration,
    /// Requests due before this time are not in the latencies, because the first ones include connecting.
    pub warm_up: Duration,
    /// The timeout of a request.
    pub timeout: Duration,
    /// The command to use; `None`: both alternately.
    pub op: Option<Op>,
    /// Request rate over all connections, 1/s; `None`: each request follows the previous answer (closed loop).
    pub requests_per_s: Option<f64>,
    /// Whether the report contains each request.
    pub record: bool,
    /// Ends the load early when it becomes true.
    pub stop: Arc<AtomicBool>,
}

/// A finished request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// The index of its connection.
    pub client: u32,
    /// When it was due.
    pub due: Instant,
    /// When it was answered or failed.
    pub ended: Instant,
    /// Whether it was answered correctly.
    pub answered: bool,
}

/// Requests that ended within one [`BIN`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Bin {
    /// Requests answered correctly.
    pub answered: u64,
    /// Requests that timed out, were reset or refused.
    pub failed: u64,
    /// The longest time that a request, answered or not, was in flight when it ended or when the bin ended, µs.
    pub longest_stall_us: u64,
}

/// The result of a load.
#[derive(Debug, Clone)]
pub struct Report {
    /// When the load began.
    pub started: Instant,
    /// Outcomes over time.
    pub bins: Vec<Bin>,
    /// Latencies of answered requests, µs.
    pub latency_us: Histogram<u64>,
    /// Answers with a wrong value.
    pub wrong_answers: u64,
    /// All requests in the order of their ends, if the load records them.
    pub requests: Vec<Request>,
}

impl Report {
    /// Requests answered correctly.
    pub fn answered(&self) -> u64 {
        self.bins.iter().map(|bin| bin.answered).sum()
    }

    /// Requests that failed.
    pub fn failed(&self) -> u64 {
        self.bins.iter().map(|bin| bin.failed).sum()
    }
}

/// Runs a load to completion, in the namespace of the calling thread.
pub fn run(load: &Load) -> Result<Report> {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).context("creating an epoll instance")?;
    let latency_us = Histogram::new_with_bounds(1, 3_600_000_000, 3).context("creating a histogram")?;
    let started = Instant::now();
    let report = Report { started, bins: Vec::new(), latency_us, wrong_answers: 0, requests: Vec::new() };
    let interval = load.requests_per_s.map(|rate| Duration::from_secs_f64(f64::from(load.clients) / rate));
    let end = started + load.duration;
    let mut client = Client { load, epoll, report, interval, end, due: BinaryHeap::new() };
    // The connections' due times are staggered.
    let turn = interval.unwrap_or_default() / load.clients.max(1);
    let mut connections: Vec<Connection> =
        (0..load.clients).map(|index| Connection::new(index, started + turn * index)).collect();
    for connection in &mut connections {
        client.connect(connection, started);
    }
    let mut next_scan = started + TIMEOUT_SCAN;
    let mut events = [MaybeUninit::uninit(); 256];
    loop {
        let next_due =
            client.due.peek().map_or(MAX_WAIT, |Reverse((due, _))| due.saturating_duration_since(Instant::now()));
        let (ready, _) = match wait(&client.epoll, next_due.min(MAX_WAIT), &mut events) {
            Ok(ready) => ready,
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error).context("waiting for answers"),
        };
        for event in ready {
            if let Some(connection) = connections.get_mut(event.data.u64() as usize) {
                client.advance(connection);
            }
        }
        let now = Instant::now();
        while let Some(Reverse((due, index))) = client.due.peek().copied().filter(|Reverse((due, _))| *due <= now) {
            client.due.pop();
            client.wake(&mut connections[index as usize], due);
        }
        if now >= next_scan {
            next_scan = now + TIMEOUT_SCAN;
            for connection in &mut connections {
                client.scan(connection, now);
            }
        }
        let done = now >= end + load.patience || now >= end && connections.iter().all(Connection::rests);
        if done || load.stop.load(Ordering::Relaxed) {
            return Ok(client.report);
        }
    }
}

/// Latencies of a load at a fixed rate, each from the time when the request was due.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Latencies {
    /// Requests answered correctly after the warm-up.
    pub answered: u64,
    /// Their latencies.
    pub latency_ms: LatencyMs,
}

impl Latencies {
    /// The latencies of a load with an answer to every request.
    ///
    /// # Errors
    /// A request has failed, or there was none.
    pub fn of(report: &Report) -> Result<Self> {
        let histogram = &report.latency_us;
        let (answered, failed, wrong) = (histogram.len(), report.failed(), report.wrong_answers);
        ensure!(failed == 0 && answered > 0, "{answered} requests answered, {failed} failed, {wrong} wrong answers");
        let percentile = |q| histogram.value_at_quantile(q) as f64 / 1000.0;
        Ok(Self {
            answered,
            latency_ms: LatencyMs {
                avg: histogram.mean() / 1000.0,
                p50: percentile(0.5),
                p90: percentile(0.9),
                p99: percentile(0.99),
                p99_9: percentile(0.999),
                max: histogram.max() as f64 / 1000.0,
            },
        })
    }
}

/// Runs an open loop of `requests_per_s` for `seconds` inside a virtual machine, with this executable.
///
/// # Errors
/// A request fails, or the machine fails.
pub fn run_in_machine(
    machine: &mut Machine,
    server: SocketAddr,
    op: Op,
    clients: u32,
    requests_per_s: f64,
    seconds: f64,
) -> Result<Latencies> {
    let program = std::env::current_exe().context("finding this program")?;
    let (program, op) = (program.display(), op.name());
    let script = format!("exec '{program}' redis-load {server} {op} {clients} {requests_per_s} {seconds}");
    let output = machine.run(&script, Duration::from_secs_f64(seconds) + TIMEOUT)?;
    serde_json::from_str(&output).with_context(|| format!("reading `{output}`"))
}

struct Client<'a> {
    load: &'a Load,
    epoll: OwnedFd,
    report: Report,
    /// Interval of a connection's requests.
    interval: Option<Duration>,
    /// No request is due from this time on.
    end: Instant,
    /// Idle connections, by the due time of their next request.
    due: BinaryHeap<Reverse<(Instant, u32)>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// No socket until this time.
    Pausing(Instant),
    Connecting,
    /// A set is in flight.
    Setting,
    /// A get is in flight.
    Getting,
    /// The next request is not yet due.
    Resting,
}

struct Connection {
    index: u32,
    stream: Option<TcpStream>,
    state: State,
    /// When the request in flight began, or was due.
    request_started: Instant,
    /// When the next request is due.
    due: Instant,
    /// Whether the next request is a set. So are the first request and the first after a failure, because the stored
    /// value is unknown then.
    sets: bool,
    /// The value of the last set.
    value: u64,
    answer: Vec<u8>,
}

impl Connection {
    fn new(index: u32, due: Instant) -> Self {
        let (state, answer) = (State::Connecting, Vec::new());
        Self { index, stream: None, state, request_started: due, due, sets: true, value: 0, answer }
    }

    /// Whether no request is in flight.
    fn rests(&self) -> bool {
        matches!(self.state, State::Resting | State::Pausing(_))
    }
}

impl Client<'_> {
    /// Begins a request with a new connection. `started`: when it was due.
    fn connect(&mut self, connection: &mut Connection, started: Instant) {
        connection.request_started = started;
        connection.state = State::Connecting;
        connection.answer.clear();
        let opened = open(self.load.server, self.load.transport).and_then(|stream| {
            let data = epoll::EventData::new_u64(u64::from(connection.index));
            epoll::add(&self.epoll, &stream, data, epoll::EventFlags::OUT)?;
            Ok(stream)
        });
        match opened {
            Ok(stream) => connection.stream = Some(stream),
            Err(_) => self.fail(connection, Instant::now()),
        }
    }

    /// Handles events of a connection that is ready.
    fn advance(&mut self, connection: &mut Connection) {
        let result = match connection.state {
            State::Pausing(_) => Ok(()),
            // No request is in flight, so the peer has closed the connection.
            State::Resting => Err(ErrorKind::UnexpectedEof.into()),
            State::Connecting => self.connected(connection),
            State::Setting | State::Getting => self.receive(connection),
        };
        if result.is_err() {
            self.fail(connection, Instant::now());
        }
    }

    fn connected(&mut self, connection: &mut Connection) -> std::io::Result<()> {
        let Some(stream) = &connection.stream else { return Ok(()) };
        if let Some(error) = stream.take_error()? {
            return Err(error);
        }
        let data = epoll::EventData::new_u64(u64::from(connection.index));
        epoll::modify(&self.epoll, stream, data, epoll::EventFlags::IN)?;
        // The time of this request includes connecting.
        let started = connection.request_started;
        self.request(connection, started)
    }

    fn request(&mut self, connection: &mut Connection, started: Instant) -> std::io::Result<()> {
        let state = if connection.sets { State::Setting } else { State::Getting };
        connection.state = state;
        connection.request_started = started;
        connection.answer.clear();
        let text = if state == State::Setting {
            connection.value += 1;
            self.load.protocol.set(connection.index, connection.value)
        } else {
            self.load.protocol.get(connection.index)
        };
        let Some(stream) = &mut connection.stream else { return Ok(()) };
        // One small request always fits into the buffer of an open socket.
        stream.write_all(text.as_bytes())
    }

    fn receive(&mut self, connection: &mut Connection) -> std::io::Result<()> {
        let Some(stream) = &mut connection.stream else { return Ok(()) };
        let mut buffer = [0; 256];
        match stream.read(&mut buffer) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(length) => connection.answer.extend_from_slice(&buffer[..length]),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => return Ok(()),
            Err(error) => return Err(error),
        }
        let expected = match connection.state {
            State::Setting => self.load.protocol.stored().to_owned(),
            _ => self.load.protocol.found(connection.index, connection.value),
        };
        if connection.answer.len() < expected.len() && expected.as_bytes().starts_with(&connection.answer) {
            return Ok(());
        }
        if connection.answer != expected.as_bytes() {
            self.report.wrong_answers += 1;
            return Err(ErrorKind::InvalidData.into());
        }
        let now = Instant::now();
        let latency = micros(now - connection.request_started);
        if connection.request_started >= self.report.started + self.load.warm_up {
            self.report.latency_us.saturating_record(latency.max(1));
        }
        self.record(connection, now, true);
        let bin = self.bin(now);
        bin.answered += 1;
        bin.longest_stall_us = bin.longest_stall_us.max(latency);
        connection.sets = self.load.op.map_or(connection.state == State::Getting, |op| op == Op::Set);
        if !self.load.keep_alive {
            connection.stream = None;
        }
        let mut started = now;
        if let Some(interval) = self.interval {
            connection.due += interval;
            started = connection.due;
        }
        if started > now || started >= self.end {
            connection.state = State::Resting;
            if started < self.end {
                self.due.push(Reverse((started, connection.index)));
            }
            return Ok(());
        }
        self.next(connection, started)
    }

    /// Begins the next request of a client that has received its answer.
    fn next(&mut self, connection: &mut Connection, started: Instant) -> std::io::Result<()> {
        if connection.stream.is_none() {
            self.connect(connection, started);
            return Ok(());
        }
        self.request(connection, started)
    }

    /// Sends the connection's next request, which is now due, unless the connection has failed since.
    fn wake(&mut self, connection: &mut Connection, due: Instant) {
        if connection.state == State::Resting && connection.due == due && self.next(connection, due).is_err() {
            self.fail(connection, Instant::now());
        }
    }

    /// Ends a request without an answer, and opens a new connection.
    fn fail(&mut self, connection: &mut Connection, now: Instant) {
        connection.stream = None;
        let age = micros(now - connection.request_started);
        self.record(connection, now, false);
        let bin = self.bin(now);
        bin.failed += 1;
        bin.longest_stall_us = bin.longest_stall_us.max(age);
        connection.state = State::Pausing(now + RETRY_PAUSE);
        connection.request_started = now;
        connection.sets = true;
        // Requests due in the meantime are skipped.
        connection.due = now;
    }

    /// Checks for a timeout, and records a stall in every bin that it spans.
    fn scan(&mut self, connection: &mut Connection, now: Instant) {
        if let State::Pausing(until) = connection.state {
            if now >= until && now < self.end {
                self.connect(connection, now);
            }
            return;
        }
        if connection.state == State::Resting {
            return;
        }
        let age = now.saturating_duration_since(connection.request_started);
        if age >= self.load.timeout {
            self.fail(connection, now);
        } else {
            let bin = self.bin(now);
            bin.longest_stall_us = bin.longest_stall_us.max(micros(age));
        }
    }

    fn record(&mut self, connection: &Connection, ended: Instant, answered: bool) {
        if self.load.record {
            let (client, due) = (connection.index, connection.request_started);
            self.report.requests.push(Request { client, due, ended, answered });
        }
    }

    fn bin(&mut self, now: Instant) -> &mut Bin {
        let index = ((now - self.report.started).as_nanos() / BIN.as_nanos()) as usize;
        if self.report.bins.len() <= index {
            self.report.bins.resize(index + 1, Bin::default());
        }
        &mut self.report.bins[index]
    }
}

/// Waits for events, at most for `most`. The timeout of epoll itself has a resolution of milliseconds, which would
/// become part of every latency.
fn wait<'a>(
    epoll: &OwnedFd,
    most: Duration,
    events: &'a mut [MaybeUninit<epoll::Event>],
) -> rustix::io::Result<(&'a mut [epoll::Event], &'a mut [MaybeUninit<epoll::Event>])> {
    // The value fits: at most some milliseconds.
    let most = Timespec::try_from(most).map_err(|_| rustix::io::Errno::INVAL)?;
    poll(&mut [PollFd::new(epoll, PollFlags::IN)], Some(&most))?;
    epoll::wait(epoll, events, Some(&Timespec::default()))
}

fn open(server: SocketAddr, transport: socket2::Protocol) -> std::io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(server), Type::STREAM, Some(transport))?;
    socket.set_nonblocking(true)?;
    socket.set_tcp_nodelay(true)?;
    match socket.connect(&server.into()) {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::INPROGRESS.raw_os_error()) => {}
        Err(error) => return Err(error),
    }
    Ok(socket.into())
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::net::TcpListener;
    use std::sync::Mutex;

    use super::*;

    /// Answers like Redis on `accepted` connections; `falsify` changes an answer.
    fn server(accepted: usize, falsify: fn(&mut String)) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let values = Arc::new(Mutex::new(HashMap::new()));
        std::thread::spawn(move || {
            for stream in listener.incoming().take(accepted) {
                let (mut stream, values) = (stream.unwrap(), Arc::clone(&values));
                std::thread::spawn(move || {
                    let mut buffer = [0; 256];
                    while let Ok(length @ 1..) = stream.read(&mut buffer) {
                        let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
                        // Number of arguments, length, command, length, key, length, value.
                        let words: Vec<String> = text.split("\r\n").map(str::to_owned).collect();
                        let mut values = values.lock().unwrap();
                        let mut answer = if words[2] == "SET" {
                            values.insert(words[4].clone(), words[6].clone());
                            "+OK\r\n".to_owned()
                        } else {
                            format!("$16\r\n{}\r\n", values[&words[4]])
                        };
                        drop(values);
                        falsify(&mut answer);
                        if stream.write_all(answer.as_bytes()).is_err() {
                            return;
                        }
                    }
                });
            }
            // Keeps the listener open, so that further connections are neither refused nor answered.
            std::thread::sleep(Duration::from_secs(5));
        });
        address
    }

    fn load(server: SocketAddr) -> Load {
        let stop = Arc::new(AtomicBool::new(false));
        let duration = Duration::from_millis(400);
        Load {
            server,
            transport: socket2::Protocol::TCP,
            protocol: Protocol::Redis,
            clients: 3,
            keep_alive: true,
            duration,
            patience: Duration::ZERO,
            timeout: Duration::from_millis(100),
            warm_up: Duration::ZERO,
            op: None,
            requests_per_s: None,
            record: false,
            stop,
        }
    }

    #[test]
    fn every_answer_is_counted_and_checked() {
        let report = run(&load(server(3, |_| {}))).unwrap();
        assert!(report.answered() > 10, "{}", report.answered());
        assert_eq!(report.answered(), report.latency_us.len());
        assert_eq!((report.failed(), report.wrong_answers), (0, 0));
    }

    #[test]
    fn requests_are_sent_when_due_and_late_ones_are_sent_immediately() {
        // On a busy machine late answers are waited for: the number of requests is exactly the number due.
        let patience = Duration::from_secs(20);
        let load = Load { requests_per_s: Some(300.0), patience, timeout: patience, ..load(server(3, |_| {})) };
        let on_time = run(&load).unwrap();
        assert!((117..=123).contains(&on_time.answered()), "{} in 0.4 s", on_time.answered());
        // One answer in ten is 50 ms late, the time of five requests.
        let late = |answer: &mut String| {
            if answer.ends_with("5\r\n") {
                std::thread::sleep(Duration::from_millis(50));
            }
        };
        let late = run(&Load { server: server(3, late), ..load }).unwrap();
        assert!((117..=123).contains(&late.answered()), "{} in 0.4 s", late.answered());
        assert!(late.latency_us.value_at_quantile(0.9) > 5_000, "lateness counts for those behind, too");
        assert_eq!((late.failed(), late.wrong_answers), (0, 0));
    }

    #[test]
    fn requests_in_flight_at_the_end_are_awaited_until_the_limit() {
        let load = Load {
            timeout: Duration::from_secs(5),
            duration: Duration::from_millis(150),
            ..load(server(6, |_| {
                std::thread::sleep(Duration::from_millis(100));
            }))
        };
        // Each connection sends a request at the start and after 100 ms.
        assert_eq!(run(&load).unwrap().answered(), 3);
        let patient = Load { patience: Duration::from_secs(5), ..load };
        let report = run(&patient).unwrap();
        assert_eq!((report.answered(), report.failed()), (6, 0));
        assert!(report.started.elapsed() < Duration::from_secs(2), "it ends with the last answer");
        // Ten are due on each connection in these 150 ms, and all except the first are late.
        let report = run(&Load {
            requests_per_s: Some(200.0),
            server: server(3, |_| {
                std::thread::sleep(Duration::from_millis(50));
            }),
            ..patient
        })
        .unwrap();
        assert_eq!((report.answered(), report.failed()), (30, 0));
        assert!(report.latency_us.max() > 300_000, "{}", report.latency_us.max());
    }

    #[test]
    fn connections_use_one_command() {
        for op in [Op::Get, Op::Set] {
            let report =
                run(&Load { op: Some(op), ..load(server(3, |answer| *answer = answer.replace("+OK", "+KO"))) });
            // Each connection begins with a `SET`, which this server answers incorrectly.
            assert!(report.unwrap().wrong_answers > 0);
            let report = run(&Load { op: Some(op), ..load(server(3, |_| {})) }).unwrap();
            let latencies = Latencies::of(&report).unwrap();
            assert_eq!(latencies.answered, report.answered());
            let warm_up = Duration::from_millis(200);
            let report = run(&Load { op: Some(op), warm_up, ..load(server(3, |_| {})) }).unwrap();
            let latencies = Latencies::of(&report).unwrap();
            assert!(latencies.answered < report.answered(), "all of {} were recorded", latencies.answered);
            let values = LatencyMs::FIELDS[1..].iter().map(|(_, field)| field(&latencies.latency_ms));
            assert!(values.is_sorted());
        }
    }

    #[test]
    fn each_request_opens_a_connection() {
        // Two connections for each of three clients; a seventh gets no answer.
        let short = Load { keep_alive: false, ..load(server(6, |_| {})) };
        let report = run(&short).unwrap();
        assert_eq!((report.answered(), report.wrong_answers), (6, 0));
        let patience = Duration::from_secs(20);
        let paced =
            Load { requests_per_s: Some(300.0), op: Some(Op::Get), patience, timeout: patience, record: true, ..short };
        let report = run(&Load { server: server(usize::MAX, |_| {}), ..paced }).unwrap();
        assert!((117..=123).contains(&report.answered()), "{} in 0.4 s", report.answered());
        assert_eq!(report.requests.len() as u64, report.answered());
        assert!(
            report
                .requests
                .iter()
                .all(|request| request.answered && request.client < 3 && request.due <= request.ended)
        );
        assert_eq!((report.failed(), report.wrong_answers), (0, 0));
    }

    #[test]
    fn a_wrong_value_is_detected() {
        let report =
            run(&load(server(usize::MAX, |answer| *answer = answer.replace("00001\r\n", "00002\r\n")))).unwrap();
        assert!(report.wrong_answers > 0);
    }

    #[test]
    fn a_request_without_answer_times_out() {
        let report = run(&load(server(2, |_| {}))).unwrap();
        assert!((2..=4).contains(&report.failed()), "{}", report.failed());
        let longest = report.bins.iter().map(|bin| bin.longest_stall_us).max().unwrap();
        assert!((100_000..200_000).contains(&longest), "{longest}");
    }

    #[test]
    fn a_refused_connection_fails() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        let report = run(&load(address)).unwrap();
        assert!(report.failed() > 3 && report.answered() == 0);
    }
}
