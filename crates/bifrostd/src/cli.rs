//! The command line. `bifrostctl`'s example `manual` builds the manual page from it.

use std::path::PathBuf;

use clap::Parser;

/// The Bifrost virtual switch: attaches guests, carries their packets between hosts over several paths, and retransmits
/// lost packets before the guests' TCP notices.
///
/// The configuration is one TOML file; `--check` validates it without changing anything. `bifrostctl` shows the state
/// of a running daemon. SIGHUP reloads the file without disturbing the traffic of unchanged ports. SIGTERM stops the
/// daemon. The log goes to standard error; RUST_LOG=debug makes it more verbose.
#[derive(Parser, Debug)]
#[command(version, max_term_width = 100)]
pub(crate) struct Cli {
    /// The configuration file.
    #[arg(long, short, value_name = "FILE", default_value = "/etc/bifrost/bifrostd.toml")]
    pub(crate) config: PathBuf,
    /// Directory for objects that are applied through the API, so that they survive a restart; without it they are
    /// lost.
    #[arg(long, value_name = "DIRECTORY", env = "STATE_DIRECTORY")]
    pub(crate) state: Option<PathBuf>,
    /// Check the configuration, print all errors, and exit: 0 if it is valid, 1 if not.
    #[arg(long)]
    pub(crate) check: bool,
    /// Remove containers' devices that a daemon with this configuration has left behind, and exit: 0 if none remains.
    #[arg(long, conflicts_with = "check")]
    pub(crate) remove_devices: bool,
    /// Take over from the daemon that starts this one (for `bifrostctl upgrade`); standard input is a socket to it.
    #[arg(long, conflicts_with_all = ["check", "remove_devices"])]
    pub(crate) take_over: bool,
}
