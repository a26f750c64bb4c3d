//! Runs a world, and checks its invariants.

use std::panic::{AssertUnwindSafe, catch_unwind};

use anyhow::{Context as _, Result};
use bifrost_endpoint::{ConnectionConfig, Service};

use super::application::{Application, connect};
use super::draw::{Description, Trouble, describe};
use crate::rdma::{Fabric, Node as _, Pause, RdmaWorld, nic};
use crate::swarm::Outcome;
use crate::violation::{Kind, Violation};

/// Virtual time between two checks, ns.
const LOOK_NS: u64 = 20_000_000;
/// Time, ns, within which everything must be finished, after all faults and in addition to the time that the bytes
/// need.
const PATIENCE_NS: u64 = 15_000_000_000;
/// A world with more events than this, beyond those that its packets need, is considered endless.
const MOST_EVENTS: u64 = 5_000_000;
/// When everything is finished, the world runs for this long, ns; it must then have at most [`CALM_EVENTS`] events.
const CALM_NS: u64 = 2_000_000_000;
const CALM_EVENTS: u64 = 4_000;

/// Runs the world of a seed.
pub fn run(seed: u64) -> Outcome {
    run_world(&describe(seed), seed, &|_| ())
}

/// Runs a world up to its first violation. A panic counts as a violation.
pub fn run_world(description: &Description, seed: u64, adjust: &dyn Fn(&mut ConnectionConfig)) -> Outcome {
    let result = catch_unwind(AssertUnwindSafe(|| {
        let mut watch = match Watch::new(description, seed, adjust) {
            Ok(watch) => watch,
            Err(error) => return failed(format!("the world is invalid: {error:#}")),
        };
        let violation = watch.run();
        let counts = watch.world.counts;
        let lost =
            counts.damaged_packets + counts.dropped_packets + counts.link_down_packets + counts.corrupted_packets;
        Outcome { violation, hash: watch.hash(), events: watch.world.events(), packets: (counts.sent_packets, lost) }
    }));
    result.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_string()));
        failed(format!("panic: {}", text.unwrap_or_default()))
    })
}

fn failed(detail: String) -> Outcome {
    let violation = Some(Violation { at_ns: 0, kind: Kind::Other("run"), detail });
    Outcome { violation, hash: 0, events: 0, packets: (0, 0) }
}

/// A change of the world.
#[derive(Clone, Copy, Debug)]
struct Change {
    at_ns: u64,
    what: Trouble,
    begins: bool,
}

struct Watch<'a> {
    description: &'a Description,
    world: RdmaWorld<Application>,
    changes: Vec<Change>,
    /// By host: number of active faults that keep its link down.
    down: Vec<u32>,
    paths: [u32; 8],
    losses: Vec<f64>,
    gone: Option<u32>,
    /// Queue pairs of each host that were put into error.
    killed: Vec<u64>,
}

impl<'a> Watch<'a> {
    fn new(description: &'a Description, seed: u64, adjust: &dyn Fn(&mut ConnectionConfig)) -> Result<Self> {
        let hosts = description.hosts as usize;
        let lanes: usize = description.connections.iter().map(|plan| plan.service().lanes()).sum();
        let queue_pairs = lanes as u32 + 1;
        let mut nodes = Vec::new();
        for index in 0..hosts {
            nodes.push(Application::new(nic(index, seed, queue_pairs), description, seed ^ (index as u64) << 40)?);
        }
        for (number, plan) in description.connections.iter().enumerate() {
            let at = [plan.from as usize, plan.to as usize];
            let ends = nodes.get_disjoint_mut(at).context("a connection needs two hosts")?;
            connect(ends, number as u32, plan, description.first_window, adjust)?;
        }
        let mut changes = Vec::new();
        for fault in &description.faults {
            changes.push(Change { at_ns: fault.at_ns, what: fault.what, begins: true });
            changes.push(Change { at_ns: fault.at_ns + fault.for_ns, what: fault.what, begins: false });
        }
        changes.sort_by_key(|change| change.at_ns);
        Ok(Watch {
            description,
            world: RdmaWorld::new(fabric(description), nodes, seed),
            changes,
            down: vec![0; hosts],
            paths: [0; 8],
            losses: Vec::new(),
            gone: None,
            killed: vec![0; hosts],
        })
    }

    fn hash(&self) -> u64 {
        let nodes = (0..self.down.len()).map(|index| self.world.node(index).hash);
        nodes.fold(self.world.events(), |hash, node| crate::mix(hash ^ node))
    }

    fn run(&mut self) -> Option<Violation> {
        let wire_ns = (self.description.bytes() as f64 * 8e9 / self.description.rate) as u64;
        let until = self.description.over_ns() + PATIENCE_NS + 50 * wire_ns;
        let until = until + 200 * self.description.keep_ns + self.description.repetitions_ns();
        self.world.most_events = MOST_EVENTS + self.description.bytes();
        let mut next = 0;
        loop {
            let change = self.changes.get(next).copied();
            let look = self.world.now + LOOK_NS;
            self.world.run_until(change.map_or(look, |change| change.at_ns.clamp(self.world.now, look)));
            while let Some(change) = self.changes.get(next).filter(|change| change.at_ns <= self.world.now).copied() {
                self.apply(change);
                next += 1;
            }
            if let Some(violation) = self.first_violation() {
                return Some(violation);
            }
            if next == self.changes.len() && self.is_done() {
                break;
            }
            if self.world.events() > self.world.most_events || self.world.counts.livelocks > 0 {
                return Some(self.violation(Kind::Livelock, format!("{} events and no end", self.world.events())));
            }
            if self.world.now > until {
                let undone: Vec<String> = self.each().map(|(_, node)| node.undone()).collect();
                return Some(self.violation(Kind::NoProgress, undone.join(" | ")));
            }
        }
        let before = self.world.events();
        self.world.run_until(self.world.now + CALM_NS);
        let after = self.world.events() - before;
        if after > CALM_EVENTS {
            return Some(self.violation(Kind::Livelock, format!("{after} events after everything was finished")));
        }
        self.first_violation().or_else(|| self.check_end())
    }

    fn apply(&mut self, change: Change) {
        let fault = &mut self.down;
        match (change.what, change.begins) {
            (Trouble::LinkDown(host), begins) => {
                let count = &mut fault[host as usize];
                *count = if begins { *count + 1 } else { *count - 1 };
                let up = *count == 0;
                self.world.set_link(host as usize, up);
            }
            (Trouble::Gone(host), true) => {
                fault[host as usize] += 1;
                self.gone = Some(host);
                self.world.set_link(host as usize, false);
            }
            (Trouble::Stall(host), true) => {
                let fault = self.description.faults.iter().find(|f| f.at_ns == change.at_ns && f.what == change.what);
                self.world.stall(host as usize, change.at_ns + fault.map_or(0, |fault| fault.for_ns));
            }
            (Trouble::DeadPaths(mask), begins) => {
                for (path, count) in self.paths.iter_mut().enumerate().filter(|(path, _)| mask >> path & 1 == 1) {
                    debug_assert!(path < 8);
                    *count = if begins { *count + 1 } else { *count - 1 };
                }
                self.update_fabric();
            }
            (Trouble::Loss(share), begins) => {
                if begins {
                    self.losses.push(share);
                } else if let Some(at) = self.losses.iter().position(|loss| *loss == share) {
                    self.losses.swap_remove(at);
                }
                self.update_fabric();
            }
            (Trouble::KillQueuePair(host, which), true) => {
                let now = self.world.now;
                let nic = self.world.node_mut(host as usize).nic();
                let all: Vec<_> = nic.connected().collect();
                if let Some(queue_pair) = all.get(which as usize % all.len().max(1)) {
                    nic.put_into_error(now, *queue_pair);
                    self.killed[host as usize] += 1;
                }
            }
            (Trouble::ResetNic(host), true) => {
                let now = self.world.now;
                let nic = self.world.node_mut(host as usize).nic();
                let all: Vec<_> = nic.ready().collect();
                for queue_pair in &all {
                    nic.put_into_error(now, *queue_pair);
                }
                self.killed[host as usize] += all.len() as u64;
            }
            (_, false) => {}
        }
    }

    fn update_fabric(&mut self) {
        let mut now = fabric(self.description);
        now.loss = self.losses.iter().copied().fold(now.loss, f64::max);
        let dead = (0..8u8).filter(|path| self.paths[usize::from(*path)] > 0);
        now.trouble.dead_paths = dead.map(|path| 1 << path).sum();
        self.world.set_fabric(now);
    }

    fn each(&self) -> impl Iterator<Item = (usize, &Application)> {
        (0..self.down.len()).map(|index| (index, self.world.node(index)))
    }

    fn is_done(&self) -> bool {
        let Some(gone) = self.gone else { return self.each().all(|(_, node)| node.is_done()) };
        let lost = |number: u32| {
            let plan = &self.description.connections[number as usize];
            plan.from == gone || plan.to == gone
        };
        self.each().all(|(_, node)| node.is_done_without(lost))
    }

    /// Whether there are no faults, and queues are too short to cause timeouts.
    fn is_easy(&self) -> bool {
        self.description.is_quiet() && self.description.bytes() as f64 * 8e9 / self.description.rate < 1e6
    }

    fn violation(&self, kind: Kind, detail: String) -> Violation {
        Violation { at_ns: self.world.now, kind, detail }
    }

    fn first_violation(&self) -> Option<Violation> {
        self.each().find_map(|(_, node)| node.violations.first().cloned())
    }

    /// Invariants when everything is finished.
    fn check_end(&self) -> Option<Violation> {
        let counts = self.world.counts;
        let reliable = self.description.connections.iter().any(|plan| plan.service() != Service::Uc);
        let switches = self.description.connections.iter().any(|plan| plan.switch_every_ns > 0);
        for (index, node) in self.each() {
            let (counters, nic) = (node.counters(), node.nic_counters());
            let wrong = |what: &str| Some(self.violation(Kind::Other("end"), format!("host {index}: {what}")));
            if self.gone.is_none() {
                if node.closed > 0 {
                    return wrong("a connection ended");
                }
                if node.registered_buffers() > 0 {
                    return Some(self.violation(Kind::Leak, format!("host {index}: buffers are still registered")));
                }
                if counters.refused > 0 {
                    return wrong(&format!("packets of honest peers are refused: {counters:?}"));
                }
                if counters.no_room > 0 {
                    return wrong(&format!("a message beyond the limit: {counters:?}"));
                }
            }
            // RC queue pairs can also go into the error state because they give up.
            if !reliable && nic.queue_pairs_in_error != self.killed[index] {
                return wrong(&format!("queue pairs in error without a fault: {nic:?}"));
            }
            // After a change of service, the last part of the data sent before is retransmitted.
            let repeated = if switches { 0 } else { counters.repeated_units };
            let lost = counters.lost_requests + counters.timeouts + repeated + counters.lane_flips;
            if self.is_easy() && counts.dropped_packets == 0 && lost > 0 {
                return wrong(&format!("losses reported although nothing was lost: {counters:?}"));
            }
        }
        None
    }
}

fn fabric(description: &Description) -> Fabric {
    let pause =
        description.pause_bytes.map(|off_bytes| Pause { off_bytes, on_bytes: off_bytes / 2, between_switches: true });
    Fabric {
        loss: description.loss,
        buffer_bytes: description.buffer_bytes,
        pause,
        trouble: crate::rdma::Trouble {
            duplicated: description.duplicated,
            held: description.held,
            held_ns: description.held_ns,
            corrupted: description.corrupted,
            dead_paths: 0,
        },
        ..Fabric::new(description.rate, description.delay_ns)
    }
}
