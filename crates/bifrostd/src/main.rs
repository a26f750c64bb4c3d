//! `bifrostd`: the virtual switch of one host.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod apply;
mod backend;
mod background;
mod capture;
mod cli;
mod container;
mod daemon;
mod devices;
mod flow_log;
mod health;
#[cfg(debug_assertions)]
mod inject;
mod kept;
mod lists;
mod machine;
mod mirror;
mod nat;
mod samples;
mod snapshot;
mod trace;
mod translate;
mod trim;

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result};
use bifrost_control::Config;
use bifrost_control::server::Backend as _;
use bifrost_port::large_pages::LargePages;
use bifrost_port::panics;
use clap::Parser as _;
use sd_notify::NotifyState;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use tracing_subscriber::EnvFilter;

use crate::background::in_background;
use crate::cli::Cli;
use crate::daemon::Daemon;
use crate::kept::Kept;
use crate::trim::trim;

#[global_allocator]
static ALLOCATOR: LargePages = LargePages;

fn main() -> ExitCode {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    panics::install();
    match run(&Cli::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("bifrostd: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Keeps the program in memory, and the libraries: the kernel may drop what was not used for a while, and packets would wait until it
/// is read from disk again. What is allocated from now on is not locked.
fn lock_program() {
    if let Err(error) = rustix::mm::mlockall(rustix::mm::MlockAllFlags::CURRENT) {
        tracing::warn!(%error, "cannot lock the program in memory; when memory is scarce, packets may wait for the disk");
    }
}

fn run(cli: &Cli) -> Result<ExitCode> {
    let config = match Config::load(&cli.config) {
        Ok(config) => config,
        Err(errors) => {
            eprintln!("{errors}");
            return Ok(ExitCode::FAILURE);
        }
    };
    if cli.check {
        println!("{}: good", cli.config.display());
        return Ok(ExitCode::SUCCESS);
    }
    if cli.remove_devices {
        kept::remove_all(&devices::directory(&config.control.socket))?;
        return Ok(ExitCode::SUCCESS);
    }
    let kept = Kept::take();
    lock_program();
    // Before anything is opened, so that a signal during start-up ends it instead of being lost.
    let mut signals = signal_hook::iterator::Signals::new([SIGHUP, SIGINT, SIGTERM]).context("waiting for signals")?;
    let (socket, metrics) = (config.control.socket.clone(), config.control.metrics);
    let daemon = Arc::new(Daemon::start(cli.config.clone(), config, cli.state.as_deref(), kept)?);
    let server = bifrost_control::serve_with_metrics(&socket, metrics, Arc::clone(&daemon) as _)?;
    let followed = Arc::clone(&daemon);
    let follow = move || followed.follow_namespaces();
    std::thread::Builder::new().name("namespaces".into()).spawn(follow).context("starting a thread")?;
    let asked = Arc::clone(&daemon);
    let ask = move || health::follow_for_ever(&asked);
    std::thread::Builder::new().name("health".into()).spawn(ask).context("starting a thread")?;
    let logged = Arc::clone(&daemon);
    let log = move || flow_log::follow_for_ever(&logged);
    std::thread::Builder::new().name("flow-log".into()).spawn(log).context("starting a thread")?;
    let mirrored = Arc::clone(&daemon);
    let mirror = move || mirror::follow_for_ever(&mirrored);
    std::thread::Builder::new().name("mirror".into()).spawn(mirror).context("starting a thread")?;
    #[cfg(debug_assertions)]
    inject::listen(&daemon);
    tracing::info!(socket = %socket.display(), "ready");
    // Without a service manager that wants to know, this does nothing.
    sd_notify::notify(&[NotifyState::Ready]).context("telling systemd")?;
    in_background(trim);
    for signal in &mut signals {
        if signal == SIGHUP {
            match panics::contain(|| daemon.reload()) {
                Err(panic) => {
                    tracing::error!(%panic, "a panic while reloading; what was changed until then is in force")
                }
                Ok(Ok(report)) => tracing::info!("{}", report.to_string().replace('\n', "; ")),
                Ok(Err(error)) => tracing::error!(%error, "not reloaded; the configuration in force stays"),
            }
        } else {
            tracing::info!("ending");
            let _ = sd_notify::notify(&[NotifyState::Stopping]);
            break;
        }
    }
    server.stop();
    daemon.stop();
    Ok(ExitCode::SUCCESS)
}
