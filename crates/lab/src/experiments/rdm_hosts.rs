//! Two hosts on a lossy link, with `bifrost-perf` on both: shared by the experiments with messages over RDMA.

use std::fmt;
use std::net::Ipv4Addr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::lab::Lab;
use crate::netns::Namespace;
use crate::plot::Series;
use crate::process::Program;
use crate::{inject, interrupt};

/// MTU of the link: fits RoCEv2's largest packets, of 4096 bytes, and TCP segments of the same size.
pub(crate) const MTU: u32 = 4200;
/// Payload of a packet, as an argument of `bifrost-perf`.
const PAYLOAD: &str = "4096";
/// Address of the first host.
const CLIENT: &str = "fd00:d::1";
/// Address of the second host, which runs the server.
pub(crate) const SERVER: &str = "fd00:d::2";
/// The same, for IPv6.
pub(crate) const SERVER_V4: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
/// Loss of one packet in 256, percent.
pub(crate) const OFTEN: f64 = 100.0 / 256.0;
/// The TCP port of `bifrost-perf`'s server: the one after its setup port.
const TCP_PORT: &str = ":18516";
/// Timeout of a client.
const PATIENCE: Duration = Duration::from_secs(300);

/// The transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Transport {
    /// Messages of `bifrost-endpoint`.
    Messages,
    /// TCP with cubic.
    Cubic,
    /// TCP with BBR.
    Bbr,
    /// Messages of `bifrost-endpoint` over reliable connections, where the NIC retransmits.
    Rc,
}

impl Transport {
    /// All transports without RC.
    pub(crate) const ALL: [Transport; 3] = [Transport::Messages, Transport::Cubic, Transport::Bbr];
    /// All transports with RC, the paper's reference.
    pub(crate) const WITH_RC: [Transport; 4] = [Transport::Messages, Transport::Rc, Transport::Cubic, Transport::Bbr];

    pub(crate) fn is_tcp(self) -> bool {
        matches!(self, Transport::Cubic | Transport::Bbr)
    }

    /// TCP's congestion control, as in routes.
    pub(crate) fn congestion(self) -> Option<String> {
        self.is_tcp().then(|| self.to_string())
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Transport::Messages => "messages",
            Transport::Cubic => "cubic",
            Transport::Bbr => "bbr",
            Transport::Rc => "rc",
        })
    }
}

/// Two hosts, and a server on the second.
pub(crate) struct Bench {
    pub(crate) server: Program,
    // After the program in drop order: it ends before they are deleted.
    pub(crate) hosts: [Namespace; 2],
}

/// The lines of plots over these transports.
pub(crate) fn series() -> [(Series, Transport); 4] {
    [
        (Series::on("messages, UC"), Transport::Messages),
        (Series::fourth("messages, RC"), Transport::Rc),
        (Series::off("TCP, cubic"), Transport::Cubic),
        (Series::other("TCP, BBR"), Transport::Bbr),
    ]
}

/// Two hosts with a link between them, each on its own processor if there are two. `congestion` selects TCP's
/// congestion control.
pub(crate) fn create(lab: &Lab, congestion: Option<&str>) -> Result<[Namespace; 2]> {
    let id = lab.run.part()?.id().to_owned();
    let mut hosts = [Namespace::create(format!("{id}-a"))?, Namespace::create(format!("{id}-b"))?];
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    if !lab.options.share_processors && processors > 1 {
        hosts.iter_mut().enumerate().for_each(|(at, host)| host.pin(at));
    }
    let [a, b] = &hosts;
    a.ip_batch(&format!("link add e0 mtu {MTU} type veth peer name e0 mtu {MTU} netns {}\n", b.name()))?;
    for (at, host) in hosts.iter().enumerate() {
        host.write_sysctls(&[("net/ipv6/conf/all/disable_ipv6", "0"), ("net/ipv6/conf/e0/disable_ipv6", "0")])?;
        let (own, other) = (at + 1, 2 - at);
        // Static neighbour entries: a lost ARP or ND packet would be a pause that has nothing to do with the
        // transports.
        host.ip_batch(&format!(
            "link set e0 address 02:00:00:00:00:0{own} up\naddr add 10.0.0.{own}/24 dev e0\naddr add fd00:d::{own}/64 \
             dev e0 nodad\n\
             neigh replace 10.0.0.{other} lladdr 02:00:00:00:00:0{other} nud permanent dev e0\n\
             neigh replace fd00:d::{other} lladdr 02:00:00:00:00:0{other} nud permanent dev e0\n"
        ))?;
        // With offloads nftables would see, and drop, large packets before the kernel segments them.
        let off = ["-K", "e0", "tso", "off", "gso", "off", "gro", "off", "tx-udp-segmentation", "off"];
        host.run("ethtool", &off, "")?;
        if let Some(congestion) = congestion {
            host.ip_batch(&format!(
                "route replace 10.0.0.0/24 dev e0 congctl {congestion}\nroute replace fd00:d::/64 dev e0 congctl \
                 {congestion}\n"
            ))?;
        }
    }
    Ok(hosts)
}

impl Bench {
    /// Starts a server with `arguments` in addition to the usual ones.
    pub(crate) fn start(lab: &Lab, hosts: [Namespace; 2], arguments: &[&str], log: &Path) -> Result<Self> {
        let mut command = hosts[1].command(lab.binaries.perf()?);
        command.args(["server", "-b", SERVER, "-m", PAYLOAD]).args(arguments);
        let mut server = Program::start(command, "bifrost-perf", log)?;
        let mut tries = 0;
        while !hosts[1].run("ss", &["-Hltn"], "")?.contains(TCP_PORT) {
            server.check_alive()?;
            interrupt::sleep(Duration::from_millis(20))?;
            tries += 1;
            if tries > 250 {
                bail!("bifrost-perf does not listen: {}", server.output()?);
            }
        }
        Ok(Self { server, hosts })
    }

    /// Starts a client on the first host; it reports in JSON.
    pub(crate) fn client(&self, lab: &Lab, words: &[&str], logs: &Path, name: &str) -> Result<Program> {
        let mut command = self.hosts[0].command(lab.binaries.perf()?);
        command.args(words).args(["-b", CLIENT, "-m", PAYLOAD, "--json"]);
        Program::start(command, "bifrost-perf", &logs.join(format!("{name}.json")))
    }
}

/// Makes the link drop `percent` of the packets in each direction.
pub(crate) fn lose(hosts: &[Namespace; 2], percent: f64) -> Result<()> {
    hosts.iter().try_for_each(|host| inject::namespace_loss(host, "e0", percent))
}

/// Packets dropped since then.
pub(crate) fn dropped(hosts: &[Namespace; 2]) -> Result<u64> {
    hosts.iter().map(inject::namespace_drops).sum()
}

/// Starts one of several processes on a host, over messages or TCP; it reports in JSON.
pub(crate) fn start(
    lab: &Lab,
    hosts: &[Namespace; 2],
    host: usize,
    mode: Transport,
    words: &[&str],
    log: &Path,
) -> Result<Program> {
    let mut command = hosts[host].command(lab.binaries.perf()?);
    command.args(words).args(["-b", [CLIENT, SERVER][host], "-m", PAYLOAD, "--roce-port", "0", "--json"]);
    // Processes share a processor: a busy-polling one would take it from the others.
    command.args(["--spin", "0"]);
    match mode {
        Transport::Messages => {}
        Transport::Rc => drop(command.args(["-c", "rc"])),
        Transport::Cubic | Transport::Bbr => drop(command.arg("--tcp")),
    }
    Program::start(command, "bifrost-perf", log)
}

/// Waits for a client and parses its report.
pub(crate) fn finish(client: Program) -> Result<Value> {
    serde_json::from_str(&client.finish(PATIENCE)?).context("bifrost-perf printed no JSON")
}

/// A number in a report.
pub(crate) fn number(report: &Value, pointer: &str) -> Result<f64> {
    report.pointer(pointer).and_then(Value::as_f64).with_context(|| format!("no {pointer} in a report of bifrost-perf"))
}
