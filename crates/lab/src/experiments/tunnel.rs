//! One switch on one processor, a guest with a vhost-user port on the other, and an underlay link for tunnels.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use super::circle::{PROCESSORS, need_processors};
use crate::lab::Lab;
use crate::netns::Namespace;
use crate::process::Program;
use crate::programs::open_vswitch::{Datapath, OpenVswitch};
use crate::programs::testpmd::Testpmd;
use crate::topology::UNDERLAY_MTU;
use crate::{command, interrupt};

/// Addresses of the underlay link: the near end, and the peers at the far end.
pub(super) const NEAR_MAC: &str = "02:00:00:00:01:01";
pub(super) const FAR_MAC: &str = "02:00:00:00:01:02";
pub(super) const NEAR: &str = "172.31.0.1";
pub(super) const FAR: [&str; 2] = ["172.31.0.2", "172.31.0.3"];
/// MAC address of the guest in frames that `dpdk-testpmd` generates.
pub(super) const GUEST_MAC: &str = "00:01:02:03:04:00";
/// Descriptors of each ring.
const RING: u32 = 1024;
/// File name of the daemon's configuration, in the directory of logs.
pub(super) const CONFIGURATION: &str = "bifrostd.toml";
/// Time for a program to start.
const PATIENCE: Duration = Duration::from_secs(20);

/// The switch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Switch {
    /// Open vSwitch with DPDK.
    OvsDpdk,
    /// `bifrostd`, reliability off.
    Off,
}

impl Switch {
    pub(super) const ALL: [Switch; 2] = [Switch::OvsDpdk, Switch::Off];
}

impl fmt::Display for Switch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Switch::OvsDpdk => "ovs_dpdk",
            Switch::Off => "off",
        })
    }
}

/// Namespaces of the switch and of the guest.
pub(super) struct Bench {
    /// It has the near end of the underlay link, `u0`, and the far one, `u1`.
    pub(super) host: Namespace,
    guest: Namespace,
    directory: PathBuf,
}

impl Bench {
    /// Creates them, and applies the nftables `rules` to packets at the far end.
    pub(super) fn build(lab: &Lab, rules: &str) -> Result<Self> {
        need_processors()?;
        let mut host = Namespace::create(format!("{}-switch", lab.run.id()))?;
        host.pin(PROCESSORS[0]);
        let mut guest = Namespace::create(format!("{}-guest", lab.run.id()))?;
        guest.pin(PROCESSORS[1]);
        host.ip_batch(&format!(
            "link add u0 mtu {UNDERLAY_MTU} address {NEAR_MAC} type veth peer name u1 mtu {UNDERLAY_MTU} address \
             {FAR_MAC}\n\
             link set u0 up\nlink set u1 up\n"
        ))?;
        for device in ["u0", "u1"] {
            let off = ["-K", device, "tso", "off", "gso", "off", "gro", "off", "tx-udp-segmentation", "off"];
            host.run("ethtool", &off, "")?;
        }
        host.run("nft", &["-f", "-"], rules).context("making the far end of the underlay link")?;
        let directory = lab.run.directory().join("tunnel");
        let _ = std::fs::remove_dir_all(&directory);
        std::fs::create_dir_all(&directory).with_context(|| format!("creating {}", directory.display()))?;
        Ok(Self { host, guest, directory })
    }

    /// Starts a switch with one vhost-user port. Open vSwitch gets `flows`, where the port is 1 and the tunnels are 2
    /// and 3; `bifrostd` gets `more` in its configuration.
    pub(super) fn start(&self, lab: &Lab, mode: Switch, flows: &str, more: &More, logs: &Path) -> Result<Running> {
        std::fs::create_dir_all(logs).with_context(|| format!("creating {}", logs.display()))?;
        let mut running = match mode {
            Switch::OvsDpdk => Running::Ovs(self.open_vswitch(flows, &logs.join("ovs"))?),
            Switch::Off => self.bifrostd(lab, more, logs)?,
        };
        running.wait_for(&self.socket(), logs)?;
        Ok(running)
    }

    /// Starts the guest with `options`.
    pub(super) fn guest(&self, options: &[&str], logs: &Path) -> Result<Testpmd> {
        let device = format!("net_virtio_user0,path={},queue_size={RING},mac={GUEST_MAC}", self.socket().display());
        Testpmd::start_with(&self.guest, PROCESSORS[1], &[device], options, &logs.join("guest"))
    }

    fn socket(&self) -> PathBuf {
        self.directory.join("guest")
    }

    fn open_vswitch(&self, flows: &str, logs: &Path) -> Result<OpenVswitch> {
        let datapath = Datapath::Dpdk { processor: PROCESSORS[0], max_sleep_us: 0 };
        let switch = OpenVswitch::start(&self.host, datapath, self.directory.clone(), logs)?;
        switch.configure(&format!(
            "-- add-br under -- set bridge under datapath_type=netdev other-config:hwaddr={NEAR_MAC} \
             -- add-port under link -- set interface link type=dpdk options:dpdk-devargs=net_af_packet0,iface=u0 \
             -- add-br br0 -- set bridge br0 datapath_type=netdev fail_mode=secure \
             -- add-port br0 guest -- set interface guest ofport_request=1 type=dpdkvhostuser \
             -- add-port br0 vx0 -- set interface vx0 ofport_request=2 type=vxlan options:remote_ip={} options:key=100 \
             -- add-port br0 vx1 -- set interface vx1 ofport_request=3 type=vxlan options:remote_ip={} options:key=100",
            FAR[0], FAR[1]
        ))?;
        self.host.ip_batch(&format!("addr add {NEAR}/24 dev under\nlink set under up\n"))?;
        // It learns the address with a delay, and caches that a packet could not be sent before.
        let deadline = Instant::now() + PATIENCE;
        while switch.tell(&["ovs/route/lookup", FAR[0]]).is_err() {
            if Instant::now() > deadline {
                bail!("Open vSwitch has no route to {}; its output is in {}", FAR[0], logs.display());
            }
            interrupt::sleep(Duration::from_millis(100))?;
        }
        for far in FAR {
            switch.tell(&["tnl/neigh/set", "under", far, FAR_MAC])?;
        }
        switch.replace_flows("br0", flows)?;
        Ok(switch)
    }

    fn bifrostd(&self, lab: &Lab, more: &More, logs: &Path) -> Result<Running> {
        let neighbour = |far| format!("neigh add {far} lladdr {FAR_MAC} dev u0 nud permanent\n");
        self.host.ip_batch(&format!("addr add {NEAR}/24 dev u0\n{}", FAR.map(neighbour).concat()))?;
        self.configure(more, logs)?;
        Running::bifrostd(lab, &self.host, self.control(), logs)
    }

    fn control(&self) -> PathBuf {
        self.directory.join("control")
    }

    /// Writes the daemon's configuration: one port, and two peers at the far end of the link, `far0` and `far1`.
    pub(super) fn configure(&self, more: &More, logs: &Path) -> Result<()> {
        let More { sections, guest, port, routes } = more;
        let text = format!(
            "[host]\nname = \"host-a\"\n\n[control]\nsocket = \"{}\"\n\n[workers]\ncount = 1\n\n\
             [underlay]\naddresses = [\"{NEAR}\"]\nmtu = {UNDERLAY_MTU}\n\n{sections}[[vpc]]\nvni = 100\nreliability = \
             \"off\"\n\n\
             [[port]]\nname = \"guest\"\nkind = \"vhost-user\"\nsocket = \"{}\"\nvni = 100\nmac = \"{GUEST_MAC}\"\n\
             addresses = [\"{guest}/32\"]\n{port}\n[[peer]]\nname = \"far0\"\naddresses = [\"{}\"]\n\n\
             [[peer]]\nname = \"far1\"\naddresses = [\"{}\"]\n\n{routes}",
            self.control().display(),
            self.socket().display(),
            FAR[0],
            FAR[1],
        );
        let file = logs.join(CONFIGURATION);
        std::fs::write(&file, text).with_context(|| format!("writing {}", file.display()))
    }
}

/// Additions to a daemon's configuration.
#[derive(Debug, Clone, Default)]
pub(super) struct More {
    /// Sections before the network.
    pub(super) sections: String,
    /// The guest's address.
    pub(super) guest: &'static str,
    /// Lines in the section of the guest's port.
    pub(super) port: String,
    /// Routes.
    pub(super) routes: String,
}

/// A running switch.
pub(super) enum Running {
    Ovs(OpenVswitch),
    Bifrost { daemon: Program, control: PathBuf, ctl: PathBuf },
}

impl Running {
    /// Starts `bifrostd` with [`CONFIGURATION`] in `logs`, which names the control socket `control`.
    pub(super) fn bifrostd(lab: &Lab, host: &Namespace, control: PathBuf, logs: &Path) -> Result<Self> {
        let mut command = host.command(&lab.binaries.bifrostd);
        command.arg("--config").arg(logs.join(CONFIGURATION));
        let daemon = Program::start(command, "bifrostd", &logs.join("switch"))?;
        Ok(Running::Bifrost { daemon, control, ctl: lab.binaries.bifrostctl.clone() })
    }

    pub(super) fn check_alive(&mut self) -> Result<()> {
        match self {
            Running::Ovs(switch) => switch.check_alive(),
            Running::Bifrost { daemon, .. } => match daemon.try_wait()? {
                None => Ok(()),
                Some(status) => bail!("bifrostd ended ({status}): {}", daemon.output()?),
            },
        }
    }

    /// Waits until `socket` accepts connections.
    pub(super) fn wait_for(&mut self, socket: &Path, logs: &Path) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while !socket.exists() {
            self.check_alive()?;
            if Instant::now() > deadline {
                bail!("the switch does not listen; its output is in {}", logs.display());
            }
            interrupt::sleep(Duration::from_millis(20))?;
        }
        Ok(())
    }

    /// Makes Open vSwitch replace all flows, or `bifrostd` reload its configuration. Returns when the switch has
    /// applied the change.
    pub(super) fn change(&self, flows: &str) -> Result<()> {
        match self {
            Running::Ovs(switch) => switch.replace_flows("br0", flows),
            Running::Bifrost { .. } => self.ask(&["reload"]).map(drop),
        }
    }

    /// Number of conversations that it knows.
    pub(super) fn sessions(&self) -> Result<u64> {
        let text = match self {
            Running::Ovs(switch) => switch.tell(&["dpctl/ct-get-nconns"])?,
            Running::Bifrost { .. } => self.counter("avs.current_sessions")?.to_string(),
        };
        text.trim().parse().with_context(|| format!("not a number of conversations: {text:?}"))
    }

    /// One of `bifrostd`'s counters.
    pub(super) fn counter(&self, name: &str) -> Result<serde_json::Value> {
        let answer: serde_json::Value = serde_json::from_str(&self.ask(&["--json", "stats"])?)?;
        Ok(answer["counters"][name].clone())
    }

    /// Output of `bifrostctl`.
    fn ask(&self, arguments: &[&str]) -> Result<String> {
        let Running::Bifrost { control, ctl, .. } = self else { bail!("the switch is not bifrostd") };
        let socket = control.to_string_lossy();
        command::run(&ctl.to_string_lossy(), &[&["--socket", &*socket], arguments].concat())
    }
}
