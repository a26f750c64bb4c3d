//! What the network of an [`RdmaWorld`](super::RdmaWorld) is like, and what it has counted.

/// Links and switches.
#[derive(Clone, Copy, Debug)]
pub struct Fabric {
    /// Of each host's link, bits a second.
    pub rate: f64,
    /// From host to host over one switch without queues, one way, ns.
    pub delay_ns: u64,
    /// Of the packets that enter their first switch, the share that is damaged and dropped.
    pub loss: f64,
    /// Buffer of each switch, shared by all its ports, bytes.
    pub buffer_bytes: u64,
    /// Priority flow control, if there is any.
    pub pause: Option<Pause>,
    /// Marks of congestion, if there are any.
    pub mark: Option<Mark>,
    /// What else goes wrong on the way.
    pub trouble: Trouble,
}

impl Fabric {
    /// A network of this rate and delay, with 16 MiB of buffer in each switch, that drops what does not fit.
    pub const fn new(rate: f64, delay_ns: u64) -> Self {
        let trouble = Trouble { duplicated: 0.0, held: 0.0, held_ns: 0, corrupted: 0.0, dead_paths: 0 };
        Fabric { rate, delay_ns, loss: 0.0, buffer_bytes: 16 << 20, pause: None, mark: None, trouble }
    }
}

/// Which switches there are.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Topology {
    /// One switch.
    #[default]
    Star,
    /// Two stages: each host is at a leaf, each leaf is connected with each spine. Flows are hashed onto spines (ECMP).
    LeafSpine {
        /// Hosts of each leaf, which are numbered leaf by leaf.
        leaves: Vec<u32>,
        /// How many spines.
        spines: u32,
        /// Of each link between a leaf and a spine, bits a second.
        rate: f64,
        /// Of such a link, one way, ns.
        delay_ns: u64,
    },
}

/// What goes wrong on the way, besides losses. Shares of the packets that enter their first switch are 0..=1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Trouble {
    /// Arrive twice.
    pub duplicated: f64,
    /// Are held up, so that others overtake them.
    pub held: f64,
    /// Those held up, and second copies, are late by up to that, ns.
    pub held_ns: u64,
    /// Have one bit flipped, which the NIC's checksum finds.
    pub corrupted: f64,
    /// Which of eight paths lose everything: bit i is path i. Addresses and UDP source port choose the path.
    pub dead_paths: u8,
}

/// Priority flow control (IEEE 802.1Qbb) of the class of data; urgent queue pairs are in another class. A switch pauses
/// the transmitter at the other end of a link, a host or a port of another switch, when more than `off_bytes` of what came
/// over this link are in its buffer, and lets it go on below `on_bytes`. A paused port holds up everything in its queue,
/// wherever it goes. A host pauses its switch when its NIC's receive buffer is half full, and lets it go on at a quarter.
#[derive(Clone, Copy, Debug)]
pub struct Pause {
    /// Above, bytes.
    pub off_bytes: u64,
    /// Below, bytes.
    pub on_bytes: u64,
    /// Between switches, too, and not only between hosts and their leaf.
    pub between_switches: bool,
}

/// Marks of congestion (ECN; RED in the queue of each port, as DCQCN asks for).
#[derive(Clone, Copy, Debug)]
pub struct Mark {
    /// Nothing is marked below, bytes.
    pub from_bytes: u64,
    /// Everything is marked above, bytes.
    pub to_bytes: u64,
    /// Share that is marked just below `to_bytes`.
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

/// What the fabric has counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Packets that entered their first switch.
    pub sent_packets: u64,
    /// Those that were damaged.
    pub damaged_packets: u64,
    /// Those that found no buffer in a switch.
    pub dropped_packets: u64,
    /// Those that found no buffer in the NIC that they were for.
    pub overrun_packets: u64,
    /// Those that were for no known host.
    pub stray_packets: u64,
    /// Those whose link or path was down.
    pub link_down_packets: u64,
    /// Those that had a bit flipped.
    pub corrupted_packets: u64,
    /// Second copies.
    pub duplicated_packets: u64,
    /// Those that were held up.
    pub held_packets: u64,
    /// Those that were marked.
    pub marked_packets: u64,
    /// Most bytes in the buffer of a switch.
    pub queue_bytes_max: u64,
    /// Times that a transmitter was paused.
    pub pauses: u64,
    /// Times that a host had something to do without end while no time passed.
    pub livelocks: u64,
}
