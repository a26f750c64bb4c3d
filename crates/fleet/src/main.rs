//! `bifrost-fleet`: a real relay and any number of simulated agents, each with its own connection. Measures how long
//! changes take to reach hosts, how long a relay takes to start, and whether anything is lost when it is killed. With
//! real agents, daemons and etcd, it measures what guests notice while etcd is down.

mod agents;
mod cli;
mod cold;
mod failover;
mod floor;
mod host;
mod learn;
mod net;
mod network;
mod outage;
mod program;
mod propagate;
mod report;

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser as _;

use crate::cli::{Cli, Command, Experiment};
use crate::report::Report;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let Command::Run(experiment) = cli.command;
    let result = match &experiment {
        // It blocks, and its programs end with this thread.
        Experiment::Outage(options) => outage::run(options),
        Experiment::Learn(options) => learn::run(options),
        Experiment::Propagate(options) => in_runtime(propagate::run(options)),
        Experiment::Cold(options) => in_runtime(cold::run(options)),
        Experiment::Failover(options) => in_runtime(failover::run(options)),
    };
    match result {
        Ok(report) => finish(&report, cli.json),
        Err(error) => {
            eprintln!("bifrost-fleet: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn in_runtime(experiment: impl Future<Output = Result<Report>>) -> Result<Report> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(experiment)
}

/// Prints a report; fails if a bar is missed.
fn finish(report: &Report, json: bool) -> ExitCode {
    let text = if json { report.json() } else { report.text() };
    println!("{text}");
    if report.is_met() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
