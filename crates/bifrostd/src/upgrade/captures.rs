//! A running capture in an upgrade. Its specification is part of the offer, so that the new daemon's workers capture
//! their first packet. The rest follows when they carry packets: how far the file has been written, as JSON, and the
//! connection to the client, as a descriptor. The client's file has everything that either daemon has carried, unless
//! the new one fails afterwards.

use std::sync::PoisonError;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, ensure};
use bifrost_control::api::{ApiError, CaptureSpec};
use bifrost_control::capture::CapturePosition;
use bifrost_control::server::continue_capture;
use serde::{Deserialize, Serialize};

use super::channel::{Channel, Message};
use super::format::Kind;
use crate::capture::Running;
use crate::daemon::{Daemon, State};

/// How long the old daemon waits until its client has taken what was captured.
const TAKING: Duration = Duration::from_secs(1);
/// Timeout of the old daemon for sending.
const SENDING: Duration = Duration::from_secs(2);
/// Timeout of the new daemon for that.
const PATIENCE: Duration = Duration::from_secs(5);

/// The body of a [`Kind::Capture`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct HandedCapture {
    /// The old daemon's version.
    release: String,
    /// When its workers stopped: monotonic clock, ns.
    stopped_ns: u64,
    /// None: the capture has ended.
    position: Option<CapturePosition>,
}

/// Takes the capture from the thread that writes it, and sends it to the new daemon. `stopped_ns`: when the workers
/// stopped.
pub(super) fn send(channel: &Channel, daemon: &Daemon, stopped_ns: u64) -> Result<()> {
    let (connection, position) = daemon.capturing.take(TAKING).map(|left| (left.connection, left.position)).unzip();
    let handed = HandedCapture { release: env!("CARGO_PKG_VERSION").to_owned(), stopped_ns, position };
    let connection: Vec<_> = connection.iter().map(std::os::fd::AsFd::as_fd).collect();
    channel.send(Kind::Capture, &serde_json::to_vec(&handed)?, &connection, SENDING)
}

impl Daemon {
    /// Starts the old daemon's capture on this one's workers, which are paused. `None`: it cannot be continued.
    pub(super) fn prepare_capture(&self, state: &State, spec: serde_json::Value) -> Option<Running> {
        let spec = serde_json::from_value::<CaptureSpec>(spec).map_err(|e| ApiError::bad_request(e.to_string()));
        let checked = spec.and_then(|spec| spec.check().map(|()| spec));
        match checked.and_then(|spec| state.begin_capture(&spec, &self.capturing)) {
            Ok(running) => Some(running),
            Err(error) => {
                tracing::warn!("the running capture ends with the upgrade: {}", error.what);
                None
            }
        }
    }

    /// Receives the old daemon's capture and continues it. `resumed_ns`: when the workers started.
    pub(super) fn continue_capture(&self, channel: &Channel, mut running: Running, resumed_ns: u64) -> Result<()> {
        let Message { kind, body, mut descriptors } = channel.receive(PATIENCE)?;
        ensure!(kind == Kind::Capture, "expected the capture of the old daemon, got {kind:?}");
        ensure!(descriptors.len() <= 1, "{} descriptors with a capture", descriptors.len());
        let handed: HandedCapture = serde_json::from_slice(&body).context("reading the old daemon's capture")?;
        let (Some(position), Some(connection)) = (handed.position, descriptors.pop()) else { return Ok(()) };
        let gap = Duration::from_nanos(resumed_ns.saturating_sub(handed.stopped_ns));
        let release: String = handed.release.chars().filter(|c| !c.is_control()).take(64).collect();
        let comment = format!(
            "bifrostd {} (process {}) continues the capture of bifrostd {release} after an upgrade; no packets were \
             carried or captured for {:.3} ms",
            env!("CARGO_PKG_VERSION"),
            std::process::id(),
            gap.as_secs_f64() * 1e3,
        );
        running.resume(position, &comment).map_err(|error| anyhow!(error))?;
        let continued = continue_capture(Box::new(running), connection).context("starting a thread")?;
        *self.continued.lock().unwrap_or_else(PoisonError::into_inner) = Some(continued);
        Ok(())
    }

    /// Ends a capture that this daemon has taken over, if it is still running.
    pub(crate) fn end_continued_capture(&self) {
        let continued = self.continued.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(continued);
    }
}
