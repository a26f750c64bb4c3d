//! The section `[bgp]`: what a pod announces, and to whom.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use serde::Deserialize;
use toml::Spanned;

use crate::file::Checker;
use crate::pod::announcer::{BgpSettings, MAX_PEERS};

/// The section as it is in the file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Section {
    asn: Spanned<u32>,
    peers: Spanned<Vec<Ipv4Addr>>,
    announce: Option<Vec<Spanned<IpNet>>>,
    hold_s: Option<Spanned<u16>>,
    bfd: Option<BfdSection>,
    #[serde(default)]
    drained: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct BfdSection {
    interval_ms: Spanned<u32>,
    multiplier: Spanned<u8>,
}

/// s (RFC 4271, section 4.2).
const LEAST_HOLD: u16 = 3;

impl Section {
    /// The settings; what is wrong is noted. `links` and `addresses`: those of the pod on its link, and of its tunnels.
    pub(super) fn check(
        &self,
        links: &[IpAddr],
        addresses: &[IpAddr],
        checker: &mut Checker<'_>,
    ) -> Option<BgpSettings> {
        let peers = self.peers.get_ref();
        if *self.asn.get_ref() == 0 {
            checker.error(&self.asn, "asn: 0 is not an AS; private ones are 64512 to 65534");
        }
        if !(1..=MAX_PEERS).contains(&peers.len()) {
            checker.error(&self.peers, format!("peers: {} of them; a pod has 1 to {MAX_PEERS} proxies", peers.len()));
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
        let Some(address) = links.iter().find_map(v4) else {
            checker.error(&self.asn, "[bgp] needs an IPv4 address among link_addresses of [gateway]: the next hop");
            return None;
        };
        let address6 = links.iter().find_map(v6);
        let is_told = |address: &IpAddr| address.is_ipv4() || address6.is_some();
        let own = || addresses.iter().copied().filter(is_told).map(IpNet::from).collect();
        for net in self.announce.iter().flatten().filter(|net| !is_told(&net.get_ref().addr())) {
            checker.error(
                net,
                format!(
                    "announce: {} needs an IPv6 address among link_addresses of [gateway]: the next hop",
                    net.get_ref()
                ),
            );
        }
        let named = |nets: &Vec<Spanned<IpNet>>| nets.iter().map(|net| *net.get_ref()).collect();
        Some(BgpSettings {
            asn: *self.asn.get_ref(),
            peers: peers.clone(),
            routes: self.announce.as_ref().map_or_else(own, named),
            hold_s: self.hold_s.as_ref().map_or(LEAST_HOLD, |hold| *hold.get_ref()),
            bfd: self
                .bfd
                .as_ref()
                .map(|bfd| (bfd.interval_ms.get_ref().saturating_mul(1000), *bfd.multiplier.get_ref())),
            address,
            address6,
            drained: self.drained,
        })
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
        let bgp = load(GOOD).unwrap().bgp.unwrap();
        assert_eq!((bgp.hold_s, bgp.bfd, bgp.address, bgp.drained), (3, None, [10, 1, 0, 11].into(), false));
        assert_eq!(bgp.routes, ["10.0.0.1/32".parse().unwrap()]);
        let more = "drained = true\nannounce = [\"203.0.113.0/24\"]\nbfd = { interval_ms = 50, multiplier = 3 }\n";
        let bgp = load(&format!("{GOOD}{more}")).unwrap().bgp.unwrap();
        let net = "203.0.113.0/24".parse().unwrap();
        assert_eq!((bgp.routes, bgp.bfd, bgp.drained), (vec![net], Some((50_000, 3)), true));
        let both = GOOD.replace("[\"10.1.0.11\"]", "[\"10.1.0.11\", \"fd01::11\"]");
        let bgp = load(&both).unwrap().bgp.unwrap();
        assert_eq!(bgp.address6, Some("fd01::11".parse().unwrap()));
        assert_eq!(bgp.routes, ["fd00::1/128", "10.0.0.1/32"].map(|net| net.parse().unwrap()));
        for (from, to, error) in [
            ("asn = 64512", "asn = 0", "11: asn: 0 is not an AS"),
            ("[\"10.1.0.2\"]", "[]", "12: peers: 0 of them; a pod has 1 to 8 proxies"),
            ("asn =", "announce = [\"fd00::/64\"]\nasn =", "11: announce: fd00::/64 needs an IPv6 address among"),
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
