//! Virtual machines' ports in an upgrade: their sockets, their front-ends' connections, and the state of their devices.

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use anyhow::{Context as _, Result, ensure};
use bifrost_port::vhost::{HandedMessage, HandedPort};
use serde::{Deserialize, Serialize};

use crate::daemon::State;

/// Maximum messages that describe one device: 64 regions of memory, each added once per queue pair, and the rings.
const MESSAGES_MAX: usize = 2048;

/// The description of a machine's port in an offer. The descriptors follow: listener, connection, those of messages.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Description {
    has_listener: bool,
    has_connection: bool,
    /// Requests with their payloads and numbers of descriptors.
    messages: Vec<(u32, Vec<u8>, usize)>,
}

impl Description {
    pub(super) fn of(port: &HandedPort) -> Description {
        let message = |m: &HandedMessage| (m.request, m.payload.clone(), m.files.len());
        Description {
            has_listener: port.listener.is_some(),
            has_connection: port.connection.is_some(),
            messages: port.messages.iter().map(message).collect(),
        }
    }

    /// Takes the described descriptors from those that `next` returns.
    ///
    /// # Errors
    /// There are too few descriptors or too many messages.
    pub(super) fn take(&self, mut next: impl FnMut() -> Result<OwnedFd>) -> Result<HandedPort> {
        let Description { has_listener, has_connection, messages } = self;
        ensure!(
            messages.len() <= MESSAGES_MAX,
            "{} messages of a device; the maximum is {MESSAGES_MAX}",
            messages.len()
        );
        let listener = has_listener.then(&mut next).transpose()?;
        let connection = has_connection.then(&mut next).transpose()?;
        let mut message = |(request, payload, files): &(u32, Vec<u8>, usize)| {
            let files = (0..*files).map(|_| next()).collect::<Result<_>>()?;
            Ok(HandedMessage { request: *request, payload: payload.clone(), files })
        };
        let messages = messages.iter().map(&mut message).collect::<Result<_>>()?;
        Ok(HandedPort { listener, connection, messages })
    }
}

/// The descriptors of a port, in the order of its [`Description`].
pub(super) fn descriptors(port: &HandedPort) -> impl Iterator<Item = BorrowedFd<'_>> {
    let of_messages = port.messages.iter().flat_map(|message| &message.files);
    port.listener.iter().chain(&port.connection).chain(of_messages).map(|fd| fd.as_fd())
}

/// Machines' ports that handle no messages, because another daemon prepares to take over: dropping this makes them
/// continue.
pub(super) struct Held<'a> {
    state: &'a State,
    pub(super) is_over: bool,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        for machine in self.state.machines.values() {
            if self.is_over { machine.port().handed_over() } else { machine.port().go_on() }
        }
    }
}

impl State {
    /// Holds all machines' ports, and returns what another daemon needs to continue them.
    ///
    /// # Errors
    /// The thread of a port hangs, or no file descriptor was available.
    pub(super) fn hold_machines(&self) -> Result<(Held<'_>, BTreeMap<String, HandedPort>)> {
        let held = Held { state: self, is_over: false };
        let mut ports = BTreeMap::new();
        for (name, machine) in &self.machines {
            let port = machine.port().hand_over().with_context(|| format!("handing over port {name}"))?;
            ports.insert(name.clone(), port);
        }
        Ok((held, ports))
    }

    /// Stops the rings of all machines. Returns their positions by port.
    ///
    /// # Errors
    /// The thread of a port hangs.
    pub(super) fn leave_machines(&self) -> Result<BTreeMap<String, Vec<u16>>> {
        let leave = |(name, machine): (&String, &crate::machine::Machine)| {
            let positions = machine.port().leave().with_context(|| format!("the thread of port {name} hangs"))?;
            Ok((name.clone(), positions))
        };
        self.machines.iter().map(leave).collect()
    }

    /// Starts the rings of all adopted machines. Ports without positions had no machine.
    pub(super) fn begin_machines(&self, mut positions: BTreeMap<String, Vec<u16>>) {
        for (name, machine) in &self.machines {
            if !machine.port().begin(positions.remove(name).unwrap_or_default()) {
                tracing::error!(port = name, "a machine was disconnected by the upgrade");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    fn port(files: &[usize]) -> HandedPort {
        let message = |(request, files): (usize, &usize)| HandedMessage {
            request: request as u32,
            payload: vec![request as u8; request],
            files: (0..*files).map(|_| file()).collect(),
        };
        HandedPort {
            listener: Some(file()),
            connection: (!files.is_empty()).then(file),
            messages: files.iter().enumerate().map(message).collect(),
        }
    }

    #[test]
    fn ports_are_described_and_taken_again() {
        for files in [&[][..], &[0], &[1, 0, 3]] {
            let before = port(files);
            let description = Description::of(&before);
            let text = serde_json::to_string(&description).unwrap();
            let description: Description = serde_json::from_str(&text).unwrap();
            let mut rest: Vec<OwnedFd> = descriptors(&before).map(|fd| fd.try_clone_to_owned().unwrap()).collect();
            let after = description.take(|| rest.pop().context("too few")).unwrap();
            assert_eq!((Description::of(&after), rest.len()), (description.clone(), 0));
            let mut few = descriptors(&before).count() - 1;
            let next = || {
                few = few.checked_sub(1).context("too few")?;
                Ok(file())
            };
            assert!(description.take(next).is_err());
        }
        let many = Description { messages: vec![(1, Vec::new(), 0); MESSAGES_MAX + 1], ..Description::default() };
        assert!(many.take(|| Ok(file())).is_err());
    }
}
