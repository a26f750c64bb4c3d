//! Prints results, as text or as JSON.

use std::io::{self, Write};

use serde::Serialize;

use crate::failure::Failure;
use crate::printable::printable;

/// How results are printed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Output {
    /// As JSON.
    pub(crate) json: bool,
}

impl Output {
    /// Prints a result: as JSON, or as the text that `text` makes of it.
    pub(crate) fn print<T: Serialize>(self, value: &T, text: impl FnOnce(&T) -> String) -> Result<(), Failure> {
        let text = if self.json { serde_json::to_string_pretty(value)? } else { text(value) };
        line(&text).map(|_| ())
    }

    /// As [`print`](Self::print), in one line, for what goes on: JSON for programs that read lines.
    pub(crate) fn print_line<T: Serialize>(self, value: &T, text: impl FnOnce(&T) -> String) -> Result<(), Failure> {
        let text = if self.json { serde_json::to_string(value)? } else { text(value) };
        line(&text).map(|_| ())
    }
}

/// Writes a line to stdout. False: nobody reads any more (such as `| head`), which is no error.
pub(crate) fn line(text: &str) -> Result<bool, Failure> {
    let (mut stdout, text) = (io::stdout().lock(), printable(text));
    match writeln!(stdout, "{text}").and_then(|()| stdout.flush()) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(e) => Err(Failure::Output(e)),
    }
}
