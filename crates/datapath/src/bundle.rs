//! Packets that share a datagram (PROTOCOL §12.5).
//!
//! Kernels spend as much on a datagram with one small packet as on one with many. So packets that are sent in one turn,
//! one after the other and with the same encapsulation, share a datagram. No packet waits for that.

use bifrost_port::{LaneId, TxBatch};
use bifrost_wire::bifrost::{Bundle, Cid, Version, bundle};
use bifrost_wire::{Vni, vxlan};

/// How a packet is encapsulated: packets with the same values may share a datagram.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Encap {
    pub(crate) lane: LaneId,
    /// Outer DSCP and ECN codepoint.
    pub(crate) class: u8,
    pub(crate) vni: Vni,
    pub(crate) cid: Cid,
    /// The version of the packet's connection; `None` for a packet that always has its own datagram.
    pub(crate) version: Option<Version>,
}

/// Joins packets of one batch.
#[derive(Debug)]
pub(crate) struct Bundler {
    /// Maximum UDP payload of a datagram, bytes; 0: each packet has its own datagram.
    max_bytes: usize,
    /// The encapsulation of the last datagram of the batch, if others may join it.
    open: Option<Encap>,
    /// The last datagram is already a bundle.
    is_bundle: bool,
    /// The last datagram is being turned into a bundle.
    is_beginning: bool,
}

impl Bundler {
    pub(crate) fn new(max_bytes: u16) -> Self {
        Bundler { max_bytes: max_bytes.into(), open: None, is_bundle: false, is_beginning: false }
    }

    /// Lets no packet join the current last datagram of the batch.
    pub(crate) fn close(&mut self) {
        self.open = None;
    }

    /// Repairs what a panic of `write` in [`push`](Self::push) has left half finished. No packet joins the current last
    /// datagram of `batch`.
    pub(crate) fn undo(&mut self, batch: &mut TxBatch) {
        let begun = if std::mem::take(&mut self.is_beginning) { Bundle::FIXED + Bundle::PER_PACKET } else { 0 };
        batch.cut_unfinished(vxlan::HEADER_LEN..vxlan::HEADER_LEN + begun);
        self.close();
    }

    /// Adds a packet of `len` bytes, which `write` appends, to `batch`: to the last datagram if it may join that.
    /// Returns whether it did.
    #[inline]
    pub(crate) fn push(
        &mut self,
        batch: &mut TxBatch,
        encap: Encap,
        len: usize,
        write: impl FnOnce(&mut Vec<u8>),
    ) -> bool {
        if self.may_join(batch, &encap, len) {
            let is_first = !std::mem::replace(&mut self.is_bundle, true);
            self.is_beginning = is_first;
            batch.extend_last(|buffer, start| {
                if is_first {
                    bundle::begin(buffer, start + vxlan::HEADER_LEN);
                }
                bundle::append(buffer, write);
            });
            self.is_beginning = false;
            return true;
        }
        batch.push(encap.lane, encap.class, |buffer| {
            buffer.extend_from_slice(&vxlan::emit(encap.vni));
            write(buffer);
        });
        self.open = Some(encap).filter(|encap| encap.version.is_some_and(Version::has_bundles));
        self.is_bundle = false;
        false
    }

    #[inline]
    fn may_join(&self, batch: &TxBatch, encap: &Encap, len: usize) -> bool {
        let Some(open) = &self.open else { return false };
        let worker = |encap: &Encap| encap.cid.0 >> 24;
        let more = if self.is_bundle { 0 } else { Bundle::FIXED + Bundle::PER_PACKET };
        let fits = batch.last().map_or(0, <[u8]>::len) + more + Bundle::PER_PACKET + len <= self.max_bytes;
        // A packet without ECN may be in an ECN-capable datagram of its DSCP, because marks count only for DATA.
        fits && open.lane == encap.lane
            && open.vni == encap.vni
            && worker(open) == worker(encap)
            && (encap.class == open.class || encap.class == open.class & !3)
            && encap.version.is_some_and(Version::has_bundles)
    }
}

#[cfg(test)]
mod tests {
    use bifrost_wire::bifrost::{AckHeader, AckKind, Bitmap, DataHeader, Packet, PathId, Psn, Tick, parse};
    use proptest::prelude::*;

    use super::*;

    /// A DATA packet with a frame of `len` bytes, or an ACK.
    fn packet(encap: &Encap, number: u32, len: Option<usize>) -> Vec<u8> {
        let version = encap.version.unwrap_or(Version::LATEST);
        let mut bytes = Vec::new();
        match len {
            Some(len) => {
                let header = DataHeader {
                    version,
                    cc: 0,
                    probe: false,
                    ack_now: false,
                    from_responder: false,
                    ecn: encap.class & 3 != 0,
                    retransmit: false,
                    path: PathId::default(),
                    distance: 0,
                    psn: Psn(number),
                    cid: encap.cid,
                    timestamp: Tick(0),
                };
                bytes.extend_from_slice(&header.emit());
                bytes.resize(DataHeader::LEN + len, number as u8);
            }
            None => AckHeader {
                version,
                cc: 0,
                probe: false,
                path: PathId::default(),
                hops: 0,
                kind: AckKind::Cumulative,
                psn: Psn(number),
                cid: encap.cid,
                sent: Tick(0),
                echo: Tick(0),
                nic_rx: Tick(0),
                num_ack: 0,
                num_ece: 0,
                base: Psn(0),
                bitmap: Bitmap::empty(),
            }
            .emit(&mut bytes),
        }
        bytes
    }

    /// Each packet of a datagram, with the VNI under which it is sent.
    fn split(payload: &[u8]) -> Vec<(Vni, Vec<u8>)> {
        let (vni, inside) = vxlan::parse(payload).unwrap();
        match parse(inside).unwrap() {
            Packet::Bundle(bundle) => bundle.packets().map(|packet| (vni, packet.to_vec())).collect(),
            _ => vec![(vni, inside.to_vec())],
        }
    }

    prop_compose! {
        fn encap()(lane in 0u32..2, ecn: bool, dscp in 0u8..2, vni in 1u32..3, worker in 0u32..2, cid in 1u32..3, version in 0u8..5) -> Encap {
            let (class, vni) = (dscp << 2 | u8::from(ecn) << 1, Vni::new(vni).unwrap());
            Encap { lane: LaneId(lane), class, vni, cid: Cid(worker << 24 | cid), version: Version::try_from(version).ok() }
        }
    }

    proptest! {
        /// Every packet is sent once, in order and with its own encapsulation, and only packets that may share a
        /// datagram do.
        #[test]
        fn what_leaves_is_what_was_added(
            packets in proptest::collection::vec((encap(), proptest::option::of(14usize..600)), 1..40), max in 0u16..1500,
        ) {
            let (mut batch, mut bundler) = (TxBatch::default(), Bundler::new(max));
            let mut joined = 0;
            for (number, (encap, len)) in packets.iter().enumerate() {
                let bytes = packet(encap, number as u32, *len);
                joined += usize::from(bundler.push(&mut batch, *encap, bytes.len(), |out| out.extend_from_slice(&bytes)));
            }
            prop_assert_eq!(batch.len() + joined, packets.len());
            let mut added = (0u32..).zip(&packets);
            for (lane, class, payload) in batch.iter() {
                let inside = split(payload);
                prop_assert!(inside.len() == 1 || payload.len() <= usize::from(max));
                let count = inside.len();
                let mut workers = Vec::new();
                for (vni, bytes) in inside {
                    let (number, (encap, len)) = added.next().unwrap();
                    prop_assert_eq!(&bytes, &packet(encap, number, *len));
                    prop_assert_eq!((lane, vni), (encap.lane, encap.vni));
                    prop_assert!(class == encap.class || class & !3 == encap.class);
                    prop_assert!(count == 1 || encap.version.is_some_and(Version::has_bundles));
                    workers.push(encap.cid.0 >> 24);
                }
                prop_assert!(workers.windows(2).all(|w| w[0] == w[1]));
            }
            prop_assert!(added.next().is_none());
        }
    }

    #[test]
    fn packets_that_fit_share_a_datagram_and_a_closed_one_stays_closed() {
        let vni = Vni::new(7).unwrap();
        let encap = Encap { lane: LaneId(0), class: 2, vni, cid: Cid(1), version: Some(Version::V3) };
        let bytes = packet(&encap, 1, Some(84));
        let (mut batch, mut bundler) = (TxBatch::default(), Bundler::new(1452));
        let mut push =
            |bundler: &mut Bundler| bundler.push(&mut batch, encap, 100, |out| out.extend_from_slice(&bytes));
        // 8 + 12 + 14 * (2 + 100) = 1448.
        let joined: Vec<bool> = (0..16).map(|_| push(&mut bundler)).collect();
        assert_eq!(joined.iter().filter(|joined| !**joined).count(), 2);
        assert!(!joined[0] && !joined[14]);
        bundler.close();
        assert!(!push(&mut bundler));
        assert_eq!(batch.iter().map(|(_, _, payload)| payload.len()).collect::<Vec<_>>(), [1448, 224, 108]);
    }

    #[test]
    fn a_packet_whose_writing_panics_leaves_the_others_whole() {
        let vni = Vni::new(7).unwrap();
        let encap = Encap { lane: LaneId(0), class: 2, vni, cid: Cid(1), version: Some(Version::V3) };
        // As the first packet of a datagram, the second one, and a later one.
        for before in 0..4 {
            let (mut batch, mut bundler) = (TxBatch::default(), Bundler::new(1452));
            let write = |batch: &mut TxBatch, bundler: &mut Bundler, number| {
                let bytes = packet(&encap, number, Some(84));
                bundler.push(batch, encap, bytes.len(), |out| out.extend_from_slice(&bytes));
            };
            (0..before).for_each(|number| write(&mut batch, &mut bundler, number));
            let panic = bifrost_port::panics::contain(|| {
                bundler.push(&mut batch, encap, 100, |out| {
                    out.extend_from_slice(&[0xff; 50]);
                    panic!("half of it is written");
                })
            });
            assert!(panic.is_err());
            bundler.undo(&mut batch);
            (before..before + 3).for_each(|number| write(&mut batch, &mut bundler, number));
            let left: Vec<_> = batch.iter().flat_map(|(_, _, payload)| split(payload)).collect();
            let expected: Vec<_> = (0..before + 3).map(|number| (vni, packet(&encap, number, Some(84)))).collect();
            assert_eq!(left, expected, "after {before} packets");
            assert_eq!(batch.iter().map(|(_, _, payload)| payload.len()).sum::<usize>(), batch.bytes());
        }
    }
}
