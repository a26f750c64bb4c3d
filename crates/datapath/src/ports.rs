//! Guest ports as the data path knows them, and what it remembers of every packet a guest has handed over.

use std::collections::VecDeque;

use bifrost_avs::Rewrite;
use bifrost_nic::Segments;
use bifrost_nic::dscp::Marking;
use bifrost_port::{GuestPort, TxFrame};
use bifrost_rte::{Destination, Ordering, Time};
use bifrost_wire::{Mac, Vni};

use crate::budget::Budget;
use crate::contain::{PortFault, Strikes};
use crate::counters::OutboundCounters;
use crate::limits::Limits;
use crate::pressure::Load;
use crate::waiting::{Room, Waiting};
use crate::watchdog::Slowness;

/// A guest port to be added to a worker.
pub struct PortConfig<P> {
    /// Its number: the switch's `PortId`.
    pub owner: u16,
    /// Its network.
    pub vni: Vni,
    /// Its vNIC.
    pub mac: Mac,
    /// How its packets become visible.
    pub ordering: Ordering,
    /// Whether its network wants reliability.
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

/// What is remembered of a fetched packet until its last segment is released.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    pub(crate) segments: Segments,
    pub(crate) rewrite: Option<Rewrite>,
    pub(crate) flow: u32,
    /// DSCP of the outer header, and the frame's ECN codepoint.
    pub(crate) class: u8,
    /// Segments not yet released; 0: the buffer is the guest's.
    pub(crate) left: u16,
}

/// Where the switch sends a packet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Departure {
    pub(crate) vni: u32,
    /// The peer's number.
    pub(crate) peer: u16,
    /// How the transport knows the way; `None`: plain VXLAN.
    pub(crate) reliably: Option<Destination>,
}

/// One port of one worker.
pub(crate) struct Port<P> {
    pub(crate) owner: u16,
    pub(crate) vni: Vni,
    pub(crate) mac: Mac,
    pub(crate) ordering: Ordering,
    pub(crate) reliable: bool,
    pub(crate) port: P,
    /// By transmit handle, as far as they were ever used.
    pub(crate) held: Vec<Option<Held>>,
    /// Fetched packets that the switch has not been asked about, oldest first; bounded by the port's buffers.
    pub(crate) backlog: VecDeque<TxFrame>,
    /// Packets that it has decided about, and that wait for a window; bounded by the port's buffers.
    pub(crate) waiting: Waiting,
    /// Some of either wait for nothing but the next turn.
    pub(crate) unfinished: bool,
    /// Something may be waiting to be fetched.
    pub(crate) readable: bool,
    pub(crate) budget: Budget,
    /// Whether it is of use to know when there is something.
    pub(crate) watched: bool,
    /// Published since the last notification.
    pub(crate) dirty: bool,
    /// Completed since the guest was last told.
    pub(crate) completed: bool,
    pub(crate) failed: bool,
    /// The last fault that took it out of use.
    pub(crate) fault: Option<PortFault>,
    /// How often that was so.
    pub(crate) fault_times: u64,
    /// What it costs beyond what its packets need.
    pub(crate) slowness: Slowness,
    /// Panics that may be its doing.
    pub(crate) strikes: Strikes,
    /// The device that was behind it at the last fault, until it gets another one: to be dropped elsewhere.
    pub(crate) broken: Option<P>,
    /// What became of its packets.
    pub(crate) outbound: OutboundCounters,
    pub(crate) tx_packets: u64,
    pub(crate) tx_bytes: u64,
    pub(crate) rx_packets: u64,
    pub(crate) rx_bytes: u64,
    /// Packets placed, and not published yet.
    pub(crate) hidden: u32,
    pub(crate) limits: Limits,
    /// The outer DSCP of what the guest sends.
    pub(crate) marking: Marking,
    /// Nothing is fetched before: the guest has sent what it may.
    pub(crate) held_back_until: Option<Time>,
    /// How often that was so.
    pub(crate) held_back: u64,
    /// Packets to the guest that were more than it may get.
    pub(crate) rate_limited: u64,
    /// What it was lately sent, while the worker cannot keep up.
    pub(crate) load: Load,
    /// Packets to the guest that were more than its share then.
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
            marking: Marking::default(),
            held_back_until: None,
            held_back: 0,
            rate_limited: 0,
            load: Load::default(),
            overload_dropped: 0,
        }
    }

    /// Whether half of the guest's buffers hold packets that it has not been shown.
    pub(crate) fn is_short(&self) -> bool {
        self.hidden >= self.port.rx_capacity() / 2
    }

    /// Whether there is room, while [short](Self::is_short), for a packet that waits for others and is `ahead` packets before the
    /// first missing one. The third quarter is for those that will be shown soon, the last one for those that are shown at
    /// once: without, packets could take all the room and what they wait for have none (PROTOCOL §7.1).
    pub(crate) fn may_wait(&self, ahead: u32) -> bool {
        let quarter = (self.port.rx_capacity() / 4).max(1);
        ahead <= quarter && self.hidden + quarter < self.port.rx_capacity()
    }

    /// Remembers a packet that the switch has decided about.
    #[inline]
    pub(crate) fn hold(&mut self, handle: u32, held: Held) {
        let place = handle as usize;
        if self.held.len() <= place {
            self.held.resize(place + 1, None);
        }
        self.held[place] = Some(held);
    }

    /// One segment of a buffer is done with; the last one gives the buffer back (delayed release).
    pub(crate) fn release(&mut self, handle: u32) {
        let Some(slot) = self.held.get_mut(handle as usize) else { return };
        let Some(held) = slot else { return };
        held.left = held.left.saturating_sub(1);
        if held.left == 0 {
            *slot = None;
            self.complete(bifrost_port::TxHandle(handle));
        }
    }

    /// The buffer goes back; the guest is told at the end of the turn.
    pub(crate) fn complete(&mut self, handle: bifrost_port::TxHandle) {
        self.port.complete(handle);
        self.completed = true;
    }

    /// Fetched packets that wait: those for which the switch has not decided, and those for which it has.
    pub(crate) fn waiting(&self) -> (u64, u64) {
        (self.backlog.len() as u64, self.waiting.packets() as u64)
    }

    /// Room for packets that wait for a window.
    pub(crate) fn room(&self) -> Room {
        let port = &self.port;
        Room { small_bytes: port.tx_small_bytes(), packets: port.tx_free(), large: port.tx_free_large() }
    }

    /// Until when the guest is stopped, for what it sends waits for a window.
    #[inline]
    pub(crate) fn held_until(&self, now: Time) -> Option<Time> {
        if self.waiting.is_empty() { None } else { self.waiting.held_until(now, self.room()) }
    }

    /// What waits for a chosen destination is to be decided about once more.
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

    /// Forgets what was fetched and waits, and how much is hidden: the device is another one from now on.
    pub(crate) fn forget_waiting(&mut self) {
        let (undecided, decided) = self.waiting();
        self.outbound.gone_unswitched_packets += undecided;
        self.outbound.gone_switched_packets += decided;
        self.backlog.clear();
        (self.waiting, self.unfinished, self.hidden) = (Waiting::default(), false, 0);
    }

    /// Packets of the guest that are held.
    pub(crate) fn held_packets(&self) -> u64 {
        u64::from(self.port.tx_capacity() - self.port.tx_free().min(self.port.tx_capacity()))
    }
}
