//! `nat`: the cost of NAT: new connections per second, and requests over persistent ones, through an uplink of the
//! switch, compared with the same switch without NAT and with the kernel's nftables.
//!
//! `ab` in one container sends requests to `nginx` in another on the same host. Nothing crosses an underlay, so NAT
//! is the only difference.

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::Result;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bars::{Bar, Sense};
use crate::daemon::Settings;
use crate::frame::Experiment;
use crate::interrupt;
use crate::lab::Lab;
use crate::netns::Namespace;
use crate::options::Mode;
use crate::plot::{self, Panel};
use crate::programs::apache_bench::{self, Load};
use crate::programs::nginx::{Nginx, PORT};
use crate::progress::Progress;
use crate::report::{Table, factor};
use crate::results::{from_values, to_values};
use crate::stats::{Spread, cell, middle, paired_ratio};
use crate::topology::Guest;

pub use super::nginx::Connections;

/// Number of clients: enough to keep the server busy.
const CLIENTS: u32 = 16;
/// Required ratio of requests over persistent connections to those without NAT: NAT may cost a tenth.
const LEAST_SHARE: f64 = 0.9;

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
}

impl Through {
    const ALL: [Through; 4] = [Through::Switch, Through::FloatingIp, Through::SharedAddress, Through::Nftables];
}

impl fmt::Display for Through {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Through::Switch => "switch",
            Through::FloatingIp => "floating_ip",
            Through::SharedAddress => "shared_address",
            Through::Nftables => "nftables",
        })
    }
}

/// One run of `ab`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The path between client and server.
    #[serde(rename = "mode")]
    pub through: Through,
    /// Whether connections are persistent.
    pub connections: Connections,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Number of clients, each with one request in flight.
    pub clients: u32,
    /// Requests answered.
    pub requests: u64,
    /// Requests answered per second; with short connections, also connections opened and closed.
    pub rps: f64,
    /// Median time of a request, including its connection setup, ms.
    pub latency_ms_p50: f64,
    /// 99th percentile, ms.
    pub latency_ms_p99: f64,
}

impl Experiment for NatExperiment {
    fn name(&self) -> &'static str {
        "nat"
    }

    fn summary(&self) -> &'static str {
        "New connections and requests per second through NAT at an uplink, compared with the switch alone and nftables"
    }

    fn modes(&self) -> Vec<Mode> {
        vec![Mode::Off]
    }

    fn default_modes(&self, _quick: bool) -> Vec<Mode> {
        self.modes()
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let repetitions = lab.repetitions(3);
        let points = Through::ALL.len() * Connections::ALL.len();
        let mut progress = Progress::new(points as u64 * u64::from(repetitions));
        let mut rows = Vec::new();
        for repetition in 0..repetitions {
            let label = format!("nat-{repetition}");
            progress.begin("building the network");
            let guests = Guests::create(lab, repetition)?;
            let settings = Settings { more: vec![guests.configuration()], ..lab.settings() };
            let mut network = lab.network_with(Mode::Off, &label, settings)?;
            let forwarder = Forwarder::create(lab, repetition)?;
            let places = [&guests.server, &guests.outside, &forwarder.server];
            let mut servers = Vec::new();
            for server in places {
                servers.push(Nginx::start(server, &lab.logs(&format!("{label}-{}", server.name)))?);
            }
            for through in Through::ALL {
                let (client, server) = match through {
                    Through::Switch => (&guests.client, &guests.server),
                    Through::FloatingIp => (&guests.other, &guests.outside),
                    Through::SharedAddress => (&guests.client, &guests.outside),
                    Through::Nftables => (&forwarder.client, &forwarder.server),
                };
                client.allow_many_connections()?;
                for connections in Connections::ALL {
                    interrupt::check()?;
                    progress.begin(&format!("{through}, {connections}"));
                    let load = Load {
                        server: (server.address, PORT).into(),
                        clients: CLIENTS,
                        seconds: lab.seconds(5.0, 1.0).ceil() as u32,
                        keep_alive: connections == Connections::Persistent,
                    };
                    let name = format!("{through}-{connections}");
                    let measured = apache_bench::run(client, load, &lab.logs(&label), &name)?;
                    progress.end(&format!("{through:<14} {connections:<10}: {:.0} requests/s", measured.rps));
                    rows.push(Row {
                        through,
                        connections,
                        repetition,
                        clients: CLIENTS,
                        requests: measured.requests,
                        rps: measured.rps,
                        latency_ms_p50: measured.latency_ms.p50,
                        latency_ms_p99: measured.latency_ms.p99,
                    });
                }
            }
            servers.iter_mut().try_for_each(Nginx::check_alive)?;
            network.check()?;
        }
        to_values(&rows)
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut text = format!(
            "`ab` with {CLIENTS} clients in one container requests 1 KB from `nginx` in another on the same host. \
             Medians, with the minimum and maximum of the repetitions in brackets. `switch`: both are guests of one \
             network. `floating_ip`, `shared_address`: the server is behind an uplink. `nftables`: a kernel forwards \
             between two veth pairs and masquerades; its clients have no TAP device, and no process is in the path.\n"
        );
        for connections in Connections::ALL {
            text += match connections {
                Connections::Short => "\n### A connection for each request\n\n",
                Connections::Persistent => "\n### Persistent connections\n\n",
            };
            let mut table =
                Table::new(&["through", "requests/s", "P50 ms", "P99 ms", "of the switch's", "of nftables'"]);
            for through in Through::ALL {
                let of = |through, field| spread(&rows, through, connections, field);
                let rps: fn(&Row) -> f64 = |r| r.rps;
                table.row(vec![
                    through.to_string(),
                    cell(of(through, rps)),
                    cell(of(through, |r| r.latency_ms_p50)),
                    cell(of(through, |r| r.latency_ms_p99)),
                    factor(middle(of(through, rps)), middle(of(Through::Switch, rps))),
                    factor(middle(of(through, rps)), middle(of(Through::Nftables, rps))),
                ]);
            }
            text += &table.render();
        }
        Ok(text)
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let kinds = [
            (plot::Series::on("short"), Connections::Short),
            (plot::Series::off("persistent"), Connections::Persistent),
        ];
        let x = ("through", Through::ALL.as_slice());
        let panel = Panel::over("requests/s", x, ("requests/s", false), &kinds, |connections, through| {
            spread(&rows, *through, connections, |r| r.rps)
        });
        Ok(vec![plot::draw(&directory.join("nat.svg"), &[panel], 1)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let bar = |through: Through| {
            let is = |through| move |r: &Row| r.through == through && r.connections == Connections::Persistent;
            let both = (is(through), is(Through::Switch));
            let measured = paired_ratio(&rows, |r| r.repetition, both, |r| r.rps);
            let name = format!("{through}: requests over persistent connections, of the switch's without translation");
            Bar::new(name, measured, Sense::AtLeast, LEAST_SHARE, "x")
        };
        Ok([Through::FloatingIp, Through::SharedAddress].map(bar).into())
    }
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
    fn create(lab: &Lab, repetition: u32) -> Result<Self> {
        let create = |n: u8, name: &str, address: [u8; 4]| guest(lab, repetition, (n, name), address);
        Ok(Guests {
            client: create(1, "client", [10, 1, 0, 1])?,
            other: create(2, "other", [10, 1, 0, 2])?,
            server: create(3, "server", [10, 1, 0, 3])?,
            outside: create(4, "outside", [203, 0, 113, 1])?,
        })
    }

    /// The part of the daemon's configuration for these guests.
    fn configuration(&self) -> String {
        let port = |guest: &Guest, vni: u32, gateway: &str| {
            format!(
                "[[port]]\nname = \"{}\"\nvni = {vni}\nmac = \"{}\"\naddresses = [\"{}/24\"]\nnetns = \"{}\"\ndevice = \
                 \"eth0\"\n{gateway}",
                guest.name,
                guest.mac,
                guest.address,
                guest.namespace.name()
            )
        };
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

/// A kernel that forwards from a client to a server, and translates.
struct Forwarder {
    client: Guest,
    server: Guest,
    _router: Namespace,
}

impl Forwarder {
    fn create(lab: &Lab, repetition: u32) -> Result<Self> {
        let client = guest(lab, repetition, (5, "nft-client"), [10, 1, 0, 1])?;
        let server = guest(lab, repetition, (6, "nft-server"), [203, 0, 113, 1])?;
        let router = guest(lab, repetition, (7, "nft-router"), [0; 4])?.namespace;
        router.ip_batch(&format!(
            "link add in type veth peer name eth0 netns {}\nlink add out type veth peer name eth0 netns {}\n\
             addr add 10.1.0.254/24 dev in\naddr add 203.0.113.254/24 dev out\nlink set in up\nlink set out up\n",
            client.namespace.name(),
            server.namespace.name()
        ))?;
        client
            .namespace
            .ip_batch("addr add 10.1.0.1/24 dev eth0\nlink set eth0 up\nroute add default via 10.1.0.254 dev eth0\n")?;
        server.namespace.ip_batch("addr add 203.0.113.1/24 dev eth0\nlink set eth0 up\n")?;
        router.write_sysctls(&[("net/ipv4/ip_forward", "1")])?;
        let rules = "table ip nat {\n chain out {\n  type nat hook postrouting priority srcnat;\n  oifname out masquerade\n }\n}\n";
        router.run("nft", &["-f", "-"], rules)?;
        Ok(Forwarder { client, server, _router: router })
    }
}

/// Creates a namespace. Clients use the first processor, like the switch, and servers the second.
fn guest(lab: &Lab, repetition: u32, (n, name): (u8, &str), address: [u8; 4]) -> Result<Guest> {
    let mut namespace = Namespace::create(format!("{}-{repetition}-{name}", lab.run.id()))?;
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    if !lab.options.share_processors && processors > 1 {
        let is_server = name.contains("server") || name == "outside";
        namespace.pin(usize::from(is_server));
    }
    let mac = format!("02:00:00:00:01:{n:02x}");
    Ok(Guest { namespace, name: name.to_owned(), address: address.into(), mac })
}

/// The median over repetitions; `None` if it was not measured.
fn spread(rows: &[Row], through: Through, connections: Connections, field: fn(&Row) -> f64) -> Option<Spread> {
    Spread::of(rows.iter().filter(|row| row.through == through && row.connections == connections).map(field))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(through: Through, connections: Connections, rps: f64) -> Row {
        Row {
            through,
            connections,
            repetition: 0,
            clients: CLIENTS,
            requests: 1,
            rps,
            latency_ms_p50: 1.0,
            latency_ms_p99: 2.0,
        }
    }

    #[test]
    fn each_bar_can_fail() {
        let passed = |floating, shared| -> Vec<bool> {
            let rows = [(Through::Switch, 100.0), (Through::FloatingIp, floating), (Through::SharedAddress, shared)]
                .map(|(through, rps)| row(through, Connections::Persistent, rps));
            NatExperiment.bars(&to_values(&rows).unwrap()).unwrap().iter().map(Bar::passes).collect()
        };
        assert_eq!(passed(91.0, 91.0), [true, true]);
        assert_eq!(passed(89.0, 91.0), [false, true]);
        assert_eq!(passed(91.0, 89.0), [true, false]);
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
    }
}
