//! The host's certificate, if relays are to give it: the first one for a token, and a further one long before it expires
//! (docs/FLEET.md 5).

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bifrost_relay_api::enroll::{Facts, Signed, Token, Validity, facts};
use bifrost_relay_api::pb;
use bifrost_relay_api::pb::certificates_client::CertificatesClient;
use bifrost_relay_api::pb::enrollment_client::EnrollmentClient;
use bifrost_relay_api::tls::{Files, is_of_host_pem};
use rcgen::{CertificateParams, DnType, KeyPair};
use tokio::time::timeout;
use tonic::Code;

use crate::follow::{self, PATIENCE, chain};
use crate::metrics::Metrics;
use crate::pinned;

/// A further certificate is fetched when this part of its time is over, or up to [`JITTER`] later: hosts do not come all at once.
const RENEW_AFTER: f64 = 0.6;
const JITTER: f64 = 0.1;
/// No further one is fetched in this part of its time.
const LEAST_PART: f64 = 0.05;
/// Between attempts to get one, first and longest.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(600));
/// How long it is slept at a time: the clock may be set.
const NAP: Duration = Duration::from_secs(60);
/// The largest file that is read, bytes.
const MAX_FILE: u64 = 1 << 20;

/// The directory of a host's certificate: `identity.pem` has it with its key, so that both change at once, and `ca.pem` the
/// authorities that vouch for relays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    directory: PathBuf,
}

/// What a host needs to get its first certificate.
#[derive(Clone, Debug)]
pub struct Enrolling {
    /// Where: `https://NAME:PORT`.
    pub relay: String,
    /// What for.
    pub token: Token,
}

/// Why there is no certificate.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The relay refuses, and would again.
    #[error("{0}")]
    Refused(String),
    /// It may work later.
    #[error("{0}")]
    Later(String),
}

impl Identity {
    /// That of a directory. It is created with the first certificate.
    pub fn new(directory: PathBuf) -> Identity {
        Identity { directory }
    }

    /// Where certificates are.
    pub fn files(&self) -> Files {
        Files { ca: self.directory.join("ca.pem"), certificate: self.path(), key: self.path() }
    }

    /// When the certificate is valid; none: there is none.
    ///
    /// # Errors
    /// The file cannot be read, or is damaged.
    pub fn validity(&self) -> Result<Option<Validity>, IdentityError> {
        let path = self.path();
        let length = match fs::metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(IdentityError::Io { path, source }),
            Ok(metadata) => metadata.len(),
        };
        let damaged = |what: &str| {
            let source = io::Error::new(io::ErrorKind::InvalidData, what);
            IdentityError::Io { path: path.clone(), source }
        };
        if length > MAX_FILE {
            return Err(damaged("is too large for a certificate"));
        }
        let pem = fs::read(&path).map_err(|source| IdentityError::Io { path: path.clone(), source })?;
        let Facts { validity, .. } = facts(&pem).ok_or_else(|| damaged("has no certificate; remove it, and enroll"))?;
        Ok(Some(validity))
    }

    /// Gets the host's first certificate, and goes on trying until a relay gives it or refuses.
    ///
    /// # Errors
    /// It is refused, or cannot be kept.
    pub async fn enroll(&self, host: &str, with: &Enrolling) -> Result<(), IdentityError> {
        let key = new_key()?;
        let request = request(host, &key)?;
        let mut pause = PAUSES.0;
        loop {
            match ask_first(host, with, &request).await {
                Ok(signed) => return self.keep(host, &key, &signed, true),
                Err(IdentityError::Later(why)) => tracing::warn!("{}: {why}; tried again soon", with.relay),
                Err(refused) => return Err(refused),
            }
            tokio::time::sleep(pause.mul_f64(0.5 + 0.5 * fastrand::f64())).await;
            pause = (pause * 2).min(PAUSES.1);
        }
    }

    /// Gets further certificates for as long as it runs.
    pub async fn renew_forever(self, settings: follow::Settings, counted: Arc<Metrics>) {
        let mut pause = PAUSES.0;
        loop {
            let due = RENEW_AFTER + JITTER * fastrand::f64();
            let until = match self.validity() {
                Ok(Some(validity)) => {
                    counted.certificate(validity.until);
                    wait_until(validity.after(due)).await;
                    validity.until
                }
                // Whatever has happened to it: the relay may be asked as long as the connection's files are there.
                Ok(None) | Err(_) => SystemTime::now(),
            };
            match self.renew(&settings).await {
                Ok(()) => {
                    counted.renewal(true);
                    tracing::info!("the host has a new certificate");
                    pause = PAUSES.0;
                    // By a clock that is ahead the new one is due again, too.
                    let lasts = self.validity().ok().flatten().map_or(Duration::ZERO, |validity| validity.lasts());
                    tokio::time::sleep(lasts.mul_f64(LEAST_PART).max(pause)).await;
                }
                Err(error) => {
                    counted.renewal(false);
                    let left = until.duration_since(SystemTime::now()).unwrap_or_default().as_secs();
                    tracing::warn!("no new certificate: {error}; the one in use expires in {left} s");
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(PAUSES.1);
                }
            }
        }
    }

    /// Asks one relay after the other for a further certificate.
    async fn renew(&self, settings: &follow::Settings) -> Result<(), IdentityError> {
        let key = new_key()?;
        let request = request(&settings.host, &key)?;
        let mut last = IdentityError::Later("there is no relay".to_owned());
        for relay in &settings.relays {
            match timeout(PATIENCE, ask_next(settings, relay, &request)).await {
                Ok(Ok(signed)) => return self.keep(&settings.host, &key, &signed, false),
                Ok(Err(why)) => last = IdentityError::Later(format!("{relay}: {why}")),
                Err(_) => last = IdentityError::Later(format!("{relay}: no answer within {} s", PATIENCE.as_secs())),
            }
        }
        Err(last)
    }

    /// Writes a certificate with its key. What is there stays until all is on the disk.
    fn keep(&self, host: &str, key: &KeyPair, signed: &Signed, is_first: bool) -> Result<(), IdentityError> {
        check(host, key, signed).map_err(|what| IdentityError::Refused(format!("what the relay sent {what}")))?;
        let io = |source| IdentityError::Io { path: self.directory.clone(), source };
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.directory).map_err(io)?;
        if is_first {
            self.replace("ca.pem", &signed.authorities)?;
        }
        let mut both = signed.certificates.to_vec();
        both.push(b'\n');
        both.extend(key.serialize_pem().into_bytes());
        self.replace("identity.pem", &both)
    }

    fn replace(&self, name: &str, contents: &[u8]) -> Result<(), IdentityError> {
        let (path, new) = (self.directory.join(name), self.directory.join(format!("{name}.new")));
        let write = || {
            // One of an earlier attempt may have other rights.
            match fs::remove_file(&new) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            let mut file = fs::OpenOptions::new().create_new(true).write(true).mode(0o600).open(&new)?;
            file.write_all(contents)?;
            file.sync_all()?;
            fs::rename(&new, &path)?;
            fs::File::open(&self.directory)?.sync_all()
        };
        write().map_err(|source| IdentityError::Io { path: path.clone(), source })
    }

    fn path(&self) -> PathBuf {
        self.directory.join("identity.pem")
    }
}

fn new_key() -> Result<KeyPair, IdentityError> {
    KeyPair::generate().map_err(|e| IdentityError::Later(format!("no key can be made: {e}")))
}

/// PKCS #10. Relays take from it only the key.
fn request(host: &str, key: &KeyPair) -> Result<Vec<u8>, IdentityError> {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, host);
    let request = params.serialize_request(key);
    Ok(request.map_err(|e| IdentityError::Refused(format!("{host:?}: no request: {e}")))?.der().to_vec())
}

async fn ask_first(host: &str, with: &Enrolling, request: &[u8]) -> Result<Signed, IdentityError> {
    let answer = async {
        let channel = pinned::connect(&with.relay, with.token.authority).await;
        let channel = channel.map_err(|e| IdentityError::Later(format!("no connection: {}", chain(&e))))?;
        let secret = with.token.secret.to_vec().into();
        let message = pb::Enrolling { host: host.to_owned(), secret, request: request.to_vec().into() };
        let answer = EnrollmentClient::new(channel).enroll(message).await;
        let answer = answer.map_err(|status| match status.code() {
            Code::PermissionDenied | Code::InvalidArgument | Code::FailedPrecondition | Code::Unimplemented => {
                IdentityError::Refused(status.message().to_owned())
            }
            _ => IdentityError::Later(status.message().to_owned()),
        })?;
        Signed::try_from(answer.into_inner()).map_err(|e| IdentityError::Refused(e.to_string()))
    };
    timeout(PATIENCE, answer)
        .await
        .unwrap_or_else(|_| Err(IdentityError::Later(format!("no answer within {} s", PATIENCE.as_secs()))))
}

async fn ask_next(settings: &follow::Settings, relay: &str, request: &[u8]) -> Result<Signed, String> {
    let channel = follow::connect(settings, relay).await.map_err(|e| e.to_string())?;
    let message = pb::Renewal { host: settings.host.clone(), request: request.to_vec().into() };
    let answer = CertificatesClient::new(channel).renew(message).await.map_err(|e| e.message().to_owned())?;
    Signed::try_from(answer.into_inner()).map_err(|e| e.to_string())
}

/// Checks that a certificate is of this key and host, so that a good one is not replaced by one that is of no use.
fn check(host: &str, key: &KeyPair, signed: &Signed) -> Result<(), &'static str> {
    let facts = facts(&signed.certificates).ok_or("has no certificate")?;
    if facts.key != key.public_key_raw() {
        return Err("is a certificate of another key");
    }
    if !is_of_host_pem(&signed.certificates, host) {
        return Err("is a certificate of another host");
    }
    if facts.validity.until <= SystemTime::now() {
        return Err("is a certificate that has expired; compare the clocks of both");
    }
    Ok(())
}

async fn wait_until(at: SystemTime) {
    while let Ok(left) = at.duration_since(SystemTime::now()) {
        tokio::time::sleep(left.min(NAP)).await;
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use rcgen::{BasicConstraints, CertifiedIssuer, IsCa};

    use super::*;

    fn signed(authority: &CertifiedIssuer<'_, KeyPair>, host: &str, key: &KeyPair, until: i32) -> Signed {
        let mut params = CertificateParams::new(vec![host.to_owned()]).unwrap();
        params.not_after = rcgen::date_time_ymd(until, 1, 1);
        let certificate = params.signed_by(key, authority).unwrap();
        Signed { certificates: certificate.pem().into(), authorities: authority.pem().into() }
    }

    #[test]
    fn a_good_certificate_is_kept_until_there_is_another_good_one() {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, new_key().unwrap()).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let identity = Identity::new(directory.path().join("agent"));
        assert_eq!(identity.validity().unwrap(), None);
        let (key, other) = (new_key().unwrap(), new_key().unwrap());
        identity.keep("h1", &key, &signed(&authority, "h1", &key, 2100), true).unwrap();
        identity.files().read().unwrap();
        let until = identity.validity().unwrap().unwrap().until;
        for (bad, why) in [
            (signed(&authority, "h1", &other, 2100), "of another key"),
            (signed(&authority, "h2", &key, 2100), "of another host"),
            (signed(&authority, "h1", &key, 2020), "has expired"),
            (Signed { certificates: "x".into(), authorities: "x".into() }, "no certificate"),
        ] {
            let error = identity.keep("h1", &key, &bad, false).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
            assert_eq!(identity.validity().unwrap().unwrap().until, until);
        }
        let left = identity.directory.join("identity.pem.new");
        fs::write(&left, "of an earlier attempt").unwrap();
        fs::set_permissions(&left, fs::Permissions::from_mode(0o666)).unwrap();
        identity.keep("h1", &other, &signed(&authority, "h1", &other, 2101), false).unwrap();
        assert!(identity.validity().unwrap().unwrap().until > until);
        let mode = |path: &std::path::Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&identity.directory), mode(&identity.path())), (0o700, 0o600), "it has a key");
        fs::write(identity.path(), "damaged").unwrap();
        assert!(identity.validity().unwrap_err().to_string().contains("has no certificate"));
    }
}
