//! Types of reads and writes, and their limits.

use std::collections::HashSet;

use crate::StoreError;

/// A revision of the whole store. 0: nothing was ever written. Later revisions are higher; numbers may be skipped, and
/// in etcd other users increase them, too.
pub type Revision = u64;

/// Limits of writes, the same for each store.
pub mod limits {
    /// Maximum length of a key, bytes.
    pub const KEY_BYTES: usize = 1024;
    /// Maximum length of a value, bytes.
    pub const VALUE_BYTES: usize = 1 << 20;
    /// Maximum number of writes, and of keys with expected revisions, of a transaction.
    pub const TXN_WRITES: usize = 1024;
    /// Maximum size of a transaction, keys and values, bytes.
    pub const TXN_BYTES: usize = 4 << 20;
    /// Maximum size of an embedded store, bytes: keys, values and [`RECORD_OVERHEAD`] for each.
    pub const STORE_BYTES: usize = 1 << 30;
    /// Counted size of a record in addition to its key and value, bytes.
    pub const RECORD_OVERHEAD: usize = 128;
    /// Maximum number of revisions that the embedded store keeps for watches.
    pub const RECENT_REVISIONS: usize = 10_000;
    /// Maximum size of those, counted like [`STORE_BYTES`], bytes.
    pub const RECENT_BYTES: usize = 64 << 20;
}

/// A key and its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The key.
    pub key: String,
    /// Its value.
    pub value: Vec<u8>,
    /// The revision of its last change.
    pub revision: Revision,
}

/// A change to make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Write {
    /// Sets the value of the key, whether or not it exists.
    Put {
        /// The key.
        key: String,
        /// Its value.
        value: Vec<u8>,
    },
    /// Deletes the key, if it exists.
    Delete {
        /// The key.
        key: String,
    },
}

/// Changes to make together, on conditions. All or nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Txn {
    /// Keys with the expected revision of their last change; 0: the key must not exist.
    pub expect: Vec<(String, Revision)>,
    /// The changes. No key may occur twice.
    pub writes: Vec<Write>,
}

/// The keys under a prefix.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// The store's revision.
    pub revision: Revision,
    /// In order of keys.
    pub records: Vec<Record>,
}

/// All changes of one revision under a prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Events {
    /// The revision.
    pub revision: Revision,
    /// Keys in order, with their new values; None: deleted.
    pub changes: Vec<(String, Option<Vec<u8>>)>,
}

impl Write {
    /// The key that is changed.
    pub fn key(&self) -> &str {
        let (Write::Put { key, .. } | Write::Delete { key }) = self;
        key
    }
}

impl Txn {
    /// Checks that every store accepts it.
    ///
    /// # Errors
    /// It exceeds [`limits`], or a key is empty, has control characters or occurs twice.
    pub fn check(&self) -> Result<(), StoreError> {
        let too_many = |what: &str, count: usize| {
            invalid(format!("a transaction with {count} {what}: the maximum is {}", limits::TXN_WRITES))
        };
        if self.writes.len() > limits::TXN_WRITES {
            return too_many("writes", self.writes.len());
        }
        if self.expect.len() > limits::TXN_WRITES {
            return too_many("expected keys", self.expect.len());
        }
        let mut bytes = 0;
        for keys in [
            self.expect.iter().map(|(key, _)| key.as_str()).collect(),
            self.writes.iter().map(Write::key).collect::<Vec<_>>(),
        ] {
            let mut seen = HashSet::new();
            for key in keys {
                check_key(key)?;
                bytes += key.len();
                if !seen.insert(key) {
                    return invalid(format!("key {key:?} is in the transaction twice"));
                }
            }
        }
        for write in &self.writes {
            let Write::Put { key, value } = write else { continue };
            bytes += value.len();
            if value.len() > limits::VALUE_BYTES {
                let (len, most) = (value.len(), limits::VALUE_BYTES);
                return invalid(format!("the value of {key:?} has {len} bytes: the maximum is {most}"));
            }
        }
        if bytes > limits::TXN_BYTES {
            let most = limits::TXN_BYTES;
            return invalid(format!("a transaction with {bytes} bytes of keys and values: the maximum is {most}"));
        }
        Ok(())
    }
}

fn check_key(key: &str) -> Result<(), StoreError> {
    if key.is_empty() || key.len() > limits::KEY_BYTES {
        let most = limits::KEY_BYTES;
        return invalid(format!("a key with {} bytes: it must have 1 to {most}", key.len()));
    }
    if key.chars().any(char::is_control) {
        return invalid(format!("key {key:?} has a control character"));
    }
    Ok(())
}

fn invalid(what: String) -> Result<(), StoreError> {
    Err(StoreError::Invalid(what))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(key: &str, len: usize) -> Write {
        Write::Put { key: key.into(), value: vec![b'x'; len] }
    }

    fn refused(expect: Vec<(String, Revision)>, writes: Vec<Write>) -> String {
        Txn { expect, writes }.check().unwrap_err().to_string()
    }

    #[test]
    fn errors_name_the_limit() {
        let many: Vec<Write> = (0..1025).map(|i| put(&format!("k{i}"), 1)).collect();
        assert_eq!(refused(vec![], many.clone()), "a transaction with 1025 writes: the maximum is 1024");
        assert!(Txn { expect: vec![], writes: many[..1024].to_vec() }.check().is_ok());
        let keys: Vec<_> = (0..1025).map(|i| (format!("k{i}"), 0)).collect();
        assert!(refused(keys, vec![]).contains("1025 expected keys"));
        assert!(refused(vec![], vec![put("k", (1 << 20) + 1)]).contains("1048577 bytes: the maximum is 1048576"));
        assert!(Txn { expect: vec![], writes: vec![put("k", 1 << 20)] }.check().is_ok());
        assert!(
            refused(vec![], (0..5).map(|i| put(&format!("{i}"), 1_000_000)).collect())
                .contains("5000005 bytes of keys and values")
        );
        assert!(refused(vec![], vec![put("", 1)]).contains("a key with 0 bytes"));
        assert!(refused(vec![(String::new(), 0)], vec![]).contains("a key with 0 bytes"));
        assert!(refused(vec![], vec![put(&"k".repeat(1025), 1)]).contains("a key with 1025 bytes"));
        assert!(refused(vec![], vec![put("a\0", 1)]).contains("control character"));
        let twice = vec![put("a", 1), Write::Delete { key: "a".into() }];
        assert_eq!(refused(vec![], twice), "key \"a\" is in the transaction twice");
        assert!(Txn { expect: vec![("a".into(), 0)], writes: vec![put("a", 1)] }.check().is_ok());
    }
}
