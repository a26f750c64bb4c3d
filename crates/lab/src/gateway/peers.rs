//! Simulated BGP peers of a switch: many speakers (`bifrost_bgp`), each with its own address, in one thread.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use bifrost_bgp::{Speaker, SpeakerConfig};
use ipnet::IpNet;
use socket2::{Domain, Socket, Type};

use crate::netns::Namespace;

const PORT: u16 = 179;
/// How long a connection may take: both ends are on one machine.
const CONNECT: Duration = Duration::from_millis(200);
/// Between two looks at all sockets.
const PAUSE: Duration = Duration::from_millis(2);
/// So that a busy machine ends no session.
const HOLD_S: u16 = 30;

/// Peers that run. Dropping it ends them.
#[derive(Debug)]
pub struct Peers {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<()>>>,
}

/// One of them.
struct Peer {
    address: Ipv4Addr,
    speaker: Speaker,
    stream: Option<TcpStream>,
}

impl Peers {
    /// Starts a peer of `switch` for each of `peers`, with its address in `namespace` and what it announces. All are in
    /// the AS of the switch.
    ///
    /// # Errors
    /// The system's.
    pub fn start(
        namespace: &Namespace,
        switch: Ipv4Addr,
        asn: u32,
        peers: Vec<(Ipv4Addr, Vec<IpNet>)>,
    ) -> Result<Self> {
        let peer = |(address, routes)| {
            let config = SpeakerConfig { asn, router_id: address, next_hop: address, next_hop6: None, hold_s: HOLD_S };
            let mut speaker = Speaker::new(config);
            speaker.announce(routes);
            Peer { address, speaker, stream: None }
        };
        let mut peers: Vec<Peer> = peers.into_iter().map(peer).collect();
        let stop = Arc::new(AtomicBool::new(false));
        let stopping = Arc::clone(&stop);
        let run = move || {
            let began = Instant::now();
            while !stopping.load(Ordering::Relaxed) {
                for peer in &mut peers {
                    // 0 is when nothing was tried yet.
                    peer.turn(began.elapsed().as_nanos() as u64 + 1, switch);
                }
                std::thread::sleep(PAUSE);
            }
            Ok(())
        };
        Ok(Peers { stop, thread: Some(namespace.spawn(run)?) })
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Peer {
    fn turn(&mut self, now: u64, switch: Ipv4Addr) {
        let Peer { address, speaker, stream } = self;
        if stream.is_none() && speaker.wants_connection(now) {
            speaker.connecting(now);
            *stream = connect(*address, switch).ok();
            if stream.is_some() {
                speaker.connected(now);
            }
        }
        let Some(open) = stream else { return };
        let ended = carry(speaker, open, now);
        if ended || (speaker.is_closing() && speaker.output().is_empty()) {
            *stream = None;
            speaker.closed(now, "the connection has ended");
        }
    }
}

fn connect(from: Ipv4Addr, to: Ipv4Addr) -> Result<TcpStream> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.bind(&SocketAddr::from((from, 0)).into()).with_context(|| format!("binding {from}"))?;
    socket.connect_timeout(&SocketAddr::from((to, PORT)).into(), CONNECT)?;
    socket.set_nonblocking(true)?;
    socket.set_tcp_nodelay(true)?;
    Ok(socket.into())
}

/// Carries bytes in both directions; true: the connection has ended.
fn carry(speaker: &mut Speaker, stream: &mut TcpStream, now: u64) -> bool {
    let waits = |error: &std::io::Error| error.kind() == ErrorKind::WouldBlock;
    let mut buffer = [0; 8192];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return true,
            Ok(len) => speaker.received(now, &buffer[..len]),
            Err(error) if waits(&error) => break,
            Err(_) => return true,
        }
    }
    speaker.poll(now);
    speaker.events().for_each(drop);
    while !speaker.output().is_empty() {
        match stream.write(speaker.output()) {
            Ok(len) => drop(speaker.output().drain(..len)),
            Err(error) if waits(&error) => break,
            Err(_) => return true,
        }
    }
    false
}
