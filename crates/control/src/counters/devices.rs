//! Devices: underlay sockets (`udp`, `afxdp`), TAP devices and vhost-user rings.

use super::Kind::Drop;
use super::reasons::{self, Reason};
use super::{Chapter, Family, count, drop, gauge};

const SLOW_GUEST: &str = "the guest does not receive its packets fast enough";
const DRIVER: &str = "the guest's driver is broken, or hostile";

/// Errors of a descriptor chain.
const CHAIN: &[Reason] = &[
    Reason { name: "link", what: "an invalid next descriptor, or a loop", advice: "" },
    Reason { name: "indirect", what: "an invalid indirect table", advice: "" },
    Reason { name: "direction", what: "writable buffers where readable ones belong, or the reverse", advice: "" },
    Reason { name: "address", what: "buffers outside the guest's memory", advice: "" },
    Reason { name: "length", what: "too many bytes, or too few", advice: "" },
    Reason { name: "pieces", what: "more than 256 descriptors, or too many long chains at once", advice: "" },
];

/// Why a ring is out of use.
const BROKEN: &[Reason] = &[
    Reason { name: "available", what: "more available buffers than the ring has", advice: "" },
    Reason { name: "head", what: "a descriptor that the ring does not have", advice: "" },
    Reason { name: "twice", what: "a buffer that was made available twice", advice: "" },
    Reason { name: "memory", what: "the file of the guest's memory was truncated", advice: "look at its front-end" },
    Reason { name: "bad_buffers", what: "repeatedly unusable buffers", advice: "" },
    Reason { name: "chain_length", what: "a chain of more than 256 descriptors in a packed ring", advice: "" },
    Reason { name: "records", what: "no free in-flight record", advice: "report this" },
];

pub(super) const CHAPTER: Chapter = Chapter {
    title: "Devices",
    entries: &[
        count("udp.rx_datagrams", "datagrams delivered to the worker", ""),
        count("udp.rx_bytes", "UDP payload bytes delivered to the worker", ""),
        count("udp.rx_messages", "messages received; a coalesced run of datagrams counts once", ""),
        count("udp.rx_system_calls", "system calls that returned datagrams", ""),
        drop(
            "udp.rx_buffer_full_messages",
            "messages that the kernel dropped because a socket's buffer was full",
            "a worker does not get enough processor time: more workers, or dedicated CPUs (`workers.cpus`)",
        ),
        drop("udp.rx_truncated_messages", "messages larger than a peer sends", "something else uses these ports"),
        drop("udp.rx_bad_source_messages", "messages whose source address could not be read", "report this"),
        count("udp.rx_failed_calls", "receive calls that failed: an ICMP error, or a kernel out of memory", ""),
        count("udp.tx_datagrams", "datagrams accepted by the kernel", ""),
        count("udp.tx_bytes", "UDP payload bytes accepted by the kernel", ""),
        count("udp.tx_messages", "messages accepted by the kernel; a run of datagrams to be segmented counts once", ""),
        count("udp.tx_system_calls", "system calls made to send", ""),
        count(
            "udp.tx_gso_refused_messages",
            "messages that the kernel refused to segment; sent one by one instead",
            "",
        ),
        drop(
            "udp.tx_no_buffer_datagrams",
            "datagrams dropped: send buffer or device queue full",
            "the underlay's link is slower than the guests; reliable packets are retransmitted",
        ),
        drop(
            "udp.tx_too_big_datagrams",
            "datagrams dropped: larger than the link's MTU",
            "raise the MTU of the links between the hosts, or lower `underlay.mtu`",
        ),
        drop(
            "udp.tx_unreachable_datagrams",
            "datagrams dropped: no route, or ICMP unreachable",
            "`ip route get` the peer's address; is the link up?",
        ),
        drop("udp.tx_refused_datagrams", "datagrams dropped: no listener on the peer's port", "is its daemon running?"),
        drop("udp.tx_other_error_datagrams", "datagrams dropped for any other error", "a firewall on this host?"),
        drop("udp.tx_unknown_lane_datagrams", "datagrams dropped: unknown path", "report this"),
        count("afxdp.rx_datagrams", "datagrams received through AF_XDP", ""),
        count("afxdp.rx_bytes", "UDP payload bytes of these", ""),
        count("afxdp.rx_parsed_datagrams", "of these: without metadata of the XDP program, parsed by the worker", ""),
        count(
            "afxdp.rx_fallback_datagrams",
            "datagrams that the XDP program passed to the kernel, received through the UDP sockets",
            "fragments, IP options or extension headers; a device with more than 64 queues; or an upgrade",
        ),
        drop("afxdp.rx_malformed_frames", "frames that the XDP program should not have redirected", "report this"),
        drop(
            "afxdp.rx_bad_checksum_frames",
            "frames with a wrong outer IPv4 or UDP checksum",
            "corruption on the path",
        ),
        drop(
            "afxdp.rx_dropped_frames",
            "frames that the kernel dropped: no free frame, or a full ring",
            "a worker does not get enough processor time: more workers, or dedicated CPUs; or raise `underlay.xdp_frames`",
        ),
        count("afxdp.tx_datagrams", "datagrams sent through AF_XDP", ""),
        count("afxdp.tx_bytes", "UDP payload bytes of these", ""),
        count("afxdp.tx_system_calls", "system calls made to send frames", ""),
        count(
            "afxdp.tx_fallback_datagrams",
            "datagrams sent through the UDP sockets instead",
            "an unresolved neighbour, a route through another device, a datagram above the MTU, or an upgrade",
        ),
        drop(
            "afxdp.tx_no_frame_datagrams",
            "datagrams dropped: all frames are in use",
            "the device does not keep up; or raise `underlay.xdp_frames`",
        ),
        count("tap.tx_packets", "packets fetched from the guest; one that is segmented counts once", ""),
        count("tap.tx_bytes", "bytes of these", ""),
        count("tap.tx_large_packets", "of these: in a 64 KiB buffer", ""),
        count("tap.tx_no_buffer_pauses", "fetches that stopped because all buffers held packets in flight", ""),
        drop(
            "tap.tx_overrun_packets",
            "packets that the guest's kernel dropped because they were not fetched in time",
            "the guest sends faster than its worker fetches, or than its rate limit",
        ),
        count("tap.rx_frames", "frames published to the guest", ""),
        gauge("tap.rx_held_frames", "frames placed for the guest and not yet published", ""),
        count("tap.rx_bytes", "bytes of these as received", ""),
        count("tap.rx_packets", "packets written to the guest: frames after merging", ""),
        count("tap.rx_no_buffer_frames", "times that no buffer was free for a frame", SLOW_GUEST),
        count(
            "tap.rx_too_large_frames",
            "times that a frame exceeded the guest's MTU",
            "compare the MTUs of both ports",
        ),
        count("tap.rx_discarded_frames", "frames placed and then discarded by the data path", ""),
        count("tap.rx_deferred_packets", "packets that the kernel did not accept at once; written later", ""),
        drop(
            "tap.rx_device_down_frames",
            "frames dropped: the guest's interface is down or gone",
            "bring it up in the guest",
        ),
        drop("tap.rx_refused_frames", "frames dropped: the kernel refused them", "report this"),
        drop("tap.rx_other_error_frames", "frames dropped for any other error", "see the kernel's log"),
        count("vhost.connections", "front-ends that have connected", ""),
        count("vhost.messages", "messages that front-ends have sent", ""),
        count(
            "vhost.refused_messages",
            "invalid messages, or ones above a limit; they end their connection",
            "the log says what is wrong: the front-end is incompatible, broken or hostile",
        ),
        gauge(
            "vhost.waiting_descriptors",
            "descriptors of front-ends, and notifications, queued for a port's helper thread",
            "",
        ),
        count("vhost.tx_descriptors", "transmit descriptors read, including refused ones", ""),
        count("vhost.rx_descriptors", "receive descriptors read, including refused ones", ""),
        count("vhost.tx_packets", "packets fetched from the guest; one that is segmented counts once", ""),
        count("vhost.tx_bytes", "bytes of these", ""),
        drop(
            "vhost.tx_bad_buffer_packets",
            "packets without space for a virtio header, or whose memory was removed",
            DRIVER,
        ),
        count("vhost.tx_reused_buffer_packets", "packets whose buffer the guest reused while in flight", DRIVER),
        count(
            "vhost.tx_moved_packets",
            "packets copied out of a ring that returns buffers in order, so that later ones need not wait",
            "",
        ),
        count("vhost.tx_notifications", "notifications of completed transmissions", ""),
        count("vhost.rx_packets", "packets published to the guest", ""),
        count("vhost.rx_bytes", "bytes of these", ""),
        count("vhost.rx_merged_frames", "frames that were merged into larger ones", ""),
        count("vhost.rx_deferred_frames", "frames that waited for buffers of the machine at publication", SLOW_GUEST),
        count("vhost.rx_buffers", "receive buffers used", ""),
        count("vhost.rx_notifications", "notifications of received packets", ""),
        count("vhost.rx_no_buffer_frames", "times that the guest had no free buffer in its ring", SLOW_GUEST),
        count(
            "vhost.rx_too_large_frames",
            "times that a frame exceeded the guest's MTU or buffers",
            "compare the MTUs",
        ),
        count("vhost.rx_discarded_frames", "frames placed and then discarded by the data path", ""),
        drop("vhost.rx_unplugged_frames", "frames for a machine that is not connected", "start the machine"),
        count(
            "vhost.broken_rings",
            "rings taken out of use because the driver violated the virtio specification",
            DRIVER,
        ),
    ],
    families: &[
        Family {
            prefix: "tap.tx_malformed_",
            suffix: "_packets",
            kind: Drop,
            what: "packets whose virtio header does not match the frame",
            advice: "a program in the guest's namespace writes invalid headers to the TAP device",
            reasons: reasons::MALFORMED,
        },
        Family {
            prefix: "vhost.tx_malformed_",
            suffix: "_packets",
            kind: Drop,
            what: "packets whose virtio header does not match the frame",
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
            what: "receive buffers returned empty because of their descriptors",
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
