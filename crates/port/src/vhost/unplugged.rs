//! A port without a guest.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};

use crate::guest::{GuestPort, PlaceError, PolledPort, RxHandle, TxFrame, TxHandle};

/// Stands in for a queue until a guest starts: fetches nothing, and cannot place packets.
#[derive(Debug)]
pub struct Unplugged {
    never: OwnedFd,
    dropped: u64,
}

impl Unplugged {
    /// A new one, with zero counters.
    ///
    /// # Errors
    /// No file descriptor was available.
    pub fn new() -> io::Result<Unplugged> {
        Ok(Unplugged { never: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?, dropped: 0 })
    }
}

impl GuestPort for Unplugged {
    fn fetch(&mut self, _max: usize, _out: &mut Vec<TxFrame>) -> io::Result<bool> {
        Ok(false)
    }

    fn bytes(&self, _handle: TxHandle) -> (&[u8], &[u8]) {
        (&[], &[])
    }

    fn complete(&mut self, _handle: TxHandle) {}

    fn place(&mut self, _frame: &[u8], _checksum_valid: bool) -> Result<RxHandle, PlaceError> {
        self.dropped += 1;
        Err(PlaceError::NoBuffer)
    }

    fn publish(&mut self, _handle: RxHandle) {}

    fn discard(&mut self, _handle: RxHandle) {}

    fn notify(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn tx_capacity(&self) -> u32 {
        0
    }

    fn rx_capacity(&self) -> u32 {
        0
    }

    fn tx_free(&self) -> u32 {
        0
    }

    fn counters(&self) -> Vec<(String, u64)> {
        vec![("rx_unplugged_frames".into(), self.dropped)]
    }
}

impl PolledPort for Unplugged {
    fn fd(&self) -> BorrowedFd<'_> {
        self.never.as_fd()
    }
}
