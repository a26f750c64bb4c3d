//! What a capture keeps of a packet, and the bounded store that a worker fills.

/// Where on its way a packet is looked at. The names are those of the stages in the Triton paper (SIGCOMM'24, section 4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Stage {
    /// A datagram as it came from the underlay.
    UnderlayRx,
    /// A guest's frame that the Pre-Processor has parsed; from the underlay: decapsulated, its checksum verified.
    Pre,
    /// A frame for which the virtual switch has decided.
    Avs,
    /// A frame that the reliable transport has taken, or lets pass; from the underlay: one that is new and to be placed.
    Rte,
    /// One finished segment of a frame, behind the Post-Processor: cut, rewritten, checksums complete.
    Post,
    /// A frame that a guest is shown.
    GuestRx,
    /// A frame as it was fetched from a guest: not segmented, checksums perhaps to be completed.
    GuestTx,
    /// A datagram on its way to the underlay.
    UnderlayTx,
    /// Something that is dropped, wherever that is.
    Drop,
}

impl Stage {
    /// All stages.
    pub const ALL: [Self; 9] = [
        Self::UnderlayRx,
        Self::Pre,
        Self::Avs,
        Self::Rte,
        Self::Post,
        Self::GuestRx,
        Self::GuestTx,
        Self::UnderlayTx,
        Self::Drop,
    ];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::UnderlayRx => "underlay-rx",
            Self::Pre => "pre",
            Self::Avs => "avs",
            Self::Rte => "rte",
            Self::Post => "post",
            Self::GuestRx => "guest-rx",
            Self::GuestTx => "guest-tx",
            Self::UnderlayTx => "underlay-tx",
            Self::Drop => "drop",
        }
    }

    /// The stage of that name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|stage| stage.name() == name)
    }

    /// Its bit in a set of stages.
    pub(crate) const fn bit(self) -> u16 {
        1 << self as u8
    }
}

/// Which way a packet goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Way {
    /// From a guest, towards the underlay or another guest.
    #[default]
    Out,
    /// Towards a guest.
    In,
}

/// What is known of a packet where it is looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Note {
    /// Which way it goes.
    pub way: Way,
    /// What is done with it; of a drop: the reason.
    pub what: &'static str,
    /// The port.
    pub port: Option<u16>,
    /// The peer.
    pub peer: Option<u16>,
    /// The virtual network.
    pub vni: Option<u32>,
    /// Hash of the flow.
    pub flow: Option<u32>,
    /// Connection identifier of the packet's header.
    pub cid: Option<u32>,
    /// Packet sequence number.
    pub psn: Option<u32>,
    /// The path.
    pub path: Option<u8>,
}

/// One packet at one stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// When, ns since the epoch.
    pub at_ns: u64,
    /// Where.
    pub stage: Stage,
    /// What is known.
    pub note: Note,
    /// Bytes of the packet.
    pub len: u32,
    start: u32,
    kept: u32,
}

/// Records in the order in which they were made, and the bytes that were kept of them. Both are bounded, and allocated once.
#[derive(Debug, Default)]
pub struct Chunk {
    records: Vec<Record>,
    bytes: Vec<u8>,
    /// Packets that found no room.
    missed: u64,
}

/// Bytes for which there is room for one record.
const BYTES_PER_RECORD: usize = 128;

impl Chunk {
    /// Room for `bytes` bytes, and for as many packets as those are when they are small.
    pub fn new(bytes: usize) -> Self {
        Chunk {
            records: Vec::with_capacity(bytes.div_ceil(BYTES_PER_RECORD)),
            bytes: Vec::with_capacity(bytes),
            missed: 0,
        }
    }

    /// The records, each with the bytes that were kept.
    pub fn iter(&self) -> impl Iterator<Item = (&Record, &[u8])> {
        self.records.iter().map(|r| (r, &self.bytes[r.start as usize..(r.start + r.kept) as usize]))
    }

    /// Packets that found no room.
    pub fn missed(&self) -> u64 {
        self.missed
    }

    /// Forgets everything, and keeps the room.
    pub fn clear(&mut self) {
        self.records.clear();
        self.bytes.clear();
        self.missed = 0;
    }

    /// Adds a record of a packet of `len` bytes of which `pieces` are kept; counts it if there is no room.
    pub(crate) fn push(&mut self, at_ns: u64, stage: Stage, note: Note, len: u32, pieces: [&[u8]; 2]) {
        let kept = pieces[0].len() + pieces[1].len();
        let full = self.records.len() == self.records.capacity() || self.bytes.len() + kept > self.bytes.capacity();
        if full {
            self.missed += 1;
            return;
        }
        let start = self.bytes.len() as u32;
        for piece in pieces {
            self.bytes.extend_from_slice(piece);
        }
        self.records.push(Record { at_ns, stage, note, len, start, kept: kept as u32 });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_finds_no_room_is_counted_and_nothing_grows() {
        let mut chunk = Chunk::new(1000);
        let (records, bytes) = (chunk.records.capacity(), chunk.bytes.capacity());
        for i in 0..100u8 {
            chunk.push(u64::from(i), Stage::Pre, Note::default(), 400, [&[i; 100], &[i; 50]]);
        }
        let kept: Vec<u64> = chunk.iter().map(|(r, _)| r.at_ns).collect();
        assert_eq!(kept, (0..kept.len() as u64).collect::<Vec<_>>(), "the first ones, in order");
        assert_eq!(kept.len(), bytes / 150);
        assert_eq!(kept.len() as u64 + chunk.missed(), 100);
        assert!(
            chunk.iter().all(|(r, b)| b.len() == 150 && b.iter().all(|x| u64::from(*x) == r.at_ns) && r.len == 400)
        );
        assert_eq!((chunk.records.capacity(), chunk.bytes.capacity()), (records, bytes));
        chunk.clear();
        assert_eq!((chunk.iter().count(), chunk.missed()), (0, 0));
        chunk.push(7, Stage::Drop, Note::default(), 0, [&[], &[]]);
        assert_eq!(chunk.iter().count(), 1);
        for _ in 0..1000 {
            chunk.push(8, Stage::Drop, Note::default(), 0, [&[], &[]]);
        }
        assert_eq!(chunk.iter().count(), records, "records without bytes are bounded, too");
        assert_eq!(chunk.records.capacity(), records);
    }

    #[test]
    fn stages_are_known_by_their_names() {
        let mut bits = 0;
        for stage in Stage::ALL {
            assert_eq!(Stage::named(stage.name()), Some(stage));
            assert_eq!(bits & stage.bit(), 0);
            bits |= stage.bit();
        }
        assert_eq!(Stage::named("nowhere"), None);
    }
}
