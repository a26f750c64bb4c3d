//! State while one packet is processed.

use std::net::IpAddr;

use bifrost_nic::Parsed;
use bifrost_tables::{ExactMap, Fields, Meter, Rate, TokenBucket};
use bifrost_wire::Mac;

use crate::fragments::Fragments;
use crate::nat::{Nat, Seen};
use crate::rewrite::End;
use crate::session::Flow;
use crate::tables::{Host, Metered, Tables, Vpc};
use crate::trace::Step;
use crate::{Counters, DropReason, Service};

/// Maximum length of a packet, bytes.
const LONGEST: u64 = 65_535;

/// Inputs of a decision besides tables.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// Time on any monotonic clock, ns.
    pub now: u64,
    /// Link-layer addresses of next hops.
    pub neighbours: &'a ExactMap<IpAddr, Mac>,
}

/// One packet in a core. All cores share `tables` and `nat`. They are borrowed, because reference counts would make
/// every core write the same word.
#[derive(Debug)]
pub(crate) struct Decision<'a> {
    pub(crate) tables: &'a Tables,
    pub(crate) nat: &'a Nat,
    pub(crate) state: &'a mut State,
    pub(crate) context: Context<'a>,
    /// For traces: each decision is recorded here, and no session is created or changed.
    pub(crate) steps: Option<&'a mut Vec<Step>>,
}

/// State that a core keeps between packets.
#[derive(Debug)]
pub(crate) struct State {
    /// This core's share of each VPC's rate, because packets are sprayed evenly. Each core has meters for all VPCs, so
    /// they are small.
    pub(crate) meters: Box<[Meter]>,
    /// Number of cores that share the rates.
    pub(crate) cores: u64,
    pub(crate) answers: TokenBucket,
    pub(crate) errors: TokenBucket,
    pub(crate) missing: Option<IpAddr>,
    pub(crate) fragments: Fragments,
    /// Frames that leave in addition to the packet: its other fragments.
    pub(crate) more: Vec<Vec<u8>>,
    pub(crate) counters: Counters,
}

/// Origin of a packet.
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

/// Where a packet leaves.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Egress {
    Host { vni: u32, host: Host },
    Tunnel(u32),
    Internet { next_hop: IpAddr },
}

/// The new address and port of one side.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Change {
    Address(IpAddr),
    End(End),
}

/// Action for a packet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) service: Service,
    pub(crate) egress: Egress,
    pub(crate) source: Option<Change>,
    pub(crate) destination: Option<Change>,
}

impl Decision<'_> {
    /// Records the decision of a stage, if a trace is requested.
    #[inline]
    pub(crate) fn note(&mut self, stage: &'static str, what: impl FnOnce() -> String) {
        if let Some(steps) = &mut self.steps {
            steps.push(Step { stage, passes: true, what: what() });
        }
    }

    /// Whether the VPC's ACL lets a packet pass.
    pub(crate) fn admit(&mut self, vpc: &Vpc, fields: &Fields) -> Result<(), DropReason> {
        let Some(acl) = &vpc.acl else { return Ok(()) };
        if !acl.lookup(fields).copied().unwrap_or(false) {
            return Err(DropReason::Acl);
        }
        self.note("acl", || format!("a rule lets {} to {} pass", fields.src, fields.dst));
        Ok(())
    }

    /// The packet from the inside after translation.
    pub(crate) fn outward(&mut self, seen: Seen, pool: u32, target: Option<End>) -> Result<Flow, DropReason> {
        if self.steps.is_none() {
            return self.nat.outward(seen, pool, target);
        }
        let (outside, exists) = self.nat.foresee_outward(seen, pool, target)?;
        let session = if exists { "its session" } else { "a session would begin" };
        self.note("translation", || format!("{session}: it leaves as {} to {}", outside.source, outside.destination));
        Ok(outside)
    }

    /// The packet from the outside after translation.
    pub(crate) fn inward(&mut self, seen: Seen) -> Result<Flow, DropReason> {
        if self.steps.is_none() {
            return self.nat.inward(seen);
        }
        let inside = self.nat.known_inward(&seen.flow).ok_or(DropReason::NatNoSession)?;
        let Flow { network, source, destination, .. } = inside;
        self.note("translation", || format!("its session: in VNI {network}, from {source} to {destination}"));
        Ok(inside)
    }

    pub(crate) fn meter(&mut self, vpc: &Vpc, parsed: &Parsed) -> Result<(), DropReason> {
        self.note("meter", || match vpc.meter {
            Some(Metered { rate, .. }) => format!("the VPC may send and receive {} bytes per second", rate.per_second),
            None => "the VPC has no rate".to_owned(),
        });
        let Some(Metered { rate, index }) = vpc.meter else { return Ok(()) };
        let State { meters, cores, .. } = &mut *self.state;
        let Some(meter) = meters.get_mut(index as usize) else { return Ok(()) };
        // A core gets only its share of the packets, so each one counts once per core against the whole rate. The
        // longest packet always fits.
        let rate = Rate { burst: rate.burst.max(LONGEST * *cores), ..rate };
        let passes = meter.take(rate, self.context.now, parsed.packet_len() as u64 * *cores);
        if passes { Ok(()) } else { Err(DropReason::Meter) }
    }
}

pub(crate) fn fields(parsed: &Parsed) -> Fields {
    let has_ports = !parsed.is_fragment() && usize::from(parsed.payload) > usize::from(parsed.l4);
    let ports = has_ports.then_some((parsed.src_port, parsed.dst_port));
    Fields { src: parsed.src_ip, dst: parsed.dst_ip, protocol: parsed.protocol, ports }
}
