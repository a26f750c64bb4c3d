//! Measurements and their bars.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

/// A report.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Report {
    /// The title.
    pub(crate) title: String,
    rows: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    what: String,
    value: f64,
    unit: &'static str,
    /// The bar: maximum value.
    #[serde(skip_serializing_if = "Option::is_none")]
    bar: Option<f64>,
}

impl Report {
    pub(crate) fn new(title: String) -> Report {
        Report { title, rows: Vec::new() }
    }

    /// Adds a value without a bar.
    pub(crate) fn tell(&mut self, what: &str, value: f64, unit: &'static str) {
        self.rows.push(Row { what: what.to_owned(), value, unit, bar: None });
    }

    /// Adds a value with a maximum.
    pub(crate) fn bar(&mut self, what: &str, value: f64, unit: &'static str, most: f64) {
        self.rows.push(Row { what: what.to_owned(), value, unit, bar: Some(most) });
    }

    /// Adds a distribution of times.
    pub(crate) fn times(&mut self, what: &str, times: &[Duration], bar: Option<f64>) {
        // Up to an hour, three digits.
        let Ok(mut histogram) = Histogram::<u64>::new_with_bounds(1, 3_600_000_000, 3) else { return };
        for time in times {
            histogram.saturating_record(u64::try_from(time.as_micros()).unwrap_or(u64::MAX).max(1));
        }
        let ms = |quantile: f64| histogram.value_at_quantile(quantile) as f64 / 1000.0;
        self.tell(&format!("{what}, P50"), ms(0.5), "ms");
        match bar {
            Some(most) => self.bar(&format!("{what}, P99"), ms(0.99), "ms", most),
            None => self.tell(&format!("{what}, P99"), ms(0.99), "ms"),
        }
        self.tell(&format!("{what}, longest"), ms(1.0), "ms");
    }

    pub(crate) fn is_met(&self) -> bool {
        self.rows.iter().all(|row| row.bar.is_none_or(|most| row.value <= most))
    }

    pub(crate) fn text(&self) -> String {
        let width = self.rows.iter().map(|row| row.what.len()).max().unwrap_or(0);
        let line = |row: &Row| {
            let judgement = match row.bar {
                Some(most) if row.value <= most => format!("  met: at most {most}"),
                Some(most) => format!("  MISSED: at most {most}"),
                None => String::new(),
            };
            let digits = usize::from(row.value.fract() != 0.0) * 2;
            format!("  {:width$}  {:>10.digits$} {}{judgement}", row.what, row.value, row.unit)
        };
        let lines: Vec<String> = self.rows.iter().map(line).collect();
        format!("{}\n{}", self.title, lines.join("\n"))
    }

    pub(crate) fn json(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_default()
    }
}

/// A progress bar.
pub(crate) fn progress(what: &str) -> indicatif::ProgressBar {
    let bar = indicatif::ProgressBar::new(0);
    let style = indicatif::ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len}");
    if let Ok(style) = style {
        bar.set_style(style);
    }
    bar.set_message(what.to_owned());
    bar
}
