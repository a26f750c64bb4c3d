//! `struct virtio_net_hdr`, in front of every frame on a virtio network queue and on a TAP device with `IFF_VNET_HDR`
//! (virtio 1.3, section 5.1.6). Little endian, as in virtio 1.

use crate::Malformed;

/// Length without `num_buffers`, bytes.
pub const SHORT_LEN: usize = 10;
/// Length with `num_buffers` (virtio 1, mergeable receive buffers), bytes.
pub const LEN: usize = 12;

/// Flag: the receiver of the frame must complete the checksum from `csum_start` on.
pub const F_NEEDS_CSUM: u8 = 1;
/// Flag: the checksum has been verified.
pub const F_DATA_VALID: u8 = 2;

/// No segmentation.
pub const GSO_NONE: u8 = 0;
/// TCP over IPv4.
pub const GSO_TCPV4: u8 = 1;
/// UDP, by IP fragmentation.
pub const GSO_UDP: u8 = 3;
/// TCP over IPv6.
pub const GSO_TCPV6: u8 = 4;
/// UDP segmentation offload (USO).
pub const GSO_UDP_L4: u8 = 5;
/// Added to the others: the TCP segment has ECN set.
pub const GSO_ECN: u8 = 0x80;

/// The header's fields as written; nothing is validated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Header {
    /// [`F_NEEDS_CSUM`], [`F_DATA_VALID`].
    pub flags: u8,
    /// One of the `GSO_` values, perhaps with [`GSO_ECN`].
    pub gso_type: u8,
    /// Length of all headers of the frame, bytes; only a hint.
    pub hdr_len: u16,
    /// Payload of one segment, bytes.
    pub gso_size: u16,
    /// Where summing starts, bytes from the start of the frame.
    pub csum_start: u16,
    /// Where the checksum goes, bytes from `csum_start`.
    pub csum_offset: u16,
    /// Number of receive buffers that the frame fills; only in the 12-byte form.
    pub num_buffers: u16,
}

impl Header {
    /// Reads the 10-byte form.
    ///
    /// # Errors
    /// [`Malformed::Truncated`].
    #[inline]
    pub fn parse_short(bytes: &[u8]) -> Result<Self, Malformed> {
        let b = bytes.first_chunk::<SHORT_LEN>().ok_or(Malformed::Truncated)?;
        Ok(Self {
            flags: b[0],
            gso_type: b[1],
            hdr_len: u16::from_le_bytes([b[2], b[3]]),
            gso_size: u16::from_le_bytes([b[4], b[5]]),
            csum_start: u16::from_le_bytes([b[6], b[7]]),
            csum_offset: u16::from_le_bytes([b[8], b[9]]),
            num_buffers: 0,
        })
    }

    /// Reads the 12-byte form.
    ///
    /// # Errors
    /// [`Malformed::Truncated`].
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        let b = bytes.first_chunk::<LEN>().ok_or(Malformed::Truncated)?;
        Ok(Self { num_buffers: u16::from_le_bytes([b[10], b[11]]), ..Self::parse_short(b)? })
    }

    /// The 10-byte form.
    #[must_use]
    pub fn emit_short(&self) -> [u8; SHORT_LEN] {
        let mut out = [self.flags, self.gso_type, 0, 0, 0, 0, 0, 0, 0, 0];
        let fields = [self.hdr_len, self.gso_size, self.csum_start, self.csum_offset];
        for (slot, field) in out[2..].as_chunks_mut::<2>().0.iter_mut().zip(fields) {
            *slot = field.to_le_bytes();
        }
        out
    }

    /// The 12-byte form.
    #[must_use]
    pub fn emit(&self) -> [u8; LEN] {
        let mut out = [0; LEN];
        out[..SHORT_LEN].copy_from_slice(&self.emit_short());
        out[SHORT_LEN..].copy_from_slice(&self.num_buffers.to_le_bytes());
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms() {
        let header = Header {
            flags: F_NEEDS_CSUM,
            gso_type: GSO_TCPV4 | GSO_ECN,
            hdr_len: 0x0102,
            gso_size: 0x0304,
            csum_start: 0x0506,
            csum_offset: 0x0708,
            num_buffers: 0x090a,
        };
        let bytes = header.emit();
        assert_eq!(bytes, [1, 0x81, 2, 1, 4, 3, 6, 5, 8, 7, 0x0a, 9]);
        assert_eq!(Header::parse(&bytes), Ok(header));
        assert_eq!(header.emit_short(), bytes[..10]);
        assert_eq!(Header::parse_short(&bytes), Ok(Header { num_buffers: 0, ..header }));
    }

    #[test]
    fn truncated() {
        let bytes = [0; LEN];
        for len in 0..LEN {
            assert_eq!(Header::parse(&bytes[..len]), Err(Malformed::Truncated));
            assert_eq!(Header::parse_short(&bytes[..len]).is_ok(), len >= SHORT_LEN);
        }
    }
}
