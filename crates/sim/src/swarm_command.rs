//! `bifrost-sim swarm`, and `bifrost-sim mutations`.

use std::ops::Range;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use bifrost_sim::{Violation, mix, rdma, swarm};
use clap::Args;

/// Interval of progress messages.
const PROGRESS: Duration = Duration::from_secs(10);
/// Time for shrinking a failing scenario.
const SHRINK: Duration = Duration::from_secs(20);
/// Number of failing seeds after which to stop.
const MOST_FAILURES: usize = 100;

#[derive(Args)]
pub(crate) struct Swarm {
    /// Seeds: FIRST..END (without END), or one
    #[arg(long, value_parser = seeds, default_value = "0..2000")]
    seeds: Range<u64>,
    /// Hosts with RDMA NICs that send messages, instead of guests that send packets
    #[arg(long)]
    rdm: bool,
    /// Number of threads; default: the number of processors
    #[arg(long)]
    jobs: Option<usize>,
    /// Print one JSON object at the end instead of text
    #[arg(long)]
    json: bool,
    /// Start no more seeds after this many seconds
    #[arg(long, value_name = "SECONDS")]
    time_limit: Option<f64>,
    /// Write shrunk scenarios of failing seeds into this directory
    #[arg(long, value_name = "DIRECTORY")]
    keep: Option<PathBuf>,
    /// Only print the scenario of the first seed
    #[arg(long)]
    show: bool,
    /// With --rdm: run this saved world instead of those of the seeds
    #[arg(long, value_name = "FILE", requires = "rdm")]
    world: Option<PathBuf>,
}

pub(crate) fn seeds(text: &str) -> Result<Range<u64>, String> {
    let number = |t: &str| t.replace('_', "").parse::<u64>().map_err(|_| format!("{t:?} is not a seed"));
    match text.split_once("..") {
        Some((first, end)) => Ok(number(first)?..number(end)?),
        None => number(text).map(|seed| seed..seed + 1),
    }
}

#[derive(Default)]
struct Totals {
    runs: u64,
    events: u64,
    packets: u64,
    exempt: u64,
    /// Combined event hashes of all seeds. It does not depend on the order in which they end.
    digest: u64,
    cpu: Duration,
    longest: (Duration, u64),
}

pub(crate) fn swarm(args: &Swarm) -> Result<ExitCode> {
    if args.seeds.is_empty() {
        bail!("no seeds in {}..{}", args.seeds.start, args.seeds.end);
    }
    if args.show {
        print!("{}", world_of(args.rdm, args.seeds.start)?);
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(path) = &args.world {
        let outcome = rdma::swarm::run_world(&rdma::swarm::load(path)?, args.seeds.start, &|_| ());
        if let Some(violation) = &outcome.violation {
            println!("{}", line(violation));
            return Ok(ExitCode::FAILURE);
        }
        println!("no violation; {} events", outcome.events);
        return Ok(ExitCode::SUCCESS);
    }
    let began = Instant::now();
    let until = args.time_limit.map(|s| began + Duration::from_secs_f64(s));
    let (mut totals, mut failures) = (Totals::default(), Vec::new());
    let jobs = args.jobs.or_else(|| std::thread::available_parallelism().ok().map(Into::into)).unwrap_or(1);
    let mut said = began;
    // A run reports a panic as a violation with its message, so the default output is not needed.
    std::panic::set_hook(Box::new(|_| ()));
    let run = if args.rdm { rdma::swarm::run } else { swarm::run };
    let end = parallel(args.seeds.clone(), jobs, until, run, |seed, took, outcome| {
        totals.runs += 1;
        totals.events += outcome.events;
        totals.packets += outcome.packets.0;
        totals.exempt += outcome.packets.1;
        totals.digest ^= mix(seed ^ outcome.hash);
        totals.cpu += took;
        totals.longest = totals.longest.max((took, seed));
        if let Some(violation) = outcome.violation {
            eprintln!("seed {seed}: {}", line(&violation));
            failures.push((seed, violation));
        }
        if said.elapsed() >= PROGRESS {
            said = Instant::now();
            let (runs, seconds) = (totals.runs, began.elapsed().as_secs());
            eprintln!("{runs} seeds in {seconds} s, {} failures; at seed {seed}", failures.len());
        }
        failures.len() < MOST_FAILURES
    });
    let _ = std::panic::take_hook();
    failures.sort_by_key(|(seed, _)| *seed);
    if args.json {
        println!("{}", serde_json::to_string_pretty(&json(args, &totals, end, &failures, began))?);
    } else {
        let mean = totals.cpu.as_secs_f64() * 1e3 / totals.runs.max(1) as f64;
        println!(
            "seeds {}..{end}: {} runs, {} violations; {} packets of which {} need not arrive, {} events",
            args.seeds.start,
            totals.runs,
            failures.len(),
            totals.packets,
            totals.exempt,
            totals.events
        );
        println!("digest of all events: {:016x}", totals.digest);
        println!(
            "{:.1} s; CPU: {mean:.2} ms a seed, the longest {:.0} ms (seed {})",
            began.elapsed().as_secs_f64(),
            totals.longest.0.as_secs_f64() * 1e3,
            totals.longest.1
        );
        if end < args.seeds.end {
            println!("not finished: continue with  bifrost-sim swarm{} --seeds {end}..{}", flag(args), args.seeds.end);
        }
    }
    if let Some((seed, violation)) = failures.first() {
        report(args, *seed, violation)?;
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

/// Which mutations, and how long to look.
#[cfg(feature = "mutations")]
#[derive(Args)]
pub(crate) struct Mutations {
    /// Mutations of the message engine instead of the transport's
    #[arg(long)]
    rdm: bool,
    /// Seeds to try for each mutation: FIRST..END
    #[arg(long, value_parser = seeds, default_value = "0..2000")]
    seeds: Range<u64>,
    /// Number of threads; default: the number of processors
    #[arg(long)]
    jobs: Option<usize>,
    /// Only mutations whose name contains this
    #[arg(long, default_value = "")]
    only: String,
}

#[cfg(feature = "mutations")]
pub(crate) fn mutations(args: &Mutations) -> Result<ExitCode> {
    use bifrost_endpoint::Mutation as MessageMutation;
    use bifrost_rte::Mutation;
    if args.rdm {
        let look = |m: &MessageMutation| rdma::swarm::mutations::first_notice(*m, args.seeds.clone());
        return notices(args, MessageMutation::ALL.map(|m| (format!("{m:?}"), m)).into_iter(), look);
    }
    let look = |m: &Mutation| swarm::mutations::first_notice(*m, args.seeds.clone());
    notices(args, Mutation::ALL.map(|m| (format!("{m:?}"), m)).into_iter(), look)
}

/// Finds the first seed that detects each mutation.
#[cfg(feature = "mutations")]
fn notices<M: Sync>(
    args: &Mutations,
    all: impl Iterator<Item = (String, M)>,
    look: impl Fn(&M) -> Option<swarm::mutations::Notice> + Sync,
) -> Result<ExitCode> {
    let all: Vec<(String, M)> = all.filter(|(name, _)| name.contains(&args.only)).collect();
    let mut notices = vec![None; all.len()];
    std::panic::set_hook(Box::new(|_| ()));
    let look = |i: u64| look(&all[i as usize].1);
    let jobs = args.jobs.or_else(|| std::thread::available_parallelism().ok().map(Into::into)).unwrap_or(1);
    parallel(0..all.len() as u64, jobs, None, look, |i, took, notice| {
        notices[i as usize] = Some((took, notice));
        true
    });
    let _ = std::panic::take_hook();
    println!("| mutation | first seed that detects it | how | CPU, s |\n|---|---|---|---|");
    let mut unnoticed = 0;
    for ((mutation, _), found) in all.iter().zip(&notices) {
        let Some((took, notice)) = found else { continue };
        let (seed, how) = match notice {
            Some(notice) => (notice.seed.to_string(), line(&notice.violation)),
            None => ("none".to_string(), String::new()),
        };
        unnoticed += u32::from(notice.is_none());
        println!("| {mutation} | {seed} | {how} | {:.2} |", took.as_secs_f64());
    }
    println!("\n{} of {} noticed", all.len() as u32 - unnoticed, all.len());
    Ok(if unnoticed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn line(violation: &Violation) -> String {
    format!("{:.3} ms {:?}: {}", violation.at_ns as f64 / 1e6, violation.kind, violation.detail)
}

/// The world of a seed, as TOML.
fn world_of(rdm: bool, seed: u64) -> Result<String> {
    if rdm {
        return Ok(toml::to_string(&rdma::swarm::describe(seed))?);
    }
    Ok(swarm::scenario(seed).to_toml())
}

fn flag(args: &Swarm) -> &'static str {
    if args.rdm { " --rdm" } else { "" }
}

/// Prints how to reproduce a violation, and saves a shrunk world.
fn report(args: &Swarm, seed: u64, violation: &Violation) -> Result<()> {
    eprintln!("\nreplay:  bifrost-sim swarm{} --seeds {seed}", flag(args));
    let Some(directory) = &args.keep else { return Ok(()) };
    std::panic::set_hook(Box::new(|_| ()));
    let small = if args.rdm {
        toml::to_string(&rdma::swarm::shrink(&rdma::swarm::describe(seed), seed, violation.kind, SHRINK))?
    } else {
        swarm::shrink(&swarm::scenario(seed), seed, violation.kind, SHRINK).to_toml()
    };
    let _ = std::panic::take_hook();
    std::fs::create_dir_all(directory).with_context(|| format!("cannot make {}", directory.display()))?;
    let name = if args.rdm { "rdm-seed" } else { "seed" };
    let path = directory.join(format!("{name}-{seed}.toml"));
    let text = format!("# seed {seed}: {}\n{small}", line(violation));
    std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    if args.rdm {
        eprintln!("smaller: bifrost-sim swarm --rdm --seeds {seed} --world {}", path.display());
    } else {
        eprintln!("smaller: bifrost-sim run {} --seed {seed}", path.display());
    }
    Ok(())
}

fn json(args: &Swarm, totals: &Totals, end: u64, failures: &[(u64, Violation)], began: Instant) -> serde_json::Value {
    serde_json::json!({
        "first": args.seeds.start,
        "end": end,
        "runs": totals.runs,
        "events": totals.events,
        "packets": totals.packets,
        "exempt_packets": totals.exempt,
        "digest": format!("{:016x}", totals.digest),
        "seconds": began.elapsed().as_secs_f64(),
        "cpu_ms_per_seed": totals.cpu.as_secs_f64() * 1e3 / totals.runs.max(1) as f64,
        "longest_ms": totals.longest.0.as_secs_f64() * 1e3,
        "violations": failures.iter().map(|(seed, v)| serde_json::json!({ "seed": seed, "violation": v })).collect::<Vec<_>>(),
    })
}

/// Does `work` for `items` in order, on `jobs` threads; `done` returns whether to continue. Returns the first item not
/// started.
fn parallel<T: Send>(
    items: Range<u64>,
    jobs: usize,
    until: Option<Instant>,
    work: impl Fn(u64) -> T + Sync,
    mut done: impl FnMut(u64, Duration, T) -> bool,
) -> u64 {
    let next = AtomicU64::new(items.start);
    let stop = AtomicBool::new(false);
    let (sender, receiver) = mpsc::channel();
    std::thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            let (sender, next, stop, work) = (sender.clone(), &next, &stop, &work);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) && until.is_none_or(|until| Instant::now() < until) {
                    let item = next.fetch_add(1, Ordering::Relaxed);
                    if item >= items.end {
                        break;
                    }
                    let began = cpu_time();
                    let result = work(item);
                    if sender.send((item, cpu_time().saturating_sub(began), result)).is_err() {
                        break;
                    }
                }
            });
        }
        drop(sender);
        for (item, took, result) in receiver {
            if !done(item, took, result) {
                stop.store(true, Ordering::Relaxed);
            }
        }
    });
    next.into_inner().min(items.end)
}

/// CPU time of this thread; zero if the kernel does not report it.
fn cpu_time() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let ns = text.split_whitespace().next().and_then(|word| word.parse().ok());
    Duration::from_nanos(ns.unwrap_or(0))
}
