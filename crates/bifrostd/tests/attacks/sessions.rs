//! Endless sessions from one sender must leave room for the sessions of others.

use std::io::Read as _;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bifrost_lab::programs::packet_socket::{OFFLOAD_LEN, PacketSocket};

use crate::common::front_end::{FrontEnd, Kind};
use crate::common::packets::{End, Listener, TCP, UDP, ipv4, tcp, udp};
use crate::common::tenants::{Attachment, Pace, Tenants, Threads, repeat, repeat_here};
use crate::common::{Lab, eventually};

/// Maximum number of sessions of a port.
const SESSIONS: u64 = 512;
const X: u8 = 1;
const Y: u8 = 2;

/// Everyone may query the DNS server of `x` and connect to its port 80.
fn rules(lab: &mut Lab) {
    let line = "name = \"x\"\n";
    let config = &mut lab.hosts[0].config;
    *config = config.replacen(line, &format!("{line}security_groups = [\"server\"]\n"), 1);
    config.push_str(&format!(
        "[sessions]\nper_port = {SESSIONS}\n[[security_group]]\nname = \"server\"\n\
         ingress = [{{ protocol = \"udp\", ports = [53] }}, {{ protocol = \"tcp\", ports = [80] }}]\n"
    ));
}

/// `y` sends queries to the server of `x`, each from another port.
fn questions(tenants: &Tenants, stop: &Arc<AtomicBool>) -> Threads {
    let stop = Arc::clone(stop);
    let (x, y) = (End::attacker(X), End::attacker(Y));
    let thread = tenants.lab.net("y").spawn(move || {
        let (socket, mut pace, mut port) = (PacketSocket::open("eth0").unwrap(), Pace::new(3000.0), 1u16);
        repeat_here(&stop, || {
            pace.wait();
            port = port.wrapping_add(1).max(1);
            let question = ipv4(y, x, UDP, 1, 0, &udp(y, x, false, (port, 53), b"what is the address?"));
            u64::from(socket.send(&[0; OFFLOAD_LEN], &question).is_ok())
        })
    });
    vec![thread]
}

/// Whether `x` can open a new connection while its sessions are exhausted.
fn connects(tenants: &Tenants) -> bool {
    let listener = tenants.lab.net("y").enter(|| TcpListener::bind(("10.9.0.2", 443)).unwrap());
    let to = SocketAddr::from(([10, 9, 0, 2], 443));
    let connected =
        tenants.lab.net("x").enter(move || TcpStream::connect_timeout(&to, Duration::from_millis(900)).is_ok());
    drop(listener);
    connected
}

#[test]
fn a_server_under_endless_queries_still_connects_elsewhere() {
    let tenants = Tenants::with(Attachment::Tap, rules);
    let server = tenants.lab.net("x").enter(|| UdpSocket::bind(("10.9.0.1", 53)).unwrap());
    server.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    let over = Arc::new(AtomicBool::new(false));
    let answering = repeat(&over, move || {
        let mut buffer = [0; 64];
        match server.recv_from(&mut buffer) {
            Ok((length, from)) => u64::from(server.send_to(&buffer[..length], from).is_ok()),
            Err(_) => 0,
        }
    });
    let asked = tenants.judge("TAP: questions from ever new ports", questions);
    assert!(asked > 3 * SESSIONS, "{asked} questions");
    let stop = Arc::new(AtomicBool::new(false));
    let threads = questions(&tenants, &stop);
    std::thread::sleep(Duration::from_millis(300));
    let connected = (0..3).filter(|_| connects(&tenants)).count();
    stop.store(true, Ordering::Relaxed);
    over.store(true, Ordering::Relaxed);
    threads.into_iter().for_each(|thread| assert!(thread.join().unwrap() > 0));
    let answers = answering.join().unwrap();
    assert!(answers > asked / 2, "{answers} answers");
    assert!(tenants.lab.hosts[0].counter("avs.current_sessions") >= SESSIONS / 2);
    assert_eq!(connected, 3, "its own new connections");
}

#[test]
fn a_machine_under_endless_queries_still_opens_connections() {
    let tenants = Tenants::with(Attachment::Machine, rules);
    let (x, y) = (End::attacker(X), End::attacker(Y));
    // The driver answers each query once, and sometimes opens a connection of its own.
    let begun = Arc::new(std::sync::atomic::AtomicU64::new(0));
    let serve = |tenants: &Tenants, stop: &Arc<AtomicBool>| {
        let (mut guest, begun) =
            (FrontEnd::running(&tenants.socket(), Kind { packed: false, size: 256 }).unwrap(), Arc::clone(&begun));
        let mut turn = 0u16;
        repeat(stop, move || {
            std::thread::sleep(Duration::from_micros(500));
            turn = turn.wrapping_add(1);
            if turn.is_multiple_of(64) {
                let syn = tcp(x, y, false, (10_000 + turn / 64, 443), 2);
                begun.fetch_add(u64::from(guest.send(&ipv4(x, y, TCP, 1, 0, &syn))), Ordering::Relaxed);
            }
            let mut answers = 0;
            for frame in guest.receive() {
                if frame.len() > 42 && frame[23] == UDP {
                    let port = u16::from_be_bytes([frame[34], frame[35]]);
                    answers += u64::from(guest.send(&ipv4(x, y, UDP, 1, 0, &udp(x, y, false, (53, port), &[1; 20]))));
                }
            }
            answers
        })
    };
    let listener = Listener::start(tenants.lab.net("y"), x);
    let done = tenants.judge("machine: questions from ever new ports", |tenants, stop| {
        let mut threads = questions(tenants, stop);
        threads.push(serve(tenants, stop));
        threads
    });
    assert!(done > 3 * SESSIONS, "{done} questions and answers");
    let is_own = |frame: &&Vec<u8>| frame.len() > 40 && frame[23] == TCP && frame[36..38] == 443u16.to_be_bytes();
    eventually(1.0, "what was sent has arrived", || true);
    let seen = listener.take().iter().filter(is_own).count() as u64;
    let begun = begun.load(Ordering::Relaxed);
    // The last ones may still be in flight.
    assert!(begun > 20 && seen + 5 > begun, "{seen} of its {begun} own connections came about");
}

/// Clients that close their sending direction and then stay silent, while the server keeps its direction open.
#[test]
fn connections_left_half_closed_make_room() {
    let tenants = Tenants::with(Attachment::Tap, rules);
    let listener = tenants.lab.net("x").enter(|| TcpListener::bind(("10.9.0.1", 80)).unwrap());
    listener.set_nonblocking(true).unwrap();
    let over = Arc::new(AtomicBool::new(false));
    let accepting = repeat(&over, {
        let mut kept = Vec::new();
        move || match listener.accept() {
            Ok((stream, _)) => {
                // The client has closed its direction and stays silent.
                kept.push(stream);
                1
            }
            Err(_) => {
                std::thread::sleep(Duration::from_millis(2));
                0
            }
        }
    });
    tenants.judge("half-closed connections", |tenants, stop| {
        let stop = Arc::clone(stop);
        let thread = tenants.lab.net("y").spawn(move || {
            let (mut kept, mut pace) = (Vec::new(), Pace::new(300.0));
            let connected = repeat_here(&stop, || {
                pace.wait();
                let to = SocketAddr::from(([10, 9, 0, 1], 80));
                let stream = TcpStream::connect_timeout(&to, Duration::from_millis(500));
                if let Ok(stream) = &stream {
                    let _ = stream.shutdown(Shutdown::Write);
                }
                let connected = stream.is_ok();
                kept.extend(stream);
                u64::from(connected)
            });
            // A client that vanishes sends no FIN: the sockets are closed only after the namespace is gone.
            std::mem::forget(kept);
            connected
        });
        vec![thread]
    });
    let connected = (0..3).filter(|_| connects(&tenants)).count();
    over.store(true, Ordering::Relaxed);
    let accepted = accepting.join().unwrap();
    assert!(accepted > SESSIONS * 3 / 4, "{accepted} connections");
    assert_eq!(connected, 3, "the server's own new connections");
    // Other clients can still connect.
    let to = SocketAddr::from(([10, 9, 0, 1], 80));
    let again = tenants.lab.net("x").enter(|| TcpListener::bind(("10.9.0.1", 80)));
    if let Ok(again) = again {
        let stream = tenants.lab.net("y").enter(move || TcpStream::connect_timeout(&to, Duration::from_secs(1)));
        let (mut inside, _) = again.accept().unwrap();
        drop(stream.unwrap());
        assert_eq!(inside.read(&mut [0; 1]).unwrap(), 0);
    }
}
