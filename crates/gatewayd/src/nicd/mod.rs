//! `bifrost-nicd`: the NIC pipeline as a program.

mod config;
mod engine;
mod links;
mod registry;
mod snapshot;
mod transport;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, Result};
use bifrost_control::api::{
    ApiError, CaptureSpec, GatewayTraceSpec, Pipeline as Snapshot, PipelineCommand, SpreadMode, Trace, TraceVerdict,
};
use bifrost_control::server::CaptureStream;
use bifrost_nicpipe::{Mode, Pipeline, PipelineConfig};
use bifrost_port::clock::monotonic_ns;
use bifrost_port::panics;
use bifrost_port::raw::RawDevice;
use bifrost_wire::Mac;

use crate::described;
use crate::file::FileErrors;
use crate::program::{self, Program};
use crate::status::{Sample, Source, StatusServer};
pub use config::{Config, PodSettings};
use engine::{Answer, Command, Engine, Request, Stages};
use links::Link;

/// How long a command may wait for the pipeline's thread.
const PATIENCE: Duration = Duration::from_secs(2);

/// A running pipeline.
#[derive(Debug)]
pub struct Nicd {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
    pods: Arc<Mutex<registry::Pods>>,
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
        let pipeline = PipelineConfig { pods: Vec::new(), longest, seed: fastrand::u64(..) };
        let mut pipeline = Pipeline::new(pipeline)?;
        let (events_to, events) = channel();
        let (commands_to, commands) = channel();
        let mut known = registry::Pods::new(config.pods_directory.clone(), longest, events_to);
        known.start(&config.pods, &mut pipeline)?;
        let device = RawDevice::open(&config.device)?;
        tracing::info!(device = config.device.device, mode = device.mode(), "device open");
        let (state, stop) = (Arc::new(Mutex::new(Snapshot::default())), Arc::new(AtomicBool::new(false)));
        let ids = known.ids();
        let links = pipeline.pods().iter().map(|pod| (0..pod.interfaces()).map(|_| Link::default()).collect());
        let links = links.collect();
        let pods = Arc::new(Mutex::new(known));
        let source = Arc::new(NicdSource { state: Arc::clone(&state), commands: commands_to, pods: Arc::clone(&pods) });
        let mut engine = Engine {
            device,
            pipeline,
            links,
            ids,
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
        // The first answer already lists the configured pods.
        engine.report(monotonic_ns());
        let status = StatusServer::start(&config.control, config.metrics, source)
            .with_context(|| format!("listening on {}", config.control.display()))?;
        let work = move || {
            program::pin(config.processor);
            match panics::contain(|| engine.run()) {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::error!(%error, "the pipeline has ended"),
                Err(panic) => tracing::error!(%panic, "a panic in the pipeline"),
            }
            if !engine.stop.load(Ordering::Relaxed) {
                // The service manager restarts it. A pipeline that does nothing is useless.
                std::process::exit(1);
            }
        };
        let thread = std::thread::Builder::new().name("pipeline".to_owned()).spawn(work)?;
        Ok(Nicd { stop, thread, pods, _status: status })
    }

    /// Stops the pipeline. Pods notice that it closes.
    fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.join();
        self.pods.lock().unwrap_or_else(PoisonError::into_inner).stop();
    }
}

/// The source of the status server's answers.
#[derive(Debug)]
struct NicdSource {
    state: Arc<Mutex<Snapshot>>,
    commands: Sender<Request>,
    /// Locked during a command: there is only one at a time.
    pods: Arc<Mutex<registry::Pods>>,
}

impl NicdSource {
    fn state(&self) -> Snapshot {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn pods(&self) -> MutexGuard<'_, registry::Pods> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a command to the pipeline's thread and waits for the answer.
    fn ask(&self, command: Command) -> Result<Answer, ApiError> {
        let (answer_to, answer) = sync_channel(1);
        self.commands.send((command, answer_to)).map_err(|_| ApiError::unavailable("the pipeline has ended"))?;
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
        let mut pods = self.pods();
        let command = match asked {
            PipelineCommand::SetMode { pod, mode } => {
                let mode = if mode == SpreadMode::Plb { Mode::Plb } else { Mode::Rss };
                Command::SetMode { pod: pods.find(&pod)?, mode }
            }
            PipelineCommand::AddPod { settings } => {
                pods.add(&settings, |command| self.ask(command))?;
                return Ok(serde_json::json!({}));
            }
            PipelineCommand::RemovePod { pod } => {
                pods.remove(&pod, |command| self.ask(command))?;
                return Ok(serde_json::json!({}));
            }
            PipelineCommand::Bypass { vni, .. } if vni > 0xff_ffff => {
                return Err(ApiError::bad_request("a VNI has 24 bits").at("vni"));
            }
            PipelineCommand::Bypass { pod, vni, bypass } => Command::Bypass { pod: pods.find(&pod)?, vni, bypass },
        };
        self.ask(command)?;
        Ok(serde_json::json!({}))
    }

    fn capture(&self, _: &CaptureSpec) -> Result<Box<dyn CaptureStream>, ApiError> {
        Err(ApiError::bad_request("the pipeline captures nothing")
            .hint("capture at the pod: its socket is bifrost-gw's"))
    }

    fn trace(&self, spec: &GatewayTraceSpec) -> Result<Trace, ApiError> {
        let pods = self.pods();
        let number = spec.pod.as_ref().map_or_else(|| pods.first(), |name| pods.find(name))?;
        let pod = pods.get(number).ok_or_else(|| ApiError::not_found("there is no pod").at("pod"))?;
        let mut frame = described::frame(spec, &pod.own, pod.mac.unwrap_or(Mac([2, 0, 0, 0, 0, 2])))?;
        if let Some(vlan) = pod.vlan {
            let [a, b] = vlan.to_be_bytes();
            frame.splice(12..12, [0x81, 0, a, b]);
        }
        let Answer::Traced(steps) = self.ask(Command::Trace { frame })? else {
            return Err(ApiError::internal("the pipeline has answered something else"));
        };
        let passes = steps.last().is_some_and(|step| step.passes);
        Ok(Trace {
            steps: steps.into_iter().map(|step| described::step(step.stage, step.passes, step.what)).collect(),
            verdict: if passes { TraceVerdict::Sent } else { TraceVerdict::Dropped },
            what: if passes { format!("it goes to pod {}", pod.name) } else { "the pipeline drops it".to_owned() },
            ..Trace::default()
        })
    }
}
