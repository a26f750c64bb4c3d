//! The authority that signs certificates of hosts and operators: its certificate, one of those of `--ca`, and its key, `--ca-key`.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow, bail};
use axum::body::Bytes;
use bifrost_relay_api::enroll::{self, DIGEST, Signed, digest};
use bifrost_relay_api::tls;
use rcgen::{
    Certificate, CertificateParams, CertificateSigningRequestParams, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, Issuer, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PublicKeyData as _, SanType,
    SerialNumber,
};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, CertificateSigningRequestDer};
use time::OffsetDateTime;

/// The largest file of a key, bytes.
const MAX_KEY_FILE: u64 = 64 << 10;
/// Clocks of relays and hosts may differ by so much, unless certificates last less than ten times as long.
const SKEW: Duration = Duration::from_secs(300);

/// Who signs.
#[derive(Debug)]
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    fingerprint: [u8; DIGEST],
    /// What hosts are to trust: the certificates of `--ca`, PEM.
    authorities: Bytes,
    until: SystemTime,
    /// How long the certificates of hosts are valid.
    lifetime: Duration,
}

/// A request of a host whose signature was verified: it has the key of the public key.
#[derive(Debug)]
pub(crate) struct Verified(rcgen::PublicKey);

impl Verified {
    /// Which key it is.
    pub(crate) fn key(&self) -> [u8; DIGEST] {
        digest(self.0.der_bytes())
    }
}

impl Authority {
    /// Takes that certificate of a PEM file which is of a key.
    ///
    /// # Errors
    /// The key cannot be read, or there is no such certificate.
    pub(crate) fn open(authorities: &[u8], key: &Path, lifetime: Duration) -> Result<Authority> {
        let about = || format!("--ca-key: {}", key.display());
        let metadata = std::fs::metadata(key).with_context(about)?;
        if metadata.mode() & 0o007 != 0 {
            bail!("{}: all users of this machine may use it, and could be any host; run chmod o= on it", about());
        }
        let length = metadata.len();
        if length > MAX_KEY_FILE {
            bail!("{}: {length} bytes are too many for a key", about());
        }
        let text = std::fs::read_to_string(key).with_context(about)?;
        let pair = KeyPair::from_pem(&text);
        let pair =
            pair.map_err(|e| anyhow!("{}: is not a private key that can be used, PEM (PKCS #8): {e}", about()))?;
        let mut of_key = CertificateDer::pem_slice_iter(authorities).filter_map(Result::ok).filter_map(|certificate| {
            let facts = enroll::facts_of(&certificate)?;
            (facts.key == pair.public_key_raw()).then_some((certificate, facts))
        });
        let none = || anyhow!("{}: none of the certificates of --ca is of this key", about());
        let (certificate, facts) = of_key.next().ok_or_else(none)?;
        let issuer = Issuer::from_ca_cert_der(&certificate, pair);
        let issuer = issuer.map_err(|e| anyhow!("{}: its certificate cannot sign: {e}", about()))?;
        let (fingerprint, until) = (digest(&certificate), facts.validity.until);
        let authorities = Bytes::copy_from_slice(authorities);
        Ok(Authority { issuer, fingerprint, authorities, until, lifetime })
    }

    /// By what hosts recognize it.
    pub(crate) fn fingerprint(&self) -> [u8; DIGEST] {
        self.fingerprint
    }

    /// Checks a request, PKCS #10 in DER. Of what it says only the key counts, which is of ECDSA with P-256.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn verify(request: &[u8]) -> Result<Verified, String> {
        let der = CertificateSigningRequestDer::from(request);
        let request = CertificateSigningRequestParams::from_der(&der).map_err(|e| e.to_string())?;
        let key = request.public_key;
        // An uncompressed point (SEC 1, 2.3.3): 4 and two coordinates.
        if *key.algorithm() != PKCS_ECDSA_P256_SHA256 || key.der_bytes().len() != 65 || key.der_bytes()[0] != 4 {
            return Err("its key is not one of ECDSA with P-256".to_owned());
        }
        Ok(Verified(key))
    }

    /// A certificate for a host.
    ///
    /// # Errors
    /// The authority's own certificate has expired, or the name is none that a certificate can have.
    pub(crate) fn sign(&self, host: &str, request: &Verified, now: SystemTime) -> Result<Signed, String> {
        let name = host.try_into().map_err(|_| format!("{host:?} cannot be in a certificate"))?;
        let names = vec![SanType::DnsName(name)];
        let (certificate, _) = self.issue(host, names, request, now, self.lifetime)?;
        if !tls::is_of_host(&[certificate.der().clone()], host) {
            return Err(format!("{host:?} is no DNS name"));
        }
        Ok(Signed { certificates: certificate.pem().into(), authorities: self.authorities.clone() })
    }

    /// A certificate for an operator, with URIs for what its holder may do. Gives it as PEM with that of authorities, and when it expires.
    ///
    /// # Errors
    /// As above.
    pub(crate) fn sign_operator(
        &self,
        name: &str,
        uris: &[String],
        request: &Verified,
        now: SystemTime,
        lifetime: Duration,
    ) -> Result<(Signed, SystemTime), String> {
        let uri = |uri: &String| uri.as_str().try_into().map(SanType::URI);
        let names: Result<Vec<_>, _> = uris.iter().map(uri).collect();
        let names = names.map_err(|e| format!("the roles cannot be in a certificate: {e}"))?;
        let (certificate, until) = self.issue(name, names, request, now, lifetime)?;
        let authorities = self.authorities.clone();
        Ok((Signed { certificates: certificate.pem().into(), authorities }, until))
    }

    fn issue(
        &self,
        subject: &str,
        names: Vec<SanType>,
        request: &Verified,
        now: SystemTime,
        lifetime: Duration,
    ) -> Result<(Certificate, SystemTime), String> {
        if self.until <= now {
            return Err("the authority's certificate has expired".to_owned());
        }
        let until = (now + lifetime).min(self.until);
        let mut params = CertificateParams::default();
        params.subject_alt_names = names;
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, subject);
        params.not_before = date(now - SKEW.min(lifetime / 10))?;
        params.not_after = date(until)?;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        let mut serial: [u8; 16] = enroll::random().map_err(|e| e.to_string())?;
        // Positive (RFC 5280, 4.1.2.2), and not 0.
        serial[0] = serial[0] & 0x7f | 0x40;
        params.serial_number = Some(SerialNumber::from(serial.to_vec()));
        let certificate = params.signed_by(&request.0, &self.issuer).map_err(|e| e.to_string())?;
        Ok((certificate, until))
    }
}

fn date(at: SystemTime) -> Result<OffsetDateTime, String> {
    let seconds = at.duration_since(UNIX_EPOCH).map_err(|e| e.to_string())?.as_secs();
    let seconds = i64::try_from(seconds).map_err(|e| e.to_string())?;
    OffsetDateTime::from_unix_timestamp(seconds).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use rcgen::{BasicConstraints, CertifiedIssuer, IsCa};

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    /// An authority with files in a directory that is removed.
    fn authority(lifetime: Duration, until: OffsetDateTime) -> (Authority, String) {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.not_after = until;
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let other = CertificateParams::default().self_signed(&KeyPair::generate().unwrap()).unwrap();
        let path = std::env::temp_dir().join(format!("bifrost-authority-{:016x}", fastrand::u64(..)));
        std::fs::write(&path, issuer.key().serialize_pem()).unwrap();
        let allow = |mode| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        let all = format!("{}{}", other.pem(), issuer.pem());
        allow(0o644);
        let open = Authority::open(all.as_bytes(), &path, lifetime).unwrap_err().to_string();
        assert!(open.contains("all users of this machine may use it"), "{open}");
        allow(0o640);
        let authority = Authority::open(all.as_bytes(), &path, lifetime).unwrap();
        let foreign = Authority::open(other.pem().as_bytes(), &path, lifetime).unwrap_err().to_string();
        assert!(foreign.contains("none of the certificates of --ca is of this key"), "{foreign}");
        std::fs::remove_file(&path).unwrap();
        assert_eq!(authority.fingerprint(), digest(issuer.der()));
        (authority, all)
    }

    fn request(key: &KeyPair, name: &str) -> Vec<u8> {
        CertificateParams::new(vec![name.to_owned()]).unwrap().serialize_request(key).unwrap().der().to_vec()
    }

    #[test]
    fn a_certificate_is_of_the_host_that_is_named_and_of_the_key_that_asks() {
        let (authority, all) = authority(HOUR * 24, rcgen::date_time_ymd(2100, 1, 1));
        let key = KeyPair::generate().unwrap();
        // What a request says of names counts for nothing.
        let verified = Authority::verify(&request(&key, "other")).unwrap();
        let now = SystemTime::now();
        let signed = authority.sign("h1", &verified, now).unwrap();
        assert_eq!(signed.authorities, all.as_bytes());
        let facts = enroll::facts(&signed.certificates).unwrap();
        assert_eq!(facts.key, key.public_key_raw());
        let Ok(lasts) = facts.validity.until.duration_since(now) else { panic!() };
        assert!(lasts <= HOUR * 24 && lasts > HOUR * 23, "{lasts:?}");
        assert!(facts.validity.from < now, "clocks may differ");
        let der = CertificateDer::pem_slice_iter(&signed.certificates).next().unwrap().unwrap();
        let is_of = |host: &str| tls::is_of_host(std::slice::from_ref(&der), host);
        assert_eq!([is_of("h1"), is_of("other")], [true, false]);
        assert!(authority.sign("h_1 ", &verified, now).is_err());
        let again = authority.sign("h1", &verified, now).unwrap();
        assert_ne!(again.certificates, signed.certificates, "each has a serial number of its own");
    }

    #[test]
    fn nothing_lasts_longer_than_the_authority() {
        let (authority, _) = authority(HOUR * 24, rcgen::date_time_ymd(2030, 1, 1));
        let verified = Authority::verify(&request(&KeyPair::generate().unwrap(), "h1")).unwrap();
        let end = authority.until;
        let signed = authority.sign("h1", &verified, end - HOUR).unwrap();
        assert_eq!(enroll::facts(&signed.certificates).unwrap().validity.until, end);
        assert!(authority.sign("h1", &verified, end).unwrap_err().contains("has expired"));
    }

    #[test]
    fn a_request_that_is_not_right_is_refused() {
        let key = KeyPair::generate().unwrap();
        let good = request(&key, "h1");
        let of_key = Authority::verify(&good).unwrap().key();
        // Whatever is changed: no request, or the signature is not of it, or that bit says nothing. It never panics.
        let mut refused = 0;
        for place in 0..good.len() {
            let mut bad = good.clone();
            bad[place] ^= 1 << (place % 8);
            match Authority::verify(&bad) {
                Ok(verified) => assert_eq!(verified.key(), of_key, "byte {place}"),
                Err(_) => refused += 1,
            }
            assert!(Authority::verify(&good[..place]).is_err());
        }
        assert!(refused + 3 > good.len(), "{refused} of {}", good.len());
        let larger = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384).unwrap();
        assert!(Authority::verify(&request(&larger, "h1")).unwrap_err().contains("P-256"));
    }
}
