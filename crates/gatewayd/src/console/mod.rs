//! `bifrost-gw-console`: a web page about gateway servers: pods, load of their cores, limited tenants, BGP sessions,
//! and the last hour.
//!
//! It asks `bifrost-nicd` and the pods on this server over their control sockets, and consoles on other servers over
//! HTTP. It changes nothing. The page and its data have no authentication.

mod history;
mod remote;
mod server;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use axum::extract::State;
use axum::routing::get;
use axum::{Json, Router};
use bifrost_control::server::web;
use clap::Parser;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

use remote::Remote;
use server::Server;

const EXAMPLES: &str = "\
Examples:
  bifrost-gw-console
                              this server alone, at http://127.0.0.1:9192/
  bifrost-gw-console --listen 10.0.0.1:9192 --server http://10.0.0.2:9192 --server http://10.0.0.3:9192
                              this server and two others, each with a console of its own";

/// A web page about gateway servers: pods, load, limited tenants, BGP, and the last hour
#[derive(Debug, Parser)]
#[command(name = "bifrost-gw-console", version, after_help = EXAMPLES)]
struct Options {
    /// Where to serve the page; anyone who reaches the address may read
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:9192")]
    listen: SocketAddr,
    /// The control socket of bifrost-nicd
    #[arg(long, value_name = "PATH", default_value = "/run/bifrost/nicd.sock")]
    nicd: PathBuf,
    /// Where each pod has a directory with its control socket, gw.sock
    #[arg(long, value_name = "DIRECTORY", default_value = "/var/lib/bifrost/gw")]
    pods: PathBuf,
    /// The console of another server, http://ADDRESS:PORT; may be repeated
    #[arg(long = "server", value_name = "URL")]
    servers: Vec<Remote>,
    /// Seconds between two samples; 720 are kept
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=60))]
    interval: u64,
    /// This server's name on the page [default: the host's]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
}

/// The sources of the page's data.
#[derive(Debug)]
struct Console {
    here: Server,
    others: Vec<Remote>,
}

/// The program's `main`.
pub fn main() -> ExitCode {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let options = Options::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    match runtime.context("starting threads").and_then(|runtime| runtime.block_on(run(options))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bifrost-gw-console: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(options: Options) -> Result<()> {
    let mut ends = signal(SignalKind::terminate()).context("waiting for signals")?;
    let mut interrupts = signal(SignalKind::interrupt()).context("waiting for signals")?;
    let interval = Duration::from_secs(options.interval);
    let listener = TcpListener::bind(options.listen).await.with_context(|| {
        format!("cannot listen on {}; is it an address of this host, and free? See --listen", options.listen)
    })?;
    let name = options.name.unwrap_or_else(|| rustix::system::uname().nodename().to_string_lossy().into_owned());
    let here = Server::new(name, options.nicd, options.pods);
    let console = Arc::new(Console { here, others: options.servers });
    let page = web::page(include_str!("index.html"), include_str!("console.js"));
    let answers = Router::new()
        .route("/v1/server", get(|State(console): State<Arc<Console>>| async move { Json(console.here.view()) }))
        .route("/v1/servers", get(servers))
        .with_state(Arc::clone(&console));
    tracing::info!("the console is at http://{}/", listener.local_addr()?);
    let serving = tokio::spawn(web::run(listener, page.merge(answers)));
    let looking = async {
        loop {
            // The clients block.
            let console = Arc::clone(&console);
            let _ = tokio::task::spawn_blocking(move || console.here.look()).await;
            tokio::time::sleep(interval).await;
        }
    };
    tokio::select! {
        () = looking => {}
        _ = ends.recv() => {}
        _ = interrupts.recv() => {}
    }
    serving.abort();
    Ok(())
}

/// This server and all others, at the same time.
async fn servers(State(console): State<Arc<Console>>) -> Json<Vec<serde_json::Value>> {
    let asked: Vec<_> =
        console.others.iter().cloned().map(|other| tokio::spawn(async move { other.view().await })).collect();
    let mut all = vec![serde_json::to_value(console.here.view()).unwrap_or_default()];
    for (other, answer) in console.others.iter().zip(asked) {
        all.push(match answer.await {
            Ok(Ok(view)) => view,
            Ok(Err(error)) => serde_json::json!({ "name": other.to_string(), "error": error.to_string() }),
            Err(error) => serde_json::json!({ "name": other.to_string(), "error": error.to_string() }),
        });
    }
    Json(all)
}
