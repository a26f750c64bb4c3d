//! The format of route files: docs/ROUTES-FILE.md.

use std::net::IpAddr;

use ipnet::IpNet;
use thiserror::Error;

const MAGIC: [u8; 8] = *b"BFROUTES";
const VERSION: u16 = 1;
const HEADER_LEN: usize = 48;
/// Bytes of the header that its checksum covers.
const HEADER_SUMMED: usize = 40;
const BLOCK_HEADER_LEN: usize = 16;
const BLOCK_SUMMED: usize = 12;
/// Maximum number of records in a block (§2.2).
const BLOCK_RECORDS_MAX: usize = 65_536;
/// In a delta: the prefix is withdrawn.
const WITHDRAWN: u32 = u32::MAX;

/// Maximum value of a route (§2.3).
pub const ROUTE_VALUE_MAX: u32 = u32::MAX - 1;

/// Whether a file is a whole table or a delta.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// All routes.
    Full,
    /// The changes to the table of that generation.
    Delta {
        /// See [`RouteFile::generation`].
        base: u64,
    },
}

/// A table of routes: one family of one network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TableId {
    /// The network's VNI, or [`TableId::INTERNET`].
    pub vni: u32,
    /// IPv6, or IPv4.
    pub v6: bool,
}

impl TableId {
    /// Stands for the Internet instead of a VNI.
    pub const INTERNET: u32 = u32::MAX;
}

/// A prefix of a table; the family is the table's. Ordered by address, then length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RoutePrefix {
    /// The first address; IPv4 addresses in the last 32 bits.
    pub addr: u128,
    /// Its length.
    pub len: u8,
}

impl RoutePrefix {
    /// The prefix of a network, without host bits.
    pub fn of(net: IpNet) -> Self {
        let addr = match net.network() {
            IpAddr::V4(addr) => u128::from(addr.to_bits()),
            IpAddr::V6(addr) => addr.to_bits(),
        };
        RoutePrefix { addr, len: net.prefix_len() }
    }
}

/// A record: a route, or its withdrawal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// The table.
    pub table: TableId,
    /// The prefix.
    pub prefix: RoutePrefix,
    /// Its value, at most [`ROUTE_VALUE_MAX`]; `None`: withdrawn.
    pub value: Option<u32>,
}

/// An error in a file, and its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("route file, byte {offset}: {kind}")]
pub struct FileError {
    /// Offset from the start of the file, bytes.
    pub offset: u64,
    /// The error.
    pub kind: FileErrorKind,
}

/// Errors in a file (§3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum FileErrorKind {
    /// The file is truncated.
    #[error("the file is truncated here")]
    Truncated,
    /// The magic number does not match.
    #[error("not a route file")]
    Magic,
    /// An unknown version.
    #[error("version {0} is not supported, only version 1")]
    Version(u16),
    /// Neither full nor delta.
    #[error("unknown kind {0}")]
    Kind(u8),
    /// A reserved field is not zero, or a full file names a base.
    #[error("a field that must be zero is not")]
    NotZero,
    /// The data is damaged.
    #[error("the checksum is {found:#010x}, and should be {expected:#010x}")]
    Checksum {
        /// Checksum of the bytes.
        expected: u32,
        /// Checksum in the file.
        found: u32,
    },
    /// Not 4 or 6.
    #[error("unknown address family {0}")]
    Family(u8),
    /// A VNI has 24 bits.
    #[error("{0:#x} is not a VNI")]
    Vni(u32),
    /// A block has 1 to 65,536 records.
    #[error("a block of {0} records")]
    BlockRecords(u32),
    /// More bits than the family's addresses have.
    #[error("a prefix of {0} bits")]
    PrefixLen(u8),
    /// Bits behind the prefix are set.
    #[error("a prefix with host bits")]
    HostBits,
    /// Duplicate, or out of order.
    #[error("out of order or duplicate")]
    Order,
    /// A full file must not have withdrawals.
    #[error("a withdrawal in a full file")]
    Withdrawal,
    /// The header announces another number of records.
    #[error("{found} records, and the header says {expected}")]
    Records {
        /// Number in the header.
        expected: u64,
        /// Number found.
        found: u64,
    },
    /// There are bytes behind the last block.
    #[error("bytes follow the last record")]
    Trailing,
}

/// A file with a valid header. The records are checked while they are [read](Self::records).
#[derive(Clone, Copy, Debug)]
pub struct RouteFile<'a> {
    bytes: &'a [u8],
    kind: FileKind,
    generation: u64,
    records: u64,
}

fn le<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|i| bytes[at + i])
}

impl<'a> RouteFile<'a> {
    /// Parses the header (§2.1).
    ///
    /// # Errors
    /// It is not a header of version 1.
    pub fn new(bytes: &'a [u8]) -> Result<Self, FileError> {
        let error = |offset, kind| Err(FileError { offset, kind });
        if !bytes.starts_with(&MAGIC) {
            return error(0, FileErrorKind::Magic);
        }
        if bytes.len() < HEADER_LEN {
            return error(bytes.len() as u64, FileErrorKind::Truncated);
        }
        let version = u16::from_le_bytes(le(bytes, 8));
        if version != VERSION {
            return error(8, FileErrorKind::Version(version));
        }
        let (expected, found) = (crc32fast::hash(&bytes[..HEADER_SUMMED]), u32::from_le_bytes(le(bytes, 40)));
        if expected != found {
            return error(40, FileErrorKind::Checksum { expected, found });
        }
        if let Some(at) = (11..16).chain(44..48).find(|at| bytes[*at] != 0) {
            return error(at as u64, FileErrorKind::NotZero);
        }
        let base = u64::from_le_bytes(le(bytes, 24));
        let kind = match bytes[10] {
            0 if base != 0 => return error(24, FileErrorKind::NotZero),
            0 => FileKind::Full,
            1 => FileKind::Delta { base },
            kind => return error(10, FileErrorKind::Kind(kind)),
        };
        let [generation, records] = [16, 32].map(|at| u64::from_le_bytes(le(bytes, at)));
        Ok(RouteFile { bytes, kind, generation, records })
    }

    /// Full or delta.
    pub fn kind(&self) -> FileKind {
        self.kind
    }

    /// Generation of the resulting table.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Number of records that the header announces: only a claim, until [`records`](Self::records) ends. It ends with
    /// an error if there are more or fewer.
    pub fn promised(&self) -> u64 {
        self.records
    }

    /// All records in order, or the first error.
    pub fn records(&self) -> RouteRecords<'a> {
        RouteRecords { file: *self, at: HEADER_LEN, table: None, left: 0, last: None, found: 0, done: false }
    }
}

/// The records of a [`RouteFile`]. Ends after the first error.
#[derive(Clone, Debug)]
pub struct RouteRecords<'a> {
    file: RouteFile<'a>,
    at: usize,
    table: Option<TableId>,
    /// Records left in this block.
    left: u32,
    /// The previous prefix of this table.
    last: Option<RoutePrefix>,
    found: u64,
    done: bool,
}

impl RouteRecords<'_> {
    /// Position of the next byte; after an error, the position of the error.
    pub fn offset(&self) -> u64 {
        self.at as u64
    }

    fn error<T>(&self, beyond: usize, kind: FileErrorKind) -> Result<T, FileError> {
        Err(FileError { offset: (self.at + beyond) as u64, kind })
    }

    /// Reads and checks the header of a block, and the checksum of the whole block.
    fn block(&mut self) -> Result<(), FileError> {
        let rest = &self.file.bytes[self.at..];
        let end = rest.len();
        if end < BLOCK_HEADER_LEN {
            return self.error(end, FileErrorKind::Truncated);
        }
        let vni = u32::from_le_bytes(le(rest, 0));
        if vni >= 1 << 24 && vni != TableId::INTERNET {
            return self.error(0, FileErrorKind::Vni(vni));
        }
        let v6 = match rest[4] {
            4 => false,
            6 => true,
            family => return self.error(4, FileErrorKind::Family(family)),
        };
        if let Some(at) = (5..8).find(|at| rest[*at] != 0) {
            return self.error(at, FileErrorKind::NotZero);
        }
        let count = u32::from_le_bytes(le(rest, 8));
        if count == 0 || count as usize > BLOCK_RECORDS_MAX {
            return self.error(8, FileErrorKind::BlockRecords(count));
        }
        let records = count as usize * record_len(v6);
        let Some(body) = rest[BLOCK_HEADER_LEN..].get(..records) else {
            return self.error(end, FileErrorKind::Truncated);
        };
        let mut sum = crc32fast::Hasher::new();
        sum.update(&rest[..BLOCK_SUMMED]);
        sum.update(body);
        let (expected, found) = (sum.finalize(), u32::from_le_bytes(le(rest, 12)));
        if expected != found {
            return self.error(12, FileErrorKind::Checksum { expected, found });
        }
        let table = TableId { vni, v6 };
        match self.table {
            Some(last) if table < last => return self.error(0, FileErrorKind::Order),
            Some(last) if table == last => {}
            _ => self.last = None,
        }
        self.table = Some(table);
        self.at += BLOCK_HEADER_LEN;
        self.left = count;
        Ok(())
    }

    fn record(&mut self, table: TableId) -> Result<Record, FileError> {
        // The block is complete.
        let bytes = &self.file.bytes[self.at..][..record_len(table.v6)];
        let (addr, bits, rest) = if table.v6 {
            (u128::from_be_bytes(le(bytes, 0)), 128, 16)
        } else {
            (u128::from(u32::from_be_bytes(le(bytes, 0))), 32, 4)
        };
        let len = bytes[rest];
        if len > bits {
            return self.error(rest, FileErrorKind::PrefixLen(len));
        }
        if u32::from(bits - len) > addr.trailing_zeros() {
            return self.error(0, FileErrorKind::HostBits);
        }
        let prefix = RoutePrefix { addr, len };
        if self.last.is_some_and(|last| prefix <= last) {
            return self.error(0, FileErrorKind::Order);
        }
        let value = u32::from_le_bytes(le(bytes, rest + 1));
        let value = (value != WITHDRAWN).then_some(value);
        if value.is_none() && self.file.kind == FileKind::Full {
            return self.error(rest + 1, FileErrorKind::Withdrawal);
        }
        self.last = Some(prefix);
        self.at += bytes.len();
        self.left -= 1;
        self.found += 1;
        Ok(Record { table, prefix, value })
    }

    fn step(&mut self) -> Result<Option<Record>, FileError> {
        if self.left == 0 {
            let expected = self.file.records;
            match (self.at == self.file.bytes.len(), self.found == expected) {
                (true, true) => return Ok(None),
                (true, false) => {
                    return self.error(0, FileErrorKind::Records { expected, found: self.found });
                }
                (false, true) => return self.error(0, FileErrorKind::Trailing),
                (false, false) => self.block()?,
            }
        }
        match self.table {
            Some(table) => self.record(table).map(Some),
            None => Ok(None),
        }
    }
}

impl Iterator for RouteRecords<'_> {
    type Item = Result<Record, FileError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.done {
            return None;
        }
        let next = self.step().transpose();
        self.done = !matches!(next, Some(Ok(_)));
        next
    }
}

fn record_len(v6: bool) -> usize {
    if v6 { 16 + 5 } else { 4 + 5 }
}

/// Writes a file to memory.
#[derive(Clone, Debug)]
pub struct FileWriter {
    bytes: Vec<u8>,
    records: u64,
    /// The current block: its table and its start.
    block: Option<(TableId, usize)>,
    in_block: usize,
    last: Option<Record>,
}

impl FileWriter {
    /// Starts a file. `generation` is that of the resulting table.
    pub fn new(kind: FileKind, generation: u64) -> Self {
        let (kind, base) = match kind {
            FileKind::Full => (0, 0),
            FileKind::Delta { base } => (1, base),
        };
        let mut bytes = Vec::with_capacity(HEADER_LEN);
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&[kind, 0, 0, 0, 0, 0]);
        bytes.extend_from_slice(&generation.to_le_bytes());
        bytes.extend_from_slice(&base.to_le_bytes());
        bytes.resize(HEADER_LEN, 0);
        FileWriter { bytes, records: 0, block: None, in_block: 0, last: None }
    }

    /// Adds a record.
    ///
    /// # Errors
    /// It is out of order, or a reader would refuse it; the offset is where it would have been written.
    pub fn push(&mut self, record: Record) -> Result<(), FileError> {
        let error = |kind| Err(FileError { offset: self.bytes.len() as u64, kind });
        let Record { table, prefix: RoutePrefix { addr, len }, value } = record;
        let bits = if table.v6 { 128 } else { 32 };
        if table.vni >= 1 << 24 && table.vni != TableId::INTERNET {
            return error(FileErrorKind::Vni(table.vni));
        }
        if len > bits {
            return error(FileErrorKind::PrefixLen(len));
        }
        if u32::from(bits - len) > addr.trailing_zeros() || (!table.v6 && addr > u128::from(u32::MAX)) {
            return error(FileErrorKind::HostBits);
        }
        if self.last.is_some_and(|last| (table, record.prefix) <= (last.table, last.prefix)) {
            return error(FileErrorKind::Order);
        }
        let full = self.bytes[10] == 0;
        if value == Some(WITHDRAWN) || (full && value.is_none()) {
            return error(FileErrorKind::Withdrawal);
        }
        if self.block.is_none_or(|(open, _)| open != table) || self.in_block == BLOCK_RECORDS_MAX {
            self.close();
            self.block = Some((table, self.bytes.len()));
            self.bytes.extend_from_slice(&table.vni.to_le_bytes());
            self.bytes.extend_from_slice(&[if table.v6 { 6 } else { 4 }, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        }
        if table.v6 {
            self.bytes.extend_from_slice(&addr.to_be_bytes());
        } else {
            self.bytes.extend_from_slice(&(addr as u32).to_be_bytes());
        }
        self.bytes.push(len);
        self.bytes.extend_from_slice(&value.unwrap_or(WITHDRAWN).to_le_bytes());
        self.in_block += 1;
        self.records += 1;
        self.last = Some(record);
        Ok(())
    }

    /// The finished file.
    pub fn finish(mut self) -> Vec<u8> {
        self.close();
        self.bytes[32..40].copy_from_slice(&self.records.to_le_bytes());
        let sum = crc32fast::hash(&self.bytes[..HEADER_SUMMED]);
        self.bytes[40..44].copy_from_slice(&sum.to_le_bytes());
        self.bytes
    }

    fn close(&mut self) {
        if let Some((_, at)) = self.block.take() {
            let block = &mut self.bytes[at..];
            block[8..12].copy_from_slice(&(self.in_block as u32).to_le_bytes());
            let mut sum = crc32fast::Hasher::new();
            sum.update(&block[..BLOCK_SUMMED]);
            sum.update(&block[BLOCK_HEADER_LEN..]);
            block[12..16].copy_from_slice(&sum.finalize().to_le_bytes());
            self.in_block = 0;
        }
    }
}
