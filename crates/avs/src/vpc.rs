//! One network's indexes.

use std::net::{IpAddr, Ipv6Addr};

use bifrost_tables::{ExactMap, IpNet, Lpm, exact_map};
use bifrost_wire::{Mac, Vni};

use crate::description::{BuildError, GATEWAY_MAC, Ordering, PeerId, Port, PortId, Reliability, Route, Vpc};
use crate::policy::Acl;

/// Where a vNIC is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Local(PortId),
    Remote(PeerId),
}

/// Where a vNIC is, and how large a packet gets there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Site {
    pub(crate) place: Place,
    /// Bytes of the largest IP packet.
    pub(crate) mtu: u16,
}

/// A vNIC and where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Station {
    pub(crate) mac: Mac,
    pub(crate) site: Site,
}

#[derive(Debug)]
pub(crate) struct VpcIndex {
    pub(crate) vni: Vni,
    /// Its place among the networks.
    pub(crate) number: usize,
    pub(crate) reliability: Reliability,
    pub(crate) ordering: Ordering,
    pub(crate) acl: Option<Acl>,
    /// Whether more is asked than where packets go: there is an ACL, or one of its ports has security groups.
    pub(crate) has_rules: bool,
    gateways: Vec<IpAddr>,
    macs: ExactMap<Mac, Site>,
    /// Until [`finish`](Self::finish).
    prefixes: Vec<(IpNet, Next)>,
    addresses: Lpm<Next>,
}

/// Who has an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// A vNIC of the network.
    Station(Station),
    /// One of another network, by its [`number`](VpcIndex::number), if that network has a way back.
    Network(u32),
}

impl VpcIndex {
    pub(crate) fn new(vpc: &Vpc, number: usize) -> Result<Self, BuildError> {
        if let Some(&addr) = vpc.gateways.iter().find(|a| !is_host(**a)) {
            return Err(BuildError::Address(addr));
        }
        Ok(Self {
            vni: vpc.vni,
            number,
            reliability: vpc.reliability,
            ordering: vpc.ordering,
            acl: Acl::new(&vpc.acl),
            has_rules: !vpc.acl.is_empty(),
            gateways: vpc.gateways.clone(),
            // Keys come from the operator, who has no reason to attack the hash.
            macs: exact_map(0),
            prefixes: Vec::new(),
            addresses: Lpm::default(),
        })
    }

    pub(crate) fn add_port(&mut self, port: &Port) -> Result<(), BuildError> {
        let site = Site { place: Place::Local(port.id), mtu: port.mtu };
        self.add_mac(port.mac, site)?;
        self.has_rules |= !port.groups.is_empty();
        for &addr in &port.addresses {
            if !is_host(addr) {
                return Err(BuildError::Address(addr));
            }
            self.add_prefix(IpNet::from(addr), Next::Station(Station { mac: port.mac, site }))?;
        }
        Ok(())
    }

    pub(crate) fn add_route(&mut self, route: &Route) -> Result<(), BuildError> {
        let site = Site { place: Place::Remote(route.peer), mtu: route.mtu };
        self.add_mac(route.mac, site)?;
        self.add_prefix(route.prefix, Next::Station(Station { mac: route.mac, site }))
    }

    pub(crate) fn add_peering(&mut self, prefix: IpNet, network: usize) -> Result<(), BuildError> {
        self.add_prefix(prefix, Next::Network(network as u32))
    }

    /// One vNIC may have any number of prefixes, so the same again is no contradiction; what is sent to its MAC address must
    /// fit each of their paths.
    fn add_mac(&mut self, mac: Mac, site: Site) -> Result<(), BuildError> {
        if !mac.is_unicast() || mac == GATEWAY_MAC {
            return Err(BuildError::Mac(mac));
        }
        let known = self.macs.entry(mac).or_insert(site);
        if known.place != site.place {
            return Err(BuildError::DuplicateMac { vni: self.vni, mac });
        }
        known.mtu = known.mtu.min(site.mtu);
        Ok(())
    }

    fn add_prefix(&mut self, prefix: IpNet, next: Next) -> Result<(), BuildError> {
        let prefix = prefix.trunc();
        let gateway = prefix.prefix_len() == prefix.max_prefix_len() && self.gateways.contains(&prefix.addr());
        if gateway {
            return Err(BuildError::DuplicatePrefix { vni: self.vni, prefix });
        }
        self.prefixes.push((prefix, next));
        Ok(())
    }

    /// Makes what was added known.
    pub(crate) fn finish(&mut self) -> Result<(), BuildError> {
        let prefixes = std::mem::take(&mut self.prefixes);
        self.addresses = Lpm::new(prefixes).map_err(|prefix| BuildError::DuplicatePrefix { vni: self.vni, prefix })?;
        Ok(())
    }

    pub(crate) fn site(&self, mac: Mac) -> Option<Site> {
        self.macs.get(&mac).copied()
    }

    pub(crate) fn place(&self, mac: Mac) -> Option<Place> {
        self.site(mac).map(|site| site.place)
    }

    /// Who has an address, by the routes.
    #[inline(always)]
    pub(crate) fn next(&self, addr: IpAddr) -> Option<Next> {
        self.addresses.lookup(addr).copied()
    }

    /// Which vNIC of this network has an address, by the routes.
    #[inline(always)]
    pub(crate) fn route(&self, addr: IpAddr) -> Option<Station> {
        match self.next(addr)? {
            Next::Station(station) => Some(station),
            Next::Network(_) => None,
        }
    }

    /// The gateway's address of a family, the first one.
    pub(crate) fn gateway(&self, v6: bool) -> Option<IpAddr> {
        self.gateways.iter().copied().find(|addr| addr.is_ipv6() == v6)
    }

    pub(crate) fn has_gateway(&self) -> bool {
        !self.gateways.is_empty()
    }

    pub(crate) fn is_gateway(&self, addr: IpAddr) -> bool {
        self.gateways.contains(&addr) || (self.has_gateway() && addr == IpAddr::V6(link_local(GATEWAY_MAC)))
    }

    /// The MAC address to answer with when somebody asks for `addr`.
    pub(crate) fn neighbour(&self, addr: IpAddr) -> Option<Mac> {
        if self.is_gateway(addr) {
            return Some(GATEWAY_MAC);
        }
        self.station(addr).map(|s| s.mac)
    }

    /// Which vNIC of this network has an address: by the routes, or an IPv6 link-local one by the MAC address in it.
    pub(crate) fn station(&self, addr: IpAddr) -> Option<Station> {
        match self.owner(addr)? {
            Next::Station(station) => Some(station),
            Next::Network(_) => None,
        }
    }

    /// Who has an address, as [`next`](Self::next), or an IPv6 link-local one by the MAC address in it.
    pub(crate) fn owner(&self, addr: IpAddr) -> Option<Next> {
        match addr {
            IpAddr::V6(a) if a.is_unicast_link_local() => mac_of_link_local(a)
                .and_then(|mac| self.site(mac).map(|site| Next::Station(Station { mac, site })))
                .or_else(|| self.next(addr)),
            _ => self.next(addr),
        }
    }
}

/// Whether a vNIC can have the address.
pub(crate) fn is_host(addr: IpAddr) -> bool {
    let special = match addr {
        IpAddr::V4(a) => a.is_broadcast(),
        IpAddr::V6(_) => false,
    };
    !(special || addr.is_unspecified() || addr.is_multicast() || addr.is_loopback())
}

/// The link-local address that follows from a MAC address (RFC 4291, appendix A).
pub(crate) fn link_local(mac: Mac) -> Ipv6Addr {
    let [a, b, c, d, e, f] = mac.0;
    Ipv6Addr::from_octets([0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f])
}

fn mac_of_link_local(addr: Ipv6Addr) -> Option<Mac> {
    let [.., a, b, c, 0xff, 0xfe, d, e, f] = addr.octets() else { return None };
    let mac = Mac([a ^ 2, b, c, d, e, f]);
    (link_local(mac) == addr).then_some(mac)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_local_addresses_name_their_mac() {
        let mac = Mac([0x02, 0, 0, 0xab, 0xcd, 0xef]);
        let addr: Ipv6Addr = "fe80::ff:feab:cdef".parse().expect("an address");
        assert_eq!(link_local(mac), addr);
        assert_eq!(mac_of_link_local(addr), Some(mac));
        for other in ["fe80::1", "fe80:0:0:1::ff:feab:cdef", "2001:db8::ff:feab:cdef"] {
            assert_eq!(mac_of_link_local(other.parse().expect("an address")), None, "{other}");
        }
    }
}
