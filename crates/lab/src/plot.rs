//! Plots, as SVG.

use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;

use crate::options::Mode;
use crate::stats::{LatencyMs, Spread};

/// One panel of a plot.
#[derive(Debug, Clone, Default)]
pub struct Panel {
    /// The title above the panel.
    pub title: String,
    /// Title of the horizontal axis.
    pub x_title: String,
    /// Title of the vertical axis.
    pub y_title: String,
    /// Whether the vertical axis is logarithmic.
    pub log_y: bool,
    /// Labels of x = 0, 1, 2, ... if x is a category; empty if x is a number.
    pub categories: Vec<String>,
    /// The lines and their points.
    pub lines: Vec<(Series, Vec<(f64, f64)>)>,
    /// The range of the repetitions at x: minimum and maximum.
    pub whiskers: Vec<(Series, Vec<(f64, Spread)>)>,
    /// Vertical marks: position and label.
    pub marks: Vec<(f64, String)>,
}

impl Panel {
    /// A line for each of `series` over categories. Points without a `value` are left out.
    pub fn over<K: Copy, C: ToString>(
        title: &str,
        (x_title, categories): (&str, &[C]),
        (y_title, log_y): (&str, bool),
        series: &[(Series, K)],
        value: impl Fn(K, &C) -> Option<Spread>,
    ) -> Self {
        let measured = |(series, key): &(Series, K)| -> (Series, Vec<(f64, Spread)>) {
            let at = |(x, category)| Some((x as f64, value(*key, category)?));
            (*series, categories.iter().enumerate().filter_map(at).collect())
        };
        let whiskers: Vec<_> = series.iter().map(measured).filter(|(_, points)| !points.is_empty()).collect();
        let middle = |(x, spread): &(f64, Spread)| (*x, spread.median);
        Panel {
            title: title.to_owned(),
            x_title: x_title.to_owned(),
            y_title: y_title.to_owned(),
            log_y,
            categories: categories.iter().map(ToString::to_string).collect(),
            lines: whiskers.iter().map(|(series, points)| (*series, points.iter().map(middle).collect())).collect(),
            whiskers,
            marks: Vec::new(),
        }
    }

    /// A line for each mode over `losses`, percent.
    pub fn over_losses(
        title: &str,
        y: (&str, bool),
        losses: &[f64],
        value: impl Fn(Mode, f64) -> Option<Spread>,
    ) -> Self {
        let modes = Mode::ALL.map(|mode| (mode.into(), mode));
        Panel::over(title, ("packets lost [%]", losses), y, &modes, |mode, loss| value(mode, *loss))
    }

    /// Distributions of latencies side by side, from the mean to the maximum.
    pub fn of_latencies(title: &str, distributions: &[(Series, LatencyMs)]) -> Self {
        let line = |latency: &LatencyMs| -> Vec<(f64, f64)> {
            LatencyMs::FIELDS.iter().enumerate().map(|(x, (_, field))| (x as f64, field(latency))).collect()
        };
        Panel {
            title: title.to_owned(),
            x_title: "of all requests".to_owned(),
            y_title: "latency [ms]".to_owned(),
            log_y: true,
            categories: LatencyMs::FIELDS.iter().map(|(name, _)| (*name).to_owned()).collect(),
            lines: distributions.iter().map(|(series, latency)| (*series, line(latency))).collect(),
            ..Panel::default()
        }
    }
}

/// The meaning of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Series {
    /// The text in the legend.
    pub label: &'static str,
    color: RGBColor,
}

impl Series {
    /// The better one of two lines, in the color of [`Mode::Bifrost`].
    pub fn on(label: &'static str) -> Self {
        Series { label, color: color(Mode::Bifrost) }
    }

    /// The line that it is compared with.
    pub fn off(label: &'static str) -> Self {
        Series { label, color: color(Mode::KernelVxlan) }
    }

    /// A third line, in the color of [`Mode::Strict`].
    pub fn other(label: &'static str) -> Self {
        Series { label, color: color(Mode::Strict) }
    }

    /// A fourth line, in the color of [`Mode::OpenVswitch`].
    pub fn fourth(label: &'static str) -> Self {
        Series { label, color: color(Mode::OpenVswitch) }
    }
}

impl From<Mode> for Series {
    fn from(mode: Mode) -> Self {
        Series { label: label(mode), color: color(mode) }
    }
}

const WIDTH: u32 = 560;
const HEIGHT: u32 = 360;

/// Draws panels into `path`, in rows of `columns`.
pub fn draw(path: &Path, panels: &[Panel], columns: usize) -> Result<PathBuf> {
    let columns = columns.clamp(1, panels.len().max(1));
    let rows = panels.len().div_ceil(columns).max(1);
    // All legends have the height of the longest one, so that all axes are aligned.
    let legend = panels.iter().map(|panel| legend_height(panel.lines.len())).max().unwrap_or(0);
    let size = (WIDTH * u32::try_from(columns)?, (HEIGHT + legend) * u32::try_from(rows)?);
    let failed = |error: &dyn std::fmt::Display| anyhow!("drawing {}: {error}", path.display());
    let root = SVGBackend::new(path, size).into_drawing_area();
    root.fill(&WHITE).map_err(|e| failed(&e))?;
    for (area, panel) in root.split_evenly((rows, columns)).iter().zip(panels) {
        let (axes, below) = area.split_vertically(HEIGHT);
        draw_panel(&axes, panel).map_err(|e| failed(&e))?;
        draw_legend(&below, panel).map_err(|e| failed(&e))?;
    }
    root.present().map_err(|e| failed(&e))?;
    drop(root);
    Ok(path.to_path_buf())
}

fn color(mode: Mode) -> RGBColor {
    match mode {
        Mode::KernelVxlan => RGBColor(0xd9, 0x5f, 0x02),
        Mode::KernelBbr => RGBColor(0xe6, 0xab, 0x02),
        Mode::Mptcp => RGBColor(0xa6, 0x76, 0x1d),
        Mode::OpenVswitch => RGBColor(0xe7, 0x29, 0x8a),
        Mode::Flowlet => RGBColor(0x66, 0xa6, 0x1e),
        Mode::ProbeSwitch => RGBColor(0x66, 0x66, 0x66),
        Mode::Off => RGBColor(0x75, 0x70, 0xb3),
        Mode::Strict => RGBColor(0x1f, 0x78, 0xb4),
        Mode::Bifrost => RGBColor(0x1b, 0x9e, 0x77),
        Mode::BifrostXdp => RGBColor(0x00, 0x5a, 0x32),
    }
}

fn label(mode: Mode) -> &'static str {
    match mode {
        Mode::KernelVxlan => "kernel VXLAN",
        Mode::KernelBbr => "kernel VXLAN, BBR",
        Mode::Mptcp => "kernel VXLAN, MPTCP",
        Mode::OpenVswitch => "Open vSwitch, userspace",
        Mode::Off => "bifrostd, reliability off",
        Mode::Flowlet => "bifrostd, flowlets",
        Mode::ProbeSwitch => "probe and switch",
        Mode::Strict => "bifrostd, strict order",
        Mode::Bifrost => "bifrostd, reliability on",
        Mode::BifrostXdp => "bifrostd, AF_XDP",
    }
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Entries in a row of the legend, and the height of a row.
const LEGEND: (usize, u32) = (3, 20);

fn legend_height(entries: usize) -> u32 {
    entries.div_ceil(LEGEND.0) as u32 * LEGEND.1 + 8
}

/// Draws the legend, below the axes, where it hides nothing.
fn draw_legend(area: &Area<'_>, panel: &Panel) -> Result<()> {
    let failed = |error: &dyn std::fmt::Display| anyhow!("{error}");
    for (index, (of, _)) in panel.lines.iter().enumerate() {
        let (column, line) = ((index % LEGEND.0) as i32, (index / LEGEND.0) as i32);
        let (x, y) = (24 + column * (WIDTH as i32 - 24) / LEGEND.0 as i32, line * LEGEND.1 as i32 + 8);
        area.draw(&PathElement::new([(x, y), (x + 16, y)], of.color.stroke_width(2))).map_err(|e| failed(&e))?;
        area.draw(&Text::new(of.label, (x + 22, y - 7), ("sans-serif", 13))).map_err(|e| failed(&e))?;
    }
    Ok(())
}

/// A label of an axis, without the rounding errors of binary fractions.
fn label_of(value: f64) -> String {
    if value >= 10_000.0 { format!("{:.0}k", value / 1000.0) } else { format!("{}", (value * 1e6).round() / 1e6) }
}

fn draw_panel(area: &Area<'_>, panel: &Panel) -> Result<()> {
    let ends = |(x, spread): &(f64, Spread)| [(*x, spread.least), (*x, spread.most)];
    let whiskers = || panel.whiskers.iter().flat_map(move |(_, points)| points.iter().flat_map(ends));
    let lines = || panel.lines.iter().flat_map(|(_, line)| line.iter().copied());
    let points = || lines().chain(whiskers()).filter(|(_, y)| y.is_finite());
    // A coordinate far outside the axis range would overflow the pixel coordinate.
    let max_x = points().map(|p| p.0).chain(panel.marks.iter().map(|mark| mark.0)).fold(0.0, f64::max);
    let max_y = points().map(|p| p.1).fold(0.0, f64::max);
    let min_y = points().map(|p| p.1).filter(|y| *y > 0.0).fold(f64::INFINITY, f64::min);
    let x_range = if panel.categories.is_empty() {
        0.0..if max_x > 0.0 { max_x } else { 1.0 }
    } else {
        -0.3..max_x.max(0.0) + 0.3
    };
    if panel.log_y {
        let low = if min_y.is_finite() { 10f64.powf(min_y.log10().floor()) } else { 0.1 };
        let high = 10f64.powf(max_y.max(low * 10.0).log10().ceil());
        let chart = builder(area, panel).build_cartesian_2d(x_range, (low..high).log_scale());
        finish(chart.map_err(|e| anyhow!("{e}"))?, panel, (low, high))
    } else {
        let high = if max_y > 0.0 { max_y * 1.1 } else { 1.0 };
        let chart = builder(area, panel).build_cartesian_2d(x_range, 0.0..high);
        finish(chart.map_err(|e| anyhow!("{e}"))?, panel, (0.0, high))
    }
}

fn builder<'a, 'b>(area: &'a Area<'b>, panel: &Panel) -> ChartBuilder<'a, 'b, SVGBackend<'b>> {
    let mut builder = ChartBuilder::on(area);
    builder.caption(&panel.title, ("sans-serif", 18)).margin(12).x_label_area_size(40).y_label_area_size(64);
    builder
}

fn finish<'a, 'b: 'a, Y>(
    mut chart: ChartContext<'a, SVGBackend<'b>, Cartesian2d<plotters::coord::types::RangedCoordf64, Y>>,
    panel: &Panel,
    (low, high): (f64, f64),
) -> Result<()>
where
    Y: Ranged<ValueType = f64> + plotters::coord::ranged1d::ValueFormatter<f64>,
{
    let failed = |error: &dyn std::fmt::Display| anyhow!("{error}");
    let categories = panel.categories.clone();
    let x_label = move |x: &f64| match categories.as_slice() {
        [] => label_of(*x),
        names if (x - x.round()).abs() < 0.01 && *x > -0.01 => {
            names.get(x.round() as usize).cloned().unwrap_or_default()
        }
        _ => String::new(),
    };
    chart
        .configure_mesh()
        .x_labels(if panel.categories.is_empty() { 10 } else { panel.categories.len() + 1 })
        .x_label_formatter(&x_label)
        .y_label_formatter(&|y| label_of(*y))
        .x_desc(&panel.x_title)
        .y_desc(&panel.y_title)
        .light_line_style(WHITE)
        .draw()
        .map_err(|e| failed(&e))?;
    for (x, text) in &panel.marks {
        let line = [(*x, low), (*x, high)];
        chart.draw_series(LineSeries::new(line, BLACK.mix(0.35))).map_err(|e| failed(&e))?;
        let style = ("sans-serif", 12).into_font().color(&BLACK.mix(0.7));
        chart.draw_series([Text::new(text.clone(), (*x, high), style)]).map_err(|e| failed(&e))?;
    }
    for (of, line) in &panel.lines {
        let color = of.color;
        let series = LineSeries::new(line.iter().copied(), color.stroke_width(2));
        chart.draw_series(series).map_err(|e| failed(&e))?;
        if !panel.categories.is_empty() {
            let dots = line.iter().map(|point| Circle::new(*point, 3, color.filled()));
            chart.draw_series(dots).map_err(|e| failed(&e))?;
        }
    }
    for (of, points) in &panel.whiskers {
        for (x, spread) in points.iter().filter(|(_, spread)| spread.least < spread.most) {
            // A logarithmic axis cannot show zero.
            let from = (*x, spread.least.max(low));
            chart.draw_series(LineSeries::new([from, (*x, spread.most)], of.color)).map_err(|e| failed(&e))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_linear_and_logarithmic_panels() {
        let directory = tempfile::tempdir().unwrap();
        let panel = |log_y, categories: &[&str]| Panel {
            title: "P99.9".to_owned(),
            x_title: "loss".to_owned(),
            y_title: "ms".to_owned(),
            log_y,
            categories: categories.iter().map(ToString::to_string).collect(),
            lines: vec![
                (Mode::Bifrost.into(), vec![(0.0, 0.5), (1.0, 3.0)]),
                (Mode::KernelVxlan.into(), vec![(0.0, 0.4), (1.0, 210.0)]),
            ],
            whiskers: vec![(Mode::Bifrost.into(), vec![(1.0, Spread { median: 3.0, least: 0.0, most: 4.0 })])],
            marks: vec![(0.5, "failure".to_owned())],
        };
        let empty = Panel { lines: Vec::new(), whiskers: Vec::new(), ..panel(true, &[]) };
        let panels = [panel(true, &["0", "1"]), panel(false, &[]), empty];
        assert_eq!([0.1 + 0.2, 20_000.0, 0.0].map(label_of), ["0.3", "20k", "0"]);
        let path = draw(&directory.path().join("plot.svg"), &panels, 2).unwrap();
        let text = std::fs::read_to_string(path).unwrap();
        assert!(text.starts_with("<svg") && text.contains("kernel VXLAN") && text.contains("failure"));
    }
}
