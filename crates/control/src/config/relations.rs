//! Checks of relations between objects that are not in one file: of all objects, or of those that a change concerns.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use toml::de::DeTable;

use super::check::{self, Checked};
use super::section::Sink;
use super::{Config, FieldError, Kind, Object, Route, RouteKey, Vni};

/// An error in the relations between objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RelationError {
    /// The object; none: the error belongs to no single object.
    pub object: Option<(Kind, String)>,
    /// The error.
    pub error: FieldError,
}

impl Config {
    /// Checks the relations between all objects, as for a file.
    ///
    /// # Errors
    /// All contradictions, each with the object to change.
    pub fn check_relations(&self) -> Result<(), Vec<RelationError>> {
        Checked { config: self, routes: self.routes.iter().collect() }.check()
    }

    /// Checks the relations that `changes` of an `old` configuration concern. `old` has no contradictions. Each change
    /// is a kind, a key, and the object's new state; none: it was deleted.
    ///
    /// Of the routes, only those are looked at that a changed object can contradict, so that the time does not depend
    /// on the number of routes. Exceptions are changes of a peer or VPC that has routes.
    ///
    /// # Errors
    /// Those of [`check_relations`](Self::check_relations).
    pub fn check_changes<'c>(
        &self,
        old: &Config,
        changes: impl Iterator<Item = (Kind, &'c str, Option<&'c Object>)> + Clone,
    ) -> Result<(), Vec<RelationError>> {
        match self.concerned(old, changes) {
            Some(keys) => {
                let routes = keys.iter().filter_map(|key| self.routes.get(key)).collect();
                Checked { config: self, routes }.check()
            }
            None => self.check_relations(),
        }
    }

    /// The routes that changed objects can contradict; none: all of them.
    fn concerned<'c>(
        &self,
        old: &Config,
        changes: impl Iterator<Item = (Kind, &'c str, Option<&'c Object>)> + Clone,
    ) -> Option<BTreeSet<RouteKey>> {
        let routes = &self.routes;
        let of_batch = changes.clone().filter_map(|(.., object)| match object? {
            Object::Route(route) => Some(key(route)),
            _ => None,
        });
        let changed: BTreeSet<RouteKey> = of_batch.collect();
        let mut concerned = changed.clone();
        let mut vnics = BTreeSet::new();
        // Any object with an address may be the other owner of a shared one.
        concerned.extend(routes.sharing().map(key));
        let host = |vni: Vni, address: IpAddr| (vni, IpNet::from(address));
        let defaults = |vni: Vni| {
            let any: [IpAddr; 2] = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
            any.map(|any| (vni, IpNet::new_assert(any, 0)))
        };
        for (kind, name, object) in changes {
            match (kind, object) {
                // Nothing refers to these.
                (Kind::Route | Kind::Port | Kind::Peering | Kind::Mirror | Kind::VpcFlowLog, None) => {}
                (_, Some(Object::Route(route))) => {
                    // All earlier routes to the vNIC agree, so one of them is enough, whatever number of the batch's
                    // routes lead to it.
                    if vnics.insert((route.vni, route.mac)) {
                        concerned
                            .extend(routes.of_mac(route.vni, route.mac).map(key).find(|key| !changed.contains(key)));
                    }
                    concerned.extend(route.shared.iter().map(|address| host(route.vni, *address)));
                }
                (_, Some(Object::Port(port))) => {
                    concerned.extend(routes.of_mac(port.vni, port.mac).next().map(key));
                    let addresses = port.addresses.iter().map(IpNet::addr).chain(port.shared.iter().copied());
                    concerned.extend(addresses.map(|address| host(port.vni, address)));
                    concerned.extend(port.routed.iter().map(|prefix| (port.vni, *prefix)));
                    // An uplink's VPC has no routes.
                    concerned.extend(routes.first_of(port.vni).map(key));
                }
                (_, Some(Object::Peering(peering))) => {
                    concerned.insert((peering.vni, peering.prefix));
                }
                (_, Some(Object::LoadBalancer(balancer))) => {
                    concerned.insert(host(balancer.vni, balancer.address));
                }
                (_, Some(Object::Nat(source))) => concerned.extend(defaults(source.vni)),
                (_, Some(Object::FloatingIp(floating))) => concerned.extend(defaults(floating.vni)),
                (_, Some(Object::PortForward(forward))) => concerned.extend(defaults(forward.vni)),
                (_, Some(Object::Uplink(uplink))) => {
                    let vni = self.port(&uplink.port).map(|port| port.vni);
                    concerned.extend(vni.and_then(|vni| routes.first_of(vni)).map(key));
                }
                (_, Some(Object::SecurityGroup(_) | Object::AddressSet(_))) => {}
                (_, Some(Object::Mirror(_) | Object::VpcFlowLog(_))) => {}
                (Kind::SecurityGroup, None) => concerned.extend(routes.detailed().map(key)),
                (Kind::Peer, _) if old.routes.of_peer(name) == 0 => {}
                (Kind::Vpc, _) if is_without_routes(old, name) => {}
                (Kind::Peer | Kind::Vpc, _) => return None,
                (Kind::AddressSet | Kind::LoadBalancer, None) => {}
                (Kind::Uplink | Kind::Nat | Kind::FloatingIp | Kind::PortForward, None) => {}
                (_, Some(Object::Peer(_) | Object::Vpc(_))) => return None,
            }
        }
        Some(concerned)
    }
}

fn key(route: &Route) -> RouteKey {
    (route.vni, route.prefix)
}

/// Whether no route belongs to the VPC with this key.
fn is_without_routes(config: &Config, vni: &str) -> bool {
    let vni = vni.parse().ok().and_then(Vni::new);
    vni.is_some_and(|vni| config.routes.first_of(vni).is_none())
}

impl Checked<'_> {
    fn check(&self) -> Result<(), Vec<RelationError>> {
        let nothing = DeTable::new();
        let sink = Sink::new("", "", &nothing);
        check::check(self, &sink);
        let errors = sink.into_errors();
        if errors.is_empty() {
            return Ok(());
        }
        Err(errors.into_iter().map(|error| self.relation(&error.field, &error.message)).collect())
    }

    /// An error in which fields, such as `port[2].mac`, are replaced by names.
    fn relation(&self, field: &str, message: &str) -> RelationError {
        let message = self.by_names(message);
        match self.locate(field) {
            Some((kind, key, field)) => {
                RelationError { object: Some((kind, key)), error: FieldError { field: field.to_owned(), message } }
            }
            None => RelationError { object: None, error: FieldError { field: field.to_owned(), message } },
        }
    }

    /// The object and key of a field such as `port[2].mac`.
    fn locate<'f>(&self, field: &'f str) -> Option<(Kind, String, &'f str)> {
        let (kind, rest) = field.split_once('[')?;
        let (index, rest) = rest.split_once(']')?;
        let (kind, index) = (Kind::of_name(kind)?, index.parse::<usize>().ok()?);
        let object = match kind {
            Kind::Route => Object::Route(Route::clone(self.routes.get(index)?)),
            _ => self.object(kind, index)?,
        };
        Some((object.kind(), object.key(), rest.trim_start_matches('.')))
    }

    /// Replaces fields in a text, such as `port[2].mac`, by names.
    fn by_names(&self, text: &str) -> String {
        let mut words = Vec::new();
        for word in text.split(' ') {
            words.push(match self.locate(word) {
                Some((kind, key, "")) => format!("{kind} {key:?}"),
                Some((kind, key, field)) => format!("{field} of {kind} {key:?}"),
                None => word.to_owned(),
            });
        }
        words.join(" ")
    }
}
