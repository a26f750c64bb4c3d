//! What went wrong, and what to do about it.

use std::io;
use std::process::ExitCode;

use bifrost_control::api::FaultSpecError;
use bifrost_control::client::ClientError;

use crate::printable::printable;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error(transparent)]
    Fault(#[from] FaultSpecError),
    #[error("cannot print the result: {0}")]
    Output(io::Error),
    #[error("cannot print the result: {0}")]
    Json(#[from] serde_json::Error),
    #[error("cannot write {}: {source}", path.display())]
    File { path: std::path::PathBuf, source: io::Error },
    #[error("cannot read {}: {source}", path.display())]
    ReadFile { path: std::path::PathBuf, source: io::Error },
    /// A gateway's pod: what, where, and what to do.
    #[error("{what}")]
    Pod { what: String, location: String, hint: String },
    #[error("{program} is not running: nobody answers on this socket")]
    NoGateway { program: &'static str, socket: std::path::PathBuf },
    #[error("bifrost-relay is not running: nobody answers on this socket")]
    NoRelay { socket: std::path::PathBuf },
    /// What the user wrote makes no sense: what, where, and what to do.
    #[error("{what}")]
    Usage { what: String, location: String, hint: &'static str },
    #[error("top needs a terminal")]
    NoTerminal,
    #[error("the terminal failed: {0}")]
    Terminal(io::Error),
}

impl Failure {
    /// Tells the user on stderr; gives the exit code.
    pub(crate) fn report(&self, json: bool) -> ExitCode {
        let (what, location, hint) = self.parts();
        if json {
            let error = serde_json::json!({ "error": { "what": what, "where": location, "hint": hint } });
            eprintln!("{}", printable(&error.to_string()));
        } else {
            let location = if location.is_empty() { location } else { format!("{location}: ") };
            eprintln!("error: {}", printable(&format!("{location}{what}")));
            if !hint.is_empty() {
                eprintln!("hint: {}", printable(&hint));
            }
        }
        ExitCode::FAILURE
    }

    /// What was wrong, where, and what to do.
    fn parts(&self) -> (String, String, String) {
        match self {
            Failure::Client(ClientError::Api(e)) => (e.what.clone(), e.location.clone(), e.hint.clone()),
            Failure::Client(ClientError::NotRunning(path)) => {
                let hint = "start it with `systemctl start bifrostd`, or `bifrostd --config \
                            /etc/bifrost/bifrostd.toml`; if its [control].socket is another, name that with --socket";
                let what = "bifrostd is not running: nobody answers on this socket";
                (what.to_owned(), path.display().to_string(), hint.to_owned())
            }
            Failure::Client(ClientError::Timeout { .. }) => {
                let hint = "see what it does: `journalctl -u bifrostd`, `top -H`";
                (self.to_string(), String::new(), hint.to_owned())
            }
            Failure::NoGateway { program, socket } => {
                let option = program.strip_prefix("bifrost-").unwrap_or(program);
                let hint = format!("start it; if its [control].socket is another, name that with --{option}");
                (self.to_string(), socket.display().to_string(), hint)
            }
            Failure::NoRelay { socket } => {
                let hint = "start it, or name the socket that it has with --relay; see `bifrost-relay --help`";
                (self.to_string(), socket.display().to_string(), hint.to_owned())
            }
            Failure::Pod { what, location, hint } => (what.clone(), location.clone(), hint.clone()),
            Failure::Usage { what, location, hint } => (what.clone(), location.clone(), (*hint).to_owned()),
            Failure::NoTerminal => {
                let hint = "without one: `bifrostctl --json top` prints a line of JSON for each sample";
                (self.to_string(), String::new(), hint.to_owned())
            }
            _ => (self.to_string(), String::new(), String::new()),
        }
    }
}
