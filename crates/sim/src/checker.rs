//! A look at everything that happens, for checkers that say what must not.
//!
//! The world itself checks what it can for nothing: every flow of light guests, every byte of TCP streams, every handle
//! ([`Kind`](crate::Kind) lists it). Further checkers are given to [`World::add_checker`](crate::World::add_checker).

use bifrost_datapath::Core;

use crate::faults::Action;
use crate::link::DropReason;
use crate::packet::Packet;
use crate::port::SimPort;
use crate::violation::Violations;
use crate::world::World;

/// What happened to a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    /// Its host sent it.
    Sent,
    /// It was dropped; on `Packet::link`, if it had come so far.
    Dropped(DropReason),
    /// It is in the receiving host's socket.
    Arrived,
    /// The receiving host's loop has taken it.
    Taken,
}

/// Sees everything that happens; all methods do nothing unless they are written. Times are the world's, ns.
pub trait Checker {
    /// Something happened to a datagram.
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

    /// A guest can see a frame from now on, in the order of publication.
    fn shown(&mut self, at: u64, guest: u32, frame: &[u8], violations: &mut Violations) {
        let _ = (at, guest, frame, violations);
    }

    /// A guest's frame was dropped before it left: it has to arrive nowhere.
    fn refused(&mut self, guest: u32, frame: &[u8]) {
        let _ = (guest, frame);
    }

    /// A host has given a fetched frame's buffer back.
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

    /// The run is over.
    fn end(&mut self, world: &World, violations: &mut Violations) {
        let _ = (world, violations);
    }
}
