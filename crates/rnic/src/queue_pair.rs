//! A queue pair.

use bifrost_wire::roce::{Acknowledgement, Qpn, Route};

use crate::requester::Requester;
use crate::responder::Responder;
use crate::verbs::{Connect, QpInit};

/// State of a queue pair (IBTA 10.3.1; the states between reset and ready are one here).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Reset,
    Ready,
    Error,
}

#[derive(Debug)]
pub(crate) struct QueuePair {
    pub(crate) number: Qpn,
    pub(crate) init: QpInit,
    pub(crate) state: State,
    pub(crate) peer: Option<Connect>,
    pub(crate) requester: Requester,
    pub(crate) responder: Responder,
    /// RC: the response for the peer.
    pub(crate) answer: Option<Acknowledgement>,
    /// In the list of those with packets to send.
    pub(crate) scheduled: bool,
    /// In the list of those with a timer.
    pub(crate) armed: bool,
}

impl QueuePair {
    pub(crate) fn new(number: Qpn, init: QpInit, state: State) -> Self {
        Self {
            number,
            init,
            state,
            peer: None,
            requester: Requester::default(),
            responder: Responder::default(),
            answer: None,
            scheduled: false,
            armed: false,
        }
    }

    /// The route to the peer.
    pub(crate) fn route(&self, source: std::net::IpAddr, peer: &Connect) -> Route {
        Route { source, destination: peer.address, source_port: peer.source_port, destination_port: peer.port }
    }
}
