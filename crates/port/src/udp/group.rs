//! Groups a batch's datagrams into messages for UDP segmentation offload; no I/O.

use crate::underlay::LaneId;

/// Maximum datagrams per message: the kernel's `UDP_MAX_SEGMENTS` (64 until Linux 6.8, 128 since).
pub(crate) const MAX_SEGMENTS: u16 = 64;
/// Maximum UDP payload per message, bytes: below IPv4's 16-bit length with any options.
pub(crate) const MAX_MESSAGE_BYTES: u32 = 65_000;

const NONE: u32 = u32::MAX;

/// Datagrams of one lane that are sent together: all `segment` bytes long except the last, which may be shorter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) lane: LaneId,
    pub(crate) traffic_class: u8,
    pub(crate) segment: u32,
    pub(crate) bytes: u32,
    pub(crate) count: u16,
    first: u32,
    last: u32,
    closed: bool,
}

/// The messages of one batch. Reused from batch to batch, so that the steady state allocates nothing.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    messages: Vec<Message>,
    /// By datagram: the next one of its message.
    next: Vec<u32>,
    /// By lane: the message that its next datagram may join. Between batches, only the lanes of `messages` have one.
    open: Vec<u32>,
}

impl Groups {
    /// Groups `datagrams`, given in order as lane, traffic class, length in bytes. Order is preserved within a lane,
    /// but not between lanes. Constant time per datagram.
    pub(crate) fn build(&mut self, datagrams: impl Iterator<Item = (LaneId, u8, u32)>, lanes: usize) {
        // Not the whole table: a host with many peers has far more lanes than a batch has datagrams.
        for message in self.messages.drain(..) {
            if let Some(open) = self.open.get_mut(message.lane.0 as usize) {
                *open = NONE;
            }
        }
        self.next.clear();
        self.open.resize(lanes, NONE);
        for (index, (lane, traffic_class, len)) in datagrams.enumerate() {
            let index = index as u32;
            self.next.push(NONE);
            let Some(open) = self.open.get_mut(lane.0 as usize) else {
                self.messages.push(Message::new(index, lane, traffic_class, len));
                continue;
            };
            match self.messages.get_mut(*open as usize) {
                Some(message) if message.admits(traffic_class, len) => {
                    self.next[message.last as usize] = index;
                    message.append(index, len);
                }
                _ => {
                    *open = self.messages.len() as u32;
                    self.messages.push(Message::new(index, lane, traffic_class, len));
                }
            }
        }
    }

    /// The messages, in the order of their first datagrams.
    pub(crate) fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// The indexes of a message's datagrams in the batch, in order.
    pub(crate) fn members(&self, message: &Message) -> impl Iterator<Item = usize> {
        std::iter::successors(Some(message.first), |&i| Some(self.next[i as usize]).filter(|&n| n != NONE))
            .map(|i| i as usize)
    }
}

impl Message {
    fn new(index: u32, lane: LaneId, traffic_class: u8, len: u32) -> Self {
        Self { lane, traffic_class, segment: len, bytes: len, count: 1, first: index, last: index, closed: len == 0 }
    }

    fn admits(&self, traffic_class: u8, len: u32) -> bool {
        !self.closed
            && traffic_class == self.traffic_class
            && len <= self.segment
            && len > 0
            && self.count < MAX_SEGMENTS
            && self.bytes + len <= MAX_MESSAGE_BYTES
    }

    fn append(&mut self, index: u32, len: u32) {
        self.bytes += len;
        self.count += 1;
        self.last = index;
        self.closed = len < self.segment;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Sent = (u32, u8, u32);

    fn build(datagrams: &[Sent]) -> Groups {
        let mut groups = Groups::default();
        groups.build(datagrams.iter().map(|&(l, e, n)| (LaneId(l), e, n)), 4);
        groups
    }

    /// How the kernel segments a message: every `segment` bytes.
    fn split(bytes: u32, segment: u32) -> Vec<u32> {
        let mut left = bytes;
        let mut out = Vec::new();
        loop {
            let take = left.min(segment);
            out.push(take);
            left -= take;
            if left == 0 {
                return out;
            }
        }
    }

    /// The simple algorithm: per lane, extend the last message while the rules allow it.
    fn naive(datagrams: &[Sent], lane: u32) -> Vec<Vec<u32>> {
        let mut out: Vec<(u8, Vec<u32>)> = Vec::new();
        for &(_, ecn, len) in datagrams.iter().filter(|d| d.0 == lane) {
            let fits = out.last().is_some_and(|(e, m)| {
                *e == ecn
                    && m.iter().all(|&x| x == m[0])
                    && len <= m[0]
                    && len > 0
                    && m.len() < usize::from(MAX_SEGMENTS)
                    && m.iter().sum::<u32>() + len <= MAX_MESSAGE_BYTES
            });
            match out.last_mut() {
                Some((_, m)) if fits => m.push(len),
                _ => out.push((ecn, vec![len])),
            }
        }
        out.into_iter().map(|(_, m)| m).collect()
    }

    #[test]
    fn interleaved_lanes_are_grouped() {
        let g = build(&[(0, 0, 100), (1, 0, 90), (0, 0, 100), (1, 0, 91), (0, 0, 40), (0, 0, 100), (0, 1, 100)]);
        let got: Vec<_> =
            g.messages().iter().map(|m| (m.lane.0, m.traffic_class, g.members(m).collect::<Vec<_>>())).collect();
        assert_eq!(got, [(0, 0, vec![0, 2, 4]), (1, 0, vec![1]), (1, 0, vec![3]), (0, 0, vec![5]), (0, 1, vec![6])]);
    }

    #[test]
    fn nothing_joins_a_message_of_an_earlier_batch() {
        let mut groups = build(&[(3, 0, 100), (0, 0, 100)]);
        for lanes in [4, 70_000, 70_001] {
            groups.build([(LaneId(0), 0, 100), (LaneId(lanes as u32 - 1), 0, 100)].into_iter(), lanes);
            assert_eq!(groups.messages().iter().map(|m| m.count).collect::<Vec<_>>(), [1, 1]);
            groups.build([(LaneId(lanes as u32 - 1), 0, 100)].into_iter(), lanes);
            assert_eq!(groups.messages().len(), 1);
        }
    }

    #[test]
    fn limits_hold() {
        let many: Vec<_> = (0..200).map(|_| (0, 0, 100)).collect();
        assert_eq!(build(&many).messages().iter().map(|m| m.count).collect::<Vec<_>>(), [64, 64, 64, 8]);
        let big: Vec<_> = (0..10).map(|_| (0, 0, 16_000)).collect();
        assert_eq!(build(&big).messages().iter().map(|m| m.count).collect::<Vec<_>>(), [4, 4, 2]);
        assert_eq!(build(&[(0, 0, 0), (0, 0, 0), (0, 0, 5)]).messages().len(), 3, "empty datagrams stand alone");
        assert_eq!(build(&[(9, 0, 7), (9, 0, 7)]).messages().len(), 2, "unknown lanes are not grouped");
    }

    proptest! {
        #[test]
        fn grouping_then_splitting_gives_the_datagrams_back(
            datagrams in prop::collection::vec((0u32..4, 0u8..2, prop_oneof![4 => Just(1400u32), 1 => 0u32..1500, 1 => Just(9000)]), 0..300)
        ) {
            let groups = build(&datagrams);
            let mut seen = vec![0; datagrams.len()];
            let mut per_lane: Vec<Vec<Vec<u32>>> = vec![Vec::new(); 4];
            let mut order: Vec<Vec<usize>> = vec![Vec::new(); 4];
            for m in groups.messages() {
                let members: Vec<usize> = groups.members(m).collect();
                for &i in &members {
                    seen[i] += 1;
                    prop_assert_eq!((datagrams[i].0, datagrams[i].1), (m.lane.0, m.traffic_class));
                }
                let lens: Vec<u32> = members.iter().map(|&i| datagrams[i].2).collect();
                prop_assert_eq!(split(m.bytes, m.segment.max(1)), lens.clone());
                prop_assert_eq!(members.len(), usize::from(m.count));
                prop_assert!(m.count <= MAX_SEGMENTS && (m.bytes <= MAX_MESSAGE_BYTES || m.count == 1));
                per_lane[m.lane.0 as usize].push(lens);
                order[m.lane.0 as usize].extend(members);
            }
            prop_assert!(seen.iter().all(|&n| n == 1));
            for lane in 0..4u32 {
                prop_assert!(order[lane as usize].is_sorted());
                prop_assert_eq!(&per_lane[lane as usize], &naive(&datagrams, lane));
            }
        }
    }
}
