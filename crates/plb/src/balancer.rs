//! One pod's load balancer: dispatch before the pod, reordering after it.

use crate::mutation::mutated;
use crate::payload::{Owner, PayloadSlots};
use crate::queue::{Head, Legal, OrderQueue, Put};
use crate::{Config, ConfigError, Cores, Counters, DropReason, NO_PAYLOAD, TRAILER_LEN, Trailer};

/// How packets are spread over cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// By packet, so that all cores get the same number; the order is restored after the pod.
    Plb,
    /// By flow, as with receive-side scaling; each core keeps the order.
    Rss,
}

/// Destination of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dispatch {
    /// The core: below [`Config::cores`].
    pub core: u16,
    /// The trailer to append. With a payload slot only the header goes to the pod, and the caller must store the
    /// payload in that slot and discard what was there.
    pub trailer: Trailer,
}

/// Why a packet cannot be dispatched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// Its order queue is full: it must be dropped.
    QueueFull,
    /// No payload slot is free: it may be dispatched whole.
    NoPayloadSlot,
    /// No core has room, or not the core of its flow: it must be dropped.
    NoRoom,
}

/// The order in which a packet leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// In the order of its queue.
    InOrder,
    /// After its entry was released: possibly out of order.
    Late,
    /// From another packet's entry ([`LegalCheck::LowBits`](crate::LegalCheck::LowBits)): possibly out of order.
    Alias,
    /// It has no order.
    Unordered,
}

/// A handle that leaves the balancer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Egress<T> {
    /// Send the packet.
    Send {
        /// Its handle.
        packet: T,
        /// The payload slot, if the pod had only the header. The next dispatched packet may reuse the slot.
        payload: Option<u32>,
        /// Its order.
        order: Order,
    },
    /// Drop the packet.
    Drop {
        /// Its handle.
        packet: T,
        /// The reason.
        reason: DropReason,
    },
}

/// The current dispatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// By packet.
    Spray,
    /// By flow, with an entry in queues that are drained.
    ByFlow,
    /// By flow, with an entry; by packet from that time on.
    Settling(u64),
}

/// Sprays one pod's packets and restores their order. See the [crate].
#[derive(Clone, Debug)]
pub struct Balancer<T> {
    config: Config,
    queues: Box<[OrderQueue<T>]>,
    payloads: PayloadSlots,
    phase: Phase,
    cores: Cores,
    /// Distinguishes users of a payload slot that have no PSN.
    stamp: u32,
    counters: Counters,
}

impl<T> Balancer<T> {
    /// Allocates all memory: about 40 bytes per queue entry and 12 per payload slot.
    ///
    /// # Errors
    /// A setting is out of its range.
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        config.check()?;
        Ok(Balancer {
            queues: (0..config.order_queues).map(|_| OrderQueue::new(&config)).collect(),
            payloads: PayloadSlots::new(config.payload_slots),
            phase: Phase::Spray,
            cores: Cores::new(&config),
            stamp: 0,
            counters: Counters::default(),
            config,
        })
    }

    /// Its settings.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The counters.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// For each order queue: entries in use, and returned packets held in them.
    pub fn queues(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.queues.iter().map(|queue| (queue.len(), queue.held()))
    }

    /// Entries in use in all order queues, and returned packets held in them.
    pub fn occupancy(&self) -> (u32, u32) {
        self.queues.iter().fold((0, 0), |(len, held), queue| (len + queue.len(), held + queue.held()))
    }

    /// The order queue of a flow, by a hash of its 5-tuple: Albatross's `get_ordq_idx`. Tenants choose 5-tuples, so the
    /// hash needs a secret seed.
    #[inline]
    pub fn order_queue(&self, flow_hash: u32) -> u8 {
        ((u64::from(flow_hash) * u64::from(self.config.order_queues)) >> 32) as u8
    }

    /// Chooses a core for the next packet and an entry in its order queue. With `header_only` it also gets a payload
    /// slot.
    ///
    /// # Errors
    /// There is no room; only a counter has changed.
    #[inline]
    pub fn dispatch(&mut self, now: u64, flow_hash: u32, header_only: bool) -> Result<Dispatch, Refused> {
        self.dispatch_where(now, flow_hash, header_only, |_| true)
    }

    /// [`dispatch`](Self::dispatch) to a core for which `has_room`: sprayed packets skip a core that has fallen behind
    /// or stopped. A packet that is not sprayed can only use its flow's core.
    ///
    /// # Errors
    /// There is no room; only a counter and the turn of cores have changed.
    #[inline]
    pub fn dispatch_where(
        &mut self,
        now: u64,
        flow_hash: u32,
        header_only: bool,
        mut has_room: impl FnMut(u16) -> bool,
    ) -> Result<Dispatch, Refused> {
        let sprayed = match self.phase {
            Phase::Spray => true,
            Phase::ByFlow => false,
            Phase::Settling(until) if now >= until || mutated!(self.config, ReturnWithoutSettling) => {
                self.phase = Phase::Spray;
                true
            }
            Phase::Settling(_) => false,
        };
        let queue = self.order_queue(flow_hash);
        let order = &mut self.queues[usize::from(queue)];
        if !sprayed && self.phase == Phase::ByFlow && order.drain_to.is_none() {
            if !has_room(self.cores.of_flow(flow_hash)) {
                self.counters.refused_no_room_packets += 1;
                return Err(Refused::NoRoom);
            }
            return self.dispatch_by_flow(flow_hash, header_only);
        }
        if order.is_full(&self.config) {
            self.counters.refused_queue_full_packets += 1;
            return Err(Refused::QueueFull);
        }
        let core = match sprayed {
            true => self.cores.choose(flow_hash, &self.config, &mut has_room),
            false => Some(self.cores.of_flow(flow_hash)).filter(|core| has_room(*core)),
        };
        let Some(core) = core else {
            self.counters.refused_no_room_packets += 1;
            return Err(Refused::NoRoom);
        };
        let psn = order.tail();
        let payload = match header_only.then(|| self.payloads.bind(Owner::ordered(queue, psn))) {
            Some(None) => {
                self.counters.refused_no_payload_slot_packets += 1;
                return Err(Refused::NoPayloadSlot);
            }
            bound => bound.flatten(),
        };
        order.push(now, payload.unwrap_or(NO_PAYLOAD));
        self.counters.dispatched_packets += 1;
        let trailer = Trailer { psn, payload, pod: self.config.pod, queue, drop: false, unordered: false };
        Ok(Dispatch { core, trailer })
    }

    /// Chooses the core of a packet's flow, without an entry in an order queue: for classes of packets that must not be
    /// sprayed.
    ///
    /// # Errors
    /// No payload slot is free.
    pub fn dispatch_by_flow(&mut self, flow_hash: u32, header_only: bool) -> Result<Dispatch, Refused> {
        self.stamp = self.stamp.wrapping_add(1);
        let payload = match header_only.then(|| self.payloads.lend(Owner::unordered(self.stamp))) {
            Some(None) => {
                self.counters.refused_no_payload_slot_packets += 1;
                return Err(Refused::NoPayloadSlot);
            }
            lent => lent.flatten(),
        };
        self.counters.dispatched_unordered_packets += 1;
        let psn = payload.map_or(0, |_| self.stamp);
        let trailer = Trailer { psn, payload, pod: self.config.pod, queue: 0, drop: false, unordered: true };
        Ok(Dispatch { core: self.core_of_flow(flow_hash), trailer })
    }

    /// The legal check: takes a packet that the pod sent back, with a copy of the bytes of its trailer. `None`: it is
    /// held until [`release`](Self::release).
    #[inline]
    pub fn returned(&mut self, trailer: [u8; TRAILER_LEN], packet: T) -> Option<Egress<T>> {
        let trailer = match Trailer::parse(trailer) {
            Ok(trailer) => trailer,
            Err(error) => {
                self.counters.dropped_malformed_packets += 1;
                return Some(Egress::Drop { packet, reason: DropReason::Malformed(error) });
            }
        };
        if trailer.pod != self.config.pod && !mutated!(self.config, PodUnchecked) {
            self.counters.dropped_wrong_pod_packets += 1;
            return Some(Egress::Drop { packet, reason: DropReason::WrongPod(trailer.pod) });
        }
        if trailer.unordered {
            let owner = Owner::unordered(trailer.psn);
            return Some(self.without_entry(trailer.payload, trailer.drop, owner, Order::Unordered, packet));
        }
        let Some(queue) = self.queues.get_mut(usize::from(trailer.queue)) else {
            self.counters.dropped_no_such_queue_packets += 1;
            return Some(Egress::Drop { packet, reason: DropReason::NoSuchQueue(trailer.queue) });
        };
        let legal = queue.legal(trailer.psn, &self.config);
        if legal != Legal::Yes {
            self.counters.aliases_packets += u64::from(legal == Legal::Alias);
            let owner = Owner::ordered(trailer.queue, trailer.psn);
            return Some(self.without_entry(trailer.payload, trailer.drop, owner, Order::Late, packet));
        }
        if trailer.drop && !mutated!(self.config, DropFlagIgnored) {
            let known = queue.mark_dropped(trailer.psn, &self.config);
            let counter = if known {
                &mut self.counters.dropped_by_pod_packets
            } else {
                &mut self.counters.dropped_duplicate_packets
            };
            *counter += 1;
            return Some(Egress::Drop {
                packet,
                reason: if known { DropReason::ByPod } else { DropReason::Duplicate },
            });
        }
        match queue.put(trailer.psn, trailer.payload.unwrap_or(NO_PAYLOAD), packet, &self.config) {
            Put::Held { payload } => {
                let differs = payload != trailer.payload.unwrap_or(NO_PAYLOAD);
                self.counters.payload_mismatch_packets += u64::from(differs);
                None
            }
            Put::Replaced(packet) => {
                self.counters.dropped_replaced_packets += 1;
                Some(Egress::Drop { packet, reason: DropReason::Replaced })
            }
            Put::Duplicate(packet) => {
                self.counters.dropped_duplicate_packets += 1;
                Some(Egress::Drop { packet, reason: DropReason::Duplicate })
            }
        }
    }

    /// The reorder check: passes `sink` the packets that can leave now, at most `limit` entries per order queue, and
    /// returns the number of released entries. The end of a change to dispatch by flow empties a queue at once,
    /// whatever the limit.
    #[inline]
    pub fn release(&mut self, now: u64, limit: u32, mut sink: impl FnMut(Egress<T>)) -> u32 {
        let mut freed = 0;
        for queue in 0..self.config.order_queues {
            for _ in 0..limit {
                if !self.release_head(queue, now, false, &mut sink) {
                    break;
                }
                freed += 1;
            }
            if self.queues[usize::from(queue)].is_drained() {
                freed += self.release_all(queue, now, &mut sink);
            }
        }
        freed
    }

    /// Empties a drained queue, and returns the number of entries: the remaining packets were dispatched by flow, so
    /// each flow's packets return in order.
    #[cold]
    #[inline(never)]
    fn release_all(&mut self, queue: u8, now: u64, sink: &mut impl FnMut(Egress<T>)) -> u32 {
        let mut freed = 0;
        while self.release_head(queue, now, true, sink) {
            freed += 1;
        }
        self.queues[usize::from(queue)].drain_to = None;
        freed
    }

    /// The first time at which [`release`](Self::release) times out an entry if nothing returns until then.
    pub fn deadline(&self) -> Option<u64> {
        let first = self.queues.iter().filter_map(OrderQueue::head_at).min()?;
        Some(first.saturating_add(self.config.timeout_ns).saturating_add(1))
    }

    /// Changes how packets are spread, without reordering flows. To [`Mode::Rss`]: packets are dispatched by flow from
    /// now on, but have entries until all earlier packets are out, at most a timeout. To [`Mode::Plb`]: packets have
    /// entries from now on, and are sprayed after a timeout, when packets without entries are out.
    pub fn set_mode(&mut self, now: u64, mode: Mode) {
        match (mode, self.phase) {
            (Mode::Plb, Phase::ByFlow) => {
                self.queues.iter_mut().for_each(|queue| queue.drain_to = None);
                self.phase = Phase::Settling(now.saturating_add(self.config.timeout_ns).saturating_add(1));
            }
            (Mode::Rss, Phase::Spray | Phase::Settling(_)) => {
                for queue in &mut self.queues {
                    let waits = queue.len() > 0 && !mutated!(self.config, FallbackWithoutDrain);
                    queue.drain_to = waits.then_some(queue.tail());
                }
                self.phase = Phase::ByFlow;
            }
            (Mode::Plb, Phase::Spray | Phase::Settling(_)) | (Mode::Rss, Phase::ByFlow) => {}
        }
    }

    /// The mode set last.
    pub fn mode(&self) -> Mode {
        if self.phase == Phase::ByFlow { Mode::Rss } else { Mode::Plb }
    }

    /// Whether all packets are already spread by [`mode`](Self::mode).
    pub fn is_settled(&self, now: u64) -> bool {
        match self.phase {
            Phase::Spray => true,
            Phase::ByFlow => self.queues.iter().all(|queue| queue.drain_to.is_none()),
            Phase::Settling(until) => now >= until,
        }
    }

    /// The pod is gone: returns all handles to be dropped, and releases all entries and payloads. PSNs continue, so
    /// packets that the pod still sends are late.
    pub fn clear(&mut self, mut sink: impl FnMut(Egress<T>)) {
        for queue in &mut self.queues {
            queue.drain_to = None;
            loop {
                match queue.check(0, true, &self.config) {
                    Head::Wait => break,
                    Head::InOrder { packet, .. } | Head::Alias { packet, .. } => {
                        self.counters.dropped_cleared_packets += 1;
                        sink(Egress::Drop { packet, reason: DropReason::Cleared });
                    }
                    Head::Dropped { .. } => {}
                    Head::TimedOut { .. } | Head::Abandoned { .. } => self.counters.abandoned_packets += 1,
                }
            }
        }
        self.payloads.clear();
    }

    /// One step of the reorder check. False if the head must be waited for.
    #[inline(always)]
    fn release_head(&mut self, queue: u8, now: u64, flush: bool, sink: &mut impl FnMut(Egress<T>)) -> bool {
        let order = &mut self.queues[usize::from(queue)];
        match order.check(now, flush, &self.config) {
            Head::Wait => return false,
            Head::InOrder { packet, payload } => {
                self.counters.sent_in_order_packets += 1;
                let payload = (payload != NO_PAYLOAD).then_some(payload);
                if let Some(slot) = payload.filter(|_| !mutated!(self.config, PayloadLeak)) {
                    self.payloads.free(slot);
                }
                sink(Egress::Send { packet, payload, order: Order::InOrder });
            }
            Head::Alias { psn, claim, packet } => {
                self.counters.aliases_packets += 1;
                let payload = (claim != NO_PAYLOAD).then_some(claim);
                sink(self.without_entry(payload, false, Owner::ordered(queue, psn), Order::Alias, packet));
            }
            Head::Dropped { payload } => {
                if payload != NO_PAYLOAD {
                    self.payloads.free(payload);
                }
            }
            Head::TimedOut { payload, blocking, .. } => {
                self.counters.timed_out_packets += 1;
                self.counters.timed_out_blocking_packets += u64::from(blocking);
                self.give_up(payload);
            }
            Head::Abandoned { payload } => {
                self.counters.abandoned_packets += 1;
                self.give_up(payload);
            }
        }
        true
    }

    /// A packet that leaves at once or is dropped, because its entry was released or never existed.
    #[cold]
    fn without_entry(&mut self, payload: Option<u32>, drop: bool, owner: Owner, order: Order, packet: T) -> Egress<T> {
        let there = payload.is_none_or(|slot| {
            self.payloads.take(slot, owner)
                || mutated!(self.config, PayloadOfAnybody) && slot < self.config.payload_slots
        });
        let counters = &mut self.counters;
        let (counter, reason) = if drop {
            (&mut counters.dropped_by_pod_late_packets, Some(DropReason::ByPod))
        } else if !there {
            (&mut counters.dropped_payload_gone_packets, Some(DropReason::PayloadGone))
        } else {
            let counter = match order {
                Order::InOrder => &mut counters.sent_in_order_packets,
                Order::Late => &mut counters.sent_late_packets,
                Order::Alias => &mut counters.sent_alias_packets,
                Order::Unordered => &mut counters.sent_unordered_packets,
            };
            (counter, None)
        };
        *counter += 1;
        match reason {
            Some(reason) => Egress::Drop { packet, reason },
            None => Egress::Send { packet, payload, order },
        }
    }

    /// The core of a flow whose packets are not sprayed.
    pub fn core_of_flow(&self, flow_hash: u32) -> u16 {
        self.cores.of_flow(flow_hash)
    }

    /// Handles an entry released without its packet, whose header may still arrive.
    #[cold]
    fn give_up(&mut self, payload: u32) {
        if payload != NO_PAYLOAD {
            if mutated!(self.config, PayloadFreedAtTimeout) {
                self.payloads.free(payload);
            } else {
                self.payloads.keep(payload);
            }
        }
    }
}
