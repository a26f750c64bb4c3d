//! The life of a program: log, signals, the service manager.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result};
use rustix::thread::{CpuSet, sched_setaffinity};
use sd_notify::NotifyState;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tracing_subscriber::EnvFilter;

/// The log goes to standard error; RUST_LOG says how much.
pub fn start_log() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    bifrost_port::panics::install();
}

/// Runs a program: an error goes to standard error, and makes the exit code 1.
pub fn exit(name: &str, result: Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{name}: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Signals that end the program. To be had before anything is opened, so that none is lost.
///
/// # Errors
/// The system's.
pub fn signals() -> Result<Signals> {
    Signals::new([SIGINT, SIGTERM]).context("waiting for signals")
}

/// Tells the service manager that the program is ready, and waits for a signal.
pub fn wait(mut signals: Signals) {
    tracing::info!("ready");
    let _ = sd_notify::notify(&[NotifyState::Ready]);
    let _ = signals.forever().next();
    tracing::info!("ending");
    let _ = sd_notify::notify(&[NotifyState::Stopping]);
}

/// Binds the calling thread to a processor. Without that it runs, too: it is logged.
pub fn pin(processor: Option<usize>) {
    let Some(processor) = processor else { return };
    let mut set = CpuSet::new();
    set.set(processor);
    if let Err(error) = sched_setaffinity(None, &set) {
        tracing::warn!(processor, %error, "cannot run there alone");
    }
}

/// Whether a string can be a path of a socket.
pub fn check_socket(path: &Path) -> Result<(), String> {
    const LONGEST: usize = 107;
    let len = path.as_os_str().len();
    if !path.is_absolute() {
        return Err(format!("{} is no absolute path", path.display()));
    }
    if len > LONGEST {
        return Err(format!("{len} bytes; the path of a Unix socket has at most {LONGEST}"));
    }
    Ok(())
}

/// Prints the state of the program that answers on a control socket, as JSON.
///
/// # Errors
/// Nobody answers.
pub fn print_status(socket: &Path) -> Result<()> {
    use std::io::{Read as _, Write as _};
    let mut stream = std::os::unix::net::UnixStream::connect(socket)
        .with_context(|| format!("nobody answers on {}", socket.display()))?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    stream.write_all(b"GET /v1/status HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (_, body) = answer.split_once("\r\n\r\n").context("no answer")?;
    let value: serde_json::Value = serde_json::from_str(body).context("the answer is no JSON")?;
    println!("{}", serde_json::to_string_pretty(&value)?);
    Ok(())
}
