//! Lists objects page by page.

use std::collections::BTreeMap;
use std::ops::Bound;

use super::digest::Digest;
use super::store::{Entry, Id, Store};
use crate::api::{ApiError, FILE_OWNER, MAX_LISTED_OBJECTS, ObjectEntry, ObjectList, ObjectsDigest, ObjectsQuery};
use crate::config::{Kind, Object, Vni};

/// Where a list continues. It names the next object, not a number of objects, so concurrent changes do not shift the
/// list.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Cursor {
    /// At an index among the file's objects of a kind; `former_files` identifies the loaded file.
    File { kind: Kind, former_files: u64, index: usize },
    /// After an object that is not the file's.
    Behind(Id),
}

impl Cursor {
    /// The format of the API: `KIND.FILES.INDEX`, or `KIND..KEY`.
    fn text(&self) -> String {
        match self {
            Cursor::File { kind, former_files, index } => format!("{kind}.{former_files}.{index}"),
            Cursor::Behind(id) => format!("{}..{}", id.kind, id.key),
        }
    }

    fn parse(text: &str) -> Option<Cursor> {
        let (kind, rest) = text.split_once('.')?;
        let (files, last) = rest.split_once('.')?;
        let kind = Kind::ALL.into_iter().find(|known| known.to_string() == kind)?;
        if files.is_empty() {
            return Some(Cursor::Behind(Id { kind, key: last.to_owned() }));
        }
        Some(Cursor::File { kind, former_files: files.parse().ok()?, index: last.parse().ok()? })
    }

    fn kind(&self) -> Kind {
        match self {
            Cursor::File { kind, .. } | Cursor::Behind(Id { kind, .. }) => *kind,
        }
    }
}

/// An object in a list.
struct Listed<'a> {
    /// Its position.
    at: Cursor,
    owner: &'a str,
    generation: u64,
    changed_ms: u64,
    object: Object,
}

impl Store {
    /// A page of the requested objects, at most [`MAX_LISTED_OBJECTS`]. An object that exists while all pages are
    /// requested is on exactly one of them.
    ///
    /// # Errors
    /// `from` is not the `next` of an earlier response, or the file was reloaded since.
    pub fn list(&self, query: &ObjectsQuery) -> Result<ObjectList, ApiError> {
        let most = query.limit.unwrap_or(MAX_LISTED_OBJECTS).clamp(1, MAX_LISTED_OBJECTS);
        let mut list = ObjectList::default();
        let mut last = None;
        for Listed { at, owner, generation, changed_ms, object } in self.all(query, self.start(query)?) {
            if list.objects.len() == most {
                // There is more. Positions of the file's objects are stable; other objects may be deleted meanwhile.
                list.next = match at {
                    Cursor::File { .. } => Some(at.text()),
                    Cursor::Behind(_) => last.map(|last: Cursor| behind(last, &at).text()),
                };
                break;
            }
            let (kind, key, spec) = (object.kind(), object.key(), object.spec());
            list.objects.push(ObjectEntry { kind, key, owner: owner.to_owned(), generation, changed_ms, spec });
            last = Some(at);
        }
        Ok(list)
    }

    /// Digests of the requested objects, by owner and VPC.
    pub fn digests(&self, query: &ObjectsQuery) -> Vec<ObjectsDigest> {
        let mut digests: BTreeMap<(&str, Option<u32>), Digest> = BTreeMap::new();
        for Listed { owner, generation, object, .. } in self.all(query, None) {
            digests.entry((owner, object.vni().map(Vni::value))).or_default().add(&object, generation);
        }
        let of = |((owner, vni), digest): ((&str, Option<u32>), Digest)| ObjectsDigest {
            owner: owner.to_owned(),
            vni,
            objects: digest.objects(),
            digest: digest.text(),
        };
        digests.into_iter().map(of).collect()
    }

    fn start(&self, query: &ObjectsQuery) -> Result<Option<Cursor>, ApiError> {
        let Some(from) = &query.from else { return Ok(None) };
        match Cursor::parse(from) {
            None => Err(ApiError::bad_request(format!("{from:?} is not a valid position"))
                .at("from")
                .hint("use `next` of the previous response, or leave it out to start")),
            Some(Cursor::File { former_files, .. }) if former_files != self.former_files => {
                Err(ApiError::conflict("the file was reloaded since the list began")
                    .at("from")
                    .hint("start again without it"))
            }
            start => Ok(start),
        }
    }

    /// All requested objects by kind: the file's objects in its order, then others by key.
    fn all<'a>(&'a self, query: &'a ObjectsQuery, start: Option<Cursor>) -> impl Iterator<Item = Listed<'a>> {
        let key = query.key.as_ref().map(|key| query.kind.and_then(|kind| kind.canonical(key)).unwrap_or(key.clone()));
        let from = start.as_ref().and_then(|start| Kind::ALL.iter().position(|kind| *kind == start.kind()));
        let kinds = Kind::ALL.into_iter().skip(from.unwrap_or(0));
        let kinds = kinds.filter(|kind| query.kind.is_none_or(|wanted| wanted == *kind));
        kinds.flat_map(move |kind| {
            let start = start.as_ref().filter(|start| start.kind() == kind);
            let count = self.file.count(kind);
            let from = match start {
                None => 0,
                Some(Cursor::File { index, .. }) => (*index).min(count),
                Some(Cursor::Behind(_)) => count,
            };
            let from = if query.owner.as_ref().is_none_or(|owner| owner == FILE_OWNER) { from } else { count };
            let wanted_key = key.clone();
            let of_file = (from..).zip(self.file.objects_of(kind, from)).filter_map(move |(index, object)| {
                let at = Cursor::File { kind, former_files: self.former_files, index };
                let wanted = is_of(query.vni, &object) && wanted_key.as_ref().is_none_or(|key| *key == object.key());
                wanted.then_some(Listed { at, owner: FILE_OWNER, generation: 0, changed_ms: 0, object })
            });
            of_file.chain(self.others_of(kind, key.as_deref(), start, query))
        })
    }

    /// The objects of a kind that are not the file's.
    fn others_of<'a>(
        &'a self,
        kind: Kind,
        key: Option<&str>,
        start: Option<&Cursor>,
        query: &'a ObjectsQuery,
    ) -> impl Iterator<Item = Listed<'a>> + use<'a> {
        let of_key = |key: &str| Id { kind, key: key.to_owned() };
        let from = match (start, key) {
            (Some(Cursor::Behind(id)), _) => Bound::Excluded(id.clone()),
            (_, Some(key)) => Bound::Included(of_key(key)),
            _ => Bound::Included(of_key("")),
        };
        // A key names at most one object.
        let most = if key.is_some() { 1 } else { usize::MAX };
        let key = key.map(str::to_owned);
        let others = self.others.range((from, Bound::Unbounded)).take(most).take_while(move |(id, _)| id.kind == kind);
        let wanted = move |(id, entry): &(&Id, &Entry)| {
            key.as_ref().is_none_or(|key| *key == id.key)
                && query.owner.as_ref().is_none_or(|owner| *owner == entry.owner)
                && is_of(query.vni, &entry.object)
        };
        others.filter(wanted).map(|(id, entry)| Listed {
            at: Cursor::Behind(id.clone()),
            owner: &entry.owner,
            generation: entry.generation,
            changed_ms: entry.changed_ms,
            object: entry.object.clone(),
        })
    }
}

/// The cursor of a list whose last object is at `last`, and whose next one is not the file's.
fn behind(last: Cursor, next: &Cursor) -> Cursor {
    match last {
        Cursor::Behind(id) if id.kind == next.kind() => Cursor::Behind(id),
        // No key is empty, so this is before all objects of the kind.
        _ => Cursor::Behind(Id { kind: next.kind(), key: String::new() }),
    }
}

fn is_of(vni: Option<u32>, object: &Object) -> bool {
    vni.is_none_or(|wanted| object.vni().map(Vni::value) == Some(wanted))
}
