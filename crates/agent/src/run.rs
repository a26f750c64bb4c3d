//! The agent at work: clocks, the stream, `bifrostd` and metrics around [`Core`].

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bifrost_control::client::ClientError;
use bifrost_relay_api::traces::Traces;
use bifrost_relay_api::{PathHealth, Report};
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinHandle;

use crate::desired::Refused;
use crate::follow::{self, Event, follow};
use crate::health;
use crate::learn::Learning;
use crate::metrics::Metrics;
use crate::plan::Limits;
use crate::state::{Answer, Ask, Core, Next};
use crate::switch::{Switch, SwitchError};
use crate::traced::Traced;

/// Messages of the relay that wait to be taken over. What waits longer stays with the relay.
const EVENTS: usize = 4;
/// The most lines that the log gets at a time.
const MAX_NOTES: usize = 20;

/// What an agent needs.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Whom to follow.
    pub follow: follow::Settings,
    /// `bifrostd`'s socket.
    pub socket: PathBuf,
    /// Where traces of changes go, if anywhere.
    pub traces: Option<Traces>,
}

/// A question that is being answered.
type Asked = Option<JoinHandle<Result<Answer, ClientError>>>;

/// Runs until `stop` says so. What is in force stays.
///
/// # Errors
/// `bifrostd` cannot be asked at all, even later.
pub async fn run(settings: Settings, metrics: Arc<Metrics>, stop: impl Future<Output = ()>) -> Result<(), SwitchError> {
    let switch = Switch::new(&settings.socket)?;
    let (events, mut happened) = mpsc::channel(EVENTS);
    let (reports, to_report) = watch::channel(None);
    let end_stream = Arc::new(Notify::new());
    let known = Arc::new(AtomicU64::new(0));
    let learning = Learning::start(&settings.socket, Arc::clone(&metrics))?;
    let streams = follow(settings.follow, Arc::clone(&known), events, to_report, Arc::clone(&end_stream), learning);
    let following = tokio::spawn(streams);
    let (health, mut healths) = watch::channel(PathHealth::default());
    let looking = tokio::spawn(health::watch(settings.socket.clone(), health));
    let started = Instant::now();
    let mut core = Core::new(Limits::default(), fastrand::f64);
    let mut asked: Asked = None;
    let mut traced = Traced::new(settings.traces);
    tokio::pin!(stop);
    loop {
        let until = match core.next(started.elapsed()) {
            Next::Wait(until) => until,
            Next::Ask(question) => {
                if let Ask::Apply(spec) = &question {
                    traced.asked(spec.items.len(), SystemTime::now());
                }
                let switch = switch.clone();
                asked = Some(tokio::spawn(async move { switch.ask(question).await }));
                continue;
            }
        };
        tell(&mut core, &mut traced, &metrics, &reports);
        tokio::select! {
            () = &mut stop => break,
            event = happened.recv() => {
                let Some(event) = event else { break };
                if let Err(error) = on_event(&mut core, &mut traced, &metrics, &known, event, started.elapsed()) {
                    tracing::error!(%error, "the stream is ended; what is in force stays");
                    core.lost();
                    end_stream.notify_one();
                }
            }
            answer = answer(&mut asked) => {
                asked = None;
                traced.answered(answer.as_ref().err().map(ToString::to_string), SystemTime::now());
                let now_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64);
                core.answer(answer, started.elapsed(), now_ms);
            }
            Ok(()) = healths.changed() => core.paths(healths.borrow_and_update().clone()),
            () = tokio::time::sleep_until((started + until).into()), if asked.is_none() => {}
        }
    }
    following.abort();
    looking.abort();
    Ok(())
}

/// Waits for an answer; forever, if nothing was asked.
async fn answer(asked: &mut Asked) -> Result<Answer, ClientError> {
    match asked {
        Some(asked) => asked.await.unwrap_or_else(|e| Err(ClientError::Protocol(e.to_string()))),
        None => std::future::pending().await,
    }
}

fn on_event(
    core: &mut Core,
    traced: &mut Traced,
    metrics: &Metrics,
    known: &AtomicU64,
    event: Event,
    now: Duration,
) -> Result<(), Refused> {
    match event {
        Event::Connected { relay, software, is_restored } => {
            tracing::info!(relay, software, "following a relay");
            if is_restored {
                tracing::warn!("its store was restored from a backup: an earlier state is brought into force");
            }
            core.connected(is_restored);
        }
        Event::Changes(changes) => core.changes(changes)?,
        Event::InSync(revision) => {
            let is_first = !core.desired().is_in_sync();
            core.in_sync(revision, now)?;
            known.store(revision, Ordering::Relaxed);
            if !is_first {
                traced.came(revision, SystemTime::now());
            } else {
                tracing::info!(revision, objects = core.desired().count(), "the relay has sent everything");
            }
        }
        Event::Lost(why) => {
            tracing::warn!("{why}; what is in force stays, and another connection is tried");
            metrics.lost();
            core.lost();
            traced.lost();
        }
    }
    Ok(())
}

/// Tells the relay, people and Prometheus.
fn tell(core: &mut Core, traced: &mut Traced, metrics: &Metrics, reports: &watch::Sender<Option<Report>>) {
    let observed = core.take_observed();
    for note in observed.notes.iter().take(MAX_NOTES) {
        tracing::warn!("{note}");
    }
    if observed.notes.len() > MAX_NOTES {
        tracing::warn!("and {} more", observed.notes.len() - MAX_NOTES);
    }
    if observed.applied > 0 {
        tracing::debug!(objects = observed.applied, "in force");
    }
    metrics.update(core, &observed);
    metrics.spans(traced.counts());
    if let Some(report) = core.take_report() {
        traced.in_force(&report, SystemTime::now());
        reports.send_replace(Some(report));
    }
}
