//! Who may do what by the API: roles that a file grants to users and groups of this machine, and that certificates carry.
//!
//! On the socket the kernel says who is at the other end (`SO_PEERCRED`), so there are no passwords. Without a file everybody who may
//! open the socket may do everything; with one, those that it does not name may do nothing, and root may do everything. Over TLS a
//! certificate says what its holder may do, and who has none of the authority, or one without a role, may do nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use bifrost_control::api::{ApiError, ErrorKind};
use bifrost_control::server::Peer;
use bifrost_intent::api::HostStatus;
use bifrost_intent::role::EVERYTHING;
use bifrost_intent::{Batch, Key, Kind, ProjectRole, Role};
use serde::Deserialize;

use crate::caller::{Caller, Holder};

/// The largest file, bytes.
const MAX_FILE: u64 = 1 << 20;

/// The file's contents.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Grants {
    #[serde(default)]
    grant: Vec<Grant>,
    /// Serial numbers of certificates that count no more, hexadecimal.
    #[serde(default)]
    revoked: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Grant {
    uid: Option<u32>,
    /// The group of the process, not a further one of its user.
    gid: Option<u32>,
    project: String,
    role: Role,
}

impl Grants {
    fn parse(text: &str) -> Result<Grants, String> {
        let grants: Grants = toml::from_str(text).map_err(|e| e.to_string())?;
        for (i, grant) in grants.grant.iter().enumerate() {
            if grant.uid.is_some() == grant.gid.is_some() {
                return Err(format!("grant[{i}]: name a uid or a gid, not both"));
            }
            let role = ProjectRole { project: grant.project.clone(), role: grant.role };
            role.check().map_err(|e| format!("grant[{i}].project: {e}"))?;
        }
        for (i, serial) in grants.revoked.iter().enumerate() {
            if digits(serial).is_empty() || !serial.bytes().all(|b| b.is_ascii_hexdigit() || b == b':') {
                return Err(format!("revoked[{i}]: {serial:?} is not a serial number in hexadecimal digits"));
            }
        }
        Ok(grants)
    }

    fn of(&self, peer: Peer) -> Access {
        if peer.uid == 0 {
            return Access::default();
        }
        let is_of = |grant: &&Grant| grant.uid == Some(peer.uid) || grant.gid == Some(peer.gid);
        let mut projects: BTreeMap<String, Role> = BTreeMap::new();
        for Grant { project, role, .. } in self.grant.iter().filter(is_of) {
            let known = projects.entry(project.clone()).or_insert(*role);
            *known = (*role).max(*known);
        }
        Access { granted: Some(projects), certificate: None }
    }

    fn revokes(&self, holder: &Holder) -> bool {
        self.revoked.iter().any(|serial| digits(serial) == digits(&holder.serial))
    }
}

/// A serial number without what differs between programs: case, colons, and zeros in front.
fn digits(serial: &str) -> String {
    let digits: String = serial.chars().filter(|c| *c != ':').collect();
    digits.trim_start_matches('0').to_ascii_lowercase()
}

/// What somebody may do.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Access {
    /// By project; none: everything.
    granted: Option<BTreeMap<String, Role>>,
    /// The certificate that says so; none: the file.
    certificate: Option<Arc<Holder>>,
}

/// What the API is asked for, as far as roles matter. What is not here, nobody is asked for a role.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Call<'a> {
    /// What shows all projects: over TLS the metrics.
    LookAtEverything,
    /// Change an object.
    Change(&'a Key),
    /// Give hosts tokens, and operators certificates.
    GiveCertificates,
}

impl<'a> Call<'a> {
    /// The least role that it takes, and for what.
    fn needs(self) -> (Role, &'a str) {
        match self {
            Call::LookAtEverything => (Role::Viewer, EVERYTHING),
            Call::GiveCertificates => (Role::Admin, EVERYTHING),
            Call::Change(key) => match key.kind() {
                Kind::Host | Kind::OutsideGrant => (Role::Admin, EVERYTHING),
                Kind::Project => (Role::Admin, key.name()),
                _ => (Role::Editor, key.project()),
            },
        }
    }
}

impl Access {
    /// Whether one may see an object. Hosts are seen by all who see anything.
    pub(crate) fn sees(&self, key: &Key) -> bool {
        match &self.granted {
            None => true,
            Some(granted) if key.kind() == Kind::Host => !granted.is_empty(),
            Some(_) => self.role(project(key)).is_some(),
        }
    }

    /// Whether one may see everything.
    pub(crate) fn sees_everything(&self) -> bool {
        self.role(EVERYTHING).is_some()
    }

    /// The projects of which one may see something; none: all.
    pub(crate) fn projects(&self) -> Option<BTreeSet<&str>> {
        let granted = self.granted.as_ref().filter(|_| !self.sees_everything())?;
        Some(granted.keys().map(String::as_str).collect())
    }

    /// Whether one may do something.
    ///
    /// # Errors
    /// The role that is missing, and who says what roles one has.
    pub(crate) fn may(&self, call: Call<'_>) -> Result<(), String> {
        let (needed, of) = call.needs();
        if self.role(of).is_some_and(|role| role >= needed) {
            return Ok(());
        }
        let has = match &self.certificate {
            Some(holder) => format!("the certificate of {:?} has {}", holder.name, holder.granted()),
            None => "the relay's --roles file says who has it".to_owned(),
        };
        Err(format!("needs the role {} of {of:?}; {has}", needed.name()))
    }

    /// What one may know of a host: what it refuses of others is only counted.
    pub(crate) fn host(&self, mut host: HostStatus) -> HostStatus {
        if !self.sees_everything() {
            let all = host.problems.len();
            // An object of a project is called PROJECT.NAME there.
            host.problems
                .retain(|problem| problem.key.split_once('.').is_some_and(|(project, _)| self.role(project).is_some()));
            host.more_problems += (all - host.problems.len()) as u64;
        }
        host
    }

    /// Whether one may make all changes of a batch.
    ///
    /// # Errors
    /// What is missing for the first one that one may not make.
    pub(crate) fn may_change(&self, batch: &Batch) -> Result<(), String> {
        for change in &batch.changes {
            self.may(Call::Change(&change.key)).map_err(|why| format!("{}: {why}", change.key))?;
        }
        Ok(())
    }

    /// The role that one has for a project, by itself or for everything.
    fn role(&self, project: &str) -> Option<Role> {
        let Some(granted) = &self.granted else { return Some(Role::Admin) };
        granted.get(project).max(granted.get(EVERYTHING)).copied()
    }
}

/// The project that an object is of, or is.
fn project(key: &Key) -> &str {
    if key.kind() == Kind::Project { key.name() } else { key.project() }
}

/// The file of roles, and what it says. It is read again when it is another one.
#[derive(Debug)]
pub(crate) struct Roles {
    path: PathBuf,
    known: Mutex<(Version, Grants)>,
}

/// What tells a file from an earlier one.
type Version = Option<(u64, u64, Option<SystemTime>)>;

impl Roles {
    /// Reads a file.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn open(path: &Path) -> Result<Roles, String> {
        let version = version(path);
        Ok(Roles { path: path.to_owned(), known: Mutex::new((version, read(path)?)) })
    }

    /// What a user may do.
    fn of(&self, peer: Peer) -> Access {
        self.with(|grants| grants.of(peer))
    }

    /// Whether a certificate counts no more.
    fn revokes(&self, holder: &Holder) -> bool {
        self.with(|grants| grants.revokes(holder))
    }

    /// Looks at what the file says. While it is gone or wrong, what it said last holds.
    fn with<T>(&self, look: impl FnOnce(&Grants) -> T) -> T {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let version = version(&self.path);
        if version != known.0 {
            known.0 = version;
            match read(&self.path) {
                Ok(grants) => known.1 = grants,
                Err(error) => {
                    tracing::error!(path = %self.path.display(), "the roles stay as they were: {error}");
                }
            }
        }
        look(&known.1)
    }
}

fn version(path: &Path) -> Version {
    let metadata = std::fs::metadata(path).ok()?;
    Some((metadata.ino(), metadata.len(), metadata.modified().ok()))
}

fn read(path: &Path) -> Result<Grants, String> {
    let file = std::fs::File::open(path).map_err(|e| format!("cannot be read: {e}"))?;
    let mut text = String::new();
    let read = std::io::Read::read_to_string(&mut std::io::Read::take(file, MAX_FILE + 1), &mut text);
    read.map_err(|e| format!("cannot be read: {e}"))?;
    if text.len() as u64 > MAX_FILE {
        return Err(format!("is larger than {MAX_FILE} bytes"));
    }
    Grants::parse(&text)
}

/// By what requests come in. Each server of the API has one as an extension.
#[derive(Clone, Debug)]
pub(crate) enum Door {
    /// By the console's address: all who reach it may look at everything.
    Open,
    /// By the Unix socket. Without a file, everybody may do everything.
    Socket(Option<Arc<Roles>>),
    /// By TLS with certificates. Of the file, only what it revokes counts.
    Tls(Option<Arc<Roles>>),
}

impl Door {
    /// What somebody may do who comes in by it.
    fn access(&self, caller: Option<&Caller>) -> Result<Access, ApiError> {
        let unknown = || ApiError::internal("it is not known who asks");
        let refused = |what: String, hint: &str| Err(ApiError::new(ErrorKind::Forbidden, what).hint(hint));
        match (self, caller) {
            (Door::Open, _) | (Door::Socket(None), Some(Caller::User(_))) => Ok(Access::default()),
            (Door::Socket(Some(roles)), Some(Caller::User(peer))) => {
                let access = roles.of(*peer);
                if access.granted.as_ref().is_some_and(BTreeMap::is_empty) {
                    let what = format!("user {} with group {} has no role", peer.uid, peer.gid);
                    return refused(what, "the relay's --roles file says who has one");
                }
                Ok(access)
            }
            (Door::Tls(file), Some(Caller::Holder(holder))) => {
                let hint = "an admin of \"*\" issues certificates with roles: bifrostctl fleet certificate";
                let roles = match &holder.roles {
                    Ok(roles) => roles.clone(),
                    Err(why) => return refused(why.clone(), hint),
                };
                // A connection may be older than that.
                if SystemTime::now() > holder.until {
                    return refused(format!("the certificate of {:?} has expired", holder.name), hint);
                }
                if file.as_ref().is_some_and(|file| file.revokes(holder)) {
                    let what = format!("the certificate of {:?}, {}, is revoked", holder.name, holder.serial);
                    return refused(what, "the relay's --roles file has its serial number");
                }
                Ok(Access { granted: Some(roles), certificate: Some(Arc::clone(holder)) })
            }
            _ => Err(unknown()),
        }
    }
}

impl<S: Sync> FromRequestParts<S> for Access {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Access, ApiError> {
        let caller = Caller::from_request_parts(parts, state).await.ok();
        let door = parts.extensions.get::<Door>();
        door.ok_or_else(|| ApiError::internal("it is not known who asks"))?.access(caller.as_ref())
    }
}

#[cfg(test)]
mod tests;
