//! `gw-links`: a link, a switch and a pipeline of a pod with four links fail in turn, under load: packet loss and its
//! duration.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Result;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bars::{Bar, Sense};
use crate::frame::Experiment;
use crate::gateway::links::{LINKS, Server, links_of};
use crate::gateway::probes::FLOWS;
use crate::interrupt;
use crate::lab::Lab;
use crate::options::Mode;
use crate::plot::{self, Panel, Series};
use crate::report::Table;
use crate::results::{from_values, to_values};
use crate::stats::{Spread, cell};

/// Probes per second.
const PROBES: u32 = 10_000;
/// Time within which BFD detects that a link has failed (three intervals of 50 ms, counted from the last packet), and
/// the proxy and the router's kernel have removed it from the route, ms. `gw-kill` has the same bar for a pod that is
/// gone.
const MISSED_MS: f64 = 300.0;
/// Maximum time until packets arrive by a link again, ms: sessions and ARP requests are retried after 1 s, and an
/// announcement reaches the router's kernel in 500 ms. `gw-kill` has the same bar for all programs that are killed.
const BACK_MS: f64 = 10_000.0;

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct GwLinks;

/// The failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Failure {
    /// The wire between the gateway and one of four switches.
    Link,
    /// One of four switches stops forwarding, and its ports stay up.
    Switch,
    /// One of two `bifrost-nicd` gets SIGKILL.
    Pipeline,
}

impl Failure {
    const ALL: [Failure; 3] = [Failure::Link, Failure::Switch, Failure::Pipeline];

    fn name(self) -> &'static str {
        match self {
            Failure::Link => "one of four links",
            Failure::Switch => "one of four switches",
            Failure::Pipeline => "one of two pipelines",
        }
    }

    /// The affected links.
    fn links(self) -> std::ops::Range<usize> {
        match self {
            Failure::Link => 1..2,
            Failure::Switch => 2..3,
            Failure::Pipeline => links_of(0),
        }
    }

    fn begin(self, server: &Server) -> Result<()> {
        match self {
            Failure::Link => server.set_device("t1", false),
            Failure::Switch => server.set_device("br2", false),
            Failure::Pipeline => server.pipeline(0).kill(),
        }
    }

    fn end(self, server: &Server) -> Result<()> {
        match self {
            Failure::Link => server.set_device("t1", true),
            Failure::Switch => server.set_device("br2", true),
            // It restarts automatically.
            Failure::Pipeline => Ok(()),
        }
    }
}

/// The result of one failure.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The failure.
    #[serde(rename = "mode")]
    pub failure: Failure,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Probes sent.
    pub sent_probes: u32,
    /// Share of the flows that arrived by a failed link, 0..=1.
    pub share: f64,
    /// Lost probes of these flows.
    pub lost_probes: u32,
    /// Lost probes of other flows.
    pub other_lost_probes: u32,
    /// Time from the first lost probe to the last one, ms.
    pub outage_ms: f64,
    /// Time from the end of the failure (of a pipeline: from its start) until packets arrived by all links again, ms.
    pub back_ms: f64,
}

impl Row {
    /// Maximum number of lost probes: the share of these flows in the probes of the longest permitted outage.
    fn most_lost(&self) -> f64 {
        self.share * MISSED_MS / 1e3 * f64::from(PROBES)
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { failure, sent_probes, share, lost_probes, other_lost_probes, outage_ms, back_ms, .. } = self;
        write!(
            f,
            "{}: {lost_probes} of {sent_probes} probes lost within {outage_ms:.0} ms, all of the {:.0} % of flows that \
             came that way but {other_lost_probes}; all links work again after {back_ms:.0} ms",
            failure.name(),
            share * 100.0
        )
    }
}

impl Experiment for GwLinks {
    fn name(&self) -> &'static str {
        "gw-links"
    }

    fn summary(&self) -> &'static str {
        "A link, a switch and a pipeline of a gateway pod with four links fail under load: what is lost, for how long"
    }

    /// None: it builds its own network.
    fn modes(&self) -> Vec<Mode> {
        Vec::new()
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let mut rows = Vec::new();
        for repetition in 0..lab.repetitions(3) {
            let server = Server::start(lab, &format!("links-{repetition}"))?;
            for failure in Failure::ALL {
                let row = measure(&server, failure, repetition)?;
                println!("{row}");
                rows.push(row);
            }
        }
        to_values(&rows)
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut table = Table::new(&[
            "failed",
            "share of flows [%]",
            "probes of these lost",
            "of others",
            "outage [ms]",
            "all links again after [ms]",
        ]);
        for failure in Failure::ALL {
            let fields: [fn(&Row) -> f64; 5] = [
                |row| row.share * 100.0,
                |row| row.lost_probes.into(),
                |row| row.other_lost_probes.into(),
                |row| row.outage_ms,
                |row| row.back_ms,
            ];
            let cells = fields.map(|field| cell(spread(&rows, failure, field)));
            table.row([failure.name().to_owned()].into_iter().chain(cells).collect());
        }
        Ok(format!(
            "A pod with four links, each with a switch of its own, behind two pipelines; {PROBES} probes a second in \
             {FLOWS} flows, which a router spreads over the links. BFD has three intervals of 50 ms. The link and the \
             switch work again after about 2 s; the pipeline is started again after 100 ms. Medians, and in brackets \
             the least and the most of the repetitions.\n\n{}",
            table.render()
        ))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let series = [(Series::on("outage"), ())];
        let failures: Vec<u32> = (0..Failure::ALL.len() as u32).collect();
        let labels = "0: link, 1: switch, 2: pipeline";
        let panel =
            Panel::over("what fails", (labels, &failures), ("outage of its flows [ms]", false), &series, |(), of| {
                spread(&rows, Failure::ALL[*of as usize], |row| row.outage_ms)
            });
        Ok(vec![plot::draw(&directory.join("outage.svg"), &[panel], 1)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut bars = Vec::new();
        for failure in Failure::ALL {
            let name = failure.name();
            let most = |field: fn(&Row) -> f64| spread(&rows, failure, field).map(|spread| spread.most);
            let mut bar = |what: &str, found, limit, unit| {
                bars.push(Bar::new(format!("{name}: {what}"), found, Sense::AtMost, limit, unit));
            };
            bar("probes of other flows lost", most(|row| row.other_lost_probes.into()), 0.0, "probes");
            let share = most(|row| f64::from(row.lost_probes) / row.most_lost());
            bar("probes lost, of its share during detection", share, 1.0, "");
            bar("outage of its flows", most(|row| row.outage_ms), MISSED_MS, "ms");
            bar("all links again after", most(|row| row.back_ms), BACK_MS, "ms");
        }
        Ok(bars)
    }
}

fn spread(rows: &[Row], failure: Failure, field: fn(&Row) -> f64) -> Option<Spread> {
    Spread::of(rows.iter().filter(|row| row.failure == failure).map(field))
}

fn measure(server: &Server, failure: Failure, repetition: u32) -> Result<Row> {
    let all: Vec<usize> = (0..LINKS).collect();
    server.until_links(&all)?;
    // Waits until earlier activity has ended, such as restart timers.
    interrupt::sleep(Duration::from_secs(2))?;
    let probes = server.probe(PROBES)?;
    interrupt::sleep(Duration::from_secs(1))?;
    let (links, failed) = (server.flows.get(), failure.links());
    anyhow::ensure!(all.iter().all(|link| links.contains(link)), "no flow comes by one of the links: {links:?}");
    let mut began = Instant::now();
    failure.begin(server)?;
    if failure == Failure::Pipeline {
        // By then the failure has been detected.
        interrupt::sleep(Duration::from_millis(500))?;
    } else {
        let others: Vec<usize> = all.iter().copied().filter(|link| !failed.contains(link)).collect();
        server.until_links(&others)?;
        interrupt::sleep(Duration::from_secs(2))?;
        began = Instant::now();
        failure.end(server)?;
    }
    server.until_links(&all)?;
    let back_ms = began.elapsed().as_secs_f64() * 1e3;
    // Losses caused by the return to these links must be counted, too.
    interrupt::sleep(Duration::from_secs(2))?;
    let (probed, lost) = probes.stop_and_list()?;
    let is_failed = |number: &&u32| failed.contains(&links[**number as usize % FLOWS]);
    let (first, last) = (lost.first().copied().unwrap_or(0), lost.last().copied().unwrap_or(0));
    let of_failed = lost.iter().filter(is_failed).count() as u32;
    Ok(Row {
        failure,
        repetition,
        sent_probes: probed.sent,
        share: links.iter().filter(|link| failed.contains(link)).count() as f64 / FLOWS as f64,
        lost_probes: of_failed,
        other_lost_probes: lost.len() as u32 - of_failed,
        outage_ms: f64::from(last - first) * 1e3 / f64::from(PROBES),
        back_ms,
    })
}
