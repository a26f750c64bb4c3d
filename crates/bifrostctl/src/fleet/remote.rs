//! A relay on another machine: its API over TLS, with an operator's certificate.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bifrost_control::Client;
use bifrost_control::client::{Connect, Connecting, Stream};
use clap::Args;
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::failure::Failure;

/// The port if the URL has none.
const PORT: u16 = 4793;

/// Where a relay is, and who asks.
#[derive(Debug, Args)]
pub(crate) struct RelayArgs {
    /// The relay's control socket; or, from another machine, https://NAME:4793 with --ca and --certificate
    #[arg(
        long,
        value_name = "PATH|URL",
        global = true,
        env = "BIFROST_RELAY_SOCKET",
        default_value = "/run/bifrost/relay.sock"
    )]
    relay: PathBuf,
    /// With https: the authority of relays, PEM
    #[arg(long = "ca", value_name = "FILE", global = true, env = "BIFROST_FLEET_CA")]
    relay_ca: Option<PathBuf>,
    /// With https: the certificate to show, PEM; see `bifrostctl fleet certificate`
    #[arg(long = "certificate", value_name = "FILE", global = true, env = "BIFROST_FLEET_CERTIFICATE")]
    relay_certificate: Option<PathBuf>,
    /// With https: its private key, PEM, if it is not in the same file
    #[arg(long = "key", value_name = "FILE", global = true, env = "BIFROST_FLEET_KEY")]
    relay_key: Option<PathBuf>,
}

impl RelayArgs {
    /// A client of the relay.
    pub(crate) fn client(&self) -> Result<Client, Failure> {
        let text = self.relay.to_string_lossy();
        let Some(address) = text.strip_prefix("https://") else { return Ok(Client::new(&self.relay)?) };
        let wrong = |what: String| Failure::Usage {
            what,
            location: text.to_string(),
            hint: "write https://NAME or https://NAME:4793, with --ca and --certificate",
        };
        let (host, port) = parts(address).ok_or_else(|| wrong("is not a relay's URL".to_owned()))?;
        let (Some(ca), Some(certificate)) = (&self.relay_ca, &self.relay_certificate) else {
            return Err(wrong("it takes --ca and --certificate".to_owned()));
        };
        let key = self.relay_key.as_ref().unwrap_or(certificate);
        let name = ServerName::try_from(host.clone()).map_err(|e| wrong(e.to_string()))?;
        let tls = config(ca, certificate, key)?;
        Ok(Client::over(&self.relay, Box::new(Remote { host, port, name, tls: TlsConnector::from(Arc::new(tls)) }))?)
    }
}

/// Host and port of `NAME`, `NAME:PORT` or `[ADDRESS]:PORT`.
fn parts(address: &str) -> Option<(String, u16)> {
    let address = address.strip_suffix('/').unwrap_or(address);
    let (host, port) = match address.strip_prefix('[') {
        Some(rest) => rest.split_once(']')?,
        None => address.split_at(address.find(':').unwrap_or(address.len())),
    };
    let port = if port.is_empty() { PORT } else { port.strip_prefix(':')?.parse().ok()? };
    (!host.is_empty() && !host.contains('/')).then(|| (host.to_owned(), port))
}

fn config(ca: &Path, certificate: &Path, key: &Path) -> Result<ClientConfig, Failure> {
    let read = |path: &Path| std::fs::read(path).map_err(|source| Failure::ReadFile { path: path.to_owned(), source });
    let wrong = |path: &Path, what: String| {
        let hint = "files are PEM; `bifrostctl fleet certificate` makes them";
        Failure::Usage { what, location: path.display().to_string(), hint }
    };
    let certificates = |path: &Path| {
        let pem = read(path)?;
        let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
        let all = all.ok().filter(|all| !all.is_empty());
        all.ok_or_else(|| wrong(path, "has no certificate".to_owned()))
    };
    let mut roots = RootCertStore::empty();
    for authority in certificates(ca)? {
        roots.add(authority).map_err(|e| wrong(ca, e.to_string()))?;
    }
    let private = PrivateKeyDer::from_pem_slice(&read(key)?);
    let private = private.map_err(|_| wrong(key, "has no private key".to_owned()))?;
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let config = config.with_safe_default_protocol_versions().map_err(|e| wrong(ca, e.to_string()))?;
    let config = config.with_root_certificates(roots).with_client_auth_cert(certificates(certificate)?, private);
    config.map_err(|e| wrong(certificate, e.to_string()))
}

struct Remote {
    host: String,
    port: u16,
    name: ServerName<'static>,
    tls: TlsConnector,
}

impl std::fmt::Debug for Remote {
    /// Without the key.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Remote({}:{})", self.host, self.port)
    }
}

impl Connect for Remote {
    fn connect(&self) -> Connecting<'_> {
        Box::pin(async {
            let stream = TcpStream::connect((&*self.host, self.port)).await?;
            let stream = self.tls.connect(self.name.clone(), stream).await?;
            Ok(Box::new(stream) as Box<dyn Stream>)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relays_have_urls() {
        for (address, expected) in [
            ("relay1", Some(("relay1", PORT))),
            ("relay1:99", Some(("relay1", 99))),
            ("192.0.2.1:4793/", Some(("192.0.2.1", 4793))),
            ("[2001:db8::1]", Some(("2001:db8::1", PORT))),
            ("[2001:db8::1]:5", Some(("2001:db8::1", 5))),
            ("", None),
            (":5", None),
            ("relay1:", None),
            ("relay1:70000", None),
            ("relay1/v1", None),
            ("[::1", None),
            ("[::1]5", None),
        ] {
            let expected = expected.map(|(host, port)| (host.to_owned(), port));
            assert_eq!(parts(address), expected, "{address}");
        }
    }
}
