//! The interface of checkers, which observe everything that happens and detect violations.
//!
//! The world itself makes the cheap checks: every flow of light guests, every byte of TCP streams, every handle
//! ([`Kind`](crate::Kind) lists the violations). Add further checkers with
//! [`World::add_checker`](crate::World::add_checker).

use bifrost_datapath::Core;

use crate::faults::Action;
use crate::link::DropReason;
use crate::packet::Packet;
use crate::port::SimPort;
use crate::violation::Violations;
use crate::world::World;

/// An event of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    /// Its host sent it.
    Sent,
    /// It was dropped; on `Packet::link`, if it got that far.
    Dropped(DropReason),
    /// It is in the receiving host's socket.
    Arrived,
    /// The receiving host's loop has read it.
    Taken,
}

/// Observes everything that happens; the default methods do nothing. Times are the world's, ns.
pub trait Checker {
    /// An event of a datagram.
    fn wire(&mut self, at: u64, what: Wire, packet: &Packet, violations: &mut Violations) {
        let _ = (at, what, packet, violations);
    }

    /// A host has fetched a guest's frame.
    fn fetched(&mut self, at: u64, guest: u32, frame: &[u8], violations: &mut Violations) {
        let _ = (at, guest, frame, violations);
    }

    /// A host has placed a frame for a guest, in the order of arrival.
    fn placed(&mut self, at: u64, guest: u32, frame: &[u8], violations: &mut Violations) {
        let _ = (at, guest, frame, violations);
    }

    /// A frame becomes visible to a guest, in the order of publication.
    fn shown(&mut self, at: u64, guest: u32, frame: &[u8], violations: &mut Violations) {
        let _ = (at, guest, frame, violations);
    }

    /// A guest's frame was dropped before it left: it must not arrive anywhere.
    fn refused(&mut self, guest: u32, frame: &[u8]) {
        let _ = (guest, frame);
    }

    /// A host has released a fetched frame's buffer.
    fn completed(&mut self, at: u64, guest: u32, frame: &[u8], violations: &mut Violations) {
        let _ = (at, guest, frame, violations);
    }

    /// A host has ended a turn of its loop.
    fn turned(&mut self, at: u64, host: u32, core: &Core<SimPort>, violations: &mut Violations) {
        let _ = (at, host, core, violations);
    }

    /// A fault begins or ends.
    fn fault(&mut self, at: u64, action: &Action, violations: &mut Violations) {
        let _ = (at, action, violations);
    }

    /// The run has ended.
    fn end(&mut self, world: &World, violations: &mut Violations) {
        let _ = (world, violations);
    }
}
