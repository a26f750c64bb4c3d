//! Many TCP connections that carry nothing for a long time, and are tested at the end.

use std::io::{ErrorKind, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use rustix::event::{Timespec, epoll};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::netns::Namespace;

/// Timeout of opening a connection, and of an answer at the end.
const PATIENCE: Duration = Duration::from_secs(30);
/// Descriptors of this process besides those of the connections.
const OTHER_DESCRIPTORS: u64 = 1024;
/// Interval at which the server checks whether it must stop.
const POLL: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
/// Bytes of a message: the number of its connection.
const MESSAGE: usize = 8;

/// Open connections. Both ends are in this process.
#[derive(Debug)]
pub struct IdleConnections {
    streams: Vec<TcpStream>,
    server: Option<JoinHandle<Result<()>>>,
    stop: Arc<AtomicBool>,
}

impl IdleConnections {
    /// Opens `count` connections from `client` to a server at `address` in `server`.
    ///
    /// # Errors
    /// A connection cannot be opened, or the process has reached its limit of descriptors.
    pub fn open(client: &Namespace, server: &Namespace, address: SocketAddr, count: u32) -> Result<Self> {
        allow_descriptors(2 * u64::from(count) + OTHER_DESCRIPTORS)?;
        let listener =
            server.enter(move || TcpListener::bind(address).with_context(|| format!("listening at {address}")))?;
        let stop = Arc::new(AtomicBool::new(false));
        let theirs = Arc::clone(&stop);
        let server = server.spawn(move || serve(&listener, &theirs))?;
        let mut connections = Self { streams: Vec::new(), server: Some(server), stop };
        connections.streams = client.enter(move || {
            let open = |number| {
                TcpStream::connect_timeout(&address, PATIENCE)
                    .with_context(|| format!("opening idle connection {number} to {address}"))
            };
            (0..count).map(open).collect::<Result<_>>()
        })?;
        Ok(connections)
    }

    /// Asks on each connection for an echo. Returns how many of them have none, or a wrong one.
    ///
    /// # Errors
    /// The server fails.
    pub fn finish(mut self) -> Result<u64> {
        let works = |(number, stream): (u64, &mut TcpStream)| -> std::io::Result<bool> {
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.write_all(&number.to_be_bytes())?;
            let mut echo = [0; MESSAGE];
            stream.read_exact(&mut echo)?;
            Ok(u64::from_be_bytes(echo) == number)
        };
        let broken = (0..).zip(&mut self.streams).filter_map(|pair| (!works(pair).unwrap_or(false)).then_some(()));
        let broken = broken.count() as u64;
        self.stop.store(true, Ordering::Relaxed);
        let server = self.server.take().context("the server has ended already")?;
        server.join().map_err(|_| anyhow!("the server of idle connections panicked"))??;
        Ok(broken)
    }
}

impl Drop for IdleConnections {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Raises the limit of this process's descriptors to at least `count`.
fn allow_descriptors(count: u64) -> Result<()> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current.is_none_or(|current| current >= count) {
        return Ok(());
    }
    let maximum = maximum.map(|maximum| maximum.max(count));
    setrlimit(Resource::Nofile, Rlimit { current: Some(count), maximum })
        .with_context(|| format!("allowing {count} descriptors (ulimit -n)"))
}

/// Echoes messages on all connections until `stop`.
fn serve(listener: &TcpListener, stop: &AtomicBool) -> Result<()> {
    const LISTENER: u64 = u64::MAX;
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).context("creating an epoll instance")?;
    listener.set_nonblocking(true)?;
    epoll::add(&epoll, listener, epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN)?;
    let mut streams: Vec<Option<TcpStream>> = Vec::new();
    let mut events = [MaybeUninit::uninit(); 256];
    while !stop.load(Ordering::Relaxed) {
        let (ready, _) = match epoll::wait(&epoll, &mut events, Some(&POLL)) {
            Ok(ready) => ready,
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error).context("waiting for messages on idle connections"),
        };
        for event in ready {
            let number = event.data.u64();
            if number == LISTENER {
                match listener.accept() {
                    Ok((stream, _)) => {
                        let data = epoll::EventData::new_u64(streams.len() as u64);
                        epoll::add(&epoll, &stream, data, epoll::EventFlags::IN)?;
                        streams.push(Some(stream));
                    }
                    Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::ConnectionAborted) => {}
                    Err(error) => return Err(error).context("accepting an idle connection"),
                }
            } else if let Some(slot) = streams.get_mut(number as usize)
                && let Some(stream) = slot
            {
                let mut message = [0; MESSAGE];
                let echoed = match stream.read(&mut message) {
                    Ok(0) => false,
                    Ok(length) => stream.write_all(&message[..length]).is_ok(),
                    Err(_) => false,
                };
                if !echoed {
                    // Closing it removes it from the epoll instance.
                    *slot = None;
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both ends in this namespace.
    fn open(count: u32) -> IdleConnections {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let theirs = Arc::clone(&stop);
        let server = std::thread::spawn(move || serve(&listener, &theirs));
        let streams = (0..count).map(|_| TcpStream::connect(address).unwrap()).collect();
        IdleConnections { streams, server: Some(server), stop }
    }

    #[test]
    fn connections_that_work_are_not_counted() {
        assert_eq!(open(20).finish().unwrap(), 0);
    }

    #[test]
    fn connections_that_have_ended_are_counted() {
        let connections = open(20);
        for stream in &connections.streams[5..8] {
            stream.shutdown(std::net::Shutdown::Both).unwrap();
        }
        assert_eq!(connections.finish().unwrap(), 3);
    }

    #[test]
    fn the_limit_of_descriptors_is_raised() {
        let Some(current) = getrlimit(Resource::Nofile).current else { return };
        allow_descriptors(current.saturating_sub(1)).unwrap();
        assert_eq!(getrlimit(Resource::Nofile).current, Some(current));
    }
}
