//! Requests and answers over plain UDP, at a fixed rate. Lost datagrams are counted, not retransmitted.

use std::io::ErrorKind;
use std::net::UdpSocket;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};

use crate::programs::application::{Application, Load, Measurement, Server, ServerThread, due, latencies, pace};
use crate::topology::Guest;

/// The port of the server.
const PORT: u16 = 7007;
/// Request rate, 1/s.
const PER_S: f64 = 4000.0;
/// Length of a request, and of its answer, bytes.
const LENGTH: usize = 200;
/// How long to wait for answers after the last request; later ones count as lost.
const PATIENCE: Duration = Duration::from_secs(1);
/// Timeout of a single receive, after which other conditions are checked.
const WAIT: Duration = Duration::from_millis(100);

/// A server that echoes datagrams.
#[derive(Debug, Clone, Copy)]
pub struct Datagrams;

impl Application for Datagrams {
    fn serve(&self, guest: &Guest, _files: &Path, _logs: &Path) -> Result<Box<dyn Server>> {
        let address = guest.address;
        let socket = guest.namespace.enter(move || socket(address))?;
        Ok(Box::new(ServerThread::start(guest, move |stop| echo(&socket, stop))?))
    }

    fn load(&self, load: &Load<'_>) -> Result<Measurement> {
        let (server, duration) = (load.server.address, load.duration);
        load.client.namespace.enter(move || {
            let socket = UdpSocket::bind("0.0.0.0:0").context("opening a UDP socket")?;
            socket.connect((server, PORT)).context("connecting a UDP socket")?;
            run(&socket, PER_S, duration)
        })
    }
}

fn socket(address: std::net::Ipv4Addr) -> Result<UdpSocket> {
    UdpSocket::bind((address, PORT)).with_context(|| format!("listening to UDP port {PORT} of {address}"))
}

fn echo(socket: &UdpSocket, stop: &AtomicBool) -> Result<()> {
    socket.set_read_timeout(Some(WAIT))?;
    let mut buffer = [0; 2 * LENGTH];
    while !stop.load(Ordering::Relaxed) {
        match socket.recv_from(&mut buffer) {
            // An answer that the socket cannot send counts as lost.
            Ok((length, from)) => drop(socket.send_to(&buffer[..length], from)),
            Err(error) if is_wait(&error) => {}
            Err(error) => return Err(error).context("waiting for datagrams"),
        }
    }
    Ok(())
}

/// Sends requests from a second thread, and receives answers on this one.
fn run(socket: &UdpSocket, per_s: f64, duration: Duration) -> Result<Measurement> {
    let count = (duration.as_secs_f64() * per_s) as u32;
    let mut answered = vec![false; count as usize];
    let mut latency_us = latencies()?;
    let asking = socket.try_clone().context("sharing a socket")?;
    socket.set_read_timeout(Some(WAIT))?;
    let start = Instant::now();
    // The thread inherits this thread's namespace and processor.
    let asker = std::thread::spawn(move || {
        pace(start, per_s, duration, |number, _| {
            // A request that the socket refuses counts as lost.
            let _ = asking.send(&request(number));
            Ok(())
        })
    });
    let end = start + duration + PATIENCE;
    let mut buffer = [0; 2 * LENGTH];
    let mut missing = count;
    while missing > 0 && Instant::now() < end {
        let length = match socket.recv(&mut buffer) {
            Ok(length) => length,
            Err(error) if is_wait(&error) || error.kind() == ErrorKind::ConnectionRefused => continue,
            Err(error) => return Err(error).context("waiting for answers"),
        };
        let now = Instant::now();
        let number = buffer.first_chunk().map_or(0, |bytes| u32::from_be_bytes(*bytes));
        ensure!(buffer[..length] == request(number) && number < count, "an answer without a request");
        // A duplicate is ignored.
        if !std::mem::replace(&mut answered[number as usize], true) {
            missing -= 1;
            let latency = now.saturating_duration_since(due(start, per_s, number));
            latency_us.saturating_record((latency.as_micros() as u64).max(1));
        }
    }
    asker.join().map_err(|_| anyhow!("the thread that sends requests panicked"))??;
    ensure!(!latency_us.is_empty(), "none of {count} datagrams was answered");
    Ok(Measurement {
        requests_per_s: latency_us.len() as f64 / duration.as_secs_f64(),
        paced_requests_per_s: Some(per_s),
        latency_us,
        lost_requests: u64::from(missing),
    })
}

/// The request's number, and bytes that depend on it.
fn request(number: u32) -> [u8; LENGTH] {
    let mut bytes = [0; LENGTH];
    bytes
        .iter_mut()
        .enumerate()
        .for_each(|(index, byte)| *byte = (number as usize).wrapping_mul(31).wrapping_add(index) as u8);
    bytes[..4].copy_from_slice(&number.to_be_bytes());
    bytes
}

fn is_wait(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The result of a load against a server that calls `answer` for each datagram.
    fn against(answer: impl Fn(&UdpSocket, &[u8]) + Send + 'static) -> Result<Measurement> {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let client = UdpSocket::bind("127.0.0.1:0").unwrap();
        client.connect(server.local_addr().unwrap()).unwrap();
        server.connect(client.local_addr().unwrap()).unwrap();
        server.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
        std::thread::spawn(move || {
            let mut buffer = [0; 2 * LENGTH];
            while let Ok(length) = server.recv(&mut buffer) {
                answer(&server, &buffer[..length]);
            }
        });
        run(&client, 1000.0, Duration::from_millis(200))
    }

    fn number(datagram: &[u8]) -> u32 {
        u32::from_be_bytes(*datagram.first_chunk().unwrap())
    }

    #[test]
    fn every_answer_counts_once() {
        let measured = against(|socket, datagram| {
            for _ in 0..2 {
                socket.send(datagram).unwrap();
            }
        })
        .unwrap();
        assert_eq!((measured.latency_us.len(), measured.lost_requests), (200, 0));
        assert_eq!(measured.requests_per_s, 1000.0);
    }

    #[test]
    fn lost_requests_are_counted_and_lateness_is_latency() {
        let measured = against(|socket, datagram| {
            if number(datagram) == 100 {
                std::thread::sleep(Duration::from_millis(50));
            }
            if number(datagram) % 10 != 3 {
                socket.send(datagram).unwrap();
            }
        })
        .unwrap();
        assert_eq!((measured.latency_us.len(), measured.lost_requests), (180, 20));
        // Some 45 more requests were due in these 50 ms.
        assert!(measured.latency_us.value_at_quantile(0.9) > 15_000, "{}", measured.latency_us.value_at_quantile(0.9));
    }

    #[test]
    fn wrong_answers_and_silence_are_errors() {
        let wrong = against(|socket, datagram| {
            let mut datagram = datagram.to_vec();
            datagram[20] ^= 1;
            socket.send(&datagram).unwrap();
        });
        assert!(wrong.unwrap_err().to_string().contains("without a request"));
        assert!(against(|_, _| {}).unwrap_err().to_string().contains("none of 200"));
    }
}
