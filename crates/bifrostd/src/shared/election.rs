//! Finds out who has a shared address, and tells the workers.

use std::collections::{BTreeMap, BTreeSet};
use std::thread;
use std::time::Instant;

use anyhow::Result;
use bifrost_avs::{Claim, Statement, announcement};
use bifrost_control::config::Vni;
use bifrost_port::panics;
use bifrost_wire::Mac;

use super::{AFTER_PANIC, LONGEST_REST, Name, REPEAT, REST, TICK, decide, name, vnics};
use crate::daemon::{Daemon, State};

/// Follows claims until the daemon ends. Restarts after a panic.
pub(crate) fn run(daemon: &Daemon) {
    while let Err(panic) = panics::contain(|| run_loop(daemon)) {
        tracing::error!(%panic, "panic while following shared addresses; retrying");
        thread::sleep(AFTER_PANIC);
    }
}

fn run_loop(daemon: &Daemon) {
    let mut repeat_at = Instant::now() + REPEAT;
    loop {
        let (begin, mut pause) = (Instant::now(), TICK);
        {
            let mut state = daemon.state();
            if state.workers.is_empty() {
                return;
            }
            let is_due = begin >= repeat_at;
            if is_due {
                repeat_at = begin + REPEAT;
            }
            match state.follow_shared(is_due) {
                Ok(false) => {}
                Ok(true) => pause = (begin.elapsed() * REST).clamp(TICK, LONGEST_REST),
                Err(error) => {
                    pause = LONGEST_REST;
                    tracing::error!(error = format!("{error:#}"), "cannot move shared addresses");
                }
            }
        }
        thread::sleep(pause);
    }
}

impl State {
    /// Updates the holders from the workers' claims, and announces changes to other hosts; all holders if `is_due`.
    /// Returns whether an address has moved.
    fn follow_shared(&mut self, is_due: bool) -> Result<bool> {
        if !self.shared.is_used {
            return Ok(false);
        }
        let taken = self.on_all(|worker| {
            let mut claims = Vec::new();
            worker.core_mut().switch_mut().take_claims(&mut claims);
            claims
        })?;
        let mut claims: Vec<Claim> = taken.into_iter().flatten().collect();
        claims.sort_by_key(|claim| claim.at_ns);
        let mut has_moved = false;
        if !claims.is_empty() {
            let holders = decide(&self.shared.holders, &claims, &vnics(&self.config));
            for ((vni, address), mac) in &holders {
                if self.shared.holders.get(&(*vni, *address)) != Some(mac) {
                    tracing::warn!(%vni, %address, %mac, "a shared address has moved");
                }
            }
            has_moved = self.set_holders(holders)?;
        }
        let holders = &self.shared.holders;
        let of_holder = claims.iter().filter_map(|claim| Some((name(claim)?, claim)));
        let mut statements = BTreeMap::<Name, Statement>::new();
        for (name, claim) in of_holder.filter(|(name, claim)| holders.get(name) == Some(&claim.mac)) {
            let statement = statements.entry(name).or_insert(claim.statement);
            *statement = claim.statement.max(*statement);
        }
        self.announce(|name| statements.get(name).copied().or(is_due.then_some(Statement::Has)))?;
        Ok(has_moved)
    }

    /// Announces addresses held by vNICs of this host to the other hosts of their VPC, if `statement` returns a
    /// statement for them.
    fn announce(&self, statement: impl Fn(&Name) -> Option<Statement>) -> Result<()> {
        let is_here = |vni: Vni, mac: Mac| self.config.ports.iter().any(|port| (port.vni, port.mac) == (vni, mac));
        let mut frames = Vec::new();
        for (name, mac) in &self.shared.holders {
            let Some(statement) = statement(name).filter(|_| is_here(name.0, *mac)) else { continue };
            let Some(vni) = bifrost_wire::Vni::new(name.0.value()) else { continue };
            let of_network = self.config.routes.of_vpc(name.0);
            let peers: BTreeSet<u32> = of_network.filter_map(|route| self.names.peer(&route.peer)).collect();
            frames.push((vni, peers.into_iter().collect::<Vec<u32>>(), announcement(*mac, name.1, statement)));
        }
        let Some(worker) = self.workers.first().filter(|_| !frames.is_empty()) else { return Ok(()) };
        worker.run(move |worker| {
            for (vni, peers, frame) in &frames {
                worker.core_mut().send_to_peers(*vni, peers, frame);
            }
        })?;
        Ok(())
    }
}
