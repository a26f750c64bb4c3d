//! `gw-services`: packets per second of a gateway pod's core for each of its services, compared with the kernel's
//! forwarding and DPDK's packet forwarder (Albatross, table 3).

mod kernel;
mod pod;

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::circle::{PROCESSORS, need_processors};
use crate::bars::{Bar, Sense};
use crate::frame::Experiment;
use crate::gateway::feeder::{self, Feeder, Flows};
use crate::gateway::frames::HEADERS;
use crate::lab::Lab;
use crate::netns::Namespace;
use crate::options::Mode;
use crate::plot::{self, Panel, Series};
use crate::processor;
use crate::programs::testpmd::{self, Testpmd};
use crate::report::{Table, factor};
use crate::results::from_values;
use crate::stats::{Spread, cell, middle, paired_ratio};
use crate::turns;

/// Number of flows, used in turn.
const FLOWS: u32 = 500_000;
/// Bytes of a frame.
const FRAME: usize = 256;
/// Payload bytes after the headers of a frame.
const PAYLOAD: usize = FRAME - HEADERS;
/// Warm-up after each flow has sent a packet.
const WARM_UP: Duration = Duration::from_secs(1);
/// The processor of the sender, and that of the forwarder.
const FEEDS: usize = PROCESSORS[0];
const WORKS: usize = PROCESSORS[1];

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct GwServices;

/// The forwarder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Forwarder {
    /// `bifrost-gw` with one worker.
    Pod,
    /// Linux: VXLAN devices, routes, and the source NAT of nftables.
    Kernel,
    /// `dpdk-testpmd` over memif, which only swaps MAC addresses.
    Testpmd,
}

/// The service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Service {
    /// To another host of the VPC.
    Vpc,
    /// To the Internet, with an ACL and many-to-one NAT.
    Internet,
    /// To the customer's network, over GRE.
    Idc,
    /// To a backend of a cloud service, with translation of both addresses.
    CloudService,
    /// Back to the sender, unchanged.
    None,
}

/// Forwarder and service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Point(Forwarder, Service);

/// What is measured together: a forwarder with one service, or a pod, whose services take short turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Pod,
    Other(Forwarder, Service),
}

const PARTS: [Part; 4] = [
    Part::Other(Forwarder::Testpmd, Service::None),
    Part::Pod,
    Part::Other(Forwarder::Kernel, Service::Vpc),
    Part::Other(Forwarder::Kernel, Service::Internet),
];

const POINTS: [Point; 7] = [
    Point(Forwarder::Testpmd, Service::None),
    Point(Forwarder::Pod, Service::Vpc),
    Point(Forwarder::Pod, Service::Internet),
    Point(Forwarder::Pod, Service::Idc),
    Point(Forwarder::Pod, Service::CloudService),
    Point(Forwarder::Kernel, Service::Vpc),
    Point(Forwarder::Kernel, Service::Internet),
];

impl fmt::Display for Forwarder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Forwarder::Pod => "pod",
            Forwarder::Kernel => "kernel",
            Forwarder::Testpmd => "testpmd",
        })
    }
}

impl fmt::Display for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Service::Vpc => "vpc",
            Service::Internet => "internet",
            Service::Idc => "idc",
            Service::CloudService => "cloud_service",
            Service::None => "none",
        })
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Part::Pod => f.write_str("pod"),
            Part::Other(forwarder, service) => write!(f, "{forwarder}-{service}"),
        }
    }
}

/// The rows of a part.
#[derive(Serialize)]
#[serde(transparent)]
struct Rows(Vec<Row>);

impl fmt::Display for Rows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines = POINTS.into_iter().filter_map(|Point(forwarder, service)| {
            let of = |field: fn(&Row) -> f64| spread(&self.0, forwarder, service, field);
            of(Row::of_a_core)?;
            let (pps, ns) = (cell(of(|r| r.of_a_core() / 1e6)), cell(of(|r| r.transfer_ns)));
            Some(format!("{forwarder}, {service}: {pps} million packets/s of a core, {ns} ns between processors"))
        });
        f.write_str(&lines.collect::<Vec<_>>().join("; "))
    }
}

/// The result of one service of one forwarder.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The forwarder.
    #[serde(rename = "mode")]
    pub forwarder: Forwarder,
    /// The service.
    pub service: Service,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Number of the turn in the repetition, from 0.
    pub turn: u32,
    /// Flows that took turns.
    pub flows: u32,
    /// Bytes of a frame.
    pub frame_bytes: u32,
    /// Duration of the count, s.
    pub duration_s: f64,
    /// Packets forwarded per second.
    pub packets_per_s: f64,
    /// Busy time of the core, percent.
    pub busy_percent: f64,
    /// Packets that were dropped.
    pub dropped_packets: u64,
    /// Latency of a write from one of the two processors to the other, measured before the turn, ns. For a pod, it is
    /// also measured after the turn, and this is the larger value.
    pub transfer_ns: f64,
}

impl Row {
    /// Packets per second of busy time.
    fn of_a_core(&self) -> f64 {
        self.packets_per_s / (self.busy_percent / 100.0)
    }
}

impl Experiment for GwServices {
    fn name(&self) -> &'static str {
        "gw-services"
    }

    fn summary(&self) -> &'static str {
        "Packets per second of a gateway's core by service, compared with Linux and DPDK (SIGCOMM'25 table 3)"
    }

    /// None: it builds its own network.
    fn modes(&self) -> Vec<Mode> {
        Vec::new()
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        need_processors()?;
        let time = Duration::from_secs_f64(lab.seconds(4.0, 2.0));
        let rows = turns::each(lab.repetitions(3), &PARTS, |part, repetition| measure(lab, *part, repetition, time))?;
        Ok(rows.into_iter().flat_map(|rows| rows.as_array().cloned().unwrap_or_default()).collect())
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut table = Table::new(&[
            "forwarder",
            "service",
            "million packets/s per core",
            "relative to VPC-VPC",
            "in the paper",
            "ns per packet",
            "core busy, %",
            "ns between processors",
        ]);
        for Point(forwarder, service) in POINTS {
            let of = |field: fn(&Row) -> f64| spread(&rows, forwarder, service, field);
            let base = spread(&rows, forwarder, Service::Vpc, Row::of_a_core);
            // Table 3: 128.8, 81.6, 119.4 and 126.3 Mpps.
            let paper = match service {
                Service::Internet => "0.63x",
                Service::Idc => "0.93x",
                Service::CloudService => "0.98x",
                Service::Vpc | Service::None => "-",
            };
            table.row(vec![
                forwarder.to_string(),
                service.to_string(),
                cell(of(|r| r.of_a_core() / 1e6)),
                factor(middle(of(Row::of_a_core)), middle(base)),
                paper.to_owned(),
                cell(of(|r| 1e9 / r.of_a_core())),
                cell(of(|r| r.busy_percent)),
                cell(of(|r| r.transfer_ns)),
            ]);
        }
        Ok(format!(
            "{FLOWS} UDP flows in frames of {FRAME} bytes, in turn. A pod's worker has its own processor and gets its \
             packets over memif from the lab on the other processor, which only copies; so does `dpdk-testpmd`. Linux \
             gets them over a veth pair, whose receive steering (RPS) hands them to its processor, and sends them into \
             another veth pair, at whose end they are dropped. \"Per core\": packets per second of busy time. A worker \
             is busy in turns that find packets, Linux whenever its processor is not idle, `dpdk-testpmd` always. \
             Linux's figure includes its devices; the others do not, because there the NIC pipeline handles them. \
             \"Between processors\": the latency of a write from one to the other; each packet crosses twice. A pod's \
             services take turns of 0.4 s, each with an idle moment before and after it, in which that latency and the \
             worker's busy time are read. Medians, with the minimum and maximum in brackets.\n\n{}",
            table.render()
        ))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let services = [Service::Vpc, Service::Internet, Service::Idc, Service::CloudService];
        let series = [(Series::on("bifrost-gw"), Forwarder::Pod), (Series::off("Linux"), Forwarder::Kernel)];
        let panel = Panel::over(
            &format!("{FLOWS} flows, {FRAME} bytes"),
            ("service", &services[..]),
            ("million packets/s per core", false),
            &series,
            |forwarder, service| spread(&rows, forwarder, *service, |r| r.of_a_core() / 1e6),
        );
        Ok(vec![plot::draw(&directory.join("services.svg"), &[panel], 1)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let is = |forwarder, service| move |r: &Row| r.forwarder == forwarder && r.service == service;
        let (pod, kernel) = (Forwarder::Pod, Forwarder::Kernel);
        let internet = || is(pod, Service::Internet);
        // Adjacent turns.
        let beside_vpc =
            paired_ratio(&rows, |r| (r.repetition, r.turn), (internet(), is(pod, Service::Vpc)), Row::of_a_core);
        let beside_linux =
            paired_ratio(&rows, |r| r.repetition, (internet(), is(kernel, Service::Internet)), Row::of_a_core);
        let vpc = spread(&rows, pod, Service::Vpc, |r| r.of_a_core() / 1e6).map(|spread| spread.median);
        let dropped = rows.iter().filter(|r| r.forwarder == pod).map(|r| r.dropped_packets as f64).reduce(f64::max);
        Ok(vec![
            Bar::new("packets a second of a core, VPC-VPC", vpc, Sense::AtLeast, 1.0, "million"),
            Bar::new("packets a second, VPC-Internet over VPC-VPC", beside_vpc, Sense::AtLeast, 0.6, "x"),
            Bar::new(
                "packets a second of a core, VPC-Internet, over Linux with nftables",
                beside_linux,
                Sense::AtLeast,
                1.0,
                "x",
            ),
            Bar::new("packets that a pod dropped, worst run", dropped, Sense::AtMost, 0.0, "packets").exact(),
        ])
    }
}

/// The median over repetitions; `None` if that was not measured.
fn spread(rows: &[Row], forwarder: Forwarder, service: Service, field: fn(&Row) -> f64) -> Option<Spread> {
    Spread::of(rows.iter().filter(|row| row.forwarder == forwarder && row.service == service).map(field))
}

fn measure(lab: &Lab, part: Part, repetition: u32, time: Duration) -> Result<Rows> {
    let logs = lab.logs(&format!("{part}-{repetition}"));
    let (forwarder, turns) = match part {
        Part::Pod => (Forwarder::Pod, pod::measure(lab, time, &logs)?),
        Part::Other(forwarder, service) => {
            let transfer_ns = processor::transfer_ns(FEEDS, WORKS)?;
            let measured = match forwarder {
                Forwarder::Testpmd => with_testpmd(lab, time, &logs)?,
                _ => kernel::measure(lab, service, time)?,
            };
            (forwarder, vec![(service, transfer_ns, measured)])
        }
    };
    let row = |turn: u32, (service, transfer_ns, measured): (Service, f64, Measured)| {
        let Measured { forwarded, dropped, seconds, busy_s } = measured;
        if forwarded == 0 {
            bail!("no packet is forwarded (see {})", logs.display());
        }
        Ok(Row {
            forwarder,
            service,
            repetition,
            turn,
            flows: FLOWS,
            frame_bytes: FRAME as u32,
            duration_s: seconds,
            packets_per_s: forwarded as f64 / seconds,
            busy_percent: 100.0 * busy_s / seconds,
            dropped_packets: dropped,
            transfer_ns,
        })
    };
    // A round has a turn of each service.
    let number = |service: Service, before: &[(Service, f64, Measured)]| {
        before.iter().filter(|(other, ..)| *other == service).count() as u32
    };
    let rows = turns.iter().enumerate().map(|(n, turn)| row(number(turn.0, &turns[..n]), *turn));
    Ok(Rows(rows.collect::<Result<_>>()?))
}

/// Counts of a measurement.
#[derive(Debug, Clone, Copy)]
struct Measured {
    forwarded: u64,
    dropped: u64,
    seconds: f64,
    busy_s: f64,
}

/// The upper bound: the same packets through a memif client that only swaps addresses.
fn with_testpmd(lab: &Lab, time: Duration, logs: &Path) -> Result<Measured> {
    let socket = lab.run.directory().join("memif.sock");
    let feeder = Feeder::listen(socket.clone(), 1)?;
    let mut namespace = Namespace::create(format!("{}-testpmd", lab.run.id()))?;
    namespace.pin(WORKS);
    let device =
        format!("net_memif0,role=client,id=0,socket={},socket-abstract=no,rsize=10,bsize=2048", socket.display());
    let options = ["--forward-mode=macswap", "--no-flush-rx"];
    let mut testpmd = Testpmd::start_with(&namespace, WORKS, &[device], &options, &logs.join("testpmd"))?;
    testpmd.tell("start")?;
    let (mut to, mut from) = feeder.rings(Duration::from_secs(10))?;
    let (Some(to), Some(from)) = (to.first_mut(), from.first_mut()) else { bail!("dpdk-testpmd has no rings") };
    let flows = Flows { headers: pod::flows(Service::Vpc)?, payload: PAYLOAD };
    let fed = processor::on(FEEDS, || feeder::feed((to, from), &flows, (WARM_UP, time)))?;
    testpmd.tell("stop")?;
    testpmd.wait_for("CPU cycles/packet=", Duration::from_secs(5))?;
    // It busy-polls, so the time per packet is the processing time.
    let Some((cycles, mhz)) = testpmd::cycles_per_packet(&testpmd.printed()) else {
        bail!("dpdk-testpmd printed no cycles")
    };
    let busy_s = (fed.forwarded as f64 * cycles / (mhz * 1e6)).min(fed.seconds);
    Ok(Measured { forwarded: fed.forwarded, dropped: fed.dropped, seconds: fed.seconds, busy_s })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::results::to_values;

    #[test]
    fn each_bar_can_fail() {
        let row = |Point(forwarder, service)| Row {
            forwarder,
            service,
            repetition: 0,
            turn: 0,
            flows: FLOWS,
            frame_bytes: 256,
            duration_s: 4.0,
            packets_per_s: if service == Service::Vpc { 1.2e6 } else { 0.8e6 },
            busy_percent: 100.0,
            dropped_packets: 0,
            transfer_ns: 60.0,
        };
        let missed = |change: fn(&mut Vec<Row>)| {
            let mut rows: Vec<Row> = POINTS.into_iter().map(row).collect();
            rows[6].packets_per_s = 0.3e6;
            change(&mut rows);
            GwServices.bars(&to_values(&rows).unwrap()).unwrap().iter().filter(|bar| !bar.passes()).count()
        };
        assert_eq!(missed(|_| {}), 0);
        assert_eq!(missed(|rows| rows[1].packets_per_s = 0.9e6), 1);
        assert_eq!(missed(|rows| rows[2].packets_per_s = 0.7e6), 1);
        assert_eq!(missed(|rows| rows[6].packets_per_s = 0.81e6), 1);
        assert_eq!(missed(|rows| rows[4].dropped_packets = 1), 1);
        // Turns count for the rate even if the processors were far apart. Ratios of adjacent turns do not change.
        let far = |rows: &mut Vec<Row>| {
            let slow = |row: &Row, turn| Row {
                turn,
                packets_per_s: row.packets_per_s / 3.0,
                transfer_ns: 400.0,
                ..row.clone()
            };
            let far: Vec<Row> = (1..4).flat_map(|turn| rows[1..3].iter().map(move |row| slow(row, turn))).collect();
            rows.extend(far);
            rows[6].packets_per_s = 0.1e6;
        };
        assert_eq!(missed(far), 1);
    }
}
