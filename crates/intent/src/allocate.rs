//! What the author of an object left open: VNIs, addresses, MAC addresses.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use bifrost_wire::Mac;
use ipnet::IpNet;

use crate::grants;
use crate::key::Key;
use crate::model::{Index, Model};

/// The first VNI that is given; those below are for whom asks for one.
const FIRST_VNI: u32 = 4096;
const LAST_VNI: u32 = (1 << 24) - 1;
/// How many addresses of a pool are tried.
const MAX_TRIED: usize = 1 << 16;

/// The lowest free VNI from [`FIRST_VNI`] on.
pub(crate) fn vni(model: &Model) -> Option<u32> {
    let mut free = FIRST_VNI;
    for used in model.vnis_from(FIRST_VNI) {
        if used > free {
            break;
        }
        free = used + 1;
    }
    (free <= LAST_VNI).then_some(free)
}

/// The router's address of a subnet whose author names none: the first that a host can have.
pub(crate) fn gateway(prefix: IpNet) -> Option<IpAddr> {
    let range = hosts(prefix)?;
    Some(address(prefix, range.0))
}

/// A free address of a subnet for a port or load balancer: the one after the highest that the
/// subnet has ever given, so that an address that was freed rests as long as possible; once those
/// are used up, the lowest free one.
pub(crate) fn free_address(model: &Model, vpc: &Key, subnet: &Key, prefix: IpNet) -> Option<IpAddr> {
    let (first, last) = hosts(prefix)?;
    let used = |n: u128| model.found(&Index::Address(vpc.clone(), address(prefix, n))).next().is_some();
    let mut next = model.cursor(subnet).map_or(first, |cursor| number(cursor).saturating_add(1));
    // Routers, and addresses that were named, are few; the bound is that of one allocation.
    while next <= last && used(next) {
        next += 1;
    }
    if next <= last {
        return Some(address(prefix, next));
    }
    let mut free = first;
    for taken in model.addresses_in(vpc, prefix).map(number) {
        if taken > free {
            break;
        }
        free = free.max(taken.saturating_add(1));
    }
    (free <= last).then(|| address(prefix, free))
}

/// A locally administered MAC address that no other port of the VPC has. For IPv4 it follows from the address alone.
pub(crate) fn mac(model: &Model, vpc: &Key, address: IpAddr) -> Mac {
    let Mac(bytes) = mac_of(address);
    let mut number = bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte));
    loop {
        let [_, _, bytes @ ..] = number.to_be_bytes();
        let mac = Mac(bytes);
        if model.found(&Index::Mac(vpc.clone(), mac)).next().is_none() {
            return mac;
        }
        // Within the locally administered unicast addresses that begin with 02.
        number = number & !0xff_ffff_ffff | number.wrapping_add(1) & 0xff_ffff_ffff;
    }
}

/// A locally administered MAC address that follows from an address.
pub(crate) fn mac_of(address: IpAddr) -> Mac {
    Mac(match address {
        IpAddr::V4(address) => {
            let [a, b, c, d] = address.octets();
            [0x02, 0x00, a, b, c, d]
        }
        IpAddr::V6(address) => {
            // FNV-1a (RFC 9923), of which 39 bits remain; the rest says that it is not IPv4's.
            let hash = address.octets().iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
                (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
            });
            let [_, _, _, a, b, c, d, e] = (hash ^ hash >> 40).to_be_bytes();
            [0x02, 0x80 | a, b, c, d, e]
        }
    })
}

/// A free address outside, of those that a pool has and a project may use. None: there is none among the first ones.
pub(crate) fn outside_address(model: &Model, project: &str, pool: &BTreeSet<IpNet>) -> Option<IpAddr> {
    // Of one or two addresses each can be a host's.
    fn range(prefix: IpNet) -> (u128, u128) {
        hosts(prefix).unwrap_or_else(|| (number(prefix.network()), number(prefix.broadcast())))
    }
    let all = pool.iter().flat_map(|prefix| {
        let (first, last) = range(*prefix);
        grants::parts(model, project, *prefix).into_iter().flat_map(move |part| {
            let of_part = range(part);
            (first.max(of_part.0)..=last.min(of_part.1)).map(move |n| address(part, n))
        })
    });
    let is_free = |address: &IpAddr| model.found(&Index::Outside(*address)).next().is_none();
    all.take(MAX_TRIED).find(is_free)
}

/// The first and last address of a prefix that a host can have: of IPv4 neither network nor broadcast, of IPv6 not the first,
/// which is all routers' (RFC 4291, section 2.6.1). None: there is no room for a router and a port.
pub(crate) fn hosts(prefix: IpNet) -> Option<(u128, u128)> {
    let (network, broadcast) = (number(prefix.network()), number(prefix.broadcast()));
    let last = if prefix.addr().is_ipv4() { broadcast.checked_sub(1)? } else { broadcast };
    // The last address of IPv6 has none after it.
    let first = network.checked_add(1)?;
    (first < last).then_some((first, last))
}

pub(crate) fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => address.to_bits().into(),
        IpAddr::V6(address) => address.to_bits(),
    }
}

fn address(prefix: IpNet, number: u128) -> IpAddr {
    match prefix {
        // Within the prefix, hence 32 bits.
        IpNet::V4(_) => IpAddr::V4(Ipv4Addr::from_bits(number as u32)),
        IpNet::V6(_) => IpAddr::V6(Ipv6Addr::from_bits(number)),
    }
}
