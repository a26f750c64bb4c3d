//! Work at lower priority than the data path.

use std::thread;

use rustix::process::{Pid, getpriority_process, setpriority_process};

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

/// Lowers the priority of all threads of this process for good, so that the kernel frees the memory of a process that
/// ends at that priority: the last thread to end does that.
pub(crate) fn all_at_lower_priority() {
    let threads = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    threads.filter_map(|thread| Pid::from_raw(thread.file_name().to_str()?.parse().ok()?)).for_each(lower);
}

/// Lowers the priority of a thread of this process, unless it has ended.
fn lower(thread: Pid) {
    // Linux takes the number of a thread here.
    if let Ok(niceness) = getpriority_process(Some(thread)) {
        let _ = setpriority_process(Some(thread), niceness + NICER);
    }
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
        let niceness = || getpriority_process(None).unwrap();
        let before = niceness();
        assert_eq!(in_background(niceness), (before + NICER).min(19));
        assert_eq!(niceness(), before);
    }

    #[test]
    fn only_the_given_thread_is_nicer() {
        let before = getpriority_process(None).unwrap();
        let (ready, start) = std::sync::mpsc::channel();
        let (go, wait) = std::sync::mpsc::channel();
        let thread = thread::spawn(move || {
            ready.send(rustix::thread::gettid()).unwrap();
            wait.recv().unwrap();
            getpriority_process(None).unwrap()
        });
        lower(start.recv().unwrap());
        go.send(()).unwrap();
        assert_eq!(thread.join().unwrap(), (before + NICER).min(19));
        assert_eq!(getpriority_process(None).unwrap(), before);
        // A number that no thread has: there is nothing to do.
        lower(Pid::from_raw(i32::MAX).unwrap());
    }
}
