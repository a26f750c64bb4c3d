//! The packets that arrive at the target of a mirror. An nftables rule counts and drops copies of requests; copies of
//! datagrams are read one by one.

use std::io::ErrorKind;
use std::net::UdpSocket;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use bifrost_wire::vxlan;

use crate::topology::{Guest, Host, link_name};
use crate::{inject, interrupt};

/// The VNI of all copies.
pub(super) const VNI: u32 = 4242;
/// Number of datagrams, their port and their rate, 1/s.
const DATAGRAMS: u32 = 4000;
const PORT: u16 = 7009;
const PER_S: f64 = 4000.0;
/// Length of their payload, and of the headers before it (Ethernet, IPv4, UDP), bytes.
const PAYLOAD_LEN: usize = 1000;
const HEADERS_LEN: usize = 14 + 20 + 8;
/// Receive buffer, bytes: several times the size of all copies.
const BUFFER: usize = 64 << 20;
/// How long copies may be in flight.
const PATIENCE: Duration = Duration::from_secs(1);
const TICK: Duration = Duration::from_millis(50);

/// Counts the copies that arrive at a host.
#[derive(Debug)]
pub(super) struct Arrivals<'a> {
    host: &'a Host,
    /// The daemon's counters at the start.
    before: [u64; 3],
}

impl<'a> Arrivals<'a> {
    /// Counts from zero the copies that arrive at UDP `port` of `host`, and drops them, so that reading them takes no
    /// time from the guests. `before`: the daemon's counters so far.
    ///
    /// # Errors
    /// nftables refuses the rule.
    pub(super) fn count(host: &'a Host, port: u16, before: [u64; 3]) -> Result<Self> {
        inject::count_and_drop(&host.namespace, &link_name(0), &format!("udp dport {port}"))?;
        Ok(Self { host, before })
    }

    /// Waits until no copies are in flight. Returns the increase of the daemon's `counted` counters, and the number of
    /// copies that arrived.
    ///
    /// # Errors
    /// A count cannot be read, or an interruption.
    pub(super) fn settle(&self, counted: impl Fn() -> Result<[u64; 3]>) -> Result<([u64; 3], u64)> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let now = counted()?;
            let since: [u64; 3] = std::array::from_fn(|n| now[n].saturating_sub(self.before[n]));
            let arrived = inject::dropped(&self.host.namespace)?;
            if since[0] == arrived || Instant::now() > deadline {
                return Ok((since, arrived));
            }
            interrupt::sleep(TICK)?;
        }
    }
}

/// Numbers of copies of datagrams.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Datagrams {
    /// Copies that should have arrived.
    pub(super) expected: u64,
    /// Copies that arrived and were correct.
    pub(super) correct: u64,
    /// Copies that arrived and were wrong.
    pub(super) wrong: u64,
}

/// Sends datagrams from `client` to `server`, and reads their copies at `port` of `host`. `extent`: one packet in this
/// many is copied, and this many bytes of it; `None`: there is no mirror.
///
/// # Errors
/// A socket cannot be opened.
pub(super) fn of_datagrams(
    [client, server]: [&Guest; 2],
    (host, port): (&Host, u16),
    extent: Option<(u32, usize)>,
) -> Result<Datagrams> {
    let at = (host.underlay[0], port);
    let copies = host.namespace.enter(move || {
        let socket = UdpSocket::bind(at).context("listening for copies")?;
        rustix::net::sockopt::set_socket_recv_buffer_size_force(&socket, BUFFER)?;
        Ok(socket)
    })?;
    copies.set_read_timeout(Some(TICK))?;
    let to = (server.address, PORT);
    // The socket receives the datagrams, so that the server's kernel does not answer with ICMP errors.
    let _sink = server.namespace.enter(move || UdpSocket::bind(to).context("listening for datagrams"))?;
    let sending = client.namespace.spawn(move || {
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        socket.connect(to)?;
        let duration = Duration::from_secs_f64(f64::from(DATAGRAMS) / PER_S);
        crate::programs::application::pace(Instant::now(), PER_S, duration, |number, _| {
            socket.send(&payload(number)).map(drop).context("sending a datagram")
        })
    })?;
    let mut seen = Datagrams::default();
    let (one_in, kept) = extent.unwrap_or((u32::MAX, 0));
    seen.expected = u64::from(DATAGRAMS / one_in);
    let mut next = 0;
    let mut datagram = [0; 2048];
    let mut deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        match copies.recv(&mut datagram) {
            Ok(length) => {
                // Copies of one flow arrive in order.
                match number(&datagram[..length], kept) {
                    Some(number) if number >= next => {
                        next = number + one_in;
                        seen.correct += 1;
                    }
                    _ => seen.wrong += 1,
                }
                deadline = Instant::now() + PATIENCE;
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                if !sending.is_finished() {
                    deadline = Instant::now() + PATIENCE;
                }
            }
            Err(error) => return Err(error).context("waiting for copies"),
        }
    }
    sending.join().map_err(|_| anyhow::anyhow!("the thread that sends datagrams panicked"))??;
    Ok(seen)
}

/// The number of the datagram that `copy` is a copy of; `None` if the copy is wrong.
fn number(copy: &[u8], kept: usize) -> Option<u32> {
    let (vni, frame) = vxlan::parse(copy).ok()?;
    let ip_len = u16::from_be_bytes(*frame.get(16..)?.first_chunk()?);
    let content = frame.get(HEADERS_LEN..)?;
    let number = u32::from_be_bytes(*content.first_chunk()?);
    let is_right = vni.get() == VNI
        && frame.len() == kept.min(HEADERS_LEN + PAYLOAD_LEN)
        && usize::from(ip_len) == HEADERS_LEN - 14 + PAYLOAD_LEN
        && payload(number).starts_with(content);
    is_right.then_some(number)
}

/// A payload: the number, and bytes that depend on it.
fn payload(number: u32) -> [u8; PAYLOAD_LEN] {
    let mut bytes: [u8; PAYLOAD_LEN] = std::array::from_fn(|n| (n as u32).wrapping_add(number) as u8);
    bytes[..4].copy_from_slice(&number.to_be_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_that_differ_are_told_from_good_ones() {
        let mut frame = vec![0; HEADERS_LEN];
        frame[16..18].copy_from_slice(&1028u16.to_be_bytes());
        frame.extend(payload(9));
        let copy = |vni, len: usize| [&vxlan::emit(bifrost_wire::Vni::new(vni).unwrap())[..], &frame[..len]].concat();
        assert_eq!(number(&copy(VNI, 128), 128), Some(9));
        assert_eq!(number(&copy(VNI, 1042), 1514), Some(9));
        assert_eq!(number(&copy(VNI + 1, 128), 128), None, "another VNI");
        assert_eq!(number(&copy(VNI, 127), 128), None, "too short");
        assert_eq!(number(&copy(VNI, 129), 128), None, "too long");
        let mut changed = copy(VNI, 128);
        changed[100] ^= 1;
        assert_eq!(number(&changed, 128), None, "another content");
        assert_eq!(number(&[], 128), None);
        assert_eq!(number(&copy(VNI, 20), 20), None, "only headers");
    }
}
