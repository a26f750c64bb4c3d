//! Prefetches the table entries of several packets, after a first look at their headers.
//!
//! With very many tenants, each packet waits for memory several times: for its VPC, the levels of its routes, its host
//! and its session. Here each step requests what the next step reads, for all packets, before it is read for the first
//! one, so that these waits overlap. This is only a hint: the entries are looked up again later, from the caches.

use std::net::IpAddr;

use bifrost_tables::{BATCH, Lpm, prefetch, prefetch_whole};
use bifrost_wire::protocol::{TCP, UDP};
use bifrost_wire::{udp, vxlan};

use crate::decision::State;
use crate::nat::{INTERNET, Nat};
use crate::rewrite::End;
use crate::session::Flow;
use crate::tables::{Route, Tables, Vpc};

/// Packets whose entries are fetched together. Fewer leave the memory idle, and more exceed its queue.
pub const VECTOR: usize = BATCH;

/// With fewer entries, prefetching costs more than it saves: they take less than 1 MB.
const MANY: usize = 1 << 14;

/// The packets of a vector: what a first look at their headers found.
#[derive(Debug, Default)]
pub struct Ahead {
    seen: [Option<Seen>; VECTOR],
    count: usize,
}

/// The fields of a packet that say where its entries are.
#[derive(Clone, Copy, Debug)]
struct Seen {
    /// The host's address; `None` on the Internet's side.
    vtep: Option<IpAddr>,
    flow: Flow,
}

impl Ahead {
    /// Adds a packet. Fetches its session already, because only its headers say where that is. Does nothing if the
    /// vector is full.
    #[inline]
    pub(crate) fn add(&mut self, nat: &Nat, frame: &[u8]) {
        let Some(place) = self.seen.get_mut(self.count) else { return };
        if let Some(seen) = look(frame) {
            nat.fetch_ahead(&seen.flow);
            *place = Some(seen);
            self.count += 1;
        }
    }

    /// Removes all packets.
    #[inline]
    pub(crate) fn clear(&mut self) {
        self.seen[..self.count].fill(None);
        self.count = 0;
    }

    /// Prefetches the packets' entries of all tables. Returns the number of packets whose destination it found.
    pub(crate) fn fetch(&self, tables: &Tables, nat: &Nat, state: &State) -> usize {
        let seen = &self.seen[..self.count];
        let mut asked = [None; VECTOR];
        let mut vpcs = [None; VECTOR];
        for ((Seen { vtep, flow }, asked), vpc) in seen.iter().flatten().zip(&mut asked).zip(&mut vpcs) {
            let Some(vtep) = vtep else { continue };
            tables.senders.get_key_value(vtep).into_iter().for_each(|(address, ())| prefetch(address));
            let found = tables.vpcs.get(&flow.network);
            found.into_iter().for_each(prefetch_whole);
            *vpc = found;
            *asked = found.map(|vpc| (&vpc.routes, flow.destination.address));
        }
        let routes = Lpm::lookup_several(&asked);
        let mut found = 0;
        for ((Seen { vtep, flow }, route), vpc) in seen.iter().flatten().zip(routes).zip(vpcs) {
            found += usize::from(match (vtep, route) {
                (None, _) => from_internet(tables, nat, state, flow),
                (_, Some(Route::Local)) => fetch_host(tables, flow.network, flow.destination.address),
                (_, Some(Route::Peer(peer))) => fetch_host(tables, *peer, flow.destination.address),
                (_, Some(Route::Internet)) => {
                    tables.eips.get(&(flow.network, flow.source.address)).into_iter().for_each(prefetch);
                    vpc.into_iter().for_each(|vpc| fetch_policy(vpc, state, flow.destination.address.is_ipv6()));
                    tables.fetch_internet(flow.destination.address)
                }
                (_, Some(Route::Idc(place))) => fetch(tables.tunnels.get(*place as usize)),
                (_, Some(Route::Blackhole) | None) => false,
            });
        }
        found
    }
}

/// A packet from the Internet is for a public address, or belongs to a session, which has been fetched.
fn from_internet(tables: &Tables, nat: &Nat, state: &State, flow: &Flow) -> bool {
    let owner = tables.eip_owners.get(&flow.destination.address).copied();
    let inside = || nat.glance(flow).map(|inside| (inside.network, inside.destination.address));
    let Some((vni, address)) = owner.or_else(inside) else { return false };
    tables.vpcs.get(&vni).into_iter().for_each(|vpc| fetch_policy(vpc, state, address.is_ipv6()));
    fetch_host(tables, vni, address)
}

fn fetch_host(tables: &Tables, vni: u32, address: IpAddr) -> bool {
    fetch(tables.hosts.get(&(vni, address)))
}

fn fetch<T>(entry: Option<&T>) -> bool {
    entry.into_iter().for_each(prefetch);
    entry.is_some()
}

/// What a VPC has for its Internet traffic.
fn fetch_policy(vpc: &Vpc, state: &State, is_v6: bool) {
    vpc.acl.iter().for_each(|acl| acl.fetch_ahead(is_v6));
    fetch(vpc.meter.and_then(|metered| state.meters.get(metered.index as usize)));
}

/// Whether prefetching entries saves time: small tables stay in the caches anyway.
pub(crate) fn are_many(tables: &Tables) -> bool {
    let routes: usize = tables.vpcs.values().map(|vpc| vpc.routes.len()).sum();
    tables.hosts.len() + tables.eips.len() + routes >= MANY
}

// Offsets in a frame without tags, IPv4 options and IPv6 extension headers.
const ETHERTYPE: usize = 12;
const IP: usize = 14;
const V4_LEN: usize = 20;
const V6_LEN: usize = 40;

/// TCP or UDP, inside VXLAN or on the Internet's side; `None` for other packets. Validates no more than it needs to
/// find the fields.
#[inline]
fn look(frame: &[u8]) -> Option<Seen> {
    let (outer, l4) = of_ip(frame, INTERNET)?;
    if outer.protocol != UDP || outer.destination.port != vxlan::UDP_PORT {
        return Some(Seen { vtep: None, flow: outer });
    }
    let header = frame.get(l4 + udp::HEADER_LEN..)?;
    let &[_, _, _, _, a, b, c, _] = header.first_chunk::<{ vxlan::HEADER_LEN }>()?;
    let (flow, _) = of_ip(&header[vxlan::HEADER_LEN..], u32::from_be_bytes([0, a, b, c]))?;
    Some(Seen { vtep: Some(outer.source.address), flow })
}

/// A flow in `network`, and the offset of its transport header.
#[inline]
fn of_ip(frame: &[u8], network: u32) -> Option<(Flow, usize)> {
    let &[kind, kind_low, version] = frame.get(ETHERTYPE..)?.first_chunk()?;
    let (protocol, addresses, l4): (u8, [IpAddr; 2], usize) = match (kind, kind_low, version) {
        (8, 0, 0x45) => {
            let header = frame.get(IP..)?.first_chunk::<V4_LEN>()?;
            let at = |at: usize| IpAddr::from([header[at], header[at + 1], header[at + 2], header[at + 3]]);
            (header[9], [at(12), at(16)], IP + V4_LEN)
        }
        (0x86, 0xdd, 0x60..=0x6f) => {
            let header = frame.get(IP..)?.first_chunk::<V6_LEN>()?;
            let at = |at: usize| Some(IpAddr::from(*header[at..].first_chunk::<16>()?));
            (header[6], [at(8)?, at(24)?], IP + V6_LEN)
        }
        _ => return None,
    };
    let &[a, b, c, d] = frame.get(l4..)?.first_chunk()?;
    let [source, destination] = addresses;
    let source = End { address: source, port: u16::from_be_bytes([a, b]) };
    let destination = End { address: destination, port: u16::from_be_bytes([c, d]) };
    matches!(protocol, TCP | UDP).then_some((Flow { network, protocol, source, destination }, l4))
}

/// For tests: the flow that a first look finds.
#[cfg(test)]
pub(crate) fn flow_of(frame: &[u8]) -> Option<Flow> {
    look(frame).map(|seen| seen.flow)
}
