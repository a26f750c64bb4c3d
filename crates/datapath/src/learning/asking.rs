//! What a core does with packets without a route, and with answers.

use std::net::IpAddr;

use bifrost_avs::LearnedChange;
use bifrost_port::{GuestPort, TxFrame};
use bifrost_rte::Time;
use bifrost_wire::Vni;

use super::{PATIENCE_NS, Ranges, SWEEP_NS};
use crate::core::Core;
use crate::questions::RouteQuestions;

impl<P: GuestPort> Core<P> {
    /// Sets the daemon's queue of questions.
    pub fn set_route_questions(&mut self, questions: RouteQuestions) {
        self.asking.questions = Some(questions);
    }

    /// Keeps a packet until the route to an address is learned, or drops it.
    #[cold]
    #[inline(never)]
    pub(crate) fn ask_route(&mut self, owner: u32, frame: TxFrame, to: (Vni, IpAddr)) {
        let now = self.now;
        let Some(port) = self.ports.get_mut(owner as usize).and_then(Option::as_mut) else { return };
        match port.learning.get_or_insert_default().keep(now, to, frame, &self.asking) {
            Ok(()) => {
                self.asking.packets += 1;
                let until = now.after(PATIENCE_NS);
                self.asking.due = Some(self.asking.due.map_or(until, |due| due.min(until)));
                // A ring that returns buffers in order must not run short because of this one.
                port.port.relieve();
            }
            Err(counter) => {
                *counter(&mut port.outbound) += 1;
                port.complete(frame.handle);
            }
        }
    }

    /// Changes what the switch has learned of a network's routes, and lets it decide again about the packets that wait
    /// for it.
    pub fn learn(&mut self, vni: Vni, changes: &[LearnedChange]) {
        self.switch.learn(vni, changes);
        if self.asking.packets == 0 {
            return;
        }
        let answered = changes.iter().filter(|change| change.answer.is_some()).map(|change| change.range);
        let answered = Ranges::new(answered.collect());
        let is_answered = |&(of, address): &(Vni, IpAddr)| of == vni && answered.contains(address);
        for port in self.ports.iter_mut().flatten() {
            let Some(learning) = &mut port.learning else { continue };
            let mut again = learning.take(|to, _| is_answered(to));
            if again.is_empty() {
                continue;
            }
            self.asking.packets = self.asking.packets.saturating_sub(again.len());
            port.outbound.resumed_packets += again.len() as u64;
            again.append(&mut port.backlog);
            port.backlog = again;
            port.unfinished = true;
        }
    }

    /// Drops packets whose time is over.
    #[cold]
    #[inline(never)]
    pub(crate) fn end_asking(&mut self) {
        let now = self.now;
        let mut due: Option<Time> = None;
        let mut left = 0;
        for port in self.ports.iter_mut().flatten() {
            let Some(learning) = &mut port.learning else { continue };
            let over = learning.take(|_, until| until <= now);
            left += learning.packets;
            due = due.into_iter().chain(learning.waiting.values().map(|waiting| waiting.until)).min();
            port.outbound.learn_timeout_packets += over.len() as u64;
            over.into_iter().for_each(|frame| port.complete(frame.handle));
        }
        // Not once for each packet: all ports are looked at.
        let due = due.map(|due| due.max(now.after(SWEEP_NS)));
        (self.asking.packets, self.asking.due) = (left, due);
    }
}
