//! Which flow logs a configuration wants, and of which ports.

use bifrost_control::config::{Config, FlowLog};

/// The name of the host's flow log, `[flow_log]`.
pub(super) const HOST: &str = "";

/// The logs that a configuration wants: their names and settings.
pub(crate) fn wanted(config: &Config) -> impl Iterator<Item = (&str, &FlowLog)> {
    let of_host = config.flow_log.iter().map(|log| (HOST, log));
    of_host.chain(config.flow_logs.iter().map(|log| (log.name.as_str(), &log.log)))
}

/// The ports whose flows are logged.
pub(crate) fn ports<'a>(config: &'a Config, log: &'a FlowLog) -> impl Iterator<Item = &'a str> {
    config.ports.iter().filter(|port| log.has(port)).map(|port| port.name.as_str())
}
