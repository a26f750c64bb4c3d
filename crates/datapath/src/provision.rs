//! Decides which memory another thread should make the kernel provide, before the worker touches it.
//!
//! The kernel clears a large page when it is touched first, which takes up to milliseconds, in which all guests of the
//! worker would wait.

use std::ops::Range;

use bifrost_avs::Extent;
use bifrost_port::provide::LARGE_PAGE as LARGE;

/// Memory beyond that in use that is provided, bytes: a page that is in use is never the last one provided.
const AHEAD: usize = LARGE;

/// How far the memory of each extent has been provided.
#[derive(Debug, Default)]
pub(crate) struct Provision {
    /// Start and end by extent: addresses.
    provided: [Range<usize>; Extent::OF_SWITCH],
}

impl Provision {
    /// Passes each range of addresses to `provide` that should be provided now. If it returns false, the range is tried
    /// again the next time.
    pub(crate) fn look(&mut self, extents: [Extent; Extent::OF_SWITCH], mut provide: impl FnMut(Range<usize>) -> bool) {
        for (provided, extent) in self.provided.iter_mut().zip(extents) {
            let Extent { address, used_bytes, reserved_bytes } = extent;
            if provided.start != address {
                // Another table.
                *provided = address..address;
            }
            let reserved_until = address + reserved_bytes;
            let wanted = (address + used_bytes + AHEAD).next_multiple_of(LARGE).min(reserved_until);
            if wanted > provided.end && provide(provided.end..wanted) {
                provided.end = wanted;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn asked(provision: &mut Provision, extent: Extent) -> Vec<(usize, usize)> {
        let mut all = Vec::new();
        let mut extents = [Extent::default(); Extent::OF_SWITCH];
        extents[3] = extent;
        provision.look(extents, |range| {
            all.push((range.start, range.end));
            true
        });
        all
    }

    #[test]
    fn memory_is_provided_ahead_of_its_use_and_once() {
        let mut provision = Provision::default();
        let address = 100 * MIB + 16;
        let used = |used_bytes| Extent { address, used_bytes, reserved_bytes: 9 * MIB };
        assert_eq!(asked(&mut provision, used(0)), [(address, 104 * MIB)]);
        assert_eq!(asked(&mut provision, used(MIB)), []);
        // The page that ends at 104 MiB is in use, so the next one is provided.
        assert_eq!(asked(&mut provision, used(2 * MIB)), [(104 * MIB, 106 * MIB)]);
        assert_eq!(asked(&mut provision, used(2 * MIB)), []);
        assert_eq!(asked(&mut provision, used(9 * MIB)), [(106 * MIB, 109 * MIB + 16)], "no more than is reserved");
        assert_eq!(asked(&mut provision, Extent { address: 16, ..used(0) }), [(16, 4 * MIB)], "another table");
        assert_eq!(asked(&mut provision, Extent::default()), []);
    }

    #[test]
    fn what_could_not_be_asked_is_asked_again() {
        let mut provision = Provision::default();
        let mut extents = [Extent::default(); Extent::OF_SWITCH];
        extents[0] = Extent { address: LARGE, used_bytes: LARGE, reserved_bytes: LARGE };
        provision.look(extents, |_| false);
        let mut again = Vec::new();
        provision.look(extents, |range| {
            again.push((range.start, range.end));
            true
        });
        assert_eq!(again, [(LARGE, 2 * LARGE)]);
    }
}
