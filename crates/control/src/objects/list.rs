//! Which objects there are, page by page.

use std::collections::BTreeMap;
use std::ops::Bound;

use super::digest::Digest;
use super::store::{Entry, Id, Store};
use crate::api::{ApiError, FILE_OWNER, MAX_LISTED_OBJECTS, ObjectEntry, ObjectList, ObjectsDigest, ObjectsQuery};
use crate::config::{Kind, Object, Vni};

/// Where a list goes on. It says what comes next, not how much was before: what comes and goes meanwhile moves nothing else.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Cursor {
    /// At a place of a kind in the file, after a number of other files.
    File { kind: Kind, former_files: u64, place: usize },
    /// Behind an object that is not the file's.
    Behind(Id),
}

impl Cursor {
    /// As the API has it: `KIND.FILES.PLACE`, or `KIND..KEY`.
    fn text(&self) -> String {
        match self {
            Cursor::File { kind, former_files, place } => format!("{kind}.{former_files}.{place}"),
            Cursor::Behind(id) => format!("{}..{}", id.kind, id.key),
        }
    }

    fn parse(text: &str) -> Option<Cursor> {
        let (kind, rest) = text.split_once('.')?;
        let (files, place) = rest.split_once('.')?;
        let kind = Kind::ALL.into_iter().find(|known| known.to_string() == kind)?;
        if files.is_empty() {
            return Some(Cursor::Behind(Id { kind, key: place.to_owned() }));
        }
        Some(Cursor::File { kind, former_files: files.parse().ok()?, place: place.parse().ok()? })
    }

    fn kind(&self) -> Kind {
        match self {
            Cursor::File { kind, .. } | Cursor::Behind(Id { kind, .. }) => *kind,
        }
    }
}

/// An object in a list.
struct Listed<'a> {
    /// Where it is.
    at: Cursor,
    owner: &'a str,
    generation: u64,
    changed_ms: u64,
    object: Object,
}

impl Store {
    /// The objects that are asked for, at most [`MAX_LISTED_OBJECTS`]. One that is there while page after page is asked for is on one of them.
    ///
    /// # Errors
    /// `from` is not what an earlier answer had, or there is another file since.
    pub fn list(&self, query: &ObjectsQuery) -> Result<ObjectList, ApiError> {
        let most = query.limit.unwrap_or(MAX_LISTED_OBJECTS).clamp(1, MAX_LISTED_OBJECTS);
        let mut list = ObjectList::default();
        let mut last = None;
        for Listed { at, owner, generation, changed_ms, object } in self.all(query, self.start(query)?) {
            if list.objects.len() == most {
                // That one is there, so there is more. The file's are where they are; others may go meanwhile.
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

    /// Digests of the objects that are asked for, by owner and VPC.
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
            None => Err(ApiError::bad_request(format!("{from:?} is not where a list goes on"))
                .at("from")
                .hint("give what `next` of the answer before was, or leave it out to begin")),
            Some(Cursor::File { former_files, .. }) if former_files != self.former_files => {
                Err(ApiError::conflict("the file was loaded again since the list began")
                    .at("from")
                    .hint("begin again, without it"))
            }
            start => Ok(start),
        }
    }

    /// Kind by kind: the file's objects in its order, then others by key.
    fn all<'a>(&'a self, query: &'a ObjectsQuery, start: Option<Cursor>) -> impl Iterator<Item = Listed<'a>> {
        let key = query.key.as_ref().map(|key| query.kind.and_then(|kind| kind.canonical(key)).unwrap_or(key.clone()));
        let from = start.as_ref().and_then(|start| Kind::ALL.iter().position(|kind| *kind == start.kind()));
        let kinds = Kind::ALL.into_iter().skip(from.unwrap_or(0));
        let kinds = kinds.filter(|kind| query.kind.is_none_or(|wanted| wanted == *kind));
        kinds.flat_map(move |kind| {
            let start = start.as_ref().filter(|start| start.kind() == kind);
            let file = match start {
                None => 0..self.file.count(kind),
                Some(Cursor::File { place, .. }) => *place..self.file.count(kind).max(*place),
                Some(Cursor::Behind(_)) => 0..0,
            };
            let file = if query.owner.as_ref().is_none_or(|owner| owner == FILE_OWNER) { file } else { 0..0 };
            let wanted_key = key.clone();
            let of_file = file.filter_map(move |place| {
                let object = self.file.object(kind, place)?;
                let at = Cursor::File { kind, former_files: self.former_files, place };
                let wanted = is_of(query.vni, &object) && wanted_key.as_ref().is_none_or(|key| *key == object.key());
                wanted.then_some(Listed { at, owner: FILE_OWNER, generation: 0, changed_ms: 0, object })
            });
            of_file.chain(self.others_of(kind, key.as_deref(), start, query))
        })
    }

    /// Those of a kind that are not the file's.
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
        // A key names one at most.
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

/// Where a list goes on whose last object is at `last`, and whose next one is not the file's.
fn behind(last: Cursor, next: &Cursor) -> Cursor {
    match last {
        Cursor::Behind(id) if id.kind == next.kind() => Cursor::Behind(id),
        // No key is empty, so this is in front of all of the kind.
        _ => Cursor::Behind(Id { kind: next.kind(), key: String::new() }),
    }
}

fn is_of(vni: Option<u32>, object: &Object) -> bool {
    vni.is_none_or(|wanted| object.vni().map(Vni::value) == Some(wanted))
}
