//! Copies of guests' packets for an external observer.
//!
//! A worker copies the first bytes of the packets that a [`MirrorSpec`] selects into a [`Copies`] of fixed size, which
//! another thread exchanges for an empty one between two turns and sends on. Nothing waits for that: packets without
//! room are counted. A packet from a guest is copied as fetched, before rules apply: not segmented, its checksum
//! possibly incomplete. One for a guest is copied when it is published.

use std::ops::RangeInclusive;

use bifrost_nic::{HEAD_LEN, Parsed, parse};
use bifrost_port::{GuestPort, TxHandle};
use bifrost_tables::IpNet;
use bifrost_wire::protocol::{TCP, UDP};
use foldhash::fast::RandomState;
use hashbrown::HashMap;

/// Maximum frames placed but not yet published that are remembered.
const MAX_UNSEEN: usize = 8192;
/// Bytes per record for which there is room.
const BYTES_PER_RECORD: usize = 128;

/// Which packets are copied, and how many bytes of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MirrorSpec {
    /// Packets of these ports.
    pub ports: Vec<u32>,
    /// Packets from their guests.
    pub from_guests: bool,
    /// Packets for their guests.
    pub to_guests: bool,
    /// Protocols of the IP header; empty: all packets, including ARP.
    pub protocols: Vec<u8>,
    /// Source or destination is in one of these; empty: any.
    pub prefixes: Vec<IpNet>,
    /// Source or destination port of TCP or UDP is in one of these; empty: any.
    pub l4_ports: Vec<RangeInclusive<u16>>,
    /// One of this many packets, at least 1, counted by each worker.
    pub one_in: u32,
    /// Bytes kept of a packet.
    pub truncate: u32,
}

impl MirrorSpec {
    fn wants(&self, frame: Option<&Parsed>) -> bool {
        if self.protocols.is_empty() && self.prefixes.is_empty() && self.l4_ports.is_empty() {
            return true;
        }
        let Some(frame) = frame.filter(|frame| frame.is_ip()) else { return false };
        let has_ports = matches!(frame.protocol, TCP | UDP) && !frame.is_fragment();
        let any_of = |is_empty: bool, one: bool| is_empty || one;
        any_of(self.protocols.is_empty(), self.protocols.contains(&frame.protocol))
            && any_of(
                self.prefixes.is_empty(),
                self.prefixes.iter().any(|net| net.contains(&frame.src_ip) || net.contains(&frame.dst_ip)),
            )
            && any_of(
                self.l4_ports.is_empty(),
                has_ports && self.l4_ports.iter().any(|r| r.contains(&frame.src_port) || r.contains(&frame.dst_port)),
            )
    }
}

/// Copies in the order in which they were made. Bounded; memory is allocated once.
#[derive(Debug, Default)]
pub struct Copies {
    records: Vec<Copied>,
    bytes: Vec<u8>,
    /// By mirror: packets without room.
    missed: Vec<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Copied {
    mirror: u16,
    end: u32,
}

impl Copies {
    /// Room for `bytes` bytes, and for as many small packets as fit in those.
    pub fn new(bytes: usize) -> Self {
        Copies {
            records: Vec::with_capacity(bytes.div_ceil(BYTES_PER_RECORD)),
            bytes: Vec::with_capacity(bytes),
            missed: Vec::new(),
        }
    }

    /// The copies, each with the index of its mirror.
    pub fn iter(&self) -> impl Iterator<Item = (u16, &[u8])> {
        let starts = std::iter::once(0).chain(self.records.iter().map(|record| record.end));
        self.records.iter().zip(starts).map(|(r, start)| (r.mirror, &self.bytes[start as usize..r.end as usize]))
    }

    /// Packets without room, by mirror.
    pub fn missed(&self) -> &[u64] {
        &self.missed
    }

    /// Forgets everything; keeps the memory.
    pub fn clear(&mut self) {
        self.records.clear();
        self.bytes.clear();
        self.missed.iter_mut().for_each(|missed| *missed = 0);
    }

    fn push(&mut self, mirror: u16, kept: usize, copy: impl FnOnce(&mut Vec<u8>)) {
        let full = self.records.len() == self.records.capacity() || self.bytes.len() + kept > self.bytes.capacity();
        if full {
            let place = usize::from(mirror);
            if self.missed.len() <= place {
                self.missed.resize(place + 1, 0);
            }
            self.missed[place] += 1;
            return;
        }
        copy(&mut self.bytes);
        self.records.push(Copied { mirror, end: self.bytes.len() as u32 });
    }
}

/// A placed frame, and the mirrors that want it.
struct Unseen {
    bytes: Vec<u8>,
    /// One bit for each of the first 64 mirrors.
    mirrors: u64,
}

/// The mirrors of one core.
pub(crate) struct Mirrors {
    specs: Vec<MirrorSpec>,
    /// By mirror: packets since the last one that was copied.
    since: Vec<u32>,
    pub(crate) copies: Copies,
    unseen: HashMap<(u32, u32), Unseen, RandomState>,
    /// Memory of frames that have been published.
    spare: Vec<Vec<u8>>,
    /// The headers of a frame that is not contiguous in its buffers.
    head: Vec<u8>,
}

/// Maximum number of mirrors.
pub const MAX_MIRRORS: usize = 64;

impl Mirrors {
    pub(crate) fn new(mut specs: Vec<MirrorSpec>, bytes: usize) -> Self {
        specs.truncate(MAX_MIRRORS);
        Mirrors {
            since: vec![0; specs.len()],
            specs,
            copies: Copies::new(bytes),
            unseen: HashMap::default(),
            spare: Vec::new(),
            head: Vec::new(),
        }
    }

    /// Which mirrors copy a packet of a port; counts it for those that it matches.
    fn wanted(&mut self, port: u32, is_from_guest: bool, frame: &[u8], len: usize) -> u64 {
        let is_candidate = |spec: &MirrorSpec| {
            (if is_from_guest { spec.from_guests } else { spec.to_guests }) && spec.ports.contains(&port)
        };
        if !self.specs.iter().any(is_candidate) {
            return 0;
        }
        let parsed = parse(frame, len).ok();
        let mut wanted = 0;
        for (place, (spec, since)) in self.specs.iter().zip(&mut self.since).enumerate() {
            if !is_candidate(spec) || !spec.wants(parsed.as_ref()) {
                continue;
            }
            *since += 1;
            if *since >= spec.one_in {
                *since = 0;
                wanted |= 1 << place;
            }
        }
        wanted
    }

    /// Copies a frame of a guest, of `len` bytes, that its port holds.
    pub(crate) fn fetched(&mut self, owner: u32, port: &impl GuestPort, handle: TxHandle, len: u32) {
        let mut head = std::mem::take(&mut self.head);
        head.clear();
        port.copy(handle, 0, HEAD_LEN.min(len as usize), &mut head);
        let wanted = self.wanted(owner, true, &head, len as usize);
        self.head = head;
        for place in places(wanted) {
            let kept = self.specs[usize::from(place)].truncate.min(len) as usize;
            self.copies.push(place, kept, |out| port.copy(handle, 0, kept, out));
        }
    }

    /// Remembers a placed frame; it is copied when it is published.
    pub(crate) fn placed(&mut self, port: u32, handle: u32, frame: &[u8]) {
        self.forget(port, handle);
        let mirrors = self.wanted(port, false, frame, frame.len());
        if mirrors == 0 {
            return;
        }
        if self.unseen.len() >= MAX_UNSEEN {
            places(mirrors).for_each(|place| self.copies.push(place, usize::MAX, |_| {}));
            return;
        }
        let most = places(mirrors).map(|place| self.specs[usize::from(place)].truncate).max().unwrap_or(0);
        let mut bytes = self.spare.pop().unwrap_or_default();
        bytes.clear();
        bytes.extend_from_slice(&frame[..frame.len().min(most as usize)]);
        self.unseen.insert((port, handle), Unseen { bytes, mirrors });
    }

    /// Copies a placed frame that is published to its guest.
    pub(crate) fn published(&mut self, port: u32, handle: u32) {
        let Some(Unseen { bytes, mirrors }) = self.unseen.remove(&(port, handle)) else { return };
        for place in places(mirrors) {
            let kept = bytes.len().min(self.specs[usize::from(place)].truncate as usize);
            self.copies.push(place, kept, |out| out.extend_from_slice(&bytes[..kept]));
        }
        self.spare.push(bytes);
    }

    fn forget(&mut self, port: u32, handle: u32) {
        if let Some(Unseen { bytes, .. }) = self.unseen.remove(&(port, handle)) {
            self.spare.push(bytes);
        }
    }
}

/// The indices in a set of mirrors.
fn places(mut set: u64) -> impl Iterator<Item = u16> {
    std::iter::from_fn(move || {
        let place = set.trailing_zeros();
        set &= set.wrapping_sub(1);
        (place < 64).then_some(place as u16)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> MirrorSpec {
        MirrorSpec {
            ports: vec![3],
            from_guests: true,
            to_guests: true,
            protocols: vec![],
            prefixes: vec![],
            l4_ports: vec![],
            one_in: 1,
            truncate: 60,
        }
    }

    fn frame(protocol: u8, dst: [u8; 4], dst_port: u16) -> Vec<u8> {
        let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0];
        frame.extend([0x45, 0, 0, 60, 0, 0, 0, 0, 64, protocol, 0, 0, 10, 0, 0, 1]);
        frame.extend(dst);
        frame.extend([0, 7]);
        frame.extend(dst_port.to_be_bytes());
        frame.extend([0, 40, 0, 0, 0, 0, 0, 0, 0x50, 16, 0, 0, 0, 0, 0, 0]);
        frame.extend([7; 20]);
        frame
    }

    fn shown(mirrors: &mut Mirrors, port: u32, frame: &[u8]) -> usize {
        let before = mirrors.copies.iter().count();
        mirrors.placed(port, 1, frame);
        mirrors.published(port, 1);
        mirrors.copies.iter().count() - before
    }

    #[test]
    fn filters_select_packets() {
        let any = |change: fn(&mut MirrorSpec)| {
            let mut spec = spec();
            change(&mut spec);
            spec
        };
        let udp = frame(17, [10, 0, 0, 2], 53);
        let tcp = frame(6, [10, 9, 0, 2], 443);
        let mut arp = udp.clone();
        arp[12..14].copy_from_slice(&[8, 6]);
        for (name, spec, expected) in [
            ("everything", spec(), [1, 1, 1]),
            ("a protocol", any(|s| s.protocols = vec![17]), [1, 0, 0]),
            ("a prefix", any(|s| s.prefixes = vec!["10.9.0.0/16".parse().unwrap()]), [0, 1, 0]),
            ("a prefix of the source", any(|s| s.prefixes = vec!["10.0.0.1/32".parse().unwrap()]), [1, 1, 0]),
            ("ports", any(|s| s.l4_ports = vec![400..=500, 7000..=7000]), [0, 1, 0]),
            ("a source port", any(|s| s.l4_ports = vec![7..=7]), [1, 1, 0]),
            ("all of it", any(|s| (s.protocols, s.l4_ports) = (vec![6], vec![53..=53])), [0, 0, 0]),
            ("one way", any(|s| s.to_guests = false), [0, 0, 0]),
            ("another port", any(|s| s.ports = vec![4]), [0, 0, 0]),
        ] {
            let mut mirrors = Mirrors::new(vec![spec], 1 << 16);
            let found = [&udp, &tcp, &arp].map(|frame| shown(&mut mirrors, 3, frame));
            assert_eq!(found, expected, "{name}");
        }
    }

    #[test]
    fn every_nth_packet_is_copied_and_truncated() {
        let few = MirrorSpec { one_in: 3, truncate: 20, ..spec() };
        let mut mirrors = Mirrors::new(vec![few, spec()], 1 << 16);
        let packet = frame(17, [10, 0, 0, 2], 53);
        for _ in 0..9 {
            shown(&mut mirrors, 3, &packet);
        }
        let of = |mirror| mirrors.copies.iter().filter(move |(m, _)| *m == mirror).map(|(_, bytes)| bytes.len());
        assert_eq!((of(0).collect::<Vec<_>>(), of(1).collect::<Vec<_>>()), (vec![20; 3], vec![60; 9]));
        assert!(mirrors.copies.iter().all(|(_, bytes)| packet.starts_with(bytes)));
    }

    #[test]
    fn packets_without_room_are_counted_and_memory_does_not_grow() {
        let mut mirrors = Mirrors::new(vec![spec()], 600);
        let packet = frame(17, [10, 0, 0, 2], 53);
        for _ in 0..100 {
            shown(&mut mirrors, 3, &packet);
        }
        let kept = mirrors.copies.iter().count() as u64;
        assert!(kept > 0 && mirrors.copies.bytes.capacity() == 600);
        assert_eq!(kept + mirrors.copies.missed()[0], 100);
        // Frames that are never published.
        (0..2 * MAX_UNSEEN as u32).for_each(|handle| mirrors.placed(3, handle, &packet));
        assert_eq!(mirrors.unseen.len(), MAX_UNSEEN);
        mirrors.copies.clear();
        assert_eq!((mirrors.copies.iter().count(), mirrors.copies.missed()), (0, &[0][..]));
    }
}
