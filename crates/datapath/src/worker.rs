//! The loop: what a core does, again and again. Read [`Worker::turn`] first.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};

use bifrost_avs::Switch;
use bifrost_port::Underlay;
use bifrost_port::clock::{RealtimeOffset, monotonic_ns};
use bifrost_rte::Time;
use rustix::event::{Timespec, epoll};

use crate::core::Core;
use crate::handle::{Command, Mailbox};
use crate::peers::{PeerConfig, PeerError};

/// Receive batches in one turn before guests get theirs.
const UNDERLAY_ROUNDS: usize = 4;
/// Tokens of the epoll set: ports by number, then these.
const UNDERLAY_TOKEN: u64 = 1 << 32;
const WAKE_TOKEN: u64 = 1 << 33;

/// How to make a worker.
#[derive(Clone, Debug)]
pub struct WorkerConfig {
    /// Its index, 0..=31.
    pub index: u8,
    /// Settings of the transport.
    pub transport: bifrost_rte::Config,
    /// Start time of the daemon, us since the epoch.
    pub instance: u64,
    /// Any random number; makes CIDs differ between daemon lives.
    pub salt: u32,
}

/// One core's loop, and everything that it owns.
pub struct Worker<U> {
    pub(crate) core: Core,
    pub(crate) underlay: U,
    underlay_readable: bool,
    wake: Arc<OwnedFd>,
    commands: Receiver<Command<U>>,
    /// All workers of this host in order, if there are several.
    pub(crate) others: Vec<Mailbox<U>>,
    stopping: bool,
}

impl<U> Worker<U> {
    /// Ends the loop after this turn.
    pub(crate) fn order_stop(&mut self) {
        self.stopping = true;
    }
}

impl<U: Underlay> Worker<U> {
    /// A worker without ports and peers; `wake` is an eventfd that announces `commands`.
    pub(crate) fn new(
        config: WorkerConfig,
        underlay: U,
        switch: Switch,
        wake: Arc<OwnedFd>,
        commands: Receiver<Command<U>>,
    ) -> io::Result<Self> {
        let core = Core::new(config, switch)?;
        for fd in underlay.fds() {
            epoll::add(&core.epoll, fd, epoll::EventData::new_u64(UNDERLAY_TOKEN), epoll::EventFlags::IN)?;
        }
        epoll::add(&core.epoll, wake.as_fd(), epoll::EventData::new_u64(WAKE_TOKEN), epoll::EventFlags::IN)?;
        Ok(Worker { core, underlay, underlay_readable: true, wake, commands, others: Vec::new(), stopping: false })
    }

    /// Works until it is told to stop.
    pub(crate) fn run(mut self) {
        // Timers of microseconds: the default slack of 50 us would be most of an ACK delay.
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
        while !self.stopping {
            let busy = self.turn();
            self.wait(busy);
        }
    }

    /// One turn: a packet's way through the rooms.
    fn turn(&mut self) -> bool {
        let started = monotonic_ns();
        self.core.now = Time(started);
        self.core.counters.loops += 1;
        // In: decapsulate, transport, verify, place (underlay.rs).
        let mut busy = self.receive();
        self.hand_over();
        // Whatever time has brought: ACK timers, losses, probes, delayed faults.
        busy |= self.core.on_time();
        // Show the guests what is in order, with one notification each; only then acknowledge it.
        self.core.publish();
        self.core.engine.flush_acks(self.core.now, &mut self.core.out);
        // Out: fetch, parse, switch, transport (guest.rs).
        busy |= self.core.fetch_from_guests(&mut self.underlay);
        // Segment, encapsulate, send; give acknowledged buffers back (emit.rs).
        busy |= self.core.emit(&mut self.underlay);
        if busy {
            self.core.counters.busy_loops += 1;
            self.core.counters.busy_ns += monotonic_ns() - started;
        }
        busy
    }

    /// Receives batches until nothing is waiting or guests must have their turn.
    fn receive(&mut self) -> bool {
        let mut busy = false;
        for _ in 0..UNDERLAY_ROUNDS {
            if !self.underlay_readable {
                break;
            }
            let count = self.underlay.recv().unwrap_or(0);
            self.underlay_readable = count > 0;
            if count > 0 {
                busy = true;
                self.core.clock = RealtimeOffset::sample();
                self.core.now = Time(monotonic_ns());
            }
            for i in 0..count {
                self.core.on_datagram(&self.underlay.datagram(i));
            }
        }
        busy
    }

    /// Sleeps until a descriptor is ready or a timer is due; only looks when there is more to do.
    fn wait(&mut self, busy: bool) {
        let more = self.underlay_readable || self.core.any_readable();
        let timeout_ns = match self.core.next_deadline() {
            _ if busy && more => Some(0),
            Some(at) => Some(at.since(Time(monotonic_ns()))),
            None => None,
        };
        let timeout = timeout_ns.map(|ns| Timespec {
            tv_sec: i64::try_from(ns / 1_000_000_000).unwrap_or(i64::MAX),
            tv_nsec: (ns % 1_000_000_000) as _,
        });
        let mut events = [const { std::mem::MaybeUninit::<epoll::Event>::uninit() }; 64];
        let Ok((ready, _)) = epoll::wait(&self.core.epoll, &mut events, timeout.as_ref()) else { return };
        let mut woken = false;
        for event in ready.iter() {
            match event.data.u64() {
                UNDERLAY_TOKEN => self.underlay_readable = true,
                WAKE_TOKEN => woken = true,
                owner => self.core.on_readable(owner as usize),
            }
        }
        if woken {
            self.obey();
        }
    }

    /// Runs what other threads have sent.
    fn obey(&mut self) {
        let mut count = [0u8; 8];
        let _ = rustix::io::read(self.wake.as_fd(), &mut count);
        loop {
            match self.commands.try_recv() {
                Ok(command) => command(self),
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => {
                    self.stopping = true;
                    return;
                }
            }
        }
    }

    /// The rooms that this worker owns.
    pub fn core_mut(&mut self) -> &mut Core {
        &mut self.core
    }

    /// The way to other hosts.
    pub fn underlay(&self) -> &U {
        &self.underlay
    }

    /// Adds a peer, or gives an existing one other paths; connections of an unchanged peer are not touched.
    pub fn set_peer(&mut self, config: PeerConfig) -> Result<(), PeerError> {
        if self.core.peers.get(config.id).is_some_and(|p| p.config == config) {
            return Ok(());
        }
        self.remove_peer(config.id);
        self.core.peers.add(config, &mut self.core.engine, &mut self.underlay)
    }

    /// Forgets a peer; what its connections hold leaves as plain VXLAN while the lanes are still known.
    pub fn remove_peer(&mut self, id: u16) {
        let Some(engine_peer) = self.core.peers.get(id).map(|p| p.engine) else { return };
        if let Some(engine_peer) = engine_peer {
            self.core.engine.remove_peer(engine_peer, &mut self.core.out);
        }
        self.core.publish();
        self.core.emit(&mut self.underlay);
        self.core.peers.remove(id);
        self.core.forget_departures(id);
    }
}
