//! Multipath TCP (RFC 8684) in the guests: a subflow for each underlay path, as far as hashing lets each have its own. And a look at
//! the kernels' counters, for what has silently become TCP would be measured as something that it is not.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use serde::Serialize;

use crate::command;
use crate::programs::guest_tcp::Tcp;
use crate::topology::{Guest, Topology};

/// What the kernel counts when a connection goes on as TCP. Which of them there are depends on its version.
const FALLBACKS: [&str; 11] = [
    "MPCapableFallbackACK",
    "MPCapableFallbackSYNACK",
    "MPCapableSYNTXDrop",
    "MPCapableSYNTXDisabled",
    "MPCapableDataFallback",
    "MPFallbackTokenInit",
    "DSSCorruptionFallback",
    "DssFallback",
    "MD5SigFallback",
    "SimultConnectFallback",
    "InfiniteMapTx",
];
/// More connections than this share may not have fallen back.
const MOST_FALLEN_BACK: f64 = 0.01;
/// From so many connections and subflows on, for each path, the hash gives none of them less than a quarter of its share, but for one in
/// a million.
const SUBFLOWS_PER_PATH: u64 = 32;
/// Less than what it takes to open one of them: three packets in VXLAN, bytes.
const HANDSHAKE: u64 = 300;
/// Settings of newer kernels, with their values here: a lost SYN is no sign that somebody on the way drops those that ask for
/// Multipath TCP, and must not end it.
const LOSSES_ARE_NO_SIGN: [(&str, &str); 2] =
    [("net/mptcp/syn_retrans_before_tcp_fallback", "128"), ("net/mptcp/blackhole_timeout", "0")];
/// From one address of a guest to its next one.
const STRIDE: u8 = 16;

/// Lets connections that the first guest opens have a subflow for each path, from an address each. The guests are joined by then.
///
/// # Errors
/// The kernel has no Multipath TCP, or `mptcpize` is missing.
pub fn set_up(topology: &Topology) -> Result<()> {
    command::run("mptcpize", &["--version"])?;
    let paths = topology.plan.paths;
    let client = &topology.hosts[0].guest;
    for host in &topology.hosts {
        let guest = &host.guest;
        let mut batch = format!("mptcp limits set subflow {paths} add_addr_accepted 0\n");
        for address in (1..paths).map(|path| address(client, path)) {
            batch += &if guest.address == client.address {
                // The side that opens a connection opens its subflows, too; the other side's kernel would try in vain.
                format!("addr add {address}/32 dev eth0\nmptcp endpoint add {address} dev eth0 subflow\n")
            } else {
                format!("neigh add {address} lladdr {} dev eth0 nud permanent\n", client.mac)
            };
        }
        guest.namespace.ip_batch(&batch).context("setting up Multipath TCP: has the kernel CONFIG_MPTCP?")?;
        let known: Vec<_> = LOSSES_ARE_NO_SIGN
            .into_iter()
            .filter(|(key, _)| Path::new("/proc/sys").join(key).exists())
            .chain([("net/mptcp/enabled", "1")])
            .collect();
        guest.namespace.write_sysctls(&known)?;
    }
    Ok(())
}

/// The address that the subflow number `path`, from 1, leaves from.
fn address(guest: &Guest, path: u8) -> std::net::Ipv4Addr {
    let [a, b, c, d] = guest.address.octets();
    [a, b, c, d + STRIDE * path].into()
}

/// What became of the guests' connections since the network was built.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Usage {
    /// Connections that the first guest wanted to be Multipath TCP.
    connections: u64,
    /// Subflows that were added to them.
    subflows: u64,
    /// Connections of the first guest that did not ask for Multipath TCP.
    plain_connections: u64,
    /// Connections that went on as TCP, by the kernels' reasons; of both guests.
    fallbacks: BTreeMap<String, u64>,
    /// Bytes that the first host has sent and received on each path.
    carried_bytes: Vec<u64>,
}

/// Writes what became of the connections into `mptcp.json` in `logs`.
///
/// # Errors
/// They are not Multipath TCP, or have no subflows, or a path is not used.
pub fn check(topology: &Topology, logs: &Path) -> Result<()> {
    let client = Tcp::in_namespace(&topology.hosts[0].guest.namespace)?;
    let server = Tcp::in_namespace(&topology.hosts[1].guest.namespace)?;
    let carried = topology.hosts[0].carried(topology.plan.paths)?;
    let carried = carried.iter().map(|link| link.sent + link.received).collect();
    let usage = Usage::of(&client, &server, carried);
    fs::create_dir_all(logs).with_context(|| format!("creating {}", logs.display()))?;
    let file = logs.join("mptcp.json");
    let text = serde_json::to_string_pretty(&usage).context("serializing counters")?;
    fs::write(&file, text + "\n").with_context(|| format!("writing {}", file.display()))?;
    usage.judge().with_context(|| format!("the guests do not use Multipath TCP as they should; see {}", file.display()))
}

impl Usage {
    fn of(client: &Tcp, server: &Tcp, carried_bytes: Vec<u64>) -> Self {
        let count = |tcp: &Tcp, name: &str| tcp.counter(&format!("MPTcpExt:{name}"));
        let connections = count(client, "MPCapableSYNTX").unwrap_or(0);
        let opened = client.counter("Tcp:ActiveOpens").unwrap_or(0);
        // Kernels that do not count the subflows that they try to open cannot tell them from plain connections.
        let plain = count(client, "MPJoinSynTx").map(|joins| opened.saturating_sub(connections + joins));
        let reason = |name: &&str| {
            let number = count(client, name).unwrap_or(0) + count(server, name).unwrap_or(0);
            (number > 0).then(|| ((*name).to_owned(), number))
        };
        Self {
            connections,
            subflows: count(client, "MPJoinSynAckRx").unwrap_or(0),
            plain_connections: plain.unwrap_or(if connections == 0 { opened } else { 0 }),
            fallbacks: FALLBACKS.iter().filter_map(reason).collect(),
            carried_bytes,
        }
    }

    fn judge(&self) -> Result<()> {
        let Usage { connections, subflows, plain_connections, fallbacks, carried_bytes } = self;
        ensure!(
            *plain_connections == 0,
            "{plain_connections} connections beside {connections} did not ask for it: does `mptcpize run` work for the program?"
        );
        let fallen: u64 = fallbacks.values().sum();
        ensure!(
            fallen as f64 <= *connections as f64 * MOST_FALLEN_BACK,
            "{fallen} of {connections} connections have fallen back to TCP ({fallbacks:?}): does the server ask for it, and nothing \
             on the way remove options?"
        );
        let paths = carried_bytes.len() as u64;
        ensure!(
            *connections == 0 || paths == 1 || *subflows > 0,
            "none of {connections} connections got a second subflow: `ip mptcp endpoint` and `ip mptcp limits` in the guests tell why"
        );
        let share = (connections + subflows) / paths;
        ensure!(
            paths == 1 || share < SUBFLOWS_PER_PATH || carried_bytes.iter().all(|n| *n >= share / 4 * HANDSHAKE),
            "{connections} connections with {subflows} more subflows leave a path unused: {carried_bytes:?} bytes"
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_tell_what_became_of_connections() {
        let snmp = "Tcp: ActiveOpens InSegs\nTcp: 13 100\n";
        let client = "MPTcpExt: MPCapableSYNTX MPJoinSynAckRx MPJoinSynTx MPFallbackTokenInit\nMPTcpExt: 3 8 9 1\n";
        let server = "MPTcpExt: MPCapableFallbackACK MPJoinAckRx\nMPTcpExt: 2 9\n";
        let of = |client: &str| {
            Usage::of(&Tcp::parse(&format!("{snmp}{client}")), &Tcp::parse(&format!("{snmp}{server}")), vec![1, 2])
        };
        let usage = of(client);
        assert_eq!((usage.connections, usage.subflows, usage.plain_connections), (3, 8, 1));
        let fallbacks: Vec<_> = usage.fallbacks.iter().map(|(name, n)| (name.as_str(), *n)).collect();
        assert_eq!(fallbacks, [("MPCapableFallbackACK", 2), ("MPFallbackTokenInit", 1)]);
        // An older kernel.
        assert_eq!(of("MPTcpExt: MPCapableSYNTX MPJoinSynAckRx\nMPTcpExt: 3 8\n").plain_connections, 0);
        assert_eq!(of("").plain_connections, 13);
    }

    #[test]
    fn what_is_not_multipath_is_an_error() {
        let good = Usage {
            connections: 200,
            subflows: 600,
            plain_connections: 0,
            fallbacks: BTreeMap::from([("MPCapableFallbackACK".to_owned(), 2)]),
            carried_bytes: vec![9_000_000, 20_000, 15_000, 50_000],
        };
        let error = |change: fn(&mut Usage)| {
            let mut usage = good.clone();
            change(&mut usage);
            usage.judge().err().map(|error| error.to_string()).unwrap_or_default()
        };
        type Change = fn(&mut Usage);
        let table: [(Change, &str); 8] = [
            (|_| (), ""),
            (|u| u.plain_connections = 1, "1 connections beside 200 did not ask"),
            (|u| u.fallbacks.values_mut().for_each(|n| *n = 3), "3 of 200 connections have fallen back"),
            (|u| u.subflows = 0, "none of 200"),
            (|u| (u.subflows, u.carried_bytes) = (0, vec![1000]), ""),
            (|u| u.carried_bytes[3] = 14_999, "leave a path unused"),
            (|u| (u.connections, u.subflows, u.carried_bytes[3]) = (10, 30, 0), "have fallen back"),
            (|u| (u.connections, u.subflows, u.carried_bytes[3], u.fallbacks) = (10, 30, 0, BTreeMap::new()), ""),
        ];
        for (number, (change, expected)) in table.into_iter().enumerate() {
            let error = error(change);
            assert!(error.contains(expected) && error.is_empty() == expected.is_empty(), "{number}: {error}");
        }
    }

    #[test]
    fn addresses_of_subflows_stay_apart() {
        // Eight guests with eight paths each.
        let all: std::collections::BTreeSet<u8> =
            (1..=8).flat_map(|guest| (0..8).map(move |path| guest + STRIDE * path)).collect();
        assert_eq!((all.len(), all.last()), (64, Some(&120)));
    }
}
