//! A closed window only blocks packets for its destination, not others of the same guest.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::common::netns::Net;
use crate::common::{Guest, Lab, Options, eventually};

/// A stream in one direction that runs until dropped.
struct Stream {
    received: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

/// The client's end of a connection and the server's.
type Ends = (TcpStream, TcpStream);

impl Stream {
    fn start(from: &Net, to: &Net, address: &str, port: u16) -> Stream {
        Stream::run(Stream::connect(from, to, address, port))
    }

    fn connect(from: &Net, to: &Net, address: &str, port: u16) -> Ends {
        let to_address = SocketAddr::new(address.parse().unwrap(), port);
        let listener = to.enter(move || TcpListener::bind(to_address).unwrap());
        let client = from.enter(move || TcpStream::connect_timeout(&to_address, Duration::from_secs(10)).unwrap());
        let (server, _) = listener.accept().unwrap();
        (client, server)
    }

    fn run((mut client, mut server): Ends) -> Stream {
        let (received, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        for end in [&client, &server] {
            end.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
            end.set_write_timeout(Some(Duration::from_millis(50))).unwrap();
        }
        let (count, ended) = (received.clone(), stop.clone());
        let sink = std::thread::spawn(move || {
            let mut buffer = vec![0; 1 << 20];
            while !ended.load(Ordering::Relaxed) {
                if let Ok(n) = server.read(&mut buffer) {
                    count.fetch_add(n as u64, Ordering::Relaxed);
                }
            }
        });
        let ended = stop.clone();
        let source = std::thread::spawn(move || {
            let buffer = vec![7; 1 << 18];
            while !ended.load(Ordering::Relaxed) {
                let _ = client.write(&buffer);
            }
        });
        Stream { received, stop, threads: vec![sink, source] }
    }

    /// The rate over the next second, bit/s.
    fn rate(&self) -> f64 {
        let (before, started) = (self.received.load(Ordering::Relaxed), Instant::now());
        std::thread::sleep(Duration::from_secs(1));
        (self.received.load(Ordering::Relaxed) - before) as f64 * 8.0 / started.elapsed().as_secs_f64()
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Guest `a` is on the first host, `b` on the second, and `c`, limited to 2 Mbit/s, on the third.
#[test]
fn a_slow_destination_does_not_block_others() {
    let mut lab = Lab::of(3, Options::default());
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24"]));
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24"]));
    lab.add(2, Guest::new("c", 3, &["10.0.0.3/24"]));
    let mac = format!("mac = \"{}\"\n", lab.guest("c").mac);
    lab.hosts[2].config = lab.hosts[2].config.replacen(&mac, &format!("{mac}rx_mbit = 2\n"), 1);
    lab.start();
    let to_b = Stream::start(lab.net("a"), lab.net("b"), "10.0.0.2", 5001);
    let alone = to_b.rate().min(to_b.rate());

    // All connect before the first one sends: otherwise the others would wait behind its packets for seconds.
    let to_c: Vec<Ends> = (0..16).map(|n| Stream::connect(lab.net("a"), lab.net("c"), "10.0.0.3", 6001 + n)).collect();
    let to_c: Vec<Stream> = to_c.into_iter().map(Stream::run).collect();
    let waits = || lab.hosts[0].sample("port.blocked_packets");
    eventually(10.0, "packets for c wait", || waits() > 20);
    let mut rates = Vec::new();
    let mut waited = 0;
    for _ in 0..4 {
        rates.push(to_b.rate());
        waited = waited.max(waits());
    }
    let (slow, beside): (u64, f64) =
        (to_c.iter().map(|s| s.received.load(Ordering::Relaxed)).sum(), rates.iter().fold(0.0, |a, b| a.max(*b)));
    println!("alone {alone:.3e} bit/s, beside {rates:?} bit/s, up to {waited} packets wait, c got {slow} bytes");
    assert!(waited > 20, "{waited} packets waited for c");
    assert!(slow > 0, "the slow destination makes progress");
    assert!(beside > 0.7 * alone, "{beside:.3e} bit/s beside, {alone:.3e} alone");
    // A new connection is established immediately, too.
    let started = Instant::now();
    drop(Stream::start(lab.net("a"), lab.net("b"), "10.0.0.2", 5002));
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
    drop((to_b, to_c));
    eventually(20.0, "nothing waits any more", || waits() == 0);
    lab.hosts[0].assert_balanced();
}
