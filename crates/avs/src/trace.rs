//! Traces: what the switch would do with a packet, stage by stage, without doing it. The same pipeline runs and
//! records each decision.

use std::net::IpAddr;

use bifrost_nic::{Offload, Parsed};
use bifrost_wire::{Mac, Vni};

use crate::drop_reason::DropReason;
use crate::effects::Effects;
use crate::fragments::{First, Moment, Piece};
use crate::frame::Frame;
use crate::groups::{Judgement, Memory, Permission, Why};
use crate::ids::{Direction, LoadBalancerId, PeerId, PortId};
use crate::index::Index;
use crate::location::{Location, NextHop};
use crate::path_mtu::{self, Remedy, TooLarge};
use crate::pipeline::{self, Output};
use crate::port_state::Asked;
use crate::rule_log::Ruling;
use crate::service::{self, Step, Translator};
use crate::session::Planned;
use crate::shared::Claim;
use crate::switch::Switch;
use crate::tables::GATEWAY_MAC;
use crate::verdict::Verdict;
use crate::vpc::VpcIndex;

/// The trace of a frame from a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestTrace {
    /// Whether the guest may send this frame at all.
    pub admitted: Result<(), DropReason>,
    /// The vNIC that the frame goes to, if there is one.
    pub hop: Option<Hop>,
    /// The checks whether it may pass, in order.
    pub checks: Vec<Check>,
    /// What [`Switch::from_guest`] would return.
    pub verdict: Verdict,
}

/// The trace of a frame from a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnderlayTrace {
    /// The port that the frame goes to, if there is one.
    pub port: Option<PortId>,
    /// The checks whether it may pass, in order.
    pub checks: Vec<Check>,
    /// What [`Switch::from_underlay`] would return.
    pub verdict: Verdict,
}

/// The trace of a frame that another worker of this host hands over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerTrace {
    /// The checks whether it may pass, in order.
    pub checks: Vec<Check>,
    /// What [`Switch::from_worker`] would return.
    pub verdict: Verdict,
}

/// The next hop of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hop {
    /// Whether it is routed by the gateway; otherwise it is switched by its MAC address.
    pub routed: bool,
    /// The vNIC.
    pub mac: Mac,
    /// The host of that vNIC; `None`: this host.
    pub peer: Option<PeerId>,
    /// The network of that vNIC.
    pub vni: Vni,
    /// Path MTU: the largest IP packet that the path carries, bytes.
    pub mtu: u16,
}

/// A check whether a packet may pass, and its result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// The port that it was made for.
    pub port: PortId,
    /// Direction as seen from that port's guest.
    pub direction: Direction,
    /// What decided, and how.
    pub by: By,
    /// Whether the packet passed, or why not.
    pub result: Result<(), DropReason>,
    /// Whether the deciding rule is logged.
    pub logged: bool,
}

/// What decided whether a packet may pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// The network's ACL: index of the rule among those of the direction; `None`: no rule matched, so the packet
    /// passes.
    Acl(Option<usize>),
    /// The record of the packet that this fragment belongs to.
    Fragments,
    /// Security groups do not apply to such packets.
    NoGroup,
    /// Security groups, for an ICMP error about another packet.
    Error {
        /// Whether the quoted packet has a session. If so, the error passes.
        known: bool,
        /// The decision of the rules if it has none.
        permission: Permission,
    },
    /// An existing session, which lets the packet pass.
    Session {
        /// The session's state.
        state: &'static str,
        /// Direction of its first packet.
        origin: Direction,
        /// Seconds since its last packet.
        idle_s: u32,
    },
    /// A load balancer.
    LoadBalancer {
        /// The load balancer.
        id: LoadBalancerId,
        /// Address and port of the backend.
        backend: (IpAddr, u16),
        /// Whether the packet begins a connection.
        is_new: bool,
    },
    /// NAT with this floating address of the guest.
    Floating(IpAddr),
    /// NAT with a shared address.
    Nat {
        /// The guest's outside address and port.
        outside: (IpAddr, u16),
        /// Whether the packet begins a conversation.
        is_new: bool,
    },
    /// Security groups: there is no session, and the packet would begin one.
    Groups {
        /// State of a session with the same key that would end, and whether it ends because the rules no longer allow
        /// it.
        ends: Option<(&'static str, bool)>,
        /// The decision of the rules.
        permission: Permission,
    },
}

impl Switch {
    /// Traces [`from_guest`](Self::from_guest) with the same arguments. Nothing changes.
    pub fn trace_from_guest(
        &self,
        port: PortId,
        frame_head: &[u8],
        len: usize,
        offload: Offload,
        parsed: &Parsed,
    ) -> GuestTrace {
        let frame = Frame { head: frame_head, len, offload, parsed };
        let mut looking = Looking::at(self);
        let (mut verdict, mut answer) = (Verdict::drop(DropReason::UnknownPort), Vec::new());
        let output = Output { verdict: &mut verdict, answer: &mut answer };
        pipeline::outbound(&self.index, port, frame, output, &mut looking);
        let admitted = pipeline::admits(&self.index, port, frame);
        let behind = looking.checks.iter().find_map(|check| match check.by {
            By::LoadBalancer { backend: (dst_ip, dst_port), .. } if check.direction == Direction::Egress => {
                Some(Parsed { dst_ip, dst_port, ..*parsed })
            }
            _ => None,
        });
        let parsed = behind.as_ref().unwrap_or(parsed);
        let hop = if admitted.is_ok() { self.index.hop(port, parsed) } else { None };
        GuestTrace { admitted, hop, checks: looking.checks, verdict }
    }

    /// Traces [`from_underlay`](Self::from_underlay) with the same arguments. Nothing changes.
    pub fn trace_from_underlay(&self, vni: Vni, peer: PeerId, frame_head: &[u8], parsed: &Parsed) -> UnderlayTrace {
        let frame = Frame::whole(frame_head, parsed);
        let mut looking = Looking::at(self);
        let vpc = self.index.vpc(vni);
        let (mut verdict, mut answer) = (Verdict::drop(DropReason::UnknownVni), Vec::new());
        let output = Output { verdict: &mut verdict, answer: &mut answer };
        let port = pipeline::inbound(&self.index, vpc, peer, frame, output, &mut looking);
        UnderlayTrace { port, checks: looking.checks, verdict }
    }

    /// Traces [`from_worker`](Self::from_worker) with the same arguments. Nothing changes.
    pub fn trace_from_worker(&self, from: PortId, port: PortId, frame_head: &[u8], parsed: &Parsed) -> WorkerTrace {
        let mut looking = Looking::at(self);
        let frame = Frame::whole(frame_head, parsed);
        let verdict = pipeline::handed_over(&self.index, (from, port), frame, &mut looking);
        WorkerTrace { checks: looking.checks, verdict }
    }

    /// The MAC address in the switch's reply when a guest of a network resolves an address.
    pub fn resolve(&self, vni: Vni, address: IpAddr) -> Option<Mac> {
        self.index.vpc(vni)?.resolve(address)
    }
}

impl Index {
    /// The next hop of a packet from a port, if there is one.
    fn hop(&self, port: PortId, parsed: &Parsed) -> Option<Hop> {
        let (_, vpc) = self.port(port)?;
        let (NextHop { mac, path }, of) = self.next(vpc, parsed)?;
        let peer = match path.location() {
            Location::Remote(peer) => Some(peer),
            Location::Local(_) => None,
        };
        Some(Hop { routed: self.is_routed(vpc, parsed), mac, peer, vni: of.vni, mtu: path.mtu })
    }

    /// The location of the vNIC that a packet from a port goes to next.
    pub(crate) fn location(&self, port: PortId, parsed: &Parsed) -> Option<Location> {
        let (_, vpc) = self.port(port)?;
        self.next(vpc, parsed).map(|(hop, _)| hop.path.location())
    }

    fn is_routed(&self, vpc: &VpcIndex, parsed: &Parsed) -> bool {
        parsed.dst_mac == GATEWAY_MAC && vpc.has_gateway()
    }

    fn next<'a>(&'a self, vpc: &'a VpcIndex, parsed: &Parsed) -> Option<(NextHop, &'a VpcIndex)> {
        if self.is_routed(vpc, parsed) {
            let next_hop = self.next_hop(vpc, parsed.src_ip, parsed.dst_ip);
            return next_hop.filter(|_| parsed.is_ip() && !vpc.is_gateway(parsed.dst_ip));
        }
        let path = vpc.path(parsed.dst_mac).or_else(|| vpc.learned_path(parsed.dst_mac))?;
        Some((NextHop { mac: parsed.dst_mac, path }, vpc))
    }
}

/// Records what would be done.
struct Looking<'a> {
    switch: &'a Switch,
    planned: Planned,
    planned_connections: Planned,
    checks: Vec<Check>,
}

impl<'a> Looking<'a> {
    fn at(switch: &'a Switch) -> Self {
        Looking { switch, planned: Planned::NOTHING, planned_connections: Planned::NOTHING, checks: Vec::new() }
    }

    fn moment(&self) -> Moment {
        Moment { now_ns: self.switch.now_ns, epoch: self.switch.epoch }
    }
}

impl Effects for Looking<'_> {
    fn now_ns(&self) -> u64 {
        self.switch.now_ns
    }

    fn may_ask(&mut self, port: PortId, what: Asked) -> bool {
        let state = self.switch.ports.get(port.place());
        state.is_some_and(|state| state.clone().bound(what).take(self.switch.now_ns, 1))
    }

    fn claim(&mut self, _: Claim) {}

    fn memory(&self) -> Memory<'_> {
        Memory { sessions: &self.switch.sessions, after: &self.planned, epoch: self.switch.epoch }
    }

    fn connections(&self) -> service::Memory<'_> {
        let Switch { connections, mappings, epoch, .. } = self.switch;
        service::Memory { connections, mappings, after: &self.planned_connections, epoch: *epoch }
    }

    fn service(&mut self, port: PortId, direction: Direction, step: &Step) -> Result<(), DropReason> {
        let is_new = step.is_new();
        let by = match step.connection.by {
            Translator::Balancer(id) => {
                let backend = step.connection.backend();
                By::LoadBalancer { id, backend: (backend.address, backend.port), is_new }
            }
            Translator::Nat { .. } => {
                let (_, outside) = step.connection.guest_ends();
                By::Nat { outside: (outside.address, outside.port), is_new }
            }
        };
        let result = step.foresee(&self.switch.connections, &mut self.planned_connections);
        self.checks.push(Check { port, direction, by, result, logged: false });
        result
    }

    fn supersede(&mut self, connection: u32) {
        self.planned_connections.end(connection);
    }

    fn readdressed(&mut self, port: PortId, direction: Direction, outside: IpAddr) {
        self.checks.push(Check { port, direction, by: By::Floating(outside), result: Ok(()), logged: false });
    }

    fn acl(&mut self, port: PortId, direction: Direction, rule: Option<(usize, bool)>) {
        let result = if rule.is_some_and(|(_, allow)| !allow) { Err(DropReason::Acl) } else { Ok(()) };
        self.checks.push(Check { port, direction, by: By::Acl(rule.map(|(place, _)| place)), result, logged: false });
    }

    fn groups(&mut self, port: PortId, direction: Direction, judgement: Judgement) -> Result<(), DropReason> {
        let sessions = &self.switch.sessions;
        let by = match judgement {
            Judgement::Exempt => By::NoGroup,
            Judgement::Related { known, permission } => By::Error { known, permission },
            Judgement::Continues { index, .. } => {
                let (state, idle_s) = sessions.standing(index);
                By::Session { state: state.name(), origin: sessions.origin(index), idle_s }
            }
            Judgement::Begins { ends, permission, .. } => {
                let ends = ends.map(|(index, why)| (sessions.standing(index).0.name(), why == Why::Revoked));
                By::Groups { ends, permission }
            }
        };
        let result = judgement.foresee(sessions, direction, &mut self.planned);
        self.checks.push(Check { port, direction, by, result, logged: false });
        result
    }

    fn log(&mut self, at: (PortId, Direction), _: Frame<'_>, _: Ruling<'_>) {
        let has_log = self.switch.ports.get(at.0.place()).is_some_and(|state| state.rules.is_some());
        if let Some(check) = self.checks.last_mut() {
            check.logged = has_log;
        }
    }

    fn later_fragment(&mut self, at: (PortId, Direction), piece: &Piece) -> Result<(), DropReason> {
        let result = self.switch.fragments.check_later(at, piece, self.moment());
        self.checks.push(Check { port: at.0, direction: at.1, by: By::Fragments, result, logged: false });
        result
    }

    fn check_first_fragment(&mut self, at: (PortId, Direction), piece: &Piece) -> Result<(), DropReason> {
        let result = self.switch.fragments.check_first(at, piece, self.moment());
        if result.is_err() {
            self.checks.push(Check { port: at.0, direction: at.1, by: By::Fragments, result, logged: false });
        }
        result
    }

    fn first_fragment(&mut self, _: (PortId, Direction), _: &Piece, _: First) {}

    fn too_large(&mut self, port: PortId, frame: TooLarge<'_>, answer: &mut Vec<u8>) -> Remedy {
        let Some(state) = self.switch.ports.get(port.place()) else { return Remedy::None };
        // Tokens are taken from a clone, so none is used up.
        path_mtu::remedy(frame, &mut state.errors.clone(), self.switch.now_ns, answer)
    }
}
