//! The pipeline's thread: device, rings and clock around `bifrost_nicpipe`.

use std::io;
use std::os::fd::AsFd as _;
use std::sync::mpsc::{Receiver, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};

use bifrost_nicpipe::{Explained, Mode, Pipeline, Place, Pod, Ring, Rings as _};
use bifrost_port::clock::{cycles, monotonic_ns};
use bifrost_port::raw::RawDevice;
use rustix::event::{Timespec, epoll};
use std::sync::atomic::{AtomicBool, Ordering};

use super::links::{AllLinks, Change, Event, Link};
use super::snapshot;
use bifrost_control::api::Pipeline as Snapshot;

/// Maximum number of packets from a ring, and from an order queue, in one turn.
const RING_BATCH: usize = 32;
const RELEASE_BATCH: u32 = 256;
/// Interval at which commands are executed and the state is reported.
const TICK_NS: u64 = 10_000_000;
/// Minimum interval at which the state of transports is reported, and its minimum length relative to the time that the
/// report takes, because a report reads every connection.
const TRANSPORTS_NS: u64 = 1_000_000_000;
const TRANSPORTS_SHARE: u64 = 200;

/// Commands to the pipeline.
#[derive(Debug)]
pub(super) enum Command {
    /// Change how a pod's packets are spread.
    SetMode { pod: usize, mode: Mode },
    /// Exempt a tenant from the limiter, or end the exemption.
    Bypass { pod: usize, vni: u32, bypass: bool },
    /// Return the decisions about a frame.
    Trace { frame: Vec<u8> },
    /// Add a pod. `id` distinguishes it from earlier pods with the same number.
    Add { pod: Box<Pod>, id: u64 },
    /// Remove a pod.
    Remove { pod: usize },
}

/// The result of a command.
#[derive(Debug)]
pub(super) enum Answer {
    Done,
    Traced(Vec<Explained>),
    /// The pod was added, with this number.
    Added(usize),
    /// The pod was removed. Another thread than the pipeline's must free it.
    Removed(Box<Pod>, Vec<Link>),
}

/// A command, and the channel for its answer.
pub(super) type Request = (Command, SyncSender<Result<Answer, String>>);

/// The state of the pipeline's thread.
pub(super) struct Engine {
    pub(super) device: RawDevice,
    pub(super) pipeline: Pipeline,
    /// By pod and interface.
    pub(super) links: Vec<Vec<Link>>,
    /// By pod: its identifier. Events of an earlier pod with the same number are ignored.
    pub(super) ids: Vec<u64>,
    pub(super) events: Receiver<Event>,
    pub(super) commands: Receiver<Request>,
    pub(super) state: Arc<Mutex<Snapshot>>,
    pub(super) stop: Arc<AtomicBool>,
    pub(super) spin_ns: u64,
    pub(super) turns: u64,
    pub(super) sleeps: u64,
    pub(super) stages: Stages,
    /// When the state of transports is reported next, ns.
    pub(super) transports_at: u64,
}

/// Packets and time of each stage.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Stages {
    pub(super) receive: Stage,
    pub(super) dispatch: Stage,
    pub(super) collect: Stage,
    pub(super) send: Stage,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Stage {
    pub(super) packets: u64,
    pub(super) busy_ns: u64,
    pub(super) busy_cycles: u64,
}

/// A point in time: by the clock, and by the CPU's cycle counter.
#[derive(Clone, Copy, Debug)]
struct Mark {
    ns: u64,
    cycles: u64,
}

impl Stage {
    /// Adds packets and the time since `mark`, and sets `mark` to now.
    fn add(&mut self, packets: usize, mark: &mut Mark) {
        let now = Mark { ns: monotonic_ns(), cycles: cycles() };
        self.packets += packets as u64;
        self.busy_ns += now.ns.saturating_sub(mark.ns);
        self.busy_cycles += now.cycles.saturating_sub(mark.cycles);
        *mark = now;
    }
}

impl Engine {
    /// Runs until it is stopped, or the device is gone.
    pub(super) fn run(&mut self) -> io::Result<()> {
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for fd in self.device.fds() {
            epoll::add(&poll, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        }
        let (mut tick, mut busy_at) = (0, 0);
        let mut awaited = false;
        while !self.stop.load(Ordering::Relaxed) {
            let now = monotonic_ns();
            if now >= tick {
                self.tick(now, &poll);
                tick = now + TICK_NS;
            }
            self.turns += 1;
            let work = self.turn(now)?;
            if work > 0 {
                busy_at = now;
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
            self.sleeps += 1;
            self.sleep(&poll, tick)?;
        }
        Ok(())
    }

    /// One turn. Returns the number of packets that it handled.
    fn turn(&mut self, now: u64) -> io::Result<usize> {
        let Engine { device, pipeline, links, stages, .. } = self;
        let mut mark = Mark { ns: now, cycles: cycles() };
        let arrived = device.receive()?;
        if arrived > 0 {
            stages.receive.add(arrived, &mut mark);
        }
        for index in 0..arrived {
            // The pipeline counts packets that it refuses.
            let (at, frame) = (device.arrived_at(index, now), device.frame(index));
            let _ = pipeline.arrive(now, at, frame, |place| &mut links[place.pod][place.interface]);
        }
        // Delivers packets from the transport, and those that waited for room.
        pipeline.settle(now, &mut AllLinks(links));
        // Does nothing for rings without new packets.
        links.iter_mut().flatten().for_each(Link::publish);
        if arrived > 0 {
            stages.dispatch.add(arrived, &mut mark);
        }
        let (mut returned, mut counted, mut released) = (0, 0, 0);
        for (pod, links) in pipeline.pods_mut().iter_mut().zip(links) {
            for (interface, link) in links.iter_mut().enumerate() {
                // The first ring carries control traffic.
                for ring in &mut link.from_client {
                    let mut count = 0;
                    let mut sink = |leaving: bifrost_nicpipe::Leaving<'_>| device.send(&leaving.parts);
                    while count < RING_BATCH && pod.take_back(interface, |buffer| ring.pop(buffer), &mut sink) {
                        count += 1;
                    }
                    if count > 0 {
                        ring.release();
                        returned += count;
                        counted += count;
                    }
                }
            }
            if returned > 0 {
                stages.collect.add(std::mem::take(&mut counted), &mut mark);
            }
            pod.release(now, RELEASE_BATCH, |leaving| {
                released += 1;
                device.send(&leaving.parts);
            });
        }
        pipeline.emit(|parts| device.send(parts));
        device.flush();
        if released > 0 {
            stages.send.add(released, &mut mark);
        }
        Ok(arrived + returned)
    }

    fn want_interrupts(&self, wanted: bool) {
        self.links.iter().flatten().for_each(|link| link.want_interrupts(wanted));
    }

    /// Sleeps until an event, until a place in an order queue times out, or until the next tick.
    fn sleep(&self, poll: &impl std::os::fd::AsFd, tick: u64) -> io::Result<()> {
        let until = self.pipeline.deadline().map_or(tick, |deadline| deadline.min(tick));
        let ns = until.saturating_sub(monotonic_ns());
        let timeout = Timespec { tv_sec: (ns / 1_000_000_000) as i64, tv_nsec: (ns % 1_000_000_000) as i64 };
        let mut events = Vec::with_capacity(64);
        match epoll::wait(poll, rustix::buffer::spare_capacity(&mut events), Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Executes events of connections and commands, and reports the state.
    fn tick(&mut self, now: u64, poll: &impl std::os::fd::AsFd) {
        for Event { place, id, what } in self.events.try_iter() {
            if self.ids.get(place.pod) != Some(&id) {
                continue;
            }
            let link = match what {
                Change::Up(to_client, from_client) => {
                    for ring in &from_client {
                        // Edge-triggered: reading an event counter that a pod shares could block.
                        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
                        if let Err(error) = epoll::add(poll, ring.event().as_fd(), epoll::EventData::new_u64(1), flags)
                        {
                            tracing::warn!(%error, "a ring cannot be waited for; it is looked at now and then");
                        }
                    }
                    Link { to_client, from_client }
                }
                Change::Down => Link::default(),
            };
            self.pipeline.pods_mut()[place.pod].set_up(place.interface, !link.to_client.is_empty());
            self.links[place.pod][place.interface] = link;
        }
        for (pod, links) in self.links.iter_mut().enumerate() {
            for (interface, link) in links.iter_mut().enumerate() {
                if link.is_lost() {
                    tracing::warn!(pod, interface, "the client has taken its memory away");
                    *link = Link::default();
                    self.pipeline.pods_mut()[pod].set_up(interface, false);
                }
            }
        }
        let mut answers = Vec::new();
        while let Ok((command, answer)) = self.commands.try_recv() {
            answers.push((answer, self.command(now, command)));
        }
        // Reports before it answers: the state that a client reads after an answer includes the command's effects.
        self.report(now);
        for (answer, result) in answers {
            let _ = answer.try_send(result);
        }
    }

    /// Makes the current state available to the status server.
    pub(super) fn report(&mut self, now: u64) {
        let is_due = now >= self.transports_at;
        let mut snapshot = snapshot::take(now, self, is_due);
        if is_due {
            let took = monotonic_ns().saturating_sub(now);
            self.transports_at = now + TRANSPORTS_NS.max(took.saturating_mul(TRANSPORTS_SHARE));
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !is_due {
            for pod in &mut snapshot.pods {
                let earlier = state.pods.iter_mut().find(|earlier| earlier.name == pod.name);
                pod.transport = earlier.and_then(|earlier| earlier.transport.take());
            }
        }
        *state = snapshot;
    }

    fn command(&mut self, now: u64, command: Command) -> Result<Answer, String> {
        match command {
            Command::SetMode { pod, mode } => {
                self.pod(pod)?.set_mode(now, mode);
                Ok(Answer::Done)
            }
            Command::Bypass { pod, vni, bypass: true } => {
                let bypassed = self.pod(pod)?.limiter_mut().bypass(vni);
                bypassed.map(|()| Answer::Done).map_err(|error| error.to_string())
            }
            Command::Bypass { pod, vni, bypass: false } => match self.pod(pod)?.limiter_mut().forget(vni) {
                true => Ok(Answer::Done),
                false => Err(format!("VNI {vni} is neither exempted nor limited by itself")),
            },
            Command::Trace { frame } => {
                // The check for room reads the rings and changes nothing.
                let links = std::cell::RefCell::new(&mut self.links);
                let has_room = |place: Place, core| {
                    let links = &mut *links.borrow_mut();
                    (&mut links[place.pod][place.interface]).has_room(Ring::Core(core))
                };
                Ok(Answer::Traced(self.pipeline.explain(now, &frame, has_room)))
            }
            Command::Add { pod, id } => {
                let interfaces = pod.interfaces();
                let number = self.pipeline.add(*pod).map_err(|error| error.to_string())?;
                let all = self.links.len().max(number + 1);
                self.links.resize_with(all, Vec::new);
                self.ids.resize(all, 0);
                self.links[number].resize_with(interfaces, Link::default);
                self.ids[number] = id;
                Ok(Answer::Added(number))
            }
            Command::Remove { pod } => {
                let removed = self.pipeline.remove(pod).ok_or_else(gone)?;
                self.ids[pod] = 0;
                Ok(Answer::Removed(Box::new(removed), std::mem::take(&mut self.links[pod])))
            }
        }
    }

    fn pod(&mut self, number: usize) -> Result<&mut Pod, String> {
        self.pipeline.pods_mut().get_mut(number).filter(|pod| !pod.is_vacant()).ok_or_else(gone)
    }
}

fn gone() -> String {
    "the pod is gone".to_owned()
}
