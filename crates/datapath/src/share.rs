//! The time that a turn has left for questions of other threads.

/// The time that a turn has left for questions.
pub struct Share<'a> {
    pub(crate) clock: &'a dyn Fn() -> u64,
    pub(crate) until: u64,
}

impl std::fmt::Debug for Share<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Share").field("until", &self.until).finish_non_exhaustive()
    }
}

impl<'a> Share<'a> {
    /// `ns` from now on, on this clock.
    pub fn new(clock: &'a dyn Fn() -> u64, ns: u64) -> Self {
        Share { clock, until: clock().saturating_add(ns) }
    }

    /// Whether no time is left.
    pub fn is_used_up(&self) -> bool {
        (self.clock)() >= self.until
    }
}
