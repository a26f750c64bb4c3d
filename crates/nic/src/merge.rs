//! Receive merging (GRO): in-order TCP segments of a flow become one large packet for a guest that accepts it.

use std::net::{IpAddr, Ipv4Addr};

use bifrost_wire::protocol::{ICMPV6, TCP, UDP};
use bifrost_wire::tcp::Flags;
use bifrost_wire::{checksum, ethernet, ipv4, ipv6, tcp, virtio_net};

use crate::checksum::pseudo;
use crate::flow::FlowKey;
use crate::parse::{L3, Parsed, parse};

/// A piece of a packet, in a buffer named by the caller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// The caller's name for the buffer.
    pub buffer: u32,
    /// Where the piece starts, bytes from the start of the frame in that buffer.
    pub offset: u32,
    /// Length, bytes.
    pub len: u32,
}

/// A packet for the guest: `header` followed by all `parts`.
#[derive(Clone, Copy, Debug)]
pub struct Merged<'a> {
    /// The virtio header; `num_buffers` is left 0 for the port to fill in.
    pub virtio: virtio_net::Header,
    /// New headers; empty when the packet is one frame as it was received.
    pub header: &'a [u8],
    /// Pieces, 1..=[`Merger::MAX_PARTS`]; each in a different buffer.
    pub parts: &'a [Part],
}

/// Merges published frames of one guest. Frames go in in the order in which the guest must see them; packets come out
/// of `emit` in that order within each flow. The payload is not touched, and nothing is allocated after [`Self::new`].
///
/// Segments merge under the rules of Linux's TCP GRO: verified checksum, no IP options or extension headers, equal
/// Ethernet and IP fields, TTL included, equal TCP acknowledgment, window and options, no flags but ACK and PSH, the
/// next sequence number, and the first one's payload size until a shorter one or PSH ends the packet. IPv4
/// identifications must count up unless "don't fragment" makes them meaningless (RFC 6864).
#[derive(Debug)]
pub struct Merger {
    slots: Box<[Slot; SLOTS]>,
    /// Flow hash of each slot, apart from the slots so that the search stays in one cache line.
    hashes: [u32; SLOTS],
    /// Bit i: slot i is open.
    open: u16,
    /// When each slot was opened, for eviction of the oldest.
    stamps: [u64; SLOTS],
    clock: u64,
}

/// Maximum number of open flows.
const SLOTS: usize = 16;
/// Maximum length of headers that can merge: Ethernet, IPv6, TCP with all options.
const HEADER_MAX: usize = V6_L4 + tcp::MAX_HEADER_LEN;
const IP: usize = ethernet::HEADER_LEN;
const V4_L4: usize = IP + ipv4::HEADER_LEN;
const V6_L4: usize = IP + ipv6::HEADER_LEN;

#[derive(Clone, Copy, Debug)]
struct Slot {
    key: FlowKey,
    /// Headers of the first segment, unchanged until the packet is emitted.
    header: [u8; HEADER_MAX],
    header_len: u8,
    v6: bool,
    psh: bool,
    count: u8,
    mss: u16,
    next_id: u16,
    next_seq: u32,
    /// Payload bytes of all parts.
    payload: u32,
    /// Bytes of the first frame.
    first_len: u32,
    parts: [Part; Merger::MAX_PARTS],
}

/// A segment that may take part in merging.
#[derive(Clone, Copy)]
struct Candidate {
    part: Part,
    seq: u32,
    psh: bool,
    v6: bool,
}

impl Default for Merger {
    fn default() -> Self {
        Self::new()
    }
}

impl Merger {
    /// Maximum number of frames in one packet.
    pub const MAX_PARTS: usize = 64;

    /// An empty merger (about 17 KiB).
    pub fn new() -> Self {
        let unspecified = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        let slot = Slot {
            key: FlowKey { src: unspecified, dst: unspecified, src_port: 0, dst_port: 0, protocol: 0 },
            header: [0; HEADER_MAX],
            header_len: 0,
            v6: false,
            psh: false,
            count: 0,
            mss: 0,
            next_id: 0,
            next_seq: 0,
            payload: 0,
            first_len: 0,
            parts: [Part::default(); Self::MAX_PARTS],
        };
        Self { slots: Box::new([slot; SLOTS]), hashes: [0; SLOTS], open: 0, stamps: [0; SLOTS], clock: 0 }
    }

    /// Takes the next frame, in buffer `buffer`. The merger owns the buffer until a packet with it comes out of `emit`,
    /// now or later. `checksum_valid`: the transport checksum has been verified; other frames do not merge.
    pub fn push(&mut self, buffer: u32, frame: &[u8], checksum_valid: bool, emit: &mut impl FnMut(Merged<'_>)) {
        let whole = Part { buffer, offset: 0, len: frame.len() as u32 };
        let Ok(parsed) = parse(frame, frame.len()) else {
            return emit_single(whole, false, emit);
        };
        if parsed.is_fragment() {
            // A fragment shows no ports: it may belong to any of the open flows.
            self.flush(emit);
            return emit_single(whole, false, emit);
        }
        if parsed.protocol != TCP {
            let verifiable = matches!(parsed.protocol, UDP | ICMPV6);
            return emit_single(whole, checksum_valid && verifiable, emit);
        }
        let key = parsed.flow_key();
        let candidate = if checksum_valid { candidate(buffer, frame, &parsed) } else { None };
        if let Some(i) = self.find(parsed.flow_hash, &key) {
            match candidate {
                Some(c) if self.slots[i].accepts(frame, &c) => {
                    if self.slots[i].append(&c) {
                        self.close(i, emit);
                    }
                    return;
                }
                _ => self.close(i, emit),
            }
        }
        match candidate {
            Some(c) if !c.psh => {
                let i = self.vacate(emit);
                self.slots[i].start(key, frame, usize::from(parsed.payload), &c);
                self.hashes[i] = parsed.flow_hash;
                self.clock += 1;
                self.stamps[i] = self.clock;
                self.open |= 1 << i;
            }
            _ => emit_single(whole, checksum_valid, emit),
        }
    }

    /// Emits all held packets, at the end of a batch.
    pub fn flush(&mut self, emit: &mut impl FnMut(Merged<'_>)) {
        // Oldest first, so that flows alternate in their order of arrival.
        while self.open != 0 {
            let i = self.oldest();
            self.close(i, emit);
        }
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.open == 0
    }

    fn find(&self, hash: u32, key: &FlowKey) -> Option<usize> {
        (0..SLOTS).find(|&i| self.open >> i & 1 != 0 && self.hashes[i] == hash && self.slots[i].key == *key)
    }

    fn oldest(&self) -> usize {
        (0..SLOTS).filter(|i| self.open >> i & 1 != 0).min_by_key(|&i| self.stamps[i]).unwrap_or(0)
    }

    /// A free slot; if there is none, emits the oldest packet first.
    fn vacate(&mut self, emit: &mut impl FnMut(Merged<'_>)) -> usize {
        if self.open == u16::MAX {
            let i = self.oldest();
            self.close(i, emit);
        }
        self.open.trailing_ones() as usize
    }

    fn close(&mut self, i: usize, emit: &mut impl FnMut(Merged<'_>)) {
        self.open &= !(1 << i);
        self.slots[i].emit(emit);
    }
}

impl Slot {
    fn start(&mut self, key: FlowKey, frame: &[u8], header_len: usize, c: &Candidate) {
        self.key = key;
        self.header[..header_len].copy_from_slice(&frame[..header_len]);
        self.header_len = header_len as u8;
        self.v6 = c.v6;
        self.psh = false;
        self.count = 1;
        self.mss = c.part.len as u16;
        self.next_id = be16(&frame[IP + 4..]).wrapping_add(1);
        self.next_seq = c.seq.wrapping_add(c.part.len);
        self.payload = c.part.len;
        self.first_len = frame.len() as u32;
        self.parts[0] = c.part;
    }

    /// Whether the segment continues the open packet.
    fn accepts(&self, frame: &[u8], c: &Candidate) -> bool {
        let header_len = usize::from(self.header_len);
        let own = &self.header[..header_len];
        let ip_len = header_len - IP + self.payload as usize + c.part.len as usize;
        if c.seq != self.next_seq
            || c.v6 != self.v6
            || c.part.offset as usize != header_len
            || c.part.len > u32::from(self.mss)
            || ip_len - if self.v6 { ipv6::HEADER_LEN } else { 0 } > 65_535
            || frame[..IP] != own[..IP]
        {
            return false;
        }
        let (ip, own_ip) = (&frame[IP..header_len], &own[IP..]);
        let l4 = if self.v6 { ipv6::HEADER_LEN } else { ipv4::HEADER_LEN };
        let same_ip = if self.v6 {
            // All fields except the payload length.
            ip[..4] == own_ip[..4] && ip[6..40] == own_ip[6..40]
        } else {
            // All fields except total length, identification and checksum.
            ip[..2] == own_ip[..2]
                && ip[6..10] == own_ip[6..10]
                && ip[12..20] == own_ip[12..20]
                && (ip[6] & 0x40 != 0 || be16(&ip[4..]) == self.next_id)
        };
        let (tcp, own_tcp) = (&ip[l4..], &own_ip[l4..]);
        // All fields except sequence number, PSH and checksum.
        same_ip
            && tcp[..4] == own_tcp[..4]
            && tcp[8..13] == own_tcp[8..13]
            && (tcp[13] ^ own_tcp[13]) & !Flags::PSH.0 == 0
            && tcp[14..16] == own_tcp[14..16]
            && tcp[18..] == own_tcp[18..]
    }

    /// Adds an accepted segment; returns whether the packet is complete with it.
    fn append(&mut self, c: &Candidate) -> bool {
        self.parts[usize::from(self.count)] = c.part;
        self.count += 1;
        self.next_id = self.next_id.wrapping_add(1);
        self.next_seq = self.next_seq.wrapping_add(c.part.len);
        self.payload += c.part.len;
        self.psh = c.psh;
        c.psh || c.part.len < u32::from(self.mss) || usize::from(self.count) == Merger::MAX_PARTS
    }

    fn emit(&mut self, emit: &mut impl FnMut(Merged<'_>)) {
        if self.count == 1 {
            let whole = Part { offset: 0, len: self.first_len, ..self.parts[0] };
            return emit_single(whole, true, emit);
        }
        let header_len = usize::from(self.header_len);
        let header = &mut self.header[..header_len];
        let l4 = if self.v6 { V6_L4 } else { V4_L4 };
        let segment_len = header_len - l4 + self.payload as usize;
        if self.v6 {
            put16(header, IP + 4, segment_len as u16);
        } else {
            put16(header, IP + 2, (ipv4::HEADER_LEN + segment_len) as u16);
            ipv4::fill_checksum(&mut header[IP..V4_L4]);
        }
        let partial = checksum::fold(pseudo(self.key.src, self.key.dst, TCP, segment_len));
        put16(header, l4 + tcp::CHECKSUM_OFFSET, partial);
        if self.psh {
            header[l4 + 13] |= Flags::PSH.0;
        }
        let virtio = virtio_net::Header {
            flags: virtio_net::F_NEEDS_CSUM,
            gso_type: if self.v6 { virtio_net::GSO_TCPV6 } else { virtio_net::GSO_TCPV4 },
            hdr_len: header_len as u16,
            gso_size: self.mss,
            csum_start: l4 as u16,
            csum_offset: tcp::CHECKSUM_OFFSET as u16,
            num_buffers: 0,
        };
        emit(Merged { virtio, header, parts: &self.parts[..usize::from(self.count)] });
    }
}

fn emit_single(whole: Part, checksum_valid: bool, emit: &mut impl FnMut(Merged<'_>)) {
    let flags = if checksum_valid { virtio_net::F_DATA_VALID } else { 0 };
    emit(Merged { virtio: virtio_net::Header { flags, ..Default::default() }, header: &[], parts: &[whole] });
}

/// Whether the frame may be merged at all.
fn candidate(buffer: u32, frame: &[u8], parsed: &Parsed) -> Option<Candidate> {
    let tcp = parsed.tcp?;
    let payload = u32::from(parsed.payload);
    let plain_ip = usize::from(parsed.l3) == IP
        && match parsed.kind {
            // Some receivers would lose the reserved bit; no real stack sets it.
            L3::V4 => {
                usize::from(parsed.l4) == V4_L4 && frame[20] & 0x80 == 0 && ipv4::checksum_is_valid(&frame[IP..V4_L4])
            }
            L3::V6 => usize::from(parsed.l4) == V6_L4,
            _ => false,
        };
    let plain_tcp = tcp.flags.without(Flags::PSH) == Flags::ACK && parsed.end > payload;
    (plain_ip && plain_tcp).then_some(Candidate {
        part: Part { buffer, offset: payload, len: parsed.end - payload },
        seq: tcp.seq,
        psh: tcp.flags.contains(Flags::PSH),
        v6: parsed.kind == L3::V6,
    })
}

fn be16(bytes: &[u8]) -> u16 {
    u16::from_be_bytes([bytes[0], bytes[1]])
}

fn put16(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_be_bytes());
}
