//! `bifrost-gw`: a gateway pod.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use bifrost_gatewayd::{pod, program};
use clap::Parser;

/// A gateway pod: forwards packets between VPCs, to the Internet, to customers' networks and to cloud services.
///
/// It connects to `bifrost-nicd` over memif and has a worker for each core, which takes a packet, decides and returns it. A control thread answers
/// ARP, neighbour discovery and ping, and resolves next hops. SIGTERM ends it. The log goes to standard error; RUST_LOG=debug makes it
/// say more. `--check` validates the configuration, with the line of each error.
#[derive(Debug, Parser)]
#[command(name = "bifrost-gw", version, max_term_width = 100)]
struct Cli {
    /// The configuration file.
    #[arg(long, short, value_name = "FILE", default_value = "/etc/bifrost/gw.toml")]
    config: PathBuf,
    /// Check the configuration and exit: 0 if it is good, 1 if not.
    #[arg(long)]
    check: bool,
    /// Print the state of a running bifrost-gw of this configuration as JSON, and exit.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    program::start_log();
    program::exit("bifrost-gw", run(&Cli::parse()))
}

fn run(cli: &Cli) -> Result<()> {
    let config = pod::Config::load(&cli.config)?;
    if cli.json {
        return program::print_status(&config.control);
    }
    if cli.check {
        println!("{}: good", cli.config.display());
        return Ok(());
    }
    let signals = program::signals()?;
    let pod = pod::GatewayPod::start(config)?;
    program::wait(signals);
    pod.stop();
    Ok(())
}
