//! The other tenant, the neighbour: a network with a guest on each host, and its counters in the daemons.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::daemon::Daemon;
use crate::netns::Namespace;
use crate::programs::hostile::Vnic;
use crate::state::Run;
use crate::topology::GUEST_MTU;

/// Its VNI.
const VNI: u32 = 200;
/// Maximum number of conversations of a port.
pub(super) const SESSIONS_PER_PORT: u64 = 20_000;
/// Drops packets on arrival in the neighbour's kernels. Processing them is the guest's own cost; it would only affect
/// the other tenant here, where they share a processor.
const ABSORB: &str = "table netdev bifrost_lab_absorb {\n chain absorb {\n \
     type filter hook ingress device eth0 priority 0; policy drop;\n }\n}\n";

/// Its guests, on the first host and on the second.
pub(super) const VNICS: [Vnic; 2] = [vnic(1), vnic(2)];
/// Their ports.
const NAMES: [&str; 2] = ["neighbour-a", "neighbour-b"];

const fn vnic(n: u8) -> Vnic {
    Vnic { mac: [2, 0, 0, 0, 2, n], v4: [10, 9, 0, n], v6: [0xfd, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, n] }
}

/// Its guests.
#[derive(Debug)]
pub(super) struct Neighbours {
    /// On the first host and on the second.
    pub(super) namespaces: [Namespace; 2],
}

impl Neighbours {
    /// Creates the guests, each on its host's processor; they have no devices yet.
    pub(super) fn create(run: &Run) -> Result<Self> {
        let create = |number: usize| -> Result<Namespace> {
            let mut namespace = Namespace::create(format!("{}-{}", run.id(), NAMES[number]))?;
            let settings = [("net/ipv6/conf/all/disable_ipv6", "0"), ("net/ipv6/conf/default/disable_ipv6", "0")];
            namespace.write_sysctls(&settings)?;
            namespace.pin(number % std::thread::available_parallelism().map_or(1, usize::from));
            Ok(namespace)
        };
        Ok(Self { namespaces: [create(0)?, create(1)?] })
    }

    /// Their part of each host's configuration. The transport carries the neighbour's traffic, innocent or not.
    pub(super) fn configuration(&self) -> Vec<String> {
        let mac = |n: usize| VNICS[n].mac.map(|byte| format!("{byte:02x}")).join(":");
        let host = |n: usize| {
            let (other, namespace) = (1 - n, self.namespaces[n].name());
            let route = |prefix: &str| {
                let peer = ["host-a", "host-b"][other];
                format!(
                    "[[route]]\nvni = {VNI}\nprefix = \"{prefix}\"\npeer = \"{peer}\"\nmac = \"{}\"\n\n",
                    mac(other)
                )
            };
            format!(
                "[sessions]\nper_port = {SESSIONS_PER_PORT}\n\n\
                 [[security_group]]\nname = \"neighbour\"\n\
                 ingress = [{{ protocol = \"udp\" }}, {{ protocol = \"tcp\", ports = [\"1-32767\"] }}, {{ protocol = \
                 \"icmp\" }}]\n\n\
                 [[vpc]]\nvni = {VNI}\nreliability = \"all\"\n\n\
                 [[port]]\nname = \"{name}\"\nvni = {VNI}\nmac = \"{mac}\"\naddresses = [\"10.9.0.{number}/24\", \
                 \"fd09::{number}/64\"]\n\
                 mtu = {GUEST_MTU}\nsecurity_groups = [\"neighbour\"]\nnetns = \"{namespace}\"\ndevice = \
                 \"eth0\"\n\n{v4}{v6}",
                name = NAMES[n],
                mac = mac(n),
                number = n + 1,
                v4 = route(&format!("10.9.0.{}/32", other + 1)),
                v6 = route(&format!("fd09::{}/128", other + 1)),
            )
        };
        vec![host(0), host(1)]
    }

    /// From now on they drop everything they receive.
    pub(super) fn absorb(&self) -> Result<()> {
        self.namespaces.iter().try_for_each(|namespace| namespace.run("nft", &["-f", "-"], ABSORB).map(drop))
    }
}

/// Counters of the daemons.
#[derive(Debug, Default)]
pub(super) struct Counted {
    /// Packets delivered to the neighbour's second guest.
    pub(super) delivered: u64,
    /// Packets of the neighbour that were dropped, by counter, on both hosts. Counters without a port are attributed
    /// to the neighbour, because the other tenant's packets are well-formed.
    neighbour_drops: BTreeMap<String, u64>,
    /// Packets dropped at the other tenant's ports, by counter.
    tenant_drops: BTreeMap<String, u64>,
    /// Packets lost without being counted.
    pub(super) unexplained: u64,
    /// Sessions, on the host that has more.
    pub(super) sessions: u64,
    /// Evicted sessions since the start, on both hosts.
    pub(super) evicted_sessions: u64,
}

impl Counted {
    /// Reads the counters of all daemons.
    pub(super) fn of(daemons: &[Daemon]) -> Result<Self> {
        let mut counted = Counted::default();
        for daemon in daemons {
            counted.sessions = counted.sessions.max(daemon.counter("avs.current_sessions")?);
            counted.evicted_sessions += daemon.counter("avs.evicted_sessions")?;
            let ports = daemon.control(&["ports"])?;
            let ours = ports.as_array().into_iter().flatten().find(|port| port["name"] == NAMES[1]);
            counted.delivered += ours.and_then(|port| port["rx_packets"].as_u64()).unwrap_or(0);
            counted.add_drops(&daemon.control(&["drops"])?, daemon.port())?;
        }
        Ok(counted)
    }

    /// Adds the answer of `bifrostctl drops`.
    fn add_drops(&mut self, answer: &Value, tenant: &str) -> Result<()> {
        for drop in answer["drops"].as_array().context("`bifrostctl drops` has no list of drops")? {
            let count = drop["count"].as_u64().unwrap_or(0);
            // A duplicate is a retransmission; nothing was lost.
            if drop["counter"] == "rte.duplicate_packets" {
                continue;
            }
            let Some(counter) = drop["counter"].as_str() else { continue };
            let drops = if drop["port"] == tenant { &mut self.tenant_drops } else { &mut self.neighbour_drops };
            *drops.entry(counter.to_owned()).or_default() += count;
        }
        let accounts = answer["unexplained"].as_array().context("`bifrostctl drops` has no accounts")?;
        for account in accounts {
            let packets = |side: &str| account[side].as_u64().unwrap_or(0);
            self.unexplained += packets("entered").abs_diff(packets("left"));
        }
        Ok(())
    }

    /// Drops of the neighbour since `before`.
    pub(super) fn neighbour_drops_since(&self, before: &Counted) -> BTreeMap<String, u64> {
        since(&self.neighbour_drops, &before.neighbour_drops)
    }

    /// Drops of the other tenant since `before`.
    pub(super) fn tenant_drops_since(&self, before: &Counted) -> BTreeMap<String, u64> {
        since(&self.tenant_drops, &before.tenant_drops)
    }
}

/// The counters that have increased, and by how much.
fn since(after: &BTreeMap<String, u64>, before: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    let grown = |(counter, count): (&String, &u64)| {
        let grown = count - before.get(counter).copied().unwrap_or(0);
        (grown > 0).then(|| (counter.clone(), grown))
    };
    after.iter().filter_map(grown).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn drops_are_the_tenants_or_the_neighbours() {
        let drop =
            |counter: &str, port: Option<&str>, count: u64| json!({ "counter": counter, "port": port, "count": count });
        let answer = |n: u64, unexplained: Value| {
            let drops = [
                drop("a", Some("guest-a"), n),
                drop("a", Some("neighbour-a"), 2 * n),
                drop("b", None, 3),
                drop("a", None, n),
            ];
            json!({ "drops": drops, "unexplained": unexplained })
        };
        let mut before = Counted::default();
        before.add_drops(&answer(1, json!([])), "guest-a").unwrap();
        let mut after = Counted::default();
        after.add_drops(&answer(5, json!([{ "entered": 3, "left": 5 }])), "guest-a").unwrap();
        assert_eq!((after.tenant_drops_since(&before), after.unexplained), (BTreeMap::from([("a".to_owned(), 4)]), 2));
        assert_eq!(after.neighbour_drops_since(&before), BTreeMap::from([("a".to_owned(), 12)]));
        assert!(after.add_drops(&json!({}), "guest-a").is_err());
    }
}
