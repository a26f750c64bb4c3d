//! `nat`: the cost of NAT: new connections per second, and requests over persistent ones, through an uplink of the
//! switch, compared with the same switch without NAT, with the kernel's nftables, and with Open vSwitch's `ct(nat)`.
//!
//! `ab` in one container sends requests to `nginx` in another on the same host. Nothing crosses an underlay, so NAT
//! is the only difference.

use std::fmt;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use anyhow::Result;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::requests::networks::{Reference, container, port};
use super::requests::{self, CLIENTS, Setup};
use crate::bars::Bar;
use crate::daemon::Settings;
use crate::frame::Experiment;
use crate::lab::Lab;
use crate::options::Mode;
use crate::plot;
use crate::programs::nginx::Nginx;
use crate::results::{from_values, to_values};
use crate::topology::Guest;

pub use super::nginx::Connections;

/// Rules of the reference: every container shares the address of the device towards the server.
const MASQUERADE: &str = "table ip nat {\n chain out {\n  type nat hook postrouting priority srcnat;\n  oifname \
                          \"out0\" masquerade\n }\n}\n";

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct NatExperiment;

/// The path between client and server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Through {
    /// The switch: both are guests of one network.
    Switch,
    /// The switch and an uplink, with a floating address of the client.
    FloatingIp,
    /// The switch and an uplink, with an address that guests share.
    SharedAddress,
    /// A kernel that forwards between two veth pairs, with `masquerade` of nftables.
    Nftables,
    /// Open vSwitch in user space between two veth pairs, with `ct(nat)`.
    OpenVswitch,
}

impl Setup for Through {
    const ALL: &'static [Through] =
        &[Through::Switch, Through::FloatingIp, Through::SharedAddress, Through::Nftables, Through::OpenVswitch];
}

impl fmt::Display for Through {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Through::Switch => "switch",
            Through::FloatingIp => "floating_ip",
            Through::SharedAddress => "shared_address",
            Through::Nftables => "nftables",
            Through::OpenVswitch => "open_vswitch",
        })
    }
}

/// One run of `ab`.
pub type Row = requests::Row<Through>;

impl Experiment for NatExperiment {
    fn name(&self) -> &'static str {
        "nat"
    }

    fn summary(&self) -> &'static str {
        "New connections and requests per second through NAT at an uplink, compared with the switch alone, nftables \
         and Open vSwitch"
    }

    fn modes(&self) -> Vec<Mode> {
        vec![Mode::Off]
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let repetitions = lab.repetitions(3);
        let mut progress = requests::progress::<Through>(repetitions);
        let mut rows = Vec::new();
        for repetition in 0..repetitions {
            let label = format!("nat-{repetition}");
            progress.begin("building the network");
            let guests = Guests::create(lab)?;
            let settings = Settings { more: vec![guests.configuration()], ..lab.settings() };
            let mut network = lab.network_with(Mode::Off, &label, settings)?;
            let kernel = Reference::nftables(lab, 10, 1, MASQUERADE)?;
            let mut ovs = Reference::open_vswitch((lab, &network, &label), 20, 1, &[], flows)?;
            let mut servers = Vec::new();
            for server in [&guests.server, &guests.outside, &kernel.servers[0], &ovs.servers[0]] {
                servers.push(Nginx::start(server, &lab.logs(&format!("{label}-{}", server.name)))?);
            }
            for &through in Through::ALL {
                let (client, server) = match through {
                    Through::Switch => (&guests.client, &guests.server),
                    Through::FloatingIp => (&guests.other, &guests.outside),
                    Through::SharedAddress => (&guests.client, &guests.outside),
                    Through::Nftables => (&kernel.client, &kernel.servers[0]),
                    Through::OpenVswitch => (&ovs.client, &ovs.servers[0]),
                };
                let ends = (client, server.address);
                rows.extend(requests::measure(lab, &mut progress, (&label, repetition), through, ends)?);
            }
            servers.iter_mut().try_for_each(Nginx::check_alive)?;
            ovs.check_alive()?;
            network.check()?;
        }
        to_values(&rows)
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let references = [
            (Through::Switch, "of the switch's"),
            (Through::Nftables, "of nftables'"),
            (Through::OpenVswitch, "of Open vSwitch's"),
        ];
        Ok(format!(
            "`ab` with {CLIENTS} clients in one container requests 1 KB from `nginx` in another on the same host. \
             Medians, with the minimum and maximum of the repetitions in brackets. `switch`: both are guests of one \
             network. `floating_ip`, `shared_address`: the server is behind an uplink. `nftables`: a kernel forwards \
             between two veth pairs and masquerades; its clients have no TAP device, and no process is in the path. \
             `open_vswitch`: its datapath in user space, with `ct(nat)`.\n{}",
            requests::tables(&rows, &references)
        ))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        Ok(vec![plot::draw(&directory.join("nat.svg"), &[requests::panel(&rows)], 1)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let new = |reference, bound| requests::new_connections(&rows, (Through::SharedAddress, reference), bound);
        Ok(vec![
            requests::share(&rows, Through::FloatingIp, Through::Switch),
            requests::share(&rows, Through::SharedAddress, Through::Switch),
            new(Through::Nftables, 1.0),
            new(Through::OpenVswitch, 2.0),
        ])
    }
}

/// OpenFlow flows of a NAT with one shared address.
fn flows(client: &str, servers: &[String]) -> String {
    let (server, shared) = (&servers[0], "203.0.113.254");
    format!(
        "table=0,ip,actions=ct(nat,table=1)\n\
         table=1,in_port=1,ip,ct_state=+trk+new,actions=ct(commit,nat(src={shared})),mod_dl_dst:{server},output:2\n\
         table=1,in_port=1,ip,ct_state=+trk+est,actions=mod_dl_dst:{server},output:2\n\
         table=1,in_port=2,ip,ct_state=+trk+est,actions=mod_dl_dst:{client},output:1\n"
    )
}

/// Containers of the first host, in addition to its usual guest.
struct Guests {
    client: Guest,
    /// The guest with a floating address.
    other: Guest,
    server: Guest,
    /// The server behind the uplink.
    outside: Guest,
}

impl Guests {
    fn create(lab: &Lab) -> Result<Self> {
        let inside = |n| Ipv4Addr::new(10, 1, 0, n);
        Ok(Guests {
            client: container(lab, (1, "client"), inside(1), false)?,
            other: container(lab, (2, "other"), inside(2), false)?,
            server: container(lab, (3, "server"), inside(3), true)?,
            outside: container(lab, (4, "outside"), Ipv4Addr::new(203, 0, 113, 1), true)?,
        })
    }

    /// The part of the daemon's configuration for these guests.
    fn configuration(&self) -> String {
        let inside = [&self.client, &self.other, &self.server];
        let inside = inside.map(|guest| port(guest, 201, "default_gateway = \"10.1.0.254\"\n")).concat();
        let (uplink, outside) = (&self.outside.name, port(&self.outside, 202, ""));
        format!(
            "[[vpc]]\nvni = 201\nreliability = \"off\"\ngateway = [\"10.1.0.254\"]\n[[vpc]]\nvni = 202\nreliability = \
             \"off\"\n{inside}{outside}[[uplink]]\nport = \"{uplink}\"\n\
             [[nat]]\nvni = 201\nuplink = \"{uplink}\"\naddresses = [\"203.0.113.10\"]\nports_per_guest = 64512\n\
             [[floating_ip]]\nvni = 201\nuplink = \"{uplink}\"\naddress = \"203.0.113.20\"\ninside = \"{}\"\n",
            self.other.address
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::requests::tests::row;
    use super::*;

    #[test]
    fn each_bar_can_fail() {
        let passed = |[floating, shared, new]: [f64; 3]| -> Vec<bool> {
            let persistent =
                [(Through::Switch, 100.0), (Through::FloatingIp, floating), (Through::SharedAddress, shared)]
                    .map(|(through, rps)| row(through, Connections::Persistent, rps));
            let short = [(Through::Nftables, 100.0), (Through::OpenVswitch, 60.0), (Through::SharedAddress, new)]
                .map(|(through, rps)| row(through, Connections::Short, rps));
            let values = to_values(&[persistent, short].concat()).unwrap();
            NatExperiment.bars(&values).unwrap().iter().map(Bar::passes).collect()
        };
        assert_eq!(passed([91.0, 91.0, 121.0]), [true; 4]);
        assert_eq!(passed([89.0, 91.0, 121.0]), [false, true, true, true]);
        assert_eq!(passed([91.0, 89.0, 121.0]), [true, false, true, true]);
        assert_eq!(passed([91.0, 91.0, 101.0]), [true, true, true, false]);
        assert_eq!(passed([91.0, 91.0, 99.0]), [true, true, false, false]);
        assert_eq!(NatExperiment.bars(&[]).unwrap().iter().filter(|bar| bar.passes()).count(), 0);
    }

    #[test]
    fn the_report_compares_with_nftables() {
        let rows =
            [row(Through::SharedAddress, Connections::Short, 50.0), row(Through::Nftables, Connections::Short, 100.0)];
        let values = to_values(&rows).unwrap();
        assert_eq!(values[0]["mode"], "shared_address");
        let report = NatExperiment.report(&values).unwrap();
        assert!(report.contains("0.50x"), "{report}");
        let profile = report.lines().rfind(|line| line.starts_with("| short") && line.contains("nftables"));
        assert!(profile.is_some_and(|line| line.contains("43.00")), "{report}");
    }
}
