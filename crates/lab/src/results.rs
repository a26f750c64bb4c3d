//! `results.json`: what every experiment writes (schema: `docs/results.schema.json`).

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::options::Options;

/// The version of the schema that this program writes and reads.
pub const SCHEMA_VERSION: u32 = 1;

/// The whole file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// The experiment's name.
    pub experiment: String,
    /// The machine and the settings.
    pub host: HostInfo,
    /// One object per measurement; its fields depend on the experiment.
    pub rows: Vec<Value>,
}

/// The machine that measured, and its settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HostInfo {
    /// Name of the machine.
    pub hostname: String,
    /// Model of its processor.
    pub cpu_model: String,
    /// Number of processors.
    pub cpus: u32,
    /// Size of its memory, bytes.
    pub memory_bytes: u64,
    /// Kernel release.
    pub kernel: String,
    /// Version of bifrost-lab.
    pub lab_version: String,
    /// The options of the run.
    pub options: Options,
}

impl HostInfo {
    /// Collects the machine's properties.
    pub fn collect(options: &Options) -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let field = |text: &str, key: &str| {
            let line = text.lines().find(|line| line.starts_with(key)).unwrap_or_default();
            line.split_once(':').map_or(String::new(), |(_, value)| value.trim().to_owned())
        };
        let kib = field(&read("/proc/meminfo"), "MemTotal");
        Self {
            hostname: read("/proc/sys/kernel/hostname").trim().to_owned(),
            cpu_model: field(&read("/proc/cpuinfo"), "model name"),
            cpus: std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(u32::MAX)),
            memory_bytes: kib.trim_end_matches(" kB").parse::<u64>().unwrap_or(0) * 1024,
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            lab_version: env!("CARGO_PKG_VERSION").to_owned(),
            options: options.clone(),
        }
    }
}

impl Results {
    /// Writes the file into `directory`.
    pub fn write(&self, directory: &Path) -> Result<()> {
        let path = directory.join("results.json");
        let text = serde_json::to_string_pretty(self).context("serializing the results")?;
        fs::write(&path, text + "\n").with_context(|| format!("writing {}", path.display()))
    }

    /// Reads the file in `directory` and checks that it is from `experiment`.
    pub fn read(directory: &Path, experiment: &str) -> Result<Self> {
        let path = directory.join("results.json");
        let hint = || format!("reading {} (`bifrost-lab run {experiment} --out DIR` writes it)", path.display());
        let text = fs::read_to_string(&path).with_context(hint)?;
        let results: Self = serde_json::from_str(&text).with_context(|| format!("{} is malformed", path.display()))?;
        if results.schema_version != SCHEMA_VERSION {
            bail!("{} has schema version {}, not {SCHEMA_VERSION}", path.display(), results.schema_version);
        }
        if results.experiment != experiment {
            bail!("{} is from experiment `{}`, not `{experiment}`", path.display(), results.experiment);
        }
        Ok(results)
    }
}

/// Converts rows to the form in `results.json`.
pub fn to_values<R: Serialize>(rows: &[R]) -> Result<Vec<Value>> {
    rows.iter().map(|row| serde_json::to_value(row).context("serializing a row")).collect()
}

/// Converts rows of `results.json` to an experiment's own type.
pub fn from_values<R: DeserializeOwned>(rows: &[Value]) -> Result<Vec<R>> {
    rows.iter()
        .enumerate()
        .map(|(index, row)| serde_json::from_value(row.clone()).with_context(|| format!("rows[{index}] is malformed")))
        .collect()
}
