//! Prints results, as text or as JSON.

use std::borrow::Cow;
use std::io::{self, Write};

use serde::Serialize;

use crate::failure::Failure;

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

/// A text without control characters but line ends: names and paths come from elsewhere, and a terminal obeys what is in them.
pub(crate) fn printable(text: &str) -> Cow<'_, str> {
    let commands = |c: char| c.is_control() && c != '\n';
    if !text.contains(commands) {
        return Cow::Borrowed(text);
    }
    text.chars()
        .fold(String::new(), |mut out, c| {
            if commands(c) {
                out.extend(c.escape_debug())
            } else {
                out.push(c)
            }
            out
        })
        .into()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_is_told_nothing() {
        assert_eq!(printable("web1  10.0.0.1\nweb2 \u{2026}"), "web1  10.0.0.1\nweb2 \u{2026}");
        assert_eq!(printable("a\u{1b}[2Jb\u{9b}c\rd\u{7f}"), "a\\u{1b}[2Jb\\u{9b}c\\rd\\u{7f}");
    }
}
