//! Holders of shared addresses (`[[port]] shared`, `[[route]] shared`): the vNIC that last took each address.
//!
//! Each worker's switch records the claims of guests and other hosts. This thread reads the claims, decides, and gives
//! all workers new tables, as for backends' health. Claims of this host's guests are announced to all hosts of their
//! VPC, and repeated for hosts that have started since. Without shared addresses nothing is polled.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use bifrost_avs::{Claim, Statement, announcement};
use bifrost_control::config::{Config, Vni};
use bifrost_port::panics;
use bifrost_wire::Mac;

use crate::daemon::{Daemon, State};

/// Polling interval.
const TICK: Duration = Duration::from_millis(20);
/// Pause after a move, in multiples of its duration, and its upper bound: even if guests constantly take an address
/// from each other, the daemon has time for other work.
const REST: u32 = 4;
const LONGEST_REST: Duration = Duration::from_millis(500);
/// Interval of repeated announcements to other hosts.
const REPEAT: Duration = Duration::from_secs(10);
/// Pause after a panic, which may recur.
const AFTER_PANIC: Duration = Duration::from_secs(1);

/// A shared address and its VPC.
pub(crate) type Name = (Vni, IpAddr);

/// The vNIC that holds each shared address. An address without an entry has no holder.
pub(crate) type Holders = BTreeMap<Name, Mac>;

/// State of shared addresses.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// Their holders.
    pub(crate) holders: Holders,
    /// Whether the configuration has any.
    is_used: bool,
}

impl Shared {
    /// For a configuration, with the former holders.
    pub(crate) fn of(config: &Config, holders: Holders) -> Shared {
        let is_used =
            config.ports.iter().any(|port| !port.shared.is_empty()) || config.routes.sharing().next().is_some();
        let mut shared = Shared { holders, is_used };
        if !shared.holders.is_empty() {
            let vnics = vnics(config);
            shared.holders.retain(|name, mac| vnics.get(name).is_some_and(|vnics| vnics.contains(mac)));
        }
        shared
    }
}

/// Each shared address, with the vNICs that may hold it.
pub(crate) fn vnics(config: &Config) -> BTreeMap<Name, BTreeSet<Mac>> {
    let of_ports = config.ports.iter().map(|port| (port.vni, port.mac, &port.shared[..]));
    let of_routes = config.routes.sharing().map(|route| (route.vni, route.mac, &route.shared[..]));
    let mut all = BTreeMap::<Name, BTreeSet<Mac>>::new();
    for (vni, mac, shared) in of_ports.chain(of_routes) {
        for address in shared {
            all.entry((vni, *address)).or_default().insert(mac);
        }
    }
    all
}

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

fn name(claim: &Claim) -> Option<Name> {
    Some((Vni::new(claim.vni.get())?, claim.address))
}

/// The holders after `claims`, which are sorted by time.
fn decide(holders: &Holders, claims: &[Claim], vnics: &BTreeMap<Name, BTreeSet<Mac>>) -> Holders {
    let mut holders = holders.clone();
    for claim in claims {
        let Some(name) = name(claim) else { continue };
        if !vnics.get(&name).is_some_and(|vnics| vnics.contains(&claim.mac)) {
            // The configuration has changed since.
            continue;
        }
        if claim.statement == Statement::Takes || !holders.contains_key(&name) {
            holders.insert(name, claim.mac);
        }
    }
    holders
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADDRESS: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 100));

    fn claim(n: u8, statement: Statement) -> Claim {
        let vni = bifrost_wire::Vni::new(100).unwrap_or_default();
        Claim { vni, address: ADDRESS, mac: Mac([2, 0, 0, 0, 0, n]), statement, at_ns: 0 }
    }

    #[test]
    fn the_last_vnic_that_takes_an_address_holds_it() {
        use Statement::{Has, Takes};
        let Some(vni) = Vni::new(100) else { panic!("a VNI") };
        let mac = |n| Mac([2, 0, 0, 0, 0, n]);
        let vnics = BTreeMap::from([((vni, ADDRESS), BTreeSet::from([mac(1), mac(2)]))]);
        let holder = |before: Option<u8>, claims: &[Claim]| {
            let before = before.map(|n| ((vni, ADDRESS), mac(n))).into_iter().collect();
            decide(&before, claims, &vnics).get(&(vni, ADDRESS)).map(|mac| mac.0[5])
        };
        assert_eq!(holder(None, &[claim(1, Has)]), Some(1));
        assert_eq!(holder(Some(2), &[claim(1, Has)]), Some(2));
        assert_eq!(holder(Some(2), &[claim(1, Takes)]), Some(1));
        assert_eq!(holder(None, &[claim(1, Takes), claim(2, Takes), claim(1, Has)]), Some(2));
        assert_eq!(holder(None, &[claim(3, Takes)]), None, "it does not share the address");
    }
}
