//! `redis-benchmark`, and the latency distribution of all requests that it prints.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::machine::Machine;
use crate::options::Op;
use crate::process::Program;
use crate::programs::redis_server::PORT;
use crate::stats::LatencyMs;
use crate::topology::Guest;

/// Requests of the trial that determines how many requests take the wanted time.
pub const TRIAL_REQUESTS: u64 = 3000;
/// Bounds for that number of requests.
const REQUESTS: (f64, f64) = (5000.0, 2_000_000.0);

/// The result of a run of `redis-benchmark`.
#[derive(Debug, Clone, PartialEq)]
pub struct Measurement {
    /// Requests answered.
    pub requests: u64,
    /// Requests answered per second.
    pub rps: f64,
    /// Latencies of all requests. P90 and P99.9 are the values at the first printed percentile that is at least as
    /// high.
    pub latency_ms: LatencyMs,
}

impl Measurement {
    /// The number of requests that take `seconds` at the measured rate, within bounds.
    pub fn requests_in(&self, seconds: f64) -> u64 {
        (self.rps * seconds).clamp(REQUESTS.0, REQUESTS.1) as u64
    }
}

/// The load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// The command.
    pub op: Op,
    /// Number of clients, each with one request in flight.
    pub clients: u32,
    /// Number of requests, over all clients.
    pub requests: u64,
    /// Whether a client keeps its connection, or opens one for each request.
    pub keep_alive: bool,
    /// Pipelining: requests that a client sends before it waits for answers, 1 or more.
    pub pipeline: u32,
}

/// Runs `load` from `client` against `server`, in a closed loop.
///
/// # Errors
/// The benchmark fails, takes longer than `timeout`, or its output is malformed.
pub fn run(client: &Guest, server: &Guest, load: Load, timeout: Duration, log: &Path) -> Result<Measurement> {
    let mut command = client.namespace.command("redis-benchmark");
    command.args(arguments(server, load));
    let output = Program::start(command, "redis-benchmark", log)?.finish(timeout)?;
    check(&output, load.requests, log)
}

/// Like [`run`], from a virtual machine.
///
/// # Errors
/// Those of [`run`].
pub fn run_in_machine(
    client: &mut Machine,
    server: &Guest,
    load: Load,
    timeout: Duration,
    log: &Path,
) -> Result<Measurement> {
    let script = format!("exec redis-benchmark {}", arguments(server, load).join(" "));
    let output = client.run(&script, timeout)?;
    std::fs::write(log, &output).with_context(|| format!("writing {}", log.display()))?;
    check(&output, load.requests, log)
}

fn arguments(server: &Guest, load: Load) -> Vec<String> {
    let Load { op, clients, requests, keep_alive, pipeline } = load;
    let (address, port) = (server.address.to_string(), PORT.to_string());
    let (clients, requests, pipeline) = (clients.to_string(), requests.to_string(), pipeline.to_string());
    let keep_alive = if keep_alive { "1" } else { "0" };
    [
        "-h",
        &address,
        "-p",
        &port,
        "-c",
        &clients,
        "-n",
        &requests,
        "-t",
        op.name(),
        "-k",
        keep_alive,
        "-P",
        &pipeline,
        "--precision",
        "3",
    ]
    .map(str::to_owned)
    .to_vec()
}

fn check(output: &str, requests: u64, log: &Path) -> Result<Measurement> {
    let measurement = parse(output).with_context(|| format!("reading {}", log.display()))?;
    ensure!(
        measurement.requests >= requests,
        "redis-benchmark answered {} of {requests} requests (see {})",
        measurement.requests,
        log.display()
    );
    Ok(measurement)
}

/// Parses the output of redis-benchmark 7.0 with `--precision 3`, for a single test.
pub fn parse(output: &str) -> Result<Measurement> {
    // Progress lines are overwritten with carriage returns.
    let lines: Vec<&str> = output.split(['\n', '\r']).map(str::trim).collect();
    let mut distribution = Vec::new();
    let table = position(&lines, "Latency by percentile distribution:")?;
    for line in &lines[table + 1..] {
        match percentile(line) {
            Some(entry) => distribution.push(entry),
            None if distribution.is_empty() || line.is_empty() => {}
            None => break,
        }
        if line.is_empty() && !distribution.is_empty() {
            break;
        }
    }
    let (_, max_ms, requests) = *distribution.last().context("the percentile distribution is empty")?;
    let percentile = |percent: f64| {
        let at = distribution.iter().find(|(p, _, _)| *p >= percent);
        at.map(|(_, ms, _)| *ms).with_context(|| format!("no percentile of at least {percent}"))
    };
    let throughput = lines
        .iter()
        .find_map(|line| line.strip_prefix("throughput summary:"))
        .and_then(|rest| rest.split_whitespace().next())
        .context("no `throughput summary`")?;
    let summary = position(&lines, "latency summary (msec):")?;
    let (header, values) = match lines[summary + 1..].iter().filter(|l| !l.is_empty()).take(2).collect::<Vec<_>>()[..] {
        [header, values] => (header, values),
        _ => bail!("the latency summary is truncated"),
    };
    let column = |name: &str| -> Result<f64> {
        let index = header.split_whitespace().position(|n| n == name).with_context(|| format!("no column `{name}`"))?;
        let text = values.split_whitespace().nth(index).with_context(|| format!("no value for `{name}`"))?;
        text.parse().with_context(|| format!("`{text}` is not a number"))
    };
    Ok(Measurement {
        requests,
        rps: throughput.parse().with_context(|| format!("`{throughput}` is not a number"))?,
        latency_ms: LatencyMs {
            avg: column("avg")?,
            p50: column("p50")?,
            p90: percentile(90.0)?,
            p99: column("p99")?,
            p99_9: percentile(99.9)?,
            max: max_ms.max(column("max")?),
        },
    })
}

fn position(lines: &[&str], text: &str) -> Result<usize> {
    lines.iter().position(|line| *line == text).with_context(|| format!("no line `{text}`"))
}

/// `99.902% <= 1.863 milliseconds (cumulative count 199805)`: percentile, milliseconds, count.
fn percentile(line: &str) -> Option<(f64, f64, u64)> {
    let (percent, rest) = line.split_once("% <= ")?;
    let (ms, rest) = rest.split_once(" milliseconds (cumulative count ")?;
    Some((percent.parse().ok()?, ms.parse().ok()?, rest.strip_suffix(')')?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "GET: rps=0.0 (overall: 0.0) avg_msec=nan (overall: nan)\r\
        GET: rps=59400.1 (overall: 59400.1) avg_msec=0.443 (overall: 0.443)\r          \r====== GET ======\n  \
        2000 requests completed in 0.03 seconds\n  50 parallel clients\n\n\
        Latency by percentile distribution:\n\
        0.000% <= 0.087 milliseconds (cumulative count 1)\n\
        50.000% <= 0.439 milliseconds (cumulative count 1139)\n\
        90.625% <= 0.511 milliseconds (cumulative count 1815)\n\
        99.805% <= 1.359 milliseconds (cumulative count 1996)\n\
        99.902% <= 1.863 milliseconds (cumulative count 1999)\n\
        100.000% <= 204.767 milliseconds (cumulative count 2000)\n\
        100.000% <= 204.767 milliseconds (cumulative count 2000)\n\n\
        Cumulative distribution of latencies:\n\
        0.001% <= 0.103 milliseconds (cumulative count 2)\n\
        100.000% <= 205.103 milliseconds (cumulative count 2000)\n\n\
        Summary:\n  throughput summary: 59400.06 requests per second\n  latency summary (msec):\n          \
        avg       min       p50       p95       p99       max\n        \
        0.443     0.080     0.439     0.527     0.791     204.767\n";

    #[test]
    fn reads_the_distribution_of_every_request() {
        let expected = Measurement {
            requests: 2000,
            rps: 59400.06,
            latency_ms: LatencyMs { avg: 0.443, p50: 0.439, p90: 0.511, p99: 0.791, p99_9: 1.863, max: 204.767 },
        };
        assert_eq!(parse(OUTPUT).unwrap(), expected);
    }

    #[test]
    fn errors_name_the_missing_part() {
        let without_table = OUTPUT.replace("Latency by percentile distribution:", "");
        assert!(format!("{:#}", parse(&without_table).unwrap_err()).contains("Latency by percentile"));
        let without_summary = OUTPUT.replace("throughput summary", "");
        assert!(format!("{:#}", parse(&without_summary).unwrap_err()).contains("throughput summary"));
        assert!(parse("Could not connect to Redis at 10.0.0.2:6379: Connection refused").is_err());
    }
}
