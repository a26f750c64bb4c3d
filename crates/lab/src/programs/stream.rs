//! Byte streams with content that the receiver knows in advance.
//!
//! Sender and receiver generate the same pseudo-random bytes from a seed, and the receiver compares them with the
//! received bytes. It detects a byte that is lost, repeated, moved or changed at once, with its position.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use fastrand::Rng;

/// Bytes per write, and granularity of the rate limit.
const BLOCK: usize = 32 * 1024;
/// A stream without progress for this long counts as broken.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);

/// The result of a receiver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Received {
    /// Bytes received until the end of the stream or the first wrong byte.
    pub bytes: u64,
    /// Position of the first wrong byte.
    pub first_wrong_byte: Option<u64>,
}

/// Sends until `stop`, at most `bytes_per_s`; returns the number of bytes sent.
pub fn send(to: SocketAddr, seed: u64, bytes_per_s: f64, stop: &AtomicBool) -> Result<u64> {
    let mut stream = TcpStream::connect_timeout(&to, Duration::from_secs(10)).context("connecting a stream")?;
    stream.set_write_timeout(Some(STALL_TIMEOUT))?;
    let mut generator = Generator::new(seed);
    let mut block = vec![0; BLOCK];
    let mut sent = 0;
    let started = Instant::now();
    while !stop.load(Ordering::Relaxed) {
        generator.fill(&mut block);
        stream.write_all(&block).with_context(|| format!("sending after {sent} bytes"))?;
        sent += block.len() as u64;
        let due = started + Duration::from_secs_f64(sent as f64 / bytes_per_s);
        if let Some(wait) = due.checked_duration_since(Instant::now()) {
            std::thread::sleep(wait.min(Duration::from_secs(1)));
        }
    }
    stream.shutdown(std::net::Shutdown::Write).context("ending a stream")?;
    // The receiver closes its side once it has received everything.
    stream.set_read_timeout(Some(STALL_TIMEOUT))?;
    match stream.read(&mut [0; 1]) {
        Ok(0) => Ok(sent),
        Ok(_) => bail!("the receiver sent data"),
        Err(error) => Err(error).context("waiting for the receiver's end"),
    }
}

/// Accepts one stream and compares it until its end.
pub fn receive(listener: &TcpListener, seed: u64) -> Result<Received> {
    let mut stream = accept(listener)?;
    stream.set_read_timeout(Some(STALL_TIMEOUT))?;
    let mut generator = Generator::new(seed);
    let mut buffer = vec![0; BLOCK];
    let mut expected = vec![0; BLOCK];
    let mut bytes = 0;
    loop {
        let length = match stream.read(&mut buffer) {
            Ok(0) => return Ok(Received { bytes, first_wrong_byte: None }),
            Ok(length) => length,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(error).with_context(|| format!("receiving after {bytes} bytes")),
        };
        generator.fill(&mut expected[..length]);
        if buffer[..length] != expected[..length] {
            let position = buffer.iter().zip(&expected).take_while(|(a, b)| a == b).count() as u64;
            return Ok(Received { bytes: bytes + position, first_wrong_byte: Some(bytes + position) });
        }
        bytes += length as u64;
    }
}

/// Accepts a connection, or fails after a timeout.
fn accept(listener: &TcpListener) -> Result<TcpStream> {
    listener.set_nonblocking(true)?;
    let deadline = Instant::now() + STALL_TIMEOUT;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < deadline => {
                crate::interrupt::sleep(Duration::from_millis(5))?;
            }
            Err(error) => return Err(error).context("accepting a stream"),
        }
    }
}

/// The bytes of a stream, generated in pieces of any size.
struct Generator {
    random: Rng,
    word: [u8; 8],
    used: usize,
}

impl Generator {
    fn new(seed: u64) -> Self {
        Self { random: Rng::with_seed(seed), word: [0; 8], used: 8 }
    }

    fn fill(&mut self, mut buffer: &mut [u8]) {
        let left = (8 - self.used).min(buffer.len());
        buffer[..left].copy_from_slice(&self.word[self.used..self.used + left]);
        self.used += left;
        buffer = &mut buffer[left..];
        let mut words = buffer.chunks_exact_mut(8);
        for word in &mut words {
            word.copy_from_slice(&self.random.u64(..).to_le_bytes());
        }
        let rest = words.into_remainder();
        if !rest.is_empty() {
            self.word = self.random.u64(..).to_le_bytes();
            self.used = rest.len();
            rest.copy_from_slice(&self.word[..self.used]);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn the_size_of_pieces_does_not_change_the_stream() {
        let mut whole = vec![0; 1000];
        Generator::new(7).fill(&mut whole);
        let mut generator = Generator::new(7);
        let mut pieces = vec![0; 1000];
        let mut rest = pieces.as_mut_slice();
        for size in [1, 2, 3, 5, 8, 13, 21, 64, 100, 7, 1, 1, 1].into_iter().cycle() {
            let size = size.min(rest.len());
            let (piece, next) = rest.split_at_mut(size);
            generator.fill(piece);
            rest = next;
            if rest.is_empty() {
                break;
            }
        }
        assert_eq!(whole, pieces);
    }

    #[test]
    fn a_stream_arrives_and_a_wrong_one_is_detected() {
        for (seed, correct) in [(1, true), (2, false)] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = listener.local_addr().unwrap();
            let receiver = std::thread::spawn(move || receive(&listener, 1).unwrap());
            let stop = Arc::new(AtomicBool::new(false));
            let sender = {
                let stop = Arc::clone(&stop);
                std::thread::spawn(move || send(address, seed, 1e8, &stop))
            };
            std::thread::sleep(Duration::from_millis(100));
            stop.store(true, Ordering::Relaxed);
            let sent = sender.join().unwrap();
            let received = receiver.join().unwrap();
            if correct {
                assert_eq!(received, Received { bytes: sent.unwrap(), first_wrong_byte: None });
            } else {
                assert_eq!(received, Received { bytes: 0, first_wrong_byte: Some(0) });
            }
        }
    }
}
