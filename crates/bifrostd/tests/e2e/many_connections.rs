//! Thousands of connections at once between two guests, while the processors have other work.

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

/// Work for all processors, until it is dropped.
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

/// Begins all connections at once. Returns how long each took.
fn connect_all(lab: &Lab) -> Vec<Duration> {
    let to = SocketAddr::new(Ipv4Addr::new(10, 0, 0, 2).into(), 5001);
    let listener = lab.net("b").enter(move || {
        std::fs::write("/proc/sys/net/core/somaxconn", "16384").unwrap();
        std::fs::write("/proc/sys/net/ipv4/tcp_max_syn_backlog", "16384").unwrap();
        let socket = stream();
        socket.bind(&to.into()).unwrap();
        socket.listen(16_384).unwrap();
        socket
    });
    let accepting =
        std::thread::spawn(move || (0..CONNECTIONS).map(|_| listener.accept().unwrap().0).collect::<Vec<_>>());
    let took = lab.net("a").enter(move || {
        let started: Vec<(Socket, Instant)> = (0..CONNECTIONS)
            .map(|_| {
                let socket = stream();
                socket.set_nonblocking(true).unwrap();
                let at = Instant::now();
                let refused = socket.connect(&to.into()).unwrap_err();
                assert_eq!(refused.raw_os_error(), Some(libc::EINPROGRESS));
                (socket, at)
            })
            .collect();
        let mut took = vec![None; CONNECTIONS];
        let until = Instant::now() + Duration::from_secs(30);
        while took.iter().any(Option::is_none) {
            assert!(Instant::now() < until, "{} connections are missing", took.iter().filter(|t| t.is_none()).count());
            let open: Vec<usize> = (0..CONNECTIONS).filter(|i| took[*i].is_none()).collect();
            let mut fds: Vec<PollFd<'_>> = open.iter().map(|i| PollFd::new(&started[*i].0, PollFlags::OUT)).collect();
            let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 100_000_000 }));
            for (i, fd) in open.iter().zip(&fds) {
                if fd.revents().contains(PollFlags::OUT) {
                    assert!(started[*i].0.take_error().unwrap().is_none());
                    took[*i] = Some(started[*i].1.elapsed());
                }
            }
        }
        took.into_iter().flatten().collect::<Vec<_>>()
    });
    drop(accepting.join().unwrap());
    took
}

#[test]
fn thousands_of_connections_begin_at_once_beside_other_work_and_none_is_lost() {
    more_files();
    let lab = Lab::running(Options::default());
    let hogs = Hogs::start();
    let mut took = connect_all(&lab);
    drop(hogs);
    took.sort_unstable();
    // A SYN that is late by a second is sent again without having been lost.
    let again = lab.net("a").tcp_counter("TCPSynRetrans");
    let (half, longest) = (took[took.len() / 2], took[took.len() - 1]);
    println!("half of {CONNECTIONS} took {half:?}, the longest {longest:?}; {again} SYNs were sent again");
    for host in &lab.hosts {
        assert_eq!(host.sample("port.window_full_packets"), 0, "{}", host.name);
        // These are there once they have counted.
        for counter in ["tap.tx_overrun_packets", "drop.no_buffer_packets"] {
            assert_eq!(host.counter(counter), 0, "{}: {counter}", host.name);
        }
    }
    for (guest, file) in [("a", "tx_dropped"), ("b", "rx_dropped")] {
        let path = format!("/sys/class/net/eth0/statistics/{file}");
        let text = lab.net(guest).enter(move || std::fs::read_to_string(path).unwrap());
        assert_eq!(text.trim(), "0", "{guest}: {file}");
    }
}
