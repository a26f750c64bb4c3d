//! One number for many objects, so that two ends find out cheaply whether they have the same ones.

use crate::config::Object;

/// FNV-1a's parameters for 64 bits (RFC 9923).
const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const PRIME: u64 = 0x0000_0100_0000_01b3;

/// A digest to which objects are added, and from which they are taken, in any order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Digest {
    sum: u64,
    objects: u64,
}

impl Digest {
    /// Adds an object of a generation.
    pub fn add(&mut self, object: &Object, generation: u64) {
        // A sum, so that neither the order nor what else is there matters.
        self.sum = self.sum.wrapping_add(mixed(object, generation));
        self.objects += 1;
    }

    /// Takes an object of a generation that was added before.
    pub fn remove(&mut self, object: &Object, generation: u64) {
        self.sum = self.sum.wrapping_sub(mixed(object, generation));
        self.objects = self.objects.saturating_sub(1);
    }

    /// Of how many objects.
    pub fn objects(self) -> u64 {
        self.objects
    }

    /// As the API has it.
    pub fn text(self) -> String {
        format!("{:016x}", self.sum)
    }
}

fn mixed(object: &Object, generation: u64) -> u64 {
    let spec = object.spec().to_string();
    let text = format!("{}\n{}\n{generation}\n{spec}", object.kind(), object.key());
    let hash = text.bytes().fold(OFFSET, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(PRIME));
    // Mixed before they are added, or the last bytes alone would decide.
    let mixed = (hash ^ hash >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ mixed >> 29
}
