//! The switch: its indexes, its counters, and how one configuration follows another.

use std::collections::BTreeMap;

use bifrost_nic::{Offload, Parsed};
use bifrost_tables::{ExactMap, TokenBucket, exact_map};
use bifrost_wire::{Mac, Vni};

use crate::counters::{PortCounters, UnderlayCounters};
use crate::description::{BuildError, GATEWAY_MAC, PeerId, Port, PortId, Tables};
use crate::drop_reason::DropReason;
use crate::from_guest::{self, FromGuest};
use crate::from_underlay::{self, FromUnderlay};
use crate::path_mtu::{self, Ends, Frame, Remedy};
use crate::policy::GroupPolicy;
use crate::session::{Direction, SessionCounters, Sessions};
use crate::vpc::{Place, VpcIndex};

/// Decides where frames go.
#[derive(Debug)]
pub struct Switch {
    index: Index,
    /// By port number; of ports that are gone, too, until another one takes the number.
    counters: Vec<Account>,
    underlay: UnderlayCounters,
    sessions: Sessions,
    /// Counts configurations: sessions of an earlier one are looked at again.
    epoch: u32,
    /// The last frame that the switch made itself.
    answer: Vec<u8>,
    /// As last told.
    now_ns: u64,
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
            epoch: 0,
            answer: Vec::new(),
            now_ns: 0,
        };
        switch.open_accounts();
        Ok(switch)
    }

    /// Swaps in another configuration. Counters and sessions stay, except of ports whose number now means another vNIC; a
    /// session that the rules allow no longer ends with its next packet.
    ///
    /// # Errors
    /// The first contradiction in `tables`; nothing has changed then.
    pub fn replace(&mut self, tables: &Tables) -> Result<(), BuildError> {
        self.index = Index::build(tables)?;
        self.epoch = self.epoch.wrapping_add(1);
        self.sessions.set_limits(tables.sessions);
        self.open_accounts();
        Ok(())
    }

    /// Time has come to `now_ns`, of any origin: call it before the packets of that time.
    pub fn advance(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
        self.sessions.advance(now_ns);
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
        let index = usize::from(port.0);
        let frame = Frame { head: frame_head, len, offload, parsed };
        let (Some(_), Some(account)) = (self.index.port(port), self.counters.get_mut(index)) else {
            self.underlay.dropped.count(DropReason::UnknownPort);
            return FromGuest::Drop(DropReason::UnknownPort);
        };
        let decision = from_guest::decide(&self.index, port, frame, &mut self.answer);
        let decision = decision.and_then(|decision| {
            let (to, cut) = match decision {
                FromGuest::Remote { cut, .. } => (None, cut),
                FromGuest::Local { port, cut, .. } => (Some(port), cut),
                FromGuest::Answer | FromGuest::Drop(_) => return Ok(decision),
            };
            pass(&self.index, &mut self.sessions, self.epoch, port, Direction::Egress, frame_head, parsed)?;
            if let Some(to) = to {
                pass(&self.index, &mut self.sessions, self.epoch, to, Direction::Ingress, frame_head, parsed)?;
            }
            let Some(mtu) = cut else { return Ok(decision) };
            let ends = told_by(&self.index, port, parsed);
            match account.too_large(frame, mtu, ends, self.now_ns, &mut self.answer) {
                Remedy::Cut => Ok(decision),
                Remedy::Told => Ok(FromGuest::Answer),
                Remedy::None => Err(DropReason::PathMtu),
            }
        });
        let decision = decision.unwrap_or_else(FromGuest::Drop);
        let counters = &mut account.counters;
        match decision {
            FromGuest::Remote { .. } => counters.to_remote_packets += 1,
            FromGuest::Local { .. } => counters.to_local_packets += 1,
            FromGuest::Answer => counters.answered_packets += 1,
            FromGuest::Drop(reason) => counters.dropped.count(reason),
        }
        decision
    }

    /// The frame to give to the guest that asked, after [`FromGuest::Answer`], or to send to the peer, after
    /// [`FromUnderlay::Answer`]; until the next frame.
    pub fn answer(&self) -> &[u8] {
        &self.answer
    }

    /// Which port a frame that `peer` sent in `vni` is for. `frame_head` as in [`Self::from_guest`].
    pub fn from_underlay(&mut self, vni: Vni, peer: PeerId, frame_head: &[u8], parsed: &Parsed) -> FromUnderlay {
        let port = match from_underlay::decide(&self.index, vni, peer, frame_head, parsed) {
            Ok(port) => port,
            Err(reason) => {
                self.underlay.dropped.count(reason);
                return FromUnderlay::Drop(reason);
            }
        };
        let (Some((PortIndex { port: to, .. }, vpc)), Some(account)) =
            (self.index.port(port), self.counters.get_mut(usize::from(port.0)))
        else {
            // Never so: it was found in the index.
            return FromUnderlay::Drop(DropReason::UnknownPort);
        };
        let passed = pass(&self.index, &mut self.sessions, self.epoch, port, Direction::Ingress, frame_head, parsed);
        let decision = match passed {
            Err(reason) => FromUnderlay::Drop(reason),
            Ok(()) if parsed.end - u32::from(parsed.l3) <= u32::from(to.mtu) => FromUnderlay::Port(port),
            Ok(()) => {
                let whole = parsed.end as usize;
                let frame = Frame { head: frame_head, len: whole, offload: Offload::default(), parsed };
                let ends = receiver_tells(vpc, to, parsed);
                match account.too_large(frame, to.mtu, ends, self.now_ns, &mut self.answer) {
                    Remedy::Cut => FromUnderlay::Cut { port, mtu: to.mtu },
                    Remedy::Told => FromUnderlay::Answer,
                    Remedy::None => FromUnderlay::Drop(DropReason::PathMtu),
                }
            }
        };
        match decision {
            FromUnderlay::Port(_) | FromUnderlay::Cut { .. } => {
                account.counters.from_underlay_packets += 1;
                self.underlay.accepted_packets += 1;
            }
            FromUnderlay::Drop(reason) => {
                account.counters.kept_out.count(reason);
                self.underlay.kept_out_packets += 1;
            }
            FromUnderlay::Answer => self.underlay.told_packets += 1,
        }
        decision
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
        }
    }

    /// Counters of frames from the underlay.
    pub fn underlay_counters(&self) -> &UnderlayCounters {
        &self.underlay
    }

    /// Counters of sessions.
    pub fn session_counters(&self) -> &SessionCounters {
        self.sessions.counters()
    }

    /// The description of a port.
    pub fn port(&self, port: PortId) -> Option<&Port> {
        self.index.port(port).map(|(p, _)| &p.port)
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
                *account = Account { vnic, ..Account::default() };
            }
        }
    }
}

/// Whether the ACL of its network and the groups of a port let a packet pass.
fn pass(
    index: &Index,
    sessions: &mut Sessions,
    epoch: u32,
    port: PortId,
    direction: Direction,
    head: &[u8],
    parsed: &Parsed,
) -> Result<(), DropReason> {
    let (port, vpc) = index.port(port).ok_or(DropReason::UnknownPort)?;
    if let Some(acl) = &vpc.acl {
        acl.pass(direction, head, parsed)?;
    }
    let Some(policy) = port.policy else { return Ok(()) };
    index.policies[policy].pass(sessions, epoch, port.port.id.0, direction, head, parsed)
}

/// Who tells the guest behind `port` that its packet is larger than its way allows: the gateway, or, where there is none, who it
/// was for.
#[cold]
fn told_by(index: &Index, port: PortId, parsed: &Parsed) -> Option<Ends> {
    let (_, vpc) = index.port(port)?;
    let (source, source_mac) = match vpc.gateway(parsed.src_ip.is_ipv6()) {
        Some(gateway) => (gateway, GATEWAY_MAC),
        None => (parsed.dst_ip, parsed.dst_mac),
    };
    Some(Ends { source, source_mac, destination_mac: parsed.src_mac })
}

/// Who tells a guest elsewhere that its packet is larger than what the one behind `to` is given: that one itself, for the sender's
/// host lets no other host speak as the gateway.
#[cold]
fn receiver_tells(vpc: &VpcIndex, to: &Port, parsed: &Parsed) -> Option<Ends> {
    let routed = parsed.src_mac == GATEWAY_MAC;
    let sender = if routed { vpc.station(parsed.src_ip)?.mac } else { parsed.src_mac };
    Some(Ends { source: parsed.dst_ip, source_mac: to.mac, destination_mac: sender })
}

/// Counters of a port, and of which vNIC.
#[derive(Clone, Debug)]
struct Account {
    vnic: Option<(Vni, Mac)>,
    counters: PortCounters,
    /// For ICMP errors about what it sends and gets.
    errors: TokenBucket,
}

impl Default for Account {
    fn default() -> Self {
        Account { vnic: None, counters: PortCounters::default(), errors: path_mtu::allowance() }
    }
}

impl Account {
    /// What is to be done about a frame that is larger than `mtu`, counted.
    #[cold]
    fn too_large(
        &mut self,
        frame: Frame<'_>,
        mtu: u16,
        ends: Option<Ends>,
        now_ns: u64,
        answer: &mut Vec<u8>,
    ) -> Remedy {
        let remedy = path_mtu::remedy(frame, mtu, ends, &mut self.errors, now_ns, answer);
        self.counters.cut_packets += u64::from(remedy == Remedy::Cut);
        self.counters.too_big_packets += u64::from(remedy == Remedy::Told);
        remedy
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
        let mut index = Self { ports: Vec::new(), vpcs: Vec::new(), by_vni: exact_map(0), policies: Vec::new() };
        let mut policies = BTreeMap::new();
        for vpc in &tables.vpcs {
            if index.by_vni.insert(vpc.vni, index.vpcs.len()).is_some() {
                return Err(BuildError::DuplicateVni(vpc.vni));
            }
            index.vpcs.push(VpcIndex::new(vpc)?);
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

    pub(crate) fn vpc(&self, vni: Vni) -> Option<&VpcIndex> {
        self.by_vni.get(&vni).map(|&i| &self.vpcs[i])
    }
}
