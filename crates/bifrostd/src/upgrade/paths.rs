//! What the transport knows of the paths to other hosts, in an upgrade: round-trip times, losses and windows.

use std::collections::BTreeMap;

use anyhow::Result;
use bifrost_control::Config;
use bifrost_control::config::PathEnds;
use bifrost_datapath::{PathEstimate, PathSet};
use serde::{Deserialize, Serialize};

use crate::daemon::State;

/// Paths by the peer's name, and of each worker in turn.
pub(crate) type OfPeers = BTreeMap<String, Vec<Vec<OfPath>>>;

/// A [`PathEstimate`]. Times are the mean, the deviation and the minimum, ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct OfPath {
    total: [u64; 3],
    fabric: [u64; 3],
    loss: f32,
    window: f32,
    is_suspect: bool,
}

impl From<&PathEstimate> for OfPath {
    fn from(path: &PathEstimate) -> OfPath {
        let times = |of: bifrost_datapath::Estimate| [of.mean_ns, of.variance_ns, of.min_ns];
        let PathEstimate { total, fabric, loss, window, is_suspect } = *path;
        OfPath { total: times(total), fabric: times(fabric), loss, window, is_suspect }
    }
}

impl From<&OfPath> for PathEstimate {
    fn from(path: &OfPath) -> PathEstimate {
        let times =
            |[mean_ns, variance_ns, min_ns]: [u64; 3]| bifrost_datapath::Estimate { mean_ns, variance_ns, min_ns };
        let OfPath { total, fabric, loss, window, is_suspect } = *path;
        PathEstimate { total: times(total), fabric: times(fabric), loss, window, is_suspect }
    }
}

/// The drained ones of a peer's `next` paths, if those of its `former` paths were drained that `drained` has. A path is
/// the same if its number and its ends are. Not all of them: no path would be left.
fn still_drained(drained: PathSet, former: &[PathEnds], next: &[PathEnds]) -> PathSet {
    let ends = |path: &PathEnds| (path.path, path.local, path.remote);
    let is_drained = |path: &PathEnds| former.iter().any(|f| ends(f) == ends(path) && drained >> f.path & 1 == 1);
    let still = next.iter().filter(|path| is_drained(path)).fold(0, |set, path| set | 1 << path.path);
    if next.iter().all(|path| still >> path.path & 1 == 1) { 0 } else { still }
}

impl State {
    /// The drained paths by peer, as far as they exist in another configuration.
    pub(super) fn leave_drained(&self, next: &Config) -> BTreeMap<String, PathSet> {
        let mut all = BTreeMap::new();
        for (name, &drained) in &self.drained {
            let paths = |config: &Config| -> Option<Vec<PathEnds>> {
                let peer = config.peers.iter().find(|peer| peer.name == *name)?;
                Some(config.paths(peer).collect())
            };
            let (Some(former), Some(next)) = (paths(&self.config), paths(next)) else { continue };
            let still = still_drained(drained, &former, &next);
            if still != drained {
                tracing::warn!(peer = name, former = drained, now = still, "other drained paths, because others exist");
            }
            all.insert(name.clone(), still);
        }
        all
    }

    /// What all workers know of the paths.
    pub(super) fn leave_paths(&self) -> Result<OfPeers> {
        let mut all = OfPeers::new();
        for of_worker in self.on_all(|worker| worker.core_mut().path_estimates())? {
            for (peer, paths) in of_worker {
                let Some(name) = self.names.peer_name(peer) else { continue };
                all.entry(name.to_owned()).or_default().push(paths.iter().map(OfPath::from).collect());
            }
        }
        Ok(all)
    }

    /// Continues with what another daemon's workers knew. Unknown peers and paths are ignored.
    pub(super) fn resume_paths(&self, all: &OfPeers) -> Result<()> {
        for (worker, at) in self.workers.iter().zip(0usize..) {
            let known = all.iter().filter_map(|(name, workers)| {
                let of_worker = workers.get(at % workers.len().max(1))?;
                Some((self.names.peer(name)?, of_worker.iter().map(PathEstimate::from).collect::<Vec<_>>()))
            });
            let known: Vec<_> = known.collect();
            worker.run(move |w| known.iter().for_each(|(peer, paths)| w.core_mut().resume_paths(*peer, paths)))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_stay_drained_as_far_as_they_exist() {
        let paths = |count: u8, local: &str, base: u16| -> Vec<PathEnds> {
            let (local, remote) = (local.parse().unwrap(), "192.0.2.2".parse().unwrap());
            (0..count).map(|path| PathEnds { path, local, remote, source_port: base + u16::from(path) }).collect()
        };
        let four = paths(4, "192.0.2.1", 50000);
        assert_eq!(still_drained(0b0110, &four, &paths(8, "192.0.2.1", 50100)), 0b0110);
        assert_eq!(still_drained(0b0110, &four, &paths(2, "192.0.2.1", 50000)), 0b0010);
        // None would be left.
        assert_eq!(still_drained(0b0111, &four, &paths(2, "192.0.2.1", 50000)), 0);
        assert_eq!(still_drained(0b0110, &four, &paths(4, "192.0.2.3", 50000)), 0);
        assert_eq!(still_drained(0b0110, &four, &[]), 0);
    }
}
