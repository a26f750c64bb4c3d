//! The traffic of two guests while their hosts' daemons are upgraded.

use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};

use crate::lab::Network;
use crate::programs::idle_connections::IdleConnections;
use crate::programs::iperf3;
use crate::programs::key_value_client::{self, Load, Request};
use crate::programs::key_value_protocol::Protocol;
use crate::programs::redis_server::{self, RedisServer};
use crate::programs::stream;
use crate::topology::Guest;

/// Connections of requests, and their rate over all of them.
const CLIENTS: u32 = 4;
const REQUESTS_PER_S: f64 = 1_000.0;
/// A request without an answer for this long counts as a broken connection.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The load ends when it is told to.
const ENDLESS: Duration = Duration::from_secs(24 * 3600);
/// Ports of the servers.
const IDLE_PORT: u16 = 5_300;
const STREAM_PORT: u16 = 7_000;
/// Rate limit of each stream, bytes/s, and of iperf3, Gbit/s, so that the processors have time for upgrades.
const STREAM_BYTES_PER_S: f64 = 5e6;
const IPERF_GBIT_PER_S: f64 = 0.1;
/// Sessions come from datagrams to different ports, of as many sockets as it takes.
const FIRST_PORT: u16 = 10_000;
const PORTS: u32 = 50_000;
/// Datagrams that are sent at once, and the pause after them: first until there are all sessions, then often enough
/// that none ends, 30 s after its last datagram.
const BURST: u32 = 50;
const PAUSE: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(10)];

/// A stream's sender and receiver.
type Stream = (JoinHandle<Result<u64>>, JoinHandle<Result<stream::Received>>);

/// The running traffic. Dropping it ends it.
pub(super) struct Traffic {
    stop: Stop,
    requests: JoinHandle<Result<key_value_client::Report>>,
    streams: Vec<Stream>,
    flow: Option<iperf3::Running>,
    idle: IdleConnections,
    idle_count: u32,
    sessions: JoinHandle<Result<()>>,
    _server: RedisServer,
}

/// Tells the threads to end when it is dropped.
struct Stop(Arc<AtomicBool>);

impl Drop for Stop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// What became of it.
pub(super) struct Outcome {
    /// All requests.
    pub(super) requests: Vec<Request>,
    pub(super) connections: u64,
    /// Connections that have ended, or do not work any more.
    pub(super) broken: u64,
    /// Wrong answers, and streams with a wrong byte.
    pub(super) wrong: u64,
    /// Received and compared bytes of the streams.
    pub(super) compared_bytes: u64,
}

impl Traffic {
    /// Starts it between the guests of two hosts: `sessions` of the first one's security groups, `idle` connections,
    /// and iperf3 for at most `flow`.
    pub(super) fn start(
        network: &Network,
        (sessions, idle_count): (u32, u32),
        flow: Option<Duration>,
        logs: &Path,
    ) -> Result<Self> {
        let guests = [&network.topology.hosts[0].guest, &network.topology.hosts[1].guest];
        let [client, server] = guests;
        let redis = RedisServer::start(server, logs)?;
        let idle_address = SocketAddr::from((server.address, IDLE_PORT));
        let idle = IdleConnections::open(&client.namespace, &server.namespace, idle_address, idle_count)?;
        let stop = Stop(Arc::new(AtomicBool::new(false)));
        let load = Load {
            server: (server.address, redis_server::PORT).into(),
            transport: client.namespace.stream_protocol(),
            protocol: Protocol::Redis,
            clients: CLIENTS,
            keep_alive: true,
            duration: ENDLESS,
            timeout: TIMEOUT,
            patience: Duration::ZERO,
            warm_up: Duration::ZERO,
            op: None,
            requests_per_s: Some(REQUESTS_PER_S),
            record: true,
            stop: Arc::clone(&stop.0),
        };
        let requests = client.namespace.spawn(move || key_value_client::run(&load))?;
        let mut streams = Vec::new();
        for (seed, [from, to]) in [(1, [client, server]), (2, [server, client])] {
            streams.push(start_stream(seed, from, to, &stop.0)?);
        }
        let flow = flow.map(|duration| {
            let load =
                iperf3::Load { gbit_per_s: Some(IPERF_GBIT_PER_S), ..iperf3::Load::one_flow(duration.as_secs_f64()) };
            iperf3::Running::start((client, server), load, logs, "iperf3")
        });
        let flow = flow.transpose()?;
        let (to, theirs) = (server.address, Arc::clone(&stop.0));
        let sessions = client.namespace.spawn(move || keep_sessions(to.into(), sessions, &theirs))?;
        Ok(Self { stop, requests, streams, flow, idle, idle_count, sessions, _server: redis })
    }

    /// Ends the traffic.
    ///
    /// # Errors
    /// The lab itself fails. That a connection has ended is no error.
    pub(super) fn finish(self) -> Result<Outcome> {
        let flow = self.flow.map(iperf3::Running::interrupt);
        drop(self.stop);
        let report = self.requests.join().map_err(|_| anyhow!("the client of Redis panicked"))??;
        self.sessions.join().map_err(|_| anyhow!("the sender of datagrams panicked"))??;
        let mut outcome = Outcome {
            connections: u64::from(CLIENTS) + self.streams.len() as u64 + u64::from(self.idle_count),
            broken: report.failed(),
            wrong: report.wrong_answers,
            compared_bytes: 0,
            requests: report.requests,
        };
        for (sender, receiver) in self.streams {
            let sent = sender.join().map_err(|_| anyhow!("the sender of a stream panicked"))?;
            let received = receiver.join().map_err(|_| anyhow!("the receiver of a stream panicked"))?;
            match (sent, received) {
                (Ok(sent), Ok(received)) => {
                    outcome.compared_bytes += received.bytes;
                    outcome.wrong += u64::from(received.first_wrong_byte.is_some() || received.bytes != sent);
                }
                (Err(error), _) | (_, Err(error)) => {
                    eprintln!("upgrade: a stream has ended: {error:#}");
                    outcome.broken += 1;
                }
            }
        }
        if let Some(flow) = flow {
            outcome.connections += 1;
            if let Err(error) = flow {
                eprintln!("upgrade: {error:#}");
                outcome.broken += 1;
            }
        }
        outcome.broken += self.idle.finish()?;
        Ok(outcome)
    }
}

fn start_stream(seed: u64, from: &Guest, to: &Guest, stop: &Arc<AtomicBool>) -> Result<Stream> {
    let address = SocketAddr::from((to.address, STREAM_PORT));
    let listener = to.namespace.enter(move || TcpListener::bind(address).context("listening for a stream"))?;
    let receiver = to.namespace.spawn(move || stream::receive(&listener, seed))?;
    let stop = Arc::clone(stop);
    let sender = from.namespace.spawn(move || stream::send(address, seed, STREAM_BYTES_PER_S, &stop))?;
    Ok((sender, receiver))
}

/// Sends datagrams of `count` sessions in turn until `stop`. Nothing answers them.
fn keep_sessions(to: std::net::IpAddr, count: u32, stop: &AtomicBool) -> Result<()> {
    let sockets = (0..count.div_ceil(PORTS)).map(|_| UdpSocket::bind("0.0.0.0:0"));
    let sockets = sockets.collect::<std::io::Result<Vec<_>>>().context("opening sockets for datagrams")?;
    for pause in PAUSE.into_iter().chain(std::iter::repeat(PAUSE[1])) {
        for number in 0..count {
            if number % BURST == 0 {
                if stop.load(Ordering::Relaxed) {
                    return Ok(());
                }
                std::thread::sleep(pause);
            }
            let port = FIRST_PORT + (number % PORTS) as u16;
            // A full queue, while nothing is fetched from the guest, is no error: the next round is in time.
            let _ = sockets[(number / PORTS) as usize].send_to(&[0; 16], (to, port));
        }
    }
    Ok(())
}
