//! `[[mirror]]`: copies of guests' packets for somebody else to look at.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::ops::RangeInclusive;

use ipnet::IpNet;

use super::section::{Section, Sink};
use super::security::{port_ranges, protocols};
use super::{Config, Port, Vni, overhead_bytes};

/// Most mirrors: each is a bit where packets are looked at.
pub const MAX_MIRRORS: usize = 64;
/// Most entries of a list.
const MAX_LIST: usize = 4096;
/// Most prefixes of one mirror.
const MAX_PREFIXES: usize = 64;
/// Of the headers that are counted for packets between hosts, the BIFROST header, which copies have not, bytes.
const BIFROST_HEADER: u16 = 16;

/// Copies of guests' packets, in VXLAN.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mirror {
    /// Its name.
    pub name: String,
    /// Packets of ports of these VPCs are copied.
    pub vpcs: Vec<Vni>,
    /// And of these ports. Without either: of all ports.
    pub ports: Vec<String>,
    /// Whether what guests send is copied.
    pub from_guests: bool,
    /// Whether what guests are shown is.
    pub to_guests: bool,
    /// Numbers of the IP header; empty: any packet.
    pub protocols: Vec<u8>,
    /// Source or destination; no host bits are set; empty: any.
    pub prefixes: Vec<IpNet>,
    /// Source or destination port of TCP or UDP; empty: any.
    pub l4_ports: Vec<RangeInclusive<u16>>,
    /// Who gets the copies.
    pub target: SocketAddr,
    /// In this VNI.
    pub target_vni: Vni,
    /// One packet of so many is copied.
    pub one_in: u32,
    /// Bytes of a packet that are copied.
    pub truncate: u32,
}

impl Mirror {
    /// Whether packets of a port are copied.
    pub fn has(&self, port: &Port) -> bool {
        let all = self.vpcs.is_empty() && self.ports.is_empty();
        all || self.vpcs.contains(&port.vni) || self.ports.contains(&port.name)
    }
}

/// `name` has been read.
pub(super) fn mirror(name: String, mut s: Section<'_, '_>) -> Mirror {
    let vpcs = s.int_list("vpcs", MAX_LIST, 1..=u64::from(Vni::MAX));
    // In range, or 1 after a reported error.
    let vni = |vni: u64| Vni::new(vni as u32).unwrap_or(Vni::MIN);
    let (from_guests, to_guests) =
        s.choice("direction", &[("both", (true, true)), ("egress", (true, false)), ("ingress", (false, true))]);
    let prefixes: Vec<IpNet> = s.list("prefixes", MAX_PREFIXES);
    if let Some(prefix) = prefixes.iter().find(|p| p.trunc() != **p).filter(|_| !s.has_failed("prefixes")) {
        s.error("prefixes", format!("{prefix} has host bits set; write {}", prefix.trunc()));
    }
    let target: String = s.required("target");
    let address = target.parse::<SocketAddr>().ok().filter(|address| address.port() > 0);
    if address.is_none() && !s.has_failed("target") {
        s.error("target", format!("{target:?} is no address with a port, such as 192.0.2.9:4789"));
    }
    let mirror = Mirror {
        name,
        vpcs: vpcs.into_iter().map(vni).collect(),
        ports: s.list("ports", MAX_LIST),
        from_guests,
        to_guests,
        protocols: protocols(&mut s),
        prefixes,
        l4_ports: port_ranges(&mut s, "l4_ports"),
        target: address.unwrap_or(SocketAddr::from(([127, 0, 0, 1], 4789))),
        target_vni: vni(s.required_int("target_vni", 1..=u64::from(Vni::MAX))),
        one_in: s.int("one_in", 1..=1_000_000, 1) as u32,
        truncate: s.int("truncate", 14..=9000, 256) as u32,
    };
    let has_ports = mirror.protocols.is_empty() || mirror.protocols == [6] || mirror.protocols == [17];
    if !mirror.l4_ports.is_empty() && !has_ports && !s.has_failed("protocol") {
        s.error("l4_ports", "only \"tcp\" and \"udp\" have ports; name one of them as protocol, or none");
    }
    s.finish();
    mirror
}

/// What must hold between mirrors and the rest.
pub(super) fn check(config: &Config, sink: &Sink<'_>) {
    let count = config.mirrors.len();
    if count > MAX_MIRRORS {
        return sink.error("mirror", format!("{count} are more than {MAX_MIRRORS}"));
    }
    let mut names = HashSet::new();
    for (i, mirror) in config.mirrors.iter().enumerate() {
        let at = |key: &str| format!("mirror[{i}].{key}");
        if !names.insert(&mirror.name) && !sink.failed(at("name")) {
            sink.error(at("name"), format!("mirror {:?} is described twice", mirror.name));
        }
        for (k, vni) in mirror.vpcs.iter().enumerate() {
            let field = at(&format!("vpcs[{k}]"));
            if config.vpc(*vni).is_none() && !sink.failed_within("vpc") && !sink.failed(&field) {
                sink.error(field, format!("there is no [[vpc]] with vni = {vni}"));
            }
        }
        for (k, name) in mirror.ports.iter().enumerate() {
            let field = at(&format!("ports[{k}]"));
            if config.port(name).is_none() && !sink.failed_within("port") && !sink.failed(&field) {
                sink.error(field, format!("no port named {name:?}"));
            }
        }
        let overhead = overhead_bytes(&mirror.target.ip()) - BIFROST_HEADER - 14;
        let most = u32::from(config.underlay.mtu.saturating_sub(overhead));
        if mirror.truncate > most && !sink.failed("underlay.mtu") && !sink.failed(at("truncate")) {
            let mtu = config.underlay.mtu;
            sink.error(
                at("truncate"),
                format!("{} is more than underlay.mtu ({mtu}) lets pass; at most {most} fit", mirror.truncate),
            );
        }
    }
}
