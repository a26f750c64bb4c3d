//! Status codes, and the text of the last error.

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use bifrost_endpoint::{Error, SendError};

/// Result of a call.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Success.
    Ok = 0,
    /// An argument is null, out of range, or otherwise invalid.
    Invalid = 1,
    /// Timeout. The operation continues.
    Timeout = 2,
    /// 1024 messages are open on the connection: wait until some have arrived.
    Full = 3,
    /// The connection has ended, and everything received was read.
    Closed = 4,
    /// Another thread is calling this worker. The call had no effect.
    Busy = 5,
    /// An address or a port cannot be bound.
    Bind = 6,
    /// The peer cannot be reached.
    Unreachable = 7,
    /// The peer refused the connection.
    Refused = 8,
    /// The peer violates the protocol.
    Protocol = 9,
    /// The message is longer than the peer accepts, or than the maximum.
    TooLong = 10,
    /// An access exceeds the region.
    Range = 11,
    /// The peer refused the request; the text is the peer's.
    Failure = 12,
    /// Out of memory, descriptors, connections or regions.
    Resources = 13,
    /// This connection, library or host does not support that; for example, there is no RDMA NIC.
    Unsupported = 14,
    /// A system call failed.
    System = 15,
    /// A bug in the library. The worker is no longer usable.
    Broken = 16,
}

/// A status and its text.
#[derive(Debug)]
pub(crate) struct Failed(pub(crate) Status, pub(crate) String);

impl Failed {
    pub(crate) fn invalid(text: impl Into<String>) -> Self {
        Self(Status::Invalid, text.into())
    }
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        let status = match &error {
            Error::Bind(..) => Status::Bind,
            Error::Setup(..) => Status::Unreachable,
            Error::Protocol(..) | Error::Answer(_) => Status::Protocol,
            Error::Refused(..) => Status::Refused,
            Error::Host(..) => Status::Resources,
            Error::Socket(_) => Status::System,
            Error::Closed { .. } | Error::Send { error: SendError::Closed, .. } => Status::Closed,
            Error::Send { error: SendError::Full, .. } => Status::Full,
            Error::Send { error: SendError::TooLong, .. } => Status::TooLong,
            Error::Service(_) | Error::Provider(..) => Status::Unsupported,
            Error::Flag(_) => Status::Invalid,
            Error::Timeout(_) => Status::Timeout,
            Error::Range { .. } => Status::Range,
            Error::Failure(..) => Status::Failure,
        };
        Self(status, error.to_string())
    }
}

impl Status {
    fn text(self) -> &'static std::ffi::CStr {
        match self {
            Self::Ok => c"done",
            Self::Invalid => c"an argument is invalid",
            Self::Timeout => c"timeout",
            Self::Full => c"1024 messages are open on the connection",
            Self::Closed => c"the connection has ended",
            Self::Busy => c"another thread is calling this worker",
            Self::Bind => c"the address or the port cannot be bound",
            Self::Unreachable => c"the peer cannot be reached",
            Self::Refused => c"the peer refused the connection",
            Self::Protocol => c"the peer violates the protocol",
            Self::TooLong => c"the message is too long",
            Self::Range => c"the access exceeds the region",
            Self::Failure => c"the peer refused the request",
            Self::Resources => c"out of memory, descriptors, connections or regions",
            Self::Unsupported => c"this connection, library or host does not support that",
            Self::System => c"a system call failed",
            Self::Broken => c"a bug in the library",
        }
    }

    const ALL: [Self; 17] = [
        Self::Ok,
        Self::Invalid,
        Self::Timeout,
        Self::Full,
        Self::Closed,
        Self::Busy,
        Self::Bind,
        Self::Unreachable,
        Self::Refused,
        Self::Protocol,
        Self::TooLong,
        Self::Range,
        Self::Failure,
        Self::Resources,
        Self::Unsupported,
        Self::System,
        Self::Broken,
    ];
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Runs the body of a function, and converts panics to a status.
pub(crate) fn run(what: impl FnOnce() -> Result<(), Failed>) -> Status {
    // A panic poisons the lock, which protects inconsistent state from later calls.
    let result = catch_unwind(AssertUnwindSafe(what));
    let failed = match result {
        Ok(Ok(())) => return Status::Ok,
        Ok(Err(failed)) => failed,
        Err(_) => Failed(Status::Broken, "the library panicked; see standard error".to_owned()),
    };
    // Fails only in a thread that is about to end.
    let _ = LAST.try_with(|last| {
        let text = failed.1.replace('\0', " ");
        *last.borrow_mut() = CString::new(text).unwrap_or_default();
    });
    failed.0
}

/// Describes a status code. The text is static; unknown codes have one, too.
#[unsafe(no_mangle)]
pub extern "C" fn bifrost_rdm_status_text(status: i32) -> *const c_char {
    let known = Status::ALL.into_iter().find(|known| *known as i32 == status);
    known.map_or(c"unknown code", Status::text).as_ptr()
}

/// Describes this thread's last failed call, with the peer and the cause. Valid until the next
/// failure in this thread.
#[unsafe(no_mangle)]
pub extern "C" fn bifrost_rdm_last_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    fn last() -> String {
        // SAFETY: it is null-terminated, and valid until the next call.
        unsafe { CStr::from_ptr(bifrost_rdm_last_error()) }.to_string_lossy().into_owned()
    }

    #[test]
    fn a_panic_becomes_a_code() {
        assert_eq!(run(|| Err(Failed::invalid("with a \0 in it"))), Status::Invalid);
        assert_eq!(last(), "with a   in it");
        assert_eq!(run(|| panic!("for the test")), Status::Broken);
        assert!(last().contains("panicked"));
        assert_eq!(run(|| Ok(())), Status::Ok);
    }

    #[test]
    fn all_codes_have_different_texts() {
        let texts: std::collections::BTreeSet<_> = Status::ALL.map(Status::text).into_iter().collect();
        assert_eq!(texts.len(), Status::ALL.len());
        assert!(Status::ALL.into_iter().enumerate().all(|(number, status)| status as usize == number));
    }
}
