//! Sending to other hosts at a given rate: whose packet goes next.
//!
//! Without it, a full link is shared by whatever queue is in front of it. With it, the host sends a little less than
//! the link takes, and packets wait here: in the [`Waiting`](crate::waiting::Waiting) of their ports, by [`Band`], and
//! ports take turns by guarantee and weight ([`Scheduler`]). What the transport sends by itself, such as ACKs and
//! retransmissions, waits for nobody; it is charged to the link like everything else.

mod turns;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bifrost_rte::Time;
use bifrost_tables::{Scheduler, TokenBucket};

/// Duration of a burst at the link's rate or a guarantee, ns. A worker that sleeps wakes up later than it wants to.
const BURST_NS: u64 = 2_000_000;
/// Minimum burst, bytes: some packets, so that they share a system call.
const LEAST_BURST: u64 = 16 << 10;
/// Bytes that a worker sends in a turn, plus at most one packet.
const TURN_BYTES: u64 = 1 << 20;
/// Tokens to wait for, bytes: one Ethernet frame.
const QUANTUM: u64 = 1514;
/// Headers of a packet in front of the guest's frame, without Ethernet, IP and UDP, bytes: VXLAN and BIFROST.
const TUNNEL_BYTES: u64 = 24;
/// Ethernet and UDP headers of a datagram, bytes.
const LINK_BYTES: u64 = 14 + 8;

/// The rate at which this host sends to others, Ethernet frames without checksum. Clones share it.
#[derive(Clone, Debug)]
pub struct LinkRate {
    bucket: Arc<Mutex<TokenBucket>>,
    /// Headers of a datagram, bytes: Ethernet, IP, UDP.
    datagram_bytes: u64,
    /// Maximum bytes of a port's packets that wait in a band, on each worker.
    queue_bytes: u64,
}

/// The least that a port may send on a full link. Clones share it: the workers that serve a port grant it together.
#[derive(Clone, Debug)]
pub struct Guarantee(Arc<Mutex<TokenBucket>>);

impl LinkRate {
    /// A rate of `rate` bytes per second. `queue_ns`: how long the packets in a band of a port may take at this rate.
    /// `v6`: whether datagrams to other hosts have IPv6 headers.
    pub fn new(rate: u64, queue_ns: u64, v6: bool) -> Self {
        let queue_bytes = u128::from(rate) * u128::from(queue_ns) / 1_000_000_000;
        LinkRate {
            bucket: bucket(rate),
            datagram_bytes: LINK_BYTES + if v6 { 40 } else { 20 },
            queue_bytes: u64::try_from(queue_bytes).unwrap_or(u64::MAX),
        }
    }
}

impl Guarantee {
    /// A guarantee of `rate` bytes per second.
    pub fn new(rate: u64) -> Self {
        Guarantee(bucket(rate))
    }
}

fn bucket(rate: u64) -> Arc<Mutex<TokenBucket>> {
    let burst = u64::try_from(u128::from(rate) * u128::from(BURST_NS) / 1_000_000_000).unwrap_or(u64::MAX);
    Arc::new(Mutex::new(TokenBucket::new(rate, burst.max(LEAST_BURST))))
}

fn lock(bucket: &Mutex<TokenBucket>) -> MutexGuard<'_, TokenBucket> {
    bucket.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The state of a worker.
#[derive(Debug)]
pub(crate) struct Egress {
    link: LinkRate,
    scheduler: Scheduler,
    /// Packets wait only for tokens of the link.
    waits: bool,
    /// When a port that waits may send within its guarantee.
    guaranteed: Option<Time>,
}

impl Egress {
    /// When packets that wait can be sent; `now`: the time of this turn.
    pub(crate) fn next(&self, now: Time) -> Option<Time> {
        let link = self.waits.then(|| now.after(lock(&self.link.bucket).until(now.0, QUANTUM)));
        self.guaranteed.into_iter().chain(link).min()
    }

    /// A port has packets.
    pub(crate) fn join(&mut self, owner: u32) {
        self.scheduler.join(owner);
    }

    /// Datagrams are sent.
    pub(crate) fn charge(&self, now: Time, datagrams: u64, payload_bytes: u64) {
        lock(&self.link.bucket).charge(now.0, payload_bytes + datagrams * self.link.datagram_bytes);
    }
}
