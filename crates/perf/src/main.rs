//! `bifrost-perf` measures messages between two hosts, like perftest's `ib_write_bw` and `ib_send_lat`.

#![forbid(unsafe_code)]

mod applications;
mod bandwidth;
mod block;
mod cli;
mod common;
mod latency;
mod link;
mod numbered;
mod plan;
mod random;
mod report;
mod server;
mod sort;
mod stats;
mod tcp;
mod upgrade;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let cli = cli::Cli::parse();
    match cli.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bifrost-perf: {error:#}");
            ExitCode::FAILURE
        }
    }
}
