//! Two hosts, each with a NIC, and a link with rate, delay, queue and packet loss. A seed determines a run.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::net::{IpAddr, Ipv6Addr};

use bifrost_rdm::{Adaptive, ConnectionConfig, ConnectionId, Order, Service, Swift, SwiftConfig};
use bifrost_rnic::{Burst, Config, Nic, Route};
use bifrost_wire::rdm::SetupKind;

use crate::{Host, HostConfig, Limits};

/// Properties of the link.
#[derive(Clone, Copy, Debug)]
pub(super) struct Link {
    /// Bits per second.
    pub(super) rate: f64,
    /// One-way delay, ns.
    pub(super) delay_ns: u64,
    /// Share of packets lost, both data and control datagrams.
    pub(super) loss: f64,
    /// Share of packets duplicated.
    pub(super) duplicated: f64,
}

impl Link {
    /// 25 Gbit/s and a round trip of 50 us.
    pub(super) fn new(loss: f64) -> Self {
        Self { rate: 25e9, delay_ns: 25_000, loss, duplicated: 0.0 }
    }
}

/// Overhead of a UDP payload, bytes: Ethernet with preamble and gap, IPv6, UDP.
const OVERHEAD: usize = 38 + 40 + 8;

pub(super) struct Side {
    pub(super) host: Host<Nic>,
    pub(super) id: ConnectionId,
    /// When the wire is idle again, ns.
    wire_free: u64,
    /// All packets of this side are lost.
    pub(super) outage: bool,
    pub(super) dropped: u64,
    pub(super) carried: u64,
}

pub(super) struct World {
    pub(super) now: u64,
    pub(super) sides: [Side; 2],
    pub(super) link: Link,
    pub(super) random: fastrand::Rng,
    air: BinaryHeap<Reverse<(u64, u64, usize, usize)>>,
    packets: Vec<Option<(Route, Vec<u8>)>>,
    free: Vec<usize>,
    count: u64,
    burst: Burst,
    /// Loss in the reverse direction, if it differs.
    pub(super) loss_back: Option<f64>,
    /// A UDP source port whose packets are lost: a failed path.
    pub(super) dead_port: Option<u16>,
    pub(super) last_port: u16,
    /// Both ends switch to the other service at random times, this many ns apart on average; 0: never.
    pub(super) switch_every_ns: u64,
    next_switch: u64,
}

pub(super) struct Options {
    pub(super) service: Service,
    pub(super) order: Order,
    pub(super) mtu: u16,
    pub(super) limits: fn(&mut Limits),
    pub(super) config: fn(&mut ConnectionConfig),
}

impl Default for Options {
    fn default() -> Self {
        Self { service: Service::Uc, order: Order::Sent, mtu: 1024, limits: |_| {}, config: |_| {} }
    }
}

impl World {
    pub(super) fn new(seed: u64, link: Link, options: &Options) -> Self {
        let mut hosts = [1u16, 2].map(|host| {
            let address = IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, host));
            let seed = seed * 2 + u64::from(host);
            let nic = Nic::new(Config { address, port: 4791, queue_pairs: 64, regions: 4096, seed });
            Host::new(nic, HostConfig::new(16, seed)).unwrap()
        });
        let mut limits = Limits::new(options.service, options.mtu);
        (options.limits)(&mut limits);
        let (a, hello) = hosts[0].prepare(SetupKind::Hello, limits).unwrap();
        let (b, welcome) = hosts[1].prepare(SetupKind::Welcome, limits).unwrap();
        for (host, id, peer, initiator) in [(0, a, &welcome, true), (1, b, &hello, false)] {
            let mut config = ConnectionConfig::new(options.service, options.mtu);
            config.order = options.order;
            config.initiator = initiator;
            (options.config)(&mut config);
            let swift = Swift::new(SwiftConfig::new(50_000));
            let chunking = Box::new(Adaptive::default());
            hosts[host].complete(0, id, peer, config, chunking, Box::new(swift)).unwrap();
        }
        let [host_a, host_b] = hosts;
        let side = |host, id| Side { host, id, wire_free: 0, outage: false, dropped: 0, carried: 0 };
        Self {
            now: 0,
            sides: [side(host_a, a), side(host_b, b)],
            link,
            random: fastrand::Rng::with_seed(seed),
            air: BinaryHeap::new(),
            packets: Vec::new(),
            free: Vec::new(),
            count: 0,
            burst: Burst::new(),
            loss_back: None,
            dead_port: None,
            last_port: 0,
            switch_every_ns: 0,
            next_switch: 0,
        }
    }

    /// Advances to the next event, or to `until`; returns `false` when `until` is reached.
    pub(super) fn step(&mut self, until: u64) -> bool {
        if self.switch_every_ns > 0 && self.now >= self.next_switch {
            self.next_switch = self.now + 1 + self.random.u64(..2 * self.switch_every_ns);
            let side = self.random.usize(..2);
            self.switch(side);
        }
        for side in 0..2 {
            loop {
                let now = self.now;
                let host = &mut self.sides[side].host;
                host.provider_mut().advance(now);
                let busy = host.turn(now);
                self.transmit(side);
                if !busy {
                    break;
                }
            }
        }
        let mut next = self.air.peek().map_or(u64::MAX, |Reverse((at, ..))| *at);
        for side in &self.sides {
            next = next.min(side.host.next_deadline()).min(side.host.provider().next_deadline(self.now));
            if side.host.provider().has_packets() {
                next = next.min(side.wire_free);
            }
        }
        if self.switch_every_ns > 0 {
            next = next.min(self.next_switch);
        }
        if next > until {
            self.now = until;
            return false;
        }
        self.now = self.now.max(next);
        while let Some(&Reverse((at, _, packet, to))) = self.air.peek() {
            if at > self.now {
                break;
            }
            self.air.pop();
            if let Some((route, bytes)) = self.packets[packet].take() {
                self.free.push(packet);
                self.sides[to].host.provider_mut().receive(self.now, &route, &bytes);
            }
        }
        true
    }

    /// One end switches to the other service.
    pub(super) fn switch(&mut self, side: usize) {
        let Side { host, id, .. } = &mut self.sides[side];
        let other = if host.service_in_use(*id) == Some(Service::Uc) { Service::Rc } else { Service::Uc };
        assert!(host.switch(self.now, *id, other));
    }

    /// Sends while the wire is idle; other packets wait in the NIC. The switch's queue is part of the link.
    fn transmit(&mut self, from: usize) {
        while self.sides[from].wire_free <= self.now && self.sides[from].host.provider().has_packets() {
            self.burst.clear();
            if self.sides[from].host.provider_mut().transmit(self.now, 1, &mut self.burst) == 0 {
                break;
            }
            let packet = self.burst.packets()[0];
            let bytes = self.burst.payload(&packet).to_vec();
            let wire_ns = ((bytes.len() + OVERHEAD) as f64 * 8e9 / self.link.rate) as u64;
            let side = &mut self.sides[from];
            side.wire_free = side.wire_free.max(self.now) + wire_ns;
            side.carried += 1;
            self.last_port = packet.route.source_port;
            let loss = if from == 1 { self.loss_back.unwrap_or(self.link.loss) } else { self.link.loss };
            let dead = self.dead_port == Some(packet.route.source_port);
            if side.outage || dead || self.random.f64() < loss {
                side.dropped += 1;
                continue;
            }
            let at = side.wire_free + self.link.delay_ns;
            let copies = 1 + usize::from(self.random.f64() < self.link.duplicated);
            for copy in 0..copies {
                let index = self.free.pop().unwrap_or_else(|| {
                    self.packets.push(None);
                    self.packets.len() - 1
                });
                self.packets[index] = Some((packet.route, bytes.clone()));
                self.count += 1;
                self.air.push(Reverse((at + copy as u64 * 5_000, self.count, index, 1 - from)));
            }
        }
    }
}

/// Contents that identify the message and the position in it.
pub(super) fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut bytes = vec![0; len];
    random.fill(&mut bytes);
    bytes
}
