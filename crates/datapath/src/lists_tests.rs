use std::cell::Cell;
use std::collections::HashMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use bifrost_avs::{
    Extent, Port, PortId, SessionLimits, SessionView, Switch, Tables, Vpc, read_moving_sessions, write_moving_sessions,
};
use bifrost_port::clock::monotonic_ns;
use bifrost_port::provide::{self, LARGE_PAGE};
use bifrost_port::vhost::Unplugged;
use bifrost_port::{Datagram, LaneId, TxBatch, Underlay};
use bifrost_rte::{Destination, Outbound, PeerId, Time};
use bifrost_wire::bifrost::Cid;
use bifrost_wire::{Mac, Vni};
use rustix::event::{EventfdFlags, eventfd};

use super::*;
use crate::{CoreConfig, PeerConfig, PlainPaths, PortConfig, start};

const MANY: u32 = 100_000;
/// Time that a visit to a place takes on the clock of these tests, ns.
const PLACE_NS: u64 = 100;
const TURN_NS: u64 = 20_000;
/// A guest with many sessions.
const GUEST: PortId = PortId(3);
/// The number of the peer.
const PEER: u32 = 7;

/// An underlay that receives nothing, and accepts everything.
struct Nowhere(OwnedFd);

impl Nowhere {
    fn new() -> Self {
        Nowhere(eventfd(0, EventfdFlags::CLOEXEC).unwrap())
    }
}

impl Underlay for Nowhere {
    fn lane(&mut self, _: SocketAddr, _: SocketAddr) -> io::Result<LaneId> {
        Ok(LaneId(0))
    }

    fn recv(&mut self) -> io::Result<usize> {
        Ok(0)
    }

    fn received_at_ns(&self) -> u64 {
        0
    }

    fn datagram(&self, _: usize) -> Datagram<'_> {
        unreachable!("there is none")
    }

    fn send(&mut self, batch: &mut TxBatch) {
        batch.clear();
    }
}

impl PolledUnderlay for Nowhere {
    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.0.as_fd()]
    }
}

fn config() -> CoreConfig {
    CoreConfig {
        index: 0,
        // They stay, however slow the machine is.
        transport: bifrost_rte::Config { idle_reap_ns: 86_400 * bifrost_rte::S, ..Default::default() },
        instance: 1,
        salt: 1,
        plain_paths: PlainPaths::default(),
        bundle_bytes: 0,
        control_dscp: 0,
        slow_port_percent: 0,
        answer_us: (TURN_NS / 1000) as u16,
    }
}

fn switch() -> Switch {
    Switch::build(&Tables::default(), 0).unwrap()
}

fn add_peer(core: &mut Core<Device>) {
    let path = (Ipv4Addr::LOCALHOST.into(), Ipv4Addr::LOCALHOST.into());
    let peer = PeerConfig {
        id: PEER,
        addresses: vec![path.1],
        paths: vec![path; 4],
        source_port_base: 50_000,
        bifrost_port: 4794,
        vxlan_port: 4789,
        plain: false,
    };
    core.set_peer(peer, &mut Nowhere::new()).unwrap();
}

/// Starts connection number `n`.
fn begin(core: &mut Core<Device>, n: u32) -> Cid {
    let mac = |first: u8| {
        let [a, b, c, d] = n.to_be_bytes();
        Mac([2, first, a, b, c, d])
    };
    let (local, remote) = (mac(0), mac(1));
    let to = Destination { vni: 100, owner: n % 1000, local, remote, peer: PeerId(0), ordering: Default::default() };
    core.engine.transmit(Time(monotonic_ns()), &to, Outbound { handle: n, segments: 1, flow: n }, &mut core.out);
    core.out.control.clear();
    core.engine.cid_of(bifrost_rte::Pair { vni: 100, local, remote }).unwrap()
}

/// A core with a given number of connections.
fn crowded(connections: u32) -> (Core<Device>, Vec<Cid>) {
    let mut core = Core::new(config(), switch());
    add_peer(&mut core);
    let cids = (0..connections).map(|n| begin(&mut core, n)).collect();
    (core, cids)
}

/// The next piece of the list of connections, with a clock that advances by the time of each place, and how long it
/// took.
fn piece(core: &Core<Device>, from: u32, cids: &mut Vec<Cid>) -> (Option<u32>, u64) {
    let now = Cell::new(0);
    let clock = || now.get();
    let share = Share::new(&clock, TURN_NS);
    let next = connections(core, from, &share, cids, &mut |peer, connection| {
        now.set(now.get() + PLACE_NS);
        assert_eq!(peer, PEER);
        Some(connection.local_cid)
    });
    (next, now.get())
}

#[test]
fn no_piece_of_a_long_list_takes_longer_than_its_share_of_a_turn() {
    let (core, cids) = crowded(MANY);
    let (mut told, mut from, mut pieces) = (Vec::new(), 0, 0);
    loop {
        let mut page = Vec::new();
        let (next, took) = piece(&core, from, &mut page);
        assert!(took <= TURN_NS + u64::from(CONNECTIONS) * PLACE_NS, "{took} ns from place {from} on");
        told.extend(page);
        pieces += 1;
        match next {
            Some(next) => from = next,
            None => break,
        }
    }
    assert_eq!(told, cids);
    assert_eq!(pieces, u64::from(MANY) * PLACE_NS / TURN_NS);
}

#[test]
fn entries_that_stay_are_listed_once() {
    let mut random = fastrand::Rng::with_seed(1);
    let (mut core, first) = crowded(20_000);
    let (mut told, mut from, mut n) = (Vec::new(), Some(0), 20_000);
    while let Some(place) = from {
        let mut page = Vec::new();
        from = piece(&core, place, &mut page).0;
        told.extend(page);
        // Ports come and go, with their connections: every other one of every thousand ports.
        let gone = random.u32(0..500) * 2;
        core.engine.remove_owner(gone, &mut core.out);
        for _ in 0..random.u32(0..50) {
            begin(&mut core, n);
            n += 1;
        }
    }
    let mut times: HashMap<Cid, u32> = HashMap::new();
    told.iter().for_each(|cid| *times.entry(*cid).or_default() += 1);
    assert!(times.values().all(|times| *times == 1), "none is told twice");
    let stays = |n: &usize| n % 1000 % 2 == 1;
    assert!((0..first.len()).filter(stays).all(|n| times.contains_key(&first[n])));
}

#[test]
fn a_page_has_a_bound_and_free_places_take_time_too() {
    let never = || 0;
    let share = Share::new(&never, 1);
    let mut page = Vec::new();
    assert_eq!(look(&share, 0, MANY, CONNECTIONS, &mut page, |place, page| page.push(place)), Some(PAGE as u32));
    assert_eq!(page.len(), PAGE);
    let mut none: Vec<u32> = Vec::new();
    assert_eq!(look(&share, 7, MANY, CONNECTIONS, &mut none, |_, _| {}), Some(7 + PLACES));
    let late = || 5;
    let used_up = Share { clock: &late, until: 5 };
    assert_eq!(look(&used_up, 3, MANY, PORTS, &mut none, |_, _| {}), Some(4), "one at least, or it would never end");
    assert_eq!(look(&used_up, 9, 9, PORTS, &mut none, |_, _| unreachable!("there is none")), None);
}

/// A worker with connections and ports.
fn worker(connections: u32, ports: u32) -> crate::Handle<Nowhere> {
    let worker = start(config(), Nowhere::new(), switch(), None).unwrap();
    let fill = move |worker: &mut crate::Worker<Nowhere>| {
        add_peer(worker.core_mut());
        for n in 0..connections {
            begin(worker.core_mut(), n);
        }
        let vni = Vni::new(100).unwrap();
        for owner in 0..ports {
            let [_, _, a, b] = owner.to_be_bytes();
            let port: Device = Box::new(Unplugged::new().unwrap());
            let (mac, ordering) = (Mac([2, 9, 9, 9, a, b]), Default::default());
            worker.core_mut().add_port(PortConfig { owner, vni, mac, ordering, reliable: true, port }).unwrap();
        }
    };
    worker.run(fill).unwrap();
    worker
}

#[test]
fn several_clients_may_ask_one_worker_and_some_may_go_away() {
    let worker = worker(10_000, 50);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            let remote = worker.remote();
            scope.spawn(move || {
                let connections = || remote.connections(|peer, c| (peer == PEER).then_some(c.local_cid));
                drop(connections().next());
                let all: Vec<Cid> = connections().flat_map(Result::unwrap).collect();
                assert_eq!(all.len(), 10_000);
                let ports: Vec<u32> = remote.ports().flat_map(Result::unwrap).map(|port| port.owner).collect();
                assert!(ports.into_iter().eq(0..50));
                let some: Vec<u32> =
                    remote.ports_of(vec![7, 900, 3]).flat_map(Result::unwrap).map(|port| port.owner).collect();
                assert_eq!(some, [7, 3]);
                assert_eq!(
                    remote.paths().flat_map(Result::unwrap).map(|path| path.peer).collect::<Vec<_>>(),
                    [PEER; 4]
                );
                assert_eq!(remote.traffic().flat_map(Result::unwrap).count(), 50);
                assert_eq!(remote.each(3, |_, n| n * 2).flat_map(Result::unwrap).collect::<Vec<_>>(), [0, 2, 4]);
                assert_eq!(remote.ask(|worker| worker.totals().connections).unwrap(), 10_000);
            });
        }
    });
    let (remote, mut begun) = (worker.remote(), worker.remote().connections(|_, c| Some(c.local_cid)));
    begun.next().unwrap().unwrap();
    drop(worker);
    let left: Vec<_> = begun.collect();
    assert!(matches!(left[..], [Err(Gone)]), "an error, and nothing after it: {left:?}");
    assert_eq!(remote.ask(|_| ()), Err(Gone));
}

#[test]
fn a_turn_answers_no_more_than_it_has_time_for() {
    const QUESTIONS: usize = 100;
    const ANSWER: Duration = Duration::from_micros(5);
    let worker = worker(0, 0);
    let remote = worker.remote();
    let (begin, begun) = std::sync::mpsc::channel::<()>();
    let (tell, told) = std::sync::mpsc::channel();
    // Something else is done until all of them wait.
    remote.mailbox().send(Box::new(move |_| assert!(begun.recv().is_err()))).unwrap();
    let askers: Vec<_> = (0..QUESTIONS)
        .map(|_| {
            let (remote, tell) = (remote.clone(), tell.clone());
            std::thread::spawn(move || {
                let answer = move |worker: &crate::Worker<Nowhere>| {
                    let began = Instant::now();
                    while began.elapsed() < ANSWER {}
                    let _ = tell.send(worker.core.counters().loops);
                };
                remote.ask(answer).unwrap();
            })
        })
        .collect();
    std::thread::sleep(Duration::from_millis(200));
    drop((begin, tell));
    askers.into_iter().for_each(|asker| asker.join().unwrap());
    let mut by_turn: HashMap<u64, u64> = HashMap::new();
    told.iter().for_each(|turn| *by_turn.entry(turn).or_default() += 1);
    assert_eq!(by_turn.values().sum::<u64>(), QUESTIONS as u64);
    let most = by_turn.values().max().copied().unwrap();
    assert!(most <= TURN_NS / ANSWER.as_nanos() as u64 + 1, "{most} in one turn");
}

/// Sessions of the guest 10.0.0.1, of ten thousand clients each, as its former host writes them.
fn sessions(count: u32) -> Vec<MovingSession> {
    let mut bytes = b"BFse\x01\0\0\0\x02\0\x31\0".to_vec();
    bytes.extend(count.to_le_bytes());
    for n in 0..count {
        let (client, number) = (0x0a01_0000 + u64::from(n % 10_000), u64::from(1024 + n / 10_000));
        let key = [0, 0xffff_0a00_0001, 0, 0xffff << 32 | client, 80 << 48 | number << 32 | 6 << 8 | 4];
        key.into_iter().for_each(|word: u64| bytes.extend(word.to_le_bytes()));
        // Whether the client started it, whether it is established, and since when.
        bytes.extend([1, 2, 0, 0, 0, 0, 0, 0, 0]);
    }
    let (sessions, unreadable) = read_moving_sessions(&bytes).unwrap();
    assert_eq!((sessions.len(), unreadable, write_moving_sessions(sessions.clone())), (count as usize, 0, bytes));
    sessions
}

/// A worker whose switch has the port of that guest.
fn worker_with_guest() -> crate::Handle<Nowhere> {
    let vni = Vni::new(100).unwrap();
    let vpc = Vpc {
        vni,
        reliability: Default::default(),
        ordering: Default::default(),
        gateways: Vec::new(),
        acl: Vec::new(),
    };
    let port = Port {
        id: GUEST,
        vni,
        mac: Mac([2, 0, 0, 0, 0, 1]),
        addresses: vec![Ipv4Addr::new(10, 0, 0, 1).into()],
        routed: Vec::new(),
        mtu: 1500,
        groups: Vec::new(),
        home: None,
    };
    // 40 MB of sessions: glibc always has the kernel map more than 32 MiB (`mallopt(3)`, M_MMAP_THRESHOLD). Less could
    // be memory that another test has used.
    let limits = SessionLimits { total: 5 * MANY, per_port: 5 * MANY };
    let tables = Tables { vpcs: vec![vpc], ports: vec![port], sessions: limits, ..Tables::default() };
    start(config(), Nowhere::new(), Switch::build(&tables, 0).unwrap(), None).unwrap()
}

#[test]
fn sessions_move_and_are_listed_some_in_each_turn() {
    const COUNT: u32 = 20_000;
    let worker = worker_with_guest();
    let (remote, sessions) = (worker.remote(), sessions(COUNT));
    let turns = || remote.ask(|worker| worker.core.counters().loops).unwrap();
    let before = turns();
    assert_eq!(remote.take_over_sessions(GUEST, sessions.clone()), Ok(u64::from(COUNT)));
    assert!(turns() - before >= u64::from(COUNT / PLACES), "nothing takes a turn for itself");
    assert_eq!(remote.take_over_sessions(GUEST, sessions.clone()), Ok(0), "they are there");
    let list = |from| {
        let some = |place, session: &SessionView| (session.remote.port() > 1024).then_some(place);
        remote.sessions(from, some).flat_map(Result::unwrap).collect::<Vec<u32>>()
    };
    let all = list(0);
    assert_eq!(all, (10_000..COUNT).collect::<Vec<_>>());
    assert_eq!(list(all[999] + 1)[..], all[1000..]);
    assert!(list(u32::MAX).is_empty());
    let moving = |port| remote.moving_sessions(port).flat_map(Result::unwrap).collect::<Vec<_>>();
    assert_eq!((moving(GUEST).len(), moving(PortId(9)).len()), (sessions.len(), 0));
}

/// Whether the kernel has provided a page: bit 63 of its entry in /proc/self/pagemap.
fn is_present(address: usize) -> bool {
    let mut entry = [0; 8];
    let pagemap = std::fs::File::open("/proc/self/pagemap").unwrap();
    std::os::unix::fs::FileExt::read_exact_at(&pagemap, &mut entry, (address / 4096 * 8) as u64).unwrap();
    u64::from_ne_bytes(entry) >> 63 == 1
}

#[test]
fn the_next_memory_of_a_worker_that_carries_no_packets_can_be_provided() {
    const COUNT: u32 = 60_000;
    let worker = worker_with_guest();
    let memory = || worker.run(|worker| worker.core_mut().switch_mut().memory()[0]).unwrap();
    worker.remote().take_over_sessions(GUEST, sessions(COUNT)).unwrap();
    let Extent { address, used_bytes, reserved_bytes } = memory();
    let next = (address + used_bytes).next_multiple_of(LARGE_PAGE);
    assert!(used_bytes > LARGE_PAGE && next < address + reserved_bytes, "{used_bytes} of {reserved_bytes} bytes");
    assert!(reserved_bytes > 32 << 20, "the kernel maps this memory for this worker only");
    assert!(!is_present(next), "it has been provided before");
    worker.run(crate::Worker::provide).unwrap();
    assert!(provide::wait(Duration::from_secs(20)) && is_present(next));
}

#[test]
fn a_worker_begins_with_the_memory_of_its_first_sessions() {
    let worker = worker_with_guest();
    let [sessions, heads, ..] = worker.run(|worker| worker.core_mut().switch_mut().memory()).unwrap();
    assert!(sessions.used_bytes == 0 && sessions.reserved_bytes > 0 && heads.reserved_bytes > 0);
    for extent in [sessions, heads] {
        let last = extent.address + extent.reserved_bytes.min(1 << 20) - 1;
        assert!(is_present(extent.address) && is_present(last), "{extent:?}");
    }
}

/// Duration of a turn that includes a list: `cargo test --release -p bifrost-datapath -- --ignored --nocapture
/// longest_turn`.
#[test]
#[ignore = "measures time"]
fn longest_turn() {
    let worker = worker(MANY, 1000);
    let remote = worker.remote();
    let told = |what: &str, mut took: Vec<Duration>| {
        took.sort_unstable();
        let at = |percent: usize| took[(took.len() * percent / 100).min(took.len() - 1)];
        println!("{what}: {}, median {:?}, P99 {:?}, longest {:?}", took.len(), at(50), at(99), at(100));
    };
    let whole = |worker: &crate::Worker<Nowhere>| {
        let (began, core) = (Instant::now(), &worker.core);
        let all = (0..core.engine().places()).filter_map(|place| core.connection_view(place)).collect::<Vec<_>>();
        assert_eq!(all.len(), MANY as usize);
        began.elapsed()
    };
    told("all connections at once", (0..20).map(|_| remote.ask(whole).unwrap()).collect());
    let (mut took, began) = (Vec::new(), Instant::now());
    for _ in 0..20 {
        let mut from = Some(0);
        while let Some(place) = from {
            let piece = remote.mailbox().ask(move |worker, share| {
                let (began, mut page) = (Instant::now(), Vec::with_capacity(PAGE));
                let next = connections(&worker.core, place, share, &mut page, &mut |_, c| Some(*c));
                Some((next, began.elapsed()))
            });
            let (next, piece) = piece.unwrap();
            from = next;
            took.push(piece);
        }
    }
    told("in pieces", took);
    println!("a list of pieces took {:?}", began.elapsed() / 20);
    let began = Instant::now();
    for _ in 0..20 {
        assert_eq!(remote.connections(|_, c| Some(*c)).flat_map(Result::unwrap).count(), MANY as usize);
    }
    println!("a list of pages took {:?}", began.elapsed() / 20);
    let one = |place: u32| {
        let view = move |worker: &crate::Worker<Nowhere>| {
            let (began, view) = (Instant::now(), worker.core.port_view(place));
            (began.elapsed(), view)
        };
        remote.ask(view).unwrap().0
    };
    told("ports one by one", (0..1000).map(one).collect());
    let totals = |worker: &crate::Worker<Nowhere>| {
        let (began, totals) = (Instant::now(), worker.totals());
        (began.elapsed(), totals)
    };
    told("the worker as a whole", (0..1000).map(|_| remote.ask(totals).unwrap().0).collect());
    let (sessions, worker) = (sessions(MANY), worker_with_guest());
    let remote = worker.remote();
    let first = sessions[..1].to_vec();
    // The first session allocates the table.
    assert_eq!(remote.take_over_sessions(GUEST, first), Ok(1));
    let (mut took, mut at) = (Vec::new(), 0);
    while at < sessions.len() {
        // As many as between two readings of the clock, and then as many as a turn has time for.
        let piece = sessions[at..].to_vec();
        let (count, time) = remote
            .mailbox()
            .ask(move |worker, share| {
                let (began, mut count) = (Instant::now(), 0);
                look(share, 0, piece.len() as u32, CONNECTIONS, &mut Vec::<()>::new(), |place, _| {
                    worker.core.switch_mut().take_over_session(GUEST, &piece[place as usize]);
                    count += 1;
                });
                Some((count, began.elapsed()))
            })
            .unwrap();
        at += count;
        took.push(time);
    }
    told("sessions taken over, in pieces", took);
    let places = |core: &Core<Device>| 0..core.switch().moving_places();
    let whole = move |worker: &crate::Worker<Nowhere>| {
        let (began, core) = (Instant::now(), &worker.core);
        let all: Vec<_> = places(core).filter_map(|place| core.switch().moving_session_at(GUEST, place)).collect();
        assert_eq!(write_moving_sessions(all).len(), 16 + 49 * MANY as usize);
        began.elapsed()
    };
    told("all sessions exported at once", (0..20).map(|_| remote.ask(whole).unwrap()).collect());
    for session in [true, false] {
        let (mut took, mut from) = (Vec::new(), Some(0));
        while let Some(place) = from {
            let piece = remote.mailbox().ask(move |worker, share| {
                let (began, switch) = (Instant::now(), worker.core.switch());
                let (mut moving, mut listed) = (Vec::with_capacity(PAGE), Vec::with_capacity(PAGE));
                let places = switch.moving_places();
                let next = if session {
                    look(share, place, places, CONNECTIONS, &mut listed, |at, page| page.extend(switch.session_at(at)))
                } else {
                    let see = |at, page: &mut Vec<_>| page.extend(switch.moving_session_at(GUEST, at));
                    look(share, place, places, CONNECTIONS, &mut moving, see)
                };
                Some((next, began.elapsed()))
            });
            let (next, piece) = piece.unwrap();
            from = next;
            took.push(piece);
        }
        told(if session { "sessions listed, in pieces" } else { "sessions exported, in pieces" }, took);
    }
}
