//! The underlay's side of a port: lanes to peers, batches of datagrams.

use std::io;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;

/// A registered lane: one local address and UDP source port, one destination address and port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LaneId(pub u32);

/// The well-known UDP port that received a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    /// The BIFROST port.
    Bifrost,
    /// The plain VXLAN port.
    Vxlan,
}

/// One received datagram: UDP payload and the kernel's metadata.
#[derive(Clone, Copy, Debug)]
pub struct Datagram<'a> {
    /// UDP payload, starting with the VXLAN header.
    pub payload: &'a [u8],
    /// Outer source.
    pub source: SocketAddr,
    /// The port that received it.
    pub service: Service,
    /// Outer ECN codepoint (RFC 3168: 0..=3).
    pub ecn: u8,
    /// Outer TTL or hop limit as received.
    pub ttl: u8,
    /// Arrival time at this host, monotonic clock, ns; as close to the wire as possible.
    pub rx_time_ns: u64,
}

/// A port towards the physical network.
pub trait Underlay {
    /// Registers a lane.
    fn lane(&mut self, local: SocketAddr, remote: SocketAddr) -> io::Result<LaneId>;
    /// Receives one batch; returns the number of datagrams, 0 when none is waiting.
    fn recv(&mut self) -> io::Result<usize>;
    /// When the last batch was received, monotonic clock, ns. Not earlier than any of its datagrams' `rx_time_ns`.
    fn received_at_ns(&self) -> u64;
    /// Datagram `index` of the last batch, until the next one is received; `index` below what `recv` returned, each
    /// once and in order.
    fn datagram(&self, index: usize) -> Datagram<'_>;
    /// Sends everything in `batch` and empties it. Datagrams that the kernel does not accept are counted and dropped.
    fn send(&mut self, batch: &mut TxBatch);
}

/// An underlay that a thread can wait for.
pub trait PolledUnderlay: Underlay {
    /// Descriptor to wait on for datagrams.
    fn fds(&self) -> Vec<BorrowedFd<'_>>;
}

/// Outgoing datagrams, in sending order per lane.
#[derive(Debug, Default)]
pub struct TxBatch {
    bytes: Vec<u8>,
    entries: Vec<Entry>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    lane: LaneId,
    start: u32,
    len: u32,
    traffic_class: u8,
}

impl TxBatch {
    /// Appends one datagram for `lane`; `write` appends its UDP payload to the given buffer.
    /// `traffic_class`: the outer header's DSCP and ECN codepoint.
    pub fn push(&mut self, lane: LaneId, traffic_class: u8, write: impl FnOnce(&mut Vec<u8>)) {
        let start = self.bytes.len();
        write(&mut self.bytes);
        let len = self.bytes.len() - start;
        self.entries.push(Entry { lane, start: start as u32, len: len as u32, traffic_class });
    }

    /// Rewrites the last datagram: `write` gets the buffer that ends with its UDP payload, and the payload's offset.
    /// Does nothing if there is no datagram.
    pub fn extend_last(&mut self, write: impl FnOnce(&mut Vec<u8>, usize)) {
        let Some(entry) = self.entries.last_mut() else { return };
        write(&mut self.bytes, entry.start as usize);
        entry.len = self.bytes.len() as u32 - entry.start;
    }

    /// Removes and returns the datagrams from `first` on, in order: lane, traffic class, UDP payload.
    pub fn take_from(&mut self, first: usize) -> Vec<(LaneId, u8, Vec<u8>)> {
        let end = first.min(self.entries.len());
        let taken = self.entries[end..].iter();
        let taken =
            taken.map(|e| (e.lane, e.traffic_class, self.bytes[e.start as usize..(e.start + e.len) as usize].to_vec()));
        let taken = taken.collect();
        self.bytes.truncate(self.entries.get(end).map_or(self.bytes.len(), |e| e.start as usize));
        self.entries.truncate(end);
        taken
    }

    /// Removes the last datagram; returns its UDP payload.
    pub fn pop(&mut self) -> Option<Vec<u8>> {
        let entry = self.entries.pop()?;
        Some(self.bytes.split_off(entry.start as usize))
    }

    /// UDP payload of the last datagram.
    pub fn last(&self) -> Option<&[u8]> {
        self.entries.last().map(|e| &self.bytes[e.start as usize..(e.start + e.len) as usize])
    }

    /// Number of datagrams.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nothing is waiting.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Bytes waiting; a caller sends before this grows past about one megabyte.
    pub fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// The datagrams in order: lane, traffic class, UDP payload.
    pub fn iter(&self) -> impl Iterator<Item = (LaneId, u8, &[u8])> {
        self.entries
            .iter()
            .map(|e| (e.lane, e.traffic_class, &self.bytes[e.start as usize..(e.start + e.len) as usize]))
    }

    /// UDP payload of datagram `index`, below [`len`](Self::len).
    pub(crate) fn payload(&self, index: usize) -> &[u8] {
        let e = self.entries[index];
        &self.bytes[e.start as usize..(e.start + e.len) as usize]
    }

    /// Removes what an interrupted [`push`](Self::push) or [`extend_last`](Self::extend_last) left behind the last
    /// datagram. `inserted`: bytes of that datagram's UDP payload that the interrupted call inserted; they are removed
    /// again.
    pub fn cut_unfinished(&mut self, inserted: std::ops::Range<usize>) {
        let Some(last) = self.entries.last() else { return self.bytes.clear() };
        let (start, len) = (last.start as usize, last.len as usize);
        if !inserted.is_empty() && start + inserted.end <= self.bytes.len() {
            self.bytes.drain(start + inserted.start..start + inserted.end);
        }
        self.bytes.truncate(start + len);
    }

    /// Removes all datagrams.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.entries.clear();
    }
}
