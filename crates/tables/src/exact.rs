//! Exact match.

use foldhash::fast::FixedState;

/// A hash table with a fast hash and a seed that the caller chooses.
///
/// The hash does not resist an attacker who knows the seed and chooses keys: use a random seed for tables whose keys
/// come from tenants.
pub type ExactMap<K, V> = hashbrown::HashMap<K, V, FixedState>;

/// An empty table.
pub fn exact_map<K, V>(seed: u64) -> ExactMap<K, V> {
    ExactMap::with_hasher(FixedState::with_seed(seed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn returns_inserted_entries() {
        let mut map = exact_map(1);
        for n in 0..1000u32 {
            map.insert(n, n * 2);
        }
        assert!((0..1000).all(|n| map.get(&n) == Some(&(n * 2))));
        assert_eq!(map.get(&1000), None);
    }
}
