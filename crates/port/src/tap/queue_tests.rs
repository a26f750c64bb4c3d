//! The queue over a pair of packet sockets, which behave like a TAP device.

use std::io::IoSlice;

use bifrost_wire::virtio_net::{self, Header};
use proptest::prelude::*;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::*;

const SIZES: PoolSizes = PoolSizes { heads: 8, spills: 3, slots: 64 };

fn queue() -> (TapQueue, OwnedFd) {
    let (ours, guest) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC, None)
            .expect("socketpair");
    (TapQueue::new(ours, SIZES, 1518), guest)
}

fn send(guest: &OwnedFd, header: Header, frame: &[u8]) {
    rustix::io::writev(guest, &[IoSlice::new(&header.emit_short()), IoSlice::new(frame)]).expect("guest sends");
}

fn receive(guest: &OwnedFd) -> Option<(Header, Vec<u8>)> {
    let mut buffer = vec![0; 70_000];
    let n = rustix::io::read(guest, &mut buffer).ok()?;
    Some((Header::parse_short(&buffer).expect("header"), buffer[VIRTIO..n].to_vec()))
}

/// A TCP segment over IPv4 with a correct IP header checksum.
fn tcp(seq: u32, payload: usize) -> Vec<u8> {
    let mut f = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0, 0x45, 0];
    f.extend((40 + payload as u16).to_be_bytes());
    f.extend([0, 0, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 2, 10, 0, 0, 1]);
    let sum = f[14..34].chunks(2).map(|c| u32::from(u16::from_be_bytes([c[0], c[1]]))).sum::<u32>();
    let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
    f[24..26].copy_from_slice(&sum.to_be_bytes());
    f.extend([0x30, 0x39, 0x1f, 0x90]);
    f.extend(seq.to_be_bytes());
    f.extend([0, 0, 0, 1, 0x50, 0x10, 1, 0, 0, 0, 0, 0]);
    f.extend((0..payload).map(|i| (seq as usize + i) as u8));
    f
}

#[test]
fn frames_keep_their_bytes_until_completed() {
    let (mut queue, guest) = queue();
    let lengths = [60, HEAD_BYTES - VIRTIO - 1, HEAD_BYTES - VIRTIO, HEAD_BYTES - VIRTIO + 1, 60_000, 1514];
    let frames: Vec<Vec<u8>> = (1u8..).zip(lengths).map(|(n, len)| vec![n; len]).collect();
    for frame in &frames {
        send(&guest, Header::default(), frame);
    }
    let mut out = Vec::new();
    assert!(!queue.fetch(64, &mut out).expect("fetch"));
    assert_eq!(out.len(), frames.len());
    for (got, want) in out.iter().zip(&frames) {
        let (head, tail) = queue.bytes(got.handle);
        assert_eq!([head, tail].concat(), *want);
        assert_eq!((got.len as usize, got.offload), (want.len(), Offload::default()));
    }
    assert_eq!((queue.tap_counters().tx_large_packets, queue.tx_free()), (2, 2));
    for frame in &out {
        queue.complete(frame.handle);
        queue.complete(frame.handle);
    }
    assert_eq!(queue.tx_free(), 8, "completing twice frees once");
}

#[test]
fn fetching_stops_without_spill_buffers_and_resumes() {
    let (mut queue, guest) = queue();
    for n in 0..4u8 {
        send(&guest, Header::default(), &[n; 3000]);
    }
    let mut out = Vec::new();
    assert!(!queue.fetch(64, &mut out).expect("fetch"));
    assert_eq!((out.len(), queue.tx_free(), queue.tap_counters().tx_no_buffer_pauses), (3, 0, 1));
    queue.complete(out[1].handle);
    assert!(queue.tx_free() > 0);
    queue.fetch(64, &mut out).expect("fetch");
    let tags: Vec<u8> = [0, 2, 3].iter().map(|&i| queue.bytes(out[i].handle).1[0]).collect();
    assert_eq!(tags, [0, 2, 3]);
}

#[test]
fn a_header_that_does_not_fit_its_frame_is_dropped_and_counted() {
    let (mut queue, guest) = queue();
    let csum = Header { flags: virtio_net::F_NEEDS_CSUM, csum_start: 34, csum_offset: 16, ..Header::default() };
    let gso = Header { gso_type: virtio_net::GSO_TCPV4, gso_size: 500, ..csum };
    let cases = [
        ("checksum beyond the frame", Header { csum_start: 2000, ..csum }, Malformed::ChecksumRange),
        ("checksum in the Ethernet header", Header { csum_start: 2, ..csum }, Malformed::ChecksumRange),
        ("unknown type", Header { gso_type: 77, ..gso }, Malformed::GsoType),
        ("other protocol", Header { gso_type: virtio_net::GSO_TCPV6, ..gso }, Malformed::GsoType),
        ("no size", Header { gso_size: 0, ..gso }, Malformed::GsoSize),
        ("no checksum", Header { flags: 0, ..gso }, Malformed::GsoChecksum),
    ];
    let mut out = Vec::new();
    for (name, header, reason) in cases {
        let before = queue.tap_counters().tx_malformed_packets[reason.index()];
        send(&guest, header, &tcp(1, 1400));
        queue.fetch(64, &mut out).expect("fetch");
        assert_eq!(queue.tap_counters().tx_malformed_packets[reason.index()], before + 1, "{name}");
        assert!(out.is_empty() && queue.tx_free() == 8, "{name}");
    }
    send(&guest, gso, &tcp(1, 1400));
    queue.fetch(64, &mut out).expect("fetch");
    assert_eq!(out[0].offload.segment.map(|s| s.mss), Some(500));
}

#[test]
fn consecutive_segments_become_one_write() {
    let (mut queue, guest) = queue();
    let mut expected = Vec::new();
    for i in 0..5 {
        let frame = tcp(1000 + i * 1400, 1400);
        expected.extend_from_slice(&frame[54..]);
        let placed = queue.place(&frame, true).expect("place");
        queue.publish(placed);
        queue.publish(placed);
    }
    assert!(receive(&guest).is_none(), "nothing before the batch ends");
    queue.notify().expect("notify");
    let (header, frame) = receive(&guest).expect("one packet");
    assert_eq!(
        (header.gso_type, header.gso_size, header.flags),
        (virtio_net::GSO_TCPV4, 1400, virtio_net::F_NEEDS_CSUM)
    );
    assert_eq!(frame[54..], expected);
    assert!(receive(&guest).is_none());
    let c = queue.tap_counters();
    assert_eq!((c.rx_packets, c.rx_frames, c.rx_bytes), (1, 5, 5 * 1454));
    assert_eq!(queue.slots.free(), 64);
}

#[test]
fn packets_refused_by_the_kernel_are_retried_in_order() {
    let (mut queue, guest) = queue();
    rustix::net::sockopt::set_socket_send_buffer_size(&queue.fd, 8192).expect("buffer");
    let mut sent = 0u32;
    // More than the socket's buffer: the rest waits in its slots.
    while queue.tap_counters().rx_deferred_packets < 5 {
        let placed = queue.place(&[sent as u8; 1000], false).expect("place");
        queue.publish(placed);
        queue.notify().expect("notify");
        sent += 1;
    }
    assert!(queue.slots.free() < 64);
    let mut got = Vec::new();
    while got.len() < sent as usize {
        let (_, frame) = receive(&guest).expect("the guest drains the socket, and the queue continues");
        got.push(frame[0]);
        queue.notify().expect("notify");
    }
    assert_eq!(got, (0..sent as u8).collect::<Vec<_>>());
    assert_eq!(queue.slots.free(), 64);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// For any guest input, fetching neither panics nor loses a buffer, and the output equals the input.
    #[test]
    fn hostile_guests(
        packets in prop::collection::vec(
            (any::<[u8; 10]>(), prop_oneof![Just(tcp(7, 900)), prop::collection::vec(any::<u8>(), 0..3000)], any::<bool>()),
            1..8,
        )
    ) {
        let (mut queue, guest) = queue();
        for (header, frame, small) in packets {
            let header = if small { [header[0] & 1, header[1] % 6, 0, 0, header[4], 0, 34, 0, 16, 0] } else { header };
            rustix::io::writev(&guest, &[IoSlice::new(&header), IoSlice::new(&frame)]).expect("guest sends");
            let mut out = Vec::new();
            queue.fetch(4, &mut out).expect("fetch");
            let dropped = queue.tap_counters().tx_malformed_packets.iter().sum::<u64>();
            let fetched = queue.tap_counters().tx_packets;
            for f in &out {
                let (head, tail) = queue.bytes(f.handle);
                prop_assert_eq!([head, tail].concat(), frame.clone());
                queue.complete(f.handle);
            }
            prop_assert!(dropped + fetched > 0);
            prop_assert_eq!(queue.tx_free(), 8);
        }
    }

    /// For any sequence of place and publish, every slot is returned and every payload byte arrives.
    #[test]
    fn slots_come_back(steps in prop::collection::vec((0u32..4, 1usize..1400, any::<bool>(), 0u8..10), 1..60)) {
        let (mut queue, guest) = queue();
        let mut seq = [0u32; 4];
        let (mut published, mut arrived) = (0usize, 0usize);
        for (flow, len, valid, action) in steps {
            let mut frame = tcp(seq[flow as usize], len);
            frame[29] = flow as u8;
            let placed = queue.place(&frame, valid).expect("room");
            if action == 0 {
                queue.discard(placed);
                queue.discard(placed);
                continue;
            }
            seq[flow as usize] += len as u32;
            published += len;
            queue.publish(placed);
            queue.discard(placed);
            if action < 4 {
                queue.notify().expect("notify");
                prop_assert_eq!(queue.slots.free(), 64);
            }
            while let Some((_, frame)) = receive(&guest) {
                arrived += frame.len() - 54;
            }
        }
        queue.notify().expect("notify");
        while let Some((_, frame)) = receive(&guest) {
            arrived += frame.len() - 54;
        }
        prop_assert_eq!(published, arrived);
        prop_assert_eq!(queue.slots.free(), 64);
    }
}

#[test]
fn handed_over_packets_are_fetched_before_those_in_the_device() {
    let (mut first, guest) = queue();
    let header = Header { flags: virtio_net::F_NEEDS_CSUM, csum_start: 34, csum_offset: 16, ..Header::default() };
    let lengths = [0, HEAD_BYTES, 3000];
    for (n, len) in (1..).zip(lengths) {
        send(&guest, header, &tcp(n, len));
    }
    let mut out = Vec::new();
    first.fetch(64, &mut out).expect("fetch");
    let raw = |frame: &TxFrame| {
        let mut bytes = Vec::new();
        assert!(first.raw(frame.handle, &mut bytes));
        bytes
    };
    let packets: Vec<Vec<u8>> = out.iter().map(raw).collect();
    let (mut second, guest) = queue();
    send(&guest, Header::default(), &tcp(9, 10));
    for packet in packets {
        assert!(second.put_in_front(packet));
    }
    let mut again = Vec::new();
    assert!(second.fetch(1, &mut again).expect("fetch"), "more may be waiting");
    second.fetch(64, &mut again).expect("fetch");
    assert_eq!(again.len(), 4);
    for ((frame, n), len) in again.iter().zip([1, 2, 3, 9]).zip([0, HEAD_BYTES, 3000, 10]) {
        let (head, tail) = second.bytes(frame.handle);
        assert_eq!([head, tail].concat(), tcp(n, len));
        assert_eq!(frame.offload, if n == 9 { Offload::default() } else { out[0].offload });
    }
    // Bounds: per packet, and total.
    assert!(!second.put_in_front(vec![0; HEAD_BYTES + SPILL_BYTES + 1]));
    for _ in 0..SIZES.heads {
        assert!(second.put_in_front(vec![0; VIRTIO]));
    }
    assert!(!second.put_in_front(vec![0; VIRTIO]));
    // A packet without a whole header is dropped, and has no other effect.
    let (mut third, _guest) = queue();
    assert!(third.put_in_front(Vec::new()) && third.put_in_front(vec![1; 5]));
    third.fetch(64, &mut Vec::new()).expect("fetch");
}
