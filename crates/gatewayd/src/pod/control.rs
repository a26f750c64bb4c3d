//! The control thread of a pod, which uses the priority rings. It resolves next hops, speaks BGP, and decides which
//! links work.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bifrost_control::api;
use bifrost_plb::TRAILER_LEN;
use bifrost_port::clock::monotonic_ns;
use bifrost_wire::Mac;

use super::announcer::Announcer;
use super::config::LinkSettings;
use super::health::Health;
use super::life::Shared;
use super::links::{LinkState, Links};
use super::mailbox::{Attached, Mailbox, wait};
use super::neighbours::Neighbours;
use super::tunnels::Tunnels;
use super::worker::originate;
use crate::capture::{Outcome, Tap};

/// Maximum number of next hops of the pod's tables that are resolved.
const MAX_NEXT_HOPS: usize = 4096;

/// The state that the control thread reports to the status server.
pub(super) type SharedTold = Arc<Mutex<Told>>;

/// See [`SharedTold`].
#[derive(Debug, Default)]
pub(super) struct Told {
    pub(super) announcing: bool,
    pub(super) refused_hop_limit_packets: u64,
    pub(super) peers: Vec<api::GatewayPeer>,
    pub(super) links: Vec<api::GatewayLink>,
    /// Next hops, and their link-layer addresses if known.
    pub(super) next_hops: Vec<(IpAddr, Option<String>)>,
}

impl Told {
    /// Whether any address is announced to a proxy.
    pub(super) fn announces(&self) -> bool {
        self.peers.iter().any(|peer| !peer.announced.is_empty())
    }
}

/// The control thread's state of a link.
pub(super) struct OfLink {
    settings: LinkSettings,
    known: Neighbours,
    announcer: Option<Announcer>,
    state: LinkState,
}

impl OfLink {
    /// `addresses`: those of the pod's tunnels. `watched`: the router is probed often, because other links can replace
    /// this one if the router does not answer.
    pub(super) fn new(settings: LinkSettings, mac: Mac, addresses: &[IpAddr], watched: bool) -> Self {
        // The pod sends its requests from its address on the link, if it has one, because neighbours do not know the
        // addresses of tunnels.
        let own = settings.addresses.iter().chain(addresses).copied().collect();
        let mut known = Neighbours::new(mac, own);
        let announcer = settings.bgp.clone().map(|bgp| Announcer::new(bgp, mac));
        announcer.iter().flat_map(Announcer::peers).for_each(|address| known.want(address));
        match settings.router {
            Some(router) if watched => known.watch(router),
            Some(router) => known.want(router),
            None => {}
        }
        OfLink { settings, known, announcer, state: LinkState::Down }
    }

    fn state(&self, is_connected: bool) -> LinkState {
        let answers = self.settings.router.is_none_or(|router| self.known.get(router).is_some());
        if !is_connected || !answers {
            return LinkState::Down;
        }
        match self.announcer.as_ref().and_then(Announcer::is_watched_up) {
            Some(false) => LinkState::Unwatched,
            Some(true) | None => LinkState::Up,
        }
    }

    fn told(&self, is_connected: bool, egress: usize) -> api::GatewayLink {
        let router = self.settings.router;
        api::GatewayLink {
            addresses: self.settings.addresses.iter().map(ToString::to_string).collect(),
            connected: is_connected,
            router: router.map(|router| router.to_string()),
            router_answers: router.map(|router| self.known.get(router).is_some()),
            state: self.state.name().into(),
            egress: egress as u64,
        }
    }
}

/// The control thread.
pub(super) struct Control {
    pub(super) queues: Vec<Attached>,
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) of_links: Vec<OfLink>,
    pub(super) links: Arc<Links>,
    /// Next hops of the pod's tables. On each link, other neighbours may stand for them.
    pub(super) next_hops: BTreeSet<IpAddr>,
    pub(super) tunnels: Tunnels,
    pub(super) health: Health,
    pub(super) missing: Receiver<IpAddr>,
    /// For tests: control frames that arrived with the data, and their links.
    pub(super) from_workers: Receiver<(usize, Vec<u8>)>,
    pub(super) wait: Duration,
    pub(super) told: SharedTold,
    pub(super) shared: Arc<Shared>,
    pub(super) pod: u16,
    pub(super) tap: Tap,
}

impl Control {
    /// Runs until the pod ends.
    pub(super) fn run(&mut self) {
        while !self.shared.is_stopping() {
            if self.mailbox.apply(&mut self.queues) {
                self.queues.iter().for_each(|attached| attached.queue.want_interrupts(true));
            }
            let now = monotonic_ns();
            self.tap.poll();
            self.receive(now);
            let mut is_changed = false;
            for address in self.missing.try_iter().take(64) {
                is_changed |= self.next_hops.len() < MAX_NEXT_HOPS && self.next_hops.insert(address);
            }
            if is_changed {
                self.want_next_hops();
            }
            self.ask(now);
            self.announce(now);
            self.keep_tunnels(now);
            self.learn(is_changed);
            let of_links = self.of_links.iter().filter_map(|link| link.announcer.as_ref()?.deadline());
            let until =
                of_links.chain(self.tunnels.deadline()).min().map(|due| Duration::from_nanos(due.saturating_sub(now)));
            wait(&self.mailbox, &self.queues, until.map_or(self.wait, |until| self.wait.min(until)));
        }
    }

    /// Makes every link resolve its neighbours for the next hops.
    pub(super) fn want_next_hops(&mut self) {
        for link in &mut self.of_links {
            for next_hop in &self.next_hops {
                link.settings.via(*next_hop).into_iter().for_each(|address| link.known.want(address));
            }
        }
    }

    /// Processes received frames, and answers them.
    fn receive(&mut self, now: u64) {
        let Control { queues, of_links, tap, pod, .. } = self;
        for Attached { link, queue, .. } in queues.iter_mut() {
            for _ in 0..queue.available() {
                let Some(received) = queue.received() else { break };
                let end = received.start + received.len.saturating_sub(TRAILER_LEN);
                let frame = received.buffer.get(received.start..end).unwrap_or_default();
                tap.begin(frame, false);
                tap.end(Outcome::Taken, false);
                let reply = take(&mut of_links[*link], now, frame);
                let (start, trailer) = (received.start, drop_trailer(*pod));
                received.buffer[start..start + TRAILER_LEN].copy_from_slice(&trailer);
                queue.send_received(start, TRAILER_LEN);
                if let Some(reply) = reply.filter(|_| queue.room() > 0) {
                    tap.originated(&reply);
                    originate(queue, &reply, *pod);
                }
            }
            queue.publish();
        }
        for (link, frame) in self.from_workers.try_iter().take(64) {
            if let Some(reply) = take(&mut of_links[link], now, &frame) {
                send(queues, link, tap, &reply, *pod);
            }
        }
    }

    /// Sends the due requests for neighbours of each link, on all of its interfaces.
    fn ask(&mut self, now: u64) {
        for (number, link) in self.of_links.iter_mut().enumerate() {
            if !self.queues.iter().any(|attached| attached.link == number) {
                continue;
            }
            let questions = link.known.questions(now);
            for Attached { queue, .. } in self.queues.iter_mut().filter(|attached| attached.link == number) {
                for question in &questions {
                    if queue.room() > 0 {
                        self.tap.originated(question);
                        originate(queue, question, self.pod);
                    }
                }
                queue.publish();
            }
        }
    }

    /// Runs BGP and BFD on each link, and determines which links work.
    fn announce(&mut self, now: u64) {
        let works = self.health.check(now) && !self.shared.is_draining();
        let Control { of_links, links, queues, shared, tap, pod, .. } = self;
        for (number, link) in of_links.iter_mut().enumerate() {
            let is_connected = links.is_connected(number);
            let OfLink { settings, known, announcer: Some(announcer), .. } = link else { continue };
            // While the pipeline is gone, no proxy is reachable.
            let station = |address| known.get(address).filter(|_| is_connected);
            let answers = is_connected && settings.router.is_none_or(|router| known.get(router).is_some());
            if shared.is_leaving() {
                announcer.shut_down(now);
            }
            for frame in announcer.poll(now, works && answers, station) {
                send(queues, number, tap, &frame, *pod);
            }
        }
        queues.iter_mut().for_each(|attached| attached.queue.publish());
        let mut states = Vec::with_capacity(of_links.len());
        for (number, link) in of_links.iter_mut().enumerate() {
            let state = link.state(links.is_connected(number));
            if std::mem::replace(&mut link.state, state) != state {
                tracing::info!(link = number, state = state.name(), "the state of a link has changed");
            }
            states.push(state);
        }
        links.set_states(&states);
        self.tell();
    }

    /// Sends keepalives of tunnels, over the link that packets from the first link leave by.
    fn keep_tunnels(&mut self, now: u64) {
        let Control { of_links, links, queues, tunnels, tap, pod, .. } = self;
        let number = links.egress(0);
        let Some(OfLink { settings, known, .. }) = of_links.get(number) else { return };
        for frame in tunnels.poll(now, |hop| known.get(settings.via(hop)?)) {
            send(queues, number, tap, &frame, *pod);
        }
        queues.iter_mut().for_each(|attached| attached.queue.publish());
    }

    /// Passes changes of known neighbours to the workers. `is_changed`: there are new next hops.
    fn learn(&mut self, is_changed: bool) {
        let mut is_told = false;
        for (number, link) in self.of_links.iter_mut().enumerate() {
            let changes = link.known.changes();
            if changes.is_none() && !is_changed {
                continue;
            }
            let (settings, known) = (&link.settings, &link.known);
            let by_next_hop = self.next_hops.iter().filter_map(|hop| Some((*hop, known.get(settings.via(*hop)?)?)));
            self.links.set_known(number, by_next_hop);
            is_told = true;
        }
        if is_told {
            let all = self.of_links.iter().flat_map(|link| link.known.iter());
            let next_hops = all.map(|(address, mac)| (address, mac.map(|mac| mac.to_string()))).collect();
            self.told.lock().unwrap_or_else(PoisonError::into_inner).next_hops = next_hops;
        }
    }

    fn tell(&self) {
        let announcers = || self.of_links.iter().filter_map(|link| link.announcer.as_ref());
        let peers = self.of_links.iter().enumerate().flat_map(|(number, link)| {
            let peers = link.announcer.as_ref().map(Announcer::state).unwrap_or_default();
            peers.into_iter().map(move |peer| api::GatewayPeer { link: number as u64, ..peer })
        });
        let links = self.of_links.iter().enumerate();
        let links = links.map(|(number, link)| link.told(self.links.is_connected(number), self.links.egress(number)));
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        told.announcing = announcers().any(Announcer::is_announcing);
        told.refused_hop_limit_packets = announcers().map(Announcer::refused_hop_limit_packets).sum();
        told.peers = peers.collect();
        told.links = links.collect();
    }
}

/// Passes a frame to the neighbours and BGP of its link. Returns the reply, if any.
fn take(link: &mut OfLink, now: u64, frame: &[u8]) -> Option<Vec<u8>> {
    let reply = link.known.on_frame(now, frame);
    if let Some(announcer) = &mut link.announcer {
        announcer.on_frame(now, frame);
    }
    reply
}

/// Sends a frame of the pod's own, over the first interface of the link that has room.
fn send(queues: &mut [Attached], link: usize, tap: &mut Tap, frame: &[u8], pod: u16) {
    let has_room = |attached: &mut Attached| attached.link == link && attached.queue.room() > 0;
    if let Some(number) = queues.iter_mut().position(has_room) {
        tap.originated(frame);
        originate(&mut queues[number].queue, frame, pod);
    }
}

/// The trailer that returns a packet for the pod itself.
fn drop_trailer(pod: u16) -> [u8; TRAILER_LEN] {
    let trailer = bifrost_plb::Trailer { psn: 0, payload: None, pod, queue: 0, drop: true, unordered: true };
    trailer.emit()
}
