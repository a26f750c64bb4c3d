//! Panics in message handlers, for tests. Only in debug builds: no operator can bring them about.

use std::sync::{Mutex, PoisonError};

/// Whose next message panics.
static NEXT: Mutex<Option<String>> = Mutex::new(None);

/// Has the handler of the next message panic that a front-end of port `name` sends.
pub fn panic_at_next_message(name: &str) {
    *NEXT.lock().unwrap_or_else(PoisonError::into_inner) = Some(name.to_owned());
}

/// A message has come.
pub(super) fn fire(name: &str) {
    let mut next = NEXT.lock().unwrap_or_else(PoisonError::into_inner);
    if next.as_deref() == Some(name) {
        *next = None;
        drop(next);
        panic!("injected at a message");
    }
}
