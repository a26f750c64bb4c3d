//! The configuration of `bifrost-nicd`.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use bifrost_nicpipe::{Class, PodConfig, Rule, Rules};
use bifrost_plb as plb;
use bifrost_port::raw::{RawConfig, RawMode};
use bifrost_tables::{LimiterConfig, Rate};
use bifrost_wire::Mac;
use serde::Deserialize;
use toml::Spanned;

use crate::file::{self, Checker, FileErrors};
use crate::program::check_socket;

use super::transport;

/// A checked configuration.
#[derive(Clone, Debug)]
pub struct Config {
    /// Path of the control socket.
    pub control: PathBuf,
    /// Address where counters are served over TCP.
    pub metrics: Option<SocketAddr>,
    /// The network device.
    pub device: RawConfig,
    /// The CPU of the pipeline's thread.
    pub processor: Option<usize>,
    /// How long the pipeline polls for work before it sleeps, ns.
    pub spin_ns: u64,
    /// The pods.
    pub pods: Vec<PodSettings>,
    /// Directory with a file for each pod that was added at run time.
    pub pods_directory: Option<PathBuf>,
}

/// A pod.
#[derive(Clone, Debug)]
pub struct PodSettings {
    /// Settings for the pipeline, without random seeds and numbers.
    pub pipeline: PodConfig,
    /// The memif sockets of its interfaces.
    pub sockets: Vec<PathBuf>,
    /// VNIs that are not limited.
    pub bypass: Vec<u32>,
    /// Whether packets are spread by flow (RSS) at first.
    pub rss: bool,
    /// For tests: the seed of the limiter's hash, which is random otherwise.
    pub limiter_seed: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    control: Control,
    device: Spanned<Device>,
    #[serde(default)]
    pipeline: PipelineSection,
    #[serde(default)]
    pods: Vec<Pod>,
    pods_directory: Option<Spanned<PathBuf>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Control {
    socket: Spanned<PathBuf>,
    metrics: Option<SocketAddr>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Device {
    name: String,
    #[serde(default)]
    mode: Mode,
    #[serde(default = "default_mtu")]
    mtu: Spanned<u16>,
    #[serde(default = "default_frames")]
    frames: Spanned<u32>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Mode {
    #[default]
    Auto,
    XdpNative,
    XdpGeneric,
    Packet,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PipelineSection {
    processor: Option<usize>,
    #[serde(default = "default_spin")]
    spin_us: u64,
}

impl Default for PipelineSection {
    fn default() -> Self {
        PipelineSection { processor: None, spin_us: default_spin() }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Pod {
    name: Spanned<String>,
    number: Spanned<u16>,
    cores: Spanned<u16>,
    affinity: Option<Spanned<u16>>,
    order_queues: Option<Spanned<u8>>,
    queue_entries: Option<Spanned<u32>>,
    timeout_us: Option<Spanned<u64>>,
    header_only_from: Option<Spanned<u16>>,
    payload_slots: Option<Spanned<u32>>,
    #[serde(default = "default_control")]
    control_packets_per_second: u64,
    #[serde(default)]
    own: Vec<IpAddr>,
    #[serde(default = "default_priority")]
    priority: bool,
    #[serde(default)]
    mode: Spread,
    interfaces: Spanned<Vec<Interface>>,
    mac: Option<Spanned<String>>,
    #[serde(default)]
    rules: Vec<RuleSection>,
    limiter: Option<Limiter>,
    transport: Option<transport::Section>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Spread {
    #[default]
    Plb,
    Rss,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Interface {
    vlan: Option<u16>,
    socket: Spanned<PathBuf>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleSection {
    ethertype: Option<u16>,
    protocol: Option<u8>,
    port: Option<u16>,
    destination: Option<IpAddr>,
    vni: Option<u32>,
    class: ClassName,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum ClassName {
    Priority,
    Rss,
    Plb,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Limiter {
    first_packets_per_second: Spanned<u64>,
    second_packets_per_second: Spanned<u64>,
    burst_us: Option<Spanned<u64>>,
    burst_packets: Option<Spanned<u64>>,
    sample_drops: Option<u32>,
    sample_ms: Option<u32>,
    #[serde(default)]
    bypass: Vec<Spanned<u32>>,
    test_seed: Option<u64>,
}

fn default_mtu() -> Spanned<u16> {
    Spanned::new(0..0, 1600)
}

fn default_frames() -> Spanned<u32> {
    Spanned::new(0..0, 2048)
}

fn default_spin() -> u64 {
    20
}

fn default_priority() -> bool {
    true
}

fn default_control() -> u64 {
    10_000
}

/// Maximum length of the name of a pod that is added, bytes.
const LONGEST_NAME: usize = 31;
/// Length of an Ethernet header with two VLAN tags, bytes.
const LINK_BYTES: usize = 22;

impl Config {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// All errors in the file.
    pub fn load(path: &Path) -> Result<Self, FileErrors> {
        file::load(path, |file: File, checker| check(file, checker))
    }

    /// Length of the longest frame, bytes.
    pub fn longest(&self) -> usize {
        self.device.longest
    }
}

impl PodSettings {
    /// Parses the settings of a pod that is added. `text` is TOML like the body of a `[[pods]]` section. `longest`:
    /// length of the longest frame, bytes.
    ///
    /// # Errors
    /// All errors in the settings. They name `path`.
    pub fn parse(path: &Path, text: &str, longest: usize) -> Result<Self, FileErrors> {
        file::parse(path, text, |pod: Pod, checker| {
            let name = pod.name.get_ref();
            let good = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
            if !(1..=LONGEST_NAME).contains(&name.len()) || !name.bytes().all(good) || name.starts_with('-') {
                let text = format!("name: {name:?} is not a pod's name; use 1 to {LONGEST_NAME} of a-z, 0-9 and -");
                checker.error(&pod.name, text);
            }
            Some(check_pod(&pod, longest, checker))
        })
    }
}

fn check(file: File, checker: &mut Checker<'_>) -> Option<Config> {
    let control = file.control.socket;
    checker.check(&control, check_socket(control.get_ref()));
    let device = file.device.get_ref();
    if !(576..=9000).contains(device.mtu.get_ref()) {
        checker.error(&device.mtu, format!("mtu = {}; 576 to 9000 can be had", device.mtu.get_ref()));
    }
    if !device.frames.get_ref().is_power_of_two() || !(64..=16_384).contains(device.frames.get_ref()) {
        checker.error(&device.frames, "frames is a power of two from 64 to 16384");
    }
    if file.pods.is_empty() && file.pods_directory.is_none() {
        checker.general(
            "no [[pods]]: there is nobody to give packets to; with a pods_directory, pods can be added at run time",
        );
    }
    if let Some(directory) = file.pods_directory.as_ref().filter(|directory| !directory.get_ref().is_absolute()) {
        checker.error(directory, format!("pods_directory: {} is not an absolute path", directory.get_ref().display()));
    }
    let longest = usize::from(*device.mtu.get_ref()) + LINK_BYTES;
    let pods = file.pods.iter().map(|pod| check_pod(pod, longest, checker)).collect();
    let mut sockets: Vec<&PathBuf> = Vec::new();
    for interface in file.pods.iter().flat_map(|pod| pod.interfaces.get_ref()) {
        if sockets.contains(&interface.socket.get_ref()) {
            checker.error(&interface.socket, "another interface has this socket, too");
        }
        sockets.push(interface.socket.get_ref());
    }
    Some(Config {
        control: control.into_inner(),
        metrics: file.control.metrics,
        device: RawConfig {
            device: device.name.clone(),
            mode: match device.mode {
                Mode::Auto => RawMode::Auto,
                Mode::XdpNative => RawMode::XdpNative,
                Mode::XdpGeneric => RawMode::XdpGeneric,
                Mode::Packet => RawMode::Packet,
            },
            longest,
            frames: *device.frames.get_ref(),
        },
        processor: file.pipeline.processor,
        spin_ns: file.pipeline.spin_us.saturating_mul(1000),
        pods,
        pods_directory: file.pods_directory.map(Spanned::into_inner),
    })
}

fn check_pod(pod: &Pod, longest: usize, checker: &mut Checker<'_>) -> PodSettings {
    let defaults = plb::Config::default();
    let get = |value: &Option<Spanned<u64>>, default| value.as_ref().map_or(default, |v| *v.get_ref());
    let entries = pod.queue_entries.as_ref().map_or(defaults.queue_entries, |v| *v.get_ref());
    let order_queues = pod.order_queues.as_ref().map_or(1, |v| *v.get_ref());
    let slots = match (&pod.payload_slots, &pod.header_only_from) {
        (Some(slots), _) => *slots.get_ref(),
        (None, Some(_)) => 2 * u32::from(order_queues) * entries,
        (None, None) => 0,
    };
    let balancer = plb::Config {
        pod: *pod.number.get_ref(),
        cores: *pod.cores.get_ref(),
        affinity: pod.affinity.as_ref().map_or(plb::Config::AFFINITY, |v| *v.get_ref()),
        order_queues,
        queue_entries: entries,
        timeout_ns: get(&pod.timeout_us, defaults.timeout_ns / 1000).saturating_mul(1000),
        payload_slots: slots,
        ..defaults
    };
    if let Err(error) = balancer.check() {
        let text = error.to_string();
        match error {
            plb::ConfigError::Cores(_) => checker.error(&pod.cores, text),
            plb::ConfigError::Affinity(_) => at(checker, &pod.affinity, &pod.name, text),
            plb::ConfigError::OrderQueues(_) => at(checker, &pod.order_queues, &pod.name, text),
            plb::ConfigError::QueueEntries(_) => at(checker, &pod.queue_entries, &pod.name, text),
            plb::ConfigError::Timeout(_) => at(checker, &pod.timeout_us, &pod.name, text),
            plb::ConfigError::PayloadSlots(_) => at(checker, &pod.payload_slots, &pod.name, text),
        }
    }
    let interfaces = pod.interfaces.get_ref();
    if !(1..=4).contains(&interfaces.len()) {
        checker.error(&pod.interfaces, format!("{} interfaces; a pod has 1 to 4", interfaces.len()));
    }
    for interface in interfaces {
        checker.check(&interface.socket, check_socket(interface.socket.get_ref()));
    }
    let mut limiter = LimiterConfig::default();
    let mut bypass = Vec::new();
    if let Some(section) = &pod.limiter {
        if let (Some(us), Some(_)) = (&section.burst_us, &section.burst_packets) {
            checker.error(us, "burst_us and burst_packets: give one of them");
        }
        if let Some(us) = section.burst_us.as_ref().filter(|us| !(1..=1_000_000).contains(us.get_ref())) {
            checker.error(us, format!("burst_us = {}; 1 to 1,000,000 can be had", us.get_ref()));
        }
        let rate = |per_second: u64| match (&section.burst_packets, &section.burst_us) {
            (Some(burst), _) => Rate { per_second, burst: *burst.get_ref() },
            (None, Some(us)) => Rate::with_burst(per_second, us.get_ref().saturating_mul(1000)),
            (None, None) => Rate::per_second(per_second),
        };
        limiter.first = rate(*section.first_packets_per_second.get_ref());
        limiter.second = rate(*section.second_packets_per_second.get_ref());
        limiter.sample_drops = section.sample_drops.unwrap_or(limiter.sample_drops);
        limiter.sample_ns = section.sample_ms.map_or(limiter.sample_ns, |ms| u64::from(ms) * 1_000_000);
        for vni in &section.bypass {
            if *vni.get_ref() > 0xff_ffff {
                checker.error(vni, "a VNI has 24 bits");
            }
            bypass.push(*vni.get_ref());
        }
        if bypass.len() > 64 {
            checker.error(&pod.name, "at most 64 tenants can be exempted");
        }
    }
    let rule = |section: &RuleSection| Rule {
        ethertype: section.ethertype,
        protocol: section.protocol,
        port: section.port,
        destination: section.destination,
        vni: section.vni,
        class: match section.class {
            ClassName::Priority => Class::Priority,
            ClassName::Rss => Class::Rss,
            ClassName::Plb => Class::Plb,
        },
    };
    PodSettings {
        pipeline: PodConfig {
            name: pod.name.get_ref().clone(),
            balancer,
            interfaces: interfaces.iter().map(|i| i.vlan).collect(),
            mac: pod.mac.as_ref().and_then(|text| {
                let mac = text.get_ref().parse::<Mac>().map_err(|error| format!("mac: {error}"));
                checker.check(text, mac)
            }),
            rules: Rules {
                own: pod.own.clone(),
                list: pod.rules.iter().map(rule).collect(),
                control_with_data: !pod.priority,
            },
            limiter,
            control: Rate { per_second: pod.control_packets_per_second, burst: pod.control_packets_per_second.max(64) },
            header_only_from: pod.header_only_from.as_ref().map(|v| *v.get_ref()),
            reliable: pod.transport.as_ref().map(|section| section.check(longest, checker)),
        },
        sockets: interfaces.iter().map(|i| i.socket.get_ref().clone()).collect(),
        bypass,
        rss: matches!(pod.mode, Spread::Rss),
        limiter_seed: pod.limiter.as_ref().and_then(|section| section.test_seed),
    }
}

/// Adds an error about a value, or about `otherwise` if the value was omitted.
fn at<T>(checker: &mut Checker<'_>, value: &Option<Spanned<T>>, otherwise: &Spanned<String>, text: String) {
    match value {
        Some(value) => checker.error(value, text),
        None => checker.error(otherwise, text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"[control]
socket = "/run/bifrost/nicd.sock"
[device]
name = "eth0"
mtu = 1600
[[pods]]
name = "vpc"
number = 1
cores = 2
own = ["10.0.0.1"]
interfaces = [{ vlan = 100, socket = "/run/bifrost/vpc.sock" }]
[pods.limiter]
first_packets_per_second = 8000
second_packets_per_second = 2000
"#;

    fn load(text: &str) -> Result<Config, String> {
        file::load_text(text, Config::load)
    }

    #[test]
    fn a_good_file() {
        let config = load(GOOD).unwrap();
        assert_eq!((config.longest(), config.pods[0].pipeline.limiter.first.per_second), (1622, 8000));
        assert_eq!(config.pods[0].pipeline.interfaces, [Some(100)]);
        let without = GOOD.replace("cores = 2", "cores = 2\npriority = false");
        let with_data = |text: &str| load(text).unwrap().pods[0].pipeline.rules.control_with_data;
        assert_eq!((with_data(GOOD), with_data(&without)), (false, true));
        for (line, bursts) in [("", [32, 32]), ("burst_us = 10000", [80, 32]), ("burst_packets = 7", [7, 7])] {
            let limiter = load(&format!("{GOOD}{line}\n")).unwrap().pods[0].pipeline.limiter;
            assert_eq!([limiter.first.burst, limiter.second.burst], bursts, "{line}");
        }
        let limiter = load(&format!("{GOOD}sample_drops = 0\nsample_ms = 7\n")).unwrap().pods[0].pipeline.limiter;
        assert_eq!((limiter.sample_drops, limiter.sample_ns), (0, 7_000_000));
    }

    #[test]
    fn pods_that_are_added() {
        let (_, text) = GOOD.split_once("[[pods]]\n").unwrap();
        let text = text.replace("[pods.limiter]", "mac = \"02:00:00:00:00:0a\"\n[limiter]");
        let parse = |text: &str| PodSettings::parse(Path::new("pod"), text, 1622).map_err(|error| error.to_string());
        let pod = parse(&text).unwrap();
        assert_eq!((&*pod.pipeline.name, pod.pipeline.mac), ("vpc", Some(Mac([2, 0, 0, 0, 0, 10]))));
        for (from, to, error) in [
            ("\"vpc\"", "\"../vpc\"", "pod:1: name: \"../vpc\" is not a pod's name; use 1 to 31 of a-z, 0-9 and -"),
            ("\"vpc\"", "\"\"", "pod:1: name: \"\" is not"),
            ("00:0a", "zz", "pod:6: mac: not a MAC address"),
            ("cores = 2", "cores = 0", "pod:3: a pod has 1 to 1,024 data cores, not 0"),
        ] {
            let text = parse(&text.replacen(from, to, 1)).unwrap_err();
            assert!(text.starts_with(error), "{text}");
        }
        let with = format!("pods_directory = \"pods\"\n{GOOD}");
        assert_eq!(load(&with).unwrap_err().trim(), "1: pods_directory: pods is not an absolute path");
    }

    #[test]
    fn errors_name_their_lines() {
        for (from, to, error) in [
            ("mtu = 1600", "mtu = 99", "5: mtu = 99; 576 to 9000 can be had"),
            ("cores = 2", "cores = 0", "9: a pod has 1 to 1,024 data cores, not 0"),
            ("number = 1", "nummer = 1", "8: unknown field `nummer`"),
            ("\"/run/bifrost/vpc.sock\"", "\"vpc.sock\"", "11: vpc.sock is no absolute path"),
            ("vlan = 100", "vlan = \"x\"", "11: invalid type: string \"x\", expected u16"),
            ("cores = 2", "cores = 2\norder_queues = 9", "10: an order queue"),
            ("cores = 2", "cores = 2\naffinity = 2000", "10: a flow's core may be ahead by"),
            ("= 2000", "= 2000\nburst_us = 0", "15: burst_us = 0; 1 to 1,000,000 can be had"),
            ("= 2000", "= 2000\nburst_us = 1\nburst_packets = 1", "15: burst_us and burst_packets: give one of them"),
        ] {
            let error_text = load(&GOOD.replace(from, to)).unwrap_err();
            let wanted = error.replace("an order queue", "a pod has 1 to 8 order queues, not 9");
            assert!(error_text.starts_with(&wanted), "{error_text}");
        }
        let transport = "[pods.transport]\naddresses = [\"10.0.0.1\"]\nmac = \"02:00:00:00:00:fe\"\nvnis = [100]\n\
                         hosts = [[\"10.0.0.11\"], [\"10.0.0.12\", \"10.0.1.12\"]]\n";
        let with = format!("{GOOD}{transport}memory_mib = 16\n");
        let config = load(&with).unwrap().pods.remove(0).pipeline.reliable.unwrap();
        assert_eq!((config.hosts.len(), config.memory_bytes, config.paths, config.port), (2, 16 << 20, 4, 4794));
        for (from, to, error) in [
            (
                "addresses = [\"10",
                "addresses = [\"10.0.0.3\", \"10",
                "16: addresses: the gateway has one address, or one of",
            ),
            ("02:00:00:00:00:fe", "02:00:00:00:00", "17: mac: "),
            ("02:00:00:00:00:fe", "03:00:00:00:00:fe", "17: mac: 03:00:00:00:00:fe is not a unicast MAC address"),
            ("[100]", "[16777216]", "18: vnis: 16777216 is not a VNI; use 0 to 16777215"),
            ("[100]", "[]", "18: vnis: none; name the VNIs"),
            ("10.0.1.12", "10.0.0.11", "19: hosts: 10.0.0.11: another host has this address, too"),
            ("10.0.1.12", "fd00::1", "19: hosts: fd00::1: the gateway has no address of this family"),
            ("[\"10.0.0.11\"]", "[]", "19: hosts: host 1: a host has 1 to 8 addresses"),
            ("mib = 16", "mib = 0", "20: memory_mib: 0; use 1 to 65536"),
            ("mib = 16", "mib = 70000", "20: memory_mib: 70000; use 1 to 65536"),
            ("memory_mib = 16", "paths = 9", "20: paths: 9 paths; a host has 1 to 8"),
            ("memory_mib = 16", "connections_per_host = 0", "20: connections_per_host: 0 connections"),
            ("memory_mib = 16", "port = 4789", "20: port: 4789 is the port of plain VXLAN; use another"),
            ("memory_mib = 16", "initial_rto_us = 0", "20: initial_rto_us: 0; use 100 to 10000000"),
        ] {
            let error_text = load(&with.replace(from, to)).unwrap_err();
            assert!(error_text.starts_with(error), "{to}: {error_text}");
        }
        let none = load("[control]\nsocket = \"/x\"\n[device]\nname = \"eth0\"\n").unwrap_err();
        assert!(
            none.trim().starts_with("no [[pods]]: there is nobody to give packets to; with a pods_directory"),
            "{none}"
        );
    }
}
