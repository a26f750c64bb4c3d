//! `flow-log`: flow records at a hundred thousand new conversations per second. A guest sends datagrams, each of a
//! different conversation, and `tshark` reads the messages that an IPFIX collector receives. Every packet must be in a
//! record or be counted as unlogged, and the daemon's memory must stay within the bound that `flow_log.flows` implies.

mod collector;

use std::fmt;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use self::collector::Collector;
use super::requests::networks::{container, port};
use crate::bars::{Bar, Sense};
use crate::daemon::{Daemon, Settings};
use crate::frame::Experiment;
use crate::lab::Lab;
use crate::options::Mode;
use crate::plot::{self, Panel, Series};
use crate::programs::flood::Flood;
use crate::programs::hostile::{Frames, Traffic, Vnic};
use crate::report::Table;
use crate::results::from_values;
use crate::stats::{Spread, cell, median_of};
use crate::topology::Guest;
use crate::{inject, interrupt, turns};

/// Rate at which the guest starts conversations, 1/s, and the rate that must be logged. The guest skips packets that it
/// cannot send in time.
const OFFERED_PER_S: f64 = 110_000.0;
const LEAST_PER_S: f64 = 100_000.0;
/// How long records may be in flight after the last packet.
const PATIENCE: Duration = Duration::from_secs(15);
const TICK: Duration = Duration::from_millis(100);
/// Memory of the daemon in addition to its tables, MiB: records in flight to the file and the collector.
const BESIDE_MIB: f64 = 96.0;
/// Size of a conversation in the table, bytes, as stated in docs/operations/configuration.md.
const FLOW_BYTES: f64 = 200.0;

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct FlowLogExperiment;

/// The room for logged conversations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Logging {
    /// Nothing is logged.
    Off,
    /// There is room for all conversations.
    Room,
    /// There is room for a tenth of them.
    Crowded,
}

impl Logging {
    const ALL: [Logging; 3] = [Logging::Off, Logging::Room, Logging::Crowded];

    /// The value of `flow_log.flows`. A conversation stays in the table for one to two seconds.
    fn flows(self) -> Option<u32> {
        match self {
            Logging::Off => None,
            Logging::Room => Some(262_144),
            Logging::Crowded => Some(16_384),
        }
    }
}

impl fmt::Display for Logging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Logging::Off => "off",
            Logging::Room => "room",
            Logging::Crowded => "crowded",
        })
    }
}

/// The result of one flood of conversations.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The room for logged conversations.
    pub mode: Logging,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Duration of the flood, s.
    pub duration_s: f64,
    /// Packets that the switch fetched, each of a different conversation.
    pub received_packets: u64,
    /// Processor time of the daemon during flood and export, s.
    pub processor_s: f64,
    /// Records that the switch created.
    pub created_records: u64,
    /// Records lost because the queue to the exporter was full.
    pub lost_records: u64,
    /// Packets not logged because the table of conversations was full.
    pub unlogged_packets: u64,
    /// Records sent to the collector.
    pub sent_records: u64,
    /// Records that could not be sent.
    pub unsent_records: u64,
    /// Records that `tshark` read at the collector.
    pub collected_records: u64,
    /// Packets counted in these records.
    pub collected_packets: u64,
    /// Maximum growth of the daemon's memory, MiB.
    pub memory_mib: f64,
}

impl Row {
    fn per_s(&self) -> f64 {
        self.received_packets as f64 / self.duration_s
    }

    /// Number of packets and records that were neither collected nor counted as lost.
    fn stray(&self) -> u64 {
        self.received_packets.abs_diff(self.collected_packets + self.unlogged_packets)
            + self.created_records.abs_diff(self.sent_records + self.unsent_records + self.lost_records)
            + self.sent_records.abs_diff(self.collected_records)
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { mode, created_records, unlogged_packets, memory_mib, .. } = self;
        let thousands = self.per_s() / 1000.0;
        write!(
            f,
            "{mode:<8}: {thousands:.0}k conversations/s, {created_records} records, {unlogged_packets} packets not \
             logged, {memory_mib:.0} MiB"
        )
    }
}

impl Experiment for FlowLogExperiment {
    fn name(&self) -> &'static str {
        "flow-log"
    }

    fn summary(&self) -> &'static str {
        "Flow records of a hundred thousand new conversations per second: all are logged or counted, in bounded memory"
    }

    fn modes(&self) -> Vec<Mode> {
        vec![Mode::Off]
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        turns::each(lab.repetitions(3), &Logging::ALL, |logging, repetition| measure(lab, *logging, repetition))
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut table = Table::new(&[
            "log",
            "thousand conversations/s",
            "µs of processor each",
            "packets",
            "records made",
            "collected",
            "packets not logged",
            "stray",
            "memory MiB",
        ]);
        for logging in Logging::ALL {
            let of =
                |field: fn(&Row) -> f64| cell(Spread::of(rows.iter().filter(|row| row.mode == logging).map(field)));
            table.row(vec![
                logging.to_string(),
                of(|row| row.per_s() / 1000.0),
                of(|row| row.processor_s * 1e6 / row.received_packets as f64),
                of(|row| row.received_packets as f64),
                of(|row| row.created_records as f64),
                of(|row| row.collected_records as f64),
                of(|row| row.unlogged_packets as f64),
                of(|row| if row.mode == Logging::Off { 0.0 } else { row.stray() as f64 }),
                of(|row| row.memory_mib),
            ]);
        }
        Ok(format!(
            "A guest sends a datagram in each of {} new conversations per second to another guest of the host. \
             `room`: flow logs with room for all of them. `crowded`: with room for {} at a time. `collected`: records \
             that `tshark` read at an IPFIX collector on the other host. `stray`: packets and records that are neither \
             there nor counted as lost. Medians, with the minimum and maximum of the repetitions in brackets.\n\n{}",
            OFFERED_PER_S,
            Logging::Crowded.flows().unwrap_or_default(),
            table.render()
        ))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let panel = |title: &str, field: fn(&Row) -> f64| {
            Panel::over(
                title,
                ("log", &Logging::ALL[..]),
                (title, false),
                &[(Series::on("bifrostd"), ())],
                |(), logging| Spread::of(rows.iter().filter(|row| row.mode == *logging).map(field)),
            )
        };
        let panels = [
            panel("conversations/s", Row::per_s),
            panel("processor time of each [µs]", |row| row.processor_s * 1e6 / row.received_packets as f64),
        ];
        Ok(vec![plot::draw(&directory.join("flow-log.svg"), &panels, 2)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let logged: Vec<&Row> = rows.iter().filter(|row| row.mode != Logging::Off).collect();
        let with = |logging| logged.iter().copied().filter(move |row| row.mode == logging);
        let most = |values: &mut dyn Iterator<Item = f64>| values.max_by(f64::total_cmp);
        let both = with(Logging::Room).next().and(with(Logging::Crowded).next());
        let strays = both.map(|_| logged.iter().map(|row| row.stray()).sum::<u64>() as f64);
        let unlogged = most(&mut with(Logging::Room).map(|row| row.unlogged_packets as f64));
        let mut bars = vec![
            Bar::new(
                "conversations per second, with room for all",
                median_of(with(Logging::Room).map(Row::per_s)),
                Sense::AtLeast,
                LEAST_PER_S,
                "1/s",
            ),
            Bar::new("packets and records neither collected nor counted", strays, Sense::AtMost, 0.0, "of them")
                .exact(),
            Bar::new("packets not logged, with room for all", unlogged, Sense::AtMost, 0.0, "packets").exact(),
        ];
        for logging in [Logging::Room, Logging::Crowded] {
            let bound = f64::from(logging.flows().unwrap_or_default()) * FLOW_BYTES / f64::from(1 << 20) + BESIDE_MIB;
            let grown = most(&mut with(logging).map(|row| row.memory_mib));
            bars.push(Bar::new(format!("growth of memory, {logging}"), grown, Sense::AtMost, bound, "MiB").exact());
        }
        Ok(bars)
    }
}

fn measure(lab: &Lab, logging: Logging, repetition: u32) -> Result<Row> {
    let label = format!("{logging}-{repetition}");
    // The sender gets a separate processor, because it must keep its rate.
    let sender = container(lab, (1, "sender"), Ipv4Addr::new(10, 1, 0, 1), true)?;
    let sink = container(lab, (2, "sink"), Ipv4Addr::new(10, 1, 0, 2), true)?;
    let ports = [&sender, &sink].map(|guest| port(guest, 201, "")).concat();
    let settings =
        Settings { more: vec![format!("[[vpc]]\nvni = 201\nreliability = \"off\"\n{ports}")], ..lab.settings() };
    let mut network = lab.network_with(Mode::Off, &label, settings)?;
    let daemon = &network.overlay.daemons[0];
    // Otherwise the sink's kernel would answer with ICMP errors, because no program listens.
    inject::count_and_drop(&sink.namespace, "eth0", "ip protocol udp")?;
    let file = lab.logs(&label).join("ipfix.pcap");
    let collector = Collector::start(&network.topology.hosts[1], &file)?;
    if let Some(flows) = logging.flows() {
        let address = network.topology.hosts[1].underlay[0];
        let section = format!(
            "[flow_log]\ncollector = \"{address}:{}\"\nports = [\"sender\"]\nidle_timeout_s = 1\nflows = {flows}\n",
            collector::PORT
        );
        daemon.reconfigure(|text| text + &section)?;
    }
    let before = Counters::read(daemon)?;
    let (memory_kib, processor_s) = (daemon.memory_kib()?, daemon.cpu_seconds()?);
    let mut most_kib = memory_kib;
    let frames = Frames::new(Traffic::Conversations, vnic(&sender), vnic(&sink), u64::from(repetition));
    let flood = Flood::start(&sender.namespace, "eth0", frames, OFFERED_PER_S)?;
    let end = Instant::now() + Duration::from_secs_f64(lab.seconds(5.0, 2.0));
    while Instant::now() < end {
        interrupt::sleep(TICK)?;
        most_kib = most_kib.max(daemon.memory_kib()?);
    }
    let sent = flood.finish()?;
    let deadline = Instant::now() + PATIENCE;
    while daemon.counter("avs.flow_log_current_flows")? > 0 {
        ensure!(Instant::now() < deadline, "conversations stay in the flow log for more than {PATIENCE:?}");
        interrupt::sleep(TICK)?;
        most_kib = most_kib.max(daemon.memory_kib()?);
    }
    // Waits for the last records in flight.
    interrupt::sleep(10 * TICK)?;
    let after = Counters::read(daemon)?;
    let processor_s = daemon.cpu_seconds()? - processor_s;
    network.check()?;
    collector.finish()?;
    let collected = collector::read(&file)?;
    Ok(Row {
        mode: logging,
        repetition,
        duration_s: sent.seconds,
        received_packets: after.received_packets - before.received_packets,
        processor_s,
        created_records: after.created_records - before.created_records,
        lost_records: after.lost_records - before.lost_records,
        unlogged_packets: after.unlogged_packets - before.unlogged_packets,
        sent_records: after.sent_records - before.sent_records,
        unsent_records: after.unsent_records - before.unsent_records,
        collected_records: collected.records,
        collected_packets: collected.packets,
        memory_mib: (most_kib - memory_kib) / 1024.0,
    })
}

/// Counters of the daemon.
struct Counters {
    received_packets: u64,
    created_records: u64,
    lost_records: u64,
    unlogged_packets: u64,
    sent_records: u64,
    unsent_records: u64,
}

impl Counters {
    fn read(daemon: &Daemon) -> Result<Self> {
        let log = daemon.control(&["flow-log"])?;
        let of = |name: &str| log[name].as_u64().with_context(|| format!("`bifrostctl flow-log`: no {name}"));
        Ok(Self {
            received_packets: daemon.counter("datapath.guest_rx_packets")?,
            created_records: of("created_records")?,
            lost_records: of("lost_records")?,
            unlogged_packets: of("unlogged_packets")?,
            sent_records: of("ipfix_records")?,
            unsent_records: of("ipfix_lost_records")?,
        })
    }
}

fn vnic(guest: &Guest) -> Vnic {
    let mut mac = [0; 6];
    for (byte, digits) in mac.iter_mut().zip(guest.mac.split(':')) {
        *byte = u8::from_str_radix(digits, 16).unwrap_or_default();
    }
    Vnic { mac, v4: guest.address.octets(), v6: [0; 16] }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::to_values;

    fn row(mode: Logging) -> Row {
        Row {
            mode,
            repetition: 0,
            duration_s: 5.0,
            received_packets: 550_000,
            processor_s: 2.0,
            created_records: 549_000,
            lost_records: 0,
            unlogged_packets: 0,
            sent_records: 549_000,
            unsent_records: 0,
            collected_records: 549_000,
            collected_packets: 550_000,
            memory_mib: 60.0,
        }
    }

    #[test]
    fn each_bar_can_fail() {
        let passed = |changed: Row| -> Vec<bool> {
            let mut rows = Logging::ALL.map(row);
            let place = changed.mode as usize;
            rows[place] = changed;
            FlowLogExperiment.bars(&to_values(&rows).unwrap()).unwrap().iter().map(Bar::passes).collect()
        };
        let room = || row(Logging::Room);
        assert_eq!(passed(room()), [true; 5]);
        assert_eq!(passed(Row { duration_s: 5.6, ..room() }), [false, true, true, true, true]);
        let uncounted = Row { collected_packets: 549_999, ..room() };
        assert_eq!(passed(uncounted), [true, false, true, true, true]);
        let unlogged = Row { collected_packets: 549_999, unlogged_packets: 1, ..room() };
        assert_eq!(passed(unlogged), [true, true, false, true, true]);
        assert_eq!(passed(Row { memory_mib: 147.0, ..room() }), [true, true, true, false, true]);
        let crowded = Row { memory_mib: 100.0, ..row(Logging::Crowded) };
        assert_eq!(passed(crowded), [true, true, true, true, false]);
        for stray in [
            Row { sent_records: 548_999, collected_records: 548_999, ..room() },
            Row { collected_records: 548_999, ..room() },
        ] {
            assert_eq!(passed(stray), [true, false, true, true, true]);
        }
        assert_eq!(FlowLogExperiment.bars(&[]).unwrap().iter().filter(|bar| bar.passes()).count(), 0);
    }

    #[test]
    fn the_report_counts_strays() {
        let rows = [row(Logging::Off), Row { collected_packets: 549_987, ..row(Logging::Room) }];
        let report = FlowLogExperiment.report(&to_values(&rows).unwrap()).unwrap();
        let line = report.lines().find(|line| line.starts_with("| room")).unwrap();
        assert!(line.contains(" 13.00 ") || line.contains(" 13 "), "{report}");
    }
}
