//! A connection to a relay of which only the authority's digest is known.

use std::io;
use std::sync::Arc;

use bifrost_relay_api::enroll::{DIGEST, digest};
use hyper_util::rt::TokioIo;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tonic::codegen::http::Uri;
use tonic::transport::{Channel, Endpoint};

use crate::follow::PATIENCE;

/// What gRPC is called in TLS (RFC 7301).
const H2: &[u8] = b"h2";

/// Connects to `https://NAME:PORT`. The relay has to show a certificate with that name, and the authority's of that digest, which
/// vouches for it.
///
/// # Errors
/// There is no connection, or the relay is another one.
pub(crate) async fn connect(relay: &str, authority: [u8; DIGEST]) -> Result<Channel, tonic::transport::Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = Arc::new(Pinned { authority, provider: Arc::clone(&provider) });
    let connect = move |uri: Uri| {
        let (provider, verifier) = (Arc::clone(&provider), Arc::clone(&verifier));
        async move {
            let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidInput, what);
            let host = uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']').to_owned();
            let port = uri.port_u16().unwrap_or_default();
            let name = ServerName::try_from(host.clone()).map_err(|e| invalid(e.to_string()))?;
            let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
            let config = config.map_err(|e| invalid(e.to_string()))?;
            let mut config = config.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth();
            config.alpn_protocols = vec![H2.to_vec()];
            let stream = TcpStream::connect((host, port)).await?;
            Ok::<_, io::Error>(TokioIo::new(TlsConnector::from(Arc::new(config)).connect(name, stream).await?))
        }
    };
    // The connector makes TLS itself.
    let endpoint = Endpoint::from_shared(relay.replacen("https://", "http://", 1))?;
    endpoint.connect_timeout(PATIENCE).connect_with_connector(tower::service_fn(connect)).await
}

/// Trusts the authority of a digest, and nobody else.
#[derive(Debug)]
struct Pinned {
    authority: [u8; DIGEST],
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let authority = intermediates.iter().find(|certificate| digest(certificate) == self.authority);
        let Some(authority) = authority else {
            return Err(Error::InvalidCertificate(CertificateError::UnknownIssuer));
        };
        let mut roots = RootCertStore::empty();
        roots.add(authority.clone().into_owned())?;
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&self.provider)).build();
        let verifier = verifier.map_err(|e| Error::General(e.to_string()))?;
        verifier.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signature, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

    use super::*;

    #[test]
    fn only_a_relay_of_the_authority_is_believed() {
        let authority = || {
            let mut params = CertificateParams::default();
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
        };
        let [ours, theirs] = [authority(), authority()];
        let key = KeyPair::generate().unwrap();
        let relay = |by| CertificateParams::new(vec!["relay1".to_owned()]).unwrap().signed_by(&key, by).unwrap();
        let [good, forged] = [relay(&ours), relay(&theirs)];
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let pinned = Pinned { authority: digest(ours.der()), provider };
        let verify = |relay: &rcgen::Certificate, shown: &[&CertificateDer<'static>], name: &str| {
            let shown: Vec<_> = shown.iter().map(|shown| (*shown).clone()).collect();
            let name = ServerName::try_from(name.to_owned()).unwrap();
            pinned.verify_server_cert(relay.der(), &shown, &name, &[], UnixTime::now()).is_ok()
        };
        assert!(verify(&good, &[ours.der()], "relay1"));
        assert!(verify(&good, &[theirs.der(), ours.der()], "relay1"));
        assert!(!verify(&good, &[ours.der()], "relay2"), "another name");
        assert!(!verify(&good, &[], "relay1"), "nobody is known to vouch for it");
        assert!(!verify(&forged, &[theirs.der()], "relay1"), "another authority");
        assert!(
            !verify(&forged, &[theirs.der(), ours.der()], "relay1"),
            "showing a certificate is not being vouched for"
        );
    }
}
