//! Items by topic, and who needs which topic.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use super::{HostChanges, Item, ItemId};
use crate::key::Key;

/// What hosts need as a whole or not at all.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Topic {
    /// The ports of a host.
    Host(String),
    /// How a host is reached.
    Peer(String),
    /// A VPC: its settings, and where its ports are.
    Vpc(Key),
    /// Where ports of a VPC are whose routes hosts learn when they need them: no host needs all of it.
    Routes(Key),
    /// What only hosts with a port of a VPC need: its load balancers, mirrors and flow logs.
    Inside(Key),
    /// What a NAT gateway has on a host.
    Nat(Key, String),
    /// The ways of a peering.
    Peering(Key),
    /// A security group with its rules, for hosts that have a port of it.
    Group(Key),
    /// A security group that others' rules may name, and that no port here has.
    GroupName(Key),
    /// An address set.
    Set(Key),
}

/// An item, and who does not get it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Visible {
    pub(super) item: Item,
    /// A host that does not get it, although it needs the topic.
    pub(super) except: Option<Arc<str>>,
}

impl Visible {
    fn to(&self, host: &str) -> Option<&Item> {
        (self.except.as_deref() != Some(host)).then_some(&self.item)
    }
}

/// What objects say of an item: one, unless the store contradicts itself. Then the first of them counts, in the order of their keys.
#[derive(Debug, Default)]
struct Claims(Vec<(Key, Visible)>);

impl Claims {
    fn first(&self) -> Option<&Visible> {
        self.0.first().map(|(_, visible)| visible)
    }

    fn set(&mut self, by: &Key, visible: Visible) {
        match self.0.binary_search_by_key(&by, |(by, _)| by) {
            Ok(at) => self.0[at].1 = visible,
            Err(at) => {
                self.0.reserve_exact(1);
                self.0.insert(at, (by.clone(), visible));
            }
        }
    }
}

/// What hosts are told.
pub(super) struct Told<'w> {
    /// Whether a host is told item by item; of others only is noted that something changes.
    wants: &'w dyn Fn(&str) -> bool,
    changes: BTreeMap<Arc<str>, HostChanges>,
}

impl Told<'_> {
    pub(super) fn new(wants: &dyn Fn(&str) -> bool) -> Told<'_> {
        Told { wants, changes: BTreeMap::new() }
    }

    pub(super) fn into_changes(self) -> BTreeMap<Arc<str>, HostChanges> {
        self.changes
    }

    /// What a host is told, if it is.
    fn of(&mut self, host: &Arc<str>) -> Option<&mut HostChanges> {
        let changes = self.changes.entry(Arc::clone(host)).or_default();
        (self.wants)(host).then_some(changes)
    }
}

#[derive(Debug, Default)]
struct Entry {
    items: BTreeMap<ItemId, Claims>,
    hosts: BTreeSet<Arc<str>>,
}

/// All topics. They have numbers, because a host that can reach a thousand others needs a topic of each.
#[derive(Debug, Default)]
pub(super) struct Topics {
    numbers: HashMap<Topic, u32, foldhash::fast::RandomState>,
    entries: Vec<Entry>,
    /// Numbers that no topic has.
    free: Vec<u32>,
    /// What each host needs, in order.
    subscriptions: HashMap<Arc<str>, Vec<u32>, foldhash::fast::RandomState>,
}

impl Topics {
    /// An object sets an item. Gives what it was, if it differs.
    pub(super) fn set(&mut self, topic: &Topic, id: &ItemId, by: &Key, visible: Visible) -> Option<Option<Visible>> {
        let number = self.number(topic);
        let claims = self.entries[number as usize].items.entry(id.clone()).or_default();
        let before = claims.first().cloned();
        claims.set(by, visible);
        differs(before.as_ref(), claims.first()).then_some(before)
    }

    /// An object says no more of an item. Gives what it was, if it differs.
    pub(super) fn remove(&mut self, topic: &Topic, id: &ItemId, by: &Key) -> Option<Option<Visible>> {
        let number = *self.numbers.get(topic)?;
        let items = &mut self.entries[number as usize].items;
        let claims = items.get_mut(id)?;
        let before = claims.first().cloned();
        claims.0.retain(|(claimant, _)| claimant != by);
        let differs = differs(before.as_ref(), claims.first());
        if claims.0.is_empty() {
            items.remove(id);
        }
        self.tidy(topic, number);
        differs.then_some(before)
    }

    /// What an item says, if any object says it.
    pub(super) fn item(&self, topic: &Topic, id: &ItemId) -> Option<&Visible> {
        let number = *self.numbers.get(topic)?;
        self.entries[number as usize].items.get(id)?.first()
    }

    /// The hosts that need a topic.
    pub(super) fn subscribers(&self, topic: &Topic) -> impl Iterator<Item = &Arc<str>> {
        let number = self.numbers.get(topic);
        number.into_iter().flat_map(|number| &self.entries[*number as usize].hosts)
    }

    /// Everything that a host gets.
    pub(super) fn of_host(&self, host: &str) -> impl Iterator<Item = (&ItemId, &Item)> {
        let numbers = self.subscriptions.get(host).into_iter().flatten();
        let items = numbers.flat_map(|number| &self.entries[*number as usize].items);
        items.filter_map(move |(id, claims)| Some((id, claims.first()?.to(host)?)))
    }

    /// A host needs these topics and no others.
    pub(super) fn subscribe(&mut self, host: &Arc<str>, wanted: BTreeSet<Topic>) {
        let mut told = Told::new(&|_| false);
        let new = self.unsubscribe(host, &wanted, &mut told);
        self.subscribe_to(host, new, &mut told);
    }

    /// A host needs no others than these topics. Gives those that are new to it.
    pub(super) fn unsubscribe(&mut self, host: &Arc<str>, wanted: &BTreeSet<Topic>, told: &mut Told<'_>) -> Vec<Topic> {
        let known = self.subscriptions.remove(host).unwrap_or_default();
        let is_known = |number: &u32| known.binary_search(number).is_ok();
        let is_new = |topic: &&Topic| !self.numbers.get(*topic).is_some_and(is_known);
        let new: Vec<Topic> = wanted.iter().filter(is_new).cloned().collect();
        let numbers: BTreeSet<u32> = wanted.iter().filter_map(|topic| self.numbers.get(topic).copied()).collect();
        let mut kept = Vec::with_capacity(known.len());
        let mut left = Vec::new();
        for number in known {
            if numbers.contains(&number) {
                kept.push(number);
                continue;
            }
            self.leave(host, number, told);
            let entry = &self.entries[number as usize];
            if entry.hosts.is_empty() && entry.items.is_empty() {
                left.push(number);
            }
        }
        if !left.is_empty() {
            self.numbers.retain(|_, number| !left.contains(number));
            self.free.append(&mut left);
        }
        if !kept.is_empty() {
            self.subscriptions.insert(Arc::clone(host), kept);
        }
        new
    }

    /// A host needs of these topics those that `needs` names, and all others as before. Gives those that are new to it.
    pub(super) fn unsubscribe_from(
        &mut self,
        host: &Arc<str>,
        topics: &BTreeSet<Topic>,
        needs: impl Fn(&Topic) -> bool,
        told: &mut Told<'_>,
    ) -> Vec<Topic> {
        let mut new = Vec::new();
        for topic in topics {
            let number = self.numbers.get(topic).copied();
            let has = number
                .filter(|number| self.subscriptions.get(host).is_some_and(|known| known.binary_search(number).is_ok()));
            match (has, needs(topic)) {
                (None, true) => new.push(topic.clone()),
                (Some(number), false) => {
                    if let Some(known) = self.subscriptions.get_mut(host) {
                        known.retain(|known| *known != number);
                    }
                    self.leave(host, number, told);
                    self.tidy(topic, number);
                }
                _ => {}
            }
        }
        new
    }

    /// A host needs these topics as well.
    pub(super) fn subscribe_to(&mut self, host: &Arc<str>, topics: Vec<Topic>, told: &mut Told<'_>) {
        let mut numbers = self.subscriptions.remove(host).unwrap_or_default();
        for topic in topics {
            let number = self.number(&topic);
            let entry = &mut self.entries[number as usize];
            entry.hosts.insert(Arc::clone(host));
            if !entry.items.is_empty()
                && let Some(changes) = told.of(host)
            {
                let visible =
                    |(id, claims): (&ItemId, &Claims)| Some((id.clone(), Some(claims.first()?.to(host)?.clone())));
                changes.extend(entry.items.iter().filter_map(visible));
            }
            numbers.push(number);
        }
        numbers.sort_unstable();
        if !numbers.is_empty() {
            self.subscriptions.insert(Arc::clone(host), numbers);
        }
    }

    /// Tells the hosts that need them of items that differ: each with what it was.
    pub(super) fn publish(&self, items: &[(Topic, ItemId, Option<Visible>)], told: &mut Told<'_>) {
        // An item that one topic loses and another gets stays.
        for removals in [true, false] {
            for (topic, id, before) in items {
                let Some(number) = self.numbers.get(topic) else { continue };
                let entry = &self.entries[*number as usize];
                let now = entry.items.get(id).and_then(Claims::first);
                for host in &entry.hosts {
                    let now = now.and_then(|visible| visible.to(host));
                    let was = before.as_ref().is_some_and(|visible| visible.to(host).is_some());
                    if now.is_none() == removals
                        && (was || now.is_some())
                        && let Some(changes) = told.of(host)
                    {
                        changes.insert(id.clone(), now.cloned());
                    }
                }
            }
        }
    }

    /// A host no longer has what a topic has.
    fn leave(&mut self, host: &Arc<str>, number: u32, told: &mut Told<'_>) {
        let entry = &mut self.entries[number as usize];
        entry.hosts.remove(host);
        if !entry.items.is_empty()
            && let Some(changes) = told.of(host)
        {
            changes.extend(entry.items.keys().map(|id| (id.clone(), None)));
        }
    }

    fn number(&mut self, topic: &Topic) -> u32 {
        if let Some(number) = self.numbers.get(topic) {
            return *number;
        }
        let number = self.free.pop().unwrap_or_else(|| {
            self.entries.push(Entry::default());
            (self.entries.len() - 1) as u32
        });
        self.numbers.insert(topic.clone(), number);
        number
    }

    /// Frees the number of a topic that has neither items nor hosts.
    fn tidy(&mut self, topic: &Topic, number: u32) {
        let entry = &self.entries[number as usize];
        if entry.items.is_empty() && entry.hosts.is_empty() {
            self.numbers.remove(topic);
            self.free.push(number);
        }
    }
}

/// Whether hosts would notice.
fn differs(before: Option<&Visible>, now: Option<&Visible>) -> bool {
    let noticed = |visible: &Visible| (Arc::clone(&visible.item.spec), visible.except.clone());
    before.map(noticed) != now.map(noticed)
}
