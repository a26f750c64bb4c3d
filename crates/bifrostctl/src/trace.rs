//! `bifrostctl trace`: what would become of a packet that is only described.

use std::fmt::Write;
use std::net::IpAddr;

use bifrost_control::Client;
use bifrost_control::api::{MAX_TRACE_SIZE, Trace, TraceSpec, TraceVerdict};
use clap::{ArgGroup, Args};

use crate::failure::Failure;
use crate::output::Output;

pub(crate) const EXAMPLES: &str = "\
Stages, in order; each line shows the decision of a stage, and x marks where the packet is dropped:
  underlay    which peer has the address that it arrives from
  parse       its headers
  fault       injected faults that may hit it
  admission   whether the guest may speak with these addresses
  route       where it goes: by MAC address, or through the gateway by the longest prefix; path MTU
  acl         the rule of the network's ACL that decides
  group       the session it belongs to, or the rule of a security group that lets one begin, or none
  limit       whether it is within the port's limits now
  size        how it is cut if it is larger than the path MTU, or that its sender is told
  rewrite     what routing changes
  transport   reliably, on which connection and with what in flight, or as plain VXLAN, and why
  path        the paths between the hosts that it may take: outer addresses and ports
  room        the receive buffers of the guest that would be shown it

Examples:
  bifrostctl trace --port web1 --to 10.0.0.2 --tcp 40000:6379
      may web1 open a connection to Redis on 10.0.0.2, and which path does it take?
  bifrostctl trace --port web1 --to 10.0.0.2 --tcp 40000:6379 --flags ack --size 9000 --df
      a full jumbo segment of it
  bifrostctl trace --from-peer 192.0.2.12 --vni 100 --from 10.0.0.2 --to 10.0.0.1 --udp 5353:53
      would the guest with 10.0.0.1 here be shown what 10.0.0.2 on that host asks it?
  bifrostctl --json trace --port web1 --to 10.0.0.2 --ping | jq -r '.verdict, .counter'

Nothing is sent and nothing changes: no session begins, no counter moves, no limit is used up. The worker that would get the packet is
asked, and judges it by the same code. What cannot be known beforehand is which of the paths the transport takes, and whether its window has
room by then.";

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("sender").required(true).args(["port", "from_peer"]))]
#[command(group = ArgGroup::new("what").required(true).args(["tcp", "udp", "ping"]))]
pub(crate) struct TraceArgs {
    /// The guest behind this port sends it
    #[arg(long, value_name = "NAME")]
    port: Option<String>,
    /// It arrives from this underlay address of another host
    #[arg(long, value_name = "ADDRESS", requires_all = ["vni", "from"])]
    from_peer: Option<IpAddr>,
    /// The network in which it arrives from there
    #[arg(long, value_name = "N", requires = "from_peer")]
    vni: Option<u32>,
    /// Its source address; by default the port's
    #[arg(long, value_name = "ADDRESS")]
    from: Option<IpAddr>,
    /// Its destination address
    #[arg(long, value_name = "ADDRESS")]
    to: IpAddr,
    /// A TCP segment, from and to these ports
    #[arg(long, value_name = "FROM:TO", value_parser = ports)]
    tcp: Option<(u16, u16)>,
    /// A UDP datagram, from and to these ports
    #[arg(long, value_name = "FROM:TO", value_parser = ports)]
    udp: Option<(u16, u16)>,
    /// An ICMP echo request
    #[arg(long)]
    ping: bool,
    /// Flags of the segment, comma-separated: fin, syn, rst, psh, ack; by default syn, which opens a connection
    #[arg(long, value_name = "FLAGS", value_delimiter = ',', requires = "tcp")]
    flags: Vec<String>,
    /// Bytes of the IP packet; by default the headers alone
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(20..=i64::from(MAX_TRACE_SIZE)))]
    size: Option<u32>,
    /// Nobody may cut it (IPv4)
    #[arg(long)]
    df: bool,
    /// Its time to live, or hop limit
    #[arg(long, value_name = "N", default_value_t = 64)]
    ttl: u8,
    /// Its source MAC address; by default the sender's
    #[arg(long, value_name = "MAC")]
    from_mac: Option<String>,
    /// Its destination MAC address; by default the one that the sender would find
    #[arg(long, value_name = "MAC")]
    to_mac: Option<String>,
}

/// Two ports, as in 40000:80.
pub(crate) fn ports(text: &str) -> Result<(u16, u16), String> {
    let (from, to) = text.split_once(':').ok_or("write both ports, such as 40000:80")?;
    let port = |text: &str| text.parse().map_err(|_| format!("{text:?} is no port"));
    Ok((port(from)?, port(to)?))
}

impl TraceArgs {
    fn spec(self) -> TraceSpec {
        TraceSpec {
            port: self.port,
            from_peer: self.from_peer,
            vni: self.vni,
            from: self.from,
            to: Some(self.to),
            tcp: self.tcp,
            flags: self.flags,
            udp: self.udp,
            ping: self.ping,
            size_bytes: self.size,
            dont_fragment: self.df,
            ttl: self.ttl,
            from_mac: self.from_mac,
            to_mac: self.to_mac,
        }
    }
}

/// Asks, and prints the answer.
pub(crate) fn run(client: &Client, args: TraceArgs, out: Output) -> Result<(), Failure> {
    let spec = args.spec();
    spec.check().map_err(bifrost_control::client::ClientError::from)?;
    out.print(&client.trace(&spec)?, text)
}

fn text(trace: &Trace) -> String {
    let mut out = format!("{}; worker {}\n", trace.packet, trace.worker);
    for step in &trace.steps {
        let mark = if step.passes { ' ' } else { 'x' };
        let _ = write!(out, "\n{mark} {:<11}{}", step.stage, step.what);
    }
    let verdict = match trace.verdict {
        TraceVerdict::Sent => "sent",
        TraceVerdict::Delivered => "delivered",
        TraceVerdict::Answered => "answered",
        TraceVerdict::Dropped => "dropped",
        TraceVerdict::Unknown => "?",
    };
    let _ = write!(out, "\n\n{verdict}: {}", trace.what);
    if let Some(counter) = &trace.counter {
        let _ = write!(out, "\n    counted by {counter}");
    }
    if !trace.advice.is_empty() {
        let _ = write!(out, "\n    -> {}", trace.advice);
    }
    out
}

#[cfg(test)]
mod tests {
    use bifrost_control::api::TraceStep;

    use super::*;

    #[test]
    fn text_marks_where_it_ends() {
        let step = |stage: &str, passes, what: &str| TraceStep {
            stage: stage.to_owned(),
            passes,
            what: what.to_owned(),
            ..TraceStep::default()
        };
        let trace = Trace {
            packet: "a ping".to_owned(),
            worker: 1,
            steps: vec![step("parse", true, "28 bytes"), step("acl", false, "refused")],
            verdict: TraceVerdict::Dropped,
            what: "it is dropped".to_owned(),
            counter: Some("avs.dropped_acl_packets".to_owned()),
            advice: "look at the ACL".to_owned(),
        };
        let expected = "a ping; worker 1\n\n  parse      28 bytes\nx acl        refused\n\ndropped: it is dropped\n    \
                        counted by avs.dropped_acl_packets\n    -> look at the ACL";
        assert_eq!(text(&trace), expected);
    }

    #[test]
    fn both_ports_are_wanted() {
        assert_eq!(ports("40000:80"), Ok((40_000, 80)));
        for wrong in ["80", "1:2:3", "x:1", "1:70000", ":"] {
            assert!(ports(wrong).is_err(), "{wrong}");
        }
    }
}
