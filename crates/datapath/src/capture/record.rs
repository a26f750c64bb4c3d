//! What is known about a packet where a capture sees it.

/// Where a packet is captured. The names are those of the stages in the Triton paper (SIGCOMM'24, section 4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Stage {
    /// A datagram as received from the underlay.
    UnderlayRx,
    /// A guest's frame after parsing by the Pre-Processor; from the underlay: decapsulated, with its checksum verified.
    Pre,
    /// A frame after the decision of the virtual switch.
    Avs,
    /// A frame that the reliable transport has accepted or lets pass; from the underlay: a new one to be placed.
    Rte,
    /// A complete segment of a frame, after the Post-Processor: segmented, rewritten, with complete checksums.
    Post,
    /// A frame that is published to a guest.
    GuestRx,
    /// A frame as fetched from a guest: not segmented, checksums possibly incomplete.
    GuestTx,
    /// A datagram that is sent to the underlay.
    UnderlayTx,
    /// A packet that is dropped, at any stage.
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

/// What is known about a packet where it is captured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Note {
    /// Its direction.
    pub direction: Direction,
    /// What is done with it; for a drop: the reason.
    pub what: &'static str,
    /// The port.
    pub port: Option<u32>,
    /// The peer.
    pub peer: Option<u32>,
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

/// What is known about a packet at one stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The stage.
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
