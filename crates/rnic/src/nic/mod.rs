//! The NIC: queue pairs, shared resources, and transmission. Reception is in `receive.rs`.

mod receive;

use std::collections::VecDeque;
use std::net::IpAddr;

use bifrost_wire::roce::{
    Acknowledgement, Aeth, Bth, Deth, Header, IcrcStarts, Opcode, Operation as Op, PATH_MTUS, Qpn, Reth, Route,
    Sequence, Transport,
};

use crate::burst::Burst;
use crate::completion::{Completion, CompletionKind, CompletionQueue, CqId, Status};
use crate::counters::Counters;
use crate::queue_pair::{QueuePair, State};
use crate::region::{Access, Region, Regions};
use crate::requester::{NEVER, Part, Pending, Verdict};
use crate::verbs::{
    Connect, Domain, INLINE_MAX, Key, Operation, PostError, QpInit, ReceiveRequest, SendRequest, Slice, VerbsError,
};

/// Capacity and identity of a NIC.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Its address: the source of all packets.
    pub address: IpAddr,
    /// The UDP port on which it receives.
    pub port: u16,
    /// Maximum number of queue pairs, up to 65,536.
    pub queue_pairs: u32,
    /// Maximum number of regions, up to 65,536.
    pub regions: u32,
    /// Seed for the random parts of keys.
    pub seed: u64,
}

/// A NIC.
#[derive(Debug)]
pub struct Nic {
    config: Config,
    queue_pairs: Vec<Option<Box<QueuePair>>>,
    free: Vec<u16>,
    random: fastrand::Rng,
    completions: Vec<CompletionQueue>,
    regions: Regions,
    /// Queue pairs with acknowledgements, urgent ones and others with packets to send.
    answering: VecDeque<u16>,
    urgent: VecDeque<u16>,
    waiting: VecDeque<u16>,
    /// RC queue pairs with a timer.
    armed: Vec<u16>,
    /// Only urgent queue pairs send.
    paused: bool,
    starts: IcrcStarts,
    counters: Counters,
}

/// Packets of one queue pair before the next one's turn: enough to justify a system call.
const TURN_PACKETS: usize = 16;

/// RC: packets of a message between two acknowledgement requests.
const ACKNOWLEDGE_EVERY: u32 = 64;

/// RC: time that a requester waits if its peer has no receive request: 0.12 ms (IBTA table 46).
const NOT_READY_TIMER: u8 = 7;

/// IBTA table 46, units of 10 us.
const NOT_READY_10US: [u64; 32] = [
    65_536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096,
    6144, 8192, 12_288, 16_384, 24_576, 32_768, 49_152,
];

/// Numbers 0 and 1 are the management queue pairs (IBTA 10.2.4).
const FIRST_NUMBER: u32 = 2;

impl Nic {
    /// A NIC without queue pairs.
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self {
            config,
            queue_pairs: Vec::new(),
            free: Vec::new(),
            random: fastrand::Rng::with_seed(config.seed),
            completions: Vec::new(),
            regions: Regions::new(config.regions, config.seed ^ 0x9e37_79b9_7f4a_7c15),
            answering: VecDeque::new(),
            urgent: VecDeque::new(),
            waiting: VecDeque::new(),
            armed: Vec::new(),
            paused: false,
            starts: IcrcStarts::default(),
            counters: Counters::default(),
        }
    }

    /// Its address.
    #[must_use]
    pub fn address(&self) -> IpAddr {
        self.config.address
    }

    /// The UDP port on which it receives.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.config.port
    }

    /// Its counters.
    #[must_use]
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Creates a completion queue.
    ///
    /// # Errors
    /// If there are 65,536.
    pub fn create_queue(&mut self) -> Result<CqId, VerbsError> {
        let id = u16::try_from(self.completions.len()).map_err(|_| VerbsError::Exhausted)?;
        self.completions.push(CompletionQueue::default());
        Ok(CqId(id))
    }

    /// Moves up to `max` completions to the end of `out`, and returns their number.
    pub fn poll(&mut self, queue: CqId, max: usize, out: &mut Vec<Completion>) -> usize {
        let Some(completions) = self.completions.get_mut(usize::from(queue.0)) else { return 0 };
        let count = completions.0.len().min(max);
        self.counters.polled_completions += count as u64;
        for completion in completions.0.drain(..count) {
            let slot = slot(completion.queue_pair);
            if let Some(Some(qp)) = self.queue_pairs.get_mut(usize::from(slot)) {
                let outstanding = match completion.kind {
                    CompletionKind::Send => &mut qp.requester.outstanding,
                    _ => &mut qp.responder.outstanding,
                };
                *outstanding = outstanding.saturating_sub(1);
            }
            out.push(completion);
        }
        count
    }

    /// Creates a queue pair. UD ones are ready at once, others must be connected.
    ///
    /// # Errors
    /// If no number is left, a completion queue does not exist, or a depth is out of range.
    pub fn create_queue_pair(&mut self, init: QpInit) -> Result<Qpn, VerbsError> {
        let known = |queue: CqId| usize::from(queue.0) < self.completions.len();
        if !known(init.send_queue) || !known(init.receive_queue) {
            return Err(VerbsError::Unknown);
        }
        if init.send_depth == 0 || init.receive_depth == 0 {
            return Err(VerbsError::Value("depth"));
        }
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None if self.queue_pairs.len() < (self.config.queue_pairs.min(0xfffe)) as usize => {
                self.queue_pairs.push(None);
                self.queue_pairs.len() as u16 - 1
            }
            None => return Err(VerbsError::Exhausted),
        };
        let number = Qpn::new(u32::from(self.random.u8(..)) << 16 | (u32::from(slot) + FIRST_NUMBER));
        let state = if init.transport == Transport::Ud { State::Ready } else { State::Reset };
        self.queue_pairs[usize::from(slot)] = Some(Box::new(QueuePair::new(number, init, state)));
        Ok(number)
    }

    /// Connects an RC or UC queue pair in the reset state. Receive requests that are already posted stay.
    ///
    /// # Errors
    /// If it is not in the reset state, or a value is out of range.
    pub fn connect(&mut self, number: Qpn, peer: Connect) -> Result<(), VerbsError> {
        let qp = find(&mut self.queue_pairs, number).ok_or(VerbsError::Unknown)?;
        if qp.state != State::Reset {
            return Err(VerbsError::Value("state"));
        }
        if !PATH_MTUS.contains(&peer.mtu) {
            return Err(VerbsError::Value("path MTU"));
        }
        if peer.address.is_ipv4() != self.config.address.is_ipv4() {
            return Err(VerbsError::Value("address family"));
        }
        if peer.timeout_ns == 0 || peer.port == 0 {
            return Err(VerbsError::Value("timeout or port"));
        }
        qp.requester.begin(&peer);
        qp.responder.begin(&peer);
        qp.peer = Some(peer);
        qp.state = State::Ready;
        Ok(())
    }

    /// Resets a queue pair. Posted requests are discarded, and so are completions that were not polled (IBTA 10.3.1.1).
    ///
    /// # Errors
    /// If there is no such queue pair.
    pub fn reset(&mut self, number: Qpn) -> Result<(), VerbsError> {
        let qp = find(&mut self.queue_pairs, number).ok_or(VerbsError::Unknown)?;
        let state = if qp.init.transport == Transport::Ud { State::Ready } else { State::Reset };
        let (scheduled, armed) = (qp.scheduled, qp.armed);
        *qp = QueuePair { scheduled, armed, ..QueuePair::new(number, qp.init, state) };
        for queue in [qp.init.send_queue, qp.init.receive_queue] {
            self.completions[usize::from(queue.0)].0.retain(|completion| completion.queue_pair != number);
        }
        Ok(())
    }

    /// Removes a queue pair.
    ///
    /// # Errors
    /// If there is no such queue pair.
    pub fn destroy(&mut self, number: Qpn) -> Result<(), VerbsError> {
        self.reset(number)?;
        let slot = slot(number);
        self.queue_pairs[usize::from(slot)] = None;
        for list in [&mut self.answering, &mut self.urgent, &mut self.waiting] {
            list.retain(|other| *other != slot);
        }
        self.armed.retain(|other| *other != slot);
        self.free.push(slot);
        Ok(())
    }

    /// Puts a queue pair into error, as a hardware fault does: its open requests complete as flushed (IBTA 10.3.1.7).
    /// No effect in the reset and error states.
    pub fn put_into_error(&mut self, now_ns: u64, number: Qpn) {
        if self.is_ready(number) {
            self.fail(now_ns, slot(number), Status::Flushed);
        }
    }

    /// Number of queue pairs that accept requests.
    pub fn ready(&self) -> impl Iterator<Item = Qpn> {
        self.queue_pairs.iter().flatten().filter(|qp| qp.state == State::Ready).map(|qp| qp.number)
    }

    /// Number of connected ones: RC and UC.
    pub fn connected(&self) -> impl Iterator<Item = Qpn> {
        let connected = self.queue_pairs.iter().flatten().filter(|qp| qp.init.transport != Transport::Ud);
        connected.filter(|qp| qp.state == State::Ready).map(|qp| qp.number)
    }

    /// Whether a queue pair accepts requests: connected, and not in error.
    #[must_use]
    pub fn is_ready(&self, number: Qpn) -> bool {
        let qp = self.queue_pairs.get(usize::from(slot(number))).and_then(Option::as_ref);
        qp.is_some_and(|qp| qp.number == number && qp.state == State::Ready)
    }

    /// Registers memory, which the NIC owns until it is deregistered.
    ///
    /// # Errors
    /// If no key is left, or the memory has 4 GiB or more; the memory is returned.
    pub fn register(
        &mut self,
        domain: Domain,
        access: Access,
        memory: Vec<u8>,
    ) -> Result<Region, (VerbsError, Vec<u8>)> {
        self.regions.register(domain, access, memory)
    }

    /// Deregisters memory and returns it. From now on nothing is written there, even with the key.
    pub fn deregister(&mut self, key: Key) -> Option<Vec<u8>> {
        self.regions.deregister(key)
    }

    /// Bytes of registered memory.
    #[must_use]
    pub fn bytes(&self, slice: Slice) -> Option<&[u8]> {
        self.regions.bytes(slice)
    }

    /// Bytes of registered memory, mutable.
    pub fn bytes_mut(&mut self, slice: Slice) -> Option<&mut [u8]> {
        self.regions.bytes_mut(slice)
    }

    /// Copies between two regions; `false` if a slice is not inside its region, or the lengths differ.
    pub fn copy(&mut self, from: Slice, to: Slice) -> bool {
        self.regions.copy(from, to)
    }

    /// Posts a send request.
    ///
    /// # Errors
    /// A [`PostError`]; nothing is posted then.
    pub fn post_send(&mut self, number: Qpn, request: SendRequest) -> Result<(), PostError> {
        let qp = find(&mut self.queue_pairs, number).ok_or(PostError::UnknownQueuePair)?;
        match qp.state {
            State::Ready => {}
            State::Reset => return Err(PostError::NotConnected),
            State::Error => return Err(PostError::InError),
        }
        let datagram = qp.init.transport == Transport::Ud;
        let suits = match request.operation {
            Operation::SendTo(to) => {
                datagram
                    && request.len() <= u32::from(PATH_MTUS[4])
                    && to.address.is_ipv4() == self.config.address.is_ipv4()
            }
            // IBTA 9.7.4.1: messages have at most 2^31 bytes.
            _ => !datagram && request.len() <= 1 << 31,
        };
        if !suits || usize::from(request.inline_len) > INLINE_MAX {
            return Err(PostError::Operation);
        }
        if request.slice.is_some_and(|slice| !self.regions.is_of(slice, qp.init.domain)) {
            return Err(PostError::Memory);
        }
        if qp.requester.outstanding >= qp.init.send_depth {
            return Err(PostError::Full);
        }
        qp.requester.push(request);
        self.counters.posted_requests += 1;
        schedule(qp, &mut self.urgent, &mut self.waiting);
        Ok(())
    }

    /// Posts a receive request.
    ///
    /// # Errors
    /// A [`PostError`]; nothing is posted then.
    pub fn post_receive(&mut self, number: Qpn, request: ReceiveRequest) -> Result<(), PostError> {
        let qp = find(&mut self.queue_pairs, number).ok_or(PostError::UnknownQueuePair)?;
        if qp.state == State::Error {
            return Err(PostError::InError);
        }
        if !self.regions.is_of(request.slice, qp.init.domain) {
            return Err(PostError::Memory);
        }
        if qp.responder.outstanding >= qp.init.receive_depth {
            return Err(PostError::Full);
        }
        qp.responder.queue.push_back(request);
        qp.responder.outstanding += 1;
        self.counters.posted_requests += 1;
        Ok(())
    }

    /// Priority flow control (IEEE 802.1Qbb): while paused, only urgent queue pairs send; they have a separate class.
    pub fn set_paused(&mut self, paused: bool) {
        self.paused = paused;
    }

    /// Whether [`Nic::transmit`] has something to send.
    #[must_use]
    pub fn has_packets(&self) -> bool {
        let data = !(self.answering.is_empty() && self.waiting.is_empty());
        !self.urgent.is_empty() || (data && !self.paused)
    }

    /// Appends up to `max` packets to `burst`: acknowledgements first, then those of urgent queue pairs, then the
    /// others in turn. Returns their number.
    pub fn transmit(&mut self, now_ns: u64, max: usize, burst: &mut Burst) -> usize {
        let mut left = max;
        while left > 0 && !self.paused {
            let Some(slot) = self.answering.pop_front() else { break };
            left -= self.answer(slot, burst);
        }
        while left > 0 {
            let (slot, urgent) = match (self.urgent.pop_front(), self.paused || self.waiting.is_empty()) {
                (Some(slot), _) => (slot, true),
                (None, false) => (self.waiting.pop_front().unwrap_or_default(), false),
                (None, true) => break,
            };
            left -= self.send_turn(now_ns, slot, left.min(TURN_PACKETS), burst);
            let Some(Some(qp)) = self.queue_pairs.get_mut(usize::from(slot)) else { continue };
            qp.scheduled = qp.state == State::Ready && qp.requester.has_work(now_ns);
            if qp.scheduled {
                let list = if urgent { &mut self.urgent } else { &mut self.waiting };
                list.push_back(slot);
            }
        }
        max - left
    }

    /// When [`Nic::advance`] is due, ns; `u64::MAX`: never.
    #[must_use]
    pub fn next_deadline(&self, now_ns: u64) -> u64 {
        let qps = self.armed.iter().filter_map(|slot| self.queue_pairs.get(usize::from(*slot))?.as_ref());
        qps.map(|qp| qp.requester.wake_at(now_ns)).min().unwrap_or(NEVER)
    }

    /// Runs the timers of RC.
    pub fn advance(&mut self, now_ns: u64) {
        let mut at = 0;
        while let Some(&slot) = self.armed.get(at) {
            let Some(Some(qp)) = self.queue_pairs.get_mut(usize::from(slot)) else {
                self.armed.swap_remove(at);
                continue;
            };
            let mut verdict = Verdict::Continue;
            if let (true, Some(peer)) = (qp.requester.deadline <= now_ns, qp.peer) {
                self.counters.timeouts += 1;
                verdict = qp.requester.time_out(now_ns, &peer);
            }
            if qp.state == State::Ready && qp.requester.has_work(now_ns) {
                schedule(qp, &mut self.urgent, &mut self.waiting);
            }
            if verdict == Verdict::GiveUp {
                self.fail(now_ns, slot, Status::RetryExceeded);
            }
            let Some(Some(qp)) = self.queue_pairs.get_mut(usize::from(slot)) else { continue };
            if qp.requester.wake_at(now_ns) == NEVER {
                qp.armed = false;
                self.armed.swap_remove(at);
            } else {
                at += 1;
            }
        }
    }

    /// Puts a queue pair into error: its first open send request completes with `status`, all others are flushed.
    fn fail(&mut self, now_ns: u64, slot: u16, status: Status) {
        let Some(Some(qp)) = self.queue_pairs.get_mut(usize::from(slot)) else { return };
        self.counters.queue_pairs_in_error += 1;
        qp.state = State::Error;
        qp.responder.tear();
        let mut status = status;
        for pending in qp.requester.queue.drain(..) {
            let completion = sent(&pending, qp.number, status, now_ns);
            self.completions[usize::from(qp.init.send_queue.0)].0.push_back(completion);
            status = Status::Flushed;
        }
        qp.requester.deadline = NEVER;
        for request in qp.responder.queue.drain(..) {
            let completion = Completion {
                token: request.token,
                queue_pair: qp.number,
                kind: CompletionKind::Receive,
                status: Status::Flushed,
                len: 0,
                immediate: None,
                source: None,
                time_ns: now_ns,
            };
            self.completions[usize::from(qp.init.receive_queue.0)].0.push_back(completion);
        }
    }

    /// Emits up to `max` packets of a queue pair and returns their number.
    fn send_turn(&mut self, now_ns: u64, slot: u16, max: usize, burst: &mut Burst) -> usize {
        let Some(Some(qp)) = self.queue_pairs.get_mut(usize::from(slot)) else { return 0 };
        let transport = qp.init.transport;
        let (mtu, timeout_ns) = qp.peer.map_or((PATH_MTUS[4], NEVER), |peer| (peer.mtu, peer.timeout_ns));
        let mut count = 0;
        while count < max && qp.state == State::Ready {
            let Some(part) = qp.requester.take_part(now_ns, transport, mtu, timeout_ns) else { break };
            if !push_part(qp, &part, self.config.address, &self.regions, burst) {
                self.fail(now_ns, slot, Status::LocalProtection);
                return count;
            }
            count += 1;
            self.counters.sent_packets += 1;
            self.counters.repeated_packets += u64::from(part.repeated);
            if transport != Transport::Rc && part.last {
                let completion = qp.requester.take_sent().map(|p| sent(&p, qp.number, Status::Success, now_ns));
                self.completions[usize::from(qp.init.send_queue.0)].0.extend(completion);
            }
        }
        if transport == Transport::Rc {
            arm(qp, &mut self.armed);
        }
        count
    }

    fn answer(&mut self, slot: u16, burst: &mut Burst) -> usize {
        let Some(Some(qp)) = self.queue_pairs.get_mut(usize::from(slot)) else { return 0 };
        let (Some(what), Some(peer)) = (qp.answer.take(), qp.peer) else { return 0 };
        let back = u32::from(what == Acknowledgement::Ack);
        let header = Header {
            bth: Bth {
                opcode: Opcode { transport: Transport::Rc, operation: Op::Acknowledge }.byte(),
                destination: peer.queue_pair,
                sequence: Sequence::new(qp.responder.expected.get().wrapping_sub(back)),
                ..Bth::default()
            },
            aeth: Some(Aeth { what, messages: qp.responder.messages }),
            ..Header::default()
        };
        burst.push(qp.route(self.config.address, &peer), header, [&[], &[]]);
        self.counters.sent_packets += 1;
        1
    }
}

fn slot(number: Qpn) -> u16 {
    (number.get() as u16).wrapping_sub(FIRST_NUMBER as u16)
}

fn find(all: &mut [Option<Box<QueuePair>>], number: Qpn) -> Option<&mut QueuePair> {
    let qp = all.get_mut(usize::from(slot(number)))?.as_mut()?;
    (qp.number == number).then_some(qp)
}

fn schedule(qp: &mut QueuePair, urgent: &mut VecDeque<u16>, waiting: &mut VecDeque<u16>) {
    if !std::mem::replace(&mut qp.scheduled, true) {
        let list = if qp.init.urgent { urgent } else { waiting };
        list.push_back(slot(qp.number));
    }
}

fn arm(qp: &mut QueuePair, armed: &mut Vec<u16>) {
    if !qp.armed && qp.requester.deadline != NEVER {
        qp.armed = true;
        armed.push(slot(qp.number));
    }
}

fn sent(pending: &Pending, number: Qpn, status: Status, now_ns: u64) -> Completion {
    Completion {
        token: pending.request.token,
        queue_pair: number,
        kind: CompletionKind::Send,
        status,
        len: 0,
        immediate: None,
        source: None,
        time_ns: now_ns,
    }
}

/// Appends a packet; `false` if its memory is no longer registered.
fn push_part(qp: &QueuePair, part: &Part, source: IpAddr, regions: &Regions, burst: &mut Burst) -> bool {
    let Some(pending) = qp.requester.queue.get(part.index) else { return false };
    let request = &pending.request;
    let inline_len = u32::from(request.inline_len);
    let inline = &request.inline[part.from.min(inline_len) as usize..part.to.min(inline_len) as usize];
    let outline = match request.slice {
        Some(slice) => {
            let (from, to) = (part.from.max(inline_len) - inline_len, part.to.max(inline_len) - inline_len);
            match regions.bytes(Slice { offset: slice.offset + from, len: to - from, ..slice }) {
                Some(bytes) => bytes,
                None => return false,
            }
        }
        None => &[],
    };
    let transport = qp.init.transport;
    let immediate = request.immediate.filter(|_| part.last);
    let write = matches!(request.operation, Operation::Write { .. });
    let operation = Op::of(write, part.first, part.last, immediate.is_some());
    let mut header = Header {
        bth: Bth {
            opcode: Opcode { transport, operation }.byte(),
            acknowledge: transport == Transport::Rc
                && (part.last || part.sequence.get().is_multiple_of(ACKNOWLEDGE_EVERY)),
            sequence: part.sequence,
            ..Bth::default()
        },
        immediate,
        ..Header::default()
    };
    let route = match (request.operation, &qp.peer) {
        (Operation::SendTo(to), _) => {
            header.bth.destination = to.queue_pair;
            header.deth = Some(Deth { queue_key: to.queue_key, source: qp.number });
            let (source_port, destination_port) = (to.source_port, to.port);
            Route { source, destination: to.address, source_port, destination_port }
        }
        (operation, Some(peer)) => {
            header.bth.destination = peer.queue_pair;
            if let (Operation::Write { address, key }, true) = (operation, part.first) {
                header.reth = Some(Reth { address, key, length: request.len() });
            }
            qp.route(source, peer)
        }
        _ => return false,
    };
    burst.push(route, header, [inline, outline]);
    true
}
