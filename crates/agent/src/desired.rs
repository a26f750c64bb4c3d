//! What the relay says the host is to have: what it said up to the last `InSync`, and what has come since.

use std::collections::BTreeMap;
use std::sync::Arc;

use bifrost_control::config::{Kind, Object};
use bifrost_control::objects::{Id, MAX_OBJECTS};
use bifrost_relay_api::Change;

/// The most bytes of keys and specs that are kept of all objects, and of changes that no `InSync` has ended.
pub const MAX_BYTES: usize = 1 << 30;

/// What a relay calls an object. Its kind may be one that this release does not know.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Name {
    /// The kind's name.
    pub kind: String,
    /// The key.
    pub key: String,
}

impl Name {
    /// Of an object that this release knows.
    pub fn of(id: &Id) -> Name {
        Name { kind: id.kind.name().to_owned(), key: id.key.clone() }
    }

    /// The object's, if this release knows the kind.
    pub fn id(&self) -> Option<Id> {
        Some(Id { kind: Kind::of_name(&self.kind)?, key: self.key.clone() })
    }
}

/// What an object is to be, as it was sent.
#[derive(Clone, Debug, PartialEq)]
struct Wanted {
    spec: Box<[u8]>,
    committed_ms: u64,
}

/// Why a stream has to end. What held before does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// There is more than is kept.
    #[error("the relay sends more objects than a host can have: {MAX_OBJECTS}, and {MAX_BYTES} bytes")]
    TooMuch,
    /// The relay knows less than an earlier one did: what it leaves out need not be stale.
    #[error(
        "the relay has revision {revision} of its store, and an earlier one had {known}; if the store was restored from a backup, \
         restart the agent"
    )]
    Behind {
        /// The relay's.
        revision: u64,
        /// The highest that was seen.
        known: u64,
    },
}

/// Where the stream is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Phase {
    /// There is none.
    #[default]
    Away,
    /// Everything is being sent.
    Snapshot,
    /// Everything was sent, and changes come.
    Following,
}

/// An object that a group has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changed {
    /// Which one.
    pub name: Name,
    /// When the intent was committed, milliseconds since 1970, if it is known and the change is news.
    pub committed_ms: Option<u64>,
}

/// The objects of the host.
#[derive(Clone, Debug, Default)]
pub struct Desired {
    /// The host's workers, as of [`Object::parse`].
    workers: usize,
    phase: Phase,
    held: BTreeMap<Name, Wanted>,
    held_bytes: usize,
    good: BTreeMap<Id, Arc<Object>>,
    bad: BTreeMap<Name, String>,
    pending: BTreeMap<Name, Option<Wanted>>,
    pending_bytes: usize,
    revision: Option<u64>,
    /// No lower revision is believed.
    least: u64,
}

impl Desired {
    /// A stream begins: everything comes. `is_restored`: the store was restored from a backup, and revisions begin again.
    pub fn connected(&mut self, is_restored: bool) {
        if is_restored {
            self.least = 0;
        }
        self.drop_pending();
        self.phase = Phase::Snapshot;
    }

    /// The stream is over. What was said up to the last `InSync` holds.
    pub fn lost(&mut self) {
        self.drop_pending();
        self.phase = Phase::Away;
    }

    /// Part of what changes, in force with the next `InSync`. Of a stream that is over it is nothing.
    ///
    /// # Errors
    /// There is more than is kept. The stream has to end.
    pub fn take(&mut self, changes: Vec<Change>) -> Result<(), Refused> {
        if self.phase == Phase::Away {
            return Ok(());
        }
        for Change { kind, key, spec, committed_ms } in changes {
            // Copied: what was received may be a small part of a large buffer.
            let wanted = spec.map(|spec| Wanted { spec: spec.as_ref().into(), committed_ms });
            let name = Name { kind, key };
            self.pending_bytes += size(&name, wanted.as_ref());
            if let Some((old_name, old)) = self.pending.remove_entry(&name) {
                self.pending_bytes -= size(&old_name, old.as_ref());
            }
            self.pending.insert(name, wanted);
            if self.pending.len() > MAX_OBJECTS || self.pending_bytes > MAX_BYTES {
                return Err(Refused::TooMuch);
            }
        }
        Ok(())
    }

    /// All changes up to a revision were sent: they hold from now on. Gives those that differ. Of a stream that is over it is nothing.
    ///
    /// # Errors
    /// There is more than is kept, or everything is of an older revision than what holds.
    pub fn in_sync(&mut self, revision: u64) -> Result<Vec<Changed>, Refused> {
        if self.phase == Phase::Away {
            return Ok(Vec::new());
        }
        let mut changes = std::mem::take(&mut self.pending);
        self.pending_bytes = 0;
        let is_snapshot = self.phase != Phase::Following;
        if revision < self.least {
            return Err(Refused::Behind { revision, known: self.least });
        }
        if is_snapshot {
            // Stale: it was not sent.
            let gone: Vec<Name> = self.held.keys().filter(|name| !changes.contains_key(name)).cloned().collect();
            changes.extend(gone.into_iter().map(|name| (name, None)));
        }
        let (mut objects, mut bytes) = (self.held.len(), self.held_bytes);
        for (name, wanted) in &changes {
            let old = self.held.get(name);
            objects = objects + usize::from(wanted.is_some()) - usize::from(old.is_some());
            bytes = bytes + wanted.as_ref().map_or(0, |w| size(name, Some(w))) - old.map_or(0, |w| size(name, Some(w)));
        }
        if objects > MAX_OBJECTS || bytes > MAX_BYTES {
            return Err(Refused::TooMuch);
        }
        self.held_bytes = bytes;
        let mut changed = Vec::new();
        for (name, wanted) in changes {
            let committed_ms = wanted.as_ref().map(|w| w.committed_ms).filter(|at| *at > 0 && !is_snapshot);
            if self.replace(&name, wanted) {
                changed.push(Changed { name, committed_ms });
            }
        }
        self.phase = Phase::Following;
        (self.revision, self.least) = (Some(revision), revision);
        Ok(changed)
    }

    /// Another number of workers, on which defaults depend. Gives whether it is another one.
    pub fn set_workers(&mut self, workers: usize) -> bool {
        if self.workers == workers {
            return false;
        }
        self.workers = workers;
        for (name, wanted) in std::mem::take(&mut self.held) {
            self.read(&name, &wanted);
            self.held.insert(name, wanted);
        }
        true
    }

    /// The host's workers, as far as they are known.
    pub fn workers(&self) -> usize {
        self.workers
    }

    /// The objects that can be brought into force.
    pub fn good(&self) -> &BTreeMap<Id, Arc<Object>> {
        &self.good
    }

    /// What this release does not understand, and why.
    pub fn bad(&self) -> &BTreeMap<Name, String> {
        &self.bad
    }

    /// Whether the host is to have it, understood or not.
    pub fn has(&self, id: &Id) -> bool {
        self.good.contains_key(id) || self.bad.contains_key(&Name::of(id))
    }

    /// How many objects the host is to have.
    pub fn count(&self) -> usize {
        self.held.len()
    }

    /// The revision of the last `InSync`; none: there was none yet.
    pub fn revision(&self) -> Option<u64> {
        self.revision
    }

    /// Whether a relay says now what the host is to have: only then is anything deleted.
    pub fn is_in_sync(&self) -> bool {
        self.phase == Phase::Following
    }

    fn drop_pending(&mut self) {
        self.pending.clear();
        self.pending_bytes = 0;
    }

    /// Whether it differs.
    fn replace(&mut self, name: &Name, wanted: Option<Wanted>) -> bool {
        let Some(wanted) = wanted else {
            self.forget(name);
            return self.held.remove(name).is_some();
        };
        if self.held.get(name).is_some_and(|old| old.spec == wanted.spec) {
            self.held.insert(name.clone(), wanted);
            return false;
        }
        self.read(name, &wanted);
        self.held.insert(name.clone(), wanted);
        true
    }

    fn read(&mut self, name: &Name, wanted: &Wanted) {
        self.forget(name);
        match read(name, &wanted.spec, self.workers) {
            Ok((id, object)) => drop(self.good.insert(id, Arc::new(object))),
            Err(error) => drop(self.bad.insert(name.clone(), error)),
        }
    }

    fn forget(&mut self, name: &Name) {
        self.bad.remove(name);
        if let Some(id) = name.id() {
            self.good.remove(&id);
        }
    }
}

/// An object from its description.
fn read(name: &Name, spec: &[u8], workers: usize) -> Result<(Id, Object), String> {
    let id = name.id().ok_or_else(|| {
        format!("this release of bifrost-agent knows no objects of kind {:?}; upgrade it and bifrostd", name.kind)
    })?;
    let spec = serde_json::from_slice(spec).map_err(|e| format!("its description is not JSON: {e}"))?;
    let object = Object::parse(id.kind, &spec, workers).map_err(|errors| {
        let told = |e: &bifrost_control::config::FieldError| match &*e.field {
            "" => e.message.clone(),
            field => format!("{field}: {}", e.message),
        };
        errors.iter().map(told).collect::<Vec<_>>().join("; ")
    })?;
    match object.key() {
        key if key == id.key => Ok((id, object)),
        key => Err(format!("its description is that of {key:?}")),
    }
}

fn size(name: &Name, wanted: Option<&Wanted>) -> usize {
    name.kind.len() + name.key.len() + wanted.map_or(0, |wanted| wanted.spec.len())
}
