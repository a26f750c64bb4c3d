//! Mirrors: fetches copies of packets from the workers, and sends them in VXLAN (RFC 7348).
//!
//! This runs on its own thread, so that no worker waits for the network. A worker's buffer for copies is bounded.
//! Copies that cannot be sent at once are counted and dropped.

pub(crate) mod forward;

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use bifrost_control::api::MirrorStatus;
use bifrost_control::config::{Config, Mirror};
use bifrost_datapath::capture::{Copies, MirrorSpec};
use bifrost_wire::{Vni, vxlan};

use crate::names::Names;

/// Interval of fetches while there are mirrors, and of checks for mirrors otherwise.
const TICK: Duration = Duration::from_millis(5);
const IDLE_TICK: Duration = Duration::from_millis(100);
/// Buffer of each worker, bytes. There are two: one is filled while the other one is sent.
pub(crate) const COPIES_BYTES: usize = 2 << 20;
/// Pause after a panic, which may recur.
const AFTER_PANIC: Duration = Duration::from_secs(1);
/// Minimum interval between warnings.
const WARN_INTERVAL: Duration = Duration::from_secs(60);

/// Counters of the copies of one mirror.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counters {
    /// Sent.
    pub(crate) sent_packets: u64,
    /// Did not fit into a worker's buffer.
    pub(crate) missed_packets: u64,
    /// Could not be sent.
    pub(crate) unsent_packets: u64,
}

impl Counters {
    /// Every counter by name.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
        [
            ("sent_packets", self.sent_packets),
            ("missed_packets", self.missed_packets),
            ("unsent_packets", self.unsent_packets),
        ]
        .into_iter()
    }

    fn add(&mut self, more: &Counters) {
        self.sent_packets += more.sent_packets;
        self.missed_packets += more.missed_packets;
        self.unsent_packets += more.unsent_packets;
    }
}

/// Total of all mirrors, including removed ones, and counters of existing mirrors by name.
#[derive(Debug, Default)]
pub(crate) struct Counted {
    pub(crate) all: Counters,
    by_name: BTreeMap<String, Counters>,
}

/// Mirrors for the workers, in the order of the configuration.
pub(crate) fn specs(config: &Config, names: &Names) -> Vec<MirrorSpec> {
    let spec = |mirror: &Mirror| MirrorSpec {
        ports: config.ports.iter().filter(|port| mirror.has(port)).filter_map(|port| names.port(&port.name)).collect(),
        from_guests: mirror.from_guests,
        to_guests: mirror.to_guests,
        protocols: mirror.protocols.clone(),
        prefixes: mirror.prefixes.clone(),
        l4_ports: mirror.l4_ports.clone(),
        one_in: mirror.one_in,
        truncate: mirror.truncate,
    };
    config.mirrors.iter().map(spec).collect()
}

/// The status of mirrors for the API.
pub(crate) fn status(config: &Config, counted: &Counted) -> Vec<MirrorStatus> {
    let status = |mirror: &Mirror| {
        let counters = counted.by_name.get(&mirror.name).copied().unwrap_or_default();
        let direction = match (mirror.from_guests, mirror.to_guests) {
            (true, true) => "both",
            (true, false) => "egress",
            _ => "ingress",
        };
        MirrorStatus {
            name: mirror.name.clone(),
            ports: config.ports.iter().filter(|port| mirror.has(port)).map(|port| port.name.clone()).collect(),
            direction: direction.to_owned(),
            target: mirror.target,
            target_vni: mirror.target_vni.value(),
            one_in: mirror.one_in,
            truncate_bytes: mirror.truncate,
            sent_packets: counters.sent_packets,
            missed_packets: counters.missed_packets,
            unsent_packets: counters.unsent_packets,
        }
    };
    config.mirrors.iter().map(status).collect()
}

/// Sends copies, each to the target of its mirror.
#[derive(Default)]
struct Sender {
    sockets: BTreeMap<SocketAddr, UdpSocket>,
    datagram: Vec<u8>,
    last_warning: Option<Instant>,
}

impl Sender {
    fn send(&mut self, mirrors: &[Mirror], fetched: &[Copies]) -> Vec<(String, Counters)> {
        self.sockets.retain(|target, _| mirrors.iter().any(|mirror| mirror.target == *target));
        let mut counted: Vec<(String, Counters)> =
            mirrors.iter().map(|mirror| (mirror.name.clone(), Counters::default())).collect();
        for copies in fetched {
            for (index, frame) in copies.iter() {
                // A reload may have happened in between: copies for removed mirrors are dropped.
                let Some((mirror, (_, counters))) =
                    mirrors.get(usize::from(index)).zip(counted.get_mut(usize::from(index)))
                else {
                    continue;
                };
                match self.send_one(mirror, frame) {
                    Ok(()) => counters.sent_packets += 1,
                    Err(error) => {
                        counters.unsent_packets += 1;
                        self.warn(mirror, &error);
                    }
                }
            }
            for ((_, counters), missed) in counted.iter_mut().zip(copies.missed()) {
                counters.missed_packets += missed;
            }
        }
        counted
    }

    fn send_one(&mut self, mirror: &Mirror, frame: &[u8]) -> io::Result<()> {
        let socket = match self.sockets.entry(mirror.target) {
            std::collections::btree_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::btree_map::Entry::Vacant(entry) => entry.insert(open(mirror.target)?),
        };
        let vni = Vni::new(mirror.target_vni.value()).unwrap_or_default();
        self.datagram.clear();
        self.datagram.extend_from_slice(&vxlan::emit(vni));
        self.datagram.extend_from_slice(frame);
        match socket.send(&self.datagram) {
            // The error is about an earlier datagram, is reported once, and prevented this one from being sent.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => socket.send(&self.datagram).map(drop),
            sent => sent.map(drop),
        }
    }

    fn warn(&mut self, mirror: &Mirror, error: &io::Error) {
        if self.last_warning.is_none_or(|last| last.elapsed() >= WARN_INTERVAL) {
            self.last_warning = Some(Instant::now());
            let (name, target) = (&mirror.name, mirror.target);
            tracing::warn!(mirror = name, %target, %error, "mirrored packets are lost");
        }
    }
}

/// A non-blocking socket.
fn open(target: SocketAddr) -> io::Result<UdpSocket> {
    let any = match target {
        SocketAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
        SocketAddr::V6(_) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
    };
    let socket = UdpSocket::bind(any)?;
    socket.set_nonblocking(true)?;
    socket.connect(target)?;
    Ok(socket)
}
