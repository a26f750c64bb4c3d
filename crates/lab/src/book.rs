//! One report of all experiments: `report.md` and `index.html`, together with the plots.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use pulldown_cmark::{Options as Markdown, Parser, html};

use crate::command;
use crate::daemon::Binaries;
use crate::figures::{self, NOT_MEASURED};
use crate::frame::Experiment;
use crate::options::Options;
use crate::report::Table;
use crate::results::Results;
use crate::run;

/// An experiment and its outcome.
pub struct Chapter<'a> {
    /// The experiment.
    pub experiment: &'a dyn Experiment,
    /// The directory of its results.
    pub directory: PathBuf,
    /// Its results, or why there are none.
    pub results: Result<Results>,
}

impl Chapter<'_> {
    /// Number of cleared bars, and of all bars; `None` if nothing was measured.
    fn bars(&self) -> Option<(usize, usize)> {
        let bars = self.experiment.bars(&self.results.as_ref().ok()?.rows).ok()?;
        Some((bars.iter().filter(|bar| bar.passes()).count(), bars.len()))
    }

    /// Whether the experiment was measured and clears its bars.
    pub fn is_good(&self) -> bool {
        self.bars().is_some_and(|(cleared, all)| cleared == all)
    }
}

/// The style sheet of `index.html`.
const STYLE: &str = "body{font:16px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}\
    table{border-collapse:collapse;margin:1rem 0}td,th{border:1px solid #bbb;padding:.2rem .6rem}\
    code{background:#eee;padding:0 .2rem}img{max-width:100%}h2{margin-top:3rem;border-top:2px solid #ccc}";

/// A table with a row for each chapter.
pub fn overview(chapters: &[Chapter<'_>]) -> String {
    let mut table = Table::new(&["experiment", "figures", "bars cleared"]);
    for chapter in chapters {
        let figures: Vec<_> = figures::of(chapter.experiment.name()).iter().map(|figure| figure.name).collect();
        let bars = chapter.bars().map_or_else(|| "not measured".to_owned(), |(n, all)| format!("{n} of {all}"));
        table.row(vec![chapter.experiment.name().to_owned(), figures.join("; "), bars]);
    }
    table.render()
}

/// Writes a report of `chapters` into `directory`. `options` are those of all runs.
///
/// # Errors
/// Files that cannot be read or written.
pub fn write(chapters: &[Chapter<'_>], options: &Options, directory: &Path) -> Result<()> {
    fs::create_dir_all(directory).with_context(|| format!("creating {}", directory.display()))?;
    let mut text = format!(
        "# The figures, measured\n\nWhat the papers of BIFROST (NSDI'26, APNET'25), Triton (SIGCOMM'24) and Albatross \
         (SIGCOMM'25) show, measured on this machine by `bifrost-lab run all{}`.\n\n{}\n",
        if options.quick { " --quick" } else { "" },
        overview(chapters)
    );
    for chapter in chapters {
        text += &body(chapter, directory)?;
    }
    text += "## Figures that are not measured\n\n";
    for (figure, why) in NOT_MEASURED {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "- **{figure}**. {why}");
    }
    text += &computed(options);
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>The figures, \
         measured</title><style>{STYLE}</style></head><body>\n"
    );
    html::push_html(&mut page, Parser::new_ext(&text, Markdown::ENABLE_TABLES));
    page += "</body></html>\n";
    for (name, content) in [("report.md", &text), ("index.html", &page)] {
        let path = directory.join(name);
        fs::write(&path, content).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

/// What is computed from stated inputs, by the program that users have for it.
fn computed(options: &Options) -> String {
    let arguments = ["gw", "cost"];
    let printed = Binaries::find(&Options { modes: Vec::new(), ..options.clone() })
        .and_then(|binaries| command::run(&binaries.bifrostctl.to_string_lossy(), &arguments));
    let printed = printed.unwrap_or_else(|error| format!("Not computed: {error:#}\n"));
    format!(
        "\n## Figures that are computed\n\nSIGCOMM'25 figure 15 and table 6, from the paper's prices, powers and rates: \
         `bifrostctl gw cost`, whose options change the inputs.\n\n```text\n{}\n```\n",
        printed.trim_end()
    )
}

fn body(chapter: &Chapter<'_>, directory: &Path) -> Result<String> {
    let Chapter { experiment, results, .. } = chapter;
    let mut text = format!("\n## {}\n\n{}.\n\n", experiment.name(), experiment.summary());
    for figure in figures::of(experiment.name()) {
        let _ = writeln!(text, "- **{}**. {} *Here:* {}", figure.name, figure.claim, figure.differs);
    }
    let results = match results {
        Ok(results) => results,
        Err(error) => {
            let _ = writeln!(text, "\nNot measured: {error:#}");
            return Ok(text);
        }
    };
    let report = experiment.report(&results.rows)?;
    let plots = copied(chapter, results, directory)?;
    let _ = writeln!(
        text,
        "\n{report}\n{}**Bars**\n\n{}\n`{}`. {}",
        run::images(&plots),
        run::bars(*experiment, results)?,
        run::command(*experiment, &results.host.options)?,
        run::machine(&results.host)
    );
    Ok(text)
}

/// Copies the chapter's plots into `directory`; the experiment's name becomes a prefix of each file name.
fn copied(chapter: &Chapter<'_>, results: &Results, directory: &Path) -> Result<Vec<PathBuf>> {
    let plots = chapter.experiment.plots(&results.rows, &chapter.directory)?;
    let copy = |plot: PathBuf| {
        let file = plot.file_name().map_or(String::new(), |name| name.to_string_lossy().into_owned());
        let copy = directory.join(format!("{}-{file}", chapter.experiment.name()));
        fs::copy(&plot, &copy).with_context(|| format!("copying {}", plot.display()))?;
        Ok(copy)
    };
    plots.into_iter().map(copy).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::vectors::{Row, Switch, Vectors};
    use crate::results::{HostInfo, SCHEMA_VERSION, to_values};

    fn row(mode: Switch, packets_per_s: f64) -> Row {
        let (conversations, sessions, new_sessions_per_s) = (1, 1, None);
        Row { mode, conversations, repetition: 0, sessions, duration_s: 4.0, packets_per_s, new_sessions_per_s }
    }

    #[test]
    fn the_report_has_measured_and_missing_experiments() {
        let out = tempfile::tempdir().unwrap();
        // A program that prints its arguments.
        let bin_dir = out.path().join("bin");
        fs::create_dir(&bin_dir).unwrap();
        std::os::unix::fs::symlink("/bin/echo", bin_dir.join("bifrostctl")).unwrap();
        let options = Options { quick: true, bin_dir: Some(bin_dir), ..Options::default() };
        let options = run::settle(&Vectors, options).unwrap();
        let rows = to_values(&[row(Switch::Batches, 1e6), row(Switch::Vectors, 2e6)]).unwrap();
        let host = HostInfo::collect(&options);
        let results = Results { schema_version: SCHEMA_VERSION, experiment: "vectors".to_owned(), host, rows };
        let chapter = |results| Chapter { experiment: &Vectors, directory: out.path().to_path_buf(), results };
        let chapters = [chapter(Ok(results)), chapter(Err(anyhow::anyhow!("no <huge> pages")))];
        assert!(!chapters[0].is_good() && !chapters[1].is_good(), "Open vSwitch is missing");
        let directory = out.path().join("report");
        write(&chapters, &options, &directory).unwrap();
        let text = fs::read_to_string(directory.join("report.md")).unwrap();
        for part in [
            "| vectors    | SIGCOMM'24 figures 12 and 13 |       2 of 8 |",
            "| vectors    | SIGCOMM'24 figures 12 and 13 | not measured |",
            "![vectors-rate.svg](vectors-rate.svg)",
            "`sudo bifrost-lab run vectors --quick`",
            "Not measured: no <huge> pages",
            "- **NSDI'26 section 6.1.4, aggregation and pooling**",
            "SIGCOMM'25 figure 15 and table 6",
            "```text\ngw cost\n```",
        ] {
            assert!(text.contains(part), "{part} is not in:\n{text}");
        }
        assert!(directory.join("vectors-rate.svg").exists());
        let page = fs::read_to_string(directory.join("index.html")).unwrap();
        assert!(page.contains("<img src=\"vectors-rate.svg\"") && page.contains("<td>vectors</td>"));
    }
}
