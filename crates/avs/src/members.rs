//! Address sets that rules of security groups refer to: listed ones, and the addresses of a group's members.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::net::IpAddr;
use std::sync::Arc;

use bifrost_tables::{IpNet, Lpm};
use bifrost_wire::{Mac, Vni};

use crate::ids::GroupId;
use crate::tables::{BuildError, Remote, SecurityGroup, Tables};

/// A set of addresses of either family.
#[derive(Debug)]
pub(crate) struct AddressSet(Lpm<()>);

impl AddressSet {
    /// Builds a set from prefixes in any order, which may overlap.
    pub(crate) fn new(prefixes: impl IntoIterator<Item = IpNet>) -> Self {
        let mut prefixes: Vec<(IpNet, ())> = prefixes.into_iter().map(|prefix| (prefix.trunc(), ())).collect();
        prefixes.sort_unstable();
        prefixes.dedup();
        // Cannot fail: there are no duplicates.
        AddressSet(Lpm::new(prefixes).unwrap_or_default())
    }

    pub(crate) fn contains(&self, address: IpAddr) -> bool {
        self.0.lookup(address).is_some()
    }
}

/// The address sets that rules refer to. Each is built at its first use.
#[derive(Debug)]
pub(crate) struct Members<'a> {
    tables: &'a Tables,
    /// `None`: no rule has named a group yet.
    by_group: Option<BTreeMap<(Vni, GroupId), Vec<IpNet>>>,
    sets: BTreeMap<(Option<Vni>, Remote), Arc<AddressSet>>,
}

impl<'a> Members<'a> {
    pub(crate) fn of(tables: &'a Tables) -> Self {
        Members { tables, by_group: None, sets: BTreeMap::new() }
    }

    pub(crate) fn group(&self, id: GroupId) -> Result<&'a SecurityGroup, BuildError> {
        self.tables.groups.get(usize::from(id.0)).ok_or(BuildError::UnknownGroup(id))
    }

    /// The addresses that a rule of a port in the network `vni` applies to; `None`: all.
    pub(crate) fn set(&mut self, vni: Vni, remote: Remote) -> Result<Option<Arc<AddressSet>>, BuildError> {
        let name = match remote {
            Remote::Anybody => return Ok(None),
            Remote::Set(_) => (None, remote),
            Remote::Group(id) => {
                self.group(id)?;
                (Some(vni), remote)
            }
        };
        let entry = match self.sets.entry(name) {
            Entry::Occupied(known) => return Ok(Some(known.get().clone())),
            Entry::Vacant(entry) => entry,
        };
        let prefixes = match remote {
            Remote::Anybody => None,
            Remote::Set(id) => Some(self.tables.address_sets.get(usize::from(id.0)).ok_or(BuildError::UnknownSet(id))?),
            Remote::Group(id) => self.by_group.get_or_insert_with(|| by_group(self.tables)).get(&(vni, id)),
        };
        Ok(Some(entry.insert(Arc::new(AddressSet::new(prefixes.into_iter().flatten().copied()))).clone()))
    }
}

/// The addresses of all groups' members.
fn by_group(tables: &Tables) -> BTreeMap<(Vni, GroupId), Vec<IpNet>> {
    let mut all: BTreeMap<(Vni, GroupId), Vec<IpNet>> = BTreeMap::new();
    for port in &tables.ports {
        for &group in &port.groups {
            all.entry((port.vni, group)).or_default().extend(port.addresses.iter().copied().map(IpNet::from));
        }
    }
    let mut holders: BTreeMap<(Vni, Mac), Vec<IpNet>> = BTreeMap::new();
    for shared in &tables.shared {
        let held = shared.holder.map(|mac| holders.entry((shared.vni, mac)).or_default());
        held.into_iter().for_each(|held| held.push(IpNet::from(shared.address)));
    }
    for port in tables.ports.iter().filter(|_| !holders.is_empty()) {
        let Some(held) = holders.get(&(port.vni, port.mac)) else { continue };
        port.groups.iter().for_each(|group| all.entry((port.vni, *group)).or_default().extend(held));
    }
    for member in &tables.members {
        all.entry((member.vni, member.group)).or_default().push(member.prefix);
    }
    all
}
