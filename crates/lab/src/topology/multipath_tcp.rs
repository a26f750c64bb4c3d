//! Multipath TCP (RFC 8684) in the guests: a subflow for each underlay path, as far as hashing distributes them. Also
//! a check of the kernels' counters: connections that silently fell back to TCP must not be measured as Multipath
//! TCP.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use serde::Serialize;

use crate::command;
use crate::programs::guest_tcp::Tcp;
use crate::topology::{Guest, Topology};

/// Counters of connections that fall back to TCP. The kernel's version determines which of them exist.
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
/// The largest accepted share of connections that have fallen back.
const MAX_FALLBACK_SHARE: f64 = 0.01;
/// With at least this many connections and subflows per path, the hash gives every path at least a quarter of its
/// share, except in one case in a million.
const SUBFLOWS_PER_PATH: u64 = 32;
/// Bytes below the size of a subflow's handshake: three packets in VXLAN.
const HANDSHAKE: u64 = 300;
/// Settings of newer kernels, and their values here: a lost SYN does not mean that a middlebox drops Multipath TCP,
/// and must not disable it.
const LOSS_TOLERANT_SETTINGS: [(&str, &str); 2] =
    [("net/mptcp/syn_retrans_before_tcp_fallback", "128"), ("net/mptcp/blackhole_timeout", "0")];
/// Distance between consecutive addresses of a guest.
const STRIDE: u8 = 16;

/// Gives connections that the first guest opens a subflow for each path, each with its own address. The guests must
/// be joined already.
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
                // Only the side that opens a connection opens its subflows; the other side would fail.
                format!("addr add {address}/32 dev eth0\nmptcp endpoint add {address} dev eth0 subflow\n")
            } else {
                format!("neigh add {address} lladdr {} dev eth0 nud permanent\n", client.mac)
            };
        }
        guest.namespace.ip_batch(&batch).context("setting up Multipath TCP: has the kernel CONFIG_MPTCP?")?;
        let known: Vec<_> = LOSS_TOLERANT_SETTINGS
            .into_iter()
            .filter(|(key, _)| Path::new("/proc/sys").join(key).exists())
            .chain([("net/mptcp/enabled", "1")])
            .collect();
        guest.namespace.write_sysctls(&known)?;
    }
    Ok(())
}

/// The source address of subflow number `path`, from 1.
fn address(guest: &Guest, path: u8) -> std::net::Ipv4Addr {
    let [a, b, c, d] = guest.address.octets();
    [a, b, c, d + STRIDE * path].into()
}

/// How the guests' connections were carried since the network was built.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Usage {
    /// Connections for which the first guest asked for Multipath TCP.
    connections: u64,
    /// Additional subflows of these connections.
    subflows: u64,
    /// Connections of the first guest that did not ask for Multipath TCP.
    plain_connections: u64,
    /// Connections that fell back to TCP, by the kernels' reasons; both guests.
    fallbacks: BTreeMap<String, u64>,
    /// Bytes that the first host has sent and received on each path.
    carried_bytes: Vec<u64>,
}

/// Writes the counters into `mptcp.json` in `logs`, and checks them.
///
/// # Errors
/// Connections are not Multipath TCP, have no additional subflows, or a path is not used.
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
        // Kernels that do not count attempted subflows cannot distinguish them from plain connections.
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
            "{plain_connections} connections, besides {connections} others, did not ask for it: does `mptcpize run` \
             work for the program?"
        );
        let fallen: u64 = fallbacks.values().sum();
        ensure!(
            fallen as f64 <= *connections as f64 * MAX_FALLBACK_SHARE,
            "{fallen} of {connections} connections have fallen back to TCP ({fallbacks:?}): does the server ask for \
             it, and does nothing on the path remove options?"
        );
        let paths = carried_bytes.len() as u64;
        ensure!(
            *connections == 0 || paths == 1 || *subflows > 0,
            "none of {connections} connections got a second subflow: `ip mptcp endpoint` and `ip mptcp limits` in the \
             guests show why"
        );
        let share = (connections + subflows) / paths;
        ensure!(
            paths == 1 || share < SUBFLOWS_PER_PATH || carried_bytes.iter().all(|n| *n >= share / 4 * HANDSHAKE),
            "{connections} connections with {subflows} additional subflows leave a path unused: {carried_bytes:?} bytes"
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_show_how_connections_were_carried() {
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
    fn connections_without_multipath_are_an_error() {
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
            (|u| u.plain_connections = 1, "1 connections, besides 200 others, did not ask"),
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
    fn addresses_of_subflows_do_not_collide() {
        // Eight guests with eight paths each.
        let all: std::collections::BTreeSet<u8> =
            (1..=8).flat_map(|guest| (0..8).map(move |path| guest + STRIDE * path)).collect();
        assert_eq!((all.len(), all.last()), (64, Some(&120)));
    }
}
