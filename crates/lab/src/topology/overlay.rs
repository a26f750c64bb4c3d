//! The network that joins the guests over the underlay: kernel VXLAN devices, Open vSwitch, or `bifrostd`.

use std::os::unix::fs::symlink;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::daemon::{Binaries, Daemon, LISTENING, Reliability, Settings, VNI, machine_socket};
use crate::options::{Cabling, Guests, Mode};
use crate::programs::open_vswitch::{Datapath, OpenVswitch};
use crate::programs::path_prober::PathProbers;
use crate::state::Run;
use crate::topology::{Guest, Host, Topology, multipath_tcp};

/// The kernel caches one route per VXLAN remote and processor, so it would send all flows over the link of the first
/// flow. Packets with a mark are routed individually: each flow then takes the link of its own hash.
const SPREAD_FLOWS: &str = "table netdev bifrost_lab_spread {\n chain spread {\n \
     type filter hook ingress device p0 priority 0\n meta mark set 1\n }\n}\n";

/// How long Open vSwitch's DPDK may sleep, µs: its guest shares the processor, and would get little of it beside a
/// thread that only polls.
const MAX_SLEEP_US: u32 = 50;

/// A running overlay. Dropping it ends its daemons; the kernel's devices are removed with their namespaces.
#[derive(Debug)]
pub struct Overlay {
    /// The mode.
    pub mode: Mode,
    /// Probes the paths, in mode `probe_switch`; dropped before the daemons that it controls.
    probers: Option<PathProbers>,
    /// One daemon per host, in the hosts' order; empty with another switch.
    pub daemons: Vec<Daemon>,
    /// The hosts' Open vSwitches; empty in other modes.
    pub open_vswitches: Vec<OpenVswitch>,
}

impl Overlay {
    /// Joins the guests of `topology` in one network, and returns once they can reach each other.
    pub fn start(
        run: &Run,
        topology: &Topology,
        mode: Mode,
        settings: &Settings,
        binaries: &Binaries,
        logs: &Path,
    ) -> Result<Self> {
        let mut open_vswitches = Vec::new();
        let daemons = match mode {
            Mode::OpenVswitch => {
                ensure!(topology.plan.cabling == Cabling::Paths, "Open vSwitch needs --cabling paths");
                for host in &topology.hosts {
                    let directory = run.directory().join(format!("{}.ovs", host.name));
                    let logs = logs.join(&host.name);
                    let (datapath, socket) = match settings.guests {
                        Guests::Container => (Datapath::Userspace, None),
                        Guests::Vm => {
                            let processor = host.namespace.processor().unwrap_or(0);
                            (
                                Datapath::Dpdk { processor, max_sleep_us: MAX_SLEEP_US },
                                Some(machine_socket(run, &host.guest)),
                            )
                        }
                    };
                    let switch = OpenVswitch::start(&host.namespace, datapath, directory, &logs)?;
                    add_bridges(&switch, host, topology, settings.security_groups, socket.as_deref())?;
                    open_vswitches.push(switch);
                }
                Vec::new()
            }
            Mode::KernelVxlan | Mode::KernelBbr | Mode::Mptcp => {
                ensure!(settings.guests == Guests::Container, "a kernel VXLAN device has no port for virtual machines");
                for host in &topology.hosts {
                    add_vxlan(host, topology)?;
                }
                Vec::new()
            }
            Mode::Off | Mode::ProbeSwitch => {
                Daemon::start_all(run, topology, Reliability::Off, settings, binaries, logs)?
            }
            Mode::Flowlet => {
                let settings = Settings { flowlets: true, ..settings.clone() };
                Daemon::start_all(run, topology, Reliability::Off, &settings, binaries, logs)?
            }
            Mode::Strict => {
                let settings = settings.or_as_in_the_paper();
                Daemon::start_all(run, topology, Reliability::Tcp, &settings, binaries, logs)?
            }
            Mode::Bifrost => Daemon::start_all(run, topology, Reliability::Tcp, settings, binaries, logs)?,
            Mode::BifrostXdp => {
                let settings = Settings { af_xdp: true, ..settings.clone() };
                Daemon::start_all(run, topology, Reliability::Tcp, &settings, binaries, logs)?
            }
        };
        if settings.guests == Guests::Container {
            let algorithm = if mode == Mode::KernelBbr { "bbr" } else { "cubic" };
            for host in &topology.hosts {
                choose_congestion_control(&host.guest, algorithm)?;
            }
        }
        if mode == Mode::Mptcp {
            multipath_tcp::set_up(topology)?;
        }
        let probers = match mode {
            Mode::ProbeSwitch => Some(PathProbers::start(topology, &daemons, logs)?),
            _ => None,
        };
        Ok(Self { mode, probers, daemons, open_vswitches })
    }

    /// Returns an error if a switch has ended.
    pub fn check_alive(&mut self) -> Result<()> {
        self.daemons.iter_mut().try_for_each(Daemon::check_alive)?;
        self.probers.iter_mut().try_for_each(PathProbers::check_alive)?;
        self.open_vswitches.iter_mut().try_for_each(OpenVswitch::check_alive)
    }
}

/// Selects Cubic, or BBR where a mode asks for it. Most guests use Cubic; another default of this machine would
/// distort the results (BBR, for example, all but stops for 200 ms every ten seconds to measure its minimum RTT). Set
/// per route, because a namespace cannot change its default.
pub(crate) fn choose_congestion_control(guest: &Guest, algorithm: &str) -> Result<()> {
    let octets = guest.address.octets();
    let batch = format!(
        "route change {}.{}.{}.0/24 dev eth0 proto kernel scope link src {} congctl {algorithm}\n",
        octets[0], octets[1], octets[2], guest.address
    );
    guest.namespace.ip_batch(&batch).with_context(|| {
        let name = guest.namespace.name();
        format!("choosing {algorithm} in {name}: does the kernel have it? (`modprobe tcp_{algorithm}` loads it)")
    })
}

/// A bridge with the VXLAN device and the guest's veth. FDB and neighbour entries are static, because a lost ARP
/// packet would show up as a second of TCP latency.
fn add_vxlan(host: &Host, topology: &Topology) -> Result<()> {
    let Topology { plan, hosts, .. } = topology;
    let (guest, mtu) = (&host.guest, plan.guest_mtu);
    let mut batch = format!(
        "link add br0 type bridge mcast_snooping 0\n\
         link set br0 up\n\
         link add vx0 mtu {mtu} type vxlan id {VNI} local {local} dstport 4789 nolearning\n\
         link set vx0 master br0 up\n\
         link add p0 mtu {mtu} type veth peer name eth0 mtu {mtu} address {mac} netns {netns}\n\
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
    if plan.spread_flows {
        host.namespace.run("nft", &["-f", "-"], SPREAD_FLOWS).context("marking the guest's packets")?;
    }
    guest.namespace.ip_batch(&guest_batch)
}

/// Follows Open vSwitch's guide for userspace tunnels: a bridge for the guest and the tunnels, and one for the
/// underlay link with the host's address. One link only, because its tunnels do not support ECMP. The guest is a
/// container, or a machine whose vhost-user socket is at `socket`.
fn add_bridges(
    switch: &OpenVswitch,
    host: &Host,
    topology: &Topology,
    security_groups: bool,
    socket: Option<&Path>,
) -> Result<()> {
    let plan = topology.plan;
    let (guest, mtu, underlay_mtu) = (&host.guest, plan.guest_mtu, plan.underlay_mtu());
    host.namespace.ip_batch("addr flush dev u0\n")?;
    let port = match socket {
        Some(_) => format!("type=dpdkvhostuser mtu_request={mtu}"),
        None => {
            host.namespace.ip_batch(&format!(
                "link add p0 mtu {mtu} type veth peer name eth0 mtu {mtu} address {mac} netns {netns}\n\
                 link set p0 up\n",
                mac = guest.mac,
                netns = guest.namespace.name(),
            ))?;
            String::new()
        }
    };
    // The kernel drives the link in both cases: DPDK's packet sockets do not accept frames of more than 1,514 bytes.
    let mut words = format!(
        "-- add-br under -- set bridge under datapath_type=netdev -- add-port under u0 \
         -- add-br br0 -- set bridge br0 datapath_type=netdev fail_mode=secure \
         -- add-port br0 p0 -- set interface p0 ofport_request=1 {port}"
    );
    let mut forwarding = String::new();
    for (number, other) in (2..).zip(others(host, topology)) {
        let remote = other.underlay[0];
        words += &format!(
            " -- add-port br0 vx{number} -- set interface vx{number} type=vxlan ofport_request={number} \
             options:remote_ip={remote} options:key={VNI}"
        );
        forwarding += &format!("table=2,priority=10,dl_dst={},actions=output:{number}\n", other.guest.mac);
    }
    switch.configure(&words)?;
    let address = host.underlay[0];
    host.namespace
        .ip_batch(&format!("addr add {address}/24 dev under\nlink set under mtu {underlay_mtu} up\n"))
        .context("giving Open vSwitch's underlay bridge its address")?;
    forwarding += &format!("table=2,priority=10,dl_dst={},actions=output:1\n", guest.mac);
    switch.replace_flows("br0", &(admission(security_groups) + &forwarding))?;
    if let Some(socket) = socket {
        return symlink(switch.socket("p0"), socket).context("naming a machine's socket");
    }
    let mut guest_batch = format!("addr add {}/24 dev eth0\nlink set eth0 up\n", guest.address);
    for other in others(host, topology) {
        guest_batch +=
            &format!("neigh add {} lladdr {} dev eth0 nud permanent\n", other.guest.address, other.guest.mac);
    }
    guest.namespace.ip_batch(&guest_batch)?;
    // Open vSwitch does not complete checksums that a guest leaves to its device.
    guest.namespace.run("ethtool", &["-K", "eth0", "tx", "off"], "")?;
    Ok(())
}

fn others<'a>(host: &Host, topology: &'a Topology) -> impl Iterator<Item = &'a Host> {
    let own = host.loopback;
    topology.hosts.iter().filter(move |other| other.loopback != own)
}

/// OpenFlow rules for admission: everything, or conversations that were allowed to begin.
fn admission(security_groups: bool) -> String {
    if !security_groups {
        return "table=0,actions=resubmit(,2)\n".to_owned();
    }
    let mut flows = "table=0,priority=5,arp,actions=resubmit(,2)\n\
                     table=0,priority=10,ip,actions=ct(table=1)\n\
                     table=1,priority=20,ip,ct_state=+trk+est,actions=resubmit(,2)\n\
                     table=1,priority=20,ip,ct_state=+trk+rel,actions=resubmit(,2)\n\
                     table=1,priority=10,ip,in_port=1,ct_state=+trk+new,actions=ct(commit),resubmit(,2)\n\
                     table=1,priority=10,icmp,ct_state=+trk+new,actions=ct(commit),resubmit(,2)\n"
        .to_owned();
    for port in LISTENING {
        flows += &format!(
            "table=1,priority=10,tcp,nw_src=10.0.0.0/24,tp_dst={port},ct_state=+trk+new,actions=ct(commit),resubmit(,2)\n"
        );
    }
    flows
}
