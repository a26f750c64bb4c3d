//! How hosts get certificates (docs/FLEET.md 5): the first one for a token, further ones for the one before.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use bifrost_control::api::ApiError;
use bifrost_intent::api::{Enroll, Enrolled, MAX_TOKEN_S, TOKEN_S};
use bifrost_intent::{Key, Kind};
use bifrost_relay_api::enroll::{Asked, Signed, Token, enrolling};
use bifrost_relay_api::{pb, tls};
use tokio::sync::Semaphore;
use tonic::transport::CertificateDer;
use tonic::transport::server::TlsConnectInfo;
use tonic::{Request, Response, Status};

use crate::audit::{About, Event};
use crate::authority::{Authority, Verified};
use crate::caller::Caller;
use crate::quiet::Link;
use crate::relay::{Relay, now_ms};
use crate::tokens::{self, NotTaken};

/// The most first certificates that are asked for at a time: each costs a look into the store, and anyone may ask.
const MAX_AT_ONCE: usize = 16;
/// A host gets one certificate in this time: each is a line in the audit log.
const LEAST_TIME: Duration = Duration::from_secs(1);
/// When more hosts than this have got one lately, those that may have another are forgotten.
const MANY: usize = 1024;
/// The log tells of refused requests once in this time: anyone who reaches the relay may make them.
const TELL_AGAIN_MS: u64 = 1000;

/// Who gives hosts certificates.
#[derive(Clone, Debug)]
pub(crate) struct Enrollment {
    pub(crate) relay: Arc<Relay>,
    pub(crate) authority: Arc<Authority>,
    turns: Arc<Semaphore>,
    recent: Arc<Mutex<Recent>>,
    told_ms: Arc<AtomicU64>,
}

impl Enrollment {
    pub(crate) fn new(relay: Arc<Relay>, authority: Authority) -> Enrollment {
        let turns = Arc::new(Semaphore::new(MAX_AT_ONCE));
        let authority = Arc::new(authority);
        Enrollment { relay, authority, turns, recent: Arc::default(), told_ms: Arc::default() }
    }

    /// Refuses a token to somebody who may not have one.
    pub(crate) fn forbid(&self, enroll: &Enroll, caller: &Caller, why: &str) {
        self.relay.counts.forbidden.fetch_add(1, Ordering::Relaxed);
        if let Ok(key) = Key::new(Kind::Host, "", &enroll.host) {
            // Nothing is done in any case.
            let _ = self.log(Event::Token, Some(caller), About::Host(&key), Some(why.to_owned()));
        }
    }

    /// Makes a token for a host, in place of an earlier one.
    ///
    /// # Errors
    /// There is no such host, the time is out of range, or the store does not answer.
    pub(crate) async fn invite(&self, enroll: &Enroll, caller: &Caller) -> Result<Enrolled, ApiError> {
        let host = &enroll.host;
        let key = Key::new(Kind::Host, "", host).map_err(|e| ApiError::bad_request(e.to_string()).at("host"))?;
        if !self.knows(host) {
            let hint = format!("bifrostctl fleet add host/{host} addresses=...");
            return Err(ApiError::not_found(format!("there is no host/{host}")).hint(hint));
        }
        let ttl_s = enroll.ttl_s.unwrap_or(TOKEN_S);
        if !(1..=MAX_TOKEN_S).contains(&ttl_s) {
            return Err(ApiError::bad_request(format!("{ttl_s} s: 1 to {MAX_TOKEN_S} are allowed")).at("ttl_s"));
        }
        let token = Token::new(self.authority.fingerprint()).map_err(|e| ApiError::internal(e.to_string()))?;
        let until_ms = now_ms() + ttl_s * 1000;
        let made = tokens::put(self.relay.store(), host, &token.secret, until_ms, now_ms()).await;
        let logged =
            self.log(Event::Token, Some(caller), About::Host(&key), made.as_ref().err().map(ToString::to_string));
        made.map_err(|error| error.to_string()).and(logged).map_err(ApiError::unavailable)?;
        Ok(Enrolled { host: host.clone(), token: token.to_string(), until_ms })
    }

    /// The first certificate of a host.
    async fn first(&self, message: pb::Enrolling) -> Result<Signed, Status> {
        let (secret, asked) = enrolling(message).map_err(|e| Status::invalid_argument(e.to_string()))?;
        let Ok(_turn) = self.turns.try_acquire() else {
            return Err(Status::unavailable("many hosts ask at the same time; try again soon"));
        };
        let verified = verify(&asked)?;
        if !self.relay.position().borrow().in_sync {
            return Err(Status::unavailable("the relay does not follow its store now; try again soon"));
        }
        // Hosts that do not exist have no token; the answer is the same.
        let taken = match self.knows(&asked.host) {
            true => tokens::redeem(self.relay.store(), &asked.host, &secret, &verified.key(), now_ms()).await,
            false => Err(NotTaken::Invalid),
        };
        taken.map_err(|error| match error {
            NotTaken::Invalid => Status::permission_denied(error.to_string()),
            other => Status::unavailable(other.to_string()),
        })?;
        self.sign(Event::Enrolled, &asked, &verified)
    }

    /// A further certificate of a host, which shows the one before.
    fn next(&self, message: pb::Renewal, certificates: Option<&[CertificateDer<'static>]>) -> Result<Signed, Status> {
        let asked = Asked::try_from(message).map_err(|e| Status::invalid_argument(e.to_string()))?;
        if !certificates.is_some_and(|all| tls::is_of_host(all, &asked.host)) {
            let what = format!("the certificate is not that of host {:?}: it has no such DNS name", asked.host);
            return Err(Status::permission_denied(what));
        }
        let verified = verify(&asked)?;
        if !self.relay.position().borrow().in_sync {
            return Err(Status::unavailable("the relay does not follow its store now; try another, or again soon"));
        }
        if !self.knows(&asked.host) {
            return Err(Status::not_found(format!("there is no host/{}", asked.host)));
        }
        self.sign(Event::Renewed, &asked, &verified)
    }

    fn sign(&self, event: Event, asked: &Asked, verified: &Verified) -> Result<Signed, Status> {
        let recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner).refuses(&asked.host, Instant::now());
        if recent {
            return Err(Status::resource_exhausted("the host has just got a certificate; try again in a second"));
        }
        let signed = self.authority.sign(&asked.host, verified, SystemTime::now());
        let key = Key::new(Kind::Host, "", &asked.host).map_err(|e| Status::invalid_argument(e.to_string()))?;
        let logged = self.log(event, None, About::Host(&key), signed.as_ref().err().cloned());
        let signed = signed.map_err(Status::failed_precondition)?;
        logged.map_err(Status::unavailable)?;
        let counted = match event {
            Event::Renewed => &self.relay.counts.renewed,
            _ => &self.relay.counts.enrolled,
        };
        counted.fetch_add(1, Ordering::Relaxed);
        tracing::info!(host = asked.host, "the host has got a certificate");
        Ok(signed)
    }

    pub(crate) fn log(
        &self,
        event: Event,
        caller: Option<&Caller>,
        about: About<'_>,
        why: Option<String>,
    ) -> Result<(), String> {
        let Some(audit) = self.relay.audit() else { return Ok(()) };
        tokio::task::block_in_place(|| audit.event(event, caller, about, why.as_deref(), now_ms()))
    }

    fn knows(&self, host: &str) -> bool {
        self.relay.with(|fleet| fleet.has_host(host))
    }

    /// Counts what is refused.
    fn settle(&self, what: &str, result: Result<Signed, Status>) -> Result<Response<pb::Signed>, Status> {
        let status = match result {
            Ok(Signed { certificates, authorities }) => {
                return Ok(Response::new(pb::Signed { certificates, authorities }));
            }
            Err(status) => status,
        };
        self.relay.counts.certificates_refused.fetch_add(1, Ordering::Relaxed);
        let (now, told) = (now_ms(), self.told_ms.load(Ordering::Relaxed));
        if now >= told + TELL_AGAIN_MS {
            self.told_ms.store(now, Ordering::Relaxed);
            tracing::warn!("{what} is refused: {}", status.message());
        }
        Err(status)
    }
}

/// Which hosts have got certificates lately.
#[derive(Debug, Default)]
struct Recent(HashMap<String, Instant>);

impl Recent {
    /// Whether a host has to wait for its next certificate; otherwise it is about to get it.
    fn refuses(&mut self, host: &str, now: Instant) -> bool {
        let is_recent = |last: &Instant| now.saturating_duration_since(*last) < LEAST_TIME;
        if self.0.get(host).is_some_and(is_recent) {
            return true;
        }
        if self.0.len() >= MANY {
            self.0.retain(|_, last| is_recent(last));
        }
        self.0.insert(host.to_owned(), now);
        false
    }
}

#[tonic::async_trait]
impl pb::enrollment_server::Enrollment for Enrollment {
    async fn enroll(&self, request: Request<pb::Enrolling>) -> Result<Response<pb::Signed>, Status> {
        let result = self.first(request.into_inner()).await;
        self.settle("a host's first certificate", result)
    }
}

#[tonic::async_trait]
impl pb::certificates_server::Certificates for Enrollment {
    async fn renew(&self, request: Request<pb::Renewal>) -> Result<Response<pb::Signed>, Status> {
        let certificates = request.extensions().get::<TlsConnectInfo<Link>>().and_then(TlsConnectInfo::peer_certs);
        let result = self.next(request.into_inner(), certificates.as_ref().map(|all| all.as_slice()));
        self.settle("a host's further certificate", result)
    }
}

fn verify(asked: &Asked) -> Result<Verified, Status> {
    Authority::verify(&asked.request).map_err(|why| Status::invalid_argument(format!("request: {why}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_gets_one_certificate_a_second() {
        let (mut recent, start) = (Recent::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        assert!(!recent.refuses("h1", at(0)) && !recent.refuses("h2", at(0)));
        assert!(recent.refuses("h1", at(999)) && !recent.refuses("h1", at(1000)));
        for n in 0..3 * MANY as u64 {
            assert!(!recent.refuses(&format!("many{n}"), at(2000 + n)));
        }
        assert!(recent.0.len() <= MANY + 1, "old ones are forgotten");
    }
}
