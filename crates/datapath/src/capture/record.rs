//! What is known of a packet where a capture looks at it.

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

    /// Its bit in a set of stages.
    pub(crate) const fn bit(self) -> u16 {
        1 << self as u8
    }
}

/// The direction of a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Direction {
    /// From a guest, towards the underlay or another guest.
    #[default]
    Out,
    /// Towards a guest.
    In,
}

/// What is known of a packet where it is looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Note {
    /// Its direction.
    pub direction: Direction,
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

/// What is known of a packet at one stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Where.
    pub stage: Stage,
    /// What is known.
    pub note: Note,
}

/// Packets that a core has captured.
pub type Chunk = bifrost_nic::capture::Chunk<Seen>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_stage_has_a_bit_and_a_name_of_its_own() {
        let mut bits = 0;
        let mut names = std::collections::BTreeSet::new();
        for stage in Stage::ALL {
            assert!(names.insert(stage.name()));
            assert_eq!(bits & stage.bit(), 0);
            bits |= stage.bit();
        }
    }
}
