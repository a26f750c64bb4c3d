//! Numbers of ports and peers, by which the data path knows them.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, PoisonError, RwLock};

use bifrost_control::config::Config;

/// Numbers of ports and peers. A name keeps its number while it exists.
#[derive(Clone, Debug, Default)]
pub(crate) struct Names {
    ports: BTreeMap<String, u16>,
    peers: BTreeMap<String, u16>,
    /// Names by number.
    of_ports: HashMap<u16, String>,
    of_peers: HashMap<u16, String>,
}

/// The numbers in force, which lists read without the daemon's lock.
#[derive(Debug, Default)]
pub(crate) struct NamesInForce {
    now: Arc<Names>,
    shared: Arc<RwLock<Arc<Names>>>,
}

impl NamesInForce {
    /// Replaces the names. Removed ports and peers are already removed from the workers, and new ones are not added
    /// yet.
    pub(crate) fn set(&mut self, names: Names) {
        self.now = Arc::new(names);
        *self.shared.write().unwrap_or_else(PoisonError::into_inner) = Arc::clone(&self.now);
    }

    /// The current names.
    pub(crate) fn now(&self) -> &Arc<Names> {
        &self.now
    }

    /// A shared reference that always shows the names in force.
    pub(crate) fn in_force(&self) -> Arc<RwLock<Arc<Names>>> {
        Arc::clone(&self.shared)
    }
}

impl std::ops::Deref for NamesInForce {
    type Target = Names;

    fn deref(&self) -> &Names {
        &self.now
    }
}

impl Names {
    /// Names with the given numbers. If two names have the same number, the second one is left out.
    pub(crate) fn of_numbers(ports: BTreeMap<String, u16>, peers: BTreeMap<String, u16>) -> Names {
        let once = |numbers: BTreeMap<String, u16>| {
            let mut given = HashSet::new();
            numbers.into_iter().filter(|(_, number)| given.insert(*number)).collect::<BTreeMap<_, _>>()
        };
        Names { ports: once(ports), peers: once(peers), ..Names::default() }
    }

    /// The numbers of ports and peers.
    pub(crate) fn numbers(&self) -> (BTreeMap<String, u16>, BTreeMap<String, u16>) {
        (self.ports.clone(), self.peers.clone())
    }

    pub(crate) fn port(&self, name: &str) -> Option<u16> {
        self.ports.get(name).copied()
    }

    pub(crate) fn peer(&self, name: &str) -> Option<u16> {
        self.peers.get(name).copied()
    }

    pub(crate) fn peer_name(&self, id: u16) -> Option<&str> {
        self.of_peers.get(&id).map(String::as_str)
    }

    pub(crate) fn port_name(&self, owner: u16) -> Option<&str> {
        self.of_ports.get(&owner).map(String::as_str)
    }

    /// The names of `config`: known ones keep their numbers, new ones get free numbers.
    pub(crate) fn next(&self, config: &Config) -> Names {
        let port_names: Vec<&str> = config.ports.iter().map(|p| p.name.as_str()).collect();
        let peer_names: Vec<&str> = config.peers.iter().map(|p| p.name.as_str()).collect();
        let (ports, peers) = (number(&self.ports, &port_names), number(&self.peers, &peer_names));
        let of = |names: &BTreeMap<String, u16>| names.iter().map(|(name, number)| (*number, name.clone())).collect();
        Names { of_ports: of(&ports), of_peers: of(&peers), ports, peers }
    }
}

fn number(old: &BTreeMap<String, u16>, names: &[&str]) -> BTreeMap<String, u16> {
    let mut new: BTreeMap<String, u16> =
        names.iter().filter_map(|n| old.get(*n).map(|id| ((*n).to_string(), *id))).collect();
    let taken: HashSet<u16> = old.values().copied().collect();
    let mut free = 0u16;
    for name in names {
        if !new.contains_key(*name) {
            while taken.contains(&free) {
                free += 1;
            }
            new.insert((*name).to_string(), free);
            free = free.saturating_add(1);
        }
    }
    new
}

#[cfg(test)]
mod tests {
    use super::number;

    #[test]
    fn names_keep_their_numbers_and_new_ones_take_free_ones() {
        let first = number(&Default::default(), &["a", "b", "c"]);
        assert_eq!((first["a"], first["b"], first["c"]), (0, 1, 2));
        let second = number(&first, &["c", "d", "a"]);
        assert_eq!((second["a"], second["c"]), (0, 2));
        assert_eq!(second["d"], 3, "a freed number is not reused in the same step");
        let third = number(&second, &["e"]);
        assert_eq!(third["e"], 1);
    }
}
