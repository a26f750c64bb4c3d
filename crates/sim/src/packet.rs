//! A datagram between hosts.

use bifrost_wire::bifrost::{DataHeader, Packet as Bifrost, parse};
use bifrost_wire::vxlan;

/// UDP port on which hosts receive BIFROST.
pub const BIFROST_PORT: u16 = 4794;
/// UDP port on which hosts receive plain VXLAN.
pub const VXLAN_PORT: u16 = 4789;
/// TTL of packets from hosts.
pub(crate) const INITIAL_TTL: u8 = 64;

/// Packets move between queues and are reused. A box moves as one word.
pub(crate) type Parcel = Box<Packet>;

/// Pkt Type of a bundle (PROTOCOL §3.6).
const BUNDLE: u8 = 8;

/// Maximum length of a packet that gets a small buffer: all packets without data.
const SMALL_BYTES: usize = 256;

/// Packets for reuse. Large buffers are kept separately, so that probes and ACKs do not occupy them.
#[derive(Debug, Default)]
pub(crate) struct Spares {
    small: Vec<Parcel>,
    large: Vec<Parcel>,
}

impl Spares {
    /// A packet with a buffer suitable for this length; its content is arbitrary.
    pub(crate) fn take(&mut self, bytes: usize) -> Parcel {
        let spare = if bytes > SMALL_BYTES { self.large.pop() } else { self.small.pop() };
        spare.unwrap_or_default()
    }

    /// Returns a packet that is no longer needed.
    pub(crate) fn give(&mut self, packet: Parcel) {
        if packet.bytes.capacity() > SMALL_BYTES {
            self.large.push(packet);
        } else {
            self.small.push(packet);
        }
    }
}

/// A datagram.
#[derive(Clone, Debug, Default)]
pub struct Packet {
    /// UDP payload, from the VXLAN header on.
    pub bytes: Vec<u8>,
    /// Sending host.
    pub src: u32,
    /// Receiving host.
    pub dst: u32,
    /// Outer UDP source port: the path.
    pub source_port: u16,
    /// Outer UDP destination port: [`BIFROST_PORT`] or [`VXLAN_PORT`].
    pub dest_port: u16,
    /// Outer ECN codepoint.
    pub ecn: u8,
    /// Outer DSCP.
    pub dscp: u8,
    /// Outer TTL.
    pub ttl: u8,
    /// A bit has flipped: the receiving host will drop it.
    pub corrupted: bool,
    /// When its host sent it, ns.
    pub sent_at: u64,
    /// When it entered the link that it is on, ns.
    pub entered_at: u64,
    /// The link that it is on.
    pub link: u32,
}

impl Packet {
    /// The headers and frames of DATA packets.
    pub fn data(&self) -> impl Iterator<Item = (DataHeader, &[u8])> {
        self.bifrost().filter_map(|packet| match packet? {
            Bifrost::Data(header, frame) => Some((header, frame)),
            _ => None,
        })
    }

    /// Passes the CIDs and frames of DATA packets to `see`, without parsing the rest.
    pub(crate) fn data_quick(&self, mut see: impl FnMut(u32, &[u8])) {
        let mut packet = |bytes: &[u8]| {
            if let Some(&[1, _, _, _, _, _, _, _, a, b, c, d]) = bytes.first_chunk()
                && let Some(frame) = bytes.get(DataHeader::LEN..)
            {
                see(u32::from_be_bytes([a, b, c, d]), frame);
            }
        };
        let payload = self.bytes.get(vxlan::HEADER_LEN..).filter(|_| self.dest_port == BIFROST_PORT);
        match payload {
            Some(bytes) if bytes.first() == Some(&BUNDLE) => {
                if let Ok(Bifrost::Bundle(bundle)) = parse(bytes) {
                    bundle.packets().for_each(packet);
                }
            }
            Some(bytes) => packet(bytes),
            None => {}
        }
    }

    /// Number of packets in it: 1, or those of a bundle.
    pub(crate) fn count(&self) -> usize {
        match self.bytes.get(vxlan::HEADER_LEN..).map(|bytes| (bytes.first(), bytes)) {
            Some((Some(&BUNDLE), bytes)) if self.dest_port == BIFROST_PORT => match parse(bytes) {
                Ok(Bifrost::Bundle(bundle)) => bundle.packets().count(),
                _ => 1,
            },
            _ => 1,
        }
    }

    /// Parses the BIFROST packets in it; `None` for invalid ones.
    pub fn bifrost(&self) -> impl Iterator<Item = Option<Bifrost<'_>>> {
        let whole = (self.dest_port == BIFROST_PORT).then(|| parse(vxlan::parse(&self.bytes).ok()?.1).ok());
        let bundle = match whole {
            Some(Some(Bifrost::Bundle(bundle))) => Some(bundle),
            _ => None,
        };
        let alone = if bundle.is_some() { None } else { whole };
        alone.into_iter().chain(bundle.into_iter().flat_map(|bundle| bundle.packets().map(|packet| parse(packet).ok())))
    }

    /// The frame in plain VXLAN.
    pub fn plain(&self) -> Option<&[u8]> {
        if self.dest_port != VXLAN_PORT {
            return None;
        }
        vxlan::parse(&self.bytes).ok().map(|(_, frame)| frame)
    }

    /// The VNI.
    pub fn vni(&self) -> Option<u32> {
        vxlan::parse(&self.bytes).ok().map(|(vni, _)| vni.get())
    }
}
