//! The port of `bifrostd` for an attachment.

use std::net::IpAddr;

use bifrost_control::api::{ApplyItem, ApplyOp};
use bifrost_control::config::Kind;
use ipnet::IpNet;
use serde_json::{Value, json};

use crate::answer::{Address, Attached, Link};
use crate::call::Interface;
use crate::error::{Code, Error};
use crate::network::Network;

/// The MTU of a port whose configuration has none, bytes.
const DEFAULT_MTU: u64 = 1500;
/// Characters of the container's identifier used in the name of its port.
const CONTAINER_CHARACTERS: usize = 12;
/// Characters of the network's name used in that of its owner.
const NETWORK_CHARACTERS: usize = 40;
/// Maximum length of an owner's name, bytes.
const MAX_OWNER: usize = 63;

/// An attachment to create.
#[derive(Clone, Debug)]
pub struct Attachment {
    /// The port, as sent to `bifrostd`.
    pub item: ApplyItem,
    /// The result for the runtime.
    pub attached: Attached,
    /// Routes that the port itself does not configure.
    pub routes: Vec<(IpNet, IpAddr)>,
}

/// The owner of a network's ports: `cni.` and the network's name, restricted to the characters and length of owners.
pub fn owner(network: &str) -> String {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
    let owner = format!("cni.{network}");
    if owner.len() <= MAX_OWNER && network.chars().all(plain) {
        return owner;
    }
    let name = network.chars().take(NETWORK_CHARACTERS).map(|c| c.to_ascii_lowercase());
    let name: String = name.map(|c| if plain(c) { c } else { '-' }).collect();
    format!("cni.{name}.{:08x}", crc32fast::hash(network.as_bytes()))
}

/// The unique name of an attachment's port. It starts with the container's identifier.
pub fn port_name(network: &str, interface: &Interface) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' };
    let container: String = interface.container.chars().take(CONTAINER_CHARACTERS).collect();
    let name: String = interface.name.chars().map(plain).collect();
    // None of the three has a slash.
    let whole = format!("{network}/{}/{}", interface.container, interface.name);
    format!("{container}.{name}.{:08x}", crc32fast::hash(whole.as_bytes()))
}

impl Attachment {
    /// The attachment of a container to a network, with the addresses allocated for it.
    ///
    /// # Errors
    /// There is no address, or a route has no gateway.
    pub fn new(network: &Network, interface: &Interface, netns: &str, given: Attached) -> Result<Attachment, Error> {
        let wrong = |message: &str| Error::new(Code::Configuration, message.to_owned());
        let Some(first) = given.ips.first().map(|ip| ip.address.addr()) else {
            return Err(wrong("no address: add \"ipam\", or the capability \"ips\" if the runtime passes addresses"));
        };
        let routes = given.routes.iter().map(|route| match route.gw.or_else(|| gateway(&given.ips, route.dst)) {
            Some(gateway) => Ok((route.dst, gateway)),
            None => {
                Err(wrong(&format!("the route to {} has no gateway, and no address of its family has one", route.dst)))
            }
        });
        let mut routes = routes.collect::<Result<Vec<_>, _>>()?;
        // The port itself has one default route, and restores it if its device is created again.
        let default = routes.iter().position(|(to, _)| to.prefix_len() == 0).map(|at| routes.remove(at).1);

        let mac = network.mac.clone().unwrap_or_else(|| mac_of(first));
        let mut spec = network.port.clone();
        spec.insert("name".into(), port_name(&network.name, interface).into());
        spec.insert("vni".into(), network.vni.into());
        spec.insert("mac".into(), mac.clone().into());
        spec.insert("addresses".into(), given.ips.iter().map(|ip| Value::from(ip.address.to_string())).collect());
        spec.insert("netns".into(), netns.into());
        spec.insert("device".into(), interface.name.clone().into());
        if let Some(gateway) = default {
            spec.insert("default_gateway".into(), gateway.to_string().into());
        }
        for (key, limit) in [("rx_mbit", network.limits.rx_mbit), ("tx_mbit", network.limits.tx_mbit)] {
            if let Some(limit) = limit {
                spec.insert(key.into(), limit.into());
            }
        }
        let mtu = spec.get("mtu").and_then(Value::as_u64).unwrap_or(DEFAULT_MTU);
        let item = ApplyItem {
            op: ApplyOp::Set,
            kind: Kind::Port,
            key: None,
            // An existing port stays as it is, and bifrostd reports that.
            generation: Some(1),
            owner: owner(&network.name),
            spec: Some(Value::Object(spec)),
        };

        let before = network.previous.clone().unwrap_or_default();
        let at = before.interfaces.len();
        let ips = given.ips.into_iter().map(|ip| Address { interface: Some(at), version: None, ..ip });
        let link =
            Link { name: interface.name.clone(), mac: Some(mac), mtu: Some(mtu), sandbox: Some(netns.to_owned()) };
        let attached = Attached {
            interfaces: before.interfaces.into_iter().chain([link]).collect(),
            ips: before.ips.into_iter().chain(ips).collect(),
            routes: before.routes.into_iter().chain(given.routes).collect(),
            dns: if given.dns.is_null() { before.dns } else { given.dns },
        };
        Ok(Attachment { item, attached, routes })
    }
}

/// The request that removes an attachment's port.
pub fn removal(network: &str, key: String) -> ApplyItem {
    ApplyItem {
        op: ApplyOp::Delete,
        kind: Kind::Port,
        key: Some(key),
        generation: None,
        owner: owner(network),
        spec: None,
    }
}

/// Addresses that the runtime has chosen, in the form of an IPAM plugin's result.
pub fn chosen(addresses: &[IpNet]) -> Attached {
    let ip = |address: &IpNet| Address { address: *address, gateway: None, interface: None, version: None };
    Attached { ips: addresses.iter().map(ip).collect(), ..Attached::default() }
}

/// Compares an attachment with its state when the container was attached.
///
/// # Errors
/// [`Code::UnknownContainer`] if there is no port, [`Code::Changed`] if the port differs.
pub fn check(interface: &Interface, previous: &Attached, port: Option<&Value>) -> Result<(), Error> {
    let of = |what: &str| format!("{} of container {}: {what}", interface.name, interface.container);
    let Some(port) = port else {
        return Err(Error::new(Code::UnknownContainer, of("bifrostd has no port for it; attach it again")));
    };
    let Some(at) = previous.interfaces.iter().position(|link| link.name == interface.name && link.sandbox.is_some())
    else {
        return Err(Error::new(Code::Configuration, of("prevResult does not contain this interface")));
    };
    let changed = |what: &str, is: &Value, was: Value| {
        if *is == was { Ok(()) } else { Err(Error::new(Code::Changed, of(&format!("{what} is {is}, and was {was}")))) }
    };
    let ips = previous.ips.iter().filter(|ip| ip.interface == Some(at));
    changed("addresses", &port["addresses"], ips.map(|ip| ip.address.to_string()).collect())?;
    changed("mac", &port["mac"], json!(previous.interfaces[at].mac))
}

/// The gateway of the first address of a route's family.
fn gateway(ips: &[Address], to: IpNet) -> Option<IpAddr> {
    ips.iter().filter(|ip| ip.address.addr().is_ipv4() == to.addr().is_ipv4()).find_map(|ip| ip.gateway)
}

/// A MAC address that is unique in the subnet, because it is derived from the container's address: locally
/// administered, with the IPv4 address itself, or the CRC of an IPv6 address, which differs if only the last 32 bits
/// do.
fn mac_of(address: IpAddr) -> String {
    let [a, b, c, d, e] = match address {
        IpAddr::V4(address) => {
            let [a, b, c, d] = address.octets();
            [0x42, a, b, c, d]
        }
        IpAddr::V6(address) => {
            let [a, b, c, d] = crc32fast::hash(&address.octets()).to_be_bytes();
            [0x46, a, b, c, d]
        }
    };
    format!("02:{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn interface(container: &str, name: &str) -> Interface {
        Interface { container: container.into(), name: name.into() }
    }

    fn network(extra: Value) -> Network {
        let mut configuration = json!({"cniVersion": "1.0.0", "name": "pods", "type": "bifrost-cni", "vni": 100});
        configuration.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        Network::read(configuration.to_string().as_bytes()).unwrap()
    }

    fn given(value: Value) -> Attached {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn an_attachment_is_a_port() {
        let network = network(json!({"mtu": 1400, "security_groups": ["web"],
                                     "runtimeConfig": {"bandwidth": {"egressRate": 5_000_000}}}));
        let given = given(json!({
            "ips": [{"version": "4", "address": "10.0.0.5/24", "gateway": "10.0.0.254"},
                    {"version": "6", "address": "fd00::5/64", "gateway": "fd00::1"}],
            "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}, {"dst": "10.9.0.0/16", "gw": "10.0.0.9"}],
        }));
        let made = Attachment::new(&network, &interface("0123456789abcdef", "eth0"), "/run/netns/c", given).unwrap();
        let spec = made.item.spec.unwrap();
        assert!(spec["name"].as_str().unwrap().starts_with("0123456789ab.eth0."), "{spec}");
        assert_eq!(spec["mac"], "02:42:0a:00:00:05");
        assert_eq!(spec["addresses"], json!(["10.0.0.5/24", "fd00::5/64"]));
        assert_eq!((&spec["default_gateway"], &spec["tx_mbit"]), (&json!("10.0.0.254"), &json!(5)));
        assert_eq!((&spec["device"], &spec["netns"]), (&json!("eth0"), &json!("/run/netns/c")));
        let routes: Vec<_> = made.routes.iter().map(|(to, by)| format!("{to} {by}")).collect();
        assert_eq!(routes, ["::/0 fd00::1", "10.9.0.0/16 10.0.0.9"]);
        assert_eq!(made.attached.interfaces[0].mtu, Some(1400));
        assert!(made.attached.ips.iter().all(|ip| ip.interface == Some(0)));
        assert_eq!(made.item.owner, "cni.pods");
    }

    #[test]
    fn bifrostd_reads_the_port_as_written() {
        let network = network(json!({}));
        let given = given(json!({"ips": [{"address": "10.0.0.5/24"}]}));
        let made = Attachment::new(&network, &interface("c1", "eth0"), "/run/netns/c", given).unwrap();
        let object = bifrost_control::config::Object::parse(Kind::Port, made.item.spec.as_ref().unwrap(), 1);
        assert!(object.is_ok(), "{object:?}");
    }

    #[test]
    fn without_addresses_or_gateways_there_is_no_attachment() {
        let network = network(json!({}));
        for (given, says) in [
            (json!({}), "ipam"),
            (json!({"ips": [{"address": "10.0.0.5/24"}], "routes": [{"dst": "0.0.0.0/0"}]}), "0.0.0.0/0"),
            (json!({"ips": [{"address": "10.0.0.5/24", "gateway": "10.0.0.1"}], "routes": [{"dst": "::/0"}]}), "::/0"),
        ] {
            let made =
                Attachment::new(&network, &interface("c1", "eth0"), "/n", serde_json::from_value(given).unwrap());
            let error = made.unwrap_err();
            assert!(error.code == Code::Configuration && error.message.contains(says), "{error:?}");
        }
    }

    #[test]
    fn the_results_of_earlier_plugins_are_kept() {
        let network = network(json!({"prevResult": {
            "interfaces": [{"name": "lo", "sandbox": "/n"}], "ips": [{"address": "127.0.0.1/8", "interface": 0}]}}));
        let given = given(json!({"ips": [{"address": "10.0.0.5/24"}]}));
        let made = Attachment::new(&network, &interface("c1", "eth0"), "/n", given).unwrap();
        assert_eq!(made.attached.interfaces.len(), 2);
        assert_eq!(made.attached.ips.iter().map(|ip| ip.interface).collect::<Vec<_>>(), [Some(0), Some(1)]);
    }

    #[test]
    fn a_changed_port_is_noticed() {
        let network = network(json!({}));
        let interface = interface("c1", "eth0");
        let made = Attachment::new(&network, &interface, "/n", given(json!({"ips": [{"address": "10.0.0.5/24"}]})));
        let Attachment { item, attached, .. } = made.unwrap();
        let port = item.spec.unwrap();
        let code = |port: Option<&Value>| check(&interface, &attached, port).map_err(|e| e.code);
        assert_eq!(code(Some(&port)), Ok(()));
        assert_eq!(code(None), Err(Code::UnknownContainer));
        for (key, value) in [("addresses", json!(["10.0.0.6/24"])), ("mac", json!("02:00:00:00:00:01"))] {
            let mut port = port.clone();
            port[key] = value;
            assert_eq!(code(Some(&port)), Err(Code::Changed), "{key}");
        }
    }

    proptest! {
        #[test]
        fn bifrostd_accepts_the_names(network in "[A-Za-z0-9][A-Za-z0-9_.-]{0,254}", container in "[a-z0-9][a-zA-Z0-9_.-]{0,100}",
                                            name in "[!-.0-9;-~]{1,15}") {
            let interface = interface(&container, &name);
            let port = port_name(&network, &interface);
            prop_assert!(port.len() <= 63 && port.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c)), "{port}");
            let owner = owner(&network);
            prop_assert!(owner.len() <= 63, "{owner}");
            prop_assert!(owner.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "-.".contains(c)), "{owner}");
        }

        #[test]
        fn no_two_attachments_have_one_port(a in "[a-c]{1,2}", b in "[a-c]{1,2}", c in "[a-c]{1,2}", d in "[a-c]{1,2}") {
            let (one, other) = (port_name("n", &interface(&a, &b)), port_name("n", &interface(&c, &d)));
            prop_assert_eq!(one == other, (a, b) == (c, d));
        }

        #[test]
        fn adjacent_addresses_have_different_mac_addresses(prefix in any::<u128>(), a in any::<u32>(), b in any::<u32>()) {
            let of = |low: u32| mac_of(IpAddr::from((prefix & !0xffff_ffff | u128::from(low)).to_be_bytes()));
            prop_assert_eq!(of(a) == of(b), a == b);
            let of = |low: u32| mac_of(IpAddr::from(low.to_be_bytes()));
            prop_assert_eq!(of(a) == of(b), a == b);
        }
    }
}
