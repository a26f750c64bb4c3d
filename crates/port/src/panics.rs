//! Panics that end one piece of work instead of the process.
//!
//! [`contain`] runs the work and returns the panic as a value. [`install`] makes the panic hook save message and
//! location of a contained panic for its caller; all other panics are reported as before.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

/// Longest message kept, bytes: it may quote guest data.
const MAX_MESSAGE: usize = 512;

/// Details of a panic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Panic {
    /// Its message.
    pub message: String,
    /// File, line and column; empty if [`install`] was not called.
    pub location: String,
}

impl fmt::Display for Panic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        if self.location.is_empty() { Ok(()) } else { write!(f, " ({})", self.location) }
    }
}

thread_local! {
    /// Whether the thread is inside [`contain`].
    static CONTAINED: Cell<bool> = const { Cell::new(false) };
    /// The last contained panic of the thread, until it is returned.
    static LAST: RefCell<Option<Panic>> = const { RefCell::new(None) };
}

/// Runs `work`. A panic in it unwinds to here and is returned.
///
/// The caller must discard, repair or replace any state that `work` left half-modified.
///
/// # Errors
/// `work` panicked.
pub fn contain<T>(work: impl FnOnce() -> T) -> Result<T, Panic> {
    let outer = CONTAINED.replace(true);
    let result = catch_unwind(AssertUnwindSafe(work));
    CONTAINED.set(outer);
    result.map_err(|payload| {
        let last = LAST.with(|last| last.try_borrow_mut().ok().and_then(|mut last| last.take()));
        last.unwrap_or_else(|| Panic { message: message_of(&*payload), location: String::new() })
    })
}

/// Makes [`contain`]'s callers report contained panics, not the default hook. May be called several times.
pub fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let others = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !CONTAINED.get() {
                return others(info);
            }
            let location = info.location().map(ToString::to_string).unwrap_or_default();
            let panic = Panic { message: message_of(info.payload()), location };
            // A panic inside the hook would end the process.
            LAST.with(|last| last.try_borrow_mut().map(|mut last| *last = Some(panic)).unwrap_or_default());
        }));
    });
}

fn message_of(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied().or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    let text = text.unwrap_or("a panic without a message");
    let mut end = text.len().min(MAX_MESSAGE);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_contained_panic_is_a_value_with_message_and_location() {
        install();
        install();
        assert_eq!(contain(|| 7), Ok(7));
        let number = 3;
        let panic = contain(|| assert!(number > 5, "{number} is too few")).expect_err("it panics");
        assert_eq!(panic.message, "3 is too few");
        assert!(panic.location.contains("panics.rs:"), "{panic:?}");
        assert_eq!(contain(|| ()), Ok(()), "the thread continues");
    }

    #[test]
    fn the_innermost_contain_gets_the_panic() {
        install();
        let outer = contain(|| {
            let inner = contain(|| panic!("inner")).map_err(|p| p.message);
            assert_eq!(inner, Err::<(), _>("inner".to_owned()));
            panic!("outer")
        });
        assert_eq!(outer.map_err(|p| p.message), Err::<(), _>("outer".to_owned()));
    }

    #[test]
    fn long_messages_are_truncated_between_characters() {
        let panic = contain(|| std::panic::panic_any("ü".repeat(MAX_MESSAGE))).map_err(|p| p.message.len());
        assert_eq!(panic, Err::<(), _>(MAX_MESSAGE));
        let panic = contain(|| std::panic::panic_any(7u32)).map_err(|p| p.message);
        assert_eq!(panic, Err::<(), _>("a panic without a message".to_owned()));
    }
}
