//! The loop of each worker (`datapath`), and ports as it sees them.

use super::Kind::Drop;
use super::{Chapter, Family, count, drop, gauge, reasons};

pub(super) const CHAPTER: Chapter = Chapter {
    title: "Pipeline",
    entries: &[
        count("port.tx_packets", "packets taken from the guest and found well-formed", ""),
        count("port.tx_bytes", "bytes of these, Ethernet headers included", ""),
        count("port.rx_packets", "packets placed for the guest", ""),
        count("port.rx_bytes", "bytes of these, Ethernet headers included", ""),
        gauge("port.held_packets", "packets of the guest that are kept until they are acknowledged", ""),
        count("port.held_back_times", "times that the guest's packets had to wait for its limits", ""),
        gauge(
            "port.failed_ports",
            "1: the guest's device is gone, such as with its namespace",
            "reload, or restore it",
        ),
        drop(
            "port.rate_limited_packets",
            "packets for the guest beyond its limits; what is carried reliably comes again",
            "raise `rx_mbit` or `rx_kpps` of the port if it should get more",
        ),
        count("datapath.loops", "turns of the worker's loop", ""),
        count("datapath.busy_loops", "turns that found something to do", ""),
        count("datapath.busy_ns", "time spent in these", "near a second each second: give the daemon more workers"),
        count("datapath.plain_rx_packets", "plain VXLAN frames accepted", ""),
        count("datapath.plain_tx_packets", "frames sent as plain VXLAN", ""),
        count("datapath.local_packets", "frames switched between two ports of this host", ""),
        count(
            "datapath.bad_guest_checksum_frames",
            "frames of guests whose finished transport checksum is wrong; they leave as plain VXLAN",
            "something in the guest damages or forges packets",
        ),
        count("datapath.handed_over_packets", "datagrams given to the worker that owns them", ""),
        count("underlay.rx_packets", "datagrams received from the underlay", ""),
        count("underlay.rx_bytes", "bytes of these, from the VXLAN header on", ""),
        count("underlay.tx_packets", "datagrams given to the underlay", ""),
        count("underlay.tx_bytes", "bytes of these, from the VXLAN header on", ""),
        drop(
            "drop.unknown_peer_packets",
            "datagrams from an address that no `[[peer]]` has, or BIFROST from a plain one",
            "is a peer, or one of its addresses, missing in the configuration?",
        ),
        drop("drop.bad_vxlan_packets", "datagrams without a whole VXLAN header", "something else uses these UDP ports"),
        drop(
            "drop.bad_checksum_frames",
            "frames in datagrams whose transport checksum is wrong: they come again; plain ones are shown all the same",
            "a link or NIC damages packets: `ethtool -S`",
        ),
        drop(
            "drop.wrong_vnic_packets",
            "data whose frame does not go from one of the connection's vNICs to the other",
            "a peer that is broken, or an attack",
        ),
        drop(
            "drop.no_buffer_packets",
            "plain or local frames for which the guest had no buffer",
            "the guest does not take its packets fast enough",
        ),
        drop(
            "drop.no_room_to_wait_packets",
            "packets that had to wait for earlier ones while the last buffers were kept for those; they come again",
            "the guest's receive ring is small for what comes while a lost packet is repaired",
        ),
        drop(
            "drop.gone_packets",
            "packets whose port or peer was removed while they were on their way",
            "nothing, if the configuration was changed",
        ),
        drop(
            "drop.reused_buffer_packets",
            "packets not sent again because the guest had used their buffer for something else",
            "the guest's driver takes buffers back that it was not given: its TCP repairs that",
        ),
        drop("drop.too_large_packets", "frames larger than the receiving port takes", "compare the MTUs of both ports"),
        drop(
            "drop.hand_over_overflow_packets",
            "datagrams dropped because too many wait for the worker that owns them",
            "one worker cannot keep up with what others receive for it: more workers, or other queues of the NIC",
        ),
        drop("drop.reset_overflow_packets", "RESETs dropped because too many wait for another worker", "an attack"),
        count("drop.notify_errors", "notifications of guests that failed", "see the daemon's log"),
        count("drop.fetch_errors", "fetches that failed: a guest's device is gone", "see the daemon's log"),
        drop("fault.dropped_packets", "packets that an injected fault dropped", "`bifrostctl fault list`"),
        count("fault.delayed_packets", "packets that an injected fault delayed", ""),
        count("fault.duplicated_packets", "packets that an injected fault duplicated", ""),
        drop("fault.corrupted_packets", "packets that an injected fault corrupted", "`bifrostctl fault list`"),
        drop("fault.overflow_packets", "delayed packets dropped because too many wait", "`bifrostctl fault list`"),
    ],
    families: &[
        Family {
            prefix: "malformed.guest_",
            suffix: "_frames",
            kind: Drop,
            what: "frames of guests that cannot be parsed or segmented",
            advice: "a guest sends garbage: `bifrostctl capture --at drop`",
            reasons: reasons::MALFORMED,
        },
        Family {
            prefix: "malformed.underlay_",
            suffix: "_frames",
            kind: Drop,
            what: "frames in datagrams that cannot be parsed",
            advice: "a peer that is broken, or an attack",
            reasons: reasons::MALFORMED,
        },
        Family {
            prefix: "refused.",
            suffix: "_packets",
            kind: Drop,
            what: "BIFROST packets that are not well-formed",
            advice: "a peer of another version, corruption, or an attack",
            reasons: reasons::REFUSAL,
        },
    ],
};
