//! Routes of many networks, as full files or deltas, and sorted in memory: docs/ROUTES-FILE.md.

mod file;
mod set;

pub use file::{
    FileError, FileErrorKind, FileKind, FileWriter, ROUTE_VALUE_MAX, Record, RouteFile, RoutePrefix, RouteRecords,
    TableId,
};
pub use set::{ApplyError, RouteSet};
