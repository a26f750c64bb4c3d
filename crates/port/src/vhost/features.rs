//! The features offered to a guest (virtio 1.3, sections 5.1.3 and 6; vhost-user, "Protocol features").

use super::VhostConfig;

const NET_CSUM: u32 = 0;
const NET_GUEST_CSUM: u32 = 1;
const NET_MTU: u32 = 3;
const NET_MAC: u32 = 5;
const NET_GUEST_TSO4: u32 = 7;
const NET_GUEST_TSO6: u32 = 8;
const NET_HOST_TSO4: u32 = 11;
const NET_HOST_TSO6: u32 = 12;
const NET_HOST_ECN: u32 = 13;
const NET_MRG_RXBUF: u32 = 15;
const NET_STATUS: u32 = 16;
const NET_MQ: u32 = 22;
/// Not a feature of drivers: the front-end sets it to have written pages logged.
const LOG_ALL: u32 = 26;
const RING_INDIRECT_DESC: u32 = 28;
const RING_EVENT_IDX: u32 = 29;
const PROTOCOL_FEATURES: u32 = 30;
const VERSION_1: u32 = 32;
const RING_PACKED: u32 = 34;
const NET_HOST_USO: u32 = 56;

/// Features offered to the guest's driver, for any configuration. There is no control queue: a front-end with one
/// serves it itself.
const ALWAYS: Features = Features(
    1 << NET_CSUM
        | 1 << NET_GUEST_CSUM
        | 1 << NET_MTU
        | 1 << NET_MAC
        | 1 << NET_HOST_TSO4
        | 1 << NET_HOST_TSO6
        | 1 << NET_HOST_ECN
        | 1 << NET_MRG_RXBUF
        | 1 << NET_STATUS
        | 1 << LOG_ALL
        | 1 << RING_INDIRECT_DESC
        | 1 << RING_EVENT_IDX
        | 1 << PROTOCOL_FEATURES
        | 1 << VERSION_1
        | 1 << NET_HOST_USO,
);

/// A set of virtio features.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Features(pub(super) u64);

impl Features {
    /// The features offered to the guest's driver.
    pub(super) fn offered(config: &VhostConfig) -> Features {
        let merged = u64::from(config.merged) * (1 << NET_GUEST_TSO4 | 1 << NET_GUEST_TSO6);
        Features(ALWAYS.0 | merged | u64::from(config.packed) << RING_PACKED | u64::from(config.queues > 1) << NET_MQ)
    }

    pub(super) fn packed(self) -> bool {
        self.has(RING_PACKED)
    }

    pub(super) fn version_1(self) -> bool {
        self.has(VERSION_1)
    }

    pub(super) fn event_idx(self) -> bool {
        self.has(RING_EVENT_IDX)
    }

    pub(super) fn mergeable(self) -> bool {
        self.has(NET_MRG_RXBUF)
    }

    pub(super) fn guest_checksum(self) -> bool {
        self.has(NET_GUEST_CSUM)
    }

    /// Whether the guest accepts merged TCP segments, for both IPv4 and IPv6.
    pub(super) fn merged(self) -> bool {
        self.has(NET_GUEST_TSO4) && self.has(NET_GUEST_TSO6)
    }

    /// Whether writes to the guest's memory are logged.
    pub(super) fn logs(self) -> bool {
        self.has(LOG_ALL)
    }

    /// The same without logging.
    pub(super) fn without_logging(self) -> Features {
        Features(self.0 & !(1 << LOG_ALL))
    }

    /// Whether rings are enabled by message, not by their kick descriptor.
    pub(super) fn protocol(self) -> bool {
        self.has(PROTOCOL_FEATURES)
    }

    fn has(self, bit: u32) -> bool {
        self.0 >> bit & 1 != 0
    }
}

const MQ: u64 = 1;
/// Protocol feature: the log of written pages is in shared memory, and setting it is acknowledged.
pub(super) const LOG_SHMFD: u64 = 1 << 1;
/// Protocol feature: the front-end announces a migrated guest, so that its network can be updated.
const RARP: u64 = 1 << 2;
/// Protocol feature: the front-end may request an acknowledgment of each message.
pub(super) const REPLY_ACK: u64 = 1 << 3;
const BACKEND_REQ: u64 = 1 << 5;
const CONFIG: u64 = 1 << 9;
const INFLIGHT_SHMFD: u64 = 1 << 12;
const RESET_DEVICE: u64 = 1 << 13;
const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;

/// The protocol features offered to the front-end.
pub(super) const PROTOCOL: u64 =
    MQ | LOG_SHMFD | RARP | REPLY_ACK | BACKEND_REQ | CONFIG | INFLIGHT_SHMFD | RESET_DEVICE | CONFIGURE_MEM_SLOTS;

/// `struct virtio_net_config`: MAC address, status, queue pairs, MTU; then zeros.
pub(super) fn config_space(config: &VhostConfig) -> [u8; 256] {
    const LINK_UP: u16 = 1;
    let mut space = [0; 256];
    space[..6].copy_from_slice(&config.mac);
    space[6..8].copy_from_slice(&LINK_UP.to_le_bytes());
    space[8..10].copy_from_slice(&config.queues.to_le_bytes());
    space[10..12].copy_from_slice(&config.mtu.to_le_bytes());
    space
}
