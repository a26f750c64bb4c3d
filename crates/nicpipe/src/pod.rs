//! One pod: packets to it, and packets that it returns.

use std::net::IpAddr;

use bifrost_plb::{self as plb, Balancer, Counters, Dispatch, Egress, Mode, Refused, TRAILER_LEN, Trailer};
use bifrost_tables::{HeavyHitters, LimiterConfig, Rate, TenantLimiter, TokenBucket};
use bifrost_wire::ethernet::{self, ethertype};
use bifrost_wire::{Mac, arp};

use crate::buffers::Buffers;
use crate::mutation::mutated;
use crate::parse::untagged;
use crate::reliable::{Delivery, Gate};
use crate::{Arrival, Class, ConfigError, Flow, Links, Place, PodConfig, PodCounters, Refusal, Reliable, Rules, look};

/// Sampling interval for the heaviest tenants, packets.
const SAMPLED: u64 = 64;

/// A ring of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ring {
    /// The ring of control traffic.
    Priority,
    /// The ring of a core.
    Core(u16),
}

/// The rings of one interface, towards the pod.
pub trait Rings {
    /// Whether a ring has room for a packet.
    fn has_room(&mut self, ring: Ring) -> bool;
    /// Writes a packet, in parts, to a ring that has room. False: it is too long for the pod's buffer.
    fn put(&mut self, ring: Ring, parts: &[&[u8]]) -> bool;
}

/// A frame that leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaving<'a> {
    /// The frame, in parts: before the tag, the tag, after it, and the payload. Any may be empty.
    pub parts: [&'a [u8]; 4],
}

/// The current time, and when a frame arrived on the wire.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    pub(crate) now: u64,
    pub(crate) at: u64,
}

/// How a frame arrived.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) times: Times,
    pub(crate) interface: usize,
    pub(crate) charged: Charged,
}

/// Whether a frame has been charged to its tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Charged {
    /// Not yet.
    No,
    /// By the transport, which offers it again if there is no room for it.
    Yes,
}

/// A packet that waits for its turn.
#[derive(Clone, Copy, Debug)]
struct Held {
    buffer: u32,
    len: u16,
    interface: u8,
}

/// One pod's part of the pipeline.
#[derive(Debug)]
pub struct Pod {
    pub(crate) config: PodConfig,
    balancer: Balancer<Held>,
    limiter: TenantLimiter,
    heavy: HeavyHitters,
    control: TokenBucket,
    held: Buffers,
    payloads: Buffers,
    payload_lens: Box<[u16]>,
    longest: usize,
    /// Interfaces that have a client.
    up: Vec<bool>,
    counters: PodCounters,
    reliable: Option<Box<Reliable>>,
}

impl Pod {
    /// Allocates all memory: a buffer for each entry of an order queue and for each payload slot. `longest`: maximum
    /// length of a frame, bytes.
    ///
    /// # Errors
    /// Invalid settings.
    pub fn new(config: PodConfig, longest: usize) -> Result<Self, ConfigError> {
        let name = || config.name.clone();
        if !(1..=4).contains(&config.interfaces.len()) {
            return Err(ConfigError::Interfaces(name(), config.interfaces.len()));
        }
        if let Some(mac) = config.mac.filter(|mac| !mac.is_unicast()) {
            return Err(ConfigError::NoStation(name(), mac));
        }
        Self::with(config, longest)
    }

    /// The placeholder for a removed pod: it has no interface, and hardly any memory.
    pub(crate) fn vacant() -> Result<Self, ConfigError> {
        let nothing = Rate { per_second: 1, burst: 1 };
        let config = PodConfig {
            name: String::new(),
            balancer: plb::Config {
                cores: 1,
                order_queues: 1,
                queue_entries: 16,
                payload_slots: 0,
                ..plb::Config::default()
            },
            interfaces: Vec::new(),
            mac: None,
            rules: Rules::default(),
            limiter: LimiterConfig::default(),
            control: nothing,
            header_only_from: None,
            reliable: None,
        };
        Self::with(config, 0)
    }

    /// Whether the pod was removed, and no other has its number yet.
    pub fn is_vacant(&self) -> bool {
        self.config.interfaces.is_empty()
    }

    fn with(config: PodConfig, longest: usize) -> Result<Self, ConfigError> {
        let name = || config.name.clone();
        if config.header_only_from.is_some() && config.balancer.payload_slots == 0 {
            return Err(ConfigError::PayloadSlots(name()));
        }
        let balancer = Balancer::new(config.balancer).map_err(|e| ConfigError::Balancer(name(), e))?;
        let plb::Config { order_queues, queue_entries, payload_slots, .. } = config.balancer;
        // Held packets have entries; one more is being processed.
        let places = u32::from(order_queues) * queue_entries + 1;
        let reliable = config.reliable.as_ref().map(|settings| Reliable::new(settings.clone(), longest)).transpose();
        Ok(Pod {
            reliable: reliable.map_err(|error| ConfigError::Reliable(name(), error))?.map(Box::new),
            balancer,
            limiter: TenantLimiter::new(config.limiter),
            heavy: HeavyHitters::default(),
            control: TokenBucket::new(config.control.per_second, config.control.burst),
            held: Buffers::new(places, longest + TRAILER_LEN),
            payloads: Buffers::new(payload_slots, longest),
            payload_lens: vec![0; payload_slots as usize].into(),
            longest,
            up: vec![false; config.interfaces.len()],
            counters: PodCounters::default(),
            config,
        })
    }

    /// Number of its interfaces.
    pub fn interfaces(&self) -> usize {
        self.config.interfaces.len()
    }

    /// Its settings.
    pub fn config(&self) -> &PodConfig {
        &self.config
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// The counters.
    pub fn counters(&self) -> &PodCounters {
        &self.counters
    }

    /// The counters of its order queues.
    pub fn order_counters(&self) -> &Counters {
        self.balancer.counters()
    }

    /// Entries in use in its order queues, and returned packets held in them.
    pub fn occupancy(&self) -> (u32, u32) {
        self.balancer.occupancy()
    }

    /// For each order queue: entries, entries in use, and returned packets held in them.
    pub fn queues(&self) -> impl Iterator<Item = (u32, u32, u32)> + '_ {
        self.balancer.queues().map(|(in_use, held)| (self.config.balancer.queue_entries, in_use, held))
    }

    pub(crate) fn order_queue(&self, flow_hash: u32) -> u8 {
        self.balancer.order_queue(flow_hash)
    }

    pub(crate) fn core_of_flow(&self, flow_hash: u32) -> u16 {
        self.balancer.core_of_flow(flow_hash)
    }

    /// The heaviest tenants, without control traffic.
    pub fn heavy(&self) -> &HeavyHitters {
        &self.heavy
    }

    /// Its limiter.
    pub fn limiter(&self) -> &TenantLimiter {
        &self.limiter
    }

    /// Its limiter, to exempt tenants or limit them early.
    pub fn limiter_mut(&mut self) -> &mut TenantLimiter {
        &mut self.limiter
    }

    /// Changes how its packets are spread, without reordering a flow.
    pub fn set_mode(&mut self, now: u64, mode: Mode) {
        self.balancer.set_mode(now, mode);
    }

    /// How its packets are spread, and whether all of them already are.
    pub fn mode(&self, now: u64) -> (Mode, bool) {
        (self.balancer.mode(), self.balancer.is_settled(now))
    }

    /// Sets whether an interface has a client. Without any client the pod is down: waiting packets are dropped.
    pub fn set_up(&mut self, interface: usize, up: bool) {
        if let Some(state) = self.up.get_mut(interface) {
            *state = up;
        }
        if !self.up.contains(&true) && !mutated!(DownPodKeepsPlaces) {
            let held = &mut self.held;
            self.balancer.clear(|egress| {
                let (Egress::Send { packet, .. } | Egress::Drop { packet, .. }) = egress;
                held.give(packet.buffer);
            });
        }
    }

    /// Whether an interface has a client.
    pub fn is_up(&self, interface: usize) -> bool {
        self.up.get(interface).copied().unwrap_or(false)
    }

    /// When to call [`release`](Self::release) or [`Pipeline::settle`](crate::Pipeline::settle) next if nothing returns
    /// until then.
    pub fn deadline(&self) -> Option<u64> {
        let reliable = self.reliable.as_ref().and_then(|reliable| reliable.deadline());
        [self.balancer.deadline(), reliable].into_iter().flatten().min()
    }

    /// The reliable transport with hosts.
    pub fn reliable(&self) -> Option<&Reliable> {
        self.reliable.as_deref()
    }

    /// Whether the transport takes a frame that arrived at an interface.
    #[inline]
    pub(crate) fn arrive_reliable(
        &mut self,
        times: Times,
        seed: u64,
        interface: usize,
        arrival: &Arrival,
        frame: &[u8],
    ) -> bool {
        let Pod { reliable: Some(reliable), limiter, heavy, counters, up, .. } = self else { return false };
        let is_up = up.get(interface).copied().unwrap_or(false);
        let mut gate = |vni: u32| {
            if !is_up {
                return Gate::Closed;
            }
            counters.arrived_packets += 1;
            let tenant = Arrival { vni: Some(vni), ..*arrival }.tenant(seed);
            if counters.arrived_packets.is_multiple_of(SAMPLED) {
                heavy.sample(tenant);
            }
            if limiter.admit(times.at, tenant, 1).passes {
                return Gate::Open;
            }
            counters.refused_limited_packets += 1;
            Gate::Limited
        };
        reliable.arrive(times, interface, arrival, frame, &mut gate)
    }

    /// Runs the transport, and delivers received frames to the pod.
    pub(crate) fn settle(&mut self, now: u64, seed: u64, number: usize, links: &mut impl Links) {
        let Some(mut reliable) = self.reliable.take() else { return };
        reliable.settle(now, |interface, frame| {
            let Some(arrival) = look(frame) else { return Delivery::Dropped };
            let entry = Entry { times: Times { now, at: now }, interface, charged: Charged::Yes };
            match self.arrive(entry, seed, &arrival, frame, &mut links.rings(Place { pod: number, interface })) {
                Ok(_) => Delivery::Taken,
                Err(Refusal::RingFull | Refusal::QueueFull) => Delivery::NoRoom,
                Err(_) => Delivery::Dropped,
            }
        });
        self.reliable = Some(reliable);
    }

    /// Passes `sink` the frames that the transport sends.
    pub(crate) fn emit(&mut self, sink: impl FnMut(&[&[u8]])) {
        if let Some(reliable) = &mut self.reliable {
            reliable.emit(sink);
        }
    }

    /// Classifies, limits and dispatches a frame that arrived at an interface.
    pub(crate) fn arrive(
        &mut self,
        Entry { times: Times { now, at }, interface, charged }: Entry,
        seed: u64,
        arrival: &Arrival,
        frame: &[u8],
        rings: &mut impl Rings,
    ) -> Result<Ring, Refusal> {
        let is_charged = charged == Charged::Yes;
        self.counters.arrived_packets += u64::from(!is_charged);
        if !self.is_up(interface) {
            self.counters.refused_pod_down_packets += 1;
            return Err(Refusal::PodDown);
        }
        if frame.len() > self.longest && !mutated!(LengthUnchecked) {
            self.counters.refused_too_long_packets += 1;
            return Err(Refusal::TooLong);
        }
        let tagged = self.config.interfaces[interface].is_some() && !mutated!(TagNotRemoved);
        let class = self.config.rules.class(arrival, frame);
        if class == Class::Priority && !mutated!(ControlWithData) {
            return self.arrive_priority(at, tagged, arrival, frame, rings);
        }
        if !is_charged {
            let tenant = arrival.tenant(seed);
            if self.counters.arrived_packets.is_multiple_of(SAMPLED) {
                self.heavy.sample(tenant);
            }
            let at = if mutated!(LimitedByClock) { now } else { at };
            if !self.limiter.admit(at, tenant, 1).passes && !mutated!(LimiterSkipped) {
                self.counters.refused_limited_packets += 1;
                return Err(Refusal::Limited);
            }
        }
        // The inner headers are parsed only for packets that pass the limiter.
        let Flow { hash, headers, fragment } = arrival.flow(frame, seed);
        let class = if fragment && !mutated!(FragmentsSprayed) { Class::Rss } else { class };
        let headers = headers.unwrap_or(arrival.end);
        let payload = arrival.end.saturating_sub(headers);
        let header_only =
            payload > 0 && self.config.header_only_from.is_some_and(|least| payload >= usize::from(least));
        let dispatch = match self.dispatch(now, class, hash, header_only, rings) {
            Err(Refused::NoPayloadSlot) => self.dispatch(now, class, hash, false, rings),
            result => result,
        };
        let Dispatch { core, trailer } = dispatch.map_err(|refused| {
            let (counter, refusal) = match refused {
                Refused::QueueFull => (&mut self.counters.refused_queue_full_packets, Refusal::QueueFull),
                _ => (&mut self.counters.refused_ring_full_packets, Refusal::RingFull),
            };
            *counter += u64::from(!is_charged);
            refusal
        })?;
        let end = if trailer.payload.is_some() { headers } else { arrival.end };
        let [macs, rest] = untagged(frame, tagged, end);
        let ring = Ring::Core(core);
        if !rings.put(ring, &[macs, rest, &trailer.emit()]) {
            self.counters.refused_too_long_packets += 1;
            // Its entry is released as if the pod had dropped it.
            self.drop_place(trailer);
            return Err(Refusal::TooLong);
        }
        if let Some(slot) = trailer.payload {
            self.payloads.get_mut(slot)[..payload].copy_from_slice(&frame[headers..arrival.end]);
            self.payload_lens[slot as usize] = if mutated!(PayloadLengthLost) { 0 } else { payload as u16 };
            self.counters.delivered_header_only_packets += 1;
        }
        self.counters.delivered_packets += 1;
        Ok(ring)
    }

    #[inline]
    fn dispatch(
        &mut self,
        now: u64,
        class: Class,
        flow_hash: u32,
        header_only: bool,
        rings: &mut impl Rings,
    ) -> Result<Dispatch, Refused> {
        let mut has_room = |core| rings.has_room(Ring::Core(core)) || mutated!(RoomUnchecked);
        if class == Class::Plb {
            return self.balancer.dispatch_where(now, flow_hash, header_only, has_room);
        }
        let dispatch = self.balancer.dispatch_by_flow(flow_hash, header_only)?;
        // The next packet that needs a payload slot takes an unordered one.
        if has_room(dispatch.core) { Ok(dispatch) } else { Err(Refused::NoRoom) }
    }

    fn arrive_priority(
        &mut self,
        at: u64,
        tagged: bool,
        arrival: &Arrival,
        frame: &[u8],
        rings: &mut impl Rings,
    ) -> Result<Ring, Refusal> {
        if !self.control.take(at, 1) && !mutated!(ControlUnlimited) {
            self.counters.refused_control_rate_packets += 1;
            return Err(Refusal::ControlRate);
        }
        if !rings.has_room(Ring::Priority) {
            self.counters.refused_ring_full_packets += 1;
            return Err(Refusal::RingFull);
        }
        let pod = self.config.balancer.pod;
        let trailer = Trailer { psn: 0, payload: None, pod, queue: 0, drop: false, unordered: true };
        let [macs, rest] = untagged(frame, tagged, arrival.end);
        if !rings.put(Ring::Priority, &[macs, rest, &trailer.emit()]) {
            self.counters.refused_too_long_packets += 1;
            return Err(Refusal::TooLong);
        }
        self.counters.delivered_priority_packets += 1;
        Ok(Ring::Priority)
    }

    #[cold]
    fn drop_place(&mut self, trailer: Trailer) {
        if mutated!(PlaceKept) {
            return;
        }
        let held = Held { buffer: u32::MAX, len: 0, interface: 0 };
        let trailer = Trailer { drop: true, ..trailer };
        let _ = self.balancer.returned(trailer.emit(), held);
    }

    /// The legal check: takes one packet that the pod returned on a ring of `interface`. `read` copies it, with its
    /// trailer, and returns its length; it must copy the pod's memory once. A packet without an entry leaves at once,
    /// through `sink`.
    #[inline]
    pub fn take_back<B>(
        &mut self,
        interface: usize,
        read: impl FnOnce(&mut [u8]) -> Option<Result<usize, B>>,
        sink: impl FnMut(Leaving<'_>),
    ) -> bool {
        // There are more buffers than entries.
        let Some(buffer) = self.held.take() else { return false };
        let bytes = self.held.get_mut(buffer);
        let len = match read(bytes) {
            None => {
                self.held.give(buffer);
                return false;
            }
            Some(Ok(len)) if len >= TRAILER_LEN => len,
            Some(_) => {
                self.counters.returned_packets += 1;
                self.counters.returned_bad_packets += 1;
                self.held.give(buffer);
                return true;
            }
        };
        self.counters.returned_packets += 1;
        let (packet_len, mut trailer) = (len - TRAILER_LEN, [0; TRAILER_LEN]);
        trailer.copy_from_slice(&bytes[packet_len..len]);
        // Only Ethernet frames may leave; a dropped packet may be empty.
        let bad = if packet_len < ethernet::HEADER_LEN && !mutated!(ShortFramesLeave) {
            Some(&mut self.counters.returned_bad_packets)
        } else {
            let spoofed =
                |mac| !is_own(&bytes[..packet_len], mac, &self.config.rules.own) && !mutated!(SourceUnchecked);
            self.config.mac.is_some_and(spoofed).then_some(&mut self.counters.returned_wrong_address_packets)
        };
        if let Some(counter) = bad
            && let Ok(parsed) = Trailer::parse(trailer)
            && !parsed.drop
        {
            *counter += 1;
            trailer = Trailer { drop: true, ..parsed }.emit();
        }
        let held = Held { buffer, len: packet_len as u16, interface: interface as u8 };
        if let Some(egress) = self.balancer.returned(trailer, held) {
            self.leave(egress, sink);
        }
        true
    }

    /// The reorder check: passes `sink` the frames that may leave now.
    #[inline]
    pub fn release(&mut self, now: u64, limit: u32, mut sink: impl FnMut(Leaving<'_>)) -> u32 {
        let Pod { balancer, held, payloads, payload_lens, counters, config, reliable, .. } = self;
        let mut sink = leave_through(reliable, &mut sink);
        balancer.release(now, limit, |egress| {
            deparse(egress, held, payloads, payload_lens, counters, &config.interfaces, &mut sink);
        })
    }

    fn leave(&mut self, egress: Egress<Held>, mut sink: impl FnMut(Leaving<'_>)) {
        let Pod { held, payloads, payload_lens, counters, config, reliable, .. } = self;
        let mut sink = leave_through(reliable, &mut sink);
        deparse(egress, held, payloads, payload_lens, counters, &config.interfaces, &mut sink);
    }

    #[cfg(test)]
    pub(crate) fn free_buffers(&self) -> usize {
        self.held.free()
    }
}

/// Whether a frame of a shared VLAN really comes from its pod: its source is `mac`, and an ARP sender is one of the
/// addresses `own` with that MAC address. Otherwise the switch would learn a wrong port for another pod. A second tag
/// would lead to another VLAN.
#[inline]
fn is_own(frame: &[u8], mac: Mac, own: &[IpAddr]) -> bool {
    let (Some(source), Some(kind)) = (frame.get(6..12), frame.get(12..14)) else { return false };
    match u16::from_be_bytes([kind[0], kind[1]]) {
        _ if source != mac.0 => false,
        ethertype::VLAN | ethertype::SERVICE_VLAN => false,
        ethertype::ARP => {
            let packet = arp::Packet::parse(frame.get(ethernet::HEADER_LEN..).unwrap_or_default());
            packet.is_ok_and(|arp| arp.sender_mac == mac && own.contains(&IpAddr::V4(arp.sender_ip)))
        }
        _ => true,
    }
}

/// Frames that the transport does not take leave unchanged.
#[inline]
fn leave_through<'a>(
    reliable: &'a mut Option<Box<Reliable>>,
    sink: &'a mut impl FnMut(Leaving<'_>),
) -> impl FnMut(Leaving<'_>) + 'a {
    move |leaving| {
        if !reliable.as_mut().is_some_and(|reliable| reliable.depart(&leaving)) {
            sink(leaving);
        }
    }
}

/// Joins header and payload, and restores the tag.
#[inline]
fn deparse(
    egress: Egress<Held>,
    held: &mut Buffers,
    payloads: &Buffers,
    payload_lens: &[u16],
    counters: &mut PodCounters,
    interfaces: &[Option<u16>],
    sink: &mut impl FnMut(Leaving<'_>),
) {
    let (Egress::Send { packet, .. } | Egress::Drop { packet, .. }) = egress;
    // A packet without a buffer returns none.
    if packet.buffer == u32::MAX {
        return;
    }
    if let Egress::Send { payload, .. } = egress {
        let frame = &held.get(packet.buffer)[..usize::from(packet.len)];
        let payload = payload.map_or(&[][..], |slot| {
            let len = payload_lens.get(slot as usize).copied().unwrap_or(0);
            &payloads.get(slot)[..usize::from(len)]
        });
        let (macs, rest) = frame.split_at(frame.len().min(12));
        let vlan =
            interfaces.get(usize::from(packet.interface)).copied().flatten().filter(|_| !mutated!(TagNotRestored));
        let tag = vlan.map(|vlan| {
            let [a, b] = vlan.to_be_bytes();
            [0x81, 0, a, b]
        });
        counters.sent_packets += 1;
        sink(Leaving { parts: [macs, tag.as_ref().map_or(&[][..], |tag| tag), rest, payload] });
    }
    if !mutated!(BufferLeak) {
        held.give(packet.buffer);
    }
}
