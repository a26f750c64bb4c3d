//! Counters of the data path itself; the crates that it uses have their own.

use bifrost_nic::Malformed;
use bifrost_tables::Move;
use bifrost_wire::bifrost::Refusal;

/// Counters of one worker.
#[derive(Clone, Debug, Default)]
pub struct Counters {
    /// Turns of the loop.
    pub loops: u64,
    /// Turns in which there was work to do.
    pub busy_loops: u64,
    /// Time spent in turns with work, ns.
    pub busy_ns: u64,
    /// Datagrams received on the underlay.
    pub underlay_rx_packets: u64,
    /// Their bytes, from the VXLAN header on.
    pub underlay_rx_bytes: u64,
    /// Datagrams handed to the underlay for sending.
    pub underlay_tx_packets: u64,
    /// Their bytes, from the VXLAN header on.
    pub underlay_tx_bytes: u64,
    /// Packets sent in the datagram of another one.
    pub bundled_packets: u64,
    /// Packets received in the datagram of another one.
    pub unbundled_packets: u64,
    /// Datagrams from an address that is not a configured peer's.
    pub unknown_peer_packets: u64,
    /// Datagrams whose VXLAN header is short or lacks the I flag.
    pub bad_vxlan_packets: u64,
    /// BIFROST packets that the parser refused, by reason.
    pub refused_packets: [u64; Refusal::ALL.len()],
    /// Frames in datagrams that cannot be parsed, by reason.
    pub malformed_underlay_frames: [u64; Malformed::ALL.len()],
    /// Frames from guests that cannot be parsed or segmented, by reason.
    pub malformed_guest_frames: [u64; Malformed::ALL.len()],
    /// Frames in datagrams whose transport checksum is wrong.
    pub bad_checksum_frames: u64,
    /// Plain VXLAN packets with a congestion mark whose inner packet is not ECN-capable, so its sender would not learn
    /// of the congestion (RFC 6040); dropped.
    pub marked_not_ect_packets: u64,
    /// Plain VXLAN frames whose transport checksum is wrong; delivered nevertheless, because the guest decides about
    /// them.
    pub bad_plain_checksum_frames: u64,
    /// BIFROST packets received that carry no frame: ACKs, probes, SKIPs, set-up, RESETs.
    pub control_rx_packets: u64,
    /// Data packets that the transport did not take: duplicates, and packets that match no connection. The transport's
    /// counters have details.
    pub not_accepted_packets: u64,
    /// Data packets placed for the guest and discarded again, because the transport could not take them.
    pub discarded_packets: u64,
    /// Answers of the switch to guests, and unsolicited router advertisements.
    pub answered_packets: u64,
    /// Packets for guests of this host: placed for them, or beyond their limit.
    pub guest_rx_packets: u64,
    /// Packets to send: requested by the transport, or plain VXLAN.
    pub emitted_packets: u64,
    /// Frames from guests whose transport checksum is complete but wrong; sent as plain VXLAN.
    pub bad_guest_checksum_frames: u64,
    /// DATA whose frame does not belong to the connection's two vNICs.
    pub wrong_vnic_packets: u64,
    /// Plain VXLAN frames accepted.
    pub plain_rx_packets: u64,
    /// Frames sent as plain VXLAN.
    pub plain_tx_packets: u64,
    /// Frames for guests that have moved to other hosts, forwarded there.
    pub followed_packets: u64,
    /// Copies kept of frames that were sent as plain VXLAN while all paths to their peer had failed.
    pub kept_packets: u64,
    /// Of these: sent again when a path answered.
    pub kept_tx_packets: u64,
    /// Groups of plain VXLAN flows that left their path because it had become bad.
    pub plain_moved_buckets: u64,
    /// Groups of plain VXLAN flows that returned to their original path.
    pub plain_returned_buckets: u64,
    /// Bursts of plain VXLAN that took another path than the previous burst of their flow.
    pub plain_moved_flowlets: u64,
    /// Frames switched between two ports of this host.
    pub local_packets: u64,
    /// Packets from other hosts that were larger than their guest accepts, and were fragmented.
    pub fragmented_packets: u64,
    /// The fragments of these.
    pub fragment_packets: u64,
    /// Plain or local frames for which the guest had no buffer.
    pub no_buffer_packets: u64,
    /// Packets for guests that had to wait for a receive limit or a buffer.
    pub rx_queued_packets: u64,
    /// Those of them that were placed or dropped later.
    pub rx_released_packets: u64,
    /// Packets that had to wait for earlier ones while the guest's last buffers were reserved for those; they are
    /// retransmitted.
    pub reorder_full_packets: u64,
    /// Packets from other hosts whose peer or port was removed while they were in transit, or is not on this worker.
    pub gone_packets: u64,
    /// Packets to other hosts whose peer or port was removed while they were in transit.
    pub gone_tx_packets: u64,
    /// Packets that were not retransmitted because the guest had reused their buffer.
    pub reused_buffer_packets: u64,
    /// Frames larger than the receiving port accepts.
    pub too_large_packets: u64,
    /// Datagrams, and frames between guests of this host, handed over to the worker that owns them.
    pub handed_over_packets: u64,
    /// Of these: taken from other workers.
    pub taken_over_packets: u64,
    /// Not handed over, but dropped, because too many wait for the worker that owns them.
    pub hand_over_overflow_packets: u64,
    /// Packets to services of the daemon, dropped because too many wait for it.
    pub host_queue_full_packets: u64,
    /// RESETs dropped because the queue to another worker was full.
    pub reset_overflow_packets: u64,
    /// Packets that an injected fault dropped.
    pub fault_dropped_packets: u64,
    /// Packets that an injected fault delayed.
    pub fault_delayed_packets: u64,
    /// Packets that an injected fault duplicated.
    pub fault_duplicated_packets: u64,
    /// Packets that an injected fault corrupted.
    pub fault_corrupted_packets: u64,
    /// Delayed packets dropped because too many wait.
    pub fault_overflow_packets: u64,
    /// Of the dropped ones: those from guests.
    pub fault_guest_dropped_packets: u64,
    /// Of the dropped ones: those to other hosts.
    pub fault_tx_dropped_packets: u64,
    /// Of the corrupted ones: those to other hosts, which are dropped.
    pub fault_tx_corrupted_packets: u64,
    /// Of the corrupted ones: those received from other hosts, which are dropped.
    pub fault_rx_corrupted_packets: u64,
    /// Of the duplicated ones: those to other hosts.
    pub fault_tx_duplicated_packets: u64,
    /// Of the duplicated ones: those received from other hosts.
    pub fault_rx_duplicated_packets: u64,
    /// Packets to other hosts that were held, to be sent later.
    pub fault_tx_delayed_packets: u64,
    /// Packets from other hosts that were held, to be processed later.
    pub fault_rx_delayed_packets: u64,
    /// Copies that were queued to be delayed.
    pub fault_queued_packets: u64,
    /// Delayed packets to other hosts that were released.
    pub fault_tx_released_packets: u64,
    /// Delayed packets from other hosts that were released.
    pub fault_rx_released_packets: u64,
    /// Turns of more than a millisecond of processor time, while turns are measured.
    pub long_turns: u64,
    /// Panics that were contained.
    pub caught_panics: u64,
    /// Packets for guests that were being processed when a panic occurred.
    pub faulted_packets: u64,
    /// Packets to other hosts that were being processed when a panic occurred.
    pub faulted_tx_packets: u64,
    /// Failed notifications of guests.
    pub notify_errors: u64,
    /// Failed fetches from guests.
    pub fetch_errors: u64,
}

/// A guest's packets on one worker, by stage and result.
#[derive(Clone, Copy, Debug, Default)]
pub struct OutboundCounters {
    /// Fetched from its device.
    pub fetched_packets: u64,
    /// Cannot be parsed.
    pub malformed_packets: u64,
    /// Dropped by an injected fault before the switch.
    pub fault_dropped_packets: u64,
    /// Accepted by the switch, but cannot be segmented.
    pub unsegmentable_packets: u64,
    /// Dropped: too many waited for a window to the same destination.
    pub window_full_packets: u64,
    /// Dropped: too many waited for the port's turn on the link.
    pub queue_full_packets: u64,
    /// Accepted by the transport.
    pub accepted_packets: u64,
    /// Sent as plain VXLAN.
    pub plain_packets: u64,
    /// To another port of this host.
    pub local_packets: u64,
    /// Returned to the switch for another decision, because the peer was removed while they waited.
    pub reswitched_packets: u64,
    /// Packets that waited for a route, and were given to the switch again with its answer.
    pub resumed_packets: u64,
    /// Dropped: too many packets wait for this route, for routes of this port, or for routes of this worker.
    pub learn_full_packets: u64,
    /// Dropped: the guest needs more new routes than it may ask for.
    pub learn_rate_packets: u64,
    /// Dropped: the daemon's queue of questions has no room.
    pub learn_unasked_packets: u64,
    /// Dropped: no answer came in time.
    pub learn_timeout_packets: u64,
    /// Dropped: they waited for a route when the port's device was replaced.
    pub learn_gone_packets: u64,
    /// Waited for the switch when their device was replaced.
    pub gone_unswitched_packets: u64,
    /// Waited for the transport when their device was replaced.
    pub gone_switched_packets: u64,
    /// Copies of its packets for members of a group; the switch decides about each copy.
    pub copy_packets: u64,
    /// Answers of the switch, and router advertisements, placed for the guest.
    pub answer_packets: u64,
    /// Being processed before parser and switch when a panic took the port out of use.
    pub faulted_unswitched_packets: u64,
    /// The same, in the switch.
    pub faulted_packets: u64,
    /// The same, between switch and transport.
    pub faulted_switched_packets: u64,
}

impl OutboundCounters {
    /// All counters with their names, units last.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        [
            ("fetched_packets", self.fetched_packets),
            ("malformed_packets", self.malformed_packets),
            ("fault_dropped_packets", self.fault_dropped_packets),
            ("unsegmentable_packets", self.unsegmentable_packets),
            ("window_full_packets", self.window_full_packets),
            ("queue_full_packets", self.queue_full_packets),
            ("accepted_packets", self.accepted_packets),
            ("plain_packets", self.plain_packets),
            ("local_packets", self.local_packets),
            ("reswitched_packets", self.reswitched_packets),
            ("resumed_packets", self.resumed_packets),
            ("learn_full_packets", self.learn_full_packets),
            ("learn_rate_packets", self.learn_rate_packets),
            ("learn_unasked_packets", self.learn_unasked_packets),
            ("learn_timeout_packets", self.learn_timeout_packets),
            ("learn_gone_packets", self.learn_gone_packets),
            ("gone_unswitched_packets", self.gone_unswitched_packets),
            ("gone_switched_packets", self.gone_switched_packets),
            ("copy_packets", self.copy_packets),
            ("answer_packets", self.answer_packets),
            ("faulted_unswitched_packets", self.faulted_unswitched_packets),
            ("faulted_packets", self.faulted_packets),
            ("faulted_switched_packets", self.faulted_switched_packets),
        ]
        .into_iter()
    }
}

impl Counters {
    /// A path was chosen for plain VXLAN.
    #[inline]
    pub(crate) fn on_plain_path(&mut self, moved: Option<Move>) {
        match moved {
            None => {}
            Some(Move::Left) => self.plain_moved_buckets += 1,
            Some(Move::Returned) => self.plain_returned_buckets += 1,
            Some(Move::Drawn) => self.plain_moved_flowlets += 1,
        }
    }

    /// All counters with their names, units last.
    pub fn iter(&self) -> impl Iterator<Item = (String, u64)> {
        let plain = [
            ("datapath.loops", self.loops),
            ("datapath.busy_loops", self.busy_loops),
            ("datapath.busy_ns", self.busy_ns),
            ("underlay.rx_packets", self.underlay_rx_packets),
            ("underlay.rx_bytes", self.underlay_rx_bytes),
            ("underlay.tx_packets", self.underlay_tx_packets),
            ("underlay.tx_bytes", self.underlay_tx_bytes),
            ("drop.unknown_peer_packets", self.unknown_peer_packets),
            ("drop.bad_vxlan_packets", self.bad_vxlan_packets),
            ("drop.bad_checksum_frames", self.bad_checksum_frames),
            ("datapath.bad_plain_checksum_frames", self.bad_plain_checksum_frames),
            ("datapath.bad_guest_checksum_frames", self.bad_guest_checksum_frames),
            ("drop.wrong_vnic_packets", self.wrong_vnic_packets),
            ("drop.marked_not_ect_packets", self.marked_not_ect_packets),
            ("datapath.control_rx_packets", self.control_rx_packets),
            ("datapath.not_accepted_packets", self.not_accepted_packets),
            ("datapath.discarded_packets", self.discarded_packets),
            ("datapath.answered_packets", self.answered_packets),
            ("datapath.guest_rx_packets", self.guest_rx_packets),
            ("datapath.emitted_packets", self.emitted_packets),
            ("datapath.bundled_packets", self.bundled_packets),
            ("datapath.unbundled_packets", self.unbundled_packets),
            ("datapath.plain_rx_packets", self.plain_rx_packets),
            ("datapath.plain_tx_packets", self.plain_tx_packets),
            ("datapath.followed_packets", self.followed_packets),
            ("datapath.kept_packets", self.kept_packets),
            ("datapath.kept_tx_packets", self.kept_tx_packets),
            ("datapath.plain_moved_buckets", self.plain_moved_buckets),
            ("datapath.plain_returned_buckets", self.plain_returned_buckets),
            ("datapath.plain_moved_flowlets", self.plain_moved_flowlets),
            ("datapath.local_packets", self.local_packets),
            ("datapath.fragmented_packets", self.fragmented_packets),
            ("datapath.fragment_packets", self.fragment_packets),
            ("datapath.rx_queued_packets", self.rx_queued_packets),
            ("datapath.rx_released_packets", self.rx_released_packets),
            ("drop.no_buffer_packets", self.no_buffer_packets),
            ("drop.reorder_full_packets", self.reorder_full_packets),
            ("drop.gone_packets", self.gone_packets),
            ("drop.gone_tx_packets", self.gone_tx_packets),
            ("drop.reused_buffer_packets", self.reused_buffer_packets),
            ("drop.too_large_packets", self.too_large_packets),
            ("datapath.handed_over_packets", self.handed_over_packets),
            ("datapath.taken_over_packets", self.taken_over_packets),
            ("drop.host_queue_full_packets", self.host_queue_full_packets),
            ("drop.hand_over_overflow_packets", self.hand_over_overflow_packets),
            ("drop.reset_overflow_packets", self.reset_overflow_packets),
            ("fault.dropped_packets", self.fault_dropped_packets),
            ("fault.delayed_packets", self.fault_delayed_packets),
            ("fault.duplicated_packets", self.fault_duplicated_packets),
            ("fault.corrupted_packets", self.fault_corrupted_packets),
            ("fault.overflow_packets", self.fault_overflow_packets),
            ("fault.guest_dropped_packets", self.fault_guest_dropped_packets),
            ("fault.tx_dropped_packets", self.fault_tx_dropped_packets),
            ("fault.tx_corrupted_packets", self.fault_tx_corrupted_packets),
            ("fault.rx_corrupted_packets", self.fault_rx_corrupted_packets),
            ("fault.tx_duplicated_packets", self.fault_tx_duplicated_packets),
            ("fault.rx_duplicated_packets", self.fault_rx_duplicated_packets),
            ("fault.tx_delayed_packets", self.fault_tx_delayed_packets),
            ("fault.rx_delayed_packets", self.fault_rx_delayed_packets),
            ("fault.queued_packets", self.fault_queued_packets),
            ("fault.tx_released_packets", self.fault_tx_released_packets),
            ("fault.rx_released_packets", self.fault_rx_released_packets),
            ("datapath.long_turns", self.long_turns),
            ("datapath.caught_panics", self.caught_panics),
            ("drop.faulted_packets", self.faulted_packets),
            ("drop.faulted_tx_packets", self.faulted_tx_packets),
            ("drop.notify_errors", self.notify_errors),
            ("drop.fetch_errors", self.fetch_errors),
        ];
        let refused =
            Refusal::ALL.iter().map(|r| (format!("refused.{}_packets", r.name()), self.refused_packets[r.index()]));
        let underlay = Malformed::ALL
            .iter()
            .map(|m| (format!("malformed.underlay_{}_frames", m.name()), self.malformed_underlay_frames[m.index()]));
        let guest = Malformed::ALL
            .iter()
            .map(|m| (format!("malformed.guest_{}_frames", m.name()), self.malformed_guest_frames[m.index()]));
        plain.into_iter().map(|(name, value)| (name.to_string(), value)).chain(refused.chain(underlay).chain(guest))
    }
}
