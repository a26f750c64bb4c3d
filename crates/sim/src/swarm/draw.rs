//! A random scenario. The meaning of a seed may change whenever this file does; to keep a world, keep its scenario
//! file.

use super::choice::Draw;
use super::workloads::{guests, workloads};
use crate::link::LinkPatch;
use crate::rng::Rng;
use crate::scenario::{
    CongestionControl, FaultConfig, HostConfig, Ordering, Reliability, Scenario, Topology, TransportSettings, VniConfig,
};
use crate::units::{Bytes, Ns, Rate};

/// Links on the longest route: that of a three-tier Clos network.
const LONGEST_ROUTE: u64 = 6;

/// Minimum time that a process takes to start, ns.
const LONG_NS: u64 = 5_000_000;

/// Minimum rate of a guest, bits per second. A full window leaves within seconds.
const LEAST_RATE: u64 = 20_000_000;

/// The world of a seed.
pub fn scenario(seed: u64) -> Scenario {
    let mut rng = Rng::new(seed ^ 0x5eed_5a44_0000_0000);
    let rng = &mut rng;
    // Most worlds are small; a few are larger, or without faults.
    let large = rng.one_in(40);
    let quiet = rng.one_in(12);
    let topology = topology(rng, large, quiet);
    let transport = transport(rng);
    let vnis = vnis(rng);
    let host = host(rng, quiet);
    let mut s = Scenario {
        name: format!("swarm seed {seed}"),
        duration: Ns::s(2_000),
        settle: settle(&transport),
        run_to_end: false,
        bin: Ns(0),
        paths: rng.pick(&[1, 2, 4, 4, 8]),
        host_paths: Vec::new(),
        topology,
        host,
        transport,
        vnis,
        guests: Vec::new(),
        workloads: Vec::new(),
        faults: Vec::new(),
    };
    if s.topology.has_dead_path()
        || s.topology.worst(|l| l.loss.into_iter().chain(l.corruption).reduce(f64::max)) > 0.01
    {
        // Packets that are not carried reliably may have no working path for a long time, and a guest's TCP may wait
        // for minutes between two attempts.
        s.transport.max_connections = None;
        // The same applies if set-up times out before a response can arrive: then all packets leave as plain VXLAN.
        s.transport.setup_tries = None;
        s.vnis.retain(|v| v.reliability != Reliability::Off);
        if s.vnis.is_empty() {
            s.vnis.push(VniConfig { id: 100, reliability: Reliability::Tcp, ordering: Ordering::Flow, weight: 1 });
        }
    }
    // Delays that load does not cause would close windows to a packet per hundred round trips, so the noise allows for
    // them.
    let ns = |ns: Option<Ns>| ns.map_or(0.0, |ns| ns.0 as f64);
    let jitter = s.topology.worst(|l| Some(ns(l.jitter) + ns(l.reordering.and(l.reorder_delay)))) as u64;
    let noise = s.transport.swift_noise.unwrap_or(Ns(1_000_000));
    if jitter > noise.0 {
        s.transport.swift_noise = Some(Ns(jitter));
    }
    let members = guests(rng, &mut s);
    let least_delay = s.topology.worst(|l| l.delay.map(|d| d.0 as f64)) as u64;
    // Minimum time for which guests are busy, ns. Some faults fall into it.
    let span = rng.scale(1_000_000, 100_000_000);
    s.workloads = workloads(rng, &members, span, large, s.host.mtu);
    if !quiet {
        s.faults = faults(rng, &s, span);
        if large && rng.one_in(2) {
            s.faults.push(stragglers(rng, span));
        }
        restart_after_the_last_packet(&mut s);
        // The controller uses the minimum delay. A network that was faster for a while looks congested for about a
        // second, so no fault shortens the delay.
        for delay in s.faults.iter_mut().filter_map(|f| f.set.delay.as_mut()) {
            delay.0 = delay.0.max(least_delay);
        }
    }
    s.complete();
    // These use separate random numbers, so that the rest of a seed's world does not depend on them.
    let rng = &mut Rng::new(seed ^ 0x11e1_4a7e_0000_0000);
    different_paths(rng, &mut s);
    rates(rng, &mut s);
    weights(rng, &mut s);
    s
}

/// Hosts that use different numbers of paths, starting with path 0, which never stays down.
fn different_paths(rng: &mut Rng, s: &mut Scenario) {
    if s.paths > 1 && rng.one_in(4) {
        s.host_paths = (0..s.topology.hosts()).map(|_| rng.range(1, s.paths.into()) as u8).collect();
    }
}

/// Weights when paths are full.
fn weights(rng: &mut Rng, s: &mut Scenario) {
    if rng.one_in(4) {
        s.vnis.iter_mut().for_each(|vni| vni.weight = rng.scale(1, 100) as u8);
        s.guests.iter_mut().for_each(|group| group.weight = rng.scale(1, 100) as u8);
    }
}

/// Limits of guests' sending and receiving rates.
fn rates(rng: &mut Rng, s: &mut Scenario) {
    if !rng.one_in(4) {
        return;
    }
    for group in &mut s.guests {
        let rate = |rng: &mut Rng| rng.one_in(2).then(|| Rate(rng.scale(LEAST_RATE, 5_000_000_000)));
        (group.tx_rate, group.rx_rate) = (rate(rng), rate(rng));
    }
}

impl Topology {
    fn has_dead_path(&self) -> bool {
        matches!(self, Topology::Parallel { path, .. } if path.iter().any(|p| p.down == Some(true)))
    }

    /// Maximum sum of a property over the links of a route between two hosts.
    fn worst(&self, of: impl Fn(&LinkPatch) -> Option<f64>) -> f64 {
        let of = |l: &LinkPatch| of(l).unwrap_or(0.0);
        match self {
            Topology::Parallel { link, path, .. } => path.iter().map(of).fold(of(link), f64::max),
            Topology::Star { link, .. } => 2.0 * of(link),
            Topology::Clos2 { host_link, fabric_link, .. } => 2.0 * (of(host_link) + of(fabric_link)),
            Topology::Clos3 { host_link, fabric_link, .. } => 2.0 * of(host_link) + 4.0 * of(fabric_link),
        }
    }
}

/// Long enough that idle connections are dropped, which the checkers expect.
fn settle(transport: &TransportSettings) -> Ns {
    let reap = transport.idle_reap.unwrap_or(Ns::s(60)).0;
    let shrink = transport.idle_shrink.unwrap_or(Ns::s(1)).0;
    Ns(reap + shrink + crate::checkers::LIVENESS_NS + 100_000_000)
}

fn topology(rng: &mut Rng, large: bool, quiet: bool) -> Topology {
    let hosts = |rng: &mut Rng| if large { rng.range(2, 12) } else { 2 + rng.below(3) } as u32;
    match rng.below(10) {
        0..=5 => {
            let paths = rng.range(1, 8) as u8;
            let link = link(rng, quiet);
            let mut path = Vec::new();
            if rng.one_in(2) && !quiet {
                path = (0..rng.range(1, paths.into())).map(|i| few(rng, i > 0)).collect();
            }
            Topology::Parallel { hosts: if rng.one_in(2) { 2 } else { hosts(rng) }, paths, link, path }
        }
        6 => Topology::Star { hosts: hosts(rng), link: link(rng, quiet) },
        7 | 8 => Topology::Clos2 {
            leaves: rng.range(2, 3) as u32,
            spines: rng.range(1, 4) as u32,
            hosts_per_leaf: rng.range(1, if large { 4 } else { 2 }) as u32,
            host_link: link(rng, quiet),
            fabric_link: link(rng, quiet),
        },
        _ => Topology::Clos3 {
            pods: 2,
            tors_per_pod: rng.range(1, 2) as u32,
            aggs_per_pod: rng.range(1, 2) as u32,
            cores_per_agg: rng.range(1, 2) as u32,
            hosts_per_tor: rng.range(1, if large { 3 } else { 1 }) as u32,
            host_link: link(rng, quiet),
            fabric_link: link(rng, quiet),
        },
    }
}

fn link(rng: &mut Rng, quiet: bool) -> LinkPatch {
    let mut l = LinkPatch {
        rate: Some(Rate(rng.pick(&[0, 1, 10, 25, 25, 100]) * 1_000_000_000)),
        delay: Some(Ns(if rng.one_in(6) { rng.scale(100_000, 3_000_000) } else { rng.scale(500, 100_000) })),
        ..LinkPatch::default()
    };
    if quiet {
        l.rate = Some(Rate(100_000_000_000));
        return l;
    }
    if rng.one_in(3) {
        l.queue = Some(Bytes(rng.scale(30_000, 4_000_000)));
    }
    if rng.one_in(4) {
        l.ecn_threshold = Some(Bytes(rng.scale(1_000, 100_000)));
    }
    let delay = l.delay.map_or(1, |d| d.0);
    if rng.one_in(4) {
        l.jitter = Some(Ns(rng.scale(100, delay.max(200))));
    }
    if rng.one_in(3) {
        l.loss = Some(chance(rng, 0.1));
    }
    if rng.one_in(6) {
        l.corruption = Some(chance(rng, 0.03));
    }
    if rng.one_in(4) {
        l.duplication = Some(chance(rng, 0.2));
    }
    if rng.one_in(4) {
        l.reordering = Some(chance(rng, 0.1));
        l.reorder_delay = Some(Ns(rng.scale(1_000, 100_000_000)));
    }
    l
}

/// Differences between paths. One may stay down.
fn few(rng: &mut Rng, down: bool) -> LinkPatch {
    let mut l = LinkPatch::default();
    match rng.below(5) {
        0 => l.delay = Some(Ns(rng.scale(500, 20_000_000))),
        1 => l.loss = Some(chance(rng, 0.5)),
        2 => l.rate = Some(Rate(rng.pick(&[1, 2, 5, 40]) * 1_000_000_000)),
        3 if down => l.down = Some(true),
        _ => l.jitter = Some(Ns(rng.scale(1_000, 1_000_000))),
    }
    l
}

/// A probability up to `most`. Small ones are as frequent as large ones. It is a multiple of 1e-6, so that a scenario
/// file stores the same value.
fn chance(rng: &mut Rng, most: f64) -> f64 {
    rng.scale(100, (most * 1e6) as u64) as f64 / 1e6
}

fn host(rng: &mut Rng, quiet: bool) -> HostConfig {
    let mut h = HostConfig {
        turn_cost: Ns(rng.scale(200, 5_000)),
        packet_cost: Ns(rng.scale(20, 500)),
        mtu: rng.pick(&[1500, 1500, 9000, 576]),
        restart_after: Ns(rng.scale(100_000, 100_000_000)),
        ..HostConfig::default()
    };
    if quiet {
        return h;
    }
    if rng.one_in(4) {
        h.receive_queue = Bytes(rng.scale(20_000, 1_000_000));
    }
    if rng.one_in(3) {
        h.tx_ring = rng.scale(4, 1024) as u32;
    }
    if rng.one_in(3) {
        h.rx_ring = rng.scale(8, 1024) as u32;
    }
    h
}

fn vnis(rng: &mut Rng) -> Vec<VniConfig> {
    let count = rng.pick(&[1, 1, 1, 2, 3]);
    let vni = |rng: &mut Rng, id| VniConfig {
        id,
        reliability: rng.pick(&[
            Reliability::Tcp,
            Reliability::Tcp,
            Reliability::Tcp,
            Reliability::All,
            Reliability::Off,
        ]),
        ordering: rng.pick(&[Ordering::Flow, Ordering::Flow, Ordering::Flow, Ordering::Strict, Ordering::Off]),
        weight: 1,
    };
    let mut all: Vec<VniConfig> = (0..count).map(|i| vni(rng, 100 + i)).collect();
    if all.iter().all(|v| v.reliability == Reliability::Off) && !rng.one_in(20) {
        all[0].reliability = Reliability::Tcp;
    }
    all
}

fn transport(rng: &mut Rng) -> TransportSettings {
    let mut t = TransportSettings::default();
    // Each setting is usually left at its default.
    macro_rules! now_and_then {
        ($($name:ident = $value:expr;)*) => { $(if rng.one_in(6) { t.$name = Some($value); })* };
    }
    now_and_then! {
        version_max = rng.range(1, 4) as u8;
        group_packets = rng.scale(1, 2_000) as u16;
        spray_paths = rng.range(1, 8) as u8;
        ack_threshold = rng.scale(1, 256) as u16;
        initial_window = rng.scale(1, 4_096) as u16;
        max_window = rng.scale(8, 4_096) as u16;
        setup_queue_packets = rng.scale(1, 256) as u16;
        setup_tries = rng.range(1, 7) as u8;
        give_up_rtos = rng.range(1, 4) as u8;
        stickiness = Ns(rng.scale(1_000, 1_000_000));
        initial_rto = Ns(rng.scale(1_000_000, 10_000_000));
        rto_floor = Ns(rng.scale(100_000, 10_000_000));
        rto_ceiling = Ns(rng.scale(5_000_000, 100_000_000));
        ack_delay = Ns(rng.scale(10_000, 5_000_000));
        best_effort_after = Ns(rng.scale(5_000_000, 100_000_000));
        probe_interval = Ns(rng.scale(5_000_000, 500_000_000));
        swift_noise = Ns(rng.scale(10_000, 2_000_000));
        heavy_loss_percent = rng.range(1, 30) as u8;
    }
    if rng.one_in(2) {
        t.idle_shrink = Some(Ns(rng.scale(5_000_000, 1_000_000_000)));
    }
    if rng.one_in(2) {
        t.idle_reap = Some(Ns(rng.scale(2_000_000_000, 20_000_000_000)));
    }
    if rng.one_in(2) {
        t.plain_retry = Some(Ns(rng.scale(10_000_000, 10_000_000_000)));
    }
    if rng.one_in(5) {
        t.congestion_control = Some(CongestionControl::None);
    }
    if rng.one_in(8) {
        t.max_pages = Some(rng.scale(8, 512) as u32);
    }
    if rng.one_in(20) {
        t.max_connections = Some(rng.range(1, 3) as u32);
    }
    if rng.one_in(2) {
        // Just before the wrap, or before the sign changes.
        t.first_psn = Some((rng.pick(&[0, 1 << 31]) as u32).wrapping_sub(rng.scale(1, 2_000) as u32));
    }
    // Uses no random number, so that the rest of older seeds' worlds stays the same.
    if let Some(Ns(retry)) = t.plain_retry.filter(|retry| retry.0.is_multiple_of(4)) {
        t.give_up_after = Some(Ns(5_000_000 + retry % 200_000_000));
    }
    t
}

fn faults(rng: &mut Rng, s: &Scenario, span: u64) -> Vec<FaultConfig> {
    let count = rng.pick(&[0, 0, 1, 1, 2, 3, 6]);
    (0..count).map(|_| fault(rng, s, span)).collect()
}

/// In a network that holds packets for long, no daemon restarts before its earlier packets have left the network
/// (PROTOCOL §4.6). In other worlds daemons restart earlier, and packets from before the restart must find no
/// connection.
fn restart_after_the_last_packet(s: &mut Scenario) {
    let ns = |ns: Option<Ns>| ns.map_or(0, |ns| ns.0);
    let links = s.topology.worst(|l| Some((ns(l.delay) + ns(l.jitter) + ns(l.reorder_delay)) as f64)) as u64;
    let patches = s.faults.iter().map(|f| ns(f.set.delay) + ns(f.set.jitter) + ns(f.set.reorder_delay)).max();
    let longest = (links + patches.unwrap_or(0)) * LONGEST_ROUTE;
    if longest < LONG_NS {
        return;
    }
    let default = s.host.restart_after.0;
    for fault in s.faults.iter_mut().filter(|fault| fault.crash.is_some()) {
        let until = fault.until.map_or(fault.at.0 + default, |until| until.0);
        fault.until = Some(Ns(until.max(fault.at.0 + longest)));
    }
}

/// Packets that arrive after a whole window has passed them.
fn stragglers(rng: &mut Rng, span: u64) -> FaultConfig {
    let set = LinkPatch {
        reordering: Some(chance(rng, 0.05)),
        reorder_delay: Some(Ns(rng.scale(1_000_000, 100_000_000))),
        duplication: Some(chance(rng, 0.5)),
        ..LinkPatch::default()
    };
    let until = Some(Ns(span + rng.scale(1_000_000, 100_000_000)));
    FaultConfig { at: Ns(0), until, links: Some("*".into()), set, ..FaultConfig::default() }
}

fn fault(rng: &mut Rng, s: &Scenario, span: u64) -> FaultConfig {
    let hosts = u64::from(s.topology.hosts());
    let at = rng.below(span * 3 / 2);
    // Mostly about as long as normal operations take; sometimes so long that all peers give up and drop their state.
    let long = if rng.one_in(10) { rng.scale(100_000_000, 90_000_000_000) } else { rng.scale(10_000, 200_000_000) };
    let mut f = FaultConfig { at: Ns(at), until: Some(Ns(at + long.max(1))), ..FaultConfig::default() };
    let down = LinkPatch { down: Some(true), ..LinkPatch::default() };
    match rng.below(14) {
        // Some links.
        0 | 1 => {
            (f.links, f.set) = (Some("*".into()), down);
            f.some = rng.range(1, 8) as u32;
            f.both_ways = rng.one_in(2);
        }
        // All links at once.
        2 | 3 => (f.links, f.set) = (Some("*".into()), down),
        // One direction: packets that a host sends, or that it receives.
        4 => {
            let host = rng.below(hosts);
            f.links = Some(if rng.one_in(2) { format!("h{host}>*") } else { format!("*>h{host}*") });
            f.set = down;
        }
        5 | 6 => {
            f.links = Some("*".into());
            f.some = rng.range(0, 6) as u32;
            (f.flap_down, f.flap_up) = (Ns(rng.scale(10_000, 10_000_000)), Ns(rng.scale(100_000, 20_000_000)));
            // Limits the number of events.
            f.until = Some(Ns(at + long.min(20 * (f.flap_down.0 + f.flap_up.0))));
        }
        // Losses, delays, queues.
        7 | 8 => {
            f.links = Some("*".into());
            f.some = rng.pick(&[0, 1, 2, 4]);
            f.set = match rng.below(4) {
                0 => LinkPatch { loss: Some(chance(rng, 0.9)), ..LinkPatch::default() },
                1 => LinkPatch { delay: Some(Ns(rng.scale(100_000, 50_000_000))), ..LinkPatch::default() },
                2 => LinkPatch { queue: Some(Bytes(rng.scale(10_000, 100_000))), ..LinkPatch::default() },
                _ => LinkPatch {
                    reordering: Some(chance(rng, 0.5)),
                    reorder_delay: Some(Ns(rng.scale(10_000, 100_000_000))),
                    duplication: Some(chance(rng, 0.5)),
                    ..LinkPatch::default()
                },
            };
        }
        9 => f.pause = Some(rng.below(hosts) as u32),
        10 | 11 => {
            f.crash = Some(rng.below(hosts) as u32);
            if rng.one_in(2) {
                f.until = Some(Ns(at + rng.scale(10_000, 5_000_000)));
            }
        }
        12 => {
            f.stall = Some(rng.below(u64::from(s.guest_count())) as u32);
            if rng.one_in(2) {
                f.receive_gap = Ns(rng.scale(1_000, 1_000_000));
            }
        }
        _ => {
            f.port = Some(rng.below(u64::from(s.guest_count())) as u32);
            f.to_guest = Some(!rng.one_in(6));
            match rng.below(3) {
                0 => f.loss = chance(rng, 0.9),
                1 => f.duplication = chance(rng, 0.5),
                _ if f.to_guest == Some(true) => f.corruption = chance(rng, 0.5),
                _ => f.loss = chance(rng, 0.1),
            }
        }
    }
    f
}
