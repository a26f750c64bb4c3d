//! How other threads talk to a worker: by closures, which it runs between two batches.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::JoinHandle;

use bifrost_avs::Switch;
use bifrost_port::{PolledUnderlay, provide};
use rustix::event::{EventfdFlags, eventfd};

use crate::core::CoreConfig;
use crate::pulse::Pulse;
use crate::worker::{Gone, Letters, Mailbox, Worker};

/// A running worker.
pub struct Handle<U: 'static> {
    mailbox: Mailbox<U>,
    pulse: Arc<Pulse>,
    thread: Option<JoinHandle<()>>,
}

/// Starts a worker on its own thread, pinned to `cpu` if given.
///
/// # Errors
/// A thread or descriptor could not be created.
pub fn start<U: PolledUnderlay + Send + 'static>(
    config: CoreConfig,
    underlay: U,
    switch: Switch,
    cpu: Option<usize>,
) -> io::Result<Handle<U>> {
    begin(config, underlay, switch, cpu, false)
}

/// [`start`] of a worker that only runs commands until it is told to [resume](Worker::resume), because its sockets and
/// devices still belong to another process.
///
/// # Errors
/// As for [`start`].
pub fn start_paused<U: PolledUnderlay + Send + 'static>(
    config: CoreConfig,
    underlay: U,
    switch: Switch,
    cpu: Option<usize>,
) -> io::Result<Handle<U>> {
    begin(config, underlay, switch, cpu, true)
}

fn begin<U: PolledUnderlay + Send + 'static>(
    config: CoreConfig,
    underlay: U,
    switch: Switch,
    cpu: Option<usize>,
    paused: bool,
) -> io::Result<Handle<U>> {
    let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
    let ((commands, commands_end), (questions, questions_end)) = (channel(), channel());
    let letters = Letters { commands: commands_end, questions: questions_end };
    let name = format!("worker-{}", config.index);
    provide::start()?;
    let mut worker = Worker::new(config, underlay, switch, Arc::clone(&wake), letters)?;
    worker.paused = paused;
    let pulse = worker.pulse();
    let thread = std::thread::Builder::new().name(name).spawn(move || {
        if let Some(cpu) = cpu {
            let mut set = rustix::thread::CpuSet::new();
            set.set(cpu);
            if let Err(error) = rustix::thread::sched_setaffinity(None, &set) {
                tracing::warn!(cpu, %error, "cannot pin the worker; it runs on any CPU");
            }
        }
        worker.run();
    })?;
    Ok(Handle { mailbox: Mailbox::new(commands, questions, wake), pulse, thread: Some(thread) })
}

/// Access to a running worker that does not keep it running.
pub struct Remote<U: 'static>(Mailbox<U>);

impl<U: 'static> Clone for Remote<U> {
    fn clone(&self) -> Self {
        Remote(self.0.clone())
    }
}

impl<U: PolledUnderlay + 'static> Remote<U> {
    /// [`Handle::run`].
    ///
    /// # Errors
    /// The worker has ended.
    pub fn run<T: Send + 'static>(&self, work: impl FnOnce(&mut Worker<U>) -> T + Send + 'static) -> Result<T, Gone> {
        self.0.run(work)
    }

    /// Runs `answer` on the worker when a turn has time for questions, and returns its result.
    ///
    /// # Errors
    /// The worker has ended.
    pub fn ask<T: Send + 'static>(&self, answer: impl FnOnce(&Worker<U>) -> T + Send + 'static) -> Result<T, Gone> {
        let mut answer = Some(answer);
        self.0.ask(move |worker, _| answer.take().map(|answer| answer(worker)))
    }

    pub(crate) fn mailbox(&self) -> &Mailbox<U> {
        &self.0
    }
}

impl<U: PolledUnderlay + 'static> Handle<U> {
    /// The part of the worker's state that can be read without asking it.
    pub fn pulse(&self) -> Arc<Pulse> {
        Arc::clone(&self.pulse)
    }

    /// Access to the worker for another thread.
    pub fn remote(&self) -> Remote<U> {
        Remote(self.mailbox.clone())
    }

    /// Runs `work` on the worker, between two batches, and returns its result.
    ///
    /// # Errors
    /// The worker has ended.
    pub fn run<T: Send + 'static>(&self, work: impl FnOnce(&mut Worker<U>) -> T + Send + 'static) -> Result<T, Gone> {
        self.mailbox.run(work)
    }
}

impl<U: 'static> Drop for Handle<U> {
    /// Ends the worker and waits for it.
    fn drop(&mut self) {
        let _ = self.mailbox.send(Box::new(Worker::order_stop));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Joins the workers of one host, so that each finds the others.
///
/// # Errors
/// A worker has ended.
pub fn join<U: PolledUnderlay + 'static>(workers: &[Handle<U>]) -> Result<(), Gone> {
    if workers.len() < 2 {
        return Ok(());
    }
    let all: Vec<Mailbox<U>> = workers.iter().map(|w| w.mailbox.clone()).collect();
    for worker in workers {
        let all = all.clone();
        worker.run(move |w| w.join(all))?;
    }
    Ok(())
}
