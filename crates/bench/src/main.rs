//! `bifrost-cost`: the cost of the transport, and of the switch's decision, as a table, with its bars. `make cost`
//! runs it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use bifrost_bench::account::Counting;
use bifrost_bench::memory::{self, Scale};
use bifrost_bench::report::Report;
use bifrost_bench::round::Load;
use bifrost_bench::{gateway, routes, vectors, wall};
use bifrost_rte::{Ordering, US};
use clap::Parser;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Prints the cost of the transport, and fails if a bar is missed.
#[derive(Debug, Parser)]
#[command(version)]
struct Options {
    /// Directory of gungraun's results of `instructions`; without it, only memory is measured
    #[arg(long, value_name = "DIR")]
    counts: Option<PathBuf>,
    /// Baseline: committed counts that may not be exceeded by more than a tenth
    #[arg(long, value_name = "FILE", requires = "counts")]
    baseline: Option<PathBuf>,
    /// Write the counts to the baseline instead of comparing
    #[arg(long, requires = "baseline")]
    accept: bool,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
    /// Also write the JSON to this file
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

fn main() -> Result<()> {
    let options = Options::parse();
    let mut report = Report::default();
    if let Some(counts) = &options.counts {
        let baseline = match &options.baseline {
            Some(file) if !options.accept => {
                let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
                toml::from_str(&text)?
            }
            _ => BTreeMap::new(),
        };
        report.add_instructions(counts, &baseline)?;
    }
    if let Some(file) = options.baseline.filter(|_| options.accept) {
        let text = format!("{BASELINE_HEAD}{}", toml::to_string(&report.baseline())?);
        std::fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
    }
    let loads = [
        ("by_flow", Load::default()),
        ("strict", Load { ordering: Ordering::Strict, ..Load::default() }),
        ("unequal_paths", Load { skew_ns: 10 * US, ..Load::default() }),
        ("connections_64", Load { conns: 64, ..Load::default() }),
    ];
    for (name, load) in loads {
        let (sender, receiver) = memory::allocations(load, 100_000);
        report.add_allocations(name, sender, receiver);
    }
    report.add_memory(&memory::measure(Scale::FULL));
    report.add_wall_times(&wall::times());
    report.add_wall_times(&wall::decisions());
    report.add_vectors(&vectors::times());
    report.add_routes(&routes::costs());
    report.add_gateway(&gateway::costs());
    let json = serde_json::to_string_pretty(&report)?;
    if let Some(file) = options.out {
        std::fs::write(&file, &json).with_context(|| format!("cannot write {}", file.display()))?;
    }
    if options.json {
        println!("{json}");
    } else {
        print!("{report}");
    }
    if !report.missed.is_empty() {
        bail!("{} bars missed", report.missed.len());
    }
    Ok(())
}

const BASELINE_HEAD: &str =
    "# Instructions, as `make cost` counted them; `make cost-accept` writes this file. docs/COST.md.\n\n";
