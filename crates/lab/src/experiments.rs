//! The experiments, a file each.

pub mod applications;
pub mod capacity;
mod circle;
pub mod congestion_control;
pub mod coverage;
pub mod delayed_release;
pub mod elephants;
pub mod flow_records;
pub mod granularity;
pub mod iperf;
pub mod isolation;
pub mod nginx;
pub mod path_failure;
pub mod redis_loss;
pub mod route_refresh;
pub mod slicing;
pub mod soak;
pub mod sockperf;
pub mod stable;
pub mod switch_latency;
pub mod switch_overall;
pub mod switch_rate;
pub mod tunnel;
pub mod vectors;
pub mod vhost_rate;
