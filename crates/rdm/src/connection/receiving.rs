//! Receiving: ACKs, grants, responses to probes (RDM §5.3, §6.2).

use bifrost_wire::rdm::{Ack, Control, Number};

use super::{Connection, Context};
use crate::inbound::Inbound;
use crate::incoming::Granting;
use crate::mutation::mutated;
use crate::output::{Memory, Work};

/// Most grants that are repeated at a time.
const GRANTS_REPEATED_MAX: usize = 16;

impl Connection {
    pub(crate) fn heard(&mut self, now: u64) {
        if !mutated!(self.config, NeverHeard) {
            self.heard_ns = now;
        }
        self.probes = 0;
    }

    /// Records an arrival, and sends an ACK if one is due.
    pub(crate) fn note(
        &mut self,
        context: &mut Context<'_>,
        number: Number,
        len: u32,
        arrived_ns: u64,
        nic_now_ns: u64,
        urgent: bool,
    ) {
        let number = match number {
            Number::Send(global) if mutated!(self.config, AckNamesNext) => Number::Send(global + 1),
            number => number,
        };
        let due = if urgent { 0 } else { context.now + self.config.ack_delay_ns };
        self.acknowledger.note(number, len, arrived_ns, due);
        let (requests, bytes) = self.acknowledger.waiting();
        if urgent || requests >= self.config.ack_requests || bytes >= self.config.ack_bytes {
            self.send_ack(context, nic_now_ns);
        }
    }

    pub(crate) fn send_ack(&mut self, context: &mut Context<'_>, nic_now_ns: u64) {
        self.inbox.raise_limit();
        let (numbers, fresh, sequence, arrived_ns) = self.acknowledger.take();
        let held = nic_now_ns.saturating_sub(arrived_ns);
        let held_ns = u32::try_from(held).ok().filter(|held| !numbers.as_slice().is_empty() && *held < u32::MAX);
        let ack = Ack {
            tag: self.peer.tag,
            sequence,
            fresh,
            held_ns,
            base: self.inbox.base,
            limit: self.inbox.limit,
            numbers,
        };
        #[cfg(any(test, feature = "mutations"))]
        let ack = if mutated!(self.config, AckHoles) { Ack { base: self.inbox.expected, ..ack } } else { ack };
        context.counters.sent_acks += 1;
        context.out.work.push(Work::Control { connection: self.id, control: Control::Ack(ack) });
    }

    /// Grants the next announced message, if the budgets allow it.
    pub(crate) fn grant(
        &mut self,
        context: &mut Context<'_>,
        inbound: &mut Inbound,
        memory: &mut impl Memory,
    ) -> Granting {
        let connection = self.id;
        let granting = self.inbox.grant(self.peer.tag, inbound, memory, |grant| {
            context.out.work.push(Work::Control { connection, control: Control::Grant(grant) });
        });
        if granting == Granting::Granted {
            context.counters.sent_grants += 1;
            self.granted_ns = context.now;
            self.awaits_data = true;
        }
        granting
    }

    pub(crate) fn on_probe(&mut self, context: &mut Context<'_>, nic_now_ns: u64) {
        self.heard(context.now);
        if mutated!(self.config, ProbesUnanswered) {
            return;
        }
        // The peer is waiting: what it waits for may be lost because its path failed.
        context.out.work.push(Work::Repath { connection: self.id });
        self.send_ack(context, nic_now_ns);
        self.repeat_grants(context);
    }

    /// Repeats grants of messages without any data: the grants may be lost.
    pub(crate) fn repeat_grants(&mut self, context: &mut Context<'_>) {
        if mutated!(self.config, GrantsNotRepeated) {
            return;
        }
        for grant in self.inbox.unused_grants(self.peer.tag, GRANTS_REPEATED_MAX) {
            context.counters.sent_grants += 1;
            context.out.work.push(Work::Control { connection: self.id, control: Control::Grant(grant) });
        }
    }
}
