//! TCP connections that are opened through gateway pods, one after the other.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};

use crate::netns::Namespace;

/// Time limit of a connection.
const PATIENCE: Duration = Duration::from_secs(10);
/// Delay between two connections.
const PAUSE: Duration = Duration::from_millis(20);
const PORT: u16 = 5001;

/// A thread that opens connections.
#[derive(Debug)]
pub struct Openings {
    stop: Arc<AtomicBool>,
    client: JoinHandle<Result<Opened>>,
}

/// The result.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Opened {
    /// Number of attempts.
    pub tried: u32,
    /// Attempts that did not succeed within ten seconds.
    pub failed: u32,
    /// The longest setup time of the others.
    pub slowest: Duration,
}

impl Openings {
    /// Opens connections from one namespace to the address `server` of another one, until they are stopped.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn start(client: &Namespace, other: &Namespace, server: Ipv4Addr) -> Result<Self> {
        let listener = other.enter(move || Ok(TcpListener::bind((server, PORT))?))?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopping = Arc::clone(&stop);
        let open = move || {
            let mut opened = Opened::default();
            listener.set_nonblocking(true)?;
            while !stopping.load(Ordering::Relaxed) {
                let began = Instant::now();
                opened.tried += 1;
                match TcpStream::connect_timeout(&SocketAddr::from((server, PORT)), PATIENCE) {
                    Ok(_) => opened.slowest = opened.slowest.max(began.elapsed()),
                    Err(_) => opened.failed += 1,
                }
                // Accepted connections are not used, and closed.
                while listener.accept().is_ok() {}
                std::thread::sleep(PAUSE);
            }
            Ok(opened)
        };
        Ok(Openings { stop, client: client.spawn(open)? })
    }

    /// Stops, and returns the result.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn stop(self) -> Result<Opened> {
        self.stop.store(true, Ordering::Relaxed);
        self.client.join().map_err(|_| anyhow!("a panic"))?
    }
}
