//! Scenarios: the input of a run, from a file or a program.

mod settings;
mod workload;

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::link::{LinkConfig, LinkPatch};
use crate::units::{Bytes, Ns, Rate};

pub use settings::{CongestionControl, TransportSettings};
pub use workload::{Gap, Hosts, Members, Workload};

/// The input of a run, except its seed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// Its name.
    #[serde(default)]
    pub name: String,
    /// Maximum duration of the run, which ends earlier when everything is finished. Unfinished work is reported.
    pub duration: Ns,
    /// How long the world continues after everything is finished, for example to let connections become idle.
    #[serde(default)]
    pub settle: Ns,
    /// Run for all of `duration`, even when all workloads are finished.
    #[serde(default)]
    pub run_to_end: bool,
    /// Width of the bins of throughput curves; 0: no curves.
    #[serde(default)]
    pub bin: Ns,
    /// The physical network.
    pub topology: Topology,
    /// Transport paths between two hosts, 1..=8. The parallel topology overrides it with its own `paths`.
    #[serde(default = "four")]
    pub paths: u8,
    /// Transport paths that the i-th host uses to other hosts, 1 to `paths`. Hosts without an entry use `paths`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub host_paths: Vec<u8>,
    /// Properties of hosts.
    #[serde(default)]
    pub host: HostConfig,
    /// Settings of the transport that differ from the defaults.
    #[serde(default)]
    pub transport: TransportSettings,
    /// Virtual networks; by default VNI 100 with the default policy.
    #[serde(default)]
    pub vnis: Vec<VniConfig>,
    /// Guests, numbered in the order of these groups. By default one on each host.
    #[serde(default)]
    pub guests: Vec<GuestGroup>,
    /// Traffic of guests.
    #[serde(default)]
    pub workloads: Vec<Workload>,
    /// Faults.
    #[serde(default)]
    pub faults: Vec<FaultConfig>,
}

fn four() -> u8 {
    4
}

/// The physical network.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Topology {
    /// Disjoint paths between any two hosts, one link each: source port i is path i. Links are named "h0>h1/2".
    Parallel {
        /// Hosts.
        hosts: u32,
        /// Paths between any two hosts, 1..=8.
        paths: u8,
        /// All links.
        #[serde(default)]
        link: LinkPatch,
        /// Properties of individual paths, in order from path 0.
        #[serde(default)]
        path: Vec<LinkPatch>,
    },
    /// Hosts around one switch. Links are named "h0>s0" and "s0>h0".
    Star {
        /// Hosts.
        hosts: u32,
        /// All links.
        #[serde(default)]
        link: LinkPatch,
    },
    /// Leaves and spines. Links are named "h0>leaf0", "leaf0>spine1".
    Clos2 {
        /// Leaf switches.
        leaves: u32,
        /// Spine switches, each connected to all leaves.
        spines: u32,
        /// Hosts below each leaf.
        hosts_per_leaf: u32,
        /// Links of hosts.
        #[serde(default)]
        host_link: LinkPatch,
        /// Links between switches.
        #[serde(default)]
        fabric_link: LinkPatch,
    },
    /// Pods of top-of-rack and aggregation switches below cores. Links are named "h0>tor0.0", "tor0.0>agg0.1",
    /// "agg0.1>core3".
    Clos3 {
        /// Pods.
        pods: u32,
        /// Top-of-rack switches in a pod.
        tors_per_pod: u32,
        /// Aggregation switches in a pod, each connected to all its ToRs.
        aggs_per_pod: u32,
        /// Core switches above each aggregation switch. The i-th aggregation switches of all pods share their core
        /// switches.
        cores_per_agg: u32,
        /// Hosts below each ToR.
        hosts_per_tor: u32,
        /// Links of hosts.
        #[serde(default)]
        host_link: LinkPatch,
        /// Links between switches.
        #[serde(default)]
        fabric_link: LinkPatch,
    },
}

impl Topology {
    /// Number of hosts.
    pub fn hosts(&self) -> u32 {
        match self {
            Topology::Parallel { hosts, .. } | Topology::Star { hosts, .. } => *hosts,
            Topology::Clos2 { leaves, hosts_per_leaf, .. } => leaves * hosts_per_leaf,
            Topology::Clos3 { pods, tors_per_pod, hosts_per_tor, .. } => pods * tors_per_pod * hosts_per_tor,
        }
    }
}

/// Properties of hosts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HostConfig {
    /// CPU time of a turn of the loop, at least 1 ns.
    pub turn_cost: Ns,
    /// CPU time per packet received, fetched or sent in a turn.
    pub packet_cost: Ns,
    /// Size of the receive socket buffer, bytes.
    pub receive_queue: Bytes,
    /// Transmit buffers of each vNIC.
    pub tx_ring: u32,
    /// Receive buffers of each vNIC.
    pub rx_ring: u32,
    /// Maximum length of guests' IP packets, bytes.
    pub mtu: u16,
    /// Guests with a TCP send up to 44 segments in one large frame, which the host segments (TSO).
    pub tso: bool,
    /// Outer DSCP of the transport's acknowledgements and set-up packets, 0 to 63.
    pub control_dscp: u8,
    /// Time until a crashed daemon runs again, if the fault has no end.
    pub restart_after: Ns,
}

impl Default for HostConfig {
    fn default() -> Self {
        HostConfig {
            turn_cost: Ns(1_000),
            packet_cost: Ns(300),
            receive_queue: Bytes(8 << 20),
            tx_ring: 1024,
            rx_ring: 1024,
            mtu: 1500,
            tso: false,
            control_dscp: 0,
            restart_after: Ns::ms(10),
        }
    }
}

/// A virtual network.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VniConfig {
    /// Its identifier.
    pub id: u32,
    /// "tcp", "all" or "off".
    #[serde(default)]
    pub reliability: Reliability,
    /// "flow", "strict" or "off".
    #[serde(default)]
    pub ordering: Ordering,
    /// Its weight among the networks when paths are full.
    #[serde(default = "weight", skip_serializing_if = "is_one")]
    pub weight: u8,
}

fn weight() -> u8 {
    1
}

fn is_one(weight: &u8) -> bool {
    *weight == 1
}

/// Which packets are carried reliably.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reliability {
    /// Only TCP.
    #[default]
    Tcp,
    /// All.
    All,
    /// None.
    Off,
}

/// The order in which guests see packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ordering {
    /// Per flow.
    #[default]
    Flow,
    /// Per vNIC pair.
    Strict,
    /// As they arrive.
    Off,
}

/// Some guests of one network.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuestGroup {
    /// Their network.
    pub vni: u32,
    /// Their hosts: "all" or a list.
    #[serde(default)]
    pub hosts: Hosts,
    /// Number of guests per host.
    #[serde(default = "one")]
    pub per_host: u32,
    /// Maximum sending rate of each guest; further packets wait in its ring. Absent: unlimited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tx_rate: Option<Rate>,
    /// Maximum receiving rate of each guest; further packets are dropped, and the transport retransmits them. Absent:
    /// unlimited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rx_rate: Option<Rate>,
    /// The weight of each guest within its network when paths are full.
    #[serde(default = "weight", skip_serializing_if = "is_one")]
    pub weight: u8,
}

fn one() -> u32 {
    1
}

/// A fault. Exactly one of `links`, `crash`, `pause`, `stall` and `port` selects its kind.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FaultConfig {
    /// Start time.
    pub at: Ns,
    /// End time; absent: the fault does not end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub until: Option<Ns>,
    /// Links by name; `*` stands for any characters. They get the `set` properties, and their original ones at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub links: Option<String>,
    /// Changes to these links.
    pub set: LinkPatch,
    /// Only this many of the matching links, chosen by the seed. 0: all.
    pub some: u32,
    /// The other direction of each link has the same fault at the same time, as with a broken cable.
    pub both_ways: bool,
    /// From start to end, the links go down and up at random: mean down time. 0: the fault is constant.
    pub flap_down: Ns,
    /// ... and mean up time.
    pub flap_up: Ns,
    /// The daemon of this host crashes and loses all its state; its guests continue. It restarts at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub crash: Option<u32>,
    /// The daemon of this host gets no CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pause: Option<u32>,
    /// This guest stops receiving, or receives slowly: see `receive_gap`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stall: Option<u32>,
    /// For `stall`: interval at which the guest receives one frame. 0: it receives none.
    pub receive_gap: Ns,
    /// Faults between this guest and its switch, by the daemon's fault injection.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<u32>,
    /// For `port`: whether packets to the guest (true, the default) or from it (false) are affected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to_guest: Option<bool>,
    /// For `port`: probability that a packet is lost.
    pub loss: f64,
    /// For `port`: probability that one bit of a packet flips, which the receiving host must detect.
    pub corruption: f64,
    /// For `port`: probability that a packet is duplicated.
    pub duplication: f64,
}

/// Why a scenario is invalid.
#[derive(Debug, thiserror::Error)]
pub enum ScenarioError {
    /// The file cannot be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: String,
        /// The cause.
        source: std::io::Error,
    },
    /// It is not a valid scenario file.
    #[error("{path}: {source}")]
    Syntax {
        /// The file.
        path: String,
        /// Position and error.
        source: Box<toml::de::Error>,
    },
    /// A value is invalid.
    #[error("{field}: {problem}")]
    Value {
        /// The field.
        field: String,
        /// The error, and valid values.
        problem: String,
    },
}

impl Scenario {
    /// Reads a file.
    ///
    /// # Errors
    /// It cannot be read, or is not a scenario.
    pub fn load(path: &Path) -> Result<Self, ScenarioError> {
        let name = path.display().to_string();
        let text =
            std::fs::read_to_string(path).map_err(|source| ScenarioError::Read { path: name.clone(), source })?;
        Self::parse(&name, &text)
    }

    /// Reads TOML; `name` is for messages.
    ///
    /// # Errors
    /// It is not a scenario.
    pub fn parse(name: &str, text: &str) -> Result<Self, ScenarioError> {
        let mut scenario: Scenario = toml::from_str(text)
            .map_err(|source| ScenarioError::Syntax { path: name.to_string(), source: Box::new(source) })?;
        scenario.complete();
        scenario.check()?;
        Ok(scenario)
    }

    /// Serialises it as a file.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).unwrap_or_else(|error| format!("# cannot be written: {error}"))
    }

    /// Fills in the defaults.
    pub fn complete(&mut self) {
        if let Topology::Parallel { paths, .. } = &self.topology {
            self.paths = *paths;
        }
        if self.vnis.is_empty() {
            self.vnis.push(VniConfig { id: 100, reliability: Reliability::Tcp, ordering: Ordering::Flow, weight: 1 });
        }
        if self.guests.is_empty() {
            let vni = self.vnis[0].id;
            self.guests.push(GuestGroup {
                vni,
                hosts: Hosts::All,
                per_host: 1,
                tx_rate: None,
                rx_rate: None,
                weight: 1,
            });
        }
    }

    /// Checks it.
    ///
    /// # Errors
    /// The first invalid value.
    pub fn check(&self) -> Result<(), ScenarioError> {
        let wrong = |field: &str, problem: String| Err(ScenarioError::Value { field: field.to_string(), problem });
        let hosts = self.topology.hosts();
        if !(1..=60_000).contains(&hosts) {
            return wrong("topology", format!("{hosts} hosts; use 1 to 60000"));
        }
        if !(1..=8).contains(&self.paths) {
            return wrong("paths", format!("{} paths; use 1 to 8", self.paths));
        }
        if let Some((host, paths)) = (0..).zip(&self.host_paths).find(|(_, paths)| !(1..=self.paths).contains(*paths)) {
            return wrong(
                &format!("host_paths[{host}]"),
                format!("{paths} paths; use 1 to {}, the `paths`", self.paths),
            );
        }
        if self.host_paths.len() > hosts as usize {
            return wrong("host_paths", format!("{} entries for {hosts} hosts", self.host_paths.len()));
        }
        if self.host.turn_cost.0 == 0 {
            return wrong("host.turn_cost", "use at least 1ns, or time could stand still".into());
        }
        if self.host.tx_ring == 0 || self.host.rx_ring == 0 {
            return wrong("host", "a ring needs at least one buffer".into());
        }
        if let Topology::Parallel { path, paths, .. } = &self.topology
            && path.len() > usize::from(*paths)
        {
            return wrong("topology.path", format!("{} entries for {paths} paths", path.len()));
        }
        for patch in self.link_patches() {
            let c = patch.on(LinkConfig::default());
            for (name, p) in [
                ("loss", c.loss),
                ("corruption", c.corruption),
                ("duplication", c.duplication),
                ("reordering", c.reordering),
            ] {
                if !(0.0..=1.0).contains(&p) {
                    return wrong(name, format!("{p} is not a probability: use 0.0 to 1.0"));
                }
            }
        }
        for (i, group) in self.guests.iter().enumerate() {
            if !self.vnis.iter().any(|v| v.id == group.vni) {
                return wrong(&format!("guests[{i}].vni"), format!("unknown VNI {}; add it to [[vnis]]", group.vni));
            }
            if group.tx_rate.into_iter().chain(group.rx_rate).any(|rate| rate.0 < 8) {
                return wrong(&format!("guests[{i}]"), "a rate needs at least 8 bits a second; or leave it out".into());
            }
            if let Some(host) = group.hosts.iter(hosts).find(|h| *h >= hosts) {
                return wrong(&format!("guests[{i}].hosts"), format!("there is no host {host}; there are {hosts}"));
            }
        }
        let guests = self.guest_count();
        for (i, workload) in self.workloads.iter().enumerate() {
            workload.check(guests, self.host.mtu).map_err(|(field, problem)| ScenarioError::Value {
                field: format!("workloads[{i}].{field}"),
                problem,
            })?;
        }
        for (i, f) in self.faults.iter().enumerate() {
            let kinds = [f.links.is_some(), f.crash.is_some(), f.pause.is_some(), f.stall.is_some(), f.port.is_some()];
            let field = format!("faults[{i}]");
            if kinds.iter().filter(|k| **k).count() != 1 {
                return wrong(&field, "set exactly one of links, crash, pause, stall and port".into());
            }
            if f.until.is_some_and(|until| until <= f.at) {
                return wrong(&field, "until is before at".into());
            }
            if f.crash.or(f.pause).is_some_and(|host| host >= hosts) {
                return wrong(&field, format!("there are hosts 0 to {}", hosts - 1));
            }
            if f.stall.or(f.port).is_some_and(|guest| guest >= guests) {
                return wrong(&field, format!("there are guests 0 to {}", guests.max(1) - 1));
            }
            if (f.flap_down.0 > 0) != (f.flap_up.0 > 0) || (f.flap_down.0 > 0 && f.until.is_none()) {
                return wrong(&field, "flapping needs flap_down, flap_up and until".into());
            }
        }
        Ok(())
    }

    /// Transport paths that a host uses to other hosts.
    pub fn paths_of(&self, host: u32) -> u8 {
        self.host_paths.get(host as usize).copied().unwrap_or(self.paths)
    }

    /// Number of guests in all groups.
    pub fn guest_count(&self) -> u32 {
        let hosts = self.topology.hosts();
        self.guests.iter().map(|g| g.hosts.iter(hosts).count() as u32 * g.per_host).sum()
    }

    fn link_patches(&self) -> Vec<&LinkPatch> {
        let mut all: Vec<&LinkPatch> = self.faults.iter().map(|f| &f.set).collect();
        match &self.topology {
            Topology::Parallel { link, path, .. } => {
                all.push(link);
                all.extend(path);
            }
            Topology::Star { link, .. } => all.push(link),
            Topology::Clos2 { host_link, fabric_link, .. } | Topology::Clos3 { host_link, fabric_link, .. } => {
                all.extend([host_link, fabric_link]);
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = "duration = \"1s\"\n[topology]\nkind = \"parallel\"\nhosts = 2\npaths = 4\n";

    #[test]
    fn a_small_scenario_is_completed() {
        let s = Scenario::parse("x", SMALL).expect("scenario");
        assert_eq!((s.paths, s.vnis.len(), s.guest_count()), (4, 1, 2));
        let again = Scenario::parse("y", &s.to_toml()).expect("valid TOML");
        assert_eq!(s, again);
    }

    #[test]
    fn numbers_of_paths_of_hosts_are_checked() {
        let of = |paths: &str| {
            Scenario::parse("x", &SMALL.replace("[topology]", &format!("host_paths = {paths}\n[topology]")))
        };
        let s = of("[2]").expect("scenario");
        assert_eq!((s.paths_of(0), s.paths_of(1)), (2, 4));
        for (paths, want) in
            [("[4, 5]", "host_paths[1]: 5 paths"), ("[0]", "host_paths[0]"), ("[1, 1, 1]", "3 entries for 2")]
        {
            let error = of(paths).expect_err(paths).to_string();
            assert!(error.contains(want), "{paths}\n{error}");
        }
    }

    #[test]
    fn errors_name_the_field() {
        for (more, want) in [
            ("[[faults]]\nat = \"1ms\"\n", "faults[0]"),
            ("[[faults]]\nat = \"1ms\"\nlinkz = \"*\"\n", "linkz"),
            ("[[faults]]\nat = \"1\"\nlinks = \"*\"\n", "like \"50us\""),
            ("[[faults]]\nlinks = \"*\"\n[faults.set]\nloss = 2.0\n", "loss: 2"),
            ("[transport]\nspray = 3\n", "spray"),
            ("[[guests]]\nvni = 7\n", "unknown VNI 7"),
            ("[[guests]]\nvni = 100\nrx_rate = \"0bit/s\"\n", "guests[0]: a rate"),
            ("[[workloads]]\nkind = \"packets\"\nfrom = [5]\nto = [0]\npackets = 1\n", "workloads[0].from"),
            ("[[workloads]]\nkind = \"nonsense\"\n", "nonsense"),
        ] {
            let error = Scenario::parse("x", &format!("{SMALL}{more}")).expect_err(more).to_string();
            assert!(error.contains(want), "{more}\n{error}");
        }
    }
}
