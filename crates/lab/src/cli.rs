//! The command line.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand};

use crate::daemon::Binaries;
use crate::experiment;
use crate::frame::Experiment;
use crate::lab::Lab;
use crate::options::{Mode, Op, Options};
use crate::programs::key_value_client::{self, Latencies, Load, WARM_UP};
use crate::programs::key_value_protocol::Protocol;
use crate::results::Results;
use crate::state::{self, Run};
use crate::{everything, interrupt, run};

/// The name that stands for all experiments.
const ALL: &str = "all";

const EXAMPLES: &str = "\
Examples:
  sudo bifrost-lab list
  sudo bifrost-lab run redis-loss --quick          a first impression, in minutes
  sudo bifrost-lab run redis-loss                  all loss rates, three repetitions
  bifrost-lab check redis-loss --out out/redis-loss
  sudo bifrost-lab run all --quick                 all experiments, one report: out/report/index.html
  bifrost-lab report                               rewrite the report from existing results
  sudo bifrost-lab run redis-loss --modes kernel_vxlan,bifrost --losses 0,1 --injectors wire
  sudo bifrost-lab shell --mode bifrost            a shell in a test network
  sudo bifrost-lab clean                           after a crash; `run` also does this

Results of a run go to --out: results.json (schema: docs/results.schema.json), report.md, plots as SVG, and logs/.
Everything runs in the lab's own network namespaces. They are removed at the end, also after Ctrl-C.";

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
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Run an experiment, or all of them, and write results.json, report.md and plots
    Run(RunArguments),
    /// Compare the results of a run with the experiment's bars; the exit code is 1 if one is missed
    Check {
        /// The experiment
        name: String,
        /// Where `run` wrote its results [default: out/NAME]
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
        /// Relax each bar by this factor (for short runs on busy machines)
        #[arg(long, default_value_t = 1.0, value_name = "FACTOR", value_parser = slack)]
        slack: f64,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Rewrite the report from the results of `run all` so far, without measuring
    Report {
        /// Where `run all` wrote its results [default: out]
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
    },
    /// Build a network, open a shell on a host or guest, and remove the network when the shell exits
    Shell {
        /// The network that joins the guests
        #[arg(long, value_enum, default_value_t = Mode::Bifrost)]
        mode: Mode,
        /// Namespace of the shell: host-a, host-b, guest-a or guest-b
        #[arg(long = "in", default_value = "guest-a", value_name = "NAME")]
        inside: String,
        #[command(flatten)]
        options: Options,
    },
    /// Remove what crashed runs left behind
    Clean,
    /// Send requests to a Redis server at a fixed rate, and print latencies as JSON (`redis-loss` runs this inside
    /// virtual machines)
    #[command(hide = true)]
    RedisLoad {
        /// Address and port
        server: SocketAddr,
        /// The Redis command
        op: Op,
        /// Connections
        clients: u32,
        /// Requests per second, over all connections
        requests_per_s: f64,
        /// Duration, seconds
        seconds: f64,
    },
}

#[derive(Debug, Args)]
struct RunArguments {
    /// The experiment (see `bifrost-lab list`), or `all`: run those whose results are not in --out yet, and write one
    /// report
    name: String,
    /// Where to write results [default: out/NAME; for `all`: out, with the report in out/report]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    #[command(flatten)]
    options: Options,
}

/// Parses the command line and runs the command.
pub fn parse_and_run() -> Result<ExitCode> {
    match Cli::parse().command {
        Command::List { json } => list(json),
        Command::Run(arguments) => run_experiment(arguments),
        Command::Check { name, out, slack, json } => check(&name, out, slack, json),
        Command::Report { out } => {
            let out = out.unwrap_or_else(|| PathBuf::from("out"));
            let good = everything::report(&out)?;
            Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
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
                transport: socket2::Protocol::TCP,
                protocol: Protocol::Redis,
                clients,
                keep_alive: true,
                duration: WARM_UP + Duration::try_from_secs_f64(seconds)?,
                patience: Duration::ZERO,
                warm_up: WARM_UP,
                // Longer than TCP needs to recover from any fault that the lab injects.
                timeout: Duration::from_secs(10),
                op: Some(op),
                requests_per_s: Some(requests_per_s),
                record: false,
                stop: Arc::default(),
            };
            let latencies = Latencies::of(&key_value_client::run(&load)?)?;
            println!("{}", serde_json::to_string(&latencies)?);
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn slack(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if (1.0..=100.0).contains(&value) => Ok(value),
        _ => Err("use a factor from 1 to 100".to_owned()),
    }
}

fn find(name: &str) -> Result<Box<dyn Experiment>> {
    let all = experiment::all();
    let names: Vec<_> = all.iter().map(|e| e.name()).collect();
    let known = names.join(", ");
    all.into_iter()
        .find(|e| e.name() == name)
        .with_context(|| format!("no experiment `{name}`; there are: {known}, and all"))
}

fn out_directory(out: Option<PathBuf>, name: &str) -> PathBuf {
    out.unwrap_or_else(|| Path::new("out").join(name))
}

fn list(json: bool) -> Result<ExitCode> {
    if json {
        let entries: Vec<_> = experiment::all()
            .iter()
            .map(|e| serde_json::json!({ "name": e.name(), "summary": e.summary(), "modes": e.default_modes(false) }))
            .collect();
        println!("{}", serde_json::to_string_pretty(&entries)?);
    } else {
        for experiment in experiment::all() {
            println!("{:<18} {}", experiment.name(), experiment.summary());
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn run_experiment(arguments: RunArguments) -> Result<ExitCode> {
    let RunArguments { name, out, options } = arguments;
    if name == ALL {
        state::require_root()?;
        interrupt::install()?;
        let good = everything::run_all(&options, &out.unwrap_or_else(|| PathBuf::from("out")))?;
        return Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
    let experiment = find(&name)?;
    state::require_root()?;
    let options = run::settle(experiment.as_ref(), options)?;
    interrupt::install()?;
    let out = out_directory(out, &name);
    let written = run::run(experiment.as_ref(), &options, &out)?;
    println!("{}", written.report);
    println!("Took {}.", run::duration(written.took));
    println!("results: {}", out.join("results.json").display());
    println!("report:  {}", out.join("report.md").display());
    for plot in written.plots {
        println!("plot:    {}", plot.display());
    }
    Ok(ExitCode::SUCCESS)
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
    println!("Shell in {inside}; the network is removed when it exits.");
    if mode == Mode::Mptcp {
        println!(
            "Programs in guests that ask for TCP get Multipath TCP; those in guest-a get a subflow for each path. \
            In the other guest use: mptcpize run PROGRAM. To inspect: ss -M, nstat -a 'MPTcpExt*'."
        );
    }
    let mut child = namespace.command(&program).spawn().with_context(|| format!("starting {program}"))?;
    // The shell handles Ctrl-C.
    child.wait().context("waiting for the shell")?;
    Ok(ExitCode::SUCCESS)
}
