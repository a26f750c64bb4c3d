//! The software ACK (RDM §3.3): 24 bytes as in the paper, 8 for flow control, and 4 for each number.

use super::control::{ACK, Tag};
use super::{MessageId, Refusal, first_byte, half, long, word};

/// Identifies a work request that has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Number {
    /// A SEND, by its global number.
    Send(u64),
    /// A WRITE, by its immediate data without the hint.
    Write(u32),
}

/// Up to 32 numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numbers {
    list: [Number; Self::MAX],
    len: u8,
}

impl Numbers {
    /// Maximum number of entries.
    pub const MAX: usize = 32;

    /// An empty list.
    #[must_use]
    pub const fn new() -> Self {
        Self { list: [Number::Write(0); Self::MAX], len: 0 }
    }

    /// Appends a number; `false` if there are 32.
    pub fn push(&mut self, number: Number) -> bool {
        let Some(slot) = self.list.get_mut(usize::from(self.len)) else { return false };
        *slot = number;
        self.len += 1;
        true
    }

    /// The numbers, the one that arrived last first.
    #[must_use]
    pub fn as_slice(&self) -> &[Number] {
        &self.list[..usize::from(self.len)]
    }
}

impl Default for Numbers {
    fn default() -> Self {
        Self::new()
    }
}

/// An ACK.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ack {
    /// The receiver's name for the connection.
    pub tag: Tag,
    /// Sequence number of the ACK in its connection; wraps.
    pub sequence: u16,
    /// How many of the numbers, from the first on, appear in an ACK for the first time.
    pub fresh: u8,
    /// Time from the arrival of the first number to this ACK (T3' - T2), ns; `None` if there is no number or the time
    /// exceeds 4 s.
    pub held_ns: Option<u32>,
    /// All messages before this one have arrived.
    pub base: MessageId,
    /// The sender may start messages before this one.
    pub limit: MessageId,
    /// Work requests that arrived, the last first.
    pub numbers: Numbers,
}

impl Ack {
    /// Length without numbers, bytes.
    pub const FIXED_LEN: usize = 32;
    /// Length with 32 numbers, bytes.
    pub const MAX_LEN: usize = Self::FIXED_LEN + 4 * Numbers::MAX;
    const NOT_HELD: u32 = u32::MAX;

    /// Writes the ACK to the start of `out` and returns its length. The first global number that is 2^32 or more above
    /// the smallest is left out (the paper's rule), and so are all numbers behind it.
    pub fn emit_into(&self, out: &mut [u8; Self::MAX_LEN]) -> usize {
        let global = |number: &Number| match number {
            Number::Send(global) => Some(*global),
            Number::Write(_) => None,
        };
        let least = self.numbers.as_slice().iter().filter_map(global).min().unwrap_or(0);
        let mut bitmap = 0u32;
        let mut count = 0;
        let (fixed, list) = out.split_at_mut(Self::FIXED_LEN);
        for (slot, number) in list.as_chunks_mut::<4>().0.iter_mut().zip(self.numbers.as_slice()) {
            let value = match number {
                Number::Send(global) => match u32::try_from(global - least) {
                    Ok(relative) => {
                        bitmap |= 1 << (31 - count);
                        relative
                    }
                    Err(_) => break,
                },
                Number::Write(name) => *name,
            };
            *slot = value.to_be_bytes();
            count += 1;
        }
        let [s0, s1] = self.sequence.to_be_bytes();
        fixed[..4].copy_from_slice(&[first_byte(ACK), self.fresh.min(count), s0, s1]);
        fixed[4..8].copy_from_slice(&self.tag.0.to_be_bytes());
        fixed[8..12].copy_from_slice(&bitmap.to_be_bytes());
        fixed[12..20].copy_from_slice(&least.to_be_bytes());
        fixed[20..24].copy_from_slice(&self.held_ns.unwrap_or(Self::NOT_HELD).to_be_bytes());
        fixed[24..28].copy_from_slice(&self.base.0.to_be_bytes());
        fixed[28..32].copy_from_slice(&self.limit.0.to_be_bytes());
        Self::FIXED_LEN + 4 * usize::from(count)
    }

    /// Parses a whole datagram; the caller has checked version and kind.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, Refusal> {
        let (fixed, list) = bytes.split_first_chunk::<{ Self::FIXED_LEN }>().ok_or(Refusal::Length)?;
        let (list, rest) = list.as_chunks::<4>();
        if !rest.is_empty() {
            return Err(Refusal::Length);
        }
        if list.len() > Numbers::MAX || usize::from(fixed[1]) > list.len() {
            return Err(Refusal::Count);
        }
        let bitmap = word(fixed, 8);
        let least = long(fixed, 12);
        let mut numbers = Numbers::new();
        for (at, number) in list.iter().enumerate() {
            let value = u32::from_be_bytes(*number);
            numbers.push(if bitmap & (1 << (31 - at)) != 0 {
                Number::Send(least.checked_add(u64::from(value)).ok_or(Refusal::Value)?)
            } else {
                Number::Write(value & 0x7fff_ffff)
            });
        }
        Ok(Self {
            tag: Tag(word(fixed, 4)),
            sequence: half(fixed, 2),
            fresh: fixed[1],
            held_ns: Some(word(fixed, 20)).filter(|held| *held != Self::NOT_HELD),
            base: MessageId(word(fixed, 24)),
            limit: MessageId(word(fixed, 28)),
            numbers,
        })
    }
}
