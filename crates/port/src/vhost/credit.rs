//! What the device may spend on one guest's descriptors, in units of about one read of a descriptor.
//!
//! Each packet and each turn has a bound ([`PACKET_WORK`], [`turn_work`]), whatever the guest has written. What was spent
//! on buffers that turned out to be bad is taken from the ring's [`Credit`] as well: a ring that goes on is taken out of use.

use super::chain::MAX_PIECES;
use super::index::Size;
use super::mutation::mutated;
use super::ring::Broken;

/// Work of one buffer besides its descriptors: it is taken, noted, and given back.
const BUFFER_WORK: u32 = 4;

/// Work on the receive buffers of one packet after which no further one is looked at. A packet of 65,535 bytes in buffers
/// of 1,526 bytes, the smallest that Linux offers, takes 215.
pub(super) const PACKET_WORK: u32 = 256;

/// Work of one turn that fetches up to `packets`: each may have the 19 descriptors of a full segmentation offload of
/// Linux (17 fragments, linear part, header). A turn ends early when it is spent.
pub(super) fn turn_work(packets: usize) -> u32 {
    const EACH: u32 = BUFFER_WORK + 19;
    u32::try_from(packets).unwrap_or(u32::MAX).saturating_mul(EACH)
}

/// Work on one buffer with so many descriptors.
#[inline]
pub(super) fn buffer_work(descriptors: u32) -> u32 {
    BUFFER_WORK + descriptors
}

/// What a ring may still waste.
#[derive(Debug)]
pub(super) struct Credit {
    left: u32,
    most: u32,
}

impl Credit {
    /// Enough for a ring full of empty buffers, which a front-end may leave behind when its back-end has gone.
    pub(super) fn new(size: Size) -> Credit {
        let most = 2 * buffer_work(1) * u32::from(size.get()) + 4 * MAX_PIECES;
        Credit { left: most, most }
    }

    /// A buffer was good.
    #[inline]
    pub(super) fn earn(&mut self) {
        self.left += u32::from(self.left < self.most);
    }

    /// `work` was spent on a bad buffer.
    ///
    /// # Errors
    /// There were too many.
    pub(super) fn spend(&mut self, work: u32) -> Result<(), Broken> {
        match self.left.checked_sub(work) {
            _ if mutated!(BadBuffersForgiven) => Ok(()),
            Some(left) => {
                self.left = left;
                Ok(())
            }
            None => Err(Broken::BadBuffers),
        }
    }
}
