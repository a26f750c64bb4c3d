//! Adopts queues that outlive the process that opened them because another process also holds them.

use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use super::configure::delete;
use super::netns::{NamespaceId, namespace, own, within, within_opened};
use super::persist::renew;
use super::requeued::Requeued;
use super::{TapConfig, TapError, TapQueue, complete, queue, steer, sys};

/// Takes over the queues, in worker order, of a device created for `former`, possibly in another process. Applies the
/// differences in `config` and opens missing queues; everything else is preserved: addresses, routes, queued packets,
/// and the name if the guest has changed it.
///
/// # Errors
/// See [`TapError`]. The device still exists then; [`remove`] it before creating another of the same name.
pub fn adopt(config: &TapConfig, former: &TapConfig, queues: Vec<OwnedFd>) -> Result<Vec<TapQueue>, TapError> {
    adopt_steered(config, former, queues, config.queues)
}

/// [`adopt`] all queues of a device from a process that still uses it, possibly with another number of queues: the
/// guest's packets go to the former ones until [`Requeued::begin`]. A single-queue device cannot have more.
///
/// # Errors
/// The same.
pub fn take_over(config: &TapConfig, queues: Vec<OwnedFd>) -> Result<(Vec<TapQueue>, Option<Requeued>), TapError> {
    let former = queues.len() as u16;
    if former == config.queues {
        return Ok((adopt(config, config, queues)?, None));
    }
    let copied: std::io::Result<Vec<OwnedFd>> = queues.iter().map(OwnedFd::try_clone).collect();
    let copied = copied.map_err(|error| TapError::Foreign {
        device: config.device.clone(),
        problem: format!("copying a descriptor: {error}"),
    })?;
    let taken = adopt_steered(config, config, queues, former)?;
    Ok((taken, Some(Requeued::new(copied))))
}

/// Whether the device of this queue can have several.
///
/// # Errors
/// The device is gone.
pub fn is_multi_queue(queue: BorrowedFd<'_>) -> std::io::Result<bool> {
    sys::attached(queue).map(|(_, kind)| kind == sys::kind(true))
}

/// `steered`: the first queues that get packets.
fn adopt_steered(
    config: &TapConfig,
    former: &TapConfig,
    mut queues: Vec<OwnedFd>,
    steered: u16,
) -> Result<Vec<TapQueue>, TapError> {
    config.check()?;
    let foreign = |problem: String| TapError::Foreign { device: config.device.clone(), problem };
    queues.truncate(usize::from(config.queues));
    let wanted = match config.netns.as_deref() {
        Some(netns) => namespace(netns),
        None => own().map(Some),
    };
    let wanted = wanted.map_err(|error| foreign(format!("looking for its network namespace: {error}")))?;
    let (mut name, mut is_multi) = (None, true);
    for fd in &queues {
        let (its_name, kind) = sys::attached(fd.as_fd()).map_err(|error| foreign(error.to_string()))?;
        let other = name.as_ref().is_some_and(|name| *name != its_name);
        is_multi = kind == sys::kind(true);
        let is_suitable = is_multi || (kind == sys::kind(false) && config.queues == 1);
        if other || former.device != config.device || !is_suitable {
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
    // Before there are further queues: with a program of an earlier release, they would get packets at once.
    if let Some(first) = queues.first().filter(|_| is_multi) {
        steer(config, first.as_fd(), steered)?;
    }
    let (queues, (statistics, id)) = within(config.netns.as_deref(), || {
        let renewed = renew(config, former, &name, &mut queues)?;
        Ok((queues, renewed))
    })?;
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
