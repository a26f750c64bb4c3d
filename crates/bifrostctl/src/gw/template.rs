//! What pods of a service have in common, and what each of them gets: its part of `bifrost-nicd`, and its configuration.
//!
//! A template is the configuration of `bifrost-gw` without what differs from pod to pod, and a section `[pod]`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

use serde::Deserialize;
use toml::{Table, Value};

/// The image that `make gw-image` builds.
const IMAGE: &str = "localhost/bifrost-gw";
/// Of a pod's interfaces.
const MAX_INTERFACES: usize = 4;

/// Pods of a service.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Template {
    pub(crate) pod: PodSection,
    /// The same for templates that say the same: without comments, and in one order.
    pub(crate) fingerprint: String,
    /// The configuration of `bifrost-gw`, without `[pod]`.
    gateway: Table,
}

/// The section `[pod]`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PodSection {
    /// The container's image.
    #[serde(default = "default_image")]
    pub(crate) image: String,
    /// Workers of each pod.
    pub(crate) cores: u16,
    /// What a pod may have, MiB.
    pub(crate) memory_mib: Option<u64>,
    /// VLANs of the interfaces; none: one interface, for frames without a tag.
    #[serde(default)]
    pub(crate) vlans: Vec<u16>,
    /// Addresses on the network of the switch, of which each pod gets one.
    pub(crate) links: Vec<Ipv4Addr>,
    /// A network of 96 bits on the same link, such as `fd01::`: a pod's IPv6 address there ends with its IPv4 address.
    links6: Option<Ipv6Addr>,
    /// More of `[[pods]]` of `bifrost-nicd`.
    #[serde(default)]
    pipeline: Table,
}

/// What one pod gets.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Plan {
    /// For `bifrost-nicd`: `add_pod`.
    pub(crate) settings: String,
    /// The configuration of its `bifrost-gw`.
    pub(crate) configuration: String,
}

/// What differs from pod to pod.
#[derive(Clone, Debug)]
pub(crate) struct Choice<'a> {
    pub(crate) name: &'a str,
    pub(crate) number: u16,
    pub(crate) link: Ipv4Addr,
    /// Of the workers, in order.
    pub(crate) processors: Vec<usize>,
    /// Where its sockets are.
    pub(crate) directory: &'a Path,
}

fn default_image() -> String {
    IMAGE.to_owned()
}

impl Template {
    /// Reads a template.
    ///
    /// # Errors
    /// What is wrong with it, with the line.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut gateway: Table = toml::from_str(text).map_err(|error| error.to_string())?;
        let fingerprint = gateway.to_string();
        let pod =
            gateway.remove("pod").ok_or("no section [pod]: it says how many `cores` a pod has, and its `links`")?;
        let pod: PodSection = pod.try_into().map_err(|error: toml::de::Error| format!("[pod]: {}", error.message()))?;
        if pod.vlans.len() > MAX_INTERFACES {
            return Err(format!(
                "[pod] vlans: {} of them; a pod has at most {MAX_INTERFACES} interfaces",
                pod.vlans.len()
            ));
        }
        if pod.links.is_empty() {
            return Err("[pod] links: none; give an address on the network of the switch for each pod".to_owned());
        }
        if let Some(network) = pod.links6.filter(|network| network.to_bits() as u32 != 0) {
            return Err(format!(
                "[pod] links6: {network} is not a network of 96 bits such as fd01::; the last 32 bits are the pod's \
                 IPv4 address"
            ));
        }
        let ours =
            [("name", ""), ("number", ""), ("cores", ""), ("own", ""), ("mac", ""), ("interfaces", "; name `vlans`")];
        if let Some((key, hint)) = ours.iter().find(|(key, _)| pod.pipeline.contains_key(*key)) {
            return Err(format!("[pod.pipeline] {key}: it is chosen for each pod; take it out{hint}"));
        }
        let section = gateway.get("gateway").and_then(Value::as_table).ok_or("no section [gateway]")?;
        for key in ["pod", "cores", "processors", "interfaces", "mac", "link_addresses"] {
            if section.contains_key(key) {
                return Err(format!("[gateway] {key}: it is chosen for each pod; take it out"));
            }
        }
        if gateway.contains_key("control") {
            return Err("[control]: the sockets are chosen for each pod; take it out".to_owned());
        }
        Ok(Template { pod, fingerprint, gateway })
    }

    /// What a pod gets.
    pub(crate) fn plan(&self, choice: &Choice<'_>) -> Plan {
        let Choice { name, number, link, processors, directory } = choice;
        let path = |name: String| directory.join(name).display().to_string();
        let sockets: Vec<String> = (0..self.pod.vlans.len().max(1)).map(|n| path(format!("{n}.sock"))).collect();
        let mac = mac(*link);
        let addresses = self.gateway.get("gateway").and_then(|section| section.get("addresses"));
        let link6 = self.pod.links6.map(|network| Ipv6Addr::from_bits(network.to_bits() | u128::from(link.to_bits())));
        let mut links = vec![Value::from(link.to_string())];
        links.extend(link6.map(|link| Value::from(link.to_string())));
        let mut own = links.clone();
        own.extend(addresses.and_then(Value::as_array).into_iter().flatten().cloned());

        let mut settings = Table::new();
        settings.insert("name".to_owned(), Value::from(*name));
        settings.insert("number".to_owned(), i64::from(*number).into());
        settings.insert("cores".to_owned(), i64::from(self.pod.cores).into());
        settings.insert("mac".to_owned(), mac.clone().into());
        settings.insert("own".to_owned(), own.into());
        let interface = |(index, socket): (usize, &String)| {
            let mut interface = Table::new();
            if let Some(vlan) = self.pod.vlans.get(index) {
                interface.insert("vlan".to_owned(), i64::from(*vlan).into());
            }
            interface.insert("socket".to_owned(), socket.clone().into());
            Value::from(interface)
        };
        let interfaces: Vec<Value> = sockets.iter().enumerate().map(interface).collect();
        settings.insert("interfaces".to_owned(), interfaces.into());
        settings.extend(self.pod.pipeline.clone());

        let mut configuration = self.gateway.clone();
        let mut control = Table::new();
        control.insert("socket".to_owned(), path("gw.sock".to_owned()).into());
        configuration.insert("control".to_owned(), control.into());
        if let Some(section) = configuration.get_mut("gateway").and_then(Value::as_table_mut) {
            let processors: Vec<Value> = processors.iter().map(|number| Value::from(*number as i64)).collect();
            section.insert("pod".to_owned(), i64::from(*number).into());
            section.insert("cores".to_owned(), i64::from(self.pod.cores).into());
            section.insert("processors".to_owned(), processors.into());
            section.insert("interfaces".to_owned(), sockets.into_iter().map(Value::from).collect::<Vec<_>>().into());
            section.insert("mac".to_owned(), mac.into());
            section.insert("link_addresses".to_owned(), links.into());
        }
        Plan { settings: settings.to_string(), configuration: configuration.to_string() }
    }

    /// Whether pods have sessions of translation.
    pub(crate) fn translates(&self) -> bool {
        self.gateway.get("pools").and_then(Value::as_array).is_some_and(|pools| !pools.is_empty())
    }

    /// The first address that no pod has; `own`: those that pods have.
    pub(crate) fn free_link(&self, own: &[IpAddr]) -> Option<Ipv4Addr> {
        self.pod.links.iter().copied().find(|link| !own.contains(&IpAddr::V4(*link)))
    }
}

/// The configuration of a pod that announces nothing until it is told to; none: it has no BGP.
pub(crate) fn drained(configuration: &str) -> Option<String> {
    let mut configuration: Table = toml::from_str(configuration).ok()?;
    configuration.get_mut("bgp")?.as_table_mut()?.insert("drained".to_owned(), true.into());
    Some(configuration.to_string())
}

/// The MAC address of the pod with an address: local (IEEE 802, bit 1 of the first octet), and another one for each.
fn mac(link: Ipv4Addr) -> String {
    let [a, b, c, d] = link.octets();
    format!("02:bf:{a:02x}:{b:02x}:{c:02x}:{d:02x}")
}

/// Processors as in `2-3,6`, in order.
///
/// # Errors
/// It is not such a list.
pub(crate) fn processors(list: &str) -> Result<Vec<usize>, String> {
    const MOST: usize = 4096;
    let bad = || format!("{list:?} is not a list of processors such as 2-3,6");
    let mut all = Vec::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().map_err(|_| bad())?, last.parse().map_err(|_| bad())?);
        if first > last || last >= MOST {
            return Err(bad());
        }
        all.extend(first..=last);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEMPLATE: &str = r#"
[pod]
cores = 2
memory_mib = 512
vlans = [100, 101]
links = ["10.1.0.11", "10.1.0.12"]
pipeline = { order_queues = 2, limiter = { first_packets_per_second = 8, second_packets_per_second = 2 } }

[gateway]
addresses = ["10.0.0.1", "fd00::1"]
on_link = ["10.1.0.0/24"]
router = "10.1.0.254"

[[vpcs]]
vni = 100
routes = [{ prefix = "192.168.0.0/24", to = "local" }]
"#;

    #[test]
    fn a_pod_that_takes_sessions_over_begins_drained() {
        let with = format!("{TEMPLATE}\n[[pools]]\nname = \"nat\"\naddresses = [\"203.0.113.1\"]\n");
        let translates = [TEMPLATE, &with].map(|text| Template::parse(text).unwrap().translates());
        assert_eq!(translates, [false, true]);
        assert_eq!(drained(TEMPLATE), None);
        let text = drained(&format!("{with}[bgp]\nasn = 1\n")).unwrap();
        let table: Table = toml::from_str(&text).unwrap();
        assert_eq!(table["bgp"]["drained"], Value::from(true));
        assert_eq!(table["bgp"]["asn"], Value::from(1));
    }

    #[test]
    fn a_pod_of_a_template() {
        let template = Template::parse(TEMPLATE).unwrap();
        assert_eq!((&*template.pod.image, template.pod.memory_mib), ("localhost/bifrost-gw", Some(512)));
        let plan = template.plan(&Choice {
            name: "vpc-1",
            number: 7,
            link: [10, 1, 0, 12].into(),
            processors: vec![2, 3],
            directory: Path::new("/pods/vpc-1"),
        });
        let settings: Table = toml::from_str(&plan.settings).unwrap();
        let expected = r#"
name = "vpc-1"
number = 7
cores = 2
mac = "02:bf:0a:01:00:0c"
own = ["10.1.0.12", "10.0.0.1", "fd00::1"]
interfaces = [{ vlan = 100, socket = "/pods/vpc-1/0.sock" }, { vlan = 101, socket = "/pods/vpc-1/1.sock" }]
order_queues = 2
limiter = { first_packets_per_second = 8, second_packets_per_second = 2 }
"#;
        assert_eq!(settings, toml::from_str(expected).unwrap(), "{}", plan.settings);
        let configuration: Table = toml::from_str(&plan.configuration).unwrap();
        let expected = r#"
control = { socket = "/pods/vpc-1/gw.sock" }
[gateway]
pod = 7
cores = 2
processors = [2, 3]
interfaces = ["/pods/vpc-1/0.sock", "/pods/vpc-1/1.sock"]
mac = "02:bf:0a:01:00:0c"
link_addresses = ["10.1.0.12"]
addresses = ["10.0.0.1", "fd00::1"]
on_link = ["10.1.0.0/24"]
router = "10.1.0.254"
[[vpcs]]
vni = 100
routes = [{ prefix = "192.168.0.0/24", to = "local" }]
"#;
        assert_eq!(configuration, toml::from_str(expected).unwrap(), "{}", plan.configuration);
        let both = Template::parse(&TEMPLATE.replace("cores = 2", "cores = 2\nlinks6 = \"fd01::\"")).unwrap();
        let choice =
            Choice { name: "a", number: 1, link: [10, 1, 0, 12].into(), processors: vec![], directory: Path::new("/") };
        let plan = both.plan(&choice);
        let settings: Table = toml::from_str(&plan.settings).unwrap();
        assert_eq!(
            settings["own"],
            ["10.1.0.12", "fd01::a01:c", "10.0.0.1", "fd00::1"].map(Value::from).to_vec().into()
        );
        let configuration: Table = toml::from_str(&plan.configuration).unwrap();
        let links = &configuration["gateway"]["link_addresses"];
        assert_eq!(links, &["10.1.0.12", "fd01::a01:c"].map(Value::from).to_vec().into());
        let used: [IpAddr; 2] = [[10, 1, 0, 11].into(), [10, 0, 0, 1].into()];
        assert_eq!(template.free_link(&used), Some([10, 1, 0, 12].into()));
        assert_eq!(template.free_link(&[used[0], [10, 1, 0, 12].into()]), None);
    }

    #[test]
    fn the_shipped_template() {
        let template = Template::parse(include_str!("../../../../packaging/gateway/vpc.toml")).unwrap();
        assert_eq!(template.pod.links.len(), 4);
    }

    #[test]
    fn errors_say_where() {
        for (from, to, error) in [
            ("[pod]", "[pods]", "no section [pod]"),
            ("cores = 2", "core = 2", "[pod]: unknown field `core`"),
            ("links = [\"10.1.0.11\", \"10.1.0.12\"]", "links = []", "[pod] links: none"),
            ("cores = 2", "cores = 2\nlinks6 = \"fd01::1\"", "[pod] links6: fd01::1 is not a network of 96 bits"),
            ("[100, 101]", "[1, 2, 3, 4, 5]", "[pod] vlans: 5 of them; a pod has at most 4"),
            ("order_queues = 2", "mac = \"\"", "[pod.pipeline] mac: it is chosen for each pod"),
            ("on_link =", "pod = 1\non_link =", "[gateway] pod: it is chosen for each pod"),
            ("[gateway]", "[control]\nsocket = \"/x\"\n[gateway]", "[control]: the sockets are chosen"),
            ("[gateway]", "[gatewai]", "no section [gateway]"),
            ("router =", "router", "TOML parse error at line 12"),
        ] {
            let text = Template::parse(&TEMPLATE.replacen(from, to, 1)).unwrap_err();
            assert!(text.starts_with(error), "{text}");
        }
    }

    #[test]
    fn lists_of_processors() {
        assert_eq!(processors("2-4,7").unwrap(), [2, 3, 4, 7]);
        for bad in ["", "a", "3-2", "1,", "0-99999999999", "-1"] {
            assert!(processors(bad).is_err(), "{bad}");
        }
    }
}
