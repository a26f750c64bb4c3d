//! What is told of many things, such as of a hundred thousand connections: in pieces, of which a turn makes few, so that no packet
//! waits for a list.
//!
//! Who asks has the cursor. It asks for each page, and gets some entries and where to go on; the worker remembers the page that it is
//! making, which takes a bounded number of turns, and nothing else. So several may ask at a time, and one that goes away leaves nothing behind. Things have places, at which they stay while they exist. So
//! something that is there all the while is told once; what comes or goes meanwhile may be told or not.

use bifrost_avs::{MovingSession, PortId, SessionView};
use bifrost_port::PolledUnderlay;
use bifrost_port::clock::monotonic_ns;
use bifrost_rte::ConnSnapshot;

use crate::core::Core;
use crate::handle::{Gone, Mailbox, Remote};
use crate::snapshot::{PathView, PortView};
use crate::worker::Device;

/// The most entries of a page, but for the last place's.
const PAGE: usize = 1024;
/// The most places of a piece: where most are free, there is little to be told.
const PLACES: u32 = 4096;
/// The most pieces of a page.
const PIECES: u32 = 64;
/// Connections between two looks at the clock: some hundred nanoseconds each, if they are in no cache.
const CONNECTIONS: u32 = 8;
/// Ports, or peers with their paths, between two looks at the clock: about a microsecond each.
const PORTS: u32 = 1;

/// What a turn has left for questions.
pub struct Share<'a> {
    clock: &'a dyn Fn() -> u64,
    until: u64,
}

impl std::fmt::Debug for Share<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Share").field("until", &self.until).finish_non_exhaustive()
    }
}

impl<'a> Share<'a> {
    /// `ns` from now on, on a clock.
    pub fn new(clock: &'a dyn Fn() -> u64, ns: u64) -> Self {
        Share { clock, until: clock().saturating_add(ns) }
    }

    /// Nothing is left.
    pub fn is_used_up(&self) -> bool {
        (self.clock)() >= self.until
    }

    /// Looks at some of `places` places, from `from` on: at one at least, and then until the share is used up or the page is full.
    /// Returns where to go on, if there is more.
    fn look<T>(
        &self,
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
            if page.len() >= PAGE || seen >= PLACES || seen.is_multiple_of(stride) && self.is_used_up() {
                break;
            }
        }
        (at < places).then_some(at)
    }
}

/// Makes a piece of a list, from a place on; returns where to go on.
type Look<T> = Box<dyn FnMut(&Core<Device>, u32, &Share<'_>, &mut Vec<T>) -> Option<u32> + Send>;

/// A list, page by page: each is asked for when it is wanted. Pages may be empty. Ends after an error.
pub struct Pages<U: 'static, T> {
    mailbox: Mailbox<U>,
    /// Where to go on, and who looks; `None`: nothing is left.
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
        // Made here: the worker has better things to do.
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
    /// What `see` tells of each connection, given the number of its peer.
    pub fn connections<T: Send + 'static>(
        &self,
        mut see: impl FnMut(u16, &ConnSnapshot) -> Option<T> + Send + 'static,
    ) -> Pages<U, T> {
        self.pages(move |core, from, share, page| connections(core, from, share, page, &mut see))
    }

    /// All ports that this worker serves.
    pub fn ports(&self) -> Pages<U, PortView> {
        self.pages(|core, from, share, page| {
            share.look(from, core.port_places(), PORTS, page, |place, page| page.extend(core.port_view(place as u16)))
        })
    }

    /// Those of these ports that this worker serves, in order.
    pub fn ports_of(&self, owners: Vec<u16>) -> Pages<U, PortView> {
        self.pages(move |core, from, share, page| {
            share.look(from, owners.len() as u32, PORTS, page, |place, page| {
                page.extend(core.port_view(owners[place as usize]));
            })
        })
    }

    /// Of each port, packets from and to its guest.
    pub fn traffic(&self) -> Pages<U, (u64, u64)> {
        self.pages(|core, from, share, page| {
            let places = core.port_places();
            share.look(from, places, CONNECTIONS, page, |place, page| page.extend(core.port_traffic(place as u16)))
        })
    }

    /// All paths; those to one peer are next to each other, and on one page.
    pub fn paths(&self) -> Pages<U, PathView> {
        self.pages(|core, from, share, page| {
            share.look(from, core.peer_places(), PORTS, page, |place, page| page.extend(core.path_views(place as u16)))
        })
    }

    /// What `see` tells of each session of security groups, given its place, from a place on.
    pub fn sessions<T: Send + 'static>(
        &self,
        from: u32,
        mut see: impl FnMut(u32, &SessionView) -> Option<T> + Send + 'static,
    ) -> Pages<U, T> {
        let look = move |core: &Core<Device>, from, share: &Share<'_>, page: &mut Vec<T>| {
            let switch = core.switch();
            share.look(from, switch.session_places(), CONNECTIONS, page, |place, page| {
                page.extend(switch.session_at(place).and_then(|session| see(place, &session)));
            })
        };
        Pages { mailbox: self.mailbox().clone(), rest: Some((from, Box::new(look))) }
    }

    /// Sessions of a port, for the host to which its guest moves.
    pub fn moving_sessions(&self, port: PortId) -> Pages<U, MovingSession> {
        self.pages(move |core, from, share, page| {
            let switch = core.switch();
            share.look(from, switch.session_places(), CONNECTIONS, page, |place, page| {
                page.extend(switch.moving_session_at(port, place));
            })
        })
    }

    /// Goes on with sessions that a port's guest had on another host, some in each turn; how many of them there was a place for.
    ///
    /// # Errors
    /// The worker has ended.
    pub fn take_over_sessions(&self, port: PortId, sessions: Vec<MovingSession>) -> Result<u64, Gone> {
        let (mut from, mut taken) = (0, 0);
        self.mailbox().ask(move |worker, share| {
            let switch = worker.core.switch_mut();
            switch.advance(monotonic_ns());
            let next = share.look(from, sessions.len() as u32, CONNECTIONS, &mut Vec::<()>::new(), |place, _| {
                taken += u64::from(switch.take_over_session(port, &sessions[place as usize]));
            });
            from = next.unwrap_or_default();
            next.is_none().then_some(taken)
        })
    }

    /// What `see` tells of each of `count` things, which take a hundred nanoseconds or so each.
    pub fn each<T: Send + 'static>(
        &self,
        count: u32,
        mut see: impl FnMut(&Core<Device>, u32) -> T + Send + 'static,
    ) -> Pages<U, T> {
        self.pages(move |core, from, share, page| {
            share.look(from, count, CONNECTIONS, page, |place, page| page.push(see(core, place)))
        })
    }

    fn pages<T>(
        &self,
        look: impl FnMut(&Core<Device>, u32, &Share<'_>, &mut Vec<T>) -> Option<u32> + Send + 'static,
    ) -> Pages<U, T> {
        Pages { mailbox: self.mailbox().clone(), rest: Some((0, Box::new(look))) }
    }
}

/// A piece of the list of connections.
fn connections<P: bifrost_port::GuestPort, T>(
    core: &Core<P>,
    from: u32,
    share: &Share<'_>,
    page: &mut Vec<T>,
    see: &mut impl FnMut(u16, &ConnSnapshot) -> Option<T>,
) -> Option<u32> {
    share.look(from, core.engine().places(), CONNECTIONS, page, |place, page| {
        page.extend(core.connection_view(place).and_then(|(peer, connection)| see(peer, &connection)));
    })
}

#[cfg(test)]
#[path = "lists_tests.rs"]
mod tests;
