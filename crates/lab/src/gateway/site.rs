//! A host with a guest, a gateway, and an Internet server on one network, with packet loss between host and gateway.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use super::programs::Daemon;
use crate::inject;
use crate::interrupt;
use crate::lab::Lab;
use crate::netns::Namespace;

/// Time limit for the gateway to forward.
const PATIENCE: Duration = Duration::from_secs(20);
const UNDERLAY_MTU: u32 = 1600;
/// The server's address in the Internet.
const OUTSIDE: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);

/// A running site. Dropping it ends all programs and removes everything.
#[derive(Debug)]
pub struct Site {
    // The order matters: programs end before their namespaces are deleted.
    daemons: [Daemon; 3],
    /// The guest of the host.
    pub guest: Namespace,
    /// The server.
    pub server: Namespace,
    host: Namespace,
    wire: Namespace,
    _gateway: Namespace,
}

impl Site {
    /// Builds the site and returns once the guest reaches the server. `transport`: host and gateway use the transport
    /// between them. The host and its guest share one processor; everything else runs on another.
    ///
    /// # Errors
    /// A program is missing, or the gateway does not forward.
    pub fn start(lab: &Lab, label: &str, transport: bool) -> Result<Self> {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let create = |name: &str, processor: usize| -> Result<Namespace> {
            let mut namespace = Namespace::create(format!("{}-{label}-{name}", lab.run.id()))?;
            if !lab.options.share_processors && processors > 1 {
                namespace.pin(processor);
            }
            Ok(namespace)
        };
        let (host, guest) = (create("host", 0)?, create("guest", 0)?);
        let (wire, gateway, server) = (create("wire", 1)?, create("gateway", 1)?, create("server", 1)?);
        wire.ip_batch(&format!("link add br0 type bridge mcast_snooping 0\nlink set br0 mtu {UNDERLAY_MTU} up\n"))?;
        for (namespace, port, mtu) in
            [(&host, "to-host", UNDERLAY_MTU), (&gateway, "to-gateway", UNDERLAY_MTU), (&server, "to-server", 1500)]
        {
            let name = wire.name();
            namespace.ip_batch(&format!(
                "link add u0 mtu {mtu} type veth peer name {port} mtu {UNDERLAY_MTU} netns {name}\nlink set u0 up\n"
            ))?;
            wire.ip_batch(&format!("link set {port} master br0 up\n"))?;
            // Every packet crosses the link as a separate frame with a checksum: the gateway, unlike a kernel,
            // neither completes checksums nor segments.
            for (namespace, device) in [(namespace, "u0"), (&wire, port)] {
                let words = "tx off tso off gso off gro off tx-udp-segmentation off".split(' ');
                let words: Vec<&str> = ["-K", device].into_iter().chain(words).collect();
                namespace.run("ethtool", &words, "")?;
            }
        }
        for end in [&guest, &server] {
            // Otherwise a connection would inherit the slow-start threshold that an earlier, lossy one left behind.
            end.write_sysctls(&[("net/ipv4/tcp_no_metrics_save", "1")])?;
        }
        host.ip_batch("addr add 10.0.0.11/24 dev u0\n")?;
        server.ip_batch(&format!(
            "addr add 10.0.0.9/24 dev u0\naddr add {OUTSIDE}/32 dev lo\nroute add 203.0.113.0/24 via 10.0.0.1 congctl \
             cubic\n"
        ))?;
        let logs = lab.logs(label);
        let start = |namespace: &Namespace, program: &str, text: &str| -> Result<Daemon> {
            let at = |name: &str| lab.run.directory().join(format!("{label}-{name}.sock"));
            let path = |path: &Path| path.display().to_string();
            let text = text
                .replace("CONTROL", &path(&at(program)))
                .replace("MEMIF", &path(&at("memif")))
                .replace("GUEST", guest.name());
            Daemon::start(lab, namespace, program, &text, at(program), &logs)
        };
        let (of_pipeline, peer) = if transport { (TRANSPORT, "auto") } else { ("", "plain") };
        let nicd = start(&gateway, "bifrost-nicd", &format!("{PIPELINE}{of_pipeline}"))?;
        let pod = start(&gateway, "bifrost-gw", POD)?;
        let bifrostd = start(&host, "bifrostd", &HOST.replace("KIND", peer))?;
        // Set explicitly, because the machine's default may differ.
        guest.ip_batch("route replace default via 192.168.0.254 dev eth0 congctl cubic\n")?;
        let mut site = Site { daemons: [nicd, pod, bifrostd], guest, server, host, wire, _gateway: gateway };
        site.wait_until_it_forwards(transport)?;
        Ok(site)
    }

    /// The address of a program on the server.
    pub fn address(port: u16) -> SocketAddrV4 {
        SocketAddrV4::new(OUTSIDE, port)
    }

    /// Drops `loss_percent` of the packets between host and gateway, in both directions. Replaces the previous
    /// setting; 0 removes it.
    ///
    /// # Errors
    /// nftables refuses.
    pub fn lose(&self, loss_percent: f64) -> Result<()> {
        inject::namespace_loss(&self.host, "u0", loss_percent)?;
        inject::namespace_loss(&self.wire, "to-host", loss_percent)
    }

    /// Packets dropped since [`lose`](Self::lose).
    ///
    /// # Errors
    /// The counters cannot be read.
    pub fn lost_packets(&self) -> Result<u64> {
        Ok(inject::namespace_drops(&self.host)? + inject::namespace_drops(&self.wire)?)
    }

    /// Frames that the gateway has carried over the transport, in both directions.
    ///
    /// # Errors
    /// The pipeline does not answer.
    pub fn carried_frames(&self) -> Result<u64> {
        let state = self.daemons[0].status()?;
        let host = &state["pods"][0]["transport"]["hosts"][0]["counters"];
        Ok(["rx_frames", "tx_frames"].iter().filter_map(|name| host[name].as_u64()).sum())
    }

    /// Returns an error if a program has ended.
    ///
    /// # Errors
    /// A program has ended.
    pub fn check(&mut self) -> Result<()> {
        self.daemons.iter_mut().try_for_each(Daemon::check_alive)
    }

    fn wait_until_it_forwards(&mut self, transport: bool) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        let is_reached = |guest: &Namespace| {
            // No program listens there: the server's kernel answers with an ICMP error, which proves that the path
            // works.
            let connect = || TcpStream::connect_timeout(&(OUTSIDE, 9).into(), Duration::from_secs(1));
            guest.enter(move || Ok(connect().is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)))
        };
        while !is_reached(&self.guest)? || transport && self.carried_frames()? == 0 {
            self.check()?;
            if Instant::now() > deadline {
                bail!(
                    "the guest does not reach the server: {}",
                    self.daemons[0].status().context("asking the pipeline")?
                );
            }
            interrupt::sleep(Duration::from_millis(50))?;
        }
        Ok(())
    }
}

const PIPELINE: &str = r#"control = { socket = "CONTROL" }
device = { name = "u0", mtu = 1600, frames = 4096 }
[[pods]]
name = "vpc"
number = 1
cores = 1
timeout_us = 100000
own = ["10.0.0.1"]
interfaces = [{ socket = "MEMIF" }]
"#;

const TRANSPORT: &str = r#"[pods.transport]
addresses = ["10.0.0.1"]
mac = "02:00:00:00:00:fe"
vnis = [100]
hosts = [["10.0.0.11"]]
"#;

const POD: &str = r#"control = { socket = "CONTROL" }
[gateway]
pod = 1
cores = 1
interfaces = ["MEMIF"]
addresses = ["10.0.0.1"]
mac = "02:00:00:00:00:fe"
mtu = 1600
on_link = ["10.0.0.0/24"]
[[pools]]
name = "nat"
addresses = ["203.0.113.1"]
[[vpcs]]
vni = 100
routers = ["192.168.0.254"]
snat = "nat"
routes = [{ prefix = "192.168.0.0/24", to = "local" }, { prefix = "0.0.0.0/0", to = "internet" }]
hosts = [{ address = "192.168.0.1", mac = "02:00:00:00:01:01", vtep = "10.0.0.11" }]
[[internet]]
prefix = "0.0.0.0/0"
next_hop = "10.0.0.9"
"#;

const HOST: &str = r#"[host]
name = "host"
[control]
socket = "CONTROL"
[underlay]
addresses = ["10.0.0.11"]
mtu = 1600
[[peer]]
name = "gateway"
addresses = ["10.0.0.1"]
transport = "KIND"
[[vpc]]
vni = 100
reliability = "tcp"
gateway = ["192.168.0.254"]
[[port]]
name = "guest"
vni = 100
mac = "02:00:00:00:01:01"
addresses = ["192.168.0.1/24"]
netns = "GUEST"
device = "eth0"
default_gateway = "192.168.0.254"
[[route]]
vni = 100
prefix = "0.0.0.0/0"
peer = "gateway"
mac = "02:00:00:00:00:fe"
"#;
