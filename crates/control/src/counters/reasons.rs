//! Reasons, which distinguish the counters of a family.

/// A reason.
pub(super) struct Reason {
    /// Part of the counter's name.
    pub(super) name: &'static str,
    /// Description.
    pub(super) what: &'static str,
    /// What to do; empty: the family's advice.
    pub(super) advice: &'static str,
}

const fn plain(name: &'static str, what: &'static str) -> Reason {
    Reason { name, what, advice: "" }
}

/// Why a frame or its offload metadata is refused (`nic`).
pub(super) const MALFORMED: &[Reason] = &[
    plain("ethernet_truncated", "shorter than an Ethernet header with its tag"),
    plain("arp_truncated", "truncated ARP"),
    plain("arp_kind", "ARP other than IPv4 over Ethernet"),
    plain("ipv4_truncated", "truncated IPv4 header"),
    plain("ipv4_header", "EtherType IPv4 but another IP version, or a header length below 20 bytes"),
    plain("ipv4_length", "IPv4 total length that does not fit header and frame"),
    plain("ipv6_truncated", "truncated IPv6 header"),
    plain("ipv6_header", "EtherType IPv6 but another IP version"),
    plain("ipv6_length", "IPv6 payload length beyond the frame"),
    plain("ipv6_extensions", "IPv6 extension headers that are truncated, too many, or too long"),
    plain("ipv4_options", "IPv4 options that do not fit the header"),
    Reason {
        name: "source_route",
        what: "a source route: an IPv4 option, or an IPv6 routing header of type 0, 1 or 2 with further destinations",
        advice: "an attack, or a tool in the guest: source routes are not supported",
    },
    plain(
        "fragment_length",
        "a fragment without payload, not a multiple of 8 bytes although others follow, or beyond 65,535 bytes",
    ),
    Reason {
        name: "tiny_fragment",
        what: "a first fragment without the whole transport header, or a later one that starts inside it",
        advice: "an attack: no operating system fragments packets like this",
    },
    plain(
        "fragment_extensions",
        "an IPv6 fragment with a second fragment header, or with extension headers behind the first",
    ),
    plain("tcp_header", "truncated TCP header, or an invalid data offset"),
    plain("udp_header", "truncated UDP header, or an invalid length"),
    plain("checksum_range", "a partial checksum outside the frame, or in headers other than the transport's"),
    plain("gso_type", "a segmentation type that is unknown or does not match the frame"),
    plain("gso_checksum", "segmentation without a partial transport checksum"),
    plain("gso_size", "segmentation with a segment size of 0"),
    plain("gso_segments", "more segments than a frame may have"),
    plain("frame_too_long", "larger than the largest frame"),
    plain("head_too_short", "the headers are not all in the first part of the frame"),
];

/// Why a datagram is not a BIFROST packet (PROTOCOL §16.1).
pub(super) const REFUSAL: &[Reason] = &[
    plain("short_datagram", "shorter than the header of its packet type"),
    plain("packet_type", "a packet type that no version defines"),
    plain("version", "version 0, or one that is not supported"),
    plain("version_range", "a connection request that accepts no version"),
    plain("zero_cid", "connection identifier 0"),
    plain("short_frame", "an inner frame shorter than an Ethernet header"),
    plain("ack_type", "an unknown ACK type"),
    plain("bitmap_length", "an ACK bitmap of more than 8 words"),
    plain("bitmap_truncated", "an ACK that ends before its bitmap does"),
    plain("body_truncated", "a set-up packet that ends before its body does"),
    plain("reject_reason", "an unknown reason in a connection rejection"),
    plain("group_vnic", "set-up with a multicast address as a vNIC"),
    plain("zero_window", "set-up that offers a receive window of 0 packets"),
    plain("trailing_bytes", "bytes after the end of a packet"),
    plain("bundle_length", "a bundle whose length does not match its packets"),
    plain("bundle_content", "a bundle with a packet type that is not allowed in it"),
];

/// Why the switch drops a frame (`avs`).
pub(super) const SWITCH: &[Reason] = &[
    plain("unknown_port", "from a port that does not exist"),
    Reason { name: "vlan", what: "with a VLAN tag", advice: "remove the VLAN in the guest: a port has one network" },
    plain("ethertype", "neither IP nor ARP"),
    Reason {
        name: "spoofed_mac",
        what: "with a source MAC address that is not the port's",
        advice: "compare the guest's MAC address with the port's `mac`; a bridge in the guest?",
    },
    Reason {
        name: "spoofed_ip",
        what: "with a source IP address that is not the port's",
        advice: "compare the guest's addresses with the port's `addresses`; a router or NAT in the guest?",
    },
    Reason {
        name: "spoofed_arp",
        what: "ARP that claims an address of another port",
        advice: "an address conflict, or an attack from within the guest",
    },
    Reason {
        name: "spoofed_neighbour",
        what: "neighbour discovery that claims an address of another port, or to be a router",
        advice: "an address conflict, a router in the guest, or an attack from within it",
    },
    plain("malformed_neighbour", "ARP or neighbour discovery that is truncated, damaged or invalid"),
    Reason {
        name: "own_address",
        what: "unsolicited ARP or neighbour discovery about the sender's own address: announcements, probes, answers that the switch has already given",
        advice: "nothing: guests send this when they start",
    },
    Reason {
        name: "unknown_neighbour",
        what: "ARP or neighbour discovery for an unknown address",
        advice: "is there a `[[route]]` for that address? `bifrostctl routes`",
    },
    Reason {
        name: "broadcast",
        what: "broadcast other than ARP or DHCP",
        advice: "nothing: broadcast is not supported",
    },
    Reason {
        name: "multicast",
        what: "multicast other than neighbour discovery",
        advice: "nothing: multicast is not supported (the guest's kernel sends mDNS, MLD and IGMP)",
    },
    Reason {
        name: "unknown_mac",
        what: "to an unknown MAC address",
        advice: "a `[[route]]` is missing, or the guest's neighbour entry is stale",
    },
    Reason { name: "loop", what: "to the port that it came from", advice: "look at the guest's neighbour table" },
    Reason {
        name: "no_route",
        what: "through the gateway, to an unknown address",
        advice: "is there a `[[route]]` for it, or a `[[peering]]` in both directions? `bifrostctl routes`",
    },
    Reason {
        name: "learned_full",
        what: "to an address without a route, in a VPC with as many learned routes as it may have",
        advice: "guests of this VPC use more destinations than fit at once, or one scans the network: `bifrostctl learned`",
    },
    Reason {
        name: "not_routable",
        what: "through the gateway, from or to an address that must not be routed",
        advice: "nothing: link-local and similar addresses stay on their link",
    },
    Reason {
        name: "ttl_expired",
        what: "through the gateway, with an expired TTL",
        advice: "a routing loop between guests, or traceroute",
    },
    Reason {
        name: "gateway_service",
        what: "to the gateway's own address, but not a ping, DHCP or DNS request that it can answer",
        advice: "nothing: the gateway has no other services; a name server only with `domain` in `[[vpc]]`",
    },
    Reason {
        name: "dhcp_malformed",
        what: "to a DHCP server, but truncated or not a client's message",
        advice: "an attack, or a broken DHCP client in the guest",
    },
    Reason {
        name: "dhcp_spoofed",
        what: "to a DHCP server, for a MAC address that is not the guest's",
        advice: "an attack, or a guest that bridges other interfaces to this one",
    },
    Reason {
        name: "dhcp_unanswered",
        what: "to a DHCP server, needs no answer: a release, a decline, or a request to another server",
        advice: "a guest declines an address that another guest uses: look for that address in the VPC",
    },
    Reason {
        name: "dhcp_rate",
        what: "to a DHCP server, above the guest's limit (10 a second)",
        advice: "a DHCP client in a loop; it is answered again below the limit",
    },
    Reason {
        name: "dhcp_server",
        what: "DHCPv6 messages that only servers and relays send to clients",
        advice: "a DHCPv6 server in the guest, or an attack from within it: only the switch may act as a server",
    },
    Reason {
        name: "solicitation_rate",
        what: "router solicitations above the guest's limit (10 a second)",
        advice: "a guest in a loop; it is answered again below the limit",
    },
    Reason {
        name: "sharing_rate",
        what: "VRRP, or announcements of shared addresses, above the guest's limit (200 a second)",
        advice: "a guest in a loop; longer intervals in keepalived",
    },
    Reason {
        name: "metadata_rate",
        what: "to the metadata service, above the guest's limit (500 packets a second)",
        advice: "a guest in a loop; it is answered again below the limit",
    },
    Reason {
        name: "dns_malformed",
        what: "to the gateway's name server, but truncated or not a query",
        advice: "an attack, or a broken resolver in the guest",
    },
    Reason {
        name: "dns_rate",
        what: "to the gateway's name server, above the guest's limit (1000 a second)",
        advice: "a guest that does not cache answers: use a caching resolver in it",
    },
    Reason {
        name: "path_mtu",
        what: "larger than the path MTU with DF, and no ICMP error was sent: rate limit, or not allowed",
        advice: "see MTU in operations/underlay.md",
    },
    Reason { name: "acl", what: "denied by the network's ACL", advice: "see `[[vpc.acl]]` if it should pass" },
    Reason {
        name: "group_egress",
        what: "without a session, and not allowed by an egress rule of the sender's security groups",
        advice: "see the port's `security_groups` (egress) if it should pass",
    },
    Reason {
        name: "group_ingress",
        what: "without a session, and not allowed by an ingress rule of the receiver's security groups",
        advice: "see the port's `security_groups` (ingress) if it should pass",
    },
    Reason {
        name: "fragment_without_first",
        what: "a later fragment where rules match ports, without an accepted first fragment",
        advice: "the first was denied, lost or reordered; `avs.fragment_evicted_records` shows whether its record was evicted",
    },
    Reason {
        name: "fragment_mismatch",
        what: "a fragment that overlaps others of its packet, is behind the last, or leaves too many gaps",
        advice: "many: an attack, or a network that duplicates packets",
    },
    Reason {
        name: "no_service",
        what: "to the address of a load balancer, but not to one of its ports",
        advice: "`bifrostctl load-balancers` lists the ports",
    },
    Reason {
        name: "no_backend",
        what: "to a load balancer without an available backend",
        advice: "`bifrostctl load-balancers`: all are down or drained",
    },
    Reason {
        name: "backend_gone",
        what: "of a connection through a load balancer whose backend was removed",
        advice: "set `weight = 0` and wait before you remove a backend",
    },
    Reason {
        name: "service_fragment",
        what: "to a load balancer, fragmented",
        advice: "a UDP client sends datagrams larger than its MTU",
    },
    Reason {
        name: "service_ports",
        what: "to a load balancer, while all source ports of the client towards that backend are in use",
        advice: "use other source ports: several load balancers share the backend",
    },
    Reason {
        name: "connections_full",
        what: "to a load balancer, while the connection table is full",
        advice: "not possible with valid bounds, because another connection is evicted: report this",
    },
    Reason {
        name: "nat_no_mapping",
        what: "between a guest and the outside, without a NAT mapping",
        advice: "`bifrostctl nat` lists addresses and ports that lead to guests; scans from outside also count here",
    },
    Reason {
        name: "nat_ports_full",
        what: "to the outside, while all ports of the guest, or of its VPC's addresses, are in use",
        advice: "`bifrostctl nat`; raise `ports_per_guest`, or add addresses to the `[[nat]]` of the VPC",
    },
    Reason {
        name: "nat_protocol",
        what: "between a guest and the outside, with a protocol without ports, or an invalid ICMP error",
        advice: "a guest with a `[[floating_ip]]` can use any protocol",
    },
    Reason {
        name: "nat_fragment",
        what: "between a guest and the outside, fragmented, behind a shared address",
        advice: "a guest with a `[[floating_ip]]` can use fragments",
    },
    Reason {
        name: "sessions_full",
        what: "allowed by a security group, but the session table is full",
        advice: "not possible with valid bounds, because another session is evicted: report this",
    },
    Reason {
        name: "unknown_vni",
        what: "of a network that is not on this host",
        advice: "the peer has routes for a network that this host does not have: compare the configurations",
    },
    Reason {
        name: "wrong_peer",
        what: "with a source address that is not behind that peer",
        advice: "`bifrostctl routes` on both hosts; a guest has moved, or a peer forges sources",
    },
    Reason {
        name: "not_here",
        what: "to a vNIC that is not on this host",
        advice: "`bifrostctl routes` on both hosts: the peer sends to the wrong host",
    },
];
