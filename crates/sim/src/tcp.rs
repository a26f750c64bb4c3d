//! Guests that run a real TCP (smoltcp), and their connections.
//!
//! Every stream is a pseudo-random sequence of bytes that both ends know, so a lost, duplicated or changed byte is
//! detected where it happens.

use smoltcp::iface::{Config, Interface, PollIngressSingleResult, PollResult, SocketHandle, SocketSet};
use smoltcp::socket::tcp::{CongestionControl, Socket, SocketBuffer, State};
use smoltcp::time::{Duration, Instant};
use smoltcp::wire::{HardwareAddress, IpAddress, IpCidr, Ipv4Address};

use crate::port::SimPort;
use crate::rng::mix;
use crate::scenario::HostConfig;
use crate::violation::{Kind, Violations};

mod nic;

use nic::{Nic, Queue};

/// Length of IPv4 and TCP headers without options: data packets have no options here.
const HEADERS: usize = 40;
/// Maximum number of segments in a large frame.
const SEGMENTS: usize = 44;

/// One end of a connection.
#[derive(Debug)]
struct End {
    /// The connection.
    conn: u32,
    socket: SocketHandle,
    is_client: bool,
    /// Bytes of its stream that TCP has accepted, and those to send in total.
    sent: u64,
    target: u64,
    /// Bytes received and checked.
    received: u64,
    was_open: bool,
}

/// A guest with a TCP.
pub(crate) struct TcpGuest {
    guest: u32,
    /// Payload of a packet on the wire.
    mss: usize,
    /// Maximum length of an IP packet that it hands over.
    largest: usize,
    mac: [u8; 6],
    iface: Interface,
    /// Frames that wait for room in the ring.
    queue: Queue,
    sockets: SocketSet<'static>,
    ends: Vec<End>,
    /// When it must be polled next, ns.
    pub(crate) wake_at: Option<u64>,
}

/// A connection between two guests.
#[derive(Clone, Debug)]
pub struct Conn {
    /// Index of its workload.
    pub workload: u32,
    /// The client.
    pub client: u32,
    /// The server.
    pub server: u32,
    /// Server port, unique for the pair of guests.
    pub port: u16,
    /// When the client opens it, ns.
    pub start: u64,
    /// Bytes of a request.
    pub request: u64,
    /// Length of a response; 0: none, the arrival of the request completes it.
    pub response: u64,
    /// Requests.
    pub count: u32,
    /// Pause between a response and the next request, ns.
    pub think: u64,
    /// It waits for the other connections of its group before its next request.
    pub group: Option<u32>,
    /// Requests sent, and completed.
    pub asked: u32,
    /// Requests completed.
    pub done: u32,
    asked_at: u64,
    next_at: u64,
}

/// The TCP traffic of all guests.
#[derive(Clone, Debug, Default)]
pub struct Conns {
    /// All connections.
    pub all: Vec<Conn>,
    /// Per group: the number of connections, and how many of them have received a response in this round.
    groups: Vec<(u32, u32)>,
    /// Requests completed since the world last checked: workload, latency in ns, bytes.
    pub(crate) finished: Vec<(u32, u64, u64)>,
    /// Guests that must be polled now because of another guest's action.
    pub(crate) poke: Vec<u32>,
    /// Connections that are not finished.
    pub open: u32,
    group_members: Vec<Vec<u32>>,
}

impl Conns {
    /// Adds a connection.
    pub fn add(&mut self, conn: Conn) -> u32 {
        if let Some(group) = conn.group {
            let at = group as usize;
            if self.groups.len() <= at {
                self.groups.resize(at + 1, (0, 0));
                self.group_members.resize(at + 1, Vec::new());
            }
            self.groups[at].0 += 1;
            self.group_members[at].push(conn.client);
        }
        self.open += u32::from(conn.count > 0);
        self.all.push(conn);
        self.all.len() as u32 - 1
    }

    /// The first group of a workload. Groups are numbered per workload in order of appearance.
    pub fn first_group(&self, workload: u32) -> u32 {
        let own = self.all.iter().filter(|c| c.workload == workload).filter_map(|c| c.group).min();
        own.unwrap_or(self.groups.len() as u32)
    }

    /// A request is completed.
    fn finish(&mut self, now: u64, index: u32) {
        let conn = &mut self.all[index as usize];
        conn.done += 1;
        self.finished.push((conn.workload, now.saturating_sub(conn.asked_at), conn.request + conn.response));
        self.open -= u32::from(conn.done == conn.count);
        conn.next_at = now + conn.think;
        self.poke.push(conn.client);
        if let Some(group) = conn.group {
            let think = conn.think;
            let state = &mut self.groups[group as usize];
            state.1 += 1;
            if state.1 == state.0 {
                state.1 = 0;
                self.poke.extend(&self.group_members[group as usize]);
                for conn in self.all.iter_mut().filter(|c| c.group == Some(group)) {
                    conn.next_at = now + think;
                }
            } else {
                self.all[index as usize].next_at = u64::MAX;
            }
        }
    }
}

impl Conn {
    /// A connection that has not started.
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        workload: u32,
        (client, server): (u32, u32),
        port: u16,
        start: u64,
        (request, response): (u64, u64),
        count: u32,
        think: u64,
        group: Option<u32>,
    ) -> Self {
        Conn {
            workload,
            client,
            server,
            port,
            start,
            request,
            response,
            count,
            think,
            group,
            asked: 0,
            done: 0,
            asked_at: 0,
            next_at: start,
        }
    }
}

impl TcpGuest {
    /// A guest with these addresses.
    pub(crate) fn new(guest: u32, mac: [u8; 6], ip: [u8; 4], host: &HostConfig, seed: u64) -> Self {
        // Its neighbour cache is filled below: smoltcp sends at most one neighbour request per second.
        let mut config = Config::new(HardwareAddress::Ip);
        config.random_seed = seed;
        let mss = usize::from(host.mtu).saturating_sub(HEADERS).max(1);
        let segments = if host.tso { SEGMENTS.min((65_535 - HEADERS) / mss).max(1) } else { 1 };
        let largest = segments * mss + HEADERS;
        let mut port = SimPort::new(1, 1, 1);
        let mut queue = Queue::new();
        let mut none = Nic { port: &mut port, queue: &mut queue, mss, largest, mac, frames: 0 };
        let mut iface = Interface::new(config, &mut none, Instant::ZERO);
        iface.update_ip_addrs(|addresses| {
            // One network for all guests.
            let _ = addresses.push(IpCidr::new(IpAddress::Ipv4(Ipv4Address::from(ip)), 8));
        });
        let sockets = SocketSet::new(Vec::new());
        TcpGuest { guest, mss, largest, mac, iface, queue, sockets, ends: Vec::new(), wake_at: Some(0) }
    }

    /// Adds one end of a connection.
    pub(crate) fn add(&mut self, conn: u32, is_client: bool, port: u16, buffer: usize) {
        let storage = || SocketBuffer::new(vec![0; buffer]);
        let mut socket = Socket::new(storage(), storage());
        socket.set_congestion_control(CongestionControl::Cubic);
        socket.set_nagle_enabled(false);
        socket.set_ack_delay(Some(Duration::from_millis(1)));
        if !is_client {
            // Fails only for port 0.
            let _ = socket.listen(port);
        }
        let socket = self.sockets.add(socket);
        let (sent, target, received, was_open) = (0, 0, 0, false);
        self.ends.push(End { conn, socket, is_client, sent, target, received, was_open });
    }

    /// Does everything that is due at `now`, but receives at most `frames` frames.
    pub(crate) fn poll(
        &mut self,
        now: u64,
        port: &mut SimPort,
        mut frames: usize,
        conns: &mut Conns,
        addresses: impl Fn(u32) -> [u8; 4],
        violations: &mut Violations,
    ) {
        let at = Instant::from_micros((now / 1000) as i64);
        // Each round moves packets or bytes; a guest's windows bound both.
        for _ in 0..1000 {
            let (mss, largest, mac) = (self.mss, self.largest, self.mac);
            let mut nic = Nic { port, queue: &mut self.queue, mss, largest, mac, frames };
            nic.flush();
            // Received frames may need a response. Each pass of the second loop sends a frame of each connection.
            let (iface, sockets) = (&mut self.iface, &mut self.sockets);
            while nic.has_room() && iface.poll_ingress_single(at, &mut nic, sockets) != PollIngressSingleResult::None {}
            while nic.has_room() && iface.poll_egress(at, &mut nic, sockets) != PollResult::None {}
            frames = nic.frames;
            let mut busy = false;
            for i in 0..self.ends.len() {
                busy |= self.serve(i, now, conns, &addresses, violations);
            }
            if !busy {
                break;
            }
        }
        let sleep = self.iface.poll_at(at, &self.sockets).map(|t| {
            let t = t.total_micros().max(0) as u64 * 1000;
            if t > now {
                t
            } else if port.room() == 0 {
                // Nothing can leave: the host wakes the guest when it releases buffers.
                u64::MAX
            } else {
                now + 1000
            }
        });
        let ask = self.ends.iter().filter(|e| e.is_client).filter_map(|e| {
            let conn = &conns.all[e.conn as usize];
            (conn.asked == conn.done && conn.done < conn.count && conn.next_at > now).then_some(conn.next_at)
        });
        self.wake_at = sleep.into_iter().chain(ask).min().filter(|t| *t != u64::MAX);
    }

    /// Serves one end of a connection: sends pending data and reads received data. Returns whether anything moved.
    fn serve(
        &mut self,
        i: usize,
        now: u64,
        conns: &mut Conns,
        addresses: &impl Fn(u32) -> [u8; 4],
        violations: &mut Violations,
    ) -> bool {
        let end = &mut self.ends[i];
        let index = end.conn;
        let conn = &mut conns.all[index as usize];
        let socket = self.sockets.get_mut::<Socket<'static>>(end.socket);
        let mut busy = false;
        if end.is_client
            && now >= conn.start
            && conn.asked == conn.done
            && conn.done < conn.count
            && now >= conn.next_at
        {
            if conn.asked == 0 {
                let remote = (IpAddress::Ipv4(Ipv4Address::from(addresses(conn.server))), conn.port);
                // A separate local port for each connection of this guest.
                let local = 20_000 + (i as u16 % 40_000);
                if socket.connect(self.iface.context(), remote, local).is_err() {
                    violations.add(now, Kind::Connection, || format!("connection {index} cannot be opened"));
                    conn.next_at = u64::MAX;
                    return false;
                }
            }
            conn.asked += 1;
            conn.asked_at = now;
            end.target += conn.request;
            busy = true;
        }
        if socket.state() == State::Established {
            end.was_open = true;
        } else if end.was_open {
            violations.add(now, Kind::Connection, || {
                format!("guest {}: connection {index} ended: {}", self.guest, socket.state())
            });
            end.was_open = false;
            return false;
        }
        let (out, into) =
            if end.is_client { (stream(index, 0), stream(index, 1)) } else { (stream(index, 1), stream(index, 0)) };
        while end.sent < end.target && socket.can_send() {
            let left = end.target - end.sent;
            let taken = socket.send(|buffer| {
                let len = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                fill(out, end.sent, &mut buffer[..len]);
                (len, len)
            });
            let Ok(taken @ 1..) = taken else { break };
            end.sent += taken as u64;
            busy = true;
        }
        while socket.can_recv() {
            let at = end.received;
            let read = socket.recv(|buffer| (buffer.len(), (buffer.len(), differs(into, at, buffer))));
            let Ok((len, wrong)) = read else { break };
            if let Some(offset) = wrong {
                let guest = self.guest;
                violations
                    .add(now, Kind::Stream, || format!("guest {guest}: connection {index} differs at byte {offset}"));
            }
            end.received += len as u64;
            busy = true;
        }
        let per = if end.is_client { conn.response } else { conn.request };
        let whole = end.received.checked_div(per).unwrap_or(0);
        if end.is_client && per > 0 && whole > u64::from(conn.done) {
            conns.finish(now, index);
            busy = true;
        } else if !end.is_client && conn.response > 0 && whole * conn.response > end.target {
            end.target = whole * conn.response;
            busy = true;
        } else if !end.is_client && conn.response == 0 && whole > u64::from(conn.done) {
            conns.finish(now, index);
            busy = true;
        }
        busy
    }
}

/// The stream of one direction of a connection.
fn stream(conn: u32, direction: u64) -> u64 {
    mix(u64::from(conn) << 1 | direction)
}

fn word(stream: u64, index: u64) -> [u8; 8] {
    mix(stream ^ index.wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_le_bytes()
}

/// Bytes of a stream from `offset` on.
fn fill(stream: u64, offset: u64, out: &mut [u8]) {
    let mut at = offset;
    let mut rest = out;
    while !rest.is_empty() {
        let word = word(stream, at / 8);
        let from = (at % 8) as usize;
        let len = rest.len().min(8 - from);
        rest[..len].copy_from_slice(&word[from..from + len]);
        at += len as u64;
        rest = &mut rest[len..];
    }
}

/// Position where `bytes` differ from a stream from `offset` on.
fn differs(stream: u64, offset: u64, bytes: &[u8]) -> Option<u64> {
    let mut at = offset;
    let mut rest = bytes;
    while !rest.is_empty() {
        let word = word(stream, at / 8);
        let from = (at % 8) as usize;
        let len = rest.len().min(8 - from);
        if rest[..len] != word[from..from + len] {
            return Some(at);
        }
        at += len as u64;
        rest = &rest[len..];
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_known_at_every_offset() {
        let mut whole = vec![0; 1000];
        fill(7, 0, &mut whole);
        for (from, to) in [(0, 1000), (1, 2), (3, 900), (17, 17), (992, 1000)] {
            assert_eq!(differs(7, from as u64, &whole[from..to]), None);
        }
        assert_eq!(differs(7, 1, &whole[0..50]), Some(1), "shifted by a byte");
        whole[500] ^= 1;
        assert_eq!(differs(7, 0, &whole), Some(496), "the word in which it lies");
        assert_eq!(differs(8, 0, &whole[..8]), Some(0), "another stream");
    }
}
