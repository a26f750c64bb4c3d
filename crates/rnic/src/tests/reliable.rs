//! RC: go-back-N, and its failures.

use proptest::prelude::*;

use super::*;
use crate::{CompletionKind, PostError, Status};

/// Runs both ends until nothing is open or `rounds` are over; a round is 20 us.
fn run(a: &mut End, b: &mut End, rounds: u64, mut passes: impl FnMut() -> bool) -> (Vec<Completion>, Vec<Completion>) {
    let (mut at_a, mut at_b) = (vec![], vec![]);
    for round in 0..rounds {
        let now = round * 20 * US;
        a.nic.advance(now);
        b.nic.advance(now);
        carry(now, &mut a.nic, &mut b.nic, |_| passes());
        carry(now, &mut b.nic, &mut a.nic, |_| passes());
        at_a.extend(a.poll());
        at_b.extend(b.poll());
    }
    (at_a, at_b)
}

#[test]
fn retransmission_starts_at_the_gap() {
    let (mut a, mut b) = pair(Transport::Rc);
    let slot = b.post_receive(1, 8192);
    a.post(9, Operation::Send, None, pattern(8000, 3));
    carry(0, &mut a.nic, &mut b.nic, |n| n != 2);
    assert_eq!(b.nic.counters().gap_packets, 5);
    // One NAK, and the sender continues at the gap.
    assert_eq!(carry(0, &mut b.nic, &mut a.nic, |_| true), 1);
    assert_eq!(carry(0, &mut a.nic, &mut b.nic, |_| true), 6);
    assert_eq!(a.nic.counters().repeated_packets, 6);
    assert!(a.poll().is_empty(), "not acknowledged");
    carry(0, &mut b.nic, &mut a.nic, |_| true);
    assert_eq!(a.poll()[0].status, Status::Success);
    assert_eq!(b.poll()[0].len, 8000);
    assert_eq!(b.bytes(slot.key, 0, 8000), pattern(8000, 3));
    assert_eq!(a.nic.next_deadline(0), u64::MAX);
}

#[test]
fn silence_ends_the_queue_pair_after_its_retries() {
    let (mut a, mut b) = pair(Transport::Rc);
    for token in 0..3 {
        a.post(token, Operation::Send, None, vec![0; 10]);
    }
    a.post_receive(7, 10);
    assert_eq!(carry(0, &mut a.nic, &mut b.nic, |_| false), 3);
    let mut now = 0;
    for retry in 1..=2 {
        assert_eq!(a.nic.next_deadline(now), retry * TIMEOUT_NS);
        now = a.nic.next_deadline(now);
        a.nic.advance(now - 1);
        assert_eq!(packets(now - 1, &mut a.nic).len(), 0);
        a.nic.advance(now);
        assert_eq!(packets(now, &mut a.nic).len(), 3, "everything again");
    }
    assert!(a.nic.is_ready(a.qp));
    a.nic.advance(3 * TIMEOUT_NS);
    assert!(!a.nic.is_ready(a.qp));
    let statuses: Vec<_> = a.poll().iter().map(|c| (c.token, c.status)).collect();
    let flushed = Status::Flushed;
    assert_eq!(statuses, [(0, Status::RetryExceeded), (1, flushed), (2, flushed), (7, flushed)]);
    assert_eq!(a.nic.post_send(a.qp, request(0, Operation::Send, None, None)), Err(PostError::InError));
    assert_eq!(a.nic.next_deadline(0), u64::MAX);
    // After a reset and a new connection it works.
    a.nic.reset(a.qp).unwrap();
    b.nic.reset(b.qp).unwrap();
    a.connect_to(&b, 1, 2);
    b.connect_to(&a, 2, 1);
    b.post_receive(0, 10);
    a.post(4, Operation::Send, None, vec![0; 10]);
    let (at_a, at_b) = run(&mut a, &mut b, 3, || true);
    assert_eq!((at_a.len(), at_b.len()), (1, 1));
}

#[test]
fn a_receiver_that_is_not_ready_is_retried() {
    let (mut a, mut b) = pair(Transport::Rc);
    a.post(0, Operation::Send, None, vec![7; 2000]);
    carry(0, &mut a.nic, &mut b.nic, |_| true);
    carry(0, &mut b.nic, &mut a.nic, |_| true);
    assert_eq!(packets(0, &mut a.nic).len(), 0, "it waits");
    b.post_receive(3, 4000);
    let (at_a, at_b) = run(&mut a, &mut b, 20, || true);
    assert_eq!((at_a.len(), at_a[0].status), (1, Status::Success));
    assert_eq!(at_b[0].len, 2000);
    // But not forever.
    a.post(1, Operation::Send, None, vec![7; 2000]);
    let (at_a, _) = run(&mut a, &mut b, 200, || true);
    assert_eq!(at_a[0].status, Status::ReceiverNotReady);
}

#[test]
fn a_refused_write_reports_the_reason_and_ends_both_ends() {
    let (mut a, mut b) = pair(Transport::Rc);
    let target = b.memory(Access::RemoteWrite, vec![0xdd; 100]);
    a.post(0, Operation::Write { address: target.address + 50, key: target.key.0 }, None, vec![1; 51]);
    let (at_a, _) = run(&mut a, &mut b, 5, || true);
    assert_eq!(at_a[0].status, Status::RemoteAccess);
    assert_eq!((a.nic.is_ready(a.qp), b.nic.is_ready(b.qp)), (false, false));
    assert_eq!(b.bytes(target.key, 0, 100), [0xdd; 100]);
}

proptest! {
    /// With losses in both directions everything arrives once and in order, or the queue pair reports that it gave up.
    #[test]
    fn everything_arrives_in_order(
        lens in prop::collection::vec(0usize..5000, 1..20),
        seed in any::<u64>(),
        one_in in 5u32..40,
    ) {
        let (mut a, mut b) = pair(Transport::Rc);
        let slots: Vec<_> = (0..lens.len()).map(|n| b.post_receive(n as u64, 5000)).collect();
        for (n, len) in lens.iter().enumerate() {
            a.post(n as u64, Operation::Send, Some(n as u32), pattern(*len, n as u8));
        }
        let mut random = fastrand::Rng::with_seed(seed);
        let (at_a, at_b) = run(&mut a, &mut b, 3000, || random.u32(..one_in) != 0);
        let good: Vec<_> = at_a.iter().take_while(|c| c.status == Status::Success).map(|c| c.token).collect();
        prop_assert_eq!(good.to_vec(), (0..good.len() as u64).collect::<Vec<_>>());
        let got: Vec<_> =
            at_b.iter().filter(|c| c.kind == CompletionKind::Receive && c.status == Status::Success).collect();
        prop_assert!(got.len() >= good.len(), "every acknowledged message has arrived");
        for (n, completion) in got.iter().enumerate() {
            prop_assert_eq!(completion.immediate, Some(n as u32));
            prop_assert_eq!(b.bytes(slots[n].key, 0, completion.len), &pattern(lens[n], n as u8)[..]);
        }
        if a.nic.is_ready(a.qp) {
            prop_assert_eq!(good.len(), lens.len());
        } else {
            prop_assert_eq!(at_a.len(), lens.len(), "every request has its completion");
        }
    }
}
