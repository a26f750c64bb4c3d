//! `bifrost-agent`: brings what a relay says into a host's `bifrostd`.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::SystemTime;

use anyhow::{Context as _, Result, anyhow};
use bifrost_agent::cli::Cli;
use bifrost_agent::identity::{Enrolling, Identity};
use bifrost_agent::metrics::Metrics;
use bifrost_agent::run::run;
use bifrost_control::server::metrics;
use bifrost_relay_api::traces::Traces;
use clap::Parser as _;
use sd_notify::NotifyState;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    match work(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bifrost-agent: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn work(cli: Cli) -> Result<()> {
    let (address, traces) = (cli.metrics, cli.traces.clone());
    let identity = cli.identity().map_err(|what| anyhow!(what))?;
    let mut settings = cli.settings().map_err(|what| anyhow!(what))?;
    // Reading a hundred thousand objects takes a while, in which the relay's questions are to be answered.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.context("starting")?;
    runtime.block_on(async {
        let mut term = signal(SignalKind::terminate()).context("waiting for signals")?;
        let mut int = signal(SignalKind::interrupt()).context("waiting for signals")?;
        let started = Traces::start(traces, "bifrost-agent", settings.follow.host.clone());
        settings.traces = started.map_err(|what| anyhow!(what))?;
        let counted = Arc::new(Metrics::default());
        if let Some((identity, enrolling)) = &identity {
            tokio::select! {
                ready = prepare(identity, enrolling.as_ref(), &settings.follow.host) => ready?,
                _ = term.recv() => return Ok(()),
                _ = int.recv() => return Ok(()),
            }
        }
        if let Some(files) = &settings.follow.tls {
            // Said now rather than with each connection.
            files.read()?;
        }
        if let Some((identity, _)) = identity {
            tokio::spawn(identity.renew_forever(settings.follow.clone(), Arc::clone(&counted)));
        }
        if let Some(address) = address {
            let listener = metrics::bind(address).with_context(|| format!("cannot listen on {address} for metrics"))?;
            tokio::spawn(metrics::run(tokio::net::TcpListener::from_std(listener)?, counted.source()));
        }
        let stop = async {
            tokio::select! {
                _ = term.recv() => {}
                _ = int.recv() => {}
            }
        };
        tracing::info!(host = settings.follow.host, socket = %settings.socket.display(), "ready");
        // Without a service manager that wants to know, this does nothing.
        sd_notify::notify(&[NotifyState::Ready]).context("telling systemd")?;
        run(settings, counted, stop).await?;
        tracing::info!("ending; what is in force stays");
        Ok(())
    })
}

/// Sees to it that the host has a certificate.
async fn prepare(identity: &Identity, enrolling: Option<&Enrolling>, host: &str) -> Result<()> {
    let has_expired = match identity.validity()? {
        Some(validity) if validity.until > SystemTime::now() => return Ok(()),
        validity => validity.is_some(),
    };
    let Some(enrolling) = enrolling else {
        let what = if has_expired { "has expired" } else { "is missing" };
        return Err(anyhow!(
            "the host's certificate {what}; `bifrostctl fleet host enroll {host}` makes a token, for --enroll and --token"
        ));
    };
    tracing::info!(host, relay = enrolling.relay, "getting the host's first certificate");
    identity.enroll(host, enrolling).await.context("the relay gives the host no certificate")
}
