//! Reports of reloads.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Maximum number of names of a kind that are displayed.
const NAMED: usize = 10;

/// The outcome of `POST /v1/reload`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReloadReport {
    /// Ports, by name.
    pub ports: Changed,
    /// Routes, as `vni 100 10.0.0.2/32`.
    pub routes: Changed,
    /// Peers, by name.
    pub peers: Changed,
    /// Peerings with other VPCs.
    pub peerings: Changed,
    /// VPCs, by VNI.
    pub vpcs: Changed,
    /// Security groups, by name.
    pub security_groups: Changed,
    /// Address sets, by name.
    pub address_sets: Changed,
    /// Load balancers, by name.
    pub load_balancers: Changed,
    /// Uplinks, by port.
    pub uplinks: Changed,
    /// Shared addresses, as `vni 100`.
    pub nat: Changed,
    /// Floating addresses.
    pub floating_ips: Changed,
    /// Forwards, as `tcp 203.0.113.1:80`.
    pub port_forwards: Changed,
    /// Mirrors, by name.
    pub mirrors: Changed,
    /// Flow logs of VPCs and ports, by name.
    pub flow_logs: Changed,
    /// Whether the host's flow log changed.
    pub flow_log_changed: bool,
    /// Whether the bounds of sessions changed.
    pub sessions_changed: bool,
    /// Whether the rate to other hosts, or its queues, changed.
    pub qos_changed: bool,
    /// Whether transport settings changed.
    pub transport_changed: bool,
}

/// Names of added, removed and changed objects of a kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Changed {
    /// Only in the new configuration.
    pub added: Vec<String>,
    /// Only in the old configuration.
    pub removed: Vec<String>,
    /// In both, but different.
    pub changed: Vec<String>,
}

impl Changed {
    /// Whether nothing changed.
    pub fn is_empty(&self) -> bool {
        self.added.is_empty() && self.removed.is_empty() && self.changed.is_empty()
    }
}

impl ReloadReport {
    /// Whether nothing changed.
    pub fn is_empty(&self) -> bool {
        let settings = self.transport_changed || self.sessions_changed || self.qos_changed || self.flow_log_changed;
        !settings && self.kinds().iter().all(|(_, changed)| changed.is_empty())
    }

    fn kinds(&self) -> [(&'static str, &Changed); 14] {
        [
            ("ports", &self.ports),
            ("routes", &self.routes),
            ("peers", &self.peers),
            ("peerings", &self.peerings),
            ("vpcs", &self.vpcs),
            ("security groups", &self.security_groups),
            ("address sets", &self.address_sets),
            ("load balancers", &self.load_balancers),
            ("uplinks", &self.uplinks),
            ("nat", &self.nat),
            ("floating IPs", &self.floating_ips),
            ("port forwards", &self.port_forwards),
            ("mirrors", &self.mirrors),
            ("flow logs", &self.flow_logs),
        ]
    }
}

/// One line for each kind of change; long lists of names are truncated.
impl fmt::Display for ReloadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("reloaded; nothing changed");
        }
        f.write_str("reloaded")?;
        for (kind, Changed { added, removed, changed }) in self.kinds() {
            for (verb, names) in [("added", added), ("removed", removed), ("changed", changed)] {
                if !names.is_empty() {
                    let more = names.len().saturating_sub(NAMED);
                    write!(f, "\n{kind} {verb}: {}", names[..names.len() - more].join(", "))?;
                    if more > 0 {
                        write!(f, " and {more} more")?;
                    }
                }
            }
        }
        if self.flow_log_changed {
            f.write_str("\nflow logs changed")?;
        }
        if self.sessions_changed {
            f.write_str("\nbounds of sessions changed")?;
        }
        if self.qos_changed {
            f.write_str("\nthe rate to other hosts changed")?;
        }
        if self.transport_changed {
            f.write_str("\ntransport settings changed; they take effect with the next upgrade or restart of bifrostd")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_changed_in_words() {
        let mut report = ReloadReport::default();
        assert_eq!(report.to_string(), "reloaded; nothing changed");
        report.ports.added = vec!["a".into(), "b".into()];
        report.routes.removed = vec!["vni 1 10.0.0.2/32".into()];
        report.routes.changed = (0..1000).map(|n| n.to_string()).collect();
        report.transport_changed = true;
        assert_eq!(
            report.to_string(),
            "reloaded\nports added: a, b\nroutes removed: vni 1 10.0.0.2/32\n\
             routes changed: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 990 more\n\
             transport settings changed; they take effect with the next upgrade or restart of bifrostd"
        );
    }
}
