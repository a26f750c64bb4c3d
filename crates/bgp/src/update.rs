//! UPDATE messages (RFC 4271, section 4.3; for IPv6 RFC 4760 and RFC 2545).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use rustbgpd_wire::{
    Afi, AsPath, Ipv4NlriEntry, Ipv4Prefix, Ipv4UnicastMode, Ipv6Prefix, MpReachNlri, MpUnreachNlri, NlriEntry, Origin,
    PathAttribute, Prefix, Safi, UpdateMessage,
};

/// The usual default of LOCAL_PREF.
const LOCAL_PREF: u32 = 100;
/// Maximum number of prefixes in one UPDATE: they fit in 4096 bytes with the attributes.
const PREFIXES: usize = 500;
const PREFIXES6: usize = 200;

/// UPDATEs that announce new prefixes to an iBGP peer, and withdraw others. Without `next_hop6` only IPv4 prefixes.
pub(crate) fn updates(
    new: &[IpNet],
    gone: &[IpNet],
    next_hop: Ipv4Addr,
    next_hop6: Option<Ipv6Addr>,
) -> Vec<UpdateMessage> {
    let mut all = v4(new, gone, next_hop);
    all.extend(next_hop6.into_iter().flat_map(|next_hop| v6(new, gone, next_hop)));
    all
}

fn v4(new: &[IpNet], gone: &[IpNet], next_hop: Ipv4Addr) -> Vec<UpdateMessage> {
    let entries = |nets: &[IpNet]| -> Vec<_> { nets.iter().filter_map(entry4).collect() };
    let attributes = attributes(PathAttribute::NextHop(next_hop));
    let mut all: Vec<_> = entries(gone).chunks(PREFIXES).filter_map(|gone| update(&[], gone, &[])).collect();
    all.extend(entries(new).chunks(PREFIXES).filter_map(|new| update(new, &[], &attributes)));
    all
}

/// IPv6 prefixes and their next hop are in separate attributes, without NEXT_HOP (RFC 4760, section 3).
fn v6(new: &[IpNet], gone: &[IpNet], next_hop: Ipv6Addr) -> Vec<UpdateMessage> {
    let entries = |nets: &[IpNet]| -> Vec<_> { nets.iter().filter_map(entry6).collect() };
    let withdrawn = |gone: &[NlriEntry]| update(&[], &[], &[unreachable(gone.to_vec())]);
    let announced = |new: &[NlriEntry]| update(&[], &[], &attributes(reachable(new.to_vec(), next_hop)));
    let mut all: Vec<_> = entries(gone).chunks(PREFIXES6).filter_map(withdrawn).collect();
    all.extend(entries(new).chunks(PREFIXES6).filter_map(announced));
    all
}

/// Never `None`: the lists are short enough.
fn update(new: &[Ipv4NlriEntry], gone: &[Ipv4NlriEntry], attributes: &[PathAttribute]) -> Option<UpdateMessage> {
    UpdateMessage::try_build(new, gone, attributes, true, false, Ipv4UnicastMode::Body).ok()
}

/// Attributes of an announcement. `next_hop` is NEXT_HOP, or MP_REACH_NLRI, which contains the next hop.
fn attributes(next_hop: PathAttribute) -> [PathAttribute; 4] {
    let path = AsPath { segments: Vec::new() };
    [PathAttribute::Origin(Origin::Igp), PathAttribute::AsPath(path), next_hop, PathAttribute::LocalPref(LOCAL_PREF)]
}

fn reachable(announced: Vec<NlriEntry>, next_hop: Ipv6Addr) -> PathAttribute {
    PathAttribute::MpReachNlri(Box::new(MpReachNlri {
        afi: Afi::Ipv6,
        safi: Safi::Unicast,
        next_hop: IpAddr::V6(next_hop),
        link_local_next_hop: None,
        announced,
        flowspec_announced: Vec::new(),
        evpn_announced: Vec::new(),
        bgpls_announced: Vec::new(),
        vpn_announced: Vec::new(),
        labeled_announced: Vec::new(),
        rtc_announced: Vec::new(),
    }))
}

fn unreachable(withdrawn: Vec<NlriEntry>) -> PathAttribute {
    PathAttribute::MpUnreachNlri(Box::new(MpUnreachNlri {
        afi: Afi::Ipv6,
        safi: Safi::Unicast,
        withdrawn,
        flowspec_withdrawn: Vec::new(),
        evpn_withdrawn: Vec::new(),
        bgpls_withdrawn: Vec::new(),
        vpn_withdrawn: Vec::new(),
        labeled_withdrawn: Vec::new(),
        rtc_withdrawn: Vec::new(),
    }))
}

fn entry4(net: &IpNet) -> Option<Ipv4NlriEntry> {
    let entry = |net: &Ipv4Net| Ipv4NlriEntry { path_id: 0, prefix: Ipv4Prefix::new(net.addr(), net.prefix_len()) };
    match net {
        IpNet::V4(net) => Some(entry(net)),
        IpNet::V6(_) => None,
    }
}

fn entry6(net: &IpNet) -> Option<NlriEntry> {
    let prefix = |net: &Ipv6Net| Prefix::V6(Ipv6Prefix::new(net.addr(), net.prefix_len()));
    match net {
        IpNet::V4(_) => None,
        IpNet::V6(net) => Some(NlriEntry { path_id: 0, prefix: prefix(net) }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nets(range: std::ops::Range<u16>) -> Vec<IpNet> {
        range.map(|last| IpNet::from(IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, last]))).collect()
    }

    #[test]
    fn ipv6_prefixes_have_their_own_next_hop() {
        let hop: Ipv6Addr = "fd01::11".parse().unwrap();
        let v4 = IpNet::from(IpAddr::from([10, 0, 0, 1]));
        let all = updates(&[&[v4][..], &nets(1..301)].concat(), &nets(0..1), [10, 1, 0, 11].into(), Some(hop));
        let parsed: Vec<_> = all.iter().map(|update| update.parse(true, false, &[]).unwrap()).collect();
        let next_hop = PathAttribute::NextHop([10, 1, 0, 11].into());
        assert_eq!((parsed.len(), parsed[0].announced.len()), (4, 1));
        assert!(parsed[0].attributes.contains(&next_hop));
        let gone = nets(0..1).iter().filter_map(entry6).collect();
        assert_eq!(parsed[1].attributes, [unreachable(gone)]);
        for (parsed, range) in parsed[2..].iter().zip([1..201, 201..301]) {
            let new: Vec<_> = nets(range).iter().filter_map(entry6).collect();
            assert!(parsed.announced.is_empty() && parsed.withdrawn.is_empty());
            assert!(parsed.attributes.contains(&reachable(new, hop)), "{:?}", parsed.attributes);
            assert!(!parsed.attributes.contains(&next_hop));
        }
        assert!(updates(&nets(0..3), &nets(3..5), [10, 1, 0, 11].into(), None).is_empty());
    }
}
