//! Counters and drop reasons.

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident => $text:literal),* $(,)?) => {
        /// Why a packet is not forwarded.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum DropReason { $($(#[$doc])* $name,)* }

        impl DropReason {
            /// All reasons.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// Its name in counters and logs.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }
        }
    };
}

reasons! {
    /// The outer headers are malformed, or the outer packet is fragmented.
    OuterMalformed => "outer_malformed",
    /// The destination is not one of the gateway's addresses.
    NotForUs => "not_for_us",
    /// VXLAN or GRE from an address that is neither a known host nor a customer's router.
    UnknownSender => "unknown_sender",
    /// A VNI, or GRE key, that does not belong to a VPC.
    UnknownVni => "unknown_vni",
    /// The inner headers are malformed.
    InnerMalformed => "inner_malformed",
    /// The inner frame is not IP, or is tagged, or has a multicast destination.
    InnerKind => "inner_kind",
    /// The outer header is marked ECN CE, but the inner packet is not ECN-capable (RFC 6040).
    NotEcnCapable => "not_ecn_capable",
    /// The hop limit is used up.
    HopLimit => "hop_limit",
    /// Larger than the path MTU.
    TooLarge => "too_large",
    /// No route, or a route that drops packets.
    NoRoute => "no_route",
    /// The destination's host is not known.
    NoHost => "no_host",
    /// The ACL of the VPC denies it.
    Acl => "acl",
    /// Above the rate of the VPC's Internet traffic.
    Meter => "meter",
    /// The VPC has neither an EIP nor SNAT for this source.
    NoTranslation => "no_translation",
    /// No session, and the packet may not start one.
    NatNoSession => "nat_no_session",
    /// No free session or port.
    NatFull => "nat_full",
    /// A protocol that cannot be translated.
    NatProtocol => "nat_protocol",
    /// A later fragment whose first fragment was not seen, or was dropped.
    FragmentWithoutFirst => "fragment_without_first",
    /// A fragment that overlaps earlier ones of its packet, or does not fit them.
    FragmentMismatch => "fragment_mismatch",
    /// A service without backends.
    NoBackend => "no_backend",
    /// The tunnel is down: its keepalives do not come back.
    TunnelDown => "tunnel_down",
    /// Not an error: a keepalive of a tunnel came back, and ends here.
    TunnelKeepalive => "tunnel_keepalive",
    /// The link-layer address of the next hop is not known yet.
    NoNeighbour => "no_neighbour",
    /// The buffer has no headroom for the headers.
    NoHeadroom => "no_headroom",
    /// An answer, or a fragment made by the gateway, that does not fit the ring.
    NoRoom => "no_room",
    /// The rate limit of answers to bad packets is exceeded.
    AnswerRate => "answer_rate",
    /// The rate limit of translated ICMP errors is exceeded.
    ErrorRate => "error_rate",
}

/// Which service a packet used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    /// Between VPCs, or inside one.
    Vpc,
    /// From or to the Internet.
    Internet,
    /// From or to a customer's network.
    Idc,
    /// To a cloud service, or back.
    CloudService,
    /// The gateway answered the packet: ARP, neighbour discovery, an ICMP error, the keepalive of a tunnel.
    Answer,
}

impl Service {
    /// All services.
    pub const ALL: [Self; 5] = [Self::Vpc, Self::Internet, Self::Idc, Self::CloudService, Self::Answer];

    /// Its name in counters and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Vpc => "vpc",
            Self::Internet => "internet",
            Self::Idc => "idc",
            Self::CloudService => "cloud_service",
            Self::Answer => "answer",
        }
    }
}

/// Packets of one core by verdict.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counters {
    forwarded: [u64; Service::ALL.len()],
    dropped: [u64; DropReason::ALL.len()],
    /// Packets that were fragmented, and the number of fragments after the first.
    fragmented: u64,
    extra_fragments: u64,
}

impl Default for Counters {
    fn default() -> Self {
        Counters {
            forwarded: [0; Service::ALL.len()],
            dropped: [0; DropReason::ALL.len()],
            fragmented: 0,
            extra_fragments: 0,
        }
    }
}

impl Counters {
    /// Packets that a service forwarded.
    pub fn forwarded(&self, service: Service) -> u64 {
        self.forwarded[service as usize]
    }

    /// Packets dropped, by reason.
    pub fn dropped(&self, reason: DropReason) -> u64 {
        self.dropped[reason as usize]
    }

    /// All counters with their names.
    pub fn iter(&self) -> impl Iterator<Item = (String, u64)> + '_ {
        let forwarded =
            Service::ALL.into_iter().map(|s| (format!("forwarded_{}_packets", s.name()), self.forwarded(s)));
        let dropped = DropReason::ALL.iter().map(|r| (format!("dropped_{}_packets", r.name()), self.dropped(*r)));
        let fragments = [("fragmented_packets", self.fragmented), ("extra_fragment_packets", self.extra_fragments)];
        forwarded.chain(dropped).chain(fragments.map(|(name, value)| (name.to_owned(), value)))
    }

    pub(crate) fn forward(&mut self, service: Service) {
        self.forwarded[service as usize] += 1;
    }

    /// Counts a packet that was fragmented into one fragment and `more`.
    pub(crate) fn count_fragmented(&mut self, more: usize) {
        self.fragmented += 1;
        self.extra_fragments += more as u64;
    }

    pub(crate) fn drop(&mut self, reason: DropReason) {
        self.dropped[reason as usize] += 1;
    }
}
