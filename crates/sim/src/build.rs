//! Builds a world at time 0 from a scenario.

use std::collections::BTreeSet;
use std::net::IpAddr;

use bifrost_avs as avs;
use bifrost_datapath::Rate;
use bifrost_rte as rte;
use bifrost_tables::IpNet;
use bifrost_wire::{Mac, Vni};
use foldhash::fast::FixedState;
use hashbrown::HashMap;

use crate::flows::{Addresses, Flows};
use crate::host::{Host, HostParts, Vnic};
use crate::network::Network;
use crate::port::SimPort;
use crate::rng::Rng;
use crate::scenario::{HostConfig, Ordering, Reliability, Scenario, ScenarioError, Workload};
use crate::sender::Sender;
use crate::tcp::{Conn, Conns, TcpGuest};
use crate::underlay::SimUnderlay;

/// UDP source port of path 0.
pub(crate) const SOURCE_PORT_BASE: u16 = 49_152;
/// Bytes of an Ethernet header with a tag.
const ETHERNET: usize = 18;
/// First TCP port of light guests' flows, and of servers.
const FLOW_PORT: u16 = 10_000;
const SERVER_PORT: u16 = 5_000;

/// A guest.
pub struct Guest {
    /// Its network.
    pub vni: u32,
    /// Its host.
    pub host: u32,
    /// Its port there.
    pub owner: u32,
    /// Its MAC address; guests of different networks may have the same.
    pub mac: [u8; 6],
    /// Its IPv4 address; guests of different networks may have the same.
    pub ip: [u8; 4],
    /// Limits of its sending and receiving rates.
    pub(crate) rates: (Rate, Rate),
    /// Its weight among the guests of its network when paths are full.
    weight: u8,
    /// Its TCP, if it has one.
    pub(crate) tcp: Option<TcpGuest>,
    /// It receives nothing from its ring.
    pub(crate) stalled: bool,
    /// Interval at which it receives one frame, ns; 0: it receives all frames at once.
    pub(crate) receive_gap: u64,
    /// When a slow guest receives the next frame, ns.
    pub(crate) receive_at: u64,
    /// When its TCP is to be polled, ns.
    pub(crate) poll_at: u64,
    /// Its senders that wait for room in the transmit ring.
    pub(crate) blocked: Vec<u32>,
}

pub(crate) struct Parts {
    pub(crate) network: Network,
    pub(crate) hosts: Vec<Host>,
    pub(crate) guests: Vec<Guest>,
    pub(crate) flows: Flows,
    pub(crate) senders: Vec<(u64, Sender)>,
    pub(crate) conns: Conns,
}

pub(crate) fn build(scenario: &Scenario, config: &rte::Config, rng: &mut Rng) -> Result<Parts, ScenarioError> {
    let network = Network::build(&scenario.topology, SOURCE_PORT_BASE, &mut rng.fork());
    let mut guests = guests(scenario);
    let mut flows = Flows::default();
    let mut conns = Conns::default();
    let mut senders = Vec::new();
    let mut light = BTreeSet::new();
    // Pairs of guests that talk to each other, in both directions.
    let mut talks: BTreeSet<(u32, u32)> = BTreeSet::new();
    for (index, workload) in (0..).zip(&scenario.workloads) {
        let pairs = pairs(workload, &guests);
        if pairs.is_empty() {
            return Err(ScenarioError::Value {
                field: format!("workloads[{index}]"),
                problem: "no guest of `from` has another one of `to` in its network".into(),
            });
        }
        talks.extend(pairs.iter().flat_map(|&(a, b)| [(a, b), (b, a)]));
        match workload {
            Workload::Packets { .. } => {
                for &(from, to) in &pairs {
                    light.extend([from, to]);
                    senders.push(sender(scenario, workload, index, &guests, (from, to), &mut flows, rng));
                }
            }
            _ => connections(workload, index, &pairs, &mut guests, &mut conns, &scenario.host, rng),
        }
    }
    if let Some(both) = light.iter().find(|g| guests[**g as usize].tcp.is_some()) {
        return Err(ScenarioError::Value {
            field: "workloads".into(),
            problem: format!("guest {both} runs a TCP and cannot take part in packets; add guests (guests.per_host)"),
        });
    }
    let hosts = hosts(scenario, config, &guests, &talks, rng);
    Ok(Parts { network, hosts, guests, flows, senders, conns })
}

fn guests(scenario: &Scenario) -> Vec<Guest> {
    let hosts = scenario.topology.hosts();
    let mut all: Vec<Guest> = Vec::new();
    let mut in_network: HashMap<u32, u32, FixedState> = HashMap::default();
    let mut on_host = vec![0u32; hosts as usize];
    for group in &scenario.guests {
        for host in group.hosts.iter(hosts) {
            for _ in 0..group.per_host {
                // Numbered within the network: different networks use the same addresses.
                let n = in_network.entry(group.vni).or_default();
                *n += 1;
                let [_, a, b, c] = n.to_be_bytes();
                let owner = on_host[host as usize];
                on_host[host as usize] += 1;
                let ip = [10, a.wrapping_add(77), b, c];
                all.push(Guest {
                    vni: group.vni,
                    host,
                    owner,
                    mac: mac_of(ip),
                    ip,
                    rates: (rate(group.tx_rate), rate(group.rx_rate)),
                    weight: group.weight,
                    tcp: None,
                    stalled: false,
                    receive_gap: 0,
                    receive_at: 0,
                    poll_at: crate::host::NEVER,
                    blocked: Vec::new(),
                });
            }
        }
    }
    all
}

fn rate(of: Option<crate::units::Rate>) -> Rate {
    Rate { bytes: of.map(|rate| rate.0 / 8), packets: None }
}

/// The MAC address of the guest with this address.
pub(crate) fn mac_of([_, a, b, c]: [u8; 4]) -> [u8; 6] {
    [0x02, 0x77, 0, a, b, c]
}

fn pairs(workload: &Workload, guests: &[Guest]) -> Vec<(u32, u32)> {
    let count = guests.len() as u32;
    let from = workload.from().iter(count);
    let all = from.flat_map(|a| workload.to().iter(count).map(move |b| (a, b)));
    all.filter(|&(a, b)| a != b && guests[a as usize].vni == guests[b as usize].vni).collect()
}

fn sender(
    scenario: &Scenario,
    workload: &Workload,
    index: u32,
    guests: &[Guest],
    (from, to): (u32, u32),
    flows: &mut Flows,
    rng: &mut Rng,
) -> (u64, Sender) {
    let Workload::Packets {
        packets,
        flows: count,
        size,
        size_min,
        segments,
        gap,
        gap_kind,
        burst,
        start,
        start_jitter,
        ..
    } = workload
    else {
        unreachable!("called only for packets")
    };
    let (a, b) = (&guests[from as usize], &guests[to as usize]);
    let vni = scenario.vnis.iter().find(|v| v.id == a.vni);
    let ordering = vni.map_or(Ordering::Flow, |v| v.ordering);
    let pair = flows.add_pair(ordering == Ordering::Strict);
    let high = size.0 as u32;
    let segment_bytes = if *segments > 1 { high } else { 0 };
    let unordered = ordering == Ordering::Off;
    let first = flows.next_flow();
    for _ in 0..*count {
        flows.add(from, to, index, pair, unordered, segment_bytes);
    }
    let sender = Sender {
        from,
        workload: index,
        addresses: Addresses { mac: (a.mac, b.mac), ip: (a.ip, b.ip), port: (FLOW_PORT, SERVER_PORT + index as u16) },
        flows: (first, *count),
        left: *packets,
        size: (size_min.map_or(high, |m| m.0 as u32), high),
        segments: *segments,
        gap: gap.0,
        gap_kind: *gap_kind,
        burst: *burst,
        burst_left: 0,
        run: (first, 0),
        blocked: false,
        rng: rng.fork(),
    };
    let jitter = if start_jitter.0 > 0 { rng.below(start_jitter.0 + 1) } else { 0 };
    (start.0 + jitter, sender)
}

fn connections(
    workload: &Workload,
    index: u32,
    pairs: &[(u32, u32)],
    guests: &mut [Guest],
    conns: &mut Conns,
    host: &HostConfig,
    rng: &mut Rng,
) {
    let (number, count, sizes, think, together, buffer, start) = match workload {
        Workload::Packets { .. } => return,
        Workload::Request { connections, count, request, response, think, together, buffer, start, .. } => {
            (*connections, *count, (request.0.max(1), response.0), think.0, *together, buffer.0, start.0)
        }
        Workload::Bulk { connections, bytes, buffer, start, .. } => {
            (*connections, 1, (bytes.0.max(1), 0), 0, false, buffer.0, start.0)
        }
    };
    let mut groups: Vec<u32> = Vec::new();
    for &(client, server) in pairs {
        // One group per client.
        let group = together.then(|| {
            let at = groups.iter().position(|c| *c == client).unwrap_or_else(|| {
                groups.push(client);
                groups.len() - 1
            });
            conns.first_group(index) + at as u32
        });
        for _ in 0..number {
            let port = SERVER_PORT.wrapping_add(conns.all.len() as u16 % 60_000);
            let conn = conns.add(Conn::new(index, (client, server), port, start, sizes, count, think, group));
            for (guest, is_client) in [(client, true), (server, false)] {
                let g = &mut guests[guest as usize];
                let (mac, ip) = (g.mac, g.ip);
                let tcp = g.tcp.get_or_insert_with(|| TcpGuest::new(guest, mac, ip, host, rng.next_u64()));
                tcp.add(conn, is_client, port, buffer as usize);
                g.poll_at = 0;
            }
        }
    }
}

fn hosts(
    scenario: &Scenario,
    config: &rte::Config,
    guests: &[Guest],
    talks: &BTreeSet<(u32, u32)>,
    rng: &mut Rng,
) -> Vec<Host> {
    let count = scenario.topology.hosts() as usize;
    let mut local: Vec<Vec<u32>> = vec![Vec::new(); count];
    for (id, guest) in (0..).zip(guests) {
        local[guest.host as usize].push(id);
    }
    // By host: the guests on other hosts that its guests talk to.
    let mut remote: Vec<BTreeSet<u32>> = vec![BTreeSet::new(); count];
    for &(a, b) in talks {
        let (here, there) = (guests[a as usize].host, guests[b as usize].host);
        if here != there {
            remote[here as usize].insert(b);
        }
    }
    let vni = |id: u32| Vni::new(id).unwrap_or(Vni::new(1).expect("1 is a VNI"));
    let mut hosts = Vec::with_capacity(count);
    for id in 0..count as u32 {
        let (local, remote) = (&local[id as usize], &remote[id as usize]);
        let peers: BTreeSet<u32> = remote.iter().map(|g| guests[*g as usize].host).collect();
        let peers: Vec<u32> = peers.into_iter().collect();
        let number = |host: u32| avs::PeerId(peers.binary_search(&host).unwrap_or(0) as u32);
        let used = |id: u32| local.iter().any(|g| guests[*g as usize].vni == id);
        let tables = avs::Tables {
            vpcs: scenario
                .vnis
                .iter()
                .filter(|v| used(v.id))
                .map(|v| avs::Vpc {
                    vni: vni(v.id),
                    reliability: match v.reliability {
                        Reliability::Tcp => avs::Reliability::Tcp,
                        Reliability::All => avs::Reliability::All,
                        Reliability::Off => avs::Reliability::Off,
                    },
                    ordering: match v.ordering {
                        Ordering::Flow => avs::Ordering::Flow,
                        Ordering::Strict => avs::Ordering::Strict,
                        Ordering::Off => avs::Ordering::Off,
                    },
                    gateways: Vec::new(),
                    acl: Vec::new(),
                })
                .collect(),
            ports: local
                .iter()
                .map(|g| &guests[*g as usize])
                .map(|g| avs::Port {
                    id: avs::PortId(g.owner),
                    vni: vni(g.vni),
                    mac: Mac(g.mac),
                    addresses: vec![IpAddr::from(g.ip)],
                    routed: vec![],
                    mtu: scenario.host.mtu,
                    groups: Vec::new(),
                    home: None,
                })
                .collect(),
            routes: remote
                .iter()
                .map(|g| &guests[*g as usize])
                .map(|g| avs::Route {
                    vni: vni(g.vni),
                    prefix: IpNet::from(IpAddr::from(g.ip)),
                    peer: number(g.host),
                    mac: Mac(g.mac),
                    mtu: scenario.host.mtu,
                })
                .collect(),
            ..avs::Tables::default()
        };
        let vnics = local.iter().map(|&guest| {
            let g = &guests[guest as usize];
            let policy = scenario.vnis.iter().find(|v| v.id == g.vni);
            let ordering = match policy.map(|v| v.ordering).unwrap_or_default() {
                Ordering::Flow => rte::Ordering::Flow,
                Ordering::Strict => rte::Ordering::Strict,
                Ordering::Off => rte::Ordering::Off,
            };
            let reliable = policy.is_none_or(|v| v.reliability != Reliability::Off);
            let weights = (policy.map_or(1, |v| v.weight), g.weight);
            let port =
                SimPort::new(scenario.host.tx_ring, scenario.host.rx_ring, usize::from(scenario.host.mtu) + ETHERNET);
            (Vnic { guest, vni: vni(g.vni), mac: Mac(g.mac), ordering, reliable, rates: g.rates, weights }, port)
        });
        // The clocks of hosts are independent. Some are about to wrap their counters of 64 ns ticks.
        let clock_offset = rng.below(1 << 40);
        hosts.push(Host::new(HostParts {
            id,
            underlay: SimUnderlay::new(id, scenario.host.receive_queue.0, clock_offset),
            vnics: vnics.collect(),
            tables,
            paths: scenario.paths_of(id),
            source_port_base: SOURCE_PORT_BASE,
            config: config.clone(),
            control_dscp: scenario.host.control_dscp,
            peers,
        }));
    }
    hosts
}
