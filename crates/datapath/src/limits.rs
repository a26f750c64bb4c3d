//! Rate limits of a vNIC.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bifrost_nic::dscp::Band;
use bifrost_rte::Time;
use bifrost_tables::TokenBucket;

/// Duration of a burst at the limit's rate, ns.
const BURST_NS: u64 = 10_000_000;
/// Minimum burst in bytes and in packets: one unsegmented packet, and a few others.
const LEAST_BURST_BYTES: u64 = 64 << 10;
const LEAST_BURST_PACKETS: u64 = 32;
/// A guest that was held back continues when the tokens of this time are available, ns, so that one turn can fetch
/// several packets.
const QUANTUM_NS: u64 = 500_000;
/// Assumed size of a packet before it is seen, bytes.
const LARGEST_PACKET: u64 = 64 << 10;

/// A rate; `None`: unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rate {
    /// Bytes of Ethernet frames per second, up to 50·10⁹.
    pub bytes: Option<u64>,
    /// Packets per second, up to 10⁹; a packet to be segmented counts as its segments.
    pub packets: Option<u64>,
}

/// The limits of a vNIC. Clones share their meters: the workers that serve one vNIC limit it together.
#[derive(Clone, Debug, Default)]
pub struct Limits {
    /// From the guest: packets beyond it wait in the guest's queue.
    pub tx: Option<Limit>,
    /// To the guest: packets beyond it are dropped, and retransmitted if the transport carries them.
    pub rx: Option<Limit>,
}

impl Limits {
    /// Limits for these rates; no limit for a rate without values.
    pub fn new(tx: Rate, rx: Rate) -> Self {
        let limit = |rate: Rate| (rate != Rate::default()).then(|| Limit::new(rate));
        Limits { tx: limit(tx), rx: limit(rx) }
    }
}

/// The meters of one direction.
///
/// Behind a lock, because several workers may serve one vNIC. The lock is held for a few additions, once per batch or
/// packet, and only if there is a limit.
#[derive(Clone, Debug)]
pub struct Limit(Arc<Mutex<Meters>>);

#[derive(Clone, Debug)]
struct Meters {
    bytes: Option<Meter>,
    packets: Option<Meter>,
}

#[derive(Clone, Debug)]
struct Meter {
    bucket: TokenBucket,
    /// Tokens to wait for.
    quantum: u64,
}

impl Meter {
    fn new(rate: u64, least_burst: u64, one: u64) -> Self {
        let burst = per(rate, BURST_NS).max(least_burst);
        Meter { bucket: TokenBucket::new(rate, burst), quantum: per(rate, QUANTUM_NS).clamp(one, burst) }
    }
}

/// Tokens of a rate per second in a time, ns.
fn per(rate: u64, ns: u64) -> u64 {
    u64::try_from(u128::from(rate) * u128::from(ns) / 1_000_000_000).unwrap_or(u64::MAX)
}

/// What may be fetched now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Allowance {
    /// This many packets, at least one, of any size.
    Packets(usize),
    /// Nothing before this time.
    NotBefore(Time),
}

impl Limit {
    fn new(rate: Rate) -> Self {
        // A quantum is at least one Ethernet frame, or one packet.
        let bytes = rate.bytes.map(|rate| Meter::new(rate, LEAST_BURST_BYTES, 1514));
        let packets = rate.packets.map(|rate| Meter::new(rate, LEAST_BURST_PACKETS, 1));
        Limit(Arc::new(Mutex::new(Meters { bytes, packets })))
    }

    /// How many packets may be fetched before their sizes are known. They are [charged](Self::charge) afterwards, which
    /// may leave a debt of up to one packet.
    pub(crate) fn allowance(&self, now: Time) -> Allowance {
        self.meters().allowance(now)
    }

    /// How long a packet fetched now would have to wait, ns. Charges nothing.
    pub(crate) fn wait_ns(&self, now: Time) -> u64 {
        match self.meters().clone().allowance(now) {
            Allowance::Packets(_) => 0,
            Allowance::NotBefore(at) => at.since(now),
        }
    }

    /// Charges fetched packets.
    pub(crate) fn charge(&self, now: Time, bytes: u64, packets: u64) {
        self.meters().charge(now, bytes, packets);
    }

    /// Whether a packet of this size may pass; if so, it is charged.
    pub(crate) fn take(&self, now: Time, bytes: usize) -> bool {
        self.meters().take(now, bytes)
    }

    /// The same for a packet that may use the tokens of the next burst.
    pub(crate) fn take_ahead(&self, now: Time, bytes: usize) -> bool {
        let mut meters = self.meters();
        let has_ahead = meters.has_ahead(now);
        if has_ahead {
            meters.charge(now, bytes as u64, 1);
        }
        has_ahead
    }

    /// Time until a packet of a band may pass, ns. Charges nothing.
    pub(crate) fn until(&self, now: Time, bytes: usize, band: Band) -> u64 {
        let mut meters = self.meters();
        if band == Band::Priority && meters.has_ahead(now) {
            return 0;
        }
        let Meters { bytes: by_bytes, packets } = &mut *meters;
        let of = |meter: &mut Option<Meter>, amount: u64| {
            meter.as_mut().map_or(0, |m| m.bucket.until(now.0, amount.min(m.bucket.rate().1)))
        };
        of(by_bytes, bytes as u64).max(of(packets, 1))
    }

    /// The result that [`take`](Self::take) would have. Charges nothing.
    pub(crate) fn would_take(&self, now: Time, bytes: usize) -> bool {
        self.meters().clone().take(now, bytes)
    }

    fn meters(&self) -> MutexGuard<'_, Meters> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Meters {
    fn allowance(&mut self, now: Time) -> Allowance {
        let Meters { bytes, packets } = self;
        let (mut allowed, mut wait) = (u64::MAX, 0);
        for (meter, size) in [(bytes, LARGEST_PACKET), (packets, 1)] {
            let Some(Meter { bucket, quantum }) = meter else { continue };
            match bucket.available(now.0) {
                0 => wait = wait.max(bucket.until(now.0, *quantum)),
                tokens => allowed = allowed.min((tokens / size).max(1)),
            }
        }
        if wait > 0 { Allowance::NotBefore(now.after(wait)) } else { Allowance::Packets(allowed as usize) }
    }

    fn charge(&mut self, now: Time, bytes: u64, packets: u64) {
        if let Some(meter) = &mut self.bytes {
            meter.bucket.charge(now.0, bytes);
        }
        if let Some(meter) = &mut self.packets {
            meter.bucket.charge(now.0, packets);
        }
    }

    /// Whether no meter owes more than a burst.
    fn has_ahead(&mut self, now: Time) -> bool {
        let has = |meter: &mut Meter| meter.bucket.debt(now.0) < meter.bucket.rate().1;
        [&mut self.bytes, &mut self.packets].into_iter().flatten().all(has)
    }

    fn take(&mut self, now: Time, bytes: usize) -> bool {
        let Meters { bytes: by_bytes, packets } = self;
        // The second meter is only asked if the first one lets the packet pass, and the first one is only charged if
        // both do.
        let passes = by_bytes.as_mut().is_none_or(|m| m.bucket.until(now.0, bytes as u64) == 0)
            && packets.as_mut().is_none_or(|m| m.bucket.take(now.0, 1));
        if let Some(meter) = by_bytes.as_mut().filter(|_| passes) {
            meter.bucket.charge(now.0, bytes as u64);
        }
        passes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn limit(bytes: Option<u64>, packets: Option<u64>) -> Limit {
        Limits::new(Rate { bytes, packets }, Rate::default()).tx.expect("a limit")
    }

    #[test]
    fn no_rate_is_no_limit() {
        let limits = Limits::new(Rate::default(), Rate::default());
        assert!(limits.tx.is_none() && limits.rx.is_none());
    }

    #[test]
    fn fetched_packets_must_be_paid_for() {
        // 100 Mbit/s: a burst of 125,000 bytes, so one packet of the largest size.
        let limit = limit(Some(12_500_000), None);
        assert_eq!(limit.allowance(Time(0)), Allowance::Packets(1));
        limit.charge(Time(0), 1_250_000, 1);
        let Allowance::NotBefore(at) = limit.allowance(Time(0)) else { panic!("90 ms are owed") };
        // It must also wait for half a millisecond's worth of tokens.
        assert_eq!(at, Time(90 * MS + MS / 2));
        assert!(matches!(limit.allowance(Time(at.0 - MS)), Allowance::NotBefore(again) if again == at));
        assert_eq!(limit.allowance(at), Allowance::Packets(1));
    }

    #[test]
    fn the_smaller_allowance_and_the_longer_wait_count() {
        let limit = limit(Some(12_500_000_000), Some(1_000_000));
        // 10 ms are 10,000 packets, and 125,000,000 bytes are 1907 of the largest.
        assert_eq!(limit.allowance(Time(0)), Allowance::Packets(1907));
        limit.charge(Time(0), 0, 9_995);
        assert_eq!(limit.allowance(Time(0)), Allowance::Packets(5));
        limit.charge(Time(0), 125_000_000, 5);
        assert_eq!(limit.allowance(Time(0)), Allowance::NotBefore(Time(MS / 2)));
    }

    #[test]
    fn a_packet_refused_by_one_meter_is_not_charged_to_the_other() {
        let limit = limit(Some(125_000), Some(1_000));
        assert_eq!((0..100).filter(|_| limit.take(Time(0), 100)).count(), 32);
        // The number of packets is available again, and all bytes except 32 times 100.
        let later = Time(1_000_000 * MS);
        assert!(limit.take(later, 65_000));
        assert!(!limit.take(later, 65_000), "bytes");
        assert_eq!((0..100).filter(|_| limit.take(later, 1)).count(), 31, "those bytes took no packet");
    }

    #[test]
    fn asking_takes_nothing() {
        let limit = limit(Some(125_000), Some(1_000));
        let before = format!("{limit:?}");
        let now = Time(MS);
        assert_eq!((limit.wait_ns(now), limit.would_take(now, 1000), limit.would_take(now, 70_000)), (0, true, false));
        assert_eq!(format!("{limit:?}"), before);
        limit.charge(now, 0, 100);
        let before = format!("{limit:?}");
        // 68 are owed, and 1 must be available.
        assert_eq!((limit.wait_ns(now), limit.would_take(now, 1)), (69 * MS, false));
        assert_eq!(format!("{limit:?}"), before);
        assert_eq!(limit.allowance(now), Allowance::NotBefore(now.after(69 * MS)), "as it was told");
    }

    #[test]
    fn clones_share() {
        let limit = limit(None, Some(1_000));
        let other = limit.clone();
        assert_eq!((0..100).filter(|_| limit.take(Time(0), 1)).count(), 32);
        assert!(!other.take(Time(0), 1));
    }
}
