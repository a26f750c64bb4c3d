//! `outage`: requests while one, two or three of four links flap, also after a bulk flow; after all links were down;
//! and after a daemon was killed.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bars::{Bar, Sense};
use crate::frame::Experiment;
use crate::lab::{Lab, Network};
use crate::options::Mode;
use crate::plot::{self, Panel};
use crate::programs::iperf3;
use crate::programs::key_value_client::{self, Load, Report, Request};
use crate::programs::key_value_protocol::Protocol;
use crate::programs::redis_server::{PORT, RedisServer};
use crate::report::Table;
use crate::results::from_values;
use crate::stats::{Spread, cell, median_of};
use crate::{inject, interrupt, standstill, turns};

/// Request rate over all clients, 1/s: a tenth of their maximum.
const REQUESTS_PER_S: f64 = 5_000.0;
/// Time before the fault.
const SETTLE: Duration = Duration::from_millis(800);
/// Time after the end of the fault.
const AFTERWARDS: Duration = Duration::from_millis(1500);
/// How long a flapping link is down, and then up.
const DOWN: Duration = Duration::from_millis(200);
const UP: Duration = Duration::from_millis(500);
/// Duration of the bulk flow, s, and the pause between its end and the first flap: requests that it delayed have been
/// answered by then.
const BULK_S: f64 = 1.0;
const AFTER_BULK: Duration = Duration::from_millis(50);
/// Number of flaps, and in a quick run.
const FLAPS: (u32, u32) = (6, 3);
/// How long all links are down.
const ALL_DOWN: Duration = Duration::from_secs(3);
/// How much later the other links return than the first one.
const RETURN_DELAY: Duration = Duration::from_millis(700);
/// How long a daemon is down.
const AWAY: Duration = Duration::from_millis(300);
/// Timeout of a request. Without connectivity, clients reconnect at this interval, so that the result shows the
/// network and not TCP's backoff between two attempts, which lasts seconds.
const TIMEOUT: Duration = Duration::from_millis(100);
/// Timeout of a request where links flap: requests may only be late.
const PATIENCE: Duration = Duration::from_secs(1);

/// The bars, ms.
const LONGEST_MS: f64 = 10.0;
const RESUMED_MS: f64 = 50.0;
const RESTARTED_MS: f64 = 200.0;

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct Outage;

/// The fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Case {
    /// One link flaps.
    OneFlaps,
    /// Two links flap, at once.
    TwoFlap,
    /// Three links flap, at once.
    ThreeFlap,
    /// Three links flap, at once, after a TCP flow that used all of them at full rate.
    ThreeFlapAfterBulk,
    /// All links are down; one returns before the others.
    AllDown,
    /// The daemon of the server's host is killed and restarted.
    Killed,
}

impl Case {
    /// In the order of reports.
    pub const ALL: [Case; 6] =
        [Case::OneFlaps, Case::TwoFlap, Case::ThreeFlap, Case::ThreeFlapAfterBulk, Case::AllDown, Case::Killed];

    /// Number of flapping links.
    fn flapping(self) -> Option<u8> {
        match self {
            Case::OneFlaps => Some(1),
            Case::TwoFlap => Some(2),
            Case::ThreeFlap | Case::ThreeFlapAfterBulk => Some(3),
            Case::AllDown | Case::Killed => None,
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Case::OneFlaps => "one link flaps",
            Case::TwoFlap => "two links flap",
            Case::ThreeFlap => "three links flap",
            Case::ThreeFlapAfterBulk => "three links flap after a bulk flow",
            Case::AllDown => "all links down",
            Case::Killed => "daemon killed",
        })
    }
}

/// The result of a network in one case.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The network.
    pub mode: Mode,
    /// The fault.
    pub case: Case,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Requests that were due since the first link went down or the daemon was killed.
    pub requests: u64,
    /// Requests without an answer in time: within a second where links flap, else within 100 ms.
    pub failed_requests: u64,
    /// Answers with a wrong value. A set that timed out may still be executed after a later one, so this is
    /// meaningless if requests failed.
    pub wrong_answers: u64,
    /// The longest request, ms, including failed ones.
    pub longest_ms: f64,
    /// Time from the first link's return, or the start of the new daemon, to the first answer, ms; null where links
    /// flap, or if there was no answer.
    pub first_answer_ms: Option<f64>,
    /// The same, until every client had received an answer.
    pub every_client_ms: Option<f64>,
    /// Number of attempts: up to three, while standstills of the machine disturbed the measurement. This row is the
    /// attempt with the shortest standstills.
    pub attempts: u32,
    /// Total standstill of the machine during the measurement, ms.
    pub standstill_ms: f64,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { mode, case, requests, failed_requests, longest_ms, .. } = self;
        write!(f, "{mode:<12} {case:<34}: {requests} requests, {failed_requests} failed, longest {longest_ms:.1} ms")?;
        if let (Some(first), Some(every)) = (self.first_answer_ms, self.every_client_ms) {
            write!(f, ", first answer after {first:.1} ms, an answer for every client after {every:.1} ms")?;
        }
        Ok(())
    }
}

impl Experiment for Outage {
    fn name(&self) -> &'static str {
        "outage"
    }

    fn summary(&self) -> &'static str {
        "Redis while links flap, after all were down, and after a daemon was killed"
    }

    fn keeps_awake(&self) -> bool {
        true
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        ensure!(lab.options.paths >= 4, "three links flap and one does not: use --paths 4");
        let has = |mode: Mode, case: Case| mode.is_bifrostd() || case != Case::Killed;
        let mut rows = Vec::new();
        for case in Case::ALL {
            let modes: Vec<Mode> = lab.options.modes.iter().copied().filter(|mode| has(*mode, case)).collect();
            rows.extend(turns::alternate(lab.repetitions(5), &modes, &[case], |mode, case, repetition| {
                let clients = lab.options.clients;
                // Any standstill may cause the longest request.
                let attempt = || measure(lab, *mode, *case, repetition);
                let (row, attempts) = standstill::least_disturbed(clients, |_: &Row| 0, attempt)?;
                Ok(Row { attempts, ..row })
            })?);
        }
        Ok(rows)
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let titles = ["case", "network", "failed", "longest ms", "first answer ms", "every client ms"];
        let mut table = Table::new(&titles);
        for case in Case::ALL {
            for mode in modes(&rows) {
                let of = || rows.iter().filter(move |row| row.mode == mode && row.case == case);
                if of().next().is_none() {
                    continue;
                }
                table.row(vec![
                    case.to_string(),
                    mode.to_string(),
                    cell(Spread::of(of().map(|row| row.failed_requests as f64))),
                    cell(Spread::of(of().map(|row| row.longest_ms))),
                    cell(Spread::of(of().filter_map(|row| row.first_answer_ms))),
                    cell(Spread::of(of().filter_map(|row| row.every_client_ms))),
                ]);
            }
        }
        let again = rows.iter().filter(|row| row.attempts > 1).count();
        Ok(format!(
            "Redis clients, {REQUESTS_PER_S:.0} requests per second in total, each timed from when it was due. \
             Flapping links lose everything, in both directions, for {} ms, and nothing for {} ms. Bulk flow: one TCP \
             flow for {BULK_S} s, which ends {} ms before the first flap. All links: down for {} s, then one returns, \
             and {} ms later the others. The daemon of the server's host: killed (SIGKILL) and restarted {} ms later. \
             There a request fails after {} ms, and its client reconnects; where links flap, after {} ms. *First \
             answer*, *every client*: since the first link's return, or the new daemon's start. Medians, with the \
             minimum and maximum of the repetitions in brackets. {again} of {} measurements were repeated because of \
             standstills of the machine.\n\n{}",
            DOWN.as_millis(),
            UP.as_millis(),
            AFTER_BULK.as_millis(),
            ALL_DOWN.as_secs(),
            RETURN_DELAY.as_millis(),
            AWAY.as_millis(),
            TIMEOUT.as_millis(),
            PATIENCE.as_millis(),
            rows.len(),
            table.render()
        ))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let series: Vec<_> = modes(&rows).into_iter().map(|mode| (mode.into(), mode)).collect();
        let panel =
            Panel::over("Redis", ("fault", &Case::ALL[..]), ("longest request [ms]", true), &series, |mode, case| {
                Spread::of(rows.iter().filter(|row| row.mode == mode && row.case == *case).map(|row| row.longest_ms))
            });
        Ok(vec![plot::draw(&directory.join("longest.svg"), &[panel], 1)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let of = |case| rows.iter().filter(move |row: &&Row| row.mode == Mode::Bifrost && row.case == case);
        let mut bars = Vec::new();
        for case in Case::ALL {
            let bar =
                |what: &str, measured, bound| Bar::new(format!("{case}: {what}"), measured, Sense::Below, bound, "ms");
            if case.flapping().is_some() {
                bars.push(bar(
                    "the longest request over BIFROST",
                    median_of(of(case).map(|row| row.longest_ms)),
                    LONGEST_MS,
                ));
                let failed = of(case).map(|row| row.failed_requests as f64).reduce(f64::max);
                let name = format!("{case}: requests that failed over BIFROST");
                bars.push(Bar::new(name, failed, Sense::AtMost, 0.0, "").exact());
                let wrong = of(case).map(|row| row.wrong_answers as f64).reduce(f64::max);
                let name = format!("{case}: wrong answers over BIFROST");
                bars.push(Bar::new(name, wrong, Sense::AtMost, 0.0, "").exact());
            } else {
                let bound = if case == Case::AllDown { RESUMED_MS } else { RESTARTED_MS };
                // A missing answer is not a time, and must not disappear from the median.
                let first = of(case).map(|row| row.first_answer_ms.unwrap_or(f64::INFINITY));
                bars.push(bar("first answer over BIFROST", median_of(first), bound));
                let every = of(case).map(|row| row.every_client_ms.unwrap_or(f64::INFINITY));
                let bound = bound + TIMEOUT.as_secs_f64() * 1000.0;
                bars.push(bar("every client answered over BIFROST", median_of(every), bound));
            }
        }
        Ok(bars)
    }
}

fn modes(rows: &[Row]) -> Vec<Mode> {
    Mode::ALL.into_iter().filter(|mode| rows.iter().any(|row| row.mode == *mode)).collect()
}

/// When the fault began, and when it ended.
struct Fault {
    since: Instant,
    /// For cases with a single end.
    returned: Option<Instant>,
}

fn measure(lab: &Lab, mode: Mode, case: Case, repetition: u32) -> Result<(Vec<standstill::Standstill>, Row)> {
    let label = format!("{mode}-{case}-{repetition}").replace(' ', "-");
    let mut network = lab.network_with_spread_flows(mode, &label)?;
    let server = RedisServer::start(&network.topology.hosts[1].guest, &lab.logs(&label))?;
    let watch = standstill::Watch::start()?;
    let (load, stop) = start(lab, &network, case)?;
    let fault = inject_fault(lab, &mut network, case);
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    let report = load.join().map_err(|_| anyhow!("the Redis client panicked"))??;
    let (fault, seen) = (fault?, watch.finish()?);
    drop(server);
    network.check()?;
    let seen: Vec<_> =
        seen.into_iter().filter(|standstill| standstill.began + standstill.length > fault.since).collect();
    let row = row(&report.requests, lab.options.clients, &fault);
    let standstill_ms = standstill::total(&seen).as_secs_f64() * 1000.0;
    let wrong_answers = report.wrong_answers;
    Ok((seen, Row { mode, case, repetition, wrong_answers, standstill_ms, ..row }))
}

type Clients = (JoinHandle<Result<Report>>, Arc<std::sync::atomic::AtomicBool>);

fn start(lab: &Lab, network: &Network, case: Case) -> Result<Clients> {
    let [client, server] = [0, 1].map(|host| &network.topology.hosts[host].guest);
    let stop: Arc<std::sync::atomic::AtomicBool> = Arc::default();
    let load = Load {
        server: (server.address, PORT).into(),
        transport: client.namespace.stream_protocol(),
        protocol: Protocol::Redis,
        clients: lab.options.clients,
        keep_alive: true,
        // Until `stop` is set.
        duration: Duration::from_secs(60),
        patience: Duration::ZERO,
        warm_up: Duration::ZERO,
        timeout: if case.flapping().is_some() { PATIENCE } else { TIMEOUT },
        op: None,
        requests_per_s: Some(REQUESTS_PER_S),
        record: true,
        stop: Arc::clone(&stop),
    };
    Ok((client.namespace.spawn(move || key_value_client::run(&load))?, stop))
}

fn inject_fault(lab: &Lab, network: &mut Network, case: Case) -> Result<Fault> {
    interrupt::sleep(SETTLE)?;
    if case == Case::ThreeFlapAfterBulk {
        let [client, server] = [0, 1].map(|host| &network.topology.hosts[host].guest);
        let logs = lab.logs(&format!("{}-bulk", network.overlay.mode));
        iperf3::Running::start((client, server), iperf3::Load::one_flow(BULK_S), &logs, "iperf3")?.finish()?;
        interrupt::sleep(AFTER_BULK)?;
    }
    let since = Instant::now();
    let paths: Vec<u8> = (0..lab.options.paths).collect();
    let returned = match case {
        Case::OneFlaps | Case::TwoFlap | Case::ThreeFlap | Case::ThreeFlapAfterBulk => {
            let links = &paths[..usize::from(case.flapping().unwrap_or(1))];
            for _ in 0..if lab.options.quick { FLAPS.1 } else { FLAPS.0 } {
                inject::wire_loss(&network.topology, links, 100.0)?;
                interrupt::sleep(DOWN)?;
                inject::wire_loss(&network.topology, links, 0.0)?;
                interrupt::sleep(UP)?;
            }
            None
        }
        Case::AllDown => {
            inject::wire_loss(&network.topology, &paths, 100.0)?;
            interrupt::sleep(ALL_DOWN)?;
            // A single change: only one rule is removed.
            inject::wire_loss(&network.topology, &paths[1..], 100.0)?;
            let returned = Instant::now();
            interrupt::sleep(RETURN_DELAY)?;
            inject::wire_loss(&network.topology, &[], 0.0)?;
            Some(returned)
        }
        Case::Killed => {
            let daemon =
                network.overlay.daemons.get_mut(1).ok_or_else(|| anyhow!("the network has no second daemon"))?;
            daemon.kill()?;
            interrupt::sleep(AWAY)?;
            let returned = Instant::now();
            daemon.start_again(&network.topology.hosts[1], &lab.binaries)?;
            daemon.wait_until_ready()?;
            Some(returned)
        }
    };
    interrupt::sleep(AFTERWARDS)?;
    Ok(Fault { since, returned })
}

/// Evaluates the requests of `clients` clients. The caller sets the fields about the measurement.
fn row(requests: &[Request], clients: u32, fault: &Fault) -> Row {
    let judged = || requests.iter().filter(|request| request.ended >= fault.since);
    let ms = |duration: Duration| duration.as_secs_f64() * 1000.0;
    let mut first = vec![None; clients as usize];
    for request in judged().filter(|request| request.answered) {
        let after = fault.returned.and_then(|returned| request.ended.checked_duration_since(returned));
        if let (Some(after), Some(own)) = (after, first.get_mut(request.client as usize)) {
            own.get_or_insert(ms(after));
        }
    }
    let every: Option<Vec<f64>> = first.iter().copied().collect();
    Row {
        mode: Mode::Bifrost,
        case: Case::OneFlaps,
        repetition: 0,
        requests: judged().count() as u64,
        failed_requests: judged().filter(|request| !request.answered).count() as u64,
        wrong_answers: 0,
        longest_ms: judged()
            .map(|request| ms(request.ended.saturating_duration_since(request.due)))
            .fold(0.0, f64::max),
        first_answer_ms: first.iter().flatten().copied().min_by(f64::total_cmp),
        every_client_ms: every.and_then(|every| every.into_iter().max_by(f64::total_cmp)),
        attempts: 1,
        standstill_ms: 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::to_values;

    #[test]
    fn answers_are_timed_from_the_return_on() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let request = |client, due, ended, answered| Request { client, due: at(due), ended: at(ended), answered };
        let requests = [
            request(0, 0, 90, true),
            request(0, 99, 104, true),
            request(1, 100, 200, false),
            request(1, 200, 300, false),
            request(0, 250, 330, true),
            request(0, 331, 332, true),
            request(1, 310, 345, true),
        ];
        let fault = |returned: Option<u64>| Fault { since: at(100), returned: returned.map(at) };
        let all = row(&requests, 2, &fault(Some(320)));
        assert_eq!((all.requests, all.failed_requests, all.longest_ms), (6, 2, 100.0));
        assert_eq!((all.first_answer_ms, all.every_client_ms), (Some(10.0), Some(25.0)));
        let late = row(&requests, 2, &fault(Some(340)));
        assert_eq!((late.first_answer_ms, late.every_client_ms), (Some(5.0), None), "one client has no answer");
        assert_eq!(row(&requests, 2, &fault(None)).first_answer_ms, None);
    }

    #[test]
    fn each_bar_can_fail() {
        let of = |case, change: fn(&mut Row)| {
            let mut row = Row {
                mode: Mode::Bifrost,
                case,
                repetition: 0,
                requests: 1000,
                failed_requests: 0,
                wrong_answers: 0,
                longest_ms: 9.0,
                first_answer_ms: Some(40.0),
                every_client_ms: Some(140.0),
                attempts: 1,
                standstill_ms: 0.0,
            };
            change(&mut row);
            row
        };
        let passed = |change: fn(&mut Row)| -> Vec<bool> {
            let rows = Case::ALL.map(|case| of(case, change));
            Outage.bars(&to_values(&rows).unwrap()).unwrap().iter().map(Bar::passes).collect()
        };
        assert_eq!(passed(|_| ()), [true; 16]);
        let flaps = |of: [bool; 3]| [of.repeat(4), vec![true; 4]].concat();
        assert_eq!(passed(|row| row.longest_ms = 10.0), flaps([false, true, true]));
        assert_eq!(passed(|row| row.failed_requests = 1), flaps([true, false, true]));
        assert_eq!(passed(|row| row.wrong_answers = 1), flaps([true, true, false]));
        let ends = |of: [bool; 4]| [vec![true; 12], of.to_vec()].concat();
        assert_eq!(passed(|row| row.first_answer_ms = Some(50.0)), ends([false, true, true, true]));
        assert_eq!(passed(|row| row.first_answer_ms = None), ends([false, true, false, true]));
        assert_eq!(passed(|row| row.every_client_ms = Some(300.0)), ends([true, false, true, false]));
        assert_eq!(Outage.bars(&[]).unwrap().iter().filter(|bar| bar.passes()).count(), 0);
    }

    #[test]
    fn the_report_has_a_line_for_each_case() {
        let rows = [Row {
            mode: Mode::KernelVxlan,
            case: Case::AllDown,
            repetition: 0,
            requests: 10,
            failed_requests: 7,
            wrong_answers: 0,
            longest_ms: 100.0,
            first_answer_ms: None,
            every_client_ms: None,
            attempts: 2,
            standstill_ms: 12.0,
        }];
        let report = Outage.report(&to_values(&rows).unwrap()).unwrap();
        assert!(report.contains("| all links down | kernel_vxlan |"), "{report}");
        assert!(report.contains("1 of 1 measurements were repeated") && !report.contains('\\'), "{report}");
    }
}
