//! Linux as a gateway: a VXLAN device, routes, and the source NAT of nftables.

use std::fmt::Write as _;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};
use bifrost_port::raw::{RawConfig, RawDevice, RawMode};
use rustix::thread::{CpuSet, sched_setaffinity};

use super::{FEEDS, FLOWS, Measured, PAYLOAD, Service, WARM_UP, WORKS};
use crate::gateway::frames::{self, GATEWAY, GATEWAY_MAC, HEADERS, Inner, PROVIDER, RECEIVER, SENDER, mac_of};
use crate::interrupt;
use crate::lab::Lab;
use crate::netns::Namespace;

const VNI: u32 = 1000;
/// Number of sending, and of receiving, vNICs.
const HOSTS: u32 = 250;
/// Limit of connections that Linux tracks.
const CONVERSATIONS: &str = "2000000";
/// Size of conntrack's hash table.
const BUCKETS: &str = "524288";
/// Time limit for sending the first packet of each flow.
const PATIENCE: Duration = Duration::from_secs(30);
/// Frames per batch.
const BATCH: usize = 32;
/// Rate of the first packets of all flows, frames/s: low enough that Linux creates an entry for each without loss.
const FIRST_ROUND_PER_SECOND: u32 = 40_000;

pub(super) fn measure(lab: &Lab, service: Service, time: Duration) -> Result<Measured> {
    let create = |name: &str| Namespace::create(format!("{}-{name}", lab.run.id()));
    let (source, gateway, sink) = (create("source")?, create("gateway")?, create("sink")?);
    build(&source, &gateway, &sink)?;
    // These files exist only once conntrack is in use.
    let _conversations = Sysctl::raise("/proc/sys/net/netfilter/nf_conntrack_max", CONVERSATIONS)?;
    let _buckets = Sysctl::raise("/sys/module/nf_conntrack/parameters/hashsize", BUCKETS)?;
    let stop = Arc::new(AtomicBool::new(false));
    let sent = Arc::new(AtomicU64::new(0));
    let sender = {
        let (stop, sent) = (Stop(Arc::clone(&stop)), Arc::clone(&sent));
        let headers = flows(service)?;
        source.spawn(move || send(&headers, &stop.0, &sent))?
    };
    // Stops the sender on every return.
    let stopping = Stop(Arc::clone(&stop));
    let deadline = Instant::now() + PATIENCE;
    while sent.load(Ordering::Relaxed) < u64::from(FLOWS) && Instant::now() < deadline && !sender.is_finished() {
        interrupt::sleep(Duration::from_millis(50))?;
    }
    interrupt::sleep(WARM_UP)?;
    let known = tracked(&gateway)?;
    if known < u64::from(FLOWS) * 98 / 100 {
        bail!(
            "Linux tracks only {known} of {FLOWS} conversations: the measurement would include the setup of new ones"
        );
    }
    let (before, busy, began) = (received(&sink)?, Busy::of(WORKS)?, Instant::now());
    interrupt::sleep(time)?;
    let (after, busy_share, seconds) = (received(&sink)?, Busy::of(WORKS)?.since(busy), began.elapsed().as_secs_f64());
    drop(stopping);
    sender.join().map_err(|_| anyhow!("a thread that sends frames panicked"))??;
    Ok(Measured { forwarded: after - before, dropped: 0, seconds, busy_s: busy_share * seconds })
}

/// Number of conversations that Linux tracks.
fn tracked(gateway: &Namespace) -> Result<u64> {
    let text = gateway.run("cat", &["/proc/sys/net/netfilter/nf_conntrack_count"], "")?;
    text.trim().parse().context("no number of conversations")
}

/// Two links: frames arrive over `in0` and leave over `out0`, whose other end drops them.
fn build(source: &Namespace, gateway: &Namespace, sink: &Namespace) -> Result<()> {
    let (outside, receiver) = (mac_of(PROVIDER), mac_of(RECEIVER));
    let (gateway_name, sink_name) = (gateway.name(), sink.name());
    source.ip_batch(&format!(
        "link add wire0 mtu 1700 type veth peer name in0 mtu 1700 netns {gateway_name}\nlink set wire0 up\n"
    ))?;
    gateway.ip_batch(&format!("link add out0 mtu 1700 type veth peer name drop0 mtu 1700 netns {sink_name}\n"))?;
    sink.ip_batch("link set drop0 up\n")?;
    gateway.write_sysctls(&[
        ("net/ipv4/ip_forward", "1"),
        ("net/ipv4/conf/all/rp_filter", "0"),
        ("net/ipv4/conf/default/rp_filter", "0"),
        ("net/ipv4/conf/all/send_redirects", "0"),
        ("net/ipv4/conf/default/send_redirects", "0"),
    ])?;
    let mut batch = format!(
        "link set in0 address {GATEWAY_MAC} up\naddr add {GATEWAY}/24 dev in0\n\
         link set out0 up\naddr add 203.0.113.1/24 dev out0\n\
         neigh add {SENDER} lladdr {} dev in0 nud permanent\n\
         route add {RECEIVER}/32 dev out0\nneigh add {RECEIVER} lladdr {receiver} dev out0 nud permanent\n\
         route add default via 203.0.113.254 dev out0\nneigh add 203.0.113.254 lladdr {outside} dev out0 nud \
         permanent\n\
         link add vx0 mtu 1500 address {GATEWAY_MAC} type vxlan id {VNI} local {GATEWAY} dstport 4789 nolearning\n\
         link set vx0 up\naddr add 192.168.255.254/16 dev vx0\n",
        mac_of(SENDER)
    );
    for host in 0..HOSTS {
        // Writing to a string cannot fail.
        let _ =
            writeln!(batch, "neigh add {} lladdr 02:00:00:01:00:{host:02x} dev vx0 nud permanent", destination(host));
    }
    gateway.ip_batch(&batch)?;
    let mut forwarding = String::new();
    for host in 0..HOSTS {
        let _ = writeln!(forwarding, "fdb append 02:00:00:01:00:{host:02x} dev vx0 dst {RECEIVER}");
    }
    gateway.run("bridge", &["-batch", "-"], &forwarding)?;
    // Tunnel packets are not tracked: that would cost a second entry for each flow.
    let rules = "table ip gateway {\n\
                 chain untracked { type filter hook prerouting priority raw; udp dport 4789 notrack; }\n\
                 chain untracked_out { type filter hook output priority raw; udp dport 4789 notrack; }\n\
                 chain nat { type nat hook postrouting priority srcnat; oifname \"out0\" ip saddr 192.168.0.0/16 \
                 snat to 203.0.113.1-203.0.113.64; }\n}\n";
    gateway.run("nft", &["-f", "-"], rules)?;
    // RPS: the other processor handles received packets.
    let steer = format!("echo {:x} > /sys/class/net/in0/queues/rx-0/rps_cpus", 1 << WORKS);
    gateway.run("sh", &["-c", &steer], "")?;
    Ok(())
}

/// The headers of all flows, in sending order.
fn flows(service: Service) -> Result<Vec<[u8; HEADERS]>> {
    let mut random = fastrand::Rng::with_seed(1);
    let mut all: Vec<u32> = (0..FLOWS).collect();
    random.shuffle(&mut all);
    all.into_iter()
        .map(|flow| {
            let (host, number) = (flow % HOSTS, flow / HOSTS);
            let (destination, port) = match service {
                Service::Internet => (Ipv4Addr::from_bits(0xc600_0000 | random.u32(0..1 << 24)), 443),
                _ => (destination(random.u32(0..HOSTS)), 9),
            };
            let source = Ipv4Addr::new(192, 168, 0, host as u8 + 1);
            frames::headers(&Inner { vni: VNI, source, destination, ports: (2000 + number as u16, port) }, PAYLOAD)
        })
        .collect()
}

/// The address of a receiving vNIC.
fn destination(host: u32) -> Ipv4Addr {
    Ipv4Addr::new(192, 168, 1, host as u8 + 1)
}

fn send(headers: &[[u8; HEADERS]], stop: &AtomicBool, sent: &AtomicU64) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(FEEDS);
    sched_setaffinity(None, &set).with_context(|| format!("choosing processor {FEEDS}"))?;
    let config = RawConfig { device: "wire0".into(), mode: RawMode::Packet, longest: 1700, frames: 2048 };
    let mut device = RawDevice::open(&config).context("opening the sender's device")?;
    let payload = [0; PAYLOAD];
    let mut all = headers.iter().cycle();
    let began = Instant::now();
    while !stop.load(Ordering::Relaxed) {
        let count = sent.load(Ordering::Relaxed);
        let due = Duration::from_secs(count) / FIRST_ROUND_PER_SECOND;
        if count < headers.len() as u64
            && let Some(early) = due.checked_sub(began.elapsed())
        {
            std::thread::sleep(early);
        }
        for headers in all.by_ref().take(BATCH) {
            device.send(&[headers, &payload]);
        }
        device.flush();
        sent.fetch_add(BATCH as u64, Ordering::Relaxed);
    }
    Ok(())
}

/// Stops a thread when it is dropped.
struct Stop(Arc<AtomicBool>);

impl Drop for Stop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Packets that have left the gateway.
fn received(sink: &Namespace) -> Result<u64> {
    let text = sink.run("ip", &["-j", "-s", "link", "show", "drop0"], "")?;
    let parsed: serde_json::Value = serde_json::from_str(&text).context("`ip -j -s link` printed no JSON")?;
    parsed[0]["stats64"]["rx"]["packets"].as_u64().context("`ip -j -s link` counts no packets")
}

/// Processor time so far, ticks.
#[derive(Clone, Copy, Debug)]
struct Busy {
    idle: u64,
    all: u64,
}

impl Busy {
    fn of(processor: usize) -> Result<Self> {
        let text = std::fs::read_to_string("/proc/stat").context("reading /proc/stat")?;
        Self::read(&text, processor).context("/proc/stat has no line for the processor")
    }

    fn read(text: &str, processor: usize) -> Option<Self> {
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("cpu{processor} ")))?;
        let ticks: Vec<u64> = line.split_whitespace().take(8).map_while(|field| field.parse().ok()).collect();
        let &[_, _, _, idle, wait, ..] = &ticks[..] else { return None };
        Some(Busy { idle: idle + wait, all: ticks.iter().sum() })
    }

    /// The share of time since `earlier` in which the processor was not idle.
    fn since(self, earlier: Self) -> f64 {
        let all = (self.all - earlier.all).max(1) as f64;
        1.0 - (self.idle.saturating_sub(earlier.idle) as f64 / all).min(1.0)
    }
}

/// A sysctl or parameter of the whole machine, raised temporarily.
struct Sysctl {
    path: PathBuf,
    before: String,
}

impl Sysctl {
    fn raise(path: &str, value: &str) -> Result<Self> {
        let path = Path::new(path).to_path_buf();
        let before = std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        let is_enough = before.trim().parse::<u64>().ok() >= value.parse().ok();
        if !is_enough {
            std::fs::write(&path, value).with_context(|| format!("writing {}", path.display()))?;
        }
        Ok(Self { path, before })
    }
}

impl Drop for Sysctl {
    fn drop(&mut self) {
        let _ = std::fs::write(&self.path, self.before.trim());
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_processor_is_busy_when_it_is_not_idle() {
        let text = "cpu  1 1 1 1 1 1 1 1 0 0\ncpu0 9 9 9 9 9 9 9 9 0 0\ncpu1 100 0 50 800 50 0 0 0 0 0\n";
        let before = Busy::read(text, 1).unwrap();
        let after = Busy::read("cpu1 100 0 100 800 50 0 150 0 0 0\n", 1).unwrap();
        let half = Busy::read("cpu1 150 0 50 850 50 0 0 0 0 0\n", 1).unwrap();
        assert_eq!((after.since(before), half.since(before)), (1.0, 0.5));
        assert!(Busy::read(text, 7).is_none());
    }
}
