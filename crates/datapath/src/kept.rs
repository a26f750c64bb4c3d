//! Copies of packets sent while all paths to a peer had failed. They are sent again as soon as a path answers.
//! Otherwise nothing would flow after an outage until the guests retransmit, and a TCP that has been silent for three
//! seconds waits for another three.

use std::collections::VecDeque;

use bifrost_rte::Time;

/// Maximum number of frames.
const MOST: usize = 256;
/// Maximum number of frames of one port: a guest with many flows must not displace the frames of others.
const MOST_OF_PORT: usize = 32;
/// Maximum number of frames of one flow: the oldest and the three newest. The ACK that follows a request must not
/// displace the request.
const MOST_OF_FLOW: usize = 4;
/// Maximum age of a frame, ns. A segment of TCP may live two minutes (RFC 9293, 3.4.1).
const LONGEST_NS: u64 = 30_000_000_000;

/// What frames of one flow have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Flow {
    /// The destination host.
    pub(crate) peer: u32,
    /// The port that sent it.
    pub(crate) owner: u32,
    /// Hash of its addresses and ports.
    pub(crate) hash: u32,
}

/// A frame as it was sent.
#[derive(Clone, Debug)]
pub(crate) struct Frame {
    /// Its flow.
    pub(crate) flow: Flow,
    /// Outer ECN codepoint.
    pub(crate) class: u8,
    /// UDP payload.
    pub(crate) bytes: Vec<u8>,
    since: Time,
}

/// The oldest frame of each flow and its newest ones, within the limits above.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    frames: VecDeque<Frame>,
}

impl Kept {
    /// Keeps a copy of a frame. It replaces the second oldest frame of its flow, if the flow has its maximum, or the
    /// oldest of its port, if the port has.
    pub(crate) fn keep(&mut self, now: Time, flow: Flow, class: u8, bytes: &[u8]) {
        let is_old = |frame: &Frame| now.since(frame.since) > LONGEST_NS;
        while self.frames.front().is_some_and(is_old) {
            self.frames.pop_front();
        }
        let of_flow = || (0..self.frames.len()).filter(|i| self.frames[*i].flow == flow);
        let of_port = || (0..self.frames.len()).filter(|i| self.frames[*i].flow.owner == flow.owner);
        let second = of_flow().nth(1).filter(|_| of_flow().nth(MOST_OF_FLOW - 1).is_some());
        let oldest = || of_port().next().filter(|_| of_port().nth(MOST_OF_PORT - 1).is_some());
        let freed = match second.or_else(oldest) {
            Some(replaced) => self.frames.remove(replaced),
            None if self.frames.len() >= MOST => self.frames.pop_front(),
            None => None,
        };
        let mut copy = freed.map(|frame| frame.bytes).unwrap_or_default();
        copy.clear();
        copy.extend_from_slice(bytes);
        self.frames.push_back(Frame { flow, class, bytes: copy, since: now });
    }

    /// Whether nothing is kept.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// The peer of each frame.
    pub(crate) fn peers(&self) -> impl Iterator<Item = u32> {
        self.frames.iter().map(|frame| frame.flow.peer)
    }

    /// Removes the frames kept for a peer, in the order in which they were sent.
    pub(crate) fn take(&mut self, now: Time, peer: u32) -> Vec<Frame> {
        let frames = std::mem::take(&mut self.frames).into_iter();
        let (taken, rest): (Vec<Frame>, Vec<Frame>) = frames.partition(|frame| frame.flow.peer == peer);
        self.frames = rest.into();
        taken.into_iter().filter(|frame| now.since(frame.since) <= LONGEST_NS).collect()
    }

    /// Forgets frames whose peer or port is gone.
    pub(crate) fn forget(&mut self, is_gone: impl Fn(Flow) -> bool) {
        self.frames.retain(|frame| !is_gone(frame.flow));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    fn flow(hash: u32) -> Flow {
        Flow { peer: 1, owner: 0, hash }
    }

    fn taken(kept: &mut Kept, now: Time) -> Vec<(u32, u8)> {
        kept.take(now, 1).iter().map(|frame| (frame.flow.hash, frame.bytes[0])).collect()
    }

    #[test]
    fn the_oldest_and_the_newest_frames_of_each_flow_are_kept() {
        let mut kept = Kept::default();
        for number in 0..10 {
            (0..2).for_each(|hash| kept.keep(Time(0), flow(hash), 0, &[number]));
        }
        kept.keep(Time(0), Flow { peer: 2, ..flow(0) }, 0, &[77]);
        assert_eq!(taken(&mut kept, Time(1)), [(0, 0), (1, 0), (0, 7), (1, 7), (0, 8), (1, 8), (0, 9), (1, 9)]);
        assert_eq!(taken(&mut kept, Time(1)), [], "once");
        assert_eq!(kept.take(Time(1), 2).len(), 1, "the other peer's");
    }

    #[test]
    fn their_number_and_age_are_bounded() {
        let mut kept = Kept::default();
        let victim = Flow { owner: 9, ..flow(1) };
        kept.keep(Time(0), victim, 0, &[9]);
        (0..10_000).for_each(|hash| kept.keep(Time(0), flow(hash), 0, &[0]));
        assert_eq!(kept.frames.len(), MOST_OF_PORT + 1);
        assert_eq!(kept.frames[0].flow, victim, "one port displaces nothing of another");
        (0..100).for_each(|owner| (0..99).for_each(|n| kept.keep(Time(0), Flow { owner, ..flow(n) }, 0, &[0])));
        assert_eq!(kept.frames.len(), MOST);
        kept.keep(Time(31 * S), flow(1), 0, &[1]);
        assert_eq!((kept.frames.len(), taken(&mut kept, Time(32 * S))), (1, vec![(1, 1)]));
        kept.keep(Time(0), flow(1), 0, &[1]);
        assert_eq!(taken(&mut kept, Time(31 * S)), []);
    }

    #[test]
    fn frames_of_a_removed_port_are_forgotten() {
        let mut kept = Kept::default();
        kept.keep(Time(0), flow(1), 0, &[1]);
        kept.keep(Time(0), Flow { owner: 5, ..flow(2) }, 0, &[2]);
        kept.forget(|flow| flow.owner == 5);
        assert_eq!(taken(&mut kept, Time(0)), [(1, 1)]);
    }
}
