//! From hosts: verify, transport, flow order, deliver to the pod.

use bifrost_nic::{Checksum, ecn, parse, transport_checksum};
use bifrost_rte::{Arrival as Outer, LocalVnic, Ordering, Time, Verdict};
use bifrost_wire::bifrost::{self, DataHeader, Packet, SetupKind};
use bifrost_wire::protocol::UDP;
use bifrost_wire::{Mac, Vni, vxlan};

use super::outer::{self, Ends, Link};
use super::{Delivery, Gate, RECEIVE_WINDOW, Received, Reliable};
use crate::pod::Times;
use crate::{Arrival, HostCounters};

/// The port number of the gateway's vNICs in the engine: there is only one.
pub(super) const OWNER: u32 = 0;
/// One buffer in this many of a host is reserved for frames that do not wait for others.
const KEPT_FREE: u32 = 4;
/// Hop limit in packets of hosts.
const INITIAL_HOPS: u8 = 64;

/// A datagram of a host.
struct Inbound<'a> {
    host: u32,
    vni: Vni,
    interface: u8,
    outer: Outer,
    /// The ECN field of its IP header.
    ecn: u8,
    frame: &'a [u8],
    arrival: &'a Arrival,
}

impl Reliable {
    /// Takes a frame that arrived at an interface of the pod, if it belongs to the transport. `gate`: whether the pod
    /// accepts a frame of a VNI now; called once for each new frame.
    pub(crate) fn arrive(
        &mut self,
        times: Times,
        interface: usize,
        arrival: &Arrival,
        frame: &[u8],
        gate: &mut impl FnMut(u32) -> Gate,
    ) -> bool {
        let parsed = &arrival.outer;
        if parsed.protocol != UDP
            || parsed.dst_port != self.config.port
            || parsed.is_fragment()
            || !self.config.addresses.contains(&parsed.dst_ip)
        {
            return false;
        }
        self.now = self.now.max(Time(times.now));
        let Some(&(number, address)) = self.by_address.get(&parsed.src_ip) else {
            self.counters.unknown_host_datagrams += 1;
            return true;
        };
        let host = &mut self.hosts[number as usize];
        host.counters.rx_datagrams += 1;
        if transport_checksum(frame, parsed) == Checksum::Invalid {
            host.counters.bad_checksum_datagrams += 1;
            return true;
        }
        let Ok((vni, payload)) = vxlan::parse(arrival.payload(frame)) else {
            host.counters.bad_vxlan_datagrams += 1;
            return true;
        };
        if let Some(link) = Link::back_from(frame, parsed.vlan.is_some()) {
            host.learn(address, link);
        }
        let at = usize::from(parsed.l3) + if parsed.src_ip.is_ipv4() { 8 } else { 7 };
        let ecn = ecn::of(frame, parsed);
        let outer = Outer {
            peer: host.engine,
            vni: vni.get(),
            nic_rx: Time(times.at),
            hops: INITIAL_HOPS.saturating_sub(frame.get(at).copied().unwrap_or(INITIAL_HOPS)).min(15),
            marked: ecn == ecn::CE,
        };
        let inbound = Inbound { host: number, vni, interface: interface as u8, outer, ecn, frame, arrival };
        if let Some((header, inner)) = bifrost::parse_data_packet(payload) {
            self.on_data(&inbound, &header, inner, gate);
            return true;
        }
        match bifrost::parse(payload) {
            Ok(Packet::Bundle(bundle)) => {
                for packet in bundle.packets() {
                    match bifrost::parse(packet) {
                        Ok(packet) => self.on_packet(&inbound, packet, gate),
                        Err(_) => self.count(number).bad_packets += 1,
                    }
                }
            }
            Ok(packet) => self.on_packet(&inbound, packet, gate),
            Err(_) => self.count(number).bad_packets += 1,
        }
        true
    }

    fn on_packet(&mut self, inbound: &Inbound<'_>, packet: Packet<'_>, gate: &mut impl FnMut(u32) -> Gate) {
        let (now, from) = (self.now, &inbound.outer);
        match packet {
            Packet::Data(header, inner) => self.on_data(inbound, &header, inner, gate),
            Packet::Ack(ack) => self.engine.on_ack(now, from, &ack, &mut self.out),
            Packet::Probe(header) => self.engine.on_probe(now, from, &header, &mut self.out),
            Packet::Skip(header) => self.engine.on_skip(now, from, &header, &mut self.out),
            Packet::Reset(reset) => self.engine.on_reset(now, from, &reset, &mut self.out),
            Packet::Setup(setup) => {
                let is_ours = setup.to == self.config.mac && self.config.vnis.contains(&from.vni);
                if !is_ours && matches!(setup.kind, SetupKind::Request { .. }) {
                    self.counters.refused_requests += 1;
                }
                let vnic = is_ours.then_some(LocalVnic { owner: OWNER, ordering: Ordering::Flow, reliable: true });
                self.engine.on_setup(now, from, &setup, vnic, &mut self.out);
            }
            // Not in another bundle: its parser checks that.
            Packet::Bundle(_) => {}
        }
    }

    fn on_data(
        &mut self,
        inbound: &Inbound<'_>,
        header: &DataHeader,
        inner: &[u8],
        gate: &mut impl FnMut(u32) -> Gate,
    ) {
        let number = inbound.host;
        let Verdict::Place { slot, .. } = self.engine.on_data(self.now, &inbound.outer, header, &mut self.out) else {
            return;
        };
        let Ok(parsed) = parse(inner, inner.len()) else {
            self.count(number).malformed_frames += 1;
            return self.engine.policy_dropped(self.now, slot, &mut self.out);
        };
        if transport_checksum(inner, &parsed) == Checksum::Invalid {
            self.count(number).refused_damaged_frames += 1;
            return self.engine.damaged(slot);
        }
        // PROTOCOL §16.2: frames from one vNIC to the other, or routed by the host.
        let is_between = self.engine.pair_of(slot).is_some_and(|pair| {
            parsed.dst_mac == pair.local && (parsed.src_mac == pair.remote || parsed.src_mac == Mac::ROUTER)
        });
        if !is_between {
            self.count(number).wrong_address_frames += 1;
            return self.engine.policy_dropped(self.now, slot, &mut self.out);
        }
        let ahead = self.engine.must_wait(slot);
        // A frame that others wait for has room when they have used up theirs.
        let room = if ahead.is_some() { self.share - self.share / KEPT_FREE } else { self.share };
        let is_far = ahead.is_some_and(|ahead| ahead >= RECEIVE_WINDOW);
        if is_far || self.hosts[number as usize].held >= room {
            self.count(number).refused_no_memory_frames += 1;
            return self.engine.not_placed(slot);
        }
        let answer = if self.backlog.is_empty() { gate(inbound.vni.get()) } else { Gate::Closed };
        match answer {
            Gate::Open => {}
            Gate::Limited => {
                self.count(number).limited_frames += 1;
                return self.engine.policy_dropped(self.now, slot, &mut self.out);
            }
            Gate::Closed => {
                self.count(number).refused_no_ring_frames += 1;
                return self.engine.not_placed(slot);
            }
        }
        let Some(buffer) = self.rx.take() else {
            self.count(number).refused_no_memory_frames += 1;
            return self.engine.not_placed(slot);
        };
        let inner_ecn = ecn::of(inner, &parsed);
        // A mark on a packet whose sender is not ECN-capable is not lost: the host's transport responds to it (PROTOCOL
        // §13.2).
        let ecn = ecn::decapsulate(inner_ecn, inbound.ecn).unwrap_or(ecn::NOT_ECT);
        match self.write_plain(inbound, buffer, parsed.flow_hash, ecn, inner) {
            Some(len) if self.engine.placed(self.now, slot, buffer, &mut self.out) => {
                self.received[buffer as usize] = Received { host: number, len, interface: inbound.interface };
                let host = &mut self.hosts[number as usize];
                host.held += 1;
                host.counters.rx_frames += 1;
            }
            Some(_) => self.rx.give(buffer),
            None => {
                self.rx.give(buffer);
                self.count(number).malformed_frames += 1;
                self.engine.policy_dropped(self.now, slot, &mut self.out);
            }
        }
    }

    /// Writes a frame for the pod, as plain VXLAN from the host's tunnel endpoint, and returns its length.
    fn write_plain(&mut self, inbound: &Inbound<'_>, buffer: u32, flow: u32, ecn: u8, inner: &[u8]) -> Option<u16> {
        let parsed = &inbound.arrival.outer;
        let (source, _) = self.hosts[inbound.host as usize].vtep(parsed.src_ip.is_ipv4())?;
        let (macs, tag) =
            (inbound.frame.get(..12)?, if parsed.vlan.is_some() { inbound.frame.get(12..16)? } else { &[] });
        let ends = Ends {
            source,
            destination: parsed.dst_ip,
            source_port: vxlan::source_port(flow),
            destination_port: vxlan::UDP_PORT,
            ecn,
            is_summed: false,
        };
        self.scratch.clear();
        outer::write(&mut self.scratch, &Link::of_leaving(macs, tag)?, &ends, &vxlan::emit(inbound.vni), inner)?;
        let bytes = self.rx.get_mut(buffer);
        let (head, tail) = bytes.split_at_mut_checked(self.scratch.len())?;
        head.copy_from_slice(&self.scratch);
        tail.get_mut(..inner.len())?.copy_from_slice(inner);
        u16::try_from(self.scratch.len() + inner.len()).ok()
    }

    /// Runs the engine's timers, delivers the frames that are next in their flows to the pod, through `deliver` with
    /// its interface, and then acknowledges them.
    pub(crate) fn settle(&mut self, now: u64, mut deliver: impl FnMut(usize, &[u8]) -> Delivery) {
        self.now = self.now.max(Time(now));
        if self.engine.next_timeout().is_some_and(|at| at <= self.now) {
            self.engine.on_timeout(self.now, &mut self.out);
        }
        self.backlog.extend(self.out.publish.drain(..).map(|(_, buffer)| buffer));
        while let Some(&buffer) = self.backlog.front() {
            let Received { host, len, interface } = self.received[buffer as usize];
            let counters = &mut self.hosts[host as usize].counters;
            match deliver(interface.into(), &self.rx.get(buffer)[..usize::from(len)]) {
                Delivery::NoRoom => break,
                Delivery::Taken => counters.delivered_frames += 1,
                Delivery::Dropped => counters.undelivered_frames += 1,
            }
            self.backlog.pop_front();
            self.done_with(buffer);
        }
        self.engine.flush_acks(self.now, &mut self.out);
        self.retry();
    }

    fn done_with(&mut self, buffer: u32) {
        let host = &mut self.hosts[self.received[buffer as usize].host as usize];
        host.held = host.held.saturating_sub(1);
        self.rx.give(buffer);
    }

    pub(super) fn count(&mut self, host: u32) -> &mut HostCounters {
        &mut self.hosts[host as usize].counters
    }
}
