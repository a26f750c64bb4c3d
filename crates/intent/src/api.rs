//! The types of the relay's HTTP API, for both of its ends.

use std::collections::BTreeMap;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::key::{Key, Kind};
use crate::role::ProjectRole;

/// The API's description: OpenAPI 3.1, whose schemas are JSON Schema 2020-12.
pub const OPENAPI: &str = include_str!("openapi.json");
/// The most objects of one answer.
pub const MAX_LISTED: usize = 1000;
/// The longest time that a request waits, milliseconds.
pub const MAX_WAIT_MS: u64 = 60_000;
/// The largest body of a request, bytes.
pub const MAX_BODY: usize = 4 << 20;

/// The JSON Schema of a part of the API, such as `Document`: a document of a file for `bifrostctl fleet apply`.
///
/// # Errors
/// There is no such part.
pub fn schema(part: &str) -> Result<Value, serde_json::Error> {
    let mut all: Value = serde_json::from_str(OPENAPI)?;
    if all["components"]["schemas"].get(part).is_none() {
        return Err(serde::de::Error::custom(format!("there is no schema of {part:?}")));
    }
    Ok(serde_json::json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$ref": format!("#/components/schemas/{part}"),
        "components": all["components"].take(),
    }))
}

/// How `POST /v1/apply` is to be carried out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ApplyQuery {
    /// Only say what would change.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub dry_run: bool,
}

/// The answer to `POST /v1/apply`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Applied {
    /// The store's revision with the changes; with `dry_run` the one now.
    pub revision: u64,
    /// What differs, each as it is now.
    pub changed: Vec<ChangedObject>,
    /// Changes that changed nothing.
    pub unchanged: u64,
}

/// An object that a batch has changed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChangedObject {
    /// Its key.
    pub key: Key,
    /// Its generation; 0: it is gone.
    pub generation: u64,
    /// What it is, with what was chosen for it; none: it is gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spec: Option<Value>,
}

/// How long a token of a host is valid unless it is said otherwise, seconds.
pub const TOKEN_S: u64 = 3600;
/// The longest time that a token is valid, seconds.
pub const MAX_TOKEN_S: u64 = 7 * 86_400;

/// What `POST /v1/enroll` asks for: a token with which a host gets its first certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Enroll {
    /// The host's name; there is an object of it.
    pub host: String,
    /// How long the token is valid, 1 to [`MAX_TOKEN_S`] seconds. Absent: [`TOKEN_S`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_s: Option<u64>,
}

/// The answer to `POST /v1/enroll`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Enrolled {
    /// The host.
    pub host: String,
    /// The token. It is secret, and takes the place of an earlier one of the host.
    pub token: String,
    /// When it expires, milliseconds since 1970.
    pub until_ms: u64,
}

/// How long an operator's certificate is valid unless it is said otherwise, seconds.
pub const CERTIFICATE_S: u64 = 30 * 86_400;
/// The least and the longest time that an operator's certificate is valid, seconds.
pub const CERTIFICATE_TIMES_S: std::ops::RangeInclusive<u64> = 60..=366 * 86_400;
/// The most roles of a certificate.
pub const MAX_ROLES: usize = 32;
/// The longest name of a certificate's holder, bytes (X.520, `ub-common-name`).
pub const MAX_HOLDER: usize = 64;

/// What `POST /v1/certificates` asks for: a certificate with which an operator calls this API over TLS.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Certify {
    /// Who gets it: 1 to [`MAX_HOLDER`] letters, digits and characters of `._@+-`. The audit log has this name.
    pub name: String,
    /// What its holder may do; 1 to [`MAX_ROLES`].
    pub roles: Vec<ProjectRole>,
    /// How long it is valid, seconds, within [`CERTIFICATE_TIMES_S`]. Absent: [`CERTIFICATE_S`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_s: Option<u64>,
    /// The holder's key: a certificate request (PKCS #10), PEM, of ECDSA with P-256. What it says of names is ignored.
    pub request: String,
}

/// The answer to `POST /v1/certificates`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Certified {
    /// Whose it is.
    pub name: String,
    /// What its holder may do.
    pub roles: Vec<ProjectRole>,
    /// Its serial number, lower-case hexadecimal digits; by this it can be revoked.
    pub serial: String,
    /// When it expires, milliseconds since 1970.
    pub until_ms: u64,
    /// The certificate, PEM.
    pub certificate: String,
    /// The authorities that vouch for relays, PEM.
    pub authorities: String,
}

/// Which objects `GET /v1/objects` is about; what is absent means any.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ObjectsQuery {
    /// Of this kind.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<Kind>,
    /// Of this project.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub project: Option<String>,
    /// This one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<Key>,
    /// From this one on: `next` of an earlier answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<Key>,
    /// The most objects to list, 1 to [`MAX_LISTED`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
}

/// The answer to `GET /v1/objects`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Objects {
    /// The store's revision.
    pub revision: u64,
    /// Kind by kind, by project and name.
    pub objects: Vec<ObjectEntry>,
    /// Where the rest begins, if there is more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<Key>,
}

/// An object.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ObjectEntry {
    /// Its key.
    pub key: Key,
    /// Its version, 1 and more.
    pub generation: u64,
    /// When it became what it is, milliseconds since 1970.
    pub committed_ms: u64,
    /// What it is. Defaults are left out.
    pub spec: Value,
}

/// The answer to `GET /v1/status`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The relay's version.
    pub version: String,
    /// Where objects are kept.
    pub store: String,
    /// Whether the relay follows the store; otherwise it has what it had, and takes no changes.
    pub in_sync: bool,
    /// The store's revision that the relay has.
    pub revision: u64,
    /// How many objects there are.
    pub objects: u64,
    /// Hosts that are known, that are connected to a relay, and of those the ones that have everything.
    pub hosts: HostCounts,
    /// The hosts that have vanished together, if these are too many to take any of them for dead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frozen: Option<Frozen>,
    /// Records that this relay does not understand, each with the reason: another program, or a later version, has written them.
    pub unreadable: Vec<(String, String)>,
}

/// Hosts that have vanished together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Frozen {
    /// How many.
    pub vanished: u64,
    /// Of how many that were there.
    pub of: u64,
}

/// How many hosts there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostCounts {
    /// Known.
    pub known: u64,
    /// Connected to a relay.
    pub connected: u64,
    /// Connected, and everything is in force.
    pub in_sync: u64,
    /// Taken for dead.
    #[serde(default)]
    pub dead: u64,
}

/// A host, as `GET /v1/hosts` lists it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostStatus {
    /// Its name.
    pub name: String,
    /// Whether its agent is connected to a relay.
    pub connected: bool,
    /// The relay, if it is another one of the same store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relay: Option<String>,
    /// Since when, or when it was last, milliseconds since 1970; 0: never since the relay's start.
    pub since_ms: u64,
    /// The agent's version.
    pub software: String,
    /// The revision of the last change that concerns it.
    pub changed: u64,
    /// The revision up to which everything is in force, as its agent says.
    pub applied: u64,
    /// How many objects it has, as its agent says.
    pub objects: u64,
    /// What its `bifrostd` refuses.
    pub problems: Vec<HostProblem>,
    /// How many more it refuses.
    pub more_problems: u64,
    /// How its paths to other hosts are, as its agent says.
    #[serde(default)]
    pub paths: PathHealth,
    /// Since when it is taken for dead, milliseconds since 1970. Absent: it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dead_since_ms: Option<u64>,
}

/// How the paths from a host to others are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathHealth {
    /// How many hosts it has connections with.
    pub peers: u64,
    /// Those of them with paths that do not work.
    pub impaired: Vec<ImpairedPeer>,
    /// How many more of these there are.
    pub more_impaired: u64,
}

/// A host to which not all paths work.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImpairedPeer {
    /// Its name.
    pub peer: String,
    /// How many paths to it are not drained.
    pub paths: u32,
    /// How many of them carry traffic or could.
    pub working: u32,
}

impl HostStatus {
    /// Whether everything that concerns the host is in force.
    pub fn is_in_sync(&self) -> bool {
        self.connected && self.applied >= self.changed && self.problems.is_empty() && self.more_problems == 0
    }
}

/// What a host's `bifrostd` refuses.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostProblem {
    /// The kind of object, one of `bifrostd`'s.
    pub kind: String,
    /// Its key there.
    pub key: String,
    /// Why.
    pub what: String,
}

/// What `GET /v1/wait` waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WaitQuery {
    /// That hosts have everything up to this revision.
    pub revision: u64,
    /// The longest time to wait, milliseconds, up to [`MAX_WAIT_MS`].
    pub timeout_ms: u64,
    /// The first revision of what was changed, if that is another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<u64>,
}

/// The answer to `GET /v1/wait`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Waited {
    /// Hosts that do not have everything yet; empty: all have.
    pub waiting: Vec<HostStatus>,
    /// Hosts that what was changed concerns, and whose `bifrostd` refuses something, of that or of something else.
    #[serde(default)]
    pub refusing: Vec<HostStatus>,
}

/// Which object `GET /v1/why` is about.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WhyQuery {
    /// Its key.
    pub key: Key,
}

/// Where an object has come to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Why {
    /// The object.
    pub object: ObjectEntry,
    /// The hosts that need it.
    pub hosts: Vec<WhyHost>,
}

/// A host that needs an object.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WhyHost {
    /// Its name.
    pub host: String,
    /// Why it needs it, in words.
    pub reason: String,
    /// What has become of it there, in words.
    pub state: String,
}

/// The answer to `GET /v1/overview`: a summary of all objects.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Overview {
    /// The store's revision.
    pub revision: u64,
    /// How many objects there are, by kind.
    pub objects: BTreeMap<Kind, u64>,
    /// The networks, by project and name.
    pub vpcs: Vec<VpcOverview>,
}

/// A network.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VpcOverview {
    /// Its key.
    pub key: Key,
    /// Its VXLAN network identifier.
    pub vni: Option<u32>,
    /// How many ports it has.
    pub ports: u64,
    /// How many of them each host has.
    pub hosts: BTreeMap<String, u64>,
    /// Its subnets.
    pub subnets: Vec<SubnetOverview>,
    /// Names of the networks that it has a peering with.
    pub peers: Vec<String>,
}

/// A subnet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SubnetOverview {
    /// Its name.
    pub name: String,
    /// Its addresses.
    pub prefix: IpNet,
    /// How many ports have addresses of it.
    pub ports: u64,
}
