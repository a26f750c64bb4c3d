//! `bifrost-sim`: runs scenarios.

mod swarm_command;

use std::io::{BufWriter, ErrorKind, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use bifrost_sim::{Report, Scenario, Trace, World, checkers, study};
use clap::{Parser, Subcommand};

/// Runs Bifrost hosts in virtual time.
///
/// A scenario describes the network, the guests' traffic and the faults. With the same seed it always runs the same
/// way; the seed decides which packets are lost, which flow sends next, and so on.
#[derive(Parser)]
#[command(version, after_help = EXAMPLES)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  bifrost-sim run crates/sim/scenarios/parallel-loss.toml --seed 7
  bifrost-sim run crates/sim/scenarios/incast.toml --seed 1 --json > incast.json
  bifrost-sim run crates/sim/scenarios/path-failure.toml --seed 1 --trace failure.pcapng
  bifrost-sim check my-scenario.toml
  bifrost-sim study elephants

docs/SIMULATOR.md says how to write scenarios and what is modelled.";

#[derive(Subcommand)]
enum Command {
    /// Run a scenario and report the results. The exit status is 1 if an invariant was violated.
    Run {
        /// The scenario: a TOML file
        scenario: PathBuf,
        /// Seed of all random decisions
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Report as JSON, with all links, hosts and counters
        #[arg(long)]
        json: bool,
        /// Write all packets on all links to this pcapng file; slow, and large
        #[arg(long, value_name = "FILE")]
        trace: Option<PathBuf>,
    },
    /// Answer a question about the transport with many runs: numbers, a plot and a JSON file (docs/STUDIES.md). The
    /// exit status is 1 if a bar is missed.
    Study {
        /// Name of the study; "all" for all
        #[arg(required_unless_present = "list")]
        name: Option<String>,
        /// List the studies
        #[arg(long)]
        list: bool,
        /// Directory for NAME.svg and NAME.json
        #[arg(long, value_name = "DIR", default_value = "out/studies")]
        out: PathBuf,
        /// Fewer and shorter runs
        #[arg(long)]
        quick: bool,
        /// Number of seeds, for studies that support it: rdm-upgrade
        #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
        seeds: Option<u64>,
    },
    /// Run random worlds, each made from a seed, and report violations
    Swarm(swarm_command::Swarm),
    /// Enable deliberate mistakes in the engine, and find the seed that detects each
    #[cfg(feature = "mutations")]
    Mutations(swarm_command::Mutations),
    /// Check a scenario, and print it with all defaults filled in.
    Check {
        /// The scenario: a TOML file
        scenario: PathBuf,
    },
}

fn main() -> ExitCode {
    match run(Arguments::parse().command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Swarm(args) => swarm_command::swarm(&args),
        #[cfg(feature = "mutations")]
        Command::Mutations(args) => swarm_command::mutations(&args),
        Command::Check { scenario } => {
            print(&Scenario::load(&scenario)?.to_toml())?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Study { name, list, out, quick, seeds } => studies(name.as_deref(), list, &out, quick, seeds),
        Command::Run { scenario, seed, json, trace } => {
            let scenario = Scenario::load(&scenario)?;
            let mut world = World::new(&scenario, seed)?;
            checkers::watch(&mut world);
            if let Some(path) = &trace {
                let file = std::fs::File::create(path).with_context(|| format!("cannot create {}", path.display()))?;
                world.set_trace(Trace::new(Box::new(BufWriter::new(file)))?);
            }
            world.run();
            world.finish_trace().context("cannot write the trace")?;
            let report = Report::of(&world);
            let text = if json { serde_json::to_string_pretty(&report)? + "\n" } else { report.to_string() };
            print(&text)?;
            Ok(if report.violations == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
    }
}

/// Writes to standard output; a reader that closes it early is not an error.
fn print(text: &str) -> Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error).context("cannot write the report"),
        _ => Ok(()),
    }
}

fn studies(name: Option<&str>, list: bool, out: &std::path::Path, quick: bool, seeds: Option<u64>) -> Result<ExitCode> {
    if list {
        for study in study::all() {
            println!("{:<12} {}", study.name, study.question);
        }
        return Ok(ExitCode::SUCCESS);
    }
    let name = name.unwrap_or("all");
    let chosen: Vec<_> = study::all().iter().filter(|s| name == "all" || s.name == name).collect();
    if chosen.is_empty() {
        bail!("unknown study {name:?}; --list shows all");
    }
    let mut missed = 0;
    for study in chosen {
        let began = std::time::Instant::now();
        let bars = study::run(study, out, quick, seeds)?;
        missed += bars.iter().filter(|bar| !bar.holds()).count();
        println!("{}: done in {:.1} s", study.name, began.elapsed().as_secs_f64());
    }
    Ok(if missed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
