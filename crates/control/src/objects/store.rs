//! The objects in force, and plans of batches of changes.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

use imbl::OrdMap;

use super::error::{ApplyError, ItemError};
use crate::api::{ApplyItem, ApplyOp, FILE_OWNER, MAX_APPLY_ITEMS};
use crate::config::{Config, Kind, Object, RelationError, RouteKey, Vni};

/// Maximum number of objects of all owners except the file.
pub const MAX_OBJECTS: usize = 2_000_000;
/// Maximum number of ports, and of peers: their numbers have 16 bits, and added ones do not reuse those of ones being
/// removed.
const MAX_NUMBERED: usize = 60_000;
/// Rounds in which objects with errors are left out when objects are restored; after that, all are left out.
const RESTORE_ROUNDS: usize = 100;

/// Identifies an object.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Id {
    /// Its kind.
    pub kind: Kind,
    /// Its key, as [`Object::key`] gives it.
    pub key: String,
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.kind, self.key)
    }
}

impl Id {
    /// The id of an object.
    pub fn of(object: &Object) -> Id {
        Id { kind: object.kind(), key: object.key() }
    }
}

/// Objects that are not the file's. Copies share their memory.
pub type Objects = OrdMap<Id, Entry>;

/// An object that is not the file's.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Its owner.
    pub owner: String,
    /// Its version, from 1.
    pub generation: u64,
    /// Time of the last change, milliseconds since 1970.
    pub changed_ms: u64,
    /// The object.
    pub object: Object,
}

/// The objects in force: those of the file, with its settings, and those of other owners. Clones share them, and are
/// cheap.
#[derive(Clone, Debug)]
pub struct Store {
    pub(super) file: Arc<Config>,
    /// Number of files loaded before this one.
    pub(super) former_files: u64,
    pub(super) others: Objects,
    /// Both combined. The same as `file` while there are no others.
    config: Arc<Config>,
}

/// The result of a batch, not applied yet.
#[derive(Clone, Debug)]
pub struct Plan {
    config: Arc<Config>,
    file: Option<Arc<Config>>,
    changes: BTreeMap<Id, Option<Entry>>,
    unchanged: u64,
}

impl Plan {
    /// All objects and settings after the change.
    pub fn config(&self) -> &Arc<Config> {
        &self.config
    }

    /// The changes: each object's new state; none: it is deleted.
    pub fn changes(&self) -> &BTreeMap<Id, Option<Entry>> {
        &self.changes
    }

    /// Items that change nothing.
    pub fn unchanged(&self) -> u64 {
        self.unchanged
    }
}

impl Store {
    /// Only the objects of a file.
    pub fn new(file: Arc<Config>) -> Store {
        Store { config: Arc::clone(&file), file, former_files: 0, others: OrdMap::new() }
    }

    /// The objects of a file, and restored objects of other owners. Returns the objects that were left out because the
    /// file now defines them or conflicts with them.
    pub fn restore(file: Arc<Config>, mut others: Objects) -> (Store, Vec<ItemError>) {
        let mut left_out = Vec::new();
        for id in of_file(&file, others.keys()) {
            left_out.push(is_the_files(None, &id));
            others.remove(&id);
        }
        for round in 0.. {
            let config = together(&file, &others);
            let Err(errors) = config.check_relations() else {
                return (Store { file, former_files: 0, others, config }, left_out);
            };
            let before = others.len();
            for error in errors {
                let named = error.object.clone().map(|(kind, key)| Id { kind, key });
                if named.is_some_and(|id| others.remove(&id).is_some()) {
                    left_out.push(of_relation(error, &HashMap::new()));
                }
            }
            if others.len() == before || round == RESTORE_ROUNDS {
                let alone = |(id, _)| item_error(None, Some(&id), "", "conflicts with the file", "apply it again");
                left_out.extend(std::mem::take(&mut others).into_iter().map(alone));
            }
            if others.is_empty() {
                break;
            }
        }
        (Store::new(file), left_out)
    }

    /// All objects and settings.
    pub fn config(&self) -> &Arc<Config> {
        &self.config
    }

    /// The objects that are not the file's.
    pub fn others(&self) -> &Objects {
        &self.others
    }

    /// Whether the object exists and is not the file's.
    pub fn is_other(&self, kind: Kind, key: &str) -> bool {
        self.others.contains_key(&Id { kind, key: key.to_owned() })
    }

    /// Plans a batch, without changing anything. `now_ms` is in milliseconds since 1970.
    ///
    /// # Errors
    /// All errors that can be detected.
    pub fn plan(&self, items: &[ApplyItem], now_ms: u64) -> Result<Plan, ApplyError> {
        if items.len() > MAX_APPLY_ITEMS {
            let what = format!("{} items are more than {MAX_APPLY_ITEMS}", items.len());
            return Err(ApplyError(vec![item_error(None, None, "items", &what, "use several batches")]));
        }
        let mut errors = Vec::new();
        let mut wanted = BTreeMap::new();
        for (number, item) in items.iter().enumerate() {
            match self.read(number, item) {
                Ok((id, object)) => match wanted.insert(id.clone(), (number, item, object)) {
                    None => {}
                    Some((first, ..)) => {
                        let what = format!("is already in items[{first}]");
                        errors.push(item_error(Some(number), Some(&id), "", &what, "name each object once in a batch"));
                    }
                },
                Err(of_item) => errors.extend(of_item),
            }
        }
        let of_file = of_file(&self.file, wanted.keys());
        let mut plan = self.no_change();
        let mut numbers = HashMap::new();
        for (id, (number, item, object)) in wanted {
            numbers.insert(id.clone(), number);
            if of_file.contains(&id) {
                errors.push(is_the_files(Some(number), &id));
                continue;
            }
            match self.change(&id, number, item, object, now_ms) {
                Ok(Some(change)) => drop(plan.changes.insert(id, change)),
                Ok(None) => plan.unchanged += 1,
                Err(error) => errors.push(*error),
            }
        }
        if !errors.is_empty() {
            errors.sort_by_key(|e| e.item);
            return Err(ApplyError(errors));
        }
        if !plan.changes.is_empty() {
            plan.config = Arc::new(self.changed(&plan.changes));
            self.check_counts(&plan)?;
            let changes = plan.changes.iter();
            let changes = changes.map(|(id, entry)| (id.kind, &*id.key, entry.as_ref().map(|entry| &entry.object)));
            plan.config.check_changes(&self.config, changes).map_err(|errors| of_relations(errors, &numbers))?;
        }
        Ok(plan)
    }

    /// Plans the change to another file, as a batch of the owner `file`: sets the objects that it defines, and deletes
    /// those that it no longer defines. `file` is valid by itself.
    ///
    /// # Errors
    /// It defines objects of other owners, or omits objects to which theirs refer.
    pub fn plan_file(&self, file: Arc<Config>) -> Result<Plan, ApplyError> {
        if self.others.is_empty() {
            let config = Arc::clone(&file);
            return Ok(Plan { config, file: Some(file), ..self.no_change() });
        }
        let taken = of_file(&file, self.others.keys());
        if !taken.is_empty() {
            let mut errors: Vec<_> = taken.iter().filter_map(|id| Some((id, self.others.get(id)?))).collect();
            errors.sort_by_key(|(id, _)| *id);
            let error = |(id, entry): (&Id, &Entry)| {
                let what = format!("is in the file, but already belongs to {:?}", entry.owner);
                conflict(item_error(None, Some(id), "", &what, "remove it from the file, or let its owner delete it"))
            };
            return Err(ApplyError(errors.into_iter().map(error).collect()));
        }
        let plan = Plan { config: together(&file, &self.others), file: Some(file), ..self.no_change() };
        self.check_counts(&plan)?;
        plan.config.check_relations().map_err(|errors| of_relations(errors, &HashMap::new()))?;
        Ok(plan)
    }

    fn no_change(&self) -> Plan {
        Plan { config: Arc::clone(&self.config), file: None, changes: BTreeMap::new(), unchanged: 0 }
    }

    /// The configuration after changes. Only kinds with changes are composed again; of the routes, only the changed
    /// ones.
    fn changed(&self, changes: &BTreeMap<Id, Option<Entry>>) -> Config {
        let mut config = Config::clone(&self.config);
        let kinds: BTreeSet<Kind> = changes.keys().map(|id| id.kind).collect();
        for kind in kinds {
            let of_kind = changes.range(first_of(kind)..).take_while(|(id, _)| id.kind == kind);
            if kind == Kind::Route {
                for (id, entry) in of_kind {
                    match entry.as_ref().map(|entry| &entry.object) {
                        Some(Object::Route(route)) => drop(config.routes.insert(route.clone())),
                        _ => drop(route_key(&id.key).map(|key| config.routes.remove(&key))),
                    }
                }
                continue;
            }
            let others = self.others.range(first_of(kind)..).take_while(|(id, _)| id.kind == kind);
            let mut others: BTreeMap<&Id, &Entry> = others.collect();
            for (id, entry) in of_kind {
                match entry {
                    Some(entry) => drop(others.insert(id, entry)),
                    None => drop(others.remove(id)),
                }
            }
            config.clear(kind);
            self.file.objects_of(kind, 0).for_each(|object| config.push(object));
            others.values().for_each(|entry| config.push(entry.object.clone()));
        }
        config
    }

    /// Checks the numbers of objects after a plan.
    fn check_counts(&self, plan: &Plan) -> Result<(), ApplyError> {
        let refuse =
            |what: String| Err(ApplyError(vec![conflict(item_error(None, None, "", &what, "delete some first"))]));
        let is_new = |(id, entry): &(&Id, &Option<Entry>)| entry.is_some() && !self.others.contains_key(*id);
        let added = plan.changes.iter().filter(is_new).count();
        let deleted = plan.changes.values().filter(|entry| entry.is_none()).count();
        let others = self.others.len() + added - deleted;
        if others > MAX_OBJECTS {
            return refuse(format!("there would be {others} objects; at most {MAX_OBJECTS} are kept"));
        }
        for (kind, count) in [(Kind::Port, plan.config.ports.len()), (Kind::Peer, plan.config.peers.len())] {
            if count > MAX_NUMBERED {
                return refuse(format!(
                    "there would be {count} objects of kind {kind}; a host has at most {MAX_NUMBERED}"
                ));
            }
        }
        Ok(())
    }

    /// Applies a plan of [`plan`](Self::plan) or [`plan_file`](Self::plan_file) of this store.
    pub fn commit(&mut self, plan: Plan) {
        change(&mut self.others, plan.changes);
        if let Some(file) = plan.file {
            self.file = file;
            self.former_files += 1;
        }
        self.config = if self.others.is_empty() { Arc::clone(&self.file) } else { plan.config };
    }

    /// Parses an item: the object's id and, unless it is to be deleted, its new state.
    fn read(&self, number: usize, item: &ApplyItem) -> Result<(Id, Option<Object>), Vec<ItemError>> {
        let kind = item.kind;
        let named = item.key.clone().map(|key| Id { kind, key });
        let error = |field: &str, what: &str, hint: &str| {
            Err(vec![item_error(Some(number), named.as_ref(), field, what, hint)])
        };
        let owner = &item.owner;
        let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
        if owner == FILE_OWNER {
            return error(
                "owner",
                "\"file\" is reserved for the configuration file",
                "change the file and reload it, or name another owner",
            );
        } else if !(1..=63).contains(&owner.len()) || !owner.chars().all(allowed) {
            return error("owner", &format!("{owner:?} is not 1 to 63 of a-z, 0-9, '-' and '.'"), "name the owner");
        } else if item.generation == Some(0) {
            return error("generation", "0 is reserved for the file's objects", "start with 1, or leave it out");
        }
        let key = match &item.key {
            None => None,
            Some(key) => match kind.canonical(key) {
                Some(key) => Some(key),
                None => return error("key", &format!("{key:?} is not a key of a {kind}"), kind.key_form()),
            },
        };
        let spec = match (item.op, &item.spec) {
            (ApplyOp::Delete, None) => {
                let Some(key) = key else { return error("key", "missing", kind.key_form()) };
                return Ok((Id { kind, key }, None));
            }
            (ApplyOp::Delete, Some(_)) => return error("spec", "not allowed in a deletion", "remove it"),
            (ApplyOp::Set, None) => {
                return error("spec", "missing", "describe the object with the keys of its table in the file");
            }
            (ApplyOp::Set, Some(spec)) => spec,
        };
        let workers = self.file.workers.count;
        let of_field = |e: crate::config::FieldError| {
            let field = if e.field.is_empty() { "spec".to_owned() } else { e.field };
            item_error(Some(number), named.as_ref(), &field, &e.message, "")
        };
        let object = Object::parse(kind, spec, workers)
            .map_err(|errors| errors.into_iter().map(of_field).collect::<Vec<_>>())?;
        let id = Id::of(&object);
        match key {
            Some(key) if key != id.key => {
                error("key", &format!("the spec belongs to {:?}", id.key), "correct one of them, or leave out the key")
            }
            _ => Ok((id, Some(object))),
        }
    }

    /// The change that an item makes, if any.
    fn change(
        &self,
        id: &Id,
        number: usize,
        item: &ApplyItem,
        object: Option<Object>,
        now_ms: u64,
    ) -> Result<Option<Option<Entry>>, Box<ItemError>> {
        let refuse = |field: &str, what: String, hint: &str| {
            Err(Box::new(conflict(item_error(Some(number), Some(id), field, &what, hint))))
        };
        let old = self.others.get(id);
        if let Some(old) = old.filter(|old| old.owner != item.owner) {
            let what = format!("the object belongs to {:?}", old.owner);
            return refuse("owner", what, "let its owner change or delete it");
        }
        let known = old.map_or(0, |old| old.generation);
        let generation = item.generation.unwrap_or(known.saturating_add(1));
        if generation < known {
            let what = format!("{generation} is stale: the object has generation {known}");
            return refuse("generation", what, "get the object, and send a later generation");
        }
        let Some(object) = object else { return Ok(old.map(|_| None)) };
        match old {
            Some(old) if old.object == object && (item.generation.is_none() || generation == known) => Ok(None),
            Some(_) if generation == known => {
                let what = format!("the object already has generation {generation}, with another spec");
                refuse("generation", what, "send a later generation")
            }
            _ => Ok(Some(Some(Entry { owner: item.owner.clone(), generation, changed_ms: now_ms, object }))),
        }
    }
}

/// Both combined, in a deterministic order.
fn together(file: &Arc<Config>, others: &Objects) -> Arc<Config> {
    if others.is_empty() {
        return Arc::clone(file);
    }
    let mut config = Config::clone(file);
    others.values().for_each(|entry| config.push(entry.object.clone()));
    Arc::new(config)
}

fn change(others: &mut Objects, changes: BTreeMap<Id, Option<Entry>>) {
    for (id, entry) in changes {
        match entry {
            Some(entry) => drop(others.insert(id, entry)),
            None => drop(others.remove(&id)),
        }
    }
}

/// Errors of relations, those of the batch's own items first. `numbers` are the item numbers of the batch's objects.
fn of_relations(errors: Vec<RelationError>, numbers: &HashMap<Id, usize>) -> ApplyError {
    let mut errors: Vec<_> = errors.into_iter().map(|error| of_relation(error, numbers)).collect();
    errors.sort_by_key(|e| e.item.unwrap_or(usize::MAX));
    ApplyError(errors)
}

/// Before all ids of a kind: no key is empty.
fn first_of(kind: Kind) -> Id {
    Id { kind, key: String::new() }
}

/// The VPC and prefix of a route's key.
fn route_key(key: &str) -> Option<RouteKey> {
    let (vni, prefix) = key.split_once('/')?;
    Some((vni.parse().ok().and_then(Vni::new)?, prefix.parse().ok()?))
}

/// The ids of objects that the file defines.
fn of_file<'a>(file: &Config, ids: impl Iterator<Item = &'a Id>) -> HashSet<Id> {
    let mut wanted: HashMap<Kind, HashSet<&str>> = HashMap::new();
    for id in ids {
        wanted.entry(id.kind).or_default().insert(&id.key);
    }
    let mut found = HashSet::new();
    for (kind, keys) in wanted {
        let mut add = |key: String| {
            if keys.contains(&*key) {
                found.insert(Id { kind, key });
            }
        };
        if kind == Kind::Route {
            // There may be very many.
            let is_there = |key: &&&str| route_key(key).is_some_and(|key| file.routes.get(&key).is_some());
            keys.iter().filter(is_there).for_each(|key| add((*key).to_owned()));
        } else {
            file.objects_of(kind, 0).for_each(|object| add(object.key()));
        }
    }
    found
}

fn item_error(item: Option<usize>, id: Option<&Id>, field: &str, what: &str, hint: &str) -> ItemError {
    ItemError {
        item,
        object: id.map(|id| (id.kind, id.key.clone())),
        field: field.to_owned(),
        what: what.to_owned(),
        hint: hint.to_owned(),
        is_conflict: false,
    }
}

fn conflict(error: ItemError) -> ItemError {
    ItemError { is_conflict: true, ..error }
}

fn is_the_files(item: Option<usize>, id: &Id) -> ItemError {
    let hint = "change the file and reload it, or remove it from the file first";
    conflict(item_error(item, Some(id), "owner", "the object belongs to the configuration file", hint))
}

fn of_relation(error: RelationError, numbers: &HashMap<Id, usize>) -> ItemError {
    let id = error.object.map(|(kind, key)| Id { kind, key });
    let item = id.as_ref().and_then(|id| numbers.get(id)).copied();
    conflict(item_error(item, id.as_ref(), &error.error.field, &error.error.message, ""))
}
