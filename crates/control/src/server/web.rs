//! Web consoles over TCP: a page with its script, and a read-only JSON API.
//!
//! There is no authentication, so nothing served here may change state. Connections are limited in number and time.
//! Requests whose `Host` is neither an address nor `localhost` are refused: otherwise a page of another site whose name
//! resolves to this address (DNS rebinding) could read the data with a visitor's browser.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

/// Concurrent connections; others wait in the listener's queue.
const MAX_CONNECTIONS: usize = 64;
/// How long the head of a request may take to arrive.
const HEAD_TIME: Duration = Duration::from_secs(5);
/// How long a connection may last. Browsers reconnect.
const CONNECTION_TIME: Duration = Duration::from_secs(60);
/// Delay after a failed accept, for example when the process is out of descriptors.
const PAUSE: Duration = Duration::from_millis(100);
/// Content security policy: everything only from this server, and no inline scripts or styles.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
/// The response to a request with another host name.
const WRONG_NAME: &str = "This server answers only to an address or to localhost, such as http://192.0.2.1:4791/.\n";

/// Serves a page at `/`. Its HTML refers to `console.css` and `console.js`; the script is a module that may import
/// `base.js`.
pub fn page(html: &'static str, script: &'static str) -> Router {
    let file =
        |kind: &'static str, text: &'static str| get(move || async move { ([(header::CONTENT_TYPE, kind)], text) });
    Router::new()
        .route("/", file("text/html; charset=utf-8", html))
        .route("/console.js", file("text/javascript; charset=utf-8", script))
        .route("/base.js", file("text/javascript; charset=utf-8", include_str!("web/base.js")))
        .route("/console.css", file("text/css; charset=utf-8", include_str!("web/console.css")))
}

/// Adds the headers that keep a browser from loading anything else into a page of the router, and from keeping it.
pub fn protected(router: Router) -> Router {
    router.layer(from_fn(async |request: Request, next: Next| protect(next.run(request).await)))
}

/// Serves requests until the future is dropped.
pub async fn run(listener: TcpListener, router: Router) {
    let (router, slots) = (router.layer(from_fn(guarded)), Arc::new(Semaphore::new(MAX_CONNECTIONS)));
    loop {
        // The semaphore is never closed, so this does not fail.
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return };
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        let router = router.clone();
        tokio::spawn(async move {
            // Errors of a connection are left to the client.
            let _ = tokio::time::timeout(CONNECTION_TIME, converse(stream, router)).await;
            drop(slot);
        });
    }
}

async fn converse(stream: TcpStream, router: Router) -> hyper::Result<()> {
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router))
        .await
}

/// Refuses requests with other host names, and protects responses.
async fn guarded(request: Request, next: Next) -> Response {
    protect(match is_named_well(request.headers()) {
        true => next.run(request).await,
        false => (StatusCode::MISDIRECTED_REQUEST, WRONG_NAME).into_response(),
    })
}

fn protect(mut response: Response) -> Response {
    let headers = [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ];
    for (name, value) in headers {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Whether `Host` is an address or `localhost`.
fn is_named_well(headers: &HeaderMap) -> bool {
    let Some(Ok(host)) = headers.get(header::HOST).map(HeaderValue::to_str) else { return false };
    let name = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, _)) => address,
        None => host.split(':').next().unwrap_or_default(),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_and_localhost_are_good_names() {
        let is_good =
            |host: &str| is_named_well(&HeaderMap::from_iter([(header::HOST, HeaderValue::from_str(host).unwrap())]));
        for good in ["127.0.0.1", "127.0.0.1:4791", "[::1]:4791", "[2001:db8::1]", "localhost", "LocalHost:4791"] {
            assert!(is_good(good), "{good}");
        }
        for bad in
            ["", "evil.example", "evil.example:4791", "127.0.0.1.evil.example", "[evil]", "localhost.evil.example:80"]
        {
            assert!(!is_good(bad), "{bad}");
        }
        assert!(!is_named_well(&HeaderMap::new()));
    }
}
