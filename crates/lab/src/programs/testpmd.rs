//! `dpdk-testpmd`: DPDK's packet forwarder, controlled over its standard input. It runs without huge pages.

use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::netns::Namespace;
use crate::{command, interrupt, process};

/// The directory where `scripts/install-debian-packages.sh` unpacks it.
const PROGRAM: &str = "/var/cache/bifrost-lab/dpdk/usr/bin/dpdk-testpmd";
/// Time to start.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// A running `dpdk-testpmd`. Dropping it ends it.
#[derive(Debug)]
pub struct Testpmd {
    child: Child,
    input: ChildStdin,
    output: PathBuf,
}

impl Testpmd {
    /// Starts it in `namespace`, with forwarding on `processor` and `devices` (`--vdev`) as its ports, in that order.
    /// It forwards nothing before a `start` command.
    pub fn start(namespace: &Namespace, processor: usize, devices: &[String], output: &Path) -> Result<Self> {
        // Packets in the ports' queues when forwarding starts are forwarded, not discarded.
        Self::start_with(namespace, processor, devices, &["--forward-mode=io", "--no-flush-rx"], output)
    }

    /// Like [`Testpmd::start`], with additional testpmd `options`, which follow those of DPDK.
    pub fn start_with(
        namespace: &Namespace,
        processor: usize,
        devices: &[String],
        options: &[&str],
        output: &Path,
    ) -> Result<Self> {
        if let Some(directory) = output.parent() {
            std::fs::create_dir_all(directory).with_context(|| format!("creating {}", directory.display()))?;
        }
        let file = std::fs::File::create(output).with_context(|| format!("creating {}", output.display()))?;
        let mut command = namespace.command("setpriv");
        // Line-buffered, because its output is read while it runs.
        command.args(["--pdeathsig", "KILL", "stdbuf", "-oL", PROGRAM]);
        command.args(["--no-huge", "--no-shconf", "--no-pci", "--no-telemetry", "-m", "256"]);
        // Two threads on one processor: the first only reads commands.
        command.args(["--lcores", &format!("0@{processor},1@{processor}")]);
        devices.iter().for_each(|device| {
            command.args(["--vdev", device]);
        });
        command.args(["--", "-i", "--record-core-cycles", "--total-num-mbufs=8192"]).args(options);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(file.try_clone()?)
            .stderr(file)
            .process_group(0)
            .spawn()
            .with_context(|| command::missing("dpdk-testpmd"))?;
        let input = child.stdin.take().context("the program has no input")?;
        let mut started = Self { child, input, output: output.to_path_buf() };
        started.wait_for("testpmd> ", START_TIMEOUT)?;
        Ok(started)
    }

    /// Sends a command.
    pub fn tell(&mut self, line: &str) -> Result<()> {
        writeln!(self.input, "{line}").context("sending a command to dpdk-testpmd")
    }

    /// Stops (`still`) or continues it.
    pub fn freeze(&self, still: bool) -> Result<()> {
        process::freeze(self.child.id(), still)
    }

    /// Its output so far.
    pub fn printed(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.output).unwrap_or_default()).into_owned()
    }

    /// Waits until it has printed `text`.
    pub fn wait_for(&mut self, text: &str, timeout: Duration) -> Result<()> {
        let deadline = Instant::now() + timeout;
        while !self.printed().contains(text) {
            if let Some(status) = self.child.try_wait().context("asking for a program's status")? {
                bail!("dpdk-testpmd ended ({status}); its output is in {}", self.output.display());
            }
            if Instant::now() > deadline {
                bail!("dpdk-testpmd does not print `{text}`; its output is in {}", self.output.display());
            }
            interrupt::sleep(Duration::from_millis(20))?;
        }
        Ok(())
    }
}

impl Drop for Testpmd {
    fn drop(&mut self) {
        let _ = self.freeze(false);
        process::end(&mut self.child);
    }
}

/// `(received, sent)` packets of port `port` in each answer to `show port stats` so far.
pub fn port_packets(printed: &str, port: usize) -> Vec<(u64, u64)> {
    let title = format!("NIC statistics for port {port} ");
    let number = |section: &str, name: &str| -> Option<u64> {
        section.split_once(name)?.1.split_whitespace().next()?.parse().ok()
    };
    let section = |text: &str| Some((number(text, "RX-packets:")?, number(text, "TX-packets:")?));
    printed.split(&title).skip(1).filter(|text| text.trim_start().starts_with('#')).filter_map(section).collect()
}

/// Cycles per forwarded packet, and the clock rate, MHz, as printed when forwarding stops.
pub fn cycles_per_packet(printed: &str) -> Option<(f64, f64)> {
    let line = printed.lines().rev().find(|line| line.contains("CPU cycles/packet="))?;
    let cycles = line.split_once("cycles/packet=")?.1.split_whitespace().next()?.parse().ok()?;
    let clock = line.rsplit_once(" at ")?.1.split_whitespace().next()?.parse().ok()?;
    Some((cycles, clock))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRINTED: &str = "\
testpmd> show port stats all

  ######################## NIC statistics for port 1  ########################
  RX-packets: 191904     RX-missed: 0          RX-bytes:  11514240
  RX-errors: 0
  TX-packets: 191950     TX-errors: 0          TX-bytes:  11517000
  ############################################################################
  NIC statistics for port 1 cleared
  ######################## NIC statistics for port 1  ########################
  RX-packets: 522976     RX-missed: 0          RX-bytes:  31378560
  TX-packets: 523000     TX-errors: 0          TX-bytes:  31380000

  CPU cycles/packet=1926.91 (total cycles=1010687158 / total io packets=524512) at 2000 MHz Clock
";

    #[test]
    fn output_is_parsed() {
        assert_eq!(port_packets(PRINTED, 1), [(191_904, 191_950), (522_976, 523_000)]);
        assert!(port_packets(PRINTED, 3).is_empty());
        assert_eq!(cycles_per_packet(PRINTED), Some((1926.91, 2000.0)));
        assert_eq!(cycles_per_packet("testpmd> stop"), None);
    }
}
