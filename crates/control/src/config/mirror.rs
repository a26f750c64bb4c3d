//! `[[mirror]]`: traffic mirroring, copies of guests' packets for an analyzer.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::ops::RangeInclusive;

use ipnet::IpNet;

use super::section::{Section, Sink};
use super::security::{port_ranges, protocols};
use super::{Config, Port, Vni, overhead_bytes};

/// Maximum number of mirrors: the data path keeps them in a 64-bit mask.
pub const MAX_MIRRORS: usize = 64;
/// Maximum number of entries of a list.
const MAX_LIST: usize = 4096;
/// Maximum number of prefixes of one mirror.
const MAX_PREFIXES: usize = 64;
/// Size of the BIFROST header, bytes: [`overhead_bytes`] includes it, but copies do not have it.
const BIFROST_HEADER: u16 = 16;

/// A mirror: copies of guests' packets, sent in VXLAN.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mirror {
    /// Its name.
    pub name: String,
    /// Packets of ports of these VPCs are copied.
    pub vpcs: Vec<Vni>,
    /// Packets of these ports are copied as well. If both lists are empty: of all ports.
    pub ports: Vec<String>,
    /// Whether packets from guests are copied.
    pub from_guests: bool,
    /// Whether packets to guests are copied.
    pub to_guests: bool,
    /// IP protocol numbers; empty: any packet.
    pub protocols: Vec<u8>,
    /// Source or destination; no host bits are set; empty: any.
    pub prefixes: Vec<IpNet>,
    /// Source or destination port of TCP or UDP; empty: any.
    pub l4_ports: Vec<RangeInclusive<u16>>,
    /// The VXLAN endpoint that receives the copies.
    pub target: SocketAddr,
    /// The VNI of the copies.
    pub target_vni: Vni,
    /// Sampling: one of `one_in` packets is copied.
    pub one_in: u32,
    /// Longest copy of a packet, bytes.
    pub truncate: u32,
}

impl Mirror {
    /// Whether packets of a port are copied.
    pub fn has(&self, port: &Port) -> bool {
        let all = self.vpcs.is_empty() && self.ports.is_empty();
        all || self.vpcs.contains(&port.vni) || self.ports.contains(&port.name)
    }
}

/// Parses the section after `name`.
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
        s.error("target", format!("{target:?} is not an address with a port, such as 192.0.2.9:4789"));
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

/// Checks the relations of mirrors to other objects.
pub(super) fn check(config: &Config, sink: &Sink<'_>) {
    let count = config.mirrors.len();
    if count > MAX_MIRRORS {
        return sink.error("mirror", format!("{count} are more than {MAX_MIRRORS}"));
    }
    let mut names = HashSet::new();
    for (i, mirror) in config.mirrors.iter().enumerate() {
        let at = |key: &str| format!("mirror[{i}].{key}");
        if !names.insert(&mirror.name) && !sink.failed(at("name")) {
            sink.error(at("name"), format!("mirror {:?} is defined twice", mirror.name));
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
                format!("{} does not fit underlay.mtu ({mtu}); at most {most} fit", mirror.truncate),
            );
        }
    }
}
