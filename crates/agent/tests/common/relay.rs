//! A relay that says what the test wants.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::mpsc as std_mpsc;
use std::time::Duration;

use bifrost_relay_api::tls::is_of_host;
use bifrost_relay_api::{Change, FromAgent, Hello, Report, ToAgent, Welcome, pb};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::transport::{Server, ServerTlsConfig};
use tonic::{Request, Response, Status, Streaming};

/// How long anything may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// A relay; it goes away when it is dropped, and its connections with it.
pub struct Relay {
    pub address: SocketAddr,
    sessions: std_mpsc::Receiver<Session>,
    runtime: Option<Runtime>,
}

/// A stream with an agent.
pub struct Session {
    pub hello: Hello,
    say: mpsc::Sender<Result<pb::ToAgent, Status>>,
    reports: std_mpsc::Receiver<Report>,
}

struct Service {
    sessions: std_mpsc::Sender<Session>,
    secure: bool,
}

#[tonic::async_trait]
impl pb::relay_server::Relay for Service {
    type FollowStream = Pin<Box<dyn Stream<Item = Result<pb::ToAgent, Status>> + Send>>;

    async fn follow(&self, request: Request<Streaming<pb::FromAgent>>) -> Result<Response<Self::FollowStream>, Status> {
        let certificates = request.peer_certs();
        let mut incoming = request.into_inner();
        let first = incoming.message().await?.ok_or_else(|| Status::invalid_argument("nothing was said"))?;
        let Ok(FromAgent::Hello(hello)) = FromAgent::try_from(first) else {
            return Err(Status::invalid_argument("no hello"));
        };
        if self.secure && !certificates.is_some_and(|all| is_of_host(&all, &hello.host)) {
            return Err(Status::permission_denied("another host's certificate"));
        }
        let (say, said) = mpsc::channel(4);
        let (report, reports) = std_mpsc::channel();
        tokio::spawn(async move {
            while let Ok(Some(message)) = incoming.message().await {
                let Ok(FromAgent::Report(told)) = FromAgent::try_from(message) else { return };
                if report.send(told).is_err() {
                    return;
                }
            }
        });
        let _ = self.sessions.send(Session { hello, say, reports });
        Ok(Response::new(Box::pin(ReceiverStream::new(said))))
    }
}

impl Relay {
    /// Listens on a port of 127.0.0.1; 0: any.
    pub fn start(port: u16, tls: Option<ServerTlsConfig>) -> Relay {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let (send, sessions) = std_mpsc::channel();
        let service = Service { sessions: send, secure: tls.is_some() };
        let listener = runtime.block_on(TcpListener::bind(("127.0.0.1", port))).unwrap();
        let address = listener.local_addr().unwrap();
        let mut server = Server::builder();
        if let Some(tls) = tls {
            server = server.tls_config(tls).unwrap();
        }
        let service = pb::relay_server::RelayServer::new(service);
        runtime.spawn(server.add_service(service).serve_with_incoming(TcpListenerStream::new(listener)));
        Relay { address, sessions, runtime: Some(runtime) }
    }

    /// The next agent that comes, unwelcomed.
    pub fn greeted(&self) -> Session {
        self.sessions.recv_timeout(PATIENCE).expect("no agent comes")
    }

    /// The next agent that comes, welcomed.
    pub fn session(&self) -> Session {
        let session = self.greeted();
        session.say(ToAgent::Welcome(Welcome { version: 1, relay: "test".into(), ..Welcome::default() }));
        session
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Session {
    pub fn say(&self, message: ToAgent) {
        self.say_raw(message.into());
    }

    pub fn say_raw(&self, message: pb::ToAgent) {
        // The agent may be gone: the test will notice.
        let _ = self.say.blocking_send(Ok(message));
    }

    /// A group of changes.
    pub fn send(&self, changes: Vec<Change>, revision: u64) {
        for piece in bifrost_relay_api::pieces(changes) {
            self.say(ToAgent::Changes(piece));
        }
        self.say(ToAgent::InSync(revision));
    }

    /// Waits for a report of at least this revision.
    pub fn reported(&self, revision: u64) -> Report {
        loop {
            let report = self.reports.recv_timeout(PATIENCE).expect("no report comes");
            if report.revision >= revision {
                return report;
            }
        }
    }

    /// Whether the agent ends the stream.
    pub fn is_ended(&self) -> bool {
        let deadline = std::time::Instant::now() + PATIENCE;
        while !self.say.is_closed() {
            if std::time::Instant::now() > deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        true
    }
}

/// A change as the relay sends it.
pub fn set(kind: &str, key: &str, spec: &serde_json::Value) -> Change {
    let committed_ms = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis() as u64;
    Change { kind: kind.into(), key: key.into(), spec: Some(spec.to_string().into_bytes().into()), committed_ms }
}

/// An object that is to go.
pub fn gone(kind: &str, key: &str) -> Change {
    Change { kind: kind.into(), key: key.into(), ..Change::default() }
}
