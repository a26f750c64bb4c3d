//! Simulated agents: each has its own connection, keeps what it receives, and reports it at once.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use bifrost_relay_api::limits::{MAX_MESSAGE, VERSIONS};
use bifrost_relay_api::pb::relay_client::RelayClient;
use bifrost_relay_api::{FromAgent, Hello, Report, ToAgent};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Endpoint;

/// Delay between attempts to connect.
const PAUSE: Duration = Duration::from_millis(100);

/// The objects of an agent's host: kind and key, and content.
pub(crate) type Has = BTreeMap<(String, String), Vec<u8>>;

/// State of an agent.
#[derive(Debug, Default)]
pub(crate) struct Agent {
    pub(crate) has: Has,
    /// The revision of the last InSync on this connection; 0 if there was none.
    pub(crate) in_sync: u64,
    pub(crate) connections: u64,
}

/// An event to wait for: a spec that contains this text.
#[derive(Debug)]
pub(crate) struct Mark {
    pub(crate) since: Instant,
    /// The time that each host took.
    pub(crate) took: Vec<Duration>,
}

/// All agents.
#[derive(Debug)]
pub(crate) struct Agents {
    pub(crate) all: Vec<Arc<Mutex<Agent>>>,
    /// Events to wait for, by kind and key.
    marks: Arc<Mutex<HashMap<String, Mark>>>,
    tasks: JoinSet<()>,
}

impl Agents {
    /// Agents of hosts `h0` to `h(N-1)`, which connect to a relay and reconnect while it exists.
    pub(crate) fn start(hosts: usize, endpoint: &str) -> Result<Agents> {
        let marks: Arc<Mutex<HashMap<String, Mark>>> = Arc::default();
        let mut tasks = JoinSet::new();
        let mut all = Vec::with_capacity(hosts);
        for n in 0..hosts {
            let agent = Arc::new(Mutex::new(Agent::default()));
            all.push(Arc::clone(&agent));
            let endpoint = Endpoint::from_shared(endpoint.to_owned())?.tcp_nodelay(true);
            tasks.spawn(follow(format!("h{n}"), endpoint, agent, Arc::clone(&marks)));
        }
        Ok(Agents { all, marks, tasks })
    }

    /// Starts measuring when agents receive this key with a spec that contains this text.
    pub(crate) fn expect(&self, mark: String) {
        let new = Mark { since: Instant::now(), took: Vec::new() };
        lock(&self.marks).insert(mark, new);
    }

    /// The measurements.
    pub(crate) fn marks(&self) -> Vec<(String, Vec<Duration>)> {
        lock(&self.marks).drain().map(|(mark, Mark { took, .. })| (mark, took)).collect()
    }

    /// Waits until all agents have an InSync of at least a revision on their connection.
    pub(crate) async fn wait_in_sync(&self, revision: u64, limit: Duration) -> Result<Duration> {
        let start = Instant::now();
        loop {
            let behind = self.all.iter().filter(|agent| lock(agent).in_sync < revision.max(1)).count();
            if behind == 0 {
                return Ok(start.elapsed());
            }
            anyhow::ensure!(
                start.elapsed() < limit,
                "{behind} of {} agents are not in sync after {limit:?}",
                self.all.len()
            );
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    pub(crate) fn stop(&mut self) {
        self.tasks.abort_all();
    }
}

/// Runs one agent forever.
async fn follow(host: String, endpoint: Endpoint, agent: Arc<Mutex<Agent>>, marks: Arc<Mutex<HashMap<String, Mark>>>) {
    loop {
        // The error does not matter: the relay may have been killed.
        let _ = converse(&host, &endpoint, &agent, &marks).await;
        lock(&agent).in_sync = 0;
        tokio::time::sleep(PAUSE.mul_f64(0.5 + fastrand::f64())).await;
    }
}

async fn converse(
    host: &str,
    endpoint: &Endpoint,
    agent: &Mutex<Agent>,
    marks: &Mutex<HashMap<String, Mark>>,
) -> Result<()> {
    let mut client = RelayClient::new(endpoint.connect().await?).max_decoding_message_size(MAX_MESSAGE);
    let (send, receive) = mpsc::channel(4);
    let hello = Hello { versions: (VERSIONS.0, VERSIONS.0), host: host.to_owned(), ..Hello::default() };
    send.send(FromAgent::Hello(hello).into()).await?;
    let mut incoming = client.follow(ReceiverStream::new(receive)).await?.into_inner();
    lock(agent).connections += 1;
    // Everything before the first InSync is the complete state.
    let mut whole = Some(Has::new());
    while let Some(message) = incoming.message().await? {
        match ToAgent::try_from(message)? {
            // Version 1 has no answers.
            ToAgent::Welcome(_) | ToAgent::Answers(_) => {}
            ToAgent::Changes(changes) => {
                let now = Instant::now();
                let mut agent = lock(agent);
                for change in changes {
                    let spec = change.spec.map(|spec| spec.to_vec());
                    if whole.is_none() {
                        look(marks, &change.kind, &change.key, spec.as_deref(), now);
                    }
                    let has = whole.as_mut().unwrap_or(&mut agent.has);
                    match spec {
                        Some(spec) => drop(has.insert((change.kind, change.key), spec)),
                        None => drop(has.remove(&(change.kind, change.key))),
                    }
                }
            }
            ToAgent::InSync(revision) => {
                let objects = {
                    let mut agent = lock(agent);
                    if let Some(whole) = whole.take() {
                        agent.has = whole;
                    }
                    agent.in_sync = revision;
                    agent.has.len() as u64
                };
                let report = Report { revision, objects, ..Report::default() };
                send.send(FromAgent::Report(report).into()).await?;
            }
        }
    }
    Ok(())
}

/// Records the time of an event that is waited for.
fn look(marks: &Mutex<HashMap<String, Mark>>, kind: &str, key: &str, spec: Option<&[u8]>, now: Instant) {
    let Some(spec) = spec else { return };
    let mark = mark(kind, key, &String::from_utf8_lossy(spec));
    if let Some(mark) = lock(marks).get_mut(&mark) {
        mark.took.push(now.saturating_duration_since(mark.since));
    }
}

/// Identifies the relevant content of an item: for routes only the destination host, for groups everything.
pub(crate) fn mark(kind: &str, key: &str, spec: &str) -> String {
    match kind {
        "route" => {
            let peer = spec.split("\"peer\":\"").nth(1).and_then(|rest| rest.split('"').next()).unwrap_or("");
            format!("route {key} {peer}")
        }
        _ => format!("{kind} {key} {spec}"),
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
