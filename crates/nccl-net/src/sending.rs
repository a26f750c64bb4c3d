//! Matches sends with the peer's receives.

use std::collections::VecDeque;

use crate::frame::Group;

/// Maximum number of groups of receives that a peer may have open: NCCL has 32.
pub(crate) const GROUPS_MAX: usize = 256;

/// The receive that matches a send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Match {
    pub(crate) group: u32,
    pub(crate) index: u8,
    /// Bytes to send, limited by the receive's buffer.
    pub(crate) size: u64,
}

/// The peer's receives without a send.
#[derive(Debug, Default)]
pub(crate) struct Sending {
    /// Each with a bitmap of the receives that have a send.
    groups: VecDeque<(Group, u8)>,
    next: u32,
}

impl Sending {
    /// Records receives that the peer announced, or returns an error text.
    pub(crate) fn post(&mut self, group: Group) -> Result<(), &'static str> {
        if group.number != self.next {
            return Err("the peer's receives are out of order");
        }
        if self.groups.len() >= GROUPS_MAX {
            return Err("the peer has too many receives open");
        }
        self.next = self.next.wrapping_add(1);
        self.groups.push_back((group, 0));
        Ok(())
    }

    /// Takes the oldest receive with this tag.
    pub(crate) fn take(&mut self, tag: i32, size: u64) -> Option<Match> {
        let (at, index) = self.groups.iter().enumerate().find_map(|(at, (group, taken))| {
            let free = |index: &usize| group.wanted[*index].tag == tag && taken & (1 << index) == 0;
            Some((at, (0..usize::from(group.count)).find(free)?))
        })?;
        let (group, taken) = &mut self.groups[at];
        *taken |= 1 << index;
        let size = size.min(group.wanted[index].size);
        let found = Match { group: group.number, index: index as u8, size };
        while self.groups.front().is_some_and(|(group, taken)| taken.count_ones() == group.count.into()) {
            self.groups.pop_front();
        }
        Some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::Wanted;

    fn group(number: u32, wanted: &[(i32, u64)]) -> Group {
        let mut group = Group { number, count: wanted.len() as u8, ..Group::default() };
        for (into, (tag, size)) in group.wanted.iter_mut().zip(wanted) {
            *into = Wanted { tag: *tag, size: *size };
        }
        group
    }

    #[test]
    fn sends_match_the_oldest_receive_with_their_tag() {
        let mut sending = Sending::default();
        assert_eq!(sending.take(1, 10), None);
        assert_eq!(sending.post(group(0, &[(1, 10), (2, 20), (1, 30)])), Ok(()));
        assert_eq!(sending.post(group(1, &[(1, 5)])), Ok(()));
        assert_eq!(sending.take(3, 0), None);
        assert_eq!(sending.take(1, 100), Some(Match { group: 0, index: 0, size: 10 }));
        assert_eq!(sending.take(1, 7), Some(Match { group: 0, index: 2, size: 7 }));
        assert_eq!(sending.take(1, 7), Some(Match { group: 1, index: 0, size: 5 }));
        assert_eq!(sending.take(1, 7), None);
        assert_eq!(sending.take(2, 0), Some(Match { group: 0, index: 1, size: 0 }));
        assert!(sending.groups.is_empty());
    }

    #[test]
    fn announcements_must_be_bounded_and_in_order() {
        let mut sending = Sending::default();
        assert!(sending.post(group(1, &[(1, 1)])).is_err());
        for number in 0..GROUPS_MAX as u32 {
            assert_eq!(sending.post(group(number, &[(1, 1)])), Ok(()));
        }
        assert!(sending.post(group(GROUPS_MAX as u32, &[(1, 1)])).is_err());
    }
}
