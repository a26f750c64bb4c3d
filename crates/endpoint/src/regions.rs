//! Memory that peers may read and write, and what they may do there.

use std::collections::HashMap;

use bifrost_rdm::ConnectionId;

/// What a peer may do with a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rights {
    /// Read it.
    Read,
    /// Write it.
    Write,
    /// Both.
    ReadWrite,
}

impl Rights {
    fn may_read(self) -> bool {
        self != Self::Write
    }

    fn may_write(self) -> bool {
        self != Self::Read
    }
}

/// Why an access is refused, as the peer is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Denial {
    /// The message is not that of an access.
    #[error("the access is malformed")]
    Malformed,
    /// No region with this key to which this peer is let.
    #[error("no region with this key")]
    Key,
    /// The peer may only do the other thing.
    #[error("the region does not grant this access")]
    Right,
    /// It would leave the region.
    #[error("offset and length are not inside of the region")]
    Range,
    /// The answer would be longer than the peer takes.
    #[error("the answer is longer than the longest message that this end takes")]
    TooLong,
}

#[derive(Debug)]
struct Region {
    memory: Vec<u8>,
    peers: HashMap<ConnectionId, Rights>,
}

#[derive(Debug, Default)]
struct Slot {
    /// How many regions have been here: part of the key, which is therefore never used again.
    generation: u32,
    region: Option<Region>,
}

/// All regions of a host.
#[derive(Debug, Default)]
pub(crate) struct Regions {
    slots: Vec<Slot>,
    free: Vec<u32>,
}

/// Regions of a host, at most.
pub(crate) const REGIONS_MAX: usize = 65_536;

impl Regions {
    /// Registers memory; it comes back if there are too many regions.
    pub(crate) fn register(&mut self, memory: Vec<u8>) -> Result<u64, Vec<u8>> {
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.slots.len() < REGIONS_MAX => {
                self.slots.push(Slot::default());
                self.slots.len() as u32 - 1
            }
            None => return Err(memory),
        };
        let slot = &mut self.slots[index as usize];
        slot.region = Some(Region { memory, peers: HashMap::new() });
        Ok(u64::from(slot.generation) << 32 | u64::from(index))
    }

    /// Gives memory back; its key names nothing any more.
    pub(crate) fn deregister(&mut self, key: u64) -> Option<Vec<u8>> {
        let slot = self.slot_mut(key)?;
        let region = slot.region.take()?;
        // A slot whose keys are used up stays empty.
        if let Some(next) = slot.generation.checked_add(1) {
            slot.generation = next;
            self.free.push(key as u32);
        }
        Some(region.memory)
    }

    /// Lets a peer in, or with other rights than before; whether there is such a region.
    pub(crate) fn allow(&mut self, key: u64, connection: ConnectionId, rights: Rights) -> bool {
        let region = self.slot_mut(key).and_then(|slot| slot.region.as_mut());
        region.map(|region| region.peers.insert(connection, rights)).is_some()
    }

    /// No longer lets a peer in.
    pub(crate) fn revoke(&mut self, key: u64, connection: ConnectionId) {
        if let Some(region) = self.slot_mut(key).and_then(|slot| slot.region.as_mut()) {
            region.peers.remove(&connection);
        }
    }

    /// A connection has ended: it is let in nowhere.
    pub(crate) fn forget(&mut self, connection: ConnectionId) {
        for region in self.slots.iter_mut().filter_map(|slot| slot.region.as_mut()) {
            region.peers.remove(&connection);
        }
    }

    /// A region's bytes, for its owner.
    pub(crate) fn bytes(&self, key: u64) -> Option<&[u8]> {
        self.slot(key)?.region.as_ref().map(|region| &region.memory[..])
    }

    /// The same, to be changed.
    pub(crate) fn bytes_mut(&mut self, key: u64) -> Option<&mut [u8]> {
        self.slot_mut(key)?.region.as_mut().map(|region| &mut region.memory[..])
    }

    /// What a peer wants to read, if it may.
    pub(crate) fn read(&self, from: ConnectionId, key: u64, offset: u64, len: u32) -> Result<&[u8], Denial> {
        let region = self.slot(key).and_then(|slot| slot.region.as_ref()).ok_or(Denial::Key)?;
        let rights = region.peers.get(&from).ok_or(Denial::Key)?;
        if !rights.may_read() {
            return Err(Denial::Right);
        }
        let range = range(offset, len as usize).ok_or(Denial::Range)?;
        region.memory.get(range).ok_or(Denial::Range)
    }

    /// Writes what a peer wants to write, if it may; if not, nothing is changed.
    pub(crate) fn write(&mut self, from: ConnectionId, key: u64, offset: u64, data: &[u8]) -> Result<(), Denial> {
        let region = self.slot_mut(key).and_then(|slot| slot.region.as_mut()).ok_or(Denial::Key)?;
        let rights = region.peers.get(&from).ok_or(Denial::Key)?;
        if !rights.may_write() {
            return Err(Denial::Right);
        }
        let range = range(offset, data.len()).ok_or(Denial::Range)?;
        region.memory.get_mut(range).ok_or(Denial::Range)?.copy_from_slice(data);
        Ok(())
    }

    fn slot(&self, key: u64) -> Option<&Slot> {
        self.slots.get(key as u32 as usize).filter(|slot| u64::from(slot.generation) == key >> 32)
    }

    fn slot_mut(&mut self, key: u64) -> Option<&mut Slot> {
        self.slots.get_mut(key as u32 as usize).filter(|slot| u64::from(slot.generation) == key >> 32)
    }
}

fn range(offset: u64, len: usize) -> Option<std::ops::Range<usize>> {
    let begin = usize::try_from(offset).ok()?;
    Some(begin..begin.checked_add(len)?)
}

#[cfg(test)]
mod tests {
    use bifrost_rdm::Engine;
    use proptest::prelude::*;

    use super::*;

    fn connection(number: u64) -> ConnectionId {
        Engine::connection_of(number << 32)
    }

    #[test]
    fn a_key_names_one_region_and_only_for_those_let_in() {
        let mut regions = Regions::default();
        let first = regions.register(vec![1; 10]).unwrap();
        assert!(regions.allow(first, connection(1), Rights::Read));
        assert_eq!(regions.read(connection(1), first, 2, 8), Ok(&[1; 8][..]));
        assert_eq!(regions.write(connection(1), first, 0, &[9]), Err(Denial::Right));
        assert_eq!(regions.read(connection(2), first, 0, 1), Err(Denial::Key));
        assert!(regions.allow(first, connection(2), Rights::Write));
        assert_eq!(regions.read(connection(2), first, 0, 1), Err(Denial::Right));
        assert_eq!(regions.write(connection(2), first, 9, &[9]), Ok(()));
        regions.revoke(first, connection(2));
        assert_eq!(regions.write(connection(2), first, 9, &[8]), Err(Denial::Key));
        regions.forget(connection(1));
        assert_eq!(regions.read(connection(1), first, 0, 1), Err(Denial::Key));
        assert_eq!(regions.deregister(first), Some([vec![1; 9], vec![9]].concat()));
        let second = regions.register(vec![0; 10]).unwrap();
        assert!(first as u32 == second as u32 && first != second, "the same slot, another key");
        assert!(regions.allow(second, connection(1), Rights::ReadWrite));
        assert_eq!(regions.read(connection(1), first, 0, 1), Err(Denial::Key));
        assert!(!regions.allow(first, connection(1), Rights::Read) && regions.deregister(first).is_none());
    }

    proptest! {
        /// Whatever a peer asks for, it reads and writes what a slow oracle says, and nothing else changes.
        #[test]
        fn hostile_accesses_stay_inside(
            accesses in prop::collection::vec(
                (0..4usize, 0..3u64, any::<bool>(), prop_oneof![0..40u64, Just(u64::MAX), any::<u64>()],
                 prop_oneof![0..40u32, Just(u32::MAX), any::<u32>()], any::<u64>()),
                1..60,
            ),
        ) {
            let mut regions = Regions::default();
            let mut oracle = vec![];
            for (at, len) in [0usize, 7, 32].into_iter().enumerate() {
                let memory: Vec<u8> = (0..len).map(|byte| (byte + 50 * at) as u8).collect();
                let key = regions.register(memory.clone()).unwrap();
                let rights = [Rights::Read, Rights::Write, Rights::ReadWrite];
                regions.allow(key, connection(1), rights[at]);
                regions.allow(key, connection(2), Rights::ReadWrite);
                oracle.push((key, memory, rights[at]));
            }
            for (at, peer, write, offset, len, wild) in accesses {
                let key = oracle.get(at).map_or(wild, |(key, ..)| *key);
                let found = oracle.iter_mut().find(|(known, ..)| *known == key && peer > 0);
                let inside = |memory: &Vec<u8>, len: usize| {
                    u128::from(offset) + len as u128 <= memory.len() as u128
                };
                if write {
                    let data = vec![0xee; len.min(100) as usize];
                    let may = found.as_ref().is_some_and(|(_, memory, rights)| {
                        (peer == 2 || *rights != Rights::Read) && inside(memory, data.len())
                    });
                    prop_assert_eq!(regions.write(connection(peer), key, offset, &data).is_ok(), may);
                    if may && let Some((_, memory, _)) = found {
                        memory[offset as usize..][..data.len()].copy_from_slice(&data);
                    }
                } else {
                    let expected = found.filter(|(_, memory, rights)| {
                        (peer == 2 || *rights != Rights::Write) && inside(memory, len as usize)
                    });
                    let expected = expected.map(|(_, memory, _)| memory[offset as usize..][..len as usize].to_vec());
                    prop_assert_eq!(regions.read(connection(peer), key, offset, len).ok().map(<[u8]>::to_vec), expected);
                }
                for (key, memory, _) in &oracle {
                    prop_assert_eq!(regions.bytes(*key), Some(&memory[..]));
                }
            }
        }
    }
}
