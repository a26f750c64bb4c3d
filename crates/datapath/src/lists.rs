//! Long lists, such as of a hundred thousand connections, are made in small pieces, a few per turn, so that no packet
//! waits for a list.
//!
//! The caller holds the cursor. It asks for one page after the other, and gets some entries and where to continue. The
//! worker only remembers the page in progress, which takes a bounded number of turns. So several callers may ask at the
//! same time, and one that goes away leaves nothing behind. Entries have places, at which they stay while they exist.
//! So an entry that exists all the time is listed once; one that appears or disappears meanwhile may be listed or not.

use bifrost_avs::{MovingSession, PortId, SessionView};
use bifrost_port::PolledUnderlay;
use bifrost_port::clock::monotonic_ns;
use bifrost_rte::ConnSnapshot;

use crate::core::Core;
use crate::handle::Remote;
use crate::share::Share;
use crate::snapshot::{PathView, PortView};
use crate::worker::{Device, Gone, Mailbox};

/// A page ends with the place whose entries reach this number.
const PAGE: usize = 1024;
/// Maximum places of a piece: if most of them are free, there are few entries.
const PLACES: u32 = 4096;
/// Maximum pieces of a page.
const PIECES: u32 = 64;
/// Connections between two readings of the clock: some hundred nanoseconds each, if they are in no cache.
const CONNECTIONS: u32 = 8;
/// Ports, or peers with their paths, between two readings of the clock: about a microsecond each.
const PORTS: u32 = 1;

/// Makes a piece of a list, starting at a place; returns where to continue.
type Look<T> = Box<dyn FnMut(&Core<Device>, u32, &Share<'_>, &mut Vec<T>) -> Option<u32> + Send>;

/// A list, page by page, each made on demand. Pages may be empty. Ends after an error.
pub struct Pages<U: 'static, T> {
    mailbox: Mailbox<U>,
    /// Where to continue, and the function that makes pieces; `None`: the list is complete.
    rest: Option<(u32, Look<T>)>,
}

impl<U, T> std::fmt::Debug for Pages<U, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pages").field("next", &self.rest.as_ref().map(|rest| rest.0)).finish_non_exhaustive()
    }
}

impl<U: PolledUnderlay + 'static, T: Send + 'static> Iterator for Pages<U, T> {
    type Item = Result<Vec<T>, Gone>;

    fn next(&mut self) -> Option<Self::Item> {
        let (mut from, look) = self.rest.take()?;
        // Allocated here, not on the worker.
        let mut making = Some((Vec::with_capacity(PAGE), look));
        let mut pieces = 0;
        let made = self.mailbox.ask(move |worker, share| {
            let (page, look) = making.as_mut()?;
            let next = look(&worker.core, from, share, page);
            pieces += 1;
            match next {
                Some(next) if page.len() < PAGE && pieces < PIECES => {
                    from = next;
                    None
                }
                next => making.take().map(|(page, look)| (page, next, look)),
            }
        });
        Some(made.map(|(page, next, look)| {
            self.rest = next.map(|next| (next, look));
            page
        }))
    }
}

impl<U: PolledUnderlay + 'static> Remote<U> {
    /// The results of `see` for each connection, given the number of its peer.
    pub fn connections<T: Send + 'static>(
        &self,
        mut see: impl FnMut(u32, &ConnSnapshot) -> Option<T> + Send + 'static,
    ) -> Pages<U, T> {
        self.pages(move |core, from, share, page| connections(core, from, share, page, &mut see))
    }

    /// All ports that this worker serves.
    pub fn ports(&self) -> Pages<U, PortView> {
        self.pages(|core, from, share, page| {
            look(share, from, core.port_places(), PORTS, page, |place, page| page.extend(core.port_view(place)))
        })
    }

    /// Those of the given ports that this worker serves, in order.
    pub fn ports_of(&self, owners: Vec<u32>) -> Pages<U, PortView> {
        self.pages(move |core, from, share, page| {
            look(share, from, owners.len() as u32, PORTS, page, |place, page| {
                page.extend(core.port_view(owners[place as usize]));
            })
        })
    }

    /// Packets from and to the guest of each port.
    pub fn traffic(&self) -> Pages<U, (u64, u64)> {
        self.pages(|core, from, share, page| {
            let places = core.port_places();
            look(share, from, places, CONNECTIONS, page, |place, page| page.extend(core.port_traffic(place)))
        })
    }

    /// All paths; those to one peer are adjacent, and on one page.
    pub fn paths(&self) -> Pages<U, PathView> {
        self.pages(|core, from, share, page| {
            look(share, from, core.peer_places(), PORTS, page, |place, page| page.extend(core.path_views(place)))
        })
    }

    /// The results of `see` for each session of security groups, given its place, starting at a place.
    pub fn sessions<T: Send + 'static>(
        &self,
        from: u32,
        mut see: impl FnMut(u32, &SessionView) -> Option<T> + Send + 'static,
    ) -> Pages<U, T> {
        let look = move |core: &Core<Device>, from, share: &Share<'_>, page: &mut Vec<T>| {
            let switch = core.switch();
            look(share, from, switch.session_places(), CONNECTIONS, page, |place, page| {
                page.extend(switch.session_at(place).and_then(|session| see(place, &session)));
            })
        };
        Pages { mailbox: self.mailbox().clone(), rest: Some((from, Box::new(look))) }
    }

    /// Conversations of a port, for the host to which its guest moves.
    pub fn moving_sessions(&self, port: PortId) -> Pages<U, MovingSession> {
        self.pages(move |core, from, share, page| {
            let switch = core.switch();
            look(share, from, switch.moving_places(), CONNECTIONS, page, |place, page| {
                page.extend(switch.moving_session_at(port, place));
            })
        })
    }

    /// Takes over conversations that a port's guest had on another host, some in each turn; returns how many of them
    /// continue here.
    ///
    /// # Errors
    /// The worker has ended.
    pub fn take_over_sessions(&self, port: PortId, sessions: Vec<MovingSession>) -> Result<u64, Gone> {
        let (mut from, mut taken) = (0, 0);
        self.mailbox().ask(move |worker, share| {
            let switch = worker.core.switch_mut();
            switch.advance(monotonic_ns());
            let next = look(share, from, sessions.len() as u32, CONNECTIONS, &mut Vec::<()>::new(), |place, _| {
                taken += u64::from(switch.take_over_session(port, &sessions[place as usize]));
            });
            from = next.unwrap_or_default();
            next.is_none().then_some(taken)
        })
    }

    /// The results of `see` for each of `count` items, each of which may take about a hundred nanoseconds.
    pub fn each<T: Send + 'static>(
        &self,
        count: u32,
        mut see: impl FnMut(&Core<Device>, u32) -> T + Send + 'static,
    ) -> Pages<U, T> {
        self.pages(move |core, from, share, page| {
            look(share, from, count, CONNECTIONS, page, |place, page| page.push(see(core, place)))
        })
    }

    fn pages<T>(
        &self,
        look: impl FnMut(&Core<Device>, u32, &Share<'_>, &mut Vec<T>) -> Option<u32> + Send + 'static,
    ) -> Pages<U, T> {
        Pages { mailbox: self.mailbox().clone(), rest: Some((0, Box::new(look))) }
    }
}

/// Visits some of `places` places, starting at `from`: at least one, and then until the time is used up or the page
/// is full. Returns where to continue, if there are more.
fn look<T>(
    share: &Share<'_>,
    from: u32,
    places: u32,
    stride: u32,
    page: &mut Vec<T>,
    mut see: impl FnMut(u32, &mut Vec<T>),
) -> Option<u32> {
    let mut at = from;
    while at < places {
        see(at, page);
        at += 1;
        let seen = at - from;
        if page.len() >= PAGE || seen >= PLACES || seen.is_multiple_of(stride) && share.is_used_up() {
            break;
        }
    }
    (at < places).then_some(at)
}

/// Makes a piece of the list of connections.
fn connections<P: bifrost_port::GuestPort, T>(
    core: &Core<P>,
    from: u32,
    share: &Share<'_>,
    page: &mut Vec<T>,
    see: &mut impl FnMut(u32, &ConnSnapshot) -> Option<T>,
) -> Option<u32> {
    look(share, from, core.engine().places(), CONNECTIONS, page, |place, page| {
        page.extend(core.connection_view(place).and_then(|(peer, connection)| see(peer, &connection)));
    })
}

#[cfg(test)]
#[path = "lists_tests.rs"]
mod tests;
