//! One run of an experiment: measures, writes results, reports.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::ValueEnum as _;

use crate::awake::Awake;
use crate::bars::Bar;
use crate::daemon::Binaries;
use crate::frame::{self, Experiment};
use crate::lab::Lab;
use crate::options::{Guests, Options};
use crate::report::number;
use crate::results::{HostInfo, Results, SCHEMA_VERSION};
use crate::state::Run;
use crate::stats::Spread;

/// `options` with the experiment's defaults for those that the user did not choose.
///
/// # Errors
/// A choice that the experiment does not support.
pub fn settle(experiment: &dyn Experiment, mut options: Options) -> Result<Options> {
    let (name, guests) = (experiment.name(), experiment.guests());
    let chosen = *options.guests.get_or_insert(guests.first().copied().unwrap_or_default());
    if !guests.contains(&chosen) {
        bail!("{name} does not run with --guests {}", chosen.name());
    }
    if options.modes.is_empty() {
        let every = std::mem::take(&mut options.every_mode);
        options.modes = if every { experiment.modes() } else { experiment.default_modes(options.quick) };
        // Kernel VXLAN has no port for virtual machines.
        options.modes.retain(|mode| chosen == Guests::Container || !mode.is_kernel_vxlan());
    }
    if let Some(mode) = options.modes.iter().find(|mode| !experiment.modes().contains(mode)) {
        bail!("{name} does not run with --modes {}", mode.name());
    }
    options.modes.sort();
    options.modes.dedup();
    Ok(options)
}

/// The command line that measures with `options`.
///
/// # Errors
/// None for options that the experiment accepts.
pub fn command(experiment: &dyn Experiment, options: &Options) -> Result<String> {
    let quick = if options.quick { " --quick" } else { "" };
    let usual = settle(experiment, Options { quick: options.quick, ..Options::default() })?;
    Ok(format!("sudo bifrost-lab run {}{quick}{}", experiment.name(), options.arguments(&usual)))
}

/// The output of a run.
#[derive(Debug)]
pub struct Written {
    /// The body of its report.
    pub report: String,
    /// Its files, without the report and the results.
    pub plots: Vec<PathBuf>,
    /// How long it took.
    pub took: Duration,
}

/// Measures with [settled](settle) `options`, and writes `results.json`, `report.md` and plots into `out`.
///
/// # Errors
/// The measurement failed, or files cannot be written. Everything that was started has ended then.
pub fn run(experiment: &dyn Experiment, options: &Options, out: &Path) -> Result<Written> {
    let binaries = Binaries::find(options)?;
    fs::create_dir_all(out).with_context(|| format!("creating {}", out.display()))?;
    let out = out.canonicalize().with_context(|| format!("resolving {}", out.display()))?;
    let started = Instant::now();
    let rows = {
        let _awake = experiment.keeps_awake().then(Awake::start).transpose()?;
        let lab = Lab { run: Run::begin()?, options: options.clone(), binaries, out: out.clone() };
        experiment.run(&lab)?
    };
    let host = HostInfo::collect(options);
    let results = Results { schema_version: SCHEMA_VERSION, experiment: experiment.name().to_owned(), host, rows };
    results.write(&out)?;
    let report = experiment.report(&results.rows)?;
    let plots = experiment.plots(&results.rows, &out)?;
    let text = format!(
        "# {}\n\n{}.\n\n{report}\n{}## Bars\n\n{}\n## Command\n\n`{}`\n\n## Machine\n\n{}\n",
        experiment.name(),
        experiment.summary(),
        images(&plots),
        bars(experiment, &results)?,
        command(experiment, options)?,
        machine(&results.host)
    );
    let path = out.join("report.md");
    fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
    Ok(Written { report, plots, took: started.elapsed() })
}

/// Plots next to the text, as Markdown.
pub fn images(plots: &[PathBuf]) -> String {
    let image = |plot: &PathBuf| {
        let file = plot.file_name().map_or(String::new(), |name| name.to_string_lossy().into_owned());
        format!("![{file}]({file})\n\n")
    };
    plots.iter().map(image).collect()
}

/// A line for each bar, as Markdown, with the range over single repetitions.
///
/// # Errors
/// Results of another experiment.
pub fn bars(experiment: &dyn Experiment, results: &Results) -> Result<String> {
    let spreads = frame::spreads(experiment, &results.rows)?;
    let line = |(bar, spread): (Bar, Option<Spread>)| {
        let verdict = if bar.passes() { "pass:" } else { "**fail**:" };
        let spread = spread.filter(|spread| spread.least < spread.most);
        let of_each = spread.map_or_else(String::new, |spread| {
            format!("; single repetitions {} to {}", number(spread.least), number(spread.most))
        });
        format!("- {verdict} {bar}{of_each}\n")
    };
    Ok(experiment.bars(&results.rows)?.into_iter().zip(spreads).map(line).collect())
}

/// The machine and its settings, as a paragraph.
pub fn machine(host: &HostInfo) -> String {
    format!(
        "{} ({} processors, {} GiB), Linux {}, bifrost-lab {}. {} underlay links, {}; packets cross them {}; {}.",
        host.cpu_model,
        host.cpus,
        host.memory_bytes >> 30,
        host.kernel,
        host.lab_version,
        host.options.paths,
        host.options.cabling.to_possible_value().map_or(String::new(), |v| format!("cabling `{}`", v.get_name())),
        if host.options.wire_offload { "in bundles (offloads on)" } else { "one by one" },
        if host.options.share_processors { "the hosts share all processors" } else { "each host has one processor" },
    )
}

/// Formats a duration for readers.
pub fn duration(elapsed: Duration) -> String {
    let seconds = elapsed.as_secs_f64();
    if seconds < 90.0 { format!("{seconds:.0} s") } else { format!("{:.1} min", seconds / 60.0) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use clap::Parser;

    use super::*;
    use crate::experiment;
    use crate::experiments::redis_loss::RedisLoss;
    use crate::options::Mode;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    #[test]
    fn the_command_in_a_report_repeats_its_measurement() {
        for (arguments, shown) in [
            ("", ""),
            ("--quick", " --quick"),
            ("--modes off,kernel_vxlan", " --modes kernel_vxlan,off"),
            ("--losses 0,0.5 --repetitions 4 --seconds 1.5", " --losses 0.0,0.5 --repetitions 4 --seconds 1.5"),
            ("--quick --wire-offload --clients 7 --ops get", " --quick --clients 7 --ops get --wire-offload"),
            ("--faults corrupt,path=2", " --faults corrupt,path=2"),
        ] {
            let parse = |arguments: &str| {
                let line =
                    Line::try_parse_from([&["run"], &arguments.split_whitespace().collect::<Vec<_>>()[..]].concat());
                settle(&RedisLoss, line.unwrap().options).unwrap()
            };
            let options = parse(arguments);
            let command = command(&RedisLoss, &options).unwrap();
            let rest = command.strip_prefix("sudo bifrost-lab run redis-loss").unwrap();
            assert_eq!(rest, shown);
            assert_eq!(parse(rest), options, "{command}");
        }
    }

    #[test]
    fn every_mode_selects_all_modes_of_an_experiment() {
        for experiment in experiment::all() {
            let every = Options { every_mode: true, ..Options::default() };
            let settled = settle(experiment.as_ref(), every.clone()).unwrap();
            let known = |mode: &Mode| settled.guests == Some(Guests::Container) || !mode.is_kernel_vxlan();
            assert!(
                experiment.modes().iter().filter(|m| known(m)).all(|m| settled.modes.contains(m)),
                "{}",
                experiment.name()
            );
            // Naming all modes is the same choice: results with one are reused for the other.
            let named = Options { modes: settled.modes.clone(), ..Options::default() };
            assert_eq!(settle(experiment.as_ref(), named).unwrap(), settled);
        }
    }
}
