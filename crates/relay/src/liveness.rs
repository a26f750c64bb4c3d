//! Looks which hosts are dead, marks them in the store, and follows what other relays have marked ([`crate::alive`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bifrost_intent::api::Frozen;
use bifrost_store::{CommitError, Revision, Txn, WatchError, Write};
use tokio::time::MissedTickBehavior;

use crate::alive::{Absence, Death, Mark, PREFIX, Settings, key};
use crate::relay::{Relay, now_ms};

/// Between two looks.
const PERIOD: Duration = Duration::from_secs(1);
/// Between attempts to follow the store.
const PAUSE: Duration = Duration::from_secs(1);
/// Marks of one transaction.
const TOGETHER: usize = 250;

/// What a relay follows in its store beside objects.
#[derive(Debug, Default)]
pub(crate) struct Followed {
    /// What other relays say.
    pub(crate) peers: AtomicBool,
    marks: AtomicBool,
}

/// Looks, marks and follows, forever. `is_shared`: other relays may have the same store.
pub(crate) async fn run(relay: Arc<Relay>, settings: Settings, is_shared: bool) {
    tokio::join!(follow(&relay), look(&relay, settings, is_shared));
}

async fn look(relay: &Relay, settings: Settings, is_shared: bool) {
    let mut absence = Absence::new(settings);
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let is_sure = is_sure(relay, is_shared);
        let verdict = relay.with(|fleet| {
            let verdict = absence.look(Instant::now(), is_sure, &fleet.seen());
            report(fleet.set_frozen(verdict.frozen), verdict.frozen);
            verdict
        });
        if is_sure && let Err(error) = mark(relay, settings, &verdict.dead).await {
            tracing::debug!("hosts are not marked now: {error}");
        }
    }
}

/// Whether everything is known that relays have said.
fn is_sure(relay: &Relay, is_shared: bool) -> bool {
    let Followed { peers, marks } = &relay.followed;
    // What this relay tells others comes back to it, too.
    let hears_others =
        || peers.load(Ordering::Relaxed) && relay.with(|fleet| fleet.peers_mut().knows(relay.instance()));
    relay.position().borrow().in_sync && marks.load(Ordering::Relaxed) && (!is_shared || hears_others())
}

fn report(before: Option<Frozen>, now: Option<Frozen>) {
    match (before, now) {
        (None, Some(Frozen { vanished, of })) => tracing::warn!(
            "{vanished} of {of} hosts have vanished together: none of them is taken for dead; see `bifrostctl fleet hosts`"
        ),
        (Some(_), None) => tracing::info!("the hosts that had vanished together are back, or fewer than before"),
        _ => {}
    }
}

/// Marks hosts that are dead, and those of this relay that live; and removes the marks of hosts that do not exist.
async fn mark(relay: &Relay, settings: Settings, dead: &[String]) -> Result<(), CommitError> {
    let death = Death { since_ms: now_ms(), by: relay.name().to_owned(), withdrawn: settings.withdrawn };
    let (unmarked, in_vain) = relay.with(|fleet| (fleet.unmarked(), fleet.marked_in_vain()));
    let dead_mark = Mark { dead: Some(death) };
    let alive_mark = Mark::default();
    let dead = dead.iter().map(|host| (host, Some(&dead_mark)));
    let alive = unmarked.iter().map(|host| (host, Some(&alive_mark)));
    let all: Vec<(&String, Option<&Mark>)> = dead.chain(alive).chain(in_vain.iter().map(|host| (host, None))).collect();
    for chunk in all.chunks(TOGETHER) {
        match commit(relay, chunk).await {
            Ok(_) => chunk.iter().for_each(|(host, mark)| say(host, *mark)),
            // Another relay was first. The next look finds what it has marked.
            Err(CommitError::Conflict { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

async fn commit(relay: &Relay, marks: &[(&String, Option<&Mark>)]) -> Result<Revision, CommitError> {
    let expect = relay.with(|fleet| marks.iter().map(|(host, _)| (key(host), fleet.marked_at(host))).collect());
    let write = |(host, mark): &(&String, Option<&Mark>)| match mark {
        // Texts and numbers always have a JSON form.
        Some(mark) => Write::Put { key: key(host), value: serde_json::to_vec(mark).unwrap_or_default() },
        None => Write::Delete { key: key(host) },
    };
    relay.store().commit(&Txn { expect, writes: marks.iter().map(write).collect() }).await
}

fn say(host: &str, mark: Option<&Mark>) {
    match mark {
        Some(Mark { dead: Some(_) }) => {
            tracing::warn!(host, "no relay hears of this host's agent any more: the host is taken for dead");
        }
        Some(Mark { dead: None }) => tracing::info!(host, "the host is alive"),
        None => {}
    }
}

async fn follow(relay: &Relay) {
    loop {
        let why = follow_once(relay).await;
        relay.followed.marks.store(false, Ordering::Relaxed);
        tracing::debug!("marks of hosts are not followed now: {why}");
        tokio::time::sleep(PAUSE).await;
    }
}

async fn follow_once(relay: &Relay) -> WatchError {
    let begun = async {
        let snapshot = relay.store().snapshot(PREFIX).await?;
        let revision = snapshot.revision;
        relay.update(|fleet| fleet.load_marks(snapshot));
        relay.correct().await;
        relay.store().watch(PREFIX, revision).await
    };
    let mut watch = match begun.await {
        Ok(watch) => watch,
        Err(error) => return WatchError::Lost(error),
    };
    relay.followed.marks.store(true, Ordering::Relaxed);
    loop {
        match watch.next().await {
            Ok(events) => {
                relay.update(|fleet| fleet.follow_marks(events));
                relay.correct().await;
            }
            Err(error) => return error,
        }
    }
}
