//! Samples in the text format of Prometheus (OpenMetrics 1.0).

use std::collections::BTreeMap;
use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};

use crate::api::{Place, Sample};
use crate::counters::{self, Kind};

/// The format's media type.
pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// All samples of known counters, by name. `drop.no_buffer_packets` becomes `bifrost_drop_no_buffer_packets_total`;
/// times are in seconds.
///
/// # Errors
/// None in practice: writing to a string does not fail.
pub(super) fn exposition(samples: Vec<Sample>) -> Result<String, fmt::Error> {
    let mut families: BTreeMap<String, Vec<(Place, u64)>> = BTreeMap::new();
    for Sample { counter, at, value } in samples {
        families.entry(counter).or_default().push((at, value));
    }
    let mut registry = Registry::with_prefix("bifrost");
    registry.register_collector(Box::new(Snapshot(families)));
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry)?;
    Ok(text)
}

/// The counters of all workers at one time.
#[derive(Debug)]
struct Snapshot(BTreeMap<String, Vec<(Place, u64)>>);

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for (counter, places) in &self.0 {
            let Some(meaning) = counters::meaning(counter) else { continue };
            let (unit, scale) = unit(counter);
            let name = counter[..counter.len() - counters::unit(counter).len() - 1].replace('.', "_");
            let kind = if meaning.kind == Kind::Gauge { MetricType::Gauge } else { MetricType::Counter };
            let mut metric = encoder.encode_descriptor(&name, &help(&meaning), Some(&unit), kind)?;
            for (place, value) in places {
                let labels = labels(place);
                let metric = metric.encode_family(&labels)?;
                write(metric, meaning.kind, *value, scale)?;
            }
        }
        Ok(())
    }
}

fn write(mut metric: MetricEncoder<'_>, kind: Kind, value: u64, scale: Option<f64>) -> fmt::Result {
    match (kind, scale) {
        (Kind::Gauge, None) => metric.encode_gauge(&value),
        (Kind::Gauge, Some(scale)) => metric.encode_gauge(&(value as f64 / scale)),
        (_, None) => metric.encode_counter::<NoLabelSet, u64, u64>(&value, None),
        (_, Some(scale)) => metric.encode_counter::<NoLabelSet, f64, u64>(&(value as f64 / scale), None),
    }
}

/// The unit of a counter in Prometheus, and the divisor that converts to it.
fn unit(counter: &str) -> (Unit, Option<f64>) {
    match counters::unit(counter) {
        "ns" => (Unit::Seconds, Some(1e9)),
        "ppm" => (Unit::Other("ratio".to_owned()), Some(1e6)),
        "bytes" => (Unit::Bytes, None),
        unit => (Unit::Other(unit.to_owned()), None),
    }
}

fn help(meaning: &counters::Meaning) -> String {
    let text = if meaning.advice.is_empty() {
        format!("{}.", meaning.what)
    } else {
        let end = if meaning.advice.ends_with('?') { "" } else { "." };
        format!("{}. What to do: {}{end}", meaning.what, meaning.advice)
    };
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn labels(place: &Place) -> Vec<(&'static str, String)> {
    let labels = [
        ("worker", place.worker.map(|worker| worker.to_string())),
        ("port", place.port.clone()),
        ("peer", place.peer.clone()),
        ("path", place.path.map(|path| path.to_string())),
    ];
    labels.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_types_units_and_labels() {
        let worker = Place { worker: Some(0), ..Place::default() };
        let port = |name: &str| Place { port: Some(name.to_owned()), ..worker.clone() };
        let path = Place { peer: Some("b".to_owned()), path: Some(3), ..worker.clone() };
        let sample = |counter: &str, at: &Place, value| Sample { counter: counter.to_owned(), at: at.clone(), value };
        let text = exposition(vec![
            sample("avs.dropped_acl_packets", &port("web1"), 3),
            sample("avs.dropped_acl_packets", &port("x\"y"), u64::MAX),
            sample("datapath.busy_ns", &worker, 1_500_000_000),
            sample("datapath.loops", &worker, 7),
            sample("nobody.knows_packets", &worker, 7),
            sample("path.loss_ppm", &path, 250_000),
            sample("port.held_packets", &port("web1"), 4),
        ])
        .unwrap();
        for line in [
            "# TYPE bifrost_avs_dropped_acl_packets counter",
            "# UNIT bifrost_avs_dropped_acl_packets packets",
            "bifrost_avs_dropped_acl_packets_total{worker=\"0\",port=\"web1\"} 3",
            "bifrost_avs_dropped_acl_packets_total{worker=\"0\",port=\"x\\\"y\"} 18446744073709551615",
            "bifrost_datapath_busy_seconds_total{worker=\"0\"} 1.5",
            "bifrost_datapath_loops_total{worker=\"0\"} 7",
            "# TYPE bifrost_path_loss_ratio gauge",
            "bifrost_path_loss_ratio{worker=\"0\",peer=\"b\",path=\"3\"} 0.25",
            "bifrost_port_held_packets{worker=\"0\",port=\"web1\"} 4",
        ] {
            assert!(text.lines().any(|l| l == line), "{line}\n{text}");
        }
        let help = text.lines().find(|l| l.starts_with("# HELP bifrost_avs_dropped_acl_packets ")).unwrap();
        assert!(help.contains("denied by the network's ACL. What to do: see "), "{help}");
        assert!(text.ends_with("\n# EOF\n") && !text.contains("nobody"));
        assert_eq!(text.matches("# TYPE bifrost_avs_dropped_acl_packets ").count(), 1);
    }

    #[test]
    fn every_counter_has_a_unique_name() {
        let samples = counters::all().map(|(counter, _)| Sample { counter, ..Sample::default() });
        let text = exposition(samples.collect()).unwrap();
        let mut names: Vec<&str> = text.lines().filter_map(|l| l.strip_prefix("# TYPE ")?.split(' ').next()).collect();
        assert_eq!(names.len(), counters::all().count());
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), counters::all().count());
        let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        assert!(names.iter().all(|n| n.starts_with("bifrost_") && n.chars().all(allowed)), "{names:?}");
    }
}
