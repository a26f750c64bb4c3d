//! Latency of small requests over one TCP connection between two namespaces, one request at a time.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use hdrhistogram::Histogram;
use socket2::{Domain, Protocol, Socket, Type};

use crate::interrupt;
use crate::netns::Namespace;

/// Length of a request, and of its answer, bytes.
pub const MESSAGE_LEN: usize = 64;
/// Timeout for the connection and for a message.
const PATIENCE: Duration = Duration::from_secs(10);
/// Warm-up, which is not measured.
const WARM_UP: Duration = Duration::from_millis(300);

/// Sends requests from `client` to an echo server at `address` in `server` for `duration`: each after the previous
/// answer, or one per `interval`. Returns the latencies, ns.
///
/// # Errors
/// The connection fails or ends, or an answer is wrong.
pub fn run(
    client: &Namespace,
    server: &Namespace,
    address: SocketAddr,
    interval: Option<Duration>,
    duration: Duration,
) -> Result<Histogram<u64>> {
    let (here, there) = (client.stream_protocol(), server.stream_protocol());
    let listener = server.enter(move || listen(address, there).with_context(|| format!("listening at {address}")))?;
    let echo = server.spawn(move || echo(&listener))?;
    let latencies = client.enter(move || ask(address, here, interval, duration))?;
    echo.join().map_err(|_| anyhow!("the echo panicked"))??;
    Ok(latencies)
}

fn listen(address: SocketAddr, protocol: Protocol) -> std::io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(protocol))?;
    // A connection of the last run may be in TIME_WAIT.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(1)?;
    Ok(socket.into())
}

fn connect(address: SocketAddr, protocol: Protocol) -> std::io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(protocol))?;
    socket.connect_timeout(&address.into(), PATIENCE)?;
    Ok(socket.into())
}

fn echo(listener: &TcpListener) -> Result<()> {
    listener.set_nonblocking(true)?;
    let deadline = Instant::now() + PATIENCE;
    let mut stream = loop {
        match listener.accept() {
            Ok((stream, _)) => break stream,
            Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(error) => return Err(error).context("waiting for a connection"),
        }
    };
    prepare(&stream)?;
    let mut message = [0; MESSAGE_LEN];
    loop {
        match stream.read_exact(&mut message) {
            Ok(()) => stream.write_all(&message).context("answering")?,
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) => return Err(error).context("waiting for a request"),
        }
    }
}

fn ask(
    address: SocketAddr,
    protocol: Protocol,
    interval: Option<Duration>,
    duration: Duration,
) -> Result<Histogram<u64>> {
    let mut stream = connect(address, protocol).with_context(|| format!("connecting to {address}"))?;
    prepare(&stream)?;
    let mut latencies = Histogram::new_with_bounds(1, 60_000_000_000, 3).context("creating a histogram")?;
    let (started, mut number) = (Instant::now(), 0u64);
    let mut due = started;
    while started.elapsed() < WARM_UP + duration {
        interrupt::check()?;
        if let Some(interval) = interval {
            due += interval;
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
        }
        let mut message = [0; MESSAGE_LEN];
        message[..8].copy_from_slice(&number.to_le_bytes());
        let sent = Instant::now();
        stream.write_all(&message).context("asking")?;
        let mut answer = [0; MESSAGE_LEN];
        stream.read_exact(&mut answer).context("waiting for an answer")?;
        let latency = sent.elapsed();
        if answer != message {
            bail!("request {number} got a wrong answer");
        }
        if started.elapsed() > WARM_UP {
            latencies.saturating_record(u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX));
        }
        number += 1;
    }
    Ok(latencies)
}

fn prepare(stream: &TcpStream) -> Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_request_is_answered_and_measured() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = std::thread::spawn(move || echo(&listener));
        let duration = Duration::from_millis(100);
        let latencies = ask(address, Protocol::TCP, Some(Duration::from_millis(1)), duration).unwrap();
        server.join().unwrap().unwrap();
        // One request was due each millisecond. On a busy machine those of the warm-up may be late, and count.
        let due = (WARM_UP + duration).as_millis() as u64 + 1;
        assert!((1..=due).contains(&latencies.len()), "{} of {due}", latencies.len());
        assert!(latencies.min() > 0);
    }

    #[test]
    fn a_wrong_answer_is_detected() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.read_exact(&mut [0; MESSAGE_LEN]).unwrap();
            stream.write_all(&[9; MESSAGE_LEN]).unwrap();
        });
        assert!(ask(address, Protocol::TCP, None, Duration::from_millis(100)).is_err());
        server.join().unwrap();
    }
}
