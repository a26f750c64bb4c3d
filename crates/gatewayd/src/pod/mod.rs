//! `bifrost-gw`: a gateway pod as a program.

mod config;
mod neighbours;
mod worker;

use std::net::IpAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context as _, Result};
use bifrost_control::api;
use bifrost_control::server::CaptureStream;
use bifrost_gateway::{Context, Core, HEADROOM, Nat, Packet, Tables, Verdict};
use bifrost_plb::TRAILER_LEN;
use bifrost_port::clock::monotonic_ns;
use bifrost_port::memif::{Client, ClientConfig, MemifError, Queue};
use bifrost_port::panics;

use crate::capture::{Captures, Outcome, Tap};
use crate::described;
use crate::file::FileErrors;
use crate::program::{self, Program};
use crate::status::{Sample, Source, StatusServer};
pub use config::Config;
pub use neighbours::Neighbours;
use worker::{Counts, SharedNeighbours, Worker, originate, wait};

/// Bytes of Ethernet and two tags, and what a packet may grow by behind its front.
const SLACK: usize = 22 + TRAILER_LEN;
/// Room for an answer to a packet that is only described.
const ANSWER: usize = 2048;
/// How long the first connection may take, and a pause between two tries.
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(50);

/// What is known of next hops, for the status server.
type Told = Arc<Mutex<Vec<(IpAddr, Option<String>)>>>;

/// A running pod.
#[derive(Debug)]
pub struct GatewayPod {
    stop: Arc<AtomicBool>,
    clients: Vec<Arc<Client>>,
    threads: Vec<JoinHandle<()>>,
    _status: StatusServer,
}

impl Program for GatewayPod {
    type Config = Config;
    const NAME: &'static str = "bifrost-gw";
    const CONFIG: &'static str = "/etc/bifrost/gw.toml";

    fn load(path: &Path) -> Result<Config, FileErrors> {
        Config::load(path)
    }

    fn control(config: &Config) -> &Path {
        &config.control
    }

    /// Connects to the pipeline and starts the workers.
    fn start(config: Config) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let (mut clients, mut by_core): (Vec<Arc<Client>>, Vec<Vec<Queue>>) = Default::default();
        by_core.resize_with(usize::from(config.cores) + 1, Vec::new);
        for path in &config.interfaces {
            let longest = usize::from(config.tables.mtu) + SLACK + 128;
            let client = ClientConfig {
                path: path.clone(),
                name: "bifrost-gw".to_owned(),
                id: 0,
                queues: config.cores + 1,
                log2_entries: config.log2_ring_entries,
                headroom: bifrost_gateway::HEADROOM,
                longest,
            };
            let mut client = connect(&client).with_context(|| format!("connecting to {}", path.display()))?;
            for (queues, queue) in by_core.iter_mut().zip(client.take_queues()) {
                queues.push(queue);
            }
            clients.push(Arc::new(client));
        }
        let neighbours = Arc::new(SharedNeighbours::new());
        let tables = Arc::new(config.tables);
        let nat = Arc::new(Nat::new(config.nat));
        let (missing_to, missing) = sync_channel(64);
        let mut counts: Vec<Counts> = Vec::new();
        let mut threads = Vec::new();
        let mut queues = by_core.into_iter();
        let control = queues.next().unwrap_or_default();
        let mut captures = Captures::default();
        for (number, queues) in queues.enumerate() {
            let of_worker = Counts::default();
            counts.push(Arc::clone(&of_worker));
            let mut worker = Worker {
                core: Core::new(Arc::clone(&tables), Arc::clone(&nat), config.cores, fastrand::u64(..)),
                queues,
                neighbours: Arc::clone(&neighbours),
                missing: missing_to.clone(),
                counts: of_worker,
                stop: Arc::clone(&stop),
                pod: config.pod,
                spin_ns: config.spin_ns,
                tests: config.tests.of_worker(number),
                tap: captures.tap(&format!("worker-{number}")),
            };
            let processor = config.processors.get(number).copied();
            threads.push(spawn(format!("worker{number}"), move || {
                program::pin(processor);
                worker.run();
            })?);
        }
        let mut known = Neighbours::new(tables.mac, tables.vteps.clone());
        config.resolve.into_iter().for_each(|address| known.want(address));
        let told = Told::default();
        let of_pod = Arc::clone(&neighbours);
        let mut control = Control {
            queues: control,
            known,
            neighbours,
            missing,
            told: Arc::clone(&told),
            stop: Arc::clone(&stop),
            pod: config.pod,
            tap: captures.tap("control"),
        };
        threads.push(spawn("control".to_owned(), move || control.run())?);
        for client in &clients {
            let (client, stop) = (Arc::clone(client), Arc::clone(&stop));
            threads.push(spawn("memif".to_owned(), move || {
                let reason = client.wait();
                if !stop.load(Ordering::Relaxed) {
                    // A pod without its pipeline has nothing to do; the service manager starts it again.
                    tracing::error!(reason, "the pipeline is gone; ending");
                    std::process::exit(1);
                }
            })?);
        }
        let source = Arc::new(PodSource { counts, tables, nat, neighbours: of_pod, told, captures });
        let status = StatusServer::start(&config.control, config.metrics, source)
            .with_context(|| format!("listening on {}", config.control.display()))?;
        Ok(GatewayPod { stop, clients, threads, _status: status })
    }

    /// Returns what is being worked on, and leaves.
    fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.clients.iter().for_each(|client| client.close());
        for thread in self.threads {
            let _ = thread.join();
        }
    }
}

fn spawn(name: String, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    let run = move || {
        if let Err(panic) = panics::contain(work) {
            // The pipeline gives the packets of a pod that is gone to nobody; one that lives with a part of its workers loses some of all flows.
            tracing::error!(%panic, "a panic; ending");
            std::process::exit(1);
        }
    };
    thread::Builder::new().name(name).spawn(run).context("starting a thread")
}

/// Connects; the pipeline may be about to start.
fn connect(config: &ClientConfig) -> Result<Client> {
    let until = std::time::Instant::now() + PATIENCE;
    loop {
        match Client::connect(config) {
            Err(MemifError::Io(error)) if std::time::Instant::now() < until => {
                tracing::debug!(%error, "no pipeline yet");
                thread::sleep(PAUSE);
            }
            result => return Ok(result?),
        }
    }
}

/// The control thread: the priority rings.
struct Control {
    queues: Vec<Queue>,
    known: Neighbours,
    neighbours: Arc<SharedNeighbours>,
    missing: Receiver<IpAddr>,
    told: Told,
    stop: Arc<AtomicBool>,
    pod: u16,
    tap: Tap,
}

impl Control {
    fn run(&mut self) {
        self.queues.iter().for_each(|queue| queue.want_interrupts(true));
        while !self.stop.load(Ordering::Relaxed) {
            let now = monotonic_ns();
            self.tap.poll();
            for address in self.missing.try_iter().take(64) {
                self.known.want(address);
            }
            for queue in &mut self.queues {
                for _ in 0..queue.available() {
                    let Some(received) = queue.received() else { break };
                    let end = received.start + received.len.saturating_sub(TRAILER_LEN);
                    let frame = received.buffer.get(received.start..end).unwrap_or_default();
                    self.tap.begin(frame, false);
                    self.tap.end(Outcome::Taken, false);
                    let reply = self.known.on_frame(now, frame);
                    let (start, trailer) = (received.start, drop_trailer(self.pod));
                    received.buffer[start..start + TRAILER_LEN].copy_from_slice(&trailer);
                    queue.send_received(start, TRAILER_LEN);
                    if let Some(reply) = reply.filter(|_| queue.room() > 0) {
                        self.tap.originated(&reply);
                        originate(queue, &reply, self.pod);
                    }
                }
                queue.publish();
            }
            let questions = self.known.questions(now);
            for queue in &mut self.queues {
                for question in &questions {
                    if queue.room() > 0 {
                        self.tap.originated(question);
                        originate(queue, question, self.pod);
                    }
                }
                queue.publish();
            }
            if let Some(known) = self.known.changes() {
                self.neighbours.set(known);
                let all = self.known.iter().map(|(address, mac)| (address, mac.map(|mac| mac.to_string())));
                *self.told.lock().unwrap_or_else(PoisonError::into_inner) = all.collect();
            }
            wait(&self.queues);
        }
    }
}

/// What goes back for a packet that was for the pod itself.
fn drop_trailer(pod: u16) -> [u8; TRAILER_LEN] {
    let trailer = bifrost_plb::Trailer { psn: 0, payload: None, pod, queue: 0, drop: true, unordered: true };
    trailer.emit()
}

/// What the status server asks.
#[derive(Debug)]
struct PodSource {
    counts: Vec<Counts>,
    tables: Arc<Tables>,
    nat: Arc<Nat>,
    neighbours: Arc<SharedNeighbours>,
    told: Told,
    captures: Captures,
}

impl PodSource {
    fn state(&self) -> api::GatewayPod {
        let told = self.told.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let workers = self.counts.iter().map(|counts| counts.lock().unwrap_or_else(PoisonError::into_inner).clone());
        api::GatewayPod {
            workers: workers.collect(),
            nat_sessions: self.nat.len() as u64,
            neighbours: told.into_iter().map(|(address, mac)| (address.to_string(), mac)).collect(),
        }
    }
}

impl Source for PodSource {
    fn status(&self) -> serde_json::Value {
        serde_json::to_value(self.state()).unwrap_or_default()
    }

    fn samples(&self) -> Vec<Sample> {
        let state = self.state();
        let mut all = Vec::new();
        for (worker, counts) in state.workers.into_iter().enumerate() {
            for (name, value) in counts {
                let labels = vec![("worker", worker.to_string())];
                all.push(Sample { name: format!("gw_{name}"), labels, value, gauge: false });
            }
        }
        let known = state.neighbours.values().filter(|mac| mac.is_some()).count() as u64;
        for (name, value) in [
            ("gw_nat_sessions", state.nat_sessions),
            ("gw_neighbours", state.neighbours.len() as u64),
            ("gw_known_neighbours", known),
        ] {
            all.push(Sample { name: name.to_owned(), labels: vec![], value, gauge: true });
        }
        all
    }

    fn command(&self, _: serde_json::Value) -> Result<serde_json::Value, api::ApiError> {
        Err(api::ApiError::bad_request("a pod takes no commands"))
    }

    fn capture(&self, spec: &api::CaptureSpec) -> Result<Box<dyn CaptureStream>, api::ApiError> {
        self.captures.begin(spec)
    }

    fn trace(&self, spec: &api::GatewayTraceSpec) -> Result<api::Trace, api::ApiError> {
        let frame = described::frame(spec, &self.tables.vteps, self.tables.mac)?;
        let end = HEADROOM + frame.len();
        let mut buffer = [&[0; HEADROOM][..], &frame, &[0; ANSWER]].concat();
        let neighbours = self.neighbours.get();
        let context = Context { now: monotonic_ns(), neighbours: &neighbours };
        let mut packet = Packet::new(&mut buffer, HEADROOM, end);
        let (verdict, steps) = bifrost_gateway::trace(&self.tables, &self.nat, context, &mut packet);
        let (verdict, what, counter) = match verdict {
            Verdict::Forward(service) => {
                let counter = format!("forwarded_{}_packets", service.name());
                (api::TraceVerdict::Sent, format!("forwarded, {} bytes", packet.bytes().len()), counter)
            }
            Verdict::Answer => {
                (api::TraceVerdict::Answered, "answered".to_owned(), "forwarded_answer_packets".to_owned())
            }
            Verdict::Drop(reason) => {
                let counter = format!("dropped_{}_packets", reason.name());
                (api::TraceVerdict::Dropped, "the pod drops it".to_owned(), counter)
            }
        };
        let steps = steps.into_iter().map(|step| described::step(step.stage, step.passes, step.what)).collect();
        Ok(api::Trace { steps, verdict, what, counter: Some(counter), ..api::Trace::default() })
    }
}
