//! Changes to single objects, and lists of objects.

use serde::{Deserialize, Serialize};

use super::ReloadReport;
use crate::config::Kind;

/// Maximum number of items of one batch.
pub const MAX_APPLY_ITEMS: usize = 10_000;
/// Largest body of `POST /v1/apply`, bytes.
pub const MAX_APPLY_BYTES: usize = 16 << 20;
/// Maximum number of objects in one response.
pub const MAX_LISTED_OBJECTS: usize = 10_000;
/// The owner of objects that the configuration file defines.
pub const FILE_OWNER: &str = "file";

/// The body of `POST /v1/apply`: a batch that is applied as a whole, or not at all.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ApplySpec {
    /// Changes, at most [`MAX_APPLY_ITEMS`], and at most one for an object. The order does not matter.
    pub items: Vec<ApplyItem>,
    /// Whether to answer only when the kernel has removed the devices of deleted ports, which takes it tens of
    /// milliseconds.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub wait_for_devices: bool,
}

/// A change of one object.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ApplyItem {
    /// The operation.
    pub op: ApplyOp,
    /// The object's kind.
    pub kind: Kind,
    /// The object's key. None: the key in the spec.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// The object's version, from 1: later versions replace earlier ones, and the same version changes nothing. A
    /// deletion deletes this version and earlier ones. None: the current version plus 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<u64>,
    /// The object's owner, 1 to 63 of `[a-z0-9-.]`: only the owner may change it. `file` is reserved for the
    /// configuration file.
    pub owner: String,
    /// The object's new state, with the keys of its table in the configuration file; none for a deletion.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spec: Option<serde_json::Value>,
}

/// An operation on an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ApplyOp {
    /// Creates or replaces the object.
    Set,
    /// Deletes the object. Not an error if it does not exist.
    Delete,
}

/// The outcome of a batch.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ApplyReport {
    /// Objects created or changed.
    pub set: u64,
    /// Objects deleted.
    pub deleted: u64,
    /// Items that changed nothing.
    pub unchanged: u64,
    /// Time from the request until all workers had applied it, µs.
    pub took_us: u64,
    /// Names of added, removed and changed objects.
    pub changes: ReloadReport,
}

/// The query of `GET /v1/objects`; absent fields match everything.
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
    /// Where to continue: [`ObjectList::next`] of an earlier response.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// Maximum number of objects, 1 to [`MAX_LISTED_OBJECTS`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
    /// If present: returns digests instead of objects.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
}

/// The response of `GET /v1/objects`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ObjectList {
    /// The requested objects, by kind.
    pub objects: Vec<ObjectEntry>,
    /// If there is more: the `from` of the next request, which returns the objects in force at its own time.
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
    /// Its owner, who may change it.
    pub owner: String,
    /// Its version; 0: an object of the file, which has none.
    pub generation: u64,
    /// Time of the last change, milliseconds since 1970; 0: unknown, as for objects of the file.
    pub changed_ms: u64,
    /// Its state. Defaults are left out.
    pub spec: serde_json::Value,
}

/// The response of `GET /v1/objects?digest`: one for each owner and VPC.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectsDigest {
    /// The owner.
    pub owner: String,
    /// The VNI of the VPC; none: objects that belong to no single VPC.
    pub vni: Option<u32>,
    /// Number of objects.
    pub objects: u64,
    /// 16 hexadecimal digits, equal if all kinds, keys, generations and specs are equal.
    pub digest: String,
}
