//! This server: the states that `bifrost-nicd` and the pods report.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use bifrost_control::Client;
use bifrost_control::api::{GatewayPod, Pipeline};
use serde::Serialize;

use super::history::{History, MAX_PODS, View as Hour};

/// The programs of this server.
#[derive(Debug)]
pub(super) struct Server {
    name: String,
    nicd: PathBuf,
    pods: PathBuf,
    history: Mutex<History>,
    latest: Mutex<View>,
}

/// The data about a server for the page.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct View {
    /// Its name.
    name: String,
    /// When its programs were asked, milliseconds since 1970; 0: not yet.
    time_ms: u64,
    /// Why `bifrost-nicd` does not answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// The state that `bifrost-nicd` reports.
    pipeline: Pipeline,
    /// The state that each pod reports.
    pods: BTreeMap<String, GatewayPod>,
    /// Why pods do not answer, by pod.
    pod_errors: BTreeMap<String, String>,
    /// The last hour.
    history: Hour,
}

impl Server {
    pub(super) fn new(name: String, nicd: PathBuf, pods: PathBuf) -> Server {
        let latest = Mutex::new(View { name: name.clone(), ..View::default() });
        Server { name, nicd, pods, history: Mutex::default(), latest }
    }

    /// The latest data.
    pub(super) fn view(&self) -> View {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Asks all programs. Blocks.
    pub(super) fn look(&self) {
        let time_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64);
        let asked = Client::new(&self.nicd).and_then(|client| client.pipeline());
        let (pipeline, error) = match asked {
            Ok(pipeline) => (pipeline, None),
            Err(error) => (Pipeline::default(), Some(error.to_string())),
        };
        let (mut pods, mut pod_errors) = (BTreeMap::new(), BTreeMap::new());
        // Asks all pods at the same time: one that accepts a connection but does not answer does not delay the others.
        std::thread::scope(|scope| {
            let ask = |name: &String| {
                let socket = self.pods.join(name).join("gw.sock");
                Client::new(socket).and_then(|client| client.gateway_pod())
            };
            let names = pipeline.pods.iter().take(MAX_PODS).map(|pod| &pod.name);
            let asked: Vec<_> = names.map(|name| (name, scope.spawn(move || ask(name)))).collect();
            for (name, answer) in asked {
                match answer.join() {
                    Ok(Ok(said)) => drop(pods.insert(name.clone(), said)),
                    Ok(Err(error)) => drop(pod_errors.insert(name.clone(), error.to_string())),
                    Err(_) => drop(pod_errors.insert(name.clone(), "asking it failed; see the log".to_owned())),
                }
            }
        });
        let history = match error {
            None => self.history.lock().unwrap_or_else(PoisonError::into_inner).add(time_ms, &pipeline, &pods),
            Some(_) => self.view().history,
        };
        let name = self.name.clone();
        let view = View { name, time_ms, error, pipeline, pods, pod_errors, history };
        *self.latest.lock().unwrap_or_else(PoisonError::into_inner) = view;
    }
}
