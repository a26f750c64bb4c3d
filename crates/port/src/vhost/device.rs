//! The device state set by the front-end's messages: features, memory, rings. Runs on the port's own thread; complete
//! rings are handed over as a [`VhostQueue`].

mod hand_over;
mod logging;
mod requests;

use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::call::{Call, Target};
use super::dirty_log::DirtyLog;
use super::features::{self, Features};
use super::helper::{Foreign, Helper};
use super::index::MAX_SIZE;
use super::memory::{Memory, RegionSpec};
use super::messages::{self, Failure, Fields, Message};
use super::owner::Owner;
use super::pairs::Pairs;
use super::queue::{self, Ends, QueueSpec, VhostQueue};
use super::record::{self, FrontEnd};
use super::ring::RingSpec;
use super::{MAX_QUEUES, VhostConfig, inflight, packed_inflight};
use crate::panics::{self, Panic};
pub use hand_over::HandedMessage;
use requests::*;

/// Rings of a queue pair: receive, transmit.
const PAIR: usize = 2;
/// Length of an Ethernet header with one VLAN tag, bytes.
const ETHERNET: usize = 18;

/// Ring flag: log writes to the used ring at the given address.
const RING_LOGS: u32 = 1;

/// In the ring number of a message that passes a descriptor: there is no descriptor.
const NO_FILE: u64 = 1 << 8;

/// Cost of starting the rings, in messages: a worker has to return them and get new ones.
const START: u32 = 20;

const NO_MEMORY: &str = "its file is not shared memory: a memfd, or on tmpfs or hugetlbfs";

type Outcome<T = ()> = Result<T, &'static str>;

/// The answer to a message.
enum Answer {
    /// Success; sent only if the front-end requests a reply.
    Done,
    /// The requested data.
    Payload(Vec<u8>),
    /// The same with a descriptor.
    WithFile(Vec<u8>, File),
}

/// The state of one vhost-user connection.
pub(super) struct VhostDevice {
    config: VhostConfig,
    owner: Owner,
    helper: Helper,
    features: Features,
    protocol: u64,
    memory: Arc<Memory>,
    /// Pair `n` has rings `2n` (receive) and `2n + 1` (transmit).
    rings: Vec<RingState>,
    inflight: Option<Arc<Memory>>,
    /// The front-end's log of written pages.
    log: Option<DirtyLog>,
    /// Notified of new pages in it.
    log_call: Arc<Call>,
    /// The connected front-end, if it can be identified.
    front_end: Option<FrontEnd>,
    /// Its socket, for a queue that must close the connection.
    socket: Option<Arc<Foreign>>,
    /// Channel for requests of the back-end. None are sent; closing it would tell the front-end that the back-end is
    /// gone.
    requests: Option<Foreign>,
    /// Where the running pairs, from the first one on, will report their ring ends.
    running: Vec<Arc<Ends>>,
    /// Kicks of adopted rings that do not run yet, by ring.
    kicks: Vec<(u32, Foreign)>,
    /// Of rings left to another process: the index of the next used entry, if it is in the guest's memory.
    left: Vec<Option<u16>>,
    /// Cost that the front-end caused since it was last taken, in messages.
    cost: u32,
}

/// The known state of a ring.
#[derive(Default)]
struct RingState {
    size: u16,
    /// Front-end addresses of descriptors, used ring and available ring.
    tables: Option<[u64; 3]>,
    /// The used ring's address in the log, if given.
    used_in_log: Option<u64>,
    base: u16,
    kick: Option<Arc<OwnedFd>>,
    call: Arc<Call>,
    enabled: bool,
    /// It has run since this front-end connected, which therefore knows its end.
    has_run: bool,
}

impl VhostDevice {
    pub(super) fn new(config: VhostConfig, owner: Owner, helper: Helper) -> Self {
        VhostDevice {
            rings: new_rings(&config, &helper),
            log: None,
            log_call: Arc::new(Call::new(&helper)),
            config,
            owner,
            helper,
            features: Features::default(),
            protocol: 0,
            memory: Arc::default(),
            inflight: None,
            front_end: None,
            socket: None,
            requests: None,
            running: Vec::new(),
            kicks: Vec::new(),
            left: Vec::new(),
            cost: 0,
        }
    }

    /// Returns and resets the cost that the front-end caused, in messages.
    pub(super) fn take_cost(&mut self) -> u32 {
        std::mem::take(&mut self.cost)
    }

    /// Handles a new connection.
    pub(super) fn meet(&mut self, socket: &Arc<Foreign>) {
        self.front_end = FrontEnd::of(socket);
        self.socket = Some(Arc::clone(socket));
    }

    /// Handles a disconnected front-end: releases everything that it passed.
    pub(super) fn reset(&mut self) {
        self.stop();
        (self.features, self.protocol) = (Features::default(), 0);
        self.memory = Arc::default();
        self.rings = new_rings(&self.config, &self.helper);
        (self.inflight, self.front_end, self.socket, self.requests) = (None, None, None, None);
        self.log = None;
        self.log_call.set(None);
        self.kicks.clear();
    }

    /// Whether a fault in a queue ended the connection.
    pub(super) fn has_faulted(&self) -> bool {
        self.running.iter().any(|ends| ends.has_faulted())
    }

    /// A new device after a panic in a message handler. Reuses only the parts that no message changes.
    pub(super) fn rebuild(self, panic: &Panic) -> Self {
        // Both only talk to the worker, whose state the panic did not interrupt.
        if let Err(second) = panics::contain(|| self.owner.stop()) {
            tracing::error!(port = self.config.name, panic = %second, "a guest's queue cannot be taken back");
        }
        if let Err(second) = panics::contain(|| self.owner.fault(panic)) {
            tracing::error!(port = self.config.name, panic = %second, "a fault cannot be reported");
        }
        VhostDevice::new(self.config, self.owner, self.helper)
    }

    /// Whether the next daemon needs our record even after an orderly shutdown: the positions in packed rings are
    /// stored nowhere else.
    pub(super) fn needs_record(&self) -> bool {
        !self.running.is_empty() && self.features.packed() && self.inflight.is_none()
    }

    /// Waits for a message and answers it. A failed message is answered, too, if possible, and ends the connection: the
    /// front-end's view and ours may no longer agree.
    pub(super) fn serve(&mut self, socket: &impl AsFd) -> Result<(), Failure> {
        let message = messages::receive(socket, &self.helper)?;
        self.cost += 1;
        let (request, needs_reply) = (message.request, message.needs_reply);
        let acknowledge = |code: u64| messages::reply(socket, request, &code.to_le_bytes(), None);
        let outcome = self.handle(message);
        // The message that negotiates replies may request one itself.
        let wants_to_know = needs_reply && self.protocol & features::REPLY_ACK != 0;
        match outcome {
            Ok(Answer::Payload(payload)) => messages::reply(socket, request, &payload, None),
            Ok(Answer::WithFile(payload, file)) => messages::reply(socket, request, &payload, Some(&file)),
            Ok(Answer::Done) if wants_to_know => acknowledge(0),
            Ok(Answer::Done) => Ok(()),
            Err(problem) => {
                if wants_to_know {
                    let _ = acknowledge(1);
                }
                Err(Failure::Message { request, problem })
            }
        }
    }

    fn handle(&mut self, mut message: Message) -> Outcome<Answer> {
        #[cfg(debug_assertions)]
        super::inject::fire(&self.config.name);
        let request = message.request;
        let payload = std::mem::take(&mut message.payload);
        let mut fields = Fields(&payload);
        let number = |n: u64| Ok(Answer::Payload(n.to_le_bytes().to_vec()));
        match request {
            GET_FEATURES => return number(Features::offered(&self.config).0),
            SET_FEATURES => self.set_features(fields.u64()?)?,
            GET_PROTOCOL_FEATURES => return number(features::PROTOCOL),
            SET_PROTOCOL_FEATURES => self.protocol = fields.u64()?,
            GET_QUEUE_NUM => return number(self.config.queues.into()),
            GET_MAX_MEM_SLOTS => return number(Memory::MAX_REGIONS as u64),
            SET_OWNER | SET_VRING_ERR => {}
            SET_BACKEND_REQ_FD => self.requests = message.file()?,
            RESET_OWNER => self.stop_in_order(),
            RESET_DEVICE => {
                self.stop_in_order();
                self.rings = new_rings(&self.config, &self.helper);
            }
            SET_MEM_TABLE => self.set_memory(&mut fields, message.files)?,
            ADD_MEM_REG => {
                fields.u64()?;
                let file = message.file()?.ok_or("the file descriptor of the memory is missing")?;
                self.add_memory(&mut fields, file)?;
            }
            REM_MEM_REG => {
                fields.u64()?;
                self.remove_memory(&mut fields)?;
            }
            SET_LOG_BASE => {
                self.set_log_base(&mut fields, message.file()?)?;
                // Always answered. The specification does not define the payload: QEMU accepts any, rust-vmm expects
                // the request's.
                return Ok(Answer::Payload(payload.get(..16).unwrap_or_default().to_vec()));
            }
            SET_LOG_FD => {
                self.log_call.set(message.file()?.map(target).transpose()?);
                self.log_call.notify_soon();
            }
            // The port's own address is configured; ignore the given one.
            SEND_RARP => {
                fields.u64()?;
                self.owner.arrived();
            }
            SET_VRING_NUM => {
                let (ring, size) = (fields.u32()?, fields.u32()?);
                let fits = |n: &u16| (1..=MAX_SIZE).contains(n) && (self.features.packed() || n.is_power_of_two());
                let size = u16::try_from(size).ok().filter(fits);
                let size = size.ok_or("a ring's size is up to 32768, and a power of two unless it is packed")?;
                self.change(ring, |ring| ring.size = size)?;
            }
            SET_VRING_BASE => {
                // For packed rings, the upper half is the used position. Ours only stop with both positions equal.
                let (ring, base) = (fields.u32()?, fields.u32()?);
                if self.ring_mut(ring)?.has_run {
                    self.stop_in_order();
                }
                self.change(ring, |ring| ring.base = base as u16)?;
            }
            SET_VRING_ADDR => {
                let (index, flags) = (fields.u32()?, fields.u32()?);
                let tables = [fields.u64()?, fields.u64()?, fields.u64()?];
                let in_log = if flags & RING_LOGS != 0 { Some(fields.u64()?) } else { None };
                // Equal to its own guest address: no change.
                let in_log = in_log.filter(|at| self.memory.guest_address(tables[1]) != Some(*at));
                let ring = self.ring_mut(index)?;
                if (ring.tables, ring.used_in_log) != (Some(tables), in_log) {
                    self.change(index, |ring| (ring.tables, ring.used_in_log) = (Some(tables), in_log))?;
                }
            }
            SET_VRING_ENABLE => {
                let (index, enabled) = (fields.u32()?, fields.u32()? == 1);
                if self.ring_mut(index)?.enabled != enabled {
                    self.change(index, |ring| ring.enabled = enabled)?;
                }
            }
            SET_VRING_KICK => {
                let index = fields.u64()?;
                // Without a kick descriptor the ring would have to be polled.
                let kick = message.file()?.ok_or("a ring without a kick descriptor is not supported")?;
                let kick = Arc::new(kick.into_counter().ok_or("its descriptor is not an eventfd")?);
                let enabled = !self.features.protocol();
                self.change(index as u32 & 0xff, |ring| {
                    ring.kick = Some(kick);
                    ring.enabled |= enabled;
                })?;
            }
            SET_VRING_CALL => {
                let index = fields.u64()?;
                let file = message.file()?.filter(|_| index & NO_FILE == 0);
                let target = file.map(target).transpose()?;
                let ring = self.ring_mut(index as u32 & 0xff)?;
                ring.call.set(target);
                ring.call.notify_soon();
            }
            // The ring stops, and all buffers that it held are returned to the guest before the reply.
            GET_VRING_BASE => {
                let index = fields.u32()?;
                self.stop_in_order();
                let packed = self.features.packed();
                let ring = self.ring_mut(index)?;
                ring.kick = None;
                let base = u32::from(ring.base) | if packed { u32::from(ring.base) << 16 } else { 0 };
                let answer = [index.to_le_bytes(), base.to_le_bytes()];
                // The other pairs continue if they can run without this one.
                self.start()?;
                return Ok(Answer::Payload(answer.concat()));
            }
            GET_CONFIG => {
                let (offset, size) = (fields.u32()? as usize, fields.u32()? as usize);
                let space = features::config_space(&self.config);
                let part =
                    space.get(offset..offset.saturating_add(size)).ok_or("the configuration space has 256 bytes")?;
                let mut answer = payload.get(..12).ok_or("it is too short")?.to_vec();
                answer.extend_from_slice(part);
                return Ok(Answer::Payload(answer));
            }
            GET_INFLIGHT_FD => return self.new_record(&mut fields),
            SET_INFLIGHT_FD => {
                let (size, offset) = (fields.u64()?, fields.u64()?);
                let file = message.file()?.ok_or("the file descriptor of the record is missing")?;
                let file = file.into_memory().ok_or(NO_MEMORY)?;
                self.stop();
                // Use no more of it than the rings need, whatever its stated size.
                let most = packed_inflight::bytes(MAX_SIZE).max(inflight::bytes(MAX_SIZE)) * self.rings.len();
                let size = size.min(most as u64);
                let mut memory = Memory::default();
                memory
                    .add(RegionSpec { guest: 0, user: 0, size, offset, file })
                    .map_err(|_| "its file cannot be mapped")?;
                self.inflight = Some(Arc::new(memory));
                self.start()?;
            }
            _ => return Err("unknown request, not offered"),
        }
        Ok(Answer::Done)
    }

    fn set_features(&mut self, features: u64) -> Outcome {
        if features & !Features::offered(&self.config).0 != 0 {
            return Err("it acknowledges features that were not offered");
        }
        let features = Features(features);
        if !features.version_1() {
            return Err("a driver older than virtio 1 is not supported");
        }
        if features.without_logging() != self.features.without_logging() {
            self.stop();
            self.features = features;
            self.start()?;
        } else if features != self.features {
            self.features = features;
            self.log_writes()?;
        }
        Ok(())
    }

    /// A table may have room for more regions than it uses.
    fn set_memory(&mut self, fields: &mut Fields<'_>, files: Vec<Foreign>) -> Outcome {
        let (count, _padding) = (fields.u32()? as usize, fields.u32()?);
        if count != files.len() {
            return Err("the numbers of file descriptors and memory regions differ");
        }
        self.stop();
        // Drop the old table first: only one table of a large guest fits.
        self.memory = Arc::default();
        let mut memory = Memory::default();
        for file in files {
            self.add(&mut memory, region(fields, file)?)?;
        }
        self.memory = Arc::new(memory);
        self.start()
    }

    fn add_memory(&mut self, fields: &mut Fields<'_>, file: Foreign) -> Outcome {
        let spec = region(fields, file)?;
        let mut memory = (*self.memory).clone();
        if memory.add_again(&spec) {
            self.memory = Arc::new(memory);
            return Ok(());
        }
        self.stop();
        self.add(&mut memory, spec)?;
        self.memory = Arc::new(memory);
        self.start()
    }

    fn remove_memory(&mut self, fields: &mut Fields<'_>) -> Outcome {
        let (guest, size, user) = (fields.u64()?, fields.u64()?, fields.u64()?);
        let mut memory = (*self.memory).clone();
        if memory.remove(guest, user, size).ok_or("no such memory region")? == 0 {
            self.stop();
        }
        self.memory = Arc::new(memory);
        self.start()
    }

    fn add(&self, memory: &mut Memory, spec: RegionSpec) -> Outcome {
        memory.add(spec).map_err(|error| {
            tracing::warn!(port = self.config.name, %error, "a front-end's memory cannot be used");
            "its memory cannot be used"
        })
    }

    fn ring_mut(&mut self, index: u32) -> Outcome<&mut RingState> {
        self.rings.get_mut(index as usize).ok_or("no such ring: the port has two per queue pair")
    }

    /// Changes a ring; a running ring is restarted.
    fn change(&mut self, index: u32, change: impl FnOnce(&mut RingState)) -> Outcome {
        self.ring_mut(index)?;
        if (index as usize) < self.running.len() * PAIR {
            self.stop();
        }
        change(self.ring_mut(index)?);
        self.start()
    }

    /// Complete pairs, from the first one on.
    fn ready_pairs(&self) -> usize {
        let ready = |ring: &RingState| ring.enabled && ring.size > 0 && ring.tables.is_some() && ring.kick.is_some();
        self.rings.chunks(PAIR).take_while(|pair| pair.iter().all(ready)).count()
    }

    /// Hands the queue over once it is complete, and again when more pairs are complete.
    fn start(&mut self) -> Outcome {
        let pairs = self.ready_pairs();
        if pairs == self.running.len() || self.memory.regions() == 0 {
            return Ok(());
        }
        self.stop();
        self.cost += START;
        let mut queues = Vec::with_capacity(pairs);
        let mut running = Vec::with_capacity(pairs);
        for pair in 0..pairs {
            let ends = Arc::new(Ends::with(self.socket.clone()));
            queues.push(self.open(pair, Arc::clone(&ends))?);
            running.push(ends);
        }
        let queue = match queues.len() {
            1 => queues.remove(0),
            _ => Box::new(Pairs::new(queues).map_err(|_| "out of file descriptors")?),
        };
        self.running = running;
        self.rings.iter_mut().take(pairs * PAIR).for_each(|ring| ring.has_run = true);
        tracing::info!(
            port = self.config.name,
            features = format_args!("{:#x}", self.features.0),
            pairs,
            "a guest started"
        );
        self.owner.start(queue);
        Ok(())
    }

    fn open(&self, pair: usize, ends: Arc<Ends>) -> Outcome<VhostQueue> {
        let packed = self.features.packed();
        let first = pair * PAIR;
        let kick = self.rings[first + 1].kick.clone().ok_or("a ring without a kick descriptor is not supported")?;
        // The front-end's record has room for all rings; with our own records, each pair has its own.
        let theirs = self.inflight.clone().map(|memory| (memory, first, self.record_bytes(0..self.rings.len())));
        let ours = self.own_record(pair).map(|memory| (memory, 0, self.record_bytes(pair_of(first))));
        // A record of our own cannot know what the front-end did with a split transmit ring meanwhile.
        let unrecorded = theirs.is_none() && !packed;
        let record = theirs.or(ours);
        let area = |ring: usize| record.as_ref().map(|(memory, first, bytes)| (memory, (first + ring) * bytes));
        let queue = queue::open(QueueSpec {
            memory: Arc::clone(&self.memory),
            packed,
            receive: self.ring(first, area(0))?,
            transmit: self.ring(first + 1, area(1).filter(|_| !unrecorded))?,
            kick,
            // When its back-end is gone, QEMU returns the buffers that it finds in a packed ring from its own position
            // on, by the descriptors there. These must not belong to buffers that were returned before others.
            in_order: unrecorded || packed,
            slicing: self.config.slicing,
            mergeable: self.features.mergeable(),
            guest_checksum: self.features.guest_checksum(),
            merged: self.features.merged(),
            max_frame: usize::from(self.config.mtu) + ETHERNET,
            log: self.log(),
            ends,
        });
        queue.ok_or("a ring is not in the guest's memory")
    }

    /// The record of a pair, kept here if the front-end keeps none.
    fn own_record(&self, pair: usize) -> Option<Arc<Memory>> {
        if self.inflight.is_some() {
            return None;
        }
        let (path, front_end) = (record::path(self.config.record.as_ref()?, pair), self.front_end?);
        let rings: Vec<u64> = self.rings[pair * PAIR..][..PAIR]
            .iter()
            .flat_map(|r| [u64::from(r.size)].into_iter().chain(r.tables.unwrap_or_default()))
            .collect();
        let opened = record::open(&path, front_end, &rings, PAIR * self.record_bytes(pair_of(pair * PAIR)));
        let failed = |error: &std::io::Error| {
            tracing::warn!(port = self.config.name, %error, "no inflight record: a daemon crash would stop the guest");
        };
        opened.inspect_err(failed).ok()
    }

    /// Bytes per ring in a record shared by `rings`: those of the longest format.
    fn record_bytes(&self, rings: Range<usize>) -> usize {
        self.record_bytes_of(self.rings[rings].iter().map(|ring| ring.size).max().unwrap_or(0))
    }

    fn record_bytes_of(&self, size: u16) -> usize {
        if self.features.packed() { packed_inflight::bytes(size) } else { inflight::bytes(size) }
    }

    /// A file for the record of buffers in flight; the front-end keeps it while the daemon restarts.
    fn new_record(&self, fields: &mut Fields<'_>) -> Outcome<Answer> {
        let (_size, _offset, queues, ring) = (fields.u64()?, fields.u64()?, fields.u16()?, fields.u16()?);
        let size = (self.rings.len() * self.record_bytes_of(ring)) as u64;
        let fd = rustix::fs::memfd_create("bifrost-inflight", rustix::fs::MemfdFlags::CLOEXEC);
        let file = File::from(fd.map_err(|_| "no memory for its record")?);
        file.set_len(size).map_err(|_| "no memory for its record")?;
        let mut answer = [size.to_le_bytes(), 0u64.to_le_bytes()].concat();
        answer.extend([queues.to_le_bytes(), ring.to_le_bytes()].concat());
        // Length of the C structure.
        answer.extend([0; 4]);
        Ok(Answer::WithFile(answer, file))
    }

    /// Parameters of a ring; `record`: the record, and the offset of the ring's part in it.
    fn ring(&self, index: usize, record: Option<(&Arc<Memory>, usize)>) -> Outcome<RingSpec> {
        let ring = &self.rings[index];
        let [descriptors, used, available] = ring.tables.unwrap_or_default();
        let record = record.map(|(memory, at)| Memory::area(memory, at as u64, self.record_bytes_of(ring.size), 8));
        let record = match record {
            Some(area) => Some(area.ok_or("the record is too short for the ring")?),
            None => None,
        };
        Ok(RingSpec {
            size: ring.size,
            descriptors,
            available,
            used,
            base: ring.base,
            event_idx: self.features.event_idx(),
            log: self.log(),
            used_in_log: ring.used_in_log,
            call: Arc::clone(&ring.call),
            record,
        })
    }

    /// Stops rings whose ends the front-end knows or sets: our own record is not needed then.
    fn stop_in_order(&mut self) {
        self.stop();
        if let Some(path) = &self.config.record {
            record::remove(path, self.config.queues);
        }
    }

    /// Takes the queue back; the rings will continue where they ended.
    fn stop(&mut self) {
        if self.running.is_empty() {
            return;
        }
        self.owner.stop();
        let load = |end: &AtomicU32| end.load(Ordering::Acquire) as u16;
        for (pair, ends) in self.rings.chunks_mut(PAIR).zip(self.running.drain(..)) {
            (pair[0].base, pair[1].base) = (load(&ends.receive), load(&ends.transmit));
        }
        tracing::info!(port = self.config.name, "a guest stopped");
    }
}

/// The target of a notification descriptor.
fn target(file: Foreign) -> Outcome<Target> {
    Target::of(file).ok_or("its descriptor is neither an eventfd nor a socket")
}

/// The next region in a message.
fn region(fields: &mut Fields<'_>, file: Foreign) -> Outcome<RegionSpec> {
    let file = file.into_memory().ok_or(NO_MEMORY)?;
    let (guest, size, user, offset) = (fields.u64()?, fields.u64()?, fields.u64()?, fields.u64()?);
    Ok(RegionSpec { guest, user, size, offset, file })
}

/// The rings of the pair whose first ring is `first`.
fn pair_of(first: usize) -> Range<usize> {
    first..first + PAIR
}

fn new_rings(config: &VhostConfig, helper: &Helper) -> Vec<RingState> {
    let new = |_| RingState { call: Arc::new(Call::new(helper)), ..RingState::default() };
    (0..PAIR * usize::from(config.queues.clamp(1, MAX_QUEUES))).map(new).collect()
}
