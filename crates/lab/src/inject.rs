//! Packet loss and rate limits, applied without Bifrost's own code (nftables) or by the daemon itself
//! (`bifrostctl fault`).

use std::fmt::Write as _;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::netns::Namespace;
use crate::topology::overlay::Overlay;
use crate::topology::{Host, Topology, link_name};

/// The nftables table that holds the lab's rules.
const TABLE: &str = "bifrost_lab";
/// Random numbers of a rule run from 0 to this value, so loss has a resolution of 0.0001 %.
const MODULUS: u32 = 1_000_000;

/// Drops `loss_percent` of the packets that arrive on the underlay links `paths` (all links if empty), on every host,
/// so in both directions. Replaces the previous setting; 0 removes it.
pub fn wire_loss(topology: &Topology, paths: &[u8], loss_percent: f64) -> Result<()> {
    let all: Vec<u8> = (0..topology.plan.paths).collect();
    let paths = if paths.is_empty() { &all } else { paths };
    for host in &topology.hosts {
        let devices: Vec<_> = paths.iter().map(|path| link_name(*path)).collect();
        set_ingress_loss(&host.namespace, &devices, loss_percent)?;
    }
    Ok(())
}

/// Packets that [`wire_loss`] has dropped since it was last set, over all hosts.
pub fn wire_drops(topology: &Topology) -> Result<u64> {
    topology.hosts.iter().map(|host| dropped(&host.namespace)).sum()
}

/// Drops `loss_percent` of the packets that arrive on one device. Replaces the previous setting; 0 removes it.
pub fn namespace_loss(namespace: &Namespace, device: &str, loss_percent: f64) -> Result<()> {
    set_ingress_loss(namespace, &[device.to_owned()], loss_percent)
}

/// Packets that [`namespace_loss`] has dropped since it was last set.
pub fn namespace_drops(namespace: &Namespace) -> Result<u64> {
    dropped(namespace)
}

/// Drops `loss_percent` of the packets towards every guest, between its switch and its vNIC. 0 removes it.
pub fn vnic_loss(topology: &Topology, overlay: &Overlay, loss_percent: f64) -> Result<()> {
    if overlay.mode.is_kernel_vxlan() {
        for host in &topology.hosts {
            set_ingress_loss(&host.guest.namespace, &["eth0".to_owned()], loss_percent)?;
        }
        return Ok(());
    }
    for daemon in &overlay.daemons {
        daemon.control(&["fault", "clear"])?;
        if loss_percent > 0.0 {
            daemon.control(&["fault", "add", "--port", daemon.port(), "--loss", &loss_percent.to_string()])?;
        }
    }
    Ok(())
}

/// Limits the sending rate of `host` on each of its first `paths` underlay links. Packets beyond the rate wait for up
/// to 10 ms and are dropped after that. Counts bytes including Ethernet headers.
///
/// # Errors
/// A link that does not exist, or a kernel without `tbf`.
pub fn limit_links(host: &Host, paths: u8, mbit_per_s: u32) -> Result<()> {
    let rate = format!("{mbit_per_s}mbit");
    for path in 0..paths {
        let link = link_name(path);
        let words = ["qdisc", "replace", "dev", &link, "root", "tbf", "rate", &rate, "burst", "64k", "latency", "10ms"];
        host.namespace.run("tc", &words, "").with_context(|| format!("limiting {link} of {}", host.name))?;
    }
    Ok(())
}

/// Counts, from zero, and drops the packets that arrive on `device` and that nftables' `expression` matches. Replaces
/// the loss that was set in the namespace.
///
/// # Errors
/// nftables refuses the rule.
pub(crate) fn count_and_drop(namespace: &Namespace, device: &str, expression: &str) -> Result<()> {
    let verdict = format!("{expression} counter drop");
    set_rule(namespace, &[device.to_owned()], Some(&verdict)).with_context(|| format!("counting {expression}"))
}

fn set_ingress_loss(namespace: &Namespace, devices: &[String], loss_percent: f64) -> Result<()> {
    let verdict = (loss_percent > 0.0).then(|| {
        let threshold = (loss_percent / 100.0 * f64::from(MODULUS)).round() as u32;
        if threshold >= MODULUS {
            "counter drop".to_owned()
        } else {
            format!("numgen random mod {MODULUS} < {threshold} counter drop")
        }
    });
    set_rule(namespace, devices, verdict.as_deref()).with_context(|| format!("setting loss in {}", namespace.name()))
}

/// Replaces the rule for packets that arrive on `devices`.
fn set_rule(namespace: &Namespace, devices: &[String], rule: Option<&str>) -> Result<()> {
    // Deleting a table that does not exist fails; adding one that exists does not.
    let mut rules = format!("add table netdev {TABLE}\ndelete table netdev {TABLE}\n");
    if let Some(rule) = rule {
        let _ = write!(
            rules,
            "table netdev {TABLE} {{\n chain loss {{\n type filter hook ingress devices = {{ {} }} priority 0\n \
             {rule}\n }}\n}}\n",
            devices.join(", ")
        );
    }
    namespace.run("nft", &["-f", "-"], &rules)?;
    Ok(())
}

/// Packets that the rule in the namespace has dropped.
///
/// # Errors
/// nftables prints no JSON.
pub(crate) fn dropped(namespace: &Namespace) -> Result<u64> {
    let Ok(text) = namespace.run("nft", &["-j", "list", "table", "netdev", TABLE], "") else {
        // No table: no loss is configured.
        return Ok(0);
    };
    let parsed: Value = serde_json::from_str(&text).context("`nft -j` printed no JSON")?;
    Ok(counters(&parsed))
}

/// The sum of all `counter.packets` in nft's JSON.
fn counters(value: &Value) -> u64 {
    match value {
        Value::Object(map) => map
            .iter()
            .map(|(key, inner)| match key.as_str() {
                "counter" => inner.get("packets").and_then(Value::as_u64).unwrap_or(0),
                _ => counters(inner),
            })
            .sum(),
        Value::Array(items) => items.iter().map(counters).sum(),
        _ => 0,
    }
}
