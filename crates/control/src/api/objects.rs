//! Objects one at a time: what is to be changed, what was, and what there is.

use serde::{Deserialize, Serialize};

use super::ReloadReport;
use crate::config::Kind;

/// The most items of one batch.
pub const MAX_APPLY_ITEMS: usize = 10_000;
/// The largest body of `POST /v1/apply`, bytes.
pub const MAX_APPLY_BYTES: usize = 16 << 20;
/// The most objects of one answer.
pub const MAX_LISTED_OBJECTS: usize = 10_000;
/// The owner of what the configuration file describes.
pub const FILE_OWNER: &str = "file";

/// The body of `POST /v1/apply`: all of it is done, or nothing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ApplySpec {
    /// What is to be done, at most [`MAX_APPLY_ITEMS`]; of an object once only. The order does not matter.
    pub items: Vec<ApplyItem>,
}

/// A change of one object.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ApplyItem {
    /// What is to be done.
    pub op: ApplyOp,
    /// With an object of which kind.
    pub kind: Kind,
    /// The object's key. None: what the spec says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Which version of the object this is, 1 and more: later ones replace earlier ones, and the same one changes nothing. A deletion
    /// deletes this version and earlier ones. None: the one after what there is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<u64>,
    /// Who says so, 1 to 63 of `[a-z0-9-.]`: only the owner changes an object. `file` is the configuration file.
    pub owner: String,
    /// What the object is to be, with the keys of its table in the configuration file; none to delete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spec: Option<serde_json::Value>,
}

/// What is to be done with an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ApplyOp {
    /// It is to exist, and to be as its spec says.
    Set,
    /// It is to be gone; that it is gone already is no error.
    Delete,
}

/// What a batch did.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ApplyReport {
    /// Objects that are new, or different.
    pub set: u64,
    /// Objects that are gone.
    pub deleted: u64,
    /// Items that changed nothing.
    pub unchanged: u64,
    /// From the request to the last worker's change, microseconds.
    pub took_us: u64,
    /// Names of what was added, removed and changed.
    pub changes: ReloadReport,
}

/// Which objects `GET /v1/objects` is about; what is absent means any.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ObjectsQuery {
    /// Of this kind.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<Kind>,
    /// With this key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Of this owner.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Of this VPC.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vni: Option<u32>,
    /// From here on: what [`ObjectList::next`] of an earlier answer was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// How many objects to list at most, 1 to [`MAX_LISTED_OBJECTS`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
    /// Present: digests instead of the objects.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
}

/// The answer to `GET /v1/objects`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ObjectList {
    /// Those that were asked for, kind by kind.
    pub objects: Vec<ObjectEntry>,
    /// Where the rest begins, if there is more: the `from` to ask for it with. What is in force then is told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// An object.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ObjectEntry {
    /// Its kind.
    pub kind: Kind,
    /// Its key.
    pub key: String,
    /// Who may change it.
    pub owner: String,
    /// Its version; 0: the file's, which has none.
    pub generation: u64,
    /// When it became what it is, milliseconds since 1970; 0: unknown, as for the file's.
    pub changed_ms: u64,
    /// What it is. Defaults are left out.
    pub spec: serde_json::Value,
}

/// The answer to `GET /v1/objects?digest`: one for each owner and VPC.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectsDigest {
    /// Whose objects.
    pub owner: String,
    /// Of which VPC; none: of those that belong to no single one.
    pub vni: Option<u32>,
    /// How many there are.
    pub objects: u64,
    /// 16 hexadecimal digits: equal where kinds, keys, generations and specs are.
    pub digest: String,
}
