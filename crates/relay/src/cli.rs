//! The command line.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Context, Result, bail};
use bifrost_relay_api::limits::PORT;
use bifrost_relay_api::tls::{Files, Material};
use bifrost_store::Store;
use clap::Parser;

const EXAMPLES: &str = "\
Examples:
  bifrost-relay --store file:/var/lib/bifrost-relay --ca ca.pem --certificate relay.pem --key relay.key
                                      one relay, which keeps what it is told in a directory
  bifrost-relay --store memory --insecure --listen 127.0.0.1:4790
                                      to try it out: nothing is kept, and agents are believed

Then: bifrostctl fleet --help";

/// Takes what a network of many hosts is to be, keeps it in a store, and gives each host's agent what concerns that host
#[derive(Debug, Parser)]
#[command(version, after_help = EXAMPLES)]
pub(crate) struct Cli {
    /// Where objects are kept: `memory`, or `file:DIRECTORY`
    #[arg(long, value_name = "STORE")]
    pub(crate) store: Kept,
    /// The address that agents connect to
    #[arg(long, value_name = "ADDRESS:PORT", default_value_t = SocketAddr::from((Ipv4Addr::LOCALHOST, PORT)))]
    pub(crate) listen: SocketAddr,
    /// The Unix socket of the API, for `bifrostctl fleet`; all who may open it may change everything
    #[arg(long, value_name = "PATH", default_value = "/run/bifrost/relay.sock")]
    pub(crate) socket: PathBuf,
    /// The authority whose certificates agents have, PEM
    #[arg(long, value_name = "FILE", requires_all = ["certificate", "key"])]
    ca: Option<PathBuf>,
    /// This relay's certificate, PEM
    #[arg(long, visible_alias = "cert", value_name = "FILE", requires_all = ["ca", "key"])]
    certificate: Option<PathBuf>,
    /// The key of the certificate, PEM
    #[arg(long, value_name = "FILE", requires_all = ["ca", "certificate"])]
    key: Option<PathBuf>,
    /// Neither encrypt nor ask agents for certificates: each is believed which host it is for
    #[arg(long, conflicts_with = "ca")]
    insecure: bool,
    /// A name that no other relay has; by default the host's, with the process's number
    #[arg(long, value_name = "NAME")]
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
}

impl Kept {
    /// Opens the store.
    pub(crate) fn open(&self) -> Result<Store> {
        match self {
            Kept::Memory => Ok(Store::memory()),
            Kept::Directory(path) => {
                Store::open(path).with_context(|| format!("cannot open the store in {}", path.display()))
            }
        }
    }
}

impl FromStr for Kept {
    type Err = String;

    fn from_str(text: &str) -> Result<Kept, String> {
        match text.split_once(':') {
            None if text == "memory" => Ok(Kept::Memory),
            Some(("file", path)) if !path.is_empty() => Ok(Kept::Directory(path.into())),
            _ => Err(format!("{text:?} is neither memory nor file:DIRECTORY")),
        }
    }
}

impl fmt::Display for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kept::Memory => f.write_str("memory"),
            Kept::Directory(path) => write!(f, "file:{}", path.display()),
        }
    }
}
