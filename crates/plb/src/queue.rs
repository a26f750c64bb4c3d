//! One order queue: Albatross's FIFO, BUF and BITMAP (4.1), which share an index and are therefore one array here.

use crate::mutation::mutated;
use crate::{Config, LegalCheck, NO_PAYLOAD};

/// State of an entry, and the packet in it.
#[derive(Clone, Debug)]
enum State<T> {
    /// BITMAP: not valid.
    Waiting,
    /// BITMAP: valid, with the PSN of the packet in BUF.
    /// `claim`: the payload slot in its trailer.
    Returned { psn: u32, claim: u32, packet: T },
    /// The pod will not send it.
    Dropped,
}

#[derive(Clone, Debug)]
struct Entry<T> {
    /// FIFO: time of dispatch.
    at: u64,
    /// The recorded payload slot, or [`NO_PAYLOAD`].
    payload: u32,
    state: State<T>,
}

/// How a PSN compares with the entries in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Legal {
    /// It is between head and tail.
    Yes,
    /// It is not, but its low bits are.
    Alias,
    /// Neither it nor its low bits are.
    No,
}

/// Result of inserting a packet into its entry.
#[derive(Debug)]
pub(crate) enum Put<T> {
    /// It is held. `payload` is the recorded slot.
    Held { payload: u32 },
    /// It is held, and replaces this earlier packet.
    Replaced(T),
    /// The entry is not free.
    Duplicate(T),
}

/// Result of the reorder check at the head.
#[derive(Debug)]
pub(crate) enum Head<T> {
    /// Nothing, or a packet that is still being waited for (case 2).
    Wait,
    /// Case 4: the packet and its recorded slot.
    InOrder { packet: T, payload: u32 },
    /// Case 3: the entry held another packet, with the slot in its trailer.
    Alias { psn: u32, claim: u32, packet: T },
    /// The pod dropped it; its slot.
    Dropped { payload: u32 },
    /// Case 1: its slot, and whether others waited behind it.
    TimedOut { payload: u32, blocking: bool },
    /// Released without waiting: its slot.
    Abandoned { payload: u32 },
}

/// Entries by PSN; `head` and `tail` are whole PSNs, so that full and empty differ.
#[derive(Clone, Debug)]
pub(crate) struct OrderQueue<T> {
    entries: Box<[Entry<T>]>,
    head: u32,
    tail: u32,
    /// Packets held in their entries.
    held: u32,
    /// While dispatch changes from packets to flows: the first PSN that was dispatched by flow.
    pub(crate) drain_to: Option<u32>,
}

impl<T> OrderQueue<T> {
    pub(crate) fn new(config: &Config) -> Self {
        let entry = || Entry { at: 0, payload: NO_PAYLOAD, state: State::Waiting };
        OrderQueue {
            entries: (0..config.queue_entries).map(|_| entry()).collect(),
            head: config.first_psn,
            tail: config.first_psn,
            held: 0,
            drain_to: None,
        }
    }

    fn index(&self, psn: u32) -> usize {
        psn as usize & (self.entries.len() - 1)
    }

    /// Entries in use.
    pub(crate) fn len(&self) -> u32 {
        self.tail.wrapping_sub(self.head)
    }

    /// Packets held in their entries.
    pub(crate) fn held(&self) -> u32 {
        self.held
    }

    pub(crate) fn is_full(&self, config: &Config) -> bool {
        let mut len = self.len() + u32::from(mutated!(config, QueueOneShort));
        if mutated!(config, PointersWithoutWrap) {
            len %= self.entries.len() as u32;
        }
        len as usize >= self.entries.len()
    }

    /// The PSN of the next packet.
    pub(crate) fn tail(&self) -> u32 {
        self.tail
    }

    /// When the first packet was dispatched.
    pub(crate) fn head_at(&self) -> Option<u64> {
        (self.len() > 0).then(|| self.entries[self.index(self.head)].at)
    }

    /// Allocates the next entry. The queue must not be full.
    pub(crate) fn push(&mut self, now: u64, payload: u32) {
        let index = self.index(self.tail);
        let entry = &mut self.entries[index];
        (entry.at, entry.payload) = (now, payload);
        self.tail = self.tail.wrapping_add(1);
    }

    /// The legal check.
    pub(crate) fn legal(&self, psn: u32, config: &Config) -> Legal {
        let distance = psn.wrapping_sub(self.head);
        let low = self.index(distance) as u32;
        if distance < self.len() || (mutated!(config, TailUnchecked) && distance < self.entries.len() as u32) {
            Legal::Yes
        } else if low < self.len() {
            let fits = config.legal_check == LegalCheck::LowBits || mutated!(config, LowBitsAlways);
            if fits { Legal::Yes } else { Legal::Alias }
        } else {
            Legal::No
        }
    }

    /// Inserts a packet that passed the legal check into its entry.
    pub(crate) fn put(&mut self, psn: u32, claim: u32, packet: T, config: &Config) -> Put<T> {
        let index = self.index(psn);
        let entry = &mut self.entries[index];
        let replaces = config.legal_check == LegalCheck::LowBits || mutated!(config, DuplicateTakesPlace);
        match &mut entry.state {
            state @ State::Waiting => {
                *state = State::Returned { psn, claim, packet };
                self.held += 1;
                Put::Held { payload: entry.payload }
            }
            State::Returned { psn: old_psn, claim: old_claim, packet: old } if replaces => {
                (*old_psn, *old_claim) = (psn, claim);
                Put::Replaced(std::mem::replace(old, packet))
            }
            State::Returned { .. } | State::Dropped => Put::Duplicate(packet),
        }
    }

    /// Marks the entry of a PSN that passed the legal check: its packet will not arrive. False if it has arrived.
    pub(crate) fn mark_dropped(&mut self, psn: u32, config: &Config) -> bool {
        let index = self.index(psn);
        match &mut self.entries[index].state {
            state @ State::Waiting => {
                *state = State::Dropped;
                true
            }
            state @ State::Returned { .. } if mutated!(config, DropFlagAfterReturn) => {
                *state = State::Dropped;
                true
            }
            _ => false,
        }
    }

    /// The reorder check of the head. With `flush` nothing is waited for.
    pub(crate) fn check(&mut self, now: u64, flush: bool, config: &Config) -> Head<T> {
        if self.len() == 0 {
            return Head::Wait;
        }
        let (head, index) = (self.head, self.index(self.head));
        let entry = &mut self.entries[index];
        let (age, payload) = (now.saturating_sub(entry.at), entry.payload);
        let early = u64::from(mutated!(config, TimeoutEarly));
        match &entry.state {
            State::Waiting if flush || mutated!(config, SkipWait) => {
                self.head = head.wrapping_add(1);
                return Head::Abandoned { payload };
            }
            State::Waiting if age + early <= config.timeout_ns || mutated!(config, NoTimeout) => return Head::Wait,
            State::Waiting => {
                self.head = head.wrapping_add(1);
                return Head::TimedOut { payload, blocking: self.held > 0 };
            }
            State::Returned { .. } | State::Dropped => {}
        }
        match std::mem::replace(&mut entry.state, State::Waiting) {
            // Albatross checks the time first. Its hardware checks all the time; software may check late, and a
            // matching packet that arrived meanwhile is then still in order.
            State::Returned { psn, claim, packet } => {
                self.held -= 1;
                if psn == head || mutated!(config, AliasInOrder) {
                    self.head = head.wrapping_add(1);
                    Head::InOrder { packet, payload: if mutated!(config, PayloadOfClaim) { claim } else { payload } }
                } else {
                    Head::Alias { psn, claim, packet }
                }
            }
            _ => {
                self.head = head.wrapping_add(1);
                Head::Dropped { payload }
            }
        }
    }

    /// Whether all packets before `drain_to` are out.
    pub(crate) fn is_drained(&self) -> bool {
        self.drain_to.is_some_and(|to| self.head.wrapping_sub(to) <= self.entries.len() as u32)
    }
}
