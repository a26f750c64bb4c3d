//! The command line.

use std::net::SocketAddr;
use std::path::PathBuf;

use bifrost_relay_api::enroll::Token;
use bifrost_relay_api::limits::{ENROLL_PORT, PORT};
use bifrost_relay_api::tls::Files;
use bifrost_relay_api::traces;
use clap::Parser;

use crate::follow;
use crate::identity::{Enrolling, Identity};
use crate::run::Settings;

/// Brings what a relay says into this host's bifrostd, and keeps it so.
///
/// The relay knows the intent for all hosts and sends each agent what its host needs. The agent applies that on bifrostd's
/// control socket, as the owner "fleet", and never touches objects of other owners, such as those of bifrostd's file. It holds
/// no state: stop it, restart it or lose the relay at any time, and traffic goes on as it is. Nothing is deleted unless a relay
/// says so, once it has sent everything.
///
/// With several relays it follows one, and goes on with the next one when that is gone. Each end shows a certificate; the
/// host's name has to be a DNS name in the agent's (subjectAltName). `bifrostctl objects --owner fleet` shows what the agent has
/// brought. SIGTERM ends it and changes nothing. The log goes to standard error; RUST_LOG=debug makes it say more.
#[derive(Parser, Clone, Debug)]
#[command(version, max_term_width = 100)]
#[command(after_help = "EXAMPLES:
  A host of a fleet, with certificates:
    bifrost-agent --relay https://relay1:4790,https://relay2:4790 --host host-a \\
        --ca /etc/bifrost/ca.pem --certificate /etc/bifrost/host-a.pem --key /etc/bifrost/host-a.key
  The same, with a certificate that a relay gives for a token (bifrostctl fleet host enroll host-a):
    BIFROST_TOKEN=... bifrost-agent --relay https://relay1:4790 --host host-a \\
        --identity /var/lib/bifrost-agent --enroll https://relay1:4792
  A trial on one machine:
    bifrost-agent --relay http://127.0.0.1:4790 --host host-a --insecure --socket /tmp/a.sock")]
pub struct Cli {
    /// Relays, separated by commas: https://NAME:PORT, or http:// with --insecure.
    #[arg(long, value_name = "URL,...", env = "BIFROST_RELAY", value_delimiter = ',', required = true)]
    pub relay: Vec<String>,
    /// This host's name, as the intent has it.
    #[arg(long, value_name = "NAME", env = "BIFROST_HOST")]
    pub host: String,
    /// The control socket of this host's bifrostd.
    #[arg(long, value_name = "PATH", env = "BIFROST_SOCKET", default_value = "/run/bifrost/bifrostd.sock")]
    pub socket: PathBuf,
    /// A directory where the agent keeps this host's certificate, which relays give it and it renews by itself; in place of --ca,
    /// --certificate and --key.
    #[arg(long, value_name = "DIRECTORY", env = "BIFROST_IDENTITY", conflicts_with_all = ["ca", "certificate", "key", "insecure"])]
    pub identity: Option<PathBuf>,
    /// While that directory has no certificate: the relay that gives the first one, https://NAME:PORT.
    #[arg(long, value_name = "URL", env = "BIFROST_ENROLL", requires_all = ["identity", "token"])]
    pub enroll: Option<String>,
    /// What `bifrostctl fleet host enroll` has said. Better in the environment: others see arguments. It is used once.
    #[arg(long, value_name = "TOKEN", env = "BIFROST_TOKEN", hide_env_values = true, requires = "enroll")]
    pub token: Option<Token>,
    /// PEM file of the authority that vouches for relays.
    #[arg(long, value_name = "FILE", env = "BIFROST_CA", required_unless_present_any = ["insecure", "identity"])]
    pub ca: Option<PathBuf>,
    /// PEM file of this host's certificate, and of those between it and the authority.
    #[arg(
        long,
        visible_alias = "cert",
        value_name = "FILE",
        env = "BIFROST_CERTIFICATE",
        required_unless_present_any = ["insecure", "identity"]
    )]
    pub certificate: Option<PathBuf>,
    /// PEM file of the certificate's private key.
    #[arg(long, value_name = "FILE", env = "BIFROST_KEY", required_unless_present_any = ["insecure", "identity"])]
    pub key: Option<PathBuf>,
    /// No TLS: anyone on the way to the relay may read and change everything. For trials.
    #[arg(long, conflicts_with_all = ["ca", "certificate", "key"])]
    pub insecure: bool,
    /// Where to serve metrics for Prometheus (GET /metrics), such as 127.0.0.1:9791; anyone who reaches it may read.
    #[arg(long, value_name = "ADDRESS:PORT", env = "BIFROST_AGENT_METRICS")]
    pub metrics: Option<SocketAddr>,
    /// Where traces of changes go.
    #[command(flatten)]
    pub traces: traces::Settings,
}

impl Cli {
    /// The certificate that the agent keeps itself, and how it gets the first one.
    ///
    /// # Errors
    /// The relay's address is none; what to do.
    pub fn identity(&self) -> Result<Option<(Identity, Option<Enrolling>)>, String> {
        let Some(directory) = &self.identity else { return Ok(None) };
        let enrolling = match (&self.enroll, &self.token) {
            (Some(relay), Some(token)) => {
                let relay = address("--enroll", relay, "https://", ENROLL_PORT)?;
                Some(Enrolling { relay, token: token.clone() })
            }
            _ => None,
        };
        Ok(Some((Identity::new(directory.clone()), enrolling)))
    }

    /// What it says, except where traces go: to send them takes a task.
    ///
    /// # Errors
    /// It contradicts itself; what to do.
    pub fn settings(self) -> Result<Settings, String> {
        let (scheme, other) = if self.insecure { ("http://", "https://") } else { ("https://", "http://") };
        let mut relays = Vec::new();
        for relay in self.relay.iter().map(|relay| relay.trim()).filter(|relay| !relay.is_empty()) {
            if relay.starts_with(other) && self.insecure {
                return Err(format!("--relay {relay:?}: with --insecure there is no TLS; write http://"));
            } else if relay.starts_with(other) {
                return Err(format!("--relay {relay:?}: write https://, or give --insecure"));
            }
            relays.push(address("--relay", relay, scheme, PORT)?);
        }
        if relays.is_empty() {
            return Err("--relay: name at least one relay, such as https://relay1:4790".to_owned());
        }
        let tls = match (self.ca, self.certificate, self.key) {
            (Some(ca), Some(certificate), Some(key)) => Some(Files { ca, certificate, key }),
            _ => self.identity.map(|directory| Identity::new(directory).files()),
        };
        let instance = format!("{:016x}", fastrand::u64(..));
        let follow = follow::Settings { relays, host: self.host, tls, instance };
        Ok(Settings { follow, socket: self.socket, traces: None })
    }
}

/// An address of a relay with its scheme, without a slash at its end. `usual` is the port that relays have for this.
fn address(option: &str, text: &str, scheme: &str, usual: u16) -> Result<String, String> {
    let text = if text.starts_with(scheme) { text.to_owned() } else { format!("{scheme}{text}") };
    let text = text.trim_end_matches('/').to_owned();
    let uri: tonic::codegen::http::Uri = text.parse().map_err(|e| format!("{option} {text:?}: {e}"))?;
    if uri.port().is_none() {
        return Err(format!("{option} {text:?} has no port; relays listen on {usual} unless told otherwise"));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn a_first_certificate_takes_an_address_and_a_token() {
        let token = Token { secret: [1; 16], authority: [2; 32] };
        let line = format!("bifrost-agent --relay a:1 --host h --identity /d --token {token} --enroll");
        let parse = |at: &str| Cli::try_parse_from(line.split(' ').chain([at])).unwrap().identity();
        let (identity, enrolling) = parse("a:2").unwrap().unwrap();
        let enrolling = enrolling.unwrap();
        assert_eq!((identity, enrolling.relay.as_str()), (Identity::new("/d".into()), "https://a:2"));
        assert_eq!(enrolling.token, token);
        assert!(parse("https://a").unwrap_err().contains("4792"));
    }

    fn settings(line: &str) -> Result<Settings, String> {
        let arguments = std::iter::once("bifrost-agent").chain(line.split(' '));
        Cli::try_parse_from(arguments).map_err(|e| e.to_string())?.settings()
    }

    #[test]
    fn tls_is_on_unless_it_is_said_otherwise() {
        let insecure = settings("--relay http://a:1,b:2 --host h --insecure").unwrap();
        assert_eq!(insecure.follow.relays, ["http://a:1", "http://b:2"]);
        assert_eq!(insecure.follow.tls, None);
        let secure = settings("--relay a:1,https://[::1]:2/ --host h --ca c --cert d --key e").unwrap();
        assert_eq!(secure.follow.relays, ["https://a:1", "https://[::1]:2"]);
        assert!(secure.follow.tls.is_some());
        let kept = settings("--relay a:1 --host h --identity /d").unwrap().follow.tls.unwrap();
        assert_eq!((kept.certificate.as_path(), kept.key), (Path::new("/d/identity.pem"), kept.certificate.clone()));
        for (wrong, why) in [
            ("--relay a:1 --host h", "--ca"),
            ("--relay http://a:1 --host h --ca c --cert d --key e", "https://"),
            ("--relay https://a:1 --host h --insecure", "http://"),
            ("--relay a:1 --host h --insecure --ca c", "cannot be used with"),
            ("--relay a --host h --insecure", "no port"),
            ("--relay a:1 --host h --insecure --identity /d", "cannot be used with"),
            ("--relay a:1 --host h --identity /d --enroll a:2", "--token"),
            ("--relay a:1 --host h --identity /d --enroll a:2 --token x", "is not a token"),
            ("--relay , --host h --insecure", "at least one relay"),
            ("--relay a:1 --insecure", "--host"),
        ] {
            let error = settings(wrong).unwrap_err();
            assert!(error.contains(why), "{wrong}: {error}");
        }
    }
}
