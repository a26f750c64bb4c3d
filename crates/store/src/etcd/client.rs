//! Connections to etcd's members, and requests that may be retried.

use std::error::Error as _;
use std::path::Path;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::time::Instant;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Request, Status};

use super::pb::auth_client::AuthClient;
use super::{EtcdOptions, EtcdTls, EtcdUser, pb};
use crate::StoreError;

/// Maximum length of a message, bytes. Pages of a list are made smaller until they fit.
pub(super) const MAX_MESSAGE: usize = 32 << 20;
/// Timeout of one attempt. A cluster that elects a leader takes about as long, with its default timeouts.
const ATTEMPT: Duration = Duration::from_secs(3);
const CONNECT: Duration = Duration::from_secs(2);
/// Interval of keepalive pings while requests wait. etcd closes connections with pings more often than every 5 s.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// First delay between two attempts; it doubles each time.
const FIRST_PAUSE: Duration = Duration::from_millis(30);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Maximum size of a file that is read, bytes.
const MAX_FILE: u64 = 1 << 20;

/// The client for etcd's members.
#[derive(Debug)]
pub(super) struct Client {
    pub(super) root: String,
    pub(super) markers: String,
    pub(super) timeout: Duration,
    members: Vec<Channel>,
    /// The current member.
    current: AtomicUsize,
    user: Option<EtcdUser>,
    /// The token from the last authentication.
    token: Mutex<Option<MetadataValue<Ascii>>>,
}

/// Meaning of a response for the caller.
pub(super) enum Verdict {
    /// Retry. `is_sent`: the request may have been executed.
    Again { is_sent: bool },
    /// The token is no longer valid: retry with a new one. The request was not executed.
    Token,
    /// The request was not executed, and will not be.
    Final(StoreError),
    /// The revision has been compacted.
    Compacted,
    /// The response is larger than [`MAX_MESSAGE`].
    TooLarge,
}

/// Why a request that may be retried failed.
pub(super) enum Failure {
    Store(StoreError),
    Compacted,
    TooLarge,
}

/// Attempts, and delays between them, until the timeout.
pub(super) struct Attempts {
    end: Instant,
    pause: Duration,
}

impl Client {
    pub(super) fn new(options: EtcdOptions) -> Result<Client, StoreError> {
        let EtcdOptions { endpoints, root, markers, tls, user, timeout } = options;
        if markers.is_empty() {
            return invalid("the prefix of etcd's markers is empty: give one, such as /bifrost/commits/".to_owned());
        }
        if endpoints.is_empty() {
            return invalid("no member of etcd is named: give one, such as http://127.0.0.1:2379".to_owned());
        }
        let tls = tls.map(|tls| settings(&tls)).transpose()?;
        let members = endpoints.iter().map(|endpoint| member(endpoint, tls.as_ref())).collect::<Result<_, _>>()?;
        Ok(Client { root, markers, timeout, members, current: AtomicUsize::new(0), user, token: Mutex::new(None) })
    }

    /// The current member.
    pub(super) fn member(&self) -> (usize, Channel) {
        let index = self.current.load(Ordering::Relaxed);
        (index, self.members[index].clone())
    }

    /// The member has not answered: switches to the next one, if no other request has switched already.
    pub(super) fn pass_over(&self, index: usize) {
        let next = (index + 1) % self.members.len();
        let _ = self.current.compare_exchange(index, next, Ordering::Relaxed, Ordering::Relaxed);
    }

    pub(super) fn attempts(&self) -> Attempts {
        Attempts { end: Instant::now() + self.timeout, pause: FIRST_PAUSE }
    }

    /// A request with the token; authenticates first, if there is none.
    pub(super) async fn request<T>(&self, channel: &Channel, message: T) -> Result<Request<T>, Status> {
        let mut request = Request::new(message);
        if let Some(user) = &self.user {
            let known = self.token().clone();
            let token = match known {
                Some(token) => token,
                None => {
                    let message = pb::AuthenticateRequest { name: user.name.clone(), password: user.password.clone() };
                    let answer = AuthClient::new(channel.clone()).authenticate(message).await?.into_inner();
                    let token = answer.token.parse().map_err(|_| Status::internal("a token that is not text"))?;
                    self.token().insert(token).clone()
                }
            };
            request.metadata_mut().insert("token", token);
        }
        Ok(request)
    }

    /// Sends a request to one member, once. A timeout counts as no response.
    pub(super) async fn attempt<T, R>(
        &self,
        message: T,
        ask: impl AsyncFnOnce(Channel, Request<T>) -> Result<R, Status>,
    ) -> Result<R, (Verdict, Status)> {
        let (index, channel) = self.member();
        let asked = async {
            // Authenticating changes nothing.
            let request = self.request(&channel, message).await.map_err(|status| (false, status))?;
            ask(channel, request).await.map_err(|status| (true, status))
        };
        let result = tokio::time::timeout(ATTEMPT.min(self.timeout), asked).await;
        let (may_be_sent, status) = match result {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(failure)) => failure,
            Err(_) => (true, Status::deadline_exceeded("no answer in time")),
        };
        let verdict = match judge(&status) {
            Verdict::Again { is_sent } => {
                self.pass_over(index);
                Verdict::Again { is_sent: is_sent && may_be_sent }
            }
            Verdict::Token => {
                self.forget_token();
                Verdict::Token
            }
            other => other,
        };
        Err((verdict, status))
    }

    /// Retries until there is a response: for requests that change nothing.
    pub(super) async fn ask<T: Clone, R>(
        &self,
        message: T,
        ask: impl AsyncFn(Channel, Request<T>) -> Result<R, Status>,
    ) -> Result<R, Failure> {
        let mut attempts = self.attempts();
        loop {
            let (verdict, status) = match self.attempt(message.clone(), &ask).await {
                Ok(answer) => return Ok(answer),
                Err(failure) => failure,
            };
            match verdict {
                Verdict::Again { .. } | Verdict::Token if attempts.pause().await => {}
                Verdict::Again { .. } | Verdict::Token => {
                    return Err(Failure::Store(StoreError::Unavailable(told(&status))));
                }
                Verdict::Final(error) => return Err(Failure::Store(error)),
                Verdict::Compacted => return Err(Failure::Compacted),
                Verdict::TooLarge => return Err(Failure::TooLarge),
            }
        }
    }

    pub(super) fn forget_token(&self) {
        *self.token() = None;
    }

    fn token(&self) -> std::sync::MutexGuard<'_, Option<MetadataValue<Ascii>>> {
        self.token.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Attempts {
    /// Waits before the next attempt. False: the timeout has expired.
    pub(super) async fn pause(&mut self) -> bool {
        // Random, so that requests that failed at the same time are not retried at the same time.
        let pause = self.pause.mul_f64(0.5 + fastrand::f64());
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        if Instant::now() + pause >= self.end {
            return false;
        }
        tokio::time::sleep(pause).await;
        true
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Failure {
        Failure::Store(error)
    }
}

/// Meaning of a failure. etcd distinguishes some only by their text (api/v3rpc/rpctypes/error.go).
pub(super) fn judge(status: &Status) -> Verdict {
    let text = status.message();
    let has = |part: &str| text.contains(part);
    match status.code() {
        Code::OutOfRange if has("compacted") => Verdict::Compacted,
        Code::OutOfRange if has("message length too large") => Verdict::TooLarge,
        Code::Unauthenticated => Verdict::Token,
        Code::InvalidArgument if has("revision of auth store is old") || has("revision in header is old") => {
            Verdict::Token
        }
        Code::ResourceExhausted if has("too many requests") => Verdict::Again { is_sent: false },
        Code::InvalidArgument if has("too many operations") => Verdict::Final(StoreError::Refused(format!(
            "{text}: start etcd with --max-txn-ops={}",
            crate::limits::TXN_WRITES + 1
        ))),
        // The second text is gRPC's.
        Code::InvalidArgument | Code::ResourceExhausted if has("request is too large") || has("larger than max") => {
            Verdict::Final(StoreError::Refused(format!(
                "{text}: start etcd with --max-request-bytes={}",
                crate::limits::TXN_BYTES * 3 / 2
            )))
        }
        Code::InvalidArgument if has("user name is empty") => {
            Verdict::Final(StoreError::Refused(format!("{text}: etcd has authentication enabled, so give a user")))
        }
        Code::ResourceExhausted if has("space exceeded") => Verdict::Final(StoreError::Refused(format!(
            "{text}: compact and defragment etcd, then `etcdctl alarm disarm`"
        ))),
        Code::InvalidArgument | Code::PermissionDenied | Code::ResourceExhausted | Code::FailedPrecondition => {
            Verdict::Final(StoreError::Refused(text.to_owned()))
        }
        Code::NotFound | Code::Unimplemented | Code::DataLoss | Code::OutOfRange | Code::AlreadyExists => {
            Verdict::Final(StoreError::Refused(text.to_owned()))
        }
        _ => Verdict::Again { is_sent: !is_connecting(status) },
    }
}

/// A failure as text, with its causes.
pub(super) fn told(status: &Status) -> String {
    let mut text = status.message().to_owned();
    let mut source = status.source();
    while let Some(error) = source {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        source = error.source();
    }
    text
}

/// Whether it failed before anything was sent.
fn is_connecting(status: &Status) -> bool {
    let mut source = status.source();
    while let Some(error) = source {
        if error.is::<tonic::ConnectError>() {
            return true;
        }
        source = error.source();
    }
    false
}

fn member(endpoint: &str, tls: Option<&ClientTlsConfig>) -> Result<Channel, StoreError> {
    let is_https = endpoint.starts_with("https://");
    if !is_https && !endpoint.starts_with("http://") {
        return invalid(format!("etcd's member {endpoint:?}: it must begin with http:// or https://"));
    }
    if is_https != tls.is_some() {
        let what = if is_https { "https needs files for TLS" } else { "with files for TLS it must be https" };
        return invalid(format!("etcd's member {endpoint:?}: {what}"));
    }
    let bad = |error: tonic::transport::Error| {
        let why = error.source().map_or_else(|| error.to_string(), ToString::to_string);
        StoreError::Invalid(format!("etcd's member {endpoint:?}: {why}"))
    };
    let mut settings = Endpoint::from_shared(endpoint.to_owned())
        .map_err(bad)?
        .connect_timeout(CONNECT)
        .tcp_keepalive(Some(KEEP_ALIVE))
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(ATTEMPT);
    if let Some(tls) = tls {
        settings = settings.tls_config(tls.clone()).map_err(bad)?;
    }
    Ok(settings.connect_lazy())
}

fn settings(tls: &EtcdTls) -> Result<ClientTlsConfig, StoreError> {
    let mut settings = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(read(&tls.ca)?));
    if let Some((certificate, key)) = &tls.identity {
        settings = settings.identity(Identity::from_pem(read(certificate)?, read(key)?));
    }
    Ok(match &tls.name {
        Some(name) => settings.domain_name(name),
        None => settings,
    })
}

fn read(path: &Path) -> Result<Vec<u8>, StoreError> {
    let failed =
        |source: std::io::Error| StoreError::Io { doing: "reading", path: path.to_owned(), why: source.to_string() };
    let len = std::fs::metadata(path).map_err(failed)?.len();
    if len > MAX_FILE {
        let path = path.display();
        return Err(StoreError::Invalid(format!("{path}: {len} bytes is too large for a certificate or key")));
    }
    std::fs::read(path).map_err(failed)
}

fn invalid<T>(what: String) -> Result<T, StoreError> {
    Err(StoreError::Invalid(what))
}
