//! `run all`: every experiment, and one report of all of them. What is there already is not measured again.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, bail};

use crate::book::{self, Chapter};
use crate::daemon::Binaries;
use crate::experiment::{self, Experiment};
use crate::options::Options;
use crate::results::Results;
use crate::{interrupt, run};

/// Runs whatever is missing in `out`, and writes `out/report`. Returns whether everything could be measured and clears its bars.
///
/// # Errors
/// An interruption; what was measured is kept, and the next call goes on. Options that only single experiments have.
pub fn run_all(options: &Options, out: &Path) -> Result<bool> {
    if !options.modes.is_empty() || options.guests.is_some() {
        bail!("--modes and --guests are choices about one experiment: run it by its name, or all without them");
    }
    let experiments = experiment::all();
    let began = Instant::now();
    let mut chapters = Vec::new();
    for (number, experiment) in experiments.iter().enumerate() {
        let experiment = experiment.as_ref();
        let directory = out.join(experiment.name());
        let settled = run::settle(experiment, options.clone())?;
        let place = format!("[{}/{}, {}]", number + 1, experiments.len(), run::duration(began.elapsed()));
        let results = match there_already(experiment, &settled, &directory)? {
            Some(results) => {
                println!("{place} {}: is there already, in {}", experiment.name(), directory.display());
                Ok(results)
            }
            None => {
                println!("{place} {}: {}", experiment.name(), experiment.summary());
                let measured = run::run(experiment, &settled, &directory);
                interrupt::check().context("the next `run all` goes on from here")?;
                measured.and_then(|_| Results::read(&directory, experiment.name()))
            }
        };
        if let Err(error) = &results {
            eprintln!("{}: {error:#}", experiment.name());
        }
        chapters.push(Chapter { experiment, directory, results });
        // After each, for whoever does not want to wait for the last.
        book::write(&chapters, options, &out.join("report"))?;
    }
    println!("{}", book::overview(&chapters));
    println!("Took {}.\nreport: {}", run::duration(began.elapsed()), out.join("report/index.html").display());
    Ok(chapters.iter().all(Chapter::is_good))
}

/// Results of the same options by this program and these daemons.
fn there_already(experiment: &dyn Experiment, options: &Options, directory: &Path) -> Result<Option<Results>> {
    let file = directory.join("results.json");
    if !file.exists() {
        return Ok(None);
    }
    let written = modified(&file)?;
    let binaries = Binaries::find(options)?;
    let own = std::env::current_exe().context("finding the lab's own executable")?;
    for program in [&binaries.bifrostd, &binaries.bifrostctl, &own] {
        if program.exists() && modified(program)? + Duration::from_secs(1) > written {
            return Ok(None);
        }
    }
    let known = Results::read(directory, experiment.name());
    // Where binaries are does not matter, and is not written.
    let asked = Options { bin_dir: None, ..options.clone() };
    Ok(known.ok().filter(|results| results.host.options == asked))
}

fn modified(path: &Path) -> Result<SystemTime> {
    let metadata = fs::metadata(path).with_context(|| format!("looking at {}", path.display()))?;
    metadata.modified().with_context(|| format!("asking when {} was written", path.display()))
}
