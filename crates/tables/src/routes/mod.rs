//! Routes of many networks as files, whole or as changes, and in order in memory: docs/ROUTES-FILE.md.

mod file;
mod set;

pub use file::{
    FileError, FileErrorKind, FileKind, FileWriter, ROUTE_VALUE_MAX, Record, RouteFile, RoutePrefix, RouteRecords,
    TableId,
};
pub use set::{ApplyError, RouteSet};
