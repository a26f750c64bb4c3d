//! The load balancers of one network.

use std::net::IpAddr;

use bifrost_nic::Parsed;
use bifrost_tables::{ExactMap, Maglev, exact_map, mix};

use crate::ids::LoadBalancerId;
use crate::rewrite::Endpoint;
use crate::tables::{Affinity, BuildError, LoadBalancer};

/// The load balancers of one network.
#[derive(Clone, Debug)]
pub(crate) struct Balancers {
    /// By protocol, address and port.
    all: ExactMap<(u8, IpAddr, u16), Balancer>,
    addresses: ExactMap<IpAddr, ()>,
}

/// One load balancer.
#[derive(Clone, Debug)]
pub(crate) struct Balancer {
    pub(crate) id: LoadBalancerId,
    maglev: Maglev,
    backends: Vec<Endpoint>,
    affinity: Affinity,
}

impl Default for Balancers {
    fn default() -> Self {
        Balancers { all: exact_map(0), addresses: exact_map(0) }
    }
}

impl Balancers {
    /// # Errors
    /// Another load balancer has the same protocol, address and port.
    pub(crate) fn add(&mut self, id: LoadBalancerId, balancer: &LoadBalancer) -> Result<(), BuildError> {
        let (address, port) = (balancer.address, balancer.port);
        let key = (balancer.protocol.number(), address, port);
        self.addresses.insert(address, ());
        match self.all.insert(key, Balancer::new(id, balancer)) {
            None => Ok(()),
            Some(_) => Err(BuildError::DuplicateLoadBalancer { vni: balancer.vni, address, port }),
        }
    }

    /// Whether an address belongs to a load balancer.
    #[inline(always)]
    pub(crate) fn has_address(&self, address: IpAddr) -> bool {
        self.addresses.contains_key(&address)
    }

    /// The addresses of all load balancers, without duplicates.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.addresses.keys().copied()
    }

    /// The load balancer that a TCP or UDP packet is sent to.
    pub(crate) fn of(&self, parsed: &Parsed) -> Option<&Balancer> {
        self.all.get(&(parsed.protocol, parsed.dst_ip, parsed.dst_port))
    }

    /// The load balancer at an address and port.
    pub(crate) fn at(&self, protocol: u8, end: Endpoint) -> Option<&Balancer> {
        self.all.get(&(protocol, end.address, end.port))
    }
}

impl Balancer {
    fn new(id: LoadBalancerId, balancer: &LoadBalancer) -> Self {
        let backends: Vec<Endpoint> =
            balancer.backends.iter().map(|b| Endpoint { address: b.address, port: b.port }).collect();
        let names = backends.iter().zip(&balancer.backends).map(|(endpoint, b)| (name(endpoint), b.weight));
        let maglev = Maglev::new(&names.collect::<Vec<_>>());
        Balancer { id, maglev, backends, affinity: balancer.affinity }
    }

    /// The backend for the connection that this packet begins; `None`: no backend takes new connections.
    pub(crate) fn choose(&self, parsed: &Parsed) -> Option<Endpoint> {
        let client = fold(parsed.src_ip);
        let hash = match self.affinity {
            Affinity::Connection => {
                let ports = u64::from(parsed.src_port) << 16 | u64::from(parsed.dst_port);
                mix(client ^ mix(ports << 8 | u64::from(parsed.protocol)))
            }
            Affinity::Client => mix(client),
        };
        self.maglev.pick(hash).map(|at| self.backends[at])
    }

    /// Whether this is one of its backends.
    pub(crate) fn has(&self, backend: &Endpoint) -> bool {
        self.backends.contains(backend)
    }
}

/// The backend's name for Maglev hashing: the same on all hosts.
fn name(endpoint: &Endpoint) -> u64 {
    mix(fold(endpoint.address) ^ u64::from(endpoint.port))
}

fn fold(address: IpAddr) -> u64 {
    match address {
        IpAddr::V4(a) => mix(u64::from(u32::from(a))),
        IpAddr::V6(a) => {
            let bits = u128::from(a);
            mix((bits >> 64) as u64 ^ mix(bits as u64))
        }
    }
}
