//! Gives the ports of a core their turns on the link.

use bifrost_nic::dscp::Band;
use bifrost_port::{GuestPort, TxFrame, Underlay};
use bifrost_rte::Time;
use bifrost_tables::{Scheduler, Turn};

use super::{Egress, Guarantee, LinkRate, QUANTUM, TUNNEL_BYTES, TURN_BYTES, lock};
use crate::core::Core;
use crate::departure::Departure;
use crate::guest::Offered;
use crate::ports::Port;
use crate::unsent::Unsent;
use crate::waiting::{Closed, Full};

impl<P: GuestPort> Port<P> {
    fn guaranteed(&self, now: Time) -> u64 {
        self.guarantee.as_ref().map_or(0, |guarantee| lock(&guarantee.0).available(now.0))
    }
}

impl<P: GuestPort> Core<P> {
    /// Sends to other hosts at a rate, or as fast as possible. Workers of the same host get clones.
    pub fn set_link_rate(&mut self, link: Option<LinkRate>) {
        let scheduler = Scheduler::default();
        // The next turn finds out whether anything waits.
        self.egress = link.map(|link| Box::new(Egress { link, scheduler, waits: true, guaranteed: None }));
        for owner in 0..self.ports.len() as u32 {
            self.set_egress_of(owner);
        }
    }

    /// Sets the least that a port may send on a full link. All workers that serve it get clones.
    pub fn set_guarantee(&mut self, owner: u32, guarantee: Option<Guarantee>) {
        if let Some(port) = self.port_mut(owner) {
            port.guarantee = guarantee;
        }
    }

    /// Makes a port's packets wait for their turn, or not.
    pub(crate) fn set_egress_of(&mut self, owner: u32) {
        let Some(port) = self.ports.get_mut(owner as usize).and_then(Option::as_mut) else { return };
        let Some(egress) = &mut self.egress else {
            port.waiting.set_bound(None);
            // They need nobody's turn any longer.
            port.unfinished |= !port.waiting.is_empty();
            return;
        };
        port.waiting.set_bound(Some(egress.link.queue_bytes));
        let (network, weight) = port.weights;
        egress.scheduler.set(owner, (port.vni.get(), network.get()), weight.get());
        if !port.waiting.is_empty() {
            egress.scheduler.join(owner);
        }
    }

    /// A port is gone.
    pub(crate) fn forget_egress_of(&mut self, owner: u32) {
        if let Some(egress) = &mut self.egress {
            egress.scheduler.remove(owner);
        }
    }

    /// Queues a packet until its port may send it.
    #[cold]
    pub(crate) fn queue_for_link(&mut self, owner: u32, frame: TxFrame, departure: Departure) -> Result<(), Unsent> {
        let Some(port) = self.ports.get_mut(owner as usize).and_then(Option::as_mut) else { return Ok(()) };
        let (now, room, band) = (self.now, port.room(), Band::of_frame(port.port.bytes(frame.handle).0));
        let pushed = port.waiting.push(now, frame, (departure, band), room);
        pushed.map_err(|Full| Unsent::QueueFull(departure))?;
        if let Some(egress) = &mut self.egress {
            egress.join(owner);
        }
        Ok(())
    }

    /// Gives ports their turns, as far as the link has room. Returns whether anything was sent.
    #[inline(never)]
    pub(crate) fn send_in_turns<const SEEN: bool>(&mut self, underlay: &mut impl Underlay) -> bool {
        let now = self.now;
        let Some(egress) = &mut self.egress else { return false };
        (egress.waits, egress.guaranteed) = (false, None);
        if egress.scheduler.is_idle() {
            return false;
        }
        let tokens = lock(&egress.link.bucket).available(now.0).min(TURN_BYTES);
        let ports = &self.ports;
        let port = |owner: u32| ports.get(owner as usize).and_then(Option::as_ref);
        egress.scheduler.begin(tokens, |owner| port(owner).map_or(0, |port| port.guaranteed(now)));
        let (mut busy, mut sent) = (false, 0);
        // Destinations of the current port that are closed.
        let (mut last, mut closed) = (None, Closed::default());
        while sent < 2 * TURN_BYTES
            && let Some(turn) = self.egress.as_mut().and_then(|egress| egress.scheduler.next())
        {
            let owner = turn.member();
            if last != Some(owner) {
                (last, closed) = (Some(owner), Closed::default());
            }
            let offered = self.offer_waiting::<SEEN>(owner, &mut closed);
            if let Some(bytes) = offered {
                busy = true;
                sent += bytes;
                self.emit_much::<SEEN>(underlay);
            }
            self.took_turn(turn, offered);
        }
        self.end_turns();
        busy
    }

    /// Offers the transport the next packet of a port. Returns its size on the link if it was taken.
    fn offer_waiting<const SEEN: bool>(&mut self, owner: u32, closed: &mut Closed) -> Option<u64> {
        loop {
            let port = self.port_mut(owner).filter(|port| !port.failed && port.slowness.rests_until.is_none())?;
            let (band, frame, departure) = port.waiting.front(closed)?;
            let segments = port.held.get(frame.handle.0 as usize)?.as_ref().map_or(1, |held| held.segments.count());
            match self.offer::<SEEN>(owner, frame.handle.0, departure) {
                Offered::Taken => {
                    *closed = Closed::default();
                    let port = self.port_mut(owner)?;
                    let room = port.room();
                    let now = self.now;
                    self.port_mut(owner)?.waiting.pop(now, band, room);
                    let headers = self.egress.as_ref()?.link.datagram_bytes + TUNNEL_BYTES;
                    return Some(u64::from(frame.len) + u64::from(segments) * headers);
                }
                Offered::Blocked => self.port_mut(owner)?.waiting.skip(band, closed),
            }
        }
    }

    /// Records what a port did with its turn: it sent `bytes`, or nothing, because it cannot.
    fn took_turn(&mut self, turn: Turn, bytes: Option<u64>) {
        let owner = turn.member();
        let has_more = self.ports.get(owner as usize).and_then(Option::as_ref).is_some_and(|p| !p.waiting.is_empty());
        let Some(egress) = &mut self.egress else { return };
        match bytes {
            Some(bytes) => egress.scheduler.sent(turn, bytes),
            // Its windows are closed.
            None if has_more => egress.scheduler.park(owner),
            None => {}
        }
        if !has_more {
            egress.scheduler.leave(owner);
        }
    }

    /// Charges guarantees, and finds out when to go on.
    fn end_turns(&mut self) {
        let now = self.now;
        let Some(egress) = &mut self.egress else { return };
        let guarantee = |owner: u32| {
            let port = self.ports.get(owner as usize).and_then(Option::as_ref);
            port.and_then(|port| port.guarantee.as_ref())
        };
        egress.scheduler.end(|owner, used| {
            if let Some(guarantee) = guarantee(owner) {
                lock(&guarantee.0).charge(now.0, used);
            }
        });
        // Windows of those that wait nevertheless open when packets arrive, or by a timer of the transport.
        egress.waits = egress.scheduler.waiting().next().is_some();
        let at = |owner| Some(now.after(lock(&guarantee(owner)?.0).until(now.0, QUANTUM)));
        egress.guaranteed = egress.scheduler.waiting().filter_map(at).min();
    }
}
