//! Sending to other hosts at a given rate: whose packet goes next.
//!
//! Without it, a full link is shared by whatever queue is in front of it. With it, the host sends a little less than
//! the link takes, and packets wait here: in the [`Waiting`](crate::waiting::Waiting) of their ports, by [`Band`], and
//! ports take turns by guarantee and weight ([`Scheduler`]). What the transport sends by itself, such as ACKs and
//! retransmissions, waits for nobody; it is charged to the link like everything else.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bifrost_nic::dscp::Band;
use bifrost_port::{GuestPort, TxFrame, Underlay};
use bifrost_rte::Time;
use bifrost_tables::{Scheduler, TokenBucket, Turn};

use crate::core::Core;
use crate::guest::Offered;
use crate::ports::{Departure, Port};
use crate::unsent::Unsent;
use crate::waiting::{Closed, Full};

/// Duration of a burst at the link's rate or a guarantee, ns. A worker that sleeps wakes up later than it wants to.
const BURST_NS: u64 = 2_000_000;
/// Minimum burst, bytes: some packets, so that they share a system call.
const LEAST_BURST: u64 = 16 << 10;
/// Bytes that a worker sends in a turn, plus at most one packet.
const TURN_BYTES: u64 = 1 << 20;
/// Tokens to wait for, bytes: one Ethernet frame.
const QUANTUM: u64 = 1514;
/// Headers of a packet in front of the guest's frame, without Ethernet, IP and UDP, bytes: VXLAN and BIFROST.
const TUNNEL_BYTES: u64 = 24;
/// Ethernet and UDP headers of a datagram, bytes.
const LINK_BYTES: u64 = 14 + 8;

/// The rate at which this host sends to others, Ethernet frames without checksum. Clones share it.
#[derive(Clone, Debug)]
pub struct LinkRate {
    bucket: Arc<Mutex<TokenBucket>>,
    /// Headers of a datagram, bytes: Ethernet, IP, UDP.
    datagram_bytes: u64,
    /// Maximum bytes of a port's packets that wait in a band, on each worker.
    queue_bytes: u64,
}

/// The least that a port may send on a full link. Clones share it: the workers that serve a port grant it together.
#[derive(Clone, Debug)]
pub struct Guarantee(Arc<Mutex<TokenBucket>>);

impl LinkRate {
    /// A rate of `rate` bytes per second. `queue_ns`: how long the packets in a band of a port may take at this rate.
    /// `v6`: whether datagrams to other hosts have IPv6 headers.
    pub fn new(rate: u64, queue_ns: u64, v6: bool) -> Self {
        let queue_bytes = u128::from(rate) * u128::from(queue_ns) / 1_000_000_000;
        LinkRate {
            bucket: bucket(rate),
            datagram_bytes: LINK_BYTES + if v6 { 40 } else { 20 },
            queue_bytes: u64::try_from(queue_bytes).unwrap_or(u64::MAX),
        }
    }
}

impl Guarantee {
    /// A guarantee of `rate` bytes per second.
    pub fn new(rate: u64) -> Self {
        Guarantee(bucket(rate))
    }
}

fn bucket(rate: u64) -> Arc<Mutex<TokenBucket>> {
    let burst = u64::try_from(u128::from(rate) * u128::from(BURST_NS) / 1_000_000_000).unwrap_or(u64::MAX);
    Arc::new(Mutex::new(TokenBucket::new(rate, burst.max(LEAST_BURST))))
}

fn lock(bucket: &Mutex<TokenBucket>) -> MutexGuard<'_, TokenBucket> {
    bucket.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The state of a worker.
#[derive(Debug)]
pub(crate) struct Egress {
    link: LinkRate,
    scheduler: Scheduler,
    /// Packets wait only for tokens of the link.
    waits: bool,
    /// When a port that waits may send within its guarantee.
    guaranteed: Option<Time>,
}

impl Egress {
    /// When packets that wait can be sent; `now`: the time of this turn.
    pub(crate) fn next(&self, now: Time) -> Option<Time> {
        let link = self.waits.then(|| now.after(lock(&self.link.bucket).until(now.0, QUANTUM)));
        self.guaranteed.into_iter().chain(link).min()
    }

    /// A port has packets.
    pub(crate) fn join(&mut self, owner: u32) {
        self.scheduler.join(owner);
    }

    /// Datagrams are sent.
    pub(crate) fn charge(&self, now: Time, datagrams: u64, payload_bytes: u64) {
        lock(&self.link.bucket).charge(now.0, payload_bytes + datagrams * self.link.datagram_bytes);
    }
}

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
