//! The choice of a core: in turn within a group, or by flow.

use crate::Config;
use crate::mutation::mutated;

/// The cores of a pod, in groups.
#[derive(Clone, Debug)]
pub(crate) struct Cores {
    groups: Box<[Group]>,
    /// By core: its group.
    group_of: Box<[u16]>,
}

/// Consecutive cores that packets of a flow are sprayed over.
#[derive(Clone, Debug)]
struct Group {
    first: u16,
    /// The core after the last one.
    end: u16,
    /// The core of the next packet.
    next: u16,
}

impl Cores {
    /// The cores of a valid `config`: groups of equal size, or different by one core.
    pub(crate) fn new(config: &Config) -> Self {
        let (cores, groups) = (u32::from(config.cores), u32::from(config.core_groups));
        let first = |group: u32| (group * cores / groups) as u16;
        let group = |n| Group { first: first(n), end: first(n + 1), next: first(n) };
        let groups: Box<[Group]> = (0..groups).map(group).collect();
        let sizes = groups.iter().map(|group| usize::from(group.end - group.first));
        let group_of = (0..).zip(sizes).flat_map(|(n, size)| std::iter::repeat_n(n, size)).collect();
        Cores { groups, group_of }
    }

    /// The core of a flow whose packets are not sprayed.
    #[inline]
    pub(crate) fn of_flow(&self, flow_hash: u32) -> u16 {
        ((u64::from(flow_hash) * self.group_of.len() as u64) >> 32) as u16
    }

    /// The next core of the flow's group that has room; if none has, of another group.
    #[inline]
    pub(crate) fn next_where(
        &mut self,
        flow_hash: u32,
        config: &Config,
        mut has_room: impl FnMut(u16) -> bool,
    ) -> Option<u16> {
        if let [all] = &mut *self.groups {
            return all.next_where(config, &mut has_room);
        }
        let own = usize::from(self.group_of[usize::from(self.of_flow(flow_hash))]);
        let (before, from_own) = self.groups.split_at_mut(own);
        from_own.iter_mut().chain(before).find_map(|group| group.next_where(config, &mut has_room))
    }
}

impl Group {
    #[inline]
    fn next_where(&mut self, config: &Config, has_room: &mut impl FnMut(u16) -> bool) -> Option<u16> {
        (self.first..self.end).map(|_| self.turn(config)).find(|core| has_room(*core))
    }

    #[inline]
    fn turn(&mut self, config: &Config) -> u16 {
        let core = self.next;
        let end = self.end - u16::from(mutated!(config, CoreLeftOut) && self.end - self.first > 1);
        self.next = if core + 1 >= end { self.first } else { core + 1 };
        core
    }
}
