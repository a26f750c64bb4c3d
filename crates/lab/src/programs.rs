//! The programs whose experience of the network is measured.

pub mod apache_bench;
pub mod guest_tcp;
pub mod iperf3;
pub mod nginx;
pub mod open_vswitch;
pub mod redis_benchmark;
pub mod redis_client;
pub mod redis_server;
pub mod stream;
pub mod testpmd;
