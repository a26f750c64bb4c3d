//! Infers moves of guests from changes of the configuration.

use std::time::Duration;

use anyhow::Result;
use bifrost_control::ConfigDiff;
use bifrost_control::config::{Port, PortKind, Vni};
use bifrost_datapath::{Moved, RouteQuestion};
use bifrost_port::clock::monotonic_ns;
use bifrost_rte::Time;
use bifrost_wire::Mac;

use super::{ARRIVAL, FORWARDING, after, arrivals, departures, learned_address};
use crate::daemon::State;

impl State {
    /// Tells workers which ports a change moves to other hosts. Call it before the ports are removed, so that no packet
    /// is dropped in between.
    pub(crate) fn note_departures(&mut self, diff: &ConfigDiff) -> Result<()> {
        let moved = departures(diff);
        for port in diff.ports.removed.iter().filter(|port| !moved.iter().any(|(moved, _)| moved == port)) {
            let (Some(address), Some(vni)) =
                (learned_address(&self.config, port), bifrost_wire::Vni::new(port.vni.value()))
            else {
                continue;
            };
            self.departed.note(after(Duration::ZERO), (port.vni, port.mac), after(FORWARDING));
            // If nobody takes it, nothing is forwarded.
            self.route_questions.ask(RouteQuestion { vni, address, asked_ns: monotonic_ns() });
        }
        self.note(&moved, Moved::To, FORWARDING)
    }

    /// Tells workers which ports a change has moved here from other hosts.
    pub(crate) fn note_arrivals(&self, diff: &ConfigDiff) -> Result<()> {
        let moved = arrivals(diff);
        self.note(&moved, Moved::From, ARRIVAL)?;
        let is_new = |port: &&Port| !moved.iter().any(|(moved, _)| moved == port);
        let machines = diff.ports.added.iter().filter(|port| port.kind == PortKind::VhostUser).filter(is_new);
        let machines = machines.filter(|port| learned_address(&self.config, port).is_some());
        let of = |port: &Port| Some((bifrost_wire::Vni::new(port.vni.value())?, port.mac));
        self.note_vnics(machines.filter_map(of).map(|vnic| (vnic, Moved::Here)).collect(), after(ARRIVAL))
    }

    /// An answer says that a vNIC is at a peer: if its port was here until lately, packets for it are forwarded.
    pub(crate) fn note_answer(&self, vni: Vni, mac: Mac, peer: u32) -> Result<()> {
        let Some(until) = self.departed.find(after(Duration::ZERO), (vni, mac)) else { return Ok(()) };
        let Some(vni) = bifrost_wire::Vni::new(vni.value()) else { return Ok(()) };
        self.note_vnics(vec![((vni, mac), Moved::To(peer))], until)
    }

    fn note(&self, ports: &[(&Port, &str)], moved: fn(u32) -> Moved, time: Duration) -> Result<()> {
        let until = after(time);
        let of = |(port, peer): &(&Port, &str)| {
            let vni = bifrost_wire::Vni::new(port.vni.value())?;
            Some(((vni, port.mac), moved(self.names.peer(peer)?)))
        };
        self.note_vnics(ports.iter().filter_map(of).collect(), until)
    }

    fn note_vnics(&self, moves: Vec<((bifrost_wire::Vni, Mac), Moved)>, until: Time) -> Result<()> {
        if moves.is_empty() {
            return Ok(());
        }
        tracing::info!(ports = moves.len(), "ports are moving to or from other hosts");
        self.on_all(move |worker| {
            moves.iter().for_each(|((vni, mac), moved)| worker.core_mut().note_moved(*vni, *mac, *moved, until));
        })?;
        Ok(())
    }
}
