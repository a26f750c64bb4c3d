//! Links, devices and pipelines that fail under traffic. Without FRR, the test is skipped and prints that.
//!
//! ```text
//!                                          +-- link 0 --+
//!  host 10.2.0.11 ---+                     +-- link 1 --+-- device gw0, bifrost-nicd --+
//!                    +-- switch, FRR ------+                                           +-- bifrost-gw, 10.0.0.1
//!  host 10.3.0.12 ---+                     +-- link 2 --+-- device gw1, bifrost-nicd --+
//!                                          +-- link 3 --+
//! ```
//!
//! Link n is the network 10.1.n.0/24: the switch has .254, the proxy .2, and the pod .11.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use rustix::process::Signal;

use super::trunk::{Flows, Trunk, VLAN};
use crate::site::{
    BFD_MS, DETECTION, FLOWS, PROBES_PER_SECOND, Probes, Process, Site, VIP, configuration, has_frr, until,
};

const LINKS: usize = 4;
/// Delay between two steps, so that the effect of each is seen in that step.
const SETTLE: Duration = Duration::from_millis(500);
/// Number of probes that may be in flight if a thread does not run for 200 ms.
const ON_THE_WAY: u32 = PROBES_PER_SECOND / 5;

/// The network, and the programs in it.
struct Server {
    // Declared first, so that programs end before the namespaces are removed.
    pipelines: Vec<Process>,
    _pod: Process,
    _trunks: Vec<Trunk>,
    flows: std::sync::Arc<Flows>,
    site: Site,
}

/// The links of a pipeline.
fn links_of(pipeline: usize) -> [usize; 2] {
    [2 * pipeline, 2 * pipeline + 1]
}

fn network() -> Site {
    let site = Site::empty("ln", &["sw", "proxy", "gw", "a", "b"]);
    site.within(
        "sw",
        "sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.all.rp_filter=0 net.ipv4.fib_multipath_hash_policy=1",
    );
    for link in 0..LINKS {
        site.within("sw", &format!("ip link add br{link} type bridge mcast_snooping 0"));
        site.within("sw", &format!("ip link set br{link} up"));
        site.within("sw", &format!("ip addr add 10.1.{link}.254/24 dev br{link}"));
        site.link(("proxy", &format!("u{link}")), ("sw", &format!("p{link}")));
        site.within("proxy", &format!("ip addr add 10.1.{link}.2/24 dev u{link}"));
        // Connects the link to the trunk.
        site.link(("sw", &format!("l{link}")), ("sw", &format!("t{link}")));
        for port in ["p", "l"] {
            site.within("sw", &format!("ip link set {port}{link} master br{link}"));
        }
    }
    for pipeline in 0..LINKS / 2 {
        site.link(("gw", &format!("gw{pipeline}")), ("sw", &format!("trunk{pipeline}")));
    }
    for (space, network, host) in [("a", "10.2.0", 11), ("b", "10.3.0", 12)] {
        site.link((space, "u0"), ("sw", &format!("to-{space}")));
        site.within("sw", &format!("ip addr add {network}.254/24 dev to-{space}"));
        site.within(space, &format!("ip addr add {network}.{host}/24 dev u0"));
        site.within(space, &format!("ip route add default via {network}.254"));
    }
    site
}

impl Server {
    fn start() -> Server {
        let mut site = network();
        let ends = ["--proxy", "10.1.0.2", "--pods", "10.1.0.0/16", "--switch", "10.1.0.254", "--vips", "10.0.0.0/24"];
        let ends = [&ends[..], &["--bfd-ms", BFD_MS]].concat();
        for (space, end) in [("sw", "switch"), ("proxy", "proxy")] {
            site.start_frr(space, &configuration(end, &ends));
        }
        let flows = Flows::new();
        let trunks = (0..LINKS / 2).map(|pipeline| {
            let ports = links_of(pipeline).map(|link| (link, format!("t{link}")));
            Trunk::start(&site, "sw", &format!("trunk{pipeline}"), &ports, flows.clone())
        });
        let trunks = trunks.collect();
        let pipelines = (0..LINKS / 2).map(|pipeline| start_pipeline(&site, pipeline)).collect();
        let pod = start_pod(&site);
        let server = Server { pipelines, _pod: pod, _trunks: trunks, flows, site };
        server.until_links(&[0, 1, 2, 3]);
        server
    }

    /// Waits until packets arrive only by these links, and the pod reports exactly them as up.
    fn until_links(&self, links: &[usize]) {
        let hops: Vec<_> = links.iter().map(|link| format!("10.1.{link}.11")).collect();
        until("the switch's next hops", || (self.site.next_hops("sw", VIP) == hops).then_some(()));
        until("the pod's links", || {
            let pod = self.site.pod("gw");
            let up = |link: &usize| pod["links"][*link]["state"] == "up";
            ((0..LINKS).filter(up).collect::<Vec<_>>() == links).then_some(())
        });
    }

    /// Makes something fail under traffic, and waits until packets arrive by the other links. Then ends the failure,
    /// and waits for all links.
    fn fail(&mut self, what: &str, failed: &[usize], begin: impl FnOnce(&mut Server), end: impl FnOnce(&mut Server)) {
        let probes = Probes::start(&self.site);
        std::thread::sleep(2 * SETTLE);
        let (link_of, at) = (self.flows.get(), probes.sent());
        let others: Vec<usize> = (0..LINKS).filter(|link| !failed.contains(link)).collect();
        begin(self);
        self.until_links(&others);
        std::thread::sleep(SETTLE);
        end(self);
        self.until_links(&[0, 1, 2, 3]);
        std::thread::sleep(2 * SETTLE);
        let (sent, lost) = probes.stop();

        let mut by_link = BTreeMap::new();
        link_of.iter().for_each(|link| *by_link.entry(*link).or_insert(0) += 1);
        assert!((0..LINKS).all(|link| by_link.contains_key(&link)), "flows of each link: {by_link:?}");
        let of_failed = |number: &&u32| failed.contains(&link_of[**number as usize % FLOWS]);
        let others = lost.iter().filter(|number| !of_failed(number)).count();
        let (first, last) = (lost.first().copied().unwrap_or(at), lost.last().copied().unwrap_or(at));
        println!(
            "{what}: {} of {sent} probes lost, from {first} to {last} of {at} and more; {others} of other links",
            lost.len()
        );
        assert_eq!(others, 0, "{what}: flows of other links lost packets");
        assert!(!lost.is_empty(), "{what}: nothing failed");
        // Packets in flight at the time of the failure are lost, too.
        assert!(first + ON_THE_WAY >= at, "{what}: lost before it failed: {first} of {at}");
        let most = DETECTION.as_millis() as u32 * PROBES_PER_SECOND / 1000;
        assert!(last - first <= most, "{what}: packets were lost from {first} to {last}");
    }

    fn within_switch(&self, command: &str) {
        self.site.within("sw", command);
    }
}

fn start_pipeline(site: &Site, pipeline: usize) -> Process {
    let interfaces = links_of(pipeline).map(|link| {
        format!("{{ vlan = {}, socket = {:?} }}", VLAN + link as u16, site.path(&format!("link{link}.sock")))
    });
    let [one, other] = links_of(pipeline);
    let text = format!(
        "control = {{ socket = {:?} }}\n\
         device = {{ name = \"gw{pipeline}\", mtu = 1600, mode = \"packet\", frames = 4096 }}\n\
         [[pods]]\nname = \"vpc\"\nnumber = 1\ncores = 2\ntimeout_us = 1000000\n\
         own = [\"10.1.{one}.11\", \"10.1.{other}.11\", \"{VIP}\"]\ninterfaces = [{}]\n",
        site.path(&format!("nicd{pipeline}.sock")),
        interfaces.join(", "),
    );
    site.start_nicd("gw", &format!("nicd{pipeline}"), &text)
}

fn start_pod(site: &Site) -> Process {
    let mut text = format!(
        "control = {{ socket = {:?} }}\n[gateway]\npod = 1\ncores = 2\nmac = \"02:00:00:00:01:11\"\n\
         addresses = [\"{VIP}\"]\nsessions = 1024\n\
         [bgp]\nasn = 64512\nbfd = {{ interval_ms = {BFD_MS}, multiplier = 3 }}\n\
         [[vpcs]]\nvni = 100\nroutes = [{{ prefix = \"192.168.0.0/24\", to = \"local\" }}]\nhosts = [\
         {{ address = \"192.168.0.1\", mac = \"02:00:00:00:02:01\", vtep = \"10.2.0.11\" }}, \
         {{ address = \"192.168.0.2\", mac = \"02:00:00:00:02:02\", vtep = \"10.3.0.12\" }}]\n",
        site.path("gw.sock"),
    );
    for link in 0..LINKS {
        let socket = site.path(&format!("link{link}.sock"));
        let _ = write!(
            text,
            "[[links]]\nsocket = {socket:?}\npipeline = {}\naddresses = [\"10.1.{link}.11\"]\n\
             on_link = [\"10.1.{link}.0/24\"]\nrouter = \"10.1.{link}.254\"\npeers = [\"10.1.{link}.2\"]\n",
            link / 2
        );
    }
    site.start_gw("gw", "gw", &text)
}

#[test]
fn a_link_a_device_or_a_pipeline_that_fails_costs_its_own_flows_alone() {
    if !has_frr() {
        return println!("SKIPPED: there is no FRR on this machine");
    }
    let mut server = Server::start();
    server.fail(
        "one link",
        &[1],
        |server| server.within_switch("ip link set t1 down"),
        |server| server.within_switch("ip link set t1 up"),
    );
    server.fail(
        "one device",
        &[2, 3],
        |server| server.within_switch("ip link set trunk1 down"),
        |server| server.within_switch("ip link set trunk1 up"),
    );
    server.fail(
        "one pipeline",
        &[0, 1],
        |server| server.pipelines[0].signal(Signal::KILL),
        |server| server.pipelines[0] = start_pipeline(&server.site, 0),
    );
}
