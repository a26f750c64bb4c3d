//! Work that must not keep the data path from its processors.

use std::thread;

/// By how much it is nicer than the thread that asks for it: beside a worker that is always busy, it gets a seventh of a processor
/// (`sched(7)`: each step is a factor of 1.25). Less would keep its waiters waiting.
const NICER: i32 = 8;

/// Does `work` on a thread of lower priority, and waits for it. Threads that `work` starts have that priority, too.
pub(crate) fn in_background<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // A thread's own, on Linux. It cannot be refused; if it were, work would only be done sooner.
            let _ = rustix::process::nice(NICER);
            work()
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
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
