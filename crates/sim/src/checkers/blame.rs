//! A path becomes suspect only if the network or a host gave a reason.

use crate::checker::{Checker, Wire};
use crate::faults::Action;
use crate::packet::Packet;
use crate::violation::{Kind, Violations};
use crate::world::World;

/// The checker. All tenants of two hosts share the paths between them, so a guest that receives nothing, is slow, or
/// damages its own packets must not make a path suspect (PROTOCOL §9.5). The checker ignores worlds in which something
/// else can look like a loss: links that lose, duplicate or reorder packets, hosts that crash or pause, full queues,
/// and round trips so long that the first timeouts expire before a response can arrive.
#[derive(Debug)]
pub struct Blame {
    /// Only guests can be the reason for a suspect path, so the world is checked.
    judged: bool,
}

/// Maximum link delay in a world that is checked, ns. A round trip has at most twelve links.
const DELAY_NS: u64 = 100_000;

impl Blame {
    /// Creates the checker for this world.
    pub fn new(world: &World) -> Self {
        let orderly = |link: &crate::link::Link| {
            let config = &link.config;
            let short = config.delay.0 <= DELAY_NS;
            short && config.jitter.0 == 0 && config.reordering == 0.0 && config.duplication == 0.0 && !config.down
        };
        Blame { judged: world.network().links.iter().all(orderly) }
    }
}

impl Checker for Blame {
    fn wire(&mut self, _: u64, what: Wire, _: &Packet, _: &mut Violations) {
        self.judged &= !matches!(what, Wire::Dropped(_));
    }

    fn fault(&mut self, _: u64, action: &Action, _: &mut Violations) {
        self.judged &= !matches!(action, Action::Links { .. } | Action::Crash(_) | Action::Pause(..));
    }

    fn end(&mut self, world: &World, violations: &mut Violations) {
        let judged = world.hosts().iter().filter(|_| self.judged);
        for (host, core) in judged.filter_map(|host| Some((host.id(), host.core()?))) {
            let suspect = core.engine().counters().suspect_paths;
            if suspect > 0 {
                violations.add(world.now(), Kind::Other("blamed_paths"), || {
                    format!("host {host}: {suspect} times a path was suspect in a network that lost nothing")
                });
            }
        }
    }
}
