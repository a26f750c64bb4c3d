//! A port continues in another process, with its socket and its front-end's connection.
//!
//! On the old side: [`hand_over`](VhostPort::hand_over) while packets flow; from then on no message is handled.
//! [`leave`](VhostPort::leave) when the worker has paused, and [`handed_over`](VhostPort::handed_over) when the other
//! process works; [`go_on`](VhostPort::go_on) if it does not. On the new side: [`adopt`](VhostPort::adopt), then
//! [`begin`](VhostPort::begin), and [`own`](VhostPort::own) when the old process can no longer go on.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use super::super::device::{HandedMessage, VhostDevice};
use super::super::helper::Foreign;
use super::super::socket::Listening;
use super::super::{Mode, QueueOwner, VhostConfig, VhostError};
use super::{Shared, VhostPort};

/// Timeout for a command to the port's thread.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long a front-end may be in the middle of a message when its port is handed over. It is disconnected then, so that
/// no front-end can prevent the upgrade of its host.
const MESSAGE_TIME: Duration = Duration::from_millis(500);

/// What another process needs to continue with a port's socket and front-end.
#[derive(Debug, Default)]
pub struct HandedPort {
    /// The listening socket, if this side created it.
    pub listener: Option<OwnedFd>,
    /// The connection to the front-end, if there is one.
    pub connection: Option<OwnedFd>,
    /// Its state, as messages.
    pub messages: Vec<HandedMessage>,
}

/// A command to the port's thread.
#[derive(Debug)]
pub(super) enum Command {
    HandOver(Sender<io::Result<HandedPort>>),
    Leave(Sender<Vec<u16>>),
    /// Only for an adopted device.
    Begin(Vec<u16>, Sender<bool>),
    GoOn(Sender<bool>),
}

impl VhostPort {
    /// Stops handling messages and connections, and returns the state of the port. A front-end that does not finish a
    /// message within 500 ms is disconnected first.
    ///
    /// # Errors
    /// The thread hangs, or no file descriptor was available. The port continues then.
    pub fn hand_over(&self) -> io::Result<HandedPort> {
        let (sender, answer) = channel();
        self.command(Command::HandOver(sender));
        let mut handed = answer.recv_timeout(MESSAGE_TIME);
        if matches!(handed, Err(RecvTimeoutError::Timeout)) {
            if let Some(connection) = &self.shared.state().connection {
                tracing::warn!("disconnecting a front-end that is in the middle of a message during an upgrade");
                let _ = rustix::net::shutdown(connection, rustix::net::Shutdown::Both);
            }
            handed = answer.recv_timeout(PATIENCE);
        }
        handed.unwrap_or_else(|_| {
            // If the thread gets the command later, it waits for the next one.
            self.go_on();
            Err(io::Error::new(io::ErrorKind::TimedOut, "its thread does not answer"))
        })
    }

    /// Stops the rings for the process that has the state of [`hand_over`](Self::hand_over). Returns their positions;
    /// `None`: the port's thread hangs. The worker must not process packets.
    pub fn leave(&self) -> Option<Vec<u16>> {
        let (sender, answer) = channel();
        self.command(Command::Leave(sender));
        answer.recv_timeout(PATIENCE).ok()
    }

    /// Continues, because the other process does not. Does nothing if nothing was handed over.
    pub fn go_on(&self) {
        let (sender, answer) = channel();
        self.command(Command::GoOn(sender));
        let _ = answer.recv_timeout(PATIENCE);
    }

    /// The other process works: dropping this port leaves the socket and the connection alone.
    pub fn handed_over(&self) {
        self.shared.state().is_shared = true;
    }

    /// A port that continues the one of another process. It handles nothing before [`begin`](Self::begin).
    ///
    /// # Errors
    /// See [`VhostError`]. The state is not valid for this configuration.
    pub fn adopt(config: VhostConfig, owner: Box<dyn QueueOwner>, handed: HandedPort) -> Result<VhostPort, VhostError> {
        let HandedPort { listener, connection, messages } = handed;
        let socket = match (config.mode, &listener) {
            (Mode::Server, Some(_)) => Listening::of(&config.socket),
            (Mode::Client, None) => None,
            _ => return Err(VhostError::Handed("a listening socket is missing, or not needed")),
        };
        let shared = Arc::new(Shared::new(owner)?);
        let mut device = VhostDevice::new(config.clone(), shared.owner.clone(), shared.helper.clone());
        let stream = connection.map(|stream| Arc::new(Foreign::new(stream, &shared.helper)));
        if let Some(stream) = &stream {
            device.meet(stream);
            device.adopt(messages).map_err(VhostError::Handed)?;
        }
        {
            let mut state = shared.state();
            (state.is_shared, state.is_waiting) = (true, true);
            state.connection.clone_from(&stream);
        }
        let listener = listener.map(|listener| Foreign::new(listener, &shared.helper));
        VhostPort::run(shared, config, listener, socket, Some((device, stream)))
    }

    /// Runs the rings of an adopted port from these positions on, and handles messages. Returns false if it cannot; the
    /// front-end is then disconnected, and may connect again.
    pub fn begin(&self, bases: Vec<u16>) -> bool {
        let (sender, answer) = channel();
        self.command(Command::Begin(bases, sender));
        answer.recv_timeout(PATIENCE).unwrap_or(false)
    }

    /// The other process has ended, or will: the socket and the connection belong to this port alone.
    pub fn own(&self) {
        self.shared.state().is_shared = false;
    }

    fn command(&self, command: Command) {
        self.shared.state().commands.push_back(command);
        self.shared.command_added.notify_all();
        let _ = rustix::io::write(&self.shared.commands, &1u64.to_ne_bytes());
    }
}

impl Shared {
    /// Runs all commands. If the port was handed over, or was adopted and has not begun, it waits for the next command.
    pub(super) fn run_commands(&self, device: &mut VhostDevice, listener: Option<&Foreign>, stream: Option<&Foreign>) {
        let _ = rustix::io::read(&self.commands, &mut [0; 8]);
        loop {
            let mut state = self.state();
            let command = loop {
                match state.commands.pop_front() {
                    Some(command) => break command,
                    None if state.stopping || !state.is_waiting => return,
                    None => state = self.command_added.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner),
                }
            };
            drop(state);
            match command {
                Command::HandOver(answer) => {
                    let handed = hand_over(device, listener, stream);
                    self.state().is_waiting = handed.is_ok();
                    let _ = answer.send(handed);
                }
                Command::Leave(answer) => drop(answer.send(device.leave())),
                Command::Begin(bases, answer) => {
                    let begun = device.begin(&bases);
                    self.end_waiting(begun, stream, &answer);
                }
                Command::GoOn(answer) => {
                    let goes_on = device.go_on();
                    self.end_waiting(goes_on, stream, &answer);
                }
            }
        }
    }

    fn end_waiting(&self, result: Result<(), &'static str>, stream: Option<&Foreign>, answer: &Sender<bool>) {
        self.state().is_waiting = false;
        if let (Err(problem), Some(stream)) = (result, stream) {
            tracing::error!(problem, "a handed-over guest cannot run; disconnecting its front-end");
            let _ = rustix::net::shutdown(stream, rustix::net::Shutdown::Both);
        }
        let _ = answer.send(result.is_ok());
    }
}

fn hand_over(device: &VhostDevice, listener: Option<&Foreign>, stream: Option<&Foreign>) -> io::Result<HandedPort> {
    let duplicate = |fd: &Foreign| fd.as_fd().try_clone_to_owned();
    let messages = if stream.is_some() { device.messages()? } else { Vec::new() };
    Ok(HandedPort {
        listener: listener.map(duplicate).transpose()?,
        connection: stream.map(duplicate).transpose()?,
        messages,
    })
}
