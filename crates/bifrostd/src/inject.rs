//! Injects panics and slow steps, for tests of the whole daemon. Only in debug builds, and only if an environment
//! variable names a file: an operator cannot trigger it.
//!
//! The file contains a stage and a port, or `-` for the port that is served next. With the word `slow` in front, each
//! such step takes 5 ms from then on, with `stuck` 1.5 s; otherwise one step panics. The file is removed once the
//! injection is set.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bifrost_datapath::{Effect, Injection, Of, Stage};
use bifrost_port::vhost::inject::panic_at_next_message;

use crate::daemon::Daemon;

/// Environment variable with the file's path.
const VARIABLE: &str = "BIFROST_INJECT_PANIC";
const POLL: Duration = Duration::from_millis(10);

/// Polls the file while the daemon runs.
pub(crate) fn listen(daemon: &Arc<Daemon>) {
    let Some(file) = std::env::var_os(VARIABLE).map(PathBuf::from) else { return };
    tracing::warn!(file = %file.display(), "panics can be injected: this is a test run");
    let daemon = Arc::downgrade(daemon);
    let poll = move || {
        while let Some(daemon) = daemon.upgrade() {
            if let Ok(text) = std::fs::read_to_string(&file)
                && let Some((stage, port)) = text.trim_end_matches('\n').rsplit_once(' ')
            {
                inject(&daemon, stage, port);
                let _ = std::fs::remove_file(&file);
            }
            drop(daemon);
            std::thread::sleep(POLL);
        }
    };
    if let Err(error) = std::thread::Builder::new().name("inject".into()).spawn(poll) {
        tracing::error!(%error, "panics cannot be injected");
    }
}

fn inject(daemon: &Daemon, stage: &str, port: &str) {
    let (effect, stage) = match stage.split_once(' ') {
        Some(("slow", stage)) => (Effect::Busy(5_000_000), stage),
        Some(("stuck", stage)) => (Effect::Busy(1_500_000_000), stage),
        _ => (Effect::Panic, stage),
    };
    let Some(stage) = Stage::ALL.into_iter().find(|s| s.name() == stage) else { return };
    if stage == Stage::Message {
        return panic_at_next_message(port);
    }
    let state = daemon.state();
    let of = match port {
        "-" => Some(Of::Anybody),
        name => state.names.port(name).map(Of::Port),
    };
    if let Some(of) = of {
        let _ = state.on_all(move |worker| worker.core_mut().inject(Injection { stage, of, effect }));
    }
}
