//! A summary of all objects for people: networks, their subnets, and where their ports are.

use std::collections::{BTreeMap, HashMap};

use crate::api::{Overview, SubnetOverview, VpcOverview};
use crate::key::Key;
use crate::model::Model;
use crate::spec::Spec;

impl Model {
    /// A summary of all objects. It takes time in proportion to their number.
    pub fn overview(&self) -> Overview {
        let mut overview = Overview::default();
        // By project and name; an object of a VPC that does not exist counts nowhere but in `objects`.
        let mut vpcs: BTreeMap<(&str, &str), VpcOverview> = BTreeMap::new();
        let mut vpc_of_subnet: HashMap<(&str, &str), (&str, usize)> = HashMap::new();
        for (key, stored) in self.iter() {
            *overview.objects.entry(key.kind()).or_default() += 1;
            match &stored.spec {
                // Kinds come in their order: a VPC before its subnets, and subnets before ports.
                Spec::Vpc(spec) => {
                    let vpc = VpcOverview::new(key.clone(), spec.vni);
                    vpcs.insert((key.project(), key.name()), vpc);
                }
                Spec::Subnet(spec) => {
                    let Some(vpc) = vpcs.get_mut(&(key.project(), spec.vpc.as_str())) else { continue };
                    vpc_of_subnet.insert((key.project(), key.name()), (spec.vpc.as_str(), vpc.subnets.len()));
                    let (name, prefix) = (key.name().to_owned(), spec.prefix);
                    vpc.subnets.push(SubnetOverview { name, prefix, ports: 0 });
                }
                Spec::Port(spec) => {
                    let mut first = None;
                    for name in &spec.subnets {
                        let Some((vpc, at)) = vpc_of_subnet.get(&(key.project(), name.as_str())) else { continue };
                        first.get_or_insert(*vpc);
                        if let Some(vpc) = vpcs.get_mut(&(key.project(), *vpc)) {
                            vpc.subnets[*at].ports += 1;
                        }
                    }
                    if let Some(vpc) = first.and_then(|vpc| vpcs.get_mut(&(key.project(), vpc))) {
                        vpc.ports += 1;
                        match vpc.hosts.get_mut(&spec.host) {
                            Some(ports) => *ports += 1,
                            None => drop(vpc.hosts.insert(spec.host.clone(), 1)),
                        }
                    }
                }
                Spec::Peering(spec) => {
                    let [one, other] = &spec.vpcs;
                    for (vpc, peer) in [(one, other), (other, one)] {
                        if let Some(vpc) = vpcs.get_mut(&(key.project(), vpc.as_str())) {
                            vpc.peers.push(peer.clone());
                        }
                    }
                }
                _ => {}
            }
        }
        overview.vpcs = vpcs.into_values().collect();
        overview
    }
}

impl VpcOverview {
    fn new(key: Key, vni: Option<u32>) -> Self {
        VpcOverview { key, vni, ports: 0, hosts: BTreeMap::new(), subnets: Vec::new(), peers: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::key::Kind;
    use crate::model::Stored;

    fn model(objects: &[(&str, serde_json::Value)]) -> Model {
        let mut model = Model::default();
        for (key, value) in objects {
            let key: Key = key.parse().unwrap();
            let spec = Spec::parse(key.kind(), value).unwrap();
            model.set(key, Stored { spec, generation: 1, committed_ms: 0 });
        }
        model
    }

    #[test]
    fn ports_are_counted_by_network_host_and_subnet() {
        let model = model(&[
            ("host/h1", json!({"addresses": ["192.0.2.1"]})),
            ("vpc/demo/net", json!({"vni": 4096})),
            ("vpc/demo/other", json!({"vni": 4097})),
            ("subnet/demo/a", json!({"vpc": "net", "prefix": "10.0.0.0/24"})),
            ("subnet/demo/b", json!({"vpc": "net", "prefix": "fd00::/64"})),
            ("port/demo/web", json!({"subnets": ["a", "b"], "host": "h1"})),
            ("port/demo/db", json!({"subnets": ["a"], "host": "h2"})),
            ("port/demo/lost", json!({"subnets": ["gone"], "host": "h2"})),
            ("peering/demo/p", json!({"vpcs": ["net", "other"]})),
        ]);
        let overview = model.overview();
        assert_eq!(overview.objects[&Kind::Port], 3);
        let [net, other] = &overview.vpcs[..] else { panic!("{overview:?}") };
        assert_eq!((net.vni, net.ports), (Some(4096), 2), "a port of two subnets is one port");
        assert_eq!(net.hosts, BTreeMap::from([("h1".to_owned(), 1), ("h2".to_owned(), 1)]));
        let subnets: Vec<_> = net.subnets.iter().map(|s| (s.name.as_str(), s.ports)).collect();
        assert_eq!(subnets, [("a", 2), ("b", 1)]);
        assert_eq!(
            (net.peers.as_slice(), other.peers.as_slice()),
            (&["other".to_owned()][..], &["net".to_owned()][..])
        );
        assert_eq!(other.ports, 0);
    }

    #[test]
    fn objects_of_a_network_that_is_gone_do_no_harm() {
        let model = model(&[
            ("subnet/demo/a", json!({"vpc": "gone", "prefix": "10.0.0.0/24"})),
            ("port/demo/web", json!({"subnets": ["a"], "host": "h1"})),
            ("peering/demo/p", json!({"vpcs": ["gone", "too"]})),
        ]);
        let overview = model.overview();
        assert!(overview.vpcs.is_empty());
        assert_eq!(overview.objects.values().sum::<u64>(), 3);
    }
}
