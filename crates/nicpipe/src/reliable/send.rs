//! To hosts: keep, transport, encapsulate.

use std::ops::RangeInclusive;

use bifrost_nic::{Checksum, Parsed, ecn, parse, transport_checksum};
use bifrost_rte::{Admission, Control, ControlOut, DataOut, Destination, Ordering, Outbound, Output, PlainOut};
use bifrost_wire::bifrost::{DataHeader, PathId};
use bifrost_wire::protocol::ICMPV6;
use bifrost_wire::{Mac, Vni, ethernet, vxlan};

use super::outer::{self, Ends, Link, Tunnelled};
use super::receive::OWNER;
use super::{Kept, Key, Reliable};
use crate::Leaving;

impl Reliable {
    /// Takes a frame that the pod sends if the transport carries it to its host. Otherwise the frame must leave
    /// unchanged; its counters are updated already.
    pub(crate) fn depart(&mut self, leaving: &Leaving<'_>) -> bool {
        let [macs, tag, rest, payload] = leaving.parts;
        let Some(what) = outer::tunnelled(rest, payload.len()) else { return false };
        let Some(&(number, address)) = self.by_address.get(&what.destination) else { return false };
        let host = &mut self.hosts[number as usize];
        if !self.config.addresses.contains(&what.source) {
            return false;
        }
        if let Some(link) = Link::of_leaving(macs, tag) {
            host.learn(address, link);
        }
        let Tunnelled { vni, inner, len, .. } = what;
        let head = rest.get(inner..).unwrap_or_default();
        let head = &head[..head.len().min(len)];
        let (Some(to), Some(from)) = (mac(head, 0), mac(head, 6)) else { return false };
        if from != self.config.mac || !to.is_unicast() || !self.config.vnis.contains(&vni) {
            return false;
        }
        let overhead =
            ethernet::MAX_HEADER_LEN + outer::ip_udp_len(what.destination) + vxlan::HEADER_LEN + DataHeader::LEN;
        if overhead + len > self.longest {
            host.counters.plain_too_long_frames += 1;
            return false;
        }
        if host.kept >= self.share {
            host.counters.plain_no_memory_frames += 1;
            return false;
        }
        let Some(buffer) = self.tx.take() else {
            host.counters.plain_no_memory_frames += 1;
            return false;
        };
        let bytes = &mut self.tx.get_mut(buffer)[..len];
        let (first, second) = bytes.split_at_mut(head.len());
        first.copy_from_slice(head);
        second.copy_from_slice(&payload[..second.len()]);
        let is_right = match parse(bytes, len) {
            Ok(parsed) => {
                if !parsed.is_ip() || is_neighbour_discovery(bytes, &parsed) {
                    self.tx.give(buffer);
                    return false;
                }
                let (flow, ecn) = (parsed.flow_hash, ecn::of(bytes, &parsed));
                self.kept[buffer as usize] = Kept { host: number, len: len as u16, vni, to, flow, ecn };
                // The receiver would refuse every retransmission.
                transport_checksum(bytes, &parsed) != Checksum::Invalid
            }
            Err(_) => false,
        };
        if !is_right {
            host.counters.plain_bad_checksum_frames += 1;
            self.tx.give(buffer);
            return false;
        }
        let key = (number, vni, to);
        let admission = if self.waiting.contains_key(&key) { Admission::Blocked } else { self.transmit(buffer) };
        let host = &mut self.hosts[number as usize];
        match admission {
            Admission::Plain => {
                host.counters.plain_frames += 1;
                self.tx.give(buffer);
                return false;
            }
            Admission::Accepted => {}
            Admission::Blocked => self.wait(key, buffer),
        }
        let host = &mut self.hosts[number as usize];
        host.kept += 1;
        host.counters.tx_frames += 1;
        true
    }

    fn transmit(&mut self, buffer: u32) -> Admission {
        let Kept { host, vni, to, flow, .. } = self.kept[buffer as usize];
        let destination = Destination {
            vni,
            owner: OWNER,
            local: self.config.mac,
            remote: to,
            peer: self.hosts[host as usize].engine,
            ordering: Ordering::Flow,
        };
        let packet = Outbound { handle: buffer, segments: 1, flow };
        self.engine.transmit(self.now, &destination, packet, &mut self.out)
    }

    fn wait(&mut self, key: Key, buffer: u32) {
        let turns = &mut self.turns;
        let queue = self.waiting.entry(key).or_insert_with(|| {
            turns.push_back(key);
            Default::default()
        });
        queue.push_back(buffer);
    }

    /// Offers the engine the frames that wait for a window, round robin by destination.
    pub(super) fn retry(&mut self) {
        for _ in 0..self.turns.len() {
            let Some(key) = self.turns.pop_front() else { return };
            let Some(mut queue) = self.waiting.remove(&key) else { continue };
            while let Some(&buffer) = queue.front() {
                match self.transmit(buffer) {
                    Admission::Blocked => break,
                    Admission::Accepted => {}
                    Admission::Plain => {
                        let Kept { host, vni, .. } = self.kept[buffer as usize];
                        let peer = self.hosts[host as usize].engine;
                        self.out.plain.push(PlainOut { peer, vni, owner: OWNER, handle: buffer, segment: 0 });
                    }
                }
                queue.pop_front();
            }
            if !queue.is_empty() {
                self.waiting.insert(key, queue);
                self.turns.push_back(key);
            }
        }
    }

    /// Sends the engine's output, each frame in parts, and releases buffers that are no longer needed.
    pub(crate) fn emit(&mut self, mut sink: impl FnMut(&[&[u8]])) {
        if self.out.data.is_empty()
            && self.out.control.is_empty()
            && self.out.plain.is_empty()
            && self.out.release.is_empty()
        {
            return;
        }
        let mut out = std::mem::take(&mut self.out);
        for data in &out.data {
            self.send_data(data, &mut sink);
        }
        for control in &out.control {
            self.send_control(control, &mut sink);
        }
        for plain in &out.plain {
            self.send_plain(plain, &mut sink);
            self.release(plain.handle);
        }
        for &(_, buffer) in &out.release {
            self.release(buffer);
        }
        // Received frames are for the next call of `settle`.
        let publish = std::mem::take(&mut out.publish);
        out.clear();
        self.out = Output { publish, ..out };
    }

    fn release(&mut self, buffer: u32) {
        let Some(kept) = self.kept.get(buffer as usize) else { return };
        let host = &mut self.hosts[kept.host as usize];
        host.kept = host.kept.saturating_sub(1);
        self.tx.give(buffer);
    }

    fn send_data(&mut self, data: &DataOut, sink: &mut impl FnMut(&[&[u8]])) {
        let (Some(number), Some(vni)) = (self.number_of(data.peer), Vni::new(data.vni)) else { return };
        let Some(&kept) = self.kept.get(data.handle as usize) else { return };
        let mut head = [0; vxlan::HEADER_LEN + DataHeader::LEN];
        head[..vxlan::HEADER_LEN].copy_from_slice(&vxlan::emit(vni));
        head[vxlan::HEADER_LEN..].copy_from_slice(&data.header.emit());
        let ecn = if data.header.ecn { ecn::outer_of_reliable(kept.ecn) } else { ecn::NOT_ECT };
        let tail = Some((data.handle, kept.len));
        self.send_on(number, data.header.path, ecn, &head, tail, sink);
    }

    fn send_control(&mut self, control: &ControlOut, sink: &mut impl FnMut(&[&[u8]])) {
        let (Some(number), Some(vni)) = (self.number_of(control.peer), Vni::new(control.vni)) else { return };
        let mut head = std::mem::take(&mut self.control);
        head.clear();
        head.extend_from_slice(&vxlan::emit(vni));
        match &control.packet {
            Control::Ack(ack) => ack.emit(&mut head),
            Control::Probe(header) => head.extend_from_slice(&header.emit()),
            Control::Skip(header) => head.extend_from_slice(&header.emit_skip()),
            Control::Setup(setup) => head.extend_from_slice(&setup.emit()),
            Control::Reset(reset) => head.extend_from_slice(&reset.emit()),
        }
        self.send_on(number, control.path, ecn::NOT_ECT, &head, None, sink);
        self.control = head;
    }

    fn send_on(
        &mut self,
        number: u32,
        path: PathId,
        ecn: u8,
        head: &[u8],
        tail: Option<(u32, u16)>,
        sink: &mut impl FnMut(&[&[u8]]),
    ) {
        let Some((destination, link)) = self.hosts[number as usize].path(path) else {
            self.count(number).unsent_no_link_packets += 1;
            return;
        };
        let Some(source) = self.local(destination) else { return };
        let (source_port, destination_port) = (self.source_port(path), self.config.port);
        let ends = Ends { source, destination, source_port, destination_port, ecn, is_summed: true };
        let Reliable { scratch, tx, .. } = self;
        let tail = tail.map_or(&[][..], |(buffer, len)| &tx.get(buffer)[..usize::from(len)]);
        scratch.clear();
        if outer::write(scratch, &link, &ends, head, tail).is_some() {
            sink(&[scratch, tail]);
            self.count(number).tx_datagrams += 1;
        }
    }

    /// Handles a frame that no connection carries any more.
    #[cold]
    fn send_plain(&mut self, plain: &PlainOut, sink: &mut impl FnMut(&[&[u8]])) {
        let (Some(number), Some(vni)) = (self.number_of(plain.peer), Vni::new(plain.vni)) else { return };
        let Some(&kept) = self.kept.get(plain.handle as usize) else { return };
        let Some((destination, link)) = self.hosts[number as usize].first() else {
            self.count(number).unsent_no_link_packets += 1;
            return;
        };
        let Some(source) = self.local(destination) else { return };
        let ends = Ends {
            source,
            destination,
            source_port: vxlan::source_port(kept.flow),
            destination_port: vxlan::UDP_PORT,
            ecn: ecn::outer_of_plain(kept.ecn),
            is_summed: false,
        };
        let Reliable { scratch, tx, .. } = self;
        let tail = &tx.get(plain.handle)[..usize::from(kept.len)];
        scratch.clear();
        if outer::write(scratch, &link, &ends, &vxlan::emit(vni), tail).is_some() {
            sink(&[scratch, tail]);
            let counters = self.count(number);
            counters.surrendered_frames += 1;
        }
    }
}

/// Neither these nor ARP are carried reliably, as on hosts.
fn is_neighbour_discovery(frame: &[u8], parsed: &Parsed) -> bool {
    const TYPES: RangeInclusive<u8> = 133..=137;
    parsed.protocol == ICMPV6 && frame.get(usize::from(parsed.l4)).is_some_and(|kind| TYPES.contains(kind))
}

fn mac(frame: &[u8], at: usize) -> Option<Mac> {
    Some(Mac(*frame.get(at..)?.first_chunk()?))
}
