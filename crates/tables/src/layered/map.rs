//! Exact match in two layers.

use std::hash::Hash;
use std::sync::Arc;

use crate::{ExactMap, exact_map};

/// An [`ExactMap`] whose changed versions are cheap. Clones share memory.
#[derive(Clone, Debug)]
pub struct LayeredMap<K, V> {
    base: Arc<ExactMap<K, V>>,
    /// Keys that differ from the base: their value, or `None` if the key has been removed. `None`: nothing differs.
    overlay: Option<Arc<ExactMap<K, Option<V>>>>,
}

impl<K, V> Default for LayeredMap<K, V> {
    fn default() -> Self {
        LayeredMap { base: Arc::new(exact_map(0)), overlay: None }
    }
}

impl<K: Copy + Eq + Hash, V: Copy + PartialEq> LayeredMap<K, V> {
    /// A table without an upper layer.
    pub fn new(base: ExactMap<K, V>) -> Self {
        LayeredMap { base: Arc::new(base), overlay: None }
    }

    /// The value of a key.
    #[inline(always)]
    pub fn get(&self, key: &K) -> Option<V> {
        if let Some(overlay) = &self.overlay
            && let Some(changed) = overlay.get(key)
        {
            return *changed;
        }
        self.base.get(key).copied()
    }

    /// Number of keys in the upper layer: added, changed and removed ones.
    pub fn changed_len(&self) -> usize {
        self.overlay.as_ref().map_or(0, |overlay| overlay.len())
    }

    /// Whether both have the same base.
    pub fn has_base_of(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.base, &other.base)
    }

    /// The table after changes: keys and their new values; `None` removes a key. Takes time proportional to the changes
    /// and the upper layer.
    pub fn changed(&self, changes: impl IntoIterator<Item = (K, Option<V>)>) -> Self {
        let mut all = self.overlay.as_ref().map_or_else(|| self.empty(), |overlay| ExactMap::clone(overlay));
        self.note(&mut all, changes);
        let overlay = (!all.is_empty()).then(|| Arc::new(all));
        LayeredMap { base: Arc::clone(&self.base), overlay }
    }

    /// The same table, with all keys in the base. Takes time proportional to their number.
    pub fn merged(&self) -> Self {
        let Some(overlay) = &self.overlay else { return self.clone() };
        let mut base = ExactMap::clone(&self.base);
        for (key, value) in overlay.iter() {
            match value {
                Some(value) => drop(base.insert(*key, *value)),
                None => drop(base.remove(key)),
            }
        }
        LayeredMap::new(base)
    }

    /// The same table, over the base that was [`merged`](Self::merged) from `former`, an earlier version of this one.
    /// `None`: this table was not made from `former` by changes alone.
    pub fn rebased(&self, former: &Self, merged: &Self) -> Option<Self> {
        if !self.has_base_of(former) {
            return None;
        }
        let changed = [self, former].into_iter().filter_map(|table| table.overlay.as_ref());
        let keys = changed.flat_map(|overlay| overlay.keys().copied());
        Some(merged.changed(keys.map(|key| (key, self.get(&key))).collect::<Vec<_>>()))
    }

    /// Adds changes to those of an upper layer. A change that agrees with the base is dropped.
    fn note(&self, all: &mut ExactMap<K, Option<V>>, changes: impl IntoIterator<Item = (K, Option<V>)>) {
        for (key, value) in changes {
            if self.base.get(&key).copied() == value {
                all.remove(&key);
            } else {
                all.insert(key, value);
            }
        }
    }

    fn empty(&self) -> ExactMap<K, Option<V>> {
        ExactMap::with_hasher(self.base.hasher().clone())
    }
}
