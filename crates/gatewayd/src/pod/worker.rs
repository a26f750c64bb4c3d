//! A core of the pod: receives packets from its queues, processes them, and returns them.

use std::net::IpAddr;
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bifrost_control::api;
use bifrost_gateway::{Ahead, Context, Core, Packet, Verdict};
use bifrost_plb::{TRAILER_LEN, Trailer};
use bifrost_port::clock::{cycles, monotonic_ns};
use bifrost_port::memif::Queue;

use super::config::Tests;
use super::life::Shared;
use super::links::{Known, Links};
use super::mailbox::{Attached, Mailbox, wait};
use crate::capture::{Outcome, Tap};

/// Maximum number of packets from a queue in one turn.
const BATCH: u16 = 32;
/// Packets whose memory accesses overlap: first to their bytes, which another CPU has just written, and then to their
/// table entries.
const VECTOR: u16 = bifrost_gateway::VECTOR as u16;
/// Bytes of a packet that are prefetched: its headers.
const HEAD: usize = 128;
/// How long a worker sleeps at most. It then checks whether it should end.
const SLEEP: Duration = Duration::from_millis(50);
/// Interval at which counters are reported, ns.
const TICK_NS: u64 = 20_000_000;

/// A worker's counters.
pub(super) type Counts = Arc<Mutex<api::Counts>>;

/// The state of a worker.
pub(super) struct Worker {
    pub(super) core: Core,
    /// The next packets, for prefetching.
    pub(super) ahead: Ahead,
    /// One queue of each connected interface.
    pub(super) queues: Vec<Attached>,
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) links: Arc<Links>,
    /// Next hops to be resolved.
    pub(super) missing: SyncSender<IpAddr>,
    pub(super) counts: Counts,
    pub(super) told: Told,
    pub(super) shared: Arc<Shared>,
    pub(super) pod: u16,
    pub(super) spin_ns: u64,
    pub(super) tests: Tests,
    pub(super) tap: Tap,
    /// For tests: dropped packets are also passed to the control thread, with the link that they arrived by.
    pub(super) control: Option<SyncSender<(usize, Vec<u8>)>>,
}

impl Worker {
    /// Runs until the pod ends.
    pub(super) fn run(&mut self) {
        let mut generation = self.links.generation();
        let mut known = self.links.known();
        let (mut tick, mut busy_at) = (0, 0);
        let mut awaited = false;
        let mut pace = Pace { per_second: self.tests.packets_per_second, since: monotonic_ns(), taken: 0 };
        while !self.shared.is_stopping() {
            let now = monotonic_ns();
            let latest = self.links.generation();
            if latest != generation {
                (generation, known) = (latest, self.links.known());
            }
            if self.mailbox.apply(&mut self.queues) {
                self.want_interrupts(false);
                awaited = false;
            }
            if now >= tick {
                self.tell();
                self.tap.poll();
                tick = now + TICK_NS;
            }
            self.told.turns += 1;
            let (mut done, since) = (0, cycles());
            for index in 0..self.queues.len() {
                let (known, allowed) = (&known[..], pace.allowed(now));
                done += match self.tap.is_on() {
                    false => self.turn::<false>(index, now, known, allowed),
                    true => self.turn::<true>(index, now, known, allowed),
                };
            }
            pace.taken += u64::from(done);
            self.told.packets += u64::from(done);
            let packets = self.told.packets;
            if let Some(stall) = self.tests.stall.take_if(|stall| packets >= stall.after_packets) {
                tracing::info!(?stall, "standing still");
                std::thread::sleep(Duration::from_millis(stall.ms));
            }
            if done > 0 {
                busy_at = monotonic_ns();
                self.told.busy_ns += busy_at - now;
                self.told.busy_cycles += cycles().saturating_sub(since);
                if awaited {
                    self.want_interrupts(false);
                    awaited = false;
                }
                continue;
            }
            if now.saturating_sub(busy_at) < self.spin_ns {
                std::hint::spin_loop();
                continue;
            }
            if !awaited {
                // Looks once more: packets that were added before this call cause no interrupt.
                self.want_interrupts(true);
                awaited = true;
                continue;
            }
            self.tell();
            if pace.per_second > 0 {
                // Packets may remain in the rings because of the limit, and cause no further interrupt.
                std::thread::sleep(Duration::from_micros(200));
                continue;
            }
            wait(&self.mailbox, &self.queues, SLEEP);
        }
        self.tell();
    }

    /// Processes the packets of one queue. `SEEN`: a capture is running. `known`: the next hops of each link.
    fn turn<const SEEN: bool>(&mut self, index: usize, now: u64, known: &[Known], allowed: u16) -> u16 {
        let Worker { core, queues, links, missing, pod, tests, tap, control, ahead, told, .. } = self;
        let link = queues[index].link;
        // The link by which packets leave, if it is another one. This worker may have no queue of it yet.
        let egress = Some(links.egress(link)).filter(|egress| *egress != link);
        let other = egress.and_then(|egress| queues.iter().position(|attached| attached.link == egress));
        let both = match other {
            Some(other) => queues.get_disjoint_mut([index, other]).ok(),
            None => None,
        };
        let (queue, other) = match both {
            Some([queue, other]) => {
                let same_pipeline = links.are_behind_one_pipeline(link, other.link);
                (&mut queue.queue, Some((other.link, Other { queue: &mut other.queue, same_pipeline })))
            }
            None => (&mut queues[index].queue, None),
        };
        let Some(neighbours) = known.get(other.as_ref().map_or(link, |(egress, _)| *egress)) else { return 0 };
        let other = other.map(|(_, other)| other);
        let count = queue.available().min(allowed);
        queue.fetch_descriptors(count);
        (0..count.min(VECTOR)).for_each(|ahead| queue.fetch_packet(ahead, HEAD));
        let (pod, keep_drops) = (*pod, tests.keep_drops);
        let mut turn = Turn { core, queue, other, tap, told, control: control.as_ref(), link, pod, keep_drops };
        for number in 0..count {
            if number % VECTOR == 0 {
                // Prefetches the bytes of the next vector while this one is processed.
                let rest = count - number;
                (VECTOR..rest.min(2 * VECTOR)).for_each(|ahead| turn.queue.fetch_packet(ahead, HEAD));
                for next in 0..rest.min(VECTOR) {
                    turn.queue.waiting(next).into_iter().for_each(|packet| turn.core.look_ahead(ahead, packet));
                }
                turn.core.fetch_ahead(ahead);
            }
            if tests.jitter_us > 0 {
                std::thread::sleep(Duration::from_nanos(fastrand::u64(..tests.jitter_us.saturating_mul(1000))));
            }
            turn.handle::<SEEN>(Context { now, neighbours });
            if let Some(address) = turn.core.take_missing() {
                // If the channel is full, a later packet asks again.
                let _ = missing.try_send(address);
            }
        }
        turn.queue.publish();
        if let Some(other) = &mut turn.other {
            other.queue.publish();
        }
        count
    }

    fn want_interrupts(&self, wanted: bool) {
        self.queues.iter().for_each(|attached| attached.queue.want_interrupts(wanted));
    }

    fn tell(&self) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let Told { turns, packets, busy_ns, busy_cycles, rerouted_packets, rerouted_lost_packets } = self.told;
        let own = [
            ("turns", turns),
            ("packets", packets),
            ("busy_ns", busy_ns),
            ("busy_cycles", busy_cycles),
            ("rerouted_packets", rerouted_packets),
            ("rerouted_lost_packets", rerouted_lost_packets),
        ];
        counts.extend(own.map(|(name, value)| (name.into(), value)));
        counts.extend(self.core.counters().iter().map(|(name, value)| (name.into(), value)));
    }
}

/// Counters of the worker itself.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Told {
    turns: u64,
    packets: u64,
    /// Time of the turns that found packets, ns.
    busy_ns: u64,
    /// The same, in CPU cycles.
    busy_cycles: u64,
    /// Packets that left by another link than they arrived by, because their own link did not work.
    rerouted_packets: u64,
    /// Packets that should have left by another link and were lost: it had no room, or the payload is in another
    /// pipeline.
    rerouted_lost_packets: u64,
}

/// For tests: limits how many packets a worker processes.
#[derive(Clone, Copy, Debug)]
struct Pace {
    /// Packets per second; 0: no limit.
    per_second: u64,
    since: u64,
    taken: u64,
}

impl Pace {
    /// Number of packets that may be processed now.
    fn allowed(&mut self, now: u64) -> u16 {
        if self.per_second == 0 {
            return BATCH;
        }
        let due = (u128::from(now.saturating_sub(self.since)) * u128::from(self.per_second) / 1_000_000_000) as u64;
        // Unused time does not accumulate, as on a real CPU, except for 10 ms, because the scheduler may delay the
        // thread.
        if due > self.taken + self.per_second / 100 {
            (self.since, self.taken) = (now, 0);
            return BATCH;
        }
        due.saturating_sub(self.taken).min(BATCH.into()) as u16
    }
}

/// A queue of another link by which packets leave, because their own link does not work.
struct Other<'a> {
    queue: &'a mut Queue,
    /// Whether both links have the same pipeline. Then packets keep their places in order queues, and their payloads.
    same_pipeline: bool,
}

/// The state for processing the packets of a queue.
struct Turn<'a> {
    core: &'a mut Core,
    queue: &'a mut Queue,
    other: Option<Other<'a>>,
    tap: &'a mut Tap,
    told: &'a mut Told,
    control: Option<&'a SyncSender<(usize, Vec<u8>)>>,
    link: usize,
    pod: u16,
    /// For tests: the trailer of a dropped packet does not free its place in the order queue.
    keep_drops: bool,
}

impl Turn<'_> {
    /// Processes one packet, from receiving it to returning it.
    #[inline]
    fn handle<const SEEN: bool>(&mut self, context: Context<'_>) {
        let Turn { core, queue, other, tap, told, control, link, pod, keep_drops } = self;
        let Some(received) = queue.received() else { return };
        let (start, end) = (received.start, received.start + received.len);
        let buffer = received.buffer;
        let trailer =
            end.checked_sub(TRAILER_LEN).filter(|at| *at >= start).and_then(|at| buffer[at..end].first_chunk());
        let Some(trailer) = trailer.copied().and_then(|bytes| Trailer::parse(bytes).ok()) else {
            // The packet has no valid trailer, so it is returned unchanged.
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
            // If the channel is full, the packet is lost, as in a full ring.
            let _ = control.try_send((*link, packet.bytes().to_vec()));
        }
        let range = packet.range();
        let answer = (verdict == Verdict::Answer && trailer.payload.is_some()).then(|| packet.bytes().to_vec());
        let fits = range.end + TRAILER_LEN <= buffer.len();
        // A trailer that is returned without a packet, GATEWAY-TRAILER §4.2.
        let alone = if matches!(verdict, Verdict::Drop(_)) || answer.is_some() || !fits {
            Some(if *keep_drops { nothing(trailer) } else { Trailer { drop: true, ..trailer } })
        } else {
            other.as_mut().map(|other| {
                let sent = other.send(&buffer[range.clone()], trailer);
                told.rerouted_packets += u64::from(sent);
                told.rerouted_lost_packets += u64::from(!sent);
                // Behind the same pipeline, the packet that was sent uses the place.
                if sent && other.same_pipeline { nothing(trailer) } else { Trailer { drop: true, ..trailer } }
            })
        };
        if let Some(trailer) = alone {
            let at = start.min(buffer.len() - TRAILER_LEN);
            buffer[at..at + TRAILER_LEN].copy_from_slice(&trailer.emit());
            queue.send_received(at, TRAILER_LEN);
        } else {
            buffer[range.end..range.end + TRAILER_LEN].copy_from_slice(&trailer.emit());
            queue.send_received(range.start, range.len() + TRAILER_LEN);
        }
        // An answer to a packet whose payload is elsewhere is a packet of the pod's own. So are the further fragments
        // of a packet (GATEWAY-TRAILER §4.3).
        let out = other.as_mut().map_or(&mut **queue, |other| &mut *other.queue);
        let mut lost = 0;
        for frame in answer.into_iter().chain(core.take_more()) {
            if out.room() == 0 {
                lost += 1;
                continue;
            }
            if SEEN {
                tap.originated(&frame);
            }
            originate(out, &frame, *pod);
        }
        if lost > 0 {
            core.lose(lost);
        }
    }
}

impl Other<'_> {
    /// Sends a packet that arrived by another link. Returns false if it cannot leave this way.
    #[cold]
    fn send(&mut self, packet: &[u8], trailer: Trailer) -> bool {
        let trailer = match self.same_pipeline {
            true => trailer,
            // The payload is in the memory of the other pipeline.
            false if trailer.payload.is_some() => return false,
            // Its place is in an order queue of the other pipeline (GATEWAY-TRAILER §4.3).
            false => Trailer { psn: 0, queue: 0, unordered: true, ..trailer },
        };
        if self.queue.room() == 0 {
            return false;
        }
        send(self.queue, packet, trailer);
        true
    }
}

/// A trailer that does not free a place in an order queue.
fn nothing(trailer: Trailer) -> Trailer {
    Trailer { psn: 0, payload: None, queue: 0, drop: true, unordered: true, ..trailer }
}

/// Sends a frame of the pod's own. The queue must have room.
pub(super) fn originate(queue: &mut Queue, frame: &[u8], pod: u16) {
    let trailer = Trailer { psn: 0, payload: None, pod, queue: 0, drop: false, unordered: true };
    send(queue, frame, trailer);
}

fn send(queue: &mut Queue, packet: &[u8], trailer: Trailer) {
    queue.send(|buffer| {
        let len = packet.len() + TRAILER_LEN;
        let Some(room) = buffer.get_mut(..len) else { return 0 };
        room[..packet.len()].copy_from_slice(packet);
        room[packet.len()..].copy_from_slice(&trailer.emit());
        len
    });
}
