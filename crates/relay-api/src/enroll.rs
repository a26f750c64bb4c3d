//! How a host gets its certificates (docs/FLEET.md 5): tokens, requests and answers.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use prost::bytes::Bytes;
use ring::digest;
use ring::rand::{SecureRandom as _, SystemRandom};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject as _;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::checked::{Invalid, host_name, invalid};
use crate::limits::{MAX_CERTIFICATES, MAX_REQUEST};
use crate::pb;

/// Bytes of a token's secret.
pub const SECRET: usize = 16;
/// Bytes of a digest: SHA-256.
pub const DIGEST: usize = 32;

/// What a host shows to get its first certificate, and how it knows the relay. As text: hexadecimal digits, with a dot between the two.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    /// What only those know who were given the token.
    pub secret: [u8; SECRET],
    /// The [digest](digest()) of the certificate of the authority that vouches for the relay.
    pub authority: [u8; DIGEST],
}

impl Token {
    /// One with a new secret.
    ///
    /// # Errors
    /// The kernel gives no random numbers.
    pub fn new(authority: [u8; DIGEST]) -> Result<Token, NoRandom> {
        Ok(Token { secret: random()?, authority })
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", hex(&self.secret), hex(&self.authority))
    }
}

impl fmt::Debug for Token {
    /// Without the secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token(.{})", hex(&self.authority))
    }
}

impl FromStr for Token {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Token, &'static str> {
        let parts = text.trim().split_once('.');
        let both = parts.and_then(|(secret, authority)| Some((unhex(secret)?, unhex(authority)?)));
        let (secret, authority) = both.ok_or("is not a token: 32 hexadecimal digits, a dot and 64 more")?;
        Ok(Token { secret, authority })
    }
}

/// The kernel gives no random numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the kernel gives no random numbers")]
pub struct NoRandom;

/// Random bytes, for secrets.
///
/// # Errors
/// The kernel gives none.
pub fn random<const N: usize>() -> Result<[u8; N], NoRandom> {
    let mut bytes = [0; N];
    SystemRandom::new().fill(&mut bytes).map_err(|_| NoRandom)?;
    Ok(bytes)
}

/// The SHA-256 of something, such as a certificate's DER.
pub fn digest(bytes: &[u8]) -> [u8; DIGEST] {
    let mut all = [0; DIGEST];
    all.copy_from_slice(digest::digest(&digest::SHA256, bytes).as_ref());
    all
}

/// Bytes as lower-case hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex<const N: usize>(text: &str) -> Option<[u8; N]> {
    if text.len() != 2 * N || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let mut bytes = [0; N];
    for (place, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * place..2 * place + 2], 16).ok()?;
    }
    Some(bytes)
}

/// A host asks for a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// The host's name.
    pub host: String,
    /// PKCS #10 (RFC 2986), DER; nothing in it was checked.
    pub request: Bytes,
}

/// A certificate for a host, checked by nobody but for its size: PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signed {
    /// The host's certificate, and those between it and the authority.
    pub certificates: Bytes,
    /// The authorities that vouch for relays.
    pub authorities: Bytes,
}

impl TryFrom<pb::Renewal> for Asked {
    type Error = Invalid;

    fn try_from(message: pb::Renewal) -> Result<Asked, Invalid> {
        let pb::Renewal { host, request } = message;
        asked(host, request)
    }
}

/// The secret of a token, and what is asked for.
///
/// # Errors
/// Something is not within the limits.
pub fn enrolling(message: pb::Enrolling) -> Result<([u8; SECRET], Asked), Invalid> {
    let pb::Enrolling { host, secret, request } = message;
    let bytes = secret.len();
    let secret = <[u8; SECRET]>::try_from(&*secret);
    let secret = secret.map_err(|_| invalid("secret", format!("{bytes} bytes; it has {SECRET}")))?;
    Ok((secret, asked(host, request)?))
}

fn asked(host: String, request: Bytes) -> Result<Asked, Invalid> {
    if request.is_empty() || request.len() > MAX_REQUEST {
        return Err(invalid("request", format!("{} bytes; it has 1 to {MAX_REQUEST}", request.len())));
    }
    Ok(Asked { host: host_name(host)?, request })
}

impl TryFrom<pb::Signed> for Signed {
    type Error = Invalid;

    fn try_from(message: pb::Signed) -> Result<Signed, Invalid> {
        let pb::Signed { certificates, authorities } = message;
        for (field, pem) in [("certificates", &certificates), ("authorities", &authorities)] {
            if pem.is_empty() || pem.len() > MAX_CERTIFICATES {
                return Err(invalid(field, format!("{} bytes; it has 1 to {MAX_CERTIFICATES}", pem.len())));
            }
        }
        Ok(Signed { certificates, authorities })
    }
}

/// From when until when a certificate is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    /// From then on.
    pub from: SystemTime,
    /// Until then.
    pub until: SystemTime,
}

impl Validity {
    /// How long it is valid in all.
    pub fn lasts(&self) -> Duration {
        self.until.duration_since(self.from).unwrap_or_default()
    }

    /// When a part of the time is over, 0.0 to 1.0.
    pub fn after(&self, part: f64) -> SystemTime {
        self.from + self.lasts().mul_f64(part.clamp(0.0, 1.0))
    }
}

/// What is to be known of a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// When it is valid.
    pub validity: Validity,
    /// Its public key, as in its BIT STRING (RFC 5280, 4.1.2.7).
    pub key: Vec<u8>,
}

/// What is to be known of the first certificate of a PEM file; none: there is none, or it is damaged.
pub fn facts(pem: &[u8]) -> Option<Facts> {
    facts_of(&CertificateDer::pem_slice_iter(pem).next()?.ok()?)
}

/// The same of a certificate in DER.
pub fn facts_of(certificate: &CertificateDer<'_>) -> Option<Facts> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    let time = |seconds: i64| SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
    let validity = certificate.validity();
    let [from, until] = [validity.not_before, validity.not_after].map(|at| time(at.timestamp()));
    let key = certificate.public_key().subject_public_key.data.to_vec();
    Some(Facts { validity: Validity { from, until }, key })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_texts() {
        let token = Token { secret: [0xab; SECRET], authority: [0x01; DIGEST] };
        let text = token.to_string();
        assert_eq!(text, format!("{}.{}", "ab".repeat(SECRET), "01".repeat(DIGEST)));
        assert_eq!(format!(" {text}\n").parse(), Ok(token.clone()));
        assert!(!format!("{token:?}").contains("abab"), "secrets are not told");
        for wrong in ["", ".", "ab.01", &text[1..], &text.replace('a', "g"), &text.replace('.', ""), "ä.ö"] {
            assert!(wrong.parse::<Token>().is_err(), "{wrong}");
        }
        assert_ne!(Token::new([0; DIGEST]).unwrap().secret, Token::new([0; DIGEST]).unwrap().secret);
    }

    #[test]
    fn what_is_not_within_the_limits_is_refused() {
        let good = pb::Enrolling { host: "h1".into(), secret: vec![1; SECRET].into(), request: vec![2; 100].into() };
        let (secret, asked) = enrolling(good.clone()).unwrap();
        assert_eq!((secret, &*asked.host, asked.request.len()), ([1; SECRET], "h1", 100));
        for (wrong, why) in [
            (pb::Enrolling { host: "H 1".into(), ..good.clone() }, "host"),
            (pb::Enrolling { secret: vec![1; 15].into(), ..good.clone() }, "secret: 15 bytes"),
            (pb::Enrolling { request: Bytes::new(), ..good.clone() }, "request: 0 bytes"),
            (pb::Enrolling { request: vec![0; MAX_REQUEST + 1].into(), ..good }, "request"),
        ] {
            let error = enrolling(wrong).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        let signed = |size: usize| pb::Signed { certificates: vec![0; size].into(), authorities: vec![0; 1].into() };
        assert!(Signed::try_from(signed(MAX_CERTIFICATES)).is_ok());
        assert!(Signed::try_from(signed(0)).is_err() && Signed::try_from(signed(MAX_CERTIFICATES + 1)).is_err());
    }

    #[test]
    fn certificates_say_when_they_are_valid() {
        let mut params = rcgen::CertificateParams::new(vec!["h1".to_owned()]).unwrap();
        params.not_before = rcgen::date_time_ymd(2020, 1, 1);
        params.not_after = rcgen::date_time_ymd(2020, 1, 11);
        let key = rcgen::KeyPair::generate().unwrap();
        let facts = facts(params.self_signed(&key).unwrap().pem().as_bytes()).unwrap();
        let day = Duration::from_secs(86_400);
        assert_eq!(facts.validity.lasts(), day * 10);
        assert_eq!(facts.validity.after(0.5), facts.validity.from + day * 5);
        assert_eq!(facts.key, key.public_key_raw());
        assert_eq!(super::facts(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"), None);
        assert_eq!(super::facts(b"nothing"), None);
    }
}
