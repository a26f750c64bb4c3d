//! Why a frame, or its virtio header, is refused.

use std::fmt;

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// Why a frame, or the offload requested for it, is refused. Every reason is a counter.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum Malformed { $($(#[$doc])* $name,)* }

        impl Malformed {
            /// Every reason, in the order of [`Self::index`].
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// Name of the reason's counter, without a unit (packets are counted).
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }
        }
    };
}

reasons! {
    /// Shorter than an Ethernet header with its tag.
    EthernetTruncated = "ethernet_truncated",
    /// Truncated ARP.
    ArpTruncated = "arp_truncated",
    /// ARP other than IPv4 over Ethernet.
    ArpKind = "arp_kind",
    /// Truncated IPv4 header.
    Ipv4Truncated = "ipv4_truncated",
    /// IPv4 by EtherType, not by version, or a header length below 20 bytes.
    Ipv4Header = "ipv4_header",
    /// IPv4 total length that does not fit header and frame.
    Ipv4Length = "ipv4_length",
    /// Truncated IPv6 header.
    Ipv6Truncated = "ipv6_truncated",
    /// IPv6 by EtherType, not by version.
    Ipv6Header = "ipv6_header",
    /// IPv6 payload length beyond the frame.
    Ipv6Length = "ipv6_length",
    /// IPv6 extension headers that are truncated, too many, or too long.
    Ipv6Extensions = "ipv6_extensions",
    /// IPv4 options that do not fit the header.
    Ipv4Options = "ipv4_options",
    /// A source route: IPv4 options, or an IPv6 routing header of type 0, 1 or 2 with further destinations.
    SourceRoute = "source_route",
    /// A fragment without payload; one whose end is not a multiple of 8 bytes although others follow; or one that ends
    /// beyond the maximum packet length.
    FragmentLength = "fragment_length",
    /// A first fragment without the whole transport header (RFC 1858, RFC 7112), or a later one that starts inside the
    /// header (RFC 3128).
    TinyFragment = "tiny_fragment",
    /// An IPv6 fragment with a second fragment header, or with extension headers behind the first.
    FragmentExtensions = "fragment_extensions",
    /// Truncated TCP header, or an invalid data offset.
    TcpHeader = "tcp_header",
    /// Truncated UDP header, or an invalid length.
    UdpHeader = "udp_header",
    /// A partial checksum outside the frame, or in its headers but not in the transport's checksum field.
    ChecksumRange = "checksum_range",
    /// A segmentation type that is unknown or does not fit the frame.
    GsoType = "gso_type",
    /// Segmentation without a partial transport checksum.
    GsoChecksum = "gso_checksum",
    /// Segmentation with a segment size of 0.
    GsoSize = "gso_size",
    /// More segments than allowed for one frame.
    GsoSegments = "gso_segments",
    /// Longer than the maximum frame.
    FrameTooLong = "frame_too_long",
    /// The part of the frame that must contain all headers does not.
    HeadTooShort = "head_too_short",
}

impl Malformed {
    /// Position in [`Self::ALL`].
    pub const fn index(self) -> usize {
        self as usize
    }
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::error::Error for Malformed {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_has_its_index_and_a_unique_name() {
        for (i, reason) in Malformed::ALL.iter().enumerate() {
            assert_eq!(reason.index(), i);
            assert!(Malformed::ALL.iter().filter(|r| r.name() == reason.name()).count() == 1);
        }
    }
}
