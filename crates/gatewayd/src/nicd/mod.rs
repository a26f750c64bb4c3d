//! `bifrost-nicd`: the NIC pipeline as a program.

mod config;
mod engine;
mod links;
mod snapshot;
mod transport;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result};
use bifrost_control::api::{
    ApiError, CaptureSpec, GatewayTraceSpec, Pipeline as Snapshot, PipelineCommand, SpreadMode, Trace, TraceVerdict,
};
use bifrost_control::server::CaptureStream;
use bifrost_nicpipe::{Explained, Mode, Pipeline, PipelineConfig, Place};
use bifrost_port::panics;
use bifrost_port::raw::RawDevice;
use bifrost_wire::Mac;

use crate::described;
use crate::file::FileErrors;
use crate::program::{self, Program};
use crate::status::{Sample, Source, StatusServer};
pub use config::{Config, PodSettings};
use engine::{Command, Engine, Request, Stages};
use links::Link;

/// How long a command may wait for the pipeline's thread.
const PATIENCE: Duration = Duration::from_secs(2);

/// A running pipeline.
#[derive(Debug)]
pub struct Nicd {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
    sockets: Vec<PathBuf>,
    _status: StatusServer,
}

impl Program for Nicd {
    type Config = Config;
    const NAME: &'static str = "bifrost-nicd";
    const CONFIG: &'static str = "/etc/bifrost/nicd.toml";

    fn load(path: &Path) -> Result<Config, FileErrors> {
        Config::load(path)
    }

    fn control(config: &Config) -> &Path {
        &config.control
    }

    /// Opens the device, listens for pods and starts the pipeline.
    fn start(config: Config) -> Result<Self> {
        let longest = config.longest();
        let mut pods = Vec::new();
        for settings in &config.pods {
            let mut pod = settings.pipeline.clone();
            // What tenants must not foretell, and what tells this pipeline's packets from an earlier one's.
            pod.limiter.seed = settings.limiter_seed.unwrap_or_else(|| fastrand::u64(..));
            pod.balancer.first_psn = fastrand::u32(..);
            if let Some(transport) = &mut pod.reliable {
                // Hosts tell by it that this is another run of the program.
                let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                (transport.instance, transport.salt) = (since.as_micros() as u64, fastrand::u32(..));
            }
            pods.push(pod);
        }
        let mut pipeline = Pipeline::new(PipelineConfig { pods, longest, seed: fastrand::u64(..) })?;
        for (pod, settings) in pipeline.pods_mut().iter_mut().zip(&config.pods) {
            for vni in &settings.bypass {
                pod.limiter_mut().bypass(*vni)?;
            }
            if settings.rss {
                pod.set_mode(0, Mode::Rss);
            }
        }
        let device = RawDevice::open(&config.device)?;
        tracing::info!(device = config.device.device, mode = device.mode(), "device open");
        let (events_to, events) = channel();
        let (commands_to, commands) = channel();
        let mut sockets = Vec::new();
        let mut all_links = Vec::new();
        for (pod, settings) in config.pods.iter().enumerate() {
            let rings = settings.pipeline.balancer.cores + 1;
            for (interface, path) in settings.sockets.iter().enumerate() {
                let place = Place { pod, interface };
                links::listen(place, &settings.pipeline.name, path.clone(), rings, events_to.clone())?;
                sockets.push(path.clone());
            }
            all_links.push(settings.sockets.iter().map(|_| Link::default()).collect());
        }
        let (state, stop) = (Arc::new(Mutex::new(Snapshot::default())), Arc::new(AtomicBool::new(false)));
        let known = |pod: &PodSettings| Known {
            name: pod.pipeline.name.clone(),
            own: pod.pipeline.rules.own.clone(),
            vlan: pod.pipeline.interfaces.first().copied().flatten(),
        };
        let pods = config.pods.iter().map(known).collect();
        let source = Arc::new(NicdSource { state: Arc::clone(&state), commands: Mutex::new(commands_to), pods });
        let status = StatusServer::start(&config.control, config.metrics, source)
            .with_context(|| format!("listening on {}", config.control.display()))?;
        let mut engine = Engine {
            device,
            pipeline,
            links: all_links,
            events,
            commands,
            state,
            stop: Arc::clone(&stop),
            spin_ns: config.spin_ns,
            turns: 0,
            sleeps: 0,
            stages: Stages::default(),
            transports_at: 0,
        };
        let work = move || {
            program::pin(config.processor);
            match panics::contain(|| engine.run()) {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::error!(%error, "the pipeline has ended"),
                Err(panic) => tracing::error!(%panic, "a panic in the pipeline"),
            }
            if !engine.stop.load(Ordering::Relaxed) {
                // The service manager starts it again; a pipeline that does nothing helps nobody.
                std::process::exit(1);
            }
        };
        let thread = std::thread::Builder::new().name("pipeline".to_owned()).spawn(work)?;
        Ok(Nicd { stop, thread, sockets, _status: status })
    }

    /// Ends the pipeline; pods see that it closes.
    fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.join();
        for path in &self.sockets {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// What the status server asks.
#[derive(Debug)]
struct NicdSource {
    state: Arc<Mutex<Snapshot>>,
    commands: Mutex<Sender<Request>>,
    pods: Vec<Known>,
}

/// What is known of a pod without asking the pipeline.
#[derive(Debug)]
struct Known {
    name: String,
    own: Vec<IpAddr>,
    /// Of its first interface.
    vlan: Option<u16>,
}

impl NicdSource {
    fn state(&self) -> Snapshot {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn pod(&self, name: &str) -> Result<usize, ApiError> {
        let found = self.pods.iter().position(|pod| pod.name == name);
        let unknown = || ApiError::not_found(format!("no pod {name:?}")).at("pod");
        let names = || self.pods.iter().map(|pod| pod.name.as_str()).collect::<Vec<_>>().join(", ");
        found.ok_or_else(|| unknown().hint(format!("there are: {}", names())))
    }

    /// Has the pipeline's thread do something.
    fn ask(&self, command: Command) -> Result<Vec<Explained>, ApiError> {
        let (answer_to, answer) = sync_channel(1);
        let commands = self.commands.lock().unwrap_or_else(PoisonError::into_inner);
        commands.send((command, answer_to)).map_err(|_| ApiError::unavailable("the pipeline has ended"))?;
        drop(commands);
        let answered = answer.recv_timeout(PATIENCE);
        answered.map_err(|_| ApiError::unavailable("the pipeline does not answer"))?.map_err(ApiError::conflict)
    }
}

impl Source for NicdSource {
    fn status(&self) -> serde_json::Value {
        serde_json::to_value(self.state()).unwrap_or_default()
    }

    fn samples(&self) -> Vec<Sample> {
        snapshot::samples(&self.state())
    }

    fn command(&self, command: serde_json::Value) -> Result<serde_json::Value, ApiError> {
        let asked = serde_json::from_value(command).map_err(|error| ApiError::bad_request(error.to_string()))?;
        let command = match asked {
            PipelineCommand::SetMode { pod, mode } => {
                let mode = if mode == SpreadMode::Plb { Mode::Plb } else { Mode::Rss };
                Command::SetMode { pod: self.pod(&pod)?, mode }
            }
            PipelineCommand::Bypass { vni, .. } if vni > 0xff_ffff => {
                return Err(ApiError::bad_request("a VNI has 24 bits").at("vni"));
            }
            PipelineCommand::Bypass { pod, vni, bypass } => Command::Bypass { pod: self.pod(&pod)?, vni, bypass },
        };
        self.ask(command)?;
        Ok(serde_json::json!({}))
    }

    fn capture(&self, _: &CaptureSpec) -> Result<Box<dyn CaptureStream>, ApiError> {
        Err(ApiError::bad_request("the pipeline captures nothing")
            .hint("capture at the pod: its socket is bifrost-gw's"))
    }

    fn trace(&self, spec: &GatewayTraceSpec) -> Result<Trace, ApiError> {
        let number = spec.pod.as_ref().map_or(Ok(0), |name| self.pod(name))?;
        let pod = self.pods.get(number).ok_or_else(|| ApiError::not_found("there is no pod").at("pod"))?;
        let mut frame = described::frame(spec, &pod.own, Mac([2, 0, 0, 0, 0, 2]))?;
        if let Some(vlan) = pod.vlan {
            let [a, b] = vlan.to_be_bytes();
            frame.splice(12..12, [0x81, 0, a, b]);
        }
        let steps = self.ask(Command::Trace { frame })?;
        let passes = steps.last().is_some_and(|step| step.passes);
        Ok(Trace {
            steps: steps.into_iter().map(|step| described::step(step.stage, step.passes, step.what)).collect(),
            verdict: if passes { TraceVerdict::Sent } else { TraceVerdict::Dropped },
            what: if passes { format!("it goes to pod {}", pod.name) } else { "the pipeline drops it".to_owned() },
            ..Trace::default()
        })
    }
}
