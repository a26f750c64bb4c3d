//! The provider with a device that a test can inspect: `fake.rs` replaces libibverbs, its driver and the NIC.

mod fake;

use std::net::IpAddr;

use bifrost_rnic::{Datagram, INLINE_MAX, Operation, Sequence};

use self::fake::{ADDRESS, FUNCTIONS, INLINE, fake};
use super::*;

const DOMAIN: Domain = Domain(1);

/// A provider with a queue pair.
struct End {
    nic: RdmaCore,
    queue: CqId,
    pair: Qpn,
}

impl End {
    fn new(transport: Transport) -> Self {
        let address = IpAddr::from(ADDRESS);
        let config = RdmaCoreConfig { address, queue_pairs: 100, regions: 1000, seed: 3 };
        let mut nic = RdmaCore::with(&FUNCTIONS, config).unwrap();
        let queue = nic.create_queue().unwrap();
        let pair = nic.create_queue_pair(init(transport, queue)).unwrap();
        Self { nic, queue, pair }
    }

    fn connect(&mut self, peer: Qpn) {
        let connect = Connect {
            address: ADDRESS.into(),
            port: 4791,
            queue_pair: peer,
            source_port: 0xc123,
            send_sequence: Sequence::new(1),
            receive_sequence: Sequence::new(2),
            mtu: 4096,
            retries: 2,
            timeout_ns: 1_000_000,
        };
        self.nic.connect(self.pair, connect).unwrap();
    }

    fn memory(&mut self, access: Access, bytes: Vec<u8>) -> Region {
        self.nic.register(DOMAIN, access, bytes).unwrap()
    }

    fn receive(&mut self, token: u64, len: u32) -> Slice {
        let region = self.memory(Access::Local, vec![0xee; len as usize]);
        let slice = Slice { key: region.key, offset: 0, len };
        self.nic.post_receive(self.pair, ReceiveRequest { token, slice }).unwrap();
        slice
    }

    fn send(&mut self, token: u64, operation: Operation, head: &[u8], bytes: Vec<u8>) -> Result<Key, PostError> {
        let len = bytes.len() as u32;
        let key = self.memory(Access::Local, bytes).key;
        let mut inline = [0; INLINE_MAX];
        inline[..head.len()].copy_from_slice(head);
        let slice = Some(Slice { key, offset: 0, len });
        let immediate = Some(token as u32 + 100);
        let inline_len = head.len() as u8;
        let request = SendRequest { token, operation, immediate, inline, inline_len, slice };
        self.nic.post_send(self.pair, request).map(|()| key)
    }

    fn poll(&mut self) -> Vec<Completion> {
        let mut out = Vec::new();
        while self.nic.poll(self.queue, 1000, &mut out) > 0 {}
        out
    }
}

fn init(transport: Transport, queue: CqId) -> QpInit {
    QpInit {
        transport,
        send_queue: queue,
        receive_queue: queue,
        send_depth: 100,
        receive_depth: 100,
        domain: DOMAIN,
        queue_key: 7,
        urgent: false,
    }
}

fn pair(transport: Transport) -> (End, End) {
    let (mut a, mut b) = (End::new(transport), End::new(transport));
    if transport != Transport::Ud {
        a.connect(b.pair);
        b.connect(a.pair);
    }
    (a, b)
}

fn operation(transport: Transport, to: Qpn) -> Operation {
    match transport {
        Transport::Ud => Operation::SendTo(Datagram {
            address: ADDRESS.into(),
            port: 4791,
            source_port: 0xc077,
            queue_pair: to,
            queue_key: 7,
        }),
        _ => Operation::Send,
    }
}

#[test]
fn messages_arrive_by_each_service() {
    for transport in [Transport::Rc, Transport::Uc, Transport::Ud] {
        let (mut a, mut b) = pair(transport);
        for (at, len) in [0usize, 1, 30, 4000].into_iter().enumerate() {
            let slot = b.receive(50 + at as u64, 4096);
            b.nic.transmit();
            a.send(at as u64, operation(transport, b.pair), b"head", vec![at as u8; len]).unwrap();
            a.nic.transmit();
            let [sent] = a.poll()[..] else { panic!("one") };
            assert_eq!((sent.token, sent.kind, sent.status), (at as u64, CompletionKind::Send, Status::Success));
            let [got] = b.poll()[..] else { panic!("one") };
            assert_eq!((got.token, got.kind, got.status), (50 + at as u64, CompletionKind::Receive, Status::Success));
            assert_eq!((got.len, got.immediate), (len as u32 + 4, Some(at as u32 + 100)));
            let from = (transport == Transport::Ud).then_some((IpAddr::from(ADDRESS), a.pair));
            assert_eq!((got.source, got.queue_pair), (from, b.pair));
            let bytes = b.nic.bytes(Slice { len: got.len, ..slot }).unwrap();
            assert_eq!(bytes, [&b"head"[..], &vec![at as u8; len]].concat(), "{transport:?} {len}");
        }
        assert_eq!(fake(|fake| std::mem::take(&mut fake.inline)), 3, "those that fit into {INLINE} bytes");
        let label = if transport == Transport::Ud { 0x77 } else { 0x123 };
        assert!(fake(|fake| std::mem::take(&mut fake.labels)).iter().all(|seen| *seen == label));
    }
    assert_eq!(fake(|fake| (fake.registered(), fake.objects)), ((0, 0), 0), "everything is released");
}

#[test]
fn writes_arrive_in_memory_with_immediate_data() {
    let (mut a, mut b) = pair(Transport::Uc);
    let target = b.memory(Access::RemoteWrite, vec![0; 100]);
    b.receive(9, 10);
    b.nic.transmit();
    let write = Operation::Write { address: target.address + 20, key: target.key.0 };
    a.send(1, write, &[], vec![5; 60]).unwrap();
    a.nic.transmit();
    let [got] = b.poll()[..] else { panic!("one") };
    assert_eq!((got.kind, got.token, got.len, got.immediate), (CompletionKind::ReceiveWrite, 9, 60, Some(101)));
    assert_eq!(b.nic.deregister(target.key).unwrap(), [vec![0; 20], vec![5; 60], vec![0; 20]].concat());
}

#[test]
fn requests_reach_the_nic_in_batches() {
    let (mut a, _b) = pair(Transport::Uc);
    for token in 0..70 {
        a.send(token, Operation::Send, &[], vec![0; 100]).unwrap();
    }
    assert_eq!(fake(|fake| fake.posts), 2, "batches of 32");
    assert_eq!((a.nic.transmit(), fake(|fake| fake.posts)), (6, 3));
    assert_eq!(a.nic.transmit(), 0);
    let tokens: Vec<u64> = a.poll().iter().map(|completion| completion.token).collect();
    assert_eq!(tokens, (0..70).collect::<Vec<_>>());
    // As many as the queue pair has room for.
    for token in 0..100 {
        a.send(token, Operation::Send, &[], vec![]).unwrap();
    }
    assert_eq!(a.send(100, Operation::Send, &[], vec![]), Err(PostError::Full));
}

#[test]
fn memory_that_the_nic_still_reads_stays_registered() {
    let (mut a, mut b) = pair(Transport::Uc);
    let slot = b.receive(0, 4096);
    b.nic.transmit();
    fake(|fake| fake.hold = true);
    let key = a.send(1, Operation::Send, &[], vec![6; 4000]).unwrap();
    a.nic.transmit();
    let before = fake(|fake| fake.registered().0);
    assert_eq!(a.nic.deregister(key).unwrap(), vec![6; 4000]);
    assert_eq!(fake(|fake| fake.registered().0), before);
    assert_eq!((a.nic.deregister(key), a.nic.bytes(Slice { key, offset: 0, len: 1 })), (None, None));
    fake(|fake| fake.release());
    assert_eq!(a.poll()[0].status, Status::Success);
    assert_eq!(fake(|fake| fake.registered().0), before - 1, "no longer registered");
    assert_eq!(b.nic.bytes(Slice { len: 4000, ..slot }).unwrap(), vec![6; 4000]);
    // Memory that peers write to is deregistered at once.
    let target = a.memory(Access::RemoteWrite, vec![0; 10]);
    a.nic.deregister(target.key).unwrap();
    assert_eq!(fake(|fake| fake.registered().0), before - 1);
}

#[test]
fn completions_from_before_a_reset_are_discarded() {
    let (mut a, mut b) = pair(Transport::Rc);
    a.send(1, Operation::Send, &[], vec![6; 4000]).unwrap();
    a.nic.transmit();
    a.nic.reset(a.pair).unwrap();
    assert_eq!(a.send(2, Operation::Send, &[], vec![1]), Err(PostError::NotConnected));
    a.connect(b.pair);
    b.receive(3, 10);
    b.nic.transmit();
    a.send(4, Operation::Send, &[], vec![1]).unwrap();
    a.nic.transmit();
    let tokens: Vec<u64> = a.poll().iter().map(|completion| completion.token).collect();
    assert_eq!((tokens, a.nic.counters().stale_completions), (vec![4], 1));
    assert_eq!(b.poll().len(), 1);
}

#[test]
fn requests_that_the_nic_refuses_are_flushed() {
    let (mut a, _b) = pair(Transport::Uc);
    fake(|fake| fake.refuse_after = Some(3));
    for token in 0..5 {
        a.send(token, Operation::Send, &[], vec![0; 100]).unwrap();
    }
    a.nic.transmit();
    let done = a.poll();
    let ok = |n: u64| done.iter().find(|c| c.token == n).map(|c| c.status);
    assert_eq!(done.len(), 5);
    assert_eq!(
        [ok(0), ok(2), ok(3), ok(4)],
        [Status::Success, Status::Success, Status::Flushed, Status::Flushed].map(Some)
    );
    assert_eq!(a.send(5, Operation::Send, &[], vec![]), Err(PostError::InError));
    assert_eq!(a.nic.counters().queue_pairs_in_error, 1);
}

#[test]
fn a_queue_pair_in_error_flushes_and_is_reset() {
    let (mut a, _b) = pair(Transport::Uc);
    a.receive(1, 10);
    assert_eq!(a.nic.connected().collect::<Vec<_>>(), [a.pair]);
    a.nic.put_into_error(a.pair).unwrap();
    let [flushed] = a.poll()[..] else { panic!("one") };
    assert_eq!((flushed.token, flushed.kind, flushed.status), (1, CompletionKind::Receive, Status::Flushed));
    assert_eq!(a.nic.connected().count(), 0);
    a.nic.reset(a.pair).unwrap();
    a.connect(Qpn::new(5));
    assert_eq!(a.nic.connected().count(), 1);
}

#[test]
fn completions_have_the_time_of_the_nics_clock_if_it_has_one() {
    let (a, _b) = pair(Transport::Uc);
    assert!(a.nic.description().contains("software clock"), "{}", a.nic.description());
    drop((a, _b));
    fake(|fake| (fake.has_clock, fake.ticks) = (true, 1_000_000_000));
    let (mut a, mut b) = pair(Transport::Uc);
    assert!(a.nic.description().contains("the NIC's clock"), "{}", a.nic.description());
    for token in 0..40 {
        b.receive(token, 4096);
    }
    b.nic.transmit();
    let begin = a.nic.clock_ns(5);
    assert_eq!(begin, 2_000_000_000, "500 MHz");
    for token in 0..40 {
        a.send(token, Operation::Send, &[], vec![token as u8; 50]).unwrap();
    }
    a.nic.transmit();
    let (sent, got) = (a.poll(), b.poll());
    assert_eq!((sent.len(), got.len()), (40, 40));
    // A completion takes 1000 ticks, 2 us; sends and receives alternate.
    for (at, (sent, got)) in sent.iter().zip(&got).enumerate() {
        let at = at as u64;
        assert_eq!((sent.token, got.token, got.immediate, got.len), (at, at, Some(at as u32 + 100), 50));
        assert_eq!((sent.time_ns - begin, got.time_ns - begin), (4000 * at + 2000, 4000 * at + 4000));
    }
    assert_eq!(a.nic.clock_ns(5), begin + 40 * 4000);
}

#[test]
fn completion_queues_grow_with_their_queue_pairs_up_to_the_nics_limit() {
    let mut a = End::new(Transport::Uc);
    let long = QpInit { send_depth: 2000, receive_depth: 3000, ..init(Transport::Uc, a.queue) };
    let pairs: Vec<Qpn> = (0..3).map(|_| a.nic.create_queue_pair(long).unwrap()).collect();
    let error = a.nic.create_queue_pair(long).unwrap_err();
    assert!(matches!(error, VerbsError::Value(_)), "{error}");
    assert_eq!(fake(|fake| fake.resized.clone()), [8192, 16_384, 20_000]);
    a.nic.destroy(pairs[0]).unwrap();
    a.nic.create_queue_pair(long).unwrap();
    assert_eq!(a.nic.destroy(pairs[0]), Err(VerbsError::Unknown));
}

#[test]
fn unsupported_addresses_and_values_are_refused() {
    let config = RdmaCoreConfig { address: [192, 0, 2, 1].into(), queue_pairs: 1, regions: 1, seed: 1 };
    let error = RdmaCore::with(&FUNCTIONS, config).map(|_| ()).unwrap_err();
    assert_eq!(error.to_string(), "no RDMA device has 192.0.2.1 as a RoCE v2 address; there are: fake0 192.0.2.9");
    let (mut a, _b) = pair(Transport::Ud);
    let to = Datagram { address: ADDRESS.into(), port: 4792, source_port: 1, queue_pair: a.pair, queue_key: 7 };
    assert_eq!(a.send(1, Operation::SendTo(to), &[], vec![1]), Err(PostError::Operation), "another UDP port");
    assert_eq!(a.send(1, Operation::Send, &[], vec![1]), Err(PostError::Operation));
    let slice = Slice { key: Key(1), offset: 0, len: 1 };
    assert_eq!(a.nic.post_receive(a.pair, ReceiveRequest { token: 0, slice }), Err(PostError::Memory));
    assert_eq!(a.nic.post_receive(Qpn::new(1), ReceiveRequest { token: 0, slice }), Err(PostError::UnknownQueuePair));
}
