//! Random guests, and their traffic.

use super::choice::Draw;
use crate::rng::Rng;
use crate::scenario::{Gap, GuestGroup, Members, Scenario, Workload};
use crate::units::{Bytes, Ns};

/// Bytes of IPv4 and TCP headers.
const HEADERS: u16 = 40;
/// Minimum payload of a light guest.
const SMALLEST: u64 = 24;

/// The properties of a guest that this file needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Member {
    guest: u32,
    host: u32,
    vni: u32,
    tcp: bool,
}

/// Gives every network guests on at least two hosts.
pub(super) fn guests(rng: &mut Rng, s: &mut Scenario) -> Vec<Member> {
    let hosts = s.topology.hosts();
    let mut all = Vec::new();
    for vni in s.vnis.iter().map(|v| v.id) {
        let per_host = rng.pick(&[1, 1, 2, 3]);
        let first = rng.below(u64::from(hosts)) as u32;
        let count = if rng.one_in(2) { hosts } else { rng.range(2, hosts.into()) as u32 };
        let list: Vec<u32> = (0..count).map(|i| (first + i) % hosts).collect();
        let tcp = rng.one_in(4);
        for &host in &list {
            for i in 0..per_host {
                let guest = all.len() as u32;
                all.push(Member { guest, host, vni, tcp: tcp || (per_host > 1 && i == 0 && guest.is_multiple_of(2)) });
            }
        }
        s.guests.push(GuestGroup {
            vni,
            hosts: Members::List(list),
            per_host,
            tx_rate: None,
            rx_rate: None,
            weight: 1,
        });
    }
    all
}

/// Random traffic of these guests in about `span` ns.
pub(super) fn workloads(rng: &mut Rng, members: &[Member], span: u64, large: bool, mtu: u16) -> Vec<Workload> {
    let count = rng.pick(&[1, 1, 2, 2, 3, 4]);
    let mut all = Vec::new();
    // Approximate number of packets of all workloads together.
    let mut budget = if large { rng.scale(5_000, 40_000) } else { rng.scale(100, 3_000) };
    for _ in 0..20 * count {
        if all.len() == count {
            break;
        }
        let one = rng.pick(members);
        let alike = |m: &&Member| m.vni == one.vni && m.tcp == one.tcp;
        let others: Vec<Member> = members.iter().filter(alike).filter(|m| m.host != one.host).copied().collect();
        if others.is_empty() {
            continue;
        }
        let other = rng.pick(&others);
        let there: Vec<u32> = others.iter().map(|m| m.guest).take(8).collect();
        // One to one, one to all, all to one.
        let (from, to) = match rng.below(4) {
            0 | 1 => (vec![one.guest], vec![other.guest]),
            2 => (vec![one.guest], there),
            _ => (there, vec![one.guest]),
        };
        let pairs = (from.len() * to.len()) as u64;
        let (from, to) = (Members::List(from), Members::List(to));
        let start = Ns(if all.is_empty() { 0 } else { rng.below(span) });
        let own = (budget / 2).max(30);
        budget -= own.min(budget / 2);
        let name = String::new();
        if !one.tcp {
            all.push(packets(rng, (from, to), (own / pairs).max(10), span, start, mtu));
        } else if rng.one_in(2) {
            let bytes = Bytes((own * 1_000 / pairs).clamp(1_000, 2_000_000));
            let buffer = Bytes(rng.scale(20_000.max(4 * u64::from(mtu)), 1_000_000));
            all.push(Workload::Bulk { name, from, to, connections: rng.range(1, 3) as u32, bytes, buffer, start });
        } else {
            let count = rng.range(1, 20) as u32;
            let each = (own * 1_000 / pairs / u64::from(count)).max(100);
            all.push(Workload::Request {
                name,
                from,
                to,
                connections: rng.range(1, 3) as u32,
                count,
                request: Bytes(rng.scale(1, each)),
                response: Bytes(rng.scale(1, each)),
                think: Ns(if rng.one_in(2) { 0 } else { span / u64::from(count) }),
                together: rng.one_in(2),
                buffer: Bytes(rng.scale(20_000.max(4 * u64::from(mtu)), 200_000)),
                start,
            });
        }
    }
    all
}

fn packets(rng: &mut Rng, (from, to): (Members, Members), packets: u64, span: u64, start: Ns, mtu: u16) -> Workload {
    let largest = u64::from(mtu - HEADERS);
    let size = if rng.one_in(2) { rng.range(SMALLEST, largest) } else { rng.range(SMALLEST, 200) };
    let segments = if rng.one_in(4) { rng.range(2, 44).min(64_000 / size) as u32 } else { 1 };
    let burst = if rng.one_in(3) { rng.scale(1, 64) as u32 } else { 1 };
    let frames = packets.div_ceil(u64::from(segments) * u64::from(burst)).max(1);
    Workload::Packets {
        name: String::new(),
        from,
        to,
        packets,
        flows: if rng.one_in(3) { 1 } else { rng.scale(1, 64) as u32 },
        size: Bytes(size),
        size_min: (segments == 1 && rng.one_in(2)).then(|| Bytes(rng.range(SMALLEST, size))),
        segments,
        // As fast as possible, or spread over the whole time.
        gap: Ns(if rng.one_in(4) { 0 } else { span / frames }),
        gap_kind: rng.pick(&[Gap::Fixed, Gap::Poisson]),
        burst,
        start,
        start_jitter: Ns(rng.pick(&[0, 0, 100_000])),
    }
}
