//! The configuration of `bifrost-gw`.

mod bgp;
mod links;
mod sections;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use bifrost_gateway::{
    Backends, Host, INTERNET, Keepalive, NatConfig, NextHop, Route, Tables, Tunnel, TunnelKind, Vpc,
};
use bifrost_tables::{Classifier, Dir24, Lpm, Pattern, Rate};
use bifrost_wire::Mac;
use ipnet::IpNet;
use serde::Deserialize;
use toml::Spanned;

use crate::file::{self, Checker, FileErrors};
use crate::program::check_socket;
use sections::{File, Gateway, InternetRoute, KeepaliveSection, TunnelName, VpcSection};

pub use links::LinkSettings;

/// Number of /24 networks in the Internet's routing table that can contain longer prefixes.
const FIB_GROUPS: u32 = 1 << 16;

/// NAT sessions per core, unless the file sets their number.
const SESSIONS_OF_A_CORE: u32 = 65_536;
const SESSIONS_MAX: u32 = 1 << 24;

/// A checked configuration.
#[derive(Clone, Debug)]
pub struct Config {
    /// Path of the control socket.
    pub control: PathBuf,
    /// Address where counters are served over TCP.
    pub metrics: Option<SocketAddr>,
    /// The pod's number in the pipeline's trailers.
    pub pod: u16,
    /// Number of workers.
    pub cores: u16,
    /// The CPUs of the workers, in order. Workers without one run on any.
    pub processors: Vec<usize>,
    /// How long a worker polls for packets before it sleeps, ns.
    pub spin_ns: u64,
    /// log2 of the number of entries in each ring.
    pub log2_ring_entries: u8,
    /// Modified behaviour of workers, for tests.
    pub tests: Tests,
    /// Its links, 1 to 4.
    pub links: Vec<LinkSettings>,
    /// The gateway's lookup tables.
    pub tables: Tables,
    /// Names of the tunnels, by index.
    pub tunnels: Vec<String>,
    /// Settings of NAT.
    pub nat: NatConfig,
    /// Next hops to be resolved from the start.
    pub resolve: Vec<IpAddr>,
    /// Whether it starts drained.
    pub drained: bool,
}

/// Modified behaviour of workers, for tests. By default, nothing is modified; the section `[tests]` sets this.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Tests {
    /// The worker sleeps for a random time up to this for each packet, µs.
    pub jitter_us: u64,
    /// One worker stalls once.
    pub stall: Option<Stall>,
    /// Dropped packets are not reported with the drop flag: their places in order queues time out.
    pub keep_drops: bool,
    /// Maximum number of packets per second that a worker processes; 0: no limit.
    pub packets_per_second: u64,
    /// Control packets arrive together with data, because the pipeline has `priority = false`. Workers pass packets
    /// that they drop to the control thread.
    pub control_with_data: bool,
}

impl Tests {
    /// The settings for one worker.
    pub(super) fn of_worker(self, number: usize) -> Self {
        Tests { stall: self.stall.filter(|stall| stall.worker == number), ..self }
    }
}

/// A worker that stalls once, for tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stall {
    /// Its number.
    pub worker: usize,
    /// Number of packets after which it stalls.
    pub after_packets: u64,
    /// Length of the stall, ms.
    pub ms: u64,
}

impl Config {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// All errors in the file.
    pub fn load(path: &Path) -> Result<Self, FileErrors> {
        file::load(path, check)
    }
}

fn check(file: File, checker: &mut Checker<'_>) -> Option<Config> {
    let File { control, gateway, tests, vpcs, tunnels, services, pools, internet, bgp, links: sections } = file;
    checker.check(&control.socket, check_socket(control.socket.get_ref()));
    if !(1..=1024).contains(gateway.cores.get_ref()) {
        checker.error(&gateway.cores, format!("cores = {}; a pod has 1 to 1,024", gateway.cores.get_ref()));
    }
    let mut links = links::check(&gateway, &sections, checker);
    let addresses = gateway.addresses.get_ref();
    let of_family = |v4: bool| addresses.iter().filter(|a| a.is_ipv4() == v4).count();
    if addresses.is_empty() || of_family(true) > 1 || of_family(false) > 1 {
        checker.error(&gateway.addresses, "a gateway has one address of each family at most, and one at least");
    }
    if !(576..=9000).contains(gateway.mtu.get_ref()) {
        checker.error(&gateway.mtu, format!("mtu = {}; 576 to 9000 can be had", gateway.mtu.get_ref()));
    }
    let ring_entries = *gateway.ring_entries.get_ref();
    if !ring_entries.is_power_of_two() || !(64..=16_384).contains(&ring_entries) {
        checker.error(&gateway.ring_entries, format!("ring_entries = {ring_entries}; a power of two from 64 to 16384"));
    }
    let mac = mac(&gateway.mac, checker);
    let mut tables = Tables::new(addresses.clone(), mac, *gateway.mtu.get_ref(), fastrand::u64(..));
    tables.vpc_mac = gateway.vpc_mac.as_ref().map_or(mac, |text| self::mac(text, checker));
    let (on_link, router) = links::routes(&gateway, &sections);
    let on_link = Lpm::new(on_link.into_iter().map(|net| (net, ())));
    tables.on_link = on_link.unwrap_or_else(|net| {
        gateway.on_link.iter().for_each(|value| checker.error(value, format!("{net} twice")));
        Lpm::default()
    });
    tables.router = router;

    let sessions = sessions(&gateway, checker);
    let mut nat = NatConfig { pools: Vec::new(), cores: *gateway.cores.get_ref(), sessions, seed: fastrand::u64(..) };
    let mut pool_numbers = BTreeMap::new();
    for pool in &pools {
        let network = pool.vni.unwrap_or(INTERNET);
        if pool_numbers.insert(pool.name.get_ref().as_str(), (nat.pools.len() as u32, network)).is_some() {
            checker.error(&pool.name, "another pool has this name, too");
        }
        for address in pool.addresses.get_ref() {
            if tables.nat_addresses.insert((network, *address), ()).is_some() {
                checker.error(&pool.addresses, format!("{address} is in two pools"));
            }
        }
        nat.pools.push((network, pool.addresses.get_ref().clone()));
    }
    let mut tunnel_numbers = BTreeMap::new();
    for tunnel in &tunnels {
        let kind = match (tunnel.kind, tunnel.remote_vni, &tunnel.remote_mac, tunnel.key) {
            (TunnelName::Vxlan, Some(vni), Some(text), None) => {
                TunnelKind::Vxlan { vni, mac: self::mac(text, checker) }
            }
            (TunnelName::Gre, None, None, Some(key)) => TunnelKind::Gre { key },
            (TunnelName::Vxlan, ..) => {
                checker.error(&tunnel.name, "a VXLAN tunnel has remote_vni and remote_mac, and no key");
                continue;
            }
            (TunnelName::Gre, ..) => {
                checker.error(&tunnel.name, "a GRE tunnel has a key, and neither remote_vni nor remote_mac");
                continue;
            }
        };
        let number = tables.add_tunnel(Tunnel { vni: tunnel.vni, remote: tunnel.remote, kind });
        if tunnel_numbers.insert(tunnel.name.get_ref().as_str(), number).is_some() {
            checker.error(&tunnel.name, "another tunnel has this name, too");
        }
        if let Some(section) = &tunnel.keepalive {
            keepalive(section, number, tunnel.kind, &mut tables, checker);
        }
    }
    for section in &vpcs {
        vpc(section, &mut tables, &pool_numbers, &tunnel_numbers, checker);
    }
    for section in &services {
        let Some((pool, network)) = pool_numbers.get(section.pool.get_ref().as_str()) else {
            checker.error(&section.pool, "there is no [[pools]] of this name");
            continue;
        };
        if *network != section.backend_vni {
            checker.error(
                &section.pool,
                format!("the pool is not in VNI {}, where the backends are", section.backend_vni),
            );
        }
        if ![6, 17].contains(section.protocol.get_ref()) {
            checker.error(&section.protocol, "protocol is 6 (TCP) or 17 (UDP)");
        }
        if section.backends.get_ref().is_empty() {
            checker.error(&section.backends, "a service has a backend at least");
        }
        let list = section.backends.get_ref().iter().map(|b| (b.ip(), b.port())).collect();
        let backends = Backends { vni: section.backend_vni, pool: *pool, list };
        tables.services.insert((section.vni, section.address, *section.protocol.get_ref(), section.port), backends);
    }
    fib(&internet, &mut tables, checker);
    let via = |address: IpAddr| tables.on_link.lookup(address).map_or(tables.router, |()| Some(address));
    let tunnel_ends = tables.senders.keys().copied().chain(tables.tunnels.iter().map(|t| t.remote));
    let mut resolve: Vec<IpAddr> = tunnel_ends.filter_map(via).collect();
    resolve.extend(tables.next_hops.iter().map(|hop| hop.address));
    resolve.sort_unstable();
    resolve.dedup();
    bgp::check(bgp.as_ref(), &mut links, &sections, gateway.addresses.get_ref(), checker);
    Some(Config {
        drained: bgp.is_some_and(|bgp| bgp.drained),
        control: control.socket.into_inner(),
        metrics: control.metrics,
        pod: gateway.pod,
        cores: *gateway.cores.get_ref(),
        processors: gateway.processors,
        spin_ns: gateway.spin_us.saturating_mul(1000),
        log2_ring_entries: ring_entries.ilog2() as u8,
        tests,
        links,
        tables,
        tunnels: tunnels.into_iter().map(|tunnel| tunnel.name.into_inner()).collect(),
        nat,
        resolve,
    })
}

fn keepalive(
    section: &Spanned<KeepaliveSection>,
    tunnel: u32,
    kind: TunnelName,
    tables: &mut Tables,
    checker: &mut Checker<'_>,
) {
    let KeepaliveSection { interval_s, retries } = *section.get_ref();
    if kind != TunnelName::Gre {
        checker.error(section, "keepalive: only GRE tunnels have keepalives");
    } else if interval_s == 0 || retries == 0 {
        checker.error(section, "keepalive: interval_s and retries are at least 1");
    }
    let interval_ns = u64::from(interval_s) * 1_000_000_000;
    tables.set_keepalive(tunnel, Keepalive { interval_ns, retries: retries.into() });
}

/// Maximum number of NAT sessions of the whole pod.
fn sessions(gateway: &Gateway, checker: &mut Checker<'_>) -> u32 {
    let cores = u32::from(*gateway.cores.get_ref());
    if let Some(each) = &gateway.sessions_per_core {
        let total = each.get_ref().saturating_mul(cores).clamp(1, SESSIONS_MAX);
        checker.error(
            each,
            format!(
                "sessions_per_core: all cores share one table now; use sessions = {total}, which is the pod's total"
            ),
        );
    }
    let Some(sessions) = &gateway.sessions else {
        return SESSIONS_OF_A_CORE.saturating_mul(cores).clamp(1, SESSIONS_MAX);
    };
    if !(1..=SESSIONS_MAX).contains(sessions.get_ref()) {
        checker.error(sessions, format!("sessions = {}; 1 to {SESSIONS_MAX}", sessions.get_ref()));
    }
    *sessions.get_ref()
}

fn vpc(
    section: &VpcSection,
    tables: &mut Tables,
    pools: &BTreeMap<&str, (u32, u32)>,
    tunnels: &BTreeMap<&str, u32>,
    checker: &mut Checker<'_>,
) {
    let vni = *section.vni.get_ref();
    if !(1..=0xff_ffff).contains(&vni) {
        checker.error(&section.vni, "a VNI is 1 to 16777215");
    }
    let mut routes = Vec::new();
    for route in &section.routes {
        let text = route.to.get_ref().as_str();
        let to = match text.split_once(':') {
            None if text == "local" => Some(Route::Local),
            None if text == "internet" => Some(Route::Internet),
            None if text == "blackhole" => Some(Route::Blackhole),
            Some(("peer", vni)) => vni.parse().ok().map(Route::Peer),
            Some(("idc", name)) => tunnels.get(name).map(|number| Route::Idc(*number)),
            _ => None,
        };
        match to {
            Some(to) => routes.push((*route.prefix.get_ref(), to)),
            None => checker.error(
                &route.to,
                format!("{text:?} is none of local, internet, blackhole, peer:VNI and idc:NAME of a [[tunnels]]"),
            ),
        }
    }
    let snat = section.snat.as_ref().and_then(|name| match pools.get(name.get_ref().as_str()) {
        Some((number, INTERNET)) => Some(*number),
        Some(_) => {
            checker.error(name, "this pool is not of the Internet: it has a vni");
            None
        }
        None => {
            checker.error(name, "there is no [[pools]] of this name");
            None
        }
    });
    for host in &section.hosts {
        let mac = mac(&host.mac, checker);
        tables.add_host(vni, host.address, Host { vtep: host.vtep, mac });
    }
    for eip in &section.eips {
        if tables.eip_owners.contains_key(eip.public.get_ref()) {
            checker.error(&eip.public, "this public address is given twice");
        }
        tables.add_eip(vni, eip.private, *eip.public.get_ref());
    }
    let port = |port: Option<u16>| port.map_or(0..=u16::MAX, |port| port..=port);
    let acl = section.acl.as_ref().map(|rules| {
        Classifier::new(rules.iter().map(|rule| {
            let pattern = Pattern {
                src: rule.from,
                dst: rule.to,
                protocol: rule.protocol,
                src_ports: port(rule.from_port),
                dst_ports: port(rule.to_port),
            };
            (pattern, rule.allow)
        }))
    });
    let routes = Lpm::new(routes).unwrap_or_else(|net| {
        checker.error(&section.vni, format!("two routes to {net}"));
        Lpm::default()
    });
    let rate = section.internet_bytes_per_second.map(|rate| Rate { per_second: rate, burst: (rate / 10).max(65_535) });
    let meter = rate.map(|rate| tables.new_meter(rate));
    let vpc = Vpc { routes, acl, meter, snat, routers: section.routers.clone() };
    if tables.vpcs.insert(vni, vpc).is_some() {
        checker.error(&section.vni, "another VPC has this VNI, too");
    }
}

fn fib(routes: &[InternetRoute], tables: &mut Tables, checker: &mut Checker<'_>) {
    let mut v6 = Vec::new();
    for route in routes {
        let hop = NextHop { address: route.next_hop };
        let number = tables.next_hops.iter().position(|known| *known == hop).unwrap_or_else(|| {
            tables.next_hops.push(hop);
            tables.next_hops.len() - 1
        }) as u32;
        match *route.prefix.get_ref() {
            IpNet::V4(net) => {
                let fib = tables.fib4.get_or_insert_with(|| Dir24::new(FIB_GROUPS, fastrand::u64(..)));
                checker.check(&route.prefix, fib.insert(net, number));
            }
            IpNet::V6(net) => v6.push((IpNet::V6(net), number)),
        }
    }
    tables.fib6 = Lpm::new(v6).unwrap_or_else(|net| {
        checker.general(format!("two [[internet]] routes to {net}"));
        Lpm::default()
    });
}

fn mac(text: &Spanned<String>, checker: &mut Checker<'_>) -> Mac {
    let mac = text.get_ref().parse::<Mac>();
    checker.check(text, mac).unwrap_or(Mac::ZERO)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"[control]
socket = "/run/bifrost/gw.sock"
[gateway]
pod = 1
cores = 2
interfaces = ["/run/bifrost/vpc.sock"]
addresses = ["10.0.0.1", "fd00::1"]
mac = "02:00:00:00:00:01"
on_link = ["10.0.0.0/24"]
router = "10.0.0.254"
[[pools]]
name = "nat"
addresses = ["203.0.113.1"]
[[tunnels]]
name = "office"
vni = 100
remote = "172.16.0.1"
kind = "gre"
key = 7
[[vpcs]]
vni = 100
snat = "nat"
routes = [
  { prefix = "192.168.0.0/24", to = "local" },
  { prefix = "10.9.0.0/16", to = "idc:office" },
  { prefix = "0.0.0.0/0", to = "internet" },
]
hosts = [{ address = "192.168.0.1", mac = "02:00:00:00:01:01", vtep = "10.0.0.11" }]
[[internet]]
prefix = "0.0.0.0/0"
next_hop = "10.0.0.253"
"#;

    fn load(text: &str) -> Result<Config, String> {
        file::load_text(text, Config::load)
    }

    #[test]
    fn a_good_file() {
        let config = load(GOOD).unwrap();
        let resolve: Vec<String> = config.resolve.iter().map(ToString::to_string).collect();
        // The host, the ISP's router, and the next hop to the customer's router.
        assert_eq!(resolve, ["10.0.0.11", "10.0.0.253", "10.0.0.254"]);
        assert_eq!(config.tables.vpcs[&100].snat, Some(0));
        assert_eq!(config.nat.sessions, 131_072);
        assert_eq!(config.tables.tunnel_state(0, 0).silence_ns, None);
        let config = load(&GOOD.replace("key = 7", "key = 7\nkeepalive = { interval_s = 10 }")).unwrap();
        assert_eq!((config.tunnels, config.tables.tunnel_state(0, 0).silence_ns), (vec!["office".to_owned()], Some(0)));
        let config = load(&GOOD.replace("cores = 2", "cores = 2\nsessions = 1000000")).unwrap();
        assert_eq!(config.nat.sessions, 1_000_000);
        assert_eq!(config.tables.vpc_mac, config.tables.mac);
        let config = load(&GOOD.replace("cores = 2", "cores = 2\nvpc_mac = \"02:00:00:00:00:fe\"")).unwrap();
        assert_eq!([config.tables.vpc_mac, config.tables.mac].map(|mac| mac.0[5]), [0xfe, 1]);
    }

    #[test]
    fn errors_name_their_lines() {
        for (from, to, error) in [
            ("cores = 2", "cores = 0", "5: cores = 0; a pod has 1 to 1,024"),
            ("cores = 2", "cores = 2\nring_entries = 1000", "6: ring_entries = 1000; a power of two from 64 to 16384"),
            ("cores = 2", "cores = 2\nsessions = 0", "6: sessions = 0; 1 to 16777216"),
            (
                "cores = 2",
                "cores = 2\nsessions_per_core = 1000",
                "6: sessions_per_core: all cores share one table now; use sessions = 2000",
            ),
            ("02:00:00:00:00:01", "02:00", "8: "),
            ("cores = 2", "cores = 2\nvpc_mac = \"02:00\"", "6: "),
            ("snat = \"nat\"", "snat = \"x\"", "22: there is no [[pools]] of this name"),
            ("idc:office", "idc:home", "25: \"idc:home\" is none of"),
            ("key = 7", "remote_vni = 7", "15: a GRE tunnel has a key"),
            (
                "key = 7",
                "key = 7\nkeepalive = { interval_s = 0 }",
                "20: keepalive: interval_s and retries are at least 1",
            ),
            ("key = 7", "key = 7\nkeepalive = { interval_s = 10, retry = 1 }", "20: unknown field `retry`"),
            ("10.9.0.0/16", "192.168.0.0/24", "21: two routes to 192.168.0.0/24"),
            ("10.9.0.0/16", "10.9.0.0/160", "25: invalid"),
        ] {
            let found = load(&GOOD.replace(from, to)).unwrap_err();
            assert!(found.starts_with(error), "{found}");
        }
    }
}
