//! Translates the configuration into the types of other crates.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bifrost_avs as avs;
use bifrost_control::config::{self, Auto, Config, CongestionControl};
use bifrost_datapath::fault::{Direction, Fault, Target};
use bifrost_datapath::{AfterGap, PeerConfig, PlainPaths};
use bifrost_port::afxdp::{self, AfxdpConfig};
use bifrost_port::tap::TapConfig;
use bifrost_port::udp::UdpConfig;
use bifrost_port::vhost::{self, VhostConfig};
use bifrost_rte as rte;
use bifrost_wire::Vni;
use ipnet::IpNet;

use crate::flow_log::configured;
use crate::health::Health;
use crate::metadata;
use crate::names::Names;
use crate::shared::{self, Holders};

// The MAC address that guests may not have is that of the switch's gateway.
const _: () = assert!(config::GATEWAY_MAC.as_u64() == avs::GATEWAY_MAC.as_u64());

/// The UDP sockets of the underlay.
pub(crate) fn udp(config: &Config) -> UdpConfig {
    UdpConfig {
        local: config.underlay.addresses.clone(),
        bifrost_port: config.underlay.bifrost_port,
        vxlan_port: config.underlay.vxlan_port,
        workers: config.workers.count as u16,
        gso: config.underlay.gso,
        ..UdpConfig::default()
    }
}

/// The AF_XDP sockets of the underlay.
pub(crate) fn afxdp(config: &Config) -> AfxdpConfig {
    AfxdpConfig {
        udp: udp(config),
        mode: match config.underlay.xdp_mode {
            config::XdpMode::Auto => afxdp::XdpMode::Auto,
            config::XdpMode::Native => afxdp::XdpMode::Native,
            config::XdpMode::Generic => afxdp::XdpMode::Generic,
        },
        frames: config.underlay.xdp_frames,
        mtu: config.underlay.mtu,
    }
}

/// The only worker that serves port number `id`, chosen by that number; `None` if all workers serve it.
pub(crate) fn home(config: &Config, port: &config::Port, id: u32) -> Option<u16> {
    config.is_served_by_one(port).then(|| (id % config.workers.count.max(1) as u32) as u16)
}

/// The tables of the first worker's switch, without routes. Those of other workers differ only in `workers.own`.
pub(crate) fn tables(config: &Config, names: &Names, health: &Health, holders: &Holders) -> avs::Tables {
    let vni = |v: config::Vni| Vni::new(v.value());
    let vpcs = config.vpcs.iter().filter_map(|v| {
        Some(avs::Vpc {
            vni: vni(v.vni)?,
            reliability: match v.reliability {
                config::Reliability::Tcp => avs::Reliability::Tcp,
                config::Reliability::All => avs::Reliability::All,
                config::Reliability::Off => avs::Reliability::Off,
            },
            ordering: match v.ordering {
                config::Ordering::Flow => avs::Ordering::Flow,
                config::Ordering::Strict => avs::Ordering::Strict,
                config::Ordering::Off => avs::Ordering::Off,
            },
            gateways: v.gateway.clone(),
            acl: v.acl.iter().enumerate().flat_map(|(n, rule)| acl_rules(rule, acl_rule(v, n))).collect(),
        })
    });
    let ports = config.ports.iter().filter_map(|p| {
        let id = names.port(&p.name)?;
        Some(avs::Port {
            id: avs::PortId(id),
            vni: vni(p.vni)?,
            mac: p.mac,
            addresses: p.addresses.iter().map(|a| a.addr()).collect(),
            routed: p.routed.clone(),
            mtu: p.mtu,
            groups: p.security_groups.iter().filter_map(|name| group(config, name)).collect(),
            home: home(config, p, id).map(avs::WorkerId),
        })
    });
    let peerings = config.peerings.iter();
    let peerings =
        peerings.filter_map(|p| Some(avs::Peering { vni: vni(p.vni)?, prefix: p.prefix, to: vni(p.to_vni)? }));
    let members = config.routes.detailed().flat_map(|r| {
        let member = move |name| Some(avs::Member { vni: vni(r.vni)?, group: group(config, name)?, prefix: r.prefix });
        r.security_groups.iter().filter_map(move |name| member(name))
    });
    let load_balancers = config.load_balancers.iter().filter_map(|b| load_balancer(config, b, health)).collect();
    let config::Sessions { total, per_port, flow_records, vectors } = config.sessions;
    avs::Tables {
        vpcs: vpcs.collect(),
        ports: ports.collect(),
        routes: Vec::new(),
        peerings: peerings.collect(),
        load_balancers,
        nat: nat(config, names),
        shared: shared_addresses(config, holders),
        metadata: metadata::ports(config).filter_map(|port| names.port(&port.name).map(avs::PortId)).collect(),
        leases: leases(config, names).collect(),
        ipv6_leases: ipv6_leases(config, names).collect(),
        learned: learned(config),
        zones: zones(config),
        groups: config.security_groups.iter().map(|g| security_group(config, g)).collect(),
        members: members.chain(shared_members(config, holders)).collect(),
        address_sets: config.address_sets.iter().map(|set| set.addresses.clone()).collect(),
        sessions: avs::SessionLimits { total, per_port },
        flows: avs::FlowLimits { records: flow_records, vectors },
        flow_logs: configured::wanted(config)
            .filter(|(_, log)| log.has_flows())
            .map(|(name, log)| flow_log_spec(config, name, log, names))
            .collect(),
        rule_log: config.flow_log.as_ref().filter(|log| log.has_rules()).map(rule_log),
        workers: avs::Workers { own: avs::WorkerId(0), count: config.workers.count as u16 },
    }
}

/// The VPCs whose routes are learned.
fn learned(config: &Config) -> Vec<(Vni, Vec<IpNet>)> {
    let learning = config.vpcs.iter().filter(|vpc| !vpc.learned.is_empty());
    learning.filter_map(|vpc| Some((Vni::new(vpc.vni.value())?, vpc.learned.clone()))).collect()
}

fn load_balancer(config: &Config, balancer: &config::LoadBalancer, health: &Health) -> Option<avs::LoadBalancer> {
    // Results of former checks are stale if this host no longer checks the backends.
    let is_checked = config.ports.iter().any(|port| balancer.asks_from(port));
    let backend = |b: &config::Backend| {
        let target = (balancer.name.clone(), SocketAddr::new(b.address, b.port));
        let works = !is_checked || health.get(&target).copied().unwrap_or(true);
        avs::Backend { address: b.address, port: b.port, weight: if works { b.weight } else { 0 } }
    };
    Some(avs::LoadBalancer {
        vni: Vni::new(balancer.vni.value())?,
        address: balancer.address,
        port: balancer.port,
        protocol: transport_of(balancer.protocol),
        affinity: match balancer.affinity {
            config::Affinity::Connection => avs::Affinity::Connection,
            config::Affinity::Client => avs::Affinity::Client,
        },
        backends: balancer.backends.iter().map(backend).collect(),
    })
}

/// Shared addresses and their holders.
fn shared_addresses(config: &Config, holders: &Holders) -> Vec<avs::SharedAddress> {
    let shared = shared::vnics(config).into_iter().filter_map(|((vni, address), vnics)| {
        let holder = holders.get(&(vni, address)).copied().filter(|mac| vnics.contains(mac));
        Some(avs::SharedAddress { vni: Vni::new(vni.value())?, address, vnics: vnics.into_iter().collect(), holder })
    });
    shared.collect()
}

/// Shared addresses that vNICs of other hosts hold, as members of these vNICs' security groups.
fn shared_members(config: &Config, holders: &Holders) -> Vec<avs::Member> {
    let mut members = Vec::new();
    for ((vni, address), mac) in holders {
        let of_vnic = config.routes.of_mac(*vni, *mac);
        let groups = of_vnic.flat_map(|route| &route.security_groups).filter_map(|name| group(config, name));
        let member = |group| Some(avs::Member { vni: Vni::new(vni.value())?, group, prefix: IpNet::from(*address) });
        members.extend(groups.filter_map(member));
    }
    members
}

/// DHCPv4 leases: the first IPv4 address of each port, and a gateway, if possible the configured one or one in its
/// subnet.
fn leases(config: &Config, names: &Names) -> impl Iterator<Item = avs::Lease> {
    let v4 = |addr: &IpAddr| if let IpAddr::V4(addr) = addr { Some(*addr) } else { None };
    config.ports.iter().filter_map(move |port| {
        let vpc = config.vpc(port.vni).filter(|vpc| vpc.dhcp)?;
        let (net, address) = port.addresses.iter().find_map(|net| Some((net, v4(&net.addr())?)))?;
        let gateways = || vpc.gateway.iter().filter_map(v4);
        let chosen = || gateways().find(|gateway| port.default_gateway == Some(IpAddr::V4(*gateway)));
        let near = || gateways().find(|gateway| net.contains(&IpAddr::V4(*gateway)));
        let gateway = chosen().or_else(near).or_else(|| gateways().next())?;
        let named = vpc.dns.iter().filter_map(v4).collect();
        Some(avs::Lease {
            port: avs::PortId(names.port(&port.name)?),
            address,
            prefix_len: net.prefix_len(),
            gateway,
            dns: if is_name_server(vpc) { vec![gateway] } else { named },
            domain: vpc.domain.clone(),
            mtu: port.mtu,
            seconds: vpc.dhcp_lease_s,
        })
    })
}

/// IPv6 leases: the addresses of each port, except link-local ones, in VPCs with an IPv6 gateway.
fn ipv6_leases(config: &Config, names: &Names) -> impl Iterator<Item = avs::Ipv6Lease> {
    let v6 = |addr: &IpAddr| if let IpAddr::V6(addr) = addr { Some(*addr) } else { None };
    config.ports.iter().filter_map(move |port| {
        let vpc = config.vpc(port.vni).filter(|vpc| vpc.dhcp && vpc.gateway.iter().any(IpAddr::is_ipv6))?;
        let own = port.addresses.iter().filter_map(|net| Some((v6(&net.addr())?, net.prefix_len())));
        let addresses: Vec<_> = own.filter(|(address, _)| !address.is_unicast_link_local()).collect();
        if addresses.is_empty() {
            return None;
        }
        let servers = if is_name_server(vpc) { &vpc.gateway } else { &vpc.dns };
        Some(avs::Ipv6Lease {
            port: avs::PortId(names.port(&port.name)?),
            addresses,
            dns: servers.iter().filter_map(v6).collect(),
            domain: vpc.domain.clone(),
            mtu: port.mtu,
            seconds: vpc.dhcp_lease_s,
            interval_s: vpc.ra_interval_s,
        })
    })
}

/// Whether the gateways are announced to guests as DNS servers.
fn is_name_server(vpc: &config::Vpc) -> bool {
    vpc.domain.is_some() && vpc.dns.is_empty()
}

/// The names of guests, for each VPC with a domain: from ports for guests of this host, from routes for those of other
/// hosts.
fn zones(config: &Config) -> Vec<avs::Zone> {
    let zone = |vpc: &config::Vpc| {
        let (vni, domain) = (Vni::new(vpc.vni.value())?, vpc.domain.clone()?);
        Some((vpc.vni, avs::Zone { vni, domain, names: Vec::new(), subnets: Vec::new() }))
    };
    let mut zones: BTreeMap<_, _> = config.vpcs.iter().filter_map(zone).collect();
    if zones.is_empty() {
        return Vec::new();
    }
    for port in &config.ports {
        let Some(zone) = zones.get_mut(&port.vni) else { continue };
        zone.names.extend(port.addresses.iter().map(|net| (port.name.clone(), net.addr())));
        zone.subnets.extend(port.addresses.iter().map(IpNet::trunc));
    }
    for route in config.routes.detailed() {
        let (Some(name), Some(zone)) = (&route.name, zones.get_mut(&route.vni)) else { continue };
        zone.names.push((name.to_string(), route.prefix.addr()));
    }
    let tidy = |mut zone: avs::Zone| {
        zone.subnets.sort_unstable();
        zone.subnets.dedup();
        zone
    };
    zones.into_values().map(tidy).collect()
}

fn nat(config: &Config, names: &Names) -> avs::Nat {
    let nat = &config.nat;
    let port = |name: &str| names.port(name).map(avs::PortId);
    let vni = |vni: config::Vni| Vni::new(vni.value());
    let sources = nat.sources.iter().filter_map(|s| {
        let (vni, uplink) = (vni(s.vni)?, port(&s.uplink)?);
        Some(avs::SourceNat {
            vni,
            uplink,
            addresses: s.addresses.clone(),
            ports: s.ports,
            per_guest: s.ports_per_guest,
        })
    });
    let floating = nat.floating.iter().filter_map(|f| {
        let (vni, uplink) = (vni(f.vni)?, port(&f.uplink)?);
        Some(avs::FloatingIp { vni, uplink, outside: f.address, inside: f.inside })
    });
    let forwards = nat.forwards.iter().filter_map(|f| {
        Some(avs::PortForward {
            vni: vni(f.vni)?,
            uplink: port(&f.uplink)?,
            protocol: transport_of(f.protocol),
            outside: (f.address, f.port),
            inside: (f.inside, f.inside_port),
        })
    });
    avs::Nat {
        uplinks: nat.uplinks.iter().filter_map(|uplink| port(&uplink.port)).collect(),
        sources: sources.collect(),
        floating: floating.collect(),
        forwards: forwards.collect(),
    }
}

fn transport_of(protocol: config::BalancedProtocol) -> avs::Transport {
    match protocol {
        config::BalancedProtocol::Tcp => avs::Transport::Tcp,
        config::BalancedProtocol::Udp => avs::Transport::Udp,
    }
}

fn rule_log(log: &config::FlowLog) -> avs::RuleLogSpec {
    let interval_ns = u64::try_from(log.rules_interval.as_nanos()).unwrap_or(u64::MAX);
    avs::RuleLogSpec { records_per_s: log.rules_per_s, interval_ns }
}

fn flow_log_spec(config: &Config, name: &str, log: &config::FlowLog, names: &Names) -> avs::FlowLogSpec {
    let ns = |d: std::time::Duration| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX);
    avs::FlowLogSpec {
        name: name.into(),
        ports: configured::ports(config, log).filter_map(|name| names.port(name)).map(avs::PortId).collect(),
        accepted: log.accepted,
        rejected: log.rejected,
        one_in: log.one_in,
        flows: log.flows,
        active_ns: ns(log.active_timeout),
        idle_ns: ns(log.idle_timeout),
    }
}

fn security_group(config: &Config, group: &config::SecurityGroup) -> avs::SecurityGroup {
    let of = |direction, rules: &[config::Rule]| {
        let all = rules.iter().enumerate().flat_map(|(n, rule)| {
            let log = rule.log.then(|| Arc::new(group_rule(group, direction, n)));
            alternatives(config, rule).into_iter().map(move |alternative| (alternative, log.clone()))
        });
        let rule = move |((pattern, remote), log)| avs::GroupRule { direction, pattern, remote, log };
        all.map(rule).collect::<Vec<_>>()
    };
    let mut rules = of(avs::Direction::Ingress, &group.ingress);
    rules.extend(of(avs::Direction::Egress, &group.egress));
    avs::SecurityGroup { rules, restricts_egress: group.restricts_egress }
}

/// The name in logs of the rule at `index` in a group's list.
pub(crate) fn group_rule(group: &config::SecurityGroup, direction: avs::Direction, index: usize) -> avs::RuleName {
    let number = u32::try_from(index + 1).unwrap_or(u32::MAX);
    avs::RuleName { owner: avs::RuleOwner::Group(group.name.clone()), direction, number }
}

/// The same for the rule at `index` of a VPC's ACL.
pub(crate) fn acl_rule(vpc: &config::Vpc, index: usize) -> Option<avs::RuleName> {
    let number = u32::try_from(index + 1).unwrap_or(u32::MAX);
    let direction = direction_of(vpc.acl.get(index)?.direction);
    Some(avs::RuleName { owner: avs::RuleOwner::Acl(Vni::new(vpc.vni.value())?), direction, number })
}

fn direction_of(direction: config::Direction) -> avs::Direction {
    match direction {
        config::Direction::Ingress => avs::Direction::Ingress,
        config::Direction::Egress => avs::Direction::Egress,
    }
}

/// The alternatives of a group's rule: one for each combination of its conditions.
pub(crate) fn alternatives(config: &Config, rule: &config::Rule) -> Vec<(avs::Pattern, avs::Remote)> {
    let remote = |remote: &config::Remote| match remote {
        config::Remote::Group(name) => group(config, name).map(avs::Remote::Group),
        config::Remote::Set(name) => set(config, name).map(avs::Remote::Set),
    };
    let is_about_all = rule.remotes.is_empty() || !(rule.from.is_empty() && rule.to.is_empty());
    let by_prefix = if is_about_all { patterns(rule) } else { Vec::new() };
    let mut all: Vec<_> = by_prefix.into_iter().map(|pattern| (pattern, avs::Remote::Anybody)).collect();
    let rest = config::Rule { from: Vec::new(), to: Vec::new(), ..rule.clone() };
    for remote in rule.remotes.iter().filter_map(remote) {
        all.extend(patterns(&rest).into_iter().map(|pattern| (pattern, remote)));
    }
    all
}

/// An address set's index in the tables.
fn set(config: &Config, name: &str) -> Option<avs::AddressSetId> {
    let index = config.address_sets.iter().position(|s| s.name == name)?;
    u16::try_from(index).ok().map(avs::AddressSetId)
}

/// A security group's index in the tables.
fn group(config: &Config, name: &str) -> Option<avs::GroupId> {
    let index = config.security_groups.iter().position(|g| g.name == name)?;
    u16::try_from(index).ok().map(avs::GroupId)
}

fn acl_rules(rule: &config::AclRule, name: Option<avs::RuleName>) -> impl Iterator<Item = avs::AclRule> {
    let direction = direction_of(rule.direction);
    let allow = rule.action == config::Action::Allow;
    let log = name.filter(|_| rule.rule.log).map(Arc::new);
    patterns(&rule.rule).into_iter().map(move |pattern| avs::AclRule { direction, pattern, allow, log: log.clone() })
}

/// The alternatives of a rule: one for each combination of its prefixes, protocols and port ranges.
pub(crate) fn patterns(rule: &config::Rule) -> Vec<avs::Pattern> {
    fn or_any<T: Clone>(items: &[T]) -> Vec<Option<T>> {
        if items.is_empty() { vec![None] } else { items.iter().cloned().map(Some).collect() }
    }
    let mut patterns = Vec::new();
    for src in or_any(&rule.from) {
        for dst in or_any(&rule.to) {
            for protocol in or_any(&rule.protocols) {
                for ports in or_any(&rule.ports) {
                    let any = avs::Pattern::default();
                    let dst_ports = ports.unwrap_or(any.dst_ports.clone());
                    patterns.push(avs::Pattern { src, dst, protocol, dst_ports, ..any });
                }
            }
        }
    }
    patterns
}

/// In which order packets of a port are delivered, and whether they are carried reliably.
pub(crate) type Policy = (rte::Ordering, bool);

/// The policy of a VPC's ports.
pub(crate) fn policy(vpc: &config::Vpc) -> Policy {
    let ordering = match vpc.ordering {
        config::Ordering::Flow => rte::Ordering::Flow,
        config::Ordering::Strict => rte::Ordering::Strict,
        config::Ordering::Off => rte::Ordering::Off,
    };
    (ordering, vpc.is_reliable())
}

/// The settings of the transport engine.
pub(crate) fn transport(config: &Config) -> rte::Config {
    let t = &config.transport;
    let ns = |d: std::time::Duration| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX);
    let auto = |a: Auto<std::time::Duration>| a.fixed().map(ns);
    rte::Config {
        version_max: t.version_max,
        group_packets: t.group_packets,
        spray_paths: t.spray_paths,
        stickiness_ns: ns(t.stickiness),
        initial_rto_ns: ns(t.initial_rto),
        rto_floor_ns: auto(t.rto_floor),
        ack_delay_ns: auto(t.ack_delay),
        ack_threshold: t.ack_threshold,
        give_up_after_ns: auto(t.give_up),
        initial_window: t.initial_window,
        max_window: t.max_window,
        setup_tries: t.setup_tries,
        plain_retry_ns: ns(t.plain_retry),
        idle_reap_ns: ns(t.idle_reap),
        probe_interval_ns: ns(t.probe_interval),
        congestion_control: match t.congestion_control {
            CongestionControl::Swift => rte::CcKind::Swift,
            CongestionControl::None => rte::CcKind::None,
        },
        ..rte::Config::default()
    }
}

/// The longest datagram for a bundle of packets, UDP payload in bytes: it fits the underlay's MTU, over IPv6 too.
pub(crate) fn bundle_bytes(config: &Config) -> u16 {
    config.transport.bundle_bytes.min(config.underlay.mtu.saturating_sub(48))
}

/// How plain VXLAN selects paths.
pub(crate) fn plain_paths(config: &Config) -> PlainPaths {
    PlainPaths {
        after_gap: match config.underlay.plain_paths {
            config::PlainPaths::Flow => AfterGap::Home,
            config::PlainPaths::Flowlet => AfterGap::Random,
        },
        gap_ns: u64::try_from(config.underlay.flowlet_gap.as_nanos()).unwrap_or(u64::MAX),
    }
}

/// A peer for the data path.
pub(crate) fn peer(config: &Config, peer: &config::Peer, id: u32) -> PeerConfig {
    PeerConfig {
        id,
        addresses: peer.addresses.clone(),
        paths: config.paths(peer).map(|p| (p.local, p.remote)).collect(),
        source_port_base: config.underlay.source_port_base,
        bifrost_port: config.underlay.bifrost_port,
        vxlan_port: config.underlay.vxlan_port,
        plain: peer.transport == config::PeerTransport::Plain,
    }
}

/// A port's TAP device, with a queue for each worker that serves it.
pub(crate) fn tap(config: &Config, port: &config::Port) -> TapConfig {
    TapConfig {
        device: port.device.clone(),
        netns: port.netns.as_ref().map(|p| p.display().to_string()),
        mac: port.mac.octets(),
        addresses: port.addresses.iter().map(|a| (a.addr(), a.prefix_len())).collect::<Vec<(IpAddr, u8)>>(),
        mtu: port.mtu,
        default_gateway: port.default_gateway,
        queues: if config.is_served_by_one(port) { 1 } else { port.queues as u16 },
        ..TapConfig::default()
    }
}

/// A port's vhost-user socket.
pub(crate) fn vhost(port: &config::Port, config: &Config) -> VhostConfig {
    let socket = port.socket.clone().unwrap_or_default();
    let record = record(port, &socket, &config.control.socket);
    VhostConfig {
        name: port.name.clone(),
        socket,
        record: Some(record),
        message_rate: vhost::MESSAGE_RATE,
        mode: match port.mode {
            config::VhostMode::Server => vhost::Mode::Server,
            config::VhostMode::Client => vhost::Mode::Client,
        },
        mac: port.mac.octets(),
        mtu: port.mtu,
        queues: port.queues as u16,
        packed: port.packed,
        slicing: port.slicing,
        merged: port.merged,
    }
}

/// The path of the record of a machine's in-flight buffers: beside its socket, or beside the control socket if other
/// users, such as the machine's own, can write to the socket's directory.
fn record(port: &config::Port, socket: &Path, control: &Path) -> PathBuf {
    let is_ours = |directory: &Path| {
        let metadata = std::fs::symlink_metadata(directory);
        metadata.is_ok_and(|m| m.is_dir() && m.uid() == rustix::process::geteuid().as_raw() && m.mode() & 0o022 == 0)
    };
    match control.parent() {
        Some(run) if !socket.parent().is_some_and(is_ours) => run.join(format!("{}.inflight", port.name)),
        _ => socket.with_added_extension("inflight"),
    }
}

/// The name of a kind of port.
pub(crate) fn kind(kind: config::PortKind) -> &'static str {
    match kind {
        config::PortKind::Tap => "tap",
        config::PortKind::VhostUser => "vhost-user",
    }
}

/// A fault for the data path; `None` if it names a port or peer that does not exist.
pub(crate) fn fault(id: u32, spec: &bifrost_control::api::FaultSpec, names: &Names) -> Option<Fault> {
    use bifrost_control::api::{Direction as ApiDirection, FaultTarget};
    let ppm = |percent: f64| (percent * 10_000.0).round().clamp(0.0, 1_000_000.0) as u32;
    let target = match &spec.target {
        FaultTarget::Port { name } => Target::Port { owner: names.port(name)? },
        FaultTarget::Peer { name, path } => Target::Path { peer: names.peer(name)?, path: *path },
    };
    Some(Fault {
        id,
        target,
        direction: match spec.direction {
            ApiDirection::Rx => Direction::Rx,
            ApiDirection::Tx => Direction::Tx,
        },
        down: spec.down,
        loss_ppm: ppm(spec.loss_percent),
        delay_ns: spec.delay_us * 1000,
        jitter_ns: spec.jitter_us * 1000,
        reorder_ppm: ppm(spec.reorder_percent),
        duplicate_ppm: ppm(spec.duplicate_percent),
        corrupt_ppm: ppm(spec.corrupt_percent),
    })
}
