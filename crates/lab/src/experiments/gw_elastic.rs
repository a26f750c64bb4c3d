//! `gw-elastic`: time until a new pod forwards, the cost of moving an address to another pod, and the time until the
//! switch avoids a pod that is gone.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bars::{Bar, Sense};
use crate::frame::Experiment;
use crate::gateway::fabric::{Fabric, Settings};
use crate::gateway::until::until;
use crate::interrupt;
use crate::lab::Lab;
use crate::options::Mode;
use crate::plot::{self, Panel, Series};
use crate::report::Table;
use crate::results::{from_values, to_values};
use crate::stats::{Spread, cell};

/// Probes per second while an address moves, and while a new pod is awaited.
const PROBES: u32 = 10_000;
const FEW_PROBES: u32 = 1000;
/// Number of pods of the service that is upgraded.
const SERVICE: u32 = 2;
/// Packets per second that a pod of the scaled service processes.
const CAPACITY: u32 = 7000;
/// Duration of the scaling, s.
const SCALING_S: u32 = 10;

/// Accessor of a field.
type Field = fn(&Row) -> f64;

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct GwElastic;

/// The form of pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pods {
    /// Containers of Podman.
    Podman,
}

/// The result for pods that are created, moved and lost.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The form of the pods.
    #[serde(rename = "mode")]
    pub pods: Pods,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Time from the command that creates the first pod until it is connected to the pipeline, ms.
    pub connected_ms: f64,
    /// Time from that command until the first packet has passed through the pod, which the switch sent by the pod's
    /// route, ms.
    pub first_packet_ms: f64,
    /// Duration of the move of the address to another pod, including all waiting, s.
    pub migration_s: f64,
    /// Probes sent meanwhile.
    pub sent_probes: u32,
    /// Probes lost, of these.
    pub lost_probes: u32,
    /// TCP streams that were open meanwhile.
    pub streams: u32,
    /// Streams that ended early or lacked bytes, of these.
    pub broken_streams: u32,
    /// Segments that the streams retransmitted.
    pub retransmitted_segments: u64,
    /// The longest time that a receiver waited for data, ms.
    pub stalled_ms: f64,
    /// TCP streams through NAT to the Internet that were open meanwhile.
    pub nat_streams: u32,
    /// Streams that ended early or lacked bytes, of these.
    pub broken_nat_streams: u32,
    /// Segments that they retransmitted.
    pub nat_retransmitted_segments: u64,
    /// NAT sessions that continued in the new pod.
    pub moved_sessions: u32,
    /// Connections through NAT that were started meanwhile.
    pub opened_connections: u32,
    /// Connections that were not open within ten seconds, of these.
    pub failed_connections: u32,
    /// The longest setup time of the other connections, ms.
    pub slowest_connection_ms: f64,
    /// Time from SIGSTOP of one of two pods until the switch sends no more packets to it, ms.
    pub hung_ms: f64,
    /// Probes lost, of 10,000 per second, when one of two pods is killed and restarts automatically.
    pub killed_lost_probes: u32,
    /// Number of pods of a service that a rolling upgrade replaced.
    pub upgraded_pods: u32,
    /// Duration of the upgrade, s.
    pub upgrade_s: f64,
    /// Probes lost meanwhile, of 10,000 per second.
    pub upgrade_lost_probes: u32,
    /// Share of the probes to an overloaded pod that were lost, percent.
    pub overload_lost_percent: f64,
    /// Time from the start of `autoscale` until the switch sends packets to a second pod, s.
    pub scale_out_s: f64,
    /// Number of pods afterwards.
    pub scaled_pods: u32,
    /// Share of probes lost then, percent.
    pub scaled_lost_percent: f64,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { connected_ms, first_packet_ms, sent_probes, lost_probes, hung_ms, killed_lost_probes, .. } = self;
        let Row { streams, broken_streams, retransmitted_segments, stalled_ms, .. } = self;
        let Row { nat_streams, broken_nat_streams, moved_sessions, .. } = self;
        let Row { opened_connections, failed_connections, slowest_connection_ms, .. } = self;
        let Row { upgraded_pods, upgrade_s, upgrade_lost_probes, scaled_pods, .. } = self;
        let Row { overload_lost_percent, scale_out_s, scaled_lost_percent, .. } = self;
        write!(
            f,
            "connected after {connected_ms:.0} ms, first packet after {first_packet_ms:.0} ms; moved: \
             {lost_probes} of {sent_probes} probes lost, {broken_streams} of {streams} streams broken \
             ({retransmitted_segments} segments retransmitted, {stalled_ms:.0} ms without any), {broken_nat_streams} of \
             {nat_streams} through the translation, of which {moved_sessions} sessions moved; {failed_connections} of \
             {opened_connections} new connections failed, the slowest took {slowest_connection_ms:.0} ms; one that hangs is \
             missed after {hung_ms:.0} ms, one that is killed costs {killed_lost_probes} probes; {upgraded_pods} pods \
             upgraded in {upgrade_s:.0} s: {upgrade_lost_probes} probes lost; overload: {overload_lost_percent:.1} % \
             lost, a second pod after {scale_out_s:.1} s, {scaled_lost_percent:.1} % lost with {scaled_pods}"
        )
    }
}

impl Experiment for GwElastic {
    fn name(&self) -> &'static str {
        "gw-elastic"
    }

    fn summary(&self) -> &'static str {
        "Gateway pods in containers behind BGP: how soon a new one works, an address moves, a lost one is missed"
    }

    /// None: it builds its own network.
    fn modes(&self) -> Vec<Mode> {
        Vec::new()
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let mut rows = Vec::new();
        for repetition in 0..lab.repetitions(3) {
            let row = measure(lab, repetition).with_context(|| format!("repetition {repetition}"))?;
            println!("{row}");
            rows.push(row);
        }
        to_values(&rows)
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut table = Table::new(&["what", "measured"]);
        let all: [(&str, Field); 25] = [
            ("`pod create` to connected [ms]", |row| row.connected_ms),
            ("`pod create` to first packet [ms]", |row| row.first_packet_ms),
            ("an address moves [s]", |row| row.migration_s),
            ("probes meanwhile", |row| row.sent_probes.into()),
            ("probes lost", |row| row.lost_probes.into()),
            ("TCP streams meanwhile", |row| row.streams.into()),
            ("TCP streams broken", |row| row.broken_streams.into()),
            ("segments that they retransmitted", |row| row.retransmitted_segments as f64),
            ("the longest time without a segment [ms]", |row| row.stalled_ms),
            ("TCP streams through the translation", |row| row.nat_streams.into()),
            ("TCP streams through the translation broken", |row| row.broken_nat_streams.into()),
            ("segments that these retransmitted", |row| row.nat_retransmitted_segments as f64),
            ("sessions of translation moved", |row| row.moved_sessions.into()),
            ("connections begun meanwhile", |row| row.opened_connections.into()),
            ("of these failed", |row| row.failed_connections.into()),
            ("the slowest of the others [ms]", |row| row.slowest_connection_ms),
            ("a pod that hangs is missed after [ms]", |row| row.hung_ms),
            ("probes lost when one of two pods is killed", |row| row.killed_lost_probes.into()),
            ("pods upgraded", |row| row.upgraded_pods.into()),
            ("that took [s]", |row| row.upgrade_s),
            ("probes lost during the upgrade", |row| row.upgrade_lost_probes.into()),
            ("probes lost by one pod under overload [%]", |row| row.overload_lost_percent),
            ("`autoscale` to packets for a second pod [s]", |row| row.scale_out_s),
            ("pods then", |row| row.scaled_pods.into()),
            ("probes lost then [%]", |row| row.scaled_lost_percent),
        ];
        for (what, field) in all {
            table.row(vec![what.to_owned(), cell(spread(&rows, field))]);
        }
        Ok(format!(
            "Pods are containers of Podman, made by `bifrostctl gw pod`. They announce an address to a proxy (FRR), \
             and that to a switch (FRR), whose kernel forwards probes to them. `gw pod migrate` moves the address while \
             {PROBES} probes a second and TCP streams are under way, eight within a VPC and eight to the Internet; \
             connections to the Internet are begun, too, one after the other. `gw pod upgrade` replaces {SERVICE} pods. \
             Last, {PROBES} probes a second go to a pod that takes {CAPACITY}, while `gw pod autoscale` runs for \
             {SCALING_S} s. BFD has intervals of 50 ms, and gives up after three. A pod that is \
             killed is started again by Podman. Medians, and in brackets the least and the most of the repetitions.\n\n{}",
            table.render()
        ))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let series = [(Series::off("connected"), false), (Series::on("first packet"), true)];
        let repetitions: Vec<u32> = rows.iter().map(|row| row.repetition).collect();
        let panel =
            Panel::over("a new pod", ("repetition", &repetitions), ("time [ms]", false), &series, |first, of| {
                let row = rows.iter().find(|row| row.repetition == *of)?;
                Spread::of([if first { row.first_packet_ms } else { row.connected_ms }].into_iter())
            });
        Ok(vec![plot::draw(&directory.join("elastic.svg"), &[panel], 1)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let most = |field: Field| spread(&rows, field).map(|spread| spread.most);
        let median = |field: Field| spread(&rows, field).map(|spread| spread.median);
        let upgraded = spread(&rows, |row| row.upgraded_pods.into()).map(|spread| spread.least);
        let least_probes = spread(&rows, |row| row.sent_probes.into()).map(|spread| spread.least);
        Ok(vec![
            Bar::new(
                "`pod create` to the first packet",
                most(|row| row.first_packet_ms),
                Sense::AtMost,
                10_000.0,
                "ms",
            ),
            Bar::new(
                "probes lost while an address moves",
                most(|row| row.lost_probes.into()),
                Sense::AtMost,
                0.0,
                "probes",
            )
            .exact(),
            Bar::new("probes meanwhile", least_probes, Sense::AtLeast, 20_000.0, "probes"),
            Bar::new(
                "TCP streams broken while an address moves",
                most(|row| row.broken_streams.into()),
                Sense::AtMost,
                0.0,
                "streams",
            )
            .exact(),
            Bar::new(
                "TCP streams through the translation broken while an address moves",
                most(|row| row.broken_nat_streams.into()),
                Sense::AtMost,
                0.0,
                "streams",
            )
            .exact(),
            Bar::new(
                "sessions of translation moved",
                spread(&rows, |row| row.moved_sessions.into()).map(|spread| spread.least),
                Sense::AtLeast,
                8.0,
                "sessions",
            ),
            Bar::new(
                "connections through the translation that fail while an address moves",
                most(|row| row.failed_connections.into()),
                Sense::AtMost,
                0.0,
                "connections",
            )
            .exact(),
            // Linux's minimum retransmission timeout: no stream has waited for one.
            Bar::new("a TCP stream stands still for", most(|row| row.stalled_ms), Sense::AtMost, 200.0, "ms"),
            Bar::new("a pod that hangs is missed after", median(|row| row.hung_ms), Sense::AtMost, 300.0, "ms"),
            // The number that would be lost in 300 ms if all packets went to that pod.
            Bar::new(
                "probes lost when one of two pods is killed",
                median(|row| row.killed_lost_probes.into()),
                Sense::AtMost,
                3000.0,
                "probes",
            ),
            Bar::new(
                "probes lost during a rolling upgrade",
                most(|row| row.upgrade_lost_probes.into()),
                Sense::AtMost,
                0.0,
                "probes",
            )
            .exact(),
            Bar::new("pods upgraded", upgraded, Sense::AtLeast, SERVICE.into(), "pods").exact(),
            Bar::new("`autoscale` to a second pod", most(|row| row.scale_out_s), Sense::AtMost, 10.0, "s"),
            Bar::new("lost after scaling out", most(|row| row.scaled_lost_percent), Sense::AtMost, 1.0, "%"),
        ])
    }
}

fn spread(rows: &[Row], field: Field) -> Option<Spread> {
    Spread::of(rows.iter().map(field))
}

fn measure(lab: &Lab, repetition: u32) -> Result<Row> {
    let fabric = Fabric::start(lab, &format!("elastic-{repetition}"), Settings::default())?;
    let ms = |duration: Duration| duration.as_secs_f64() * 1e3;

    let probes = fabric.probe(FEW_PROBES)?;
    let began = Instant::now();
    let created = std::thread::scope(|scope| {
        let create = scope.spawn(|| fabric.pod(&["create", "one"]));
        let first = until("the first packet comes", || Ok(probes.has_come().then(|| ms(began.elapsed()))));
        create.join().map(|created| (created, first))
    });
    let (created, first) = created.map_err(|_| anyhow::anyhow!("creating a pod panicked"))?;
    let connected_ms = created?["created"][0]["took_ms"].as_f64().context("how long it took")?;
    let first_packet_ms = first?;
    probes.stop()?;

    let watch = lab.seconds(5.0, 2.0).ceil().to_string();
    let streams = fabric.stream()?;
    let nat_streams = fabric.stream_outside()?;
    let openings = fabric.open_outside()?;
    let probes = fabric.probe(PROBES)?;
    interrupt::sleep(Duration::from_millis(500))?;
    let began = Instant::now();
    let migrated = fabric.pod(&["migrate", "one", "two", "--watch-seconds", &watch])?;
    let moved_sessions = migrated["created"][0]["sessions"].as_u64().context("how many sessions moved")? as u32;
    let migration_s = began.elapsed().as_secs_f64();
    interrupt::sleep(Duration::from_millis(500))?;
    let moved = probes.stop()?;
    let streamed = streams.stop()?;
    let nat_streamed = nat_streams.stop()?;
    let opened = openings.stop()?;

    fabric.pod(&["create", "three"])?;
    fabric.until_next_hops(2)?;
    fabric.until_watched("three")?;
    fabric.signal("three", Signal::STOP)?;
    let hung_ms = ms(fabric.until_next_hops(1)?);
    fabric.pod(&["delete", "three"])?;
    fabric.pod(&["create", "four"])?;
    fabric.until_next_hops(2)?;
    fabric.until_watched("four")?;
    let probes = fabric.probe(PROBES)?;
    interrupt::sleep(Duration::from_secs(1))?;
    fabric.signal("four", Signal::KILL)?;
    interrupt::sleep(Duration::from_secs(2))?;
    let killed = probes.stop()?;

    fabric.pod(&["scale", "svc", &SERVICE.to_string()])?;
    for name in ["two", "four"] {
        fabric.pod(&["drain", name])?;
        fabric.pod(&["delete", name])?;
    }
    fabric.until_next_hops(SERVICE as usize)?;
    let probes = fabric.probe(PROBES)?;
    interrupt::sleep(Duration::from_millis(500))?;
    let began = Instant::now();
    let upgrade = fabric.upgrade("svc", &watch)?;
    let upgrade_s = began.elapsed().as_secs_f64();
    interrupt::sleep(Duration::from_millis(500))?;
    let upgraded = probes.stop()?;
    drop(fabric);
    let scaled = scale(lab, repetition)?;
    Ok(Row {
        pods: Pods::Podman,
        repetition,
        connected_ms,
        first_packet_ms,
        migration_s,
        sent_probes: moved.sent,
        lost_probes: moved.lost(),
        streams: streamed.opened,
        broken_streams: streamed.broken,
        retransmitted_segments: streamed.retransmits,
        stalled_ms: ms(streamed.longest_stall),
        nat_streams: nat_streamed.opened,
        broken_nat_streams: nat_streamed.broken,
        nat_retransmitted_segments: nat_streamed.retransmits,
        moved_sessions,
        opened_connections: opened.tried,
        failed_connections: opened.failed,
        slowest_connection_ms: ms(opened.slowest),
        hung_ms,
        killed_lost_probes: killed.lost(),
        upgraded_pods: upgrade["created"].as_array().map_or(0, Vec::len) as u32,
        upgrade_s,
        upgrade_lost_probes: upgraded.lost(),
        overload_lost_percent: scaled.before,
        scale_out_s: scaled.out_s,
        scaled_pods: scaled.pods,
        scaled_lost_percent: scaled.after,
    })
}

/// The effect of additional pods on an overloaded service.
struct Scaled {
    before: f64,
    out_s: f64,
    pods: u32,
    after: f64,
}

fn scale(lab: &Lab, repetition: u32) -> Result<Scaled> {
    let settings = Settings { pod_packets_per_second: CAPACITY, ..Settings::default() };
    let fabric = Fabric::start(lab, &format!("scale-{repetition}"), settings)?;
    fabric.pod(&["scale", "svc", "1"])?;
    fabric.until_next_hops(1)?;
    let lost = |seconds: f64| -> Result<f64> {
        let probes = fabric.probe(PROBES)?;
        interrupt::sleep(Duration::from_secs_f64(seconds))?;
        let probed = probes.stop()?;
        Ok(100.0 * f64::from(probed.lost()) / f64::from(probed.sent.max(1)))
    };
    let before = lost(2.0)?;
    let probes = fabric.probe(PROBES)?;
    let began = Instant::now();
    let out_s = std::thread::scope(|scope| {
        let scaling = scope.spawn(|| fabric.autoscale("svc", SCALING_S));
        let second = until("the switch sends to a second pod", || Ok((fabric.next_hops()? > 1).then_some(())));
        let out_s = began.elapsed().as_secs_f64();
        scaling.join().map_err(|_| anyhow::anyhow!("scaling panicked"))??;
        second.map(|()| out_s)
    })?;
    probes.stop()?;
    interrupt::sleep(Duration::from_secs(1))?;
    let after = lost(3.0)?;
    Ok(Scaled { before, out_s, pods: fabric.next_hops()? as u32, after })
}
