//! HTTP/2: `nginx`, with `h2load` as client, which sends concurrent requests on each connection.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::programs::application::{Application, CONNECTIONS, Load, Measurement, Server, latencies, number_after};
use crate::programs::nginx::{HTTP2_PORT, Nginx};
use crate::topology::Guest;

/// Concurrent requests (streams) on each connection.
const STREAMS: u32 = 4;

/// HTTP/2.
#[derive(Debug, Clone, Copy)]
pub struct Http2;

impl Application for Http2 {
    fn serve(&self, guest: &Guest, _files: &Path, logs: &Path) -> Result<Box<dyn Server>> {
        Ok(Box::new(Nginx::start(guest, logs)?))
    }

    fn load(&self, load: &Load<'_>) -> Result<Measurement> {
        let times = load.logs.join(format!("h2load-{}.times", load.name));
        // `h2load` appends to an existing file.
        let _ = fs::remove_file(&times);
        let mut command = load.client.namespace.command("h2load");
        command.args(["-c", &CONNECTIONS.to_string(), "-m", &STREAMS.to_string()]);
        command.args(["-D", &load.seconds().to_string(), "--warm-up-time=1"]);
        command.arg(format!("--log-file={}", times.display()));
        command.arg(format!("http://{}:{HTTP2_PORT}/", load.server.address));
        let output = load.run(command, "h2load")?;
        let text = fs::read_to_string(&times).with_context(|| format!("reading {}", times.display()))?;
        let measured = parse(&output, &text).context("parsing the output of h2load")?;
        fs::remove_file(&times).with_context(|| format!("removing {}", times.display()))?;
        Ok(measured)
    }
}

impl Server for Nginx {
    fn check_alive(&mut self) -> Result<()> {
        Nginx::check_alive(self)
    }
}

/// Parses the output, and the rows of the log: start, status, µs.
fn parse(output: &str, log: &str) -> Result<Measurement> {
    let line = output.lines().find(|line| line.starts_with("finished in ")).context("h2load has not finished")?;
    let rate = line.split(", ").nth(1).and_then(|rate| rate.strip_suffix(" req/s"));
    let requests_per_s = rate.and_then(|rate| rate.parse().ok()).with_context(|| format!("no rate in `{line}`"))?;
    let counts = output.lines().find_map(|line| line.strip_prefix("requests: ")).context("no count of requests")?;
    for kind in ["failed", "errored", "timeout"] {
        let count = counts.split(", ").find_map(|count| count.strip_suffix(kind)).map(str::trim);
        ensure!(count == Some("0"), "{} requests {kind}", count.unwrap_or("unknown"));
    }
    ensure!(number_after(output, "status codes:")? > 0.0, "no request succeeded");
    let mut latency_us = latencies()?;
    for row in log.lines() {
        let mut words = row.split('\t').skip(1);
        let (status, time) = (words.next(), words.next().and_then(|time| time.trim().parse::<u64>().ok()));
        // The log has no status for a request whose answer began in the warm-up; the output says that all succeeded.
        ensure!(matches!(status, Some("200" | "0")), "a request without success: `{row}`");
        latency_us.saturating_record(time.with_context(|| format!("no time in `{row}`"))?.max(1));
    }
    ensure!(!latency_us.is_empty(), "no request in the log");
    Ok(Measurement { requests_per_s, paced_requests_per_s: None, latency_us, lost_requests: 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "\
finished in 2.00s, 14032.50 req/s, 14.07MB/s
requests: 28065 total, 28129 started, 28065 done, 28065 succeeded, 0 failed, 0 errored, 0 timeout
status codes: 28065 2xx, 0 3xx, 0 4xx, 0 5xx
";

    #[test]
    fn logs_are_parsed() {
        let measured = parse(OUTPUT, "1700000000000000\t200\t612\n1700000000000100\t0\t1500\n").unwrap();
        assert_eq!(measured.requests_per_s, 14_032.5);
        assert_eq!((measured.latency_us.len(), measured.latency_us.min()), (2, 612));
    }

    #[test]
    fn malformed_results_are_errors() {
        let log = "1700000000000000\t200\t612\n";
        let table = [
            (OUTPUT.replace("0 errored", "3 errored"), log, "3 requests errored"),
            (OUTPUT.replace("28065 2xx", "0 2xx"), log, "no request succeeded"),
            (OUTPUT.replace("finished", "began"), log, "not finished"),
            (OUTPUT.to_owned(), "", "no request in the log"),
            (OUTPUT.to_owned(), "1700000000000000\t404\t612\n", "without success"),
            (OUTPUT.to_owned(), "1700000000000000\t200\tsoon\n", "no time"),
        ];
        for (output, log, expected) in table {
            let error = parse(&output, log).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
