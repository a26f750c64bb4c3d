//! Measurements that would be too short to see anything.

use std::error::Error;
use std::fmt;

use anyhow::Result;

use crate::options::Mode;

/// How often a measurement is repeated, at most, for twice as long each time.
const REPETITIONS: u32 = 4;

/// No request was answered: at high loss every connection may have waited for the first packet of its own all the time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NothingAnswered;

impl fmt::Display for NothingAnswered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no request was answered in all that time")
    }
}

impl Error for NothingAnswered {}

/// Measures over `mode` for so many seconds; again and for twice as long while [`NothingAnswered`]. Not where losses are repaired: there it
/// is a fault, and not to be hidden.
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
    fn it_lasts_longer_until_something_is_answered() {
        let mut tried = Vec::new();
        let answered = until_answered(Mode::Off, 2.0, |seconds| {
            tried.push(seconds);
            if seconds < 8.0 { Err(NothingAnswered).context("over a bad network") } else { Ok(seconds) }
        });
        assert_eq!((answered.unwrap(), tried), (8.0, vec![2.0, 4.0, 8.0]));
    }

    #[test]
    fn it_ends_when_nothing_ever_is_and_at_other_errors() {
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
