//! Runs system tools to completion, with errors that say which command failed and what it printed.

use std::ffi::OsStr;
use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// Runs `program` with `arguments` and returns what it printed on standard output.
///
/// # Errors
/// The program is missing or its exit status is not zero; the error contains its standard error.
pub fn run<A: AsRef<OsStr>>(program: &str, arguments: &[A]) -> Result<String> {
    run_with_input(program, arguments, "")
}

/// As [`run`], with `input` on standard input.
pub fn run_with_input<A: AsRef<OsStr>>(program: &str, arguments: &[A], input: &str) -> Result<String> {
    let mut command = Command::new(program);
    // Its own process group: Ctrl-C on the terminal reaches only the lab, which then ends what it started.
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child = command.spawn().with_context(|| missing(program))?;
    if let Some(mut stdin) = child.stdin.take() {
        // A program that exits before it has read all input reports the reason through its status.
        let _ = stdin.write_all(input.as_bytes());
    }
    let output = child.wait_with_output().with_context(|| format!("waiting for `{program}`"))?;
    if !output.status.success() {
        let line: Vec<_> = arguments.iter().map(|a| a.as_ref().to_string_lossy()).collect();
        let stderr = String::from_utf8_lossy(&output.stderr);
        let stdout = String::from_utf8_lossy(&output.stdout);
        bail!("`{program} {}` failed ({}): {} {}", line.join(" "), output.status, stderr.trim(), stdout.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The error message for a program that could not be started.
pub fn missing(program: &str) -> String {
    format!(
        "cannot start `{program}`: is it installed? (scripts/install-debian-packages.sh installs what the lab needs)"
    )
}
