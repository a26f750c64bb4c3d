//! Keepalives of GRE tunnels, as routers of several vendors send them.
//!
//! GRE itself has no keepalives. One end sends a packet through the tunnel that contains a packet back to itself: from
//! the other end's address, with an empty GRE header of protocol type 0 ([`PROTOCOL`]). The other end removes the outer
//! headers and forwards the inner packet like any other. So the other end needs no support for keepalives, and both
//! directions are checked. If a tunnel's keepalives have not come back for some time, the tunnel is down: packets to it
//! are dropped until one comes back.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use bifrost_nic::Parsed;
use bifrost_wire::{Mac, gre, ip};

use crate::decision::Decision;
use crate::encap::{self, Outer};
use crate::rewrite;
use crate::tables::{Tables, Tunnel, TunnelKind};
use crate::{DropReason, HEADROOM, Packet, Service};

/// GRE protocol type of a keepalive that comes back.
pub(crate) const PROTOCOL: u16 = 0;

/// When keepalives of a tunnel are sent, and when it is down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keepalive {
    /// Interval, ns.
    pub interval_ns: u64,
    /// Intervals without a keepalive that came back, after which the tunnel is down.
    pub retries: u32,
}

/// A tunnel that is checked. Clones share the time.
#[derive(Clone, Debug)]
pub(crate) struct Watch {
    keepalive: Keepalive,
    /// When the last keepalive came back, or the first one was sent, ns; [`NOT_BEGUN`] before.
    heard_ns: Arc<AtomicU64>,
}

const NOT_BEGUN: u64 = u64::MAX;

impl Watch {
    pub(crate) fn new(keepalive: Keepalive) -> Self {
        Watch { keepalive, heard_ns: Arc::new(AtomicU64::new(NOT_BEGUN)) }
    }

    /// Time since the last one came back, ns; 0 before the first one was sent.
    fn silence_ns(&self, now: u64) -> u64 {
        now.saturating_sub(self.heard_ns.load(Relaxed))
    }

    pub(crate) fn is_down(&self, now: u64) -> bool {
        self.silence_ns(now) > self.keepalive.interval_ns.saturating_mul(self.keepalive.retries.into())
    }
}

/// State of a tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TunnelState {
    /// Whether packets to it are sent. A tunnel without keepalives is always up.
    pub up: bool,
    /// Time since the last keepalive came back, ns; `None` without keepalives.
    pub silence_ns: Option<u64>,
}

impl Tables {
    /// The state of a tunnel by its index.
    pub fn tunnel_state(&self, index: u32, now: u64) -> TunnelState {
        match self.watch(index) {
            Some(watch) => TunnelState { up: !watch.is_down(now), silence_ns: Some(watch.silence_ns(now)) },
            None => TunnelState { up: true, silence_ns: None },
        }
    }
}

/// Sends the keepalives of all tunnels. Time is `now` of [`Context`](crate::Context).
#[derive(Debug)]
pub struct Keepalives {
    tables: Arc<Tables>,
    /// Tunnels with keepalives, and when the next one is due.
    due: Vec<(u32, u64)>,
}

impl Keepalives {
    /// All keepalives are due at once.
    pub fn new(tables: Arc<Tables>) -> Self {
        let tunnels = 0..tables.tunnels.len() as u32;
        let due = tunnels.filter(|index| tables.watch(*index).is_some()).map(|index| (index, 0)).collect();
        Keepalives { tables, due }
    }

    /// When the next one is due, ns; `None` without any.
    pub fn deadline(&self) -> Option<u64> {
        self.due.iter().map(|(_, at)| *at).min()
    }

    /// Returns the frames that are due. `mac` returns the link-layer address of a next hop. Without it the keepalive is
    /// not sent, and so does not come back.
    pub fn frames(&mut self, now: u64, mac: impl Fn(IpAddr) -> Option<Mac>) -> Vec<Vec<u8>> {
        let Keepalives { tables, due } = self;
        let mut frames = Vec::new();
        for (index, at) in due.iter_mut().filter(|(_, at)| *at <= now) {
            let (Some(watch), Some(tunnel)) = (tables.watch(*index), tables.tunnels.get(*index as usize)) else {
                continue;
            };
            *at = now.saturating_add(watch.keepalive.interval_ns.max(1));
            let _ = watch.heard_ns.compare_exchange(NOT_BEGUN, now, Relaxed, Relaxed);
            frames.extend(tables.next_hop(tunnel.remote).and_then(&mac).and_then(|mac| frame(tables, tunnel, mac)));
        }
        frames
    }
}

/// A keepalive: its outer packet goes through the tunnel, and its inner packet comes back without the tunnel.
fn frame(tables: &Tables, tunnel: &Tunnel, next_hop: Mac) -> Option<Vec<u8>> {
    let TunnelKind::Gre { key } = tunnel.kind else { return None };
    let own = tables.vtep_like(tunnel.remote)?;
    let ethertype = ip::ethertype_of(own);
    let outer = |source, destination| Outer { source, destination, flow_hash: 0, ecn: 0 };
    let mut buffer = [0; HEADROOM];
    let mut packet = Packet::new(&mut buffer, HEADROOM, HEADROOM);
    let back = gre::Header { key, ethertype: PROTOCOL };
    encap::push_gre(&mut packet, back, outer(tunnel.remote, own)).ok()?;
    encap::push_gre(&mut packet, gre::Header { key, ethertype }, outer(own, tunnel.remote)).ok()?;
    encap::push_ethernet(&mut packet, next_hop, tables.mac, ethertype).ok()?;
    Some(packet.bytes().to_vec())
}

impl Decision<'_> {
    /// A keepalive of ours came back. Nothing leaves.
    #[cold]
    pub(crate) fn keepalive_came_back(&mut self, index: u32) -> Result<Service, DropReason> {
        self.note("inner", || format!("a keepalive of tunnel {index} that came back"));
        if self.steps.is_none()
            && let Some(watch) = self.tables.watch(index)
        {
            watch.heard_ns.store(self.context.now, Relaxed);
        }
        Err(DropReason::TunnelKeepalive)
    }

    /// Returns a keepalive of the other end, whose outer headers have been removed, to that end.
    #[cold]
    pub(crate) fn return_keepalive(&mut self, packet: &mut Packet<'_>, inner: &Parsed) -> Result<Service, DropReason> {
        self.note("inner", || format!("a keepalive of {}", inner.dst_ip));
        if rewrite::hop_limit(packet.bytes(), inner) <= 1 {
            return Err(DropReason::HopLimit);
        }
        if !self.state.answers.take(self.context.now, 1) {
            return Err(DropReason::AnswerRate);
        }
        rewrite::decrement_hop_limit(packet.bytes_mut(), inner);
        packet.pull(usize::from(inner.l3));
        let next_hop = self.tables.next_hop(inner.dst_ip);
        self.push_link(packet, next_hop, ip::ethertype_of(inner.dst_ip))?;
        Ok(Service::Answer)
    }
}
