//! Every counter of every room, with where it was counted.

use anyhow::Result;
use bifrost_control::api::{Place, Sample};
use bifrost_control::config::PortKind;
use bifrost_datapath::{PathView, PortView};
use bifrost_port::afxdp::AfxdpCounters;

use crate::daemon::State;

/// What the workers count now. Those of one worker are of one moment: between two turns.
pub(crate) fn of(state: &State) -> Result<Vec<Sample>> {
    let views = state.on_all(|worker| {
        let underlay = worker.underlay();
        (worker.view(false), *underlay.udp_counters(), underlay.afxdp_counters())
    })?;
    let mut samples = Vec::new();
    for (index, (view, udp, afxdp)) in views.into_iter().enumerate() {
        let at = Place { worker: Some(index as u32), ..Place::default() };
        let mut add = |counter: String, value| samples.push(Sample { counter, at: at.clone(), value });
        view.counters.into_iter().for_each(|(name, value)| add(name, value));
        udp.iter().for_each(|(name, value)| add(format!("udp.{name}"), value));
        afxdp.iter().flat_map(AfxdpCounters::iter).for_each(|(name, value)| add(format!("afxdp.{name}"), value));
        for port in &view.ports {
            // One that is on its way out has no name any more.
            let Some(config) = state.config.ports.iter().find(|p| state.names.port(&p.name) == Some(port.owner)) else {
                continue;
            };
            let at = Place { port: Some(config.name.clone()), ..at.clone() };
            let device = if config.kind == PortKind::VhostUser { "vhost" } else { "tap" };
            let named = of_port(port, device).into_iter();
            samples.extend(named.map(|(counter, value)| Sample { counter, at: at.clone(), value }));
        }
        for path in &view.paths {
            let peer = state.names.peer_name(path.peer).map(str::to_owned);
            let at = Place { peer, path: Some(path.snapshot.path.get()), ..at.clone() };
            let named = of_path(path).map(|(name, value)| (name.to_owned(), value)).into_iter();
            samples.extend(named.map(|(counter, value)| Sample { counter, at: at.clone(), value }));
        }
    }
    samples.extend(state.flow_log.iter().map(|(counter, value)| Sample {
        counter: format!("flow_log.{counter}"),
        at: Place::default(),
        value,
    }));
    samples.extend(state.mirrored.all.iter().map(|(counter, value)| Sample {
        counter: format!("mirror.{counter}"),
        at: Place::default(),
        value,
    }));
    for (name, machine) in &state.machines {
        let at = Place { port: Some(name.clone()), ..Place::default() };
        let named = machine.counters();
        samples.extend(named.map(|(counter, value)| Sample {
            counter: format!("vhost.{counter}"),
            at: at.clone(),
            value,
        }));
    }
    Ok(samples)
}

fn of_port(port: &PortView, device: &str) -> Vec<(String, u64)> {
    let own = port.counters.iter().map(|(name, value)| (format!("{device}.{name}"), *value));
    // Reasons for which nothing was dropped are many, and say nothing.
    let switch = port
        .switch
        .iter()
        .filter(|(name, value)| *value > 0 || !(name.starts_with("dropped_") || name.starts_with("ingress_dropped_")));
    let switch = switch.map(|(name, value)| (format!("avs.{name}"), *value));
    [
        ("port.tx_packets", port.tx_packets),
        ("port.tx_bytes", port.tx_bytes),
        ("port.rx_packets", port.rx_packets),
        ("port.rx_bytes", port.rx_bytes),
        ("port.held_packets", port.held_packets),
        ("port.held_back_times", port.held_back_times),
        ("port.failed_ports", u64::from(port.failed)),
        ("port.fault_times", port.fault_times),
        ("port.slow_turns", port.slow_turns),
        ("port.slow_ns", port.slow_ns),
        ("port.rest_times", port.rest_times),
        ("port.slow_packets", port.rest_packets),
        ("port.rate_limited_packets", port.rate_limited_packets),
        ("port.overload_dropped_packets", port.overload_dropped_packets),
        ("port.unswitched_packets", port.waiting_packets.0),
        ("port.blocked_packets", port.waiting_packets.1),
        ("port.blocked_destinations", port.waiting_destinations),
    ]
    .into_iter()
    .map(|(name, value)| (name.to_owned(), value))
    .chain(port.way.iter().map(|(name, value)| (format!("port.{name}"), value)))
    .chain(switch)
    .chain(own)
    .collect()
}

fn of_path(path: &PathView) -> [(&'static str, u64); 11] {
    let s = &path.snapshot;
    [
        ("path.tx_packets", s.tx_packets),
        ("path.lost_packets", s.lost_packets),
        ("path.probe_packets", s.probes_sent),
        ("path.lost_probe_packets", s.probes_lost),
        ("path.in_flight_packets", u64::from(s.in_flight_packets)),
        // Without congestion control it has no bound.
        ("path.window_packets", s.window_packets.min(1e9) as u64),
        ("path.srtt_ns", s.srtt_ns),
        ("path.min_rtt_ns", s.min_rtt_ns),
        ("path.loss_ppm", (f64::from(s.loss) * 1e6) as u64),
        ("path.usable_paths", u64::from(s.state == bifrost_rte::PathState::Usable)),
        ("path.drained_paths", u64::from(s.drained)),
    ]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use bifrost_control::counters;
    use bifrost_port::tap::TapCounters;
    use bifrost_port::udp::UdpCounters;
    use bifrost_port::vhost::VhostCounters;

    use super::*;

    /// The names of all counters, as the rooms themselves have them.
    fn counted() -> BTreeSet<String> {
        fn of<'a>(
            room: &'a str,
            names: impl Iterator<Item = (&'static str, u64)> + 'a,
        ) -> impl Iterator<Item = String> {
            names.map(move |(name, _)| format!("{room}{name}"))
        }
        let switch = bifrost_avs::UnderlayCounters::default();
        let sessions = bifrost_avs::SessionCounters::default();
        let by_port = bifrost_avs::PortCounters::default();
        let by_port = by_port.iter().chain(bifrost_avs::PortSessions::default().iter()).collect();
        let port = PortView { switch: by_port, ..PortView::default() };
        let snapshot = bifrost_rte::PathSnapshot::unmeasured(bifrost_wire::bifrost::PathId::masked(0));
        let nowhere = std::net::IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED);
        let path = PathView { peer: 0, local: nowhere, remote: nowhere, source_port: 0, snapshot };
        let mut names: BTreeSet<String> = of("avs.underlay_", switch.iter()).collect();
        names.extend(of("avs.", sessions.iter()));
        names.extend(of("avs.balanced_", sessions.iter()));
        names.extend(of("avs.flow_log_", bifrost_avs::FlowLogCounters::default().iter()));
        names.extend(of("avs.rule_log_", bifrost_avs::RuleLogCounters::default().iter()));
        names.extend(of("mirror.", crate::mirror::Counters::default().iter()));
        names.extend(of("flow_log.", crate::flow_log::Counters::default().iter()));
        names.extend(of("avs.", bifrost_avs::NatCounters::default().iter()));
        names.extend(of("avs.", bifrost_avs::FragmentCounters::default().iter()));
        names.extend(of("avs.", bifrost_avs::FlowCounters::default().iter()));
        names.extend(of("avs.", port.switch.clone().into_iter()));
        names.extend(of_port(&port, "").into_iter().map(|(name, _)| name));
        names.extend(of("", of_path(&path).into_iter()));
        names.extend(of("rte.", bifrost_rte::Counters::default().iter()));
        names.extend(of("udp.", UdpCounters::default().iter()));
        names.extend(of("afxdp.", AfxdpCounters::default().iter()));
        names.extend(bifrost_datapath::Counters::default().iter().map(|(name, _)| name));
        names.extend(TapCounters::default().iter().map(|(name, _)| format!("tap.{name}")));
        names.extend(VhostCounters::default().iter().map(|(name, _)| format!("vhost.{name}")));
        // What is read elsewhere when it is asked for.
        let gauges = [
            "rte.send_pages",
            "rte.receive_pages",
            "rte.connections",
            "fault.waiting_packets",
            "datapath.unread_datagrams",
        ];
        names.extend(gauges.map(str::to_owned));
        let devices = ["tap.tx_overrun_packets", "tap.rx_held_frames", "vhost.rx_unplugged_frames"];
        names.extend(devices.map(str::to_owned));
        let front_ends = ["connections", "messages", "refused_messages", "waiting_descriptors"];
        names.extend(front_ends.map(|name| format!("vhost.{name}")));
        names
    }

    #[test]
    fn every_counter_is_explained_and_no_other() {
        let explained: BTreeSet<String> = counters::all().map(|(name, _)| name).collect();
        let counted = counted();
        let unexplained: Vec<_> = counted.difference(&explained).collect();
        assert!(unexplained.is_empty(), "write into control/src/counters what these mean: {unexplained:#?}");
        let uncounted: Vec<_> = explained.difference(&counted).collect();
        assert!(uncounted.is_empty(), "nobody counts these: {uncounted:#?}");
    }
}
