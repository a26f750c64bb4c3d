//! Reads the counters, logs, ports and vNIC locations of a switch, and counts frames from the underlay.

use bifrost_nic::Parsed;
use bifrost_wire::protocol::{ICMP, ICMPV6, TCP, UDP};
use bifrost_wire::{Mac, Vni};

use super::Switch;
use crate::counters::{PortCounters, UnderlayCounters};
use crate::flow::FlowCounters;
use crate::flow_log::{FlowLogCounters, FlowRecord};
use crate::fragments::FragmentCounters;
use crate::frame::Frame;
use crate::ids::{PeerId, PortId, WorkerId};
use crate::location::{Location, Owner};
use crate::mapping::NatCounters;
use crate::pipeline;
use crate::port_state::PortState;
use crate::rule_log::{RuleLogCounters, RuleRecord};
use crate::session::{PortSessions, SessionCounters};
use crate::shared::Claim;
use crate::tables::{GATEWAY_MAC, Port};
use crate::verdict::{Action, Verdict};

impl Switch {
    /// Counters of all ports, by port number.
    pub fn counters(&self) -> impl Iterator<Item = (PortId, &PortCounters)> {
        self.index.ports().filter_map(|port| Some((port.id, self.port_counters(port.id)?)))
    }

    /// Counters of one port.
    pub fn port_counters(&self, port: PortId) -> Option<&PortCounters> {
        self.index.port(port)?;
        self.ports.get(port.place()).map(|state| &state.counters)
    }

    /// Resets the counters of a port, as those of its device are reset when the device is created again.
    pub fn forget_counters(&mut self, port: PortId) {
        if let Some(state) = self.ports.get_mut(port.place()) {
            state.counters = PortCounters::default();
            self.sessions.forget_counters(port);
        }
    }

    /// Counters of the sessions of one port.
    pub fn port_sessions(&self, port: PortId) -> Option<PortSessions> {
        self.index.port(port)?;
        Some(self.sessions.of_port(port))
    }

    /// Counters of frames from the underlay.
    pub fn underlay_counters(&self) -> &UnderlayCounters {
        &self.underlay
    }

    /// Counters of sessions.
    pub fn session_counters(&self) -> &SessionCounters {
        self.sessions.counters()
    }

    /// Counters of NAT mappings.
    pub fn nat_counters(&self) -> &NatCounters {
        &self.mappings.counters
    }

    /// Number of used ports of an outside address at an uplink: of TCP, of UDP, and of echo requests.
    pub fn nat_ports(&self, uplink: PortId, address: std::net::IpAddr) -> [u32; 3] {
        let echo = if address.is_ipv4() { ICMP } else { ICMPV6 };
        [TCP, UDP, echo].map(|protocol| self.mappings.used(uplink, protocol, address))
    }

    /// Counters of connections through load balancers and NAT, which are sessions, too.
    pub fn connection_counters(&self) -> &SessionCounters {
        self.connections.counters()
    }

    /// Counters of fragmented packets.
    pub fn fragment_counters(&self) -> &FragmentCounters {
        self.fragments.counters()
    }

    /// Counters of flow records.
    pub fn flow_counters(&self) -> &FlowCounters {
        &self.cache.counters
    }

    /// Counters of flow logs.
    pub fn flow_log_counters(&self) -> FlowLogCounters {
        self.flow_logs.as_ref().map_or(self.logged, |logs| self.logged.and(&logs.counters()))
    }

    /// Names of the flow logs that log, or have ended and still have records.
    pub fn flow_logs(&self) -> impl Iterator<Item = &std::sync::Arc<str>> {
        self.flow_logs.iter().flat_map(|logs| logs.names())
    }

    /// Scans the next of `parts` parts of each flow log at `now_ns` of the switch's time, and adds the records of
    /// conversations that have ended or last long. Returns whether logging has ended and all records have been taken.
    pub fn take_flow_records(&mut self, parts: usize, now_ns: u64, out: &mut Vec<FlowRecord>) -> bool {
        let Some(logs) = &mut self.flow_logs else { return true };
        self.logged = self.logged.and(&logs.take(parts, now_ns, out));
        if !logs.is_empty() {
            return false;
        }
        (self.flow_logs, self.is_logging) = (None, false);
        true
    }

    /// Ends all flow logs at `now_ns` of the switch's time, and adds all their records.
    pub fn end_flow_logs(&mut self, now_ns: u64, out: &mut Vec<FlowRecord>) {
        self.set_flow_logs(Vec::new());
        // The first scan begins in the middle of a table.
        for _ in 0..2 {
            self.take_flow_records(1, now_ns, out);
        }
    }

    /// Ends all rule logs at `now_ns` of the switch's time, and adds their records.
    pub fn end_rule_logs(&mut self, now_ns: u64, out: &mut Vec<RuleRecord>) {
        self.rule_logs.end_all(&mut self.ports, now_ns, out);
    }

    /// Counters of rule logs.
    pub fn rule_log_counters(&self) -> RuleLogCounters {
        self.rule_logs.counters(&self.ports)
    }

    /// Adds the due records of the rule logs of the next of `parts` parts of the ports, at `now_ns` of the switch's
    /// time. Returns whether rule logs are off and all records have been taken.
    pub fn take_rule_records(&mut self, parts: usize, now_ns: u64, out: &mut Vec<RuleRecord>) -> bool {
        self.rule_logs.take(&mut self.ports, parts, now_ns, out);
        self.rule_logs.spec.is_none()
    }

    /// Takes the claims of vNICs to shared addresses since the last call: at most one per vNIC and address.
    pub fn take_claims(&mut self, out: &mut Vec<Claim>) {
        self.claims.take(out);
    }

    /// The description of a port.
    pub fn port(&self, port: PortId) -> Option<&Port> {
        self.index.port(port).map(|(p, _)| &p.port)
    }

    /// The other worker of this host that serves packets from vNIC `from` to the local vNIC `to`. `None`: this worker
    /// serves them, or `to` is not on this host.
    pub fn other_worker(&self, vni: Vni, from: Mac, to: Mac) -> Option<WorkerId> {
        if !self.index.has_affinity() {
            return None;
        }
        match self.index.vpc(vni)?.location(to)? {
            Location::Local(port) => self.index.other_worker(port, from),
            Location::Remote(_) => None,
        }
    }

    /// The only worker that serves a vNIC, if there is one.
    pub fn home(&self, vni: Vni, mac: Mac) -> Option<WorkerId> {
        match self.index.vpc(vni)?.location(mac)? {
            Location::Local(port) => self.index.port(port)?.0.port.home,
            Location::Remote(_) => None,
        }
    }

    /// Whether the vNIC with this MAC address is on host `peer`, according to the routes; or may be, in a network whose
    /// routes are learned.
    pub fn is_at_peer(&self, vni: Vni, mac: Mac, peer: PeerId) -> bool {
        self.index
            .vpc(vni)
            .is_some_and(|vpc| vpc.location(mac) == Some(Location::Remote(peer)) || vpc.may_learn_vnic_at(mac, peer))
    }

    /// The host of a frame's sender, according to the routes: by its MAC address, or by its IP address if the frame
    /// came through the gateway.
    pub fn host_of_sender(&self, vni: Vni, parsed: &Parsed) -> Option<PeerId> {
        let vpc = self.index.vpc(vni)?;
        let location = match vpc.owner(parsed.src_ip) {
            Some(Owner::Vnic(hop)) if parsed.src_mac == GATEWAY_MAC => hop.path.location(),
            _ => vpc.location(parsed.src_mac)?,
        };
        match location {
            Location::Remote(peer) => Some(peer),
            Location::Local(_) => None,
        }
    }

    /// Whether a peer may send a frame at all; this is the first stage of [`from_underlay`](Self::from_underlay).
    pub fn admits_from_underlay(&self, vni: Vni, peer: PeerId, frame_head: &[u8], parsed: &Parsed) -> bool {
        let frame = Frame::whole(frame_head, parsed);
        self.index.vpc(vni).is_some_and(|vpc| pipeline::admits_from_peer(&self.index, vpc, peer, frame))
    }
}

/// Counts a packet that a note or a flow record delivers to a port.
#[inline(always)]
pub(super) fn count_accepted(underlay: &mut UnderlayCounters, ports: &mut [PortState], verdict: &Verdict) {
    if let Action::Deliver { port, .. } = verdict.action
        && let Some(state) = ports.get_mut(port.place())
    {
        state.counters.from_underlay_packets += 1;
        underlay.accepted_packets += 1;
    }
}

/// Counts a packet that the pipeline has processed. `port`: the receiver, if there is one.
#[inline(always)]
pub(super) fn count_from_underlay(
    underlay: &mut UnderlayCounters,
    ports: &mut [PortState],
    port: Option<PortId>,
    verdict: &Verdict,
) {
    let Some(state) = port.and_then(|port| ports.get_mut(port.place())) else {
        if let Action::Drop(reason) = verdict.action {
            underlay.dropped.count(reason);
        }
        return;
    };
    match verdict.action {
        Action::Deliver { .. } | Action::Forward { .. } => {
            state.counters.from_underlay_packets += 1;
            underlay.accepted_packets += 1;
        }
        Action::Drop(reason) => {
            state.counters.ingress_dropped.count(reason);
            underlay.ingress_dropped_packets += 1;
        }
        Action::Answer { .. } => underlay.too_big_answered_packets += 1,
        // Packets of peers are never copied, wait for no route, and peers cannot use services of the host.
        Action::Copy | Action::Host | Action::Ask { .. } => {}
    }
}
