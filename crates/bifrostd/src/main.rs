//! `bifrostd`: the virtual switch of one host.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod apply;
mod backend;
mod background;
mod beginning;
mod capture;
mod carried;
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
mod metadata;
mod mirror;
mod moves;
mod nat;
mod samples;
mod sessions;
mod shared;
mod snapshot;
mod trace;
mod translate;
mod trim;
mod upgrade;

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result};
use bifrost_control::server::Backend as _;
use bifrost_control::{Config, ServerHandle};
use bifrost_port::large_pages::LargePages;
use bifrost_port::panics;
use clap::Parser as _;
use sd_notify::NotifyState;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tracing_subscriber::EnvFilter;

use crate::background::in_background;
use crate::cli::Cli;
use crate::daemon::Daemon;
use crate::kept::Kept;
use crate::trim::trim;
use crate::upgrade::Successor;

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
    if cli.take_over {
        return take_over(cli, config);
    }
    let kept = Kept::take();
    lock_program();
    // Before anything is opened, so that a signal during start-up ends it instead of being lost.
    let signals = signals()?;
    let (socket, metrics) = (config.control.socket.clone(), config.control.metrics);
    let daemon = Arc::new(Daemon::start(cli.config.clone(), config, cli.state.as_deref(), kept, None)?);
    let server = bifrost_control::serve_with_metrics(&socket, metrics, Arc::clone(&daemon) as _)?;
    work(&daemon, server, signals)
}

fn signals() -> Result<Signals> {
    Signals::new([SIGHUP, SIGINT, SIGTERM]).context("waiting for signals")
}

/// Goes on with the work of the daemon that has started this one.
fn take_over(cli: &Cli, config: Config) -> Result<ExitCode> {
    let successor = Successor::of_stdin()?;
    let begun = (|| {
        lock_program();
        let signals = signals()?;
        let text = std::fs::read(&cli.config).with_context(|| format!("reading {}", cli.config.display()))?;
        let socket = config.control.socket.clone();
        let handed = successor.offer(crc32fast::hash(&text), config.workers.count)?;
        let listeners = handed.descriptors.listeners.try_clone().context("copying listeners")?;
        let (directory, kept) = (cli.state.as_deref(), Kept::nothing());
        let daemon = Arc::new(Daemon::start(cli.config.clone(), config, directory, kept, Some(handed))?);
        successor.go_on(&daemon)?;
        anyhow::Ok((daemon, listeners, socket, signals))
    })();
    let (daemon, listeners, socket, signals) = match begun {
        Ok(begun) => begun,
        Err(error) => {
            successor.fail(&error);
            return Err(error);
        }
    };
    daemon.settle();
    let server = bifrost_control::serve_handed(&socket, listeners, Arc::clone(&daemon) as _)?;
    work(&daemon, server, signals)
}

/// Does what is not the workers', until a signal ends it or another daemon goes on.
fn work(daemon: &Arc<Daemon>, server: ServerHandle, mut signals: Signals) -> Result<ExitCode> {
    daemon.progress.set_listeners(server.listeners().try_clone().context("copying listeners")?);
    let thread = |name: &str, work: fn(&Daemon)| {
        let daemon = Arc::clone(daemon);
        let started = std::thread::Builder::new().name(name.into()).spawn(move || work(&daemon));
        started.map(drop).context("starting a thread")
    };
    thread("namespaces", Daemon::follow_namespaces)?;
    thread("health", health::follow_for_ever)?;
    thread("shared", shared::follow_for_ever)?;
    thread("metadata", metadata::follow_for_ever)?;
    thread("flow-log", flow_log::follow_for_ever)?;
    thread("mirror", mirror::follow_for_ever)?;
    #[cfg(debug_assertions)]
    inject::listen(daemon);
    tracing::info!(socket = %server.socket().display(), "ready");
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
            break;
        }
    }
    let _none = daemon.progress.wait();
    if daemon.progress.is_over() {
        // Nothing of what is open is to be closed in order: another daemon uses it.
        server.leave();
        tracing::info!("ends; another daemon does the work");
        std::process::exit(0);
    }
    tracing::info!("ending");
    let _ = sd_notify::notify(&[NotifyState::Stopping]);
    server.stop();
    daemon.stop();
    Ok(ExitCode::SUCCESS)
}
