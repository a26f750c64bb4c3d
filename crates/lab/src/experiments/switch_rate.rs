//! `switch-rate`: packets per second from a vhost-user port into VXLAN and back, compared with Open vSwitch with DPDK
//! (Triton, figure 8).
//!
//! One switch on one processor. The guest, `dpdk-testpmd`, has the other and lets a fixed number of packets
//! circulate: it sends each received packet again, so no switch is offered more than it can forward. The peer is a
//! mirror: an nftables rule at the far end of the underlay link that swaps addresses, selects the flow, and returns
//! the frame.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::tunnel::{Bench, FAR, FAR_MAC, More, NEAR, NEAR_MAC, Switch};
use crate::bars::{Bar, Sense};
use crate::frame::Experiment;
use crate::interrupt;
use crate::lab::Lab;
use crate::options::Mode;
use crate::plot::{self, Panel, Series};
use crate::programs::testpmd;
use crate::report::{Table, factor};
use crate::results::from_values;
use crate::stats::{Spread, cell, middle, paired_ratio};
use crate::turns;

/// Numbers of conversations.
const FLOWS: [u32; 2] = [1, 10_000];
/// Bursts of 32 packets that are added in each step, and number of steps; the highest rate counts. A switch may lose
/// some packets before it knows their destination, and an overloaded one loses packets that it cannot queue.
const BURSTS: u32 = 8;
const STEPS: u32 = 3;
/// Time before packets are counted, in which caches and tables fill.
const WARM_UP: Duration = Duration::from_millis(1500);

/// Addresses of the guest and of the remote end.
const REMOTE_MAC: &str = "00:01:02:03:04:01";
const GUEST: &str = "10.254.0.1";
const REMOTE: &str = "10.253.0.1";

/// The ports of the remote end and of the guest in the first flow.
const FIRST_PORTS: u32 = 1024 << 16 | 1024;

/// The rule of the mirror. It swaps outer and inner addresses and sets the ports of the next flow; the guest swaps
/// addresses and ports again. Offsets are in bits from the outer IP header: IP, UDP and VXLAN have 36 bytes, the
/// inner Ethernet header 14, the inner IP header 20. Swapping does not change checksums over addresses, and the inner
/// UDP header has none. Both ports form one number of 32 bits, because nftables writes a number's most significant
/// bits first, whatever the width of the target.
fn mirror(flows: u32) -> String {
    let far = FAR[0];
    format!(
        "table netdev bifrost_lab_mirror {{\n chain mirror {{\n type filter hook ingress device u1 priority 0\n udp \
         dport 4789 ether saddr set {FAR_MAC} ether daddr set {NEAR_MAC} ip saddr set {far} ip daddr set {NEAR} \
         @nh,288,48 set 0x000102030400 @nh,336,48 set 0x000102030401 @nh,496,32 set 0x0afd0001 @nh,528,32 set \
         0x0afe0001 @nh,560,32 set numgen inc mod {flows} offset {FIRST_PORTS} fwd to u1\n }}\n}}\n"
    )
}

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct SwitchRate;

/// The result for one number of flows through one switch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The switch.
    pub mode: Switch,
    /// Number of conversations.
    pub flows: u32,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Duration of the count, s.
    pub duration_s: f64,
    /// Packets per second that returned to the guest.
    pub packets_per_s: f64,
    /// Share of the packets taken from the guest in that time that did not return, percent.
    pub missing_percent: f64,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { mode, flows, packets_per_s, missing_percent, .. } = self;
        let millions = packets_per_s / 1e6;
        write!(f, "{mode}, {flows} flows: {millions:.3} million packets/s, {missing_percent:.2} % missing")
    }
}

impl Experiment for SwitchRate {
    fn name(&self) -> &'static str {
        "switch-rate"
    }

    fn summary(&self) -> &'static str {
        "Packets per second from a vhost-user port into VXLAN and back, compared with Open vSwitch with DPDK"
    }

    fn modes(&self) -> Vec<Mode> {
        vec![Mode::Off]
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let seconds = lab.seconds(4.0, 2.0);
        turns::alternate(lab.repetitions(3), &Switch::ALL, &FLOWS, |mode, flows, repetition| {
            measure(lab, *mode, *flows, repetition, seconds)
        })
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut table = Table::new(&["flows", "switch", "million packets/s", "missing, %", "over Open vSwitch"]);
        for flows in FLOWS {
            for mode in Switch::ALL {
                let of = |mode, field| spread(&rows, mode, flows, field);
                let rate: fn(&Row) -> f64 = |r| r.packets_per_s / 1e6;
                table.row(vec![
                    flows.to_string(),
                    mode.to_string(),
                    cell(of(mode, rate)),
                    cell(of(mode, |r| r.missing_percent)),
                    factor(middle(of(mode, rate)), middle(of(Switch::OvsDpdk, rate))),
                ]);
            }
        }
        Ok(format!(
            "Frames of 64 bytes circulate: from a vhost-user port into VXLAN, to a mirror, back, and to the same port; \
             one processor for the switch and the mirror, one for the guest. Rate of the packets that returned, with \
             {} to {} in flight, at the best of these numbers. Medians, with the minimum and maximum of the \
             repetitions in brackets.\n\n{}",
            BURSTS * 32,
            BURSTS * 32 * STEPS,
            table.render()
        ))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let series = [(Series::on("bifrostd"), Switch::Off), (Series::off("Open vSwitch with DPDK"), Switch::OvsDpdk)];
        let panel = Panel::over(
            "out in VXLAN and back",
            ("flows", &FLOWS[..]),
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
            let both = (is(Switch::Off), is(Switch::OvsDpdk));
            let ratio = paired_ratio(&rows, |r| r.repetition, both, |r| r.packets_per_s);
            let name = format!("packets/s over those of Open vSwitch with DPDK, {flows} flows");
            Bar::new(name, ratio, Sense::AtLeast, 1.0, "x")
        };
        Ok(FLOWS.map(bar).to_vec())
    }
}

/// The median over repetitions; `None` if it was not measured.
fn spread(rows: &[Row], mode: Switch, flows: u32, field: fn(&Row) -> f64) -> Option<Spread> {
    Spread::of(rows.iter().filter(|row| row.mode == mode && row.flows == flows).map(field))
}

fn measure(lab: &Lab, mode: Switch, flows: u32, repetition: u32, seconds: f64) -> Result<Row> {
    let logs = lab.logs(&format!("{mode}-{flows}-{repetition}"));
    let bench = Bench::build(lab, &mirror(flows))?;
    let forward = "in_port=1,actions=output:2\nin_port=2,actions=output:1\n";
    let mut switch = bench.start(lab, mode, forward, &configuration(), &logs)?;
    let (from_to, peer) = (format!("--tx-ip={GUEST},{REMOTE}"), format!("--eth-peer=0,{REMOTE_MAC}"));
    let mut guest = bench.guest(&["--forward-mode=5tswap", "--no-flush-rx", &from_to, &peer], &logs)?;
    let mut best: Option<Row> = None;
    for _ in 0..STEPS {
        // Packets in flight stay in the rings meanwhile.
        guest.tell("stop")?;
        guest.tell(&format!("start tx_first {BURSTS}"))?;
        interrupt::sleep(WARM_UP)?;
        let began = Instant::now();
        guest.tell("show port stats all")?;
        interrupt::sleep(Duration::from_secs_f64(seconds))?;
        let duration_s = began.elapsed().as_secs_f64();
        guest.tell("show port stats all")?;
        interrupt::sleep(Duration::from_millis(300))?;
        switch.check_alive()?;
        let counts = testpmd::port_packets(&guest.printed(), 0);
        let [.., (received, sent), (received_then, sent_then)] = counts[..] else {
            bail!("dpdk-testpmd shows no statistics; its output is in {}", logs.display());
        };
        let (received, sent) = (received_then - received, sent_then - sent);
        let packets_per_s = received as f64 / duration_s;
        if received > 0 && best.as_ref().is_none_or(|best| best.packets_per_s < packets_per_s) {
            // Some packets were in flight when counting began.
            let missing_percent = sent.saturating_sub(received) as f64 / sent.max(1) as f64 * 100.0;
            best = Some(Row { mode, flows, repetition, duration_s, packets_per_s, missing_percent });
        }
    }
    guest.tell("stop")?;
    best.with_context(|| format!("no packet came back to the guest (see {})", logs.display()))
}

/// One route, to the mirror.
fn configuration() -> More {
    let routes = format!("[[route]]\nvni = 100\nprefix = \"{REMOTE}/32\"\npeer = \"far0\"\nmac = \"{REMOTE_MAC}\"\n");
    More { guest: GUEST, routes, ..More::default() }
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
            missing_percent: 0.0,
        };
        let passed = |one, many| -> Vec<bool> {
            let rows = [
                row(Switch::OvsDpdk, 1, 1e6),
                row(Switch::OvsDpdk, 10_000, 1e6),
                row(Switch::Off, 1, one),
                row(Switch::Off, 10_000, many),
            ];
            SwitchRate.bars(&to_values(&rows).unwrap()).unwrap().iter().map(Bar::passes).collect()
        };
        assert_eq!(passed(1.1e6, 1.1e6), [true, true]);
        assert_eq!(passed(0.9e6, 1.1e6), [false, true]);
        assert_eq!(passed(1.1e6, 0.9e6), [true, false]);
    }
}
