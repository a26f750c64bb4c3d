//! Under construction.
use crate::bars::Bar;
use crate::experiment::{Experiment, Lab};
use anyhow::{Result, bail};
use serde_json::Value;
use std::path::{Path, PathBuf};
/// Under construction.
#[derive(Debug, Clone, Copy)]
pub struct Soak;
impl Experiment for Soak {
    fn name(&self) -> &'static str {
        "soak"
    }
    fn summary(&self) -> &'static str {
        "under construction"
    }
    fn run(&self, _lab: &Lab) -> Result<Vec<Value>> {
        bail!("under construction")
    }
    fn report(&self, _rows: &[Value]) -> Result<String> {
        bail!("under construction")
    }
    fn plots(&self, _rows: &[Value], _directory: &Path) -> Result<Vec<PathBuf>> {
        bail!("under construction")
    }
    fn bars(&self, _rows: &[Value]) -> Result<Vec<Bar>> {
        bail!("under construction")
    }
}
