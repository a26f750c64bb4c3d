//! Faults as a list of timed events.

use std::collections::BTreeSet;

use bifrost_datapath::fault::{Direction, Fault, Target};

use crate::link::LinkPatch;
use crate::network::Network;
use crate::rng::Rng;
use crate::scenario::FaultConfig;

/// A fault begins or ends.
#[derive(Clone, Debug)]
pub enum Action {
    /// Links change.
    Links {
        /// The links.
        links: Vec<u32>,
        /// The change; `None`: back to the initial state.
        set: Option<LinkPatch>,
    },
    /// A host's daemon crashes.
    Crash(u32),
    /// It restarts.
    Restart(u32),
    /// A host gets no CPU until this time, ns.
    Pause(u32, u64),
    /// A guest stops or resumes receiving.
    Stall(u32, bool),
    /// Interval at which a guest receives one frame, ns; 0: all at once, as usual.
    Slow(u32, u64),
    /// Faults between a guest and its switch, by the daemon's fault injection; `None`: they end.
    Port(u32, Option<Fault>),
}

/// All events of `faults` with their times, ns.
pub(crate) fn expand(
    faults: &[FaultConfig],
    network: &Network,
    restart_after: u64,
    rng: &mut Rng,
) -> Vec<(u64, Action)> {
    let mut all = Vec::new();
    for (id, fault) in (0..).zip(faults) {
        let (at, until) = (fault.at.0, fault.until.map(|u| u.0));
        if let Some(pattern) = &fault.links {
            links(fault, pattern, network, rng, &mut all);
        }
        if let Some(host) = fault.crash {
            all.push((at, Action::Crash(host)));
            all.push((until.unwrap_or(at + restart_after), Action::Restart(host)));
        }
        if let Some(host) = fault.pause {
            all.push((at, Action::Pause(host, until.unwrap_or(u64::MAX))));
        }
        if let Some(guest) = fault.stall {
            let (begin, end) = match fault.receive_gap.0 {
                0 => (Action::Stall(guest, true), Action::Stall(guest, false)),
                gap => (Action::Slow(guest, gap), Action::Slow(guest, 0)),
            };
            all.push((at, begin));
            all.extend(until.map(|u| (u, end)));
        }
        if let Some(guest) = fault.port {
            let ppm = |p: f64| (p * 1e6).round() as u32;
            let direction = if fault.to_guest.unwrap_or(true) { Direction::Rx } else { Direction::Tx };
            let injected = Fault {
                id,
                // The world sets the port's number.
                target: Target::Port { owner: 0 },
                direction,
                down: false,
                loss_ppm: ppm(fault.loss),
                delay_ns: 0,
                jitter_ns: 0,
                reorder_ppm: 0,
                duplicate_ppm: ppm(fault.duplication),
                corrupt_ppm: ppm(fault.corruption),
            };
            all.push((at, Action::Port(guest, Some(injected))));
            all.extend(until.map(|u| (u, Action::Port(guest, None))));
        }
    }
    all
}

fn links(fault: &FaultConfig, pattern: &str, network: &Network, rng: &mut Rng, all: &mut Vec<(u64, Action)>) {
    let mut links: Vec<u32> = network.matching(pattern).collect();
    if fault.some > 0 {
        for i in 0..links.len().min(fault.some as usize) {
            let other = i + rng.below((links.len() - i) as u64) as usize;
            links.swap(i, other);
        }
        links.truncate(fault.some as usize);
    }
    let directions = |link: u32| if fault.both_ways { vec![link, network.reverse(link)] } else { vec![link] };
    if fault.both_ways {
        let mut seen = BTreeSet::new();
        links.retain(|&link| seen.insert(link.min(network.reverse(link))));
    }
    let (at, until) = (fault.at.0, fault.until.map(|u| u.0));
    let (Some(end), true) = (until, fault.flap_down.0 > 0) else {
        let links: Vec<u32> = links.into_iter().flat_map(directions).collect();
        all.push((at, Action::Links { links: links.clone(), set: Some(fault.set.clone()) }));
        all.extend(until.map(|u| (u, Action::Links { links, set: None })));
        return;
    };
    let set = if fault.set == LinkPatch::default() {
        LinkPatch { down: Some(true), ..LinkPatch::default() }
    } else {
        fault.set.clone()
    };
    for link in links {
        let mut now = at + exponential(rng, fault.flap_up.0);
        while now < end {
            all.push((now, Action::Links { links: directions(link), set: Some(set.clone()) }));
            now = (now + exponential(rng, fault.flap_down.0)).min(end);
            all.push((now, Action::Links { links: directions(link), set: None }));
            now += exponential(rng, fault.flap_up.0);
        }
    }
}

/// A random number from an exponential distribution with this mean, at least 1.
pub(crate) fn exponential(rng: &mut Rng, mean: u64) -> u64 {
    ((-(1.0 - rng.unit()).ln() * mean as f64) as u64).max(1)
}
