//! Studies: questions about the transport, each answered by many worlds, a plot and a line of numbers.
//!
//! A study is a scenario file (`crates/sim/studies/`) and a module here that varies it. docs/STUDIES.md says what came of
//! each, and which default follows.

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
mod oracle;
mod plot;
mod rdm_acks;
mod rdm_hybrid;
mod rdm_incast;
mod rdm_loss;
mod rdm_mesh;
mod rdm_pfc;
mod rdm_pods;
mod recovery;
mod rto;
mod runs;
mod swift;
mod switching;
mod unequal;
mod watch;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use plot::Panel;

/// A question.
#[derive(Clone, Copy)]
pub struct Study {
    /// Its name on the command line.
    pub name: &'static str,
    /// What it asks.
    pub question: &'static str,
    run: fn(quick: bool) -> Result<Outcome>,
}

/// Something that must hold.
#[derive(Clone, Debug)]
pub struct Bar {
    /// What is measured, with its unit.
    pub name: String,
    /// What was measured.
    pub value: f64,
    /// The largest value that is good enough.
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
    Study { name: "elephants", question: "two large flows against ECMP and probe-and-switch", run: elephants::run },
    Study {
        name: "failure",
        question: "a path loses 10 % or dies: throughput by 1 s, 100 ms, 10 ms",
        run: failure::run,
    },
    Study { name: "incast", question: "up to 1000 senders and one receiver, with and without Swift", run: incast::run },
    Study {
        name: "blocking",
        question: "small requests beside a bulk flow: publication strict, by flow, off",
        run: blocking::run,
    },
    Study { name: "rto", question: "the smallest RTO: latency against needless repetitions", run: rto::run },
    Study { name: "granularity", question: "packets sent on one path before the next", run: granularity::run },
    Study {
        name: "unequal",
        question: "eight paths of unequal delay and rate, sprayed over 1 to 8",
        run: unequal::run,
    },
    Study { name: "clos", question: "1,024 hosts, all to all, 1 % of the fabric's links flap", run: clos::run },
    Study { name: "swift", question: "Swift beside a plain version of the paper's pseudo-code", run: swift::run },
    Study {
        name: "recovery",
        question: "how long until a lost packet arrives; what a dead path costs",
        run: recovery::run,
    },
    Study {
        name: "capacity",
        question: "links that are the bottleneck: how much of them TCP gets, and their queues",
        run: capacity::run,
    },
    Study {
        name: "aggregation",
        question: "connections by pair of vNICs instead of by 5-tuple, of generated flows",
        run: aggregation::run,
    },
    Study {
        name: "gw-plb",
        question: "a gateway pod whose packets are sprayed over its cores, against flows hashed to them",
        run: gw_plb::run,
    },
    Study {
        name: "gw-overload",
        question: "a tenant that overloads a gateway pod, with and without the limiter of tenants",
        run: gw_overload::run,
    },
    Study {
        name: "rdm-loss",
        question: "messages over RDMA that loses packets, beside go-back-N and whole chunks",
        run: rdm_loss::run,
    },
    Study {
        name: "rdm-incast",
        question: "thousands of RDMA connections into one link, without priority flow control",
        run: rdm_incast::run,
    },
    Study {
        name: "rdm-acks",
        question: "small messages over RDMA when ACKs are sent at once, or for several together",
        run: rdm_acks::run,
    },
    Study {
        name: "rdm-pfc",
        question: "RDMA with and without priority flow control: goodput, and what others suffer from incast and a dead host",
        run: rdm_pfc::run,
    },
    Study {
        name: "rdm-pods",
        question: "RDMA between two pods of unequal size, without priority flow control in between",
        run: rdm_pods::run,
    },
    Study {
        name: "rdm-hybrid",
        question: "NICs of two generations in one network: do they get the same throughput?",
        run: rdm_hybrid::run,
    },
];

/// All studies.
pub fn all() -> &'static [Study] {
    STUDIES
}

/// Runs a study; writes NAME.svg and NAME.json into `out`. Returns its bars.
///
/// # Errors
/// Something cannot be written, or a scenario does not fit the study.
pub fn run(study: &Study, out: &Path, quick: bool) -> Result<Vec<Bar>> {
    std::fs::create_dir_all(out).with_context(|| format!("cannot create {}", out.display()))?;
    let outcome = (study.run)(quick)?;
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
