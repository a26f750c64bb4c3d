//! Load of a gateway: a large number of flows, a heavy one, and bursts of single flows.

use crate::Rng;

/// A packet that arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Arrival {
    /// Time of arrival, ns.
    pub(in super::super) at: u64,
    /// Its flow.
    pub(in super::super) flow: u32,
}

/// Packets of many equal flows, with exponential gaps; a flow that sends at constant intervals; and flows that send a
/// burst, one after the other.
#[derive(Clone, Debug)]
pub(in super::super) struct Load {
    rng: Rng,
    flows: u32,
    /// Mean gap, ns; infinite: none.
    background_gap: f64,
    heavy_gap: f64,
    bursts: Option<Bursts>,
    next_background: f64,
    next_heavy: f64,
    /// The current burst: its flow, its end, its next packet.
    burst: (u32, f64, f64),
}

/// Bursts of single flows.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Bursts {
    /// Mean time from the end of one to the start of the next, ns.
    pub(in super::super) pause_ns: f64,
    /// Mean duration, ns.
    pub(in super::super) length_ns: f64,
    /// Interval of its packets, ns.
    pub(in super::super) gap_ns: f64,
}

/// Flow 0 is the heavy one.
pub(in super::super) const HEAVY: u32 = 0;

impl Load {
    /// Background load: `background_pps` of `flows` flows.
    pub(in super::super) fn new(seed: u64, flows: u32, background_pps: f64) -> Self {
        let gap = if background_pps > 0.0 { 1e9 / background_pps } else { f64::INFINITY };
        let mut load = Load {
            rng: Rng::new(seed),
            flows,
            background_gap: gap,
            heavy_gap: f64::INFINITY,
            bursts: None,
            next_background: 0.0,
            next_heavy: f64::INFINITY,
            burst: (0, 0.0, f64::INFINITY),
        };
        load.next_background = exponential(&mut load.rng, gap);
        load
    }

    /// Adds a heavy flow.
    pub(in super::super) fn heavy(mut self, pps: f64) -> Self {
        if pps > 0.0 {
            (self.heavy_gap, self.next_heavy) = (1e9 / pps, 0.0);
        }
        self
    }

    /// Adds bursts.
    pub(in super::super) fn bursts(mut self, bursts: Bursts) -> Self {
        self.bursts = Some(bursts);
        self.begin_burst(0.0, bursts);
        self
    }

    fn begin_burst(&mut self, now: f64, bursts: Bursts) {
        let start = now + exponential(&mut self.rng, bursts.pause_ns);
        let flow = 1 + self.rng.below(u64::from(self.flows.max(2)) - 1) as u32;
        self.burst = (flow, start + exponential(&mut self.rng, bursts.length_ns), start);
    }
}

impl Iterator for Load {
    type Item = Arrival;

    fn next(&mut self) -> Option<Arrival> {
        let first = self.next_background.min(self.next_heavy).min(self.burst.2);
        if !first.is_finite() {
            return None;
        }
        let flow = if first == self.next_background {
            self.next_background += exponential(&mut self.rng, self.background_gap);
            1 + self.rng.below(u64::from(self.flows.max(2)) - 1) as u32
        } else if first == self.next_heavy {
            self.next_heavy += self.heavy_gap;
            HEAVY
        } else {
            let (flow, end, _) = self.burst;
            if let Some(bursts) = self.bursts {
                self.burst.2 += bursts.gap_ns;
                if self.burst.2 > end {
                    self.begin_burst(end, bursts);
                }
            }
            flow
        };
        Some(Arrival { at: first as u64, flow })
    }
}

/// A random time with that mean.
pub(in super::super) fn exponential(rng: &mut Rng, mean: f64) -> f64 {
    -(1.0 - rng.unit()).ln() * mean
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_as_configured_and_time_advances() {
        let bursts = Bursts { pause_ns: 1e6, length_ns: 1e6, gap_ns: 1e3 };
        let load = Load::new(1, 1000, 2e6).heavy(1e6).bursts(bursts);
        let all: Vec<Arrival> = load.take_while(|a| a.at < 200_000_000).collect();
        assert!(all.is_sorted_by_key(|a| a.at));
        let heavy = all.iter().filter(|a| a.flow == HEAVY).count();
        assert_eq!(heavy, 200_000);
        // Background 400,000, bursts half of the time.
        let others = all.len() - heavy;
        assert!((460_000..540_000).contains(&others), "{others}");
    }

    #[test]
    fn nothing_arrives_without_a_rate() {
        assert_eq!(Load::new(1, 10, 0.0).next(), None);
    }
}
