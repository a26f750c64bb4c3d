//! Ports that move between hosts: a change that removes a port and adds a route to its vNIC at a peer, or the reverse.
//! The old host forwards packets that peers still send to it.
//!
//! In a network whose routes are learned there is no such route. The old host asks where the port's address is now, and
//! forwards when the answer names its vNIC. The new host does not know the old one, and accepts what any host forwards
//! to the machine.

mod follow;

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use bifrost_control::ConfigDiff;
use bifrost_control::config::{Config, Port, Route, Vni};
use bifrost_port::clock::monotonic_ns;
use bifrost_rte::Time;
use bifrost_wire::Mac;

/// How long the old host forwards packets for a moved port, and how long the new host accepts them once the guest runs.
const FORWARDING: Duration = Duration::from_secs(30);
/// Most departed ports that are remembered; packets for others are dropped.
const MOST_DEPARTED: usize = 4096;
/// How long a port that has moved to this host may wait for its guest.
const ARRIVAL: Duration = Duration::from_secs(600);

/// Until when forwarded packets are accepted for a guest that has just started here.
pub(crate) fn end_of_forwarding() -> Time {
    after(FORWARDING)
}

fn after(time: Duration) -> Time {
    Time(monotonic_ns().saturating_add(time.as_nanos() as u64))
}

/// Ports that have gone from networks whose routes are learned, and until when packets for them are forwarded: once it is
/// known where to.
#[derive(Debug, Default)]
pub(crate) struct Departed(HashMap<(Vni, Mac), Time>);

impl Departed {
    fn note(&mut self, now: Time, vnic: (Vni, Mac), until: Time) {
        if self.0.len() >= MOST_DEPARTED {
            self.0.retain(|_, until| *until > now);
        }
        if self.0.len() < MOST_DEPARTED {
            self.0.insert(vnic, until);
        }
    }

    fn find(&self, now: Time, vnic: (Vni, Mac)) -> Option<Time> {
        self.0.get(&vnic).copied().filter(|until| *until > now)
    }
}

/// An address of a port to which other hosts learn the route.
fn learned_address(config: &Config, port: &Port) -> Option<IpAddr> {
    let learned = &config.vpc(port.vni)?.learned;
    let mut addresses = port.addresses.iter().map(|address| address.addr());
    addresses.find(|address| learned.iter().any(|prefix| prefix.contains(address)))
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
    fn departed_ports_are_remembered_for_a_time_and_not_too_many() {
        let vnic = |n: u16| {
            let [high, low] = n.to_be_bytes();
            (Vni::new(7).unwrap(), Mac([2, 0, 0, 0, high, low]))
        };
        let mut departed = Departed::default();
        departed.note(Time(0), vnic(1), Time(10));
        assert_eq!(departed.find(Time(9), vnic(1)), Some(Time(10)));
        assert_eq!(departed.find(Time(9), vnic(1)), Some(Time(10)), "each answer says so");
        assert_eq!((departed.find(Time(10), vnic(1)), departed.find(Time(0), vnic(2))), (None, None));
        for n in 0..MOST_DEPARTED as u16 + 9 {
            departed.note(Time(0), vnic(n), Time(10));
        }
        assert_eq!(departed.0.len(), MOST_DEPARTED);
        departed.note(Time(10), vnic(9999), Time(20));
        assert_eq!((departed.0.len(), departed.find(Time(11), vnic(9999))), (1, Some(Time(20))));
    }

    #[test]
    fn addresses_whose_routes_are_learned_are_asked_for() {
        let mut config = config(&[PORT]);
        assert_eq!(learned_address(&config, &config.ports[0]), None);
        config.vpcs[0].learned = vec!["10.0.0.0/8".parse().unwrap()];
        assert_eq!(learned_address(&config, &config.ports[0]), Some([10, 0, 0, 1].into()));
        config.vpcs[0].learned = vec!["10.1.0.0/16".parse().unwrap()];
        assert_eq!(learned_address(&config, &config.ports[0]), None);
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
