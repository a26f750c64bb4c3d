//! The stream with a relay: connect, follow, and connect again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bifrost_relay_api::limits::{KEEP_ALIVE_S, KEEP_ALIVE_TIMEOUT_S, LEARNING, MAX_MESSAGE, VERSIONS};
use bifrost_relay_api::pb::relay_client::RelayClient;
use bifrost_relay_api::tls::{Files, TlsError};
use bifrost_relay_api::{Change, FromAgent, Hello, Invalid, Report, ToAgent, Welcome, agree, pb};
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::{Instant, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::{Channel, Endpoint};

use crate::learn::{Heard, Learning};

/// What the relay may send ahead, bytes: a piece.
const WINDOW: u32 = 1 << 20;
/// How long a connection, the stream and its welcome each may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);
/// The pauses between connections, first and longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));
/// After an attempt that took this long, the next pause is the first again: attempts are rare enough. That may have been a good stream, or
/// a relay that has waited for its store.
const LONG: Duration = Duration::from_secs(5);

/// Whom to follow, and as whom.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Relays, such as `https://relay1:4790`: one is followed, and the next one when it goes away.
    pub relays: Vec<String>,
    /// The host's name.
    pub host: String,
    /// Certificates; none: no TLS.
    pub tls: Option<Files>,
    /// Another text with each start.
    pub instance: String,
}

/// What happens with the stream.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A relay has welcomed us.
    Connected {
        /// Its address.
        relay: String,
        /// Its program.
        software: String,
        /// Whether its store was restored from a backup, and has not come to the last revision that we had.
        is_restored: bool,
    },
    /// Part of what changes.
    Changes(Vec<Change>),
    /// All changes up to this revision were sent.
    InSync(u64),
    /// The stream is over, and why.
    Lost(String),
}

/// Why a stream ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Ended {
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("no connection: {}", chain(.0))]
    Connect(#[from] tonic::transport::Error),
    #[error("{}: {}", name(.0.code()), .0.message())]
    Status(Box<tonic::Status>),
    #[error("no answer within {} s", PATIENCE.as_secs())]
    Late,
    #[error("the relay ended the stream")]
    Closed,
    #[error("the relay breaks the protocol: {0}")]
    Invalid(#[from] Invalid),
    #[error("the relay breaks the protocol: {0} came {1}")]
    Order(&'static str, &'static str),
    #[error("what the relay sent is not taken over")]
    Refused,
    /// Nobody takes events any more.
    #[error("ended")]
    Done,
}

impl From<tonic::Status> for Ended {
    fn from(status: tonic::Status) -> Ended {
        Ended::Status(Box::new(status))
    }
}

/// Follows one relay after the other until `events` is closed. `known` has the last revision that was taken over. Each time `reports` changes,
/// the relay is told; `end` ends a stream. `learning` has questions for the relay, and takes its answers.
pub async fn follow(
    settings: Settings,
    known: Arc<AtomicU64>,
    events: mpsc::Sender<Event>,
    reports: watch::Receiver<Option<Report>>,
    end: Arc<Notify>,
    mut learning: Learning,
) {
    let mut pause = PAUSES.0;
    for relay in settings.relays.iter().cycle() {
        let started = Instant::now();
        let ended = tokio::select! {
            ended = stream(&settings, relay, &known, &events, reports.clone(), &mut learning) => ended,
            () = end.notified() => Err(Ended::Refused),
        };
        let ended = match ended {
            Err(Ended::Done) | Ok(()) => return,
            Err(ended) => format!("{relay}: {ended}"),
        };
        learning.can_learn(false);
        if events.send(Event::Lost(ended)).await.is_err() {
            return;
        }
        if started.elapsed() >= LONG {
            pause = PAUSES.0;
        }
        let is_over = events.closed();
        tokio::select! {
            () = is_over => return,
            () = tokio::time::sleep(pause.mul_f64(0.5 + 0.5 * fastrand::f64())) => {}
        }
        pause = (pause * 2).min(PAUSES.1);
    }
}

/// One stream, from the connection to its end.
async fn stream(
    settings: &Settings,
    relay: &str,
    known: &AtomicU64,
    events: &mpsc::Sender<Event>,
    mut reports: watch::Receiver<Option<Report>>,
    learning: &mut Learning,
) -> Result<(), Ended> {
    let channel = timeout(PATIENCE, connect(settings, relay)).await.map_err(|_| Ended::Late)??;
    let mut client = RelayClient::new(channel).max_decoding_message_size(MAX_MESSAGE);
    let (say, said) = mpsc::channel(2);
    let versions = VERSIONS;
    let software = format!("bifrost-agent {}", env!("CARGO_PKG_VERSION"));
    let (host, instance) = (settings.host.clone(), settings.instance.clone());
    let revision = known.load(Ordering::Relaxed);
    let hello = FromAgent::Hello(Hello { versions, host, instance, software, revision });
    say.send(hello.into()).await.map_err(|_| Ended::Closed)?;
    // What was in force before is of another stream.
    reports.borrow_and_update();
    let answers = async {
        let mut answers = client.follow(ReceiverStream::new(said)).await?.into_inner();
        let first = hear(&mut answers).await?;
        Ok::<_, Ended>((first, answers))
    };
    let (first, mut answers) = timeout(PATIENCE, answers).await.map_err(|_| Ended::Late)??;
    let ToAgent::Welcome(welcome) = first else { return Err(Ended::Order("another message", "before the welcome")) };
    let can_learn = agree((welcome.version, welcome.version))? >= LEARNING;
    learning.can_learn(can_learn);
    let Welcome { relay: software, restored: is_restored, .. } = welcome;
    tell(events, Event::Connected { relay: relay.to_owned(), software, is_restored }).await?;
    if can_learn {
        // The thread ends only with the other end.
        let _ = learning.heard.send(Heard::Connected).await;
    }
    loop {
        tokio::select! {
            message = hear(&mut answers) => match message? {
                ToAgent::Welcome(_) => return Err(Ended::Order("a welcome", "a second time")),
                ToAgent::Changes(changes) => tell(events, Event::Changes(changes)).await?,
                ToAgent::InSync(revision) => tell(events, Event::InSync(revision)).await?,
                ToAgent::Answers(_) if !can_learn => return Err(Ended::Order("answers", "in a version without them")),
                ToAgent::Answers(answers) => learning.answers(answers).await,
            },
            Some(questions) = learning.questions.recv() => {
                learning.asked(questions.len(), can_learn);
                if can_learn {
                    say.send(FromAgent::Resolve(questions).into()).await.map_err(|_| Ended::Closed)?;
                }
            }
            changed = reports.changed() => {
                changed.map_err(|_| Ended::Done)?;
                let report = reports.borrow_and_update().clone();
                if let Some(report) = report {
                    say.send(FromAgent::Report(report).into()).await.map_err(|_| Ended::Closed)?;
                }
            }
            () = events.closed() => return Err(Ended::Done),
        }
    }
}

pub(crate) async fn connect(settings: &Settings, relay: &str) -> Result<Channel, Ended> {
    let endpoint = Endpoint::from_shared(relay.to_owned())?
        .connect_timeout(PATIENCE)
        .tcp_nodelay(true)
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .http2_keep_alive_interval(Duration::from_secs(KEEP_ALIVE_S))
        .keep_alive_timeout(Duration::from_secs(KEEP_ALIVE_TIMEOUT_S))
        .keep_alive_while_idle(true);
    let endpoint = match &settings.tls {
        Some(files) => endpoint.tls_config(files.read()?.client(None))?,
        None => endpoint,
    };
    Ok(endpoint.connect().await?)
}

async fn hear(answers: &mut Streaming<pb::ToAgent>) -> Result<ToAgent, Ended> {
    let message = answers.message().await?.ok_or(Ended::Closed)?;
    Ok(message.try_into()?)
}

async fn tell(events: &mpsc::Sender<Event>, event: Event) -> Result<(), Ended> {
    events.send(event).await.map_err(|_| Ended::Done)
}

/// An error with its causes, which tonic keeps to itself.
pub(crate) fn chain(error: &tonic::transport::Error) -> String {
    let mut causes = vec![error.to_string()];
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        causes.push(cause.to_string());
        source = cause.source();
    }
    causes.dedup();
    causes.join(": ")
}

/// A code as gRPC's documents write it.
fn name(code: tonic::Code) -> String {
    let words = format!("{code:?}");
    let mut name = String::new();
    for (place, letter) in words.char_indices() {
        if letter.is_ascii_uppercase() && place > 0 {
            name.push('_');
        }
        name.push(letter.to_ascii_uppercase());
    }
    name
}
