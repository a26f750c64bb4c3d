//! Why the switch drops a frame.

use std::fmt;

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// Why the switch drops a frame. Every reason is a counter.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum DropReason { $($(#[$doc])* $name,)* }

        impl DropReason {
            /// Every reason, in the order of [`Self::index`].
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// Short name.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }

            /// Name of the reason's counter of packets that a port is not given, with its unit.
            pub const fn ingress_dropped_counter(self) -> &'static str {
                match self { $(Self::$name => concat!("ingress_dropped_", $text, "_packets"),)* }
            }

            /// Name of the reason's counter, with its unit.
            pub const fn counter(self) -> &'static str {
                match self { $(Self::$name => concat!("dropped_", $text, "_packets"),)* }
            }
        }
    };
}

reasons! {
    /// From a port that does not exist.
    UnknownPort = "unknown_port",
    /// With a VLAN tag.
    Vlan = "vlan",
    /// Neither IP nor ARP.
    EtherType = "ethertype",
    /// Source MAC address of somebody else.
    SpoofedMac = "spoofed_mac",
    /// Source IP address of somebody else.
    SpoofedIp = "spoofed_ip",
    /// ARP that claims an address of another port.
    SpoofedArp = "spoofed_arp",
    /// Neighbour discovery that speaks for somebody else, or as a router.
    SpoofedNeighbour = "spoofed_neighbour",
    /// ARP or neighbour discovery that is truncated, damaged or invalid.
    MalformedNeighbour = "malformed_neighbour",
    /// ARP or neighbour discovery about the sender's own address that nobody asked for: announcements, probes, and answers to guests
    /// whom the switch has answered.
    OwnAddress = "own_address",
    /// ARP or neighbour discovery for an unknown address.
    UnknownNeighbour = "unknown_neighbour",
    /// Broadcast that is not ARP.
    Broadcast = "broadcast",
    /// Multicast that is not neighbour discovery.
    Multicast = "multicast",
    /// To a MAC address that nobody has.
    UnknownMac = "unknown_mac",
    /// Back to where it came from.
    Loop = "loop",
    /// Through the gateway, to an address that nobody has.
    NoRoute = "no_route",
    /// Through the gateway, from or to an address that must not be routed.
    NotRoutable = "not_routable",
    /// Through the gateway, with its time to live used up.
    TtlExpired = "ttl_expired",
    /// To the gateway's own address, but not a ping, or one that cannot be answered.
    GatewayService = "gateway_service",
    /// To a DHCP server, but not a client's message, or cut short.
    DhcpMalformed = "dhcp_malformed",
    /// To a DHCP server, for another MAC address than the guest's.
    DhcpSpoofed = "dhcp_spoofed",
    /// To a DHCP server, and needs no answer: an address is released or declined, or another server is asked.
    DhcpUnanswered = "dhcp_unanswered",
    /// To a DHCP server, more often than a guest may ask.
    DhcpRate = "dhcp_rate",
    /// To a DHCP client, from a guest: only the switch speaks as a server.
    DhcpServer = "dhcp_server",
    /// To routers, more often than a guest may ask.
    SolicitationRate = "solicitation_rate",
    /// VRRP, or an announcement of a shared address, more often than a guest may send them.
    SharingRate = "sharing_rate",
    /// To the metadata service, more often than a guest may send.
    MetadataRate = "metadata_rate",
    /// To the gateway's name server, but not a question, or cut short.
    DnsMalformed = "dns_malformed",
    /// To the gateway's name server, more often than a guest may ask.
    DnsRate = "dns_rate",
    /// Larger than the path MTU, not to be cut, and its sender is told often enough, or must not be told.
    PathMtu = "path_mtu",
    /// Refused by the network's ACL.
    Acl = "acl",
    /// Not in a conversation, and no rule of the sender's security groups allows one to begin.
    GroupEgress = "group_egress",
    /// Not in a conversation, and no rule of the receiver's security groups allows one to begin.
    GroupIngress = "group_ingress",
    /// A later fragment where rules look at ports, and no first one of its packet has passed before.
    FragmentWithoutFirst = "fragment_without_first",
    /// A fragment that does not fit those of its packet that passed before: it overlaps one, lies behind the last, or leaves too many gaps.
    FragmentMismatch = "fragment_mismatch",
    /// To the address of a load balancer, but none listens there.
    NoService = "no_service",
    /// To a load balancer none of whose backends takes connections.
    NoBackend = "no_backend",
    /// Of a connection through a load balancer whose backend is no longer one of its.
    BackendGone = "backend_gone",
    /// To a load balancer, in fragments.
    ServiceFragment = "service_fragment",
    /// To a load balancer, and the backend has too many connections of the client that would look like this one.
    ServicePorts = "service_ports",
    /// To a load balancer, but the bounds leave no room for any connection.
    ConnectionsFull = "connections_full",
    /// From outside, to an address and port that no guest has there, or in the middle of a conversation that is not known; from a guest, about
    /// such a one.
    NatNoMapping = "nat_no_mapping",
    /// To the outside, but the guest, or the addresses of its network, have no port left.
    NatPortsFull = "nat_ports_full",
    /// To or from the outside, in a protocol whose packets cannot be told apart behind an address that guests share.
    NatProtocol = "nat_protocol",
    /// To or from the outside in fragments, behind an address that guests share.
    NatFragment = "nat_fragment",
    /// Allowed by a security group, but the bounds leave no room for any session. A bound that leaves room for one never refuses
    /// another: one that is there makes room.
    SessionsFull = "sessions_full",
    /// From the underlay, of a network that is not on this host.
    UnknownVni = "unknown_vni",
    /// From the underlay, with a source address that is not behind that peer.
    WrongPeer = "wrong_peer",
    /// From the underlay, to a vNIC that is not on this host.
    NotHere = "not_here",
}

impl DropReason {
    /// Position in [`Self::ALL`].
    pub const fn index(self) -> usize {
        self as usize
    }
}

impl fmt::Display for DropReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_has_its_index_and_a_name_of_its_own() {
        for (i, reason) in DropReason::ALL.iter().enumerate() {
            assert_eq!(reason.index(), i);
            assert_eq!(reason.counter(), format!("dropped_{reason}_packets"));
            assert_eq!(reason.ingress_dropped_counter(), format!("ingress_dropped_{reason}_packets"));
            assert!(DropReason::ALL.iter().filter(|r| r.name() == reason.name()).count() == 1);
        }
    }
}
