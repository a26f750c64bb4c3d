//! A pod's BGP sessions with the proxies of one link, over the priority ring. smoltcp implements TCP, and `bifrost_bgp`
//! BGP and BFD. Without I/O.
//!
//! Both ends are on the same link and send with a hop limit of 255 (RFC 5082), which nobody further away can forge.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use bifrost_bgp::{BFD_LEN, BFD_PORT, Bfd, BfdConfig, BfdState, Event, Speaker, SpeakerConfig, State};
use bifrost_control::api::GatewayPeer;
use bifrost_nic::{L3, Parsed, parse};
use bifrost_wire::ethernet::{self, ethertype};
use bifrost_wire::protocol::{TCP, UDP};
use bifrost_wire::{Mac, ipv4, udp};
use ipnet::IpNet;
use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::phy::{Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::socket::tcp;
use smoltcp::time::Instant;
use smoltcp::wire::{HardwareAddress, IpAddress, IpCidr};

const BGP_PORT: u16 = 179;
/// RFC 5883, section 5: FRR treats a session with TTL security as a multihop session.
const MULTIHOP_BFD_PORT: u16 = 4784;
/// RFC 5082: the hop limit that proves that the sender is on the link.
const HOP_LIMIT: u8 = 255;
/// Source ports, of TCP and of BFD (RFC 5881, section 4).
const PORTS: std::ops::Range<u16> = 49_152..65_535;
/// Maximum number of packets that wait for the TCP stack. More are dropped, and TCP retransmits them.
const QUEUE: usize = 64;
/// Buffer for each direction of a connection, bytes: a few messages.
const BUFFER: usize = 16_384;
const MTU: usize = 1500;
/// Maximum number of proxies of a pod on a link.
pub(super) const MAX_PEERS: usize = 8;

/// The routes that a pod announces, and to which proxies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BgpSettings {
    /// The AS of pods and proxies.
    pub asn: u32,
    /// The pod's BGP identifier, the same on all links (RFC 4271, section 1.1).
    pub router_id: Ipv4Addr,
    /// The proxies, on the pod's link.
    pub peers: Vec<Ipv4Addr>,
    /// The announced routes.
    pub routes: Vec<IpNet>,
    /// The hold time, s.
    pub hold_s: u16,
    /// BFD: interval, us, and multiplier.
    pub bfd: Option<(u32, u8)>,
    /// The pod's address on the link: the next hop of IPv4 prefixes.
    pub address: Ipv4Addr,
    /// The next hop of IPv6 prefixes. Without it, none are announced.
    pub address6: Option<Ipv6Addr>,
}

/// Sessions with all proxies.
pub(super) struct Announcer {
    settings: BgpSettings,
    mac: Mac,
    iface: Interface,
    link: Link,
    sockets: SocketSet<'static>,
    peers: Vec<Peer>,
    refused_hop_limit_packets: u64,
    announcing: bool,
}

struct Peer {
    address: Ipv4Addr,
    socket: SocketHandle,
    speaker: Speaker,
    connected: bool,
    bfd: Option<Bfd>,
    /// The source port of BFD packets, and the destination port that the peer uses.
    bfd_ports: (u16, u16),
    was_up: bool,
    was_established: bool,
    ended_sessions: u64,
    bfd_downs: u64,
}

impl std::fmt::Debug for Announcer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Announcer").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl Announcer {
    pub(super) fn new(mut settings: BgpSettings, mac: Mac) -> Self {
        settings.peers.truncate(MAX_PEERS);
        let mut config = Config::new(HardwareAddress::Ip);
        config.random_seed = fastrand::u64(..);
        let mut link = Link::default();
        let mut iface = Interface::new(config, &mut link, Instant::ZERO);
        iface.update_ip_addrs(|addresses| {
            // One address fits. The prefix length 0 makes every peer reachable for smoltcp.
            let _ = addresses.push(IpCidr::new(IpAddress::Ipv4(settings.address), 0));
        });
        let mut sockets = SocketSet::new(Vec::new());
        let speaker = SpeakerConfig {
            asn: settings.asn,
            router_id: settings.router_id,
            next_hop: settings.address,
            next_hop6: settings.address6,
            hold_s: settings.hold_s,
        };
        let peers = settings.peers.iter().map(|address| {
            let buffer = || tcp::SocketBuffer::new(vec![0; BUFFER]);
            let mut socket = tcp::Socket::new(buffer(), buffer());
            socket.set_hop_limit(Some(HOP_LIMIT));
            socket.set_nagle_enabled(false);
            let bfd = |(interval_us, multiplier)| {
                Bfd::new(BfdConfig { interval_us, multiplier, discriminator: fastrand::u32(1..) })
            };
            Peer {
                address: *address,
                socket: sockets.add(socket),
                speaker: Speaker::new(speaker.clone()),
                connected: false,
                bfd: settings.bfd.map(bfd),
                bfd_ports: (fastrand::u16(PORTS), BFD_PORT),
                was_up: false,
                was_established: false,
                ended_sessions: 0,
                bfd_downs: 0,
            }
        });
        let peers = peers.collect();
        Announcer { settings, mac, iface, link, sockets, peers, refused_hop_limit_packets: 0, announcing: false }
    }

    /// The proxies' addresses, for address resolution.
    pub(super) fn peers(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.peers.iter().map(|peer| IpAddr::V4(peer.address))
    }

    /// Processes a frame if it belongs to a session.
    pub(super) fn on_frame(&mut self, now: u64, frame: &[u8]) {
        let Ok(parsed) = parse(frame, frame.len()) else { return };
        let known = |peer: &&mut Peer| IpAddr::V4(peer.address) == parsed.src_ip;
        let to_us =
            parsed.kind == L3::V4 && parsed.dst_ip == IpAddr::V4(self.settings.address) && !parsed.is_fragment();
        let Some(peer) = self.peers.iter_mut().find(known).filter(|_| to_us) else { return };
        let l3 = usize::from(parsed.l3);
        let (is_tcp, is_bfd) = (is_bgp(&parsed), is_bfd(&parsed));
        if (is_tcp || is_bfd) && frame.get(l3 + 8) != Some(&HOP_LIMIT) {
            self.refused_hop_limit_packets += 1;
            return;
        }
        let end = parsed.end as usize;
        if is_tcp && self.link.received.len() < QUEUE {
            self.link.received.extend(frame.get(l3..end).map(<[u8]>::to_vec));
        }
        if is_bfd && let Some(bfd) = &mut peer.bfd {
            peer.bfd_ports.1 = parsed.dst_port;
            // An invalid packet is ignored, as if it had been lost.
            let _ = bfd.received(now, frame.get(usize::from(parsed.payload)..end).unwrap_or_default());
        }
    }

    /// Returns the frames to send now. `healthy`: whether to announce the pod's addresses; `known` returns the MAC
    /// address of a neighbour on the link.
    pub(super) fn poll(&mut self, now: u64, healthy: bool, known: impl Fn(IpAddr) -> Option<Mac>) -> Vec<Vec<u8>> {
        self.announcing = healthy;
        let time = Instant::from_micros((now / 1000) as i64);
        let mut frames = Vec::new();
        self.iface.poll(time, &mut self.link, &mut self.sockets);
        for peer in &mut self.peers {
            let routes = if healthy { &self.settings.routes[..] } else { &[] };
            peer.speaker.announce(routes.iter().copied());
            let socket = self.sockets.get_mut::<tcp::Socket<'_>>(peer.socket);
            let reachable = known(IpAddr::V4(peer.address)).is_some();
            peer.turn(now, socket, self.iface.context(), reachable);
            let Some(bfd) = &mut peer.bfd else { continue };
            if let Some(packet) = bfd.poll(now) {
                frames.extend(known(IpAddr::V4(peer.address)).map(|to| {
                    let link = ethernet::Header::new(to, self.mac, ethertype::IPV4).emit();
                    [&link[..], &bfd_packet(self.settings.address, peer.address, peer.bfd_ports, &packet)].concat()
                }));
            }
        }
        self.iface.poll(time, &mut self.link, &mut self.sockets);
        for packet in self.link.sent.drain(..) {
            let to = packet.get(16..20).and_then(|to| <[u8; 4]>::try_from(to).ok()).map(IpAddr::from);
            if let Some(mac) = to.and_then(&known) {
                let link = ethernet::Header::new(mac, self.mac, ethertype::IPV4).emit();
                frames.push([&link[..], &packet].concat());
            }
        }
        frames
    }

    /// When [`poll`](Self::poll) must be called next, unless a packet arrives before, ns.
    pub(super) fn deadline(&self) -> Option<u64> {
        self.peers.iter().filter_map(|peer| peer.bfd.as_ref().map(Bfd::deadline)).min()
    }

    /// Ends all sessions, which withdraws all routes.
    pub(super) fn shut_down(&mut self, now: u64) {
        self.peers.iter_mut().for_each(|peer| peer.speaker.shut_down(now));
    }

    /// The state of the sessions. The caller fills in the number of the link.
    pub(super) fn state(&self) -> Vec<GatewayPeer> {
        let peer = |peer: &Peer| GatewayPeer {
            link: 0,
            address: peer.address.to_string(),
            state: match peer.speaker.state() {
                State::Idle => "idle",
                State::OpenSent => "open-sent",
                State::OpenConfirm => "open-confirm",
                State::Established => "established",
            }
            .into(),
            bfd: peer.bfd.as_ref().map(|bfd| {
                match bfd.state() {
                    BfdState::AdminDown => "admin-down",
                    BfdState::Down => "down",
                    BfdState::Init => "init",
                    BfdState::Up => "up",
                }
                .into()
            }),
            announced: peer.speaker.announced().map(|net| net.to_string()).collect(),
            ended_sessions: peer.ended_sessions,
            bfd_downs: peer.bfd_downs,
        };
        self.peers.iter().map(peer).collect()
    }

    /// Whether BFD is up with any proxy; `None`: BFD is not configured.
    pub(super) fn is_watched_up(&self) -> Option<bool> {
        self.settings.bfd?;
        let is_up = |peer: &Peer| peer.bfd.as_ref().is_some_and(|bfd| bfd.state() == BfdState::Up);
        Some(self.peers.iter().any(is_up))
    }

    pub(super) fn refused_hop_limit_packets(&self) -> u64 {
        self.refused_hop_limit_packets
    }

    pub(super) fn is_announcing(&self) -> bool {
        self.announcing
    }
}

impl Peer {
    /// Moves bytes between the connection and the BGP speaker, and follows the state of BFD.
    fn turn(&mut self, now: u64, socket: &mut tcp::Socket<'_>, context: &mut smoltcp::iface::Context, reachable: bool) {
        let Peer { speaker, address, connected, .. } = self;
        let bfd_up = self.bfd.as_ref().is_some_and(|bfd| bfd.state() == BfdState::Up);
        if std::mem::replace(&mut self.was_up, bfd_up) && !bfd_up {
            self.bfd_downs += 1;
            if *connected {
                socket.abort();
                speaker.closed(now, "BFD: the peer is gone");
                *connected = false;
            }
        }
        if !socket.is_open() && !*connected && reachable && speaker.wants_connection(now) {
            speaker.connecting(now);
            let to = (IpAddress::Ipv4(*address), BGP_PORT);
            if let Err(error) = socket.connect(context, to, fastrand::u16(PORTS)) {
                tracing::warn!(peer = %address, %error, "cannot connect");
            }
        }
        if !*connected && socket.may_send() {
            *connected = true;
            speaker.connected(now);
        }
        while socket.can_recv() {
            let taken = socket.recv(|bytes| {
                speaker.received(now, bytes);
                (bytes.len(), bytes.len())
            });
            if taken.is_err() || taken == Ok(0) {
                break;
            }
        }
        if *connected && !socket.may_recv() {
            socket.abort();
            speaker.closed(now, "the connection has ended");
            *connected = false;
        }
        speaker.poll(now);
        if *connected && socket.can_send() {
            let sent = socket.send_slice(speaker.output()).unwrap_or(0);
            speaker.output().drain(..sent);
        }
        if *connected && speaker.is_closing() && speaker.output().is_empty() {
            socket.close();
        }
        let established = speaker.state() == State::Established;
        if std::mem::replace(&mut self.was_established, established) && !established {
            self.ended_sessions += 1;
        }
        for event in speaker.events() {
            match event {
                Event::Up => tracing::info!(peer = %address, "BGP is established"),
                Event::Down(why) => tracing::warn!(peer = %address, why, "BGP is down"),
            }
        }
    }
}

fn is_bgp(parsed: &Parsed) -> bool {
    parsed.protocol == TCP && parsed.src_port == BGP_PORT
}

fn is_bfd(parsed: &Parsed) -> bool {
    parsed.protocol == UDP && [BFD_PORT, MULTIHOP_BFD_PORT].contains(&parsed.dst_port)
}

fn bfd_packet(source: Ipv4Addr, destination: Ipv4Addr, ports: (u16, u16), packet: &[u8; BFD_LEN]) -> Vec<u8> {
    let len = (udp::HEADER_LEN + BFD_LEN) as u16;
    // Without a UDP checksum, which IPv4 allows: the packet stays on one link.
    let datagram = udp::Header { source_port: ports.0, destination_port: ports.1, len, checksum: 0 }.emit();
    let header = ipv4::Header { ttl: HOP_LIMIT, ..ipv4::Header::new(source, destination, UDP, len) };
    [&header.emit()[..], &datagram, packet].concat()
}

/// The network device of smoltcp: IP packets in memory.
#[derive(Default)]
struct Link {
    received: VecDeque<Vec<u8>>,
    sent: Vec<Vec<u8>>,
}

impl Device for Link {
    type RxToken<'a> = Received;
    type TxToken<'a> = Sending<'a>;

    fn receive(&mut self, _: Instant) -> Option<(Received, Sending<'_>)> {
        let packet = self.received.pop_front()?;
        Some((Received(packet), Sending(&mut self.sent)))
    }

    fn transmit(&mut self, _: Instant) -> Option<Sending<'_>> {
        (self.sent.len() < QUEUE).then_some(Sending(&mut self.sent))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = MTU;
        capabilities
    }
}

struct Received(Vec<u8>);

impl RxToken for Received {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(&self.0)
    }
}

struct Sending<'a>(&'a mut Vec<Vec<u8>>);

impl TxToken for Sending<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        let mut packet = vec![0; len];
        let result = f(&mut packet);
        self.0.push(packet);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: Mac = Mac([2, 0, 0, 0, 0, 11]);
    const PROXY: Mac = Mac([2, 0, 0, 0, 0, 2]);
    const MS: u64 = 1_000_000;

    fn announcer() -> Announcer {
        let settings = BgpSettings {
            asn: 64_512,
            router_id: [10, 1, 0, 11].into(),
            peers: vec![[10, 1, 0, 2].into()],
            routes: vec!["10.0.0.1/32".parse().unwrap()],
            hold_s: 3,
            bfd: Some((50_000, 3)),
            address: [10, 1, 0, 11].into(),
            address6: None,
        };
        Announcer::new(settings, OWN)
    }

    fn known(address: IpAddr) -> Option<Mac> {
        (address == IpAddr::from([10, 1, 0, 2])).then_some(PROXY)
    }

    fn other_end() -> Bfd {
        Bfd::new(BfdConfig { interval_us: 50_000, multiplier: 3, discriminator: 5 })
    }

    /// A BFD packet to the pod.
    fn bfd(from: u8, ttl: u8, packet: [u8; BFD_LEN]) -> Vec<u8> {
        let mut packet =
            bfd_packet([10, 1, 0, from].into(), [10, 1, 0, 11].into(), (50_000, MULTIHOP_BFD_PORT), &packet);
        packet[8] = ttl;
        // The TTL has changed, so the header needs a new checksum.
        let mut header = ipv4::Header::parse(&packet).unwrap();
        (header.ttl, header.checksum) = (ttl, 0);
        packet[..20].copy_from_slice(&header.emit());
        [&ethernet::Header::new(OWN, PROXY, ethertype::IPV4).emit()[..], &packet].concat()
    }

    #[test]
    fn bgp_and_bfd_start_with_a_hop_limit_of_255() {
        let mut announcer = announcer();
        assert!(announcer.poll(0, true, |_| None).is_empty(), "nobody knows where the proxy is");
        let frames = announcer.poll(2000 * MS, true, known);
        let parsed: Vec<_> = frames.iter().map(|frame| parse(frame, frame.len()).unwrap()).collect();
        let ports: Vec<_> = parsed.iter().map(|packet| (packet.protocol, packet.dst_port)).collect();
        assert_eq!(ports, [(UDP, BFD_PORT), (TCP, BGP_PORT)]);
        for (frame, packet) in frames.iter().zip(&parsed) {
            assert_eq!((packet.dst_mac, packet.src_mac, frame[14 + 8]), (PROXY, OWN, HOP_LIMIT));
        }
        assert_eq!((announcer.is_announcing(), announcer.state()[0].announced.len()), (true, 0));
    }

    #[test]
    fn packets_from_beyond_the_link_are_ignored() {
        let mut announcer = announcer();
        let state = |announcer: &Announcer| announcer.state()[0].bfd.clone();
        for (from, ttl, refused, expected) in [(2, 254, 1, "down"), (3, 255, 1, "down"), (2, 255, 1, "init")] {
            announcer.on_frame(MS, &bfd(from, ttl, other_end().poll(0).unwrap()));
            assert_eq!(announcer.refused_hop_limit_packets(), refused);
            assert_eq!(state(&announcer).as_deref(), Some(expected), "from {from}, {ttl}");
        }
        // The pod answers at the port that the peer uses.
        let frames = announcer.poll(2 * MS, true, known);
        let ports: Vec<_> = frames.iter().map(|frame| parse(frame, frame.len()).unwrap().dst_port).collect();
        assert!(ports.contains(&MULTIHOP_BFD_PORT), "{ports:?}");
        (0..1000).for_each(|len| announcer.on_frame(MS, &vec![0x45; len]));
    }

    #[test]
    fn sessions_that_go_down_are_counted() {
        let (mut announcer, mut other) = (announcer(), other_end());
        let downs = |announcer: &Announcer| announcer.state()[0].bfd_downs;
        let mut now = MS;
        while announcer.state()[0].bfd.as_deref() != Some("up") {
            now += 50 * MS;
            assert!(now < 10_000 * MS, "{:?}", announcer.state());
            for frame in announcer.poll(now, true, known) {
                let parsed = parse(&frame, frame.len()).unwrap();
                if is_bfd(&parsed) {
                    other.received(now, &frame[usize::from(parsed.payload)..]).unwrap();
                }
            }
            if let Some(packet) = other.poll(now) {
                announcer.on_frame(now, &bfd(2, HOP_LIMIT, packet));
            }
        }
        announcer.poll(now + 50 * MS, true, known);
        assert_eq!(downs(&announcer), 0);
        // No packets for more than three of the slowest intervals. The second call counts what the first one detected.
        (0..2).for_each(|_| drop(announcer.poll(now + 4000 * MS, true, known)));
        assert_eq!((downs(&announcer), announcer.state()[0].ended_sessions), (1, 0));
    }
}
