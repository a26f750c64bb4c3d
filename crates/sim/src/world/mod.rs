//! The world: all its parts, and the order of events. Read [`World::run_until`] first.

mod ending;
mod events;
mod fault;
mod guests;
mod journey;
mod turn;

use bifrost_rte as rte;
use foldhash::fast::FixedState;
use hashbrown::HashMap;

use crate::build::{Guest, Parts, build};
use crate::checker::Checker;
use crate::faults::{Action, expand};
use crate::flows::Flows;
use crate::host::Host;
use crate::network::Network;
use crate::packet::Spares;
use crate::rng::{Rng, mix};
use crate::scenario::{Scenario, ScenarioError};
use crate::sender::Sender;
use crate::statistics::Statistics;
use crate::tcp::Conns;
use crate::trace::Trace;
use crate::violation::{Kind, Violations};
use events::{Event, Events};

/// Maximum number of events at one time. With more, the world is considered stuck.
const MOST_EVENTS_AT_ONCE: u64 = 5_000_000;

/// A world in virtual time. The scenario and the seed decide everything that happens in it.
pub struct World {
    pub(crate) scenario: Scenario,
    /// The seed.
    pub seed: u64,
    now: u64,
    events: Events,
    rng: Rng,
    pub(crate) network: Network,
    pub(crate) hosts: Vec<Host>,
    pub(crate) guests: Vec<Guest>,
    pub(crate) flows: Flows,
    senders: Vec<Sender>,
    senders_active: u32,
    pub(crate) conns: Conns,
    faults: Vec<Action>,
    faults_left: u32,
    pub(crate) statistics: Statistics,
    /// When lost DATA was first sent, by receiving host, CID and PSN, ns.
    losses: HashMap<(u32, u32, u32), u64, FixedState>,
    /// Violations.
    pub violations: Violations,
    checkers: Vec<Box<dyn Checker>>,
    trace: Option<Trace>,
    free: Spares,
    hash: u64,
    done_at: Option<u64>,
    finished: bool,
    stop_at_violation: bool,
}

impl World {
    /// The world of `scenario` at time 0.
    ///
    /// # Errors
    /// The scenario is invalid.
    pub fn new(scenario: &Scenario, seed: u64) -> Result<Self, ScenarioError> {
        Self::with(scenario, seed, |_| ())
    }

    /// As [`new`](Self::new), with a last change to the transport's settings.
    ///
    /// # Errors
    /// The scenario is invalid.
    pub fn with(scenario: &Scenario, seed: u64, adjust: impl FnOnce(&mut rte::Config)) -> Result<Self, ScenarioError> {
        let mut scenario = scenario.clone();
        scenario.complete();
        scenario.check()?;
        let mut rng = Rng::new(mix(seed ^ 0x0b1f_0057));
        let mut config = scenario.transport.on(rte::Config::default());
        adjust(&mut config);
        let Parts { network, hosts, guests, flows, senders, conns } = build(&scenario, &config, &mut rng)?;
        let faults = expand(&scenario.faults, &network, scenario.host.restart_after.0, &mut rng.fork());
        let mut world = World {
            statistics: Statistics::new(&scenario),
            scenario,
            seed,
            now: 0,
            events: Events::default(),
            rng,
            network,
            hosts,
            guests,
            flows,
            senders_active: senders.len() as u32,
            senders: Vec::with_capacity(senders.len()),
            conns,
            faults_left: faults.len() as u32,
            faults: Vec::with_capacity(faults.len()),
            losses: HashMap::default(),
            violations: Violations::default(),
            checkers: Vec::new(),
            trace: None,
            free: Spares::default(),
            hash: 0,
            done_at: None,
            finished: false,
            stop_at_violation: false,
        };
        for host in 0..world.hosts.len() as u32 {
            world.start_host(host);
        }
        for (index, (at, sender)) in (0..).zip(senders) {
            world.senders.push(sender);
            world.events.add(at, Event::Send(index));
        }
        for (index, (at, action)) in (0..).zip(faults) {
            world.faults.push(action);
            world.events.add(at, Event::Fault(index));
        }
        for guest in 0..world.guests.len() as u32 {
            if world.guests[guest as usize].poll_at == 0 {
                world.events.add(0, Event::Poll(guest));
            }
        }
        Ok(world)
    }

    /// Adds a checker, which sees everything from now on.
    pub fn add_checker(&mut self, checker: Box<dyn Checker>) {
        self.checkers.push(checker);
    }

    /// From now on, the first violation ends the run.
    pub fn stop_at_violation(&mut self) {
        self.stop_at_violation = true;
    }

    /// From now on, all packets are written to a capture.
    pub fn set_trace(&mut self, trace: Trace) {
        self.trace = Some(trace);
    }

    /// Ends the capture.
    ///
    /// # Errors
    /// It could not be written.
    pub fn finish_trace(&mut self) -> std::io::Result<()> {
        self.trace.take().map_or(Ok(()), Trace::finish)
    }

    /// Runs until everything is finished and released, or the scenario's time is up.
    pub fn run(&mut self) {
        self.run_until(u64::MAX);
    }

    /// Runs until `until`, ns, or until the run ends. Returns whether it has ended.
    pub fn run_until(&mut self, until: u64) -> bool {
        let mut at_once = 0;
        while !self.finished {
            let end = self.end();
            let Some(at) = self.events.next_at().filter(|at| *at <= end) else { return self.finish(end) };
            if at > until {
                self.now = until;
                return false;
            }
            let Some(event) = self.events.pop() else { break };
            at_once = if at > self.now { 0 } else { at_once + 1 };
            if at_once > MOST_EVENTS_AT_ONCE {
                self.violations.add(at, Kind::Livelock, || format!("time stands still; the next event is {event:?}"));
                return self.finish(at);
            }
            self.now = self.now.max(at);
            self.happen(event);
            if self.stop_at_violation && !self.violations.is_empty() {
                return self.finish(at);
            }
        }
        true
    }

    fn happen(&mut self, event: Event) {
        let at = self.now;
        match event {
            Event::Arrive(packet) => {
                self.note(1, u64::from(packet.link));
                self.arrive(at, packet);
            }
            Event::Turn(host) => {
                if self.hosts[host as usize].turn_at == at {
                    self.note(2, u64::from(host));
                    self.turn(at, host);
                    self.look_for_end();
                }
            }
            Event::Send(sender) => {
                self.note(3, u64::from(sender));
                self.send(at, sender);
            }
            Event::Poll(guest) => {
                if self.guests[guest as usize].poll_at == at {
                    self.note(4, u64::from(guest));
                    self.poll(at, guest);
                    self.look_for_end();
                }
            }
            Event::Fault(index) => {
                self.note(5, u64::from(index));
                self.fault(at, index);
                self.look_for_end();
            }
            Event::Route(link) => {
                self.note(6, u64::from(link));
                self.route(at, link);
            }
        }
    }
    fn note(&mut self, kind: u64, id: u64) {
        self.hash = mix(self.hash ^ self.now.rotate_left(8) ^ kind << 56 ^ id);
        self.statistics.events += 1;
    }

    /// The time, ns.
    pub fn now(&self) -> u64 {
        self.now
    }

    /// A hash of all events: equal for two runs only if they were the same.
    pub fn event_hash(&self) -> u64 {
        self.hash
    }

    /// The physical network.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// The hosts.
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// The guests.
    pub fn guests(&self) -> &[Guest] {
        &self.guests
    }

    /// Flows of light guests.
    pub fn flows(&self) -> &Flows {
        &self.flows
    }

    /// Connections of TCP guests.
    pub fn connections(&self) -> &Conns {
        &self.conns
    }

    /// When everything was finished and released, ns.
    pub fn done_at(&self) -> Option<u64> {
        self.done_at
    }

    /// The counters.
    pub fn statistics(&self) -> &Statistics {
        &self.statistics
    }

    /// The scenario, with all defaults filled in.
    pub fn scenario(&self) -> &Scenario {
        &self.scenario
    }
}
