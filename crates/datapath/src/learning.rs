//! Packets that wait until the route to their destination is learned.
//!
//! In networks whose routes are learned, the switch has no route for the first packet to a destination
//! ([`Action::Ask`](bifrost_avs::Action)). The packet stays in the guest's buffer, and a question goes to the daemon's
//! bounded queue. When the answer comes ([`Core::learn`]), the switch decides again about all packets that wait for it,
//! before it sees later ones. Everything is bounded for each port, so that a guest that scans a network only harms
//! itself, and packets without an answer are dropped after [`PATIENCE_NS`].

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::sync::mpsc::SyncSender;

use bifrost_avs::LearnedChange;
use bifrost_port::{GuestPort, TxFrame};
use bifrost_rte::Time;
use bifrost_tables::{IpNet, TokenBucket};
use bifrost_wire::Vni;

use crate::core::Core;
use crate::counters::OutboundCounters;

/// Most packets that wait for one destination, those of a port, and those of a worker.
const OF_DESTINATION: usize = 4;
const OF_PORT: usize = 256;
const OF_WORKER: usize = 4096;
/// New questions of a port: each second, and at once.
const QUESTIONS: (u64, u64) = (500, 1000);
/// How long a packet waits for an answer, ns.
pub(crate) const PATIENCE_NS: u64 = 1_000_000_000;

/// Shortest time between two searches for packets that give up, ns.
const SWEEP_NS: u64 = 10_000_000;

/// A question to the daemon: where an address of a network is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RouteQuestion {
    /// The network.
    pub vni: Vni,
    /// The address.
    pub address: IpAddr,
    /// When it was asked, ns on the worker's clock.
    pub asked_ns: u64,
}

/// The queue of questions to the daemon.
pub type RouteQuestions = SyncSender<RouteQuestion>;

/// A worker's part.
#[derive(Debug, Default)]
pub(crate) struct Asking {
    questions: Option<RouteQuestions>,
    /// Packets of all ports that wait.
    packets: usize,
    /// When to look which of them give up.
    due: Option<Time>,
}

impl Asking {
    /// When packets may give up.
    pub(crate) fn next(&self) -> Option<Time> {
        self.due
    }
}

/// A port's part.
#[derive(Debug)]
pub(crate) struct Learning {
    bucket: TokenBucket,
    waiting: BTreeMap<(Vni, IpAddr), Waiting>,
    packets: usize,
}

/// The packets that wait for one destination, oldest first.
#[derive(Debug)]
struct Waiting {
    frames: Vec<TxFrame>,
    until: Time,
}

impl Default for Learning {
    fn default() -> Self {
        Learning { bucket: TokenBucket::new(QUESTIONS.0, QUESTIONS.1), waiting: BTreeMap::new(), packets: 0 }
    }
}

impl Learning {
    /// Packets that wait.
    pub(crate) fn packets(&self) -> usize {
        self.packets
    }

    /// All packets that wait; those for one destination in their order.
    pub(crate) fn frames(&self) -> impl Iterator<Item = &TxFrame> {
        self.waiting.values().flat_map(|waiting| &waiting.frames)
    }

    /// Keeps a packet, or says why not: by the counter of its drop.
    fn keep(
        &mut self,
        now: Time,
        (vni, address): (Vni, IpAddr),
        frame: TxFrame,
        asking: &Asking,
    ) -> Result<(), fn(&mut OutboundCounters) -> &mut u64> {
        if self.packets >= OF_PORT || asking.packets >= OF_WORKER {
            return Err(|counters| &mut counters.learn_full_packets);
        }
        if let Some(waiting) = self.waiting.get_mut(&(vni, address)) {
            if waiting.frames.len() >= OF_DESTINATION {
                return Err(|counters| &mut counters.learn_full_packets);
            }
            waiting.frames.push(frame);
            self.packets += 1;
            return Ok(());
        }
        if !self.bucket.take(now.0, 1) {
            return Err(|counters| &mut counters.learn_rate_packets);
        }
        let question = RouteQuestion { vni, address, asked_ns: now.0 };
        let is_asked = asking.questions.as_ref().is_some_and(|queue| queue.try_send(question).is_ok());
        if !is_asked {
            return Err(|counters| &mut counters.learn_unasked_packets);
        }
        let until = now.after(PATIENCE_NS);
        self.waiting.insert((vni, address), Waiting { frames: vec![frame], until });
        self.packets += 1;
        Ok(())
    }

    /// Takes the packets of some destinations, those for one destination in their order.
    fn take(&mut self, mut chosen: impl FnMut(&(Vni, IpAddr), Time) -> bool) -> VecDeque<TxFrame> {
        let mut taken = VecDeque::new();
        self.waiting.retain(|to, waiting| {
            let is_chosen = chosen(to, waiting.until);
            if is_chosen {
                taken.extend(waiting.frames.drain(..));
            }
            !is_chosen
        });
        self.packets -= taken.len();
        taken
    }
}

/// Ranges of addresses. A look-up takes few steps, because packets for thousands of addresses may wait when answers
/// about a thousand ranges come, and all guests of the worker wait meanwhile.
struct Ranges(Vec<IpNet>);

impl Ranges {
    fn new(all: Vec<IpNet>) -> Self {
        // Disjoint afterwards.
        let mut all = IpNet::aggregate(&all);
        all.sort_unstable();
        Ranges(all)
    }

    fn contains(&self, address: IpAddr) -> bool {
        let behind = self.0.partition_point(|range| range.network() <= address);
        self.0[..behind].last().is_some_and(|range| range.contains(&address))
    }
}

impl<P: GuestPort> Core<P> {
    /// Sets the daemon's queue of questions.
    pub fn set_route_questions(&mut self, questions: RouteQuestions) {
        self.asking.questions = Some(questions);
    }

    /// Keeps a packet until the route to an address is learned, or drops it.
    #[cold]
    #[inline(never)]
    pub(crate) fn ask_route(&mut self, owner: u32, frame: TxFrame, to: (Vni, IpAddr)) {
        let now = self.now;
        let Some(port) = self.ports.get_mut(owner as usize).and_then(Option::as_mut) else { return };
        match port.learning.get_or_insert_default().keep(now, to, frame, &self.asking) {
            Ok(()) => {
                self.asking.packets += 1;
                let until = now.after(PATIENCE_NS);
                self.asking.due = Some(self.asking.due.map_or(until, |due| due.min(until)));
                // A ring that returns buffers in order must not run short because of this one.
                port.port.relieve();
            }
            Err(counter) => {
                *counter(&mut port.outbound) += 1;
                port.complete(frame.handle);
            }
        }
    }

    /// Changes what the switch has learned of a network's routes, and lets it decide again about the packets that wait
    /// for it.
    pub fn learn(&mut self, vni: Vni, changes: &[LearnedChange]) {
        self.switch.learn(vni, changes);
        if self.asking.packets == 0 {
            return;
        }
        let answered = changes.iter().filter(|change| change.answer.is_some()).map(|change| change.range);
        let answered = Ranges::new(answered.collect());
        let is_answered = |&(of, address): &(Vni, IpAddr)| of == vni && answered.contains(address);
        for port in self.ports.iter_mut().flatten() {
            let Some(learning) = &mut port.learning else { continue };
            let mut again = learning.take(|to, _| is_answered(to));
            if again.is_empty() {
                continue;
            }
            self.asking.packets = self.asking.packets.saturating_sub(again.len());
            port.outbound.resumed_packets += again.len() as u64;
            again.append(&mut port.backlog);
            port.backlog = again;
            port.unfinished = true;
        }
    }

    /// Drops packets whose time is over.
    #[cold]
    #[inline(never)]
    pub(crate) fn end_asking(&mut self) {
        let now = self.now;
        let mut due: Option<Time> = None;
        let mut left = 0;
        for port in self.ports.iter_mut().flatten() {
            let Some(learning) = &mut port.learning else { continue };
            let over = learning.take(|_, until| until <= now);
            left += learning.packets;
            due = due.into_iter().chain(learning.waiting.values().map(|waiting| waiting.until)).min();
            port.outbound.learn_timeout_packets += over.len() as u64;
            over.into_iter().for_each(|frame| port.complete(frame.handle));
        }
        // Not once for each packet: all ports are looked at.
        let due = due.map(|due| due.max(now.after(SWEEP_NS)));
        (self.asking.packets, self.asking.due) = (left, due);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, sync_channel};

    use bifrost_nic::Offload;
    use bifrost_port::TxHandle;

    use super::*;

    fn frame(n: u32) -> TxFrame {
        TxFrame { handle: TxHandle(n), len: 60, offload: Offload::default() }
    }

    fn to(n: u32) -> (Vni, IpAddr) {
        (Vni::new(100).unwrap_or_default(), IpAddr::from((0x0a00_0000 + n).to_be_bytes()))
    }

    fn asking(room: usize) -> (Asking, Receiver<RouteQuestion>) {
        let (questions, asked) = sync_channel(room);
        (Asking { questions: Some(questions), ..Asking::default() }, asked)
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
        let questions: Vec<_> = asked.try_iter().map(|question| (question.address, question.asked_ns)).collect();
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
        assert_eq!(
            reasons,
            BTreeMap::from([(None, OF_PORT as u32), (Some("learn_full_packets"), 2000 - OF_PORT as u32)])
        );
        // Although all of them are answered at once.
        for n in 2000..5000 {
            learning.take(|_, _| true);
            *reasons.entry(keep(&mut learning, Time(0), n, n, &asking)).or_default() += 1;
        }
        assert_eq!(asked.try_iter().count() as u64, QUESTIONS.1);
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
        for address in
            ["10.0.0.0", "10.0.0.7", "10.0.0.255", "10.0.1.0", "10.0.3.255", "10.0.4.0", "10.0.9.1", "9.9.9.9"]
        {
            let address = address.parse().expect("an address");
            assert_eq!(ranges.contains(address), all.iter().any(|range| range.contains(&address)), "{address}");
        }
        assert!(ranges.contains("fd00::1".parse().expect("an address")));
        assert!(
            !ranges.contains("::1".parse().expect("an address")) && !Ranges::new(Vec::new()).contains([0; 4].into())
        );
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
}
