//! Devices: sockets of the underlay (`udp`, `afxdp`), TAP devices and vhost-user rings.

use super::Kind::Drop;
use super::reasons::{self, Reason};
use super::{Chapter, Family, count, drop, gauge};

const SLOW_GUEST: &str = "the guest does not take its packets fast enough";
const DRIVER: &str = "the guest's driver is broken, or hostile";

/// What can be wrong with a chain of descriptors.
const CHAIN: &[Reason] = &[
    Reason { name: "link", what: "a descriptor that names none, or a loop", advice: "" },
    Reason { name: "indirect", what: "an indirect table that is none", advice: "" },
    Reason {
        name: "direction",
        what: "buffers to be written where some to be read belong, or the other way",
        advice: "",
    },
    Reason { name: "address", what: "buffers outside of the guest's memory", advice: "" },
    Reason { name: "length", what: "too many bytes, or too few", advice: "" },
    Reason { name: "pieces", what: "more than 256 descriptors, or too many long chains at a time", advice: "" },
];

/// Why a ring is out of use.
const BROKEN: &[Reason] = &[
    Reason { name: "available", what: "more buffers than the ring has", advice: "" },
    Reason { name: "head", what: "a descriptor that the ring does not have", advice: "" },
    Reason { name: "twice", what: "a buffer that the driver had not got back", advice: "" },
    Reason { name: "memory", what: "the file of the guest's memory was cut", advice: "look at its front-end" },
    Reason { name: "bad_buffers", what: "buffers that cannot be used, again and again", advice: "" },
    Reason { name: "chain_length", what: "a chain of more than 256 descriptors in a packed ring", advice: "" },
    Reason { name: "records", what: "no record left of what is in flight", advice: "report this" },
];

pub(super) const CHAPTER: Chapter = Chapter {
    title: "Devices",
    entries: &[
        count("udp.rx_datagrams", "datagrams handed up", ""),
        count("udp.rx_bytes", "UDP payload bytes handed up", ""),
        count("udp.rx_messages", "messages received; a coalesced run of datagrams is one", ""),
        count("udp.rx_system_calls", "system calls that returned datagrams", ""),
        drop(
            "udp.rx_buffer_full_messages",
            "messages that the kernel dropped because a socket's buffer was full",
            "a worker does not get enough processor time: more workers, or CPUs of their own (`workers.cpus`)",
        ),
        drop(
            "udp.rx_truncated_messages",
            "messages larger than any that a peer sends",
            "something else uses these ports",
        ),
        drop("udp.rx_bad_source_messages", "messages whose source address could not be read", "report this"),
        count("udp.rx_failed_calls", "receive calls that failed: an ICMP error, or a kernel out of memory", ""),
        count("udp.tx_datagrams", "datagrams taken by the kernel", ""),
        count("udp.tx_bytes", "UDP payload bytes taken by the kernel", ""),
        count("udp.tx_messages", "messages taken by the kernel; a run of datagrams to be cut is one", ""),
        count("udp.tx_system_calls", "system calls made to send", ""),
        count(
            "udp.tx_gso_refused_messages",
            "messages that the kernel refused to segment; sent one by one instead",
            "",
        ),
        drop(
            "udp.tx_no_buffer_datagrams",
            "datagrams dropped: send buffer or device queue full",
            "the underlay's link is slower than the guests: repaired where carried reliably",
        ),
        drop(
            "udp.tx_too_big_datagrams",
            "datagrams dropped: larger than the link's MTU",
            "raise the MTU of the links between the hosts, or lower `underlay.mtu`",
        ),
        drop(
            "udp.tx_unreachable_datagrams",
            "datagrams dropped: no route, or the network says unreachable",
            "`ip route get` the peer's address; is the link up?",
        ),
        drop(
            "udp.tx_refused_datagrams",
            "datagrams dropped: nobody listens on the peer's port",
            "is its daemon running?",
        ),
        drop("udp.tx_other_error_datagrams", "datagrams dropped for any other error", "a firewall on this host?"),
        drop("udp.tx_unknown_lane_datagrams", "datagrams dropped: their lane was never made", "report this"),
        count("afxdp.rx_datagrams", "datagrams that came in frames, past the kernel", ""),
        count("afxdp.rx_bytes", "UDP payload bytes of these", ""),
        count(
            "afxdp.rx_parsed_datagrams",
            "of these: those that came without a note of the XDP program, and were parsed",
            "",
        ),
        count(
            "afxdp.rx_fallback_datagrams",
            "datagrams that the XDP program left to the kernel, and came through the UDP sockets",
            "fragments, IP options or extension headers; or a device with more than 64 queues",
        ),
        drop("afxdp.rx_malformed_frames", "frames that are not what the XDP program lets through", "report this"),
        drop("afxdp.rx_bad_checksum_frames", "frames with a wrong outer IPv4 or UDP checksum", "corruption on the way"),
        drop(
            "afxdp.rx_dropped_frames",
            "frames that the kernel dropped: no frame to receive into, or no room in a ring",
            "a worker does not get enough processor time: more workers, or CPUs of their own; or `underlay.xdp_frames`",
        ),
        count("afxdp.tx_datagrams", "datagrams that left in frames, past the kernel", ""),
        count("afxdp.tx_bytes", "UDP payload bytes of these", ""),
        count("afxdp.tx_system_calls", "system calls made to send frames", ""),
        count(
            "afxdp.tx_fallback_datagrams",
            "datagrams that left through the UDP sockets",
            "a neighbour whose MAC address is not known, a route through another device, or more than the MTU",
        ),
        drop(
            "afxdp.tx_no_frame_datagrams",
            "datagrams dropped: all frames are on their way",
            "the device does not keep up; or `underlay.xdp_frames`",
        ),
        count("tap.tx_packets", "packets fetched from the guest; one to be segmented counts once", ""),
        count("tap.tx_bytes", "bytes of these", ""),
        count("tap.tx_large_packets", "packets among them that took a 64 KiB buffer", ""),
        count("tap.tx_no_buffer_pauses", "fetches that stopped because all buffers hold packets in flight", ""),
        drop(
            "tap.tx_overrun_packets",
            "packets that the guest's kernel dropped because they were not fetched in time",
            "the guest sends faster than its worker fetches, or its limits let it",
        ),
        count("tap.rx_frames", "frames made visible to the guest", ""),
        gauge("tap.rx_held_frames", "frames placed for the guest that it has not been shown", ""),
        count("tap.rx_bytes", "bytes of these as they came in", ""),
        count("tap.rx_packets", "packets written to the guest: frames after merging", ""),
        count("tap.rx_no_buffer_frames", "times that no buffer was free for a frame", SLOW_GUEST),
        count(
            "tap.rx_too_large_frames",
            "times that a frame exceeded the guest's MTU",
            "compare the MTUs of both ports",
        ),
        count("tap.rx_discarded_frames", "frames placed and then thrown away by the data path", ""),
        count("tap.rx_deferred_packets", "packets that the kernel did not take at once; written later", ""),
        drop("tap.rx_device_down_frames", "frames dropped: the guest's interface is down or gone", "set it up"),
        drop("tap.rx_refused_frames", "frames dropped: the kernel refused them", "report this"),
        drop("tap.rx_other_error_frames", "frames dropped for any other error", "see the kernel's log"),
        count("vhost.connections", "front-ends that have connected", ""),
        count("vhost.messages", "messages that front-ends have sent", ""),
        count(
            "vhost.refused_messages",
            "messages that ended their connection, for they make no sense or ask for too much",
            "the log says what is wrong with them: the front-end is not made for this, broken, or hostile",
        ),
        gauge(
            "vhost.waiting_descriptors",
            "descriptors of front-ends, and notifications, that a port's helper has yet to deal with",
            "",
        ),
        count("vhost.tx_descriptors", "descriptors read of what the guest sends, refused ones included", ""),
        count("vhost.rx_descriptors", "descriptors read of the guest's receive buffers, refused ones included", ""),
        count("vhost.tx_packets", "packets fetched from the guest; one to be segmented counts once", ""),
        count("vhost.tx_bytes", "bytes of these", ""),
        drop(
            "vhost.tx_bad_buffer_packets",
            "packets without room for a virtio header, or whose memory went away",
            DRIVER,
        ),
        count(
            "vhost.tx_reused_buffer_packets",
            "packets whose buffer the guest had used before it got it back",
            DRIVER,
        ),
        count(
            "vhost.tx_moved_packets",
            "packets copied out of a ring whose buffers go back in order, so that others do not wait for their destination",
            "",
        ),
        count("vhost.tx_notifications", "notifications of completed transmissions", ""),
        count("vhost.rx_packets", "packets made visible to the guest", ""),
        count("vhost.rx_bytes", "bytes of these", ""),
        count("vhost.rx_merged_frames", "frames that were merged into larger ones of these", ""),
        count(
            "vhost.rx_deferred_frames",
            "frames that had to wait for the machine's buffers when they were to be shown",
            SLOW_GUEST,
        ),
        count("vhost.rx_buffers", "receive buffers that they took", ""),
        count("vhost.rx_notifications", "notifications of received packets", ""),
        count("vhost.rx_no_buffer_frames", "times that the guest had no empty buffer in its ring", SLOW_GUEST),
        count(
            "vhost.rx_too_large_frames",
            "times that a frame exceeded the guest's MTU or buffers",
            "compare the MTUs",
        ),
        count("vhost.rx_discarded_frames", "frames placed and then thrown away by the data path", ""),
        drop("vhost.rx_unplugged_frames", "frames for a machine that is not there", "start the machine"),
        count("vhost.broken_rings", "rings taken out of use because the driver broke their rules", DRIVER),
    ],
    families: &[
        Family {
            prefix: "tap.tx_malformed_",
            suffix: "_packets",
            kind: Drop,
            what: "packets whose virtio header does not fit the frame",
            advice: "a program in the guest's namespace writes what no kernel would",
            reasons: reasons::MALFORMED,
        },
        Family {
            prefix: "vhost.tx_malformed_",
            suffix: "_packets",
            kind: Drop,
            what: "packets whose virtio header does not fit the frame",
            advice: DRIVER,
            reasons: reasons::MALFORMED,
        },
        Family {
            prefix: "vhost.tx_bad_",
            suffix: "_packets",
            kind: Drop,
            what: "packets dropped because of their descriptors",
            advice: DRIVER,
            reasons: CHAIN,
        },
        Family {
            prefix: "vhost.rx_bad_",
            suffix: "_buffers",
            kind: super::Kind::Count,
            what: "receive buffers given back empty because of their descriptors",
            advice: DRIVER,
            reasons: CHAIN,
        },
        Family {
            prefix: "vhost.broken_",
            suffix: "_rings",
            kind: super::Kind::Count,
            what: "rings taken out of use, by reason",
            advice: DRIVER,
            reasons: BROKEN,
        },
    ],
};
