use bifrost_nic::Offload;
use bifrost_port::TxHandle;
use proptest::prelude::*;

use super::*;
use crate::questions::{RouteQuestionQueue, route_questions};

fn frame(n: u32) -> TxFrame {
    TxFrame { handle: TxHandle(n), len: 60, offload: Offload::default() }
}

fn to(n: u32) -> (Vni, IpAddr) {
    (Vni::new(100).unwrap_or_default(), IpAddr::from((0x0a00_0000 + n).to_be_bytes()))
}

fn asking(room: usize) -> (Asking, RouteQuestionQueue) {
    let (questions, asked) = route_questions(room);
    (Asking { questions: Some(questions), ..Asking::default() }, asked)
}

fn taken(queue: &RouteQuestionQueue) -> impl Iterator<Item = RouteQuestion> {
    std::iter::from_fn(|| queue.take())
}

/// Offers a packet; returns why it is dropped.
fn keep(learning: &mut Learning, now: Time, n: u32, handle: u32, asking: &Asking) -> Option<&'static str> {
    let mut counters = OutboundCounters::default();
    let counter = learning.keep(now, to(n), frame(handle), asking).err()?;
    *counter(&mut counters) += 1;
    counters.iter().find(|(_, count)| *count == 1).map(|(name, _)| name)
}

#[test]
fn each_destination_is_asked_for_once_and_four_packets_wait_for_it() {
    let (asking, asked) = asking(10);
    let mut learning = Learning::default();
    for handle in 0..4 {
        assert_eq!(keep(&mut learning, Time(7), 1, handle, &asking), None);
    }
    assert_eq!(keep(&mut learning, Time(7), 1, 4, &asking), Some("learn_full_packets"));
    assert_eq!(keep(&mut learning, Time(8), 2, 5, &asking), None);
    let questions: Vec<_> = taken(&asked).map(|question| (question.address, question.asked_ns)).collect();
    assert_eq!(questions, [(to(1).1, 7), (to(2).1, 8)]);
    assert_eq!(learning.packets(), 5);
    let taken: Vec<u32> = learning.take(|of, _| *of == to(1)).iter().map(|frame| frame.handle.0).collect();
    assert_eq!((taken, learning.packets()), (vec![0, 1, 2, 3], 1));
    assert_eq!(keep(&mut learning, Time(9), 1, 6, &asking), None, "asked for again");
    let over = learning.take(|_, until| until <= Time(8 + PATIENCE_NS));
    assert_eq!(over.iter().map(|frame| frame.handle.0).collect::<Vec<_>>(), [5]);
}

#[test]
fn a_guest_that_scans_is_stopped_by_its_own_bounds() {
    let (asking, asked) = asking(10_000);
    let mut learning = Learning::default();
    let mut reasons = BTreeMap::<_, u32>::new();
    for n in 0..2000 {
        *reasons.entry(keep(&mut learning, Time(0), n, n, &asking)).or_default() += 1;
    }
    assert_eq!(reasons, BTreeMap::from([(None, OF_PORT as u32), (Some("learn_full_packets"), 2000 - OF_PORT as u32)]));
    // Although all of them are answered at once.
    for n in 2000..5000 {
        learning.take(|_, _| true);
        *reasons.entry(keep(&mut learning, Time(0), n, n, &asking)).or_default() += 1;
    }
    assert_eq!(taken(&asked).count() as u64, QUESTIONS.1);
    assert_eq!(reasons[&Some("learn_rate_packets")] as u64, 3000 - (QUESTIONS.1 - OF_PORT as u64));
    // Another guest of the worker has its own.
    assert_eq!(keep(&mut Learning::default(), Time(0), 1, 1, &asking), None);
    // The rate is back after a while.
    learning.take(|_, _| true);
    assert_eq!(keep(&mut learning, Time(2_000_000_000 / QUESTIONS.0), 1, 1, &asking), None);
}

#[test]
fn ranges_contain_what_one_of_them_contains() {
    let net = |text: &str| text.parse::<IpNet>().expect("a prefix");
    let all = ["10.0.0.0/24", "10.0.0.7/32", "10.0.2.0/23", "10.0.9.1/32", "fd00::/64"].map(net);
    let ranges = Ranges::new(all.to_vec());
    for address in ["10.0.0.0", "10.0.0.7", "10.0.0.255", "10.0.1.0", "10.0.3.255", "10.0.4.0", "10.0.9.1", "9.9.9.9"] {
        let address = address.parse().expect("an address");
        assert_eq!(ranges.contains(address), all.iter().any(|range| range.contains(&address)), "{address}");
    }
    assert!(ranges.contains("fd00::1".parse().expect("an address")));
    assert!(!ranges.contains("::1".parse().expect("an address")) && !Ranges::new(Vec::new()).contains([0; 4].into()));
}

#[test]
fn without_a_place_for_its_question_a_packet_does_not_wait() {
    let (full, _asked) = asking(0);
    assert_eq!(keep(&mut Learning::default(), Time(0), 1, 1, &full), Some("learn_unasked_packets"));
    assert_eq!(keep(&mut Learning::default(), Time(0), 1, 1, &Asking::default()), Some("learn_unasked_packets"));
    let (mut busy, _asked) = asking(10);
    busy.packets = OF_WORKER;
    assert_eq!(keep(&mut Learning::default(), Time(0), 1, 1, &busy), Some("learn_full_packets"));
}

/// A worker with some ports, of which each is offered packets.
struct Worker {
    asking: Asking,
    ports: Vec<Learning>,
}

impl Worker {
    fn new(ports: usize, room: usize) -> (Worker, RouteQuestionQueue) {
        let (asking, asked) = asking(room);
        (Worker { asking, ports: (0..ports).map(|_| Learning::default()).collect() }, asked)
    }

    /// As [`Core::ask_route`].
    fn keep(&mut self, port: usize, now: Time, n: u32, handle: u32) -> Option<&'static str> {
        let dropped = keep(&mut self.ports[port], now, n, handle, &self.asking);
        self.asking.packets += usize::from(dropped.is_none());
        dropped
    }

    /// As [`Core::learn`] and [`Core::end_asking`].
    fn take(&mut self, chosen: impl Fn(&(Vni, IpAddr), Time) -> bool) -> Vec<(usize, u32)> {
        let mut all = Vec::new();
        for (n, port) in self.ports.iter_mut().enumerate() {
            all.extend(port.take(&chosen).into_iter().map(|frame| (n, frame.handle.0)));
        }
        self.asking.packets -= all.len();
        all
    }
}

#[test]
fn guests_that_scan_leave_room_for_one_that_does_not() {
    for (scanning, room) in [(16, 20_000), (16, 1024), (16, 100), (200, 20_000), (200, 1024)] {
        let (mut worker, _asked) = Worker::new(scanning + 1, room);
        for n in 0..300 {
            for port in 0..scanning {
                worker.keep(port, Time(0), port as u32 * 1000 + n, n);
            }
        }
        let most = worker.ports[..scanning].iter().map(Learning::packets).max().unwrap_or(0);
        // One that comes last and is not answered either gets half of that share at least.
        let mut kept = 0;
        while worker.keep(scanning, Time(0), 1_000_000 + kept, kept).is_none() {
            kept += 1;
        }
        let shared = OF_WORKER.min(room);
        let share = OF_PORT.min(shared / (scanning + 1));
        assert!(most <= share + 1, "{scanning} {room}: one that scans holds {most}");
        assert!(kept > 0 && kept as usize + 2 >= share.min(most) / 2, "{scanning} {room}: {kept}, others {most}");
    }
}

/// What a worker does.
#[derive(Clone, Debug)]
enum Step {
    /// A port gets packets: for each destination, the given number.
    Offer { port: usize, first: u32, count: u32, each: u32 },
    /// The daemon takes questions.
    Take(usize),
    /// Answers about ranges come.
    Answer(Vec<(u32, u8)>),
    /// Time passes, ms; packets give up.
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let count = prop_oneof![5 => 1..5u32, 1 => 200..400u32];
    prop_oneof![
        6 => (0..20usize, 0..400u32, count, 1..6u32)
            .prop_map(|(port, first, count, each)| Step::Offer { port, first, count, each }),
        2 => prop_oneof![Just(2000), 0..50usize].prop_map(Step::Take),
        2 => prop::collection::vec((0..800u32, 22..33u8), 1..4).prop_map(Step::Answer),
        2 => prop_oneof![3 => 1..400u64, 1 => 900..1100u64].prop_map(Step::Pass),
    ]
}

/// A packet that waits, as the oracle remembers it.
#[derive(Clone, Copy, Debug)]
struct Held {
    port: usize,
    to: u32,
    handle: u32,
    until: Time,
}

/// All packets that wait and all questions, in lists.
struct Oracle {
    held: Vec<Held>,
    questions: VecDeque<u32>,
    buckets: Vec<TokenBucket>,
    room: usize,
}

impl Oracle {
    fn keep(&mut self, port: usize, now: Time, to: u32, handle: u32) -> Option<&'static str> {
        let of_port: Vec<&Held> = self.held.iter().filter(|held| held.port == port).collect();
        if of_port.len() >= OF_PORT || of_port.len() + self.held.len() >= OF_WORKER {
            return Some("learn_full_packets");
        }
        let same: Vec<&&Held> = of_port.iter().filter(|held| held.to == to).collect();
        let until = match same.first() {
            Some(_) if same.len() >= OF_DESTINATION => return Some("learn_full_packets"),
            Some(first) => first.until,
            None => {
                let destinations = of_port.iter().map(|held| held.to).collect::<std::collections::BTreeSet<_>>().len();
                if !self.buckets[port].take(now.0, 1) {
                    return Some("learn_rate_packets");
                }
                if self.questions.len() >= self.room {
                    return Some("learn_unasked_packets");
                }
                if destinations + self.questions.len() >= self.room {
                    return Some("learn_full_packets");
                }
                self.questions.push_back(to);
                now.after(PATIENCE_NS)
            }
        };
        self.held.push(Held { port, to, handle, until });
        None
    }

    fn take(&mut self, chosen: impl Fn(&Held) -> bool) -> Vec<Held> {
        let (taken, held) = self.held.drain(..).partition(chosen);
        self.held = held;
        taken
    }
}

/// That packets came out as the oracle says: the same ones, those of a port for one destination in their order.
fn assert_same(taken: &[(usize, u32)], expected: &[Held]) {
    let of = |handle: u32| expected.iter().find(|held| held.handle == handle);
    assert_eq!(taken.len(), expected.len());
    let mut last: BTreeMap<(usize, u32), u32> = BTreeMap::new();
    for (port, handle) in taken {
        let held = of(*handle).unwrap_or_else(|| panic!("packet {handle} is not expected"));
        assert_eq!(held.port, *port, "packet {handle}");
        // Handles grow.
        let before = last.insert((*port, held.to), *handle);
        assert!(before.is_none_or(|before| before < *handle), "packet {handle} came after {before:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Whatever is offered and answered: each packet is kept or dropped for the reason that the oracle has, and comes
    /// out once, in order.
    #[test]
    fn waiting_packets_are_those_of_an_oracle(
        steps in prop::collection::vec(step(), 1..60), room in prop_oneof![Just(1024usize), 0..60usize],
    ) {
        let (mut worker, asked) = Worker::new(20, room);
        let buckets = (0..20).map(|_| TokenBucket::new(QUESTIONS.0, QUESTIONS.1)).collect();
        let mut oracle = Oracle { held: Vec::new(), questions: VecDeque::new(), buckets, room };
        let (mut now, mut handle, mut dropped, mut out) = (Time(0), 0, 0, 0);
        for step in steps {
            match step {
                Step::Offer { port, first, count, each } => {
                    for n in (0..count).flat_map(|n| std::iter::repeat_n(first + n, each as usize)) {
                        let verdict = worker.keep(port, now, n, handle);
                        prop_assert_eq!(verdict, oracle.keep(port, now, n, handle), "packet {} for {}", handle, n);
                        dropped += u32::from(verdict.is_some());
                        handle += 1;
                    }
                }
                Step::Take(most) => {
                    let taken: Vec<IpAddr> = taken(&asked).take(most).map(|question| question.address).collect();
                    let expected = oracle.questions.len().min(most);
                    let expected: Vec<IpAddr> = oracle.questions.drain(..expected).map(|n| to(n).1).collect();
                    prop_assert_eq!(taken, expected);
                }
                Step::Answer(ranges) => {
                    let net = |(n, length): &(u32, u8)| IpNet::new(to(*n).1, *length).map(|range| range.trunc());
                    let ranges: Vec<IpNet> = ranges.iter().filter_map(|range| net(range).ok()).collect();
                    let found = Ranges::new(ranges.clone());
                    let taken = worker.take(|(_, address), _| found.contains(*address));
                    let expected = oracle.take(|held| ranges.iter().any(|range| range.contains(&to(held.to).1)));
                    assert_same(&taken, &expected);
                    out += taken.len() as u32;
                }
                Step::Pass(ms) => {
                    now = now.after(ms * 1_000_000);
                    let taken = worker.take(|_, until| until <= now);
                    assert_same(&taken, &oracle.take(|held| held.until <= now));
                    dropped += taken.len() as u32;
                }
            }
            let held: usize = worker.ports.iter().map(Learning::packets).sum();
            prop_assert_eq!((held, worker.asking.packets), (oracle.held.len(), oracle.held.len()));
            prop_assert!(held < OF_WORKER && worker.ports.iter().all(|port| port.packets() <= OF_PORT));
            prop_assert_eq!(held as u32 + dropped + out, handle, "each packet once");
        }
    }
}
