//! A baseline: hosts with many connections over the reliable service (RC) of go-back-N NICs with DCQCN, like an RDMA
//! library that leaves reliability and congestion control to the NIC.

use std::collections::{HashMap, VecDeque};

use anyhow::{Result, anyhow};
use bifrost_rnic::{
    Access, Completion, Connect, CqId, Datagram, Domain, INLINE_MAX, Nic, Operation, QpInit, Qpn, ReceiveRequest,
    Region, SendRequest, Sequence, Slice, Status, Transport,
};

use super::Node;
use super::dcqcn::{Dcqcn, DcqcnConfig};
use crate::Rng;

/// Bytes that a queue pair sends at once if its rate allows: one work request.
const BURST: u32 = 16 * 1024;
/// Receive requests of each queue pair.
const RECEIVES: u16 = 128;
const RETRIES: u8 = 7;
/// Retransmission timeout of the requester, ns: 4.096 us times 2 to the 10th.
const TIMEOUT_NS: u64 = 4_194_304;
const QUEUE_KEY: u32 = 0x1234;
/// Length of a notification, bytes: the sender's number of the connection.
const NOTIFICATION: usize = 4;

/// A connection with this host as the sender.
#[derive(Debug)]
struct Flow {
    queue_pair: Qpn,
    to: (u64, u32),
    rate: Option<Dcqcn>,
    /// Bytes left to post, for each open message that is not completely posted.
    rest: VecDeque<u32>,
    free_ns: u64,
    failed: bool,
}

/// A connection with this host as the receiver.
#[derive(Debug)]
struct Incoming {
    sender: Datagram,
    flow: u32,
    notified_ns: Option<u64>,
}

/// A host that writes messages of one length to random other hosts, with a fixed number in flight.
#[derive(Debug)]
pub struct RcMesh {
    nic: Nic,
    queue: CqId,
    control: Qpn,
    memory: Region,
    len: u32,
    depth: u32,
    open: u32,
    dcqcn: Option<DcqcnConfig>,
    flows: Vec<Flow>,
    /// Flows with data to post.
    active: Vec<u32>,
    incoming: HashMap<u32, Incoming>,
    completions: Vec<Completion>,
    sent_bytes: u64,
    failed: u64,
    rng: Rng,
}

impl RcMesh {
    /// A host that sends and receives messages of `len` bytes, of which `depth` are open at a time.
    ///
    /// # Errors
    /// If the NIC refuses a value.
    pub fn new(mut nic: Nic, len: u32, depth: u32, dcqcn: Option<DcqcnConfig>, seed: u64) -> Result<Self> {
        let queue = nic.create_queue()?;
        let control = nic.create_queue_pair(init(queue, Transport::Ud))?;
        let memory = vec![0; len as usize];
        let memory = nic.register(Domain(1), Access::RemoteWrite, memory).map_err(|(error, _)| error)?;
        let mut host = RcMesh {
            nic,
            queue,
            control,
            memory,
            len,
            depth,
            open: 0,
            dcqcn,
            flows: Vec::new(),
            active: Vec::new(),
            incoming: HashMap::new(),
            completions: Vec::new(),
            sent_bytes: 0,
            failed: 0,
            rng: Rng::new(seed),
        };
        for _ in 0..RECEIVES {
            host.post_receive(control)?;
        }
        Ok(host)
    }

    /// Opens a connection on which this host sends to another.
    ///
    /// # Errors
    /// If a NIC refuses a value.
    pub fn connect(&mut self, to: &mut RcMesh, mtu: u16) -> Result<()> {
        let source_port = 0xc000 | (self.rng.next_u64() & 0x3fff) as u16;
        let mut ends = Vec::new();
        for host in [&mut *self, &mut *to] {
            ends.push(host.nic.create_queue_pair(init(host.queue, Transport::Rc))?);
        }
        let [mine, theirs] = ends[..] else { return Err(anyhow!("two ends")) };
        let connect = |peer: &RcMesh, queue_pair| Connect {
            address: peer.nic.address(),
            port: peer.nic.port(),
            queue_pair,
            source_port,
            send_sequence: Sequence::new(0),
            receive_sequence: Sequence::new(0),
            mtu,
            retries: RETRIES,
            timeout_ns: TIMEOUT_NS,
        };
        self.nic.connect(mine, connect(to, theirs))?;
        to.nic.connect(theirs, connect(self, mine))?;
        for _ in 0..RECEIVES {
            to.post_receive(theirs)?;
        }
        let (address, port) = (self.nic.address(), self.nic.port());
        let sender = Datagram { address, port, source_port, queue_pair: self.control, queue_key: QUEUE_KEY };
        let flow = self.flows.len() as u32;
        to.incoming.insert(theirs.get(), Incoming { sender, flow, notified_ns: None });
        self.flows.push(Flow {
            queue_pair: mine,
            to: (to.memory.address, to.memory.key.0),
            rate: self.dcqcn.map(Dcqcn::new),
            rest: VecDeque::new(),
            free_ns: 0,
            failed: false,
        });
        Ok(())
    }

    /// Bytes of messages that this host has sent and knows to have arrived.
    pub fn sent_bytes(&self) -> u64 {
        self.sent_bytes
    }

    /// Number of failed connections, which are not set up again.
    pub fn failed(&self) -> u64 {
        self.failed
    }

    fn post_receive(&mut self, number: Qpn) -> Result<()> {
        let slice = Slice { key: self.memory.key, offset: 0, len: NOTIFICATION as u32 };
        Ok(self.nic.post_receive(number, ReceiveRequest { token: 0, slice })?)
    }

    fn on_completion(&mut self, now_ns: u64, completion: &Completion) {
        let flow = completion.token as u32 >> 1;
        if completion.queue_pair == self.control {
            if completion.len > 0 {
                let slice = Slice { key: self.memory.key, offset: 0, len: NOTIFICATION as u32 };
                let number = self.nic.bytes(slice).and_then(|bytes| bytes.first_chunk().copied());
                let flow = number.and_then(|number| self.flows.get_mut(u32::from_be_bytes(number) as usize));
                if let Some(rate) = flow.and_then(|flow| flow.rate.as_mut()) {
                    rate.on_notification(now_ns);
                }
                let _ = self.post_receive(self.control);
            }
        } else if self.incoming.contains_key(&completion.queue_pair.get()) {
            if completion.status == Status::Success {
                let _ = self.post_receive(completion.queue_pair);
            }
        } else if completion.status != Status::Success {
            let flow = &mut self.flows[flow as usize];
            self.failed += u64::from(!std::mem::replace(&mut flow.failed, true));
            self.open -= (completion.token & 1) as u32 + flow.rest.drain(..).count() as u32;
        } else if completion.token & 1 == 1 {
            self.open -= 1;
            self.sent_bytes += u64::from(self.len);
        }
    }

    /// Opens messages, and posts as the rates allow.
    fn emit(&mut self, now_ns: u64) {
        while self.open < self.depth && self.flows.iter().any(|flow| !flow.failed) {
            let at = self.rng.below(self.flows.len() as u64) as usize;
            let flow = &mut self.flows[at];
            if flow.failed {
                continue;
            }
            if flow.rest.is_empty() {
                self.active.push(at as u32);
            }
            flow.rest.push_back(self.len);
            self.open += 1;
        }
        let (nic, flows, all) = (&mut self.nic, &mut self.flows, self.len);
        self.active.retain(|&at| {
            let flow = &mut flows[at as usize];
            while let Some(rest) = flow.rest.front().copied().filter(|_| flow.free_ns <= now_ns) {
                let len = rest.min(BURST);
                let (address, key) = flow.to;
                let slice = Slice { key: self.memory.key, offset: all - rest, len };
                let request = SendRequest {
                    token: u64::from(at) << 1 | u64::from(len == rest),
                    operation: Operation::Write { address: address + u64::from(all - rest), key },
                    immediate: Some(0),
                    inline: [0; INLINE_MAX],
                    inline_len: 0,
                    slice: Some(slice),
                };
                if nic.post_send(flow.queue_pair, request).is_err() {
                    // Full: a completion follows.
                    return true;
                }
                flow.rest.pop_front();
                if len < rest {
                    flow.rest.push_front(rest - len);
                }
                if let Some(rate) = &mut flow.rate {
                    rate.on_sent(u64::from(len));
                    flow.free_ns = now_ns + (f64::from(len) * 8e9 / rate.rate(now_ns)) as u64;
                }
            }
            !flow.rest.is_empty()
        });
    }
}

fn init(queue: CqId, transport: Transport) -> QpInit {
    QpInit {
        transport,
        send_queue: queue,
        receive_queue: queue,
        send_depth: 1024,
        receive_depth: RECEIVES,
        domain: Domain(1),
        queue_key: QUEUE_KEY,
        urgent: transport == Transport::Ud,
    }
}

impl Node for RcMesh {
    fn nic(&mut self) -> &mut Nic {
        &mut self.nic
    }

    fn turn(&mut self, now_ns: u64) -> bool {
        // Notifications use one slot: one at a time.
        let busy = self.nic.poll(self.queue, 1, &mut self.completions) > 0;
        for completion in std::mem::take(&mut self.completions) {
            self.on_completion(now_ns, &completion);
        }
        self.emit(now_ns);
        busy
    }

    fn next_deadline(&mut self, now_ns: u64) -> u64 {
        let free = self.active.iter().map(|at| self.flows[*at as usize].free_ns).filter(|at| *at > now_ns);
        free.min().unwrap_or(u64::MAX)
    }

    fn on_mark(&mut self, now_ns: u64, queue_pair: Qpn) {
        let Some(every) = self.dcqcn.map(|dcqcn| dcqcn.notify_ns) else { return };
        let Some(incoming) = self.incoming.get_mut(&queue_pair.get()) else { return };
        if incoming.notified_ns.is_some_and(|at| now_ns < at + every) {
            return;
        }
        incoming.notified_ns = Some(now_ns);
        let mut inline = [0; INLINE_MAX];
        inline[..NOTIFICATION].copy_from_slice(&incoming.flow.to_be_bytes());
        let (operation, inline_len) = (Operation::SendTo(incoming.sender), NOTIFICATION as u8);
        let request = SendRequest { token: 0, operation, immediate: None, inline, inline_len, slice: None };
        let _ = self.nic.post_send(self.control, request);
    }
}
