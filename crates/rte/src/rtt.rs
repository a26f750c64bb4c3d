//! Round-trip times of one path (RFC 6298 smoothing) and its windowed minimum.

use crate::time::{S, Time};

/// How long a minimum is believed.
const MIN_WINDOW_NS: u64 = 10 * S;

/// Largest sample taken seriously; more is a clock that jumped or a peer that lies.
const SAMPLE_MAX_NS: i64 = 10 * S as i64;

/// Smoothed RTT, its variance, and the minimum of the last ten seconds or more.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rtt {
    smoothed_ns: u64,
    variance_ns: u64,
    min_ns: u64,
    min_at: Time,
}

impl Rtt {
    /// Takes a sample; returns it if it is plausible.
    pub(crate) fn sample(&mut self, now: Time, sample_ns: i64) -> Option<u64> {
        if sample_ns <= 0 || sample_ns > SAMPLE_MAX_NS {
            return None;
        }
        let sample = sample_ns as u64;
        if self.smoothed_ns == 0 {
            self.smoothed_ns = sample;
            self.variance_ns = sample / 2;
        } else {
            let deviation = self.smoothed_ns.abs_diff(sample);
            self.variance_ns = (3 * self.variance_ns + deviation) / 4;
            self.smoothed_ns = (7 * self.smoothed_ns + sample) / 8;
        }
        if self.min_ns == 0 || sample <= self.min_ns || now.since(self.min_at) > MIN_WINDOW_NS {
            self.min_ns = sample;
            self.min_at = now;
        }
        Some(sample)
    }

    /// Whether there was a sample.
    pub(crate) fn is_known(&self) -> bool {
        self.smoothed_ns != 0
    }

    /// Smoothed, ns; 0 before the first sample.
    pub(crate) fn smoothed_ns(&self) -> u64 {
        self.smoothed_ns
    }

    /// Smoothed mean deviation, ns.
    pub(crate) fn variance_ns(&self) -> u64 {
        self.variance_ns
    }

    /// Smallest recent sample, ns; 0 before the first.
    pub(crate) fn min_ns(&self) -> u64 {
        self.min_ns
    }
}
