//! The result for a runtime, in its own version of the specification (section "Success").

use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Supported versions of the specification whose results differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Version {
    V0_4_0,
    V1_0_0,
    V1_1_0,
}

/// A created interface with its addresses and routes. Fields that other plugins have added are kept.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Attached {
    /// Interfaces.
    pub interfaces: Vec<Link>,
    /// Their addresses.
    pub ips: Vec<Address>,
    /// The container's routes.
    pub routes: Vec<Route>,
    /// Name servers, passed on from the IPAM plugin.
    #[serde(skip_serializing_if = "Value::is_null")]
    pub dns: Value,
}

/// An interface.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// Its name.
    pub name: String,
    /// Its MAC address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// Its MTU, bytes; since 1.1.0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u64>,
    /// The path of its network namespace; none: the host's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<String>,
}

/// An address.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Address {
    /// The address, with its subnet's prefix length.
    pub address: IpNet,
    /// The subnet's gateway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<IpAddr>,
    /// Index of its interface.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<usize>,
    /// `"4"` or `"6"`; until 1.0.0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
}

/// A route.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Route {
    /// Destination.
    pub dst: IpNet,
    /// Next hop; none: the gateway of its family's first address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gw: Option<IpAddr>,
}

impl Version {
    /// All supported versions.
    pub const ALL: [Version; 3] = [Version::V0_4_0, Version::V1_0_0, Version::V1_1_0];

    /// As written in configurations.
    pub const fn text(self) -> &'static str {
        match self {
            Version::V0_4_0 => "0.4.0",
            Version::V1_0_0 => "1.0.0",
            Version::V1_1_0 => "1.1.0",
        }
    }

    /// The version with that name, if it is supported.
    pub fn of(text: &str) -> Option<Version> {
        Version::ALL.into_iter().find(|version| version.text() == text)
    }
}

impl Attached {
    /// The result in a version of the specification.
    pub fn to_json(&self, version: Version) -> Value {
        let mut answer = self.clone();
        for ip in &mut answer.ips {
            let family = if ip.address.addr().is_ipv4() { "4" } else { "6" };
            ip.version = (version == Version::V0_4_0).then(|| family.to_owned());
        }
        if version != Version::V1_1_0 {
            answer.interfaces.iter_mut().for_each(|link| link.mtu = None);
        }
        let mut answer = serde_json::to_value(answer).unwrap_or_default();
        answer["cniVersion"] = version.text().into();
        answer
    }
}

/// The result of VERSION, which a runtime may request in any version, supported or not.
pub fn versions(asked_in: Option<&str>) -> Value {
    let version = asked_in.unwrap_or(Version::V1_1_0.text());
    json!({"cniVersion": version, "supportedVersions": Version::ALL.map(Version::text)})
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn attached() -> Attached {
        let address = |text: &str, gateway: &str| Address {
            address: text.parse().unwrap(),
            gateway: Some(gateway.parse().unwrap()),
            interface: Some(0),
            version: None,
        };
        Attached {
            interfaces: vec![Link {
                name: "eth0".into(),
                mac: Some("02:00:0a:00:00:05".into()),
                mtu: Some(1400),
                sandbox: Some("/run/netns/c1".into()),
            }],
            ips: vec![address("10.0.0.5/24", "10.0.0.254"), address("fd00::5/64", "fd00::1")],
            routes: vec![Route { dst: "0.0.0.0/0".parse().unwrap(), gw: None }],
            dns: json!({"nameservers": ["10.0.0.53"]}),
        }
    }

    #[test]
    fn each_version_gets_its_own_shape() {
        let old = attached().to_json(Version::V0_4_0);
        assert_eq!((&old["cniVersion"], &old["ips"][1]["version"]), (&json!("0.4.0"), &json!("6")));
        assert!(old["interfaces"][0].get("mtu").is_none());
        let newer = attached().to_json(Version::V1_0_0);
        assert!(newer["ips"][0].get("version").is_none() && newer["interfaces"][0].get("mtu").is_none());
        let newest = attached().to_json(Version::V1_1_0);
        assert_eq!(newest["interfaces"][0]["mtu"], 1400);
        assert_eq!(newest["dns"]["nameservers"][0], "10.0.0.53");
        // A result is understood when it returns as `prevResult`.
        for answer in [old, newer, newest] {
            let back: Attached = serde_json::from_value(answer).unwrap();
            assert_eq!(back.ips[0].address, attached().ips[0].address);
        }
    }
}
