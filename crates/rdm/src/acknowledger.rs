//! Arrivals to acknowledge (RDM §6.2).

use bifrost_wire::rdm::{Number, Numbers};

use crate::NEVER;

/// The last arrivals of a connection.
#[derive(Debug)]
pub(crate) struct Acknowledger {
    recent: [Number; Numbers::MAX],
    /// A ring: number of entries, and index of the next one.
    len: u8,
    next: u8,
    /// Arrivals that are in no ACK yet.
    fresh: u8,
    bytes: u32,
    /// Arrival of the last one (T2), ns of the NIC's clock.
    arrived_ns: u64,
    sequence: u16,
    /// When an ACK is due, ns.
    pub(crate) due: u64,
}

impl Acknowledger {
    pub(crate) fn new() -> Self {
        Self {
            recent: [Number::Write(0); Numbers::MAX],
            len: 0,
            next: 0,
            fresh: 0,
            bytes: 0,
            arrived_ns: 0,
            sequence: 0,
            due: NEVER,
        }
    }

    /// Records an arrival that must be acknowledged by `due`.
    pub(crate) fn note(&mut self, number: Number, bytes: u32, arrived_ns: u64, due: u64) {
        self.recent[usize::from(self.next)] = number;
        self.next = (self.next + 1) % Numbers::MAX as u8;
        self.len = (self.len + 1).min(Numbers::MAX as u8);
        self.fresh = (self.fresh + 1).min(Numbers::MAX as u8);
        self.bytes = self.bytes.saturating_add(bytes);
        self.arrived_ns = arrived_ns;
        self.due = self.due.min(due);
    }

    /// Arrivals, and bytes, that are in no ACK yet.
    pub(crate) fn waiting(&self) -> (u8, u32) {
        (self.fresh, self.bytes)
    }

    /// Contents of an ACK: the numbers, how many of them are fresh, its sequence number, and the arrival of the first.
    /// They count as sent.
    pub(crate) fn take(&mut self) -> (Numbers, u8, u16, u64) {
        let mut numbers = Numbers::new();
        let max = Numbers::MAX as u8;
        for back in 1..=self.len {
            numbers.push(self.recent[usize::from((self.next + max - back) % max)]);
        }
        let fresh = std::mem::take(&mut self.fresh);
        self.bytes = 0;
        self.due = NEVER;
        self.sequence = self.sequence.wrapping_add(1);
        (numbers, fresh, self.sequence, self.arrived_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_32_are_named_newest_first() {
        let mut acknowledger = Acknowledger::new();
        for n in 0..40 {
            acknowledger.note(Number::Send(n), 10, n + 1000, 500 - n);
        }
        assert_eq!((acknowledger.waiting(), acknowledger.due), ((32, 400), 461));
        let (numbers, fresh, sequence, arrived) = acknowledger.take();
        let expected: Vec<_> = (8..40).rev().map(Number::Send).collect();
        assert_eq!((numbers.as_slice(), fresh, sequence, arrived), (&expected[..], 32, 1, 1039));
        acknowledger.note(Number::Write(7), 10, 2000, 500);
        let (numbers, fresh, sequence, _) = acknowledger.take();
        assert_eq!((numbers.as_slice()[0], fresh, sequence), (Number::Write(7), 1, 2));
        assert_eq!(numbers.as_slice()[1..], expected[..31]);
    }
}
