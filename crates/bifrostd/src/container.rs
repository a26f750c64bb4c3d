//! A container's port: its device is in the container's network namespace, and appears and disappears with it.
//!
//! Without a namespace, the port exists without a device, like a virtual machine's port while the machine is not
//! running. Removing it would tell other hosts that the vNIC is unknown, which they cache for a while. Counters start
//! with the device. The namespace's file is polled several times a second, because the kernel does not report that
//! something is mounted there.

mod attach;

use bifrost_control::config::{Port, PortKind};
use bifrost_port::tap::NamespaceId;

/// The network namespace of a TAP port.
#[derive(Debug)]
pub(crate) struct Container {
    netns: String,
    /// Namespace of the device; `None` while the port waits for a namespace of that name.
    made_in: Option<NamespaceId>,
    /// Consecutive failed attempts.
    failures: u32,
}

impl Container {
    /// Whether the namespace does not exist, or its device does not exist yet.
    pub(crate) fn is_waiting(&self) -> bool {
        self.made_in.is_none()
    }
}

/// Whether a changed port may keep its device, with other settings.
pub(crate) fn may_keep_tap(old: &Port, new: &Port) -> bool {
    let of = |port: &Port| (port.kind, port.netns.clone(), port.device.clone());
    new.kind == PortKind::Tap && of(old) == of(new)
}
