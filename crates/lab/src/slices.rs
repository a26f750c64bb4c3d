//! Finds the periods in which a hypervisor gives a processor to others in slices that are too short to be standstills
//! themselves.
//!
//! The kernel's count of stolen time (`steal` in `/proc/stat`) does not show all of them: where a hypervisor is itself a
//! virtual machine, the one below it takes time that neither reports. So pauses are summed up, whatever their cause.
//! Interrupt handlers cause pauses, too, but shorter ones: under full load, while others used the machine moderately,
//! pauses added up to a fifth of 100 ms in less than one window of a hundred.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::standstill::Standstill;

/// Pauses are summed up over this time.
const WINDOW: Duration = Duration::from_millis(100);
/// Pauses of a window that count as standstills: they add up to this much, or more.
const MUCH: Duration = Duration::from_millis(20);

/// The pauses of one processor, sampled.
#[derive(Debug, Default)]
pub(crate) struct Slices {
    /// When the last sample was taken, and its sum.
    last: Option<(Instant, Duration)>,
    /// Periods of the window with pauses, oldest first, and whether they have been returned.
    window: VecDeque<(Standstill, bool)>,
}

impl Slices {
    /// Takes a sample: the pauses so far add up to `sum`. Returns the pauses between two samples as one standstill, which
    /// ends with its sample, once those of a window add up to a fifth of it.
    pub(crate) fn sample(&mut self, now: Instant, sum: Duration) -> Vec<Standstill> {
        let Some((before, earlier)) = self.last.replace((now, sum)) else { return Vec::new() };
        // A pause may have begun before the sample.
        let length = sum.saturating_sub(earlier).min(now.saturating_duration_since(before));
        if !length.is_zero() {
            self.window.push_back((Standstill { began: now.checked_sub(length).unwrap_or(before), length }, false));
        }
        while self.window.front().is_some_and(|(oldest, _)| oldest.began + WINDOW < now) {
            self.window.pop_front();
        }
        if self.window.iter().map(|(period, _)| period.length).sum::<Duration>() < MUCH {
            return Vec::new();
        }
        let new = self.window.iter_mut().filter(|(_, returned)| !returned);
        new.map(|(period, returned)| {
            *returned = true;
            *period
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Periods found, as (milliseconds after the start, length in ms), for samples (ms, sum in ms).
    fn found(samples: &[(u32, u32)]) -> Vec<(u128, u128)> {
        let start = Instant::now();
        let mut slices = Slices::default();
        let found = samples.iter().flat_map(|(at, sum)| slices.sample(start + *at * MS, *sum * MS));
        found.map(|period| ((period.began - start).as_millis(), period.length.as_millis())).collect()
    }

    #[test]
    fn periods_count_if_they_add_up_to_a_fifth_of_a_window() {
        assert_eq!(found(&[(0, 500), (20, 500), (40, 510), (60, 510), (160, 520)]), [], "too far apart");
        assert_eq!(found(&[(0, 500), (20, 510), (40, 510), (60, 520)]), [(10, 10), (50, 10)]);
        let once_each = [(0, 0), (20, 10), (40, 20), (60, 20), (120, 30), (300, 40)];
        assert_eq!(found(&once_each), [(10, 10), (30, 10), (110, 10)]);
    }

    #[test]
    fn a_sample_shows_no_more_than_its_own_time() {
        assert_eq!(found(&[(0, 0), (20, 200)]), [(0, 20)]);
        assert_eq!(found(&[(20, 200), (40, 100)]), [], "a counter that goes back");
    }
}
