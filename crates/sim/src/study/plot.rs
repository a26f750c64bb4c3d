//! Plots, as SVG: panels of lines over numbers or categories.

use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;

/// One panel.
#[derive(Clone, Debug, Default)]
pub(super) struct Panel {
    /// Title.
    pub(super) title: String,
    /// Titles of both axes.
    pub(super) axes: (String, String),
    /// Which axes are logarithmic.
    pub(super) log: (bool, bool),
    /// Labels of x = 0, 1, 2, …; empty where x is a number.
    pub(super) categories: Vec<String>,
    /// Lines by name.
    pub(super) lines: Vec<(String, Vec<(f64, f64)>)>,
}

impl Panel {
    /// A panel with linear axes.
    pub(super) fn new(title: &str, x: &str, y: &str) -> Self {
        Panel { title: title.into(), axes: (x.into(), y.into()), ..Panel::default() }
    }

    /// Sets logarithmic axes.
    pub(super) fn log(mut self, x: bool, y: bool) -> Self {
        self.log = (x, y);
        self
    }

    /// Makes x a category with these labels.
    pub(super) fn over(mut self, categories: impl IntoIterator<Item = impl ToString>) -> Self {
        self.categories = categories.into_iter().map(|c| c.to_string()).collect();
        self
    }

    /// Adds a line.
    pub(super) fn line(mut self, name: impl ToString, points: impl IntoIterator<Item = (f64, f64)>) -> Self {
        self.lines.push((name.to_string(), points.into_iter().collect()));
        self
    }
}

const WIDTH: u32 = 560;
const HEIGHT: u32 = 360;
/// Names of adjacent lines.
const LEGEND_COLUMNS: usize = 2;
const COLORS: [RGBColor; 8] = [
    RGBColor(0x1b, 0x9e, 0x77),
    RGBColor(0xd9, 0x5f, 0x02),
    RGBColor(0x75, 0x70, 0xb3),
    RGBColor(0xe7, 0x29, 0x8a),
    RGBColor(0x66, 0xa6, 0x1e),
    RGBColor(0xe6, 0xab, 0x02),
    RGBColor(0xa6, 0x76, 0x1d),
    RGBColor(0x44, 0x44, 0x44),
];

/// Draws panels, two side by side.
pub(super) fn draw(path: &Path, panels: &[Panel]) -> Result<()> {
    let columns = panels.len().clamp(1, 2);
    let rows = panels.len().div_ceil(columns).max(1);
    let size = (WIDTH * columns as u32, HEIGHT * rows as u32);
    let failed = |error: &dyn std::fmt::Display| anyhow!("drawing {}: {error}", path.display());
    let root = SVGBackend::new(path, size).into_drawing_area();
    root.fill(&WHITE).map_err(|e| failed(&e))?;
    for (area, panel) in root.split_evenly((rows, columns)).iter().zip(panels) {
        draw_panel(area, panel).map_err(|e| failed(&e))?;
    }
    root.present().map_err(|e| failed(&e))
}

/// The range of an axis for these values; whether the scale is logarithmic, and whether the range may exclude zero.
fn range(values: impl Iterator<Item = f64> + Clone, log: bool, away: bool) -> (f64, f64) {
    let values = values.filter(|v| v.is_finite() && (!log || *v > 0.0));
    let high = values.clone().fold(f64::NEG_INFINITY, f64::max);
    let low = values.fold(f64::INFINITY, f64::min);
    match (low.is_finite(), log) {
        (false, _) => (0.0, 1.0),
        (true, true) => (low.log10().floor(), high.log10().ceil().max(low.log10().floor() + 1.0)),
        // A time range far from zero.
        (true, false) if low > high * 0.5 && high > low && away => (low, high),
        (true, false) => (0.0f64.min(low), if high > 0.0 { high * 1.05 } else { 1.0 }),
    }
}

/// A number with as few digits as necessary.
fn short(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        v if v >= 1e6 => format!("{:.0}M", value / 1e6),
        v if v >= 1e4 => format!("{:.0}k", value / 1e3),
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 0.01 => format!("{value:.3}").trim_end_matches('0').trim_end_matches('.').to_string(),
        _ => format!("{value:.0e}"),
    }
}

fn draw_panel(area: &DrawingArea<SVGBackend<'_>, Shift>, panel: &Panel) -> Result<()> {
    let failed = |error: &dyn std::fmt::Display| anyhow!("{error}");
    let points = || panel.lines.iter().flat_map(|(_, line)| line.iter().copied());
    let (log_x, log_y) = panel.log;
    let (x0, x1) = match panel.categories.len() {
        0 => range(points().map(|p| p.0), log_x, true),
        n => (-0.3, n as f64 - 0.7),
    };
    let (y0, y1) = range(points().map(|p| p.1), log_y, false);
    let named = || panel.lines.iter().zip(COLORS.iter().cycle());
    let rows = panel.lines.len().div_ceil(LEGEND_COLUMNS) as i32;
    let (head, body) = area.split_vertically(28 + 16 * rows);
    let width = head.dim_in_pixel().0 as i32;
    head.draw_text(&panel.title, &("sans-serif", 17).into_text_style(&head), (70, 6)).map_err(|e| failed(&e))?;
    for (i, ((name, _), color)) in named().enumerate() {
        let (column, row) = (i % LEGEND_COLUMNS, (i / LEGEND_COLUMNS) as i32);
        let (x, y) = (70 + column as i32 * (width - 70) / LEGEND_COLUMNS as i32, 34 + 16 * row);
        head.draw(&PathElement::new([(x, y), (x + 16, y)], color.stroke_width(3))).map_err(|e| failed(&e))?;
        let style = ("sans-serif", 12).into_text_style(&head);
        head.draw_text(name, &style, (x + 22, y - 6)).map_err(|e| failed(&e))?;
    }
    let mut builder = ChartBuilder::on(&body);
    builder.margin(12).margin_top(4).x_label_area_size(40).y_label_area_size(60);
    let mut chart = builder.build_cartesian_2d(x0..x1, y0..y1).map_err(|e| failed(&e))?;
    let label = |v: f64, log: bool| match (log, (v - v.round()).abs() < 1e-6) {
        (true, true) => short(10f64.powf(v)),
        (true, false) => String::new(),
        (false, _) => short(v),
    };
    let x_label = |x: &f64| match panel.categories.as_slice() {
        [] => label(*x, log_x),
        names if (x - x.round()).abs() < 0.01 && *x > -0.01 => {
            names.get(x.round() as usize).cloned().unwrap_or_default()
        }
        _ => String::new(),
    };
    let y_label = |y: &f64| label(*y, log_y);
    chart
        .configure_mesh()
        .x_labels(if panel.categories.is_empty() { 10 } else { panel.categories.len() + 1 })
        .x_label_formatter(&x_label)
        .y_label_formatter(&y_label)
        .x_desc(&panel.axes.0)
        .y_desc(&panel.axes.1)
        .max_light_lines(1)
        .light_line_style(TRANSPARENT)
        .draw()
        .map_err(|e| failed(&e))?;
    for ((_, line), color) in panel.lines.iter().zip(COLORS.iter().cycle()) {
        let scale = |v: f64, log: bool| if log { v.max(1e-12).log10() } else { v };
        let line: Vec<(f64, f64)> = line
            .iter()
            .filter(|(x, y)| x.is_finite() && y.is_finite())
            .map(|(x, y)| (scale(*x, log_x), scale(*y, log_y).clamp(y0, y1)))
            .collect();
        if line.len() <= 20 {
            chart.draw_series(line.iter().map(|p| Circle::new(*p, 3, color.filled()))).map_err(|e| failed(&e))?;
        }
        chart.draw_series(LineSeries::new(line, color.stroke_width(2))).map_err(|e| failed(&e))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_all_kinds_of_panels() {
        let line = |p: Panel| p.line("a line", [(1.0, 0.5), (10.0, 300.0)]).line("nothing", []);
        let panels = [
            line(Panel::new("linear", "x", "y")),
            line(Panel::new("logarithmic", "x", "y").log(true, true)),
            Panel::new("categories", "x", "y").over(["zero", "one"]).line("b", [(0.0, 1.0), (1.0, 2.0)]),
            Panel::new("empty", "x", "y").log(true, true),
        ];
        let path = std::env::temp_dir().join(format!("bifrost-sim-plot-{}.svg", std::process::id()));
        draw(&path, &panels).expect("a plot");
        let text = std::fs::read_to_string(&path).expect("the plot");
        std::fs::remove_file(&path).expect("the plot exists");
        assert!(text.starts_with("<svg") && text.contains("a line") && text.contains("zero"));
    }
}
