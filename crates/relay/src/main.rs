//! `bifrost-relay`: takes what a network of many hosts is to be, keeps it in a store, and gives each host what concerns it.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod agents;
mod alive;
mod api;
mod audit;
mod authority;
mod caller;
mod certify;
mod cli;
mod console;
mod enrollment;
mod feed;
mod fleet;
mod learned;
mod liveness;
mod metrics;
mod overview;
mod peers;
mod publish;
mod quiet;
mod relay;
mod remote;
mod roles;
mod spans;
#[cfg(test)]
mod tests;
mod tokens;

use std::io;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use axum::extract::Extension;
use bifrost_control::server::{self as control_server, ServeError, serve_router};
use bifrost_intent::api::MAX_BODY;
use bifrost_relay_api::limits::{
    KEEP_ALIVE_S, KEEP_ALIVE_TIMEOUT_S, MAX_CERTIFICATE_MESSAGE, MAX_ENROLLING, MAX_MESSAGE,
};
use bifrost_relay_api::pb::certificates_server::CertificatesServer;
use bifrost_relay_api::pb::enrollment_server::EnrollmentServer;
use bifrost_relay_api::pb::relay_server::RelayServer;
use bifrost_relay_api::tls::Material;
use bifrost_relay_api::traces::Traces;
use clap::Parser as _;
use sd_notify::NotifyState;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;
use tracing_subscriber::EnvFilter;

use crate::agents::Agents;
use crate::cli::{Cli, Kept};
use crate::enrollment::Enrollment;
use crate::quiet::{Connection, Quiet};
use crate::relay::Relay;
use crate::roles::Door;

/// Streams of one connection: an agent has one.
const MAX_STREAMS: u32 = 8;
/// What somebody without a certificate may send ahead on a connection, bytes: the least window that HTTP/2 has for connections
/// (RFC 9113, 6.9.2). With the number of connections it bounds the memory that strangers can have.
const ENROLL_WINDOW: u32 = 65_535;

fn main() -> ExitCode {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let cli = Cli::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let result = runtime.context("cannot start threads").and_then(|runtime| runtime.block_on(run(cli)));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bifrost-relay: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(cli: Cli) -> Result<()> {
    let mut ends = signal(SignalKind::terminate()).context("waiting for signals")?;
    let mut interrupts = signal(SignalKind::interrupt()).context("waiting for signals")?;
    let tls = cli.tls()?;
    let name = cli.name();
    let audit = cli.open_audit(&name)?;
    let roles = cli.open_roles()?;
    let authority = cli.open_authority(tls.as_ref())?;
    let store = cli.open_store().await?;
    let traces = Traces::start(cli.traces.clone(), "bifrost-relay", name.clone()).map_err(|what| anyhow!(what))?;
    let relay = Relay::new(name, cli.store.to_string(), store, audit, traces);
    let following = tokio::spawn(Arc::clone(&relay).follow());
    // A directory and memory are of one relay.
    let is_shared = matches!(cli.store, Kept::Etcd(_));
    let telling = is_shared.then(|| tokio::spawn(publish::run(Arc::clone(&relay))));
    let looking = tokio::spawn(liveness::run(Arc::clone(&relay), cli.deaths(), is_shared));

    if let Some(address) = cli.metrics {
        let listener = control_server::metrics::bind(address)
            .with_context(|| format!("cannot listen on {address} for metrics"))?;
        let relay = Arc::clone(&relay);
        let source = Arc::new(move || metrics::text(&relay).map_err(|error| error.to_string()));
        tokio::spawn(control_server::metrics::run(tokio::net::TcpListener::from_std(listener)?, source));
    }

    if let Some(address) = cli.console {
        let listener = console::bind(address).await?;
        tracing::info!("the console is at http://{}/", listener.local_addr()?);
        tokio::spawn(console::run(listener, Arc::clone(&relay)));
    }

    let agents = RelayServer::new(Agents { relay: Arc::clone(&relay), is_secure: tls.is_some() })
        .max_decoding_message_size(MAX_MESSAGE)
        .max_encoding_message_size(MAX_MESSAGE);
    let enrollment = authority.map(|authority| Enrollment::new(Arc::clone(&relay), authority));
    if let (Some(address), Some(enrollment), Some(files)) = (cli.enroll, &enrollment, &tls) {
        let (listener, _) = listen(address, "--enroll", quiet::MOST_STRANGERS).await?;
        tokio::spawn(enroll(listener, enrollment.clone(), files)?);
    }
    let mut server = server();
    if let Some(files) = &tls {
        server = server.tls_config(files.server()).context("the certificates do not fit together")?;
    }
    let renewals = enrollment
        .clone()
        .map(|enrollment| CertificatesServer::new(enrollment).max_decoding_message_size(MAX_CERTIFICATE_MESSAGE));
    let (listener, listening) = listen(cli.listen, "--listen", quiet::MOST).await?;
    let (stop_agents, agents_stopped) = oneshot::channel::<()>();
    let agents =
        server.add_service(agents).add_optional_service(renewals).serve_with_incoming_shutdown(listener, async {
            // Dropped, it says the same.
            let _ = agents_stopped.await;
        });
    let agents = tokio::spawn(agents);

    if let (Some(address), Some(files)) = (cli.api, &tls) {
        let acceptor = remote::acceptor(files)?;
        let (listener, address) = listen(address, "--api", quiet::MOST_STRANGERS).await?;
        let api = api::router(Arc::clone(&relay), Door::Tls(roles.clone()), enrollment.clone());
        let api = remote::guarded(api, Arc::clone(&relay)).layer(Extension(Door::Tls(roles.clone())));
        tokio::spawn(remote::run(listener, acceptor, api));
        tracing::info!("operators are served at https://{address}");
    }
    let (stop_api, api_stopped) = oneshot::channel();
    let socket = cli.socket.clone();
    let api = api::router(Arc::clone(&relay), Door::Socket(roles), enrollment);
    let api = match serve_router(&socket, api, MAX_BODY, api_stopped) {
        Ok(api) => tokio::spawn(api),
        Err(ServeError::AlreadyRunning(path)) => {
            bail!("another program listens on {}; stop it, or name another socket with --socket", path.display())
        }
        Err(error) => return Err(error.into()),
    };
    tracing::info!(socket = %socket.display(), agents = %listening, store = %cli.store, "ready");
    // Without a service manager that wants to know, this does nothing.
    sd_notify::notify(&[NotifyState::Ready]).context("telling systemd")?;
    let mut api = api;
    let mut agents = agents;
    tokio::select! {
        _ = ends.recv() => tracing::info!("ending"),
        _ = interrupts.recv() => tracing::info!("ending"),
        ended = &mut api => {
            ended.context("the API has ended")?;
            bail!("the API has ended")
        }
        ended = &mut agents => return match ended.context("the server of agents has ended")? {
            Ok(()) => Err(anyhow!("the server of agents has ended")),
            Err(error) => Err(error).context("the server of agents has ended"),
        },
    }
    // Agents keep streams open forever; they connect again, here or elsewhere.
    drop(stop_agents);
    agents.abort();
    following.abort();
    looking.abort();
    if let Some(telling) = telling {
        telling.abort();
    }
    let _ = stop_api.send(());
    let _ = tokio::time::timeout(Duration::from_secs(2), api).await;
    Ok(())
}

fn server() -> Server {
    Server::builder()
        .max_concurrent_streams(MAX_STREAMS)
        .http2_keepalive_interval(Some(Duration::from_secs(KEEP_ALIVE_S)))
        .http2_keepalive_timeout(Some(Duration::from_secs(KEEP_ALIVE_TIMEOUT_S)))
}

/// Gives first certificates to hosts that have tokens, for as long as it is polled.
fn enroll(
    listener: ReceiverStream<io::Result<Connection>>,
    enrollment: Enrollment,
    files: &Material,
) -> Result<impl Future<Output = ()> + Send + 'static> {
    let server = server().initial_stream_window_size(ENROLL_WINDOW).initial_connection_window_size(ENROLL_WINDOW);
    let mut server = server.tls_config(files.enrollment()).context("the certificates do not fit together")?;
    let service = EnrollmentServer::new(enrollment).max_decoding_message_size(MAX_ENROLLING);
    let serving = server.add_service(service).serve_with_incoming(listener);
    Ok(async move {
        if let Err(error) = serving.await {
            tracing::error!("hosts get no first certificates any more: {error}");
        }
    })
}

/// Connections to an address, and which one it is.
async fn listen(
    address: SocketAddr,
    option: &str,
    most: usize,
) -> Result<(ReceiverStream<io::Result<Connection>>, SocketAddr)> {
    let listener = tokio::net::TcpListener::bind(address).await.with_context(|| {
        format!("cannot listen on {address}; is it an address of this host, and free? See {option}")
    })?;
    let address = listener.local_addr()?;
    Ok((Quiet::new(most, quiet::QUIET_TIME).incoming(listener), address))
}
