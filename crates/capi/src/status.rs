//! What a call comes to: a code, and a text about the last one that failed.

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use bifrost_endpoint::{Error, SendError};

/// What a call comes to.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// It is done.
    Ok = 0,
    /// An argument is null, out of range, or not what it should be.
    Invalid = 1,
    /// The time is over. What was begun goes on.
    Timeout = 2,
    /// 1024 messages are open on the connection: wait until some have arrived.
    Full = 3,
    /// The connection has ended, and nothing is left to be read.
    Closed = 4,
    /// Another thread is in a call of this worker. Nothing was done.
    Busy = 5,
    /// An address or a port cannot be bound.
    Bind = 6,
    /// The peer cannot be reached.
    Unreachable = 7,
    /// The peer refused the connection.
    Refused = 8,
    /// The peer does not keep to the protocol.
    Protocol = 9,
    /// The message is longer than the peer takes, or than there may be.
    TooLong = 10,
    /// An access would leave a region.
    Range = 11,
    /// The peer could not do what it was asked for; the text is the peer's.
    Failure = 12,
    /// No memory, descriptor, connection or region is left.
    Resources = 13,
    /// This connection, this library, or this host without a suitable RDMA NIC, cannot do that.
    Unsupported = 14,
    /// A system call failed.
    System = 15,
    /// A defect of the library has shown. Its worker cannot be used any more.
    Broken = 16,
}

/// A code with its text.
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
            Self::Invalid => c"an argument is not valid",
            Self::Timeout => c"the time is over",
            Self::Full => c"1024 messages are open on the connection",
            Self::Closed => c"the connection has ended",
            Self::Busy => c"another thread is in a call of this worker",
            Self::Bind => c"the address or the port cannot be bound",
            Self::Unreachable => c"the peer cannot be reached",
            Self::Refused => c"the peer refused the connection",
            Self::Protocol => c"the peer does not keep to the protocol",
            Self::TooLong => c"the message is too long",
            Self::Range => c"the access would leave the region",
            Self::Failure => c"the peer could not do it",
            Self::Resources => c"no memory, descriptor, connection or region is left",
            Self::Unsupported => c"this connection or library cannot do that",
            Self::System => c"a system call failed",
            Self::Broken => c"a defect of the library has shown",
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

/// Runs what a function does. No panic leaves it.
pub(crate) fn run(what: impl FnOnce() -> Result<(), Failed>) -> Status {
    // What a panic leaves half done is behind a lock, which is poisoned by it.
    let result = catch_unwind(AssertUnwindSafe(what));
    let failed = match result {
        Ok(Ok(())) => return Status::Ok,
        Ok(Err(failed)) => failed,
        Err(_) => Failed(Status::Broken, "the library panicked; its standard error says where".to_owned()),
    };
    // Not in a thread that is about to end.
    let _ = LAST.try_with(|last| {
        let text = failed.1.replace('\0', " ");
        *last.borrow_mut() = CString::new(text).unwrap_or_default();
    });
    failed.0
}

/// What a code means: a text that stays. A number that is not a code has one, too.
#[unsafe(no_mangle)]
pub extern "C" fn bifrost_rdm_status_text(status: i32) -> *const c_char {
    let known = Status::ALL.into_iter().find(|known| *known as i32 == status);
    known.map_or(c"unknown code", Status::text).as_ptr()
}

/// What the last call of this thread that failed has to say: the peer, the cause. It stays until
/// another call of this thread fails.
#[unsafe(no_mangle)]
pub extern "C" fn bifrost_rdm_last_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    fn last() -> String {
        // SAFETY: it ends with 0, and stays until the next call.
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
    fn all_codes_have_a_text_of_their_own() {
        let texts: std::collections::BTreeSet<_> = Status::ALL.map(Status::text).into_iter().collect();
        assert_eq!(texts.len(), Status::ALL.len());
        assert!(Status::ALL.into_iter().enumerate().all(|(number, status)| status as usize == number));
    }
}
