//! A baseline modelled on UCCL with its published defaults: software reliability over unreliable queue pairs. It sends
//! chunks of 64 KB over 32 queue pairs and retransmits lost chunks as a whole. There is one acknowledgement per 4 work
//! requests. It retransmits after 32 duplicate acknowledgements or 500 us. Timely (SIGCOMM'15) controls the rate. Here
//! each chunk has a separate timer, which favours this baseline.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;

use anyhow::{Context, Result};
use bifrost_rnic::{
    Access, Completion, CompletionKind, Connect, CqId, Datagram, Domain, INLINE_MAX, Nic, Operation, QpInit, Qpn,
    ReceiveRequest, Region, SendRequest, Sequence, Slice, Transport,
};

use super::Node;

const QUEUE_PAIRS: usize = 32;
const CHUNK: u32 = 64 * 1024;
const ACK_EVERY: u32 = 4;
/// Maximum delay of an acknowledgement, ns.
const ACK_DELAY_NS: u64 = 100_000;
const RTO_NS: u64 = 500_000;
const DUPLICATES: u32 = 32;
/// Number of sequence numbers after the first missing one that an acknowledgement covers.
const NAMED: u32 = 128;
/// Maximum number of chunks in flight: those that an acknowledgement can cover.
const IN_FLIGHT: usize = NAMED as usize;
const QUEUE_KEY: u32 = 0x1234;
/// Receive requests of each queue pair.
const RECEIVES: u16 = 256;

/// A chunk that was sent and is not acknowledged.
#[derive(Clone, Copy, Debug)]
struct Chunk {
    len: u32,
    sent_ns: u64,
    repeated: bool,
    /// It is in the retransmission queue.
    is_lost: bool,
}

/// Timely's state. Rates in bytes per second.
#[derive(Clone, Copy, Debug)]
struct Timely {
    rate: f64,
    line: f64,
    previous_ns: f64,
    difference_ns: f64,
    base_ns: f64,
    increases: u32,
}

impl Timely {
    fn sample(&mut self, rtt_ns: f64) {
        const ADD: f64 = 10e6 / 8.0;
        self.base_ns = self.base_ns.min(rtt_ns);
        if self.previous_ns == 0.0 {
            self.previous_ns = rtt_ns;
        }
        self.difference_ns = 0.54 * self.difference_ns + 0.46 * (rtt_ns - self.previous_ns);
        self.previous_ns = rtt_ns;
        let gradient = self.difference_ns / self.base_ns;
        let (low, high) = (self.base_ns + 50_000.0, self.base_ns + 500_000.0);
        if rtt_ns < low || (rtt_ns <= high && gradient <= 0.0) {
            self.increases += 1;
            self.rate += if self.increases >= 5 { 5.0 * ADD } else { ADD };
        } else {
            self.increases = 0;
            let cut = if rtt_ns > high { 1.0 - high / rtt_ns } else { gradient };
            self.rate *= 1.0 - 0.8 * cut.min(0.6);
        }
        self.rate = self.rate.clamp(self.line / 1000.0, self.line);
    }
}

/// One end of a connection: the first end sends, the second one receives.
#[derive(Debug)]
pub struct Uccl {
    nic: Nic,
    queue: CqId,
    queue_pairs: Vec<Qpn>,
    control: Qpn,
    memory: Region,
    to: Option<(u64, u32)>,
    peer_control: Option<Datagram>,
    completions: Vec<Completion>,
    // ---- Sending
    len: u32,
    /// Bytes of messages that may be open.
    open_max: u64,
    open_bytes: u64,
    next: u32,
    /// Bytes of the message being split into chunks.
    rest: u32,
    chunks: BTreeMap<u32, Chunk>,
    lost: VecDeque<u32>,
    acked: u32,
    duplicates: u32,
    timely: Timely,
    free_ns: u64,
    turn: usize,
    now_ns: u64,
    // ---- Receiving
    expected: u32,
    ahead: BTreeMap<u32, u32>,
    unacked: u32,
    newest: (u32, u64),
    ack_ns: u64,
    delivered_bytes: u64,
}

impl Uccl {
    /// Two connected ends. The first one has `depth` messages of `len` bytes open at a time.
    ///
    /// # Errors
    /// If a NIC refuses a value.
    pub fn pair(nics: [Nic; 2], mtu: u16, len: u32, depth: u32, rate: f64) -> Result<[Self; 2]> {
        let [a, b] = nics;
        let (mut a, mut b) = (Self::new(a, rate)?, Self::new(b, rate)?);
        for index in 0..QUEUE_PAIRS {
            a.connect(&b, index, mtu)?;
            b.connect(&a, index, mtu)?;
        }
        a.peer_control = Some(b.control_address());
        b.peer_control = Some(a.control_address());
        a.to = Some((b.memory.address, b.memory.key.0));
        a.len = len;
        a.open_max = u64::from(len) * u64::from(depth);
        for end in [&mut a, &mut b] {
            for number in end.queue_pairs.clone().into_iter().chain([end.control]) {
                for _ in 0..RECEIVES {
                    end.post_receive(number)?;
                }
            }
        }
        Ok([a, b])
    }

    fn new(mut nic: Nic, rate: f64) -> Result<Self> {
        let queue = nic.create_queue()?;
        let init = |transport, urgent| QpInit {
            transport,
            send_queue: queue,
            receive_queue: queue,
            send_depth: 1024,
            receive_depth: RECEIVES,
            domain: Domain(1),
            queue_key: QUEUE_KEY,
            urgent,
        };
        let control = nic.create_queue_pair(init(Transport::Ud, true))?;
        let mut queue_pairs = Vec::new();
        for _ in 0..QUEUE_PAIRS {
            queue_pairs.push(nic.create_queue_pair(init(Transport::Uc, false))?);
        }
        let memory = vec![0; CHUNK as usize];
        let memory = nic.register(Domain(1), Access::RemoteWrite, memory).map_err(|(error, _)| error)?;
        let line = rate / 8.0;
        Ok(Uccl {
            nic,
            queue,
            queue_pairs,
            control,
            memory,
            to: None,
            peer_control: None,
            completions: Vec::new(),
            len: 0,
            open_max: 0,
            open_bytes: 0,
            next: 0,
            rest: 0,
            chunks: BTreeMap::new(),
            lost: VecDeque::new(),
            acked: 0,
            duplicates: 0,
            timely: Timely {
                rate: line,
                line,
                previous_ns: 0.0,
                difference_ns: 0.0,
                base_ns: f64::INFINITY,
                increases: 0,
            },
            free_ns: 0,
            turn: 0,
            now_ns: 0,
            expected: 0,
            ahead: BTreeMap::new(),
            unacked: 0,
            newest: (0, 0),
            ack_ns: u64::MAX,
            delivered_bytes: 0,
        })
    }

    fn connect(&mut self, peer: &Uccl, index: usize, mtu: u16) -> Result<()> {
        let connect = Connect {
            address: peer.nic.address(),
            port: peer.nic.port(),
            queue_pair: *peer.queue_pairs.get(index).context("queue pair")?,
            source_port: 0xc000 + index as u16,
            send_sequence: Sequence::new(0),
            receive_sequence: Sequence::new(0),
            mtu,
            retries: 7,
            timeout_ns: 1_000_000,
        };
        Ok(self.nic.connect(self.queue_pairs[index], connect)?)
    }

    fn control_address(&self) -> Datagram {
        let (address, port): (IpAddr, u16) = (self.nic.address(), self.nic.port());
        Datagram { address, port, source_port: 0xc100, queue_pair: self.control, queue_key: QUEUE_KEY }
    }

    fn post_receive(&mut self, number: Qpn) -> Result<()> {
        let slice = Slice { key: self.memory.key, offset: 0, len: 64 };
        Ok(self.nic.post_receive(number, ReceiveRequest { token: 0, slice })?)
    }

    /// Bytes that have arrived, each counted once.
    pub fn delivered_bytes(&self) -> u64 {
        self.delivered_bytes
    }

    fn on_completion(&mut self, completion: &Completion) {
        match completion.kind {
            CompletionKind::Send => {}
            CompletionKind::ReceiveWrite => {
                let _ = self.post_receive(completion.queue_pair);
                let number = completion.immediate.unwrap_or_default();
                if number >= self.expected && self.ahead.insert(number, completion.len).is_none() {
                    self.delivered_bytes += u64::from(completion.len);
                }
                while self.ahead.remove(&self.expected).is_some() {
                    self.expected += 1;
                }
                self.newest = (number, completion.time_ns);
                self.unacked += 1;
                self.ack_ns = self.ack_ns.min(self.now_ns + ACK_DELAY_NS);
            }
            CompletionKind::Receive => {
                let slice = Slice { key: self.memory.key, offset: 0, len: 32 };
                let ack = self.nic.bytes(slice).and_then(|bytes| bytes.first_chunk::<32>().copied());
                let _ = self.post_receive(completion.queue_pair);
                if let Some(ack) = ack {
                    self.on_ack(&ack, completion.time_ns);
                }
            }
        }
    }

    fn on_ack(&mut self, ack: &[u8; 32], arrived_ns: u64) {
        let word = |at: usize| u32::from_be_bytes([ack[at], ack[at + 1], ack[at + 2], ack[at + 3]]);
        let (expected, newest, held) = (word(0), word(4), u64::from(word(8)));
        if let Some(chunk) = self.chunks.get(&newest).filter(|chunk| !chunk.repeated) {
            self.timely.sample(arrived_ns.saturating_sub(chunk.sent_ns).saturating_sub(held).max(1) as f64);
        }
        let before = self.acked;
        self.acked = self.acked.max(expected);
        let named = |number: u32| {
            let at = number.wrapping_sub(expected);
            number < expected || (at < NAMED && ack[16 + at as usize / 8] >> (at % 8) & 1 == 1)
        };
        let arrived: Vec<u32> = self.chunks.keys().copied().filter(|number| named(*number)).collect();
        for number in arrived {
            if let Some(chunk) = self.chunks.remove(&number) {
                self.open_bytes -= u64::from(chunk.len);
            }
        }
        self.duplicates = if self.acked > before { 0 } else { self.duplicates + 1 };
        if self.duplicates >= DUPLICATES {
            self.duplicates = 0;
            if let Some(oldest) = self.chunks.keys().next().copied() {
                self.lose(oldest);
            }
        }
    }

    fn lose(&mut self, number: u32) {
        if let Some(chunk) = self.chunks.get_mut(&number)
            && !std::mem::replace(&mut chunk.is_lost, true)
        {
            self.lost.push_back(number);
        }
    }

    fn send_ack(&mut self) {
        let Some(to) = self.peer_control else { return };
        let mut inline = [0; INLINE_MAX];
        inline[..4].copy_from_slice(&self.expected.to_be_bytes());
        inline[4..8].copy_from_slice(&self.newest.0.to_be_bytes());
        let held = self.now_ns.saturating_sub(self.newest.1) as u32;
        inline[8..12].copy_from_slice(&held.to_be_bytes());
        for number in self.ahead.keys().map(|number| number - self.expected).filter(|at| *at < NAMED) {
            inline[16 + number as usize / 8] |= 1 << (number % 8);
        }
        let operation = Operation::SendTo(to);
        let request = SendRequest { token: 0, operation, immediate: None, inline, inline_len: 32, slice: None };
        let _ = self.nic.post_send(self.control, request);
        (self.unacked, self.ack_ns) = (0, u64::MAX);
    }

    fn post(&mut self, number: u32, len: u32, repeated: bool) {
        let Some((address, key)) = self.to else { return };
        let slice = Slice { key: self.memory.key, offset: 0, len };
        let request = SendRequest {
            token: 0,
            operation: Operation::Write { address, key },
            immediate: Some(number),
            inline: [0; INLINE_MAX],
            inline_len: 0,
            slice: Some(slice),
        };
        self.turn = (self.turn + 1) % QUEUE_PAIRS;
        let _ = self.nic.post_send(self.queue_pairs[self.turn], request);
        self.chunks.insert(number, Chunk { len, sent_ns: self.now_ns, repeated, is_lost: false });
        self.free_ns = self.free_ns.max(self.now_ns) + (f64::from(len) * 1e9 / self.timely.rate) as u64;
    }

    fn emit(&mut self) {
        let overdue = |chunk: &Chunk| chunk.sent_ns + RTO_NS <= self.now_ns;
        let late: Vec<u32> = self.chunks.iter().filter(|(_, chunk)| overdue(chunk)).map(|(n, _)| *n).collect();
        late.into_iter().for_each(|number| self.lose(number));
        while self.free_ns <= self.now_ns {
            if let Some(number) = self.lost.pop_front() {
                if let Some(len) = self.chunks.get(&number).map(|chunk| chunk.len) {
                    self.post(number, len, true);
                }
                continue;
            }
            if self.rest == 0 && self.open_bytes + u64::from(self.len) <= self.open_max {
                self.rest = self.len;
                self.open_bytes += u64::from(self.len);
            }
            let within = self.next < self.acked + NAMED && self.chunks.len() < IN_FLIGHT;
            if self.rest == 0 || !within {
                break;
            }
            let len = self.rest.min(CHUNK);
            self.rest -= len;
            self.post(self.next, len, false);
            self.next += 1;
        }
    }
}

impl Node for Uccl {
    fn nic(&mut self) -> &mut Nic {
        &mut self.nic
    }

    fn turn(&mut self, now_ns: u64) -> bool {
        self.now_ns = now_ns;
        // Acknowledgements use one slot: one at a time.
        let busy = self.nic.poll(self.queue, 1, &mut self.completions) > 0;
        for completion in std::mem::take(&mut self.completions) {
            self.on_completion(&completion);
        }
        if self.unacked >= ACK_EVERY || self.ack_ns <= now_ns {
            self.send_ack();
        }
        if self.to.is_some() {
            self.emit();
        }
        busy
    }

    fn next_deadline(&mut self, now_ns: u64) -> u64 {
        let open = self.chunks.values().filter(|chunk| !chunk.is_lost);
        let rto = open.map(|chunk| chunk.sent_ns + RTO_NS).min().unwrap_or(u64::MAX);
        // If anything but the rate limits the sender, it waits for an acknowledgement.
        let free = if self.free_ns > now_ns { self.free_ns } else { u64::MAX };
        rto.min(free).min(self.ack_ns)
    }
}
