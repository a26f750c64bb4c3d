//! The command line. `bifrostctl`'s example `manual` describes it, too.

use std::path::PathBuf;

use clap::Parser;

/// The Bifrost virtual switch: attaches guests, carries their packets between hosts over several paths, and repairs
/// losses before the guests' TCP notices.
///
/// The configuration is one TOML file; `--check` validates it without touching anything. Look into a running daemon
/// with `bifrostctl`. SIGHUP reads the file again; packets of unchanged ports are not disturbed. SIGTERM ends cleanly.
/// The log goes to standard error; RUST_LOG=debug makes it say more.
#[derive(Parser, Debug)]
#[command(version, max_term_width = 100)]
pub(crate) struct Cli {
    /// The configuration file.
    #[arg(long, short, value_name = "FILE", default_value = "/etc/bifrost/bifrostd.toml")]
    pub(crate) config: PathBuf,
    /// Where to keep the objects that are applied one at a time, so that they outlive the daemon; without it they do not.
    #[arg(long, value_name = "DIRECTORY", env = "STATE_DIRECTORY")]
    pub(crate) state: Option<PathBuf>,
    /// Check the configuration, print all its errors, and exit: 0 if it is good, 1 if not.
    #[arg(long)]
    pub(crate) check: bool,
    /// Remove the containers' devices that a daemon with this configuration has left behind, and exit: 0 if none is left.
    #[arg(long, conflicts_with = "check")]
    pub(crate) remove_devices: bool,
    /// Go on with the work of the daemon that starts this one, as `bifrostctl upgrade` has it do; standard input is that one's socket.
    #[arg(long, conflicts_with_all = ["check", "remove_devices"])]
    pub(crate) take_over: bool,
}
