//! The switch: its indexes, its counters, and how one configuration follows another.

use std::collections::BTreeMap;
use std::net::IpAddr;

use bifrost_nic::{Offload, Parsed, steer};
use bifrost_tables::{ExactMap, TokenBucket, exact_map};
use bifrost_wire::{Mac, Vni};

use crate::counters::{PortCounters, UnderlayCounters};
use crate::description::{BuildError, PeerId, Port, PortId, Tables, Workers};
use crate::drop_reason::DropReason;
use crate::flow::{FlowCounters, FlowLimits, Key, Source};
use crate::fragments::{First, FragmentCounters, Fragments, Moment, Piece};
use crate::from_guest::FromGuest;
use crate::from_underlay::FromUnderlay;
use crate::path_mtu::{self, Ends, Frame, Remedy};
use crate::policy::{GroupPolicy, Judgement, Memory};
use crate::recall::{Remembered, VECTOR, lives_on};
use crate::session::{Direction, Planned, PortSessions, SessionCounters, SessionLimits, Sessions};
use crate::vector::Vectors;
use crate::vpc::{Next, Place, Station, VpcIndex};
use crate::way::{self, Effects};

/// Decides where frames go.
#[derive(Debug)]
pub struct Switch {
    pub(crate) index: Index,
    /// By port number; of ports that are gone, too, until another one takes the number.
    pub(crate) counters: Vec<Account>,
    underlay: UnderlayCounters,
    pub(crate) sessions: Sessions,
    /// Packets in pieces, whose first one has passed.
    pub(crate) fragments: Fragments,
    /// What became of packets before, in networks with rules.
    pub(crate) remembered: Remembered,
    /// What became of the packets that came together with the next ones.
    pub(crate) vectors: Vectors,
    secret: u64,
    /// Counts configurations: sessions of an earlier one are looked at again.
    pub(crate) epoch: u32,
    /// The last frame that the switch made itself.
    pub(crate) answer: Vec<u8>,
    /// As last told.
    pub(crate) now_ns: u64,
}

impl Switch {
    /// Builds a switch. `secret`: any random number, for hashes of what tenants choose.
    ///
    /// # Errors
    /// The first contradiction in `tables`.
    pub fn build(tables: &Tables, secret: u64) -> Result<Self, BuildError> {
        let index = Index::build(tables)?;
        let mut switch = Self {
            index,
            counters: Vec::new(),
            underlay: UnderlayCounters::default(),
            sessions: Sessions::new(tables.sessions, secret),
            fragments: Fragments::default(),
            remembered: Remembered::nothing(),
            vectors: Vectors::new(tables.flows.vectors),
            secret,
            epoch: 0,
            answer: Vec::new(),
            now_ns: 0,
        };
        #[cfg(feature = "mutations")]
        {
            switch.fragments.mutation = tables.mutation;
        }
        switch.open_accounts();
        switch.make_room(tables.flows);
        Ok(switch)
    }

    /// Swaps in another configuration. Counters and sessions stay, except of ports whose number now means another vNIC; a
    /// session that the rules allow no longer ends with its next packet.
    ///
    /// # Errors
    /// The first contradiction in `tables`; nothing has changed then.
    pub fn replace(&mut self, tables: &Tables) -> Result<(), BuildError> {
        drop(self.take_over(Prepared::build(tables)?));
        Ok(())
    }

    /// [`replace`](Self::replace), with what has been built elsewhere: takes no time that depends on its size, as long as no port's number
    /// comes to mean another vNIC, and room for flow records stays as it is. What was in force is returned, for to drop it takes time, too.
    pub fn take_over(&mut self, prepared: Prepared) -> Former {
        let Prepared { index, sessions, flows } = prepared;
        let former = std::mem::replace(&mut self.index, index);
        self.epoch = self.epoch.wrapping_add(1);
        self.sessions.set_limits(sessions);
        self.open_accounts();
        self.make_room(flows);
        if self.vectors.is_on() != flows.vectors {
            self.vectors = Vectors::new(flows.vectors);
        }
        Former { _index: former }
    }

    /// Time has come to `now_ns`, of any origin: call it before the packets of that time.
    pub fn advance(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
        self.sessions.advance(now_ns);
    }

    /// Forgets what became of packets before, and looks at each session again with its next packet: after a panic in a call of this switch,
    /// none of it may be relied on. Tables and counters stay.
    pub fn distrust_notes(&mut self) {
        self.epoch = self.epoch.wrapping_add(1);
        self.vectors = Vectors::new(self.vectors.is_on());
    }

    /// Packets of a guest that are best parsed before the first of them is judged: see [`fetch_ahead`](Self::fetch_ahead).
    pub fn vector(&self) -> usize {
        if self.vectors.is_on() { VECTOR } else { 1 }
    }

    /// What is to happen with a frame of `len` bytes that the guest behind `port` sent. `frame_head` holds the first bytes of
    /// the frame, at least as many as [`bifrost_nic::parse`] was given for `parsed`; to have a ping of the gateway answered
    /// it must hold the whole frame.
    pub fn from_guest(
        &mut self,
        port: PortId,
        frame_head: &[u8],
        len: usize,
        offload: Offload,
        parsed: &Parsed,
    ) -> FromGuest {
        let frame = Frame { head: frame_head, len, offload, parsed };
        let at = usize::from(port.0);
        let Some((_, vpc)) = self.index.port(port).filter(|_| at < self.counters.len()) else {
            self.underlay.dropped.count(DropReason::UnknownPort);
            return FromGuest::Drop(DropReason::UnknownPort);
        };
        let has_rules = vpc.has_rules;
        if self.vectors.from_guests.may_know(self.sessions.generation(), parsed) {
            self.follow_from_guest(port, frame)
        } else if has_rules {
            self.by_flow_from_guest(port, frame)
        } else if self.vectors.from_guests.is_wanted() {
            self.first_from_guest(port, frame)
        } else {
            self.by_tables_from_guest(port, frame)
        }
    }

    /// [`from_guest`](Self::from_guest) of what is probably not the first packet of its flow in this turn; `port` is there.
    #[inline(never)]
    fn follow_from_guest(&mut self, port: PortId, frame: Frame<'_>) -> FromGuest {
        let key = Key::of(Source::Guest(port), frame.parsed);
        if let Some(decision) = self.vectors.from_guests.find(frame.parsed, frame.largest_packet(), key)
            && lives_on(decision, frame)
        {
            self.remembered.counters.followed_packets += 1;
            self.counters[usize::from(port.0)].counters.count_from_guest(decision);
            return *decision;
        }
        let has_rules = self.index.port(port).is_some_and(|(_, vpc)| vpc.has_rules);
        if has_rules { self.by_flow_from_guest(port, frame) } else { self.first_from_guest(port, frame) }
    }

    /// The same of what others may follow, in a network without rules.
    #[cold]
    #[inline(never)]
    fn first_from_guest(&mut self, port: PortId, frame: Frame<'_>) -> FromGuest {
        let decision = self.by_tables_from_guest(port, frame);
        let key = Key::of(Source::Guest(port), frame.parsed);
        self.vectors.note_from_guest(self.sessions.generation(), frame, key, &decision);
        decision
    }

    /// The same without rules, whether others follow or not.
    #[inline(always)]
    fn by_tables_from_guest(&mut self, port: PortId, frame: Frame<'_>) -> FromGuest {
        let Switch { index, counters, sessions, fragments, answer, .. } = self;
        let mut doing = Doing { sessions, fragments, accounts: counters, epoch: self.epoch, now_ns: self.now_ns };
        let decision = way::from_guest(index, port, frame, answer, &mut doing).unwrap_or_else(FromGuest::Drop);
        self.counters[usize::from(port.0)].counters.count_from_guest(&decision);
        decision
    }

    /// The frame to give to the guest that asked, after [`FromGuest::Answer`], or to send to the peer, after
    /// [`FromUnderlay::Answer`]; until the next frame.
    pub fn answer(&self) -> &[u8] {
        &self.answer
    }

    /// Which port a frame that `peer` sent in `vni` is for. `frame_head` as in [`Self::from_guest`].
    pub fn from_underlay(&mut self, vni: Vni, peer: PeerId, frame_head: &[u8], parsed: &Parsed) -> FromUnderlay {
        let frame = Frame { head: frame_head, len: frame_head.len(), offload: Offload::default(), parsed };
        if self.vectors.from_peers.may_know(self.sessions.generation(), parsed) {
            let key = Key::of(Source::Peer(vni, peer), parsed);
            if let Some(&port) = self.vectors.from_peers.find(parsed, parsed.packet_len(), key) {
                self.remembered.counters.followed_packets += 1;
                self.count_from_underlay(Some(port), &FromUnderlay::Port(port));
                return FromUnderlay::Port(port);
            }
        }
        let Switch { index, counters, sessions, fragments, answer, .. } = self;
        let vpc = index.vpc(vni);
        if let Some(vpc) = vpc.filter(|vpc| vpc.has_rules) {
            let vpc = vpc.number;
            return self.by_flow_from_underlay(vpc, peer, frame);
        }
        let mut doing = Doing { sessions, fragments, accounts: counters, epoch: self.epoch, now_ns: self.now_ns };
        let (port, decision) = way::from_underlay(index, vpc, peer, frame, answer, &mut doing);
        self.count_from_underlay(port, &decision);
        if self.vectors.from_peers.is_wanted()
            && let FromUnderlay::Port(port) = decision
        {
            let key = Key::of(Source::Peer(vni, peer), parsed);
            self.vectors.note_from_peer(self.sessions.generation(), parsed, key, port);
        }
        decision
    }

    /// Whether a frame may come in that a guest of this host has sent to the one behind `port`, and whose worker is another one: the rest of
    /// what that one's [`from_guest`](Self::from_guest) has begun ([`FromGuest::Local`]). `frame_head` as there, after its rewrite.
    ///
    /// # Errors
    /// Why it may not.
    pub fn from_neighbour(&mut self, port: PortId, frame_head: &[u8], parsed: &Parsed) -> Result<(), DropReason> {
        let frame = Frame { head: frame_head, len: frame_head.len(), offload: Offload::default(), parsed };
        let Switch { index, counters, sessions, fragments, .. } = self;
        let mut doing = Doing { sessions, fragments, accounts: counters, epoch: self.epoch, now_ns: self.now_ns };
        let passed = way::pass(index, port, Direction::Ingress, frame, &mut doing);
        if let Err(reason) = passed {
            match self.counters.get_mut(usize::from(port.0)) {
                Some(account) => {
                    account.counters.kept_out.count(reason);
                    self.underlay.kept_out_packets += 1;
                }
                None => self.underlay.dropped.count(reason),
            }
        }
        passed
    }

    /// The other worker of this host that serves what one vNIC sends to another, which is here; `None`: this one does, or the vNIC is
    /// not here.
    pub fn other_worker(&self, vni: Vni, from: Mac, to: Mac) -> Option<u16> {
        if !self.index.has_affinity {
            return None;
        }
        match self.index.vpc(vni)?.place(to)? {
            Place::Local(port) => self.index.other_worker(port, from),
            Place::Remote(_) => None,
        }
    }

    /// The worker that alone serves a vNIC, if there is one.
    pub fn home(&self, vni: Vni, mac: Mac) -> Option<u16> {
        match self.index.vpc(vni)?.place(mac)? {
            Place::Local(port) => self.index.port(port)?.0.port.home,
            Place::Remote(_) => None,
        }
    }

    #[inline(always)]
    pub(crate) fn count_from_underlay(&mut self, port: Option<PortId>, decision: &FromUnderlay) {
        let Some(account) = port.and_then(|port| self.counters.get_mut(usize::from(port.0))) else {
            if let FromUnderlay::Drop(reason) = *decision {
                self.underlay.dropped.count(reason);
            }
            return;
        };
        match *decision {
            FromUnderlay::Port(_) | FromUnderlay::Cut { .. } => {
                account.counters.from_underlay_packets += 1;
                self.underlay.accepted_packets += 1;
            }
            FromUnderlay::Drop(reason) => {
                account.counters.kept_out.count(reason);
                self.underlay.kept_out_packets += 1;
            }
            FromUnderlay::Answer { .. } => self.underlay.told_packets += 1,
        }
    }

    /// Whether the vNIC of that MAC address lives on that host, as the routes have it.
    pub fn is_at_peer(&self, vni: Vni, mac: Mac, peer: PeerId) -> bool {
        self.index.vpc(vni).is_some_and(|vpc| vpc.place(mac) == Some(Place::Remote(peer)))
    }

    /// Counters of every port there is, by number.
    pub fn counters(&self) -> impl Iterator<Item = (PortId, &PortCounters)> {
        let ports = self.index.ports.iter().flatten().map(|p| p.port.id);
        ports.filter_map(|id| Some((id, self.port_counters(id)?)))
    }

    /// Counters of one port.
    pub fn port_counters(&self, port: PortId) -> Option<&PortCounters> {
        self.index.port(port)?;
        self.counters.get(usize::from(port.0)).map(|account| &account.counters)
    }

    /// Counters of a port begin anew, as those of its device do when that is made anew.
    pub fn forget_counters(&mut self, port: PortId) {
        if let Some(account) = self.counters.get_mut(usize::from(port.0)) {
            account.counters = PortCounters::default();
            self.sessions.forget_counters(port.0);
        }
    }

    /// Counters of the sessions of one port.
    pub fn port_sessions(&self, port: PortId) -> Option<PortSessions> {
        self.index.port(port)?;
        Some(self.sessions.of_port(port.0))
    }

    /// Counters of frames from the underlay.
    pub fn underlay_counters(&self) -> &UnderlayCounters {
        &self.underlay
    }

    /// Counters of sessions.
    pub fn session_counters(&self) -> &SessionCounters {
        self.sessions.counters()
    }

    /// Counters of packets in pieces.
    pub fn fragment_counters(&self) -> &FragmentCounters {
        self.fragments.counters()
    }

    /// Counters of flow records.
    pub fn flow_counters(&self) -> &FlowCounters {
        self.remembered.counters()
    }

    /// The description of a port.
    pub fn port(&self, port: PortId) -> Option<&Port> {
        self.index.port(port).map(|(p, _)| &p.port)
    }

    /// For ICMP errors about what a port sends and gets.
    pub(crate) fn allowance(&self, port: PortId) -> Option<&TokenBucket> {
        self.counters.get(usize::from(port.0)).map(|account| &account.errors)
    }

    /// Room for flow records, if there are networks that need them. Those that there are stay if nothing has changed about that;
    /// they are of an earlier configuration and go by and by.
    fn make_room(&mut self, limits: FlowLimits) {
        let needed = self.index.vpcs.iter().any(|vpc| vpc.has_rules);
        self.remembered.make_room(if needed { limits.rounded() } else { 0 }, self.secret);
    }

    /// Gives every port counters: its own again, or new ones.
    fn open_accounts(&mut self) {
        let ports = self.index.ports.len();
        self.counters.resize_with(self.counters.len().max(ports), Account::default);
        for (port, account) in self.index.ports.iter().zip(&mut self.counters) {
            let Some(PortIndex { port, .. }) = port else { continue };
            let vnic = Some((port.vni, port.mac));
            if account.vnic != vnic {
                self.sessions.forget_port(port.id.0);
                self.fragments.forget_port(port.id);
                *account = Account { vnic, ..Account::default() };
            }
        }
    }
}

/// A configuration with its indexes, ready for [`Switch::take_over`].
#[derive(Debug)]
pub struct Prepared {
    index: Index,
    sessions: SessionLimits,
    flows: FlowLimits,
}

/// What was in force before [`Switch::take_over`], to be dropped where there is time.
#[derive(Debug)]
pub struct Former {
    _index: Index,
}

impl Prepared {
    /// Builds the indexes of one switch.
    ///
    /// # Errors
    /// The first contradiction in `tables`.
    pub fn build(tables: &Tables) -> Result<Self, BuildError> {
        Ok(Prepared { index: Index::build(tables)?, sessions: tables.sessions, flows: tables.flows })
    }
}

/// Does what follows from judgements.
pub(crate) struct Doing<'a> {
    pub(crate) sessions: &'a mut Sessions,
    pub(crate) fragments: &'a mut Fragments,
    pub(crate) accounts: &'a mut [Account],
    pub(crate) epoch: u32,
    pub(crate) now_ns: u64,
}

impl Doing<'_> {
    fn moment(&self) -> Moment {
        Moment { now_ns: self.now_ns, epoch: self.epoch }
    }
}

impl Effects for Doing<'_> {
    #[inline(always)]
    fn memory(&self) -> Memory<'_> {
        static NOTHING: Planned = Planned::NOTHING;
        Memory { sessions: self.sessions, after: &NOTHING, epoch: self.epoch }
    }

    #[inline(always)]
    fn acl(&mut self, _: PortId, _: Direction, _: Option<(usize, bool)>) {}

    #[inline(always)]
    fn groups(&mut self, _: PortId, direction: Direction, judgement: Judgement) -> Result<(), DropReason> {
        judgement.apply(self.sessions, direction, self.epoch)
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
    fn too_large(
        &mut self,
        port: PortId,
        frame: Frame<'_>,
        mtu: u16,
        ends: Option<Ends>,
        answer: &mut Vec<u8>,
    ) -> Remedy {
        let Some(account) = self.accounts.get_mut(usize::from(port.0)) else { return Remedy::None };
        let remedy = path_mtu::remedy(frame, mtu, ends, &mut account.errors, self.now_ns, answer);
        account.counters.cut_packets += u64::from(remedy == Remedy::Cut);
        account.counters.too_big_packets += u64::from(remedy == Remedy::Told);
        remedy
    }
}

/// Counters of a port, and of which vNIC.
#[derive(Clone, Debug)]
pub(crate) struct Account {
    vnic: Option<(Vni, Mac)>,
    pub(crate) counters: PortCounters,
    /// For ICMP errors about what it sends and gets.
    errors: TokenBucket,
}

impl Default for Account {
    fn default() -> Self {
        Account { vnic: None, counters: PortCounters::default(), errors: path_mtu::allowance() }
    }
}

/// Everything derived from one configuration.
#[derive(Debug)]
pub(crate) struct Index {
    ports: Vec<Option<PortIndex>>,
    vpcs: Vec<VpcIndex>,
    by_vni: ExactMap<Vni, usize>,
    /// What ports with the same groups have in common.
    policies: Vec<GroupPolicy>,
    workers: Workers,
    /// Not every worker of the host may show its guests all that is for them.
    has_affinity: bool,
    #[cfg(feature = "mutations")]
    pub(crate) mutation: Option<crate::Mutation>,
}

/// A port and where its network is.
#[derive(Debug)]
pub(crate) struct PortIndex {
    pub(crate) port: Port,
    vpc: usize,
    policy: Option<usize>,
}

impl Index {
    fn build(tables: &Tables) -> Result<Self, BuildError> {
        let (ports, vpcs, by_vni, workers) = (Vec::new(), Vec::new(), exact_map(0), tables.workers);
        let several = workers.count > 1;
        let has_affinity = several && tables.ports.iter().any(|port| port.home.is_some() || !port.groups.is_empty());
        let mut index = Self {
            ports,
            vpcs,
            by_vni,
            policies: Vec::new(),
            workers,
            has_affinity,
            #[cfg(feature = "mutations")]
            mutation: tables.mutation,
        };
        let mut policies = BTreeMap::new();
        for vpc in &tables.vpcs {
            if index.by_vni.insert(vpc.vni, index.vpcs.len()).is_some() {
                return Err(BuildError::DuplicateVni(vpc.vni));
            }
            index.vpcs.push(VpcIndex::new(vpc, index.vpcs.len())?);
        }
        for port in &tables.ports {
            let vpc = index.vpc_number(port.vni)?;
            let slot = usize::from(port.id.0);
            if index.ports.len() <= slot {
                index.ports.resize_with(slot + 1, || None);
            }
            if index.ports[slot].is_some() {
                return Err(BuildError::DuplicatePort(port.id));
            }
            index.vpcs[vpc].add_port(port)?;
            let policy = match (port.groups.is_empty(), policies.get(&port.groups)) {
                (true, _) => None,
                (false, Some(&known)) => Some(known),
                (false, None) => {
                    index.policies.push(GroupPolicy::new(&port.groups, &tables.groups)?);
                    policies.insert(port.groups.clone(), index.policies.len() - 1);
                    Some(index.policies.len() - 1)
                }
            };
            index.ports[slot] = Some(PortIndex { port: port.clone(), vpc, policy });
        }
        for route in &tables.routes {
            let vpc = index.vpc_number(route.vni)?;
            index.vpcs[vpc].add_route(route)?;
        }
        for peering in &tables.peerings {
            let (vpc, to) = (index.vpc_number(peering.vni)?, index.vpc_number(peering.to)?);
            if vpc == to {
                return Err(BuildError::PeeringWithItself(peering.vni));
            }
            index.vpcs[vpc].add_peering(peering.prefix, to)?;
        }
        index.vpcs.iter_mut().try_for_each(VpcIndex::finish)?;
        Ok(index)
    }

    fn vpc_number(&self, vni: Vni) -> Result<usize, BuildError> {
        self.by_vni.get(&vni).copied().ok_or(BuildError::UnknownVni(vni))
    }

    pub(crate) fn port(&self, id: PortId) -> Option<(&PortIndex, &VpcIndex)> {
        let port = self.ports.get(usize::from(id.0))?.as_ref()?;
        Some((port, &self.vpcs[port.vpc]))
    }

    /// The other worker that serves what `sender` sends to a port of this host; `None`: this one does.
    #[inline]
    pub(crate) fn other_worker(&self, id: PortId, sender: Mac) -> Option<u16> {
        if !self.has_affinity {
            return None;
        }
        let Workers { own, count } = self.workers;
        let (to, _) = self.port(id)?;
        let worker = match to.port.home {
            Some(home) => home,
            // Nothing is remembered: whoever has the packet shows it.
            None if to.policy.is_none() => return None,
            None => steer::worker_of_pair(sender.octets(), to.port.mac.octets(), count),
        };
        (worker != own).then_some(worker)
    }

    /// What the groups of a port say, if it has any.
    pub(crate) fn policy(&self, port: &PortIndex) -> Option<&GroupPolicy> {
        port.policy.map(|policy| &self.policies[policy])
    }

    /// Which vNIC a packet is for that goes through the gateway of `vpc`, and its network.
    #[inline(always)]
    pub(crate) fn next_hop<'a>(
        &'a self,
        vpc: &'a VpcIndex,
        from: IpAddr,
        to: IpAddr,
    ) -> Option<(Station, &'a VpcIndex)> {
        match vpc.next(to)? {
            Next::Station(station) => Some((station, vpc)),
            Next::Network(other) => self.across(vpc, other, from, to),
        }
    }

    /// Which vNIC of another network a packet is for, if both networks say that they can reach each other so: `to` from `vpc`, and
    /// `from` from that other one.
    #[cold]
    pub(crate) fn across(&self, vpc: &VpcIndex, other: u32, from: IpAddr, to: IpAddr) -> Option<(Station, &VpcIndex)> {
        let other = self.vpcs.get(other as usize)?;
        let back = other.next(from) == Some(Next::Network(vpc.number as u32));
        let station = other.route(to).filter(|_| back && other.has_gateway())?;
        Some((station, other))
    }

    /// The vNIC that has an address, as seen from a network: that of its network, and its MAC address.
    pub(crate) fn vnic_of(&self, vpc: &VpcIndex, addr: IpAddr) -> Option<(usize, Mac)> {
        match vpc.owner(addr)? {
            Next::Station(station) => Some((vpc.number, station.mac)),
            Next::Network(other) => {
                let other = self.vpcs.get(other as usize)?;
                other.route(addr).map(|station| (other.number, station.mac))
            }
        }
    }

    /// A network by its [`number`](VpcIndex::number).
    pub(crate) fn vpc_of(&self, number: usize) -> Option<&VpcIndex> {
        self.vpcs.get(number)
    }

    pub(crate) fn vpc(&self, vni: Vni) -> Option<&VpcIndex> {
        self.by_vni.get(&vni).map(|&i| &self.vpcs[i])
    }
}
