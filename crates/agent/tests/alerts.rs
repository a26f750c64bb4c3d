//! Alert rules and dashboards ask for metrics that the agent has.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::Arc;

use bifrost_agent::metrics::Metrics;

#[test]
fn what_alerts_and_dashboards_ask_for_is_there() {
    let text = Arc::new(Metrics::default()).source()().unwrap();
    let names: Vec<_> = text.lines().filter_map(|line| line.split([' ', '{']).next()).collect();
    let packaging = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging");
    let mut asked = 0;
    for file in ["prometheus/bifrost.rules.yml", "grafana/bifrost-fleet.json"] {
        let text = std::fs::read_to_string(packaging.join(file)).unwrap();
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        for word in words.filter(|word| word.starts_with("bifrost_agent_")) {
            asked += 1;
            assert!(names.contains(&word), "{file}: {word}");
        }
    }
    assert!(asked > 5, "{asked}");
}
