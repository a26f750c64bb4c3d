//! Traces of changes: OpenTelemetry spans of the relay that commits a change, of relays that pass it on, and of agents that
//! apply it (docs/FLEET.md, section 7).
//!
//! A trace belongs to a revision of the store. Its numbers are computed from the revision, so all programs agree about
//! them, and about which changes are traced, without a word on the wire.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_client::TraceServiceClient;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span as WireSpan, Status, span::SpanKind};
use ring::digest::{SHA256, digest};
use tokio::sync::mpsc;
use tonic::transport::{Channel, Endpoint};

/// The longest name of a fleet, bytes.
pub const MAX_FLEET: usize = 64;
/// Spans that may wait for the collector. More are dropped, and counted.
const WAITING: usize = 2048;
/// Spans of one message.
const TOGETHER: usize = 512;
/// How long the first span of a message waits for others.
const GATHER: Duration = Duration::from_millis(500);
/// How long a collector may take for a message.
const PATIENCE: Duration = Duration::from_secs(5);

/// Where traces go, and which changes have one.
#[derive(clap::Args, Clone, Debug, PartialEq)]
pub struct Settings {
    /// An OpenTelemetry collector on this host that gets traces of changes (OTLP over gRPC), such as
    /// http://127.0.0.1:4317.
    #[arg(long = "traces", value_name = "URL", env = "BIFROST_TRACES")]
    pub collector: Option<String>,
    /// The fleet's name in traces: the same on all its relays and hosts, and another one for each fleet.
    #[arg(long = "traces-fleet", value_name = "NAME", env = "BIFROST_TRACES_FLEET", default_value = "bifrost")]
    pub fleet: String,
    /// The share of changes that are traced, 0 to 1; the same on all relays and hosts.
    #[arg(long = "traces-ratio", value_name = "SHARE", env = "BIFROST_TRACES_RATIO", default_value_t = 1.0)]
    pub ratio: f64,
}

/// The trace of one change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trace {
    /// Its number.
    pub id: [u8; 16],
    /// The number of the span that all others are below.
    pub root: [u8; 8],
}

impl Trace {
    /// The trace of a revision (7.2).
    pub fn of(fleet: &str, revision: u64) -> Trace {
        let text = [b"bifrost change ", fleet.as_bytes(), b" ", &revision.to_be_bytes()].concat();
        let hash = digest(&SHA256, &text);
        let mut trace = Trace { id: [0; 16], root: [0; 8] };
        let (id, rest) = hash.as_ref().split_at(16);
        trace.id.copy_from_slice(id);
        trace.root.copy_from_slice(&rest[..8]);
        trace
    }

    /// Whether it is among this share of all traces (7.3).
    pub fn is_among(&self, ratio: f64) -> bool {
        let [.., a, b, c, d, e, f, g] = self.id;
        let number = u64::from_be_bytes([0, a, b, c, d, e, f, g]);
        // A share of 1 is all of them.
        (number as f64) < ratio * (1u64 << 56) as f64
    }
}

/// Part of what was done for a change.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// What was done.
    pub name: &'static str,
    /// When it began.
    pub start: SystemTime,
    /// When it ended.
    pub end: SystemTime,
    /// More about it.
    pub attributes: Vec<(&'static str, Attribute)>,
    /// Why it failed, if it did.
    pub error: Option<String>,
}

/// The value of an attribute.
#[derive(Clone, Debug, PartialEq)]
pub enum Attribute {
    /// A number.
    Number(u64),
    /// A text.
    Text(String),
}

/// Sends spans to a collector, in a task of its own. Without a collector, spans are dropped, and nothing else waits.
#[derive(Clone, Debug)]
pub struct Traces {
    settings: Settings,
    waiting: mpsc::Sender<WireSpan>,
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    sent: AtomicU64,
    dropped: AtomicU64,
}

impl Traces {
    /// Starts the task, if there is a collector. `service` and `instance` say which program sends.
    ///
    /// # Errors
    /// The settings are invalid; the text says which one, and what to do.
    pub fn start(settings: Settings, service: &'static str, instance: String) -> Result<Option<Traces>, String> {
        let Settings { collector: Some(collector), fleet, ratio } = &settings else { return Ok(None) };
        if fleet.len() > MAX_FLEET {
            return Err(format!("--traces-fleet: the name has {} bytes; the most are {MAX_FLEET}", fleet.len()));
        }
        if !(0.0..=1.0).contains(ratio) {
            return Err(format!("--traces-ratio is {ratio}; it must be from 0 to 1"));
        }
        if !collector.starts_with("http://") {
            let what = "is not an address such as http://127.0.0.1:4317";
            return Err(format!(
                "--traces {collector:?} {what}; for TLS, have a collector on this host forward traces"
            ));
        }
        let endpoint = Endpoint::from_shared(collector.clone()).map_err(|e| format!("--traces {collector:?}: {e}"))?;
        let channel = endpoint.connect_timeout(PATIENCE).timeout(PATIENCE).connect_lazy();
        let (waiting, spans) = mpsc::channel(WAITING);
        let counts = Arc::new(Counts::default());
        let resource = Resource {
            attributes: vec![
                text("service.namespace", fleet.clone()),
                text("service.name", service.to_owned()),
                text("service.version", env!("CARGO_PKG_VERSION").to_owned()),
                text("service.instance.id", instance),
            ],
            ..Resource::default()
        };
        tokio::spawn(send(channel, resource, spans, Arc::clone(&counts)));
        Ok(Some(Traces { settings, waiting, counts }))
    }

    /// The trace of a change, unless it is not traced.
    pub fn of(&self, revision: u64) -> Option<Trace> {
        let trace = Trace::of(&self.settings.fleet, revision);
        trace.is_among(self.settings.ratio).then_some(trace)
    }

    /// Sends the span that all others of its trace are below. Only the relay that commits the change has it.
    pub fn root(&self, trace: Trace, span: Span) {
        self.add(trace, trace.root, &[], SpanKind::Server, span);
    }

    /// Sends a span of a trace. `random` is its number, and not 0.
    pub fn child(&self, trace: Trace, random: u64, span: Span) {
        self.add(trace, random.max(1).to_be_bytes(), &trace.root, SpanKind::Internal, span);
    }

    /// Sends a span of a request to another program, below the child with the number `parent`.
    pub fn request(&self, trace: Trace, parent: u64, random: u64, span: Span) {
        self.add(trace, random.max(1).to_be_bytes(), &parent.max(1).to_be_bytes(), SpanKind::Client, span);
    }

    fn add(&self, trace: Trace, id: [u8; 8], parent: &[u8], kind: SpanKind, span: Span) {
        let status = span.error.map(|message| Status { message, code: StatusCode::Error.into() });
        let attributes = span.attributes.into_iter().map(|(key, value)| match value {
            Attribute::Number(number) => attribute(key, Value::IntValue(i64::try_from(number).unwrap_or(i64::MAX))),
            Attribute::Text(value) => text(key, value),
        });
        let span = WireSpan {
            trace_id: trace.id.to_vec(),
            span_id: id.to_vec(),
            parent_span_id: parent.to_vec(),
            name: span.name.to_owned(),
            kind: kind.into(),
            start_time_unix_nano: nanoseconds(span.start),
            end_time_unix_nano: nanoseconds(span.end.max(span.start)),
            attributes: attributes.collect(),
            status,
            ..WireSpan::default()
        };
        if self.waiting.try_send(span).is_err() {
            self.counts.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Spans that the collector has taken, and spans that were dropped because too many waited or it did not take them.
    pub fn counts(&self) -> (u64, u64) {
        (self.counts.sent.load(Ordering::Relaxed), self.counts.dropped.load(Ordering::Relaxed))
    }
}

/// Sends what waits, until nobody can add more.
async fn send(channel: Channel, resource: Resource, mut waiting: mpsc::Receiver<WireSpan>, counts: Arc<Counts>) {
    let mut client = TraceServiceClient::new(channel);
    let scope = InstrumentationScope { name: "bifrost".to_owned(), ..InstrumentationScope::default() };
    let mut spans = Vec::with_capacity(TOGETHER);
    while waiting.recv_many(&mut spans, TOGETHER).await > 0 {
        if spans.len() < TOGETHER {
            tokio::time::sleep(GATHER).await;
            while spans.len() < TOGETHER
                && let Ok(span) = waiting.try_recv()
            {
                spans.push(span);
            }
        }
        let count = spans.len() as u64;
        let scoped =
            ScopeSpans { scope: Some(scope.clone()), spans: std::mem::take(&mut spans), ..ScopeSpans::default() };
        let all =
            ResourceSpans { resource: Some(resource.clone()), scope_spans: vec![scoped], ..ResourceSpans::default() };
        let taken = client.export(ExportTraceServiceRequest { resource_spans: vec![all] }).await;
        let refused = match taken {
            Ok(answer) => answer.into_inner().partial_success.map_or(0, |partial| partial.rejected_spans.max(0) as u64),
            Err(_) => count,
        };
        counts.sent.fetch_add(count.saturating_sub(refused), Ordering::Relaxed);
        counts.dropped.fetch_add(refused.min(count), Ordering::Relaxed);
    }
}

fn attribute(key: &str, value: Value) -> KeyValue {
    KeyValue { key: key.to_owned(), value: Some(AnyValue { value: Some(value) }), ..KeyValue::default() }
}

fn text(key: &str, value: String) -> KeyValue {
    attribute(key, Value::StringValue(value))
}

fn nanoseconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_that_of_the_specification() {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let trace = Trace::of("production", 4711);
        assert_eq!(hex(&trace.id), "fcc58f6972fbafef89d6ffec3f98b020");
        assert_eq!(hex(&trace.root), "0c272af1b7cf75f9");
    }

    #[test]
    fn the_share_of_traced_changes_is_the_one_asked_for() {
        for ratio in [0.0, 0.01, 0.25, 1.0] {
            let traced = (0..10_000).filter(|&revision| Trace::of("f", revision).is_among(ratio)).count() as f64;
            assert!(
                (traced - 10_000.0 * ratio).abs() <= 130.0 * f64::from(u8::from(ratio > 0.0 && ratio < 1.0)),
                "{ratio}: {traced}"
            );
        }
        // A change that is among few is among more.
        let few = (0..1000).filter(|&revision| Trace::of("f", revision).is_among(0.1));
        assert!(few.clone().all(|revision| Trace::of("f", revision).is_among(0.3)) && few.count() > 50);
    }

    #[tokio::test]
    async fn settings_that_cannot_be_are_refused() {
        let start = |collector: &str, fleet: &str, ratio| {
            let settings = Settings { collector: Some(collector.to_owned()), fleet: fleet.to_owned(), ratio };
            Traces::start(settings, "test", String::new()).map(drop)
        };
        assert_eq!(start("http://127.0.0.1:4317", "f", 1.0), Ok(()));
        for (collector, fleet, ratio, why) in [
            ("https://a:4317", "f", 1.0, "TLS"),
            ("127.0.0.1:4317", "f", 1.0, "http://"),
            ("http://", "f", 1.0, "invalid"),
            ("http://a:1", &"f".repeat(65), 1.0, "64"),
            ("http://a:1", "f", 1.1, "0 to 1"),
            ("http://a:1", "f", f64::NAN, "0 to 1"),
        ] {
            let error = start(collector, fleet, ratio).unwrap_err();
            assert!(error.contains(why), "{collector} {ratio}: {error}");
        }
    }

    #[tokio::test]
    async fn without_a_collector_spans_are_dropped_and_counted() {
        let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let settings = Settings { collector: Some(format!("http://{nobody}")), fleet: "f".to_owned(), ratio: 1.0 };
        let traces = Traces::start(settings, "test", String::new()).unwrap().unwrap();
        let now = SystemTime::now();
        let span = Span { name: "x", start: now, end: now, attributes: Vec::new(), error: None };
        for number in 0..WAITING as u64 + 100 {
            traces.child(traces.of(1).unwrap(), number, span.clone());
        }
        assert!(traces.counts().1 >= 100, "no more than {WAITING} wait");
        let all = async {
            while traces.counts() != (0, WAITING as u64 + 100) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), all).await.unwrap();
    }
}
