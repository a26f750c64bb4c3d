//! `vhost-rate`: packets per second between two vhost-user ports of one host, through `bifrostd` and through DPDK's
//! own vhost back-end.

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::Result;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::circle::{self, CIRCLING, Circled, More, Running};
use crate::bars::{Bar, Sense};
use crate::frame::Experiment;
use crate::lab::Lab;
use crate::netns::Namespace;
use crate::options::Mode;
use crate::plot::{self, Panel, Series};
use crate::report::{Table, number};
use crate::results::from_values;
use crate::stats::{Spread, cell, paired_ratio};
use crate::turns;

/// Bytes of a frame on a wire, including the four bytes of FCS, which no virtual port sees.
const FRAME_BYTES: [u32; 2] = [64, 1500];

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct VhostRate;

/// The switch between the two ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Switch {
    /// `dpdk-testpmd` with two `net_vhost` ports; it copies packets from one to the other without inspecting them.
    DpdkVhost,
    /// `bifrostd`, reliability off.
    Off,
}

impl Switch {
    const ALL: [Switch; 2] = [Switch::DpdkVhost, Switch::Off];
}

impl fmt::Display for Switch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Switch::DpdkVhost => "dpdk_vhost",
            Switch::Off => "off",
        })
    }
}

/// The result for one frame size through one switch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The switch.
    pub mode: Switch,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Bytes of a frame, FCS included.
    pub frame_bytes: u32,
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
        let Row { mode, frame_bytes, packets_per_s, cycles_per_packet, .. } = self;
        let millions = packets_per_s / 1e6;
        write!(
            f,
            "{mode}, {frame_bytes} bytes: {millions:.2} million packets/s, {cycles_per_packet:.0} cycles per packet"
        )
    }
}

impl Experiment for VhostRate {
    fn name(&self) -> &'static str {
        "vhost-rate"
    }

    fn summary(&self) -> &'static str {
        "Packets per second between two vhost-user ports, compared with DPDK's own vhost back-end"
    }

    fn default_modes(&self, _quick: bool) -> Vec<Mode> {
        vec![Mode::Off]
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let seconds = lab.seconds(4.0, 2.0);
        turns::alternate(lab.repetitions(3), &Switch::ALL, &FRAME_BYTES, |mode, frame_bytes, repetition| {
            measure(lab, *mode, *frame_bytes, repetition, seconds)
        })
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut table =
            Table::new(&["switch", "frame, bytes", "million packets/s", "cycles per packet", "of DPDK's rate, %"]);
        for frame_bytes in FRAME_BYTES {
            for mode in Switch::ALL {
                let of = |field: fn(&Row) -> f64| spread(&rows, mode, frame_bytes, field);
                table.row(vec![
                    mode.to_string(),
                    frame_bytes.to_string(),
                    cell(of(|r| r.packets_per_s / 1e6)),
                    cell(of(|r| r.cycles_per_packet)),
                    number(share(&rows, frame_bytes).filter(|_| mode == Switch::Off).unwrap_or(100.0)),
                ]);
            }
        }
        Ok(format!(
            "`dpdk-testpmd` with two `net_virtio_user` ports lets {CIRCLING} packets circulate in each direction; both \
             directions count. One processor for the switch, one for the guest. Medians, with the minimum and maximum \
             of the repetitions in brackets.\n\n{}",
            table.render()
        ))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let series = [(Series::on("bifrostd"), Switch::Off), (Series::off("DPDK's vhost back-end"), Switch::DpdkVhost)];
        let panel = Panel::over(
            "between two vhost-user ports",
            ("frame [bytes]", &FRAME_BYTES[..]),
            ("million packets/s", false),
            &series,
            |mode, bytes| spread(&rows, mode, *bytes, |r| r.packets_per_s / 1e6),
        );
        Ok(vec![plot::draw(&directory.join("rate.svg"), &[panel], 1)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let rate = |size| {
            let name = format!("share of the rate of DPDK's vhost back-end, {size} bytes");
            Bar::new(name, share(&rows, size), Sense::AtLeast, 40.0, "%")
        };
        let lost = rows.iter().filter(|r| r.mode == Switch::Off).map(|r| r.lost_packets as f64).reduce(f64::max);
        let mut bars: Vec<Bar> = FRAME_BYTES.into_iter().map(rate).collect();
        bars.push(
            Bar::new("packets that the guest could not send, worst run", lost, Sense::AtMost, 0.0, "packets").exact(),
        );
        Ok(bars)
    }
}

/// `bifrostd`'s rate, percent of DPDK's.
fn share(rows: &[Row], frame_bytes: u32) -> Option<f64> {
    let is = |mode| move |r: &Row| r.mode == mode && r.frame_bytes == frame_bytes;
    let both = (is(Switch::Off), is(Switch::DpdkVhost));
    paired_ratio(rows, |r| r.repetition, both, |r| r.packets_per_s).map(|ratio| ratio * 100.0)
}

/// The median over repetitions; `None` if it was not measured.
fn spread(rows: &[Row], mode: Switch, frame_bytes: u32, field: fn(&Row) -> f64) -> Option<Spread> {
    Spread::of(rows.iter().filter(|row| row.mode == mode && row.frame_bytes == frame_bytes).map(field))
}

fn measure(lab: &Lab, mode: Switch, frame_bytes: u32, repetition: u32, seconds: f64) -> Result<Row> {
    let logs = lab.logs(&format!("{mode}-{frame_bytes}-{repetition}"));
    let start = |host: &Namespace, sockets: &[PathBuf; 2]| match mode {
        Switch::DpdkVhost => Running::dpdk(host, sockets, &logs),
        Switch::Off => Running::bifrostd(lab, host, sockets, &More::default(), &logs),
    };
    let Circled { duration_s, packets_per_s, cycles_per_packet, lost_packets } =
        circle::measure(lab, &logs, start, |port| circle::frames(port, frame_bytes, 1), seconds)?;
    Ok(Row { mode, repetition, frame_bytes, duration_s, packets_per_s, cycles_per_packet, lost_packets })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::to_values;

    #[test]
    fn each_bar_can_fail() {
        let row = |mode, frame_bytes, packets_per_s| Row {
            mode,
            repetition: 0,
            frame_bytes,
            duration_s: 4.0,
            packets_per_s,
            cycles_per_packet: 300.0,
            lost_packets: 0,
        };
        let missed = |change: fn(&mut Vec<Row>)| {
            let mut rows: Vec<Row> = FRAME_BYTES
                .into_iter()
                .flat_map(|size| [row(Switch::DpdkVhost, size, 5e6), row(Switch::Off, size, 3e6)])
                .collect();
            change(&mut rows);
            VhostRate.bars(&to_values(&rows).unwrap()).unwrap().iter().filter(|bar| !bar.passes()).count()
        };
        assert_eq!(missed(|_| {}), 0);
        assert_eq!(missed(|rows| rows[1].packets_per_s = 1.9e6), 1);
        assert_eq!(missed(|rows| rows[3].packets_per_s = 1.9e6), 1);
        assert_eq!(missed(|rows| rows[1].lost_packets = 1), 1);
        assert_eq!(missed(|rows| rows.retain(|r| r.mode == Switch::Off)), 2, "no reference");
    }
}
