//! The schema: the keys with their ranges and defaults.

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use toml::de::DeTable;

use super::check::Checked;
use super::section::{Section, Sink};
use super::{
    AddressSet, Auto, Config, ConfigErrors, CongestionControl, Control, DEFAULT_SOCKET, Dscp, FloatingIp, Host, Kind,
    LoadBalancer, MAX_PATHS, MAX_QUEUE_PAIRS, MAX_WORKERS, Mirror, Nat, Object, Ordering, Peer, PeerTransport, Peering,
    PlainPaths, Port, PortForward, PortKind, PortLimits, Qos, Reliability, Route, Routes, SecurityGroup, SourceNat,
    Transport, Underlay, UnderlayPort, VhostMode, Vni, Vpc, VpcFlowLog, Workers, XdpMode, balancer, check, flow_log,
    metadata, mirror, nat, security,
};

/// Maximum number of addresses in a list.
const MAX_ADDRESSES: usize = 8;
/// Maximum number of security groups of one port or route.
const MAX_GROUPS: usize = 8;
/// Maximum number of networks behind one port's guest.
const MAX_ROUTED: usize = 64;
/// Part of the names of the in-flight records that the daemon keeps beside vhost-user sockets.
const RECORD: &str = ".inflight";
/// Maximum length of a Unix socket's path, bytes (`sun_path`, without its final zero).
const MAX_SOCKET_PATH: usize = 107;
/// Largest file of which all syntax errors are reported, bytes.
const MAX_RECOVERED: usize = 1 << 20;
/// Maximum length of an interface's name, bytes (`IFNAMSIZ`, without its final zero).
const MAX_DEVICE_NAME: usize = 15;

pub(super) fn parse(text: &str, file: &str) -> Result<Config, ConfigErrors> {
    let document = match DeTable::parse(text) {
        Ok(document) => document,
        Err(first) => return Err(syntax_errors(text, file, first)),
    };
    let sink = Sink::new(file, text, document.get_ref());
    let (mut config, routes) = document_of(&sink, document.get_ref());
    // Some checks scan all errors repeatedly.
    if !sink.is_full() {
        check::check(&Checked { config: &config, routes: routes.iter().collect() }, &sink);
    }
    let errors = sink.into_errors();
    if !errors.is_empty() {
        return Err(ConfigErrors::new(errors));
    }
    // Only now, because there may have been several of the same prefix.
    config.routes = routes.into_iter().collect();
    Ok(config)
}

/// All syntax errors, or only the first one of a large file, which may have one per byte.
fn syntax_errors(text: &str, file: &str, first: toml::de::Error) -> ConfigErrors {
    let errors = if text.len() > MAX_RECOVERED { vec![first] } else { DeTable::parse_recoverable(text).1 };
    // Checks of the recovered parts would only report misleading errors.
    let nothing = DeTable::new();
    let sink = Sink::new(file, text, &nothing);
    for error in &errors {
        sink.error_at(error.span().map_or(0, |s| s.start), "", error.message());
    }
    ConfigErrors::new(sink.into_errors())
}

/// Parses everything; the routes are apart from the configuration.
fn document_of(sink: &Sink<'_>, table: &DeTable<'_>) -> (Config, Vec<Route>) {
    let mut root = Section::root(sink, table);
    let host = host(root.section("host"));
    let control = control(root.section("control"));
    let workers = workers(root.section("workers"));
    let underlay = underlay(root.section("underlay"));
    let transport = transport(root.section("transport"), underlay.paths);
    let sessions = security::sessions(root.section("sessions"));
    let qos = qos(root.section("qos"));
    let security_groups = root.sections("security_group").into_iter().map(security_group).collect();
    let address_sets = root.sections("address_set").into_iter().map(address_set).collect();
    let peers = root.sections("peer").into_iter().map(peer).collect();
    let vpcs = root.sections("vpc").into_iter().map(vpc).collect();
    let ports = root.sections("port").into_iter().map(|s| port(s, workers.count)).collect();
    let routes = root.sections("route").into_iter().map(route).collect();
    let peerings = root.sections("peering").into_iter().map(peering).collect();
    let load_balancers = root.sections("load_balancer").into_iter().map(load_balancer).collect();
    let nat = Nat {
        uplinks: root.sections("uplink").into_iter().map(nat::uplink).collect(),
        sources: root.sections("nat").into_iter().map(source_nat).collect(),
        floating: root.sections("floating_ip").into_iter().map(floating_ip).collect(),
        forwards: root.sections("port_forward").into_iter().map(port_forward).collect(),
    };
    let mirrors = root.sections("mirror").into_iter().map(mirror).collect();
    let flow_log = root.optional_section("flow_log").map(flow_log::flow_log);
    let flow_logs = root.sections("vpc_flow_log").into_iter().map(vpc_flow_log).collect();
    root.finish();
    let config = Config {
        host,
        control,
        workers,
        underlay,
        transport,
        sessions,
        qos,
        security_groups,
        address_sets,
        peers,
        vpcs,
        ports,
        routes: Routes::new(),
        peerings,
        load_balancers,
        nat,
        mirrors,
        flow_log,
        flow_logs,
    };
    (config, routes)
}

/// Parses an object of a kind, on a host with `workers` workers.
pub(super) fn object(kind: Kind, s: Section<'_, '_>, workers: usize) -> Object {
    match kind {
        Kind::SecurityGroup => Object::SecurityGroup(security_group(s)),
        Kind::AddressSet => Object::AddressSet(address_set(s)),
        Kind::Peer => Object::Peer(peer(s)),
        Kind::Vpc => Object::Vpc(vpc(s)),
        Kind::Port => Object::Port(Box::new(port(s, workers))),
        Kind::Route => Object::Route(route(s)),
        Kind::Peering => Object::Peering(peering(s)),
        Kind::LoadBalancer => Object::LoadBalancer(load_balancer(s)),
        Kind::Uplink => Object::Uplink(nat::uplink(s)),
        Kind::Nat => Object::Nat(source_nat(s)),
        Kind::FloatingIp => Object::FloatingIp(floating_ip(s)),
        Kind::PortForward => Object::PortForward(port_forward(s)),
        Kind::Mirror => Object::Mirror(mirror(s)),
        Kind::VpcFlowLog => Object::VpcFlowLog(Box::new(vpc_flow_log(s))),
    }
}

fn security_group(mut s: Section<'_, '_>) -> SecurityGroup {
    security::security_group(port_name(&mut s), s)
}

fn address_set(mut s: Section<'_, '_>) -> AddressSet {
    security::address_set(port_name(&mut s), s)
}

fn load_balancer(mut s: Section<'_, '_>) -> LoadBalancer {
    let (name, vni) = (port_name(&mut s), vni(&mut s));
    balancer::load_balancer(name, vni, s)
}

fn source_nat(mut s: Section<'_, '_>) -> SourceNat {
    nat::source(vni(&mut s), s)
}

fn floating_ip(mut s: Section<'_, '_>) -> FloatingIp {
    nat::floating(vni(&mut s), s)
}

fn port_forward(mut s: Section<'_, '_>) -> PortForward {
    nat::forward(vni(&mut s), s)
}

fn vpc_flow_log(mut s: Section<'_, '_>) -> VpcFlowLog {
    flow_log::vpc_flow_log(port_name(&mut s), s)
}

fn mirror(mut s: Section<'_, '_>) -> Mirror {
    mirror::mirror(port_name(&mut s), s)
}

fn host(mut s: Section<'_, '_>) -> Host {
    let name = host_name(&mut s);
    let keep_devices = s.optional("keep_devices").unwrap_or(true);
    s.finish();
    Host { name, keep_devices }
}

fn control(mut s: Section<'_, '_>) -> Control {
    let socket: String = s.optional("socket").unwrap_or_else(|| DEFAULT_SOCKET.to_owned());
    check_socket(&s, &socket);
    let metrics: Option<String> = s.optional("metrics");
    let metrics = metrics.filter(|text| text != "off").and_then(|text| {
        let address = text.parse::<SocketAddr>().ok().filter(|address| address.port() > 0);
        if address.is_none() && !s.has_failed("metrics") {
            let wanted = "is neither \"off\" nor an address with a port, such as 127.0.0.1:9795 or [::1]:9795";
            s.error("metrics", format!("{text:?} {wanted}"));
        }
        address
    });
    s.finish();
    Control { socket: PathBuf::from(socket), metrics }
}

fn workers(mut s: Section<'_, '_>) -> Workers {
    let cpus = s.int_list("cpus", MAX_WORKERS, 0..=1023);
    let cpus: Vec<usize> = cpus.into_iter().map(|cpu| cpu as usize).collect();
    let default = cpus.len().clamp(1, MAX_WORKERS);
    let count = s.int("count", 1..=MAX_WORKERS as u64, default as u64) as usize;
    if !cpus.is_empty() && cpus.len() != count && !s.has_failed("count") {
        s.error("cpus", format!("{} CPUs for {count} workers; name one for each, or none", cpus.len()));
    }
    let slow_port_percent = s.int("slow_port_percent", 0..=100, 10) as u8;
    let answer_us = s.int("answer_us", 5..=10_000, 20) as u16;
    s.finish();
    Workers { count, cpus, slow_port_percent, answer_us }
}

fn underlay(mut s: Section<'_, '_>) -> Underlay {
    let addresses = s.list("addresses", MAX_ADDRESSES);
    if addresses.is_empty() && !s.has_failed("addresses") {
        s.error("addresses", "missing: name at least one underlay address of this host");
    }
    let underlay = Underlay {
        addresses,
        bifrost_port: s.int("bifrost_port", 1..=65535, 4794) as u16,
        vxlan_port: s.int("vxlan_port", 1..=65535, 4789) as u16,
        paths: s.int("paths", 1..=u64::from(MAX_PATHS), 4) as u8,
        source_port_base: s.int("source_port_base", 1024..=65535, 49152) as u16,
        mtu: s.int("mtu", 576..=65535, 1600) as u16,
        gso: s.optional("gso").unwrap_or(true),
        plain_paths: s.choice("plain_paths", &[("flow", PlainPaths::Flow), ("flowlet", PlainPaths::Flowlet)]),
        flowlet_gap: Duration::from_micros(s.int("flowlet_gap_us", 1..=1_000_000, 500)),
        port: s.choice("port", &[("udp", UnderlayPort::Udp), ("afxdp", UnderlayPort::Afxdp)]),
        xdp_mode: s
            .choice("xdp_mode", &[("auto", XdpMode::Auto), ("native", XdpMode::Native), ("generic", XdpMode::Generic)]),
        xdp_frames: s.int("xdp_frames", 64..=32768, 2048) as u32,
        control_dscp: s.int("control_dscp", DSCP, 0) as u8,
    };
    s.finish();
    underlay
}

fn transport(mut s: Section<'_, '_>, paths: u8) -> Transport {
    let d = Transport::default();
    let micros = |d: Duration| d.as_micros() as u64;
    let fixed = |us: Option<u64>| us.map_or(Auto::Auto, |us| Auto::Fixed(Duration::from_micros(us)));
    let transport = Transport {
        group_packets: s.int("group_packets", 1..=4096, d.group_packets.into()) as u16,
        bundle_bytes: s.int("bundle_bytes", 0..=8952, d.bundle_bytes.into()) as u16,
        spray_paths: s.int("spray_paths", 1..=u64::from(MAX_PATHS), d.spray_paths.min(paths).into()) as u8,
        stickiness: Duration::from_micros(s.int("stickiness_us", 0..=1_000_000, micros(d.stickiness))),
        initial_rto: Duration::from_micros(s.int("initial_rto_us", 100..=10_000_000, micros(d.initial_rto))),
        rto_floor: fixed(s.auto_int("rto_floor_us", 50..=10_000_000)),
        ack_delay: fixed(s.auto_int("ack_delay_us", 0..=65535)),
        ack_threshold: s.int("ack_threshold", 1..=256, d.ack_threshold.into()) as u16,
        give_up: s.auto_int("give_up_ms", 1..=1000).map_or(Auto::Auto, |ms| Auto::Fixed(Duration::from_millis(ms))),
        initial_window: s.int("initial_window", 1..=4096, d.initial_window.into()) as u16,
        max_window: s.int("max_window", 1..=4096, d.max_window.into()) as u16,
        setup_tries: s.int("setup_tries", 1..=20, d.setup_tries.into()) as u8,
        plain_retry: Duration::from_secs(s.int("plain_retry_s", 1..=86400, d.plain_retry.as_secs())),
        idle_reap: Duration::from_secs(s.int("idle_reap_s", 1..=86400, d.idle_reap.as_secs())),
        probe_interval: Duration::from_millis(s.int(
            "probe_interval_ms",
            1..=60_000,
            d.probe_interval.as_millis() as u64,
        )),
        congestion_control: s
            .choice("congestion_control", &[("swift", CongestionControl::Swift), ("none", CongestionControl::None)]),
        version_max: s.int("version_max", 1..=4, d.version_max.into()) as u8,
    };
    s.finish();
    transport
}

fn qos(mut s: Section<'_, '_>) -> Qos {
    let d = Qos::default();
    let link_mbit = s.optional_int("link_mbit", MBIT);
    let queue = Duration::from_millis(s.int("queue_ms", 1..=1000, d.queue.as_millis() as u64));
    s.finish();
    Qos { link_mbit, queue }
}

fn peer(mut s: Section<'_, '_>) -> Peer {
    let name = host_name(&mut s);
    let addresses = s.list("addresses", MAX_ADDRESSES);
    if addresses.is_empty() && !s.has_failed("addresses") {
        s.error("addresses", "missing: name at least one underlay address of the peer");
    }
    let transport = s.choice("transport", &[("auto", PeerTransport::Auto), ("plain", PeerTransport::Plain)]);
    s.finish();
    Peer { name, addresses, transport }
}

fn vpc(mut s: Section<'_, '_>) -> Vpc {
    let vpc = Vpc {
        vni: vni(&mut s),
        reliability: s
            .choice("reliability", &[("tcp", Reliability::Tcp), ("all", Reliability::All), ("off", Reliability::Off)]),
        ordering: s
            .choice("ordering", &[("flow", Ordering::Flow), ("strict", Ordering::Strict), ("off", Ordering::Off)]),
        weight: s.int("weight", WEIGHT, 1) as u8,
        gateway: s.list("gateway", MAX_ADDRESSES),
        dhcp: s.optional("dhcp").unwrap_or(false),
        dhcp_lease_s: s.int("dhcp_lease_s", 60..=31_536_000, 3600) as u32,
        ra_interval_s: s.int("ra_interval_s", 4..=1800, 600) as u16,
        dns: s.list("dns", MAX_ADDRESSES),
        domain: domain(&mut s),
        learned: s.list("learned", MAX_LEARNED),
        acl: security::acl(&mut s),
    };
    s.finish();
    vpc
}

/// Most prefixes in which a VPC's routes are learned.
const MAX_LEARNED: usize = 16;

/// Longest domain: with a name of 63 characters and a dot in front, it reaches the limit of 253 (RFC 1035, section
/// 2.3.4).
const LONGEST_DOMAIN: usize = 189;

fn domain(s: &mut Section<'_, '_>) -> Option<String> {
    let domain: String = s.optional("domain")?;
    let is_good = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_' || c == '.';
    if !is_dns_name(&domain) || domain.len() > LONGEST_DOMAIN || !domain.chars().all(is_good) {
        let form = "labels of 1 to 63 of a-z, 0-9, '-' and '_' with dots between";
        s.error("domain", format!("{domain:?} is not a domain: {form}, at most {LONGEST_DOMAIN} characters"));
    }
    Some(domain)
}

/// Whether all labels of a name have 1 to 63 characters.
pub(super) fn is_dns_name(name: &str) -> bool {
    name.split('.').all(|label| (1..=63).contains(&label.len()))
}

/// Ranges of a port's rate limits.
const MBIT: RangeInclusive<u64> = 1..=400_000;
const KPPS: RangeInclusive<u64> = 1..=1_000_000;
/// Weights of VPCs and ports.
const WEIGHT: RangeInclusive<u64> = 1..=100;
/// DSCPs (RFC 2474).
const DSCP: RangeInclusive<u64> = 0..=63;

fn port(mut s: Section<'_, '_>, workers: usize) -> Port {
    let name = port_name(&mut s);
    let vni = vni(&mut s);
    let security_groups = s.list("security_groups", MAX_GROUPS);
    let kind = s.choice("kind", &[("tap", PortKind::Tap), ("vhost-user", PortKind::VhostUser)]);
    let mac = s.required("mac");
    let addresses = s.list("addresses", MAX_ADDRESSES);
    if addresses.is_empty() && !s.has_failed("addresses") {
        s.error("addresses", "missing: name at least one address of the guest");
    }
    let routed = s.list("routed", MAX_ROUTED);
    let shared = s.list("shared", MAX_ADDRESSES);
    let metadata = s.optional_section("metadata").map(|table| Box::new(metadata::metadata(&name, table)));
    let mtu = s.int("mtu", 68..=65535, 1500) as u16;
    let limits = PortLimits {
        tx_mbit: s.optional_int("tx_mbit", MBIT),
        tx_kpps: s.optional_int("tx_kpps", KPPS),
        rx_mbit: s.optional_int("rx_mbit", MBIT),
        rx_kpps: s.optional_int("rx_kpps", KPPS),
    };
    let dscp = s.int_or_word("dscp", DSCP, "copy", Some(0)).map_or(Dscp::Copied, |dscp| Dscp::Fixed(dscp as u8));
    let weight = s.int("weight", WEIGHT, 1) as u8;
    let min_tx_mbit = s.optional_int("min_tx_mbit", MBIT);
    let rx_queue_kb = s.optional_int("rx_queue_kb", 1..=65_536).map(|kb| kb as u32);
    let mut port = Port {
        name,
        vni,
        kind,
        mac,
        addresses,
        routed,
        shared,
        metadata,
        mtu,
        netns: None,
        device: String::new(),
        default_gateway: None,
        queues: 1,
        socket: None,
        mode: VhostMode::default(),
        packed: false,
        slicing: false,
        merged: false,
        limits,
        dscp,
        weight,
        min_tx_mbit,
        rx_queue_kb,
        security_groups,
    };
    match kind {
        PortKind::VhostUser => machine(&mut s, &mut port),
        PortKind::Tap => container(&mut s, &mut port, workers),
    }
    s.finish();
    port
}

fn machine(s: &mut Section<'_, '_>, port: &mut Port) {
    let path: String = s.required("socket");
    check_socket(s, &path);
    port.socket = Some(PathBuf::from(path));
    port.mode = s.choice("mode", &[("server", VhostMode::Server), ("client", VhostMode::Client)]);
    port.packed = s.optional("packed").unwrap_or(true);
    port.slicing = s.optional("slicing").unwrap_or(true);
    port.merged = s.optional("merged").unwrap_or(true);
    port.queues = s.int("queues", 1..=MAX_QUEUE_PAIRS, 1) as usize;
}

fn container(s: &mut Section<'_, '_>, port: &mut Port, workers: usize) {
    port.netns = netns(s);
    // The default name of the device is that of the port.
    port.device = s.optional("device").unwrap_or_else(|| port.name.clone());
    if !s.has_failed("name") && !s.has_failed("device") {
        check_device(s, &port.device);
    }
    port.default_gateway = s.optional("default_gateway");
    s.refuse("slicing", "only with kind = \"vhost-user\": a TAP device hands over whole packets; remove it");
    s.refuse("merged", "only with kind = \"vhost-user\": a TAP device always gets merged segments; remove it");
    port.queues = s.int("queues", 1..=MAX_WORKERS as u64, workers as u64) as usize;
}

fn route(mut s: Section<'_, '_>) -> Route {
    let route = Route {
        vni: vni(&mut s),
        prefix: s.required("prefix"),
        peer: s.required("peer"),
        mac: s.required("mac"),
        mtu: s.optional_int("mtu", 68..=65535).map(|mtu| mtu as u16),
        name: if s.has("name") { Some(port_name(&mut s).into_boxed_str()) } else { None },
        security_groups: s.list("security_groups", MAX_GROUPS).into_boxed_slice(),
        shared: s.list("shared", MAX_ADDRESSES).into_boxed_slice(),
    };
    s.finish();
    route
}

fn peering(mut s: Section<'_, '_>) -> Peering {
    let peering = Peering { vni: vni(&mut s), prefix: s.required("prefix"), to_vni: vni_at(&mut s, "to_vni") };
    s.finish();
    peering
}

fn vni(s: &mut Section<'_, '_>) -> Vni {
    vni_at(s, "vni")
}

fn vni_at(s: &mut Section<'_, '_>, key: &'static str) -> Vni {
    let vni = s.required_int(key, 1..=u64::from(Vni::MAX)) as u32;
    // In range, or 1 after a reported error.
    Vni::new(vni).unwrap_or(Vni::MIN)
}

fn host_name(s: &mut Section<'_, '_>) -> String {
    name_of(s, "a-z, 0-9, '-' and '.'", |c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.')
}

/// The name of a port, or of another object with this alphabet.
fn port_name(s: &mut Section<'_, '_>) -> String {
    name_of(s, "a-z, A-Z, 0-9, '-', '_' and '.'", |c| c.is_ascii_alphanumeric() || "-_.".contains(c))
}

/// The field `name`; after an error: an empty string.
fn name_of(s: &mut Section<'_, '_>, alphabet: &str, allowed: impl Fn(char) -> bool) -> String {
    let name: String = s.required("name");
    if s.has_failed("name") {
        return name;
    }
    if !(1..=63).contains(&name.len()) || !name.chars().all(allowed) {
        s.error("name", format!("{name:?} is not 1 to 63 of {alphabet}"));
        return String::new();
    }
    name
}

fn netns(s: &mut Section<'_, '_>) -> Option<PathBuf> {
    let netns: String = s.optional("netns")?;
    if netns.starts_with('/') || s.has_failed("netns") {
        return Some(PathBuf::from(netns));
    }
    if netns.is_empty() || netns.contains('/') || netns == "." || netns == ".." {
        s.error("netns", format!("{netns:?} is neither a name under /run/netns nor an absolute path"));
    }
    Some(Path::new("/run/netns").join(netns))
}

fn check_socket(s: &Section<'_, '_>, socket: &str) {
    if !s.has_failed("socket") && !Path::new(&socket).is_absolute() {
        s.error("socket", format!("{socket:?} is not an absolute path"));
    }
    // The check for duplicates compares paths as text, and files beside a socket belong to the daemon.
    if Path::new(socket).components().any(|part| part == Component::ParentDir) {
        s.error("socket", format!("{socket:?} contains \"..\"; write the path without it"));
    }
    if Path::new(socket).file_name().is_some_and(|name| name.to_string_lossy().contains(RECORD)) {
        s.error("socket", format!("{socket:?}: names with \"{RECORD}\" are reserved for the daemon's records"));
    }
    if socket.len() > MAX_SOCKET_PATH {
        s.error("socket", format!("{} bytes; the path of a Unix socket has at most {MAX_SOCKET_PATH}", socket.len()));
    }
}

fn check_device(s: &Section<'_, '_>, device: &str) {
    let refused = |c: char| !c.is_ascii_graphic() || c == '/' || c == ':';
    if device.is_empty() || device == "." || device == ".." || device.chars().any(refused) {
        s.error("device", format!("{device:?} is not an interface name"));
    } else if device.len() > MAX_DEVICE_NAME {
        s.error(
            "device",
            format!("{device:?} has {} bytes; an interface's name has at most {MAX_DEVICE_NAME}", device.len()),
        );
    }
}
