//! A random world of hosts with RDMA NICs. The meaning of a seed may change whenever this file does.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use bifrost_endpoint::Service;
use serde::{Deserialize, Serialize};

use crate::rng::Rng;
use crate::swarm::Draw;

/// A world: network, connections, traffic, faults.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Description {
    /// Number of hosts.
    pub hosts: u32,
    /// Rate of each link, bits per second.
    pub rate: f64,
    /// One-way delay from host to host, ns.
    pub delay_ns: u64,
    /// Buffer of the switch, bytes.
    pub buffer_bytes: u64,
    /// Priority flow control: bytes of one sender in the switch above which it is paused.
    pub pause_bytes: Option<u64>,
    /// Share of packets lost.
    pub loss: f64,
    /// Share that is duplicated.
    pub duplicated: f64,
    /// Share that is delayed.
    pub held: f64,
    /// Maximum delay of those, ns.
    pub held_ns: u64,
    /// Share with a flipped bit.
    pub corrupted: f64,
    /// Maximum bytes in flight to a host.
    pub inbound: u64,
    /// How long an application keeps a received message, ns.
    pub keep_ns: u64,
    /// The controller's initial window, bytes.
    pub first_window: u32,
    /// Connections.
    pub connections: Vec<ConnectionPlan>,
    /// Faults.
    pub faults: Vec<Fault>,
}

/// A connection, and the traffic of both ends.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ConnectionPlan {
    /// The host that opens it.
    pub from: u32,
    /// The other one.
    pub to: u32,
    /// RC instead of UC.
    pub reliable: bool,
    /// Interval at which each end changes to the other service, ns; 0: only one service is used.
    #[serde(default)]
    pub switch_every_ns: u64,
    /// Payload of a packet, bytes.
    pub mtu: u16,
    /// Messages are delivered when complete, rather than in order.
    pub when_complete: bool,
    /// Work requests in flight per lane.
    pub credits: u16,
    /// Messages accepted before the application takes them.
    pub window: u16,
    /// Bytes of long messages accepted before the application takes them.
    pub budget: u64,
    /// Traffic of the opening end, and of the other one.
    pub sends: [Sends; 2],
}

/// Messages of one direction.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sends {
    /// When the first is sent, ns.
    pub begin_ns: u64,
    /// Interval between messages, ns.
    pub every_ns: u64,
    /// Length of each, bytes.
    pub lens: Vec<u32>,
}

/// A temporary fault.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fault {
    /// Start, ns.
    pub at_ns: u64,
    /// Duration, ns.
    pub for_ns: u64,
    /// Kind.
    pub what: Trouble,
}

/// Kind of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Trouble {
    /// A host's link is down.
    LinkDown(u32),
    /// A host's process is paused.
    Stall(u32),
    /// Some of eight paths are dead.
    DeadPaths(u8),
    /// At least this share of packets is lost.
    Loss(f64),
    /// Of the queue pairs that a host has connected, the one with number `.1`, modulo their count, goes into the error
    /// state.
    KillQueuePair(u32, u32),
    /// All queue pairs of a host go into the error state.
    ResetNic(u32),
    /// A host is gone forever.
    Gone(u32),
}

impl Trouble {
    /// The affected host.
    fn host(self) -> Option<u32> {
        match self {
            Self::LinkDown(host) | Self::Stall(host) | Self::ResetNic(host) | Self::Gone(host) => Some(host),
            Self::KillQueuePair(host, _) => Some(host),
            Self::DeadPaths(_) | Self::Loss(_) => None,
        }
    }
}

impl ConnectionPlan {
    /// The transport service.
    pub fn service(&self) -> Service {
        match (self.switch_every_ns, self.reliable) {
            (1.., _) => Service::Both,
            (0, true) => Service::Rc,
            (0, false) => Service::Uc,
        }
    }
}

/// RDM §6.5: maximum timeout after doubling, ns.
const LONGEST_TIMEOUT_NS: f64 = 1e8;

impl Description {
    /// When the last fault has ended and the last message was sent, ns.
    pub fn over_ns(&self) -> u64 {
        let faults = self.faults.iter().map(|fault| fault.at_ns + fault.for_ns);
        let sends = self.connections.iter().flat_map(|connection| &connection.sends);
        let sends = sends.map(|sends| sends.begin_ns + sends.every_ns * sends.lens.len() as u64);
        faults.chain(sends).max().unwrap_or(0)
    }

    /// Bytes of all messages.
    pub fn bytes(&self) -> u64 {
        let sends = self.connections.iter().flat_map(|connection| &connection.sends);
        sends.flat_map(|sends| &sends.lens).map(|len| u64::from(*len)).sum()
    }

    /// Maximum delay caused by permanent losses, ns. With few credits, each loss of a unit costs a timeout.
    pub fn repetitions_ns(&self) -> u64 {
        let lost = (self.loss + self.corrupted).min(0.9);
        let plan = |plan: &ConnectionPlan| {
            let units: u32 = plan.sends.iter().flat_map(|sends| &sends.lens).map(|len| len.div_ceil(4096).max(1)).sum();
            let arrives = (1.0 - lost).powi(i32::from(4096 / plan.mtu)).max(0.01);
            f64::from(units) / f64::from(plan.credits) * (1.0 / arrives - 1.0) * LONGEST_TIMEOUT_NS
        };
        self.connections.iter().map(plan).sum::<f64>() as u64
    }

    /// Whether there are no faults except full buffers.
    pub fn is_quiet(&self) -> bool {
        self.faults.is_empty() && self.loss + self.duplicated + self.held + self.corrupted == 0.0
    }
}

/// Reads a world from a TOML file.
///
/// # Errors
/// If the file cannot be read, or is not a world.
pub fn load(path: &Path) -> Result<Description> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let description: Description =
        toml::from_str(&text).with_context(|| format!("{} is not a world", path.display()))?;
    let known = |host: &u32| *host < description.hosts;
    for plan in &description.connections {
        ensure!(known(&plan.from) && known(&plan.to), "a connection needs hosts below {}", description.hosts);
    }
    for fault in &description.faults {
        ensure!(fault.what.host().is_none_or(|host| known(&host)), "a fault needs a host below {}", description.hosts);
    }
    Ok(description)
}

/// The world of a seed.
pub fn describe(seed: u64) -> Description {
    let mut rng = Rng::new(seed ^ 0x5eed_4d3a_0000_0000);
    let rng = &mut rng;
    // Some worlds have no faults.
    let quiet = rng.one_in(10);
    let hosts = if rng.one_in(4) { rng.range(3, 8) } else { 2 } as u32;
    let delay_ns = rng.scale(1_000, 1_000_000);
    let mut share = |most: f64| if quiet || rng.one_in(2) { 0.0 } else { most * rng.unit() * rng.unit() };
    let (loss, duplicated, held, corrupted) = (share(0.06), share(0.03), share(0.03), share(0.02));
    let buffer_bytes = rng.scale(128 << 10, 16 << 20);
    let mut description = Description {
        hosts,
        rate: rng.scale(1_000_000_000, 100_000_000_000) as f64,
        delay_ns,
        buffer_bytes,
        pause_bytes: rng.one_in(5).then_some(buffer_bytes / 8),
        loss,
        duplicated,
        held,
        held_ns: rng.scale(1_000, 4 * delay_ns),
        corrupted,
        inbound: rng.scale(64 << 10, 4 << 20),
        // Sometimes longer than a peer may be silent: a peer that waits for its application is not silent.
        keep_ns: match rng.below(60) {
            0 => rng.range(3_200_000_000, 5_000_000_000),
            1..30 => 0,
            _ => rng.scale(1_000, 5_000_000),
        },
        first_window: rng.scale(1_024, 1 << 20) as u32,
        connections: Vec::new(),
        faults: Vec::new(),
    };
    let span = rng.scale(10_000, 50_000_000);
    let incast = rng.one_in(3);
    let count = if hosts == 2 { rng.range(1, 2) } else { rng.range(2, 12) };
    // Bytes of all connections together. Few worlds send much.
    let mut bytes = rng.scale(1 << 10, 6 << 20);
    for _ in 0..count {
        let to = if incast { 0 } else { rng.below(u64::from(hosts)) as u32 };
        let from = (to + 1 + rng.below(u64::from(hosts - 1)) as u32) % hosts;
        description.connections.push(connection(rng, from, to, span, &mut bytes));
    }
    if !quiet {
        description.faults = faults(rng, hosts, span);
    }
    // Uses separate random numbers, so that the rest of the world does not depend on this. Worlds with only UC stay as
    // they are, because the errors of queue pairs are checked more strictly in them.
    let mut rng = Rng::new(seed ^ 0x5eed_b074_0000_0000);
    for plan in &mut description.connections {
        if plan.reliable && rng.one_in(2) {
            plan.switch_every_ns = rng.scale(1_000, 100_000_000);
        }
    }
    description
}

fn connection(rng: &mut Rng, from: u32, to: u32, span: u64, bytes: &mut u64) -> ConnectionPlan {
    let window = rng.scale(1, 1024) as u16;
    ConnectionPlan {
        from,
        to,
        reliable: rng.one_in(3),
        switch_every_ns: 0,
        mtu: rng.pick(&[256, 512, 1024, 1024, 2048, 4096, 4096]),
        when_complete: rng.one_in(3),
        credits: rng.scale(1, 128) as u16,
        window,
        budget: rng.scale(64 << 10, 64 << 20),
        sends: [sends(rng, span, bytes), sends(rng, span, bytes)],
    }
}

fn sends(rng: &mut Rng, span: u64, bytes: &mut u64) -> Sends {
    if rng.one_in(4) {
        return Sends::default();
    }
    let count = rng.scale(1, 100);
    let mut lens = Vec::new();
    for _ in 0..count {
        let len = length(rng);
        *bytes = bytes.saturating_sub(u64::from(len));
        // When the bytes are used up, messages are short.
        lens.push(if *bytes == 0 { len % 512 } else { len });
    }
    let every_ns = if rng.one_in(2) { 0 } else { span / count };
    Sends { begin_ns: rng.below(span / 2 + 1), every_ns, lens }
}

/// Length of a message, bytes: often near the boundaries of packets, units and short messages.
fn length(rng: &mut Rng) -> u32 {
    const BOUNDARIES: [u32; 8] = [1, 256, 1024, 4096, 8192, 32 << 10, 64 << 10, 256 << 10];
    match rng.below(5) {
        0 => rng.pick(&BOUNDARIES) + rng.below(3) as u32 - 1,
        1 => rng.scale(32 << 10, 1 << 20) as u32,
        _ => rng.scale(1, 64 << 10) as u32,
    }
}

fn faults(rng: &mut Rng, hosts: u32, span: u64) -> Vec<Fault> {
    let mut faults = Vec::new();
    // A peer that is silent for three seconds counts as gone, so all outages together stay well below that.
    let mut outage = 1_500_000_000u64;
    let count = if rng.one_in(3) { 0 } else { rng.scale(1, 24) };
    let kinds = rng.range(1, 63);
    for _ in 0..count {
        let host = rng.below(u64::from(hosts)) as u32;
        let kind = rng.below(6);
        if kinds >> kind & 1 == 0 {
            continue;
        }
        let what = match kind {
            0 => Trouble::LinkDown(host),
            1 => Trouble::Stall(host),
            2 => Trouble::DeadPaths(rng.range(1, 254) as u8),
            3 => Trouble::Loss(rng.unit() * 0.5),
            4 => Trouble::KillQueuePair(host, rng.below(1 << 16) as u32),
            _ => Trouble::ResetNic(host),
        };
        let lasts = kind < 4;
        let for_ns = if lasts { rng.scale(1_000, 1_000_000_000).min(outage) } else { 0 };
        outage -= for_ns;
        faults.push(Fault { at_ns: rng.below(2 * span + 1), for_ns, what });
    }
    if rng.one_in(25) {
        let what = Trouble::Gone(rng.below(u64::from(hosts)) as u32);
        faults.push(Fault { at_ns: rng.below(span + 1), for_ns: 0, what });
    }
    faults.sort_by_key(|fault| fault.at_ns);
    faults
}
