//! Pings and byte streams whose every byte is checked.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fastrand::Rng;
use socket2::{Domain, Protocol, Socket, Type};

use super::Net;

/// How long a stream may stall before the test fails.
const PATIENCE: Duration = Duration::from_secs(20);

/// Sends `count` pings with `size` bytes of payload, 5 ms apart. Returns the number of replies.
pub fn ping(from: &Net, to: &str, count: u32, size: usize) -> u32 {
    ping_with(from, to, count, size, 64).len() as u32
}

/// As [`ping`], through a transport that may give up packets. It then sends each of them once more as plain VXLAN
/// (PROTOCOL 14.1), so a packet whose acknowledgement was lost arrives twice.
pub fn ping_despite_giving_up(from: &Net, to: &str, count: u32, size: usize) -> u32 {
    exchange_pings(from, to, count, size, 64, ANSWERS, true).len() as u32
}

/// As [`ping`], for pings of which some or all get no reply. Does not wait long for the last one.
pub fn ping_briefly(from: &Net, to: &str, count: u32, size: usize) -> u32 {
    exchange_pings(from, to, count, size, 64, Duration::from_millis(50), false).len() as u32
}

/// Sends pings with a TTL (hop limit). Returns the TTL of each reply; 0 over IPv6, where the socket does not report it.
pub fn ping_with(from: &Net, to: &str, count: u32, size: usize, ttl: u32) -> Vec<u8> {
    exchange_pings(from, to, count, size, ttl, ANSWERS, false)
}

/// How long to wait for replies after the last ping.
const ANSWERS: Duration = Duration::from_millis(500);

fn exchange_pings(
    from: &Net,
    to: &str,
    count: u32,
    size: usize,
    ttl: u32,
    patience: Duration,
    may_repeat: bool,
) -> Vec<u8> {
    let to: IpAddr = to.parse().unwrap();
    from.enter(move || {
        let (domain, protocol) = match to {
            IpAddr::V4(_) => (Domain::IPV4, Protocol::ICMPV4),
            IpAddr::V6(_) => (Domain::IPV6, Protocol::ICMPV6),
        };
        let mut socket = Socket::new(domain, Type::RAW, Some(protocol)).unwrap();
        match to {
            IpAddr::V4(_) => socket.set_ttl_v4(ttl).unwrap(),
            IpAddr::V6(_) => socket.set_unicast_hops_v6(ttl).unwrap(),
        }
        let (ask, answer, header) = if to.is_ipv4() { (8, 0, 20) } else { (128, 129, 0) };
        let payload = pattern(u64::from(ttl), size);
        let id = (rustix::thread::gettid().as_raw_nonzero().get() as u16).to_be_bytes();
        let mut seen = vec![None; count as usize];
        let mut buffer = vec![0; 65_536];
        for number in 0..count {
            let mut packet = [&[ask, 0, 0, 0, id[0], id[1]][..], &(number as u16).to_be_bytes(), &payload].concat();
            let sum = super::raw::checksum(&packet);
            packet[2..4].copy_from_slice(&sum.to_be_bytes());
            // May return the error of an earlier ping, such as an unreachable neighbor.
            let _ = socket.send_to(&packet, &SocketAddr::new(to, 0).into());
            let last = number + 1 == count;
            let until = Instant::now() + if last { patience } else { Duration::from_millis(5) };
            while Instant::now() < until && !(last && seen.iter().all(Option::is_some)) {
                let left = until.saturating_duration_since(Instant::now()).max(Duration::from_micros(1));
                socket.set_read_timeout(Some(left)).unwrap();
                let Ok(length) = socket.read(&mut buffer) else { continue };
                let Some(message) = buffer[..length].get(header..).filter(|m| m.len() >= 8) else { continue };
                let at = usize::from(u16::from_be_bytes([message[6], message[7]]));
                // A raw socket also receives damaged packets.
                let intact = to.is_ipv6() || super::raw::checksum(message) == 0;
                if intact && message[0] == answer && message[4..6] == id && at < seen.len() {
                    assert!(message[8..] == payload, "a ping came back changed");
                    assert!(may_repeat || seen[at].is_none(), "a ping came back twice");
                    seen[at] = Some(if header > 0 { buffer[8] } else { 0 });
                }
            }
        }
        seen.into_iter().flatten().collect()
    })
}

/// A TCP connection between two guests, on which both sides send `bytes` at the same time. Panics on a wrong byte or a
/// stall. Returns its duration.
pub fn exchange(client: &Net, server: &Net, address: &str, port: u16, bytes: u64) -> Duration {
    let started = Instant::now();
    let pair = Exchange::start(client, server, address, port, bytes);
    pair.finish();
    started.elapsed()
}

/// A running [`exchange`].
pub struct Exchange {
    ends: Vec<JoinHandle<()>>,
}

impl Exchange {
    pub fn start(client: &Net, server: &Net, address: &str, port: u16, bytes: u64) -> Exchange {
        let address: IpAddr = address.parse().unwrap();
        let to = SocketAddr::new(address, port);
        let listener = server.enter(move || TcpListener::bind(to).unwrap_or_else(|e| panic!("listening on {to}: {e}")));
        let seed = u64::from(port);
        let answer = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            both_ways(&stream, bytes, 2 * seed + 1, 2 * seed);
        });
        let ask = client.spawn(move || {
            let stream =
                TcpStream::connect_timeout(&to, PATIENCE).unwrap_or_else(|e| panic!("connecting to {to}: {e}"));
            both_ways(&stream, bytes, 2 * seed, 2 * seed + 1);
        });
        Exchange { ends: vec![ask, answer] }
    }

    /// Waits for the end.
    pub fn finish(self) {
        // The client first: if it could not connect, the server would wait forever.
        for end in self.ends {
            if let Err(panic) = end.join() {
                std::panic::resume_unwind(panic);
            }
        }
    }

    pub fn is_finished(&self) -> bool {
        self.ends.iter().all(JoinHandle::is_finished)
    }
}

/// A stream on which the test decides what to send and when.
pub struct Talk {
    pub client: TcpStream,
    pub server: TcpStream,
    sent: u64,
}

impl Talk {
    pub fn start(client: &Net, server: &Net, address: &str, port: u16) -> Talk {
        let address: IpAddr = address.parse().unwrap();
        let to = SocketAddr::new(address, port);
        let listener = server.enter(move || TcpListener::bind(to).unwrap());
        let client = client.enter(move || TcpStream::connect_timeout(&to, PATIENCE).unwrap());
        let (server, _) = listener.accept().unwrap();
        for stream in [&client, &server] {
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            stream.set_nodelay(true).unwrap();
        }
        Talk { client, server, sent: 0 }
    }

    /// Sends a message and receives one. Returns the duration.
    pub fn say(&mut self, bytes: usize) -> Duration {
        let started = Instant::now();
        self.sent += 1;
        let message = pattern(self.sent, bytes);
        for (mut from, mut to) in [(&self.client, &self.server), (&self.server, &self.client)] {
            let mut heard = vec![0; bytes];
            from.write_all(&message).unwrap();
            to.read_exact(&mut heard).unwrap_or_else(|e| panic!("message {}: {e}", self.sent));
            assert!(heard == message, "message {} arrived changed", self.sent);
        }
        started.elapsed()
    }
}

/// A stream to an echo service, until the test ends it. Every returned byte is checked.
pub struct Echo {
    ends: [JoinHandle<()>; 2],
    shared: Arc<EchoState>,
}

#[derive(Default)]
struct EchoState {
    stop: AtomicBool,
    /// Returned bytes.
    bytes: AtomicU64,
    /// Longest time between two reads, µs.
    silence: AtomicU64,
}

impl Echo {
    pub fn start(client: &Net, address: &str, port: u16) -> Echo {
        let to = SocketAddr::new(address.parse().unwrap(), port);
        let stream = client.enter(move || {
            let mut stream = None;
            super::eventually(10.0, "the echo service listens", || {
                stream = TcpStream::connect_timeout(&to, PATIENCE).ok();
                stream.is_some()
            });
            stream.unwrap()
        });
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        let (shared, mut writer) = (Arc::new(EchoState::default()), stream.try_clone().unwrap());
        let (theirs, ours) = (Arc::clone(&shared), Arc::clone(&shared));
        let sending = std::thread::spawn(move || {
            let (mut generator, mut chunk) = (Rng::with_seed(1), vec![0; 16 << 10]);
            while !theirs.stop.load(Ordering::Relaxed) {
                generator.fill(&mut chunk);
                writer.write_all(&chunk).unwrap();
            }
            writer.shutdown(std::net::Shutdown::Write).unwrap();
        });
        let receiving = std::thread::spawn(move || {
            let (mut generator, mut reader) = (Rng::with_seed(1), &stream);
            let (mut chunk, mut expected) = (vec![0; 16 << 10], vec![0; 16 << 10]);
            let (mut at, mut last) = (expected.len(), Instant::now());
            loop {
                let got = reader.read(&mut chunk).unwrap_or_else(|e| panic!("the echo has stopped: {e}"));
                if got == 0 {
                    return;
                }
                ours.silence.fetch_max(last.elapsed().as_micros() as u64, Ordering::Relaxed);
                last = Instant::now();
                for byte in &chunk[..got] {
                    if at == expected.len() {
                        generator.fill(&mut expected);
                        at = 0;
                    }
                    assert_eq!(*byte, expected[at], "a wrong byte came back");
                    at += 1;
                }
                ours.bytes.fetch_add(got as u64, Ordering::Relaxed);
            }
        });
        Echo { ends: [receiving, sending], shared }
    }

    /// Waits until `bytes` more have been returned.
    pub fn wait_for_progress(&self, bytes: u64, patience: Duration) {
        let goal = self.shared.bytes.load(Ordering::Relaxed) + bytes;
        super::eventually(patience.as_secs_f64(), "the stream makes progress", || {
            self.shared.bytes.load(Ordering::Relaxed) >= goal
        });
    }

    /// The longest time without a byte since the last call.
    pub fn take_longest_silence(&self) -> Duration {
        Duration::from_micros(self.shared.silence.swap(0, Ordering::Relaxed))
    }

    /// Waits until all sent bytes have been returned; returns their number.
    pub fn finish(self) -> u64 {
        self.shared.stop.store(true, Ordering::Relaxed);
        for end in self.ends {
            if let Err(panic) = end.join() {
                std::panic::resume_unwind(panic);
            }
        }
        self.shared.bytes.load(Ordering::Relaxed)
    }
}

/// One-byte requests with their responses, one at a time, until the test ends them.
pub struct Requests {
    asking: JoinHandle<()>,
    shared: Arc<EchoState>,
}

impl Requests {
    /// To an echo service.
    pub fn start(client: &Net, address: &str, port: u16) -> Requests {
        let to = SocketAddr::new(address.parse().unwrap(), port);
        let shared = Arc::new(EchoState::default());
        let theirs = Arc::clone(&shared);
        let asking = client.spawn(move || {
            let stream = TcpStream::connect_timeout(&to, PATIENCE).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            stream.set_nodelay(true).unwrap();
            let mut number = 0u8;
            while !theirs.stop.load(Ordering::Relaxed) {
                let (asked, mut answer) = (Instant::now(), [0]);
                number = number.wrapping_add(1);
                (&stream).write_all(&[number]).unwrap();
                (&stream).read_exact(&mut answer).unwrap_or_else(|e| panic!("no answer: {e}"));
                assert_eq!(answer, [number], "a wrong answer");
                theirs.silence.fetch_max(asked.elapsed().as_micros() as u64, Ordering::Relaxed);
                theirs.bytes.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        Requests { asking, shared }
    }

    /// The longest response time since the last call.
    pub fn take_longest(&self) -> Duration {
        Duration::from_micros(self.shared.silence.swap(0, Ordering::Relaxed))
    }

    /// Waits until `count` more requests have been answered.
    pub fn wait_for(&self, count: u64) {
        let goal = self.shared.bytes.load(Ordering::Relaxed) + count;
        super::eventually(PATIENCE.as_secs_f64(), "requests are answered", || {
            self.shared.bytes.load(Ordering::Relaxed) >= goal
        });
    }

    pub fn finish(self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Err(panic) = self.asking.join() {
            std::panic::resume_unwind(panic);
        }
    }
}

fn both_ways(stream: &TcpStream, bytes: u64, send: u64, expect: u64) {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    let mut writer = stream.try_clone().unwrap();
    let sending = std::thread::spawn(move || {
        let mut generator = Rng::with_seed(send);
        let mut left = bytes;
        let mut chunk = vec![0; 64 << 10];
        while left > 0 {
            let now = chunk.len().min(left as usize);
            generator.fill(&mut chunk);
            writer.write_all(&chunk[..now]).unwrap_or_else(|e| panic!("sending with {left} bytes to go: {e}"));
            left -= now as u64;
        }
    });
    let mut generator = Rng::with_seed(expect);
    let (mut got, mut chunk, mut reader) = (0u64, vec![0; 64 << 10], stream);
    let mut expected = vec![0; 64 << 10];
    while got < bytes {
        let now = chunk.len().min((bytes - got) as usize);
        reader.read_exact(&mut chunk[..now]).unwrap_or_else(|e| panic!("receiving after {got} bytes: {e}"));
        generator.fill(&mut expected);
        assert!(chunk[..now] == expected[..now], "wrong bytes after {got}");
        got += now as u64;
    }
    if let Err(panic) = sending.join() {
        std::panic::resume_unwind(panic);
    }
    // Neither side closes before the other has received everything, so that no reset discards data.
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(reader.read(&mut chunk).unwrap(), 0, "more bytes than were sent");
}

fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    let mut message = vec![0; bytes];
    Rng::with_seed(seed).fill(&mut message);
    message
}
