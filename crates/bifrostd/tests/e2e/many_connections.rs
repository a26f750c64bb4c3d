//! Thousands of concurrent connections between two guests on busy CPUs.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Resource;
use socket2::{Domain, Protocol, Socket, Type};

use crate::common::{Lab, Options};

const CONNECTIONS: usize = 5000;

/// Keeps all CPUs busy until dropped.
struct Hogs {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Hogs {
    fn start() -> Hogs {
        let stop = Arc::new(AtomicBool::new(false));
        let count = std::thread::available_parallelism().unwrap().get();
        let hog = |stop: Arc<AtomicBool>| move || while !stop.load(Ordering::Relaxed) {};
        let threads = (0..count).map(|_| std::thread::spawn(hog(stop.clone()))).collect();
        Hogs { stop, threads }
    }
}

impl Drop for Hogs {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn more_files() {
    let mut limit = rustix::process::getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    rustix::process::setrlimit(Resource::Nofile, limit).unwrap();
}

fn stream() -> Socket {
    Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP)).unwrap()
}

const SERVER: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 0, 0, 2), 5001);

/// Accepts all connections.
fn accept_all(lab: &Lab) -> JoinHandle<Vec<Socket>> {
    let listener = lab.net("b").enter(move || {
        std::fs::write("/proc/sys/net/core/somaxconn", "16384").unwrap();
        std::fs::write("/proc/sys/net/ipv4/tcp_max_syn_backlog", "16384").unwrap();
        let socket = stream();
        socket.bind(&SocketAddr::from(SERVER).into()).unwrap();
        socket.listen(16_384).unwrap();
        socket
    });
    std::thread::spawn(move || (0..CONNECTIONS).map(|_| listener.accept().unwrap().0).collect())
}

/// Starts all connections at once; returns each with its start time.
fn start_all(lab: &Lab) -> Vec<(Socket, Instant)> {
    lab.net("a").enter(|| {
        let start = |_| {
            let (socket, at) = (stream(), Instant::now());
            socket.set_nonblocking(true).unwrap();
            let refused = socket.connect(&SocketAddr::from(SERVER).into()).unwrap_err();
            assert_eq!(refused.raw_os_error(), Some(libc::EINPROGRESS));
            (socket, at)
        };
        (0..CONNECTIONS).map(start).collect()
    })
}

/// Waits for all connections. Returns their durations.
fn finish_all(started: &[(Socket, Instant)]) -> Vec<Duration> {
    let mut took = vec![None; started.len()];
    let until = Instant::now() + Duration::from_secs(60);
    while took.iter().any(Option::is_none) {
        let open: Vec<usize> = (0..started.len()).filter(|i| took[*i].is_none()).collect();
        assert!(Instant::now() < until, "{} connections are missing", open.len());
        let mut fds: Vec<PollFd<'_>> = open.iter().map(|i| PollFd::new(&started[*i].0, PollFlags::OUT)).collect();
        let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 100_000_000 }));
        for (i, fd) in open.iter().zip(&fds) {
            if fd.revents().contains(PollFlags::OUT) {
                assert!(started[*i].0.take_error().unwrap().is_none());
                took[*i] = Some(started[*i].1.elapsed());
            }
        }
    }
    took.into_iter().flatten().collect()
}

/// Packets that were lost inside the host of guest `a`.
fn lost(lab: &Lab) -> [(&'static str, u64); 3] {
    let overrun = || std::fs::read_to_string("/sys/class/net/eth0/statistics/tx_dropped").unwrap();
    let host = &lab.hosts[0];
    [
        ("before the data path", lab.net("a").enter(overrun).trim().parse().unwrap()),
        ("at a closed window", host.sample("port.window_full_packets")),
        ("towards the guest", host.counter("drop.no_buffer_packets")),
    ]
}

#[test]
fn thousands_of_connections_start_at_once_on_busy_cpus_without_loss() {
    more_files();
    let lab = Lab::running(Options::default());
    let hogs = Hogs::start();
    let accepting = accept_all(&lab);
    let started = start_all(&lab);
    // Every SYN has been sent, and none retransmitted yet, which happens after a second.
    let (lost, sent_for) = (lost(&lab), started[0].1.elapsed());
    let mut took = finish_all(&started);
    drop(hogs);
    drop(accepting.join().unwrap());
    took.sort_unstable();
    let (half, longest) = (took[took.len() / 2], took[took.len() - 1]);
    let again = lab.net("a").tcp_counter("TCPSynRetrans");
    println!(
        "{CONNECTIONS} SYNs in {sent_for:?}; median {half:?}, maximum {longest:?}; {again} SYNs retransmitted; lost: {lost:?}"
    );
    assert!(lost.iter().all(|(_, packets)| *packets == 0) || sent_for > Duration::from_secs(1), "{lost:?}");
}
