//! Ports whose devices have a single queue, although the configuration has one for each worker: the devices were made
//! for one worker, and the number of workers has grown in an upgrade. The kernel cannot add queues to them, and another
//! device would be noticed by the guest. One worker serves such a port.

mod state;

use std::collections::BTreeSet;
use std::sync::Arc;

use bifrost_control::config::{Config, PortKind};

use crate::translate;

/// The ports of these that would have several queues.
pub(crate) fn with_several<'a>(config: &Config, ports: impl Iterator<Item = &'a str>) -> BTreeSet<String> {
    let has_several = |name: &&str| {
        let port = config.port(name).filter(|port| port.kind == PortKind::Tap);
        port.is_some_and(|port| translate::tap(config, port).queues > 1)
    };
    ports.filter(has_several).map(str::to_owned).collect()
}

/// The configuration in which these ports have one queue.
pub(crate) fn with_one_queue(mut config: Arc<Config>, ports: &BTreeSet<String>) -> Arc<Config> {
    if config.ports.iter().any(|port| port.queues > 1 && ports.contains(&port.name)) {
        let of_ports = Arc::make_mut(&mut config).ports.iter_mut();
        of_ports.filter(|port| ports.contains(&port.name)).for_each(|port| port.queues = 1);
    }
    config
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_ports_with_such_devices_have_one_queue() {
        let port = |name: &str, n: u8| {
            format!(
                "[[port]]\nname = \"{name}\"\nvni = 1\nmac = \"02:00:00:00:00:0{n}\"\naddresses = [\"10.0.0.{n}/24\"]\n"
            )
        };
        let text = format!(
            "[host]\nname = \"a\"\n[underlay]\naddresses = [\"192.0.2.1\"]\n[workers]\ncount = 2\n[[vpc]]\nvni = 1\n{}{}{}",
            port("a", 1),
            port("b", 2),
            port("c", 3).replace("vni = 1\n", "vni = 1\nqueues = 1\n")
        );
        let config = Arc::new(Config::parse(&text, "t").unwrap());
        let single = with_several(&config, ["a", "c", "gone"].into_iter());
        assert_eq!(single, BTreeSet::from(["a".to_owned()]));
        let queues = |config: &Config| config.ports.iter().map(|port| port.queues).collect::<Vec<_>>();
        assert_eq!(queues(&config), [2, 2, 1]);
        let changed = with_one_queue(Arc::clone(&config), &single);
        assert_eq!(queues(&changed), [1, 2, 1]);
        assert!(changed.is_served_by_one(&changed.ports[0]) && !changed.is_served_by_one(&changed.ports[1]));
        assert!(Arc::ptr_eq(&with_one_queue(Arc::clone(&config), &BTreeSet::new()), &config));
    }
}
