//! All routes of a gateway, sorted: files are applied to this set, and lookup tables are built from it.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use thiserror::Error;

use super::file::{FileError, FileKind, RouteFile, RoutePrefix, TableId};
use crate::Lpm;

/// Why a file was not applied. The set is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ApplyError {
    /// The file is damaged or invalid.
    #[error(transparent)]
    File(#[from] FileError),
    /// A delta for another generation.
    #[error("the file changes generation {base}, and this is generation {generation}")]
    Base {
        /// Generation that the file needs.
        base: u64,
        /// Generation of the set.
        generation: u64,
    },
    /// A delta withdraws a prefix that does not exist.
    #[error("route file, byte {offset}: withdraws a prefix that does not exist")]
    NotThere {
        /// Offset of the record's end.
        offset: u64,
    },
}

/// Routes of one table, ascending, in as little memory as an array takes: 12 bytes (IPv4), 32 (IPv6).
#[derive(Clone, Debug, PartialEq, Eq)]
enum Table {
    V4(Vec<(u32, u8, u32)>),
    V6(Vec<(u128, u8, u32)>),
}

impl Table {
    fn new(v6: bool) -> Self {
        if v6 { Table::V6(Vec::new()) } else { Table::V4(Vec::new()) }
    }

    fn len(&self) -> usize {
        match self {
            Table::V4(routes) => routes.len(),
            Table::V6(routes) => routes.len(),
        }
    }

    fn get(&self, at: usize) -> Option<(RoutePrefix, u32)> {
        match self {
            Table::V4(routes) => {
                routes.get(at).map(|&(addr, len, value)| (RoutePrefix { addr: addr.into(), len }, value))
            }
            Table::V6(routes) => routes.get(at).map(|&(addr, len, value)| (RoutePrefix { addr, len }, value)),
        }
    }

    fn push(&mut self, prefix: RoutePrefix, value: u32) {
        match self {
            Table::V4(routes) => routes.push((prefix.addr as u32, prefix.len, value)),
            Table::V6(routes) => routes.push((prefix.addr, prefix.len, value)),
        }
    }

    fn shrink(&mut self) {
        match self {
            Table::V4(routes) => routes.shrink_to_fit(),
            Table::V6(routes) => routes.shrink_to_fit(),
        }
    }

    fn iter(&self) -> impl Iterator<Item = (RoutePrefix, u32)> {
        (0..self.len()).filter_map(|at| self.get(at))
    }
}

/// Routes by table, and their generation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RouteSet {
    tables: BTreeMap<TableId, Table>,
    generation: u64,
}

impl RouteSet {
    /// Generation 0, without routes.
    pub fn new() -> Self {
        Self::default()
    }

    /// The generation of the file that was applied last.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Number of routes.
    pub fn len(&self) -> usize {
        self.tables.values().map(Table::len).sum()
    }

    /// Whether there are no routes.
    pub fn is_empty(&self) -> bool {
        self.tables.is_empty()
    }

    /// The routes of a table, ascending.
    pub fn routes(&self, table: TableId) -> impl Iterator<Item = (RoutePrefix, u32)> {
        self.tables.get(&table).into_iter().flat_map(Table::iter)
    }

    /// All tables with routes.
    pub fn tables(&self) -> impl Iterator<Item = TableId> {
        self.tables.keys().copied()
    }

    /// A network's routes, both families, as a lookup table.
    pub fn lpm(&self, vni: u32) -> Lpm<u32> {
        let net = |v6, RoutePrefix { addr, len }: RoutePrefix| {
            let addr = if v6 { Ipv6Addr::from_bits(addr).into() } else { Ipv4Addr::from_bits(addr as u32).into() };
            IpNet::new(addr, len).ok()
        };
        let family = |v6| self.routes(TableId { vni, v6 }).filter_map(move |(p, value)| Some((net(v6, p)?, value)));
        // Prefixes are unique.
        Lpm::new(family(false).chain(family(true))).unwrap_or_default()
    }

    /// Applies a whole file, or nothing. Returns the changed tables.
    ///
    /// A delta copies only the tables that it names. The time is proportional to the file and those tables.
    ///
    /// # Errors
    /// The file is invalid, or does not apply to this set. The set is unchanged.
    pub fn apply(&mut self, file: &RouteFile<'_>) -> Result<Vec<TableId>, ApplyError> {
        let changed = match file.kind() {
            FileKind::Full => {
                let tables = self.merged(file, &BTreeMap::new())?;
                let mut changed: Vec<TableId> = tables.keys().chain(self.tables.keys()).copied().collect();
                changed.sort_unstable();
                changed.dedup();
                changed.retain(|id| tables.get(id) != self.tables.get(id));
                self.tables = tables;
                changed
            }
            FileKind::Delta { base } if base != self.generation => {
                return Err(ApplyError::Base { base, generation: self.generation });
            }
            FileKind::Delta { .. } => {
                let tables = self.merged(file, &self.tables)?;
                let changed = tables.keys().copied().collect();
                self.tables.extend(tables);
                changed
            }
        };
        self.tables.retain(|_, table| table.len() > 0);
        self.generation = file.generation();
        Ok(changed)
    }

    /// The tables that a file names: those of `old` with the file's changes.
    fn merged(
        &self,
        file: &RouteFile<'_>,
        old: &BTreeMap<TableId, Table>,
    ) -> Result<BTreeMap<TableId, Table>, ApplyError> {
        let mut tables = BTreeMap::new();
        // The table under construction, and how much of its old version is copied.
        let mut open: Option<(TableId, Table, usize)> = None;
        let close = |open: Option<(TableId, Table, usize)>, tables: &mut BTreeMap<TableId, Table>| {
            if let Some((id, mut table, copied)) = open {
                let rest = old.get(&id).into_iter().flat_map(|t| (copied..t.len()).filter_map(|at| t.get(at)));
                rest.for_each(|(prefix, value)| table.push(prefix, value));
                table.shrink();
                tables.insert(id, table);
            }
        };
        let mut records = file.records();
        while let Some(record) = records.next() {
            let record = record?;
            if open.as_ref().is_none_or(|(id, ..)| *id != record.table) {
                close(open.take(), &mut tables);
            }
            let (_, table, copied) = open.get_or_insert_with(|| (record.table, Table::new(record.table.v6), 0));
            let before = old.get(&record.table);
            let mut there = false;
            while let Some((prefix, value)) = before.and_then(|t| t.get(*copied)).filter(|(p, _)| *p <= record.prefix) {
                *copied += 1;
                there = prefix == record.prefix;
                if !there {
                    table.push(prefix, value);
                }
            }
            match record.value {
                Some(value) => table.push(record.prefix, value),
                None if there => {}
                None => return Err(ApplyError::NotThere { offset: records.offset() }),
            }
        }
        close(open, &mut tables);
        Ok(tables)
    }
}
