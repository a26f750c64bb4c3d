//! Queues of the devices of a running daemon.

use std::collections::BTreeSet;
use std::sync::Arc;

use bifrost_control::config::Config;

use super::with_one_queue;
use crate::container::may_keep_tap;
use crate::daemon::State;

impl State {
    /// A next configuration as the devices allow it.
    pub(crate) fn as_devices_allow(&self, config: Arc<Config>) -> Arc<Config> {
        if self.single_queue.is_empty() { config } else { with_one_queue(config.clone(), &self.still_single(&config)) }
    }

    /// The ports that keep a device with a single queue in a next configuration.
    pub(crate) fn still_single(&self, config: &Config) -> BTreeSet<String> {
        let keeps = |name: &&String| match (self.config.port(name), config.port(name)) {
            (Some(old), Some(new)) => may_keep_tap(old, new),
            _ => false,
        };
        self.single_queue.iter().filter(keeps).cloned().collect()
    }
}
