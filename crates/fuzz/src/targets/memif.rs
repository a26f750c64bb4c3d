//! A gateway pod that writes anything anywhere in the memory that it shares with the pipeline, beside an honest pod.

use std::collections::VecDeque;
use std::os::unix::fs::FileExt as _;

use bifrost_nicpipe::{Pipeline, PipelineConfig, PodConfig, Ring, Rings, Rules};
use bifrost_plb::{Config, TRAILER_LEN};
use bifrost_port::memif::{Attached, Client, ClientConfig, Queue, Server, ServerConfig, ToClient};
use bifrost_tables::{LimiterConfig, Rate};
use bifrost_wire::ethernet::TAG_LEN;
use bifrost_wire::protocol::UDP;
use bifrost_wire::{ipv4, udp};

use crate::Input;

const CORES: u16 = 2;
/// Ring size as a power of two: small, so that indexes wrap.
const LOG2: u8 = 4;
const ENTRIES: usize = 1 << LOG2;
/// Bytes of all rings, which are in front of the buffers.
const RINGS: u32 = 6 * 384;
const LONGEST: usize = 2048;
/// The VLANs of the hostile pod and of the honest one.
const VLANS: [u16; 2] = [7, 9];
const HONEST: usize = 1;

/// The rings of the hostile pod.
struct Shared<'a>(&'a mut [ToClient]);

fn number(ring: Ring) -> usize {
    match ring {
        Ring::Priority => 0,
        Ring::Core(core) => 1 + usize::from(core),
    }
}

impl Rings for Shared<'_> {
    fn has_room(&mut self, ring: Ring) -> bool {
        self.0[number(ring)].room() > 0
    }

    fn put(&mut self, ring: Ring, parts: &[&[u8]]) -> bool {
        self.0[number(ring)].push(parts).is_ok()
    }
}

/// Those of the honest one.
#[derive(Default)]
struct Local(VecDeque<Vec<u8>>);

impl Rings for &mut Local {
    fn has_room(&mut self, _: Ring) -> bool {
        self.0.len() < ENTRIES
    }

    fn put(&mut self, _: Ring, parts: &[&[u8]]) -> bool {
        self.0.push_back(parts.concat());
        true
    }
}

/// Both pods, and the pipeline.
struct World {
    pipeline: Pipeline,
    attached: Attached,
    client: Client,
    queues: Vec<Queue>,
    honest: Local,
    now: u64,
}

impl World {
    fn new(header_only: bool) -> Self {
        let pod = |number: usize| PodConfig {
            name: format!("pod{number}"),
            balancer: Config {
                pod: number as u16,
                cores: CORES,
                queue_entries: 32,
                payload_slots: 64,
                ..Config::default()
            },
            interfaces: vec![Some(VLANS[number])],
            mac: None,
            rules: Rules::default(),
            limiter: LimiterConfig { color_entries: 16, meter_entries: 16, ..LimiterConfig::default() },
            control: Rate { per_second: 1000, burst: 10 },
            header_only_from: header_only.then_some(100),
            reliable: None,
        };
        let config = PipelineConfig { pods: vec![pod(0), pod(HONEST)], longest: LONGEST, seed: 1 };
        let mut pipeline = Pipeline::new(config).unwrap_or_else(|e| panic!("{e}"));
        pipeline.pods_mut().iter_mut().for_each(|pod| pod.set_up(0, true));
        let (attached, mut client) = connect();
        let queues = client.take_queues();
        World { pipeline, attached, client, queues, honest: Local::default(), now: 1 << 40 }
    }

    fn arrive(&mut self, pod: usize, number: u32, len: usize) -> bool {
        let World { pipeline, attached, honest, now, .. } = self;
        let frame = frame(pod, number, len);
        if pod == HONEST {
            return pipeline.arrive(*now, *now, &frame, |_| &mut *honest).is_ok();
        }
        let taken = pipeline.arrive(*now, *now, &frame, |_| Shared(&mut attached.to_client)).is_ok();
        attached.to_client.iter_mut().for_each(|ring| _ = ring.publish());
        taken
    }

    /// The hostile pod returns what it was given, as far as it still can.
    fn work(&mut self) {
        for queue in &mut self.queues {
            for _ in 0..queue.available().min(ENTRIES as u16) {
                let Some(received) = queue.received() else { break };
                let (start, len) = (received.start, received.len);
                queue.send_received(start, len);
            }
            queue.publish();
        }
    }

    /// Takes back what the rings of the hostile pod hold.
    fn collect(&mut self) {
        let World { pipeline, attached, .. } = self;
        let pod = &mut pipeline.pods_mut()[0];
        for ring in &mut attached.from_client {
            let mut packets = 0;
            while pod.take_back(0, |buffer| ring.pop(buffer), |leaving| check(leaving.parts)) {
                packets += 1;
                assert!(packets <= ENTRIES, "a ring holds more packets than it has entries");
            }
            ring.release();
        }
    }

    fn release(&mut self) {
        let pod = &mut self.pipeline.pods_mut()[0];
        pod.release(self.now, u32::MAX, |leaving| check(leaving.parts));
        let (places, held) = pod.occupancy();
        assert!(places <= 32 && held <= places);
    }

    /// Everything has left after the timeout.
    fn quiet_down(&mut self) {
        self.now += Config::default().timeout_ns + 1;
        self.release();
        assert_eq!(self.pipeline.pods()[0].occupancy(), (0, 0), "packets are still held");
    }

    /// The honest pod gets its packets, and they leave unchanged and in order.
    fn honest_pod_works(&mut self) {
        let frames: Vec<Vec<u8>> = (0..8).map(|number| frame(HONEST, number, 300)).collect();
        for number in 0..8 {
            assert!(self.arrive(HONEST, number, 300), "no room for an honest pod");
        }
        let mut left = Vec::new();
        let pod = &mut self.pipeline.pods_mut()[HONEST];
        for returned in std::mem::take(&mut self.honest.0).into_iter().rev() {
            let read = |buffer: &mut [u8]| {
                buffer[..returned.len()].copy_from_slice(&returned);
                Some(Ok::<usize, ()>(returned.len()))
            };
            assert!(pod.take_back(0, read, |leaving| left.push(leaving.parts.concat())));
        }
        pod.release(self.now, u32::MAX, |leaving| left.push(leaving.parts.concat()));
        assert_eq!(left, frames);
    }
}

/// What leaves is an Ethernet frame of the hostile pod's VLAN.
fn check(parts: [&[u8]; 4]) {
    let [macs, tag, rest, payload] = parts;
    assert_eq!((macs.len(), tag), (12, &[0x81, 0, 0, VLANS[0] as u8][..]));
    assert!(rest.len() >= 2 && macs.len() + rest.len() <= LONGEST + TRAILER_LEN && payload.len() <= LONGEST);
}

fn connect() -> (Attached, Client) {
    let directory = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
    let path = directory.path().join("memif.sock");
    let server = ServerConfig { path: path.clone(), name: "server".to_owned(), id: 0, rings: CORES + 1 };
    let client = ClientConfig {
        path,
        name: "client".to_owned(),
        id: 0,
        queues: CORES + 1,
        log2_entries: LOG2,
        headroom: 64,
        longest: LONGEST + TRAILER_LEN,
    };
    let server = Server::bind(server).unwrap_or_else(|e| panic!("{e}"));
    let connecting = std::thread::spawn(move || Client::connect(&client).unwrap_or_else(|e| panic!("{e}")));
    let attached = server.accept().unwrap_or_else(|e| panic!("{e}"));
    (attached, connecting.join().unwrap_or_else(|_| panic!("the client cannot connect")))
}

/// A datagram in the VLAN of a pod.
fn frame(pod: usize, number: u32, len: usize) -> Vec<u8> {
    let mut payload = number.to_be_bytes().to_vec();
    payload.resize(len.max(4), number as u8);
    let bytes = (udp::HEADER_LEN + payload.len()) as u16;
    let header = ipv4::Header::new([10, 0, 0, 2].into(), [10, 0, 0, 1].into(), UDP, bytes);
    let udp = udp::Header { source_port: 1 + number as u16 % 5, destination_port: 9, len: bytes, checksum: 0 };
    let tag = [0x81, 0, 0, VLANS[pod] as u8];
    debug_assert_eq!(tag.len(), TAG_LEN);
    [&[2; 12][..], &tag, &[8, 0], &header.emit(), &udp.emit(), &payload].concat()
}

pub(crate) fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let mut world = World::new(input.chance(100));
    let size = world.client.memory().metadata().map_or(0, |data| data.len()).max(1);
    let mut number = 0;
    while !input.is_empty() {
        match input.below(16) {
            0..=4 => {
                world.arrive(0, number, input.pick(&[20, 200, 900, 1900]));
                number += 1;
            }
            5..=7 => world.work(),
            8..=11 => {
                // Indexes and descriptors, or buffers with their trailers.
                let all = input.chance(100);
                let at = if all { u64::from(input.u32()) % size } else { u64::from(u32::from(input.u16()) % RINGS) };
                let bytes = input.below(16) + 1;
                let bytes = input.bytes(bytes);
                let bytes = &bytes[..bytes.len().min((size - at) as usize)];
                // The file cannot grow or shrink, so nothing else can fail.
                let _ = world.client.memory().write_all_at(bytes, at);
            }
            12 | 13 => world.collect(),
            14 => {
                world.now += input.pick(&[1, 10_000, 60_000, 100_001]);
                world.release();
            }
            _ => {
                let up = input.chance(200);
                world.pipeline.pods_mut()[0].set_up(0, up);
            }
        }
    }
    world.collect();
    world.quiet_down();
    world.honest_pod_works();
}
