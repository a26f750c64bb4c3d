//! UC: a message that loses a packet is dropped, the others arrive.

use proptest::prelude::*;

use super::*;
use crate::{CompletionKind, PostError, Status};

#[test]
fn sends_and_writes_of_all_lengths_arrive() {
    let (mut a, mut b) = pair(Transport::Uc);
    for (n, len) in [0, 1, 3, 4, 1023, 1024, 1025, 2048, 5000].into_iter().enumerate() {
        let bytes = pattern(len, n as u8);
        let slot = b.post_receive(n as u64, 8192);
        a.post(n as u64, Operation::Send, None, bytes.clone());
        assert_eq!(carry(0, &mut a.nic, &mut b.nic, |_| true), len.div_ceil(1024).max(1));
        let [sent] = a.poll()[..] else { panic!("one completion") };
        assert_eq!((sent.token, sent.kind, sent.status), (n as u64, CompletionKind::Send, Status::Success));
        let [got] = b.poll()[..] else { panic!("one completion") };
        assert_eq!((got.kind, got.len, got.immediate), (CompletionKind::Receive, len as u32, None));
        assert_eq!(b.bytes(slot.key, 0, got.len), bytes);
        assert_eq!(b.bytes(slot.key, got.len, 8192 - got.len), vec![0xee; 8192 - len], "behind the message");

        let target = b.memory(Access::RemoteWrite, vec![0xdd; 8192]);
        b.post_receive(n as u64, 0);
        let write = Operation::Write { address: target.address + 100, key: target.key.0 };
        a.post(n as u64, write, Some(0xabcd), bytes.clone());
        carry(0, &mut a.nic, &mut b.nic, |_| true);
        let [got] = b.poll()[..] else { panic!("one completion") };
        assert_eq!((got.kind, got.len, got.immediate), (CompletionKind::ReceiveWrite, len as u32, Some(0xabcd)));
        assert_eq!(b.bytes(target.key, 100, len as u32), bytes);
        assert_eq!(b.bytes(target.key, 0, 100), [0xdd; 100]);
        a.poll();
    }
    assert_eq!(b.nic.counters().torn_packets + b.nic.counters().out_of_place_packets, 0);
}

#[test]
fn a_torn_message_is_dropped_and_later_ones_arrive() {
    // Lose each packet of the second of three messages of four packets in turn.
    for lost in 4..8 {
        let (mut a, mut b) = pair(Transport::Uc);
        for n in 0..3 {
            b.post_receive(n, 4096);
            a.post(n, Operation::Send, None, pattern(4096, n as u8));
        }
        carry(0, &mut a.nic, &mut b.nic, |n| n != lost);
        let got: Vec<_> = b.poll();
        // The next message uses the receive request of the torn message.
        assert_eq!(got.iter().map(|c| c.token).collect::<Vec<_>>(), [0, 1], "{lost}");
        assert_eq!(a.poll().len(), 3, "the sender does not know");
        // The loss of the last message is undetected until another follows.
        let torn = if lost == 4 { 0 } else { 1 };
        assert_eq!(b.nic.counters().torn_messages, torn, "{lost}");
    }
}

#[test]
fn without_a_receive_request_a_message_is_lost_and_counted() {
    let (mut a, mut b) = pair(Transport::Uc);
    a.post(0, Operation::Send, None, vec![1; 3000]);
    let target = b.memory(Access::RemoteWrite, vec![0; 10]);
    a.post(1, Operation::Write { address: target.address, key: target.key.0 }, Some(1), vec![1; 10]);
    carry(0, &mut a.nic, &mut b.nic, |_| true);
    assert!(b.poll().is_empty());
    assert_eq!(b.nic.counters().no_receive_request_messages, 2);
    b.post_receive(5, 100);
    a.post(2, Operation::Send, None, vec![1; 50]);
    carry(0, &mut a.nic, &mut b.nic, |_| true);
    assert_eq!(b.poll().len(), 1);
}

#[test]
fn queues_are_bounded_until_they_are_polled() {
    let (mut a, _) = pair(Transport::Uc);
    let send = |a: &mut End| a.nic.post_send(a.qp, request(0, Operation::Send, None, None));
    for _ in 0..64 {
        send(&mut a).unwrap();
    }
    assert_eq!(send(&mut a), Err(PostError::Full));
    packets(0, &mut a.nic);
    assert_eq!(send(&mut a), Err(PostError::Full), "completed, but not polled");
    assert_eq!(a.poll().len(), 64);
    send(&mut a).unwrap();
}

proptest! {
    /// With any losses: messages that arrive are complete, in order and unique; all bytes around them are unchanged.
    #[test]
    fn messages_that_arrive_are_complete(
        lens in prop::collection::vec(0usize..6000, 1..20),
        losses in prop::collection::vec(prop::bool::weighted(0.2), 120),
        writes in prop::collection::vec(any::<bool>(), 20),
    ) {
        let (mut a, mut b) = pair(Transport::Uc);
        let target = b.memory(Access::RemoteWrite, vec![0xdd; 20 * 8192]);
        let slots: Vec<_> = (0..lens.len()).map(|n| b.post_receive(n as u64, 6000)).collect();
        for (n, len) in lens.iter().enumerate() {
            let at = target.address + n as u64 * 8192;
            let operation =
                if writes[n] { Operation::Write { address: at, key: target.key.0 } } else { Operation::Send };
            a.post(n as u64, operation, Some(n as u32), pattern(*len, n as u8));
        }
        let mut at = 0;
        let mut whole = vec![];
        for (n, len) in lens.iter().enumerate() {
            let count = len.div_ceil(1024).max(1);
            if !losses[at..at + count].contains(&true) {
                whole.push(n);
            }
            at += count;
        }
        carry(0, &mut a.nic, &mut b.nic, |n| !losses[n]);
        let got = b.poll();
        prop_assert_eq!(got.iter().map(|c| c.immediate.unwrap() as usize).collect::<Vec<_>>(), whole);
        for completion in got {
            let n = completion.immediate.unwrap() as usize;
            let expected = pattern(lens[n], n as u8);
            prop_assert_eq!(completion.len as usize, lens[n]);
            match completion.kind {
                CompletionKind::ReceiveWrite => {
                    prop_assert_eq!(b.bytes(target.key, n as u32 * 8192, completion.len), &expected[..]);
                }
                _ => prop_assert_eq!(b.bytes(slots[completion.token as usize].key, 0, completion.len), &expected[..]),
            }
        }
        for n in 0..lens.len() {
            let behind = b.bytes(target.key, n as u32 * 8192 + 6000, 8192 - 6000);
            prop_assert!(behind.iter().all(|byte| *byte == 0xdd));
        }
    }
}
