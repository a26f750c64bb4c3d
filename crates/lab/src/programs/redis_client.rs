//! A closed-loop Redis client that records every request: start, latency, outcome.
//!
//! Each connection alternates `SET key value` and `GET key` on a key of its own and checks what comes back. A request that
//! is not answered within the timeout has failed: its connection is closed, and the next request begins with connecting
//! anew. Where `redis-benchmark` knows only percentiles, this knows when each request stalled.

use std::io::{ErrorKind, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use hdrhistogram::Histogram;
use rustix::event::{Timespec, epoll};
use rustix::fd::OwnedFd;
use socket2::{Domain, Protocol, Socket, Type};

/// Length of a time bin.
pub const BIN: Duration = Duration::from_millis(100);
/// How often connections are looked at for requests that have timed out.
const TIMEOUT_SCAN: Duration = Duration::from_millis(10);
/// Pause before a connection that was refused tries again.
const RETRY_PAUSE: Duration = Duration::from_millis(10);

/// What to do.
#[derive(Debug, Clone)]
pub struct Load {
    /// The Redis server.
    pub server: SocketAddr,
    /// Number of connections, one request in flight on each.
    pub clients: u32,
    /// How long.
    pub duration: Duration,
    /// When a request counts as failed.
    pub timeout: Duration,
    /// Ends the load early once true.
    pub stop: Arc<AtomicBool>,
}

/// What happened to the requests that ended within one [`BIN`] of time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Bin {
    /// Requests answered correctly.
    pub answered: u64,
    /// Requests that timed out, were reset or refused.
    pub failed: u64,
    /// The longest time that a request, answered or not, had been under way when it ended, or at the end of the bin, µs.
    pub longest_stall_us: u64,
}

/// What a load measured.
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

/// Runs a load to its end, in the namespace that the calling thread is in.
pub fn run(load: &Load) -> Result<Report> {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).context("creating an epoll instance")?;
    let latency_us = Histogram::new_with_bounds(1, 3_600_000_000, 3).context("creating a histogram")?;
    let started = Instant::now();
    let report = Report { started, bins: Vec::new(), latency_us, wrong_answers: 0 };
    let mut client = Client { load, epoll, report };
    let mut connections: Vec<Connection> = (0..load.clients).map(|index| Connection::new(index, started)).collect();
    for connection in &mut connections {
        client.connect(connection, started);
    }
    let end = started + load.duration;
    let mut next_scan = started + TIMEOUT_SCAN;
    let mut events = [MaybeUninit::uninit(); 256];
    let wait = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };
    loop {
        let (ready, _) = match epoll::wait(&client.epoll, &mut events, Some(&wait)) {
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
        if now >= next_scan {
            next_scan = now + TIMEOUT_SCAN;
            for connection in &mut connections {
                client.scan(connection, now);
            }
        }
        if now >= end || load.stop.load(Ordering::Relaxed) {
            return Ok(client.report);
        }
    }
}

struct Client<'a> {
    load: &'a Load,
    epoll: OwnedFd,
    report: Report,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// No socket until this time.
    Pausing(Instant),
    Connecting,
    /// `SET` is under way.
    Setting,
    /// `GET` is under way.
    Getting,
}

struct Connection {
    index: u32,
    stream: Option<TcpStream>,
    state: State,
    /// When the request under way began.
    request_started: Instant,
    /// The value that the last `SET` has stored.
    value: u64,
    answer: Vec<u8>,
}

impl Connection {
    fn new(index: u32, now: Instant) -> Self {
        Self { index, stream: None, state: State::Connecting, request_started: now, value: 0, answer: Vec::new() }
    }
}

impl Client<'_> {
    /// Begins a request with a new connection.
    fn connect(&mut self, connection: &mut Connection, now: Instant) {
        connection.request_started = now;
        connection.state = State::Connecting;
        connection.answer.clear();
        let opened = open(self.load.server).and_then(|stream| {
            let data = epoll::EventData::new_u64(u64::from(connection.index));
            epoll::add(&self.epoll, &stream, data, epoll::EventFlags::OUT)?;
            Ok(stream)
        });
        match opened {
            Ok(stream) => connection.stream = Some(stream),
            Err(_) => self.fail(connection, now),
        }
    }

    /// Goes on with a connection that is ready.
    fn advance(&mut self, connection: &mut Connection) {
        let result = match connection.state {
            State::Pausing(_) => Ok(()),
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
        // Connecting was part of this request.
        let started = connection.request_started;
        self.request(connection, State::Setting, started)
    }

    fn request(&mut self, connection: &mut Connection, state: State, started: Instant) -> std::io::Result<()> {
        connection.state = state;
        connection.request_started = started;
        connection.answer.clear();
        let index = connection.index;
        let text = if state == State::Setting {
            connection.value += 1;
            format!("*3\r\n$3\r\nSET\r\n$12\r\nlab:{index:08x}\r\n$16\r\n{:016x}\r\n", connection.value)
        } else {
            format!("*2\r\n$3\r\nGET\r\n$12\r\nlab:{index:08x}\r\n")
        };
        let Some(stream) = &mut connection.stream else { return Ok(()) };
        // One small request in flight always fits an open socket's buffer.
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
            State::Setting => "+OK\r\n".to_owned(),
            _ => format!("$16\r\n{:016x}\r\n", connection.value),
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
        self.report.latency_us.saturating_record(latency.max(1));
        let bin = self.bin(now);
        bin.answered += 1;
        bin.longest_stall_us = bin.longest_stall_us.max(latency);
        let next = if connection.state == State::Setting { State::Getting } else { State::Setting };
        self.request(connection, next, now)
    }

    /// Ends a request without an answer, and connects anew.
    fn fail(&mut self, connection: &mut Connection, now: Instant) {
        connection.stream = None;
        let age = micros(now - connection.request_started);
        let bin = self.bin(now);
        bin.failed += 1;
        bin.longest_stall_us = bin.longest_stall_us.max(age);
        connection.state = State::Pausing(now + RETRY_PAUSE);
        connection.request_started = now;
    }

    /// Looks for a timeout, and lets a stall that lasts show in every bin that it spans.
    fn scan(&mut self, connection: &mut Connection, now: Instant) {
        if let State::Pausing(until) = connection.state {
            if now >= until {
                self.connect(connection, now);
            }
            return;
        }
        let age = now - connection.request_started;
        if age >= self.load.timeout {
            self.fail(connection, now);
        } else {
            let bin = self.bin(now);
            bin.longest_stall_us = bin.longest_stall_us.max(micros(age));
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

fn open(server: SocketAddr) -> std::io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(server), Type::STREAM, Some(Protocol::TCP))?;
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
    use std::net::TcpListener;

    use super::*;

    /// Answers as Redis would on `accepted` connections; `falsify` changes an answer.
    fn server(accepted: usize, falsify: fn(&mut String)) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            for stream in listener.incoming().take(accepted) {
                let mut stream = stream.unwrap();
                std::thread::spawn(move || {
                    let mut value = String::new();
                    let mut buffer = [0; 256];
                    while let Ok(length @ 1..) = stream.read(&mut buffer) {
                        let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
                        let mut answer = if text.contains("SET") {
                            value = text.trim_end().rsplit("\r\n").next().unwrap().to_owned();
                            "+OK\r\n".to_owned()
                        } else {
                            format!("$16\r\n{value}\r\n")
                        };
                        falsify(&mut answer);
                        if stream.write_all(answer.as_bytes()).is_err() {
                            return;
                        }
                    }
                });
            }
            // Keeps the listener, so that further connections are neither refused nor answered.
            std::thread::sleep(Duration::from_secs(5));
        });
        address
    }

    fn load(server: SocketAddr) -> Load {
        let stop = Arc::new(AtomicBool::new(false));
        let duration = Duration::from_millis(400);
        Load { server, clients: 3, duration, timeout: Duration::from_millis(100), stop }
    }

    #[test]
    fn every_answer_is_counted_and_checked() {
        let report = run(&load(server(3, |_| {}))).unwrap();
        assert!(report.answered() > 10, "{}", report.answered());
        assert_eq!(report.answered(), report.latency_us.len());
        assert_eq!((report.failed(), report.wrong_answers), (0, 0));
    }

    #[test]
    fn a_wrong_value_is_noticed() {
        let report =
            run(&load(server(usize::MAX, |answer| *answer = answer.replace("00001\r\n", "00002\r\n")))).unwrap();
        assert!(report.wrong_answers > 0);
    }

    #[test]
    fn silence_fails_after_the_timeout() {
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
