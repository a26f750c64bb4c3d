//! Limits the work on one guest's descriptors, in units of about one descriptor read.
//!
//! Each packet and each turn has a limit ([`PACKET_WORK`], [`turn_work`]), whatever the guest has written. Work on bad
//! buffers is also subtracted from the ring's [`Credit`]: a ring that keeps offering bad buffers is taken out of use.

use super::chain::MAX_PIECES;
use super::index::Size;
use super::mutation::mutated;
use super::ring::Broken;

/// Work of one buffer in addition to its descriptors: taking, recording and returning it.
const BUFFER_WORK: u32 = 4;

/// Maximum work on the RX buffers of one packet; then no further buffer is read. A packet of 65,535 bytes in buffers of
/// 1,526 bytes, the smallest that Linux offers, takes 215.
pub(super) const PACKET_WORK: u32 = 256;

/// Maximum work of a turn that fetches up to `packets`: each may have the 19 descriptors of a full segmentation offload
/// of Linux (17 fragments, linear part, header). The turn ends early when it is used up.
pub(super) fn turn_work(packets: usize) -> u32 {
    const EACH: u32 = BUFFER_WORK + 19;
    u32::try_from(packets).unwrap_or(u32::MAX).saturating_mul(EACH)
}

/// Work of one buffer with this many descriptors.
#[inline]
pub(super) fn buffer_work(descriptors: u32) -> u32 {
    BUFFER_WORK + descriptors
}

/// Work that a ring may still waste.
#[derive(Debug)]
pub(super) struct Credit {
    left: u32,
    most: u32,
}

impl Credit {
    /// Enough for a ring full of empty buffers, which a front-end may leave behind after its back-end has gone.
    pub(super) fn new(size: Size) -> Credit {
        let most = 2 * buffer_work(1) * u32::from(size.get()) + 4 * MAX_PIECES;
        Credit { left: most, most }
    }

    /// Earns credit for a good buffer.
    #[inline]
    pub(super) fn earn(&mut self) {
        self.left += u32::from(self.left < self.most);
    }

    /// Subtracts the `work` of a bad buffer.
    ///
    /// # Errors
    /// The credit is used up.
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
