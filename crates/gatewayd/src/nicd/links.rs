//! The pods' memif interfaces: threads that wait for clients, and rings for the pipeline.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context as _, Result};
use bifrost_nicpipe::{Links, Place, Ring, Rings};
use bifrost_port::memif::{FromClient, Server, ServerConfig, ToClient};

/// Delay after which a client that failed may try again.
const PAUSE: Duration = Duration::from_millis(100);

/// A client of an interface has connected or disconnected.
#[derive(Debug)]
pub(super) struct Event {
    pub(super) place: Place,
    /// The identifier of the pod: see [`Listener::start`].
    pub(super) id: u64,
    pub(super) what: Change,
}

#[derive(Debug)]
pub(super) enum Change {
    Up(Vec<ToClient>, Vec<FromClient>),
    Down,
}

/// Listens for the clients of an interface, in a separate thread.
#[derive(Debug)]
pub(super) struct Listener {
    server: Arc<Server>,
    thread: JoinHandle<()>,
}

impl Listener {
    /// Starts listening. `id` distinguishes this pod from earlier ones with the same number.
    pub(super) fn start(
        place: Place,
        id: u64,
        name: &str,
        path: PathBuf,
        rings: u16,
        events: Sender<Event>,
    ) -> Result<Self> {
        let shown = path.display().to_string();
        let config = ServerConfig { path, name: name.chars().take(31).collect(), id: 0, rings };
        let server = Arc::new(Server::bind(config).with_context(|| format!("listening on {shown}"))?);
        let (name, listening) = (name.to_owned(), Arc::clone(&server));
        let work = move || listen(&listening, place, id, &name, &events);
        let thread = thread::Builder::new().name("memif".to_owned()).spawn(work).context("starting a thread")?;
        Ok(Listener { server, thread })
    }

    /// Disconnects the client, and removes the socket.
    pub(super) fn stop(self) {
        self.server.close();
        let _ = self.thread.join();
    }
}

fn listen(server: &Server, place: Place, id: u64, name: &str, events: &Sender<Event>) {
    let tell = |what| events.send(Event { place, id, what }).is_ok();
    while !server.is_closed() {
        let mut client = match server.accept() {
            Ok(client) => client,
            Err(_) if server.is_closed() => return,
            Err(error) => {
                tracing::warn!(pod = name, interface = place.interface, %error, "a client was refused");
                thread::sleep(PAUSE);
                continue;
            }
        };
        let (to_client, from_client) = client.take_rings();
        tracing::info!(pod = name, interface = place.interface, client = client.client, "connected");
        if !tell(Change::Up(to_client, from_client)) {
            return;
        }
        let reason = client.wait();
        tracing::info!(pod = name, interface = place.interface, reason, "disconnected");
        if !tell(Change::Down) {
            return;
        }
    }
}

/// The rings of one interface: first the one for control traffic, then those of the cores.
#[derive(Debug, Default)]
pub(super) struct Link {
    pub(super) to_client: Vec<ToClient>,
    pub(super) from_client: Vec<FromClient>,
}

impl Link {
    /// Makes new packets in its rings visible to the client.
    pub(super) fn publish(&mut self) {
        for ring in &mut self.to_client {
            ring.publish();
        }
    }

    pub(super) fn want_interrupts(&self, wanted: bool) {
        for ring in &self.from_client {
            ring.want_interrupts(wanted);
        }
    }

    /// Whether the client has truncated its memory.
    pub(super) fn is_lost(&self) -> bool {
        self.to_client.iter().any(ToClient::is_lost)
    }

    fn ring(&mut self, ring: Ring) -> Option<&mut ToClient> {
        let number = match ring {
            Ring::Priority => 0,
            Ring::Core(core) => usize::from(core) + 1,
        };
        self.to_client.get_mut(number)
    }
}

/// The rings of all interfaces, by pod and interface.
pub(super) struct AllLinks<'a>(pub(super) &'a mut [Vec<Link>]);

impl Links for AllLinks<'_> {
    fn rings(&mut self, place: Place) -> impl Rings {
        &mut self.0[place.pod][place.interface]
    }
}

impl Rings for &mut Link {
    fn has_room(&mut self, ring: Ring) -> bool {
        self.ring(ring).is_some_and(|ring| ring.room() > 0)
    }

    fn put(&mut self, ring: Ring, parts: &[&[u8]]) -> bool {
        self.ring(ring).is_some_and(|ring| ring.push(parts).is_ok())
    }
}
