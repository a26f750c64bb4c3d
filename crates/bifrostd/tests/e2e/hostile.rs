//! Malformed and forged packets: each kind is dropped, counted once under its reason, and does not affect others.

use std::net::{IpAddr, SocketAddr};

use bifrost_control::api::Conn;

use crate::common::host::vpc;
use crate::common::traffic::Talk;
use crate::common::{Counters, Guest, Lab, Options, eventually, growth, raw};

/// Counters that may only grow if a test names them.
fn is_refusal(name: &str) -> bool {
    let rte = [
        "duplicate",
        "outside_window",
        "no_guest_buffer",
        "no_page",
        "policy_dropped",
        "ack_invalid",
        "unknown_cid",
        "wrong_",
        "unknown_path",
        "resets",
        "stray",
        "stale",
        "rejected",
        "rejects",
        "restarted",
        "unanswered",
        "best_effort",
        "given_up",
        "skips",
    ];
    ["drop.", "refused.", "malformed.", "avs.underlay_dropped"].iter().any(|p| name.starts_with(p))
        || name.strip_prefix("rte.").is_some_and(|n| rte.iter().any(|p| n.starts_with(p)))
}

struct Attack {
    lab: Lab,
    talk: Talk,
    to: SocketAddr,
    vxlan: SocketAddr,
}

impl Attack {
    /// Two VPCs; the attacked pair is in one of them, with an open idle connection.
    fn new(workers: usize) -> Attack {
        let vpcs = vpc(100, "tcp", "flow") + &vpc(200, "tcp", "flow");
        let mut lab = Lab::new(Options { vpcs, workers, ..Options::default() });
        lab.add(0, Guest::new("a", 1, &["10.0.0.1/24"]));
        lab.add(1, Guest::new("b", 2, &["10.0.0.2/24"]));
        lab.add(0, Guest::new("c", 3, &["10.0.0.3/24"]));
        lab.add(1, Guest::new("d", 4, &["10.0.0.4/24"]));
        lab.add(0, Guest::new("t", 8, &["10.0.0.1/24"]).vni(200));
        lab.start();
        let talk = Talk::start(lab.net("a"), lab.net("b"), "10.0.0.2", 5001);
        let own = lab.hosts[0].addresses[0];
        let mut attack = Attack { lab, talk, to: SocketAddr::new(own, 4794), vxlan: SocketAddr::new(own, 4789) };
        attack.assert_traffic_flows();
        attack
    }

    /// The first host's side of the connection.
    fn conn(&self) -> Conn {
        self.lab.hosts[0].conns_with(self.lab.guest("b")).remove(0)
    }

    fn assert_traffic_flows(&mut self) {
        for _ in 0..3 {
            let took = self.talk.say(50_000);
            assert!(took.as_secs_f64() < 1.0, "{took:?}");
        }
        // Wait for the last acknowledgements.
        std::thread::sleep(std::time::Duration::from_millis(20));
    }

    /// Sends datagrams from the peer's host. Exactly these counters must grow, by exactly these amounts.
    fn expect(&mut self, what: &str, datagrams: Vec<Vec<u8>>, counters: &[(&str, u64)]) {
        let (from, to) = (self.lab.hosts[1].addresses[0], self.to);
        self.expect_from(what, from, to, datagrams, counters);
    }

    fn expect_from(
        &mut self,
        what: &str,
        from: IpAddr,
        to: SocketAddr,
        datagrams: Vec<Vec<u8>>,
        counters: &[(&str, u64)],
    ) {
        let before = self.lab.hosts[0].counters();
        raw::send_datagrams(&self.lab.hosts[1].net, from, to, datagrams);
        self.compare(what, &before, counters);
        self.assert_traffic_flows();
    }

    fn compare(&self, what: &str, before: &Counters, counters: &[(&str, u64)]) {
        let expected: Counters = counters.iter().map(|(n, v)| (n.to_string(), *v)).collect();
        let mut grown = Counters::new();
        for _ in 0..100 {
            grown = growth(before, &self.lab.hosts[0].counters(), is_refusal);
            if grown == expected {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        assert_eq!(grown, expected, "{what}");
        // No counter grows later, either.
        std::thread::sleep(std::time::Duration::from_millis(10));
        assert_eq!(growth(before, &self.lab.hosts[0].counters(), is_refusal), expected, "{what}");
    }
}

/// A data packet: header and frame.
fn data(kind: u8, version: u8, flags: u8, psn: u32, cid: u32, frame: &[u8]) -> Vec<u8> {
    let mut packet = vec![kind, version << 4, flags, 0];
    packet.extend_from_slice(&psn.to_be_bytes());
    packet.extend_from_slice(&cid.to_be_bytes());
    packet.extend_from_slice(&[0; 4]);
    packet.extend_from_slice(frame);
    packet
}

fn setup(kind: u8, version: u8, reserved: u8, local: u32, destination: u32, to: [u8; 6], from: [u8; 6]) -> Vec<u8> {
    let mut packet = vec![kind, version << 4, 0, reserved];
    packet.extend_from_slice(&local.to_be_bytes());
    packet.extend_from_slice(&destination.to_be_bytes());
    packet.extend_from_slice(&to);
    packet.extend_from_slice(&from);
    packet.extend_from_slice(&1u64.to_be_bytes());
    packet.extend_from_slice(&1u32.to_be_bytes());
    packet.extend_from_slice(&[1, 0, 0, 100]);
    packet
}

fn ack(version: u8, kind: u8, cid: u32, base: u32, words: u8) -> Vec<u8> {
    let mut packet = vec![2, version << 4, 0, kind];
    packet.extend_from_slice(&[0; 4]);
    packet.extend_from_slice(&cid.to_be_bytes());
    packet.extend_from_slice(&[0; 12]);
    packet.extend_from_slice(&(u32::from(words) << 6).to_be_bytes());
    packet.extend_from_slice(&base.to_be_bytes());
    packet
}

/// Packets in one datagram (PROTOCOL §3.6).
fn bundle(version: u8, cid: u32, packets: &[&[u8]]) -> Vec<u8> {
    let mut bundle = vec![8, version << 4, 0, 0, 0, 0, 0, 0];
    bundle.extend_from_slice(&cid.to_be_bytes());
    for packet in packets {
        bundle.extend_from_slice(&(packet.len() as u16).to_be_bytes());
        bundle.extend_from_slice(packet);
    }
    bundle
}

#[test]
fn malformed_datagrams() {
    let mut attack = Attack::new(1);
    let cid = attack.conn().cid;
    let frame = [0u8; 60];
    let v = |payload: &[u8]| raw::vxlan(100, payload);
    let (a, b) = (attack.lab.guest("a").mac_bytes(), attack.lab.guest("b").mac_bytes());
    attack.expect(
        "no VXLAN header",
        vec![vec![], vec![8], vec![8; 7], vec![0xff; 0]],
        &[("drop.bad_vxlan_packets", 4)],
    );
    let mut no_flag = v(&data(1, 2, 0, 0, cid, &frame));
    no_flag[0] = 0;
    attack.expect("no I flag", vec![no_flag], &[("drop.bad_vxlan_packets", 1)]);
    let types = (0..=255u8).filter(|t| !(1..=8).contains(t)).map(|t| v(&data(t, 2, 0, 0, cid, &frame)));
    attack.expect("unknown type", types.collect(), &[("refused.packet_type_packets", 248)]);
    let whole = [
        (16, data(1, 2, 0, 0, cid, &[])),
        (32, ack(2, 0, cid, 0, 0)),
        (12, setup(3, 2, 0x10, 1, 0, a, b)),
        (12, setup(4, 2, 0, 1, cid, a, b)),
        (12, setup(5, 2, 1, 0, cid, a, b)),
        (12, vec![6, 0x10, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0]),
        (16, data(7, 2, 0, 0, cid, &[])),
    ];
    let short = whole.iter().flat_map(|(fixed, packet)| (0..*fixed).map(|n| v(&packet[..n])).collect::<Vec<_>>());
    attack.expect("truncated", short.collect(), &[("refused.short_datagram_packets", 16 + 32 + 4 * 12 + 16)]);
    let bodies = whole[2..5].iter().flat_map(|(_, p)| (12..40).map(|n| v(&p[..n])).collect::<Vec<_>>());
    attack.expect("truncated set-up", bodies.collect(), &[("refused.body_truncated_packets", 84)]);
    let frames = (0..14).map(|n| v(&data(1, 2, 0, 0, cid, &frame[..n])));
    attack.expect("too short for an Ethernet header", frames.collect(), &[("refused.short_frame_packets", 14)]);
    let long = vec![
        v(&data(1, 2, 0x80, 0, cid, &frame)),
        v(&data(7, 2, 0, 0, cid, &[0])),
        v(&[ack(2, 0, cid, 0, 0), vec![0]].concat()),
        v(&[setup(3, 2, 0x10, 1, 0, a, b), vec![0; 9]].concat()),
    ];
    attack.expect("trailing bytes", long, &[("refused.trailing_bytes_packets", 4)]);
    let versions =
        vec![v(&data(1, 0, 0, 0, cid, &frame)), v(&data(1, 5, 0, 0, cid, &frame)), v(&ack(15, 0, cid, 0, 0))];
    attack.expect("future versions", versions, &[("refused.version_packets", 3)]);
    let acks = vec![v(&ack(2, 3, cid, 0, 0)), v(&ack(2, 0, cid, 0, 9)), v(&ack(2, 0, cid, 0, 8))];
    let counters = [
        ("refused.ack_type_packets", 1),
        ("refused.bitmap_length_packets", 1),
        ("refused.bitmap_truncated_packets", 1),
    ];
    attack.expect("acknowledgements", acks, &counters);
    let skip = data(7, 3, 0, 0, cid, &[]);
    let bundles = [
        (bundle(2, cid, &[&skip]), "version"),
        (bundle(3, 0, &[&skip]), "zero_cid"),
        (bundle(3, cid, &[]), "bundle_length"),
        (bundle(3, cid, &[&skip[..11]]), "bundle_length"),
        ([bundle(3, cid, &[&skip]), vec![0]].concat(), "bundle_length"),
        ([bundle(3, cid, &[&skip]), vec![0xff, 0xff]].concat(), "bundle_length"),
        (bundle(3, cid, &[&bundle(3, cid, &[&skip])]), "bundle_content"),
        (bundle(3, cid, &[&skip, &setup(3, 3, 0x10, 1, cid, a, b)]), "bundle_content"),
        (bundle(3, cid, &[&skip, &data(7, 3, 0, 0, cid ^ 1 << 24, &[])]), "bundle_content"),
        (bundle(3, cid ^ 1, &[&skip]), "bundle_content"),
    ];
    for (bundle, reason) in bundles {
        attack.expect("bundles", vec![v(&bundle)], &[(format!("refused.{reason}_packets").as_str(), 1)]);
    }
    // Each packet of a bundle is checked by itself.
    let mixed =
        bundle(3, cid, &[&data(1, 3, 0, 0, cid, &frame[..9]), &ack(3, 5, cid, 0, 0), &data(7, 5, 0, 0, cid, &[])]);
    let counters =
        [("refused.short_frame_packets", 1), ("refused.ack_type_packets", 1), ("refused.version_packets", 1)];
    attack.expect("a bundle of invalid packets", vec![v(&mixed)], &counters);
    attack.expect(
        "CID 0",
        vec![v(&data(1, 2, 0, 0, 0, &frame)), v(&ack(2, 0, 0, 0, 0))],
        &[("refused.zero_cid_packets", 2)],
    );
}

#[test]
fn well_formed_datagrams_without_matching_state() {
    let mut attack = Attack::new(1);
    let v = |payload: &[u8]| raw::vxlan(100, payload);
    let (a, b) = (attack.lab.guest("a").mac_bytes(), attack.lab.guest("b").mac_bytes());
    let frame = raw::ethernet(a, b, 0x0800, &raw::udp_in_ipv4([10, 0, 0, 2], [10, 0, 0, 1], &[7; 40]));
    let conn = attack.conn();
    let (cid, version) = (conn.cid, conn.version);

    let stranger = "172.31.0.77".parse().unwrap();
    attack.lab.hosts[1].net.ip("addr add 172.31.0.77/24 dev l0\n");
    let to = attack.to;
    attack.expect_from(
        "from an unknown peer",
        stranger,
        to,
        vec![v(&data(1, 2, 0, 0, cid, &frame))],
        &[("drop.unknown_peer_packets", 1)],
    );
    attack.expect(
        "not the negotiated version",
        vec![v(&data(1, 1, 0, 0, cid, &frame))],
        &[("rte.wrong_version_packets", 1)],
    );
    let mut elsewhere = ack(version, 0, cid, 0, 0);
    elsewhere[2] = 7 << 4;
    attack.expect("an ACK of an unknown path", vec![v(&elsewhere)], &[("rte.unknown_path_packets", 1)]);
    attack.expect(
        "another tenant's VNI",
        vec![raw::vxlan(200, &data(1, version, 0, 0, cid, &frame))],
        &[("rte.wrong_vni_packets", 1)],
    );
    let base = attack.conn().rx_packets as u32;
    let far = [base + 4096 + 100, base.wrapping_sub(5000), base.wrapping_add(1 << 31)];
    let far = far.iter().map(|&psn| v(&data(1, version, 0, psn, cid, &frame))).collect();
    attack.expect("PSNs outside the window", far, &[("rte.outside_window_packets", 3)]);
    let skips =
        vec![v(&data(7, version, 0, base + 100_000, cid, &[])), v(&data(7, version, 0, base ^ (1 << 31), cid, &[]))];
    attack.expect("SKIPs outside the window", skips, &[("rte.outside_window_packets", 2)]);
    attack.expect(
        "an ACK of a packet that was never sent",
        vec![v(&ack(version, 0, cid, 1 << 30, 0))],
        &[("rte.ack_invalid_packets", 1)],
    );
    let mixed: [&[u8]; 3] =
        [&data(7, version, 0, base + 100_000, cid, &[]), &ack(version, 0, cid ^ 1, 0, 0), &elsewhere];
    attack.expect(
        "a bundle of packets without matching state",
        vec![v(&bundle(3, cid, &mixed))],
        &[("rte.outside_window_packets", 1), ("rte.unknown_cid_packets", 1), ("rte.unknown_path_packets", 1)],
    );
    attack.expect(
        "an ACK with an unknown CID",
        vec![v(&ack(version, 0, cid ^ 1, 0, 0))],
        &[("rte.unknown_cid_packets", 1)],
    );
    attack.expect(
        "a RESET with an unknown CID",
        vec![v(&[6, 0x10, 0, 0, 0xab, 0xcd, 0xef, 1, 0, 0, 0, 0])],
        &[("rte.stray_setup_packets", 1)],
    );
    attack.expect("an old REQUEST", vec![v(&setup(3, 2, 0x10, 77, 0, a, b))], &[("rte.stale_setup_packets", 1)]);
    attack.expect(
        "unexpected answers",
        vec![v(&setup(4, 2, 0, 77, cid, a, b)), v(&setup(5, 2, 2, 0, cid, a, b))],
        &[("rte.stray_setup_packets", 2)],
    );
    // To a vNIC that is only in the other VPC.
    let t = attack.lab.guest("t").mac_bytes();
    attack.expect(
        "a REQUEST across VPCs",
        vec![v(&setup(3, 2, 0x10, 77, 0, t, b))],
        &[("rte.rejected_vnic_packets", 1)],
    );
    attack.expect(
        "a REQUEST in another vNIC's name",
        vec![v(&setup(3, 2, 0x10, 77, 0, a, [2, 0, 0, 0, 0x66, 0x66]))],
        &[("rte.rejected_vnic_packets", 1)],
    );
    attack.expect(
        "a REQUEST of future versions",
        vec![v(&setup(3, 9, 0x80, 78, 0, attack.lab.guest("c").mac_bytes(), b))],
        &[("rte.rejected_version_packets", 1)],
    );
    assert_eq!(attack.conn().cid, cid, "the connection was never disturbed");
    assert_eq!(attack.lab.hosts[0].port("t").rx_packets, 0);
    assert_eq!(attack.lab.hosts[0].port("c").rx_packets, 0);
}

#[test]
fn resets_are_limited() {
    for workers in [1, 2] {
        let mut attack = Attack::new(workers);
        let cid = attack.conn().cid;
        let version = attack.conn().version;
        let before = attack.lab.hosts[0].counters();
        let started = std::time::Instant::now();
        let (from, to) = (attack.lab.hosts[1].addresses[0], attack.to);
        let flood =
            (0..4000u32).map(|i| raw::vxlan(100, &data(1, version, 0, 0, (cid ^ 0x0000_8000) + i % 7, &[0; 60])));
        raw::send_datagrams(&attack.lab.hosts[1].net, from, to, flood.collect());
        let elapsed_ms = started.elapsed().as_millis() as u64 + 1;
        std::thread::sleep(std::time::Duration::from_millis(100));
        let after = attack.lab.hosts[0].counters();
        let grown = growth(&before, &after, is_refusal);
        let of = |name: &str| grown.get(name).copied().unwrap_or(0);
        assert_eq!(of("rte.unknown_cid_packets"), 4000, "{grown:?}");
        assert_eq!(of("rte.resets_sent_packets") + of("rte.resets_suppressed_packets"), 4000);
        assert!(of("rte.resets_sent_packets") >= 1);
        assert!(of("rte.resets_sent_packets") <= 32 * (elapsed_ms + 100), "{grown:?} in {elapsed_ms} ms");
        // They reach the peer, which has no matching connection.
        let peer = &attack.lab.hosts[1];
        let (stray, overflow) = (peer.counter("rte.stray_setup_packets"), peer.counter("drop.reset_overflow_packets"));
        assert_eq!(stray + overflow, of("rte.resets_sent_packets"));
        attack.assert_traffic_flows();
        assert_eq!(attack.conn().cid, cid);
    }
}

/// Name of the case, the frame, and the counters that grow.
type Case = (&'static str, Vec<u8>, &'static [(&'static str, u64)]);

#[test]
fn frames_that_do_not_belong_to_the_connection() {
    let mut attack = Attack::new(1);
    let (a, b, c) =
        (attack.lab.guest("a").mac_bytes(), attack.lab.guest("b").mac_bytes(), attack.lab.guest("c").mac_bytes());
    let packet = |to: [u8; 4]| raw::udp_in_ipv4([10, 0, 0, 2], to, &[7; 40]);
    let neighbour = raw::udp_in_ipv4([10, 0, 0, 4], [10, 0, 0, 1], &[7; 40]);
    let d = attack.lab.guest("d").mac_bytes();
    let foreign = raw::udp_in_ipv4([10, 0, 0, 3], [10, 0, 0, 1], &[7; 40]);
    let cases: [Case; 6] = [
        ("to another vNIC", raw::ethernet(c, b, 0x0800, &packet([10, 0, 0, 3])), &[("drop.wrong_vnic_packets", 1)]),
        (
            "broadcast",
            raw::ethernet([0xff; 6], b, 0x0800, &packet([10, 0, 0, 1])),
            &[("avs.underlay_dropped_broadcast_packets", 1)],
        ),
        (
            "from another vNIC of the same host",
            raw::ethernet(a, d, 0x0800, &neighbour),
            &[("drop.wrong_vnic_packets", 1)],
        ),
        (
            "from an unknown vNIC",
            raw::ethernet(a, [2, 0, 0, 0, 0, 99], 0x0800, &packet([10, 0, 0, 1])),
            &[("drop.wrong_vnic_packets", 1)],
        ),
        (
            "from an address of this host",
            raw::ethernet(a, b, 0x0800, &foreign),
            &[("avs.underlay_dropped_wrong_peer_packets", 1)],
        ),
        (
            "a truncated packet",
            raw::ethernet(a, b, 0x0800, &[0x45, 0, 0]),
            &[("malformed.underlay_ipv4_truncated_frames", 1)],
        ),
    ];
    for (what, frame, counters) in cases {
        // The forged packet uses the next sequence number, so that the peer's own packet is then a duplicate.
        let conn = attack.conn();
        let before = attack.lab.hosts[0].counters();
        let received = attack.lab.hosts[0].port("c").rx_packets;
        let datagram = raw::vxlan(100, &data(1, conn.version, 0, conn.rx_packets as u32, conn.cid, &frame));
        let (from, to) = (attack.lab.hosts[1].addresses[0], attack.to);
        raw::send_datagrams(&attack.lab.hosts[1].net, from, to, vec![datagram]);
        let mut expected = counters.to_vec();
        expected.push(("rte.policy_dropped_packets", 1));
        if what == "from an unknown vNIC" {
            // The switch checks first.
            expected[0] = ("avs.underlay_dropped_wrong_peer_packets", 1);
        }
        attack.compare(what, &before, &expected);
        assert_eq!(attack.lab.hosts[0].port("c").rx_packets, received, "{what}");
        // This costs one packet of the guest, which its TCP retransmits.
        let took = attack.talk.say(10_000);
        assert!(took.as_secs_f64() < 5.0, "{what}: {took:?}");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

#[test]
fn forged_plain_vxlan() {
    let mut attack = Attack::new(1);
    let (a, b) = (attack.lab.guest("a").mac_bytes(), attack.lab.guest("b").mac_bytes());
    let good = raw::udp_in_ipv4([10, 0, 0, 2], [10, 0, 0, 1], &[7; 40]);
    let frame = raw::ethernet(a, b, 0x0800, &good);
    let to = attack.vxlan;
    let from = attack.lab.hosts[1].addresses[0];
    let received = attack.lab.hosts[0].port("a").rx_packets;
    let other = attack.lab.hosts[0].port("t").rx_packets;
    attack.expect_from("a valid packet", from, to, vec![raw::vxlan(100, &frame)], &[]);
    assert!(attack.lab.hosts[0].port("a").rx_packets > received);
    attack.expect_from(
        "an unknown VNI",
        from,
        to,
        vec![raw::vxlan(4711, &frame)],
        &[("avs.underlay_dropped_unknown_vni_packets", 1)],
    );
    attack.expect_from(
        "the other VPC's VNI",
        from,
        to,
        vec![raw::vxlan(200, &frame)],
        &[("avs.underlay_dropped_wrong_peer_packets", 1)],
    );
    attack.expect_from(
        "from an address of this host",
        from,
        to,
        vec![raw::vxlan(100, &raw::ethernet(b, a, 0x0800, &good))],
        &[("avs.underlay_dropped_wrong_peer_packets", 1)],
    );
    let forged = raw::ethernet(a, b, 0x0806, &raw::arp(2, ([2, 0, 0, 0, 0, 9], [10, 0, 0, 3]), (a, [10, 0, 0, 1])));
    let before = attack.lab.hosts[0].counters();
    raw::send_datagrams(&attack.lab.hosts[1].net, from, to, vec![raw::vxlan(100, &forged)]);
    eventually(2.0, "forged ARP is dropped", || {
        growth(&before, &attack.lab.hosts[0].counters(), |n| n.starts_with("avs.underlay_dropped"))
            .values()
            .sum::<u64>()
            == 1
    });
    assert_eq!(attack.lab.hosts[0].port("t").rx_packets, other);
}

#[test]
fn noise() {
    let mut attack = Attack::new(2);
    let (a, b) = (attack.lab.guest("a").mac_bytes(), attack.lab.guest("b").mac_bytes());
    let cid = attack.conn().cid;
    let mut state = 0x1234_5678_9abc_def1u64;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut datagrams = Vec::new();
    for _ in 0..6000 {
        let length = (random() % 200) as usize;
        let mut bytes: Vec<u8> = (0..length).map(|_| random() as u8).collect();
        match random() % 4 {
            0 => {}
            // Increasingly valid. With a foreign CID, so that no packet hits the connection by accident.
            kind => {
                bytes = [vec![(1 + random() % 7) as u8, 0x20], bytes].concat();
                if kind > 1 && bytes.len() >= 12 {
                    bytes[8..12].copy_from_slice(&(cid ^ 0x00ff_0000).to_be_bytes());
                }
                if kind > 2 && bytes.len() > 24 && (3..=5).contains(&bytes[0]) {
                    bytes.resize(40, 0);
                    // Not to a vNIC of this host: a REQUEST with a random instance would be taken for a restart.
                    bytes[12..18].copy_from_slice(&b);
                    bytes[18..24].copy_from_slice(&a);
                }
                bytes = raw::vxlan(100, &bytes);
            }
        }
        datagrams.push(bytes);
    }
    let before = attack.lab.hosts[0].counters();
    let count = datagrams.len() as u64;
    let from = attack.lab.hosts[1].addresses[0];
    for (to, half) in [(attack.to, &datagrams[..4000]), (attack.vxlan, &datagrams[4000..])] {
        for chunk in half.chunks(200) {
            raw::send_datagrams(&attack.lab.hosts[1].net, from, to, chunk.to_vec());
        }
    }
    eventually(3.0, "all are counted", || {
        let grown = growth(&before, &attack.lab.hosts[0].counters(), is_refusal);
        let answers = ["rte.resets_sent_packets", "rte.resets_suppressed_packets"];
        grown.iter().filter(|(n, _)| !answers.contains(&n.as_str())).map(|(_, v)| v).sum::<u64>() >= count
    });
    attack.assert_traffic_flows();
    assert_eq!(attack.conn().cid, cid);
    assert!(!attack.lab.hosts[0].log().contains("panicked"));
}

#[test]
fn a_guest_that_forges_frames() {
    let mut attack = Attack::new(1);
    let lab = &attack.lab;
    let (a, b, c) = (lab.guest("a").mac_bytes(), lab.guest("b").mac_bytes(), lab.guest("c").mac_bytes());
    let good = raw::udp_in_ipv4([10, 0, 0, 1], [10, 0, 0, 2], &[7; 40]);
    let spoofed = raw::udp_in_ipv4([10, 0, 0, 3], [10, 0, 0, 2], &[7; 40]);
    let arp = |sender: ([u8; 6], [u8; 4])| raw::arp(1, sender, ([0; 6], [10, 0, 0, 2]));
    let long = raw::udp_in_ipv4([10, 0, 0, 1], [10, 0, 0, 2], &[7; 1473]);
    let tagged = raw::ethernet(b, a, 0x8100, &[&[0, 5, 8, 0][..], &good].concat());
    let cases = [
        ("spoofed_mac", raw::ethernet(b, c, 0x0800, &good)),
        ("spoofed_ip", raw::ethernet(b, a, 0x0800, &spoofed)),
        ("spoofed_arp", raw::ethernet([0xff; 6], a, 0x0806, &arp((a, [10, 0, 0, 3])))),
        ("spoofed_arp", raw::ethernet([0xff; 6], a, 0x0806, &arp((c, [10, 0, 0, 1])))),
        ("ethertype", raw::ethernet(b, a, 0x88cc, &[0; 50])),
        ("vlan", tagged),
        ("broadcast", raw::ethernet([0xff; 6], a, 0x0800, &good)),
        ("multicast", raw::ethernet([1, 0, 0x5e, 0, 0, 5], a, 0x0800, &good)),
        ("unknown_mac", raw::ethernet([2, 0, 0, 0, 0, 99], a, 0x0800, &good)),
        (
            "unknown_neighbour",
            raw::ethernet([0xff; 6], a, 0x0806, &raw::arp(1, (a, [10, 0, 0, 1]), ([0; 6], [10, 0, 0, 99]))),
        ),
    ];
    let received = lab.hosts[1].port("b").rx_packets;
    for (reason, frame) in cases {
        let before = lab.hosts[0].port("a").drops_packets;
        assert_eq!(raw::send_frames(lab.net("a"), "eth0", vec![frame]), 1, "{reason}");
        let mut grown = Counters::new();
        for _ in 0..100 {
            grown = growth(&before, &lab.hosts[0].port("a").drops_packets, |_| true);
            if !grown.is_empty() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        assert_eq!(grown, Counters::from([(reason.to_string(), 1)]));
    }
    assert_eq!(lab.hosts[1].port("b").rx_packets, received, "forged frames reached the other guest");
    // Truncated frames: the kernel sends frames with an Ethernet header, and the switch checks the rest.
    let before = lab.hosts[0].counters();
    let mut short: Vec<Vec<u8>> = (1..20).map(|n| raw::ethernet(b, a, 0x0800, &good[..n])).collect();
    short.push(raw::ethernet([0xff; 6], a, 0x0806, &[9; 28]));
    assert_eq!(raw::send_frames(lab.net("a"), "eth0", short), 20);
    let malformed = |n: &str| n.starts_with("malformed.guest");
    eventually(2.0, "short frames are counted", || {
        growth(&before, &lab.hosts[0].counters(), malformed).values().sum::<u64>() == 20
    });
    // Larger than its MTU: refused by the kernel.
    assert_eq!(raw::send_frames(lab.net("a"), "eth0", vec![raw::ethernet(b, a, 0x0800, &long)]), 0);
    attack.assert_traffic_flows();
}
