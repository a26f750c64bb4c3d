//! `bifrost-gw`: a gateway pod as a program.

mod announcer;
mod config;
mod health;
mod life;
mod neighbours;
mod worker;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use bifrost_control::api;
use bifrost_control::server::CaptureStream;
use bifrost_gateway::{Ahead, BadSessions, Context, Core, Export, HEADROOM, Nat, Packet, Tables, Verdict};
use bifrost_plb::TRAILER_LEN;
use bifrost_port::clock::monotonic_ns;
use bifrost_port::memif::{ClientConfig, Queue};

use crate::capture::{Captures, Outcome, Tap};
use crate::described;
use crate::file::FileErrors;
use crate::program::Program;
use crate::status::{Sample, Source, StatusServer};
use announcer::Announcer;
pub use announcer::BgpSettings;
pub use config::Config;
use health::Health;
use life::{Life, Shared};
pub use neighbours::Neighbours;
use worker::{Counts, SharedNeighbours, Told, Worker, originate, wait};

/// Bytes of Ethernet and two tags, and what a packet may grow by behind its front.
const SLACK: usize = 22 + TRAILER_LEN;
/// Room for an answer to a packet that is only described.
const ANSWER: usize = 2048;
/// How long the control thread sleeps at most: it looks whether the pod is to end.
const WAIT: Duration = Duration::from_millis(50);
/// The same if workers, which wake nobody, hand on control packets.
const SHORT_WAIT: Duration = Duration::from_millis(2);
/// What is known of next hops, for the status server.
type NextHops = Arc<Mutex<Vec<(IpAddr, Option<String>)>>>;

/// How long a pod that ends waits until its proxies have been told.
const LEAVE: Duration = Duration::from_millis(500);
/// How long it forwards after that.
const LINGER: Duration = Duration::from_millis(300);

/// How the BGP sessions are, for the status server.
type SharedSessions = Arc<Mutex<Sessions>>;

#[derive(Debug, Default)]
struct Sessions {
    announcing: bool,
    refused_hop_limit_packets: u64,
    peers: Vec<api::GatewayPeer>,
}

impl Sessions {
    /// Whether a proxy knows of an address.
    fn announces(&self) -> bool {
        self.peers.iter().any(|peer| !peer.announced.is_empty())
    }
}

/// A running pod.
#[derive(Debug)]
pub struct GatewayPod {
    shared: Arc<Shared>,
    life: JoinHandle<()>,
    sessions: SharedSessions,
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
        let shared = Arc::new(Shared::default());
        shared.drain(config.bgp.as_ref().is_some_and(|bgp| bgp.drained));
        let interface = |path: &PathBuf| ClientConfig {
            path: path.clone(),
            name: "bifrost-gw".to_owned(),
            id: 0,
            queues: config.cores + 1,
            log2_entries: config.log2_ring_entries,
            headroom: bifrost_gateway::HEADROOM,
            longest: usize::from(config.tables.mtu) + SLACK + 128,
        };
        let interfaces = config.interfaces.iter().map(interface).collect();
        let neighbours = Arc::new(SharedNeighbours::new());
        let tables = Arc::new(config.tables);
        let nat = Arc::new(Nat::new(config.nat));
        let (missing_to, missing) = sync_channel(64);
        let (mut counts, mut workers): (Vec<Counts>, Vec<_>) = Default::default();
        let mut captures = Captures::default();
        let (control_to, from_workers) = sync_channel(64);
        for number in 0..usize::from(config.cores) {
            let of_worker = Counts::default();
            counts.push(Arc::clone(&of_worker));
            let worker = Worker {
                core: Core::new(Arc::clone(&tables), Arc::clone(&nat), config.cores, fastrand::u64(..)),
                ahead: Ahead::default(),
                queues: Vec::new(),
                neighbours: Arc::clone(&neighbours),
                missing: missing_to.clone(),
                counts: of_worker,
                told: Told::default(),
                shared: Arc::clone(&shared),
                pod: config.pod,
                spin_ns: config.spin_ns,
                tests: config.tests.of_worker(number),
                tap: captures.tap(&format!("worker-{number}")),
                control: config.tests.control_with_data.then(|| control_to.clone()),
            };
            workers.push((worker, config.processors.get(number).copied()));
        }
        // The pod asks from its address on the link, if it has one: others there know nothing of tunnels.
        let own = config.link_addresses.iter().chain(&tables.vteps).copied().collect();
        let mut known = Neighbours::new(tables.mac, own);
        config.resolve.into_iter().for_each(|address| known.want(address));
        let announcer = config.bgp.map(|settings| Announcer::new(settings, tables.mac));
        announcer.iter().flat_map(Announcer::peers).for_each(|address| known.want(address));
        let told = NextHops::default();
        let sessions = Arc::new(Mutex::new(Sessions::default()));
        let of_pod = Arc::clone(&neighbours);
        let control = Control {
            queues: Vec::new(),
            known,
            announcer,
            health: Health::new(counts.clone(), tables.router),
            sessions: Arc::clone(&sessions),
            neighbours,
            missing,
            from_workers,
            wait: if config.tests.control_with_data { SHORT_WAIT } else { WAIT },
            told: Arc::clone(&told),
            shared: Arc::clone(&shared),
            pod: config.pod,
            tap: captures.tap("control"),
        };
        let mut life = Life { shared: Arc::clone(&shared), interfaces, workers, control };
        life.begin()?;
        let of_status = Arc::clone(&shared);
        let source = Arc::new(PodSource {
            shared: of_status,
            counts,
            tables,
            nat,
            neighbours: of_pod,
            told,
            sessions: Arc::clone(&sessions),
            captures,
        });
        let status = StatusServer::start(&config.control, config.metrics, source)
            .with_context(|| format!("listening on {}", config.control.display()))?;
        let live = move || {
            if let Err(error) = life.run() {
                tracing::error!(%error, "the pod has ended");
                std::process::exit(1);
            }
        };
        let life = thread::Builder::new().name("pod".to_owned()).spawn(live).context("starting a thread")?;
        Ok(GatewayPod { shared, life, sessions, _status: status })
    }

    /// Withdraws what it announces, returns what is being worked on, and leaves.
    fn stop(self) {
        let sessions = || self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        if sessions().announces() {
            self.shared.leave();
            let until = Instant::now() + LEAVE;
            while Instant::now() < until && sessions().announces() {
                thread::sleep(Duration::from_millis(10));
            }
            // Switches need a moment until nothing comes any more.
            thread::sleep(LINGER);
        }
        self.shared.stop();
        let _ = self.life.join();
    }
}

/// The control thread: the priority rings.
struct Control {
    queues: Vec<Queue>,
    known: Neighbours,
    announcer: Option<Announcer>,
    health: Health,
    sessions: SharedSessions,
    neighbours: Arc<SharedNeighbours>,
    missing: Receiver<IpAddr>,
    /// For tests: frames that came with the data.
    from_workers: Receiver<Vec<u8>>,
    wait: Duration,
    told: NextHops,
    shared: Arc<Shared>,
    pod: u16,
    tap: Tap,
}

impl Control {
    fn run(&mut self) {
        self.queues.iter().for_each(|queue| queue.want_interrupts(true));
        while !self.shared.is_halted() {
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
                    let reply = take(&mut self.known, self.announcer.as_mut(), now, frame);
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
            for frame in self.from_workers.try_iter().take(64) {
                let reply = take(&mut self.known, self.announcer.as_mut(), now, &frame);
                if let Some(reply) = reply {
                    send(&mut self.queues, &mut self.tap, &reply, self.pod);
                }
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
            self.announce(now);
            if let Some(known) = self.known.changes() {
                self.neighbours.set(known);
                let all = self.known.iter().map(|(address, mac)| (address, mac.map(|mac| mac.to_string())));
                *self.told.lock().unwrap_or_else(PoisonError::into_inner) = all.collect();
            }
            let due = self.announcer.as_ref().and_then(Announcer::deadline);
            wait(
                &self.queues,
                due.map_or(self.wait, |due| self.wait.min(Duration::from_nanos(due.saturating_sub(now)))),
            );
        }
    }

    /// Has the proxies know what they are to know.
    fn announce(&mut self, now: u64) {
        let Some(announcer) = &mut self.announcer else { return };
        let mac = |address| self.known.get(address);
        let healthy = self.health.check(now, |router| mac(router).is_some()) && !self.shared.is_draining();
        if self.shared.is_leaving() {
            announcer.shut_down(now);
        }
        let frames = announcer.poll(now, healthy, mac);
        for frame in frames {
            send(&mut self.queues, &mut self.tap, &frame, self.pod);
        }
        self.queues.iter_mut().for_each(Queue::publish);
        let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.announcing = announcer.is_announcing();
        sessions.refused_hop_limit_packets = announcer.refused_hop_limit_packets();
        sessions.peers = announcer.state();
    }
}

/// What a command is answered with.
fn answer(value: impl serde::Serialize) -> Result<serde_json::Value, api::ApiError> {
    serde_json::to_value(value).map_err(|error| api::ApiError::internal(error.to_string()))
}

/// Gives a frame to those that it may be for; what is to be answered.
fn take(known: &mut Neighbours, announcer: Option<&mut Announcer>, now: u64, frame: &[u8]) -> Option<Vec<u8>> {
    let reply = known.on_frame(now, frame);
    if let Some(announcer) = announcer {
        announcer.on_frame(now, frame);
    }
    reply
}

/// Sends a frame of the pod's own. All interfaces lead to the link; the first one that has room will do.
fn send(queues: &mut [Queue], tap: &mut Tap, frame: &[u8], pod: u16) {
    let with_room = |queue: &mut Queue| queue.room() > 0;
    if let Some(number) = queues.iter_mut().position(with_room) {
        tap.originated(frame);
        originate(&mut queues[number], frame, pod);
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
    shared: Arc<Shared>,
    counts: Vec<Counts>,
    tables: Arc<Tables>,
    nat: Arc<Nat>,
    neighbours: Arc<SharedNeighbours>,
    told: NextHops,
    sessions: SharedSessions,
    captures: Captures,
}

impl PodSource {
    fn state(&self) -> api::GatewayPod {
        let told = self.told.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let workers = self.counts.iter().map(|counts| counts.lock().unwrap_or_else(PoisonError::into_inner).clone());
        let sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        api::GatewayPod {
            connected: self.shared.is_connected(),
            draining: self.shared.is_draining(),
            announcing: sessions.announcing,
            bgp: sessions.peers.clone(),
            refused_hop_limit_packets: sessions.refused_hop_limit_packets,
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
            ("gw_connected", u64::from(state.connected)),
            ("gw_nat_sessions", state.nat_sessions),
            ("gw_neighbours", state.neighbours.len() as u64),
            ("gw_known_neighbours", known),
            ("gw_announcing", u64::from(state.announcing)),
            ("gw_draining", u64::from(state.draining)),
            ("gw_bgp_established", state.bgp.iter().filter(|peer| peer.state == "established").count() as u64),
            ("gw_bgp_peers", state.bgp.len() as u64),
        ] {
            all.push(Sample { name: name.to_owned(), labels: vec![], value, gauge: true });
        }
        for (name, value) in [
            ("gw_refused_hop_limit_packets", state.refused_hop_limit_packets),
            ("gw_bgp_ended_sessions", state.bgp.iter().map(|peer| peer.ended_sessions).sum()),
            ("gw_bfd_downs", state.bgp.iter().map(|peer| peer.bfd_downs).sum()),
        ] {
            all.push(Sample { name: name.to_owned(), labels: vec![], value, gauge: false });
        }
        all
    }

    fn command(&self, command: serde_json::Value) -> Result<serde_json::Value, api::ApiError> {
        let asked = serde_json::from_value(command).map_err(|error| api::ApiError::bad_request(error.to_string()))?;
        let now = monotonic_ns();
        match asked {
            api::PodCommand::Drain { drain } => {
                self.shared.drain(drain);
                Ok(serde_json::json!({}))
            }
            api::PodCommand::ExportSessions { since_s, from } => {
                let Export { bytes, sessions, next } = self.nat.export(now, since_s, from);
                let now_s = (now / 1_000_000_000) as u32;
                let sessions_text = api::TranslatedSessions::text(&bytes);
                answer(api::TranslatedSessions { sessions: sessions_text, count: sessions as u64, next, now_s })
            }
            api::PodCommand::ImportSessions { sessions } => {
                let bytes = api::TranslatedSessions::bytes(&sessions)?;
                let imported = self.nat.import(now, &bytes).map_err(|BadSessions| {
                    api::ApiError::bad_request("these are not sessions of a pod, or of a newer one").at("sessions")
                })?;
                let [taken, known, refused] =
                    [imported.taken, imported.known, imported.refused].map(|count| count as u64);
                answer(api::ImportedSessions { taken, known, refused })
            }
        }
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
