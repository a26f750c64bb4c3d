//! Pre-Processor and Post-Processor (Triton): parse and validate, segment, merge, checksum.

/// Work that a guest left to the network side, from its virtio header (virtio 1.3, 5.1.6.2), checked against the frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offload {
    /// The transport checksum is partial: start of the summed area and offset of the field from there, bytes.
    pub checksum: Option<(u16, u16)>,
    /// The frame is to be segmented.
    pub segment: Option<Segment>,
}

/// How a frame is to be segmented.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Payload bytes per segment, 1..=65535.
    pub mss: u16,
    /// Which protocol.
    pub kind: SegmentKind,
}

/// Protocol of a frame to be segmented.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentKind {
    /// TCP over IPv4.
    TcpV4,
    /// TCP over IPv6.
    TcpV6,
    /// UDP (USO), either IP version.
    Udp,
}
