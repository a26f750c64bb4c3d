//! A whole packet: the headers that the opcode names, and the payload.

use super::{Aeth, Bth, Deth, ICRC_LEN, Opcode, Operation, Reth, Transport};

/// Why a UDP payload is not a valid packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Refusal {
    /// It ends before its headers and the ICRC do.
    #[error("packet ends before its headers do")]
    Truncated,
    /// The header version is not 0.
    #[error("header version is not 0")]
    Version,
    /// The opcode is not one that is supported.
    #[error("opcode is not supported")]
    Opcode,
    /// More pad bytes than payload, or the length of headers, payload and pad is not a multiple of four bytes.
    #[error("pad count does not fit the payload")]
    Pad,
    /// The acknowledgement's syndrome is reserved.
    #[error("acknowledgement syndrome is reserved")]
    Syndrome,
}

/// The headers of a packet. Those that the opcode does not name are not sent, and `None` when parsed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Header {
    /// The base header.
    pub bth: Bth,
    /// Datagram header, in datagrams.
    pub deth: Option<Deth>,
    /// RDMA header, in the first packet of an RDMA WRITE.
    pub reth: Option<Reth>,
    /// ACK header, in acknowledgements.
    pub aeth: Option<Aeth>,
    /// Immediate data: 32 bits that the receiver's completion shows.
    pub immediate: Option<u32>,
}

impl Header {
    /// Maximum length, bytes: BTH, RETH and immediate data.
    pub const MAX_LEN: usize = Bth::LEN + Reth::LEN + 4;

    /// Writes the headers to the start of `out` and returns their length.
    pub fn emit_into(&self, out: &mut [u8; Self::MAX_LEN]) -> usize {
        out[..Bth::LEN].copy_from_slice(&self.bth.emit());
        let mut at = Bth::LEN;
        let mut put = |bytes: &[u8]| {
            if let Some(slot) = out.get_mut(at..at + bytes.len()) {
                slot.copy_from_slice(bytes);
                at += bytes.len();
            }
        };
        if let Some(deth) = self.deth {
            put(&deth.emit());
        }
        if let Some(reth) = self.reth {
            put(&reth.emit());
        }
        if let Some(aeth) = self.aeth {
            put(&aeth.emit());
        }
        if let Some(immediate) = self.immediate {
            put(&immediate.to_be_bytes());
        }
        at
    }
}

/// A packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Packet<'a> {
    /// Its opcode.
    pub opcode: Opcode,
    /// Its headers.
    pub header: Header,
    /// Its payload, without pad bytes.
    pub payload: &'a [u8],
}

impl<'a> Packet<'a> {
    /// Parses a UDP payload. The ICRC is not verified here: see [`super::Icrc::is_valid`].
    ///
    /// # Errors
    /// A [`Refusal`]. After [`Refusal::Opcode`] the base header is valid: parse it with [`Bth::parse`].
    #[inline]
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Refusal> {
        let (covered, _) = bytes.split_last_chunk::<ICRC_LEN>().ok_or(Refusal::Truncated)?;
        let (bth, mut rest) = covered.split_first_chunk::<{ Bth::LEN }>().ok_or(Refusal::Truncated)?;
        let bth = Bth::parse(bth).ok_or(Refusal::Version)?;
        let opcode = Opcode::from_byte(bth.opcode).ok_or(Refusal::Opcode)?;
        let mut header = Header { bth, ..Header::default() };
        if opcode.transport == Transport::Ud {
            header.deth = Some(Deth::parse(take(&mut rest)?));
        }
        if opcode.operation.has_reth() {
            header.reth = Some(Reth::parse(take(&mut rest)?));
        }
        if opcode.operation == Operation::Acknowledge {
            header.aeth = Some(Aeth::parse(take(&mut rest)?).ok_or(Refusal::Syndrome)?);
        }
        if opcode.operation.has_immediate() {
            header.immediate = Some(u32::from_be_bytes(*take(&mut rest)?));
        }
        if rest.len() % 4 != 0 || rest.len() < usize::from(bth.pad) {
            return Err(Refusal::Pad);
        }
        Ok(Self { opcode, header, payload: &rest[..rest.len() - usize::from(bth.pad)] })
    }
}

fn take<'a, const N: usize>(rest: &mut &'a [u8]) -> Result<&'a [u8; N], Refusal> {
    let (taken, left) = rest.split_first_chunk::<N>().ok_or(Refusal::Truncated)?;
    *rest = left;
    Ok(taken)
}
