//! Guest ports as the data path sees them, and its records of the packets fetched from guests.

use std::collections::VecDeque;

use bifrost_avs::Rewrite;
use bifrost_nic::Segments;
use bifrost_nic::dscp::Marking;
use bifrost_port::{GuestPort, TxFrame};
use bifrost_rte::{Ordering, Time, Weight};
use bifrost_wire::{Mac, Vni};

use crate::budget::Budget;
use crate::contain::{PortFault, Strikes};
use crate::counters::OutboundCounters;
use crate::departure::Departure;
use crate::egress::Guarantee;
use crate::learning::Learning;
use crate::limits::Limits;
use crate::pressure::Load;
use crate::rx_queue::RxQueue;
use crate::waiting::{Room, Waiting};
use crate::watchdog::Slowness;

/// A guest port to be added to a worker.
pub struct PortConfig<P> {
    /// Its number: the switch's `PortId`.
    pub owner: u32,
    /// Its network.
    pub vni: Vni,
    /// Its vNIC.
    pub mac: Mac,
    /// When its packets become visible.
    pub ordering: Ordering,
    /// Whether its network uses reliable transport.
    pub reliable: bool,
    /// This worker's queue of the device.
    pub port: P,
}

impl<P> std::fmt::Debug for PortConfig<P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PortConfig")
            .field("owner", &self.owner)
            .field("vni", &self.vni)
            .field("mac", &self.mac)
            .finish()
    }
}

/// Record of a fetched packet, kept until its last segment is released.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    pub(crate) segments: Segments,
    pub(crate) rewrite: Option<Rewrite>,
    pub(crate) flow: u32,
    /// Outer DSCP, and the frame's ECN codepoint.
    pub(crate) class: u8,
    /// Segments not yet released; 0: the buffer is the guest's again.
    pub(crate) left: u16,
}

/// One port of one worker.
pub(crate) struct Port<P> {
    pub(crate) owner: u32,
    pub(crate) vni: Vni,
    pub(crate) mac: Mac,
    pub(crate) ordering: Ordering,
    pub(crate) reliable: bool,
    pub(crate) port: P,
    /// By transmit handle, up to the highest one used.
    pub(crate) held: Vec<Option<Held>>,
    /// Fetched packets that the switch has not decided about, oldest first; bounded by the port's buffers.
    pub(crate) backlog: VecDeque<TxFrame>,
    /// Packets that the switch has decided about and that wait for a window; bounded by the port's buffers.
    pub(crate) waiting: Waiting,
    /// Packets that wait until a route is learned; `None`: none ever has.
    pub(crate) learning: Option<Box<Learning>>,
    /// Some packets of `backlog` or `waiting` can continue in the next turn.
    pub(crate) unfinished: bool,
    /// There may be packets to fetch.
    pub(crate) readable: bool,
    pub(crate) budget: Budget,
    /// Whether the caller should be told when there are packets to fetch.
    pub(crate) watched: bool,
    /// Packets were published since the last notification.
    pub(crate) dirty: bool,
    /// Buffers were completed since the guest was last told.
    pub(crate) completed: bool,
    pub(crate) failed: bool,
    /// The last fault that took it out of use.
    pub(crate) fault: Option<PortFault>,
    /// How often a fault took it out of use.
    pub(crate) fault_times: u64,
    /// Time that it uses beyond what its packets need.
    pub(crate) slowness: Slowness,
    /// Panics that it may have caused.
    pub(crate) strikes: Strikes,
    /// The device that was behind it at the last fault, until the port gets another one; it must be dropped elsewhere.
    pub(crate) broken: Option<P>,
    /// What happened to its packets.
    pub(crate) outbound: OutboundCounters,
    pub(crate) tx_packets: u64,
    pub(crate) tx_bytes: u64,
    pub(crate) rx_packets: u64,
    pub(crate) rx_bytes: u64,
    /// Packets placed but not published yet.
    pub(crate) hidden: u32,
    pub(crate) limits: Limits,
    /// Frames that wait for the guest, if they may wait.
    pub(crate) rx_queue: Option<Box<RxQueue>>,
    /// How the outer DSCP of the guest's packets is chosen.
    pub(crate) marking: Marking,
    /// The share of its network among networks, and its own in its network.
    pub(crate) weights: (Weight, Weight),
    /// The least that it may send on a full link.
    pub(crate) guarantee: Option<Guarantee>,
    /// Until then nothing is fetched, because the guest has used up its send limit.
    pub(crate) held_back_until: Option<Time>,
    /// How often that happened.
    pub(crate) held_back: u64,
    /// Packets for the guest beyond its receive limit.
    pub(crate) rate_limited: u64,
    /// What the guest was recently sent, while the worker cannot keep up.
    pub(crate) load: Load,
    /// Packets for the guest beyond its share in that time.
    pub(crate) overload_dropped: u64,
}

impl<P: GuestPort> Port<P> {
    pub(crate) fn new(config: PortConfig<P>) -> Self {
        Port {
            owner: config.owner,
            vni: config.vni,
            mac: config.mac,
            ordering: config.ordering,
            reliable: config.reliable,
            held: Vec::new(),
            port: config.port,
            backlog: VecDeque::new(),
            unfinished: false,
            budget: Budget::default(),
            waiting: Waiting::default(),
            learning: None,
            readable: true,
            watched: false,
            dirty: false,
            completed: false,
            failed: false,
            fault: None,
            fault_times: 0,
            slowness: Slowness::default(),
            strikes: Strikes::default(),
            broken: None,
            outbound: OutboundCounters::default(),
            tx_packets: 0,
            tx_bytes: 0,
            rx_packets: 0,
            rx_bytes: 0,
            hidden: 0,
            limits: Limits::default(),
            rx_queue: None,
            marking: Marking::default(),
            weights: (Weight::default(), Weight::default()),
            guarantee: None,
            held_back_until: None,
            held_back: 0,
            rate_limited: 0,
            load: Load::default(),
            overload_dropped: 0,
        }
    }

    /// Whether packets that are not yet published occupy half of the guest's buffers.
    pub(crate) fn is_short(&self) -> bool {
        self.hidden >= self.port.rx_capacity() / 2
    }

    /// Whether there is room, while [short](Self::is_short), for a packet that waits for others and is `ahead` packets
    /// ahead of the first missing one. The third quarter is for packets that will be published soon, the last one for
    /// those that are published at once. Otherwise packets could take all the room, with none left for those for which
    /// they wait (PROTOCOL §7.1).
    pub(crate) fn may_wait(&self, ahead: u32) -> bool {
        let quarter = (self.port.rx_capacity() / 4).max(1);
        ahead <= quarter && self.hidden + quarter < self.port.rx_capacity()
    }

    /// Records a packet that the switch has decided about.
    #[inline]
    pub(crate) fn hold(&mut self, handle: u32, held: Held) {
        let place = handle as usize;
        if self.held.len() <= place {
            self.held.resize(place + 1, None);
        }
        self.held[place] = Some(held);
    }

    /// One segment of a buffer is no longer needed; after the last one the buffer is returned (delayed release).
    pub(crate) fn release(&mut self, handle: u32) {
        let Some(slot) = self.held.get_mut(handle as usize) else { return };
        let Some(held) = slot else { return };
        held.left = held.left.saturating_sub(1);
        if held.left == 0 {
            *slot = None;
            self.complete(bifrost_port::TxHandle(handle));
        }
    }

    /// Returns a buffer; the guest is told at the end of the turn.
    pub(crate) fn complete(&mut self, handle: bifrost_port::TxHandle) {
        self.port.complete(handle);
        self.completed = true;
    }

    /// Returns the buffer of a packet that the switch has decided about and that is dropped.
    pub(crate) fn drop_undelivered(&mut self, handle: bifrost_port::TxHandle) {
        if let Some(held) = self.held.get_mut(handle.0 as usize) {
            *held = None;
        }
        self.port.refuse(handle);
        self.completed = true;
    }

    /// Fetched packets that wait: those that the switch has not decided about, and those that it has.
    pub(crate) fn waiting(&self) -> (u64, u64) {
        (self.backlog.len() as u64, self.waiting.packets() as u64)
    }

    /// Fetched packets that wait until a route is learned.
    pub(crate) fn learning_packets(&self) -> u64 {
        self.learning.as_ref().map_or(0, |learning| learning.packets() as u64)
    }

    /// Room for packets that wait for a window.
    pub(crate) fn room(&self) -> Room {
        let port = &self.port;
        Room { small_bytes: port.tx_small_bytes(), packets: port.tx_free(), large: port.tx_free_large() }
    }

    /// Until when the guest is stopped because its packets wait for a window.
    #[inline]
    pub(crate) fn held_until(&self, now: Time) -> Option<Time> {
        if self.waiting.is_empty() { None } else { self.waiting.held_until(now, self.room()) }
    }

    /// Lets the switch decide again about the packets that wait for a chosen destination.
    pub(crate) fn decide_again(&mut self, chosen: impl Fn(&Departure) -> bool) {
        let mut again = VecDeque::new();
        self.waiting.take(chosen, |frame| again.push_back(frame));
        for frame in &again {
            self.held[frame.handle.0 as usize] = None;
        }
        self.outbound.reswitched_packets += again.len() as u64;
        again.append(&mut self.backlog);
        self.backlog = again;
        self.unfinished |= !self.backlog.is_empty();
    }

    /// Forgets fetched packets that wait, and the number of hidden packets, because the device is replaced.
    pub(crate) fn forget_waiting(&mut self) {
        let (undecided, decided) = self.waiting();
        self.outbound.gone_unswitched_packets += undecided;
        self.outbound.gone_switched_packets += decided;
        self.outbound.learn_gone_packets += self.learning_packets();
        self.learning = None;
        self.backlog.clear();
        let bound = self.waiting.bound();
        (self.waiting, self.unfinished, self.hidden) = (Waiting::default(), false, 0);
        self.waiting.set_bound(bound);
    }

    /// Packets of the guest that are held.
    pub(crate) fn held_packets(&self) -> u64 {
        u64::from(self.port.tx_capacity() - self.port.tx_free().min(self.port.tx_capacity()))
    }
}
