//! Sending: a batch becomes few messages, and the messages of one source port one system call.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};

use bifrost_udp::{Outgoing, SendHeaders};
use socket2::{SockAddr, Socket};

use super::UdpCounters;
use super::group::{Groups, Message};
use crate::underlay::{LaneId, TxBatch};

/// Maximum messages per system call.
const MESSAGES_PER_CALL: usize = 64;
/// Maximum lanes: 2^20 peers with 8 paths each, and two services.
const MAX_LANES: u32 = 1 << 24;

/// The transmit sockets of an underlay and the lanes through them.
#[derive(Default)]
pub(crate) struct Transmitter {
    sockets: Vec<Exit>,
    /// Sockets from another process that no lane uses yet.
    handed: Vec<(Socket, SocketAddr)>,
    lanes: Vec<Lane>,
    /// The lane from a socket to an address.
    by_ends: HashMap<(usize, SocketAddr), LaneId>,
    groups: Groups,
    /// Messages of the current socket, as indexes into `groups`.
    pending: Vec<u32>,
    headers: SendHeaders,
}

struct Exit {
    local: SocketAddr,
    socket: Socket,
    /// Whether the kernel segments on this socket, as far as known.
    segments: bool,
}

struct Lane {
    socket: usize,
    to: SockAddr,
}

/// What to do with a message that the kernel refused.
enum Refusal {
    /// Send its datagrams one by one.
    Unsegmented,
    /// Drop it and all later ones of this socket.
    Full,
    /// Drop it.
    Drop,
    /// Retry.
    Again,
}

impl Transmitter {
    /// Uses sockets from another process, bound to these addresses, before opening any.
    pub(crate) fn of_handed(handed: Vec<(Socket, SocketAddr)>) -> Self {
        Self { handed, ..Self::default() }
    }

    /// Duplicates of its socket descriptors.
    pub(crate) fn sockets(&self) -> io::Result<Vec<OwnedFd>> {
        let own = self.sockets.iter().map(|exit| &exit.socket);
        own.chain(self.handed.iter().map(|(socket, _)| socket)).map(|s| s.as_fd().try_clone_to_owned()).collect()
    }

    /// Closes sockets from another process that no lane uses.
    pub(crate) fn close_unused(&mut self) {
        self.handed.clear();
    }

    /// The lane from `local` to `remote`, created if it is new. For a new local address, `open` makes the socket, from
    /// the one that was handed over for it if there is one.
    pub(crate) fn lane<E: From<io::Error>>(
        &mut self,
        local: SocketAddr,
        remote: SocketAddr,
        open: impl FnOnce(Option<Socket>) -> Result<(Socket, bool), E>,
    ) -> Result<LaneId, E> {
        let known = self.sockets.iter().position(|s| s.local == local);
        if let Some(lane) = known.and_then(|socket| self.by_ends.get(&(socket, remote))) {
            return Ok(*lane);
        }
        let Some(id) = u32::try_from(self.lanes.len()).ok().filter(|id| *id < MAX_LANES) else {
            let message = format!("all {MAX_LANES} lanes are in use; configure fewer peers or paths");
            return Err(io::Error::other(message).into());
        };
        let socket = match known {
            Some(socket) => socket,
            None => {
                let handed = self.handed.iter().position(|(_, bound)| *bound == local);
                let (socket, segments) = open(handed.map(|at| self.handed.swap_remove(at).0))?;
                self.sockets.push(Exit { local, socket, segments });
                self.sockets.len() - 1
            }
        };
        self.lanes.push(Lane { socket, to: remote.into() });
        self.by_ends.insert((socket, remote), LaneId(id));
        Ok(LaneId(id))
    }

    pub(crate) fn send(&mut self, batch: &mut TxBatch, counters: &mut UdpCounters) {
        if batch.is_empty() {
            return;
        }
        self.groups
            .build(batch.iter().map(|(lane, class, payload)| (lane, class, payload.len() as u32)), self.lanes.len());
        for message in self.groups.messages() {
            if message.lane.0 as usize >= self.lanes.len() {
                counters.tx_unknown_lane_datagrams += u64::from(message.count);
            }
        }
        for socket in 0..self.sockets.len() {
            let lanes = &self.lanes;
            self.pending.clear();
            self.pending.extend(
                (0u32..)
                    .zip(self.groups.messages())
                    .filter(|(_, m)| lanes.get(m.lane.0 as usize).is_some_and(|l| l.socket == socket))
                    .map(|(i, _)| i),
            );
            if !self.pending.is_empty() {
                self.send_pending(socket, batch, counters);
            }
        }
        batch.clear();
    }

    /// Sends the pending messages through one socket.
    fn send_pending(&mut self, socket: usize, batch: &TxBatch, counters: &mut UdpCounters) {
        let Self { sockets, lanes, groups, pending, headers, .. } = self;
        let exit = &mut sockets[socket];
        let messages = groups.messages();
        let mut at = 0;
        while at < pending.len() {
            let next = &messages[pending[at] as usize];
            if next.count > 1 && !exit.segments {
                if send_singly(exit, lanes, groups, next, headers, batch, counters) {
                    drop_rest(&pending[at + 1..], messages, counters);
                    return;
                }
                at += 1;
                continue;
            }
            let run = pending[at..].iter().take(MESSAGES_PER_CALL).map(|&i| &messages[i as usize]);
            let run = run.take_while(|m| m.count == 1 || exit.segments).map(|m| {
                let lane = &lanes[m.lane.0 as usize];
                // A segment size fits 16 bits if there are several datagrams (group::MAX_MESSAGE_BYTES).
                let segment = if m.count > 1 { Some(m.segment as u16) } else { None };
                (
                    Outgoing { to: &lane.to, segment, traffic_class: m.traffic_class },
                    groups.members(m).map(|i| batch.payload(i)),
                )
            });
            counters.tx_system_calls += 1;
            match headers.send(exit.socket.as_fd(), run) {
                Ok(sent) => {
                    for &i in &pending[at..at + sent] {
                        let m = &messages[i as usize];
                        sent_message(counters, u64::from(m.count), u64::from(m.bytes));
                    }
                    // Zero is impossible for a non-empty call; advancing anyway keeps the loop finite.
                    at += sent.max(1);
                }
                Err(e) => match judge(&e, next.count > 1) {
                    Refusal::Again => {}
                    Refusal::Unsegmented => {
                        counters.tx_gso_refused_messages += 1;
                        // The first two concern this message (segments above the MTU; the last one may still fit), the
                        // others the device.
                        exit.segments &= matches!(e.raw_os_error(), Some(libc::EMSGSIZE | libc::EINVAL));
                        if send_singly(exit, lanes, groups, next, headers, batch, counters) {
                            drop_rest(&pending[at + 1..], messages, counters);
                            return;
                        }
                        at += 1;
                    }
                    Refusal::Full => {
                        drop_rest(&pending[at..], messages, counters);
                        return;
                    }
                    Refusal::Drop => {
                        count_error(counters, &e, u64::from(next.count));
                        at += 1;
                    }
                },
            }
        }
    }
}

/// Sends the datagrams of one message without segmentation. Returns whether the socket's buffer was full.
fn send_singly(
    exit: &Exit,
    lanes: &[Lane],
    groups: &Groups,
    message: &Message,
    headers: &mut SendHeaders,
    batch: &TxBatch,
    counters: &mut UdpCounters,
) -> bool {
    let to = &lanes[message.lane.0 as usize].to;
    let mut done = 0;
    while done < usize::from(message.count) {
        let rest = groups.members(message).skip(done);
        counters.tx_system_calls += 1;
        let outgoing = Outgoing { to, segment: None, traffic_class: message.traffic_class };
        let run = rest.map(|i| (outgoing, std::iter::once(batch.payload(i))));
        match headers.send(exit.socket.as_fd(), run) {
            Ok(sent) => {
                for i in groups.members(message).skip(done).take(sent) {
                    sent_message(counters, 1, batch.payload(i).len() as u64);
                }
                done += sent.max(1);
            }
            Err(e) => match judge(&e, false) {
                Refusal::Again => {}
                Refusal::Full => {
                    counters.tx_no_buffer_datagrams += u64::from(message.count) - done as u64;
                    return true;
                }
                Refusal::Drop | Refusal::Unsegmented => {
                    count_error(counters, &e, 1);
                    done += 1;
                }
            },
        }
    }
    false
}

fn judge(error: &io::Error, segmented: bool) -> Refusal {
    match error.raw_os_error() {
        Some(libc::EINTR) => Refusal::Again,
        Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM) => Refusal::Full,
        Some(libc::EMSGSIZE | libc::EINVAL | libc::EIO | libc::EOPNOTSUPP | libc::ENOPROTOOPT) if segmented => {
            Refusal::Unsegmented
        }
        _ => Refusal::Drop,
    }
}

fn drop_rest(pending: &[u32], messages: &[Message], counters: &mut UdpCounters) {
    counters.tx_no_buffer_datagrams += pending.iter().map(|&i| u64::from(messages[i as usize].count)).sum::<u64>();
}

fn sent_message(counters: &mut UdpCounters, datagrams: u64, bytes: u64) {
    counters.tx_messages += 1;
    counters.tx_datagrams += datagrams;
    counters.tx_bytes += bytes;
}

fn count_error(counters: &mut UdpCounters, error: &io::Error, datagrams: u64) {
    let counter = match error.raw_os_error() {
        Some(libc::EMSGSIZE) => &mut counters.tx_too_big_datagrams,
        Some(libc::ECONNREFUSED) => &mut counters.tx_refused_datagrams,
        Some(libc::ENETUNREACH | libc::EHOSTUNREACH | libc::ENETDOWN) => &mut counters.tx_unreachable_datagrams,
        _ => &mut counters.tx_other_error_datagrams,
    };
    *counter += datagrams;
}
