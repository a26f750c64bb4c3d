//! Messages that the library owns while the application reads them.

use std::ffi::c_void;

use bifrost_endpoint::{Message, Request};

use crate::status::Failed;

/// A received message. The library owns its data, which is valid until `bifrost_rdm_release`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Received {
    /// Its data.
    pub data: *const c_void,
    /// Length, bytes.
    pub len: usize,
    /// Identifies it; 0: none.
    pub token: u64,
}

#[derive(Debug)]
pub(crate) enum Kept {
    Message(Message),
    /// With the endpoint on which it arrived.
    Request(Request, usize),
}

#[derive(Debug, Default)]
struct Slot {
    /// Number of messages that have used this slot: part of the token, so the token of a released
    /// message is invalid.
    generation: u32,
    kept: Option<Kept>,
}

/// All messages that the application holds. Allocates only when it holds more than ever before.
#[derive(Debug, Default)]
pub(crate) struct Held {
    slots: Vec<Slot>,
    free: Vec<u32>,
}

impl Held {
    pub(crate) fn keep(&mut self, kept: Kept) -> Received {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            self.slots.len() as u32 - 1
        });
        let slot = &mut self.slots[index as usize];
        // Never 0, so no token is 0.
        slot.generation = slot.generation.wrapping_add(1).max(1);
        let token = (u64::from(slot.generation) << 32) | u64::from(index);
        let kept = slot.kept.insert(kept);
        let bytes = match kept {
            Kept::Message(message) => &message[..],
            Kept::Request(request, _) => &request.message[..],
        };
        Received { data: bytes.as_ptr().cast(), len: bytes.len(), token }
    }

    /// Returns a request, if `token` identifies one of that endpoint.
    pub(crate) fn request(&self, token: u64, endpoint: usize) -> Result<&Request, Failed> {
        match self.slot(token).map(|index| &self.slots[index].kept) {
            Some(Some(Kept::Request(request, of))) if *of == endpoint => Ok(request),
            _ => Err(Failed::invalid("the message is not a request of this endpoint, or was released")),
        }
    }

    pub(crate) fn release(&mut self, token: u64) -> Result<(), Failed> {
        let index = self.slot(token).ok_or_else(|| Failed::invalid("the message was already released"))?;
        drop(self.slots[index].kept.take());
        self.free.push(index as u32);
        Ok(())
    }

    /// The slot of a held message.
    fn slot(&self, token: u64) -> Option<usize> {
        let index = token as u32 as usize;
        let slot = self.slots.get(index)?;
        (u64::from(slot.generation) == token >> 32 && slot.kept.is_some()).then_some(index)
    }
}
