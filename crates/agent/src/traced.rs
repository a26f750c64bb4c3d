//! What the agent says about changes in their traces (docs/FLEET.md, section 7).

use std::collections::VecDeque;
use std::time::SystemTime;

use bifrost_relay_api::Report;
use bifrost_relay_api::traces::{Attribute, Span, Trace, Traces};

/// The most revisions that wait to be in force. Of more, the oldest have no span.
const WAITING: usize = 256;
/// The most batches that have spans, for one revision.
const BATCHES: usize = 32;

/// Changes that are not in force yet.
#[derive(Debug)]
pub struct Traced {
    traces: Option<Traces>,
    waiting: VecDeque<(u64, Trace, SystemTime)>,
    /// A batch that `bifrostd` is asked for: how many changes it has, and since when.
    asked: Option<(usize, SystemTime)>,
    /// Batches since the oldest of these revisions, the latest ones.
    batches: VecDeque<Batch>,
}

/// A batch that `bifrostd` was asked for.
#[derive(Clone, Debug)]
struct Batch {
    changes: usize,
    start: SystemTime,
    end: SystemTime,
    error: Option<String>,
}

impl Traced {
    /// Nothing waits.
    pub fn new(traces: Option<Traces>) -> Traced {
        Traced { traces, waiting: VecDeque::new(), asked: None, batches: VecDeque::new() }
    }

    /// Spans that were sent and dropped.
    pub fn counts(&self) -> (u64, u64) {
        self.traces.as_ref().map_or((0, 0), Traces::counts)
    }

    /// All changes up to a revision have come.
    pub fn came(&mut self, revision: u64, now: SystemTime) {
        let Some(trace) = self.traces.as_ref().and_then(|traces| traces.of(revision)) else { return };
        if self.waiting.len() == WAITING {
            self.waiting.pop_front();
        }
        self.waiting.push_back((revision, trace, now));
    }

    /// `bifrostd` is asked for a batch of changes.
    pub fn asked(&mut self, changes: usize, now: SystemTime) {
        self.asked = (!self.waiting.is_empty()).then_some((changes, now));
    }

    /// It has answered what it was asked, or has not. Not every question is for a batch.
    pub fn answered(&mut self, error: Option<String>, now: SystemTime) {
        let Some((changes, start)) = self.asked.take() else { return };
        if self.batches.len() == BATCHES {
            self.batches.pop_front();
        }
        self.batches.push_back(Batch { changes, start, end: now, error });
    }

    /// All changes up to the report's revision are in force, except for its problems.
    pub fn in_force(&mut self, report: &Report, now: SystemTime) {
        let Some(traces) = &self.traces else { return };
        let done = self.waiting.iter().take_while(|(revision, ..)| *revision <= report.revision).count();
        for (revision, trace, start) in self.waiting.drain(..done) {
            let problems = report.problems.len() as u64 + report.more_problems;
            let attributes = vec![
                ("bifrost.revision", Attribute::Number(revision)),
                ("bifrost.problems.count", Attribute::Number(problems)),
            ];
            let number = fastrand::u64(1..);
            traces.child(trace, number, Span { name: "apply", start, end: now, attributes, error: None });
            for Batch { changes, start, end, error } in
                self.batches.iter().filter(|batch| batch.start >= start).cloned()
            {
                let attributes = vec![("bifrost.changes.count", Attribute::Number(changes as u64))];
                let span = Span { name: "bifrostd: apply", start, end, attributes, error };
                traces.request(trace, number, fastrand::u64(..), span);
            }
        }
        if self.waiting.is_empty() {
            self.batches.clear();
        }
    }

    /// The stream is lost: revisions of another one come with everything.
    pub fn lost(&mut self) {
        self.waiting.clear();
        self.batches.clear();
    }
}
