//! Longest-prefix match in two layers.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;

use super::base::Base;
use crate::Lpm;

/// Values by IP prefix, both families: an [`Lpm`] whose changed versions are cheap. Clones share memory.
///
/// Without an upper layer a lookup costs one branch more than that of an [`Lpm`]; with one, a second lookup in a small
/// table.
#[derive(Clone, Debug)]
pub struct LayeredLpm<T> {
    base: Arc<Base<T>>,
    /// `None`: nothing differs from the base.
    overlay: Option<Arc<Overlay<T>>>,
}

#[derive(Debug)]
struct Overlay<T> {
    /// Every prefix that differs from the base; `None`: it has been removed.
    changes: BTreeMap<IpNet, Option<T>>,
    /// For each of these prefixes its length, and its value or, if it is removed, that of the longest remaining prefix
    /// around it.
    effective: Lpm<(u8, Option<T>)>,
}

impl<T> Default for LayeredLpm<T> {
    /// An empty table.
    fn default() -> Self {
        LayeredLpm { base: Arc::default(), overlay: None }
    }
}

impl<T> LayeredLpm<T> {
    /// Builds a table from prefixes in any order, without an upper layer. Host bits are ignored.
    ///
    /// # Errors
    /// The smallest prefix that occurs more than once.
    pub fn new(prefixes: impl IntoIterator<Item = (IpNet, T)>) -> Result<Self, IpNet> {
        Ok(LayeredLpm { base: Arc::new(Base::new(prefixes)?), overlay: None })
    }

    /// The value of the longest prefix that contains `addr`.
    #[inline(always)]
    pub fn lookup(&self, addr: IpAddr) -> Option<&T> {
        match &self.overlay {
            None => self.base.lpm().lookup(addr),
            Some(overlay) => self.in_both(overlay, addr),
        }
    }

    #[inline(never)]
    fn in_both<'a>(&'a self, overlay: &'a Overlay<T>, addr: IpAddr) -> Option<&'a T> {
        let below = self.base.entry(self.base.lpm().slot(addr));
        match (overlay.effective.lookup(addr), below) {
            // The base's prefix is longer than any changed one, so it has not changed.
            (Some((len, _)), Some((longer, value))) if longer > *len => Some(value),
            (Some((_, value)), _) => value.as_ref(),
            (None, below) => below.map(|(_, value)| value),
        }
    }

    /// The value of exactly this prefix.
    pub fn get(&self, net: IpNet) -> Option<&T> {
        let net = net.trunc();
        match self.overlay.as_ref().and_then(|overlay| overlay.changes.get(&net)) {
            Some(changed) => changed.as_ref(),
            None => self.base.get(net),
        }
    }

    /// Number of prefixes in the upper layer: added, changed and removed ones.
    pub fn changed_len(&self) -> usize {
        self.overlay.as_ref().map_or(0, |overlay| overlay.changes.len())
    }

    /// Number of prefixes in the base.
    pub fn base_len(&self) -> usize {
        self.base.len()
    }

    /// Whether both have the same base.
    pub fn has_base_of(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.base, &other.base)
    }
}

impl<T: Copy + PartialEq> LayeredLpm<T> {
    /// The table after changes: prefixes and their new values; `None` removes a prefix. Of several changes of a prefix
    /// the last one counts. Takes time proportional to the changes and the upper layer.
    pub fn changed(&self, changes: impl IntoIterator<Item = (IpNet, Option<T>)>) -> Self {
        let mut all = self.overlay.as_ref().map_or_else(BTreeMap::new, |overlay| overlay.changes.clone());
        self.note(&mut all, changes);
        LayeredLpm { base: Arc::clone(&self.base), overlay: Overlay::over(&self.base, all) }
    }

    /// The same table, with all prefixes in the base. Takes time proportional to their number.
    pub fn merged(&self) -> Self {
        let Some(overlay) = &self.overlay else { return self.clone() };
        let kept = self.base.iter().filter(|(net, _)| !overlay.changes.contains_key(net));
        let kept = kept.map(|(net, value)| (net, *value));
        let added = overlay.changes.iter().filter_map(|(net, value)| Some((*net, (*value)?)));
        // Never an error: each prefix is there once.
        let base = Base::new(kept.chain(added)).unwrap_or_default();
        LayeredLpm { base: Arc::new(base), overlay: None }
    }

    /// The same table, over the base that was [`merged`](Self::merged) from `former`, an earlier version of this one.
    /// `None`: this table was not made from `former` by changes alone.
    pub fn rebased(&self, former: &Self, merged: &Self) -> Option<Self> {
        if !self.has_base_of(former) {
            return None;
        }
        let changed = [self, former].into_iter().filter_map(|table| table.overlay.as_ref());
        let nets = changed.flat_map(|overlay| overlay.changes.keys().copied());
        let changes: Vec<(IpNet, Option<T>)> = nets.map(|net| (net, self.get(net).copied())).collect();
        let mut all = BTreeMap::new();
        merged.note(&mut all, changes);
        Some(LayeredLpm { base: Arc::clone(&merged.base), overlay: Overlay::over(&merged.base, all) })
    }

    /// Adds changes to those of an upper layer. A change that agrees with the base is dropped.
    fn note(&self, all: &mut BTreeMap<IpNet, Option<T>>, changes: impl IntoIterator<Item = (IpNet, Option<T>)>) {
        for (net, value) in changes {
            let net = net.trunc();
            if self.base.get(net).copied() == value {
                all.remove(&net);
            } else {
                all.insert(net, value);
            }
        }
    }
}

impl<T: Copy> Overlay<T> {
    /// The upper layer with these changes; `None` if there are none.
    fn over(base: &Base<T>, changes: BTreeMap<IpNet, Option<T>>) -> Option<Arc<Self>> {
        if changes.is_empty() {
            return None;
        }
        // Changed prefixes around the current one, the narrowest last, with the values that apply to them.
        let mut around: Vec<(IpNet, Option<T>)> = Vec::new();
        let mut effective = Vec::with_capacity(changes.len());
        for (&net, value) in &changes {
            while around.pop_if(|(wide, _)| !wide.contains(&net)).is_some() {}
            let value = value.or_else(|| {
                let parent = base.slot(net).and_then(|slot| base.entry(base.parent(slot)?));
                match (parent, around.last()) {
                    // It is narrower than all changed ones, so it has not changed.
                    (Some((len, value)), Some((wide, _))) if len > wide.prefix_len() => Some(*value),
                    (_, Some((_, value))) => *value,
                    (parent, None) => parent.map(|(_, value)| *value),
                }
            });
            around.push((net, value));
            effective.push((net, (net.prefix_len(), value)));
        }
        // Never an error: each prefix is there once.
        let effective = Lpm::new(effective).unwrap_or_default();
        Some(Arc::new(Overlay { changes, effective }))
    }
}
