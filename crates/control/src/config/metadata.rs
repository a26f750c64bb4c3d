//! Instance metadata of a guest, served at 169.254.169.254: `[port.metadata]`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::Config;
use super::section::{Section, Sink};

/// Maximum size of user data, bytes, as in EC2.
const MAX_USER_DATA: usize = 16 << 10;
/// Maximum length of an instance id or a host name, characters.
const MAX_NAME: usize = 253;
/// Maximum number of SSH keys, and maximum length of each, characters.
const MAX_KEYS: usize = 16;
const MAX_KEY: usize = 4096;
/// Addresses of the metadata service.
const ADDRESSES: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::new(169, 254, 169, 254)), IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254))];

/// Instance metadata of a guest, in addition to the addresses of its port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Metadata {
    /// Identifies the guest; cloud-init in it runs its first-boot configuration again when this changes.
    pub instance_id: String,
    /// Its host name, without the VPC's domain.
    pub hostname: String,
    /// Public SSH keys of its users.
    pub public_keys: Vec<String>,
    /// User data, such as a script or cloud-config; at most 16 KiB.
    pub user_data: Option<String>,
}

/// The table `[port.metadata]` of the port `name`.
pub(super) fn metadata(name: &str, mut s: Section<'_, '_>) -> Metadata {
    let mut text = |key: &'static str| {
        let text: String = s.optional(key).unwrap_or_else(|| name.to_owned());
        let is_name = (1..=MAX_NAME).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic());
        if !is_name && !s.has_failed(key) {
            s.error(key, format!("{text:?}: use 1 to {MAX_NAME} printable ASCII characters without spaces"));
        }
        text
    };
    let (instance_id, hostname) = (text("instance_id"), text("hostname"));
    let public_keys: Vec<String> = s.list("public_keys", MAX_KEYS);
    for key in &public_keys {
        if key.len() > MAX_KEY || key.contains(['\n', '\r']) {
            s.error("public_keys", format!("a key is one line of at most {MAX_KEY} characters"));
        }
    }
    let user_data: Option<String> = s.optional("user_data");
    if let Some(len) = user_data.as_ref().map(String::len).filter(|len| *len > MAX_USER_DATA) {
        s.error("user_data", format!("{len} bytes are more than {MAX_USER_DATA}; let it fetch the rest"));
    }
    s.finish();
    Metadata { instance_id, hostname, public_keys, user_data }
}

/// The VPC must have a gateway, through which guests reach the service, and no port may have the service's addresses.
pub(super) fn check(config: &Config, sink: &Sink<'_>) {
    for (i, port) in config.ports.iter().enumerate().filter(|(_, port)| port.metadata.is_some()) {
        let field = format!("port[{i}].metadata");
        let Some(vpc) = config.vpc(port.vni).filter(|_| !sink.failed(&field) && !sink.failed_within("vpc")) else {
            continue;
        };
        if vpc.gateway.is_empty() {
            sink.error(
                &field,
                format!("VNI {} has no gateway, through which guests reach the metadata service; add one", port.vni),
            );
        }
        let own = config.ports.iter().filter(|other| other.vni == port.vni);
        let mut own =
            own.flat_map(|other| other.addresses.iter().map(ipnet::IpNet::addr).chain(other.shared.iter().copied()));
        if let Some(address) = own.find(|address| ADDRESSES.contains(address)) {
            sink.error(&field, format!("a port in VNI {} has {address}, the metadata service's address", port.vni));
        }
    }
}
