//! Route files, damaged, forged or valid, applied to a set of routes.

use std::collections::BTreeMap;

use bifrost_tables::{ApplyError, FileKind, FileWriter, Record, RouteFile, RoutePrefix, RouteSet, TableId};

use crate::Input;

/// A file that a writer would produce, from the records that it accepts.
fn written(input: &mut Input<'_>, base: u64) -> Vec<u8> {
    let delta = input.chance(128);
    let kind = if delta { FileKind::Delta { base } } else { FileKind::Full };
    let mut writer = FileWriter::new(kind, base.wrapping_add(1));
    let mut records = BTreeMap::new();
    for _ in 0..input.below(24) {
        let table = TableId { vni: input.pick(&[0, 1, 77, (1 << 24) - 1, TableId::INTERNET]), v6: input.chance(80) };
        let bits = if table.v6 { 128 } else { 32 };
        let len = input.u8() % (bits + 1);
        let high = u128::from(input.u8()) << (bits - 8);
        let addr = if len == 0 { 0 } else { high & (u128::MAX << (bits - len)) };
        let value = if input.chance(60) { None } else { Some(u32::from(input.u8())) };
        records.insert((table, RoutePrefix { addr, len }), value);
    }
    for ((table, prefix), value) in records {
        let record = Record { table, prefix, value };
        assert_eq!(writer.push(record).is_err(), value.is_none() && !delta, "{record:?}");
    }
    writer.finish()
}

/// Applies a file. A refused one changes nothing and reports the position; an accepted one is in order, and can be
/// written again.
fn apply(set: &mut RouteSet, bytes: &[u8]) -> bool {
    let before = set.clone();
    let file = match RouteFile::new(bytes) {
        Ok(file) => file,
        Err(error) => {
            assert!(error.offset <= bytes.len() as u64, "{error}");
            return false;
        }
    };
    match set.apply(&file) {
        Err(error) => {
            if let ApplyError::File(error) = error {
                assert!(error.offset <= bytes.len() as u64, "{error}");
            }
            assert!(*set == before, "a refused file has changed something: {error}");
            false
        }
        Ok(changed) => {
            assert_eq!(set.generation(), file.generation());
            assert!(changed.is_sorted());
            let mut again = FileWriter::new(FileKind::Full, set.generation());
            for table in set.tables().collect::<Vec<_>>() {
                for (prefix, value) in set.routes(table) {
                    let record = Record { table, prefix, value: Some(value) };
                    again.push(record).unwrap_or_else(|e| panic!("{record:?}: {e}"));
                }
            }
            let again = again.finish();
            let mut copy = RouteSet::new();
            let applied = RouteFile::new(&again).is_ok_and(|file| copy.apply(&file).is_ok());
            assert!(applied && copy == *set, "applied routes cannot be written and read again");
            true
        }
    }
}

pub(crate) fn run(bytes: &[u8]) {
    let mut set = RouteSet::new();
    // As a file, unchanged.
    apply(&mut set, bytes);
    let mut set = RouteSet::new();
    let mut input = Input::new(bytes);
    for _ in 0..8 {
        let base = set.generation();
        let mut file = written(&mut input, base);
        match input.below(6) {
            0 => file.truncate(usize::from(input.u16()) % (file.len() + 1)),
            1 => {
                let at = usize::from(input.u16()) % file.len();
                let bit = 1 << input.below(8);
                file[at] ^= bit;
                assert!(!apply(&mut set, &file), "the damage of byte {at} is not detected");
                continue;
            }
            2 => file.extend_from_slice(input.bytes(20)),
            _ => {}
        }
        apply(&mut set, &file);
    }
    // Whatever was applied before, a valid file is accepted.
    let mut writer = FileWriter::new(FileKind::Full, 1);
    let record = Record {
        table: TableId { vni: 5, v6: false },
        prefix: RoutePrefix { addr: 0x0a00_0000, len: 8 },
        value: Some(7),
    };
    writer.push(record).unwrap_or_else(|e| panic!("{e}"));
    assert!(apply(&mut set, &writer.finish()));
    assert_eq!(set.lpm(5).lookup([10, 1, 2, 3].into()), Some(&7));
}
