//! One direction of a link: rate, delay, a queue, and faults.

use serde::{Deserialize, Serialize};

use crate::rng::Rng;
use crate::units::{Bytes, Ns, Rate};

/// Overhead of a datagram on an Ethernet link in addition to its UDP payload, bytes: preamble, Ethernet, IPv4 and UDP
/// headers, checksum, gap.
pub(crate) const OVERHEAD_BYTES: u64 = 8 + 14 + 20 + 8 + 4 + 12;

/// Properties of a link.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LinkConfig {
    /// Bits per second on the wire, all headers, preamble and gap included; 0: no limit.
    pub rate: Rate,
    /// Propagation delay.
    pub delay: Ns,
    /// Additional random delay, uniform in 0..jitter. Order is kept.
    pub jitter: Ns,
    /// Queue length, bytes; packets that do not fit are dropped.
    pub queue: Bytes,
    /// Queue length, bytes, above which ECN-capable packets are marked; 0: never.
    pub ecn_threshold: Bytes,
    /// Packets with at least this DSCP are sent before all others (strict priority), and are never dropped because of a
    /// full queue; 0: one queue for all.
    pub priority_dscp: u8,
    /// Probability of loss.
    pub loss: f64,
    /// Probability of a flipped bit. UDP's checksum detects it, so the receiving host drops the packet.
    pub corruption: f64,
    /// Probability of duplication.
    pub duplication: f64,
    /// Probability that a packet is delayed further, by up to `reorder_delay`, so that others overtake it.
    pub reordering: f64,
    /// Maximum delay of such a packet, uniform in 0..=this.
    pub reorder_delay: Ns,
    /// Nothing passes, and packets in flight are lost.
    pub down: bool,
    /// Convergence time of routing: how long the link must be down until routing avoids it, and up until routing uses
    /// it again; 0: routing never notices.
    pub reroute_after: Ns,
}

impl Default for LinkConfig {
    fn default() -> Self {
        LinkConfig {
            rate: Rate(100_000_000_000),
            delay: Ns(5_000),
            jitter: Ns(0),
            queue: Bytes(4_000_000),
            ecn_threshold: Bytes(0),
            priority_dscp: 0,
            loss: 0.0,
            corruption: 0.0,
            duplication: 0.0,
            reordering: 0.0,
            reorder_delay: Ns(100_000),
            down: false,
            reroute_after: Ns(0),
        }
    }
}

macro_rules! patch {
    ($($(#[$doc:meta])* $field:ident: $kind:ty,)*) => {
        /// Changes to a [`LinkConfig`]. Unset fields do not change.
        #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct LinkPatch {
            $(
                #[doc = concat!("[`LinkConfig::", stringify!($field), "`]")]
                #[serde(skip_serializing_if = "Option::is_none")]
                pub $field: Option<$kind>,
            )*
        }

        impl LinkPatch {
            /// `config` with these changes.
            pub fn on(&self, mut config: LinkConfig) -> LinkConfig {
                $(if let Some(value) = self.$field { config.$field = value; })*
                config
            }
        }
    };
}

patch! {
    rate: Rate,
    delay: Ns,
    jitter: Ns,
    queue: Bytes,
    ecn_threshold: Bytes,
    priority_dscp: u8,
    loss: f64,
    corruption: f64,
    duplication: f64,
    reordering: f64,
    reorder_delay: Ns,
    down: bool,
    reroute_after: Ns,
}

/// Why a packet was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DropReason {
    /// The link is, or went, down.
    Down,
    /// Random loss.
    Loss,
    /// The queue is full.
    Queue,
    /// A flipped bit, which the receiving host's UDP checksum detected.
    Corrupted,
    /// No route to the destination.
    NoRoute,
    /// TTL expired.
    Ttl,
    /// The host is down.
    HostDown,
    /// The receiving host's socket buffer is full.
    HostQueue,
}

impl DropReason {
    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            DropReason::Down => "down",
            DropReason::Loss => "loss",
            DropReason::Queue => "queue",
            DropReason::Corrupted => "corrupted",
            DropReason::NoRoute => "no_route",
            DropReason::Ttl => "ttl",
            DropReason::HostDown => "host_down",
            DropReason::HostQueue => "host_queue",
        }
    }
}

/// Fate of a packet on a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is dropped.
    Dropped(DropReason),
    /// It arrives.
    Passes {
        /// Arrival time.
        at: u64,
        /// It gets a congestion mark, which only an ECN-capable packet does.
        marked: bool,
        /// One of its bits flips.
        corrupted: bool,
        /// A second copy arrives at this time.
        twice: Option<u64>,
    },
}

/// The fields of a packet's IP header that a link uses.
#[derive(Clone, Copy, Debug, Default)]
pub struct Class {
    /// It is ECN-capable.
    pub ecn_capable: bool,
    /// Its DSCP.
    pub dscp: u8,
}

/// One direction of a link.
#[derive(Clone, Debug)]
pub struct Link {
    /// Its current properties.
    pub config: LinkConfig,
    /// Its initial properties, for the end of a fault.
    pub original: LinkConfig,
    /// When its queue will be empty, ns.
    busy_until: u64,
    last_arrival: u64,
    /// When it last went down or came up, ns.
    changed_at: u64,
    /// When it last went down, ns, plus 1; 0: never.
    went_down: u64,
    /// Packets accepted.
    pub packets: u64,
    /// Bytes of them on the wire.
    pub bytes: u64,
    /// Packets that it marked.
    pub marked_packets: u64,
    /// Packets dropped here, for any reason.
    pub dropped_packets: u64,
    /// Maximum queue length, bytes.
    pub queue_bytes_max: u64,
}

impl Link {
    /// How long a packet that arrives now would wait in the queue, ns.
    pub(crate) fn wait_ns(&self, now: u64) -> u64 {
        self.busy_until.saturating_sub(now)
    }

    /// An idle link.
    pub fn new(config: LinkConfig) -> Self {
        Link {
            original: config.clone(),
            config,
            busy_until: 0,
            last_arrival: 0,
            changed_at: 0,
            went_down: 0,
            packets: 0,
            bytes: 0,
            marked_packets: 0,
            dropped_packets: 0,
            queue_bytes_max: 0,
        }
    }

    /// Changes its properties from `now` on. Returns whether it went down or came up.
    pub fn change(&mut self, now: u64, config: LinkConfig) -> bool {
        let changed = config.down != self.config.down;
        if changed {
            self.changed_at = now;
        }
        if config.down && !self.config.down {
            self.went_down = now + 1;
            self.busy_until = self.busy_until.min(now);
        }
        self.config = config;
        changed
    }

    /// Whether its state, down or up, has lasted long enough that routing has noticed.
    pub fn is_settled(&self, now: u64) -> bool {
        now.saturating_sub(self.changed_at) >= self.config.reroute_after.0
    }

    /// Whether a packet that entered at `entered` was in flight when the link went down.
    pub fn lost_on_the_way(&self, entered: u64) -> bool {
        self.went_down > entered
    }

    /// Accepts or drops a packet with `payload` bytes of UDP payload.
    pub fn offer(&mut self, now: u64, payload: usize, class: Class, rng: &mut Rng) -> Fate {
        let fate = self.decide(now, payload as u64 + OVERHEAD_BYTES, class, rng);
        match fate {
            Fate::Dropped(_) => self.dropped_packets += 1,
            Fate::Passes { marked, .. } => {
                self.packets += 1;
                self.bytes += payload as u64 + OVERHEAD_BYTES;
                self.marked_packets += u64::from(marked);
            }
        }
        fate
    }

    fn decide(&mut self, now: u64, size: u64, class: Class, rng: &mut Rng) -> Fate {
        let c = &self.config;
        if c.down {
            return Fate::Dropped(DropReason::Down);
        }
        if rng.chance(c.loss) {
            return Fate::Dropped(DropReason::Loss);
        }
        let (mut departs, mut marked) = (now, false);
        let first = c.priority_dscp > 0 && class.dscp >= c.priority_dscp;
        if c.rate.0 > 0 && first {
            // The model ignores the rest of the packet that is being sent: at most a microsecond or two.
            let own = (u128::from(size) * 8_000_000_000).div_ceil(u128::from(c.rate.0)) as u64;
            departs = now + own;
            self.busy_until = self.busy_until.max(now) + own;
        } else if c.rate.0 > 0 {
            let backlog = self.busy_until.saturating_sub(now);
            let waiting = (u128::from(backlog) * u128::from(c.rate.0) / 8_000_000_000) as u64;
            if waiting + size > c.queue.0.max(size) {
                return Fate::Dropped(DropReason::Queue);
            }
            self.queue_bytes_max = self.queue_bytes_max.max(waiting + size);
            marked = class.ecn_capable && c.ecn_threshold.0 > 0 && waiting > c.ecn_threshold.0;
            departs = now + backlog + (u128::from(size) * 8_000_000_000).div_ceil(u128::from(c.rate.0)) as u64;
            self.busy_until = departs;
        }
        let mut at = departs + c.delay.0 + rng_below(rng, c.jitter.0);
        if rng.chance(c.reordering) {
            at += rng_below(rng, c.reorder_delay.0 + 1);
        } else if !first {
            at = at.max(self.last_arrival);
            self.last_arrival = at;
        }
        let corrupted = rng.chance(c.corruption);
        let twice = rng.chance(c.duplication).then(|| at + rng_below(rng, c.delay.0 + 1));
        Fate::Passes { at, marked, corrupted, twice }
    }
}

fn rng_below(rng: &mut Rng, n: u64) -> u64 {
    if n > 1 { rng.below(n) } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(change: impl FnOnce(&mut LinkConfig)) -> Link {
        let mut config = LinkConfig { rate: Rate(8_000_000_000), delay: Ns(1000), ..LinkConfig::default() };
        change(&mut config);
        Link::new(config)
    }

    fn at(fate: Fate) -> u64 {
        match fate {
            Fate::Passes { at, .. } => at,
            Fate::Dropped(reason) => panic!("dropped: {reason:?}"),
        }
    }

    #[test]
    fn rate_and_delay() {
        let mut l = link(|_| ());
        let mut rng = Rng::new(1);
        let wire = 934 + OVERHEAD_BYTES;
        assert_eq!(wire, 1000);
        assert_eq!(at(l.offer(0, 934, Class::default(), &mut rng)), 1000 + 1000, "a byte a nanosecond, then the delay");
        assert_eq!(at(l.offer(0, 934, Class::default(), &mut rng)), 2000 + 1000, "behind the first");
        assert_eq!(at(l.offer(10_000, 934, Class::default(), &mut rng)), 12_000, "idle again");
    }

    #[test]
    fn a_full_queue_drops_and_a_long_one_marks() {
        let mut l = link(|c| (c.queue, c.ecn_threshold) = (Bytes(3000), Bytes(1500)));
        let mut rng = Rng::new(1);
        let fates: Vec<Fate> =
            (0..4).map(|_| l.offer(0, 934, Class { ecn_capable: true, dscp: 0 }, &mut rng)).collect();
        let marks: Vec<Option<bool>> = fates
            .iter()
            .map(|f| match f {
                Fate::Passes { marked, .. } => Some(*marked),
                Fate::Dropped(_) => None,
            })
            .collect();
        assert_eq!(marks, [Some(false), Some(false), Some(true), None]);
        assert_eq!((l.packets, l.marked_packets, l.dropped_packets, l.queue_bytes_max), (3, 1, 1, 3000));
    }

    #[test]
    fn a_priority_class_waits_for_no_other() {
        let mut l = link(|c| (c.queue, c.priority_dscp) = (Bytes(3000), 48));
        let mut rng = Rng::new(1);
        let control = Class { ecn_capable: false, dscp: 48 };
        let times: Vec<u64> = (0..3).map(|_| at(l.offer(0, 934, Class::default(), &mut rng))).collect();
        assert_eq!(times, [2000, 3000, 4000]);
        assert_eq!(l.offer(0, 934, Class { dscp: 47, ..control }, &mut rng), Fate::Dropped(DropReason::Queue));
        assert_eq!(at(l.offer(0, 934, control, &mut rng)), 2000, "neither drop nor wait");
        assert_eq!(at(l.offer(4000, 934, Class::default(), &mut rng)), 6000, "others wait for it");
    }

    #[test]
    fn jitter_keeps_order_and_reordering_does_not() {
        let mut rng = Rng::new(7);
        let mut l = link(|c| (c.rate, c.jitter) = (Rate(0), Ns(5000)));
        let times: Vec<u64> = (0..100).map(|i| at(l.offer(i, 100, Class::default(), &mut rng))).collect();
        assert!(times.is_sorted() && times[99] > 1099);
        let mut l = link(|c| (c.rate, c.reordering) = (Rate(0), 0.3));
        let times: Vec<u64> = (0..100).map(|i| at(l.offer(i, 100, Class::default(), &mut rng))).collect();
        assert!(!times.is_sorted());
    }

    #[test]
    fn packets_in_flight_when_a_link_goes_down_are_lost() {
        let mut l = link(|_| ());
        let mut rng = Rng::new(1);
        l.offer(100, 934, Class::default(), &mut rng);
        l.change(150, LinkConfig { down: true, ..l.config.clone() });
        assert!(l.lost_on_the_way(100));
        assert_eq!(l.offer(200, 934, Class::default(), &mut rng), Fate::Dropped(DropReason::Down));
        l.change(300, l.original.clone());
        assert!(!l.lost_on_the_way(300));
        assert_eq!(at(l.offer(300, 934, Class::default(), &mut rng)), 2300);
    }
}
