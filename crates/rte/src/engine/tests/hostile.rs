//! A peer that sends anything: no panic, bounded memory, and no effect on other peers' connections.

use bifrost_wire::Mac;
use bifrost_wire::bifrost::{
    AckHeader, AckKind, Bitmap, Cid, DataHeader, PathId, Psn, RejectReason, Reset, Setup, SetupKind, Tick, Version,
};

use super::pair::{Rng, VNI, World, mac};
use crate::config::Config;
use crate::conn::Pair;
use crate::engine::{Arrival, Destination, LocalVnic, Outbound, Verdict};
use crate::output::{Output, PeerId};
use crate::{MS, Ordering, US};

/// Numbers that are often near a boundary.
fn odd(rng: &mut Rng, near: u32) -> u32 {
    match rng.below(6) {
        0 => rng.next() as u32,
        1 => near.wrapping_add(rng.below(600) as u32),
        2 => near.wrapping_sub(rng.below(600) as u32),
        3 => near.wrapping_add(4090 + rng.below(12) as u32),
        4 => near.wrapping_add(1 << 31).wrapping_add(rng.below(3) as u32).wrapping_sub(1),
        _ => near,
    }
}

struct Attacker {
    peer: PeerId,
    known: Vec<Cid>,
    placed: u32,
    out: Output,
}

impl Attacker {
    fn attack(&mut self, world: &mut World, rng: &mut Rng) {
        let now = world.now;
        let engine = &mut world.sides[1].engine;
        let vni = if rng.chance(0.9) { VNI } else { rng.next() as u32 };
        let arrival = Arrival { peer: self.peer, vni, nic_rx: now, hops: rng.next() as u8, marked: rng.chance(0.5) };
        let cid = match rng.below(4) {
            0 => Cid(rng.next() as u32),
            _ if self.known.is_empty() => Cid(rng.next() as u32),
            _ => self.known[rng.below(self.known.len() as u64) as usize],
        };
        let version = if rng.chance(0.9) { Version::LATEST } else { Version::V1 };
        let psn = Psn(odd(rng, rng.clone().below(3000) as u32));
        let header = DataHeader {
            version,
            cc: rng.next() as u8 & 15,
            probe: false,
            ack_now: rng.chance(0.3),
            from_responder: rng.chance(0.5),
            ecn: rng.chance(0.5),
            retransmit: rng.chance(0.5),
            path: PathId::masked(rng.next() as u8),
            distance: rng.next() as u8,
            psn,
            cid,
            timestamp: Tick(odd(rng, now.tick().0)),
        };
        let out = &mut self.out;
        match rng.below(40) {
            0..=16 => {
                if let Verdict::Place { slot, .. } = engine.on_data(now, &arrival, &header, out) {
                    match rng.below(5) {
                        0 => engine.not_placed(slot),
                        1 => engine.policy_dropped(now, slot, out),
                        2 => engine.rate_limited(slot),
                        _ => {
                            self.placed = self.placed.wrapping_add(1);
                            engine.placed(now, slot, self.placed, out);
                            // Twice for one slot: a caller's mistake must not corrupt state either.
                            engine.placed(now, slot, self.placed, out);
                        }
                    }
                }
            }
            17..=19 => engine.on_probe(now, &arrival, &DataHeader { probe: true, ..header }, out),
            20..=24 => engine.on_skip(now, &arrival, &header, out),
            25..=34 => {
                let mut bitmap = Bitmap::empty();
                for _ in 0..rng.below(40) {
                    bitmap.set(rng.below(256) as usize);
                }
                let kind = [AckKind::Cumulative, AckKind::Selective, AckKind::RateLimited][rng.below(3) as usize];
                let ack = AckHeader {
                    version,
                    cc: 0,
                    probe: rng.chance(0.2),
                    path: header.path,
                    hops: 3,
                    kind,
                    psn,
                    cid,
                    sent: Tick(odd(rng, now.tick().0)),
                    echo: Tick(odd(rng, now.tick().0)),
                    nic_rx: Tick(odd(rng, now.tick().0)),
                    num_ack: rng.next() as u16,
                    num_ece: rng.next() as u16,
                    base: Psn(odd(rng, rng.clone().below(200) as u32)),
                    bitmap,
                };
                engine.on_ack(now, &arrival, &ack, out);
            }
            35..=38 => {
                let kind = match rng.below(4) {
                    0 => SetupKind::Response,
                    1 => SetupKind::Reject(RejectReason::Version),
                    _ => SetupKind::Request { oldest: rng.below(4) as u8 },
                };
                let setup = Setup {
                    kind,
                    version: rng.below(6) as u8,
                    cc: 1,
                    worker: rng.below(3) as u8,
                    local: Cid(rng.below(5) as u32),
                    destination: cid,
                    to: mac(1),
                    // Sometimes it claims to be the honest peer's vNIC.
                    from: if rng.chance(0.3) { mac(0) } else { Mac([2, 0, 0, 0, 9, rng.below(20) as u8]) },
                    instance: rng.below(5),
                    generation: rng.below(5) as u32,
                    window: rng.next() as u16,
                    ack_delay_us: rng.next() as u16,
                };
                let vnic = LocalVnic { owner: 8, ordering: Ordering::Flow, reliable: true };
                engine.on_setup(now, &arrival, &setup, rng.chance(0.9).then_some(vnic), out);
            }
            _ => engine.on_reset(now, &arrival, &Reset { unknown: Cid(rng.below(5) as u32) }, out),
        }
        if rng.chance(0.3) {
            let to = Destination {
                vni: VNI,
                owner: 8,
                local: mac(1),
                remote: Mac([2, 0, 0, 0, 9, rng.below(20) as u8]),
                peer: self.peer,
                ordering: Ordering::Flow,
            };
            engine.transmit(now, &to, Outbound { handle: 1 << 30, segments: 1 + rng.below(60) as u8, flow: 1 }, out);
        }
        // It knows its own connections' CIDs, from set-up.
        self.known.clear();
        self.known.extend(engine.connection_snapshots(now).filter(|c| c.peer == self.peer).map(|c| c.local_cid));
        // Output that the attack caused for its own vNICs is discarded; it never contains the honest pair's.
        assert!(out.publish.iter().all(|p| p.0 == 8), "an attack made the honest guest see something");
        assert!(out.release.iter().all(|p| p.0 == 8), "an attack released the honest guest's buffer");
        assert!(out.data.iter().all(|d| d.owner == 8 && d.peer == self.peer));
        out.clear();
    }
}

#[test]
fn a_hostile_peer_disturbs_nobody_else() {
    let mut reached = [0u64; 7];
    for seed in 0..30 {
        let config = Config { max_connections: 64, max_pages: 512, ..Config::default() };
        let mut world = World::new(300 + seed, 4, [Config::default(), config]);
        let mut rng = Rng(seed);
        let peer = world.sides[1].engine.add_peer(4);
        let mut attacker = Attacker { peer, known: Vec::new(), placed: 1 << 30, out: Output::default() };
        world.isolate_owner = Some(8);
        for i in 0..2_000 {
            world.offer(0, i % 7, 1);
            for _ in 0..5 {
                attacker.attack(&mut world, &mut rng);
            }
            world.run_for(rng.below(40) * US);
        }
        world.run_for(300 * MS);
        world.assert_complete(0);
        let engine = &world.sides[1].engine;
        assert!(engine.connections() <= 64);
        let (send, receive) = engine.pages_used();
        assert!(send <= 512 && receive <= 512, "pages {send} {receive}");
        let c = engine.counters();
        let counts = [
            c.acks_received_packets,
            c.skips_received_packets,
            c.policy_dropped_packets,
            c.rate_limited_packets,
            c.outside_window_packets,
            c.restarted_connections,
            c.resets_received_packets,
        ];
        reached.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        let honest = Pair { vni: VNI, local: mac(1), remote: mac(0) };
        assert!(engine.state_of(honest).is_some());
    }
    // The attack must have passed the first checks in every respect.
    assert!(reached.iter().all(|n| *n > 100), "{reached:?}");
}
