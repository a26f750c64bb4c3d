//! What a certificate says of its holder, in names that are not those of a host.

use rustls_pki_types::CertificateDer;
use x509_parser::prelude::{FromDer as _, GeneralName, X509Certificate};

use crate::enroll::hex;

/// The names of a certificate. It was verified before, or says nothing about who shows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    /// The subject's common name; of several, the last one, as in RFC 4519. None: it has none that is a text.
    pub common_name: Option<String>,
    /// The serial number, lower-case hexadecimal digits.
    pub serial: String,
    /// Alternative names of hosts (subjectAltName, RFC 5280, 4.2.1.6): DNS names.
    pub dns: Vec<String>,
    /// Alternative names that are URIs.
    pub uris: Vec<String>,
}

impl Names {
    /// The names of a certificate; none: it is damaged, or has alternative names twice.
    pub fn of(certificate: &CertificateDer<'_>) -> Option<Names> {
        let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
        let common_name = certificate.subject().iter_common_name().last().and_then(|name| name.as_str().ok());
        let mut names = Names {
            common_name: common_name.map(str::to_owned),
            serial: hex(certificate.raw_serial()),
            ..Names::default()
        };
        let alternative = certificate.subject_alternative_name().ok()?;
        for name in alternative.iter().flat_map(|extension| &extension.value.general_names) {
            match name {
                GeneralName::DNSName(name) => names.dns.push((*name).to_owned()),
                GeneralName::URI(uri) => names.uris.push((*uri).to_owned()),
                GeneralName::Invalid(..) => return None,
                _ => {}
            }
        }
        Some(names)
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, SanType, SerialNumber};

    use super::*;

    #[test]
    fn names_are_those_of_the_certificate() {
        let mut params = CertificateParams::new(vec!["h1".to_owned()]).unwrap();
        params.subject_alt_names.push(SanType::URI("urn:a:b".try_into().unwrap()));
        params.subject_alt_names.push(SanType::IpAddress([192, 0, 2, 1].into()));
        params.serial_number = Some(SerialNumber::from(vec![0x0a, 0xff]));
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, "alice");
        let certificate = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        let names = Names::of(certificate.der()).unwrap();
        assert_eq!(names.common_name.as_deref(), Some("alice"));
        assert_eq!(
            (&*names.serial, names.dns, names.uris),
            ("0aff", vec!["h1".to_owned()], vec!["urn:a:b".to_owned()])
        );
        let bare = CertificateParams::default();
        let names = Names::of(bare.self_signed(&KeyPair::generate().unwrap()).unwrap().der()).unwrap();
        assert_eq!((names.dns.len(), names.uris.len()), (0, 0));
    }

    #[test]
    fn damaged_certificates_have_no_names_and_do_no_harm() {
        let certificate = CertificateParams::new(vec!["h1".to_owned()]).unwrap();
        let der = certificate.self_signed(&KeyPair::generate().unwrap()).unwrap().der().to_vec();
        for place in 0..der.len() {
            assert_eq!(Names::of(&der[..place].to_vec().into()), None);
            let mut bad = der.clone();
            bad[place] ^= 1 << (place % 8);
            let _ = Names::of(&bad.into());
        }
    }
}
