//! The network of an [`RdmaWorld`](super::RdmaWorld), and its counters.

/// Links and switches.
#[derive(Clone, Copy, Debug)]
pub struct Fabric {
    /// Rate of each host's link, bits per second.
    pub rate: f64,
    /// One-way delay from host to host over one switch without queues, ns.
    pub delay_ns: u64,
    /// Share of the packets that are damaged and dropped at their first switch.
    pub loss: f64,
    /// Buffer of each switch, shared by all its ports, bytes.
    pub buffer_bytes: u64,
    /// Priority flow control, if enabled.
    pub pause: Option<Pause>,
    /// Congestion marks, if enabled.
    pub mark: Option<Mark>,
    /// Other faults.
    pub trouble: Trouble,
}

impl Fabric {
    /// A network of this rate and delay, with 16 MiB of buffer in each switch. It drops packets that do not fit.
    pub const fn new(rate: f64, delay_ns: u64) -> Self {
        let trouble = Trouble { duplicated: 0.0, held: 0.0, held_ns: 0, corrupted: 0.0, dead_paths: 0 };
        Fabric { rate, delay_ns, loss: 0.0, buffer_bytes: 16 << 20, pause: None, mark: None, trouble }
    }
}

/// Topology of the switches.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Topology {
    /// One switch.
    #[default]
    Star,
    /// Two stages: each host is at a leaf, each leaf is connected to each spine. Flows are hashed onto spines (ECMP).
    LeafSpine {
        /// Hosts per leaf; hosts are numbered leaf by leaf.
        leaves: Vec<u32>,
        /// Number of spines.
        spines: u32,
        /// Rate of each link between a leaf and a spine, bits per second.
        rate: f64,
        /// One-way delay of such a link, ns.
        delay_ns: u64,
    },
}

/// Faults other than losses. Shares are 0..=1, of the packets at their first switch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Trouble {
    /// Share that arrives twice.
    pub duplicated: f64,
    /// Share that is delayed, so that others overtake it.
    pub held: f64,
    /// Maximum delay of those, and of second copies, ns.
    pub held_ns: u64,
    /// Share with one flipped bit, which the NIC's checksum detects.
    pub corrupted: f64,
    /// Paths that lose everything, out of eight: bit i is path i. Addresses and UDP source port select the path.
    pub dead_paths: u8,
}

/// Priority flow control (IEEE 802.1Qbb) of the data class; urgent queue pairs are in another class. A switch pauses
/// the transmitter at the other end of a link, a host or a port of another switch, when more than `off_bytes` of the
/// packets from this link are in its buffer, and resumes it below `on_bytes`. A paused port delays everything in its
/// queue, whatever its destination. A host pauses its switch when its NIC's receive buffer is half full, and resumes it
/// at a quarter.
#[derive(Clone, Copy, Debug)]
pub struct Pause {
    /// Pause above this, bytes.
    pub off_bytes: u64,
    /// Resume below this, bytes.
    pub on_bytes: u64,
    /// Pause links between switches, too, not only those between hosts and their leaf.
    pub between_switches: bool,
}

/// Congestion marks (ECN; RED in the queue of each port, as DCQCN requires).
#[derive(Clone, Copy, Debug)]
pub struct Mark {
    /// No marks below this queue length, bytes.
    pub from_bytes: u64,
    /// All packets are marked above this queue length, bytes.
    pub to_bytes: u64,
    /// Marked share just below `to_bytes`.
    pub share: f64,
}

impl Mark {
    /// The constants of DCQCN (SIGCOMM'15, section 5.2): 5 KB, 200 KB, 1 %.
    pub const DCQCN: Mark = Mark { from_bytes: 5_000, to_bytes: 200_000, share: 0.01 };

    /// The probability of an ECN mark at a given queue length, bytes; 0 to 1.
    pub(super) fn chance(&self, queue_bytes: u64) -> f64 {
        if queue_bytes >= self.to_bytes {
            return 1.0;
        }
        let above = queue_bytes.saturating_sub(self.from_bytes) as f64;
        above / (self.to_bytes - self.from_bytes.min(self.to_bytes)).max(1) as f64 * self.share
    }
}

/// Counters of the fabric.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Packets that entered their first switch.
    pub sent_packets: u64,
    /// Packets that were damaged.
    pub damaged_packets: u64,
    /// Packets dropped because a switch's buffer was full.
    pub dropped_packets: u64,
    /// Packets dropped because the receiving NIC's buffer was full.
    pub overrun_packets: u64,
    /// Packets to unknown hosts.
    pub stray_packets: u64,
    /// Packets whose link or path was down.
    pub link_down_packets: u64,
    /// Packets with a flipped bit.
    pub corrupted_packets: u64,
    /// Second copies.
    pub duplicated_packets: u64,
    /// Packets that were delayed.
    pub held_packets: u64,
    /// Packets that were marked.
    pub marked_packets: u64,
    /// Maximum buffer use of a switch, bytes.
    pub queue_bytes_max: u64,
    /// Number of pauses of transmitters.
    pub pauses: u64,
    /// Times that a host was endlessly busy while time did not advance.
    pub livelocks: u64,
}
