//! The program, as verified and run by the kernel, compared with the parser and the steering rule.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::Arc;

use fastrand::Rng;

use super::lane::{Lane, Macs};
use super::next_hop::Resolver;
use super::parse::{NOTE_BYTES, NOTE_MAGIC};
use super::parse::{Outer, Ports};
use super::program::{Wanted, load};
use crate::bpf::{create_socket_map, test_run};
use crate::clock::monotonic_ns;
use crate::{Service, steer};

const PORTS: Ports = Ports { bifrost: 4794, vxlan: 4789 };
const LONGEST: u32 = 700;
const XDP_PASS: u32 = 2;

fn address(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

fn wanted(workers: u16, local: &[&str]) -> Wanted {
    let local = local.iter().copied().map(address).collect();
    Wanted { local, bifrost_port: PORTS.bifrost, vxlan_port: PORTS.vxlan, workers, longest_frame: LONGEST }
}

/// A datagram, usually to one of the ports, with headers written by independent code.
fn frame(rng: &mut Rng, lanes: &[Lane]) -> Vec<u8> {
    let mut payload: Vec<u8> = (0..rng.usize(0..80)).map(|_| rng.u8(..)).collect();
    if rng.u8(..) < 10 {
        payload.resize(rng.usize(600..720), 7);
    }
    if let Some(kind) = payload.get_mut(8) {
        *kind = rng.u8(0..8);
    }
    if let Some(cid) = payload.get_mut(16..20) {
        match rng.u8(0..4) {
            0 => cid.fill(0),
            _ => cid[0] = rng.u8(0..6),
        }
    }
    let macs = Macs { destination: [2; 6], source: [4; 6] };
    let mut bytes = vec![0; 2048];
    let lane = &lanes[rng.usize(..lanes.len())];
    let len = lane.write(macs, rng.u8(0..4), &payload, &mut bytes).expect("it fits");
    bytes.truncate(len);
    // Corrupts the headers or the length.
    match rng.u8(0..8) {
        0 => {
            let at = rng.usize(12..lane.header_bytes().min(len));
            bytes[at] ^= 1 << rng.u8(0..8);
        }
        1 => bytes.truncate(rng.usize(14..len)),
        2 => bytes.resize(len + rng.usize(1..20), 0),
        3 => bytes[14] = *rng.choice(&[0x46, 0x44, 0x4f, 0x70]).expect("some"),
        4 => bytes[20] = *rng.choice(&[0x20, 0x00, 0x1f, 44, 0, 43, 60]).expect("some"),
        _ => {}
    }
    bytes
}

fn is_local(frame: &[u8], outer: &Outer, local: &[IpAddr]) -> bool {
    local.iter().any(|a| match a {
        IpAddr::V4(a) => outer.source.is_ipv4() && frame[30..34] == a.octets(),
        IpAddr::V6(a) => outer.source.is_ipv6() && frame[38..54] == a.octets(),
    })
}

#[test]
fn the_program_agrees_with_the_parser_and_the_steering_rule() {
    let resolver = Resolver::start(Vec::new()).expect("a thread");
    let lane = |from: &str, to: &str, port: u16| {
        let (from, to) = (SocketAddr::new(address(from), 50_000), SocketAddr::new(address(to), port));
        Lane::new(from, to, Arc::clone(&resolver.next_hop(from, to)))
    };
    let lanes = [
        lane("192.0.2.2", "192.0.2.1", 4794),
        lane("192.0.2.2", "203.0.113.254", 4789),
        lane("192.0.2.2", "192.0.2.3", 4794),
        lane("192.0.2.2", "192.0.2.1", 53),
        lane("fd00::2", "fd00::1", 4794),
        lane("fd00::2", "fd00:ffff::9", 4789),
        lane("fd00::2", "fd00:ffff::8", 4789),
    ];
    let mut rng = Rng::with_seed(7);
    let (v4, v6) = (["192.0.2.1", "203.0.113.254"], ["fd00::1", "fd00:ffff::9"]);
    let both = [v4, v6].concat();
    for (workers, local) in [(1, &both[..]), (2, &both), (2, &v4), (2, &v6), (3, &both), (5, &both), (32, &both)] {
        let wanted = wanted(workers, local);
        let sockets = create_socket_map(u32::from(workers)).expect("a map of sockets (root)");
        let program = load(&wanted, sockets.as_fd()).unwrap_or_else(|e| panic!("the verifier rejects it: {e}"));
        let (mut taken, mut passed, mut chosen) = (0, 0, vec![0; usize::from(workers)]);
        for _ in 0..4000 {
            let frame = frame(&mut rng, &lanes);
            let before = monotonic_ns();
            let run = test_run(program.as_fd(), &frame).expect("a run");
            // The map has no socket: redirected frames return with a note.
            assert_eq!(run.verdict, XDP_PASS);
            let outer = Outer::parse(&frame, PORTS)
                .filter(|o| is_local(&frame, o, &wanted.local) && frame.len() <= LONGEST as usize);
            let Some(outer) = outer else {
                assert_eq!(run.data, frame, "redirected, but should pass");
                passed += 1;
                continue;
            };
            let (note, rest) = run.data.split_first_chunk::<NOTE_BYTES>().expect("a note");
            assert_eq!(rest, frame, "changed, or not redirected");
            let noted = Outer::from_note(note, &frame).expect("a valid note");
            assert!((before..=monotonic_ns()).contains(&noted.time_ns), "{noted:?}");
            assert_eq!(Outer { time_ns: u64::MAX, ..noted }, outer);
            let word = |at: usize| u32::from_ne_bytes(note[at..at + 4].try_into().expect("a word"));
            let payload = &frame[outer.payload..];
            let worker = match outer.service {
                Service::Bifrost => steer::worker_of_bifrost(payload, workers),
                Service::Vxlan => steer::worker_of_vxlan(payload, workers),
            };
            assert_eq!((word(0), word(4)), (NOTE_MAGIC, u32::from(worker)), "{payload:02x?}");
            taken += 1;
            chosen[usize::from(worker)] += 1;
        }
        assert!(taken > 300 && passed > 500, "{taken} redirected, {passed} passed: too few");
        assert!(chosen.iter().all(|&n| n > 0), "{chosen:?}");
    }
}

#[test]
fn the_error_contains_the_verifiers_log() {
    let mut a = crate::bpf::Assembler::default();
    a.exit();
    let error = crate::bpf::load_program(crate::bpf::ProgramKind::Xdp, &a.finish(), "no_result");
    let error = error.expect_err("register 0 was never set").to_string();
    assert!(error.contains("R0"), "{error}");
}
