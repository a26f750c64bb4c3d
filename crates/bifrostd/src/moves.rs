//! Ports that move between hosts: a change that takes a port away and says at which peer its vNIC is now, or the reverse. What
//! peers send to the old host meanwhile follows, and the port's sessions can be taken along.

use std::collections::HashMap;
use std::time::Duration;

use anyhow::Result;
use bifrost_avs::PortId;
use bifrost_control::ConfigDiff;
use bifrost_control::api::{ApiError, PortSessions, SessionsReport};
use bifrost_control::config::{Port, Route, Vni};
use bifrost_datapath::{Handle, Moved, Worker};
use bifrost_port::HostUnderlay;
use bifrost_port::clock::monotonic_ns;
use bifrost_rte::Time;
use bifrost_wire::Mac;

use crate::daemon::State;
use crate::translate;

/// How long what comes for a port that has gone is sent on, and taken by its new host once its guest runs there.
const FOLLOW: Duration = Duration::from_secs(30);
/// How long a port that has come may wait for its guest.
const COME: Duration = Duration::from_secs(600);

/// When what follows a guest that runs here now has to have come.
pub(crate) fn end_of_following() -> Time {
    after(FOLLOW)
}

fn after(time: Duration) -> Time {
    Time(monotonic_ns().saturating_add(time.as_nanos() as u64))
}

impl State {
    /// Tells workers which ports a change moves to other hosts: before it takes them away, so that nothing is dropped in between.
    pub(crate) fn note_gone(&self, diff: &ConfigDiff) -> Result<()> {
        self.note(&gone(diff), Moved::To, FOLLOW)
    }

    /// Tells workers which ports a change has brought from other hosts.
    pub(crate) fn note_came(&self, diff: &ConfigDiff) -> Result<()> {
        self.note(&came(diff), Moved::From, COME)
    }

    fn note(&self, ports: &[(&Port, &str)], moved: fn(u16) -> Moved, time: Duration) -> Result<()> {
        let until = after(time);
        let of = |(port, peer): &(&Port, &str)| {
            let vni = bifrost_wire::Vni::new(port.vni.value())?;
            Some((vni, port.mac, moved(self.names.peer(peer)?)))
        };
        let moves: Vec<_> = ports.iter().filter_map(of).collect();
        if moves.is_empty() {
            return Ok(());
        }
        tracing::info!(ports = moves.len(), "ports move to other hosts, or from them");
        self.on_all(move |worker| {
            moves.iter().for_each(|(vni, mac, moved)| worker.core_mut().note_moved(*vni, *mac, *moved, until));
        })?;
        Ok(())
    }
}

/// Sessions.
impl State {
    /// A port's sessions, for its next host.
    pub(crate) fn export_sessions(&self, port: String) -> Result<PortSessions, ApiError> {
        let (worker, id) = self.worker_of_sessions(&port)?;
        let carry = move |worker: &mut Worker<HostUnderlay>| {
            let mut bytes = Vec::new();
            worker.core_mut().switch().carry_sessions(id, &mut bytes);
            bytes
        };
        let bytes = worker.run(carry).map_err(|e| ApiError::internal(e.to_string()))?;
        Ok(PortSessions::new(port, &bytes))
    }

    /// Goes on with the sessions that a port's guest had on another host.
    pub(crate) fn import_sessions(&self, port: &str, bytes: Vec<u8>) -> Result<SessionsReport, ApiError> {
        let (worker, id) = self.worker_of_sessions(port)?;
        let take = move |worker: &mut Worker<HostUnderlay>| {
            worker.core_mut().switch_mut().take_over_sessions(monotonic_ns(), id, &bytes)
        };
        let taken = worker.run(take).map_err(|e| ApiError::internal(e.to_string()))?;
        let taken = taken.map_err(|e| ApiError::bad_request(e.to_string()).at("sessions"))?;
        Ok(SessionsReport { sessions: taken.sessions, left_out: taken.left_out })
    }

    /// The worker that has all sessions of a port.
    fn worker_of_sessions(&self, name: &str) -> Result<(&Handle<HostUnderlay>, PortId), ApiError> {
        let port = self.config.ports.iter().find(|port| port.name == name);
        let found = port.and_then(|port| Some((port, self.names.port(name)?)));
        let (port, id) = found.ok_or_else(|| {
            ApiError::not_found(format!("there is no port named {name:?}"))
                .at("port")
                .hint("bifrostctl ports lists them")
        })?;
        let home = translate::home(&self.config, port, id).unwrap_or_default();
        if self.workers.len() > 1 && !self.config.is_served_by_one(port) {
            let what = format!("the sessions of {name:?} are with several workers, by the addresses of their peers");
            return Err(ApiError::bad_request(what).at("port").hint("ports of virtual machines are with one"));
        }
        let worker =
            self.workers.get(usize::from(home)).ok_or_else(|| ApiError::internal("there is no such worker"))?;
        Ok((worker, PortId(id)))
    }
}

/// Ports that are gone, and the peers where their vNICs are now.
fn gone(diff: &ConfigDiff) -> Vec<(&Port, &str)> {
    let routes = diff.routes.added.iter().chain(diff.routes.changed.iter().map(|change| &change.new));
    at_peers(&diff.ports.removed, routes)
}

/// Ports that have come, and the peers where their vNICs were.
fn came(diff: &ConfigDiff) -> Vec<(&Port, &str)> {
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
        assert_eq!(names(gone, &port, &route), moved);
        assert_eq!(names(came, &route, &port), moved);
        for (old, new) in [(&none, &port), (&port, &none), (&none, &route), (&port, &port), (&route, &none)] {
            assert!(names(gone, old, new).is_empty() && names(came, old, new).is_empty());
        }
    }
}
