//! What guests send, and when they are polled.

use super::World;
use super::events::Event;
use crate::flows::{Flows, Receipt};
use crate::host::NEVER;
use crate::port::SimPort;
use crate::sender::Next;
use crate::statistics::Statistics;
use crate::violation::Violations;

impl World {
    /// A light guest sends.
    pub(super) fn send(&mut self, now: u64, index: u32) {
        let sender = &mut self.senders[index as usize];
        if sender.left == 0 {
            return;
        }
        let guest = &self.guests[sender.from as usize];
        let (host, owner) = (guest.host, guest.owner);
        let next = sender.send(now, self.hosts[host as usize].port_mut(owner), &mut self.flows);
        match next {
            Next::At(at) => self.events.add(at, Event::Send(index)),
            Next::Blocked => self.guests[self.senders[index as usize].from as usize].blocked.push(index),
            Next::Done => self.senders_active -= 1,
        }
        self.kick(now, host, owner);
    }

    /// A guest has put frames into its ring.
    fn kick(&mut self, now: u64, host: u32, owner: u32) {
        let h = &mut self.hosts[host as usize];
        if let Some(core) = h.core.as_mut()
            && core.is_watched(owner)
            && core.device(owner).is_some_and(|p| p.is_readable())
        {
            core.on_port_readable(owner);
            self.wake(now, host);
        }
    }

    pub(super) fn poll_at(&mut self, at: u64, guest: u32) {
        let g = &mut self.guests[guest as usize];
        if at < g.poll_at {
            g.poll_at = at;
            self.events.add(at, Event::Poll(guest));
        }
    }

    /// A TCP guest is polled, or a slow one takes a frame.
    pub(super) fn poll(&mut self, now: u64, id: u32) {
        let guest = &mut self.guests[id as usize];
        guest.poll_at = NEVER;
        let (host, owner) = (guest.host, guest.owner);
        if guest.stalled {
            return;
        }
        // Number of frames that the guest receives now.
        let frames = match guest.receive_gap {
            0 => usize::MAX,
            _ if now < guest.receive_at => 0,
            gap => {
                guest.receive_at = now + gap;
                1
            }
        };
        let (slow, next) = (guest.receive_gap > 0, guest.receive_at);
        let tcp = guest.tcp.take();
        let port = self.hosts[host as usize].port_mut(owner);
        let mut wake = None;
        if let Some(mut tcp) = tcp {
            let guests = &self.guests;
            tcp.poll(now, port, frames, &mut self.conns, |g| guests[g as usize].ip, &mut self.violations);
            wake = tcp.wake_at;
            self.guests[id as usize].tcp = Some(tcp);
        } else {
            for _ in 0..frames {
                if !receive(port, now, id, &mut self.flows, &mut self.statistics, &mut self.violations) {
                    break;
                }
            }
        }
        if slow && self.hosts[host as usize].port(owner).has_visible() {
            self.poll_at(next, id);
        }
        for (workload, latency, bytes) in self.conns.finished.drain(..) {
            self.statistics.received(workload, now, bytes, latency);
        }
        let mut poke = std::mem::take(&mut self.conns.poke);
        for other in poke.drain(..) {
            self.poll_at(now, other);
        }
        self.conns.poke = poke;
        if let Some(at) = wake {
            self.poll_at(at.max(now + 1), id);
        }
        self.kick(now, host, owner);
    }
}

/// A light guest takes the next visible frame. Returns whether there was one.
pub(super) fn receive(
    port: &mut SimPort,
    at: u64,
    guest: u32,
    flows: &mut Flows,
    statistics: &mut Statistics,
    violations: &mut Violations,
) -> bool {
    let read = |frame: &[u8], _| (flows.received(at, guest, frame, violations), frame.len() as u64);
    let Some((receipt, bytes)) = port.receive(read) else { return false };
    if let Receipt::New { workload, sent_at } = receipt {
        statistics.received(workload, at, bytes, at - sent_at);
    }
    true
}
