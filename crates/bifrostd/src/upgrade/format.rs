//! Wire format of the messages between the daemons during an upgrade.
//!
//! A message is a header of 20 bytes (magic number, version, kind, bytes of the body, number of descriptors), the body,
//! and then the descriptors. Numbers are little-endian. The bodies of [`Offer`](Kind::Offer) and [`Ready`](Kind::Ready)
//! are JSON; that of [`State`](Kind::State) consists of sections, each with its kind (16 bits), worker (16 bits) and
//! length (64 bits).
//!
//! Within a version, JSON fields, fields at the end of records, and kinds of sections may be added. Unknown ones are
//! ignored, and missing ones have defaults, so that adjacent releases understand each other in both directions. Other
//! changes need a new version; a message of another version is refused, and the old daemon continues.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, bail, ensure};

/// The version of this format.
pub(crate) const VERSION: u16 = 1;
/// Length of a header, bytes.
pub(crate) const HEADER_BYTES: usize = 20;
/// Longest body, bytes: a million sessions take 50 MB.
pub(crate) const MAX_BYTES: u64 = 1 << 30;
/// Most descriptors of a message.
pub(crate) const MAX_DESCRIPTORS: u32 = 1 << 18;
const MAGIC: u32 = u32::from_le_bytes(*b"BFup");
/// Length of the header of a section, and of a packet, bytes.
const SECTION_BYTES: usize = 12;
const PACKET_BYTES: usize = 6;
/// Longest packet with its virtio header, bytes.
const MAX_PACKET: usize = 68 << 10;
/// Kinds of sections: the memory of a switch (sessions), unfinished packets of guests, and the positions in the rings of
/// virtual machines, as JSON, of all workers.
const MEMORY: u16 = 1;
const PACKETS: u16 = 2;
const POSITIONS: u16 = 3;
/// Packets of ports whose numbers need more than 16 bits. An earlier release has no such ports.
const PACKETS_OF_HIGH_PORTS: u16 = 4;

/// Kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// From the old daemon: everything needed to prepare, with descriptors.
    Offer = 1,
    /// From the new daemon: it is prepared, and needs only the state that changes with every packet.
    Ready = 2,
    /// From the old daemon, after it has stopped: that state.
    State = 3,
    /// From the new daemon: it is running.
    Running = 4,
    /// From the new daemon: it ends, with the reason.
    Failed = 5,
    /// From the old daemon, at the end: its counters, as JSON.
    Counters = 6,
    /// From the old daemon, while it is running: copies of sessions, as a state without packets. Sent only if the new
    /// daemon's `Ready` asks for them.
    Copies = 7,
    /// From the new daemon: it has these copies.
    Copied = 8,
    /// From the old daemon, after its counters: its flow logs. Sent only if the new daemon's `Ready` asks for them, and
    /// announced in the offer.
    Records = 9,
    /// From the old daemon, before its counters: the running capture. Sent only if the offer has one and the new
    /// daemon's `Ready` asks for it.
    Capture = 10,
}

/// The header of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    /// Length of the body.
    pub(crate) bytes: u64,
    pub(crate) descriptors: u32,
}

impl Header {
    pub(crate) fn emit(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        out[..4].copy_from_slice(&MAGIC.to_le_bytes());
        out[4..6].copy_from_slice(&VERSION.to_le_bytes());
        out[6..8].copy_from_slice(&(self.kind as u16).to_le_bytes());
        out[8..16].copy_from_slice(&self.bytes.to_le_bytes());
        out[16..].copy_from_slice(&self.descriptors.to_le_bytes());
        out
    }

    /// # Errors
    /// It is not a header, has another version, or exceeds the limits of a message.
    pub(crate) fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Header> {
        let mut fields = Fields(bytes);
        let (magic, version, kind) = (fields.u32()?, fields.u16()?, fields.u16()?);
        let (bytes, descriptors) = (fields.u64()?, fields.u32()?);
        ensure!(magic == MAGIC, "not a message of another bifrostd");
        ensure!(
            version == VERSION,
            "the other bifrostd hands over in version {version}, this one in version {VERSION}"
        );
        use Kind::{Capture, Copied, Copies, Counters, Failed, Offer, Ready, Records, Running, State};
        let kinds = [Offer, Ready, State, Running, Failed, Counters, Copies, Copied, Records, Capture];
        let Some(kind) = kinds.into_iter().find(|known| *known as u16 == kind) else {
            bail!("unknown message of kind {kind}");
        };
        ensure!(bytes <= MAX_BYTES, "a message of {bytes} bytes; the maximum is {MAX_BYTES}");
        ensure!(descriptors <= MAX_DESCRIPTORS, "{descriptors} descriptors; the maximum is {MAX_DESCRIPTORS}");
        Ok(Header { kind, bytes, descriptors })
    }
}

/// State that a worker hands over when it stops.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct WorkerState {
    /// Memory of its switch: `Switch::carry_memory`, or a step of `Switch::copy_some` or the rest after these.
    pub(crate) memory: Vec<u8>,
    /// Guests' packets with their port number, in sending order.
    pub(crate) packets: Vec<(u32, Vec<u8>)>,
}

/// The body of a [`Kind::State`] or [`Kind::Copies`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct HandedState {
    pub(crate) workers: Vec<WorkerState>,
    /// Positions in the rings of virtual machines, by port.
    pub(crate) positions: BTreeMap<String, Vec<u16>>,
}

/// # Errors
/// Never: names and numbers can be written as JSON.
pub(crate) fn emit_state(HandedState { workers, positions }: &HandedState) -> Result<Vec<u8>> {
    let of = |worker: &WorkerState| {
        let packets: usize = worker.packets.iter().map(|(_, packet)| PACKET_BYTES + packet.len()).sum();
        2 * SECTION_BYTES + worker.memory.len() + packets
    };
    let mut out = Vec::with_capacity(workers.iter().map(of).sum());
    for (number, worker) in (0u16..).zip(workers) {
        let mut section = |kind: u16, write: &dyn Fn(&mut Vec<u8>)| {
            out.extend(kind.to_le_bytes());
            out.extend(number.to_le_bytes());
            let at = out.len();
            out.extend([0; 8]);
            write(&mut out);
            let len = (out.len() - at - 8) as u64;
            out[at..at + 8].copy_from_slice(&len.to_le_bytes());
        };
        section(MEMORY, &|out| out.extend_from_slice(&worker.memory));
        let kind = if worker.packets.iter().all(|(port, _)| *port <= u32::from(u16::MAX)) {
            PACKETS
        } else {
            PACKETS_OF_HIGH_PORTS
        };
        section(kind, &|out| {
            for (port, packet) in &worker.packets {
                match kind {
                    PACKETS => out.extend((*port as u16).to_le_bytes()),
                    _ => out.extend(port.to_le_bytes()),
                }
                out.extend((packet.len() as u32).to_le_bytes());
                out.extend_from_slice(packet);
            }
        });
    }
    let positions = serde_json::to_vec(positions)?;
    out.extend(POSITIONS.to_le_bytes());
    out.extend([0; 2]);
    out.extend((positions.len() as u64).to_le_bytes());
    out.extend(positions);
    Ok(out)
}

/// Parses the body of a [`Kind::State`] or [`Kind::Copies`] for the given number of `workers`.
///
/// # Errors
/// The state is truncated, refers to an unknown worker, or has a packet longer than any port's.
pub(crate) fn parse_state(bytes: &[u8], workers: usize) -> Result<HandedState> {
    let mut states = vec![WorkerState::default(); workers];
    let mut positions = BTreeMap::new();
    let mut rest = Fields(bytes);
    while !rest.0.is_empty() {
        let (kind, number, len) = (rest.u16()?, rest.u16()?, rest.u64()?);
        let section = rest.bytes(len)?;
        if kind == POSITIONS {
            positions = serde_json::from_slice(section).context("reading the positions in rings")?;
            continue;
        }
        let Some(state) = states.get_mut(usize::from(number)) else { bail!("no worker {number}") };
        match kind {
            MEMORY => state.memory = section.to_vec(),
            PACKETS | PACKETS_OF_HIGH_PORTS => {
                let mut packets = Fields(section);
                while !packets.0.is_empty() {
                    let port = if kind == PACKETS { packets.u16()?.into() } else { packets.u32()? };
                    let len = packets.u32()?;
                    ensure!(len as usize <= MAX_PACKET, "a packet of {len} bytes; the maximum is {MAX_PACKET}");
                    state.packets.push((port, packets.bytes(len.into())?.to_vec()));
                }
            }
            _ => {}
        }
    }
    Ok(HandedState { workers: states, positions })
}

/// The bytes that are left to read.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn bytes(&mut self, len: u64) -> Result<&'a [u8]> {
        let split = usize::try_from(len).ok().and_then(|len| self.0.split_at_checked(len));
        let Some((first, rest)) = split else { bail!("truncated: fewer than {len} bytes are left") };
        self.0 = rest;
        Ok(first)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        Ok(self.bytes(N as u64)?.try_into()?)
    }

    fn u16(&mut self) -> Result<u16> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64> {
        self.array().map(u64::from_le_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn random_state(random: &mut fastrand::Rng) -> WorkerState {
        let mut bytes = |most: usize| (0..random.usize(..most)).map(|_| random.u8(..)).collect::<Vec<u8>>();
        let memory = bytes(500);
        let packets = (0..memory.len() % 7).map(|port| (port as u32 * 9000, bytes(2000))).collect();
        WorkerState { memory, packets }
    }

    #[test]
    fn states_are_read_back_and_truncated_ones_refused() {
        let mut random = fastrand::Rng::with_seed(1);
        for workers in 0..6 {
            for _ in 0..20 {
                let of_workers: Vec<_> = (0..workers).map(|_| random_state(&mut random)).collect();
                let positions = BTreeMap::from([("vm".to_owned(), vec![random.u16(..), 7])]);
                let states = HandedState { workers: of_workers, positions };
                let bytes = emit_state(&states).unwrap();
                assert_eq!(parse_state(&bytes, workers).unwrap(), states);
                if workers > 0 {
                    let cut = random.usize(1..bytes.len());
                    // If it ends between two sections, some state is missing.
                    assert!(
                        parse_state(&bytes[..cut], workers).map_or(true, |read| read != states || cut == bytes.len())
                    );
                    assert!(parse_state(&bytes, workers - 1).is_err());
                }
            }
        }
    }

    #[test]
    fn sections_of_a_later_release_are_ignored() {
        let workers = vec![WorkerState { memory: vec![1, 2, 3], packets: vec![(4, vec![5; 60])] }];
        let states = HandedState { workers, ..HandedState::default() };
        let mut bytes = vec![99, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3];
        bytes.extend(emit_state(&states).unwrap());
        assert_eq!(parse_state(&bytes, 1).unwrap(), states);
    }

    #[test]
    fn damaged_states_do_no_harm() {
        let mut random = fastrand::Rng::with_seed(2);
        for _ in 0..5000 {
            let workers = vec![random_state(&mut random), random_state(&mut random)];
            let positions = BTreeMap::from([("vm".to_owned(), vec![random.u16(..), 7])]);
            let mut bytes = emit_state(&HandedState { workers, positions }).unwrap();
            for _ in 0..random.usize(1..5) {
                let at = random.usize(..bytes.len());
                bytes[at] = random.u8(..);
            }
            if let Ok(read) = parse_state(&bytes, 2) {
                let size: usize =
                    read.workers.iter().flat_map(|state| &state.packets).map(|(_, packet)| packet.len()).sum();
                assert!(size <= bytes.len());
            }
        }
    }

    #[test]
    fn headers_are_read_back_and_others_refused() {
        let header = Header { kind: Kind::State, bytes: 12345, descriptors: 678 };
        assert_eq!(Header::parse(&header.emit()).unwrap(), header);
        let changed = |at: usize, to: u8| {
            let mut bytes = header.emit();
            bytes[at] = to;
            format!("{:#}", Header::parse(&bytes).unwrap_err())
        };
        assert!(changed(0, 0).contains("not a message"));
        assert!(changed(4, 2).contains("in version 2"));
        assert!(changed(6, 11).contains("kind 11"));
        assert!(changed(14, 1).contains("the maximum"));
        assert!(changed(19, 1).contains("descriptors"));
    }
}
