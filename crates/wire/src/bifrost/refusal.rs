//! Why a datagram is not a valid packet (PROTOCOL §16.1).

/// Why a datagram was refused. The reasons carry no data, so that a counter can be kept for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Refusal {
    /// Shorter than the fixed header of its type.
    #[error("datagram is shorter than the header of its packet type")]
    ShortDatagram,
    /// A packet type that no version defines.
    #[error("unknown packet type")]
    PacketType,
    /// Version 0, or a version that this implementation does not speak where the packet must have a known one.
    #[error("protocol version is 0 or not supported")]
    Version,
    /// A REQUEST whose lowest accepted version is 0 or above its highest.
    #[error("connection request accepts no version: its lowest is 0 or above its highest")]
    VersionRange,
    /// Destination (or, in set-up and RESET, local) connection identifier 0 where one is required.
    #[error("connection identifier is 0")]
    ZeroCid,
    /// A DATA packet whose inner frame is shorter than an Ethernet header.
    #[error("inner frame is shorter than an Ethernet header")]
    ShortFrame,
    /// An ACK type of 3 or above.
    #[error("unknown ACK type")]
    AckType,
    /// An ACK bitmap of more than eight words.
    #[error("ACK bitmap is longer than 8 words")]
    BitmapLength,
    /// An ACK that ends before its bitmap does.
    #[error("ACK bitmap is truncated")]
    BitmapTruncated,
    /// A set-up packet that ends before its body does.
    #[error("connection set-up body is truncated")]
    BodyTruncated,
    /// A REJECT with reason 0 or above 4.
    #[error("unknown reason in a connection rejection")]
    RejectReason,
    /// A set-up packet that names a multicast address as a vNIC.
    #[error("connection set-up names a multicast address as a vNIC")]
    GroupVnic,
    /// A REQUEST or RESPONSE with a receive window of 0 packets.
    #[error("connection set-up offers a receive window of 0 packets")]
    ZeroWindow,
    /// Bytes after the end of a packet of fixed size.
    #[error("bytes follow the end of the packet")]
    TrailingBytes,
    /// An empty bundle, or one with a packet whose length is below the minimum or exceeds the datagram.
    #[error("a packet's length does not fit into its bundle")]
    BundleLength,
    /// A bundle with a packet of a type that may not be bundled, or of a worker other than the first packet's.
    #[error("bundle contains a packet of a forbidden type or of another worker")]
    BundleContent,
}

impl Refusal {
    /// Every reason, in the order of [`Refusal::index`].
    pub const ALL: [Self; 16] = [
        Self::ShortDatagram,
        Self::PacketType,
        Self::Version,
        Self::VersionRange,
        Self::ZeroCid,
        Self::ShortFrame,
        Self::AckType,
        Self::BitmapLength,
        Self::BitmapTruncated,
        Self::BodyTruncated,
        Self::RejectReason,
        Self::GroupVnic,
        Self::ZeroWindow,
        Self::TrailingBytes,
        Self::BundleLength,
        Self::BundleContent,
    ];

    /// Index of the reason in [`Refusal::ALL`].
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }

    /// A stable name for counters, in snake case.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::ShortDatagram => "short_datagram",
            Self::PacketType => "packet_type",
            Self::Version => "version",
            Self::VersionRange => "version_range",
            Self::ZeroCid => "zero_cid",
            Self::ShortFrame => "short_frame",
            Self::AckType => "ack_type",
            Self::BitmapLength => "bitmap_length",
            Self::BitmapTruncated => "bitmap_truncated",
            Self::BodyTruncated => "body_truncated",
            Self::RejectReason => "reject_reason",
            Self::GroupVnic => "group_vnic",
            Self::ZeroWindow => "zero_window",
            Self::TrailingBytes => "trailing_bytes",
            Self::BundleLength => "bundle_length",
            Self::BundleContent => "bundle_content",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn index_and_list_agree() {
        for (i, reason) in Refusal::ALL.into_iter().enumerate() {
            assert_eq!(reason.index(), i, "{reason:?}");
            assert!(Refusal::ALL.iter().filter(|r| r.name() == reason.name()).count() == 1);
        }
    }
}
