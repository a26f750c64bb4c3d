//! What would become of a packet, stage by stage, without sending it.
//!
//! Nothing is decided here: every judgement is the one that packets get, asked without what follows from it. Only what the
//! transport does in the next moment is not foreseen: which of the paths it chooses, and whether its window has room by then;
//! nor which path a burst of plain VXLAN draws.

use std::net::{IpAddr, SocketAddr};

use bifrost_avs::{
    Action, DropReason, GuestTrace, PeerId as SwitchPeer, PortId, UnderlayTrace, Verdict, WorkerId, WorkerTrace,
};
use bifrost_nic::{Malformed, Offload, Parsed, Segments, parse};
use bifrost_port::{GuestPort, TxFrame, TxHandle};
use bifrost_rte::{ConnSnapshot, Pair, PathState, State, Time};
use bifrost_wire::bifrost::PathId;
use bifrost_wire::{Mac, Vni};

use crate::core::Core;
use crate::fault::Direction;
use crate::guest::plan;

/// Connections among which the one of a packet is looked for; with more, only its state is told.
const MAX_CONNECTIONS: usize = 1 << 16;

/// What would become of a packet.
#[derive(Clone, Debug)]
pub struct Trace {
    /// The worker that was asked.
    pub worker: u16,
    /// What each stage says, in the order of the packet's way.
    pub steps: Vec<Step>,
    /// What becomes of it.
    pub end: End,
}

/// What becomes of a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// It leaves for another host.
    Sent {
        /// The peer's number.
        peer: u16,
    },
    /// A guest of this host is shown it.
    Delivered {
        /// The number of its port.
        port: u16,
    },
    /// Another worker of this host serves the port that it is for, and goes on with it ([`Core::trace_from_worker`]).
    HandedOver {
        /// The worker.
        worker: u16,
        /// The number of the port.
        port: u16,
        /// The frame that the worker gets.
        frame: Vec<u8>,
    },
    /// The switch answers, and it goes no further.
    Answered,
    /// Copies go to vNICs of a group.
    Copied {
        /// Number of vNICs.
        to: usize,
    },
    /// It goes no further.
    Dropped {
        /// The counter that would have counted it.
        counter: String,
        /// The number of the port at which, if at one.
        port: Option<u16>,
    },
}

/// What one stage says.
#[derive(Clone, Debug)]
pub enum Step {
    /// The source address of the datagram: the number of the peer that has it.
    Peer(Option<u16>),
    /// The headers.
    Parsed(Result<Parsed, Malformed>),
    /// Faults that may hit the packet, by number, and where.
    Faults {
        /// At the port, or on the paths.
        at_port: bool,
        /// Their numbers.
        ids: Vec<u32>,
    },
    /// The switch, for a packet from a guest.
    FromGuest(GuestTrace),
    /// The switch, for a packet from a peer.
    FromUnderlay(UnderlayTrace),
    /// Another worker of this host goes on with it.
    HandedOver {
        /// The worker.
        worker: u16,
        /// The number of the port that it is for.
        port: u16,
    },
    /// The switch of another worker, for what a guest of this host sends.
    FromWorker(WorkerTrace),
    /// A limit of a port.
    Limit {
        /// The number of the port.
        port: u16,
        /// From its guest.
        is_tx: bool,
        /// How long a packet of the guest would wait, ns; 0: it need not. A packet for the guest does not wait.
        wait_ns: u64,
        /// Whether the packet passes.
        passes: bool,
    },
    /// Packets of the guest that wait before it.
    Waiting {
        /// How many.
        packets: u64,
    },
    /// It is cut to fit.
    Cut {
        /// Packets that it becomes.
        pieces: u16,
        /// The largest of them, bytes of IP packet.
        mtu: u16,
    },
    /// How it is carried.
    Carried {
        /// The peer's number.
        peer: u16,
        /// How, and why so.
        how: Carriage,
        /// The connection of the two vNICs, if it is known.
        connection: Option<ConnSnapshot>,
    },
    /// Routing changes it: the new MAC addresses are those of the hop and the gateway, and it has one less to live.
    Rewritten {
        /// The new destination.
        destination: Mac,
    },
    /// Paths between the hosts that it may take.
    Outer(Vec<Lane>),
    /// The guest's receive buffers: packets that are in them and not shown yet, and how many there are.
    Room {
        /// The number of the port.
        port: u16,
        /// Packets placed and not shown.
        hidden: u32,
        /// Buffers.
        capacity: u32,
    },
}

/// How a packet is carried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carriage {
    /// Plain VXLAN: the network's policy says so for such packets.
    NotReliable,
    /// Plain VXLAN: the peer speaks nothing else.
    PlainPeer,
    /// Reliably, on an open connection.
    Connection,
    /// Reliably: it would wait for the connection, which is being set up.
    Opening,
    /// Reliably: it would have a connection set up, and wait for it. Plain VXLAN if that fails.
    SetUp,
    /// Plain VXLAN: all paths have failed.
    BestEffort,
    /// Plain VXLAN: the peer has not answered set-up, or is asked once more meanwhile.
    Unanswered,
}

impl Carriage {
    /// Whether the transport carries it.
    pub fn is_reliable(self) -> bool {
        matches!(self, Carriage::Connection | Carriage::Opening | Carriage::SetUp)
    }
}

/// A way between two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lane {
    /// Its number.
    pub path: u8,
    /// Source of the datagram.
    pub from: SocketAddr,
    /// Its destination.
    pub to: SocketAddr,
    /// Whether the transport has found it good, as far as it knows.
    pub usable: bool,
    /// Whether the operator has taken it out of use, as all others.
    pub drained: bool,
    /// Smoothed delay of the network, ns; 0: not measured.
    pub srtt_ns: u64,
}

/// A trace as it grows.
struct Steps(Vec<Step>);

impl Steps {
    fn end(self, worker: u16, end: End) -> Trace {
        Trace { worker, steps: self.0, end }
    }
}

fn dropped(counter: impl Into<String>, port: Option<u16>) -> End {
    End::Dropped { counter: counter.into(), port }
}

impl<P: GuestPort> Core<P> {
    /// Time has come to `now`, as at the beginning of every turn: what is told of a packet is of that time.
    pub fn advance(&mut self, now: Time) {
        self.now = self.now.max(now);
        self.switch.advance(self.now.0);
    }

    /// The MAC address that a guest in a network is told when it asks who has an address.
    pub fn resolve(&self, vni: Vni, address: IpAddr) -> Option<Mac> {
        self.switch.resolve(vni, address)
    }

    /// What would become of a frame, whole and with its checksums finished, that the guest behind a port sends now. Nothing changes.
    pub fn trace_from_guest(&self, owner: u16, frame: &[u8]) -> Trace {
        let mut steps = Steps(Vec::new());
        let end = self.end_of_sent(owner, frame, &mut steps.0);
        steps.end(self.siblings.index, end)
    }

    /// What would become of a frame that arrives from an address in a network now. Nothing changes.
    pub fn trace_from_peer(&self, source: IpAddr, vni: Vni, frame: &[u8]) -> Trace {
        let mut steps = Steps(Vec::new());
        let end = self.end_of_received(source, vni, frame, &mut steps.0);
        steps.end(self.siblings.index, end)
    }

    /// What would become of a frame that another worker of this host hands over now: of the guest behind the port `from`, for the one behind
    /// `owner`. Nothing changes.
    pub fn trace_from_worker(&self, from: u16, owner: u16, frame: &[u8]) -> Trace {
        let mut steps = Steps(Vec::new());
        let end = self.end_of_handed_over(from, owner, frame, &mut steps.0);
        steps.end(self.siblings.index, end)
    }

    fn end_of_handed_over(&self, from: u16, owner: u16, frame: &[u8], steps: &mut Vec<Step>) -> End {
        let parsed = match parse(frame, frame.len()) {
            Ok(parsed) => parsed,
            Err(reason) => return dropped(format!("malformed.underlay_{}_frames", reason.name()), None),
        };
        let port = PortId(owner);
        let trace = self.switch.trace_from_worker(PortId(from), port, frame, &parsed);
        let Verdict { action, rewrite, .. } = trace.verdict;
        steps.push(Step::FromWorker(trace));
        match action {
            Action::Drop(reason) => underlay_drop(reason, Some(port)),
            Action::Deliver { port: PortId(to), worker: Some(worker) } => {
                let mut frame = frame.to_vec();
                rewrite.into_iter().for_each(|rewrite| rewrite.apply(&mut frame));
                End::HandedOver { worker: worker.0, port: to, frame }
            }
            Action::Deliver { port: PortId(to), worker: None } => self.placed(to, frame.len(), steps),
            // Never so: it stays on this host.
            Action::Forward { .. } | Action::Answer { .. } | Action::Host | Action::Copy => {
                self.placed(owner, frame.len(), steps)
            }
        }
    }

    fn end_of_sent(&self, owner: u16, frame: &[u8], steps: &mut Vec<Step>) -> End {
        let Some(port) = self.ports.get(usize::from(owner)).and_then(Option::as_ref) else {
            return dropped("drop.gone_packets", None);
        };
        if let Some(limit) = &port.limits.tx {
            let wait_ns = limit.wait_ns(self.now);
            steps.push(Step::Limit { port: owner, is_tx: true, wait_ns, passes: true });
        }
        if !port.backlog.is_empty() {
            steps.push(Step::Waiting { packets: port.backlog.len() as u64 });
        }
        let parsed = parse(frame, frame.len());
        steps.push(Step::Parsed(parsed));
        let parsed = match parsed {
            Ok(parsed) => parsed,
            Err(reason) => return dropped(format!("malformed.guest_{}_frames", reason.name()), None),
        };
        if self.would_fault_at_port(owner, Direction::Tx, steps) {
            return dropped("port.fault_dropped_packets", Some(owner));
        }
        let offload = Offload::default();
        let trace = self.switch.trace_from_guest(PortId(owner), frame, frame.len(), offload, &parsed);
        let (hop, verdict) = (trace.hop, trace.verdict);
        steps.push(Step::FromGuest(trace));
        let Verdict { action, rewrite, fragment_to } = verdict;
        match action {
            Action::Answer { .. } | Action::Host => return End::Answered,
            Action::Copy => return End::Copied { to: self.switch.copies(PortId(owner)).len() },
            Action::Drop(reason) => return dropped(format!("avs.{}", reason.counter()), Some(owner)),
            Action::Forward { .. } | Action::Deliver { .. } => {}
        }
        let fetched = TxFrame { handle: TxHandle(0), len: frame.len() as u32, offload };
        let segments = match plan(frame, fetched, fragment_to) {
            Ok(segments) => segments,
            Err(reason) => return dropped(format!("malformed.guest_{}_frames", reason.name()), None),
        };
        if let Some(mtu) = fragment_to {
            steps.push(Step::Cut { pieces: segments.count(), mtu });
        }
        if let (Some(_), Some(hop)) = (rewrite, hop) {
            steps.push(Step::Rewritten { destination: hop.mac });
        }
        match action {
            Action::Forward { vni, peer, local, remote, reliable, .. } => {
                let pair = Pair { vni: vni.get(), local, remote };
                self.carried(peer.0, pair, reliable, parsed.flow_hash, steps);
                End::Sent { peer: peer.0 }
            }
            Action::Deliver { port, worker: Some(WorkerId(worker)) } => {
                let mut frame = frame.to_vec();
                if let Some(rewrite) = rewrite {
                    rewrite.apply(&mut frame);
                }
                End::HandedOver { worker, port: port.0, frame }
            }
            Action::Deliver { port, .. } => self.placed(port.0, frame.len(), steps),
            // Gone before.
            Action::Answer { .. } | Action::Host | Action::Copy | Action::Drop(_) => End::Answered,
        }
    }

    fn end_of_received(&self, source: IpAddr, vni: Vni, frame: &[u8], steps: &mut Vec<Step>) -> End {
        let peer = self.peers.of_address(source);
        steps.push(Step::Peer(peer));
        let Some(peer) = peer else { return dropped("drop.unknown_peer_packets", None) };
        let on_paths = self.faults.iter().filter(|(fault, _)| fault.is_towards(peer, Direction::Rx));
        let ids: Vec<u32> = on_paths.map(|(fault, _)| fault.id).collect();
        if !ids.is_empty() {
            steps.push(Step::Faults { at_port: false, ids });
        }
        let parsed = parse(frame, frame.len());
        steps.push(Step::Parsed(parsed));
        let parsed = match parsed {
            Ok(parsed) => parsed,
            Err(reason) => return dropped(format!("malformed.underlay_{}_frames", reason.name()), None),
        };
        let trace = self.switch.trace_from_underlay(vni, SwitchPeer(peer), frame, &parsed);
        let (found, Verdict { action, fragment_to, .. }) = (trace.port, trace.verdict);
        steps.push(Step::FromUnderlay(trace));
        let port = match action {
            Action::Deliver { port, .. } => port,
            // A peer's frame is never forwarded.
            Action::Answer { .. } | Action::Forward { .. } | Action::Host | Action::Copy => return End::Answered,
            Action::Drop(reason) => return underlay_drop(reason, found),
        };
        if self.would_fault_at_port(port.0, Direction::Rx, steps) {
            return dropped("fault.dropped_packets", None);
        }
        let remote = if parsed.src_mac == bifrost_avs::GATEWAY_MAC {
            self.switch.resolve(vni, parsed.src_ip).unwrap_or(parsed.src_mac)
        } else {
            parsed.src_mac
        };
        let pair = Pair { vni: vni.get(), local: parsed.dst_mac, remote };
        if let Some(connection) = self.connection(pair) {
            let how = carriage(Some(connection.state));
            steps.push(Step::Carried { peer, how, connection: Some(connection) });
        }
        if let Some(mtu) = fragment_to
            && let Ok(pieces) = Segments::plan_within(frame, frame.len(), Offload::default(), mtu)
        {
            steps.push(Step::Cut { pieces: pieces.count(), mtu });
        }
        self.placed(port.0, frame.len(), steps)
    }

    /// A frame is for the guest behind a port.
    fn placed(&self, owner: u16, len: usize, steps: &mut Vec<Step>) -> End {
        let Some(port) = self.ports.get(usize::from(owner)).and_then(Option::as_ref) else {
            return dropped("drop.gone_packets", None);
        };
        if let Some(limit) = &port.limits.rx {
            let passes = limit.would_take(self.now, len);
            steps.push(Step::Limit { port: owner, is_tx: false, wait_ns: 0, passes });
            if !passes {
                return dropped("port.rate_limited_packets", Some(owner));
            }
        }
        steps.push(Step::Room { port: owner, hidden: port.hidden, capacity: port.port.rx_capacity() });
        End::Delivered { port: owner }
    }

    /// A frame is for another host.
    fn carried(&self, peer: u16, pair: Pair, reliable: bool, flow: u32, steps: &mut Vec<Step>) {
        let Some(to) = self.peers.get(peer) else { return };
        let how = match to.engine {
            _ if !reliable => Carriage::NotReliable,
            None => Carriage::PlainPeer,
            Some(_) => carriage(self.engine.state_of(pair)),
        };
        let connection = if reliable { self.connection(pair) } else { None };
        steps.push(Step::Carried { peer, how, connection });
        let on_paths = self.faults.iter().filter(|(fault, _)| fault.is_towards(peer, Direction::Tx));
        let ids: Vec<u32> = on_paths.map(|(fault, _)| fault.id).collect();
        if !ids.is_empty() {
            steps.push(Step::Faults { at_port: false, ids });
        }
        let known: Vec<_> = self.engine.path_snapshots(self.now).filter(|path| Some(path.peer) == to.engine).collect();
        let lane = |path: PathId, port: u16| {
            let (local, remote) = *to.config.paths.get(path.index())?;
            let known = known.iter().find(|known| known.path == path);
            Some(Lane {
                path: path.get(),
                from: SocketAddr::new(local, to.config.source_port_base.wrapping_add(u16::from(path.get()))),
                to: SocketAddr::new(remote, port),
                drained: to.is_drained(path),
                usable: known.is_none_or(|known| known.state == PathState::Usable),
                srtt_ns: known.map_or(0, |known| known.srtt_ns),
            })
        };
        let lanes = if how.is_reliable() {
            let selected = to.engine.map_or(&[][..], |peer| self.engine.selected_paths(peer));
            selected.iter().filter_map(|path| lane(*path, to.config.bifrost_port)).collect()
        } else {
            let paths = to.plain_paths(flow, &self.engine, self.now);
            paths.filter_map(|path| lane(path, to.config.vxlan_port)).collect()
        };
        steps.push(Step::Outer(lanes));
    }

    /// The connection of two vNICs.
    fn connection(&self, pair: Pair) -> Option<ConnSnapshot> {
        self.engine.state_of(pair)?;
        if self.engine.connections() > MAX_CONNECTIONS {
            return None;
        }
        self.engine.connection_snapshots(self.now).find(|c| c.pair == pair)
    }

    /// Notes the faults of a port; whether one drops everything.
    fn would_fault_at_port(&self, owner: u16, direction: Direction, steps: &mut Vec<Step>) -> bool {
        let faults = || self.faults.iter().map(|(fault, _)| fault).filter(|fault| fault.is_at(owner, direction));
        if faults().next().is_some() {
            steps.push(Step::Faults { at_port: true, ids: faults().map(|fault| fault.id).collect() });
        }
        faults().any(|fault| fault.down)
    }
}

/// How a packet to be carried reliably is, with a connection in that state.
fn carriage(state: Option<State>) -> Carriage {
    match state {
        None => Carriage::SetUp,
        Some(State::Open) => Carriage::Connection,
        Some(State::Opening { background: false, .. }) => Carriage::Opening,
        Some(State::Opening { background: true, .. } | State::Plain { .. }) => Carriage::Unanswered,
        Some(State::BestEffort) => Carriage::BestEffort,
    }
}

fn underlay_drop(reason: DropReason, port: Option<PortId>) -> End {
    match port {
        Some(port) => dropped(format!("avs.{}", reason.ingress_dropped_counter()), Some(port.0)),
        None => dropped(format!("avs.underlay_{}", reason.counter()), None),
    }
}
