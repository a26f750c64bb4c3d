//! What an operator sees of a worker.

use std::collections::BTreeMap;

use bifrost_port::GuestPort;
use bifrost_rte::{ConnSnapshot, PathSnapshot};

use crate::contain::PortFault;
use crate::core::Core;
use crate::counters::WayCounters;
use crate::fault::Fault;

/// One worker.
#[derive(Clone, Debug, Default)]
pub struct WorkerView {
    /// Counters by name, units last.
    pub counters: BTreeMap<String, u64>,
    /// Turns of the loop.
    pub loops: u64,
    /// Turns that found something to do.
    pub busy_loops: u64,
    /// Time in those, ns.
    pub busy_ns: u64,
    /// Datagrams from and to the underlay.
    pub underlay_packets: (u64, u64),
    /// Ports.
    pub ports: Vec<PortView>,
    /// Connections, with the number of the peer.
    pub connections: Vec<(u16, ConnSnapshot)>,
    /// Paths, with the number of the peer.
    pub paths: Vec<PathView>,
    /// Injected faults and their hits.
    pub faults: Vec<(Fault, u64)>,
}

/// One path.
#[derive(Clone, Debug)]
pub struct PathView {
    /// Number of the peer.
    pub peer: u16,
    /// Local address of the path.
    pub local: std::net::IpAddr,
    /// Remote address of the path.
    pub remote: std::net::IpAddr,
    /// UDP source port.
    pub source_port: u16,
    /// What the transport knows of it; nothing, if the peer speaks plain VXLAN only.
    pub snapshot: PathSnapshot,
}

/// One port.
#[derive(Clone, Debug, Default)]
pub struct PortView {
    /// Its number.
    pub owner: u16,
    /// Packets from the guest.
    pub tx_packets: u64,
    /// Bytes of them.
    pub tx_bytes: u64,
    /// Packets to the guest.
    pub rx_packets: u64,
    /// Bytes of them.
    pub rx_bytes: u64,
    /// What became of the guest's packets.
    pub way: WayCounters,
    /// Fetched packets for which the switch has not decided, and those that wait for a window, now.
    pub waiting_packets: (u64, u64),
    /// Destinations for which packets wait for a window, now.
    pub waiting_destinations: u64,
    /// The guest's packets that are held until they are acknowledged.
    pub held_packets: u64,
    /// How often the guest had to wait because it had sent what it may.
    pub held_back_times: u64,
    /// Its device is gone.
    pub failed: bool,
    /// The last fault that took it out of use; it may be in use again.
    pub fault: Option<PortFault>,
    /// How often a fault took it out of use.
    pub fault_times: u64,
    /// Turns in which it kept the worker for more than a millisecond beyond what its packets need.
    pub slow_turns: u64,
    /// Time beyond what its packets need, ns, in these.
    pub slow_ns: u64,
    /// How often it had to rest for that.
    pub rest_times: u64,
    /// Packets for it that came while it rested.
    pub rest_packets: u64,
    /// What the device's queue counts itself.
    pub counters: Vec<(String, u64)>,
    /// What the switch counts of it, units last.
    pub switch: Vec<(&'static str, u64)>,
    /// Packets for the guest beyond its limits.
    pub rate_limited_packets: u64,
    /// Packets for the guest beyond its share while the worker could not keep up.
    pub overload_dropped_packets: u64,
    /// The switch's drops by reason, and what was more than the guest may get.
    pub drops: BTreeMap<String, u64>,
}

impl<P: GuestPort> Core<P> {
    fn drops(&self, owner: u16, beyond: [(&'static str, u64); 4]) -> BTreeMap<String, u64> {
        let by_switch = self.switch.port_counters(bifrost_avs::PortId(owner));
        let by_switch = by_switch
            .into_iter()
            .flat_map(|c| c.dropped.iter().chain(c.ingress_dropped.iter()))
            .map(|(reason, n)| (reason.name(), n));
        let all = by_switch.chain(beyond);
        let mut drops = BTreeMap::new();
        for (reason, n) in all.filter(|(_, n)| *n > 0) {
            *drops.entry(reason.to_string()).or_default() += n;
        }
        drops
    }

    fn by_switch(&self, port: bifrost_avs::PortId) -> Vec<(&'static str, u64)> {
        let packets = self.switch.port_counters(port).into_iter().flat_map(|counters| counters.iter());
        let sessions = self.switch.port_sessions(port).into_iter().flat_map(|sessions| sessions.iter());
        packets.chain(sessions).collect()
    }

    /// A picture of everything. `connections`: also of each connection, which may be many.
    pub fn view(&self, connections: bool) -> WorkerView {
        // Reasons that never came up are many, and say nothing.
        let by_reason = |name: &str| name.starts_with("refused.") || name.starts_with("malformed.");
        let mut counters: BTreeMap<String, u64> =
            self.counters.iter().filter(|(name, value)| *value > 0 || !by_reason(name)).collect();
        counters.extend(self.engine.counters().iter().map(|(name, value)| (format!("rte.{name}"), value)));
        counters.extend(
            self.switch.underlay_counters().iter().map(|(name, value)| (format!("avs.underlay_{name}"), value)),
        );
        counters.extend(self.switch.session_counters().iter().map(|(name, value)| (format!("avs.{name}"), value)));
        let balanced = self.switch.connection_counters().iter();
        counters.extend(balanced.map(|(name, value)| (format!("avs.balanced_{name}"), value)));
        counters.extend(self.switch.nat_counters().iter().map(|(name, value)| (format!("avs.{name}"), value)));
        counters.extend(self.switch.fragment_counters().iter().map(|(name, value)| (format!("avs.{name}"), value)));
        counters.extend(self.switch.flow_counters().iter().map(|(name, value)| (format!("avs.{name}"), value)));
        let logged = self.switch.flow_log_counters();
        counters.extend(logged.iter().map(|(name, value)| (format!("avs.flow_log_{name}"), value)));
        let ruled = self.switch.rule_log_counters();
        counters.extend(ruled.iter().map(|(name, value)| (format!("avs.rule_log_{name}"), value)));
        let (send, receive) = self.engine.pages_used();
        counters.insert("rte.send_pages".to_string(), u64::from(send));
        counters.insert("rte.receive_pages".to_string(), u64::from(receive));
        counters.insert("datapath.unread_datagrams".to_string(), self.arrived.len() as u64);
        counters.insert("fault.waiting_packets".to_string(), self.delayed.len() as u64);
        counters.insert("rte.connections".to_string(), self.engine.connections() as u64);
        let ports = self.ports.iter().flatten().map(|p| PortView {
            owner: p.owner,
            tx_packets: p.tx_packets,
            tx_bytes: p.tx_bytes,
            rx_packets: p.rx_packets,
            rx_bytes: p.rx_bytes,
            way: p.way,
            waiting_packets: p.waiting(),
            waiting_destinations: p.waiting.destinations() as u64,
            held_packets: p.held_packets(),
            held_back_times: p.held_back,
            failed: p.failed,
            fault: p.fault.clone(),
            fault_times: p.fault_times,
            slow_turns: p.slowness.slow_turns,
            slow_ns: p.slowness.slow_ns,
            rest_times: p.slowness.rest_times,
            rest_packets: p.slowness.rest_packets,
            counters: p.port.counters(),
            switch: self.by_switch(bifrost_avs::PortId(p.owner)),
            rate_limited_packets: p.rate_limited,
            overload_dropped_packets: p.overload_dropped,
            drops: self.drops(
                p.owner,
                [
                    ("window_full", p.way.window_full_packets),
                    ("rate_limited", p.rate_limited),
                    ("overload", p.overload_dropped),
                    ("slow_port", p.slowness.rest_packets),
                ],
            ),
        });
        let of_transport = self.engine.path_snapshots(self.now);
        let known = of_transport.filter_map(|snapshot| Some((self.peers.of_engine(snapshot.peer)?, snapshot)));
        let plain = self.peers.iter().flat_map(|peer| peer.unmeasured().map(move |snapshot| (peer, snapshot)));
        let paths = known.chain(plain).filter_map(|(peer, snapshot)| {
            let (local, remote) = *peer.config.paths.get(snapshot.path.index())?;
            let source_port = peer.config.source_port_base.wrapping_add(snapshot.path.index() as u16);
            Some(PathView { peer: peer.config.id, local, remote, source_port, snapshot })
        });
        let connections = connections.then(|| {
            self.engine
                .connection_snapshots(self.now)
                .filter_map(|c| Some((self.peers.of_engine(c.peer)?.config.id, c)))
                .collect()
        });
        WorkerView {
            counters,
            loops: self.counters.loops,
            busy_loops: self.counters.busy_loops,
            busy_ns: self.counters.busy_ns,
            underlay_packets: (self.counters.underlay_rx_packets, self.counters.underlay_tx_packets),
            ports: ports.collect(),
            connections: connections.unwrap_or_default(),
            paths: paths.collect(),
            faults: self.faults.iter().copied().collect(),
        }
    }
}
