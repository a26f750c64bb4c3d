//! The summary of all objects, made and encoded once for all who ask.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::Bytes;
use bifrost_intent::api::Overview;
use bifrost_store::Revision;
use tokio::time::Instant;

use crate::fleet::Fleet;

/// How old a summary may be while objects change. The relay waits while one is made, which takes time in proportion to all objects.
const MAX_AGE: Duration = Duration::from_secs(1);

/// The latest summary.
#[derive(Debug, Default)]
pub(crate) struct Latest(Mutex<Option<Encoded>>);

/// A summary of all objects.
#[derive(Clone, Debug)]
pub(crate) struct Encoded {
    revision: Revision,
    made: Instant,
    /// As it is.
    pub(crate) overview: Arc<Overview>,
    /// As JSON.
    pub(crate) json: Bytes,
}

impl Latest {
    /// The summary. It is made again if the revision differs and it is older than a second.
    pub(crate) fn get(&self, now: Instant, fleet: &Fleet) -> Encoded {
        let mut latest = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (revision, _) = fleet.position();
        let is_fresh = |known: &Encoded| known.revision == revision || now.duration_since(known.made) < MAX_AGE;
        if let Some(known) = latest.as_ref().filter(|known| is_fresh(known)) {
            return known.clone();
        }
        // Maps with texts as keys, numbers and texts: JSON has them all.
        let overview = Arc::new(fleet.overview());
        let json = Bytes::from(serde_json::to_vec(&*overview).unwrap_or_default());
        latest.insert(Encoded { revision, made: now, overview, json }).clone()
    }
}

#[cfg(test)]
mod tests {
    use bifrost_store::Events;

    use super::*;

    #[test]
    fn a_summary_is_made_again_only_when_objects_have_changed_and_a_second_has_passed() {
        let (mut fleet, latest, start) = (Fleet::default(), Latest::default(), Instant::now());
        let revision = |latest: &Encoded| {
            let json: serde_json::Value = serde_json::from_slice(&latest.json).unwrap();
            assert_eq!(json["revision"], latest.overview.revision);
            latest.overview.revision
        };
        assert_eq!(revision(&latest.get(start, &fleet)), 0);
        fleet.follow(Events { revision: 7, changes: Vec::new() });
        assert_eq!(revision(&latest.get(start + MAX_AGE / 2, &fleet)), 0, "the old one is young enough");
        assert_eq!(revision(&latest.get(start + MAX_AGE, &fleet)), 7);
        fleet.follow(Events { revision: 8, changes: Vec::new() });
        assert_eq!(revision(&latest.get(start + MAX_AGE * 2, &fleet)), 8);
    }
}
