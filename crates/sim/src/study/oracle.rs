//! Swift exactly as in its paper's pseudo-code (SIGCOMM'20, algorithm 1), for comparison with the engine's Swift. The
//! two share no code.

/// Constants; delays in ns, windows in packets.
#[derive(Clone, Copy, Debug)]
pub(super) struct Constants {
    pub(super) ai: f64,
    pub(super) beta: f64,
    pub(super) max_mdf: f64,
    pub(super) base_target: f64,
    pub(super) per_hop: f64,
    pub(super) fs_range: f64,
    pub(super) fs_min: f64,
    pub(super) fs_max: f64,
    pub(super) endpoint_target: f64,
    pub(super) min_cwnd: f64,
    pub(super) max_cwnd: f64,
}

/// One window and when it last shrank.
#[derive(Clone, Copy, Debug)]
struct Window {
    cwnd: f64,
    t_last_decrease: f64,
}

/// Swift's state.
#[derive(Clone, Debug)]
pub(super) struct Oracle {
    c: Constants,
    fabric: Window,
    endpoint: Window,
}

impl Oracle {
    pub(super) fn new(c: Constants, cwnd: f64) -> Self {
        let window = Window { cwnd, t_last_decrease: f64::NEG_INFINITY };
        Oracle { c, fabric: window, endpoint: window }
    }

    pub(super) fn fabric_target(&self, hops: u32) -> f64 {
        let c = &self.c;
        let alpha = c.fs_range / (1.0 / c.fs_min.sqrt() - 1.0 / c.fs_max.sqrt());
        let beta = -alpha / c.fs_max.sqrt();
        let scaled = (alpha / self.fabric.cwnd.sqrt() + beta).min(c.fs_range).max(0.0);
        c.base_target + f64::from(hops) * c.per_hop + scaled
    }

    pub(super) fn on_ack(&mut self, now: f64, acked: f64, fabric_delay: f64, endpoint_delay: f64, hops: u32, rtt: f64) {
        let targets = [self.fabric_target(hops), self.c.endpoint_target];
        let c = self.c;
        for ((window, delay), target) in
            [(&mut self.fabric, fabric_delay), (&mut self.endpoint, endpoint_delay)].into_iter().zip(targets)
        {
            if delay < target {
                window.cwnd += if window.cwnd >= 1.0 { c.ai / window.cwnd * acked } else { c.ai * acked };
            } else if now - window.t_last_decrease >= rtt {
                window.cwnd *= (1.0 - c.beta * (delay - target) / delay).max(1.0 - c.max_mdf);
                window.t_last_decrease = now;
            }
            window.cwnd = window.cwnd.clamp(c.min_cwnd, c.max_cwnd);
        }
    }

    pub(super) fn on_fast_recovery(&mut self, now: f64, rtt: f64) {
        self.shrink(now, rtt);
    }

    fn shrink(&mut self, now: f64, rtt: f64) {
        for window in [&mut self.fabric, &mut self.endpoint] {
            if now - window.t_last_decrease >= rtt {
                window.cwnd = (window.cwnd * (1.0 - self.c.max_mdf)).max(self.c.min_cwnd);
                window.t_last_decrease = now;
            }
        }
    }

    pub(super) fn window(&self) -> f64 {
        self.fabric.cwnd.min(self.endpoint.cwnd)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_costs_half_once_an_rtt() {
        let c = Constants {
            ai: 1.0,
            beta: 0.8,
            max_mdf: 0.5,
            base_target: 1e5,
            per_hop: 0.0,
            fs_range: 0.0,
            fs_min: 0.1,
            fs_max: 100.0,
            endpoint_target: 1e5,
            min_cwnd: 0.01,
            max_cwnd: 100.0,
        };
        let mut o = Oracle::new(c, 16.0);
        o.on_fast_recovery(0.0, 1e5);
        o.on_fast_recovery(5e4, 1e5);
        assert_eq!(o.window(), 8.0);
        o.on_ack(2e5, 4.0, 5e4, 0.0, 0, 1e5);
        assert_eq!(o.window(), 8.5);
    }
}
