//! Requests over one TCP connection to an echo server, one at a time.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};

use super::key_value_client::Request;
use crate::netns::Namespace;

/// Bytes of a request.
const BYTES: usize = 1000;
/// Time without an answer after which the connection counts as broken.
const BROKEN: Duration = Duration::from_secs(30);
/// Pause between an answer and the next request.
const PAUSE: Duration = Duration::from_millis(1);

/// The running client.
#[derive(Debug)]
pub struct TcpRequests {
    asking: JoinHandle<Result<Answers>>,
    stop: Arc<AtomicBool>,
}

/// The results.
#[derive(Debug, Default)]
pub struct Answers {
    /// All answered requests, in order.
    pub requests: Vec<Request>,
    /// Whether the connection ended, or an answer was wrong or did not arrive for 30 s.
    pub broken: bool,
}

impl Answers {
    /// The longest time that a request took.
    pub fn longest(&self) -> Duration {
        self.requests.iter().map(|request| request.ended - request.due).max().unwrap_or_default()
    }
}

impl TcpRequests {
    /// Connects from `client` to the echo server, which may start within 30 s.
    ///
    /// # Errors
    /// The namespace cannot be entered.
    pub fn start(client: &Namespace, to: SocketAddr) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let theirs = Arc::clone(&stop);
        let asking = client.spawn(move || {
            let deadline = Instant::now() + BROKEN;
            let mut stream = loop {
                match TcpStream::connect_timeout(&to, BROKEN) {
                    Ok(stream) => break stream,
                    Err(error) if Instant::now() > deadline => return Err(error).context("connecting to the machine"),
                    Err(_) => thread::sleep(Duration::from_millis(20)),
                }
            };
            stream.set_read_timeout(Some(BROKEN))?;
            stream.set_nodelay(true)?;
            let (mut random, mut answers) = (fastrand::Rng::with_seed(1), Answers::default());
            let (mut asked, mut answer) = ([0; BYTES], [0; BYTES]);
            while !theirs.load(Ordering::Relaxed) {
                random.fill(&mut asked);
                let due = Instant::now();
                if stream.write_all(&asked).and_then(|()| stream.read_exact(&mut answer)).is_err() || asked != answer {
                    answers.broken = true;
                    break;
                }
                answers.requests.push(Request { client: 0, due, ended: Instant::now(), answered: true });
                thread::sleep(PAUSE);
            }
            Ok(answers)
        })?;
        Ok(Self { asking, stop })
    }

    /// Ends the client.
    ///
    /// # Errors
    /// It could not connect.
    pub fn finish(self) -> Result<Answers> {
        self.stop.store(true, Ordering::Relaxed);
        self.asking.join().map_err(|_| anyhow!("the thread that asks has panicked"))?
    }
}
