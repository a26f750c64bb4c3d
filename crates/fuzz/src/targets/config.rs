//! The configuration file: any text gives a valid configuration, or errors with a position.

use bifrost_control::{Config, ConfigDiff};

pub(crate) fn run(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    match Config::parse(&text, "bifrostd.toml") {
        Ok(config) => sound(&config),
        Err(errors) => {
            let said = errors.to_string();
            assert!(said.contains("bifrostd.toml"), "an error without a position: {said}");
        }
    }
}

fn sound(config: &Config) {
    assert!(!config.underlay.addresses.is_empty());
    assert!((1..=32).contains(&config.workers.count));
    assert!(config.workers.cpus.is_empty() || config.workers.cpus.len() == config.workers.count);
    for peer in &config.peers {
        assert_eq!(config.peer(&peer.name), Some(peer), "names are unique");
        let paths = config.paths(peer);
        assert_eq!(paths.count(), usize::from(config.underlay.paths));
    }
    for port in &config.ports {
        assert!(config.vpc(port.vni).is_some(), "the VPC exists");
        assert!((1..=config.workers.count).contains(&port.queues));
    }
    for peering in &config.peerings {
        assert!(config.vpc(peering.vni).is_some() && config.vpc(peering.to_vni).is_some());
        assert!(peering.vni != peering.to_vni && peering.prefix.trunc() == peering.prefix);
        assert!(config.peerings.iter().any(|back| (back.vni, back.to_vni) == (peering.to_vni, peering.vni)));
    }
    if let Some(log) = &config.flow_log {
        assert!(log.json.is_some() || log.collector.is_some());
        assert!(log.vpcs.iter().all(|vni| config.vpc(*vni).is_some()));
        assert!(log.ports.iter().all(|name| config.port(name).is_some()));
    }
    for log in &config.flow_logs {
        assert!(log.log.json.is_some() || log.log.collector.is_some());
        assert!(log.log.vpcs.iter().all(|vni| config.vpc(*vni).is_some()));
        assert!(config.flow_logs.iter().filter(|other| other.name == log.name).count() == 1);
    }
    for balancer in &config.load_balancers {
        assert!(config.vpc(balancer.vni).is_some() && !balancer.backends.is_empty());
        assert!(balancer.backends.iter().all(|backend| backend.address.is_ipv4() == balancer.address.is_ipv4()));
    }
    for route in config.routes.iter() {
        assert!(config.peer(&route.peer).is_some() && config.vpc(route.vni).is_some());
        assert_eq!(route.prefix.trunc(), route.prefix);
    }
    assert!(ConfigDiff::between(config, config).is_ok_and(|d| d.is_empty()));
}
