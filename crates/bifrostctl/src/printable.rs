//! Text from elsewhere, made safe for a terminal.

use std::borrow::Cow;

/// Escapes control characters except line ends: a terminal would execute those in names and paths.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(printable("web1  10.0.0.1\nweb2 \u{2026}"), "web1  10.0.0.1\nweb2 \u{2026}");
        assert_eq!(printable("a\u{1b}[2Jb\u{9b}c\rd\u{7f}"), "a\\u{1b}[2Jb\\u{9b}c\\rd\\u{7f}");
    }
}
