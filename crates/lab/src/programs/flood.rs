//! A guest that sends generated frames at a fixed rate.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};

use crate::netns::Namespace;
use crate::programs::hostile::Frames;
use crate::programs::packet_socket::PacketSocket;

/// Frames that are due within one such interval are sent together.
const TICK: Duration = Duration::from_millis(1);
/// Frames that are late by more than this are skipped: a guest that was descheduled does not send its whole backlog
/// at once.
const PATIENCE: Duration = Duration::from_millis(20);

/// Counters of a flood.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sent {
    /// Frames that the guest's kernel accepted.
    pub frames: u64,
    /// Frames that it refused, because of their offload header or because its queue was full.
    pub refused_frames: u64,
    /// Duration, s.
    pub seconds: f64,
}

/// A running flood. Dropping it ends it.
#[derive(Debug)]
pub struct Flood {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<Sent>>>,
}

impl Flood {
    /// Starts to send frames on `device` in `namespace` at `frames_per_s`.
    ///
    /// # Errors
    /// No thread can be started. [`Flood::finish`] reports other errors.
    pub fn start(namespace: &Namespace, device: &'static str, frames: Frames, frames_per_s: f64) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let ours = Arc::clone(&stop);
        let thread = namespace.spawn(move || send(device, frames, frames_per_s, &ours))?;
        Ok(Self { stop, thread: Some(thread) })
    }

    /// Ends the flood.
    ///
    /// # Errors
    /// The socket could not be opened.
    pub fn finish(mut self) -> Result<Sent> {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().ok_or_else(|| anyhow!("the flood has ended already"))?;
        thread.join().map_err(|_| anyhow!("a thread that sends frames panicked"))?
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn send(device: &str, mut frames: Frames, frames_per_s: f64, stop: &AtomicBool) -> Result<Sent> {
    let socket = PacketSocket::open(device)?;
    let started = Instant::now();
    let mut sent = Sent { frames: 0, refused_frames: 0, seconds: 0.0 };
    // Frames sent, of those due since `from`.
    let (mut from, mut done) = (started, 0);
    while !stop.load(Ordering::Relaxed) {
        let elapsed = from.elapsed();
        let due = (elapsed.as_secs_f64() * frames_per_s) as u64;
        if due - done > (PATIENCE.as_secs_f64() * frames_per_s) as u64 {
            (from, done) = (Instant::now() - TICK, 0);
            continue;
        }
        for _ in done..due {
            let (offload, frame) = frames.next_frame();
            match socket.send(&offload, frame) {
                Ok(()) => sent.frames += 1,
                Err(_) => sent.refused_frames += 1,
            }
        }
        done = due;
        std::thread::sleep(TICK);
    }
    sent.seconds = started.elapsed().as_secs_f64();
    Ok(sent)
}
