//! Injected panics in message handlers, for tests. Only in debug builds: no configuration enables them.

use std::sync::{Mutex, PoisonError};

/// The port whose next message handler panics.
static NEXT: Mutex<Option<String>> = Mutex::new(None);

/// Makes the handler of the next message to port `name` panic.
pub fn panic_at_next_message(name: &str) {
    *NEXT.lock().unwrap_or_else(PoisonError::into_inner) = Some(name.to_owned());
}

/// Called for each message.
pub(super) fn fire(name: &str) {
    let mut next = NEXT.lock().unwrap_or_else(PoisonError::into_inner);
    if next.as_deref() == Some(name) {
        *next = None;
        drop(next);
        panic!("injected at a message");
    }
}
