//! Checks of relations between fields. Fields that already have an error are skipped.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::hash::Hash;
use std::net::IpAddr;
use std::path::PathBuf;

use ipnet::IpNet;

use super::parse::is_dns_name;
use super::peering::Peerings;
use super::section::{Sink, nearest};
use super::{
    Config, GATEWAY_MAC, MAX_AFXDP_MTU, Peering, Port, PortKind, Route, UnderlayPort, Vni, Vpc, overhead_bytes,
};
use super::{balancer, flow_log, metadata, mirror, nat, security, shared};

pub(super) fn check(config: &Checked<'_>, sink: &Sink<'_>) {
    workers(config, sink);
    underlay(config, sink);
    transport(config, sink);
    peers(config, sink);
    vpcs(config, sink);
    security::check(config, sink);
    ports(config, sink);
    guarantees(config, sink);
    routes(config, sink);
    balancer::check(config, sink);
    nat::check(config, sink);
    mirror::check(config, sink);
    flow_log::check(config, sink);
    shared::check(config, sink);
    metadata::check(config, sink);
}

/// A configuration with the routes to check: all of them, also several of the same prefix, or those that a change
/// concerns.
pub(super) struct Checked<'a> {
    pub(super) config: &'a Config,
    pub(super) routes: Vec<&'a Route>,
}

impl std::ops::Deref for Checked<'_> {
    type Target = Config;

    fn deref(&self) -> &Config {
        self.config
    }
}

fn workers(config: &Config, sink: &Sink<'_>) {
    let mut seen = Seen::new(sink);
    for (i, cpu) in config.workers.cpus.iter().enumerate() {
        seen.once(format!("workers.cpus[{i}]"), cpu, || format!("CPU {cpu}"));
    }
}

fn underlay(config: &Config, sink: &Sink<'_>) {
    let underlay = &config.underlay;
    let mut seen = Seen::new(sink);
    for (i, address) in underlay.addresses.iter().enumerate() {
        let field = format!("underlay.addresses[{i}]");
        if host_address(sink, &field, *address) {
            seen.once(field, address, || address.to_string());
        }
    }
    if underlay.bifrost_port == underlay.vxlan_port {
        sink.error("underlay.vxlan_port", format!("equals bifrost_port ({}); they must differ", underlay.vxlan_port));
    }
    let first = u32::from(underlay.source_port_base);
    let last = first + u32::from(underlay.paths) - 1;
    if last > 65535 {
        let message = format!("with {} paths the last source port would be {last}, beyond 65535", underlay.paths);
        sink.error("underlay.source_port_base", message);
    }
    for (key, port) in [("bifrost_port", underlay.bifrost_port), ("vxlan_port", underlay.vxlan_port)] {
        if (first..=last).contains(&u32::from(port)) {
            sink.error(format!("underlay.{key}"), format!("{port} is among the source ports {first}..={last}"));
        }
    }
    if underlay.port == UnderlayPort::Afxdp && underlay.mtu > MAX_AFXDP_MTU {
        let message = format!("{} is more than port = \"afxdp\" can carry; at most {MAX_AFXDP_MTU}", underlay.mtu);
        sink.error("underlay.mtu", message);
    }
    if !underlay.xdp_frames.is_power_of_two() {
        sink.error("underlay.xdp_frames", format!("{} is not a power of two", underlay.xdp_frames));
    }
    if underlay.mtu < 1280 && underlay.addresses.iter().any(IpAddr::is_ipv6) {
        sink.error("underlay.mtu", format!("{} is below 1280, the minimum MTU of IPv6 (RFC 8200)", underlay.mtu));
    }
}

fn transport(config: &Config, sink: &Sink<'_>) {
    let t = &config.transport;
    if t.spray_paths > config.underlay.paths && !sink.failed("underlay.paths") {
        let message = format!("{} is more than underlay.paths ({})", t.spray_paths, config.underlay.paths);
        sink.error("transport.spray_paths", message);
    }
    if t.initial_window > t.max_window {
        // Report the field that the file sets.
        let field = ["transport.max_window", "transport.initial_window"].into_iter().find(|f| sink.written(f));
        let message = format!("initial_window ({}) is more than max_window ({})", t.initial_window, t.max_window);
        sink.error(field.unwrap_or("transport"), message);
    }
    if let Some(floor) = t.rto_floor.fixed()
        && floor > t.initial_rto
        && !sink.failed("transport.initial_rto_us")
    {
        let message = format!("{} is more than initial_rto_us ({})", floor.as_micros(), t.initial_rto.as_micros());
        sink.error("transport.rto_floor_us", message);
    }
    if let Some(give_up) = t.give_up.fixed()
        && give_up > 255 * t.initial_rto
        && !sink.failed("transport.initial_rto_us")
    {
        let most = (255 * t.initial_rto).as_millis();
        let message = format!("{} is more than 255 times initial_rto_us ({most} ms)", give_up.as_millis());
        sink.error("transport.give_up_ms", message);
    }
}

fn peers(config: &Config, sink: &Sink<'_>) {
    let mut names = Seen::new(sink);
    let mut addresses = Seen::new(sink);
    for (i, peer) in config.peers.iter().enumerate() {
        let field = format!("peer[{i}].name");
        if peer.name == config.host.name && !sink.failed(&field) && !sink.failed("host.name") {
            sink.error(&field, format!("{:?} is this host's own name", peer.name));
        }
        names.once(field, &peer.name, || format!("peer {:?}", peer.name));
        for (k, address) in peer.addresses.iter().enumerate() {
            let field = format!("peer[{i}].addresses[{k}]");
            if !host_address(sink, &field, *address) {
                continue;
            }
            if config.underlay.addresses.contains(address) {
                sink.error(&field, format!("{address} is this host's own underlay address"));
            }
            addresses.once(field, address, || address.to_string());
        }
        let all = format!("peer[{i}].addresses");
        if sink.failed_within(&all) || sink.failed_within("underlay.addresses") || source_ports_overflow(config) {
            continue;
        }
        if let Some(mixed) = config.paths(peer).find(|p| p.local.is_ipv4() != p.remote.is_ipv4()) {
            let message = format!(
                "path {} would run from {} to {}; both ends must be of one family: list the families in the same order",
                mixed.path, mixed.local, mixed.remote
            );
            sink.error(&all, message);
        }
    }
}

fn vpcs(config: &Checked<'_>, sink: &Sink<'_>) {
    let mut vnis = Seen::new(sink);
    for (i, vpc) in config.vpcs.iter().enumerate() {
        vnis.once(format!("vpc[{i}].vni"), &vpc.vni, || format!("VNI {}", vpc.vni));
        let mut gateways = Seen::new(sink);
        for (k, address) in vpc.gateway.iter().enumerate() {
            let field = format!("vpc[{i}].gateway[{k}]");
            if host_address(sink, &field, *address) {
                gateways.once(field, address, || address.to_string());
            }
        }
        let mut learned = Seen::new(sink);
        for (k, prefix) in vpc.learned.iter().enumerate() {
            let field = format!("vpc[{i}].learned[{k}]");
            if prefix.trunc() != *prefix {
                sink.error(field, format!("{prefix} has host bits; write {}", prefix.trunc()));
            } else {
                learned.once(field, prefix, || prefix.to_string());
            }
        }
        dhcp(sink, i, vpc);
        if vpc.domain.is_some() && vpc.gateway.is_empty() && !sink.failed_within(&format!("vpc[{i}].gateway")) {
            let message = format!("VNI {} has no gateway, which is the name server; add one", vpc.vni);
            sink.error(format!("vpc[{i}].domain"), message);
        }
    }
    dns_names(config, sink);
}

/// In a VPC with a domain, names of guests must be DNS names.
fn dns_names(config: &Checked<'_>, sink: &Sink<'_>) {
    let domain = |vni| config.vpc(vni).is_some_and(|vpc| vpc.domain.is_some());
    for (i, port) in config.ports.iter().enumerate().filter(|(_, port)| domain(port.vni)) {
        let field = format!("port[{i}].name");
        if !is_dns_name(&port.name) && !sink.failed(&field) {
            sink.error(
                field,
                format!("{:?} has an empty label; guests of a VPC with a domain need DNS names", port.name),
            );
        }
    }
    for (i, route) in config.routes.iter().enumerate() {
        let Some(name) = &route.name else { continue };
        let field = format!("route[{i}].name");
        if sink.failed(&field) || sink.failed(format!("route[{i}].vni")) {
            continue;
        }
        if !domain(route.vni) {
            sink.error(field, format!("VNI {} has no domain; add `domain` to its [[vpc]]", route.vni));
        } else if route.prefix.prefix_len() != route.prefix.max_prefix_len() {
            sink.error(field, format!("{} is more than one address; a name belongs to one guest", route.prefix));
        } else if !is_dns_name(name) {
            sink.error(field, format!("{name:?} has an empty label; it must be a DNS name"));
        }
    }
}

/// DHCP needs a gateway, and DNS servers need DHCP and a gateway of their family.
fn dhcp(sink: &Sink<'_>, i: usize, vpc: &Vpc) {
    let at = |key: &str| format!("vpc[{i}].{key}");
    let gateways_known = !sink.failed_within(&at("gateway"));
    if vpc.dhcp && vpc.gateway.is_empty() && gateways_known {
        sink.error(at("dhcp"), format!("VNI {} has no gateway, which is the DHCP server; add one", vpc.vni));
    }
    if !vpc.dhcp && !vpc.dns.is_empty() && !sink.failed(at("dhcp")) {
        sink.error(at("dns"), "DNS servers are announced only with DHCP; add `dhcp = true`");
    }
    let mut servers = Seen::new(sink);
    for (k, address) in vpc.dns.iter().enumerate() {
        let field = format!("vpc[{i}].dns[{k}]");
        if !host_address(sink, &field, *address) {
            continue;
        }
        let is_announced = vpc.gateway.iter().any(|gateway| gateway.is_ipv4() == address.is_ipv4());
        // A VPC without any gateway has been reported above.
        if vpc.dhcp && !vpc.gateway.is_empty() && !is_announced && gateways_known {
            let family = if address.is_ipv4() { "IPv4" } else { "IPv6" };
            let message = format!("VNI {} has no {family} gateway, which announces {address}; add one", vpc.vni);
            sink.error(&field, message);
            continue;
        }
        servers.once(field, address, || address.to_string());
    }
}

fn ports(config: &Config, sink: &Sink<'_>) {
    let mut names = Seen::new(sink);
    let mut macs = Seen::new(sink);
    let mut addresses: Seen<'_, (Vni, IpAddr)> = Seen::new(sink);
    let mut sockets = Seen::new(sink);
    sockets.seed("control.socket".to_owned(), &config.control.socket);
    let mut devices: Seen<'_, (Option<PathBuf>, String)> = Seen::new(sink);
    for (i, vpc) in config.vpcs.iter().enumerate() {
        for (k, gateway) in vpc.gateway.iter().enumerate() {
            addresses.seed(format!("vpc[{i}].gateway[{k}]"), &(vpc.vni, *gateway));
        }
    }
    let vnis = Vnis::new(config, sink);
    for (i, port) in config.ports.iter().enumerate() {
        let at = |key: &str| format!("port[{i}].{key}");
        names.once(at("name"), &port.name, || format!("port {:?}", port.name));
        let device = (port.netns.clone(), port.device.clone());
        // The device's name defaults to the port's: do not report a duplicate name twice.
        if port.kind == PortKind::Tap && !sink.failed(at("name")) && !sink.failed(at("netns")) {
            devices.once(at("device"), &device, || format!("interface {:?} of the same namespace", port.device));
        }
        if let Some(socket) = port.socket.as_ref().filter(|_| !sink.failed(at("socket"))) {
            sockets.once(at("socket"), socket, || socket.display().to_string());
        }
        let vni_known = vnis.check(sink, at("vni"), port.vni);
        no_gateway(sink, at("mac"), port.mac);
        if vni_known {
            macs.once(at("mac"), &(port.vni, port.mac), || format!("{} in VNI {}", port.mac, port.vni));
        }
        for (k, address) in port.addresses.iter().enumerate() {
            let field = format!("port[{i}].addresses[{k}]");
            if host_address(sink, &field, address.addr()) && vni_known {
                let key = (port.vni, address.addr());
                addresses.once(field, &key, || format!("{} in VNI {}", address.addr(), port.vni));
            }
        }
        let count = config.workers.count;
        if port.kind == PortKind::Tap && ![1, count].contains(&port.queues) && !sink.failed_within("workers") {
            let message = match count {
                1 => format!("{} queues for 1 worker (workers.count): each worker serves one queue", port.queues),
                _ => format!(
                    "{} queues; use 1, for one worker, or {count}, one for each worker (workers.count)",
                    port.queues
                ),
            };
            sink.error(at("queues"), message);
        }
        if port.rx_queue_kb.is_some() && port.limits.rx_mbit.is_none() && port.limits.rx_kpps.is_none() {
            let message = "without rx_mbit or rx_kpps no packets wait; set a receive limit, or remove it";
            sink.error(at("rx_queue_kb"), message);
        }
        port_mtu(config, sink, i, port);
        port_gateway(config, sink, i, port);
    }
}

/// Guarantees are part of the link's rate.
fn guarantees(config: &Config, sink: &Sink<'_>) {
    if sink.failed("qos.link_mbit") {
        return;
    }
    let mut sum = 0;
    for (i, port) in config.ports.iter().enumerate() {
        let field = format!("port[{i}].min_tx_mbit");
        let Some(least) = port.min_tx_mbit.filter(|_| !sink.failed(&field)) else { continue };
        let before = sum <= config.qos.link_mbit.unwrap_or(0);
        sum += least;
        let message = match config.qos.link_mbit {
            None => "needs the rate of which it is a part; set qos.link_mbit".to_owned(),
            Some(link) if before && sum > link => {
                format!("the guarantees of all ports up to this one are {sum} Mbit/s, more than qos.link_mbit ({link})")
            }
            Some(_) => continue,
        };
        sink.error(field, message);
    }
}

fn port_mtu(config: &Config, sink: &Sink<'_>, i: usize, port: &Port) {
    let field = format!("port[{i}].mtu");
    if port.mtu < 1280 && port.addresses.iter().any(|a| a.addr().is_ipv6()) {
        sink.error(&field, format!("{} is below 1280, the minimum MTU of IPv6 (RFC 8200)", port.mtu));
    }
    // Packets of an uplink do not use the underlay.
    let exempt = config.is_uplink(port);
    if exempt || sink.failed(&field) || sink.failed("underlay.mtu") || sink.failed_within("underlay.addresses") {
        return;
    }
    let underlay = &config.underlay;
    let Some(widest) = underlay.addresses.iter().max_by_key(|a| overhead_bytes(a)) else { return };
    let overhead = overhead_bytes(widest);
    if u32::from(port.mtu) + u32::from(overhead) > u32::from(underlay.mtu) {
        let family = if widest.is_ipv4() { "IPv4 20" } else { "IPv6 40" };
        let message = format!(
            "{} plus {overhead} bytes of headers ({family}, UDP 8, VXLAN 8, BIFROST 16, Ethernet 14) exceed \
             underlay.mtu ({}); at most {} fit",
            port.mtu,
            underlay.mtu,
            underlay.mtu.saturating_sub(overhead)
        );
        sink.error(&field, message);
    }
}

/// The default route is on-link, so the gateway may be outside of the port's subnets, but it must answer ARP or ND.
fn port_gateway(config: &Config, sink: &Sink<'_>, i: usize, port: &Port) {
    let field = format!("port[{i}].default_gateway");
    let Some(gateway) = port.default_gateway else { return };
    if sink.failed(&field) || sink.failed_within(&format!("port[{i}].addresses")) || sink.failed_within("vpc") {
        return;
    }
    let router = config.vpc(port.vni).is_some_and(|vpc| vpc.gateway.contains(&gateway));
    if port.addresses.iter().any(|a| a.addr() == gateway) {
        sink.error(&field, format!("{gateway} is the port's own address"));
    } else if port.addresses.iter().all(|a| a.addr().is_ipv4() != gateway.is_ipv4()) {
        let family = if gateway.is_ipv4() { "IPv4" } else { "IPv6" };
        sink.error(&field, format!("{gateway} cannot be reached: the port has no {family} address"));
    } else if !router && !port.addresses.iter().any(|a| a.contains(&gateway)) {
        let message = format!(
            "{gateway} is neither in the port's subnets nor a gateway of VNI {}; nothing would answer ARP or ND for it",
            port.vni
        );
        sink.error(&field, message);
    }
}

fn routes(config: &Checked<'_>, sink: &Sink<'_>) {
    let mut prefixes = Seen::new(sink);
    let names: Vec<&str> = config.peers.iter().map(|p| p.name.as_str()).collect();
    let names_known = !sink.failed("peer") && (0..names.len()).all(|i| !sink.failed(format!("peer[{i}].name")));
    let known_names: HashSet<&str> = names.iter().copied().collect();
    let mut homes: HashMap<(Vni, bifrost_wire::Mac), (_, &str)> = HashMap::new();
    let vnis = Vnis::new(config, sink);
    // Indexes: there may be very many routes.
    let mut macs: HashMap<(Vni, bifrost_wire::Mac), &Port> = HashMap::new();
    let mut addresses: HashMap<(Vni, IpAddr), &Port> = HashMap::new();
    for port in &config.ports {
        macs.entry((port.vni, port.mac)).or_insert(port);
        for address in &port.addresses {
            addresses.entry((port.vni, address.addr())).or_insert(port);
        }
    }
    for (i, port) in config.ports.iter().enumerate().filter(|(i, _)| !sink.failed_within(&format!("port[{i}].routed")))
    {
        let at = || item("port", i, "routed");
        for prefix in &port.routed {
            if *prefix != prefix.trunc() {
                sink.error(at(), format!("{prefix} has host bits set; write {}", prefix.trunc()));
            }
            local_destination(&addresses, sink, at(), port.vni, *prefix);
            prefixes.once(at(), &(port.vni, *prefix), || format!("{prefix} in VNI {}", port.vni));
        }
    }
    let path_mtu = config.path_mtu();
    for (i, route) in config.routes.iter().enumerate() {
        // Formatted only for errors.
        let at = |key| item("route", i, key);
        let vni_known = vnis.check(sink, at("vni"), route.vni);
        if !sink.failed(at("peer")) && names_known && !known_names.contains(route.peer.as_str()) {
            let known = match nearest(&route.peer, &names) {
                Some(name) => format!("did you mean {name:?}?"),
                None if names.is_empty() => "add a [[peer]]".to_owned(),
                None => format!("known peers: {}", names.join(", ")),
            };
            sink.error(at("peer"), format!("no peer named {:?}; {known}", route.peer));
        }
        if !sink.failed(at("prefix")) && route.prefix != route.prefix.trunc() {
            sink.error(at("prefix"), format!("{} has host bits set; write {}", route.prefix, route.prefix.trunc()));
        }
        route_mtu(config, sink, at("mtu"), route, &path_mtu);
        no_gateway(sink, at("mac"), route.mac);
        if !vni_known {
            continue;
        }
        if !sink.failed(at("prefix")) {
            local_destination(&addresses, sink, at("prefix"), route.vni, route.prefix);
            let key = (route.vni, route.prefix);
            prefixes.once(at("prefix"), &key, || format!("{} in VNI {}", route.prefix, route.vni));
        }
        if sink.failed(at("mac")) || sink.failed(at("peer")) {
            continue;
        }
        if let Some(port) = macs.get(&(route.vni, route.mac)) {
            sink.error(at("mac"), format!("{} is the MAC address of the local port {:?}", route.mac, port.name));
        }
        let home = homes.entry((route.vni, route.mac)).or_insert_with(|| (at("mac"), &route.peer));
        if home.1 != route.peer {
            let line = in_line(sink.line_of_field(&home.0.to_string()));
            let message = format!("{} is already on peer {:?}{line}; a vNIC is on one host", route.mac, home.1);
            sink.error(at("mac"), message);
        }
    }
    let peerings = Peerings::new(config, sink);
    for (i, peering) in config.peerings.iter().enumerate() {
        let Peering { vni, prefix, to_vni } = *peering;
        let at = |key| item("peering", i, key);
        let prefix_known = !sink.failed(at("prefix"));
        if prefix_known && prefix != prefix.trunc() {
            sink.error(at("prefix"), format!("{prefix} has host bits set; write {}", prefix.trunc()));
        }
        let known = [vnis.check(sink, at("vni"), vni), vnis.check(sink, at("to_vni"), to_vni)];
        if known[0] && prefix_known {
            local_destination(&addresses, sink, at("prefix"), vni, prefix);
            prefixes.once(at("prefix"), &(vni, prefix), || format!("{prefix} in VNI {vni}"));
        }
        if known == [true, true] {
            peerings.check(sink, at, peering);
        }
    }
}

/// The field of an array element, such as `route[2].mac`; formatted on demand.
fn item(kind: &'static str, number: usize, key: &'static str) -> impl fmt::Display {
    fmt::from_fn(move |f| write!(f, "{kind}[{number}].{key}"))
}

/// Reports a path MTU above that of the underlay, or below the minimum of IPv6.
fn route_mtu(
    config: &Config,
    sink: &Sink<'_>,
    field: impl fmt::Display,
    route: &Route,
    path_mtu: &dyn Fn(&Route) -> u16,
) {
    let Some(mtu) = route.mtu.filter(|_| !sink.failed(&field)) else { return };
    if mtu < 1280 && route.prefix.addr().is_ipv6() {
        sink.error(&field, format!("{mtu} is below 1280, the minimum MTU of IPv6 (RFC 8200)"));
    }
    if sink.failed("underlay.mtu") || sink.failed_within("underlay.addresses") || sink.failed_within("peer") {
        return;
    }
    let most = path_mtu(&Route { mtu: None, ..route.clone() });
    if mtu > most {
        let underlay = config.underlay.mtu;
        sink.error(field, format!("{mtu} does not fit underlay.mtu ({underlay}); at most {most} fit"));
    }
}

/// Reports a host route to the address of a local port.
fn local_destination(
    ports: &HashMap<(Vni, IpAddr), &Port>,
    sink: &Sink<'_>,
    field: impl fmt::Display,
    vni: Vni,
    prefix: IpNet,
) {
    if prefix.prefix_len() != prefix.max_prefix_len() {
        return;
    }
    let address = prefix.addr();
    if let Some(port) = ports.get(&(vni, address)) {
        sink.error(field, format!("{address} is the address of the local port {:?}", port.name));
    }
}

/// Reports a guest with the gateways' MAC address: packets to it would be routed, and packets from it would count as
/// routed.
fn no_gateway(sink: &Sink<'_>, field: impl fmt::Display, mac: bifrost_wire::Mac) {
    if mac == GATEWAY_MAC && !sink.failed(&field) {
        sink.error(field, format!("{mac} is the MAC address of every gateway"));
    }
}

/// Reports an address that is not a unicast address; returns whether it is one.
fn host_address(sink: &Sink<'_>, field: &str, address: IpAddr) -> bool {
    if sink.failed(field) {
        return false;
    }
    let broadcast = matches!(address, IpAddr::V4(a) if a.is_broadcast());
    let bad = address.is_unspecified() || address.is_multicast() || broadcast;
    if bad {
        sink.error(field, format!("{address} is not a unicast address"));
    }
    !bad
}

/// The VNIs of all VPCs.
struct Vnis {
    known: HashSet<Vni>,
    /// Whether all of them were valid.
    complete: bool,
}

impl Vnis {
    fn new(config: &Config, sink: &Sink<'_>) -> Vnis {
        let complete = !sink.failed("vpc") && (0..config.vpcs.len()).all(|i| !sink.failed(format!("vpc[{i}].vni")));
        Vnis { known: config.vpcs.iter().map(|v| v.vni).collect(), complete }
    }

    /// Reports a VNI without a VPC; returns whether it has one.
    fn check(&self, sink: &Sink<'_>, field: impl fmt::Display, vni: Vni) -> bool {
        if sink.failed(&field) {
            return false;
        }
        let known = self.known.contains(&vni);
        if !known && self.complete {
            let mut known: Vec<_> = self.known.iter().map(Vni::to_string).collect();
            known.sort();
            let hint = match known.len() {
                0 => format!("add a [[vpc]] with vni = {vni}"),
                _ => format!("known VNIs: {}", known.join(", ")),
            };
            sink.error(field, format!("no [[vpc]] has VNI {vni}; {hint}"));
        }
        known
    }
}

fn source_ports_overflow(config: &Config) -> bool {
    config.underlay.source_port_base.checked_add(u16::from(config.underlay.paths)).is_none()
}

/// The line for a message; empty without a file.
fn in_line(line: usize) -> String {
    if line == 0 { String::new() } else { format!(" (line {line})") }
}

/// Values that must be unique, with the field of their first occurrence.
pub(super) struct Seen<'s, K, F = String> {
    sink: &'s Sink<'s>,
    first: HashMap<K, F>,
}

impl<'s, K: Hash + Eq + Clone, F: fmt::Display> Seen<'s, K, F> {
    pub(super) fn new(sink: &'s Sink<'s>) -> Seen<'s, K, F> {
        Seen { sink, first: HashMap::new() }
    }

    /// Records a value without a check.
    fn seed(&mut self, field: F, value: &K) {
        if !self.sink.failed(&field) {
            self.first.entry(value.clone()).or_insert(field);
        }
    }

    /// Records a value; reports a second occurrence as "`what` is already `field` (line n)".
    pub(super) fn once(&mut self, field: F, value: &K, what: impl FnOnce() -> String) {
        if self.sink.failed(&field) {
            return;
        }
        match self.first.get(value) {
            None => {
                self.first.insert(value.clone(), field);
            }
            Some(first) => {
                let line = in_line(self.sink.line_of_field(&first.to_string()));
                self.sink.error(&field, format!("{} is already {first}{line}", what()));
            }
        }
    }
}
