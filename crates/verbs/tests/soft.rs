//! The software NIC's socket.

#![allow(clippy::unwrap_used)]

use std::net::{IpAddr, Ipv6Addr, UdpSocket};
use std::time::{Duration, Instant};

use bifrost_udp::set_int;
use bifrost_verbs::{Soft, SoftConfig};

/// linux/udp.h
const UDP_NO_CHECK6_TX: i32 = 101;

/// RDMA NICs send datagrams without a checksum, and an IPv6 socket drops these by default.
#[test]
fn datagrams_without_a_udp_checksum_are_received() {
    let address = IpAddr::V6(Ipv6Addr::LOCALHOST);
    let mut soft = Soft::new(SoftConfig { address, port: 0, queue_pairs: 1, regions: 1, seed: 1 }).unwrap();
    let sender = UdpSocket::bind((address, 0)).unwrap();
    set_int(&sender, libc::SOL_UDP, UDP_NO_CHECK6_TX, 1).unwrap();
    sender.send_to(&[0; 60], (address, soft.nic_port())).unwrap();
    let until = Instant::now() + Duration::from_secs(10);
    while soft.receive().unwrap() == 0 {
        assert!(Instant::now() < until, "the datagram does not arrive");
    }
    assert_eq!(soft.nic_counters().bad_icrc_packets, 1);
}
