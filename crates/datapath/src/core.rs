//! The rooms of one worker, side by side; guest.rs, underlay.rs and emit.rs walk packets through them.

use std::io;
use std::os::fd::OwnedFd;

use bifrost_avs::Switch;
use bifrost_port::clock::{RealtimeOffset, monotonic_ns};
use bifrost_port::{RxHandle, TxBatch, TxFrame};
use bifrost_rte::{Engine, Output, Time};
use bifrost_wire::{Mac, Vni};
use foldhash::fast::RandomState;
use hashbrown::HashMap;
use rustix::event::epoll;

use crate::counters::Counters;
use crate::delayed::Delayed;
use crate::fault::Faults;
use crate::hand_over::Neighbours;
use crate::peers::Peers;
use crate::ports::{Port, PortConfig};
use crate::worker::WorkerConfig;

/// How soon a guest's full queue is offered again what it did not take, ns.
const POSTPONED_NS: u64 = 200_000;

/// Everything of a worker but its way to other hosts.
pub struct Core {
    pub(crate) now: Time,
    pub(crate) clock: RealtimeOffset,
    pub(crate) engine: Engine,
    pub(crate) switch: Switch,
    pub(crate) peers: Peers,
    pub(crate) ports: Vec<Option<Port>>,
    /// Local vNICs, for connection set-up.
    pub(crate) vnics: HashMap<(Vni, Mac), u16, RandomState>,
    pub(crate) out: Output,
    pub(crate) batch: TxBatch,
    pub(crate) frames: Vec<TxFrame>,
    pub(crate) scratch: Vec<u8>,
    pub(crate) faults: Faults,
    pub(crate) delayed: Delayed,
    pub(crate) counters: Counters,
    pub(crate) neighbours: Neighbours,
    pub(crate) epoll: OwnedFd,
}

impl Core {
    pub(crate) fn new(config: WorkerConfig, switch: Switch) -> io::Result<Self> {
        let salt = config.salt;
        Ok(Core {
            now: Time(monotonic_ns()),
            clock: RealtimeOffset::sample(),
            engine: Engine::new(config.transport, config.index, config.instance, salt),
            switch,
            peers: Peers::default(),
            ports: Vec::new(),
            vnics: HashMap::default(),
            out: Output::default(),
            batch: TxBatch::default(),
            frames: Vec::with_capacity(256),
            scratch: Vec::with_capacity(2048),
            faults: Faults::new(u64::from(salt)),
            delayed: Delayed::default(),
            counters: Counters::default(),
            neighbours: Neighbours::new(u16::from(config.index)),
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
        })
    }

    /// The switch, to be given another configuration.
    pub fn switch_mut(&mut self) -> &mut Switch {
        &mut self.switch
    }

    /// The faults that are injected.
    pub fn faults_mut(&mut self) -> &mut Faults {
        &mut self.faults
    }

    /// Adds a port; its number must be free.
    ///
    /// # Errors
    /// The number is taken, or the port's descriptor cannot be watched.
    pub fn add_port(&mut self, config: PortConfig) -> io::Result<()> {
        let owner = usize::from(config.owner);
        if self.ports.len() <= owner {
            self.ports.resize_with(owner + 1, || None);
        }
        if self.ports[owner].is_some() {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "a port of this number exists"));
        }
        let mut port = Port::new(config);
        let data = epoll::EventData::new_u64(owner as u64);
        epoll::add(&self.epoll, port.port.fd(), data, epoll::EventFlags::IN)?;
        port.watched = true;
        self.vnics.insert((port.vni, port.mac), port.owner);
        self.ports[owner] = Some(port);
        Ok(())
    }

    /// Removes a port with its connections and buffers.
    pub fn remove_port(&mut self, owner: u16) {
        let Some(port) = self.ports.get_mut(usize::from(owner)).and_then(Option::take) else { return };
        self.vnics.remove(&(port.vni, port.mac));
        self.engine.remove_owner(owner, &mut self.out);
        let _ = epoll::delete(&self.epoll, port.port.fd());
    }

    /// Changes how a port's packets become visible and whether they are reliable.
    pub fn set_policy(&mut self, owner: u16, ordering: bifrost_rte::Ordering, reliable: bool) {
        if let Some(port) = self.port_mut(owner) {
            (port.ordering, port.reliable) = (ordering, reliable);
        }
    }

    /// Does what time has brought: the transport's timers and delayed packets.
    pub(crate) fn on_time(&mut self) -> bool {
        let mut busy = false;
        if self.engine.next_timeout().is_some_and(|at| at <= self.now) {
            self.engine.on_timeout(self.now, &mut self.out);
            busy = true;
        }
        busy | self.release_delayed()
    }

    /// When there is something to do without being woken.
    pub(crate) fn next_deadline(&self) -> Option<Time> {
        let postponed = self.ports.iter().flatten().any(|p| p.dirty).then(|| self.now.after(POSTPONED_NS));
        [self.engine.next_timeout(), self.delayed.next(), postponed].into_iter().flatten().min()
    }

    /// Makes placed packets visible in the order that the transport gave.
    pub(crate) fn publish(&mut self) {
        for &(owner, handle) in &self.out.publish {
            let Some(port) = self.ports.get_mut(usize::from(owner)).and_then(Option::as_mut) else { continue };
            port.port.publish(RxHandle(handle));
            port.dirty = true;
        }
        self.out.publish.clear();
        for port in self.ports.iter_mut().flatten().filter(|p| p.dirty) {
            port.dirty = false;
            // What the guest says in answer can be fetched in this same turn.
            port.readable = true;
            if port.port.notify().is_err() {
                self.counters.notify_errors += 1;
            }
            // What the guest's queue did not take is offered again in a moment.
            port.dirty = port.port.has_postponed();
        }
    }

    /// A peer is gone: what waits to leave for it is to be decided anew.
    pub(crate) fn forget_departures(&mut self, peer: u16) {
        for port in self.ports.iter_mut().flatten().filter(|p| p.blocked.is_some_and(|d| d.peer == peer)) {
            port.blocked = None;
            if let Some(first) = port.backlog.front() {
                port.held[first.handle.0 as usize] = None;
            }
        }
    }

    pub(crate) fn port_mut(&mut self, owner: u16) -> Option<&mut Port> {
        self.ports.get_mut(usize::from(owner)).and_then(Option::as_mut)
    }

    pub(crate) fn on_readable(&mut self, owner: usize) {
        if let Some(port) = self.ports.get_mut(owner).and_then(Option::as_mut) {
            port.readable = true;
        }
    }

    /// Whether a guest may have something that can be fetched now.
    pub(crate) fn any_readable(&self) -> bool {
        self.ports.iter().flatten().any(|p| p.readable && p.watched)
    }

    /// Watches a port's descriptor only while something can be done about it: a guest that is held up by a closed
    /// window must not keep the loop awake.
    pub(crate) fn watch(&mut self, owner: usize) {
        let Some(port) = self.ports.get_mut(owner).and_then(Option::as_mut) else { return };
        let wanted = port.backlog.is_empty() && port.port.tx_free() > 0 && !port.failed;
        if wanted == port.watched {
            return;
        }
        let flags = if wanted { epoll::EventFlags::IN } else { epoll::EventFlags::empty() };
        let data = epoll::EventData::new_u64(owner as u64);
        if epoll::modify(&self.epoll, port.port.fd(), data, flags).is_ok() {
            port.watched = wanted;
        }
    }
}
