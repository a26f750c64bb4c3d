//! The network's configuration, from standard input (specification, section "Network configuration format").

use std::path::PathBuf;

use ipnet::IpNet;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::answer::{Attached, Version};
use crate::call::Interface;
use crate::error::{Code, Error};

/// Maximum length of a configuration, bytes.
pub const MAX_BYTES: u64 = 4 << 20;
/// Bits of a megabit.
const MEGABIT: u64 = 1_000_000;

/// A network, as configured by an administrator and completed by a runtime.
#[derive(Clone, Debug)]
pub struct Network {
    /// Version of the configuration, and so of the result.
    pub version: Version,
    /// The network's name.
    pub name: String,
    /// The VPC of its containers.
    pub vni: u32,
    /// The control socket of `bifrostd`.
    pub socket: PathBuf,
    /// Keys that are passed unchanged to the port.
    pub port: Map<String, Value>,
    /// The IPAM plugin.
    pub ipam: Option<String>,
    /// Addresses that the runtime has chosen.
    pub addresses: Vec<IpNet>,
    /// The MAC address that the runtime has chosen.
    pub mac: Option<String>,
    /// Rate limits of the container, megabits per second.
    pub limits: Limits,
    /// The result of the previous plugin, or of this one when it attached the container.
    pub previous: Option<Attached>,
    /// Valid attachments, for [`Command::Gc`](crate::call::Command::Gc).
    pub valid: Option<Vec<Interface>>,
}

/// Limits that a runtime requests (the capability "bandwidth"), megabits per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// To the container.
    pub rx_mbit: Option<u64>,
    /// From the container.
    pub tx_mbit: Option<u64>,
}

/// Keys of the specification, and ours.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    cni_version: Option<String>,
    name: String,
    #[serde(rename = "type")]
    _type: String,
    #[serde(rename = "vni")]
    vni: u32,
    #[serde(default = "default_socket")]
    socket: PathBuf,
    ipam: Option<Ipam>,
    #[serde(default)]
    runtime_config: RuntimeConfig,
    #[serde(default)]
    args: Args,
    prev_result: Option<Attached>,
    #[serde(rename = "cni.dev/valid-attachments")]
    valid: Option<Vec<Attachment>>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

#[derive(Deserialize)]
struct Ipam {
    #[serde(rename = "type")]
    kind: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct RuntimeConfig {
    ips: Vec<String>,
    mac: Option<String>,
    bandwidth: Bandwidth,
}

/// Bits per second; bursts are not used: a port's are fixed.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Bandwidth {
    ingress_rate: u64,
    egress_rate: u64,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Args {
    cni: CniArgs,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct CniArgs {
    ips: Vec<String>,
}

#[derive(Deserialize)]
struct Attachment {
    #[serde(rename = "containerID")]
    container: String,
    ifname: String,
}

/// Keys that a port of `bifrostd` has under the same name.
const PORT_KEYS: [&str; 7] = ["mtu", "queues", "security_groups", "tx_mbit", "tx_kpps", "rx_mbit", "rx_kpps"];
/// Keys of the specification that have no effect here.
const OTHER_KEYS: [&str; 6] = ["capabilities", "dns", "disableCheck", "disableGC", "loadOnlyInlinedPlugins", "ipMasq"];

fn default_socket() -> PathBuf {
    PathBuf::from("/run/bifrost/bifrostd.sock")
}

impl Network {
    /// Parses a configuration.
    ///
    /// # Errors
    /// It is not JSON ([`Code::Decoding`]), has another version or an unknown key, or is invalid. The error names the
    /// key and the remedy.
    pub fn read(text: &[u8]) -> Result<Network, Error> {
        let value: Value = serde_json::from_slice(text)
            .map_err(|e| Error::new(Code::Decoding, format!("the network's configuration is not JSON: {e}")))?;
        let version = version(&value)?;
        let document: Document = serde_json::from_value(value)
            .map_err(|e| Error::new(Code::Configuration, format!("the network's configuration: {e}")))?;
        let _ = document.cni_version;
        let wrong = |message: String| Error::new(Code::Configuration, message);
        check_name(&document.name).map_err(wrong)?;
        let mut port = Map::new();
        for (key, value) in document.rest {
            if PORT_KEYS.contains(&key.as_str()) {
                port.insert(key, value);
            } else if key == "ipMasq" && value == Value::Bool(true) {
                return Err(unsupported(&key, &value, "configure an uplink and NAT in bifrostd"));
            } else if !OTHER_KEYS.contains(&key.as_str()) && !key.starts_with("cni.dev/") {
                return Err(unsupported(&key, &value, "see bifrost-cni --help for the keys"));
            }
        }
        let ipam = match document.ipam {
            Some(ipam) => ipam.kind.filter(|kind| !kind.is_empty()),
            None => None,
        };
        let chosen =
            if document.runtime_config.ips.is_empty() { document.args.cni.ips } else { document.runtime_config.ips };
        let address = |text: &String| {
            text.parse()
                .map_err(|_| wrong(format!("ips: {text:?} is not an address with prefix length, such as 10.0.0.5/24")))
        };
        let mbit = |bits: u64| (bits > 0).then_some(bits.div_ceil(MEGABIT));
        let Bandwidth { ingress_rate, egress_rate } = document.runtime_config.bandwidth;
        let valid = document
            .valid
            .map(|valid| valid.into_iter().map(|a| Interface { container: a.container, name: a.ifname }).collect());
        Ok(Network {
            version,
            name: document.name,
            vni: document.vni,
            socket: document.socket,
            port,
            ipam,
            addresses: chosen.iter().map(address).collect::<Result<_, _>>()?,
            mac: document.runtime_config.mac.filter(|mac| !mac.is_empty()),
            limits: Limits { rx_mbit: mbit(ingress_rate), tx_mbit: mbit(egress_rate) },
            previous: document.prev_result,
            valid,
        })
    }
}

/// The version of a configuration, or of a request for versions.
///
/// # Errors
/// It is not supported.
pub fn version(configuration: &Value) -> Result<Version, Error> {
    // Without a version it is the first one (specification, "cniVersion").
    let text = configuration.get("cniVersion").and_then(Value::as_str).unwrap_or("0.1.0");
    Version::of(text).ok_or_else(|| {
        let known = Version::ALL.map(Version::text).join(", ");
        Error::new(Code::Version, format!("cniVersion {text:?} is not supported; use one of {known}"))
    })
}

fn unsupported(key: &str, value: &Value, hint: &str) -> Error {
    Error::new(
        Code::Unsupported,
        format!("the network's configuration has {key:?}: {value}, which is not supported; {hint}"),
    )
}

fn check_name(name: &str) -> Result<(), String> {
    let begins = name.starts_with(|c: char| c.is_ascii_alphanumeric());
    if begins && name.len() <= 255 && name.chars().all(|c| c.is_ascii_alphanumeric() || "_.-".contains(c)) {
        return Ok(());
    }
    Err(format!("name {name:?} must begin with a letter or digit and contain only letters, digits, '_', '.' and '-'"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(value: &Value) -> Result<Network, Error> {
        Network::read(value.to_string().as_bytes())
    }

    fn whole() -> Value {
        json!({
            "cniVersion": "1.1.0", "name": "pods", "type": "bifrost-cni", "vni": 100, "mtu": 1400,
            "security_groups": ["web"], "ipam": {"type": "host-local", "ranges": []}, "capabilities": {"ips": true},
            "runtimeConfig": {"ips": ["10.0.0.5/24"], "mac": "02:00:00:00:00:05", "portMappings": [],
                              "bandwidth": {"ingressRate": 1, "ingressBurst": 1, "egressRate": 20_000_000, "egressBurst": 1}},
            "cni.dev/valid-attachments": [{"containerID": "c1", "ifname": "eth0"}],
        })
    }

    #[test]
    fn a_complete_configuration_is_parsed() {
        let network = read(&whole()).unwrap();
        assert_eq!((network.version, network.vni, network.ipam.as_deref()), (Version::V1_1_0, 100, Some("host-local")));
        assert_eq!(network.socket, PathBuf::from("/run/bifrost/bifrostd.sock"));
        assert_eq!(network.port["mtu"], 1400);
        assert_eq!(network.port["security_groups"], json!(["web"]));
        assert_eq!(network.addresses, ["10.0.0.5/24".parse().unwrap()]);
        assert_eq!(network.limits, Limits { rx_mbit: Some(1), tx_mbit: Some(20) });
        assert_eq!(network.valid, Some(vec![Interface { container: "c1".into(), name: "eth0".into() }]));
    }

    #[test]
    fn errors_name_the_key() {
        for (key, value, code, says) in [
            ("cniVersion", json!("0.2.0"), Code::Version, "1.1.0"),
            ("cniVersion", json!("2.0.0"), Code::Version, "0.4.0"),
            ("name", json!("../pods"), Code::Configuration, "name"),
            ("name", Value::Null, Code::Configuration, "string"),
            ("vni", json!("100"), Code::Configuration, "u32"),
            ("vpc", json!(100), Code::Unsupported, "vpc"),
            ("ipMasq", json!(true), Code::Unsupported, "NAT"),
            ("runtimeConfig", json!({"ips": ["10.0.0.5"]}), Code::Configuration, "10.0.0.5/24"),
        ] {
            let mut configuration = whole();
            configuration[key] = value;
            let error = read(&configuration).unwrap_err();
            assert_eq!(error.code, code, "{error:?}");
            assert!(error.message.contains(says), "{error:?}");
        }
        assert_eq!(Network::read(b"{").unwrap_err().code, Code::Decoding);
    }
}
