//! The section `[bgp]`: the routes that a pod announces, and to which proxies.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use serde::Deserialize;
use toml::Spanned;

use super::links::{self, LinkSettings};
use crate::file::Checker;
use crate::pod::announcer::{BgpSettings, MAX_PEERS};

/// The section as it is in the file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Section {
    asn: Spanned<u32>,
    /// The proxies of the only link.
    peers: Option<Spanned<Vec<Ipv4Addr>>>,
    announce: Option<Vec<Spanned<IpNet>>>,
    hold_s: Option<Spanned<u16>>,
    bfd: Option<BfdSection>,
    #[serde(default)]
    pub(super) drained: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct BfdSection {
    interval_ms: Spanned<u32>,
    multiplier: Spanned<u8>,
}

/// Minimum hold time, s (RFC 4271, section 4.2).
const LEAST_HOLD: u16 = 3;

/// Sets the BGP settings of each link, and adds all errors to `checker`. `addresses`: those of the pod's tunnels.
pub(super) fn check(
    section: Option<&Section>,
    links: &mut [LinkSettings],
    sections: &[Spanned<links::Section>],
    addresses: &[IpAddr],
    checker: &mut Checker<'_>,
) {
    let peers_of = |number: usize| sections.get(number).and_then(|link| link.get_ref().peers.as_ref());
    let Some(section) = section else {
        for peers in (0..links.len()).filter_map(peers_of) {
            checker.error(peers, "peers: there is no [bgp], which says what is announced to them");
        }
        return;
    };
    section.check(checker);
    if let Some(peers) = section.peers.as_ref().filter(|_| !sections.is_empty()) {
        checker.error(peers, "[bgp] peers: each of [[links]] has its own; move them there");
    }
    let several: Vec<_> = (0..links.len()).map(|number| peers_of(number).map(|peers| (number, peers))).collect();
    let with_peers: Vec<(usize, &Spanned<Vec<Ipv4Addr>>)> = match sections.is_empty() {
        true => section.peers.iter().map(|peers| (0, peers)).collect(),
        false => several.into_iter().flatten().collect(),
    };
    if with_peers.is_empty() {
        checker.error(&section.asn, "[bgp] needs peers: the proxies that the pod's addresses are announced to");
    }
    let told6 = with_peers.iter().any(|(number, _)| links[*number].addresses.iter().any(IpAddr::is_ipv6));
    for net in section.announce.iter().flatten().filter(|net| net.get_ref().addr().is_ipv6() && !told6) {
        let place = if sections.is_empty() { "link_addresses of [gateway]" } else { "addresses of a link" };
        let text = format!("announce: {} needs an IPv6 address among {place}: the next hop", net.get_ref());
        checker.error(net, text);
    }
    let mut router_id = None;
    for (number, peers) in with_peers {
        if !(1..=MAX_PEERS).contains(&peers.get_ref().len()) {
            let count = peers.get_ref().len();
            checker.error(peers, format!("peers: {count} of them; a pod has 1 to {MAX_PEERS} proxies"));
        }
        let Some(address) = links[number].addresses.iter().find_map(v4) else {
            match sections.get(number) {
                Some(link) => checker.error(
                    &link.get_ref().addresses,
                    "a link with peers needs an IPv4 address: the next hop of what is announced",
                ),
                None => checker
                    .error(&section.asn, "[bgp] needs an IPv4 address among link_addresses of [gateway]: the next hop"),
            }
            continue;
        };
        let router_id = *router_id.get_or_insert(address);
        links[number].bgp = Some(section.settings(router_id, address, &links[number], peers.get_ref(), addresses));
    }
}

impl Section {
    /// Checks the settings that all links have in common.
    fn check(&self, checker: &mut Checker<'_>) {
        if *self.asn.get_ref() == 0 {
            checker.error(&self.asn, "asn: 0 is not an AS; private ones are 64512 to 65534");
        }
        if let Some(hold) = self.hold_s.as_ref().filter(|hold| *hold.get_ref() < LEAST_HOLD) {
            checker.error(hold, format!("hold_s: {}; use {LEAST_HOLD} to 65535", hold.get_ref()));
        }
        if let Some(BfdSection { interval_ms, multiplier }) = &self.bfd {
            if !(10..=10_000).contains(interval_ms.get_ref()) {
                checker.error(interval_ms, format!("interval_ms: {}; use 10 to 10000", interval_ms.get_ref()));
            }
            if *multiplier.get_ref() == 0 {
                checker.error(multiplier, "multiplier: 0; use 1 to 255");
            }
        }
    }

    /// The BGP settings of a link.
    fn settings(
        &self,
        router_id: Ipv4Addr,
        address: Ipv4Addr,
        link: &LinkSettings,
        peers: &[Ipv4Addr],
        addresses: &[IpAddr],
    ) -> BgpSettings {
        let address6 = link.addresses.iter().find_map(v6);
        let all: Vec<IpNet> = match &self.announce {
            Some(nets) => nets.iter().map(|net| *net.get_ref()).collect(),
            None => addresses.iter().copied().map(IpNet::from).collect(),
        };
        BgpSettings {
            asn: *self.asn.get_ref(),
            router_id,
            peers: peers.to_vec(),
            // Only routes for whose address family there is a next hop.
            routes: all.into_iter().filter(|net| net.addr().is_ipv4() || address6.is_some()).collect(),
            hold_s: self.hold_s.as_ref().map_or(LEAST_HOLD, |hold| *hold.get_ref()),
            bfd: self
                .bfd
                .as_ref()
                .map(|bfd| (bfd.interval_ms.get_ref().saturating_mul(1000), *bfd.multiplier.get_ref())),
            address,
            address6,
        }
    }
}

fn v4(address: &IpAddr) -> Option<Ipv4Addr> {
    match address {
        IpAddr::V4(address) => Some(*address),
        IpAddr::V6(_) => None,
    }
}

fn v6(address: &IpAddr) -> Option<Ipv6Addr> {
    match address {
        IpAddr::V4(_) => None,
        IpAddr::V6(address) => Some(*address),
    }
}

#[cfg(test)]
mod tests {
    use crate::file;
    use crate::pod::Config;

    const GOOD: &str = r#"control = { socket = "/run/gw.sock" }
[gateway]
pod = 1
cores = 1
interfaces = ["/run/memif.sock"]
addresses = ["fd00::1", "10.0.0.1"]
link_addresses = ["10.1.0.11"]
mac = "02:00:00:00:00:01"
on_link = ["10.1.0.0/24"]
[bgp]
asn = 64512
peers = ["10.1.0.2"]
"#;

    #[test]
    fn what_is_announced() {
        let load = |text: &str| file::load_text(text, Config::load);
        let only = |text: &str| {
            let config = load(text).unwrap();
            (config.links[0].bgp.clone().unwrap(), config.drained)
        };
        let (bgp, drained) = only(GOOD);
        assert_eq!((bgp.hold_s, bgp.bfd, bgp.address, drained), (3, None, [10, 1, 0, 11].into(), false));
        assert_eq!(bgp.routes, ["10.0.0.1/32".parse().unwrap()]);
        let more = "drained = true\nannounce = [\"203.0.113.0/24\"]\nbfd = { interval_ms = 50, multiplier = 3 }\n";
        let (bgp, drained) = only(&format!("{GOOD}{more}"));
        let net = "203.0.113.0/24".parse().unwrap();
        assert_eq!((bgp.routes, bgp.bfd, drained), (vec![net], Some((50_000, 3)), true));
        let both = GOOD.replace("[\"10.1.0.11\"]", "[\"10.1.0.11\", \"fd01::11\"]");
        let (bgp, _) = only(&both);
        assert_eq!(bgp.address6, Some("fd01::11".parse().unwrap()));
        assert_eq!(bgp.routes, ["fd00::1/128", "10.0.0.1/32"].map(|net| net.parse().unwrap()));
        for (from, to, error) in [
            ("asn = 64512", "asn = 0", "11: asn: 0 is not an AS"),
            ("[\"10.1.0.2\"]", "[]", "12: peers: 0 of them; a pod has 1 to 8 proxies"),
            ("asn =", "announce = [\"fd00::/64\"]\nasn =", "11: announce: fd00::/64 needs an IPv6 address among"),
            ("peers = [\"10.1.0.2\"]\n", "", "11: [bgp] needs peers"),
            ("asn =", "hold_s = 2\nasn =", "11: hold_s: 2; use 3 to 65535"),
            ("asn =", "bfd = { interval_ms = 5, multiplier = 3 }\nasn =", "11: interval_ms: 5; use 10 to 10000"),
            ("asn =", "bfd = { interval_ms = 50, multiplier = 0 }\nasn =", "11: multiplier: 0; use 1 to 255"),
            ("[\"10.1.0.11\"]", "[\"fd01::1\"]", "11: [bgp] needs an IPv4 address among link_addresses"),
            ("[\"10.1.0.11\"]", "[\"10.1.0.11\", \"10.1.0.12\"]", "7: link_addresses: a pod has one of each family"),
        ] {
            let found = load(&GOOD.replacen(from, to, 1)).unwrap_err();
            assert!(found.starts_with(error), "{found}");
        }
    }
}
