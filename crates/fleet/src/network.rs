//! The objects of a network of many hosts.

use bifrost_intent::{Change, Op};
use serde_json::{Value, json};

use crate::cli::Size;

/// The group that every port has.
pub(crate) const GROUP: &str = "security_group/demo/all";

/// An object to be set.
pub(crate) fn set(key: &str, spec: Value) -> Change {
    // Keys are made here.
    let key = key.parse().unwrap_or_else(|e| panic!("{e}"));
    Change { op: Op::Set, key, spec: Some(spec), if_generation: None }
}

/// An object to be deleted.
pub(crate) fn delete(key: &str) -> Change {
    Change { op: Op::Delete, spec: None, ..set(key, Value::Null) }
}

impl Size {
    pub(crate) fn vpcs(&self) -> usize {
        self.ports.div_ceil(self.ports_per_vpc.max(1)).max(1)
    }

    /// The initial host of a port; ports of a VPC are on different hosts.
    pub(crate) fn host_of(&self, port: usize) -> usize {
        (port / self.vpcs() + port * 7) % self.hosts
    }

    /// All objects, in an order in which they can be created batch by batch.
    pub(crate) fn objects(&self) -> Vec<Change> {
        let mut all = Vec::with_capacity(self.hosts + self.ports + 2 * self.vpcs() + 1);
        for n in 0..self.hosts {
            let address = format!("198.{}.{}.{}", 18 + (n >> 16 & 1), n >> 8 & 255, n & 255);
            all.push(set(&host(n), json!({"addresses": [address]})));
        }
        for n in 0..self.vpcs() {
            all.push(set(&format!("vpc/demo/v{n}"), json!({})));
            all.push(set(&format!("subnet/demo/s{n}"), json!({"vpc": format!("v{n}"), "prefix": "10.0.0.0/8"})));
        }
        all.push(group(0));
        all.extend((0..self.ports).map(|n| self.port(n, self.host_of(n))));
        all
    }

    /// A port on a host.
    pub(crate) fn port(&self, n: usize, host: usize) -> Change {
        let subnet = format!("s{}", n % self.vpcs());
        let spec = json!({"subnets": [subnet], "host": format!("h{host}"), "netns": format!("n{n}"), "security_groups": ["all"]});
        set(&port_key(n), spec)
    }
}

pub(crate) fn host(n: usize) -> String {
    format!("host/h{n}")
}

pub(crate) fn port_key(n: usize) -> String {
    format!("port/demo/p{n}")
}

/// The group of all ports, with a rule that contains a number.
pub(crate) fn group(number: usize) -> Change {
    let first = 1 + number % 60_000;
    set(GROUP, json!({"ingress": [{"protocol": "tcp", "ports": [first]}]}))
}
