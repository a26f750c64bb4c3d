//! `bifrost-gw`: a gateway pod as a program.

mod announcer;
mod config;
mod control;
mod health;
mod life;
mod links;
mod mailbox;
mod neighbours;
mod tunnels;
mod worker;

use std::path::Path;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use bifrost_control::api;
use bifrost_control::server::CaptureStream;
use bifrost_gateway::{Ahead, BadSessions, Context, Core, Export, HEADROOM, Nat, Packet, Tables, Verdict};
use bifrost_plb::TRAILER_LEN;
use bifrost_port::clock::monotonic_ns;
use bifrost_port::memif::ClientConfig;

use crate::capture::Captures;
use crate::described;
use crate::file::FileErrors;
use crate::program::Program;
use crate::status::{Sample, Source, StatusServer};
pub use announcer::BgpSettings;
pub use config::{Config, LinkSettings};
use control::{Control, OfLink, SharedTold};
use health::Health;
use life::{Interface, Life, Shared};
use links::Links;
use mailbox::Mailbox;
pub use neighbours::Neighbours;
use tunnels::Tunnels;
use worker::{Counts, Worker};

/// Length of Ethernet with two VLAN tags, and of what is appended to a packet, bytes.
const SLACK: usize = 22 + TRAILER_LEN;
/// Room for an answer to a described packet, bytes.
const ANSWER: usize = 2048;
/// How long the control thread sleeps at most. It then checks whether the pod should end.
const WAIT: Duration = Duration::from_millis(50);
/// The same if workers pass control packets to it, because they do not wake it.
const SHORT_WAIT: Duration = Duration::from_millis(2);

/// How long a pod that ends waits until its routes are withdrawn.
const LEAVE: Duration = Duration::from_millis(500);
/// How long it keeps forwarding after that.
const LINGER: Duration = Duration::from_millis(300);

/// A running pod.
#[derive(Debug)]
pub struct GatewayPod {
    shared: Arc<Shared>,
    life: JoinHandle<()>,
    told: SharedTold,
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
        let mut interfaces = Vec::new();
        for (link, settings) in config.links.iter().enumerate() {
            interfaces.extend(settings.sockets.iter().map(|path| Interface {
                link,
                client: ClientConfig {
                    path: path.clone(),
                    name: "bifrost-gw".to_owned(),
                    id: 0,
                    queues: config.cores + 1,
                    log2_entries: config.log2_ring_entries,
                    headroom: bifrost_gateway::HEADROOM,
                    longest: usize::from(config.tables.mtu) + SLACK + 128,
                },
            }));
        }
        let shared = Arc::new(Shared::new(interfaces.len()));
        shared.drain(config.drained);
        let links = Arc::new(Links::new(config.links.iter().map(|link| link.pipeline)));
        let tables = Arc::new(config.tables);
        let nat = Arc::new(Nat::new(config.nat));
        let (missing_to, missing) = sync_channel(64);
        let (mut counts, mut workers): (Vec<Counts>, Vec<_>) = Default::default();
        let mut captures = Captures::default();
        let (control_to, from_workers) = sync_channel(64);
        let mailbox = || Mailbox::new().map(Arc::new).context("creating an event");
        for number in 0..usize::from(config.cores) {
            let of_worker = Counts::default();
            counts.push(Arc::clone(&of_worker));
            let worker = Worker {
                core: Core::new(Arc::clone(&tables), Arc::clone(&nat), config.cores, fastrand::u64(..)),
                ahead: Ahead::default(),
                queues: Vec::new(),
                mailbox: mailbox()?,
                links: Arc::clone(&links),
                missing: missing_to.clone(),
                counts: of_worker,
                told: worker::Told::default(),
                shared: Arc::clone(&shared),
                pod: config.pod,
                spin_ns: config.spin_ns,
                tests: config.tests.of_worker(number),
                tap: captures.tap(&format!("worker-{number}")),
                control: config.tests.control_with_data.then(|| control_to.clone()),
            };
            workers.push((worker, config.processors.get(number).copied()));
        }
        let watched = config.links.len() > 1;
        let of_links =
            config.links.into_iter().map(|link| OfLink::new(link, tables.mac, &tables.vteps, watched)).collect();
        let told = SharedTold::default();
        let mut control = Control {
            queues: Vec::new(),
            mailbox: mailbox()?,
            of_links,
            links: Arc::clone(&links),
            next_hops: config.resolve.into_iter().collect(),
            health: Health::new(counts.clone()),
            tunnels: Tunnels::new(Arc::clone(&tables), config.tunnels.clone()),
            missing,
            from_workers,
            wait: if config.tests.control_with_data { SHORT_WAIT } else { WAIT },
            told: Arc::clone(&told),
            shared: Arc::clone(&shared),
            pod: config.pod,
            tap: captures.tap("control"),
        };
        control.want_next_hops();
        let life = Life { shared: Arc::clone(&shared), links: Arc::clone(&links), interfaces, workers, control };
        let connected = life.begin()?;
        let of_status = Arc::clone(&shared);
        let source = Arc::new(PodSource {
            shared: of_status,
            counts,
            tables,
            tunnels: config.tunnels,
            nat,
            links,
            told: Arc::clone(&told),
            captures,
        });
        let status = StatusServer::start(&config.control, config.metrics, source)
            .with_context(|| format!("listening on {}", config.control.display()))?;
        let live = move || {
            if let Err(error) = life.run(connected) {
                tracing::error!(%error, "the pod has ended");
                std::process::exit(1);
            }
        };
        let life = thread::Builder::new().name("pod".to_owned()).spawn(live).context("starting a thread")?;
        Ok(GatewayPod { shared, life, told, _status: status })
    }

    /// Withdraws its announcements, returns the packets in process, and ends.
    fn stop(self) {
        let told = || self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if told().announces() {
            self.shared.leave();
            let until = Instant::now() + LEAVE;
            while Instant::now() < until && told().announces() {
                thread::sleep(Duration::from_millis(10));
            }
            // Switches need a moment to stop sending packets here.
            thread::sleep(LINGER);
        }
        self.shared.stop();
        let _ = self.life.join();
    }
}

/// The answer to a command.
fn answer(value: impl serde::Serialize) -> Result<serde_json::Value, api::ApiError> {
    serde_json::to_value(value).map_err(|error| api::ApiError::internal(error.to_string()))
}

/// The source of the status server's answers.
#[derive(Debug)]
struct PodSource {
    shared: Arc<Shared>,
    counts: Vec<Counts>,
    tables: Arc<Tables>,
    tunnels: Vec<String>,
    nat: Arc<Nat>,
    links: Arc<Links>,
    told: SharedTold,
    captures: Captures,
}

impl PodSource {
    fn state(&self) -> api::GatewayPod {
        let workers = self.counts.iter().map(|counts| counts.lock().unwrap_or_else(PoisonError::into_inner).clone());
        let told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        api::GatewayPod {
            connected: self.shared.is_connected(),
            draining: self.shared.is_draining(),
            announcing: told.announcing,
            bgp: told.peers.clone(),
            links: told.links.clone(),
            refused_hop_limit_packets: told.refused_hop_limit_packets,
            workers: workers.collect(),
            nat_sessions: self.nat.len() as u64,
            neighbours: told.next_hops.iter().map(|(address, mac)| (address.to_string(), mac.clone())).collect(),
            tunnels: tunnels::states(&self.tables, &self.tunnels, monotonic_ns()),
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
        all.extend(tunnels::samples(&state.tunnels));
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
            ("gw_links", state.links.len() as u64),
            ("gw_up_links", state.links.iter().filter(|link| link.state == "up").count() as u64),
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
        // As if the packet had arrived by the first link.
        let known = self.links.known();
        let neighbours = known.get(self.links.egress(0)).ok_or_else(|| api::ApiError::internal("no links"))?;
        let context = Context { now: monotonic_ns(), neighbours };
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
