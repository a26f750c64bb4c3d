//! Studies: questions about the transport, each answered by many simulated worlds, a plot and a line of numbers.
//!
//! A study is a scenario file (`crates/sim/studies/`) and a module here that varies it. docs/STUDIES.md has the
//! results, and the defaults that follow from them.

mod aggregation;
mod blocking;
mod capacity;
mod clos;
mod elephants;
mod failure;
mod gateway;
mod granularity;
mod gw_overload;
mod gw_plb;
mod incast;
mod leaf_spine;
mod oracle;
mod plot;
mod rdm_acks;
mod rdm_hybrid;
mod rdm_incast;
mod rdm_loss;
mod rdm_mesh;
mod rdm_pfc;
mod rdm_pods;
mod rdm_upgrade;
mod recovery;
mod rto;
mod runs;
mod swift;
mod switching;
mod unequal;
mod watch;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

use plot::Panel;

/// A question.
#[derive(Clone, Copy)]
pub struct Study {
    /// Its name on the command line.
    pub name: &'static str,
    /// The question.
    pub question: &'static str,
    run: fn(quick: bool) -> Result<Outcome>,
    /// The same with this number of seeds, if it can be chosen.
    with_seeds: Option<fn(quick: bool, seeds: u64) -> Result<Outcome>>,
}

impl Study {
    const fn new(name: &'static str, question: &'static str, run: fn(quick: bool) -> Result<Outcome>) -> Self {
        Self { name, question, run, with_seeds: None }
    }
}

/// A bar: a limit that must hold.
#[derive(Clone, Debug)]
pub struct Bar {
    /// The measured quantity, with its unit.
    pub name: String,
    /// The measured value.
    pub value: f64,
    /// The limit.
    pub limit: f64,
}

impl Bar {
    /// Whether it holds.
    pub fn holds(&self) -> bool {
        self.value <= self.limit
    }
}

/// An answer.
#[derive(Debug, Default)]
struct Outcome {
    lines: Vec<String>,
    data: Value,
    panels: Vec<Panel>,
    bars: Vec<Bar>,
}

const STUDIES: &[Study] = &[
    Study::new("elephants", "two large flows against ECMP and probe-and-switch", elephants::run),
    Study::new("failure", "a path loses 10 % or dies: throughput by 1 s, 100 ms, 10 ms", failure::run),
    Study::new("incast", "up to 1000 senders and one receiver, with and without Swift", incast::run),
    Study::new("blocking", "small requests beside a bulk flow: publication strict, by flow, off", blocking::run),
    Study::new("rto", "the smallest RTO: latency against needless repetitions", rto::run),
    Study::new("granularity", "packets sent on one path before the next", granularity::run),
    Study::new("unequal", "eight paths of unequal delay and rate, sprayed over 1 to 8", unequal::run),
    Study::new("clos", "1,024 hosts, all to all, 1 % of the fabric's links flap", clos::run),
    Study::new(
        "leaf-spine",
        "a leaf-spine fabric with slow links: goodput, of what max-min fairness allows",
        leaf_spine::run,
    ),
    Study::new("swift", "Swift beside a plain version of the paper's pseudo-code", swift::run),
    Study::new("recovery", "how long until a lost packet arrives; what a dead path costs", recovery::run),
    Study::new("capacity", "links that are the bottleneck: how much of them TCP gets, and their queues", capacity::run),
    Study::new(
        "aggregation",
        "connections by pair of vNICs instead of by 5-tuple, of generated flows",
        aggregation::run,
    ),
    Study::new(
        "gw-plb",
        "a gateway pod whose packets are sprayed over its cores, against flows hashed to them",
        gw_plb::run,
    ),
    Study::new(
        "gw-overload",
        "a tenant that overloads a gateway pod, with and without the limiter of tenants",
        gw_overload::run,
    ),
    Study::new("rdm-loss", "messages over RDMA that loses packets, beside go-back-N and whole chunks", rdm_loss::run),
    Study::new(
        "rdm-incast",
        "thousands of RDMA connections into one link, without priority flow control",
        rdm_incast::run,
    ),
    Study::new(
        "rdm-acks",
        "small messages over RDMA when ACKs are sent at once, or for several together",
        rdm_acks::run,
    ),
    Study::new(
        "rdm-pfc",
        "RDMA with and without priority flow control: goodput, and what others suffer from incast and a dead host",
        rdm_pfc::run,
    ),
    Study::new(
        "rdm-pods",
        "RDMA between two pods of unequal size, without priority flow control in between",
        rdm_pods::run,
    ),
    Study::new(
        "rdm-hybrid",
        "NICs of two generations in one network: do they get the same throughput?",
        rdm_hybrid::run,
    ),
    Study {
        with_seeds: Some(rdm_upgrade::run_seeds),
        ..Study::new(
            "rdm-upgrade",
            "an RDMA connection with both services that changes from one to the other under load",
            rdm_upgrade::run,
        )
    },
];

/// All studies.
pub fn all() -> &'static [Study] {
    STUDIES
}

/// Runs a study, with this number of seeds if it can be chosen; writes NAME.svg and NAME.json into `out`. Returns its
/// bars.
///
/// # Errors
/// An output file cannot be written, or a scenario does not fit the study.
pub fn run(study: &Study, out: &Path, quick: bool, seeds: Option<u64>) -> Result<Vec<Bar>> {
    std::fs::create_dir_all(out).with_context(|| format!("cannot create {}", out.display()))?;
    let outcome = match (seeds, study.with_seeds) {
        (None, _) => (study.run)(quick)?,
        (Some(seeds), Some(run)) => run(quick, seeds)?,
        (Some(_), None) => bail!("study {} has fixed seeds: omit --seeds", study.name),
    };
    for line in &outcome.lines {
        println!("{}: {line}", study.name);
    }
    for bar in &outcome.bars {
        let word = if bar.holds() { "holds" } else { "MISSED" };
        println!("{}: bar {word}: {}: {:.2}, at most {:.2}", study.name, bar.name, bar.value, bar.limit);
    }
    plot::draw(&out.join(format!("{}.svg", study.name)), &outcome.panels)?;
    let bars: Vec<Value> = outcome
        .bars
        .iter()
        .map(|b| json!({ "name": b.name, "value": b.value, "limit": b.limit, "holds": b.holds() }))
        .collect();
    let report = json!({
        "study": study.name,
        "question": study.question,
        "quick": quick,
        "lines": outcome.lines,
        "bars": bars,
        "data": outcome.data,
    });
    write(&out.join(format!("{}.json", study.name)), &report)?;
    Ok(outcome.bars)
}

fn write(path: &PathBuf, report: &Value) -> Result<()> {
    let text = serde_json::to_string_pretty(report)?;
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}
