//! A pipeline and a pod in virtual time: cores with rings, each packet with its own service time.

use std::collections::VecDeque;

use bifrost_plb as plb;
use bifrost_tables::{LimiterConfig, Rate};
use bifrost_wire::protocol::UDP;
use bifrost_wire::{Vni, ipv4, udp, vxlan};

use crate::*;

pub(super) const VLAN: u16 = 7;
pub(super) const LONGEST: usize = 2000;
pub(super) const SEED: u64 = 3;
const MACS: [u8; 12] = [2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];

pub(super) fn config(cores: u16) -> PodConfig {
    PodConfig {
        name: "pod".to_owned(),
        balancer: plb::Config {
            pod: 5,
            cores,
            order_queues: 2,
            queue_entries: 256,
            payload_slots: 1024,
            ..plb::Config::default()
        },
        interfaces: vec![Some(VLAN)],
        mac: None,
        rules: Rules { own: vec!["10.0.0.1".parse().unwrap()], ..Rules::default() },
        limiter: LimiterConfig::default(),
        control: Rate { per_second: 1000, burst: 8 },
        header_only_from: None,
        reliable: None,
    }
}

pub(super) fn ip(source: [u8; 4], destination: [u8; 4], protocol: u8, payload: &[u8]) -> Vec<u8> {
    let header = ipv4::Header {
        header_len: 20,
        traffic_class: 0,
        total_len: (20 + payload.len()) as u16,
        identification: 0,
        dont_fragment: true,
        more_fragments: false,
        fragment_offset: 0,
        ttl: 64,
        protocol,
        checksum: 0,
        source: source.into(),
        destination: destination.into(),
    };
    [&header.emit()[..], payload].concat()
}

pub(super) fn datagram(source: [u8; 4], destination: [u8; 4], ports: (u16, u16), payload: &[u8]) -> Vec<u8> {
    let len = (8 + payload.len()) as u16;
    let header = udp::Header { source_port: ports.0, destination_port: ports.1, len, checksum: 0 };
    ip(source, destination, UDP, &[&header.emit()[..], payload].concat())
}

pub(super) fn framed(vlan: Option<u16>, packet: &[u8]) -> Vec<u8> {
    let tag = vlan.map_or(vec![], |vlan| [&[0x81, 0][..], &vlan.to_be_bytes()].concat());
    [&MACS[..], &tag, &[8, 0], packet].concat()
}

/// A packet of a flow of a tenant, with its number.
pub(super) fn packet(vni: u32, flow: u16, number: u32, len: usize) -> Vec<u8> {
    let mut payload = number.to_be_bytes().to_vec();
    payload.resize(len.max(4), flow as u8);
    let inner = framed(None, &datagram([192, 168, 0, 1], [192, 168, 0, 2], (flow, 9), &payload));
    let payload = [&vxlan::emit(Vni::new(vni).unwrap())[..], &inner].concat();
    framed(Some(VLAN), &datagram([10, 0, 0, 11], [10, 0, 0, 1], (50_000, 4789), &payload))
}

/// Flow and number of a packet.
pub(super) fn read(frame: &[u8]) -> (u16, u32) {
    let inner = 18 + 20 + 8 + 8 + 14 + 20;
    let flow = u16::from_be_bytes([frame[inner], frame[inner + 1]]);
    (flow, u32::from_be_bytes(frame[inner + 8..inner + 12].try_into().unwrap()))
}

fn in_ring((place, ring): (Place, Option<Ring>)) -> (Place, Ring) {
    (place, ring.unwrap())
}

/// A packet at a core, and when it will be finished.
#[derive(Clone, Debug)]
struct Job {
    bytes: Vec<u8>,
    done_at: Option<u64>,
}

pub(super) struct World {
    pub(super) pipeline: Pipeline,
    pub(super) now: u64,
    pub(super) random: fastrand::Rng,
    cores: Vec<VecDeque<Job>>,
    pub(super) priority: VecDeque<Vec<u8>>,
    pub(super) ring: usize,
    /// Bytes of a buffer of the pod.
    pub(super) buffer: usize,
    /// Service times, ns.
    pub(super) service: std::ops::Range<u64>,
    /// One of how many packets the pod drops; 0: none.
    pub(super) drops: u32,
    /// Until when a core is stopped.
    pub(super) stopped: Vec<u64>,
    pub(super) left: Vec<Vec<u8>>,
    pub(super) dropped_by_pod: u64,
}

struct TestRings<'a> {
    cores: &'a mut [VecDeque<Job>],
    priority: &'a mut VecDeque<Vec<u8>>,
    size: usize,
    buffer: usize,
}

impl Rings for TestRings<'_> {
    fn has_room(&mut self, ring: Ring) -> bool {
        match ring {
            Ring::Priority => self.priority.len() < self.size,
            Ring::Core(core) => self.cores[usize::from(core)].len() < self.size,
        }
    }

    fn put(&mut self, ring: Ring, parts: &[&[u8]]) -> bool {
        assert!(self.has_room(ring));
        if parts.iter().map(|part| part.len()).sum::<usize>() > self.buffer {
            return false;
        }
        match ring {
            Ring::Priority => self.priority.push_back(parts.concat()),
            Ring::Core(core) => self.cores[usize::from(core)].push_back(Job { bytes: parts.concat(), done_at: None }),
        }
        true
    }
}

impl World {
    pub(super) fn new(config: PodConfig) -> Self {
        Self::with_longest(config, LONGEST)
    }

    /// With frames of up to `longest` bytes.
    pub(super) fn with_longest(config: PodConfig, longest: usize) -> Self {
        let cores = usize::from(config.balancer.cores);
        let mut pipeline = Pipeline::new(PipelineConfig { pods: vec![config], longest, seed: SEED }).unwrap();
        pipeline.pods_mut()[0].set_up(0, true);
        World {
            pipeline,
            now: 1 << 40,
            random: fastrand::Rng::with_seed(1),
            cores: vec![VecDeque::new(); cores],
            priority: VecDeque::new(),
            ring: 64,
            buffer: usize::MAX,
            service: 500..1500,
            drops: 0,
            stopped: vec![0; cores],
            left: Vec::new(),
            dropped_by_pod: 0,
        }
    }

    pub(super) fn pod(&mut self) -> &mut Pod {
        &mut self.pipeline.pods_mut()[0]
    }

    pub(super) fn arrive(&mut self, frame: &[u8]) -> Result<(Place, Ring), Refusal> {
        self.arrive_late(0, frame)
    }

    /// The same for a frame that waited for the pipeline.
    pub(super) fn arrive_late(&mut self, waited_ns: u64, frame: &[u8]) -> Result<(Place, Ring), Refusal> {
        let World { pipeline, cores, priority, ring, buffer, now, .. } = self;
        let (at, size, buffer) = (*now - waited_ns, *ring, *buffer);
        pipeline.arrive(*now, at, frame, |_| TestRings { cores, priority, size, buffer }).map(in_ring)
    }

    /// Advances time: cores work, and return finished packets.
    pub(super) fn pass(&mut self, ns: u64) {
        let until = self.now + ns;
        while self.now < until {
            self.now = (self.now + 100).min(until);
            for core in 0..self.cores.len() {
                self.work(core);
            }
            let World { pipeline, left, now, .. } = self;
            pipeline.pods_mut()[0].release(*now, u32::MAX, |leaving| left.push(leaving.parts.concat()));
        }
    }

    fn work(&mut self, core: usize) {
        while self.now >= self.stopped[core] {
            let service = self.random.u64(self.service.clone());
            let Some(job) = self.cores[core].front_mut() else { return };
            let done_at = *job.done_at.get_or_insert(self.now + service);
            if done_at > self.now {
                return;
            }
            let Some(mut job) = self.cores[core].pop_front() else { return };
            if self.drops > 0 && self.random.u32(..self.drops) == 0 {
                let flags = job.bytes.len() - 5;
                job.bytes[flags] |= 1;
                self.dropped_by_pod += 1;
            }
            self.give_back(&job.bytes);
        }
    }

    /// The pod returns these bytes.
    pub(super) fn give_back(&mut self, bytes: &[u8]) {
        let World { pipeline, left, .. } = self;
        let read = |buffer: &mut [u8]| {
            let room = buffer.get_mut(..bytes.len());
            Some(room.map(|room| room.copy_from_slice(bytes)).map(|()| bytes.len()).ok_or(()))
        };
        assert!(pipeline.pods_mut()[0].take_back(0, read, |leaving| left.push(leaving.parts.concat())));
    }

    /// Packets at the core with most of them.
    pub(super) fn longest_ring(&self) -> usize {
        self.cores.iter().map(VecDeque::len).max().unwrap_or(0)
    }

    /// Packets waiting at a core.
    pub(super) fn ring_of(&self, core: usize) -> impl Iterator<Item = &[u8]> {
        self.cores[core].iter().map(|job| &job.bytes[..])
    }

    /// Packets of a flow that left after a later one.
    pub(super) fn reordered(&self) -> usize {
        let mut last = std::collections::BTreeMap::new();
        let late = |frame: &&Vec<u8>| {
            let (flow, number) = read(frame);
            let last = last.entry(flow).or_insert(number);
            let late = number < *last;
            *last = number.max(*last);
            late
        };
        self.left.iter().filter(late).count()
    }
}
