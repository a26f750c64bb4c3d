//! A pod with four links behind two pipelines. Each link is a separate network with a switch (a bridge), to which the
//! pod, a proxy (FRR) and the router of the hosts (FRR; the kernel forwards) are connected.

use std::fmt::Write as _;
use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::frr::Frr;
use super::probes::Probes;
use super::programs::{self, Daemon};
use super::supervised::Supervised;
use super::trunk::{FlowLinks, Trunk, VLAN};
use super::until::until;
use crate::command;
use crate::lab::Lab;
use crate::netns::Namespace;

/// Number of links of the pod.
pub const LINKS: usize = 4;
/// Number of links behind a pipeline.
pub const OF_PIPELINE: usize = 2;
/// The address that the pod announces.
const VIP: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);

/// The network and its programs. Dropping it ends all programs and removes everything.
#[derive(Debug)]
pub struct Server {
    // The order matters: programs end before their namespaces are deleted.
    pod: Daemon,
    pipelines: Vec<Supervised>,
    _trunks: Vec<Trunk>,
    frrs: [Frr; 2],
    /// The link by which each flow of probes arrives.
    pub flows: Arc<FlowLinks>,
    hosts: [Namespace; 2],
    router: Namespace,
    /// The switches, a bridge for each link.
    wires: Namespace,
    _proxy: Namespace,
    _gateway: Namespace,
}

impl Server {
    /// Starts everything, and waits until packets arrive by all links.
    ///
    /// # Errors
    /// A program is missing, or the links do not come up.
    pub fn start(lab: &Lab, label: &str) -> Result<Self> {
        let directory = lab.run.directory().join(label);
        std::fs::create_dir_all(&directory)?;
        let logs = lab.logs(label);
        let create = |name: &str| Namespace::create(format!("{}-{label}-{name}", lab.run.id()));
        let (wires, router, proxy, gateway) =
            (create("wires")?, create("router")?, create("proxy")?, create("gateway")?);
        let hosts = [create("a")?, create("b")?];
        build(&wires, &router, &proxy, &gateway, &hosts)?;
        let ctl = lab.binaries.bifrostctl.display().to_string();
        let end = |end: &str, links: std::ops::Range<usize>| {
            let proxies: Vec<String> = links.clone().map(|link| format!("10.1.{link}.2")).collect();
            let site = format!(
                "gw bgp config {end} --asn 64512 --switch-asn 65000 --pods 10.1.{0}.0/24 --switch 10.1.{0}.254 \
                 --vips 10.0.0.0/24 --proxy {1}",
                links.start,
                proxies.join(",")
            );
            command::run(&ctl, &site.split_whitespace().collect::<Vec<_>>())
        };
        let of_router = end("switch", 0..LINKS)?;
        let of_proxy = (0..LINKS).map(|link| end("proxy", link..link + 1)).collect::<Result<Vec<_>>>()?;
        let frrs = [
            Frr::start(&router, &directory.join("router"), "router", &[of_router], &logs)?,
            Frr::start(&proxy, &directory.join("proxy"), "proxy", &of_proxy, &logs)?,
        ];
        let (flows, mut trunks, mut pipelines) = (Arc::new(FlowLinks::default()), Vec::new(), Vec::new());
        for pipeline in 0..LINKS / OF_PIPELINE {
            let ports = links_of(pipeline).map(|link| (link, format!("t{link}"))).collect();
            trunks.push(Trunk::start(&wires, format!("trunk{pipeline}"), ports, Arc::clone(&flows))?);
            let (file, socket) = (directory.join(format!("nicd{pipeline}.toml")), nicd_socket(&directory, pipeline));
            std::fs::write(&file, pipeline_configuration(&directory, pipeline))?;
            let arguments = ["--config".to_owned(), file.display().to_string()];
            let log = logs.join(format!("bifrost-nicd-{pipeline}.log"));
            let nicd = lab.binaries.gateway("bifrost-nicd")?;
            pipelines.push(Supervised::start(&gateway, nicd, &arguments, &log)?);
            until("the pipeline answers", || Ok(programs::state(&socket).ok()))?;
        }
        let socket = directory.join("gw.sock");
        let text = pod_configuration(&directory);
        let pod = Daemon::start(lab, &gateway, "bifrost-gw", &text, socket, &logs)?;
        let server = Server {
            pod,
            pipelines,
            _trunks: trunks,
            frrs,
            flows,
            hosts,
            router,
            wires,
            _proxy: proxy,
            _gateway: gateway,
        };
        server.until_links(&(0..LINKS).collect::<Vec<_>>())?;
        Ok(server)
    }

    /// Waits until the router sends packets by exactly these links, and the pod reports exactly them as up. If these
    /// are all links, also waits until the proxy and the router have all their sessions.
    ///
    /// # Errors
    /// Timeout.
    pub fn until_links(&self, links: &[usize]) -> Result<()> {
        until("the links", || Ok((self.links().is_ok_and(|up| up == links)).then_some(())))?;
        if links.len() < LINKS {
            return Ok(());
        }
        until("all sessions", || {
            // The proxy has a session with the pod and with the router on each link.
            let sessions = |frr: &Frr, wanted: usize| frr.sessions().is_ok_and(|sessions| sessions == wanted);
            Ok((sessions(&self.frrs[0], LINKS) && sessions(&self.frrs[1], 2 * LINKS)).then_some(()))
        })
    }

    /// Sets a device of the switches up or down.
    ///
    /// # Errors
    /// There is no device with this name.
    pub fn set_device(&self, device: &str, up: bool) -> Result<()> {
        self.wires.ip_batch(&format!("link set {device} {}\n", if up { "up" } else { "down" }))
    }

    /// The process of a pipeline, which restarts when it has ended.
    pub fn pipeline(&self, number: usize) -> &Supervised {
        &self.pipelines[number]
    }

    /// Sends probes from one host through the pod to the other, until they are stopped.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn probe(&self, per_second: u32) -> Result<Probes> {
        Probes::start(&self.hosts, VIP, per_second)
    }

    /// The links to which the router sends packets. Returns an error unless they are those that the pod reports as up.
    fn links(&self) -> Result<Vec<usize>> {
        let routes = command::run("ip", &["-n", self.router.name(), "-j", "route"])?;
        let routes: Value = serde_json::from_str(&routes)?;
        let routes = routes.as_array().context("a list of routes")?;
        let route = routes.iter().find(|route| route["dst"] == VIP.to_string()).context("no route")?;
        let hops = route["nexthops"].as_array().cloned().unwrap_or_else(|| vec![route.clone()]);
        let pod = self.pod.status()?;
        let is_hop = |link: &usize| hops.iter().any(|hop| hop["gateway"] == format!("10.1.{link}.11"));
        let is_up = |link: &usize| pod["links"][*link]["state"] == "up";
        let (hops, up): (Vec<_>, Vec<_>) = ((0..LINKS).filter(is_hop).collect(), (0..LINKS).filter(is_up).collect());
        anyhow::ensure!(hops == up, "the router sends to links {hops:?}, and {up:?} are up");
        Ok(up)
    }
}

/// The links behind a pipeline.
pub fn links_of(pipeline: usize) -> std::ops::Range<usize> {
    OF_PIPELINE * pipeline..OF_PIPELINE * (pipeline + 1)
}

fn build(
    wires: &Namespace,
    router: &Namespace,
    proxy: &Namespace,
    gateway: &Namespace,
    hosts: &[Namespace; 2],
) -> Result<()> {
    router.write_sysctls(&[
        ("net/ipv4/ip_forward", "1"),
        ("net/ipv4/conf/all/rp_filter", "0"),
        ("net/ipv4/fib_multipath_hash_policy", "1"),
    ])?;
    let connect = |end: &Namespace, device: &str, other: &Namespace, port: &str| -> Result<()> {
        end.ip_batch(&format!(
            "link add {device} mtu 1600 type veth peer name {port} mtu 1600 netns {}\nlink set {device} up addrgenmode \
             none\n",
            other.name()
        ))?;
        other.ip_batch(&format!("link set {port} up addrgenmode none\n"))?;
        // The gateway drops packets with incomplete checksums.
        for (namespace, device) in [(end, device), (other, port)] {
            namespace.run("ethtool", &["-K", device, "tx", "off"], "")?;
        }
        Ok(())
    };
    for link in 0..LINKS {
        wires.ip_batch(&format!("link add br{link} type bridge mcast_snooping 0\nlink set br{link} up\n"))?;
        connect(router, &format!("u{link}"), wires, &format!("r{link}"))?;
        connect(proxy, &format!("u{link}"), wires, &format!("p{link}"))?;
        // Connects the pod's port of the link to the trunk.
        connect(wires, &format!("l{link}"), wires, &format!("t{link}"))?;
        router.ip_batch(&format!("addr add 10.1.{link}.254/24 dev u{link}\n"))?;
        proxy.ip_batch(&format!("addr add 10.1.{link}.2/24 dev u{link}\n"))?;
        for port in ["r", "p", "l"] {
            wires.ip_batch(&format!("link set {port}{link} master br{link}\n"))?;
        }
    }
    for pipeline in 0..LINKS / OF_PIPELINE {
        connect(gateway, &format!("gw{pipeline}"), wires, &format!("trunk{pipeline}"))?;
    }
    for (host, (network, last)) in hosts.iter().zip([(2, 11), (3, 12)]) {
        connect(host, "u0", router, &format!("host{network}"))?;
        router.ip_batch(&format!("addr add 10.{network}.0.254/24 dev host{network}\n"))?;
        host.ip_batch(&format!(
            "addr add 10.{network}.0.{last}/24 dev u0\nroute add default via 10.{network}.0.254\n"
        ))?;
    }
    Ok(())
}

fn nicd_socket(directory: &Path, pipeline: usize) -> std::path::PathBuf {
    directory.join(format!("nicd{pipeline}.sock"))
}

fn memif(directory: &Path, link: usize) -> std::path::PathBuf {
    directory.join(format!("link{link}.sock"))
}

fn pipeline_configuration(directory: &Path, pipeline: usize) -> String {
    let own: String = links_of(pipeline).map(|link| format!("\"10.1.{link}.11\", ")).collect();
    let interfaces = links_of(pipeline)
        .map(|link| format!("{{ vlan = {}, socket = {:?} }}", usize::from(VLAN) + link, memif(directory, link)));
    format!(
        "control = {{ socket = {:?} }}\n\
         device = {{ name = \"gw{pipeline}\", mtu = 1600, mode = \"packet\", frames = 16384 }}\n\
         [[pods]]\nname = \"vpc\"\nnumber = 1\ncores = 1\ntimeout_us = 1000000\nown = [{own}\"{VIP}\"]\n\
         interfaces = [{}]\n",
        nicd_socket(directory, pipeline),
        interfaces.collect::<Vec<_>>().join(", "),
    )
}

fn pod_configuration(directory: &Path) -> String {
    let mut text = format!(
        r#"control = {{ socket = {:?} }}
[gateway]
pod = 1
cores = 1
mac = "02:00:00:00:01:11"
addresses = ["{VIP}"]
sessions = 1024
ring_entries = 4096
[bgp]
asn = 64512
bfd = {{ interval_ms = 50, multiplier = 3 }}
[[vpcs]]
vni = 100
routes = [{{ prefix = "192.168.0.0/24", to = "local" }}]
hosts = [
  {{ address = "192.168.0.1", mac = "02:00:00:00:01:01", vtep = "10.2.0.11" }},
  {{ address = "192.168.0.2", mac = "02:00:00:00:01:02", vtep = "10.3.0.12" }},
]
"#,
        directory.join("gw.sock")
    );
    for link in 0..LINKS {
        // Writing to a string cannot fail.
        let _ = write!(
            text,
            "[[links]]\nsocket = {:?}\npipeline = {}\naddresses = [\"10.1.{link}.11\"]\n\
             on_link = [\"10.1.{link}.0/24\"]\nrouter = \"10.1.{link}.254\"\npeers = [\"10.1.{link}.2\"]\n",
            memif(directory, link),
            link / OF_PIPELINE
        );
    }
    text
}
