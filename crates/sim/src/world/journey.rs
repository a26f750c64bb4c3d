//! A packet's route over links and switches.

use super::World;
use super::events::Event;
use crate::checker::Wire;
use crate::link::{Class, DropReason, Fate};
use crate::network::Node;
use crate::packet::{Packet, Parcel};
use crate::rng::mix;

impl World {
    /// A packet leaves its host.
    pub(super) fn launch(&mut self, at: u64, packet: Parcel) {
        self.hash = mix(self.hash ^ fingerprint(&packet));
        self.statistics.sent_packets += 1;
        match self.network.first_link(&packet) {
            Some(link) => self.enter(at, link, packet),
            None => self.drop_packet(at, packet, DropReason::NoRoute, false),
        }
    }

    /// A packet enters a link.
    fn enter(&mut self, at: u64, link: u32, mut packet: Parcel) {
        (packet.link, packet.entered_at) = (link, at);
        let l = &mut self.network.links[link as usize];
        let class = Class { ecn_capable: matches!(packet.ecn, 1 | 2), dscp: packet.dscp };
        match l.offer(at, packet.bytes.len(), class, &mut self.rng) {
            Fate::Dropped(reason) => self.drop_packet(at, packet, reason, true),
            Fate::Passes { at: arrives, marked, corrupted, twice } => {
                if marked {
                    packet.ecn = 3;
                }
                if let Some(trace) = &mut self.trace {
                    let comment = corrupted.then_some("a bit flips on this link");
                    trace.packet(at, link, self.network.name(link), &packet, comment);
                }
                if let Some(again) = twice {
                    let mut copy = self.free.take(packet.bytes.len());
                    copy.clone_from(&packet);
                    self.events.add(again, Event::Arrive(copy));
                }
                packet.corrupted |= corrupted;
                self.events.add(arrives, Event::Arrive(packet));
            }
        }
    }

    pub(super) fn arrive(&mut self, at: u64, mut packet: Parcel) {
        let link = packet.link;
        if self.network.links[link as usize].lost_on_the_way(packet.entered_at) {
            self.network.links[link as usize].dropped_packets += 1;
            return self.drop_packet(at, packet, DropReason::Down, false);
        }
        match self.network.end(link) {
            Node::Switch(switch) => {
                packet.ttl = packet.ttl.saturating_sub(1);
                if packet.ttl == 0 {
                    return self.drop_packet(at, packet, DropReason::Ttl, false);
                }
                match self.network.next_link(switch, &packet) {
                    Some(next) => self.enter(at, next, packet),
                    None => self.drop_packet(at, packet, DropReason::NoRoute, false),
                }
            }
            Node::Host(id) => {
                if packet.corrupted {
                    return self.drop_packet(at, packet, DropReason::Corrupted, false);
                }
                let host = &mut self.hosts[id as usize];
                let Some(core) = host.core.as_mut() else {
                    return self.drop_packet(at, packet, DropReason::HostDown, false);
                };
                for checker in &mut self.checkers {
                    checker.wire(at, Wire::Arrived, &packet, &mut self.violations);
                }
                match host.underlay.arrive(at, packet) {
                    Ok(()) => {
                        core.on_underlay_readable();
                        self.wake(at, id);
                    }
                    Err(packet) => self.drop_packet(at, packet, DropReason::HostQueue, false),
                }
            }
        }
    }

    fn drop_packet(&mut self, at: u64, packet: Parcel, reason: DropReason, traced: bool) {
        self.statistics.dropped(reason);
        for checker in &mut self.checkers {
            checker.wire(at, Wire::Dropped(reason), &packet, &mut self.violations);
        }
        if let Some(trace) = &mut self.trace
            && traced
        {
            let comment = format!("dropped: {}", reason.name());
            trace.packet(at, packet.link, self.network.name(packet.link), &packet, Some(&comment));
        }
        for (header, _) in packet.data().filter(|_| reason != DropReason::HostDown) {
            self.statistics.lost_data_packets += 1;
            let key = (packet.dst, header.cid.0, header.psn.0);
            // If the first transmission was lost, too, recovery is measured from there.
            if !header.retransmit {
                self.losses.entry(key).or_insert(packet.sent_at);
            }
        }
        self.free.give(packet);
    }
}

/// A hash of a packet's destination and headers.
fn fingerprint(packet: &Packet) -> u64 {
    let head = packet.bytes.chunks_exact(8).take(8);
    let words = head.map(|c| u64::from_le_bytes(c.try_into().unwrap_or_default()));
    let ends = u64::from(packet.src) << 40 ^ u64::from(packet.dst) << 16 ^ u64::from(packet.source_port);
    words.fold(mix(packet.bytes.len() as u64 ^ ends << 16), |hash, word| {
        (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
    })
}
