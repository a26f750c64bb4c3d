//! The pods' memif interfaces: threads that wait for clients, and rings for the pipeline.

use std::path::PathBuf;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use bifrost_nicpipe::{Links, Place, Ring, Rings};
use bifrost_port::memif::{FromClient, Server, ServerConfig, ToClient};

/// After which a client that failed may try again.
const PAUSE: Duration = Duration::from_millis(100);

/// An interface's client comes or goes.
#[derive(Debug)]
pub(super) enum Event {
    Up(Place, Vec<ToClient>, Vec<FromClient>),
    Down(Place),
}

/// Listens for the client of an interface, in a thread of its own.
pub(super) fn listen(place: Place, name: &str, path: PathBuf, rings: u16, events: Sender<Event>) -> Result<()> {
    let shown = path.display().to_string();
    let config = ServerConfig { path, name: name.chars().take(31).collect(), id: 0, rings };
    let server = Server::bind(config).with_context(|| format!("listening on {shown}"))?;
    let name = name.to_owned();
    let work = move || {
        loop {
            let mut client = match server.accept() {
                Ok(client) => client,
                Err(error) => {
                    tracing::warn!(pod = name, interface = place.interface, %error, "a client was refused");
                    thread::sleep(PAUSE);
                    continue;
                }
            };
            let (to_client, from_client) = client.take_rings();
            tracing::info!(pod = name, interface = place.interface, client = client.client, "connected");
            if events.send(Event::Up(place, to_client, from_client)).is_err() {
                return;
            }
            let reason = client.wait();
            tracing::info!(pod = name, interface = place.interface, reason, "disconnected");
            if events.send(Event::Down(place)).is_err() {
                return;
            }
        }
    };
    thread::Builder::new().name("memif".to_owned()).spawn(work).context("starting a thread")?;
    Ok(())
}

/// The rings of one interface: that of control traffic first, then those of the cores.
#[derive(Debug, Default)]
pub(super) struct Link {
    pub(super) to_client: Vec<ToClient>,
    pub(super) from_client: Vec<FromClient>,
}

impl Link {
    /// Shows the client what was put into its rings.
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

    /// Whether the client has taken its memory away.
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
