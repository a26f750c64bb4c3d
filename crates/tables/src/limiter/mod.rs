//! Limits the traffic of each of millions of tenants in little memory: *Albatross*, SIGCOMM'25, 4.3.

mod pre_check;

use std::hash::BuildHasher;

use foldhash::fast::FixedState;

use crate::TokenBucket;
pub use pre_check::PreCheckFull;
use pre_check::{Found, PreCheck};

/// A rate and its burst, in tokens: packets, or bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Tokens per second.
    pub per_second: u64,
    /// Maximum number of tokens kept.
    pub burst: u64,
}

impl Rate {
    /// A rate with a burst of 100 us ([`with_burst`](Self::with_burst)), the maximum wait in a gateway's order queues.
    /// *Albatross* gives rates, but no burst.
    pub fn per_second(per_second: u64) -> Self {
        Self::with_burst(per_second, 100_000)
    }

    /// A rate whose burst is the traffic of `burst_ns` at that rate, at least 32 tokens. A tenant's burst waits in the
    /// rings of the cores: if it is longer than they can hold, other tenants lose packets there. If it is shorter than
    /// a sender's own bursts, that sender loses packets below its rate.
    pub fn with_burst(per_second: u64, burst_ns: u64) -> Self {
        let burst = u128::from(per_second) * u128::from(burst_ns) / 1_000_000_000;
        Rate { per_second, burst: u64::try_from(burst).unwrap_or(u64::MAX).max(32) }
    }

    fn bucket(self) -> TokenBucket {
        TokenBucket::new(self.per_second, self.burst)
    }

    fn plus(self, other: Rate) -> Rate {
        Rate {
            per_second: self.per_second.saturating_add(other.per_second),
            burst: self.burst.saturating_add(other.burst),
        }
    }
}

/// Settings of a [`TenantLimiter`]. The defaults are Albatross's (4.3, 6); "ours" marks values that the paper does not
/// give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimiterConfig {
    /// Entries of the first stage, `color_table[VNI % entries]`: 1 to 65,536.
    pub color_entries: u32,
    /// Entries of the second stage, `meter_table[hash(VNI)]`: 1 to 65,536 (ours).
    pub meter_entries: u32,
    /// Rate of each entry of the first stage.
    pub first: Rate,
    /// Rate of each entry of the second stage. A tenant that shares neither entry gets the sum of the two rates.
    pub second: Rate,
    /// One of this many drops of the second stage is sampled, on average (ours). 0: none is sampled, and tenants that
    /// share both stages keep sharing them.
    pub sample_drops: u32,
    /// A drop is always sampled if the last sample is older than this, ns (ours).
    pub sample_ns: u64,
    /// How long a tenant must not have exceeded its rate before another may replace it in `pre_check`, ns (ours).
    pub keep_ns: u64,
    /// Secret seed: tenants that can predict the hash can choose with whom they share a meter.
    pub seed: u64,
}

impl Default for LimiterConfig {
    fn default() -> Self {
        LimiterConfig {
            color_entries: 4096,
            meter_entries: 4096,
            first: Rate::per_second(8_000_000),
            second: Rate::per_second(2_000_000),
            sample_drops: 1024,
            sample_ns: 100_000_000,
            keep_ns: 10_000_000_000,
            seed: 0,
        }
    }
}

/// The stage that decided about a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The tenant is not limited.
    Bypass,
    /// The tenant's own meter.
    PreMeter,
    /// The first stage.
    Color,
    /// The second stage.
    Meter,
}

/// The decision about a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ruling {
    /// Whether it may pass.
    pub passes: bool,
    /// The stage that decided.
    pub stage: Stage,
}

/// Counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LimiterCounters {
    /// Packets of tenants that are not limited.
    pub bypass_packets: u64,
    /// Packets that passed the tenant's own meter.
    pub pre_meter_packets: u64,
    /// Packets that passed the first stage.
    pub color_packets: u64,
    /// Packets that passed the second stage.
    pub meter_packets: u64,
    /// Packets dropped by the tenant's own meter.
    pub dropped_pre_meter_packets: u64,
    /// Packets dropped by the second stage, possibly because of another tenant.
    pub dropped_meter_packets: u64,
    /// Drops of the second stage that were sampled.
    pub sampled_packets: u64,
    /// Tenants that got their own meter.
    pub promoted_tenants: u64,
    /// Samples for which no entry was free: all tenants in `pre_check` are bypassed, or still exceed their rate.
    pub promotion_refused_samples: u64,
}

/// A limiter for tenants, by VNI (24 bits). There may be millions of them: its memory does not depend on their number.
///
/// `pre_check` lists up to 128 tenants: those that are not limited, and those with their own meter. Other tenants share
/// meters: the first stage passes packets within the rate of `VNI % 4K`, the second those within the rate of a seeded
/// hash of the VNI; all others are dropped. Some drops are sampled. The tenants found in this way get their own meters,
/// whose drops cost no other tenant anything: a tenant that shares both stages with a heavy one loses packets only
/// until then, well within a second. A tenant that is sampled only because it shares a meter gets its full rate from
/// its own meter, too.
#[derive(Clone, Debug)]
pub struct TenantLimiter {
    config: LimiterConfig,
    pre_check: PreCheck,
    color: Box<[TokenBucket]>,
    meter: Box<[TokenBucket]>,
    hash: FixedState,
    /// Drops until the next sample.
    until_sample: u32,
    sampled_at: u64,
    random: u64,
    counters: LimiterCounters,
}

impl TenantLimiter {
    /// Creates a limiter with all meters full. Sizes outside their range are clamped to it.
    pub fn new(config: LimiterConfig) -> Self {
        let table = |entries: u32, rate: Rate| vec![rate.bucket(); entries.clamp(1, 65_536) as usize].into();
        TenantLimiter {
            pre_check: PreCheck::new(config.seed),
            color: table(config.color_entries, config.first),
            meter: table(config.meter_entries, config.second),
            hash: FixedState::with_seed(config.seed),
            until_sample: 1,
            sampled_at: 0,
            random: config.seed | 1,
            counters: LimiterCounters::default(),
            config,
        }
    }

    /// Whether a packet of `tokens` of tenant `vni` may pass, `now` in ns on any monotonic clock.
    #[inline]
    pub fn admit(&mut self, now: u64, vni: u32, tokens: u64) -> Ruling {
        let c = &mut self.counters;
        match self.pre_check.find(vni) {
            Some(Found::Bypass) => {
                c.bypass_packets += 1;
                return Ruling { passes: true, stage: Stage::Bypass };
            }
            Some(Found::Meter(meter)) => {
                let passes = meter.take(now, tokens);
                if passes {
                    c.pre_meter_packets += 1;
                } else {
                    c.dropped_pre_meter_packets += 1;
                }
                return Ruling { passes, stage: Stage::PreMeter };
            }
            None => {}
        }
        let color = vni as usize % self.color.len();
        if self.color[color].take(now, tokens) {
            c.color_packets += 1;
            return Ruling { passes: true, stage: Stage::Color };
        }
        let meter = self.meter_of(vni);
        let passes = self.meter[meter].take(now, tokens);
        if passes {
            self.counters.meter_packets += 1;
        } else {
            self.counters.dropped_meter_packets += 1;
            self.dropped(now, vni);
        }
        Ruling { passes, stage: Stage::Meter }
    }

    /// The stage that would decide about a packet, and the tokens there; `u64::MAX`: the tenant is not limited. Changes
    /// nothing.
    pub fn foresee(&self, now: u64, vni: u32) -> (Stage, u64) {
        if let Some(own) = self.pre_check.foresee(now, vni) {
            return own.map_or((Stage::Bypass, u64::MAX), |tokens| (Stage::PreMeter, tokens));
        }
        let color = self.color[vni as usize % self.color.len()].clone().available(now);
        if color > 0 {
            return (Stage::Color, color);
        }
        (Stage::Meter, self.meter[self.meter_of(vni)].clone().available(now))
    }

    /// The tenant's index in the second stage.
    #[inline]
    fn meter_of(&self, vni: u32) -> usize {
        ((u128::from(self.hash.hash_one(vni)) * self.meter.len() as u128) >> 64) as usize
    }

    /// Handles a drop of the second stage: it may be sampled.
    fn dropped(&mut self, now: u64, vni: u32) {
        if self.config.sample_drops == 0 {
            return;
        }
        self.until_sample = self.until_sample.saturating_sub(1);
        if self.until_sample > 0 && now.saturating_sub(self.sampled_at) < self.config.sample_ns {
            return;
        }
        // Xorshift: intervals that regular traffic cannot synchronise with.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let most = u64::from(self.config.sample_drops) * 2 - 1;
        self.until_sample = 1 + (self.random % most) as u32;
        self.sampled_at = now;
        self.counters.sampled_packets += 1;
        match self.pre_check.promote(now, vni, self.own_meter(now), self.config.keep_ns) {
            Ok(()) => self.counters.promoted_tenants += 1,
            Err(PreCheckFull) => self.counters.promotion_refused_samples += 1,
        }
    }

    /// A meter for one tenant. It starts empty, so that a tenant gets no extra burst.
    fn own_meter(&self, now: u64) -> TokenBucket {
        let rate = self.config.first.plus(self.config.second);
        let mut meter = rate.bucket();
        meter.take(now, rate.burst);
        meter
    }

    /// Exempts the tenant from limits.
    ///
    /// # Errors
    /// All entries are taken by exempted tenants.
    pub fn bypass(&mut self, vni: u32) -> Result<(), PreCheckFull> {
        self.pre_check.bypass(vni)
    }

    /// Gives the tenant its own meter, with the sum of both stages' rates: for a tenant known to be heavy.
    ///
    /// # Errors
    /// All entries are taken.
    pub fn limit_early(&mut self, now: u64, vni: u32) -> Result<(), PreCheckFull> {
        self.pre_check.promote(now, vni, self.own_meter(now), self.config.keep_ns)
    }

    /// Removes the tenant from `pre_check`. Returns false if it was not there.
    pub fn forget(&mut self, vni: u32) -> bool {
        self.pre_check.remove(vni)
    }

    /// Tenants in `pre_check`, and whether each is bypassed.
    pub fn pre_checked(&self) -> impl Iterator<Item = (u32, bool)> {
        self.pre_check.iter()
    }

    /// The counters.
    pub fn counters(&self) -> &LimiterCounters {
        &self.counters
    }

    /// Total memory, which does not grow, bytes.
    pub fn bytes(&self) -> usize {
        let meters = size_of_val::<[TokenBucket]>(&self.color) + size_of_val::<[TokenBucket]>(&self.meter);
        size_of::<Self>() + meters + self.pre_check.heap_bytes()
    }
}
