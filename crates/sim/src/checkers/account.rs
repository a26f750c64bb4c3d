//! Every packet that was sent reliably has a counted outcome.

use bifrost_rte::Time;

use super::calm::Calm;
use crate::checker::Checker;
use crate::faults::Action;
use crate::violation::{Kind, Violations};
use crate::world::World;

/// The checker.
#[derive(Debug, Default)]
pub struct Account {
    calm: Calm,
}

/// Sums of all hosts' counters, packets.
#[derive(Debug, Default)]
struct Sums {
    sent: u64,
    received: u64,
    given_up: u64,
    withdrawn: u64,
    restarted: u64,
    outstanding: u64,
}

impl Checker for Account {
    fn fault(&mut self, at: u64, action: &Action, _: &mut Violations) {
        self.calm.fault(at, action);
    }

    /// A packet can have two outcomes: a packet that arrived can also be given up, because its ACKs were lost. So this
    /// check is only a bound. [`Conversation`](super::Conversation) compares, packet by packet, those that leave as
    /// plain VXLAN with those counted as given up.
    fn end(&mut self, world: &World, violations: &mut Violations) {
        let cores: Vec<_> = world.hosts().iter().filter_map(|host| host.core()).collect();
        let faulted = cores.iter().any(|core| core.engine().counters().faulted_connections > 0);
        // Counters of crashed daemons are missing, and so are packets that were lost in a panic.
        if self.calm.crashed || faulted {
            return;
        }
        let mut sums = Sums::default();
        for core in cores {
            let counters = core.engine().counters();
            sums.sent += counters.sent_packets;
            sums.received += counters.received_packets;
            sums.given_up += counters.given_up_packets;
            sums.withdrawn += counters.withdrawn_packets;
            sums.restarted += counters.restarted_packets;
            let connections = core.engine().connection_snapshots(Time(0));
            sums.outstanding += connections.map(|c| u64::from(c.in_flight_packets)).sum::<u64>();
        }
        let ended = sums.received + sums.given_up + sums.withdrawn + sums.restarted;
        if sums.sent > ended + sums.outstanding {
            violations.add(world.now(), Kind::Other("account"), || format!("packets without an outcome: {sums:?}"));
        }
    }
}
