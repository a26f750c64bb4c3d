//! Work inside another network namespace.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::TapError;

/// Where `ip netns` keeps named namespaces.
const NAMED: &str = "/run/netns";

/// Runs `work` on a short-lived thread inside network namespace `netns` (a name, or a path when it has a slash); without
/// one, on a thread in our own. A thread of its own, since a namespace is a thread's property and no other work may
/// happen to run there.
pub(crate) fn within<T: Send>(
    netns: Option<&str>,
    work: impl FnOnce() -> Result<T, TapError> + Send,
) -> Result<T, TapError> {
    let namespace = netns.map(open).transpose()?;
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

fn open(netns: &str) -> Result<(File, PathBuf), TapError> {
    let path = if netns.contains('/') { PathBuf::from(netns) } else { Path::new(NAMED).join(netns) };
    match File::open(&path) {
        Ok(file) => Ok((file, path)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Err(TapError::NoNamespace { netns: netns.into(), path }),
        Err(source) => Err(TapError::Enter { path, source }),
    }
}
