//! Forged packets, similar enough to valid ones to be accepted.

use bifrost_rte::Time;
use bifrost_wire::Mac;
use bifrost_wire::bifrost::{
    AckHeader, AckKind, Bitmap, Cid, DataHeader, PathId, Psn, RejectReason, Reset, Setup, SetupKind, Tick, Version,
};

use crate::Input;

/// What a forger knows.
#[derive(Clone, Debug)]
pub(super) struct Knowledge {
    pub(super) now: Time,
    /// Current and former CIDs of the victim.
    pub(super) cids: Vec<Cid>,
    /// CIDs that the victim sends to.
    pub(super) peer_cids: Vec<Cid>,
    /// A plausible PSN.
    pub(super) psn: Psn,
    /// Existing vNICs.
    pub(super) vnics: Vec<Mac>,
}

impl Knowledge {
    fn cid(&self, input: &mut Input<'_>) -> Cid {
        match self.cids.len() {
            0 => Cid(input.u32() | 1),
            n if input.chance(230) || !input.chance(128) => self.cids[input.below(n.min(256))],
            _ => Cid(input.u32() | 1),
        }
    }

    /// The header of DATA, probe or SKIP.
    pub(super) fn header(&self, input: &mut Input<'_>) -> DataHeader {
        let flags = input.u8();
        DataHeader {
            version: if input.chance(16) { Version::V1 } else { Version::V2 },
            cc: flags & 15,
            probe: false,
            ack_now: flags & 16 != 0,
            from_responder: flags & 32 != 0,
            ecn: flags & 64 != 0,
            retransmit: flags & 128 != 0,
            path: PathId::masked(input.u8()),
            distance: input.u8(),
            psn: Psn(input.around(self.psn.0)),
            cid: self.cid(input),
            timestamp: Tick(input.around(self.now.tick().0)),
        }
    }

    /// An ACK.
    pub(super) fn ack(&self, input: &mut Input<'_>) -> AckHeader {
        let mut words = [0; 8];
        let words = &mut words[..input.below(9)];
        words.iter_mut().for_each(|w| *w = if input.chance(128) { input.u32() } else { u32::MAX });
        let ticks = self.now.tick().0;
        AckHeader {
            version: input.pick(&[Version::V1, Version::V2, Version::V2, Version::V4, Version::V4]),
            cc: 0,
            probe: input.chance(32),
            path: PathId::masked(input.u8()),
            hops: input.u8() & 15,
            kind: input.pick(&[AckKind::Cumulative, AckKind::Selective, AckKind::RateLimited, AckKind::NotTaken]),
            psn: Psn(input.around(self.psn.0)),
            cid: self.cid(input),
            sent: Tick(input.around(ticks)),
            echo: Tick(input.around(ticks.wrapping_sub(1000))),
            nic_rx: Tick(input.around(ticks)),
            num_ack: input.u16() & 2047,
            num_ece: input.u16() & 2047,
            base: Psn(input.around(self.psn.0)),
            bitmap: Bitmap::from_words(words).unwrap_or_default(),
        }
    }

    /// REQUEST, RESPONSE or REJECT.
    pub(super) fn setup(&self, input: &mut Input<'_>) -> Setup {
        let kind = match input.below(8) {
            0 => SetupKind::Reject(input.pick(&[
                RejectReason::Version,
                RejectReason::UnknownVnic,
                RejectReason::Resources,
                RejectReason::Policy,
            ])),
            1 | 2 => SetupKind::Response,
            _ => SetupKind::Request { oldest: 1 + input.u8() % 3 },
        };
        Setup {
            kind,
            version: 1 + input.u8() % 4,
            cc: 1,
            worker: input.u8() % 3,
            local: Cid(1 + u32::from(input.u8() % 8)),
            destination: self.cid(input),
            to: self.vnics[input.below(self.vnics.len())],
            from: self.vnics[input.below(self.vnics.len())],
            instance: u64::from(input.u8()) * 100,
            generation: u32::from(input.u8() % 8),
            window: input.u16().max(1),
            ack_delay_us: input.u16(),
        }
    }

    /// A RESET.
    pub(super) fn reset(&self, input: &mut Input<'_>) -> Reset {
        match self.peer_cids.len() {
            0 => Reset { unknown: Cid(1 + u32::from(input.u8() % 8)) },
            n => Reset { unknown: self.peer_cids[input.below(n.min(256))] },
        }
    }
}
