//! Panics and slowness on demand, for the tests of the whole daemon. Only in debug builds, and only if the environment names a file: no operator can
//! bring them about.
//!
//! The file has a stage and a port, or `-` for the port whose turn it is; after the word `slow`, each such step takes 5 ms from now on, after `stuck` 1.5 s, instead of one
//! panic. The file is removed once that is so.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bifrost_datapath::{Effect, Injection, Of, Stage};
use bifrost_port::vhost::inject::panic_at_next_message;

use crate::daemon::Daemon;

/// Names the file.
const VARIABLE: &str = "BIFROST_INJECT_PANIC";
const LOOK: Duration = Duration::from_millis(10);

/// Looks for the file as long as the daemon runs.
pub(crate) fn listen(daemon: &Arc<Daemon>) {
    let Some(file) = std::env::var_os(VARIABLE).map(PathBuf::from) else { return };
    tracing::warn!(file = %file.display(), "panics can be injected: this is a test");
    let daemon = Arc::downgrade(daemon);
    let look = move || {
        while let Some(daemon) = daemon.upgrade() {
            if let Ok(text) = std::fs::read_to_string(&file)
                && let Some((stage, port)) = text.trim_end_matches('\n').rsplit_once(' ')
            {
                inject(&daemon, stage, port);
                let _ = std::fs::remove_file(&file);
            }
            drop(daemon);
            std::thread::sleep(LOOK);
        }
    };
    if let Err(error) = std::thread::Builder::new().name("inject".into()).spawn(look) {
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
