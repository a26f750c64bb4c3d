//! Traces what would happen to a packet, stage by stage, without sending it.
//!
//! Nothing is decided here: each stage is asked for the decision that a real packet would get, without its side
//! effects. Not predicted are the transport's next actions (which path it selects, and whether its window will have
//! room) and the path that a burst of plain VXLAN draws.

use std::net::{IpAddr, SocketAddr};

use bifrost_avs::{
    Action, DropReason, GuestTrace, PeerId as SwitchPeer, PortId, UnderlayTrace, Verdict, WorkerId, WorkerTrace,
};
use bifrost_nic::dscp::Band;
use bifrost_nic::{Malformed, Offload, Parsed, Segments, parse};
use bifrost_port::{GuestPort, TxFrame, TxHandle};
use bifrost_rte::{ConnSnapshot, Pair, PathState, State, Time};
use bifrost_wire::bifrost::PathId;
use bifrost_wire::{Mac, Vni};

use crate::core::Core;
use crate::fault::Direction;
use crate::guest::plan;

/// Maximum number of connections in which a packet's connection is searched for; with more, only its state is reported.
const MAX_CONNECTIONS: usize = 1 << 16;

/// Trace of a packet.
#[derive(Clone, Debug)]
pub struct Trace {
    /// The worker that was asked.
    pub worker: u16,
    /// What each stage reports, in the order in which the packet passes them.
    pub steps: Vec<Step>,
    /// The final result.
    pub end: End,
}

/// What finally happens to a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// It is sent to another host.
    Sent {
        /// The peer's number.
        peer: u32,
    },
    /// It is delivered to a guest of this host.
    Delivered {
        /// The number of its port.
        port: u32,
    },
    /// Another worker of this host serves the destination port and continues with the packet
    /// ([`Core::trace_from_worker`]).
    HandedOver {
        /// The worker.
        worker: u16,
        /// The number of the port.
        port: u32,
        /// The frame that the worker gets.
        frame: Vec<u8>,
    },
    /// The switch answers it; it is not forwarded.
    Answered,
    /// Copies go to vNICs of a group.
    Copied {
        /// Number of vNICs.
        to: usize,
    },
    /// It waits until a route is learned.
    Asked {
        /// The network.
        vni: u32,
        /// The destination.
        address: IpAddr,
    },
    /// It is dropped.
    Dropped {
        /// The counter that would count it.
        counter: String,
        /// The port at which it is dropped, if any.
        port: Option<u32>,
    },
}

/// What one stage reports.
#[derive(Clone, Debug)]
pub enum Step {
    /// The peer that owns the datagram's source address, by number.
    Peer(Option<u32>),
    /// The headers.
    Parsed(Result<Parsed, Malformed>),
    /// Faults that may affect the packet, by number, and where.
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
    /// Another worker of this host continues with it.
    HandedOver {
        /// The worker.
        worker: u16,
        /// The destination port.
        port: u32,
    },
    /// The switch of another worker, for a packet from a guest of this host.
    FromWorker(WorkerTrace),
    /// A limit of a port.
    Limit {
        /// The number of the port.
        port: u32,
        /// Whether it limits packets from the guest.
        is_tx: bool,
        /// How long a packet would wait, ns; 0: not at all. A packet for the guest waits only if the port has a queue.
        wait_ns: u64,
        /// Whether the packet passes.
        passes: bool,
    },
    /// Packets of the guest that wait ahead of it.
    Waiting {
        /// How many.
        packets: u64,
    },
    /// It is fragmented.
    Cut {
        /// Number of fragments.
        pieces: u16,
        /// Maximum size of a fragment, bytes of IP packet.
        mtu: u16,
    },
    /// How it is carried.
    Carried {
        /// The peer's number.
        peer: u32,
        /// How, and why.
        how: Carriage,
        /// The connection of the two vNICs, if it is known.
        connection: Option<ConnSnapshot>,
    },
    /// Routing rewrites it: the new MAC addresses are those of the next hop and the gateway, and the TTL is one lower.
    Rewritten {
        /// The new destination.
        destination: Mac,
    },
    /// The paths between the hosts that it may take.
    Outer(Vec<Lane>),
    /// The guest's receive buffers: packets in them that are not published yet, and the number of buffers.
    Room {
        /// The number of the port.
        port: u32,
        /// Packets placed but not published.
        hidden: u32,
        /// Buffers.
        capacity: u32,
    },
}

/// How a packet is carried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carriage {
    /// Plain VXLAN, because of the network's policy for such packets.
    NotReliable,
    /// Plain VXLAN, because the peer supports nothing else.
    PlainPeer,
    /// Reliably, on an open connection.
    Connection,
    /// Reliably: it would wait for the connection, which is being set up.
    Opening,
    /// Reliably: a connection would be set up for it, and it would wait for that. Plain VXLAN if that fails.
    SetUp,
    /// Plain VXLAN, because all paths have failed.
    BestEffort,
    /// Plain VXLAN, because the peer has not answered set-up, or is just being asked again.
    Unanswered,
}

impl Carriage {
    /// Whether the transport carries it.
    pub fn is_reliable(self) -> bool {
        matches!(self, Carriage::Connection | Carriage::Opening | Carriage::SetUp)
    }
}

/// A path between two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lane {
    /// Its number.
    pub path: u8,
    /// Source address of the datagram.
    pub from: SocketAddr,
    /// Destination address of the datagram.
    pub to: SocketAddr,
    /// Whether the transport considers it usable, or does not know it.
    pub usable: bool,
    /// Whether the operator has drained it; it is listed then because all paths are drained.
    pub drained: bool,
    /// Smoothed delay of the network, ns; 0: not measured.
    pub srtt_ns: u64,
}

/// The steps of a trace that is being built.
struct Steps(Vec<Step>);

impl Steps {
    fn end(self, worker: u16, end: End) -> Trace {
        Trace { worker, steps: self.0, end }
    }
}

fn dropped(counter: impl Into<String>, port: Option<u32>) -> End {
    End::Dropped { counter: counter.into(), port }
}

impl<P: GuestPort> Core<P> {
    /// Sets the time to `now`, as at the start of each turn; traces refer to this time.
    pub fn advance(&mut self, now: Time) {
        self.now = self.now.max(now);
        self.switch.advance(self.now.0);
    }

    /// The MAC address that a guest in a network gets when it resolves an address.
    pub fn resolve(&self, vni: Vni, address: IpAddr) -> Option<Mac> {
        self.switch.resolve(vni, address)
    }

    /// Traces a frame, unsegmented and with complete checksums, sent now by the guest behind a port. Changes nothing.
    pub fn trace_from_guest(&self, owner: u32, frame: &[u8]) -> Trace {
        let mut steps = Steps(Vec::new());
        let end = self.end_of_sent(owner, frame, &mut steps.0);
        steps.end(self.siblings.index, end)
    }

    /// Traces a frame that arrives now from an address in a network. Changes nothing.
    pub fn trace_from_peer(&self, source: IpAddr, vni: Vni, frame: &[u8]) -> Trace {
        let mut steps = Steps(Vec::new());
        let end = self.end_of_received(source, vni, frame, &mut steps.0);
        steps.end(self.siblings.index, end)
    }

    /// Traces a frame that another worker of this host hands over now, from the guest behind port `from` for the one
    /// behind `owner`. Changes nothing.
    pub fn trace_from_worker(&self, from: u32, owner: u32, frame: &[u8]) -> Trace {
        let mut steps = Steps(Vec::new());
        let end = self.end_of_handed_over(from, owner, frame, &mut steps.0);
        steps.end(self.siblings.index, end)
    }

    fn end_of_handed_over(&self, from: u32, owner: u32, frame: &[u8], steps: &mut Vec<Step>) -> End {
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
            // Cannot happen: the frame stays on this host.
            Action::Forward { .. } | Action::Answer { .. } | Action::Host | Action::Copy | Action::Ask { .. } => {
                self.placed(owner, frame.len(), steps)
            }
        }
    }

    fn end_of_sent(&self, owner: u32, frame: &[u8], steps: &mut Vec<Step>) -> End {
        let Some(port) = self.ports.get(owner as usize).and_then(Option::as_ref) else {
            return dropped("drop.gone_packets", None);
        };
        if let Some(limit) = &port.limits.tx {
            let wait_ns = limit.wait_ns(self.now);
            steps.push(Step::Limit { port: owner, is_tx: true, wait_ns, passes: true });
        }
        let turns = if port.waiting.bound().is_some() { port.waiting.packets() } else { 0 };
        if !port.backlog.is_empty() || turns > 0 {
            steps.push(Step::Waiting { packets: (port.backlog.len() + turns) as u64 });
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
            Action::Ask { vni, address } => return End::Asked { vni: vni.get(), address },
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
            // Handled above.
            Action::Answer { .. } | Action::Host | Action::Copy | Action::Ask { .. } | Action::Drop(_) => End::Answered,
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
            Action::Answer { .. } | Action::Forward { .. } | Action::Host | Action::Copy | Action::Ask { .. } => {
                return End::Answered;
            }
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
    fn placed(&self, owner: u32, len: usize, steps: &mut Vec<Step>) -> End {
        let Some(port) = self.ports.get(owner as usize).and_then(Option::as_ref) else {
            return dropped("drop.gone_packets", None);
        };
        if let Some(limit) = &port.limits.rx {
            let passes = limit.would_take(self.now, len);
            if !passes && port.rx_queue.is_some() {
                let wait_ns = limit.until(self.now, len, Band::Normal);
                steps.push(Step::Limit { port: owner, is_tx: false, wait_ns, passes: true });
                return End::Delivered { port: owner };
            }
            steps.push(Step::Limit { port: owner, is_tx: false, wait_ns: 0, passes });
            if !passes {
                return dropped("port.rate_limited_packets", Some(owner));
            }
        }
        steps.push(Step::Room { port: owner, hidden: port.hidden, capacity: port.port.rx_capacity() });
        End::Delivered { port: owner }
    }

    /// A frame is for another host.
    fn carried(&self, peer: u32, pair: Pair, reliable: bool, flow: u32, steps: &mut Vec<Step>) {
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

    /// Records the faults of a port. Returns whether one of them drops everything.
    fn would_fault_at_port(&self, owner: u32, direction: Direction, steps: &mut Vec<Step>) -> bool {
        let faults = || self.faults.iter().map(|(fault, _)| fault).filter(|fault| fault.is_at(owner, direction));
        if faults().next().is_some() {
            steps.push(Step::Faults { at_port: true, ids: faults().map(|fault| fault.id).collect() });
        }
        faults().any(|fault| fault.down)
    }
}

/// How a packet for the reliable transport is carried, given the state of its connection.
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
