//! The command line.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand, ValueEnum as _};

use crate::daemon::Binaries;
use crate::experiment::{self, Experiment, Lab};
use crate::interrupt;
use crate::options::{Guests, Mode, Op, Options};
use crate::programs::redis_client::{self, Latencies, Load};
use crate::results::{HostInfo, Results, SCHEMA_VERSION};
use crate::state::{self, Run};

/// What `redis-load` leaves out: its connections all open at once.
const WARM_UP: Duration = Duration::from_millis(500);

const EXAMPLES: &str = "\
Examples:
  sudo bifrost-lab list
  sudo bifrost-lab run redis-loss --quick          a first impression, in minutes
  sudo bifrost-lab run redis-loss                  every loss rate, three repetitions
  bifrost-lab check redis-loss --out out/redis-loss
  sudo bifrost-lab run redis-loss --modes kernel_vxlan,bifrost --losses 0,1 --injectors wire
  sudo bifrost-lab shell --mode bifrost            a network to try things in
  sudo bifrost-lab clean                           after a crash; `run` does it, too

Results of a run go to --out: results.json (schema: docs/results.schema.json), report.md, plots as SVG, and logs/.
Everything happens in network namespaces of the lab's own, which are removed at the end, after Ctrl-C, too.";

#[derive(Debug, Parser)]
#[command(name = "bifrost-lab", version, about = "Builds hosts from network namespaces and runs experiments on them", after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List the experiments
    List {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Run an experiment and write results.json, report.md and plots
    Run(RunArguments),
    /// Compare the results of a run with the experiment's bars; exit code 1 if one is missed
    Check {
        /// The experiment
        name: String,
        /// Where `run` wrote its results [default: out/NAME]
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
        /// Accept values that are this factor away from a bar (for short runs on busy machines)
        #[arg(long, default_value_t = 1.0, value_name = "FACTOR", value_parser = slack)]
        slack: f64,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Build a network, open a shell on a host or guest, and remove the network when the shell ends
    Shell {
        /// What joins the guests
        #[arg(long, value_enum, default_value_t = Mode::Bifrost)]
        mode: Mode,
        /// Namespace of the shell: host-a, host-b, guest-a or guest-b
        #[arg(long = "in", default_value = "guest-a", value_name = "NAME")]
        inside: String,
        #[command(flatten)]
        options: Options,
    },
    /// Remove what crashed runs have left behind
    Clean,
    /// Ask a Redis server at a fixed rate, and print latencies as JSON: what `redis-loss` runs inside of virtual machines
    #[command(hide = true)]
    RedisLoad {
        /// Address and port
        server: SocketAddr,
        /// The command
        op: Op,
        /// Connections
        clients: u32,
        /// Requests due each second, on all connections together
        requests_per_s: f64,
        /// How long
        seconds: f64,
    },
}

#[derive(Debug, Args)]
struct RunArguments {
    /// The experiment (see `bifrost-lab list`)
    name: String,
    /// Where to write results [default: out/NAME]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    #[command(flatten)]
    options: Options,
}

/// Parses the command line and does what it says.
pub fn run() -> Result<ExitCode> {
    match Cli::parse().command {
        Command::List { json } => list(json),
        Command::Run(arguments) => run_experiment(arguments),
        Command::Check { name, out, slack, json } => check(&name, out, slack, json),
        Command::Shell { mode, inside, options } => shell(mode, &inside, options),
        Command::Clean => {
            let removed = state::clean()?;
            removed.iter().for_each(|name| println!("removed {name}"));
            if removed.is_empty() {
                println!("nothing to remove");
            }
            Ok(ExitCode::SUCCESS)
        }
        Command::RedisLoad { server, op, clients, requests_per_s, seconds } => {
            let load = Load {
                server,
                clients,
                duration: WARM_UP + Duration::try_from_secs_f64(seconds)?,
                warm_up: WARM_UP,
                // Beyond what TCP needs to repair anything that the lab does to it.
                timeout: Duration::from_secs(10),
                op: Some(op),
                requests_per_s: Some(requests_per_s),
                stop: Arc::default(),
            };
            let latencies = Latencies::of(&redis_client::run(&load)?)?;
            println!("{}", serde_json::to_string(&latencies)?);
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn slack(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if (1.0..=100.0).contains(&value) => Ok(value),
        _ => Err("a factor from 1 to 100".to_owned()),
    }
}

fn find(name: &str) -> Result<Box<dyn Experiment>> {
    let all = experiment::all();
    let names: Vec<_> = all.iter().map(|e| e.name()).collect();
    let known = names.join(", ");
    all.into_iter().find(|e| e.name() == name).with_context(|| format!("no experiment `{name}`; there are: {known}"))
}

fn out_directory(out: Option<PathBuf>, name: &str) -> PathBuf {
    out.unwrap_or_else(|| Path::new("out").join(name))
}

fn list(json: bool) -> Result<ExitCode> {
    if json {
        let entries: Vec<_> = experiment::all()
            .iter()
            .map(|e| serde_json::json!({ "name": e.name(), "summary": e.summary(), "modes": e.default_modes() }))
            .collect();
        println!("{}", serde_json::to_string_pretty(&entries)?);
    } else {
        for experiment in experiment::all() {
            println!("{:<14} {}", experiment.name(), experiment.summary());
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn run_experiment(arguments: RunArguments) -> Result<ExitCode> {
    let RunArguments { name, out, mut options } = arguments;
    let experiment = find(&name)?;
    state::require_root()?;
    let guests = experiment.guests();
    let chosen = *options.guests.get_or_insert(guests.first().copied().unwrap_or_default());
    if !guests.contains(&chosen) {
        bail!("{name} does not run with --guests {}", chosen.name());
    }
    if options.modes.is_empty() {
        options.modes = experiment.default_modes();
        // It has no port for them.
        options.modes.retain(|mode| chosen == Guests::Container || *mode != Mode::KernelVxlan);
    }
    if let Some(mode) = options.modes.iter().find(|mode| !experiment.modes().contains(mode)) {
        bail!("{name} does not run with --modes {}", mode.name());
    }
    options.modes.sort();
    options.modes.dedup();
    let binaries = Binaries::find(&options)?;
    let out = out_directory(out, &name);
    fs::create_dir_all(&out).with_context(|| format!("creating {}", out.display()))?;
    let out = out.canonicalize().with_context(|| format!("resolving {}", out.display()))?;
    interrupt::install()?;
    let started = Instant::now();
    let rows = {
        let lab = Lab { run: Run::begin()?, options: options.clone(), binaries, out: out.clone() };
        experiment.run(&lab)?
    };
    let results = Results { schema_version: SCHEMA_VERSION, experiment: name, host: HostInfo::collect(&options), rows };
    results.write(&out)?;
    let report = experiment.report(&results.rows)?;
    let plots = experiment.plots(&results.rows, &out)?;
    write_report(&out, &results, experiment.as_ref(), &report, &plots)?;
    println!("{report}");
    println!("Took {}.", duration(started.elapsed()));
    println!("results: {}", out.join("results.json").display());
    println!("report:  {}", out.join("report.md").display());
    for plot in plots {
        println!("plot:    {}", plot.display());
    }
    Ok(ExitCode::SUCCESS)
}

fn write_report(
    out: &Path,
    results: &Results,
    experiment: &dyn Experiment,
    report: &str,
    plots: &[PathBuf],
) -> Result<()> {
    let host = &results.host;
    let mut text = format!("# {}\n\n{}.\n\n{report}\n", experiment.name(), experiment.summary());
    for plot in plots {
        let file = plot.file_name().map_or(String::new(), |name| name.to_string_lossy().into_owned());
        text += &format!("![{file}]({file})\n\n");
    }
    text += "## Bars\n\n";
    for bar in experiment.bars(&results.rows)? {
        text += &format!("- {} {bar}\n", if bar.passes() { "pass:" } else { "**fail**:" });
    }
    text += &format!(
        "\n## Machine\n\n{} ({} processors, {} GiB), Linux {}, bifrost-lab {}. {} underlay links, {}; packets cross \
         them {}; {}.\n",
        host.cpu_model,
        host.cpus,
        host.memory_bytes >> 30,
        host.kernel,
        host.lab_version,
        host.options.paths,
        host.options.cabling.to_possible_value().map_or(String::new(), |v| format!("cabling `{}`", v.get_name())),
        if host.options.wire_offload { "in bundles (offloads on)" } else { "one by one" },
        if host.options.share_processors { "the hosts share all processors" } else { "each host has one processor" },
    );
    let path = out.join("report.md");
    fs::write(&path, text).with_context(|| format!("writing {}", path.display()))
}

fn check(name: &str, out: Option<PathBuf>, slack: f64, json: bool) -> Result<ExitCode> {
    let experiment = find(name)?;
    let results = Results::read(&out_directory(out, name), name)?;
    let bars = experiment.bars(&results.rows)?;
    let missed = bars.iter().filter(|bar| !bar.passes_within(slack)).count();
    if json {
        let entries: Vec<_> = bars
            .iter()
            .map(|bar| {
                serde_json::json!({
                    "name": bar.name, "measured": bar.measured, "bound": bar.bound, "unit": bar.unit,
                    "passed": bar.passes_within(slack),
                })
            })
            .collect();
        println!("{}", serde_json::to_string_pretty(&entries)?);
    } else {
        for bar in &bars {
            let verdict = match (bar.passes(), bar.passes_within(slack)) {
                (true, _) => "pass",
                (false, true) => "pass (slack)",
                (false, false) => "FAIL",
            };
            println!("{verdict:<12} {bar}");
        }
        println!("{} of {} bars cleared", bars.len() - missed, bars.len());
    }
    Ok(if missed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn shell(mode: Mode, inside: &str, mut options: Options) -> Result<ExitCode> {
    state::require_root()?;
    options.modes = vec![mode];
    let binaries = Binaries::find(&options)?;
    interrupt::install()?;
    let run = Run::begin()?;
    let out = run.directory().to_path_buf();
    let lab = Lab { run, options, binaries, out };
    let network = lab.network(mode, "shell")?;
    let mut namespace = None;
    for host in &network.topology.hosts {
        println!("{:<8} {:<28} {}", host.name, host.namespace.name(), host.loopback);
        println!("{:<8} {:<28} {}", host.guest.name, host.guest.namespace.name(), host.guest.address);
        if inside == host.name {
            namespace = Some(&host.namespace);
        } else if inside == host.guest.name {
            namespace = Some(&host.guest.namespace);
        }
    }
    let Some(namespace) = namespace else {
        bail!("no namespace `{inside}`; there are: host-a, host-b, guest-a, guest-b");
    };
    let program = std::env::var("SHELL").unwrap_or_else(|_| "/bin/sh".to_owned());
    println!("A shell in {inside}; the network lasts until it ends.");
    let mut child = namespace.command(&program).spawn().with_context(|| format!("starting {program}"))?;
    // Ctrl-C belongs to the shell.
    child.wait().context("waiting for the shell")?;
    Ok(ExitCode::SUCCESS)
}

fn duration(elapsed: Duration) -> String {
    let seconds = elapsed.as_secs_f64();
    if seconds < 90.0 { format!("{seconds:.0} s") } else { format!("{:.1} min", seconds / 60.0) }
}
