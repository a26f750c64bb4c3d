//! Links, queues of switch ports, and routing.

use std::collections::VecDeque;

use super::fabric::Topology;

/// The end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Host(u32),
    Switch(u32),
}

/// A transmitter and its wire: of a host's NIC, or of a switch port.
#[derive(Debug)]
pub(super) struct Link {
    /// The switch that the port belongs to.
    pub(super) from: Option<u32>,
    pub(super) to: End,
    /// Bits per second and ns, if they differ from those of hosts' links.
    own: Option<(f64, u64)>,
    /// Whether the other end has paused the data class: since when, and the total before, ns.
    pub(super) paused: bool,
    paused_since: u64,
    paused_ns: u64,
    /// Data bytes from this link in the buffer at its end, and whether it was paused.
    pub(super) inside_bytes: u64,
    pub(super) told: bool,
    /// For a switch: waiting packets, control datagrams first, and the one being sent.
    pub(super) urgent: VecDeque<u32>,
    pub(super) waiting: VecDeque<u32>,
    pub(super) queue_bytes: u64,
    pub(super) queue_bytes_max: u64,
    pub(super) sending: Option<u32>,
}

impl Link {
    fn new(from: Option<u32>, to: End, own: Option<(f64, u64)>) -> Self {
        Link {
            from,
            to,
            own,
            paused: false,
            paused_since: 0,
            paused_ns: 0,
            inside_bytes: 0,
            told: false,
            urgent: VecDeque::new(),
            waiting: VecDeque::new(),
            queue_bytes: 0,
            queue_bytes_max: 0,
            sending: None,
        }
    }

    pub(super) fn rate(&self, hosts: f64) -> f64 {
        self.own.map_or(hosts, |own| own.0)
    }

    pub(super) fn delay_ns(&self, hosts: u64) -> u64 {
        self.own.map_or(hosts, |own| own.1)
    }

    /// Whether the link is between two switches.
    pub(super) fn is_between_switches(&self) -> bool {
        self.own.is_some()
    }

    pub(super) fn pause(&mut self, now: u64, paused: bool) {
        self.paused_ns = self.paused_ns(now);
        (self.paused, self.paused_since) = (paused, now);
    }

    /// How long data was paused, ns.
    pub(super) fn paused_ns(&self, now: u64) -> u64 {
        self.paused_ns + if self.paused { now - self.paused_since } else { 0 }
    }

    /// The next packet to send.
    pub(super) fn next(&mut self) -> Option<u32> {
        self.urgent.pop_front().or_else(|| if self.paused { None } else { self.waiting.pop_front() })
    }
}

/// All links: those of hosts' NICs first, then the ports towards hosts, then those between switches.
#[derive(Debug)]
pub(super) struct Hops {
    pub(super) links: Vec<Link>,
    /// Buffer use of each switch, bytes.
    pub(super) buffered_bytes: Vec<u64>,
    hosts: u32,
    /// The same per host.
    leaf: Vec<u32>,
    leaves: u32,
    spines: u32,
}

impl Hops {
    /// A fabric for this number of hosts. Hosts beyond the capacity of the leaves are attached to the last leaf.
    pub(super) fn new(hosts: usize, topology: &Topology) -> Self {
        let (sizes, spines, own): (&[u32], u32, _) = match topology {
            Topology::Star => (&[], 0, None),
            Topology::LeafSpine { leaves, spines, rate, delay_ns } => {
                (leaves, (*spines).max(1), Some((*rate, *delay_ns)))
            }
        };
        let leaves = sizes.len().max(1) as u32;
        let spines = if leaves > 1 { spines } else { 0 };
        let sized = sizes.iter().zip(0..).flat_map(|(size, leaf)| std::iter::repeat_n(leaf, *size as usize));
        let leaf: Vec<u32> = sized.chain(std::iter::repeat(leaves - 1)).take(hosts).collect();
        let mut links: Vec<Link> = leaf.iter().map(|leaf| Link::new(None, End::Switch(*leaf), None)).collect();
        links.extend(leaf.iter().zip(0..).map(|(leaf, host)| Link::new(Some(*leaf), End::Host(host), None)));
        for leaf in 0..leaves {
            links.extend((0..spines).map(|spine| Link::new(Some(leaf), End::Switch(leaves + spine), own)));
        }
        for spine in 0..spines {
            links.extend((0..leaves).map(|leaf| Link::new(Some(leaves + spine), End::Switch(leaf), own)));
        }
        let buffered_bytes = vec![0; (leaves + spines) as usize];
        Hops { links, buffered_bytes, hosts: hosts as u32, leaf, leaves, spines }
    }

    /// The port towards a host.
    pub(super) fn port_to(&self, host: u32) -> u32 {
        self.hosts + host
    }

    /// The port by which a switch sends a packet to a host; `hash` is the flow's.
    pub(super) fn port(&self, switch: u32, host: u32, hash: u64) -> u32 {
        let leaf = self.leaf[host as usize];
        let between = 2 * self.hosts;
        if switch == leaf {
            self.port_to(host)
        } else if switch < self.leaves {
            between + switch * self.spines + (hash % u64::from(self.spines)) as u32
        } else {
            between + self.leaves * self.spines + (switch - self.leaves) * self.leaves + leaf
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_packet_gets_to_its_host() {
        let topology = Topology::LeafSpine { leaves: vec![2, 3, 1], spines: 2, rate: 1e9, delay_ns: 1 };
        for (topology, longest) in [(Topology::Star, 1), (topology, 3)] {
            let hops = Hops::new(6, &topology);
            for (from, to, hash) in (0..6u32).flat_map(|a| (0..6u32).flat_map(move |b| (0..4).map(move |h| (a, b, h))))
            {
                let mut at = hops.links[from as usize].to;
                let mut count = 0;
                while let End::Switch(switch) = at {
                    let link = &hops.links[hops.port(switch, to, hash) as usize];
                    assert_eq!(link.from, Some(switch));
                    (at, count) = (link.to, count + 1);
                    assert!(count <= longest, "{from} to {to}");
                }
                assert_eq!(at, End::Host(to));
                let near = hops.leaf[from as usize] == hops.leaf[to as usize];
                assert_eq!(count, if near { 1 } else { 3 });
            }
        }
    }
}
