//! AF_XDP in an upgrade: frames take a detour through the UDP sockets, which are handed over, until the new daemon's
//! AF_XDP sockets can be bound (port/src/afxdp/hand_over.rs).

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use bifrost_datapath::Worker;
use bifrost_port::HostUnderlay;
use bifrost_port::afxdp::{AfxdpError, HandedDevice};
use bifrost_port::panics;
use serde::{Deserialize, Serialize};

use crate::daemon::{Daemon, State};

/// How long frames that the kernel has already received may take to the rings: longer than one of its receive
/// interrupts works.
const IN_FLIGHT: Duration = Duration::from_millis(5);
/// Timeout for the workers to empty the rings.
const EMPTY: Duration = Duration::from_millis(500);
/// Polling interval for that.
const POLL: Duration = Duration::from_micros(200);
/// Most attempts to send frames that the kernel has not taken.
const MOST_FLUSHES: usize = 64;
/// First and longest pause before the next attempt to bind sockets.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// The kernel needs a part of this time to free queues. After it, failed attempts are logged.
const SILENCE: Duration = Duration::from_secs(5);

/// The description of a device in an offer. Its link follows, as a descriptor.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct DeviceDescription {
    /// Interface index.
    pub(super) device: u32,
    /// Number of its queues that have sockets.
    pub(super) queues: u32,
    /// Whether the XDP program runs in the driver.
    pub(super) native: bool,
}

impl DeviceDescription {
    pub(super) fn of(handed: &HandedDevice) -> DeviceDescription {
        DeviceDescription { device: handed.device, queues: handed.queues, native: handed.native }
    }

    pub(super) fn take(&self, link: OwnedFd) -> HandedDevice {
        let DeviceDescription { device, queues, native } = *self;
        HandedDevice { device, queues, native, link }
    }
}

/// Frames pass by the AF_XDP sockets: dropping this directs them there again.
pub(super) struct Detour<'a> {
    state: &'a State,
    pub(super) is_over: bool,
}

impl Drop for Detour<'_> {
    fn drop(&mut self) {
        if !self.is_over && self.state.steer(true).is_err() {
            tracing::error!("AF_XDP sockets are not used after a failed upgrade; the UDP sockets are");
        }
    }
}

impl State {
    /// The devices with AF_XDP sockets, for another daemon.
    pub(super) fn frames(&self) -> Result<Vec<HandedDevice>> {
        let Some(first) = self.workers.first() else { return Ok(Vec::new()) };
        let devices = first.run(|worker| worker.underlay().afxdp().map(|afxdp| afxdp.devices()))?;
        devices.transpose().map(Option::unwrap_or_default).context("copying links of XDP programs")
    }

    /// Directs frames to the UDP sockets, and waits until the workers have received what was in the rings.
    ///
    /// # Errors
    /// The kernel refuses, or the workers do not keep up.
    pub(super) fn detour(&self) -> Result<Detour<'_>> {
        let detour = Detour { state: self, is_over: false };
        if !self.on_all(|worker| worker.underlay().afxdp().is_some())?.contains(&true) {
            return Ok(detour);
        }
        self.steer(false)?;
        std::thread::sleep(IN_FLIGHT);
        let deadline = Instant::now() + EMPTY;
        while self.on_all(|worker| worker.underlay().afxdp().is_some_and(|afxdp| afxdp.has_frames()))?.contains(&true) {
            ensure!(Instant::now() < deadline, "the workers do not empty the rings of AF_XDP sockets");
            std::thread::sleep(POLL);
        }
        Ok(detour)
    }

    fn steer(&self, to_frames: bool) -> Result<()> {
        let steer = move |worker: &mut Worker<HostUnderlay>| {
            worker.underlay().afxdp().map_or(Ok(()), |afxdp| afxdp.steer(to_frames))
        };
        self.on_all(steer)?.into_iter().collect::<Result<(), _>>().context("changing the XDP program's map")
    }

    /// Leaves the devices with AF_XDP sockets to another daemon. The workers have stopped.
    pub(super) fn leave_frames(&self) {
        let leave = |worker: &mut Worker<HostUnderlay>| worker.underlay_mut().afxdp_mut().map(|afxdp| afxdp.leave());
        let Ok(closing) = self.on_all(leave) else { return };
        // Takes milliseconds for each; the end of the process closes the rest.
        let close = move || drop(closing);
        let _ = std::thread::Builder::new().name("closing".into()).spawn(close);
    }

    /// The devices with AF_XDP sockets now belong to this daemon.
    pub(super) fn own_frames(&self) {
        if self.on_all(|worker| worker.underlay().afxdp().iter().for_each(|afxdp| afxdp.own())).is_err() {
            tracing::error!("a worker has ended");
        }
    }

    /// Binds waiting AF_XDP sockets whose queues are free, and lets the workers use them. Returns whether none are
    /// left to wait.
    ///
    /// # Errors
    /// The kernel refuses; some may wait further.
    fn bind_frames(&mut self) -> Result<bool> {
        let Some(waiting) = &mut self.waiting_frames else { return Ok(true) };
        let (entering, mut failed) = waiting.bind();
        for sockets in entering {
            let Some(worker) = self.workers.get(usize::from(sockets.worker())) else { continue };
            let enter =
                move |underlay: &mut HostUnderlay| underlay.afxdp_mut().map_or(Ok(()), |afxdp| afxdp.enter(sockets));
            let entered: Result<(), AfxdpError> = worker.run(move |worker| worker.change_underlay(enter))??;
            failed = failed.or(entered.err());
        }
        waiting.steer()?;
        if waiting.is_done() {
            self.waiting_frames = None;
        }
        failed.map_or(Ok(self.waiting_frames.is_none()), |error| Err(error.into()))
    }
}

/// Makes the kernel send the frames that are queued, as far as it takes them.
pub(super) fn finish_sending(worker: &mut Worker<HostUnderlay>) {
    if let Some(afxdp) = worker.underlay_mut().afxdp_mut() {
        let _ = (0..MOST_FLUSHES).any(|_| afxdp.flush());
    }
}

/// Starts to use AF_XDP sockets when the kernel has freed the queues of the former daemon's; until then, packets pass
/// through the UDP sockets.
pub(crate) fn wait_for_queues(daemon: &Daemon) {
    let (began, mut pause, mut is_logged) = (Instant::now(), FIRST_PAUSE, false);
    loop {
        let attempt = || {
            let mut state = daemon.state();
            if state.workers.is_empty() { Ok(true) } else { state.bind_frames() }
        };
        let reason = match panics::contain(attempt) {
            Ok(Ok(true)) => {
                if is_logged {
                    tracing::info!("the AF_XDP sockets are in use");
                }
                return;
            }
            Ok(Ok(false)) => "their queues are in use".to_owned(),
            Ok(Err(error)) => format!("{error:#}"),
            Err(panic) => panic.to_string(),
        };
        if began.elapsed() > SILENCE && !is_logged {
            tracing::error!(reason, "AF_XDP sockets cannot be used yet; UDP sockets carry the packets; retrying");
            is_logged = true;
        }
        std::thread::sleep(pause);
        pause = if began.elapsed() > SILENCE { LONGEST_PAUSE } else { FIRST_PAUSE };
    }
}
