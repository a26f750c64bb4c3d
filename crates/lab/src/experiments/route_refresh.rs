//! `route-refresh`: packets per second of a million conversations while every route changes, compared with Open
//! vSwitch with DPDK (Triton, figure 10).
//!
//! One switch on one processor, with connection tracking. The guest, `dpdk-testpmd`, has the other processor and
//! sends as fast as it can, a packet of each conversation in turn, so that nearly every packet's conversation misses
//! the processor's caches. VXLAN packets are counted and dropped at the far end of the underlay link.

use std::fmt::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::tunnel::{Bench, More, Running, Switch};
use crate::bars::{Bar, Sense};
use crate::frame::Experiment;
use crate::interrupt;
use crate::lab::Lab;
use crate::options::Mode;
use crate::plot::{self, Panel, Series};
use crate::report::Table;
use crate::results::from_values;
use crate::stats::{Spread, cell, mean, median_of, paired_ratio};
use crate::turns;

/// Number of the guest's conversations.
const SESSIONS: u32 = 1_000_000;
/// Number of routes: those of the conversations, and others.
const ROUTES: u32 = 100_000;
/// Addresses per route.
const ROUTE_SIZE: u32 = 256;
/// Interval of packet counts.
const BIN: Duration = Duration::from_millis(200);
/// Number of bins that are judged together: a second, as in the paper. A single bin also shows other work of the
/// machine.
const WINDOW: usize = 5;
/// Time from the start of the refresh until its effect must be over.
const BACK: Duration = Duration::from_secs(3);
/// Interval at which the switch is asked for its number of conversations while it learns them.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Timeout for the switch to learn the conversations.
const PATIENCE: Duration = Duration::from_secs(60);

/// Addresses in the flows that `dpdk-testpmd` generates: from one source to consecutive destinations, one per flow.
const GUEST: &str = "10.254.0.0";
const FIRST_REMOTE: u32 = 0x0afd_0000;
const REMOTE_MAC: &str = "00:01:02:03:04:01";

/// The rule at the far end.
const SINK: &str = "table netdev bifrost_lab_sink {\n chain sink {\n type filter hook ingress device u1 priority 0; policy drop;\n }\n}\n";

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct RouteRefresh;

/// The result of one refresh.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The switch.
    pub mode: Switch,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Conversations that the switch knew when the refresh began.
    pub sessions: u64,
    /// Rate at which the switch learned conversations, from the tenth to the ninetieth percent, 1/s. The first packet
    /// of each is evaluated by the rules, recorded and forwarded.
    #[serde(default)]
    pub new_sessions_per_s: Option<f64>,
    /// When the command that changes all routes was issued, and when it returned; s since the start of the first bin.
    pub refresh_s: [f64; 2],
    /// The end of each bin, s since the start of the first.
    pub bin_ends_s: Vec<f64>,
    /// Packets per second that arrived at the far end, for each bin.
    pub packets_per_s: Vec<f64>,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {:.3} million packets/s of {} conversations, then at least {:.0} %, later {:.0} %",
            self.mode,
            self.before() / 1e6,
            self.sessions,
            self.lowest_since(WINDOW),
            self.back()
        )
    }
}

impl Row {
    /// Rates of the bins whose start and end satisfy `within`.
    fn bins(&self, within: impl Fn(f64, f64) -> bool) -> Vec<f64> {
        let begins = std::iter::once(0.0).chain(self.bin_ends_s.iter().copied());
        let bins = begins.zip(&self.bin_ends_s).zip(&self.packets_per_s);
        bins.filter(|&((begin, &end), _)| within(begin, end)).map(|(_, &rate)| rate).collect()
    }

    /// Mean of the bins before the refresh, packets/s.
    fn before(&self) -> f64 {
        mean(&self.bins(|_, end| end <= self.refresh_s[0]))
    }

    /// The lowest mean of `bins` consecutive bins before the refresh, relative to the mean before, percent: the noise
    /// of the machine.
    fn lowest_before(&self, bins: usize) -> f64 {
        lowest(&self.bins(|_, end| end <= self.refresh_s[0]), bins) / self.before() * 100.0
    }

    /// The lowest mean of `bins` consecutive bins since the refresh, relative to the mean before, percent.
    fn lowest_since(&self, bins: usize) -> f64 {
        lowest(&self.bins(|_, end| end > self.refresh_s[0]), bins) / self.before() * 100.0
    }

    /// Mean of the bins that start at least [`BACK`] after the start of the refresh, relative to the mean before,
    /// percent.
    fn back(&self) -> f64 {
        mean(&self.bins(|begin, _| begin >= self.refresh_s[0] + BACK.as_secs_f64())) / self.before() * 100.0
    }
}

/// The lowest mean of `bins` consecutive rates.
fn lowest(rates: &[f64], bins: usize) -> f64 {
    rates.windows(bins).map(mean).reduce(f64::min).unwrap_or(f64::NAN)
}

impl Experiment for RouteRefresh {
    fn name(&self) -> &'static str {
        "route-refresh"
    }

    fn summary(&self) -> &'static str {
        "Packets per second of a million conversations while every route changes, compared with Open vSwitch with DPDK"
    }

    fn modes(&self) -> Vec<Mode> {
        vec![Mode::Off]
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let seconds = lab.seconds(10.0, 5.0);
        turns::alternate(lab.repetitions(3), &Switch::ALL, &["all routes change"], |mode, _, repetition| {
            measure(lab, *mode, repetition, seconds)
        })
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut table = Table::new(&[
            "switch",
            "conversations",
            "new ones a second",
            "million packets/s before",
            "lowest second before, %",
            "lowest second since, %",
            "lowest 200 ms before, %",
            "lowest 200 ms since, %",
            "3 s after the beginning, %",
            "the refresh took, s",
        ]);
        for mode in Switch::ALL {
            let of = |field: fn(&Row) -> f64| cell(Spread::of(rows.iter().filter(|r| r.mode == mode).map(field)));
            table.row(vec![
                mode.to_string(),
                of(|r| r.sessions as f64),
                of(|r| r.new_sessions_per_s.unwrap_or(f64::NAN)),
                of(|r| r.before() / 1e6),
                of(|r| r.lowest_before(WINDOW)),
                of(|r| r.lowest_since(WINDOW)),
                of(|r| r.lowest_before(1)),
                of(|r| r.lowest_since(1)),
                of(Row::back),
                of(|r| r.refresh_s[1] - r.refresh_s[0]),
            ]);
        }
        Ok(format!(
            "A guest sends frames of 64 bytes as fast as it can, one of each of {SESSIONS} conversations in turn, \
             through a switch with connection tracking and {ROUTES} routes into VXLAN. Then every route changes to \
             another host. Packets that leave are counted each {} ms; percentages are relative to the mean before the \
             refresh. One processor for the switch and everything that it runs, one for the guest. Medians, with the \
             minimum and maximum of the repetitions in brackets.\n\n{}",
            BIN.as_millis(),
            table.render()
        ))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let row = |mode| rows.iter().find(|row| row.mode == mode);
        let line = |mode| -> Vec<(f64, f64)> {
            let Some(row) = row(mode) else { return Vec::new() };
            let rates = row.packets_per_s.iter().map(|rate| rate / 1e6);
            // The refresh starts at 0.
            row.bin_ends_s.iter().map(|end| end - row.refresh_s[0]).zip(rates).collect()
        };
        let panel = Panel {
            title: "all routes change at 0, first repetition".to_owned(),
            x_title: "time, s".to_owned(),
            y_title: "million packets/s".to_owned(),
            lines: vec![
                (Series::on("bifrostd"), line(Switch::Off)),
                (Series::off("Open vSwitch with DPDK"), line(Switch::OvsDpdk)),
            ],
            marks: vec![(0.0, "refresh".to_owned())],
            ..Panel::default()
        };
        Ok(vec![plot::draw(&directory.join("rate.svg"), &[panel], 1)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let worst = |field: fn(&Row) -> f64| {
            rows.iter().filter(|row| row.mode == Switch::Off).map(field).reduce(|a, b| if a < b { a } else { b })
        };
        let middle = |field: fn(&Row) -> f64| median_of(rows.iter().filter(|row| row.mode == Switch::Off).map(field));
        let is = |mode| move |row: &Row| row.mode == mode && row.new_sessions_per_s.is_some();
        let new = paired_ratio(
            &rows,
            |r| r.repetition,
            (is(Switch::Off), is(Switch::OvsDpdk)),
            |r| r.new_sessions_per_s.unwrap_or(f64::NAN),
        );
        // One conversation is addressed to the guest itself.
        let sessions = f64::from(SESSIONS - 1);
        Ok(vec![
            Bar::new(
                "conversations when the refresh began",
                worst(|r| r.sessions as f64),
                Sense::AtLeast,
                sessions,
                "sessions",
            )
            .exact(),
            Bar::new("new conversations a second, over Open vSwitch with DPDK", new, Sense::AtLeast, 2.0, "x"),
            Bar::new(
                "lowest second since the refresh began, of the mean before",
                middle(|r| r.lowest_since(WINDOW)),
                Sense::AtLeast,
                75.0,
                "%",
            ),
            Bar::new(
                "rate 3 s after the refresh began, of the mean before",
                middle(Row::back),
                Sense::AtLeast,
                95.0,
                "%",
            ),
        ])
    }
}

/// Prefixes of all routes; those of the conversations come first.
fn prefixes() -> impl Iterator<Item = String> {
    let size = 32 - ROUTE_SIZE.trailing_zeros();
    (0..ROUTES).map(move |n| format!("{}/{size}", std::net::Ipv4Addr::from(FIRST_REMOTE + n * ROUTE_SIZE)))
}

/// Open vSwitch's OpenFlow rules: connection tracking, then a route by destination, to one of the two peers.
fn flows(far: usize) -> String {
    let mut text = "table=0,priority=10,in_port=1,ip,ct_state=-trk,actions=ct(table=1)\n\
                    table=1,priority=10,ip,ct_state=+trk+new,actions=ct(commit),resubmit(,2)\n\
                    table=1,priority=10,ip,ct_state=+trk-new,actions=resubmit(,2)\n"
        .to_owned();
    for prefix in prefixes() {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "table=2,priority=10,ip,nw_dst={prefix},actions=output:{}", 2 + far);
    }
    text
}

/// The daemon's configuration: a security group that lets the guest start any conversation, and routes to one of the
/// two peers.
fn configuration(far: usize) -> More {
    let mut routes = String::new();
    for prefix in prefixes() {
        // Writing to a string cannot fail.
        let _ = write!(
            routes,
            "[[route]]\nvni = 100\nprefix = \"{prefix}\"\npeer = \"far{far}\"\nmac = \"{REMOTE_MAC}\"\n"
        );
    }
    let sessions = "[sessions]\nper_port = 1048576\n\n[[security_group]]\nname = \"guests\"\n\n";
    let port = "security_groups = [\"guests\"]\n";
    More { sections: sessions.to_owned(), guest: GUEST, port: port.to_owned(), routes }
}

fn measure(lab: &Lab, mode: Switch, repetition: u32, seconds: f64) -> Result<Row> {
    let logs = lab.logs(&format!("{mode}-{repetition}"));
    let bench = Bench::build(lab, SINK)?;
    let mut switch = bench.start(lab, mode, &flows(0), &configuration(0), &logs)?;
    if let Running::Ovs(switch) = &switch {
        switch.tell(&["dpctl/ct-set-maxconns", &(2 * SESSIONS).to_string()])?;
    }
    let mut guest = bench.guest(&["--forward-mode=flowgen", &format!("--flowgen-flows={SESSIONS}")], &logs)?;
    guest.tell("start")?;
    let deadline = Instant::now() + PATIENCE;
    let mut learnt = Vec::new();
    while learnt.last().is_none_or(|&(_, known)| known < u64::from(SESSIONS - 1)) && Instant::now() < deadline {
        switch.check_alive()?;
        learnt.push((Instant::now(), switch.sessions()?));
        interrupt::sleep(POLL_INTERVAL)?;
    }
    let changed = flows(1);
    if let Running::Bifrost { .. } = &switch {
        bench.configure(&configuration(1), &logs)?;
    }
    interrupt::sleep(Duration::from_secs(1))?;
    let sessions = switch.sessions()?;

    let stop = Arc::new(AtomicBool::new(false));
    let counting = bench.host.spawn({
        let stop = Arc::clone(&stop);
        move || count(&stop)
    })?;
    let refreshed = || -> Result<[Instant; 2]> {
        interrupt::sleep(Duration::from_secs_f64(seconds))?;
        let began = Instant::now();
        switch.change(&changed)?;
        let ended = Instant::now();
        interrupt::sleep((began + BACK + Duration::from_secs_f64(seconds)).saturating_duration_since(ended))?;
        Ok([began, ended])
    }();
    stop.store(true, Ordering::Relaxed);
    let Ok(counts) = counting.join() else { bail!("the thread that counts packets panicked") };
    let (counts, refreshed) = (counts?, refreshed?);
    switch.check_alive()?;
    guest.tell("stop")?;
    let Some(&(first, _)) = counts.first() else { bail!("packets were not counted") };
    let since = |at: Instant| at.duration_since(first).as_secs_f64();
    let rate =
        |pair: &[(Instant, u64)]| (pair[1].1 - pair[0].1) as f64 / pair[1].0.duration_since(pair[0].0).as_secs_f64();
    let row = Row {
        mode,
        repetition,
        sessions,
        new_sessions_per_s: pace(&learnt, SESSIONS),
        refresh_s: refreshed.map(since),
        bin_ends_s: counts.iter().skip(1).map(|&(at, _)| since(at)).collect(),
        packets_per_s: counts.windows(2).map(rate).collect(),
    };
    if row.before() == 0.0 {
        bail!("no packet leaves the switch (see {})", logs.display());
    }
    Ok(row)
}

/// Rate at which `sessions` conversations were learned, 1/s, between a tenth and nine tenths of them.
pub(super) fn pace(learnt: &[(Instant, u64)], sessions: u32) -> Option<f64> {
    let at = |share: u64| learnt.iter().find(|(_, known)| *known >= u64::from(sessions) * share / 10);
    let ((from, few), (to, most)) = at(1).zip(at(9))?;
    let took = to.duration_since(*from).as_secs_f64();
    (took > 0.0).then(|| (most - few) as f64 / took)
}

/// Samples of the packets that arrived at the far end so far.
fn count(stop: &AtomicBool) -> Result<Vec<(Instant, u64)>> {
    let mut counts = Vec::new();
    let mut next = Instant::now();
    while !stop.load(Ordering::Relaxed) {
        let text = std::fs::read_to_string("/proc/thread-self/net/dev").context("reading counts of devices")?;
        counts.push((Instant::now(), received(&text, "u1").context("the far end of the underlay link is missing")?));
        next += BIN;
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    Ok(counts)
}

/// Packets that `device` has received, from the text of `/proc/net/dev`.
fn received(text: &str, device: &str) -> Option<u64> {
    let of =
        |line: &str| line.trim_start().strip_prefix(device)?.strip_prefix(':')?.split_whitespace().nth(1)?.parse().ok();
    text.lines().find_map(of)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::to_values;

    /// A refresh at 1 s. The rate is 1000 before, `lowest` in the second after it, and `back` from 3 s later on.
    fn row(lowest: f64, back: f64) -> Row {
        let ends: Vec<f64> = (1..=50).map(|bin| f64::from(bin) / 5.0).collect();
        let rate = |&end: &f64| match end {
            end if end <= 1.0 => 1000.0,
            end if end <= 2.1 => lowest,
            end if end > 4.1 => back,
            _ => 990.0,
        };
        Row {
            mode: Switch::Off,
            repetition: 0,
            sessions: 999_999,
            new_sessions_per_s: Some(2e5),
            refresh_s: [1.0, 2.0],
            packets_per_s: ends.iter().map(rate).collect(),
            bin_ends_s: ends,
        }
    }

    #[test]
    fn each_bar_can_fail() {
        let passed = |row: Row| -> Vec<bool> {
            let other = Row { mode: Switch::OvsDpdk, new_sessions_per_s: Some(1e5), ..row.clone() };
            RouteRefresh.bars(&to_values(&[other, row]).unwrap()).unwrap().iter().map(Bar::passes).collect()
        };
        assert_eq!(passed(row(760.0, 960.0)), [true; 4]);
        assert_eq!(passed(row(740.0, 960.0)), [true, true, false, true]);
        assert_eq!(passed(row(760.0, 940.0)), [true, true, true, false]);
        assert_eq!(passed(Row { sessions: 999_998, ..row(760.0, 960.0) }), [false, true, true, true]);
        assert_eq!(passed(Row { new_sessions_per_s: Some(1.9e5), ..row(760.0, 960.0) }), [true, false, true, true]);
        assert_eq!(passed(Row { mode: Switch::OvsDpdk, ..row(760.0, 960.0) }), [false; 4]);
    }

    #[test]
    fn the_pace_excludes_start_and_end() {
        let start = Instant::now();
        let at = |seconds, known| (start + Duration::from_secs(seconds), known);
        let learnt = [at(0, 0), at(5, 99_999), at(6, 200_000), at(7, 600_000), at(8, 900_000), at(20, 1_000_000)];
        assert_eq!(pace(&learnt, SESSIONS), Some(350_000.0));
        assert_eq!(pace(&learnt[..4], SESSIONS), None, "it never reached nine tenths");
        assert_eq!(pace(&[at(0, 1_000_000)], SESSIONS), None, "in no time");
    }

    #[test]
    fn every_conversation_has_a_route() {
        let all: Vec<String> = prefixes().collect();
        assert_eq!((all[0].as_str(), all.len()), ("10.253.0.0/24", ROUTES as usize));
        let last = std::net::Ipv4Addr::from(FIRST_REMOTE + SESSIONS - 1).octets();
        assert!(all.contains(&format!("{}.{}.{}.0/24", last[0], last[1], last[2])));
    }

    #[test]
    fn device_counters_are_parsed() {
        let text =
            "Inter-|   Receive\n face |bytes    packets errs\n    lo: 9 8 0\n    u1: 1234 56 0 0\n   u10: 5 6 0\n";
        assert_eq!((received(text, "u1"), received(text, "u10"), received(text, "u2")), (Some(56), Some(6), None));
    }
}
