//! BUNDLE: several packets in one datagram (PROTOCOL §3.6; from version 3 on).

use alloc::vec::Vec;

use super::field::word;
use super::{Cid, PacketType, Refusal, STEERING_OFFSET, Version};

/// Bytes of the header.
const HEADER_LEN: usize = 12;
/// Bytes before each packet: its length.
const LENGTH_LEN: usize = 2;
/// Version of the bundle header. Later versions keep it, so a host need not know the versions of the packets inside.
const FORMAT: Version = Version::V3;
/// Minimum length of a packet in a bundle: it reaches at least to the end of the Destination CID.
const MIN_PACKET_LEN: usize = HEADER_LEN;

/// The packets of one datagram. Their lengths and destination are verified; the rest of them is not parsed yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bundle<'a> {
    /// Destination CID of the first packet; all packets share its first byte, the worker.
    pub cid: Cid,
    packets: &'a [u8],
}

impl<'a> Bundle<'a> {
    /// Overhead of a bundle, bytes: this once, and [`PER_PACKET`](Self::PER_PACKET) for each packet.
    pub const FIXED: usize = HEADER_LEN;
    /// See [`FIXED`](Self::FIXED).
    pub const PER_PACKET: usize = LENGTH_LEN;

    /// The packets in order, at least one; parse each with [`super::parse`]. None of them is a bundle.
    pub fn packets(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let mut rest = self.packets;
        core::iter::from_fn(move || {
            let (packet, behind) = split(rest)?;
            rest = behind;
            Some(packet)
        })
    }

    pub(super) fn parse(bytes: &'a [u8]) -> Result<Self, Refusal> {
        let (header, packets) = bytes.split_first_chunk::<HEADER_LEN>().ok_or(Refusal::ShortDatagram)?;
        if Version::try_from(header[1] >> 4)? != FORMAT {
            return Err(Refusal::Version);
        }
        let cid = Cid(word(header, STEERING_OFFSET));
        if cid.is_none() {
            return Err(Refusal::ZeroCid);
        }
        let names_first =
            packets.get(LENGTH_LEN + STEERING_OFFSET..).is_some_and(|b| b.starts_with(&header[STEERING_OFFSET..]));
        let mut rest = packets;
        loop {
            let (packet, behind) = split(rest).ok_or(Refusal::BundleLength)?;
            let kind = PacketType::try_from(packet[0]);
            let may_be_in = matches!(kind, Ok(PacketType::Data | PacketType::Ack | PacketType::Skip));
            if !may_be_in || !names_first || packet[STEERING_OFFSET] != header[STEERING_OFFSET] {
                return Err(Refusal::BundleContent);
            }
            rest = behind;
            if rest.is_empty() {
                return Ok(Self { cid, packets });
            }
        }
    }
}

/// Turns the packet at the end of `buffer`, which starts at `at`, into a bundle of one. It must be a DATA, ACK or SKIP
/// packet, shorter than 64 KiB, of a connection whose version [has bundles](Version::has_bundles).
pub fn begin(buffer: &mut Vec<u8>, at: usize) {
    let len = buffer.len() - at;
    let mut header = [0; HEADER_LEN + LENGTH_LEN];
    header[0] = PacketType::Bundle as u8;
    header[1] = FORMAT.number() << 4;
    header[STEERING_OFFSET..HEADER_LEN].copy_from_slice(&buffer[at + STEERING_OFFSET..at + HEADER_LEN]);
    header[HEADER_LEN..].copy_from_slice(&(len as u16).to_be_bytes());
    buffer.extend_from_slice(&[0; HEADER_LEN + LENGTH_LEN]);
    buffer.copy_within(at..at + len, at + header.len());
    buffer[at..at + header.len()].copy_from_slice(&header);
}

/// Appends a packet, which `write` writes, to the bundle at the end of `buffer`. The packet must satisfy the conditions
/// of [`begin`] and be for the same worker.
pub fn append(buffer: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>)) {
    let at = buffer.len();
    buffer.extend_from_slice(&[0; LENGTH_LEN]);
    write(buffer);
    let len = buffer.len() - at - LENGTH_LEN;
    buffer[at..at + LENGTH_LEN].copy_from_slice(&(len as u16).to_be_bytes());
}

/// The first packet and the bytes behind it; `None` if its length is below the minimum or exceeds the bytes left.
#[inline]
fn split(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, rest) = bytes.split_first_chunk::<LENGTH_LEN>()?;
    let len = usize::from(u16::from_be_bytes(*len));
    if len < MIN_PACKET_LEN { None } else { rest.split_at_checked(len) }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::super::{DataHeader, Packet, PathId, Psn, Tick, parse};
    use super::*;

    fn data(cid: u32, psn: u32, frame: usize) -> Vec<u8> {
        let header = DataHeader {
            version: Version::V3,
            cc: 0,
            probe: false,
            ack_now: false,
            from_responder: false,
            ecn: true,
            retransmit: false,
            path: PathId::default(),
            distance: 1,
            psn: Psn(psn),
            cid: Cid(cid),
            timestamp: Tick(7),
        };
        [&header.emit()[..], &vec![0xab; frame]].concat()
    }

    fn bundle_of(packets: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = packets[0].clone();
        begin(&mut bytes, 0);
        for packet in &packets[1..] {
            append(&mut bytes, |buffer| buffer.extend_from_slice(packet));
        }
        bytes
    }

    #[test]
    fn a_bundle_splits_into_its_packets() {
        let packets: Vec<_> = (0..5).map(|i| data(0x0300_0001 + i, i, 14 + 100 * i as usize)).collect();
        for count in 1..=packets.len() {
            let bytes = bundle_of(&packets[..count]);
            let own: usize = packets[..count].iter().map(|p| p.len() + Bundle::PER_PACKET).sum();
            assert_eq!(bytes.len(), Bundle::FIXED + own);
            let Ok(Packet::Bundle(bundle)) = parse(&bytes) else { panic!("{count}: {:?}", parse(&bytes)) };
            assert_eq!(bundle.cid, Cid(0x0300_0001));
            assert!(bundle.packets().eq(packets[..count].iter().map(Vec::as_slice)));
        }
    }

    #[test]
    fn a_malformed_bundle_is_refused_as_a_whole() {
        let good = bundle_of(&[data(0x0300_0001, 0, 20), data(0x0300_0002, 1, 20)]);
        let changed = |change: fn(&mut Vec<u8>)| {
            let mut bytes = good.clone();
            change(&mut bytes);
            parse(&bytes).err()
        };
        assert_eq!(changed(|_| ()), None);
        let second = Bundle::FIXED + LENGTH_LEN + 36;
        assert_eq!(second + LENGTH_LEN + 36, good.len());
        type Case = (Refusal, fn(&mut Vec<u8>));
        let cases: [Case; 11] = [
            (Refusal::ShortDatagram, |b| b.truncate(11)),
            (Refusal::Version, |b| b[1] = 0x20),
            (Refusal::Version, |b| b[1] = 0x40),
            (Refusal::ZeroCid, |b| b[8..12].fill(0)),
            (Refusal::BundleLength, |b| b.truncate(12)),
            (Refusal::BundleLength, |b| b.truncate(b.len() - 1)),
            (Refusal::BundleLength, |b| b.push(0)),
            (Refusal::BundleLength, |b| b[13] = 11),
            (Refusal::BundleContent, |b| b[11] ^= 1),
            (Refusal::BundleContent, |b| b[50 + 2] = PacketType::Bundle as u8),
            (Refusal::BundleContent, |b| b[50 + 2 + STEERING_OFFSET] = 4),
        ];
        assert_eq!(second, 50);
        for (i, (reason, change)) in cases.into_iter().enumerate() {
            assert_eq!(changed(change), Some(reason), "case {i}");
        }
    }
}
