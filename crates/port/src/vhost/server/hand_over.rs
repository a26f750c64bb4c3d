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

/// How long the port's thread may take to obey. It takes longer if a front-end stops in the middle of a message.
const PATIENCE: Duration = Duration::from_secs(2);

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

/// An order to the port's thread.
#[derive(Debug)]
pub(super) enum Order {
    HandOver(Sender<io::Result<HandedPort>>),
    Leave(Sender<Vec<u16>>),
    /// Only for an adopted device.
    Begin(Vec<u16>, Sender<bool>),
    GoOn(Sender<bool>),
}

impl VhostPort {
    /// Stops handling messages and connections, and returns the state of the port.
    ///
    /// # Errors
    /// The front-end is in the middle of a message, or its machine is migrating. The port continues then.
    pub fn hand_over(&self) -> io::Result<HandedPort> {
        let (sender, answer) = channel();
        self.order(Order::HandOver(sender));
        match answer.recv_timeout(PATIENCE) {
            Ok(handed) => handed,
            Err(error) => {
                // If the thread has the order by now, it waits for the next one.
                self.go_on();
                let busy = "its front-end has been in the middle of a message for 2 seconds; try again later";
                Err(match error {
                    RecvTimeoutError::Timeout => io::Error::new(io::ErrorKind::TimedOut, busy),
                    RecvTimeoutError::Disconnected => io::Error::other("its thread has ended"),
                })
            }
        }
    }

    /// Stops the rings for the process that has the state of [`hand_over`](Self::hand_over). Returns their positions;
    /// `None`: the port's thread hangs. The worker must not process packets.
    pub fn leave(&self) -> Option<Vec<u16>> {
        let (sender, answer) = channel();
        self.order(Order::Leave(sender));
        answer.recv_timeout(PATIENCE).ok()
    }

    /// Continues, because the other process does not. Does nothing if nothing was handed over.
    pub fn go_on(&self) {
        let (sender, answer) = channel();
        self.order(Order::GoOn(sender));
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
        self.order(Order::Begin(bases, sender));
        answer.recv_timeout(PATIENCE).unwrap_or(false)
    }

    /// The other process has ended, or will: the socket and the connection belong to this port alone.
    pub fn own(&self) {
        self.shared.state().is_shared = false;
    }

    fn order(&self, order: Order) {
        self.shared.state().orders.push_back(order);
        self.shared.ordered.notify_all();
        let _ = rustix::io::write(&self.shared.orders, &1u64.to_ne_bytes());
    }
}

impl Shared {
    /// Obeys all orders. If the port was handed over, or was adopted and has not begun, it waits for the next order.
    pub(super) fn obey(&self, device: &mut VhostDevice, listener: Option<&Foreign>, stream: Option<&Foreign>) {
        let _ = rustix::io::read(&self.orders, &mut [0; 8]);
        loop {
            let mut state = self.state();
            let order = loop {
                match state.orders.pop_front() {
                    Some(order) => break order,
                    None if state.stopping || !state.is_waiting => return,
                    None => state = self.ordered.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner),
                }
            };
            drop(state);
            match order {
                Order::HandOver(answer) => {
                    let handed = hand_over(device, listener, stream);
                    self.state().is_waiting = handed.is_ok();
                    let _ = answer.send(handed);
                }
                Order::Leave(answer) => drop(answer.send(device.leave())),
                Order::Begin(bases, answer) => {
                    let begun = device.begin(&bases);
                    self.end_waiting(begun, stream, &answer);
                }
                Order::GoOn(answer) => {
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
