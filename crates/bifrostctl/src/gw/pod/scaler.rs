//! When a service gets a pod more, or has one too many: water levels with hysteresis (*Albatross*, SIGCOMM'25, section 7). Without I/O or clock.

use std::time::Duration;

/// When pods are created and deleted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Levels {
    /// A pod more is needed from this load on, 0 to 1.
    pub(crate) high: f64,
    /// A pod less is enough up to this load, below `high`.
    pub(crate) low: f64,
    /// How long the load has to be high, without a break.
    pub(crate) out_after: Duration,
    /// How long it has to be low.
    pub(crate) in_after: Duration,
    /// Pods at least, 1 or more.
    pub(crate) least: usize,
    /// Pods at most.
    pub(crate) most: usize,
}

/// What to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Nothing.
    Stay,
    /// Create a pod.
    Out,
    /// Drain and delete a pod.
    In,
}

/// Remembers for how long the load has been what it is.
#[derive(Clone, Debug)]
pub(crate) struct Scaler {
    levels: Levels,
    high_since: Option<Duration>,
    low_since: Option<Duration>,
}

impl Scaler {
    pub(crate) fn new(levels: Levels) -> Self {
        Scaler { levels, high_since: None, low_since: None }
    }

    /// What to do at `now` (since any moment), with `pods` pods whose mean load is `load`: 0 to 1; above it if packets are lost for want of room.
    ///
    /// A change begins the waiting again: the load of other pods is to be seen first.
    pub(crate) fn decide(&mut self, now: Duration, pods: usize, load: f64) -> Step {
        let Levels { high, low, out_after, in_after, least, most } = self.levels;
        if pods < least {
            return self.step(Step::Out);
        }
        if pods > most {
            return self.step(Step::In);
        }
        // The pods that stay have the load of all. Were it high, the next step would be to create what was just deleted.
        let remaining = if pods > 1 { load * pods as f64 / (pods - 1) as f64 } else { f64::INFINITY };
        let since = |since: Option<Duration>, holds: bool| holds.then(|| since.unwrap_or(now));
        self.high_since = since(self.high_since, load >= high);
        self.low_since = since(self.low_since, load <= low && remaining < high);
        let lasted =
            |since: Option<Duration>, long: Duration| since.is_some_and(|since| now.saturating_sub(since) >= long);
        if pods < most && lasted(self.high_since, out_after) {
            return self.step(Step::Out);
        }
        if pods > least && lasted(self.low_since, in_after) {
            return self.step(Step::In);
        }
        Step::Stay
    }

    fn step(&mut self, step: Step) -> Step {
        (self.high_since, self.low_since) = (None, None);
        step
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    fn scaler() -> Scaler {
        Scaler::new(Levels { high: 0.7, low: 0.3, out_after: 3 * S, in_after: 10 * S, least: 1, most: 4 })
    }

    /// What is done in each second, with the seconds' loads.
    fn steps(scaler: &mut Scaler, pods: usize, loads: &[f64]) -> Vec<Step> {
        (0u32..).zip(loads).map(|(second, load)| scaler.decide(S * second, pods, *load)).collect()
    }

    #[test]
    fn a_burst_is_not_enough_and_a_load_that_lasts_is() {
        let all = steps(&mut scaler(), 2, &[0.9, 0.9, 0.5, 0.9, 0.9, 0.9, 1.2, 0.9]);
        assert_eq!(all.iter().position(|step| *step == Step::Out), Some(6), "three seconds after the break: {all:?}");
        assert_eq!(all[7], Step::Stay, "the waiting begins again");
        assert!(all.iter().all(|step| *step != Step::In));
    }

    #[test]
    fn a_pod_goes_only_if_the_others_can_have_its_load() {
        let low = [0.2; 12];
        assert_eq!(steps(&mut scaler(), 3, &low)[10], Step::In);
        assert!(steps(&mut scaler(), 1, &low).iter().all(|step| *step == Step::Stay), "it is the last one");
        // Low for each of two, and high for one: 0.45 is nothing to act on, and neither is 0.35 if `low` is 0.4.
        let levels = Levels { low: 0.4, ..scaler().levels };
        assert!(steps(&mut Scaler::new(levels), 2, &[0.36; 30]).iter().all(|step| *step == Step::Stay));
        assert_eq!(steps(&mut Scaler::new(levels), 2, &[0.34; 30])[10], Step::In);
    }

    #[test]
    fn it_does_not_swing() {
        // All traffic is worth 1.3 pods: whatever comes first, it ends at two pods and stays there.
        for first in 1..=4 {
            let (mut scaler, mut pods, mut changes) = (scaler(), first, 0);
            for second in 0..1000 {
                match scaler.decide(S * second, pods, 1.3 / pods as f64) {
                    Step::Stay => continue,
                    Step::Out => pods += 1,
                    Step::In => pods -= 1,
                }
                changes += 1;
            }
            assert!((2..=4).contains(&pods) && changes <= 3, "{first}: {pods} pods, {changes} changes");
        }
    }

    #[test]
    fn limits_come_first() {
        assert_eq!(scaler().decide(S, 0, 0.0), Step::Out);
        assert_eq!(scaler().decide(S, 5, 1.0), Step::In);
        assert!(steps(&mut scaler(), 4, &[1.0; 30]).iter().all(|step| *step == Step::Stay));
    }
}
