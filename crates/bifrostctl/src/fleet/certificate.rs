//! Certificates of operators: the key is made here, and the relay signs it with roles.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use bifrost_intent::ProjectRole;
use bifrost_intent::api::{CERTIFICATE_S, Certified, Certify};
use clap::Args;
use rcgen::{CertificateParams, KeyPair};

use crate::failure::Failure;

pub(crate) const EXAMPLES: &str = "\
Examples:
  bifrostctl fleet certificate alice --role editor:demo --out alice.pem --ca-out ca.pem
  bifrostctl fleet certificate ci --role viewer:* --role editor:test --ttl 86400 --out ci.pem
Then, on any machine:
  bifrostctl fleet --relay https://relay1:4793 --ca ca.pem --certificate alice.pem get

The relay needs --ca-key; with --api it takes such certificates.";

/// What a certificate is to be.
#[derive(Debug, Args)]
pub(crate) struct CertificateArgs {
    /// Who gets it: letters, digits and ._@+-; the audit log has this name
    name: String,
    /// What its holder may do: viewer, editor or admin of a project, or of * (all, and hosts)
    #[arg(long, value_name = "ROLE:PROJECT", required = true)]
    role: Vec<ProjectRole>,
    /// How long it is valid, seconds
    #[arg(long, value_name = "SECONDS", default_value_t = CERTIFICATE_S)]
    ttl: u64,
    /// The file that gets certificate and key, PEM; it must not exist
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// A file that gets the authorities of relays, PEM, for --ca
    #[arg(long, value_name = "FILE")]
    ca_out: Option<PathBuf>,
}

/// Makes a key, has the certificate issued by `ask`, and writes both.
pub(crate) fn make(
    args: &CertificateArgs,
    ask: impl FnOnce(&Certify) -> Result<Certified, Failure>,
) -> Result<Certified, Failure> {
    let failed =
        |e: rcgen::Error| Failure::Usage { what: format!("cannot make a key: {e}"), location: String::new(), hint: "" };
    // Before anything is issued: it must be possible to keep it.
    let mut file = create(&args.out, 0o600, true)?;
    let made = (|| {
        let key = KeyPair::generate().map_err(failed)?;
        let request = CertificateParams::default().serialize_request(&key).and_then(|request| request.pem());
        let request = request.map_err(failed)?;
        let (name, roles) = (args.name.clone(), args.role.clone());
        let certified = ask(&Certify { name, roles, ttl_s: Some(args.ttl), request })?;
        let text = format!("{}{}", certified.certificate, key.serialize_pem());
        let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
        written.map_err(|source| Failure::File { path: args.out.clone(), source })?;
        if let Some(path) = &args.ca_out {
            let written = create(path, 0o644, false)?.write_all(certified.authorities.as_bytes());
            written.map_err(|source| Failure::File { path: path.clone(), source })?;
        }
        Ok(certified)
    })();
    if made.is_err() {
        // It was made by this call.
        let _ = std::fs::remove_file(&args.out);
    }
    made
}

/// What was made, in words.
pub(crate) fn view(certified: &Certified) -> String {
    let roles: Vec<String> = certified.roles.iter().map(ProjectRole::to_string).collect();
    format!("{} {}: {}", certified.name, certified.serial, roles.join(" "))
}

fn create(path: &Path, mode: u32, is_new: bool) -> Result<File, Failure> {
    let mut options = File::options();
    options.write(true).mode(mode).create(true).truncate(true).create_new(is_new);
    options.open(path).map_err(|source| Failure::File { path: path.to_owned(), source })
}
