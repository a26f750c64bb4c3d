//! Copies of conversations for another number of workers: each is at the worker that gets its packets.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use bifrost_avs::{
    CarryError, Copying, Distribution, DropReason, GroupId, PeerId, PortId, Prepared, Route, SecurityGroup,
    SessionLimits, Switch, Tables, WorkerId, Workers,
};
use bifrost_nic::steer;
use bifrost_wire::Mac;
use common::any::{SECOND, SYN};
use common::outside::*;
use common::*;
use proptest::prelude::*;

const ACK: u8 = 0x10;
/// Guest 1 of VNI 200 and its port.
const GUEST: u32 = 5;
const REMOTES: u8 = 40;

/// The MAC address of a remote vNIC in VNI 200.
fn remote(n: u8) -> Mac {
    Mac([2, 0, 0, 0, 1, n])
}

/// The world with an uplink, in which nobody may connect to the guest of VNI 200, as one of `count` workers has it.
fn of_worker(own: u16, count: u16) -> Tables {
    let mut tables = world();
    let routes = (0..REMOTES).map(|n| Route {
        vni: vni(200),
        prefix: format!("10.0.0.{}/32", 100 + n).parse().unwrap(),
        peer: PeerId(9),
        mac: remote(n),
        mtu: 1500,
    });
    tables.routes.extend(routes);
    // VNI 200 has no way to the outside: its packets keep their pair of vNICs.
    tables.vpcs[1].gateways.clear();
    tables.nat.sources.retain(|source| source.vni != vni(200));
    tables.groups = vec![SecurityGroup::new(Vec::new())];
    for port in &mut tables.ports {
        match port.id {
            PortId(GUEST) => port.groups = vec![GroupId(0)],
            PortId(UPLINK) if count > 1 => port.home = Some(WorkerId(UPLINK as u16 % count)),
            _ => {}
        }
    }
    tables.workers = Workers { own: WorkerId(own), count };
    tables
}

/// The workers of a host.
struct Host {
    switches: Vec<Switch>,
    copying: Vec<Copying>,
}

impl Host {
    fn new(count: u16) -> Host {
        Host::with(count, SessionLimits::default())
    }

    fn with(count: u16, sessions: SessionLimits) -> Host {
        let switch = |own| build(&Tables { sessions, ..of_worker(own, count) });
        Host { switches: (0..count).map(switch).collect(), copying: Vec::new() }
    }

    fn of_pair(&mut self, n: u8) -> &mut Switch {
        let count = self.switches.len() as u16;
        let worker = steer::worker_of_pair(mac(1).octets(), remote(n).octets(), count);
        &mut self.switches[usize::from(worker)]
    }

    fn of_uplink(&mut self) -> &mut Switch {
        let count = self.switches.len() as u16;
        &mut self.switches[usize::from(UPLINK as u16 % count)]
    }

    /// The guest of VNI 200 connects to a remote vNIC.
    fn connect(&mut self, n: u8, port: u16) {
        let to = format!("10.0.0.{}", 100 + n);
        let frame = ends::frame((mac(1), remote(n)), ("10.0.0.1", port), (&to, 443), Some(SYN));
        guest(self.of_pair(n), GUEST, &frame);
    }

    /// The remote vNIC answers.
    fn answered(&mut self, n: u8, port: u16, tcp: u8) -> Result<PortId, DropReason> {
        let from = format!("10.0.0.{}", 100 + n);
        let frame = ends::frame((remote(n), mac(1)), (&from, 443), ("10.0.0.1", port), Some(tcp));
        underlay(self.of_pair(n), 200, 9, &frame)
    }

    /// All sessions and NAT mappings.
    fn counts(&self) -> [u64; 2] {
        let sum = |of: &dyn Fn(&Switch) -> u64| self.switches.iter().map(of).sum::<u64>();
        [sum(&|s| s.session_counters().current), sum(&|s| s.nat_counters().current)]
    }

    /// One step of copying, or the last one.
    fn copy(&mut self, max: Option<usize>) -> Vec<Vec<u8>> {
        let of_worker = |(switch, copying): (&mut Switch, &mut Copying)| {
            let mut bytes = Vec::new();
            match max {
                Some(max) => drop(switch.copy_some(copying, max, &mut bytes)),
                None => switch.copy_rest(&mut bytes),
            }
            copying.sort();
            bytes
        };
        self.switches.iter_mut().zip(&mut self.copying).map(of_worker).collect()
    }
}

#[derive(Clone, Debug)]
enum Act {
    Connect {
        n: u8,
        port: u16,
    },
    Answer {
        n: u8,
        port: u16,
    },
    /// A guest sends to the outside, over UDP.
    Send {
        port: u16,
        to: u16,
    },
    Wait {
        s: u64,
    },
    Copy {
        max: usize,
    },
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        5 => (0..REMOTES, 0u16..3).prop_map(|(n, port)| Act::Connect { n, port }),
        3 => (0..REMOTES, 0u16..3).prop_map(|(n, port)| Act::Answer { n, port }),
        3 => (0u16..8, 0u16..3).prop_map(|(port, to)| Act::Send { port, to }),
        1 => (1u64..100).prop_map(|s| Act::Wait { s }),
        2 => (1usize..9).prop_map(|max| Act::Copy { max }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 2 } else { 200 }, ..ProptestConfig::default() })]
    #[test]
    fn conversations_are_where_their_packets_are(
        counts in (1u16..6, 1u16..6),
        acts in prop::collection::vec(act(), 1..120),
    ) {
        let (mut former, mut next) = (Host::new(counts.0), Host::new(counts.1));
        let prepared = Prepared::build(&of_worker(0, counts.1)).unwrap();
        let mut distribution = Distribution::new(usize::from(counts.0), usize::from(counts.1));
        former.copying = former.switches.iter_mut().map(Switch::start_copying).collect();
        let (mut now_s, mut sent) = (1000, Vec::new());
        for act in &acts {
            match *act {
                Act::Connect { n, port } => former.connect(n, port),
                Act::Answer { n, port } => drop(former.answered(n, port, SYN | ACK)),
                Act::Send { port, to } => {
                    let frame = from_guest(("10.0.0.1", 5000 + port), (REMOTE, 53 + to), None);
                    sent.extend(leaves(former.of_uplink(), 0, &frame));
                }
                Act::Wait { s } => {
                    now_s += s;
                    former.switches.iter_mut().for_each(|switch| switch.advance(now_s * SECOND));
                }
                Act::Copy { max } => {
                    let steps = former.copy(Some(max));
                    let steps = prepared.distribute(&mut distribution, &steps).unwrap();
                    for (switch, bytes) in next.switches.iter_mut().zip(&steps) {
                        switch.take_over_copies(now_s * SECOND, bytes).unwrap();
                    }
                }
            }
        }
        let rest = prepared.distribute(&mut distribution, &former.copy(None)).unwrap();
        for (switch, bytes) in next.switches.iter_mut().zip(&rest) {
            let taken = switch.take_over_memory(now_s * SECOND, bytes).unwrap();
            prop_assert_eq!(taken.left_out, 0);
        }
        prop_assert_eq!(distribution.left_out(), 0);
        prop_assert_eq!(next.counts(), former.counts());
        // What the former workers accept, the next ones do.
        for (n, port) in (0..REMOTES).flat_map(|n| (0..3).map(move |port| (n, port))) {
            prop_assert_eq!(next.answered(n, port, ACK), former.answered(n, port, ACK), "{} {}", n, port);
        }
        for out in &sent {
            let answer = answer_to(out, outside(), None);
            prop_assert_eq!(comes(next.of_uplink(), &answer), comes(former.of_uplink(), &answer));
        }
    }

    /// Whatever another process sends is an error or is left out.
    #[test]
    fn damaged_copies_do_no_harm(
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        cut in any::<prop::sample::Index>(),
        is_cut in any::<bool>(),
    ) {
        let mut former = Host::new(2);
        former.copying = former.switches.iter_mut().map(Switch::start_copying).collect();
        (0..6).for_each(|n| former.connect(n, 1));
        for port in 0..3 {
            let _ = leaves(former.of_uplink(), 0, &from_guest(("10.0.0.1", 5000 + port), (REMOTE, 53), None));
        }
        let mut steps = former.copy(None);
        for step in &mut steps {
            if step.is_empty() {
                continue;
            }
            for (at, byte) in &damage {
                let at = at.index(step.len());
                step[at] = *byte;
            }
            if is_cut {
                step.truncate(cut.index(step.len()));
            }
        }
        let prepared = Prepared::build(&of_worker(0, 3)).unwrap();
        let mut next = Host::new(3);
        if let Ok(steps) = prepared.distribute(&mut Distribution::new(2, 3), &steps) {
            for (switch, bytes) in next.switches.iter_mut().zip(&steps) {
                let _ = switch.take_over_memory(1000 * SECOND, bytes);
            }
        }
    }
}

/// Each worker may have as many sessions as before, so fewer workers have room for fewer. What does not fit is counted.
#[test]
fn sessions_beyond_the_limit_of_fewer_workers_are_counted() {
    const EACH: u32 = 16;
    let limits = SessionLimits { total: EACH, per_port: EACH };
    for steps in [0, 3] {
        let mut former = Host::with(2, limits);
        former.copying = former.switches.iter_mut().map(Switch::start_copying).collect();
        (0..REMOTES).for_each(|n| former.connect(n, 1));
        let [before, _] = former.counts();
        assert_eq!(before, u64::from(2 * EACH), "both workers are full");
        let prepared = Prepared::build(&Tables { sessions: limits, ..of_worker(0, 1) }).unwrap();
        let (mut distribution, mut next) = (Distribution::new(2, 1), Host::with(1, limits));
        for _ in 0..steps {
            let copies = prepared.distribute(&mut distribution, &former.copy(Some(4))).unwrap();
            next.switches[0].take_over_copies(1000 * SECOND, &copies[0]).unwrap();
        }
        let rest = prepared.distribute(&mut distribution, &former.copy(None)).unwrap();
        let taken = next.switches[0].take_over_memory(1000 * SECOND, &rest[0]).unwrap();
        let counters = next.switches[0].session_counters();
        assert_eq!(counters.current, u64::from(EACH));
        assert_eq!(
            counters.evicted + taken.left_out,
            before - counters.current,
            "{steps} steps: {counters:?} {taken:?}"
        );
        // The worker goes on, and its other sessions are those of the former ones.
        let accepted = |host: &mut Host| (0..REMOTES).filter(|n| host.answered(*n, 1, SYN | ACK).is_ok()).count();
        assert_eq!(accepted(&mut next), EACH as usize);
    }
}

/// The route to the other end is gone in the next configuration: any worker may get its packets once it is back.
#[test]
fn conversations_without_a_known_worker_are_everywhere() {
    let mut former = Host::new(1);
    former.copying = former.switches.iter_mut().map(Switch::start_copying).collect();
    former.connect(0, 5000);
    assert_eq!(former.counts()[0], 1);
    let mut tables = of_worker(0, 3);
    tables.routes.retain(|route| route.mac != remote(0));
    let prepared = Prepared::build(&tables).unwrap();
    let mut distribution = Distribution::new(1, 3);
    let mut next = Host::new(3);
    let rest = prepared.distribute(&mut distribution, &former.copy(None)).unwrap();
    for (switch, bytes) in next.switches.iter_mut().zip(&rest) {
        assert_eq!(switch.take_over_memory(1000 * SECOND, bytes).unwrap().sessions, 1);
    }
    // Whole tables are for the same number of workers only.
    let mut whole = Vec::new();
    former.switches[0].carry_memory(&mut whole);
    let refused = prepared.distribute(&mut distribution, &[whole]);
    assert_eq!(refused.unwrap_err(), CarryError::Foreign);
}
