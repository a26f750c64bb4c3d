//! IP protocol numbers (IANA "Assigned Internet Protocol Numbers") used here.

/// ICMP for IPv4.
pub const ICMP: u8 = 1;
/// TCP.
pub const TCP: u8 = 6;
/// UDP.
pub const UDP: u8 = 17;
/// GRE.
pub const GRE: u8 = 47;
/// ICMPv6.
pub const ICMPV6: u8 = 58;
