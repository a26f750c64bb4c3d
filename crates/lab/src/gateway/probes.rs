//! Probes from one host through gateway pods to another one: numbered VXLAN packets of many flows, at a constant rate.

use std::net::{Ipv4Addr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};

use super::frames::{self, Inner};
use crate::netns::Namespace;

/// Number of flows of probes, which the switch spreads. Probe n belongs to flow n modulo this.
pub const FLOWS: usize = 64;
/// Size of the receiver's socket buffer, bytes.
const BUFFER: usize = 32 << 20;

/// Probes that are being sent.
#[derive(Debug)]
pub struct Probes {
    stop: Arc<AtomicBool>,
    sent: Arc<AtomicU32>,
    first: Arc<AtomicBool>,
    sender: JoinHandle<()>,
    receiver: JoinHandle<(Vec<bool>, Duration)>,
}

/// The result of probes.
#[derive(Debug, Clone, Copy)]
pub struct Probed {
    /// Probes sent.
    pub sent: u32,
    /// Probes received.
    pub received: u32,
    /// The longest time between two received probes.
    pub longest_gap: Duration,
}

impl Probed {
    /// Number of lost probes.
    pub fn lost(&self) -> u32 {
        self.sent.saturating_sub(self.received)
    }
}

impl Probes {
    /// Sends `per_second` probes from the first host to the second one through `vip`, until they are stopped.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn start(hosts: &[Namespace; 2], vip: Ipv4Addr, per_second: u32) -> Result<Self> {
        let open = |host: &Namespace, address: &'static str| {
            host.enter(move || UdpSocket::bind(address).with_context(|| format!("opening {address}")))
        };
        let sockets = (0..FLOWS).map(|_| open(&hosts[0], "10.2.0.11:0")).collect::<Result<Vec<_>>>()?;
        let receiver = open(&hosts[1], "10.3.0.12:4789")?;
        rustix::net::sockopt::set_socket_recv_buffer_size_force(&receiver, BUFFER)?;
        receiver.set_read_timeout(Some(Duration::from_secs(1)))?;
        let (stop, sent) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
        let (stopping, count) = (Arc::clone(&stop), Arc::clone(&sent));
        let send = move || {
            let began = Instant::now();
            for number in 0u32.. {
                if stopping.load(Ordering::Relaxed) {
                    return;
                }
                let (source, destination) = ([192, 168, 0, 1].into(), [192, 168, 0, 2].into());
                let inner = Inner { vni: 100, source, destination, ports: (number as u16, 9) };
                let Ok(headers) = frames::headers(&inner, 4) else { return };
                // The kernel adds the outer headers.
                const OUTER: usize = 42;
                let packet = [&headers[OUTER..], &number.to_be_bytes()[..]].concat();
                // While no pod announces the address, there is no route, and sending fails.
                let _ = sockets[number as usize % FLOWS].send_to(&packet, (vip, 4789));
                count.store(number + 1, Ordering::Relaxed);
                let due = began + Duration::from_secs(1) * (number + 1) / per_second;
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
            }
        };
        let first = Arc::new(AtomicBool::new(false));
        let (seen, ended) = (Arc::clone(&first), Arc::clone(&stop));
        let receive = move || {
            let (mut received, mut buffer) = (Vec::new(), [0; 2048]);
            let (mut last, mut longest) = (None, Duration::ZERO);
            loop {
                match receiver.recv(&mut buffer) {
                    Ok(len) => {
                        let now = Instant::now();
                        longest = longest.max(last.map_or(Duration::ZERO, |last| now - last));
                        last = Some(now);
                        note(&mut received, &buffer[..len]);
                        seen.store(true, Ordering::Relaxed);
                    }
                    // Nothing has arrived for a while.
                    Err(_) if ended.load(Ordering::Relaxed) => return (received, longest),
                    Err(_) => {}
                }
            }
        };
        Ok(Probes { stop, sent, first, sender: std::thread::spawn(send), receiver: std::thread::spawn(receive) })
    }

    /// Whether any probe has arrived.
    pub fn has_come(&self) -> bool {
        self.first.load(Ordering::Relaxed)
    }

    /// Stops sending, and waits for probes in flight.
    ///
    /// # Errors
    /// A thread panicked.
    pub fn stop(self) -> Result<Probed> {
        Ok(self.stop_and_list()?.0)
    }

    /// Like [`stop`](Self::stop), and also returns the numbers of the lost probes.
    ///
    /// # Errors
    /// A thread panicked.
    pub fn stop_and_list(self) -> Result<(Probed, Vec<u32>)> {
        self.stop.store(true, Ordering::Relaxed);
        self.sender.join().map_err(|_| anyhow!("the sender panicked"))?;
        let (seen, longest_gap) = self.receiver.join().map_err(|_| anyhow!("the receiver panicked"))?;
        let sent = self.sent.load(Ordering::Relaxed);
        let received = seen.iter().filter(|seen| **seen).count() as u32;
        let came = |number: &u32| seen.get(*number as usize).copied().unwrap_or(false);
        Ok((Probed { sent, received, longest_gap }, (0..sent).filter(|number| !came(number)).collect()))
    }
}

/// Records the number of a received probe, which follows all headers.
fn note(seen: &mut Vec<bool>, probe: &[u8]) {
    let Some(number) = probe.last_chunk().map(|bytes| u32::from_be_bytes(*bytes) as usize) else { return };
    if seen.len() <= number {
        seen.resize(number + 1, false);
    }
    seen[number] = true;
}
