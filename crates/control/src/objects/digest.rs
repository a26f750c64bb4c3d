//! A digest of a set of objects, with which two sides cheaply compare their sets.

use crate::config::Object;

/// FNV-1a's parameters for 64 bits (RFC 9923).
const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const PRIME: u64 = 0x0000_0100_0000_01b3;

/// A digest to which objects are added, and from which they are removed, in any order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Digest {
    sum: u64,
    objects: u64,
}

impl Digest {
    /// Adds an object of a generation.
    pub fn add(&mut self, object: &Object, generation: u64) {
        // A sum, so that the order does not matter and objects can be removed.
        self.sum = self.sum.wrapping_add(mixed(object, generation));
        self.objects += 1;
    }

    /// Removes an object of a generation that was added before.
    pub fn remove(&mut self, object: &Object, generation: u64) {
        self.sum = self.sum.wrapping_sub(mixed(object, generation));
        self.objects = self.objects.saturating_sub(1);
    }

    /// The number of objects.
    pub fn objects(self) -> u64 {
        self.objects
    }

    /// The digest in the format of the API.
    pub fn text(self) -> String {
        format!("{:016x}", self.sum)
    }
}

fn mixed(object: &Object, generation: u64) -> u64 {
    let spec = object.spec().to_string();
    let text = format!("{}\n{}\n{generation}\n{spec}", object.kind(), object.key());
    let hash = text.bytes().fold(OFFSET, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(PRIME));
    // Without mixing, differences in the last bytes could cancel out in the sum.
    let mixed = (hash ^ hash >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ mixed >> 29
}
