//! The cost of this program and the machine alone: a server within this program sends changes to the agents at the same
//! rate.

use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Result;
use bifrost_relay_api::{Change, ToAgent, Welcome, pb};
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::{Request, Response, Status, Streaming};

use crate::agents::{Agents, lock, mark};

/// Queue length per agent, messages.
const WAITING: usize = 1000;
/// Number of changes measured.
const CHANGES: usize = 200;

type Sender = mpsc::Sender<Result<pb::ToAgent, Status>>;

/// Sends agents the messages of a channel.
#[derive(Clone, Debug, Default)]
struct Teller(Arc<Mutex<Vec<Sender>>>);

#[tonic::async_trait]
impl pb::relay_server::Relay for Teller {
    type FollowStream = Pin<Box<dyn Stream<Item = Result<pb::ToAgent, Status>> + Send>>;

    async fn follow(&self, request: Request<Streaming<pb::FromAgent>>) -> Result<Response<Self::FollowStream>, Status> {
        let (send, receive) = mpsc::channel(WAITING);
        let mut incoming = request.into_inner();
        // Reports are received and dropped.
        tokio::spawn(async move { while let Ok(Some(_)) = incoming.message().await {} });
        for message in [ToAgent::Welcome(Welcome { version: 1, ..Welcome::default() }), ToAgent::InSync(1)] {
            send.send(Ok(message.into())).await.map_err(|e| Status::internal(e.to_string()))?;
        }
        lock(&self.0).push(send);
        Ok(Response::new(Box::pin(ReceiverStream::new(receive))))
    }
}

/// Time that each agent takes to receive a change that is sent to `told` agents.
pub(crate) async fn run(hosts: usize, told: usize, rate: u32) -> Result<Vec<Duration>> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let endpoint = format!("http://{}", listener.local_addr()?);
    let teller = Teller::default();
    let service = pb::relay_server::RelayServer::new(teller.clone());
    let server = tonic::transport::Server::builder().tcp_nodelay(true).add_service(service);
    let server = tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    let mut agents = Agents::start(hosts, &endpoint)?;
    agents.wait_in_sync(1, Duration::from_secs(60)).await?;
    let mut interval = tokio::time::interval(Duration::from_secs(1) / rate.max(1));
    for number in 0..CHANGES {
        interval.tick().await;
        let key = format!("100/10.0.{}.{}/32", number >> 8, number & 255);
        let spec = "{\"mac\":\"02:00:0a:00:00:01\",\"peer\":\"h0\",\"vni\":100}";
        agents.expect(mark("route", &key, spec));
        let senders: Vec<Sender> = lock(&teller.0).iter().skip(number % hosts.max(1)).take(told).cloned().collect();
        for send in senders {
            let change = Change { kind: "route".into(), key: key.clone(), spec: Some(spec.into()), committed_ms: 0 };
            for message in [ToAgent::Changes(vec![change]), ToAgent::InSync(number as u64 + 2)] {
                let _ = send.send(Ok(message.into())).await;
            }
        }
    }
    tokio::time::sleep(Duration::from_millis(500)).await;
    let times = agents.marks().into_iter().flat_map(|(_, took)| took).collect();
    agents.stop();
    server.abort();
    Ok(times)
}
