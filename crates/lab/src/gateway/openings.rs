//! TCP connections that are opened through gateway pods, one after the other.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};

use crate::netns::Namespace;

/// How long one may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// Between two of them.
const PAUSE: Duration = Duration::from_millis(20);
const PORT: u16 = 5001;

/// Connections that are being opened.
#[derive(Debug)]
pub struct Openings {
    stop: Arc<AtomicBool>,
    client: JoinHandle<Result<Opened>>,
}

/// What became of them.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Opened {
    /// Connections that were tried.
    pub tried: u32,
    /// Of these, connections that were not open within ten seconds.
    pub failed: u32,
    /// How long the slowest of the others took.
    pub slowest: Duration,
}

impl Openings {
    /// Opens them from one namespace to the address `server` of another one, until they are stopped.
    ///
    /// # Errors
    /// The system's.
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
                // Nobody needs them: what is open is closed.
                while listener.accept().is_ok() {}
                std::thread::sleep(PAUSE);
            }
            Ok(opened)
        };
        Ok(Openings { stop, client: client.spawn(open)? })
    }

    /// Ends them, and says what became of them.
    ///
    /// # Errors
    /// The system's.
    pub fn stop(self) -> Result<Opened> {
        self.stop.store(true, Ordering::Relaxed);
        self.client.join().map_err(|_| anyhow!("a panic"))?
    }
}
