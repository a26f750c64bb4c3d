//! `bifrost-fleet`: a real relay and any number of simulated agents, each with its own connection. Measures how long
//! changes take to reach hosts, how long a relay takes to start, and whether anything is lost when it is killed.

mod agents;
mod cli;
mod cold;
mod failover;
mod floor;
mod network;
mod program;
mod propagate;
mod report;

use std::process::ExitCode;

use clap::Parser as _;

use crate::cli::{Cli, Command, Experiment};
use crate::report::Report;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let Command::Run(experiment) = cli.command;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let result = runtime.map_err(anyhow::Error::from).and_then(|runtime| {
        runtime.block_on(async {
            match &experiment {
                Experiment::Propagate(options) => propagate::run(options).await,
                Experiment::Cold(options) => cold::run(options).await,
                Experiment::Failover(options) => failover::run(options).await,
            }
        })
    });
    match result {
        Ok(report) => finish(&report, cli.json),
        Err(error) => {
            eprintln!("bifrost-fleet: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Prints a report; fails if a bar is missed.
fn finish(report: &Report, json: bool) -> ExitCode {
    let text = if json { report.json() } else { report.text() };
    println!("{text}");
    if report.is_met() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
