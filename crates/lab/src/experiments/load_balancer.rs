//! `load-balancer`: the cost of the load balancer: new connections per second, and requests over persistent ones,
//! through an address with two backends, compared with a server's own address, with the kernel's nftables, and with
//! Open vSwitch's `ct(nat)`. And connections that are held while backends change.
//!
//! All containers are on one host, so that nothing crosses an underlay.

mod held;

use std::fmt;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use anyhow::Result;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use self::held::Held;
use super::requests::networks::{CLIENT, Reference, container, port, server};
use super::requests::{self, CLIENTS, Setup};
use crate::bars::{Bar, Sense};
use crate::daemon::Settings;
use crate::frame::Experiment;
use crate::lab::{Lab, Network};
use crate::options::Mode;
use crate::plot;
use crate::programs::nginx::{Nginx, PORT};
use crate::results::{from_values, to_values};
use crate::topology::Guest;

pub use super::nginx::Connections;

/// The load balancer's address in the guests' VPC, and in the reference networks.
const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 100);
const REFERENCE_ADDRESS: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
/// Connections held while backends change, and new ones opened afterwards.
const HELD: usize = 512;
/// Weights of the backends, before and after the change: one is drained, one is added.
const WEIGHTS: [[u8; 3]; 2] = [[1, 1, 0], [0, 1, 1]];

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct LoadBalancer;

/// The path between client and server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Through {
    /// The switch, to a server's own address.
    Switch,
    /// The switch, to the load balancer's address.
    LoadBalancer,
    /// A kernel that forwards between veth pairs, with nftables' `dnat` to a hash of the client's address and port.
    Nftables,
    /// Open vSwitch in user space between veth pairs, with a group of `ct(nat)`.
    OpenVswitch,
}

impl Setup for Through {
    const ALL: &'static [Through] = &[Through::Switch, Through::LoadBalancer, Through::Nftables, Through::OpenVswitch];
}

impl fmt::Display for Through {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Through::Switch => "switch",
            Through::LoadBalancer => "load_balancer",
            Through::Nftables => "nftables",
            Through::OpenVswitch => "open_vswitch",
        })
    }
}

/// One run of `ab`, and what happened to connections that were held while backends changed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The run.
    #[serde(flatten)]
    pub run: requests::Row<Through>,
    /// The change of backends that followed; `None` except for the load balancer's persistent connections.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub change: Option<Change>,
}

/// A change of backends: one is drained, one is added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// Connections held, over both backends.
    pub held_connections: u64,
    /// Those to the drained backend.
    pub drained_connections: u64,
    /// Connections that were not answered by their backend afterwards.
    pub moved_connections: u64,
    /// New connections to the drained backend afterwards, of as many as were held.
    pub misplaced_connections: u64,
}

impl Experiment for LoadBalancer {
    fn name(&self) -> &'static str {
        "load-balancer"
    }

    fn summary(&self) -> &'static str {
        "New connections and requests per second through the load balancer, compared with the switch alone, nftables \
         and Open vSwitch; connections stay while backends change"
    }

    fn modes(&self) -> Vec<Mode> {
        vec![Mode::Off]
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let repetitions = lab.repetitions(3);
        let mut progress = requests::progress::<Through>(repetitions);
        let mut rows = Vec::new();
        for repetition in 0..repetitions {
            let label = format!("load-balancer-{repetition}");
            progress.begin("building the network");
            let guests = Guests::create(lab)?;
            let settings = Settings { more: vec![guests.configuration()], ..lab.settings() };
            let mut network = lab.network_with(Mode::Off, &label, settings)?;
            let kernel = Reference::nftables(lab, 10, 2, &rules())?;
            let mut ovs = Reference::open_vswitch((lab, &network, &label), 20, 2, &[group()], flows)?;
            let mut servers = Vec::new();
            for server in guests.backends.iter().chain(&kernel.servers).chain(&ovs.servers) {
                servers.push(Nginx::start(server, &lab.logs(&format!("{label}-{}", server.name)))?);
            }
            for &through in Through::ALL {
                let ends = match through {
                    // A backend that the load balancer does not use. Otherwise both connections would look the same to
                    // the server, and Linux delays a connection that looks like one that ended less than a minute ago.
                    Through::Switch => (&guests.client, guests.backends[2].address),
                    Through::LoadBalancer => (&guests.client, ADDRESS),
                    Through::Nftables => (&kernel.client, REFERENCE_ADDRESS),
                    Through::OpenVswitch => (&ovs.client, REFERENCE_ADDRESS),
                };
                let measured = requests::measure(lab, &mut progress, (&label, repetition), through, ends)?;
                rows.extend(measured.into_iter().map(|run| Row { run, change: None }));
            }
            progress.begin("changing backends");
            let change = change(&network, &guests)?;
            let is_it = |row: &&mut Row| row.run.through == Through::LoadBalancer && row.run.repetition == repetition;
            if let Some(row) = rows.iter_mut().rfind(is_it) {
                row.change = Some(change);
            }
            servers.iter_mut().try_for_each(Nginx::check_alive)?;
            ovs.check_alive()?;
            network.check()?;
        }
        to_values(&rows)
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let (rows, changes) = read(rows)?;
        let references = [
            (Through::Switch, "of the switch's"),
            (Through::Nftables, "of nftables'"),
            (Through::OpenVswitch, "of Open vSwitch's"),
        ];
        let mut text = format!(
            "`ab` with {CLIENTS} clients in one container requests 1 KB from `nginx` in two others on the same host. \
             Medians, with the minimum and maximum of the repetitions in brackets. `switch`: from one, by its own \
             address. `load_balancer`: by the load balancer's. `nftables`: a kernel forwards between veth pairs \
             and chooses the server by a hash (`dnat to jhash`); no process is in the path. `open_vswitch`: its \
             datapath in user space, with a group of `ct(nat)`.\n{}",
            requests::tables(&rows, &references)
        );
        if let [.., change] = changes[..] {
            let Change { held_connections: held, drained_connections: drained, .. } = change;
            let sum = |field: fn(&Change) -> u64| changes.iter().map(field).sum::<u64>();
            text += &format!(
                "\n### Change of backends\n\nOne backend is drained and one is added while {held} connections are \
                 open, {drained} of them to the drained one. In all repetitions, {} connections moved to another \
                 backend or ended, and {} of as many new ones went to the drained backend.\n",
                sum(|change| change.moved_connections),
                sum(|change| change.misplaced_connections)
            );
        }
        Ok(text)
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let (rows, _) = read(rows)?;
        Ok(vec![plot::draw(&directory.join("load-balancer.svg"), &[requests::panel(&rows)], 1)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let (rows, changes) = read(rows)?;
        let new = |reference, bound| requests::new_connections(&rows, (Through::LoadBalancer, reference), bound);
        let stray = |change: &Change| change.moved_connections + change.misplaced_connections;
        // The change can only break connections to the drained backend.
        let is_tested = !changes.is_empty() && changes.iter().all(|change| change.drained_connections > 0);
        let strays = is_tested.then(|| changes.iter().map(stray).sum::<u64>() as f64);
        let name = "connections that moved when backends changed, and new ones to a drained backend";
        Ok(vec![
            requests::share(&rows, Through::LoadBalancer, Through::Switch),
            new(Through::Nftables, 1.0),
            new(Through::OpenVswitch, 2.0),
            Bar::new(name, strays, Sense::AtMost, 0.0, "connections").exact(),
        ])
    }
}

/// The runs and the changes of backends.
fn read(rows: &[Value]) -> Result<(Vec<requests::Row<Through>>, Vec<Change>)> {
    let rows: Vec<Row> = from_values(rows)?;
    let changes = rows.iter().filter_map(|row| row.change).collect();
    Ok((rows.into_iter().map(|row| row.run).collect(), changes))
}

/// nftables' load balancer.
fn rules() -> String {
    format!(
        "table ip nat {{\n chain in {{\n  type nat hook prerouting priority dstnat;\n  ip daddr {REFERENCE_ADDRESS} \
         tcp dport {PORT} dnat to jhash ip saddr . tcp sport mod 2 map {{ 0 : {}, 1 : {} }}\n }}\n}}\n",
        server(0),
        server(1)
    )
}

/// Open vSwitch's load balancer.
fn group() -> String {
    let bucket = |n| format!(",bucket=weight:1,actions=ct(commit,nat(dst={}:{PORT}),table=2)", server(n));
    format!("group_id=1,type=select{}{}", bucket(0), bucket(1))
}

fn flows(client: &str, servers: &[String]) -> String {
    let mut flows = format!(
        "table=0,ip,actions=ct(nat,table=1)\n\
         table=1,in_port=1,ip,nw_src={CLIENT},ct_state=+trk+new,actions=group:1\n\
         table=1,priority=10,in_port=1,ip,ct_state=+trk+est,actions=resubmit(,2)\n\
         table=1,priority=5,ip,ct_state=+trk+est,actions=mod_dl_dst:{client},output:1\n"
    );
    for (n, mac) in (0..).zip(servers) {
        flows += &format!("table=2,ip,nw_dst={},actions=mod_dl_dst:{mac},output:{}\n", server(n), n + 2);
    }
    flows
}

/// Changes the backends while connections are open.
fn change(network: &Network, guests: &Guests) -> Result<Change> {
    let mut servers = Vec::new();
    for (name, backend) in (0..).zip(&guests.backends) {
        servers.push(held::serve(backend, name)?);
    }
    let mut held = Held::open(&guests.client.namespace, ADDRESS, HELD)?;
    let [before, after] = WEIGHTS.map(|weights| guests.balancers(weights));
    network.overlay.daemons[0].reconfigure(|text| text.replace(&before, &after))?;
    let new = Held::open(&guests.client.namespace, ADDRESS, HELD)?;
    Ok(Change {
        held_connections: HELD as u64,
        drained_connections: held.to(0) as u64,
        moved_connections: held.moved() as u64,
        misplaced_connections: new.to(0) as u64,
    })
}

/// Containers of the first host, in addition to its usual guest.
struct Guests {
    client: Guest,
    backends: [Guest; 3],
}

impl Guests {
    fn create(lab: &Lab) -> Result<Self> {
        let backend = |n| container(lab, (n, &format!("backend{n}")), Ipv4Addr::new(10, 1, 0, n), true);
        Ok(Guests {
            client: container(lab, (1, "client"), CLIENT, false)?,
            backends: [backend(2)?, backend(3)?, backend(4)?],
        })
    }

    /// The part of the daemon's configuration for these guests.
    fn configuration(&self) -> String {
        let gateway = "default_gateway = \"10.1.0.254\"\n";
        let ports: String =
            [&self.client].into_iter().chain(&self.backends).map(|guest| port(guest, 201, gateway)).collect();
        let balancers = self.balancers(WEIGHTS[0]);
        format!("[[vpc]]\nvni = 201\nreliability = \"off\"\ngateway = [\"10.1.0.254\"]\n{ports}{balancers}")
    }

    /// Load balancers for requests and for held connections.
    fn balancers(&self, weights: [u8; 3]) -> String {
        let balancer = |(name, port): (&str, u16)| {
            let backends = self.backends.iter().zip(weights).map(|(backend, weight)| {
                let address = backend.address;
                format!("[[load_balancer.backend]]\naddress = \"{address}\"\nweight = {weight}\n")
            });
            let backends: String = backends.collect();
            format!(
                "[[load_balancer]]\nname = \"{name}\"\nvni = 201\naddress = \"{ADDRESS}\"\nport = {port}\n{backends}"
            )
        };
        [("requests", PORT), ("held", held::PORT)].map(balancer).concat()
    }
}

#[cfg(test)]
mod tests {
    use super::super::requests::tests::row;
    use super::*;

    fn rows([persistent, new]: [f64; 2], change: Change) -> Vec<Value> {
        let plain = |through, connections, rps| Row { run: row(through, connections, rps), change: None };
        let mut rows = vec![
            plain(Through::Switch, Connections::Persistent, 100.0),
            plain(Through::Nftables, Connections::Short, 100.0),
            plain(Through::OpenVswitch, Connections::Short, 60.0),
            plain(Through::LoadBalancer, Connections::Short, new),
            plain(Through::LoadBalancer, Connections::Persistent, persistent),
        ];
        rows[4].change = Some(change);
        to_values(&rows).unwrap()
    }

    const GOOD: Change =
        Change { held_connections: 512, drained_connections: 250, moved_connections: 0, misplaced_connections: 0 };

    #[test]
    fn each_bar_can_fail() {
        let passed = |rates, change| -> Vec<bool> {
            LoadBalancer.bars(&rows(rates, change)).unwrap().iter().map(Bar::passes).collect()
        };
        assert_eq!(passed([91.0, 121.0], GOOD), [true; 4]);
        assert_eq!(passed([89.0, 121.0], GOOD), [false, true, true, true]);
        assert_eq!(passed([91.0, 101.0], GOOD), [true, true, false, true]);
        assert_eq!(passed([91.0, 99.0], GOOD), [true, false, false, true]);
        for bad in [
            Change { moved_connections: 1, ..GOOD },
            Change { misplaced_connections: 1, ..GOOD },
            Change { drained_connections: 0, ..GOOD },
        ] {
            assert_eq!(passed([91.0, 121.0], bad), [true, true, true, false], "{bad:?}");
        }
        assert_eq!(LoadBalancer.bars(&[]).unwrap().iter().filter(|bar| bar.passes()).count(), 0);
    }

    #[test]
    fn rows_are_flat_and_the_report_counts_connections() {
        let values = rows([91.0, 50.0], Change { moved_connections: 3, ..GOOD });
        assert_eq!((&values[0]["mode"], values[0].get("change")), (&"switch".into(), None));
        let report = LoadBalancer.report(&values).unwrap();
        assert!(report.contains("0.50x") && report.contains("3 connections moved"), "{report}");
    }
}
