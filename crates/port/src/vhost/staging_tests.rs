//! Merged segments in a guest's memory, as its driver sees them.

use bifrost_nic::{Offload, Segments, copy_of, parse};
use bifrost_wire::virtio_net::{self, Header};

use super::super::mock::{Guest, Kind};
use super::super::queue::VhostQueue;
use crate::guest::{GuestPort, PlaceError};

fn guest(packed: bool, mergeable: bool) -> Guest {
    let mut guest = Guest::new(Kind { packed, size: 64, event_idx: true, mergeable });
    guest.merged = true;
    guest
}

/// A TCP frame of a flow with a verified checksum: `len` bytes from `seq` on.
fn segment(flow: u8, seq: u32, len: usize) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 0x08, 0x00];
    let ip = frame.len();
    frame.extend([0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, flow, 10, 0, 0, 2]);
    frame[ip + 2..ip + 4].copy_from_slice(&(40 + len as u16).to_be_bytes());
    let sum = bifrost_wire::checksum::checksum(&frame[ip..]);
    frame[ip + 10..ip + 12].copy_from_slice(&sum.to_be_bytes());
    frame.extend([0x10, 0, 0x20, 0]);
    frame.extend(seq.to_be_bytes());
    frame.extend([0, 0, 0, 7, 0x50, 0x10, 1, 0, 0, 0, 0, 0]);
    frame.extend((0..len).map(|i| (seq as usize + i) as u8));
    let parsed = parse(&frame, frame.len()).expect("a frame");
    let offload = Offload { checksum: Some((parsed.l4, 16)), ..Offload::default() };
    // The field has the sum of the pseudo-header, as set by a guest.
    let l4 = frame.len() - usize::from(parsed.l4);
    let words = [0x0a00u32, u32::from(flow), 0x0a00, 2, 6, l4 as u32];
    let sum: u32 = words.iter().sum();
    frame[50..52].copy_from_slice(&(sum as u16).to_be_bytes());
    let mut out = Vec::new();
    let plan = Segments::plan(&frame, frame.len(), offload).expect("one frame");
    plan.write(0, |from, to, out| copy_of(&frame, &[], from, to, out), &mut out);
    out
}

/// With "don't fragment", identifications have no meaning, and segmentation increments them.
fn without_id(mut frame: Vec<u8>) -> Vec<u8> {
    let sum =
        u32::from(u16::from_be_bytes([frame[24], frame[25]])) + u32::from(u16::from_be_bytes([frame[18], frame[19]]));
    frame[24..26].copy_from_slice(&bifrost_wire::checksum::fold(sum).to_be_bytes());
    frame[18..20].fill(0);
    frame
}

/// The frames that a received packet represents.
fn cut((header, bytes): &(Header, Vec<u8>)) -> Vec<Vec<u8>> {
    if header.gso_type == virtio_net::GSO_NONE {
        return vec![without_id(bytes.clone())];
    }
    let parsed = parse(bytes, bytes.len()).expect("headers");
    let offload = Offload::from_virtio(*header, &parsed, bytes.len()).expect("an offload");
    let plan = Segments::plan(bytes, bytes.len(), offload).expect("segments");
    (0..plan.count())
        .map(|i| {
            let mut out = Vec::new();
            plan.write(i, |from, to, out| copy_of(bytes, &[], from, to, out), &mut out);
            without_id(out)
        })
        .collect()
}

fn give(port: &mut VhostQueue, frames: &[Vec<u8>]) {
    for frame in frames {
        let handle = port.place(frame, true).expect("room");
        port.publish(handle);
    }
    port.notify().expect("notify");
}

#[test]
fn segments_of_a_flow_arrive_as_one_packet_over_several_buffers() {
    for packed in [false, true] {
        for buffer in [1526, 4096, 700] {
            let mut guest = guest(packed, true);
            guest.fill(&[buffer; 64]);
            let mut port = guest.queue();
            let frames: Vec<_> = (0..20).map(|n| segment(1, 1000 + n * 1448, 1448)).collect();
            give(&mut port, &frames);
            let packet = guest.receive().expect("a packet");
            assert_eq!((packet.0.gso_type, packet.0.gso_size), (virtio_net::GSO_TCPV4, 1448), "buffers of {buffer}");
            let (total, buffer) = (12 + 54 + 20 * 1448usize, buffer as usize);
            assert_eq!(usize::from(packet.0.num_buffers), total.div_ceil(buffer));
            assert!(cut(&packet) == frames, "buffers of {buffer}");
            assert!(guest.receive().is_none());
            let counters = port.vhost_counters();
            assert_eq!((counters.rx_packets, counters.rx_merged_frames), (1, 20));
        }
    }
}

#[test]
fn flows_are_not_mixed_and_stay_in_order() {
    let mut rng = fastrand::Rng::with_seed(3);
    for round in 0..50 {
        let mut guest = guest(round % 2 == 0, true);
        guest.fill(&[rng.u32(200..5000); 64]);
        let mut port = guest.queue();
        let (mut sent, mut got) = (Vec::new(), Vec::new());
        let mut seq = [0u32; 3];
        for _ in 0..30 {
            let batch: Vec<_> = (0..rng.usize(0..12))
                .map(|_| {
                    let (flow, len) = (rng.usize(0..3), if rng.u8(0..4) > 0 { 300 } else { rng.usize(1..300) });
                    let frame = segment(flow as u8 + 1, seq[flow], len);
                    seq[flow] += len as u32;
                    frame
                })
                .collect();
            give(&mut port, &batch);
            sent.extend(batch);
            while let Some(packet) = guest.receive() {
                got.extend(cut(&packet));
                guest.fill(&vec![rng.u32(200..5000); usize::from(packet.0.num_buffers)]);
            }
            port.notify().expect("what waited");
        }
        for _ in 0..100 {
            while let Some(packet) = guest.receive() {
                got.extend(cut(&packet));
                guest.fill(&vec![2000; usize::from(packet.0.num_buffers)]);
            }
            port.notify().expect("what waited");
        }
        for flow in 1..=3 {
            let of = |frames: &[Vec<u8>]| frames.iter().filter(|f| f[29] == flow).cloned().collect::<Vec<_>>();
            assert!(of(&got) == of(&sent), "round {round}, flow {flow}");
        }
        assert!(!port.has_postponed());
    }
}

#[test]
fn frames_without_buffers_wait_and_excess_frames_are_refused() {
    let mut guest = guest(false, true);
    let mut port = guest.queue();
    let frames: Vec<_> = (0..64).map(|n| segment(1, n * 100, 100)).collect();
    give(&mut port, &frames);
    assert!(port.has_postponed() && guest.receive().is_none());
    assert_eq!(port.place(&frames[0], true), Err(PlaceError::NoBuffer), "the slots are taken");
    guest.fill(&[2048; 64]);
    port.notify().expect("now");
    assert!(!port.has_postponed());
    let mut got = Vec::new();
    while let Some(packet) = guest.receive() {
        got.extend(cut(&packet));
    }
    assert!(got == frames);
    assert!(port.place(&frames[0], true).is_ok());
}

/// A ring without room for a large packet gets its frames one by one.
#[test]
fn rings_too_small_for_a_large_packet_get_single_frames() {
    let mut guest = guest(false, true);
    guest.fill(&[40; 64]);
    let mut port = guest.queue();
    let frames: Vec<_> = (0..30).map(|n| segment(1, n * 100, 100)).collect();
    give(&mut port, &frames);
    let mut got = Vec::new();
    for _ in 0..frames.len() {
        while let Some(packet) = guest.receive() {
            got.extend(cut(&packet));
            guest.fill(&vec![40; usize::from(packet.0.num_buffers)]);
        }
        port.notify().expect("what waited");
    }
    assert!(got == frames);
    assert_eq!((port.has_postponed(), port.vhost_counters().broken_rings), (false, 0));
}

#[test]
fn a_driver_without_mergeable_buffers_gets_unmerged_frames() {
    let mut guest = guest(false, false);
    guest.fill(&[2048; 64]);
    let mut port = guest.queue();
    let frames: Vec<_> = (0..4).map(|n| segment(1, n * 100, 100)).collect();
    give(&mut port, &frames);
    for frame in &frames {
        assert!(guest.receive().is_some_and(|packet| packet.1 == *frame));
    }
    assert_eq!(port.vhost_counters().rx_merged_frames, 0);
}

#[test]
fn unshown_frames_are_discarded_once() {
    let mut guest = guest(false, true);
    guest.fill(&[2048; 64]);
    let mut port = guest.queue();
    let frame = segment(1, 0, 100);
    let handle = port.place(&frame, true).expect("room");
    port.discard(handle);
    port.discard(handle);
    port.publish(handle);
    port.notify().expect("notify");
    assert!(guest.receive().is_none());
    assert_eq!(port.vhost_counters().rx_discarded_frames, 1);
}
