//! The routes of a configuration: a persistent map, so that a configuration with one route more or less shares all
//! others with the former one.

use std::net::{IpAddr, Ipv4Addr};
use std::ops::Bound;

use bifrost_wire::Mac;
use imbl::{OrdMap, OrdSet};
use ipnet::{IpNet, Ipv4Net};

use super::{Route, Vni};

/// Identifies a route: its VPC and prefix.
pub type RouteKey = (Vni, IpNet);

/// Routes, ascending by VPC and prefix. Copies share their memory. Adding or removing a route takes time proportional
/// to the logarithm of their number.
#[derive(Clone, Debug, Default)]
pub struct Routes {
    by_prefix: OrdMap<RouteKey, Route>,
    by_mac: OrdSet<(Vni, Mac, IpNet)>,
    /// Those that say more than where a prefix is: names, security groups or shared addresses.
    detailed: OrdSet<RouteKey>,
    /// Those with shared addresses.
    sharing: OrdSet<RouteKey>,
    /// Number of routes to each peer that has any.
    of_peers: OrdMap<String, usize>,
}

/// The first of all prefixes.
const LEAST: IpNet = IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::UNSPECIFIED, 0));

/// How a route differs between two sets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RouteChange<'a> {
    /// Only in the new set.
    Added(&'a Route),
    /// Only in the old set.
    Removed(&'a Route),
    /// Different in the two sets: old and new.
    Changed(&'a Route, &'a Route),
}

impl Routes {
    /// Without routes.
    pub fn new() -> Routes {
        Routes::default()
    }

    /// Number of routes.
    pub fn len(&self) -> usize {
        self.by_prefix.len()
    }

    /// Whether there are no routes.
    pub fn is_empty(&self) -> bool {
        self.by_prefix.is_empty()
    }

    /// All routes, ascending.
    pub fn iter(&self) -> impl Iterator<Item = &Route> {
        self.by_prefix.values()
    }

    /// The routes after one, ascending; all of them without one.
    pub fn after(&self, key: Option<RouteKey>) -> impl Iterator<Item = &Route> {
        let from = key.map_or(Bound::Unbounded, Bound::Excluded);
        self.by_prefix.range((from, Bound::Unbounded)).map(|(_, route)| route)
    }

    /// The route to a prefix.
    pub fn get(&self, key: &RouteKey) -> Option<&Route> {
        self.by_prefix.get(key)
    }

    /// The route to a single address.
    pub fn to_host(&self, vni: Vni, address: IpAddr) -> Option<&Route> {
        self.get(&(vni, IpNet::from(address)))
    }

    /// The routes of a VPC, ascending by prefix.
    pub fn of_vpc(&self, vni: Vni) -> impl Iterator<Item = &Route> {
        self.by_prefix.range((vni, LEAST)..).map(|(_, route)| route).take_while(move |route| route.vni == vni)
    }

    /// The first route of a VPC.
    pub fn first_of(&self, vni: Vni) -> Option<&Route> {
        self.of_vpc(vni).next()
    }

    /// The routes to a vNIC, ascending by prefix.
    pub fn of_mac(&self, vni: Vni, mac: Mac) -> impl Iterator<Item = &Route> {
        let least = (vni, mac, LEAST);
        let of_mac = self.by_mac.range(least..).take_while(move |(v, m, _)| (*v, *m) == (vni, mac));
        of_mac.filter_map(|(vni, _, prefix)| self.get(&(*vni, *prefix)))
    }

    /// The routes with a name, security groups or shared addresses.
    pub fn detailed(&self) -> impl Iterator<Item = &Route> {
        self.detailed.iter().filter_map(|key| self.get(key))
    }

    /// The routes with shared addresses.
    pub fn sharing(&self) -> impl Iterator<Item = &Route> {
        self.sharing.iter().filter_map(|key| self.get(key))
    }

    /// Number of routes to a peer.
    pub fn of_peer(&self, peer: &str) -> usize {
        self.of_peers.get(peer).copied().unwrap_or(0)
    }

    /// Adds a route, in place of one with the same VPC and prefix, which is returned.
    pub fn insert(&mut self, route: Route) -> Option<Route> {
        let former = self.remove(&(route.vni, route.prefix));
        let key = (route.vni, route.prefix);
        self.by_mac.insert((route.vni, route.mac, route.prefix));
        if is_detailed(&route) {
            self.detailed.insert(key);
        }
        if !route.shared.is_empty() {
            self.sharing.insert(key);
        }
        match self.of_peers.get_mut(&route.peer) {
            Some(count) => *count += 1,
            None => drop(self.of_peers.insert(route.peer.clone(), 1)),
        }
        self.by_prefix.insert(key, route);
        former
    }

    /// Removes a route, and returns it.
    pub fn remove(&mut self, key: &RouteKey) -> Option<Route> {
        let route = self.by_prefix.remove(key)?;
        self.by_mac.remove(&(route.vni, route.mac, route.prefix));
        if is_detailed(&route) {
            self.detailed.remove(key);
        }
        if !route.shared.is_empty() {
            self.sharing.remove(key);
        }
        if let Some(count) = self.of_peers.get_mut(&route.peer) {
            *count -= 1;
            if *count == 0 {
                self.of_peers.remove(&route.peer);
            }
        }
        Some(route)
    }

    /// What differs from an `old` set. Shared memory is skipped: after a few changes of a large set this takes time
    /// proportional to the number of changes.
    pub fn changes_since<'a>(&'a self, old: &'a Routes) -> impl Iterator<Item = RouteChange<'a>> {
        old.by_prefix.diff(&self.by_prefix).map(|item| match item {
            imbl::ordmap::DiffItem::Add(_, new) => RouteChange::Added(new),
            imbl::ordmap::DiffItem::Remove(_, old) => RouteChange::Removed(old),
            imbl::ordmap::DiffItem::Update { old: (_, old), new: (_, new) } => RouteChange::Changed(old, new),
        })
    }
}

fn is_detailed(route: &Route) -> bool {
    route.name.is_some() || !route.security_groups.is_empty() || !route.shared.is_empty()
}

impl PartialEq for Routes {
    fn eq(&self, other: &Routes) -> bool {
        self.by_prefix.ptr_eq(&other.by_prefix) || self.by_prefix == other.by_prefix
    }
}

impl Eq for Routes {}

/// Of two routes with the same VPC and prefix, the later one is kept.
impl FromIterator<Route> for Routes {
    fn from_iter<I: IntoIterator<Item = Route>>(routes: I) -> Routes {
        let mut all = Routes::new();
        routes.into_iter().for_each(|route| drop(all.insert(route)));
        all
    }
}
