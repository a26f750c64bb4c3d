//! How the paths to other hosts are, for people who look at the whole fleet (docs/FLEET.md 3.11).

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use bifrost_control::Client;
use bifrost_control::api::{Path, PathState};
use bifrost_relay_api::limits::MAX_IMPAIRED;
use bifrost_relay_api::{ImpairedPeer, PathHealth};
use tokio::sync::watch;

/// How often `bifrostd` is asked.
const INTERVAL: Duration = Duration::from_secs(10);

/// Asks `bifrostd` again and again, on a thread that may block, and tells of what has changed. While there is no answer the last one stays.
pub(crate) async fn watch(socket: PathBuf, health: watch::Sender<PathHealth>) {
    loop {
        let socket = socket.clone();
        let paths = tokio::task::spawn_blocking(move || Client::new(socket)?.paths()).await;
        if let Ok(Ok(paths)) = paths {
            let latest = path_health(&paths);
            health.send_if_modified(|known| {
                let is_new = *known != latest;
                *known = latest;
                is_new
            });
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

/// The summary of a daemon's list of paths.
fn path_health(paths: &[Path]) -> PathHealth {
    let mut peers: BTreeMap<&str, (u32, u32)> = BTreeMap::new();
    for path in paths {
        let (all, working) = peers.entry(&path.peer).or_default();
        if !path.drained {
            *all += 1;
            *working += u32::from(matches!(path.state, PathState::Active | PathState::Standby));
        }
    }
    let impaired = peers.iter().filter(|(_, (all, working))| working < all);
    let impaired = impaired.map(|(peer, &(paths, working))| ImpairedPeer { peer: (*peer).to_owned(), paths, working });
    let mut impaired: Vec<_> = impaired.collect();
    let more_impaired = impaired.split_off(impaired.len().min(MAX_IMPAIRED)).len() as u64;
    PathHealth { peers: peers.len() as u64, impaired, more_impaired }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(peer: &str, state: PathState, drained: bool) -> Path {
        Path { peer: peer.to_owned(), state, drained, ..Path::default() }
    }

    #[test]
    fn hosts_with_paths_that_do_not_work_are_named() {
        use PathState::{Active, Down, Standby, Suspect};
        let paths = [
            path("h2", Active, false),
            path("h2", Standby, false),
            path("h3", Active, false),
            path("h3", Suspect, false),
            path("h3", Down, false),
            path("h4", Down, true),
            path("h4", Active, false),
        ];
        let impaired = vec![ImpairedPeer { peer: "h3".into(), paths: 3, working: 1 }];
        assert_eq!(path_health(&paths), PathHealth { peers: 3, impaired, more_impaired: 0 });
        assert_eq!(path_health(&[]), PathHealth::default());
    }

    #[test]
    fn a_hundred_are_named_and_the_others_counted() {
        let paths: Vec<_> = (0..103).map(|n| path(&format!("h{n:03}"), PathState::Down, false)).collect();
        let health = path_health(&paths);
        assert_eq!((health.peers, health.impaired.len(), health.more_impaired), (103, 100, 3));
        assert_eq!(health.impaired[99].peer, "h099");
    }
}
