//! Small packets that share datagrams (PROTOCOL §3.6).

use std::net::UdpSocket;
use std::time::Duration;

use bifrost_control::api::Direction;

use crate::common::host::vpc;
use crate::common::traffic::ping;
use crate::common::{Lab, Options, eventually};

const COUNT: u32 = 400;

/// Sends numbered datagrams from `a` to `b` in bursts, and returns the numbers in order of arrival. The kernel of `a`
/// must know the MAC address of `b`: packets that wait for the ARP answer are overtaken by packets sent when it
/// arrives.
fn numbers(lab: &Lab, port: u16) -> Vec<u32> {
    let receiver = lab.net("b").enter(move || UdpSocket::bind(("10.0.0.2", port)).unwrap());
    receiver.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    let sender = lab.net("a").enter(|| UdpSocket::bind("10.0.0.1:0").unwrap());
    let mut arrived = Vec::new();
    for burst in 0..COUNT / 40 {
        for number in burst * 40..(burst + 1) * 40 {
            // Different lengths, which segmentation offload cannot join.
            let mut bytes = vec![number as u8; 40 + number as usize % 60];
            bytes[..4].copy_from_slice(&number.to_be_bytes());
            sender.send_to(&bytes, ("10.0.0.2", port)).unwrap();
        }
        let mut buffer = [0; 2000];
        while arrived.len() < (burst as usize + 1) * 40 {
            let Ok(length) = receiver.recv(&mut buffer) else { break };
            let number = u32::from_be_bytes(*buffer.first_chunk().unwrap());
            assert!(buffer[4..length].iter().all(|byte| *byte == number as u8), "{number}");
            assert_eq!(length, 40 + number as usize % 60);
            arrived.push(number);
        }
    }
    arrived
}

/// Packets that `from` has bundled, and packets that `to` has unbundled.
fn shared(lab: &Lab, from: usize, to: usize) -> (u64, u64) {
    (lab.hosts[from].counter("datapath.bundled_packets"), lab.hosts[to].counter("datapath.unbundled_packets"))
}

#[test]
fn a_burst_of_small_packets_shares_datagrams_and_each_arrives() {
    for (v6, workers) in [(false, 1), (true, 2)] {
        let lab = Lab::running(Options { v6, workers, vpcs: vpc(100, "all", "flow"), ..Options::default() });
        assert_eq!(ping(lab.net("a"), "10.0.0.2", 2, 56), 2);
        assert_eq!(numbers(&lab, 5001), (0..COUNT).collect::<Vec<_>>());
        let (joined, _) = shared(&lab, 0, 1);
        assert!(joined > u64::from(COUNT) / 4, "{joined} of {COUNT} shared a datagram");
        // A retransmission between the two readings is only in one of them.
        eventually(2.0, "one host unbundles what the other has bundled", || {
            let (joined, parted) = shared(&lab, 0, 1);
            joined == parted
        });
        lab.hosts.iter().for_each(|host| host.assert_balanced());
    }
}

#[test]
fn all_packets_of_a_lost_datagram_are_retransmitted() {
    let lab = Lab::running(Options { vpcs: vpc(100, "all", "flow"), ..Options::default() });
    assert_eq!(ping(lab.net("a"), "10.0.0.2", 2, 56), 2);
    lab.hosts[0].path_fault("host-b", None, |f| (f.direction, f.loss_percent) = (Direction::Tx, 10.0));
    assert_eq!(numbers(&lab, 5001), (0..COUNT).collect::<Vec<_>>());
    let (joined, _) = shared(&lab, 0, 1);
    assert!(joined > u64::from(COUNT) / 4, "{joined} of {COUNT} shared a datagram");
    assert!(lab.hosts[0].counter("fault.tx_dropped_packets") > 0);
    assert!(lab.hosts[0].counter("rte.retransmitted_packets") > 0);
    lab.assert_nothing_given_up();
    lab.hosts.iter().for_each(|host| host.assert_balanced());
}

#[test]
fn without_bundles_each_packet_has_its_own_datagram() {
    let lab = Lab::running(Options {
        vpcs: vpc(100, "all", "flow"),
        transport: "bundle_bytes = 0\n".to_owned(),
        ..Options::default()
    });
    assert_eq!(ping(lab.net("a"), "10.0.0.2", 2, 56), 2);
    assert_eq!(numbers(&lab, 5001), (0..COUNT).collect::<Vec<_>>());
    assert_eq!((shared(&lab, 0, 1), shared(&lab, 1, 0)), ((0, 0), (0, 0)));
}
