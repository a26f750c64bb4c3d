//! The state of one worker, in one place. `guest.rs`, `underlay.rs` and `emit.rs` move packets through it.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use bifrost_avs::{Switch, VECTOR};
use bifrost_nic::dscp::Marking;
use bifrost_nic::{Malformed, Parsed};
use bifrost_port::{GuestPort, RxHandle, TxBatch, TxFrame, Underlay};
use bifrost_rte::{Engine, Output, PathEstimate, Time, Weight};
use bifrost_tables::PathSet;
use bifrost_wire::{Mac, Vni};
use foldhash::fast::RandomState;
use hashbrown::HashMap;

use crate::budget::Budget;
use crate::bundle::Bundler;
use crate::capture::Capture;
use crate::contain::Strikes;
use crate::counters::Counters;
use crate::delayed::Delayed;
use crate::egress::Egress;
use crate::fault::Faults;
use crate::host::HostQueue;
use crate::kept::Kept;
use crate::learning::Asking;
use crate::limits::Limits;
use crate::moved::MovedGuests;
use crate::peers::{Peer, PeerConfig, PeerError, Peers, PlainPaths};
use crate::ports::{Port, PortConfig};
use crate::pressure::Pressure;
use crate::pulse::Pulse;
use crate::siblings::Siblings;
use crate::stage::Stage;
use crate::watchdog::Watchdog;
use crate::work::Work;

/// Interval at which packets that a guest's full queue did not take are offered again, ns.
const POSTPONED_NS: u64 = 200_000;

/// Configuration of a core.
#[derive(Clone, Debug)]
pub struct CoreConfig {
    /// The worker's index, 0..=31.
    pub index: u8,
    /// Configuration of the transport.
    pub transport: bifrost_rte::Config,
    /// Start time of the daemon, us since the epoch.
    pub instance: u64,
    /// Any random number; makes the CIDs of successive daemons differ.
    pub salt: u32,
    /// How paths are chosen for plain VXLAN.
    pub plain_paths: PlainPaths,
    /// Maximum UDP payload, bytes, of a datagram in which several packets of the transport are sent together; 0: each
    /// packet has its own datagram.
    pub bundle_bytes: u16,
    /// Outer DSCP of the transport's ACKs and set-up packets, 0 to 63. If it is not 0, control packets are sent first
    /// in each batch.
    pub control_dscp: u8,
    /// Percentage of the worker's time that a port may use beyond what its packets need; 0: unlimited. Used only by
    /// workers.
    pub slow_port_percent: u8,
    /// Time per turn for answering questions about the worker's state, us. Used only by workers.
    pub answer_us: u16,
}

/// Everything of a worker except its underlay, its thread and its clock, so that the daemon and virtual time run the
/// same code. `P` are its guest ports.
pub struct Core<P> {
    /// The time of this turn.
    pub(crate) now: Time,
    pub(crate) engine: Engine,
    pub(crate) switch: Switch,
    pub(crate) peers: Peers,
    pub(crate) ports: Vec<Option<Port<P>>>,
    /// Local vNICs, for connection set-up.
    pub(crate) vnics: HashMap<(Vni, Mac), u32, RandomState>,
    pub(crate) out: Output,
    /// Number of entries of `out.publish` that have been published, while publishing is in progress.
    pub(crate) published: usize,
    pub(crate) batch: TxBatch,
    pub(crate) bundler: Bundler,
    /// Outer traffic class of ACKs and set-up.
    pub(crate) control_class: u8,
    pub(crate) frames: Vec<TxFrame>,
    /// Results of parsing a guest's next frames.
    pub(crate) parsed: Vec<Result<Parsed, Malformed>>,
    pub(crate) scratch: Vec<u8>,
    /// A frame that was modified on its way.
    pub(crate) changed: Vec<u8>,
    pub(crate) faults: Faults,
    pub(crate) delayed: Delayed,
    pub(crate) counters: Counters,
    pub(crate) siblings: Siblings,
    /// Copies of packets sent while all paths to a peer had failed.
    pub(crate) kept: Kept,
    /// Guests that have moved recently.
    pub(crate) moved: MovedGuests,
    /// Sees packets while a capture is running.
    pub(crate) capture: Option<Box<Capture>>,
    /// Which guests get less while this worker cannot keep up.
    pub(crate) pressure: Pressure,
    /// Datagrams may be waiting.
    pub(crate) underlay_readable: bool,
    /// Datagrams of the last batch that have not been processed.
    pub(crate) arrived: Range<usize>,
    pub(crate) receive_budget: Budget,
    /// The step in progress, and the port for which it is done.
    pub(crate) work: Work,
    /// Detects ports that keep this worker busy.
    pub(crate) watchdog: Watchdog,
    /// Panics that were not caused by a port.
    pub(crate) unowned_panics: Strikes,
    /// Ports for which [`is_watched`](Self::is_watched) has changed.
    rewatch: Vec<u32>,
    /// Ports for whose guests frames wait ([`rx_queue`](crate::rx_queue)), and some for which none wait any longer.
    pub(crate) rx_queued: Vec<u32>,
    /// At least one guest has a limit for sending.
    has_limits: bool,
    /// The queue of frames for services of the daemon, if it has any.
    pub(crate) host_queue: Option<HostQueue>,
    /// Whose packet goes next, if this host sends at a given rate.
    pub(crate) egress: Option<Box<Egress>>,
    /// Packets that wait for routes.
    pub(crate) asking: Asking,
    /// Nothing is fetched from guests, because another process is about to take them over.
    pub(crate) guests_wait: bool,
}

impl<P: GuestPort> Core<P> {
    /// A core without ports and peers.
    pub fn new(config: CoreConfig, switch: Switch) -> Self {
        let salt = config.salt;
        Core {
            now: Time(0),
            engine: Engine::new(config.transport, config.index, config.instance, salt),
            switch,
            peers: Peers::new(config.plain_paths),
            ports: Vec::new(),
            vnics: HashMap::default(),
            out: Output::default(),
            published: 0,
            batch: TxBatch::default(),
            bundler: Bundler::new(config.bundle_bytes),
            control_class: config.control_dscp << 2,
            frames: Vec::with_capacity(256),
            parsed: Vec::with_capacity(VECTOR),
            scratch: Vec::with_capacity(2048),
            changed: Vec::new(),
            faults: Faults::new(u64::from(salt)),
            delayed: Delayed::default(),
            counters: Counters::default(),
            siblings: Siblings::new(u16::from(config.index)),
            kept: Kept::default(),
            moved: MovedGuests::default(),
            capture: None,
            pressure: Pressure::default(),
            underlay_readable: true,
            arrived: 0..0,
            receive_budget: Budget::default(),
            work: Work::default(),
            watchdog: Watchdog::default(),
            unowned_panics: Strikes::default(),
            rewatch: Vec::new(),
            rx_queued: Vec::new(),
            has_limits: false,
            host_queue: None,
            egress: None,
            asking: Asking::default(),
            guests_wait: false,
        }
    }

    /// The switch, for a change of its configuration.
    pub fn switch_mut(&mut self) -> &mut Switch {
        &mut self.switch
    }

    /// The switch.
    pub fn switch(&self) -> &Switch {
        &self.switch
    }

    /// The transport.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Counters of what happened so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The injected faults.
    pub fn faults_mut(&mut self) -> &mut Faults {
        &mut self.faults
    }

    /// Adds a port; its number must be free.
    ///
    /// # Errors
    /// The number is taken.
    pub fn add_port(&mut self, config: PortConfig<P>) -> io::Result<()> {
        let owner = config.owner as usize;
        if self.ports.len() <= owner {
            self.ports.resize_with(owner + 1, || None);
        }
        if self.ports[owner].is_some() {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "a port of this number exists"));
        }
        let mut port = Port::new(config);
        port.watched = true;
        self.engine.set_receive_window(port.owner, port.port.receive_window());
        self.vnics.insert((port.vni, port.mac), port.owner);
        self.moved.forget((port.vni, port.mac));
        self.ports[owner] = Some(port);
        self.set_egress_of(owner as u32);
        Ok(())
    }

    /// Removes a port with its connections and buffers; returns its device.
    pub fn remove_port(&mut self, owner: u32) -> Option<P> {
        self.drop_rx_queued(owner);
        let port = self.ports.get_mut(owner as usize).and_then(Option::take)?;
        self.vnics.remove(&(port.vni, port.mac));
        self.forget_egress_of(owner);
        self.engine.remove_owner(owner, &mut self.out);
        self.kept.forget(|flow| flow.owner == owner);
        self.switch.forget_counters(bifrost_avs::PortId(owner));
        // If a fault has put the port's device aside, return that one.
        Some(port.broken.unwrap_or(port.port))
    }

    /// Puts another device behind a port and returns the previous one, whose buffers and connections are forgotten.
    ///
    /// # Errors
    /// There is no such port; returns `device`.
    pub fn swap_device(&mut self, owner: u32, device: P) -> Result<P, P> {
        self.drop_rx_queued(owner);
        let Some(port) = self.ports.get_mut(owner as usize).and_then(Option::as_mut) else { return Err(device) };
        self.engine.remove_owner(owner, &mut self.out);
        self.engine.set_receive_window(owner, device.receive_window());
        let before = port.exchange(device);
        // If a fault had put the device aside, `before` is only its stand-in.
        Ok(port.broken.take().unwrap_or(before))
    }

    /// Numbers of the ports whose device is gone.
    pub fn failed_ports(&self) -> Vec<u32> {
        self.ports.iter().flatten().filter(|port| port.failed).map(|port| port.owner).collect()
    }

    /// Changes how much a port may send and receive. No packet in transit is lost.
    pub fn set_limits(&mut self, owner: u32, limits: Limits) {
        if let Some(port) = self.port_mut(owner) {
            port.limits = limits;
            port.held_back_until = None;
            self.watch(owner as usize);
            self.has_limits = self.ports.iter().flatten().any(|p| p.limits.tx.is_some());
        }
    }

    /// Makes packets for a port's guest beyond its receive limit wait, at most `bytes` in each band on each worker,
    /// instead of being dropped; `None`: they are dropped. What the transport carries waits at its sender in any case.
    pub fn set_rx_queue(&mut self, owner: u32, bytes: Option<usize>) {
        if let Some(port) = self.port_mut(owner) {
            port.set_rx_queue(bytes);
        }
    }

    /// Sets how the outer DSCP of packets from a port's guest is chosen.
    pub fn set_marking(&mut self, owner: u32, marking: Marking) {
        if let Some(port) = self.port_mut(owner) {
            port.marking = marking;
        }
    }

    /// Sets the share of a port's network on full paths, and the port's share within its network.
    pub fn set_weights(&mut self, owner: u32, network: Weight, port: Weight) {
        if let Some(of) = self.port_mut(owner) {
            of.weights = (network, port);
            let vni = of.vni.get();
            self.engine.set_network_weight(vni, network);
            self.engine.set_port_weight(owner, port);
            self.set_egress_of(owner);
        }
    }

    /// Changes when a port's packets become visible, and whether they are reliable.
    pub fn set_policy(&mut self, owner: u32, ordering: bifrost_rte::Ordering, reliable: bool) {
        if let Some(port) = self.port_mut(owner) {
            (port.ordering, port.reliable) = (ordering, reliable);
        }
    }

    /// When there will be work without a wake-up.
    pub fn next_deadline(&self) -> Option<Time> {
        let postponed = self.ports.iter().flatten().any(|p| p.dirty).then(|| self.now.after(POSTPONED_NS));
        let held_back = if self.has_limits { self.next_of_held_back() } else { None };
        let held = self.ports.iter().flatten().filter_map(|p| p.held_until(self.now)).min();
        let advertisement = self.switch.next_advertisement_ns().map(Time);
        let (rested, asking) = (self.next_rested(), self.asking.next());
        let transport = self.engine.next_timeout();
        let turn = self.egress.as_ref().and_then(|egress| egress.next(self.now));
        let queued = self.next_rx_queued();
        [transport, turn, queued, self.delayed.next(), postponed, held_back, held, rested, advertisement, asking]
            .into_iter()
            .flatten()
            .min()
    }

    /// When the next guest that has used up its send limit may continue. Guests with a backlog are excluded: they wait
    /// for something else first.
    fn next_of_held_back(&self) -> Option<Time> {
        self.ports.iter().flatten().filter(|p| p.backlog.is_empty()).filter_map(|p| p.held_back_until).min()
    }

    /// Makes placed packets visible, in the order given by the transport.
    pub(crate) fn publish<const SEEN: bool>(&mut self) {
        while let Some(&(owner, handle)) = self.out.publish.get(self.published) {
            self.published += 1;
            self.work.at(Stage::Publish, owner);
            if SEEN && let Some(capture) = &mut self.capture {
                capture.published(owner, handle);
            }
            let Some(port) = self.ports.get_mut(owner as usize).and_then(Option::as_mut) else { continue };
            port.port.publish(RxHandle(handle));
            port.hidden = port.hidden.saturating_sub(1);
            port.dirty = true;
        }
        self.out.publish.clear();
        self.published = 0;
        for port in self.ports.iter_mut().flatten().filter(|p| p.dirty) {
            port.dirty = false;
            self.work.at(Stage::Notify, port.owner);
            // The guest's response can be fetched in the same turn.
            port.readable = true;
            if port.port.notify().is_err() {
                self.counters.notify_errors += 1;
            }
            // What the guest's queue did not take is offered again soon.
            port.dirty = port.port.has_postponed();
        }
    }

    /// A peer is gone: the switch decides again about packets that wait to be sent to it.
    pub(crate) fn forget_departures(&mut self, peer: u32) {
        for port in self.ports.iter_mut().flatten().filter(|p| !p.waiting.is_empty()) {
            port.decide_again(|departure| departure.peer == peer);
        }
    }

    pub(crate) fn port_mut(&mut self, owner: u32) -> Option<&mut Port<P>> {
        self.ports.get_mut(owner as usize).and_then(Option::as_mut)
    }

    /// A guest may have packets to fetch.
    pub fn on_port_readable(&mut self, owner: u32) {
        if let Some(port) = self.port_mut(owner) {
            port.readable = true;
        }
    }

    /// Datagrams may be waiting.
    pub fn on_underlay_readable(&mut self) {
        self.underlay_readable = true;
    }

    /// Whether the underlay or a guest may have packets that can be processed now.
    pub fn has_more(&self) -> bool {
        self.has_arrivals()
            || self.siblings.has_rest()
            || self
                .ports
                .iter()
                .flatten()
                .any(|p| (p.unfinished && p.slowness.rests_until.is_none()) || p.readable && p.watched)
    }

    /// Whether datagrams may be waiting, here or in the underlay.
    pub(crate) fn has_arrivals(&self) -> bool {
        self.underlay_readable || !self.arrived.is_empty()
    }

    /// A port for which [`is_watched`](Self::is_watched) has changed since it was last returned here.
    pub fn take_rewatched(&mut self) -> Option<u32> {
        self.rewatch.pop()
    }

    /// Whether the caller should be told when the port becomes readable. Not while nothing could be done about it: a
    /// guest that is stopped by a closed window must not keep the loop awake.
    pub fn is_watched(&self, owner: u32) -> bool {
        self.ports.get(owner as usize).and_then(Option::as_ref).is_some_and(|p| p.watched)
    }

    /// Fetched packets of a port that wait for any reason.
    pub fn waiting_packets(&self, owner: u32) -> u64 {
        let port = self.ports.get(owner as usize).and_then(Option::as_ref);
        port.map_or(0, |port| port.backlog.len() as u64 + port.waiting.packets() as u64 + port.learning_packets())
    }

    /// The device behind a port.
    pub fn device(&self, owner: u32) -> Option<&P> {
        Some(&self.ports.get(owner as usize)?.as_ref()?.port)
    }

    /// The device behind a port, for a caller that plays the guest.
    pub fn device_mut(&mut self, owner: u32) -> Option<&mut P> {
        self.port_mut(owner).map(|p| &mut p.port)
    }

    /// The device that the last fault of a port has put aside.
    pub(crate) fn broken_device(&self, owner: u32) -> Option<&P> {
        self.ports.get(owner as usize)?.as_ref()?.broken.as_ref()
    }

    /// Injects an effect at a step, for tests.
    #[cfg(debug_assertions)]
    pub fn inject(&mut self, injection: crate::work::Injection) {
        self.work.inject(Some(injection));
    }

    /// Whether an injected panic has not happened yet.
    #[cfg(debug_assertions)]
    pub fn is_panic_due(&self) -> bool {
        self.work.is_armed()
    }

    /// What other threads may see of the work of this core.
    pub fn pulse(&self) -> Arc<Pulse> {
        Arc::clone(&self.work.pulse)
    }

    /// A command of another thread begins.
    pub(crate) fn begin_command(&mut self) {
        self.work.at_shared(Stage::Command);
    }

    /// Adds a peer, or changes the paths of an existing one; connections of an unchanged peer are not touched.
    ///
    /// # Errors
    /// A lane cannot be opened; then the peer does not exist.
    pub fn set_peer(&mut self, config: PeerConfig, underlay: &mut impl Underlay) -> Result<(), PeerError> {
        if self.peers.get(config.id).is_some_and(|p| p.config == config) {
            return Ok(());
        }
        self.remove_peer(config.id, underlay);
        self.peers.add(config, &mut self.engine, underlay)
    }

    /// Takes exactly these paths of a peer out of use, bit i for path i, until the next call or until the peer changes:
    /// neither plain VXLAN nor the transport selects them, unless all are out of use. Returns whether the peer exists.
    pub fn drain_paths(&mut self, peer: u32, paths: PathSet) -> bool {
        self.peers.drain(peer, paths, &mut self.engine, self.now)
    }

    /// What the transport knows of the paths to each peer.
    pub fn path_estimates(&self) -> Vec<(u32, Vec<PathEstimate>)> {
        let of = |peer: &Peer| Some((peer.config.id, self.engine.path_estimates(peer.engine?)));
        self.peers.iter().filter_map(of).collect()
    }

    /// Continues with what another engine knew of the paths to a peer, which is ignored if there are other paths now.
    pub fn resume_paths(&mut self, peer: u32, estimates: &[PathEstimate]) {
        if let Some(engine_peer) = self.peers.get(peer).and_then(|p| p.engine) {
            self.engine.resume_paths(self.now, engine_peer, estimates);
        }
    }

    /// Forgets a peer; the packets of its connections are sent as plain VXLAN first, while its lanes are still known.
    pub fn remove_peer(&mut self, id: u32, underlay: &mut impl Underlay) {
        let Some(engine_peer) = self.peers.get(id).map(|p| p.engine) else { return };
        if let Some(engine_peer) = engine_peer {
            self.engine.remove_peer(engine_peer, &mut self.out);
        }
        self.publish::<false>();
        self.emit::<false>(underlay);
        self.peers.remove(id);
        self.kept.forget(|flow| flow.peer == id);
        self.moved.forget_peer(id);
        self.forget_departures(id);
    }

    /// Decides again whether a port is watched.
    pub(crate) fn watch(&mut self, owner: usize) {
        let Some(port) = self.ports.get_mut(owner).and_then(Option::as_mut) else { return };
        let wanted = port.backlog.is_empty()
            && port.port.tx_free() > 0
            && !port.failed
            && port.held_back_until.is_none()
            && port.held_until(self.now).is_none()
            && port.slowness.rests_until.is_none();
        if wanted != port.watched {
            port.watched = wanted;
            self.rewatch.push(owner as u32);
        }
    }
}
