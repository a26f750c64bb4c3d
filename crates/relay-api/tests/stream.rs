//! A stream over TCP with and without TLS: who may speak, and what a message may be.

#![allow(clippy::unwrap_used)]

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;

use bifrost_relay_api::limits::MAX_MESSAGE;
use bifrost_relay_api::pb::relay_client::RelayClient;
use bifrost_relay_api::pb::relay_server::{Relay, RelayServer};
use bifrost_relay_api::tls::{Files, is_of_host};
use bifrost_relay_api::{FromAgent, Hello, ToAgent, Welcome, pb};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::transport::{Endpoint, Server, ServerTlsConfig};
use tonic::{Code, Request, Response, Status, Streaming};

/// Welcomes hosts whose certificate has their name; without TLS all.
struct Doorman;

#[tonic::async_trait]
impl Relay for Doorman {
    type FollowStream = Pin<Box<dyn Stream<Item = Result<pb::ToAgent, Status>> + Send>>;

    async fn follow(&self, request: Request<Streaming<pb::FromAgent>>) -> Result<Response<Self::FollowStream>, Status> {
        let certificates = request.peer_certs();
        let first =
            request.into_inner().message().await?.ok_or_else(|| Status::invalid_argument("nothing was said"))?;
        let hello = match FromAgent::try_from(first) {
            Ok(FromAgent::Hello(hello)) => hello,
            other => return Err(Status::invalid_argument(format!("{other:?}"))),
        };
        if certificates.is_some_and(|certificates| !is_of_host(&certificates, &hello.host)) {
            return Err(Status::permission_denied("the certificate is another host's"));
        }
        let welcome = ToAgent::Welcome(Welcome { version: 1, relay: "test".into(), ..Welcome::default() });
        Ok(Response::new(Box::pin(tokio_stream::once(Ok(welcome.into())))))
    }
}

async fn serve(tls: Option<ServerTlsConfig>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let mut server = Server::builder();
    if let Some(tls) = tls {
        server = server.tls_config(tls).unwrap();
    }
    let service = RelayServer::new(Doorman).max_decoding_message_size(MAX_MESSAGE);
    tokio::spawn(server.add_service(service).serve_with_incoming(TcpListenerStream::new(listener)));
    address
}

/// The first answer to a hello of that host.
async fn greet(endpoint: Endpoint, host: &str, software: String) -> Result<ToAgent, Status> {
    let channel = endpoint.connect().await.map_err(|e| Status::unavailable(format!("{e:?}")))?;
    let hello = Hello { versions: (1, 1), host: host.into(), instance: "1".into(), software, revision: 0 };
    let said = tokio_stream::once(FromAgent::Hello(hello).into());
    let mut answers = RelayClient::new(channel).follow(said).await?.into_inner();
    Ok(answers.next().await.unwrap()?.try_into().unwrap())
}

/// An authority, and the certificates that it makes.
struct Authority {
    directory: tempfile::TempDir,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Authority {
        let directory = tempfile::tempdir().unwrap();
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        std::fs::write(directory.path().join("ca.pem"), params.self_signed(&key).unwrap().pem()).unwrap();
        Authority { directory, issuer: Issuer::new(params, key) }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn issue(&self, names: &[&str], common_name: &str) -> Files {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>()).unwrap();
        params.distinguished_name.push(DnType::CommonName, common_name);
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let at = |what: &str| self.path(&format!("{common_name}.{what}.pem"));
        std::fs::write(at("crt"), certificate.pem()).unwrap();
        std::fs::write(at("key"), key.serialize_pem()).unwrap();
        Files { ca: self.path("ca.pem"), certificate: at("crt"), key: at("key") }
    }
}

async fn greet_with(files: &Files, address: SocketAddr, host: &str) -> Result<ToAgent, Status> {
    let tls = files.read().unwrap().client(Some("relay.test"));
    let endpoint = Endpoint::from_shared(format!("https://{address}")).unwrap().tls_config(tls).unwrap();
    greet(endpoint, host, String::new()).await
}

#[tokio::test]
async fn a_host_is_known_by_its_certificate() {
    let authority = Authority::new();
    let server = authority.issue(&["relay.test"], "relay").read().unwrap().server();
    let address = serve(Some(server)).await;
    let host = authority.issue(&["host-a", "host-b.example.com"], "host-c");
    for name in ["host-a", "host-b.example.com"] {
        assert!(matches!(greet_with(&host, address, name).await, Ok(ToAgent::Welcome(_))), "{name}");
    }
    // Neither the common name nor a wildcard identifies a host.
    let wild = authority.issue(&["*.example.com"], "wild");
    for (files, name) in [(&host, "host-c"), (&host, "host-d"), (&host, "host-b"), (&wild, "host-b.example.com")] {
        assert_eq!(greet_with(files, address, name).await.unwrap_err().code(), Code::PermissionDenied, "{name}");
    }
    // Certificates of others, none at all, and no TLS: no stream.
    let others = Authority::new();
    let forged = Files { ca: authority.path("ca.pem"), ..others.issue(&["host-a"], "forged") };
    let error = greet_with(&forged, address, "host-a").await.unwrap_err();
    assert_ne!(error.code(), Code::PermissionDenied, "{error}");
    let plain = Endpoint::from_shared(format!("http://{address}")).unwrap();
    assert!(greet(plain, "host-a", String::new()).await.is_err());
    // A relay of another authority, or of another name.
    let trusts_others = Files { ca: others.path("ca.pem"), ..host.clone() };
    assert!(greet_with(&trusts_others, address, "host-a").await.is_err());
    let false_relay = serve(Some(authority.issue(&["host-a"], "false").read().unwrap().server())).await;
    assert!(greet_with(&host, false_relay, "host-a").await.is_err());
}

#[tokio::test]
async fn messages_are_bounded() {
    let address = serve(None).await;
    let endpoint = || Endpoint::from_shared(format!("http://{address}")).unwrap();
    assert!(matches!(greet(endpoint(), "host-a", "x".repeat(200)).await, Ok(ToAgent::Welcome(_))));
    let error = greet(endpoint(), "host-a", "x".repeat(201)).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument, "{error}");
    let error = greet(endpoint(), "host-a", "x".repeat(MAX_MESSAGE + 1)).await.unwrap_err();
    assert_eq!(error.code(), Code::OutOfRange, "{error}");
}

#[test]
fn files_that_are_of_no_use_are_told_by_name() {
    let authority = Authority::new();
    let good = authority.issue(&["host-a"], "good");
    let error = |files: &Files| files.read().unwrap_err().to_string();
    let swapped = Files { certificate: good.key.clone(), key: good.certificate.clone(), ..good.clone() };
    assert!(error(&swapped).contains("good.key.pem: has no certificate"), "{}", error(&swapped));
    let no_key = Files { key: good.certificate.clone(), ..good.clone() };
    assert!(error(&no_key).contains("good.crt.pem: has no private key"), "{}", error(&no_key));
    let missing = Files { ca: Path::new("/nonexistent/ca.pem").into(), ..good };
    assert!(error(&missing).starts_with("cannot read /nonexistent/ca.pem"), "{}", error(&missing));
}
