//! Checks that every packet is accounted for: each packet that entered a stage has left it, was dropped and counted, or
//! is still in it.
//!
//! Each stage is one equation over the counters of a port, a worker, or the daemon. The counters of a worker are read
//! together, between two turns of its loop, and so are those of each of its ports. Equations therefore hold at any time
//! and under any load, except the one for packets between two workers.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::api::{Place, Sample};

/// The samples over which an equation sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scope {
    /// Samples of one port on one worker.
    Port,
    /// Samples of one worker, without those of its ports, which are read later, one port after the other.
    Worker,
    /// All samples of the daemon. The equation holds while no packet is between two workers.
    Daemon,
}

/// An equation: the sum of `entered` equals the sum of `left`.
struct Stage {
    name: &'static str,
    scope: Scope,
    /// The equation applies only where this counter exists.
    needs: &'static str,
    /// A name that ends in `*` stands for all counters with this prefix.
    entered: &'static [&'static str],
    left: &'static [&'static str],
}

const STAGES: [Stage; 10] = [
    Stage {
        name: "device to worker",
        scope: Scope::Port,
        needs: "tap.tx_packets",
        entered: &["tap.tx_packets"],
        left: &["port.fetched_packets"],
    },
    Stage {
        name: "worker to switch",
        scope: Scope::Port,
        needs: "port.fetched_packets",
        entered: &["port.fetched_packets", "port.reswitched_packets", "port.resumed_packets"],
        left: &[
            "port.tx_packets",
            "port.malformed_packets",
            "port.unswitched_packets",
            "port.gone_unswitched_packets",
            "port.faulted_unswitched_packets",
        ],
    },
    Stage {
        name: "switch",
        scope: Scope::Port,
        needs: "port.tx_packets",
        entered: &["port.tx_packets", "port.copy_packets"],
        left: &[
            "port.fault_dropped_packets",
            "avs.to_remote_packets",
            "avs.to_local_packets",
            "avs.answered_packets",
            "avs.copied_packets",
            "avs.to_host_packets",
            "avs.asked_packets",
            "avs.dropped_*",
            "port.faulted_packets",
        ],
    },
    Stage {
        name: "switch to transport",
        scope: Scope::Port,
        needs: "port.tx_packets",
        entered: &["avs.to_remote_packets", "avs.to_local_packets"],
        left: &[
            "port.accepted_packets",
            "port.plain_packets",
            "port.local_packets",
            "port.unsegmentable_packets",
            "port.blocked_packets",
            "port.window_full_packets",
            "port.queue_full_packets",
            "port.gone_switched_packets",
            "port.reswitched_packets",
            "port.faulted_switched_packets",
        ],
    },
    Stage {
        name: "switch to routes that are learned",
        scope: Scope::Port,
        needs: "port.tx_packets",
        entered: &["avs.asked_packets"],
        left: &["port.resumed_packets", "port.learning_packets", "port.learn_*"],
    },
    Stage {
        name: "transport to underlay",
        scope: Scope::Worker,
        needs: "underlay.tx_packets",
        entered: &["datapath.emitted_packets", "fault.tx_duplicated_packets", "fault.tx_released_packets"],
        left: &[
            "underlay.tx_packets",
            // Sent in the datagrams of other packets.
            "datapath.bundled_packets",
            "drop.gone_tx_packets",
            "drop.reused_buffer_packets",
            "drop.faulted_tx_packets",
            "fault.tx_dropped_packets",
            "fault.tx_corrupted_packets",
            "fault.tx_delayed_packets",
        ],
    },
    Stage {
        name: "underlay to kernel",
        scope: Scope::Worker,
        needs: "udp.tx_datagrams",
        entered: &["underlay.tx_packets"],
        left: &[
            "afxdp.tx_datagrams",
            "afxdp.tx_no_frame_datagrams",
            "udp.tx_datagrams",
            "udp.tx_no_buffer_datagrams",
            "udp.tx_too_big_datagrams",
            "udp.tx_unreachable_datagrams",
            "udp.tx_refused_datagrams",
            "udp.tx_other_error_datagrams",
            "udp.tx_unknown_lane_datagrams",
        ],
    },
    Stage {
        name: "kernel to guests",
        scope: Scope::Worker,
        needs: "udp.rx_datagrams",
        // The same code places packets between ports of this host.
        entered: &[
            "udp.rx_datagrams",
            "afxdp.rx_datagrams",
            "datapath.unbundled_packets",
            "datapath.taken_over_packets",
            "datapath.local_packets",
            "datapath.fragment_packets",
            "datapath.answered_packets",
            "fault.rx_duplicated_packets",
            "fault.rx_released_packets",
            "datapath.rx_released_packets",
            // Dropped in other stages, but included in `fault.dropped_packets`.
            "fault.tx_dropped_packets",
            "fault.guest_dropped_packets",
        ],
        left: &[
            "datapath.guest_rx_packets",
            "datapath.rx_queued_packets",
            "datapath.handed_over_packets",
            "datapath.control_rx_packets",
            "datapath.not_accepted_packets",
            "datapath.discarded_packets",
            "datapath.unread_datagrams",
            "datapath.fragmented_packets",
            "datapath.followed_packets",
            "avs.underlay_dropped_*",
            "avs.underlay_ingress_dropped_packets",
            "avs.underlay_too_big_answered_packets",
            "rte.no_guest_buffer_packets",
            "drop.hand_over_overflow_packets",
            "drop.unknown_peer_packets",
            "drop.bad_vxlan_packets",
            "drop.bad_checksum_frames",
            "drop.wrong_vnic_packets",
            "drop.marked_not_ect_packets",
            "drop.no_buffer_packets",
            "drop.too_large_packets",
            "drop.gone_packets",
            "drop.faulted_packets",
            "refused.*",
            "malformed.underlay_*",
            "fault.dropped_packets",
            "fault.rx_corrupted_packets",
            "fault.rx_delayed_packets",
        ],
    },
    Stage {
        name: "worker to device",
        scope: Scope::Port,
        needs: "tap.rx_frames",
        entered: &["port.rx_packets", "port.answer_packets"],
        left: &[
            "tap.rx_frames",
            "tap.rx_device_down_frames",
            "tap.rx_refused_frames",
            "tap.rx_other_error_frames",
            "tap.rx_held_frames",
        ],
    },
    Stage {
        name: "worker to worker",
        scope: Scope::Daemon,
        needs: "datapath.handed_over_packets",
        entered: &["datapath.handed_over_packets"],
        left: &["datapath.taken_over_packets"],
    },
];

/// Packets that a fault has delayed or duplicated.
const WAITING: Stage = Stage {
    name: "faults that delay",
    scope: Scope::Worker,
    needs: "fault.queued_packets",
    entered: &["fault.queued_packets"],
    left: &[
        "fault.waiting_packets",
        "fault.overflow_packets",
        "fault.tx_released_packets",
        "fault.rx_released_packets",
    ],
};

/// The balance of a stage at one port, worker, or the daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Balance {
    /// The stage.
    pub stage: String,
    /// Where.
    #[serde(flatten)]
    pub at: Place,
    /// Packets that entered it.
    pub entered: u64,
    /// Packets that left it, were dropped there, or are still there.
    pub left: u64,
}

impl Balance {
    /// Packets that vanished; below 0: packets of unknown origin.
    pub fn unexplained(&self) -> i64 {
        self.entered as i64 - self.left as i64
    }
}

/// The balances of all stages, everywhere they are counted.
pub fn balance(samples: &[Sample]) -> Vec<Balance> {
    STAGES.iter().chain([&WAITING]).flat_map(|stage| stage.accounts(samples)).collect()
}

/// The balances that are not 0, among the stages whose equation holds at any time.
pub fn unexplained(samples: &[Sample]) -> Vec<Balance> {
    let stages = STAGES.iter().chain([&WAITING]).filter(|stage| stage.scope != Scope::Daemon);
    stages.flat_map(|stage| stage.accounts(samples)).filter(|account| account.unexplained() != 0).collect()
}

impl Stage {
    fn accounts(&self, samples: &[Sample]) -> Vec<Balance> {
        let mut accounts: BTreeMap<Place, Balance> = BTreeMap::new();
        for sample in samples.iter().filter(|s| s.counter == self.needs) {
            if let Some(at) = self.scope.group_of(&sample.at) {
                accounts.insert(at.clone(), Balance { stage: self.name.to_owned(), at, ..Balance::default() });
            }
        }
        for sample in samples {
            let Some(account) = self.scope.group_of(&sample.at).and_then(|at| accounts.get_mut(&at)) else { continue };
            account.entered += sample.value * u64::from(has(self.entered, &sample.counter));
            account.left += sample.value * u64::from(has(self.left, &sample.counter));
        }
        accounts.into_values().collect()
    }
}

impl Scope {
    /// Which balance a sample belongs to. `None`: to none of this scope.
    fn group_of(self, at: &Place) -> Option<Place> {
        if at.peer.is_some() {
            return None;
        }
        match self {
            Scope::Port => at.port.is_some().then(|| at.clone()),
            Scope::Worker => at.port.is_none().then(|| Place { worker: at.worker, ..Place::default() }),
            Scope::Daemon => Some(Place::default()),
        }
    }
}

fn has(terms: &[&str], counter: &str) -> bool {
    terms.iter().any(|term| term.strip_suffix('*').map_or(*term == counter, |start| counter.starts_with(start)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counters;

    fn samples(worker: u32, port: Option<&str>, counters: &[(&str, u64)]) -> Vec<Sample> {
        let at = Place { worker: Some(worker), port: port.map(str::to_owned), ..Place::default() };
        let sample =
            |(counter, value): &(&str, u64)| Sample { counter: (*counter).into(), at: at.clone(), value: *value };
        counters.iter().map(sample).collect()
    }

    #[test]
    fn every_term_is_a_counter() {
        let known: Vec<String> = counters::all().map(|(name, _)| name).collect();
        for stage in STAGES.iter().chain([&WAITING]) {
            for term in stage.entered.iter().chain(stage.left).chain([&stage.needs]) {
                assert!(known.iter().any(|name| has(&[term], name)), "{}: {term}", stage.name);
            }
        }
    }

    #[test]
    fn each_port_of_each_worker_has_its_own_balance() {
        let mut all = samples(
            0,
            Some("a"),
            &[
                ("port.tx_packets", 10),
                ("avs.to_remote_packets", 6),
                ("avs.answered_packets", 1),
                ("avs.dropped_acl_packets", 2),
                ("avs.dropped_vlan_packets", 1),
                ("avs.ingress_dropped_acl_packets", 7),
                ("port.accepted_packets", 5),
                ("port.blocked_packets", 1),
            ],
        );
        all.extend(samples(1, Some("a"), &[("port.tx_packets", 3), ("avs.to_local_packets", 2)]));
        let accounts = balance(&all);
        let of = |stage: &str, worker| {
            accounts.iter().find(|b| b.stage == stage && b.at.worker == Some(worker)).unwrap().unexplained()
        };
        assert_eq!((of("switch", 0), of("switch to transport", 0)), (0, 0));
        assert_eq!((of("switch", 1), of("switch to transport", 1)), (1, 2));
        let wrong = unexplained(&all);
        assert_eq!(wrong.iter().map(|b| b.at.worker.unwrap()).collect::<Vec<_>>(), [1, 1]);
        assert_eq!(wrong[0].at.port.as_deref(), Some("a"));
        // These samples have no counters of the underlay, so there is no balance of it.
        assert!(accounts.iter().all(|b| !b.stage.contains("kernel")));
    }

    #[test]
    fn the_balance_of_a_worker_excludes_its_ports_and_paths() {
        let mut all = samples(
            0,
            None,
            &[
                ("udp.rx_datagrams", 20),
                ("datapath.control_rx_packets", 4),
                ("datapath.guest_rx_packets", 13),
                ("refused.version_packets", 1),
                ("malformed.underlay_tcp_header_frames", 2),
            ],
        );
        // Ports are read later, and count more by then.
        all.extend(samples(0, Some("a"), &[("datapath.guest_rx_packets", 50)]));
        all.push(Sample {
            counter: "datapath.guest_rx_packets".into(),
            at: Place { worker: Some(0), peer: Some("p".into()), ..Place::default() },
            value: 99,
        });
        assert_eq!(unexplained(&all), []);
        all[0].value += 1;
        let wrong = unexplained(&all);
        assert_eq!((wrong.len(), wrong[0].unexplained(), wrong[0].at.port.as_deref()), (1, 1, None));
    }

    #[test]
    fn the_balance_between_workers_holds_when_no_packet_is_in_transit() {
        let mut all = samples(0, None, &[("datapath.handed_over_packets", 5)]);
        all.extend(samples(1, None, &[("datapath.handed_over_packets", 0), ("datapath.taken_over_packets", 4)]));
        let account = balance(&all).into_iter().find(|b| b.stage == "worker to worker").unwrap();
        assert_eq!((account.entered, account.left, account.at), (5, 4, Place::default()));
        assert_eq!(unexplained(&all), []);
    }
}
