//! Holders of shared addresses (`[[port]] shared`, `[[route]] shared`): the vNIC that last took each address.
//!
//! Each worker's switch records the claims of guests and other hosts. This thread reads the claims, decides, and gives
//! all workers new tables, as for backends' health. Claims of this host's guests are announced to all hosts of their
//! VPC, and repeated for hosts that have started since. Without shared addresses nothing is polled.

pub(crate) mod election;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use bifrost_avs::{Claim, Statement};
use bifrost_control::config::{Config, Vni};
use bifrost_wire::Mac;

/// Polling interval.
const TICK: Duration = Duration::from_millis(20);
/// Pause after a move, in multiples of its duration, and its upper bound: even if guests constantly take an address
/// from each other, the daemon has time for other work.
const REST: u32 = 4;
const LONGEST_REST: Duration = Duration::from_millis(500);
/// Interval of repeated announcements to other hosts.
const REPEAT: Duration = Duration::from_secs(10);
/// Pause after a panic, which may recur.
const AFTER_PANIC: Duration = Duration::from_secs(1);

/// A shared address and its VPC.
pub(crate) type Name = (Vni, IpAddr);

/// The vNIC that holds each shared address. An address without an entry has no holder.
pub(crate) type Holders = BTreeMap<Name, Mac>;

/// State of shared addresses.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// Their holders.
    pub(crate) holders: Holders,
    /// Whether the configuration has any.
    is_used: bool,
}

impl Shared {
    /// For a configuration, with the former holders.
    pub(crate) fn of(config: &Config, holders: Holders) -> Shared {
        let is_used =
            config.ports.iter().any(|port| !port.shared.is_empty()) || config.routes.sharing().next().is_some();
        let mut shared = Shared { holders, is_used };
        if !shared.holders.is_empty() {
            let vnics = vnics(config);
            shared.holders.retain(|name, mac| vnics.get(name).is_some_and(|vnics| vnics.contains(mac)));
        }
        shared
    }
}

/// Each shared address, with the vNICs that may hold it.
pub(crate) fn vnics(config: &Config) -> BTreeMap<Name, BTreeSet<Mac>> {
    let of_ports = config.ports.iter().map(|port| (port.vni, port.mac, &port.shared[..]));
    let of_routes = config.routes.sharing().map(|route| (route.vni, route.mac, &route.shared[..]));
    let mut all = BTreeMap::<Name, BTreeSet<Mac>>::new();
    for (vni, mac, shared) in of_ports.chain(of_routes) {
        for address in shared {
            all.entry((vni, *address)).or_default().insert(mac);
        }
    }
    all
}

fn name(claim: &Claim) -> Option<Name> {
    Some((Vni::new(claim.vni.get())?, claim.address))
}

/// The holders after `claims`, which are sorted by time.
fn decide(holders: &Holders, claims: &[Claim], vnics: &BTreeMap<Name, BTreeSet<Mac>>) -> Holders {
    let mut holders = holders.clone();
    for claim in claims {
        let Some(name) = name(claim) else { continue };
        if !vnics.get(&name).is_some_and(|vnics| vnics.contains(&claim.mac)) {
            // The configuration has changed since.
            continue;
        }
        if claim.statement == Statement::Takes || !holders.contains_key(&name) {
            holders.insert(name, claim.mac);
        }
    }
    holders
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADDRESS: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 100));

    fn claim(n: u8, statement: Statement) -> Claim {
        let vni = bifrost_wire::Vni::new(100).unwrap_or_default();
        Claim { vni, address: ADDRESS, mac: Mac([2, 0, 0, 0, 0, n]), statement, at_ns: 0 }
    }

    #[test]
    fn the_last_vnic_that_takes_an_address_holds_it() {
        use Statement::{Has, Takes};
        let Some(vni) = Vni::new(100) else { panic!("a VNI") };
        let mac = |n| Mac([2, 0, 0, 0, 0, n]);
        let vnics = BTreeMap::from([((vni, ADDRESS), BTreeSet::from([mac(1), mac(2)]))]);
        let holder = |before: Option<u8>, claims: &[Claim]| {
            let before = before.map(|n| ((vni, ADDRESS), mac(n))).into_iter().collect();
            decide(&before, claims, &vnics).get(&(vni, ADDRESS)).map(|mac| mac.0[5])
        };
        assert_eq!(holder(None, &[claim(1, Has)]), Some(1));
        assert_eq!(holder(Some(2), &[claim(1, Has)]), Some(2));
        assert_eq!(holder(Some(2), &[claim(1, Takes)]), Some(1));
        assert_eq!(holder(None, &[claim(1, Takes), claim(2, Takes), claim(1, Has)]), Some(2));
        assert_eq!(holder(None, &[claim(3, Takes)]), None, "it does not share the address");
    }
}
