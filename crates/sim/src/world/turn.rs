//! Turns of hosts: when they happen, and their effects.

use bifrost_rte::Time;

use super::World;
use super::events::Event;
use super::guests::receive;
use crate::checker::Wire;
use crate::host::NEVER;
use crate::violation::Kind;

/// Start time of daemons, us since the epoch.
const EPOCH_US: u64 = 1_700_000_000_000_000;

impl World {
    pub(super) fn start_host(&mut self, id: u32) {
        let salt = self.rng.next_u64() as u32;
        let host = &mut self.hosts[id as usize];
        host.start(EPOCH_US + self.now / 1000 + u64::from(id), salt);
        self.wake(self.now, id);
    }

    /// A host has work to do.
    pub(super) fn wake(&mut self, at: u64, id: u32) {
        let host = &mut self.hosts[id as usize];
        let at = at.max(host.busy_until).max(host.paused_until);
        if at < host.turn_at && host.core.is_some() {
            host.turn_at = at;
            self.events.add(at, Event::Turn(id));
        }
    }

    /// One turn of a host's loop, with its effects.
    pub(super) fn turn(&mut self, now: u64, id: u32) {
        let host = &mut self.hosts[id as usize];
        host.turn_at = NEVER;
        if host.paused_until > now {
            let at = host.paused_until;
            if at != NEVER {
                self.wake(at, id);
            }
            return;
        }
        let Some(core) = host.core.as_mut() else { return };
        host.underlay.now = now;
        std::mem::swap(&mut self.free, &mut host.underlay.free);
        let busy = core.turn(Time(now + host.underlay.clock_offset), &mut host.underlay, |_| ());
        host.underlay.finish();
        std::mem::swap(&mut self.free, &mut host.underlay.free);
        while core.take_rewatched().is_some() {}
        let carried = host.underlay.spent.iter().chain(&host.underlay.outbox);
        let mut packets = carried.map(|packet| packet.count()).sum::<usize>();
        for (owner, vnic) in (0..).zip(&host.vnics) {
            let Some(port) = core.device_mut(owner) else { continue };
            let guest = vnic.guest;
            packets += port.take_fetched(|frame| {
                for checker in &mut self.checkers {
                    checker.fetched(now, guest, frame, &mut self.violations);
                }
            });
            port.take_placed(|frame| {
                self.flows.placed(frame);
                for checker in &mut self.checkers {
                    checker.placed(now, guest, frame, &mut self.violations);
                }
            });
            if port.has_misuses() {
                for misuse in port.take_misuses() {
                    self.violations.add(now, Kind::Handle, || format!("host {id}, guest {guest}: {misuse:?}"));
                }
            }
        }
        let cost = self.scenario.host.turn_cost.0 + self.scenario.host.packet_cost.0 * packets as u64;
        let done = now + cost;
        host.busy_until = done;
        host.turns += 1;
        host.busy_ns += cost;
        self.statistics.turns += 1;
        for checker in &mut self.checkers {
            checker.turned(now, id, core, &mut self.violations);
        }
        self.receive_losses(done, id);
        self.emit(done, id);
        self.serve_guests(done, id);
        self.next_turn(done, id, busy);
    }

    /// Finds lost packets that arrived after all.
    fn receive_losses(&mut self, at: u64, id: u32) {
        let spent = &mut self.hosts[id as usize].underlay.spent;
        if !self.losses.is_empty() || !self.checkers.is_empty() {
            for packet in &*spent {
                for checker in &mut self.checkers {
                    checker.wire(at, Wire::Taken, packet, &mut self.violations);
                }
                for (header, _) in packet.data() {
                    if let Some(sent) = self.losses.remove(&(packet.dst, header.cid.0, header.psn.0)) {
                        self.statistics.recovery_ns.push(at - sent);
                    }
                }
            }
        }
        spent.drain(..).for_each(|packet| self.free.give(packet));
    }

    /// Sends the packets of a turn at its end.
    fn emit(&mut self, at: u64, id: u32) {
        let mut outbox = std::mem::take(&mut self.hosts[id as usize].underlay.outbox);
        for mut packet in outbox.drain(..) {
            packet.sent_at = at;
            if let Some(frame) = packet.plain() {
                self.flows.exempt(frame);
            } else {
                packet.data_quick(|cid, frame| self.flows.sent(frame, cid));
            }
            for checker in &mut self.checkers {
                checker.wire(at, Wire::Sent, &packet, &mut self.violations);
            }
            self.launch(at, packet);
        }
        self.hosts[id as usize].underlay.outbox = outbox;
    }

    /// Hands released buffers and published frames to the guests.
    pub(super) fn serve_guests(&mut self, at: u64, id: u32) {
        let host = &mut self.hosts[id as usize];
        let Some(core) = host.core.as_mut() else { return };
        let mut polls = Vec::new();
        let mut unblocked = Vec::new();
        for (owner, vnic) in (0..).zip(&host.vnics) {
            let Some(port) = core.device_mut(owner) else { continue };
            let guest = &mut self.guests[vnic.guest as usize];
            port.refused().for_each(|frame| {
                self.flows.forsake(frame);
                self.checkers.iter_mut().for_each(|checker| checker.refused(vnic.guest, frame));
            });
            let completed = port.settle(|frame| {
                self.flows.completed(at, frame, &mut self.violations);
                for checker in &mut self.checkers {
                    checker.completed(at, vnic.guest, frame, &mut self.violations);
                }
            });
            port.take_shown(|frame| {
                for checker in &mut self.checkers {
                    checker.shown(at, vnic.guest, frame, &mut self.violations);
                }
            });
            if guest.tcp.is_some() && completed > 0 && !guest.stalled {
                polls.push((at, vnic.guest));
            }
            if completed > 0 {
                unblocked.append(&mut guest.blocked);
            }
            if guest.stalled || !port.has_visible() {
                continue;
            }
            if guest.receive_gap > 0 || guest.tcp.is_some() {
                polls.push((at.max(guest.receive_at), vnic.guest));
                continue;
            }
            while receive(port, at, vnic.guest, &mut self.flows, &mut self.statistics, &mut self.violations) {}
        }
        for (at, guest) in polls {
            self.poll_at(at, guest);
        }
        for sender in unblocked {
            self.senders[sender as usize].blocked = false;
            self.events.add(at, Event::Send(sender));
        }
    }

    /// Determines when a host's loop runs next, like epoll with a timeout.
    fn next_turn(&mut self, done: u64, id: u32, busy: bool) {
        let host = &mut self.hosts[id as usize];
        let Some(core) = host.core.as_mut() else { return };
        let mut at = NEVER;
        if busy && core.has_more() {
            at = done;
        }
        if host.underlay.is_readable() {
            core.on_underlay_readable();
            at = done;
        }
        for owner in 0..host.vnics.len() as u32 {
            if core.is_watched(owner) && core.device(owner).is_some_and(|p| p.is_readable()) {
                core.on_port_readable(owner);
                at = done;
            }
        }
        if let Some(deadline) = core.next_deadline() {
            at = at.min(deadline.0.saturating_sub(host.underlay.clock_offset).max(done));
        }
        if at != NEVER {
            self.wake(at, id);
        }
    }
}
