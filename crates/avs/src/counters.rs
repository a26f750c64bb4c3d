//! Counters of the switch. A frame that is to be segmented later counts as one packet.

use crate::drop_reason::DropReason;
use crate::verdict::{Action, Verdict};

/// Counters of one port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortCounters {
    /// From the guest, forwarded to another host.
    pub to_remote_packets: u64,
    /// From the guest, delivered to another local port.
    pub to_local_packets: u64,
    /// From the guest, answered by the switch itself.
    pub answered_packets: u64,
    /// From the guest, passed to a service of this host's daemon.
    pub to_host_packets: u64,
    /// From the guest to a multicast group; each member gets a copy.
    pub copied_packets: u64,
    /// From the guest, to an address whose route must be learned first. A packet that is offered again afterwards
    /// counts again.
    pub asked_packets: u64,
    /// Unsolicited router advertisements to the guest.
    pub advertised_packets: u64,
    /// From the underlay, delivered to the guest.
    pub from_underlay_packets: u64,
    /// Packets from or to the guest that were larger than the path MTU and were fragmented.
    pub fragmented_packets: u64,
    /// Packets from or to the guest that were larger than the path MTU and had DF set: the sender got an ICMP error.
    /// Those from the guest also count as answered.
    pub too_big_packets: u64,
    /// From the guest, dropped. If one guest sends to another of the same host and worker, the sender's port counts
    /// drops of either side's rules.
    pub dropped: Drops,
    /// From the underlay, or from a guest of this host that another worker serves: dropped by the receiving port's
    /// security groups or its network's ACL.
    pub ingress_dropped: Drops,
}

/// Counters of frames from the underlay, and of frames from a port that does not exist.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnderlayCounters {
    /// Delivered to a port.
    pub accepted_packets: u64,
    /// From the underlay or handed over by another worker: dropped by a port's security groups, its network's ACL or
    /// its MTU. [`PortCounters::ingress_dropped`] has the reasons.
    pub ingress_dropped_packets: u64,
    /// Larger than the receiving port's MTU and must not be fragmented; the sender got an ICMP error.
    pub too_big_answered_packets: u64,
    /// Dropped for reasons that belong to no port.
    pub dropped: Drops,
}

/// Dropped packets by reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drops([u64; DropReason::ALL.len()]);

impl Default for Drops {
    fn default() -> Self {
        Drops([0; DropReason::ALL.len()])
    }
}

impl Drops {
    /// Packets dropped for `reason`.
    pub fn packets(&self, reason: DropReason) -> u64 {
        self.0[reason.index()]
    }

    /// Packets dropped.
    pub fn total_packets(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Every reason with its number of packets.
    pub fn iter(&self) -> impl Iterator<Item = (DropReason, u64)> {
        DropReason::ALL.iter().map(|&reason| (reason, self.packets(reason)))
    }

    pub(crate) fn count(&mut self, reason: DropReason) {
        self.0[reason.index()] += 1;
    }
}

impl PortCounters {
    #[inline(always)]
    pub(crate) fn count_from_guest(&mut self, verdict: &Verdict) {
        match verdict.action {
            Action::Forward { .. } => self.to_remote_packets += 1,
            Action::Deliver { .. } => self.to_local_packets += 1,
            Action::Answer { .. } => self.answered_packets += 1,
            Action::Host => self.to_host_packets += 1,
            Action::Copy => self.copied_packets += 1,
            Action::Ask { .. } => self.asked_packets += 1,
            Action::Drop(reason) => self.dropped.count(reason),
        }
    }

    /// Every counter by name; names end in their unit.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        [
            ("to_remote_packets", self.to_remote_packets),
            ("to_local_packets", self.to_local_packets),
            ("answered_packets", self.answered_packets),
            ("to_host_packets", self.to_host_packets),
            ("copied_packets", self.copied_packets),
            ("asked_packets", self.asked_packets),
            ("advertised_packets", self.advertised_packets),
            ("from_underlay_packets", self.from_underlay_packets),
            ("fragmented_packets", self.fragmented_packets),
            ("too_big_packets", self.too_big_packets),
        ]
        .into_iter()
        .chain(self.dropped.iter().map(|(reason, packets)| (reason.counter(), packets)))
        .chain(self.ingress_dropped.iter().map(|(reason, packets)| (reason.ingress_dropped_counter(), packets)))
    }
}

impl UnderlayCounters {
    /// Every counter by name; names end in their unit.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let dropped = self.dropped.iter().map(|(reason, packets)| (reason.counter(), packets));
        let plain = [
            ("accepted_packets", self.accepted_packets),
            ("ingress_dropped_packets", self.ingress_dropped_packets),
            ("too_big_answered_packets", self.too_big_answered_packets),
        ];
        plain.into_iter().chain(dropped)
    }
}
