//! `ab`: HTTP requests in a closed loop. The time of each includes opening its connection and ends with its last
//! byte.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::patience::NothingAnswered;
use crate::process::Program;
use crate::programs::redis_benchmark::Measurement;
use crate::stats::LatencyMs;
use crate::topology::Guest;

/// Upper limit for the number of requests.
const MOST_REQUESTS: u64 = 1_000_000;

/// The load.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    /// The server's address.
    pub server: SocketAddr,
    /// Number of clients, each with one request in flight.
    pub clients: u32,
    /// Duration, s.
    pub seconds: u32,
    /// Whether a client keeps its connection, or opens a new one for each request.
    pub keep_alive: bool,
}

/// Runs `load` from `client`. Files with all times go to `logs`, with the name `name`. Times above P99 have a
/// resolution of 1 ms.
///
/// # Errors
/// A request fails, or the output of the program is malformed.
pub fn run(client: &Guest, load: Load, logs: &Path, name: &str) -> Result<Measurement> {
    let [percentiles, times, log] = ["csv", "tsv", "txt"].map(|kind| logs.join(format!("ab-{name}.{kind}")));
    let mut command = client.namespace.command("ab");
    command.args(["-q", "-s", "60", "-c", &load.clients.to_string()]);
    // The number of requests must follow the time limit, which resets it.
    command.args(["-t", &load.seconds.to_string(), "-n", &MOST_REQUESTS.to_string()]);
    command.arg("-e").arg(&percentiles).arg("-g").arg(&times);
    if load.keep_alive {
        command.arg("-k");
    }
    command.arg(format!("http://{}/", load.server));
    let output = Program::start(command, "ab", &log)?.finish(Duration::from_secs(u64::from(load.seconds) + 120))?;
    let parsing = || format!("understanding {}", log.display());
    // Without any request `ab` writes no files.
    if number(&output, "Complete requests:").with_context(parsing)? == 0.0
        && number(&output, "Failed requests:").with_context(parsing)? == 0.0
    {
        return Err(NothingAnswered.into());
    }
    let read = |path: &Path| fs::read_to_string(path).with_context(|| format!("reading {}", path.display()));
    parse(&output, &read(&percentiles)?, &read(&times)?).with_context(parsing)
}

fn parse(output: &str, percentiles: &str, times: &str) -> Result<Measurement> {
    let number = |title: &str| number(output, title);
    let requests = number("Complete requests:")?;
    let failed = number("Failed requests:")?;
    ensure!(requests > 0.0 && failed == 0.0, "{requests} requests answered, {failed} failed");
    let percentile = |percent: &str| -> Result<f64> {
        let of = |line: &str| line.split_once(',').filter(|(of, _)| *of == percent)?.1.trim().parse().ok();
        percentiles.lines().find_map(of).with_context(|| format!("no {percent} %"))
    };
    // Columns: start time, start in seconds, connecting, processing, total, waiting.
    let mut totals: Vec<u64> = times.lines().skip(1).filter_map(|line| line.split('\t').nth(4)?.parse().ok()).collect();
    totals.sort_unstable();
    let at = |share: f64| totals.get(((totals.len() as f64 * share).ceil() as usize).saturating_sub(1));
    let whole = |share: f64| at(share).map(|ms| *ms as f64).context("no times");
    Ok(Measurement {
        requests: requests as u64,
        rps: number("Requests per second:")?,
        latency_ms: LatencyMs {
            avg: number("Time per request:")?,
            p50: percentile("50")?,
            p90: percentile("90")?,
            p99: percentile("99")?,
            p99_9: whole(0.999)?,
            max: whole(1.0)?,
        },
    })
}

/// The number after `title`.
fn number(output: &str, title: &str) -> Result<f64> {
    let line = output.lines().find_map(|line| line.strip_prefix(title)).with_context(|| format!("no `{title}`"))?;
    line.split_whitespace().next().and_then(|n| n.parse().ok()).with_context(|| format!("no number: {line}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "\
Concurrency Level:      50
Time taken for tests:   2.000 seconds
Complete requests:      20000
Failed requests:        0
Requests per second:    10000.12 [#/sec] (mean)
Time per request:       5.125 [ms] (mean)
Time per request:       0.103 [ms] (mean, across all concurrent requests)
";

    #[test]
    fn output_is_parsed() {
        let percentiles = "Percentage served,Time in ms\n0,0.4\n50,4.125\n90,7.250\n99,9.500\n";
        let times: String = (1..=1000).map(|ms| format!("Sun Nov\t1700000000\t0\t{ms}\t{ms}\t1\n")).collect();
        let times = format!("starttime\tseconds\tctime\tdtime\tttime\twait\n{times}");
        let measured = Measurement {
            requests: 20_000,
            rps: 10_000.12,
            latency_ms: LatencyMs { avg: 5.125, p50: 4.125, p90: 7.25, p99: 9.5, p99_9: 999.0, max: 1000.0 },
        };
        assert_eq!(parse(OUTPUT, percentiles, &times).unwrap(), measured);
        let failed = OUTPUT.replace("requests:        0", "requests:        3");
        assert!(parse(&failed, percentiles, &times).unwrap_err().to_string().contains("3 failed"));
        assert!(parse("", percentiles, &times).is_err());
        assert!(parse(OUTPUT, "", &times).is_err());
        assert!(parse(OUTPUT, percentiles, "").is_err());
    }
}
