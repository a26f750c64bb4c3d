//! TCP streams from one guest through gateway pods to another one. The kernels of both ends implement TCP and VXLAN.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};

use crate::netns::Namespace;
use crate::programs::guest_tcp::Tcp;

/// Number of concurrent streams, which the switch spreads.
const STREAMS: usize = 8;
/// The data that each stream sends after each [`PAUSE`].
const CHUNK: [u8; 1000] = [0; 1000];
const PAUSE: Duration = Duration::from_millis(10);
/// A stream that makes no progress for this long is broken.
const PATIENCE: Duration = Duration::from_secs(10);
const PORT: u16 = 5000;

/// Running streams.
#[derive(Debug)]
pub struct Streams<'a> {
    client: &'a Namespace,
    before: Tcp,
    stop: Arc<AtomicBool>,
    senders: Vec<JoinHandle<Result<Duration>>>,
}

/// The result of streams.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Streamed {
    /// Streams that were opened.
    pub opened: u32,
    /// Streams that ended early, or whose receiver lacked bytes.
    pub broken: u32,
    /// Retransmitted segments, which were lost or late.
    pub retransmits: u64,
    /// The longest time that a receiver waited for data.
    pub longest_stall: Duration,
}

impl<'a> Streams<'a> {
    /// Opens streams from one namespace to the address `server` of another one, and sends at a constant rate until they
    /// are stopped.
    ///
    /// # Errors
    /// A stream cannot be opened.
    pub fn start(client: &'a Namespace, other: &Namespace, server: Ipv4Addr) -> Result<Self> {
        let listener = other.enter(move || Ok(TcpListener::bind((server, PORT))?))?;
        let before = Tcp::in_namespace(client)?;
        let stop = Arc::new(AtomicBool::new(false));
        let mut senders = Vec::new();
        for _ in 0..STREAMS {
            let connect = move || Ok(TcpStream::connect_timeout(&SocketAddr::from((server, PORT)), PATIENCE)?);
            let stream = client.enter(connect).context("opening a stream through a pod")?;
            let (accepted, _) = listener.accept()?;
            for end in [&stream, &accepted] {
                end.set_nodelay(true)?;
                end.set_read_timeout(Some(PATIENCE))?;
                end.set_write_timeout(Some(PATIENCE))?;
            }
            std::thread::spawn(move || receive(accepted));
            let stopping = Arc::clone(&stop);
            senders.push(std::thread::spawn(move || send(stream, &stopping)));
        }
        Ok(Streams { client, before, stop, senders })
    }

    /// Stops the streams, and returns the result.
    ///
    /// # Errors
    /// The kernel's counters cannot be read.
    pub fn stop(self) -> Result<Streamed> {
        self.stop.store(true, Ordering::Relaxed);
        let opened = self.senders.len() as u32;
        let ended = self.senders.into_iter().map(|sender| sender.join().unwrap_or_else(|_| Err(anyhow!("a panic"))));
        let whole: Vec<Duration> = ended.filter_map(Result::ok).collect();
        Ok(Streamed {
            opened,
            broken: opened - whole.len() as u32,
            retransmits: Tcp::in_namespace(self.client)?.since(&self.before, "Tcp:RetransSegs"),
            longest_stall: whole.into_iter().max().unwrap_or_default(),
        })
    }
}

/// Sends until `stop` is set. Returns the longest time that the receiver waited for data.
fn send(mut stream: TcpStream, stop: &AtomicBool) -> Result<Duration> {
    let mut sent = 0;
    while !stop.load(Ordering::Relaxed) {
        stream.write_all(&CHUNK)?;
        sent += CHUNK.len() as u64;
        std::thread::sleep(PAUSE);
    }
    stream.shutdown(Shutdown::Write)?;
    let (mut received, mut stall) = ([0; 8], [0; 8]);
    stream.read_exact(&mut received)?;
    stream.read_exact(&mut stall)?;
    ensure!(u64::from_be_bytes(received) == sent, "bytes are missing");
    Ok(Duration::from_nanos(u64::from_be_bytes(stall)))
}

/// Reads until the other end has sent everything. Answers with the number of bytes, and the longest time without data.
fn receive(mut stream: TcpStream) {
    let (mut received, mut stall, mut last) = (0u64, Duration::ZERO, Instant::now());
    let mut buffer = [0; 4096];
    while let Ok(len @ 1..) = stream.read(&mut buffer) {
        stall = stall.max(last.elapsed());
        last = Instant::now();
        received += len as u64;
    }
    // Without this answer, the other end counts the stream as broken.
    let _ = stream.write_all(&[received.to_be_bytes(), (stall.as_nanos() as u64).to_be_bytes()].concat());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (client, listener.accept().unwrap().0)
    }

    #[test]
    fn a_stream_that_lacks_bytes_or_ends_early_is_broken() {
        let stop = AtomicBool::new(true);
        let (client, server) = pair();
        let receiver = std::thread::spawn(move || receive(server));
        assert!(send(client, &stop).is_ok());
        receiver.join().unwrap();
        // One byte more or less than was sent.
        let (client, mut server) = pair();
        server.write_all(&[1u64.to_be_bytes(), 0u64.to_be_bytes()].concat()).unwrap();
        assert!(send(client, &stop).is_err());
        let (client, server) = pair();
        drop(server);
        assert!(send(client, &stop).is_err());
    }
}
