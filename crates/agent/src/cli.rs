//! The command line.

use std::net::SocketAddr;
use std::path::PathBuf;

use bifrost_relay_api::tls::Files;
use clap::Parser;

use crate::follow;
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
    /// PEM file of the authority that vouches for relays.
    #[arg(long, value_name = "FILE", env = "BIFROST_CA", required_unless_present = "insecure")]
    pub ca: Option<PathBuf>,
    /// PEM file of this host's certificate, and of those between it and the authority.
    #[arg(
        long,
        visible_alias = "cert",
        value_name = "FILE",
        env = "BIFROST_CERTIFICATE",
        required_unless_present = "insecure"
    )]
    pub certificate: Option<PathBuf>,
    /// PEM file of the certificate's private key.
    #[arg(long, value_name = "FILE", env = "BIFROST_KEY", required_unless_present = "insecure")]
    pub key: Option<PathBuf>,
    /// No TLS: anyone on the way to the relay may read and change everything. For trials.
    #[arg(long, conflicts_with_all = ["ca", "certificate", "key"])]
    pub insecure: bool,
    /// Where to serve metrics for Prometheus (GET /metrics), such as 127.0.0.1:9791; anyone who reaches it may read.
    #[arg(long, value_name = "ADDRESS:PORT", env = "BIFROST_AGENT_METRICS")]
    pub metrics: Option<SocketAddr>,
}

impl Cli {
    /// What it says.
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
            let relay = if relay.starts_with(scheme) { relay.to_owned() } else { format!("{scheme}{relay}") };
            let relay = relay.trim_end_matches('/').to_owned();
            let uri: tonic::codegen::http::Uri = relay.parse().map_err(|e| format!("--relay {relay:?}: {e}"))?;
            if uri.port().is_none() {
                let port = bifrost_relay_api::limits::PORT;
                return Err(format!("--relay {relay:?} has no port; relays listen on {port} unless told otherwise"));
            }
            relays.push(relay);
        }
        if relays.is_empty() {
            return Err("--relay: name at least one relay, such as https://relay1:4790".to_owned());
        }
        let tls = match (self.ca, self.certificate, self.key) {
            (Some(ca), Some(certificate), Some(key)) => Some(Files { ca, certificate, key }),
            _ => None,
        };
        let instance = format!("{:016x}", fastrand::u64(..));
        Ok(Settings { follow: follow::Settings { relays, host: self.host, tls, instance }, socket: self.socket })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        for (wrong, why) in [
            ("--relay a:1 --host h", "--ca"),
            ("--relay http://a:1 --host h --ca c --cert d --key e", "https://"),
            ("--relay https://a:1 --host h --insecure", "http://"),
            ("--relay a:1 --host h --insecure --ca c", "cannot be used with"),
            ("--relay a --host h --insecure", "no port"),
            ("--relay , --host h --insecure", "at least one relay"),
            ("--relay a:1 --insecure", "--host"),
        ] {
            let error = settings(wrong).unwrap_err();
            assert!(error.contains(why), "{wrong}: {error}");
        }
    }
}
