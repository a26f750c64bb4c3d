use bifrost_wire::tcp::Flags;

use super::build::*;
use crate::*;

const REMOTE: &str = "198.51.100.1";
const S: u64 = 1_000_000_000;
/// Length of an IPv4 session in an export, bytes.
const RECORD: usize = 15 + 4 * 6;

fn out(port: u16, flags: Flags) -> Vec<u8> {
    tunnelled(HOST_A, VPC, &tcp_packet(("192.168.0.1", port), (REMOTE, 443), flags))
}

fn back(port: u16, flags: Flags) -> Vec<u8> {
    link(&tcp_packet((REMOTE, 443), (NAT_ADDRESS, port), flags))
}

/// All sessions that started at `since_s` or later.
fn export(pod: &Pod, since_s: u32) -> Vec<Vec<u8>> {
    let (mut pages, mut from) = (Vec::new(), None);
    loop {
        let page = pod.nat().export(pod.now, since_s, from);
        pages.push(page.bytes);
        from = page.next;
        if from.is_none() {
            return pages;
        }
    }
}

fn give(from: &Pod, to: &Pod) -> Imported {
    let mut all = Imported::default();
    for page in export(from, 0) {
        let Imported { taken, known, refused } = to.nat().import(to.now, &page).unwrap();
        all = Imported { taken: all.taken + taken, known: all.known + known, refused: all.refused + refused };
    }
    all
}

#[test]
fn sessions_continue_in_another_pod() {
    // The new pod has a different number of cores, so ports belong to other parts.
    let (mut old, mut new) = (Pod::new(), Pod::with_nat_cores(3));
    let outside: Vec<u16> = (3000..3100).map(|port| old.forward(&out(port, Flags::SYN)).inner.src_port).collect();
    let asked = old.forward(&tunnelled(HOST_A, VPC, &echo("192.168.0.1", REMOTE, 8, 77)));
    let identifier = u16::from_be_bytes([asked.l4()[4], asked.l4()[5]]);
    let client = ("192.168.0.1", 5000);
    let service = old.forward(&tunnelled(HOST_A, VPC, &tcp_packet(client, ("192.168.0.253", 80), Flags::SYN)));
    let v6 = old.forward(&tunnelled(HOST_6, VPC, &tcp_packet(("fd10::1", 9), ("fd10::2", 9), Flags::SYN)));
    assert_eq!((v6.inner.src_port, old.nat().len()), (9, 102), "not translated");

    assert_eq!(give(&old, &new), Imported { taken: 102, known: 0, refused: 0 });
    assert_eq!(new.nat().len(), 102);
    for (port, outside) in (3000..).zip(&outside) {
        let sent = new.forward(&out(port, Flags::ACK));
        assert_eq!((sent.inner.src_ip, sent.inner.src_port), (ip(NAT_ADDRESS), *outside));
        let reply = new.forward(&back(*outside, Flags::ACK));
        assert_eq!((reply.inner.dst_ip, reply.inner.dst_port), (ip("192.168.0.1"), port));
    }
    let answer = new.forward(&link(&echo(REMOTE, NAT_ADDRESS, 0, identifier)));
    assert_eq!(&answer.l4()[4..6], &77u16.to_be_bytes());
    let backend = (service.inner.dst_ip.to_string(), service.inner.dst_port);
    let taken = (service.inner.src_ip.to_string(), service.inner.src_port);
    let packet = tcp_packet((&backend.0, backend.1), (&taken.0, taken.1), Flags::ACK);
    let reply = new.forward(&tunnelled(HOST_B, SERVICE, &packet));
    assert_eq!((reply.inner.src_ip, reply.inner.src_port), (ip("192.168.0.253"), 80));

    // Copying again, in both directions, adds nothing.
    assert_eq!(give(&old, &new), Imported { taken: 0, known: 102, refused: 0 });
    assert_eq!(give(&new, &old), Imported { taken: 0, known: 102, refused: 0 });
    // The new pod allocates none of these ports again.
    for port in 4000..4500 {
        let sent = new.forward(&out(port, Flags::SYN)).inner.src_port;
        assert!(!outside.contains(&sent), "{sent}");
    }
}

#[test]
fn sessions_live_as_long_as_in_the_old_pod() {
    let (mut old, mut new) = (Pod::new(), Pod::new());
    let port = old.forward(&out(1, Flags::SYN)).inner.src_port;
    let closed = old.forward(&out(2, Flags::SYN)).inner.src_port;
    for packet in [back(port, Flags::ACK), back(closed, Flags::ACK), back(closed, Flags::FIN), out(2, Flags::FIN)] {
        old.forward(&packet);
    }
    old.now += 20 * S;
    // The new pod's clock differs, as on another machine.
    new.now = old.now + 5000 * S;
    assert_eq!(give(&old, &new).taken, 2);
    new.now += 20 * S;
    assert_eq!(give(&new, &Pod::new()).taken, 1, "the closed one has expired");
    new.now += 7000 * S;
    new.forward(&back(port, Flags::ACK));
    // The next copy carries what the old pod has seen since: that a session was reset, or that it is still in use.
    old.forward(&back(port, Flags::RST));
    assert_eq!(give(&old, &new).known, 2);
    new.now += 40 * S;
    assert!(export(&new, 0).concat().len() < RECORD, "it was reset");
}

#[test]
fn an_export_contains_only_sessions_that_started_here_since() {
    let (mut old, mut new) = (Pod::new(), Pod::new());
    old.forward(&out(1, Flags::SYN));
    give(&old, &new);
    old.now += 2 * S;
    let since = (old.now / S) as u32;
    assert_eq!(export(&old, since), [vec![1]]);
    old.forward(&out(2, Flags::SYN));
    assert_eq!(export(&old, since).concat().len(), 1 + RECORD);
    // Sessions that came from the other pod are not returned to it.
    new.now = old.now;
    new.forward(&out(3, Flags::SYN));
    assert_eq!(export(&new, 1).concat().len(), 1 + RECORD);
    assert_eq!(export(&new, 0).concat().len(), 1 + 2 * RECORD);
}

#[test]
fn many_sessions_come_in_pages() {
    let big = || Pod::with_nat(NatConfig { sessions: 60_000, ..nat_config() });
    let (mut old, new) = (big(), big());
    let open = |pod: &mut Pod, number: u32| {
        let [_, a, b, c] = number.to_be_bytes();
        let source = (format!("192.168.0.{}", 1 + a), u16::from_be_bytes([b, c]));
        pod.forward(&tunnelled(HOST_A, VPC, &tcp_packet((&source.0, source.1), (REMOTE, 443), Flags::SYN)));
    };
    (1..=20_000).for_each(|number| open(&mut old, number));
    let pages = export(&old, 0);
    assert!(pages.len() == 3 && pages.iter().all(|page| page.len() < 1 << 20), "{}", pages.len());
    assert_eq!(give(&old, &new), Imported { taken: 20_000, known: 0, refused: 0 });
    assert_eq!(give(&new, &old), Imported { taken: 0, known: 20_000, refused: 0 });
}

#[test]
fn sessions_that_cannot_be_imported_are_refused() {
    let (mut old, mut new) = (Pod::new(), Pod::new());
    let port = old.forward(&out(1, Flags::SYN)).inner.src_port;
    let page = export(&old, 0).concat();
    let change = |at: usize, bytes: &[u8]| {
        let mut page = page.clone();
        page[1 + at..1 + at + bytes.len()].copy_from_slice(bytes);
        page
    };
    let refused = Imported { taken: 0, known: 0, refused: 1 };
    for (what, changed) in [
        ("a protocol", change(1, &[47])),
        ("ICMPv6 between IPv4 addresses", change(1, &[58])),
        ("no VNI", change(7, &[1, 0, 0, 0])),
        ("another network", change(11, &[0, 0, 0, 9])),
        ("an address of no pool", change(27, &[203, 0, 113, 201])),
        ("a port of no part", change(31, &[0, 80])),
    ] {
        assert_eq!(new.nat().import(new.now, &changed), Ok(refused), "{what}");
    }
    // Another session uses its port, or its flow has another port already.
    assert_eq!(new.nat().import(new.now, &page).map(|imported| imported.taken), Ok(1));
    assert_eq!(new.nat().import(new.now, &change(19, &[0, 2])), Ok(refused));
    assert_eq!(new.nat().import(new.now, &change(31, &(port ^ 1).to_be_bytes())), Ok(refused));
    assert_eq!(new.nat().len(), 1);
    assert_eq!(new.forward(&back(port, Flags::ACK)).inner.dst_port, 1);

    // Truncated input does not panic. Sessions before an error stay.
    for len in 0..page.len() {
        let whole = len == 1;
        assert_eq!(new.nat().import(new.now, &page[..len]).is_ok(), whole, "{len}");
    }
    for bad in [change(0, &[4]), change(2, &[16]), [&page[..], &[0]].concat(), [&[2], &page[1..]].concat()] {
        assert_eq!(new.nat().import(new.now, &bad), Err(BadSessions));
    }

    // There are no more sessions than fit, and a VPC gets at most half of them.
    let small = Pod::with_nat(NatConfig { sessions: 100, ..nat_config() });
    (1..=80).for_each(|port| drop(old.forward(&out(port, Flags::SYN))));
    assert_eq!(give(&old, &small), Imported { taken: 50, known: 0, refused: 30 });
}

#[test]
fn an_export_continues_while_sessions_end_and_start() {
    let mut old = Pod::new();
    let first: Vec<u16> = (1..=300).map(|port| old.forward(&out(port, Flags::SYN)).inner.src_port).collect();
    // Continues at positions that do not exist (any more). No session is missed, and some may be exported twice.
    for at in [0, 5, u64::from(u32::MAX), 2 << 32, 3 << 32 | 9, 9 << 32, u64::MAX] {
        let page = old.nat().export(old.now, 0, Some(at));
        assert_eq!(page.next, None, "{at}");
        assert!(page.sessions <= first.len());
    }
}
