//! Links of limited rate with a drop-tail queue limited in frames, like the ports of a switch.
//!
//! Each end of each link gets the kernel's `tbf` with a burst of two frames (a larger burst lets dozens of frames
//! through at the processor's speed and hides the queue), with a child `pfifo`. `tbf` segments packets larger than
//! its burst before they are queued, so the limit counts frames on the wire.

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::netns::Namespace;
use crate::shape::Shape;
use crate::topology::{Host, Topology, link_name};

/// Frames that may be sent back to back.
const BURST_FRAMES: u32 = 2;
/// Bytes of an Ethernet header, which `tbf` counts.
pub const ETHERNET: u32 = 14;

/// Counters of the queue at one end of a link.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Queue {
    /// Frames dropped because the queue was full.
    pub dropped: u64,
    /// Bytes that left the queue, Ethernet headers included.
    pub sent_bytes: u64,
}

/// Limits both ends of every link between two hosts; links beyond those of `shape` are not changed.
///
/// # Errors
/// A link does not exist, or the kernel has no `tbf`.
pub fn limit(topology: &Topology, shape: &Shape) -> Result<()> {
    let burst = BURST_FRAMES * (topology.plan.underlay_mtu() + ETHERNET);
    for host in &topology.hosts {
        for (path, rate) in (0..).zip(&shape.mbit_per_s) {
            limit_one(&host.namespace, &link_name(path), *rate, burst, shape.queue_frames)
                .with_context(|| format!("limiting link {path} of {}", host.name))?;
        }
    }
    Ok(())
}

fn limit_one(namespace: &Namespace, link: &str, mbit_per_s: u32, burst: u32, frames: u32) -> Result<()> {
    // `tbf`'s own limit in bytes does not matter: the next line replaces its queue.
    let script = format!(
        "qdisc replace dev {link} root handle 1: tbf rate {mbit_per_s}mbit burst {burst} limit 1000000\n\
         qdisc replace dev {link} parent 1:1 handle 10: pfifo limit {frames}\n"
    );
    namespace.run("tc", &["-batch", "-"], &script).map(drop)
}

/// Counters of the queues of a host's first `links` links.
///
/// # Errors
/// A link has no queue.
pub fn queues(host: &Host, links: usize) -> Result<Vec<Queue>> {
    let text = host.namespace.run("tc", &["-j", "-s", "qdisc", "show"], "")?;
    let parsed: Value = serde_json::from_str(&text).context("`tc -j` printed no JSON")?;
    let of = |path: usize| {
        let link = link_name(path as u8);
        let is = |qdisc: &&Value| qdisc["dev"] == *link && qdisc["kind"] == "tbf";
        let qdisc = parsed.as_array().into_iter().flatten().find(is);
        let qdisc = qdisc.with_context(|| format!("{link} of {} has no rate-limited queue", host.name))?;
        let count = |name: &str| qdisc[name].as_u64().with_context(|| format!("`tc -j -s` counts no {name}"));
        Ok(Queue { dropped: count("drops")?, sent_bytes: count("bytes")? })
    };
    (0..links).map(of).collect()
}
