//! TCP between virtual machines: flows of `iperf3`, and TCP counters of a guest's kernel.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::{Result, bail};

use crate::machine::{Machine, Task};
use crate::netns::Namespace;
use crate::programs::iperf3::Load;

/// Running flows.
#[derive(Debug)]
pub struct Flows {
    server: Task,
    client: Task,
    timeout: Duration,
}

impl Flows {
    /// Starts flows from the first machine to the second, at `address`.
    pub fn start(machines: &mut [Machine], address: Ipv4Addr, load: Load) -> Result<Self> {
        let Load { flows, seconds, gbit_per_s } = load;
        let [sender, receiver] = machines else { bail!("the network does not have two virtual machines") };
        let timeout = Duration::from_secs_f64(seconds + 60.0);
        let server = receiver.start_script("exec iperf3 -4 -s -1 -J -i 0.1")?;
        // The server takes a moment to listen. A test connection would count as the measurement, so look at its
        // socket.
        receiver.run("until ss -Hltn sport = :5201 | grep -q .; do sleep 0.05; done", timeout)?;
        let limit = gbit_per_s.map(|limit| format!(" -b {:.0}", limit * 1e9)).unwrap_or_default();
        let client = format!("exec iperf3 -4 -c {address} -J -i 1 -P {flows} -t {seconds}{limit}");
        Ok(Self { server, client: sender.start_script(&client)?, timeout })
    }

    /// Waits for the end; returns the output of client and server.
    pub fn finish(self, machines: &mut [Machine]) -> Result<(String, String)> {
        let [sender, receiver] = machines else { bail!("the network does not have two virtual machines") };
        let client = sender.finish(self.client, self.timeout)?;
        Ok((client, receiver.finish(self.server, self.timeout)?))
    }
}

/// TCP counters of a guest's kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tcp(BTreeMap<String, u64>);

impl Tcp {
    /// Reads the counters of a machine's kernel.
    pub fn of(machine: &mut Machine) -> Result<Self> {
        Ok(Self::parse(&machine.run("cat /proc/net/snmp /proc/net/netstat", Duration::from_secs(20))?))
    }

    /// Reads this machine's counters for a namespace.
    pub fn in_namespace(namespace: &Namespace) -> Result<Self> {
        Ok(Self::parse(&namespace.run("cat", &["/proc/net/snmp", "/proc/net/netstat"], "")?))
    }

    /// A counter, such as `TcpExt:TCPOFOQueue`; `None` if the kernel does not have it.
    pub fn counter(&self, name: &str) -> Option<u64> {
        self.0.get(name).copied()
    }

    /// Parses pairs of lines, names and values, that begin with the same word.
    pub(crate) fn parse(text: &str) -> Self {
        let lines: Vec<&str> = text.lines().collect();
        let mut counters = BTreeMap::new();
        for pair in lines.chunks_exact(2) {
            let (mut names, values) = (pair[0].split_whitespace(), pair[1].split_whitespace().skip(1));
            let group = names.next().unwrap_or_default();
            for (name, value) in names.zip(values) {
                // Some values are negative, such as a limit that is not set.
                if let Ok(value) = value.parse() {
                    counters.insert(format!("{group}{name}"), value);
                }
            }
        }
        Self(counters)
    }

    /// The increase of a counter, such as `TcpExt:TCPOFOQueue`.
    pub fn since(&self, before: &Self, name: &str) -> u64 {
        let of = |tcp: &Self| tcp.counter(name).unwrap_or(0);
        of(self).saturating_sub(of(before))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_named_by_their_group() {
        let text = "Tcp: MaxConn InSegs RetransSegs\nTcp: -1 10 2\nTcpExt: TCPOFOQueue\nTcpExt: 7\n";
        let (before, after) = (Tcp::default(), Tcp::parse(text));
        assert_eq!(["Tcp:InSegs", "TcpExt:TCPOFOQueue", "Tcp:MaxConn"].map(|n| after.since(&before, n)), [10, 7, 0]);
    }
}
