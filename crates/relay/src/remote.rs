//! The API over TLS, for operators that are elsewhere: each shows a certificate, which carries roles.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use axum::Router;
use axum::extract::{Extension, Request, State};
use axum::http::{HeaderMap, HeaderName, Method, header};
use axum::middleware::{self, Next};
use axum::response::Response;
use bifrost_control::api::{ApiError, ErrorKind};
use bifrost_control::server::{serve_connection, web};
use bifrost_intent::api::MAX_BODY;
use bifrost_relay_api::enroll::{DIGEST, digest};
use bifrost_relay_api::tls::Material;
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use tokio_rustls::rustls::{RootCertStore, ServerConfig};
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected as _;

use crate::caller::Holder;
use crate::console;
use crate::quiet::Connection;
use crate::relay::Relay;
use crate::roles::{Access, Call};

/// How long TLS may take to begin.
const HANDSHAKE_TIME: Duration = Duration::from_secs(10);
/// Connections of one certificate, and of all.
const OF_ONE: usize = 32;
const OF_ALL: usize = 256;

/// What TLS is made with: who shows no certificate of the authority is refused.
///
/// # Errors
/// The files do not fit together.
pub(crate) fn acceptor(files: &Material) -> Result<TlsAcceptor> {
    let provider = Arc::new(ring::default_provider());
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(files.authorities()) {
        roots.add(certificate.context("--ca")?).context("--ca has a certificate that cannot vouch for others")?;
    }
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider)).build();
    let (chain, key) = files.identity();
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(chain).collect();
    let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| anyhow!("--key has no private key"))?;
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.context("TLS")?.with_client_cert_verifier(verifier.context("--ca")?);
    let mut config = config.with_single_cert(chain.context("--certificate")?, key);
    if let Ok(config) = &mut config {
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        // A session that is resumed would not show its certificate again.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
    }
    Ok(TlsAcceptor::from(Arc::new(config.context("the certificates do not fit together")?)))
}

/// The API, and the console that shows what it says, for those whose certificates grant roles; nobody else gets anything.
pub(crate) fn guarded(api: Router, relay: Arc<Relay>) -> Router {
    web::protected(console::page().merge(api)).layer(middleware::from_fn_with_state(relay, guard))
}

/// Lets those in who have some role; counted are all others.
async fn guard(
    State(relay): State<Arc<Relay>>,
    access: Result<Access, ApiError>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let allowed = access.and_then(|access| {
        // A browser that has the certificate shows it for pages of any site, and names the site with what changes
        // something and with what scripts read. The console reads only.
        if request.headers().contains_key(header::ORIGIN) && !is_of_console(request.method(), request.headers()) {
            return Err(ApiError::new(ErrorKind::Forbidden, "web pages may not call this API"));
        }
        // Which tells of all projects. What else there is looks for itself.
        let is_everything = request.uri().path() == "/metrics";
        let allowed = if is_everything { access.may(Call::LookAtEverything) } else { Ok(()) };
        allowed.map_err(|why| ApiError::new(ErrorKind::Forbidden, why))
    });
    if let Err(refused) = allowed {
        relay.counts.forbidden.fetch_add(1, Ordering::Relaxed);
        return Err(refused);
    }
    Ok(next.run(request).await)
}

/// Whether a page of this server asks for something to read.
fn is_of_console(method: &Method, headers: &HeaderMap) -> bool {
    let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    let (Some(origin), Some(host)) = (text(header::ORIGIN), text(header::HOST)) else { return false };
    method == Method::GET && origin.strip_prefix("https://") == Some(host)
}

/// Serves operators until the connections end.
pub(crate) async fn run(mut incoming: ReceiverStream<io::Result<Connection>>, acceptor: TlsAcceptor, router: Router) {
    let slots = Arc::new(Slots::default());
    while let Some(connection) = incoming.next().await {
        let Ok(connection) = connection else { continue };
        let (acceptor, router, slots) = (acceptor.clone(), router.clone(), Arc::clone(&slots));
        tokio::spawn(async move {
            let link = connection.connect_info();
            let stream = tokio::time::timeout(HANDSHAKE_TIME, acceptor.accept(connection)).await;
            let Ok(Ok(stream)) = stream else { return };
            let certificates = stream.get_ref().1.peer_certificates().unwrap_or_default();
            let Some(first) = certificates.first() else { return };
            let Some(_slot) = slots.enter(digest(first)) else { return };
            let holder = Arc::new(Holder::of(certificates));
            // It is known whose connection it is: it need not make room for others.
            let _known = link.speaks();
            serve_connection(stream, router.layer(Extension(holder)), MAX_BODY).await;
        });
    }
}

/// Open connections by the digest of the certificate.
#[derive(Debug, Default)]
struct Slots(Mutex<HashMap<[u8; DIGEST], usize>>);

/// A connection's slot; released on drop.
#[derive(Debug)]
struct Slot(Arc<Slots>, [u8; DIGEST]);

impl Slots {
    /// None: the certificate, or all together, have too many.
    fn enter(self: &Arc<Self>, whose: [u8; DIGEST]) -> Option<Slot> {
        let mut slots = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let own = slots.get(&whose).copied().unwrap_or(0);
        if own >= OF_ONE || slots.values().sum::<usize>() >= OF_ALL {
            return None;
        }
        slots.insert(whose, own + 1);
        Some(Slot(Arc::clone(self), whose))
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut slots = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = slots.get_mut(&self.1) {
            *own -= 1;
            if *own == 0 {
                slots.remove(&self.1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_servers_own_pages_read() {
        let asks = |method: Method, origin: &str, host: &str| {
            let text = |text: &str| text.parse().unwrap();
            is_of_console(&method, &HeaderMap::from_iter([(header::ORIGIN, text(origin)), (header::HOST, text(host))]))
        };
        assert!(asks(Method::GET, "https://relay1:4793", "relay1:4793"));
        for (method, origin, host) in [
            (Method::POST, "https://relay1:4793", "relay1:4793"),
            (Method::GET, "http://relay1:4793", "relay1:4793"),
            (Method::GET, "https://relay1:4794", "relay1:4793"),
            (Method::GET, "https://elsewhere.example", "relay1:4793"),
            (Method::GET, "null", "relay1:4793"),
        ] {
            assert!(!asks(method, origin, host), "{origin} {host}");
        }
    }

    #[test]
    fn no_certificate_takes_all_connections() {
        let slots = Arc::new(Slots::default());
        let enter = |whose: u8| (0..1000).filter_map(|_| slots.enter([whose; DIGEST])).collect::<Vec<_>>();
        let greedy = enter(1);
        let all: Vec<_> = (2..20).flat_map(enter).collect();
        assert_eq!((greedy.len(), greedy.len() + all.len()), (OF_ONE, OF_ALL));
        drop(greedy);
        assert_eq!(enter(30).len(), OF_ONE);
        drop(all);
        assert!(slots.0.lock().unwrap().is_empty());
    }
}
