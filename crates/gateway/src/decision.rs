//! What is known while one packet is decided about.

use std::net::IpAddr;

use bifrost_nic::Parsed;
use bifrost_tables::{ExactMap, Fields, TokenBucket};
use bifrost_wire::Mac;

use crate::cache::Cache;
use crate::nat::Nat;
use crate::rewrite::End;
use crate::tables::{Host, Tables, Vpc};
use crate::{Counters, DropReason, Service};

/// What a decision needs besides tables.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// On any monotonic clock, ns.
    pub now: u64,
    /// Link-layer addresses of next hops.
    pub neighbours: &'a ExactMap<IpAddr, Mac>,
}

/// One packet on its way through a core. All cores share `tables` and `nat`; borrowing them costs nothing, where counting references would have
/// every core write the same word.
#[derive(Debug)]
pub(crate) struct Decision<'a> {
    pub(crate) tables: &'a Tables,
    pub(crate) nat: &'a Nat,
    pub(crate) state: &'a mut State,
    pub(crate) context: Context<'a>,
}

/// What a core keeps from packet to packet.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) sessions: Cache,
    /// This core's share of each VPC's rate: packets are sprayed evenly.
    pub(crate) meters: ExactMap<u32, TokenBucket>,
    pub(crate) answers: TokenBucket,
    pub(crate) errors: TokenBucket,
    pub(crate) missing: Option<IpAddr>,
    pub(crate) counters: Counters,
}

/// Where a packet came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// A host of a VPC, through VXLAN.
    Host {
        vni: u32,
        vtep: IpAddr,
    },
    /// A customer's network, through this tunnel.
    Idc(u32),
    Internet,
}

/// Where a packet leaves to.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Egress {
    Host { vni: u32, host: Host },
    Tunnel(u32),
    Internet { next_hop: IpAddr },
}

/// What an end is replaced by.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Change {
    Address(IpAddr),
    End(End),
}

/// What is to be done with a packet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) service: Service,
    pub(crate) egress: Egress,
    pub(crate) source: Option<Change>,
    pub(crate) destination: Option<Change>,
}

impl Decision<'_> {
    pub(crate) fn meter(&mut self, vni: u32, parsed: &Parsed) -> Result<(), DropReason> {
        let Some(meter) = self.state.meters.get_mut(&vni) else { return Ok(()) };
        if meter.take(self.context.now, parsed.packet_len() as u64) { Ok(()) } else { Err(DropReason::Meter) }
    }
}

pub(crate) fn fields(parsed: &Parsed) -> Fields {
    let has_ports = !parsed.is_fragment() && usize::from(parsed.payload) > usize::from(parsed.l4);
    let ports = has_ports.then_some((parsed.src_port, parsed.dst_port));
    Fields { src: parsed.src_ip, dst: parsed.dst_ip, protocol: parsed.protocol, ports }
}

/// Whether the VPC's ACL lets a packet pass.
pub(crate) fn admit(vpc: &Vpc, fields: &Fields) -> Result<(), DropReason> {
    match &vpc.acl {
        Some(acl) if !acl.lookup(fields).copied().unwrap_or(false) => Err(DropReason::Acl),
        _ => Ok(()),
    }
}
