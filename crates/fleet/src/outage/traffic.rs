//! Traffic between guests, in which each loss is noticed: datagrams that are echoed, and questions over one TCP
//! connection.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use crate::net::Net;

/// Time between datagrams, and between questions.
const DATAGRAMS: Duration = Duration::from_millis(5);
const QUESTIONS: Duration = Duration::from_millis(20);
/// How long the first answer may take.
const FIRST: Duration = Duration::from_secs(30);
/// How long the last answers may take.
const REST: Duration = Duration::from_secs(2);
/// How long an answer to a question may take before the connection counts as broken.
const ANSWER: Duration = Duration::from_secs(20);
const WAIT: Duration = Duration::from_millis(100);
const UDP_PORT: u16 = 7007;
const TCP_PORT: u16 = 7008;

/// What was counted.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counted {
    /// Datagrams that were sent, and those whose echo never came.
    pub(super) datagrams: u64,
    pub(super) lost_datagrams: u64,
    /// Longest time between two echoes.
    pub(super) longest_silence: Duration,
    /// Questions that were answered, and those that were not.
    pub(super) questions: u64,
    pub(super) unanswered: u64,
    /// Longest time until an answer.
    pub(super) longest_answer: Duration,
}

impl Counted {
    pub(super) fn and(self, other: Counted) -> Counted {
        Counted {
            datagrams: self.datagrams + other.datagrams,
            lost_datagrams: self.lost_datagrams + other.lost_datagrams,
            longest_silence: self.longest_silence.max(other.longest_silence),
            questions: self.questions + other.questions,
            unanswered: self.unanswered + other.unanswered,
            longest_answer: self.longest_answer.max(other.longest_answer),
        }
    }
}

/// Traffic of a guest to another one.
#[derive(Debug)]
pub(super) struct Traffic {
    stop: Arc<AtomicBool>,
    clients: Vec<JoinHandle<Result<Counted>>>,
    servers: Vec<JoinHandle<Result<()>>>,
}

impl Traffic {
    /// Starts to send, when the first answers have come.
    pub(super) fn start(client: &Net, server: &Net, to: &str) -> Result<Traffic> {
        let [datagrams, questions]: [SocketAddr; 2] =
            [format!("{to}:{UDP_PORT}").parse()?, format!("{to}:{TCP_PORT}").parse()?];
        let stop = Arc::new(AtomicBool::new(false));
        let of = || Arc::clone(&stop);
        let (echoing, answering) = (of(), of());
        let servers = vec![
            server.spawn(move || echo(datagrams, &echoing))?,
            server.spawn(move || answer(questions, &answering))?,
        ];
        let mut first = UdpSocketOf::new(client, datagrams)?;
        first.wait_for_echo()?;
        let (sending, asking) = (of(), of());
        let socket = first.0;
        let clients =
            vec![client.spawn(move || send(&socket, &sending))?, client.spawn(move || ask(questions, &asking))?];
        Ok(Traffic { stop, clients, servers })
    }

    /// Ends it, and waits for the last answers.
    pub(super) fn stop(self) -> Result<Counted> {
        self.stop.store(true, Ordering::SeqCst);
        let mut counted = Counted::default();
        for client in self.clients {
            counted = counted.and(client.join().map_err(|_| anyhow::anyhow!("a client has panicked"))??);
        }
        for server in self.servers {
            server.join().map_err(|_| anyhow::anyhow!("a server has panicked"))??;
        }
        Ok(counted)
    }
}

/// A client's socket, which is connected.
struct UdpSocketOf(UdpSocket);

impl UdpSocketOf {
    fn new(client: &Net, to: SocketAddr) -> Result<UdpSocketOf> {
        let begin = Instant::now();
        let make = client.spawn(move || {
            // The guest's interface may not be there yet.
            loop {
                let socket = UdpSocket::bind("0.0.0.0:0")?;
                match socket.connect(to) {
                    Ok(()) => return Ok(socket),
                    Err(_) if begin.elapsed() < FIRST => std::thread::sleep(WAIT),
                    Err(error) => return Err(error).context("a guest has no route to another one"),
                }
            }
        })?;
        let socket = make.join().map_err(|_| anyhow::anyhow!("a client has panicked"))??;
        socket.set_read_timeout(Some(WAIT))?;
        Ok(UdpSocketOf(socket))
    }

    /// The path is there, and so are the neighbours' addresses.
    fn wait_for_echo(&mut self) -> Result<()> {
        let begin = Instant::now();
        let mut buffer = [0; 64];
        loop {
            let _ = self.0.send(&u64::MAX.to_le_bytes());
            match self.0.recv(&mut buffer) {
                Ok(_) => return Ok(()),
                Err(_) => ensure!(begin.elapsed() < FIRST, "guests do not reach each other after {FIRST:?}"),
            }
        }
    }
}

fn is_late(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

fn echo(at: SocketAddr, stop: &AtomicBool) -> Result<()> {
    let socket = bound(|| UdpSocket::bind(at))?;
    socket.set_read_timeout(Some(WAIT))?;
    let mut buffer = [0; 64];
    // It runs until the clients have waited for the last echoes.
    let mut ends = None;
    while ends.is_none_or(|ends| Instant::now() < ends) {
        if stop.load(Ordering::SeqCst) && ends.is_none() {
            ends = Some(Instant::now() + REST + WAIT);
        }
        match socket.recv_from(&mut buffer) {
            Ok((len, from)) => drop(socket.send_to(&buffer[..len], from)),
            Err(error) if is_late(&error) => {}
            Err(error) => return Err(error).context("an echo"),
        }
    }
    Ok(())
}

/// A socket at an address that the guest may not have yet.
fn bound<T>(mut bind: impl FnMut() -> std::io::Result<T>) -> Result<T> {
    let begin = Instant::now();
    loop {
        match bind() {
            Ok(socket) => return Ok(socket),
            Err(_) if begin.elapsed() < FIRST => std::thread::sleep(WAIT),
            Err(error) => return Err(error).context("a guest's address"),
        }
    }
}

fn send(socket: &UdpSocket, stop: &AtomicBool) -> Result<Counted> {
    let mut counted = Counted::default();
    let mut came: Vec<bool> = Vec::new();
    let (mut next, mut last) = (Instant::now(), Instant::now());
    let mut buffer = [0; 64];
    let mut take = |came: &mut Vec<bool>, patience: Duration| -> Result<()> {
        socket.set_read_timeout(Some(patience.max(Duration::from_micros(100))))?;
        match socket.recv(&mut buffer) {
            Ok(_) => {
                let number = u64::from_le_bytes(buffer[..8].try_into().unwrap_or_default());
                if let Some(came) = usize::try_from(number).ok().and_then(|number| came.get_mut(number)) {
                    *came = true;
                    counted.longest_silence = counted.longest_silence.max(last.elapsed());
                    last = Instant::now();
                }
                Ok(())
            }
            Err(error) if is_late(&error) => Ok(()),
            Err(error) => Err(error).context("an echo"),
        }
    };
    while !stop.load(Ordering::SeqCst) {
        // A datagram that cannot be sent is lost.
        let _ = socket.send(&(came.len() as u64).to_le_bytes());
        came.push(false);
        next += DATAGRAMS;
        while let Some(rest) = next.checked_duration_since(Instant::now()) {
            take(&mut came, rest)?;
        }
    }
    let until = Instant::now() + REST;
    while came.iter().any(|came| !came) && Instant::now() < until {
        take(&mut came, WAIT)?;
    }
    counted.datagrams = came.len() as u64;
    counted.lost_datagrams = came.iter().filter(|came| !**came).count() as u64;
    Ok(counted)
}

fn answer(at: SocketAddr, stop: &AtomicBool) -> Result<()> {
    let listener = bound(|| TcpListener::bind(at))?;
    listener.set_nonblocking(true)?;
    while !stop.load(Ordering::SeqCst) {
        match listener.accept() {
            Ok((stream, _)) => return converse(stream),
            Err(error) if is_late(&error) => std::thread::sleep(Duration::from_millis(1)),
            Err(error) => return Err(error).context("a server"),
        }
    }
    Ok(())
}

/// Answers until the client closes the connection.
fn converse(mut stream: TcpStream) -> Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    let mut question = [0; 100];
    while stream.read_exact(&mut question).is_ok() {
        stream.write_all(&question)?;
    }
    Ok(())
}

fn ask(to: SocketAddr, stop: &AtomicBool) -> Result<Counted> {
    let mut stream = bound(|| TcpStream::connect_timeout(&to, FIRST))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(ANSWER))?;
    let mut counted = Counted::default();
    let mut answer = [0; 100];
    while !stop.load(Ordering::SeqCst) {
        let begin = Instant::now();
        if stream.write_all(&[7; 100]).and_then(|()| stream.read_exact(&mut answer)).is_err() {
            counted.unanswered += 1;
            return Ok(counted);
        }
        counted.questions += 1;
        counted.longest_answer = counted.longest_answer.max(begin.elapsed());
        std::thread::sleep(QUESTIONS.saturating_sub(begin.elapsed()));
    }
    Ok(counted)
}
