//! Certificates of operators: with which roles, for whom, and who has issued them.

use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bifrost_control::api::{ApiError, ErrorKind};
use bifrost_intent::ProjectRole;
use bifrost_intent::api::{CERTIFICATE_S, CERTIFICATE_TIMES_S, Certified, Certify, MAX_HOLDER, MAX_ROLES};
use bifrost_relay_api::enroll::Signed;
use bifrost_relay_api::limits::MAX_REQUEST;
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, CertificateSigningRequestDer};

use crate::audit::{About, Event};
use crate::authority::{Authority, Verified};
use crate::caller::{Caller, Holder, ROLE_URI};
use crate::enrollment::Enrollment;

/// The largest request, bytes of PEM: base64 takes a third more, with lines and their ends.
const MAX_PEM: usize = 2 * MAX_REQUEST;

impl Enrollment {
    /// Refuses a certificate to somebody who may not issue one.
    pub(crate) fn forbid_certificate(&self, certify: &Certify, caller: &Caller, why: String) -> ApiError {
        self.relay.counts.forbidden.fetch_add(1, Ordering::Relaxed);
        let about = About::Operator { name: &certify.name, roles: &texts(&certify.roles), serial: None };
        // Nothing is done in any case.
        let _ = self.log(Event::Certified, Some(caller), about, Some(why.clone()));
        ApiError::new(ErrorKind::Forbidden, why)
    }

    /// Issues a certificate for an operator.
    ///
    /// # Errors
    /// Something that is asked for is not right, or the log cannot be written.
    pub(crate) fn certify(&self, certify: &Certify, caller: &Caller) -> Result<Certified, ApiError> {
        let verified = check(certify)?;
        let Certify { name, roles, ttl_s, .. } = certify;
        let lifetime = Duration::from_secs(ttl_s.unwrap_or(CERTIFICATE_S));
        let uris: Vec<String> = roles.iter().map(|role| format!("{ROLE_URI}{role}")).collect();
        let signed = self.authority.sign_operator(name, &uris, &verified, SystemTime::now(), lifetime);
        let made = signed.and_then(|(signed, until)| Ok((serial(&signed, roles)?, signed, until)));
        let serial = made.as_ref().ok().map(|(serial, ..)| serial.as_str());
        let about = About::Operator { name, roles: &texts(roles), serial };
        let logged = self.log(Event::Certified, Some(caller), about, made.as_ref().err().cloned());
        let (serial, signed, until) = made.map_err(ApiError::conflict)?;
        logged.map_err(ApiError::unavailable)?;
        let text = |pem: &[u8]| String::from_utf8_lossy(pem).into_owned();
        Ok(Certified {
            name: name.clone(),
            roles: roles.clone(),
            serial,
            until_ms: until.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64),
            certificate: text(&signed.certificates),
            authorities: text(&signed.authorities),
        })
    }
}

/// Checks everything that is asked for.
fn check(certify: &Certify) -> Result<Verified, ApiError> {
    let wrong = |field: &'static str| move |what: String| ApiError::bad_request(what).at(field);
    let Certify { name, roles, ttl_s, request } = certify;
    let is_good = |byte: u8| byte.is_ascii_alphanumeric() || b"._@+-".contains(&byte);
    if !(1..=MAX_HOLDER).contains(&name.len()) || !name.bytes().all(is_good) {
        let what = format!("{name:?} is not 1 to {MAX_HOLDER} letters, digits and characters of ._@+-");
        return Err(wrong("name")(what));
    }
    if !(1..=MAX_ROLES).contains(&roles.len()) {
        return Err(wrong("roles")(format!("{} roles; 1 to {MAX_ROLES} are allowed", roles.len())));
    }
    roles.iter().try_for_each(ProjectRole::check).map_err(wrong("roles"))?;
    if let Some(ttl_s) = ttl_s.filter(|ttl_s| !CERTIFICATE_TIMES_S.contains(ttl_s)) {
        let (least, most) = CERTIFICATE_TIMES_S.into_inner();
        return Err(wrong("ttl_s")(format!("{ttl_s} s: {least} to {most} are allowed")));
    }
    if request.len() > MAX_PEM {
        return Err(wrong("request")(format!("{} bytes are too many", request.len())));
    }
    let der = CertificateSigningRequestDer::from_pem_slice(request.as_bytes());
    let der = der.map_err(|_| wrong("request")("is not a certificate request, PEM (PKCS #10)".to_owned()))?;
    Authority::verify(&der).map_err(wrong("request"))
}

/// The serial number of a certificate, after it was read as the API will read it.
fn serial(signed: &Signed, roles: &[ProjectRole]) -> Result<String, String> {
    let der = CertificateDer::pem_slice_iter(&signed.certificates).next();
    let der = der.and_then(Result::ok).ok_or("the certificate cannot be read")?;
    let holder = Holder::of(&[der]);
    let granted = holder.roles?;
    let is_granted = |role: &ProjectRole| granted.get(&role.project).is_some_and(|granted| *granted >= role.role);
    match roles.iter().all(is_granted) {
        true => Ok(holder.serial),
        false => Err("the certificate does not have its roles".to_owned()),
    }
}

fn texts(roles: &[ProjectRole]) -> String {
    let texts: Vec<String> = roles.iter().take(MAX_ROLES).map(ProjectRole::to_string).collect();
    texts.join(" ")
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair};

    use super::*;

    #[test]
    fn what_is_asked_for_is_checked() {
        let key = KeyPair::generate().unwrap();
        let request = CertificateParams::default().serialize_request(&key).unwrap().pem().unwrap();
        let roles = vec!["viewer:demo".parse::<ProjectRole>().unwrap()];
        let good = Certify { name: "a.b-c@d+e_1".into(), roles: roles.clone(), ttl_s: Some(60), request };
        assert!(check(&good).is_ok());
        let wrong_role = ProjectRole { project: "De mo".into(), ..roles[0].clone() };
        for (field, wrong) in [
            ("name", Certify { name: String::new(), ..good.clone() }),
            ("name", Certify { name: "x".repeat(65), ..good.clone() }),
            ("name", Certify { name: "a b".into(), ..good.clone() }),
            ("name", Certify { name: "a\n".into(), ..good.clone() }),
            ("roles", Certify { roles: Vec::new(), ..good.clone() }),
            ("roles", Certify { roles: vec![roles[0].clone(); 33], ..good.clone() }),
            ("roles", Certify { roles: vec![wrong_role], ..good.clone() }),
            ("ttl_s", Certify { ttl_s: Some(59), ..good.clone() }),
            ("ttl_s", Certify { ttl_s: Some(367 * 86_400), ..good.clone() }),
            ("request", Certify { request: String::new(), ..good.clone() }),
            ("request", Certify { request: "x".repeat(MAX_PEM + 1), ..good.clone() }),
            ("request", Certify { request: good.request.replace("REQUEST", "SOMETHING"), ..good.clone() }),
        ] {
            assert_eq!(check(&wrong).unwrap_err().location, field, "{wrong:?}");
        }
    }
}
