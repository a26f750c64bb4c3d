//! The NIC's clock: completion times that this host's scheduler cannot delay.

use std::ffi::c_int;
use std::mem::{offset_of, size_of};

use super::sys::{Context, DeviceAttr, DeviceAttrEx, OdpCaps, VALUES_MASK_RAW_CLOCK, ValuesEx, VerbsContext, extended};

/// Converts ticks of a counter of some width to time that does not wrap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ticks {
    mask: u64,
    khz: u64,
    last: u64,
    total: u64,
}

impl Ticks {
    /// A counter that shows `first` now and wraps after `mask`, which is 2^n - 1; `None` if it is unusable: it wraps
    /// within seconds, or its rate is unknown.
    pub(super) fn new(mask: u64, khz: u64, first: u64) -> Option<Self> {
        let long = mask.checked_add(1).is_none_or(u64::is_power_of_two) && mask >= (1 << 40) - 1;
        (long && khz > 0).then_some(Self { mask, khz, last: first & mask, total: first & mask })
    }

    /// The time of a reading, ns; a reading may be slightly older than the previous one.
    pub(super) fn ns(&mut self, reading: u64) -> u64 {
        let ahead = reading.wrapping_sub(self.last) & self.mask;
        let total = if ahead <= self.mask / 2 {
            self.total += ahead;
            self.last = reading & self.mask;
            self.total
        } else {
            self.total.saturating_sub(self.last.wrapping_sub(reading) & self.mask)
        };
        (u128::from(total) * 1_000_000 / u128::from(self.khz)) as u64
    }
}

/// The counter of a device, if completions carry it and this process can read it.
///
/// # Safety
/// `context` is an open device.
pub(super) unsafe fn ticks(context: *mut Context) -> Option<Ticks> {
    // SAFETY: the caller's word.
    let functions = unsafe { extended(context, offset_of!(VerbsContext, query_rt_values)) }?;
    let mut attributes = DeviceAttrEx {
        // SAFETY: numbers, for which 0 is a value.
        orig_attr: unsafe { std::mem::zeroed::<DeviceAttr>() },
        comp_mask: 0,
        odp_caps: OdpCaps { general_caps: 0, per_transport_caps: [0; 3] },
        completion_timestamp_mask: 0,
        hca_core_clock: 0,
        device_cap_flags_ex: 0,
    };
    // SAFETY: `extended` says that the structure has these fields.
    let query: unsafe extern "C" fn(_, _, _, _) -> c_int = unsafe { (&raw const (*functions).query_device_ex).read() }?;
    // SAFETY: the driver writes as much as it is told that there is room for.
    if unsafe { query(context, std::ptr::null(), &raw mut attributes, size_of::<DeviceAttrEx>()) } != 0 {
        return None;
    }
    // SAFETY: the caller's word.
    let first = unsafe { read(context) }?;
    Ticks::new(attributes.completion_timestamp_mask, attributes.hca_core_clock, first)
}

/// Reads the counter of a device.
///
/// # Safety
/// `context` is an open device.
pub(super) unsafe fn read(context: *mut Context) -> Option<u64> {
    // SAFETY: the caller's word.
    let functions = unsafe { extended(context, offset_of!(VerbsContext, query_rt_values)) }?;
    // SAFETY: `extended` says that the structure has this field.
    let query = unsafe { (&raw const (*functions).query_rt_values).read() }?;
    let raw_clock = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let mut values = ValuesEx { comp_mask: VALUES_MASK_RAW_CLOCK, raw_clock };
    // SAFETY: both live as long as the call.
    if unsafe { query(context, &raw mut values) } != 0 || values.comp_mask & VALUES_MASK_RAW_CLOCK == 0 {
        return None;
    }
    // Ticks, though the type says seconds: only the nanoseconds field is used.
    Some((values.raw_clock.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(values.raw_clock.tv_nsec as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_become_time_that_does_not_wrap() {
        let mask = (1 << 41) - 1;
        let mut ticks = Ticks::new(mask, 1_000_000, mask - 5).unwrap();
        let begin = ticks.ns(mask - 5);
        assert_eq!(ticks.ns(mask) - begin, 5, "1 GHz: a tick is 1 ns");
        assert_eq!(ticks.ns(10) - begin, 16, "the counter has wrapped");
        assert_eq!(ticks.ns(mask) - begin, 5, "an earlier completion");
        assert_eq!(ticks.ns(20) - begin, 26);
        let mut slow = Ticks::new(u64::MAX, 78_125, 0).unwrap();
        assert_eq!(slow.ns(78_125_000), 1_000_000_000);
        for (mask, khz) in [(0, 1000), (u64::MAX, 0), ((1 << 32) - 1, 1000), (1 << 50, 1000)] {
            assert_eq!(Ticks::new(mask, khz, 1), None, "{mask:x} {khz}");
        }
    }
}
