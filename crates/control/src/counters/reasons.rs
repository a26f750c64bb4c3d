//! Reasons by which several counters are told apart.

/// A reason.
pub(super) struct Reason {
    /// In the counter's name.
    pub(super) name: &'static str,
    /// In words.
    pub(super) what: &'static str,
    /// What to do; empty: as for all of the family.
    pub(super) advice: &'static str,
}

const fn plain(name: &'static str, what: &'static str) -> Reason {
    Reason { name, what, advice: "" }
}

/// Why a frame, or what was said about it, is refused (`nic`).
pub(super) const MALFORMED: &[Reason] = &[
    plain("ethernet_truncated", "shorter than an Ethernet header with its tag"),
    plain("arp_truncated", "ARP that is cut short"),
    plain("arp_kind", "ARP for something else than IPv4 over Ethernet"),
    plain("ipv4_truncated", "IPv4 header cut short"),
    plain("ipv4_header", "IPv4 by EtherType and not by version, or a header length below 20 bytes"),
    plain("ipv4_length", "IPv4 total length that does not fit header and frame"),
    plain("ipv6_truncated", "IPv6 header cut short"),
    plain("ipv6_header", "IPv6 by EtherType and not by version"),
    plain("ipv6_length", "IPv6 payload length beyond the frame"),
    plain("ipv6_extensions", "IPv6 extension headers that are cut short, too many, or too long to look behind"),
    plain("ipv4_options", "IPv4 options that do not fit the header"),
    Reason {
        name: "source_route",
        what: "a source route: IPv4 options, or an IPv6 routing header of type 0, 1 or 2 with further destinations",
        advice: "an attack, or a tool of the guest's: nothing here follows such routes",
    },
    plain(
        "fragment_length",
        "a fragment without payload, of no multiple of 8 bytes although others follow, or beyond the longest packet",
    ),
    Reason {
        name: "tiny_fragment",
        what: "a first fragment without the whole transport header, or a later one that begins inside of it",
        advice: "an attack: no system cuts packets so",
    },
    plain(
        "fragment_extensions",
        "an IPv6 fragment with a second fragment header, or with extension headers behind the first",
    ),
    plain("tcp_header", "TCP header cut short, or a data offset that does not fit"),
    plain("udp_header", "UDP header cut short, or a length that does not fit"),
    plain("checksum_range", "a partial checksum outside of the frame, or in its headers but not the transport's"),
    plain("gso_type", "a segmentation type that is unknown or does not fit the frame"),
    plain("gso_checksum", "segmentation without the transport checksum left open"),
    plain("gso_size", "segmentation into segments of no bytes"),
    plain("gso_segments", "more segments than one frame may become"),
    plain("frame_too_long", "larger than any frame can be"),
    plain("head_too_short", "the part of the frame that must hold all headers does not"),
];

/// Why a datagram is no BIFROST packet (PROTOCOL §16.1).
pub(super) const REFUSAL: &[Reason] = &[
    plain("short_datagram", "shorter than the header of its packet type"),
    plain("packet_type", "a packet type that no version defines"),
    plain("version", "version 0, or one that is not spoken here"),
    plain("version_range", "a connection request that accepts no version"),
    plain("zero_cid", "connection identifier 0"),
    plain("short_frame", "an inner frame shorter than an Ethernet header"),
    plain("ack_type", "an unknown ACK type"),
    plain("bitmap_length", "an ACK bitmap of more than 8 words"),
    plain("bitmap_truncated", "an ACK that ends before its bitmap does"),
    plain("body_truncated", "a set-up packet that ends before its body does"),
    plain("reject_reason", "an unknown reason in a connection rejection"),
    plain("group_vnic", "set-up that names a multicast address as a vNIC"),
    plain("zero_window", "set-up that offers a receive window of no packets"),
    plain("trailing_bytes", "bytes after the end of a packet"),
    plain("bundle_length", "a bundle whose packets do not end with it"),
    plain("bundle_content", "a bundle with a packet that may not be in it"),
];

/// Why the switch drops a frame (`avs`).
pub(super) const SWITCH: &[Reason] = &[
    plain("unknown_port", "from a port that does not exist"),
    Reason { name: "vlan", what: "with a VLAN tag", advice: "take the VLAN off in the guest: a port has one network" },
    plain("ethertype", "neither IP nor ARP"),
    Reason {
        name: "spoofed_mac",
        what: "source MAC address of somebody else",
        advice: "compare the guest's MAC address with the port's `mac`; a bridge in the guest?",
    },
    Reason {
        name: "spoofed_ip",
        what: "source IP address of somebody else",
        advice: "compare the guest's addresses with the port's `addresses`; a router or NAT in the guest?",
    },
    Reason {
        name: "spoofed_arp",
        what: "ARP that speaks for somebody else",
        advice: "an address conflict, or an attack from within the guest",
    },
    Reason {
        name: "spoofed_neighbour",
        what: "neighbour discovery that speaks for somebody else, or as a router",
        advice: "an address conflict, a router in the guest, or an attack from within it",
    },
    plain("malformed_neighbour", "ARP or neighbour discovery that is cut short, damaged, or makes no sense"),
    Reason {
        name: "own_address",
        what: "ARP or neighbour discovery about the sender's own address that nobody asked for: announcements, probes, answers to guests whom the switch has answered",
        advice: "nothing: guests say this when they start",
    },
    Reason {
        name: "unknown_neighbour",
        what: "ARP or neighbour discovery for an address that nobody has",
        advice: "is there a `[[route]]` for what the guest looks for? `bifrostctl routes`",
    },
    Reason { name: "broadcast", what: "broadcast that is not ARP", advice: "nothing: there is no broadcast here" },
    Reason {
        name: "multicast",
        what: "multicast that is not neighbour discovery",
        advice: "nothing: there is no multicast here (mDNS, MLD and IGMP of the guest's kernel)",
    },
    Reason {
        name: "unknown_mac",
        what: "to a MAC address that nobody has",
        advice: "a `[[route]]` is missing, or the guest remembers a neighbour that has gone",
    },
    Reason { name: "loop", what: "back to where it came from", advice: "look at the guest's neighbour table" },
    Reason {
        name: "no_route",
        what: "through the gateway, to an address that nobody has",
        advice: "is there a `[[route]]` for it, or a `[[peering]]` and one back? `bifrostctl routes`",
    },
    Reason {
        name: "not_routable",
        what: "through the gateway, from or to an address that must not be routed",
        advice: "nothing: link-local and such addresses stay on their link",
    },
    Reason {
        name: "ttl_expired",
        what: "through the gateway, with its time to live used up",
        advice: "a routing loop among guests, or traceroute",
    },
    Reason {
        name: "gateway_service",
        what: "to the gateway's own address, but neither a ping nor a question by DHCP or DNS, or one that cannot be answered",
        advice: "nothing: the gateway has no other services; a name server only with `domain` in `[[vpc]]`",
    },
    Reason {
        name: "dhcp_malformed",
        what: "to a DHCP server, but not a client's message, or cut short",
        advice: "an attack, or a broken DHCP client in the guest",
    },
    Reason {
        name: "dhcp_spoofed",
        what: "to a DHCP server, for another MAC address than the guest's",
        advice: "an attack, or a guest that bridges other interfaces to this one",
    },
    Reason {
        name: "dhcp_unanswered",
        what: "to a DHCP server, and needs no answer: an IPv4 address is released or declined, or another server is asked",
        advice: "a guest that declines its address has found another user of it: look for that address in the VPC",
    },
    Reason {
        name: "dhcp_rate",
        what: "to a DHCP server, more often than a guest may ask (10 a second)",
        advice: "a DHCP client that runs wild; its questions are answered as soon as they are fewer",
    },
    Reason {
        name: "dhcp_server",
        what: "to a DHCPv6 client, as only servers and relays send",
        advice: "a DHCPv6 server in the guest, or an attack from within it: only the switch is a server",
    },
    Reason {
        name: "solicitation_rate",
        what: "to routers, more often than a guest may ask (10 a second)",
        advice: "a guest that runs wild; its questions are answered as soon as they are fewer",
    },
    Reason {
        name: "dns_malformed",
        what: "to the gateway's name server, but not a question, or cut short",
        advice: "an attack, or a broken resolver in the guest",
    },
    Reason {
        name: "dns_rate",
        what: "to the gateway's name server, more often than a guest may ask (1000 a second)",
        advice: "a guest that keeps no answers; a caching resolver in it helps",
    },
    Reason {
        name: "path_mtu",
        what: "larger than the path MTU, not to be cut, and its sender is told often enough, or must not be told",
        advice: "see MTU in operations/underlay.md",
    },
    Reason { name: "acl", what: "refused by the network's ACL", advice: "see `[[vpc.acl]]` if it should pass" },
    Reason {
        name: "group_egress",
        what: "in no conversation, and no rule of the sender's security groups lets one begin",
        advice: "see the port's `security_groups` (egress) if it should pass",
    },
    Reason {
        name: "group_ingress",
        what: "in no conversation, and no rule of the receiver's security groups lets one begin",
        advice: "see the port's `security_groups` (ingress) if it should pass",
    },
    Reason {
        name: "fragment_without_first",
        what: "a later fragment where rules look at ports, and no first one of its packet passed before",
        advice: "the first was refused or lost, or came later; `avs.fragment_evicted_records` says whether there is no room",
    },
    Reason {
        name: "fragment_mismatch",
        what: "a fragment that overlaps others of its packet, lies behind the last, or leaves too many gaps",
        advice: "many: an attack, or a network that repeats packets",
    },
    Reason {
        name: "no_service",
        what: "to the address of a load balancer, but none listens there",
        advice: "`bifrostctl load-balancers`: which ports there are",
    },
    Reason {
        name: "no_backend",
        what: "to a load balancer none of whose backends takes connections",
        advice: "`bifrostctl load-balancers`: they are down, or drained",
    },
    Reason {
        name: "backend_gone",
        what: "of a connection through a load balancer whose backend is no longer one of its",
        advice: "set `weight = 0` and wait before a backend is removed",
    },
    Reason {
        name: "service_fragment",
        what: "to a load balancer, in fragments",
        advice: "a client of UDP sends datagrams that are larger than its MTU",
    },
    Reason {
        name: "service_ports",
        what: "to a load balancer, and the client has too many connections with the backend that would look the same to it",
        advice: "use other source ports: several load balancers share the backend",
    },
    Reason {
        name: "connections_full",
        what: "to a load balancer, but there is no room for another connection",
        advice: "impossible with the bounds that a configuration can have: another one makes room",
    },
    Reason {
        name: "nat_no_mapping",
        what: "between a guest and the outside, in no conversation that is known",
        advice: "`bifrostctl nat`: which addresses and ports lead to guests; a scan from outside counts here, too",
    },
    Reason {
        name: "nat_ports_full",
        what: "to the outside, but the guest, or the addresses of its VPC, have no port left",
        advice: "`bifrostctl nat`; raise `ports_per_guest`, or add addresses to the `[[nat]]` of the VPC",
    },
    Reason {
        name: "nat_protocol",
        what: "between a guest and the outside, in a protocol without ports, or an ICMP error that makes no sense",
        advice: "a guest with a `[[floating_ip]]` can use any protocol",
    },
    Reason {
        name: "nat_fragment",
        what: "between a guest and the outside, in fragments, behind an address that guests share",
        advice: "a guest with a `[[floating_ip]]` can use fragments",
    },
    Reason {
        name: "sessions_full",
        what: "allowed by a security group, but there is no room for another session",
        advice: "impossible with the bounds that a configuration can have: another session makes room",
    },
    Reason {
        name: "unknown_vni",
        what: "of a network that is not on this host",
        advice: "the peer has routes to here that this host does not know: compare their configurations",
    },
    Reason {
        name: "wrong_peer",
        what: "with a source that is not at that peer",
        advice: "`bifrostctl routes` on both hosts; a guest that has moved, or a peer that speaks for others",
    },
    Reason {
        name: "not_here",
        what: "to a vNIC that is not on this host",
        advice: "`bifrostctl routes` on both hosts: the peer sends to the wrong one",
    },
];
