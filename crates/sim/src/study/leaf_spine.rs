//! A leaf-spine fabric with some slow links: its goodput, compared with max-min fairness.

use anyhow::Result;
use serde_json::json;

use super::plot::Panel;
use super::runs::{each, scenario};
use super::{Bar, Outcome};
use crate::link::LinkPatch;
use crate::scenario::{FaultConfig, Gap, Members, Topology, Workload};
use crate::{Bytes, Ns, Rate, Scenario, World};

/// One in [`ONE_IN`] links between switches is slow. Its rate is divided by [`SLOWER`].
const ONE_IN: u32 = 10;
const SLOWER: u64 = 4;
/// Payload of a light guest's packet, its frame, and its size on a link with all headers, preamble and gap.
const PAYLOAD_BYTES: u64 = 1_460;
const FRAME_BYTES: f64 = 1_514.0;
const WIRE_BYTES: f64 = 1_604.0;
/// Class selector 6 (RFC 2474), for the transport's control packets.
const CONTROL_DSCP: u8 = 48;
/// Start of the measurement.
const WARM_UP_NS: u64 = 5_000_000;

/// Leaves, spines, hosts below each leaf.
#[derive(Clone, Copy)]
struct Size {
    leaves: u32,
    spines: u32,
    hosts: u32,
}

impl Size {
    fn of(scenario: &Scenario) -> Self {
        match scenario.topology {
            Topology::Clos2 { leaves, spines, hosts_per_leaf: hosts, .. } => Size { leaves, spines, hosts },
            _ => Size { leaves: 0, spines: 0, hosts: 0 },
        }
    }

    /// The host that a host sends to. Each host receives from one sender, and each leaf sends to all other leaves.
    fn target(self, host: u32) -> u32 {
        let own = host % self.hosts;
        let leaf = (host / self.hosts + 1 + own % (self.leaves - 1)) % self.leaves;
        leaf * self.hosts + own
    }
}

/// The goodput of one world.
struct Answer {
    /// Of each flow, and its max-min fair share, Gbit/s.
    flows: Vec<(f64, f64)>,
    dropped_percent: f64,
}

impl Answer {
    fn total_percent(&self) -> f64 {
        let (got, fair) = self.flows.iter().fold((0.0, 0.0), |(g, f), flow| (g + flow.0, f + flow.1));
        got / fair * 100.0
    }

    fn worst_percent(&self) -> f64 {
        self.flows.iter().map(|(got, fair)| got / fair * 100.0).fold(f64::MAX, f64::min)
    }
}

/// The links between switches.
#[derive(Clone, Copy, PartialEq)]
enum Fabric {
    /// Four times as fast as hosts' links, so only hosts' links are full.
    Fast,
    /// As fast as hosts' links.
    Full,
    /// The same, but a tenth of them at a quarter of the rate.
    Slowed,
}

/// How the network is set up.
#[derive(Clone, Copy, PartialEq)]
enum Setting {
    /// The defaults: ACKs wait in the same queues as data, and the margin of Swift's target is at most 1 ms.
    Default,
    /// ACKs are sent before data (DSCP 48 in a priority queue), and the margin is at most 50 us.
    Tuned,
}

impl Fabric {
    fn name(self) -> &'static str {
        match self {
            Fabric::Fast => "fast fabric",
            Fabric::Full => "full fabric",
            Fabric::Slowed => "a tenth of the fabric slowed",
        }
    }
}

impl Setting {
    fn name(self) -> &'static str {
        match self {
            Setting::Default => "defaults",
            Setting::Tuned => "ACKs first, 50 us",
        }
    }
}

pub(super) fn run(quick: bool) -> Result<Outcome> {
    let base = scenario("leaf-spine", include_str!("../../studies/leaf-spine.toml"))?;
    let seeds: &[u64] = if quick { &[1] } else { &[1, 2, 3, 4, 5] };
    let mut rows: Vec<(Setting, Fabric, u8)> = Vec::new();
    for setting in [Setting::Default, Setting::Tuned] {
        for fabric in [Fabric::Fast, Fabric::Full, Fabric::Slowed] {
            rows.extend([4, 8].map(|paths| (setting, fabric, paths)));
        }
    }
    let runs: Vec<_> = rows.iter().flat_map(|row| seeds.iter().map(move |seed| (*row, *seed))).collect();
    let answers = each(&runs, |&(row, seed)| answer(&base, row, seed, quick))?;
    let mut outcome = Outcome::default();
    let mut data = Vec::new();
    let labels: Vec<String> = [Fabric::Fast, Fabric::Full, Fabric::Slowed].map(|f| f.name().to_string()).to_vec();
    let mut panel =
        Panel::new("32 hosts, four leaves, eight spines", "links between switches", "goodput, % of max-min");
    panel = panel.over(&labels);
    let mut lines: Vec<(String, Vec<(f64, f64)>)> = Vec::new();
    for &(setting, fabric, paths) in &rows {
        let own = || runs.iter().zip(&answers).filter(|(run, _)| run.0 == (setting, fabric, paths)).map(|(_, a)| a);
        let total = own().map(Answer::total_percent).fold(f64::MAX, f64::min);
        let worst = own().map(Answer::worst_percent).fold(f64::MAX, f64::min);
        let dropped = own().map(|a| a.dropped_percent).fold(0.0, f64::max);
        let what = format!("{}, {paths} paths", setting.name());
        outcome.lines.push(format!(
            "{what}, {}: {total:.1} % of max-min, the worst flow {worst:.1} % of its share, {dropped:.2} % dropped",
            fabric.name()
        ));
        // With a slowed fabric, quick runs are too short for a bar.
        let least = match (setting, fabric) {
            (Setting::Tuned, Fabric::Fast) => Some(98.0),
            (_, Fabric::Slowed) if !quick => Some(90.0),
            _ => None,
        };
        if let Some(least) = least {
            outcome.bars.push(Bar {
                name: format!("{what}, {}: goodput below max-min, %", fabric.name()),
                value: 100.0 - total,
                limit: 100.0 - least,
            });
        }
        let at = (labels.iter().position(|l| l == fabric.name()).unwrap_or(0) as f64, total);
        match lines.iter_mut().find(|(name, _)| *name == what) {
            Some((_, points)) => points.push(at),
            None => lines.push((what, vec![at])),
        }
        data.push(json!({ "setting": setting.name(), "fabric": fabric.name(), "paths": paths,
            "total_percent": total, "worst_flow_percent": worst, "dropped_percent": dropped }));
    }
    for (name, points) in lines {
        panel = panel.line(name, points);
    }
    outcome.panels.push(panel);
    outcome.data = data.into();
    Ok(outcome)
}

fn answer(base: &Scenario, row: (Setting, Fabric, u8), seed: u64, quick: bool) -> Result<Answer> {
    let (setting, fabric, paths) = row;
    let mut s = base.clone();
    if quick {
        s.duration = Ns(s.duration.0 / 2);
    }
    s.paths = paths;
    s.transport.spray_paths = Some(paths);
    let size = Size::of(&s);
    let hosts = size.leaves * size.hosts;
    s.workloads = (0..hosts).map(|host| flow(host, size.target(host))).collect();
    if let Topology::Clos2 { host_link, fabric_link, .. } = &mut s.topology {
        if fabric == Fabric::Fast {
            fabric_link.rate = fabric_link.rate.map(|rate| Rate(rate.0 * 4));
        }
        if setting == Setting::Tuned {
            (host_link.priority_dscp, fabric_link.priority_dscp) = (Some(CONTROL_DSCP), Some(CONTROL_DSCP));
        }
    }
    if setting == Setting::Tuned {
        s.host.control_dscp = CONTROL_DSCP;
        s.transport.swift_noise = Some(Ns::us(50));
    }
    if fabric == Fabric::Slowed {
        s.faults.push(slow_links(&s.topology));
    }
    s.complete();
    let duration = s.duration.0;
    let mut world = World::new(&s, seed)?;
    let bytes = |world: &World| world.statistics().workload_bytes();
    world.run_until(WARM_UP_NS);
    let before = bytes(&world);
    world.run_until(duration - 1);
    let after = bytes(&world);
    let fair = max_min(size, &capacities(&world, size));
    let seconds = (duration - 1 - WARM_UP_NS) as f64 / 1e9;
    let got = before.iter().zip(&after).map(|(before, after)| (after - before) as f64 * 8e-9 / seconds);
    let links = &world.network().links;
    let (sent, dropped) = links.iter().fold((0, 0), |(s, d), l| (s + l.packets, d + l.dropped_packets));
    let dropped_percent = dropped as f64 / (sent + dropped).max(1) as f64 * 100.0;
    Ok(Answer { flows: got.zip(fair).collect(), dropped_percent })
}

/// A flow that always has packets to send.
fn flow(from: u32, to: u32) -> Workload {
    Workload::Packets {
        name: String::new(),
        from: Members::List(vec![from]),
        to: Members::List(vec![to]),
        packets: 10_000_000,
        flows: 16,
        size: Bytes(PAYLOAD_BYTES),
        size_min: None,
        segments: 1,
        gap: Ns(0),
        gap_kind: Gap::Fixed,
        burst: 1,
        start: Ns(0),
        start_jitter: Ns(20_000),
    }
}

fn slow_links(topology: &Topology) -> FaultConfig {
    let (links, rate) = match topology {
        Topology::Clos2 { leaves, spines, fabric_link, .. } => (2 * leaves * spines, fabric_link.rate),
        _ => (0, None),
    };
    let rate = rate.map(|rate| Rate(rate.0 / SLOWER));
    FaultConfig {
        links: Some("*spine*".into()),
        some: links / ONE_IN,
        set: LinkPatch { rate, ..LinkPatch::default() },
        ..FaultConfig::default()
    }
}

/// Rates of links, Gbit/s of frames.
struct Capacities {
    host: f64,
    /// By leaf, then by spine: up, down.
    fabric: Vec<Vec<(f64, f64)>>,
}

fn capacities(world: &World, size: Size) -> Capacities {
    let of = |name: &str| {
        let link = world.network().matching(name).next();
        let rate = link.map_or(0, |link| world.network().links[link as usize].config.rate.0);
        rate as f64 / 1e9 * FRAME_BYTES / WIRE_BYTES
    };
    let both =
        |leaf: u32, spine: u32| (of(&format!("leaf{leaf}>spine{spine}")), of(&format!("spine{spine}>leaf{leaf}")));
    let fabric = (0..size.leaves).map(|leaf| (0..size.spines).map(|spine| both(leaf, spine)).collect()).collect();
    Capacities { host: of("h0>leaf0"), fabric }
}

/// An upper bound of each flow's max-min fair rate, Gbit/s, if flows could be split arbitrarily over all spines:
/// progressive filling (Bertsekas and Gallager, Data Networks, 6.5.2) under the capacities of hosts, of each leaf's
/// links up and down, and of all routes between two leaves. Other pairs of leaves share the links of these routes,
/// which the bound ignores.
fn max_min(size: Size, links: &Capacities) -> Vec<f64> {
    let flows: Vec<(u32, u32)> =
        (0..size.leaves * size.hosts).map(|host| (host / size.hosts, size.target(host) / size.hosts)).collect();
    let mut groups: Vec<(f64, Vec<usize>)> = (0..flows.len()).map(|flow| (links.host, vec![flow])).collect();
    let crossing = |crosses: &dyn Fn(u32, u32) -> bool| -> Vec<usize> {
        (0..).zip(&flows).filter(|(_, (a, b))| crosses(*a, *b)).map(|(flow, _)| flow).collect()
    };
    for (leaf, own) in (0..).zip(&links.fabric) {
        groups.push((own.iter().map(|l| l.0).sum(), crossing(&|a, _| a == leaf)));
        groups.push((own.iter().map(|l| l.1).sum(), crossing(&|_, b| b == leaf)));
        for (other, theirs) in (0..).zip(&links.fabric).filter(|(other, _)| *other != leaf) {
            let routes = own.iter().zip(theirs).map(|(up, down)| up.0.min(down.1)).sum();
            groups.push((routes, crossing(&|a, b| (a, b) == (leaf, other))));
        }
    }
    fill(flows.len(), &groups)
}

/// Raises all rates together, and freezes those of a group whose capacity is used up.
fn fill(flows: usize, groups: &[(f64, Vec<usize>)]) -> Vec<f64> {
    let mut rates: Vec<Option<f64>> = vec![None; flows];
    while rates.iter().any(Option::is_none) {
        let level = |(capacity, members): &(f64, Vec<usize>)| {
            let taken: f64 = members.iter().filter_map(|m| rates[*m]).sum();
            let open = members.iter().filter(|m| rates[**m].is_none()).count();
            (open > 0).then(|| (capacity - taken).max(0.0) / open as f64)
        };
        let levels: Vec<Option<f64>> = groups.iter().map(level).collect();
        let Some(least) = levels.iter().flatten().copied().reduce(f64::min) else { break };
        for ((_, members), _) in
            groups.iter().zip(&levels).filter(|(_, level)| level.is_some_and(|l| l <= least + 1e-9))
        {
            members.iter().for_each(|m| _ = rates[*m].get_or_insert(least));
        }
    }
    rates.into_iter().map(Option::unwrap_or_default).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_host_has_one_sender_below_another_leaf() {
        let size = Size { leaves: 4, spines: 8, hosts: 8 };
        let mut targets: Vec<u32> = (0..32).map(|host| size.target(host)).collect();
        assert!((0..32).all(|host| targets[host as usize] / 8 != host / 8));
        targets.sort_unstable();
        assert_eq!(targets, (0..32).collect::<Vec<_>>());
    }

    #[test]
    fn rates_are_raised_until_a_link_is_full() {
        // Two flows share 10, one of them also 3 with a third; a fourth is alone with 7.
        let groups = [(10.0, vec![0, 1]), (3.0, vec![1, 2]), (7.0, vec![3])];
        assert_eq!(fill(4, &groups), [8.5, 1.5, 1.5, 7.0]);
        assert_eq!(fill(0, &[]), [0.0; 0]);
    }

    #[test]
    fn slow_links_lower_the_share_of_flows_that_need_them() {
        let size = Size { leaves: 2, spines: 2, hosts: 2 };
        let all =
            |up: f64| Capacities { host: 10.0, fabric: vec![vec![(up, 10.0), (10.0, 10.0)], vec![(10.0, 10.0); 2]] };
        assert_eq!(max_min(size, &all(10.0)), [10.0; 4]);
        assert_eq!(max_min(size, &all(2.5)), [6.25, 6.25, 10.0, 10.0]);
    }
}
