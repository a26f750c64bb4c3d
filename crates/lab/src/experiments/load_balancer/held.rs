//! Connections through a load balancer that are held while its backends change. Each server sends its name.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::netns::Namespace;
use crate::programs::application::ServerThread;
use crate::topology::Guest;

/// The port of servers and load balancer.
pub(super) const PORT: u16 = 9000;
/// Time limit of connection setup, and of an answer. A connection without an answer counts as lost.
const PATIENCE: Duration = Duration::from_secs(2);
/// How often a server looks for connections and requests.
const TICK: Duration = Duration::from_millis(1);

/// Starts a server that answers each byte of each connection with `name`.
///
/// # Errors
/// It cannot listen.
pub(super) fn serve(guest: &Guest, name: u8) -> Result<ServerThread> {
    let address = SocketAddr::from((guest.address, PORT));
    let listener =
        guest.namespace.enter(move || TcpListener::bind(address).with_context(|| format!("listening at {address}")))?;
    listener.set_nonblocking(true)?;
    ServerThread::start(guest, move |stop| answer(&listener, name, stop))
}

fn answer(listener: &TcpListener, name: u8, stop: &AtomicBool) -> Result<()> {
    let mut streams: Vec<TcpStream> = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        while let Ok((stream, _)) = listener.accept() {
            stream.set_nonblocking(true)?;
            streams.push(stream);
        }
        streams.retain_mut(|stream| match stream.read(&mut [0]) {
            Ok(0) => false,
            Ok(_) => stream.write_all(&[name]).is_ok(),
            Err(error) => error.kind() == ErrorKind::WouldBlock,
        });
        std::thread::sleep(TICK);
    }
    Ok(())
}

/// Open connections.
#[derive(Debug)]
pub(super) struct Held {
    /// Each with its server's name.
    connections: Vec<(TcpStream, u8)>,
}

impl Held {
    /// Opens `count` connections from `client` to `address`, and asks each for its server.
    ///
    /// # Errors
    /// A connection cannot be opened, or is not answered.
    pub(super) fn open(client: &Namespace, address: Ipv4Addr, count: usize) -> Result<Self> {
        let open = move || {
            let open = |_| {
                let mut stream = TcpStream::connect_timeout(&(address, PORT).into(), PATIENCE)?;
                stream.set_read_timeout(Some(PATIENCE))?;
                let name = ask(&mut stream)?;
                Ok((stream, name))
            };
            (0..count).map(open).collect::<std::io::Result<_>>().context("opening connections to hold")
        };
        Ok(Self { connections: client.enter(open)? })
    }

    /// The number of connections to the server `name`.
    pub(super) fn to(&self, name: u8) -> usize {
        self.connections.iter().filter(|(_, server)| *server == name).count()
    }

    /// Asks each connection again. Returns the number of those that their server does not answer any more.
    pub(super) fn moved(&mut self) -> usize {
        self.connections.iter_mut().map(|(stream, name)| usize::from(ask(stream).ok() != Some(*name))).sum()
    }
}

/// The name of a connection's server.
fn ask(stream: &mut TcpStream) -> std::io::Result<u8> {
    stream.write_all(b"?")?;
    let mut name = [0];
    stream.read_exact(&mut name)?;
    Ok(name[0])
}
