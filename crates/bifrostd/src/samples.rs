//! All counters of all crates, with where they were counted.

use std::collections::HashMap;
use std::sync::Arc;

use bifrost_control::api::{ApiError, Place, Sample};
use bifrost_control::config::PortKind;
use bifrost_control::server::Pages;
use bifrost_datapath::{PathView, PortView, Remote, Totals};
use bifrost_port::HostUnderlay;
use bifrost_port::afxdp::AfxdpCounters;
use bifrost_port::udp::UdpCounters;

use crate::carried::Carried;
use crate::daemon::State;
use crate::lists::{StateView, gone};

/// The counters of workers and the daemon. A worker's own counters are consistent, read between two turns; so are those
/// of each port and of each peer.
pub(crate) fn of(state: &State) -> Pages<Sample> {
    let state_view = Arc::new(StateView::of(state));
    let devices = Arc::new(devices(&state_view));
    let of_daemon = of_daemon(state);
    let workers = state_view.workers.clone().into_iter().zip(0..).flat_map(move |(worker, index)| {
        let at = Place { worker: Some(index), ..Place::default() };
        let (totals, totals_at) = (worker.clone(), at.clone());
        let own = std::iter::once_with(move || of_worker(&totals, &totals_at));
        let (seen, devices, ports_at) = (Arc::clone(&state_view), Arc::clone(&devices), at.clone());
        let ports = worker.ports().map(move |page| -> Result<Vec<Sample>, ApiError> {
            let (page, now) = (page.map_err(gone)?, seen.names_now());
            // A port that is being removed has no name any more.
            let named = page.iter().filter_map(|port| Some((port, seen.port(&now, port.owner)?)));
            Ok(named.flat_map(|(port, name)| of_named_port(port, name, &devices, &ports_at)).collect())
        });
        let seen = Arc::clone(&state_view);
        let paths = worker.paths().map(move |page| -> Result<Vec<Sample>, ApiError> {
            let (page, now) = (page.map_err(gone)?, seen.names_now());
            Ok(page.iter().flat_map(|path| of_named_path(path, seen.peer(&now, path.peer), &at)).collect())
        });
        own.chain(ports).chain(paths)
    });
    let mut all = workers.chain(std::iter::once(Ok(of_daemon)));
    let mut carried = Some(state.carried.as_ref().clone());
    Box::new(std::iter::from_fn(move || match (all.next(), &mut carried) {
        (Some(Ok(mut page)), Some(carried)) => {
            carried.add_to(&mut page);
            Some(Ok(page))
        }
        (None, carried) => carried.take().map(|carried| Ok(carried.rest())),
        (page, None) => page,
        (Some(Err(error)), _) => Some(Err(error)),
    }))
}

/// The values that the next daemon has to add to its own counters. This daemon must have stopped.
///
/// # Errors
/// A worker does not answer.
pub(crate) fn to_carry(state: &State) -> Result<Vec<Sample>, ApiError> {
    let all = of(state).collect::<Result<Vec<_>, _>>()?.concat();
    Ok(Carried::of_samples(all).0.into_iter().map(|((counter, at), value)| Sample { counter, at, value }).collect())
}

/// The counters of workers and their ports, by name only.
pub(crate) fn sums(state: &State) -> impl Iterator<Item = Result<Vec<(String, u64)>, ApiError>> + use<> {
    let state_view = Arc::new(StateView::of(state));
    let devices = Arc::new(devices(&state_view));
    let carried = state.carried.sums();
    let counted = state_view.workers.clone().into_iter().flat_map(move |worker| {
        let totals = worker.clone();
        let own = std::iter::once_with(move || Totalled::of(&totals).map(|totals| totals.counters()));
        let devices = Arc::clone(&devices);
        let ports = worker.ports().map(move |page| -> Result<Vec<(String, u64)>, ApiError> {
            Ok(page.map_err(gone)?.iter().flat_map(|port| of_device(port, device(&devices, port.owner))).collect())
        });
        own.chain(ports)
    });
    counted.chain(std::iter::once(Ok(carried)))
}

/// Totals of a worker and of its sockets.
struct Totalled(Totals, UdpCounters, Option<AfxdpCounters>);

impl Totalled {
    fn of(worker: &Remote<HostUnderlay>) -> Result<Totalled, ApiError> {
        let totals = worker.ask(|worker| {
            let underlay = worker.underlay();
            Totalled(worker.totals(), *underlay.udp_counters(), underlay.afxdp_counters())
        });
        totals.map_err(gone)
    }

    fn counters(&self) -> Vec<(String, u64)> {
        let Totalled(totals, udp, afxdp) = self;
        let udp = udp.iter().map(|(name, value)| (format!("udp.{name}"), value));
        let afxdp = afxdp.iter().flat_map(AfxdpCounters::iter);
        let afxdp = afxdp.map(|(name, value)| (format!("afxdp.{name}"), value));
        totals.counters().into_iter().chain(udp).chain(afxdp).collect()
    }
}

fn of_worker(worker: &Remote<HostUnderlay>, at: &Place) -> Result<Vec<Sample>, ApiError> {
    let counters = Totalled::of(worker)?.counters().into_iter();
    Ok(counters.map(|(counter, value)| Sample { counter, at: at.clone(), value }).collect())
}

/// The prefix of each port's device counters, by the port's number.
fn devices(state_view: &StateView) -> HashMap<u32, &'static str> {
    let device = |kind| if kind == PortKind::VhostUser { "vhost" } else { "tap" };
    state_view.config.ports.iter().filter_map(|p| Some((state_view.names.port(&p.name)?, device(p.kind)))).collect()
}

fn device(devices: &HashMap<u32, &'static str>, owner: u32) -> &'static str {
    devices.get(&owner).copied().unwrap_or("tap")
}

fn of_named_port<'a>(
    port: &PortView,
    name: &'a str,
    devices: &HashMap<u32, &'static str>,
    of_worker: &'a Place,
) -> impl Iterator<Item = Sample> + use<'a> {
    let named = of_port(port, device(devices, port.owner)).into_iter();
    named.map(move |(counter, value)| {
        let at = Place { port: Some(name.to_owned()), ..of_worker.clone() };
        Sample { counter, at, value }
    })
}

fn of_named_path(path: &PathView, peer: Option<&str>, of_worker: &Place) -> impl Iterator<Item = Sample> + use<> {
    let (peer, path_number) = (peer.map(str::to_owned), path.snapshot.path.get());
    let at = Place { peer, path: Some(path_number), ..of_worker.clone() };
    let named = of_path(path).into_iter();
    named.map(move |(name, value)| Sample { counter: name.to_owned(), at: at.clone(), value })
}

/// Counters outside of the workers.
fn of_daemon(state: &State) -> Vec<Sample> {
    let nowhere = |counter, value| Sample { counter, at: Place::default(), value };
    let mut samples: Vec<Sample> = state
        .flow_log
        .counters()
        .iter()
        .map(|(counter, value)| nowhere(format!("flow_log.{counter}"), value))
        .collect();
    samples.extend(state.mirrored.all.iter().map(|(counter, value)| nowhere(format!("mirror.{counter}"), value)));
    samples.extend(state.metadata.iter().map(|(counter, value)| nowhere(format!("metadata.{counter}"), value)));
    let learned = [("routes", state.learned.len() as u64)].into_iter().chain(state.learned.counters.iter());
    samples.extend(learned.map(|(counter, value)| nowhere(format!("learned.{counter}"), value)));
    for (name, machine) in &state.machines {
        let at = Place { port: Some(name.clone()), ..Place::default() };
        let named = machine.counters();
        samples.extend(named.map(|(counter, value)| Sample {
            counter: format!("vhost.{counter}"),
            at: at.clone(),
            value,
        }));
    }
    samples
}

/// Counters of the device, and those of the kernel.
fn of_device(port: &PortView, device: &'static str) -> impl Iterator<Item = (String, u64)> {
    let own = port.device.iter().map(move |(name, value)| (format!("{device}.{name}"), *value));
    let kernel = port.kernel.iter().flat_map(|kernel| kernel.read());
    own.chain(kernel.map(move |(name, value)| (format!("{device}.{name}"), value)))
}

fn of_port(port: &PortView, device: &'static str) -> Vec<(String, u64)> {
    // Drop reasons are many; those with a count of 0 are left out.
    let switch = port
        .switch()
        .filter(|(name, value)| *value > 0 || !(name.starts_with("dropped_") || name.starts_with("ingress_dropped_")));
    let switch = switch.map(|(name, value)| (format!("avs.{name}"), value));
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
        ("port.learning_packets", port.learning_packets),
    ]
    .into_iter()
    .map(|(name, value)| (name.to_owned(), value))
    .chain(port.outbound.iter().map(|(name, value)| (format!("port.{name}"), value)))
    .chain(switch)
    .chain(of_device(port, device))
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
        // Without congestion control the window is unbounded.
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

    /// The names of all counters, from the crates that count.
    fn counted() -> BTreeSet<String> {
        fn of<'a>(
            prefix: &'a str,
            names: impl Iterator<Item = (&'static str, u64)> + 'a,
        ) -> impl Iterator<Item = String> {
            names.map(move |(name, _)| format!("{prefix}{name}"))
        }
        let switch = bifrost_avs::UnderlayCounters::default();
        let sessions = bifrost_avs::SessionCounters::default();
        let port = PortView::counted_by_switch();
        let snapshot = bifrost_rte::PathSnapshot::unmeasured(bifrost_wire::bifrost::PathId::masked(0));
        let nowhere = std::net::IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED);
        let path = PathView { peer: 0, local: nowhere, remote: nowhere, source_port: 0, snapshot };
        let mut names: BTreeSet<String> = of("avs.underlay_", switch.iter()).collect();
        names.extend(of("avs.", sessions.iter()));
        names.extend(of("avs.balanced_", sessions.iter()));
        names.extend(of("avs.flow_log_", bifrost_avs::FlowLogCounters::default().iter()));
        names.extend(of("avs.rule_log_", bifrost_avs::RuleLogCounters::default().iter()));
        names.extend(of("mirror.", crate::mirror::Counters::default().iter()));
        names.extend(of("metadata.", bifrost_metadata::Counters::default().iter()));
        names.extend(of("learned.", crate::learning::Counters::default().iter()));
        names.extend(of("flow_log.", crate::flow_log::Counters::default().iter()));
        names.extend(of("avs.", bifrost_avs::NatCounters::default().iter()));
        names.extend(of("avs.", bifrost_avs::FragmentCounters::default().iter()));
        names.extend(of("avs.", bifrost_avs::FlowCounters::default().iter()));
        names.extend(of("avs.", port.switch()));
        names.extend(of_port(&port, "").into_iter().map(|(name, _)| name));
        names.extend(of("", of_path(&path).into_iter()));
        names.extend(of("rte.", bifrost_rte::Counters::default().iter()));
        names.extend(of("udp.", UdpCounters::default().iter()));
        names.extend(of("afxdp.", AfxdpCounters::default().iter()));
        names.extend(bifrost_datapath::Counters::default().iter().map(|(name, _)| name));
        names.extend(TapCounters::default().iter().map(|(name, _)| format!("tap.{name}")));
        names.extend(VhostCounters::default().iter().map(|(name, _)| format!("vhost.{name}")));
        // Gauges that are read on demand.
        let gauges = [
            "rte.send_pages",
            "rte.receive_pages",
            "rte.connections",
            "fault.waiting_packets",
            "datapath.unread_datagrams",
            "learned.routes",
        ];
        names.extend(gauges.map(str::to_owned));
        let devices = ["tap.tx_overrun_packets", "tap.rx_held_frames", "vhost.rx_unplugged_frames"];
        names.extend(devices.map(str::to_owned));
        let front_ends = ["connections", "messages", "refused_messages", "waiting_descriptors"];
        names.extend(front_ends.map(|name| format!("vhost.{name}")));
        names
    }

    #[test]
    fn exactly_the_existing_counters_are_explained() {
        let explained: BTreeSet<String> = counters::all().map(|(name, _)| name).collect();
        let counted = counted();
        let unexplained: Vec<_> = counted.difference(&explained).collect();
        assert!(unexplained.is_empty(), "explain these in control/src/counters: {unexplained:#?}");
        let uncounted: Vec<_> = explained.difference(&counted).collect();
        assert!(uncounted.is_empty(), "these do not exist: {uncounted:#?}");
    }
}
