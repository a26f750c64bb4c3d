//! Traces: what would happen to a described packet, in words.

#[cfg(test)]
mod described_tests;
mod rules;

use std::collections::BTreeMap;
use std::net::IpAddr;

use bifrost_avs::{Action, By, Check, Direction, DropReason, GATEWAY_MAC, GuestTrace, Permission};
use bifrost_control::api::{ApiError, Trace, TraceSpec, TraceStep, TraceVerdict};
use bifrost_control::config::{Config, Port};
use bifrost_control::{counters, described};
use bifrost_datapath::trace::{self, Carriage, End, Step};
use bifrost_port::{clock, steer};
use bifrost_rte::Time;
use bifrost_wire::{Mac, Vni};

use crate::daemon::{Daemon, State};
use crate::translate;

impl Daemon {
    /// Traces a packet on the worker that would process it.
    pub(crate) fn trace_packet(&self, spec: &TraceSpec) -> Result<Trace, ApiError> {
        let state = self.state();
        let to = spec.to.ok_or_else(|| ApiError::bad_request("give the destination").at("to"))?;
        match &spec.port {
            Some(name) => from_port(&state, spec, name, to),
            None => from_peer(&state, spec, to),
        }
    }
}

fn from_port(state: &State, spec: &TraceSpec, name: &str, to: IpAddr) -> Result<Trace, ApiError> {
    let config = &state.config;
    let (Some(owner), Some(port)) = (state.names.port(name), config.ports.iter().find(|p| p.name == name)) else {
        let known: Vec<&str> = config.ports.iter().map(|p| p.name.as_str()).collect();
        let error = ApiError::not_found(format!("no port named {name:?}")).at("port");
        return Err(error.hint(format!("known ports: {}", known.join(", "))));
    };
    let own = port.addresses.iter().map(|net| net.addr()).find(|address| address.is_ipv4() == to.is_ipv4());
    let Some(from) = spec.from.or(own) else {
        return Err(ApiError::bad_request(format!("port {name} has no address of that family")).at("to"));
    };
    let vni = Vni::new(port.vni.value()).ok_or_else(|| ApiError::internal("VNI out of range"))?;
    let source = mac(spec.from_mac.as_deref(), "from_mac")?.unwrap_or(port.mac);
    let known = mac(spec.to_mac.as_deref(), "to_mac")?;
    // As the guest resolves it: the destination itself if it is on-link, otherwise the gateway.
    let on_link = port.addresses.iter().any(|net| net.contains(&to));
    let routed = !on_link && config.vpc(port.vni).is_some_and(|vpc| !vpc.gateway.is_empty());
    let destination = match known {
        None if routed => Some(GATEWAY_MAC),
        None => on_worker(state, 0, move |w| w.core_mut().resolve(vni, to))?,
        known => known,
    };
    let frame = match destination {
        Some(mac) => described::frame(spec, from, to, (source, mac))?,
        None => described::question(from, to, source),
    };
    let mut packet = describe(spec, from, to);
    if destination.is_none() {
        packet = format!("the guest's ARP or ND request for {to}, before it can send {packet}");
    }
    let pair = (source, destination.unwrap_or(Mac::BROADCAST));
    let worker = worker_of(state, Some(port), pair);
    let mut trace = on_worker(state, worker, move |w| {
        let core = w.core_mut();
        core.advance(Time(clock::monotonic_ns()));
        core.trace_from_guest(owner, &frame)
    })?;
    let mut sender = owner;
    // A packet through an uplink back to this host is handed over twice.
    for _ in 0..2 {
        let End::HandedOver { worker, port, frame } = trace.end.clone() else { break };
        let rest = on_worker(state, usize::from(worker), move |w| {
            let core = w.core_mut();
            core.advance(Time(clock::monotonic_ns()));
            core.trace_from_worker(sender, port, &frame)
        })?;
        sender = port;
        trace.steps.push(Step::HandedOver { worker, port });
        trace.steps.extend(rest.steps);
        trace.end = rest.end;
    }
    Ok(Words { state, vni: port.vni.value(), to }.trace(packet, &trace))
}

fn from_peer(state: &State, spec: &TraceSpec, to: IpAddr) -> Result<Trace, ApiError> {
    let missing =
        || ApiError::bad_request("give the sender: a peer's address, a VNI and the guest's address").at("from_peer");
    let (peer, number, from) = (spec.from_peer.ok_or_else(missing)?, spec.vni.ok_or_else(missing)?, spec.from);
    let from = from.ok_or_else(missing)?;
    let vni = Vni::new(number).ok_or_else(|| ApiError::bad_request("a VNI has 24 bits").at("vni"))?;
    let resolve = |address| on_worker(state, 0, move |w| w.core_mut().resolve(vni, address));
    let (sender, receiver) = (resolve(from)?, resolve(to)?);
    let port = state.config.ports.iter().find(|p| p.vni.value() == number && Some(p.mac) == receiver);
    // On-link packets have the sender's MAC address, routed ones the gateway's.
    let direct = port.is_none_or(|p| p.addresses.iter().any(|net| net.contains(&from)));
    let source = mac(spec.from_mac.as_deref(), "from_mac")?
        .or(if direct { sender } else { Some(GATEWAY_MAC) })
        .unwrap_or(Mac([2, 0, 0, 0, 0, 0]));
    let destination = mac(spec.to_mac.as_deref(), "to_mac")?.or(receiver).unwrap_or(Mac([2, 0, 0, 0, 0, 0]));
    let frame = described::frame(spec, from, to, (source, destination))?;
    let worker = worker_of(state, port, (sender.unwrap_or(source), destination));
    let trace = on_worker(state, worker, move |w| {
        let core = w.core_mut();
        core.advance(Time(clock::monotonic_ns()));
        core.trace_from_peer(peer, vni, &frame)
    })?;
    let packet = format!("{}, from {peer} in VNI {number}", describe(spec, from, to));
    Ok(Words { state, vni: number, to }.trace(packet, &trace))
}

/// The worker that processes packets between two vNICs, one of which is behind `port`.
fn worker_of(state: &State, port: Option<&Port>, (a, b): (Mac, Mac)) -> usize {
    let home = port.and_then(|port| translate::home(&state.config, port, state.names.port(&port.name)?));
    let by_pair = || steer::worker_of_pair(a.octets(), b.octets(), state.workers.len() as u16);
    usize::from(home.unwrap_or_else(by_pair))
}

fn on_worker<T: Send + 'static>(
    state: &State,
    worker: usize,
    work: impl FnOnce(&mut bifrost_datapath::Worker<bifrost_port::HostUnderlay>) -> T + Send + 'static,
) -> Result<T, ApiError> {
    let worker = state.workers.get(worker).ok_or_else(|| ApiError::unavailable("the daemon is ending"))?;
    worker.run(work).map_err(|e| ApiError::unavailable(e.to_string()).hint("see the daemon's log"))
}

fn mac(text: Option<&str>, field: &str) -> Result<Option<Mac>, ApiError> {
    text.map(|text| text.parse().map_err(|_| ApiError::bad_request(format!("{text:?} is not a MAC address")).at(field)))
        .transpose()
}

/// A packet in one line.
fn describe(spec: &TraceSpec, from: IpAddr, to: IpAddr) -> String {
    let address = |address: IpAddr, port: u16| std::net::SocketAddr::new(address, port).to_string();
    let what = match (spec.tcp, spec.udp) {
        (Some((source, destination)), _) => {
            let flags = if spec.flags.is_empty() { "syn".to_owned() } else { spec.flags.join(",") };
            format!("TCP [{flags}] from {} to {}", address(from, source), address(to, destination))
        }
        (None, Some((source, destination))) => {
            format!("UDP from {} to {}", address(from, source), address(to, destination))
        }
        (None, None) => format!("a ping from {from} to {to}"),
    };
    let size = spec.size_bytes.map_or(String::new(), |size| format!(", {size} bytes"));
    let df = if spec.dont_fragment { ", DF set" } else { "" };
    what + &size + df
}

/// The context for describing a trace.
struct Words<'a> {
    state: &'a State,
    vni: u32,
    to: IpAddr,
}

/// A step in words, with `details` as name-value pairs.
fn step<const N: usize>(stage: &str, passes: bool, what: String, details: [(&str, String); N]) -> TraceStep {
    let details = details.into_iter().map(|(name, value)| (name.to_owned(), value)).collect::<BTreeMap<_, _>>();
    TraceStep { stage: stage.to_owned(), passes, what, details }
}

impl Words<'_> {
    fn trace(&self, packet: String, trace: &trace::Trace) -> Trace {
        let steps = trace.steps.iter().flat_map(|step| self.step(step)).collect();
        let (verdict, what, counter) = self.end(&trace.end);
        let advice = counter.as_deref().and_then(counters::meaning).map_or("", |meaning| meaning.advice).to_owned();
        Trace { packet, worker: u32::from(trace.worker), steps, verdict, what, counter, advice }
    }

    fn end(&self, end: &End) -> (TraceVerdict, String, Option<String>) {
        match end {
            End::Sent { peer } => (TraceVerdict::Sent, format!("it is sent to {}", self.peer(*peer)), None),
            End::Delivered { port } => {
                (TraceVerdict::Delivered, format!("it is delivered to the guest of {}", self.port(*port)), None)
            }
            End::HandedOver { worker, port, .. } => {
                let what = format!("worker {worker} delivers it to the guest of {}", self.port(*port));
                (TraceVerdict::Delivered, what, None)
            }
            End::Copied { to } => {
                (TraceVerdict::Sent, format!("a copy is sent to each of {to} vNICs of its group"), None)
            }
            End::Asked { vni, address } => {
                (TraceVerdict::Sent, format!("it waits until the route to {address} in VNI {vni} is learned"), None)
            }
            End::Answered => (TraceVerdict::Answered, "the switch answers it itself".to_owned(), None),
            End::Dropped { counter, port } => {
                let meaning = counters::meaning(counter).map_or(String::new(), |m| format!(": {}", m.what));
                let at = port.map_or(String::new(), |port| format!(" at {}", self.port(port)));
                (TraceVerdict::Dropped, format!("it is dropped{at}{meaning}"), Some(counter.clone()))
            }
        }
    }

    fn step(&self, of: &Step) -> Vec<TraceStep> {
        let one = match of {
            Step::Peer(Some(peer)) => {
                let name = self.peer(*peer);
                step("underlay", true, format!("{name} has that address"), [("peer", name)])
            }
            Step::Peer(None) => step("underlay", false, "no peer has that address".to_owned(), []),
            Step::Parsed(Ok(parsed)) => {
                let size = parsed.end - u32::from(parsed.l3);
                let what = format!("{size} bytes, {} -> {}", parsed.src_mac, parsed.dst_mac);
                let macs = [("from_mac", parsed.src_mac.to_string()), ("to_mac", parsed.dst_mac.to_string())];
                let [from, to] = macs;
                step("parse", true, what, [from, to, ("flow", format!("{:#010x}", parsed.flow_hash))])
            }
            Step::Parsed(Err(reason)) => step("parse", false, format!("malformed: {reason}"), []),
            Step::Faults { at_port, ids } => {
                let ids = ids.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
                let location = if *at_port { "at the port" } else { "on the paths" };
                step("fault", true, format!("injected faults {location} may affect it: {ids}"), [("ids", ids.clone())])
            }
            Step::FromGuest(trace) => return self.of_guest(trace),
            Step::FromUnderlay(trace) => {
                let found = match (trace.port, trace.verdict.action) {
                    (Some(port), _) => {
                        let name = self.port(port.0);
                        step("route", true, format!("for {name}"), [("port", name)])
                    }
                    (None, Action::Drop(reason)) => refused("route", reason),
                    (None, _) => return Vec::new(),
                };
                let checks = trace.checks.iter().map(|check| self.check(check));
                let size = trace.verdict.drop_reason() == Some(DropReason::PathMtu);
                return std::iter::once(found).chain(checks).chain(size.then(too_large)).collect();
            }
            Step::HandedOver { worker, port } => {
                let what = format!("worker {worker} serves {}, and continues with it", self.port(*port));
                step("worker", true, what, [("worker", worker.to_string()), ("port", self.port(*port))])
            }
            Step::FromWorker(trace) => return trace.checks.iter().map(|check| self.check(check)).collect(),
            Step::Limit { port, is_tx: true, wait_ns, .. } => {
                let wait_us = wait_ns.div_ceil(1000);
                let what = match wait_us {
                    0 => "within the guest's send limit".to_owned(),
                    _ => format!("above the guest's send limit: it waits {wait_us} us in the guest's queue"),
                };
                step("limit", true, what, [("port", self.port(*port)), ("wait_us", wait_us.to_string())])
            }
            Step::Limit { port, passes, .. } => {
                let what = if *passes { "within the guest's receive limit" } else { "above the guest's receive limit" };
                step("limit", *passes, what.to_owned(), [("port", self.port(*port))])
            }
            Step::Waiting { packets } => {
                let what = format!("{packets} earlier packets of the guest wait for a window");
                step("limit", true, what, [("waiting_packets", packets.to_string())])
            }
            Step::Cut { pieces, mtu } => {
                let what = format!("segmented into {pieces} packets of at most {mtu} bytes");
                step("size", true, what, [("pieces", pieces.to_string()), ("mtu_bytes", mtu.to_string())])
            }
            Step::Rewritten { destination } => {
                let what = format!("{GATEWAY_MAC} -> {destination}, TTL or hop limit decremented");
                step(
                    "rewrite",
                    true,
                    what,
                    [("from_mac", GATEWAY_MAC.to_string()), ("to_mac", destination.to_string())],
                )
            }
            Step::Carried { peer, how, connection } => return vec![self.carried(*peer, *how, connection.as_ref())],
            Step::Outer(lanes) => return lanes.iter().map(lane).collect(),
            Step::Room { port, hidden, capacity } => {
                let what = format!("{hidden} of {capacity} receive buffers hold packets that wait for earlier packets");
                let details = [("waiting_packets", hidden.to_string()), ("capacity_packets", capacity.to_string())];
                let [waiting, capacity] = details;
                step("room", true, what, [waiting, capacity, ("port", self.port(*port))])
            }
        };
        vec![one]
    }

    fn of_guest(&self, trace: &GuestTrace) -> Vec<TraceStep> {
        if let Err(reason) = trace.admitted {
            return vec![refused("admission", reason)];
        }
        let mut steps = vec![step("admission", true, "its source addresses belong to the guest".to_owned(), [])];
        let dropped = trace.verdict.drop_reason();
        match (trace.hop, dropped) {
            (Some(hop), None) => steps.push(self.hop(&hop)),
            (Some(hop), Some(reason)) if !trace.checks.is_empty() || reason == DropReason::PathMtu => {
                steps.push(self.hop(&hop));
            }
            (_, Some(reason)) => steps.push(refused("route", reason)),
            (None, None) => steps.push(step("route", true, "to the switch itself".to_owned(), [])),
        }
        steps.extend(trace.checks.iter().map(|check| self.check(check)));
        if dropped == Some(DropReason::PathMtu) {
            steps.push(too_large());
        } else if matches!(trace.verdict.action, Action::Answer { .. }) && trace.hop.is_some() {
            let what = "larger than the path MTU, must not be fragmented: the guest is notified by ICMP";
            steps.push(step("size", false, what.to_owned(), []));
        }
        steps
    }

    fn hop(&self, hop: &bifrost_avs::Hop) -> TraceStep {
        let host = hop.peer.map_or("this host".to_owned(), |peer| self.peer(peer.0));
        let prefix = self.prefix(hop.vni.get(), hop.mac).map_or(String::new(), |prefix| prefix.to_string());
        let by = match (hop.routed, prefix.as_str()) {
            (true, "") => "through the gateway".to_owned(),
            (true, prefix) => format!("through the gateway, by {prefix}"),
            (false, _) => "by its MAC address".to_owned(),
        };
        let network = if hop.vni.get() == self.vni { String::new() } else { format!(" in VNI {}", hop.vni.get()) };
        let what = format!("{by}: {}{network} on {host}, path MTU {}", hop.mac, hop.mtu);
        step(
            "route",
            true,
            what,
            [
                ("vni", hop.vni.get().to_string()),
                ("mac", hop.mac.to_string()),
                ("place", host),
                ("prefix", prefix),
                ("path_mtu_bytes", hop.mtu.to_string()),
                ("routed", hop.routed.to_string()),
            ],
        )
    }

    /// The longest prefix that contains the destination and leads to a vNIC.
    fn prefix(&self, vni: u32, mac: Mac) -> Option<ipnet::IpNet> {
        let config = &self.state.config;
        let Config { routes, ports, .. } = &**config;
        let routes = routes.iter().filter(|r| r.vni.value() == vni && r.mac == mac).map(|r| r.prefix);
        let ports = ports.iter().filter(|p| p.vni.value() == vni && p.mac == mac);
        let addresses = ports.flat_map(|p| p.addresses.iter().map(|net| ipnet::IpNet::from(net.addr())));
        let routed =
            config.ports.iter().filter(|p| p.vni.value() == vni && p.mac == mac).flat_map(|p| p.routed.clone());
        routes.chain(addresses).chain(routed).filter(|net| net.contains(&self.to)).max_by_key(ipnet::IpNet::prefix_len)
    }

    fn check(&self, check: &Check) -> TraceStep {
        let Check { port, direction, by, result, logged } = check;
        let name = self.port(port.0);
        let towards = match direction {
            Direction::Egress => "egress",
            Direction::Ingress => "ingress",
        };
        let config = &self.state.config;
        let of_port = config.ports.iter().find(|p| p.name == name);
        let permitted = |permission: &Permission| match permission {
            Permission::Unrestricted => ("everything is allowed".to_owned(), String::new()),
            Permission::None => ("no rule allows it".to_owned(), String::new()),
            Permission::Rule(index) => {
                let rule = of_port.and_then(|port| rules::of_group(config, port, *direction, *index));
                let rule = rule.unwrap_or_else(|| format!("rule {index}"));
                (format!("{rule} allows it"), rule)
            }
        };
        let mut rule = String::new();
        let (stage, what) = match by {
            By::Acl(None) => ("acl", "no rule matches, so it passes".to_owned()),
            By::Acl(Some(index)) => {
                let found = of_port.and_then(|port| rules::of_acl(config, port, *direction, *index));
                rule = found.unwrap_or_else(|| format!("rule {index}"));
                let what = if result.is_ok() { "allows" } else { "denies" };
                ("acl", format!("{rule} {what} it"))
            }
            By::Fragments => {
                let what = if result.is_ok() {
                    "follows the first fragment of its packet"
                } else {
                    "does not follow a first fragment that passed"
                };
                ("fragment", format!("a fragment that {what}"))
            }
            By::LoadBalancer { id, backend: (address, port), is_new } => {
                let balancer = config.load_balancers.get(usize::from(id.0)).map_or("?", |balancer| &balancer.name);
                rule = format!("load balancer {balancer}");
                let what = match (direction, is_new) {
                    (Direction::Ingress, _) => "its connection belongs to",
                    (_, true) => "its connection is assigned to",
                    (_, false) => "its connection stays on",
                };
                ("service", format!("{rule}: {what} {address} port {port}"))
            }
            By::Floating(outside) => {
                rule = format!("floating address {outside}");
                ("nat", format!("the guest's external address is {outside}"))
            }
            By::Nat { outside: (address, port), is_new } => {
                rule = format!("outside {}", std::net::SocketAddr::new(*address, *port));
                let what = match (direction, is_new) {
                    (Direction::Ingress, _) => "an existing mapping, external address",
                    (_, true) => "a new mapping, external address",
                    (_, false) => "an existing mapping, external address",
                };
                ("nat", format!("{what} {address} port {port}"))
            }
            By::NoGroup => ("group", "not checked for such packets".to_owned()),
            By::Error { known: true, .. } => ("group", "an ICMP error about an existing session".to_owned()),
            By::Error { permission, .. } => {
                let (what, by) = permitted(permission);
                rule = by;
                ("group", format!("an ICMP error about an unknown session; {what}"))
            }
            By::Session { state, origin, idle_s } => {
                let who = if *origin == Direction::Egress { "the guest" } else { "others" };
                ("group", format!("it belongs to a session ({state}, started by {who}, last packet {idle_s} s ago)"))
            }
            By::Groups { ends, permission } => {
                let (what, by) = permitted(permission);
                rule = by;
                let full = *result == Err(DropReason::SessionsFull);
                let then = match (result.is_ok(), full) {
                    (true, _) => ", and a session would be created",
                    (false, true) => ", but the session table is full",
                    (false, false) => "",
                };
                let before = match ends {
                    Some((state, true)) => format!("its session ({state}) is no longer allowed; "),
                    Some((state, false)) => format!("its session ({state}) has ended; "),
                    None => String::new(),
                };
                ("group", format!("{before}no session; {what}{then}"))
            }
        };
        let session = if matches!(by, By::Session { .. }) { "existing" } else { "none" };
        let session = if result.is_ok() && matches!(by, By::Groups { .. }) { "new" } else { session };
        let log = if *logged { "; it is logged" } else { "" };
        step(
            stage,
            result.is_ok(),
            format!("{towards} of {name}: {what}{log}"),
            [
                ("port", name.clone()),
                ("direction", towards.to_owned()),
                ("rule", rule),
                ("session", session.to_owned()),
                ("logged", logged.to_string()),
            ],
        )
    }

    fn carried(&self, peer: u32, how: Carriage, connection: Option<&bifrost_rte::ConnSnapshot>) -> TraceStep {
        let (carriage, why) = match how {
            Carriage::NotReliable => ("plain VXLAN", "the VPC does not carry such packets reliably"),
            Carriage::PlainPeer => ("plain VXLAN", "the peer supports nothing else"),
            Carriage::Connection => ("reliable", "on an open connection"),
            Carriage::Opening => ("reliable", "once the connection that is being set up is open"),
            Carriage::SetUp => ("reliable", "on a connection that would be set up"),
            Carriage::BestEffort => ("plain VXLAN", "all paths have failed"),
            Carriage::Unanswered => ("plain VXLAN", "the peer has not answered set-up"),
        };
        let peer = self.peer(peer);
        let mut made = step("transport", true, format!("{carriage}, {why}"), [("carriage", carriage.to_owned())]);
        made.details.insert("peer".to_owned(), peer);
        if let Some(c) = connection {
            let (in_flight, window) = (c.in_flight_packets, c.window_packets);
            made.what += &format!(" (CID {:#010x}, {in_flight} of {window} packets in flight", c.local_cid.0);
            made.what += &if c.pending_packets > 0 { format!(", {} wait)", c.pending_packets) } else { ")".to_owned() };
            let more = [
                ("cid", format!("{:#010x}", c.local_cid.0)),
                ("in_flight_packets", in_flight.to_string()),
                ("window_packets", window.to_string()),
                ("waiting_packets", c.pending_packets.to_string()),
            ];
            made.details.extend(more.map(|(name, value)| (name.to_owned(), value)));
        }
        made
    }

    fn peer(&self, id: u32) -> String {
        self.state.names.peer_name(id).unwrap_or("?").to_owned()
    }

    fn port(&self, id: u32) -> String {
        let found = self.state.config.ports.iter().find(|p| self.state.names.port(&p.name) == Some(id));
        found.map_or("a removed port", |p| &p.name).to_owned()
    }
}

fn refused(stage: &str, reason: DropReason) -> TraceStep {
    let what = counters::meaning(&format!("avs.{}", reason.counter())).map(|meaning| meaning.what.into_owned());
    let what = what.unwrap_or_else(|| reason.name().to_owned());
    step(stage, false, what, [("reason", reason.name().to_owned())])
}

fn too_large() -> TraceStep {
    let reason = DropReason::PathMtu;
    let what =
        "larger than the path MTU, must not be fragmented; no ICMP error: rate limit, or a source that gets none";
    step("size", false, what.to_owned(), [("reason", reason.name().to_owned())])
}

fn lane(lane: &trace::Lane) -> TraceStep {
    let trace::Lane { path, from, to, usable, drained, srtt_ns } = lane;
    let srtt = if *srtt_ns > 0 { format!(", {} us", srtt_ns / 1000) } else { String::new() };
    let state = match (usable, drained) {
        (true, false) => "usable",
        (false, false) => "suspect",
        (true, true) => "usable, drained",
        (false, true) => "suspect, drained",
    };
    let details = [
        ("path", path.to_string()),
        ("from", from.to_string()),
        ("to", to.to_string()),
        ("state", state.to_owned()),
        ("srtt_us", (srtt_ns / 1000).to_string()),
    ];
    step("path", true, format!("{path}: {from} -> {to} ({state}{srtt})"), details)
}
