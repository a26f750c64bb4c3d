//! Why a standard header is invalid.

/// Why a header was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Malformed {
    /// The bytes end before the header does.
    #[error("bytes end before the header does")]
    Truncated,
    /// The version field names another protocol.
    #[error("version field names another protocol")]
    Version,
    /// The header's own length field is below the minimum.
    #[error("header length field is below the minimum")]
    HeaderLength,
    /// A length field is shorter than the header, or reaches beyond the available bytes.
    #[error("length field is shorter than the header or exceeds the available bytes")]
    Length,
    /// Well-formed, but of a hardware, protocol or message type that is not supported.
    #[error("kind is not supported")]
    Kind,
    /// More IPv6 extension headers, or longer ones, than the parser walks.
    #[error("too many IPv6 extension headers")]
    Extensions,
    /// A second fragment header, or an extension header behind the fragment header of a fragmented packet.
    #[error("extension header behind an IPv6 fragment header")]
    Fragment,
    /// The sender chooses the route: loose or strict source route of IPv4, routing headers of types 0 to 2 of IPv6.
    #[error("source route")]
    SourceRoute,
    /// IPv4 options that do not end where the header does.
    #[error("IPv4 options do not fit the header")]
    Options,
    /// A VXLAN header that does not carry a valid VNI (I flag clear).
    #[error("VXLAN I flag is not set")]
    VniFlag,
}
