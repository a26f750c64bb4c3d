//! The life of a pod: each of its interfaces is connected to its pipeline, and reconnected after the pipeline was gone.
//! Meanwhile the other interfaces keep working. Tables, sessions and known neighbours stay.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use bifrost_port::memif::{Client, ClientConfig, MemifError};
use bifrost_port::panics;

use super::control::Control;
use super::links::Links;
use super::mailbox::{Attached, Mailbox};
use super::worker::Worker;
use crate::program;

/// Maximum time until the first connection.
const PATIENCE: Duration = Duration::from_secs(10);
/// Delay between two attempts.
const PAUSE: Duration = Duration::from_millis(50);

/// State shared by the threads of a pod.
#[derive(Debug)]
pub(super) struct Shared {
    /// The program is ending.
    stop: AtomicBool,
    /// The pod announces nothing.
    draining: AtomicBool,
    /// The pod is about to end, and ends its BGP sessions before.
    leaving: AtomicBool,
    /// The connection of each interface; `None` while its pipeline is gone.
    clients: Mutex<Vec<Option<Arc<Client>>>>,
}

impl Shared {
    /// Creates the state of a pod with `interfaces` interfaces.
    pub(super) fn new(interfaces: usize) -> Self {
        let flag = || AtomicBool::new(false);
        Shared { stop: flag(), draining: flag(), leaving: flag(), clients: Mutex::new(vec![None; interfaces]) }
    }

    /// Whether all interfaces are connected.
    pub(super) fn is_connected(&self) -> bool {
        self.clients().iter().all(Option::is_some)
    }

    /// Makes the pod withdraw its announcements, or announce again. It keeps forwarding.
    pub(super) fn drain(&self, draining: bool) {
        self.draining.store(draining, Ordering::Relaxed);
    }

    /// Makes the pod end its BGP sessions.
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

    /// Whether threads should return.
    #[inline]
    pub(super) fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn close(&self) {
        self.clients().iter().flatten().for_each(|client| client.close());
    }

    fn clients(&self) -> MutexGuard<'_, Vec<Option<Arc<Client>>>> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An interface of a pod.
#[derive(Debug)]
pub(super) struct Interface {
    /// The link that it belongs to.
    pub(super) link: usize,
    pub(super) client: ClientConfig,
}

/// A pod's threads, before and while they run.
pub(super) struct Life {
    pub(super) shared: Arc<Shared>,
    pub(super) links: Arc<Links>,
    pub(super) interfaces: Vec<Interface>,
    /// Each with the CPU that it should run on.
    pub(super) workers: Vec<(Worker, Option<usize>)>,
    pub(super) control: Control,
}

/// The connection of each interface, if it has one.
pub(super) type Connected = Vec<Option<Client>>;

impl Life {
    /// Connects for the first time: at least one interface, and all others whose pipelines are running.
    ///
    /// # Errors
    /// There is no pipeline within ten seconds, or a pipeline refuses the connection.
    pub(super) fn begin(&self) -> Result<Connected> {
        let until = Instant::now() + PATIENCE;
        loop {
            let mut connected = Connected::new();
            let mut reason = None;
            for interface in &self.interfaces {
                let path = interface.client.path.display();
                let client = match Client::connect(&interface.client) {
                    Ok(client) => Some(client),
                    Err(MemifError::Io(error)) => {
                        tracing::debug!(%error, "no pipeline yet");
                        reason
                            .get_or_insert_with(|| anyhow::Error::new(error).context(format!("connecting to {path}")));
                        None
                    }
                    Err(error) => return Err(error).with_context(|| format!("connecting to {path}")),
                };
                connected.push(client);
            }
            match reason {
                Some(error) if connected.iter().all(Option::is_none) => {
                    if Instant::now() >= until {
                        return Err(error);
                    }
                    thread::sleep(PAUSE);
                }
                _ => return Ok(connected),
            }
        }
    }

    /// Runs until it is stopped. `connected`: the return value of [`begin`](Self::begin).
    ///
    /// # Errors
    /// A thread cannot be started.
    pub(super) fn run(self, connected: Connected) -> Result<()> {
        let Life { shared, links, interfaces, mut workers, mut control } = self;
        // The control thread's mailbox is first, because it gets the first queue of each interface.
        let mailboxes: Vec<Arc<Mailbox>> =
            [&control.mailbox].into_iter().chain(workers.iter().map(|(worker, _)| &worker.mailbox)).cloned().collect();
        let attendants = interfaces.iter().zip(connected).enumerate().map(|(number, (interface, client))| {
            let attendant = Attendant { number, interface, shared: &shared, links: &links, mailboxes: &mailboxes };
            (attendant, client)
        });
        let attendants: Vec<_> = attendants.collect();
        thread::scope(|scope| {
            let started = Self::start(scope, &mut workers, &mut control, attendants);
            if started.is_err() {
                // Stops the threads that were started: they must not run without the others.
                shared.stop();
                mailboxes.iter().for_each(|mailbox| mailbox.wake());
            }
            started
        })
    }

    fn start<'a>(
        scope: &'a Scope<'a, '_>,
        workers: &'a mut [(Worker, Option<usize>)],
        control: &'a mut Control,
        attendants: Vec<(Attendant<'a>, Option<Client>)>,
    ) -> Result<()> {
        for (number, (worker, processor)) in workers.iter_mut().enumerate() {
            spawn(scope, format!("worker{number}"), move || {
                program::pin(*processor);
                worker.run();
            })?;
        }
        spawn(scope, "control".to_owned(), move || control.run())?;
        for (attendant, client) in attendants {
            spawn(scope, "memif".to_owned(), move || attendant.run(client))?;
        }
        Ok(())
    }
}

/// Keeps an interface connected, in a separate thread.
struct Attendant<'a> {
    number: usize,
    interface: &'a Interface,
    shared: &'a Shared,
    links: &'a Links,
    mailboxes: &'a [Arc<Mailbox>],
}

impl Attendant<'_> {
    /// Runs until the pod ends. `first`: the connection, if there is one already.
    fn run(self, first: Option<Client>) {
        let (mut next, mut refused) = (first, String::new());
        let mut was_connected = next.is_some();
        let path = self.interface.client.path.display();
        while !self.shared.is_stopping() {
            let Some(client) = next.take().or_else(|| self.connect(&mut refused)) else {
                thread::sleep(PAUSE);
                continue;
            };
            if !was_connected {
                tracing::info!(%path, "connected with the pipeline");
            }
            let reason = self.attend(client);
            was_connected = false;
            if !self.shared.is_stopping() {
                tracing::warn!(%path, reason, "the pipeline is gone; waiting for it to come back");
            }
        }
        // Wakes all threads, so that they notice the end.
        self.mailboxes.iter().for_each(|mailbox| mailbox.wake());
    }

    /// Tries to connect. `refused`: the last reason for a refusal, so that it is logged only once.
    fn connect(&self, refused: &mut String) -> Option<Client> {
        match Client::connect(&self.interface.client) {
            Ok(client) => {
                refused.clear();
                Some(client)
            }
            // This is normal while the pipeline is gone.
            Err(MemifError::Io(_)) => None,
            Err(error) => {
                let text = error.to_string();
                if text != *refused {
                    let path = self.interface.client.path.display();
                    tracing::warn!(%path, %error, "the pipeline does not take this pod");
                }
                *refused = text;
                None
            }
        }
    }

    /// Gives the queues to the threads until the connection is lost. Returns the reason for the loss.
    fn attend(&self, mut client: Client) -> String {
        let (interface, link) = (self.number, self.interface.link);
        for (mailbox, queue) in self.mailboxes.iter().zip(client.take_queues()) {
            mailbox.attach(Attached { interface, link, queue });
        }
        let client = Arc::new(client);
        self.shared.clients()[interface] = Some(Arc::clone(&client));
        self.links.connect(link, true);
        // Wakes the control thread: it can now resolve neighbours and announce on this link.
        self.mailboxes.iter().take(1).for_each(|mailbox| mailbox.wake());
        if self.shared.is_stopping() {
            client.close();
        }
        let reason = client.wait();
        self.links.connect(link, false);
        self.shared.clients()[interface] = None;
        self.mailboxes.iter().for_each(|mailbox| mailbox.detach(interface));
        reason
    }
}

/// Starts a thread. If it panics, the program ends.
fn spawn<'a>(scope: &'a Scope<'a, '_>, name: String, work: impl FnOnce() + Send + 'a) -> Result<()> {
    let run = move || {
        if let Err(panic) = panics::contain(work) {
            // A pod with only some of its workers would lose packets of all flows. If the whole pod is gone, the
            // pipeline stops sending packets to it.
            tracing::error!(%panic, "a panic; ending");
            std::process::exit(1);
        }
    };
    thread::Builder::new().name(name).spawn_scoped(scope, run).context("starting a thread")?;
    Ok(())
}
