//! What the agent counts, for Prometheus.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::SystemTime;

use bifrost_control::server::metrics::Source;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::state::{Core, Observed};

/// Upper bounds of the buckets of `propagation_seconds`.
const BUCKETS: [f64; 14] = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0];

/// A number of the last moment.
type Number = Gauge<u64, AtomicU64>;

/// Counters and gauges.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    in_sync: Number,
    bifrostd_up: Number,
    revision: Number,
    objects: Number,
    problems: Number,
    propagation: Histogram,
    applied: Counter,
    refused: Counter,
    drift: Counter,
    reconnects: Counter,
    learning: Number,
    questions: Counter,
    unasked: Counter,
    answers: Counter,
    certificate_until: Number,
    certificate_renewals: Counter,
    certificate_failures: Counter,
    spans_sent: Counter,
    spans_dropped: Counter,
}

impl Default for Metrics {
    fn default() -> Metrics {
        let mut registry = Registry::with_prefix("bifrost_agent");
        let metrics = Metrics {
            in_sync: Number::default(),
            bifrostd_up: Number::default(),
            revision: Number::default(),
            objects: Number::default(),
            problems: Number::default(),
            propagation: Histogram::new(BUCKETS),
            applied: Counter::default(),
            refused: Counter::default(),
            drift: Counter::default(),
            reconnects: Counter::default(),
            learning: Number::default(),
            questions: Counter::default(),
            unasked: Counter::default(),
            answers: Counter::default(),
            certificate_until: Number::default(),
            certificate_renewals: Counter::default(),
            certificate_failures: Counter::default(),
            spans_sent: Counter::default(),
            spans_dropped: Counter::default(),
            registry: Registry::default(),
        };
        let m = &metrics;
        let help = "1: a relay has sent everything, and everything that can be is in force";
        registry.register("in_sync", help, m.in_sync.clone());
        registry.register("bifrostd_up", "1: bifrostd answers", m.bifrostd_up.clone());
        registry.register("revision", "Up to which revision the relay has sent changes", m.revision.clone());
        registry.register("objects", "Objects of the fleet that bifrostd has", m.objects.clone());
        registry.register("problems", "Objects that are not as they are to be; the log says why", m.problems.clone());
        let help = "From the commit of intent until it is in force here";
        registry.register_with_unit("propagation", help, Unit::Seconds, m.propagation.clone());
        registry.register("applied_objects", "Objects that were set or deleted", m.applied.clone());
        registry.register("refused_batches", "Batches that bifrostd refused", m.refused.clone());
        registry.register(
            "drift_objects",
            "Objects that somebody else had changed, and that were repaired",
            m.drift.clone(),
        );
        registry.register(
            "reconnects",
            "Streams with relays that were lost, or could not be made",
            m.reconnects.clone(),
        );
        let help = "1: the relay that is followed answers questions about routes that are learned";
        registry.register("learning", help, m.learning.clone());
        registry.register("questions", "Questions about routes that the relay was asked", m.questions.clone());
        let help = "Questions about routes that no relay was asked: none is followed, it is too old, or it is too slow";
        registry.register("unasked_questions", help, m.unasked.clone());
        registry.register("answers", "Answers and corrections about routes that a relay gave", m.answers.clone());
        let help = "When the certificate that the agent renews expires, seconds since 1970; 0: it renews none";
        registry.register("certificate_expires_at", help, m.certificate_until.clone());
        registry.register(
            "certificate_renewals",
            "Further certificates that the agent got",
            m.certificate_renewals.clone(),
        );
        let help = "Attempts to get a further certificate that failed; the log says why";
        registry.register("certificate_failures", help, m.certificate_failures.clone());
        let help = "Spans of traces that the collector has taken. See --traces";
        registry.register("spans_sent", help, m.spans_sent.clone());
        let help = "Spans that the collector did not take, or that came too fast for it";
        registry.register("spans_dropped", help, m.spans_dropped.clone());
        Metrics { registry, ..metrics }
    }
}

impl Metrics {
    /// A stream was lost.
    pub fn lost(&self) {
        self.reconnects.inc();
    }

    /// Whether the relay that is followed answers questions about routes.
    pub fn learning(&self, can: bool) {
        self.learning.set(u64::from(can));
    }

    /// Questions about routes were sent to the relay, or cannot be.
    pub fn asked(&self, count: u64, is_sent: bool) {
        let counter = if is_sent { &self.questions } else { &self.unasked };
        counter.inc_by(count);
    }

    /// A relay has answered questions about routes.
    pub fn answered(&self, count: u64) {
        self.answers.inc_by(count);
    }

    /// The certificate that is in use expires then.
    pub fn certificate(&self, until: SystemTime) {
        self.certificate_until.set(until.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs()));
    }

    /// A further certificate was to be got; whether it was.
    pub fn renewal(&self, is_got: bool) {
        if is_got {
            self.certificate_renewals.inc()
        } else {
            self.certificate_failures.inc()
        };
    }

    /// Spans that were sent and dropped since the start.
    pub fn spans(&self, (sent, dropped): (u64, u64)) {
        self.spans_sent.inc_by(sent.saturating_sub(self.spans_sent.get()));
        self.spans_dropped.inc_by(dropped.saturating_sub(self.spans_dropped.get()));
    }

    /// Takes over how it is, and what has happened.
    pub fn update(&self, core: &Core, observed: &Observed) {
        let in_sync = core.desired().is_in_sync() && core.is_settled();
        self.in_sync.set(u64::from(in_sync));
        self.bifrostd_up.set(u64::from(core.is_answered()));
        self.revision.set(core.desired().revision().unwrap_or(0));
        self.objects.set(core.object_count() as u64);
        self.problems.set(core.problem_count() as u64);
        for ms in &observed.propagation_ms {
            self.propagation.observe(*ms as f64 / 1e3);
        }
        self.applied.inc_by(observed.applied);
        self.refused.inc_by(observed.refused);
        self.drift.inc_by(observed.drifted);
    }

    /// Objects that somebody else had changed.
    pub fn drifted(&self) -> u64 {
        self.drift.get()
    }

    /// All of them as text.
    pub fn text(&self) -> Result<String, String> {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry).map_err(|e| e.to_string())?;
        Ok(text)
    }

    /// For a server.
    pub fn source(self: &Arc<Self>) -> Source {
        let metrics = Arc::clone(self);
        Arc::new(move || metrics.text())
    }
}
