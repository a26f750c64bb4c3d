//! The world: hosts, the packets between them, and time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::net::{IpAddr, Ipv6Addr};

use bifrost_rnic::{Burst, Config, Nic, Qpn, Route, Transport};
use bifrost_wire::roce::Opcode;

use super::fabric::{Counts, Fabric, Topology};
use super::hops::{End, Hops};
use super::machine::{Device, Machine, MachineCounts};
use crate::Rng;

/// Overhead of a UDP payload, bytes: Ethernet with preamble, FCS and gap, IPv6, UDP.
pub const AROUND: usize = 38 + 40 + 8;

/// Number of turns of a host at one time after which the host is considered to loop endlessly.
const TURNS_MAX: u32 = 1 << 16;

/// A host.
pub trait Node {
    /// Its NIC.
    fn nic(&mut self) -> &mut Nic;
    /// Polls completions, runs timers and the application. Returns whether there was work to do.
    fn turn(&mut self, now_ns: u64) -> bool;
    /// When it needs its next turn, ns; `u64::MAX`: only when a packet arrives.
    fn next_deadline(&mut self, now_ns: u64) -> u64;
    /// A packet for this queue pair arrived with a switch's congestion mark.
    fn on_mark(&mut self, now_ns: u64, queue_pair: Qpn) {
        let _ = (now_ns, queue_pair);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A host is due.
    Turn(u32),
    /// A packet has reached the end of its link.
    Arrive(u32),
    /// A port of a switch has sent its packet.
    Sent(u32),
    /// The first packet in a NIC's receive buffer is in memory.
    Written(u32),
    /// A transmitter is paused or resumed.
    Pause(u32, bool),
}

#[derive(Debug)]
struct Packet {
    route: Route,
    bytes: Vec<u8>,
    from: u32,
    to: u32,
    /// The link of its arrival at the current switch or host.
    link: u32,
    /// It was delayed, or is a second copy: no further fault applies.
    late: bool,
    marked: bool,
    /// It is in the class of acknowledgements, which overtake data and are not paused. Later corruption does not change
    /// that.
    urgent: bool,
}

/// A host.
#[derive(Debug)]
struct Station<N> {
    node: N,
    device: Device,
    /// When the host's link is free again, ns.
    wire_free: u64,
    /// The next turn in the event queue, ns.
    turn_at: u64,
    /// Its link is down.
    down: bool,
    /// Its process is paused until then, ns; its NIC is not.
    stalled_until: u64,
}

/// A world.
#[derive(Debug)]
pub struct RdmaWorld<N> {
    /// Virtual time, ns.
    pub now: u64,
    /// The fabric's counters.
    pub counts: Counts,
    /// Number of events after which the world stops.
    pub most_events: u64,
    fabric: Fabric,
    hops: Hops,
    stations: Vec<Station<N>>,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    scheduled: u64,
    packets: Vec<Packet>,
    free: Vec<u32>,
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
    /// A world of these hosts, each with the NIC of its [index](nic), around one switch.
    pub fn new(fabric: Fabric, nodes: Vec<N>, seed: u64) -> Self {
        Self::with_topology(fabric, &Topology::Star, nodes, seed)
    }

    /// A world of these hosts, each with the NIC of its [index](nic).
    pub fn with_topology(fabric: Fabric, topology: &Topology, nodes: Vec<N>, seed: u64) -> Self {
        let hops = Hops::new(nodes.len(), topology);
        let stations = nodes.into_iter().map(|node| Station {
            node,
            device: Device::new(Machine::default()),
            wire_free: 0,
            turn_at: u64::MAX,
            down: false,
            stalled_until: 0,
        });
        let mut world = RdmaWorld {
            now: 0,
            counts: Counts::default(),
            most_events: u64::MAX,
            fabric,
            hops,
            stations: stations.collect(),
            events: BinaryHeap::new(),
            scheduled: 0,
            packets: Vec::new(),
            free: Vec::new(),
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

    /// A host, mutable. It gets a turn as soon as time advances.
    pub fn node_mut(&mut self, index: usize) -> &mut N {
        self.turn_by(index as u32, self.now);
        &mut self.stations[index].node
    }

    /// Changes the fabric from now on.
    pub fn set_fabric(&mut self, fabric: Fabric) {
        self.fabric = fabric;
    }

    /// The current fabric.
    pub fn fabric(&self) -> &Fabric {
        &self.fabric
    }

    /// Takes a host's link down, or up again. Packets in flight on it are lost.
    pub fn set_link(&mut self, index: usize, up: bool) {
        self.stations[index].down = !up;
    }

    /// Pauses a host's process until `until`, ns, while its NIC sends and receives.
    pub fn stall(&mut self, index: usize, until: u64) {
        self.stations[index].stalled_until = until;
    }

    /// Sets the cost model of a host, before anything is sent.
    pub fn set_machine(&mut self, index: usize, machine: Machine) {
        self.stations[index].device = Device::new(machine);
    }

    /// Changes the PCIe rate of a host, bits per second. At 0 its NIC writes nothing to memory.
    pub fn set_pcie_rate(&mut self, index: usize, rate: f64) {
        self.stations[index].device.machine.pcie_rate = rate;
        self.write_next(index as u32);
    }

    /// Counters of a host's model.
    pub fn machine_counts(&self, index: usize) -> MachineCounts {
        self.stations[index].device.counts
    }

    /// How long a host's NIC, and the switch port towards the host, have been paused, ns.
    pub fn paused_ns(&self, index: usize) -> (u64, u64) {
        let port = self.hops.port_to(index as u32) as usize;
        (self.hops.links[index].paused_ns(self.now), self.hops.links[port].paused_ns(self.now))
    }

    /// Maximum queue length of the port towards a host since the last call, bytes.
    pub fn take_queue_bytes_max(&mut self, index: usize) -> u64 {
        let port = self.hops.port_to(index as u32) as usize;
        std::mem::take(&mut self.hops.links[port].queue_bytes_max)
    }

    /// Number of events so far.
    pub fn events(&self) -> u64 {
        self.scheduled
    }

    /// Advances time to `until`, ns.
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
            Event::Arrive(packet) => match self.hops.links[self.packets[packet as usize].link as usize].to {
                End::Switch(switch) => self.enter(switch, packet),
                End::Host(host) => self.reach(host, packet),
            },
            Event::Sent(port) => self.sent(port),
            Event::Written(host) => self.written(host),
            Event::Pause(link, paused) => {
                self.hops.links[link as usize].pause(self.now, paused);
                match self.stations.get_mut(link as usize) {
                    Some(station) => {
                        station.node.nic().set_paused(paused);
                        self.turn(link);
                    }
                    None => self.send_next(link),
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
            let mut busy = station.stalled_until.max(station.device.busy_until) <= now && station.node.turn(now);
            if station.device.machine.operation_ns > 0 {
                let counters = station.node.nic().counters();
                let operations = counters.posted_requests + counters.polled_completions;
                station.device.charge(now, operations);
                busy &= station.device.busy_until <= now;
            }
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
        let busy_until = station.stalled_until.max(station.device.busy_until);
        let own = if busy_until > now { busy_until } else { station.node.next_deadline(now) };
        let mut next = own.min(station.node.nic().next_deadline(now));
        if station.node.nic().has_packets() {
            next = next.min(station.wire_free);
        }
        if next < u64::MAX {
            self.turn_by(index, next.max(now + 1));
        }
    }

    /// The NIC sends while the wire is free. Other packets wait in the NIC.
    fn transmit(&mut self, index: u32) {
        loop {
            let station = &mut self.stations[index as usize];
            if station.wire_free > self.now || !station.node.nic().has_packets() {
                return;
            }
            self.burst.clear();
            if station.node.nic().transmit(self.now, 1, &mut self.burst) == 0 {
                return;
            }
            let Some(outgoing) = self.burst.packets().first().copied() else { return };
            let payload = self.burst.payload(&outgoing);
            let to = index_of(outgoing.route.destination);
            let key = 1 << 63 | u64::from(to) << 24 | destination_of(payload);
            let ready = station.device.read(self.now, payload.len() as u64, key);
            station.wire_free = ready + wire_ns(payload.len(), self.fabric.rate);
            let at = station.wire_free + station.device.machine.dma_ns + self.fabric.delay_ns / 2;
            let packet = self.free.pop().unwrap_or_else(|| new_packet(&mut self.packets, outgoing.route));
            let slot = &mut self.packets[packet as usize];
            slot.route = outgoing.route;
            (slot.from, slot.to, slot.link) = (index, to, index);
            (slot.late, slot.marked, slot.urgent) = (false, false, is_datagram(payload));
            slot.bytes.clear();
            slot.bytes.extend_from_slice(payload);
            self.schedule(at, Event::Arrive(packet));
        }
    }

    /// A packet arrives at a switch.
    fn enter(&mut self, switch: u32, packet: u32) {
        let Packet { route, bytes, from, to, late, link, urgent, .. } = &self.packets[packet as usize];
        let (len, from, to, urgent) = ((bytes.len() + AROUND) as u64, *from, *to, *urgent);
        let (path, late, link) = (path_of(route), *late, *link as usize);
        let is_first = link < self.stations.len();
        self.counts.sent_packets += u64::from(is_first && !late);
        let is_down = |host: u32| self.stations[host as usize].down;
        let dropped = if to as usize >= self.stations.len() {
            Some(&mut self.counts.stray_packets)
        } else if is_first && (is_down(from) || is_down(to) || self.fabric.trouble.dead_paths >> (path & 7) & 1 == 1) {
            Some(&mut self.counts.link_down_packets)
        } else if is_first && !late && self.rng.chance(self.fabric.loss) {
            Some(&mut self.counts.damaged_packets)
        } else if self.hops.buffered_bytes[switch as usize] + len > self.fabric.buffer_bytes {
            Some(&mut self.counts.dropped_packets)
        } else {
            None
        };
        if let Some(count) = dropped {
            *count += 1;
            self.free.push(packet);
            return;
        }
        if is_first && !late && self.meet_trouble(packet) {
            return;
        }
        let buffered = &mut self.hops.buffered_bytes[switch as usize];
        *buffered += len;
        self.counts.queue_bytes_max = self.counts.queue_bytes_max.max(*buffered);
        if !urgent {
            self.take_in(link, len);
        }
        // The lowest three bits of the hash are the path in `dead_paths`. The others select the spine (ECMP).
        let port = self.hops.port(switch, to, path >> 3);
        let queue = &mut self.hops.links[port as usize];
        if let Some(mark) = self.fabric.mark.filter(|_| !urgent) {
            let marked = self.rng.chance(mark.chance(queue.queue_bytes));
            self.counts.marked_packets += u64::from(marked);
            self.packets[packet as usize].marked |= marked;
        }
        queue.queue_bytes += len;
        queue.queue_bytes_max = queue.queue_bytes_max.max(queue.queue_bytes);
        if urgent {
            queue.urgent.push_back(packet)
        } else {
            queue.waiting.push_back(packet)
        }
        self.send_next(port);
    }

    /// Adds data from a link to the buffer at its end, and pauses the link if necessary.
    fn take_in(&mut self, link: usize, len: u64) {
        let (link_at, pause) = (link as u32, self.fabric.pause);
        let link = &mut self.hops.links[link];
        link.inside_bytes += len;
        let Some(pause) = pause.filter(|pause| pause.between_switches || !link.is_between_switches()) else { return };
        let off = match link.to {
            End::Switch(_) => pause.off_bytes,
            End::Host(host) => self.stations[host as usize].device.machine.receive_buffer / 2,
        };
        if link.inside_bytes > off && !std::mem::replace(&mut link.told, true) {
            self.counts.pauses += 1;
            let at = self.now + link.delay_ns(self.fabric.delay_ns / 2);
            self.schedule(at, Event::Pause(link_at, true));
        }
    }

    /// Removes data from the buffer, and resumes the link if necessary.
    fn let_out(&mut self, link: usize, len: u64) {
        let link_at = link as u32;
        let link = &mut self.hops.links[link];
        link.inside_bytes -= len;
        let on = match (link.to, self.fabric.pause) {
            (_, None) => u64::MAX,
            (End::Switch(_), Some(pause)) => pause.on_bytes,
            (End::Host(host), Some(_)) => self.stations[host as usize].device.machine.receive_buffer / 4,
        };
        if link.told && link.inside_bytes < on {
            link.told = false;
            let at = self.now + link.delay_ns(self.fabric.delay_ns / 2);
            self.schedule(at, Event::Pause(link_at, false));
        }
    }

    fn send_next(&mut self, port: u32) {
        let link = &mut self.hops.links[port as usize];
        if link.sending.is_some() {
            return;
        }
        let Some(packet) = link.next() else { return };
        link.sending = Some(packet);
        let at = self.now + wire_ns(self.packets[packet as usize].bytes.len(), link.rate(self.fabric.rate));
        self.schedule(at, Event::Sent(port));
    }

    fn sent(&mut self, port: u32) {
        let link = &mut self.hops.links[port as usize];
        let (Some(packet), Some(switch)) = (link.sending.take(), link.from) else { return };
        let slot = &mut self.packets[packet as usize];
        let len = (slot.bytes.len() + AROUND) as u64;
        let (before, urgent) = (std::mem::replace(&mut slot.link, port), slot.urgent);
        link.queue_bytes -= len;
        let at = self.now + link.delay_ns(self.fabric.delay_ns / 2);
        self.hops.buffered_bytes[switch as usize] -= len;
        if !urgent {
            self.let_out(before as usize, len);
        }
        self.schedule(at, Event::Arrive(packet));
        self.send_next(port);
    }

    /// A packet arrives at its host's NIC.
    fn reach(&mut self, host: u32, packet: u32) {
        let station = &mut self.stations[host as usize];
        let Packet { bytes, link, urgent, .. } = &self.packets[packet as usize];
        let (len, urgent, link) = (bytes.len() as u64, *urgent, *link as usize);
        if station.down {
            self.counts.link_down_packets += 1;
            self.free.push(packet);
        } else if station.device.is_ideal() {
            self.deliver(host, packet);
        } else if station.device.arrived_bytes + len > station.device.machine.receive_buffer {
            self.counts.overrun_packets += 1;
            self.free.push(packet);
        } else {
            station.device.arrived_bytes += len;
            station.device.arrived.push_back(packet);
            if !urgent {
                self.take_in(link, len);
            }
            self.write_next(host);
        }
    }

    /// The NIC writes the next packet of its receive buffer to memory.
    fn write_next(&mut self, host: u32) {
        let device = &mut self.stations[host as usize].device;
        let Some(packet) = device.arrived.front().filter(|_| !device.is_writing) else { return };
        let bytes = &self.packets[*packet as usize].bytes;
        let key = u64::from(host) << 24 | destination_of(bytes);
        if let Some(ns) = device.write_ns(bytes.len() as u64, key) {
            device.is_writing = true;
            self.schedule(self.now + ns, Event::Written(host));
        }
    }

    fn written(&mut self, host: u32) {
        let device = &mut self.stations[host as usize].device;
        device.is_writing = false;
        let Some(packet) = device.arrived.pop_front() else { return };
        let Packet { bytes, link, urgent, .. } = &self.packets[packet as usize];
        let (len, urgent, link) = (bytes.len() as u64, *urgent, *link as usize);
        device.arrived_bytes -= len;
        if !urgent {
            self.let_out(link, len);
        }
        self.write_next(host);
        self.deliver(host, packet);
    }

    fn deliver(&mut self, host: u32, packet: u32) {
        let Packet { route, bytes, marked, .. } = &mut self.packets[packet as usize];
        let (marked, bytes) = (*marked, std::mem::take(bytes));
        let station = &mut self.stations[host as usize];
        station.node.nic().receive(self.now, route, &bytes);
        if marked {
            station.node.on_mark(self.now, Qpn::new(destination_of(&bytes) as u32));
        }
        self.packets[packet as usize].bytes = bytes;
        self.free.push(packet);
        self.turn(host);
    }

    /// Duplicates, damages or delays a packet; returns whether it is delayed.
    fn meet_trouble(&mut self, packet: u32) -> bool {
        let trouble = self.fabric.trouble;
        if self.rng.chance(trouble.duplicated) {
            let route = self.packets[packet as usize].route;
            let copy = self.free.pop().unwrap_or_else(|| new_packet(&mut self.packets, route));
            let mut bytes = std::mem::take(&mut self.packets[copy as usize].bytes);
            let original = &self.packets[packet as usize];
            bytes.clear();
            bytes.extend_from_slice(&original.bytes);
            let (from, to, link, urgent) = (original.from, original.to, original.link, original.urgent);
            self.packets[copy as usize] = Packet { route, bytes, from, to, link, late: true, marked: false, urgent };
            self.counts.duplicated_packets += 1;
            let at = self.now + self.rng.below(trouble.held_ns + 1);
            self.schedule(at, Event::Arrive(copy));
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
            self.schedule(at, Event::Arrive(packet));
        }
        held
    }
}

fn new_packet(packets: &mut Vec<Packet>, route: Route) -> u32 {
    packets.push(Packet {
        route,
        bytes: Vec::new(),
        from: 0,
        to: 0,
        link: 0,
        late: false,
        marked: false,
        urgent: false,
    });
    packets.len() as u32 - 1
}

/// Hash of a flow; the lowest three bits are one of eight paths.
fn path_of(route: &Route) -> u64 {
    let ends = u64::from(index_of(route.source)) << 32 | u64::from(index_of(route.destination));
    crate::mix(ends ^ u64::from(route.source_port) << 16)
}

/// Time that a UDP payload takes on the wire, ns.
fn wire_ns(len: usize, rate: f64) -> u64 {
    ((len + AROUND) as f64 * 8e9 / rate) as u64
}

/// The destination queue pair of a packet (IBTA 9.2).
fn destination_of(payload: &[u8]) -> u64 {
    payload.get(5..8).map_or(0, |number| number.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
}

/// Whether it is a packet of the datagram service: acknowledgements and credits, which the switch sends first.
fn is_datagram(payload: &[u8]) -> bool {
    payload
        .first()
        .is_some_and(|opcode| Opcode::from_byte(*opcode).is_some_and(|opcode| opcode.transport == Transport::Ud))
}
