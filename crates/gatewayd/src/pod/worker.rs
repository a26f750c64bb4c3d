//! A core of the pod: takes packets from its queues, decides, returns them.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use bifrost_control::api;
use bifrost_gateway::{Ahead, Context, Core, Packet, Verdict};
use bifrost_plb::{TRAILER_LEN, Trailer};
use bifrost_port::clock::{cycles, monotonic_ns};
use bifrost_port::memif::Queue;
use bifrost_tables::{ExactMap, exact_map};
use bifrost_wire::Mac;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::config::Tests;
use super::life::Shared;
use crate::capture::{Outcome, Tap};

/// Packets of a queue in a turn.
const BATCH: u16 = 32;
/// Packets that wait for memory together: first their bytes, which another processor has just written, and then what the tables have about them.
const VECTOR: u16 = bifrost_gateway::VECTOR as u16;
/// Bytes of headers.
const HEAD: usize = 128;
/// How often a worker that sleeps looks whether it is to end.
const SLEEP: Duration = Duration::from_millis(50);
/// How often counters are told.
const TICK_NS: u64 = 20_000_000;

/// Link-layer addresses that all workers use: a new table whenever one changes.
#[derive(Debug)]
pub(super) struct SharedNeighbours {
    generation: AtomicU64,
    table: RwLock<Arc<ExactMap<IpAddr, Mac>>>,
}

impl SharedNeighbours {
    pub(super) fn new() -> Self {
        SharedNeighbours { generation: AtomicU64::new(0), table: RwLock::new(Arc::new(exact_map(0))) }
    }

    pub(super) fn set(&self, known: Vec<(IpAddr, Mac)>) {
        let mut map = exact_map(fastrand::u64(..));
        map.extend(known);
        *self.table.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(map);
        self.generation.fetch_add(1, Ordering::Release);
    }

    pub(super) fn get(&self) -> Arc<ExactMap<IpAddr, Mac>> {
        Arc::clone(&self.table.read().unwrap_or_else(PoisonError::into_inner))
    }
}

/// What a worker has counted.
pub(super) type Counts = Arc<Mutex<api::Counts>>;

/// What a worker needs.
pub(super) struct Worker {
    pub(super) core: Core,
    /// The next packets.
    pub(super) ahead: Ahead,
    /// One of each interface.
    pub(super) queues: Vec<Queue>,
    pub(super) neighbours: Arc<SharedNeighbours>,
    /// Next hops to be resolved.
    pub(super) missing: SyncSender<IpAddr>,
    pub(super) counts: Counts,
    pub(super) told: Told,
    pub(super) shared: Arc<Shared>,
    pub(super) pod: u16,
    pub(super) spin_ns: u64,
    pub(super) tests: Tests,
    pub(super) tap: Tap,
    /// For tests: what is dropped goes to the control thread, too.
    pub(super) control: Option<SyncSender<Vec<u8>>>,
}

impl Worker {
    /// Works until it is halted.
    pub(super) fn run(&mut self) {
        let mut generation = self.neighbours.generation.load(Ordering::Acquire);
        let mut known = self.neighbours.get();
        let (mut tick, mut busy_at, mut told) = (0, 0, self.told);
        let mut awaited = false;
        let mut pace = Pace { per_second: self.tests.packets_per_second, since: monotonic_ns(), taken: 0 };
        while !self.shared.is_halted() {
            let now = monotonic_ns();
            let latest = self.neighbours.generation.load(Ordering::Acquire);
            if latest != generation {
                (generation, known) = (latest, self.neighbours.get());
            }
            if now >= tick {
                self.tell(told);
                self.tap.poll();
                tick = now + TICK_NS;
            }
            told.turns += 1;
            let (mut done, since) = (0, cycles());
            for index in 0..self.queues.len() {
                let (known, allowed) = (&*known, pace.allowed(now));
                done += match self.tap.is_on() {
                    false => self.turn::<false>(index, now, known, allowed),
                    true => self.turn::<true>(index, now, known, allowed),
                };
            }
            pace.taken += u64::from(done);
            told.packets += u64::from(done);
            if let Some(stall) = self.tests.stall.take_if(|stall| told.packets >= stall.after_packets) {
                tracing::info!(?stall, "standing still");
                std::thread::sleep(Duration::from_millis(stall.ms));
            }
            if done > 0 {
                busy_at = monotonic_ns();
                told.busy_ns += busy_at - now;
                told.busy_cycles += cycles().saturating_sub(since);
                if awaited {
                    self.queues.iter().for_each(|queue| queue.want_interrupts(false));
                    awaited = false;
                }
                continue;
            }
            if now.saturating_sub(busy_at) < self.spin_ns {
                std::hint::spin_loop();
                continue;
            }
            if !awaited {
                // One more look: what was put in before this wakes nobody.
                self.queues.iter().for_each(|queue| queue.want_interrupts(true));
                awaited = true;
                continue;
            }
            self.tell(told);
            if pace.per_second > 0 {
                // Packets may wait in the rings; nobody will wake this worker for them.
                std::thread::sleep(Duration::from_micros(200));
                continue;
            }
            wait(&self.queues, SLEEP);
        }
        self.tell(told);
        self.told = told;
    }

    /// Handles the packets of one queue; `SEEN`: a capture runs.
    fn turn<const SEEN: bool>(&mut self, index: usize, now: u64, known: &ExactMap<IpAddr, Mac>, allowed: u16) -> u16 {
        let Worker { core, queues, missing, pod, tests, tap, control, ahead, .. } = self;
        let queue = &mut queues[index];
        let count = queue.available().min(allowed);
        queue.fetch_descriptors(count);
        (0..count.min(VECTOR)).for_each(|ahead| queue.fetch_packet(ahead, HEAD));
        for number in 0..count {
            if number % VECTOR == 0 {
                // The next vector's bytes come while this one is worked on.
                let rest = count - number;
                (VECTOR..rest.min(2 * VECTOR)).for_each(|ahead| queue.fetch_packet(ahead, HEAD));
                for next in 0..rest.min(VECTOR) {
                    queue.waiting(next).into_iter().for_each(|packet| core.look_ahead(ahead, packet));
                }
                core.fetch_ahead(ahead);
            }
            if tests.jitter_us > 0 {
                std::thread::sleep(Duration::from_nanos(fastrand::u64(..tests.jitter_us.saturating_mul(1000))));
            }
            let context = Context { now, neighbours: known };
            handle::<SEEN>(core, queue, context, *pod, tests.keep_drops, tap, control.as_ref());
            if let Some(address) = core.take_missing() {
                // Somebody will ask again.
                let _ = missing.try_send(address);
            }
        }
        queue.publish();
        count
    }

    fn tell(&self, told: Told) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let Told { turns, packets, busy_ns, busy_cycles } = told;
        let own = [("turns", turns), ("packets", packets), ("busy_ns", busy_ns), ("busy_cycles", busy_cycles)];
        counts.extend(own.map(|(name, value)| (name.into(), value)));
        counts.extend(self.core.counters().iter().map(|(name, value)| (name.into(), value)));
    }
}

/// What a worker counts itself.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Told {
    turns: u64,
    packets: u64,
    /// Time of the turns that found packets, ns.
    busy_ns: u64,
    /// The same by the processor's counter.
    busy_cycles: u64,
}

/// For tests: how fast a worker may take packets.
#[derive(Clone, Copy, Debug)]
struct Pace {
    /// 0: as fast as it can.
    per_second: u64,
    since: u64,
    taken: u64,
}

impl Pace {
    /// Packets that may be taken now.
    fn allowed(&mut self, now: u64) -> u16 {
        if self.per_second == 0 {
            return BATCH;
        }
        let due = (u128::from(now.saturating_sub(self.since)) * u128::from(self.per_second) / 1_000_000_000) as u64;
        // Time without packets is lost, as it is for a processor; not the few milliseconds of a scheduler.
        if due > self.taken + self.per_second / 100 {
            (self.since, self.taken) = (now, 0);
            return BATCH;
        }
        due.saturating_sub(self.taken).min(BATCH.into()) as u16
    }
}

/// One packet, from taking it to returning it. With `keep_drops` the trailer of a dropped packet does not say whose place is free.
#[inline]
fn handle<const SEEN: bool>(
    core: &mut Core,
    queue: &mut Queue,
    context: Context<'_>,
    pod: u16,
    keep_drops: bool,
    tap: &mut Tap,
    control: Option<&SyncSender<Vec<u8>>>,
) {
    let Some(received) = queue.received() else { return };
    let (start, end) = (received.start, received.start + received.len);
    let buffer = received.buffer;
    let trailer = end.checked_sub(TRAILER_LEN).filter(|at| *at >= start).and_then(|at| buffer[at..end].first_chunk());
    let Some(trailer) = trailer.copied().and_then(|bytes| Trailer::parse(bytes).ok()) else {
        // Not from a pipeline: it goes back as it is.
        queue.send_received(start, end - start);
        return;
    };
    let end = end - TRAILER_LEN;
    let mut packet = match trailer.payload {
        Some(_) => Packet::header_only(buffer, start, end),
        None => Packet::new(buffer, start, end),
    };
    if SEEN {
        tap.begin(packet.bytes(), packet.is_header_only());
    }
    let verdict = core.process(context, &mut packet);
    if SEEN {
        tap.end(Outcome::of(verdict, packet.bytes()), packet.is_header_only());
    }
    if let (Verdict::Drop(_), Some(control)) = (verdict, control) {
        // What finds no room is lost, as in a ring.
        let _ = control.try_send(packet.bytes().to_vec());
    }
    let range = packet.range();
    let answer = (verdict == Verdict::Answer && trailer.payload.is_some()).then(|| packet.bytes().to_vec());
    let fits = range.end + TRAILER_LEN <= buffer.len();
    if matches!(verdict, Verdict::Drop(_)) || answer.is_some() || !fits {
        // The trailer alone, GATEWAY-TRAILER §4.2.
        let at = start.min(buffer.len() - TRAILER_LEN);
        let trailer = match keep_drops {
            true => Trailer { psn: 0, payload: None, drop: true, unordered: true, ..trailer },
            false => Trailer { drop: true, ..trailer },
        };
        buffer[at..at + TRAILER_LEN].copy_from_slice(&trailer.emit());
        queue.send_received(at, TRAILER_LEN);
    } else {
        buffer[range.end..range.end + TRAILER_LEN].copy_from_slice(&trailer.emit());
        queue.send_received(range.start, range.len() + TRAILER_LEN);
    }
    // An answer to a packet whose payload is elsewhere is a packet of the pod's own, and so are the other pieces of one that was cut (GATEWAY-TRAILER §4.3).
    let mut lost = 0;
    for frame in answer.into_iter().chain(core.take_more()) {
        if queue.room() == 0 {
            lost += 1;
            continue;
        }
        if SEEN {
            tap.originated(&frame);
        }
        originate(queue, &frame, pod);
    }
    if lost > 0 {
        core.lose(lost);
    }
}

/// Sends a frame of the pod's own. The queue must have room.
pub(super) fn originate(queue: &mut Queue, frame: &[u8], pod: u16) {
    let trailer = Trailer { psn: 0, payload: None, pod, queue: 0, drop: false, unordered: true };
    queue.send(|buffer| {
        let len = frame.len() + TRAILER_LEN;
        let Some(room) = buffer.get_mut(..len) else { return 0 };
        room[..frame.len()].copy_from_slice(frame);
        room[frame.len()..].copy_from_slice(&trailer.emit());
        len
    });
}

/// Sleeps until something comes, or for a while.
pub(super) fn wait(queues: &[Queue], at_most: Duration) {
    let events: Vec<_> = queues.iter().map(Queue::event).collect();
    let mut fds: Vec<PollFd<'_>> = events.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    let _ =
        poll(&mut fds, Some(&Timespec { tv_sec: at_most.as_secs() as i64, tv_nsec: at_most.subsec_nanos().into() }));
    queues.iter().for_each(Queue::clear_event);
}
