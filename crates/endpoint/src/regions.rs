//! Memory regions that peers may access, and their permissions.

use std::collections::HashMap;

use bifrost_rdm::ConnectionId;

/// A peer's permission for a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rights {
    /// Read.
    Read,
    /// Write.
    Write,
    /// Read and write.
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

/// Why an access is refused; sent to the peer as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Denial {
    /// The message is not a valid access.
    #[error("the access is malformed")]
    Malformed,
    /// There is no region with this key, or this peer has no permission for it.
    #[error("no region with this key")]
    Key,
    /// The peer has only the other permission.
    #[error("the region does not grant this access")]
    Right,
    /// The access exceeds the region.
    #[error("offset and length are not inside the region")]
    Range,
    /// The answer would exceed the longest message of the peer.
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
    /// Number of regions that have used this slot: part of the key, so keys are never reused.
    generation: u32,
    region: Option<Region>,
}

/// All regions of a host.
#[derive(Debug, Default)]
pub(crate) struct Regions {
    slots: Vec<Slot>,
    free: Vec<u32>,
}

/// Maximum number of regions of a host.
pub(crate) const REGIONS_MAX: usize = 65_536;

impl Regions {
    /// Registers memory; returns it if there are too many regions.
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

    /// Deregisters memory and returns it; the key becomes invalid.
    pub(crate) fn deregister(&mut self, key: u64) -> Option<Vec<u8>> {
        let slot = self.slot_mut(key)?;
        let region = slot.region.take()?;
        // A slot that has used all its keys stays empty.
        if let Some(next) = slot.generation.checked_add(1) {
            slot.generation = next;
            self.free.push(key as u32);
        }
        Some(region.memory)
    }

    /// Sets a peer's permission. Returns whether the region exists.
    pub(crate) fn allow(&mut self, key: u64, connection: ConnectionId, rights: Rights) -> bool {
        let region = self.slot_mut(key).and_then(|slot| slot.region.as_mut());
        region.map(|region| region.peers.insert(connection, rights)).is_some()
    }

    /// Withdraws a peer's permission.
    pub(crate) fn revoke(&mut self, key: u64, connection: ConnectionId) {
        if let Some(region) = self.slot_mut(key).and_then(|slot| slot.region.as_mut()) {
            region.peers.remove(&connection);
        }
    }

    /// Withdraws all permissions of a connection that has ended.
    pub(crate) fn forget(&mut self, connection: ConnectionId) {
        for region in self.slots.iter_mut().filter_map(|slot| slot.region.as_mut()) {
            region.peers.remove(&connection);
        }
    }

    /// A region's contents, for its owner.
    pub(crate) fn bytes(&self, key: u64) -> Option<&[u8]> {
        self.slot(key)?.region.as_ref().map(|region| &region.memory[..])
    }

    /// A region's contents, mutable.
    pub(crate) fn bytes_mut(&mut self, key: u64) -> Option<&mut [u8]> {
        self.slot_mut(key)?.region.as_mut().map(|region| &mut region.memory[..])
    }

    /// The bytes that a peer reads, if permitted.
    pub(crate) fn read(&self, from: ConnectionId, key: u64, offset: u64, len: u32) -> Result<&[u8], Denial> {
        let region = self.slot(key).and_then(|slot| slot.region.as_ref()).ok_or(Denial::Key)?;
        let rights = region.peers.get(&from).ok_or(Denial::Key)?;
        if !rights.may_read() {
            return Err(Denial::Right);
        }
        let range = range(offset, len as usize).ok_or(Denial::Range)?;
        region.memory.get(range).ok_or(Denial::Range)
    }

    /// Executes a peer's write, if permitted; otherwise nothing changes.
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
    fn a_key_is_valid_for_one_region_and_permitted_peers_only() {
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
        /// Peers read and write exactly what a slow oracle permits, and nothing else changes.
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
