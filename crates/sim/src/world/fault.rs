//! Faults.

use bifrost_datapath::fault::{Direction, Fault, Target};

use super::World;
use super::events::Event;
use crate::faults::Action;
use crate::host::NEVER;

impl World {
    /// A fault begins or ends.
    pub(super) fn fault(&mut self, now: u64, index: u32) {
        self.faults_left -= 1;
        let action = self.faults[index as usize].clone();
        for checker in &mut self.checkers {
            checker.fault(now, &action, &mut self.violations);
        }
        match action {
            Action::Links { links, set } => {
                for id in links {
                    let link = &mut self.network.links[id as usize];
                    let config = match &set {
                        Some(patch) => patch.on(link.config.clone()),
                        None => link.original.clone(),
                    };
                    let after = config.reroute_after.0;
                    if link.change(now, config) && after > 0 {
                        self.events.add(now + after, Event::Route(id));
                    }
                }
            }
            Action::Crash(host) => self.crash(host),
            Action::Restart(host) => {
                if self.hosts[host as usize].core.is_none() {
                    self.start_host(host);
                }
            }
            Action::Pause(host, until) => {
                self.hosts[host as usize].paused_until = until;
                if until != NEVER {
                    self.wake(until, host);
                }
            }
            Action::Stall(guest, stalled) => {
                let g = &mut self.guests[guest as usize];
                (g.stalled, g.receive_gap) = (stalled, 0);
                self.look_again(now, guest);
            }
            Action::Slow(guest, gap) => {
                let g = &mut self.guests[guest as usize];
                (g.receive_gap, g.receive_at) = (gap, now);
                self.look_again(now, guest);
            }
            Action::Port(guest, fault) => self.port_fault(guest, index, fault),
        }
    }

    /// Lets a guest receive its visible frames, unless it is stalled.
    fn look_again(&mut self, now: u64, guest: u32) {
        let g = &self.guests[guest as usize];
        if !g.stalled {
            let host = g.host;
            self.serve_guests(now, host);
            self.poll_at(now, guest);
        }
    }

    /// Routing notices the state of a link, unless the link has changed again.
    pub(super) fn route(&mut self, now: u64, link: u32) {
        let l = &self.network.links[link as usize];
        if l.is_settled(now) {
            let down = l.config.down;
            self.network.withdraw(link, down);
        }
    }

    /// A daemon crashes. Only packets that it holds from or for guests may be lost.
    fn crash(&mut self, id: u32) {
        let here = &self.hosts[id as usize];
        if here.core.is_none() {
            return;
        }
        for owner in 0..here.vnics.len() as u32 {
            here.port(owner).held().for_each(|frame| self.flows.forsake(frame));
            here.port(owner).hidden().for_each(|frame| self.flows.forsake(frame));
        }
        let host = &mut self.hosts[id as usize];
        host.crash();
        host.underlay.reset(&mut self.free);
        // The guests get back the buffers that the daemon held.
        for owner in 0..self.hosts[id as usize].vnics.len() {
            let guest = self.hosts[id as usize].vnics[owner].guest;
            for sender in std::mem::take(&mut self.guests[guest as usize].blocked) {
                self.senders[sender as usize].blocked = false;
                self.events.add(self.now, Event::Send(sender));
            }
            if self.guests[guest as usize].tcp.is_some() {
                self.poll_at(self.now, guest);
            }
        }
    }

    fn port_fault(&mut self, guest: u32, index: u32, fault: Option<Fault>) {
        let g = &self.guests[guest as usize];
        let (host, owner) = (g.host, g.owner);
        let seed = u64::from(index) ^ self.seed;
        let Some(core) = self.hosts[host as usize].core.as_mut() else { return };
        match fault {
            Some(fault) => {
                // The transport cannot recover packets that are lost before they reach it.
                if fault.direction == Direction::Tx {
                    self.flows.set_lossy(guest);
                }
                core.faults_mut().set(Fault { target: Target::Port { owner }, ..fault }, Some(seed));
            }
            None => core.faults_mut().clear(None),
        }
    }
}
