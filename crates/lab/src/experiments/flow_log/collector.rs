//! An IPFIX collector that writes received messages to a file, and `tshark`, which reads the file.

use std::fs::{self, File};
use std::io::{BufWriter, ErrorKind, Write as _};
use std::net::{Ipv4Addr, UdpSocket};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};

use crate::command;
use crate::topology::Host;

/// The collector's UDP port (RFC 7011, section 10.3.4).
pub(super) const PORT: u16 = 4739;
/// Receive buffer, bytes: messages of a few seconds.
const BUFFER: usize = 64 << 20;
const TICK: Duration = Duration::from_millis(100);

/// A running collector. Dropping it ends it.
#[derive(Debug)]
pub(super) struct Collector {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<()>>>,
}

/// The result of `tshark`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Collected {
    /// Records.
    pub(super) records: u64,
    /// Their packets.
    pub(super) packets: u64,
}

impl Collector {
    /// Starts a collector at the first underlay address of `host` that writes into the file `path`.
    ///
    /// # Errors
    /// The socket or the file cannot be opened.
    pub(super) fn start(host: &Host, path: &Path) -> Result<Self> {
        let address = (host.underlay[0], PORT);
        let socket = host.namespace.enter(move || {
            let socket = UdpSocket::bind(address).context("listening for IPFIX")?;
            rustix::net::sockopt::set_socket_recv_buffer_size_force(&socket, BUFFER)?;
            Ok(socket)
        })?;
        socket.set_read_timeout(Some(TICK))?;
        let mut file = BufWriter::new(File::create(path).with_context(|| format!("creating {}", path.display()))?);
        let stop: Arc<AtomicBool> = Arc::default();
        let own_stop = Arc::clone(&stop);
        let thread = host.namespace.spawn(move || {
            file.write_all(&HEADER)?;
            let mut message = [0; 65_536];
            loop {
                match socket.recv(&mut message) {
                    Ok(length) => file.write_all(&record(&message[..length]))?,
                    Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                        if own_stop.load(Ordering::Relaxed) {
                            return file.flush().context("writing IPFIX messages");
                        }
                    }
                    Err(error) => return Err(error).context("waiting for IPFIX messages"),
                }
            }
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }

    /// Stops the collector once no more messages arrive.
    ///
    /// # Errors
    /// A message could not be received or written.
    pub(super) fn finish(mut self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().context("a collector ends once")?;
        thread.join().map_err(|_| anyhow!("the collector panicked"))?
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// The header of a pcap file with timestamps in microseconds: version 2.4, no time zone, LINKTYPE_RAW.
const HEADER: [u8; 24] = [0xa1, 0xb2, 0xc3, 0xd4, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0, 0, 101];

/// A packet in such a file: reconstructed headers, as far as `tshark` needs them, and `message`.
fn record(message: &[u8]) -> Vec<u8> {
    let length = 28 + message.len() as u32;
    let mut bytes = Vec::with_capacity(16 + length as usize);
    [0, 0, length, length].iter().for_each(|word: &u32| bytes.extend(word.to_be_bytes()));
    bytes.extend([0x45, 0]);
    bytes.extend((length as u16).to_be_bytes());
    bytes.extend([0, 0, 0, 0, 64, 17, 0, 0]);
    [Ipv4Addr::LOCALHOST; 2].iter().for_each(|address| bytes.extend(address.octets()));
    [PORT, PORT, length as u16 - 20, 0].iter().for_each(|word| bytes.extend(word.to_be_bytes()));
    bytes.extend(message);
    bytes
}

/// Reads the file of a [`Collector`] with `tshark`.
///
/// # Errors
/// `tshark` is missing or fails, or its output is malformed.
pub(super) fn read(path: &Path) -> Result<Collected> {
    let file = path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))?;
    let decode = format!("udp.port=={PORT},cflow");
    let fields = ["-T", "fields", "-e", "cflow.protocol", "-e", "cflow.packets"];
    let text = command::run("tshark", &[&["-n", "-d", &decode, "-r", file][..], &fields].concat())?;
    fs::remove_file(path).with_context(|| format!("removing {}", path.display()))?;
    parse(&text)
}

/// Each line has two fields: the protocols and the numbers of packets of a message's records. A record has two numbers
/// of packets, one for each direction.
fn parse(text: &str) -> Result<Collected> {
    let mut collected = Collected::default();
    for line in text.lines() {
        let (protocols, packets) = line.split_once('\t').with_context(|| format!("no two fields: {line}"))?;
        collected.records += protocols.split(',').filter(|protocol| !protocol.is_empty()).count() as u64;
        for count in packets.split(',').filter(|count| !count.is_empty()) {
            collected.packets += count.parse::<u64>().with_context(|| format!("no number of packets: {line}"))?;
        }
    }
    Ok(collected)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_and_their_packets_are_summed() {
        let text = "\t\n17,17\t1,0,2,0\n6\t5,4\n";
        assert_eq!(parse(text).unwrap(), Collected { records: 3, packets: 12 });
        assert_eq!(parse("").unwrap(), Collected::default());
        assert!(parse("17\n").is_err());
        assert!(parse("17\tmany\n").is_err());
    }
}
