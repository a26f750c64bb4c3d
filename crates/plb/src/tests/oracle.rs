//! A slow model of a balancer: it stores every packet ever dispatched, and searches them one by one.

use crate::{Config, DropReason, Egress, LegalCheck, Mode, Order, Trailer};

use super::cases::Out;

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Waiting,
    /// The PSN in its trailer, and whether the trailer names a payload.
    Here(u32, u32, bool),
    DroppedByPod,
}

#[derive(Clone, Copy, Debug)]
struct Packet {
    psn: u32,
    at: u64,
    state: State,
}

#[derive(Clone, Debug, Default)]
struct Queue {
    /// All packets ever dispatched; those before `out` are out.
    packets: Vec<Packet>,
    out: usize,
    /// Number of packets dispatched before the change to dispatch by flow.
    before_change: Option<usize>,
}

/// A balancer without header-only delivery.
#[derive(Clone, Debug)]
pub(super) struct Oracle {
    config: Config,
    queues: Vec<Queue>,
    mode: Mode,
    settled_at: u64,
    /// The core of each packet that was sprayed.
    sprayed: Vec<u16>,
}

impl Oracle {
    pub(super) fn new(config: Config) -> Self {
        let queues = vec![Queue::default(); usize::from(config.order_queues)];
        Oracle { config, queues, mode: Mode::Plb, settled_at: 0, sprayed: Vec::new() }
    }

    /// Core, queue, PSN if it has an entry; `None`: refused.
    pub(super) fn dispatch(&mut self, now: u64, queue: usize, flow_core: u16) -> Option<(u16, Option<u32>)> {
        let q = &mut self.queues[queue];
        if self.mode == Mode::Rss && q.before_change.is_none() {
            return Some((flow_core, None));
        }
        if q.packets.len() - q.out == self.config.queue_entries as usize {
            return None;
        }
        let psn = self.config.first_psn.wrapping_add(q.packets.len() as u32);
        q.packets.push(Packet { psn, at: now, state: State::Waiting });
        if self.mode == Mode::Plb && now >= self.settled_at {
            let turn = (self.sprayed.len() % usize::from(self.config.cores)) as u16;
            let given = |core| self.sprayed.iter().filter(|c| **c == core).count();
            let affinity = usize::from(self.config.affinity);
            let is_own = affinity > 0 && given(flow_core) < given(turn) + affinity;
            let core = if is_own { flow_core } else { turn };
            self.sprayed.push(core);
            return Some((core, Some(psn)));
        }
        Some((flow_core, Some(psn)))
    }

    pub(super) fn returned(&mut self, trailer: &Trailer, packet: u32) -> Option<Out> {
        let drop = |reason| Some(Egress::Drop { packet, reason });
        let send = |order| Some(Egress::Send { packet, payload: None, order });
        if trailer.pod != self.config.pod {
            return drop(DropReason::WrongPod(trailer.pod));
        }
        if trailer.unordered {
            return match (trailer.drop, trailer.payload) {
                (true, _) => drop(DropReason::ByPod),
                (false, Some(_)) => drop(DropReason::PayloadGone),
                (false, None) => send(Order::Unordered),
            };
        }
        let Some(q) = self.queues.get_mut(usize::from(trailer.queue)) else {
            return drop(DropReason::NoSuchQueue(trailer.queue));
        };
        let low = self.config.legal_check == LegalCheck::LowBits;
        let entries = self.config.queue_entries;
        let fits = |p: &&mut Packet| if low { p.psn % entries == trailer.psn % entries } else { p.psn == trailer.psn };
        let found = q.packets[q.out..].iter_mut().find(fits);
        match found {
            None if trailer.drop => drop(DropReason::ByPod),
            None if trailer.payload.is_some() => drop(DropReason::PayloadGone),
            None => send(Order::Late),
            Some(p) if trailer.drop && p.state == State::Waiting => {
                p.state = State::DroppedByPod;
                drop(DropReason::ByPod)
            }
            Some(p) if p.state == State::Waiting => {
                p.state = State::Here(packet, trailer.psn, trailer.payload.is_some());
                None
            }
            Some(p) => match p.state {
                State::Here(old, ..) if low && !trailer.drop => {
                    p.state = State::Here(packet, trailer.psn, trailer.payload.is_some());
                    Some(Egress::Drop { packet: old, reason: DropReason::Replaced })
                }
                _ => drop(DropReason::Duplicate),
            },
        }
    }

    pub(super) fn release(&mut self, now: u64) -> Vec<Out> {
        let mut out = Vec::new();
        for q in &mut self.queues {
            loop {
                let drained = q.before_change.is_some_and(|n| q.out >= n);
                let Some(p) = q.packets.get_mut(q.out) else { break };
                let send = |packet, order| Egress::Send { packet, payload: None, order };
                match p.state {
                    State::Here(packet, psn, _) if psn == p.psn => out.push(send(packet, Order::InOrder)),
                    State::Here(packet, _, payload) => {
                        let gone = Egress::Drop { packet, reason: DropReason::PayloadGone };
                        out.push(if payload { gone } else { send(packet, Order::Alias) });
                        p.state = State::Waiting;
                        continue;
                    }
                    State::Waiting if !drained && now.saturating_sub(p.at) <= self.config.timeout_ns => break,
                    State::Waiting | State::DroppedByPod => {}
                }
                q.out += 1;
            }
            if q.before_change.is_some_and(|n| q.out >= n) {
                q.before_change = None;
            }
        }
        out
    }

    pub(super) fn set_mode(&mut self, now: u64, mode: Mode) {
        if mode == self.mode {
            return;
        }
        self.mode = mode;
        self.settled_at = now + self.config.timeout_ns + 1;
        for q in &mut self.queues {
            let waiting = q.packets.len() > q.out;
            q.before_change = (mode == Mode::Rss && waiting).then_some(q.packets.len());
        }
    }

    /// Entries in use.
    pub(super) fn len(&self) -> usize {
        self.queues.iter().map(|q| q.packets.len() - q.out).sum()
    }
}
