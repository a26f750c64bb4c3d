//! Who asks by the API: a user of this machine, or the holder of a certificate.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use bifrost_control::api::ApiError;
use bifrost_control::server::Peer;
use bifrost_intent::api::MAX_ROLES;
use bifrost_intent::{ProjectRole, Role};
use bifrost_relay_api::enroll;
use bifrost_relay_api::names::Names;
use rustls_pki_types::CertificateDer;

/// How a role is written in a certificate: a URI among its alternative names, such as `urn:bifrost:role:editor:demo`.
pub(crate) const ROLE_URI: &str = "urn:bifrost:role:";

/// Who asks.
#[derive(Clone, Debug)]
pub(crate) enum Caller {
    /// A user of this machine, as the kernel says.
    User(Peer),
    /// Who has shown a certificate of the authority, and has its key.
    Holder(Arc<Holder>),
}

/// The holder of a certificate.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Holder {
    /// The common name of the certificate's subject.
    pub(crate) name: String,
    /// The certificate's serial number, hexadecimal.
    pub(crate) serial: String,
    /// When it expires.
    pub(crate) until: SystemTime,
    /// What it grants, the highest role of each project; or why it is of no use here.
    pub(crate) roles: Result<BTreeMap<String, Role>, String>,
}

impl Holder {
    /// The holder of a certificate, which TLS has verified. `certificates` has that of the holder first.
    pub(crate) fn of(certificates: &[CertificateDer<'_>]) -> Holder {
        let first = certificates.first();
        let both = first.and_then(|first| Some((Names::of(first)?, enroll::facts_of(first)?)));
        let Some((names, facts)) = both else {
            let roles = Err("the certificate cannot be read".to_owned());
            return Holder { name: String::new(), serial: String::new(), until: SystemTime::UNIX_EPOCH, roles };
        };
        let roles = roles(&names);
        let Names { common_name, serial, .. } = names;
        Holder { name: common_name.unwrap_or_default(), serial, until: facts.validity.until, roles }
    }

    /// What the certificate grants, in words.
    pub(crate) fn granted(&self) -> String {
        let roles = self.roles.iter().flatten();
        let texts: Vec<String> =
            roles.map(|(project, role)| ProjectRole { project: project.clone(), role: *role }.to_string()).collect();
        texts.join(" ")
    }
}

/// The roles that a certificate grants. One that could be a host's grants none, whatever else it says: hosts keep their keys where
/// guests' workloads run, and get their certificates by other rules.
fn roles(names: &Names) -> Result<BTreeMap<String, Role>, String> {
    if let Some(host) = names.dns.first() {
        return Err(format!("the certificate is that of host {host:?} (a DNS name); hosts have no role in this API"));
    }
    let mut roles: BTreeMap<String, Role> = BTreeMap::new();
    let texts = names.uris.iter().filter_map(|uri| uri.strip_prefix(ROLE_URI));
    for (number, text) in texts.enumerate() {
        if number == MAX_ROLES {
            return Err(format!("the certificate has more than {MAX_ROLES} roles"));
        }
        let ProjectRole { project, role } = text.parse().map_err(|e| format!("the certificate's roles: {e}"))?;
        let known = roles.entry(project).or_insert(role);
        *known = role.max(*known);
    }
    match roles.is_empty() {
        true => Err(format!("the certificate grants no role: it has no URI such as {ROLE_URI}viewer:demo")),
        false => Ok(roles),
    }
}

impl Caller {
    /// Its name: a user's number, or the name in the certificate.
    pub(crate) fn name(&self) -> String {
        match self {
            Caller::User(peer) => format!("uid {}", peer.uid),
            Caller::Holder(holder) => holder.name.clone(),
        }
    }
}

impl From<Peer> for Caller {
    fn from(peer: Peer) -> Caller {
        Caller::User(peer)
    }
}

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Caller, ApiError> {
        if let Some(holder) = parts.extensions.get::<Arc<Holder>>() {
            return Ok(Caller::Holder(Arc::clone(holder)));
        }
        let peer = parts.extensions.get::<Peer>().copied();
        peer.map(Caller::User).ok_or_else(|| ApiError::internal("it is not known who asks"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dns: &[&str], uris: &[&str]) -> Names {
        let all = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        Names { dns: all(dns), uris: all(uris), ..Names::default() }
    }

    #[test]
    fn a_certificate_grants_what_its_uris_say() {
        let granted = roles(&names(
            &[],
            &[
                "spiffe://else/where",
                "urn:bifrost:role:admin:demo",
                "urn:bifrost:role:viewer:demo",
                "urn:bifrost:role:viewer:*",
            ],
        ));
        assert_eq!(granted, Ok([("*".to_owned(), Role::Viewer), ("demo".to_owned(), Role::Admin)].into()));
    }

    #[test]
    fn what_is_not_clearly_a_role_grants_nothing() {
        let role = "urn:bifrost:role:viewer:demo";
        let many: Vec<String> = (0..=MAX_ROLES).map(|n| format!("{ROLE_URI}viewer:p{n}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        for (dns, uris, why) in [
            (&[][..], &[][..], "grants no role"),
            (&[], &["urn:bifrost:other:viewer:demo"], "grants no role"),
            (&[], &["URN:BIFROST:ROLE:viewer:demo"], "grants no role"),
            (&["h1"], &[], "that of host \"h1\""),
            (&["h1"], &[role], "that of host \"h1\""),
            (&[], &[role, "urn:bifrost:role:owner:demo"], "\"owner\" is not a role"),
            (&[], &[role, "urn:bifrost:role:viewer"], "write ROLE:PROJECT"),
            (&[], &[role, "urn:bifrost:role:viewer:De mo"], "is not a name"),
            (&[], &many[..], "more than 32 roles"),
        ] {
            let error = roles(&names(dns, uris)).unwrap_err();
            assert!(error.contains(why), "{dns:?} {uris:?}: {error}");
        }
    }

    #[test]
    fn a_damaged_certificate_is_of_nobody() {
        assert!(Holder::of(&[]).roles.is_err());
        let holder = Holder::of(&[b"nothing".to_vec().into()]);
        assert!(holder.roles.is_err() && holder.granted().is_empty());
    }
}
