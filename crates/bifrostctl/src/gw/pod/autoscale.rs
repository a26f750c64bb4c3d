//! `bifrostctl gw pod autoscale`: as many pods as the load of a service needs.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use bifrost_control::api::{GatewayPod, PipelinePod};
use clap::Args;
use serde::Serialize;

use super::super::show::get;
use super::scaler::{Levels, Scaler, Step};
use super::{Created, MOST, Site, check_name, failure, of_service, read, to_scale};
use crate::failure::Failure;
use crate::output::Output;

#[derive(Debug, Args)]
pub(super) struct AutoscaleArgs {
    /// The service's name
    service: String,
    /// What the service's pods have in common
    #[arg(long, value_name = "FILE")]
    template: PathBuf,
    /// Add a pod from this mean load of the pods' workers on, percent
    #[arg(long, value_name = "PERCENT", default_value_t = 70, value_parser = clap::value_parser!(u8).range(2..=100))]
    high: u8,
    /// Remove a pod up to this mean load, percent, if the others stay below --high without it
    #[arg(long, value_name = "PERCENT", default_value_t = 30, value_parser = clap::value_parser!(u8).range(1..=99))]
    low: u8,
    /// How long the load has to be high
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u32).range(0..=86_400))]
    out_after: u32,
    /// How long the load has to be low
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u32).range(0..=86_400))]
    in_after: u32,
    /// Pods at least
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=i64::from(MOST)))]
    min: u16,
    /// Pods at most
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=i64::from(MOST)))]
    max: u16,
    /// Between two looks
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=3600))]
    interval: u16,
    /// Number of samples after which the command ends; by default it never ends
    #[arg(long, value_name = "N")]
    looks: Option<u64>,
    /// Only say what would be done
    #[arg(long)]
    dry_run: bool,
}

/// What was seen, and done about it: a line of output.
#[derive(Debug, Serialize)]
struct Look {
    pods: usize,
    /// Mean of all pods, percent.
    load_percent: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    created: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    deleted: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// What a pod has counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sample {
    workers: usize,
    busy_ns: u64,
    /// Packets dropped for want of room in its rings and order queues.
    no_room: u64,
}

impl Site {
    pub(super) fn autoscale(&self, args: &AutoscaleArgs, out: Output) -> Result<(), Failure> {
        if args.low >= args.high || args.min > args.max {
            let hint = "--low is below --high, and --min at most --max".to_owned();
            return Err(failure("autoscale", "the levels or limits contradict each other", hint));
        }
        check_name(&format!("{}-{}", args.service, args.max))?;
        read(&args.template)?;
        let seconds = |seconds: u32| Duration::from_secs(seconds.into());
        let mut scaler = Scaler::new(Levels {
            high: f64::from(args.high) / 100.0,
            low: f64::from(args.low) / 100.0,
            out_after: seconds(args.out_after),
            in_after: seconds(args.in_after),
            least: args.min.into(),
            most: args.max.into(),
        });
        let began = Instant::now();
        let (mut before, mut before_at) = (BTreeMap::new(), Instant::now());
        for number in 0.. {
            if args.looks.is_some_and(|looks| number > looks) {
                break;
            }
            let (now, now_at) = (self.samples(&args.service), Instant::now());
            // A pipeline or a pod that does not answer for a while is nothing that more pods would help.
            let Ok(now) = now else {
                std::thread::sleep(Duration::from_secs(args.interval.into()));
                continue;
            };
            if number > 0 {
                let load = load(&before, &now, now_at - before_at);
                let step = scaler.decide(began.elapsed(), now.len(), load);
                let look = self.act(args, step, &now, load);
                let quiet = step == Step::Stay && !out.json;
                if !quiet {
                    out.print_line(&look, |look| text(look, args.dry_run))?;
                }
            }
            (before, before_at) = (now, now_at);
            std::thread::sleep(Duration::from_secs(args.interval.into()));
        }
        Ok(())
    }

    /// What each pod of a service has counted.
    fn samples(&self, service: &str) -> Result<BTreeMap<String, Sample>, Failure> {
        let pods = self.pods()?;
        let pods = pods.iter().filter(|pod| of_service(service, &pod.name).is_some());
        pods.map(|pod| Ok((pod.name.clone(), sample(pod, &self.pod(&pod.name)?)))).collect()
    }

    fn act(&self, args: &AutoscaleArgs, step: Step, now: &BTreeMap<String, Sample>, load: f64) -> Look {
        let mut look = Look { pods: now.len(), load_percent: load * 100.0, created: None, deleted: None, error: None };
        let count = match step {
            Step::Stay => return look,
            Step::Out => now.len() + 1,
            Step::In => now.len() - 1,
        };
        let names: Vec<&str> = now.keys().map(String::as_str).collect();
        let (missing, surplus) = to_scale(&args.service, count as u16, &names);
        (look.created, look.deleted) = (missing.into_iter().next(), surplus.into_iter().next());
        if args.dry_run {
            return look;
        }
        // Sessions of hosts and switches go on with other pods before it ends.
        let deleted = look.deleted.as_ref().map_or(Ok(()), |name| self.drain(name).and_then(|()| self.delete(name)));
        let create = |name: &String| self.create(name, &read(&args.template)?, None, false);
        let created: Result<Option<Created>, Failure> = look.created.as_ref().map(create).transpose();
        look.error = deleted.err().or(created.err()).map(|error| error.to_string());
        look
    }
}

fn sample(pipeline: &PipelinePod, pod: &GatewayPod) -> Sample {
    Sample {
        workers: pod.workers.len(),
        busy_ns: pod.workers.iter().map(|worker| get(worker, "busy_ns")).sum(),
        no_room: get(&pipeline.counters, "refused_ring_full_packets")
            + get(&pipeline.counters, "refused_queue_full_packets"),
    }
}

/// The mean load of pods that were there before, 0 to 1. One that dropped packets for want of room has had more than it can do, whatever its workers were busy with.
fn load(before: &BTreeMap<String, Sample>, now: &BTreeMap<String, Sample>, time: Duration) -> f64 {
    let loads = now.iter().filter_map(|(name, now)| {
        let before = before.get(name)?;
        let all = time.as_nanos() as f64 * now.workers.max(1) as f64;
        // A pod that has started again counts from 0.
        let busy = now.busy_ns.saturating_sub(before.busy_ns) as f64 / all.max(1.0);
        Some(if now.no_room > before.no_room { busy.max(1.0) } else { busy.min(1.0) })
    });
    let loads: Vec<f64> = loads.collect();
    loads.iter().sum::<f64>() / loads.len().max(1) as f64
}

fn text(look: &Look, dry_run: bool) -> String {
    let would = if dry_run { "would be " } else { "" };
    let created = look.created.iter().map(|name| format!("{name} {would}created"));
    let deleted = look.deleted.iter().map(|name| format!("{name} {would}drained and deleted"));
    let errors = look.error.iter().map(|error| format!("that failed: {error}"));
    let what: Vec<String> = created.chain(deleted).chain(errors).collect();
    format!("{} pods, load {:.0} %: {}", look.pods, look.load_percent, what.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_load_is_that_of_pods_that_were_there() {
        const S: u64 = 1_000_000_000;
        let pods = |list: &[(&str, u64, u64)]| -> BTreeMap<String, Sample> {
            let sample = |(name, busy_ns, no_room): &(&str, u64, u64)| {
                ((*name).to_owned(), Sample { workers: 2, busy_ns: *busy_ns, no_room: *no_room })
            };
            list.iter().map(sample).collect()
        };
        let time = Duration::from_secs(2);
        let before = pods(&[("a", 10 * S, 0), ("b", 0, 7), ("d", 9 * S, 0)]);
        let now = pods(&[("a", 12 * S, 0), ("b", S, 7), ("c", 4 * S, 0)]);
        // Two workers have four seconds in two: half of it, and a quarter. Nobody knows of c yet.
        assert!((load(&before, &now, time) - 0.375).abs() < 1e-9);
        let full = pods(&[("a", 12 * S, 1), ("b", S, 7)]);
        assert!((load(&before, &full, time) - 0.625).abs() < 1e-9, "a lost packets");
        let again = pods(&[("a", S, 0)]);
        assert_eq!((load(&before, &again, time), load(&pods(&[]), &again, time)), (0.0, 0.0));
    }

    #[test]
    fn what_was_done_is_told() {
        let look = Look { pods: 2, load_percent: 81.0, created: Some("a-3".to_owned()), deleted: None, error: None };
        assert_eq!(text(&look, true), "2 pods, load 81 %: a-3 would be created");
        let failed = Look { error: Some("no address".to_owned()), ..look };
        assert_eq!(text(&failed, false), "2 pods, load 81 %: a-3 created, that failed: no address");
    }
}
