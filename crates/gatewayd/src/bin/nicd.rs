//! `bifrost-nicd`: the NIC pipeline in front of gateway pods.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use bifrost_gatewayd::{nicd, program};
use clap::Parser;

/// The NIC pipeline in front of gateway pods: sprays packets of all tenants over the cores of pods, puts them back in order, and stops
/// tenants that send too much before they cost a core anything.
///
/// It takes all frames of one network device (AF_XDP or AF_PACKET). A VLAN tag names a pod's interface; pods connect over memif sockets
/// (`bifrost-gw`, or any memif client that returns trailers). SIGTERM ends it. The log goes to standard error; RUST_LOG=debug makes it
/// say more. `--check` validates the configuration, with the line of each error.
#[derive(Debug, Parser)]
#[command(name = "bifrost-nicd", version, max_term_width = 100)]
struct Cli {
    /// The configuration file.
    #[arg(long, short, value_name = "FILE", default_value = "/etc/bifrost/nicd.toml")]
    config: PathBuf,
    /// Check the configuration and exit: 0 if it is good, 1 if not.
    #[arg(long)]
    check: bool,
    /// Print the state of a running bifrost-nicd of this configuration as JSON, and exit.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    program::start_log();
    program::exit("bifrost-nicd", run(&Cli::parse()))
}

fn run(cli: &Cli) -> Result<()> {
    let config = nicd::Config::load(&cli.config)?;
    if cli.json {
        return program::print_status(&config.control);
    }
    if cli.check {
        println!("{}: good", cli.config.display());
        return Ok(());
    }
    let signals = program::signals()?;
    let nicd = nicd::Nicd::start(config)?;
    program::wait(signals);
    nicd.stop();
    Ok(())
}
