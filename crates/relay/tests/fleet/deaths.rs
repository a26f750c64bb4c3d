//! Hosts that die, and those of which it only seems so: real etcd, relays, agents and daemons.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::netns::Net;
use crate::services::{answers, serve};
use crate::world::World;
use crate::{eventually, ping};

/// When a host is dead here, seconds.
const AFTER: u64 = 5;
/// How long it may take then until hosts know.
const SOON: f64 = 15.0;

fn port(name: &str, host: &str, net: &Net) -> String {
    format!("- {{key: port/demo/{name}, subnets: [a], host: {host}, netns: {}}}\n", net.name())
}

fn network(hosts: usize, ports: &[String]) -> String {
    let hosts = (1..=hosts).map(|n| format!("- {{key: host/h{n}, addresses: [192.0.2.{n}]}}\n"));
    let base = "- key: vpc/demo/net\n- {key: subnet/demo/a, vpc: net, prefix: 10.0.0.0/24}\n".to_owned();
    hosts.chain([base]).chain(ports.iter().cloned()).collect()
}

fn address(world: &World, name: &str) -> String {
    let object = world.fleet_json(&format!("get port/demo/{name}"));
    object[0]["spec"]["addresses"][0].as_str().unwrap().to_owned()
}

/// The hosts that a relay takes for dead.
fn dead(world: &World, relay: usize) -> Vec<String> {
    let hosts = world.tool(relay).json("hosts").unwrap_or_default();
    let dead = hosts.as_array().unwrap().iter().filter(|host| host.get("dead_since_ms").is_some());
    dead.map(|host| host["name"].as_str().unwrap().to_owned()).collect()
}

/// What a relay says of hosts that have vanished together.
fn frozen(world: &World, relay: usize) -> Value {
    world.tool(relay).json("status").map_or(Value::Null, |status| status["frozen"].clone())
}

/// The addresses of the backends that a host has.
fn backends(world: &World, host: usize) -> BTreeSet<String> {
    let specs = world.hosts()[host].specs();
    let backends = specs.iter().filter_map(|spec| spec["backend"].as_array()).flatten();
    backends.map(|backend| backend["address"].as_str().unwrap().to_owned()).collect()
}

fn set(addresses: &[&String]) -> BTreeSet<String> {
    addresses.iter().map(|address| (*address).clone()).collect()
}

#[test]
#[ignore = "needs BIFROST_ETCD"]
fn hosts_die_alone_and_not_with_the_store_nor_in_a_crowd() {
    let mut world = World::in_etcd(6, 2);
    world.argue(&["--dead-after-s", &AFTER.to_string()]);
    world.run_all();
    let [client, web1, web2, moved] = ["client", "web1", "web2", "moved"].map(|role| world.guest(role));
    let ports = [port("client", "h1", &client), port("web1", "h2", &web1), port("web2", "h3", &web2)];
    world.apply(&network(6, &ports));
    let [one, two] = ["web1", "web2"].map(|name| address(&world, name));
    serve(&web1, &format!("{one}:80"), "one");
    serve(&web2, &format!("{two}:80"), "two");
    world.fleet(
        "add load_balancer/demo/web subnet=a address=10.0.0.100 port=80 \
         backends=[{guest=\"web1\"},{guest=\"web2\"}] --wait 20",
    );
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
    assert_eq!(answers(&client, "10.0.0.100:80"), names(&["one", "two"]), "{}", world.logs());
    // Agents of both relays.
    for host in [3, 4, 5] {
        world.hosts_mut()[host].kill_agent();
        world.start_agent_with(host, 1);
    }
    // A relay that is asked before an agent has gone takes the host's old connection for a live one until then.
    eventually(40.0, &format!("all are in sync: {}", world.fleet("hosts")), || {
        world.fleet_json("status")["hosts"]["in_sync"] == 6
    });

    // One host dies.
    let begun = Instant::now();
    world.hosts_mut()[1].kill_agent();
    world.hosts_mut()[1].kill_daemon();
    eventually(AFTER as f64 + SOON, "both relays take it for dead", || (0..2).all(|n| dead(&world, n) == ["h2"]));
    assert!(begun.elapsed() >= Duration::from_secs(AFTER), "{:?}", begun.elapsed());
    eventually(SOON, "its guest is no backend", || backends(&world, 0) == set(&[&two]));
    assert_eq!(answers(&client, "10.0.0.100:80"), names(&["two"]));
    assert!(world.hosts()[0].objects().contains(&format!("route 4096/{one}/32")), "its data plane may live");
    assert!(world.metrics(0).contains("\nbifrost_relay_hosts_dead 1"));
    assert!(world.fleet("hosts").contains("dead"));
    // Its port moves without it.
    world.fleet(&format!("set port/demo/web1 host=h4 netns={}", moved.name()));
    eventually(SOON, "it is reached there", || ping(&client, &one, 1) == 1);
    eventually(SOON, "its guest is a backend again", || backends(&world, 0) == set(&[&one, &two]));
    // It returns, and gives up what is no longer its own.
    world.hosts_mut()[1].start_daemon();
    world.start_agent(1);
    eventually(30.0, "it is alive", || (0..2).all(|n| dead(&world, n).is_empty()));
    eventually(30.0, "it has nothing", || world.hosts()[1].objects().is_empty());
    assert_eq!(ping(&client, &one, 5), 5);

    // No member of etcd runs for much longer than it takes to be dead.
    world.etcd.as_mut().unwrap().kill_all();
    let until = Instant::now() + Duration::from_secs(3 * AFTER);
    world.hosts_mut()[4].kill_agent();
    while Instant::now() < until {
        assert_eq!(backends(&world, 0), set(&[&one, &two]));
        assert_eq!(ping(&client, &two, 1), 1);
        std::thread::sleep(Duration::from_millis(200));
    }
    assert_eq!(dead(&world, 0), [] as [&str; 0]);
    world.etcd.as_mut().unwrap().start_all();
    eventually(30.0, "the relays follow it", || {
        (0..2).all(|n| world.tool(n).json("status").is_some_and(|status| status["in_sync"] == true))
    });
    let returned = Instant::now();
    eventually(60.0, "the one that has gone meanwhile is dead, and no other", || {
        let dead = dead(&world, 0);
        assert!(dead.is_empty() || dead == ["h5"] && returned.elapsed() >= Duration::from_secs(AFTER - 1), "{dead:?}");
        !dead.is_empty()
    });
    world.start_agent(4);
    eventually(30.0, "it is alive", || (0..2).all(|n| dead(&world, n).is_empty()));
    std::thread::sleep(Duration::from_secs(AFTER + 1));

    // Half of all hosts, with a backend among them.
    for host in [2, 4, 5] {
        world.hosts_mut()[host].kill_agent();
    }
    eventually(AFTER as f64 + SOON, "both relays take it for another trouble", || {
        (0..2).all(|relay| frozen(&world, relay) == json!({"vanished": 3, "of": 6}))
    });
    assert!(world.metrics(0).contains("\nbifrost_relay_hosts_vanished 3"));
    assert!(world.fleet("status").contains("3 of 6 hosts have vanished together"));
    std::thread::sleep(Duration::from_secs(AFTER));
    assert_eq!((dead(&world, 0), backends(&world, 0)), (Vec::new(), set(&[&one, &two])));
    // Two return: the third has died alone.
    world.start_agent(4);
    world.start_agent(5);
    eventually(30.0, "no longer", || (0..2).all(|relay| frozen(&world, relay) == Value::Null));
    eventually(30.0, "the third is dead", || dead(&world, 0) == ["h3"] && backends(&world, 0) == set(&[&one]));
}

/// Who wants it has routes withdrawn, too; a relay that begins again knows who is dead.
#[test]
fn routes_to_a_dead_host_are_withdrawn_if_that_is_wanted() {
    let mut world = World::new(2);
    world.argue(&["--dead-after-s", &AFTER.to_string(), "--withdraw-routes"]);
    world.run_all();
    let [a, b] = ["a", "b"].map(|role| world.guest(role));
    world.apply(&network(2, &[port("a", "h1", &a), port("b", "h2", &b)]));
    let to = address(&world, "b");
    let route = format!("route 4096/{to}/32");
    let has_route = |world: &World| world.hosts()[0].objects().contains(&route);
    assert_eq!(ping(&a, &to, 5), 5, "{}", world.logs());
    // Until a relay has noted that the host was ever there.
    std::thread::sleep(Duration::from_secs(2));
    world.hosts_mut()[1].kill_agent();
    eventually(AFTER as f64 + SOON, "the route is withdrawn", || !has_route(&world));
    assert_eq!(ping(&a, &to, 1), 0);
    world.kill_relay();
    world.start_relay();
    assert_eq!(dead(&world, 0), ["h2"]);
    eventually(20.0, "the agent has come back to the relay", || world.fleet_json("status")["hosts"]["in_sync"] == 1);
    assert!(!has_route(&world));
    world.start_agent(1);
    eventually(20.0, "the route is there", || has_route(&world));
    eventually(10.0, "guests reach each other", || ping(&a, &to, 1) == 1);
    assert_eq!(dead(&world, 0), [] as [&str; 0]);
}
