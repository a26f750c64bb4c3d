//! DCQCN (SIGCOMM'15, section 3): congestion marks control the rate of a queue pair, as in NIC hardware.

/// Constants of a reaction point. Rates in bits per second, times in ns.
#[derive(Clone, Copy, Debug)]
pub struct DcqcnConfig {
    /// Rate of the link.
    pub line: f64,
    /// Gain of the estimate of the marked share.
    pub gain: f64,
    /// Period of the rate's timer.
    pub timer_ns: u64,
    /// Number of sent bytes that also counts as a period.
    pub bytes: u64,
    /// Number of periods of fast recovery.
    pub recovery: u32,
    /// Additive increase of the target in each period after fast recovery.
    pub additive: f64,
    /// Hyper increase of the target in each period after the counts of both kinds of periods have exceeded `recovery`.
    pub hyper: f64,
    /// Minimum interval between two notifications from the receiver to a queue pair.
    pub notify_ns: u64,
}

impl DcqcnConfig {
    /// The constants that the authors deployed (section 5.2).
    pub const fn new(line: f64) -> Self {
        DcqcnConfig {
            line,
            gain: 1.0 / 256.0,
            timer_ns: 55_000,
            bytes: 10_000_000,
            recovery: 5,
            additive: 40e6,
            hyper: 400e6,
            notify_ns: 50_000,
        }
    }

    /// The same, with the NICs' default rate timer (`rpg_time_reset`), which recovers more slowly.
    pub const fn slow(line: f64) -> Self {
        DcqcnConfig { timer_ns: 300_000, ..Self::new(line) }
    }
}

/// Period of the estimate's timer, ns.
const ALPHA_NS: u64 = 55_000;

/// A reaction point.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dcqcn {
    config: DcqcnConfig,
    rate: f64,
    target: f64,
    alpha: f64,
    alpha_at: u64,
    timer_at: u64,
    sent_bytes: u64,
    /// Periods by time and by bytes since the last notification.
    periods: (u32, u32),
}

impl Dcqcn {
    pub(super) fn new(config: DcqcnConfig) -> Self {
        let (rate, target) = (config.line, config.line);
        Dcqcn { config, rate, target, alpha: 1.0, alpha_at: 0, timer_at: 0, sent_bytes: 0, periods: (0, 0) }
    }

    /// Current rate, bits per second.
    pub(super) fn rate(&mut self, now: u64) -> f64 {
        if self.rate >= self.config.line {
            (self.alpha_at, self.timer_at) = (now, now);
            return self.rate;
        }
        while now >= self.alpha_at + ALPHA_NS {
            self.alpha_at += ALPHA_NS;
            self.alpha *= 1.0 - self.config.gain;
        }
        while now >= self.timer_at + self.config.timer_ns && self.rate < self.config.line {
            self.timer_at += self.config.timer_ns;
            self.periods.0 += 1;
            self.increase();
        }
        self.rate
    }

    /// This many bytes were sent.
    pub(super) fn on_sent(&mut self, bytes: u64) {
        self.sent_bytes += bytes;
        if self.sent_bytes >= self.config.bytes {
            self.sent_bytes -= self.config.bytes;
            self.periods.1 += 1;
            self.increase();
        }
    }

    /// A notification arrived.
    pub(super) fn on_notification(&mut self, now: u64) {
        self.rate(now);
        self.target = self.rate;
        self.rate = (self.rate * (1.0 - self.alpha / 2.0)).max(self.config.line / 1000.0);
        self.alpha = (1.0 - self.config.gain) * self.alpha + self.config.gain;
        (self.alpha_at, self.timer_at, self.sent_bytes, self.periods) = (now, now, 0, (0, 0));
    }

    fn increase(&mut self) {
        let (low, high) = (self.periods.0.min(self.periods.1), self.periods.0.max(self.periods.1));
        if low > self.config.recovery {
            self.target += self.config.hyper * f64::from(low - self.config.recovery);
        } else if high > self.config.recovery {
            self.target += self.config.additive;
        }
        self.target = self.target.min(self.config.line);
        self.rate = (self.rate + self.target) / 2.0;
        if self.rate > self.config.line * 0.999 {
            self.rate = self.config.line;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_after_a_notification_and_recovers_in_five_periods() {
        let mut dcqcn = Dcqcn::new(DcqcnConfig::new(40e9));
        assert_eq!(dcqcn.rate(1000), 40e9);
        dcqcn.on_notification(1000);
        assert_eq!(dcqcn.rate(1000), 20e9, "alpha begins at 1");
        assert_eq!(dcqcn.rate(1000 + 54_999), 20e9);
        assert_eq!(dcqcn.rate(1000 + 55_000), 30e9);
        assert_eq!(dcqcn.rate(1000 + 5 * 55_000), 39.375e9);
        // After a long time without marks, the estimate falls, and the next notification costs less.
        let before = dcqcn.rate(500 * 55_000);
        dcqcn.on_notification(500 * 55_000);
        assert!(dcqcn.rate(500 * 55_000) > before * 0.9);
    }
}
