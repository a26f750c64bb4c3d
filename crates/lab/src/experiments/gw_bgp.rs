//! `gw-bgp`: the benefit of BGP proxies and the priority ring: number of the switch's sessions, detection time of a pod
//! that hangs, sessions under overload, and convergence of a restarted switch.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use ipnet::IpNet;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bars::{Bar, Sense};
use crate::experiments::gw_elastic::Pods;
use crate::frame::Experiment;
use crate::gateway::fabric::{Fabric, Settings};
use crate::gateway::gobgp::{self, Peer, Peers};
use crate::gateway::switch::{Daemon, Switch};
use crate::gateway::until::until_within;
use crate::interrupt;
use crate::lab::Lab;
use crate::netns::Namespace;
use crate::options::Mode;
use crate::plot::{self, Panel, Series};
use crate::report::Table;
use crate::results::{from_values, to_values};
use crate::stats::{Spread, cell};

/// Number of pods of the server.
const PODS: usize = 4;
const PROXIES: usize = 2;
/// Packets per second that an overloaded pod processes; it gets four times as many.
const CAPACITY: u32 = 2500;
const OVERLOAD: u32 = 4 * CAPACITY;
/// Number of servers of the switch that is restarted. Their proxies or pods are processes of GoBGP.
const SERVERS: usize = 64;
/// Both ends of these sessions.
const SITE: gobgp::Site = gobgp::Site { asn: 64_512, switch_asn: 65_000, switch: Ipv4Addr::new(10, 4, 255, 254) };
/// Time limit for the switch to converge: more than its bar, so that a slow switch is measured, too.
const CONVERGES: Duration = Duration::from_secs(120);
/// Interval at which its routes are read, which takes time of its daemon.
const LOOK: Duration = Duration::from_millis(20);
/// Accessor of a field.
type Field = fn(&Row) -> f64;

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct GwBgp;

/// The result for a server with pods behind two proxies, and for a switch with many such servers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The form of the pods.
    #[serde(rename = "mode")]
    pub containers: Pods,
    /// The switch's BGP daemon.
    pub switch: Daemon,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Number of pods of the server.
    pub pods: u32,
    /// Number of the switch's established sessions with it.
    pub switch_sessions: u32,
    /// Number of the switch's paths to the pods' address: to each pod through each proxy.
    pub paths: u32,
    /// Number of pods to which the switch's kernel sends packets.
    pub next_hops: u32,
    /// Time from SIGSTOP of a pod until the switch sends no more packets to it, ms.
    pub hung_ms: f64,
    /// Ratio of packets sent to packets that passed, under overload.
    pub overload: f64,
    /// Number of times that BFD sessions of the overloaded pod went down, with the priority ring.
    pub bfd_flaps: u32,
    /// Number of its BGP sessions that ended.
    pub bgp_flaps: u32,
    /// Number of times that BFD sessions went down under the same load, without the priority ring.
    pub bfd_flaps_without: u32,
    /// Number of BGP sessions that ended.
    pub bgp_flaps_without: u32,
    /// Number of sessions of a switch with 64 servers, with two proxies each.
    pub proxy_sessions: u32,
    /// Time from its restart until it has all sessions and routes, ms.
    pub proxy_convergence_ms: f64,
    /// Number of sessions of a switch with 64 servers, with four pods each and without proxies.
    pub pod_sessions: u32,
    /// Time from its restart until it has all sessions and routes, ms.
    pub pod_convergence_ms: f64,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} as the switch of {} pods: {} sessions, {} paths, {} next hops; one that hangs is missed after {:.0} ms; at \
             {:.1} times its load {} BFD and {} BGP sessions end, without the priority ring {} and {}; 64 servers are \
             back after {:.0} ms with {} sessions, after {:.0} ms with {}",
            self.switch,
            self.pods,
            self.switch_sessions,
            self.paths,
            self.next_hops,
            self.hung_ms,
            self.overload,
            self.bfd_flaps,
            self.bgp_flaps,
            self.bfd_flaps_without,
            self.bgp_flaps_without,
            self.proxy_convergence_ms,
            self.proxy_sessions,
            self.pod_convergence_ms,
            self.pod_sessions,
        )
    }
}

impl Experiment for GwBgp {
    fn name(&self) -> &'static str {
        "gw-bgp"
    }

    fn summary(&self) -> &'static str {
        "Gateway pods behind two BGP proxies: sessions of the switch, BFD, overload, a switch that is restarted"
    }

    /// None: it builds its own network.
    fn modes(&self) -> Vec<Mode> {
        Vec::new()
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let mut rows = Vec::new();
        for repetition in 0..lab.repetitions(3) {
            for switch in Daemon::ALL {
                let row = measure(lab, switch, repetition)
                    .with_context(|| format!("repetition {repetition} with {switch}"))?;
                println!("{row}");
                rows.push(row);
            }
        }
        to_values(&rows)
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut table = Table::new(&["what", "FRR", "BIRD"]);
        let all: [(&str, Field); 13] = [
            ("sessions of the switch with a server of four pods", |row| row.switch_sessions.into()),
            ("paths to their address that it knows", |row| row.paths.into()),
            ("pods that it sends to", |row| row.next_hops.into()),
            ("a pod that hangs is missed after [ms]", |row| row.hung_ms),
            ("overload: packets sent for each that came", |row| row.overload),
            ("overload: BFD sessions that went down", |row| row.bfd_flaps.into()),
            ("overload: BGP sessions that ended", |row| row.bgp_flaps.into()),
            ("the same without the priority ring: BFD", |row| row.bfd_flaps_without.into()),
            ("the same without the priority ring: BGP", |row| row.bgp_flaps_without.into()),
            ("64 servers with proxies: sessions", |row| row.proxy_sessions.into()),
            ("64 servers with proxies: back after [ms]", |row| row.proxy_convergence_ms),
            ("64 servers without proxies: sessions", |row| row.pod_sessions.into()),
            ("64 servers without proxies: back after [ms]", |row| row.pod_convergence_ms),
        ];
        for (what, field) in all {
            let cells = Daemon::ALL.map(|switch| cell(spread(of(&rows, switch), field)));
            table.row([what.to_owned()].into_iter().chain(cells).collect());
        }
        Ok(format!(
            "Four pods in containers announce an address by iBGP to two proxies (FRR), and these by eBGP to a switch \
             (FRR, or BIRD). Overload is {OVERLOAD} packets a second at a pod that takes {CAPACITY}, for ten seconds; then the \
             same with `priority = false`. The switch with 64 servers has processes of \
             GoBGP as peers, one a session, that announce 256 addresses in all; its BGP daemon (of FRR, bgpd and \
             zebra) is killed and starts again. GoBGP takes no connection for 5 s after a session has ended. Medians, and in brackets the least and the most \
             of the repetitions.\n\n{}",
            table.render()
        ))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let series = [(Series::off("without proxies"), false), (Series::on("with proxies"), true)];
        let panels = Daemon::ALL.map(|switch| {
            let repetitions: Vec<u32> = of(&rows, switch).map(|row| row.repetition).collect();
            Panel::over(
                &format!("a switch ({switch}) with 64 servers"),
                ("repetition", &repetitions),
                ("back after [ms]", false),
                &series,
                |with, repetition| {
                    let row = of(&rows, switch).find(|row| row.repetition == *repetition)?;
                    let ms = if with { row.proxy_convergence_ms } else { row.pod_convergence_ms };
                    Spread::of([ms].into_iter())
                },
            )
        });
        Ok(vec![plot::draw(&directory.join("convergence.svg"), &panels, 2)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        Ok(Daemon::ALL.into_iter().flat_map(|switch| bars(&rows, switch)).collect())
    }
}

fn bars(rows: &[Row], switch: Daemon) -> Vec<Bar> {
    let spread = |field: Field| spread(of(rows, switch), field);
    let most = |field: Field| spread(field).map(|spread| spread.most);
    let least = |field: Field| spread(field).map(|spread| spread.least);
    let median = |field: Field| spread(field).map(|spread| spread.median);
    let (pods, proxies) = (PODS as f64, PROXIES as f64);
    let name = |what: &str| format!("{switch}: {what}");
    vec![
        Bar::new(
            name("sessions of the switch"),
            most(|row| row.switch_sessions.into()),
            Sense::AtMost,
            proxies,
            "sessions",
        )
        .exact(),
        Bar::new(name("paths that it knows"), least(|row| row.paths.into()), Sense::AtLeast, pods * proxies, "paths")
            .exact(),
        Bar::new(name("pods that it sends to"), least(|row| row.next_hops.into()), Sense::AtLeast, pods, "pods")
            .exact(),
        Bar::new(name("a pod that hangs is missed after"), median(|row| row.hung_ms), Sense::AtMost, 300.0, "ms"),
        Bar::new(name("overload"), least(|row| row.overload), Sense::AtLeast, 3.5, "times"),
        Bar::new(name("BFD under overload"), most(|row| row.bfd_flaps.into()), Sense::AtMost, 0.0, "sessions down")
            .exact(),
        Bar::new(name("BGP under overload"), most(|row| row.bgp_flaps.into()), Sense::AtMost, 0.0, "sessions down")
            .exact(),
        Bar::new(
            name("BFD without the priority ring"),
            least(|row| row.bfd_flaps_without.into()),
            Sense::AtLeast,
            1.0,
            "sessions down",
        ),
        Bar::new(
            name("a switch with 64 servers and proxies is back after"),
            most(|row| row.proxy_convergence_ms),
            Sense::AtMost,
            10_000.0,
            "ms",
        ),
    ]
}

fn of(rows: &[Row], switch: Daemon) -> impl Iterator<Item = &Row> {
    rows.iter().filter(move |row| row.switch == switch)
}

fn spread<'a>(rows: impl Iterator<Item = &'a Row>, field: Field) -> Option<Spread> {
    Spread::of(rows.map(field))
}

fn measure(lab: &Lab, switch: Daemon, repetition: u32) -> Result<Row> {
    // Short, because Podman puts a path that contains it into the address of a socket.
    let label = |part: &str| format!("{part}-{}{repetition}", &switch.name()[..1]);
    let fabric = Fabric::start(lab, &label("pods"), Settings { proxies: PROXIES, switch, ..Settings::default() })?;
    let names: Vec<String> = (1..=PODS).map(|number| format!("pod-{number}")).collect();
    names.iter().try_for_each(|name| fabric.pod(&["create", name]).map(drop))?;
    fabric.until_next_hops(PODS)?;
    names.iter().try_for_each(|name| fabric.until_watched(name))?;
    let next_hops = fabric.next_hops()? as u32;
    let switch_sessions = fabric.switch().sessions()? as u32;
    let paths = fabric.switch().paths("10.0.0.1/32")? as u32;
    fabric.signal(&names[0], Signal::STOP)?;
    let hung_ms = fabric.until_next_hops(PODS - 1)?.as_secs_f64() * 1e3;
    drop(fabric);

    let with = overload(lab, &label("load"), switch, true)?;
    let without = overload(lab, &label("bare"), switch, false)?;
    let (proxy_sessions, proxy_convergence_ms) = convergence(lab, &label("proxies"), switch, PROXIES, PODS)?;
    let (pod_sessions, pod_convergence_ms) = convergence(lab, &label("direct"), switch, PODS, 1)?;
    Ok(Row {
        containers: Pods::Podman,
        switch,
        repetition,
        pods: PODS as u32,
        switch_sessions,
        paths,
        next_hops,
        hung_ms,
        overload: with.overload,
        bfd_flaps: with.bfd,
        bgp_flaps: with.bgp,
        bfd_flaps_without: without.bfd,
        bgp_flaps_without: without.bgp,
        proxy_sessions,
        proxy_convergence_ms,
        pod_sessions,
        pod_convergence_ms,
    })
}

/// Sessions of an overloaded pod.
struct Overloaded {
    overload: f64,
    bfd: u32,
    bgp: u32,
}

fn overload(lab: &Lab, label: &str, switch: Daemon, priority: bool) -> Result<Overloaded> {
    let settings = Settings { proxies: PROXIES, priority, pod_packets_per_second: CAPACITY, switch };
    let fabric = Fabric::start(lab, label, settings)?;
    fabric.pod(&["create", "one"])?;
    fabric.until_next_hops(1)?;
    fabric.until_watched("one")?;
    interrupt::sleep(Duration::from_secs(1))?;
    let before = ends(&fabric.pod_state("one")?);
    let probes = fabric.probe(OVERLOAD)?;
    interrupt::sleep(Duration::from_secs_f64(lab.seconds(10.0, 4.0)))?;
    let after = ends(&fabric.pod_state("one")?);
    let probed = probes.stop()?;
    let overload = f64::from(probed.sent) / f64::from(probed.received.max(1));
    Ok(Overloaded { overload, bfd: after.0.saturating_sub(before.0), bgp: after.1.saturating_sub(before.1) })
}

/// How often BFD sessions of a pod have gone down, and BGP sessions have ended, according to the pod. FRR removes both
/// counters together with a dynamic peer.
fn ends(pod: &Value) -> (u32, u32) {
    let sum = |name: &str| {
        let peers = pod["bgp"].as_array().into_iter().flatten();
        peers.filter_map(|peer| peer[name].as_u64()).sum::<u64>() as u32
    };
    (sum("bfd_downs"), sum("ended_sessions"))
}

/// Number of sessions of a switch with 64 servers, each with `peers` peers, and the time from the switch's restart
/// until it has all sessions and routes, ms.
fn convergence(lab: &Lab, label: &str, daemon: Daemon, peers: usize, routes_of_each: usize) -> Result<(u32, f64)> {
    let directory = lab.run.directory().join(label);
    std::fs::create_dir_all(&directory)?;
    let create = |name: &str| Namespace::create(format!("{}-{label}-{name}", lab.run.id()));
    let (switch, servers) = (create("switch")?, create("servers")?);
    servers.ip_batch(&format!(
        "link add u0 type veth peer name u0 netns {}\nlink set u0 up addrgenmode none\n",
        switch.name()
    ))?;
    switch.ip_batch(&format!("link set u0 up\naddr add {}/16 dev u0\n", SITE.switch))?;
    let all = speakers(peers, routes_of_each);
    let lines = all.iter().map(|peer| format!("addr add {}/16 dev u0\n", peer.address));
    servers.ip_batch(&lines.collect::<String>())?;
    let logs = lab.logs(label);
    let _peers = Peers::start(&servers, &directory.join("gobgp"), SITE, &all, &logs)?;
    let configuration = match daemon {
        Daemon::Frr => frr(&all),
        Daemon::Bird => bird(&all),
    };
    let running = Switch::start(daemon, &switch, &directory.join("switch"), label, configuration, &logs)?;
    let sessions = all.len();
    let is_there = || {
        let whole = running.sessions()? == sessions && running.routes(&switch)? == SERVERS * PODS;
        Ok(whole.then_some(()))
    };
    let wait = |what: &str, is: &dyn Fn() -> Result<Option<()>>| until_within(CONVERGES, LOOK, what, is);
    wait("the switch has all routes", &is_there)?;
    let began = Instant::now();
    running.kill()?;
    // Errors are ignored while the daemon restarts.
    let again = || Ok(is_there().unwrap_or(None));
    wait("the switch has all routes again", &again)?;
    Ok((sessions as u32, began.elapsed().as_secs_f64() * 1e3))
}

/// The speakers of all servers: `of_each` per server, each with `routes_of_each` of the addresses of the server's pods.
fn speakers(of_each: usize, routes_of_each: usize) -> Vec<Peer> {
    let vip = |server: usize, pod: usize| IpNet::from(IpAddr::from([10, 0, server as u8, pod as u8]));
    let speaker = |server: usize, number: usize| {
        // Each proxy announces all pods of its server. Without proxies, each pod announces itself.
        let first = if routes_of_each == 1 { number } else { 0 };
        let routes = (first..first + routes_of_each).map(|pod| vip(server, pod)).collect();
        Peer { address: Ipv4Addr::new(10, 4, server as u8, 1 + number as u8), routes }
    };
    (0..SERVERS).flat_map(|server| (0..of_each).map(move |number| speaker(server, number))).collect()
}

/// FRR's configuration, as the switch of `peers`. Like that of `bifrostctl gw bgp config switch`, it names each peer,
/// tries to connect every second, and has the same hold time. A connection whose OPEN is not answered is closed after
/// the hold time, and retried.
fn frr(peers: &[Peer]) -> String {
    let gobgp::Site { asn, switch_asn, switch } = SITE;
    let neighbors = peers.iter().map(|Peer { address, .. }| format!(" neighbor {address} peer-group servers\n"));
    let neighbors: String = neighbors.collect();
    format!(
        "\
frr defaults traditional
router bgp {switch_asn}
 bgp router-id {switch}
 no bgp default ipv4-unicast
 no bgp ebgp-requires-policy
 neighbor servers peer-group
 neighbor servers remote-as {asn}
 neighbor servers timers 1 3
 neighbor servers timers connect 1
{neighbors} address-family ipv4 unicast
  maximum-paths 64
  neighbor servers activate
 exit-address-family
exit
!
bfd
exit
"
    )
}

/// The same for BIRD.
fn bird(peers: &[Peer]) -> String {
    let gobgp::Site { asn, switch_asn, switch } = SITE;
    let neighbor = |(number, Peer { address, .. }): (usize, &Peer)| {
        format!("protocol bgp server{number} from server {{ neighbor {address} as {asn}; }}\n")
    };
    let neighbors: String = peers.iter().enumerate().map(neighbor).collect();
    format!(
        "\
router id {switch};
protocol device {{ }}
protocol direct {{ ipv4; }}
protocol kernel {{ merge paths on limit 64; ipv4 {{ import none; export where source = RTS_BGP; }}; }}
template bgp server {{
  local {switch} as {switch_asn};
  direct;
  hold time 3;
  keepalive time 1;
  connect delay time 1;
  connect retry time 1;
  error wait time 1, 1;
  ipv4 {{ import all; export none; gateway direct; }};
}}
{neighbors}"
    )
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn sessions_that_ended_are_added_up() {
        let peer = |bfd: u32, bgp: u32| serde_json::json!({ "bfd_downs": bfd, "ended_sessions": bgp });
        let pod = serde_json::json!({ "bgp": [peer(2, 1), peer(3, 0)] });
        assert_eq!(ends(&pod), (5, 1));
    }

    #[test]
    fn each_server_has_the_sessions_and_the_routes_that_it_is_to_have() {
        for (of_each, routes_of_each, copies) in [(PROXIES, PODS, PROXIES), (PODS, 1, 1)] {
            let all = speakers(of_each, routes_of_each);
            let addresses: BTreeSet<_> = all.iter().map(|peer| peer.address).collect();
            assert_eq!((all.len(), addresses.len()), (SERVERS * of_each, SERVERS * of_each));
            let routes: Vec<_> = all.iter().flat_map(|peer| &peer.routes).collect();
            let different: BTreeSet<_> = routes.iter().collect();
            assert_eq!((routes.len(), different.len()), (SERVERS * PODS * copies, SERVERS * PODS));
            assert_eq!(frr(&all).matches(" peer-group servers").count(), all.len());
            assert_eq!(bird(&all).matches(" from server ").count(), all.len());
        }
    }
}
