//! A guest's frame with an arbitrary virtio header: parsed, planned, written; and rewritten by the guest meanwhile.

use bifrost_nic::{HEAD_LEN, Offload, Parsed, Segments, copy_of, parse, transport_checksum, verify_transport_checksum};
use bifrost_wire::virtio_net;

use super::frame::frame;
use crate::Input;

pub(crate) fn run(bytes: &[u8]) {
    let input = &mut Input::new(bytes);
    let mut frame = frame(input, 3000);
    let whole = parse(&frame, frame.len());
    // The parser reads nothing after HEAD_LEN.
    let head = &frame[..frame.len().min(HEAD_LEN)];
    assert_eq!(parse(head, frame.len()), whole);
    let Ok(parsed) = whole else { return };
    let (l3, l4, payload) = (u32::from(parsed.l3), u32::from(parsed.l4), u32::from(parsed.payload));
    assert!(l3 <= l4 && l4 <= payload && payload <= parsed.end && parsed.end as usize <= frame.len());
    transport_checksum(&frame, &parsed);

    let honest = virtio_net::Header {
        flags: virtio_net::F_NEEDS_CSUM,
        gso_type: match (parsed.protocol, parsed.kind) {
            (6, bifrost_nic::L3::V4) => virtio_net::GSO_TCPV4,
            (6, _) => virtio_net::GSO_TCPV6,
            _ => virtio_net::GSO_UDP_L4,
        },
        hdr_len: 0,
        gso_size: input.u16() % 2048,
        csum_start: parsed.l4,
        csum_offset: if parsed.protocol == 6 { 16 } else { 6 },
        num_buffers: 0,
    };
    let header = if input.chance(64) {
        virtio_net::Header {
            flags: input.u8(),
            gso_type: input.u8(),
            csum_start: input.u16() % 300,
            csum_offset: input.u16(),
            ..honest
        }
    } else {
        honest
    };
    let Ok(offload) = Offload::from_virtio(header, &parsed, frame.len()) else { return };
    let split = usize::from(input.u16()) % (frame.len() + 1);
    let (head, tail) = frame.split_at(split.max(usize::from(parsed.payload)));
    within(head, tail, offload, &parsed, input.u16() % 2048);
    let Ok(plan) = Segments::plan(head, head.len() + tail.len(), offload) else { return };
    assert!((1..=Segments::MAX).contains(&plan.count()));
    let mut carried = Vec::new();
    for i in 0..plan.count() {
        let mut out = Vec::new();
        plan.write(i, |from, to, out| copy_of(head, tail, from, to, out), &mut out);
        assert_eq!(out.len(), plan.len(i));
        if offload.segment.is_some() {
            let again = parse(&out, out.len());
            let again = again.unwrap_or_else(|e| panic!("segment {i} is malformed: {e}"));
            assert!(verify_transport_checksum(&out, &again));
            assert_eq!(again.flow_key(), parsed.flow_key());
            carried.extend_from_slice(&out[usize::from(again.payload)..again.end as usize]);
        }
    }
    if offload.segment.is_some() {
        assert_eq!(carried, frame[usize::from(parsed.payload)..parsed.end as usize]);
    }
    // The guest changes its buffer meanwhile: corrupted frames, but no out-of-bounds access.
    for at in 0..frame.len().min(128) {
        if input.chance(30) {
            frame[at] = input.u8();
        }
    }
    let shorter = &frame[..frame.len() - frame.len().min(input.below(64))];
    for i in [0, plan.count() - 1, plan.count()] {
        let mut out = Vec::new();
        plan.write(i, |from, to, out| copy_of(shorter, &[], from, to, out), &mut out);
        assert_eq!(out.len(), plan.len(i));
    }
}

/// The same frame with a path MTU of `mtu` bytes: each frame fits, and no part of the packet is missing.
fn within(head: &[u8], tail: &[u8], offload: Offload, parsed: &Parsed, mtu: u16) {
    let Ok(plan) = Segments::plan_within(head, head.len() + tail.len(), offload, mtu) else { return };
    let (l3, l4) = (usize::from(parsed.l3), usize::from(parsed.l4));
    let mut carried = 0;
    for i in 0..plan.count() {
        let mut out = Vec::new();
        plan.write(i, |from, to, out| copy_of(head, tail, from, to, out), &mut out);
        assert_eq!(out.len(), plan.len(i));
        assert!(out.len() <= l3 + usize::from(mtu), "frame {i} does not fit");
        if plan.is_fragmented() {
            let ip = bifrost_wire::ipv4::Header::parse(&out[l3..]);
            let ip = ip.unwrap_or_else(|e| panic!("fragment {i} is malformed: {e}"));
            assert!(bifrost_wire::ipv4::checksum_is_valid(&out[l3..l4]));
            assert!(
                !ip.more_fragments || i + 1 < plan.count() || head[l3 + 6] & 0x20 != 0 || offload.segment.is_some()
            );
            carried += out.len() - l4;
        }
    }
    if plan.is_fragmented() && offload.segment.is_none() {
        assert_eq!(carried, parsed.end as usize - l4);
    }
}
