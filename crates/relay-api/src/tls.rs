//! TLS between agents and relays: both ends show a certificate of one authority (docs/FLEET.md 2).

use std::io;
use std::path::{Path, PathBuf};

use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject as _;
use tonic::transport::{Certificate, ClientTlsConfig, Identity, ServerTlsConfig};

/// The largest file that is read, bytes.
const MAX_FILE: u64 = 1 << 20;

/// The files of one end, all PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    /// Certificates of those who may vouch for the other end.
    pub ca: PathBuf,
    /// This end's certificate, and those between it and the authority.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// What the files had, read once.
#[derive(Clone)]
pub struct Material {
    ca: Vec<u8>,
    certificate: Vec<u8>,
    key: Vec<u8>,
}

/// Why files are of no use.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// A file is not what it has to be.
    #[error("{}: {what}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        what: String,
    },
}

impl Files {
    /// Reads them, and checks that each has what it is to have. To be called before each connection, so that new certificates are used
    /// without a restart.
    ///
    /// # Errors
    /// One cannot be read, or is no PEM of its kind. Whether they fit together is found out by the first connection.
    pub fn read(&self) -> Result<Material, TlsError> {
        let (ca, certificate) = (read(&self.ca)?, read(&self.certificate)?);
        // One file has both at any time, though it may be replaced between two reads.
        let key = if self.key == self.certificate { certificate.clone() } else { read(&self.key)? };
        let material = Material { ca, certificate, key };
        for (path, pem) in [(&self.ca, &material.ca), (&self.certificate, &material.certificate)] {
            let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
            if all.is_ok_and(|all| !all.is_empty()) {
                continue;
            }
            return Err(content(path, "has no certificate; it is to be PEM (-----BEGIN CERTIFICATE-----)"));
        }
        rustls_pki_types::PrivateKeyDer::from_pem_slice(&material.key)
            .map_err(|_| content(&self.key, "has no private key; it is to be PEM (-----BEGIN PRIVATE KEY-----)"))?;
        Ok(material)
    }
}

impl Material {
    /// Settings of an agent. `relay` is the name that the relay's certificate has to have; none: that of the address.
    pub fn client(&self, relay: Option<&str>) -> ClientTlsConfig {
        let config = ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(&self.ca))
            .identity(Identity::from_pem(&self.certificate, &self.key));
        match relay {
            Some(name) => config.domain_name(name),
            None => config,
        }
    }

    /// The certificates of those who may vouch for the other end, PEM.
    pub fn authorities(&self) -> &[u8] {
        &self.ca
    }

    /// This end's certificate, with those between it and the authority, and its private key; both PEM.
    pub fn identity(&self) -> (&[u8], &[u8]) {
        (&self.certificate, &self.key)
    }

    /// Settings of a relay that gives first certificates: it shows its authority, which hosts know by a digest, and asks for nothing.
    pub fn enrollment(&self) -> ServerTlsConfig {
        let shown = [&*self.certificate, b"\n", &*self.ca].concat();
        ServerTlsConfig::new().identity(Identity::from_pem(shown, &self.key))
    }

    /// Settings of a relay. Who shows no certificate of the authority is refused.
    pub fn server(&self) -> ServerTlsConfig {
        ServerTlsConfig::new()
            .identity(Identity::from_pem(&self.certificate, &self.key))
            .client_ca_root(Certificate::from_pem(&self.ca))
    }
}

impl std::fmt::Debug for Material {
    /// Without the key.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Material").finish_non_exhaustive()
    }
}

/// Whether a certificate is that of a host: one of its DNS names (subjectAltName, RFC 5280, 4.2.1.6) is the host's, letter by letter.
/// Neither wildcards nor the subject's common name count (RFC 9525, 2 and 6.3). The certificate was verified before: `certificates` is what
/// [`tonic::Request::peer_certs`] gives, the host's own one first.
pub fn is_of_host(certificates: &[CertificateDer<'_>], host: &str) -> bool {
    let Some(certificate) = certificates.first() else { return false };
    let Ok(certificate) = webpki::EndEntityCert::try_from(certificate) else { return false };
    certificate.valid_dns_names().any(|name| name.eq_ignore_ascii_case(host))
}

/// The same of the first certificate of a PEM file, which nobody has verified.
pub fn is_of_host_pem(certificates: &[u8], host: &str) -> bool {
    let first = CertificateDer::pem_slice_iter(certificates).next();
    first.is_some_and(|first| first.is_ok_and(|first| is_of_host(&[first], host)))
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    let io = |source| TlsError::Io { path: path.to_owned(), source };
    let length = std::fs::metadata(path).map_err(io)?.len();
    if length > MAX_FILE {
        return Err(content(path, &format!("{length} bytes are too many for a certificate or key")));
    }
    std::fs::read(path).map_err(io)
}

fn content(path: &Path, what: &str) -> TlsError {
    TlsError::Content { path: path.to_owned(), what: what.to_owned() }
}
