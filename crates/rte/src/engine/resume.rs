//! An engine continues where another one on the same paths has ended.

use bifrost_transport::time::Time;

use super::Engine;
use crate::output::PeerId;
use crate::path::{Path, PathEstimate};

impl Engine {
    /// What is known of a peer's paths, in their order; empty if the peer is unknown.
    pub fn path_estimates(&self, peer: PeerId) -> Vec<PathEstimate> {
        self.peer(peer).map_or_else(Vec::new, |peer| peer.paths.iter().map(Path::estimate).collect())
    }

    /// Continues with what another engine knew of a peer's paths. Without that, the first lost packet of a connection
    /// waits for the initial RTO, and windows begin small while guests send as before.
    ///
    /// Does nothing if the peer is unknown or has another number of paths.
    pub fn resume_paths(&mut self, now: Time, peer: PeerId, estimates: &[PathEstimate]) {
        let Some(peer) = self.peers.get_mut(peer.0 as usize).and_then(Option::as_mut) else { return };
        if peer.paths.len() != estimates.len() {
            return;
        }
        for (path, estimate) in peer.paths.iter_mut().zip(estimates) {
            path.resume(now, estimate);
        }
        peer.select(&self.config, now);
    }
}
