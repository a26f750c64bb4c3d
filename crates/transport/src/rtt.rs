//! Round-trip times: smoothed (RFC 6298), the smallest of the last seconds, and that of the last round trip.

use crate::time::{S, Time};

/// How long a minimum is believed.
const MIN_WINDOW_NS: u64 = 10 * S;

/// Largest sample taken seriously; more is a clock that jumped or a peer that lies.
const SAMPLE_MAX_NS: i64 = 10 * S as i64;

/// A smoothed round-trip time and its mean deviation (RFC 6298, 2).
#[derive(Clone, Copy, Debug, Default)]
pub struct Smoothed {
    mean_ns: u64,
    variance_ns: u64,
}

impl Smoothed {
    /// Takes a sample, ns, which is at least 1.
    #[inline]
    pub fn sample(&mut self, sample_ns: u64) {
        if self.mean_ns == 0 {
            self.mean_ns = sample_ns;
            self.variance_ns = sample_ns / 2;
        } else {
            let deviation = self.mean_ns.abs_diff(sample_ns);
            self.variance_ns = (3 * self.variance_ns + deviation) / 4;
            self.mean_ns = (7 * self.mean_ns + sample_ns) / 8;
        }
    }

    /// Whether there was a sample.
    #[inline]
    pub fn is_known(&self) -> bool {
        self.mean_ns != 0
    }

    /// Smoothed, ns; 0 before the first sample.
    #[inline]
    pub fn ns(&self) -> u64 {
        self.mean_ns
    }

    /// Smoothed mean deviation, ns.
    #[inline]
    pub fn variance_ns(&self) -> u64 {
        self.variance_ns
    }

    /// A time within which an answer has come, ns: the mean and four deviations; `initial_ns` before the first sample.
    #[inline]
    pub fn bound_ns(&self, initial_ns: u64) -> u64 {
        if self.is_known() { self.mean_ns + 4 * self.variance_ns } else { initial_ns }
    }
}

/// What is known of a round-trip time, ns. All are 0 before the first sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Estimate {
    /// Smoothed.
    pub mean_ns: u64,
    /// Smoothed mean deviation.
    pub variance_ns: u64,
    /// Smallest recent sample.
    pub min_ns: u64,
}

/// Smoothed RTT of a path, and the minimum of the last ten seconds or more.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rtt {
    smoothed: Smoothed,
    min_ns: u64,
    min_at: Time,
}

impl Rtt {
    /// Continues with what is known. Nothing is known if the numbers are not those of possible samples.
    pub fn of(now: Time, estimate: Estimate) -> Rtt {
        let Estimate { mean_ns, variance_ns, min_ns } = estimate;
        let max = SAMPLE_MAX_NS as u64;
        if min_ns == 0 || mean_ns < min_ns || mean_ns > max || variance_ns > max {
            return Rtt::default();
        }
        Rtt { smoothed: Smoothed { mean_ns, variance_ns }, min_ns, min_at: now }
    }

    /// What is known.
    pub fn estimate(&self) -> Estimate {
        let Smoothed { mean_ns, variance_ns } = self.smoothed;
        Estimate { mean_ns, variance_ns, min_ns: self.min_ns }
    }

    /// Takes a sample; returns it if it is plausible.
    #[inline]
    pub fn sample(&mut self, now: Time, sample_ns: i64) -> Option<u64> {
        if sample_ns <= 0 || sample_ns > SAMPLE_MAX_NS {
            return None;
        }
        let sample = sample_ns as u64;
        self.smoothed.sample(sample);
        if self.min_ns == 0 || sample <= self.min_ns || now.since(self.min_at) > MIN_WINDOW_NS {
            self.min_ns = sample;
            self.min_at = now;
        }
        Some(sample)
    }

    /// Whether there was a sample.
    #[inline]
    pub fn is_known(&self) -> bool {
        self.smoothed.is_known()
    }

    /// Smoothed, ns; 0 before the first sample.
    #[inline]
    pub fn smoothed_ns(&self) -> u64 {
        self.smoothed.ns()
    }

    /// Smoothed mean deviation, ns.
    #[inline]
    pub fn variance_ns(&self) -> u64 {
        self.smoothed.variance_ns()
    }

    /// Smallest recent sample, ns; 0 before the first.
    #[inline]
    pub fn min_ns(&self) -> u64 {
        self.min_ns
    }
}

/// The smallest sample of the last round trip or so: what every packet of that time has waited. One that a host has held up
/// raises the largest and not the smallest.
#[derive(Clone, Copy, Debug, Default)]
pub struct Standing {
    now_ns: u64,
    before_ns: u64,
    since: Time,
    /// The last two samples.
    latest: [u64; 2],
}

impl Standing {
    /// Takes a sample; `rtt_ns` is the smoothed round-trip time.
    #[inline]
    pub fn sample(&mut self, now: Time, sample_ns: u64, rtt_ns: u64) {
        self.latest = [sample_ns, self.latest[0]];
        if now.since(self.since) < rtt_ns / 2 {
            self.now_ns = self.now_ns.min(sample_ns);
        } else {
            let lapsed = now.since(self.since) > 4 * rtt_ns;
            self.before_ns = if lapsed { sample_ns } else { self.now_ns };
            self.now_ns = sample_ns;
            self.since = now;
        }
    }

    /// The smallest sample of the last half to whole round trip, ns; 0 before the first.
    #[inline]
    pub fn ns(&self) -> u64 {
        self.now_ns.min(self.before_ns)
    }

    /// The smaller of the last two samples, ns; 0 before the second.
    #[inline]
    pub fn latest_ns(&self) -> u64 {
        self.latest[0].min(self.latest[1])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::{MS, US};

    #[test]
    fn one_late_packet_is_no_standing_queue_and_a_round_trip_of_them_is() {
        let mut standing = Standing::default();
        let mut at = |ms: u64, sample: u64| {
            standing.sample(Time(ms * MS), sample, 4 * MS);
            standing
        };
        (0..10).for_each(|ms| assert!(at(10 + ms, 100 * US).ns() <= 100 * US));
        assert_eq!(at(20, 5 * MS).ns(), 100 * US, "one");
        assert_eq!(at(21, 100 * US).latest_ns(), 100 * US);
        let stands: Vec<u64> = (22..32).map(|ms| at(ms, 5 * MS).ns()).collect();
        assert!(stands[1] < MS && stands[5] == 5 * MS, "{stands:?}");
        assert_eq!(at(32, 100 * US).ns(), 100 * US, "and it is gone with the first that passes");
    }
}
