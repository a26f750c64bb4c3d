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

            /// The reason's short name.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }

            /// Name of the counter of packets that were dropped on their way to a port for this reason, with
            /// its unit.
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
    /// The source port does not exist.
    UnknownPort = "unknown_port",
    /// The frame has a VLAN tag.
    Vlan = "vlan",
    /// The frame is neither IP nor ARP.
    EtherType = "ethertype",
    /// The source MAC address is not the sender's.
    SpoofedMac = "spoofed_mac",
    /// The source IP address is not the sender's.
    SpoofedIp = "spoofed_ip",
    /// ARP with a sender address that is not the sender's.
    SpoofedArp = "spoofed_arp",
    /// Neighbour discovery in the name of another node or of a router.
    SpoofedNeighbour = "spoofed_neighbour",
    /// ARP or neighbour discovery that is truncated, damaged or invalid.
    MalformedNeighbour = "malformed_neighbour",
    /// Unsolicited ARP or neighbour discovery about the sender's own address: announcements, probes, and
    /// replies to guests whom the switch has already answered.
    OwnAddress = "own_address",
    /// ARP or neighbour discovery for an unknown address.
    UnknownNeighbour = "unknown_neighbour",
    /// Broadcast that is not ARP.
    Broadcast = "broadcast",
    /// Multicast that is not neighbour discovery.
    Multicast = "multicast",
    /// The destination MAC address is unknown.
    UnknownMac = "unknown_mac",
    /// The packet would go back to where it came from.
    Loop = "loop",
    /// No route to the destination address.
    NoRoute = "no_route",
    /// To an address whose route would have to be learned, in a network that has as many learned routes as it may.
    LearnedFull = "learned_full",
    /// Sent to the gateway, but the source or destination address must not be routed.
    NotRoutable = "not_routable",
    /// TTL or hop limit expired at the gateway.
    TtlExpired = "ttl_expired",
    /// To the gateway's own address, but not a ping that the switch can answer.
    GatewayService = "gateway_service",
    /// To a DHCP server, but truncated or not a client message.
    DhcpMalformed = "dhcp_malformed",
    /// To a DHCP server, on behalf of a MAC address that is not the guest's.
    DhcpSpoofed = "dhcp_spoofed",
    /// To a DHCP server, but needs no reply: a release, a decline, or a message for another server.
    DhcpUnanswered = "dhcp_unanswered",
    /// To a DHCP server; the guest exceeds its rate limit.
    DhcpRate = "dhcp_rate",
    /// From a guest to a DHCP client: only the switch may act as a server.
    DhcpServer = "dhcp_server",
    /// Router solicitation; the guest exceeds its rate limit.
    SolicitationRate = "solicitation_rate",
    /// VRRP, or an announcement of a shared address; the guest exceeds its rate limit.
    SharingRate = "sharing_rate",
    /// To the metadata service; the guest exceeds its rate limit.
    MetadataRate = "metadata_rate",
    /// To the gateway's name server, but truncated or not a query.
    DnsMalformed = "dns_malformed",
    /// To the gateway's name server; the guest exceeds its rate limit.
    DnsRate = "dns_rate",
    /// Larger than the path MTU and must not be fragmented. No ICMP error was sent, because of the rate limit
    /// or because none is allowed.
    PathMtu = "path_mtu",
    /// Denied by the network's ACL.
    Acl = "acl",
    /// Not part of a conversation, and no egress rule of the sender's security groups allows it to begin one.
    GroupEgress = "group_egress",
    /// Not part of a conversation, and no ingress rule of the receiver's security groups allows it to begin
    /// one.
    GroupIngress = "group_ingress",
    /// A later fragment, where rules need the first one, and no first fragment of its packet has passed.
    FragmentWithoutFirst = "fragment_without_first",
    /// A fragment that does not fit the earlier ones of its packet: it overlaps one, lies beyond the end, or
    /// leaves too many gaps.
    FragmentMismatch = "fragment_mismatch",
    /// To the address of a load balancer, but no load balancer listens on that port.
    NoService = "no_service",
    /// To a load balancer without a backend that takes new connections.
    NoBackend = "no_backend",
    /// Part of a connection through a load balancer whose backend has been removed.
    BackendGone = "backend_gone",
    /// To a load balancer, and fragmented.
    ServiceFragment = "service_fragment",
    /// To a load balancer: no source port is free that would distinguish this connection from the client's
    /// other ones to the backend.
    ServicePorts = "service_ports",
    /// To a load balancer, but the limits leave no room for any connection.
    ConnectionsFull = "connections_full",
    /// From outside: no guest has this address and port, or the packet is in the middle of an unknown
    /// conversation. From a guest: an ICMP error, a reset or an echo reply of an unknown conversation.
    NatNoMapping = "nat_no_mapping",
    /// To the outside, but the guest has used all its ports, or no port of the network's addresses is free.
    NatPortsFull = "nat_ports_full",
    /// To or from the outside, in a protocol whose packets cannot be told apart behind a shared address.
    NatProtocol = "nat_protocol",
    /// To or from the outside behind a shared address, and fragmented.
    NatFragment = "nat_fragment",
    /// Allowed by a security group, but the limits leave no room for any session. If they leave room for at
    /// least one, a new session evicts an existing one instead.
    SessionsFull = "sessions_full",
    /// From the underlay, in a network that is not on this host.
    UnknownVni = "unknown_vni",
    /// From the underlay, with a source address that is not behind the sending peer.
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
