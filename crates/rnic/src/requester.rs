//! The sending half of a queue pair: takes requests, sends packets, handles acknowledgements.

use std::collections::VecDeque;

use bifrost_wire::roce::{Sequence, Transport};

use crate::verbs::{Connect, SendRequest};

/// No timer.
pub(crate) const NEVER: u64 = u64::MAX;

/// RC: maximum number of packets in flight.
const WINDOW: i32 = 4096;

/// RNR retries: how often a receiver may have no receive request before the requester gives up (the 3 bits of IBTA
/// 9.7.5.2.8 allow 0 to 6).
const NOT_READY_MAX: u8 = 6;

/// A request that has not completed.
#[derive(Debug)]
pub(crate) struct Pending {
    pub(crate) request: SendRequest,
    /// PSN of its first packet, once that was sent.
    first: Sequence,
    /// Number of its packets; 0 until the first was sent.
    packets: u32,
}

/// The part of its request that a packet carries.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) index: usize,
    pub(crate) from: u32,
    pub(crate) to: u32,
    pub(crate) first: bool,
    pub(crate) last: bool,
    pub(crate) sequence: Sequence,
    pub(crate) repeated: bool,
}

#[derive(Debug)]
pub(crate) struct Requester {
    pub(crate) queue: VecDeque<Pending>,
    /// Requests that are posted and not polled.
    pub(crate) outstanding: u16,
    /// The request being sent, and how much of it was sent.
    next: usize,
    done: u32,
    sequence: Sequence,
    /// RC: the oldest packet that is not acknowledged, and the first that was never sent.
    unacknowledged: Sequence,
    highest: Sequence,
    retries_left: u8,
    not_ready: u8,
    /// RC: when the timer expires.
    pub(crate) deadline: u64,
    /// RC: the peer is not ready before this time.
    hold_until: u64,
}

impl Default for Requester {
    fn default() -> Self {
        Self {
            queue: VecDeque::new(),
            outstanding: 0,
            next: 0,
            done: 0,
            sequence: Sequence::default(),
            unacknowledged: Sequence::default(),
            highest: Sequence::default(),
            retries_left: 0,
            not_ready: 0,
            deadline: NEVER,
            hold_until: 0,
        }
    }
}

/// Result of an acknowledgement or a timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Continue.
    Continue,
    /// The acknowledgement is for a packet that is not in flight.
    Stray,
    /// Too many retries.
    GiveUp,
}

impl Requester {
    pub(crate) fn begin(&mut self, peer: &Connect) {
        self.sequence = peer.send_sequence;
        self.unacknowledged = peer.send_sequence;
        self.highest = peer.send_sequence;
        self.retries_left = peer.retries;
        self.not_ready = 0;
    }

    pub(crate) fn push(&mut self, request: SendRequest) {
        self.queue.push_back(Pending { request, first: Sequence::default(), packets: 0 });
        self.outstanding += 1;
    }

    pub(crate) fn has_work(&self, now: u64) -> bool {
        self.next < self.queue.len() && self.hold_until <= now && self.highest.distance(self.unacknowledged) < WINDOW
    }

    /// The next packet, which counts as sent.
    pub(crate) fn take_part(&mut self, now: u64, transport: Transport, mtu: u16, timeout_ns: u64) -> Option<Part> {
        if !self.has_work(now) {
            return None;
        }
        let mtu = u32::from(mtu);
        let index = self.next;
        let pending = self.queue.get_mut(index)?;
        let len = pending.request.len();
        let from = self.done;
        let to = len.min(from.saturating_add(mtu));
        if pending.packets == 0 {
            pending.first = self.sequence;
            pending.packets = len.div_ceil(mtu).max(1);
        }
        let last = to == len;
        let sequence = self.sequence;
        let repeated = sequence.distance(self.highest) < 0;
        self.sequence = sequence.plus(1);
        if !repeated {
            self.highest = self.sequence;
        }
        if transport == Transport::Rc {
            if self.deadline == NEVER {
                self.deadline = now.saturating_add(timeout_ns);
            }
        } else {
            self.unacknowledged = self.sequence;
        }
        (self.next, self.done) = if last { (index + 1, 0) } else { (index, to) };
        Some(Part { index, from, to, first: from == 0, last, sequence, repeated })
    }

    /// UC, UD: the request whose last packet was just sent.
    pub(crate) fn take_sent(&mut self) -> Option<Pending> {
        self.next = self.next.saturating_sub(1);
        self.queue.pop_front()
    }

    /// RC: everything before `up_to` has arrived; `again` retransmits the rest. Completed requests go to `done`.
    pub(crate) fn acknowledge(
        &mut self,
        now: u64,
        up_to: Sequence,
        again: Option<Again>,
        peer: &Connect,
        mut done: impl FnMut(Pending),
    ) -> Verdict {
        let progress = up_to.distance(self.unacknowledged);
        if progress < 0 || up_to.distance(self.highest) > 0 {
            return Verdict::Stray;
        }
        if progress > 0 {
            self.unacknowledged = up_to;
            self.retries_left = peer.retries;
            self.not_ready = 0;
            self.hold_until = 0;
            while let Some(pending) = self.queue.front() {
                let end = pending.first.plus(pending.packets);
                if pending.packets == 0 || up_to.distance(end) < 0 {
                    break;
                }
                self.next = self.next.saturating_sub(1);
                if let Some(pending) = self.queue.pop_front() {
                    done(pending);
                }
            }
            if self.sequence.distance(up_to) < 0 {
                // Acknowledged while it was about to be retransmitted.
                self.rewind(up_to, peer.mtu);
            }
        }
        match again {
            Some(Again::NotReady(wait_ns)) => {
                if self.not_ready >= NOT_READY_MAX {
                    return Verdict::GiveUp;
                }
                self.not_ready += 1;
                self.hold_until = now.saturating_add(wait_ns);
                self.rewind(up_to, peer.mtu);
            }
            Some(Again::Gap) => {
                if progress == 0 {
                    let Some(left) = self.retries_left.checked_sub(1) else { return Verdict::GiveUp };
                    self.retries_left = left;
                }
                self.rewind(up_to, peer.mtu);
            }
            None => {}
        }
        self.deadline = if self.unacknowledged == self.highest {
            NEVER
        } else {
            now.max(self.hold_until).saturating_add(peer.timeout_ns)
        };
        Verdict::Continue
    }

    /// RC: the timer has expired.
    pub(crate) fn time_out(&mut self, now: u64, peer: &Connect) -> Verdict {
        let Some(left) = self.retries_left.checked_sub(1) else { return Verdict::GiveUp };
        self.retries_left = left;
        self.rewind(self.unacknowledged, peer.mtu);
        self.deadline = now.saturating_add(peer.timeout_ns);
        Verdict::Continue
    }

    /// When to act without a received packet.
    pub(crate) fn wake_at(&self, now: u64) -> u64 {
        if self.hold_until > now { self.deadline.min(self.hold_until) } else { self.deadline }
    }

    fn rewind(&mut self, to: Sequence, mtu: u16) {
        self.sequence = to;
        let inside = |pending: &Pending| {
            let behind = to.distance(pending.first);
            pending.packets > 0 && behind >= 0 && (behind as u32) < pending.packets
        };
        (self.next, self.done) = match self.queue.iter().position(inside) {
            Some(index) => (index, to.distance(self.queue[index].first) as u32 * u32::from(mtu)),
            // After the last packet sent.
            None => (self.queue.iter().take_while(|pending| pending.packets > 0).count(), 0),
        };
    }
}

/// Why RC retransmits.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Again {
    /// The peer has no receive request; retry after this many ns.
    NotReady(u64),
    /// The peer misses a packet.
    Gap,
}
