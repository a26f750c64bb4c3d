//! Copies conversations to the new daemon while this one carries packets, so that guests wait only for what changes
//! last.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use bifrost_avs::Copying;

use super::channel::Channel;
use super::format::{HandedState, Kind, WorkerState, emit_state};
use super::take_over::Ready;
use crate::daemon::State;

/// Conversations of each worker in a step. Packets wait for it on both sides, some tenths of a millisecond.
const STEP: usize = 256;
/// Pause between two steps, in which packets have the processors.
const PAUSE: Duration = Duration::from_micros(500);
/// Copying ends after this time, even if conversations change faster than they are copied.
const DURATION: Duration = Duration::from_secs(10);
/// Timeout for a step.
const PATIENCE: Duration = Duration::from_secs(2);

/// The workers record changes: dropping this ends that.
pub(super) struct Copies<'a>(&'a State);

impl Drop for Copies<'_> {
    fn drop(&mut self) {
        // A worker that has ended records nothing.
        let _ = self.0.on_all(|worker| worker.core_mut().switch_mut().stop_copying());
    }
}

impl State {
    /// Copies the conversations of all workers, except the last changes.
    ///
    /// # Errors
    /// The new daemon has failed or does not answer.
    pub(super) fn copy(&self, channel: &Channel) -> Result<Copies<'_>> {
        let copies = Copies(self);
        let mut progress = self.on_all(|worker| worker.core_mut().switch_mut().start_copying())?;
        let deadline = Instant::now() + DURATION;
        loop {
            let mut step = HandedState::default();
            let mut most_left = 0;
            for (worker, copying) in self.workers.iter().zip(&mut progress) {
                let mut of_worker = std::mem::take(copying);
                let (of_worker, memory, left): (Copying, _, usize) = worker.run(move |worker| {
                    let mut memory = Vec::new();
                    let left = worker.core_mut().switch_mut().copy_some(&mut of_worker, STEP, &mut memory);
                    (of_worker, memory, left)
                })?;
                *copying = of_worker;
                copying.sort();
                most_left = most_left.max(left);
                step.workers.push(WorkerState { memory, packets: Vec::new() });
            }
            channel.send(Kind::Copies, &emit_state(&step)?, &[], PATIENCE)?;
            let answer = channel.receive(PATIENCE)?;
            if answer.kind != Kind::Copied {
                Ready::of(&answer)?;
                bail!("unexpected answer of the new daemon");
            }
            if most_left <= STEP || Instant::now() > deadline {
                return Ok(copies);
            }
            std::thread::sleep(PAUSE);
        }
    }
}
