//! What the transport knows of the paths to other hosts, in an upgrade: round-trip times, losses and windows.

use std::collections::BTreeMap;

use anyhow::Result;
use bifrost_datapath::PathEstimate;
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

impl State {
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
