//! The console: a web page for people, and the part of the API that only reads, over TCP. Over TLS it is a part of the API.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Context, Result};
use axum::Router;
use axum::extract::Extension;
use bifrost_control::server::web;
use tokio::net::TcpListener;

use crate::api;
use crate::relay::Relay;
use crate::roles::Door;

/// Listens.
///
/// # Errors
/// The address is not this host's, or not free.
pub(crate) async fn bind(address: SocketAddr) -> Result<TcpListener> {
    let listener = TcpListener::bind(address).await;
    listener.with_context(|| {
        format!("cannot listen on {address} for the console; is it an address of this host, and free? See --console")
    })
}

/// The page, which shows what the API says.
pub(crate) fn page() -> Router {
    web::page(include_str!("console/index.html"), include_str!("console/console.js"))
}

/// Answers until it is dropped.
pub(crate) async fn run(listener: TcpListener, relay: Arc<Relay>) {
    // Who reaches the address may see everything.
    let reading = api::reading(relay).layer(Extension(Door::Open));
    web::run(listener, page().merge(reading)).await;
}
