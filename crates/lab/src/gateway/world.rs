//! A complete gateway on a veth pair: `gw0` is the gateway's end, and the lab plays the network at the other end.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use bifrost_port::raw::{RawConfig, RawDevice, RawMode};
use serde_json::{Value, json};

use super::frames::{self, PROVIDER, RECEIVER, SENDER};
use super::programs::{Daemon, number};
use crate::interrupt;
use crate::lab::Lab;
use crate::netns::Namespace;

/// Time limit for the gateway to forward.
const PATIENCE: Duration = Duration::from_secs(20);
/// Entries of a worker's ring: 20 ms of traffic, because a thread may be descheduled for that long.
const RING_ENTRIES: u32 = 4096;
/// The port that the tenants' ACL refuses.
pub const REFUSED_PORT: u16 = 25;
/// An Internet address. The ACL allows packets to it, except those to [`REFUSED_PORT`].
pub const OUTSIDE: [u8; 4] = [198, 51, 100, 1];

/// Settings of the gateway.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The tenants.
    pub vnis: Vec<u32>,
    /// The timeout for the first packet of an order queue, ms.
    pub timeout_ms: u64,
    /// Entries of each of the two order queues.
    pub queue_entries: u32,
    /// The section `limiter` of the pod in the pipeline's configuration; empty: none.
    pub limiter: String,
    /// The section `tests` of the pod; empty: none.
    pub tests: String,
    /// The processors of its threads; `None`: any.
    pub processors: Option<Processors>,
}

/// The processors of a gateway's threads, which get raised priority. The workers share a processor with the lab, so
/// they do not busy-poll. The pipeline does, as by default: each wakeup would cost the sender as much as half a
/// frame.
#[derive(Debug, Clone, Copy)]
pub struct Processors {
    /// The processor of the pipeline.
    pub pipeline: usize,
    /// The processor of both workers.
    pub workers: usize,
}

/// A gateway with two workers and the network around it.
#[derive(Debug)]
pub struct World {
    // The order matters: programs end before the namespace is deleted.
    /// The pod.
    pub pod: Daemon,
    /// The pipeline.
    pub nicd: Daemon,
    wire: RawDevice,
    _namespaces: [Namespace; 2],
}

impl World {
    /// Starts a gateway and waits until it forwards.
    ///
    /// # Errors
    /// A program is missing, or the gateway does not forward.
    pub fn start(lab: &Lab, label: &str, settings: &Settings) -> Result<Self> {
        let logs = lab.logs(label);
        let mut namespace = Namespace::create(format!("{}-gateway", lab.run.id()))?;
        let mut of_pod = Namespace::create(format!("{}-pod", lab.run.id()))?;
        if let Some(Processors { pipeline, workers }) = settings.processors {
            namespace.pin(pipeline);
            of_pod.pin(workers);
        }
        namespace.ip_batch(
            "link add wire0 mtu 1700 type veth peer name gw0 mtu 1700\nlink set wire0 up\nlink set gw0 up\n",
        )?;
        let wire = namespace.enter(|| {
            let config = RawConfig { device: "wire0".into(), mode: RawMode::Auto, longest: 1700, frames: 16_384 };
            RawDevice::open(&config).context("opening the other end of the gateway's device")
        })?;
        let socket = |name: &str| lab.run.directory().join(name);
        let (nicd, pod, memif) = (socket("nicd.sock"), socket("gw.sock"), socket("memif.sock"));
        let text = pipeline(settings, &nicd, &memif);
        let nicd = Daemon::start(lab, &namespace, "bifrost-nicd", &text, nicd, &logs)?;
        let text = pod_configuration(settings, &pod, &memif);
        let pod = Daemon::start(lab, &of_pod, "bifrost-gw", &text, pod, &logs)?;
        let mut world = World { pod, nicd, wire, _namespaces: [namespace, of_pod] };
        world.wait_until_it_forwards()?;
        Ok(world)
    }

    /// Appends a frame to the batch that [`flush`](Self::flush) sends.
    pub fn send(&mut self, parts: &[&[u8]]) {
        self.wire.send(parts);
    }

    /// Sends the batch.
    pub fn flush(&mut self) {
        self.wire.flush();
    }

    /// Receives waiting frames: passes each to `take`, and answers ARP. Returns the number of frames.
    ///
    /// # Errors
    /// The device has been removed.
    pub fn drain(&mut self, mut take: impl FnMut(&[u8])) -> Result<usize> {
        let mut replies = Vec::new();
        let mut all = 0;
        loop {
            let count = self.wire.receive().context("receiving from the gateway")?;
            for index in 0..count {
                let frame = self.wire.frame(index);
                match frames::arp_reply(frame) {
                    Some(reply) => replies.push(reply),
                    None => take(frame),
                }
            }
            all += count;
            if count == 0 {
                break;
            }
        }
        if !replies.is_empty() {
            replies.iter().for_each(|reply| self.wire.send(&[reply]));
            self.wire.flush();
        }
        Ok(all)
    }

    /// Sets how packets are spread: `plb` or `rss`.
    ///
    /// # Errors
    /// The pipeline refuses.
    pub fn set_mode(&self, mode: &str) -> Result<()> {
        self.nicd.command(&json!({ "command": "set_mode", "pod": "vpc", "mode": mode })).map(drop)
    }

    /// A number in the pod's state in the pipeline, such as `order/timed_out_packets`.
    ///
    /// # Errors
    /// The pipeline does not answer.
    pub fn of_pod(&self, path: &str) -> Result<u64> {
        number(&self.nicd.status()?, &format!("/pods/0/{path}"))
    }

    fn wait_until_it_forwards(&mut self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        let known = |state: &Value| {
            [SENDER, RECEIVER, PROVIDER].iter().all(|address| state["neighbours"][address.to_string()].is_string())
        };
        while !known(&self.pod.status()?) {
            self.drain(|_| ())?;
            if Instant::now() > deadline {
                bail!("the gateway does not resolve its next hops: {}", self.pod.status()?);
            }
            interrupt::sleep(Duration::from_millis(5))?;
        }
        Ok(())
    }
}

fn pipeline(settings: &Settings, control: &PathBuf, memif: &PathBuf) -> String {
    let Settings { timeout_ms, queue_entries, limiter, processors, .. } = settings;
    let processor = processors.map_or(String::new(), |Processors { pipeline, .. }| {
        format!("[pipeline]\nprocessor = {pipeline}\nspin_us = 50\n")
    });
    let limiter = if limiter.is_empty() { String::new() } else { format!("[pods.limiter]\n{limiter}") };
    format!(
        "control = {{ socket = {control:?} }}\ndevice = {{ name = \"gw0\", mtu = 1600, frames = 16384 }}\n{processor}\
         [[pods]]\nname = \"vpc\"\nnumber = 1\ncores = 2\norder_queues = 2\nqueue_entries = {queue_entries}\n\
         timeout_us = {}\nown = [\"{}\"]\ninterfaces = [{{ socket = {memif:?} }}]\n{limiter}",
        timeout_ms * 1000,
        frames::GATEWAY,
    )
}

fn pod_configuration(settings: &Settings, control: &PathBuf, memif: &PathBuf) -> String {
    let Settings { vnis, tests, processors, .. } = settings;
    let processors = processors.map_or(String::new(), |Processors { workers: n, .. }| {
        format!("processors = [{n}, {n}]\nring_entries = {RING_ENTRIES}\nspin_us = 0\n")
    });
    let mut text = format!(
        "control = {{ socket = {control:?} }}\n[tests]\n{tests}[gateway]\npod = 1\ncores = 2\n{processors}\
         interfaces = [{memif:?}]\naddresses = [\"{}\"]\nmac = \"{}\"\non_link = [\"10.0.0.0/24\"]\n\
         [[internet]]\nprefix = \"0.0.0.0/0\"\nnext_hop = \"{PROVIDER}\"\n",
        frames::GATEWAY,
        frames::GATEWAY_MAC,
    );
    for vni in vnis {
        // Writing to a string cannot fail.
        let _ = write!(
            text,
            r#"[[vpcs]]
vni = {vni}
routes = [{{ prefix = "192.168.0.0/24", to = "local" }}, {{ prefix = "0.0.0.0/0", to = "internet" }}]
hosts = [
  {{ address = "192.168.0.1", mac = "02:00:00:00:01:01", vtep = "{SENDER}" }},
  {{ address = "192.168.0.2", mac = "02:00:00:00:01:02", vtep = "{RECEIVER}" }},
]
acl = [{{ to_port = {REFUSED_PORT}, allow = false }}, {{ allow = true }}]
"#
        );
    }
    text
}
