//! The faults of a soak: one after the other, chosen by a seed.

use anyhow::{Result, bail};
use fastrand::Rng;

use crate::inject;
use crate::lab::Network;

/// One fault.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Fault {
    /// The description.
    pub(super) description: String,
    action: Action,
}

#[derive(Debug, Clone, PartialEq)]
enum Action {
    Nothing,
    /// nftables on these paths (all paths if empty).
    Wire(Vec<u8>, f64),
    /// `bifrostctl fault add` between switch and guest, on both hosts.
    Port(Vec<String>),
    /// `bifrostctl fault add` on the underlay, on both hosts, on one path or on all.
    Peer(Option<u8>, Vec<String>),
}

/// Chooses the next fault among those whose description contains one of `words` (among all if `words` is empty).
pub(super) fn choose_among(random: &mut Rng, paths: u8, words: &[String]) -> Result<Fault> {
    for _ in 0..10_000 {
        let fault = choose(random, paths);
        if fault.is_named(words) {
            return Ok(fault);
        }
    }
    bail!("--faults: no fault's description contains any of these words: {}", words.join(", "))
}

/// One fault of each kind, at its full strength, among those whose description contains one of `words`. After them
/// the daemons' memory has reached its maximum for any fault.
pub(super) fn strongest(words: &[String]) -> Vec<Fault> {
    let arguments = |list: &[&str]| list.iter().map(ToString::to_string).collect::<Vec<_>>();
    let actions = [
        Action::Wire(Vec::new(), 3.0),
        Action::Wire(vec![0], 50.0),
        Action::Wire(vec![0], 100.0),
        Action::Port(arguments(&["--loss", "2"])),
        Action::Peer(Some(0), arguments(&["--loss", "30"])),
        Action::Peer(Some(0), arguments(&["--down"])),
        Action::Peer(Some(0), arguments(&["--delay-us", "5100", "--jitter-us", "500"])),
        Action::Peer(None, arguments(&["--reorder", "20"])),
        Action::Peer(None, arguments(&["--duplicate", "10"])),
        Action::Peer(None, arguments(&["--corrupt", "1"])),
        Action::Wire(Vec::new(), 100.0),
    ];
    let faults = actions.into_iter().map(Fault::new);
    faults.filter(|fault| fault.is_named(words)).collect()
}

fn choose(random: &mut Rng, paths: u8) -> Fault {
    let path = random.u8(..paths);
    let percent = |random: &mut Rng, most: u64| (1 + random.u64(..most * 10)) as f64 / 10.0;
    let words = |words: &[&str]| words.iter().map(ToString::to_string).collect::<Vec<_>>();
    Fault::new(match random.u64(..12) {
        0 => Action::Nothing,
        1 => Action::Wire(Vec::new(), percent(random, 3)),
        2 => Action::Wire(vec![path], percent(random, 50)),
        3 => Action::Wire(vec![path], 100.0),
        4 => Action::Port(words(&["--loss", &percent(random, 2).to_string()])),
        5 => Action::Peer(Some(path), words(&["--loss", &percent(random, 30).to_string()])),
        6 => Action::Peer(Some(path), words(&["--down"])),
        7 => {
            let delay = (100 + random.u64(..5000)).to_string();
            Action::Peer(Some(path), words(&["--delay-us", &delay, "--jitter-us", "500"]))
        }
        8 => Action::Peer(None, words(&["--reorder", &percent(random, 20).to_string()])),
        9 => Action::Peer(None, words(&["--duplicate", &percent(random, 10).to_string()])),
        10 => Action::Peer(None, words(&["--corrupt", &percent(random, 1).to_string()])),
        // All paths at once: the transport has no working path, and must recover.
        _ => Action::Wire(Vec::new(), 100.0),
    })
}

impl Fault {
    fn new(action: Action) -> Self {
        let description = match &action {
            Action::Nothing => "no fault".to_owned(),
            Action::Wire(paths, loss) if paths.is_empty() => format!("wire, all paths: {loss} % loss"),
            Action::Wire(paths, loss) => format!("wire, path {}: {loss} % loss", paths[0]),
            Action::Port(arguments) => format!("ports: {}", arguments.join(" ")),
            Action::Peer(Some(path), arguments) => format!("path {path}: {}", arguments.join(" ")),
            Action::Peer(None, arguments) => format!("all paths: {}", arguments.join(" ")),
        };
        Fault { description, action }
    }

    /// Whether the description contains one of `words`, or `words` is empty.
    fn is_named(&self, words: &[String]) -> bool {
        words.is_empty() || words.iter().any(|word| self.description.contains(word.as_str()))
    }

    /// Whether the fault blocks all traffic.
    pub(super) fn is_total(&self) -> bool {
        matches!(&self.action, Action::Wire(paths, loss) if paths.is_empty() && *loss >= 100.0)
    }

    /// Applies the fault; the previous one must have been removed by [`clear`].
    pub(super) fn apply(&self, network: &Network, seed: u64) -> Result<()> {
        match &self.action {
            Action::Nothing => Ok(()),
            Action::Wire(paths, loss) => inject::wire_loss(&network.topology, paths, *loss),
            Action::Port(effect) => {
                for daemon in &network.overlay.daemons {
                    add(daemon, &["--port", daemon.port()], effect, seed)?;
                }
                Ok(())
            }
            Action::Peer(path, effect) => {
                let daemons = &network.overlay.daemons;
                for (daemon, peer) in daemons.iter().zip(daemons.iter().rev()) {
                    let path = path.map(|path| path.to_string());
                    let mut target = vec!["--peer", peer.host()];
                    if let Some(path) = &path {
                        target.extend(["--path", path]);
                    }
                    add(daemon, &target, effect, seed)?;
                }
                Ok(())
            }
        }
    }
}

/// Removes the current fault. Returns the packets affected by the daemons' own faults, by host.
pub(super) fn clear(network: &Network) -> Result<Vec<u64>> {
    inject::wire_loss(&network.topology, &[], 0.0)?;
    let mut hits = Vec::new();
    for daemon in &network.overlay.daemons {
        let list = daemon.control(&["fault", "list"])?;
        let entries = list.as_array().into_iter().flatten();
        hits.push(entries.filter_map(|entry| entry["hits_packets"].as_u64()).sum());
        daemon.control(&["fault", "clear"])?;
    }
    Ok(hits)
}

fn add(daemon: &crate::daemon::Daemon, target: &[&str], effect: &[String], seed: u64) -> Result<()> {
    let seed = seed.to_string();
    let mut arguments = vec!["fault", "add"];
    arguments.extend_from_slice(target);
    arguments.extend(effect.iter().map(String::as_str));
    arguments.extend(["--seed", &seed]);
    daemon.control(&arguments)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_reproducible_and_all_kinds_occur() {
        let draw = |seed| {
            let mut random = Rng::with_seed(seed);
            (0..200).map(|_| choose(&mut random, 4)).collect::<Vec<_>>()
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
        let kinds =
            ["no fault", "wire, all", "wire, path", "ports: --loss", "--down", "--delay-us", "--reorder", "--corrupt"];
        for kind in kinds {
            assert!(draw(1).iter().any(|fault| fault.description.contains(kind)), "{kind}");
        }
        assert!(draw(1).iter().any(Fault::is_total));
    }
}
