//! Repeats measurements that are too short to get any response.

use std::error::Error;
use std::fmt;

use anyhow::Result;

use crate::options::Mode;

/// Maximum number of repetitions; each takes twice as long as the one before.
const REPETITIONS: u32 = 4;

/// No request was answered: at high loss, every connection may have waited for its first packet until the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NothingAnswered;

impl fmt::Display for NothingAnswered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no request was answered during the measurement")
    }
}

impl Error for NothingAnswered {}

/// Measures over `mode` for `seconds`. After [`NothingAnswered`] it repeats the measurement with twice the duration,
/// but not in modes that repair losses: there it is a fault that must not be hidden.
///
/// # Errors
/// Those of `measure`.
pub fn until_answered<T>(mode: Mode, seconds: f64, mut measure: impl FnMut(f64) -> Result<T>) -> Result<T> {
    let repetitions = if mode.is_reliable() { 0 } else { REPETITIONS };
    let mut seconds = seconds;
    for _ in 0..repetitions {
        match measure(seconds) {
            Err(error) if error.is::<NothingAnswered>() => seconds *= 2.0,
            result => return result,
        }
    }
    measure(seconds)
}

#[cfg(test)]
mod tests {
    use anyhow::{Context as _, bail};

    use super::*;

    #[test]
    fn the_duration_doubles_until_something_is_answered() {
        let mut tried = Vec::new();
        let answered = until_answered(Mode::Off, 2.0, |seconds| {
            tried.push(seconds);
            if seconds < 8.0 { Err(NothingAnswered).context("over a bad network") } else { Ok(seconds) }
        });
        assert_eq!((answered.unwrap(), tried), (8.0, vec![2.0, 4.0, 8.0]));
    }

    #[test]
    fn it_gives_up_without_answers_and_at_other_errors() {
        let mut tried = 0;
        let never: Result<()> = until_answered(Mode::Off, 1.0, |_| {
            tried += 1;
            Err(NothingAnswered.into())
        });
        assert!(never.unwrap_err().is::<NothingAnswered>() && tried == REPETITIONS + 1);
        let fault: Result<()> = until_answered(Mode::Bifrost, 1.0, |seconds| {
            assert_eq!(seconds, 1.0, "once");
            Err(NothingAnswered.into())
        });
        assert!(fault.is_err());
        let broken: Result<()> = until_answered(Mode::Off, 1.0, |_| bail!("no such program"));
        assert_eq!(broken.unwrap_err().to_string(), "no such program");
    }
}
