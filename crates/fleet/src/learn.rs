//! A VPC of very many routes, which hosts learn: how long the first packet to each of many destinations takes, and what
//! the host needs to know them.
//!
//! Two hosts run. On the second one are guests that have the used prefixes behind them, in turns, so that each prefix is
//! an answer of its own. All other ports are on hosts that exist only as objects.

use std::io::Read as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use bifrost_intent::api::Status;
use serde_json::json;

use crate::cli::Learn;
use crate::host::{Host, MTU, RELAY, START, cable, sibling, underlay};
use crate::net::{Net, Running, remove_leftovers};
use crate::network::{host, port_key, set};
use crate::program::Api;
use crate::report::{Report, progress};

/// Bars: of the first packet, ms; of what daemon and agent need for what was learned, MB.
const FIRST_BAR: f64 = 5.0;
const MEMORY_BAR: f64 = 10.0;
/// Prefixes behind a port.
const BEHIND: usize = 16;
/// Hosts that only have ports.
const OTHERS: usize = 8;
/// How long a reply may take.
const REPLY: Duration = Duration::from_secs(2);
/// How long everything may take to be in force.
const IN_FORCE: Duration = Duration::from_secs(120);

pub(crate) fn run(options: &Learn) -> Result<Report> {
    let (routes, used) = if options.quick { (20_000, 128) } else { (options.routes as usize, options.used as usize) };
    let servers = used.div_ceil(BEHIND);
    remove_leftovers();
    let directory = tempfile::tempdir()?;
    let switch = Net::create("sw")?;
    switch.ip(&format!("link add br0 type bridge\nlink set br0 mtu {MTU} up\n"))?;
    let net = cable("re", &switch)?;
    net.ip(&format!("addr add {RELAY}/24 dev up0\n"))?;
    let mut command = net.command(&sibling("bifrost-relay")?);
    command.args(["--insecure", "--store", "memory", "--listen", &format!("{RELAY}:4790"), "--socket"]);
    let socket = directory.path().join("relay.sock");
    command.arg(&socket);
    let relay = Running::start(command, &directory.path().join("relay.log"))?;
    let api = Api::at(&socket);
    let begin = Instant::now();
    while !api.get::<Status>("/v1/status").is_ok_and(|status| status.in_sync) {
        ensure!(begin.elapsed() < START, "the relay does not start");
        std::thread::sleep(Duration::from_millis(20));
    }

    let mut changes: Vec<_> = (0..2 + OTHERS).map(|n| set(&host(n), json!({"addresses": [underlay(n)]}))).collect();
    changes.push(set("vpc/demo/net", json!({"learned": ["10.0.0.0/8"]})));
    changes.push(set("subnet/demo/a", json!({"vpc": "net", "prefix": "10.0.0.0/9"})));
    // One prefix for each server in turn; then those of ports that nobody sends to.
    let guests = (0..servers).map(|n| Net::create(&format!("s{n}"))).collect::<Result<Vec<_>>>()?;
    for (n, guest) in guests.iter().enumerate() {
        let prefixes: Vec<String> = (n..used).step_by(servers).map(prefix).collect();
        let addresses = [format!("10.0.1.{n}")];
        let spec =
            json!({"subnets": ["a"], "host": "h1", "netns": guest.name(), "addresses": addresses, "routed": prefixes});
        changes.push(set(&port_key(1 + n), spec));
    }
    for (n, first) in (used..routes.saturating_sub(routes / (BEHIND + 1))).step_by(BEHIND).enumerate() {
        let prefixes: Vec<String> = (first..first + BEHIND).map(prefix).collect();
        let host = format!("h{}", 2 + n % OTHERS);
        let address = Ipv4Addr::from(0x0a10_0000 + n as u32);
        let netns = format!("n{n}");
        let spec = json!({"subnets": ["a"], "host": host, "netns": netns, "addresses": [address], "routed": prefixes});
        changes.push(set(&port_key(1000 + n), spec));
    }
    let all = changes.iter().filter_map(|change| change.spec.as_ref()).map(|spec| {
        let count = |key: &str| spec.get(key).and_then(serde_json::Value::as_array).map_or(0, Vec::len);
        if spec.get("netns").is_some() { count("addresses") + count("routed") } else { 0 }
    });
    let all: usize = all.sum();
    let bar = progress("objects");
    let begin = Instant::now();
    api.apply_all(&changes, &bar)?;
    bar.finish_and_clear();
    let made = begin.elapsed();

    let mut hosts = [Host::start(0, directory.path(), &switch)?, Host::start(1, directory.path(), &switch)?];
    let empty = memory(&hosts[0])?;
    hosts.iter_mut().try_for_each(Host::start_agent)?;
    let client = set(
        &port_key(0),
        json!({"subnets": ["a"], "host": "h0", "netns": hosts[0].guest.name(), "addresses": ["10.0.0.2"]}),
    );
    api.apply(vec![client])?;
    for (n, guest) in guests.iter().enumerate() {
        let begin = Instant::now();
        // The device comes once the port is in force.
        while guest.ip("link show eth0\n").is_err() {
            ensure!(begin.elapsed() < IN_FORCE, "guest {n} has no device");
            std::thread::sleep(Duration::from_millis(50));
        }
        // Its kernel asks for neighbours in the name of its own address, not of one behind it.
        let announce = || Ok(std::fs::write("/proc/sys/net/ipv4/conf/all/arp_announce", "2")?);
        guest.spawn(announce)?.join().map_err(|_| anyhow::anyhow!("a thread has panicked"))??;
        let local = (n..used).step_by(servers).map(|at| format!("route add local {} dev lo\n", prefix(at)));
        guest.ip(&local.collect::<String>())?;
    }
    // The guest's router, its buffers, and the way back are there before the first measurement.
    let begin = Instant::now();
    while ping(&hosts[0].guest, vec!["10.0.1.0".parse()?], 20)?.iter().all(|reply| reply.first.is_none()) {
        ensure!(begin.elapsed() < IN_FORCE, "the guests do not reach each other");
    }
    let before = memory(&hosts[0])?;
    let to: Vec<Ipv4Addr> = (0..used).map(address).collect();
    let replies = ping(&hosts[0].guest, to, 1)?;
    let after = memory(&hosts[0])?;
    let learned = hosts[0].client()?.learned()?.len();
    let objects = hosts[0].client()?.status()?.routes;

    let title = format!("a VPC of {all} routes, of which a guest uses {used}");
    let mut report = Report::new(title);
    report.tell("routes of the VPC", all as f64, "");
    report.tell("routes that the host was sent", objects as f64, "");
    report.tell("routes that it has learned", learned as f64, "");
    let lost = replies.iter().filter(|reply| reply.first.is_none()).count();
    report.bar("first packets without a reply", lost as f64, "", 0.0);
    let first: Vec<Duration> = replies.iter().filter_map(|reply| reply.first).collect();
    let second: Vec<Duration> = replies.iter().filter_map(|reply| reply.second).collect();
    report.times("round trip of the first packet", &first, Some(FIRST_BAR));
    report.times("round trip of the second", &second, None);
    let [daemon, agent] = [0, 1].map(|of| (after[of] - before[of]) / 1024.0);
    report.tell("what the daemon needs for it", daemon, "MB");
    report.tell("what the agent needs for it", agent, "MB");
    report.bar("what the host needs for it", daemon + agent, "MB", MEMORY_BAR);
    report.tell("the daemon before it had a VPC", empty[0] / 1024.0, "MB");
    report.tell("the daemon afterwards", after[0] / 1024.0, "MB");
    report.tell("the relay", resident_kb(relay.pid())? / 1024.0, "MB");
    report.tell("time to make the objects", made.as_secs_f64(), "s");
    Ok(report)
}

/// The prefix of a number: small ones, next to each other.
fn prefix(n: usize) -> String {
    format!("{}/30", Ipv4Addr::from(0x0a80_0000 + 4 * n as u32))
}

fn address(n: usize) -> Ipv4Addr {
    Ipv4Addr::from(0x0a80_0001 + 4 * n as u32)
}

/// The resident memory of a host's daemon and agent, KB.
fn memory(host: &Host) -> Result<[f64; 2]> {
    let [daemon, agent] = host.pids();
    Ok([resident_kb(daemon)?, if agent == 0 { 0.0 } else { resident_kb(agent)? }])
}

fn resident_kb(pid: u32) -> Result<f64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("a process without memory")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}

/// The round trips of the first two pings to a destination; none: no reply.
#[derive(Clone, Copy, Debug)]
struct Reply {
    first: Option<Duration>,
    second: Option<Duration>,
}

/// Pings each address twice, one after the other, so often.
fn ping(from: &Net, to: Vec<Ipv4Addr>, times: usize) -> Result<Vec<Reply>> {
    let work = move || -> Result<Vec<Reply>> {
        let protocol = socket2::Protocol::ICMPV4;
        let mut socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::RAW, Some(protocol))?;
        let mut replies = Vec::with_capacity(to.len() * times);
        let mut number = 0u16;
        let mut once = |address: Ipv4Addr| -> Result<Option<Duration>> {
            number = number.wrapping_add(1);
            let mut packet = [8, 0, 0, 0, 0x6c, 0x72, 0, 0];
            packet[6..].copy_from_slice(&number.to_be_bytes());
            let sum: u32 = packet.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
            let folded = !((sum & 0xffff) + (sum >> 16)) as u16;
            packet[2..4].copy_from_slice(&folded.to_be_bytes());
            let begin = Instant::now();
            socket.send_to(&packet, &SocketAddr::from((address, 0)).into())?;
            let mut buffer = [0; 256];
            while let Some(left) = REPLY.checked_sub(begin.elapsed()).filter(|left| !left.is_zero()) {
                socket.set_read_timeout(Some(left))?;
                let Ok(len) = socket.read(&mut buffer) else { continue };
                if len >= 28 && buffer[12..16] == address.octets() && buffer[20] == 0 && buffer[26..28] == packet[6..] {
                    return Ok(Some(begin.elapsed()));
                }
            }
            Ok(None)
        };
        for address in to {
            for _ in 0..times {
                replies.push(Reply { first: once(address)?, second: once(address)? });
            }
        }
        Ok(replies)
    };
    from.spawn(work)?.join().map_err(|_| anyhow::anyhow!("the pinging thread has panicked"))?
}
