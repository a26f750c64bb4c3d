//! `sockperf`: small messages over one TCP connection, at the maximum rate.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::interrupt;
use crate::process::Program;
use crate::topology::Guest;

/// The port of the server: sockperf's default.
const PORT: u16 = 11111;
/// Length of a message, bytes: sockperf's default.
pub const MESSAGE_LEN: u32 = 14;
/// Additional time for connecting, and for messages in flight at the end.
const PATIENCE: Duration = Duration::from_secs(60);

/// A running server. Dropping it ends the process.
#[derive(Debug)]
pub struct Server {
    program: Program,
    address: SocketAddr,
}

/// The sender's counters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sent {
    /// Messages accepted by its TCP.
    pub messages: u64,
    /// Duration, s.
    pub seconds: f64,
}

impl Server {
    /// Starts a server on the guest's address and waits until it listens.
    ///
    /// # Errors
    /// The server ends, or does not listen within three seconds.
    pub fn start(guest: &Guest, logs: &Path) -> Result<Self> {
        let address = SocketAddr::from((guest.address, PORT));
        let mut command = guest.namespace.command("sockperf");
        command.args(["server", "--tcp", "-i", &guest.address.to_string()]);
        let mut program = Program::start(command, "sockperf", &logs.join("sockperf-server.txt"))?;
        for _ in 0..300 {
            if let Some(status) = program.try_wait()? {
                bail!("sockperf's server ended ({status}): {}", program.output()?);
            }
            if !guest.namespace.run("ss", &["-Hltn", "sport", "=", &format!(":{PORT}")], "")?.is_empty() {
                return Ok(Self { program, address });
            }
            interrupt::sleep(Duration::from_millis(10))?;
        }
        bail!("sockperf does not listen: {}", program.output()?)
    }

    /// Sends from `client` for `seconds` (at least one), and returns what was sent.
    ///
    /// # Errors
    /// The server has ended, the connection fails, or the output of the program is malformed.
    pub fn throughput(&mut self, client: &Guest, seconds: u32, log: &Path) -> Result<Sent> {
        if let Some(status) = self.program.try_wait()? {
            bail!("sockperf's server ended ({status}): {}", self.program.output()?);
        }
        let mut command = client.namespace.command("sockperf");
        command.args(["throughput", "--tcp", "-i", &self.address.ip().to_string(), "-t", &seconds.to_string()]);
        let timeout = Duration::from_secs(u64::from(seconds)) + PATIENCE;
        let output = Program::start(command, "sockperf", log)?.finish(timeout)?;
        parse(&output).with_context(|| format!("understanding {}", log.display()))
    }
}

/// Parses the output of a client of sockperf 3.7. Its megabytes have 1024 * 1024 bytes, so only messages are used.
///
/// # Errors
/// The error that sockperf prints (its exit status is 0 even without a connection), or the missing line.
fn parse(output: &str) -> Result<Sent> {
    if let Some((_, error)) = output.split_once("ERROR: ") {
        bail!("sockperf: {}", error.lines().next().unwrap_or_default());
    }
    let line = output.lines().find_map(|line| line.split_once("Total of ")).context("no `Total of`")?.1;
    let words: Vec<&str> = line.split_whitespace().collect();
    match words[..] {
        [messages, "messages", "sent", "in", seconds, "sec"] => {
            let number = |text: &str| format!("`{text}` in `{line}` is not a number");
            Ok(Sent {
                messages: messages.parse().with_context(|| number(messages))?,
                seconds: seconds.parse().with_context(|| number(seconds))?,
            })
        }
        _ => bail!("`{line}` has no count of messages"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_parsed() {
        let table = [
            (
                "sockperf: Starting test...\nsockperf: Total of 2499461 messages sent in 2.000 sec\n\nsockperf: \
                 Summary: ...\n",
                Ok(Sent { messages: 2_499_461, seconds: 2.0 }),
            ),
            (
                "sockperf: ERROR: Can`t connect socket (errno=111 Connection refused)\n",
                Err("sockperf: Can`t connect socket (errno=111 Connection refused)"),
            ),
            ("sockperf: Total of many messages sent in 2.000 sec\n", Err("`many` in")),
            ("sockperf: Total of 5 messages\n", Err("has no count of messages")),
            ("", Err("no `Total of`")),
        ];
        for (output, expected) in table {
            match (parse(output), expected) {
                (Ok(sent), Ok(expected)) => assert_eq!(sent, expected),
                (Err(error), Err(text)) => assert!(format!("{error:#}").contains(text), "{error:#}"),
                (got, _) => panic!("{output:?}: {got:?}"),
            }
        }
    }
}
