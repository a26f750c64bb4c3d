//! Tables in two layers: a large base that never changes and is shared by all versions of a table, and the few entries
//! that differ from it. A change copies only the latter. [`LayeredLpm::merged`] makes a new base of both, in time
//! proportional to the table; [`LayeredLpm::rebased`] applies to it what has changed meanwhile.

mod base;
mod lpm;
mod map;

pub use lpm::LayeredLpm;
pub use map::LayeredMap;
