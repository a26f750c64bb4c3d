//! What the relay says about a change in its trace (docs/FLEET.md, section 7).

use std::time::SystemTime;

use bifrost_intent::api::Applied;
use bifrost_relay_api::traces::{Attribute, Span, Traces};
use bifrost_store::Revision;

use crate::caller::Caller;

/// The most objects that a span names.
const NAMED: usize = 10;

/// A batch was made: from the request until this relay has told its hosts.
pub(crate) fn changed(traces: &Traces, applied: &Applied, caller: &Caller, start: SystemTime) {
    let Some(trace) = traces.of(applied.revision).filter(|_| !applied.changed.is_empty()) else { return };
    let names: Vec<String> = applied.changed.iter().take(NAMED).map(|object| object.key.to_string()).collect();
    let attributes = vec![
        ("bifrost.revision", Attribute::Number(applied.revision)),
        ("bifrost.objects.count", Attribute::Number(applied.changed.len() as u64)),
        ("bifrost.objects", Attribute::Text(names.join(" "))),
        ("enduser.id", Attribute::Text(caller.name())),
    ];
    traces.root(trace, span("change", start, attributes));
}

/// The store has taken a commit.
pub(crate) fn committed(traces: &Traces, revision: Revision, start: SystemTime) {
    let Some(trace) = traces.of(revision) else { return };
    traces.child(trace, fastrand::u64(..), span("commit", start, Vec::new()));
}

/// A commit has come from the store, and what follows from it waits to be sent to the hosts of this relay.
pub(crate) fn passed_on(traces: &Traces, revision: Revision, start: SystemTime) {
    let Some(trace) = traces.of(revision) else { return };
    traces.child(trace, fastrand::u64(..), span("pass on", start, Vec::new()));
}

fn span(name: &'static str, start: SystemTime, attributes: Vec<(&'static str, Attribute)>) -> Span {
    Span { name, start, end: SystemTime::now(), attributes, error: None }
}
