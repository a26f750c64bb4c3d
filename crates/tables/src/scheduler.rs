//! Who sends next on a link that has less room than its members want: first members within their guarantees, then all
//! of them by deficit round robin (Shreedhar and Varghese, SIGCOMM'95), first of groups, then of the members of each.
//!
//! This is the scheme of hierarchical token buckets: a guarantee is always honoured and charged to the link, also when
//! the link has no tokens; then the link's debt makes all others wait. So threads that share the tokens of a link need
//! no agreement about guarantees, as long as these add up to no more than the link's rate.
//!
//! The caller has the tokens and the packets. A round is [`begin`](Scheduler::begin), then
//! [`next`](Scheduler::next) and the report of what was sent, until there is no next one, then
//! [`end`](Scheduler::end).

use std::collections::VecDeque;

use foldhash::fast::RandomState;
use hashbrown::HashMap;

/// Bytes in a turn of a group or a member of weight 1: about one Ethernet frame, so that turns are short.
const QUANTUM: i64 = 2048;

/// A member whose packet goes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Within its guarantee.
    Guaranteed(u32),
    /// By its share.
    Shared(u32),
}

impl Turn {
    /// The member.
    pub fn member(self) -> u32 {
        match self {
            Turn::Guaranteed(member) | Turn::Shared(member) => member,
        }
    }
}

/// Members of a link, and whose turn it is.
#[derive(Debug, Default)]
pub struct Scheduler {
    members: HashMap<u32, Member, RandomState>,
    groups: HashMap<u32, Group, RandomState>,
    /// Groups with waiting members; the first one has its turn.
    order: VecDeque<u32>,
    /// Waiting members with a rest of their guarantee in this round.
    guaranteed: VecDeque<u32>,
    /// Members that wait, but cannot send in this round.
    parked: Vec<u32>,
    /// Members that have sent within their guarantees in this round.
    users: Vec<u32>,
    /// Bytes that the link takes in this round.
    tokens: i64,
}

#[derive(Debug)]
struct Member {
    group: u32,
    weight: i64,
    /// Bytes left of its turn; negative after a packet longer than that.
    left: i64,
    /// Bytes left of its guarantee in this round.
    guarantee: u64,
    /// Bytes sent within its guarantee in this round.
    used: u64,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It has nothing to send.
    Idle,
    Waiting,
    Parked,
}

#[derive(Debug)]
struct Group {
    weight: i64,
    left: i64,
    /// Its waiting members; the first one has its turn.
    waiting: VecDeque<u32>,
    /// All its members.
    members: usize,
}

impl Scheduler {
    /// Adds a member of a group, or changes it. Weights are at least 1; that of the group holds for all its members.
    pub fn set(&mut self, member: u32, (group, group_weight): (u32, u8), weight: u8) {
        let was_waiting = self.members.get(&member).is_some_and(|m| m.state != State::Idle);
        if self.members.get(&member).is_some_and(|m| m.group != group) {
            self.remove(member);
        }
        let of = self.groups.entry(group).or_insert_with(|| Group {
            weight: 1,
            left: 0,
            waiting: VecDeque::new(),
            members: 0,
        });
        of.weight = i64::from(group_weight.max(1));
        let weight = i64::from(weight.max(1));
        let entry = self.members.entry(member).or_insert_with(|| {
            of.members += 1;
            Member { group, weight, left: 0, guarantee: 0, used: 0, state: State::Idle }
        });
        entry.weight = weight;
        if was_waiting {
            self.join(member);
        }
    }

    /// Removes a member; what it has used in this round is not reported.
    pub fn remove(&mut self, member: u32) {
        self.leave(member);
        let Some(gone) = self.members.remove(&member) else { return };
        if let Some(group) = self.groups.get_mut(&gone.group) {
            group.members -= 1;
            if group.members == 0 {
                self.groups.remove(&gone.group);
            }
        }
    }

    /// Whether nobody waits.
    pub fn is_idle(&self) -> bool {
        self.order.is_empty() && self.parked.is_empty()
    }

    /// Members that wait and may send, in any order.
    pub fn waiting(&self) -> impl Iterator<Item = u32> {
        self.groups.values().flat_map(|group| group.waiting.iter().copied())
    }

    /// A member has packets; nothing changes if it had some already, or is unknown.
    pub fn join(&mut self, member: u32) {
        let Some(of) = self.members.get_mut(&member).filter(|m| m.state == State::Idle) else { return };
        of.state = State::Waiting;
        let Some(group) = self.groups.get_mut(&of.group) else { return };
        if group.waiting.is_empty() {
            self.order.push_back(of.group);
        }
        group.waiting.push_back(member);
    }

    /// A member has no more packets. It keeps its debt, but nothing of its turn.
    pub fn leave(&mut self, member: u32) {
        self.stop(member, State::Idle);
    }

    /// A member cannot send before the next round, although it has packets.
    pub fn park(&mut self, member: u32) {
        if self.stop(member, State::Parked) {
            self.parked.push(member);
        }
    }

    /// Takes a member out of the order; returns whether it was in it.
    fn stop(&mut self, member: u32, state: State) -> bool {
        let Some(of) = self.members.get_mut(&member) else { return false };
        let before = std::mem::replace(&mut of.state, state);
        of.left = of.left.min(0);
        match before {
            State::Idle => {
                of.state = State::Idle;
                false
            }
            State::Parked => {
                if state == State::Idle {
                    self.parked.retain(|parked| *parked != member);
                }
                false
            }
            State::Waiting => {
                of.guarantee = 0;
                let group = of.group;
                take_out(&mut self.guaranteed, member);
                if let Some(of) = self.groups.get_mut(&group) {
                    take_out(&mut of.waiting, member);
                    if of.waiting.is_empty() {
                        of.left = of.left.min(0);
                        take_out(&mut self.order, group);
                    }
                }
                true
            }
        }
    }

    /// Begins a round, in which the link takes `tokens` bytes, and each member those that `guarantee` returns in any
    /// case.
    pub fn begin(&mut self, tokens: u64, mut guarantee: impl FnMut(u32) -> u64) {
        self.tokens = i64::try_from(tokens).unwrap_or(i64::MAX);
        for member in std::mem::take(&mut self.parked) {
            if let Some(of) = self.members.get_mut(&member).filter(|m| m.state == State::Parked) {
                of.state = State::Idle;
                self.join(member);
            }
        }
        self.guaranteed.clear();
        for group in &self.order {
            let waiting = self.groups.get(group).into_iter().flat_map(|group| &group.waiting);
            for &member in waiting {
                let Some(of) = self.members.get_mut(&member) else { continue };
                of.guarantee = guarantee(member);
                if of.guarantee > 0 {
                    self.guaranteed.push_back(member);
                }
            }
        }
    }

    /// Whose packet goes next, if any can go in this round. The caller sends one and calls [`sent`](Self::sent), or
    /// calls [`park`](Self::park) or [`leave`](Self::leave).
    #[expect(clippy::should_implement_trait, reason = "the caller changes the scheduler between two calls")]
    pub fn next(&mut self) -> Option<Turn> {
        if let Some(&member) = self.guaranteed.front() {
            return Some(Turn::Guaranteed(member));
        }
        if self.tokens <= 0 {
            return None;
        }
        // Each pass adds to what is left of a turn, so it ends.
        loop {
            let group = self.groups.get_mut(self.order.front()?)?;
            if group.left <= 0 {
                group.left += group.weight * QUANTUM;
                self.order.rotate_left(1);
                continue;
            }
            let &member = group.waiting.front()?;
            let of = self.members.get_mut(&member)?;
            if of.left > 0 {
                return Some(Turn::Shared(member));
            }
            of.left += of.weight * QUANTUM;
            group.waiting.rotate_left(1);
        }
    }

    /// A packet was sent, which takes `bytes` of the link.
    pub fn sent(&mut self, turn: Turn, bytes: u64) {
        let taken = i64::try_from(bytes).unwrap_or(i64::MAX);
        self.tokens = self.tokens.saturating_sub(taken);
        let Some(member) = self.members.get_mut(&turn.member()) else { return };
        match turn {
            Turn::Guaranteed(id) => {
                if member.used == 0 {
                    self.users.push(id);
                }
                member.used += bytes;
                member.guarantee = member.guarantee.saturating_sub(bytes);
                // One packet each, in turn.
                take_out(&mut self.guaranteed, id);
                if member.guarantee > 0 && member.state == State::Waiting {
                    self.guaranteed.push_back(id);
                }
            }
            Turn::Shared(_) => {
                member.left = member.left.saturating_sub(taken);
                if let Some(group) = self.groups.get_mut(&member.group) {
                    group.left = group.left.saturating_sub(taken);
                }
            }
        }
    }

    /// Whether the link takes more in this round.
    pub fn has_tokens(&self) -> bool {
        self.tokens > 0
    }

    /// Ends a round, and reports what each member has sent within its guarantee.
    pub fn end(&mut self, mut used: impl FnMut(u32, u64)) {
        for id in self.users.drain(..) {
            if let Some(member) = self.members.get_mut(&id) {
                used(id, std::mem::take(&mut member.used));
            }
        }
        self.guaranteed.clear();
    }
}

/// Removes an item, mostly the first one.
fn take_out(queue: &mut VecDeque<u32>, item: u32) {
    match queue.front() {
        Some(&first) if first == item => _ = queue.pop_front(),
        _ => queue.retain(|other| *other != item),
    }
}
