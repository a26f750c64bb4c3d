//! `gateway-report`: shows the measurements of scripts/demo-gateway.sh as a table and a plot, and whether they are as
//! expected.

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context as _, Result, anyhow};
use plotters::prelude::*;
use serde_json::Value;

const RUNS: [(&str, &str); 3] =
    [("flows", "by flow"), ("sprayed", "sprayed"), ("limited", "sprayed, with the limiter")];
const TENANTS: [u32; 4] = [1, 2, 3, 4];
/// The tenant that sends a burst, and when it starts, s.
const BURSTING: u32 = 4;

/// One tenant in one run, as its receiver saw it.
struct Tenant {
    packets: u64,
    lost: u64,
    out_of_order: u64,
    /// Received packets per second, by second.
    series: Vec<(f64, f64)>,
}

fn main() -> ExitCode {
    let result = std::env::args().nth(1).context("usage: gateway-report DIR").and_then(|dir| report(Path::new(&dir)));
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("gateway-report: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn report(dir: &Path) -> Result<bool> {
    let mut good = true;
    let mut plots = Vec::new();
    println!("{:<26} {:>8} {:>10} {:>9} {:>8} {:>13}", "run", "tenant", "packets", "lost", "lost %", "out of order");
    for (run, title) in RUNS {
        let nicd = read(&dir.join(format!("{run}-nicd.json")))?;
        let began = first_start(dir, run)?;
        let mut lines = Vec::new();
        for number in TENANTS {
            let tenant = tenant(&read(&dir.join(format!("{run}-{number}.json")))?, began)
                .with_context(|| format!("{run}, tenant {number}"))?;
            let share = 100.0 * tenant.lost as f64 / tenant.packets.max(1) as f64;
            let name = if number == BURSTING { "4 (bursts)".to_owned() } else { number.to_string() };
            println!(
                "{title:<26} {name:>8} {:>10} {:>9} {share:>8.2} {:>13}",
                tenant.packets, tenant.lost, tenant.out_of_order
            );
            if run == "limited" && number != BURSTING {
                good &= tenant.lost == 0 && tenant.out_of_order == 0;
            }
            lines.push((number, tenant.series));
        }
        let pod = &nicd["pods"][0];
        let limited = pod["counters"]["refused_limited_packets"].as_u64().unwrap_or(0);
        let full = pod["counters"]["refused_ring_full_packets"].as_u64().unwrap_or(0)
            + pod["counters"]["refused_queue_full_packets"].as_u64().unwrap_or(0);
        let timed_out = pod["order"]["timed_out_packets"].as_u64().unwrap_or(0);
        let gw = read(&dir.join(format!("{run}-gw.json")))?;
        let workers: Vec<String> =
            gw["workers"].as_array().into_iter().flatten().map(|w| w["packets"].to_string()).collect();
        println!(
            "{:<26} workers {}; stopped at the door {limited}; no room {full}; timed out {timed_out}",
            "",
            workers.join(" + ")
        );
        plots.push((title, lines));
    }
    let file = dir.join("gateway.svg");
    draw(&file, &plots).map_err(|error| anyhow!("{}: {error}", file.display()))?;
    println!("\n{}", file.display());
    let verdict = if good { "good" } else { "BAD" };
    println!("with the limiter, the tenants that do not burst lost and reordered nothing: {verdict}");
    Ok(good)
}

fn read(path: &Path) -> Result<Value> {
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    serde_json::from_str(&text).with_context(|| path.display().to_string())
}

/// When the first tenant started, s.
fn first_start(dir: &Path, run: &str) -> Result<f64> {
    let first = read(&dir.join(format!("{run}-1.json")))?;
    first["start"]["timestamp"]["timesecs"].as_f64().context("iperf3 did not start; see the file")
}

fn tenant(client: &Value, began: f64) -> Result<Tenant> {
    let server = &client["server_output_json"];
    let sum = &server["end"]["sum"];
    let number = |value: &Value| value.as_u64().context("iperf3's receiver says nothing");
    let offset = client["start"]["timestamp"]["timesecs"].as_f64().unwrap_or(began) - began;
    let mut series = Vec::new();
    for interval in server["intervals"].as_array().context("no intervals")? {
        let interval = &interval["sum"];
        let (start, end) = (interval["start"].as_f64().unwrap_or(0.0), interval["end"].as_f64().unwrap_or(0.0));
        if end - start < 0.5 {
            continue;
        }
        let received = interval["packets"].as_f64().unwrap_or(0.0) - interval["lost_packets"].as_f64().unwrap_or(0.0);
        series.push((offset + end, received.max(0.0) / (end - start)));
    }
    let stream = &server["end"]["streams"][0]["udp"];
    let out_of_order = stream["out_of_order"].as_u64().unwrap_or(0);
    Ok(Tenant { packets: number(&sum["packets"])?, lost: number(&sum["lost_packets"])?, out_of_order, series })
}

/// By run: packets per second of each tenant.
type Plots<'a> = [(&'a str, Vec<(u32, Vec<(f64, f64)>)>)];

fn draw(file: &Path, plots: &Plots<'_>) -> Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::new(file, (1200, 420)).into_drawing_area();
    root.fill(&WHITE)?;
    for (area, (title, lines)) in root.split_evenly((1, plots.len())).iter().zip(plots) {
        let last = lines.iter().flat_map(|(_, points)| points).map(|p| p.0).fold(1.0, f64::max);
        let mut chart = ChartBuilder::on(area)
            .caption(*title, ("sans-serif", 18))
            .margin(12)
            .x_label_area_size(36)
            .y_label_area_size(56)
            .build_cartesian_2d(0.0..last, (100.0..50_000.0).log_scale())?;
        chart.configure_mesh().x_desc("s").y_desc("packets/s received").draw()?;
        for (number, points) in lines {
            let colour = Palette99::pick(*number as usize).to_rgba();
            let label = if *number == BURSTING { "tenant 4 (bursts)".to_owned() } else { format!("tenant {number}") };
            let points = points.iter().map(|(x, y)| (*x, y.max(100.0)));
            chart
                .draw_series(LineSeries::new(points, colour.stroke_width(2)))?
                .label(label)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour));
        }
        chart.configure_series_labels().background_style(WHITE.mix(0.8)).draw()?;
    }
    root.present()?;
    Ok(())
}
