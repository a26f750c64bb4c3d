//! The network stack towards one guest, and the guest's connections.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::socket::tcp;
use smoltcp::time::Instant;
use smoltcp::wire::{HardwareAddress, IpAddress, IpCidr};

use crate::documents::Documents;
use crate::http;
use crate::link::Link;
use crate::{CONNECTIONS, Counters, LONGEST_MS, MAX_REQUEST};

/// The port of HTTP.
const HTTP: u16 = 80;
/// TCP buffers of a connection, bytes.
const RECEIVED: usize = 2048;
const SENT: usize = 4096;
/// Minimum and maximum MTU of sent packets, bytes. IPv6 needs 1280; 576 is for IPv4 guests with a smaller MTU.
const MTUS: (usize, usize) = (576, 9000);

/// A guest.
pub(crate) struct Guest {
    about: Arc<Documents>,
    link: Link,
    iface: Interface,
    sockets: SocketSet<'static>,
    connections: Vec<Connection>,
    last_ms: u64,
}

impl std::fmt::Debug for Guest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Guest").field("connections", &self.connections).finish_non_exhaustive()
    }
}

/// A connection of the guest, or a listening socket.
#[derive(Debug)]
struct Connection {
    socket: SocketHandle,
    request: Vec<u8>,
    reply: Vec<u8>,
    /// Bytes of `reply` passed to TCP.
    sent: usize,
    /// When it was opened; `None`: the socket listens.
    since_ms: Option<u64>,
}

impl Guest {
    pub(crate) fn new((v4, v6): (Ipv4Addr, Ipv6Addr), secret: u64, about: Arc<Documents>) -> Guest {
        let mut config = Config::new(HardwareAddress::Ip);
        config.random_seed = secret;
        let mut link = Link::new(mtu(&about));
        let mut iface = Interface::new(config, &mut link, Instant::ZERO);
        iface.update_ip_addrs(|addresses| {
            // Both fit. All addresses are on-link, so there are no routes.
            let _ = addresses.push(IpCidr::new(IpAddress::Ipv4(v4), 0));
            let _ = addresses.push(IpCidr::new(IpAddress::Ipv6(v6), 0));
        });
        let mut sockets = SocketSet::new(Vec::new());
        let connections = (0..CONNECTIONS).map(|_| Connection::new(&mut sockets)).collect();
        Guest { about, link, iface, sockets, connections, last_ms: 0 }
    }

    /// Queues a packet of the guest; false if the queue is full.
    pub(crate) fn receive(&mut self, now_ms: u64, about: &Arc<Documents>, packet: Vec<u8>) -> bool {
        self.last_ms = now_ms;
        if !Arc::ptr_eq(&self.about, about) {
            self.about = Arc::clone(about);
            self.link.mtu = mtu(about);
        }
        self.link.receive(packet)
    }

    /// Processes packets and timers. Returns the time of the next timer, ms.
    pub(crate) fn poll(&mut self, now_ms: u64, counters: &mut Counters) -> Option<u64> {
        let now = Instant::from_millis(i64::try_from(now_ms).unwrap_or(i64::MAX));
        self.iface.poll(now, &mut self.link, &mut self.sockets);
        for connection in &mut self.connections {
            connection.serve(now_ms, &mut self.sockets, &self.about, counters);
        }
        self.iface.poll(now, &mut self.link, &mut self.sockets);
        let delay = self.iface.poll_delay(now, &self.sockets).map(|delay| now_ms + delay.total_millis());
        let ends = self.connections.iter().filter_map(|connection| Some(connection.since_ms? + LONGEST_MS));
        ends.chain(delay).min()
    }

    /// Takes the packets for the guest.
    pub(crate) fn sent(&mut self) -> impl Iterator<Item = Vec<u8>> + '_ {
        self.link.sent.drain(..)
    }

    /// When the guest last sent a packet, ms.
    pub(crate) fn last_ms(&self) -> u64 {
        self.last_ms
    }
}

fn mtu(about: &Documents) -> usize {
    usize::from(about.mtu).clamp(MTUS.0, MTUS.1)
}

fn socket() -> tcp::Socket<'static> {
    let buffer = |bytes| tcp::SocketBuffer::new(vec![0; bytes]);
    let mut socket = tcp::Socket::new(buffer(RECEIVED), buffer(SENT));
    socket.set_nagle_enabled(false);
    // The socket is new and the port is not 0.
    let _ = socket.listen(HTTP);
    socket
}

impl Connection {
    fn new(sockets: &mut SocketSet<'static>) -> Connection {
        let socket = sockets.add(socket());
        Connection { socket, request: Vec::new(), reply: Vec::new(), sent: 0, since_ms: None }
    }

    /// Replaces a closed connection by a listening socket. No TIME-WAIT state is kept: late packets are answered with a
    /// reset, which does not disturb a client that has closed the connection.
    fn renew(&mut self, sockets: &mut SocketSet<'static>) {
        sockets.remove(self.socket);
        *self = Connection::new(sockets);
    }

    fn serve(&mut self, now_ms: u64, sockets: &mut SocketSet<'static>, about: &Documents, counters: &mut Counters) {
        let socket = sockets.get_mut::<tcp::Socket<'_>>(self.socket);
        match socket.state() {
            tcp::State::Listen => return,
            tcp::State::Closed | tcp::State::TimeWait => return self.renew(sockets),
            _ => {}
        }
        let since_ms = *self.since_ms.get_or_insert(now_ms);
        if now_ms >= since_ms + LONGEST_MS {
            counters.expired_connections += 1;
            // The next poll sends the reset, and then renews the connection.
            return socket.abort();
        }
        while self.reply.is_empty() && socket.can_recv() {
            let room = (MAX_REQUEST + 1).saturating_sub(self.request.len());
            let request = &mut self.request;
            let taken = socket.recv(|bytes| {
                let bytes = &bytes[..bytes.len().min(room)];
                request.extend_from_slice(bytes);
                (bytes.len(), ())
            });
            if taken.is_err() {
                break;
            }
            if let Some(reply) = http::answer(&self.request, about) {
                let counter =
                    if reply.is_document { &mut counters.answered_requests } else { &mut counters.refused_requests };
                *counter += 1;
                self.reply = reply.bytes;
                self.request = Vec::new();
            }
        }
        if self.sent < self.reply.len() && socket.can_send() {
            self.sent += socket.send_slice(&self.reply[self.sent..]).unwrap_or(0);
        }
        let is_answered = !self.reply.is_empty() && self.sent == self.reply.len();
        if is_answered || (self.reply.is_empty() && !socket.may_recv() && socket.may_send()) {
            // The reply is sent, or the client has closed the connection without a request.
            socket.close();
        }
    }
}
