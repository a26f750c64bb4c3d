//! Connection setup over TCP: one message in each direction. The stream then stays open, to detect that the peer is
//! gone.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use bifrost_wire::rdm::Setup;
use rustix::io::Errno;
use socket2::{Domain, Protocol, Socket, Type};

/// Maximum number of peers whose first message is incomplete.
const PENDING_MAX: usize = 64;
/// Time limit for a peer's message.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(5);

/// A peer whose message is incomplete.
#[derive(Debug)]
struct Pending {
    stream: TcpStream,
    peer: SocketAddr,
    bytes: [u8; Setup::MAX_LEN],
    len: usize,
    until: Instant,
}

/// The bytes of a setup message, and its length.
pub(crate) type SetupBytes = ([u8; Setup::MAX_LEN], usize);

/// A socket on which peers set up connections.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
    pending: Vec<Pending>,
}

impl Listener {
    /// Listens.
    pub(crate) fn bind(address: SocketAddr) -> io::Result<Self> {
        let socket = TcpListener::bind(address)?;
        socket.set_nonblocking(true)?;
        Ok(Self { socket, pending: Vec::new() })
    }

    /// The address, including the assigned port if 0 was requested.
    ///
    /// # Errors
    /// When the system call fails.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// The next peer whose message is complete. Slow peers do not delay others, and are dropped after [`TIMEOUT`].
    pub(crate) fn next(&mut self) -> io::Result<Option<(TcpStream, SocketAddr, SetupBytes)>> {
        while self.pending.len() < PENDING_MAX {
            match self.socket.accept() {
                Ok((stream, peer)) => {
                    stream.set_nonblocking(true)?;
                    let until = Instant::now() + TIMEOUT;
                    self.pending.push(Pending { stream, peer, bytes: [0; Setup::MAX_LEN], len: 0, until });
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // The peer has already closed.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => return Err(error),
            }
        }
        let mut at = 0;
        while let Some(pending) = self.pending.get_mut(at) {
            let due = Setup::len_of(&pending.bytes[..pending.len]);
            match pending.stream.read(&mut pending.bytes[pending.len..due]) {
                Ok(count) if count > 0 => {
                    pending.len += count;
                    if pending.len == Setup::len_of(&pending.bytes[..pending.len]) {
                        let done = self.pending.swap_remove(at);
                        return Ok(Some((done.stream, canonical(done.peer), (done.bytes, done.len))));
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < pending.until => at += 1,
                _ => drop(self.pending.swap_remove(at)),
            }
        }
        Ok(None)
    }
}

/// A socket bound to the address in the setup message, because peers check it and a host may have several addresses.
fn socket_at(local: IpAddr, peer: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(peer), Type::STREAM, Some(Protocol::TCP))?;
    if local.is_ipv4() == peer.is_ipv4() {
        socket.bind(&SocketAddr::new(local, 0).into())?;
    }
    Ok(socket)
}

/// Sends a message and waits for the answer.
pub(crate) fn exchange(
    local: IpAddr,
    peer: SocketAddr,
    hello: &Setup,
    timeout: Duration,
) -> io::Result<(TcpStream, SetupBytes)> {
    let socket = socket_at(local, peer)?;
    socket.connect_timeout(&peer.into(), timeout)?;
    let mut stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))?;
    send(&mut stream, hello)?;
    let mut answer = [0; Setup::MAX_LEN];
    stream.read_exact(&mut answer[..Setup::LEN])?;
    let len = Setup::len_of(&answer);
    stream.read_exact(&mut answer[Setup::LEN..len])?;
    stream.set_nonblocking(true)?;
    Ok((stream, (answer, len)))
}

/// Begins to open a stream without blocking; [`is_open`] returns whether it is open.
pub(crate) fn open(local: IpAddr, peer: SocketAddr) -> io::Result<TcpStream> {
    let socket = socket_at(local, peer)?;
    socket.set_nonblocking(true)?;
    match socket.connect(&peer.into()) {
        Err(error) if error.raw_os_error() != Some(Errno::INPROGRESS.raw_os_error()) => Err(error),
        _ => Ok(socket.into()),
    }
}

/// Whether a stream of [`open`] is established.
pub(crate) fn is_open(stream: &TcpStream) -> io::Result<bool> {
    if let Some(error) = stream.take_error()? {
        return Err(error);
    }
    match stream.peer_addr() {
        Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(false),
        other => other.map(|_| true),
    }
}

/// Sends a message of at most 100 bytes, which fits into the buffer of a new stream.
pub(crate) fn send(stream: &mut TcpStream, setup: &Setup) -> io::Result<()> {
    let mut bytes = [0; Setup::MAX_LEN];
    let len = setup.emit_into(&mut bytes);
    stream.write_all(&bytes[..len])
}

/// Whether the peer has closed its end of a stream, on which no more data is expected.
pub(crate) fn is_gone(stream: &TcpStream) -> bool {
    let mut byte = [0];
    match stream.peek(&mut byte) {
        Ok(_) => true,
        Err(error) => !matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted),
    }
}

/// Converts mapped addresses to IPv4.
fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// Whether a setup message names its own source address, so that a peer cannot direct data to others.
pub(crate) fn is_own_address(setup: &Setup, peer: SocketAddr) -> bool {
    IpAddr::V6(setup.address).to_canonical() == peer.ip().to_canonical()
}
