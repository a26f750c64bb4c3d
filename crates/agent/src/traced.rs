//! What the agent says about changes in their traces (docs/FLEET.md, section 7).

use std::collections::VecDeque;
use std::time::SystemTime;

use bifrost_relay_api::Report;
use bifrost_relay_api::traces::{Attribute, Span, Trace, Traces};

/// The most revisions that wait to be in force. Of more, the oldest have no span.
const WAITING: usize = 256;

/// Changes that are not in force yet.
#[derive(Debug)]
pub struct Traced {
    traces: Option<Traces>,
    waiting: VecDeque<(u64, Trace, SystemTime)>,
}

impl Traced {
    /// Nothing waits.
    pub fn new(traces: Option<Traces>) -> Traced {
        Traced { traces, waiting: VecDeque::new() }
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
            traces.child(trace, fastrand::u64(..), Span { name: "apply", start, end: now, attributes, error: None });
        }
    }

    /// The stream is lost: revisions of another one come with everything.
    pub fn lost(&mut self) {
        self.waiting.clear();
    }
}
