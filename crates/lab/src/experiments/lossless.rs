//! `lossless`: requests, bytes and small datagrams per second without loss, compared with the kernel's VXLAN, and
//! between two guests of one host compared with a bridge.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bars::{Bar, Sense};
use crate::daemon::Settings;
use crate::frame::Experiment;
use crate::lab::{Lab, Network};
use crate::netns::Namespace;
use crate::options::{Mode, Op};
use crate::plot::{self, Panel};
use crate::processor::{self, LEGEND, Reading, Shares};
use crate::programs::redis_server::RedisServer;
use crate::programs::{iperf3, redis_benchmark};
use crate::report::{Table, factor};
use crate::results::from_values;
use crate::stats::{LatencyMs, Spread, cell, distinct, paired_ratio};
use crate::topology::overlay::choose_congestion_control;
use crate::topology::{GUEST_MTU, Guest};
use crate::turns;

/// Pipelining: requests that a client sends before it waits for an answer.
const PIPELINE: u32 = 16;
/// Number of TCP flows in the load with many.
const FLOWS: u32 = 8;
/// Payload of a small datagram, bytes.
const DATAGRAM_BYTES: u32 = 64;
/// The VNI of two guests of one host; their network exists next to that of two hosts.
const ONE_HOST_VNI: u32 = 201;
/// Required ratio to a bridge with two veth pairs, for two guests of one host, at any load.
const OF_BRIDGE: f64 = 0.8;
/// Bounds for latencies of Redis with many clients, relative to the kernel's VXLAN: P50, P99.9.
const LATENCIES: [f64; 2] = [1.3, 1.0];

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct Lossless;

/// Location of the two guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// On two hosts, each with its guest on one processor.
    TwoHosts,
    /// On one host: the client and the switch on one processor, the server on the other.
    OneHost,
}

/// The load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Load {
    /// `redis-benchmark`, `GET`, with the number of clients in `--clients`.
    Requests,
    /// The same, with 16 pipelined requests per client.
    PipelinedRequests,
    /// The same, one client with one request at a time.
    OneClient,
    /// `iperf3`, one TCP flow.
    OneFlow,
    /// `iperf3`, eight TCP flows.
    EightFlows,
    /// `iperf3`, one TCP flow from the server's guest to the client's.
    OneFlowBack,
    /// `iperf3`, datagrams with 64 bytes of payload, at the client's maximum rate.
    SmallDatagrams,
}

impl Load {
    const ALL: [Load; 7] = [
        Load::Requests,
        Load::PipelinedRequests,
        Load::OneClient,
        Load::OneFlow,
        Load::EightFlows,
        Load::OneFlowBack,
        Load::SmallDatagrams,
    ];

    /// The unit of [`Row::per_s`] in reports, in thousands or millions.
    fn unit(self) -> (&'static str, f64) {
        match self {
            Load::Requests | Load::PipelinedRequests | Load::OneClient => ("thousand requests/s", 1e3),
            Load::OneFlow | Load::EightFlows | Load::OneFlowBack => ("Mbit/s", 1e6),
            Load::SmallDatagrams => ("thousand packets/s", 1e3),
        }
    }

    /// Required ratio to the kernel's VXLAN.
    fn of_kernel(self) -> f64 {
        match self {
            Load::Requests | Load::SmallDatagrams => 1.0,
            Load::PipelinedRequests => 0.95,
            Load::OneClient => 0.8,
            Load::OneFlow | Load::EightFlows | Load::OneFlowBack => 0.9,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Load::Requests => "requests",
            Load::PipelinedRequests => "pipelined_requests",
            Load::OneClient => "one_client",
            Load::OneFlow => "one_flow",
            Load::EightFlows => "eight_flows",
            Load::OneFlowBack => "one_flow_back",
            Load::SmallDatagrams => "small_datagrams",
        }
    }
}

impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The result of one load over one network.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The network; between guests of one host `kernel_vxlan` is a bridge with two veth pairs.
    pub mode: Mode,
    /// Location of the guests.
    pub place: Place,
    /// Workers of each `bifrostd`; 0 for other switches.
    pub workers: u8,
    /// Whether several packets crossed an underlay link as one buffer.
    pub wire_offload: bool,
    /// The load.
    pub load: Load,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Approximate duration of the load, s.
    pub duration_s: f64,
    /// Answered requests, bits of goodput, or received datagrams, 1/s.
    pub per_s: f64,
    /// Median latency of a request, ms; `null` for loads without requests.
    pub latency_ms_p50: Option<f64>,
    /// 99.9th percentile, ms.
    pub latency_ms_p99_9: Option<f64>,
    /// Use of all processors, percent.
    pub processor_percent: Shares,
}

impl Row {
    fn link(&self) -> Link {
        Link { mode: self.mode, place: self.place, workers: self.workers, wire_offload: self.wire_offload }
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, scale) = self.load.unit();
        write!(f, "{:<44} {:<18} {:>8.1} {unit}", self.link().to_string(), self.load, self.per_s / scale)
    }
}

/// The network between the guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Link {
    place: Place,
    wire_offload: bool,
    mode: Mode,
    workers: u8,
}

impl Link {
    /// The network that it is compared with.
    fn kernel(self) -> Link {
        Link { mode: Mode::KernelVxlan, workers: 0, ..self }
    }

    /// The name of the switch in reports.
    fn switch(self) -> String {
        let name = match (self.mode, self.place) {
            (Mode::KernelVxlan, Place::OneHost) => "bridge",
            (mode, _) => mode.name(),
        };
        match self.workers {
            0 => name.to_owned(),
            1 => format!("{name}, 1 worker"),
            n => format!("{name}, {n} workers"),
        }
    }

    /// The location in reports.
    fn site(self) -> &'static str {
        match (self.place, self.wire_offload) {
            (Place::TwoHosts, false) => "two hosts, offloads off",
            (Place::TwoHosts, true) => "two hosts, offloads on",
            (Place::OneHost, _) => "one host",
        }
    }
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.switch(), self.site())
    }
}

/// The networks, in groups that exist side by side.
fn groups(lab: &Lab) -> Vec<Vec<Link>> {
    let (quick, modes) = (lab.options.quick, &lab.options.modes);
    let group = |place, wire_offload| {
        // Open vSwitch is configured as in `switch-overall`.
        let is_there = |mode: &&Mode| {
            **mode != Mode::OpenVswitch || place == Place::TwoHosts && wire_offload == lab.options.wire_offload
        };
        let workers = |mode: Mode| match (mode.is_bifrostd(), quick) {
            (false, _) => 0..=0,
            (true, true) => 1..=1,
            (true, false) => 1..=2,
        };
        let links = |&mode: &Mode| workers(mode).map(move |workers| Link { mode, place, workers, wire_offload });
        modes.iter().filter(is_there).flat_map(links).collect()
    };
    let both: &[bool] = match (lab.options.wire_offload, quick) {
        (true, _) => &[true],
        (false, true) => &[false],
        (false, false) => &[false, true],
    };
    let two_hosts = both.iter().map(|&wire_offload| group(Place::TwoHosts, wire_offload));
    two_hosts.chain([group(Place::OneHost, false)]).collect()
}

impl Experiment for Lossless {
    fn name(&self) -> &'static str {
        "lossless"
    }

    fn summary(&self) -> &'static str {
        "Requests, bytes and small datagrams per second without loss, compared with the kernel's VXLAN and a bridge"
    }

    fn modes(&self) -> Vec<Mode> {
        Mode::with_af_xdp(&Mode::SWITCHES)
    }

    fn default_modes(&self, quick: bool) -> Vec<Mode> {
        if quick {
            vec![Mode::KernelVxlan, Mode::Bifrost]
        } else {
            vec![Mode::KernelVxlan, Mode::OpenVswitch, Mode::Bifrost]
        }
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let duration_s = lab.seconds(3.0, 1.0).ceil();
        let mut rows = Vec::new();
        for links in groups(lab) {
            let begin = |link: &Link, repetition| Bench::build(lab, *link, repetition);
            rows.extend(turns::measure(
                lab.repetitions(5),
                &links,
                &Load::ALL,
                begin,
                |_, bench, load, repetition| bench.measure(lab, *load, repetition, duration_s),
            )?);
        }
        Ok(rows)
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut text = format!(
            "Nothing is lost. `redis-benchmark`, `GET`: *requests* over many connections, *pipelined_requests* with \
             {PIPELINE} in flight per connection, *one_client*; `iperf3`: TCP flows, and datagrams with \
             {DATAGRAM_BYTES} bytes of payload. Medians, with the minimum and maximum of the repetitions in brackets; \
             factors compare with the kernel in the same repetition.\n"
        );
        let links = distinct(&rows, Row::link);
        let mut sites: Vec<_> = links.iter().map(|link| link.site()).collect();
        sites.dedup();
        for site in sites {
            text += &format!("\n### {}\n\n", capitalized(site));
            let mut table = Table::new(&["load", "switch", "per second", "", "of the kernel's", "P50 ms", "P99.9 ms"]);
            for load in Load::ALL {
                for link in links.iter().copied().filter(|link| link.site() == site) {
                    let here = |row: &&Row| row.load == load && row.link() == link;
                    let of = |field: fn(&Row) -> f64| Spread::of(rows.iter().filter(here).map(field));
                    let Some(rate) = of(|row| row.per_s / row.load.unit().1) else { continue };
                    let latency = |field| cell(of(field).filter(|spread| !spread.median.is_nan()));
                    table.row(vec![
                        load.to_string(),
                        link.switch(),
                        rate.to_string(),
                        load.unit().0.to_owned(),
                        factor(ratio(&rows, load, link, |row| row.per_s).unwrap_or(f64::NAN), 1.0),
                        latency(|row| row.latency_ms_p50.unwrap_or(f64::NAN)),
                        latency(|row| row.latency_ms_p99_9.unwrap_or(f64::NAN)),
                    ]);
                }
            }
            text += &table.render();
        }
        text += &profile(&rows);
        Ok(text)
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let links = distinct(&rows, Row::link);
        let over = |link: &Link| {
            let (x, y) = (("load", Load::ALL.as_slice()), ("of the kernel's, a second", false));
            let series = [(plot::Series::from(link.mode), *link)];
            Panel::over(&link.to_string(), x, y, &series, |link, load| {
                Spread::of(ratio(&rows, *load, link, |row| row.per_s).into_iter())
            })
        };
        let panels: Vec<Panel> = links.iter().filter(|link| **link != link.kernel()).map(over).collect();
        Ok(vec![plot::draw(&directory.join("lossless.svg"), &panels, 2)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        // A quick run leaves some out; one worker without offloads, and one host, are required.
        let least = [Place::TwoHosts, Place::OneHost].map(|place| Link {
            mode: Mode::Bifrost,
            place,
            workers: 1,
            wire_offload: false,
        });
        let more =
            distinct(&rows, Row::link).into_iter().filter(|link| link.mode == Mode::Bifrost && !least.contains(link));
        Ok(least.into_iter().chain(more).flat_map(|link| bars_of(&rows, link)).collect())
    }
}

fn bars_of(rows: &[Row], link: Link) -> Vec<Bar> {
    let kernel = link.kernel().switch();
    let mut bars = Vec::new();
    for load in Load::ALL {
        let bound = if link.place == Place::OneHost { OF_BRIDGE } else { load.of_kernel() };
        let name = format!("{link}: {load} a second over {kernel}");
        bars.push(Bar::new(name, ratio(rows, load, link, |row| row.per_s), Sense::AtLeast, bound, "x"));
    }
    if link.place == Place::TwoHosts {
        type Percentile = (&'static str, fn(&Row) -> f64);
        let percentiles: [Percentile; 2] = [
            ("P50", |row| row.latency_ms_p50.unwrap_or(f64::NAN)),
            ("P99.9", |row| row.latency_ms_p99_9.unwrap_or(f64::NAN)),
        ];
        for ((percentile, field), bound) in percentiles.into_iter().zip(LATENCIES) {
            let name = format!("{link}: {percentile} of {} over {kernel}", Load::Requests);
            bars.push(Bar::new(name, ratio(rows, Load::Requests, link, field), Sense::AtMost, bound, "x"));
        }
    }
    bars
}

/// The ratio of `field` to the kernel's value in the same repetition.
fn ratio(rows: &[Row], load: Load, link: Link, field: fn(&Row) -> f64) -> Option<f64> {
    let is = |link: Link| move |row: &Row| row.load == load && row.link() == link;
    paired_ratio(rows, |row| row.repetition, (is(link), is(link.kernel())), field)
}

fn profile(rows: &[Row]) -> String {
    let points = distinct(rows, Row::link).into_iter().flat_map(|link| Load::ALL.map(|load| (link, load)));
    let shares = |(link, load): (Link, Load)| {
        let here = rows.iter().filter(|row| row.link() == link && row.load == load);
        ([link.site().to_owned(), load.to_string(), link.switch()], here.map(|row| &row.processor_percent).collect())
    };
    format!(
        "\n### Use of the processors\n\nUse of both processors, percent, medians; {LEGEND}:\n\n{}",
        processor::table(["place", "load", "switch"], points.map(shares))
    )
}

fn capitalized(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().collect::<String>() + letters.as_str())
}

/// Two guests, the network between them, and a server in the second one.
struct Bench {
    // The order matters: the server ends before its network, and the network before its namespaces are deleted.
    server: RedisServer,
    network: Option<Network>,
    pair: Option<Pair>,
    link: Link,
    logs: PathBuf,
}

impl Bench {
    fn build(lab: &Lab, link: Link, repetition: u32) -> Result<Self> {
        let Link { place, wire_offload, mode, workers } = link;
        let site = match (place, wire_offload) {
            (Place::TwoHosts, false) => "two-hosts",
            (Place::TwoHosts, true) => "two-hosts-offload",
            (Place::OneHost, _) => "one-host",
        };
        let label = format!("{site}-{mode}-{workers}-{repetition}");
        let logs = lab.logs(&label);
        std::fs::create_dir_all(&logs).with_context(|| format!("creating {}", logs.display()))?;
        let settings = Settings { workers: Some(workers).filter(|n| *n > 0), wire_offload, ..lab.settings() };
        let pair = if place == Place::OneHost { Some(Pair::create(lab)?) } else { None };
        let network = match &pair {
            None => Some(lab.network_with(mode, &label, settings)?),
            Some(pair) if mode == Mode::KernelVxlan => {
                pair.bridge()?;
                None
            }
            Some(pair) => {
                let settings = Settings { more: vec![pair.configuration(mode)], ..settings };
                Some(lab.network_with(mode, &label, settings)?)
            }
        };
        if let Some(pair) = &pair {
            pair.guests.iter().try_for_each(|guest| choose_congestion_control(guest, "cubic"))?;
        }
        let [_, server] = guests(&pair, &network)?;
        Ok(Bench { server: RedisServer::start(server, &logs)?, network, pair, link, logs })
    }

    fn measure(&mut self, lab: &Lab, load: Load, repetition: u32, duration_s: f64) -> Result<Row> {
        let Link { place, wire_offload, mode, workers } = self.link;
        let guests = guests(&self.pair, &self.network)?;
        let (per_s, latency, processor_percent) = match load {
            Load::Requests => self.requests(guests, load, (lab.options.clients, 1), duration_s)?,
            Load::PipelinedRequests => self.requests(guests, load, (lab.options.clients, PIPELINE), duration_s)?,
            Load::OneClient => self.requests(guests, load, (1, 1), duration_s)?,
            Load::OneFlow | Load::EightFlows | Load::OneFlowBack | Load::SmallDatagrams => {
                self.flows(guests, load, duration_s)?
            }
        };
        self.server.check_alive()?;
        if let Some(network) = &mut self.network {
            network.check()?;
        }
        Ok(Row {
            mode,
            place,
            workers,
            wire_offload,
            load,
            repetition,
            duration_s,
            per_s,
            latency_ms_p50: latency.map(|latency| latency.p50),
            latency_ms_p99_9: latency.map(|latency| latency.p99_9),
            processor_percent,
        })
    }

    /// Runs as many requests as take `duration_s`, according to a short trial.
    fn requests(
        &self,
        [client, server]: [&Guest; 2],
        load: Load,
        (clients, pipeline): (u32, u32),
        duration_s: f64,
    ) -> Result<Measured> {
        let timeout = Duration::from_secs_f64(60.0 + 10.0 * duration_s);
        let run = |requests, name: &str| {
            let load = redis_benchmark::Load { op: Op::Get, clients, requests, keep_alive: true, pipeline };
            redis_benchmark::run(client, server, load, timeout, &self.logs.join(format!("{name}.txt")))
        };
        let trial = run(u64::from(pipeline) * redis_benchmark::TRIAL_REQUESTS, &format!("{load}-trial"))?;
        let before = Reading::take()?;
        let measured = run(trial.requests_in(duration_s), load.name())?;
        Ok((measured.rps, Some(measured.latency_ms), Reading::take()?.since(&before)))
    }

    fn flows(&self, [client, server]: [&Guest; 2], load: Load, duration_s: f64) -> Result<Measured> {
        let (from, to) = if load == Load::OneFlowBack { (server, client) } else { (client, server) };
        let flows = if load == Load::EightFlows { FLOWS } else { 1 };
        let bytes = DATAGRAM_BYTES.to_string();
        let is_small = load == Load::SmallDatagrams;
        let words: &[&str] = if is_small { &["-u", "-b", "0", "-l", &bytes] } else { &[] };
        let before = Reading::take()?;
        let running = iperf3::Running::start_in(
            (&from.namespace, &to.namespace),
            SocketAddrV4::new(to.address, iperf3::PORT),
            iperf3::Load { flows, ..iperf3::Load::one_flow(duration_s) },
            words,
            &self.logs,
            load.name(),
        )?;
        let bits_per_s = running.finish()?.gbit_per_s * 1e9;
        let per_s = if is_small { bits_per_s / 8.0 / f64::from(DATAGRAM_BYTES) } else { bits_per_s };
        Ok((per_s, None, Reading::take()?.since(&before)))
    }
}

/// The result of a load: per second, latencies, and use of the processors.
type Measured = (f64, Option<LatencyMs>, Shares);

/// Client and server.
fn guests<'a>(pair: &'a Option<Pair>, network: &'a Option<Network>) -> Result<[&'a Guest; 2]> {
    match (pair, network) {
        (Some(pair), _) => Ok(pair.guests.each_ref()),
        (None, Some(network)) => Ok([0, 1].map(|host| &network.topology.hosts[host].guest)),
        (None, None) => bail!("the network has no guests"),
    }
}

/// Two guests of one host: the first host of a network, or a host with a bridge.
struct Pair {
    guests: [Guest; 2],
    host: Namespace,
}

impl Pair {
    fn create(lab: &Lab) -> Result<Self> {
        let part = lab.run.part()?;
        let guest = |number: u8, name: &str| {
            let address = Ipv4Addr::new(10, 1, 0, number + 1);
            let mac = format!("02:00:00:00:01:{:02x}", number + 1);
            Guest::create(&part, name.to_owned(), address, mac, number, lab.plan())
        };
        let guests = [guest(0, "client")?, guest(1, "server")?];
        Ok(Pair { guests, host: Namespace::create(format!("{}-bridge", part.id()))? })
    }

    /// Joins them by a bridge and two veth pairs.
    fn bridge(&self) -> Result<()> {
        self.host.ip_batch("link add br0 type bridge mcast_snooping 0\nlink set br0 up\n")?;
        for (number, guest) in self.guests.iter().enumerate() {
            self.host.ip_batch(&format!(
                "link add p{number} mtu {GUEST_MTU} type veth peer name eth0 mtu {GUEST_MTU} address {} netns {}\n\
                 link set p{number} master br0 up\n",
                guest.mac,
                guest.namespace.name()
            ))?;
            guest.namespace.ip_batch(&format!("addr add {}/24 dev eth0\nlink set eth0 up\n", guest.address))?;
        }
        Ok(())
    }

    /// The part of the daemon's configuration for the two guests.
    fn configuration(&self, mode: Mode) -> String {
        let reliability = if mode.is_reliable() { "tcp" } else { "off" };
        let port = |guest: &Guest| {
            format!(
                "[[port]]\nname = \"{}\"\nvni = {ONE_HOST_VNI}\nmac = \"{}\"\naddresses = [\"{}/24\"]\nmtu = \
                 {GUEST_MTU}\n\
                 netns = \"{}\"\ndevice = \"eth0\"\n\n",
                guest.name,
                guest.mac,
                guest.address,
                guest.namespace.name()
            )
        };
        let ports = self.guests.each_ref().map(port).concat();
        format!("[[vpc]]\nvni = {ONE_HOST_VNI}\nreliability = \"{reliability}\"\n\n{ports}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::to_values;

    const TWO_HOSTS: Link = Link { place: Place::TwoHosts, wire_offload: false, mode: Mode::Bifrost, workers: 1 };
    const ONE_HOST: Link = Link { place: Place::OneHost, ..TWO_HOSTS };

    /// All loads over `link`, each at `times` the kernel's value.
    fn rows(link: Link, times: impl Fn(Load) -> f64) -> Vec<Row> {
        let row = |link: Link, load, times: f64| Row {
            mode: link.mode,
            place: link.place,
            workers: link.workers,
            wire_offload: link.wire_offload,
            load,
            repetition: 0,
            duration_s: 1.0,
            per_s: 1e6 * times,
            latency_ms_p50: (load == Load::Requests).then_some(1.0 / times),
            latency_ms_p99_9: (load == Load::Requests).then_some(2.0 / times),
            processor_percent: Shares::from([("switch".to_owned(), 43.0)]),
        };
        Load::ALL.into_iter().flat_map(|load| [row(link.kernel(), load, 1.0), row(link, load, times(load))]).collect()
    }

    fn failed(rows: &[Row]) -> Vec<String> {
        let bars = Lossless.bars(&to_values(rows).unwrap()).unwrap();
        bars.into_iter().filter(|bar| !bar.passes()).map(|bar| bar.name).collect()
    }

    #[test]
    fn each_bar_can_fail() {
        let good = [rows(TWO_HOSTS, Load::of_kernel), rows(ONE_HOST, |_| OF_BRIDGE)].concat();
        assert_eq!(failed(&good), [""; 0]);
        for load in Load::ALL {
            let slow = |good: fn(Load) -> f64| move |other| if other == load { 0.7 } else { good(other) };
            let two_hosts = failed(&[rows(TWO_HOSTS, slow(Load::of_kernel)), rows(ONE_HOST, |_| OF_BRIDGE)].concat());
            // With fewer requests per second, each takes longer.
            assert_eq!(two_hosts.len(), if load == Load::Requests { 3 } else { 1 }, "{two_hosts:?}");
            assert!(two_hosts.iter().all(|name| name.contains(load.name())), "{two_hosts:?}");
            let one_host = failed(&[rows(TWO_HOSTS, Load::of_kernel), rows(ONE_HOST, slow(|_| OF_BRIDGE))].concat());
            assert_eq!(one_host, [format!("bifrost, 1 worker, one host: {load} a second over bridge")]);
        }
        // Additional links are judged, and missing required ones fail.
        let offloads = Link { wire_offload: true, workers: 2, ..TWO_HOSTS };
        assert_eq!(failed(&[good, rows(offloads, |_| 0.1)].concat()).len(), 9);
        assert_eq!(failed(&[]).len(), 9 + 7);
    }

    #[test]
    fn the_report_names_switches_and_factors() {
        let rows = [rows(TWO_HOSTS, |_| 0.5), rows(ONE_HOST, |_| 0.25)].concat();
        let report = Lossless.report(&to_values(&rows).unwrap()).unwrap();
        let line = |parts: &[&str]| report.lines().any(|line| parts.iter().all(|part| line.contains(part)));
        assert!(line(&["| one_flow_back ", " bifrost, 1 worker ", " Mbit/s ", " 0.50x "]), "{report}");
        assert!(line(&["| requests ", " bifrost, 1 worker ", " 0.25x "]) && line(&[" bridge ", " 1.00x "]), "{report}");
        assert!(report.contains("### Two hosts, offloads off") && report.contains("### One host"), "{report}");
    }
}
