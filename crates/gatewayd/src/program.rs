//! The life cycle of a program: log, signals, the service manager.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::{CommandFactory as _, FromArgMatches as _, Parser};
use rustix::thread::{CpuSet, sched_setaffinity};
use sd_notify::NotifyState;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tracing_subscriber::EnvFilter;

use crate::file::FileErrors;

/// A program that runs until it is stopped.
pub trait Program: Sized {
    /// Its checked configuration.
    type Config;
    /// Its name on the command line.
    const NAME: &'static str;
    /// The default path of its configuration.
    const CONFIG: &'static str;

    /// Reads and checks a configuration file.
    ///
    /// # Errors
    /// All errors in the file.
    fn load(path: &Path) -> Result<Self::Config, FileErrors>;

    /// Its control socket.
    fn control(config: &Self::Config) -> &Path;

    /// Starts its threads.
    ///
    /// # Errors
    /// A device, socket or thread is not available.
    fn start(config: Self::Config) -> Result<Self>;

    /// Ends its threads.
    fn stop(self);
}

#[derive(Debug, Parser)]
#[command(version, max_term_width = 100)]
struct Options {
    /// The configuration file.
    #[arg(long, short, value_name = "FILE")]
    config: PathBuf,
    /// Check the configuration and exit: 0 if it is valid, 1 if not.
    #[arg(long)]
    check: bool,
    /// Print the state of the running program with this configuration as JSON, and exit.
    #[arg(long)]
    json: bool,
}

/// The program's `main`. The first line of `about` is the short help, and all of it the long help.
pub fn main<P: Program>(about: &'static str) -> ExitCode {
    start_log();
    let command = Options::command()
        .name(P::NAME)
        .about(about.lines().next().unwrap_or_default())
        .long_about(about)
        .mut_arg("config", |config| config.required(false).default_value(P::CONFIG));
    let options = Options::from_arg_matches(&command.get_matches()).unwrap_or_else(|error| error.exit());
    match run::<P>(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}: {error:#}", P::NAME);
            ExitCode::FAILURE
        }
    }
}

fn run<P: Program>(options: &Options) -> Result<()> {
    let config = P::load(&options.config)?;
    if options.json {
        return print_status(P::control(&config));
    }
    if options.check {
        println!("{}: good", options.config.display());
        return Ok(());
    }
    let signals = signals()?;
    let program = P::start(config)?;
    wait(signals);
    program.stop();
    Ok(())
}

/// The log goes to standard error. `RUST_LOG` sets its level.
fn start_log() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    bifrost_port::panics::install();
}

/// Catches the signals that end the program. Called before anything is opened, so that no signal is lost.
///
/// # Errors
/// The operating system refuses it.
fn signals() -> Result<Signals> {
    Signals::new([SIGINT, SIGTERM]).context("waiting for signals")
}

/// Tells the service manager that the program is ready, and waits for a signal.
fn wait(mut signals: Signals) {
    tracing::info!("ready");
    let _ = sd_notify::notify(&[NotifyState::Ready]);
    let _ = signals.forever().next();
    tracing::info!("ending");
    let _ = sd_notify::notify(&[NotifyState::Stopping]);
}

/// Binds the calling thread to a CPU. If that fails, the thread runs anyway, and the failure is logged.
pub fn pin(processor: Option<usize>) {
    let Some(processor) = processor else { return };
    let mut set = CpuSet::new();
    set.set(processor);
    if let Err(error) = sched_setaffinity(None, &set) {
        tracing::warn!(processor, %error, "cannot run there alone");
    }
}

/// Checks whether a path can be that of a socket.
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

/// Prints the state of the program behind a control socket as JSON.
///
/// # Errors
/// No program answers.
fn print_status(socket: &Path) -> Result<()> {
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
