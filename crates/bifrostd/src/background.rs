//! Work at lower priority than the data path.

use std::thread;

/// Added niceness. Beside a worker that is always busy, the thread gets a seventh of a CPU (`sched(7)`: each step is a
/// factor of 1.25). A higher value would delay its callers.
const NICER: i32 = 8;

/// Does `work` on a thread of lower priority, and waits for it. Threads that `work` starts inherit the priority.
pub(crate) fn in_background<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            at_lower_priority();
            work()
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Lowers the priority of this thread for good.
pub(crate) fn at_lower_priority() {
    // On Linux niceness is per thread. Raising it cannot fail; if it did, the work would only run at normal priority.
    let _ = rustix::process::nice(NICER);
}

/// Does `work`: here if it `is_short`, because a thread of lower priority would delay it more than it takes; otherwise
/// [in the background](in_background).
pub(crate) fn here_or_in_background<T: Send>(is_short: bool, work: impl FnOnce() -> T + Send) -> T {
    if is_short { work() } else { in_background(work) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_work_is_nicer() {
        let niceness = || rustix::process::getpriority_process(None).unwrap();
        let before = niceness();
        assert_eq!(in_background(niceness), (before + NICER).min(19));
        assert_eq!(niceness(), before);
    }
}
