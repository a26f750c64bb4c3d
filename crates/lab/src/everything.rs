//! `run all`: runs every experiment and writes one report. Results that exist already are not measured again.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime};

use anyhow::{Context, Result, bail};

use crate::book::{self, Chapter};
use crate::daemon::Binaries;
use crate::experiment;
use crate::frame::Experiment;
use crate::options::Options;
use crate::results::Results;
use crate::{interrupt, run};

/// Runs the experiments without results in `out`, and writes `out/report`. Returns whether all were measured and
/// clear their bars.
///
/// # Errors
/// An interruption: results so far are kept, and the next call continues. Options that only apply to single
/// experiments.
pub fn run_all(options: &Options, out: &Path) -> Result<bool> {
    if !options.modes.is_empty() || options.guests.is_some() {
        bail!(
            "--modes and --guests apply to one experiment: run it by its name, or all without them or with --every-mode"
        );
    }
    let experiments = experiment::all();
    let began = Instant::now();
    let mut chapters = Vec::new();
    for (number, experiment) in experiments.iter().enumerate() {
        let experiment = experiment.as_ref();
        let directory = out.join(experiment.name());
        let settled = run::settle(experiment, options.clone())?;
        let programs = programs(experiment, &settled)?;
        let progress = format!("[{}/{}, {}]", number + 1, experiments.len(), run::duration(began.elapsed()));
        let results = match reusable_results(experiment.name(), &settled, &programs, &directory)? {
            Some(results) => {
                println!("{progress} {}: has results already, in {}", experiment.name(), directory.display());
                Ok(results)
            }
            None => {
                println!("{progress} {}: {}", experiment.name(), experiment.summary());
                let measured = run::run(experiment, &settled, &directory);
                interrupt::check().context("the next `run all` continues from here")?;
                measured.and_then(|_| Results::read(&directory, experiment.name()))
            }
        };
        if let Err(error) = &results {
            eprintln!("{}: {error:#}", experiment.name());
        }
        chapters.push(Chapter { experiment, directory, results });
        // Written after each experiment, so that the results so far can be read.
        book::write(&chapters, options, &out.join("report"))?;
    }
    println!("{}", book::overview(&chapters));
    println!("Took {}.\nreport: {}", run::duration(began.elapsed()), out.join("report/index.html").display());
    Ok(chapters.iter().all(Chapter::is_good))
}

/// Writes `out/report` from all results in `out`, whatever their age. Returns whether every experiment has results
/// and clears its bars.
///
/// # Errors
/// There are no results at all, or files cannot be written.
pub fn report(out: &Path) -> Result<bool> {
    let experiments = experiment::all();
    let chapters: Vec<Chapter> = experiments
        .iter()
        .map(|experiment| {
            let directory = out.join(experiment.name());
            let results = Results::read(&directory, experiment.name());
            Chapter { experiment: experiment.as_ref(), directory, results }
        })
        .collect();
    let Some(any) = chapters.iter().find_map(|chapter| chapter.results.as_ref().ok()) else {
        bail!("no results in {}: `bifrost-lab run all --out {}` measures them", out.display(), out.display());
    };
    let options = any.host.options.clone();
    book::write(&chapters, &options, &out.join("report"))?;
    println!("{}\nreport: {}", book::overview(&chapters), out.join("report/index.html").display());
    Ok(chapters.iter().all(Chapter::is_good))
}

/// The programs that measure: results older than one of them may be from another version.
fn programs(experiment: &dyn Experiment, options: &Options) -> Result<Vec<PathBuf>> {
    let binaries = Binaries::find(options)?;
    let own = std::env::current_exe().context("finding the lab's own executable")?;
    let more = experiment.programs(&binaries);
    let [nicd, gw] = binaries.gateway;
    Ok([vec![binaries.bifrostd, binaries.bifrostctl, nicd, gw, own], more].concat())
}

/// Results of `experiment` in `directory` that were measured with the same options and are not older than the
/// `programs`.
fn reusable_results(
    experiment: &str,
    options: &Options,
    programs: &[PathBuf],
    directory: &Path,
) -> Result<Option<Results>> {
    let file = directory.join("results.json");
    if !file.exists() {
        return Ok(None);
    }
    let written = modified(&file)?;
    for program in programs.iter().filter(|program| program.exists()) {
        if modified(program)? > written {
            return Ok(None);
        }
    }
    let known = Results::read(directory, experiment);
    // The directory of the binaries does not matter and is not recorded.
    let wanted = Options { bin_dir: None, ..options.clone() };
    Ok(known.ok().filter(|results| results.host.options == wanted))
}

fn modified(path: &Path) -> Result<SystemTime> {
    let metadata = fs::metadata(path).with_context(|| format!("looking at {}", path.display()))?;
    metadata.modified().with_context(|| format!("asking when {} was written", path.display()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::fs::File;
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;
    use crate::results::{HostInfo, SCHEMA_VERSION};

    #[test]
    fn results_are_reused_only_for_the_same_options_and_programs() {
        let directory = tempfile::tempdir().unwrap();
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        let touch = |name: &str, seconds| {
            let path = directory.path().join(name);
            let file = File::options().create(true).append(true).open(&path).unwrap();
            file.set_modified(at(seconds)).unwrap();
            path
        };
        let programs = [touch("daemon", 100), directory.path().join("not-built")];
        let options = Options::default();
        let find = |options: &Options| reusable_results("iperf", options, &programs, directory.path()).unwrap();
        assert_eq!(find(&options), None, "nothing was measured");

        let host = HostInfo::collect(&options);
        let results = Results { schema_version: SCHEMA_VERSION, experiment: "iperf".to_owned(), host, rows: vec![] };
        results.write(directory.path()).unwrap();
        touch("results.json", 101);
        assert_eq!(find(&options), Some(results.clone()));
        let elsewhere = Options { bin_dir: Some(PathBuf::from("/elsewhere")), ..options.clone() };
        assert_eq!(find(&elsewhere), Some(results), "the directory of the binaries does not matter");
        assert_eq!(find(&Options { quick: !options.quick, ..options.clone() }), None, "from other options");
        touch("daemon", 102);
        assert_eq!(find(&options), None, "the daemon is newer");
        touch("daemon", 100);
        fs::write(directory.path().join("results.json"), "{").unwrap();
        touch("results.json", 101);
        assert_eq!(find(&options), None, "truncated");
    }
}
