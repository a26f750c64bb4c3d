//! The command line.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use bifrost_intent::Withdrawn;
use bifrost_relay_api::limits::PORT;
use bifrost_relay_api::tls::{Files, Material};
use bifrost_relay_api::traces;
use bifrost_store::{EtcdOptions, EtcdTls, EtcdUser, Store};
use clap::Parser;

use crate::alive::Settings;
use crate::audit::Audit;
use crate::authority::Authority;
use crate::roles::Roles;

const EXAMPLES: &str = "\
Examples:
  bifrost-relay --store file:/var/lib/bifrost-relay --ca ca.pem --certificate relay.pem --key relay.key
                                      one relay, which keeps what it is told in a directory
  bifrost-relay --store etcd:https://10.0.0.1:2379,https://10.0.0.2:2379 --etcd-ca etcd-ca.pem --ca ca.pem ...
                                      one of several relays, with members of one etcd
  bifrost-relay --store memory --insecure --listen 127.0.0.1:4790
                                      to try it out: nothing is kept, and agents are believed

Then: bifrostctl fleet --help";

/// How long etcd may take for a request, with all that is tried again: longer than it takes to elect a leader.
const STORE_TIME: Duration = Duration::from_secs(8);

/// Takes what a network of many hosts is to be, keeps it in a store, and gives each host's agent what concerns that host
#[derive(Debug, Parser)]
#[command(version, after_help = EXAMPLES)]
pub(crate) struct Cli {
    /// Where objects are kept: `memory`, `file:DIRECTORY`, or `etcd:URL,URL,...`
    #[arg(long, value_name = "STORE", env = "BIFROST_RELAY_STORE")]
    pub(crate) store: Kept,
    /// The address that agents connect to
    #[arg(long, value_name = "ADDRESS:PORT", env = "BIFROST_RELAY_LISTEN", default_value_t = SocketAddr::from((Ipv4Addr::LOCALHOST, PORT)))]
    pub(crate) listen: SocketAddr,
    /// The Unix socket of the API, for `bifrostctl fleet`; without --roles all who may open it may change everything
    #[arg(long, value_name = "PATH", env = "BIFROST_RELAY_SOCKET", default_value = "/run/bifrost/relay.sock")]
    pub(crate) socket: PathBuf,
    /// Where to serve metrics for Prometheus (GET /metrics), such as 127.0.0.1:9790; anyone who reaches it may read
    #[arg(long, value_name = "ADDRESS:PORT", env = "BIFROST_RELAY_METRICS")]
    pub(crate) metrics: Option<SocketAddr>,
    /// Where to serve the console, a web page that shows hosts, networks and ports, such as 127.0.0.1:4791; anyone who
    /// reaches it may read
    #[arg(long, value_name = "ADDRESS:PORT", env = "BIFROST_RELAY_CONSOLE")]
    pub(crate) console: Option<SocketAddr>,
    /// Where to serve the API to operators over TLS, such as 0.0.0.0:4793; each shows a certificate, whose roles say what
    /// its holder may do
    #[arg(long, value_name = "ADDRESS:PORT", env = "BIFROST_RELAY_API", requires = "ca")]
    pub(crate) api: Option<SocketAddr>,
    /// A file (TOML) that says which users and groups of this machine may look at, or change, which projects, and which
    /// certificates of operators are revoked
    #[arg(long, value_name = "FILE", env = "BIFROST_RELAY_ROLES")]
    roles: Option<PathBuf>,
    /// A file that gets a line of JSON for each change that is made or refused: who, what, when
    #[arg(long, value_name = "FILE", env = "BIFROST_RELAY_AUDIT")]
    audit: Option<PathBuf>,
    /// Change nothing while that file cannot be written
    #[arg(long, requires = "audit")]
    audit_required: bool,
    #[command(flatten)]
    pub(crate) traces: traces::Settings,
    /// The authority whose certificates agents have, PEM
    #[arg(long, value_name = "FILE", env = "BIFROST_CA", requires_all = ["certificate", "key"])]
    ca: Option<PathBuf>,
    /// This relay's certificate, PEM
    #[arg(long, visible_alias = "cert", value_name = "FILE", env = "BIFROST_CERTIFICATE", requires_all = ["ca", "key"])]
    certificate: Option<PathBuf>,
    /// The key of the certificate, PEM
    #[arg(long, value_name = "FILE", env = "BIFROST_KEY", requires_all = ["ca", "certificate"])]
    key: Option<PathBuf>,
    /// The key of the authority, or of one of those of --ca: with it, hosts and operators get certificates from this relay. PEM
    #[arg(long, value_name = "FILE", env = "BIFROST_CA_KEY", requires = "ca")]
    ca_key: Option<PathBuf>,
    /// Where hosts that have a token get their first certificate, such as 0.0.0.0:4792
    #[arg(long, value_name = "ADDRESS:PORT", env = "BIFROST_RELAY_ENROLL", requires = "ca_key")]
    pub(crate) enroll: Option<SocketAddr>,
    /// How long the certificates of hosts are valid, seconds
    #[arg(long, value_name = "SECONDS", env = "BIFROST_HOST_LIFETIME_S", default_value_t = 30 * 86_400, requires = "ca_key",
          value_parser = clap::value_parser!(u64).range(5..=10 * 366 * 86_400))]
    host_lifetime_s: u64,
    /// Neither encrypt nor ask agents for certificates: each is believed which host it is for
    #[arg(long, conflicts_with = "ca")]
    insecure: bool,
    /// The authority of etcd's certificates, PEM; for `https`
    #[arg(long, value_name = "FILE", env = "BIFROST_ETCD_CA")]
    etcd_ca: Option<PathBuf>,
    /// A certificate to show to etcd, PEM
    #[arg(long, value_name = "FILE", env = "BIFROST_ETCD_CERTIFICATE", requires_all = ["etcd_ca", "etcd_key"])]
    etcd_certificate: Option<PathBuf>,
    /// The key of that certificate, PEM
    #[arg(long, value_name = "FILE", env = "BIFROST_ETCD_KEY", requires = "etcd_certificate")]
    etcd_key: Option<PathBuf>,
    /// A user of etcd; the password is in the environment, BIFROST_ETCD_PASSWORD
    #[arg(long, value_name = "NAME", env = "BIFROST_ETCD_USER")]
    etcd_user: Option<String>,
    /// When a host is dead: how long no agent of it must have been connected to any relay, seconds; 0: never
    #[arg(long, value_name = "SECONDS", env = "BIFROST_RELAY_DEAD_AFTER_S", default_value_t = 60, value_parser = parse_dead_after)]
    dead_after_s: u64,
    /// If more hosts of a hundred than this vanish within that time, none of them is taken for dead
    #[arg(long, value_name = "PERCENT", env = "BIFROST_RELAY_DEAD_MOST_PERCENT", default_value_t = 20,
          value_parser = clap::value_parser!(u32).range(0..=100))]
    dead_most_percent: u32,
    /// Withdraw the routes to ports of dead hosts, too. Guests of a host whose agent is gone, and whose bifrostd lives, are
    /// cut off then
    #[arg(long, env = "BIFROST_RELAY_WITHDRAW_ROUTES")]
    withdraw_routes: bool,
    /// A name that no other relay has; by default the host's, with the process's number
    #[arg(long, value_name = "NAME", env = "BIFROST_RELAY_NAME")]
    name: Option<String>,
}

impl Cli {
    /// The certificates to use; none with `--insecure`.
    pub(crate) fn tls(&self) -> Result<Option<Material>> {
        match (&self.ca, &self.certificate, &self.key) {
            (Some(ca), Some(certificate), Some(key)) => {
                let files = Files { ca: ca.clone(), certificate: certificate.clone(), key: key.clone() };
                Ok(Some(files.read()?))
            }
            _ if self.insecure => Ok(None),
            _ => bail!("name certificates with --ca, --certificate and --key; without them, to try it out: --insecure"),
        }
    }

    /// Opens the audit log, if there is to be one.
    pub(crate) fn open_audit(&self, relay: &str) -> Result<Option<Audit>> {
        let Some(path) = &self.audit else { return Ok(None) };
        let audit = Audit::open(path, relay, self.audit_required);
        let audit = audit.with_context(|| format!("--audit: {} cannot be opened for appending", path.display()))?;
        Ok(Some(audit))
    }

    /// Reads who may do what, if that is said.
    pub(crate) fn open_roles(&self) -> Result<Option<Arc<Roles>>> {
        let Some(path) = &self.roles else { return Ok(None) };
        let roles = Roles::open(path).map_err(|error| anyhow!("--roles: {}: {error}", path.display()))?;
        Ok(Some(Arc::new(roles)))
    }

    /// The authority that signs certificates of hosts, if this relay is to.
    pub(crate) fn open_authority(&self, tls: Option<&Material>) -> Result<Option<Authority>> {
        let (Some(key), Some(files)) = (&self.ca_key, tls) else { return Ok(None) };
        let lifetime = Duration::from_secs(self.host_lifetime_s);
        Ok(Some(Authority::open(files.authorities(), key, lifetime)?))
    }

    /// When hosts are dead, and what follows from it.
    pub(crate) fn deaths(&self) -> Settings {
        Settings {
            after: Duration::from_secs(self.dead_after_s),
            most_percent: self.dead_most_percent,
            withdrawn: if self.withdraw_routes { Withdrawn::Routes } else { Withdrawn::Backends },
        }
    }

    /// Opens the store.
    pub(crate) async fn open_store(&self) -> Result<Store> {
        match &self.store {
            Kept::Memory => Ok(Store::memory()),
            Kept::Directory(path) => Ok(Store::open(path)?),
            Kept::Etcd(endpoints) => Ok(Store::etcd(self.etcd_options(endpoints)?).await?),
        }
    }

    fn etcd_options(&self, endpoints: &[String]) -> Result<EtcdOptions> {
        let identity = self.etcd_certificate.clone().zip(self.etcd_key.clone());
        let tls = self.etcd_ca.clone().map(|ca| EtcdTls { ca, identity, name: None });
        let user = match &self.etcd_user {
            Some(name) => {
                let password = std::env::var("BIFROST_ETCD_PASSWORD");
                let password = password.context("--etcd-user: put the password into BIFROST_ETCD_PASSWORD")?;
                Some(EtcdUser { name: name.clone(), password })
            }
            None => None,
        };
        Ok(EtcdOptions { endpoints: endpoints.to_vec(), tls, user, timeout: STORE_TIME, ..EtcdOptions::default() })
    }

    /// The relay's name.
    pub(crate) fn name(&self) -> String {
        self.name.clone().unwrap_or_else(|| {
            let uname = rustix::system::uname();
            format!("{}:{}", uname.nodename().to_string_lossy(), std::process::id())
        })
    }
}

/// Where objects are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kept {
    Memory,
    Directory(PathBuf),
    Etcd(Vec<String>),
}

impl FromStr for Kept {
    type Err = String;

    fn from_str(text: &str) -> Result<Kept, String> {
        match text.split_once(':') {
            None if text == "memory" => Ok(Kept::Memory),
            Some(("file", path)) if !path.is_empty() => Ok(Kept::Directory(path.into())),
            Some(("etcd", endpoints)) if endpoints.split(',').all(is_url) => {
                Ok(Kept::Etcd(endpoints.split(',').map(str::to_owned).collect()))
            }
            _ => Err(format!("{text:?} is none of memory, file:DIRECTORY, and etcd:http://ADDRESS:PORT,...")),
        }
    }
}

impl fmt::Display for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kept::Memory => f.write_str("memory"),
            Kept::Directory(path) => write!(f, "file:{}", path.display()),
            Kept::Etcd(endpoints) => write!(f, "etcd:{}", endpoints.join(",")),
        }
    }
}

fn parse_dead_after(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(seconds @ (0 | 5..=86_400)) => Ok(seconds),
        _ => Err(format!("{text:?} is neither 0 nor a number of seconds from 5 to 86400")),
    }
}

fn is_url(endpoint: &str) -> bool {
    endpoint.starts_with("http://") || endpoint.starts_with("https://")
}
