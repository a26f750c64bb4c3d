//! `flow-records`: packets per second between two vhost-user ports with rules, with and without flow records.
//!
//! The network has an ACL and both guests a security group; every packet is accepted. The switch either evaluates its
//! tables for each packet (`flow_records = 0`), or evaluates the first packets of a flow and caches the verdict.

use std::fmt;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Result;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::circle::{self, CIRCLING, Circled, DESTINATION_PORT, More, Running};
use crate::bars::{Bar, Sense};
use crate::frame::Experiment;
use crate::lab::Lab;
use crate::netns::Namespace;
use crate::options::Mode;
use crate::plot::{self, Panel, Series};
use crate::report::{Table, factor};
use crate::results::from_values;
use crate::stats::{Spread, cell, middle, paired_ratio};
use crate::turns;

/// Numbers of flows of each of the guest's ports, in turn; at most the number of packets in circulation.
const FLOWS: [u32; 3] = [1, 16, CIRCLING];
/// Bytes of a frame, FCS included.
const FRAME_BYTES: u32 = 64;
/// Rules of the ACL for each direction, and of the group.
const ACL_RULES: u32 = 100;
const GROUP_RULES: u16 = 10;

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct FlowRecords;

/// How the switch determines the verdict of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Judged {
    /// By its tables, for each packet.
    Each,
    /// By the record of its flow.
    Remembered,
}

impl Judged {
    const ALL: [Judged; 2] = [Judged::Each, Judged::Remembered];
}

impl fmt::Display for Judged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Judged::Each => "each",
            Judged::Remembered => "remembered",
        })
    }
}

/// The result for one number of flows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// How verdicts were determined.
    pub mode: Judged,
    /// Flows of each of the guest's ports.
    pub flows: u32,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Duration of the count, s.
    pub duration_s: f64,
    /// Packets per second that both of the guest's ports received.
    pub packets_per_s: f64,
    /// Busy cycles of the switch per packet, by the time stamp counter.
    pub cycles_per_packet: f64,
    /// Packets that the guest could not send, of those in circulation.
    pub lost_packets: u64,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { mode, flows, packets_per_s, cycles_per_packet, .. } = self;
        let millions = packets_per_s / 1e6;
        write!(f, "{mode}, {flows} flows: {millions:.2} million packets/s, {cycles_per_packet:.0} cycles per packet")
    }
}

impl Experiment for FlowRecords {
    fn name(&self) -> &'static str {
        "flow-records"
    }

    fn summary(&self) -> &'static str {
        "Packets per second between two vhost-user ports with an ACL and security groups, with and without flow records"
    }

    fn default_modes(&self, _quick: bool) -> Vec<Mode> {
        vec![Mode::Off]
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let seconds = lab.seconds(4.0, 2.0);
        turns::alternate(lab.repetitions(3), &Judged::ALL, &FLOWS, |mode, flows, repetition| {
            measure(lab, *mode, *flows, repetition, seconds)
        })
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut table = Table::new(&[
            "flows each way",
            "packets are judged",
            "million packets/s",
            "cycles per packet",
            "over each",
        ]);
        for flows in FLOWS {
            for mode in Judged::ALL {
                let of = |mode, field: fn(&Row) -> f64| spread(&rows, mode, flows, field);
                let rate: fn(&Row) -> f64 = |r| r.packets_per_s / 1e6;
                table.row(vec![
                    flows.to_string(),
                    mode.to_string(),
                    cell(of(mode, rate)),
                    cell(of(mode, |r| r.cycles_per_packet)),
                    factor(middle(of(mode, rate)), middle(of(Judged::Each, rate))),
                ]);
            }
        }
        Ok(format!(
            "`dpdk-testpmd` with two `net_virtio_user` ports lets {CIRCLING} frames of {FRAME_BYTES} bytes circulate \
             in each direction; both directions count. The network has an ACL of {ACL_RULES} rules for each direction, \
             both guests a security group of {GROUP_RULES}. One processor for the switch, one for the guest. Medians, \
             with the minimum and maximum of the repetitions in brackets.\n\n{}",
            table.render()
        ))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let series =
            [(Series::on("by flow records"), Judged::Remembered), (Series::off("each by the tables"), Judged::Each)];
        let panel = Panel::over(
            "between two vhost-user ports with rules",
            ("flows each way", &FLOWS[..]),
            ("million packets/s", false),
            &series,
            |mode, flows| spread(&rows, mode, *flows, |r| r.packets_per_s / 1e6),
        );
        Ok(vec![plot::draw(&directory.join("rate.svg"), &[panel], 1)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let bar = |flows| {
            let is = |mode| move |r: &Row| r.mode == mode && r.flows == flows;
            let both = (is(Judged::Remembered), is(Judged::Each));
            let ratio = paired_ratio(&rows, |r| r.repetition, both, |r| r.packets_per_s);
            let name = format!("packets/s with flow records over those without, {flows} flows each way");
            Bar::new(name, ratio, Sense::AtLeast, 1.25, "x")
        };
        let lost = rows.iter().map(|r| r.lost_packets as f64).reduce(f64::max);
        let mut bars = FLOWS.map(bar).to_vec();
        bars.push(
            Bar::new("packets that the guest could not send, worst run", lost, Sense::AtMost, 0.0, "packets").exact(),
        );
        Ok(bars)
    }
}

/// The median over repetitions; `None` if that was not measured.
fn spread(rows: &[Row], mode: Judged, flows: u32, field: fn(&Row) -> f64) -> Option<Spread> {
    Spread::of(rows.iter().filter(|row| row.mode == mode && row.flows == flows).map(field))
}

fn measure(lab: &Lab, mode: Judged, flows: u32, repetition: u32, seconds: f64) -> Result<Row> {
    let logs = lab.logs(&format!("{mode}-{flows}-{repetition}"));
    let rules = rules(mode);
    let start = |host: &Namespace, sockets: &[PathBuf; 2]| Running::bifrostd(lab, host, sockets, &rules, &logs);
    let Circled { duration_s, packets_per_s, cycles_per_packet, lost_packets } =
        circle::measure(lab, &logs, start, |port| circle::frames(port, FRAME_BYTES, flows), seconds)?;
    Ok(Row { mode, flows, repetition, duration_s, packets_per_s, cycles_per_packet, lost_packets })
}

/// An ACL for other addresses, and a group whose last rule accepts the packets.
fn rules(mode: Judged) -> More {
    let sections = match mode {
        Judged::Each => "[sessions]\nflow_records = 0\n\n",
        Judged::Remembered => "",
    };
    let mut more = More { sections: sections.to_owned(), ..More::default() };
    more.sections += "[[security_group]]\nname = \"guests\"\ningress = [\n";
    for rule in 1..=GROUP_RULES {
        let ports = if rule == GROUP_RULES { DESTINATION_PORT } else { 100 * rule };
        // Writing to a string cannot fail.
        let _ = writeln!(more.sections, "    {{ protocol = \"udp\", ports = [{ports}], from = [\"10.0.0.0/8\"] }},");
    }
    more.sections += "]\n\n";
    for direction in ["ingress", "egress"] {
        for rule in 0..ACL_RULES {
            let _ = write!(
                more.network,
                "[[vpc.acl]]\ndirection = \"{direction}\"\naction = \"deny\"\nprotocol = \"udp\"\n\
                 ports = [{}]\nfrom = [\"172.16.{rule}.0/24\"]\n",
                3000 + rule
            );
        }
    }
    "security_groups = [\"guests\"]\n".clone_into(&mut more.port);
    more
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::to_values;

    #[test]
    fn each_bar_can_fail() {
        let row = |mode, flows, packets_per_s| Row {
            mode,
            flows,
            repetition: 0,
            duration_s: 4.0,
            packets_per_s,
            cycles_per_packet: 700.0,
            lost_packets: 0,
        };
        let passed = |rates: [f64; 3], lost_packets| -> Vec<bool> {
            let rates = FLOWS.into_iter().zip(rates);
            let mut rows: Vec<Row> = rates
                .flat_map(|(flows, rate)| [row(Judged::Each, flows, 1e6), row(Judged::Remembered, flows, rate)])
                .collect();
            rows[0].lost_packets = lost_packets;
            FlowRecords.bars(&to_values(&rows).unwrap()).unwrap().iter().map(Bar::passes).collect()
        };
        assert_eq!(passed([1.3e6; 3], 0), [true; 4]);
        assert_eq!(passed([1.2e6, 1.3e6, 1.3e6], 0), [false, true, true, true]);
        assert_eq!(passed([1.3e6, 1.2e6, 1.3e6], 0), [true, false, true, true]);
        assert_eq!(passed([1.3e6, 1.3e6, 1.2e6], 0), [true, true, false, true]);
        assert_eq!(passed([1.3e6; 3], 1), [true, true, true, false]);
    }

    #[test]
    fn only_flow_records_differ() {
        let (each, remembered) = (rules(Judged::Each), rules(Judged::Remembered));
        assert_eq!(each.sections, format!("[sessions]\nflow_records = 0\n\n{}", remembered.sections));
        assert_eq!((each.network, each.port), (remembered.network, remembered.port));
    }
}
