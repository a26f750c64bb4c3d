//! RDMA NICs of this host, used through the system's libibverbs, which is loaded when it is first needed.
//!
//! Building programs does not require the library. The structures, and the functions that its headers define inline,
//! are reimplemented here (`sys`); tests compare the layout with a C compiler's.
//!
//! Differences from the software NIC:
//! - it has its address already: [`RdmaCore::new`] finds the port with that RoCE v2 GID;
//! - packets go to UDP port 4791, so the peer must receive there;
//! - a path's source port is encoded in a flow label, from which Linux and the drivers compute it;
//! - requests reach it in batches: [`RdmaCore::transmit`];
//! - urgent queue pairs have no priority: that would need traffic classes;
//! - completion times are those of its own clock if it timestamps completions, otherwise the time of polling.
//!
//! Connecting asks the kernel for the peer's link-layer address, which takes up to a second if there is no reply.

mod address;
mod clock;
mod completions;
mod device;
mod error;
mod library;
mod memory;
mod queue_pair;
pub mod sys;
#[cfg(test)]
mod tests;

use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::ptr;
use std::time::Instant;

use bifrost_rnic::{
    Access, Completion, CompletionKind, Connect, CqId, Domain, Key, PostError, QpInit, Qpn, ReceiveRequest, Region,
    SendRequest, Slice, Status, Transport, VerbsError,
};
use hashbrown::HashMap;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use self::address::source;
use self::completions::{BATCH, Clock, Queue, Raw, status};
use self::device::Port;
pub use self::error::OpenError;
use self::library::{Functions, errno, library};
use self::memory::Regions;
use self::queue_pair::{Around, GRH_LEN, Name, QueuePair, State};
use self::sys::{AsyncEvent, CompChannel, Pd};
use crate::provider::Provider;

/// Settings of a NIC.
#[derive(Clone, Copy, Debug)]
pub struct RdmaCoreConfig {
    /// Its address, which selects the device and the port.
    pub address: IpAddr,
    /// Maximum number of queue pairs; at most 65,535.
    pub queue_pairs: u32,
    /// Maximum number of memory regions.
    pub regions: u32,
    /// Seed for the regions' addresses.
    pub seed: u64,
}

/// Counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RdmaCoreCounters {
    /// Doorbells: how often requests were passed to the NIC.
    pub batches: u64,
    /// Requests passed to the NIC.
    pub posted_requests: u64,
    /// Polled completions.
    pub polled_completions: u64,
    /// Completions of queue pairs that were reset or removed meanwhile.
    pub stale_completions: u64,
    /// Queue pairs that entered the error state.
    pub queue_pairs_in_error: u64,
    /// Asynchronous events of the device, such as a port that goes down.
    pub events: u64,
}

/// A slot for a queue pair.
#[derive(Debug, Default)]
struct Place {
    /// How many times it was used or reset.
    life: u32,
    pair: Option<Box<QueuePair>>,
}

/// A NIC with verbs.
#[derive(Debug)]
pub struct RdmaCore {
    config: RdmaCoreConfig,
    functions: &'static Functions,
    channel: *mut CompChannel,
    queues: Vec<Queue>,
    clock: Clock,
    domains: HashMap<u32, *mut Pd>,
    regions: Regions,
    places: Vec<Place>,
    free: Vec<u16>,
    numbers: HashMap<u32, u16>,
    /// Slots of queue pairs with requests that were not passed to the NIC yet.
    dirty: Vec<u16>,
    batch: Option<Box<[Raw; BATCH]>>,
    epoch: Instant,
    /// Events were requested.
    armed: bool,
    counters: RdmaCoreCounters,
    /// Last, because everything else belongs to this device.
    port: Port,
}

impl RdmaCore {
    /// Opens the device that has the address.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn new(config: RdmaCoreConfig) -> Result<Self, OpenError> {
        if !device::is_any() {
            return Err(OpenError::NoDevice);
        }
        Self::with(library()?, config)
    }

    fn with(functions: &'static Functions, config: RdmaCoreConfig) -> Result<Self, OpenError> {
        let port = Port::open(functions, config.address)?;
        // SAFETY: the device is open.
        let channel = unsafe { (functions.create_comp_channel)(port.context) };
        if channel.is_null() {
            return Err(OpenError::Call("ibv_create_comp_channel", errno()));
        }
        let nic = Self {
            config,
            functions,
            channel,
            queues: Vec::new(),
            clock: Clock::Unknown,
            domains: HashMap::new(),
            regions: Regions::new(config.regions, config.seed),
            places: Vec::new(),
            free: Vec::new(),
            numbers: HashMap::new(),
            dirty: Vec::new(),
            batch: None,
            epoch: Instant::now(),
            armed: false,
            counters: RdmaCoreCounters::default(),
            port,
        };
        // Nothing waits in them.
        for descriptor in [nic.descriptor(), nic.events()] {
            let flags = fcntl_getfl(descriptor).map_err(|e| OpenError::Call("fcntl", e.raw_os_error()))?;
            fcntl_setfl(descriptor, flags | OFlags::NONBLOCK)
                .map_err(|e| OpenError::Call("fcntl", e.raw_os_error()))?;
        }
        Ok(nic)
    }

    /// Device, port and clock, as text.
    #[must_use]
    pub fn description(&self) -> String {
        let Port { name, port, gid_index, .. } = &self.port;
        let clock = if let Clock::Nic(_) = self.clock { "the NIC's clock" } else { "software clock" };
        format!("{name} port {port} GID {gid_index}, {clock}")
    }

    /// Maximum payload of a packet, bytes.
    #[must_use]
    pub fn mtu(&self) -> u16 {
        self.port.mtu
    }

    /// Whether the device is the kernel's soft-RoCE. Its UC does not survive the loss of a packet of a multi-packet
    /// WRITE: it refuses all later messages (`do_class_d1e_error` of Linux 6.1 keeps the opcode of the torn message).
    #[must_use]
    pub fn is_soft_roce(&self) -> bool {
        self.port.name.starts_with("rxe")
    }

    /// Time since the device was opened, ns: the clock for callers.
    #[must_use]
    pub fn now_ns(&self) -> u64 {
        self.epoch.elapsed().as_nanos() as u64
    }

    /// The counters.
    #[must_use]
    pub fn counters(&self) -> &RdmaCoreCounters {
        &self.counters
    }

    /// Readable after [`RdmaCore::arm`], when there is a completion.
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel lives as long as `self`.
        unsafe { BorrowedFd::borrow_raw((*self.channel).fd) }
    }

    fn events(&self) -> BorrowedFd<'_> {
        // SAFETY: the device is open as long as `self` lives.
        unsafe { BorrowedFd::borrow_raw((*self.port.context).async_fd) }
    }

    /// Makes the descriptor readable at the next completion. Returns whether there are completions already: then do not
    /// wait.
    pub fn arm(&mut self) -> bool {
        self.transmit();
        if !self.armed {
            self.armed = true;
            self.queues.iter().for_each(Queue::arm);
        }
        // Earlier completions cause no event.
        let now = self.now_ns();
        for queue in 0..self.queues.len() {
            self.fill(now, queue);
        }
        self.queues.iter().any(|queue| !queue.ready.is_empty())
    }

    /// Takes events of completions and of the device. Expensive: call it only after [`RdmaCore::arm`].
    pub fn disarm(&mut self) {
        if !std::mem::take(&mut self.armed) {
            return;
        }
        let (mut queue, mut context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the channel exists; it does not block; each event is acknowledged for the queue that it names.
        unsafe {
            while (self.functions.get_cq_event)(self.channel, &raw mut queue, &raw mut context) == 0 {
                (self.functions.ack_cq_events)(queue, 1);
            }
        }
        let mut event = AsyncEvent { element: 0, event_type: 0 };
        // SAFETY: the device is open; it does not block; each event is acknowledged.
        unsafe {
            while (self.functions.get_async_event)(self.port.context, &raw mut event) == 0 {
                (self.functions.ack_async_event)(&raw mut event);
                self.counters.events += 1;
            }
        }
    }

    /// Passes all posted requests to the NIC and returns their number.
    pub fn transmit(&mut self) -> usize {
        let before = self.counters.posted_requests;
        while let Some(slot) = self.dirty.pop() {
            self.flush(slot);
        }
        (self.counters.posted_requests - before) as usize
    }

    /// Puts a queue pair into error, as a hardware fault does: its open requests complete as flushed.
    ///
    /// # Errors
    /// If there is no such queue pair, or the NIC refuses.
    pub fn put_into_error(&mut self, number: Qpn) -> Result<(), VerbsError> {
        self.transmit();
        let slot = self.slot(number).ok_or(VerbsError::Unknown)?;
        let pair = self.places[usize::from(slot)].pair.as_mut().ok_or(VerbsError::Unknown)?;
        let pd = *self.domains.get(&pair.init.domain.0).ok_or(VerbsError::Unknown)?;
        pair.put_into_error(Around { functions: self.functions, port: &self.port, pd })
    }

    /// Number of queue pairs that are connected and not in error: RC and UC.
    pub fn connected(&self) -> impl Iterator<Item = Qpn> {
        let pairs = self.places.iter().filter_map(|place| place.pair.as_deref());
        let connected = pairs.filter(|pair| pair.init.transport != Transport::Ud && pair.state == State::Ready);
        connected.map(|pair| Qpn::new(pair.number))
    }

    fn slot(&self, number: Qpn) -> Option<u16> {
        self.numbers.get(&number.get()).copied()
    }

    fn domain(&mut self, domain: Domain) -> Result<*mut Pd, VerbsError> {
        if let Some(pd) = self.domains.get(&domain.0) {
            return Ok(*pd);
        }
        // SAFETY: the device is open.
        let pd = unsafe { (self.functions.alloc_pd)(self.port.context) };
        if pd.is_null() {
            return Err(VerbsError::System("creating a protection domain", errno()));
        }
        self.domains.insert(domain.0, pd);
        Ok(pd)
    }

    fn flush(&mut self, slot: u16) {
        let Some(pair) = self.places.get_mut(usize::from(slot)).and_then(|place| place.pair.as_mut()) else { return };
        pair.dirty = false;
        let mut refused = Vec::new();
        let around = Around { functions: self.functions, port: &self.port, pd: ptr::null_mut() };
        self.counters.batches += 1;
        self.counters.posted_requests += pair.flush(around, |name| refused.push(name));
        if refused.is_empty() {
            return;
        }
        self.counters.queue_pairs_in_error += 1;
        let now = self.now_ns();
        for name in refused {
            let wc = sys::Wc { wr_id: name.word(), status: sys::WC_WR_FLUSH_ERR, ..sys::Wc::default() };
            if let Some((queue, completion)) = self.complete(now, &Raw { wc, ticks: None }) {
                self.queues[queue].ready.push_back(completion);
            }
        }
    }

    /// A completion of the NIC, and its queue.
    fn complete(&mut self, now_ns: u64, raw: &Raw) -> Option<(usize, Completion)> {
        let wc = &raw.wc;
        let name = Name::of(wc.wr_id);
        let place = self.places.get_mut(usize::from(name.slot))?;
        let Some(pair) = place.pair.as_mut().filter(|pair| pair.is_named(name)) else {
            self.counters.stale_completions += 1;
            return None;
        };
        let status = status(wc.status);
        let success = status == Status::Success;
        if !success && pair.state == State::Ready {
            pair.state = State::Error;
            self.counters.queue_pairs_in_error += 1;
        }
        let time_ns = self.clock.ns(raw.ticks, now_ns);
        let mut completion = Completion {
            token: 0,
            queue_pair: Qpn::new(pair.number),
            kind: CompletionKind::Send,
            status,
            len: 0,
            immediate: None,
            source: None,
            time_ns,
        };
        if !name.receive {
            let sent = pair.take_sent(name.at)?;
            completion.token = sent.token;
            let queue = usize::from(pair.init.send_queue.index());
            if let Some(key) = sent.key {
                self.regions.let_go(self.functions, key);
            }
            return Some((queue, completion));
        }
        completion.token = pair.take_received(name.at)?;
        completion.kind = CompletionKind::Receive;
        if success {
            completion.len = wc.byte_len;
            completion.immediate = (wc.wc_flags & sys::WC_WITH_IMM != 0).then(|| u32::from_be(wc.imm_data));
            if wc.opcode == sys::WC_RECV_RDMA_WITH_IMM {
                completion.kind = CompletionKind::ReceiveWrite;
            }
            if pair.init.transport == Transport::Ud {
                completion.len = wc.byte_len.saturating_sub(GRH_LEN);
                let header = pair.header_of(name.at).filter(|_| wc.wc_flags & sys::WC_GRH != 0);
                let address = header.and_then(|header| source(header, self.config.address.is_ipv4()));
                completion.source = address.map(|address| (address, Qpn::new(wc.src_qp)));
            }
        }
        Some((usize::from(pair.init.receive_queue.index()), completion))
    }

    /// Takes a batch of completions of a queue from the NIC; returns whether there were any.
    fn fill(&mut self, now_ns: u64, queue: usize) -> bool {
        let mut batch = self.batch.take().unwrap_or_default();
        let count = self.queues[queue].poll(&mut batch);
        for raw in &batch[..count] {
            if let Some((queue, completion)) = self.complete(now_ns, raw) {
                self.queues[queue].ready.push_back(completion);
            }
        }
        self.batch = Some(batch);
        self.counters.polled_completions += count as u64;
        count > 0
    }

    /// A request waits to be passed to the NIC.
    fn posted(&mut self, slot: u16) {
        let Some(pair) = self.places[usize::from(slot)].pair.as_mut() else { return };
        if pair.is_batch() {
            self.flush(slot);
        } else if !std::mem::replace(&mut pair.dirty, true) {
            self.dirty.push(slot);
        }
    }
}

impl Provider for RdmaCore {
    fn address(&self) -> IpAddr {
        self.config.address
    }

    fn port(&self) -> u16 {
        bifrost_wire::roce::UDP_PORT
    }

    fn clock_ns(&mut self, now_ns: u64) -> u64 {
        self.clock.now_ns(&self.port, now_ns)
    }

    fn create_queue(&mut self) -> Result<CqId, VerbsError> {
        let id = u16::try_from(self.queues.len()).map_err(|_| VerbsError::Exhausted)?;
        self.queues.push(Queue::new(self.functions, &self.port, self.channel, &mut self.clock)?);
        Ok(CqId::new(id))
    }

    fn create_queue_pair(&mut self, init: QpInit) -> Result<Qpn, VerbsError> {
        if init.send_depth == 0 || init.receive_depth == 0 {
            return Err(VerbsError::Value("depth"));
        }
        let queues = [(init.send_queue, init.send_depth), (init.receive_queue, init.receive_depth)];
        let mut cqs = [ptr::null_mut(); 2];
        for (cq, (queue, _)) in cqs.iter_mut().zip(queues) {
            *cq = self.queues.get(usize::from(queue.index())).ok_or(VerbsError::Unknown)?.cq();
        }
        if self.numbers.len() >= self.config.queue_pairs.min(u16::MAX.into()) as usize {
            return Err(VerbsError::Exhausted);
        }
        let pd = self.domain(init.domain)?;
        for (at, (queue, depth)) in queues.into_iter().enumerate() {
            let max = self.port.completions_max;
            let grown = self.queues[usize::from(queue.index())].grow(self.functions, max, depth.into());
            if let Err(error) = grown {
                for (queue, depth) in &queues[..at] {
                    self.queues[usize::from(queue.index())].shrink((*depth).into());
                }
                return Err(error);
            }
        }
        let slot = self.free.pop().unwrap_or_else(|| {
            self.places.push(Place::default());
            self.places.len() as u16 - 1
        });
        let place = &mut self.places[usize::from(slot)];
        place.life = place.life.wrapping_add(1);
        let around = Around { functions: self.functions, port: &self.port, pd };
        match QueuePair::new(around, init, cqs, slot, place.life) {
            Ok(pair) => {
                let number = pair.number;
                place.pair = Some(Box::new(pair));
                self.numbers.insert(number, slot);
                Ok(Qpn::new(number))
            }
            Err(error) => {
                self.free.push(slot);
                for (queue, depth) in queues {
                    self.queues[usize::from(queue.index())].shrink(depth.into());
                }
                Err(error)
            }
        }
    }

    fn connect(&mut self, number: Qpn, peer: Connect) -> Result<(), VerbsError> {
        if peer.address.is_ipv4() != self.config.address.is_ipv4() {
            return Err(VerbsError::Value("address family"));
        }
        let slot = self.slot(number).ok_or(VerbsError::Unknown)?;
        let pair = self.places[usize::from(slot)].pair.as_mut().ok_or(VerbsError::Unknown)?;
        let pd = *self.domains.get(&pair.init.domain.0).ok_or(VerbsError::Unknown)?;
        pair.connect(Around { functions: self.functions, port: &self.port, pd }, &peer)
    }

    fn reset(&mut self, number: Qpn) -> Result<(), VerbsError> {
        let slot = self.slot(number).ok_or(VerbsError::Unknown)?;
        let place = &mut self.places[usize::from(slot)];
        place.life = place.life.wrapping_add(1);
        let pair = place.pair.as_mut().ok_or(VerbsError::Unknown)?;
        let pd = *self.domains.get(&pair.init.domain.0).ok_or(VerbsError::Unknown)?;
        let around = Around { functions: self.functions, port: &self.port, pd };
        let (functions, regions) = (self.functions, &mut self.regions);
        let queues = [pair.init.send_queue, pair.init.receive_queue];
        let result = pair.reset(around, slot, place.life, |key| regions.let_go(functions, key));
        for queue in queues {
            self.queues[usize::from(queue.index())].ready.retain(|completion| completion.queue_pair != number);
        }
        result
    }

    fn destroy(&mut self, number: Qpn) -> Result<(), VerbsError> {
        let slot = self.slot(number).ok_or(VerbsError::Unknown)?;
        // Requests posted before the removal reach the NIC: a last message, perhaps.
        self.flush(slot);
        let place = &mut self.places[usize::from(slot)];
        let mut pair = *place.pair.take().ok_or(VerbsError::Unknown)?;
        place.life = place.life.wrapping_add(1);
        let (functions, regions) = (self.functions, &mut self.regions);
        let (init, keys) = (pair.init, pair.take_keys());
        pair.destroy(functions);
        // Only now the NIC no longer reads them.
        keys.into_iter().for_each(|key| regions.let_go(functions, key));
        self.numbers.remove(&number.get());
        self.dirty.retain(|other| *other != slot);
        self.free.push(slot);
        for (queue, depth) in [(init.send_queue, init.send_depth), (init.receive_queue, init.receive_depth)] {
            let queue = &mut self.queues[usize::from(queue.index())];
            queue.ready.retain(|completion| completion.queue_pair != number);
            queue.shrink(depth.into());
        }
        Ok(())
    }

    fn register(&mut self, domain: Domain, access: Access, memory: Vec<u8>) -> Result<Region, (VerbsError, Vec<u8>)> {
        match self.domain(domain) {
            Ok(pd) => self.regions.register(self.functions, pd, domain, access, memory),
            Err(error) => Err((error, memory)),
        }
    }

    fn deregister(&mut self, key: Key) -> Option<Vec<u8>> {
        self.regions.deregister(self.functions, key)
    }

    fn bytes(&self, slice: Slice) -> Option<&[u8]> {
        self.regions.bytes(slice)
    }

    fn bytes_mut(&mut self, slice: Slice) -> Option<&mut [u8]> {
        self.regions.bytes_mut(slice)
    }

    fn copy(&mut self, from: Slice, to: Slice) -> bool {
        self.regions.copy(from, to)
    }

    fn post_send(&mut self, number: Qpn, request: SendRequest) -> Result<(), PostError> {
        let now = self.now_ns();
        let slot = self.slot(number).ok_or(PostError::UnknownQueuePair)?;
        let pair = self.places[usize::from(slot)].pair.as_mut().ok_or(PostError::UnknownQueuePair)?;
        let pd = *self.domains.get(&pair.init.domain.0).ok_or(PostError::UnknownQueuePair)?;
        let around = Around { functions: self.functions, port: &self.port, pd };
        pair.post_send(around, &self.regions, now, &request)?;
        if let Some(slice) = request.slice.filter(|slice| slice.len > 0) {
            self.regions.hold(slice.key);
        }
        self.posted(slot);
        Ok(())
    }

    fn post_receive(&mut self, number: Qpn, request: ReceiveRequest) -> Result<(), PostError> {
        let slot = self.slot(number).ok_or(PostError::UnknownQueuePair)?;
        let pair = self.places[usize::from(slot)].pair.as_mut().ok_or(PostError::UnknownQueuePair)?;
        pair.post_receive(&self.regions, &request)?;
        self.posted(slot);
        Ok(())
    }

    fn poll(&mut self, queue: CqId, max: usize, out: &mut Vec<Completion>) -> usize {
        let at = usize::from(queue.index());
        if at >= self.queues.len() {
            return 0;
        }
        let mut count = 0;
        let mut now = None;
        while count < max {
            let ready = &mut self.queues[at].ready;
            if ready.is_empty() {
                let now = *now.get_or_insert_with(|| self.epoch.elapsed().as_nanos() as u64);
                if !self.fill(now, at) {
                    break;
                }
                continue;
            }
            let some = ready.len().min(max - count);
            out.extend(ready.drain(..some));
            count += some;
        }
        count
    }
}

impl Drop for RdmaCore {
    fn drop(&mut self) {
        // Events are acknowledged before their queues go.
        self.armed = true;
        self.disarm();
        for place in &mut self.places {
            if let Some(mut pair) = place.pair.take() {
                pair.forget(|_| {});
                pair.destroy(self.functions);
            }
        }
        self.regions.clear(self.functions);
        for queue in &self.queues {
            queue.destroy(self.functions);
        }
        // SAFETY: nothing is left that uses them.
        unsafe {
            let _ = (self.functions.destroy_comp_channel)(self.channel);
            for pd in self.domains.values() {
                let _ = (self.functions.dealloc_pd)(*pd);
            }
        }
    }
}
