//! The owners of a network's addresses, and the locations of its vNICs. The tables have two layers, so that a
//! configuration with one more route shares everything else with its predecessor.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use bifrost_tables::{ExactMap, IpNet, LayeredLpm, LayeredMap, exact_map};
use bifrost_wire::{Mac, Vni};

use crate::ids::PeerId;
use crate::location::{Location, NextHop, Owner, Path};
use crate::tables::{BuildError, GATEWAY_MAC, Route, RouteChanges};

/// The addresses and vNICs of one network. Clones share memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Addresses {
    vnics: LayeredMap<Mac, Path>,
    owners: LayeredLpm<Owner>,
    /// Entries that do not come from routes.
    local: Arc<Local>,
}

/// vNICs and addresses that do not come from routes. There are few of them; they are sorted by key.
#[derive(Clone, Debug, Default)]
struct Local {
    vnics: BTreeMap<Mac, Path>,
    owners: BTreeMap<IpNet, Owner>,
}

impl Addresses {
    /// The location of a vNIC.
    #[inline(always)]
    pub(crate) fn path(&self, mac: Mac) -> Option<Path> {
        self.vnics.get(&mac)
    }

    /// The owner of an address (longest-prefix match).
    #[inline(always)]
    pub(crate) fn owner(&self, addr: IpAddr) -> Option<Owner> {
        self.owners.lookup(addr).copied()
    }

    /// Number of entries that differ from the shared tables.
    pub(crate) fn changed_len(&self) -> usize {
        self.vnics.changed_len().max(self.owners.changed_len())
    }

    /// The same content in new shared tables. This takes time proportional to their size.
    pub(crate) fn merged(&self) -> Addresses {
        Addresses { vnics: self.vnics.merged(), owners: self.owners.merged(), local: Arc::clone(&self.local) }
    }

    /// The same content on top of `merged`, which was [`merged`](Self::merged) from the earlier version `former`.
    /// `None`: the tables were rebuilt meanwhile.
    pub(crate) fn rebased(&self, former: &Addresses, merged: &Addresses) -> Option<Addresses> {
        Some(Addresses {
            vnics: self.vnics.rebased(&former.vnics, &merged.vnics)?,
            owners: self.owners.rebased(&former.owners, &merged.owners)?,
            local: Arc::clone(&self.local),
        })
    }
}

/// Addresses under construction: add ports first, then routes, then the rest.
#[derive(Clone, Debug)]
pub(crate) struct Draft {
    vni: Vni,
    local: Local,
    remote: Remote,
}

/// Entries that come from routes.
#[derive(Clone, Debug)]
enum Remote {
    /// All of them.
    All { vnics: ExactMap<Mac, Path>, owners: Vec<(IpNet, Owner)> },
    /// The differences from an earlier version.
    Since { former: Addresses, vnics: BTreeMap<Mac, Option<Path>>, owners: BTreeMap<IpNet, Option<Owner>> },
}

impl Draft {
    /// An empty draft, or one that starts with the routes of an earlier version.
    pub(crate) fn new(vni: Vni, former: Option<&Addresses>) -> Draft {
        let remote = match former {
            // Keys come from the operator, who has no reason to attack the hash.
            None => Remote::All { vnics: exact_map(0), owners: Vec::new() },
            Some(former) => Remote::Since { former: former.clone(), vnics: BTreeMap::new(), owners: BTreeMap::new() },
        };
        Draft { vni, local: Local::default(), remote }
    }

    /// Adds a vNIC of this host.
    pub(crate) fn add_vnic(&mut self, mac: Mac, path: Path) -> Result<(), BuildError> {
        checked(mac)?;
        match self.local.vnics.insert(mac, path) {
            None => Ok(()),
            Some(_) => Err(BuildError::DuplicateMac { vni: self.vni, mac }),
        }
    }

    /// Adds a prefix that does not come from a route, without host bits.
    pub(crate) fn add_owner(&mut self, prefix: IpNet, owner: Owner) -> Result<(), BuildError> {
        match self.local.owners.insert(prefix, owner) {
            None => Ok(()),
            Some(_) => Err(BuildError::DuplicatePrefix { vni: self.vni, prefix }),
        }
    }

    /// The owner of exactly this prefix, if it does not come from a route.
    pub(crate) fn local_owner(&self, prefix: IpNet) -> Option<Owner> {
        self.local.owners.get(&prefix).copied()
    }

    /// Adds a route. All vNICs of this host must have been added. One vNIC may have any number of prefixes; packets
    /// to its MAC address must fit the smallest of their path MTUs.
    pub(crate) fn add_route(&mut self, route: &Route) -> Result<(), BuildError> {
        let (vni, mac) = (self.vni, checked(route.mac)?);
        if route.peer.0 >= PeerId::LIMIT {
            return Err(BuildError::PeerNumber(route.peer));
        }
        let path = Path::new(Location::Remote(route.peer), route.mtu);
        let owner = Owner::Vnic(NextHop { mac, path });
        if self.local.vnics.contains_key(&mac) {
            return Err(BuildError::DuplicateMac { vni, mac });
        }
        match &mut self.remote {
            Remote::All { vnics, owners } => {
                let known = vnics.entry(mac).or_insert(path);
                if known.location() != path.location() {
                    return Err(BuildError::DuplicateMac { vni, mac });
                }
                known.mtu = known.mtu.min(path.mtu);
                owners.push((route.prefix.trunc(), owner));
            }
            Remote::Since { owners, .. } => drop(owners.insert(route.prefix.trunc(), Some(owner))),
        }
        Ok(())
    }

    /// Applies changes of routes to an earlier version. All vNICs of this host must have been added.
    pub(crate) fn change_routes(&mut self, changes: &RouteChanges) -> Result<(), BuildError> {
        for (prefix, route) in &changes.routes {
            match (route, &mut self.remote) {
                (Some(route), _) => self.add_route(route)?,
                (None, Remote::Since { owners, .. }) => drop(owners.insert(prefix.trunc(), None)),
                (None, Remote::All { .. }) => {}
            }
        }
        for (mac, vnic) in &changes.vnics {
            if vnic.is_some() && self.local.vnics.contains_key(mac) {
                return Err(BuildError::DuplicateMac { vni: self.vni, mac: *mac });
            }
            if let Remote::Since { vnics, .. } = &mut self.remote {
                let path = vnic.map(|(peer, mtu)| Path::new(Location::Remote(peer), mtu));
                vnics.insert(*mac, path);
            }
        }
        Ok(())
    }

    /// The location of a vNIC, once ports and routes have been added.
    pub(crate) fn path(&self, mac: Mac) -> Option<Path> {
        let of_routes = || match &self.remote {
            Remote::All { vnics, .. } => vnics.get(&mac).copied(),
            Remote::Since { former, vnics, .. } => match vnics.get(&mac) {
                Some(changed) => *changed,
                // In the earlier version the vNIC may have been on this host; now it is not.
                None => former.path(mac).filter(|path| matches!(path.location(), Location::Remote(_))),
            },
        };
        self.local.vnics.get(&mac).copied().or_else(of_routes)
    }

    /// Builds the tables.
    ///
    /// # Errors
    /// An address or vNIC is in two places.
    pub(crate) fn finish(self) -> Result<Addresses, BuildError> {
        let Draft { vni, local, remote } = self;
        match remote {
            Remote::All { mut vnics, mut owners } => {
                vnics.extend(local.vnics.iter().map(|(mac, path)| (*mac, *path)));
                vnics.shrink_to_fit();
                owners.extend(local.owners.iter().map(|(prefix, owner)| (*prefix, *owner)));
                let owners = LayeredLpm::new(owners).map_err(|prefix| BuildError::DuplicatePrefix { vni, prefix })?;
                Ok(Addresses { vnics: LayeredMap::new(vnics), owners, local: Arc::new(local) })
            }
            Remote::Since { former, vnics, owners } => {
                let twice = |prefix: IpNet| BuildError::DuplicatePrefix { vni, prefix };
                let owners =
                    changes(&former.local.owners, &local.owners, owners, |net| former.owners.get(*net).copied());
                let owners = former.owners.changed(owners.map_err(twice)?);
                let twice = |mac: Mac| BuildError::DuplicateMac { vni, mac };
                let vnics = changes(&former.local.vnics, &local.vnics, vnics, |mac| former.vnics.get(mac));
                let vnics = former.vnics.changed(vnics.map_err(twice)?);
                Ok(Addresses { vnics, owners, local: Arc::new(local) })
            }
        }
    }
}

/// The difference from a `former` table: local entries change from `before` to `after`, entries of routes by
/// `of_routes`.
///
/// # Errors
/// The first key that both a route and a local entry have.
fn changes<K: Copy + Ord, V: Copy + PartialEq>(
    before: &BTreeMap<K, V>,
    after: &BTreeMap<K, V>,
    of_routes: BTreeMap<K, Option<V>>,
    former: impl Fn(&K) -> Option<V>,
) -> Result<BTreeMap<K, Option<V>>, K> {
    let mut all: BTreeMap<K, Option<V>> =
        before.iter().filter(|(key, value)| after.get(key) != Some(value)).map(|(key, _)| (*key, None)).collect();
    for (key, value) in of_routes {
        if value.is_some() && after.contains_key(&key) {
            return Err(key);
        }
        // A local entry that replaces a removed route stays.
        if value.is_some() || !after.contains_key(&key) {
            all.insert(key, value);
        } else if before.get(&key) != after.get(&key) {
            all.insert(key, None);
        }
    }
    for (key, value) in after.iter().filter(|(key, value)| before.get(key) != Some(value)) {
        let is_taken = match all.get(key) {
            Some(changed) => changed.is_some(),
            None => former(key).is_some(),
        };
        if is_taken {
            return Err(*key);
        }
        all.insert(*key, Some(*value));
    }
    Ok(all)
}

/// Checks that a vNIC can have this MAC address.
fn checked(mac: Mac) -> Result<Mac, BuildError> {
    if mac.is_unicast() && mac != GATEWAY_MAC { Ok(mac) } else { Err(BuildError::Mac(mac)) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::ids::{PeerId, PortId};

    fn vni() -> Vni {
        Vni::new(7).unwrap()
    }

    fn mac(n: u8) -> Mac {
        Mac([2, 0, 0, 0, 0, n])
    }

    fn net(n: u8) -> IpNet {
        let prefixes =
            ["10.0.0.1/32", "10.0.0.2/32", "10.0.0.0/30", "10.0.0.0/24", "0.0.0.0/0", "fd00::1/128", "fd00::/64"];
        prefixes[usize::from(n) % prefixes.len()].parse().unwrap()
    }

    /// The state of a network: ports' MAC addresses with prefixes, and routes with MAC address, host and MTU.
    #[derive(Clone, Debug, Default)]
    struct Model {
        ports: BTreeMap<u8, BTreeSet<u8>>,
        routes: BTreeMap<u8, (u8, u8, u16)>,
    }

    impl Model {
        /// Whether no address or vNIC is in two places.
        fn is_sound(&self) -> bool {
            let prefixes: Vec<IpNet> =
                self.ports.values().flatten().chain(self.routes.keys()).map(|n| net(*n)).collect();
            let hosts: BTreeSet<(u8, u8)> = self.routes.values().map(|(mac, host, _)| (*mac, *host)).collect();
            let macs: BTreeSet<u8> = hosts.iter().map(|(mac, _)| *mac).collect();
            prefixes.iter().collect::<BTreeSet<_>>().len() == prefixes.len()
                && macs.len() == hosts.len()
                && self.ports.keys().all(|mac| !macs.contains(mac))
        }

        fn route(&self, n: u8) -> Option<Route> {
            let (m, host, mtu) = *self.routes.get(&n)?;
            Some(Route { vni: vni(), prefix: net(n), peer: PeerId(u32::from(host)), mac: mac(m), mtu })
        }

        fn draft(&self, former: Option<&Addresses>) -> Draft {
            let mut draft = Draft::new(vni(), former);
            for (&m, prefixes) in &self.ports {
                let path = Path::new(Location::Local(PortId(u32::from(m))), 1500);
                draft.add_vnic(mac(m), path).unwrap();
                let owner = Owner::Vnic(NextHop { mac: mac(m), path });
                prefixes.iter().for_each(|n| draft.add_owner(net(*n), owner).unwrap());
            }
            draft
        }

        fn whole(&self) -> Addresses {
            let mut draft = self.draft(None);
            self.routes.keys().for_each(|n| draft.add_route(&self.route(*n).unwrap()).unwrap());
            draft.finish().unwrap()
        }

        fn after(&self, before: &Model, former: &Addresses) -> Addresses {
            let changed: Vec<u8> = (0..7).filter(|n| before.routes.get(n) != self.routes.get(n)).collect();
            let macs: BTreeSet<u8> = changed
                .iter()
                .flat_map(|n| [before, self].into_iter().filter_map(|model| Some(model.routes.get(n)?.0)))
                .collect();
            let vnic = |m: u8| {
                let routes = self.routes.values().filter(|(of, ..)| *of == m);
                (mac(m), routes.map(|(_, host, mtu)| (PeerId(u32::from(*host)), *mtu)).min_by_key(|(_, mtu)| *mtu))
            };
            let changes = RouteChanges {
                vni: vni(),
                routes: changed.iter().map(|n| (net(*n), self.route(*n))).collect(),
                vnics: macs.into_iter().map(vnic).collect(),
            };
            let mut draft = self.draft(Some(former));
            draft.change_routes(&changes).unwrap();
            draft.finish().unwrap()
        }
    }

    /// A change of a port or a route: whether it is a port, its number, and its new values.
    type Step = (bool, u8, Option<(u8, u8, bool)>);

    fn apply(model: &mut Model, (is_port, n, values): Step) {
        match (is_port, values) {
            (true, None) => drop(model.ports.remove(&(n % 4))),
            (true, Some((a, b, _))) => drop(model.ports.insert(n % 4, BTreeSet::from([a % 7, b % 7]))),
            (false, None) => drop(model.routes.remove(&(n % 7))),
            (false, Some((m, host, small))) => {
                let mtu = if small { 1400 } else { 1500 };
                model.routes.insert(n % 7, (m % 4, host % 2, mtu));
            }
        }
    }

    proptest! {
        /// Incremental changes give the same tables as a full build, no matter what moves between ports and routes.
        #[test]
        fn incremental_changes_give_the_same_tables_as_a_full_build(
            batches in proptest::collection::vec(
                proptest::collection::vec((any::<bool>(), any::<u8>(), any::<Option<(u8, u8, bool)>>()), 1..5),
                1..40,
            ),
        ) {
            let (mut model, mut table) = (Model::default(), Addresses::default());
            for batch in batches {
                let mut next = model.clone();
                batch.into_iter().for_each(|step| apply(&mut next, step));
                if !next.is_sound() {
                    continue;
                }
                table = next.after(&model, &table);
                model = next;
                let whole = model.whole();
                for n in 0..4 {
                    prop_assert_eq!(table.path(mac(n)), whole.path(mac(n)), "{} of {:?}", n, model);
                }
                for addr in ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.9", "10.1.0.1", "fd00::1", "fd00::2", "fd01::"] {
                    let addr = addr.parse().unwrap();
                    prop_assert_eq!(table.owner(addr), whole.owner(addr), "{} of {:?}", addr, model);
                }
                prop_assert_eq!(table.merged().changed_len(), 0);
            }
        }

        /// A conflict is an error, as in a full build.
        #[test]
        fn nothing_is_at_two_places(n in 0u8..7, m in 0u8..4) {
            let mut model = Model::default();
            apply(&mut model, (false, n, Some((m, 0, false))));
            let former = model.whole();
            let route = model.route(n).unwrap();
            let change = |route: &Route| RouteChanges { vni: vni(), routes: vec![(route.prefix, Some(route.clone()))], vnics: Vec::new() };
            let path = Path::new(Location::Local(PortId(1)), 1500);
            // A port takes the prefix or the vNIC of a route that stays.
            let mut draft = Draft::new(vni(), Some(&former));
            draft.add_owner(net(n), Owner::Own).unwrap();
            prop_assert_eq!(draft.finish().err(), Some(BuildError::DuplicatePrefix { vni: vni(), prefix: net(n) }));
            let mut draft = Draft::new(vni(), Some(&former));
            draft.add_vnic(mac(m), path).unwrap();
            prop_assert_eq!(draft.finish().err(), Some(BuildError::DuplicateMac { vni: vni(), mac: mac(m) }));
            // A route takes the prefix or the vNIC of a port that stays.
            let mut draft = Draft::new(vni(), Some(&Addresses::default()));
            draft.add_owner(net(n), Owner::Own).unwrap();
            draft.change_routes(&change(&route)).unwrap();
            prop_assert_eq!(draft.finish().err(), Some(BuildError::DuplicatePrefix { vni: vni(), prefix: net(n) }));
            let mut draft = Draft::new(vni(), Some(&Addresses::default()));
            draft.add_vnic(mac(m), path).unwrap();
            let refused = draft.change_routes(&change(&route)).err();
            prop_assert_eq!(refused, Some(BuildError::DuplicateMac { vni: vni(), mac: mac(m) }));
        }
    }
}
