//! A pipeline with a transport, its pod, and hosts with their own engines, over a network that loses, duplicates and
//! reorders packets; in virtual time.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;

use bifrost_nic::parse;
use bifrost_plb::{self as plb, Trailer};
use bifrost_rte as rte;
use bifrost_rte::{Admission, Control, Destination, Engine, LocalVnic, Outbound, Output, PeerId, Time, Verdict};
use bifrost_tables::{LimiterConfig, Rate};
use bifrost_wire::bifrost::{self, Packet, PathId, bundle};
use bifrost_wire::protocol::UDP;
use bifrost_wire::{Mac, Vni, ipv4, udp, vxlan};

use crate::reliable::outer::{self, Ends, Link};
use crate::*;

pub(super) const GATEWAY: &str = "10.0.0.1";
pub(super) const GATEWAY_6: &str = "fd00::1";
pub(super) const GATEWAY_MAC: Mac = Mac([2, 0, 0, 0, 0, 0xfe]);
pub(super) const VNI: u32 = 100;
pub(super) const LONGEST: usize = 1622;
pub(super) const PORT: u16 = bifrost::UDP_PORT;
const STEP_NS: u64 = 20_000;
const POD: u16 = 5;

/// MAC addresses of a frame to the gateway.
pub(super) fn link() -> Link {
    Link::of_leaving(&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2], &[]).unwrap()
}

/// An inner frame from one vNIC to another: a numbered datagram of a flow.
pub(super) fn inner(to: Mac, from: Mac, flow: u16, number: u32) -> Vec<u8> {
    let payload = [&number.to_be_bytes()[..], &[7; 600]].concat();
    let len = (payload.len() + udp::HEADER_LEN) as u16;
    let header = udp::Header { source_port: flow, destination_port: 9, len, checksum: 0 };
    let ip = ipv4::Header::new([192, 168, 0, 1].into(), [192, 168, 0, 2].into(), UDP, len);
    [&to.0[..], &from.0, &[8, 0], &ip.emit(), &header.emit(), &payload].concat()
}

/// Flow and number of an inner frame.
pub(super) fn read(inner: &[u8]) -> (u16, u32) {
    let at = 14 + 20;
    let word = |at: usize| u16::from_be_bytes([inner[at], inner[at + 1]]);
    (word(at), u32::from(word(at + 8)) << 16 | u32::from(word(at + 10)))
}

/// The gateway's address of a host's family.
fn gateway_of(host: IpAddr) -> IpAddr {
    if host.is_ipv4() { GATEWAY } else { GATEWAY_6 }.parse().unwrap()
}

/// A frame that a host sends.
pub(super) fn frame(from: &str, ports: (u16, u16), head: &[u8], tail: &[u8]) -> Vec<u8> {
    let source = from.parse().unwrap();
    let ends = Ends {
        source,
        destination: gateway_of(source),
        source_port: ports.0,
        destination_port: ports.1,
        ecn: 2,
        is_summed: true,
    };
    let mut frame = Vec::new();
    outer::write(&mut frame, &link(), &ends, head, tail).unwrap();
    frame.extend_from_slice(tail);
    frame
}

pub(super) fn config(hosts: &[&[&str]]) -> ReliableConfig {
    ReliableConfig {
        addresses: vec![GATEWAY.parse().unwrap(), GATEWAY_6.parse().unwrap()],
        mac: GATEWAY_MAC,
        vnis: vec![VNI],
        hosts: hosts.iter().map(|host| host.iter().map(|address| address.parse().unwrap()).collect()).collect(),
        port: PORT,
        paths: 4,
        source_port_base: 49_152,
        memory_bytes: 2 * 2048 * LONGEST * hosts.len(),
        connections_per_host: 8,
        engine: rte::Config::default(),
        instance: 1,
        salt: 77,
    }
}

/// A host with one vNIC: the engine, and what it has received.
pub(super) struct Host {
    pub(super) addresses: Vec<&'static str>,
    pub(super) mac: Mac,
    pub(super) engine: Engine,
    peer: PeerId,
    out: Output,
    frames: BTreeMap<u32, Vec<u8>>,
    next: u32,
    blocked: VecDeque<(u32, u32)>,
    placed: Vec<Vec<u8>>,
    /// Inner frames that the guest received over the transport, and as plain VXLAN.
    pub(super) shown: Vec<Vec<u8>>,
    pub(super) plain: Vec<Vec<u8>>,
    pub(super) leaving: Vec<Vec<u8>>,
    /// It does not speak the transport.
    pub(super) deaf: bool,
    /// Packets to one path share datagrams; the number of packets that did.
    pub(super) bundles: bool,
    pub(super) bundled: u32,
}

impl Host {
    pub(super) fn new(addresses: &[&'static str], mac: Mac, instance: u64) -> Self {
        let mut engine = Engine::new(rte::Config::default(), 0, instance, 5);
        let peer = engine.add_peer(4);
        Host {
            addresses: addresses.to_vec(),
            mac,
            engine,
            peer,
            out: Output::default(),
            frames: BTreeMap::new(),
            next: 0,
            blocked: VecDeque::new(),
            placed: Vec::new(),
            shown: Vec::new(),
            plain: Vec::new(),
            leaving: Vec::new(),
            deaf: false,
            bundles: false,
            bundled: 0,
        }
    }

    pub(super) fn send(&mut self, now: u64, flow: u16, number: u32) {
        let handle = self.next;
        self.next += 1;
        self.frames.insert(handle, inner(GATEWAY_MAC, self.mac, flow, number));
        self.blocked.push_back((handle, flow.into()));
        self.pump(now);
    }

    fn pump(&mut self, now: u64) {
        while let Some(&(handle, flow)) = self.blocked.front() {
            let ordering = rte::Ordering::Flow;
            let (local, remote, peer) = (self.mac, GATEWAY_MAC, self.peer);
            let to = Destination { vni: VNI, owner: 0, local, remote, peer, ordering };
            match self.engine.transmit(Time(now), &to, Outbound { handle, segments: 1, flow }, &mut self.out) {
                Admission::Blocked => break,
                Admission::Accepted => {}
                Admission::Plain => panic!("no connection"),
            }
            self.blocked.pop_front();
        }
    }

    fn receive(&mut self, now: u64, frame: &[u8]) {
        let arrival = look(frame).unwrap();
        assert!(self.addresses.iter().any(|own| arrival.outer.dst_ip == own.parse::<IpAddr>().unwrap()));
        assert!(bifrost_nic::verify_transport_checksum(frame, &arrival.outer));
        let (vni, payload) = vxlan::parse(arrival.payload(frame)).unwrap();
        if arrival.outer.dst_port == vxlan::UDP_PORT {
            self.plain.push(payload.to_vec());
            return;
        }
        assert_eq!(arrival.outer.dst_port, PORT);
        if self.deaf {
            return;
        }
        let from = rte::Arrival { peer: self.peer, vni: vni.get(), nic_rx: Time(now), hops: 0, marked: false };
        let (now, out) = (Time(now), &mut self.out);
        match bifrost::parse(payload).unwrap() {
            Packet::Data(header, inner) => {
                if let Verdict::Place { slot, .. } = self.engine.on_data(now, &from, &header, out) {
                    assert!(parse(inner, inner.len()).is_ok());
                    if self.engine.placed(now, slot, self.placed.len() as u32, out) {
                        self.placed.push(inner.to_vec());
                    }
                }
            }
            Packet::Ack(ack) => self.engine.on_ack(now, &from, &ack, out),
            Packet::Probe(header) => self.engine.on_probe(now, &from, &header, out),
            Packet::Skip(header) => self.engine.on_skip(now, &from, &header, out),
            Packet::Reset(reset) => self.engine.on_reset(now, &from, &reset, out),
            Packet::Setup(setup) => {
                let vnic = LocalVnic { owner: 0, ordering: rte::Ordering::Flow, reliable: true };
                let vnic = (setup.to == self.mac).then_some(vnic);
                self.engine.on_setup(now, &from, &setup, vnic, out);
            }
            Packet::Bundle(_) => panic!("a bundle"),
        }
    }

    fn turn(&mut self, now: u64) {
        if self.engine.next_timeout().is_some_and(|at| at.0 <= now) {
            self.engine.on_timeout(Time(now), &mut self.out);
        }
        for (_, handle) in self.out.publish.drain(..) {
            self.shown.push(self.placed[handle as usize].clone());
        }
        self.engine.flush_acks(Time(now), &mut self.out);
        self.pump(now);
        let mut out = std::mem::take(&mut self.out);
        let tunnel = vxlan::emit(Vni::new(VNI).unwrap());
        // A packet with the one that follows it on its path, if two may share a datagram.
        let mut data = out.data.iter().peekable();
        while let Some(first) = data.next() {
            let packet = |data: &rte::DataOut| [&data.header.emit()[..], &self.frames[&data.handle]].concat();
            let mut bytes = packet(first);
            if self.bundles
                && let Some(second) = data.next_if(|second| second.header.path == first.header.path)
            {
                assert!(first.header.version.has_bundles());
                bundle::begin(&mut bytes, 0);
                bundle::append(&mut bytes, |bytes| bytes.extend_from_slice(&packet(second)));
                self.bundled += 2;
            }
            let bytes = self.on_path(first.header.path, &tunnel, &bytes);
            self.leaving.push(bytes);
        }
        for control in &out.control {
            let mut head = tunnel.to_vec();
            match &control.packet {
                Control::Ack(ack) => ack.emit(&mut head),
                Control::Probe(header) => head.extend_from_slice(&header.emit()),
                Control::Skip(header) => head.extend_from_slice(&header.emit_skip()),
                Control::Setup(setup) => head.extend_from_slice(&setup.emit()),
                Control::Reset(reset) => head.extend_from_slice(&reset.emit()),
            }
            let bytes = self.on_path(control.path, &head, &[]);
            self.leaving.push(bytes);
        }
        for plain in &out.plain {
            let bytes = frame(self.addresses[0], (50_000, 4789), &tunnel, &self.frames[&plain.handle]);
            self.leaving.push(bytes);
        }
        out.clear();
        self.out = out;
    }

    fn on_path(&self, path: PathId, head: &[u8], tail: &[u8]) -> Vec<u8> {
        let source = self.addresses[path.index() % self.addresses.len()];
        frame(source, (49_152 + u16::from(path.get()), PORT), head, tail)
    }

    pub(super) fn in_flight(&self, now: u64) -> u32 {
        self.engine.connection_snapshots(Time(now)).map(|c| c.in_flight_packets + c.pending_packets).sum()
    }
}

/// Faults of the network, per thousand packets.
#[derive(Clone, Copy, Default)]
pub(super) struct Network {
    pub(super) lost: u32,
    pub(super) repeated: u32,
    pub(super) jitter_ns: u64,
}

pub(super) struct World {
    /// The VLAN tag of all frames between hosts and gateway, if any.
    tag: Option<[u8; 4]>,
    pub(super) pipeline: Pipeline,
    pub(super) hosts: Vec<Host>,
    pub(super) now: u64,
    pub(super) network: Network,
    pub(super) random: fastrand::Rng,
    under_way: BTreeMap<(u64, u64), (bool, Vec<u8>)>,
    sent: u64,
    ring: VecDeque<Vec<u8>>,
    pub(super) ring_size: usize,
    /// Packets that the pod takes per step.
    pub(super) pace: usize,
    /// The pod sends back what it receives.
    pub(super) echo: bool,
    /// Inner frames that the pod received, with the outer source.
    pub(super) pod_got: Vec<(IpAddr, Vec<u8>)>,
}

struct OneRing<'a>(&'a mut VecDeque<Vec<u8>>, usize);

impl Rings for OneRing<'_> {
    fn has_room(&mut self, _: Ring) -> bool {
        self.0.len() < self.1
    }

    fn put(&mut self, _: Ring, parts: &[&[u8]]) -> bool {
        self.0.push_back(parts.concat());
        true
    }
}

impl Links for OneRing<'_> {
    fn rings(&mut self, _: Place) -> impl Rings {
        OneRing(self.0, self.1)
    }
}

pub(super) fn pod(reliable: ReliableConfig) -> PodConfig {
    let rate = Rate { per_second: 100_000_000, burst: 100_000 };
    PodConfig {
        name: "pod".to_owned(),
        balancer: plb::Config { pod: POD, cores: 1, order_queues: 1, queue_entries: 4096, ..plb::Config::default() },
        interfaces: vec![None],
        mac: None,
        rules: Rules { own: vec![GATEWAY.parse().unwrap()], ..Rules::default() },
        limiter: LimiterConfig { first: rate, second: rate, ..LimiterConfig::default() },
        control: Rate { per_second: 1000, burst: 8 },
        header_only_from: None,
        reliable: Some(reliable),
    }
}

impl World {
    pub(super) fn new(pod: PodConfig, hosts: Vec<Host>) -> Self {
        let tag = pod.interfaces[0].map(|vlan| [0x81, 0, (vlan >> 8) as u8, vlan as u8]);
        let mut pipeline = Pipeline::new(PipelineConfig { pods: vec![pod], longest: LONGEST, seed: 3 }).unwrap();
        pipeline.pods_mut()[0].set_up(0, true);
        World {
            tag,
            pipeline,
            hosts,
            now: 1 << 40,
            network: Network::default(),
            random: fastrand::Rng::with_seed(4),
            under_way: BTreeMap::new(),
            sent: 0,
            ring: VecDeque::new(),
            ring_size: 4096,
            pace: usize::MAX,
            echo: false,
            pod_got: Vec::new(),
        }
    }

    pub(super) fn reliable(&self) -> &Reliable {
        self.pipeline.pods()[0].reliable().unwrap()
    }

    /// The pod goes down, with what was in its ring, or comes back up.
    pub(super) fn set_up(&mut self, up: bool) {
        self.pipeline.pods_mut()[0].set_up(0, up);
        if !up {
            self.ring.clear();
        }
    }

    /// A frame arrives at the gateway.
    pub(super) fn arrive(&mut self, frame: &[u8]) -> Result<(Place, Option<Ring>), Refusal> {
        let World { pipeline, ring, ring_size, now, .. } = self;
        pipeline.arrive(*now, *now, frame, |_| OneRing(ring, *ring_size))
    }

    fn travel(&mut self, to_gateway: bool, mut frame: Vec<u8>) {
        if let Some(tag) = self.tag {
            if to_gateway {
                frame.splice(12..12, tag);
            } else {
                assert_eq!(frame.drain(12..16).collect::<Vec<_>>(), tag, "frames leave with the tag");
            }
        }
        let Network { lost, repeated, jitter_ns } = self.network;
        let copies = if self.random.u32(..1000) < repeated { 2 } else { 1 };
        for _ in 0..copies {
            if self.random.u32(..1000) < lost {
                continue;
            }
            let at = self.now + 10_000 + self.random.u64(..=jitter_ns);
            self.sent += 1;
            self.under_way.insert((at, self.sent), (to_gateway, frame.clone()));
        }
    }

    pub(super) fn pass(&mut self, ns: u64) {
        let until = self.now + ns;
        while self.now < until {
            self.now += STEP_NS;
            self.step();
        }
    }

    fn step(&mut self) {
        while let Some(entry) = self.under_way.first_entry().filter(|entry| entry.key().0 <= self.now) {
            let (to_gateway, frame) = entry.remove();
            if to_gateway {
                let _ = self.arrive(&frame);
                continue;
            }
            let to = look(&frame).unwrap().outer.dst_ip.to_string();
            let now = self.now;
            self.hosts.iter_mut().find(|host| host.addresses.contains(&&*to)).unwrap().receive(now, &frame);
        }
        let World { pipeline, ring, ring_size, now, .. } = self;
        pipeline.settle(*now, &mut OneRing(ring, *ring_size));
        for _ in 0..self.pace {
            let Some(mut bytes) = self.ring.pop_front() else { break };
            let arrival = look(&bytes[..bytes.len() - plb::TRAILER_LEN]).unwrap();
            let inner_at = usize::from(arrival.outer.payload) + vxlan::HEADER_LEN;
            let end = bytes.len() - plb::TRAILER_LEN;
            self.pod_got.push((arrival.outer.src_ip, bytes[inner_at..end].to_vec()));
            if self.echo {
                let addresses = if arrival.outer.src_ip.is_ipv4() { (26, 30, 4) } else { (22, 38, 16) };
                for (a, b, len) in [(0, 6, 6), addresses, (inner_at, inner_at + 6, 6)] {
                    (0..len).for_each(|i| bytes.swap(a + i, b + i));
                }
            } else {
                let flags = bytes.len() - 5;
                bytes[flags] |= 1;
            }
            self.give_back(&bytes);
        }
        let mut left = Vec::new();
        let now = self.now;
        self.pipeline.pods_mut()[0].release(now, u32::MAX, |leaving| left.push(leaving.parts.concat()));
        self.pipeline.emit(|parts| left.push(parts.concat()));
        left.into_iter().for_each(|frame| self.travel(false, frame));
        for host in 0..self.hosts.len() {
            self.hosts[host].turn(now);
            for frame in std::mem::take(&mut self.hosts[host].leaving) {
                self.travel(true, frame);
            }
        }
    }

    fn give_back(&mut self, bytes: &[u8]) {
        let mut left = Vec::new();
        let read = |buffer: &mut [u8]| {
            buffer[..bytes.len()].copy_from_slice(bytes);
            Some(Ok::<_, ()>(bytes.len()))
        };
        assert!(self.pipeline.pods_mut()[0].take_back(0, read, |leaving| left.push(leaving.parts.concat())));
        left.into_iter().for_each(|frame| self.travel(false, frame));
    }

    /// The pod sends its own frame to a vNIC of a host.
    pub(super) fn pod_sends(&mut self, host: usize, flow: u16, number: u32) {
        let (to, mac) = (self.hosts[host].addresses[0].parse().unwrap(), self.hosts[host].mac);
        let inner = inner(mac, GATEWAY_MAC, flow, number);
        let ends = Ends {
            source: gateway_of(to),
            destination: to,
            source_port: 50_000,
            destination_port: 4789,
            ecn: 0,
            is_summed: false,
        };
        let mut frame = Vec::new();
        outer::write(&mut frame, &link(), &ends, &vxlan::emit(Vni::new(VNI).unwrap()), &inner).unwrap();
        frame.extend_from_slice(&inner);
        let trailer = Trailer { psn: 0, payload: None, pod: POD, queue: 0, drop: false, unordered: true };
        frame.extend_from_slice(&trailer.emit());
        self.give_back(&frame);
    }
}

/// Checks that these are the frames `0..count` of each flow, each once and in order.
pub(super) fn assert_complete<'a>(frames: impl Iterator<Item = &'a [u8]>, flows: u16, count: u32) {
    let mut next = BTreeMap::new();
    for frame in frames {
        let (flow, number) = read(frame);
        let next = next.entry(flow).or_insert(0);
        assert_eq!(*next, number, "flow {flow}");
        *next += 1;
    }
    assert_eq!(next.len(), usize::from(flows));
    assert!(next.values().all(|next| *next == count), "{next:?}");
}
