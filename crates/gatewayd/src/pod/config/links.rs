//! The links of a pod: each has a section `[[links]]`, or `[gateway]` describes the only one.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

use bifrost_tables::Lpm;
use ipnet::IpNet;
use serde::Deserialize;
use toml::Spanned;

use super::sections::Gateway;
use crate::file::Checker;
use crate::pod::announcer::BgpSettings;
use crate::program::check_socket;

/// Maximum number of links of a pod, and of interfaces of an only link.
const MAX: usize = 4;

/// A link: a separate network with its own next hop (SIGCOMM'25, section 5 and appendix B.2).
#[derive(Clone, Debug)]
pub struct LinkSettings {
    /// The memif sockets of its pipeline: one, or one to four if it is the pod's only link.
    pub sockets: Vec<PathBuf>,
    /// Links with the same number belong to the same pipeline, and share its order queues.
    pub pipeline: u16,
    /// The pod's addresses on the link: at most one of each family.
    pub addresses: Vec<IpAddr>,
    /// The next hop to addresses outside the link.
    pub router: Option<IpAddr>,
    /// BGP on the link.
    pub bgp: Option<BgpSettings>,
    /// Its own prefixes; `None`: it is the only link, and its prefixes are in the pod's tables.
    on_link: Option<Lpm<()>>,
}

impl LinkSettings {
    /// The neighbour on this link to which packets for a next hop of the pod's tables are sent.
    pub fn via(&self, next_hop: IpAddr) -> Option<IpAddr> {
        match &self.on_link {
            None => Some(next_hop),
            Some(on_link) => on_link.lookup(next_hop).map(|()| next_hop).or(self.router),
        }
    }
}

/// A section `[[links]]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Section {
    socket: Spanned<PathBuf>,
    pipeline: Option<u16>,
    pub(super) addresses: Spanned<Vec<IpAddr>>,
    on_link: Spanned<Vec<IpNet>>,
    router: Option<Spanned<IpAddr>>,
    /// Its proxies.
    pub(super) peers: Option<Spanned<Vec<Ipv4Addr>>>,
}

/// The links of a pod, without their BGP settings. Returns at least one, even if there are errors.
pub(super) fn check(gateway: &Gateway, sections: &[Spanned<Section>], checker: &mut Checker<'_>) -> Vec<LinkSettings> {
    if sections.is_empty() {
        return vec![only(gateway, checker)];
    }
    for (name, value) in [
        ("interfaces", gateway.interfaces.as_ref().map(Spanned::span)),
        ("link_addresses", gateway.link_addresses.as_ref().map(Spanned::span)),
        ("on_link", gateway.on_link.as_ref().map(Spanned::span)),
        ("router", gateway.router.as_ref().map(Spanned::span)),
    ] {
        if let Some(span) = value {
            let text = format!("[gateway] {name}: each of [[links]] has its own; move it there");
            checker.error(&Spanned::new(span, ()), text);
        }
    }
    if let Some(fifth) = sections.get(MAX) {
        checker.error(fifth, format!("{} [[links]]; a pod has 1 to {MAX}", sections.len()));
    }
    let mut links: Vec<LinkSettings> = Vec::new();
    for (number, section) in sections.iter().enumerate() {
        let Section { socket, pipeline, addresses, on_link, router, .. } = section.get_ref();
        checker.check(socket, check_socket(socket.get_ref()));
        if links.iter().any(|other| other.sockets.contains(socket.get_ref())) {
            checker.error(socket, "another link has this socket, too");
        }
        if addresses.get_ref().is_empty() {
            checker.error(addresses, "addresses: a link has an address of the pod");
        }
        one_of_each_family("addresses", addresses, checker);
        for other in links.iter().flat_map(|link| &link.addresses).filter(|other| addresses.get_ref().contains(other)) {
            checker.error(addresses, format!("another link has {other}, too"));
        }
        let table = Lpm::new(on_link.get_ref().iter().map(|net| (*net, ())));
        let table = table.map_err(|net| checker.error(on_link, format!("{net} twice"))).unwrap_or_default();
        if let Some(router) = router.as_ref().filter(|router| table.lookup(*router.get_ref()).is_none()) {
            let text = format!("router: {} is not in on_link of this link, so nothing leads to it", router.get_ref());
            checker.error(router, text);
        }
        links.push(LinkSettings {
            sockets: vec![socket.get_ref().clone()],
            // Above all numbers that the file may use, so no other link has it.
            pipeline: pipeline.unwrap_or(u16::MAX - number as u16),
            addresses: addresses.get_ref().clone(),
            router: router.as_ref().map(|router| *router.get_ref()),
            bgp: None,
            on_link: Some(table),
        });
        if let Some(pipeline) = pipeline.filter(|pipeline| usize::from(*pipeline) >= MAX) {
            checker.error(section, format!("pipeline: {pipeline}; use 0 to {}", MAX - 1));
        }
    }
    links
}

/// The prefixes of all links, and the next hop of everything else, for the pod's tables. Each link replaces this next
/// hop by its own router.
pub(super) fn routes(gateway: &Gateway, sections: &[Spanned<Section>]) -> (Vec<IpNet>, Option<IpAddr>) {
    if sections.is_empty() {
        let on_link = gateway.on_link.as_ref().map(|nets| nets.get_ref().clone()).unwrap_or_default();
        return (on_link, gateway.router.as_ref().map(|router| *router.get_ref()));
    }
    let mut on_link: Vec<IpNet> =
        sections.iter().flat_map(|section| section.get_ref().on_link.get_ref()).copied().collect();
    on_link.sort_unstable();
    on_link.dedup();
    let router = sections.iter().find_map(|section| section.get_ref().router.as_ref());
    (on_link, router.map(|router| *router.get_ref()))
}

/// The only link, as `[gateway]` describes it.
fn only(gateway: &Gateway, checker: &mut Checker<'_>) -> LinkSettings {
    for (name, is_missing) in [("interfaces", gateway.interfaces.is_none()), ("on_link", gateway.on_link.is_none())] {
        if is_missing {
            checker.error(&gateway.mac, format!("[gateway] {name}: missing; give it here, or in each of [[links]]"));
        }
    }
    let mut sockets = Vec::new();
    if let Some(interfaces) = &gateway.interfaces {
        if !(1..=MAX).contains(&interfaces.get_ref().len()) {
            checker.error(interfaces, format!("a pod has 1 to {MAX} interfaces"));
        }
        for path in interfaces.get_ref() {
            checker.check(path, check_socket(path.get_ref()));
            sockets.push(path.get_ref().clone());
        }
    }
    if let Some(links) = &gateway.link_addresses {
        one_of_each_family("link_addresses", links, checker);
    }
    LinkSettings {
        sockets,
        pipeline: 0,
        addresses: gateway.link_addresses.as_ref().map(|links| links.get_ref().clone()).unwrap_or_default(),
        router: gateway.router.as_ref().map(|router| *router.get_ref()),
        bgp: None,
        on_link: None,
    }
}

fn one_of_each_family(name: &str, addresses: &Spanned<Vec<IpAddr>>, checker: &mut Checker<'_>) {
    let of = |v4: bool| addresses.get_ref().iter().filter(|address| address.is_ipv4() == v4).count();
    if of(true) > 1 || of(false) > 1 {
        checker.error(addresses, format!("{name}: a pod has one of each family at most"));
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use crate::file;
    use crate::pod::Config;

    const GOOD: &str = r#"control = { socket = "/run/gw.sock" }
[gateway]
pod = 1
cores = 1
addresses = ["10.0.0.1", "fd00::1"]
mac = "02:00:00:00:00:01"
[bgp]
asn = 64512
[[links]]
socket = "/run/0.sock"
pipeline = 0
addresses = ["10.1.0.11", "fd01::b"]
on_link = ["10.1.0.0/24", "fd01::/64"]
router = "10.1.0.254"
peers = ["10.1.0.2"]
[[links]]
socket = "/run/1.sock"
pipeline = 0
addresses = ["10.1.1.11"]
on_link = ["10.1.1.0/24"]
router = "10.1.1.254"
peers = ["10.1.1.2"]
[[links]]
socket = "/run/2.sock"
addresses = ["10.1.2.11"]
on_link = ["10.1.2.0/24"]
router = "10.1.2.254"
peers = ["10.1.2.2", "10.1.2.3"]
[[vpcs]]
vni = 100
hosts = [{ address = "192.168.0.1", mac = "02:00:00:00:01:01", vtep = "10.9.0.11" }]
"#;

    fn load(text: &str) -> Result<Config, String> {
        file::load_text(text, Config::load)
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn each_link_has_its_own_next_hops_and_sessions() {
        let config = load(GOOD).unwrap();
        let pipelines: Vec<u16> = config.links.iter().map(|link| link.pipeline).collect();
        assert!(pipelines[0] == 0 && pipelines[1] == 0 && pipelines[2] > 3, "{pipelines:?}");
        // The tables have one next hop for remote hosts. Each link replaces it by its own router.
        assert_eq!(config.resolve, [ip("10.1.0.254")]);
        let via = |address: &str| config.links.iter().map(|link| link.via(ip(address)).unwrap()).collect::<Vec<_>>();
        assert_eq!(via("10.1.0.254"), ["10.1.0.254", "10.1.1.254", "10.1.2.254"].map(ip));
        assert_eq!(via("10.1.1.7"), ["10.1.0.254", "10.1.1.7", "10.1.2.254"].map(ip));
        let bgp: Vec<_> = config.links.iter().map(|link| link.bgp.clone().unwrap()).collect();
        let hops: Vec<_> = bgp.iter().map(|bgp| bgp.address.to_string()).collect();
        assert_eq!(hops, ["10.1.0.11", "10.1.1.11", "10.1.2.11"]);
        assert!(bgp.iter().all(|bgp| bgp.router_id == bgp_id()), "a speaker has one identifier");
        assert_eq!(bgp.iter().map(|bgp| bgp.peers.len()).collect::<Vec<_>>(), [1, 1, 2]);
        // IPv6 addresses are announced only where they have a next hop.
        assert_eq!(bgp.iter().map(|bgp| bgp.routes.len()).collect::<Vec<_>>(), [2, 1, 1]);
    }

    fn bgp_id() -> std::net::Ipv4Addr {
        [10, 1, 0, 11].into()
    }

    #[test]
    fn errors_name_their_lines() {
        for (from, to, error) in [
            ("[bgp]", "router = \"10.1.0.254\"\n[bgp]", "7: [gateway] router: each of [[links]] has its own"),
            ("[bgp]", "interfaces = [\"/run/x\"]\n[bgp]", "7: [gateway] interfaces: each of [[links]] has its own"),
            ("asn = 64512", "asn = 64512\npeers = [\"10.1.0.2\"]", "9: [bgp] peers: each of [[links]] has its own"),
            ("/run/1.sock", "/run/0.sock", "17: another link has this socket, too"),
            ("[\"10.1.1.11\"]", "[]", "19: addresses: a link has an address of the pod"),
            ("[\"10.1.1.11\"]", "[\"10.1.0.11\"]", "19: another link has 10.1.0.11, too"),
            ("[\"10.1.1.11\"]", "[\"10.1.1.11\", \"10.1.1.12\"]", "19: addresses: a pod has one of each family"),
            ("[\"10.1.1.11\"]", "[\"fd02::1\"]", "19: a link with peers needs an IPv4 address"),
            ("[\"10.1.1.0/24\"]", "[\"10.1.3.0/24\"]", "21: router: 10.1.1.254 is not in on_link"),
            ("peers = [\"10.1.1.2\"]", "peers = []", "22: peers: 0 of them; a pod has 1 to 8 proxies"),
            (
                "pipeline = 0\naddresses = [\"10.1.1.11\"]",
                "pipeline = 4\naddresses = [\"10.1.1.11\"]",
                "16: pipeline: 4",
            ),
            ("[bgp]\nasn = 64512\n", "", "13: peers: there is no [bgp]"),
        ] {
            let found = load(&GOOD.replacen(from, to, 1)).unwrap_err();
            assert!(found.lines().any(|line| line.starts_with(error)), "{found}");
        }
        let more = "[[links]]\nsocket = \"/run/N.sock\"\naddresses = [\"10.1.N.11\"]\non_link = []\n";
        let more = [more.replace('N', "4"), more.replace('N', "5")].concat();
        let found = load(&format!("{GOOD}{more}")).unwrap_err();
        assert!(found.starts_with("36: 5 [[links]]; a pod has 1 to 4"), "{found}");
        let none = GOOD.split("[bgp]").next().unwrap();
        let found = load(none).unwrap_err();
        assert!(found.starts_with("6: [gateway] interfaces: missing"), "{found}");
    }
}
