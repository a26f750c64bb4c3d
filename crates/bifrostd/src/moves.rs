//! Ports that move between hosts: a change that removes a port and adds a route to its vNIC at a peer, or the reverse.
//! The old host forwards packets that peers still send to it.

use std::collections::HashMap;
use std::time::Duration;

use anyhow::Result;
use bifrost_control::ConfigDiff;
use bifrost_control::config::{Port, Route, Vni};
use bifrost_datapath::Moved;
use bifrost_port::clock::monotonic_ns;
use bifrost_rte::Time;
use bifrost_wire::Mac;

use crate::daemon::State;

/// How long the old host forwards packets for a moved port, and how long the new host accepts them once the guest runs.
const FORWARDING: Duration = Duration::from_secs(30);
/// How long a port that has moved to this host may wait for its guest.
const ARRIVAL: Duration = Duration::from_secs(600);

/// Until when forwarded packets are accepted for a guest that has just started here.
pub(crate) fn end_of_forwarding() -> Time {
    after(FORWARDING)
}

fn after(time: Duration) -> Time {
    Time(monotonic_ns().saturating_add(time.as_nanos() as u64))
}

impl State {
    /// Tells workers which ports a change moves to other hosts. Call it before the ports are removed, so that no packet
    /// is dropped in between.
    pub(crate) fn note_departures(&self, diff: &ConfigDiff) -> Result<()> {
        self.note(&departures(diff), Moved::To, FORWARDING)
    }

    /// Tells workers which ports a change has moved here from other hosts.
    pub(crate) fn note_arrivals(&self, diff: &ConfigDiff) -> Result<()> {
        self.note(&arrivals(diff), Moved::From, ARRIVAL)
    }

    fn note(&self, ports: &[(&Port, &str)], moved: fn(u32) -> Moved, time: Duration) -> Result<()> {
        let until = after(time);
        let of = |(port, peer): &(&Port, &str)| {
            let vni = bifrost_wire::Vni::new(port.vni.value())?;
            Some((vni, port.mac, moved(self.names.peer(peer)?)))
        };
        let moves: Vec<_> = ports.iter().filter_map(of).collect();
        if moves.is_empty() {
            return Ok(());
        }
        tracing::info!(ports = moves.len(), "ports are moving to or from other hosts");
        self.on_all(move |worker| {
            moves.iter().for_each(|(vni, mac, moved)| worker.core_mut().note_moved(*vni, *mac, *moved, until));
        })?;
        Ok(())
    }
}

/// Removed ports whose vNICs are now at peers, with these peers.
fn departures(diff: &ConfigDiff) -> Vec<(&Port, &str)> {
    let routes = diff.routes.added.iter().chain(diff.routes.changed.iter().map(|change| &change.new));
    at_peers(&diff.ports.removed, routes)
}

/// Added ports whose vNICs were at peers, with these peers.
fn arrivals(diff: &ConfigDiff) -> Vec<(&Port, &str)> {
    let routes = diff.routes.removed.iter().chain(diff.routes.changed.iter().map(|change| &change.old));
    at_peers(&diff.ports.added, routes)
}

fn at_peers<'a>(ports: &'a [Port], routes: impl Iterator<Item = &'a Route>) -> Vec<(&'a Port, &'a str)> {
    if ports.is_empty() {
        return Vec::new();
    }
    let peers: HashMap<(Vni, Mac), &str> = routes.map(|route| ((route.vni, route.mac), &*route.peer)).collect();
    ports.iter().filter_map(|port| Some((port, *peers.get(&(port.vni, port.mac))?))).collect()
}

#[cfg(test)]
mod tests {
    use bifrost_control::Config;

    use super::*;

    const HEAD: &str = "[host]\nname = \"a\"\n[underlay]\naddresses = [\"192.0.2.1\"]\n[[peer]]\nname = \"b\"\n\
        addresses = [\"192.0.2.2\"]\n[[vpc]]\nvni = 7\n";
    const PORT: &str = "[[port]]\nname = \"p\"\nvni = 7\nmac = \"02:00:00:00:00:01\"\naddresses = [\"10.0.0.1/24\"]\n";
    const ROUTE: &str = "[[route]]\nvni = 7\nprefix = \"10.0.0.1/32\"\npeer = \"b\"\nmac = \"02:00:00:00:00:01\"\n";

    fn config(parts: &[&str]) -> Config {
        Config::parse(&[&[HEAD], parts].concat().concat(), "test.toml").unwrap()
    }

    #[test]
    fn a_port_that_becomes_a_route_has_moved_and_the_reverse() {
        let [none, port, route] = [&[][..], &[PORT], &[ROUTE]].map(config);
        let names = |of: fn(&ConfigDiff) -> Vec<(&Port, &str)>, old: &Config, new: &Config| {
            let diff = ConfigDiff::between(old, new).unwrap();
            of(&diff).into_iter().map(|(port, peer)| (port.name.clone(), peer.to_owned())).collect::<Vec<_>>()
        };
        let moved = [("p".to_owned(), "b".to_owned())];
        assert_eq!(names(departures, &port, &route), moved);
        assert_eq!(names(arrivals, &route, &port), moved);
        for (old, new) in [(&none, &port), (&port, &none), (&none, &route), (&port, &port), (&route, &none)] {
            assert!(names(departures, old, new).is_empty() && names(arrivals, old, new).is_empty());
        }
    }
}
