//! Hosts, links and guests, built from network namespaces.
//!
//! A host is a namespace with `paths` underlay links `u0`, `u1`, ...; a guest (a container) is a namespace with one
//! interface `eth0`. The [`Mode`](crate::options::Mode) joins the two: see [`overlay`].
//!
//! | addresses | |
//! |---|---|
//! | `172.29.0.h/32` | host `h`'s own address, on its loopback, reached over all links by ECMP |
//! | `172.31.k.h/24` | host `h` on link `k`, cabling `paths` |
//! | `172.30.n.2/24` | host `h` on link `k`, cabling `fabric`; the router has `.1`; `n = 8 (h - 1) + k` |
//! | `10.0.0.h/24` | the guest of host `h` |

pub mod marker;
pub mod multipath_tcp;
pub mod overlay;
pub mod shape;
pub mod tenants;

use std::net::Ipv4Addr;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::command;
use crate::netns::Namespace;
use crate::options::Cabling;
use crate::state::Run;

/// MTU of the underlay links, bytes, unless guests have another MTU than [`GUEST_MTU`].
pub const UNDERLAY_MTU: u32 = 1600;
/// MTU of the guests' interfaces, bytes, unless an experiment chooses another one.
pub const GUEST_MTU: u32 = 1500;

/// What to build.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// Number of hosts, 2..=8, each with one guest.
    pub hosts: u8,
    /// Underlay links of every host, 1..=8.
    pub paths: u8,
    /// How the hosts are cabled.
    pub cabling: Cabling,
    /// Whether every packet crosses the underlay as a separate frame (segmentation offloads and GRO off on the
    /// links), as on a cable: a drop is then one packet in every mode. GRO must be off because nftables sees packets
    /// after GRO.
    pub wire_packets: bool,
    /// Whether every host, guest included, has its own processor, like a real host. The work of one host then costs
    /// the other nothing, and the scheduler's migrations do not look like effects of the network. With fewer
    /// processors, hosts share them round-robin.
    pub own_processors: bool,
    /// Whether a kernel VXLAN device hashes every flow onto its own link, instead of using one link per processor.
    pub spread_flows: bool,
    /// Whether programs in guests use Multipath TCP.
    pub multipath_tcp: bool,
    /// MTU of the guests' interfaces, bytes.
    pub guest_mtu: u32,
}

impl Plan {
    /// MTU of the underlay links, bytes: the guests' MTU with room for encapsulation.
    pub fn underlay_mtu(&self) -> u32 {
        self.guest_mtu + (UNDERLAY_MTU - GUEST_MTU)
    }
}

/// The hosts of a run, their links and guests. Dropping it removes all of them.
#[derive(Debug)]
pub struct Topology {
    /// The plan it was built from.
    pub plan: Plan,
    /// The hosts, in order: `host-a`, `host-b`, ...
    pub hosts: Vec<Host>,
    /// The router, or the segments between more than two hosts.
    _middle: Option<Namespace>,
}

/// One host and its guest.
#[derive(Debug)]
pub struct Host {
    /// `host-a`, `host-b`, ...
    pub name: String,
    /// The host's namespace: underlay links, and kernel VXLAN device or `bifrostd`.
    pub namespace: Namespace,
    /// The container's namespace.
    pub guest: Guest,
    /// The address on the loopback, reached over all links.
    pub loopback: Ipv4Addr,
    /// The underlay addresses that a multipath transport uses: one per link, or only the loopback's behind a fabric.
    pub underlay: Vec<Ipv4Addr>,
}

/// Bytes that a link has carried since it was created, Ethernet headers included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Carried {
    /// Sent by the host.
    pub sent: u64,
    /// Received by the host.
    pub received: u64,
}

/// A container.
#[derive(Debug)]
pub struct Guest {
    /// Its namespace.
    pub namespace: Namespace,
    /// `guest-a`, `guest-b`, ...
    pub name: String,
    /// Address of `eth0`, /24.
    pub address: Ipv4Addr,
    /// MAC address of `eth0`.
    pub mac: String,
}

impl Guest {
    /// Creates the namespace of the guest of host number `host`, from 0; it has no device yet.
    pub(crate) fn create(
        run: &Run,
        name: String,
        address: Ipv4Addr,
        mac: String,
        host: u8,
        plan: Plan,
    ) -> Result<Self> {
        let mut namespace = Namespace::create(format!("{}-{name}", run.id()))?;
        pin(&mut namespace, host, plan);
        if plan.multipath_tcp {
            namespace.use_multipath_tcp();
        }
        keep_no_metrics(&namespace)?;
        Ok(Self { namespace, name, address, mac })
    }

    /// Lets the guest open thousands of connections a second without running out of ports.
    pub fn allow_many_connections(&self) -> Result<()> {
        let settings = [("net/ipv4/ip_local_port_range", "1024 65535"), ("net/ipv4/tcp_tw_reuse", "1")];
        self.namespace.write_sysctls(&settings)
    }
}

/// The name of underlay link `path` inside a host.
pub fn link_name(path: u8) -> String {
    format!("u{path}")
}

impl Topology {
    /// Builds hosts, links and guests; guests and links are not joined yet.
    pub fn build(run: &Run, plan: Plan) -> Result<Self> {
        ensure!((2..=8).contains(&plan.hosts), "{} hosts: the lab builds 2 to 8", plan.hosts);
        ensure!((1..=8).contains(&plan.paths), "{} paths: the lab builds 1 to 8", plan.paths);
        let mut hosts = Vec::new();
        for index in 0..plan.hosts {
            hosts.push(Host::create(run, index, plan)?);
        }
        let middle = match plan.cabling {
            Cabling::Paths if plan.hosts == 2 => {
                cable_directly(&hosts[0], &hosts[1], plan)?;
                None
            }
            Cabling::Paths => Some(cable_through_segments(run, &hosts, plan)?),
            Cabling::Fabric => Some(cable_through_router(run, &hosts, plan)?),
        };
        for host in &hosts {
            host.add_routes(&hosts, plan)?;
        }
        Ok(Self { plan, hosts, _middle: middle })
    }
}

impl Host {
    fn create(run: &Run, index: u8, plan: Plan) -> Result<Self> {
        let letter = char::from(b'a' + index);
        let number = index + 1;
        let mut namespace = Namespace::create(format!("{}-host-{letter}", run.id()))?;
        // Packets for the loopback's address arrive on any link; strict reverse-path checks would drop them.
        namespace.write_sysctls(&[
            ("net/ipv4/conf/all/rp_filter", "0"),
            ("net/ipv4/conf/default/rp_filter", "0"),
            ("net/ipv4/fib_multipath_hash_policy", "1"),
        ])?;
        keep_no_metrics(&namespace)?;
        pin(&mut namespace, index, plan);
        let loopback = Ipv4Addr::new(172, 29, 0, number);
        namespace.ip_batch(&format!("addr add {loopback}/32 dev lo\n"))?;
        let underlay = match plan.cabling {
            Cabling::Paths => (0..plan.paths).map(|path| segment_address(path, number)).collect(),
            Cabling::Fabric => vec![loopback],
        };
        let (address, mac) = (Ipv4Addr::new(10, 0, 0, number), format!("02:00:00:00:00:{number:02x}"));
        let guest = Guest::create(run, format!("guest-{letter}"), address, mac, index, plan)?;
        Ok(Self { name: format!("host-{letter}"), namespace, guest, loopback, underlay })
    }

    /// Bytes that each of the first `paths` underlay links has carried.
    ///
    /// # Errors
    /// A link that does not exist.
    pub fn carried(&self, paths: u8) -> Result<Vec<Carried>> {
        let carried = |path| {
            let text = self.namespace.run("ip", &["-j", "-s", "link", "show", &link_name(path)], "")?;
            let parsed: Value = serde_json::from_str(&text).context("`ip -j -s link` printed no JSON")?;
            let bytes = |direction: &str| {
                parsed[0]["stats64"][direction]["bytes"].as_u64().context("`ip -j -s link` counts no bytes")
            };
            Ok(Carried { sent: bytes("tx")?, received: bytes("rx")? })
        };
        (0..paths).map(carried).collect()
    }

    /// Routes to the other hosts' loopback addresses, over all links at once.
    fn add_routes(&self, hosts: &[Host], plan: Plan) -> Result<()> {
        let mut batch = String::new();
        for other in hosts.iter().filter(|other| other.loopback != self.loopback) {
            batch += &format!("route add {}/32 src {}", other.loopback, self.loopback);
            for path in 0..plan.paths {
                let via = match plan.cabling {
                    Cabling::Paths => segment_address(path, number_of(other)),
                    Cabling::Fabric => router_address(path, number_of(self)),
                };
                batch += &format!(" nexthop via {via} dev {}", link_name(path));
            }
            batch.push('\n');
        }
        self.namespace.ip_batch(&batch)
    }
}

/// Pins a namespace of host number `host` to the host's processor.
fn pin(namespace: &mut Namespace, host: u8, plan: Plan) {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    if plan.own_processors && processors > 1 {
        namespace.pin(usize::from(host) % processors);
    }
}

/// Otherwise a connection inherits the slow-start threshold that an earlier, lossy one left behind.
fn keep_no_metrics(namespace: &Namespace) -> Result<()> {
    namespace.write_sysctls(&[("net/ipv4/tcp_no_metrics_save", "1")])
}

fn number_of(host: &Host) -> u8 {
    host.loopback.octets()[3]
}

fn segment_address(path: u8, host_number: u8) -> Ipv4Addr {
    Ipv4Addr::new(172, 31, path, host_number)
}

fn router_address(path: u8, host_number: u8) -> Ipv4Addr {
    Ipv4Addr::new(172, 30, 8 * (host_number - 1) + path, 1)
}

fn cable_directly(a: &Host, b: &Host, plan: Plan) -> Result<()> {
    for path in 0..plan.paths {
        let link = link_name(path);
        veth(&a.namespace, &link, &b.namespace, &link, plan)?;
        for host in [a, b] {
            let address = segment_address(path, number_of(host));
            host.namespace.ip_batch(&format!("addr add {address}/24 dev {link}\nlink set {link} up\n"))?;
        }
    }
    for host in [a, b] {
        set_offloads(&host.namespace, &links(plan), plan)?;
    }
    Ok(())
}

fn cable_through_segments(run: &Run, hosts: &[Host], plan: Plan) -> Result<Namespace> {
    let middle = Namespace::create(format!("{}-segments", run.id()))?;
    let mut ports = Vec::new();
    for path in 0..plan.paths {
        let link = link_name(path);
        middle.ip_batch(&format!(
            "link add br{path} type bridge mcast_snooping 0\nlink set br{path} mtu {} up\n",
            plan.underlay_mtu()
        ))?;
        for host in hosts {
            let port = format!("h{}u{path}", number_of(host));
            veth(&host.namespace, &link, &middle, &port, plan)?;
            let address = segment_address(path, number_of(host));
            host.namespace.ip_batch(&format!("addr add {address}/24 dev {link}\nlink set {link} up\n"))?;
            middle.ip_batch(&format!("link set {port} master br{path} up\n"))?;
            ports.push(port);
        }
    }
    set_offloads(&middle, &ports, plan)?;
    for host in hosts {
        set_offloads(&host.namespace, &links(plan), plan)?;
    }
    Ok(middle)
}

fn cable_through_router(run: &Run, hosts: &[Host], plan: Plan) -> Result<Namespace> {
    let router = Namespace::create(format!("{}-fabric", run.id()))?;
    router.write_sysctls(&[
        ("net/ipv4/ip_forward", "1"),
        ("net/ipv4/conf/all/rp_filter", "0"),
        ("net/ipv4/conf/default/rp_filter", "0"),
        ("net/ipv4/fib_multipath_hash_policy", "1"),
    ])?;
    let mut ports = Vec::new();
    for host in hosts {
        let mut route = format!("route add {}/32", host.loopback);
        for path in 0..plan.paths {
            let link = link_name(path);
            let port = format!("h{}u{path}", number_of(host));
            veth(&host.namespace, &link, &router, &port, plan)?;
            let near = router_address(path, number_of(host));
            let octets = near.octets();
            let far = Ipv4Addr::new(octets[0], octets[1], octets[2], 2);
            host.namespace.ip_batch(&format!("addr add {far}/24 dev {link}\nlink set {link} up\n"))?;
            router.ip_batch(&format!("addr add {near}/24 dev {port}\nlink set {port} up\n"))?;
            route += &format!(" nexthop via {far} dev {port}");
            ports.push(port);
        }
        router.ip_batch(&(route + "\n"))?;
        set_offloads(&host.namespace, &links(plan), plan)?;
    }
    set_offloads(&router, &ports, plan)?;
    Ok(router)
}

fn links(plan: Plan) -> Vec<String> {
    (0..plan.paths).map(link_name).collect()
}

fn veth(a: &Namespace, a_name: &str, b: &Namespace, b_name: &str, plan: Plan) -> Result<()> {
    // Both ends are created inside their namespaces: the lab's device names never exist in the machine's own
    // namespace.
    let (a, b, mtu) = (a.name(), b.name(), plan.underlay_mtu());
    let line = format!("link add {a_name} netns {a} mtu {mtu} type veth peer name {b_name} mtu {mtu} netns {b}\n");
    command::run_with_input("ip", &["-batch", "-"], &line)?;
    Ok(())
}

fn set_offloads(namespace: &Namespace, devices: &[String], plan: Plan) -> Result<()> {
    let state = if plan.wire_packets { "off" } else { "on" };
    let script: String = devices
        .iter()
        .map(|d| format!("ethtool -K {d} tso {state} gso {state} tx-udp-segmentation {state} gro {state} || exit 1\n"))
        .collect();
    namespace.run("sh", &["-e"], &script)?;
    Ok(())
}
