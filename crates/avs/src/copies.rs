//! Bookkeeping of the copies of another switch's conversations.

use crate::session::{Handle, Payload, Sessions};

/// Numbers of records taken over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TakenOver {
    /// Sessions and connections.
    pub sessions: u64,
    /// NAT mappings.
    pub mappings: u64,
    /// Records that were skipped: they are invalid, their port does not exist, there is no room, or they exist already;
    /// and copies of sessions that later ones have evicted.
    pub left_out: u64,
}

impl TakenOver {
    /// Both together.
    pub(crate) fn and(self, other: TakenOver) -> TakenOver {
        TakenOver {
            sessions: self.sessions + other.sessions,
            mappings: self.mappings + other.mappings,
            left_out: self.left_out + other.left_out,
        }
    }
}

/// Positions of the copies in this switch, by their places in the other switch.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    pub(crate) sessions: Vec<Copy<Handle>>,
    pub(crate) connections: Vec<Copy<Handle>>,
    /// Each copy counts as one conversation of its mapping.
    pub(crate) mappings: Vec<Copy<u32>>,
    pub(crate) taken: TakenOver,
}

/// The copy of a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Copy<H> {
    /// The place has no copy: it is empty, or has changed.
    No,
    /// The record is invalid, or there is no room for it.
    LeftOut,
    /// The copy is in this switch.
    At(H),
}

/// The copy of a place.
pub(crate) fn entry<H: std::marker::Copy>(copies: &mut Vec<Copy<H>>, place: u32) -> &mut Copy<H> {
    let place = place as usize;
    if copies.len() <= place {
        copies.resize(place + 1, Copy::No);
    }
    &mut copies[place]
}

/// Records the copy of a place; `None`: the record was left out.
pub(crate) fn add<H>(entry: &mut Copy<H>, handle: Option<H>, taken: &mut u64, left_out: &mut u64) {
    *entry = match handle {
        Some(handle) => {
            *taken += 1;
            Copy::At(handle)
        }
        None => {
            *left_out += 1;
            Copy::LeftOut
        }
    };
}

/// Removes the copy of a place.
pub(crate) fn discard<T: Payload>(entry: &mut Copy<Handle>, table: &mut Sessions<T>, taken: &mut TakenOver) {
    match std::mem::replace(entry, Copy::No) {
        Copy::At(handle) => {
            taken.sessions -= 1;
            table.take_back(handle);
        }
        Copy::LeftOut => taken.left_out -= 1,
        Copy::No => {}
    }
}
