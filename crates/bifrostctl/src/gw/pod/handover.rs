//! Sessions of translation of a pod go on in the one that takes its place.
//!
//! The switch sends packets to both for a while, and replies do not go to the pod that sent the packet. So what begins
//! in either is copied to the other, every 20 ms: of a conversation that begins meanwhile, a reply that is faster than
//! that may be lost.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use bifrost_control::Client;
use bifrost_control::api::{ErrorKind, ImportedSessions, PodCommand, TranslatedSessions};
use bifrost_control::client::ClientError;

use super::super::known;
use super::{PAUSE, Site, failure};
use crate::failure::Failure;

/// Two pods, and what one of them has told the other.
pub(super) struct Handover {
    old: Pod,
    new: Pod,
    refused: u64,
}

struct Pod {
    name: String,
    socket: PathBuf,
    client: Client,
    /// What began before was copied; in seconds of the pod's clock.
    since_s: u32,
}

impl Handover {
    /// Has all sessions of the old pod known in the new one; none: the old pod's program is too old for that.
    ///
    /// # Errors
    /// A pod does not answer.
    pub(super) fn begin(site: &Site, old: &str, new: &str) -> Result<Option<Self>, Failure> {
        let mut handover = Handover { old: Pod::new(site, old)?, new: Pod::new(site, new)?, refused: 0 };
        match copy(&mut handover.old, &handover.new, 0) {
            Ok(_) => Ok(Some(handover)),
            Err(Failure::Client(ClientError::Api(error))) if error.kind == ErrorKind::BadRequest => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Copies what begins in either, until it is to stop. What fails is tried again.
    pub(super) fn follow(&mut self, stop: &AtomicBool) {
        // A second is the clock's step: what began within it may have been copied, or not.
        let again = |pod: &Pod| pod.since_s.saturating_sub(1).max(1);
        while !stop.load(Ordering::Relaxed) {
            let began = Instant::now();
            let since_s = again(&self.old);
            let _ = copy(&mut self.old, &self.new, since_s);
            let since_s = again(&self.new);
            let _ = copy(&mut self.new, &self.old, since_s);
            // Pods with millions of sessions are not to do this alone.
            std::thread::sleep(PAUSE.max(began.elapsed()));
        }
        // The new one may not stay.
        let since_s = again(&self.new);
        let _ = copy(&mut self.new, &self.old, since_s);
    }

    /// Copies all sessions of the old pod, to which nothing comes any more, once again: with what their last packets
    /// marked. How many of them go on.
    ///
    /// # Errors
    /// A pod does not answer.
    pub(super) fn finish(&mut self) -> Result<u64, Failure> {
        let ImportedSessions { taken, known, refused } = copy(&mut self.old, &self.new, 0).map_err(|error| {
            let hint = format!("{} is drained, and has them; `bifrostctl gw pod delete` ends both", self.old.name);
            failure(&self.new.name, format!("sessions cannot be handed over: {error}"), hint)
        })?;
        self.refused = refused;
        Ok(taken + known)
    }

    /// Sessions of the old pod that cannot go on in the new one.
    pub(super) fn refused(&self) -> u64 {
        self.refused
    }
}

impl Pod {
    fn new(site: &Site, name: &str) -> Result<Self, Failure> {
        let socket = site.directory.join(name).join("gw.sock");
        Ok(Pod { name: name.to_owned(), client: Client::new(&socket)?, socket, since_s: 1 })
    }

    fn ask<T: serde::de::DeserializeOwned>(&self, command: &PodCommand) -> Result<T, Failure> {
        let told = self.client.command_pod(command).map_err(|error| known("bifrost-gw", &self.socket, error))?;
        Ok(serde_json::from_value(told)?)
    }
}

/// Copies sessions of a pod that began at a time, or later, to another one.
fn copy(from: &mut Pod, to: &Pod, since_s: u32) -> Result<ImportedSessions, Failure> {
    let (mut all, mut at, mut now_s) = (ImportedSessions::default(), None, None);
    loop {
        let page: TranslatedSessions = from.ask(&PodCommand::ExportSessions { since_s, from: at })?;
        if page.count > 0 {
            let ImportedSessions { taken, known, refused } =
                to.ask(&PodCommand::ImportSessions { sessions: page.sessions })?;
            all.taken += taken;
            all.known += known;
            all.refused += refused;
        }
        let began_s = *now_s.get_or_insert(page.now_s);
        at = page.next;
        if at.is_none() {
            from.since_s = began_s;
            return Ok(all);
        }
    }
}
