//! Tables for `report.md`, padded so that they are readable on a terminal, too.

/// A Markdown table; the first column is left-aligned, the others right-aligned.
#[derive(Debug, Clone)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with the column titles `titles`.
    pub fn new(titles: &[&str]) -> Self {
        Self { rows: vec![titles.iter().map(ToString::to_string).collect()] }
    }

    /// Appends a row; it must have as many cells as the table has columns.
    pub fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// The table as text, with a newline at the end.
    pub fn render(&self) -> String {
        let columns = self.rows[0].len();
        let width = |column: usize| {
            self.rows.iter().map(|r| r.get(column).map_or(0, |c| c.chars().count())).max().unwrap_or(0).max(3)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let mut text = String::new();
        for (index, row) in self.rows.iter().enumerate() {
            for (column, width) in widths.iter().enumerate() {
                let cell = row.get(column).map_or("", String::as_str);
                text += &if column == 0 { format!("| {cell:<width$} ") } else { format!("| {cell:>width$} ") };
            }
            text += "|\n";
            if index == 0 {
                for (column, width) in widths.iter().enumerate() {
                    text += &if column == 0 {
                        format!("|{:-<1$}", "", width + 2)
                    } else {
                        format!("|{:-<1$}:", "", width + 1)
                    };
                }
                text += "|\n";
            }
        }
        text
    }
}

/// Formats a number with a readable number of digits.
pub fn number(value: f64) -> String {
    match value.abs() {
        _ if !value.is_finite() => "-".to_owned(),
        magnitude if magnitude >= 1000.0 => format!("{value:.0}"),
        magnitude if magnitude >= 100.0 => format!("{value:.1}"),
        magnitude if magnitude >= 10.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// `a / b` as a factor.
pub fn factor(a: f64, b: f64) -> String {
    let ratio = a / b;
    match ratio {
        _ if !ratio.is_finite() => "-".to_owned(),
        ratio if ratio >= 10.0 => format!("{ratio:.0}x"),
        ratio => format!("{ratio:.2}x"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_padded() {
        let mut table = Table::new(&["mode", "rps"]);
        table.row(vec!["off".to_owned(), "12345".to_owned()]);
        assert_eq!(table.render(), "| mode |   rps |\n|------|------:|\n| off  | 12345 |\n");
        assert_eq!([number(0.5), number(12.345), number(f64::NAN)], ["0.500", "12.35", "-"]);
        assert_eq!([factor(3.0, 2.0), factor(500.0, 2.0), factor(1.0, 0.0)], ["1.50x", "250x", "-"]);
    }
}
