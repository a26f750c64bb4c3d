//! The gateway's configuration as lookup tables: built as a whole, shared by all cores, and immutable.

use std::net::IpAddr;

use bifrost_tables::{Classifier, Dir24, ExactMap, Lpm, Rate};
use bifrost_wire::Mac;

use crate::keepalive::{Keepalive, Watch};

/// A route of a VPC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// To a host of this VPC.
    Local,
    /// To a host of another VPC, by its VNI.
    Peer(u32),
    /// To the Internet.
    Internet,
    /// To a customer's network, by the tunnel's index in [`Tables::tunnels`].
    Idc(u32),
    /// Drop.
    Blackhole,
}

/// A tenant's network.
#[derive(Clone, Debug, Default)]
pub struct Vpc {
    /// Its routes.
    pub routes: Lpm<Route>,
    /// ACL of the Internet traffic, by the addresses that the VPC sees; the first match counts. Without an ACL all
    /// packets pass; with one, packets that match no rule are dropped.
    pub acl: Option<Classifier<bool>>,
    /// Rate of its Internet traffic, both directions together, in bytes per second (of the inner packets).
    pub meter: Option<Metered>,
    /// The number of its pool of SNAT addresses in the [`Nat`](crate::Nat).
    pub snat: Option<u32>,
    /// The gateway's addresses in the VPC: they answer ARP and neighbour discovery, and send ICMP errors.
    pub routers: Vec<IpAddr>,
}

/// The rate of a VPC, and the index of its meter in each core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metered {
    pub(crate) rate: Rate,
    /// From 0.
    pub(crate) index: u32,
}

impl Metered {
    /// The rate of all cores together.
    pub fn rate(&self) -> Rate {
        self.rate
    }
}

/// Location of a vNIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Host {
    /// Its host's VXLAN address.
    pub vtep: IpAddr,
    /// Its MAC address.
    pub mac: Mac,
}

/// A tunnel to a customer's network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tunnel {
    /// The VPC that it belongs to.
    pub vni: u32,
    /// The customer's router.
    pub remote: IpAddr,
    /// The protocol.
    pub kind: TunnelKind,
}

/// The protocol of a [`Tunnel`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TunnelKind {
    /// VXLAN (RFC 7348).
    Vxlan {
        /// The customer's VNI.
        vni: u32,
        /// The router's MAC address inside of it.
        mac: Mac,
    },
    /// GRE (RFC 2784) with a key (RFC 2890).
    Gre {
        /// The key, in both directions.
        key: u32,
    },
}

/// The backends of a service's address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backends {
    /// The network that the backends are in.
    pub vni: u32,
    /// The number of the pool of source addresses that backends see, in the [`Nat`](crate::Nat).
    pub pool: u32,
    /// Addresses and ports; a session stays with one backend.
    pub list: Vec<(IpAddr, u16)>,
}

/// A next hop of the Internet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NextHop {
    /// The router's address.
    pub address: IpAddr,
}

/// All tables.
#[derive(Clone, Debug)]
pub struct Tables {
    /// The gateway's own addresses for tunnels: at most one of each family.
    pub vteps: Vec<IpAddr>,
    /// The gateway's MAC address on its link.
    pub mac: Mac,
    /// The gateway's MAC address in VPCs, inside tunnels. Hosts accept packets from this address only, so all pods of
    /// a service have the same.
    pub vpc_mac: Mac,
    /// MTU of the network of hosts and routers, bytes of an outer IP packet.
    pub mtu: u16,
    /// Tenants' networks by VNI.
    pub vpcs: ExactMap<u32, Vpc>,
    /// Number of VPCs with a rate: the meters that [`new_meter`](Self::new_meter) has allocated.
    meters: u32,
    /// vNICs by VNI and address.
    pub hosts: ExactMap<(u32, IpAddr), Host>,
    /// Addresses of the hosts that may send VXLAN of the VPCs.
    pub senders: ExactMap<IpAddr, ()>,
    /// Public addresses of vNICs by VNI and private address.
    pub eips: ExactMap<(u32, IpAddr), IpAddr>,
    /// The reverse.
    pub eip_owners: ExactMap<IpAddr, (u32, IpAddr)>,
    /// Tunnels to customers.
    pub tunnels: Vec<Tunnel>,
    /// By tunnel: the state of its keepalives.
    watches: Vec<Option<Watch>>,
    /// Tunnels by the remote address, and the VNI, or the GRE key with bit 32 set.
    pub tunnels_in: ExactMap<(IpAddr, u64), u32>,
    /// Services by VNI, address, protocol and port.
    pub services: ExactMap<(u32, IpAddr, u8, u16), Backends>,
    /// Addresses of the pools for translation, by the network where they are seen ([`INTERNET`](crate::INTERNET) or a
    /// service's VNI).
    pub nat_addresses: ExactMap<(u32, IpAddr), ()>,
    /// IPv4 routes of the Internet: indices in `next_hops`.
    pub fib4: Option<Dir24>,
    /// IPv6 routes of the Internet.
    pub fib6: Lpm<u32>,
    /// Their next hops.
    pub next_hops: Vec<NextHop>,
    /// Prefixes of the gateway's own link, whose addresses are reached directly.
    pub on_link: Lpm<()>,
    /// The next hop of all other tunnels.
    pub router: Option<IpAddr>,
}

impl Tables {
    /// Creates tables with the gateway's addresses. The MAC address is the same outside and inside of tunnels. `seed`
    /// seeds the hash tables, because tenants choose a part of their keys.
    pub fn new(vteps: Vec<IpAddr>, mac: Mac, mtu: u16, seed: u64) -> Self {
        fn map<K, V>(seed: u64) -> ExactMap<K, V> {
            bifrost_tables::exact_map(seed)
        }
        Tables {
            vteps,
            mac,
            vpc_mac: mac,
            mtu,
            vpcs: map(seed),
            meters: 0,
            hosts: map(seed),
            senders: map(seed),
            eips: map(seed),
            eip_owners: map(seed),
            tunnels: Vec::new(),
            watches: Vec::new(),
            tunnels_in: map(seed),
            services: map(seed),
            nat_addresses: map(seed),
            fib4: None,
            fib6: Lpm::default(),
            next_hops: Vec::new(),
            on_link: Lpm::default(),
            router: None,
        }
    }

    /// Allocates a rate for one VPC, in bytes per second.
    pub fn new_meter(&mut self, rate: Rate) -> Metered {
        let index = self.meters;
        self.meters += 1;
        Metered { rate, index }
    }

    /// Number of meters that each core needs.
    pub(crate) fn meters(&self) -> usize {
        self.meters as usize
    }

    /// Adds a vNIC; its host may send from now on.
    pub fn add_host(&mut self, vni: u32, address: IpAddr, host: Host) {
        self.hosts.insert((vni, address), host);
        self.senders.insert(host.vtep, ());
    }

    /// Adds a tunnel and returns its index.
    pub fn add_tunnel(&mut self, tunnel: Tunnel) -> u32 {
        let index = self.tunnels.len() as u32;
        let key = match tunnel.kind {
            TunnelKind::Vxlan { vni, .. } => u64::from(vni),
            TunnelKind::Gre { key } => gre_key(key),
        };
        self.tunnels_in.insert((tunnel.remote, key), index);
        self.tunnels.push(tunnel);
        self.watches.push(None);
        index
    }

    /// Enables keepalives for a tunnel, by its index. Only GRE tunnels have them.
    pub fn set_keepalive(&mut self, index: u32, keepalive: Keepalive) {
        if let Some(watch) = self.watches.get_mut(index as usize) {
            *watch = Some(Watch::new(keepalive));
        }
    }

    /// The state of a tunnel's keepalives; `None` if it has none.
    #[inline]
    pub(crate) fn watch(&self, index: u32) -> Option<&Watch> {
        self.watches.get(index as usize)?.as_ref()
    }

    /// Adds a public address.
    pub fn add_eip(&mut self, vni: u32, private: IpAddr, public: IpAddr) {
        self.eips.insert((vni, private), public);
        self.eip_owners.insert(public, (vni, private));
    }

    /// The gateway's address of a family.
    pub(crate) fn vtep_like(&self, address: IpAddr) -> Option<IpAddr> {
        self.vteps.iter().copied().find(|own| own.is_ipv4() == address.is_ipv4())
    }

    /// The next hop of a packet to an outer address.
    pub(crate) fn next_hop(&self, address: IpAddr) -> Option<IpAddr> {
        self.on_link.lookup(address).map(|()| address).or(self.router)
    }

    /// Prefetches the Internet route of an IPv4 address. Returns false if there is no table for it.
    pub(crate) fn fetch_internet(&self, address: IpAddr) -> bool {
        let (IpAddr::V4(address), Some(fib)) = (address, &self.fib4) else { return false };
        fib.fetch_ahead(address);
        true
    }

    /// The next hop of a packet to the Internet.
    pub(crate) fn internet(&self, address: IpAddr) -> Option<IpAddr> {
        let hop = match address {
            IpAddr::V4(address) => self.fib4.as_ref()?.lookup(address)?,
            IpAddr::V6(_) => *self.fib6.lookup(address)?,
        };
        self.next_hops.get(hop as usize).map(|hop| hop.address)
    }
}

/// A GRE key in the number space of VNIs.
pub(crate) fn gre_key(key: u32) -> u64 {
    1 << 32 | u64::from(key)
}
