//! Lookup structures for forwarding: longest-prefix match, exact match, first match of an ordered list of rules, path
//! selection, meters, and the order of senders on a link; and route files.

#![deny(unsafe_code)]

mod classifier;
mod dir24;
mod exact;
mod heavy;
mod intervals;
mod layered;
mod limiter;
mod lpm;
mod maglev;
mod meter;
mod pages;
mod port_set;
mod prefetch;
mod rank;
mod resilient;
mod routes;
mod scheduler;
mod token_bucket;

pub use classifier::{Classifier, Fields, Pattern};
pub use dir24::{Dir24, FIB_BATCH, FIB_VALUE_MAX, FibError};
pub use exact::{ExactMap, exact_map};
pub use heavy::HeavyHitters;
pub use ipnet::IpNet;
pub use layered::{LayeredLpm, LayeredMap};
pub use limiter::{LimiterConfig, LimiterCounters, PreCheckFull, Rate, Ruling, Stage, TenantLimiter};
pub use lpm::{BATCH, Lpm};
pub use maglev::{Maglev, mix};
pub use meter::Meter;
pub use port_set::PortSet;
pub use prefetch::{prefetch, prefetch_whole};
pub use resilient::{AfterGap, Choice, Move, PathSet, Resilient};
pub use routes::{
    ApplyError, FileError, FileErrorKind, FileKind, FileWriter, ROUTE_VALUE_MAX, Record, RouteFile, RoutePrefix,
    RouteRecords, RouteSet, TableId,
};
pub use scheduler::{Scheduler, Turn};
pub use token_bucket::TokenBucket;
