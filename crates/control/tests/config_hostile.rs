//! Files that are not configurations, or that are expensive to check: few errors, within a bounded time.

#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use bifrost_control::config::Config;

/// Maximum time for a file of some megabytes, in a debug build on a busy machine.
const MAX_TIME: Duration = Duration::from_secs(30);
/// Maximum size of all errors together, bytes.
const MOST: usize = 4 << 20;

/// The errors of a text.
fn errors(text: &str) -> Vec<String> {
    let started = Instant::now();
    let errors = Config::parse(text, "f").unwrap_err();
    assert!(started.elapsed() < MAX_TIME, "{:?} for {} bytes", started.elapsed(), text.len());
    let errors: Vec<String> = errors.errors().iter().map(ToString::to_string).collect();
    assert!(errors.len() <= 1000, "{} errors", errors.len());
    assert!(errors.iter().map(String::len).sum::<usize>() < MOST);
    errors
}

#[test]
fn nesting_has_a_bound() {
    let deep = 100_000;
    for text in [
        format!("x = {}", "[".repeat(deep)),
        format!("x = {}{}", "[".repeat(deep), "]".repeat(deep)),
        format!("x = {}1{}", "{x = ".repeat(deep), "}".repeat(deep)),
        format!("{} = 1", vec!["x"; deep].join(".")),
        format!("[{}]", vec!["x"; deep].join(".")),
    ] {
        errors(&text);
    }
}

#[test]
fn the_number_of_errors_is_limited() {
    let many = |line: &str| (0..10_000).map(|n| line.replace('#', &n.to_string())).collect::<String>();
    for text in [
        "]\n".repeat(100_000),
        "]\n".repeat(600_000),
        many("key# = 1\n"),
        many("[[port]]\nname = 3\n"),
        // Each conflicts with the others.
        many(
            "[[port]]\nname = \"p#\"\nvni = 5\nmac = \"02:00:00:00:00:01\"\naddresses = [\"10.0.0.1/24\"]\nqueues = 7\n",
        ),
        many("[[route]]\nvni = 5\nprefix = \"10.0.0.1/24\"\npeer = \"p#\"\nmac = \"x\"\n"),
    ] {
        errors(&text);
    }
    let many = errors(&many("key# = 1\n"));
    assert_eq!(many.len(), 1000);
    assert_eq!(many.iter().filter(|e| e.contains("errors beyond these 1000 are not listed")).count(), 1);
}

#[test]
fn quoted_text_is_truncated_and_escaped() {
    let long = "x".repeat(4 << 20);
    for text in [format!("{long} = 1"), format!("[host]\nname = \"{long}\""), format!("[host.{long}]")] {
        errors(&text);
    }
    for text in [
        "\"\\u001b[2J\" = 1",
        "\"\\u009b2J\" = 1",
        "[host]\nname = \"\\u001b[2J\"",
        "[host]\n\"\\u0007\\u000d\" = 1",
        "\u{1b}[2J = = 3",
        "[host]\nname = \"a\u{1b}\"",
    ] {
        for error in errors(text) {
            assert!(!error.chars().any(|c| c.is_control() && c != '\n'), "{error:?}");
        }
    }
}

#[test]
fn numbers_have_bounds() {
    let huge = "9".repeat(100_000);
    for value in ["-1", "0x1ffffffffffffffffffffffff", "1e400", "nan", "-0", "18446744073709551616", &huge] {
        for key in ["[workers]\ncount", "[underlay]\nmtu", "[underlay]\npaths", "[transport]\nmax_window"] {
            errors(&format!("{key} = {value}"));
        }
    }
}
