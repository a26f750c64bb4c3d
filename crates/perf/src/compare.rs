//! The report of `scripts/demo-rdma.sh`: messages beside TCP, from JSON files that `bw`, `lat` and iperf3 wrote.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use plotters::prelude::*;
use serde_json::Value;

/// A bar: what is compared, what was measured, what it must reach.
struct Bar {
    what: &'static str,
    measured: f64,
    at_least: bool,
    bar: f64,
    unit: &'static str,
}

impl Bar {
    fn holds(&self) -> bool {
        if self.at_least { self.measured >= self.bar } else { self.measured <= self.bar }
    }
}

/// Losses that the script measures at: file names and labels.
const LOSSES: [(&str, &str); 2] = [("0", "no loss"), ("256", "1/256 lost")];

/// Reads `dir`, prints a table, writes `report.md`, `latency.svg` and `bandwidth.svg` there, and fails if a bar is missed.
pub(crate) fn run(dir: &Path) -> Result<()> {
    let read = |name: String| -> Result<Value> {
        let path = dir.join(format!("{name}.json"));
        let text = std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        serde_json::from_str(&text).with_context(|| format!("{} is no JSON", path.display()))
    };
    let number = |value: &Value, pointer: &str| -> Result<f64> {
        value.pointer(pointer).and_then(Value::as_f64).with_context(|| format!("no {pointer} in a report"))
    };
    let mut gbit = [[0.0; 2]; 2];
    let mut tail_ms = [[0.0; 2]; 2];
    let mut curves = Vec::new();
    let mut text = String::new();
    writeln!(text, "| loss | transport | bulk Gbit/s | calls/s | P50 ms | P99 ms | P99.9 ms | max ms |")?;
    writeln!(text, "|---|---|---:|---:|---:|---:|---:|---:|")?;
    for (at, (loss, label)) in LOSSES.into_iter().enumerate() {
        for (of, transport) in ["rdm", "tcp"].into_iter().enumerate() {
            let bandwidth = read(format!("bw-{transport}-{loss}"))?;
            // iperf3's own report, for TCP.
            gbit[at][of] = match number(&bandwidth, "/gbit_per_s") {
                Ok(gbit) => gbit,
                Err(_) => number(&bandwidth, "/end/sum_received/bits_per_second")? / 1e9,
            };
            let calls = read(format!("lat-{transport}-{loss}"))?;
            let ms = |key: &str| number(&calls, &format!("/latency_us/{key}")).map(|us| us / 1e3);
            tail_ms[at][of] = ms("p99_9")?;
            writeln!(
                text,
                "| {label} | {} | {:.2} | {:.0} | {:.3} | {:.3} | {:.3} | {:.3} |",
                ["messages", "TCP"][of],
                gbit[at][of],
                number(&calls, "/messages_per_s")?,
                ms("p50")?,
                ms("p99")?,
                tail_ms[at][of],
                ms("max")?
            )?;
            curves.push((format!("{}, {label}", ["messages", "TCP"][of]), distribution(&calls)));
        }
    }
    let [[lossless, tcp], [lossy, _]] = gbit;
    let [_, [tail, tcp_tail]] = tail_ms;
    let bars = [
        Bar {
            what: "bulk at 1/256 of its own without loss",
            measured: lossy / lossless,
            at_least: true,
            bar: 0.95,
            unit: "x",
        },
        Bar { what: "P99.9 of 32 KiB calls at 1/256", measured: tail, at_least: false, bar: 5.0, unit: "ms" },
        Bar { what: "that beside TCP's", measured: tail / tcp_tail, at_least: false, bar: 0.05, unit: "x" },
        Bar { what: "bulk without loss beside TCP's", measured: lossless / tcp, at_least: true, bar: 0.5, unit: "x" },
    ];
    writeln!(text)?;
    for bar in &bars {
        let (verdict, sign) = (if bar.holds() { "ok" } else { "MISSED" }, if bar.at_least { ">=" } else { "<=" });
        writeln!(text, "- {verdict}: {}: {:.3} {}, {sign} {} wanted", bar.what, bar.measured, bar.unit, bar.bar)?;
    }
    print!("{text}");
    std::fs::write(dir.join("report.md"), &text)?;
    plot(&dir.join("latency.svg"), &curves)?;
    println!("plot: {}", dir.join("latency.svg").display());
    let missed = bars.iter().filter(|bar| !bar.holds()).count();
    if missed > 0 {
        bail!("{missed} of {} bars are missed", bars.len());
    }
    Ok(())
}

/// Points of a latency distribution: one part in how many is slower, and ms.
fn distribution(report: &Value) -> Vec<(f64, f64)> {
    let points = report.pointer("/latency_us/distribution").and_then(Value::as_array).cloned().unwrap_or_default();
    let point = |point: &Value| Some((point.get(0)?.as_f64()?, point.get(1)?.as_f64()? / 1e3));
    let slower = |(share, ms): (f64, f64)| (share < 1.0 && ms > 0.0).then(|| (1.0 / (1.0 - share), ms));
    points.iter().filter_map(point).filter_map(slower).collect()
}

fn plot(path: &PathBuf, curves: &[(String, Vec<(f64, f64)>)]) -> Result<()> {
    let area = SVGBackend::new(path, (900, 540)).into_drawing_area();
    let all = || curves.iter().flat_map(|(_, points)| points.iter().copied());
    let right = all().map(|(x, _)| x).fold(10.0, f64::max);
    let (bottom, top) = all().fold((f64::MAX, 1.0), |(least, most), (_, y)| (y.min(least), y.max(most)));
    let draw = || -> Result<(), Box<dyn std::error::Error>> {
        area.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&area)
            .caption("Time of a call: 32 KiB there and back", ("sans-serif", 22))
            .margin(16)
            .x_label_area_size(44)
            .y_label_area_size(64)
            .build_cartesian_2d((1.0..right).log_scale(), (bottom * 0.8..top * 1.2).log_scale())?;
        chart.configure_mesh().x_desc("one call in ... is slower").y_desc("ms").draw()?;
        let colours = [&BLUE, &RED, &CYAN, &MAGENTA];
        for ((name, points), colour) in curves.iter().zip(colours) {
            chart
                .draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(2)))?
                .label(name.clone())
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], colour.stroke_width(2)));
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK)
            .draw()?;
        area.present()?;
        Ok(())
    };
    draw().map_err(|error| anyhow::anyhow!("drawing {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn latency(p99_9: f64) -> String {
        format!(
            r#"{{"messages_per_s": 10, "latency_us": {{"p50": 50, "p99": 90, "p99_9": {p99_9}, "max": 9000,
                "distribution": [[0.5, 50.0], [0.999, {p99_9}], [1.0, 9000.0]]}}}}"#
        )
    }

    #[test]
    fn each_bar_is_judged() {
        let dir = std::env::temp_dir().join(format!("bifrost-perf-compare-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a directory");
        let write = |name: &str, text: String| std::fs::write(dir.join(name), text).expect("a file");
        // Bulk with and without loss, TCP's; P99.9 of both with loss: does it hold?
        let cases = [
            (9.6, 10.0, 20.0, 4000.0, 90_000.0, true),
            (9.4, 10.0, 20.0, 4000.0, 90_000.0, false),
            (9.6, 10.0, 20.1, 4000.0, 90_000.0, false),
            (9.6, 10.0, 20.0, 5001.0, 900_000.0, false),
            (9.6, 10.0, 20.0, 4000.0, 79_000.0, false),
        ];
        for (lossy, lossless, tcp, tail, tcp_tail, holds) in cases {
            write("bw-rdm-0.json", format!(r#"{{"gbit_per_s": {lossless}}}"#));
            write("bw-rdm-256.json", format!(r#"{{"gbit_per_s": {lossy}}}"#));
            for loss in ["0", "256"] {
                let bits = tcp * 1e9;
                write(
                    &format!("bw-tcp-{loss}.json"),
                    format!(r#"{{"end": {{"sum_received": {{"bits_per_second": {bits}}}}}}}"#),
                );
            }
            write("lat-rdm-0.json", latency(100.0));
            write("lat-tcp-0.json", latency(100.0));
            write("lat-rdm-256.json", latency(tail));
            write("lat-tcp-256.json", latency(tcp_tail));
            assert_eq!(run(&dir).is_ok(), holds, "{lossy} {lossless} {tcp} {tail} {tcp_tail}");
        }
        assert!(std::fs::read_to_string(dir.join("latency.svg")).expect("a plot").contains("TCP, no loss"));
        std::fs::remove_dir_all(&dir).expect("its end");
    }
}
