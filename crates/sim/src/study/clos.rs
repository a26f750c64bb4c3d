//! Many hosts, many switches, flapping links.

use anyhow::Result;
use serde_json::json;

use super::plot::Panel;
use super::runs::{each, scenario, whole};
use super::{Bar, Outcome};
use crate::Ns;
use crate::scenario::{FaultConfig, Topology};

/// Percentage of flapping links.
const PARTS: [u32; 3] = [0, 1, 5];

pub(super) fn run(quick: bool) -> Result<Outcome> {
    let mut base = scenario("clos", include_str!("../../studies/clos.toml"))?;
    if let Topology::Clos3 { pods, tors_per_pod, hosts_per_tor, .. } = &mut base.topology
        && quick
    {
        (*pods, *tors_per_pod, *hosts_per_tor) = (4, 4, 4);
    }
    let hosts = base.topology.hosts();
    let parts: &[u32] = if quick { &PARTS } else { &PARTS[..2] };
    // One after the other: a world of this size takes gigabytes.
    let mut outcome = Outcome::default();
    let mut data = Vec::new();
    let labels: Vec<String> = ["p50", "p90", "p99", "p99.9", "max"].map(String::from).to_vec();
    let mut panel =
        Panel::new(&format!("{hosts} hosts, all to all: delivery"), "percentile", "us").over(&labels).log(false, true);
    for &part in parts {
        let mut s = base.clone();
        if part > 0 {
            s.faults.push(flapping(&base, part));
        }
        let (_, r) = each(&[()], |()| whole(&s, 1).map(|(_, r)| ((), r)))?.remove(0);
        let l = &r.workloads[0].latency;
        let dropped: u64 = r.dropped_packets.values().sum();
        outcome.lines.push(format!(
            "{hosts} hosts, {part} % of the links flap: {} packets, p50 {:.1} us p99 {:.1} us p99.9 {:.1} us max {:.1} us; \
             {dropped} of {} datagrams lost, repair p99 {:.0} us, {} given up, {} events",
            r.workloads[0].messages, l.p50_us, l.p99_us, l.p999_us, l.max_us, r.sent_packets, r.recovery.p99_us,
            r.exempt_packets, r.events
        ));
        if part == 1 {
            outcome.bars.push(Bar {
                name: format!("{hosts} hosts, 1 % of the links flap: delivery, P99.9, us"),
                value: l.p999_us,
                limit: 2_000.0,
            });
        }
        data.push(json!({ "hosts": hosts, "flapping_percent": part, "messages": r.workloads[0].messages,
            "p50_us": l.p50_us, "p99_us": l.p99_us, "p999_us": l.p999_us, "max_us": l.max_us,
            "dropped": dropped, "sent": r.sent_packets, "repair_p99_us": r.recovery.p99_us, "events": r.events }));
        let values = [l.p50_us, l.p90_us, l.p99_us, l.p999_us, l.max_us];
        panel = panel.line(format!("{part} % flap"), values.into_iter().enumerate().map(|(i, v)| (i as f64, v)));
    }
    outcome.panels.push(panel);
    outcome.data = data.into();
    Ok(outcome)
}

/// This percentage of the links between switches goes down for 5 ms and up for 50 ms on average, while packets are
/// sent.
fn flapping(scenario: &crate::Scenario, part: u32) -> FaultConfig {
    let links = match &scenario.topology {
        Topology::Clos3 { pods, tors_per_pod, aggs_per_pod, cores_per_agg, .. } => {
            2 * pods * aggs_per_pod * (tors_per_pod + cores_per_agg)
        }
        _ => 0,
    };
    FaultConfig {
        at: Ns::ms(10),
        until: Some(Ns::ms(120)),
        // Links between switches: each has an aggregation switch at one end.
        links: Some("*agg*".into()),
        some: (links * part).div_ceil(100),
        flap_down: Ns::ms(5),
        flap_up: Ns::ms(50),
        ..FaultConfig::default()
    }
}
