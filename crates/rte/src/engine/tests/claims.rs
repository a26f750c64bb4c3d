//! A peer that makes false claims: each claim is refused under its reason, and costs no more than its own packets.

use bifrost_wire::bifrost::{AckHeader, AckKind, Bitmap, Cid, DataHeader, PathId, Psn, Reset, Tick, Version};

use super::pair::{VNI, World, data};
use super::*;
use crate::{Control, Counters, PathState};

/// The smallest DATA packet, bytes (PROTOCOL §3.1).
const LEAST_DATA: usize = 16 + 14;

fn ack(cid: Cid, base: Psn, kind: AckKind, bitmap: Bitmap, now: Time) -> AckHeader {
    AckHeader {
        version: Version::LATEST,
        cc: 0,
        probe: false,
        path: PathId::default(),
        hops: 0,
        kind,
        psn: base,
        cid,
        sent: now.tick(),
        echo: now.tick(),
        nic_rx: now.tick(),
        num_ack: 1,
        num_ece: 0,
        base,
        bitmap,
    }
}

fn full() -> Bitmap {
    Bitmap::from_words(&[u32::MAX; 8]).expect("eight")
}

/// A world with an open connection, and unanswered packets in flight from side 0.
fn in_flight(packets: u32) -> (World, Cid, Cid) {
    let mut w = world(31, 4);
    stream(&mut w, 0, 200, 5, 10 * US);
    w.run_for(10 * MS);
    for i in 0..packets {
        w.offer(0, i % 5, 1);
    }
    let cids = [0, 1].map(|side| w.sides[side].engine.cid_of(World::pair(side)).expect("open"));
    (w, cids[0], cids[1])
}

fn from(peer: PeerId, vni: u32, now: Time) -> Arrival {
    Arrival { peer, vni, nic_rx: now, hops: 0, marked: false }
}

#[test]
fn packets_on_a_path_that_only_the_peer_has_are_answered_on_it() {
    // The two hosts have four paths each, as far as this host knows; the peer's path 6 exists on its side only.
    let (mut w, _, cid) = in_flight(0);
    let now = w.now;
    let engine = &mut w.sides[1].engine;
    let mut out = Output::default();
    let arrival = from(PeerId(0), VNI, now);
    let header = DataHeader { path: PathId::masked(6), ack_now: true, ..data(Psn(200), cid, now) };
    let Verdict::Place { slot, .. } = engine.on_data(now, &arrival, &header, &mut out) else { panic!("not placed") };
    engine.placed(now, slot, 0, &mut out);
    engine.on_probe(now, &arrival, &DataHeader { probe: true, ..header }, &mut out);
    engine.flush_acks(now, &mut out);
    let acks = out.control.iter().filter_map(|c| match &c.packet {
        Control::Ack(ack) => Some((c.path.get(), ack.path.get(), ack.psn)),
        _ => None,
    });
    assert_eq!(acks.collect::<Vec<_>>(), [(6, 6, Psn(200)), (6, 6, Psn(200))], "a probe's answer, an ACK");
    assert_eq!(engine.counters().unknown_path_packets, 0);
}

#[test]
fn acks_of_a_path_that_this_host_does_not_have_change_nothing() {
    let (mut w, own, _) = in_flight(10);
    let now = w.now;
    let engine = &mut w.sides[0].engine;
    let mut out = Output::default();
    let elsewhere =
        AckHeader { path: PathId::masked(6), ..ack(own, Psn(205), AckKind::Cumulative, Bitmap::empty(), now) };
    engine.on_ack(now, &from(PeerId(0), VNI, now), &elsewhere, &mut out);
    assert_eq!(engine.counters().unknown_path_packets, 1);
    assert_eq!(engine.connection_snapshots(now).next().expect("open").in_flight_packets, 10);
}

#[test]
fn acks_of_packets_never_sent_release_nothing() {
    let (mut w, own, _) = in_flight(10);
    let now = w.now;
    let before = w.sides[0].engine.connection_snapshots(now).next().expect("open").in_flight_packets;
    assert_eq!(before, 10);
    let engine = &mut w.sides[0].engine;
    let mut out = Output::default();
    let arrival = from(PeerId(0), VNI, now);
    // Beyond the next PSN, and half of the number space away.
    for base in [211u32, 300, 4_306, 1 << 31, u32::MAX - 300] {
        for kind in [AckKind::Cumulative, AckKind::Selective, AckKind::RateLimited, AckKind::NotTaken] {
            engine.on_ack(now, &arrival, &ack(own, Psn(base), kind, full(), now), &mut out);
        }
    }
    // Bits beyond the last sent packet are ignored; bits before it count.
    engine.on_ack(now, &arrival, &ack(own, Psn(209), AckKind::Selective, full(), now), &mut out);
    assert_eq!(out.release.len(), 1, "209 alone was sent");
    assert!(engine.counters().ack_invalid_packets >= 3);
    assert_eq!(engine.connection_snapshots(now).next().expect("open").in_flight_packets, 9);
    assert!(engine.path_snapshots(now).all(|p| p.state == PathState::Usable));
}

#[test]
fn a_peer_reaches_only_its_own_connections() {
    let (mut w, own, theirs) = in_flight(10);
    let now = w.now;
    for side in 0..2 {
        let other = w.sides[side].engine.add_peer(4);
        let engine = &mut w.sides[side].engine;
        let (cid, peers) = if side == 0 { (own, theirs) } else { (theirs, own) };
        let state = |engine: &Engine| {
            let c = engine.connection_snapshots(now).next().expect("open");
            (c.local_cid, c.peer_cid, c.in_flight_packets, c.rx_packets, c.version, format!("{:?}", c.state))
        };
        let before = state(engine);
        let mut out = Output::default();
        // From another peer's address; and from the right address in another network.
        for arrival in [from(other, VNI, now), from(PeerId(0), VNI + 1, now)] {
            let counted = |c: &Counters| c.wrong_peer_packets + c.wrong_vni_packets + c.stray_setup_packets;
            let known = counted(engine.counters());
            let header = DataHeader { ack_now: true, ..data(Psn(200), cid, now) };
            assert_eq!(engine.on_data(now, &arrival, &header, &mut out), Verdict::Drop);
            engine.on_probe(now, &arrival, &DataHeader { probe: true, ..header }, &mut out);
            engine.on_skip(now, &arrival, &DataHeader { psn: Psn(205), ..header }, &mut out);
            for kind in [AckKind::Cumulative, AckKind::Selective, AckKind::RateLimited, AckKind::NotTaken] {
                engine.on_ack(now, &arrival, &ack(cid, Psn(205), kind, full(), now), &mut out);
            }
            engine.on_reset(now, &arrival, &Reset { unknown: peers }, &mut out);
            assert_eq!(counted(engine.counters()) - known, 8, "each is counted");
        }
        engine.flush_acks(now, &mut out);
        assert!(out.is_empty(), "{out:?}");
        assert_eq!(state(engine), before);
    }
    w.run_for(100 * MS);
    w.assert_complete(0);
}

#[test]
fn a_skip_goes_no_farther_than_the_window_and_shows_what_is_held() {
    let (mut w, _, theirs) = in_flight(0);
    let now = w.now;
    let engine = &mut w.sides[1].engine;
    let mut out = Output::default();
    let arrival = from(PeerId(0), VNI, now);
    for beyond in [200 + 4097, 200 + (1 << 30), 200 + (1 << 31) - 1] {
        engine.on_skip(now, &arrival, &data(Psn(beyond), theirs, now), &mut out);
    }
    assert_eq!(engine.counters().outside_window_packets, 3);
    // A held packet is shown exactly when the SKIP passes it.
    let Verdict::Place { slot, .. } = engine.on_data(now, &arrival, &data(Psn(4_000), theirs, now), &mut out) else {
        panic!("inside the window")
    };
    assert!(engine.placed(now, slot, 77, &mut out) && out.publish.is_empty());
    engine.on_skip(now, &arrival, &data(Psn(200 + 4096), theirs, now), &mut out);
    assert_eq!(out.publish, [(7, 77)]);
    assert_eq!((engine.counters().skips_received_packets, engine.pages_used().1), (1, 0));
}

/// The answers to one batch of DATA with these numbers: ACKs, and their bytes.
fn answers(w: &mut World, cid: Cid, psns: &[u32], take: bool) -> (usize, usize) {
    let now = w.now;
    let engine = &mut w.sides[1].engine;
    let mut out = Output::default();
    for (i, psn) in psns.iter().enumerate() {
        let verdict = engine.on_data(now, &from(PeerId(0), VNI, now), &data(Psn(*psn), cid, now), &mut out);
        if let Verdict::Place { slot, .. } = verdict {
            if take {
                engine.placed(now, slot, 1_000 + i as u32, &mut out);
            } else {
                engine.not_placed(slot);
            }
        }
    }
    engine.flush_acks(now, &mut out);
    let acks = out.control.iter().map(|c| match &c.packet {
        Control::Ack(ack) => ack.len(),
        other => panic!("{other:?}"),
    });
    let acks: Vec<usize> = acks.collect();
    (acks.len(), acks.iter().sum())
}

#[test]
fn a_packet_is_answered_by_one_ack_at_most() {
    let (mut w, _, theirs) = in_flight(0);
    // Far ahead, then all of it repeatedly; each block contains packets taken before, and base never moves.
    let base = 200;
    let far: Vec<u32> = (1..16).map(|block| base + 256 * block + 255).collect();
    for psns in [&[base + 4095][..], &[base + 4095], &far, &far, &far[..1], &[base + 4095, base + 300]] {
        let (acks, bytes) = answers(&mut w, theirs, psns, true);
        assert!((1..=psns.len()).contains(&acks), "{acks} ACKs for {} packets", psns.len());
        assert!(bytes <= psns.len() * 64 && bytes <= psns.len() * 64 * LEAST_DATA / 30, "{bytes} bytes");
    }
    // Packets not taken: near, far, and beyond the window.
    for psns in [&[base][..], &[base + 1, base + 3], &[base + 4096], &[base, base + 600, base + 8_000], &[base + 700]] {
        let (acks, _) = answers(&mut w, theirs, psns, false);
        assert!((1..=psns.len()).contains(&acks), "{acks} ACKs for {} packets that were not taken", psns.len());
    }
    assert_eq!(answers(&mut w, theirs, &[base + 8_192, base.wrapping_sub(4_097)], false), (0, 0), "no answer at all");
}

#[test]
fn the_time_of_a_lying_peer_is_bounded() {
    let (mut w, own, _) = in_flight(10);
    let now = w.now;
    let engine = &mut w.sides[0].engine;
    let mut out = Output::default();
    for ticks in [0u32, 1, 1 << 20, 1 << 27, 1 << 31, u32::MAX] {
        for (sent, nic_rx, echo) in [(ticks, 0, 0), (0, ticks, 0), (0, 0, ticks), (ticks, ticks, ticks)] {
            let [sent, nic_rx, echo] = [sent, nic_rx, echo].map(|t| Tick(now.tick().0.wrapping_sub(t)));
            let lie = AckHeader { sent, nic_rx, echo, ..ack(own, Psn(200), AckKind::Selective, Bitmap::empty(), now) };
            engine.on_ack(now, &from(PeerId(0), VNI, now), &lie, &mut out);
        }
    }
    assert!(engine.path_snapshots(now).all(|p| p.srtt_ns <= 10 * S && p.total_rtt_ns <= 10 * S));
    let rto = engine.connection_snapshots(now).next().expect("open").rto_ns;
    assert!(rto <= engine.config().rto_ceiling_ns + 30 * S, "{rto}");
    // Its packets are repaired nevertheless, and correct ACKs prevail in the end.
    w.run_for(S);
    stream(&mut w, 0, 4_000, 5, 100 * US);
    w.run_for(S);
    w.assert_complete(0);
    let worst = w.sides[0].engine.path_snapshots(w.now).map(|p| p.srtt_ns).max();
    assert!(worst.is_some_and(|ns| ns < MS), "{worst:?}");
}

#[test]
fn a_peer_whose_guest_comes_and_goes_makes_no_path_suspect() {
    let mut w = world(33, 4);
    stream(&mut w, 0, 200, 5, 10 * US);
    // Its port is removed and added repeatedly while probes are in flight.
    for _ in 0..200 {
        let mut out = Output::default();
        w.sides[1].engine.remove_owner(7, &mut out);
        w.sides[1].guest.forget_placed();
        w.offer(0, 1, 1);
        w.run_for(7 * MS);
    }
    assert_eq!(w.sides[0].engine.counters().suspect_paths, 0);
    assert!(w.sides[0].engine.path_snapshots(w.now).all(|p| p.state == PathState::Usable));
}
