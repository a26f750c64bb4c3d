//! Merging received frames for a guest: segmenting the output gives the input again, in order within each flow.

use std::collections::HashMap;

use bifrost_nic::{Merged, Merger, Offload, Segments, copy_of, parse, verify_transport_checksum};
use bifrost_wire::virtio_net;

use super::frame::frame;
use crate::Input;

pub(crate) fn run(bytes: &[u8]) {
    let input = &mut Input::new(bytes);
    let mut frames: Vec<Vec<u8>> = Vec::new();
    while !input.is_empty() && frames.len() < 150 {
        match (frames.last(), input.below(4)) {
            // The next segment of the frame before, which may therefore merge with it.
            (Some(before), 1..) => frames.push(successor(before, input)),
            _ => frames.push(complete(frame(input, 300))),
        }
    }
    let mut merger = Merger::new();
    let mut out: Vec<(u32, Vec<u8>)> = Vec::new();
    for (i, bytes) in frames.iter().enumerate() {
        let valid = parse(bytes, bytes.len()).is_ok_and(|p| verify_transport_checksum(bytes, &p));
        merger.push(i as u32, bytes, valid, &mut |m| out.extend(cut(&frames, &m)));
        if input.chance(20) {
            merger.flush(&mut |m| out.extend(cut(&frames, &m)));
            assert!(merger.is_empty());
        }
    }
    merger.flush(&mut |m| out.extend(cut(&frames, &m)));
    assert!(merger.is_empty());

    let mut newest: HashMap<u32, u32> = HashMap::new();
    let mut seen = vec![false; frames.len()];
    for (buffer, bytes) in &out {
        assert!(!std::mem::replace(&mut seen[*buffer as usize], true), "frame {buffer} was emitted twice");
        let frame = &frames[*buffer as usize];
        assert!(bytes == frame || essence(bytes) == essence(frame), "frame {buffer} was changed");
        if let Ok(parsed) = parse(bytes, bytes.len()) {
            let before = newest.insert(parsed.flow_hash, *buffer);
            assert!(before.is_none_or(|b| b < *buffer), "{buffer} overtook {before:?} of its flow");
        }
    }
    assert!(seen.iter().all(|s| *s), "a frame was lost");
}

/// A frame without the fields that merging may change: padding, and the identification, which "don't fragment" makes
/// meaningless.
fn essence(frame: &[u8]) -> Vec<u8> {
    let Ok(parsed) = parse(frame, frame.len()) else { return frame.to_vec() };
    let mut bytes = frame[..parsed.end as usize].to_vec();
    let l3 = usize::from(parsed.l3);
    if parsed.kind == bifrost_nic::L3::V4 && bytes[l3 + 6] & 0x40 != 0 {
        bytes[l3 + 4..l3 + 6].fill(0);
        bytes[l3 + 10..l3 + 12].fill(0);
    }
    bytes
}

/// The next segment of the same flow, or nearly so.
fn successor(before: &[u8], input: &mut Input<'_>) -> Vec<u8> {
    let mut next = before.to_vec();
    let Ok(parsed) = parse(before, before.len()) else { return next };
    let l4 = usize::from(parsed.l4);
    if let Some(tcp) = parsed.tcp {
        let len = parsed.end - u32::from(parsed.payload);
        let jump = if input.chance(20) { u32::from(input.u8()) } else { 0 };
        next[l4 + 4..l4 + 8].copy_from_slice(&tcp.seq.wrapping_add(len).wrapping_add(jump).to_be_bytes());
        if input.chance(20) {
            next[l4 + 13] = input.u8();
        }
    }
    if parsed.kind == bifrost_nic::L3::V4 {
        let l3 = usize::from(parsed.l3);
        let id = u16::from_be_bytes([next[l3 + 4], next[l3 + 5]]).wrapping_add(1);
        next[l3 + 4..l3 + 6].copy_from_slice(&id.to_be_bytes());
        bifrost_wire::ipv4::fill_checksum(&mut next[l3..l4]);
    }
    complete(next)
}

/// With a valid transport checksum, if the protocol has one.
fn complete(mut frame: Vec<u8>) -> Vec<u8> {
    let Ok(parsed) = parse(&frame, frame.len()) else { return frame };
    let at = match parsed.protocol {
        6 if parsed.tcp.is_some() => usize::from(parsed.l4) + 16,
        _ => return frame,
    };
    frame[at..at + 2].fill(0);
    let body = &frame[usize::from(parsed.l4)..parsed.end as usize];
    let pseudo = match (parsed.src_ip, parsed.dst_ip) {
        (std::net::IpAddr::V4(s), std::net::IpAddr::V4(d)) => {
            bifrost_wire::checksum::pseudo_v4(s, d, 6, body.len() as u32)
        }
        (std::net::IpAddr::V6(s), std::net::IpAddr::V6(d)) => {
            bifrost_wire::checksum::pseudo_v6(s, d, 6, body.len() as u32)
        }
        _ => return frame,
    };
    // As all our senders write it: a sum of zero as all ones.
    let sum = bifrost_wire::checksum::Sum::starting(pseudo).then(body).finish();
    frame[at..at + 2].copy_from_slice(&bifrost_wire::checksum::udp_nonzero(sum).to_be_bytes());
    frame
}

/// The frames that a packet for the guest contains, with their buffers.
fn cut(frames: &[Vec<u8>], merged: &Merged<'_>) -> Vec<(u32, Vec<u8>)> {
    let mut bytes = merged.header.to_vec();
    for part in merged.parts {
        let frame = &frames[part.buffer as usize];
        bytes.extend(&frame[part.offset as usize..(part.offset + part.len) as usize]);
    }
    if merged.virtio.gso_type == virtio_net::GSO_NONE {
        assert_eq!(merged.parts.len(), 1);
        return vec![(merged.parts[0].buffer, bytes)];
    }
    let parsed = parse(&bytes, bytes.len()).unwrap_or_else(|e| panic!("merged into something malformed: {e}"));
    let offload = Offload::from_virtio(merged.virtio, &parsed, bytes.len());
    let offload = offload.unwrap_or_else(|e| panic!("merged into something that cannot be segmented: {e}"));
    let plan = Segments::plan(&bytes, bytes.len(), offload).unwrap_or_else(|e| panic!("cannot be segmented: {e}"));
    assert_eq!(usize::from(plan.count()), merged.parts.len());
    let pieces = (0..plan.count()).map(|i| {
        let mut out = Vec::new();
        plan.write(i, |from, to, out| copy_of(&bytes, &[], from, to, out), &mut out);
        out
    });
    merged.parts.iter().map(|p| p.buffer).zip(pieces).collect()
}
