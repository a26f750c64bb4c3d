//! A real Prometheus, which reads what programs serve, and is asked what the panels of dashboards ask.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Where the packages of dashboards and alert rules are.
fn packaging() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging")
}

/// The program.
pub(crate) fn program() -> String {
    std::env::var("BIFROST_PROMETHEUS").expect("BIFROST_PROMETHEUS: the path of prometheus; scripts/test.sh has it")
}

/// Writes what Prometheus needs to a directory; returns its arguments.
pub(crate) fn configure(directory: &Path, listen: &str, targets: &[String]) -> Vec<String> {
    let rules = packaging().join("prometheus/bifrost.rules.yml").canonicalize().unwrap();
    let targets: Vec<String> = targets.iter().map(|target| format!("{target:?}")).collect();
    let config = format!(
        "global: {{scrape_interval: 500ms, evaluation_interval: 1s}}\nrule_files: [{rules:?}]\n\
         scrape_configs: [{{job_name: bifrost, static_configs: [{{targets: [{}]}}]}}]\n",
        targets.join(", ")
    );
    let file = directory.join("prometheus.yml");
    std::fs::write(&file, config).unwrap();
    vec![
        format!("--config.file={}", file.display()),
        format!("--storage.tsdb.path={}", directory.join("prometheus").display()),
        format!("--web.listen-address={listen}"),
    ]
}

/// Asks a Prometheus, by a function that gets a path of its API and gives the body of the answer.
pub(crate) struct Asked<'a>(pub(crate) &'a dyn Fn(&str) -> String);

impl Asked<'_> {
    fn get(&self, path: &str, parameters: &[(&str, &str)]) -> Value {
        let parameters: Vec<_> = parameters.iter().map(|(name, value)| format!("{name}={}", encoded(value))).collect();
        let body = (self.0)(&format!("/api/v1/{path}?{}", parameters.join("&")));
        let answer: Value = serde_json::from_str(&body).unwrap_or_else(|e| panic!("{path}: {e}: {body}"));
        assert_eq!(answer["status"], "success", "{path} {parameters:?}: {answer}");
        answer["data"].clone()
    }

    /// Waits until everything is read.
    pub(crate) fn wait(&self, targets: usize) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !(self.0)("/-/ready").contains("is Ready") {
            assert!(Instant::now() < deadline, "Prometheus is not ready");
            std::thread::sleep(Duration::from_millis(200));
        }
        loop {
            let all = self.get("targets", &[("state", "active")])["activeTargets"].clone();
            let read = all.as_array().unwrap().iter().filter(|target| target["health"] == "up").count();
            if read == targets {
                return;
            }
            assert!(Instant::now() < deadline, "{read} of {targets} are read: {all:#}");
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// All alert rules are evaluated without an error.
    pub(crate) fn check_rules(&self) {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let groups = self.get("rules", &[])["groups"].clone();
            let rules: Vec<Value> = groups
                .as_array()
                .unwrap()
                .iter()
                .flat_map(|group| group["rules"].as_array().cloned().unwrap_or_default())
                .collect();
            let bad: Vec<&Value> = rules.iter().filter(|rule| rule["health"] == "err").collect();
            assert!(bad.is_empty(), "{bad:#?}");
            if rules.len() > 10 && rules.iter().all(|rule| rule["health"] == "ok") {
                return;
            }
            assert!(Instant::now() < deadline, "rules were not evaluated: {groups:#}");
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// Each panel of a dashboard has series that are numbers, with the labels that its legends name. `without`: queries
    /// (parts of them) that have none here. Returns how many queries there are.
    pub(crate) fn check_dashboard(&self, name: &str, without: &[&str]) -> usize {
        let text = std::fs::read_to_string(packaging().join(format!("grafana/bifrost-{name}.json"))).unwrap();
        let board: Value = serde_json::from_str(&text).unwrap();
        // As Grafana: a variable of several values is a regular expression.
        let mut variables = vec![("$__rate_interval", "5s".to_owned())];
        for variable in board["templating"]["list"].as_array().unwrap().iter().filter(|v| v["type"] == "query") {
            let query = variable["query"].as_str().unwrap();
            let inner = query.strip_prefix("label_values(").and_then(|rest| rest.strip_suffix(')')).unwrap();
            let (metric, label) = inner.split_once(", ").unwrap();
            let values = self.get(&format!("label/{label}/values"), &[("match[]", metric)]);
            let values: Vec<&str> = values.as_array().unwrap().iter().filter_map(Value::as_str).collect();
            assert!(!values.is_empty(), "{name}: {query} has no values");
            let name = format!("${}", variable["name"].as_str().unwrap());
            variables.push((Box::leak(name.into_boxed_str()), values.join("|")));
        }
        let mut asked = 0;
        for panel in board["panels"].as_array().unwrap() {
            assert_eq!(panel["datasource"]["uid"], "${source}", "{name}: {}", panel["title"]);
            for target in panel["targets"].as_array().unwrap() {
                asked += 1;
                let written = target["expr"].as_str().unwrap();
                let query = variables.iter().fold(written.to_owned(), |query, (from, to)| query.replace(from, to));
                assert!(!query.contains('$'), "{name}: {query}: Grafana has no such variable");
                // Panels about what is wrong are empty when nothing is.
                let query = query.replace(" > 0", " >= 0");
                let is_without = without.iter().any(|part| written.contains(part));
                self.check_query(&format!("{name}: {}: {query}", panel["title"]), &query, target, is_without);
            }
        }
        asked
    }

    fn check_query(&self, what: &str, query: &str, target: &Value, is_without: bool) {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let data = self.get("query", &[("query", query)]);
            let series = data["result"].as_array().unwrap();
            let is_number = |one: &Value| one["value"][1].as_str().is_some_and(|value| value != "NaN");
            if is_without || !series.is_empty() && series.iter().all(is_number) {
                let legend = target["legendFormat"].as_str().unwrap();
                for label in legend.split("{{").skip(1).filter_map(|rest| rest.split_once("}}")).map(|(label, _)| label)
                {
                    for one in series {
                        assert!(one["metric"][label].is_string(), "{what}: no label {label} in {one}");
                    }
                }
                return;
            }
            assert!(Instant::now() < deadline, "{what}: {data}");
            std::thread::sleep(Duration::from_millis(500));
        }
    }
}

fn encoded(text: &str) -> String {
    text.bytes().fold(String::new(), |mut encoded, byte| {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' => encoded.push(char::from(byte)),
            _ => write!(encoded, "%{byte:02X}").unwrap(),
        }
        encoded
    })
}
