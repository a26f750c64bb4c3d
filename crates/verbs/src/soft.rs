//! RoCEv2 over a UDP socket, for hosts without an RDMA NIC.
//!
//! The ICRC covers IP headers, which a socket does not show. Over IPv6 all covered fields are known, and the kernel may
//! segment (GSO) and merge (GRO) datagrams: the sender knows the UDP length of every segment. Over IPv4 the ICRC covers
//! the identification, too, so datagrams are sent one by one with "don't fragment", for which Linux leaves it 0. Prefer
//! IPv6.
//!
//! Arrival times are the kernel's, so a round trip does not include the time during which this process was not running.

use std::collections::HashMap;
use std::io;
use std::iter;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use bifrost_rnic::{Burst, Config, Counters, Nic, Outgoing, Route};
use bifrost_udp::{Notes, ReceiveBuffers, SendHeaders, datagrams, set_int};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use crate::provider::Software;

/// Settings of a software NIC.
#[derive(Clone, Copy, Debug)]
pub struct SoftConfig {
    /// The address to bind.
    pub address: IpAddr,
    /// The UDP port: [`bifrost_wire::roce::UDP_PORT`], or another if several processes share the address. 0: any free
    /// port.
    pub port: u16,
    /// Maximum number of queue pairs.
    pub queue_pairs: u32,
    /// Maximum number of memory regions.
    pub regions: u32,
    /// Seed for keys and numbers; it must be unpredictable.
    pub seed: u64,
}

/// Counters of the socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SoftCounters {
    /// System calls that sent packets.
    pub send_calls: u64,
    /// System calls that received packets.
    pub receive_calls: u64,
    /// Runs of packets dropped because the socket's buffer was full.
    pub no_room_runs: u64,
    /// Runs of packets that could not be sent for another reason: no route, for instance.
    pub unsent_runs: u64,
}

/// A software NIC with its sockets.
#[derive(Debug)]
pub struct Soft {
    nic: Nic,
    socket: UdpSocket,
    /// Sockets with other source ports, for other paths; nothing is received on them.
    paths: HashMap<u16, UdpSocket>,
    burst: Burst,
    buffers: ReceiveBuffers,
    runs: Vec<Run>,
    headers: SendHeaders,
    epoch: Instant,
    counters: SoftCounters,
    segments: bool,
}

/// Datagrams of one route and length (only the last may be shorter) that are sent in one message.
#[derive(Debug)]
struct Run {
    to: SockAddr,
    /// Offset of the first byte in the burst, and length.
    start: usize,
    len: usize,
    /// Length of each datagram, if there are several.
    segment: Option<u16>,
}

/// Messages per receive call; each may contain several merged datagrams.
const MESSAGES: usize = 16;
/// Size of the socket buffers, bytes.
const BUFFER_BYTES: usize = 8 << 20;
/// Number of packets to build before they are sent.
const BURST_PACKETS: usize = 256;
/// Maximum number of segments of one system call, and their maximum size (UDP_MAX_SEGMENTS of the kernel; a datagram's
/// length).
const SEGMENTS_MAX: usize = 64;
const SEGMENT_BYTES_MAX: usize = 65_000;
/// Maximum number of source ports; no process needs more paths.
const PATHS_MAX: usize = 256;
/// Upper bound for the time that a datagram has waited in the socket, ns.
const WAITED_MAX_NS: u64 = 1_000_000_000;
/// Accept datagrams without a checksum over IPv6, too (linux/udp.h).
const UDP_NO_CHECK6_RX: i32 = 102;
/// Receive calls before sending.
const RECEIVE_CALLS: usize = 4;

impl Soft {
    /// Binds a socket, and creates a NIC on it.
    ///
    /// # Errors
    /// If the address or the port cannot be bound.
    pub fn new(config: SoftConfig) -> io::Result<Self> {
        let socket = bind(SocketAddr::new(config.address, config.port))?;
        let port = socket.local_addr()?.port();
        set_int(&socket, libc::SOL_UDP, libc::UDP_GRO, 1)?;
        if config.address.is_ipv6() {
            // RDMA NICs and soft-RoCE leave the UDP checksum 0: the ICRC is stronger (IBTA annex A17).
            set_int(&socket, libc::SOL_UDP, UDP_NO_CHECK6_RX, 1)?;
        }
        set_int(&socket, libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, 1)?;
        let nic = Nic::new(Config {
            address: config.address,
            port,
            queue_pairs: config.queue_pairs,
            regions: config.regions,
            seed: config.seed,
        });
        Ok(Self {
            nic,
            socket,
            paths: HashMap::new(),
            burst: Burst::new(),
            buffers: ReceiveBuffers::new(MESSAGES),
            runs: Vec::new(),
            headers: SendHeaders::default(),
            epoch: Instant::now(),
            counters: SoftCounters::default(),
            segments: config.address.is_ipv6(),
        })
    }

    /// Time since the NIC was created, ns: its clock, and the one for callers.
    #[must_use]
    pub fn now_ns(&self) -> u64 {
        self.epoch.elapsed().as_nanos() as u64
    }

    /// Counters of the socket.
    #[must_use]
    pub fn counters(&self) -> &SoftCounters {
        &self.counters
    }

    /// Counters of the NIC.
    #[must_use]
    pub fn nic_counters(&self) -> &Counters {
        self.nic.counters()
    }

    /// The UDP port on which it receives.
    #[must_use]
    pub fn nic_port(&self) -> u16 {
        self.nic.port()
    }

    /// When the NIC's timers are due, ns.
    #[must_use]
    pub fn next_deadline(&self) -> u64 {
        self.nic.next_deadline(self.now_ns())
    }

    /// The socket, for waiting for packets.
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Receives packets, and runs the timers. Returns the number of packets.
    ///
    /// # Errors
    /// If the socket fails.
    pub fn receive(&mut self) -> io::Result<usize> {
        let mut count = 0;
        for _ in 0..RECEIVE_CALLS {
            let messages = match self.buffers.receive(self.socket.as_fd(), 0) {
                Ok(messages) => messages,
                Err(error) if is_passing(&error) => 0,
                Err(error) => return Err(error),
            };
            if messages == 0 {
                break;
            }
            self.counters.receive_calls += 1;
            let now = self.epoch.elapsed().as_nanos() as u64;
            // The kernel's clock tells how long ago a datagram arrived; a clock step must not count as a long time.
            let kernel_now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64);
            let (destination, destination_port) = (self.nic.address(), self.nic.port());
            for message in 0..messages {
                let Some(from) = self.buffers.source(message).filter(|_| !self.buffers.truncated(message)) else {
                    continue;
                };
                let (source, source_port) = (from.ip(), from.port());
                let route = Route { source, destination, source_port, destination_port };
                let Notes { rx_time_ns, segment, .. } = self.buffers.notes(message);
                let waited = kernel_now.checked_sub(rx_time_ns).filter(|waited| *waited < WAITED_MAX_NS);
                let arrived = now.saturating_sub(waited.unwrap_or(0));
                let payload = self.buffers.payload(message);
                for (start, len) in datagrams(payload.len() as u32, segment) {
                    self.nic.receive(arrived, &route, &payload[start as usize..][..len as usize]);
                    count += 1;
                }
            }
            // A short batch means that the socket is empty.
            if messages < MESSAGES {
                break;
            }
        }
        let now = self.now_ns();
        self.nic.advance(now);
        Ok(count)
    }

    /// Sends all pending packets. Returns their number.
    pub fn transmit(&mut self) -> usize {
        let mut count = 0;
        while self.nic.has_packets() {
            self.burst.clear();
            let now = self.epoch.elapsed().as_nanos() as u64;
            let made = self.nic.transmit(now, BURST_PACKETS, &mut self.burst);
            if made == 0 {
                break;
            }
            count += made;
            self.send_burst();
        }
        count
    }

    fn send_burst(&mut self) {
        let mut at = 0;
        while let Some(first) = self.burst.packets().get(at).copied() {
            // All following packets that are sent on the same socket.
            let source_port = first.route.source_port;
            self.runs.clear();
            while let Some(next) = self.burst.packets().get(at).filter(|p| p.route.source_port == source_port) {
                let run = if self.segments { run_length(&self.burst.packets()[at..]) } else { 1 };
                let last = self.burst.packets()[at + run - 1];
                let (start, end) = (next.start as usize, last.start as usize + usize::from(last.len));
                let to = SocketAddr::new(next.route.destination, next.route.destination_port).into();
                self.runs.push(Run { to, start, len: end - start, segment: (run > 1).then_some(next.len) });
                at += run;
            }
            let socket = path(&mut self.paths, &self.socket, self.nic.address(), source_port);
            let mut done = 0;
            while done < self.runs.len() {
                self.counters.send_calls += 1;
                let bytes = self.burst.bytes();
                let messages = self.runs[done..].iter().map(|run| {
                    let message = bifrost_udp::Outgoing { to: &run.to, segment: run.segment, traffic_class: 0 };
                    (message, iter::once(&bytes[run.start..][..run.len]))
                });
                match self.headers.send(socket.as_fd(), messages) {
                    Ok(taken) => done += taken.max(1),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        // The socket's buffer is full: lost, as in any full queue.
                        self.counters.no_room_runs += (self.runs.len() - done) as u64;
                        break;
                    }
                    Err(error) => {
                        // A device without segmentation offload reports this once.
                        self.segments &= error.raw_os_error() != Some(libc::EIO);
                        self.counters.unsent_runs += 1;
                        done += 1;
                    }
                }
            }
        }
    }
}

impl Software for Soft {
    fn nic(&self) -> &Nic {
        &self.nic
    }
    fn nic_mut(&mut self) -> &mut Nic {
        &mut self.nic
    }
}

/// How many packets, from the first on, can be sent in one call: of one route and length; only the last may be shorter.
fn run_length(packets: &[Outgoing]) -> usize {
    let Some(first) = packets.first() else { return 0 };
    let max = (SEGMENT_BYTES_MAX / usize::from(first.len).max(1)).clamp(1, SEGMENTS_MAX);
    let same = packets.iter().take(max).take_while(|p| p.route == first.route && p.len == first.len).count();
    let shorter = packets.get(same).filter(|p| same < max && p.route == first.route && p.len < first.len);
    same + usize::from(shorter.is_some())
}

/// The socket with a source port; the main one, if it cannot be bound or there are too many.
fn path<'a>(
    paths: &'a mut HashMap<u16, UdpSocket>,
    main: &'a UdpSocket,
    address: IpAddr,
    source_port: u16,
) -> &'a UdpSocket {
    if !paths.contains_key(&source_port) {
        if paths.len() >= PATHS_MAX {
            paths.clear();
        }
        if let Ok(socket) = bind(SocketAddr::new(address, source_port)) {
            paths.insert(source_port, socket);
        }
    }
    paths.get(&source_port).unwrap_or(main)
}

fn bind(address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM.nonblocking(), Some(Protocol::UDP))?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    set_buffers(&socket);
    // Datagrams are never fragmented: identification 0 over IPv4, and no silent loss of half a packet.
    if address.is_ipv6() {
        set_int(&socket, libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_PROBE)?;
    } else {
        set_int(&socket, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE)?;
    }
    socket.bind(&address.into())?;
    Ok(socket.into())
}

/// Requests larger buffers in both directions, beyond the administrator's limit if this process may.
fn set_buffers(socket: &Socket) {
    let bytes = BUFFER_BYTES as i32;
    for (force, polite) in [(libc::SO_RCVBUFFORCE, libc::SO_RCVBUF), (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF)] {
        if set_int(socket, libc::SOL_SOCKET, force, bytes).is_err() {
            // The default size works as well, at a lower rate.
            let _ = set_int(socket, libc::SOL_SOCKET, polite, bytes);
        }
    }
}

/// Nothing has arrived; or an earlier datagram caused an ICMP error, because peers come and go.
fn is_passing(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionRefused, Interrupted, WouldBlock};
    matches!(error.kind(), WouldBlock | ConnectionRefused | Interrupted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_of_one_route_and_length_share_a_call() {
        let route = |port| Route {
            source: IpAddr::from([0; 16]),
            destination: IpAddr::from([0; 16]),
            source_port: port,
            destination_port: 1,
        };
        let packets = |list: &[(u16, u16)]| -> Vec<Outgoing> {
            list.iter().map(|(port, len)| Outgoing { route: route(*port), start: 0, len: *len }).collect()
        };
        let cases: [(&[(u16, u16)], usize); 6] = [
            (&[(1, 100), (1, 100), (1, 50), (1, 50)], 3),
            (&[(1, 100), (2, 100)], 1),
            (&[(1, 100), (1, 101)], 1),
            (&[(1, 100)], 1),
            (&[(1, 1000); 100], 64),
            (&[(1, 9000); 100], 7),
        ];
        for (list, expected) in cases {
            assert_eq!(run_length(&packets(list)), expected, "{list:?}");
        }
    }
}
