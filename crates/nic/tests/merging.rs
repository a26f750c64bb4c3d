//! Receive merging: segmenting the output again gives the input.

#![allow(clippy::unwrap_used)]

mod common;

use bifrost_nic::{Merged, Merger, Offload, Part, Segments, copy_of, parse};
use bifrost_wire::virtio_net;
use common::{Packet, naive_check};
use proptest::prelude::*;

/// A packet for a guest: virtio header and bytes, with the number of frames in it.
#[derive(Debug)]
struct Received {
    virtio: virtio_net::Header,
    bytes: Vec<u8>,
    buffers: Vec<u32>,
}

fn collect(frames: &[Vec<u8>], merged: Merged<'_>) -> Received {
    let mut bytes = merged.header.to_vec();
    for Part { buffer, offset, len } in merged.parts {
        bytes.extend(&frames[*buffer as usize][*offset as usize..(offset + len) as usize]);
    }
    Received { virtio: merged.virtio, bytes, buffers: merged.parts.iter().map(|p| p.buffer).collect() }
}

fn run(frames: &[Vec<u8>], valid: impl Fn(usize) -> bool, batch: usize) -> Vec<Received> {
    let mut merger = Merger::new();
    let mut out = Vec::new();
    let mut emit = |m: Merged<'_>| out.push(collect(frames, m));
    for (i, frame) in frames.iter().enumerate() {
        merger.push(i as u32, frame, valid(i), &mut emit);
        if (i + 1) % batch == 0 {
            merger.flush(&mut emit);
            assert!(merger.is_empty());
        }
    }
    merger.flush(&mut emit);
    out
}

/// The frames that a packet contains.
fn segments(r: &Received) -> Vec<Vec<u8>> {
    if r.virtio.gso_type == virtio_net::GSO_NONE {
        return vec![r.bytes.clone()];
    }
    let parsed = parse(&r.bytes, r.bytes.len()).unwrap();
    let offload = Offload::from_virtio(r.virtio, &parsed, r.bytes.len()).unwrap();
    let plan = Segments::plan(&r.bytes, r.bytes.len(), offload).unwrap();
    let segment = |i| {
        let mut out = Vec::new();
        plan.write(i, |from, to, out| copy_of(&r.bytes, &[], from, to, out), &mut out);
        out
    };
    (0..plan.count()).map(segment).collect()
}

/// Segments `from..to` of a stream in which each has 100 bytes.
fn stream(from: u16, to: u16, base: &Packet) -> Vec<Packet> {
    let segment = |i: u16| Packet {
        seq: base.seq.wrapping_add(u32::from(i) * 100),
        id: base.id.wrapping_add(i),
        payload: vec![i as u8; 100],
        ..base.clone()
    };
    (from..to).map(segment).collect()
}

fn build(packets: &[Packet]) -> Vec<Vec<u8>> {
    packets.iter().map(Packet::build).collect()
}

#[test]
fn a_train_becomes_one_packet() {
    for v6 in [false, true] {
        let mut packets = stream(0, 10, &Packet { v6, seq: u32::MAX - 350, id: 0xfffa, ..Packet::default() });
        packets[9].payload.truncate(40);
        packets[9].flags |= 8;
        let frames = build(&packets);
        let out = run(&frames, |_| true, 64);
        assert_eq!(out.len(), 1);
        let r = &out[0];
        let expected = virtio_net::Header {
            flags: virtio_net::F_NEEDS_CSUM,
            gso_type: if v6 { virtio_net::GSO_TCPV6 } else { virtio_net::GSO_TCPV4 },
            hdr_len: packets[0].header_len() as u16,
            gso_size: 100,
            csum_start: packets[0].l4() as u16,
            csum_offset: 16,
            num_buffers: 0,
        };
        assert_eq!(r.virtio, expected);
        assert_eq!(r.buffers, (0..10).collect::<Vec<_>>());
        // The large packet equals one that a sender without segmentation would have built.
        let payload = packets.iter().flat_map(|p| p.payload.clone()).collect();
        assert_eq!(r.bytes, Packet { payload, flags: 0x18, ..packets[0].clone() }.build_partial());
        assert_eq!(segments(r), frames);
    }
}

#[test]
fn events_that_end_a_packet() {
    let base = Packet::default();
    let with = |change: fn(&mut Packet)| {
        let mut packets = stream(0, 4, &base);
        change(&mut packets[2]);
        packets
    };
    let loose = |change: fn(&mut Packet)| {
        let mut packets = stream(0, 4, &Packet { df: false, ..base.clone() });
        change(&mut packets[2]);
        packets
    };
    let v6 = |change: fn(&mut Packet)| {
        let mut packets = stream(0, 4, &Packet { v6: true, ..base.clone() });
        change(&mut packets[2]);
        packets
    };
    let opts = |change: fn(&mut Packet)| {
        let mut packets =
            stream(0, 4, &Packet { tcp_options: vec![1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2], ..base.clone() });
        change(&mut packets[2]);
        packets
    };
    // Buffers of each packet in the output.
    type Case = (&'static str, Vec<Packet>, &'static [&'static [u32]]);
    let cases: &[Case] = &[
        ("nothing", with(|_| ()), &[&[0, 1, 2, 3]]),
        ("PSH", with(|p| p.flags |= 8), &[&[0, 1, 2], &[3]]),
        ("FIN", with(|p| p.flags |= 1), &[&[0, 1], &[2], &[3]]),
        ("RST", with(|p| p.flags |= 4), &[&[0, 1], &[2], &[3]]),
        ("URG", with(|p| p.flags |= 0x20), &[&[0, 1], &[2], &[3]]),
        ("ECE", with(|p| p.flags |= 0x40), &[&[0, 1], &[2], &[3]]),
        ("CWR", with(|p| p.flags |= 0x80), &[&[0, 1], &[2], &[3]]),
        ("ACK number", with(|p| p.ack += 1), &[&[0, 1], &[2], &[3]]),
        ("window", with(|p| p.window += 1), &[&[0, 1], &[2], &[3]]),
        ("TTL", with(|p| p.ttl -= 1), &[&[0, 1], &[2], &[3]]),
        ("congestion mark", with(|p| p.tos = 3), &[&[0, 1], &[2], &[3]]),
        ("IP options", with(|p| p.ip_options = vec![1; 4]), &[&[0, 1], &[2], &[3]]),
        ("TCP options appear", with(|p| p.tcp_options = vec![1; 4]), &[&[0, 1], &[2], &[3]]),
        ("timestamp", opts(|p| p.tcp_options[11] = 3), &[&[0, 1], &[2], &[3]]),
        ("options alike", opts(|_| ()), &[&[0, 1, 2, 3]]),
        ("a gap", with(|p| p.seq += 1), &[&[0, 1], &[2], &[3]]),
        ("a repetition", with(|p| p.seq -= 100), &[&[0, 1], &[2], &[3]]),
        ("shorter", with(|p| p.payload.truncate(99)), &[&[0, 1, 2], &[3]]),
        ("longer", with(|p| p.payload.push(0)), &[&[0, 1], &[2], &[3]]),
        ("no payload", with(|p| p.payload.clear()), &[&[0, 1], &[2], &[3]]),
        ("VLAN", with(|p| p.vlan = Some(5)), &[&[0, 1], &[2], &[3]]),
        ("another flow", with(|p| p.ports.0 += 1), &[&[0, 1], &[2], &[3]]),
        ("DF and an identification that jumps", with(|p| p.id = 77), &[&[0, 1, 2, 3]]),
        ("an identification that jumps", loose(|p| p.id = 77), &[&[0, 1], &[2], &[3]]),
        ("DF appears", loose(|p| p.df = true), &[&[0, 1], &[2], &[3]]),
        ("IPv6 traffic class", v6(|p| p.tos = 1), &[&[0, 1], &[2], &[3]]),
        ("IPv6 hop limit", v6(|p| p.ttl = 1), &[&[0, 1], &[2], &[3]]),
    ];
    for (name, packets, expected) in cases {
        let frames = build(packets);
        let mut got: Vec<Vec<u32>> = run(&frames, |_| true, 64).into_iter().map(|r| r.buffers).collect();
        got.sort();
        assert_eq!(got, *expected, "{name}");
    }
}

#[test]
fn unverified_and_damaged_frames_stay_single() {
    let frames = build(&stream(0, 4, &Packet::default()));
    let out = run(&frames, |i| i != 2, 64);
    assert_eq!(out.iter().map(|r| r.buffers.clone()).collect::<Vec<_>>(), [vec![0, 1], vec![2], vec![3]]);
    assert_eq!(out[1].virtio, virtio_net::Header::default());
    assert_eq!(out[2].virtio.flags, virtio_net::F_DATA_VALID);
    let mut damaged = frames.clone();
    damaged[2][25] ^= 1;
    assert_eq!(run(&damaged, |_| true, 64).len(), 3, "IPv4 header checksum");
    let mut malformed = frames.clone();
    malformed[2][14] = 0x41;
    assert_eq!(run(&malformed, |_| true, 64).len(), 3, "bypasses the open packet; segment 3 is then out of sequence");
}

#[test]
fn frames_with_other_mac_addresses_do_not_merge() {
    for at in [5, 11] {
        let mut frames = build(&stream(0, 4, &Packet::default()));
        frames[2][at] ^= 1;
        assert_eq!(run(&frames, |_| true, 64).len(), 3, "byte {at} of the Ethernet header");
    }
}

#[test]
fn bounds_of_one_packet() {
    let frames = build(&stream(0, 130, &Packet::default()));
    let sizes: Vec<_> = run(&frames, |_| true, 1000).iter().map(|r| r.buffers.len()).collect();
    assert_eq!(sizes, [64, 64, 2]);
    for v6 in [false, true] {
        let segment =
            |i: u32| Packet { v6, seq: i * 8948, id: i as u16, payload: vec![i as u8; 8948], ..Packet::default() };
        let frames = build(&(0..9).map(segment).collect::<Vec<_>>());
        let out = run(&frames, |_| true, 1000);
        assert_eq!(out.iter().map(|r| r.buffers.len()).collect::<Vec<_>>(), [7, 2]);
        assert_eq!(out.iter().flat_map(segments).collect::<Vec<_>>(), frames);
    }
}

#[test]
fn too_many_flows_evict_the_oldest() {
    let flow = |n: u16| stream(0, 2, &Packet { ports: (n, 80), ..Packet::default() });
    let flows: Vec<_> = (0..17).map(flow).collect();
    let packets: Vec<_> = (0..2).flat_map(|i| flows.iter().map(move |f| f[i].clone())).collect();
    let out = run(&build(&packets), |_| true, 1000);
    // Flow 16 evicts flow 0, and then each flow evicts the next: round robin defeats the table.
    assert_eq!(out.len(), 34);
    let packets: Vec<_> = (0..2).flat_map(|i| flows[..16].iter().map(move |f| f[i].clone())).collect();
    assert_eq!(run(&build(&packets), |_| true, 1000).len(), 16);
}

#[test]
fn fragments_flush_all_open_packets() {
    let mut frames = build(&stream(0, 2, &Packet::default()));
    let mut fragment = Packet { df: false, payload: vec![0; 100], ..Packet::default() }.build();
    fragment[20] |= 0x20;
    frames.push(fragment);
    frames.extend(build(&stream(2, 3, &Packet::default())));
    let out = run(&frames, |_| true, 64);
    assert_eq!(out.iter().map(|r| r.buffers.clone()).collect::<Vec<_>>(), [vec![0, 1], vec![2], vec![3]]);
    assert_eq!(out[1].virtio.flags, 0, "a fragment's checksum cannot be verified");
}

/// One step of a stream: mostly the next segment, sometimes something that does not fit.
fn step() -> impl Strategy<Value = (u8, u8, u16, bool)> {
    (
        0u8..4,
        prop_oneof![6 => Just(0u8), 1 => 1u8..14],
        prop_oneof![8 => Just(100u16), 1 => 1u16..150],
        prop::bool::weighted(0.97),
    )
}

proptest! {
    #[test]
    fn merging_and_segmenting_again_returns_the_frames(
        steps in proptest::collection::vec(step(), 1..if cfg!(miri) { 20 } else { 200 }),
        v6 in any::<[bool; 4]>(),
        df in any::<[bool; 4]>(),
        batch in 1usize..100,
    ) {
        let mut next: Vec<Packet> = (0..4u16)
            .map(|n| Packet {
                v6: v6[usize::from(n)],
                df: df[usize::from(n)],
                ports: (1000 + n, 80),
                seq: u32::MAX - 5000 * u32::from(n),
                id: u16::MAX - n,
                tcp_options: vec![1; usize::from(n) * 4],
                ..Packet::default()
            })
            .collect();
        let mut packets = Vec::new();
        let mut flows = Vec::new();
        for (flow, odd, len, _) in &steps {
            let p = &mut next[usize::from(*flow)];
            p.payload = (0..*len).map(|i| (i as usize + packets.len()) as u8).collect();
            match odd {
                1 => p.ack += 1,
                2 => p.window += 1,
                3 => p.seq = p.seq.wrapping_add(7),
                4 => p.seq = p.seq.wrapping_sub(100),
                5 => p.ttl ^= 1,
                6 => p.id = p.id.wrapping_add(9),
                7 => p.payload.clear(),
                8 => p.tos ^= 2,
                _ => {}
            }
            let flags = match odd { 9 => 0x18, 10 => 0x11, 11 => 0x02, 12 => 0x50, 13 => 0x90, _ => 0x10 };
            packets.push(Packet { flags, ..p.clone() });
            flows.push(*flow);
            p.seq = p.seq.wrapping_add(p.payload.len() as u32);
            p.id = p.id.wrapping_add(1);
        }
        let frames = build(&packets);
        let out = run(&frames, |i| steps[i].3, batch);
        let mut buffers: Vec<u32> = out.iter().flat_map(|r| r.buffers.clone()).collect();
        for flow in 0..4 {
            let sent: Vec<u32> = (0..frames.len()).filter(|&i| flows[i] == flow).map(|i| i as u32).collect();
            let seen: Vec<u32> = buffers.iter().copied().filter(|&b| flows[b as usize] == flow).collect();
            prop_assert_eq!(seen, sent, "order within flow {}", flow);
        }
        buffers.sort_unstable();
        prop_assert_eq!(buffers, (0..frames.len() as u32).collect::<Vec<_>>());
        for r in &out {
            let back = segments(r);
            prop_assert_eq!(back.len(), r.buffers.len());
            for (frame, &b) in back.iter().zip(&r.buffers) {
                naive_check(frame);
                let blind = |f: &[u8]| {
                    // With DF the identification is meaningless and need not survive.
                    let mut f = f.to_vec();
                    if f[12] == 8 && f[20] & 0x40 != 0 {
                        f[18..20].fill(0);
                        f[24..26].fill(0);
                    }
                    f
                };
                prop_assert_eq!(blind(frame), blind(&frames[b as usize]));
            }
        }
    }

    #[test]
    fn hostile_frames_never_panic(frames in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..120), 0..20),
                                  flips in proptest::collection::vec((any::<usize>(), any::<u8>()), 0..6)) {
        let mut all = build(&stream(0, 6, &Packet::default()));
        for (at, value) in flips {
            let frame = &mut all[at % 6];
            let at = at / 6 % 60;
            frame[at] = value;
        }
        all.extend(frames);
        let out = run(&all, |_| true, 7);
        prop_assert_eq!(out.iter().map(|r| r.buffers.len()).sum::<usize>(), all.len());
    }
}
