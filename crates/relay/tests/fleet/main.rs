//! A network of three hosts from one place: the relay, agents and daemons as programs, in network namespaces.

#![allow(clippy::unwrap_used, missing_docs)]

mod browser;
mod dashboards;
mod deaths;
mod enroll;
mod etcd;
mod flow_logs;
mod learning;
mod matrix;
#[path = "../../../bifrostd/tests/common/netns.rs"]
#[allow(dead_code, unreachable_pub)]
mod netns;
/// What `traffic` needs to make pings.
mod raw {
    /// The Internet checksum (RFC 1071).
    pub(crate) fn checksum(bytes: &[u8]) -> u16 {
        let word = |pair: &[u8]| u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or(0));
        let sum: u32 = bytes.chunks(2).map(word).sum();
        let folded = (sum & 0xffff) + (sum >> 16);
        !(((folded & 0xffff) + (folded >> 16)) as u16)
    }
}
mod prometheus;
mod roles;
mod services;
mod traces;
#[path = "../../../bifrostd/tests/common/traffic.rs"]
#[allow(dead_code, unreachable_pub)]
mod traffic;
mod world;

use std::time::{Duration, Instant};

use netns::Net;
use serde_json::Value;
use world::World;

/// What a newcomer does: five commands, and containers reach each other.
#[test]
fn five_commands_make_a_network() {
    let mut world = World::new(3);
    world.run_all();
    let (web, db) = (world.guest("web"), world.guest("db"));
    for command in [
        "add host/h1 addresses=192.0.2.1",
        "add host/h2 addresses=192.0.2.2",
        "add vpc/demo/net",
        "add subnet/demo/a vpc=net prefix=10.0.0.0/24",
    ] {
        world.fleet(command);
    }
    world.fleet(&format!("add port/demo/web subnets=a host=h1 netns={}", web.name()));
    // The fifth beside the two hosts and a port each.
    world.fleet(&format!("add port/demo/db subnets=a host=h2 netns={} --wait 20", db.name()));
    assert_eq!(ping(&web, "10.0.0.3", 20), 20, "{}", world.logs());
    assert_eq!(ping(&db, "10.0.0.1", 5), 5, "the router answers");
    let why = world.fleet_json("why port/demo/db");
    let hosts: Vec<_> = why["hosts"].as_array().unwrap().iter().map(|h| (&h["host"], &h["state"])).collect();
    assert_eq!(hosts, [(&Value::from("h1"), &Value::from("in force")), (&Value::from("h2"), &Value::from("in force"))]);

    let metrics = world.metrics(0);
    assert!(metrics.contains("\nbifrost_relay_hosts_known 2"), "{metrics}");

    // A group: only its port is open.
    world.fleet("add security_group/demo/closed egress=[]");
    world.fleet("set port/demo/db security_groups=closed --wait 20");
    assert_eq!(ping(&web, "10.0.0.3", 3), 0, "nothing lets pings in");
    world.fleet("set security_group/demo/closed ingress=[{protocol=\"icmp\",from=[\"group:closed\"]}] --wait 20");
    assert_eq!(ping(&web, "10.0.0.3", 3), 0, "it is not a member");
    world.fleet("set port/demo/web security_groups=closed --wait 20");
    // Its own group has no egress rule: it may begin nothing.
    assert_eq!(ping(&web, "10.0.0.3", 3), 0);
    world.fleet("set security_group/demo/closed egress= --wait 20");
    assert_eq!(ping(&web, "10.0.0.3", 10), 10, "{}", world.logs());

    // A port moves to another host with its address.
    let moved = world.guest("moved");
    world.fleet("add host/h3 addresses=192.0.2.3");
    world.fleet(&format!("set port/demo/db host=h3 netns={} --wait 20", moved.name()));
    assert_eq!(ping(&web, "10.0.0.3", 10), 10, "{}", world.logs());
    assert!(!db.has_device("eth0"), "it was left behind");

    world.fleet("delete port/demo/web port/demo/db --wait 20");
    // bifrostd removes devices in the background.
    eventually(20.0, "the devices are gone", || !web.has_device("eth0") && !moved.has_device("eth0"));
    for host in world.hosts() {
        assert_eq!(host.objects(), Vec::<String>::new(), "{} keeps what it does not need", host.name());
    }
    // What bifrostd refuses is told, and holds up nothing else.
    let other = world.guest("other");
    let refused = world.tool(0).run("add port/demo/bad subnets=a host=h1 netns=/etc/hostname --wait 20");
    let refused = refused.unwrap_err();
    assert!(refused.contains("refused on h1") && refused.contains("/etc/hostname"), "{refused}");
    world.fleet("set vpc/demo/net dhcp_lease_s=1000 --wait 20");
    world.fleet(&format!("add port/demo/good subnets=a host=h1 netns={}", other.name()));
    eventually(20.0, "the good port is there", || other.has_device("eth0"));
}

/// The relay, and with it the store, goes away and comes back.
#[test]
fn traffic_needs_no_relay() {
    let mut world = World::new(2);
    world.run_all();
    let (web, db) = (world.guest("web"), world.guest("db"));
    world.apply(&format!(
        "- {{key: host/h1, addresses: [192.0.2.1]}}\n- {{key: host/h2, addresses: [192.0.2.2]}}\n- key: vpc/demo/net\n\
         - {{key: subnet/demo/a, vpc: net, prefix: 10.0.0.0/24}}\n\
         - {{key: port/demo/web, subnets: [a], host: h1, netns: {}}}\n- {{key: port/demo/db, subnets: [a], host: h2, netns: {}}}\n",
        web.name(),
        db.name()
    ));
    assert_eq!(ping(&web, "10.0.0.3", 10), 10, "{}", world.logs());
    world.kill_relay();
    assert_eq!(ping(&web, "10.0.0.3", 100), 100, "without a relay");
    // Daemons and agents begin again without it, too.
    world.hosts_mut()[0].kill_daemon();
    world.hosts_mut()[0].start_daemon();
    world.hosts_mut()[0].kill_agent();
    world.start_agent(0);
    eventually(20.0, "the network works again", || ping(&web, "10.0.0.3", 1) == 1);
    assert_eq!(ping(&web, "10.0.0.3", 50), 50);

    // What is deleted while a host is cut off is gone once it is back; and what came is there.
    world.start_relay();
    world.fleet("status");
    world.hosts_mut()[1].kill_agent();
    let new = world.guest("new");
    world.fleet("delete port/demo/db");
    world.fleet(&format!("add port/demo/new subnets=a host=h2 netns={}", new.name()));
    assert!(db.has_device("eth0"), "nobody has told the host");
    world.kill_relay();
    world.start_relay();
    world.start_agent(1);
    let address = world.fleet_json("get port/demo/new")[0]["spec"]["addresses"][0].as_str().unwrap().to_owned();
    assert_eq!(address, "10.0.0.4", "that of the deleted one rests");
    eventually(20.0, "the deleted port is gone", || !db.has_device("eth0"));
    eventually(20.0, "the new one works", || ping(&web, &address, 1) == 1);
    eventually(20.0, "all is in sync", || {
        let hosts = world.fleet_json("hosts");
        hosts.as_array().unwrap().iter().all(|h| h["connected"] == true && h["applied"] == h["changed"])
    });
}

/// An agent is what its certificate says.
#[test]
fn a_host_is_not_another() {
    let mut world = World::new(2);
    world.start_relay();
    world.fleet("add host/h1 addresses=192.0.2.1");
    world.fleet("add host/h2 addresses=192.0.2.2");
    world.start_daemons();
    // With the certificate of h2.
    let log = world.start_agent_as(0, "h2");
    eventually(20.0, "it is refused", || {
        std::fs::read_to_string(&log).unwrap_or_default().contains("the certificate is not that of host")
    });
    let hosts = world.fleet_json("hosts");
    assert!(hosts.as_array().unwrap().iter().all(|host| host["connected"] == false), "{hosts}");
    // Without one.
    let log = world.start_agent_without_tls(1);
    std::thread::sleep(Duration::from_secs(2));
    let hosts = world.fleet_json("hosts");
    assert!(hosts.as_array().unwrap().iter().all(|host| host["connected"] == false), "{hosts}");
    assert!(!std::fs::read_to_string(&log).unwrap().is_empty());
}

fn eventually(seconds: f64, what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs_f64(seconds);
    while !holds() {
        assert!(Instant::now() < deadline, "not within {seconds} s: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Sends `count` pings; gives how many are answered.
fn ping(from: &Net, to: &str, count: u32) -> u32 {
    traffic::ping(from, to, count, 56)
}
