//! Results as text for people: aligned columns, units in the headings.

use std::fmt::Write;
use std::net::{IpAddr, SocketAddr};

use bifrost_control::api::{
    BackendStatus, Conn, ConnState, Direction, DrainReport, FaultCleared, FaultEntry, FaultSpec, FlowLogStatus,
    LearnedRoute, LoadBalancerStatus, MirrorStatus, NatKind, NatStatus, Path, PathState, PeerMode, PortStatus, Route,
    Stats, Status,
};
use comfy_table::{CellAlignment, Table, presets};

/// How a column is aligned.
#[derive(Clone, Copy)]
pub(crate) enum Column {
    /// Words.
    Text(&'static str),
    /// Numbers.
    Number(&'static str),
}
pub(crate) use Column::{Number, Text};

impl Column {
    fn name(&self) -> &'static str {
        match self {
            Text(name) | Number(name) => name,
        }
    }
}

pub(crate) fn status(s: &Status) -> String {
    let mut out = String::new();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(out, "{name:<10}{value}");
    };
    line("bifrostd", format!("{} on {}, pid {}, up {}", s.version, s.host, s.pid, duration(s.uptime_s)));
    line("config", s.config_file.clone());
    line("underlay", join(&s.underlay));
    let routes = count(s.routes, "route");
    line("holds", format!("{}, {routes}, {}", count(s.ports, "port"), count(s.conns, "connection")));
    if s.faults > 0 {
        line("FAULTS", format!("{} in force; see `bifrostctl fault list`", s.faults));
    }
    let workers = s.workers.iter().map(|w| {
        vec![
            w.index.to_string(),
            w.cpu.map_or_else(|| "any".to_owned(), |cpu| cpu.to_string()),
            format!("{:.1}", w.busy_percent),
            w.guest_tx_packets.to_string(),
            w.guest_rx_packets.to_string(),
            w.underlay_tx_packets.to_string(),
            w.underlay_rx_packets.to_string(),
            w.loops.to_string(),
            w.sleeps.to_string(),
        ]
    });
    let columns = [
        Number("WORKER"),
        Number("CPU"),
        Number("BUSY %"),
        Number("GUEST TX"),
        Number("GUEST RX"),
        Number("UNDERLAY TX"),
        Number("UNDERLAY RX"),
        Number("LOOPS"),
        Number("SLEEPS"),
    ];
    let _ = writeln!(out, "\n{}", table(&columns, workers));
    let peers = s.peers.iter().map(|p| vec![p.name.clone(), peer_mode(p.transport).to_owned(), join(&p.addresses)]);
    let _ = write!(out, "\n{}", table(&[Text("PEER"), Text("TRANSPORT"), Text("ADDRESSES")], peers));
    out
}

pub(crate) fn ports(ports: &[PortStatus]) -> String {
    let rows = ports.iter().map(|p| {
        let gone = if p.failed && p.fault.is_some() {
            " (FAULT)"
        } else if p.failed {
            " (gone)"
        } else if p.waiting {
            " (no guest)"
        } else {
            ""
        };
        let place = p.netns.as_ref().map_or_else(|| p.device.clone(), |netns| format!("{netns}:{}", p.device));
        vec![
            p.name.clone(),
            p.vni.to_string(),
            p.mac.clone(),
            join(&p.addresses),
            place + gone,
            p.rx_packets.to_string(),
            p.rx_bytes.to_string(),
            p.tx_packets.to_string(),
            p.tx_bytes.to_string(),
            p.tx_held_packets.to_string(),
            p.drops_packets.values().sum::<u64>().to_string(),
        ]
    });
    let columns = [
        Text("PORT"),
        Number("VNI"),
        Text("MAC"),
        Text("ADDRESSES"),
        Text("DEVICE"),
        Number("RX PKTS"),
        Number("RX BYTES"),
        Number("TX PKTS"),
        Number("TX BYTES"),
        Number("HELD"),
        Number("DROPS"),
    ];
    let mut out = listing(&columns, rows, "no ports");
    for port in ports {
        if let Some(fault) = &port.fault {
            let (stage, message, location) = (&fault.stage, &fault.message, &fault.location);
            let (times, ago) = (count(port.fault_times, "fault"), duration(fault.ago_s));
            let _ = write!(out, "\n{} had {times}, the last {ago} ago at {stage}: {message} ({location})", port.name);
        }
        if port.slow_turns > 0 {
            let (turns, times) = (count(port.slow_turns, "turn"), port.rest_times);
            let _ = write!(
                out,
                "\n{} kept its worker for more than 1 ms in {turns}, and had to rest {times} times",
                port.name
            );
        }
        for (reason, packets) in port.drops_packets.iter().filter(|(_, packets)| **packets > 0) {
            let _ = write!(out, "\n{} dropped {packets} packets: {reason}", port.name);
        }
        for (class, sessions) in port.evicted_sessions.iter().filter(|(_, sessions)| **sessions > 0) {
            let _ = write!(out, "\n{} evicted {sessions} sessions: {class}", port.name);
        }
    }
    out
}

pub(crate) fn routes(routes: &[Route]) -> String {
    let row = |r: &Route| match r.to_vni {
        Some(to) => {
            vec![r.vni.to_string(), r.prefix.to_string(), format!("(VNI {to})"), "-".to_owned(), "-".to_owned()]
        }
        None => {
            vec![r.vni.to_string(), r.prefix.to_string(), r.peer.clone(), r.mac.clone(), r.mtu_bytes.to_string()]
        }
    };
    let rows = routes.iter().map(row);
    listing(&[Number("VNI"), Text("PREFIX"), Text("PEER"), Text("MAC"), Number("MTU")], rows, "no routes")
}

pub(crate) fn learned(routes: &[LearnedRoute]) -> String {
    let row = |r: &LearnedRoute| {
        vec![
            r.vni.to_string(),
            r.range.to_string(),
            r.peer.clone(),
            r.mac.to_string(),
            duration(r.age_s),
            duration(r.idle_s),
        ]
    };
    let columns = [Number("VNI"), Text("ADDRESSES"), Text("PEER"), Text("MAC"), Text("LEARNED"), Text("USED")];
    listing(&columns, routes.iter().map(row), "no learned routes")
}

pub(crate) fn load_balancers(balancers: &[LoadBalancerStatus]) -> String {
    let row = |b: &LoadBalancerStatus, backend: &BackendStatus| {
        vec![
            b.name.clone(),
            b.vni.to_string(),
            SocketAddr::new(b.address, b.port).to_string(),
            b.protocol.clone(),
            b.affinity.clone(),
            SocketAddr::new(backend.address, backend.port).to_string(),
            backend.weight.to_string(),
            backend.health.name().to_owned(),
        ]
    };
    let rows = balancers.iter().flat_map(|b| b.backends.iter().map(move |backend| row(b, backend)));
    let columns = [
        Text("NAME"),
        Number("VNI"),
        Text("LISTENS"),
        Text("PROTOCOL"),
        Text("AFFINITY"),
        Text("BACKEND"),
        Number("WEIGHT"),
        Text("STATE"),
    ];
    listing(&columns, rows, "no load balancers")
}

pub(crate) fn nat(addresses: &[NatStatus]) -> String {
    let end = |address: IpAddr, port: Option<u16>| match port {
        Some(port) => SocketAddr::new(address, port).to_string(),
        None => address.to_string(),
    };
    let row = |n: &NatStatus| {
        let shared = n.kind == NatKind::Shared;
        let used = |count: u32| if shared { count.to_string() } else { "-".to_owned() };
        vec![
            n.uplink.clone(),
            n.vni.to_string(),
            n.kind.name().to_owned(),
            end(n.address, n.port),
            n.protocol.clone().unwrap_or_else(|| "-".to_owned()),
            n.inside.map_or_else(|| "-".to_owned(), |inside| end(inside, n.inside_port)),
            if n.here { "here" } else { "elsewhere" }.to_owned(),
            n.ports.map_or_else(|| "-".to_owned(), |(first, last)| format!("{first}-{last}")),
            used(n.tcp_ports),
            used(n.udp_ports),
            used(n.echo_identifiers),
        ]
    };
    let columns = [
        Text("UPLINK"),
        Number("VNI"),
        Text("KIND"),
        Text("OUTSIDE"),
        Text("PROTOCOL"),
        Text("INSIDE"),
        Text("GUEST"),
        Text("PORTS"),
        Number("TCP"),
        Number("UDP"),
        Number("ECHO"),
    ];
    listing(&columns, addresses.iter().map(row), "no NAT")
}

pub(crate) fn mirrors(mirrors: &[MirrorStatus]) -> String {
    let row = |m: &MirrorStatus| {
        vec![
            m.name.clone(),
            m.ports.join(","),
            m.direction.clone(),
            m.target.to_string(),
            m.target_vni.to_string(),
            format!("1/{}", m.one_in),
            m.truncate_bytes.to_string(),
            m.sent_packets.to_string(),
            m.missed_packets.to_string(),
            m.unsent_packets.to_string(),
        ]
    };
    let columns = [
        Text("NAME"),
        Text("PORTS"),
        Text("DIRECTION"),
        Text("TARGET"),
        Number("VNI"),
        Number("SAMPLE"),
        Number("BYTES"),
        Number("SENT"),
        Number("MISSED"),
        Number("UNSENT"),
    ];
    listing(&columns, mirrors.iter().map(row), "no mirrors")
}

pub(crate) fn flow_log(log: &FlowLogStatus) -> String {
    let mut out = String::new();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(out, "{name:<10}{value}");
    };
    if !log.on && log.logs.is_empty() {
        line("logs", "off: there is no [flow_log] or [[vpc_flow_log]] in the configuration".to_owned());
    }
    let written = |records: u64, lost: u64| format!("{records} records, {lost} lost");
    if let Some(json) = &log.json {
        line("JSON", format!("{json}: {}", written(log.json_records, log.json_lost_records)));
    }
    if let Some(collector) = log.collector {
        let sent = written(log.ipfix_records, log.ipfix_lost_records);
        line("IPFIX", format!("{collector}: {sent}, {} messages", log.ipfix_messages));
    }
    if let Some(json) = &log.rules_json {
        line("rules", format!("{json}: {}", written(log.rule_json_records, log.rule_json_lost_records)));
    }
    if log.on {
        line("ports", if log.ports.is_empty() { "none".to_owned() } else { log.ports.join(", ") });
    }
    for log in &log.logs {
        let of_vpc = |to: String, records, lost| format!("{}: {to}: {}", log.name, written(records, lost));
        if let Some(json) = &log.json {
            line("JSON", of_vpc(json.clone(), log.json_records, log.json_lost_records));
        }
        if let Some(collector) = log.collector {
            line("IPFIX", of_vpc(collector.to_string(), log.ipfix_records, log.ipfix_lost_records));
        }
        let ports = if log.ports.is_empty() { "none".to_owned() } else { log.ports.join(", ") };
        line("ports", format!("{}: {ports}", log.name));
        if log.one_in > 1 {
            line("sample", format!("{}: one of {} flows", log.name, log.one_in));
        }
    }
    line("workers", format!("{}; {} flows now", written(log.created_records, log.lost_records), log.flows));
    line("unlogged", format!("{} packets of flows for which there was no room", log.unlogged_packets));
    if log.unsampled_packets > 0 {
        line("unsampled", format!("{} packets of flows that sampling leaves out", log.unsampled_packets));
    }
    if !log.rules.is_empty() {
        let suppressed = log.rule_suppressed_packets;
        line("logged", format!("{} records about rules, {suppressed} packets beyond", log.rule_created_records));
        log.rules.iter().for_each(|rule| line("rule", rule.clone()));
    }
    out
}

pub(crate) fn conns(conns: &[Conn]) -> String {
    let rows = conns.iter().map(|c| {
        vec![
            format!("{:08x}", c.cid),
            conn_state(c.state).to_owned(),
            c.peer.clone(),
            c.vni.to_string(),
            c.local_mac.clone(),
            c.remote_mac.clone(),
            format!("{}/{}", c.in_flight_packets, c.window_packets),
            micros(c.srtt_us),
            c.tx_packets.to_string(),
            c.rx_packets.to_string(),
            c.retransmitted_packets.to_string(),
            c.duplicates_packets.to_string(),
            c.held_packets.to_string(),
            c.version.to_string(),
        ]
    });
    let columns = [
        Text("CID"),
        Text("STATE"),
        Text("PEER"),
        Number("VNI"),
        Text("LOCAL MAC"),
        Text("REMOTE MAC"),
        Number("FLIGHT/WINDOW"),
        Number("SRTT µs"),
        Number("TX PKTS"),
        Number("RX PKTS"),
        Number("RETX"),
        Number("DUPS"),
        Number("HELD"),
        Number("VER"),
    ];
    listing(&columns, rows, "no reliable connections")
}

pub(crate) fn paths(paths: &[Path]) -> String {
    let rows = paths.iter().map(|p| {
        vec![
            p.peer.clone(),
            p.path.to_string(),
            path_state(p).to_owned(),
            p.local.to_string(),
            p.remote.to_string(),
            p.source_port.to_string(),
            micros(p.srtt_us),
            micros(p.min_rtt_us),
            micros(p.rttvar_us),
            format!("{:.2}", p.loss_percent),
            format!("{:.1}", p.share_percent),
            format!("{:.0}", p.cwnd_packets),
            p.in_flight_packets.to_string(),
            p.tx_packets.to_string(),
            p.lost_packets.to_string(),
            format!("{}/{}", p.probes_packets.saturating_sub(p.probes_lost_packets), p.probes_packets),
        ]
    });
    let columns = [
        Text("PEER"),
        Number("PATH"),
        Text("STATE"),
        Text("LOCAL"),
        Text("REMOTE"),
        Number("SPORT"),
        Number("SRTT µs"),
        Number("MIN µs"),
        Number("VAR µs"),
        Number("LOSS %"),
        Number("SHARE %"),
        Number("CWND"),
        Number("FLIGHT"),
        Number("TX PKTS"),
        Number("LOST"),
        Number("PROBES OK"),
    ];
    listing(&columns, rows, "no paths: no peer was talked to yet")
}

pub(crate) fn stats(stats: &Stats) -> String {
    let rows = stats.counters.iter().map(|(name, value)| vec![name.clone(), value.to_string()]);
    listing(&[Text("COUNTER"), Number("VALUE")], rows, "no counters")
}

pub(crate) fn faults(faults: &[FaultEntry]) -> String {
    let rows = faults.iter().map(|f| {
        let direction = direction(f.spec.direction).to_owned();
        vec![f.id.to_string(), f.spec.target.to_string(), direction, effects(&f.spec), f.hits_packets.to_string()]
    });
    let columns = [Number("ID"), Text("WHERE"), Text("DIRECTION"), Text("WHAT"), Number("HITS")];
    listing(&columns, rows, "no faults in force")
}

pub(crate) fn fault_added(entry: &FaultEntry) -> String {
    let FaultEntry { id, spec, .. } = entry;
    let what = format!("fault {id}: {}, {}, {}", spec.target, direction(spec.direction), effects(spec));
    format!("{what}\nremove it with `bifrostctl fault clear --id {id}`")
}

pub(crate) fn faults_cleared(cleared: &FaultCleared) -> String {
    format!("removed {}", count(cleared.removed, "fault"))
}

pub(crate) fn path_drained(report: &DrainReport) -> String {
    let DrainReport { peer, path, drained, changed, in_use_paths } = report;
    let in_use = in_use_paths.iter().map(u8::to_string).collect::<Vec<_>>().join(", ");
    let became = match (drained, changed) {
        (true, true) => "is drained",
        (true, false) => "was drained already",
        (false, true) => "is in use again",
        (false, false) => "was not drained",
    };
    let what = format!("path {path} to {peer} {became}; in use: {in_use}");
    match drained {
        true => format!(
            "{what}\n{peer} still sends on it until it is drained there, too\n\
             take it back with `bifrostctl path restore --peer {peer} --path {path}`"
        ),
        false => what,
    }
}

/// The word for a path's state.
pub(crate) fn path_state(path: &Path) -> &'static str {
    match path.state {
        _ if path.drained => "drained",
        PathState::Active => "active",
        PathState::Standby => "standby",
        PathState::Suspect => "suspect",
        PathState::Down => "down",
        PathState::Unknown => "?",
    }
}

/// The word for a connection's state.
pub(crate) fn conn_state(state: ConnState) -> &'static str {
    match state {
        ConnState::Connecting => "connecting",
        ConnState::Established => "established",
        ConnState::Fallback => "fallback",
        ConnState::Plain => "plain",
        ConnState::Idle => "idle",
        ConnState::Unknown => "?",
    }
}

/// A time that may not have been measured, µs.
pub(crate) fn micros(us: Option<f64>) -> String {
    match us {
        None => "-".to_owned(),
        Some(us) if us < 1000.0 => format!("{us:.1}"),
        Some(us) => format!("{us:.0}"),
    }
}

/// A time span in its two largest units.
pub(crate) fn duration(seconds: f64) -> String {
    let s = seconds.max(0.0) as u64;
    match s {
        0..60 => format!("{s} s"),
        60..3600 => format!("{} min {} s", s / 60, s % 60),
        3600..86400 => format!("{} h {} min", s / 3600, s % 3600 / 60),
        _ => format!("{} d {} h", s / 86400, s % 86400 / 3600),
    }
}

/// "1 port", "2 ports".
pub(crate) fn count(n: u64, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

fn peer_mode(mode: PeerMode) -> &'static str {
    match mode {
        PeerMode::Idle => "idle",
        PeerMode::Bifrost => "bifrost",
        PeerMode::Plain => "plain vxlan",
        PeerMode::Unknown => "?",
    }
}

fn direction(direction: Direction) -> &'static str {
    match direction {
        Direction::Rx => "rx",
        Direction::Tx => "tx",
    }
}

fn effects(spec: &FaultSpec) -> String {
    let mut parts = Vec::new();
    if spec.down {
        parts.push("down".to_owned());
    }
    let percents = [
        ("loss", spec.loss_percent),
        ("reorder", spec.reorder_percent),
        ("duplicate", spec.duplicate_percent),
        ("corrupt", spec.corrupt_percent),
    ];
    parts.extend(percents.iter().filter(|(_, p)| *p > 0.0).map(|(name, p)| format!("{name} {p} %")));
    for (name, us) in [("delay", spec.delay_us), ("jitter", spec.jitter_us)] {
        if us > 0 {
            parts.push(format!("{name} {us} µs"));
        }
    }
    if let Some(seed) = spec.seed {
        parts.push(format!("seed {seed}"));
    }
    parts.join(", ")
}

fn join<T: ToString>(items: &[T]) -> String {
    items.iter().map(T::to_string).collect::<Vec<_>>().join(" ")
}

pub(crate) fn listing(columns: &[Column], rows: impl Iterator<Item = Vec<String>>, none: &str) -> String {
    let mut rows = rows.peekable();
    if rows.peek().is_none() { none.to_owned() } else { table(columns, rows) }
}

pub(crate) fn table(columns: &[Column], rows: impl Iterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(columns.iter().map(|column| column.name()));
    table.add_rows(rows);
    for (column, kind) in table.column_iter_mut().zip(columns) {
        column.set_padding((0, 2));
        if let Number(_) = kind {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.trim_fmt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        let cases = [(0.4, "0 s"), (59.9, "59 s"), (61.0, "1 min 1 s"), (7260.0, "2 h 1 min"), (90000.0, "1 d 1 h")];
        for (seconds, text) in cases {
            assert_eq!(duration(seconds), text);
        }
    }

    #[test]
    fn columns_are_aligned() {
        let path = |path, srtt_us, state| Path {
            peer: "host-b".into(),
            path,
            state,
            srtt_us,
            local: "192.0.2.1".parse().unwrap(),
            remote: "192.0.2.2".parse().unwrap(),
            source_port: 49152,
            ..Path::default()
        };
        let text = paths(&[path(0, Some(31.5), PathState::Active), path(1, None, PathState::Down)]);
        let lines: Vec<&str> = text.lines().collect();
        let end_of = |line: &str, word: &str| line[..line.find(word).unwrap() + word.len()].chars().count();
        assert_eq!(end_of(lines[0], "SRTT µs"), end_of(lines[1], "31.5"), "{text}");
        assert_eq!(lines[0].find("STATE"), lines[1].find("active"), "{text}");
        assert_eq!(lines[0].find("STATE"), lines[2].find("down"), "{text}");
        assert_eq!(paths(&[]), "no paths: no peer was talked to yet");
    }

    #[test]
    fn drops_are_told_by_reason() {
        let drops_packets = [("spoofed_mac".to_owned(), 3), ("no_route".to_owned(), 0)].into();
        let text = ports(&[PortStatus { name: "web1".into(), drops_packets, ..PortStatus::default() }]);
        assert!(text.ends_with("\nweb1 dropped 3 packets: spoofed_mac"), "{text}");
        let evicted_sessions = [("closing".to_owned(), 0), ("established".to_owned(), 7)].into();
        let text = ports(&[PortStatus { name: "web1".into(), evicted_sessions, ..PortStatus::default() }]);
        assert!(text.ends_with("\nweb1 evicted 7 sessions: established"), "{text}");
    }

    #[test]
    fn a_route_into_another_vpc_names_it() {
        let route = |prefix: &str, peer: &str, to_vni| Route {
            vni: 100,
            prefix: prefix.parse().unwrap(),
            peer: peer.into(),
            mac: "02:00:00:00:00:02".into(),
            mtu_bytes: 1500,
            to_vni,
        };
        let text = routes(&[route("10.0.0.2/32", "host-b", None), route("10.2.0.0/16", "", Some(200))]);
        let rows: Vec<Vec<&str>> = text.lines().skip(1).map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[0], ["100", "10.0.0.2/32", "host-b", "02:00:00:00:00:02", "1500"]);
        assert_eq!(rows[1], ["100", "10.2.0.0/16", "(VNI", "200)", "-", "-"]);
    }

    #[test]
    fn a_fault_in_words() {
        let target = bifrost_control::api::FaultTarget::Peer { name: "b".into(), path: Some(1) };
        let spec = FaultSpec { loss_percent: 0.5, delay_us: 10, seed: Some(7), ..FaultSpec::new(target) };
        let text = fault_added(&FaultEntry { id: 3, spec, hits_packets: 0 });
        assert!(text.starts_with("fault 3: peer b path 1, rx, loss 0.5 %, delay 10 µs, seed 7\n"), "{text}");
    }
}
