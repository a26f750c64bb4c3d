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
    #[serde(default)]
    pub(crate) links: Vec<Ipv4Addr>,
    /// A network of 96 bits on the same link, such as `fd01::`: a pod's IPv6 address there ends with its IPv4 address.
    links6: Option<Ipv6Addr>,
    /// Several links, each with a network of its own, in place of `vlans`, `links` and `links6`.
    #[serde(default)]
    networks: Vec<Network>,
    /// More of `[[pods]]` of `bifrost-nicd`.
    #[serde(default)]
    pipeline: Table,
}

/// A section `[[pod.networks]]`: a link of each pod.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Network {
    /// The number of the pipeline that it is behind: of `--nicd`, from 0.
    #[serde(default)]
    pipeline: usize,
    /// None: frames without a tag.
    vlan: Option<u16>,
    /// Addresses on it, of which each pod gets one.
    links: Vec<Ipv4Addr>,
    /// See [`PodSection::links6`].
    links6: Option<Ipv6Addr>,
    /// The rest is for `[[links]]` of `bifrost-gw`.
    on_link: Vec<String>,
    router: Option<IpAddr>,
    peers: Option<Vec<Ipv4Addr>>,
}

/// What one pod gets.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Plan {
    /// For each `bifrost-nicd` that it is behind, by the number of its `--nicd`: `add_pod`.
    pub(crate) settings: Vec<(usize, String)>,
    /// The configuration of its `bifrost-gw`.
    pub(crate) configuration: String,
}

/// What differs from pod to pod.
#[derive(Clone, Debug)]
pub(crate) struct Choice<'a> {
    pub(crate) name: &'a str,
    pub(crate) number: u16,
    /// Its address on each link.
    pub(crate) links: Vec<Ipv4Addr>,
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
        check_networks(&pod)?;
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
        if !pod.networks.is_empty() {
            if let Some(key) = ["on_link", "router"].into_iter().find(|key| section.contains_key(*key)) {
                return Err(format!("[gateway] {key}: each of [[pod.networks]] has its own; move it there"));
            }
            if gateway.get("bgp").and_then(Value::as_table).is_some_and(|bgp| bgp.contains_key("peers")) {
                return Err("[bgp] peers: each of [[pod.networks]] has its own; move them there".to_owned());
            }
        }
        if ["control", "links"].iter().all(|key| !gateway.contains_key(*key)) {
            return Ok(Template { pod, fingerprint, gateway });
        }
        if gateway.contains_key("control") {
            return Err("[control]: the sockets are chosen for each pod; take it out".to_owned());
        }
        Err("[[links]]: they are made of [[pod.networks]], which say which addresses pods choose from".to_owned())
    }

    /// What a pod gets.
    pub(crate) fn plan(&self, choice: &Choice<'_>) -> Plan {
        let Choice { name, number, links, processors, directory } = choice;
        let path = |name: String| directory.join(name).display().to_string();
        let interfaces =
            if self.pod.networks.is_empty() { self.pod.vlans.len().max(1) } else { self.pod.networks.len() };
        let sockets: Vec<String> = (0..interfaces).map(|n| path(format!("{n}.sock"))).collect();
        let mac = links.first().map(|link| mac(*link)).unwrap_or_default();
        let tunnels = self.gateway.get("gateway").and_then(|section| section.get("addresses"));
        let tunnels: Vec<Value> = tunnels.and_then(Value::as_array).into_iter().flatten().cloned().collect();

        let mut settings = Vec::new();
        let mut pipelines: Vec<usize> = self.pod.networks.iter().map(|network| network.pipeline).collect();
        pipelines.sort_unstable();
        pipelines.dedup();
        if pipelines.is_empty() {
            pipelines.push(0);
        }
        for pipeline in pipelines {
            let (mut own, mut interfaces) = (Vec::new(), Vec::new());
            for (index, socket) in sockets.iter().enumerate() {
                let network = self.pod.networks.get(index);
                if network.is_some_and(|network| network.pipeline != pipeline) {
                    continue;
                }
                let vlan = network.map_or(self.pod.vlans.get(index).copied(), |network| network.vlan);
                let mut interface = Table::new();
                interface.extend(vlan.map(|vlan| ("vlan".to_owned(), i64::from(vlan).into())));
                interface.insert("socket".to_owned(), socket.clone().into());
                interfaces.push(Value::from(interface));
                if network.is_some() || index == 0 {
                    own.extend(self.addresses(links, index));
                }
            }
            own.extend(tunnels.iter().cloned());
            let mut table = Table::new();
            table.insert("name".to_owned(), Value::from(*name));
            table.insert("number".to_owned(), i64::from(*number).into());
            table.insert("cores".to_owned(), i64::from(self.pod.cores).into());
            table.insert("mac".to_owned(), mac.clone().into());
            table.insert("own".to_owned(), own.into());
            table.insert("interfaces".to_owned(), interfaces.into());
            table.extend(self.pod.pipeline.clone());
            settings.push((pipeline, table.to_string()));
        }

        let mut configuration = self.gateway.clone();
        let mut control = Table::new();
        control.insert("socket".to_owned(), path("gw.sock".to_owned()).into());
        configuration.insert("control".to_owned(), control.into());
        if let Some(section) = configuration.get_mut("gateway").and_then(Value::as_table_mut) {
            let processors: Vec<Value> = processors.iter().map(|number| Value::from(*number as i64)).collect();
            section.insert("pod".to_owned(), i64::from(*number).into());
            section.insert("cores".to_owned(), i64::from(self.pod.cores).into());
            section.insert("processors".to_owned(), processors.into());
            section.insert("mac".to_owned(), mac.into());
            if self.pod.networks.is_empty() {
                let sockets: Vec<Value> = sockets.iter().cloned().map(Value::from).collect();
                section.insert("interfaces".to_owned(), sockets.into());
                section.insert("link_addresses".to_owned(), self.addresses(links, 0).into());
            }
        }
        let networks = self.pod.networks.iter().zip(sockets).enumerate();
        let of_pod: Vec<Value> =
            networks.map(|(index, (network, socket))| network.link(socket, self.addresses(links, index))).collect();
        if !of_pod.is_empty() {
            configuration.insert("links".to_owned(), of_pod.into());
        }
        Plan { settings, configuration: configuration.to_string() }
    }

    /// A pod's addresses on one of its links.
    fn addresses(&self, links: &[Ipv4Addr], index: usize) -> Vec<Value> {
        let Some(link) = links.get(index) else { return Vec::new() };
        let links6 = self.pod.networks.get(index).map_or(self.pod.links6, |network| network.links6);
        let link6 = links6.map(|network| Ipv6Addr::from_bits(network.to_bits() | u128::from(link.to_bits())));
        let link6 = link6.map(|link| Value::from(link.to_string()));
        [Value::from(link.to_string())].into_iter().chain(link6).collect()
    }

    /// Whether pods have sessions of translation.
    pub(crate) fn translates(&self) -> bool {
        self.gateway.get("pools").and_then(Value::as_array).is_some_and(|pools| !pools.is_empty())
    }

    /// For each link the first address that no pod has; `own`: those that pods have.
    ///
    /// # Errors
    /// The number of a link that has none left.
    pub(crate) fn free_links(&self, own: &[IpAddr]) -> Result<Vec<Ipv4Addr>, usize> {
        let of_networks = self.pod.networks.iter().map(|network| &network.links);
        let only = self.pod.networks.is_empty().then_some(&self.pod.links);
        let free = |(number, links): (usize, &Vec<Ipv4Addr>)| {
            links.iter().copied().find(|link| !own.contains(&IpAddr::V4(*link))).ok_or(number)
        };
        only.into_iter().chain(of_networks).enumerate().map(free).collect()
    }

    /// The highest number of a pipeline that pods are behind.
    pub(crate) fn last_pipeline(&self) -> usize {
        self.pod.networks.iter().map(|network| network.pipeline).max().unwrap_or(0)
    }
}

impl Network {
    /// The section `[[links]]` of a pod.
    fn link(&self, socket: String, addresses: Vec<Value>) -> Value {
        let mut link = Table::new();
        link.insert("socket".to_owned(), socket.into());
        link.insert("pipeline".to_owned(), (self.pipeline as i64).into());
        link.insert("addresses".to_owned(), addresses.into());
        link.insert("on_link".to_owned(), self.on_link.iter().cloned().map(Value::from).collect::<Vec<_>>().into());
        link.extend(self.router.map(|router| ("router".to_owned(), router.to_string().into())));
        let peers = self.peers.as_ref().map(|peers| peers.iter().map(|peer| Value::from(peer.to_string())));
        link.extend(peers.map(|peers| ("peers".to_owned(), peers.collect::<Vec<_>>().into())));
        link.into()
    }
}

/// Whether pods have links, and each can choose its addresses.
fn check_networks(pod: &PodSection) -> Result<(), String> {
    if pod.networks.is_empty() && pod.links.is_empty() {
        return Err("[pod] links: none; give an address on the network of the switch for each pod".to_owned());
    }
    let has_one = !pod.links.is_empty() || pod.links6.is_some() || !pod.vlans.is_empty();
    if has_one && !pod.networks.is_empty() {
        return Err("[pod] vlans, links and links6: each of [[pod.networks]] has its own; move them there".to_owned());
    }
    if pod.networks.len() > MAX_INTERFACES {
        let count = pod.networks.len();
        return Err(format!("[[pod.networks]]: {count} of them; a pod has at most {MAX_INTERFACES} links"));
    }
    for (number, network) in pod.networks.iter().enumerate() {
        if network.links.is_empty() {
            return Err(format!("[[pod.networks]] {number}: links: none; give an address for each pod"));
        }
        if network.pipeline >= MAX_INTERFACES {
            let pipeline = network.pipeline;
            return Err(format!("[[pod.networks]] {number}: pipeline: {pipeline}; use 0 to {}", MAX_INTERFACES - 1));
        }
        let is_twice = |other: &Network| (other.pipeline, other.vlan) == (network.pipeline, network.vlan);
        if pod.networks[..number].iter().any(is_twice) {
            return Err(format!("[[pod.networks]] {number}: vlan: another one of the same pipeline has it, too"));
        }
    }
    let mut all6 = pod.networks.iter().filter_map(|network| network.links6).chain(pod.links6);
    match all6.find(|network| network.to_bits() as u32 != 0) {
        Some(network) => Err(format!(
            "[pod] links6: {network} is not a network of 96 bits such as fd01::; the last 32 bits are the pod's IPv4 \
             address"
        )),
        None => Ok(()),
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
            links: vec![[10, 1, 0, 12].into()],
            processors: vec![2, 3],
            directory: Path::new("/pods/vpc-1"),
        });
        let [(0, settings)] = &plan.settings[..] else { panic!("one pipeline") };
        let settings: Table = toml::from_str(settings).unwrap();
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
        assert_eq!(settings, toml::from_str(expected).unwrap(), "{settings}");
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
        let choice = Choice {
            name: "a",
            number: 1,
            links: vec![[10, 1, 0, 12].into()],
            processors: vec![],
            directory: Path::new("/"),
        };
        let plan = both.plan(&choice);
        let settings: Table = toml::from_str(&plan.settings[0].1).unwrap();
        assert_eq!(
            settings["own"],
            ["10.1.0.12", "fd01::a01:c", "10.0.0.1", "fd00::1"].map(Value::from).to_vec().into()
        );
        let configuration: Table = toml::from_str(&plan.configuration).unwrap();
        let links = &configuration["gateway"]["link_addresses"];
        assert_eq!(links, &["10.1.0.12", "fd01::a01:c"].map(Value::from).to_vec().into());
        let used: [IpAddr; 2] = [[10, 1, 0, 11].into(), [10, 0, 0, 1].into()];
        assert_eq!(template.free_links(&used), Ok(vec![[10, 1, 0, 12].into()]));
        assert_eq!(template.free_links(&[used[0], [10, 1, 0, 12].into()]), Err(0));
    }

    const NETWORKS: &str = r#"
[pod]
cores = 1
pipeline = { timeout_us = 200 }
[[pod.networks]]
vlan = 100
links = ["10.1.0.11", "10.1.0.12"]
on_link = ["10.1.0.0/24"]
router = "10.1.0.254"
peers = ["10.1.0.2"]
[[pod.networks]]
pipeline = 1
links = ["10.1.1.21", "10.1.1.22"]
links6 = "fd01::"
on_link = ["10.1.1.0/24"]
[gateway]
addresses = ["10.0.0.1"]
[bgp]
asn = 64512
"#;

    #[test]
    fn a_pod_with_links_behind_two_pipelines() {
        let template = Template::parse(NETWORKS).unwrap();
        assert_eq!(template.last_pipeline(), 1);
        let links = template.free_links(&[[10, 1, 0, 11].into()]).unwrap();
        assert_eq!(template.free_links(&[[10, 1, 1, 21].into(), [10, 1, 1, 22].into()]), Err(1));
        let directory = Path::new("/pods/a");
        let plan = template.plan(&Choice { name: "a", number: 1, links, processors: vec![], directory });
        let expected = [
            r#"own = ["10.1.0.12", "10.0.0.1"]
interfaces = [{ vlan = 100, socket = "/pods/a/0.sock" }]"#,
            r#"own = ["10.1.1.21", "fd01::a01:115", "10.0.0.1"]
interfaces = [{ socket = "/pods/a/1.sock" }]"#,
        ];
        for ((pipeline, settings), (number, expected)) in plan.settings.iter().zip(expected.iter().enumerate()) {
            let common = "name = \"a\"\nnumber = 1\ncores = 1\nmac = \"02:bf:0a:01:00:0c\"\ntimeout_us = 200\n";
            let expected: Table = toml::from_str(&format!("{common}{expected}")).unwrap();
            assert_eq!((*pipeline, toml::from_str::<Table>(settings).unwrap()), (number, expected));
        }
        let configuration: Table = toml::from_str(&plan.configuration).unwrap();
        let expected = r#"
control = { socket = "/pods/a/gw.sock" }
[gateway]
pod = 1
cores = 1
processors = []
mac = "02:bf:0a:01:00:0c"
addresses = ["10.0.0.1"]
[bgp]
asn = 64512
[[links]]
socket = "/pods/a/0.sock"
pipeline = 0
addresses = ["10.1.0.12"]
on_link = ["10.1.0.0/24"]
router = "10.1.0.254"
peers = ["10.1.0.2"]
[[links]]
socket = "/pods/a/1.sock"
pipeline = 1
addresses = ["10.1.1.21", "fd01::a01:115"]
on_link = ["10.1.1.0/24"]
"#;
        assert_eq!(configuration, toml::from_str(expected).unwrap(), "{}", plan.configuration);
    }

    #[test]
    fn networks_that_cannot_be() {
        for (from, to, error) in [
            ("cores = 1", "cores = 1\nvlans = [1]", "[pod] vlans, links and links6: each of [[pod.networks]]"),
            ("[\"10.1.1.21\", \"10.1.1.22\"]", "[]", "[[pod.networks]] 1: links: none"),
            ("pipeline = 1", "vlan = 100", "[[pod.networks]] 1: vlan: another one of the same pipeline"),
            ("pipeline = 1", "pipeline = 4", "[[pod.networks]] 1: pipeline: 4; use 0 to 3"),
            ("fd01::", "fd01::1", "[pod] links6: fd01::1 is not a network of 96 bits"),
            ("[bgp]", "router = \"10.1.0.254\"\n[bgp]", "[gateway] router: each of [[pod.networks]]"),
            ("asn = 64512", "asn = 64512\npeers = []", "[bgp] peers: each of [[pod.networks]]"),
            ("[bgp]", "[[links]]\n[bgp]", "[[links]]: they are made of [[pod.networks]]"),
        ] {
            let text = Template::parse(&NETWORKS.replacen(from, to, 1)).unwrap_err();
            assert!(text.starts_with(error), "{text}");
        }
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
