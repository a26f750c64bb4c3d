//! TCP flows by `iperf3`, measured at the receiver.

use std::net::SocketAddrV4;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::interrupt;
use crate::netns::Namespace;
use crate::process::Program;
use crate::topology::Guest;

/// Length of a bin of goodput, s.
pub const BIN_S: f64 = 0.1;

/// The port of a server, unless an experiment has several in one namespace.
pub const PORT: u16 = 5201;

/// The flows of a load.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    /// Number of flows.
    pub flows: u32,
    /// Duration, s.
    pub seconds: f64,
    /// Rate limit of each flow, Gbit/s.
    pub gbit_per_s: Option<f64>,
}

impl Load {
    /// One flow without a rate limit.
    pub fn one_flow(seconds: f64) -> Self {
        Self { flows: 1, seconds, gbit_per_s: None }
    }
}

/// What the receiver measured.
#[derive(Debug, Clone, PartialEq)]
pub struct Flow {
    /// Goodput over the whole time, of all flows, Gbit/s.
    pub gbit_per_s: f64,
    /// Goodput of each 100 ms, of all flows, Gbit/s.
    pub bins_gbit_per_s: Vec<f64>,
    /// Segments that the sender's TCP retransmitted.
    pub retransmits: u64,
}

/// Running flows.
#[derive(Debug)]
pub struct Running {
    server: Program,
    client: Program,
    seconds: f64,
}

impl Running {
    /// Starts a server in `to` and a client in `from` that sends `load`, with the congestion control of its route.
    pub fn start((from, to): (&Guest, &Guest), load: Load, logs: &Path, label: &str) -> Result<Self> {
        let address = SocketAddrV4::new(to.address, PORT);
        Self::start_in((&from.namespace, &to.namespace), address, load, &[], logs, label)
    }

    /// Like [`Running::start`], in any namespaces, to a server at `address`, with additional arguments for the
    /// client, `words`.
    pub fn start_in(
        (from, to): (&Namespace, &Namespace),
        address: SocketAddrV4,
        load: Load,
        words: &[&str],
        logs: &Path,
        label: &str,
    ) -> Result<Self> {
        let Load { flows, seconds, gbit_per_s } = load;
        let (host, port) = (address.ip().to_string(), address.port().to_string());
        let mut server = to.command("iperf3");
        server.args(["-s", "-1", "-J", "-i", &BIN_S.to_string(), "-B", &host, "-p", &port]);
        let server = Program::start(server, "iperf3", &logs.join(format!("{label}-server.json")))?;
        // The server prints nothing before its end, and a test connection would count as the measurement, so look at
        // its socket.
        let mut tries = 0;
        while to.run("ss", &["-Hltn", "sport", "=", &format!(":{port}")], "")?.is_empty() {
            interrupt::sleep(Duration::from_millis(10))?;
            tries += 1;
            if tries > 300 {
                bail!("iperf3 does not listen: {}", server.output()?);
            }
        }
        let mut client = from.command("iperf3");
        client.args([
            "-c",
            &host,
            "-p",
            &port,
            "-J",
            "-i",
            "0.1",
            "-t",
            &format!("{}", seconds.ceil()),
            "-P",
            &flows.to_string(),
            "--connect-timeout",
            "5000",
        ]);
        client.args(words);
        if let Some(gbit) = gbit_per_s {
            client.args(["-b", &format!("{:.0}", gbit * 1e9)]);
        }
        let client = Program::start(client, "iperf3", &logs.join(format!("{label}-client.json")))?;
        Ok(Self { server, client, seconds })
    }

    /// Process ids of the client and the server; each leads a process group.
    pub fn pids(&self) -> [u32; 2] {
        [self.client.pid(), self.server.pid()]
    }

    /// Ends the test early.
    ///
    /// # Errors
    /// A program has ended by itself, as it does when the connection breaks.
    pub fn interrupt(mut self) -> Result<()> {
        self.client.check_alive()?;
        self.server.check_alive()
    }

    /// Waits for the end and returns the measurement.
    pub fn finish(self) -> Result<Flow> {
        let timeout = Duration::from_secs_f64(self.seconds + 20.0);
        let client = self.client.finish(timeout)?;
        let server = match self.server.finish(Duration::from_secs(5)) {
            Ok(output) => output,
            Err(error) => bail!("iperf3's server: {error:#}"),
        };
        parse(&client, &server)
    }
}

#[derive(Deserialize)]
struct Report {
    #[serde(default)]
    intervals: Vec<Interval>,
    end: Option<End>,
    error: Option<String>,
}

#[derive(Deserialize)]
struct Interval {
    sum: Sum,
}

#[derive(Deserialize)]
struct Sum {
    seconds: f64,
    bits_per_second: f64,
    retransmits: Option<u64>,
}

#[derive(Deserialize)]
struct End {
    sum_sent: Option<Sum>,
    sum_received: Option<Sum>,
}

/// Parses the JSON reports of client and server.
pub fn parse(client: &str, server: &str) -> Result<Flow> {
    let client: Report = serde_json::from_str(client).context("iperf3's client printed no JSON")?;
    let server: Report = serde_json::from_str(server).context("iperf3's server printed no JSON")?;
    for report in [&client, &server] {
        if let Some(error) = &report.error {
            bail!("iperf3: {error}");
        }
    }
    // The last interval may be much shorter.
    let bins: Vec<f64> =
        server.intervals.iter().filter(|i| i.sum.seconds > 0.05).map(|i| i.sum.bits_per_second / 1e9).collect();
    let end = client.end.context("iperf3's client report has no end")?;
    let received = server.end.and_then(|end| end.sum_received);
    let gbit_per_s = match received {
        Some(sum) if sum.bits_per_second > 0.0 => sum.bits_per_second / 1e9,
        _ => end.sum_received.map_or(0.0, |sum| sum.bits_per_second / 1e9),
    };
    let retransmits = end.sum_sent.and_then(|sum| sum.retransmits).unwrap_or(0);
    Ok(Flow { gbit_per_s, bins_gbit_per_s: bins, retransmits })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_receiver_s_values_are_used() {
        let client = r#"{"intervals":[],"end":{
            "sum_sent":{"seconds":1.0,"bits_per_second":9e9,"retransmits":7},
            "sum_received":{"seconds":1.0,"bits_per_second":4.5e9}}}"#;
        let server = r#"{"intervals":[{"sum":{"seconds":0.1,"bits_per_second":4e9}},
            {"sum":{"seconds":0.1,"bits_per_second":5e9}},{"sum":{"seconds":0.001,"bits_per_second":1e8}}],
            "end":{"sum_received":{"seconds":1.0,"bits_per_second":4.4e9}}}"#;
        let flow = parse(client, server).unwrap();
        assert_eq!(flow, Flow { gbit_per_s: 4.4, bins_gbit_per_s: vec![4.0, 5.0], retransmits: 7 });
        let refused = r#"{"start":{},"intervals":[],"end":{},"error":"unable to connect"}"#;
        assert!(format!("{:#}", parse(refused, server).unwrap_err()).contains("unable to connect"));
    }
}
