//! Links of limited rate with a drop-tail queue limited in frames, like the ports of a switch.
//!
//! Each end of each link gets the kernel's `tbf` with a burst of two frames (a larger burst lets dozens of frames
//! through at the processor's speed and hides the queue), with a child `pfifo`. `tbf` segments packets larger than
//! its burst before they are queued, so the limit counts frames on the wire.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::netns::Namespace;
use crate::topology::{Host, Topology, link_name};

/// Frames that may be sent back to back.
const BURST_FRAMES: u32 = 2;
/// Bytes of an Ethernet header, which `tbf` counts.
pub const ETHERNET: u32 = 14;
/// Maximum length of a queue, frames.
const MAX_FRAMES: u32 = 10_000;
/// Maximum rate of a link, Mbit/s.
const MAX_MBIT_PER_S: u32 = 10_000;
/// Maximum number of links.
const MAX_LINKS: usize = 8;

/// The rate of each link and the length of its queue.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Shape {
    /// Rate of each link, Mbit/s, Ethernet headers included.
    pub mbit_per_s: Vec<u32>,
    /// Length of each link's queue, frames.
    pub queue_frames: u32,
}

impl Shape {
    /// `links` links with the same rate.
    pub fn equal(links: usize, mbit_per_s: u32, queue_frames: u32) -> Self {
        Self { mbit_per_s: vec![mbit_per_s; links], queue_frames }
    }

    /// The total rate of the first `links` links, Mbit/s.
    pub fn total_mbit_per_s(&self, links: usize) -> f64 {
        self.mbit_per_s.iter().take(links).map(|rate| f64::from(*rate)).sum()
    }
}

/// `4x100@50`, or `100/100/100/20@50`: rates in Mbit/s, then frames.
impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.mbit_per_s.as_slice() {
            [first, rest @ ..] if rest.iter().all(|rate| rate == first) => {
                write!(f, "{}x{first}", self.mbit_per_s.len())?;
            }
            rates => {
                let rates: Vec<_> = rates.iter().map(ToString::to_string).collect();
                f.write_str(&rates.join("/"))?;
            }
        }
        write!(f, "@{}", self.queue_frames)
    }
}

impl FromStr for Shape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!("`{text}` is not a shape; write 4x100@50 or 100/100/100/20@50: Mbit/s of each link, then frames")
        };
        let number = |text: &str, most: u32| text.parse().ok().filter(|n| (1..=most).contains(n)).ok_or_else(wrong);
        let (rates, frames) = text.split_once('@').ok_or_else(wrong)?;
        let mbit_per_s = match rates.split_once('x') {
            Some((links, rate)) => {
                let links = number(links, MAX_LINKS as u32)? as usize;
                vec![number(rate, MAX_MBIT_PER_S)?; links]
            }
            None => rates.split('/').map(|rate| number(rate, MAX_MBIT_PER_S)).collect::<Result<_, _>>()?,
        };
        if mbit_per_s.len() > MAX_LINKS {
            return Err(wrong());
        }
        Ok(Self { mbit_per_s, queue_frames: number(frames, MAX_FRAMES)? })
    }
}

impl TryFrom<String> for Shape {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Shape> for String {
    fn from(shape: Shape) -> String {
        shape.to_string()
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_round_trip() {
        for text in ["4x100@50", "100/100/100/20@50", "1x500@400", "8x1@1"] {
            let shape: Shape = text.parse().unwrap();
            assert_eq!(shape.to_string(), text);
            let json = serde_json::to_string(&shape).unwrap();
            assert_eq!(serde_json::from_str::<Shape>(&json).unwrap(), shape);
        }
        assert_eq!("100/100@9".parse(), Ok(Shape::equal(2, 100, 9)));
        let shape: Shape = "100/100/100/20@50".parse().unwrap();
        assert_eq!((shape.total_mbit_per_s(4), shape.total_mbit_per_s(2)), (320.0, 200.0));
    }

    #[test]
    fn malformed_shapes_are_refused() {
        let wrong =
            ["", "100", "x100@50", "4x@50", "4x100@", "9x100@50", "4x0@50", "4x100@0", "1/2/3/4/5/6/7/8/9@5", "4x-1@5"];
        for text in wrong {
            assert!(text.parse::<Shape>().is_err(), "{text}");
        }
    }
}
