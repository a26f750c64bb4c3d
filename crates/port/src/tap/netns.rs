//! Work inside another network namespace.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::TapError;

/// Where `ip netns` keeps named namespaces.
const NAMED: &str = "/run/netns";

/// Identifies a namespace: a later one of the same name has another identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceId {
    device: u64,
    inode: u64,
}

/// Identifies the network namespace `netns` (a name under /run/netns, or a path with a slash); `None` if it does not
/// exist.
///
/// # Errors
/// Its file cannot be read.
pub fn namespace(netns: &str) -> io::Result<Option<NamespaceId>> {
    match std::fs::metadata(path_of(netns)) {
        Ok(file) => Ok(Some(NamespaceId::of(&file))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Runs `work` on a short-lived thread inside network namespace `netns` (a name, or a path with a slash), or inside our
/// own without one. It is a separate thread because a namespace is a property of a thread, and no other work may run
/// there.
pub(crate) fn within<T: Send>(
    netns: Option<&str>,
    work: impl FnOnce() -> Result<T, TapError> + Send,
) -> Result<T, TapError> {
    let namespace = netns.map(open).transpose()?;
    within_opened(namespace, work)
}

/// The same for an open namespace, with a name for messages; `None`: our own.
pub(crate) fn within_opened<T: Send>(
    namespace: Option<(File, PathBuf)>,
    work: impl FnOnce() -> Result<T, TapError> + Send,
) -> Result<T, TapError> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("netns".into()).spawn_scoped(scope, || {
            if let Some((file, path)) = namespace {
                move_into_link_name_space(std::os::fd::AsFd::as_fd(&file), Some(LinkNameSpaceType::Network))
                    .map_err(|e| TapError::Enter { path, source: e.into() })?;
            }
            work()
        });
        match thread.map_err(TapError::Thread)?.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// The calling thread's namespace.
///
/// # Errors
/// /proc is not mounted.
pub(crate) fn own() -> io::Result<NamespaceId> {
    std::fs::metadata("/proc/thread-self/ns/net").map(|file| NamespaceId::of(&file))
}

impl NamespaceId {
    pub(crate) fn of(file: &std::fs::Metadata) -> Self {
        NamespaceId { device: file.dev(), inode: file.ino() }
    }
}

fn path_of(netns: &str) -> PathBuf {
    if netns.contains('/') { PathBuf::from(netns) } else { Path::new(NAMED).join(netns) }
}

fn open(netns: &str) -> Result<(File, PathBuf), TapError> {
    let path = path_of(netns);
    match File::open(&path) {
        Ok(file) => Ok((file, path)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Err(TapError::NoNamespace { netns: netns.into(), path }),
        Err(source) => Err(TapError::Enter { path, source }),
    }
}
