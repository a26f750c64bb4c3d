//! What joins guests and underlay: a kernel VXLAN device, or `bifrostd`.

use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::daemon::{Binaries, Daemon, Reliability, Settings};
use crate::options::{Guests, Mode};
use crate::state::Run;
use crate::topology::{GUEST_MTU, Host, Topology};

/// The VNI of the guests' network.
pub const VNI: u32 = 100;

/// The kernel remembers one route per VXLAN remote and processor, and would send all flows over the link that the first
/// one was hashed to. Packets with a mark are routed one by one: each flow then takes the link that its hash says.
const SPREAD_FLOWS: &str = "table netdev bifrost_lab_spread {\n chain spread {\n \
     type filter hook ingress device p0 priority 0\n meta mark set 1\n }\n}\n";

/// A running overlay. Dropping it ends its daemons; the kernel's devices go with their namespaces.
#[derive(Debug)]
pub struct Overlay {
    /// Which one it is.
    pub mode: Mode,
    /// One daemon per host, in the hosts' order; none with a kernel VXLAN.
    pub daemons: Vec<Daemon>,
}

impl Overlay {
    /// Joins the guests of `topology` in one network and returns once they can reach each other.
    pub fn start(
        run: &Run,
        topology: &Topology,
        mode: Mode,
        settings: &Settings,
        binaries: &Binaries,
        logs: &Path,
    ) -> Result<Self> {
        let daemons = match mode {
            Mode::KernelVxlan => {
                ensure!(settings.guests == Guests::Container, "a kernel VXLAN device has no port for virtual machines");
                for host in &topology.hosts {
                    add_vxlan(host, &topology.hosts, topology.plan.spread_flows)?;
                }
                Vec::new()
            }
            Mode::Off => Daemon::start_all(run, topology, Reliability::Off, settings, binaries, logs)?,
            Mode::Bifrost => Daemon::start_all(run, topology, Reliability::Tcp, settings, binaries, logs)?,
        };
        if settings.guests == Guests::Container {
            for host in &topology.hosts {
                use_cubic(host)?;
            }
        }
        Ok(Self { mode, daemons })
    }
}

/// Cubic, as most guests have it: another default of this machine would measure that (BBR, for one, all but stops for
/// 200 ms every ten seconds to find its smallest RTT). By route, for a namespace may not choose its default.
fn use_cubic(host: &Host) -> Result<()> {
    let guest = &host.guest;
    let octets = guest.address.octets();
    let batch = format!(
        "route change {}.{}.{}.0/24 dev eth0 proto kernel scope link src {} congctl cubic\n",
        octets[0], octets[1], octets[2], guest.address
    );
    guest.namespace.ip_batch(&batch).with_context(|| format!("choosing cubic in {}", guest.namespace.name()))
}

/// A bridge with the VXLAN device and the guest's veth. Forwarding entries and neighbours are static: a lost ARP packet
/// would otherwise show up as a second of TCP's latency.
fn add_vxlan(host: &Host, hosts: &[Host], spread_flows: bool) -> Result<()> {
    let guest = &host.guest;
    let mut batch = format!(
        "link add br0 type bridge mcast_snooping 0\n\
         link set br0 up\n\
         link add vx0 mtu {GUEST_MTU} type vxlan id {VNI} local {local} dstport 4789 nolearning\n\
         link set vx0 master br0 up\n\
         link add p0 mtu {GUEST_MTU} type veth peer name eth0 mtu {GUEST_MTU} address {mac} netns {netns}\n\
         link set p0 master br0 up\n",
        local = host.loopback,
        mac = guest.mac,
        netns = guest.namespace.name(),
    );
    let mut guest_batch = format!("addr add {}/24 dev eth0\nlink set eth0 up\n", guest.address);
    let mut forwarding = String::new();
    for other in hosts.iter().filter(|other| other.loopback != host.loopback) {
        let (mac, remote) = (&other.guest.mac, other.loopback);
        forwarding += &format!("fdb append 00:00:00:00:00:00 dev vx0 dst {remote}\n");
        forwarding += &format!("fdb add {mac} dev vx0 dst {remote}\n");
        forwarding += &format!("fdb add {mac} dev vx0 master static\n");
        guest_batch += &format!("neigh add {} lladdr {mac} dev eth0 nud permanent\n", other.guest.address);
    }
    batch.push('\n');
    host.namespace.ip_batch(&batch)?;
    host.namespace.run("bridge", &["-batch", "-"], &forwarding)?;
    if spread_flows {
        host.namespace.run("nft", &["-f", "-"], SPREAD_FLOWS).context("marking the guest's packets")?;
    }
    guest.namespace.ip_batch(&guest_batch)
}
