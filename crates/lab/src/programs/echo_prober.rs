//! Round-trip times by ICMP echoes that a remote kernel answers: the queueing delay that the next packet on an underlay
//! link finds, or the downtime of a machine.

use std::io::{ErrorKind, Read as _};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use socket2::{Domain, Protocol, Socket, Type};

use crate::netns::Namespace;
use crate::processor;

/// How long to wait for answers to the last probes.
const PATIENCE: Duration = Duration::from_millis(300);
/// Length of a probe, bytes: the ICMP header, and as much payload as `ping` sends.
const PROBE_LEN: usize = 8 + 56;
const ECHO_REQUEST: u8 = 8;
const ECHO_REPLY: u8 = 0;

/// A probe and its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Probe {
    /// When it was sent.
    pub sent: Instant,
    /// The time until its answer; `None`: there was none.
    pub took: Option<Duration>,
}

/// A running prober. Dropping it ends it.
#[derive(Debug)]
pub struct EchoProber {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<Vec<Probe>>>>,
}

impl EchoProber {
    /// Sends a probe from `local`, an address of `namespace`, to `remote` at each `interval`, at most 65,536 times. The
    /// thread has real-time priority, so that it measures the link and not the wait for the processor.
    ///
    /// # Errors
    /// A socket or thread cannot be created.
    pub fn start(namespace: &Namespace, local: Ipv4Addr, remote: Ipv4Addr, interval: Duration) -> Result<Self> {
        let stop: Arc<AtomicBool> = Arc::default();
        let socket = namespace.enter(move || open(local, remote))?;
        let own_stop = Arc::clone(&stop);
        let thread = namespace.spawn(move || {
            processor::run_before_all_others()?;
            probe(&socket, interval, &own_stop)
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }

    /// Ends it and returns all probes, oldest first.
    ///
    /// # Errors
    /// The socket failed, or the thread did not get its priority.
    pub fn finish(mut self) -> Result<Vec<Probe>> {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().context("a prober ends once")?;
        thread.join().map_err(|_| anyhow!("a thread that probes a link panicked"))?
    }
}

impl Drop for EchoProber {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn open(local: Ipv4Addr, remote: Ipv4Addr) -> Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::ICMPV4)).context("opening a socket for ICMP")?;
    let address = |ip| SocketAddr::V4(SocketAddrV4::new(ip, 0)).into();
    socket.bind(&address(local)).with_context(|| format!("binding to {local}"))?;
    socket.connect(&address(remote)).with_context(|| format!("probing {remote}"))?;
    Ok(socket)
}

fn probe(socket: &Socket, interval: Duration, stop: &AtomicBool) -> Result<Vec<Probe>> {
    let identifier = fastrand::u16(..);
    let mut probes: Vec<Probe> = Vec::new();
    let mut due = Instant::now();
    let mut end = None;
    loop {
        let now = Instant::now();
        if end.is_none() && stop.load(Ordering::Relaxed) {
            end = Some(now + PATIENCE);
        }
        match end {
            Some(end) if now >= end || probes.iter().all(|probe| probe.took.is_some()) => return Ok(probes),
            Some(_) => {}
            None if now >= due => {
                let number = u16::try_from(probes.len()).context("more probes than ICMP has numbers")?;
                match socket.send(&request(identifier, number)) {
                    // The kernel reports an unreachable host, because of an earlier probe. This one is not sent, and
                    // counts as unanswered.
                    Err(error) if error.kind() == ErrorKind::HostUnreachable => {}
                    sent => drop(sent.context("sending a probe")?),
                }
                probes.push(Probe { sent: now, took: None });
                due += interval;
            }
            None => {}
        }
        let wait = end.unwrap_or(due).saturating_duration_since(Instant::now()).max(Duration::from_micros(100));
        socket.set_read_timeout(Some(wait.min(interval))).context("limiting the wait for an answer")?;
        let mut buffer = [0; 256];
        match (&mut &*socket).read(&mut buffer) {
            Ok(length) => {
                let received = Instant::now();
                let number = reply(&buffer[..length], identifier);
                if let Some(probe) = number.and_then(|number| probes.get_mut(usize::from(number))) {
                    probe.took.get_or_insert(received.saturating_duration_since(probe.sent));
                }
            }
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted | ErrorKind::HostUnreachable
                ) => {}
            Err(error) => return Err(error).context("waiting for an answer"),
        }
    }
}

/// An echo request (RFC 792).
fn request(identifier: u16, number: u16) -> [u8; PROBE_LEN] {
    let mut bytes = [0; PROBE_LEN];
    bytes[0] = ECHO_REQUEST;
    bytes[4..6].copy_from_slice(&identifier.to_be_bytes());
    bytes[6..8].copy_from_slice(&number.to_be_bytes());
    let sum: u32 = bytes.chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    let checksum = !((folded & 0xffff) + (folded >> 16)) as u16;
    bytes[2..4].copy_from_slice(&checksum.to_be_bytes());
    bytes
}

/// The number of the request that an IPv4 packet answers, if the packet is a reply with this `identifier`.
fn reply(packet: &[u8], identifier: u16) -> Option<u16> {
    let header = usize::from(packet.first()? & 0xf) * 4;
    let icmp = packet.get(header..header + 8)?;
    let word = |at: usize| u16::from_be_bytes([icmp[at], icmp[at + 1]]);
    (icmp[0] == ECHO_REPLY && icmp[1] == 0 && word(4) == identifier).then(|| word(6))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_told_from_all_else() {
        let mut packet = vec![0x46; 24];
        packet.extend_from_slice(&request(7, 300));
        assert_eq!(reply(&packet, 7), None, "a request");
        packet[24] = ECHO_REPLY;
        assert_eq!(reply(&packet, 7), Some(300));
        assert_eq!(reply(&packet, 8), None, "another's");
        for length in 0..packet.len().min(32) {
            assert_eq!(reply(&packet[..length], 7), None, "{length} bytes");
        }
    }

    #[test]
    fn a_request_s_checksum_makes_its_sum_all_ones() {
        for (identifier, number) in [(0, 0), (0xffff, 0xffff), (1, 0xf7fe), (0x1234, 9)] {
            let bytes = request(identifier, number);
            let sum: u32 = bytes.chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
            assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff, "{identifier} {number}");
        }
    }
}
