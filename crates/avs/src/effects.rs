//! Side effects of decisions along a packet's path: applied, or only recorded.

use std::net::IpAddr;

use crate::drop_reason::DropReason;
use crate::fragments::{First, Fragments, Moment, Piece};
use crate::frame::Frame;
use crate::groups::{Judgement, Memory};
use crate::ids::{Direction, PortId};
use crate::mapping::Mappings;
use crate::path_mtu::{self, Remedy, TooLarge};
use crate::port_state::{Asked, PortState};
use crate::rule_log::Ruling;
use crate::service::{self, Connection, Step};
use crate::session::{Planned, Sessions};
use crate::shared::{Claim, Claims};

/// Side effects of decisions along a packet's path.
pub(crate) trait Effects {
    /// Whether there may be load balancers or uplinks.
    #[inline(always)]
    fn has_services(&self) -> bool {
        true
    }
    /// Current time, ns.
    fn now_ns(&self) -> u64;
    /// Takes a token for a request of a guest to the switch; `false`: the guest exceeds its rate limit.
    fn may_ask(&mut self, port: PortId, what: Asked) -> bool;
    /// Records that a vNIC claims an address that it shares with others.
    fn claim(&mut self, claim: Claim);
    /// The sessions of the security groups.
    fn memory(&self) -> Memory<'_>;
    /// The connections of load balancers and NAT.
    fn connections(&self) -> service::Memory<'_>;
    /// A packet from or to a port belongs to a translated connection, and passes.
    fn service(&mut self, port: PortId, direction: Direction, step: &Step) -> Result<(), DropReason>;
    /// A translated connection has ended: another conversation uses its addresses and ports.
    fn supersede(&mut self, connection: u32);
    /// The guest's address in a packet was replaced by its floating address or vice versa. No state is kept.
    #[inline(always)]
    fn readdressed(&mut self, _port: PortId, _direction: Direction, _outside: IpAddr) {}
    /// The ACL of a port's network was evaluated: the deciding rule, and whether it lets the packet pass.
    fn acl(&mut self, port: PortId, direction: Direction, rule: Option<(usize, bool)>);
    /// The security groups of a port were evaluated.
    fn groups(&mut self, port: PortId, direction: Direction, judgement: Judgement) -> Result<(), DropReason>;
    /// A logged rule was looked up for a packet from or to a port. The ACL or groups that contain it were evaluated
    /// before.
    fn log(&mut self, at: (PortId, Direction), frame: Frame<'_>, ruling: Ruling<'_>);
    /// Checks a later fragment from or to a port against the record of its packet.
    fn later_fragment(&mut self, at: (PortId, Direction), piece: &Piece) -> Result<(), DropReason>;
    /// Checks that a first fragment can begin a packet.
    fn check_first_fragment(&mut self, at: (PortId, Direction), piece: &Piece) -> Result<(), DropReason>;
    /// A first fragment passes.
    fn first_fragment(&mut self, at: (PortId, Direction), piece: &Piece, first: First);
    /// A frame from or to a port is too large. `answer` receives the ICMP error for its sender.
    fn too_large(&mut self, port: PortId, frame: TooLarge<'_>, answer: &mut Vec<u8>) -> Remedy;
}

/// Applies side effects. Without `SERVICES` there are no load balancers and no uplinks; this variant is for packets
/// without flow records.
pub(crate) struct Apply<'a, const SERVICES: bool = true> {
    pub(crate) sessions: &'a mut Sessions,
    pub(crate) connections: &'a mut Sessions<Connection>,
    pub(crate) mappings: &'a mut Mappings,
    pub(crate) fragments: &'a mut Fragments,
    pub(crate) ports: &'a mut [PortState],
    pub(crate) claims: &'a mut Claims,
    pub(crate) epoch: u32,
    pub(crate) now_ns: u64,
}

impl<const SERVICES: bool> Apply<'_, SERVICES> {
    fn moment(&self) -> Moment {
        Moment { now_ns: self.now_ns, epoch: self.epoch }
    }
}

impl<const SERVICES: bool> Effects for Apply<'_, SERVICES> {
    #[inline(always)]
    fn has_services(&self) -> bool {
        SERVICES
    }

    #[inline(always)]
    fn now_ns(&self) -> u64 {
        self.now_ns
    }

    #[cold]
    fn may_ask(&mut self, port: PortId, what: Asked) -> bool {
        self.ports.get_mut(port.place()).is_some_and(|state| state.bound(what).take(self.now_ns, 1))
    }

    #[cold]
    fn claim(&mut self, claim: Claim) {
        self.claims.note(Claim { at_ns: self.now_ns, ..claim });
    }

    #[inline(always)]
    fn memory(&self) -> Memory<'_> {
        static NOTHING: Planned = Planned::NOTHING;
        Memory { sessions: self.sessions, after: &NOTHING, epoch: self.epoch }
    }

    #[inline(always)]
    fn connections(&self) -> service::Memory<'_> {
        static NOTHING: Planned = Planned::NOTHING;
        service::Memory { connections: self.connections, mappings: self.mappings, after: &NOTHING, epoch: self.epoch }
    }

    fn service(&mut self, _: PortId, _: Direction, step: &Step) -> Result<(), DropReason> {
        let before = self.connections.generation();
        let applied = step.apply(self.connections, self.mappings, self.epoch);
        if self.connections.generation() != before {
            self.sessions.outdate_notes();
        }
        applied
    }

    #[cold]
    fn supersede(&mut self, connection: u32) {
        self.connections.remove(connection);
        self.sessions.outdate_notes();
    }

    #[inline(always)]
    fn acl(&mut self, _: PortId, _: Direction, _: Option<(usize, bool)>) {}

    #[inline(always)]
    fn groups(&mut self, _: PortId, direction: Direction, judgement: Judgement) -> Result<(), DropReason> {
        judgement.apply(self.sessions, direction, self.epoch)
    }

    #[cold]
    fn log(&mut self, at: (PortId, Direction), frame: Frame<'_>, ruling: Ruling<'_>) {
        let log = self.ports.get_mut(at.0.place()).and_then(|state| state.rules.as_deref_mut());
        if let Some(log) = log {
            log.note(at, frame, ruling, self.now_ns);
        }
    }

    #[cold]
    fn later_fragment(&mut self, at: (PortId, Direction), piece: &Piece) -> Result<(), DropReason> {
        let now = self.moment();
        self.fragments.follow(at, piece, now)
    }

    #[cold]
    fn check_first_fragment(&mut self, at: (PortId, Direction), piece: &Piece) -> Result<(), DropReason> {
        self.fragments.check_first(at, piece, self.moment())
    }

    #[cold]
    fn first_fragment(&mut self, at: (PortId, Direction), piece: &Piece, first: First) {
        let now = self.moment();
        self.fragments.begin(at, piece, first, now);
    }

    #[cold]
    fn too_large(&mut self, port: PortId, frame: TooLarge<'_>, answer: &mut Vec<u8>) -> Remedy {
        let Some(state) = self.ports.get_mut(port.place()) else { return Remedy::None };
        let remedy = path_mtu::remedy(frame, &mut state.errors, self.now_ns, answer);
        state.counters.fragmented_packets += u64::from(remedy == Remedy::Fragment);
        state.counters.too_big_packets += u64::from(remedy == Remedy::Answer);
        remedy
    }
}
