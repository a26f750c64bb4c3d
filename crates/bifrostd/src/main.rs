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
mod learning;
mod lists;
mod machine;
mod metadata;
mod mirror;
mod moves;
mod names;
mod nat;
mod qos;
mod queues;
mod removal;
mod samples;
mod sessions;
mod shared;
mod snapshot;
mod tables;
mod trace;
mod translate;
mod trim;
mod upgrade;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use bifrost_control::server::Backend as _;
use bifrost_control::{Config, ServerHandle};
use bifrost_port::large_pages::LargePages;
use bifrost_port::{panics, provide};
use clap::Parser as _;
use sd_notify::NotifyState;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tracing_subscriber::EnvFilter;

use crate::background::{all_at_lower_priority, in_background};
use crate::cli::Cli;
use crate::daemon::Daemon;
use crate::kept::Kept;
use crate::trim::trim;
use crate::upgrade::Successor;

#[global_allocator]
static ALLOCATOR: LargePages = LargePages;

/// How long a daemon that has taken over leaves the processors to its workers before other work begins.
const QUIET: Duration = Duration::from_millis(50);

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

/// Locks the program and its libraries in memory. Otherwise the kernel may evict pages that were not used for a while,
/// and packets would wait until they are read from disk again. Memory that is allocated later is not locked.
fn lock_program() {
    if let Err(error) = rustix::mm::mlockall(rustix::mm::MlockAllFlags::CURRENT) {
        tracing::warn!(%error, "cannot lock the program in memory: packets may wait for the disk");
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
        println!("{}: valid", cli.config.display());
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
    // Before anything is opened: a signal during start-up then ends the daemon instead of being lost.
    let signals = signals()?;
    let (socket, metrics) = (config.control.socket.clone(), config.control.metrics);
    let daemon = Arc::new(Daemon::start(cli.config.clone(), config, cli.state.as_deref(), kept, None)?);
    let server = bifrost_control::serve_with_metrics(&socket, metrics, Arc::clone(&daemon) as _)?;
    work(&daemon, server, signals, None)
}

fn signals() -> Result<Signals> {
    Signals::new([SIGHUP, SIGINT, SIGTERM]).context("waiting for signals")
}

/// Takes over from the daemon that started this one.
fn take_over(cli: &Cli, config: Config) -> Result<ExitCode> {
    let successor = Successor::of_stdin()?;
    let started = (|| {
        lock_program();
        let signals = signals()?;
        let text = std::fs::read(&cli.config).with_context(|| format!("reading {}", cli.config.display()))?;
        let socket = config.control.socket.clone();
        let handed = successor.offer(crc32fast::hash(&text), config.workers.count)?;
        let listeners = handed.descriptors.listeners.try_clone().context("copying listeners")?;
        let learned = handed.learned();
        let (directory, kept) = (cli.state.as_deref(), Kept::nothing());
        let daemon = Arc::new(Daemon::start(cli.config.clone(), config, directory, kept, Some(handed))?);
        let paused = successor.complete(&daemon, &learned)?;
        anyhow::Ok((daemon, listeners, socket, signals, paused))
    })();
    let (daemon, listeners, socket, signals, paused) = match started {
        Ok(started) => started,
        Err(error) => {
            successor.fail(&error);
            return Err(error);
        }
    };
    daemon.settle();
    let server = bifrost_control::serve_handed(&socket, listeners, Arc::clone(&daemon) as _)?;
    work(&daemon, server, signals, Some(paused))
}

/// The work of the main thread and its helpers, until a signal arrives or another daemon has taken over. `paused`: this
/// one has just taken over.
fn work(
    daemon: &Arc<Daemon>,
    server: ServerHandle,
    mut signals: Signals,
    paused: Option<provide::Pause>,
) -> Result<ExitCode> {
    daemon.progress.set_listeners(server.listeners().try_clone().context("copying listeners")?);
    let thread = |name: &str, work: fn(&Daemon)| {
        let daemon = Arc::clone(daemon);
        let started = std::thread::Builder::new().name(name.into()).spawn(move || work(&daemon));
        started.map(drop).context("starting a thread")
    };
    thread("learning", learning::answers::run)?;
    thread("flow-log", flow_log::export::run)?;
    thread("mirror", mirror::forward::run)?;
    thread("afxdp", upgrade::wait_for_queues)?;
    if let Some(paused) = paused {
        // Packets that have waited for this daemon come before its other work.
        std::thread::sleep(QUIET);
        drop(paused);
    }
    thread("namespaces", Daemon::follow_namespaces)?;
    thread("health", health::checks::run)?;
    thread("shared", shared::election::run)?;
    thread("tables", tables::install::run)?;
    thread("metadata", metadata::service::run)?;
    #[cfg(debug_assertions)]
    inject::listen(daemon);
    tracing::info!(socket = %server.socket().display(), "ready");
    // Without a service manager this does nothing.
    sd_notify::notify(&[NotifyState::Ready]).context("notifying systemd")?;
    in_background(trim);
    for signal in &mut signals {
        if signal == SIGHUP {
            match panics::contain(|| daemon.reload()) {
                Err(panic) => {
                    tracing::error!(%panic, "panic while reloading; changes made before it are in force")
                }
                Ok(Ok(report)) => tracing::info!("{}", report.to_string().replace('\n', "; ")),
                Ok(Err(error)) => tracing::error!(%error, "not reloaded; the former configuration stays in force"),
            }
        } else {
            break;
        }
    }
    let _no_upgrade = daemon.progress.wait();
    daemon.questions.end();
    if daemon.progress.is_over() {
        // Exit without closing anything: another daemon uses the same sockets and devices.
        server.leave();
        daemon.end_continued_capture();
        tracing::info!("exiting; another daemon has taken over");
        // Guests' packets, which that one carries, do not wait until this one's memory is freed.
        all_at_lower_priority();
        std::process::exit(0);
    }
    tracing::info!("stopping");
    let _ = sd_notify::notify(&[NotifyState::Stopping]);
    server.stop();
    daemon.stop();
    Ok(ExitCode::SUCCESS)
}
