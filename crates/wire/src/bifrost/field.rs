//! Reads and writes fields that the formats share.

/// The big-endian word at byte `at`. Callers pass fixed-size headers and constant offsets within them.
pub(super) fn word<const N: usize>(bytes: &[u8; N], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Two 4-bit fields in one byte; only the low 4 bits of each are used.
pub(super) fn byte(high: u8, low: u8) -> u8 {
    high << 4 | low & 0x0f
}
