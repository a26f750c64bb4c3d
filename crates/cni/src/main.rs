//! `bifrost-cni`: a CNI plugin that attaches containers to this host's `bifrostd`.

use std::io::{IsTerminal as _, Read as _, Write as _};
use std::process::ExitCode;

use bifrost_cni::call::Call;
use bifrost_cni::error::{Code, Error};
use bifrost_cni::network::MAX_BYTES;
use bifrost_cni::plugin;
use clap::{CommandFactory as _, Parser};
use serde_json::Value;

/// Attaches containers to this host's bifrostd, as a CNI plugin (versions 0.4.0, 1.0.0 and 1.1.0).
///
/// Container runtimes run it, with the command in CNI_COMMAND (ADD, DEL, CHECK, GC, STATUS, VERSION) and the network's
/// configuration on standard input. It creates a port of bifrostd for each container, with the device in the
/// container's network namespace, and returns when the port forwards packets. Ports belong to the owner "cni.NETWORK":
/// `bifrostctl objects --owner cni.NETWORK`.
#[derive(Parser, Debug)]
#[command(version, max_term_width = 100)]
#[command(after_help = "KEYS OF A NETWORK'S CONFIGURATION:
  vni              the VPC, a [[vpc]] of bifrostd; required
  socket           bifrostd's control socket; default /run/bifrost/bifrostd.sock
  ipam             the plugin that gives out addresses, such as host-local
  security_groups, mtu, queues, tx_mbit, tx_kpps, rx_mbit, rx_kpps
                   as in bifrostd's [[port]]
  capabilities     ips, mac, bandwidth

EXAMPLE, /etc/cni/net.d/10-bifrost.conflist:
  {\"cniVersion\": \"1.1.0\", \"name\": \"pods\", \"plugins\": [
    {\"type\": \"bifrost-cni\", \"vni\": 100, \"security_groups\": [\"web\"],
     \"ipam\": {\"type\": \"host-local\", \"ranges\": [[{\"subnet\": \"10.0.0.0/24\", \"gateway\": \"10.0.0.254\"}]],
                \"routes\": [{\"dst\": \"0.0.0.0/0\"}]}}]}")]
struct Cli {}

fn main() -> ExitCode {
    Cli::parse();
    if std::env::var_os("CNI_COMMAND").is_none() && std::io::stdin().is_terminal() {
        // Run by hand in a terminal.
        let _ = Cli::command().print_help();
        return ExitCode::SUCCESS;
    }
    let mut configuration = Vec::new();
    let answer = match work(&mut configuration) {
        Ok(None) => return ExitCode::SUCCESS,
        Ok(Some(answer)) => Ok(answer.to_string()),
        Err(error) => Err(error.to_json(plugin::version_of(&configuration))),
    };
    let (Ok(text) | Err(text)) = &answer;
    // If the output cannot be written, the exit status still reports the failure.
    let is_written = writeln!(std::io::stdout(), "{text}").is_ok();
    if answer.is_ok() && is_written { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn work(configuration: &mut Vec<u8>) -> Result<Option<Value>, Error> {
    let call = Call::of(|name| std::env::var(name).ok())?;
    let read = std::io::stdin().take(MAX_BYTES + 1).read_to_end(configuration);
    read.map_err(|e| {
        Error::new(Code::Io, format!("cannot read the network's configuration from standard input: {e}"))
    })?;
    if configuration.len() as u64 > MAX_BYTES {
        configuration.clear();
        return Err(Error::new(Code::Decoding, format!("the network's configuration has more than {MAX_BYTES} bytes")));
    }
    plugin::run(&call, configuration)
}
