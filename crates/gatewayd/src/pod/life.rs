//! The life of a pod: connected with its pipeline, and connected again after that was gone. Tables, sessions and what is known of neighbours stay.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use bifrost_port::memif::{Client, ClientConfig, MemifError, Queue};
use bifrost_port::panics;

use super::Control;
use super::worker::Worker;
use crate::program;

/// How long the first connection may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// Between two tries.
const PAUSE: Duration = Duration::from_millis(50);

/// What is shared with the threads of a pod.
#[derive(Debug, Default)]
pub(super) struct Shared {
    /// The program ends.
    stop: AtomicBool,
    /// Workers are to return: a connection is gone.
    halt: AtomicBool,
    /// The pod is to announce nothing.
    draining: AtomicBool,
    /// The pod is about to end: its sessions are to end before it.
    leaving: AtomicBool,
    /// The connections, one for each interface; none while there is no pipeline.
    clients: Mutex<Vec<Arc<Client>>>,
}

impl Shared {
    /// Whether a worker is to return.
    #[inline]
    pub(super) fn is_halted(&self) -> bool {
        self.halt.load(Ordering::Relaxed)
    }

    pub(super) fn is_connected(&self) -> bool {
        !self.clients().is_empty()
    }

    /// Has the pod announce nothing, or what it is to announce again. It goes on forwarding.
    pub(super) fn drain(&self, draining: bool) {
        self.draining.store(draining, Ordering::Relaxed);
    }

    /// Has the pod end its BGP sessions.
    pub(super) fn leave(&self) {
        self.leaving.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Relaxed)
    }

    pub(super) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// Ends the pod.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.close();
    }

    fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn close(&self) {
        self.clients().iter().for_each(|client| client.close());
    }

    fn clients(&self) -> MutexGuard<'_, Vec<Arc<Client>>> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A pod's threads, whether or not they run.
pub(super) struct Life {
    pub(super) shared: Arc<Shared>,
    pub(super) interfaces: Vec<ClientConfig>,
    /// With the processor that each is to run on.
    pub(super) workers: Vec<(Worker, Option<usize>)>,
    pub(super) control: Control,
}

impl Life {
    /// Connects for the first time.
    ///
    /// # Errors
    /// There is no pipeline within ten seconds, or it wants something else.
    pub(super) fn begin(&mut self) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        loop {
            match self.connect() {
                Err((_, MemifError::Io(error))) if Instant::now() < until => {
                    tracing::debug!(%error, "no pipeline yet");
                    thread::sleep(PAUSE);
                }
                Err((interface, error)) => {
                    let path = self.interfaces[interface].path.display();
                    return Err(error).with_context(|| format!("connecting to {path}"));
                }
                Ok(()) => return Ok(()),
            }
        }
    }

    /// Works until it is told to stop. To be called after [`begin`](Self::begin).
    pub(super) fn run(mut self) -> Result<()> {
        loop {
            self.work()?;
            self.shared.clients().clear();
            let mut told = String::new();
            loop {
                if self.shared.is_stopping() {
                    return Ok(());
                }
                thread::sleep(PAUSE);
                // A capture waits for none of its threads in vain.
                self.workers.iter_mut().for_each(|(worker, _)| worker.tap.poll());
                self.control.tap.poll();
                let Err((interface, error)) = self.connect() else { break };
                // Nobody listening is what a pipeline that is gone is like.
                let text = error.to_string();
                if text != told && !matches!(error, MemifError::Io(_)) {
                    tracing::warn!(interface, %error, "the pipeline does not take this pod");
                }
                told = text;
            }
            tracing::info!("connected with the pipeline again");
        }
    }

    /// Connects all interfaces, and gives each worker its queues; or the number of the interface that cannot be connected.
    fn connect(&mut self) -> Result<(), (usize, MemifError)> {
        let mut by_core: Vec<Vec<Queue>> = Vec::new();
        by_core.resize_with(self.workers.len() + 1, Vec::new);
        let mut clients = Vec::new();
        for (number, interface) in self.interfaces.iter().enumerate() {
            let mut client = Client::connect(interface).map_err(|error| (number, error))?;
            for (queues, queue) in by_core.iter_mut().zip(client.take_queues()) {
                queues.push(queue);
            }
            clients.push(Arc::new(client));
        }
        let mut queues = by_core.into_iter();
        self.control.queues = queues.next().unwrap_or_default();
        self.workers.iter_mut().zip(queues).for_each(|((worker, _), queues)| worker.queues = queues);
        *self.shared.clients() = clients;
        Ok(())
    }

    /// Works until a connection is gone.
    fn work(&mut self) -> Result<()> {
        let Life { shared, workers, control, .. } = self;
        let (shared, clients) = (&**shared, shared.clients().clone());
        shared.halt.store(false, Ordering::Relaxed);
        if shared.is_stopping() {
            shared.close();
        }
        thread::scope(|scope| {
            let started = Self::start(scope, workers, control, clients, shared);
            if started.is_err() {
                // Those that run are not to work without the others.
                shared.halt.store(true, Ordering::Relaxed);
                shared.close();
            }
            started
        })
    }

    fn start<'a>(
        scope: &'a Scope<'a, '_>,
        workers: &'a mut [(Worker, Option<usize>)],
        control: &'a mut Control,
        clients: Vec<Arc<Client>>,
        shared: &'a Shared,
    ) -> Result<()> {
        for (number, (worker, processor)) in workers.iter_mut().enumerate() {
            spawn(scope, format!("worker{number}"), move || {
                program::pin(*processor);
                worker.run();
            })?;
        }
        spawn(scope, "control".to_owned(), move || control.run())?;
        for client in clients {
            spawn(scope, "memif".to_owned(), move || {
                let reason = client.wait();
                // Of several interfaces the first one says so.
                if !shared.halt.swap(true, Ordering::Relaxed) && !shared.is_stopping() {
                    tracing::warn!(reason, "the pipeline is gone; waiting for it to come back");
                }
                // One interface without the others is no way to work.
                shared.close();
            })?;
        }
        Ok(())
    }
}

/// Starts a thread whose panic ends the program.
fn spawn<'a>(scope: &'a Scope<'a, '_>, name: String, work: impl FnOnce() + Send + 'a) -> Result<()> {
    let run = move || {
        if let Err(panic) = panics::contain(work) {
            // The pipeline gives the packets of a pod that is gone to nobody; one that lives with a part of its workers loses some of all flows.
            tracing::error!(%panic, "a panic; ending");
            std::process::exit(1);
        }
    };
    thread::Builder::new().name(name).spawn_scoped(scope, run).context("starting a thread")?;
    Ok(())
}
