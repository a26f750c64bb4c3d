//! The BGP session with one proxy (RFC 4271, section 8), without processing of received routes.
//!
//! The session carries IPv4 prefixes and, if the peer supports them, IPv6 prefixes (RFC 4760, RFC 2545).

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, Ipv6Addr};

use bytes::Bytes;
use ipnet::IpNet;
use rustbgpd_wire::{
    Afi, Capability, MAX_MESSAGE_LEN, Message, NotificationCode, NotificationMessage, OpenMessage, Safi,
    decode_message, encode_message, peek_message_length,
};

use crate::update::updates;

const S: u64 = 1_000_000_000;
/// Interval between attempts to connect.
const RETRY_NS: u64 = S;
/// How long the peer may take until its OPEN and first KEEPALIVE arrive.
const OPEN_NS: u64 = 10 * S;
/// Represents AS numbers above 16 bits in an OPEN (RFC 6793, section 9).
const AS_TRANS: u16 = 23_456;
/// Subcode of Cease: administrative shutdown (RFC 4486).
const SHUTDOWN: u8 = 2;

/// Settings of a [`Speaker`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpeakerConfig {
    /// The AS of both ends.
    pub asn: u32,
    /// The BGP identifier.
    pub router_id: Ipv4Addr,
    /// The next hop of IPv4 prefixes: the pod's address on the link.
    pub next_hop: Ipv4Addr,
    /// The next hop of IPv6 prefixes, likewise; none: no IPv6 prefixes are announced.
    pub next_hop6: Option<Ipv6Addr>,
    /// The proposed hold time, s, at least 3.
    pub hold_s: u16,
}

/// The state of a session (RFC 4271, section 8.2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// There is no connection.
    Idle,
    /// OPEN was sent.
    OpenSent,
    /// OPEN was received; waiting for KEEPALIVE.
    OpenConfirm,
    /// Routes are announced.
    Established,
}

/// A change of the session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// It is established.
    Up,
    /// It has ended, with the reason.
    Down(String),
}

/// One end of a session.
#[derive(Debug)]
pub struct Speaker {
    config: SpeakerConfig,
    state: State,
    /// Routes to announce.
    routes: BTreeSet<IpNet>,
    /// Routes announced to the peer.
    announced: BTreeSet<IpNet>,
    /// IPv6 prefixes can be announced: the peer supports them, and there is a next hop.
    ipv6: bool,
    input: Vec<u8>,
    output: Vec<u8>,
    /// Close the connection after `output` is sent.
    closing: bool,
    /// The negotiated hold time, ns; 0: none.
    hold_ns: u64,
    /// When the hold timer expires; 0: never.
    expires_at: u64,
    keepalive_at: u64,
    retry_at: u64,
    events: Vec<Event>,
}

impl Speaker {
    /// A speaker without a connection or routes.
    pub fn new(config: SpeakerConfig) -> Self {
        Speaker {
            config,
            state: State::Idle,
            routes: BTreeSet::new(),
            announced: BTreeSet::new(),
            ipv6: false,
            input: Vec::new(),
            output: Vec::new(),
            closing: false,
            hold_ns: 0,
            expires_at: 0,
            keepalive_at: 0,
            retry_at: 0,
            events: Vec::new(),
        }
    }

    /// The state of the session.
    pub fn state(&self) -> State {
        self.state
    }

    /// Replaces the routes to announce. The next [`poll`](Self::poll) sends the changes to the peer.
    pub fn announce(&mut self, routes: impl IntoIterator<Item = IpNet>) {
        self.routes = routes.into_iter().map(|net| net.trunc()).collect();
    }

    /// Routes currently announced to the peer.
    pub fn announced(&self) -> impl Iterator<Item = IpNet> + '_ {
        self.announced.iter().copied()
    }

    /// Whether to open a connection now.
    pub fn wants_connection(&self, now: u64) -> bool {
        self.state == State::Idle && !self.closing && now >= self.retry_at
    }

    /// A connection is being opened. If it fails, the next attempt is delayed.
    pub fn connecting(&mut self, now: u64) {
        self.retry_at = now.saturating_add(RETRY_NS);
    }

    /// A connection was opened.
    pub fn connected(&mut self, now: u64) {
        let SpeakerConfig { asn, router_id, hold_s, next_hop6, .. } = self.config;
        self.reset();
        // Without graceful restart (RFC 4724): a dead pod does not forward packets.
        let mut capabilities = vec![
            Capability::MultiProtocol { afi: Afi::Ipv4, safi: Safi::Unicast },
            Capability::RouteRefresh,
            Capability::FourOctetAs { asn },
        ];
        capabilities.extend(next_hop6.map(|_| IPV6_UNICAST));
        self.state = State::OpenSent;
        self.expires_at = now.saturating_add(OPEN_NS);
        self.send(&Message::Open(OpenMessage {
            version: 4,
            my_as: u16::try_from(asn).unwrap_or(AS_TRANS),
            hold_time: hold_s.max(3),
            bgp_identifier: router_id,
            capabilities,
        }));
    }

    /// The connection was closed.
    pub fn closed(&mut self, now: u64, why: &str) {
        if self.state != State::Idle {
            self.down(now, why.to_owned());
        }
        self.reset();
    }

    /// Processes bytes received over the connection.
    pub fn received(&mut self, now: u64, bytes: &[u8]) {
        if self.state == State::Idle || self.closing {
            return;
        }
        self.input.extend_from_slice(bytes);
        loop {
            let len = match peek_message_length(&self.input, MAX_MESSAGE_LEN) {
                Ok(Some(len)) if self.input.len() >= usize::from(len) => usize::from(len),
                Ok(_) => return,
                Err(error) => {
                    return self.refuse(now, NotificationCode::MessageHeader, 0, format!("a bad header: {error}"));
                }
            };
            let mut message = Bytes::from(self.input.drain(..len).collect::<Vec<_>>());
            match decode_message(&mut message, MAX_MESSAGE_LEN) {
                Ok(message) => self.on_message(now, message),
                Err(error) if self.state == State::OpenSent => {
                    self.refuse(now, NotificationCode::OpenMessage, 0, format!("a bad OPEN: {error}"));
                }
                Err(error) => self.refuse(now, NotificationCode::MessageHeader, 0, format!("a bad message: {error}")),
            }
            if self.closing || self.state == State::Idle {
                return;
            }
        }
    }

    /// Runs timers and sends changes. Call it at least every 250 ms, and after each [`announce`](Self::announce).
    pub fn poll(&mut self, now: u64) {
        match self.state {
            State::Idle => return,
            _ if self.closing => return,
            _ if self.expires_at > 0 && now >= self.expires_at => {
                return self.refuse(now, NotificationCode::HoldTimerExpired, 0, "the peer is silent".to_owned());
            }
            State::OpenSent => return,
            State::OpenConfirm | State::Established => {}
        }
        if self.hold_ns > 0 && now >= self.keepalive_at {
            self.keepalive_at = now.saturating_add(self.hold_ns / 3);
            self.send(&Message::Keepalive);
        }
        if self.state == State::Established && !self.wanted().eq(&self.announced) {
            self.update();
        }
    }

    /// Ends the session, which withdraws all routes at once.
    pub fn shut_down(&mut self, now: u64) {
        if self.state != State::Idle {
            self.refuse(now, NotificationCode::Cease, SHUTDOWN, "shut down".to_owned());
        }
        self.closing = true;
    }

    /// Bytes to send; the caller removes sent bytes from the front.
    pub fn output(&mut self) -> &mut Vec<u8> {
        &mut self.output
    }

    /// Whether to close the connection after all output is sent.
    pub fn is_closing(&self) -> bool {
        self.closing
    }

    /// Events since the last call.
    pub fn events(&mut self) -> impl Iterator<Item = Event> + '_ {
        self.events.drain(..)
    }

    fn on_message(&mut self, now: u64, message: Message) {
        self.expires_at = if self.hold_ns > 0 { now.saturating_add(self.hold_ns) } else { 0 };
        match (self.state, message) {
            (_, Message::Notification(received)) => {
                self.down(now, format!("the peer sent {}, subcode {}", received.code, received.subcode));
                self.output.clear();
                self.closing = true;
            }
            (State::OpenSent, Message::Open(open)) => self.on_open(now, &open),
            (State::OpenConfirm, Message::Keepalive) => {
                self.state = State::Established;
                self.events.push(Event::Up);
            }
            (State::Established, Message::Keepalive | Message::Update(_)) => {}
            // Announce all routes again (RFC 2918).
            (State::Established, Message::RouteRefresh(_)) => self.announced.clear(),
            (state, message) => {
                let what = format!("{message} while {state:?}");
                self.refuse(now, NotificationCode::FsmError, 0, what);
            }
        }
    }

    fn on_open(&mut self, now: u64, open: &OpenMessage) {
        // RFC 4271, section 6.2.
        const BAD_PEER_AS: u8 = 2;
        const BAD_IDENTIFIER: u8 = 3;
        const BAD_HOLD_TIME: u8 = 6;
        let (asn, id) = (open.four_byte_as(), open.bgp_identifier);
        let bad = if asn != self.config.asn {
            Some((BAD_PEER_AS, format!("the peer is in AS {asn}, not in {}", self.config.asn)))
        } else if id.is_unspecified() || id == self.config.router_id {
            Some((BAD_IDENTIFIER, format!("the peer has a bad BGP identifier, {id}")))
        } else if [1, 2].contains(&open.hold_time) {
            Some((BAD_HOLD_TIME, format!("the peer proposes a hold time of {} s", open.hold_time)))
        } else {
            None
        };
        if let Some((subcode, what)) = bad {
            return self.refuse(now, NotificationCode::OpenMessage, subcode, what);
        }
        self.hold_ns = u64::from(open.hold_time.min(self.config.hold_s.max(3))) * S;
        self.expires_at = if self.hold_ns > 0 { now.saturating_add(self.hold_ns) } else { 0 };
        self.keepalive_at = now.saturating_add(self.hold_ns / 3);
        self.ipv6 = self.config.next_hop6.is_some() && open.capabilities.contains(&IPV6_UNICAST);
        self.state = State::OpenConfirm;
        self.send(&Message::Keepalive);
    }

    /// Routes that this peer supports, in order.
    fn wanted(&self) -> impl Iterator<Item = &IpNet> {
        self.routes.iter().filter(|net| self.ipv6 || matches!(net, IpNet::V4(_)))
    }

    /// Sends the changes to the peer.
    fn update(&mut self) {
        let wanted: BTreeSet<IpNet> = self.wanted().copied().collect();
        let gone: Vec<IpNet> = self.announced.difference(&wanted).copied().collect();
        let new: Vec<IpNet> = wanted.difference(&self.announced).copied().collect();
        for update in updates(&new, &gone, self.config.next_hop, self.config.next_hop6) {
            self.send(&Message::Update(update));
        }
        self.announced = wanted;
    }

    /// Sends a NOTIFICATION with the reason, and ends the session.
    fn refuse(&mut self, now: u64, code: NotificationCode, subcode: u8, what: String) {
        self.send(&Message::Notification(NotificationMessage::new(code, subcode, Bytes::new())));
        self.closing = true;
        self.down(now, what);
    }

    fn down(&mut self, now: u64, why: String) {
        self.state = State::Idle;
        self.announced.clear();
        self.retry_at = now.saturating_add(RETRY_NS);
        self.events.push(Event::Down(why));
    }

    fn reset(&mut self) {
        self.state = State::Idle;
        self.input.clear();
        self.output.clear();
        self.announced.clear();
        self.ipv6 = false;
        self.closing = false;
        self.hold_ns = 0;
        self.expires_at = 0;
    }

    fn send(&mut self, message: &Message) {
        // Messages of this end are never too long.
        if let Ok(bytes) = encode_message(message) {
            self.output.extend_from_slice(&bytes);
        }
    }
}

const IPV6_UNICAST: Capability = Capability::MultiProtocol { afi: Afi::Ipv6, safi: Safi::Unicast };

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rustbgpd_wire::{Ipv4NlriEntry, PathAttribute};

    use super::*;

    fn speaker(last: u8, asn: u32) -> Speaker {
        let address = Ipv4Addr::new(10, 1, 0, last);
        Speaker::new(SpeakerConfig { asn, router_id: address, next_hop: address, next_hop6: None, hold_s: 3 })
    }

    /// Exchanges the output of both ends until there is none.
    fn exchange(now: u64, a: &mut Speaker, b: &mut Speaker) {
        for _ in 0..20 {
            let (from_a, from_b) = (std::mem::take(a.output()), std::mem::take(b.output()));
            b.received(now, &from_a);
            a.received(now, &from_b);
        }
    }

    fn established() -> (Speaker, Speaker) {
        let (mut a, mut b) = (speaker(11, 64_512), speaker(2, 64_512));
        assert!(a.wants_connection(0));
        a.connected(0);
        b.connected(0);
        exchange(0, &mut a, &mut b);
        assert_eq!((a.state(), b.state()), (State::Established, State::Established));
        assert_eq!(a.events().collect::<Vec<_>>(), [Event::Up]);
        (a, b)
    }

    fn nets(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    /// The next UPDATE of a speaker: announced with their next hop, and withdrawn.
    fn update(speaker: &mut Speaker) -> (Vec<String>, Vec<String>, Option<Ipv4Addr>) {
        let bytes = std::mem::take(speaker.output());
        let mut bytes = Bytes::from(bytes);
        let Message::Update(update) = decode_message(&mut bytes, MAX_MESSAGE_LEN).unwrap() else { panic!() };
        assert!(bytes.is_empty());
        let parsed = update.parse(true, false, &[]).unwrap();
        let texts = |list: &[Ipv4NlriEntry]| list.iter().map(|entry| entry.prefix.to_string()).collect();
        let hop = parsed.attributes.iter().find_map(|attribute| match attribute {
            PathAttribute::NextHop(hop) => Some(*hop),
            _ => None,
        });
        (texts(&parsed.announced), texts(&parsed.withdrawn), hop)
    }

    #[test]
    fn changes_are_sent_to_the_peer() {
        let (mut a, _) = established();
        a.announce(nets(&["10.0.0.1/32", "203.0.113.7/24"]));
        a.poll(1);
        let (announced, withdrawn, hop) = update(&mut a);
        assert_eq!((announced, withdrawn.len()), (vec!["10.0.0.1/32".to_owned(), "203.0.113.0/24".to_owned()], 0));
        assert_eq!(hop, Some([10, 1, 0, 11].into()));
        a.poll(2);
        assert!(a.output().is_empty(), "already announced");
        a.announce(nets(&["203.0.113.0/24"]));
        a.poll(3);
        let (announced, withdrawn, _) = update(&mut a);
        assert_eq!((announced.len(), withdrawn), (0, vec!["10.0.0.1/32".to_owned()]));
        assert_eq!(a.announced().collect::<Vec<_>>(), nets(&["203.0.113.0/24"]));
    }

    #[test]
    fn ipv6_prefixes_are_sent_to_peers_that_support_them() {
        let hop: Ipv6Addr = "fd01::11".parse().unwrap();
        let with = |last: u8, next_hop6| {
            let mut speaker = speaker(last, 64_512);
            speaker.config.next_hop6 = next_hop6;
            speaker
        };
        let both = nets(&["10.0.0.1/32", "2001:db8::1/128"]);
        // (this end, the peer): only if both support IPv6.
        for (ours, peers, announced) in [(Some(hop), None, 1), (None, Some(hop), 1), (Some(hop), Some(hop), 2)] {
            let (mut a, mut b) = (with(11, ours), with(2, peers));
            a.announce(both.iter().copied());
            a.connected(0);
            b.connected(0);
            exchange(0, &mut a, &mut b);
            a.poll(1);
            assert_eq!(a.announced().count(), announced);
            a.output().clear();
            a.poll(2);
            assert!(a.output().is_empty(), "all supported routes are announced");
        }
    }

    #[test]
    fn a_silent_peer_is_given_up() {
        let (mut a, mut b) = established();
        for tenth in 1..=60 {
            let now = tenth * S / 10;
            a.poll(now);
            b.poll(now);
            exchange(now, &mut a, &mut b);
        }
        assert_eq!(a.state(), State::Established, "both send KEEPALIVEs");
        a.poll(6 * S + 2 * S);
        assert_eq!(a.state(), State::Established);
        a.poll(6 * S + 3 * S);
        assert_eq!((a.state(), a.is_closing()), (State::Idle, true));
        assert_eq!(a.events().last(), Some(Event::Down("the peer is silent".to_owned())));
        assert!(!a.wants_connection(9 * S), "the connection is still there");
        a.closed(9 * S, "closed");
        assert!(!a.wants_connection(9 * S) && a.wants_connection(10 * S));
        // A new session starts from scratch.
        a.announce(nets(&["10.0.0.1/32"]));
        a.connected(10 * S);
        b.closed(10 * S, "closed");
        b.connected(10 * S);
        exchange(10 * S, &mut a, &mut b);
        a.poll(10 * S);
        assert_eq!(update(&mut a).0, ["10.0.0.1/32"]);
    }

    #[test]
    fn bad_opens_are_refused() {
        for (id, asn, hold_s, text) in [
            (2, 64_513, 3, "the peer is in AS 64513, not in 64512"),
            (11, 64_512, 3, "the peer has a bad BGP identifier, 10.1.0.11"),
            (2, 64_512, 1, "the peer proposes a hold time of 1 s"),
        ] {
            let mut a = speaker(11, 64_512);
            a.connected(0);
            a.output().clear();
            let open = OpenMessage {
                version: 4,
                my_as: asn as u16,
                hold_time: hold_s,
                bgp_identifier: [10, 1, 0, id].into(),
                capabilities: Vec::new(),
            };
            a.received(0, &encode_message(&Message::Open(open)).unwrap());
            assert_eq!(a.events().collect::<Vec<_>>(), [Event::Down(text.to_owned())]);
            assert!(a.is_closing() && !a.output().is_empty());
        }
        let (mut a, mut b) = established();
        b.shut_down(1);
        exchange(1, &mut a, &mut b);
        let event = a.events().last();
        assert!(matches!(&event, Some(Event::Down(why)) if why.contains("subcode 2")), "{event:?}");
        assert!(!b.wants_connection(100 * S), "it was shut down");
    }

    #[test]
    fn a_route_refresh_announces_all_routes_again() {
        let (mut a, _) = established();
        a.announce(nets(&["10.0.0.1/32"]));
        a.poll(1);
        a.output().clear();
        let mut refresh = vec![0xff; 16];
        refresh.extend([0, 23, 5, 0, 1, 0, 1]);
        a.received(2, &refresh);
        a.poll(2);
        assert_eq!(update(&mut a).0, ["10.0.0.1/32"]);
    }

    proptest! {
        /// With any input in any segmentation, memory is bounded and nothing panics.
        #[test]
        fn hostile_peers(
            pieces in proptest::collection::vec((0u8..4, proptest::collection::vec(any::<u8>(), 0..300)), 0..60),
        ) {
            let (mut a, _) = established();
            for (kind, bytes) in pieces {
                let mut message = vec![0xff; 16];
                if kind > 0 {
                    message.extend(((bytes.len() + 19) as u16).to_be_bytes());
                    message.push(kind);
                }
                message.extend(bytes);
                a.received(5, &message);
                a.poll(5);
                prop_assert!(a.input.len() <= 2 * usize::from(MAX_MESSAGE_LEN) && a.output.len() < 100_000);
                if a.is_closing() {
                    a.closed(5, "closed");
                    a.connected(5);
                }
            }
        }
    }
}
