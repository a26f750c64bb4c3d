//! Who may do what by the API: roles that a file grants to users and groups of this machine.
//!
//! The kernel says who is at the other end of the socket (`SO_PEERCRED`), so there are no
//! passwords. Without a file everybody who may open the socket may do everything; with one, those
//! that it does not name may do nothing, and root may do everything.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use bifrost_control::api::{ApiError, ErrorKind};
use bifrost_control::server::Peer;
use bifrost_intent::api::HostStatus;
use bifrost_intent::{Batch, Key, Kind};
use serde::Deserialize;

/// The largest file, bytes.
const MAX_FILE: u64 = 1 << 20;
/// What a grant for all projects, and for hosts, names.
const EVERYTHING: &str = "*";

/// What one may do. A later one may do all that an earlier one may.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Role {
    /// Look at the objects of a project.
    Viewer,
    /// Change them.
    Editor,
    /// Change also the project with its quota; of everything: hosts, and which outside addresses projects may use.
    Admin,
}

/// The file's contents.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Grants {
    #[serde(default)]
    grant: Vec<Grant>,
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
            if grant.project != EVERYTHING {
                Key::new(Kind::Project, "", &grant.project).map_err(|e| format!("grant[{i}].project: {e}"))?;
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
        Access { granted: Some(projects) }
    }
}

/// What somebody may do.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Access {
    /// By project; none: everything.
    granted: Option<BTreeMap<String, Role>>,
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

    /// Whether one may change everything.
    pub(crate) fn is_admin(&self) -> bool {
        self.role(EVERYTHING) == Some(Role::Admin)
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
            let key = &change.key;
            let (needed, of) = match key.kind() {
                Kind::Host | Kind::OutsideGrant => (Role::Admin, EVERYTHING),
                Kind::Project => (Role::Admin, key.name()),
                _ => (Role::Editor, key.project()),
            };
            if self.role(of).is_none_or(|role| role < needed) {
                let word = if needed == Role::Admin { "admin" } else { "editor" };
                return Err(format!(
                    "{key}: needs the role {word} of {of:?}; the relay's --roles file says who has it"
                ));
            }
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

    /// What somebody may do. While the file is gone or wrong, what it said last holds.
    fn of(&self, peer: Peer) -> Access {
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
        known.1.of(peer)
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

/// The roles of a server; none: everybody may do everything.
pub(crate) type Shared = Option<Arc<Roles>>;

impl<S: Sync> FromRequestParts<S> for Access {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Access, ApiError> {
        let unknown = || ApiError::internal("it is not known who asks");
        let roles = parts.extensions.get::<Shared>().ok_or_else(unknown)?;
        let Some(roles) = roles else { return Ok(Access::default()) };
        let peer = *parts.extensions.get::<Peer>().ok_or_else(unknown)?;
        let access = roles.of(peer);
        if access.granted.as_ref().is_some_and(BTreeMap::is_empty) {
            let what = format!("user {} with group {} has no role", peer.uid, peer.gid);
            return Err(ApiError::new(ErrorKind::Forbidden, what).hint("the relay's --roles file says who has one"));
        }
        Ok(access)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "[[grant]]\nuid = 1000\nproject = \"demo\"\nrole = \"viewer\"\n\
                        [[grant]]\ngid = 2000\nproject = \"demo\"\nrole = \"editor\"\n\
                        [[grant]]\nuid = 1001\nproject = \"demo\"\nrole = \"admin\"\n\
                        [[grant]]\nuid = 1002\nproject = \"*\"\nrole = \"admin\"\n\
                        [[grant]]\nuid = 1003\nproject = \"*\"\nrole = \"viewer\"\n";

    fn may(uid: u32, gid: u32) -> impl Fn(&str) -> (bool, bool) {
        let access = Grants::parse(FILE).unwrap().of(Peer { uid, gid, pid: None });
        move |key: &str| {
            let key: Key = key.parse().unwrap();
            let text = format!("{{\"changes\": [{{\"op\": \"delete\", \"key\": \"{key}\"}}]}}");
            (access.sees(&key), access.may_change(&serde_json::from_str(&text).unwrap()).is_ok())
        }
    }

    #[test]
    fn roles_say_what_one_sees_and_changes() {
        let keys =
            ["vpc/demo/net", "project/demo", "vpc/other/net", "project/other", "host/h1", "outside_grant/demo/a"];
        let (no, see, both) = ((false, false), (true, false), (true, true));
        for (uid, gid, expected) in [
            (1, 1, [no; 6]),
            (1000, 1, [see, see, no, no, see, see]),
            (1, 2000, [both, see, no, no, see, see]),
            (1000, 2000, [both, see, no, no, see, see]),
            (1001, 1, [both, both, no, no, see, see]),
            (1002, 1, [both; 6]),
            (1003, 1, [see; 6]),
            (0, 0, [both; 6]),
        ] {
            assert_eq!(keys.map(|key| may(uid, gid)(key)), expected, "user {uid}, group {gid}");
        }
    }

    #[test]
    fn tokens_are_made_by_those_who_may_change_everything() {
        let is_admin = |uid| Grants::parse(FILE).unwrap().of(Peer { uid, gid: 1, pid: None }).is_admin();
        assert_eq!([0, 1002, 1003, 1001, 1].map(is_admin), [true, true, false, false, false]);
    }

    #[test]
    fn of_hosts_only_the_own_problems_are_told() {
        use bifrost_intent::api::HostProblem;
        let problem = |key: &str| HostProblem { kind: "port".into(), key: key.into(), what: "x".into() };
        let problems = ["demo.a", "other.b", "h2"].map(problem).to_vec();
        let host = HostStatus { problems, more_problems: 1, ..HostStatus::default() };
        let of = |uid| Grants::parse(FILE).unwrap().of(Peer { uid, gid: 1, pid: None }).host(host.clone());
        assert_eq!((of(1000).problems, of(1000).more_problems), (vec![problem("demo.a")], 3));
        assert_eq!(of(1003), host);
    }

    #[test]
    fn bad_files_are_refused() {
        for (text, expected) in [
            ("[[grant]]\nproject = \"demo\"\nrole = \"viewer\"\n", "grant[0]: name a uid or a gid, not both"),
            ("[[grant]]\nuid = 1\ngid = 1\nproject = \"demo\"\nrole = \"viewer\"\n", "grant[0]: name a uid or a gid"),
            ("[[grant]]\nuid = 1\nproject = \"Demo\"\nrole = \"viewer\"\n", "grant[0].project: \"Demo\" is not a name"),
            ("[[grant]]\nuid = 1\nproject = \"demo\"\nrole = \"owner\"\n", "unknown variant `owner`"),
            ("[[grants]]\n", "unknown field `grants`"),
        ] {
            let error = Grants::parse(text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn a_file_that_changes_counts_at_once_if_it_is_good() {
        let path = std::env::temp_dir().join(format!("bifrost-roles-{}", std::process::id()));
        let editor = "[[grant]]\nuid = 7\nproject = \"demo\"\nrole = \"editor\"\n";
        std::fs::write(&path, editor).unwrap();
        let roles = Roles::open(&path).unwrap();
        let role = || roles.of(Peer { uid: 7, gid: 7, pid: None }).role("demo");
        assert_eq!(role(), Some(Role::Editor));
        std::fs::write(&path, "[[grant]]\nuid = 7, nonsense\n").unwrap();
        assert_eq!(role(), Some(Role::Editor));
        std::fs::write(&path, "# nobody\n").unwrap();
        assert_eq!(role(), None);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(role(), None);
        assert!(Roles::open(&path).is_err());
    }
}
