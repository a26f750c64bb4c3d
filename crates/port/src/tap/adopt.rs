//! Adopts queues that outlive the process that opened them because another process also holds them.

use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use super::configure::delete;
use super::netns::{NamespaceId, namespace, own, within, within_opened};
use super::persist::renew;
use super::{TapConfig, TapError, TapQueue, complete, queue, steer, sys};

/// Takes over the queues, in worker order, of a device created for `former`, possibly in another process. Applies the
/// differences in `config` and opens missing queues; everything else is preserved: addresses, routes, queued packets,
/// and the name if the guest has changed it.
///
/// # Errors
/// See [`TapError`]. The device still exists then; [`remove`] it before creating another of the same name.
pub fn adopt(config: &TapConfig, former: &TapConfig, mut queues: Vec<OwnedFd>) -> Result<Vec<TapQueue>, TapError> {
    config.check()?;
    let foreign = |problem: String| TapError::Foreign { device: config.device.clone(), problem };
    queues.truncate(usize::from(config.queues));
    let wanted = match config.netns.as_deref() {
        Some(netns) => namespace(netns),
        None => own().map(Some),
    };
    let wanted = wanted.map_err(|error| foreign(format!("looking for its network namespace: {error}")))?;
    let mut name = None;
    for fd in &queues {
        let (its_name, kind) = sys::attached(fd.as_fd()).map_err(|error| foreign(error.to_string()))?;
        let other = name.as_ref().is_some_and(|name| *name != its_name);
        if other || former.device != config.device || kind != sys::kind(config.queues > 1) {
            return Err(foreign(format!("one belongs to {its_name}, flags {kind:#x}")));
        }
        name = Some(its_name);
        let found = sys::network_namespace(fd.as_fd()).and_then(|file| File::from(file).metadata());
        let found = found.map_err(|error| foreign(format!("asking for its network namespace: {error}")))?;
        if wanted != Some(NamespaceId::of(&found)) {
            return Err(foreign("it is in another network namespace".to_string()));
        }
        let prepared = sys::set_virtio_header(fd.as_fd(), queue::VIRTIO).and_then(|()| sys::set_offload(fd.as_fd()));
        prepared.map_err(|error| foreign(error.to_string()))?;
    }
    let Some(name) = name else { return Err(foreign("it does not exist".to_string())) };
    let (queues, (statistics, id)) = within(config.netns.as_deref(), || {
        let renewed = renew(config, former, &name, &mut queues)?;
        Ok((queues, renewed))
    })?;
    steer(config, &queues)?;
    Ok(complete(config, queues, statistics, id))
}

/// Removes the device of `queue`, even if other processes hold queues of it. A device that is already gone is not an
/// error.
///
/// # Errors
/// The kernel refuses; the device still exists then.
pub fn remove(queue: BorrowedFd<'_>) -> Result<(), TapError> {
    let Ok((device, _)) = sys::attached(queue) else { return Ok(()) };
    let namespace = match sys::network_namespace(queue) {
        Ok(namespace) => File::from(namespace),
        Err(source) => {
            return Err(TapError::Configure { device, step: "ask for its network namespace".into(), source });
        }
    };
    within_opened(Some((namespace, "of the device".into())), || delete(&device))
}
