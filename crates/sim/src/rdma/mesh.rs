//! Hosts that send to many others, over one of several stacks.

use anyhow::{Result, bail, ensure};
use bifrost_rnic::{Nic, Qpn};

use super::{
    DcqcnConfig, Fabric, Load, Machine, MessageNode, MessageOptions, Node, RcMesh, RdmaWorld, Topology, connect, nic,
};

/// Network stack of a host.
#[derive(Clone, Copy, Debug)]
pub enum Stack {
    /// The message engine, over UC.
    Engine,
    /// RC of the NIC, with DCQCN or at line rate.
    Rc(Option<DcqcnConfig>),
}

/// Hosts and their traffic. Each host keeps `depth` messages of `len` bytes open to random peers.
#[derive(Clone, Debug)]
pub struct Mesh {
    /// The stack of each host.
    pub hosts: Vec<(Stack, Machine)>,
    /// Connections: from, to.
    pub pairs: Vec<(usize, usize)>,
    /// Length of a message, bytes.
    pub len: u32,
    /// Open messages per host.
    pub depth: u32,
    /// Maximum bytes in flight to a receiver (RDM §5.6); the library's default is 4 MiB.
    pub inbound: u64,
    /// Payload of a packet, bytes.
    pub mtu: u16,
}

impl Mesh {
    /// Connections from each host to each other one.
    pub fn full(hosts: Vec<(Stack, Machine)>, len: u32, depth: u32) -> Self {
        let n = hosts.len();
        let pairs = (0..n).flat_map(|a| (0..n).filter(move |b| *b != a).map(move |b| (a, b))).collect();
        Mesh { hosts, pairs, len, depth, inbound: 4 << 20, mtu: 1024 }
    }

    /// A world of these hosts.
    ///
    /// # Errors
    /// If hosts with different stacks are connected, or a NIC refuses a value.
    pub fn world(&self, fabric: Fabric, topology: &Topology, seed: u64) -> Result<RdmaWorld<MeshHost>> {
        let mut hosts = Vec::new();
        for (index, (stack, _)) in self.hosts.iter().enumerate() {
            let connections = self.pairs.iter().filter(|(a, b)| *a == index || *b == index).count() as u32;
            let nic = nic(index, seed, connections * 3 + 1);
            let own = crate::mix(seed ^ (index as u64) << 32);
            hosts.push(match stack {
                Stack::Engine => MeshHost::Engine(Box::new(MessageNode::new(nic, connections, self.inbound, own)?)),
                Stack::Rc(dcqcn) => MeshHost::Rc(Box::new(RcMesh::new(nic, self.len, self.depth, *dcqcn, own)?)),
            });
        }
        let options = MessageOptions { mtu: self.mtu, credits: 16, ..MessageOptions::default() };
        for &(a, b) in &self.pairs {
            match hosts.get_disjoint_mut([a, b])? {
                [MeshHost::Engine(a), MeshHost::Engine(b)] => connect(a, b, &options)?,
                [MeshHost::Rc(a), MeshHost::Rc(b)] => a.connect(b, self.mtu)?,
                _ => bail!("hosts {a} and {b} do not run the same stack"),
            }
        }
        let load = Load { len: self.len as usize, depth: self.depth, begin_ns: 0, stagger_ns: 0 };
        for host in &mut hosts {
            if let MeshHost::Engine(host) = host {
                host.send_to_any(load);
            }
        }
        let mut world = RdmaWorld::with_topology(fabric, topology, hosts, seed);
        for (index, (_, machine)) in self.hosts.iter().enumerate() {
            world.set_machine(index, *machine);
        }
        Ok(world)
    }
}

/// A host of a [`Mesh`].
#[derive(Debug)]
pub enum MeshHost {
    /// The message engine.
    Engine(Box<MessageNode>),
    /// RC.
    Rc(Box<RcMesh>),
}

impl MeshHost {
    /// Bytes of messages that this host has sent and knows to have arrived.
    pub fn sent_bytes(&self) -> u64 {
        match self {
            MeshHost::Engine(host) => host.sent_bytes(),
            MeshHost::Rc(host) => host.sent_bytes(),
        }
    }

    /// Number of failed connections.
    ///
    /// # Errors
    /// If a message is out of sequence.
    pub fn failed(&self) -> Result<u64> {
        match self {
            MeshHost::Engine(host) => {
                let (wrong, closed) = host.mistakes();
                ensure!(wrong == 0, "{wrong} messages are wrong");
                Ok(closed)
            }
            MeshHost::Rc(host) => Ok(host.failed()),
        }
    }
}

impl Node for MeshHost {
    fn nic(&mut self) -> &mut Nic {
        match self {
            MeshHost::Engine(host) => host.nic(),
            MeshHost::Rc(host) => host.nic(),
        }
    }

    fn turn(&mut self, now_ns: u64) -> bool {
        match self {
            MeshHost::Engine(host) => host.turn(now_ns),
            MeshHost::Rc(host) => host.turn(now_ns),
        }
    }

    fn next_deadline(&mut self, now_ns: u64) -> u64 {
        match self {
            MeshHost::Engine(host) => host.next_deadline(now_ns),
            MeshHost::Rc(host) => host.next_deadline(now_ns),
        }
    }

    fn on_mark(&mut self, now_ns: u64, queue_pair: Qpn) {
        if let MeshHost::Rc(host) = self {
            host.on_mark(now_ns, queue_pair);
        }
    }
}
