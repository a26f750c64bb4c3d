//! Limits how often a device may restart after a fault.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Maximum faults within [`WINDOW`] without a delay.
const FREE: usize = 3;
/// See [`FREE`].
const WINDOW: Duration = Duration::from_secs(60);

/// The faults of a device. A front-end may reconnect at once after up to three faults in a minute. Then it has to wait
/// until the first of these is a minute old, so that a guest that can cause a fault cannot keep the daemon busy with
/// it.
#[derive(Debug, Default)]
pub(super) struct Comeback {
    /// Oldest first.
    faults: VecDeque<Instant>,
}

impl Comeback {
    /// Records a fault.
    pub(super) fn fault(&mut self, now: Instant) {
        if self.faults.len() > FREE {
            self.faults.pop_front();
        }
        self.faults.push_back(now);
    }

    /// When a front-end may connect; `None`: now.
    pub(super) fn next(&self, now: Instant) -> Option<Instant> {
        let at = *self.faults.iter().rev().nth(FREE)? + WINDOW;
        (at > now).then_some(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_faults_in_a_minute_are_free() {
        let start = Instant::now();
        let at = |s| start + Duration::from_secs(s);
        let mut comeback = Comeback::default();
        for second in 0..3 {
            comeback.fault(at(second));
            assert_eq!(comeback.next(at(second)), None);
        }
        comeback.fault(at(3));
        assert_eq!(comeback.next(at(3)), Some(at(60)));
        assert_eq!(comeback.next(at(60)), None, "a minute later");
        comeback.fault(at(60));
        assert_eq!(comeback.next(at(60)), Some(at(61)));
        assert_eq!(comeback.next(at(61)), None);
        assert!(comeback.faults.len() <= FREE + 1);
    }
}
