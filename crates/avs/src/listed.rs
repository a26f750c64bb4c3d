//! Lists sessions one by one. Each has a position, so that a reader can continue where it stopped.

use std::net::SocketAddr;

use crate::ids::{Direction, PortId};
use crate::rewrite::Endpoint;
use crate::session::Class;
use crate::switch::Switch;

/// One session of a security group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionView {
    /// The port whose security groups track the session.
    pub port: PortId,
    /// The IP protocol.
    pub protocol: u8,
    /// The guest's end. Echo requests have their identifier instead of a port, other ICMP messages their type.
    pub local: SocketAddr,
    /// The other end.
    pub remote: SocketAddr,
    /// Direction of the first packet; `Egress`: the guest began.
    pub origin: Direction,
    /// The session's class.
    pub class: Class,
    /// Time since its last packet, s.
    pub idle_s: u32,
    /// Time until it expires if no packet comes, s.
    pub expires_s: u32,
}

impl Switch {
    /// Number of positions that a session of a security group may have; they count from 0.
    pub fn session_places(&self) -> u32 {
        self.sessions.places()
    }

    /// The session at a position, if there is one. A session keeps its position.
    pub fn session_at(&self, place: u32) -> Option<SessionView> {
        let session = self.sessions.at(place)?;
        let address = |end: Endpoint| SocketAddr::new(end.address, end.port);
        let (local, remote) = session.key.ends();
        let idle_s = self.sessions.now_s().saturating_sub(session.seen_s);
        Some(SessionView {
            port: session.key.port(),
            protocol: session.key.protocol(),
            local: address(local),
            remote: address(remote),
            origin: session.origin,
            class: session.state.class(),
            idle_s: seconds(idle_s),
            expires_s: seconds(session.state.timeout_s().saturating_sub(idle_s)),
        })
    }
}

/// Converts the switch's seconds, which have 2^30 ns.
fn seconds(of_switch: u32) -> u32 {
    ((u64::from(of_switch) << 30) / 1_000_000_000) as u32
}
