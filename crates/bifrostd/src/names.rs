//! Numbers of ports and peers, by which the data path knows them.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, PoisonError, RwLock};

use anyhow::{Result, bail};
use bifrost_avs::{PeerId, PortId};
use bifrost_control::config::Config;

/// Numbers of ports and peers. A name keeps its number while it exists.
#[derive(Clone, Debug, Default)]
pub(crate) struct Names {
    ports: BTreeMap<String, u32>,
    peers: BTreeMap<String, u32>,
    /// Names by number.
    of_ports: HashMap<u32, String>,
    of_peers: HashMap<u32, String>,
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
    pub(crate) fn of_numbers(ports: BTreeMap<String, u32>, peers: BTreeMap<String, u32>) -> Names {
        let once = |numbers: BTreeMap<String, u32>| {
            let mut given = HashSet::new();
            numbers.into_iter().filter(|(_, number)| given.insert(*number)).collect::<BTreeMap<_, _>>()
        };
        Names { ports: once(ports), peers: once(peers), ..Names::default() }
    }

    /// The numbers of ports and peers.
    pub(crate) fn numbers(&self) -> (BTreeMap<String, u32>, BTreeMap<String, u32>) {
        (self.ports.clone(), self.peers.clone())
    }

    pub(crate) fn port(&self, name: &str) -> Option<u32> {
        self.ports.get(name).copied()
    }

    pub(crate) fn peer(&self, name: &str) -> Option<u32> {
        self.peers.get(name).copied()
    }

    pub(crate) fn peer_name(&self, id: u32) -> Option<&str> {
        self.of_peers.get(&id).map(String::as_str)
    }

    pub(crate) fn port_name(&self, owner: u32) -> Option<&str> {
        self.of_ports.get(&owner).map(String::as_str)
    }

    /// The names of `config`: known ones keep their numbers, new ones get free numbers.
    ///
    /// # Errors
    /// There are more ports or peers than the data path has numbers for.
    pub(crate) fn next(&self, config: &Config) -> Result<Names> {
        let port_names: Vec<&str> = config.ports.iter().map(|p| p.name.as_str()).collect();
        let peer_names: Vec<&str> = config.peers.iter().map(|p| p.name.as_str()).collect();
        let (ports, peers) = (number(&self.ports, &port_names), number(&self.peers, &peer_names));
        check(&ports, PortId::LIMIT, "[[port]]")?;
        check(&peers, PeerId::LIMIT, "[[peer]]")?;
        let of = |names: &BTreeMap<String, u32>| names.iter().map(|(name, number)| (*number, name.clone())).collect();
        Ok(Names { of_ports: of(&ports), of_peers: of(&peers), ports, peers })
    }
}

/// Checks that all numbers are below `limit`. A number that is freed is not given out again in the same step, so a
/// change of nearly all names may need two.
fn check(numbers: &BTreeMap<String, u32>, limit: u32, what: &str) -> Result<()> {
    let Some((name, number)) = numbers.iter().find(|(_, number)| **number >= limit) else { return Ok(()) };
    bail!(
        "`{what}` {name} would get number {number}, but numbers end before {limit}; if the same change removes others, \
         remove them first, in a change of their own"
    )
}

fn number(old: &BTreeMap<String, u32>, names: &[&str]) -> BTreeMap<String, u32> {
    let mut new: BTreeMap<String, u32> =
        names.iter().filter_map(|n| old.get(*n).map(|id| ((*n).to_string(), *id))).collect();
    let taken: HashSet<u32> = old.values().copied().collect();
    let mut free = 0u32;
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
    use super::{check, number};

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

    #[test]
    fn more_names_than_numbers_are_refused() {
        let numbers = number(&Default::default(), &["a", "b", "c"]);
        assert!(check(&numbers, 3, "[[port]]").is_ok());
        let error = check(&numbers, 2, "[[port]]").unwrap_err().to_string();
        assert!(error.contains("`[[port]]` c would get number 2") && error.contains("before 2;"), "{error}");
    }

    #[test]
    fn there_are_more_numbers_than_16_bits_have() {
        let names: Vec<String> = (0..70_000).map(|n| format!("p{n:05}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        assert_eq!(number(&Default::default(), &names)["p69999"], 69_999);
    }
}
