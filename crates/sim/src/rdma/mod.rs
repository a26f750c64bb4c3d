//! A second world: hosts with RDMA NICs around one switch, in virtual time.
//!
//! NICs are the software NIC itself (`bifrost-rnic`), and what runs above them is a [`Node`]: the message engine joined to
//! its NIC ([`MessageNode`]), or a baseline ([`PlainRc`], [`Uccl`]). Links and the switch are models. A seed decides
//! everything.

mod messages;
mod plain_rc;
pub mod swarm;
mod uccl;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::net::{IpAddr, Ipv6Addr};

use bifrost_rnic::{Burst, Config, Nic, Route, Transport};
use bifrost_wire::roce::Opcode;

use crate::Rng;

pub use messages::{Load, MessageNode, MessageOptions, connect};
pub use plain_rc::PlainRc;
pub use uccl::Uccl;

/// Bytes around a UDP payload: Ethernet with preamble, check sequence and gap, IPv6, UDP.
pub const AROUND: usize = 38 + 40 + 8;

/// Turns of a host at one time after which it is taken to have no end.
const TURNS_MAX: u32 = 1 << 16;

/// A host.
pub trait Node {
    /// Its NIC.
    fn nic(&mut self) -> &mut Nic;
    /// Looks at completions, runs timers and the application. Whether there was something to do.
    fn turn(&mut self, now_ns: u64) -> bool;
    /// When it is due, ns; `u64::MAX`: when a packet comes in.
    fn next_deadline(&mut self, now_ns: u64) -> u64;
}

/// Links and switch.
#[derive(Clone, Copy, Debug)]
pub struct Fabric {
    /// Of each link, bits a second.
    pub rate: f64,
    /// From host to host without queues, one way, ns.
    pub delay_ns: u64,
    /// Of the packets that enter the switch, the share that is damaged and dropped.
    pub loss: f64,
    /// Buffer of the switch, shared by all ports, bytes.
    pub buffer_bytes: u64,
    /// Priority flow control, if there is any.
    pub pause: Option<Pause>,
    /// What else goes wrong on the way.
    pub trouble: Trouble,
}

/// What goes wrong on the way, besides losses. Shares of the packets that enter the switch are 0..=1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Trouble {
    /// Arrive twice.
    pub duplicated: f64,
    /// Are held up, so that others overtake them.
    pub held: f64,
    /// Those held up, and second copies, are late by up to that, ns.
    pub held_ns: u64,
    /// Have one bit flipped, which the NIC's checksum finds.
    pub corrupted: f64,
    /// Which of eight paths lose everything: bit i is path i. Addresses and UDP source port choose the path.
    pub dead_paths: u8,
}

/// Priority flow control (IEEE 802.1Qbb): bytes of one sender in the switch above which it is paused, and below which it
/// goes on.
#[derive(Clone, Copy, Debug)]
pub struct Pause {
    /// Above, bytes.
    pub off_bytes: u64,
    /// Below, bytes.
    pub on_bytes: u64,
}

/// What the fabric has counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Packets that entered the switch.
    pub sent_packets: u64,
    /// Those that were damaged.
    pub damaged_packets: u64,
    /// Those that found no buffer.
    pub dropped_packets: u64,
    /// Those that were for no known host.
    pub stray_packets: u64,
    /// Those whose link or path was down.
    pub fragmented_packets: u64,
    /// Those that had a bit flipped.
    pub corrupted_packets: u64,
    /// Second copies.
    pub duplicated_packets: u64,
    /// Those that were held up.
    pub held_packets: u64,
    /// Most bytes in the buffer.
    pub queue_bytes_max: u64,
    /// Times that a sender was paused.
    pub pauses: u64,
    /// Times that a host had something to do without end while no time passed.
    pub livelocks: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A host is due.
    Turn(u32),
    /// A packet has come to the switch.
    Enter(u32),
    /// A port has sent its packet.
    Sent(u32),
    /// A packet has come to its host.
    Deliver(u32),
    /// A host is paused, or goes on.
    Pause(u32, bool),
}

#[derive(Debug)]
struct Packet {
    route: Route,
    bytes: Vec<u8>,
    from: u32,
    to: u32,
    /// It was held up, or is a second copy: nothing else happens to it.
    late: bool,
}

/// A host, its link and its port of the switch.
#[derive(Debug)]
struct Station<N> {
    node: N,
    /// When the host's link is free again, ns.
    wire_free: u64,
    /// The next turn that is in the queue of events, ns.
    turn_at: u64,
    paused: bool,
    /// Its link is down.
    down: bool,
    /// Its process stands still until then, ns; its NIC does not.
    stalled_until: u64,
    /// Bytes of this sender in the switch, and whether it was told to pause.
    inside_bytes: u64,
    told: bool,
    /// The port towards the host: control datagrams first.
    urgent: VecDeque<u32>,
    waiting: VecDeque<u32>,
    sending: Option<u32>,
}

/// A world.
#[derive(Debug)]
pub struct RdmaWorld<N> {
    /// Virtual time, ns.
    pub now: u64,
    /// What the fabric has counted.
    pub counts: Counts,
    /// Number of events after which the world stops.
    pub most_events: u64,
    fabric: Fabric,
    stations: Vec<Station<N>>,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    scheduled: u64,
    packets: Vec<Packet>,
    free: Vec<u32>,
    buffered_bytes: u64,
    burst: Burst,
    rng: Rng,
}

/// The NIC of host `index`.
pub fn nic(index: usize, seed: u64, queue_pairs: u32) -> Nic {
    let (high, low) = ((index >> 16) as u16, index as u16);
    let address = IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, high, low));
    let seed = crate::mix(seed ^ index as u64);
    Nic::new(Config { address, port: 4791, queue_pairs, regions: 65_536, seed })
}

fn index_of(address: IpAddr) -> u32 {
    match address {
        IpAddr::V6(v6) => u32::from(v6.segments()[6]) << 16 | u32::from(v6.segments()[7]),
        IpAddr::V4(_) => u32::MAX,
    }
}

impl<N: Node> RdmaWorld<N> {
    /// A world of these hosts, each with the NIC of its [index](nic).
    pub fn new(fabric: Fabric, nodes: Vec<N>, seed: u64) -> Self {
        let stations = nodes.into_iter().map(|node| Station {
            node,
            wire_free: 0,
            turn_at: u64::MAX,
            paused: false,
            down: false,
            stalled_until: 0,
            inside_bytes: 0,
            told: false,
            urgent: VecDeque::new(),
            waiting: VecDeque::new(),
            sending: None,
        });
        let mut world = RdmaWorld {
            now: 0,
            counts: Counts::default(),
            most_events: u64::MAX,
            fabric,
            stations: stations.collect(),
            events: BinaryHeap::new(),
            scheduled: 0,
            packets: Vec::new(),
            free: Vec::new(),
            buffered_bytes: 0,
            burst: Burst::new(),
            rng: Rng::new(crate::mix(seed)),
        };
        for index in 0..world.stations.len() as u32 {
            world.turn_by(index, 0);
        }
        world
    }

    /// A host.
    pub fn node(&self, index: usize) -> &N {
        &self.stations[index].node
    }

    /// A host, to be changed. It has a turn as soon as time goes on.
    pub fn node_mut(&mut self, index: usize) -> &mut N {
        self.turn_by(index as u32, self.now);
        &mut self.stations[index].node
    }

    /// Changes the fabric from now on.
    pub fn set_fabric(&mut self, fabric: Fabric) {
        self.fabric = fabric;
    }

    /// The fabric as it is.
    pub fn fabric(&self) -> &Fabric {
        &self.fabric
    }

    /// Takes a host's link down, or up again: what is on the way to it or from it is lost.
    pub fn set_link(&mut self, index: usize, up: bool) {
        self.stations[index].down = !up;
    }

    /// A host's process stands still until `until`, ns, while its NIC sends and receives.
    pub fn stall(&mut self, index: usize, until: u64) {
        self.stations[index].stalled_until = until;
    }

    /// Events so far.
    pub fn events(&self) -> u64 {
        self.scheduled
    }

    /// Lets time pass until `until`, ns.
    pub fn run_until(&mut self, until: u64) {
        while let Some(&Reverse((at, _, event))) = self.events.peek() {
            if at > until {
                break;
            }
            if self.scheduled > self.most_events {
                return;
            }
            self.events.pop();
            self.now = at;
            self.on_event(event);
        }
        self.now = until;
    }

    fn schedule(&mut self, at: u64, event: Event) {
        self.scheduled += 1;
        self.events.push(Reverse((at, self.scheduled, event)));
    }

    fn turn_by(&mut self, index: u32, at: u64) {
        let station = &mut self.stations[index as usize];
        if at < station.turn_at {
            station.turn_at = at;
            self.schedule(at, Event::Turn(index));
        }
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::Turn(index) => {
                let station = &mut self.stations[index as usize];
                if station.turn_at == self.now {
                    station.turn_at = u64::MAX;
                    self.turn(index);
                }
            }
            Event::Enter(packet) => self.enter(packet),
            Event::Sent(port) => self.sent(port),
            Event::Deliver(packet) => {
                let Packet { route, bytes, to, .. } = &mut self.packets[packet as usize];
                let (to, bytes) = (*to, std::mem::take(bytes));
                let station = &mut self.stations[to as usize];
                if station.down {
                    self.counts.fragmented_packets += 1;
                } else {
                    station.node.nic().receive(self.now, route, &bytes);
                }
                self.packets[packet as usize].bytes = bytes;
                self.free.push(packet);
                self.turn(to);
            }
            Event::Pause(index, paused) => {
                self.stations[index as usize].paused = paused;
                if !paused {
                    self.turn(index);
                }
            }
        }
    }

    fn turn(&mut self, index: u32) {
        let now = self.now;
        let mut turns = 0;
        loop {
            let station = &mut self.stations[index as usize];
            station.node.nic().advance(now);
            let busy = station.stalled_until <= now && station.node.turn(now);
            self.transmit(index);
            turns += 1;
            if !busy {
                break;
            }
            if turns == TURNS_MAX {
                self.counts.livelocks += 1;
                break;
            }
        }
        let station = &mut self.stations[index as usize];
        let stalled = station.stalled_until > now;
        let own = if stalled { station.stalled_until } else { station.node.next_deadline(now) };
        let mut next = own.min(station.node.nic().next_deadline(now));
        if station.node.nic().has_packets() && !station.paused {
            next = next.min(station.wire_free);
        }
        if next < u64::MAX {
            self.turn_by(index, next.max(now + 1));
        }
    }

    /// The NIC sends while the wire is free: what waits, waits in the NIC.
    fn transmit(&mut self, index: u32) {
        loop {
            let station = &mut self.stations[index as usize];
            if station.paused || station.wire_free > self.now || !station.node.nic().has_packets() {
                return;
            }
            self.burst.clear();
            if station.node.nic().transmit(self.now, 1, &mut self.burst) == 0 {
                return;
            }
            let Some(outgoing) = self.burst.packets().first().copied() else { return };
            let payload = self.burst.payload(&outgoing);
            station.wire_free = self.now + wire_ns(payload.len(), self.fabric.rate);
            let at = station.wire_free + self.fabric.delay_ns / 2;
            let packet = self.free.pop().unwrap_or_else(|| {
                self.packets.push(Packet { route: outgoing.route, bytes: Vec::new(), from: 0, to: 0, late: false });
                self.packets.len() as u32 - 1
            });
            let slot = &mut self.packets[packet as usize];
            slot.route = outgoing.route;
            slot.from = index;
            slot.to = index_of(outgoing.route.destination);
            slot.late = false;
            slot.bytes.clear();
            slot.bytes.extend_from_slice(payload);
            self.schedule(at, Event::Enter(packet));
        }
    }

    fn enter(&mut self, packet: u32) {
        let Packet { route, bytes, from, to, late } = &self.packets[packet as usize];
        let (len, from, to, urgent) = ((bytes.len() + AROUND) as u64, *from, *to, is_datagram(bytes));
        let (path, late) = (path_of(route), *late);
        self.counts.sent_packets += u64::from(!late);
        let is_down = |host: u32| self.stations[host as usize].down;
        let dropped = if to as usize >= self.stations.len() {
            Some(&mut self.counts.stray_packets)
        } else if is_down(from) || is_down(to) || self.fabric.trouble.dead_paths >> path & 1 == 1 {
            Some(&mut self.counts.fragmented_packets)
        } else if !late && self.rng.chance(self.fabric.loss) {
            Some(&mut self.counts.damaged_packets)
        } else if self.buffered_bytes + len > self.fabric.buffer_bytes {
            Some(&mut self.counts.dropped_packets)
        } else {
            None
        };
        if let Some(count) = dropped {
            *count += 1;
            self.free.push(packet);
            return;
        }
        if !late && self.meet_trouble(packet) {
            return;
        }
        self.buffered_bytes += len;
        self.counts.queue_bytes_max = self.counts.queue_bytes_max.max(self.buffered_bytes);
        let sender = &mut self.stations[from as usize];
        sender.inside_bytes += len;
        if let Some(pause) = self.fabric.pause
            && sender.inside_bytes > pause.off_bytes
            && !std::mem::replace(&mut sender.told, true)
        {
            self.counts.pauses += 1;
            self.schedule(self.now + self.fabric.delay_ns / 2, Event::Pause(from, true));
        }
        let port = &mut self.stations[to as usize];
        let queue = if urgent { &mut port.urgent } else { &mut port.waiting };
        queue.push_back(packet);
        self.send_next(to);
    }

    /// Duplicates, damages or holds up a packet; whether it is held up.
    fn meet_trouble(&mut self, packet: u32) -> bool {
        let trouble = self.fabric.trouble;
        if self.rng.chance(trouble.duplicated) {
            let copy = self.free.pop().unwrap_or_else(|| {
                let route = self.packets[packet as usize].route;
                self.packets.push(Packet { route, bytes: Vec::new(), from: 0, to: 0, late: true });
                self.packets.len() as u32 - 1
            });
            let mut bytes = std::mem::take(&mut self.packets[copy as usize].bytes);
            let original = &self.packets[packet as usize];
            bytes.clear();
            bytes.extend_from_slice(&original.bytes);
            let (route, from, to) = (original.route, original.from, original.to);
            self.packets[copy as usize] = Packet { route, bytes, from, to, late: true };
            self.counts.duplicated_packets += 1;
            let at = self.now + self.rng.below(trouble.held_ns + 1);
            self.schedule(at, Event::Enter(copy));
        }
        let slot = &mut self.packets[packet as usize];
        if self.rng.chance(trouble.corrupted) {
            let bit = self.rng.below(slot.bytes.len() as u64 * 8) as usize;
            slot.bytes[bit / 8] ^= 1 << (bit % 8);
            self.counts.corrupted_packets += 1;
        }
        let held = self.rng.chance(trouble.held);
        if held {
            slot.late = true;
            self.counts.held_packets += 1;
            let at = self.now + self.rng.below(trouble.held_ns + 1);
            self.schedule(at, Event::Enter(packet));
        }
        held
    }

    fn send_next(&mut self, port: u32) {
        let station = &mut self.stations[port as usize];
        if station.sending.is_some() {
            return;
        }
        let Some(packet) = station.urgent.pop_front().or_else(|| station.waiting.pop_front()) else { return };
        station.sending = Some(packet);
        let at = self.now + wire_ns(self.packets[packet as usize].bytes.len(), self.fabric.rate);
        self.schedule(at, Event::Sent(port));
    }

    fn sent(&mut self, port: u32) {
        let Some(packet) = self.stations[port as usize].sending.take() else { return };
        let Packet { bytes, from, .. } = &self.packets[packet as usize];
        let (len, from) = ((bytes.len() + AROUND) as u64, *from);
        self.buffered_bytes -= len;
        let sender = &mut self.stations[from as usize];
        sender.inside_bytes -= len;
        if sender.told && self.fabric.pause.is_none_or(|pause| sender.inside_bytes < pause.on_bytes) {
            sender.told = false;
            self.schedule(self.now + self.fabric.delay_ns / 2, Event::Pause(from, false));
        }
        self.schedule(self.now + self.fabric.delay_ns / 2, Event::Deliver(packet));
        self.send_next(port);
    }
}

/// Which of eight paths a packet takes.
fn path_of(route: &Route) -> u8 {
    let ends = u64::from(index_of(route.source)) << 32 | u64::from(index_of(route.destination));
    (crate::mix(ends ^ u64::from(route.source_port) << 16) & 7) as u8
}

/// Time of a UDP payload on the wire, ns.
fn wire_ns(len: usize, rate: f64) -> u64 {
    ((len + AROUND) as f64 * 8e9 / rate) as u64
}

/// A packet of the datagram service: acknowledgements and credits, which the switch sends first.
fn is_datagram(payload: &[u8]) -> bool {
    payload
        .first()
        .is_some_and(|opcode| Opcode::from_byte(*opcode).is_some_and(|opcode| opcode.transport == Transport::Ud))
}
