//! The experiments, a file each.

pub mod iperf;
pub mod path_failure;
pub mod redis_loss;
pub mod soak;
