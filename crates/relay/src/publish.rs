//! Tells the other relays of a store about this one's hosts, and follows what they tell ([`crate::peers`]).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bifrost_intent::api::HostStatus;
use bifrost_store::{CommitError, StoreError, Txn, WatchError, Write};
use serde::Serialize;

use crate::fleet::ToTell;
use crate::peers::{HostRecord, PREFIX, RelayRecord, host_key, relay_key};
use crate::relay::Relay;

/// The shortest time between two times of telling.
const PERIOD: Duration = Duration::from_secs(1);
/// How long it waits for more to tell at the same time.
const GATHER: Duration = Duration::from_millis(20);
/// How often it tells that it is there: often enough that one that does not arrive does no harm.
const ALIVE: Duration = Duration::from_secs(10);
/// How often it looks who is silent.
const LOOK: Duration = Duration::from_secs(1);
/// Hosts of one transaction: with the longest problems of each it is of the size that a store takes.
const TOGETHER: usize = 250;

/// Tells, and follows, forever.
pub(crate) async fn run(relay: Arc<Relay>) {
    tokio::join!(tell(&relay), follow(&relay));
}

async fn tell(relay: &Relay) {
    let mut progress = relay.progress();
    loop {
        let begun = Instant::now();
        progress.borrow_and_update();
        if let Err(error) = tell_once(relay).await {
            tracing::debug!("other relays are not told: {error}");
            // Which of it was made is not known.
            relay.with(|fleet| fleet.tell_all());
        }
        tokio::time::sleep(PERIOD.saturating_sub(begun.elapsed())).await;
        // Nothing new is told, too, so that others know who is there.
        let _ = tokio::time::timeout(ALIVE, progress.changed()).await;
        tokio::time::sleep(GATHER).await;
    }
}

async fn tell_once(relay: &Relay) -> Result<(), CommitError> {
    let me = relay.instance();
    let ToTell { position, here, gone } = relay.with(|fleet| fleet.take_untold(me));
    for (host, revision) in gone {
        let key = host_key(&host);
        let txn = Txn { expect: vec![(key.clone(), revision)], writes: vec![Write::Delete { key }] };
        match relay.store().commit(&txn).await {
            // Its agent follows another relay, which has said so.
            Ok(_) | Err(CommitError::Conflict { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    for chunk in here.chunks(TOGETHER) {
        let record = |status: &HostStatus| put(host_key(&status.name), &HostRecord::new(me, position, status.clone()));
        let txn = Txn { expect: Vec::new(), writes: chunk.iter().map(record).collect() };
        relay.store().commit(&txn).await?;
    }
    // Last: all that it speaks for is there.
    let writes = vec![put(relay_key(me), &RelayRecord::new(position))];
    relay.store().commit(&Txn { expect: Vec::new(), writes }).await?;
    Ok(())
}

async fn follow(relay: &Relay) {
    loop {
        let why = follow_once(relay).await;
        relay.followed.peers.store(false, Ordering::Relaxed);
        tracing::debug!("other relays are not followed now: {why}");
        tokio::time::sleep(LOOK).await;
    }
}

async fn follow_once(relay: &Relay) -> WatchError {
    let begun = async {
        let snapshot = relay.store().snapshot(PREFIX).await?;
        let revision = snapshot.revision;
        relay.update(|fleet| fleet.peers_mut().load(snapshot, Instant::now()));
        relay.store().watch(PREFIX, revision).await
    };
    let mut watch = match begun.await {
        Ok(watch) => watch,
        Err(error) => return WatchError::Lost(error),
    };
    relay.followed.peers.store(true, Ordering::Relaxed);
    let mut look = tokio::time::interval(LOOK);
    loop {
        tokio::select! {
            events = watch.next() => match events {
                Ok(events) => relay.update(|fleet| fleet.peers_mut().follow(events, Instant::now())),
                Err(error) => return error,
            },
            _ = look.tick() => {
                let gone = relay.with(|fleet| fleet.peers_mut().expire(Instant::now()));
                if !gone.is_empty() {
                    relay.update(|_| ());
                }
                for name in gone {
                    if let Err(error) = forget(relay, &name).await {
                        tracing::debug!("a relay that is gone stays in the store: {error}");
                    }
                }
            }
        }
    }
}

/// Removes what a relay said of itself that is gone. What it said of hosts says nothing then, and is replaced in time.
async fn forget(relay: &Relay, name: &str) -> Result<(), StoreError> {
    tracing::info!(name, "another relay has been silent for long, and is taken for gone");
    let writes = vec![Write::Delete { key: relay_key(name) }];
    match relay.store().commit(&Txn { expect: Vec::new(), writes }).await {
        Err(CommitError::Store(error)) => Err(error),
        // Others do the same.
        _ => Ok(()),
    }
}

fn put(key: String, value: &impl Serialize) -> Write {
    // Texts and numbers always have a JSON form.
    Write::Put { key, value: serde_json::to_vec(value).unwrap_or_default() }
}
