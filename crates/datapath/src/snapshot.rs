//! An operator's view of a worker.

use std::collections::BTreeMap;
use std::sync::Arc;

use bifrost_avs::{
    FlowCounters, FlowLogCounters, FragmentCounters, NatCounters, PortCounters, PortId, PortSessions, RuleLogCounters,
    SessionCounters, UnderlayCounters,
};
use bifrost_port::{GuestPort, KernelCounters};
use bifrost_rte::{ConnSnapshot, PathSnapshot};

use crate::contain::PortFault;
use crate::core::Core;
use crate::counters::{Counters, OutboundCounters};
use crate::fault::Fault;
use crate::ports::Port;

/// A whole worker at one moment. The time to make it does not depend on how many objects there are.
#[derive(Clone, Debug, Default)]
pub struct Totals {
    /// Counters of the data path itself.
    pub own: Counters,
    /// Number of connections.
    pub connections: usize,
    /// Injected faults and their hits.
    pub faults: Vec<(Fault, u64)>,
    transport: bifrost_rte::Counters,
    underlay: UnderlayCounters,
    sessions: SessionCounters,
    balanced: SessionCounters,
    nat: NatCounters,
    fragments: FragmentCounters,
    flows: FlowCounters,
    flow_log: FlowLogCounters,
    rule_log: RuleLogCounters,
    /// Pages of send and receive windows.
    pages: (u32, u32),
    unread_datagrams: usize,
    delayed_packets: usize,
}

impl Totals {
    /// All counters by name, units last.
    pub fn counters(&self) -> BTreeMap<String, u64> {
        // There are many reasons; those that never occurred are not interesting.
        let by_reason = |name: &str| name.starts_with("refused.") || name.starts_with("malformed.");
        let mut counters: BTreeMap<String, u64> =
            self.own.iter().filter(|(name, value)| *value > 0 || !by_reason(name)).collect();
        counters.extend(self.transport.iter().map(|(name, value)| (format!("rte.{name}"), value)));
        counters.extend(self.underlay.iter().map(|(name, value)| (format!("avs.underlay_{name}"), value)));
        counters.extend(self.sessions.iter().map(|(name, value)| (format!("avs.{name}"), value)));
        counters.extend(self.balanced.iter().map(|(name, value)| (format!("avs.balanced_{name}"), value)));
        counters.extend(self.nat.iter().map(|(name, value)| (format!("avs.{name}"), value)));
        counters.extend(self.fragments.iter().map(|(name, value)| (format!("avs.{name}"), value)));
        counters.extend(self.flows.iter().map(|(name, value)| (format!("avs.{name}"), value)));
        counters.extend(self.flow_log.iter().map(|(name, value)| (format!("avs.flow_log_{name}"), value)));
        counters.extend(self.rule_log.iter().map(|(name, value)| (format!("avs.rule_log_{name}"), value)));
        let (send, receive) = self.pages;
        counters.insert("rte.send_pages".to_string(), u64::from(send));
        counters.insert("rte.receive_pages".to_string(), u64::from(receive));
        counters.insert("datapath.unread_datagrams".to_string(), self.unread_datagrams as u64);
        counters.insert("fault.waiting_packets".to_string(), self.delayed_packets as u64);
        counters.insert("rte.connections".to_string(), self.connections as u64);
        counters
    }
}

/// One path.
#[derive(Clone, Debug)]
pub struct PathView {
    /// Number of the peer.
    pub peer: u32,
    /// Local address of the path.
    pub local: std::net::IpAddr,
    /// Remote address of the path.
    pub remote: std::net::IpAddr,
    /// UDP source port.
    pub source_port: u16,
    /// The transport's view of it; without measurements if the peer supports only plain VXLAN.
    pub snapshot: PathSnapshot,
}

/// One port at one moment.
#[derive(Clone, Debug, Default)]
pub struct PortView {
    /// Its number.
    pub owner: u32,
    /// Packets from the guest.
    pub tx_packets: u64,
    /// Their bytes.
    pub tx_bytes: u64,
    /// Packets to the guest.
    pub rx_packets: u64,
    /// Their bytes.
    pub rx_bytes: u64,
    /// What happened to the guest's packets.
    pub outbound: OutboundCounters,
    /// Fetched packets that the switch has not decided about, and those that wait for a window, now.
    pub waiting_packets: (u64, u64),
    /// Destinations for which packets wait for a window, now.
    pub waiting_destinations: u64,
    /// Fetched packets that wait until a route is learned.
    pub learning_packets: u64,
    /// The guest's packets that are held until they are acknowledged.
    pub held_packets: u64,
    /// How often the guest had to wait because it had used up its send limit.
    pub held_back_times: u64,
    /// Its device is gone.
    pub failed: bool,
    /// The last fault that took it out of use; it may be in use again.
    pub fault: Option<PortFault>,
    /// How often a fault took it out of use.
    pub fault_times: u64,
    /// Turns in which it kept the worker busy for more than a millisecond beyond what its packets need.
    pub slow_turns: u64,
    /// Time beyond what its packets need, ns, in these.
    pub slow_ns: u64,
    /// How often it had to rest because of that.
    pub rest_times: u64,
    /// Packets for it that arrived while it rested.
    pub rest_packets: u64,
    /// Packets for the guest beyond its limits.
    pub rate_limited_packets: u64,
    /// Packets for the guest beyond its share while the worker could not keep up.
    pub overload_dropped_packets: u64,
    /// Counters of the device's queue.
    pub device: Vec<(String, u64)>,
    /// Reads the kernel's counters of the device.
    pub kernel: Option<Arc<dyn KernelCounters>>,
    switch: Option<PortCounters>,
    sessions: Option<PortSessions>,
}

impl PortView {
    /// The switch's counters of it, units last.
    pub fn switch(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let packets = self.switch.iter().flat_map(PortCounters::iter);
        packets.chain(self.sessions.iter().flat_map(PortSessions::iter))
    }

    /// [`switch`](Self::switch) with all counters, for callers that need their names.
    pub fn counted_by_switch() -> PortView {
        PortView {
            switch: Some(PortCounters::default()),
            sessions: Some(PortSessions::default()),
            ..PortView::default()
        }
    }

    /// The switch's drops by reason, and packets beyond the limits of the guest.
    pub fn drops(&self) -> BTreeMap<String, u64> {
        let by_switch = self.switch.iter().flat_map(|c| c.dropped.iter().chain(c.ingress_dropped.iter()));
        let beyond = [
            ("window_full", self.outbound.window_full_packets),
            ("queue_full", self.outbound.queue_full_packets),
            ("rate_limited", self.rate_limited_packets),
            ("overload", self.overload_dropped_packets),
            ("slow_port", self.rest_packets),
        ];
        let all = by_switch.map(|(reason, n)| (reason.name(), n)).chain(beyond);
        let mut drops = BTreeMap::new();
        for (reason, n) in all.filter(|(_, n)| *n > 0) {
            *drops.entry(reason.to_string()).or_default() += n;
        }
        drops
    }
}

impl<P: GuestPort> Core<P> {
    /// A view of the whole worker.
    pub fn totals(&self) -> Totals {
        Totals {
            own: self.counters.clone(),
            connections: self.engine.connections(),
            faults: self.faults.iter().copied().collect(),
            transport: *self.engine.counters(),
            underlay: self.switch.underlay_counters().clone(),
            sessions: *self.switch.session_counters(),
            balanced: *self.switch.connection_counters(),
            nat: *self.switch.nat_counters(),
            fragments: *self.switch.fragment_counters(),
            flows: *self.switch.flow_counters(),
            flow_log: self.switch.flow_log_counters(),
            rule_log: self.switch.rule_log_counters(),
            pages: self.engine.pages_used(),
            unread_datagrams: self.arrived.len(),
            delayed_packets: self.delayed.len(),
        }
    }

    /// All ports at once, for tests and simulations: there may be many.
    pub fn port_views(&self) -> impl Iterator<Item = PortView> {
        (0..self.port_places()).filter_map(|owner| self.port_view(owner))
    }

    /// Upper bound of the ports' numbers, exclusive.
    pub(crate) fn port_places(&self) -> u32 {
        self.ports.len() as u32
    }

    /// One port.
    pub(crate) fn port_view(&self, owner: u32) -> Option<PortView> {
        let p = self.port(owner)?;
        let switch = self.switch.port_counters(PortId(owner)).cloned();
        Some(PortView {
            owner,
            tx_packets: p.tx_packets,
            tx_bytes: p.tx_bytes,
            rx_packets: p.rx_packets,
            rx_bytes: p.rx_bytes,
            outbound: p.outbound,
            waiting_packets: p.waiting(),
            waiting_destinations: p.waiting.destinations() as u64,
            learning_packets: p.learning_packets(),
            held_packets: p.held_packets(),
            held_back_times: p.held_back,
            failed: p.failed,
            fault: p.fault.clone(),
            fault_times: p.fault_times,
            slow_turns: p.slowness.slow_turns,
            slow_ns: p.slowness.slow_ns,
            rest_times: p.slowness.rest_times,
            rest_packets: p.slowness.rest_packets,
            rate_limited_packets: p.rate_limited,
            overload_dropped_packets: p.overload_dropped,
            device: p.port.counters(),
            kernel: p.port.kernel_counters(),
            switch,
            sessions: self.switch.port_sessions(PortId(owner)),
        })
    }

    /// Packets from and to the guest of one port.
    pub(crate) fn port_traffic(&self, owner: u32) -> Option<(u64, u64)> {
        self.port(owner).map(|p| (p.tx_packets, p.rx_packets))
    }

    /// The connection at one of the engine's places, with the number of its peer.
    pub(crate) fn connection_view(&self, place: u32) -> Option<(u32, ConnSnapshot)> {
        let snapshot = self.engine.connection_snapshot(self.now, place)?;
        Some((self.peers.of_engine(snapshot.peer)?.config.id, snapshot))
    }

    /// Upper bound of the peers' numbers, exclusive.
    pub(crate) fn peer_places(&self) -> u32 {
        self.peers.places() as u32
    }

    /// The paths to one peer, at most 8.
    pub(crate) fn path_views(&self, peer: u32) -> impl Iterator<Item = PathView> {
        self.peers.get(peer).into_iter().flat_map(move |peer| {
            let measured = peer.engine.into_iter().flat_map(move |id| self.engine.path_snapshots_to(self.now, id));
            measured.chain(peer.unmeasured()).filter_map(move |snapshot| {
                let (local, remote) = *peer.config.paths.get(snapshot.path.index())?;
                let source_port = peer.config.source_port_base.wrapping_add(snapshot.path.index() as u16);
                Some(PathView { peer: peer.config.id, local, remote, source_port, snapshot })
            })
        })
    }

    fn port(&self, owner: u32) -> Option<&Port<P>> {
        self.ports.get(owner as usize)?.as_ref()
    }
}
