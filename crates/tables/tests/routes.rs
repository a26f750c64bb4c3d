//! Route files: what is written can be read, damage is reported with its offset, a file is applied whole or not at all.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use bifrost_tables::{
    ApplyError, FileErrorKind as Kind, FileKind, FileWriter, IpNet, Record, RouteFile, RoutePrefix, RouteSet, TableId,
};
use proptest::prelude::*;

fn record(vni: u32, net: &str, value: Option<u32>) -> Record {
    let net: IpNet = net.parse().unwrap();
    let v6 = matches!(net, IpNet::V6(_));
    Record { table: TableId { vni, v6 }, prefix: RoutePrefix::of(net), value }
}

fn file(kind: FileKind, generation: u64, records: &[Record]) -> Vec<u8> {
    let mut writer = FileWriter::new(kind, generation);
    records.iter().for_each(|r| writer.push(*r).unwrap());
    writer.finish()
}

fn read(bytes: &[u8]) -> Result<Vec<Record>, (u64, Kind)> {
    let records = RouteFile::new(bytes).and_then(|f| f.records().collect::<Result<Vec<_>, _>>());
    records.map_err(|e| (e.offset, e.kind))
}

fn sample() -> Vec<Record> {
    vec![
        record(1, "10.0.0.0/8", Some(1)),
        record(1, "10.0.0.0/16", Some(2)),
        record(1, "10.1.0.0/16", Some(0)),
        record(1, "fd00::/8", Some(3)),
        record(7, "0.0.0.0/0", Some(4)),
        record(TableId::INTERNET, "192.0.2.0/24", Some(u32::MAX - 1)),
        record(TableId::INTERNET, "2001:db8::1/128", Some(6)),
    ]
}

/// The file of docs/ROUTES-FILE.md, section 4.
#[test]
fn the_test_vector() {
    let text = include_str!("../../../docs/vectors/routes-file.hex");
    let digits: Vec<u32> =
        text.lines().filter(|l| !l.starts_with('#')).flat_map(str::chars).filter_map(|c| c.to_digit(16)).collect();
    let bytes: Vec<u8> = digits.chunks(2).map(|p| (p[0] << 4 | p[1]) as u8).collect();
    let records =
        [record(100, "10.0.0.0/8", Some(7)), record(100, "10.1.0.0/16", None), record(100, "2001:db8::/32", Some(9))];
    assert_eq!(file(FileKind::Delta { base: 41 }, 42, &records), bytes);
    assert_eq!(read(&bytes).unwrap(), records);
}

#[test]
fn a_written_file_is_read_back() {
    let bytes = file(FileKind::Full, 9, &sample());
    let parsed = RouteFile::new(&bytes).unwrap();
    assert_eq!((parsed.kind(), parsed.generation(), parsed.promised()), (FileKind::Full, 9, 7));
    assert_eq!(read(&bytes).unwrap(), sample());
    assert_eq!(read(&file(FileKind::Full, 0, &[])).unwrap(), []);
}

#[test]
fn more_records_than_fit_a_block() {
    let records: Vec<Record> = (0..140_000u32)
        .map(|n| Record {
            table: TableId { vni: 5, v6: false },
            prefix: RoutePrefix { addr: u128::from(n << 8), len: 24 },
            value: Some(n),
        })
        .collect();
    let bytes = file(FileKind::Full, 1, &records);
    assert_eq!(bytes.len(), 48 + 3 * 16 + 140_000 * 9);
    assert_eq!(read(&bytes).unwrap(), records);
    let mut set = RouteSet::new();
    assert_eq!(set.apply(&RouteFile::new(&bytes).unwrap()).unwrap(), [TableId { vni: 5, v6: false }]);
    assert_eq!(set.len(), 140_000);
    let lpm = set.lpm(5);
    assert_eq!(lpm.lookup([0, 7, 9, 200].into()), Some(&(7 << 8 | 9)));
    assert_eq!(lpm.lookup([255, 7, 9, 200].into()), None);
}

/// Writes `bytes` at an offset and corrects the checksums.
fn forged(at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut file = file(FileKind::Full, 9, &sample());
    file[at..at + bytes.len()].copy_from_slice(bytes);
    let sum = crc32fast::hash(&file[..40]);
    file[40..44].copy_from_slice(&sum.to_le_bytes());
    // The first block: three records.
    let sum = crc32fast::hash(&[&file[48..60], &file[64..91]].concat());
    file[60..64].copy_from_slice(&sum.to_le_bytes());
    file
}

#[test]
fn errors_say_where() {
    let right = file(FileKind::Full, 9, &sample());
    assert_eq!(forged(0, b"BF"), right);
    let longer = [&right[..], &[0]].concat();
    let cases: Vec<(&str, Vec<u8>, u64, Kind)> = vec![
        ("empty", vec![], 0, Kind::Magic),
        ("text", b"[[route]]".to_vec(), 0, Kind::Magic),
        ("half a header", right[..40].to_vec(), 40, Kind::Truncated),
        ("version", forged(8, &[2]), 8, Kind::Version(2)),
        ("kind", forged(10, &[2]), 10, Kind::Kind(2)),
        ("reserved", forged(13, &[1]), 13, Kind::NotZero),
        ("a base in a full file", forged(24, &[1]), 24, Kind::NotZero),
        ("more promised", forged(32, &[8]), right.len() as u64, Kind::Records { expected: 8, found: 7 }),
        ("fewer promised", forged(32, &[6]), right.len() as u64 - 37, Kind::Trailing),
        ("VNI of 25 bits", forged(48, &[0, 0, 0, 1]), 48, Kind::Vni(1 << 24)),
        ("family", forged(52, &[5]), 52, Kind::Family(5)),
        ("reserved in a block", forged(54, &[1]), 54, Kind::NotZero),
        ("no records", forged(56, &[0]), 56, Kind::BlockRecords(0)),
        ("too many records", forged(56, &[0, 0, 0, 255]), 56, Kind::BlockRecords(0xff00_0000)),
        ("/33", forged(68, &[33]), 68, Kind::PrefixLen(33)),
        ("host bits", forged(67, &[1]), 64, Kind::HostBits),
        ("out of order", forged(64, &[11]), 73, Kind::Order),
        ("twice", forged(77, &[8]), 73, Kind::Order),
        ("withdrawal", forged(69, &[255; 4]), 69, Kind::Withdrawal),
        ("something behind", longer, right.len() as u64, Kind::Trailing),
    ];
    for (name, bytes, offset, kind) in cases {
        assert_eq!(read(&bytes).unwrap_err(), (offset, kind), "{name}");
    }
    let mut damaged = right.clone();
    damaged[70] ^= 4;
    assert!(matches!(read(&damaged).unwrap_err(), (60, Kind::Checksum { .. })));
    let error = RouteFile::new(&damaged).unwrap().records().next().unwrap().unwrap_err();
    assert!(error.to_string().starts_with("route file, byte 60: the checksum is 0x"), "{error}");
    for len in 0..right.len() {
        assert!(read(&right[..len]).is_err(), "{len} bytes");
    }
}

#[test]
fn writers_refuse_what_readers_refuse() {
    let refused = |records: &[Record]| {
        let mut writer = FileWriter::new(FileKind::Full, 1);
        let results: Vec<_> = records.iter().map(|r| writer.push(*r)).collect();
        assert_eq!(read(&writer.finish()).unwrap().len(), records.len() - 1, "the rest is valid");
        results.last().unwrap().unwrap_err().kind
    };
    let a = record(1, "10.0.0.0/8", Some(1));
    assert_eq!(refused(&[a, a]), Kind::Order);
    assert_eq!(refused(&[record(2, "10.0.0.0/8", Some(1)), a]), Kind::Order);
    assert_eq!(refused(&[record(1, "10.0.0.0/8", None)]), Kind::Withdrawal);
    assert_eq!(refused(&[record(1, "10.0.0.0/8", Some(u32::MAX))]), Kind::Withdrawal);
    assert_eq!(refused(&[record(1 << 24, "10.0.0.0/8", Some(1))]), Kind::Vni(1 << 24));
    assert_eq!(refused(&[Record { prefix: RoutePrefix { addr: 1, len: 8 }, ..a }]), Kind::HostBits);
    assert_eq!(refused(&[Record { prefix: RoutePrefix { addr: 1 << 32, len: 32 }, ..a }]), Kind::HostBits);
    assert_eq!(refused(&[Record { prefix: RoutePrefix { addr: 0, len: 33 }, ..a }]), Kind::PrefixLen(33));
}

#[test]
fn a_delta_is_applied_as_a_whole_or_not_at_all() {
    let mut set = RouteSet::new();
    set.apply(&RouteFile::new(&file(FileKind::Full, 9, &sample())).unwrap()).unwrap();
    let before = set.clone();
    let apply = |set: &mut RouteSet, base, records: &[Record]| {
        let bytes = file(FileKind::Delta { base }, base + 1, records);
        set.apply(&RouteFile::new(&bytes).unwrap())
    };
    let gone = record(7, "0.0.0.0/0", None);
    let error = apply(&mut set, 8, &[gone]).unwrap_err();
    assert_eq!(error, ApplyError::Base { base: 8, generation: 9 });
    let error = apply(&mut set, 9, &[gone, record(TableId::INTERNET, "192.0.3.0/24", None)]).unwrap_err();
    assert_eq!(error.to_string(), "route file, byte 98: withdraws a prefix that does not exist");
    assert_eq!(set, before);
    let changes = [record(1, "10.0.0.0/16", Some(20)), record(1, "10.2.0.0/16", Some(21)), gone];
    let changed = apply(&mut set, 9, &changes).unwrap();
    assert_eq!(changed, [TableId { vni: 1, v6: false }, TableId { vni: 7, v6: false }]);
    assert_eq!((set.generation(), set.len(), set.tables().count()), (10, 7, 4));
    let lpm = set.lpm(1);
    let found = |addr: &str| lpm.lookup(addr.parse().unwrap()).copied();
    assert_eq!(["10.0.9.9", "10.1.0.1", "10.2.0.1", "10.3.0.1", "fd00::1"].map(found), [20, 0, 21, 1, 3].map(Some));
}

fn arbitrary_record() -> impl Strategy<Value = (TableId, RoutePrefix, Option<u32>)> {
    (0u32..3, any::<bool>(), 0u32..16, 0u8..=8, prop::option::weighted(0.7, 0u32..100)).prop_map(
        |(vni, v6, bits, len, value)| {
            let bits = u128::from(bits) << 4;
            let mask = (0xff00u128 >> len) & 0xff;
            let addr = (bits & mask) << if v6 { 120 } else { 24 };
            (TableId { vni, v6 }, RoutePrefix { addr, len }, value)
        },
    )
}

type Changes = Vec<(TableId, RoutePrefix, Option<u32>)>;

proptest! {
    #[test]
    fn deltas_add_up(deltas in prop::collection::vec(prop::collection::vec(arbitrary_record(), 0..12), 1..8)) {
        let mut set = RouteSet::new();
        let mut oracle: BTreeMap<(TableId, RoutePrefix), u32> = BTreeMap::new();
        for (base, delta) in deltas.into_iter().enumerate() {
            let changes: BTreeMap<_, _> = delta.into_iter().map(|(t, p, v)| ((t, p), v)).collect();
            let records: Changes = changes.into_iter().map(|((t, p), v)| (t, p, v)).collect();
            let records: Vec<Record> = records.into_iter().map(|(table, prefix, value)| Record { table, prefix, value }).collect();
            let bytes = file(FileKind::Delta { base: set.generation() }, base as u64 + 1, &records);
            let before = set.clone();
            let result = set.apply(&RouteFile::new(&bytes).unwrap());
            let missing = records.iter().any(|r| r.value.is_none() && !oracle.contains_key(&(r.table, r.prefix)));
            prop_assert_eq!(result.is_err(), missing);
            if missing {
                prop_assert_eq!(&set, &before);
                continue;
            }
            for r in records {
                match r.value {
                    Some(value) => oracle.insert((r.table, r.prefix), value),
                    None => oracle.remove(&(r.table, r.prefix)),
                };
            }
            let all: Vec<_> = set.tables().flat_map(|t| set.routes(t).map(move |(p, v)| ((t, p), v))).collect();
            prop_assert_eq!(all, oracle.clone().into_iter().collect::<Vec<_>>());
        }
    }

    #[test]
    fn damage_is_noticed(at in 0usize..2000, bit in 0u8..8) {
        let mut bytes = file(FileKind::Full, 9, &sample());
        let at = at % bytes.len();
        bytes[at] ^= 1 << bit;
        prop_assert!(read(&bytes).is_err(), "byte {}", at);
    }

    #[test]
    fn any_bytes_are_an_error_or_records(bytes in prop::collection::vec(any::<u8>(), 0..200), head: bool) {
        let mut bytes = bytes;
        if head {
            let mut right = file(FileKind::Full, 9, &[]);
            right.extend(bytes);
            bytes = right;
        }
        let _ = read(&bytes);
    }
}

/// Ten million routes in a file, and a delta of ten thousand changes: seconds and half a gigabyte, in a release build.
#[test]
#[ignore = "slow: make prove"]
fn ten_million_routes_load_and_change() {
    const ROUTES: u32 = 10_000_000;
    const CHANGED: usize = 1000;
    let table = TableId { vni: 1, v6: false };
    // One in each /30.
    let record = |number: u32, value| {
        let prefix = RoutePrefix { addr: u128::from(number * 4), len: 31 };
        Record { table, prefix, value }
    };
    let seconds = |began: std::time::Instant| began.elapsed().as_secs_f64();
    let mut writer = FileWriter::new(FileKind::Full, 7);
    (0..ROUTES).for_each(|number| writer.push(record(number, Some(number % 1000))).unwrap());
    let bytes = writer.finish();
    let mut set = RouteSet::new();
    let began = std::time::Instant::now();
    assert_eq!(set.apply(&RouteFile::new(&bytes).unwrap()).unwrap(), [table]);
    let loaded_s = seconds(began);
    assert_eq!((set.len(), set.generation()), (ROUTES as usize, 7));
    // In turn: another value, a withdrawal, and a new route behind the others.
    let changes = (0..ROUTES).step_by(CHANGED).map(|number| match number as usize / CHANGED % 2 {
        0 => record(number, Some(1_000_000)),
        _ => record(number, None),
    });
    let new = (ROUTES..ROUTES + 100).map(|number| record(number, Some(2_000_000)));
    let mut writer = FileWriter::new(FileKind::Delta { base: 7 }, 8);
    changes.chain(new).for_each(|record| writer.push(record).unwrap());
    let delta = writer.finish();
    let began = std::time::Instant::now();
    assert_eq!(set.apply(&RouteFile::new(&delta).unwrap()).unwrap(), [table]);
    let changed_s = seconds(began);
    assert_eq!((set.len(), set.generation()), (ROUTES as usize - 5000 + 100, 8));
    let began = std::time::Instant::now();
    let lpm = set.lpm(1);
    let built_s = seconds(began);
    eprintln!(
        "{} bytes: loaded in {loaded_s:.2} s; a delta of {} bytes: applied in {changed_s:.2} s; look-up table built in {built_s:.2} s",
        bytes.len(),
        delta.len()
    );
    let value = |number: u32| lpm.lookup(std::net::Ipv4Addr::from_bits(number * 4 + 1).into()).copied();
    assert_eq!([0, 1, 1000, 2000, 2001].map(value), [Some(1_000_000), Some(1), None, Some(1_000_000), Some(1)]);
    assert_eq!(
        [ROUTES - 1, ROUTES, ROUTES + 99, ROUTES + 100].map(value),
        [Some((ROUTES - 1) % 1000), Some(2_000_000), Some(2_000_000), None]
    );
}
